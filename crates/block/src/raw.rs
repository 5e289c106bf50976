//! `raw`: a file or block device, byte for byte.
//!
//! A request is a small state machine (`begin`, `after`) that determines the next operation. Its
//! state is in the [`Io`]. There are two drivers:
//!
//! | driver | files | how an operation is done |
//! | --- | --- | --- |
//! | `inline` | files in memory (tmpfs, ramfs, hugetlbfs) | a system call at once: io_uring would use another thread, which costs tens of times as much as the copy |
//! | `uring` | all others | by the worker's io_uring, between guest memory and file |
//!
//! Most requests are one operation. Some need several: short transfers (which continue where they
//! ended; a read beyond the end of the file returns zeroes), more segments than one call takes,
//! buffers that O_DIRECT refuses, zeroes by a method that the file system may not have, and a sync
//! at the end.
//!
//! What must never happen: a flush succeeds after one that failed, while the page cache is in use.
//! The kernel reports a failed write-back once and then takes the page for clean. So the failure is
//! stored here.

mod inline;
mod open;
mod probe;
mod uring;

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

pub(super) use open::{begins_as_qcow2, no_image, open, with_way_to_make};
pub(super) use uring::UringFiles;
use vshunt_types::error::{Error, Result};

use super::bounce::{AlignedBuf, Pool};
use super::cost::Zeroing;
use super::file_times::FileTimes;
use super::io::Stage;
use super::limits::SECTOR_BYTES;
use super::memory::Mapping;
use super::{Extent, Found, Io, Op, Step, own_mounts};

/// Most segments that one readv or writev takes (the kernel's UIO_MAXIOV).
const SEGMENTS_MAX: usize = 1024;
/// Most bytes that one read or write moves (the kernel's MAX_RW_COUNT), for any page size.
const TRANSFER_BYTES_MAX: u64 = 0x7fff_0000;
/// How often an operation that was interrupted is repeated before its request fails.
const RETRIES_MAX: u8 = 100;
/// Bytes of zeroes that one write takes. They are a mapping of the kernel's page of zeroes.
const ZERO_BYTES: usize = 1 << 20;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// A file that an io_uring knows. It stays open as long.
pub(super) type SharedFile = Arc<dyn AsRawFd + Send + Sync>;

/// Methods to discard and zero, as bits. A disk has a set of methods that may work; a request has a
/// set that failed.
mod method {
    /// BLOCK_URING_CMD_DISCARD.
    pub(super) const COMMAND: u8 = 1;
    /// FALLOC_FL_PUNCH_HOLE.
    pub(super) const PUNCH: u8 = 2;
    /// FALLOC_FL_ZERO_RANGE.
    pub(super) const ZERO_RANGE: u8 = 4;
}

/// When written data is brought to stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durable {
    /// By flushes, and by requests with `fua`.
    OnRequest,
    /// By each write.
    Always,
    /// Never: a flush does nothing.
    Never,
}

/// An open image.
pub(super) struct Raw {
    // Control threads; fixed when the image is opened.
    path: PathBuf,
    /// Device number and inode.
    id: (u64, u64),
    /// Its times when it was opened.
    times: FileTimes,
    file: Arc<File>,
    known: SharedFile,
    /// The same file without O_DIRECT, for requests that O_DIRECT refuses.
    ///
    /// Both are coherent for requests one after the other: the kernel writes dirty pages of a range
    /// back before a direct read or write of the range, and drops its pages after a direct write.
    /// Requests at the same time are different. The page cache works on whole pages, so a request
    /// through it could undo a direct write next to it. So there is a second descriptor only where
    /// a block of O_DIRECT is at least a page. Two such requests then overlap, and a guest does not
    /// rely on their order. (Read-ahead uses larger units of the page cache, so it is off for this
    /// descriptor.)
    buffered: Option<SharedFile>,
    block_device: bool,
    /// Masks of the alignment that O_DIRECT requires; 0 without O_DIRECT.
    memory_mask: usize,
    offset_mask: u64,
    direct: bool,
    inline: bool,
    /// The file system waits inside system calls even for io_uring (FUSE). A thread of io-wq waits
    /// instead of the worker.
    offload: bool,
    /// A call for its attributes may wait for another program or host.
    attributes_wait: bool,
    durable: Durable,
    readonly: bool,
    zeroes: Mapping,
    // Any thread.
    /// Bits of [`method`] that may work.
    methods: AtomicU8,
    /// Zeroes have been written, or the block device had no command for them when it was opened.
    writes_zeroes: AtomicBool,
    /// The negative errno of a flush that failed while the page cache was in use; 0 if none did.
    flush_failed: AtomicI32,
}

/// What a request does next.
enum Next {
    /// It is complete, with 0 or a negative errno.
    Done(i32),
    /// It issues the operation of its stage.
    Issue,
}

impl Raw {
    pub(super) fn inline(&self) -> bool {
        self.inline
    }

    pub(super) fn direct_in_use(&self) -> bool {
        self.direct
    }

    /// Returns the device number and inode.
    pub(super) fn id(&self) -> (u64, u64) {
        self.id
    }

    /// Returns the times that the file had when it was opened.
    pub(super) fn times(&self) -> FileTimes {
        self.times
    }

    /// Returns whether a path leads to this image. No request goes to a FUSE mount, which this
    /// process may serve.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        if own_mounts::has(path) {
            return false;
        }
        use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
        let at_path = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        at_path.is_ok_and(|at| (makedev(at.stx_dev_major, at.stx_dev_minor), at.stx_ino) == self.id)
    }

    /// See [`Disk::alignment`](super::Disk::alignment). Without O_DIRECT the page cache takes any
    /// bytes.
    pub(super) fn alignment(&self) -> u64 {
        if self.direct { self.offset_mask + 1 } else { 1 }
    }

    /// See [`Disk::image_may_wait`](super::Disk::image_may_wait).
    pub(super) fn may_wait(&self) -> bool {
        self.offload
    }

    /// Returns whether a call for its attributes may wait for another program or host.
    pub(super) fn attributes_may_wait(&self) -> bool {
        self.attributes_wait
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn readonly(&self) -> bool {
        self.readonly
    }

    pub(super) fn image(&self) -> &Arc<File> {
        &self.file
    }

    fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Flushes and waits; see [`Disk::sync`](super::Disk::sync).
    pub(super) fn sync_now(&self) -> std::io::Result<()> {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(std::io::Error::from_raw_os_error(-errno)),
        }
        self.file.sync_data().inspect_err(|e| {
            self.after_sync(-e.raw_os_error().unwrap_or(libc::EIO));
        })
    }

    /// Returns whether this is a file and not a block device, so that its size can be changed.
    pub(super) fn is_file(&self) -> bool {
        !self.block_device
    }

    pub(super) fn resize(&self, size_bytes: u64, readonly: bool) -> Result<()> {
        let path = self.path.display();
        if self.block_device {
            let now = open::image_size(&self.file, &self.path, true)?;
            if now == size_bytes {
                return Ok(());
            }
            return Err(Error::unsupported(format!(
                "{path} is a block device of {now} bytes and cannot be resized to {size_bytes} from here; resize the \
                 device (lvextend, blockdev, ...) and then ask for the size that it has"
            )));
        }
        if readonly {
            return Err(Error::invalid(format!("{path} is open with readonly=on and cannot be resized")));
        }
        self.file
            .set_len(size_bytes)
            .map_err(|e| Error::io(format_args!("cannot resize {path} to {size_bytes} bytes"), e))
    }

    /// See [`Disk::truncate`](super::Disk::truncate). The file is cut to `end` first, so that the
    /// bytes after it read as zeroes.
    pub(super) fn truncate(&self, end: u64, size_bytes: u64) -> std::io::Result<()> {
        if self.block_device {
            return Err(std::io::Error::from_raw_os_error(libc::EPERM));
        }
        self.file.set_len(end)?;
        if end < size_bytes { self.file.set_len(size_bytes) } else { Ok(()) }
    }

    /// See [`Disk::lengthen`](super::Disk::lengthen). The file is never cut: another process may
    /// have made it longer.
    pub(super) fn lengthen(&self, size_bytes: u64) -> std::io::Result<()> {
        if self.block_device {
            return Err(std::io::Error::from_raw_os_error(libc::EPERM));
        }
        if self.file.metadata()?.len() < size_bytes { self.file.set_len(size_bytes) } else { Ok(()) }
    }

    /// Determines the first operation of a request.
    #[inline]
    fn begin(&self, io: &mut Io, pool: &Pool) -> Next {
        io.state.done = 0;
        io.state.retries = 0;
        match io.request.op {
            Op::Read | Op::Write => self.transfer(io, pool),
            _ => self.begin_other(io),
        }
    }

    #[cold]
    fn begin_other(&self, io: &mut Io) -> Next {
        io.state.tried = 0;
        match io.request.op {
            Op::Flush if self.readonly || self.durable == Durable::Never => Next::Done(0),
            Op::Flush => self.sync(io),
            Op::Seek { .. } => Next::Done(self.seek(io)),
            Op::WriteCompressed | Op::Populate => Next::Done(-libc::EOPNOTSUPP),
            _ if self.readonly => Next::Done(-libc::EROFS),
            Op::Discard => self.discard(io),
            Op::Allocate => self.allocate(io),
            _ => self.zero(io),
        }
    }

    /// Answers where data is. Only files in memory are asked: other file systems may have to read
    /// the map of the file.
    fn seek(&self, io: &mut Io) -> i32 {
        use rustix::fs::{SeekFrom, seek};
        io.all_data();
        if !self.inline || io.request.len == 0 {
            return 0;
        }
        let until = |to: u64| to.saturating_sub(io.request.offset).min(io.request.len);
        // No other code uses or moves the position of the file.
        let (extent, len) = match seek(&self.file, SeekFrom::Data(io.request.offset)) {
            Err(rustix::io::Errno::NXIO) => (Extent::Zero, io.request.len),
            Ok(data) if data > io.request.offset => (Extent::Zero, until(data)),
            Ok(_) => (
                Extent::Data,
                seek(&self.file, SeekFrom::Hole(io.request.offset))
                    .map(until)
                    .ok()
                    .filter(|n| *n > 0)
                    .unwrap_or(io.request.len),
            ),
            Err(_) => return 0,
        };
        io.request.found = Some(Found { extent, len });
        0
    }

    fn allocate(&self, io: &mut Io) -> Next {
        if self.block_device || io.request.len == 0 {
            return Next::Done(0);
        }
        io.state.stage = Stage::Allocate;
        Next::Issue
    }

    /// Determines what follows the result of the operation in flight.
    #[inline]
    fn after(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        if io.state.stage == Stage::Transfer && i64::from(res) == io.request.iov.left_bytes() as i64 {
            io.request.iov.advance(res as u64);
            io.state.stage = Stage::Idle;
            return Next::Done(0);
        }
        self.after_other(io, pool, res)
    }

    /// [`after`](Self::after) for all results except that of a complete transfer.
    fn after_other(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        let stage = io.state.stage;
        if matches!(-res, libc::EINTR | libc::EAGAIN)
            && stage != Stage::DiscardCommand
            && io.state.retries < RETRIES_MAX
        {
            io.state.retries += 1;
            return Next::Issue;
        }
        match stage {
            Stage::Transfer | Stage::Bounce => self.after_transfer(io, pool, res),
            Stage::Sync => self.after_sync(res),
            Stage::ZeroWrite if res > 0 => {
                io.state.done += u64::from(res as u32);
                io.state.retries = 0;
                self.zero_write(io)
            }
            Stage::ZeroWrite => Next::Done(if res < 0 { res } else { -libc::EIO }),
            Stage::ZeroPunch | Stage::ZeroRange if res == 0 => self.zeroed(io),
            Stage::DiscardCommand | Stage::DiscardPunch if res == 0 => Next::Done(0),
            Stage::DiscardCommand => self.next_method(io, method::COMMAND, res),
            Stage::DiscardPunch | Stage::ZeroPunch => self.next_method(io, method::PUNCH, res),
            Stage::ZeroRange => self.next_method(io, method::ZERO_RANGE, res),
            Stage::Allocate => Next::Done(res.min(0)),
            Stage::Idle => Next::Done(-libc::EIO),
        }
    }

    /// Completes a request and returns its buffer to the pool.
    #[inline]
    fn end(&self, io: &mut Io, pool: &Pool, res: i32) -> Step {
        io.state.stage = Stage::Idle;
        if let Some(buf) = io.state.bounce.take() {
            pool.give(buf);
        }
        Step::Done(res)
    }

    /// Determines the next read or write for the segments that are left.
    #[inline]
    fn transfer(&self, io: &mut Io, pool: &Pool) -> Next {
        let left = io.request.iov.left_bytes();
        if left == 0 {
            return Next::Done(0);
        }
        io.state.stage = Stage::Transfer;
        io.state.buffered = false;
        if self.direct {
            if ((io.request.offset + io.state.done) | left) & self.offset_mask != 0 {
                // Disks and the files below a format have whole sectors.
                debug_assert!(self.buffered.is_some(), "a direct request for a part of a sector");
                io.state.buffered = true;
            } else if !io.request.iov.aligned(self.memory_mask, self.offset_mask as usize) {
                return self.bounce(io, pool);
            }
        }
        Next::Issue
    }

    #[cold]
    fn bounce(&self, io: &mut Io, pool: &Pool) -> Next {
        let (left, block) = (io.request.iov.left_bytes(), self.offset_mask + 1);
        io.state.bounce = match io.state.bounce.take() {
            Some(buf) => pool.exchange(buf, left, block),
            None => pool.take(left, block),
        };
        let Some(buf) = &io.state.bounce else { return Next::Done(-libc::ENOMEM) };
        io.state.stage = Stage::Bounce;
        io.state.asked = left.min(buf.len() as u64) as u32;
        if io.request.op == Op::Write {
            // SAFETY: the pool gave the buffer to this request alone. `asked` is at most its length
            // and at most `left`, the bytes in the segments. The segments are valid by the contract
            // of `IoVecs::push`.
            unsafe { io.request.iov.gather(buf.ptr(), u64::from(io.state.asked)) };
        }
        Next::Issue
    }

    fn after_transfer(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        if res < 0 {
            if self.cached() && io.request.op == Op::Write && res == -libc::EIO && self.stable(io) {
                // This may be the failed write-back of another page. It is reported only once.
                self.flush_failed.store(res, Ordering::Relaxed);
            }
            return Next::Done(res);
        }
        let mut n = u64::from(res as u32).min(io.request.iov.left_bytes());
        if let (Stage::Bounce, Some(buf)) = (io.state.stage, &io.state.bounce) {
            n = n.min(u64::from(io.state.asked));
            if io.request.op == Op::Read {
                // SAFETY: the operation is complete, so the kernel no longer uses the buffer; `n`
                // is at most `asked`, and so at most the buffer's length. The segments are valid by
                // the contract of `IoVecs::push`.
                unsafe { io.request.iov.scatter(buf.ptr(), n) };
            }
        }
        io.request.iov.advance(n);
        io.state.done += n;
        io.state.retries = 0;
        if io.request.iov.left_bytes() == 0 {
            return Next::Done(0);
        }
        // A direct transfer ends inside a sector only at the end of the file.
        let ended = n == 0 || (self.direct && !io.state.buffered && !n.is_multiple_of(SECTOR_BYTES));
        match io.request.op {
            _ if !ended => self.transfer(io, pool),
            Op::Read => {
                // SAFETY: the segments are valid by the contract of `IoVecs::push`.
                unsafe { io.request.iov.zero_rest() };
                Next::Done(0)
            }
            _ => Next::Done(-libc::EIO),
        }
    }

    /// Returns whether a write is on stable storage when it completes.
    #[inline]
    fn stable(&self, io: &Io) -> bool {
        match self.durable {
            Durable::OnRequest => io.request.fua,
            Durable::Always => true,
            Durable::Never => false,
        }
    }

    /// Returns the flags of the next write.
    #[inline]
    fn write_flags(&self, io: &Io) -> i32 {
        if self.stable(io) { libc::RWF_DSYNC } else { 0 }
    }

    /// Returns whether the page cache may hold data that is not on the device.
    fn cached(&self) -> bool {
        !self.direct || self.buffered.is_some()
    }

    fn sync(&self, io: &mut Io) -> Next {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => {
                io.state.stage = Stage::Sync;
                Next::Issue
            }
            errno => Next::Done(errno),
        }
    }

    fn after_sync(&self, res: i32) -> Next {
        if res < 0 && self.cached() {
            self.flush_failed.store(res, Ordering::Relaxed);
        }
        Next::Done(res)
    }

    /// See [`Disk::merge`](super::Disk::merge).
    pub(super) fn merge(&self, offset: u64, bytes: &[u8], fua: bool) -> std::io::Result<()> {
        if let Some(buffered) = &self.buffered {
            // The page cache merges. No other write to that page is in flight, and a later direct
            // write writes it back first.
            // SAFETY: the pointer and length are those of a slice; `buffered` keeps the descriptor
            // open.
            let n = unsafe {
                libc::pwrite(buffered.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset as libc::off_t)
            };
            if n != bytes.len() as isize {
                return Err(if n < 0 {
                    std::io::Error::last_os_error()
                } else {
                    std::io::ErrorKind::WriteZero.into()
                });
            }
        } else {
            self.merge_blocks(offset, bytes)?;
        }
        if fua || self.durable == Durable::Always { self.sync_now() } else { Ok(()) }
    }

    /// Reads the first and last block around `bytes`, then writes all blocks.
    fn merge_blocks(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let block = self.alignment();
        let (start, end) = (offset & !(block - 1), (offset + bytes.len() as u64).next_multiple_of(block));
        let mut buf = AlignedBuf::new((end - start) as usize)
            .ok_or(std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        let (whole, block) = (buf.bytes(), block as usize);
        let last = whole.len() - block;
        self.read_block(&mut whole[..block], start)?;
        if last > 0 {
            self.read_block(&mut whole[last..], start + last as u64)?;
        }
        let at = (offset - start) as usize;
        whole[at..at + bytes.len()].copy_from_slice(bytes);
        self.file.write_all_at(whole, start)
    }

    /// Reads a block. Bytes beyond the end of the file are zeroes.
    fn read_block(&self, block: &mut [u8], offset: u64) -> std::io::Result<()> {
        loop {
            match self.file.read_at(block, offset) {
                // A short read ended at the end of the file, since a block is at most a page.
                Ok(n) => {
                    block[n..].fill(0);
                    return Ok(());
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Returns how a range is zeroed, as far as is known. A file system that punches holes writes
    /// no zeroes. For a block device, the kernel may write them at any time without saying so, if
    /// their space is to be kept; a punch that the device cannot do fails.
    pub(super) fn zeroing(&self, unmap: bool) -> Zeroing {
        let punches = self.methods.load(Ordering::Relaxed) & method::PUNCH != 0;
        match punches && !self.writes_zeroes.load(Ordering::Relaxed) && (unmap || !self.block_device) {
            true => Zeroing::Marks,
            false => Zeroing::Writes,
        }
    }

    fn has(&self, io: &Io, method: u8) -> bool {
        self.methods.load(Ordering::Relaxed) & !io.state.tried & method != 0
    }

    /// Chooses the best method to discard that is left.
    fn discard(&self, io: &mut Io) -> Next {
        io.state.stage = match () {
            () if io.request.len == 0 => return Next::Done(0),
            () if self.has(io, method::COMMAND) => Stage::DiscardCommand,
            () if self.has(io, method::PUNCH) => Stage::DiscardPunch,
            // A discard is a hint: a device may ignore it (virtio 1.3, section 5.2.6.2).
            () => return Next::Done(0),
        };
        Next::Issue
    }

    /// Chooses the best method to zero that is left.
    fn zero(&self, io: &mut Io) -> Next {
        let Op::WriteZeroes { unmap } = io.request.op else { return Next::Done(-libc::EIO) };
        io.state.stage = match () {
            () if io.request.len == 0 => return Next::Done(0),
            () if unmap && self.has(io, method::PUNCH) => Stage::ZeroPunch,
            () if self.has(io, method::ZERO_RANGE) => Stage::ZeroRange,
            // A file gets a hole even if its space should be kept: the range has to read as zeroes
            // soon.
            () if !self.block_device && self.has(io, method::PUNCH) => Stage::ZeroPunch,
            () => {
                self.writes_zeroes.store(true, Ordering::Relaxed);
                return self.zero_write(io);
            }
        };
        Next::Issue
    }

    /// Chooses the next method after one failed. Fails if the method exists and failed for another
    /// reason.
    fn next_method(&self, io: &mut Io, method: u8, res: i32) -> Next {
        match -res {
            libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS => {
                self.methods.fetch_and(!method, Ordering::Relaxed);
            }
            // EINVAL may refer to this range only, if it is less than a block of the device.
            libc::EINVAL => {}
            libc::EINTR | libc::EAGAIN if method == method::COMMAND => {}
            _ => return Next::Done(res),
        }
        io.state.tried |= method;
        if io.request.op == Op::Discard { self.discard(io) } else { self.zero(io) }
    }

    /// Determines the next write of zeroes.
    fn zero_write(&self, io: &mut Io) -> Next {
        let left = io.request.len - io.state.done.min(io.request.len);
        if left == 0 {
            return self.zeroed(io);
        }
        io.state.stage = Stage::ZeroWrite;
        io.state.asked = left.min(self.zeroes.len() as u64) as u32;
        io.state.buffered = self.direct
            && ((io.request.offset + io.state.done) | u64::from(io.state.asked)) & self.offset_mask != 0;
        Next::Issue
    }

    fn zeroed(&self, io: &mut Io) -> Next {
        if self.stable(io) && !self.inline { self.sync(io) } else { Next::Done(0) }
    }
}

#[cfg(test)]
mod tests;
