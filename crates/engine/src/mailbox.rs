//! A worker's mailbox: the messages of control to the worker, and whether the worker still runs.
//!
//! Control and session threads write to it, and the worker reads it between two iterations. A
//! worker must never wait for a thread that writes, and such a thread must never wait for the
//! worker without a limit. A request that can be withdrawn is a [`Ticket`].

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use super::WorkerId;
use super::eventfd::EventFd;
use super::phases::Phases;
use super::queue::{Queue, QueueStats};
use super::ticket::Ticket;

/// Names a queue to workers. Unique over all exports.
pub(super) type QueueId = u64;

/// A worker that has something to do and has not run for this time is stalled: it waits in the
/// kernel, or gets no CPU.
pub(super) const STALLED_AFTER: Duration = Duration::from_secs(1);
/// Time between two checks whether a worker has run. It runs within some 50 µs if it can.
const ASK_EVERY: Duration = Duration::from_micros(100);

/// A function that is called with a queue on its worker.
pub(super) type QueueFn = Box<dyn FnOnce(&mut dyn Queue) + Send>;

/// A queue that is passed to a worker.
pub(super) type Delivery = Ticket<Box<dyn Queue>, ()>;
/// The release of a queue. It can be withdrawn until the queue has left the worker.
pub(super) type Recall = Ticket<(), Box<dyn Queue>>;
/// A call of a function with a queue. The answer is whether the worker has the queue.
pub(super) type Call = Ticket<QueueFn, bool>;
/// The end of a worker. It can be withdrawn until the worker has started to end.
pub(super) type Ending = Ticket<(), ()>;

/// A message from control to a worker.
pub(super) enum Message {
    /// Attach, steps 3 and 4: takes the queue and serves it.
    Attach { id: QueueId, delivery: Arc<Delivery>, stats: Arc<QueueStats> },
    /// Attach, step 1: drains the queue and returns it.
    Release { id: QueueId, recall: Arc<Recall> },
    /// The release of the queue was withdrawn, so the worker continues to serve it.
    CancelRelease { id: QueueId },
    /// Calls a function with the queue, between two iterations.
    RunOn { id: QueueId, call: Arc<Call> },
    /// Ends the worker, which has no queue, once no operation of a former queue is left.
    Stop { ending: Arc<Ending> },
}

/// The state that a worker shares with control. It shares no cache line with what another worker
/// writes.
#[repr(align(128))]
pub(super) struct Shared {
    /// The worker's id.
    pub(super) worker: WorkerId,
    /// Guards the messages only. It is held for a push or a swap.
    pub(super) messages: Mutex<Vec<Message>>,
    /// Whether there are messages. A polling worker checks this.
    pub(super) has_messages: AtomicBool,
    /// How often the worker has read all its messages. Only the worker writes it.
    pub(super) reads: AtomicU64,
    /// The value of `reads` at the last request to exceed it, and the time of that request. The
    /// lock is held for a read or a change.
    asked: Mutex<Option<(u64, Instant)>>,
    /// Wakes a sleeping worker.
    pub(super) eventfd: EventFd,
    /// Polling limit in µs. Control sets it at any time.
    pub(super) poll_us: AtomicU32,
    /// How the worker spends its time.
    pub(super) phases: Phases,
    /// Only the worker writes these.
    pub(super) sleeps: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) queues: AtomicU32,
    /// Operations that former queues left on the io_uring. Up to date when a queue is returned.
    pub(super) left: AtomicU32,
}

impl Shared {
    pub(super) fn new(worker: WorkerId, poll_us: u32) -> io::Result<Self> {
        Ok(Self {
            worker,
            messages: Mutex::new(Vec::new()),
            has_messages: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            asked: Mutex::new(None),
            eventfd: EventFd::make()?,
            poll_us: AtomicU32::new(poll_us),
            phases: Phases::new(),
            sleeps: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            queues: AtomicU32::new(0),
            left: AtomicU32::new(0),
        })
    }

    pub(super) fn send(&self, message: Message) {
        self.messages.locked().push(message);
        self.wake();
    }

    fn wake(&self) {
        self.has_messages.store(true, Ordering::Release);
        self.eventfd.signal();
    }

    /// Asks the worker to read its messages, even if there are none. Does nothing if an earlier
    /// request is still open.
    pub(super) fn ask(&self) {
        let mut asked = self.asked.locked();
        let reads = self.reads.load(Ordering::Acquire);
        if asked.is_none_or(|(seen, _)| seen != reads) {
            *asked = Some((reads, Instant::now()));
            drop(asked);
            self.wake();
        }
    }

    /// Returns whether the worker has not run for [`STALLED_AFTER`] since it was
    /// [`ask`](Self::ask)ed to. Returns at once if it has run, and otherwise at the end of that
    /// time.
    pub(super) fn is_stalled(&self) -> bool {
        loop {
            let asked = *self.asked.locked();
            let Some((seen, since)) = asked else { return false };
            if self.reads.load(Ordering::Acquire) != seen {
                return false;
            }
            let left = STALLED_AFTER.saturating_sub(since.elapsed());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(ASK_EVERY));
        }
    }
}
