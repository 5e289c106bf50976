//! Limits of operations and bytes per second, for queues of one export or of a group of exports. An
//! operation is a request of a disk, or a packet of a network.
//!
//! A [`LimitGroup`] has one bucket for each rate. Each export that shares the group is a
//! [`LimitMember`], and each of its queues asks through a [`LimitGate`] before it starts a request.
//! A queue that must wait arms a timer on its worker's io_uring and reports no work until then.
//! Nothing here blocks, and nothing on the data path takes a lock.
//!
//! How it works: a bucket is one atomic number, the time at which it will be empty (virtual
//! scheduling, GCRA). A member buys a *share* of that time in advance, a few milliseconds at most,
//! and its requests use it up. The shares of members follow each other in the order in which they
//! were bought, and a member waits for one share at a time. Members that want more than there is
//! therefore take turns, and one that wants less than its part gets all that it wants. A request
//! passes if there is credit, and may leave a debt. So no request is too large to pass, and the
//! next share pays for it.
//!
//! Within a member, queues that wait take turns, too: the one that waits longest owns the next
//! share until it has taken a request. No queue starves.
//!
//! What must never happen: a limited queue keeps its worker busy; a queue waits for ever because
//! another one does not run. Each turn therefore ends by itself ([`TURN_TICKS`]), and each timer
//! ends after [`TIMER_TICKS_MAX`] at the latest, after which the queue asks again.

mod bucket;
mod gate;
mod group;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use gate::LimitGate;
pub use group::{LimitCell, LimitGroup, LimitMember};

/// Time in units of 1/64 ns since the first call. 64 bits are enough for nine years.
type Ticks = u64;

/// Ticks of a nanosecond. Finer than the clock, so that the cost of a request is exact to 0.01 %
/// at 10 million requests per second.
const TICKS_PER_NS: u64 = 64;
const TICKS_PER_MS: Ticks = 1_000_000 * TICKS_PER_NS;
const TICKS_PER_S: Ticks = 1000 * TICKS_PER_MS;

/// How far a rate without a burst may be ahead: enough for a worker that gets no CPU for a while,
/// and 1 % of five seconds.
const SLACK_MS: u64 = 50;
/// A member's share of a group of its own. It decides how often the queues wake at high rates.
const SHARE_TICKS: Ticks = TICKS_PER_MS;
/// A member's share of a group that it shares. Longer, so that late wake-ups weigh less.
const SHARED_SHARE_TICKS: Ticks = 4 * TICKS_PER_MS;
/// How long a queue that owns the next share may be late.
const TURN_TICKS: Ticks = 10 * TICKS_PER_MS;
/// The wait of a queue whose turn comes after that of another one.
const RETRY_TICKS: Ticks = TICKS_PER_MS / 5;
/// The longest timer. Limits that are changed or lifted take effect after this time.
const TIMER_TICKS_MAX: Ticks = 100 * TICKS_PER_MS;
/// The shortest timer.
const TIMER_TICKS_MIN: Ticks = TICKS_PER_MS / 50;

/// Returns the time.
fn now() -> Ticks {
    static START: OnceLock<Instant> = OnceLock::new();
    let ns = START.get_or_init(Instant::now).elapsed().as_nanos();
    // The first second is left out: a bucket that is empty since the start is in the past.
    u64::try_from(ns).unwrap_or(u64::MAX).saturating_mul(TICKS_PER_NS).saturating_add(TICKS_PER_S)
}

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The guest reads, or receives a packet.
    Read,
    /// The guest writes, discards or writes zeroes, or sends a packet.
    Write,
}

/// One rate, in units per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// The average.
    pub average: u64,
    /// The rate for a limited time, at least `average`. 0: there is none.
    pub burst: u64,
    /// How long the burst may last after a rest, in seconds. At least 1 with a burst.
    pub burst_seconds: u64,
}

/// The rates for reads, for writes, and for both together. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateSet {
    /// Of all requests.
    pub total: Option<Rate>,
    /// Of reads.
    pub read: Option<Rate>,
    /// Of writes.
    pub write: Option<Rate>,
}

/// The limits of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Operations per second.
    pub operations: RateSet,
    /// Bytes per second.
    pub bytes: RateSet,
    /// A longer request counts as several operations of this number of bytes. 0: as one.
    pub operation_bytes: u64,
}

impl Rates {
    /// Returns the longest time for which the first request of a queue waits, if workers get the
    /// CPU time that they need. `bytes_max`: the bytes of the longest request. `queues`: those of
    /// the export; a queue pair of a network counts as two. `members`: exports that share the
    /// limits.
    ///
    /// At most the first requests of the other queues go before it, since the queue that waits
    /// longest owns the next share. Each leaves a debt of one request at most, and other members
    /// get equal parts while it is paid.
    pub fn longest_wait(&self, bytes_max: u64, queues: u64, members: u64) -> Duration {
        let operations = match self.operation_bytes {
            0 => 1.0,
            unit => (bytes_max as f64 / unit as f64).max(1.0),
        };
        let slowest = |rates: &RateSet, units: f64| {
            let seconds = |rate: Option<Rate>| rate.map_or(0.0, |rate| units / rate.average.max(1) as f64);
            seconds(rates.total).max(seconds(rates.read)).max(seconds(rates.write))
        };
        let debt = slowest(&self.operations, operations).max(slowest(&self.bytes, bytes_max as f64));
        let turn = debt + (TIMER_TICKS_MAX + TURN_TICKS + SHARED_SHARE_TICKS) as f64 / TICKS_PER_S as f64;
        let seconds = turn * queues.max(1) as f64 * members.max(1) as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}
