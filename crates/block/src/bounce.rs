//! Aligned buffers for guests whose own are not aligned as O_DIRECT demands.
//!
//! Rare: guest kernels align. A buffer is taken for one request and given back to its handle's small pool; all on the
//! worker's thread.
//!
//! What must never happen: guests deciding how much memory we use, or a request failing because others have it. So
//! the more a handle holds, the shorter are the pieces that a request goes in, down to a block at a time.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

/// Longest piece bounced at once; a longer request goes in several.
const BOUNCE_BYTES_MAX: u64 = 1 << 20;
/// Shortest buffer made where there is room, so that the next request can use it too; and the longest piece when half
/// of the room is taken.
const BOUNCE_BYTES_MIN: u64 = 64 << 10;
/// What a handle may hold in buffers of more than a block: several requests of the longest pieces, and 64 short ones.
const HELD_BYTES_MAX: u64 = 8 << 20;
/// Buffers kept for the next requests, a handle: as many as keep a device busy, at most 4 MiB.
const KEPT_BUFFERS: usize = 4;
const _: () = assert!(KEPT_BUFFERS as u64 * BOUNCE_BYTES_MAX <= HELD_BYTES_MAX / 2);
/// Enough for every device's memory alignment (dma_alignment is at most a page).
pub(super) const BOUNCE_ALIGN: usize = 4096;

/// Memory that the kernel may transfer to and from directly.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, as a Vec does.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// `None` without memory.
    pub fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, BOUNCE_ALIGN).ok().filter(|l| l.size() > 0)?;
        // SAFETY: the layout's size is not 0.
        let ptr = unsafe { alloc_zeroed(layout) };
        Some(Self { ptr: NonNull::new(ptr)?, layout })
    }

    /// Where it begins.
    #[inline]
    pub fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes; never 0.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Its bytes, while no operation of the kernel's uses them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: ours alone by `&mut self`, and initialised when it was made.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and dropped once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

/// A handle's buffers.
#[derive(Default)]
pub(super) struct Pool {
    /// Those that are not in use; each of at least `BOUNCE_BYTES_MIN`.
    kept: RefCell<Vec<AlignedBuf>>,
    /// Bytes of all, in use and kept.
    held_bytes: Cell<u64>,
}

impl Pool {
    /// A buffer for `len` bytes or for as many of them as go at once: a multiple of `block`, a power of two. `None`:
    /// the system has no memory, not even for a block.
    pub(super) fn take(&self, len: u64, block: u64) -> Option<AlignedBuf> {
        let len = len.clamp(BOUNCE_BYTES_MIN, BOUNCE_BYTES_MAX).next_power_of_two();
        self.take_kept(len)
            .or_else(|| self.make(len, block, HELD_BYTES_MAX / 2))
            .or_else(|| self.take_kept(BOUNCE_BYTES_MIN))
            .or_else(|| self.make(BOUNCE_BYTES_MIN, block, HELD_BYTES_MAX))
            .or_else(|| self.make(BOUNCE_ALIGN as u64, block, u64::MAX))
    }

    /// The shortest of those kept that has `len` bytes.
    fn take_kept(&self, len: u64) -> Option<AlignedBuf> {
        let mut kept = self.kept.borrow_mut();
        let fits = kept.iter().enumerate().filter(|(_, b)| b.len() as u64 >= len);
        let i = fits.min_by_key(|(_, b)| b.len())?.0;
        Some(kept.swap_remove(i))
    }

    /// A new one, unless more than `most` bytes would be held then.
    fn make(&self, len: u64, block: u64, most: u64) -> Option<AlignedBuf> {
        let len = len.max(block);
        let held = self.held_bytes.get() + len;
        if held > most {
            return None;
        }
        let buf = AlignedBuf::new(len as usize)?;
        self.held_bytes.set(held);
        Some(buf)
    }

    /// Changes a buffer that is short for want of room for a longer one, if there is one by now.
    pub(super) fn exchange(&self, buf: AlignedBuf, len: u64, block: u64) -> Option<AlignedBuf> {
        if buf.len() as u64 >= len.min(BOUNCE_BYTES_MIN) {
            return Some(buf);
        }
        self.give(buf);
        self.take(len, block)
    }

    /// Takes a buffer back.
    pub(super) fn give(&self, buf: AlignedBuf) {
        let mut kept = self.kept.borrow_mut();
        if kept.len() < KEPT_BUFFERS && buf.len() as u64 >= BOUNCE_BYTES_MIN {
            kept.push(buf);
        } else {
            self.held_bytes.set(self.held_bytes.get() - buf.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lens(bufs: &[AlignedBuf]) -> u64 {
        bufs.iter().map(|b| b.len() as u64).sum()
    }

    #[test]
    fn guests_do_not_decide_how_much_is_held() {
        let pool = Pool::default();
        for (len, block) in [(1 << 30, 512), (BOUNCE_BYTES_MAX, 4096), (4096, 512), (100 << 10, 8192)] {
            let bufs: Vec<_> = (0..1024).map(|_| pool.take(len, block).unwrap()).collect();
            let short = block.max(BOUNCE_ALIGN as u64);
            assert!(lens(&bufs) <= HELD_BYTES_MAX + 1024 * short, "{len}");
            assert!(bufs.iter().all(|b| (b.len() as u64).is_multiple_of(block)));
            assert!(bufs[0].len() as u64 >= len.min(BOUNCE_BYTES_MAX), "the first one gets what it asks for");
            assert_eq!(bufs[1023].len() as u64, short);
            assert_eq!(pool.held_bytes.get(), lens(&bufs) + lens(&pool.kept.borrow()));
            bufs.into_iter().for_each(|b| pool.give(b));
            assert_eq!(pool.held_bytes.get(), lens(&pool.kept.borrow()));
            assert!(pool.held_bytes.get() <= KEPT_BUFFERS as u64 * BOUNCE_BYTES_MAX);
        }
    }

    #[test]
    fn a_short_buffer_is_exchanged_when_there_is_room_again() {
        let pool = Pool::default();
        let mut bufs: Vec<_> = (0..128).map(|_| pool.take(1 << 20, 512).unwrap()).collect();
        let short = bufs.pop().unwrap();
        let short = pool.exchange(short, 1 << 20, 512).unwrap();
        assert_eq!(short.len(), BOUNCE_ALIGN);
        bufs.into_iter().for_each(|b| pool.give(b));
        let short = pool.exchange(short, 4096, 512).unwrap();
        assert_eq!(short.len(), BOUNCE_ALIGN, "it is long enough");
        assert_eq!(pool.exchange(short, 1 << 20, 512).unwrap().len(), 1 << 20);
    }
}
