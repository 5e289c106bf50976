//! The memory for the data of requests: one piece for each request slot, backed by pages only where
//! it is used.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

const PAGE_BYTES: usize = 4096;

/// Anonymous memory in pieces of one size, each of whole pages.
pub(crate) struct Buffers {
    base: NonNull<u8>,
    piece_bytes: usize,
    count: usize,
}

// SAFETY: the value owns its mapping and has no tie to a thread. It gives out addresses only; code
// that uses them has to justify each access.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Maps `count` pieces of `piece_bytes` bytes, rounded up to pages.
    ///
    /// # Errors
    /// The system's: no address space.
    pub(super) fn new(count: u16, piece_bytes: usize) -> io::Result<Self> {
        let piece_bytes = piece_bytes.next_multiple_of(PAGE_BYTES);
        let count = usize::from(count);
        let len = piece_bytes.checked_mul(count).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses the address of a new mapping, so no other memory is affected.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, piece_bytes, count })
    }

    /// The start of a piece.
    #[inline]
    pub(super) fn at(&self, index: u16) -> *mut u8 {
        debug_assert!(usize::from(index) < self.count);
        self.base.as_ptr().wrapping_add(usize::from(index) * self.piece_bytes)
    }

    /// Bytes of a piece.
    pub(super) fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// Keeps the memory for as long as the process runs, because the kernel may still write there.
    pub(super) fn leak(&mut self) {
        self.count = 0;
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        // SAFETY: `new` mapped exactly this range. The queue that owns it is at rest, so the kernel
        // does not use it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.piece_bytes * self.count) };
    }
}
