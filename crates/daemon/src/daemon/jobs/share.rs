//! How fast a job may go where nobody says: so fast that guests keep most of their speed.
//!
//! Guests' requests are counted in short windows. In some of these nothing is read ahead, which
//! shows what guests do without the job; in the others the job goes at a rate that rises while
//! guests lose little and falls while they lose more. Where guests do next to nothing the job goes
//! as fast as it can.
//!
//! So it does where guests overwrite what is not copied yet: each such write costs them a read and
//! a write more, however slow the job goes, until it is past what they write. The sooner it is, the
//! fewer pay.

use std::time::Duration;

/// A window.
pub(super) const WINDOW: Duration = Duration::from_millis(40);
/// Requests in a window from which on guests count as busy.
const BUSY: u64 = 20;
/// Every so many windows is one without the job; more often at first, when the rate is a guess.
const LOOK_EVERY: u32 = 12;
const LOOK_EVERY_FIRST: u32 = 3;
/// So many times.
const FIRST: u32 = 4;
/// What guests keep of their speed, in percent.
const KEEP: u64 = 85;
/// A rate falls to this part of itself at most at a time.
const DOWN_MAX: u64 = 4;
/// One in so many requests that replaces what is not copied costs guests more than the job does
/// otherwise.
const REPLACED: u64 = 8;
/// Bounds of the rate, bytes a window: 4 MiB/s at least.
const RATE_MIN: u64 = (4 << 20) / 25;
const RATE_MAX: u64 = 1 << 32;

/// What a window is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// As fast as it goes.
    Free,
    /// So many bytes.
    Bytes(u64),
    /// Nothing: guests are looked at.
    Look,
}

/// Finds the rate, window by window.
#[derive(Debug)]
pub(super) struct Share {
    rate: u64,
    /// Requests in a window without the job, smoothed; none: not seen yet.
    alone: Option<u64>,
    /// Requests in windows with the job, since the last look; and how many windows.
    beside: (u64, u32),
    /// Times that the rate was found, since guests began.
    found: u32,
    last: Window,
}

impl Default for Share {
    fn default() -> Self {
        Self { rate: 16 * RATE_MIN, alone: None, beside: (0, 0), found: 0, last: Window::Look }
    }
}

impl Share {
    /// What the next window is for, after one in which guests had so many requests done, of which
    /// so many replaced what was not copied yet.
    pub(super) fn next(&mut self, requests: u64, replaced: u64) -> Window {
        if requests >= BUSY && replaced > requests / REPLACED {
            // What they did in it says nothing of what the rate costs them.
            self.last = Window::Free;
            return self.last;
        }
        match self.last {
            Window::Look if requests >= BUSY => {
                let old = self.alone.unwrap_or(requests);
                self.alone = Some((3 * old + requests) / 4);
                self.adapt();
            }
            Window::Look => (self.alone, self.beside, self.found) = (None, (0, 0), 0),
            _ => {
                self.beside.0 += requests;
                self.beside.1 += 1;
            }
        }
        let look_every = if self.found < FIRST { LOOK_EVERY_FIRST } else { LOOK_EVERY };
        self.last = if self.beside.1 >= look_every {
            Window::Look
        } else if self.alone.is_none() {
            Window::Free
        } else {
            Window::Bytes(self.rate)
        };
        if self.last == Window::Free && requests >= BUSY && self.alone.is_none() {
            // They have begun.
            self.last = Window::Look;
        }
        self.last
    }

    fn adapt(&mut self) {
        let (requests, windows) = std::mem::take(&mut self.beside);
        let Some(alone) = self.alone.filter(|_| windows > 0) else { return };
        let percent = requests * 100 / u64::from(windows) / alone.max(1);
        // What guests lose goes with the rate, more or less: the one at which they would lose what
        // they may. Upwards in small steps, for it says little of what lies far off.
        let lost = 100u64.saturating_sub(percent).max(1);
        let rate = self.rate.saturating_mul(100 - KEEP) / lost;
        self.found = self.found.saturating_add(1);
        self.rate = rate.clamp(self.rate / DOWN_MAX, self.rate * 5 / 4).clamp(RATE_MIN, RATE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guests that lose one in a hundred requests for each so many bytes of the job's.
    fn run(share: &mut Share, alone: u64, cost: u64, windows: u32) -> (u64, u64) {
        let (mut job, mut guests, mut window) = (0, 0, Window::Look);
        for _ in 0..windows {
            let bytes = match window {
                Window::Free => RATE_MAX,
                Window::Bytes(n) => n,
                Window::Look => 0,
            };
            let lost = (alone * (bytes / cost) / 100).min(alone);
            job += bytes;
            guests += alone - lost;
            window = share.next(alone - lost, 0);
        }
        (job, guests)
    }

    #[test]
    fn idle_guests_hold_nothing_back() {
        let mut share = Share::default();
        let (job, _) = run(&mut share, 3, 1 << 16, 1000);
        assert!(job > 900 * (1 << 31), "{job}");
    }

    #[test]
    fn busy_guests_keep_most_and_the_job_goes_on() {
        let mut share = Share::default();
        run(&mut share, 4000, 64 << 10, 1000);
        let (job, guests) = run(&mut share, 4000, 64 << 10, 1000);
        assert!(guests > 1000 * 4000 * 75 / 100, "{guests}");
        // What 15 in a hundred come to.
        assert!(job > 1000 * 15 * (64 << 10) / 3, "{job}");
    }

    #[test]
    fn a_rate_that_costs_much_falls_at_once() {
        let mut share = Share::default();
        // The rate that it begins with takes all from guests: a second is not long.
        let (_, guests) = run(&mut share, 4000, (16 * RATE_MIN) / 100, 25);
        let (_, later) = run(&mut share, 4000, (16 * RATE_MIN) / 100, 25);
        assert!(guests > 25 * 4000 * 20 / 100, "{guests}");
        assert!(later > 25 * 4000 * 70 / 100, "{later}");
    }

    #[test]
    fn what_is_overwritten_is_to_be_over_soon() {
        let mut share = Share::default();
        run(&mut share, 4000, 64 << 10, 100);
        assert_eq!(share.next(1000, 900), Window::Free);
        assert_eq!(share.next(1000, 130), Window::Free);
        assert_ne!(share.next(1000, 10), Window::Free);
    }

    #[test]
    fn guests_that_begin_are_seen() {
        let mut share = Share::default();
        run(&mut share, 0, 1, 100);
        let (_, guests) = run(&mut share, 4000, 64 << 10, 1000);
        assert!(guests > 1000 * 4000 * 60 / 100, "{guests}");
    }
}
