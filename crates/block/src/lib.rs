//! Block backends: what a disk's requests are turned into.
//!
//! Called by a block queue, on the worker's thread. A request is an [`Io`] in the queue's slot; [`start`](DiskHandle::start)
//! begins it and [`resume`](DiskHandle::resume) goes on with it at each completion, until the step is [`Step::Done`].
//! Nothing here blocks on a device, takes a lock or allocates on that way. (Three exceptions, all by design: files in
//! memory are read and written at once, see `raw`; guests with unaligned buffers make a bounce buffer be allocated, see
//! `bounce`; and so do many requests at a time that each have many segments, see `spill`.)
//!
//! A [`Disk`] is opened, resized and dropped by control threads and shared by all workers; a [`DiskHandle`] is what one
//! queue on one worker uses of it.
//!
//! ```
//! use vshunt_block::Disk;
//! use vshunt_types::spec::{DiskSpec, Format};
//!
//! let spec = DiskSpec { name: "d0".into(), format: Some(Format::Ram), size: Some(1 << 20), ..Default::default() };
//! let disk = Disk::open(&spec)?;
//! assert_eq!(disk.size_bytes(), 1 << 20);
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod bits;
mod bounce;
mod commit;
pub mod copy;
mod copy_before_write;
mod create;
mod handle;
mod io;
mod keep;
mod lend;
mod lock;
mod mark;
mod memory;
mod offline;
mod overlay;
pub mod own_mounts;
mod parts;
mod qcow2;
mod raw;
mod replace;
mod seen;
mod spill;
mod watch;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

pub use ::qcow2::bitmap::Loaded;
pub use ::qcow2::{Extent, Found};
pub use bits::Bits;
pub use bounce::AlignedBuf;
use bounce::Pool;
pub use commit::Below;
pub use copy_before_write::{CopyBeforeWrite, Piece};
pub use create::NewImage;
pub use handle::DiskHandle;
pub use io::{Io, IoVecs};
pub use lock::lock as lock_image;
pub use mark::check as check_marks;
use memory::Ram;
pub use offline::Saved;
pub use overlay::Overlay;
use parts::LongRequests;
use qcow2::Qcow2;
pub use qcow2::Reading;
pub use qcow2::{
    Lacks, Through, forget as forget_journal, path_of as journal_path, read_through,
    recover as recover_journal, sweep as sweep_journals,
};
use raw::Raw;
pub use seen::{Seen, open_image};
use vshunt_engine::{Uring, UringFile};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, Direct, DiskSpec, Format};
pub use watch::{Bitmap, Watch};

/// The unit of sizes and offsets: a disk's size is a multiple of it, whatever its logical block size (virtio 1.3,
/// 5.2.4: capacity is in 512-byte sectors).
pub const SECTOR_BYTES: u64 = 512;

/// How long a disk that is to be closed is waited for, ms.
const CLOSE_MS_MAX: u32 = 10_000;

/// What a request asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Disk to guest.
    Read,
    /// Guest to disk.
    Write,
    /// Likewise, of one whole cluster of a qcow2 disk (of its last one what the disk has), compressed where that makes it
    /// smaller and it has no place yet. For who fills an image: the worker packs it meanwhile, in memory that it allocates.
    /// `EINVAL` for another range, `EOPNOTSUPP` for disks of other formats.
    WriteCompressed,
    /// All writes completed before are on stable storage when it is done, whichever queue they came by.
    Flush,
    /// The range's contents are no longer needed.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// Space may be given back.
        unmap: bool,
    },
    /// The range has its space on the disk: writes to it do not run out of it. Nothing to do where there are no holes.
    Allocate,
    /// Where there is data: what the disk is from `offset` on, and for how long, `len` at most, is [`Io::found`] then. Only of
    /// qcow2 images and files in memory is more known than that all is data.
    Seek {
        /// As the image itself has it, without those below it.
        own: bool,
    },
}

impl Op {
    /// Whether the disk may read differently afterwards.
    #[inline]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::WriteCompressed | Self::Discard | Self::WriteZeroes { .. })
    }
}

/// How far a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Over: 0, or a negative errno.
    Done(i32),
    /// An operation with the request's token is on the ring; call `resume` with its result.
    Wait,
}

/// What a guest is told about a disk. Lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Logical block size, a power of two in 512..=4096.
    pub block_size: u32,
    /// log2 of the logical blocks in a physical one.
    pub physical_block_exp: u8,
    /// Requests of multiples of it are not read-modify-write; 0: unknown.
    pub min_io: u32,
    /// The size that the device likes best; 0: unknown.
    pub opt_io: u32,
    /// Longest discard; 0 where there is none.
    pub max_discard_bytes: u64,
    /// What a discard is best aligned to.
    pub discard_align: u32,
    /// Whether discards give anything back. Where not they succeed all the same, without effect.
    pub can_discard: bool,
    /// Whether WriteZeroes is possible: on every disk that can be written.
    pub can_zero: bool,
}

impl Limits {
    /// Most that one discard or WriteZeroes of virtio can name: 2^32 - 1 sectors; kept to whole physical blocks.
    const DISCARD_BYTES_MAX: u64 = (u32::MAX as u64 * SECTOR_BYTES) & !4095;

    fn memory(readonly: bool) -> Self {
        Self {
            block_size: 512,
            physical_block_exp: 3,
            min_io: 4096,
            opt_io: 0,
            max_discard_bytes: if readonly { 0 } else { Self::DISCARD_BYTES_MAX },
            discard_align: 4096,
            can_discard: !readonly,
            can_zero: !readonly,
        }
    }
}

/// A disk, shared by exports and workers.
pub struct Disk {
    /// What it is now. Control replaces it with nothing in flight; each handle has its own reference, so that workers take
    /// this lock for attributes alone, never for a request.
    kind: RwLock<Arc<Kind>>,
    /// What handles do beside each write; replaced likewise.
    watch: RwLock<Arc<Watch>>,
    // Control, fixed at open.
    readonly: bool,
    locked: bool,
    cache: Cache,
    limits: Limits,
    /// Users of a mount may give it another size: a qcow2 image is opened with room for that.
    grows: AtomicBool,
    /// Of the image that it was opened with.
    lost: bool,
    /// It was closed.
    shut: AtomicBool,
    // Any thread.
    size_bytes: AtomicU64,
    granule: AtomicU64,
    zero_granule: AtomicU64,
}

enum Kind {
    /// Completes at once. Reads leave the guest's buffer as it is, like QEMU's `null-co` with `read-zeroes=off`.
    Null,
    Ram(Ram),
    Raw(Raw),
    Qcow2(Arc<Qcow2>),
    /// Its image could not be opened again: every request fails.
    Gone,
}

impl Kind {
    fn granule(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.granule(),
            // Blocks of the file, which its clusters are made of.
            Self::Qcow2(_) => SECTOR_BYTES,
            Self::Null | Self::Ram(_) | Self::Gone => 1,
        }
    }

    fn zero_granule(&self, block_size: u32) -> u64 {
        match self {
            Self::Raw(raw) if !raw.can_be_cut() => u64::from(block_size),
            Self::Qcow2(_) => SECTOR_BYTES,
            _ => 1,
        }
    }
}

/// Keeps a descriptor open while a ring knows it.
type SharedFile = Arc<dyn AsRawFd + Send + Sync>;

impl Disk {
    /// What is wrong with a request for a disk by itself, whatever the machine is like.
    pub fn check(spec: &DiskSpec) -> Result<()> {
        match spec.format() {
            Format::Raw if spec.file.is_none() => Err(raw::no_image(spec)),
            Format::Raw | Format::Qcow2 => Ok(()),
            Format::Null | Format::Ram => memory_size(spec).map(drop),
        }
    }

    /// Whether a disk may be asked to have that size.
    pub fn check_size(size_bytes: u64) -> Result<()> {
        check_size(size_bytes)
            .map_err(|why| Error::invalid(format!("a disk cannot have {size_bytes} bytes: {why}")))
    }

    /// Opens the disk that `spec` describes, and locks its image unless told not to.
    ///
    /// # Errors
    /// Each names the disk or the file, and the remedy: `NotFound` without an image, `Invalid` where size, kind of
    /// file or a setting is wrong, `Busy` if the image is locked by another, `Unsupported` if O_DIRECT is asked for
    /// and cannot be had, `Io` for other refusals of the system.
    pub fn open(spec: &DiskSpec) -> Result<Arc<Self>> {
        if let Some(file) = &spec.file {
            mark::check(file, spec.readonly)?;
        }
        if let (Some(file), None) = (&spec.file, spec.format)
            && let Some(remedy) = raw::begins_as_qcow2(file)
        {
            return Err(Error::invalid(format!(
                "{} begins as a qcow2 image: {remedy}, or say format=raw if its bytes are the disk",
                file.display()
            )));
        }
        Ok(Arc::new(Self::of(spec, open_kind(spec, false)?)))
    }

    fn of(spec: &DiskSpec, (kind, size_bytes, limits): (Kind, u64, Limits)) -> Self {
        let lost = matches!(&kind, Kind::Qcow2(image) if image.lost());
        let (granule, zero_granule) = (kind.granule(), kind.zero_granule(limits.block_size));
        Self {
            kind: RwLock::new(Arc::new(kind)),
            watch: RwLock::default(),
            readonly: spec.readonly,
            locked: spec.locking,
            cache: spec.cache,
            limits,
            grows: AtomicBool::new(false),
            lost,
            shut: AtomicBool::new(false),
            size_bytes: AtomicU64::new(size_bytes),
            granule: AtomicU64::new(granule),
            zero_granule: AtomicU64::new(zero_granule),
        }
    }

    /// Whether a disk of `spec` cannot be opened because this one has locked the same image.
    pub fn keeps_out(&self, spec: &DiskSpec) -> bool {
        let Some(path) = &spec.file else { return false };
        let is_of = match &*self.kind() {
            Kind::Raw(raw) => raw.is_of(path),
            Kind::Qcow2(image) => image.is_of(path),
            Kind::Null | Kind::Ram(_) | Kind::Gone => false,
        };
        self.locked && spec.locking && !(self.readonly && spec.readonly) && is_of
    }

    /// Whether that is one of its files, locked or not.
    pub fn has_file(&self, path: &std::path::Path) -> bool {
        self.kind().files().iter().any(|raw| raw.is_of(path))
    }

    /// Whether that is one of its files, by device number and inode. Those on file systems of other programs are not asked.
    pub fn has_inode(&self, (device, inode): (u64, u64)) -> bool {
        self.kind().files().iter().any(|raw| !raw.may_wait() && raw.id() == (device, inode))
    }

    /// Whether that is one of its files, by device number and inode as they were when it was opened. True while the image is
    /// being replaced. Waits for nothing.
    pub fn may_have_file(&self, id: (u64, u64)) -> bool {
        self.kind.try_read().map_or(true, |kind| kind.files().iter().any(|raw| raw.id() == id))
    }

    /// Whether its image itself has that device number and inode, rather than an image below or a data file.
    pub fn image_has_inode(&self, (device, inode): (u64, u64)) -> bool {
        self.kind().files().first().is_some_and(|raw| raw.id() == (device, inode))
    }

    fn kind(&self) -> Arc<Kind> {
        self.kind.read().expect("no holder panics").clone()
    }

    /// Its size now, bytes; a multiple of 512. It is 0 for an empty image file only, which a growable mount alone serves.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Announces that an image file will shrink: requests beyond `size_bytes` are refused from now on, so that after a
    /// drain [`resize`](Self::resize) can cut the file while others go on. False for disks whose resize is quick.
    ///
    /// # Errors
    /// Those of [`resize`](Self::resize) that can be known before; nothing is changed then.
    pub fn narrow(&self, size_bytes: u64) -> Result<bool> {
        Self::check_size(size_bytes)?;
        match &*self.kind() {
            Kind::Raw(raw) if raw.can_be_cut() && !self.readonly => {
                self.size_bytes.store(size_bytes, Ordering::Release);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Changes the size to `size_bytes`, a positive multiple of 512. What a disk grows by reads as zeroes.
    ///
    /// Before a disk shrinks its queues have to be drained: a write under way beyond the new end would make an image
    /// file longer again. (Memory stays valid in any case.) One resize at a time.
    ///
    /// # Errors
    /// `Invalid` for a size that is no multiple of 512 and for an image opened read-only, `Unsupported` for a block
    /// device that has not that size already, `Limit` where memory cannot grow so far, `Io` for refusals of the system.
    pub fn resize(&self, size_bytes: u64) -> Result<()> {
        Self::check_size(size_bytes)?;
        let old = self.size_bytes();
        if size_bytes < old {
            // First the word, then the deed: who reads the size meanwhile stays within what is there.
            self.size_bytes.store(size_bytes, Ordering::Release);
        }
        let resized = match &*self.kind() {
            Kind::Null => Ok(()),
            Kind::Ram(ram) => ram.resize(old, size_bytes),
            Kind::Gone => Err(Error::invalid("its image is gone: remove the disk, and add it again")),
            Kind::Raw(raw) => raw.resize(size_bytes, self.readonly),
            Kind::Qcow2(_) => Err(no_resize()),
        };
        self.size_bytes.store(if resized.is_ok() { size_bytes } else { old }, Ordering::Release);
        resized
    }

    /// Takes note that others have made its file longer.
    pub fn learn_size(&self) {
        if let Some(Ok(meta)) = self.image().map(|image| image.metadata()) {
            let there = std::os::unix::fs::MetadataExt::size(&meta).next_multiple_of(SECTOR_BYTES);
            self.size_bytes.fetch_max(there, Ordering::AcqRel);
        }
    }

    /// Ends it after `end` bytes: its size is that in whole sectors, 0 included, and what was beyond reads as zeroes
    /// should it grow again. Blocks. No write may be under way, and no other change of the size.
    ///
    /// # Errors
    /// `EPERM` for a block device, `ENOSPC` for memory, `EFBIG` for more than a file can have, else the system's.
    pub fn truncate(self: &Arc<Self>, end: u64) -> std::io::Result<()> {
        let (old, size_bytes) = (self.size_bytes(), whole_sectors(end)?);
        self.size_bytes.store(size_bytes.min(old), Ordering::Release);
        let cut = match &*self.kind() {
            Kind::Null => Ok(()),
            Kind::Ram(ram) => {
                Self::resize_ram(ram, old, size_bytes).map(|()| ram.clear(end, size_bytes - end))
            }
            Kind::Raw(raw) => raw.truncate(end, size_bytes),
            Kind::Gone => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            Kind::Qcow2(image) if self.grows() => {
                self.clear(end..old).and_then(|()| image.set_size(size_bytes))
            }
            Kind::Qcow2(_) => Err(std::io::Error::from_raw_os_error(libc::EPERM)),
        };
        self.size_bytes.store(if cut.is_ok() { size_bytes } else { old }, Ordering::Release);
        cut
    }

    fn resize_ram(ram: &Ram, old: u64, new: u64) -> std::io::Result<()> {
        ram.resize(old, new).map_err(|_| std::io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// Whether its users may give it another size; see [`make_growable`](Self::make_growable).
    pub fn grows(&self) -> bool {
        self.grows.load(Ordering::Relaxed)
    }

    /// Makes it `end` bytes long, in whole sectors, if it is shorter; what it grows by reads as zeroes. Whether it was
    /// shorter. Blocks. One at a time, and none during a [`resize`](Self::resize). No write may be under way to a qcow2
    /// disk.
    ///
    /// # Errors
    /// `EPERM` for a block device, `ENOSPC` for memory, `EFBIG` for a qcow2 disk that its L1 table does not reach so far
    /// for, else the system's.
    pub fn lengthen(&self, end: u64) -> std::io::Result<bool> {
        let (old, size_bytes) = (self.size_bytes(), whole_sectors(end)?);
        if size_bytes <= old {
            return Ok(false);
        }
        match &*self.kind() {
            Kind::Null => {}
            Kind::Ram(ram) => Self::resize_ram(ram, old, size_bytes)?,
            Kind::Raw(raw) => raw.lengthen(size_bytes)?,
            Kind::Gone => return Err(std::io::Error::from_raw_os_error(libc::EIO)),
            Kind::Qcow2(image) if self.grows() => image.set_size(size_bytes)?,
            Kind::Qcow2(_) => return Err(std::io::Error::from_raw_os_error(libc::EPERM)),
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(true)
    }

    /// Waits until everything written is on stable storage. Blocks: for control, never for a worker.
    ///
    /// # Errors
    /// The system's; what was written before may be lost then. With the page cache in use, that of a flush that failed
    /// before, whoever asked for it.
    pub fn sync(&self) -> std::io::Result<()> {
        // Held, so that an image that is replaced is not written to after it was closed.
        let kind = self.kind.read().expect("no holder panics");
        match &**kind {
            Kind::Gone => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            Kind::Raw(raw) if !self.readonly && self.cache != Cache::Unsafe => raw.sync_now(),
            Kind::Qcow2(image) if self.cache != Cache::Unsafe => image.flush_now(),
            _ => Ok(()),
        }
    }

    /// Whether writes are refused.
    pub fn readonly(&self) -> bool {
        self.readonly
    }

    /// When a write is on stable storage. Under [`Cache::Writethrough`] every write counts as `fua`, under
    /// [`Cache::Unsafe`] none, whatever the request says.
    pub fn cache(&self) -> Cache {
        self.cache
    }

    /// What the offset and length of a request have to be multiples of, a power of two: 1 where any byte can
    /// be had alone. (Of a guest's requests only the length and offset are sure to be multiples of 512; what it takes
    /// beyond that, the backend does for itself.)
    #[inline]
    pub fn granule(&self) -> u64 {
        self.granule.load(Ordering::Acquire)
    }

    /// Likewise for WriteZeroes.
    #[inline]
    pub fn zero_granule(&self) -> u64 {
        self.zero_granule.load(Ordering::Acquire)
    }

    /// The image itself, where it is a file or device byte for byte.
    pub fn image(&self) -> Option<Arc<File>> {
        match &*self.kind() {
            Kind::Raw(raw) => Some(raw.image().clone()),
            Kind::Null | Kind::Ram(_) | Kind::Qcow2(_) | Kind::Gone => None,
        }
    }

    /// Whether to ask the image for its size or times may wait for another program, as a file on FUSE does: not for a
    /// worker.
    pub fn image_may_wait(&self) -> bool {
        match &*self.kind() {
            Kind::Raw(raw) => raw.may_wait(),
            Kind::Qcow2(image) => image.may_wait(),
            Kind::Null | Kind::Ram(_) | Kind::Gone => false,
        }
    }

    /// Writes bytes that need not be multiples of the [granule](Self::granule), the ones around them being read and
    /// written back: no other write may be under way there. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn merge(self: &Arc<Self>, offset: u64, bytes: &[u8], fua: bool) -> std::io::Result<()> {
        match &*self.kind() {
            Kind::Raw(raw) if self.watch().is_idle() => raw.merge(offset, bytes, fua),
            _ => self.merge_as_queue(offset, bytes, fua),
        }
    }

    /// Where data is from `offset` on, or the first hole, by the image's own map; the disk's size where there is none. Of raw
    /// images the file knows ([`image`](Self::image)); for others all is data. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn seek(self: &Arc<Self>, offset: u64, hole: bool) -> std::io::Result<u64> {
        match &*self.kind() {
            Kind::Qcow2(_) => self.seek_as_queue(offset, hole),
            _ => Ok(if hole { self.size_bytes() } else { offset }),
        }
    }

    /// The persistent dirty bitmaps of a qcow2 image that is open for writing, handed to who sets their bits from before the
    /// first write on; none of other disks. Until [`put_bitmaps`](Self::put_bitmaps) they are in use in the image, and in
    /// doubt for who opens it next.
    pub fn take_bitmaps(&self) -> Vec<Loaded> {
        match &*self.kind() {
            Kind::Qcow2(image) => image.take_bitmaps(),
            Kind::Raw(_) | Kind::Null | Kind::Ram(_) | Kind::Gone => Vec::new(),
        }
    }

    /// Makes these the bitmaps of its image once it is closed, with those gone that are not among them. After the last write;
    /// other disks have no place for any.
    pub fn put_bitmaps(&self, bitmaps: Vec<Loaded>) {
        if let Kind::Qcow2(image) = &*self.kind() {
            image.put_bitmaps(bitmaps);
        }
    }

    /// What to tell a guest.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether the image is open with O_DIRECT.
    pub fn direct_in_use(&self) -> bool {
        match &*self.kind() {
            Kind::Raw(raw) => raw.direct_in_use(),
            Kind::Qcow2(image) => image.direct_in_use(),
            Kind::Null | Kind::Ram(_) | Kind::Gone => false,
        }
    }

    /// How requests reach it: `ring`, `inline` (a file in memory), `memory` or `none`.
    pub fn path(&self) -> &'static str {
        match &*self.kind() {
            Kind::Null => "none",
            Kind::Gone => "gone",
            Kind::Ram(_) => "memory",
            Kind::Raw(raw) if raw.inline() => "inline",
            Kind::Raw(_) | Kind::Qcow2(_) => "ring",
        }
    }

    /// Has handles that are made from now on do something beside each write. With nothing in flight, and no handle made
    /// before still in use.
    pub fn set_watch(&self, watch: Watch) {
        *self.watch.write().expect("no holder panics") = Arc::new(watch);
    }

    /// What handles do beside each write.
    pub fn watch(&self) -> Arc<Watch> {
        self.watch.read().expect("no holder panics").clone()
    }

    /// Its image is about to be deleted: it need not be in order when it is closed.
    pub fn abandon(&self) {
        if let Kind::Qcow2(image) = &*self.kind() {
            image.abandon();
        }
    }

    /// Bytes of a cluster of a qcow2 image.
    pub fn cluster_bytes(&self) -> Option<u64> {
        match &*self.kind() {
            Kind::Qcow2(image) => Some(image.cluster_bytes()),
            _ => None,
        }
    }

    /// Whether its image can keep dirty bitmaps.
    pub fn keeps_bitmaps(&self) -> bool {
        match &*self.kind() {
            Kind::Qcow2(image) => !self.readonly && image.keeps_bitmaps(),
            _ => false,
        }
    }

    /// Makes it usable by one queue of the worker that owns `ring`; on that worker's thread.
    pub fn attach(self: &Arc<Self>, uring: &mut Uring) -> DiskHandle {
        let (kind, mut files, mut image) = (self.kind(), RingFiles::NONE, None);
        match &*kind {
            Kind::Raw(raw) => files = know(raw, uring),
            Kind::Qcow2(qcow2) => image = Some(Box::new(qcow2.attach(uring))),
            Kind::Null | Kind::Ram(_) | Kind::Gone => {}
        }
        let watch = Some(self.watch()).filter(|w| !w.is_idle() && !self.readonly);
        let long = LongRequests::new(&kind);
        DiskHandle { disk: self.clone(), kind, files, image, pool: Pool::default(), watch, long }
    }

    /// Whether a successor finds all that was written, though this process was killed: what was completed is in the image
    /// or in the system's cache of it.
    pub fn outlives_us(&self) -> bool {
        match &*self.kind() {
            // Changes of its map are in our memory until the next flush, unless it has a journal.
            Kind::Qcow2(image) => image.outlives_us(),
            Kind::Null | Kind::Ram(_) | Kind::Raw(_) | Kind::Gone => true,
        }
    }

    /// How its image and those below read, of these each that was not closed and is only read.
    pub fn readings(&self) -> Vec<Reading> {
        match &*self.kind() {
            Kind::Qcow2(image) => image.readings().to_vec(),
            Kind::Null | Kind::Ram(_) | Kind::Raw(_) | Kind::Gone => Vec::new(),
        }
    }

    /// Whether writes may be missing that the daemon before us had completed: no guest of its goes on with this disk.
    pub fn lost(&self) -> bool {
        self.lost
    }
}

impl Disk {
    /// Closes it. False if that failed: the log says how.
    fn shut(&self) -> bool {
        let kind = self.kind();
        let Kind::Qcow2(image) = &*kind else { return true };
        if self.shut.swap(true, Ordering::AcqRel) {
            return true;
        }
        let closed = image.close();
        if self.locked {
            // No handle is left, and so nothing in flight; but a ring may let go of its files a moment later. (A raw image's
            // may be the kernel's by now, in a mount's passthrough or a loop device, and stays locked as long as that.)
            kind.files().iter().for_each(|raw| lock::release(raw.image()));
        }
        closed
    }

    /// Closes a disk that nobody else has any more, but for a moment: who looks at its job.
    ///
    /// # Errors
    /// Its last changes are not in its image, or it is still in use.
    pub fn close(self: Arc<Self>) -> Result<()> {
        for _ in 0..CLOSE_MS_MAX {
            if Arc::strong_count(&self) == 1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        match Arc::into_inner(self) {
            Some(disk) if disk.shut() => Ok(()),
            Some(_) => Err(Error::invalid("it cannot be closed in good order (see the log)")),
            None => Err(Error::busy("it cannot be closed: somebody uses it still")),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.shut();
    }
}

/// Opens and locks what a disk is; its size, and what a guest of it alone is told.
fn open_kind(spec: &DiskSpec, room: bool) -> Result<(Kind, u64, Limits)> {
    Ok(match spec.format() {
        Format::Raw => {
            let (raw, size_bytes, limits) = raw::open(spec)?;
            (Kind::Raw(raw), size_bytes, limits)
        }
        Format::Qcow2 => {
            let (image, size_bytes, limits) = qcow2::open(spec, room)?;
            (Kind::Qcow2(Arc::new(image)), size_bytes, limits)
        }
        Format::Null => (Kind::Null, memory_size(spec)?, Limits::memory(spec.readonly)),
        Format::Ram => {
            let size_bytes = memory_size(spec)?;
            (Kind::Ram(Ram::new(&spec.name, size_bytes)?), size_bytes, Limits::memory(spec.readonly))
        }
    })
}

/// Makes a raw file known to a ring.
fn know(raw: &Raw, uring: &mut Uring) -> RingFiles {
    if raw.inline() {
        // Few requests are the uring's: they go without one of its places for files.
        let file = UringFile::Plain(raw.file().as_raw_fd());
        return RingFiles { file, aside: file };
    }
    let file = uring.know(raw.file());
    RingFiles { file, aside: raw.aside().map_or(file, |f| uring.know(f)) }
}

/// Undoes [`know`].
fn forget(raw: &Raw, uring: &mut Uring) {
    if raw.inline() {
        return;
    }
    uring.forget(raw.file().as_raw_fd());
    if let Some(aside) = raw.aside() {
        uring.forget(aside.as_raw_fd());
    }
}

fn no_resize() -> Error {
    Error::unsupported(
        "a qcow2 disk gets another size while its image is closed, or by the users of a growable mount",
    )
}

/// A raw image's descriptors in one ring.
#[derive(Clone, Copy)]
struct RingFiles {
    file: UringFile,
    /// Through the page cache, for what O_DIRECT refuses; the same as `file` where there is none.
    aside: UringFile,
}

impl RingFiles {
    const NONE: Self = Self { file: UringFile::Plain(-1), aside: UringFile::Plain(-1) };
}

/// A request on a disk that is nothing.
#[inline]
fn null(io: &mut Io) -> i32 {
    match io.op {
        Op::WriteCompressed => -libc::EOPNOTSUPP,
        Op::Seek { .. } => io.all_data(),
        _ => 0,
    }
}

/// The size of a disk without an image, and that nothing is asked for which only an image has.
fn memory_size(spec: &DiskSpec) -> Result<u64> {
    let (name, format) = (&spec.name, if spec.format() == Format::Null { "null" } else { "ram" });
    if let Some(file) = &spec.file {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which has no image: leave out file={} or use format=raw",
            file.display()
        )));
    }
    if spec.direct == Direct::On {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which has no page cache: leave out direct=on"
        )));
    }
    let Some(size) = spec.size else {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which needs a size: add size=1G, say"
        )));
    };
    check_size(size).map_err(|why| Error::invalid(format!("disk {name} cannot have {size} bytes: {why}")))?;
    Ok(size)
}

/// The end of the sector that a file of `end` bytes ends in.
fn whole_sectors(end: u64) -> std::io::Result<u64> {
    let rounded = end.checked_next_multiple_of(SECTOR_BYTES).filter(|size| i64::try_from(*size).is_ok());
    rounded.ok_or_else(|| std::io::Error::from_raw_os_error(libc::EFBIG))
}

/// Why a size cannot be a disk's.
fn check_size(size_bytes: u64) -> Result<(), String> {
    if size_bytes == 0 {
        return Err("it has to be at least 512".to_owned());
    }
    if size_bytes > i64::MAX as u64 {
        return Err("that is more than a file can have".to_owned());
    }
    if !size_bytes.is_multiple_of(SECTOR_BYTES) {
        let up = size_bytes.next_multiple_of(SECTOR_BYTES);
        return Err(format!("not a multiple of 512; {up} is"));
    }
    Ok(())
}

fn shared(file: &Arc<File>) -> SharedFile {
    file.clone()
}

/// The errno of the last system call, negative.
fn last_errno() -> i32 {
    -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests;
