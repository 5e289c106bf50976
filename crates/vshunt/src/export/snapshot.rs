//! Snapshots of disks in use: the disk is drained, its image changed or replaced, and its exports go on.
//!
//! Called by control threads. Lock order: the disk's turn, then what a drain takes. What must never happen: a guest's
//! request that fails because of a snapshot, or one that goes to the image below an overlay.

use std::path::Path;
use std::sync::Arc;

use super::daemon::{Daemon, DiskEntry};
use super::drained::with_disk_drained;
use super::life::Export;
use crate::backend::block::{Overlay, Saved};
use crate::error::{Error, Result};

/// Where the overlay of a snapshot comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverlayMode {
    /// It is made; it names the image below by its absolute path.
    #[default]
    New,
    /// It is there.
    Existing,
}

impl Daemon {
    /// External snapshot: the disk goes on in `overlay`, and the image that it had stays as it is, below.
    ///
    /// # Errors
    /// The disk goes on as it was, and nothing is left behind.
    pub fn disk_snapshot(&self, name: &str, overlay: &Path, mode: OverlayMode) -> Result<()> {
        let entry = self.state().disk(name)?;
        let _turn = entry.turn();
        let exports = self.changeable(&entry)?;
        if let Some(export) = exports.iter().find(|e| e.spec.growable == Some(true)) {
            return Err(Error::unsupported(format!(
                "export {} of disk {name} is growable=on, which an overlay cannot be; remove it first",
                export.spec.name
            )));
        }
        let (disk, now) = (&entry.disk, entry.spec());
        let size_bytes = disk.size_bytes();
        let overlay = match mode {
            OverlayMode::New => Overlay::make(overlay, &now, size_bytes)?,
            OverlayMode::Existing => Overlay::existing(overlay, &now, size_bytes)?,
        };
        // Most of what has to be written is so before guests wait. If it fails, so does the flush that counts.
        let _ = disk.sync();
        match with_disk_drained(&entry, &exports, || disk.put_overlay(&now, &overlay)) {
            Ok(next) => {
                entry.set_spec(next);
                Ok(())
            }
            Err(e) => {
                overlay.unmake();
                Err(e)
            }
        }
    }

    /// Takes an internal snapshot of a qcow2 disk.
    ///
    /// # Errors
    /// The disk goes on as it was.
    pub fn disk_snapshot_internal(&self, name: &str, snapshot: &str) -> Result<()> {
        self.closed(name, |entry| entry.disk.save_snapshot(&entry.spec(), snapshot))
    }

    /// Deletes an internal snapshot of a qcow2 disk, by its id, its name, or both.
    ///
    /// # Errors
    /// The disk goes on as it was.
    pub fn disk_snapshot_delete(
        &self,
        name: &str,
        id: Option<&str>,
        snapshot: Option<&str>,
    ) -> Result<Saved> {
        self.closed(name, |entry| entry.disk.delete_snapshot(&entry.spec(), id, snapshot))
    }

    /// Calls `f` while the disk's image may be closed.
    fn closed<R>(&self, name: &str, f: impl FnOnce(&DiskEntry) -> Result<R>) -> Result<R> {
        let entry = self.state().disk(name)?;
        let _turn = entry.turn();
        let exports = self.changeable(&entry)?;
        let _ = entry.disk.sync();
        with_disk_drained(&entry, &exports, || f(&entry))
    }

    /// The exports of a disk whose turn is held and whose image may be changed or replaced.
    pub(super) fn changeable(&self, entry: &Arc<DiskEntry>) -> Result<Vec<Arc<Export>>> {
        // None is being made: that takes the disk's turn.
        let exports = self.state().exports_of(entry)?;
        entry.watched.check_free(&entry.name)?;
        if entry.disk.readonly() {
            return Err(Error::invalid(format!(
                "disk {} is open with readonly=on, and stays as it is",
                entry.name
            )));
        }
        exports.iter().try_for_each(|e| e.check_held())?;
        Ok(exports)
    }
}
