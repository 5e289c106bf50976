//! The FUSE mounts that this process serves itself.
//!
//! Frontends note them here; code that opens files by paths of users asks first. Any thread.
//! What must never happen: a thread of this process waits for one of these mounts. Its request would be answered by our own
//! workers. A process that is killed while it waits so does not end: its /dev/fuse stays open until all its threads have
//! ended, and the thread ends when /dev/fuse is closed.

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, openat, statx};

use crate::error::{Error, Result};

/// Held for a look or a change of the list; nothing is waited for meanwhile.
static MOUNTS: Mutex<Vec<Own>> = Mutex::new(Vec::new());

struct Own {
    device: u64,
    export: String,
    disk: String,
}

fn mounts() -> MutexGuard<'static, Vec<Own>> {
    MOUNTS.lock().expect("no holder panics")
}

/// Keeps a mount on the list until it is dropped.
#[derive(Debug)]
pub struct OwnMount {
    device: u64,
}

impl OwnMount {
    /// Notes the mount with that device number, of that export and disk.
    pub fn new(device: u64, export: &str, disk: &str) -> Self {
        mounts().push(Own { device, export: export.to_owned(), disk: disk.to_owned() });
        Self { device }
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        let mut mounts = mounts();
        if let Some(at) = mounts.iter().position(|own| own.device == self.device) {
            mounts.swap_remove(at);
        }
    }
}

/// The export whose file has that device number.
pub fn export_on(device: u64) -> Option<String> {
    mounts().iter().find(|own| own.device == device).map(|own| own.export.clone())
}

/// Refuses a path that leads to a file of one of our mounts, without asking that mount. A path that leads nowhere is not
/// refused here.
///
/// # Errors
/// `Invalid`, with the export.
pub fn check(path: &Path) -> Result<()> {
    if mounts().is_empty() {
        return Ok(());
    }
    // Neither call sends a request to the mount that the path ends on: the root of a mount is not looked up again, and the
    // kernel knows the device number itself.
    let Ok(file) = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return Ok(()) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(seen) = statx(&file, c"", flags, StatxFlags::empty()) else { return Ok(()) };
    let device = makedev(seen.stx_dev_major, seen.stx_dev_minor);
    match mounts().iter().find(|own| own.device == device) {
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

    #[test]
    fn a_path_on_an_own_mount_is_refused_until_the_mount_is_gone() {
        // No other test opens an image there.
        let path = Path::new("/proc");
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(path).unwrap());
        assert!(check(path).is_ok() && export_on(device).is_none());
        let own = OwnMount::new(device, "f0", "d0");
        assert_eq!(export_on(device).as_deref(), Some("f0"));
        let said = check(path).unwrap_err().to_string();
        assert!(said.contains("export f0") && said.contains("disk d0"), "{said}");
        assert!(check(Path::new("/nothing/here")).is_ok());
        drop(own);
        assert!(check(path).is_ok() && export_on(device).is_none());
    }
}
