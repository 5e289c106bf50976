//! A request, as a queue fills it in and a backend carries it out.
//!
//! An [`Io`] lives in a slot of a queue, on the worker's thread. The queue fills in the
//! [`Request`]. The backend removes the segments as it transfers them, and keeps its progress in
//! the [`DriverState`].
//!
//! What must never happen: an [`Io`] is moved or dropped while an operation of it is in flight. The
//! kernel holds addresses inside it.

mod state;

use qcow2::{Extent, Found};
use vshunt_types::spec::Cache;

pub(super) use self::state::{DriverState, FrozenState, Qcow2State, SplitState, Stage};
use super::{IoVecs, Op};

/// What a queue asks of a disk.
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Start of the range on the disk, bytes; a multiple of the disk's alignment. The queue has
    /// checked that `offset + len` is within the disk.
    pub offset: u64,
    /// Length of the range, bytes; a multiple of the disk's alignment. For a read or write it is
    /// the sum of the segments, which [`Io::push`] counts.
    pub len: u64,
    /// Whether a write (or WriteZeroes) is on stable storage when it completes.
    pub fua: bool,
    /// The segments of a read or write.
    pub iov: IoVecs,
    /// The answer to [`Op::Seek`].
    pub found: Option<Found>,
}

impl Default for Request {
    fn default() -> Self {
        Self { op: Op::Flush, offset: 0, len: 0, fua: false, iov: IoVecs::default(), found: None }
    }
}

impl Request {
    /// Returns whether a write is on stable storage when it completes.
    #[inline]
    pub(super) fn is_durable(&self, cache: Cache) -> bool {
        match cache {
            Cache::Writeback => self.fua,
            Cache::Writethrough => true,
            Cache::Unsafe => false,
        }
    }

    /// Returns the offset and the length, bytes. A flush has no range, whatever it says.
    #[inline]
    pub(super) fn range(&self) -> (u64, u64) {
        if self.op == Op::Flush { (0, 0) } else { (self.offset, self.len) }
    }
}

/// A request in a slot of a queue. It does not move while an operation is in flight.
#[derive(Default)]
pub struct Io {
    /// What the queue asks.
    pub request: Request,
    /// What the drivers keep about it.
    pub(super) state: DriverState,
}

impl Io {
    /// Makes this a new request, with no segments and a length of 0.
    #[inline]
    pub fn reset(&mut self, op: Op, offset: u64, fua: bool) {
        debug_assert_eq!(self.state.stage, Stage::Idle, "a request's slot was reused before its completion");
        debug_assert!(
            self.state.split.as_ref().is_none_or(|split| !split.active),
            "a request's slot was reused between its parts"
        );
        let request = &mut self.request;
        request.op = op;
        request.offset = offset;
        request.len = 0;
        request.fua = fua;
        request.found = None;
        request.iov.clear();
    }

    /// Answers [`Op::Seek`] that the whole range is data, and returns the status 0.
    pub(super) fn all_data(&mut self) -> i32 {
        self.request.found = Some(Found { extent: Extent::Data, len: self.request.len });
        0
    }

    /// Adds a segment and its length.
    ///
    /// # Safety
    /// The contract of [`IoVecs::push`].
    #[inline]
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        // SAFETY: the caller keeps the segment mapped, and this request in its place, until the
        // request is done.
        unsafe { self.request.iov.push(ptr, len) };
        self.request.len += len as u64;
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if self.state.stage != Stage::Idle {
            // The kernel may still write to the buffer, so it is leaked.
            std::mem::forget(self.state.bounce.take());
            debug_assert!(std::thread::panicking(), "a request was dropped before its completion");
        }
    }
}
