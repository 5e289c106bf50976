//! Ending a mount at a path: by umount2(2), or by fusermount3 for those who may not call it.
//!
//! Called by the rest of [`mount`](super), which made sure that the mount is the one meant. Between that look and the
//! end there is a moment in which another may mount over it; no system call unmounts by id.

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

/// How hard a mount is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Not while it is in use.
    Soft,
    /// The connection is aborted: whoever waits for the server, or asks later, gets an error.
    Abort,
    /// Out of the name space; it lives on for as long as somebody has a file of it open.
    Detach,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Not mounted there any more, or was not in the first place.
    Ended,
    /// Still there, for it is in use.
    InUse,
}

/// Ends the mount at `point`, whose device is `device`.
pub(super) fn end(point: &Path, device: (u32, u32), how: How) -> Result<Outcome> {
    let flag = match how {
        How::Soft => 0,
        // fuse_umount_begin() aborts the connection, then it is an umount as any other.
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

/// Aborts the connection of the FUSE mount with this device through fusectl, which is open to the mount's owner.
/// Where fusectl is not mounted nothing happens: the connection then ends with its descriptors.
pub(super) fn abort((_, minor): (u32, u32)) {
    // The connection's number is the device number, and that of a mount without a device has no major part.
    let written = open_mounted(minor).and_then(|mut file| file.write_all(b"1"));
    if let Err(e) = written {
        tracing::debug!("cannot abort by {CONNECTIONS}/{minor}/abort: {e}");
    }
}

/// Aborts the connection of `session`, a mount's with this device, unless it has ended.
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
    // Numbers are used again: only if ours has not ended by now is the file that of our connection.
    if ended() { Ok(()) } else { file.write_all(b"1") }
}

/// Opens the file of fusectl that aborts a connection, for writing. By the launcher: a Landlock rule for the folder would be
/// of the file system that is there when the rule is made, and fusectl may be mounted later.
fn open_mounted(minor: u32) -> io::Result<fs::File> {
    sandbox::errand(|| fs::File::options().write(true).open(format!("{CONNECTIONS}/{minor}/abort")))?
}

/// A file of fusectl where that is mounted nowhere, for writing.
fn open_unmounted(path: &str) -> io::Result<fs::File> {
    let checked = |rc: libc::c_long| if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) };
    // SAFETY: a C string; the kernel gives a new descriptor, which is ours.
    let context =
        unsafe { OwnedFd::from_raw_fd(checked(libc::syscall(libc::SYS_fsopen, c"fusectl".as_ptr(), 1))?) };
    // FSCONFIG_CMD_CREATE of linux/mount.h.
    let create = 6;
    let none = std::ptr::null::<u8>();
    // SAFETY: this command takes no memory.
    checked(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), create, none, none, 0) })?;
    // SAFETY: a call without memory; a new descriptor, as above.
    let root = unsafe {
        OwnedFd::from_raw_fd(checked(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0))?)
    };
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
        // SAFETY: a C string that lives over the call.
        match unsafe { libc::umount2(point.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } {
            0 => Ok(()),
            _ => Err(super::last_errno()),
        }
    };
    sandbox::errand(umount).map_err(|_| Errno::AGAIN)?
}
