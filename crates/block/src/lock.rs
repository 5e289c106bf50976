//! Image locks, as QEMU's file-posix driver takes them, so that vshunt and QEMU keep each other off an image just as
//! two QEMUs do.
//!
//! Open-file-description byte-range locks on the image itself. A user of the image holds a read lock on byte
//! `100 + bit` for each permission it uses and on byte `200 + bit` for each permission that it does not grant others.
//! It then asks whether anybody else holds the byte that contradicts each of these. The locks go with the descriptor.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use vshunt_types::error::{Error, Kind, Result};

/// First byte of the permissions in use.
const USED_BASE: i64 = 100;
/// First byte of the permissions not granted to others.
const DENIED_BASE: i64 = 200;
/// Our own, where QEMU has none: the kernel may write to the image by itself (`lend.rs`).
const LENT: i64 = 300;

/// How long another's lock is waited for. A process that was killed goes on holding its locks until its io_uring has
/// ended what was under way. Waiting for that is also what keeps its last writes off those of its successor.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
const RETRY: Duration = Duration::from_millis(10);

/// What an image is used for; the values are bit numbers of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Permission {
    /// What is read is what was written.
    ConsistentRead = 0,
    Write = 1,
    // 2 is "write unchanged", which vshunt neither uses nor denies.
    Resize = 3,
}
use Permission::{ConsistentRead, Resize, Write};

/// Takes the locks of a writer or reader of the image, or says who is in the way. Blocks for a while if somebody is.
pub fn lock(file: &File, path: &Path, readonly: bool) -> Result<()> {
    let start = Instant::now();
    loop {
        match try_lock(file, path, readonly) {
            Err(e) if e.kind() == Kind::Busy && start.elapsed() < PATIENCE => {
                // Ours go meanwhile: two that wait for each other would both wait in vain.
                release(file);
                std::thread::sleep(RETRY);
            }
            result => return result,
        }
    }
}

/// Takes these locks without asking whether anybody is in the way: for who holds as much of the same image by another
/// descriptor, and lets go of that afterwards.
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

/// What nobody is granted.
const DENIED: [Permission; 2] = [Write, Resize];

/// Holds what a writer or reader uses and denies; the former comes back.
fn take(file: &File, path: &Path, readonly: bool) -> Result<&'static [Permission]> {
    // Write before resize: it makes the better message.
    let used: &[Permission] = if readonly { &[ConsistentRead] } else { &[Write, Resize, ConsistentRead] };
    let used_bytes = used.iter().map(|&p| USED_BASE + p as i64);
    for at in used_bytes.chain(DENIED.iter().map(|&p| DENIED_BASE + p as i64)) {
        hold(file, at).map_err(|e| refused(path, e))?;
    }
    Ok(used)
}

fn try_lock(file: &File, path: &Path, readonly: bool) -> Result<()> {
    // First all are taken, then all are asked for: of two that begin at once at least one sees the other.
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
                "{shown} is in use by another process that lets nobody else {} it (its shared {} lock is held); stop \
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

/// Marks the image as lent, for as long as this open file lives.
pub(super) fn mark_lent(file: &File) -> io::Result<()> {
    hold(file, LENT)
}

/// Whether another open file marks the image as lent. False where that cannot be told.
pub(super) fn is_lent(file: &File) -> bool {
    held_by_another(file, LENT).unwrap_or(false)
}

fn one_byte(kind: i32, at: i64) -> libc::flock {
    // SAFETY: flock is plain integers, for which zero is valid; l_pid has to be 0 for OFD locks.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Takes a read lock on one byte: any number may hold it.
fn hold(file: &File, at: i64) -> io::Result<()> {
    let lock = one_byte(libc::F_RDLCK, at);
    // SAFETY: F_OFD_SETLK reads a struct flock, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets go of all locks on the file.
pub(super) fn release(file: &File) {
    let all = libc::flock { l_len: 0, ..one_byte(libc::F_UNLCK, 0) };
    // SAFETY: F_OFD_SETLK reads a struct flock, which outlives the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &all) };
}

/// Whether a write lock on one byte would fail: somebody else holds a lock of any kind there.
fn held_by_another(file: &File, at: i64) -> io::Result<bool> {
    let mut lock = one_byte(libc::F_WRLCK, at);
    // SAFETY: F_OFD_GETLK reads and writes a struct flock, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
