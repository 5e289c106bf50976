//! The rate limit of a source.

use crate::stats::now_ns;

/// A sender's batch with a rate limit is at most what it may send in this many nanoseconds.
const PACE_NS: u64 = 1_000_000;

/// Most frames that are sent later than planned.
const BACKLOG_MAX: u64 = 1 << 16;

/// A rate in frames per second. The clock starts at the first call.
pub(super) struct Rate {
    per_second: f64,
    began_ns: Option<u64>,
    pub(super) submitted: u64,
    pub(super) batch: u64,
}

impl Rate {
    pub(super) fn new(per_second: f64, batch: u16) -> Self {
        let in_time = (per_second * PACE_NS as f64 / 1e9) as u64;
        Self { per_second, began_ns: None, submitted: 0, batch: in_time.clamp(1, u64::from(batch)) }
    }

    /// Returns the frames that may be sent now.
    pub(super) fn allowed(&mut self) -> u64 {
        let now = now_ns();
        let ran = now - *self.began_ns.get_or_insert(now);
        let due = (ran as f64 * self.per_second / 1e9) as u64;
        let allowed = due.saturating_sub(self.submitted);
        // After a long pause (a server that died) not all missed frames are sent at once.
        if allowed > BACKLOG_MAX {
            self.submitted = due - BACKLOG_MAX;
        }
        allowed
    }

    /// Returns the nanoseconds until a batch is due.
    pub(super) fn due_ns(&self) -> u64 {
        let at = (self.submitted + self.batch) as f64 * 1e9 / self.per_second;
        let now = now_ns();
        (self.began_ns.unwrap_or(now) + at as u64).saturating_sub(now)
    }
}
