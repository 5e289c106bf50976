//! Resizes a disk: by a command, by the user of a growable mount, or by the kernel under
//! passthrough.
//!
//! Called by control threads, and by the blocking thread of a mount. What must never happen: a
//! write in flight beyond a new, smaller end makes the image longer again.

use std::sync::Arc;

use vshunt_block::Disk;
use vshunt_types::error::Result;
use vshunt_types::spec::DiskSpec;

use super::Daemon;
use super::bitmaps::{at_rest, writer};
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::event::Event;
use crate::export::Export;

impl Daemon {
    /// Resizes a disk, or records the new size of a block device. Guests are told.
    ///
    /// # Errors
    /// There is no such disk, or it cannot have that size.
    pub fn disk_resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        // No export is being made meanwhile: that needs `op_lock`.
        let exports = self.state().exports_of(&entry)?;
        entry.watched.check_free(name)?;
        let disk = &entry.disk;
        for export in &exports {
            export.check_size(size_bytes)?;
            if export.grows_by_itself() {
                disk.refresh_size();
            }
        }
        if disk.is_qcow2() {
            self.resize_closed(&entry, &exports, size_bytes)?;
        } else if entry.watched.state().bitmaps.is_empty() {
            resize(disk, &exports, size_bytes)?;
        } else {
            // Bitmaps have the size of the disk.
            let writer = writer(&exports, &entry)?;
            at_rest(writer.as_ref(), || entry.resize_watched(size_bytes, || disk.resize(size_bytes)))??;
        }
        self.tell_resized(name, size_bytes, exports);
        Ok(())
    }

    /// Resizes a disk whose image must be closed for it.
    fn resize_closed(&self, entry: &Arc<DiskEntry>, exports: &[Arc<Export>], size_bytes: u64) -> Result<()> {
        self.changeable(entry)?;
        let (disk, now) = (&entry.disk, entry.spec());
        let _ = disk.sync();
        with_disk_drained(entry, exports, || {
            entry.resize_watched(size_bytes, || disk.resize_closed(&now, size_bytes))
        })?;
        // The size that was given when the disk was added is not valid any more.
        entry.set_spec(DiskSpec { size: None, ..now });
        Ok(())
    }

    /// Prepares a qcow2 disk for a new export whose users may change its size. The caller holds
    /// `op_lock` of the disk.
    ///
    /// # Errors
    /// The image cannot grow, or cannot be closed for it.
    pub(super) fn make_growable(&self, entry: &Arc<DiskEntry>) -> Result<()> {
        if !entry.disk.is_qcow2() {
            return Ok(());
        }
        let exports = self.changeable(entry)?;
        with_disk_drained(entry, &exports, || entry.disk.make_growable(&entry.spec()))
    }

    fn tell_resized(&self, name: &str, size_bytes: u64, exports: Vec<Arc<Export>>) {
        for export in exports {
            export.config_changed();
        }
        self.tell(&Event::DiskResized { name: name.to_owned(), size_bytes });
    }

    /// Records that the user of a growable export resized its disk.
    pub(super) fn resized_by(&self, export: &str, size_bytes: u64) {
        let Some((name, others)) = self.state().disk_and_others(export) else { return };
        for export in others {
            export.config_changed();
        }
        self.tell(&Event::DiskResized { name, size_bytes });
    }

    /// Records sizes that the kernel may have changed without telling the daemon.
    pub(super) fn learn_sizes(&self) {
        for export in self.shown().iter().filter(|e| e.grows_by_itself()) {
            if let Ok(entry) = self.state().disk(&export.spec.disk) {
                entry.disk.refresh_size();
            }
        }
    }
}

/// Resizes a disk without its bitmaps.
fn resize(disk: &Disk, exports: &[Arc<Export>], size_bytes: u64) -> Result<()> {
    match exports.iter().find(|e| !e.readonly).filter(|_| size_bytes < disk.size_bytes()) {
        Some(writer) => shrink(disk, writer, size_bytes),
        // Its users may change the size at the same time.
        None => match exports.iter().find(|e| e.spec.growable == Some(true)) {
            Some(export) => export.with_all_drained(|| disk.resize(size_bytes))?,
            None => disk.resize(size_bytes),
        },
    }
}

/// Shrinks a disk while no request is in flight beyond its new end. A file system may need seconds
/// to free the blocks of a file. If possible, the disk gets its new size while its queues are
/// drained, and the file is truncated after they have continued.
///
/// # Errors
/// The queues cannot be drained; or the file cannot be truncated, and the disk has its old size.
fn shrink(disk: &Disk, writer: &Arc<Export>, size_bytes: u64) -> Result<()> {
    let old = disk.size_bytes();
    // Requests in the kernel do not check the size of the disk here, and users who may extend it do
    // so between the drain and the truncation.
    let at_once = writer.is_kernel() || writer.spec.growable == Some(true);
    let narrowed = writer.with_all_drained(|| match !at_once && disk.announce_shrink(size_bytes)? {
        true => Ok(true),
        false => disk.resize(size_bytes).map(|()| false),
    })??;
    if narrowed && let Err(e) = disk.resize(size_bytes) {
        disk.announce_shrink(old)?;
        return Err(e);
    }
    Ok(())
}
