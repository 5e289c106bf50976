//! What an overlay has is brought into the image below it, and the disk goes on there.
//!
//! While it is copied the image below is open twice: to be read, through the overlay, and to be written. What is written
//! there is what the overlay has, so nobody reads it through the overlay; and nothing that is read there may move: clusters
//! are written in place, or come to be, and none is freed. So compressed clusters and internal snapshots are refused.
//!
//! The marks (see [`mark`]) are changed when all is copied and stable: first the overlay's, which nobody may use
//! any more, then that of the image below, which may be written from then on.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use qcow2::Image;
use qcow2::check::{Quiet, Repair, check};
use qcow2::header::incompatible;
use vshunt_engine::Uring;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

use super::bits::Bits;
use super::io::Io;
use super::qcow2::{Plain, beside};
use super::replace::shown;
use super::{Disk, Extent, Op, lock, mark, open_image};

/// An image below another, open for writing.
pub struct Below {
    /// As a disk by itself.
    pub disk: Arc<Disk>,
    /// As which it is opened when the disk goes on there.
    pub next: DiskSpec,
    /// What holds its locks, if they are taken.
    lock: Option<File>,
}

impl Below {
    /// Closes it, and lets go of its locks. Nobody else has the disk any more, but for a moment.
    pub fn close(self) -> DiskSpec {
        let Self { disk, next, lock } = self;
        if let Err(e) = disk.close() {
            tracing::error!("the image below: {e}");
        }
        drop(lock);
        next
    }
}

impl Disk {
    /// Opens the image below that of `now`, to be written by a commit, and says how it is opened as a disk by itself. It
    /// is locked for that; [`unlock_below`](Self::unlock_below) is for when it is closed and the disk did not go on there.
    ///
    /// # Errors
    /// There is none; it is one that cannot be committed to: each says what to do instead.
    pub fn open_below(&self, now: &DiskSpec) -> Result<Below> {
        let shown = shown(now);
        let Some(path) = now.file.as_ref().filter(|_| self.is_qcow2()) else {
            return Err(Error::invalid(format!(
                "disk {} is no qcow2 overlay: there is nothing below it that it could be committed to",
                now.name
            )));
        };
        let cannot = |e| Error::io(format_args!("cannot open {shown}"), e);
        let file = open_image(path, false).map_err(cannot)?;
        let plain = Plain::new(file);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        let Some(name) = &image.header().backing else {
            return Err(Error::invalid(format!(
                "{shown} stands on no image: there is nothing that it could be committed to"
            )));
        };
        let format = match image.header().backing_format.as_deref() {
            Some("qcow2") => Format::Qcow2,
            _ => Format::Raw,
        };
        let next =
            DiskSpec { file: Some(beside(path, name)), format: Some(format), size: None, ..now.clone() };
        let lock = self.lock_below(&next)?;
        let below = self.open_locked(now, &next).map(|disk| Below { disk, next: next.clone(), lock });
        if below.is_err() {
            self.unlock_below(&next);
        }
        below
    }

    fn open_locked(&self, now: &DiskSpec, next: &DiskSpec) -> Result<Arc<Self>> {
        let (shown, cannot) =
            (shown(now), |e| Error::io(format_args!("cannot mark the image below {}", shown(now)), e));
        // The lock is there; and the mark says that this overlay is.
        let disk = Self::open_unmarked(&DiskSpec { locking: false, ..next.clone() })?;
        if next.format() == Format::Qcow2 {
            // After it was put right, should a daemon have been killed while it wrote there.
            check_below(next)?;
        }
        if disk.size_bytes() != self.size_bytes() {
            return Err(Error::invalid(format!(
                "{} has a disk of {} bytes, and {shown} one of {}: resize disk {} to that, or end the daemon and use \
                 'qemu-img commit'",
                super::replace::shown(next),
                disk.size_bytes(),
                self.size_bytes(),
                now.name
            )));
        }
        if disk.limits.block_size > self.limits.block_size {
            return Err(Error::unsupported(format!(
                "{} needs blocks of {} bytes, and the guests of disk {} were told {}",
                super::replace::shown(next),
                disk.limits.block_size,
                now.name,
                self.limits.block_size
            )));
        }
        if let (Some(below), Some(overlay)) = (&next.file, &now.file) {
            mark::put_committing(below, overlay).map_err(cannot)?;
        }
        Ok(disk)
    }

    /// Takes the writer's locks of the image below, for a descriptor of their own, in place of this disk's reader's ones: others
    /// who read it stand in the way.
    fn lock_below(&self, next: &DiskSpec) -> Result<Option<File>> {
        let Some(path) = next.file.as_ref().filter(|_| self.locked) else { return Ok(None) };
        let file = open_image(path, true);
        let file = file.map_err(|e| Error::io(format_args!("cannot open {}", path.display()), e))?;
        let kind = self.kind();
        kind.files().iter().filter(|raw| raw.is_of(path)).for_each(|raw| lock::release(raw.image()));
        lock::lock(&file, path, false).inspect_err(|_| self.unlock_below(next))?;
        Ok(Some(file))
    }

    /// Takes the reader's locks of the image below again, which nobody has open for writing any more.
    pub fn unlock_below(&self, next: &DiskSpec) {
        let Some(path) = next.file.as_ref().filter(|_| self.locked) else { return };
        for raw in self.kind().files().iter().filter(|raw| raw.is_of(path)) {
            if let Err(e) = lock::take_over(raw.image(), path, true) {
                tracing::warn!("{e}");
            }
        }
    }

    /// Sets the bits of what its image has of its own, data or zeroes. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn own_blocks(self: &Arc<Self>, bits: &Bits) -> std::io::Result<()> {
        let (mut ring, mut io) = (Uring::new()?, Io::default());
        let handle = self.attach(&mut ring);
        let (mut at, size) = (0, bits.size());
        let mut result = Ok(());
        while at < size && result.is_ok() {
            io.reset(Op::Seek { own: true }, at, false);
            io.len = (size - at).min(1 << 30);
            result = handle.run(&mut ring, &mut io);
            // Without an answer it is taken for data.
            let (extent, len) = io.found.map_or((Extent::Data, io.len), |f| (f.extent, f.len.max(512)));
            if extent != Extent::Absent {
                bits.set(bits.blocks(at..at + len));
            }
            at += len;
        }
        handle.detach(&mut ring);
        result
    }

    /// The disk goes on in the image below, `next`, to which all was copied, and which nobody else has open for writing.
    /// Queues drained as [`replace`](Self::replace) has it.
    ///
    /// # Errors
    /// It goes on in the overlay.
    pub fn put_below(&self, now: &DiskSpec, next: &DiskSpec) -> Result<()> {
        let (Some(overlay), Some(below)) = (now.file.clone(), next.file.clone()) else {
            return Err(Error::invalid(format!("disk {} has no image", now.name)));
        };
        let result = self.replace(now, next, &[], |_| {
            mark::put_committed(&overlay, &below)
                .map_err(|e| Error::io(format_args!("cannot mark {} as committed", overlay.display()), e))?;
            let unmarked = open_image(&below, false).and_then(|file| mark::take_overlay(&file));
            unmarked.map_err(|e| {
                Error::io(format_args!("cannot unmark {}, which is below an overlay", below.display()), e)
            })
        });
        if result.is_err() {
            undo_marks(&overlay, &below);
        }
        result
    }

    fn open_unmarked(spec: &DiskSpec) -> Result<Arc<Self>> {
        Ok(Arc::new(Self::of(spec, super::open_kind(spec, false)?)))
    }
}

fn undo_marks(overlay: &Path, below: &Path) {
    // First what would keep the disk from being opened again.
    if let Err(e) = mark::take_committed(overlay) {
        tracing::error!(
            "{} is in use and stays marked as committed, and would be refused the next time ('setfattr -x \
             user.vshunt.committed' it): {e}",
            overlay.display()
        );
    }
    let again = open_image(below, false).and_then(|f| mark::put_overlay(&f, overlay)).map(drop);
    if let Err(e) = again.and_then(|()| mark::put_committing(below, overlay)) {
        tracing::warn!("{} is not marked as being below {}: {e}", below.display(), overlay.display());
    }
}

/// Whether what is read of an image stays where it is while the image is written.
fn check_below(spec: &DiskSpec) -> Result<()> {
    let shown = shown(spec);
    let Some(path) = &spec.file else { return Ok(()) };
    let file = open_image(path, false).map_err(|e| Error::io(format_args!("cannot open {shown}"), e))?;
    let plain = Plain::new(file);
    let wrong = |e: qcow2::Error| Error::invalid(format!("{shown}: {e}"));
    let image = Image::open(&plain).map_err(wrong)?;
    if image.header().has(incompatible::CORRUPT) {
        return Err(Error::invalid(format!("{shown} is marked as corrupt: nothing is committed to it")));
    }
    let found = check(&plain, Repair::No, &mut Quiet).map_err(wrong)?;
    let what = if image.header().version < 3 {
        // It has no zeroes but by freeing clusters.
        "version 2 (compat=0.10)"
    } else if image.header().has(incompatible::DATA_FILE) {
        "an external data file"
    } else if image.header().snapshots > 0 {
        "internal snapshots"
    } else if found.compressed_clusters > 0 {
        "compressed clusters"
    } else if found.corruptions > 0 || found.check_errors > 0 {
        "errors"
    } else {
        return Ok(());
    };
    Err(Error::unsupported(format!(
        "{shown} has {what}, and cannot be committed to while it is in use: end the daemon and use 'qemu-img commit'"
    )))
}
