//! The limits of a queue pair: a gate for each direction, so that a direction that waits does not
//! hold up the other one.
//!
//! | frames | what happens to those that the limits do not let pass |
//! | --- | --- |
//! | from the guest | they wait in its ring |
//! | from a tap to the guest | they wait in the tap's queue, which drops frames when it is full |
//! | from a switch to the guest | they are dropped and counted: their senders must not wait for the limits of another guest |

use std::sync::Arc;

use vshunt_engine::{Direction, LimitCell, LimitGate, QueueStats, Token, Uring};

/// One direction. Belongs to the worker that has the queue pair.
pub(crate) struct SideGate {
    gate: LimitGate,
    direction: Direction,
    /// The operation of the timer.
    op: u8,
}

impl SideGate {
    #[inline]
    fn begin(&mut self) -> Allowance<'_> {
        match (self.gate.begin(), self.gate.is_held()) {
            (_, true) => Allowance::Nothing,
            (true, false) => Allowance::Ask(self),
            (false, false) => Allowance::All,
        }
    }

    /// Returns whether the direction waits. It takes nothing then.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.gate.is_held()
    }

    /// Asks whether a frame of `bytes` may pass, and pays for it if so.
    pub(crate) fn ask(&mut self, bytes: u64) -> bool {
        self.gate.ask(self.direction, bytes)
    }

    /// Asks whether the next frame may pass, whatever its size. [`charge`](Self::charge) follows.
    pub(crate) fn ask_next(&mut self) -> bool {
        self.gate.ask_next(self.direction)
    }

    /// Pays for a frame.
    pub(crate) fn charge(&self, bytes: u64) {
        self.gate.charge(self.direction, bytes);
    }

    /// Corrects what was paid for an expected frame. `moved`: the bytes that it had; `None`: there
    /// was no frame.
    pub(crate) fn settle(&self, expected: u64, moved: Option<u64>) {
        self.gate.settle(self.direction, expected, moved);
    }

    /// Waits, because the gate did not let a frame pass.
    pub(crate) fn hold(&mut self, uring: &mut Uring, place: Token, stats: &QueueStats) {
        self.gate.hold(uring, place.with(0, self.op), stats);
    }

    /// Counts the time for which frames are dropped, after the gate did not let one pass.
    pub(crate) fn refuse(&mut self, stats: &QueueStats) {
        self.gate.refuse(stats);
    }

    /// Leaves the next turn to others, because no frame is known to wait.
    pub(crate) fn withdraw(&self) {
        self.gate.withdraw();
    }
}

/// What the limits allow to one direction in this iteration.
pub(crate) enum Allowance<'a> {
    /// There are no limits.
    All,
    /// Each frame asks.
    Ask(&'a mut SideGate),
    /// It waits.
    Nothing,
}

impl Allowance<'_> {
    /// Pays for a frame that passes.
    #[inline]
    pub(crate) fn charge(&self, bytes: usize) {
        if let Self::Ask(gate) = self {
            gate.charge(bytes as u64);
        }
    }
}

/// See the module.
pub struct PairLimits {
    pub(crate) rx: SideGate,
    pub(crate) tx: SideGate,
}

impl PairLimits {
    /// Makes the limits of queue pair `pair` of an export.
    pub fn new(cell: &Arc<LimitCell>, pair: u16) -> Self {
        let side = |nth, direction| SideGate {
            gate: LimitGate::new(cell.clone(), 2 * pair + nth),
            direction,
            op: 0,
        };
        Self { rx: side(0, Direction::Read), tx: side(1, Direction::Write) }
    }

    /// Sets the operations of the timers.
    pub(crate) fn with_ops(mut self, rx: u8, tx: u8) -> Self {
        (self.rx.op, self.tx.op) = (rx, tx);
        self
    }

    /// Starts an iteration. Returns what both directions may do in it.
    #[inline]
    pub(crate) fn begin(&mut self) -> (Allowance<'_>, Allowance<'_>) {
        (self.rx.begin(), self.tx.begin())
    }

    /// Handles the completion of a timer.
    pub(crate) fn expired(&mut self, op: u8, stats: &QueueStats) {
        for side in [&mut self.rx, &mut self.tx] {
            if side.op == op {
                side.gate.expired(stats);
            }
        }
    }

    /// Ends the timers, because the pair leaves its worker.
    pub(crate) fn disarm(&self, uring: &mut Uring, place: Token) {
        for side in [&self.rx, &self.tx] {
            side.gate.disarm(uring, place.with(0, side.op));
        }
    }

    /// Returns whether no timer runs.
    pub(crate) fn at_rest(&self) -> bool {
        !self.rx.is_held() && !self.tx.is_held()
    }
}
