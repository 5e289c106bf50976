//! The regular file that a disk is mounted over: found or made, and removed again if it was made.
//!
//! Control threads call it, without holding a lock: it waits up to two seconds for a file lock, and
//! as long to find out whether a mount is dead. What must never happen: a file that existed before
//! is removed or written to, or a live mount is unmounted.

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

/// How long to wait for another daemon's lock. A process that was killed holds its locks until the
/// operations on its io_uring have ended.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(10);

/// The regular file that a mount covers. It is made if it is missing, and then removed again, at
/// the latest when this value is dropped.
#[derive(Debug)]
pub struct Mountpoint {
    /// Absolute and without symbolic links.
    path: PathBuf,
    /// The file itself, below the mount. Kept open so that no other file gets its inode number.
    file: OwnedFd,
    /// Keeps other daemons from preparing the same file until the mount is gone. None if the file
    /// system has no locks, or the file can be neither read nor written: then two daemons may race
    /// for a moment.
    _lock: Option<OwnedFd>,
    device: (u32, u32),
    inode: u64,
    /// The file was made for the mount and is not removed yet.
    made: AtomicBool,
}

impl Mountpoint {
    /// Prepares `path` for a mount. Follows a symbolic link, unmounts a mount that a killed daemon
    /// left, and makes the file if it is missing.
    ///
    /// # Errors
    /// `Invalid` if it is no regular file, `Exists` or `Busy` if another mount is there; the
    /// system's.
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
                detach_if_dead(path, &file, &seen)?;
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
            // Another process may have changed the path before the lock was taken.
            let again = open_path(path, true).and_then(look);
            if !again.is_ok_and(|s| !s.is_mount_root && is_same(&s, &seen)) {
                continue;
            }
            // A killed daemon left no note whether it made the file below its mount. A file that it
            // makes is empty, and an empty file that a user put there is made again by the next
            // mount.
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

    /// The path: absolute and without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device number and inode of the file below the mount.
    pub(super) fn identity(&self) -> (u64, u64) {
        let (major, minor) = self.device;
        (rustix::fs::makedev(major, minor), self.inode)
    }

    /// A path to this file that stays valid if the file is renamed or covered by a mount.
    pub(super) fn itself(&self) -> PathBuf {
        proc_path(&self.file)
    }

    /// Removes the file if it was made for the mount, is at `path` now, and is still empty.
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
        // Its folder may have been permitted for one command only, so the launcher removes it.
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

/// Unmounts a mount that a killed daemon left over `path`, so that the file below is visible again.
/// Returns whether there was one.
///
/// An image may be below its own dead mount, and a dead mount with passthrough keeps the locks of
/// its image. All other mounts stay, and so does one whose server still answers.
///
/// # Errors
/// `Busy` if the dead mount cannot be unmounted; the system's.
pub fn uncover(path: &Path) -> Result<bool> {
    let mut was_there = false;
    for _ in 0..ROUNDS {
        // A path that cannot be examined is reported when the file is opened.
        let Ok(root) = open_path(path, true) else { break };
        let Some(seen) = look(&root).ok().filter(|seen| seen.is_mount_root) else { break };
        match table::entry(seen.mount.id)? {
            // This process serves the mount, so it must not send it a request.
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

/// Removes the file below a mount that a killed daemon left, after [`uncover`], if that file is
/// empty. It was made for the mount, or is made again by the next one.
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

/// Returns device number and inode of the file at `path`, or none if it is a mount. Sends no
/// request to a FUSE server.
pub fn identity(path: &Path) -> Option<(u64, u64)> {
    let seen = open_path(path, true).and_then(look).ok().filter(|seen| !seen.is_mount_root)?;
    let (major, minor) = seen.mount.device;
    Some((rustix::fs::makedev(major, minor), seen.inode))
}

/// Whether the file is on a mount that this process serves.
fn is_own(seen: &Seen) -> bool {
    let (major, minor) = seen.mount.device;
    own_mounts::export_on(rustix::fs::makedev(major, minor)).is_some()
}

fn is_same(a: &Seen, b: &Seen) -> bool {
    (a.mount.device, a.inode) == (b.mount.device, b.inode)
}

/// Makes an empty file. Returns its inode, or none if another process just made one.
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
    // Only the owner may use it. fusermount3 requires that the owner can write it.
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // An errand, since otherwise Landlock had to permit to make and read all files below that
    // folder.
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
    // An errand for the same reason. The file is regular, and `check_place` has permitted it.
    let opened = sandbox::errand(|| open(OFlags::RDONLY).or_else(|_| open(OFlags::WRONLY)));
    let Ok(Ok(file)) = opened else { return Ok(None) };
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(Errno::AGAIN) if start.elapsed() < LOCK_WAIT => std::thread::sleep(RETRY),
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

/// Unmounts the mount that `root` refers to, if its daemon is gone.
fn detach_if_dead(path: &Path, root: &OwnedFd, seen: &Seen) -> Result<()> {
    let shown = path.display();
    let Some(entry) = table::entry(seen.mount.id)? else {
        // It was unmounted meanwhile; the caller looks again.
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

/// Unmounts a mount without a server.
fn detach_dead(path: &Path, entry: &table::Entry, seen: &Seen) -> Result<()> {
    let (shown, source) = (path.display(), entry.source.to_string_lossy());
    // A process that has the file of a dead mount open only gets errors, so the mount is detached
    // even then.
    if umount::end(&entry.point, seen.mount.device, How::Detach)? == Outcome::InUse {
        return Err(Error::busy(format!(
            "a mount over {shown} that a killed vshunt left cannot be taken away; as root: umount -l {shown}"
        )));
    }
    tracing::warn!("took away the mount of {source} over {shown}, which a killed vshunt had left");
    Ok(())
}

/// Whether a mount has no server. Waits for the end of a server that was killed a moment ago.
fn is_dead(root: &OwnedFd) -> bool {
    let start = Instant::now();
    loop {
        match table::ask_server(root) {
            Server::Dead => return true,
            Server::Unclear if start.elapsed() < LOCK_WAIT => std::thread::sleep(RETRY),
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
