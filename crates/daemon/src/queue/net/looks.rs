//! When a tap's queue is read, and how many frames at once.

use std::os::fd::RawFd;

use vshunt_engine::PollState;
use vshunt_engine::{Token, Uring};

use super::BATCH;

/// Reads of the first batch: it grows while batches fill.
const BATCH_MIN: u32 = 4;

/// See the module. Belongs to the worker that has the queue.
pub(super) struct Looks {
    /// Reads of the next batch.
    pub(super) batch: u32,
    /// Frames may be there.
    pub(super) ready: bool,
    /// The poll for more of them.
    listen: PollState,
    /// The queue leaves its worker: nothing is begun any more.
    leaving: bool,
}

impl Looks {
    pub(super) fn new() -> Self {
        Self { batch: BATCH_MIN, ready: true, listen: PollState::Off, leaving: false }
    }

    pub(super) fn arm(&mut self) {
        (self.leaving, self.ready) = (false, true);
    }

    pub(super) fn disarm(&mut self, uring: &mut Uring, poll: Token) {
        self.leaving = true;
        self.listen.end(uring, poll);
    }

    pub(super) fn at_rest(&self) -> bool {
        self.listen == PollState::Off
    }

    /// A batch of `asked` reads found so many frames.
    pub(super) fn found(&mut self, uring: &mut Uring, (fd, poll): (RawFd, Token), asked: u32, found: u32) {
        if found == asked {
            self.batch = (2 * self.batch).min(BATCH);
            return;
        }
        self.batch = found.max(BATCH_MIN);
        self.ready = false;
        if !self.leaving {
            self.listen.begin_once(uring, fd, poll);
        }
    }

    /// The tap may have frames again.
    pub(super) fn polled(&mut self, uring: &mut Uring, (fd, poll): (RawFd, Token), result: i32) {
        let listen = self.listen.ended();
        if result >= 0 {
            self.ready = true;
        } else if listen.restarts() {
            self.listen.begin_once(uring, fd, poll);
        }
    }
}
