//! The `vshunt` program. If its name begins with `vshunt-blk` or `vshunt-net`, it runs that program
//! instead.

use std::process::ExitCode;

fn main() -> ExitCode {
    vshunt::main()
}
