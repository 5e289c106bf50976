//! Journals whose images are gone: a file in /dev/shm stays there until the machine ends if nobody opens its image again.
//!
//! Called once when a daemon has started, on a control thread. A journal says at its end which image it belongs to: the path
//! that it was opened by, the device, and the file handle, which finds the file under whatever name (name_to_handle_at(2)).
//!
//! A process that is killed while it makes a journal leaves a file with one more part to its name, which is removed an hour
//! later.
//!
//! What must never happen: a journal removed whose image is still there. So it is kept if a living process has it, if another
//! user made it, if the image's file system is not mounted or may be a FUSE mount, and whenever it cannot be told. A file is locked from before it is
//! looked at until it is removed, and another takes its place only under that lock (`journal::Place::make`).

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, makedev, openat2, statx};

use super::journal::{ALONE, BYTES_MAX, FOLDER, open_own};

/// Bytes of a journal's file behind the records: what follows here, and a path of 4096 bytes at most (PATH_MAX).
pub(super) const NAME_BYTES: u64 = 8192;
const MAGIC: [u8; 8] = *b"VSJNNAM1";
/// Bytes of a file handle at most (MAX_HANDLE_SZ), and of what comes before it.
const HANDLE_MAX: usize = 128;
const HANDLE_HEAD: usize = 8;
/// Where the parts of a name begin: when the image was missed first, its device, its handle with its length, its path with
/// its length.
const AT_MISSED: usize = 8;
const AT_DEVICE: usize = 16;
const AT_HANDLE: usize = 24;
const AT_PATH: usize = AT_HANDLE + 8 + HANDLE_HEAD + HANDLE_MAX;
const PATH_MAX: usize = 4096;
const _: () = assert!(AT_PATH + 8 + PATH_MAX <= NAME_BYTES as usize);

/// For how long an image has to be missing. Where no handle tells, it may have been moved, and be opened later. A handle can
/// be wrong: another file system can have the same device number and be mounted at the same place for a while.
const MISSING_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
const GONE_FOR: Duration = Duration::from_secs(24 * 3600);
/// Nothing makes a journal for so long.
const HALF_MADE_FOR: Duration = Duration::from_secs(3600);

/// Which image a journal belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    /// When a sweep did not find the image first, seconds since 1970; 0: it was not missing.
    missed_s: u64,
    /// The device that it is on; of a block device its own number.
    device: u64,
    /// As the kernel gave it; empty where it gives none.
    handle: Vec<u8>,
    path: PathBuf,
}

impl Name {
    /// Of an image that is open by the name `path`.
    fn of(image: &File, path: &Path) -> io::Result<Self> {
        let meta = image.metadata()?;
        let block = meta.file_type().is_block_device();
        let device = if block { meta.rdev() } else { meta.dev() };
        let handle = if block { Vec::new() } else { handle_of(image).unwrap_or_default() };
        let path = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
        Ok(Self { missed_s: 0, device, handle, path })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; NAME_BYTES as usize];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        put(AT_MISSED, &self.missed_s.to_le_bytes());
        put(AT_DEVICE, &self.device.to_le_bytes());
        let path = self.path.as_os_str().as_bytes();
        // A path that is longer names nothing that the system opens; without one a journal is kept.
        let path = if path.len() > PATH_MAX { &[] } else { path };
        for (at, part) in [(AT_HANDLE, &self.handle[..]), (AT_PATH, path)] {
            put(at, &(part.len() as u64).to_le_bytes());
            put(at + 8, part);
        }
        bytes
    }

    /// What [`encode`](Self::encode) made; none: it did not.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let part = |at: usize, most: usize| {
            let len = usize::try_from(number(at)?).ok().filter(|len| *len <= most)?;
            bytes.get(at + 8..at + 8 + len)
        };
        let path = part(AT_PATH, PATH_MAX).filter(|path| !path.is_empty())?;
        (bytes.get(..8)? == MAGIC).then_some(Self {
            missed_s: number(AT_MISSED)?,
            device: number(AT_DEVICE)?,
            handle: part(AT_HANDLE, HANDLE_HEAD + HANDLE_MAX)?.to_vec(),
            path: PathBuf::from(OsStr::from_bytes(path)),
        })
    }
}

/// Writes at `offset` of a journal's file which image it belongs to.
pub(super) fn write_name(file: &File, offset: u64, image: &File, path: &Path) -> io::Result<()> {
    file.write_all_at(&Name::of(image, path)?.encode(), offset)
}

/// A file handle as the system calls have it (open_by_handle_at(2)).
#[repr(C, align(8))]
struct Handle {
    bytes: u32,
    kind: i32,
    data: [u8; HANDLE_MAX],
}
const _: () = assert!(size_of::<Handle>() == HANDLE_HEAD + HANDLE_MAX);

/// The handle of an open file; none where its file system has none.
fn handle_of(file: &File) -> Option<Vec<u8>> {
    let mut handle = Handle { bytes: HANDLE_MAX as u32, kind: 0, data: [0; HANDLE_MAX] };
    let mut mount = 0;
    // SAFETY: the kernel writes to `handle`, which has as many bytes of data as it says, and to `mount`; the empty path ends
    // with a zero, and the descriptor is open as long as `file` is borrowed.
    let res = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let len = usize::try_from(handle.bytes).ok().filter(|len| res == 0 && *len <= HANDLE_MAX)?;
    let head = [handle.bytes.to_ne_bytes(), handle.kind.to_ne_bytes()].concat();
    Some([&head[..], &handle.data[..len]].concat())
}

/// Whether a handle's file is on the file system that `beside` is on; none: that cannot be told.
fn is_there(handle: &[u8], beside: &File) -> Option<bool> {
    let (head, data) = handle.split_at_checked(HANDLE_HEAD).filter(|(_, data)| data.len() <= HANDLE_MAX)?;
    let number = |at: usize| head[at..at + 4].try_into().expect("four bytes");
    let (bytes, kind) = (u32::from_ne_bytes(number(0)), i32::from_ne_bytes(number(4)));
    if bytes as usize != data.len() {
        return None;
    }
    let mut handle = Handle { bytes, kind, data: [0; HANDLE_MAX] };
    handle.data[..data.len()].copy_from_slice(data);
    // SAFETY: the kernel reads `handle`, whose data is as long as it says; the descriptor is open as long as `beside` is
    // borrowed. O_PATH opens nothing of the file itself.
    let fd = unsafe {
        libc::open_by_handle_at(beside.as_raw_fd(), (&raw mut handle).cast(), libc::O_PATH | libc::O_CLOEXEC)
    };
    match fd {
        0.. => {
            // SAFETY: the call returned a new descriptor, which nobody else has.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            Some(true)
        }
        // EPERM: it takes CAP_DAC_READ_SEARCH.
        _ => (io::Error::last_os_error().raw_os_error() == Some(libc::ESTALE)).then_some(false),
    }
}

/// What is known of a journal's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    There,
    /// It is gone, under any name.
    Gone,
    /// It is not where it was; it may have another name.
    Missing,
    /// Its file system is not mounted, or it cannot be told.
    Unknown,
}

/// Whether a folder on the way to `path` may be on a FUSE mount, by the text of /proc/self/mountinfo (proc_pid_mountinfo(5)).
/// `path` is absolute.
///
/// A request to such a mount waits for a process, which may have stopped, and cannot be interrupted once that process has read
/// it: this daemon would not end when it is killed.
fn may_be_on_fuse(mountinfo: &[u8], path: &Path) -> bool {
    let Some(folder) = path.parent() else { return true };
    let mut lines = mountinfo.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    lines.any(|line| {
        let mut fields = line.split(|&b| b == b' ');
        let point = fields.nth(4).unwrap_or_default();
        let kind = fields.skip_while(|f| *f != b"-").nth(1).unwrap_or_default();
        let is_fuse = kind.starts_with(b"fuse") && kind != b"fusectl" || kind == b"virtiofs";
        // Escaped characters are not decoded: such a mount counts for what begins like it.
        let until = point.iter().position(|&b| b == b'\\').unwrap_or(point.len());
        let escaped = until < point.len();
        let begins = folder.as_os_str().as_bytes().starts_with(&point[..until]);
        is_fuse && begins && (escaped || folder.starts_with(OsStr::from_bytes(point)))
    })
}

/// Opens a file to look at it, by a path without symbolic links.
fn open_plain(path: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    Ok(File::from(file))
}

/// Opens a folder by a path without symbolic links.
fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    Ok(File::from(folder))
}

/// What is known of a file.
struct Found {
    device: u64,
    inode: u64,
    /// The number of a block device.
    block: Option<u64>,
}

/// Looks at what a path leads to. A mount over the path itself, which this daemon may have made meanwhile, is not asked.
fn find(path: &Path) -> io::Result<Found> {
    let file = open_plain(path)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let seen = statx(&file, c"", flags, StatxFlags::TYPE | StatxFlags::INO)?;
    let is_block = FileType::from_raw_mode(seen.stx_mode.into()) == FileType::BlockDevice;
    Ok(Found {
        device: makedev(seen.stx_dev_major, seen.stx_dev_minor),
        inode: seen.stx_ino,
        block: is_block.then(|| makedev(seen.stx_rdev_major, seen.stx_rdev_minor)),
    })
}

/// Looks for the image of a journal in a file of this name (`vshunt-KIND-DEVICE-INODE`).
fn look(journal: &str, name: &Name) -> Image {
    let mounts = std::fs::read("/proc/self/mountinfo");
    if mounts.map_or(true, |mounts| may_be_on_fuse(&mounts, &name.path)) {
        return Image::Unknown;
    }
    let found = find(&name.path);
    if journal.starts_with("vshunt-block-") {
        return match found {
            Ok(found) if found.block == Some(name.device) => Image::There,
            Ok(_) => Image::Missing,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Image::Missing,
            Err(_) => Image::Unknown,
        };
    }
    let number = journal.rsplit('-').next().and_then(|n| u64::from_str_radix(n, 16).ok());
    let folder = name.path.parent().and_then(|folder| open_folder(folder).ok());
    let Some(folder) = folder.filter(|f| f.metadata().is_ok_and(|meta| meta.dev() == name.device)) else {
        // Not mounted, or mounted elsewhere.
        return Image::Unknown;
    };
    match found {
        Ok(found) if (found.device, Some(found.inode)) == (name.device, number) => return Image::There,
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(_) => return Image::Unknown,
    }
    match is_there(&name.handle, &folder) {
        Some(true) => Image::There,
        Some(false) => Image::Gone,
        None => Image::Missing,
    }
}

/// Removes the journals in /dev/shm whose images are gone.
pub fn sweep() {
    sweep_in(Path::new(FOLDER), SystemTime::now());
}

fn sweep_in(folder: &Path, now: SystemTime) {
    let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let Ok(files) = std::fs::read_dir(folder) else { return };
    for file in files.flatten() {
        let name = file.file_name();
        let Some(name) = name.to_str() else { continue };
        // Others are in use, another user's, or gone meanwhile.
        if is_half_made(name) {
            let _ = sweep_half_made(&file.path(), now);
        } else if is_journal(name)
            && let Ok(Some(image)) = sweep_one(&file.path(), name, now_s)
        {
            tracing::info!("{} is gone: its journal {} is removed", image.display(), file.path().display());
        }
    }
}

/// Whether a file has the name of a journal that is being made.
fn is_half_made(name: &str) -> bool {
    let parts = name.split_once('.');
    parts.is_some_and(|(name, part)| is_journal(name) && part.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes a file whose maker was killed before it was whole.
fn sweep_half_made(path: &Path, now: SystemTime) -> io::Result<()> {
    let file = open_own(path)?;
    let age = now.duration_since(file.metadata()?.modified()?).unwrap_or_default();
    // Before it is locked: its maker locks it a moment after it made it, and does not wait.
    if age < HALF_MADE_FOR {
        return Ok(());
    }
    rustix::fs::flock(&file, ALONE)?;
    if is_at(&file, path)? { std::fs::remove_file(path) } else { Ok(()) }
}

/// Whether a file that is open is the one of that name.
pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (open, named) = (file.metadata()?, std::fs::symlink_metadata(path));
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (open.dev(), open.ino())))
}

fn is_journal(name: &str) -> bool {
    let rest = name.strip_prefix("vshunt-map-").or_else(|| name.strip_prefix("vshunt-block-"));
    rest.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-'))
}

/// Removes one if its image is gone; the image's path then.
fn sweep_one(path: &Path, journal: &str, now_s: u64) -> io::Result<Option<PathBuf>> {
    let file = open_own(path)?;
    // A process that lives and has it keeps it locked.
    rustix::fs::flock(&file, ALONE)?;
    let meta = file.metadata()?;
    let Some(at) = meta.len().checked_sub(NAME_BYTES).filter(|_| meta.len() <= BYTES_MAX) else {
        return Ok(None);
    };
    let mut bytes = vec![0; NAME_BYTES as usize];
    file.read_exact_at(&mut bytes, at)?;
    // An earlier version's has no name.
    let Some(name) = Name::decode(&bytes) else { return Ok(None) };
    let missed = |seconds: u64| file.write_all_at(&seconds.to_le_bytes(), at + AT_MISSED as u64);
    let gone = match look(journal, &name) {
        Image::Gone | Image::Missing if name.missed_s == 0 => {
            missed(now_s)?;
            false
        }
        Image::Gone => now_s.saturating_sub(name.missed_s) >= GONE_FOR.as_secs(),
        Image::Missing => now_s.saturating_sub(name.missed_s) >= MISSING_FOR.as_secs(),
        Image::There | Image::Unknown => {
            if name.missed_s != 0 {
                missed(0)?;
            }
            false
        }
    };
    // The name may have been another file's before this one was locked.
    if !gone || !is_at(&file, path)? {
        return Ok(None);
    }
    std::fs::remove_file(path)?;
    Ok(Some(name.path))
}

#[cfg(test)]
mod tests;
