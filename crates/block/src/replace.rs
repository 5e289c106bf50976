//! Replaces the image of a disk, or closes it for a change and opens it again, while the exports of
//! the disk stay.
//!
//! Called by control threads that hold the lock for operations on the disk, with all its queues
//! drained. So no handle refers to the image. (The blocking thread of a mount works only for
//! requests in flight, so it is idle then.) The old image is closed before the new one is opened,
//! since both may be the same file.
//!
//! What must never happen: two open images write to one file; an image is used without its lock; a
//! disk continues with an image that lacks writes of its guest.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use qcow2::bitmap::Loaded;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, DiskSpec, Format};
use vshunt_types::sync::LockedShared;

use super::backend::Backend;
use super::disk::Disk;
use super::file_storage::FileStorage;
use super::limits::Limits;
use super::lock;
use super::qcow2::store_in_use;
use super::raw::Raw;

/// An image that is closed for a change. Its files are not used, and their locks are still held.
pub(super) struct Closed {
    backend: Backend,
    /// Size of the backing image, bytes, if there is one.
    pub(super) backing_bytes: Option<u64>,
    path: String,
}

impl Closed {
    /// Opens one of the files for a change: 0 is the image, 1 its data file.
    pub(super) fn file(&self, number: usize) -> Result<FileStorage> {
        let file = self.backend.files().get(number).map(|raw| FileStorage::of(raw, false, false));
        match file {
            Some(file) => file.map_err(|e| Error::io(format_args!("cannot open {}", self.path), e)),
            None => Err(Error::invalid(format!("{} has no data file", self.path))),
        }
    }

    /// Returns the image.
    pub(super) fn image(&self) -> Option<&Arc<File>> {
        self.backend.files().first().map(|raw| raw.image())
    }
}

/// Brings all writes to stable storage and closes the image.
fn finish(backend: &Backend, cache: Cache, readonly: bool) -> std::io::Result<()> {
    match backend {
        Backend::Raw(raw) if !readonly && cache != Cache::Unsafe => raw.sync_now(),
        Backend::Qcow2(image) => {
            image.flush_now()?;
            match image.close() {
                true => Ok(()),
                false => Err(std::io::Error::other("it cannot be closed (see the log)")),
            }
        }
        _ => Ok(()),
    }
}

/// A file whose locks are held.
struct Held {
    file: Arc<File>,
    readonly: bool,
}

impl Disk {
    /// Closes the image of `now`, calls `work`, and opens the image of `next`. No request is in
    /// flight, and none starts before this returns. `locked` are files of `next` that are locked
    /// for writing already. If a step fails, the disk continues with the image of `now`, with the
    /// changes that `work` made; so `work` does last what cannot be undone.
    ///
    /// # Errors
    /// Those of `work` and of opening. If the image of `now` cannot be flushed, nothing
    /// was done. If the old image cannot be opened again either, every request of the disk fails
    /// from then on (EIO), and the log says so.
    pub(super) fn replace(
        &self,
        now: &DiskSpec,
        next: &DiskSpec,
        locked: &[Arc<File>],
        work: impl FnOnce(&Closed) -> Result<()>,
    ) -> Result<()> {
        let mut backend = self.backend.write_locked();
        let path = shown(now);
        if backend.is_corrupt() {
            return Err(Error::invalid(format!(
                "{path} was found to be corrupt and stays as it is: end the daemon, and 'vshunt image check -r all' it"
            )));
        }
        let bitmaps = match &*backend {
            Backend::Qcow2(image) if now.file != next.file => image.bitmaps_for_next(),
            _ => Vec::new(),
        };
        finish(&backend, self.cache, self.readonly)
            .map_err(|e| Error::io(format_args!("cannot bring {path} to stable storage"), e))?;
        let old = std::mem::replace(&mut *backend, Backend::Gone);
        let mut held: Vec<Held> = Vec::new();
        held.extend(locked.iter().map(|file| Held { file: file.clone(), readonly: false }));
        held.extend(
            old.files().iter().map(|raw| Held { file: raw.image().clone(), readonly: raw.readonly() }),
        );
        let backing_bytes = match &old {
            Backend::Qcow2(image) => image.backing_bytes(),
            _ => None,
        };
        let closed = Closed { backend: old, backing_bytes, path: path.clone() };
        let opened = work(&closed).and_then(|()| {
            move_bitmaps(next, bitmaps)?;
            self.open_again(next, &held)
        });
        // An io_uring may keep the old files open for a moment, so their locks are released
        // explicitly.
        let (result, new) = match opened {
            Ok(new) => (Ok(()), Ok(new)),
            Err(e) => (Err(e), self.open_again(now, &held)),
        };
        match new {
            Ok((new, size_bytes)) => {
                self.alignment.store(new.alignment(), Ordering::Release);
                self.zero_alignment.store(new.zero_alignment(self.limits.block_size), Ordering::Release);
                self.size_bytes.store(size_bytes, Ordering::Release);
                *backend = new;
                held.iter().filter(|_| self.locked).for_each(|h| lock::release(&h.file));
            }
            Err(e) => tracing::error!(
                "disk {}: its image cannot be opened again, and all its requests fail from now on: {e}; remove its exports \
                 and the disk, put that right, and add them again",
                now.name
            ),
        }
        result
    }

    /// Closes the image and opens it again, which writes its [saved bitmaps](Self::save_bitmaps).
    /// The queues are drained, as [`replace`](Self::replace) requires.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace).
    pub fn reopen(&self, now: &DiskSpec) -> Result<()> {
        self.replace(now, now, &[], |_| Ok(()))
    }

    /// Opens an image. Other descriptors may hold locks of its files.
    fn open_again(&self, spec: &DiskSpec, held: &[Held]) -> Result<(Backend, u64)> {
        let spec_unlocked = DiskSpec { locking: false, size: None, ..spec.clone() };
        let (backend, size_bytes, limits) = Backend::open(&spec_unlocked, self.growable())?;
        let result = self.check_limits(spec, &limits).and_then(|()| match self.locked {
            true => backend.files().iter().try_for_each(|raw| inherit(raw, held)),
            false => Ok(()),
        });
        match result {
            Ok(()) => Ok((backend, size_bytes)),
            Err(e) => {
                if let Backend::Qcow2(image) = &backend {
                    image.close();
                }
                backend.files().iter().for_each(|raw| lock::release(raw.image()));
                Err(e)
            }
        }
    }

    /// Checks that a new image fits the limits that guests already know.
    fn check_limits(&self, spec: &DiskSpec, limits: &Limits) -> Result<()> {
        match limits.block_size > self.limits.block_size {
            true => Err(Error::unsupported(format!(
                "{} needs blocks of {} bytes, and the guests of disk {} were told {}",
                shown(spec),
                limits.block_size,
                spec.name,
                self.limits.block_size
            ))),
            false => Ok(()),
        }
    }
}

/// Stores the bitmaps of a disk in its next image. They are marked as in use there, and so count as
/// inconsistent until they are saved.
fn move_bitmaps(next: &DiskSpec, bitmaps: Vec<Loaded>) -> Result<()> {
    let Some(path) = next.file.as_ref().filter(|_| next.format() == Format::Qcow2 && !bitmaps.is_empty())
    else {
        return Ok(());
    };
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|e| Error::io(format_args!("cannot open {}", path.display()), e))?;
    match store_in_use(&FileStorage::new(file), bitmaps) {
        Ok(()) => Ok(()),
        Err(qcow2::Error::Unsupported(why)) => {
            tracing::warn!("{} cannot keep the disk's bitmaps: {why}", path.display());
            Ok(())
        }
        Err(e) => Err(Error::invalid(format!("cannot keep bitmaps in {}: {e}", path.display()))),
    }
}

/// Locks a file for its new use. If this process already holds sufficient locks of it, no other
/// process can hold a conflicting one.
fn inherit(raw: &Raw, held: &[Held]) -> Result<()> {
    let same = |h: &&Held| match (h.file.metadata(), raw.image().metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    };
    let mine: Vec<&Held> = held.iter().filter(same).collect();
    if mine.iter().any(|h| raw.readonly() || !h.readonly) {
        return lock::take_over(raw.image(), raw.path(), raw.readonly());
    }
    // More than what is held. The locks of this process must not conflict with the new ones.
    mine.iter().for_each(|h| lock::release(&h.file));
    lock::lock(raw.image(), raw.path(), raw.readonly())
}

/// Returns the path of a disk's image, for messages.
pub(super) fn shown(spec: &DiskSpec) -> String {
    spec.file.as_deref().unwrap_or(Path::new("")).display().to_string()
}
