//! Files of which control clients have passed descriptors: commands of clients may open these by
//! name.
//!
//! Landlock only takes rights away from a thread. So commands run on threads of their own, which
//! the launcher makes. They may open the configured paths and the files that were passed by then.
//! The threads of a job inherit that.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{OFlags, fcntl_getfl};

use super::landlock::{Granted, Ruleset};
use super::{RUNNING, ThreadKind, enter_under, errand};
use vshunt_types::sync::Locked;

#[derive(Default)]
struct Current {
    /// Number of the last change of the list.
    change: u64,
    list: Vec<Granted>,
    /// Permits the configured paths and the list. None while the list is empty.
    ruleset: Option<Arc<Ruleset>>,
}

/// The files that are granted.
#[derive(Default)]
pub(super) struct Grants {
    /// Held for a look or an exchange.
    now: Mutex<Current>,
}

impl Grants {
    fn lock(&self) -> MutexGuard<'_, Current> {
        // No statement leaves the list in an invalid state.
        self.now.locked()
    }

    /// The descriptors granted now.
    pub(super) fn list(&self) -> Vec<Granted> {
        self.lock().list.clone()
    }
}

/// Replaces the list of files that commands may open besides the configured paths. `change` is the
/// number of the list: a list that is older than the one in force has no effect.
pub fn set_granted(change: u64, list: Vec<Granted>) {
    let Some((running, rules)) = RUNNING.get().and_then(|r| Some((r, r.rules.as_deref()?))) else { return };
    // An errand, because control threads may not make rulesets.
    let ruleset = match list.is_empty() || running.process.is_none() {
        true => Ok(None),
        false => errand(|| Ruleset::new(rules, &list)).and_then(|made| made),
    };
    let ruleset = ruleset.unwrap_or_else(|e| {
        tracing::warn!("sandbox: files that clients pass cannot be allowed: {e}");
        None
    });
    let mut now = running.granted.lock();
    if change <= now.change {
        return;
    }
    let next = Current { change, list, ruleset: ruleset.map(Arc::new) };
    let before = std::mem::replace(&mut *now, next);
    drop(now);
    // Closing a descriptor may wait for its file system, so it happens without the lock.
    drop(before);
}

/// Runs a client's command on a thread that may open the files that clients have passed, and waits
/// for its end.
///
/// # Errors
/// The system has no thread, or the thread cannot be confined. The command was not run.
pub fn as_command<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(running) = RUNNING.get() else { return Ok(work()) };
    let Some(ruleset) = running.granted.lock().ruleset.clone() else { return Ok(work()) };
    errand(move || {
        enter_under(running, ThreadKind::Control, Some(&ruleset))?;
        Ok(work())
    })?
}

/// Opens the file of a descriptor again, even if the calling thread may not open it by its name.
/// The access mode must be one that the descriptor has, so the caller gains no right.
///
/// # Errors
/// `EACCES` for another access mode; the system's.
pub fn reopen(file: &File, write: bool) -> io::Result<File> {
    let open =
        || OpenOptions::new().read(true).write(write).open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    match open() {
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
            let mode = fcntl_getfl(file)? & (OFlags::RWMODE | OFlags::PATH);
            match mode == OFlags::RDWR || (!write && mode == OFlags::RDONLY) {
                true => errand(open)?,
                false => Err(e),
            }
        }
        opened => opened,
    }
}
