//! A worker's mailbox: what control asks of the worker, and whether the worker still runs.
//!
//! Written by control and session threads, read by the worker between two turns. What must never happen: a worker that waits
//! for a thread that writes, or such a thread that waits without a limit for the worker; what is asked is a [`Ticket`].

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use super::WorkerId;
use super::queue::{Queue, QueueStats};
use super::ticket::Ticket;

/// Names a queue to workers, over all exports.
pub(super) type QueueId = u64;

/// A worker that has something to do and has not run for so long is stalled: it waits in the kernel, or no CPU runs it.
pub(super) const STALLED_AFTER: Duration = Duration::from_secs(1);
/// How often it is looked whether a worker has run. It does so within some 50 µs if it can.
const ASK_EVERY: Duration = Duration::from_micros(100);

/// What is done with a queue on its worker.
pub(super) type QueueFn = Box<dyn FnOnce(&mut dyn Queue) + Send>;

/// A queue on its way to a worker.
pub(super) type Delivery = Ticket<Box<dyn Queue>, ()>;
/// A queue that is asked back. It can be withdrawn until the queue has left the worker.
pub(super) type Recall = Ticket<(), Box<dyn Queue>>;
/// A function to be called with a queue. The answer: whether the queue was there.
pub(super) type Call = Ticket<QueueFn, bool>;
/// The end of a worker. It can be withdrawn until the worker has begun to end.
pub(super) type Ending = Ticket<(), ()>;

/// What control asks of a worker.
pub(super) enum Message {
    /// Attach, step 3 to 4: from now on this queue is yours.
    Attach { id: QueueId, delivery: Arc<Delivery>, stats: Arc<QueueStats> },
    /// Attach, step 1: drain the queue and give it back.
    Release { id: QueueId, recall: Arc<Recall> },
    /// The release of the queue was withdrawn: it goes on here.
    CancelRelease { id: QueueId },
    /// Calls a function with the queue, between two turns.
    RunOn { id: QueueId, call: Arc<Call> },
    /// No queue is left: end, as soon as no operation of a former queue is left either.
    Stop { ending: Arc<Ending> },
}

/// What a worker shares with control.
pub(super) struct Shared {
    /// The worker's id.
    pub(super) worker: WorkerId,
    /// Guards the messages alone; held for a push or a swap.
    pub(super) messages: Mutex<Vec<Message>>,
    /// Whether there are messages: what a polling worker looks at.
    pub(super) has_mail: AtomicBool,
    /// Times that the worker has read its mail to the end. Written by the worker alone.
    pub(super) mails: AtomicU64,
    /// The value of `mails` that the worker was last asked to exceed, and when, while it did not do so. Held for a look or a
    /// change.
    asked: Mutex<Option<(u64, Instant)>>,
    /// Wakes a sleeping worker.
    pub(super) eventfd: OwnedFd,
    /// Bound of polling, µs; set by control at any time.
    pub(super) poll_us: AtomicU32,
    /// Written by the worker alone.
    pub(super) sleeps: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) queues: AtomicU32,
    /// Operations on the ring that former queues left there. Up to date when a queue is given back.
    pub(super) left: AtomicU32,
}

impl Shared {
    pub(super) fn new(worker: WorkerId, poll_us: u32) -> io::Result<Self> {
        Ok(Self {
            worker,
            messages: Mutex::new(Vec::new()),
            has_mail: AtomicBool::new(false),
            mails: AtomicU64::new(0),
            asked: Mutex::new(None),
            eventfd: rustix::event::eventfd(
                0,
                rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
            )?,
            poll_us: AtomicU32::new(poll_us),
            sleeps: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            queues: AtomicU32::new(0),
            left: AtomicU32::new(0),
        })
    }

    pub(super) fn send(&self, mail: Message) {
        self.messages.locked().push(mail);
        self.wake();
    }

    fn wake(&self) {
        self.has_mail.store(true, Ordering::Release);
        // Cannot fail: the counter would have to reach 2^64 - 1.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    /// Asks the worker to read its mail, which may be none, unless it was asked before and has not done so.
    pub(super) fn ask(&self) {
        let mut asked = self.asked.locked();
        let mails = self.mails.load(Ordering::Acquire);
        if asked.is_none_or(|(seen, _)| seen != mails) {
            *asked = Some((mails, Instant::now()));
            drop(asked);
            self.wake();
        }
    }

    /// Whether the worker has not run for [`STALLED_AFTER`] although it was [`ask`](Self::ask)ed to. Returns at once if it
    /// has run, else when that time is over.
    pub(super) fn is_stalled(&self) -> bool {
        loop {
            let asked = *self.asked.locked();
            let Some((seen, since)) = asked else { return false };
            if self.mails.load(Ordering::Acquire) != seen {
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
