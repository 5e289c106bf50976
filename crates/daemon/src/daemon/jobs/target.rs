//! The file that a backup is written to. Its name is NAME.part until it is complete, so that a file
//! called NAME is always a complete backup. A file that is replaced keeps its name until then.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use vshunt_block::{PathFd, check_overlay_marks, lock_image, open_image, own_mounts};
use vshunt_types::error::{Error, Result};

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
                return Err(Error::exists(format!(
                    "{shown} is there already; choose another name, or say that it may be replaced (--overwrite)"
                )));
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
                lock_image(&old, &path, false)?;
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
        if let Some(like) = like {
            // A process that may not change the owner keeps the file.
            let _ = fchown(&made.file, Some(like.uid()), Some(like.gid()));
            made.file.set_permissions(like.permissions()).map_err(|e| {
                made.remove();
                cannot(e)
            })?;
        }
        Ok(made)
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
    fn check(&self) -> Result<()> {
        match (id_of(&self.file), self.part.symlink_metadata()) {
            (Ok(ours), Ok(there)) if ours == (there.dev(), there.ino()) => Ok(()),
            _ => Err(Error::invalid(format!(
                "{} was removed or replaced while it was written; start the backup again",
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
            return Ok(());
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
        let synced = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
        synced.map_err(|e| Error::io(format_args!("{shown} is whole, and its name cannot be made stable"), e))
    }

    /// Removes the file, unless it existed before, or its name belongs to another file by now.
    pub(super) fn remove(&self) {
        if !self.new {
            tracing::warn!("{} is no backup", self.part.display());
        } else if self.check().is_ok()
            && let Err(e) = std::fs::remove_file(&self.part)
        {
            tracing::warn!("cannot remove {}, which is no backup: {e}", self.part.display());
        }
    }
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
    use vshunt_types::error::Kind;

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
}
