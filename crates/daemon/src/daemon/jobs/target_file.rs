//! The file that a job writes to.
//!
//! A backup is called NAME.part until it is complete, so that a file called NAME is always a
//! complete backup. A file that is replaced keeps its name until then. The file of a mirror has its
//! name from the start, because it stays open when the disk continues in it.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use vshunt_block::{
    Disk, PathFd, check_chain_marks, check_overlay_marks, lock_image, mark_incomplete, open_image,
    own_mounts, unlock_image,
};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::DiskSpec;

/// A file that is made for a backup. Other processes may remove or replace it.
pub(super) struct TargetFile {
    /// The final path.
    path: PathBuf,
    /// The path that is written to. It is the final path if that cannot be replaced by a rename: a
    /// device, or a file that something is mounted over.
    part: PathBuf,
    /// Kept open, so that its inode number is not used for another file.
    file: File,
    /// The file that is replaced, locked.
    old: Option<File>,
    /// Whether the file at `part` is new.
    new: bool,
}

impl TargetFile {
    /// Chooses the file, and makes an empty one if there is none. An existing file is not changed.
    ///
    /// # Errors
    /// `Exists` if a file has the final name and may not be replaced, or a file has the temporary
    /// name; `Busy` if the file that is replaced is in use. No file is left behind.
    pub(super) fn create(path: &Path, overwrite: bool) -> Result<Self> {
        let shown = path.display();
        let cannot = |e| Error::io(format_args!("cannot replace {shown}"), e);
        own_mounts::check(path)?;
        let (path, old) = match path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => (path.to_owned(), None),
            Err(e) => return Err(Error::io(format_args!("cannot make {shown}"), e)),
            Ok(_) if !overwrite => {
                return Err(already(path));
            }
            Ok(_) => {
                let path = path.canonicalize().map_err(cannot)?;
                let old = open_image(&path, true).map_err(cannot)?;
                let meta = old.metadata().map_err(cannot)?;
                let folder = folder_of(&path).metadata().map_err(cannot)?;
                check_overlay_marks(&path, false)?;
                if !meta.is_file() || meta.dev() != folder.dev() {
                    return Ok(Self { part: path.clone(), path, file: old, old: None, new: false });
                }
                lock_target(&old, &path)?;
                (path, Some(old))
            }
        };
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        // It gets the permissions of the file that it replaces before it has any data.
        let like = old.as_ref().map(File::metadata).transpose().map_err(cannot)?;
        let mode = like.as_ref().map_or(0o666, |_| 0o600);
        let mut create = OpenOptions::new();
        create.read(true).write(true).create_new(true).mode(mode);
        let (file, new) = match create.open(&part) {
            Ok(file) => (file, true),
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::io(format_args!("cannot make {}", part.display()), e));
            }
            Err(_) if !overwrite => {
                return Err(Error::exists(format!(
                    "{0} is there: a backup to {1} that is being made, or was when its daemon was killed; then remove {0}, \
                     or say that it may be replaced (--overwrite)",
                    part.display(),
                    path.display()
                )));
            }
            Err(_) => {
                let cannot = |e| Error::io(format_args!("cannot replace {}", part.display()), e);
                let seen = PathFd::open_no_follow(&part).map_err(cannot)?;
                if !seen.check(&part).is_ok_and(|meta| meta.is_file()) {
                    return Err(Error::invalid(format!("{} is no file; remove it", part.display())));
                }
                let file = seen.reopen(true, 0).map_err(cannot)?;
                check_overlay_marks(&part, false)?;
                (file, false)
            }
        };
        let made = Self { path, part, file, old, new };
        made.permit(like.as_ref()).map_err(|e| {
            made.remove();
            cannot(e)
        })?;
        Ok(made)
    }

    /// Gives it the owner and the permissions of another file.
    fn permit(&self, like: Option<&Metadata>) -> io::Result<()> {
        let Some(like) = like else { return Ok(()) };
        let mode = like.permissions().mode();
        // A process that may not change the owner keeps the file, and may give it to a group of its
        // own. Another group gets no permissions.
        let chowned = fchown(&self.file, Some(like.uid()), Some(like.gid())).is_ok()
            || fchown(&self.file, None, Some(like.gid())).is_ok();
        let mode = if chowned { mode } else { mode & !0o070 };
        match self.file.set_permissions(Permissions::from_mode(mode)) {
            // The owner is another one now. The file has the mode 0600.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            set => set,
        }
    }

    /// Makes an empty file that has its final name from the start, marked as the incomplete copy of
    /// `source`. A new file gets the permissions and the owner of `like`, the image of `source`, if
    /// that is a file. The contents of an existing file or device are not changed yet. `size`: the
    /// bytes that the file will have, if that is known.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub(super) fn create_in_place(
        path: &Path,
        overwrite: bool,
        size: Option<u64>,
        source: &DiskSpec,
        like: Option<&Metadata>,
    ) -> Result<Self> {
        let shown = path.display();
        own_mounts::check(path)?;
        let mut create = OpenOptions::new();
        create.read(true).write(true).create_new(true).mode(like.map_or(0o666, |_| 0o600));
        match create.open(path) {
            Ok(file) => {
                let path = path.to_owned();
                let made = Self { part: path.clone(), path, file, old: None, new: true };
                let prepared =
                    made.permit(like).map_err(|e| Error::io(format_args!("cannot make {shown}"), e));
                let prepared = prepared.and_then(|()| {
                    mark_incomplete(&made.file, source)
                        .map_err(|e| Error::io(format_args!("cannot mark {shown} as incomplete"), e))
                });
                return match prepared {
                    Ok(()) => Ok(made),
                    Err(e) => {
                        made.remove();
                        Err(e)
                    }
                };
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(format_args!("cannot make {shown}"), e)),
        }
        if !overwrite {
            return Err(already(path));
        }
        let cannot = |e| Error::io(format_args!("cannot replace {shown}"), e);
        let path = path.canonicalize().map_err(cannot)?;
        let file = open_image(&path, true).map_err(cannot)?;
        // It may be what an earlier mirror has left.
        check_chain_marks(&path, false)?;
        lock_target(&file, &path)?;
        try_size(&file, size).map_err(|e| cannot(e).remedy("it has what it had"))?;
        let marked = mark_incomplete(&file, source);
        unlock_image(&file);
        marked.map_err(|e| Error::io(format_args!("cannot mark {shown} as incomplete"), e))?;
        Ok(Self { part: path.clone(), path, file, old: None, new: false })
    }

    /// Marks it as an incomplete copy of `source` again, unless it is removed.
    pub(super) fn mark_outdated(&self, source: &DiskSpec) {
        if !self.new
            && let Err(e) = mark_incomplete(&self.file, source)
        {
            tracing::warn!("{} lacks writes, and cannot be marked: {e}; do not use it", self.part.display());
        }
    }

    /// Returns whether it is a regular file, and no device.
    pub(super) fn is_regular(&self) -> bool {
        self.file.metadata().is_ok_and(|meta| meta.is_file())
    }

    /// Returns whether a disk was opened with this file as its image.
    pub(super) fn is_image_of(&self, disk: &Disk) -> bool {
        id_of(&self.file).is_ok_and(|id| disk.image_has_inode(id))
    }

    /// Returns the path for making the image and writing to it.
    pub(super) fn part(&self) -> &Path {
        &self.part
    }

    /// Marks the file as new: the old contents were discarded.
    pub(super) fn take(self) -> Self {
        Self { new: self.part != self.path, ..self }
    }

    /// Checks that the path still names this file.
    ///
    /// # Errors
    /// `Invalid` if the file has another name by now, or none.
    pub(super) fn check(&self) -> Result<()> {
        match (id_of(&self.file), self.part.symlink_metadata()) {
            (Ok(ours), Ok(there)) if ours == (there.dev(), there.ino()) => Ok(()),
            _ => Err(Error::invalid(format!(
                "{} was removed or replaced while it was written; start the job again",
                self.part.display()
            ))),
        }
    }

    /// Makes the complete file stable, and gives it its final name. Called after it was closed.
    ///
    /// # Errors
    /// `Invalid` if the file does not exist any more, `Exists` if another file got the final name
    /// meanwhile; errors of the system. A complete file is kept, and the error says under which
    /// name.
    pub(super) fn put(&self) -> Result<()> {
        let Self { path, part, .. } = self;
        let (shown, now) = (path.display(), part.display());
        self.check()?;
        if let Err(e) = self.file.sync_all() {
            self.remove();
            return Err(Error::io(format_args!("cannot make {now} stable"), e));
        }
        if part == path {
            return if self.new { self.sync_folder() } else { Ok(()) };
        }
        // If another file has the name by now, it is kept.
        let same = |old: &File| {
            path.symlink_metadata().is_ok_and(|m| id_of(old).is_ok_and(|id| id == (m.dev(), m.ino())))
        };
        rename(part, path, self.old.as_ref().is_some_and(same)).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::exists(format!(
                "{shown} has come to be while its backup was made; that is {now}, and is whole"
            )),
            _ => Error::io(format_args!("{now} is whole, and cannot be renamed to {shown}"), e),
        })?;
        self.sync_folder()
    }

    fn sync_folder(&self) -> Result<()> {
        let synced = File::open(folder_of(&self.path)).and_then(|folder| folder.sync_all());
        let shown = self.path.display();
        synced.map_err(|e| Error::io(format_args!("{shown} is whole, and its name cannot be made stable"), e))
    }

    /// Removes the file, unless it existed before, or its name belongs to another file by now.
    pub(super) fn remove(&self) {
        if !self.new {
            tracing::warn!("{} is no complete copy", self.part.display());
        } else if self.check().is_ok()
            && let Err(e) = std::fs::remove_file(&self.part)
        {
            tracing::warn!("cannot remove {}, which is no complete copy: {e}", self.part.display());
        }
    }
}

/// Locks a file that is replaced.
fn lock_target(file: &File, path: &Path) -> Result<()> {
    lock_image(file, path, false).map_err(|e| match e.kind() {
        Kind::Busy => Error::busy(format!(
            "{} is in use by another process; stop it, or choose another target",
            path.display()
        )),
        _ => e,
    })
}

/// Checks that a regular file can have this size. Its contents stay.
fn try_size(file: &File, size: Option<u64>) -> io::Result<()> {
    let (Some(size), now) = (size, file.metadata()?) else { return Ok(()) };
    if !now.is_file() || now.len() >= size {
        return Ok(());
    }
    file.set_len(size)?;
    file.set_len(now.len())
}

fn already(path: &Path) -> Error {
    Error::exists(format!(
        "{} is there already; choose another name, or say that it may be replaced (--overwrite)",
        path.display()
    ))
}

/// Returns the device number and the inode number.
fn id_of(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|m| (m.dev(), m.ino()))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Renames a file. Without `replace`, the new name must be free.
fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    let (old, new) = (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    // SAFETY: both pointers are C strings, which live longer than the call.
    let done = unsafe {
        libc::renameat2(libc::AT_FDCWD, old.as_ptr(), libc::AT_FDCWD, new.as_ptr(), libc::RENAME_NOREPLACE)
    };
    match io::Error::last_os_error() {
        _ if done == 0 => Ok(()),
        // The file system does not support the flag.
        e if e.raw_os_error() == Some(libc::EINVAL) => match to.symlink_metadata() {
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            Err(_) => std::fs::rename(from, to),
        },
        e => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(path: &Path, overwrite: bool) -> TargetFile {
        let made = TargetFile::create(path, overwrite).unwrap().take();
        std::fs::write(made.part(), b"new").unwrap();
        made
    }

    fn refused(path: &Path, overwrite: bool, word: &str) -> bool {
        TargetFile::create(path, overwrite).is_err_and(|e| e.to_string().contains(word))
    }

    #[test]
    fn a_new_one_gets_its_name_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (path, part) = (dir.path().join("b"), dir.path().join("b.part"));
        let first = made(&path, false);
        assert!(!path.exists() && part.exists());
        assert!(refused(&path, false, "b.part"));
        first.put().unwrap();
        assert!(path.exists() && !part.exists());
        assert!(refused(&path, false, "already"));
    }

    #[test]
    fn what_is_replaced_stays_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("b"), dir.path().join("link"));
        std::fs::write(&path, b"old").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let failed = made(&link, true);
        failed.remove();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        drop(failed);
        made(&link, true).put().unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), mode(&path)), (b"new".to_vec(), 0o640));
        assert!(link.is_symlink() && !dir.path().join("b.part").exists());
    }

    #[test]
    fn another_file_of_either_name_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, part) = (dir.path().join("b"), dir.path().join("b.part"));
        for overwrite in [false, true] {
            if overwrite {
                std::fs::write(&path, b"old").unwrap();
            }
            let backup = made(&path, overwrite);
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, b"another's").unwrap();
            assert!(backup.put().is_err_and(|e| e.kind() == Kind::Exists));
            let read = |path: &Path| std::fs::read(path).unwrap();
            assert_eq!((read(&path), read(&part)), (b"another's".to_vec(), b"new".to_vec()));
            std::fs::remove_file(&part).unwrap();
            std::fs::write(&part, b"another's").unwrap();
            backup.remove();
            assert!(backup.put().is_err() && part.exists());
            std::fs::remove_file(&path).unwrap();
            std::fs::remove_file(&part).unwrap();
        }
    }

    #[test]
    fn a_link_is_no_leftover() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("b"), dir.path().join("other"));
        std::fs::write(&other, b"another's").unwrap();
        std::os::unix::fs::symlink(&other, dir.path().join("b.part")).unwrap();
        assert!(refused(&path, true, "b.part") && refused(&path, false, "b.part"));
        assert_eq!(std::fs::read(&other).unwrap(), b"another's");
    }

    #[test]
    fn one_in_place_has_its_name_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let like = |mode| {
            std::fs::write(dir.path().join("like"), b"").unwrap();
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(dir.path().join("like"), permissions).unwrap();
            dir.path().join("like").metadata().unwrap()
        };
        // More than the umask would leave, and less.
        for mode in [0o666, 0o640, 0o400] {
            let like = like(mode);
            let made =
                TargetFile::create_in_place(&path, false, None, &DiskSpec::default(), Some(&like)).unwrap();
            assert_eq!(path.metadata().unwrap().mode() & 0o7777, mode);
            made.remove();
        }
        let made = TargetFile::create_in_place(&path, false, None, &DiskSpec::default(), None).unwrap();
        assert!(path.exists() && made.part() == path);
        made.remove();
        assert!(!path.exists());
        std::fs::write(&path, b"old").unwrap();
        assert!(
            TargetFile::create_in_place(&path, false, None, &DiskSpec::default(), None)
                .is_err_and(|e| e.kind() == Kind::Exists)
        );
        let there = TargetFile::create_in_place(&path, true, None, &DiskSpec::default(), None).unwrap();
        // What it had is gone for good, but the file is not of the job.
        there.remove();
        there.put().unwrap();
        assert!(path.exists());
    }
}
