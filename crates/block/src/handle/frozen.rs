//! Reads of a frozen disk: from its source and from the fleecing file.
//!
//! A request is done in parts, one after the other. The bytes of a part go straight to the segments
//! of the request. A part from the source may have bytes that were written meanwhile; they are
//! replaced from the fleecing file before the request is complete.

use std::sync::Arc;

use qcow2::{Extent, Found};
use vshunt_engine::{Token, Uring};

use super::DiskHandle;
use crate::copy_before_write::CopyBeforeWrite;
use crate::disk::Frozen;
use crate::frozen::{Seen, see, source_end};
use crate::io::{FrozenState, Request};
use crate::{Io, Op, Step};

/// Bytes of parts that complete at once, before the worker looks at its other queues: a copy of
/// them takes about 0.1 ms, as in `split`.
const AT_ONCE_BYTES: u64 = 1 << 20;
/// What a part costs at least, in bytes that are copied meanwhile.
const PART_BYTES: u64 = 16 << 10;

/// Why the boxed state of a request is there.
const STARTED: &str = "the request of the frozen disk has started";

/// A frozen disk, as one queue uses it.
pub(crate) struct FrozenHandle {
    source: DiskHandle,
    fleece: DiskHandle,
    work: Arc<CopyBeforeWrite>,
}

impl FrozenHandle {
    pub(super) fn new(frozen: &Frozen, uring: &mut Uring) -> Self {
        Self {
            source: frozen.source.attach_reader(uring),
            fleece: frozen.fleece.attach_reader(uring),
            work: frozen.work.clone(),
        }
    }

    pub(super) fn detach(self, uring: &mut Uring) {
        self.source.detach(uring);
        self.fleece.detach(uring);
    }

    /// Starts a request.
    pub(super) fn start(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        match io.request.op {
            Op::Read | Op::Seek { .. } => {}
            Op::Flush => return Step::Done(0),
            _ => return Step::Done(-libc::EROFS),
        }
        if self.work.has_ended().is_some() || io.request.offset.checked_add(io.request.len).is_none() {
            return Step::Done(-libc::EIO);
        }
        let state = io.state.frozen.get_or_insert_default();
        (state.at, state.from_source) = (io.request.offset, io.request.offset);
        self.next(uring, io, token)
    }

    /// Continues a request after an operation of its current part.
    pub(super) fn resume(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let state = io.state.frozen.as_mut().expect(STARTED);
        if std::mem::take(&mut state.deferred) {
            return self.next(uring, io, token);
        }
        let handle = if state.in_fleece { &self.fleece } else { &self.source };
        let Step::Done(res) = handle.resume(uring, &mut state.inner, token, res) else { return Step::Wait };
        match self.stepped(&mut io.request, state, res) {
            Some(res) => Step::Done(res),
            None => self.next(uring, io, token),
        }
    }

    /// Starts the next part. Parts that complete at once are followed by others, up to
    /// [`AT_ONCE_BYTES`].
    fn next(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let state = io.state.frozen.as_mut().expect(STARTED);
        let request = &mut io.request;
        let mut at_once = 0;
        while self.choose(request, state) {
            if at_once >= AT_ONCE_BYTES {
                state.deferred = true;
                uring.defer(token);
                return Step::Wait;
            }
            at_once += (state.part.end - state.part.start).max(PART_BYTES);
            let handle = if state.in_fleece { &self.fleece } else { &self.source };
            state.inner.reset(request.op, state.part.start, false);
            if request.op == Op::Read {
                let range = state.part.start - request.offset..state.part.end - request.offset;
                request.iov.for_range(range, |ptr, len| {
                    // SAFETY: it is a piece of a segment of this request, which the queue keeps
                    // mapped until the request is done. `inner` is boxed, and done before that.
                    unsafe { state.inner.push(ptr, len) };
                });
            } else {
                state.inner.request.len = state.part.end - state.part.start;
            }
            let Step::Done(res) = handle.start(uring, &mut state.inner, token) else { return Step::Wait };
            if let Some(res) = self.stepped(request, state, res) {
                return Step::Done(res);
            }
        }
        Step::Done(0)
    }

    /// Chooses the next part. Returns false if the request is complete.
    fn choose(&self, request: &mut Request, state: &mut FrozenState) -> bool {
        let end = request.offset + request.len;
        if state.at < state.from_source {
            // The source was read. What is in the file by now replaces it.
            match self.work.kept_run(state.at..state.from_source) {
                Some(run) => {
                    (state.part, state.in_fleece) = (run, true);
                    return true;
                }
                None => state.at = state.from_source,
            }
        }
        if state.at >= end {
            return false;
        }
        let run = self.work.kept_run(state.at..end).filter(|run| run.start == state.at);
        if let (Some(run), Op::Seek { .. }) = (&run, request.op) {
            request.found = Some(Found { extent: Extent::Data, len: run.end - run.start });
            return false;
        }
        state.in_fleece = run.is_some();
        state.part = match (run, request.op) {
            (Some(run), _) => run,
            (None, Op::Read) => state.at..source_end(&self.work, state.at..end),
            (None, _) => state.at..end,
        };
        true
    }

    /// Handles the result of a part. Returns the result of the request if it is complete.
    fn stepped(&self, request: &mut Request, state: &mut FrozenState, res: i32) -> Option<i32> {
        if res < 0 {
            return Some(res);
        }
        if state.in_fleece {
            state.at = state.part.end;
            return None;
        }
        if let Seen::Lost = see(&self.work) {
            return Some(-libc::EIO);
        }
        if let Op::Seek { .. } = request.op {
            return Some(self.found(request, state));
        }
        state.from_source = state.part.end;
        None
    }

    /// Answers a question with what the source has answered: up to the first block that is in the
    /// fleecing file by now.
    fn found(&self, request: &mut Request, state: &FrozenState) -> i32 {
        let all = Found { extent: Extent::Data, len: request.len };
        let mut found = state.inner.request.found.filter(|found| found.len > 0).unwrap_or(all);
        found.len = found.len.min(request.len);
        let start = request.offset;
        match self.work.kept_run(start..start + found.len) {
            Some(run) if run.start == start => {
                found = Found { extent: Extent::Data, len: run.end - run.start };
            }
            Some(run) => found.len = run.start - start,
            None => {}
        }
        request.found = Some(found);
        0
    }
}
