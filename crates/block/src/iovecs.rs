//! The data segments of a request, as host addresses of guest memory.
//!
//! The queue adds segments before the request starts. The backend removes them from the front as
//! bytes are transferred. All of that is on the worker's thread.

use std::ops::Range;

use libc::iovec;
use virtio::mem;

use super::iovec_cache;

/// Segments that are stored without a heap allocation. Most requests have no more.
const INLINE_SEGMENTS: usize = 2;

/// The data segments of a request: host addresses of guest memory.
///
/// The backend removes segments from the front as bytes are transferred. None is left when the
/// request is complete.
pub struct IoVecs {
    inline: [iovec; INLINE_SEGMENTS],
    /// All segments if there are more than fit in `inline`, else empty. The vector belongs to
    /// [`iovec_cache`], and returns to it in [`clear`](Self::clear).
    heap: Vec<iovec>,
    /// Number of segments that were pushed and are not hidden.
    count: usize,
    /// Number of segments that are used up. The front of the next one may be used up too.
    first: usize,
    left_bytes: u64,
}

// SAFETY: the addresses are dereferenced only between `DiskHandle::start` and the end of the
// request, by the thread that the queue is attached to. The caller of `push` keeps them valid until
// then, on every thread.
unsafe impl Send for IoVecs {}

impl Default for IoVecs {
    fn default() -> Self {
        Self { inline: [NO_SEGMENT; INLINE_SEGMENTS], heap: Vec::new(), count: 0, first: 0, left_bytes: 0 }
    }
}

const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl IoVecs {
    /// Adds a segment of `len` bytes at `ptr`. An empty segment is ignored.
    ///
    /// # Safety
    /// From `DiskHandle::start` until the request is [`Step::Done`](super::Step::Done),
    /// `ptr..ptr + len` is mapped, and this process and the kernel may write to it (for a read) or
    /// read it (for a write). Other threads and processes may change the memory at the same time:
    /// it is only copied as bytes or passed to the kernel. The [`Io`](super::Io) of these segments
    /// neither moves nor is dropped in that time.
    #[inline]
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        let segment = iovec { iov_base: ptr.cast(), iov_len: len };
        if self.count < INLINE_SEGMENTS {
            self.inline[self.count] = segment;
        } else {
            if self.heap.len() == self.heap.capacity() {
                self.grow();
            }
            self.heap.push(segment);
        }
        self.count += 1;
        self.left_bytes += len as u64;
    }

    /// Makes room in `heap` for one more segment.
    #[cold]
    fn grow(&mut self) {
        let old = std::mem::replace(&mut self.heap, iovec_cache::take(self.count + 1));
        self.heap.extend_from_slice(if self.count == INLINE_SEGMENTS { &self.inline } else { &old });
        iovec_cache::give(old);
    }

    /// Removes all segments and returns their memory to the cache.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.first = 0;
        self.left_bytes = 0;
        if self.heap.capacity() > 0 {
            iovec_cache::give(std::mem::take(&mut self.heap));
        }
    }

    #[cfg(test)]
    pub(super) fn on_heap(&self) -> bool {
        self.heap.capacity() > 0
    }

    /// Returns the number of bytes in the segments that are left.
    #[inline]
    pub fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// Returns the segments that are left.
    #[inline]
    pub(super) fn left(&self) -> &[iovec] {
        if self.heap.is_empty() {
            &self.inline[self.first..self.count]
        } else {
            &self.heap[self.first..self.count]
        }
    }

    /// Returns whether the address of each segment is a multiple of `base_mask + 1`, and its length
    /// one of `len_mask + 1`.
    #[inline]
    pub(super) fn aligned(&self, base_mask: usize, len_mask: usize) -> bool {
        self.left().iter().all(|s| (s.iov_base.addr() & base_mask) | (s.iov_len & len_mask) == 0)
    }

    /// Removes the first `n` bytes. At least `n` bytes are left.
    #[inline]
    pub(super) fn advance(&mut self, mut n: u64) {
        debug_assert!(n <= self.left_bytes);
        self.left_bytes -= n;
        let segments =
            if self.heap.is_empty() { &mut self.inline[..self.count] } else { &mut self.heap[..self.count] };
        while n > 0 {
            let s = &mut segments[self.first];
            if n < s.iov_len as u64 {
                s.iov_base = s.iov_base.wrapping_byte_add(n as usize);
                s.iov_len -= n as usize;
                return;
            }
            n -= s.iov_len as u64;
            self.first += 1;
        }
    }

    /// Hides the bytes after the first `n` until [`show`](Self::show). `n` is positive and less
    /// than the number of bytes left. No segment is added before `show`.
    pub(super) fn hide_after(&mut self, n: u64) -> Hidden {
        debug_assert!(n > 0 && n < self.left_bytes);
        let bytes = self.left_bytes - n;
        let (mut last, mut end) = (self.first, n);
        let segments = if self.heap.is_empty() { &mut self.inline[..] } else { &mut self.heap[..] };
        while end > segments[last].iov_len as u64 {
            end -= segments[last].iov_len as u64;
            last += 1;
        }
        let segment = &mut segments[last];
        let cut = iovec {
            iov_base: segment.iov_base.wrapping_byte_add(end as usize),
            iov_len: segment.iov_len - end as usize,
        };
        segment.iov_len = end as usize;
        self.left_bytes = n;
        let count = std::mem::replace(&mut self.count, last + 1);
        Hidden { last, cut, count, bytes }
    }

    /// Restores the bytes that [`hide_after`](Self::hide_after) hid. The bytes before them count as
    /// used up.
    pub(super) fn show(&mut self, hidden: Hidden) {
        let Hidden { last, cut, count, bytes } = hidden;
        self.count = count;
        self.left_bytes = bytes;
        self.first = last + 1;
        if cut.iov_len > 0 {
            let segments = if self.heap.is_empty() { &mut self.inline[..] } else { &mut self.heap[..] };
            segments[last] = cut;
            self.first = last;
        }
    }

    /// Calls `f` for each piece of the first `n` bytes left: with its address, its length, and its
    /// offset in these bytes.
    #[inline]
    fn for_first(&self, n: u64, mut f: impl FnMut(*mut u8, usize, usize)) {
        debug_assert!(n <= self.left_bytes);
        let mut at = 0;
        for s in self.left() {
            let len = (n - at).min(s.iov_len as u64);
            if len == 0 {
                return;
            }
            f(s.iov_base.cast(), len as usize, at as usize);
            at += len;
        }
    }

    /// Copies the first `n` bytes left to `to`.
    ///
    /// # Safety
    /// `to` has room for `n` bytes that no other thread uses. The segments are valid, as
    /// [`push`](Self::push) requires.
    #[inline]
    pub(super) unsafe fn gather(&self, to: *mut u8, n: u64) {
        self.for_first(n, |ptr, len, at| {
            // SAFETY: the pieces of `for_first` add up to `n` bytes, and the caller promises that
            // `to` has as many.
            let to = unsafe { to.add(at) };
            // SAFETY: the piece lies in a segment that is valid by the contract of `push`, and `to`
            // has `len` bytes. The guest may change its memory during the copy: each byte is then
            // its old or its new one, and nothing depends on it.
            unsafe { mem::copy(ptr, to, len) }
        });
    }

    /// Copies `n` bytes from `from` to the first bytes left.
    ///
    /// # Safety
    /// `from` has `n` bytes. The segments are valid, as [`push`](Self::push) requires.
    #[inline]
    pub(super) unsafe fn scatter(&self, from: *const u8, n: u64) {
        self.for_first(n, |ptr, len, at| {
            // SAFETY: the pieces of `for_first` add up to `n` bytes, and the caller promises that
            // `from` has as many.
            let from = unsafe { from.add(at) };
            // SAFETY: the piece lies in a segment that is valid by the contract of `push`, and
            // `from` has `len` bytes. The guest may access its memory during the copy; only raw
            // bytes are copied.
            unsafe { mem::copy(from, ptr, len) }
        });
    }

    /// Calls `f` for each piece of a range of the bytes left: with its address and length.
    pub(super) fn for_range(&self, range: Range<u64>, mut f: impl FnMut(*mut u8, usize)) {
        self.for_first(range.end, |ptr, len, at| {
            let skip = (range.start.saturating_sub(at as u64) as usize).min(len);
            if skip < len {
                f(ptr.wrapping_add(skip), len - skip);
            }
        });
    }

    /// Fills a range of the bytes left with zeroes.
    ///
    /// # Safety
    /// The segments are valid, as [`push`](Self::push) requires.
    pub(super) unsafe fn zero_range(&self, range: Range<u64>) {
        // SAFETY: `for_range` stays in segments that are valid by the contract of `push`.
        self.for_range(range, |ptr, len| unsafe { mem::fill(ptr, 0, len) });
    }

    /// Copies `from` to a range of the bytes left. Both have the same length.
    ///
    /// # Safety
    /// The segments are valid, as [`push`](Self::push) requires.
    pub(super) unsafe fn scatter_range(&self, range: Range<u64>, from: &[u8]) {
        debug_assert_eq!(range.end - range.start, from.len() as u64);
        let mut at = 0;
        self.for_range(range, |ptr, len| {
            // SAFETY: the piece lies in a segment that is valid by the contract of `push`; the
            // slice has `len` bytes.
            unsafe { mem::write(ptr, &from[at..at + len]) };
            at += len;
        });
    }

    /// Copies a range of the bytes left to `to`. Both have the same length.
    ///
    /// # Safety
    /// The segments are valid, as [`push`](Self::push) requires.
    pub(super) unsafe fn gather_range(&self, range: Range<u64>, to: &mut [u8]) {
        debug_assert_eq!(range.end - range.start, to.len() as u64);
        let mut at = 0;
        self.for_range(range, |ptr, len| {
            // SAFETY: the piece lies in a segment that is valid by the contract of `push`; the
            // slice has `len` bytes.
            unsafe { mem::read(ptr, &mut to[at..at + len]) };
            at += len;
        });
    }

    /// Fills all bytes left with zeroes and removes them.
    ///
    /// # Safety
    /// The segments are valid, as [`push`](Self::push) requires.
    pub(super) unsafe fn zero_rest(&mut self) {
        // SAFETY: `for_first` stays in segments that are valid by the contract of `push`.
        self.for_first(self.left_bytes, |ptr, len, _| unsafe { mem::fill(ptr, 0, len) });
        self.advance(self.left_bytes);
    }
}

/// The end of a request's segments while it is hidden from the backend.
pub(super) struct Hidden {
    /// Index of the last segment that is shown.
    last: usize,
    /// The hidden end of that segment; empty if all of it is shown.
    cut: iovec,
    /// Number of segments, including the hidden ones.
    count: usize,
    /// Number of hidden bytes.
    bytes: u64,
}

// SAFETY: `cut` is a segment of an `IoVecs`, and is dereferenced only through it, on the thread
// that the queue is attached to.
unsafe impl Send for Hidden {}

#[cfg(test)]
mod tests;
