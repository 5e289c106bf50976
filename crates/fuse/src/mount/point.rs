//! The regular file that a disk is mounted over: found or made, and removed again if it was made.
//!
//! Called by whoever exports a disk, from any thread and without locks of theirs: a lock is waited for, a dead mount
//! is probed for up to two seconds. What must never happen: a file that was there before is removed or written to, a live
//! mount is taken away.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;
use vshunt_block::own_mounts;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

use super::table::{self, Seen, Server, look, open_path, path_of, proc_path};
use super::umount::{self, How, Outcome};
use super::{FS_TYPE, ROUNDS};

/// How long another daemon's lock is waited for. A process that was killed goes on holding its locks until its
/// io_uring has ended what was under way.
const PATIENCE: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(10);

/// The regular file that is mounted over; made by us if absent, and then removed again by us, at the latest when this
/// is dropped.
#[derive(Debug)]
pub struct Mountpoint {
    /// Absolute and without symbolic links.
    path: PathBuf,
    /// The file itself, below the mount. Kept open so that no other file gets its inode number.
    file: OwnedFd,
    /// Keeps others who prepare the same file off it, from here until the mount is gone. Absent where the file system
    /// has no locks or the file lets us neither read nor write: then there is a short race and nothing worse.
    _lock: Option<OwnedFd>,
    device: (u32, u32),
    inode: u64,
    /// Made by us and not removed yet.
    made: AtomicBool,
}

impl Mountpoint {
    /// Gets `path` ready for being mounted over: a symbolic link is followed, a mount that a killed vshunt left is
    /// taken away, and a file is made where there is none.
    ///
    /// Fails for what is no regular file, and where something is mounted already.
    pub fn prepare(path: &Path) -> Result<Self> {
        let shown = path.display();
        let (mut left_behind, mut made_inode) = (false, None);
        for _ in 0..ROUNDS {
            let file = match open_path(path, true) {
                Ok(file) => file,
                Err(Errno::NOENT) => {
                    made_inode = make(path)?.or(made_inode);
                    continue;
                }
                Err(e) => return Err(cannot_look(path, e)),
            };
            sandbox::check_place(&file, true, format_args!("mountpoint {shown}"))?;
            let seen = look(&file).map_err(|e| cannot_look(path, e))?;
            if seen.kind == FileType::Directory {
                return Err(Error::invalid(format!(
                    "{shown} is a folder, and a disk's contents are one file; name a file, for example {}",
                    path.join("disk").display()
                )));
            }
            if seen.is_mount_root {
                take_dead_away(path, &file, &seen)?;
                left_behind = true;
                continue;
            }
            if seen.kind != FileType::RegularFile {
                return Err(Error::invalid(format!(
                    "{shown} is {} and cannot be mounted over; name a regular file, or one that is not there yet",
                    name_of(seen.kind)
                )));
            }
            let lock = lock(path, &file)?;
            // Others may have been here between the look and the lock.
            let again = open_path(path, true).and_then(look);
            if !again.is_ok_and(|s| !s.is_mount_root && is_same(&s, &seen)) {
                continue;
            }
            // A killed daemon cannot tell whether the file below its mount was made by it. What it makes is empty, and
            // an empty file that somebody else put there to be mounted over is made again whenever it is wanted.
            let made = made_inode == Some(seen.inode) || (left_behind && seen.size_bytes == 0);
            return Ok(Self {
                path: path_of(&file).map_err(|e| cannot_look(path, e))?,
                file,
                _lock: lock,
                device: seen.mount.device,
                inode: seen.inode,
                made: AtomicBool::new(made),
            });
        }
        Err(Error::busy(format!(
            "{shown} is changed by others all the time; try again, or name another file"
        )))
    }

    /// Where it is: absolute and without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device number and inode of the file below the mount.
    pub(super) fn identity(&self) -> (u64, u64) {
        let (major, minor) = self.device;
        (rustix::fs::makedev(major, minor), self.inode)
    }

    /// A path to this very file, even if it has been renamed or mounted over.
    pub(super) fn itself(&self) -> PathBuf {
        proc_path(&self.file)
    }

    /// Removes the file if it was made by us, and is what is at `path` now, and is still empty.
    pub(super) fn remove(&self, path: &Path) {
        if !self.made.load(Ordering::Relaxed) {
            return;
        }
        let Ok(seen) = open_path(path, false).and_then(look) else { return };
        let ours = (seen.mount.device, seen.inode) == (self.device, self.inode);
        if seen.is_mount_root || !ours || seen.size_bytes != 0 {
            return;
        }
        self.made.store(false, Ordering::Relaxed);
        // It may be in a folder that was permitted for the time of one command only.
        if let Err(e) = sandbox::errand(|| fs::remove_file(path)).and_then(|removed| removed) {
            tracing::warn!("cannot remove the file {} that a disk was mounted over: {e}", path.display());
        }
    }
}

impl Drop for Mountpoint {
    fn drop(&mut self) {
        self.remove(&self.path);
    }
}

/// Takes a mount away that a killed vshunt left over `path`, so that the file below is seen again. Whether there was one.
///
/// The image that is to be opened may lie below its own dead mount; and a dead mount with passthrough keeps the locks of
/// its image for as long as it is there. Every other mount stays, and so does one whose server still answers.
///
/// # Errors
/// `Busy` where the dead mount cannot be taken away; the system's.
pub fn uncover(path: &Path) -> Result<bool> {
    let mut was_there = false;
    for _ in 0..ROUNDS {
        // What cannot be looked at is reported when it is opened.
        let Ok(root) = open_path(path, true) else { break };
        let Some(seen) = look(&root).ok().filter(|seen| seen.is_mount_root) else { break };
        match table::entry(seen.mount.id)? {
            // A mount of this process has a server, which must not be asked by it.
            Some(entry) if entry.fs_type == FS_TYPE && !is_own(&seen) && is_dead(&root) => {
                detach_dead(path, &entry, &seen)?;
                was_there = true;
            }
            Some(_) => break,
            None => {}
        }
    }
    Ok(was_there)
}

/// Removes the file that a killed vshunt mounted over at `path`, once it is [uncovered](uncover), if that file is empty:
/// it was made for the mount, or is made again whenever it is wanted.
pub fn remove_left_behind(path: &Path) {
    let Ok(file) = open_path(path, true) else { return };
    let Ok(seen) = look(&file) else { return };
    if seen.is_mount_root || seen.kind != FileType::RegularFile || seen.size_bytes != 0 {
        return;
    }
    if let Err(e) = path_of(&file).map_err(std::io::Error::from).and_then(fs::remove_file) {
        tracing::debug!("cannot remove the file {} that a disk was mounted over: {e}", path.display());
    }
}

/// Device number and inode of what is at `path`, if nothing is mounted there. Asks no server of a mount.
pub fn identity(path: &Path) -> Option<(u64, u64)> {
    let seen = open_path(path, true).and_then(look).ok().filter(|seen| !seen.is_mount_root)?;
    let (major, minor) = seen.mount.device;
    Some((rustix::fs::makedev(major, minor), seen.inode))
}

/// Whether it is on a mount that this process serves.
fn is_own(seen: &Seen) -> bool {
    let (major, minor) = seen.mount.device;
    own_mounts::export_on(rustix::fs::makedev(major, minor)).is_some()
}

fn is_same(a: &Seen, b: &Seen) -> bool {
    (a.mount.device, a.inode) == (b.mount.device, b.inode)
}

/// Makes an empty file; its inode, or nothing if somebody else just made one.
fn make(path: &Path) -> Result<Option<u64>> {
    let shown = path.display();
    if rustix::fs::readlinkat(CWD, path, Vec::new()).is_ok() {
        return Err(Error::invalid(format!(
            "{shown} is a symbolic link to nothing; make the file that it names, or remove the link"
        )));
    }
    let Some(name) = path.file_name() else {
        return Err(Error::invalid(format!("{shown:?} names no file; name one to mount over")));
    };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = match openat(CWD, parent, flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => {
            let parent = parent.display();
            return Err(Error::not_found(format!(
                "the folder of {shown} is not there; make it: mkdir -p {parent}"
            )));
        }
        Err(e) => return Err(cannot_look(path, e)),
    };
    sandbox::check_place(&folder, true, format_args!("the folder of mountpoint {shown}"))?;
    // For the owner alone, for whom fusermount3 wants it writable.
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Landlock would have to let all files below that folder be made and read.
    let made = sandbox::errand(|| openat(&folder, name, flags, Mode::RUSR | Mode::WUSR));
    match made.unwrap_or(Err(Errno::AGAIN)) {
        Ok(file) => look(file).map(|seen| Some(seen.inode)).map_err(|e| cannot_look(path, e)),
        Err(Errno::EXIST) => Ok(None),
        Err(e) => {
            let hint = match e {
                Errno::ACCESS | Errno::PERM => {
                    " (its folder has to be writable; or make the file beforehand)"
                }
                Errno::ROFS => " (make the file beforehand, or name one elsewhere)",
                _ => "",
            };
            Err(Error::io(format!("cannot make the file {shown} to mount over{hint}"), e.into()))
        }
    }
}

fn lock(path: &Path, file: &OwnedFd) -> Result<Option<OwnedFd>> {
    let itself = proc_path(file);
    let flags = OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = |access| openat(CWD, &itself, flags | access, Mode::empty());
    // An errand, as for the making of the file. It is a regular file and was checked.
    let opened = sandbox::errand(|| open(OFlags::RDONLY).or_else(|_| open(OFlags::WRONLY)));
    let Ok(Ok(file)) = opened else { return Ok(None) };
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(Errno::AGAIN) if start.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Err(Errno::AGAIN) => {
                return Err(Error::busy(format!(
                    "{} is locked (flock), by another vshunt that is about to mount there or has its mount moved away; \
                     stop it, or name another file",
                    path.display()
                )));
            }
            Err(_) => return Ok(None),
        }
    }
}

/// Takes the mount away that `root` refers to, if it is one of a vshunt that is gone.
fn take_dead_away(path: &Path, root: &OwnedFd, seen: &Seen) -> Result<()> {
    let shown = path.display();
    let Some(entry) = table::entry(seen.mount.id)? else {
        // Unmounted meanwhile: the next look tells.
        return Ok(());
    };
    let source = entry.source.to_string_lossy().into_owned();
    if entry.fs_type != FS_TYPE {
        return Err(Error::exists(format!(
            "something is mounted over {shown} already ({source}, type {}); unmount it (umount {shown}), or name another \
             file",
            entry.fs_type.to_string_lossy()
        )));
    }
    let (major, minor) = seen.mount.device;
    if let Some(export) = own_mounts::export_on(rustix::fs::makedev(major, minor)) {
        return Err(Error::busy(format!(
            "export {export} of this daemon is mounted over {shown} ({source}); remove that export, or name another file"
        )));
    }
    if !is_dead(root) {
        return Err(Error::busy(format!(
            "another vshunt has its disk mounted over {shown} ({source}); remove that export, or name another file (if \
             its daemon is gone: umount -l {shown})"
        )));
    }
    detach_dead(path, &entry, seen)
}

/// Ends a mount without a server.
fn detach_dead(path: &Path, entry: &table::Entry, seen: &Seen) -> Result<()> {
    let (shown, source) = (path.display(), entry.source.to_string_lossy());
    // What is dead is held by nobody in earnest: whoever has it open only gets errors.
    if umount::end(&entry.point, seen.mount.device, How::Detach)? == Outcome::InUse {
        return Err(Error::busy(format!(
            "a mount over {shown} that a killed vshunt left cannot be taken away; as root: umount -l {shown}"
        )));
    }
    tracing::warn!("took away the mount of {source} over {shown}, which a killed vshunt had left");
    Ok(())
}

/// Whether a mount has no server. One that was killed a moment ago is waited for.
fn is_dead(root: &OwnedFd) -> bool {
    let start = Instant::now();
    loop {
        match table::ask_server(root) {
            Server::Dead => return true,
            Server::Unclear if start.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Server::Alive | Server::Unclear => return false,
        }
    }
}

fn cannot_look(path: &Path, e: Errno) -> Error {
    let hint = match e {
        Errno::ACCESS => " (a folder on the way to it may not be entered)",
        Errno::LOOP => " (it is a symbolic link to itself)",
        Errno::NOTDIR => " (something on the way to it is no folder)",
        _ => "",
    };
    Error::io(format!("cannot look at {} to mount over it{hint}", path.display()), e.into())
}

fn name_of(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::BlockDevice => "a block device",
        FileType::CharacterDevice => "a character device",
        _ => "no regular file",
    }
}
