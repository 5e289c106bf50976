//! The two virtqueues of a pair, with everything that does not depend on the network behind them.

use vshunt_engine::{QueueStats, Token, Uring};
use vshunt_virtqueue::Vring;

use crate::frames::Direction;
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::PairLimits;

/// Operations of a token. The operations of a pair itself start at [`OP_OWN`].
const OP_RX_KICK: u8 = 1;
const OP_TX_KICK: u8 = 2;
const OP_RX_LIMIT: u8 = 3;
const OP_TX_LIMIT: u8 = 4;
pub(crate) const OP_OWN: u8 = 5;

/// One direction of a pair.
pub(crate) trait PairSide {
    fn virtqueue(&self) -> &NetVirtqueue;
    fn virtqueue_mut(&mut self) -> &mut NetVirtqueue;
    /// Stops the ring, as [`VirtqueueOwner::remove`](vshunt_virtqueue::VirtqueueOwner::remove)
    /// does. Returns its base.
    fn stop(self, discard: bool) -> u32;
}

/// Both directions of a pair. A direction is `None` while the guest has not started its ring.
pub(crate) struct PairRings<R, T> {
    pub(crate) rx: Option<R>,
    pub(crate) tx: Option<T>,
    pub(crate) limits: PairLimits,
}

impl<R: PairSide, T: PairSide> PairRings<R, T> {
    /// Makes a pair without rings.
    pub(crate) fn new(limits: PairLimits) -> Self {
        Self { rx: None, tx: None, limits: limits.with_ops(OP_RX_LIMIT, OP_TX_LIMIT) }
    }

    /// See [`VirtqueueOwner::remove`](vshunt_virtqueue::VirtqueueOwner::remove).
    pub(crate) fn remove(&mut self, direction: Direction, discard: bool) -> (u32, bool) {
        let (gate, base) = match direction {
            Direction::Receive => (&self.limits.rx, self.rx.take().map(|rx| rx.stop(discard))),
            Direction::Transmit => (&self.limits.tx, self.tx.take().map(|tx| tx.stop(discard))),
        };
        gate.withdraw();
        (base.unwrap_or(0), self.rx.is_some() || self.tx.is_some())
    }

    fn virtqueues(&mut self) -> [Option<&mut NetVirtqueue>; 2] {
        [self.rx.as_mut().map(R::virtqueue_mut), self.tx.as_mut().map(T::virtqueue_mut)]
    }

    /// See [`VirtqueueOwner::is_broken`](vshunt_virtqueue::VirtqueueOwner::is_broken).
    pub(crate) fn is_broken(&self) -> bool {
        self.rx.as_ref().is_some_and(|rx| rx.virtqueue().broken)
            || self.tx.as_ref().is_some_and(|tx| tx.virtqueue().broken)
    }

    /// See [`VirtqueueOwner::is_used`](vshunt_virtqueue::VirtqueueOwner::is_used).
    pub(crate) fn is_used(&self) -> bool {
        self.rx.is_some() || self.tx.as_ref().is_some_and(|tx| !tx.virtqueue().discards)
    }

    /// See [`VirtqueueOwner::ring`](vshunt_virtqueue::VirtqueueOwner::ring).
    pub(crate) fn ring(&mut self, direction: Direction) -> Option<&mut dyn Vring> {
        let [rx, tx] = self.virtqueues();
        let virtqueue = match direction {
            Direction::Receive => rx,
            Direction::Transmit => tx,
        };
        virtqueue.map(|virtqueue| virtqueue as &mut dyn Vring)
    }

    /// Starts to poll the kick descriptors.
    pub(crate) fn arm(&mut self, uring: &mut Uring, place: Token) {
        for (virtqueue, op) in self.virtqueues().into_iter().zip([OP_RX_KICK, OP_TX_KICK]) {
            virtqueue.into_iter().for_each(|virtqueue| virtqueue.arm(uring, place.with(0, op)));
        }
    }

    /// Stops polling the kick descriptors, and ends the timers of limits.
    pub(crate) fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.limits.disarm(uring, place);
        for (virtqueue, op) in self.virtqueues().into_iter().zip([OP_RX_KICK, OP_TX_KICK]) {
            virtqueue.into_iter().for_each(|virtqueue| virtqueue.disarm(uring, place.with(0, op)));
        }
    }

    /// Handles a completion of the polls of kick descriptors, or of a timer of limits.
    pub(crate) fn complete(
        &mut self,
        uring: &mut Uring,
        token: Token,
        result: i32,
        more: bool,
        stats: &QueueStats,
    ) {
        if let OP_RX_LIMIT | OP_TX_LIMIT = token.op {
            return self.limits.expired(token.op, stats);
        }
        let [rx, tx] = self.virtqueues();
        let virtqueue = if token.op == OP_RX_KICK { rx } else { tx };
        virtqueue.into_iter().for_each(|virtqueue| virtqueue.kicked(uring, token, result, more));
    }

    /// Publishes used elements. Returns whether the guest was notified.
    pub(crate) fn publish(&mut self) -> bool {
        // `map` runs both; `||` would skip the second one.
        let [rx, tx] = self.virtqueues().map(|virtqueue| virtqueue.is_some_and(NetVirtqueue::publish));
        rx || tx
    }

    /// Suppresses kicks.
    pub(crate) fn wake(&mut self) {
        self.virtqueues().into_iter().flatten().for_each(|virtqueue| virtqueue.vring.disable_kick());
    }
}
