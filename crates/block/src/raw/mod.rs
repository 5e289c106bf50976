//! `raw`: a file or block device, byte for byte.
//!
//! A request is a small state machine (`begin`, `after`) that says which operation is next, kept in its [`Io`]. It has
//! two drivers:
//!
//! - `ring`: the operation goes to the worker's io_uring, straight between guest memory and file. Everything but:
//! - `inline`: a file in memory (tmpfs, ramfs, hugetlbfs). io_uring would hand it to another thread, which costs
//!   tens of times what the copy does; so the system call is made at once.
//!
//! Most requests are one operation. What needs more: short transfers (resumed where they ended; a read at the file's
//! end gives zeroes), more segments than one call takes, buffers that O_DIRECT refuses, zeroing by ways that the file
//! system may not have, and syncing afterwards.
//!
//! What must never happen: a flush that succeeds after one that failed, when the page cache is in use. The kernel
//! reports a failed write-back once and then takes the page for clean; so the failure is remembered here.

mod inline;
mod open;
mod probe;
mod ring;

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

pub(super) use open::{begins_as_qcow2, no_image, open, open_part};
pub(super) use probe::of_the_kernel;
use vshunt_types::error::{Error, Result};

use super::bounce::{AlignedBuf, Pool};
use super::io::Stage;
use super::memory::Mapping;
use super::{Extent, Found, Io, Op, SECTOR_BYTES, SharedFile, Step, own_mounts};

/// Most segments that one readv or writev takes (the kernel's UIO_MAXIOV).
const SEGMENTS_MAX: usize = 1024;
/// Most bytes that one read or write moves (the kernel's MAX_RW_COUNT), for any page size.
const TRANSFER_BYTES_MAX: u64 = 0x7fff_0000;
/// How often an operation that was interrupted or told to come again does so before its request fails.
const RETRIES_MAX: u8 = 100;
/// Zeroes written at once where there is no better way. They are all the kernel's one page of zeroes.
const ZERO_BYTES: usize = 1 << 20;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Ways to discard and zero, as bits: those that a disk may have, and those that a request has tried in vain.
mod way {
    /// BLOCK_URING_CMD_DISCARD.
    pub(super) const COMMAND: u8 = 1;
    /// FALLOC_FL_PUNCH_HOLE.
    pub(super) const PUNCH: u8 = 2;
    /// FALLOC_FL_ZERO_RANGE.
    pub(super) const ZERO_RANGE: u8 = 4;
}

/// When data is made stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durable {
    /// By flushes, and where a request says so.
    Asked,
    /// With each write.
    Always,
    /// Never: flushes are done at once.
    Never,
}

/// An open image.
pub(super) struct Raw {
    // Control, fixed at open.
    path: PathBuf,
    /// Device number and inode.
    id: (u64, u64),
    file: Arc<File>,
    known: SharedFile,
    /// The same file through the page cache, for requests that O_DIRECT refuses.
    ///
    /// The two are coherent: the kernel writes dirty pages of a range back before it reads or writes that range
    /// directly, and throws its pages away after a direct write. That leaves requests under way at the same time. The
    /// page cache works on whole pages, and a request through it could bring back what a direct one has just written
    /// next to it; so there is a second descriptor only where a block of O_DIRECT is at least a page. Then two such
    /// requests overlap, and a guest does not rely on the order of those. (Read-ahead, which makes larger units of the
    /// page cache, is switched off on this descriptor.)
    aside: Option<SharedFile>,
    block_device: bool,
    /// Masks of what O_DIRECT demands; 0 without O_DIRECT.
    memory_mask: usize,
    offset_mask: u64,
    direct: bool,
    inline: bool,
    /// The file's system waits within the call that asks it, whatever io_uring says (FUSE): a thread of the kernel's is to do
    /// that, not the worker.
    offload: bool,
    durable: Durable,
    readonly: bool,
    zeroes: Mapping,
    // Any thread.
    /// Bits of [`way`] that have not been found missing.
    ways: AtomicU8,
    /// The errno of a flush that failed while the page cache was in use; 0: none did.
    flush_failed: AtomicI32,
}

/// What a request does next.
enum Next {
    /// Nothing: 0, or a negative errno.
    Done(i32),
    /// The operation that its stage names.
    Issue,
}

impl Raw {
    pub(super) fn inline(&self) -> bool {
        self.inline
    }

    pub(super) fn direct_in_use(&self) -> bool {
        self.direct
    }

    /// Device number and inode.
    pub(super) fn id(&self) -> (u64, u64) {
        self.id
    }

    /// Whether that path leads to the same image now. Asks no server of a FUSE mount, which may be this process.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        if own_mounts::has(path) {
            return false;
        }
        use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
        let at_path = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        at_path.is_ok_and(|at| (makedev(at.stx_dev_major, at.stx_dev_minor), at.stx_ino) == self.id)
    }

    /// See [`Disk::granule`](super::Disk::granule). Without O_DIRECT the page cache takes any bytes.
    pub(super) fn granule(&self) -> u64 {
        if self.direct { self.offset_mask + 1 } else { 1 }
    }

    /// See [`Disk::image_may_wait`](super::Disk::image_may_wait).
    pub(super) fn may_wait(&self) -> bool {
        self.offload
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

    pub(super) fn file(&self) -> &SharedFile {
        &self.known
    }

    pub(super) fn aside(&self) -> Option<&SharedFile> {
        self.aside.as_ref()
    }

    fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// See [`Disk::sync`](super::Disk::sync): as [`Op::Flush`], but it waits.
    pub(super) fn sync_now(&self) -> std::io::Result<()> {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(std::io::Error::from_raw_os_error(-errno)),
        }
        self.file.sync_data().inspect_err(|e| {
            self.after_sync(-e.raw_os_error().unwrap_or(libc::EIO));
        })
    }

    /// Whether it is a file, which another size can be given.
    pub(super) fn can_be_cut(&self) -> bool {
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

    /// See [`Disk::truncate`](super::Disk::truncate): to the byte first, so that the bytes after it are gone.
    pub(super) fn truncate(&self, end: u64, size_bytes: u64) -> std::io::Result<()> {
        if self.block_device {
            return Err(std::io::Error::from_raw_os_error(libc::EPERM));
        }
        self.file.set_len(end)?;
        if end < size_bytes { self.file.set_len(size_bytes) } else { Ok(()) }
    }

    /// See [`Disk::lengthen`](super::Disk::lengthen). Never shorter: others may have made the file longer than is known.
    pub(super) fn lengthen(&self, size_bytes: u64) -> std::io::Result<()> {
        if self.block_device {
            return Err(std::io::Error::from_raw_os_error(libc::EPERM));
        }
        if self.file.metadata()?.len() < size_bytes { self.file.set_len(size_bytes) } else { Ok(()) }
    }

    /// The first operation of a request.
    #[inline]
    fn begin(&self, io: &mut Io, pool: &Pool) -> Next {
        io.done = 0;
        io.retries = 0;
        match io.op {
            Op::Read | Op::Write => self.transfer(io, pool),
            _ => self.begin_other(io),
        }
    }

    #[cold]
    fn begin_other(&self, io: &mut Io) -> Next {
        io.tried = 0;
        match io.op {
            Op::Flush if self.readonly || self.durable == Durable::Never => Next::Done(0),
            Op::Flush => self.sync(io),
            Op::Seek { .. } => Next::Done(self.seek(io)),
            Op::WriteCompressed => Next::Done(-libc::EOPNOTSUPP),
            _ if self.readonly => Next::Done(-libc::EROFS),
            Op::Discard => self.discard(io),
            Op::Allocate => self.allocate(io),
            _ => self.zero(io),
        }
    }

    /// Where data is: of files in memory only, for others may have to read the file's map to know.
    fn seek(&self, io: &mut Io) -> i32 {
        use rustix::fs::{SeekFrom, seek};
        io.all_data();
        if !self.inline || io.len == 0 {
            return 0;
        }
        let until = |to: u64| to.saturating_sub(io.offset).min(io.len);
        // Others move no file's position, nor go by it.
        let (extent, len) = match seek(&self.file, SeekFrom::Data(io.offset)) {
            Err(rustix::io::Errno::NXIO) => (Extent::Zero, io.len),
            Ok(data) if data > io.offset => (Extent::Zero, until(data)),
            Ok(_) => (
                Extent::Data,
                seek(&self.file, SeekFrom::Hole(io.offset))
                    .map(until)
                    .ok()
                    .filter(|n| *n > 0)
                    .unwrap_or(io.len),
            ),
            Err(_) => return 0,
        };
        io.found = Some(Found { extent, len });
        0
    }

    fn allocate(&self, io: &mut Io) -> Next {
        if self.block_device || io.len == 0 {
            return Next::Done(0);
        }
        io.stage = Stage::Allocate;
        Next::Issue
    }

    /// What follows on the result of the operation under way.
    #[inline]
    fn after(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        if io.stage == Stage::Transfer && i64::from(res) == io.iov.left_bytes() as i64 {
            io.iov.advance(res as u64);
            io.stage = Stage::Idle;
            return Next::Done(0);
        }
        self.after_other(io, pool, res)
    }

    /// [`after`](Self::after) but for the one result that nearly all requests have.
    fn after_other(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        let stage = io.stage;
        if matches!(-res, libc::EINTR | libc::EAGAIN)
            && stage != Stage::DiscardCommand
            && io.retries < RETRIES_MAX
        {
            io.retries += 1;
            return Next::Issue;
        }
        match stage {
            Stage::Transfer | Stage::Bounce => self.after_transfer(io, pool, res),
            Stage::Sync => self.after_sync(res),
            Stage::ZeroWrite if res > 0 => {
                io.done += u64::from(res as u32);
                io.retries = 0;
                self.zero_write(io)
            }
            Stage::ZeroWrite => Next::Done(if res < 0 { res } else { -libc::EIO }),
            Stage::ZeroPunch | Stage::ZeroRange if res == 0 => self.zeroed(io),
            Stage::DiscardCommand | Stage::DiscardPunch if res == 0 => Next::Done(0),
            Stage::DiscardCommand => self.without(io, way::COMMAND, res),
            Stage::DiscardPunch | Stage::ZeroPunch => self.without(io, way::PUNCH, res),
            Stage::ZeroRange => self.without(io, way::ZERO_RANGE, res),
            Stage::Allocate => Next::Done(res.min(0)),
            Stage::Idle => Next::Done(-libc::EIO),
        }
    }

    /// Ends a request: what it borrowed goes back.
    #[inline]
    fn end(&self, io: &mut Io, pool: &Pool, res: i32) -> Step {
        io.stage = Stage::Idle;
        if let Some(buf) = io.bounce.take() {
            pool.give(buf);
        }
        Step::Done(res)
    }

    /// The next read or write for the segments that are left.
    #[inline]
    fn transfer(&self, io: &mut Io, pool: &Pool) -> Next {
        let left = io.iov.left_bytes();
        if left == 0 {
            return Next::Done(0);
        }
        io.stage = Stage::Transfer;
        io.aside = false;
        if self.direct {
            if ((io.offset + io.done) | left) & self.offset_mask != 0 {
                io.aside = true;
            } else if !io.iov.aligned(self.memory_mask, self.offset_mask as usize) {
                return self.bounce(io, pool);
            }
        }
        Next::Issue
    }

    #[cold]
    fn bounce(&self, io: &mut Io, pool: &Pool) -> Next {
        let (left, block) = (io.iov.left_bytes(), self.offset_mask + 1);
        io.bounce = match io.bounce.take() {
            Some(buf) => pool.exchange(buf, left, block),
            None => pool.take(left, block),
        };
        let Some(buf) = &io.bounce else { return Next::Done(-libc::ENOMEM) };
        io.stage = Stage::Bounce;
        io.asked = left.min(buf.len() as u64) as u32;
        if io.op == Op::Write {
            // SAFETY: the buffer is this request's alone and has room for `asked` bytes, of which there are as many;
            // the segments are valid by `IoVecs::push`.
            unsafe { io.iov.gather(buf.ptr(), u64::from(io.asked)) };
        }
        Next::Issue
    }

    fn after_transfer(&self, io: &mut Io, pool: &Pool, res: i32) -> Next {
        if res < 0 {
            if self.cached() && io.op == Op::Write && res == -libc::EIO && self.stable(io) {
                // It may be the failed write-back of something else, reported here and nowhere else.
                self.flush_failed.store(res, Ordering::Relaxed);
            }
            return Next::Done(res);
        }
        let mut n = u64::from(res as u32).min(io.iov.left_bytes());
        if let (Stage::Bounce, Some(buf)) = (io.stage, &io.bounce) {
            n = n.min(u64::from(io.asked));
            if io.op == Op::Read {
                // SAFETY: the kernel has written the first `n` bytes of the buffer, which has `asked`, and is done
                // with it; the segments are valid by `IoVecs::push`.
                unsafe { io.iov.scatter(buf.ptr(), n) };
            }
        }
        io.iov.advance(n);
        io.done += n;
        io.retries = 0;
        if io.iov.left_bytes() == 0 {
            return Next::Done(0);
        }
        // Through O_DIRECT a transfer ends within a sector only at the end of the file.
        let ended = n == 0 || (self.direct && !io.aside && !n.is_multiple_of(SECTOR_BYTES));
        match io.op {
            _ if !ended => self.transfer(io, pool),
            Op::Read => {
                // SAFETY: the segments are valid by `IoVecs::push`.
                unsafe { io.iov.zero_rest() };
                Next::Done(0)
            }
            _ => Next::Done(-libc::EIO),
        }
    }

    /// Whether the data of a write is to be stable when it is done.
    #[inline]
    fn stable(&self, io: &Io) -> bool {
        match self.durable {
            Durable::Asked => io.fua,
            Durable::Always => true,
            Durable::Never => false,
        }
    }

    /// Flags of the write that is next.
    #[inline]
    fn write_flags(&self, io: &Io) -> i32 {
        if self.stable(io) { libc::RWF_DSYNC } else { 0 }
    }

    /// Whether data may be in the page cache that is not on the device.
    fn cached(&self) -> bool {
        !self.direct || self.aside.is_some()
    }

    fn sync(&self, io: &mut Io) -> Next {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => {
                io.stage = Stage::Sync;
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
        if let Some(aside) = &self.aside {
            // The page cache merges. It is the only writer of that page now, and direct ones write it back first.
            // SAFETY: the bytes are a slice, the descriptor is open for as long as `aside` is.
            let n = unsafe {
                libc::pwrite(aside.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset as libc::off_t)
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

    /// Whole blocks around `bytes`: read at both ends, then written.
    fn merge_blocks(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let block = self.granule();
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

    /// Reads a block. The file may end within it or before: the rest is zeroes.
    fn read_block(&self, block: &mut [u8], offset: u64) -> std::io::Result<()> {
        loop {
            match self.file.read_at(block, offset) {
                // A short read ends at the end of the file: blocks are no larger than a page.
                Ok(n) => {
                    block[n..].fill(0);
                    return Ok(());
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn has(&self, io: &Io, way: u8) -> bool {
        self.ways.load(Ordering::Relaxed) & !io.tried & way != 0
    }

    /// The best way to discard that is left.
    fn discard(&self, io: &mut Io) -> Next {
        io.stage = match () {
            () if io.len == 0 => return Next::Done(0),
            () if self.has(io, way::COMMAND) => Stage::DiscardCommand,
            () if self.has(io, way::PUNCH) => Stage::DiscardPunch,
            // A discard is a hint: a device may do nothing (virtio 1.3, 5.2.6.2).
            () => return Next::Done(0),
        };
        Next::Issue
    }

    /// The best way to zero that is left.
    fn zero(&self, io: &mut Io) -> Next {
        let Op::WriteZeroes { unmap } = io.op else { return Next::Done(-libc::EIO) };
        io.stage = match () {
            () if io.len == 0 => return Next::Done(0),
            () if unmap && self.has(io, way::PUNCH) => Stage::ZeroPunch,
            () if self.has(io, way::ZERO_RANGE) => Stage::ZeroRange,
            // A file gets a hole even if space was to be kept: what counts is that it reads as zeroes, and soon.
            () if !self.block_device && self.has(io, way::PUNCH) => Stage::ZeroPunch,
            () => return self.zero_write(io),
        };
        Next::Issue
    }

    /// A way failed: the next one, or the failure if it has another reason than that the way is not there.
    fn without(&self, io: &mut Io, way: u8, res: i32) -> Next {
        match -res {
            libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS => {
                self.ways.fetch_and(!way, Ordering::Relaxed);
            }
            // EINVAL may be about this range only: less than a block of the device.
            libc::EINVAL => {}
            libc::EINTR | libc::EAGAIN if way == way::COMMAND => {}
            _ => return Next::Done(res),
        }
        io.tried |= way;
        if io.op == Op::Discard { self.discard(io) } else { self.zero(io) }
    }

    /// The next piece of zeroes to write.
    fn zero_write(&self, io: &mut Io) -> Next {
        let left = io.len - io.done.min(io.len);
        if left == 0 {
            return self.zeroed(io);
        }
        io.stage = Stage::ZeroWrite;
        io.asked = left.min(self.zeroes.len() as u64) as u32;
        io.aside = self.direct && ((io.offset + io.done) | u64::from(io.asked)) & self.offset_mask != 0;
        Next::Issue
    }

    fn zeroed(&self, io: &mut Io) -> Next {
        if self.stable(io) && !self.inline { self.sync(io) } else { Next::Done(0) }
    }
}

#[cfg(test)]
mod tests;
