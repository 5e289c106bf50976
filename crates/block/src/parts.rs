//! Long requests: the worker does a part a turn.
//!
//! The worker's thread itself moves the bytes of many requests, and its other queues wait meanwhile:
//!
//! | disk | what the thread does |
//! | --- | --- |
//! | `ram`, files in memory | it copies |
//! | a file in the page cache | it copies, in the io_uring_enter that begins the operation |
//! | `qcow2` | it writes zeroes to the guest's memory, where a read finds no cluster |
//! | a file or device that is open with O_DIRECT, `null` | nothing: these have no parts |
//!
//! So a long request is done in parts. After each part the other queues have their turn. Each part is a whole request
//! of the backend, which knows nothing of the others. Of one queue's long requests one is under way at a time. The
//! others wait in the order in which they came, so that a queue with many of them gets no larger share.
//!
//! Invariant: a request between two of its parts has a completion on the ring, or waits for a request that has one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use vshunt_engine::{Token, Uring};

use super::io::Hidden;
use super::{DiskHandle, Io, Kind, Op, Step};

/// Bytes that are copied at once, or a cluster of the image if that is longer: to write a part of a new cluster costs more than
/// to write it whole. A turn of the worker copies as much of each queue that has long requests. To copy so much takes about
/// 0.1 ms (measured, with `ram`), and no request that Linux guests usually send is longer by much.
const COPY_BYTES: u64 = 1 << 20;
/// Bytes that are cleared at once. To free pages of 4 KiB takes as long as to copy them (measured, madvise).
const CLEAR_BYTES: u64 = 1 << 20;

/// How far a long request is; in its [`Io`].
#[derive(Default)]
pub(super) struct Parts {
    /// Set from the request's start to its end.
    active: bool,
    /// The backend has the present part.
    begun: bool,
    /// Where on the disk the request begins, bytes.
    offset: u64,
    /// Where on the disk the next part begins, bytes.
    next: u64,
    /// Where on the disk the request ends, bytes.
    end: u64,
    /// Bytes of a part at most. Parts end at multiples of it.
    part_bytes: u64,
    /// The segments after the present part.
    hidden: Option<Hidden>,
}

impl Parts {
    /// Whether the request is not over.
    pub(super) fn is_active(&self) -> bool {
        self.active
    }
}

/// The long requests of one handle.
pub(super) struct LongRequests {
    /// Bytes of the parts of the disk's reads and writes; none: they are done as a whole.
    copy_bytes: Option<u64>,
    /// Whether its long discards and zeroes are: of a disk in memory.
    clears: bool,
    /// Whether one is under way.
    busy: Cell<bool>,
    /// Those that wait for it, oldest first.
    waiting: RefCell<VecDeque<Token>>,
}

impl LongRequests {
    pub(super) fn new(kind: &Kind) -> Self {
        let copy_bytes = match kind {
            Kind::Ram(_) => Some(COPY_BYTES),
            Kind::Qcow2(image) => Some(COPY_BYTES.max(image.cluster_bytes())),
            Kind::Raw(raw) => (!raw.direct_in_use()).then_some(COPY_BYTES),
            Kind::Null | Kind::Gone => None,
        };
        Self {
            copy_bytes,
            clears: matches!(kind, Kind::Ram(_)),
            busy: Cell::new(false),
            waiting: RefCell::default(),
        }
    }

    /// The length of the parts in which a request is to be done, bytes. `None`: it is done as a whole.
    #[inline]
    pub(super) fn part_bytes(&self, io: &Io) -> Option<u64> {
        let copy_bytes = self.copy_bytes.filter(|bytes| io.len > *bytes)?;
        let part_bytes = match io.op {
            Op::Read | Op::Write => copy_bytes,
            Op::Discard | Op::WriteZeroes { .. } if self.clears => CLEAR_BYTES,
            _ => return None,
        };
        // The backend refuses what lies outside of the disk.
        let fits = io.offset.checked_add(io.len).is_some();
        (fits && io.len > part_bytes).then_some(part_bytes)
    }

    /// Whether that request is one of them.
    #[inline]
    pub(super) fn has(&self, io: &Io) -> bool {
        self.copy_bytes.is_some() && io.parts.as_ref().is_some_and(|parts| parts.active)
    }

    /// Whether none is under way.
    pub(super) fn is_idle(&self) -> bool {
        !self.busy.get()
    }
}

impl DiskHandle {
    /// Begins a request that is done in parts: its first part, unless another request is under way.
    #[cold]
    pub(super) fn start_in_parts(
        &self,
        part_bytes: u64,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Step {
        let (offset, end) = (io.offset, io.offset + io.len);
        let parts = io.parts.get_or_insert_default();
        **parts = Parts { active: true, offset, next: offset, end, part_bytes, ..Parts::default() };
        if self.long.busy.replace(true) {
            self.long.waiting.borrow_mut().push_back(token);
            return Step::Wait;
        }
        self.next_part(uring, io, token)
    }

    /// Goes on with such a request: with its part, or with the next one.
    #[cold]
    pub(super) fn resume_in_parts(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        if io.parts.as_ref().is_some_and(|parts| parts.begun) {
            let step = self.resume_whole(uring, io, token, res);
            return self.after_part(uring, io, token, step);
        }
        self.next_part(uring, io, token)
    }

    fn next_part(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let parts = io.parts.as_mut().expect("the request is active");
        parts.begun = true;
        let len = (parts.part_bytes - parts.next % parts.part_bytes).min(parts.end - parts.next);
        (io.offset, io.len) = (parts.next, len);
        if let Some(hidden) = parts.hidden.take() {
            io.iov.show(hidden);
        }
        if io.iov.left_bytes() > len {
            parts.hidden = Some(io.iov.hide_after(len));
        }
        let step = self.start_whole(uring, io, token);
        self.after_part(uring, io, token, step)
    }

    /// After a step of a part.
    fn after_part(&self, uring: &mut Uring, io: &mut Io, token: Token, step: Step) -> Step {
        let Step::Done(res) = step else { return step };
        let parts = io.parts.as_mut().expect("the request is active");
        parts.begun = false;
        parts.next += io.len;
        if res >= 0 && parts.next < parts.end {
            uring.defer(token);
            return Step::Wait;
        }
        parts.active = false;
        parts.hidden = None;
        (io.offset, io.len) = (parts.offset, parts.end - parts.offset);
        match self.long.waiting.borrow_mut().pop_front() {
            Some(next) => uring.defer(next),
            None => self.long.busy.set(false),
        }
        step
    }
}

#[cfg(test)]
mod tests;
