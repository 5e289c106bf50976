//! A virtio-blk queue: requests from a virtqueue, to a disk, and back.
//!
//! The session thread makes the queue when the guest starts a ring. One worker at a time owns it. A
//! request has a fixed slot from [`take`](Queue::take) until its status byte is written. Then its
//! used element is staged, and [`publish`](Queue::publish) makes the whole batch visible.
//!
//! What must never happen: a request completes twice or never; guest memory is accessed after
//! [`at_rest`](Queue::at_rest) returned true.

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
use vshunt_engine::{EventFd, LimitCell, LimitGate, Meter, PollEvent, PollState, RequestKind};
use vshunt_engine::{Queue, QueueStats, State, Token, Uring};
use vshunt_virtqueue::{RingParts, VirtqueueOwner, Vring};

use vshunt_types::convert::len_u32;

/// Operations in a token: the poll of the kick descriptor, and an operation of a request.
const OP_KICK: u8 = 1;
const OP_IO: u8 = 2;
/// The timer of a queue that waits for its limits.
const OP_LIMIT: u8 = 3;
/// How many completed requests are published before all that wait are taken: half of those that
/// wait, and at least this many. Larger batches cost less. With more than half of them, guest and
/// worker would take turns instead of working at the same time.
const BATCH_MIN: u32 = 16;
/// Bytes of data after which a queue takes no more requests in this iteration, so that other queues
/// are served. A backend in memory copies the data before it returns, the longest requests in parts
/// (`block/handle/split`).
const TAKE_BYTES: u64 = 4 << 20;
/// Bytes of the longest read or write. Descriptors may name the same memory many times. Without a
/// limit, one request could occupy a shared worker for minutes. The block layers of guests stay far
/// below.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// Bytes that GET_ID returns at most (Virtio 1.3, 5.2.6).
pub const SERIAL_MAX: usize = 20;

/// State that all queues of an export share. The session thread may change the atomic fields at any
/// time.
pub(super) struct BlkShared {
    /// The backend.
    pub(super) disk: Arc<Disk>,
    /// What GET_ID returns, padded with zeroes.
    pub(super) serial: [u8; SERIAL_MAX],
    /// Writes of the guest are refused.
    pub(super) readonly: bool,
    /// A write completes only when it is stable: the guest has no write cache, or switched it off.
    pub(super) writethrough: AtomicBool,
    /// Whether `writethrough` is set only because a former daemon served the guest, and its choice
    /// is not known. The first flush shows that the guest uses a write cache.
    pub(super) writethrough_until_flush: AtomicBool,
    /// Largest WRITE_ZEROES, in sectors, as the configuration space says.
    pub(super) max_zero_sectors: u32,
    /// Largest DISCARD, in sectors, as the configuration space says.
    pub(super) max_discard_sectors: u32,
    /// The limits of the export.
    pub(super) limits: Arc<LimitCell>,
}

/// A request in flight. Its buffers lie in guest memory; `io` refers to them until the request is
/// complete.
struct RequestSlot {
    io: Io,
    status: *mut u8,
    head: Head,
    kind: RequestKind,
    /// When it was taken; see [`Meter::stamp`].
    taken: u64,
}

/// One virtqueue of a disk.
#[repr(align(128))]
pub(super) struct BlkQueue {
    // Used by the owning worker.
    vring: DeviceRing,
    mem: Arc<GuestMemory>,
    chain: Chain,
    data: Vec<Seg>,
    slots: Box<[RequestSlot]>,
    free: Vec<u16>,
    handle: Option<DiskHandle>,
    listen: PollState,
    staged: u32,
    /// How many staged requests are published at once.
    batch: u32,
    /// Whether the guest was notified since the last call of `publish`.
    notified: bool,
    /// Bytes of data of the requests that were taken in this iteration.
    taken_bytes: u64,
    replays: Vec<Replay>,
    limit: LimitGate,
    meter: Meter,
    broken: bool,
    log: Option<Arc<DirtyLog>>,
    /// While there is a dirty log: the buffers that the request of each slot may write to.
    writable: Box<[Vec<Seg>]>,
    kick: Arc<OwnedFd>,
    call: Option<Arc<EventFd>>,
    // Used by any thread.
    shared: Arc<BlkShared>,
    stats: Arc<QueueStats>,
    // Never changed.
    name: String,
    on_broken: Box<dyn Fn(&str) + Send>,
}

// SAFETY: the raw pointers (ring areas, status bytes, data segments) point into mappings that `mem`
// and the owner of the vring keep alive on any thread. Only `handle` is bound to a thread, and it
// is None while the queue moves (`leave`).
unsafe impl Send for BlkQueue {}

impl BlkQueue {
    /// Makes a queue that is not yet on a worker.
    pub(super) fn new(parts: RingParts, shared: Arc<BlkShared>, index: u16) -> Self {
        let size = parts.vring.size();
        let slots = (0..size)
            .map(|_| RequestSlot {
                io: Io::default(),
                status: std::ptr::null_mut(),
                head: Head { id: 0, descs: 0 },
                kind: RequestKind::Other,
                taken: 0,
            })
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
            batch: BATCH_MIN,
            notified: false,
            taken_bytes: 0,
            replays,
            limit: LimitGate::new(shared.limits.clone(), index),
            meter: parts.stats.latency.meter(),
            broken: false,
            writable: writable_buffers(size, parts.log.as_ref()),
            log: parts.log,
            kick: parts.kick,
            call: parts.call,
            shared,
            stats: parts.stats,
            name: parts.name,
            on_broken: parts.on_broken,
        }
    }

    /// Returns the number of requests in flight.
    fn in_flight(&self) -> u32 {
        len_u32(self.slots.len() - self.free.len())
    }

    /// Publishes the staged used elements, and notifies the guest if it wants to be notified.
    fn publish_staged(&mut self) {
        if self.staged > 0 {
            self.staged = 0;
            self.meter.publish();
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

    /// Marks the ring as broken: the queue takes no more requests, and the front end is told. Other
    /// queues are not affected.
    fn break_off(&mut self, reason: &dyn std::fmt::Display) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(&reason.to_string());
    }

    /// Takes the requests that a former daemon left in flight, before any new one. They do not wait
    /// for limits, because they were taken before.
    fn replay(&mut self, uring: &mut Uring, base: Token) -> u32 {
        let mut taken = 0;
        while let Some(replay) = self.replays.pop() {
            match self.vring.replay(&self.mem, &replay, &mut self.chain) {
                Ok(()) => {
                    let parsed = self.parse();
                    self.charge(&parsed);
                    self.begin(uring, base, &parsed);
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

    /// Takes up to `budget` requests: those of a former daemon, then new ones.
    #[inline]
    fn take_all(&mut self, uring: &mut Uring, base: Token, budget: u32) -> u32 {
        let mut taken = 0;
        let limited = self.limit.begin();
        if !self.replays.is_empty() {
            taken += self.replay(uring, base);
            if self.broken {
                return taken;
            }
        }
        while taken < budget && self.taken_bytes < TAKE_BYTES && !self.free.is_empty() {
            match self.vring.pop(&self.mem, &mut self.chain) {
                Ok(true) => {
                    let parsed = self.parse();
                    if limited && !self.may_begin(&parsed) {
                        self.vring.unpop(self.chain.head);
                        self.limit.hold(uring, base.with(0, OP_LIMIT), &self.stats);
                        break;
                    }
                    self.begin(uring, base, &parsed);
                }
                Ok(false) => break,
                Err(broken) => {
                    self.break_off(&broken);
                    break;
                }
            }
            taken += 1;
            if self.staged == 1 {
                self.batch = (u32::from(self.vring.seen_waiting()) / 2).max(BATCH_MIN);
            } else if self.staged >= self.batch {
                self.publish_staged();
            }
        }
        taken
    }

    fn arm_kick(&mut self, uring: &mut Uring, base: Token) {
        self.listen.start(uring, self.kick.as_raw_fd(), base.with(0, OP_KICK));
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
        // A notification that was sent to the old descriptor may be lost for a driver that waits on
        // the new one.
        self.notify();
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>) {
        debug_assert_eq!(self.in_flight(), 0);
        self.vring.set_used_log(used);
        self.writable = writable_buffers(self.vring.size(), log.as_ref());
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
    fn arm(&mut self, uring: &mut Uring, base: Token) {
        if self.handle.is_none() {
            self.handle = Some(self.shared.disk.attach(uring));
        }
        self.arm_kick(uring, base);
    }

    fn take(&mut self, uring: &mut Uring, base: Token, budget: u32) -> u32 {
        if self.broken {
            return 0;
        }
        self.taken_bytes = 0;
        self.meter.batch();
        self.handle.iter().for_each(DiskHandle::begin_batch);
        let taken = self.take_all(uring, base, budget);
        self.handle.iter().for_each(DiskHandle::end_batch);
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
            OP_LIMIT => {
                self.limit.expired(&self.stats);
                0
            }
            _ => {
                self.kicked(uring, token, result, more);
                0
            }
        }
    }

    fn publish(&mut self) -> bool {
        self.publish_staged();
        std::mem::take(&mut self.notified)
    }

    fn has_work(&self) -> bool {
        // If all slots are in use, only a guest that offers descriptors twice has more requests.
        // They wait for a completion.
        let may_take = !self.broken && !self.free.is_empty() && !self.limit.is_held();
        may_take && (self.vring.has_avail() || !self.replays.is_empty())
    }

    fn wake(&mut self) {
        self.vring.disable_kick();
    }

    fn sleep(&mut self, _uring: &mut Uring, _place: Token, after: u32) -> bool {
        if self.limit.is_held() {
            // The timer wakes the worker, which then looks at the queue. No kick is needed until
            // then.
            return false;
        }
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.broken && self.vring.enable_kick_after(after) && !self.free.is_empty()
    }

    fn disarm(&mut self, uring: &mut Uring, base: Token) {
        self.listen.end(uring, base.with(0, OP_KICK));
        self.limit.disarm(uring, base.with(0, OP_LIMIT));
    }

    fn at_rest(&self) -> bool {
        self.in_flight() == 0 && self.listen == PollState::Off && !self.limit.is_held()
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

/// Returns room for the writable buffers of each slot, if there is a dirty log.
fn writable_buffers(size: u16, log: Option<&Arc<DirtyLog>>) -> Box<[Vec<Seg>]> {
    if log.is_some() { (0..size).map(|_| Vec::new()).collect() } else { Box::default() }
}

impl Drop for BlkQueue {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "{} dropped with requests in flight", self.name);
    }
}
