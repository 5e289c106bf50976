//! Long requests: the worker carries out one part in each iteration.
//!
//! The worker's thread itself moves the bytes of many requests, and its other queues wait for that
//! time:
//!
//! | disk | what the thread does |
//! | --- | --- |
//! | `ram`, files in memory | it copies |
//! | a file in the page cache | it copies, in the io_uring_enter that starts the operation |
//! | `qcow2` | it writes zeroes to the guest's memory where a read finds no cluster |
//! | a file or device with O_DIRECT, `nbd`, `null` | nothing: their requests are not split |
//!
//! So a long request is done in parts, and the other queues are served after each part. Each part
//! is a whole request of the backend, which does not know about the others. One long request of
//! each queue is in flight at a time. The others wait in the order in which they came, so that a
//! queue with many of them gets no larger share.
//!
//! Invariant: a request between two of its parts has a completion on the io_uring, or waits for a
//! request that has one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use vshunt_engine::{Token, Uring};

use super::DiskHandle;
use crate::backend::Backend;
use crate::io::SplitState;
use crate::{Io, Op, Step};

/// Bytes that are copied at once, or one cluster of the image if that is longer: a new cluster is
/// cheaper to write whole than in parts. In each iteration a worker copies that much for each queue
/// with long requests. The copy takes about 0.1 ms (measured with `ram`). The longest requests that
/// Linux guests usually send are not much longer.
const COPY_BYTES: u64 = 1 << 20;
/// Bytes that are cleared at once. To free pages of 4 KiB takes as long as to copy them (measured,
/// madvise).
const CLEAR_BYTES: u64 = 1 << 20;

/// The long requests of one handle.
pub(super) struct SplitRequests {
    /// Longest part of a read or write, bytes. None: they are not split.
    copy_bytes: Option<u64>,
    /// Whether long discards and WriteZeroes are split: only on a disk in memory.
    clears: bool,
    /// Whether a long request is in flight.
    busy: Cell<bool>,
    /// The requests that wait for it, oldest first.
    waiting: RefCell<VecDeque<Token>>,
}

impl SplitRequests {
    pub(super) fn new(backend: &Backend) -> Self {
        let copy_bytes = match backend {
            Backend::Ram(_) => Some(COPY_BYTES),
            Backend::Qcow2(image) => Some(COPY_BYTES.max(image.cluster_bytes())),
            Backend::Raw(raw) => (!raw.direct_in_use()).then_some(COPY_BYTES),
            // It defers parts by itself, which are requests of the source and the fleecing file.
            Backend::Frozen => None,
            Backend::Null | Backend::Nbd(_) | Backend::Gone => None,
        };
        Self {
            copy_bytes,
            clears: matches!(backend, Backend::Ram(_)),
            busy: Cell::new(false),
            waiting: RefCell::default(),
        }
    }

    /// Returns the longest part of a request, bytes, or nothing if the request is not split.
    #[inline]
    pub(super) fn part_bytes(&self, io: &Io) -> Option<u64> {
        let copy_bytes = self.copy_bytes.filter(|bytes| io.request.len > *bytes)?;
        let part_bytes = match io.request.op {
            Op::Read | Op::Write => copy_bytes,
            Op::Discard | Op::WriteZeroes { .. } if self.clears => CLEAR_BYTES,
            _ => return None,
        };
        // The backend refuses ranges outside of the disk.
        let fits = io.request.offset.checked_add(io.request.len).is_some();
        (fits && io.request.len > part_bytes).then_some(part_bytes)
    }

    /// Returns whether a request is done in parts.
    #[inline]
    pub(super) fn has(&self, io: &Io) -> bool {
        self.copy_bytes.is_some() && io.state.split.as_ref().is_some_and(|split| split.active)
    }

    /// Returns whether no long request is in flight.
    pub(super) fn is_idle(&self) -> bool {
        !self.busy.get()
    }
}

impl DiskHandle {
    /// Starts a request that is done in parts: its first part, unless another long request is under
    /// way.
    #[cold]
    pub(super) fn start_in_parts(
        &self,
        part_bytes: u64,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Step {
        let (offset, end) = (io.request.offset, io.request.offset + io.request.len);
        let split = io.state.split.get_or_insert_default();
        **split = SplitState { active: true, offset, next: offset, end, part_bytes, ..SplitState::default() };
        if self.split.busy.replace(true) {
            self.split.waiting.borrow_mut().push_back(token);
            return Step::Wait;
        }
        self.next_part(uring, io, token)
    }

    /// Continues a request that is done in parts: its current part, or the next one.
    #[cold]
    pub(super) fn resume_in_parts(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        if io.state.split.as_ref().is_some_and(|split| split.started) {
            let step = self.resume_whole(uring, io, token, res);
            return self.after_part(uring, io, token, step);
        }
        self.next_part(uring, io, token)
    }

    /// Starts the next part.
    fn next_part(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let split = io.state.split.as_mut().expect("the request is active");
        split.started = true;
        let len = (split.part_bytes - split.next % split.part_bytes).min(split.end - split.next);
        (io.request.offset, io.request.len) = (split.next, len);
        if let Some(hidden) = split.hidden.take() {
            io.request.iov.show(hidden);
        }
        if io.request.iov.left_bytes() > len {
            split.hidden = Some(io.request.iov.hide_after(len));
        }
        let step = self.start_whole(uring, io, token);
        self.after_part(uring, io, token, step)
    }

    /// Handles the result of a step of a part.
    fn after_part(&self, uring: &mut Uring, io: &mut Io, token: Token, step: Step) -> Step {
        let Step::Done(res) = step else { return step };
        let split = io.state.split.as_mut().expect("the request is active");
        split.started = false;
        split.next += io.request.len;
        if res >= 0 && split.next < split.end {
            uring.defer(token);
            return Step::Wait;
        }
        split.active = false;
        split.hidden = None;
        (io.request.offset, io.request.len) = (split.offset, split.end - split.offset);
        match self.split.waiting.borrow_mut().pop_front() {
            Some(next) => uring.defer(next),
            None => self.split.busy.set(false),
        }
        step
    }
}

#[cfg(test)]
mod tests;
