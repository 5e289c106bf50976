//! Segments of memory for a message.

use libc::{iovec, msghdr};

/// Most segments in one message (the kernel's UIO_MAXIOV).
const SEGMENTS_MAX: usize = 1024;
const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Segments of a message that the kernel sends or fills.
pub(super) struct Segments {
    pub(super) all: Box<[iovec]>,
    pub(super) count: usize,
    pub(super) bytes: u64,
    header: Box<msghdr>,
}

impl Segments {
    /// Without room for any.
    pub(super) fn empty() -> Self {
        // SAFETY: the structure consists of integers and pointers, and zeroes are valid for it.
        let header = unsafe { std::mem::zeroed() };
        Self { all: Box::default(), count: 0, bytes: 0, header: Box::new(header) }
    }

    pub(super) fn new() -> Self {
        Self { all: vec![NO_SEGMENT; SEGMENTS_MAX].into_boxed_slice(), ..Self::empty() }
    }

    pub(super) fn clear(&mut self) {
        (self.count, self.bytes) = (0, 0);
    }

    pub(super) fn room(&self) -> usize {
        self.all.len() - self.count
    }

    /// Adds a segment, as a part of the last one if it follows it. Returns false if there is no
    /// room.
    #[inline]
    pub(super) fn push(&mut self, ptr: *mut u8, len: usize) -> bool {
        if self.count > 0 {
            let last = &mut self.all[self.count - 1];
            if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == ptr {
                last.iov_len += len;
                self.bytes += len as u64;
                return true;
            }
        }
        if self.room() == 0 {
            return false;
        }
        self.all[self.count] = iovec { iov_base: ptr.cast(), iov_len: len };
        self.count += 1;
        self.bytes += len as u64;
        true
    }

    /// Returns the header of a message with the segments from `first` on.
    pub(super) fn message(&mut self, first: usize) -> *mut msghdr {
        self.header.msg_iov = self.all[first..self.count].as_mut_ptr();
        self.header.msg_iovlen = (self.count - first) as _;
        &raw mut *self.header
    }
}
