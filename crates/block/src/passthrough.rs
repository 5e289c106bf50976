//! FUSE passthrough: the kernel reads and writes a raw image itself, for processes that have the
//! file of a mount open.
//!
//! The kernel gets an open file of its own, with its own locks. It keeps that file until the last
//! process closes the file of the mount, even if the mount was removed or the daemon has ended. The
//! locks show whether the kernel still has it. They do not show a mapping (mmap) whose file was
//! closed.

use std::fs::File;
use std::io;

use vshunt_sandbox as sandbox;

use super::backend::Backend;
use super::disk::Disk;
use super::lock;

impl Disk {
    /// Opens a raw image again, for the kernel. A writable file is marked, see
    /// [`passthrough_in_use`](Self::passthrough_in_use). Returns nothing for other disks.
    ///
    /// # Errors
    /// The system's.
    pub fn passthrough_fd(&self, writable: bool) -> io::Result<Option<File>> {
        let Backend::Raw(raw) = &self.backend() else { return Ok(None) };
        let writable = writable && !self.readonly;
        let file = sandbox::reopen(raw.image(), writable)?;
        // A reader keeps no other process from the image.
        if writable && self.is_locked() {
            lock::take_over(&file, raw.path(), false).map_err(io::Error::other)?;
        }
        // On a file system without locks the use cannot be detected, and no other process is
        // refused.
        if writable && let Err(e) = lock::mark_passthrough(&file) {
            tracing::debug!("{}: {e}", raw.path().display());
        }
        Ok(Some(file))
    }

    /// Returns whether the kernel may still write to the image for another process. Sends a request
    /// to the file system of the image.
    pub fn passthrough_in_use(&self) -> bool {
        match &self.backend() {
            Backend::Raw(raw) => lock::has_passthrough(raw.image()),
            _ => false,
        }
    }
}
