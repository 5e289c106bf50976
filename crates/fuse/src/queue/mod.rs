//! A FUSE channel as a queue: takes requests of the host's tasks for one file, drives the disk, replies.
//!
//! Owned by a worker, made by [`Fuse::start`](crate::Fuse::start). `abi` is the protocol, `serve` what each request means; `dev` (a
//! descriptor of /dev/fuse) and `ring` (FUSE over io_uring) are the two ways that requests come and replies go; `herd`
//! says which channel listens, `clerk` does what would block, `gate` keeps writes apart that share a block.
//! What must never happen: a request that is never replied to (its caller hangs), or a buffer that the kernel uses
//! freed.

pub mod abi;
mod buffer;
mod clerk;
mod dev;
mod gate;
mod herd;
mod ring;
mod serve;
mod shared;
mod take;

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Instant;

use buffer::Buffers;
use clerk::Desk;
pub use clerk::{News, Tell};
use dev::Channel;
pub use herd::Herd;
use ring::{At, Entries};
use serve::Then;
pub use shared::{FuseShared, Setup};
use vshunt_block::{DiskHandle, Io, Step};
use vshunt_engine::EventFd;
use vshunt_engine::{Forwarder, Queue, QueueStats, Token, Uring};

/// The longest read or write, bytes: what we ask the kernel to keep to.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Room before and after for reads that are rounded to blocks.
const SLACK_BYTES: usize = 2 * 4096;
/// Requests of one channel under way.
pub const CHANNEL_SLOTS: u16 = 128;
/// Address space of one channel's buffers; used up as far as requests come.
pub const CHANNEL_BYTES: u64 = CHANNEL_SLOTS as u64 * (TRANSFER_BYTES_MAX as u64 + SLACK_BYTES as u64);
/// Entries of one ring queue.
pub const RING_ENTRIES: u16 = 64;
/// Address space of one ring queue's buffers; used up as far as requests come.
pub const RING_QUEUE_BYTES: u64 = RING_ENTRIES as u64 * (TRANSFER_BYTES_MAX as u64 + SLACK_BYTES as u64);
/// Data of the requests taken in one turn before neighbours on the worker have theirs.
const TURN_BYTES: u64 = 4 << 20;

const OP_IO: u8 = 0;
/// A channel has something to read.
const OP_READABLE: u8 = 1;
const OP_BELL: u8 = 2;
const OP_ENTRY: u8 = 3;

/// How requests come to a queue.
pub enum Source {
    /// By reading a descriptor of /dev/fuse, together with the other channels of the herd.
    Channel(Arc<OwnedFd>, Arc<Herd>),
    /// By entries of the ring queue for a CPU, on the connection of that descriptor; the last counts entries that are
    /// still on io_urings of former workers.
    Ring(Arc<OwnedFd>, u16, Arc<AtomicU32>),
}

/// What a queue is made of.
pub struct Parts {
    /// Index within the export.
    pub index: u16,
    /// How requests come.
    pub source: Source,
    /// Rung for it by the herd, the clerk and the gate.
    pub eventfd: Arc<EventFd>,
    /// Counters.
    pub stats: Arc<QueueStats>,
    /// Told when the mount is gone; called on the worker, so it must not block.
    pub on_gone: Box<dyn Fn() + Send>,
}

/// Whether the poll of the eventfd is on the worker's ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Listen {
    Off,
    On,
    Ending,
}

enum Transport {
    Channel {
        channel: Channel,
        herd: Arc<Herd>,
        /// It may have something to read.
        ready: bool,
        /// It is asked to tell: an operation of ours.
        listen: Listen,
        /// It leads the herd, as far as it knows.
        leads: bool,
        /// Since when it finds requests without a gap, and how many they were.
        burst: Option<(Instant, u32)>,
        /// For how many more bursts it is taken for granted that they are of one request.
        alone: u8,
        /// It was called by the herd, and has not looked yet.
        called: bool,
    },
    Ring {
        entries: Entries,
        /// Entries with requests to serve.
        ready: Vec<u16>,
        /// Requests being served.
        serving: u32,
    },
}

/// A request under way.
struct Slot {
    io: Io,
    unique: u64,
    then: Then,
    /// Its write has entered the gate.
    entered: bool,
    /// How many bytes at the buffer's start are zero, written by us: where nobody ever wrote the kernel finds its one
    /// page of zeroes, which it copies from by a slower way.
    zeroed: u32,
}

/// One queue of a mount.
pub struct FuseQueue {
    // The owning worker's.
    transport: Transport,
    buffers: Buffers,
    slots: Box<[Slot]>,
    /// Slots of a channel without a request.
    free: Vec<u16>,
    handle: Option<DiskHandle>,
    bell_listen: Listen,
    /// Between disarm and arm.
    leaving: bool,
    /// It leaves for good: the connection has ended, so that the kernel gives all entries back.
    closing: bool,
    gone: bool,
    /// Orders at the clerk.
    tasks: u32,
    /// Writes that wait for the gate.
    deferred: Vec<u16>,
    /// Requests that ended since the worker asked.
    replied: u32,
    turn_bytes: u64,
    /// A look found the channel readable.
    seen: Cell<bool>,
    // Any thread's.
    desk: Arc<Desk>,
    shared: Arc<FuseShared>,
    stats: Arc<QueueStats>,
    eventfd: Arc<EventFd>,
    // Fixed.
    index: u16,
    on_gone: Box<dyn Fn() + Send>,
}

impl FuseQueue {
    /// A queue that is not yet on a worker.
    ///
    /// # Errors
    /// No memory.
    pub fn new(parts: Parts, shared: Arc<FuseShared>) -> std::io::Result<Self> {
        let count = match parts.source {
            Source::Channel(..) => CHANNEL_SLOTS,
            Source::Ring(..) => RING_ENTRIES,
        };
        parts.stats.size.store(count, Relaxed);
        let buffers = Buffers::new(count.into(), TRANSFER_BYTES_MAX as usize + SLACK_BYTES)?;
        let transport = match parts.source {
            Source::Channel(fd, herd) => Transport::Channel {
                channel: Channel::new(fd),
                herd,
                ready: true,
                listen: Listen::Off,
                leads: false,
                burst: None,
                alone: 0,
                called: false,
            },
            Source::Ring(fd, qid, away) => Transport::Ring {
                entries: Entries::new(
                    fd,
                    qid,
                    &buffers,
                    count,
                    TRANSFER_BYTES_MAX as usize,
                    parts.eventfd.clone(),
                    away,
                )?,
                ready: Vec::with_capacity(count.into()),
                serving: 0,
            },
        };
        let slot = |_| Slot { io: Io::default(), unique: 0, then: Then::Nothing, entered: false, zeroed: 0 };
        Ok(Self {
            transport,
            buffers,
            slots: (0..count).map(slot).collect(),
            free: (0..count).rev().collect(),
            handle: None,
            bell_listen: Listen::Off,
            leaving: false,
            closing: false,
            gone: false,
            tasks: 0,
            deferred: Vec::new(),
            replied: 0,
            turn_bytes: 0,
            seen: Cell::new(false),
            desk: Arc::new(Desk::new(parts.eventfd.clone())),
            shared,
            stats: parts.stats,
            eventfd: parts.eventfd,
            index: parts.index,
            on_gone: parts.on_gone,
        })
    }

    /// Requests being served.
    fn in_flight(&self) -> u32 {
        match &self.transport {
            Transport::Channel { .. } => (self.slots.len() - self.free.len()) as u32,
            Transport::Ring { serving, .. } => *serving,
        }
    }

    #[inline]
    fn flight_changed(&self) {
        self.stats.in_flight.store(self.in_flight(), Relaxed);
    }

    /// The mount is gone: nothing more comes.
    #[cold]
    fn gone(&mut self) {
        if !self.gone {
            self.gone = true;
            (self.on_gone)();
        }
    }

    /// Ends a request: its reply is on the way.
    fn release(&mut self, uring: &mut Uring, place: Token, index: u16) {
        self.replied += 1;
        QueueStats::add(&self.stats.requests, 1);
        self.recycle(uring, place, index);
    }

    /// A slot can be used again.
    fn recycle(&mut self, uring: &mut Uring, place: Token, index: u16) {
        match &mut self.transport {
            Transport::Channel { ready, .. } => {
                self.free.push(index);
                *ready |= self.free.len() == 1;
            }
            Transport::Ring { entries, serving, .. } => {
                *serving -= 1;
                // Also while it leaves: the entry stays behind then, and the reply does not wait for the move.
                entries.submit(index, uring, place.with(index, OP_ENTRY));
            }
        }
    }

    /// Replies with a structure, or without anything but the error (0 or negative).
    fn reply(&mut self, index: u16, error: i32, small: &[u8]) {
        let unique = self.slots[usize::from(index)].unique;
        match &mut self.transport {
            // SAFETY: no data.
            Transport::Channel { channel, .. } => unsafe {
                channel.reply(unique, error, small, (std::ptr::null(), 0));
            },
            Transport::Ring { entries, .. } => {
                // SAFETY: the payload is ours until the commit, and longer than every structure.
                unsafe {
                    std::ptr::copy_nonoverlapping(small.as_ptr(), self.buffers.at(index), small.len());
                }
                if !small.is_empty() {
                    self.slots[usize::from(index)].zeroed = 0;
                }
                entries.reply(index, unique, error, small.len());
            }
        }
    }

    /// Replies with `len` bytes of the slot's buffer, from `skip` on.
    fn reply_data(&mut self, index: u16, skip: usize, len: usize) {
        let unique = self.slots[usize::from(index)].unique;
        let at = self.buffers.at(index);
        match &mut self.transport {
            Transport::Channel { channel, .. } => {
                // SAFETY: the slot's buffer is ours and has skip + len bytes.
                unsafe { channel.reply(unique, 0, &[], (at.wrapping_add(skip), len)) }
            }
            Transport::Ring { entries, .. } => {
                if skip > 0 {
                    // SAFETY: as above; the two ranges may overlap.
                    unsafe { std::ptr::copy(at.wrapping_add(skip), at, len) };
                }
                debug_assert!(len <= entries.payload_len());
                entries.reply(index, unique, 0, len);
            }
        }
    }

    /// The eventfd: answers of the clerk, an open gate, a call of the herd, entries that came back on a former worker. Returns
    /// requests that ended.
    fn signalled(&mut self, uring: &mut Uring, place: Token) -> u32 {
        let before = self.replied;
        for (index, answer) in self.desk.take() {
            self.tasks -= 1;
            self.answered(uring, place, index, answer);
        }
        for index in std::mem::take(&mut self.deferred) {
            self.start(uring, place, index);
        }
        self.take_returned();
        if let Transport::Channel { herd, ready, called, leads, .. } = &mut self.transport
            && !self.leaving
            && !*leads
        {
            herd.roused(self.index);
            *ready = true;
            *called = true;
        }
        if self.leaving {
            self.end_listening(uring, place);
        }
        self.flight_changed();
        self.replied - before
    }

    /// Whether nothing that is under way can ring the eventfd.
    fn bell_is_over(&self) -> bool {
        self.tasks == 0 && self.deferred.is_empty() && self.in_flight() == 0 && self.has_its_entries()
    }

    /// Whether no entry is with the kernel that has to come back before this queue leaves.
    fn has_its_entries(&self) -> bool {
        match &self.transport {
            Transport::Channel { .. } => true,
            Transport::Ring { entries, .. } => !self.closing || entries.idle() == 0,
        }
    }

    /// While it leaves: ends the poll of the eventfd when nothing is to come by it.
    fn end_listening(&mut self, uring: &mut Uring, place: Token) {
        if self.bell_listen == Listen::On && self.bell_is_over() {
            uring.cancel(place.with(0, OP_BELL));
            self.bell_listen = Listen::Ending;
        }
    }
}

impl Queue for FuseQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.handle.is_none() {
            self.handle = Some(self.shared.disk().attach(uring));
        }
        (self.leaving, self.closing) = (false, false);
        if self.bell_listen == Listen::Off {
            uring.poll(self.eventfd.fd(), place.with(0, OP_BELL));
            self.bell_listen = Listen::On;
        }
        match &mut self.transport {
            Transport::Channel { ready, .. } => *ready = true,
            Transport::Ring { entries, .. } => {
                for index in 0..self.slots.len() as u16 {
                    if entries.at(index) == At::New {
                        entries.submit(index, uring, place.with(index, OP_ENTRY));
                    }
                }
            }
        }
        self.take_returned();
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        self.turn_bytes = 0;
        let taken = match &self.transport {
            Transport::Channel { .. } => self.take_channel(uring, place, budget),
            Transport::Ring { .. } => self.take_ring(uring, place, budget),
        };
        self.flight_changed();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        match token.op {
            OP_IO => {
                let before = self.replied;
                let slot = &mut self.slots[usize::from(token.slot)];
                let Some(handle) = &self.handle else { return 0 };
                if let Step::Done(result) = handle.resume(uring, &mut slot.io, token, result) {
                    self.io_done(uring, token, token.slot, result);
                    self.flight_changed();
                    if self.leaving {
                        self.end_listening(uring, token);
                    }
                }
                self.replied - before
            }
            OP_ENTRY => {
                self.entry_back(token.slot, result);
                if self.leaving {
                    self.end_listening(uring, token);
                }
                0
            }
            OP_READABLE => {
                QueueStats::add(&self.stats.kicks, 1);
                if let Transport::Channel { ready, listen, .. } = &mut self.transport {
                    *listen = Listen::Off;
                    *ready = !self.leaving;
                }
                0
            }
            _ => {
                if !more {
                    self.bell_listen = Listen::Off;
                    // The kernel may end it by itself, and while it leaves answers may still come.
                    if !self.leaving || !self.bell_is_over() {
                        uring.poll(self.eventfd.fd(), token.with(0, OP_BELL));
                        self.bell_listen = Listen::On;
                    }
                }
                self.signalled(uring, token)
            }
        }
    }

    fn publish(&mut self) -> bool {
        let replied = std::mem::take(&mut self.replied);
        QueueStats::add(&self.stats.notifications, u64::from(replied));
        // Each reply may wake a task that waited for it.
        replied > 0
    }

    fn has_work(&self) -> bool {
        match &self.transport {
            Transport::Channel { ready, .. } => {
                (*ready || self.seen.get()) && !self.gone && !self.free.is_empty()
            }
            Transport::Ring { ready, .. } => !ready.is_empty(),
        }
    }

    fn wake(&mut self) {}

    fn look(&self) -> bool {
        match &self.transport {
            Transport::Channel { channel, leads: true, listen: Listen::Off, .. } => {
                if !self.has_work() && !self.gone && !self.free.is_empty() {
                    self.seen.set(channel.is_readable());
                }
                self.has_work()
            }
            _ => self.has_work(),
        }
    }

    fn sleep(&mut self, uring: &mut Uring, place: Token, _after: u32) -> bool {
        self.listen(uring, place);
        self.has_work()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.leaving = true;
        self.closing = self.shared.has_ended();
        if let Transport::Channel { herd, ready, listen, leads, .. } = &mut self.transport {
            *ready = false;
            *leads = false;
            if *listen == Listen::On {
                uring.cancel(place.with(0, OP_READABLE));
                *listen = Listen::Ending;
            }
            herd.pass(self.index);
        }
        self.end_listening(uring, place);
    }

    fn at_rest(&self) -> bool {
        let transport = match &self.transport {
            Transport::Channel { listen, .. } => *listen == Listen::Off,
            Transport::Ring { .. } => self.has_its_entries(),
        };
        transport && self.bell_listen == Listen::Off && self.tasks == 0 && self.in_flight() == 0
    }

    fn leave(&mut self, uring: &mut Uring) {
        if let Some(handle) = self.handle.take() {
            handle.detach(uring);
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation on the ring at a time.
        self.slots.len() as u32
    }

    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        match &mut self.transport {
            Transport::Channel { .. } => None,
            Transport::Ring { entries, .. } => entries.leave(),
        }
    }
}

impl Drop for FuseQueue {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a queue of a mount dropped with requests in flight");
        if let Transport::Ring { entries, .. } = &mut self.transport
            && entries.idle() > 0
        {
            // `FuseShared::end` was not called before it was stopped.
            tracing::error!("a ring queue ended with entries at the kernel; their memory is kept");
            self.buffers.leak();
            entries.leak();
        }
    }
}
