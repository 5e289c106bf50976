//! Where the journal of an image's map lies: a file in /dev/shm, one an image, named by the image's device and inode.
//!
//! Made when an image is opened for writing, and removed when it is closed in good order. Whoever opens the image after
//! the daemon was killed finds it, has what it says brought into the image, and puts a new one in its place. A program that
//! may not write to the image reads through it. On a control thread, all of it; workers see the memory alone.
//!
//! Behind the records a file names its image, so that files of images that are gone can be removed ([`sweep`]).
//!
//! Who has one holds a lock on it, so that even with locking=off no living daemon's journal is taken for a dead one's.
//!
//! What must never happen: a file of another user trusted; memory that is not really there (a touch of it would be a
//! SIGBUS), so it is allocated before it is mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use qcow2::Storage;
use qcow2::header::{Header, Open, incompatible};
use qcow2::journal::{self, Begun, Changes, Journal, Recovery, Refusal, Words};
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::open::beside;
use super::sweep::{self, NAME_BYTES};
use crate::open_image;

/// Files here outlive processes, and no run of the machine.
pub(super) const FOLDER: &str = "/dev/shm";
/// A number of the machine's run, and a new number with each read.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NEW_ID: &str = "/proc/sys/kernel/random/uuid";
/// Of a journal: whoever made one larger was not us.
pub(super) const BYTES_MAX: u64 = 4 << 20;

/// How long the end of a killed daemon is waited for.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
/// How long a reader waits for a process that has the journal only for a look.
const READER_PATIENCE: Duration = Duration::from_millis(200);

/// A mapping of words.
struct Mapped {
    base: NonNull<AtomicU64>,
    words: usize,
    /// Has the lock.
    _file: File,
}

// SAFETY: it owns a range of address space in which there is nothing but atomics.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the records of a locked file, whose bytes have their memory.
    fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        if !(8 + NAME_BYTES..=BYTES_MAX).contains(&len) {
            return Err(io::Error::other(format!("it has {len} bytes")));
        }
        let len = len - NAME_BYTES;
        let (len, prot) = (len as usize / 8 * 8, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping where the kernel likes; no existing memory is touched.
        let base = unsafe { mmap(null_mut(), len, prot, MapFlags::SHARED, file.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, words: len / 8, _file: file })
    }
}

impl Words for Mapped {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped, at a page's start, until `self` is dropped; others that have the file map it
        // too, and everybody uses atomics. `new` upholds it: a file is never shorter than its mapping.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; what `words` gave out has ended with the borrow.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}

/// The file of one image's journal.
pub(super) struct Place(PathBuf);

impl Place {
    /// Of an open image.
    fn of(image: &File) -> io::Result<Self> {
        let meta = image.metadata()?;
        let (kind, device, number) = match meta.file_type().is_block_device() {
            // Whatever node it is opened by.
            true => ("block", meta.rdev(), 0),
            false => ("map", meta.dev(), meta.ino()),
        };
        Ok(Self(Path::new(FOLDER).join(format!("vshunt-{kind}-{device:x}-{number:x}"))))
    }

    /// Maps the journal that exists, if this user made it. `WouldBlock`: a living process has it. `how`: exclusively, or beside
    /// others that only read.
    fn find(&self, how: FlockOperation, patience: Duration) -> io::Result<Mapped> {
        let file = open_own(&self.0)?;
        lock(&file, how, patience)?;
        Mapped::new(file)
    }

    /// Makes it anew for the image that `image` has open by the name `path`, instead of what is there.
    fn make(&self, bytes: usize, image: &File, path: &Path) -> io::Result<Mapped> {
        // No other process, and none that died before, has a file of this name.
        let new = self.0.with_extension(format!("{:032x}", u128::from_be_bytes(number(NEW_ID)?)));
        let options = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new);
        let made = options.and_then(|file| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64 + NAME_BYTES)?;
            rustix::fs::flock(&file, ALONE)?;
            sweep::write_name(&file, bytes as u64, image, path)?;
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

    /// Locks the file that is there, so that no sweep that has looked at it removes the one that takes its place; none: it is not
    /// there, or another user's, which this user's sweep leaves.
    ///
    /// # Errors
    /// The system's; `WouldBlock` where a process keeps it locked.
    fn hold_old(&self) -> io::Result<Option<File>> {
        loop {
            let Ok(old) = open_own(&self.0) else { return Ok(None) };
            lock(&old, ALONE, READER_PATIENCE)?;
            if sweep::is_at(&old, &self.0)? {
                return Ok(Some(old));
            }
        }
    }

    /// Takes it away, if it is there.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How a journal's file is locked.
pub(super) const ALONE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
const BESIDE_READERS: FlockOperation = FlockOperation::NonBlockingLockShared;

/// Locks a journal's file, after a wait of `patience` at most.
fn lock(file: &File, how: FlockOperation, patience: Duration) -> io::Result<()> {
    let start = Instant::now();
    while let Err(e) = rustix::fs::flock(file, how) {
        if e != Errno::WOULDBLOCK || start.elapsed() >= patience {
            return Err(e.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Opens a journal's file.
///
/// # Errors
/// The system's; `PermissionDenied` for a file that another user made or may write to.
pub(super) fn open_own(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(file)
}

/// A number as the kernel writes it.
fn number(path: &str) -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string(path)?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(|_| io::Error::other(format!("{path} has no number")))
}

/// Begins a journal for an image that was closed or repaired, of so many clusters. `path`: its name.
///
/// # Errors
/// Where there is no room or no /dev/shm; the image is as it was then.
pub(super) fn begin(
    image: &File,
    path: &Path,
    storage: &dyn Storage,
    header: &Header,
) -> io::Result<(Journal, Begun, Place)> {
    let (place, id, boot) = (Place::of(image)?, number(NEW_ID)?, number(BOOT_ID)?);
    let memory = place.make(Journal::bytes(header.clusters()), image, path)?;
    let begun = Journal::new(Box::new(memory), id, boot).ok_or_else(|| io::Error::other("it is too small"));
    let begun = begun.and_then(|journal| {
        let begun = journal::begin(storage, id).map_err(|e| io::Error::other(e.to_string()))?;
        Ok((journal, begun))
    });
    match begun {
        Ok((journal, begun)) => Ok((journal, begun, place)),
        Err(e) => {
            place.remove();
            Err(e)
        }
    }
}

/// What is known of the changes that an image may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacks {
    /// It was closed: none.
    Nothing,
    /// It was not closed, and each completed write was stable: none, but its reference counts may be wrong.
    Counts,
    /// So many records of its journal were brought in.
    Recovered(u64),
    /// What was completed and not flushed is lost.
    Lost(Why),
}

/// Why an image that was not closed has no journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is not there, or cannot be read.
    Missing,
    /// It belongs to another state of the image.
    RolledBack,
    /// An earlier version of this program wrote it.
    Older,
    /// It was written without one.
    Without,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => {
                "has no journal in /dev/shm (the machine was rebooted, another program repaired the image, or RemoveIPC= of \
                 systemd-logind removed the journal)"
            }
            Self::RolledBack => {
                "does not match its journal in /dev/shm, which is not used (the image was rolled back or restored from a \
                 copy)"
            }
            Self::Older => {
                "has a journal of an earlier version of vshunt, which does not name the state of the image (to apply it, open \
                 the image with that version first)"
            }
            Self::Without => "was written without a journal",
        })
    }
}

impl From<Refusal> for Why {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::None | Refusal::Other => Self::Missing,
            Refusal::RolledBack => Self::RolledBack,
            Refusal::Older => Self::Older,
        }
    }
}

/// What an image lacks by its header alone; none: its journal says.
fn lacks(header: &Header) -> Option<Lacks> {
    if header.mark.is_none() && !header.is_open() {
        return Some(Lacks::Nothing);
    }
    match journal::journal_of(header) {
        Some(Open::Journal { .. }) => None,
        Some(Open::Older) => Some(Lacks::Lost(Why::Older)),
        Some(Open::Without { stable: true }) => Some(Lacks::Counts),
        Some(Open::Without { stable: false }) => Some(Lacks::Lost(Why::Without)),
        None => Some(Lacks::Lost(Why::Missing)),
    }
}

/// Brings into an image, opened for writing, what a killed daemon had not written to it. Its reference counts are to be
/// repaired then, before anything else. `path`: its own, which its data file's is relative to.
///
/// # Errors
/// The storage's, a journal that the image has no place for, and one of a daemon that lives.
pub fn recover(image: &File, storage: &dyn Storage, path: &Path) -> qcow2::Result<Lacks> {
    let header = qcow2::Image::open(storage)?.header().clone();
    if let Some(lacks) = lacks(&header) {
        return Ok(lacks);
    }
    let found = Place::of(image).and_then(|place| Ok((place.find(ALONE, PATIENCE)?, number(BOOT_ID)?)));
    let (memory, boot) = match found {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            let why = io::Error::new(e.kind(), "another vshunt serves the image; stop it");
            return Err(qcow2::Error::io("the map's journal")(why));
        }
        Err(_) => return Ok(Lacks::Lost(Why::Missing)),
    };
    if let Some(name) = header.data_file.filter(|_| header.incompatible & incompatible::DATA_FILE != 0) {
        let data = beside(path, &name);
        let synced = open_image(&data, false).and_then(|data| data.sync_data());
        synced.map_err(qcow2::Error::io("cannot bring the data file to stable storage"))?;
    }
    Ok(match journal::recover(storage, &memory, boot)? {
        Recovery::Done(records) => Lacks::Recovered(records),
        Recovery::Refused(why) => Lacks::Lost(why.into()),
    })
}

/// What a reader finds who may not bring a journal into its image.
#[derive(Debug)]
pub enum Through {
    /// The image has all that there is.
    Whole,
    /// What the image lacks.
    Changes(Changes),
    /// A daemon that lives has the image open, and its journal.
    Live,
    /// What was completed and not flushed is lost.
    Lost(Why),
}

/// Reads what an image lacks, with this header, of which nothing is changed. `shared`: it is not locked, and a daemon that lives
/// may have it open.
pub fn read_through(image: &File, header: &Header, shared: bool) -> Through {
    // One that another program left has its map; its counts alone may be wrong.
    if journal::journal_of(header).is_none() {
        return Through::Whole;
    }
    match lacks(header) {
        // Nothing tells whether its daemon lives.
        Some(Lacks::Lost(Why::Without)) if shared => return Through::Live,
        Some(Lacks::Lost(why)) => return Through::Lost(why),
        Some(_) => return Through::Whole,
        None => {}
    }
    let found = Place::of(image)
        .and_then(|place| Ok((place.find(BESIDE_READERS, READER_PATIENCE)?, number(BOOT_ID)?)));
    match found {
        Ok((memory, boot)) => {
            // A device does not get shorter.
            let len = image.metadata().map_or(u64::MAX, |m| if m.is_file() { m.len() } else { u64::MAX });
            let changes = Changes::read(header, len, &memory, boot);
            changes.map_or_else(|e| Through::Lost(e.into()), Through::Changes)
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Through::Live,
        Err(_) => Through::Lost(Why::Missing),
    }
}

/// The path that the journal of an image has, whether the file is there or not.
pub fn path_of(image: &File) -> io::Result<PathBuf> {
    Place::of(image).map(|place| place.0)
}

/// The image has all now: takes its journal away.
pub fn forget(image: &File) {
    if let Ok(place) = Place::of(image) {
        place.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_an_image_and_none_left_behind() {
        let image = tempfile::tempfile().unwrap();
        let place = Place::of(&image).unwrap();
        let path = Path::new("/image");
        let Ok(first) = place.make(1 << 20, &image, path) else {
            eprintln!("skip one_file_an_image_and_none_left_behind: no room in {FOLDER}");
            return;
        };
        let find = || place.find(ALONE, Duration::ZERO);
        assert_eq!(find().err().unwrap().kind(), io::ErrorKind::WouldBlock, "its owner lives");
        drop(first);
        let first = find().unwrap();
        first.words()[3].store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(first.words().len(), 1 << 17);
        // One that looks whether the file is to be removed.
        let sweep = first;
        assert_eq!(place.make(1 << 16, &image, path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(std::fs::metadata(&place.0).unwrap().len(), (1 << 20) + NAME_BYTES, "it was replaced");
        drop(sweep);
        let second = place.make(1 << 16, &image, path).unwrap();
        assert_eq!(second.words()[3].load(std::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(second.words().len(), 1 << 13);
        drop(second);
        assert_eq!(find().unwrap().words().len(), 1 << 13);
        let perms = std::os::unix::fs::PermissionsExt::from_mode(0o622);
        std::fs::set_permissions(&place.0, perms).unwrap();
        assert!(find().is_err(), "others could have written there");
        forget(&image);
        assert!(find().is_err());
        assert_ne!(number(NEW_ID).unwrap(), number(NEW_ID).unwrap());
    }
}
