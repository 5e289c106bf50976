//! Aligned buffers for guests whose own buffers O_DIRECT refuses.
//!
//! They are rarely used, since guest kernels align their buffers. A request takes a buffer and
//! returns it to the small pool of its handle, on the worker's thread.
//!
//! What must never happen: a guest decides how much memory the daemon uses, or a request fails
//! because other requests hold the memory. So the more a handle holds, the shorter are its new
//! buffers, down to one block.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

/// Longest buffer, bytes. A longer request takes several operations.
const BOUNCE_BYTES_MAX: u64 = 1 << 20;
/// Shortest buffer while there is room, so that later requests can use it too; and the longest one
/// when half of the room is taken.
const BOUNCE_BYTES_MIN: u64 = 64 << 10;
/// Most bytes that a handle holds in buffers of more than one block: several of the longest ones,
/// and 64 short ones.
const HELD_BYTES_MAX: u64 = 8 << 20;
/// Buffers that a handle keeps for later requests: enough to keep a device busy, at most 4 MiB.
const KEPT_BUFFERS: usize = 4;
const _: () = assert!(KEPT_BUFFERS as u64 * BOUNCE_BYTES_MAX <= HELD_BYTES_MAX / 2);
/// Alignment of the buffers. It is enough for every device, since dma_alignment is at most a page.
pub(super) const BOUNCE_ALIGN: usize = 4096;

/// Bytes from which on a buffer is mapped: its pages are made when they are used. The allocator
/// would write all of its zeroes at once.
const MAPPED_BYTES_MIN: usize = 1 << 20;

/// Memory that the kernel may transfer to and from directly.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory and has no reference to other data.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// Allocates `len` bytes of zeroes; `None` if there is no memory or `len` is 0.
    pub fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, BOUNCE_ALIGN).ok().filter(|l| l.size() > 0)?;
        if len >= MAPPED_BYTES_MIN {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a private mapping of zeroes at an address that the kernel chooses. Pages are
            // aligned to `BOUNCE_ALIGN` at least.
            let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
            let ptr = NonNull::new(ptr.cast()).filter(|_| ptr != libc::MAP_FAILED)?;
            return Some(Self { ptr, layout });
        }
        // SAFETY: the size of the layout is not 0 (filtered above).
        let ptr = unsafe { alloc_zeroed(layout) };
        Some(Self { ptr: NonNull::new(ptr)?, layout })
    }

    /// Returns the start of the buffer.
    #[inline]
    pub fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Returns the length, bytes; never 0.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Returns the bytes. No operation of the kernel uses them at that time.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `new` allocated and initialised `len` bytes, and `&mut self` excludes other
        // references to them.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len() >= MAPPED_BYTES_MIN {
            // SAFETY: `new` mapped this range, and only `drop` unmaps it. The owner has no
            // reference to it any more.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len()) };
            return;
        }
        // SAFETY: `new` allocated the memory with this layout, and only `drop` frees it.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

/// A handle's buffers.
#[derive(Default)]
pub(super) struct Pool {
    /// Buffers that are not in use, each of at least `BOUNCE_BYTES_MIN`.
    kept: RefCell<Vec<AlignedBuf>>,
    /// Bytes of all buffers, in use and kept.
    held_bytes: Cell<u64>,
}

impl Pool {
    /// Returns a buffer for `len` bytes, or a shorter one if there is less room: a multiple of
    /// `block`, which is a power of two. `None` if there is no memory even for a block.
    pub(super) fn take(&self, len: u64, block: u64) -> Option<AlignedBuf> {
        let len = len.clamp(BOUNCE_BYTES_MIN, BOUNCE_BYTES_MAX).next_power_of_two();
        self.take_kept(len)
            .or_else(|| self.make(len, block, HELD_BYTES_MAX / 2))
            .or_else(|| self.take_kept(BOUNCE_BYTES_MIN))
            .or_else(|| self.make(BOUNCE_BYTES_MIN, block, HELD_BYTES_MAX))
            .or_else(|| self.make(BOUNCE_ALIGN as u64, block, u64::MAX))
    }

    /// Returns the shortest kept buffer of at least `len` bytes.
    fn take_kept(&self, len: u64) -> Option<AlignedBuf> {
        let mut kept = self.kept.borrow_mut();
        let fits = kept.iter().enumerate().filter(|(_, b)| b.len() as u64 >= len);
        let i = fits.min_by_key(|(_, b)| b.len())?.0;
        Some(kept.swap_remove(i))
    }

    /// Allocates a buffer, unless the handle would hold more than `most` bytes then.
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

/// Returns whether all bytes are 0.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: every bit pattern is a valid u64.
    let (head, words, tail) = unsafe { bytes.align_to::<u64>() };
    let zero = |b: &u8| *b == 0;
    // In groups, so that the first byte other than zero ends the search soon, and the compiler uses
    // wide instructions.
    head.iter().all(zero)
        && words.chunks(64).all(|c| c.iter().fold(0, |a, w| a | w) == 0)
        && tail.iter().all(zero)
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

    #[test]
    fn zeroes_are_told_from_others() {
        let mut bytes = vec![0; 4096 + 7];
        assert!(is_zero(&bytes) && is_zero(&bytes[3..]) && is_zero(&[]));
        for at in [0, 1, 511, 512, 4095, 4102] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
            bytes[at] = 0;
        }
    }
}
