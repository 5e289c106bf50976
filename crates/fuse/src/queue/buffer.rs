//! The memory that requests' data lies in: a slot's worth each, page by page as it is used.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Anonymous memory in pieces of one size, whole pages each.
pub(super) struct Buffers {
    base: NonNull<u8>,
    piece: usize,
    count: usize,
}

// SAFETY: it owns its memory; who follows the pointers answers for that.
unsafe impl Send for Buffers {}

impl Buffers {
    /// `count` pieces of `piece` bytes, rounded up to pages. Nothing is used up before it is touched.
    pub(super) fn new(count: usize, piece: usize) -> io::Result<Self> {
        let piece = piece.next_multiple_of(4096);
        // SAFETY: a new mapping at an address of the kernel's choice harms no other.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                piece * count,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, piece, count })
    }

    /// The start of a piece.
    #[inline]
    pub(super) fn at(&self, index: u16) -> *mut u8 {
        debug_assert!(usize::from(index) < self.count);
        self.base.as_ptr().wrapping_add(usize::from(index) * self.piece)
    }

    pub(super) fn piece(&self) -> usize {
        self.piece
    }

    /// Keeps the memory for as long as the process lives: the kernel may still write there.
    pub(super) fn leak(&mut self) {
        self.count = 0;
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        // SAFETY: mapped in `new` with this length; its owner is at rest, so the kernel does not use it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.piece * self.count) };
    }
}
