//! The FUSE mounts that this process serves itself.
//!
//! Frontends note them here; code that opens files by paths of users asks first. Any thread.
//! What must never happen: a thread of this process waits for one of these mounts. Its request would be answered by our own
//! workers. A process that is killed while it waits so does not end: its /dev/fuse stays open until all its threads have
//! ended, and the thread ends when /dev/fuse is closed.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vshunt_types::sync::Locked;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, openat, statx};
use vshunt_types::error::{Error, Result};

/// How long a look at the list waits for mounts that are being made: longer than fusermount3 may take.
const MAKING_LIMIT: Duration = Duration::from_secs(15);

/// Held for a look or a change of the list.
static LIST: Mutex<List> = Mutex::new(List { mounts: Vec::new(), making: 0 });
/// `making` has become less.
static MADE: Condvar = Condvar::new();

struct List {
    mounts: Vec<Own>,
    /// Mounts that may be visible and are not among `mounts` yet: the kernel chooses the device number when it makes the mount.
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

/// The list when no mount is being made.
///
/// # Errors
/// `Busy`: a mount is still being made after [`MAKING_LIMIT`].
fn settled() -> Result<MutexGuard<'static, List>> {
    let making = |list: &mut List| list.making > 0;
    let (list, waited) = MADE.wait_timeout_while(list(), MAKING_LIMIT, making).expect("no holder panics");
    match waited.timed_out() {
        true => Err(Error::busy("a mount of this daemon is being made, which takes long; try again")),
        false => Ok(list),
    }
}

/// A mount that is being made. Until it is noted, or dropped, [`check`] waits: the mount is visible before its device number is
/// known. The thread that has it calls nothing that calls `check`.
#[derive(Debug)]
pub struct Making(());

impl Making {
    /// To be called before mount(2).
    pub fn begin() -> Self {
        list().making += 1;
        Self(())
    }

    /// Notes the mount with that device number, of that export and disk.
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

/// The export whose file has that device number. Does not wait for mounts that are being made.
pub fn export_on(device: u64) -> Option<String> {
    list().mounts.iter().find(|own| own.device == device).map(|own| own.export.clone())
}

/// Whether a path leads to a file of one of our mounts. Asks no mount, and does not wait for those that are being made: for looks
/// that open nothing.
pub(super) fn has(path: &Path) -> bool {
    let Ok(file) = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return false };
    device_of(file).is_some_and(|device| export_on(device).is_some())
}

/// The device number of a file; its file system is not asked.
fn device_of(file: impl AsFd) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let seen = statx(file, c"", flags, StatxFlags::empty()).ok()?;
    Some(makedev(seen.stx_dev_major, seen.stx_dev_minor))
}

/// Refuses a path that leads to a file of one of our mounts, without asking that mount. A path that leads nowhere is not
/// refused here.
///
/// # Errors
/// `Invalid`, with the export. `Busy`: a mount is being made, and that does not end.
pub fn check(path: &Path) -> Result<()> {
    // The call does not send a request to the mount that the path ends on: the root of a mount is not looked up again.
    match openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => check_file(&file, path),
        Err(_) => Ok(()),
    }
}

/// [`check`] for a file that was opened with O_PATH by that name.
///
/// # Errors
/// Those of [`check`].
pub fn check_file(file: impl AsFd, path: &Path) -> Result<()> {
    // No request either: the kernel knows the device number itself.
    let Some(device) = device_of(file) else { return Ok(()) };
    // A mount that was visible when the file was opened is on this list.
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

    /// No other test here may make a mount meanwhile.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn a_path_is_checked_when_the_mount_that_is_being_made_is_noted() {
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
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
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
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
