//! Signals as messages. All threads block them, and one thread waits for them.
//!
//! [`block`] must run on the main thread before other threads start, because threads inherit the
//! mask. A signal that was ignored when the program started (nohup, a background job of a script)
//! stays ignored.
//!
//! The kernel sends other signals for what one call on a file may not do. Their default action ends
//! or stops the whole process, and with it the devices of all guests. They are ignored, so that the
//! call fails, or succeeds, instead:
//!
//! | signal | sent for | then | ignored by |
//! | --- | --- | --- | --- |
//! | SIGXFSZ | a file that would exceed the limit of its size (`ulimit -f`, `LimitFSIZE=`) | EFBIG | all programs ([`ignore_file_limit`]) |
//! | SIGPIPE | a pipe or socket that nothing reads | EPIPE | all programs (Rust's runtime) |
//! | SIGTTOU | a line of the log, from the background of a terminal with `stty tostop` | it is written | the daemon ([`ignore_terminal`]) |
//! | SIGTTIN | a read from a terminal, from its background | EIO | the daemon ([`ignore_terminal`]) |

use std::mem::MaybeUninit;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use vshunt_types::error::{Error, Result};

use super::log;
use crate::qmp::Stop;

/// Signals that end the daemon. SIGHUP is one of them because the daemon does not reload its
/// configuration.
const ENDING: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signals that were blocked.
pub(crate) struct Blocked(libc::sigset_t);

/// Makes a write that would make a file longer than the process may make files (RLIMIT_FSIZE) fail
/// with EFBIG. Called before other threads start.
pub(crate) fn ignore_file_limit() {
    ignore(libc::SIGXFSZ);
}

fn ignore(signal: libc::c_int) {
    // SAFETY: no handler runs: the kernel drops a signal that is ignored.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Lets the daemon continue when it uses its terminal from the background.
pub(super) fn ignore_terminal() {
    [libc::SIGTTOU, libc::SIGTTIN].into_iter().for_each(ignore);
}

/// Blocks the signals that end the daemon.
pub(crate) fn block() -> Result<Blocked> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the local set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in ENDING.into_iter().filter(|s| !is_ignored(*s)) {
        // SAFETY: the set is local and was initialised above; `ENDING` has only signal numbers.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: sigemptyset initialised the set.
    let set = unsafe { set.assume_init() };
    // SAFETY: `set` is initialised and outlives the call. The pointer to the old mask may be null.
    let rc = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
    if rc != 0 {
        return Err(Error::io("cannot block signals", std::io::Error::from_raw_os_error(rc)));
    }
    Ok(Blocked(set))
}

/// A second signal within this time is taken for a repetition of the first one (timeout(1) sends
/// two).
const REPEATED_SIGNAL_TIME: Duration = Duration::from_secs(1);

/// Starts the thread that sends the first signal as a [`Stop`]. A later signal, while the daemon
/// ends, ends the process at once.
pub(crate) fn forward(blocked: Blocked, stop: Sender<Stop>) -> Result<()> {
    let run = move || {
        let mut first: Option<Instant> = None;
        loop {
            let mut signal = 0;
            // SAFETY: the set is initialised and `signal` is a local variable. Both outlive the
            // call.
            if unsafe { libc::sigwait(&blocked.0, &mut signal) } != 0 {
                return;
            }
            match first {
                None => {
                    first = Some(Instant::now());
                    let _ = stop.send(Stop::Signal(signal));
                }
                Some(then) if then.elapsed() < REPEATED_SIGNAL_TIME => {}
                Some(_) => {
                    log::notice(
                        "vshunt",
                        "told to end twice and ends at once; sockets and mounts may be left",
                    );
                    std::process::exit(1);
                }
            }
        }
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(run)
        .map(drop)
        .map_err(|e| Error::io("cannot start the signal thread", e))
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: no new action is given; `action` is writable and of the type that the call fills.
    let rc = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: all bytes zero is a valid sigaction, and the call may have filled it.
    rc == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
