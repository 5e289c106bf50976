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

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vshunt_types::error::{Error, Result};

use super::ending;
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
        return Err(Error::io("cannot block signals", io::Error::from_raw_os_error(rc)));
    }
    Ok(Blocked(set))
}

/// A second signal within this time is taken for a repetition of the first one (timeout(1) sends
/// two).
const REPEATED_SIGNAL_TIME: Duration = Duration::from_secs(1);

/// How long a daemon that is told to end may still look for its images and mountpoints.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Limits how long signals stay pending, until it is dropped. No thread may exist then that has not
/// the restrictions of the sandbox.
pub(super) struct Watch {
    /// Readable when the watch ends.
    over: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

/// Starts to watch the signals that end the daemon, without taking them. If one is pending for
/// [`LOOK_LIMIT`], storage does not answer, and the process ends.
pub(super) fn watch(blocked: &Blocked) -> Result<Watch> {
    let cannot = |e: io::Error| Error::io("cannot watch signals", e);
    // SAFETY: `Blocked` has an initialised set, which outlives the call.
    let fd = unsafe { libc::signalfd(-1, &blocked.0, libc::SFD_CLOEXEC) };
    if fd < 0 {
        return Err(cannot(io::Error::last_os_error()));
    }
    // SAFETY: signalfd returned a new descriptor, which nothing else owns.
    let pending = unsafe { OwnedFd::from_raw_fd(fd) };
    let over = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| cannot(e.into()))?;
    let ended = over.try_clone().map_err(cannot)?;
    let run = move || {
        // The limit begins with a signal.
        is_readable(&[&pending, &ended], None);
        if !is_readable(&[&ended], Some(LOOK_LIMIT)) {
            ending::at_once(
                "was told to end while it looks for its images and mountpoints, which do not answer",
            );
        }
    };
    let thread = thread::Builder::new().name("starting".into()).spawn(run).map_err(cannot)?;
    Ok(Watch { over, thread: Some(thread) })
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.over, &1u64.to_ne_bytes());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Waits until one of these descriptors is readable, for `limit` at most. Returns whether one is.
fn is_readable(fds: &[&OwnedFd], limit: Option<Duration>) -> bool {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    let limit = limit.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 });
    poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0)
}

/// What a second signal does, when the first one is not obeyed yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Process {
    /// Ends the daemon at once. The first one has started the limit of its end.
    Daemon,
    /// Ends the command.
    Command,
}

/// Starts the thread that sends the first signal as a [`Stop`]. A later signal ends the process at
/// once.
pub(crate) fn forward(blocked: Blocked, stop: Sender<Stop>, process: Process) -> Result<()> {
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
                    if process == Process::Daemon {
                        ending::begin();
                    }
                    let _ = stop.send(Stop::Signal(signal));
                }
                Some(then) if then.elapsed() < REPEATED_SIGNAL_TIME => {}
                Some(_) if process == Process::Daemon => ending::at_once("was told to end twice"),
                Some(_) => std::process::exit(1),
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
