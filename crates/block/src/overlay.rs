//! External snapshots: a disk continues in a new qcow2 image, the overlay. The current image
//! becomes its backing image.
//!
//! The order of the steps makes a snapshot safe:
//!
//! | step | what happens | if the daemon is killed after it |
//! | --- | --- | --- |
//! | 1 | the overlay is created, on stable storage | an empty overlay is left over |
//! | 2 | the queues are drained; the image is flushed and closed | the same |
//! | 3 | the image is marked as a backing image (see [`overlay_xattr`]), on stable storage | the disk is opened by the overlay's path, with the same contents |
//! | 4 | the overlay is opened, with the image as its read-only backing image | the same |
//!
//! There is no write to the image after step 2, and none to the overlay before step 4.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qcow2::Image;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

use super::create::NewImage;
use super::disk::Disk;
use super::file_storage::{FileStorage, backing_of};
use super::path_fd::open_image;
use super::replace::shown;
use super::{lock, overlay_xattr};

/// A new overlay of a disk, locked.
pub struct Overlay {
    path: PathBuf,
    file: Arc<File>,
    created: bool,
}

impl Overlay {
    /// Creates an overlay of `size_bytes` with the image of `base` as its backing image (step 1).
    ///
    /// # Errors
    /// `Exists` if the file exists; those of the system, such as no space. No file is left
    /// behind then.
    pub fn make(path: &Path, base: &DiskSpec, size_bytes: u64) -> Result<Self> {
        let (path, below) = (absolute(path)?, absolute(image_of(base)?)?);
        let shown = path.display();
        let Some(name) = below.to_str() else {
            return Err(Error::invalid(format!(
                "{} is no text, and no overlay can name it",
                below.display()
            )));
        };
        let backing = Some((name.to_owned(), base.format()));
        if path.exists() {
            return Err(Error::exists(format!(
                "{shown} is there already; give another name, or use it as it is, if it is an overlay of {name} \
                 (--existing, mode=existing)"
            )));
        }
        NewImage { path: &path, format: Format::Qcow2, size: size_bytes, backing, overwrite: false }
            .make()?;
        Self::take(&path, base, Some(&below)).inspect_err(|_| drop(std::fs::remove_file(&path)))
    }

    /// Returns the size of the disk of an overlay, bytes; none if the image has no backing image.
    /// The image is not locked.
    ///
    /// # Errors
    /// `Io` if the image cannot be read; `Invalid` if it is no qcow2 image.
    pub fn look(spec: &DiskSpec) -> Result<Option<u64>> {
        let path = absolute(image_of(spec)?)?;
        let cannot = |e| Error::io(format_args!("cannot open {}", path.display()), e);
        let plain = FileStorage::new(open_image(&path, false).map_err(cannot)?);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
        Ok(image.header().backing.is_some().then_some(image.header().size))
    }

    /// Opens and locks an overlay. Gives it the permissions of the image `like`, if there is one.
    fn take(path: &Path, base: &DiskSpec, like: Option<&Path>) -> Result<Self> {
        let cannot = |e| Error::io(format_args!("cannot open {}", path.display()), e);
        let file = open_image(path, true).map_err(cannot)?;
        if base.locking {
            lock::lock(&file, path, false)?;
        }
        if let Some(meta) = like.and_then(|p| std::fs::metadata(p).ok()).filter(|m| m.is_file()) {
            file.set_permissions(meta.permissions()).map_err(cannot)?;
        }
        Ok(Self { path: path.to_owned(), file: Arc::new(file), created: like.is_some() })
    }

    /// Takes an existing overlay.
    ///
    /// # Errors
    /// `Invalid` if its backing image is not the image of `base`, or if it is no qcow2
    /// image of that size; `Busy` if it is in use.
    pub fn existing(path: &Path, base: &DiskSpec, size_bytes: u64) -> Result<Self> {
        let path = absolute(path)?;
        let shown = path.display();
        overlay_xattr::check(&path, false)?;
        let cannot = |e| Error::io(format_args!("cannot open {shown}"), e);
        let overlay = Self::take(&path, base, None)?;
        let plain = FileStorage::new(overlay.file.try_clone().map_err(cannot)?);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        let below = backing_of(&path, overlay.file.try_clone().map_err(cannot)?).map_err(cannot)?;
        if !below.is_some_and(|b| image_of(base).is_ok_and(|base| overlay_xattr::is_same_file(&b, base))) {
            return Err(Error::invalid(format!(
                "{shown} does not stand on {0}; 'qemu-img create -f qcow2 -b {0} -F FORMAT {shown}' makes one that does",
                super::replace::shown(base)
            )));
        }
        if image.header().size != size_bytes {
            return Err(Error::invalid(format!(
                "{shown} has a disk of {} bytes, and {} one of {size_bytes}; an overlay has to have the same",
                image.header().size,
                super::replace::shown(base)
            )));
        }
        Ok(overlay)
    }

    /// Removes the overlay if [`make`](Self::make) created it.
    pub fn unmake(self) {
        if self.created
            && let Err(e) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("{} is left behind: {e}", self.path.display());
        }
    }
}

impl Disk {
    /// Makes the disk continue in the overlay (steps 2 to 4). The queues are drained, as
    /// [`replace`](Self::replace) requires. Returns the new description of the disk.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace), and those of the mark. The disk then continues
    /// in the image of `now` without a mark, and the overlay is unused.
    pub fn switch_to_overlay(&self, now: &DiskSpec, overlay: &Overlay) -> Result<DiskSpec> {
        let next = DiskSpec {
            format: Some(Format::Qcow2),
            file: Some(overlay.path.clone()),
            size: None,
            ..now.clone()
        };
        let base = shown(now);
        let result = self.replace(now, &next, std::slice::from_ref(&overlay.file), |closed| {
            let Some(image) = closed.image() else { return Ok(()) };
            match overlay_xattr::set_overlay(image, &overlay.path) {
                Ok(true) => Ok(()),
                Ok(false) => {
                    tracing::warn!(
                        "{base} is below {} from now on and cannot be marked so (its file system has no extended \
                         attributes for it): make sure that no process writes to it",
                        overlay.path.display()
                    );
                    Ok(())
                }
                Err(e) => {
                    Err(Error::io(format_args!("cannot mark {base} as being below {}", overlay.path.display()), e))
                }
            }
        });
        match result {
            Ok(()) => Ok(next),
            Err(e) => {
                let image =
                    image_of(now).and_then(|path| open_image(path, false).map_err(|e| Error::io(&base, e)));
                if let Ok(Err(e)) = image.map(|image| overlay_xattr::clear_overlay(&image)) {
                    tracing::warn!("{base} stays marked as having an overlay: {e}");
                }
                Err(e)
            }
        }
    }

    /// Undoes [`switch_to_overlay`](Self::switch_to_overlay), which was called while the same drain
    /// lasted: the overlay has nothing of its own. `now` is the description that it returned.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace), and those of the mark. The disk continues in the
    /// overlay then.
    pub fn switch_back(&self, now: &DiskSpec, before: &DiskSpec) -> Result<()> {
        let base = image_of(before)?;
        let unmark = || open_image(base, false).and_then(|image| overlay_xattr::clear_overlay(&image));
        self.replace(now, before, &[], |_| {
            unmark().map_err(|e| Error::io(format_args!("cannot unmark {}", base.display()), e))
        })
        .inspect_err(|_| {
            let overlay = image_of(now).ok();
            let again = open_image(base, false)
                .and_then(|image| overlay.map_or(Ok(true), |path| overlay_xattr::set_overlay(&image, path)));
            if let Err(e) = again {
                tracing::warn!("{} is not marked as being below its overlay: {e}", base.display());
            }
        })
    }
}

/// Returns the path of the image of a disk.
fn image_of(spec: &DiskSpec) -> Result<&Path> {
    match (&spec.file, spec.format()) {
        (Some(path), Format::Raw | Format::Qcow2) => Ok(path),
        (None, Format::Qcow2) => Err(Error::unsupported(format!(
            "the image of disk {} is on a server, and an overlay on this host cannot stand on it: take an internal snapshot",
            spec.name
        ))),
        _ => Err(Error::unsupported(format!(
            "disk {} has no image that an overlay could stand on: formats raw and qcow2 have",
            spec.name
        ))),
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::io(path.display(), e))
}
