//! What a worker asks of a queue, and what it counts about it.

use std::any::Any;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::uring::{Token, Uring};

/// One source of requests. `Send`, not `Sync`: its state moves with it from worker to worker.
///
/// All methods run on the worker's thread and return at once. `place` is this queue's [`Token`] on that
/// worker; operations carry it with the queue's own slot and op.
pub trait Queue: Any + Send {
    /// Attach, step 4: begins to listen for work. The worker then looks at the queue once in any case.
    fn arm(&mut self, uring: &mut Uring, place: Token);

    /// Takes up to `budget` requests and starts them. Returns how many were taken.
    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32;

    /// An operation of this queue is over, or has news and will have `more`. Returns the requests it completed.
    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32;

    /// Makes completions visible and notifies the other side if it asked; once a batch. Whether it was notified since
    /// the last call: then it waited for us.
    fn publish(&mut self) -> bool;

    /// A cheap look whether there is something to take.
    fn has_work(&self) -> bool;

    /// Asks the other side not to kick: this queue will be looked at without.
    fn wake(&mut self);

    /// The same, more thoroughly and less often: may cost a system call.
    fn look(&self) -> bool {
        self.has_work()
    }

    /// Asks the other side to kick once `after` requests (1 or more) are there; where that cannot be said, at
    /// the first. True: so many are there already, so do not sleep.
    fn sleep(&mut self, uring: &mut Uring, place: Token, after: u32) -> bool;

    /// Attach, step 2: takes nothing more, ends its polls and reads. In-flight requests go on.
    fn disarm(&mut self, uring: &mut Uring, place: Token);

    /// Whether nothing of this queue is under way on the ring any more.
    fn at_rest(&self) -> bool;

    /// Leaves the ring: gives back registered files. Called at rest, right before the queue moves.
    fn leave(&mut self, uring: &mut Uring);

    /// Operations of this queue that may occupy a thread of io-wq each at the same time: those on files that may wait.
    /// Does not change while the queue is on a worker.
    fn waits_max(&self) -> u32 {
        0
    }

    /// Called right after [`leave`](Self::leave): what is to take the completions of operations that stay on this ring
    /// after the queue has left it. `None`: no operation stays. A queue may leave only operations that name no request and
    /// whose memory outlives them.
    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        None
    }

    /// What the code that made the queue can do with it besides the methods of this trait, for use in
    /// [`QueueSet::run_on`](super::QueueSet::run_on) and on queues that are on no worker. The type of the value says what it
    /// is; workers ignore it.
    fn extension(&self) -> &'static dyn Any {
        &()
    }
}

/// Takes completions of operations that a queue left on a worker's ring, and passes them on to the queue.
///
/// Stays on that worker's thread. The worker drops it when no completion is to come any more.
pub trait Forwarder: Send {
    /// One of the operations completed with `result`. Returns at once.
    fn forward(&mut self, token: Token, result: i32);

    /// How many completions are still to come.
    fn left(&self) -> u32;
}

/// Whether a queue is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Its user does not use it (now).
    Stopped = 0,
    /// Attached to a worker and served.
    Running = 1,
    /// Its user broke the protocol; served again after it is stopped and started.
    Broken = 2,
}

/// Counters of one queue. Written by the owning worker alone (plain adds), read by anyone.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// A [`State`].
    state: AtomicU8,
    /// Size of the ring, 0 before its first start; set by whoever starts it.
    pub size: AtomicU16,
    /// Requests taken and not completed.
    pub in_flight: AtomicU32,
    /// Requests completed.
    pub requests: AtomicU64,
    /// Requests completed with an error.
    pub errors: AtomicU64,
    /// Bytes that went to the guest.
    pub read_bytes: AtomicU64,
    /// Bytes that came from the guest.
    pub write_bytes: AtomicU64,
    /// Kicks seen.
    pub kicks: AtomicU64,
    /// Notifications sent.
    pub notifications: AtomicU64,
}

impl QueueStats {
    /// Adds to a counter that only the calling thread writes: no locked instruction.
    #[inline]
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Whether the queue is in use.
    pub fn state(&self) -> State {
        match self.state.load(Relaxed) {
            0 => State::Stopped,
            1 => State::Running,
            _ => State::Broken,
        }
    }

    /// The one setter of the state.
    pub fn set_state(&self, to: State) {
        tracing::trace!(from = ?self.state(), ?to, "queue state");
        self.state.store(to as u8, Relaxed);
    }
}
