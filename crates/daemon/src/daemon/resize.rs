//! A disk gets another size: by control, by the user of a growable mount, or by the kernel under
//! passthrough.
//!
//! Called by control threads, and by the blocking thread of a mount. What must never happen: a
//! write in flight beyond a new, nearer end that makes the image longer again.

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
    /// Gives a disk another size, or takes note of a block device's new one; guests are told.
    pub fn disk_resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let entry = self.state().disk(name)?;
        let _turn = entry.turn();
        // None is being made: that takes the disk's turn.
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
            // Bitmaps are of the disk's size.
            let writer = writer(&exports, &entry)?;
            at_rest(writer.as_ref(), || entry.resize_watched(size_bytes, || disk.resize(size_bytes)))??;
        }
        self.tell_resized(name, size_bytes, exports);
        Ok(())
    }

    /// Of a disk whose image has to be closed for it.
    fn resize_closed(&self, entry: &Arc<DiskEntry>, exports: &[Arc<Export>], size_bytes: u64) -> Result<()> {
        self.changeable(entry)?;
        let (disk, now) = (&entry.disk, entry.spec());
        let _ = disk.sync();
        with_disk_drained(entry, exports, || {
            entry.resize_watched(size_bytes, || disk.resize_closed(&now, size_bytes))
        })?;
        // What was asked for when it was added is not so any more.
        entry.set_spec(DiskSpec { size: None, ..now });
        Ok(())
    }

    /// Gets a qcow2 disk ready for an export whose users may change its size, and which is about to
    /// be made; with the disk's turn held.
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

    /// The user of a growable export gave its disk another size.
    pub(super) fn resized_by(&self, export: &str, size_bytes: u64) {
        let Some((name, others)) = self.state().disk_and_others(export) else { return };
        for export in others {
            export.config_changed();
        }
        self.tell(&Event::DiskResized { name, size_bytes });
    }

    /// Takes note of the sizes that the kernel may have changed without asking us.
    pub(super) fn learn_sizes(&self) {
        for export in self.shown().iter().filter(|e| e.grows_by_itself()) {
            if let Ok(entry) = self.state().disk(&export.spec.disk) {
                entry.disk.refresh_size();
            }
        }
    }
}

/// Without bitmaps.
fn resize(disk: &Disk, exports: &[Arc<Export>], size_bytes: u64) -> Result<()> {
    match exports.iter().find(|e| !e.readonly).filter(|_| size_bytes < disk.size_bytes()) {
        Some(writer) => shrink(disk, writer, size_bytes),
        // Its users may be changing the size, too.
        None => match exports.iter().find(|e| e.spec.growable == Some(true)) {
            Some(export) => export.with_all_drained(|| disk.resize(size_bytes))?,
            None => disk.resize(size_bytes),
        },
    }
}

/// With nothing in flight beyond the new end. Freeing a file's blocks may take the file system
/// seconds: where it can, the disk is narrowed while its queues are drained, and cut when they go
/// on.
///
/// # Errors
/// The queues cannot be drained, and nothing was changed; or the disk cannot be cut, and has its
/// old size.
fn shrink(disk: &Disk, writer: &Arc<Export>, size_bytes: u64) -> Result<()> {
    let old = disk.size_bytes();
    // The kernel's requests do not ask us how large the disk is, and users who may make it longer
    // do so between the drain and the cut.
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
