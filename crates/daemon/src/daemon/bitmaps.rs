//! Dirty bitmaps: added, changed and removed.
//!
//! Called by control threads and jobs' threads. What must never happen: a write that a bitmap
//! missed.

use std::sync::Arc;

use vshunt_block::Bitmap;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BitmapSpec, Format};

use super::Daemon;
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::export::Export;

/// What a bit stands for where nobody says.
const GRANULARITY: u64 = 64 << 10;
/// Dirty bitmaps of a disk: each costs its writes something.
const BITMAPS_MAX: usize = 64;
/// Bytes of a bitmap's name, as the format of qcow2 has it.
const NAME_MAX: usize = 1023;

/// The export that writes to a disk, if there is one, and whether its writes can be watched.
pub(super) fn writer(exports: &[Arc<Export>], entry: &DiskEntry) -> Result<Option<Arc<Export>>> {
    let disk = &entry.name;
    let writer = exports.iter().find(|e| !e.readonly).cloned();
    if let Some(export) = &writer {
        let name = &export.spec.name;
        if export.is_kernel() {
            return Err(Error::unsupported(format!(
                "disk {disk} is written by export {name}, which the kernel serves and tells nobody of its writes: \
                 serve it with engine=user"
            )));
        }
        if export.spec.growable == Some(true) {
            return Err(Error::unsupported(format!(
                "disk {disk} is written by export {name}, which is growable and may be written by the kernel itself: \
                 mount it without growable=on"
            )));
        }
    }
    entry.check_returned()?;
    Ok(writer)
}

/// Does something with nothing in flight that writes.
pub(super) fn at_rest<R>(writer: Option<&Arc<Export>>, f: impl FnOnce() -> R) -> Result<R> {
    match writer {
        Some(export) => export.with_all_drained(f),
        None => Ok(f()),
    }
}

impl Daemon {
    /// Begins a dirty bitmap.
    pub fn bitmap_add(&self, spec: &BitmapSpec) -> Result<()> {
        let granularity = spec.granularity.unwrap_or(GRANULARITY);
        {
            let entry = self.state().disk(&spec.disk)?;
            let _turn = entry.turn();
            self.place_bitmap(&entry, &spec.name, granularity, spec.persistent)?;
        }
        self.change_bitmaps(&spec.disk, |entry| {
            check_new(entry, &spec.name)?;
            let persistent = persistent(entry, spec.persistent)?;
            let bitmap = Bitmap::new(&spec.name, entry.disk.size_bytes(), granularity, persistent)?;
            (bitmap.state().recording, bitmap.state().gap) = (!spec.disabled, spec.disabled);
            entry.watched.state().bitmaps.push(Arc::new(bitmap));
            Ok(())
        })
    }

    /// Gives a bitmap that is about to be begun its place in the disk's image, marked as in use, so
    /// that it is there after our death: inconsistent, as every bitmap whose writer did not write
    /// it back. The disk's turn is held. The image is closed and opened again for it, which guests
    /// wait for.
    ///
    /// Nothing is done where it is not to be kept, and where it is going to be refused. A disk that
    /// a job has stays open: the bitmap gets its place when the image is closed.
    ///
    /// # Errors
    /// The image has no room for it; those of draining the disk. The disk goes on as it was.
    pub(super) fn place_bitmap(
        &self,
        entry: &Arc<DiskEntry>,
        name: &str,
        granularity: u64,
        asked: Option<bool>,
    ) -> Result<()> {
        let disk = &entry.disk;
        let kept = !disk.readonly() && disk.is_qcow2() && persistent(entry, asked).is_ok_and(|kept| kept);
        let exports = self.state().exports_of(entry)?;
        if !kept || check_new(entry, name).is_err() || writer(&exports, entry).is_err() {
            return Ok(());
        }
        if let Some(job) = entry.watched.job() {
            tracing::warn!(
                "bitmap {name} of disk {} is not in its image before job {job} is over and the disk is closed: should vshunt be \
                 killed before, it is lost",
                entry.name
            );
            return Ok(());
        }
        let bitmap = Arc::new(Bitmap::new(name, disk.size_bytes(), granularity, true)?);
        let exports = self.changeable(entry)?;
        let _ = disk.sync();
        entry.watched.state().bitmaps.push(bitmap.clone());
        let placed = with_disk_drained(entry, &exports, || {
            disk.reopen(&entry.spec())?;
            match disk.take_bitmaps().iter().any(|there| there.name == name) {
                true => Ok(()),
                false => Err(Error::invalid(format!(
                    "bitmap {name} cannot be kept in the image of disk {} (see the log); --persistent false leaves it in memory",
                    entry.name
                ))),
            }
        });
        // The one that is begun then has its name.
        entry.watched.state().bitmaps.retain(|b| !Arc::ptr_eq(b, &bitmap));
        placed
    }

    /// Ends one.
    pub fn bitmap_remove(&self, disk: &str, name: &str) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            entry.watched.free_bitmap(disk, name)?;
            entry.watched.state().bitmaps.retain(|b| b.name != name);
            Ok(())
        })
    }

    /// Has all blocks of one count as clean.
    pub fn bitmap_clear(&self, disk: &str, name: &str) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let bitmap = entry.watched.free_bitmap(disk, name)?;
            drop(bitmap.take()?);
            let mut state = bitmap.state();
            state.gap = !state.recording;
            Ok(())
        })
    }

    /// Has writes recorded, or not.
    pub fn bitmap_record(&self, disk: &str, name: &str, recording: bool) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let bitmap = entry.watched.free_bitmap(disk, name)?;
            let mut state = bitmap.state();
            state.recording = recording;
            state.gap |= !recording;
            Ok(())
        })
    }

    /// Adds what is dirty in others to one.
    pub fn bitmap_merge(&self, disk: &str, into: &str, from: &[String]) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let target = entry.watched.free_bitmap(disk, into)?;
            // One in use has part of what is dirty: the rest comes back if the job fails.
            let sources: Vec<_> =
                from.iter().map(|n| entry.watched.free_bitmap(disk, n)).collect::<Result<_>>()?;
            for source in sources.iter().filter(|s| !Arc::ptr_eq(s, &target)) {
                let bits = source.state().bits.clone();
                target.state().bits.add(&bits);
            }
            Ok(())
        })
    }

    /// With nothing in flight, so that no write is between two of them.
    fn change_bitmaps(&self, disk: &str, f: impl FnOnce(&Arc<DiskEntry>) -> Result<()>) -> Result<()> {
        let entry = self.state().disk(disk)?;
        let _turn = entry.turn();
        let exports = self.state().exports_of(&entry)?;
        if entry.disk.readonly() {
            return Err(Error::invalid(format!("disk {disk} is read-only: its bitmaps cannot be changed")));
        }
        // A job that writes to it is no export, and is not drained.
        entry.watched.check_exportable(disk)?;
        let writer = writer(&exports, &entry)?;
        at_rest(writer.as_ref(), || {
            let changed = f(&entry);
            entry.watch();
            changed
        })?
    }
}

/// Whether a bitmap of that name may be begun.
pub(super) fn check_new(entry: &DiskEntry, name: &str) -> Result<()> {
    let disk = &entry.name;
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Error::invalid(format!("a bitmap's name has 1 to {NAME_MAX} bytes")));
    }
    let state = entry.watched.state();
    if state.bitmaps.iter().any(|b| b.name == name) {
        return Err(Error::exists(format!("disk {disk} has a bitmap {name} already")));
    }
    if state.bitmaps.len() >= BITMAPS_MAX {
        return Err(Error::limit(format!("disk {disk} has {BITMAPS_MAX} bitmaps already; remove one")));
    }
    Ok(())
}

/// Whether a bitmap is kept in the image.
pub(super) fn persistent(entry: &DiskEntry, asked: Option<bool>) -> Result<bool> {
    let can = entry.disk.supports_bitmaps();
    match asked {
        Some(true) if !can => Err(Error::unsupported(format!(
            "disk {} cannot keep a bitmap: only qcow2 images of version 3 (compat=1.1) can; leave out persistent",
            entry.name
        ))),
        asked => Ok(asked.unwrap_or(can && entry.spec().format() == Format::Qcow2)),
    }
}
