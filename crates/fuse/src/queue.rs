//! A queue of a mount: takes requests for one file, drives the disk, and replies.
//!
//! A worker owns it; [`Fuse::start`](crate::Fuse::start) makes it. `transport` is what a queue asks
//! of the transport that delivers requests; `channel` (a descriptor of /dev/fuse) and `uring` (FUSE
//! over io_uring) are the two transports. `serve` has the meaning of each request, for both.
//! `blocking` does what would make a worker wait, and `rmw_lock` keeps writes that share a block
//! apart.
//!
//! What must never happen: a request that gets no reply, since the task that made it hangs; or a
//! buffer that is freed while the kernel uses it.

mod blocking;
mod buffers;
mod channel;
mod per_slot;
mod rmw_lock;
mod serve;
mod shared;
mod transport;
mod uring;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use vshunt_block::{DiskHandle, Io, Step};
use vshunt_engine::{EventFd, LimitGate};
use vshunt_engine::{Forwarder, Meter, Queue, QueueStats, RequestKind, Token, Uring};

use self::blocking::CompletionQueue;
pub(crate) use self::blocking::MountEvent;
use self::buffers::Buffers;
pub(crate) use self::channel::ChannelTransport;
pub(crate) use self::channel::group::ChannelGroup;
use self::per_slot::PerSlot;
use self::rmw_lock::WriteShare;
use self::serve::NextStep;
pub(crate) use self::shared::{FuseShared, MountConfig};
use self::transport::{
    Failure, Next, OP_DISK, OP_EVENTFD, OP_LIMIT, OP_TRANSPORT, PollOp, QueueTransport, Request,
};
pub(crate) use self::uring::{RingQueue, UringTransport};

/// The longest read or write, bytes. The kernel is asked to keep to it.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Room for a read that is rounded to blocks at both ends.
const SLACK_BYTES: usize = 2 * 4096;
/// Bytes of the buffer of one request.
const BUFFER_BYTES: usize = TRANSFER_BYTES_MAX as usize + SLACK_BYTES;
/// Address space of the buffers of one channel. Memory is used as far as requests need it.
pub(crate) const CHANNEL_BYTES: u64 = channel::CHANNEL_SLOTS as u64 * BUFFER_BYTES as u64;
/// Address space of the buffers of one ring queue. Memory is used as far as requests need it.
pub(crate) const RING_QUEUE_BYTES: u64 = uring::RING_ENTRIES as u64 * BUFFER_BYTES as u64;
/// Data of the requests that are taken in one iteration, before other queues of the worker have
/// theirs.
const ITERATION_BYTES: u64 = 4 << 20;

/// What a queue is made of, besides its transport.
pub(crate) struct QueueConfig {
    /// Index within the export.
    pub(crate) index: u16,
    /// Signalled by the channel group, the blocking thread, the lock of writes, and former workers.
    pub(crate) eventfd: Arc<EventFd>,
    /// Counters.
    pub(crate) stats: Arc<QueueStats>,
    /// Called when the mount is gone, on the worker: it must not wait.
    pub(crate) on_gone: Box<dyn Fn() + Send>,
    /// What the queues of the mount share.
    pub(crate) shared: Arc<FuseShared>,
}

/// A request slot: the state of a request in flight.
struct RequestSlot {
    io: Io,
    unique: u64,
    kind: RequestKind,
    /// When it was taken; see [`Meter::stamp`].
    taken: u64,
    next_step: NextStep,
    /// Its write holds the lock of writes.
    holds_lock: bool,
    /// How many bytes at the start of the buffer are zeroes that this queue wrote. Where nothing
    /// was ever written the kernel has its page of zeroes, from which it copies more slowly.
    zeroed: u32,
}

/// One queue of a mount, over the transport `T`.
#[repr(align(128))]
pub(crate) struct FuseQueue<T: QueueTransport> {
    // The owning worker's.
    transport: T,
    buffers: Buffers,
    slots: PerSlot<RequestSlot>,
    handle: Option<DiskHandle>,
    eventfd_poll: PollOp,
    /// Between disarm and arm.
    is_leaving: bool,
    /// It leaves because the connection has ended, so that the kernel gives all entries back.
    is_closing: bool,
    is_gone: bool,
    /// Requests in flight.
    in_flight: u32,
    /// Tasks that the blocking thread has not completed.
    tasks: u32,
    /// Slots with writes that wait for the lock.
    deferred: Vec<u16>,
    /// Requests that ended since the worker asked.
    replied: u32,
    /// Data of the requests taken in this iteration.
    iteration_bytes: u64,
    limit: LimitGate,
    /// Requests that wait for the limits, in their order. They keep their slots. Nothing is in
    /// flight for them, so they move with the queue.
    held: VecDeque<Request>,
    /// Those of them whose task has got a signal, by their `unique`, and when.
    interrupted: Vec<(u64, Instant)>,
    meter: Meter,
    // Any thread's.
    completions: Arc<CompletionQueue>,
    write_share: Arc<WriteShare>,
    shared: Arc<FuseShared>,
    stats: Arc<QueueStats>,
    eventfd: Arc<EventFd>,
    // Fixed.
    index: u16,
    on_gone: Box<dyn Fn() + Send>,
}

impl FuseQueue<ChannelTransport> {
    /// A queue over a channel of /dev/fuse. It is on no worker yet.
    ///
    /// # Errors
    /// The system's: no memory.
    pub(crate) fn over_channel(config: QueueConfig, transport: ChannelTransport) -> std::io::Result<Self> {
        Self::new(config, |_| Ok(transport))
    }
}

impl FuseQueue<UringTransport> {
    /// A queue over io_uring. It is on no worker yet.
    ///
    /// # Errors
    /// The system's: no memory.
    pub(crate) fn over_uring(config: QueueConfig, ring: RingQueue) -> std::io::Result<Self> {
        Self::new(config, |buffers| UringTransport::new(ring, buffers))
    }
}

impl<T: QueueTransport> FuseQueue<T> {
    fn new(
        config: QueueConfig,
        transport: impl FnOnce(&Buffers) -> std::io::Result<T>,
    ) -> std::io::Result<Self> {
        let QueueConfig { index, eventfd, stats, on_gone, shared } = config;
        stats.size.store(T::SLOTS, Relaxed);
        let buffers = Buffers::new(T::SLOTS, BUFFER_BYTES)?;
        let transport = transport(&buffers)?;
        let completions = Arc::new(CompletionQueue::new(eventfd.clone()));
        shared.add_queue(completions.clone());
        let slot = |_| RequestSlot {
            io: Io::default(),
            unique: 0,
            kind: RequestKind::Other,
            taken: 0,
            next_step: NextStep::None,
            holds_lock: false,
            zeroed: 0,
        };
        Ok(Self {
            transport,
            buffers,
            slots: PerSlot::new(T::SLOTS, slot),
            handle: None,
            eventfd_poll: PollOp::Off,
            is_leaving: false,
            is_closing: false,
            is_gone: false,
            in_flight: 0,
            tasks: 0,
            deferred: Vec::new(),
            replied: 0,
            iteration_bytes: 0,
            limit: LimitGate::new(shared.limits.clone(), index),
            held: VecDeque::new(),
            interrupted: Vec::new(),
            meter: stats.latency.meter(),
            completions,
            write_share: shared.write_share(index).ok_or(std::io::ErrorKind::InvalidInput)?,
            shared,
            stats,
            eventfd,
            index,
            on_gone,
        })
    }

    #[inline]
    fn publish_in_flight(&self) {
        self.stats.in_flight.store(self.in_flight, Relaxed);
    }

    /// The mount is gone: no more requests come.
    #[cold]
    fn note_gone(&mut self) {
        if !self.is_gone {
            self.is_gone = true;
            (self.on_gone)();
        }
    }

    #[cold]
    fn note_failure(&mut self, failure: Failure) {
        match failure {
            Failure::Gone => self.note_gone(),
            Failure::Entry { index, errno } => {
                let reason = format!("the kernel gave entry {index} back for good: errno {errno}");
                self.shared.report(MountEvent::QueueBroken { queue: self.index, reason });
            }
        }
    }

    fn note_failures(&mut self, failures: Vec<Failure>) {
        for failure in failures {
            self.note_failure(failure);
        }
    }

    /// Ends a request whose reply is written.
    fn release(&mut self, uring: &mut Uring, place: Token, slot: u16) {
        self.replied += 1;
        let RequestSlot { taken, kind, .. } = self.slots[slot];
        self.stats.completed(kind);
        self.meter.done(taken, kind);
        if T::CALL_FOR_EACH {
            self.meter.publish();
        }
        self.recycle(uring, place, slot);
    }

    /// Ends a request; its slot is free again.
    fn recycle(&mut self, uring: &mut Uring, place: Token, slot: u16) {
        self.in_flight -= 1;
        self.transport.recycle(slot, uring, place);
    }

    /// Replies with a structure, or with an error (0 or a negative errno) and nothing else.
    fn reply(&mut self, slot: u16, error: i32, body: &[u8]) {
        let state = &mut self.slots[slot];
        if T::REPLIES_IN_BUFFER && !body.is_empty() {
            state.zeroed = 0;
        }
        self.transport.reply(&self.buffers, slot, state.unique, error, body);
    }

    /// The eventfd was signalled: by the blocking thread, the lock of writes, the channel group or
    /// a former worker. Returns the number of requests that ended.
    fn signalled(&mut self, uring: &mut Uring, place: Token) -> u32 {
        let before = self.replied;
        for (slot, result) in self.completions.take() {
            self.tasks -= 1;
            self.task_done(uring, place, slot, result);
        }
        self.note_interrupts();
        for slot in std::mem::take(&mut self.deferred) {
            self.start(uring, place, slot);
        }
        let failures = self.transport.signalled(self.is_leaving);
        self.note_failures(failures);
        if self.is_leaving {
            self.end_eventfd_poll(uring, place);
        }
        self.publish_in_flight();
        self.replied - before
    }

    /// Whether nothing in flight will signal the eventfd.
    fn needs_no_eventfd(&self) -> bool {
        self.tasks == 0
            && self.deferred.is_empty()
            && self.in_flight == 0
            && self.transport.may_leave(self.is_closing)
    }

    /// While the queue leaves: ends the poll of the eventfd when nothing in flight will signal it.
    fn end_eventfd_poll(&mut self, uring: &mut Uring, place: Token) {
        if self.eventfd_poll == PollOp::On && self.needs_no_eventfd() {
            uring.cancel(place.with(0, OP_EVENTFD));
            self.eventfd_poll = PollOp::Cancelled;
        }
    }

    /// Asks the limits whether a request may begin. One that costs something does not overtake
    /// those that wait.
    #[inline]
    fn may_begin(&mut self, request: &Request) -> bool {
        match self.cost(request) {
            None => true,
            Some(_) if !self.held.is_empty() => false,
            Some((direction, bytes)) => self.limit.ask(direction, bytes),
        }
    }

    /// Begins the requests that waited for the limits, as far as these permit it. Returns their
    /// number.
    #[inline]
    fn begin_held(&mut self, uring: &mut Uring, place: Token, limited: bool) -> u32 {
        let mut begun = 0;
        if self.limit.is_held() && limited {
            return begun;
        }
        while self.iteration_bytes < ITERATION_BYTES
            && let Some(request) = self.held.pop_front()
        {
            let cost = if limited { self.cost(&request) } else { None };
            if cost.is_some_and(|(direction, bytes)| !self.limit.ask(direction, bytes)) {
                self.held.push_front(request);
                self.limit.hold(uring, place.with(0, OP_LIMIT), &self.stats);
                break;
            }
            begun += 1;
            self.begin(uring, place, &request);
        }
        begun
    }

    /// An operation of the disk completed. Returns the number of requests that ended.
    #[inline]
    fn disk_completed(&mut self, uring: &mut Uring, token: Token, result: i32) -> u32 {
        let before = self.replied;
        let state = &mut self.slots[token.slot];
        let Some(handle) = &self.handle else { return 0 };
        if let Step::Done(result) = handle.resume(uring, &mut state.io, token, result) {
            self.io_done(uring, token, token.slot, result);
            self.publish_in_flight();
            if self.is_leaving {
                self.end_eventfd_poll(uring, token);
            }
        }
        self.replied - before
    }
}

impl<T: QueueTransport> Queue for FuseQueue<T> {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.handle.is_none() {
            self.handle = Some(self.shared.disk().attach(uring));
        }
        (self.is_leaving, self.is_closing) = (false, false);
        if self.eventfd_poll == PollOp::Off {
            uring.poll(self.eventfd.fd(), place.with(0, OP_EVENTFD));
            self.eventfd_poll = PollOp::On;
        }
        let failures = self.transport.arm(uring, place);
        self.note_failures(failures);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        self.iteration_bytes = 0;
        let mut taken = 0;
        let limited = self.limit.begin();
        self.meter.batch();
        // The worker counts requests when they begin.
        let mut begun = self.begin_held(uring, place, limited);
        while taken < budget && self.iteration_bytes < ITERATION_BYTES {
            match self.transport.next(&self.buffers) {
                Next::Request(request) => {
                    taken += 1;
                    if T::CALL_FOR_EACH {
                        self.meter.batch();
                    }
                    let is_last = request.is_last;
                    if limited && !self.may_begin(&request) {
                        self.held.push_back(request);
                        self.limit.hold(uring, place.with(0, OP_LIMIT), &self.stats);
                    } else {
                        begun += 1;
                        self.begin(uring, place, &request);
                    }
                    if is_last {
                        break;
                    }
                }
                Next::Retry { slot } => self.slots[slot].zeroed = 0,
                Next::Nothing => break,
                Next::Gone => {
                    self.note_gone();
                    break;
                }
            }
        }
        self.publish_in_flight();
        begun
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        match token.op {
            OP_DISK => self.disk_completed(uring, token, result),
            OP_TRANSPORT => {
                if let Some(failure) = self.transport.complete(token.slot, result, self.is_leaving) {
                    self.note_failure(failure);
                }
                if self.is_leaving {
                    self.end_eventfd_poll(uring, token);
                }
                0
            }
            OP_LIMIT => {
                self.limit.expired(&self.stats);
                self.end_interrupted(uring, token);
                0
            }
            _ => {
                if !more {
                    self.eventfd_poll = PollOp::Off;
                    // The kernel may end the poll by itself, and results may still come while the
                    // queue leaves.
                    if !self.is_leaving || !self.needs_no_eventfd() {
                        uring.poll(self.eventfd.fd(), token.with(0, OP_EVENTFD));
                        self.eventfd_poll = PollOp::On;
                    }
                }
                self.signalled(uring, token)
            }
        }
    }

    fn publish(&mut self) -> bool {
        self.meter.publish();
        let replied = std::mem::take(&mut self.replied);
        QueueStats::add(&self.stats.notifications, u64::from(replied));
        // Each reply may wake a task that waited for it.
        replied > 0
    }

    fn has_work(&self) -> bool {
        (!self.held.is_empty() && !self.limit.is_held()) || self.transport.has_work()
    }

    fn wake(&mut self) {}

    fn look(&self) -> bool {
        (!self.held.is_empty() && !self.limit.is_held()) || self.transport.look()
    }

    fn sleep(&mut self, uring: &mut Uring, place: Token, _after: u32) -> bool {
        // Requests that limits do not concern pass those that wait, so the next one has to wake the
        // worker.
        self.transport.sleep(uring, place);
        self.has_work()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.is_leaving = true;
        self.is_closing = self.shared.has_ended();
        self.transport.disarm(uring, place);
        self.limit.disarm(uring, place.with(0, OP_LIMIT));
        self.end_eventfd_poll(uring, place);
    }

    fn at_rest(&self) -> bool {
        self.transport.is_at_rest()
            && self.transport.may_leave(self.is_closing)
            && self.eventfd_poll == PollOp::Off
            && self.tasks == 0
            && self.in_flight == 0
            && !self.limit.is_held()
    }

    fn leave(&mut self, uring: &mut Uring) {
        if let Some(handle) = self.handle.take() {
            handle.detach(uring);
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation on the io_uring at a time.
        u32::from(T::SLOTS)
    }

    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        self.transport.forwarder()
    }
}

impl<T: QueueTransport> Drop for FuseQueue<T> {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a queue of a mount dropped with requests in flight");
        if self.transport.keep_if_in_use() {
            // `FuseShared::end` was not called before the queue was stopped.
            tracing::error!("a ring queue ended with entries at the kernel; their memory is kept");
            self.buffers.leak();
        }
    }
}
