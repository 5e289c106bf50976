//! Files that users of the host name, checked before they are opened. Called by control threads.
//!
//! Opening a file can have effects: a FIFO blocks, some devices act, and a file on a mount of this
//! process would wait for this process. Another user may also replace a file after it was checked.
//! So the path is looked up once, with O_PATH, which has no effect on the file. After the check the
//! same file is opened through /proc/self/fd, even if the path leads to another file by then.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use vshunt_types::error::{Error, Result};

use super::own_mounts;

/// Pseudo file systems of the kernel, by their magic numbers (linux/magic.h). Their files are no
/// storage: writes to some of them change the system, and `/proc/self/mem` is the memory of the
/// daemon.
const PSEUDO_FILE_SYSTEMS: [(u32, &str); 19] = [
    (0x0000_9FA0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x0027_E0EB, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x7363_6673, "securityfs"),
    (0xF97C_FF8C, "selinuxfs"),
    (0x4341_5D53, "smackfs"),
    (0x5A3C_69F0, "apparmorfs"),
    (0xCAFE_4A11, "bpf"),
    (0x6165_676C, "pstore"),
    (0xDE5E_81E4, "efivarfs"),
    (0x6265_6570, "configfs"),
    (0x6E73_6673, "nsfs"),
    (0x6573_5543, "fusectl"),
    (0x1980_0202, "mqueue"),
    (0x4249_4E4D, "binfmt_misc"),
    (0x0765_5821, "resctrl"),
];

/// A file that was looked up with O_PATH. It is not open for reading or writing yet.
pub struct PathFd(File);

/// Returns the name of the file system of a file if it is a pseudo file system of the kernel.
fn pseudo_file_system(file: impl AsFd) -> io::Result<Option<&'static str>> {
    let magic = rustix::fs::fstatfs(file)?.f_type as u32;
    Ok(PSEUDO_FILE_SYSTEMS.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name))
}

impl PathFd {
    /// Looks a path up. A symbolic link is followed.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, OFlags::empty())
    }

    /// Looks a path up. A symbolic link at its end is not followed.
    ///
    /// # Errors
    /// The system's.
    pub fn open_no_follow(path: &Path) -> io::Result<Self> {
        Self::open_with(path, OFlags::NOFOLLOW)
    }

    fn open_with(path: &Path, flags: OFlags) -> io::Result<Self> {
        let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?;
        Ok(Self(File::from(file)))
    }

    /// Returns the metadata of the file if it can hold an image. `path` is for messages.
    ///
    /// # Errors
    /// `Invalid` if it is neither a regular file nor a block device, if it is on a pseudo
    /// file system of the kernel, or if it is on a mount that this process serves. Such a mount
    /// gets no request.
    pub fn check(&self, path: &Path) -> Result<Metadata> {
        own_mounts::check_file(&self.0, path)?;
        let cannot = |e| Error::io(format_args!("cannot look at {}", path.display()), e);
        let meta = self.0.metadata().map_err(cannot)?;
        let kind = meta.file_type();
        let what = match () {
            () if kind.is_block_device() => return Ok(meta),
            () if kind.is_file() => match pseudo_file_system(&self.0).map_err(cannot)? {
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
    pub fn reopen(&self, write: bool, flags: i32) -> io::Result<File> {
        let itself = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let opened =
            OpenOptions::new().read(true).write(write).custom_flags(flags | libc::O_NOCTTY).open(itself);
        opened.map_err(|e| match e.kind() {
            // The file exists, but callers take this error as its absence.
            io::ErrorKind::NotFound => {
                io::Error::other("it cannot be opened again: /proc is not mounted here")
            }
            _ => e,
        })
    }
}

/// Returns whether a file has the name of a qcow2 image.
pub fn has_name_of_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("qcow2"))
}

/// Looks up, checks and opens an image for reading, and for writing if `write`.
///
/// # Errors
/// Those of [`PathFd::check`], as `InvalidInput`; the system's.
pub fn open_image(path: &Path, write: bool) -> io::Result<File> {
    let path_fd = PathFd::open(path)?;
    path_fd.check(path).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
    path_fd.reopen(write, 0)
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
        let path_fd = PathFd::open(&path).unwrap();
        assert!(path_fd.check(&path).unwrap().is_file());
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        // To open it for reading would wait for a writer.
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let mut text = String::new();
        path_fd.reopen(true, 0).unwrap().read_to_string(&mut text).unwrap();
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
        assert!(PathFd::open(&link).unwrap().check(&link).is_ok());
        assert!(PathFd::open_no_follow(&link).unwrap().check(&link).is_err());
        assert!(PathFd::open_no_follow(&path).unwrap().check(&path).is_ok());
        assert_eq!(PathFd::open(&folder.path().join("none")).err().unwrap().kind(), io::ErrorKind::NotFound);
    }
}
