//! Unmounts the mount at a path: by umount2(2), or by fusermount3 without the permission for
//! umount2(2).
//!
//! The rest of [`mount`](super) calls it, after it has checked which mount is at the path. Another
//! process may mount over it between the check and the unmount: no system call unmounts by id.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

use super::helper;

/// Where fusectl is mounted.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Ways to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Fails while the mount is in use.
    Soft,
    /// Aborts the connection first: tasks that wait for the server, or send a request later, get an
    /// error.
    Abort,
    /// Removes it from the name space. It exists as long as a process has a file of it open.
    Detach,
}

/// Result of an unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The mount is not there, and may never have been.
    Ended,
    /// It is still there, because it is in use.
    InUse,
}

/// Unmounts the mount at `point`, whose device is `device`.
///
/// # Errors
/// The system's; `Unsupported` without the permission and without fusermount3.
pub(super) fn end(point: &Path, device: (u32, u32), how: How) -> Result<Outcome> {
    let flag = match how {
        How::Soft => 0,
        // The kernel (fuse_umount_begin) aborts the connection and then unmounts as without the
        // flag.
        How::Abort => libc::MNT_FORCE,
        How::Detach => libc::MNT_DETACH,
    };
    match umount2(point, flag) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(Outcome::Ended),
        Err(Errno::BUSY) => Ok(Outcome::InUse),
        Err(Errno::PERM) if how == How::Abort => {
            abort(device);
            Ok(Outcome::InUse)
        }
        Err(Errno::PERM) => by_helper(point, how == How::Detach),
        Err(e) => Err(Error::io(format!("cannot unmount {}", point.display()), e.into())),
    }
}

/// Aborts the connection of the FUSE mount with this device through fusectl, which the owner of the
/// mount may use. If fusectl is not mounted nothing happens: the connection then ends with its
/// descriptors.
pub(super) fn abort((_, minor): (u32, u32)) {
    // The number of the connection is the device number. A mount without a device has major number
    // 0.
    let written = open_mounted(minor).and_then(|mut file| file.write_all(b"1"));
    if let Err(e) = written {
        tracing::debug!("cannot abort by {CONNECTIONS}/{minor}/abort: {e}");
    }
}

/// Aborts the connection of `session`, whose mount has this device, unless it has ended.
///
/// # Errors
/// The system's.
pub(super) fn sever(session: &OwnedFd, (_, minor): (u32, u32)) -> io::Result<()> {
    let ended = || {
        let mut fds = [PollFd::new(session, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    };
    if ended() {
        return Ok(());
    }
    let mut file = match open_mounted(minor) {
        Ok(file) => file,
        Err(_) => sandbox::errand(|| open_unmounted(&format!("{minor}/abort")))??,
    };
    // Numbers are used again: the file belongs to this connection only if the connection has not
    // ended by now.
    if ended() { Ok(()) } else { file.write_all(b"1") }
}

/// Opens the file of fusectl that aborts a connection, for writing. The launcher does it: a
/// Landlock rule for the folder would apply to the file system that is there when the rule is made,
/// and fusectl may be mounted later.
fn open_mounted(minor: u32) -> io::Result<fs::File> {
    sandbox::errand(|| fs::File::options().write(true).open(format!("{CONNECTIONS}/{minor}/abort")))?
}

/// Opens a file of fusectl for writing, where fusectl is not mounted.
fn open_unmounted(path: &str) -> io::Result<fs::File> {
    let checked = |rc: libc::c_long| match i32::try_from(rc) {
        Ok(rc) if rc >= 0 => Ok(rc),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: fsopen reads a C string, and takes no other memory.
    let context = checked(unsafe { libc::syscall(libc::SYS_fsopen, c"fusectl".as_ptr(), 1) })?;
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    let context = unsafe { OwnedFd::from_raw_fd(context) };
    // FSCONFIG_CMD_CREATE of linux/mount.h.
    let create = 6;
    let none = std::ptr::null::<u8>();
    // SAFETY: fsconfig takes no memory for this command.
    checked(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), create, none, none, 0) })?;
    // SAFETY: fsmount takes no memory.
    let root = checked(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0) })?;
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    let root = unsafe { OwnedFd::from_raw_fd(root) };
    Ok(openat(root, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

fn by_helper(point: &Path, lazy: bool) -> Result<Outcome> {
    let shown = point.display();
    let Some(program) = helper::find() else {
        return Err(Error::unsupported(format!(
            "cannot unmount {shown}: that needs CAP_SYS_ADMIN or the program {}, and neither is there; as root: umount \
             {shown}",
            helper::NAME
        )));
    };
    match helper::unmount(&program, point, lazy) {
        Ok(()) => Ok(Outcome::Ended),
        Err(said) if said.contains("resource busy") => Ok(Outcome::InUse),
        Err(said) => Err(Error::new(
            vshunt_types::error::Kind::Io,
            format!("cannot unmount {shown} ({} says: {said}); as root: umount {shown}", helper::NAME),
        )),
    }
}

fn umount2(point: &Path, flags: i32) -> rustix::io::Result<()> {
    let point = std::ffi::CString::new(point.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let umount = || {
        // SAFETY: umount2 reads a C string, which the closure borrows until the call returns.
        match unsafe { libc::umount2(point.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } {
            0 => Ok(()),
            _ => Err(super::last_errno()),
        }
    };
    sandbox::errand(umount).map_err(|_| Errno::AGAIN)?
}
