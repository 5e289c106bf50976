//! A rate limit for log lines and events that a front end or a client can cause.

use std::time::{Duration, Instant};

/// A token bucket, which is full at the start.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// The time for one more event.
    every: Duration,
    /// Events that may happen at once.
    burst: u32,
    /// When the bucket is full again. At most `every` times `burst` from now.
    full_at: Option<Instant>,
}

impl Rate {
    /// Allows `burst` events at once, and `per_second` events a second after that. Both are at
    /// least 1.
    pub const fn new(burst: u32, per_second: u32) -> Self {
        Self { every: Duration::from_nanos(1_000_000_000 / per_second as u64), burst, full_at: None }
    }

    /// Returns whether one more event may happen at `now`. If so, it is counted.
    pub fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + self.every;
        let fits = full_at <= now + self.every * self.burst;
        if fits {
            self.full_at = Some(full_at);
        }
        fits
    }

    /// Returns when [`take`](Self::take) would return true, `now` or later.
    pub fn next(&self, now: Instant) -> Instant {
        // `checked_sub` fails only before the start of the clock.
        let at = self.full_at.and_then(|at| (at + self.every).checked_sub(self.every * self.burst));
        at.map_or(now, |at| at.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_once_and_then_so_many_a_second() {
        let (start, ms) = (Instant::now() + Duration::from_secs(100), Duration::from_millis);
        let mut rate = Rate::new(5, 10);
        let mut take = |at| (0..20).filter(|_| rate.take(start + ms(at))).count();
        assert_eq!([0, 0, 50, 100, 150, 200, 1200, 1200].map(&mut take), [5, 0, 0, 1, 0, 1, 5, 0]);
        assert_eq!(rate.next(start + ms(1200)), start + ms(1300));
        assert_eq!(rate.next(start + ms(1400)), start + ms(1400));
        assert!(!rate.take(start + ms(1299)) && rate.take(start + ms(1300)));
        assert_eq!(Rate::new(1, 1).next(start), start);
    }
}
