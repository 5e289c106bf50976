//! The file of a journal: one file in /dev/shm for each image, named by the device and inode of the
//! image.
//!
//! It is created when an image is opened for writing, and removed when the image is closed cleanly.
//! After a crash, the next process that opens the image for writing finds the file, applies it to
//! the image, and replaces it. A process that only reads the image reads the file too.
//!
//! After the records, the file names its image, so that files of images that are gone can be
//! removed (`sweep`).
//!
//! The process that uses a journal holds a lock on its file. So the journal of a live daemon is
//! never taken for that of a dead one, even with locking=off.
//!
//! What must never happen: a file of another user is trusted; the memory of the mapping is missing
//! (an access would be a SIGBUS). So the space is allocated before it is mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use qcow2::journal::Words;
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::journal_name::{self, NAME_BYTES};

/// Files in this folder survive processes, but not a reboot.
pub(super) const FOLDER: &str = "/dev/shm";
/// An id that stays the same until a reboot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// A new id with each read.
const NEW_ID: &str = "/proc/sys/kernel/random/uuid";
/// The largest file of a journal, bytes. A larger file is none of vshunt.
pub(super) const BYTES_MAX: u64 = 4 << 20;

/// How long a process that repairs an image waits for a killed daemon to end.
pub(super) const WAIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
/// How long a reader waits for a process that has the journal only for a moment.
pub(super) const READER_WAIT: Duration = Duration::from_millis(200);

/// The records of a journal, mapped.
pub(super) struct Mapped {
    base: NonNull<AtomicU64>,
    words: usize,
    /// The lock belongs to this open file.
    _file: File,
}

// SAFETY: it owns its mapping, which any thread may unmap; the memory is used only as atomics.
unsafe impl Send for Mapped {}
// SAFETY: a shared reference gives access to atomics only.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the records of a locked file whose space is allocated.
    fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        if !(8 + NAME_BYTES..=BYTES_MAX).contains(&len) {
            return Err(io::Error::other(format!("it has {len} bytes")));
        }
        let len = len - NAME_BYTES;
        let (len, prot) = (len as usize / 8 * 8, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses a free range for the new mapping, so no existing memory
        // changes.
        let base = unsafe { mmap(null_mut(), len, prot, MapFlags::SHARED, file.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, words: len / 8, _file: file })
    }
}

impl Words for Mapped {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `new` has mapped that many words at the start of a page, from a file that is
        // never cut, and they stay mapped until `self` is dropped. Other processes that map the
        // file use atomics too.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping with this length. References from `words` borrow `self`,
        // so none is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}

/// The path of the journal of one image.
pub(super) struct JournalFile(PathBuf);

impl JournalFile {
    /// Returns the path for an open image.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn of(image: &File) -> io::Result<Self> {
        let meta = image.metadata()?;
        let (kind, device, number) = match meta.file_type().is_block_device() {
            // The device number does not depend on the device node.
            true => ("block", meta.rdev(), 0),
            false => ("map", meta.dev(), meta.ino()),
        };
        Ok(Self(Path::new(FOLDER).join(format!("vshunt-{kind}-{device:x}-{number:x}"))))
    }

    /// Maps an existing journal of this user. `how`: exclusively, or together with other readers.
    ///
    /// # Errors
    /// The system's; `WouldBlock` if a live process has the journal for longer than `wait`.
    pub(super) fn find(&self, how: FlockOperation, wait: Duration) -> io::Result<Mapped> {
        let file = open_own(&self.0)?;
        lock(&file, how, wait)?;
        Mapped::new(file)
    }

    /// Creates a new journal in place of an existing one. `path` is the path that `image` was
    /// opened by.
    ///
    /// # Errors
    /// The system's; `WouldBlock` if a live process has the journal.
    pub(super) fn make(&self, bytes: usize, image: &File, path: &Path) -> io::Result<Mapped> {
        // The name is unique among all processes, including dead ones.
        let new = self.0.with_extension(format!("{:032x}", u128::from_be_bytes(new_id()?)));
        let options = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new);
        let made = options.and_then(|file| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64 + NAME_BYTES)?;
            rustix::fs::flock(&file, EXCLUSIVE)?;
            journal_name::write(&file, bytes as u64, image, path)?;
            let mapped = Mapped::new(file)?;
            let _old = self.hold_old()?;
            std::fs::rename(&new, &self.0)?;
            Ok(mapped)
        });
        if made.is_err() {
            let _ = std::fs::remove_file(&new);
        }
        made
    }

    /// Locks the existing file, so that a sweep that has checked it does not remove the file that
    /// replaces it. Returns nothing if there is no file, or if it belongs to another user. A sweep
    /// of this user does not remove such a file.
    ///
    /// # Errors
    /// The system's; `WouldBlock` if a process keeps the file locked.
    fn hold_old(&self) -> io::Result<Option<File>> {
        loop {
            let Ok(old) = open_own(&self.0) else { return Ok(None) };
            lock(&old, EXCLUSIVE, READER_WAIT)?;
            if is_at(&old, &self.0)? {
                return Ok(Some(old));
            }
        }
    }

    /// Removes the file if it exists.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The lock of a process that writes a journal.
pub(super) const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
/// The lock of a process that only reads a journal.
pub(super) const BESIDE_READERS: FlockOperation = FlockOperation::NonBlockingLockShared;

/// Locks a journal's file. Waits for `wait` at most.
fn lock(file: &File, how: FlockOperation, wait: Duration) -> io::Result<()> {
    let start = Instant::now();
    while let Err(e) = rustix::fs::flock(file, how) {
        if e != Errno::WOULDBLOCK || start.elapsed() >= wait {
            return Err(e.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Opens a journal's file.
///
/// # Errors
/// The system's; `PermissionDenied` for a file that belongs to another user, or that
/// another user may write.
pub(super) fn open_own(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(file)
}

/// Returns an id of this boot of the machine.
///
/// # Errors
/// The system's.
pub(super) fn boot_id() -> io::Result<[u8; 16]> {
    number(BOOT_ID)
}

/// Returns a new id with each call.
///
/// # Errors
/// The system's.
pub(super) fn new_id() -> io::Result<[u8; 16]> {
    number(NEW_ID)
}

/// Reads an id of the kernel.
fn number(path: &str) -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string(path)?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(|_| io::Error::other(format!("{path} has no number")))
}

/// Returns the path of the journal of an image. The file need not exist.
///
/// # Errors
/// The system's.
pub fn path_of(image: &File) -> io::Result<PathBuf> {
    JournalFile::of(image).map(|journal| journal.0)
}

/// Removes the journal of an image that has all its changes.
pub fn remove(image: &File) {
    if let Ok(journal) = JournalFile::of(image) {
        journal.remove();
    }
}

/// Returns whether an open file is the one at `path`.
pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (open, named) = (file.metadata()?, std::fs::symlink_metadata(path));
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (open.dev(), open.ino())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_an_image_and_none_left_behind() {
        let image = tempfile::tempfile().unwrap();
        let journal = JournalFile::of(&image).unwrap();
        let path = Path::new("/image");
        let Ok(first) = journal.make(1 << 20, &image, path) else {
            eprintln!("skip one_file_an_image_and_none_left_behind: no room in {FOLDER}");
            return;
        };
        let find = || journal.find(EXCLUSIVE, Duration::ZERO);
        assert_eq!(find().err().unwrap().kind(), io::ErrorKind::WouldBlock, "its owner lives");
        drop(first);
        let first = find().unwrap();
        first.words()[3].store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(first.words().len(), 1 << 17);
        // A sweep that checks whether the file has to be removed.
        let sweep = first;
        assert_eq!(journal.make(1 << 16, &image, path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(std::fs::metadata(&journal.0).unwrap().len(), (1 << 20) + NAME_BYTES, "it was replaced");
        drop(sweep);
        let second = journal.make(1 << 16, &image, path).unwrap();
        assert_eq!(second.words()[3].load(std::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(second.words().len(), 1 << 13);
        drop(second);
        assert_eq!(find().unwrap().words().len(), 1 << 13);
        let perms = std::os::unix::fs::PermissionsExt::from_mode(0o622);
        std::fs::set_permissions(&journal.0, perms).unwrap();
        assert!(find().is_err(), "others could have written there");
        remove(&image);
        assert!(find().is_err());
        assert_ne!(new_id().unwrap(), new_id().unwrap());
    }
}
