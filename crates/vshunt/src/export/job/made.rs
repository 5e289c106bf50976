//! The file that a backup is written to. Until it is whole it has another name, NAME.part, so that what has the name is a
//! backup: a new one gets it at the end, and one that is replaced keeps it until then.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::backend::block::{check_marks, lock_image};
use crate::error::{Error, Kind, Result};

/// A place for a backup, before anything is made there.
pub(super) struct Place {
    /// What it is called in the end.
    path: PathBuf,
    /// What is written to; the same where there is something that cannot be replaced by a rename: a device, a file that
    /// something is mounted over.
    part: PathBuf,
    /// What has the name and is to be replaced, locked.
    old: Option<File>,
}

impl Place {
    /// Chooses it.
    ///
    /// # Errors
    /// `Exists` if something has the name and may not be replaced, or has the other one; `Busy` if that is in use.
    pub(super) fn choose(path: &Path, overwrite: bool) -> Result<Self> {
        let shown = path.display();
        let cannot = |e| Error::io(format_args!("cannot replace {shown}"), e);
        let (path, old) = match path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => (path.to_owned(), None),
            Err(e) => return Err(Error::io(format_args!("cannot make {shown}"), e)),
            Ok(_) if !overwrite => {
                return Err(Error::exists(format!(
                    "{shown} is there already; choose another name, or say that it may be replaced"
                )));
            }
            Ok(_) => {
                let path = path.canonicalize().map_err(cannot)?;
                let meta = path.metadata().map_err(cannot)?;
                let folder = folder_of(&path).metadata().map_err(cannot)?;
                if !meta.is_file() || meta.dev() != folder.dev() {
                    return Ok(Self { part: path.clone(), path, old: None });
                }
                let old = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&path);
                let old = old.map_err(cannot)?;
                lock_image(&old, &path, false)?;
                check_marks(&path, false)?;
                (path, Some(old))
            }
        };
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        if part.symlink_metadata().is_ok() && !overwrite {
            return Err(Error::exists(format!(
                "{0} is there: a backup to {1} that is being made, or was when its daemon was killed; then remove {0}, or \
                 say that it may be replaced",
                part.display(),
                path.display()
            )));
        }
        Ok(Self { path, part, old })
    }

    /// What is to be made.
    pub(super) fn part(&self) -> &Path {
        &self.part
    }

    /// Takes note of what was made there.
    pub(super) fn made(self) -> Result<Made> {
        match File::open(&self.part) {
            Ok(file) => Ok(Made { place: self, file }),
            Err(e) => Err(Error::io(format_args!("cannot open {}", self.part.display()), e)),
        }
    }
}

/// A file that was made for a backup. Others may remove or replace it.
pub(super) struct Made {
    place: Place,
    /// Held open, so that no other file can be taken for it.
    file: File,
}

impl Made {
    /// Whether the name that is written to is still its own.
    fn check(&self) -> Result<()> {
        let id_of = |m: Metadata| (m.dev(), m.ino());
        let (ours, there) = (self.file.metadata(), self.place.part.symlink_metadata());
        match (ours.map(id_of), there.map(id_of)) {
            (Ok(ours), Ok(there)) if ours == there => Ok(()),
            _ => Err(Error::invalid(format!(
                "{} was removed or replaced while it was written; make the backup anew",
                self.place.part.display()
            ))),
        }
    }

    /// Gives it its name, after it was closed: it is whole, and stable.
    ///
    /// # Errors
    /// `Invalid` if it is not there any more, `Exists` if another has got the name meanwhile. The backup stays under the name
    /// that it has then.
    pub(super) fn put(&self) -> Result<()> {
        self.check()?;
        let Place { path, part, old } = &self.place;
        let cannot = |e| Error::io(format_args!("cannot make {} stable", part.display()), e);
        self.file.sync_all().map_err(cannot)?;
        if part == path {
            return Ok(());
        }
        rename(part, path, old.is_some()).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::exists(format!(
                "{} has come to be while its backup was made; that is {}, and is whole",
                path.display(),
                part.display()
            )),
            _ => Error::io(format_args!("cannot rename {} to {}", part.display(), path.display()), e),
        })?;
        File::open(folder_of(path)).and_then(|folder| folder.sync_all()).map_err(cannot)
    }

    /// Removes it, unless it is another's by now, or was there before.
    pub(super) fn remove(&self) {
        if self.place.part == self.place.path {
            tracing::warn!("{} is no backup", self.place.path.display());
        } else if self.check().is_ok()
            && let Err(e) = std::fs::remove_file(&self.place.part)
        {
            tracing::warn!("cannot remove {}, which is no backup: {e}", self.place.part.display());
        }
    }

    /// Whether a failure to give it its name left a backup behind.
    pub(super) fn is_left(e: &Error) -> bool {
        e.kind() == Kind::Exists
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Renames; onto nothing unless told otherwise.
fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    let (old, new) = (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    // SAFETY: both are strings that end in a zero and live for the call.
    let done = unsafe {
        libc::renameat2(libc::AT_FDCWD, old.as_ptr(), libc::AT_FDCWD, new.as_ptr(), libc::RENAME_NOREPLACE)
    };
    match io::Error::last_os_error() {
        _ if done == 0 => Ok(()),
        // A file system that does not know the flag.
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

    fn made(path: &Path, overwrite: bool) -> Made {
        let place = Place::choose(path, overwrite).unwrap();
        std::fs::write(place.part(), b"new").unwrap();
        place.made().unwrap()
    }

    #[test]
    fn a_new_one_gets_its_name_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (path, part) = (dir.path().join("b"), dir.path().join("b.part"));
        let first = made(&path, false);
        assert!(!path.exists() && part.exists());
        assert!(Place::choose(&path, false).is_err_and(|e| e.to_string().contains("b.part")));
        first.put().unwrap();
        assert!(path.exists() && !part.exists());
        assert!(Place::choose(&path, false).is_err_and(|e| e.kind() == Kind::Exists));
    }

    #[test]
    fn what_is_replaced_stays_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("b"), dir.path().join("link"));
        std::fs::write(&path, b"old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let failed = made(&link, true);
        failed.remove();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        drop(failed);
        made(&link, true).put().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert!(link.is_symlink() && !dir.path().join("b.part").exists());
    }

    #[test]
    fn another_file_of_either_name_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, part) = (dir.path().join("b"), dir.path().join("b.part"));
        let backup = made(&path, false);
        std::fs::write(&path, b"another's").unwrap();
        assert!(backup.put().is_err_and(|e| Made::is_left(&e)));
        assert_eq!(
            (std::fs::read(&path).unwrap(), std::fs::read(&part).unwrap()),
            (b"another's".to_vec(), b"new".to_vec())
        );
        std::fs::remove_file(&part).unwrap();
        std::fs::write(&part, b"another's").unwrap();
        backup.remove();
        assert!(backup.put().is_err() && part.exists());
    }
}
