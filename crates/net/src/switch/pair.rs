//! A guest's queue pair on a switch: frames go from guest to guest, memory to memory, with one
//! copy.
//!
//! A frame that the guest sends is described, and the description goes to the receiver's queue
//! ([`tx`], [`sender`](super::sender)). The receiver's worker copies the bytes ([`rx`]) and returns
//! the description, which completes the request. Another worker may be copying from this guest's
//! memory, so the pair is not at rest before all descriptions were returned.

mod rx;
mod tx;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_engine::{Queue, QueueStats, Token, Uring};
use vshunt_virtqueue::{FrameFormat, QueuePair, RingParts, VirtqueueOwner, Vring};

use self::rx::Rx;
use self::tx::Tx;
use super::port_guard::PortGuard;
use super::sender::Sender;
use crate::counters::NetStats;
use crate::frames::Direction;
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::PairLimits;
use crate::pair_rings::PairRings;
use crate::rx_buffers::RxBuffers;

/// See the module.
#[repr(align(128))]
pub struct SwitchPair {
    rings: PairRings<Rx, Tx>,
    sender: Sender,
    /// The offloads that this guest accepts, as feature bits. Its session thread may change it at
    /// any time.
    accepted: Arc<AtomicU64>,
    // Used by any thread.
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
}

impl SwitchPair {
    /// Makes pair `index` of a port, without rings.
    pub fn new(
        guard: Arc<PortGuard>,
        index: u16,
        accepted: Arc<AtomicU64>,
        limits: PairLimits,
        stats: Arc<QueueStats>,
        net: Arc<NetStats>,
    ) -> Self {
        Self { rings: PairRings::new(limits), sender: Sender::new(guard, index), accepted, stats, net }
    }

    /// Completes the requests that are finished. Returns their number.
    fn reap(&mut self) -> u32 {
        let done = self.rings.tx.as_mut().map_or(0, |tx| tx.reap(&mut self.sender));
        self.stats.in_flight.store(self.rings.tx.as_ref().map_or(0, Tx::in_flight), Relaxed);
        done
    }
}

impl VirtqueueOwner for SwitchPair {
    fn ring(&mut self, nth: u16) -> Option<&mut dyn Vring> {
        self.rings.ring(Direction::of(nth))
    }

    fn remove(&mut self, nth: u16, discard: bool) -> (u32, bool) {
        self.rings.remove(Direction::of(nth), discard)
    }

    fn is_broken(&self) -> bool {
        self.rings.is_broken()
    }

    fn is_used(&self) -> bool {
        self.rings.is_used()
    }

    fn pair(&mut self) -> Option<&mut dyn QueuePair> {
        Some(self)
    }
}

impl QueuePair for SwitchPair {
    fn add(&mut self, nth: u16, parts: RingParts, format: FrameFormat) {
        let virtqueue = NetVirtqueue::new(parts, self.net.clone());
        match Direction::of(nth) {
            Direction::Receive => {
                self.rings.rx = Some(Rx::new(RxBuffers::new(virtqueue, format), self.accepted.clone()))
            }
            Direction::Transmit => {
                self.sender.set_slots(virtqueue.vring.size());
                self.rings.tx = Some(Tx::new(virtqueue, format.header));
            }
        }
    }

    /// Waiting frames belong to their senders (the pair's port queue is closed), except for
    /// segments of a frame.
    fn set_aside(&mut self) {
        if let Some(rx) = &mut self.rings.rx {
            rx.drop_segments();
        }
    }
}

impl Queue for SwitchPair {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.rings.arm(uring, place);
        self.sender.arm(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let PairRings { rx, tx, limits } = &mut self.rings;
        let (to_guest, from_guest) = limits.begin();
        let mut taken = 0;
        if let Some(rx) = rx {
            let queue = &self.sender.queue;
            taken += rx.take(queue, budget, to_guest, &self.stats);
            if rx.to.virtqueue.broken && queue.is_open() {
                queue.close();
            }
        }
        if let Some(tx) = tx {
            self.sender.reap_returns();
            tx.reap(&mut self.sender);
            taken += tx.take(uring, place, &mut self.sender, budget, from_guest);
            self.sender.watch(uring, place);
        }
        self.reap();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if !self.sender.complete(uring, token, more) {
            self.rings.complete(uring, token, result, more, &self.stats);
        }
        self.reap()
    }

    fn publish(&mut self) -> bool {
        self.rings.publish()
    }

    fn has_work(&self) -> bool {
        let queue = &self.sender.queue;
        // A port queue that was opened again has to be closed again.
        let open = |rx: &Rx| rx.to.virtqueue.broken && queue.is_open();
        let PairRings { rx, tx, limits } = &self.rings;
        rx.as_ref().is_some_and(|rx| rx.has_work(queue) || open(rx))
            || tx.as_ref().is_some_and(|tx| queue.has_returns() || (!limits.tx.is_held() && tx.has_work()))
    }

    fn wake(&mut self) {
        self.sender.queue.wake();
        self.rings.wake();
    }

    fn sleep(&mut self, _: &mut Uring, _: Token, after: u32) -> bool {
        let queue = &self.sender.queue;
        queue.sleep();
        let PairRings { rx, tx, limits } = &mut self.rings;
        // Both have to run; `||` would skip the second one.
        let rx = rx.as_mut().is_some_and(|rx| rx.sleep(queue));
        // While it is held its timer wakes the worker, and no kick is needed.
        let held = limits.tx.is_held();
        let tx = tx.as_mut().is_some_and(|tx| (!held && tx.sleep(after)) || queue.has_returns());
        rx || tx
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.rings.disarm(uring, place);
        self.sender.disarm(uring, place);
        self.reap();
    }

    fn at_rest(&self) -> bool {
        self.rings.limits.at_rest()
            && self.sender.at_rest()
            && self.rings.rx.as_ref().is_none_or(|rx| rx.to.virtqueue.at_rest())
            && self.rings.tx.as_ref().is_none_or(|tx| tx.virtqueue.at_rest())
    }

    fn leave(&mut self, _: &mut Uring) {
        self.sender.left();
    }

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

impl Drop for SwitchPair {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a queue pair dropped with frames in flight");
    }
}
