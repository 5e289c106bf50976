//! Extended attributes that mark the images of a chain of overlays, and of a mirror.
//!
//! A write to a backing image would change what its overlay shows, and the image that a disk has
//! left lacks its latest writes. The attributes keep vshunt from serving such an image by mistake.
//! Called by control threads. A daemon that is killed leaves the
//! attributes as they are.
//!
//! | attribute | image | value |
//! | --- | --- | --- |
//! | `user.vshunt.overlay` | a backing image | path of the overlay |
//! | `user.vshunt.committing` | a backing image, from the start of a commit to it | path of the overlay |
//! | `user.vshunt.committed` | an overlay after its commit | path of the backing image |
//! | `user.vshunt.mirroring` | the target of a mirror until it is complete | where the disk is |
//! | `user.vshunt.moved` | the image that a disk has left by a mirror | where the disk is |

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

use super::file_storage::backing_of;
use super::own_mounts;
use super::path_fd::open_image;

/// Marks a backing image.
const OVERLAY: &str = "user.vshunt.overlay";
/// Marks an overlay that was committed. Once its backing image is written, the overlay no longer
/// shows the contents of a disk.
const COMMITTED: &str = "user.vshunt.committed";
/// Marks a backing image from the start of a commit to it. It is no snapshot then.
const COMMITTING: &str = "user.vshunt.committing";
/// Marks the target of a mirror as incomplete.
const MIRRORING: &str = "user.vshunt.mirroring";
/// Marks an image that lacks the latest writes of its disk, which a mirror has moved.
const MOVED: &str = "user.vshunt.moved";

/// Checks whether an image may be opened. A backing image may only be read. A mark is removed if
/// its overlay is gone or has another backing image by now.
///
/// # Errors
/// `Busy`, with the name of the overlay and the remedy.
pub fn check(path: &Path, readonly: bool) -> Result<()> {
    own_mounts::check(path)?;
    check_mirror(path, readonly)?;
    check_chain(path, readonly)
}

/// Checks the marks of a chain of overlays only: for a file that is replaced by a mirror.
///
/// # Errors
/// As for [`check`].
pub fn check_chain(path: &Path, readonly: bool) -> Result<()> {
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
        // A commit was interrupted between its two marks. All data is in this image.
        Ok(true) if read(&overlay, COMMITTED).is_some_and(|below| is_same_file(&below, path)) => {
            remove(path, OVERLAY)
                .map_err(|e| Error::io(format_args!("cannot remove {OVERLAY} of {shown}"), e))
        }
        Ok(true) if read(path, COMMITTING).is_some() => Err(Error::busy(format!(
            "{shown} is below {over}, which has data that an interrupted commit has not written here yet: use {over} \
             (format=qcow2), and commit again"
        ))),
        Ok(true) => Err(Error::busy(format!(
            "{shown} has a snapshot's overlay {over}, which writes to it would destroy: use {over} (format=qcow2), or add \
             readonly=on; or remove {over} to go back to the snapshot ('setfattr -x {OVERLAY} {shown}' if you know that \
             {shown} is not its backing image)"
        ))),
        Ok(false) if read(path, COMMITTING).is_some() => Err(Error::busy(format!(
            "{shown} has neither a snapshot nor all of a disk: a commit to it from {over} did not end, and that does not have \
             it as its backing image any more; remove {shown} ('setfattr -x {OVERLAY} {shown}' if you know better)"
        ))),
        Ok(false) => {
            tracing::warn!(
                "{shown} is marked as having an overlay {over}, which does not have it as its backing image any more: unmarked"
            );
            remove(path, OVERLAY)
                .map_err(|e| Error::io(format_args!("cannot remove {OVERLAY} of {shown}"), e))
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && sandbox::bounds_paths() => Err(Error::new(
            Kind::Io,
            format!(
                "{shown} has a snapshot's overlay {over}, as it is marked: use that (format=qcow2). It cannot be looked at: {e}. \
                 If its mode permits that, the sandbox does not: if it is gone, start the daemon with --allow-path={} ('setfattr -x {OVERLAY} {shown}' only if you know \
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

/// Checks the marks of mirrors.
fn check_mirror(path: &Path, readonly: bool) -> Result<()> {
    let shown = path.display();
    if let Some(source) = read(path, MIRRORING) {
        return Err(Error::busy(format!(
            "{shown} is an incomplete copy of {}: a mirror to it did not end; remove it, or mirror to it again with \
             --overwrite ('setfattr -x {MIRRORING} {shown}' if you know better)",
            source.display()
        )));
    }
    if let Some(target) = read(path, MOVED).filter(|_| !readonly) {
        return Err(Error::busy(format!(
            "{shown} was mirrored to {}, where its disk went on: use that, and remove {shown}, or add readonly=on ('setfattr \
             -x {MOVED} {shown}' if you know that nothing was written there since)",
            target.display()
        )));
    }
    Ok(())
}

/// Returns whether the overlay exists and names `base` as its backing image.
fn stands_on(overlay: &Path, base: &Path) -> io::Result<bool> {
    let file = match open_image(overlay, false) {
        Ok(file) => file,
        // Without the overlay the snapshot is given up. But if the folder is empty or missing, its
        // file system may not be mounted.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return if has_others(overlay)? { Ok(false) } else { Err(e) };
        }
        Err(e) => return Err(e),
    };
    match backing_of(overlay, file)? {
        Some(named) => Ok(is_same_file(&named, base)),
        None => Ok(false),
    }
}

/// Returns whether the folder of a missing file has other files.
///
/// # Errors
/// `PermissionDenied` if this thread may not read the folder.
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

/// Returns whether two paths lead to the same file.
pub(super) fn is_same_file(a: &Path, b: &Path) -> bool {
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino(), a.rdev()) == (b.dev(), b.ino(), b.rdev()),
        _ => false,
    }
}

/// Marks an image as the backing image of an overlay. The mark is on stable storage when this
/// returns. Returns false if the file system has no extended attributes.
///
/// # Errors
/// The system's.
pub(super) fn set_overlay(base: &File, overlay: &Path) -> io::Result<bool> {
    set(base, OVERLAY, overlay)
}

/// Removes the marks of a backing image.
///
/// # Errors
/// The system's. It is no error if there is no mark.
pub(super) fn clear_overlay(base: &File) -> io::Result<()> {
    let mut removed = false;
    for name in [OVERLAY, COMMITTING] {
        removed |= clear(base, name)?;
    }
    if removed { base.sync_all() } else { Ok(()) }
}

/// Removes the mark of a backing image if it is that of this overlay. After a commit to it began,
/// the marks stay: it has neither all of the disk nor what it had before.
///
/// # Errors
/// The system's. It is no error if there is no such mark.
pub(super) fn clear_overlay_of(base: &Path, overlay: &Path) -> io::Result<()> {
    let is_ours = read(base, OVERLAY).is_some_and(|marked| is_same_file(&marked, overlay));
    match is_ours && !is_committing(base) {
        true => clear_overlay(&open_image(base, false)?),
        false => Ok(()),
    }
}

/// Marks a backing image at the start of a commit to it. The mark is on stable storage when this
/// returns.
///
/// # Errors
/// The system's. It is no error if the file system has no extended attributes.
pub(super) fn set_committing(base: &Path, overlay: &Path) -> io::Result<()> {
    set(&open_image(base, false)?, COMMITTING, overlay).map(drop)
}

/// Returns whether a commit to the backing image has started.
pub(super) fn is_committing(base: &Path) -> bool {
    read(base, COMMITTING).is_some()
}

/// Marks an overlay as committed to its backing image. The mark is on stable storage when this
/// returns.
///
/// # Errors
/// The system's. It is no error if the file system has no extended attributes.
pub(super) fn set_committed(overlay: &Path, below: &Path) -> io::Result<()> {
    set(&open_image(overlay, false)?, COMMITTED, below).map(drop)
}

/// Removes the mark of a committed overlay.
///
/// # Errors
/// The system's. It is no error if there is no mark.
pub(super) fn clear_committed(overlay: &Path) -> io::Result<()> {
    let overlay = open_image(overlay, false)?;
    if clear(&overlay, COMMITTED)? { overlay.sync_all() } else { Ok(()) }
}

/// Marks the target of a mirror as incomplete. The mark is on stable storage when this returns.
///
/// # Errors
/// The system's. It is no error if the file system has no extended attributes.
pub(super) fn set_mirroring(target: &File, source: &Path) -> io::Result<()> {
    set(target, MIRRORING, source).map(drop)
}

/// Marks the target of a mirror as complete.
///
/// # Errors
/// The system's. It is no error if there is no mark.
pub(super) fn clear_mirroring(target: &File) -> io::Result<()> {
    if clear(target, MIRRORING)? { target.sync_all() } else { Ok(()) }
}

/// Marks the image that a disk has left. The mark is on stable storage when this returns.
///
/// # Errors
/// The system's. It is no error if the file system has no extended attributes.
pub(super) fn set_moved(source: &File, target: &Path) -> io::Result<()> {
    set(source, MOVED, target).map(drop)
}

/// Marks a file that a mirror is about to replace as incomplete, whatever it was before. The caller
/// has locked it.
///
/// # Errors
/// The system's. It is no error if the file system has no extended attributes.
pub(super) fn begin_mirror(target: &File, source: &Path) -> io::Result<()> {
    set_mirroring(target, source)?;
    if clear(target, MOVED)? { target.sync_all() } else { Ok(()) }
}

/// Removes an attribute. Returns false if there is none.
fn clear(file: &File, name: &str) -> io::Result<bool> {
    match rustix::fs::fremovexattr(file.as_fd(), name) {
        Ok(()) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        // A device node has no attributes. An immutable file may have one, so an existing attribute
        // is an error.
        Err(Errno::PERM) if rustix::fs::fgetxattr(file.as_fd(), name, &mut [0u8; 0]).is_err() => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Writes an attribute. Returns false if the file system has none.
fn set(file: &File, name: &str, path: &Path) -> io::Result<bool> {
    match rustix::fs::fsetxattr(file.as_fd(), name, path.as_os_str().as_bytes(), XattrFlags::empty()) {
        Ok(()) => file.sync_all().map(|()| true),
        // A device node answers PERM.
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Reads an attribute.
fn read(path: &Path, name: &str) -> Option<PathBuf> {
    let mut buf = vec![0; libc::PATH_MAX as usize];
    // A file system without attributes counts as one without marks.
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
        let marked = set_overlay(file, Path::new("/over")).unwrap();
        set_committed(path, Path::new("/below")).unwrap();
        let flags = ioctl_getflags(file).unwrap_or(IFlags::empty());
        if !marked || ioctl_setflags(file, flags | IFlags::IMMUTABLE).is_err() {
            eprintln!(
                "skip a_mark_that_stays_is_an_error: no marks or no immutable files here, or not for this user"
            );
            return;
        }
        let (overlay, committed) = (clear_overlay(file), clear_committed(path));
        ioctl_setflags(file, flags).unwrap();
        for taken in [overlay, committed] {
            assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        for _ in 0..2 {
            clear_overlay(file).unwrap();
            clear_committed(path).unwrap();
            assert!(read(path, OVERLAY).is_none() && read(path, COMMITTED).is_none());
        }
    }

    #[test]
    fn where_there_can_be_no_mark_there_is_none_to_take() {
        clear_overlay(&File::open("/dev/null").unwrap()).unwrap();
    }
}
