//! A queue's view of its limits: it asks, waits on a timer of its worker's io_uring, and counts the
//! time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use io_uring::types::Timespec;

use super::group::{LimitCell, LimitMember};
use super::{Direction, TICKS_PER_NS, TIMER_TICKS_MAX, TIMER_TICKS_MIN, Ticks, now};
use crate::queue::QueueStats;
use crate::uring::{Token, Uring};

/// Asks for the requests of one queue. It belongs to the queue and moves with it.
///
/// A queue calls [`begin`](Self::begin) when it starts to take, and [`ask`](Self::ask) for each
/// request that limits concern, if there are limits. If one must wait, it calls
/// [`hold`](Self::hold). While [`is_held`](Self::is_held), no request starts that limits concern,
/// and those that wait are no [work](crate::Queue::has_work). The completion of the timer goes to
/// [`expired`](Self::expired).
///
/// Two more ways are for networks, whose requests do not wait in a ring of the guest. A queue that
/// does not know the next request pays for one that it expects, and [settles](Self::settle) later.
/// A queue that may not let requests wait drops them ([`refuse`](Self::refuse)).
#[derive(Debug)]
pub struct LimitGate {
    cell: Arc<LimitCell>,
    queue: u16,
    generation: u32,
    member: Option<Arc<LimitMember>>,
    now: Ticks,
    until: Ticks,
    /// Until when requests are dropped, as far as that time is counted.
    refused_until: Ticks,
    /// While a timer runs: when it was armed.
    held_at: Option<Ticks>,
    /// Boxed, because the kernel reads it.
    timer: Box<Timespec>,
}

impl LimitGate {
    /// Makes the gate of queue `queue` of an export. Each gate of an export has another number.
    pub fn new(cell: Arc<LimitCell>, queue: u16) -> Self {
        let (generation, member) = (cell.generation(), cell.member());
        Self {
            cell,
            queue,
            generation,
            member,
            now: 0,
            until: 0,
            refused_until: 0,
            held_at: None,
            timer: Box::new(Timespec::new()),
        }
    }

    /// Returns whether there are limits. Called before requests are taken.
    #[inline]
    pub fn begin(&mut self) -> bool {
        if self.cell.generation() != self.generation {
            self.change();
        }
        if self.member.is_none() {
            return false;
        }
        self.now = now();
        true
    }

    #[cold]
    fn change(&mut self) {
        self.leave();
        // The generation first: with a later member, the next call changes again.
        self.generation = self.cell.generation();
        self.member = self.cell.member();
    }

    fn leave(&self) {
        if let Some(member) = &self.member {
            member.forget(self.queue);
        }
    }

    /// Asks whether a request may start, and pays for it if so.
    #[inline]
    pub fn ask(&mut self, direction: Direction, bytes: u64) -> bool {
        let may = self.may(direction);
        if may {
            self.charge(direction, bytes);
        }
        may
    }

    /// Asks whether the next request of a direction may start, of whatever size. Its
    /// [`charge`](Self::charge) follows.
    #[inline]
    pub fn ask_next(&mut self, direction: Direction) -> bool {
        self.may(direction)
    }

    #[inline]
    fn may(&mut self, direction: Direction) -> bool {
        let Some(member) = &self.member else { return true };
        match member.ask(self.queue, direction, self.now) {
            Ok(()) => true,
            Err(until) => {
                self.until = until;
                false
            }
        }
    }

    /// Pays for a request that starts without having asked, or after
    /// [`ask_next`](Self::ask_next).
    #[inline]
    pub fn charge(&self, direction: Direction, bytes: u64) {
        if let Some(member) = &self.member {
            member.charge(direction, bytes);
        }
    }

    /// Corrects what was paid for a request of `expected` bytes: it had `moved`, or did not start.
    pub fn settle(&self, direction: Direction, expected: u64, moved: Option<u64>) {
        if let Some(member) = &self.member {
            member.refund(direction, expected);
            if let Some(bytes) = moved {
                member.charge(direction, bytes);
            }
        }
    }

    /// Gives up the place among the queues that wait, because there is no request that waits.
    pub fn withdraw(&self) {
        self.leave();
    }

    /// Counts the time until which requests are dropped, after the gate has refused one.
    pub fn refuse(&mut self, stats: &QueueStats) {
        let until = self.until.min(self.now.saturating_add(TIMER_TICKS_MAX));
        let since = self.refused_until.max(self.now);
        if until > since {
            self.refused_until = until;
            QueueStats::add(&stats.limited_ns, (until - since) / TICKS_PER_NS);
        }
    }

    /// Arms the timer until the time at which the queue should ask again.
    #[cold]
    pub fn hold(&mut self, uring: &mut Uring, token: Token, stats: &QueueStats) {
        if self.held_at.is_some() {
            return;
        }
        let now = now();
        let wait = self.until.saturating_sub(now).clamp(TIMER_TICKS_MIN, TIMER_TICKS_MAX) / TICKS_PER_NS;
        // The clamp keeps it below a second.
        *self.timer = Timespec::new().nsec(u32::try_from(wait).unwrap_or(u32::MAX));
        self.held_at = Some(now);
        stats.limited_now.store(stats.limited_now.load(Relaxed) + 1, Relaxed);
        // SAFETY: the time is boxed and does not change until the timer's completion, without which
        // the queue neither leaves its worker nor is dropped (`is_held`).
        unsafe { uring.timer(&raw const *self.timer, token) };
    }

    /// Returns whether the timer runs. The queue is not at rest then.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.held_at.is_some()
    }

    /// Handles the completion of the timer: the queue may ask again.
    pub fn expired(&mut self, stats: &QueueStats) {
        if let Some(since) = self.held_at.take() {
            QueueStats::add(&stats.limited_ns, now().saturating_sub(since) / TICKS_PER_NS);
            // Only the queue's worker writes it.
            stats.limited_now.store(stats.limited_now.load(Relaxed).saturating_sub(1), Relaxed);
        }
    }

    /// Ends the timer, because the queue leaves its worker. Its completion still comes.
    pub fn disarm(&self, uring: &mut Uring, token: Token) {
        if self.is_held() {
            uring.cancel(token);
        }
    }
}

impl Drop for LimitGate {
    fn drop(&mut self) {
        self.leave();
    }
}
