//! A limit for what a front end can make the daemon say: so many at once, and so many a second after that.

use std::time::{Duration, Instant};

/// A token bucket. It is full at first.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// One may be said each time this has passed.
    every: Duration,
    /// How many may be said at once.
    burst: u32,
    /// When the bucket is full again. At most `every` times `burst` from now.
    full_at: Option<Instant>,
}

impl Rate {
    /// `burst` at once, at least 1, and `per_second` after that, at least 1.
    pub const fn new(burst: u32, per_second: u32) -> Self {
        Self { every: Duration::from_nanos(1_000_000_000 / per_second as u64), burst, full_at: None }
    }

    /// Whether one more may be said at `now`. If so, it counts.
    pub fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + self.every;
        let fits = full_at <= now + self.every * self.burst;
        if fits {
            self.full_at = Some(full_at);
        }
        fits
    }

    /// When [`take`](Self::take) would be true, `now` or later.
    pub fn next(&self, now: Instant) -> Instant {
        // Not before 0 of the clock, which is long ago.
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
