//! The parts of a request: its chain of buffers, as callers see it, and its descriptors, as they
//! were read.

use crate::desc::Head;
use crate::mem;
use crate::raw;
use alloc::vec::Vec;

/// A piece of guest memory in this process. It may be empty, because the driver chooses its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seg {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: u32,
}

impl Seg {
    /// Prefetches its first bytes, up to two cache lines, which the driver wrote on another CPU.
    /// The read follows when other segments were prefetched, too.
    #[inline]
    pub fn prefetch(&self) {
        raw::prefetch(self.ptr);
        raw::prefetch(self.ptr.wrapping_add(self.len.saturating_sub(1).min(64) as usize));
    }
}

// SAFETY: a segment is an address and a length. Code that accesses the memory is responsible for
// the thread and for keeping the memory table alive.
unsafe impl Send for Seg {}

/// A fault of one chain. The ring itself is sound, and the request can be answered if there is a
/// status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer, or the next descriptor, is out of bounds.
    #[error("a buffer or descriptor lies outside of guest memory or table")]
    Addr,
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("a device-readable buffer follows a device-writable one")]
    Order,
    /// The chain has more descriptors than the table, so it loops.
    #[error("the descriptor chain loops")]
    Loop,
    /// The chain has more descriptors or segments than a request may have.
    #[error("the descriptor chain is too long")]
    TooLong,
    /// An indirect table that is nested, not negotiated, chained on, or of a bad length
    /// (2.7.5.3.1).
    #[error("a bad indirect descriptor")]
    Indirect,
}

/// The buffers of a request. The value is used again for each request, and allocates only until it
/// has grown.
#[derive(Debug, Default)]
pub struct Chain {
    /// The name of the request.
    pub head: Head,
    /// Device-readable segments first, then device-writable ones; in order.
    pub segs: Vec<Seg>,
    /// `segs[..readable]` are device-readable.
    pub readable: usize,
    /// The first fault that was found. The walk continues as far as is safe, because it may still
    /// find the status byte. Faulty buffers are left out.
    pub fault: Option<ChainFault>,
}

impl Chain {
    /// Makes an empty chain.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Copies the first bytes of segments to `to`, until the segments or `to` end. Returns the number
/// of bytes copied.
///
/// # Safety
/// The memory table that the segments were translated with is alive.
#[inline]
pub unsafe fn gather(from: &[Seg], to: &mut [u8]) -> usize {
    let all = to.len();
    let mut rest = to;
    for seg in from {
        let (now, later) = rest.split_at_mut(rest.len().min(seg.len as usize));
        // SAFETY: the length is not more than the segment's. The segment was translated, and the
        // caller keeps it mapped.
        unsafe { mem::read(seg.ptr, now) };
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    all - rest.len()
}

/// Copies `from` to the first bytes of segments, until `from` or the segments end. Returns the
/// number of bytes copied.
///
/// # Safety
/// The memory table that the segments were translated with is alive.
#[inline]
pub unsafe fn scatter(from: &[u8], to: &[Seg]) -> usize {
    let mut rest = from;
    for seg in to {
        let (now, later) = rest.split_at(rest.len().min(seg.len as usize));
        // SAFETY: the length is not more than the segment's. The segment was translated, and the
        // caller keeps it mapped.
        unsafe { mem::write(seg.ptr, now) };
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    from.len() - rest.len()
}
