//! A raw image lent to the kernel, which reads and writes it by itself for those who have a mount's file open
//! (FUSE passthrough).
//!
//! What is lent is a file of its own with locks of its own. The kernel keeps it for as long as anybody has the mount's
//! file open, also when the mount was taken from them or the daemon has gone: so the locks tell whether that is so. What they
//! do not tell of is a mapping (mmap) whose file was closed.

use std::fs::File;
use std::io;

use vshunt_sandbox as sandbox;

use super::{Disk, Kind, lock};

impl Disk {
    /// The image for the kernel, marked as lent if it may be written; none where there is no raw image.
    ///
    /// # Errors
    /// The system's, on opening the image once more.
    pub fn lend(&self, writable: bool) -> io::Result<Option<File>> {
        let Kind::Raw(raw) = &*self.kind() else { return Ok(None) };
        let writable = writable && !self.readonly;
        let file = sandbox::reopen(raw.image(), writable)?;
        // Whoever only reads by the kernel keeps nobody from anything.
        if writable && self.locked {
            lock::take_over(&file, raw.path(), false).map_err(io::Error::other)?;
        }
        // Where the file system has no locks nobody can be told apart, and nobody is refused.
        if writable && let Err(e) = lock::mark_lent(&file) {
            tracing::debug!("{}: {e}", raw.path().display());
        }
        Ok(Some(file))
    }

    /// Whether the kernel may still write to the image by itself for somebody. Asks its file system.
    pub fn is_lent(&self) -> bool {
        match &*self.kind() {
            Kind::Raw(raw) => lock::is_lent(raw.image()),
            Kind::Null | Kind::Ram(_) | Kind::Qcow2(_) | Kind::Gone => false,
        }
    }
}
