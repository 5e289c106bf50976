//! Both ends of a network's export, for tests where no guest can be: a front end that plays the
//! guest's driver on the socket, and the host's side of the tap by a packet socket. Prints a line a
//! case, `ok NAME` or `not ok NAME: why`.
//!
//! `net_guest SOCKET IFNAME PAIRS SEED [user] [packed] [plain] [control] [traffic]`: the export has
//! so many queue pairs, mac=52:54:00:12:34:56 and mtu=9000. user: workers of the daemon serve it,
//! else the kernel; packed: the guest has packed rings; plain: rings without event index; control:
//! the control queue is the back-end's; traffic: frames both ways until stdin says stop. As root.
//! vhost-net does not run everywhere: tests/kernel-net starts this in a VM.

mod cases;
mod control;
mod guest;
mod host;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;

use guest::Kind;

/// What went wrong, in words.
type Outcome<T = ()> = Result<T, String>;

/// Words for whatever says what it is.
fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, ifname, pairs, seed, words @ ..] = &args[..] else {
        eprintln!("net_guest SOCKET IFNAME PAIRS SEED [user] [packed] [plain] [control] [traffic]");
        return ExitCode::from(2);
    };
    let has = |word: &str| words.iter().any(|w| w == word);
    let kind =
        Kind { user: has("user"), packed: has("packed"), plain: has("plain"), control: has("control") };
    let (Ok(pairs), Ok(seed)) = (pairs.parse(), seed.parse()) else {
        eprintln!("PAIRS and SEED are numbers");
        return ExitCode::from(2);
    };
    let socket = PathBuf::from(socket);
    let failed = match has("traffic") {
        true => traffic::run(&socket, ifname, pairs, kind),
        false => cases::run(&socket, ifname, pairs, kind, seed),
    };
    match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
