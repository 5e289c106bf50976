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

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use qcow2::Storage;
use qcow2::bitmap::Loaded;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, DiskSpec, Format};
use vshunt_types::sync::LockedShared;

use super::backend::Backend;
use super::disk::Disk;
use super::file_storage::FileStorage;
use super::image_file::Remote;
use super::limits::Limits;
use super::qcow2::{repair_command, store_in_use};
use super::raw::Raw;
use super::{lock, overlay_xattr};

/// An image that is closed for a change. Its files are not used, and their locks are still held.
pub(super) struct Closed {
    backend: Backend,
    /// Size of the backing image, bytes, if there is one.
    pub(super) backing_bytes: Option<u64>,
    path: String,
}

impl Closed {
    /// Opens one of the files for a change: 0 is the image, 1 its data file.
    pub(super) fn file(&self, number: usize) -> Result<Box<dyn Storage>> {
        let file = match &self.backend {
            Backend::Qcow2(image) => image.storage(number),
            _ => None,
        };
        match file {
            Some(file) => file.map_err(|e| Error::io(format_args!("cannot open {}", self.path), e)),
            None => Err(Error::invalid(format!("{} has no data file", self.path))),
        }
    }

    /// Returns the image.
    pub(super) fn image(&self) -> Option<&Arc<File>> {
        self.backend.image().map(Raw::image)
    }
}

/// What a disk was made of that continues in another image.
#[must_use = "the image is not closed"]
pub struct OldImage {
    backend: Backend,
    /// What it is, for messages.
    shown: String,
    cache: Cache,
    readonly: bool,
    locked: bool,
}

impl OldImage {
    /// Brings it to stable storage, closes it and releases its locks. May take long: its storage
    /// may be why the disk was moved. So guests do not wait for it.
    pub fn close(self) {
        if let Err(e) = finish(&self.backend, self.cache, self.readonly) {
            tracing::warn!("{} may lack the last writes, which the disk has: {e}", self.shown);
        }
        if self.locked {
            // An io_uring may keep the files open for a moment.
            self.backend.files().for_each(|raw| lock::release(raw.image()));
        }
    }
}

/// Marks a file that a mirror is about to replace as the incomplete copy of a disk. The caller has
/// locked it.
///
/// # Errors
/// The system's.
pub fn mark_incomplete(file: &File, source: &DiskSpec) -> std::io::Result<()> {
    overlay_xattr::begin_mirror(file, shown(source).as_ref())
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
        Backend::Nbd(nbd) => nbd.flush_now(),
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
                "{path} was found to be corrupt and stays as it is: end the daemon, and repair it by '{}'",
                repair_command(Path::new(&now.image()), now.uri.is_some(), "all")
            )));
        }
        let bitmaps = match &*backend {
            Backend::Qcow2(image) if now.file != next.file => image.bitmaps_for_next(),
            _ => Vec::new(),
        };
        finish(&backend, self.cache, self.readonly)
            .map_err(|e| Error::io(format_args!("cannot bring {path} to stable storage"), e))?;
        self.keep_file_times(&backend);
        let old = std::mem::replace(&mut *backend, Backend::Gone);
        let mut held: Vec<Held> = Vec::new();
        held.extend(locked.iter().map(|file| Held { file: file.clone(), readonly: false }));
        held.extend(old.files().map(|raw| Held { file: raw.image().clone(), readonly: raw.readonly() }));
        let backing_bytes = match &old {
            Backend::Qcow2(image) => image.backing_bytes(),
            _ => None,
        };
        let remote = old.remote().cloned();
        let closed = Closed { backend: old, backing_bytes, path: path.clone() };
        let opened = work(&closed).and_then(|()| {
            move_bitmaps(next, bitmaps)?;
            self.open_again(next, &held, remote.clone())
        });
        // An io_uring may keep the old files open for a moment, so their locks are released
        // explicitly.
        let (result, new) = match opened {
            Ok(new) => (Ok(()), Ok(new)),
            Err(e) => (Err(e), self.open_again(now, &held, remote)),
        };
        match new {
            Ok((new, size_bytes)) => {
                self.alignment.store(new.alignment(), Ordering::Release);
                self.zero_alignment.store(new.zero_alignment(self.limits.block_size), Ordering::Release);
                self.size_bytes.store(size_bytes, Ordering::Release);
                *backend = new;
                held.iter().filter(|_| self.is_locked()).for_each(|h| lock::release(&h.file));
            }
            Err(e) => tracing::error!(
                "disk {}: its image cannot be opened again, and all its requests fail from now on: {e}; remove its exports \
                 and the disk, put that right, and add them again",
                now.name
            ),
        }
        result
    }

    /// Marks the image as the incomplete copy of another disk, described by `source`. Nothing for a
    /// disk without a file.
    ///
    /// # Errors
    /// The system's.
    pub fn mark_incomplete(&self, source: &DiskSpec) -> std::io::Result<()> {
        self.with_image(|image| overlay_xattr::set_mirroring(image, shown(source).as_ref()))
    }

    /// Undoes [`mark_incomplete`](Self::mark_incomplete).
    ///
    /// # Errors
    /// The system's.
    pub fn mark_complete(&self) -> std::io::Result<()> {
        self.with_image(overlay_xattr::clear_mirroring)
    }

    /// Returns what marks the image as one that its disk leaves for `next`. Nothing for a disk
    /// without a file. Its errors are the system's.
    pub fn mark_left(
        &self,
        next: &DiskSpec,
    ) -> impl FnOnce() -> std::io::Result<()> + Send + 'static + use<> {
        let image = self.backend().files().next().map(|raw| raw.image().clone());
        let next = shown(next);
        move || image.map_or(Ok(()), |image| overlay_xattr::set_moved(&image, next.as_ref()))
    }

    /// Returns whether the disk can leave its image, because no flush of it is under way. Waits for
    /// that until `until`.
    pub fn may_be_left(&self, until: Instant) -> bool {
        // Others read the backend for a moment.
        while self.backend.try_write().is_err() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Returns the permissions and the owner of the file of the image. None for a device, a file
    /// that another program serves, and an image on a server.
    pub fn file_metadata(&self) -> Option<Metadata> {
        let backend = self.backend();
        let image = backend.image().filter(|raw| !raw.may_wait())?.image();
        image.metadata().ok().filter(Metadata::is_file)
    }

    fn with_image(&self, f: impl FnOnce(&File) -> std::io::Result<()>) -> std::io::Result<()> {
        self.backend().files().next().map_or(Ok(()), |raw| f(raw.image()))
    }

    /// Checks that this disk can continue in what `target` is made of. `next`: its description
    /// then.
    ///
    /// # Errors
    /// `Unsupported`: guests could not use it.
    pub fn check_continues_in(&self, next: &DiskSpec, target: &Self) -> Result<()> {
        self.check_limits(next, &target.limits)
    }

    /// Continues in what `target` is made of, which has the same data on stable storage, and which
    /// passes [`check_continues_in`](Self::check_continues_in). `target` is of no use afterwards.
    /// Both have no request in flight and no handle in use, and none starts before this returns.
    /// Returns what the disk was made of.
    pub fn continue_in(&self, now: &DiskSpec, target: &Self) -> OldImage {
        let mut backend = self.backend.write_locked();
        self.keep_file_times(&backend);
        let next = std::mem::replace(&mut *target.backend.write_locked(), Backend::Gone);
        self.alignment.store(next.alignment(), Ordering::Release);
        self.zero_alignment.store(next.zero_alignment(self.limits.block_size), Ordering::Release);
        self.size_bytes.store(target.size_bytes(), Ordering::Release);
        let old = std::mem::replace(&mut *backend, next);
        let locked = self.locked.swap(target.is_locked(), Ordering::AcqRel);
        OldImage { backend: old, shown: shown(now), cache: self.cache, readonly: self.readonly, locked }
    }

    /// Closes the image and opens it again, which writes its [saved bitmaps](Self::save_bitmaps).
    /// The queues are drained, as [`replace`](Self::replace) requires.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace).
    pub fn reopen(&self, now: &DiskSpec) -> Result<()> {
        self.replace(now, now, &[], |_| Ok(()))
    }

    /// Opens an image. Other descriptors may hold locks of its files. `remote`: its file on a
    /// server.
    fn open_again(&self, spec: &DiskSpec, held: &[Held], remote: Option<Remote>) -> Result<(Backend, u64)> {
        let spec_unlocked = DiskSpec { locking: false, size: None, ..spec.clone() };
        let (backend, size_bytes, limits) = Backend::open_again(&spec_unlocked, self.growable(), remote)?;
        let result = self.check_limits(spec, &limits).and_then(|()| match self.is_locked() {
            true => backend.files().try_for_each(|raw| inherit(raw, held)),
            false => Ok(()),
        });
        match result {
            Ok(()) => Ok((backend, size_bytes)),
            Err(e) => {
                if let Backend::Qcow2(image) = &backend {
                    image.close();
                }
                backend.files().for_each(|raw| lock::release(raw.image()));
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

/// Returns the path of a disk's image, or the URI of its server, for messages.
pub(super) fn shown(spec: &DiskSpec) -> String {
    let file = spec.file.as_deref().map(|file| file.display().to_string());
    file.or_else(|| spec.uri.clone()).unwrap_or_else(|| format!("disk {}", spec.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_is_that_of_the_image_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let spec = |name: &str, locking| {
            let path = dir.path().join(format!("{name}-{locking}"));
            std::fs::write(&path, [0; 4096]).unwrap();
            let (name, format) = (name.to_owned(), Some(Format::Raw));
            DiskSpec { name, format, file: Some(path), locking, ..DiskSpec::default() }
        };
        for (before, after) in [(false, true), (true, false)] {
            let (now, next) = (spec("now", before), spec("next", after));
            let (disk, target) = (Disk::open(&now).unwrap(), Disk::open(&next).unwrap());
            assert_eq!(disk.locks_out(&DiskSpec { locking: true, ..now.clone() }), before);
            disk.continue_in(&now, &target).close();
            assert_eq!(disk.locks_out(&DiskSpec { locking: true, ..next.clone() }), after);
            // The file that it has left is free.
            drop(Disk::open(&DiskSpec { locking: true, ..now }).unwrap());
        }
    }
}
