//! `vshunt-bench`: puts load on a vhost-user-blk or vhost-user-net socket, or on the kernel's
//! vhost-blk, as a guest does.

fn main() -> std::process::ExitCode {
    vshunt_bench::cli::main()
}
