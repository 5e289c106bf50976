//! A mark on an image below an overlay, so that it is not served by its old name by mistake: the extended attribute
//! `user.vshunt.overlay`, the overlay's path. Who writes to that image changes what the overlay shows.
//!
//! Called by control threads; a daemon that is killed leaves marks as they are.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Kind, Result};

use super::qcow2::backing_of;
use super::{open_image, own_mounts};

const OVERLAY: &str = "user.vshunt.overlay";
/// Of an overlay whose contents were brought into the image below, with that image's path: what it shows is no disk's any
/// more once that image is written.
const COMMITTED: &str = "user.vshunt.committed";

/// Of an image below an overlay, once a commit to it has begun: it is no snapshot any more.
const COMMITTING: &str = "user.vshunt.committing";

/// Whether an image may be opened. What is below an overlay may be read only; a mark whose overlay is gone, or stands on
/// another image by now, is removed.
///
/// # Errors
/// `Busy`, with the overlay's name and what to do.
pub fn check(path: &Path, readonly: bool) -> Result<()> {
    own_mounts::check(path)?;
    let shown = path.display();
    if let Some(below) = read(path, COMMITTED) {
        return Err(Error::busy(format!(
            "{shown} was committed to {}, where its disk went on: use that, and remove {shown} ('setfattr -x {COMMITTED} \
             {shown}' if you know that nothing was written there since)",
            below.display()
        )));
    }
    let Some(overlay) = read(path, OVERLAY).filter(|_| !readonly) else { return Ok(()) };
    let over = overlay.display();
    match stands_on(&overlay, path) {
        // A commit that ended between its two marks: all is here.
        Ok(true) if read(&overlay, COMMITTED).is_some_and(|below| same(&below, path)) => {
            remove(path, OVERLAY)
                .map_err(|e| Error::io(format_args!("cannot remove {OVERLAY} of {shown}"), e))
        }
        Ok(true) if read(path, COMMITTING).is_some() => Err(Error::busy(format!(
            "{shown} is below {over}, which has what a commit that did not come to its end has not brought here: use {over} \
             (format=qcow2), and commit again"
        ))),
        Ok(true) => Err(Error::busy(format!(
            "{shown} has a snapshot's overlay {over}, which writes to it would destroy: use {over} (format=qcow2), or add \
             readonly=on; or remove {over} to go back to the snapshot ('setfattr -x {OVERLAY} {shown}' if you know that \
             it stands on another image)"
        ))),
        Ok(false) => {
            tracing::warn!(
                "{shown} is marked as having an overlay {over}, which does not stand on it any more: unmarked"
            );
            remove(path, OVERLAY)
                .map_err(|e| Error::io(format_args!("cannot remove {OVERLAY} of {shown}"), e))
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && sandbox::bounds_paths() => Err(Error::new(
            Kind::Io,
            format!(
                "{shown} is marked as having an overlay {over}, which cannot be looked at: {e}. If its mode permits that, the \
                 sandbox does not: start the daemon with --allow-path={} ('setfattr -x {OVERLAY} {shown}' only if you know \
                 that there is no overlay)",
                folder_of(&overlay).display()
            ),
        )),
        Err(e) => Err(Error::io(
            format_args!(
                "{shown} is marked as having an overlay {over}, which cannot be looked at ('setfattr -x {OVERLAY} {shown}' \
                 if you know that there is none)"
            ),
            e,
        )),
    }
}

/// Whether there is such an overlay and it names that image as the one below it.
fn stands_on(overlay: &Path, base: &Path) -> io::Result<bool> {
    let file = match open_image(overlay, false) {
        Ok(file) => file,
        // Removed, which gives the snapshot up. An empty folder, or none, is rather a file system that is not mounted.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return if has_others(overlay)? { Ok(false) } else { Err(e) };
        }
        Err(e) => return Err(e),
    };
    match backing_of(overlay, file)? {
        Some(named) => Ok(same(&named, base)),
        None => Ok(false),
    }
}

/// Whether there are files where that one is missing.
///
/// # Errors
/// The folder is closed to this thread.
fn has_others(missing: &Path) -> io::Result<bool> {
    match std::fs::read_dir(folder_of(missing)) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(e),
        Err(_) => Ok(false),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether two paths lead to one file.
pub(super) fn same(a: &Path, b: &Path) -> bool {
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino(), a.rdev()) == (b.dev(), b.ino(), b.rdev()),
        _ => false,
    }
}

/// Says of an image that it is below an overlay; on stable storage when it returns. False where its file system has no
/// such marks.
///
/// # Errors
/// The system's.
pub(super) fn put_overlay(base: &File, overlay: &Path) -> io::Result<bool> {
    put(base, OVERLAY, overlay)
}

/// Takes that back.
///
/// # Errors
/// The system's; that there is none is no error.
pub(super) fn take_overlay(base: &File) -> io::Result<()> {
    let mut taken = false;
    for name in [OVERLAY, COMMITTING] {
        taken |= take(base, name)?;
    }
    if taken { base.sync_all() } else { Ok(()) }
}

/// Says of an image that a commit to it has begun; on stable storage when it returns.
///
/// # Errors
/// The system's; that its file system has no marks is no error.
pub(super) fn put_committing(base: &Path, overlay: &Path) -> io::Result<()> {
    put(&open_image(base, false)?, COMMITTING, overlay).map(drop)
}

/// Whether a commit to it has begun.
pub(super) fn is_committing(base: &Path) -> bool {
    read(base, COMMITTING).is_some()
}

/// Says of an overlay that it was committed to the image below; on stable storage when it returns.
///
/// # Errors
/// The system's; that its file system has no marks is no error.
pub(super) fn put_committed(overlay: &Path, below: &Path) -> io::Result<()> {
    put(&open_image(overlay, false)?, COMMITTED, below).map(drop)
}

/// Takes that back.
///
/// # Errors
/// The system's; that there is none is no error.
pub(super) fn take_committed(overlay: &Path) -> io::Result<()> {
    let overlay = open_image(overlay, false)?;
    if take(&overlay, COMMITTED)? { overlay.sync_all() } else { Ok(()) }
}

/// Removes a mark. False if there is none.
fn take(file: &File, name: &str) -> io::Result<bool> {
    match rustix::fs::fremovexattr(file.as_fd(), name) {
        Ok(()) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        // Of a device node, which has none, and of a file that nobody may change, which may have one.
        Err(Errno::PERM) if rustix::fs::fgetxattr(file.as_fd(), name, &mut [0u8; 0]).is_err() => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn put(file: &File, name: &str, path: &Path) -> io::Result<bool> {
    match rustix::fs::fsetxattr(file.as_fd(), name, path.as_os_str().as_bytes(), XattrFlags::empty()) {
        Ok(()) => file.sync_all().map(|()| true),
        // Of device nodes, too.
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn read(path: &Path, name: &str) -> Option<PathBuf> {
    let mut buf = vec![0; libc::PATH_MAX as usize];
    // Where there are no marks there is none.
    let n = rustix::fs::getxattr(path, name, &mut buf).ok()?;
    Some(PathBuf::from(OsStr::from_bytes(&buf[..n])))
}

fn remove(path: &Path, name: &str) -> io::Result<()> {
    rustix::fs::removexattr(path, name).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

    use super::*;

    #[test]
    fn a_mark_that_stays_is_an_error() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (file, path) = (image.as_file(), image.path());
        let marked = put_overlay(file, Path::new("/over")).unwrap();
        put_committed(path, Path::new("/below")).unwrap();
        let flags = ioctl_getflags(file).unwrap_or(IFlags::empty());
        if !marked || ioctl_setflags(file, flags | IFlags::IMMUTABLE).is_err() {
            eprintln!(
                "skip a_mark_that_stays_is_an_error: no marks or no immutable files here, or not for this user"
            );
            return;
        }
        let (overlay, committed) = (take_overlay(file), take_committed(path));
        ioctl_setflags(file, flags).unwrap();
        for taken in [overlay, committed] {
            assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        for _ in 0..2 {
            take_overlay(file).unwrap();
            take_committed(path).unwrap();
            assert!(read(path, OVERLAY).is_none() && read(path, COMMITTED).is_none());
        }
    }

    #[test]
    fn where_there_can_be_no_mark_there_is_none_to_take() {
        take_overlay(&File::open("/dev/null").unwrap()).unwrap();
    }
}
