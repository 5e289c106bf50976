//! Writes that dirty bitmaps record, or that first read for a backup what they replace.

use qcow2::Waker;
use vshunt_engine::{Token, Uring};

use super::DiskHandle;
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
        observers.record(range.clone());
        match &observers.copy_before_write {
            Some(copy) if copy.concerns(range) => {
                io.state.copy_before_write.get_or_insert_default().active = true;
                self.read_old_data(copy, uring, io, token)
            }
            _ => self.begin(uring, io, token),
        }
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
        let step = state.old.is_some().then(|| self.advance(uring, &mut state.inner, token, res));
        io.state.copy_before_write = Some(state);
        match step {
            Some(Step::Wait) => return Step::Wait,
            Some(Step::Done(res)) => self.has_read(copy, uring, io, res),
            None => {}
        }
        self.read_old_data(copy, uring, io, token)
    }

    /// Reads what a write replaces, then starts the write.
    fn read_old_data(&self, copy: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let waker = Waker { who: uring.id(), token: token.pack() };
        loop {
            let range = io.request.offset..io.request.offset + io.request.len;
            match copy.next(range, waker) {
                Next::Write => {
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
                        Step::Done(res) => self.has_read(copy, uring, io, res),
                    }
                }
            }
        }
    }

    /// Hands the old data over after its read completed with `res`.
    fn has_read(&self, copy: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, res: i32) {
        let state = io.state.copy_before_write.as_mut().expect(STARTED);
        state.inner.request.iov.clear();
        let old = state.old.take().expect("the read has a buffer");
        let mut wake = |w: Waker| uring.wake(w.who, w.token);
        match res {
            0.. => copy.read(old, &mut wake),
            errno => copy.read_failed(old, errno, &mut wake),
        }
    }
}
