//! Files that control clients have passed descriptors of: their commands may open them by name.
//!
//! Landlock only ever takes rights away from a thread. So commands run on threads of their own, which the launcher makes, under
//! the configured paths and what was passed by then. A job's threads inherit that.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{OFlags, fcntl_getfl};

use super::landlock::{Granted, Ruleset};
use super::{RUNNING, ThreadKind, enter_under, errand};

#[derive(Default)]
struct Now {
    /// The last change of the list that is in force.
    change: u64,
    list: Vec<Granted>,
    /// The configured paths and the list; none while the list is empty.
    ruleset: Option<Arc<Ruleset>>,
}

#[derive(Default)]
pub(super) struct Grants {
    /// Guards what is granted; held for a look or an exchange.
    now: Mutex<Now>,
}

impl Grants {
    fn lock(&self) -> MutexGuard<'_, Now> {
        // Whole between any two statements.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is granted now.
    pub(super) fn list(&self) -> Vec<Granted> {
        self.lock().list.clone()
    }
}

/// Replaces the list of what commands may open besides the configured paths. `change` counts the lists: an older one than that
/// in force is too late, and has no effect.
pub fn set_granted(change: u64, list: Vec<Granted>) {
    let Some((running, rules)) = RUNNING.get().and_then(|r| Some((r, r.rules.as_deref()?))) else { return };
    // An errand, since control threads make no rulesets.
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
    let next = Now { change, list, ruleset: ruleset.map(Arc::new) };
    let before = std::mem::replace(&mut *now, next);
    drop(now);
    // Closes descriptors, which may wait for their file system.
    drop(before);
}

/// Runs a client's command where it may open what clients have passed, and waits for its end.
///
/// # Errors
/// The system has no thread for it, or the thread cannot be confined; it was not run.
pub fn as_command<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(running) = RUNNING.get() else { return Ok(work()) };
    let Some(ruleset) = running.granted.lock().ruleset.clone() else { return Ok(work()) };
    errand(move || {
        enter_under(running, ThreadKind::Control, Some(&ruleset))?;
        Ok(work())
    })?
}

/// Opens the file of a descriptor once more, although the calling thread may not open it by its name. The access mode is one that
/// the descriptor has, so that this gives no right that is not there already.
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
