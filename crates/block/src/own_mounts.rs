//! The FUSE mounts that this process serves itself.
//!
//! Front ends register them here. Code that opens files by paths of users checks them here first.
//! Any thread may call.
//!
//! What must never happen: a thread of this process waits for one of these mounts. The workers of
//! this process would have to answer it. A process that is killed during such a wait never ends:
//! /dev/fuse stays open until all its threads have ended, and the thread ends when /dev/fuse is
//! closed.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vshunt_types::sync::Locked;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, openat, statx};
use vshunt_types::error::{Error, Result};

/// How long a check waits for mounts that are being made. This is longer than fusermount3 may take.
const MAKING_LIMIT: Duration = Duration::from_secs(15);

/// Guards the list. Held only for a look-up or a change.
static LIST: Mutex<List> = Mutex::new(List { mounts: Vec::new(), making: 0 });
/// Notified when `making` decreases.
static MADE: Condvar = Condvar::new();

struct List {
    mounts: Vec<Own>,
    /// Number of mounts that may be visible and are not in `mounts` yet. The kernel chooses the
    /// device number when it makes a mount.
    making: u32,
}

struct Own {
    device: u64,
    export: String,
    disk: String,
}

fn list() -> MutexGuard<'static, List> {
    LIST.locked()
}

/// Returns the list when no mount is being made.
///
/// # Errors
/// `Busy`: a mount is still being made after [`MAKING_LIMIT`].
fn settled() -> Result<MutexGuard<'static, List>> {
    let making = |list: &mut List| list.making > 0;
    let (list, waited) =
        MADE.wait_timeout_while(list(), MAKING_LIMIT, making).unwrap_or_else(PoisonError::into_inner);
    match waited.timed_out() {
        true => Err(Error::busy("a mount of this daemon is being made, which takes long; try again")),
        false => Ok(list),
    }
}

/// A mount that is being made. The mount is visible before its device number is known, so [`check`]
/// waits until this is registered or dropped. The thread that holds it does not call `check`.
#[derive(Debug)]
pub struct Making(());

impl Making {
    /// Announces a mount. Called before mount(2).
    pub fn begin() -> Self {
        list().making += 1;
        Self(())
    }

    /// Registers the mount with its device number, its export and its disk.
    pub fn note(self, device: u64, export: &str, disk: &str) -> OwnMount {
        OwnMount::new(device, export, disk)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        list().making -= 1;
        MADE.notify_all();
    }
}

/// Keeps a mount on the list until it is dropped.
#[derive(Debug)]
pub struct OwnMount {
    device: u64,
}

impl OwnMount {
    fn new(device: u64, export: &str, disk: &str) -> Self {
        list().mounts.push(Own { device, export: export.to_owned(), disk: disk.to_owned() });
        Self { device }
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        let mounts = &mut list().mounts;
        if let Some(at) = mounts.iter().position(|own| own.device == self.device) {
            mounts.swap_remove(at);
        }
    }
}

/// Returns the export whose mount has this device number. Does not wait for mounts that are being
/// made.
pub fn export_on(device: u64) -> Option<String> {
    list().mounts.iter().find(|own| own.device == device).map(|own| own.export.clone())
}

/// Returns whether a path leads to a file on a mount of this process. Sends no request to a mount,
/// and does not wait for mounts that are being made. For callers that do not open the file.
pub(super) fn has(path: &Path) -> bool {
    let Ok(file) = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return false };
    device_of(file).is_some_and(|device| export_on(device).is_some())
}

/// Returns the device number of a file, without a request to its file system.
fn device_of(file: impl AsFd) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let seen = statx(file, c"", flags, StatxFlags::empty()).ok()?;
    Some(makedev(seen.stx_dev_major, seen.stx_dev_minor))
}

/// Refuses a path that leads to a file on a mount of this process. Sends no request to the mount. A
/// path that does not exist is not refused.
///
/// # Errors
/// `Invalid`, with the export; `Busy` if a mount is still being made after [`MAKING_LIMIT`].
pub fn check(path: &Path) -> Result<()> {
    // This sends no request to a mount at the end of the path, since the root of a mount is not
    // looked up again.
    match openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => check_file(&file, path),
        Err(_) => Ok(()),
    }
}

/// [`check`] for a file that was opened with O_PATH.
///
/// # Errors
/// Those of [`check`].
pub fn check_file(file: impl AsFd, path: &Path) -> Result<()> {
    // This sends no request: the kernel knows the device number.
    let Some(device) = device_of(file) else { return Ok(()) };
    // A mount that was visible when the file was opened is on the list by now.
    match settled()?.mounts.iter().find(|own| own.device == device) {
        None => Ok(()),
        Some(Own { export, disk, .. }) => Err(Error::invalid(format!(
            "{} is the file of export {export} of this daemon, which would wait for itself; use disk {disk} itself, or \
             serve the file by another daemon",
            path.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Held by a test that makes a mount.
    static MOUNTS: Mutex<()> = Mutex::new(());

    #[test]
    fn a_path_is_checked_when_the_mount_that_is_being_made_is_noted() {
        let _mounts = MOUNTS.lock().unwrap_or_else(|e| e.into_inner());
        // No other test opens an image there.
        let path = Path::new("/sys");
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(path).unwrap());
        let making = Making::begin();
        std::thread::scope(|scope| {
            let checked = scope.spawn(|| check(path));
            std::thread::sleep(Duration::from_millis(20));
            let own = making.note(device, "f0", "d0");
            let said = checked.join().unwrap().unwrap_err().to_string();
            assert!(said.contains("export f0") || said.contains("is being made"), "{said}");
            drop(own);
        });
        assert!(check(path).is_ok());
        drop(Making::begin());
        assert!(check(path).is_ok(), "one that could not be made");
    }

    #[test]
    fn a_path_on_an_own_mount_is_refused_until_the_mount_is_gone() {
        let _mounts = MOUNTS.lock().unwrap_or_else(|e| e.into_inner());
        // No other test opens an image there.
        let path = Path::new("/proc");
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(path).unwrap());
        assert!(check(path).is_ok() && export_on(device).is_none());
        let own = Making::begin().note(device, "f0", "d0");
        assert_eq!(export_on(device).as_deref(), Some("f0"));
        let said = check(path).unwrap_err().to_string();
        assert!(said.contains("export f0") && said.contains("disk d0"), "{said}");
        assert!(check(Path::new("/nothing/here")).is_ok());
        drop(own);
        assert!(check(path).is_ok() && export_on(device).is_none());
    }
}
