//! The two virtqueues of a pair, for what is the same whatever the frames go through.

use vshunt_engine::{Token, Uring};
use vshunt_virtqueue::Vring;

use super::line::Line;

/// Operations of a token; a pair's own begin at [`OP_OWN`].
const OP_RX_KICK: u8 = 1;
const OP_TX_KICK: u8 = 2;
pub(super) const OP_OWN: u8 = 3;

/// One of the two.
pub(super) trait Side {
    fn line(&self) -> &Line;
    fn line_mut(&mut self) -> &mut Line;
    /// It stops; see [`VirtqueueOwner::remove`](vshunt_virtqueue::VirtqueueOwner::remove). Returns where it stands.
    fn stop(self, discard: bool) -> u32;
}

/// What a guest receives by, and what it sends by.
pub(super) struct Rings<R, T> {
    pub(super) rx: Option<R>,
    pub(super) tx: Option<T>,
}

impl<R: Side, T: Side> Rings<R, T> {
    /// None of them.
    pub(super) fn new() -> Self {
        Self { rx: None, tx: None }
    }

    /// See [`VirtqueueOwner::remove`](vshunt_virtqueue::VirtqueueOwner::remove).
    pub(super) fn remove(&mut self, way: u16, discard: bool) -> (u32, bool) {
        let base = match way {
            0 => self.rx.take().map(|rx| rx.stop(discard)),
            _ => self.tx.take().map(|tx| tx.stop(discard)),
        };
        (base.unwrap_or(0), self.rx.is_some() || self.tx.is_some())
    }

    fn lines(&mut self) -> [Option<&mut Line>; 2] {
        [self.rx.as_mut().map(R::line_mut), self.tx.as_mut().map(T::line_mut)]
    }

    /// See [`VirtqueueOwner::is_broken`](vshunt_virtqueue::VirtqueueOwner::is_broken).
    pub(super) fn is_broken(&self) -> bool {
        self.rx.as_ref().is_some_and(|rx| rx.line().broken)
            || self.tx.as_ref().is_some_and(|tx| tx.line().broken)
    }

    /// See [`VirtqueueOwner::ring`](vshunt_virtqueue::VirtqueueOwner::ring).
    pub(super) fn ring(&mut self, way: u16) -> Option<&mut dyn Vring> {
        let [rx, tx] = self.lines();
        if way == 0 { rx } else { tx }.map(|line| line as &mut dyn Vring)
    }

    /// Begins to listen for kicks.
    pub(super) fn arm(&mut self, uring: &mut Uring, place: Token) {
        for (line, op) in self.lines().into_iter().zip([OP_RX_KICK, OP_TX_KICK]) {
            line.into_iter().for_each(|line| line.arm(uring, place.with(0, op)));
        }
    }

    /// Listens no more.
    pub(super) fn disarm(&mut self, uring: &mut Uring, place: Token) {
        for (line, op) in self.lines().into_iter().zip([OP_RX_KICK, OP_TX_KICK]) {
            line.into_iter().for_each(|line| line.disarm(uring, place.with(0, op)));
        }
    }

    /// News of the kicks' polls.
    pub(super) fn kicked(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) {
        let [rx, tx] = self.lines();
        let line = if token.op == OP_RX_KICK { rx } else { tx };
        line.into_iter().for_each(|line| line.kicked(uring, token, result, more));
    }

    /// Shows the guest what is done. Whether it was notified.
    pub(super) fn publish(&mut self) -> bool {
        // Both, whatever the first one says.
        let [rx, tx] = self.lines().map(|line| line.is_some_and(Line::publish));
        rx || tx
    }

    /// Asks for no kicks.
    pub(super) fn wake(&mut self) {
        self.lines().into_iter().flatten().for_each(|line| line.vring.disable_kick());
    }
}
