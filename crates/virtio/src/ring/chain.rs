//! What a request is made of: its chain of buffers, as callers see it, and its descriptors, as they were read.

use crate::desc::Head;
use crate::mem;
use crate::raw;
use alloc::vec::Vec;

/// A piece of guest memory in this process. Empty if a driver made it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seg {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: u32,
}

impl Seg {
    /// Asks for its first bytes, up to two cache lines, for a read that comes when others were asked for, too: the other
    /// side wrote them on another CPU.
    #[inline]
    pub fn prefetch(&self) {
        raw::prefetch(self.ptr);
        raw::prefetch(self.ptr.wrapping_add(self.len.saturating_sub(1).min(64) as usize));
    }
}

// SAFETY: a segment is an address and a length; whoever follows it answers for the thread that does so, and for the
// memory table that it came from being alive.
unsafe impl Send for Seg {}

/// What is wrong with one chain. The ring itself is sound and the request can be answered, if a status byte is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer, or the descriptor that is to come next, is out of bounds.
    #[error("a buffer or descriptor lies outside of guest memory or table")]
    Addr,
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("a device-readable buffer follows a device-writable one")]
    Order,
    /// More descriptors than there are: the chain bites its tail.
    #[error("the descriptor chain loops")]
    Loop,
    /// More descriptors or segments than a request may have.
    #[error("the descriptor chain is too long")]
    TooLong,
    /// An indirect table that is nested, not negotiated, chained on, or of a bad length (2.7.5.3.1).
    #[error("a bad indirect descriptor")]
    Indirect,
}

/// A request's buffers. Scratch that is used again for each request: it allocates only until it is warm.
#[derive(Debug, Default)]
pub struct Chain {
    /// Who the request is.
    pub head: Head,
    /// Device-readable segments first, then device-writable ones; in order.
    pub segs: Vec<Seg>,
    /// `segs[..readable]` are device-readable.
    pub readable: usize,
    /// The first thing that was wrong. The walk goes on as far as is safe, so that the status byte may still be found;
    /// buffers that are wrong are left out.
    pub fault: Option<ChainFault>,
}

impl Chain {
    /// An empty chain.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Copies the first bytes of segments to `to`, until one of both ends. Returns the number of bytes copied.
///
/// # Safety
/// The memory table that the segments were translated with is alive.
#[inline]
pub unsafe fn gather(from: &[Seg], to: &mut [u8]) -> usize {
    let all = to.len();
    let mut rest = to;
    for seg in from {
        let (now, later) = rest.split_at_mut(rest.len().min(seg.len as usize));
        // SAFETY: not more than the segment's bytes, which were translated and are mapped by the caller's promise.
        unsafe { mem::read(seg.ptr, now) };
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    all - rest.len()
}

/// Copies `from` to the first bytes of segments, until one of both ends. Returns the number of bytes copied.
///
/// # Safety
/// The memory table that the segments were translated with is alive.
#[inline]
pub unsafe fn scatter(from: &[u8], to: &[Seg]) -> usize {
    let mut rest = from;
    for seg in to {
        let (now, later) = rest.split_at(rest.len().min(seg.len as usize));
        // SAFETY: not more than the segment's bytes, which were translated and are mapped by the caller's promise.
        unsafe { mem::write(seg.ptr, now) };
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    from.len() - rest.len()
}
