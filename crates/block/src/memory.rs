//! `ram`: a disk in the daemon's memory.
//!
//! A worker carries out a request at once, as a copy, without locks. Two requests for the same
//! sectors at the same time may leave any mixture of their bytes. No guest relies on an order of
//! such requests.
//!
//! What must never happen: memory is used after it is unmapped. So nothing is unmapped before the
//! disk is dropped. Address space for growth is reserved at the start. To grow makes more of it
//! accessible; to shrink frees pages but leaves them accessible.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use virtio::mem;
use vshunt_types::error::{Error, Kind, Result};

use super::{Io, Op};

/// Address space that is reserved for growth. It costs no memory, and 47 bits of addresses are
/// enough for a hundred disks.
const RESERVED_BYTES: u64 = 1 << 40;
/// Unit in which memory is freed. If the pages of the system are larger, madvise fails and the
/// bytes are cleared instead.
const PAGE_BYTES: u64 = 4096;

/// An anonymous mapping, unmapped when dropped.
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its mapping, which any thread may unmap. Code that accesses the memory through
// `ptr` states its own reasons.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference only gives the address and the length, which do not change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of zeroes. No memory is reserved for them.
    pub(super) fn new(bytes: usize, prot: ProtFlags) -> std::io::Result<Self> {
        // SAFETY: the kernel chooses a free range for the new mapping, so no existing memory
        // changes.
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
        // SAFETY: `new` made the mapping with this length. Users of `ptr` hold a reference to its
        // owner, so none is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A disk in memory.
pub(super) struct Ram {
    space: Mapping,
    /// Accessible bytes from the start; never decreases.
    open_bytes: AtomicU64,
}

impl Ram {
    pub(super) fn new(name: &str, size_bytes: u64) -> Result<Self> {
        let no_memory =
            |e: std::io::Error| Error::io(format_args!("cannot map {size_bytes} bytes for disk {name}"), e);
        let wanted = usize::try_from(size_bytes.next_multiple_of(PAGE_BYTES))
            .map_err(|_| no_memory(std::io::ErrorKind::OutOfMemory.into()))?;
        // A limit on address space may leave no room for growth, but enough for the disk.
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
        // SAFETY: the range lies in `space` (checked before). Access is only added, so existing
        // users are not affected.
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

    /// Changes the size. New bytes read as zeroes.
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
        // To shrink frees the memory. To grow clears it too: a late write may have followed an
        // earlier shrink.
        self.clear(old_bytes.min(new_bytes), old_bytes.abs_diff(new_bytes));
        Ok(())
    }

    /// Carries out a whole request. Returns 0 or a negative errno.
    #[inline]
    pub(super) fn request(&self, io: &mut Io, readonly: bool) -> i32 {
        let bytes = if matches!(io.request.op, Op::Read | Op::Write) {
            io.request.iov.left_bytes()
        } else {
            io.request.len
        };
        // The queue has checked the range against the size of the disk. This check is against
        // access to inaccessible memory.
        let open = self.open_bytes.load(Ordering::Acquire);
        if io.request.offset.checked_add(bytes).is_none_or(|end| end > open) {
            return -libc::EIO;
        }
        if readonly && !matches!(io.request.op, Op::Read | Op::Flush | Op::Seek { .. }) {
            return -libc::EROFS;
        }
        match io.request.op {
            Op::Read => {
                // SAFETY: the range is accessible (checked above), and the segments are valid by
                // the contract of `IoVecs::push`. Other workers may copy to the same bytes: only
                // raw bytes are copied, and nothing depends on them.
                unsafe { io.request.iov.scatter(self.at(io.request.offset), bytes) };
                io.request.iov.advance(bytes);
            }
            Op::Write => {
                // SAFETY: the range is accessible (checked above), and the segments are valid by
                // the contract of `IoVecs::push`. Other workers may copy from and to the same
                // bytes: only raw bytes are copied, and nothing depends on them.
                unsafe { io.request.iov.gather(self.at(io.request.offset), bytes) };
                io.request.iov.advance(bytes);
            }
            Op::Flush | Op::Allocate => {}
            Op::Discard | Op::WriteZeroes { .. } => self.clear(io.request.offset, bytes),
            Op::Seek { .. } => return io.all_data(),
            Op::WriteCompressed | Op::Populate => return -libc::EOPNOTSUPP,
        }
        0
    }

    /// Returns the address of a byte of the disk.
    #[inline]
    fn at(&self, offset: u64) -> *mut u8 {
        self.space.ptr().wrapping_add(offset as usize)
    }

    /// Clears accessible bytes. Whole pages are freed.
    pub(super) fn clear(&self, offset: u64, bytes: u64) {
        let end = offset + bytes;
        debug_assert!(end <= self.open_bytes.load(Ordering::Relaxed));
        let (first_page, end_page) = (offset.next_multiple_of(PAGE_BYTES), end & !(PAGE_BYTES - 1));
        let zero = |from: u64, to: u64| {
            // SAFETY: the range is part of `offset..end`, which callers have checked to be
            // accessible. Copies of other workers may happen at the same time: only raw bytes are
            // written, and nothing depends on them.
            unsafe { mem::fill(self.at(from), 0, (to - from) as usize) };
        };
        if first_page >= end_page {
            return zero(offset, end);
        }
        zero(offset, first_page);
        // SAFETY: these are whole pages of the private anonymous mapping `space`. They stay mapped
        // and read as zeroes afterwards.
        let freed = unsafe {
            madvise(self.at(first_page).cast(), (end_page - first_page) as usize, Advice::LinuxDontNeed)
        };
        if freed.is_err() {
            zero(first_page, end_page);
        }
        zero(end_page, end);
    }
}
