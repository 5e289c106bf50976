//! Ending a mount at a path: by umount2(2), or by fusermount3 for those who may not call it.
//!
//! Called by the rest of [`mount`](super), which made sure that the mount is the one meant. Between that look and the
//! end there is a moment in which another may mount over it; no system call unmounts by id.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;

use super::helper;
use crate::error::{Error, Result};

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
    let file = format!("/sys/fs/fuse/connections/{minor}/abort");
    if let Err(e) = fs::write(&file, "1") {
        tracing::debug!("cannot abort by {file}: {e}");
    }
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
            crate::error::Kind::Io,
            format!("cannot unmount {shown} ({} says: {said}); as root: umount {shown}", helper::NAME),
        )),
    }
}

fn umount2(point: &Path, flags: i32) -> rustix::io::Result<()> {
    let point = std::ffi::CString::new(point.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: a C string that lives over the call.
    match unsafe { libc::umount2(point.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } {
        0 => Ok(()),
        _ => Err(super::last_errno()),
    }
}
