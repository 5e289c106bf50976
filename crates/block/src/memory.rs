//! `ram`: a disk in the daemon's memory.
//!
//! Requests are copies, done at once by whichever worker has them, without locks: two that touch the same sectors at
//! the same time may leave any mixture of their bytes, as on no real disk, and as no guest relies on.
//!
//! What must never happen: memory used after it is unmapped. So nothing is ever unmapped while the disk lives: address
//! space for growing is reserved at the start, growing makes more of it accessible, and shrinking gives pages back
//! but leaves them accessible.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use virtio::mem;
use vshunt_types::error::{Error, Kind, Result};

use super::{Io, Op};

/// Address space reserved for growing. It costs nothing; 47 bits have room for a hundred of these.
const RESERVED_BYTES: u64 = 1 << 40;
/// Granule of giving memory back. A larger page of the system makes madvise fail, and the bytes are cleared instead.
const PAGE_BYTES: u64 = 4096;

/// An anonymous mapping, unmapped when dropped.
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is only an address range; those who access it through `ptr` answer for what they do.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of zeroes without reserving memory for them.
    pub(super) fn new(bytes: usize, prot: ProtFlags) -> std::io::Result<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice, harms no other.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE | MapFlags::NORESERVE)
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?, bytes })
    }

    #[inline]
    pub(super) fn ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, with this length; its users hold a reference to its owner, so there are none left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A disk in memory.
pub(super) struct Ram {
    space: Mapping,
    /// Bytes from the start that can be accessed; never gets smaller.
    open_bytes: AtomicU64,
}

impl Ram {
    pub(super) fn new(name: &str, size_bytes: u64) -> Result<Self> {
        let no_memory =
            |e: std::io::Error| Error::io(format_args!("cannot map {size_bytes} bytes for disk {name}"), e);
        let wanted = usize::try_from(size_bytes.next_multiple_of(PAGE_BYTES))
            .map_err(|_| no_memory(std::io::ErrorKind::OutOfMemory.into()))?;
        // Under a limit on address space there may be no room to grow, but still for the disk.
        let space = Mapping::new(wanted.max(RESERVED_BYTES as usize), ProtFlags::empty())
            .or_else(|_| Mapping::new(wanted, ProtFlags::empty()))
            .map_err(no_memory)?;
        let ram = Self { space, open_bytes: AtomicU64::new(0) };
        ram.open(size_bytes).map_err(no_memory)?;
        Ok(ram)
    }

    /// Makes the first `size_bytes` accessible.
    fn open(&self, size_bytes: u64) -> std::io::Result<()> {
        let bytes = size_bytes.next_multiple_of(PAGE_BYTES);
        if bytes <= self.open_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }
        if bytes > self.space.len() as u64 {
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        // SAFETY: within our mapping; access is only ever added, which breaks no one who has it already.
        unsafe {
            mprotect(
                self.space.ptr().cast::<c_void>(),
                bytes as usize,
                MprotectFlags::READ | MprotectFlags::WRITE,
            )
        }?;
        self.open_bytes.fetch_max(bytes, Ordering::Release);
        Ok(())
    }

    /// Shrinks or grows; what is grown by reads as zeroes.
    pub(super) fn resize(&self, old_bytes: u64, new_bytes: u64) -> Result<()> {
        self.open(new_bytes).map_err(|e| {
            Error::new(
                Kind::Limit,
                format!(
                    "a disk of format ram cannot grow to {new_bytes} bytes here ({} are reserved): {e}",
                    self.space.len()
                ),
            )
        })?;
        // Shrinking gives the memory back. Growing clears too: a write that was late for the shrinking may lie there.
        self.clear(old_bytes.min(new_bytes), old_bytes.abs_diff(new_bytes));
        Ok(())
    }

    /// Does a whole request: 0, or a negative errno.
    #[inline]
    pub(super) fn request(&self, io: &mut Io, readonly: bool) -> i32 {
        let bytes = if matches!(io.op, Op::Read | Op::Write) { io.iov.left_bytes() } else { io.len };
        // The queue checks against the disk's size. This is against unmapped memory, and so ours to check.
        let open = self.open_bytes.load(Ordering::Acquire);
        if io.offset.checked_add(bytes).is_none_or(|end| end > open) {
            return -libc::EIO;
        }
        if readonly && !matches!(io.op, Op::Read | Op::Flush | Op::Seek { .. }) {
            return -libc::EROFS;
        }
        match io.op {
            Op::Read => {
                // SAFETY: offset + bytes is within what is accessible; the segments are valid by `IoVecs::push`.
                // Other workers may copy to the same bytes: these are raw copies, nothing is inferred from the bytes.
                unsafe { io.iov.scatter(self.space.ptr().add(io.offset as usize), bytes) };
                io.iov.advance(bytes);
            }
            Op::Write => {
                // SAFETY: as for Read.
                unsafe { io.iov.gather(self.space.ptr().add(io.offset as usize), bytes) };
                io.iov.advance(bytes);
            }
            Op::Flush | Op::Allocate => {}
            Op::Discard | Op::WriteZeroes { .. } => self.clear(io.offset, bytes),
            Op::Seek { .. } => return io.all_data(),
            Op::WriteCompressed => return -libc::EOPNOTSUPP,
        }
        0
    }

    /// Makes accessible bytes zero; whole pages are given back.
    pub(super) fn clear(&self, offset: u64, bytes: u64) {
        let end = offset + bytes;
        debug_assert!(end <= self.open_bytes.load(Ordering::Relaxed));
        let (first_page, end_page) = (offset.next_multiple_of(PAGE_BYTES), end & !(PAGE_BYTES - 1));
        // SAFETY: [from, to) is within what is accessible, by the callers; other workers' copies may race with it,
        // as with any other copy here.
        let zero = |from: u64, to: u64| unsafe {
            mem::fill(self.space.ptr().add(from as usize), 0, (to - from) as usize);
        };
        if first_page >= end_page {
            return zero(offset, end);
        }
        zero(offset, first_page);
        // SAFETY: whole pages of our private anonymous mapping: they read as zeroes afterwards and stay mapped.
        let given = unsafe {
            let at = self.space.ptr().add(first_page as usize);
            madvise(at.cast(), (end_page - first_page) as usize, Advice::LinuxDontNeed)
        };
        if given.is_err() {
            zero(first_page, end_page);
        }
        zero(end_page, end);
    }
}
