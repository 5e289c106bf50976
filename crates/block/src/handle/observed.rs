//! Writes that dirty bitmaps record, that first read for a backup what they replace, or that wait
//! for their copy by a mirror.

use std::sync::atomic::{Ordering::Release, fence};

use qcow2::Waker;
use vshunt_engine::{Token, Uring};

use super::DiskHandle;
use crate::bounce::is_zero;
use crate::copy_before_write::{CopyBeforeWrite, Next};
use crate::write_observers::WriteObservers;
use crate::{Io, Op, Step};

/// Why the boxed state of a write under a backup is there.
const STARTED: &str = "the write under the backup has started";

impl DiskHandle {
    /// Starts a write that has observers.
    #[cold]
    pub(super) fn start_observed(
        &self,
        observers: &WriteObservers,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Step {
        let range = io.request.offset..io.request.offset + io.request.len;
        debug_assert!(!io.state.awaits_copy, "the request before it has ended");
        observers.record(range.clone());
        match &observers.copy_before_write {
            Some(copy) if copy.concerns(range) => {
                io.state.copy_before_write.get_or_insert_default().active = true;
                self.read_old_data(copy, uring, io, token)
            }
            _ => {
                let step = self.begin(uring, io, token);
                self.follow(observers, uring, io, token, step)
            }
        }
    }

    /// Continues a write that waits for the disk, or for its copy by a mirror.
    #[cold]
    pub(super) fn resume_followed(
        &self,
        observers: &WriteObservers,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        if std::mem::take(&mut io.state.awaits_copy) {
            return Step::Done(0);
        }
        let step = self.advance(uring, io, token, res);
        self.follow(observers, uring, io, token, step)
    }

    /// Makes a write that the disk has completed wait for its copy.
    fn follow(
        &self,
        observers: &WriteObservers,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        step: Step,
    ) -> Step {
        let (Some(copy), Step::Done(res)) = (&observers.copy_after_write, step) else { return step };
        let range = io.request.offset..io.request.offset + io.request.len;
        if res < 0 {
            copy.failed(range);
            return step;
        }
        if !copy.wrote(range, Waker { who: uring.id(), token: token.pack() }) {
            return step;
        }
        io.state.awaits_copy = true;
        uring.expect_wake();
        Step::Wait
    }

    /// Continues a write that reads what it replaces, or waits for another write that does.
    #[cold]
    pub(super) fn resume_observed(
        &self,
        observers: &WriteObservers,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        let copy = observers.copy_before_write.as_ref().expect("observers of a handle do not change");
        let mut state = io.state.copy_before_write.take().expect(STARTED);
        // Without a buffer the completion is a wake-up.
        let step = match &self.fleece {
            _ if state.old.is_none() => None,
            Some(fleece) if state.stores => Some(fleece.resume(uring, &mut state.inner, token, res)),
            _ => Some(self.advance(uring, &mut state.inner, token, res)),
        };
        let stores = state.stores;
        io.state.copy_before_write = Some(state);
        let step = match step {
            Some(Step::Done(res)) if stores => {
                self.has_stored(copy, uring, io, res);
                None
            }
            Some(Step::Done(res)) => Some(self.has_read(copy, uring, io, token, res)),
            step => step,
        };
        match step {
            Some(Step::Wait) => Step::Wait,
            _ => self.read_old_data(copy, uring, io, token),
        }
    }

    /// Reads what a write replaces, then starts the write.
    fn read_old_data(&self, copy: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let waker = Waker { who: uring.id(), token: token.pack() };
        loop {
            let range = io.request.offset..io.request.offset + io.request.len;
            match copy.next(range, waker) {
                Next::Write => {
                    // The write comes after the marks of its blocks, which other threads may have
                    // made: see `frozen::see`.
                    fence(Release);
                    io.state.copy_before_write.as_mut().expect(STARTED).active = false;
                    return self.begin(uring, io, token);
                }
                Next::Wait => {
                    uring.expect_wake();
                    return Step::Wait;
                }
                Next::Read(mut old) => {
                    let mut state = io.state.copy_before_write.take().expect(STARTED);
                    state.inner.reset(Op::Read, old.offset(), false);
                    let bytes = old.contents();
                    // SAFETY: `old` owns the buffer. It stays in the boxed state, beside `inner`,
                    // until the read is complete, and nothing else refers to it.
                    unsafe { state.inner.push(bytes.as_mut_ptr(), bytes.len()) };
                    state.old = Some(old);
                    let step = self.begin(uring, &mut state.inner, token);
                    io.state.copy_before_write = Some(state);
                    match step {
                        Step::Wait => return Step::Wait,
                        Step::Done(res) => match self.has_read(copy, uring, io, token, res) {
                            Step::Wait => return Step::Wait,
                            Step::Done(_) => {}
                        },
                    }
                }
            }
        }
    }

    /// Hands the old data over after its read completed with `res`, or begins to store it in the
    /// fleecing file.
    fn has_read(
        &self,
        copy: &CopyBeforeWrite,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        let state = io.state.copy_before_write.as_mut().expect(STARTED);
        state.inner.request.iov.clear();
        let mut old = state.old.take().expect("the read has a buffer");
        let wake = &mut |w: Waker| uring.wake(w.who, w.token);
        match (res, &self.fleece) {
            (errno @ ..0, _) => copy.read_failed(old, errno, wake),
            (0.., Some(fleece)) if copy.has_ended().is_none() => {
                if is_zero(old.contents()) {
                    // The file is new, so it reads as zeroes there.
                    copy.stored(old, wake);
                    return Step::Done(0);
                }
                let mut state = io.state.copy_before_write.take().expect(STARTED);
                state.inner.reset(Op::Write, old.offset(), false);
                let bytes = old.contents();
                // SAFETY: `old` owns the buffer. It stays in the boxed state, beside `inner`, until
                // the write is complete, and nothing else refers to it.
                unsafe { state.inner.push(bytes.as_mut_ptr(), bytes.len()) };
                (state.old, state.stores) = (Some(old), true);
                let step = fleece.start(uring, &mut state.inner, token);
                io.state.copy_before_write = Some(state);
                match step {
                    Step::Wait => return Step::Wait,
                    Step::Done(res) => self.has_stored(copy, uring, io, res),
                }
            }
            (0.., _) => copy.read(old, wake),
        }
        Step::Done(0)
    }

    /// Continues after old data was written to the fleecing file, with the result `res`.
    fn has_stored(&self, copy: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, res: i32) {
        let state = io.state.copy_before_write.as_mut().expect(STARTED);
        state.stores = false;
        let old = state.old.take().expect("the write has a buffer");
        let wake = &mut |w: Waker| uring.wake(w.who, w.token);
        match res {
            0.. => copy.stored(old, wake),
            errno => copy.store_failed(old, errno, wake),
        }
    }
}
