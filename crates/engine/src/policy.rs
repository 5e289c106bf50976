//! How a worker rests: whether it polls, for how long, and whether it lets requests coalesce.
//!
//! Polling helps peers that wait for each answer, because it saves them the worker's wake-up. The
//! window grows while rests are shorter than the limit, and shrinks while they are longer, so an
//! idle worker uses no CPU. Work may arrive right after a whole window without work, again and
//! again. Then the peer shares the worker's CPU and waits for the worker to leave it. In this case
//! polling is switched off for a while, each time for longer.
//!
//! Coalescing helps peers that send without waiting (they do not ask to be notified). For them, a
//! wake-up for each request or two would cost both more than the request does. The worker asks to
//! be kicked after as many requests as arrive in [`COALESCE_NS`], and sleeps with a limit in case
//! they do not arrive. If the limit ends the sleep, the peer did wait. Coalescing is then switched
//! off for a while, each time for longer.

use std::time::{Duration, Instant};

/// Average requests for each rest from which on polling pays only if the peer waits for the worker.
const POLL_BATCH_MAX: f64 = 16.0;
/// Requests for each rest from which on polling does not pay even then: the cost of a wake-up is
/// small against so many requests.
const POLL_BATCH_WAITS_MAX: f64 = 48.0;
/// Average notifications for each rest from which on the peer counts as waiting.
const WAITS_MIN: f64 = 0.25;
/// Smallest polling window.
const POLL_STEP_NS: u64 = 4_000;
/// Time that the worker's own wake-up adds to a sleep on a halted CPU.
const WAKE: Duration = Duration::from_micros(30);
/// Time in which requests may coalesce: about the time to wake a thread on a halted CPU.
const COALESCE_NS: f64 = 24_000.0;
/// Longest sleep while requests coalesce.
const COALESCE_LIMIT: Duration = Duration::from_micros(72);
/// Fewer requests than this are not worth coalescing.
const COALESCE_MIN: u32 = 6;
/// Most requests that a sleep waits for: half of the size of most queues.
const COALESCE_MAX: u32 = 64;
/// Full windows without work, in a row, after which polling is off for a while.
const VAIN_MAX: u32 = 4;
/// Shortest and longest time for which coalescing or polling is off after it failed.
const HOLD_MIN: Duration = Duration::from_millis(1);
const HOLD_MAX: Duration = Duration::from_secs(1);
/// Successful coalesced sleeps, in a row, after which more requests are asked for.
const STREAK: u32 = 64;
/// Weight of the past in averages over rests.
const KEEP: f64 = 0.875;

/// How a worker without work rests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rest {
    /// Polls for this time, then sleeps.
    Poll(Duration),
    /// Sleeps until kicked.
    Sleep,
    /// Sleeps until a number of requests has arrived, or for a limited time.
    Coalesce {
        /// The number, over all queues.
        requests: u32,
        /// The time, after which the worker looks at its queues.
        limit: Duration,
    },
}

/// The policy of one worker; see the module.
pub(super) struct PollPolicy {
    /// Polling window in ns.
    window_ns: u64,
    /// Full windows without work in a row, the time for which polling is off next, and the end of
    /// that time.
    vain: u32,
    poll_hold: Duration,
    poll_held_until: Instant,
    /// Requests since the last rest began.
    batch: u64,
    /// When the last rest began.
    last: Instant,
    /// Averages over rests: requests, and ns from one rest to the next.
    batch_avg: f64,
    cycle_avg_ns: f64,
    /// Average over rests: the share of rests after which the peer had to be notified.
    waits_avg: f64,
    notified: bool,
    /// Most requests that may coalesce.
    most: u32,
    streak: u32,
    hold: Duration,
    held_until: Instant,
    coalescing: bool,
}

impl PollPolicy {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            window_ns: 0,
            vain: 0,
            poll_hold: HOLD_MIN,
            poll_held_until: now,
            batch: 0,
            last: now,
            batch_avg: 0.0,
            cycle_avg_ns: 1e9,
            waits_avg: 0.0,
            notified: false,
            most: COALESCE_MAX,
            streak: 0,
            hold: HOLD_MIN,
            held_until: now,
            coalescing: false,
        }
    }

    /// Records that requests were taken or completed.
    pub(super) fn found(&mut self, requests: u64) {
        self.batch += requests;
    }

    /// Records that the peer waited for a completion.
    pub(super) fn notified(&mut self) {
        self.notified = true;
    }

    /// Returns how to rest now. `bound` is the polling limit. `steady` says that nothing is in
    /// flight, so only the peer can bring work.
    pub(super) fn plan(&mut self, now: Instant, bound: Duration, steady: bool) -> Rest {
        let cycle = now.duration_since(self.last).as_nanos() as f64;
        self.batch_avg = self.batch_avg * KEEP + self.batch as f64 * (1.0 - KEEP);
        self.cycle_avg_ns = self.cycle_avg_ns * KEEP + cycle.min(1e9) * (1.0 - KEEP);
        let last_batch = std::mem::take(&mut self.batch);
        self.last = now;
        let waited = std::mem::take(&mut self.notified);
        self.waits_avg = self.waits_avg * KEEP + f64::from(u8::from(waited)) * (1.0 - KEEP);
        let waits = self.waits_avg >= WAITS_MIN;
        self.coalescing = false;
        if steady && !waits && now >= self.held_until {
            // `found` counts an inline request once.
            let requests = (self.batch_avg / self.cycle_avg_ns * COALESCE_NS) as u32;
            let requests = requests.min(self.most);
            if requests >= COALESCE_MIN && last_batch > 0 {
                self.coalescing = true;
                return Rest::Coalesce { requests, limit: COALESCE_LIMIT };
            }
        }
        let held = now < self.poll_held_until;
        let batch_max = if waits { POLL_BATCH_WAITS_MAX } else { POLL_BATCH_MAX };
        if bound.is_zero() || held || self.window_ns == 0 || self.batch_avg >= batch_max {
            return Rest::Sleep;
        }
        Rest::Poll(Duration::from_nanos(self.window_ns).min(bound))
    }

    /// Records whether polling for a window found work.
    pub(super) fn polled(&mut self, found: bool, now: Instant, window: Duration, bound: Duration) {
        if found {
            self.vain = 0;
            self.poll_hold = (self.poll_hold / 2).max(HOLD_MIN);
        } else if window >= bound {
            self.vain += 1;
            if self.vain >= VAIN_MAX {
                self.vain = 0;
                self.window_ns = 0;
                self.poll_held_until = now + self.poll_hold;
                self.poll_hold = (self.poll_hold * 4).min(HOLD_MAX);
            }
        }
    }

    /// Records that the worker rested from `start` to `now`, slept at the end of that time, and was
    /// woken (or reached the limit).
    pub(super) fn slept(&mut self, start: Instant, now: Instant, woken: bool, bound: Duration) {
        if self.coalescing {
            self.coalesced(woken, now);
            return;
        }
        // The window grows if polling up to the limit would have found the work. Otherwise it
        // shrinks at once.
        if now < self.poll_held_until {
            return;
        }
        if now.duration_since(start) <= bound + WAKE {
            self.window_ns = (self.window_ns * 2).max(POLL_STEP_NS).min(bound.as_nanos() as u64);
        } else {
            self.window_ns /= 2;
            if self.window_ns < POLL_STEP_NS {
                self.window_ns = 0;
            }
        }
    }

    fn coalesced(&mut self, woken: bool, now: Instant) {
        if woken {
            self.streak += 1;
            if self.streak >= STREAK {
                self.streak = 0;
                self.hold = HOLD_MIN;
                self.most = (self.most * 2).min(COALESCE_MAX);
            }
            return;
        }
        self.streak = 0;
        self.most = (self.most / 2).max(COALESCE_MIN);
        if self.most == COALESCE_MIN {
            self.held_until = now + self.hold;
            self.hold = (self.hold * 2).min(HOLD_MAX);
        }
    }
}

#[cfg(test)]
mod tests;
