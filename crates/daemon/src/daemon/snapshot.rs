//! Snapshots of disks in use: the disk is drained, its image is changed or replaced, and its
//! exports continue.
//!
//! Called by control threads. Lock order: `op_lock` of the disk, then the locks of a drain. What
//! must never happen: a request of a guest fails because of a snapshot, or goes to the image below
//! an overlay.

use std::path::Path;
use std::sync::Arc;

use vshunt_block::{Overlay, SnapshotInfo};
use vshunt_fuse::mount::identity;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, Direct, DiskInfo, DiskSpec};

use super::Daemon;
use crate::check::Check;
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::export::Export;
use crate::registry::WaitingOverlay;

/// Whether the overlay of a snapshot is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverlayMode {
    /// The overlay is made. It names its backing file by its absolute path.
    #[default]
    New,
    /// The overlay exists.
    Existing,
}

impl Daemon {
    /// Takes an external snapshot: the disk continues in `overlay`, and its image becomes the
    /// backing file, which does not change any more.
    ///
    /// # Errors
    /// The disk is unchanged, and no file is left behind.
    pub fn disk_snapshot(&self, name: &str, overlay: &Path, mode: OverlayMode) -> Result<()> {
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
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
        // Most data is written before guests must wait. If this flush fails, the flush below fails,
        // too.
        let _ = disk.sync();
        match with_disk_drained(&entry, &exports, || disk.switch_to_overlay(&now, &overlay)) {
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

    /// Adds an existing overlay that waits for [`snapshot_onto`](Self::snapshot_onto). An image
    /// without a backing file is added as a disk. An overlay is not opened until then.
    ///
    /// # Errors
    /// The name is in use, or the file is not a readable qcow2 image.
    pub fn overlay_add(&self, spec: DiskSpec) -> Result<()> {
        spec.check()?;
        self.state().check_unnamed(&spec.name)?;
        let Some(size_bytes) = Overlay::look(&spec)? else { return self.disk_add(spec) };
        let id = spec.file.as_deref().and_then(identity);
        let mut state = self.state();
        state.check_unnamed(&spec.name)?;
        state.overlays.insert(spec.name.clone(), WaitingOverlay { spec, size_bytes, id });
        Ok(())
    }

    /// Returns the overlays that wait, sorted by name.
    pub fn overlays(&self) -> Vec<DiskInfo> {
        let info = |waiting: &WaitingOverlay| DiskInfo {
            spec: waiting.spec.clone(),
            size_bytes: waiting.size_bytes,
            direct_in_use: false,
            path: "none".to_owned(),
            exports: Vec::new(),
            job: None,
            bitmaps: Vec::new(),
        };
        self.state().overlays.values().map(info).collect()
    }

    /// Takes an external snapshot of disk `name`, which continues in an overlay that waits. The
    /// disk keeps its name and its settings. The name of the overlay becomes free.
    ///
    /// # Errors
    /// There is no such overlay, or its settings differ; or an error of
    /// [`disk_snapshot`](Self::disk_snapshot). The overlay still waits.
    pub fn snapshot_onto(&self, name: &str, overlay: &str) -> Result<()> {
        let (now, over) = {
            let state = self.state();
            let disk = state.disk(name)?;
            let Some(WaitingOverlay { spec: over, .. }) = state.overlays.get(overlay) else {
                let why = match state.disks.contains_key(overlay) {
                    true => {
                        "is a disk by itself; an overlay is an image that names its backing image, added with"
                    }
                    false => "is not there; add the overlay first, by blockdev-add with",
                };
                return Err(Error::invalid(format!("{overlay} {why} \"backing\": null")));
            };
            (disk.spec(), over.clone())
        };
        let unlike = |what: &str| {
            Err(Error::invalid(format!(
                "overlay {overlay} has another {what} than disk {name}, which keeps its own; leave it out of blockdev-add"
            )))
        };
        if over.readonly {
            return unlike("read-only");
        }
        if over.cache != Cache::default() && over.cache != now.cache
            || over.direct != Direct::default() && over.direct != now.direct
        {
            return unlike("cache");
        }
        if over.cache_size.is_some() && over.cache_size != now.cache_size {
            return unlike("cache-size");
        }
        if !over.locking && now.locking {
            return unlike("locking");
        }
        let Some(file) = &over.file else { unreachable!("a qcow2 image has one") };
        self.disk_snapshot(name, file, OverlayMode::Existing)?;
        let mut state = self.state();
        // Another overlay may have the name by now.
        if state.overlays.get(overlay).is_some_and(|there| there.spec == over) {
            state.overlays.remove(overlay);
        }
        Ok(())
    }

    /// Takes an internal snapshot of a qcow2 disk.
    ///
    /// # Errors
    /// The disk is unchanged.
    pub fn disk_snapshot_internal(&self, name: &str, snapshot: &str) -> Result<()> {
        self.closed(name, |entry| entry.disk.save_snapshot(&entry.spec(), snapshot))
    }

    /// Deletes an internal snapshot of a qcow2 disk, by its id, its name, or both.
    ///
    /// # Errors
    /// The disk is unchanged.
    pub fn disk_snapshot_delete(
        &self,
        name: &str,
        id: Option<&str>,
        snapshot: Option<&str>,
    ) -> Result<SnapshotInfo> {
        self.closed(name, |entry| entry.disk.delete_snapshot(&entry.spec(), id, snapshot))
    }

    /// Calls `f` while the image of the disk may be closed.
    fn closed<R>(&self, name: &str, f: impl FnOnce(&DiskEntry) -> Result<R>) -> Result<R> {
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        let exports = self.changeable(&entry)?;
        let _ = entry.disk.sync();
        with_disk_drained(&entry, &exports, || f(&entry))
    }

    /// Returns the exports of a disk whose image may be changed or replaced. The caller holds
    /// `op_lock` of the disk.
    pub(super) fn changeable(&self, entry: &Arc<DiskEntry>) -> Result<Vec<Arc<Export>>> {
        // No export is being made meanwhile: that needs `op_lock`.
        let exports = self.state().exports_of(entry)?;
        entry.watched.check_free(&entry.name)?;
        if entry.disk.readonly() {
            return Err(Error::invalid(format!(
                "disk {} is open with readonly=on, and stays as it is",
                entry.name
            )));
        }
        exports.iter().try_for_each(|e| e.check_uncovered(&entry.disk))?;
        exports.iter().try_for_each(|e| e.check_held())?;
        entry.check_returned()?;
        Ok(exports)
    }
}
