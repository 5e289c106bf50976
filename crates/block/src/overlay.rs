//! External snapshots: a disk goes on in a new qcow2 image, the overlay, which stands on the image that it had.
//!
//! The order of steps is what makes them safe: 1 the overlay is made, and is on stable storage with its name; 2 the disk's
//! queues are drained and its image is flushed and closed; 3 the image is marked as being below the overlay (see
//! [`mark`]), on stable storage; 4 the overlay is opened, the image below it read-only. A daemon killed before
//! 3 leaves an empty overlay that nobody uses, after it a disk that is to be opened by the overlay's name, with the same
//! contents: the first write to the overlay comes after 4, and none to the image below after 2.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qcow2::Image;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

use super::qcow2::{Plain, backing_of};
use super::replace::shown;
use super::{Disk, NewImage, lock, mark, open_image};

/// An overlay that a disk is about to get, locked.
pub struct Overlay {
    path: PathBuf,
    file: Arc<File>,
    made: bool,
}

impl Overlay {
    /// Makes one, step 1: of `size_bytes`, over the image of `base`.
    ///
    /// # Errors
    /// `Exists` if there is such a file; the system's, no space among them. Nothing is left behind then.
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

    /// The bytes of the disk of an image that names one it stands on; none if it names none. It is not locked.
    ///
    /// # Errors
    /// It cannot be read, or is no qcow2 image.
    pub fn look(spec: &DiskSpec) -> Result<Option<u64>> {
        let path = absolute(image_of(spec)?)?;
        let cannot = |e| Error::io(format_args!("cannot open {}", path.display()), e);
        let plain = Plain::new(open_image(&path, false).map_err(cannot)?);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
        Ok(image.header().backing.is_some().then_some(image.header().size))
    }

    /// Locks one, and lets those use it who may use the image `like`, if that is given.
    fn take(path: &Path, base: &DiskSpec, like: Option<&Path>) -> Result<Self> {
        let cannot = |e| Error::io(format_args!("cannot open {}", path.display()), e);
        let file = open_image(path, true).map_err(cannot)?;
        if base.locking {
            lock::lock(&file, path, false)?;
        }
        if let Some(meta) = like.and_then(|p| std::fs::metadata(p).ok()).filter(|m| m.is_file()) {
            file.set_permissions(meta.permissions()).map_err(cannot)?;
        }
        Ok(Self { path: path.to_owned(), file: Arc::new(file), made: like.is_some() })
    }

    /// Takes one that is there.
    ///
    /// # Errors
    /// It does not stand on the image of `base`, or is no qcow2 image of that size; it is in use.
    pub fn existing(path: &Path, base: &DiskSpec, size_bytes: u64) -> Result<Self> {
        let path = absolute(path)?;
        let shown = path.display();
        mark::check(&path, false)?;
        let cannot = |e| Error::io(format_args!("cannot open {shown}"), e);
        let overlay = Self::take(&path, base, None)?;
        let plain = Plain::new(overlay.file.try_clone().map_err(cannot)?);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        let below = backing_of(&path, overlay.file.try_clone().map_err(cannot)?).map_err(cannot)?;
        if !below.is_some_and(|b| image_of(base).is_ok_and(|base| mark::same(&b, base))) {
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

    /// Removes it, if it was made by us.
    pub fn unmake(self) {
        if self.made
            && let Err(e) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("{} is left behind: {e}", self.path.display());
        }
    }
}

impl Disk {
    /// Steps 2 to 4, with the queues drained as [`replace`](Self::replace) has it: the disk goes on in the overlay; what it
    /// is then comes back.
    ///
    /// # Errors
    /// It goes on in the image of `now`, which is not marked then; the overlay is unused.
    pub fn put_overlay(&self, now: &DiskSpec, overlay: &Overlay) -> Result<DiskSpec> {
        let next = DiskSpec {
            format: Some(Format::Qcow2),
            file: Some(overlay.path.clone()),
            size: None,
            ..now.clone()
        };
        let base = shown(now);
        let result = self.replace(now, &next, std::slice::from_ref(&overlay.file), |closed| {
            let Some(image) = closed.image() else { return Ok(()) };
            match mark::put_overlay(image, &overlay.path) {
                Ok(true) => Ok(()),
                Ok(false) => {
                    tracing::warn!(
                        "{base} is below {} from now on and cannot be marked so (its file system has no extended \
                         attributes for it): see to it that nobody writes to it",
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
                if let Ok(Err(e)) = image.map(|image| mark::take_overlay(&image)) {
                    tracing::warn!("{base} stays marked as having an overlay: {e}");
                }
                Err(e)
            }
        }
    }
}

fn image_of(spec: &DiskSpec) -> Result<&Path> {
    match (&spec.file, spec.format()) {
        (Some(path), Format::Raw | Format::Qcow2) => Ok(path),
        _ => Err(Error::unsupported(format!(
            "disk {} has no image that an overlay could stand on: formats raw and qcow2 have",
            spec.name
        ))),
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::io(path.display(), e))
}
