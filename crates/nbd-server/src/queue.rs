//! A queue of an export: the connection of one client.
//!
//! The thread of the export makes it when a handshake is complete. One worker at a time owns it. It
//! receives many headers at once into a buffer, and the data of writes straight into the buffer of
//! their request (`receive`). A request has a slot from its header until its reply is sent
//! (`request`, `status`). Replies that are ready go out in one message (`send`).
//!
//! | bound | what happens there |
//! | --- | --- |
//! | [`SLOTS`] requests whose reply is not sent | nothing more is taken, and soon nothing received |
//! | [`memory`] of data | the same |
//!
//! So a client that does not read its replies is not read from. When the queue moves to another
//! worker, the bytes that it has received and those that it has to send move with it.
//!
//! What must never happen: a buffer is used for something else while the kernel sends from it or
//! receives into it.

mod memory;
mod receive;
mod request;
mod send;
mod status;
mod unflushed;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ::nbd::server::{Agreed, Reply, Request, Work};
use ::nbd::{HEADER_BYTES_MAX, Headers};
use vshunt_block::{AlignedBuf, DiskHandle, Io, Op, Step};
use vshunt_engine::{LimitGate, Meter, Queue, QueueStats, RequestKind, Token, Uring, UringFile};
use vshunt_types::spec::Cache;

use self::memory::Memory;
use self::receive::{Inbox, Next};
use self::send::Outbox;
use self::status::Mapping;
use self::unflushed::Unflushed;
use crate::map::Answers;
use crate::shared::{Context, Ended, Shared};

/// Requests of a connection that are taken and whose reply is not sent.
pub(crate) const SLOTS: u16 = 64;
/// Data of the requests that are taken in one iteration, before other queues of the worker have
/// theirs.
const TAKE_BYTES: u64 = 4 << 20;

/// Operations in a token: one of the disk, a receive, a send, the timer of the limits, the poll of
/// the eventfd, a request that continues after other queues were served, the last flush.
const OP_DISK: u8 = 0;
const OP_RECEIVE: u8 = 1;
const OP_SEND: u8 = 2;
const OP_LIMIT: u8 = 3;
const OP_EVENT: u8 = 4;
const OP_NEXT: u8 = 5;
const OP_LAST_FLUSH: u8 = 6;

/// A request, from its header until its reply is sent.
struct Slot {
    io: Io,
    request: Request,
    work: Work,
    kind: RequestKind,
    /// When its work began; see [`Meter::stamp`].
    taken: u64,
    /// The data of a read or write.
    data: Option<AlignedBuf>,
    /// The header of the reply.
    header: [u8; HEADER_BYTES_MAX],
    header_bytes: usize,
    /// Bytes of `data` that follow the header.
    reply_bytes: usize,
    /// What follows the header instead: the state of a range.
    status: Vec<u8>,
    /// The rest of a range that is done in parts.
    rest: Range<u64>,
    /// A flush follows.
    flushes: bool,
    /// Which changes a flush covers; see [`Unflushed::mark`].
    covers: u64,
    mapping: Mapping,
}

impl Slot {
    fn new() -> Self {
        Self {
            io: Io::default(),
            request: Request { flags: 0, kind: 0, cookie: 0, offset: 0, len: 0 },
            work: Work::Flush,
            kind: RequestKind::Other,
            taken: 0,
            data: None,
            header: [0; HEADER_BYTES_MAX],
            header_bytes: 0,
            reply_bytes: 0,
            status: Vec::new(),
            rest: 0..0,
            flushes: false,
            covers: 0,
            mapping: Mapping::default(),
        }
    }

    fn reply(&self, headers: Headers) -> Reply {
        let Request { kind, cookie, offset, .. } = self.request;
        Reply { headers, kind, cookie, offset }
    }
}

/// Returns the slot of that number. Numbers come from the list of free slots and from tokens of the
/// queue.
#[inline]
#[expect(clippy::indexing_slicing, reason = "the reduced index is below the number of slots")]
fn slot_of(slots: &mut [Slot], index: u16) -> &mut Slot {
    const _: () = assert!(SLOTS.is_power_of_two());
    debug_assert!(index < SLOTS && slots.len() == usize::from(SLOTS));
    &mut slots[usize::from(index & (SLOTS - 1))]
}

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Requests are taken.
    Open,
    /// The client has ended the session, or sends nothing more. Requests complete.
    Closing,
    /// It is of no more use, and shut down. Operations in flight end.
    Failed,
    /// Nothing is left, and the thread of the export knows.
    Over,
}

/// See the module.
#[repr(align(128))]
pub(crate) struct ConnectionQueue {
    // The owning worker's.
    slots: Box<[Slot]>,
    free: Vec<u16>,
    memory: Memory,
    inbox: Inbox,
    outbox: Outbox,
    /// Slots whose reply is ready, in order.
    replies: VecDeque<u16>,
    state: State,
    why: Option<String>,
    handle: Option<DiskHandle>,
    file: Option<UringFile>,
    /// The map thread of the export asks for the map of the image.
    maps_by_thread: bool,
    /// Between disarm and arm.
    leaving: bool,
    /// The next header, or the rest of a payload, may be taken.
    ready: bool,
    /// Requests that the disk or the map thread has, and the last flush.
    in_flight: u32,
    /// The changes that no flush covers.
    unflushed: Unflushed,
    /// The last flush, which no client waits for.
    last_flush: Io,
    /// Its error, an errno.
    flush_errno: Option<i32>,
    /// Questions to the map thread that are not answered.
    questions: u32,
    /// The poll of the eventfd of the answers is on the io_uring.
    event_poll: bool,
    taken_bytes: u64,
    /// Requests completed since the start of the queue.
    completed: u32,
    /// A message was sent since the worker asked.
    has_sent: bool,
    limit: LimitGate,
    meter: Meter,
    // Any thread's.
    shared: Arc<Shared>,
    answers: Arc<Answers>,
    stats: Arc<QueueStats>,
    // Fixed.
    socket: Arc<OwnedFd>,
    headers: Headers,
    contexts: Vec<Context>,
    index: u16,
}

impl ConnectionQueue {
    /// Makes the queue of a connection, which is not yet on a worker. `rest`: requests that have
    /// arrived already.
    ///
    /// # Errors
    /// The system's: no descriptor.
    pub(crate) fn new(
        shared: Arc<Shared>,
        index: u16,
        socket: Arc<OwnedFd>,
        agreed: &Agreed,
        rest: &[u8],
        stats: Arc<QueueStats>,
    ) -> io::Result<Self> {
        stats.size.store(SLOTS, Relaxed);
        Ok(Self {
            slots: (0..SLOTS).map(|_| Slot::new()).collect(),
            free: (0..SLOTS).rev().collect(),
            memory: Memory::default(),
            inbox: Inbox::new(rest),
            outbox: Outbox::new(),
            replies: VecDeque::with_capacity(usize::from(SLOTS)),
            state: State::Open,
            why: None,
            handle: None,
            file: None,
            maps_by_thread: false,
            leaving: false,
            ready: true,
            in_flight: 0,
            unflushed: Unflushed::default(),
            last_flush: Io::default(),
            flush_errno: None,
            questions: 0,
            event_poll: false,
            taken_bytes: 0,
            completed: 0,
            has_sent: false,
            limit: LimitGate::new(shared.limits.clone(), index),
            meter: stats.latency.meter(),
            contexts: shared.contexts(&agreed.contexts),
            answers: Arc::new(Answers::new()?),
            shared,
            stats,
            socket,
            headers: agreed.headers,
            index,
        })
    }

    /// Returns the slot of that number, see [`slot_of`].
    #[inline]
    fn slot(&mut self, index: u16) -> &mut Slot {
        slot_of(&mut self.slots, index)
    }

    #[inline]
    fn publish_in_flight(&self) {
        self.stats.in_flight.store(self.in_flight, Relaxed);
    }

    fn shut_down(&self) {
        // SAFETY: the call takes no memory; the descriptor is open.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Ends a connection that is of no more use. The operations on its socket complete.
    #[cold]
    fn fail(&mut self, why: Option<String>) {
        if matches!(self.state, State::Open | State::Closing) {
            self.state = State::Failed;
            self.why = why;
            self.shut_down();
        }
    }

    /// Sees whether a connection that ends has something left to do.
    fn check_end(&mut self, uring: &mut Uring, base: Token) {
        if self.state == State::Open || self.in_flight > 0 || self.leaving || self.flushes_last(uring, base) {
            return;
        }
        if self.state == State::Closing && self.replies.is_empty() && self.outbox.is_empty() {
            self.fail(None);
        }
        if self.state == State::Failed && !self.inbox.busy && !self.outbox.busy {
            self.state = State::Over;
            let flush_errno = self.flush_errno.take();
            self.shared.ended(Ended { queue: self.index, why: self.why.take(), flush_errno });
        }
    }

    /// Makes the changes of a client that has gone stable: many clients do not flush at their end,
    /// because QEMU's server does it for them. Returns whether that takes time.
    fn flushes_last(&mut self, uring: &mut Uring, base: Token) -> bool {
        if self.unflushed.is_empty() || self.shared.disk.cache() == Cache::Unsafe {
            return false;
        }
        let Some(handle) = &self.handle else { return false };
        self.last_flush.reset(Op::Flush, 0, false);
        match handle.start(uring, &mut self.last_flush, base.with(0, OP_LAST_FLUSH)) {
            Step::Done(result) => self.flushed_last(result),
            Step::Wait => self.in_flight += 1,
        }
        self.in_flight > 0
    }

    fn flushed_last(&mut self, result: i32) {
        self.unflushed = Unflushed::default();
        if result < 0 {
            self.flush_errno = Some(-result);
            // It is tried once more when the export ends.
            self.shared.note_unflushed();
        }
    }

    /// A completion of the disk. Returns the number of requests that completed.
    fn disk_completed(&mut self, uring: &mut Uring, token: Token, result: i32) -> u32 {
        let before = self.completed;
        let io = &mut slot_of(&mut self.slots, token.slot).io;
        if let Some(handle) = &self.handle
            && let Step::Done(result) = handle.resume(uring, io, token, result)
            && self.advance(token.slot, result)
        {
            self.start(uring, token, token.slot);
        }
        self.completed.wrapping_sub(before)
    }

    /// Answers of the map thread have arrived. Returns the number of requests that completed.
    fn answered(&mut self, uring: &mut Uring, base: Token) -> u32 {
        let before = self.completed;
        self.event_poll = false;
        self.ready = true;
        for (slot, answer) in self.answers.take() {
            self.questions -= 1;
            self.mapped(slot, answer);
        }
        self.poll_answers(uring, base);
        self.completed.wrapping_sub(before)
    }

    fn poll_answers(&mut self, uring: &mut Uring, base: Token) {
        if self.questions > 0 && !self.event_poll {
            self.event_poll = true;
            uring.poll_once(self.answers.eventfd().fd(), base.with(0, OP_EVENT));
        }
    }

    fn may_parse(&self) -> bool {
        self.ready && self.state == State::Open
    }

    fn may_send(&self) -> bool {
        !self.outbox.busy
            && matches!(self.state, State::Open | State::Closing)
            && !(self.replies.is_empty() && self.outbox.is_empty())
    }
}

impl Queue for ConnectionQueue {
    fn arm(&mut self, uring: &mut Uring, base: Token) {
        if self.handle.is_none() {
            self.handle = Some(self.shared.disk.attach(uring));
            self.maps_by_thread = self.shared.disk.map_image().is_some();
        }
        if self.file.is_none() {
            let socket: Arc<dyn AsRawFd + Send + Sync> = self.socket.clone();
            self.file = Some(uring.register_file(&socket));
        }
        self.leaving = false;
        // The worker looks at the queue now, which then receives.
        self.ready = true;
        self.poll_answers(uring, base);
        self.check_end(uring, base);
        self.publish_in_flight();
    }

    fn take(&mut self, uring: &mut Uring, base: Token, budget: u32) -> u32 {
        if self.shared.is_stopping() {
            self.fail(None);
        }
        let mut taken = 0;
        self.taken_bytes = 0;
        self.meter.batch();
        let limited = self.limit.begin();
        self.handle.iter().for_each(DiskHandle::begin_batch);
        while taken < budget && self.taken_bytes < TAKE_BYTES && self.may_parse() {
            match self.next(uring, base, limited) {
                Next::Taken => taken += 1,
                Next::Again => {}
                Next::Wait => self.ready = false,
                Next::Held => {
                    self.limit.hold(uring, base.with(0, OP_LIMIT), &self.stats);
                    break;
                }
            }
        }
        self.handle.iter().for_each(DiskHandle::end_batch);
        self.receive(uring, base);
        self.send(uring, base);
        self.check_end(uring, base);
        self.publish_in_flight();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, _more: bool) -> u32 {
        let completed = match token.op {
            OP_DISK => self.disk_completed(uring, token, result),
            OP_RECEIVE => {
                self.received(result);
                0
            }
            OP_SEND => {
                self.sent(result);
                0
            }
            OP_LIMIT => {
                self.limit.expired(&self.stats);
                0
            }
            OP_NEXT => {
                let before = self.completed;
                self.start(uring, token, token.slot);
                self.completed.wrapping_sub(before)
            }
            OP_LAST_FLUSH => {
                if let Some(handle) = &self.handle
                    && let Step::Done(result) = handle.resume(uring, &mut self.last_flush, token, result)
                {
                    self.in_flight -= 1;
                    self.flushed_last(result);
                }
                0
            }
            _ => self.answered(uring, token),
        };
        self.check_end(uring, token);
        self.publish_in_flight();
        completed
    }

    fn publish(&mut self) -> bool {
        self.meter.publish();
        std::mem::take(&mut self.has_sent)
    }

    fn has_work(&self) -> bool {
        (self.may_parse() && !self.limit.is_held()) || self.may_send()
    }

    fn wake(&mut self) {}

    fn sleep(&mut self, _uring: &mut Uring, _base: Token, _after: u32) -> bool {
        // A receive is in flight, unless nothing may be received now.
        self.has_work()
    }

    fn disarm(&mut self, uring: &mut Uring, base: Token) {
        self.leaving = true;
        if self.inbox.busy {
            uring.cancel(base.with(0, OP_RECEIVE));
        }
        if self.outbox.busy {
            uring.cancel(base.with(0, OP_SEND));
        }
        self.limit.disarm(uring, base.with(0, OP_LIMIT));
    }

    fn at_rest(&self) -> bool {
        let polls = self.event_poll || self.limit.is_held();
        !self.inbox.busy && !self.outbox.busy && self.in_flight == 0 && !polls
    }

    fn leave(&mut self, uring: &mut Uring) {
        if let Some(handle) = self.handle.take() {
            handle.detach(uring);
        }
        if self.file.take().is_some() {
            uring.unregister_file(self.socket.as_raw_fd());
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation of the disk at a time. Those on the socket wait by a poll.
        u32::from(SLOTS)
    }
}

impl Drop for ConnectionQueue {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a connection dropped with operations in flight");
        if !self.unflushed.is_empty() {
            self.shared.note_unflushed();
        }
    }
}
