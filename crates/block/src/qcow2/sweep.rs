//! Removes journals whose images no longer exist. Otherwise they would stay in /dev/shm until a
//! reboot.
//!
//! Called once after the start of a daemon, on a control thread. A journal names its image
//! (`journal_name`).
//!
//! A process that is killed while it creates a journal leaves a file with a suffix, which is
//! removed after an hour.
//!
//! What must never happen: a journal is removed although its image exists. So it is kept if a live
//! process has it, if it belongs to another user, if the image's file system is not mounted or may
//! be a FUSE mount, and in all cases of doubt. The file is locked before it is checked and until it
//! is removed; a new file replaces it only under that lock (`JournalFile::make`).

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, makedev, openat2, statx};

use super::journal_file::{BYTES_MAX, EXCLUSIVE, FOLDER, is_at, open_own};
use super::journal_name::{AT_MISSED, NAME_BYTES, Name, exists};

/// How long an image without a handle has to be missing. It may have been moved, and be opened
/// later.
const MISSING_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long an image has to be missing by its handle. A handle can mislead: another file system can
/// have the same device number and be mounted at the same place for a while.
const GONE_FOR: Duration = Duration::from_secs(24 * 3600);
/// How long a file with a suffix is kept. No process needs as long to create a journal.
const HALF_MADE_FOR: Duration = Duration::from_secs(3600);

/// The state of a journal's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Exists,
    /// It does not exist under any name.
    Gone,
    /// It is not at its path. It may have another name.
    Missing,
    /// Its file system is not mounted, or the state cannot be determined.
    Unknown,
}

/// Returns whether a folder of the absolute path `path` may be on a FUSE mount, by the text of
/// /proc/self/mountinfo (proc_pid_mountinfo(5)).
///
/// A request to such a mount waits for a process, which may be stopped. It cannot be interrupted
/// after that process has read it. This daemon would then survive a SIGKILL.
fn may_be_on_fuse(mountinfo: &[u8], path: &Path) -> bool {
    let Some(folder) = path.parent() else { return true };
    let mut lines = mountinfo.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    lines.any(|line| {
        let mut fields = line.split(|&b| b == b' ');
        let point = fields.nth(4).unwrap_or_default();
        let kind = fields.skip_while(|f| *f != b"-").nth(1).unwrap_or_default();
        let is_fuse = kind.starts_with(b"fuse") && kind != b"fusectl" || kind == b"virtiofs";
        // Escaped characters are not decoded: such a mount counts for all paths with the same
        // beginning.
        let until = point.iter().position(|&b| b == b'\\').unwrap_or(point.len());
        let escaped = until < point.len();
        let begins = folder.as_os_str().as_bytes().starts_with(&point[..until]);
        is_fuse && begins && (escaped || folder.starts_with(OsStr::from_bytes(point)))
    })
}

/// Opens a file with O_PATH, by a path without symbolic links.
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

/// The identity of a file.
struct Found {
    device: u64,
    inode: u64,
    /// The number of a block device.
    block: Option<u64>,
}

/// Returns the identity of the file at a path. A mount at the path itself, which this daemon may
/// have made, gets no request.
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

/// Determines the state of the image of a journal. `journal` is the file name
/// (`vshunt-KIND-DEVICE-INODE`).
fn state_of(journal: &str, name: &Name) -> Image {
    let mounts = std::fs::read("/proc/self/mountinfo");
    if mounts.map_or(true, |mounts| may_be_on_fuse(&mounts, &name.path)) {
        return Image::Unknown;
    }
    let found = find(&name.path);
    if journal.starts_with("vshunt-block-") {
        return match found {
            Ok(found) if found.block == Some(name.device) => Image::Exists,
            Ok(_) => Image::Missing,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Image::Missing,
            Err(_) => Image::Unknown,
        };
    }
    let number = journal.rsplit('-').next().and_then(|n| u64::from_str_radix(n, 16).ok());
    let folder = name.path.parent().and_then(|folder| open_folder(folder).ok());
    let Some(folder) = folder.filter(|f| f.metadata().is_ok_and(|meta| meta.dev() == name.device)) else {
        // The file system is not mounted, or mounted elsewhere.
        return Image::Unknown;
    };
    match found {
        Ok(found) if (found.device, Some(found.inode)) == (name.device, number) => return Image::Exists,
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(_) => return Image::Unknown,
    }
    match exists(&name.handle, &folder) {
        Some(true) => Image::Exists,
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
        // Errors are ignored: the file is in use, belongs to another user, or was removed by
        // another process.
        if is_half_made(name) {
            let _ = sweep_half_made(&file.path(), now);
        } else if is_journal(name)
            && let Ok(Some(image)) = sweep_one(&file.path(), name, now_s)
        {
            tracing::info!("{} is gone: its journal {} is removed", image.display(), file.path().display());
        }
    }
}

/// Returns whether a file has the name of a journal that is being created.
fn is_half_made(name: &str) -> bool {
    let parts = name.split_once('.');
    parts.is_some_and(|(name, part)| is_journal(name) && part.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes a file whose process was killed before the journal was complete.
fn sweep_half_made(path: &Path, now: SystemTime) -> io::Result<()> {
    let file = open_own(path)?;
    let age = now.duration_since(file.metadata()?.modified()?).unwrap_or_default();
    // Before the lock: a process locks its new file without waiting, and must not find it locked.
    if age < HALF_MADE_FOR {
        return Ok(());
    }
    rustix::fs::flock(&file, EXCLUSIVE)?;
    if is_at(&file, path)? { std::fs::remove_file(path) } else { Ok(()) }
}

/// Returns whether a file has the name of a journal.
fn is_journal(name: &str) -> bool {
    let rest = name.strip_prefix("vshunt-map-").or_else(|| name.strip_prefix("vshunt-block-"));
    rest.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-'))
}

/// Removes a journal if its image is gone. Returns the path of the image then.
fn sweep_one(path: &Path, journal: &str, now_s: u64) -> io::Result<Option<PathBuf>> {
    let file = open_own(path)?;
    // A live process that uses the journal keeps it locked.
    rustix::fs::flock(&file, EXCLUSIVE)?;
    let meta = file.metadata()?;
    let Some(at) = meta.len().checked_sub(NAME_BYTES).filter(|_| meta.len() <= BYTES_MAX) else {
        return Ok(None);
    };
    let mut bytes = vec![0; NAME_BYTES as usize];
    file.read_exact_at(&mut bytes, at)?;
    // Journals of earlier versions have no name.
    let Some(name) = Name::decode(&bytes) else { return Ok(None) };
    let missed = |seconds: u64| file.write_all_at(&seconds.to_le_bytes(), at + AT_MISSED as u64);
    let gone = match state_of(journal, &name) {
        Image::Gone | Image::Missing if name.missed_s == 0 => {
            missed(now_s)?;
            false
        }
        Image::Gone => now_s.saturating_sub(name.missed_s) >= GONE_FOR.as_secs(),
        Image::Missing => now_s.saturating_sub(name.missed_s) >= MISSING_FOR.as_secs(),
        Image::Exists | Image::Unknown => {
            if name.missed_s != 0 {
                missed(0)?;
            }
            false
        }
    };
    // The file may have been replaced before the lock was taken.
    if !gone || !is_at(&file, path)? {
        return Ok(None);
    }
    std::fs::remove_file(path)?;
    Ok(Some(name.path))
}

#[cfg(test)]
mod tests;
