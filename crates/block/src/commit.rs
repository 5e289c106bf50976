//! Commit: the contents of an overlay are copied to its backing image, and the disk continues in
//! that image.
//!
//! During the copy the backing image is open twice: the overlay reads it, and the copy writes it.
//! The copy writes only blocks that the overlay has, and these are not read through the overlay.
//! Blocks that are read must not move: the copy writes clusters in place or allocates them, and
//! frees none. So a backing image with compressed clusters or internal snapshots is refused.
//!
//! The marks (see [`overlay_xattr`]) change when all is copied and on stable storage: first the
//! mark of the overlay, which may not be used from then on, then that of the backing image, which
//! may be written from then on.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use qcow2::Image;
use qcow2::check::{Quiet, Repair, check};
use qcow2::header::incompatible;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

use super::backend::Backend;
use super::disk::Disk;
use super::file_storage::{FileStorage, in_folder_of};
use super::path_fd::open_image;
use super::replace::shown;
use super::{lock, overlay_xattr};

/// A backing image that is open for writing.
pub struct CommitTarget {
    /// The image as a disk of its own.
    pub disk: Arc<Disk>,
    /// The description of the disk when it continues in this image.
    pub next: DiskSpec,
    /// The file that holds the writer's locks, if locking is on.
    lock: Option<File>,
}

impl CommitTarget {
    /// Closes the image and releases its locks.
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
    /// Opens the backing image of `now` for a commit, and locks it for writing. If the commit
    /// fails, the caller closes it and calls [`relock_backing`](Self::relock_backing).
    ///
    /// # Errors
    /// `Invalid` or `Unsupported`, with the remedy, if there is no backing image or a
    /// commit to it is impossible; those of opening it.
    pub fn open_commit_target(&self, now: &DiskSpec) -> Result<CommitTarget> {
        let shown = shown(now);
        let Some(path) = now.file.as_ref().filter(|_| self.is_qcow2()) else {
            return Err(Error::invalid(format!(
                "disk {} is no qcow2 overlay: there is nothing below it that it could be committed to",
                now.name
            )));
        };
        let cannot = |e| Error::io(format_args!("cannot open {shown}"), e);
        let file = open_image(path, false).map_err(cannot)?;
        let plain = FileStorage::new(file);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        let Some(name) = &image.header().backing else {
            return Err(Error::invalid(format!(
                "{shown} has no backing image: there is nothing that it could be committed to"
            )));
        };
        let format = match image.header().backing_format.as_deref() {
            Some("qcow2") => Format::Qcow2,
            _ => Format::Raw,
        };
        let next = DiskSpec {
            file: Some(in_folder_of(path, name)),
            format: Some(format),
            size: None,
            ..now.clone()
        };
        let lock = self.lock_backing(&next)?;
        let target = self.open_locked(now, &next).map(|disk| CommitTarget { disk, next: next.clone(), lock });
        if target.is_err() {
            self.relock_backing(&next);
        }
        target
    }

    /// Opens and checks the backing image. Its locks are held.
    fn open_locked(&self, now: &DiskSpec, next: &DiskSpec) -> Result<Arc<Self>> {
        let cannot = |e| Error::io(format_args!("cannot mark the image below {}", shown(now)), e);
        // The caller holds the locks, and the mark of the image names this overlay.
        let disk = Self::open_unchecked(&DiskSpec { locking: false, ..next.clone() })?;
        if next.format() == Format::Qcow2 {
            // After the open, which repairs the image if a daemon was killed during a commit.
            check_target(next)?;
        }
        if disk.limits.block_size > self.limits.block_size {
            return Err(Error::unsupported(format!(
                "{} needs blocks of {} bytes, and the guests of disk {} were told {}",
                shown(next),
                disk.limits.block_size,
                now.name,
                self.limits.block_size
            )));
        }
        self.make_as_long(&disk, now, next)?;
        if let (Some(below), Some(overlay)) = (&next.file, &now.file) {
            overlay_xattr::set_committing(below, overlay).map_err(cannot)?;
        }
        Ok(disk)
    }

    /// Makes the disk of the backing image as long as this one. Its new part reads as zeroes, as it
    /// does in the overlay, which has opened the image with its old size. One that is longer is
    /// refused: after a commit the guest would have it.
    fn make_as_long(&self, disk: &Arc<Self>, now: &DiskSpec, next: &DiskSpec) -> Result<()> {
        let (wanted, has, below) = (self.size_bytes(), disk.size_bytes(), shown(next));
        let opened = match &self.backend() {
            Backend::Qcow2(image) => image.backing_bytes(),
            _ => None,
        };
        if let Some(bytes) = opened.filter(|bytes| *bytes != has) {
            return Err(Error::invalid(format!(
                "{below} had a disk of {bytes} bytes when disk {0} was opened, and has one of {has} now: a guest would see what \
                 is behind the old end; copy the disk with 'vshunt mirror {0}'",
                now.name
            )));
        }
        if has > wanted {
            return Err(Error::invalid(format!(
                "{below} has a disk of {has} bytes, and {} one of {wanted}: end the daemon and use 'qemu-img commit', which \
                 leaves the longer one",
                shown(now)
            )));
        }
        if has == wanted {
            return Ok(());
        }
        let grown = match &disk.backend() {
            Backend::Raw(raw) if !raw.is_file() => Err(Error::unsupported(format!(
                "it is a block device of {has} bytes; copy the disk with 'vshunt mirror {}'",
                now.name
            ))),
            Backend::Qcow2(_) if moves_tables(disk, next)? => Err(Error::unsupported(
                "its map covers more than its disk; end the daemon and use 'qemu-img commit'",
            )),
            Backend::Qcow2(_) => disk.resize_closed(&DiskSpec { locking: false, ..next.clone() }, wanted),
            _ => disk.resize(wanted),
        };
        grown.map_err(|e| {
            e.context(format!("{below} cannot become as long as disk {}, {wanted} bytes", now.name))
        })
    }

    /// Replaces this disk's reader locks on the backing image by writer locks on a file of their
    /// own. Fails if another process reads the image.
    fn lock_backing(&self, next: &DiskSpec) -> Result<Option<File>> {
        let Some(path) = next.file.as_ref().filter(|_| self.is_locked()) else { return Ok(None) };
        let file = open_image(path, true);
        let file = file.map_err(|e| Error::io(format_args!("cannot open {}", path.display()), e))?;
        let backend = self.backend();
        backend.files().filter(|raw| raw.is_of(path)).for_each(|raw| lock::release(raw.image()));
        lock::lock(&file, path, false).inspect_err(|_| self.relock_backing(next))?;
        Ok(Some(file))
    }

    /// Takes the reader locks on the backing image again, after it was closed.
    pub fn relock_backing(&self, next: &DiskSpec) {
        let Some(path) = next.file.as_ref().filter(|_| self.is_locked()) else { return };
        for raw in self.backend().files().filter(|raw| raw.is_of(path)) {
            if let Err(e) = lock::take_over(raw.image(), path, true) {
                tracing::warn!("{e}");
            }
        }
    }

    /// Makes the disk continue in the backing image, `next`, after all was copied and the image was
    /// closed. The queues are drained, as [`replace`](Self::replace) requires.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace), and those of the marks. The disk continues in
    /// the overlay then.
    pub fn switch_to_backing(&self, now: &DiskSpec, next: &DiskSpec) -> Result<()> {
        let (Some(overlay), Some(below)) = (now.file.clone(), next.file.clone()) else {
            return Err(Error::invalid(format!("disk {} has no image", now.name)));
        };
        let result = self.replace(now, next, &[], |_| {
            overlay_xattr::set_committed(&overlay, &below)
                .map_err(|e| Error::io(format_args!("cannot mark {} as committed", overlay.display()), e))?;
            let unmarked = open_image(&below, false).and_then(|file| overlay_xattr::clear_overlay(&file));
            unmarked.map_err(|e| {
                Error::io(format_args!("cannot unmark {}, which is below an overlay", below.display()), e)
            })
        });
        if result.is_err() {
            undo_marks(&overlay, &below);
        }
        result
    }
}

/// Restores the marks after a failed switch.
fn undo_marks(overlay: &Path, below: &Path) {
    // First the mark that would keep the disk from being opened again.
    if let Err(e) = overlay_xattr::clear_committed(overlay) {
        tracing::error!(
            "{} is in use and stays marked as committed, and would be refused the next time ('setfattr -x \
             user.vshunt.committed' it): {e}",
            overlay.display()
        );
    }
    let again = open_image(below, false).and_then(|f| overlay_xattr::set_overlay(&f, overlay)).map(drop);
    if let Err(e) = again.and_then(|()| overlay_xattr::set_committing(below, overlay)) {
        tracing::warn!("{} is not marked as being below {}: {e}", below.display(), overlay.display());
    }
}

/// Returns whether a growth of the disk in an image would move tables of its map. The overlay reads
/// them where they are.
fn moves_tables(disk: &Disk, spec: &DiskSpec) -> Result<bool> {
    let (Some(path), Backend::Qcow2(open)) = (&spec.file, &disk.backend()) else { return Ok(false) };
    let shown = path.display();
    let file = open_image(path, false).map_err(|e| Error::io(format_args!("cannot open {shown}"), e))?;
    let plain = FileStorage::new(file);
    Image::open(&plain)
        .and_then(|image| qcow2::resize::growth_moves_tables(&image, open.backing_bytes()))
        .map_err(|e| Error::invalid(format!("{shown}: {e}")))
}

/// Checks that clusters of an image stay in place while the image is written.
fn check_target(spec: &DiskSpec) -> Result<()> {
    let shown = shown(spec);
    let Some(path) = &spec.file else { return Ok(()) };
    let file = open_image(path, false).map_err(|e| Error::io(format_args!("cannot open {shown}"), e))?;
    let plain = FileStorage::new(file);
    let wrong = |e: qcow2::Error| Error::invalid(format!("{shown}: {e}"));
    let image = Image::open(&plain).map_err(wrong)?;
    if image.header().has(incompatible::CORRUPT) {
        return Err(Error::invalid(format!("{shown} is marked as corrupt: nothing is committed to it")));
    }
    let found = check(&plain, Repair::No, &mut Quiet).map_err(wrong)?;
    let what = if image.header().version < 3 {
        // Version 2 cannot store zeroes without freeing clusters.
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
