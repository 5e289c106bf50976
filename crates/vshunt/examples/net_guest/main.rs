//! Both ends of a network's export, for tests where no guest can be: a front-end that plays the guest's driver on the
//! socket, and the host's side of the tap by a packet socket. Prints a line a case, `ok NAME` or `not ok NAME: why`.
//!
//! `net_guest SOCKET IFNAME PAIRS SEED`: the export has so many queue pairs, mac=52:54:00:12:34:56 and mtu=9000. As root.
//! Written for vhost-net, which does not run everywhere: tests/kernel-net starts it in a VM.

mod cases;
mod guest;
mod host;

use std::path::PathBuf;
use std::process::ExitCode;

/// What went wrong, in words.
type Outcome<T = ()> = Result<T, String>;

/// Words for whatever says what it is.
fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, ifname, pairs, seed] = &args[..] else {
        eprintln!("net_guest SOCKET IFNAME PAIRS SEED");
        return ExitCode::from(2);
    };
    let (Ok(pairs), Ok(seed)) = (pairs.parse(), seed.parse()) else {
        eprintln!("PAIRS and SEED are numbers");
        return ExitCode::from(2);
    };
    match cases::run(&PathBuf::from(socket), ifname, pairs, seed) {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
