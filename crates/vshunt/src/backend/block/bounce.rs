//! Aligned buffers for guests whose own are not aligned as O_DIRECT demands.
//!
//! Rare: guest kernels align. A buffer is taken for one request and given back to its handle's small pool; all on the
//! worker's thread.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::RefCell;
use std::ptr::NonNull;

/// Longest piece bounced at once; a longer request goes in several.
pub(super) const BOUNCE_BYTES_MAX: u64 = 1 << 20;
/// Shortest buffer made, so that the next request can use it too.
const BOUNCE_BYTES_MIN: u64 = 64 << 10;
/// Buffers kept for the next requests, a handle: as many as keep a device busy, at most 4 MiB.
const KEPT_BUFFERS: usize = 4;
/// Enough for every device's memory alignment (dma_alignment is at most a page).
pub(super) const BOUNCE_ALIGN: usize = 4096;

/// Memory that the kernel may transfer to and from directly.
pub(super) struct AlignedBuf {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, as a Vec does.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, BOUNCE_ALIGN).ok().filter(|l| l.size() > 0)?;
        // SAFETY: the layout's size is not 0.
        let ptr = unsafe { alloc(layout) };
        Some(Self { ptr: NonNull::new(ptr)?, layout })
    }

    #[inline]
    pub(super) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and dropped once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

/// A handle's buffers that are not in use.
#[derive(Default)]
pub(super) struct Pool(RefCell<Vec<AlignedBuf>>);

impl Pool {
    /// A buffer for `len` bytes or, where they are too many for one piece, for as many as go at once.
    pub(super) fn take(&self, len: u64) -> Option<AlignedBuf> {
        let len = len.min(BOUNCE_BYTES_MAX) as usize;
        let mut kept = self.0.borrow_mut();
        if let Some(i) = kept.iter().position(|b| b.len() >= len) {
            return Some(kept.swap_remove(i));
        }
        AlignedBuf::new(len.next_power_of_two().max(BOUNCE_BYTES_MIN as usize))
    }

    /// Takes a buffer back.
    pub(super) fn give(&self, buf: AlignedBuf) {
        let mut kept = self.0.borrow_mut();
        if kept.len() < KEPT_BUFFERS {
            kept.push(buf);
        }
    }
}
