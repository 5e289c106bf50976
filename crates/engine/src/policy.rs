//! How a worker rests: whether it polls, for how long, and whether it lets requests coalesce before it is woken.
//!
//! Polling is for other sides that wait for each answer: it saves them the worker's wake-up. The window grows while
//! rests turn out shorter than the bound and shrinks while they turn out longer, so idle costs nothing. Where the whole
//! window passes in vain again and again although work comes right after it, the other side shares our CPU and waits for
//! us to leave it: polling is off for a while then, each time longer.
//!
//! Coalescing is for other sides that send so fast that they do not wait (they do not ask to be notified): a wake-up for each request or two would cost
//! both more than the request. Then the worker asks to be kicked after as many requests as come in [`COALESCE_NS`], and
//! sleeps with a limit, should they not come. When the limit ends it, the other side did wait: coalescing is off for a
//! while, each time longer.

use std::time::{Duration, Instant};

/// Requests that a rest brings on average from which on polling pays only if the other side waits for us.
const POLL_BATCH_MAX: f64 = 16.0;
/// Requests a rest from which on it does not pay even then: a wake-up is little for so many.
const POLL_BATCH_WAITS_MAX: f64 = 48.0;
/// Notifications a rest on average from which on the other side counts as waiting.
const WAITS_MIN: f64 = 0.25;
/// Smallest polling window that is tried.
const POLL_STEP_NS: u64 = 4_000;
/// What our own wake-up adds to the time that a sleep took, on a halted CPU.
const WAKE: Duration = Duration::from_micros(30);
/// Time in which requests may coalesce: about what waking a thread on a halted CPU takes.
const COALESCE_NS: f64 = 24_000.0;
/// Longest sleep while they coalesce.
const COALESCE_LIMIT: Duration = Duration::from_micros(72);
/// Fewer than this are not worth coalescing.
const COALESCE_MIN: u32 = 6;
/// More than this are not waited for: half of what most queues hold.
const COALESCE_MAX: u32 = 64;
/// Full windows in vain, in a row, after which polling is off for a while.
const VAIN_MAX: u32 = 4;
/// How long coalescing or polling is off after it failed: from, to.
const HOLD_MIN: Duration = Duration::from_millis(1);
const HOLD_MAX: Duration = Duration::from_secs(1);
/// Coalesced sleeps in a row that succeed before more are asked for.
const STREAK: u32 = 64;
/// Weight of the past in averages over rests.
const KEEP: f64 = 0.875;

/// What to do with nothing to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rest {
    /// Look for work that long, then sleep.
    Poll(Duration),
    /// Sleep until kicked.
    Sleep,
    /// Sleep until so many requests are there, or for so long.
    Coalesce {
        /// Over all queues.
        requests: u32,
        /// Then look.
        limit: Duration,
    },
}

/// See the module. Belongs to one worker.
pub(super) struct PollPolicy {
    /// Polling window, ns.
    window_ns: u64,
    /// Full windows in vain, in a row; how long polling is off the next time, and until when it is.
    vain: u32,
    poll_hold: Duration,
    poll_held_until: Instant,
    /// Requests since the last rest began.
    batch: u64,
    /// When it began.
    last: Instant,
    /// Averages over rests: requests, and ns from one to the next.
    batch_avg: f64,
    cycle_avg_ns: f64,
    /// Likewise: rests after which the other side had to be notified.
    waits_avg: f64,
    notified: bool,
    /// Requests that may coalesce.
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

    /// Requests were taken or completed.
    pub(super) fn found(&mut self, requests: u64) {
        self.batch += requests;
    }

    /// The other side waited for what was completed.
    pub(super) fn notified(&mut self) {
        self.notified = true;
    }

    /// How to rest now. `bound` is the longest that may be polled; `steady`: nothing is in flight, so that only
    /// the other side can bring work.
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

    /// Whether polling for a window found work.
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

    /// The worker rested from `start` to `now`, slept at the end of that, and was woken or came to its limit.
    pub(super) fn slept(&mut self, start: Instant, now: Instant, woken: bool, bound: Duration) {
        if self.coalescing {
            self.coalesced(woken, now);
            return;
        }
        // Would polling to its bound have found the work? What it costs where it would not is gone at once.
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
