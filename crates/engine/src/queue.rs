//! The methods that a worker calls on a queue, and the counters of a queue.

use std::any::Any;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::latency::{Latency, RequestKind};
use super::uring::{Token, Uring};

/// One source of requests. It is `Send` and not `Sync`: its state moves with it from worker to
/// worker.
///
/// All methods run on the worker's thread and return at once. `base` is this queue's [`Token`] on
/// that worker. Operations carry it with a slot and an op that the queue chooses ([`Token::with`]).
pub trait Queue: Any + Send {
    /// Attach, step 4: starts to listen for work. The worker then looks at the queue once in any
    /// case.
    fn arm(&mut self, uring: &mut Uring, base: Token);

    /// Takes up to `budget` requests and starts them. Returns how many it took.
    fn take(&mut self, uring: &mut Uring, base: Token, budget: u32) -> u32;

    /// Handles a completion of one of this queue's operations, which has more completions if
    /// `more`. Returns how many requests it completed.
    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32;

    /// Makes completions visible, and notifies the peer if it asked for that. Called once for each
    /// batch. Returns whether the peer was notified since the last call, which means that it waited
    /// for the worker.
    fn publish(&mut self) -> bool;

    /// Returns whether there is something to take. Cheap.
    fn has_work(&self) -> bool;

    /// Asks the peer not to kick, because the worker looks at this queue without that.
    fn wake(&mut self);

    /// Returns whether there is something to take, like [`has_work`](Self::has_work), but more
    /// thoroughly. It may cost a system call, and is called less often.
    fn look(&self) -> bool {
        self.has_work()
    }

    /// Asks the peer to kick once `after` requests (1 or more) are there, or at the first one if
    /// the protocol has no such number. Returns true if so many are there already, in which case
    /// the worker does not sleep.
    fn sleep(&mut self, uring: &mut Uring, base: Token, after: u32) -> bool;

    /// Attach, step 2: takes nothing more, and ends its polls and reads. Requests in flight
    /// continue.
    fn disarm(&mut self, uring: &mut Uring, base: Token);

    /// Returns whether this queue has nothing left in flight on the io_uring.
    fn at_rest(&self) -> bool;

    /// Unregisters the queue's files from the io_uring. Called at rest, right before the queue
    /// moves.
    fn leave(&mut self, uring: &mut Uring);

    /// Returns how many operations of this queue may each occupy a thread of io-wq at the same
    /// time: those on files that may wait. The number does not change while the queue is on a
    /// worker.
    fn waits_max(&self) -> u32 {
        0
    }

    /// Returns the receiver of the completions of operations that stay on this io_uring after the
    /// queue has left it. `None`: no operation stays. Called right after [`leave`](Self::leave). A
    /// queue may leave only operations that belong to no request and whose memory outlives them.
    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        None
    }

    /// Returns a value that gives the code that made the queue access to more than the methods of
    /// this trait, in [`QueueSet::run_on`](super::QueueSet::run_on) and on queues that are on no
    /// worker. The type of the value identifies it. Workers ignore it.
    fn extension(&self) -> &'static dyn Any {
        &()
    }
}

/// Receives the completions of operations that a queue left on a worker's io_uring, and passes them
/// to the queue.
///
/// It stays on that worker's thread. The worker drops it after the last completion.
pub trait Forwarder: Send {
    /// Handles the completion of one of the operations, with `result`. Returns at once.
    fn forward(&mut self, token: Token, result: i32);

    /// Returns how many completions are still to come.
    fn left(&self) -> u32;
}

/// Whether a queue is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Its user does not use it.
    Stopped = 0,
    /// It is attached to a worker and served.
    Running = 1,
    /// Its user broke the protocol. It is served again after it is stopped and started.
    Broken = 2,
}

/// Counters of one queue. Only the owning worker writes them, with plain adds; any thread reads
/// them. They share no cache line, nor the pair of lines that a CPU may fetch together, with what
/// another worker writes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// A [`State`].
    state: AtomicU8,
    /// Size of the ring, 0 before its first start. The thread that starts the ring sets it.
    pub size: AtomicU16,
    /// Requests taken and not completed.
    pub in_flight: AtomicU32,
    /// Requests completed.
    pub requests: AtomicU64,
    /// Reads among them, if the queue is of a disk or a mount.
    pub reads: AtomicU64,
    /// Writes among them.
    pub writes: AtomicU64,
    /// Flushes among them.
    pub flushes: AtomicU64,
    /// Requests completed with an error.
    pub errors: AtomicU64,
    /// Bytes that the guest read.
    pub read_bytes: AtomicU64,
    /// Bytes that the guest wrote.
    pub write_bytes: AtomicU64,
    /// Kicks seen.
    pub kicks: AtomicU64,
    /// Notifications sent.
    pub notifications: AtomicU64,
    /// Nanoseconds that requests waited for limits.
    pub limited_ns: AtomicU64,
    /// Directions of the queue in which a request waits for limits now.
    pub limited_now: AtomicU32,
    /// Service times of its requests, if they are measured.
    pub latency: Latency,
}

impl QueueStats {
    /// Adds to a counter that only the calling thread writes, so no locked instruction is needed.
    #[inline]
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Counts a completed request.
    #[inline]
    pub fn completed(&self, kind: RequestKind) {
        Self::add(&self.requests, 1);
        match kind {
            RequestKind::Read => Self::add(&self.reads, 1),
            RequestKind::Write => Self::add(&self.writes, 1),
            RequestKind::Flush => Self::add(&self.flushes, 1),
            RequestKind::Other => {}
        }
    }

    /// Returns whether the queue is in use.
    pub fn state(&self) -> State {
        match self.state.load(Relaxed) {
            0 => State::Stopped,
            1 => State::Running,
            _ => State::Broken,
        }
    }

    /// Sets the state. There is no other setter.
    pub fn set_state(&self, to: State) {
        tracing::trace!(from = ?self.state(), ?to, "queue state");
        self.state.store(to as u8, Relaxed);
    }
}
