//! `vshunt-bench`: loads a vhost-user-blk or vhost-user-net socket, or the kernel's vhost-blk, the way a guest would.

fn main() -> std::process::ExitCode {
    vshunt_bench::cli::main()
}
