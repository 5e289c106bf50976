//! Files that users of the host name, found and looked at before they are opened: to open a FIFO waits, to open some devices does
//! things, and a file of one of our own mounts must not be asked for anything.
//!
//! A user may put another file in the place of one that was checked. So the name is looked up once, by O_PATH, which opens
//! nothing; and what was looked at is opened through /proc/self/fd, whatever has the name by then. Called by control threads.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use vshunt_types::error::{Error, Result};

use super::own_mounts;
use super::raw::of_the_kernel;

/// A file that was found and is not opened yet.
pub struct Seen(File);

impl Seen {
    /// Looks a name up. A symbolic link is followed.
    ///
    /// # Errors
    /// The system's.
    pub fn find(path: &Path) -> io::Result<Self> {
        Self::find_with(path, OFlags::empty())
    }

    /// The same; a symbolic link at the end of the path is not followed.
    ///
    /// # Errors
    /// The system's.
    pub fn find_itself(path: &Path) -> io::Result<Self> {
        Self::find_with(path, OFlags::NOFOLLOW)
    }

    fn find_with(path: &Path, flags: OFlags) -> io::Result<Self> {
        let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?;
        Ok(Self(File::from(file)))
    }

    /// Returns what the file is, if an image can be in it. `path` is for messages.
    ///
    /// # Errors
    /// `Invalid`: it is neither a file nor a block device, on a file system of the kernel's own, or on one of our own mounts;
    /// that is asked for nothing.
    pub fn check(&self, path: &Path) -> Result<Metadata> {
        own_mounts::check_file(&self.0, path)?;
        let cannot = |e| Error::io(format_args!("cannot look at {}", path.display()), e);
        let meta = self.0.metadata().map_err(cannot)?;
        let kind = meta.file_type();
        let what = match () {
            () if kind.is_block_device() => return Ok(meta),
            () if kind.is_file() => match of_the_kernel(&self.0).map_err(cannot)? {
                None => return Ok(meta),
                Some(name) => {
                    return Err(Error::invalid(format!(
                        "{} is on {name}, a file system of the kernel's own; an image is a file or a block device",
                        path.display()
                    )));
                }
            },
            () if kind.is_dir() => "a directory",
            () if kind.is_char_device() => "a character device",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "something else",
        };
        Err(Error::invalid(format!("{} is {what}; an image is a file or a block device", path.display())))
    }

    /// Opens the file for reading, and for writing if `write`, with further `flags` of open(2).
    ///
    /// # Errors
    /// The system's.
    pub fn open(&self, write: bool, flags: i32) -> io::Result<File> {
        let itself = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let opened =
            OpenOptions::new().read(true).write(write).custom_flags(flags | libc::O_NOCTTY).open(itself);
        opened.map_err(|e| match e.kind() {
            // The file is there. Callers take this error as its absence.
            io::ErrorKind::NotFound => {
                io::Error::other("it cannot be opened again: /proc is not mounted here")
            }
            _ => e,
        })
    }
}

/// Finds, checks and opens an image, for reading, and for writing if `write`.
///
/// # Errors
/// Those of [`Seen::check`], as `InvalidInput`; the system's.
pub fn open_image(path: &Path, write: bool) -> io::Result<File> {
    let seen = Seen::find(path)?;
    seen.check(path).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
    seen.open(write, 0)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn what_was_looked_at_is_opened_whatever_has_its_name_by_then() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "ours").unwrap();
        let seen = Seen::find(&path).unwrap();
        assert!(seen.check(&path).unwrap().is_file());
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        // To open it for reading would wait for a writer.
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let mut text = String::new();
        seen.open(true, 0).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "ours");
        for write in [false, true] {
            let said = open_image(&path, write).unwrap_err();
            assert!(said.to_string().contains("is a FIFO"), "{said}");
        }
    }

    #[test]
    fn a_link_is_followed_or_is_something_else() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("image"), folder.path().join("link"));
        std::fs::write(&path, "").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Seen::find(&link).unwrap().check(&link).is_ok());
        assert!(Seen::find_itself(&link).unwrap().check(&link).is_err());
        assert!(Seen::find_itself(&path).unwrap().check(&path).is_ok());
        assert_eq!(Seen::find(&folder.path().join("none")).err().unwrap().kind(), io::ErrorKind::NotFound);
    }
}
