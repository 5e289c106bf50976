//! The limit of the daemon's end. A thread ends the process if something that the end waits for
//! does not answer: a disk, the target of a job, a mount.

use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use vshunt_daemon::{Daemon, END_LIMIT};

use super::log;

/// The exit status of a daemon that ended at once, with something that had not ended. The units of
/// the package know it: such a daemon is not started again, since it was told to end.
const ENDED_AT_ONCE: i32 = 4;

/// The daemon, once there is one.
static DAEMON: OnceLock<Weak<Daemon>> = OnceLock::new();
/// The limit runs.
static BEGUN: OnceLock<()> = OnceLock::new();

/// Says which daemon ends, for the message.
pub(super) fn know(daemon: &Arc<Daemon>) {
    let _ = DAEMON.set(Arc::downgrade(daemon));
}

/// Starts the limit, if it does not run yet. The daemon was told to end.
pub(super) fn begin() {
    if BEGUN.set(()).is_err() {
        return;
    }
    let run = || {
        thread::sleep(END_LIMIT);
        let left = DAEMON.get().and_then(Weak::upgrade).map(|daemon| daemon.unended()).unwrap_or_default();
        let what = if left.is_empty() { "storage that does not answer".to_owned() } else { left.join(", ") };
        at_once(&format!("was told to end {} s ago and still waits for {what}", END_LIMIT.as_secs()));
    };
    // A daemon that gets no thread has no limit, and a second signal ends it.
    if let Err(e) = thread::Builder::new().name("ending".into()).spawn(run) {
        tracing::warn!("cannot start the thread that limits the end of the daemon: {e}");
    }
}

/// Ends the process, and says why.
pub(super) fn at_once(why: &str) -> ! {
    log::notice("vshunt", &format!("{why}; ends at once; sockets and mounts may be left"));
    std::process::exit(ENDED_AT_ONCE);
}

/// Ends the process when all has ended but these jobs.
pub(super) fn without(jobs: &[String]) -> ! {
    log::notice("vshunt", &format!("ended without job {}", jobs.join(", ")));
    std::process::exit(ENDED_AT_ONCE);
}
