//! Decides when a tap's queue is read, and how many frames at once: until a batch is not full, then
//! after a poll.

use std::os::fd::RawFd;

use vshunt_engine::{PollState, Token, Uring};

use crate::frames::BATCH;

/// Reads of the first batch. A batch grows while batches are full.
const BATCH_MIN: u32 = 4;

/// See the module. Belongs to the worker that has the queue.
pub(crate) struct RxPoll {
    /// Reads of the next batch.
    pub(crate) batch: u32,
    /// Whether the tap may have frames.
    pub(crate) ready: bool,
    /// The poll for more frames.
    poll_state: PollState,
    /// Whether the queue is about to leave its worker. Then no poll is started any more.
    leaving: bool,
}

impl RxPoll {
    pub(crate) fn new() -> Self {
        Self { batch: BATCH_MIN, ready: true, poll_state: PollState::Off, leaving: false }
    }

    pub(crate) fn arm(&mut self) {
        (self.leaving, self.ready) = (false, true);
    }

    pub(crate) fn disarm(&mut self, uring: &mut Uring, poll: Token) {
        self.leaving = true;
        self.poll_state.end(uring, poll);
    }

    pub(crate) fn at_rest(&self) -> bool {
        self.poll_state == PollState::Off
    }

    /// Records that a batch of `requested` reads found `found` frames.
    pub(crate) fn found(
        &mut self,
        uring: &mut Uring,
        (fd, poll): (RawFd, Token),
        requested: u32,
        found: u32,
    ) {
        if found == requested {
            self.batch = (2 * self.batch).min(BATCH);
            return;
        }
        self.batch = found.max(BATCH_MIN);
        self.wait(uring, (fd, poll));
    }

    /// Waits for the next frame with a poll, even if the last batch was full.
    pub(crate) fn wait(&mut self, uring: &mut Uring, (fd, poll): (RawFd, Token)) {
        self.ready = false;
        if !self.leaving {
            self.poll_state.start_once(uring, fd, poll);
        }
    }

    /// Handles the completion of the poll.
    pub(crate) fn polled(&mut self, uring: &mut Uring, (fd, poll): (RawFd, Token), result: i32) {
        let poll_state = self.poll_state.ended();
        if result >= 0 {
            self.ready = true;
        } else if poll_state.restarts() {
            self.poll_state.start_once(uring, fd, poll);
        }
    }
}
