//! Chooses the speed of a job without a speed limit, so that guests keep most of their speed.
//!
//! Completed requests of guests are counted in short windows. In some windows the job reads nothing
//! ahead, which shows the speed of guests without the job. In the others the job has a rate. The
//! rate rises while guests lose little, and falls while they lose more. If guests have almost no
//! requests, the job has no limit.
//!
//! The job also has no limit while guests overwrite blocks that are not copied yet. Each such write
//! causes an additional read and write, independent of the rate. So it is best to finish these
//! blocks soon.

use std::time::Duration;

/// Length of a window.
pub(super) const WINDOW: Duration = Duration::from_millis(40);
/// Requests in a window above which guests count as busy.
const BUSY: u64 = 20;
/// Number of windows from one without the job to the next. At first they are more frequent, while
/// the rate is a guess.
const MEASURE_EVERY: u32 = 12;
const MEASURE_EVERY_FIRST: u32 = 3;
/// Number of such windows at first.
const FIRST: u32 = 4;
/// Percentage of their speed that guests keep.
const KEEP: u64 = 85;
/// A rate is divided by at most this factor at a time.
const DOWN_MAX: u64 = 4;
/// If one of this many requests replaces a block that is not copied yet, this costs guests more
/// than the rate of the job.
const REPLACED: u64 = 8;
/// Limits of the rate, bytes per window. The lowest rate is 4 MiB/s.
const RATE_MIN: u64 = (4 << 20) / 25;
const RATE_MAX: u64 = 1 << 32;

/// What a window is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// Without a limit.
    Free,
    /// At most this many bytes.
    Bytes(u64),
    /// Nothing: the speed of guests without the job is measured.
    Measure,
}

/// Finds the rate, window by window.
#[derive(Debug)]
pub(super) struct Share {
    rate: u64,
    /// Requests in a window without the job, smoothed. None: not measured yet.
    alone: Option<u64>,
    /// Requests in windows with the job since the last measurement, and the number of these
    /// windows.
    beside: (u64, u32),
    /// How often the rate was adapted since guests became busy.
    found: u32,
    last: Window,
}

impl Default for Share {
    fn default() -> Self {
        Self { rate: 16 * RATE_MIN, alone: None, beside: (0, 0), found: 0, last: Window::Measure }
    }
}

impl Share {
    /// Returns the kind of the next window. `requests` of guests were completed in the last window;
    /// `replaced` of them replaced blocks that were not copied yet.
    pub(super) fn next(&mut self, requests: u64, replaced: u64) -> Window {
        if requests >= BUSY && replaced > requests / REPLACED {
            // The requests of that window do not show the cost of the rate.
            self.last = Window::Free;
            return self.last;
        }
        match self.last {
            Window::Measure if requests >= BUSY => {
                let old = self.alone.unwrap_or(requests);
                self.alone = Some((3 * old + requests) / 4);
                self.adapt();
            }
            Window::Measure => (self.alone, self.beside, self.found) = (None, (0, 0), 0),
            _ => {
                self.beside.0 += requests;
                self.beside.1 += 1;
            }
        }
        let look_every = if self.found < FIRST { MEASURE_EVERY_FIRST } else { MEASURE_EVERY };
        self.last = if self.beside.1 >= look_every {
            Window::Measure
        } else if self.alone.is_none() {
            Window::Free
        } else {
            Window::Bytes(self.rate)
        };
        if self.last == Window::Free && requests >= BUSY && self.alone.is_none() {
            // Guests became busy.
            self.last = Window::Measure;
        }
        self.last
    }

    fn adapt(&mut self) {
        let (requests, windows) = std::mem::take(&mut self.beside);
        let Some(alone) = self.alone.filter(|_| windows > 0) else { return };
        let percent = requests * 100 / u64::from(windows) / alone.max(1);
        // The loss of guests is about proportional to the rate. This computes the rate at which
        // they would lose what is allowed. It rises in small steps only, because a small loss says
        // little about much higher rates.
        let lost = 100u64.saturating_sub(percent).max(1);
        let rate = self.rate.saturating_mul(100 - KEEP) / lost;
        self.found = self.found.saturating_add(1);
        self.rate = rate.clamp(self.rate / DOWN_MAX, self.rate * 5 / 4).clamp(RATE_MIN, RATE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates guests that lose one percent of their requests for each `cost` bytes of the job.
    fn run(share: &mut Share, alone: u64, cost: u64, windows: u32) -> (u64, u64) {
        let (mut job, mut guests, mut window) = (0, 0, Window::Measure);
        for _ in 0..windows {
            let bytes = match window {
                Window::Free => RATE_MAX,
                Window::Bytes(n) => n,
                Window::Measure => 0,
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
    fn busy_guests_keep_most_and_the_job_continues() {
        let mut share = Share::default();
        run(&mut share, 4000, 64 << 10, 1000);
        let (job, guests) = run(&mut share, 4000, 64 << 10, 1000);
        assert!(guests > 1000 * 4000 * 75 / 100, "{guests}");
        // The rate at which guests lose 15 percent.
        assert!(job > 1000 * 15 * (64 << 10) / 3, "{job}");
    }

    #[test]
    fn a_rate_that_costs_much_falls_at_once() {
        let mut share = Share::default();
        // The initial rate takes all requests from guests. One second is short enough.
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
