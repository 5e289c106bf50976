//! A disk, as control threads see it.
//!
//! Control threads open, resize and drop a [`Disk`]. Exports and workers share it. A queue does not
//! use it for requests, but through a [`DiskHandle`](super::DiskHandle).

mod frozen;
mod size;
mod times;

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use qcow2::bitmap::Loaded;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, ConnectionsInfo, DiskSpec, Format};
use vshunt_types::sync::LockedShared;

use super::backend::{Backend, memory_size, no_frozen};
use super::cost::Zeroing;
use super::failures::{Failures, Storage};
use super::image_file::Remote;
use super::limits::{self, Limits};
use super::nbd;
use super::qcow2::UncleanImage;
use super::write_observers::WriteObservers;
use super::{Op, image_file, lock, overlay_xattr, raw};

pub(super) use self::frozen::Frozen;
use self::times::Times;
pub(super) use self::times::WriteMark;
pub use self::times::{FileAttributes, FreeBytes};

/// How long [`Disk::close`] waits for other users of the disk, ms.
const CLOSE_MS_MAX: u32 = 10_000;

/// A disk, shared by exports and workers.
pub struct Disk {
    /// Guards the current backend. Control threads replace it while no request is in flight. Each
    /// handle has its own reference, so a worker takes this lock only to read attributes, never for
    /// a request.
    pub(super) backend: RwLock<Backend>,
    /// Guards what handles do beside each write. Control threads replace it while no request is in
    /// flight.
    observers: RwLock<Arc<WriteObservers>>,
    /// Guards the fleecing file of a backup. Control threads replace it while no request is in
    /// flight.
    fleece: RwLock<Option<Arc<Disk>>>,
    /// Guards what a frozen disk reads. Control threads remove it when the disk is given up.
    frozen: RwLock<Option<Arc<Frozen>>>,
    // Control threads; fixed when the disk is opened.
    pub(super) readonly: bool,
    pub(super) cache: Cache,
    pub(super) limits: Limits,
    /// Users of a mount may change the size: a qcow2 image has room for that.
    pub(super) growable: AtomicBool,
    /// Whether the image is locked. Changed with the backend.
    pub(super) locked: AtomicBool,
    /// See [`lost_writes`](Self::lost_writes).
    lost_writes: bool,
    closed: AtomicBool,
    // Any thread.
    pub(super) failures: Failures,
    pub(super) times: Times,
    pub(super) size_bytes: AtomicU64,
    pub(super) alignment: AtomicU64,
    pub(super) zero_alignment: AtomicU64,
}

impl Disk {
    /// Checks the keys of a disk, without looking at the machine.
    ///
    /// # Errors
    /// `Invalid`, with the key and the remedy.
    pub fn check(spec: &DiskSpec) -> Result<()> {
        if let Some(remote) = image_file::remote_of(spec)? {
            return Self::check(&remote);
        }
        nbd::check_others(spec)?;
        match spec.format() {
            Format::Raw if spec.file.is_none() => Err(raw::no_image(spec)),
            Format::Raw | Format::Qcow2 => Ok(()),
            Format::Nbd => nbd::check(spec).map(drop),
            Format::Null | Format::Ram => memory_size(spec).map(drop),
            Format::Frozen => Err(no_frozen(spec)),
        }
    }

    /// Opens the disk that `spec` describes, and locks its image if `locking` is on.
    ///
    /// # Errors
    /// Each names the disk or the file, and the remedy: `NotFound` without an image,
    /// `Invalid` if the size, the type of the file or a setting is wrong, `Busy` if another process
    /// has locked the image, `Unsupported` if O_DIRECT is required and impossible, `Io` for other
    /// errors of the system.
    pub fn open(spec: &DiskSpec) -> Result<Arc<Self>> {
        if let Some(file) = &spec.file {
            overlay_xattr::check(file, spec.readonly)?;
        }
        if let (Some(file), None) = (&spec.file, spec.format)
            && let Some(remedy) = raw::begins_as_qcow2(file)
        {
            return Err(Error::invalid(format!(
                "{} begins as a qcow2 image: {remedy}, or say format=raw if its bytes are the disk",
                file.display()
            )));
        }
        Self::open_unchecked(spec)
    }

    /// Opens a disk without a look at the marks of its image, which the caller has made or checked.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_unchecked(spec: &DiskSpec) -> Result<Arc<Self>> {
        let (backend, size_bytes, limits) = Backend::open(spec, false)?;
        let lost_writes = matches!(&backend, Backend::Qcow2(image) if image.lost_writes());
        let (alignment, zero_alignment) = (backend.alignment(), backend.zero_alignment(limits.block_size));
        let times = Times::new(backend.file_times());
        Ok(Arc::new(Self {
            backend: RwLock::new(backend),
            observers: RwLock::default(),
            fleece: RwLock::default(),
            frozen: RwLock::default(),
            readonly: spec.readonly,
            cache: spec.cache,
            limits,
            growable: AtomicBool::new(false),
            locked: AtomicBool::new(spec.locking),
            lost_writes,
            closed: AtomicBool::new(false),
            failures: Failures::default(),
            times,
            size_bytes: AtomicU64::new(size_bytes),
            alignment: AtomicU64::new(alignment),
            zero_alignment: AtomicU64::new(zero_alignment),
        }))
    }

    /// Returns whether this disk's lock on its image keeps a disk of `spec` from being opened.
    pub fn locks_out(&self, spec: &DiskSpec) -> bool {
        let is_at = |uri: Option<&str>| {
            uri.zip(spec.uri.as_deref()).is_some_and(|(a, b)| nbd::place_of(a) == nbd::place_of(b))
        };
        let is_of = match (&self.backend(), &spec.file) {
            (Backend::Raw(raw), Some(path)) => raw.is_of(path),
            (Backend::Qcow2(image), Some(path)) => image.is_of(path),
            // A server has no locks. The same export is not written twice by this daemon at least.
            (Backend::Qcow2(image), None) => is_at(image.image().uri()),
            (Backend::Nbd(nbd), None) => is_at(Some(nbd.uri())),
            _ => false,
        };
        self.is_locked() && spec.locking && !(self.readonly && spec.readonly) && is_of
    }

    /// Returns whether a path leads to one of the disk's files, locked or not.
    pub fn has_file(&self, path: &Path) -> bool {
        self.backend().files().any(|raw| raw.is_of(path))
    }

    /// Returns whether the disks have a file in common, locked or not, or the same export of a
    /// server.
    pub fn shares_a_file_with(&self, other: &Self) -> bool {
        let (ours, theirs) = (self.backend(), other.backend());
        let ids: Vec<_> = theirs.files().map(raw::Raw::id).collect();
        ours.uri().zip(theirs.uri()).is_some_and(|(a, b)| nbd::place_of(a) == nbd::place_of(b))
            || ours.files().any(|raw| ids.contains(&raw.id()))
    }

    /// Returns whether one of the disk's files has this device number and inode. Files on FUSE do
    /// not count: nothing is asked of the program that serves them.
    pub fn has_inode(&self, (device, inode): (u64, u64)) -> bool {
        self.backend().files().any(|raw| !raw.may_wait() && raw.id() == (device, inode))
    }

    /// Returns whether one of the disk's files had this device number and inode when it was opened,
    /// or true while the image is being replaced. Does not block.
    pub fn may_have_file(&self, id: (u64, u64)) -> bool {
        self.backend.try_read().map_or(true, |backend| backend.files().any(|raw| raw.id() == id))
    }

    /// Returns whether the image itself has this device number and inode. Backing images and data
    /// files do not count.
    pub fn image_has_inode(&self, (device, inode): (u64, u64)) -> bool {
        self.backend().image().is_some_and(|raw| raw.id() == (device, inode))
    }

    /// Returns the current backend.
    pub(super) fn backend(&self) -> Backend {
        self.backend.read_locked().clone()
    }

    /// Returns the most bytes that a request costs which zeroes a range of at most `bytes_max`. For
    /// control threads: does not wait while the image is replaced.
    pub fn zeroes_cost_max(&self, bytes_max: u64) -> u64 {
        let zeroing = match self.backend.try_read() {
            Ok(backend) => backend.zeroing(),
            Err(_) => Zeroing::Writes,
        };
        zeroing.written_bytes_max(bytes_max)
    }

    /// Waits until all completed writes are on stable storage. Blocks: for control threads, never
    /// for a worker.
    ///
    /// # Errors
    /// The system's; earlier writes may be lost then. With the page cache in use, also the
    /// error of any earlier flush.
    pub fn sync(&self) -> std::io::Result<()> {
        // The lock stays held, so that an image that is replaced is not written after it was
        // closed.
        let backend = self.backend.read_locked();
        match &*backend {
            Backend::Gone => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            Backend::Raw(raw) if !self.readonly && self.cache != Cache::Unsafe => raw.sync_now(),
            Backend::Qcow2(image) if self.cache != Cache::Unsafe => image.flush_now(),
            Backend::Nbd(nbd) => nbd.flush_now(),
            _ => Ok(()),
        }
    }

    /// Returns whether the image is locked against other processes.
    pub(super) fn is_locked(&self) -> bool {
        self.locked.load(Ordering::Acquire)
    }

    /// Returns whether writes are refused.
    pub fn readonly(&self) -> bool {
        self.readonly
    }

    /// Returns when a write is on stable storage. With [`Cache::Writethrough`] every write counts
    /// as `fua`; with [`Cache::Unsafe`] none does.
    pub fn cache(&self) -> Cache {
        self.cache
    }

    /// Returns the alignment, bytes: the offset and length of a request are multiples of it. It is
    /// a power of two, and 1 if the backend transfers single bytes. A guest's requests are
    /// multiples of 512; if the backend needs more, it does the rest itself.
    #[inline]
    pub fn alignment(&self) -> u64 {
        self.alignment.load(Ordering::Acquire)
    }

    /// Returns the alignment of WriteZeroes, bytes; see [`alignment`](Self::alignment).
    #[inline]
    pub fn zero_alignment(&self) -> u64 {
        self.zero_alignment.load(Ordering::Acquire)
    }

    /// Returns the image if its bytes are those of the disk.
    pub fn image(&self) -> Option<Arc<File>> {
        match &self.backend() {
            Backend::Raw(raw) => Some(raw.image().clone()),
            _ => None,
        }
    }

    /// Returns whether a call that asks for the image's size or times may wait for another program,
    /// as for a file on FUSE. A worker makes no such call then.
    pub fn image_may_wait(&self) -> bool {
        match &self.backend() {
            Backend::Raw(raw) => raw.may_wait(),
            Backend::Qcow2(image) => image.may_wait(),
            Backend::Frozen => self.frozen_parts().is_some_and(|frozen| frozen.source.image_may_wait()),
            Backend::Null | Backend::Ram(_) | Backend::Nbd(_) | Backend::Gone => false,
        }
    }

    /// Writes bytes at any offset. Bytes around them, up to the [alignment](Self::alignment), are
    /// read and written back, so no other write may be in flight there. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn merge(self: &Arc<Self>, offset: u64, bytes: &[u8], fua: bool) -> std::io::Result<()> {
        match &self.backend() {
            Backend::Raw(raw) if self.write_observers().is_idle() => {
                let done = raw.merge(offset, bytes, fua);
                // Also a write that failed may have written a part.
                self.times.changed();
                done.inspect_err(|e| {
                    let errno = e.raw_os_error().unwrap_or(libc::EIO);
                    self.failures.note(raw.path(), (Op::Write, offset), errno, Storage::Here);
                })
            }
            _ => self.merge_as_queue(offset, bytes, fua),
        }
    }

    /// Returns where the next data, or the next hole, begins at or after `offset`, by the map of a
    /// qcow2 image or by what a server says; the disk's size if there is none. Other
    /// disks count as data; for a raw image ask its file, [`image`](Self::image). Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn seek(self: &Arc<Self>, offset: u64, hole: bool) -> std::io::Result<u64> {
        match &self.backend() {
            Backend::Qcow2(_) | Backend::Nbd(_) | Backend::Frozen => self.seek_as_queue(offset, hole),
            _ => Ok(if hole { self.size_bytes() } else { offset }),
        }
    }

    /// Removes the persistent dirty bitmaps from an open qcow2 image, and returns them to a caller
    /// that records every write from now on. Empty for other disks. Until
    /// [`put_bitmaps`](Self::put_bitmaps) the image marks them as in use: another process that
    /// opens the image finds them inconsistent.
    pub fn take_bitmaps(&self) -> Vec<Loaded> {
        match &self.backend() {
            Backend::Qcow2(image) => image.take_bitmaps(),
            _ => Vec::new(),
        }
    }

    /// Makes these bitmaps the only ones of the image, as of its close. Called after the last
    /// write. Ignored for other disks.
    pub fn put_bitmaps(&self, bitmaps: Vec<Loaded>) {
        if let Backend::Qcow2(image) = &self.backend() {
            image.put_bitmaps(bitmaps);
        }
    }

    /// Returns what a guest learns about the disk.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns whether the image is open with O_DIRECT.
    pub fn direct_in_use(&self) -> bool {
        match &self.backend() {
            Backend::Raw(raw) => raw.direct_in_use(),
            Backend::Qcow2(image) => image.direct_in_use(),
            Backend::Frozen => self.frozen_parts().is_some_and(|frozen| frozen.source.direct_in_use()),
            Backend::Null | Backend::Ram(_) | Backend::Nbd(_) | Backend::Gone => false,
        }
    }

    /// Returns how requests reach the backend: `ring`, `inline` (a file in memory), `memory`,
    /// `frozen`, `none` or `gone`.
    pub fn path(&self) -> &'static str {
        match &self.backend() {
            Backend::Null => "none",
            Backend::Gone => "gone",
            Backend::Ram(_) => "memory",
            Backend::Frozen => "frozen",
            Backend::Raw(raw) if raw.inline() => "inline",
            Backend::Raw(_) | Backend::Qcow2(_) | Backend::Nbd(_) => "ring",
        }
    }

    /// Describes the connections of a disk, or of an image, on an NBD server.
    pub fn connections(&self) -> Option<ConnectionsInfo> {
        match &self.backend() {
            Backend::Nbd(nbd) => Some(nbd.connections()),
            Backend::Qcow2(image) => image.remote().map(Remote::connections),
            _ => None,
        }
    }

    /// Sets what handles do beside each write. It applies to handles that are made later: no
    /// request is in flight, and no older handle is still in use.
    pub fn set_write_observers(&self, observers: WriteObservers) {
        *self.observers.write_locked() = Arc::new(observers);
    }

    /// Returns what handles do beside each write.
    pub fn write_observers(&self) -> Arc<WriteObservers> {
        self.observers.read_locked().clone()
    }

    /// Sets the fleecing file: a new, empty file of at least the size of the disk, in which writes
    /// under a backup store what they replace. It applies as
    /// [`set_write_observers`](Self::set_write_observers) does.
    pub fn set_fleece(&self, file: Option<Arc<Self>>) {
        *self.fleece.write_locked() = file;
    }

    /// Returns the fleecing file.
    pub(super) fn fleece(&self) -> Option<Arc<Self>> {
        self.fleece.read_locked().clone()
    }

    /// Announces that the image is about to be deleted. It is not brought into order when it is
    /// closed.
    pub fn abandon(&self) {
        if let Backend::Qcow2(image) = &self.backend() {
            image.abandon();
        }
    }

    /// Returns whether the image is qcow2.
    pub fn is_qcow2(&self) -> bool {
        matches!(self.backend(), Backend::Qcow2(_))
    }

    /// Returns the cluster size of a qcow2 image, bytes.
    pub fn cluster_bytes(&self) -> Option<u64> {
        match &self.backend() {
            Backend::Qcow2(image) => Some(image.cluster_bytes()),
            _ => None,
        }
    }

    /// Returns the number of backing images, at most [`CHAIN_MAX`](crate::CHAIN_MAX).
    pub fn backing_images(&self) -> usize {
        match &self.backend() {
            Backend::Qcow2(image) => image.backing_images(),
            _ => 0,
        }
    }

    /// Returns whether the image can store dirty bitmaps.
    pub fn supports_bitmaps(&self) -> bool {
        match &self.backend() {
            Backend::Qcow2(image) => !self.readonly && image.supports_bitmaps(),
            _ => false,
        }
    }

    /// Returns whether every completed write survives if this process is killed: it is in the
    /// image, or in the kernel's cache of the image.
    pub fn survives_kill(&self) -> bool {
        match &self.backend() {
            // Changes of the map are in this process until the next flush, unless there is a
            // journal.
            Backend::Qcow2(image) => image.survives_kill(),
            Backend::Ram(_) | Backend::Frozen => false,
            Backend::Null | Backend::Raw(_) | Backend::Nbd(_) | Backend::Gone => true,
        }
    }

    /// Returns a report for each image (the disk's own and its backing images) that was not closed
    /// cleanly and is only read.
    pub fn unclean_images(&self) -> Vec<UncleanImage> {
        match &self.backend() {
            Backend::Qcow2(image) => image.unclean_images().to_vec(),
            _ => Vec::new(),
        }
    }

    /// Returns whether writes may be missing that an earlier daemon completed. A guest of that
    /// daemon cannot continue.
    pub fn lost_writes(&self) -> bool {
        self.lost_writes
    }

    /// Checks whether a disk may be given a size.
    ///
    /// # Errors
    /// `Invalid`, with the reason.
    pub fn check_size(size_bytes: u64) -> Result<()> {
        limits::check_size(size_bytes)
    }

    /// Closes the image. Returns false if that failed; the log has the reason.
    fn close_image(&self) -> bool {
        let backend = self.backend();
        let Backend::Qcow2(image) = &backend else { return true };
        if self.closed.swap(true, Ordering::AcqRel) {
            return true;
        }
        let closed = image.close();
        if self.is_locked() {
            // No handle is left, so nothing is in flight; but an io_uring may release its files a
            // moment later. (The kernel may use the file of a raw image on its own, for FUSE
            // passthrough or a loop device. That file stays locked as long.)
            backend.files().for_each(|raw| lock::release(raw.image()));
        }
        closed
    }

    /// Closes a disk that has no other users. A status query of its job may still hold it for a
    /// moment.
    ///
    /// # Errors
    /// `Invalid` if the last changes are not in the image; `Busy` if the disk is still in use.
    pub fn close(self: Arc<Self>) -> Result<()> {
        for _ in 0..CLOSE_MS_MAX {
            if Arc::strong_count(&self) == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        match Arc::into_inner(self) {
            Some(disk) if disk.close_image() => Ok(()),
            Some(_) => Err(Error::invalid("it cannot be closed in good order (see the log)")),
            None => Err(Error::busy("it cannot be closed: it is still in use")),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.close_image();
    }
}
