//! Snapshots of disks in use: the disk is drained, its image is changed or replaced, and its
//! exports continue.
//!
//! Called by control threads. Lock order: `op_lock` of the disk, then the locks of a drain. What
//! must never happen: a request of a guest fails because of a snapshot, or goes to the image below
//! an overlay.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vshunt_block::{CHAIN_MAX, Overlay, SnapshotInfo};
use vshunt_fuse::mount::identity;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, Direct, DiskInfo, DiskSpec};

use super::Daemon;
use crate::check::Check;
use crate::disk_entry::DiskEntry;
use crate::drained::{with_disk_drained, with_exports_drained};
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

/// A snapshot of a disk that is wanted.
#[derive(Clone, Debug)]
pub struct SnapshotWish {
    /// The name of the disk.
    pub disk: String,
    /// The path of the overlay.
    pub overlay: PathBuf,
    /// Whether it is made.
    pub mode: OverlayMode,
}

/// A snapshot whose overlay is there.
struct PreparedSnapshot {
    entry: Arc<DiskEntry>,
    /// The description of the disk before.
    before: DiskSpec,
    overlay: Overlay,
    /// The description in the overlay, once the disk is there.
    next: Option<DiskSpec>,
}

/// Makes each disk continue in its overlay, or none. All their queues are drained.
///
/// # Errors
/// Those of the first disk that cannot. If one cannot return to its image either, the text says so.
fn switch(all: &mut [PreparedSnapshot]) -> Result<()> {
    for at in 0..all.len() {
        let (done, rest) = all.split_at_mut(at);
        let Some(this) = rest.first_mut() else { break };
        let entry = &this.entry;
        let switched = entry.with_bitmaps_kept(|| entry.disk.switch_to_overlay(&this.before, &this.overlay));
        match switched {
            Ok(next) => {
                entry.set_spec(next.clone());
                this.next = Some(next);
            }
            Err(e) => return Err(switch_back(done, e)),
        }
    }
    Ok(())
}

/// Returns disks to their images, of which each has all of its disk. Returns the error with what
/// that did not achieve.
fn switch_back(done: &mut [PreparedSnapshot], mut error: Error) -> Error {
    for this in done {
        let (entry, before) = (&this.entry, &this.before);
        let Some(next) = this.next.take() else { continue };
        match entry.with_bitmaps_kept(|| entry.disk.switch_back(&next, before)) {
            Ok(()) => entry.set_spec(before.clone()),
            Err(e) => {
                error = error.remedy(format_args!(
                    "disk {} continues in its overlay, because it cannot return to its image: {e}",
                    entry.name
                ));
                this.next = Some(next);
            }
        }
    }
    error
}

impl Daemon {
    /// Takes an external snapshot: the disk continues in `overlay`, and its image becomes the
    /// backing file, which does not change any more.
    ///
    /// # Errors
    /// The disk is unchanged, and no file is left behind.
    pub fn disk_snapshot(&self, name: &str, overlay: &Path, mode: OverlayMode) -> Result<()> {
        self.disks_snapshot(&[SnapshotWish { disk: name.to_owned(), overlay: overlay.to_owned(), mode }])
    }

    /// Takes external snapshots of several disks at one point in time: all their queues are drained
    /// before the first one is switched. The overlays hold all later writes, and no earlier one.
    ///
    /// # Errors
    /// All disks are unchanged, and no file is left behind; or the text names those that are not.
    pub fn disks_snapshot(&self, wishes: &[SnapshotWish]) -> Result<()> {
        let mut wishes: Vec<_> = wishes.iter().collect();
        // Two calls lock common disks in the same order.
        wishes.sort_by(|a, b| a.disk.cmp(&b.disk));
        if let Some(two) = wishes.windows(2).find(|two| two[0].disk == two[1].disk) {
            return Err(Error::invalid(format!("disk {} is named twice; leave one out", two[0].disk)));
        }
        let entries: Result<Vec<_>> = wishes.iter().map(|wish| self.state().disk(&wish.disk)).collect();
        let entries = entries?;
        let _ops: Vec<_> = entries.iter().map(|entry| entry.op_lock()).collect();
        let (mut prepared, mut exports) = (Vec::new(), Vec::new());
        for (entry, wish) in entries.iter().zip(&wishes) {
            match self.prepare_snapshot(entry, wish) {
                Ok((snapshot, its)) => {
                    prepared.push(snapshot);
                    exports.extend(its);
                }
                Err(e) => {
                    prepared.into_iter().for_each(|snapshot| snapshot.overlay.unmake());
                    return Err(e);
                }
            }
        }
        // Most data is written before guests must wait. If a flush fails, the one below fails, too.
        entries.iter().for_each(|entry| drop(entry.disk.sync()));
        let names: Vec<_> = wishes.iter().map(|wish| wish.disk.as_str()).collect();
        let result = with_exports_drained(&names.join(", "), &exports, || switch(&mut prepared));
        if result.is_err() {
            prepared.into_iter().filter(|s| s.next.is_none()).for_each(|snapshot| snapshot.overlay.unmake());
        }
        result
    }

    /// Checks a disk, and makes or opens its overlay. The caller holds `op_lock` of the disk.
    fn prepare_snapshot(
        &self,
        entry: &Arc<DiskEntry>,
        wish: &SnapshotWish,
    ) -> Result<(PreparedSnapshot, Vec<Arc<Export>>)> {
        let exports = self.changeable(entry)?;
        if let Some(export) = exports.iter().find(|e| e.spec.growable == Some(true)) {
            return Err(Error::unsupported(format!(
                "export {} of disk {} is growable=on, which an overlay cannot be; remove it first",
                export.spec.name, wish.disk
            )));
        }
        if entry.disk.backing_images() == CHAIN_MAX {
            return Err(Error::limit(format!(
                "disk {0} has {CHAIN_MAX} backing images, and more are not read; 'vshunt commit {0}' merges the \
                 top image into the one below, and 'vshunt stream {0}' merges all",
                wish.disk
            )));
        }
        let (before, size_bytes) = (entry.spec(), entry.disk.size_bytes());
        let overlay = match wish.mode {
            OverlayMode::New => Overlay::make(&wish.overlay, &before, size_bytes)?,
            OverlayMode::Existing => Overlay::existing(&wish.overlay, &before, size_bytes)?,
        };
        Ok((PreparedSnapshot { entry: entry.clone(), before, overlay, next: None }, exports))
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
            connections: None,
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vshunt_types::spec::Format;

    use super::*;
    use crate::Options;

    #[test]
    fn a_disk_returns_if_another_one_cannot_be_switched() {
        let (daemon, dir) = (Daemon::new(Options { poll_us: 0 }).unwrap(), tempfile::tempdir().unwrap());
        let mut all: Vec<_> = ["a", "b", "c"]
            .map(|name| {
                let base = dir.path().join(name);
                File::create(&base).unwrap().set_len(1 << 20).unwrap();
                let (format, file) = (Some(Format::Raw), Some(base));
                let spec = DiskSpec { name: name.into(), format, file, locking: true, ..DiskSpec::default() };
                daemon.disk_add(spec).unwrap();
                let entry = daemon.state().disk(name).unwrap();
                let overlay = dir.path().join(format!("{name}.qcow2"));
                let mode = OverlayMode::New;
                let wish = SnapshotWish { disk: name.into(), overlay, mode };
                daemon.prepare_snapshot(&entry, &wish).unwrap().0
            })
            .into();
        let image = |name: &str| daemon.state().disk(name).unwrap().spec().file.unwrap();
        // The overlay of the last one is no image any more.
        File::create(dir.path().join("c.qcow2")).unwrap();
        let error = switch(&mut all).unwrap_err().to_string();
        assert!(error.contains("c.qcow2") && !error.contains("cannot return"), "{error}");
        for name in ["a", "b", "c"] {
            assert_eq!(image(name), dir.path().join(name));
        }
        all.into_iter().for_each(|snapshot| snapshot.overlay.unmake());
        assert!(!dir.path().join("a.qcow2").exists());
        // They are not marked as being below an overlay, and are written.
        let wish = |name: &str| SnapshotWish {
            disk: name.into(),
            overlay: dir.path().join(format!("{name}.again")),
            mode: OverlayMode::New,
        };
        daemon.disks_snapshot(&["b", "a"].map(wish)).unwrap();
        assert_eq!(image("a"), dir.path().join("a.again"));
        daemon.disk_remove("a").unwrap();
        let raw = DiskSpec {
            name: "again".into(),
            format: Some(Format::Raw),
            file: Some(dir.path().join("c")),
            ..DiskSpec::default()
        };
        daemon.disk_remove("c").unwrap();
        daemon.disk_add(raw).unwrap();
    }
}
