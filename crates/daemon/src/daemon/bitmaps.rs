//! Commands for dirty bitmaps.
//!
//! Called by control threads and threads of jobs. What must never happen: a bitmap misses a write.

use std::sync::Arc;

use vshunt_block::Bitmap;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BitmapSpec, Format};

use super::Daemon;
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::export::Export;

/// Bytes that a bit stands for by default.
pub(super) const GRANULARITY: u64 = 64 << 10;
/// Dirty bitmaps of a disk at most. Each adds to the cost of a write.
const BITMAPS_MAX: usize = 64;
/// Bytes of the name of a bitmap at most, a limit of the qcow2 format.
const NAME_MAX: usize = 1023;

/// Returns the export that writes to a disk, if there is one.
///
/// # Errors
/// Its writes cannot be observed.
pub(super) fn writer(exports: &[Arc<Export>], entry: &DiskEntry) -> Result<Option<Arc<Export>>> {
    let disk = &entry.name;
    let writer = exports.iter().find(|e| !e.readonly).cloned();
    if let Some(export) = &writer {
        let name = &export.spec.name;
        if export.is_kernel() {
            return Err(Error::unsupported(format!(
                "disk {disk} is written by export {name}, which the kernel serves, so its writes cannot be observed: \
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

/// A bitmap that is about to be added.
pub(super) struct AddedBitmap<'a> {
    pub(super) name: &'a str,
    /// Bytes for each bit.
    pub(super) granularity: u64,
    /// Whether it is stored in the image, if that was said.
    pub(super) persistent: Option<bool>,
}

/// Calls `f` while no write is in flight.
pub(super) fn at_rest<R>(writer: Option<&Arc<Export>>, f: impl FnOnce() -> R) -> Result<R> {
    match writer {
        Some(export) => export.with_all_drained(f),
        None => Ok(f()),
    }
}

impl Daemon {
    /// Adds a dirty bitmap.
    ///
    /// # Errors
    /// The disk cannot have it, or the name is in use.
    pub fn bitmap_add(&self, spec: &BitmapSpec) -> Result<()> {
        let granularity = spec.granularity.unwrap_or(GRANULARITY);
        {
            let entry = self.state().disk(&spec.disk)?;
            let _op = entry.op_lock();
            let added = AddedBitmap { name: &spec.name, granularity, persistent: spec.persistent };
            self.place_bitmaps(&entry, &[added])?;
        }
        self.change_bitmaps(&spec.disk, |entry| new_bitmap(entry, spec).map(|_| ()))
    }

    /// Adds new bitmaps to the image of their disk, marked as in use. So they exist after the death
    /// of the daemon, as inconsistent, like every bitmap that was not written back. The caller
    /// holds `op_lock` of the disk. The image is closed and opened again; guests wait meanwhile.
    ///
    /// Nothing is done for a bitmap that is not persistent, or that will be refused. The disk of a
    /// job stays open, and the bitmaps are added when its image is closed.
    ///
    /// # Errors
    /// The image has no room for them, or the disk cannot be drained. The disk is unchanged.
    pub(super) fn place_bitmaps(&self, entry: &Arc<DiskEntry>, added: &[AddedBitmap<'_>]) -> Result<()> {
        let disk = &entry.disk;
        let exports = self.state().exports_of(entry)?;
        if disk.readonly() || !disk.is_qcow2() || writer(&exports, entry).is_err() {
            return Ok(());
        }
        let mut placed: Vec<Arc<Bitmap>> = Vec::new();
        for bitmap in added {
            let kept = persistent(entry, bitmap.persistent).is_ok_and(|kept| kept);
            if kept && check_new(entry, bitmap.name).is_ok() && placed.iter().all(|b| b.name != bitmap.name) {
                check_number(entry, placed.len())?;
                let new = Bitmap::new(bitmap.name, disk.size_bytes(), bitmap.granularity, true)?;
                placed.push(Arc::new(new));
            }
        }
        if placed.is_empty() {
            return Ok(());
        }
        if let Some(job) = entry.watched.job() {
            let names: Vec<_> = placed.iter().map(|b| b.name.as_str()).collect();
            tracing::warn!(
                "bitmap {} of disk {} is not in its image before job {job} is over and the disk is closed: should vshunt be \
                 killed before, it is lost",
                names.join(", "),
                entry.name
            );
            return Ok(());
        }
        let exports = self.changeable(entry)?;
        let _ = disk.sync();
        entry.watched.state().bitmaps.extend(placed.iter().cloned());
        let result = with_disk_drained(entry, &exports, || {
            disk.reopen(&entry.spec())?;
            let there = disk.take_bitmaps();
            match placed.iter().find(|b| there.iter().all(|there| there.name != b.name)) {
                None => Ok(()),
                Some(lost) => Err(Error::invalid(format!(
                    "bitmap {} cannot be kept in the image of disk {} (see the log); --persistent false leaves it in memory",
                    lost.name, entry.name
                ))),
            }
        });
        // The new bitmaps get their names.
        entry.watched.state().bitmaps.retain(|b| !placed.iter().any(|placed| Arc::ptr_eq(b, placed)));
        result
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// There is no such disk or bitmap, or a job uses it.
    pub fn bitmap_remove(&self, disk: &str, name: &str) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            // An NBD client that still has it must not take it for complete.
            entry.watched.free_bitmap(disk, name)?.state().gap = true;
            entry.watched.state().bitmaps.retain(|b| b.name != name);
            Ok(())
        })
    }

    /// Clears a bitmap.
    ///
    /// # Errors
    /// There is no such disk or bitmap, or a job uses it.
    pub fn bitmap_clear(&self, disk: &str, name: &str) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let bitmap = entry.watched.free_bitmap(disk, name)?;
            drop(bitmap.take()?);
            let mut state = bitmap.state();
            state.gap = !state.recording;
            Ok(())
        })
    }

    /// Switches recording on or off.
    ///
    /// # Errors
    /// There is no such disk or bitmap, or a job uses it.
    pub fn bitmap_record(&self, disk: &str, name: &str, recording: bool) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let bitmap = entry.watched.free_bitmap(disk, name)?;
            let mut state = bitmap.state();
            state.recording = recording;
            state.gap |= !recording;
            Ok(())
        })
    }

    /// Adds the dirty blocks of other bitmaps to one.
    ///
    /// # Errors
    /// There is no such disk or bitmap, or a job uses one.
    pub fn bitmap_merge(&self, disk: &str, into: &str, from: &[String]) -> Result<()> {
        self.change_bitmaps(disk, |entry| {
            let target = entry.watched.free_bitmap(disk, into)?;
            // A bitmap in use has only some of the dirty blocks. The others come back if its job
            // fails.
            let sources: Vec<_> =
                from.iter().map(|n| entry.watched.free_bitmap(disk, n)).collect::<Result<_>>()?;
            for source in sources.iter().filter(|s| !Arc::ptr_eq(s, &target)) {
                let bits = source.state().bits.clone();
                target.state().bits.add(&bits);
            }
            Ok(())
        })
    }

    /// Calls `f` while no write is in flight, so that all changes apply at the same time.
    fn change_bitmaps(&self, disk: &str, f: impl FnOnce(&Arc<DiskEntry>) -> Result<()>) -> Result<()> {
        let entry = self.state().disk(disk)?;
        let _op = entry.op_lock();
        let exports = self.state().exports_of(&entry)?;
        check_changeable(&entry)?;
        let writer = writer(&exports, &entry)?;
        at_rest(writer.as_ref(), || {
            let changed = f(&entry);
            entry.watch();
            changed
        })?
    }
}

/// Checks that the bitmaps of a disk may be changed.
pub(super) fn check_changeable(entry: &DiskEntry) -> Result<()> {
    let disk = &entry.name;
    if entry.disk.readonly() {
        return Err(Error::invalid(format!("disk {disk} is read-only: its bitmaps cannot be changed")));
    }
    // A job that writes to the disk is not drained, since it is no export.
    entry.watched.check_exportable(disk)
}

/// Adds a bitmap. No write is in flight.
pub(super) fn new_bitmap(entry: &DiskEntry, spec: &BitmapSpec) -> Result<Arc<Bitmap>> {
    check_new(entry, &spec.name)?;
    let persistent = persistent(entry, spec.persistent)?;
    let granularity = spec.granularity.unwrap_or(GRANULARITY);
    let bitmap = Arc::new(Bitmap::new(&spec.name, entry.disk.size_bytes(), granularity, persistent)?);
    (bitmap.state().recording, bitmap.state().gap) = (!spec.disabled, spec.disabled);
    entry.watched.state().bitmaps.push(bitmap.clone());
    Ok(bitmap)
}

/// Checks that a bitmap of that name can be added.
pub(super) fn check_new(entry: &DiskEntry, name: &str) -> Result<()> {
    let disk = &entry.name;
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Error::invalid(format!("a bitmap's name has 1 to {NAME_MAX} bytes")));
    }
    let state = entry.watched.state();
    if state.bitmaps.iter().any(|b| b.name == name) {
        return Err(Error::exists(format!("disk {disk} has a bitmap {name} already")));
    }
    drop(state);
    check_number(entry, 0)
}

/// Checks that a bitmap can be added to those of a disk and so many others.
fn check_number(entry: &DiskEntry, others: usize) -> Result<()> {
    match entry.watched.state().bitmaps.len() + others < BITMAPS_MAX {
        true => Ok(()),
        false => {
            Err(Error::limit(format!("disk {} has {BITMAPS_MAX} bitmaps at most; remove one", entry.name)))
        }
    }
}

/// Returns whether a bitmap is stored in the image.
///
/// # Errors
/// The image cannot store it.
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
