//! A guest's queue pair on a queue of a tap. The tap reads and writes the guest's buffers, in
//! batches on the worker's io_uring. The daemon copies no frame, with the exceptions that [`rx`]
//! lists.

mod rx;
mod tx;

use std::any::Any;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use virtio::net::NET_HDR_BYTES;
use vshunt_engine::{Queue, QueueStats, Token, Uring};
use vshunt_virtqueue::{FrameFormat, QueuePair, RingParts, VirtqueueOwner, Vring};

use self::rx::Rx;
use self::tx::Tx;
use crate::counters::NetStats;
use crate::frames::Direction;
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::{Allowance, PairLimits};
use crate::pair_rings::{OP_OWN, PairRings};
use crate::rx_buffers::RxBuffers;
use crate::tap_file::TapFile;
use vshunt_tap::TapQueue;

/// Operations of a token.
const OP_POLL: u8 = OP_OWN;
const OP_READ: u8 = OP_OWN + 1;
const OP_WRITE: u8 = OP_OWN + 2;

/// See the module.
#[repr(align(128))]
pub struct TapPair {
    rings: PairRings<Rx, Tx>,
    tap: Arc<TapQueue>,
    /// The tap as a file of the owning worker's io_uring. `None` while the queue is on no worker.
    file: Option<TapFile>,
    // Used by any thread.
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
}

impl TapPair {
    /// Makes a pair without rings.
    pub fn new(tap: Arc<TapQueue>, limits: PairLimits, stats: Arc<QueueStats>, net: Arc<NetStats>) -> Self {
        Self { rings: PairRings::new(limits), tap, file: None, stats, net }
    }

    fn poll(&self, place: Token) -> (RawFd, Token) {
        (self.tap.as_raw_fd(), place.with(0, OP_POLL))
    }

    fn flight_changed(&self) {
        let rx = self.rings.rx.as_ref().map_or(0, Rx::in_flight);
        let tx = self.rings.tx.as_ref().map_or(0, Tx::in_flight);
        self.stats.in_flight.store(rx + tx, Relaxed);
    }
}

impl VirtqueueOwner for TapPair {
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

impl QueuePair for TapPair {
    fn add(&mut self, nth: u16, parts: RingParts, format: FrameFormat) {
        debug_assert!(format.header <= NET_HDR_BYTES);
        let virtqueue = NetVirtqueue::new(parts, self.net.clone());
        match Direction::of(nth) {
            Direction::Receive => self.rings.rx = Some(Rx::new(RxBuffers::new(virtqueue, format))),
            Direction::Transmit => self.rings.tx = Some(Tx::new(virtqueue, format.header)),
        }
    }

    fn set_aside(&mut self) {
        if let Some(rx) = &mut self.rings.rx {
            rx.drop_held();
        }
    }
}

impl Queue for TapPair {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.file.is_none() {
            self.file = Some(TapFile::register(uring, &self.tap));
        }
        if let Some(rx) = &mut self.rings.rx {
            rx.rx_poll.arm();
        }
        self.rings.arm(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let Some(file) = self.file else { return 0 };
        let PairRings { rx, tx, limits } = &mut self.rings;
        let (to_guest, from_guest) = limits.begin();
        let mut taken = 0;
        if let Some(rx) = rx {
            taken += rx.take(uring, file, place.with(0, OP_READ), budget, to_guest);
        }
        if let Some(tx) = tx
            && !matches!(from_guest, Allowance::Nothing)
        {
            taken += tx.take(uring, file, place.with(0, OP_WRITE), budget, from_guest);
        }
        self.flight_changed();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        let poll = self.poll(token);
        let PairRings { rx, tx, limits } = &mut self.rings;
        let done = match (token.op, rx, tx) {
            (OP_READ, Some(rx), _) => rx.complete(uring, token.slot, poll, result, &limits.rx),
            (OP_WRITE, _, Some(tx)) => tx.complete(token.slot, result),
            (OP_POLL, Some(rx), _) => {
                rx.rx_poll.polled(uring, poll, result);
                0
            }
            _ => {
                self.rings.complete(uring, token, result, more, &self.stats);
                0
            }
        };
        self.flight_changed();
        done
    }

    fn publish(&mut self) -> bool {
        self.rings.publish()
    }

    fn has_work(&self) -> bool {
        let PairRings { rx, tx, limits } = &self.rings;
        rx.as_ref().is_some_and(|rx| rx.has_work(limits.rx.is_held()))
            || tx.as_ref().is_some_and(|tx| !limits.tx.is_held() && tx.has_work())
    }

    fn wake(&mut self) {
        self.rings.wake();
    }

    fn sleep(&mut self, _: &mut Uring, _: Token, after: u32) -> bool {
        let PairRings { rx, tx, limits } = &mut self.rings;
        // Both have to run; `||` would skip the second one.
        let rx = rx.as_mut().is_some_and(|rx| rx.sleep(limits.rx.is_held()));
        // While it is held its timer wakes the worker, and no kick is needed.
        let tx = tx.as_mut().is_some_and(|tx| !limits.tx.is_held() && tx.sleep(after));
        rx || tx
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        if let Some(rx) = &mut self.rings.rx {
            rx.rx_poll.disarm(uring, place.with(0, OP_POLL));
        }
        self.rings.disarm(uring, place);
    }

    fn at_rest(&self) -> bool {
        let PairRings { rx, tx, limits } = &self.rings;
        limits.at_rest() && rx.as_ref().is_none_or(Rx::at_rest) && tx.as_ref().is_none_or(Tx::at_rest)
    }

    fn leave(&mut self, uring: &mut Uring) {
        if self.file.take().is_some() {
            TapFile::unregister(uring, &self.tap);
        }
    }

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

impl Drop for TapPair {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a queue pair dropped with frames in flight");
    }
}
