//! Image locks, compatible with those of QEMU's file-posix driver. So vshunt and QEMU keep each
//! other from an image in use.
//!
//! These are open-file-description locks on single bytes of the image. A user of the image holds a
//! read lock on byte `100 + bit` for each permission that it uses, and on byte `200 + bit` for each
//! permission that it denies to others. Then it asks whether another open file holds a byte that
//! conflicts with one of these. The locks end when the file is closed.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use vshunt_types::error::{Error, Kind, Result};

/// First byte of the permissions in use.
const USED_BASE: i64 = 100;
/// First byte of the permissions that are denied to others.
const DENIED_BASE: i64 = 200;
/// The kernel may write to the image for a FUSE mount (`passthrough.rs`). QEMU does not use this
/// byte.
const PASSTHROUGH: i64 = 300;

/// A process holds a byte from here on: that of its process id. QEMU does not use these bytes.
const PROCESS_BASE: i64 = 1 << 20;
/// The kernel's limit of process ids.
const PROCESSES: i64 = 1 << 22;
/// Processes that are looked at, at most.
const HOLDERS_MAX: usize = 64;

/// How long a process waits for the lock of another one.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
/// The same if all holders were killed. A killed process holds its locks until its io_uring has
/// completed its operations, which may take long on a slow disk. The wait also orders its last
/// writes before those of its successor.
const PATIENCE_KILLED: Duration = Duration::from_secs(if cfg!(test) { 6 } else { 60 });
const RETRY: Duration = Duration::from_millis(10);
/// A wait that is longer than this is reported. The locks of most killed processes end before that.
const NOTICE: Duration = Duration::from_millis(500);

/// How an image is used. The values are the bit numbers of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Permission {
    /// Reads return what was written.
    ConsistentRead = 0,
    Write = 1,
    // 2 is "write unchanged", which vshunt neither uses nor denies.
    Resize = 3,
}
use Permission::{ConsistentRead, Resize, Write};

/// Takes the locks of a writer or reader of the image. Blocks for a while if another process holds
/// a conflicting lock.
///
/// # Errors
/// `Busy`, with the conflicting lock; `Io` for errors of the system.
pub fn lock(file: &File, path: &Path, readonly: bool) -> Result<()> {
    lock_telling(file, path, readonly, &mut |patience| {
        let by = match patience == PATIENCE_KILLED {
            true => "a killed process that has requests in flight",
            false => "another process",
        };
        tracing::warn!("{} is in use by {by}; waiting up to {} s for it", path.display(), patience.as_secs());
    })
}

/// Does what [`lock`] does. `waits` is called once if another process holds a conflicting lock for
/// some time, with the limit of the whole wait.
///
/// # Errors
/// Those of [`lock`].
pub fn lock_telling(file: &File, path: &Path, readonly: bool, waits: &mut dyn FnMut(Duration)) -> Result<()> {
    let start = Instant::now();
    let mut told = false;
    loop {
        match try_lock(file, path, readonly) {
            Err(e) if e.kind() == Kind::Busy => {
                // Two processes that wait and keep their locks would wait for each other.
                release(file);
                let waited = start.elapsed();
                let patience = if waited >= NOTICE && were_killed(file) { PATIENCE_KILLED } else { PATIENCE };
                if waited >= patience {
                    return Err(e);
                }
                if !told && waited >= NOTICE {
                    told = true;
                    waits(patience);
                }
                std::thread::sleep(RETRY);
            }
            result => return result,
        }
    }
}

/// Takes the same locks without a check for conflicts. The caller holds them already by another
/// descriptor, which it releases afterwards.
///
/// # Errors
/// `Io` for errors of the system.
pub(super) fn take_over(file: &File, path: &Path, readonly: bool) -> Result<()> {
    take(file, path, readonly).map(drop)
}

fn refused(path: &Path, e: io::Error) -> Error {
    Error::io(
        format_args!(
            "cannot lock {} (locking=off does without, where the file system has no locks)",
            path.display()
        ),
        e,
    )
}

/// The permissions that a user of an image denies to others.
const DENIED: [Permission; 2] = [Write, Resize];

/// Takes the locks of the permissions that a writer or reader uses and denies. Returns those that
/// it uses.
fn take(file: &File, path: &Path, readonly: bool) -> Result<&'static [Permission]> {
    // Write before resize, since its message is clearer.
    let used: &[Permission] = if readonly { &[ConsistentRead] } else { &[Write, Resize, ConsistentRead] };
    let used_bytes = used.iter().map(|&p| USED_BASE + p as i64);
    for at in used_bytes.chain(DENIED.iter().map(|&p| DENIED_BASE + p as i64)) {
        hold(file, at).map_err(|e| refused(path, e))?;
    }
    hold(file, PROCESS_BASE + i64::from(std::process::id())).map_err(|e| refused(path, e))?;
    Ok(used)
}

fn try_lock(file: &File, path: &Path, readonly: bool) -> Result<()> {
    // All locks are taken before the first check. Of two processes that start together at least one
    // then sees the other.
    let used = take(file, path, readonly)?;
    let refused = |e| refused(path, e);
    let shown = path.display();
    for p in DENIED {
        if held_by_another(file, USED_BASE + p as i64).map_err(refused)? {
            return Err(Error::busy(format!(
                "{shown} is in use by another process (its {} lock is held); stop it, or use locking=off if both may \
                 really use the image at once",
                p.name()
            )));
        }
    }
    for &p in used {
        if held_by_another(file, DENIED_BASE + p as i64).map_err(refused)? {
            let readonly_helps = if p == ConsistentRead { "" } else { "readonly=on or " };
            return Err(Error::busy(format!(
                "{shown} is in use by another process that lets no other process {} it (its shared {} lock is held); stop \
                 it, or use {readonly_helps}locking=off if both may really use the image at once",
                p.verb(),
                p.name()
            )));
        }
    }
    Ok(())
}

impl Permission {
    fn name(self) -> &'static str {
        match self {
            ConsistentRead => "consistent read",
            Write => "write",
            Resize => "resize",
        }
    }

    fn verb(self) -> &'static str {
        match self {
            ConsistentRead => "read",
            Write => "write to",
            Resize => "resize",
        }
    }
}

/// Returns whether all processes that say which they are by a lock have ended or are ending. False
/// if there are none, as for QEMU, or if it cannot be told.
fn were_killed(file: &File) -> bool {
    let (mut at, mut found) = (PROCESS_BASE, 0);
    let end = PROCESS_BASE + PROCESSES;
    while found < HOLDERS_MAX && at < end {
        let Ok(Some(next)) = first_held(file, at, end - at) else { break };
        if !is_ending((next - PROCESS_BASE) as i32) {
            return false;
        }
        (at, found) = (next + 1, found + 1);
    }
    found > 0
}

/// Returns whether a process has ended, or is about to. False if that cannot be told.
fn is_ending(pid: i32) -> bool {
    /// `PF_EXITING` of the kernel's `include/linux/sched.h`.
    const EXITING: u64 = 4;
    let Some(process) = rustix::process::Pid::from_raw(pid) else { return false };
    if matches!(rustix::thread::sched_getaffinity(Some(process)), Err(rustix::io::Errno::SRCH)) {
        return true;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program is in brackets, and may have any characters.
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    matches!(fields.first(), Some(&"Z" | &"X")) || flags & EXITING != 0
}

/// Marks the image as used by FUSE passthrough, until this open file is closed.
pub(super) fn mark_passthrough(file: &File) -> io::Result<()> {
    hold(file, PASSTHROUGH)
}

/// Returns whether another open file marks the image as used by FUSE passthrough; false if that is
/// unknown.
pub(super) fn has_passthrough(file: &File) -> bool {
    held_by_another(file, PASSTHROUGH).unwrap_or(false)
}

fn one_byte(kind: i32, at: i64) -> libc::flock {
    // SAFETY: a flock has only integers, for which zero is valid. (OFD locks require l_pid = 0.)
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Takes a read lock on one byte. Several open files may hold it.
fn hold(file: &File, at: i64) -> io::Result<()> {
    let lock = one_byte(libc::F_RDLCK, at);
    // SAFETY: F_OFD_SETLK reads a struct flock, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Releases all locks of the open file.
pub fn release(file: &File) {
    let all = libc::flock { l_len: 0, ..one_byte(libc::F_UNLCK, 0) };
    // SAFETY: F_OFD_SETLK reads a struct flock, which outlives the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &all) };
}

/// Returns whether another open file holds a lock on one byte: a write lock would fail.
fn held_by_another(file: &File, at: i64) -> io::Result<bool> {
    first_held(file, at, 1).map(|held| held.is_some())
}

/// Returns the first of `len` bytes from `at` on which another open file holds a lock.
fn first_held(file: &File, at: i64, len: i64) -> io::Result<Option<i64>> {
    let mut lock = libc::flock { l_len: len, ..one_byte(libc::F_WRLCK, at) };
    // SAFETY: F_OFD_GETLK reads and writes a struct flock, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_start.max(at))),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
