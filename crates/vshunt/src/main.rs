//! The `vshunt` program; started under a name that begins with `vshunt-blk` or `vshunt-net`, it is
//! that program instead.

use std::process::ExitCode;

fn main() -> ExitCode {
    vshunt::main()
}
