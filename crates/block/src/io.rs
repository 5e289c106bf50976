//! A request as a backend sees it.
//!
//! Lives in a queue's slot, on the worker's thread. The queue fills it in; the backend uses up its segments and keeps
//! its own progress in it. What must never happen: an [`Io`] moved or dropped while an operation of its is under way,
//! for the kernel holds addresses inside it.

use std::ops::Range;

use libc::iovec;
use virtio::mem;

use super::bounce::AlignedBuf;
use super::spill;
use super::{Extent, Found, Op};

/// Segments kept without a heap allocation: what most requests have.
const INLINE_SEGMENTS: usize = 2;

/// The data segments of a request: host addresses of guest memory.
///
/// The backend takes segments off the front as bytes are transferred; after a request nothing is left of them.
pub struct IoVecs {
    inline: [iovec; INLINE_SEGMENTS],
    /// All segments, once there are more than fit in `inline`, else empty; room of [`spill`], which has it back when they go.
    spill: Vec<iovec>,
    /// Segments pushed, less those that are hidden.
    count: usize,
    /// Segments used up; the one after them may have been cut at its front.
    first: usize,
    left_bytes: u64,
}

// SAFETY: the addresses are only followed between `DiskHandle::start` and the end of the request, by the thread that
// the queue is attached to; who pushes them (`push`'s contract) keeps them valid on whichever thread that is.
unsafe impl Send for IoVecs {}

impl Default for IoVecs {
    fn default() -> Self {
        Self { inline: [NO_SEGMENT; INLINE_SEGMENTS], spill: Vec::new(), count: 0, first: 0, left_bytes: 0 }
    }
}

const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl IoVecs {
    /// Adds a segment of `len` bytes at `ptr`; an empty one is left out.
    ///
    /// # Safety
    /// From `DiskHandle::start` until the request is [`Step::Done`](super::Step::Done), `ptr..ptr + len` is mapped
    /// and may be written (for a read) or read (for a write) by us and by the kernel. The memory may be changed by
    /// others meanwhile: it is only ever copied as bytes or handed to the kernel. And the [`Io`] that these segments
    /// belong to neither moves nor is dropped in that time.
    #[inline]
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        let segment = iovec { iov_base: ptr.cast(), iov_len: len };
        if self.count < INLINE_SEGMENTS {
            self.inline[self.count] = segment;
        } else {
            if self.spill.len() == self.spill.capacity() {
                self.grow();
            }
            self.spill.push(segment);
        }
        self.count += 1;
        self.left_bytes += len as u64;
    }

    /// Makes room for one more than there are, in `spill`.
    #[cold]
    fn grow(&mut self) {
        let old = std::mem::replace(&mut self.spill, spill::take(self.count + 1));
        self.spill.extend_from_slice(if self.count == INLINE_SEGMENTS { &self.inline } else { &old });
        spill::give(old);
    }

    /// Forgets all segments and gives their room back.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.first = 0;
        self.left_bytes = 0;
        if self.spill.capacity() > 0 {
            spill::give(std::mem::take(&mut self.spill));
        }
    }

    #[cfg(test)]
    pub(super) fn spilled(&self) -> bool {
        self.spill.capacity() > 0
    }

    /// Bytes that the segments still name.
    #[inline]
    pub fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// The segments that are left.
    #[inline]
    pub(super) fn left(&self) -> &[iovec] {
        if self.spill.is_empty() {
            &self.inline[self.first..self.count]
        } else {
            &self.spill[self.first..self.count]
        }
    }

    /// Whether every segment begins on a multiple of `base_mask + 1` and is a multiple of `len_mask + 1` long.
    #[inline]
    pub(super) fn aligned(&self, base_mask: usize, len_mask: usize) -> bool {
        self.left().iter().all(|s| (s.iov_base.addr() & base_mask) | (s.iov_len & len_mask) == 0)
    }

    /// Uses up `n` bytes, which must be there.
    #[inline]
    pub(super) fn advance(&mut self, mut n: u64) {
        debug_assert!(n <= self.left_bytes);
        self.left_bytes -= n;
        let segments = if self.spill.is_empty() {
            &mut self.inline[..self.count]
        } else {
            &mut self.spill[..self.count]
        };
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

    /// Hides all but the first `n` bytes left, at least one and fewer than there are, until [`show`](Self::show). No
    /// segment is added meanwhile.
    pub(super) fn hide_after(&mut self, n: u64) -> Hidden {
        debug_assert!(n > 0 && n < self.left_bytes);
        let bytes = self.left_bytes - n;
        let (mut last, mut end) = (self.first, n);
        let segments = if self.spill.is_empty() { &mut self.inline[..] } else { &mut self.spill[..] };
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

    /// Shows what [`hide_after`](Self::hide_after) hid. The bytes before it count as used up.
    pub(super) fn show(&mut self, hidden: Hidden) {
        let Hidden { last, cut, count, bytes } = hidden;
        self.count = count;
        self.left_bytes = bytes;
        self.first = last + 1;
        if cut.iov_len > 0 {
            let segments = if self.spill.is_empty() { &mut self.inline[..] } else { &mut self.spill[..] };
            segments[last] = cut;
            self.first = last;
        }
    }

    /// Calls `f` with address and length of what makes up the first `n` bytes left, and with their offset among them.
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
    /// `to` has room for `n` bytes, which nothing else uses; the segments are valid as `push` was promised.
    #[inline]
    pub(super) unsafe fn gather(&self, to: *mut u8, n: u64) {
        // SAFETY: `for_first` stays within the segments and within n; guest memory may change under the copy,
        // which then has either of its bytes.
        self.for_first(n, |ptr, len, at| unsafe { mem::copy(ptr, to.add(at), len) });
    }

    /// Copies `n` bytes from `from` to the first bytes left.
    ///
    /// # Safety
    /// `from` has `n` bytes; the segments are valid as `push` was promised.
    #[inline]
    pub(super) unsafe fn scatter(&self, from: *const u8, n: u64) {
        // SAFETY: as in `gather`.
        self.for_first(n, |ptr, len, at| unsafe { mem::copy(from.add(at), ptr, len) });
    }

    /// Calls `f` with address and length of what makes up a range of the bytes left.
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
    /// The segments are valid as `push` was promised.
    pub(super) unsafe fn zero_range(&self, range: Range<u64>) {
        // SAFETY: as in `gather`.
        self.for_range(range, |ptr, len| unsafe { mem::fill(ptr, 0, len) });
    }

    /// Copies `from` to a range, as long, of the bytes left.
    ///
    /// # Safety
    /// The segments are valid as `push` was promised.
    pub(super) unsafe fn scatter_range(&self, range: Range<u64>, from: &[u8]) {
        debug_assert_eq!(range.end - range.start, from.len() as u64);
        let mut at = 0;
        self.for_range(range, |ptr, len| {
            // SAFETY: as in `gather`; the pieces add up to `from`'s length.
            unsafe { mem::write(ptr, &from[at..at + len]) };
            at += len;
        });
    }

    /// Copies a range of the bytes left to `to`, which is as long.
    ///
    /// # Safety
    /// The segments are valid as `push` was promised.
    pub(super) unsafe fn gather_range(&self, range: Range<u64>, to: &mut [u8]) {
        debug_assert_eq!(range.end - range.start, to.len() as u64);
        let mut at = 0;
        self.for_range(range, |ptr, len| {
            // SAFETY: as in `gather`; the pieces add up to `to`'s length.
            unsafe { mem::read(ptr, &mut to[at..at + len]) };
            at += len;
        });
    }

    /// Fills all that is left with zeroes and uses it up.
    ///
    /// # Safety
    /// The segments are valid as `push` was promised.
    pub(super) unsafe fn zero_rest(&mut self) {
        // SAFETY: as in `gather`.
        self.for_first(self.left_bytes, |ptr, len, _| unsafe { mem::fill(ptr, 0, len) });
        self.advance(self.left_bytes);
    }
}

/// The end of a request's segments, while it is hidden from the backend.
pub(super) struct Hidden {
    /// Index of the last segment that is shown.
    last: usize,
    /// Its hidden end; empty where it is shown whole.
    cut: iovec,
    /// Segments, hidden ones included.
    count: usize,
    /// Bytes hidden.
    bytes: u64,
}

// SAFETY: as for `IoVecs`, whose segment it is.
unsafe impl Send for Hidden {}

/// What the operation under way is, for the one who takes its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing is under way.
    #[default]
    Idle,
    /// A read or write straight between file and segments.
    Transfer,
    /// A read or write by way of the aligned buffer.
    Bounce,
    /// The last step: data to stable storage.
    Sync,
    /// A discard by the block layer's own command.
    DiscardCommand,
    /// A discard by punching a hole.
    DiscardPunch,
    /// Zeroes by punching a hole.
    ZeroPunch,
    /// Zeroes by FALLOC_FL_ZERO_RANGE.
    ZeroRange,
    /// Zeroes written out.
    ZeroWrite,
    /// Space by fallocate.
    Allocate,
}

/// One request; lives in the queue's slot and does not move while an operation is under way.
pub struct Io {
    /// What is asked.
    pub op: Op,
    /// Where on the disk, bytes; a multiple of the disk's granule. The queue has checked that `offset + len` is within
    /// the disk.
    pub offset: u64,
    /// How much, bytes; a multiple likewise. For a read or write what the segments add up to ([`Io::push`] counts).
    pub len: u64,
    /// A write (or WriteZeroes) is to be on stable storage when it is done.
    pub fua: bool,
    /// The segments of a read or write.
    pub iov: IoVecs,

    /// The answer to [`Op::Seek`].
    pub found: Option<Found>,

    /// Bytes done.
    pub(super) done: u64,
    pub(super) stage: Stage,
    /// The operation goes through the descriptor that is not O_DIRECT.
    pub(super) aside: bool,
    /// Ways to do it that were tried in vain: bits of `raw::Ways`.
    pub(super) tried: u8,
    /// Times in a row that an operation was issued again without having moved anything.
    pub(super) retries: u8,
    /// Bytes that the operation under way asks for, where that is not told by the segments.
    pub(super) asked: u32,
    pub(super) bounce: Option<AlignedBuf>,
    /// Of a qcow2 disk's requests; made at the slot's first.
    pub(super) qcow2: Option<Box<super::qcow2::Slot>>,
    /// It takes the fast path through a qcow2 image's map; where on the disk it begins, while `offset` is the file's.
    pub(super) hit: Option<(::qcow2::FastPath, u64)>,
    /// Of writes under a backup; made at the slot's first.
    pub(super) before: Option<Box<super::copy_before_write::Before>>,
    /// Of requests that are done in parts; made at the slot's first.
    pub(super) parts: Option<Box<super::parts::Parts>>,
}

impl Default for Io {
    fn default() -> Self {
        Self {
            op: Op::Flush,
            offset: 0,
            len: 0,
            fua: false,
            iov: IoVecs::default(),
            found: None,
            done: 0,
            stage: Stage::Idle,
            aside: false,
            tried: 0,
            retries: 0,
            asked: 0,
            bounce: None,
            qcow2: None,
            hit: None,
            before: None,
            parts: None,
        }
    }
}

impl Io {
    /// Makes it a new request, with no segments and of no length.
    #[inline]
    pub fn reset(&mut self, op: Op, offset: u64, fua: bool) {
        debug_assert_eq!(self.stage, Stage::Idle, "a request's slot was reused before its completion");
        debug_assert!(
            self.parts.as_ref().is_none_or(|p| !p.is_active()),
            "a request's slot was reused between its parts"
        );
        self.op = op;
        self.offset = offset;
        self.len = 0;
        self.fua = fua;
        self.found = None;
        self.iov.clear();
    }

    /// Answers [`Op::Seek`]: there is data, as far as is known.
    pub(super) fn all_data(&mut self) -> i32 {
        self.found = Some(Found { extent: Extent::Data, len: self.len });
        0
    }

    /// Adds a data segment and counts it into `len`.
    ///
    /// # Safety
    /// That of [`IoVecs::push`].
    #[inline]
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.iov.push(ptr, len) };
        self.len += len as u64;
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if self.stage != Stage::Idle {
            // The kernel may still write to the buffer: losing it is the lesser evil.
            std::mem::forget(self.bounce.take());
            debug_assert!(std::thread::panicking(), "a request was dropped before its completion");
        }
    }
}

#[cfg(test)]
mod tests;
