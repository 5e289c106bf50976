//! A virtio-blk queue: requests from a virtqueue, to a disk, and back.
//!
//! Made by `frontend` when the guest starts a ring, then owned by one worker at a time. A request sits in a
//! fixed slot from [`take`](Queue::take) until its status byte is written; then its used element is staged and
//! [`publish`](Queue::publish) shows the whole batch. What must never happen: a request completed twice or
//! never, or guest memory touched after [`at_rest`](Queue::at_rest) said that all is over.

mod request;

use std::any::Any;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::GuestMemory;
use virtio::ring::{Chain, DeviceRing, Head, Seg, UsedLog};
use vshunt_block::{Disk, DiskHandle, Io, Step};
use vshunt_engine::{EventFd, PollEvent, PollState};
use vshunt_engine::{Queue, QueueStats, State, Token, Uring};
use vshunt_virtqueue::{RingParts, VirtqueueOwner, Vring};

use crate::convert::len_u32;

/// Operations of a token.
const OP_KICK: u8 = 1;
const OP_IO: u8 = 2;
/// Requests that complete at once before the guest is shown them, so that it works on while we do: half of what waits,
/// from here on. More at a time cost less, and more than half would have guest and server take turns.
const SHOW_MIN: u32 = 16;
/// Data of the requests taken in one turn from which on the neighbours have theirs: a backend in memory copies it
/// before it returns. It copies the longest requests in parts (`block/handle/split`).
const TURN_BYTES: u64 = 4 << 20;
/// Longest read or write. Descriptors may name the same memory again and again; without a bound one request could
/// keep a worker that others share busy for minutes. Guests' block layers stay far below.
const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// What GET_ID returns at most (Virtio 1.3, 5.2.6).
pub const SERIAL_MAX: usize = 20;

/// What an export's queues share; the frontend may change the atomic parts at any time.
pub(super) struct BlkShared {
    /// The backend.
    pub(super) disk: Arc<Disk>,
    /// What GET_ID returns, padded with zeroes.
    pub(super) serial: [u8; SERIAL_MAX],
    /// The guest's writes are refused.
    pub(super) readonly: bool,
    /// A write completes only when it is stable: the guest was told of no cache, or switched it off.
    pub(super) writethrough: AtomicBool,
    /// Whether that is only because we do not know what the guest chose when a former daemon served it; its
    /// first flush says that it believes in a cache.
    pub(super) unsure: AtomicBool,
    /// Largest WRITE_ZEROES, in sectors, as the configuration space says.
    pub(super) max_zero_sectors: u32,
    /// Largest DISCARD, likewise.
    pub(super) max_discard_sectors: u32,
}

/// A request under way. Its buffers are the guest's; `io` names them until the step is done.
struct Slot {
    io: Io,
    status: *mut u8,
    head: Head,
}

/// One virtqueue of a disk.
pub(super) struct BlkQueue {
    // The owning worker's.
    vring: DeviceRing,
    mem: Arc<GuestMemory>,
    chain: Chain,
    data: Vec<Seg>,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    handle: Option<DiskHandle>,
    listen: PollState,
    staged: u32,
    /// How many are staged when they are shown.
    show_at: u32,
    /// Since the worker asked last.
    notified: bool,
    /// Data of the requests taken this turn.
    turn_bytes: u64,
    replays: Vec<Replay>,
    broken: bool,
    log: Option<Arc<DirtyLog>>,
    /// While there is a log: where the request of each slot may write.
    noted: Box<[Vec<Seg>]>,
    kick: Arc<OwnedFd>,
    call: Option<Arc<EventFd>>,
    // Any thread's.
    shared: Arc<BlkShared>,
    stats: Arc<QueueStats>,
    // Fixed.
    name: String,
    on_broken: Box<dyn Fn(&str) + Send>,
}

// SAFETY: the raw pointers (ring areas, status bytes, data segments) lead into mappings that `mem` and the
// vring's owner keep alive wherever the queue goes; nothing in it is tied to a thread but `handle`, which is
// None while it moves (`leave`).
unsafe impl Send for BlkQueue {}

impl BlkQueue {
    /// A queue that is not yet on a worker.
    pub(super) fn new(parts: RingParts, shared: Arc<BlkShared>) -> Self {
        let size = parts.vring.size();
        let slots = (0..size)
            .map(|_| Slot { io: Io::default(), status: std::ptr::null_mut(), head: Head { id: 0, descs: 0 } })
            .collect();
        let mut replays = parts.replays;
        replays.reverse();
        Self {
            vring: parts.vring,
            mem: parts.mem,
            chain: Chain::default(),
            data: Vec::with_capacity(16),
            slots,
            free: (0..size).rev().collect(),
            handle: None,
            listen: PollState::Off,
            staged: 0,
            show_at: SHOW_MIN,
            notified: false,
            turn_bytes: 0,
            replays,
            broken: false,
            noted: noted(size, parts.log.as_ref()),
            log: parts.log,
            kick: parts.kick,
            call: parts.call,
            shared,
            stats: parts.stats,
            name: parts.name,
            on_broken: parts.on_broken,
        }
    }

    fn in_flight(&self) -> u32 {
        len_u32(self.slots.len() - self.free.len())
    }

    /// Makes what is staged visible, and notifies the guest if it asked.
    fn show(&mut self) {
        if self.staged > 0 {
            self.staged = 0;
            if self.vring.publish() {
                self.notify();
                self.notified = true;
            }
        }
    }

    fn notify(&mut self) {
        if let Some(call) = &self.call {
            call.signal();
            QueueStats::add(&self.stats.notifications, 1);
        }
    }

    /// The guest broke the ring: nothing more is taken, the front-end is told, other queues go on.
    fn break_off(&mut self, reason: &dyn std::fmt::Display) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(&reason.to_string());
    }

    /// Takes what a former daemon left in flight, before anything new.
    fn replay(&mut self, uring: &mut Uring, place: Token) -> u32 {
        let mut taken = 0;
        while let Some(replay) = self.replays.pop() {
            match self.vring.replay(&self.mem, &replay, &mut self.chain) {
                Ok(()) => {
                    self.begin(uring, place);
                    taken += 1;
                }
                Err(broken) => {
                    self.break_off(&broken);
                    self.replays.clear();
                }
            }
        }
        taken
    }

    fn arm_kick(&mut self, uring: &mut Uring, place: Token) {
        self.listen.start(uring, self.kick.as_raw_fd(), place.with(0, OP_KICK));
    }

    fn kicked(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) {
        QueueStats::add(&self.stats.kicks, 1);
        match self.listen.on_event(result, more) {
            PollEvent::Nothing => {}
            PollEvent::Restart => self.arm_kick(uring, token),
            PollEvent::Useless => self.break_off(&"its kick descriptor cannot be waited for"),
        }
    }

    #[inline]
    fn flight_changed(&self) {
        self.stats.in_flight.store(self.in_flight(), Relaxed);
    }
}

impl Vring for BlkQueue {
    fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        self.call = call;
        // Whoever waits on the new descriptor may have missed a notification sent to the old one.
        self.notify();
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>) {
        debug_assert_eq!(self.in_flight(), 0);
        self.vring.set_used_log(used);
        self.noted = noted(self.vring.size(), log.as_ref());
        self.log = log;
    }

    fn allow_kicks(&mut self) {
        self.vring.allow_kicks();
    }
}

impl VirtqueueOwner for BlkQueue {
    fn ring(&mut self, _nth: u16) -> Option<&mut dyn Vring> {
        Some(self)
    }

    fn remove(&mut self, _nth: u16, _discard: bool) -> (u32, bool) {
        (self.vring.base(), false)
    }

    fn is_broken(&self) -> bool {
        self.broken
    }
}

impl Queue for BlkQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.handle.is_none() {
            self.handle = Some(self.shared.disk.attach(uring));
        }
        self.arm_kick(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        if self.broken {
            return 0;
        }
        let mut taken = 0;
        self.turn_bytes = 0;
        if !self.replays.is_empty() {
            taken += self.replay(uring, place);
            if self.broken {
                return taken;
            }
        }
        while taken < budget && self.turn_bytes < TURN_BYTES && !self.free.is_empty() {
            match self.vring.pop(&self.mem, &mut self.chain) {
                Ok(true) => self.begin(uring, place),
                Ok(false) => break,
                Err(broken) => {
                    self.break_off(&broken);
                    break;
                }
            }
            taken += 1;
            if self.staged == 1 {
                self.show_at = (u32::from(self.vring.seen_waiting()) / 2).max(SHOW_MIN);
            } else if self.staged >= self.show_at {
                self.show();
            }
        }
        self.flight_changed();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        match token.op {
            OP_IO => {
                let slot = self.slots.get_mut(usize::from(token.slot));
                let (Some(slot), Some(handle)) = (slot, &self.handle) else { return 0 };
                match handle.resume(uring, &mut slot.io, token, result) {
                    Step::Wait => 0,
                    Step::Done(result) => {
                        self.finish(token.slot, result);
                        self.flight_changed();
                        1
                    }
                }
            }
            _ => {
                self.kicked(uring, token, result, more);
                0
            }
        }
    }

    fn publish(&mut self) -> bool {
        self.show();
        std::mem::take(&mut self.notified)
    }

    fn has_work(&self) -> bool {
        // With every slot taken, more can only come from a guest that offers descriptors twice: not before
        // a completion.
        !self.broken && !self.free.is_empty() && (self.vring.has_avail() || !self.replays.is_empty())
    }

    fn wake(&mut self) {
        self.vring.disable_kick();
    }

    fn sleep(&mut self, _ring: &mut Uring, _place: Token, after: u32) -> bool {
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.broken && self.vring.enable_kick_after(after) && !self.free.is_empty()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.listen.end(uring, place.with(0, OP_KICK));
    }

    fn at_rest(&self) -> bool {
        self.in_flight() == 0 && self.listen == PollState::Off
    }

    fn leave(&mut self, uring: &mut Uring) {
        if let Some(handle) = self.handle.take() {
            handle.detach(uring);
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation on the ring at a time.
        len_u32(self.slots.len())
    }

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

fn noted(size: u16, log: Option<&Arc<DirtyLog>>) -> Box<[Vec<Seg>]> {
    if log.is_some() { (0..size).map(|_| Vec::new()).collect() } else { Box::default() }
}

impl Drop for BlkQueue {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "{} dropped with requests in flight", self.name);
    }
}
