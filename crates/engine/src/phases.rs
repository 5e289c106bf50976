//! How a worker spends its time: busy, polling or sleeping.
//!
//! The worker's thread alone writes, two stores for each rest. Readers see the phase that lasts,
//! too: a worker that sleeps for an hour counts as sleeping all the time, although it counts
//! nothing itself meanwhile.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::time::{Duration, Instant};

use vshunt_types::sync::Locked;

/// Set in a [`Clock`] while its phase lasts.
const RUNNING: u64 = 1 << 63;
/// Tries to read both clocks at one moment. A rest lasts longer than a few of them.
const READS_MAX: u32 = 100;

/// How a worker has spent its time since it was made. The three add up to that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTimes {
    /// It handled requests or messages, or waited for a CPU or in the kernel meanwhile.
    pub busy: Duration,
    /// It looked for requests again and again, and used its CPU for that.
    pub polling: Duration,
    /// It was in the system call that waits for requests; entry and wake-up are part of it.
    pub sleeping: Duration,
}

/// A phase of a worker other than being busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Polling,
    Sleeping,
}

/// The time in one phase, in ns. While the phase lasts: [`RUNNING`], and the moment at which it
/// would have begun if it had lasted without a break. So one load tells all.
#[derive(Default)]
struct Clock(AtomicU64);

impl Clock {
    fn begin(&self, now: u64) {
        // Release: a reader that has seen the end of the other phase sees it all.
        self.0.store(RUNNING | now.saturating_sub(self.0.load(Acquire)), Release);
    }

    fn end(&self, now: u64) {
        self.0.store(Self::at(self.0.load(Acquire), now), Release);
    }

    /// Returns the time in ns that the value `clock` stands for at the moment `now`.
    fn at(clock: u64, now: u64) -> u64 {
        match clock & RUNNING {
            0 => clock,
            _ => now.saturating_sub(clock & !RUNNING),
        }
    }
}

/// The phases of one worker.
pub(super) struct Phases {
    /// The start of the worker's time. The moments of all methods are in ns since then.
    started: Instant,
    /// The worker writes these.
    polling: Clock,
    sleeping: Clock,
    /// What readers were told last, so that no time goes back: the worker may begin a phase with a
    /// moment that is a little in the past. The lock is held for a comparison.
    told: Mutex<WorkerTimes>,
}

impl Phases {
    /// Begins with a busy worker.
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            polling: Clock::default(),
            sleeping: Clock::default(),
            told: Mutex::default(),
        }
    }

    /// Returns the present moment.
    pub(super) fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn clock(&self, phase: Phase) -> &Clock {
        match phase {
            Phase::Polling => &self.polling,
            Phase::Sleeping => &self.sleeping,
        }
    }

    /// Begins a phase, on the worker. No other phase may last.
    pub(super) fn begin(&self, phase: Phase, now: u64) {
        self.clock(phase).begin(now);
    }

    /// Ends a phase, on the worker.
    pub(super) fn end(&self, phase: Phase, now: u64) {
        self.clock(phase).end(now);
    }

    /// Returns the times so far, on any thread.
    pub(super) fn times(&self) -> WorkerTimes {
        let load = || (self.polling.0.load(Acquire), self.sleeping.0.load(Acquire));
        let mut clocks = load();
        let mut now = self.now();
        for _ in 0..READS_MAX {
            let again = load();
            if again == clocks {
                break;
            }
            clocks = again;
            now = self.now();
        }
        let polling = Clock::at(clocks.0, now);
        let sleeping = Clock::at(clocks.1, now);
        let busy = now.saturating_sub(polling + sleeping);
        let mut told = self.told.locked();
        let later = |told: Duration, ns| told.max(Duration::from_nanos(ns));
        *told = WorkerTimes {
            busy: later(told.busy, busy),
            polling: later(told.polling, polling),
            sleeping: later(told.sleeping, sleeping),
        };
        *told
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    #[test]
    fn a_phase_that_lasts_is_told() {
        let phases = Phases::new();
        phases.begin(Phase::Sleeping, phases.now());
        let before = phases.times();
        std::thread::sleep(Duration::from_millis(20));
        let after = phases.times();
        assert!(after.sleeping >= before.sleeping + Duration::from_millis(20), "{before:?} {after:?}");
        assert_eq!((after.busy, after.polling), (before.busy, Duration::ZERO), "{before:?} {after:?}");
        phases.end(Phase::Sleeping, phases.now());
        let slept = phases.times().sleeping;
        std::thread::sleep(Duration::from_millis(5));
        let busy = phases.times();
        assert_eq!(busy.sleeping, slept, "it lasts no more");
        assert!(busy.busy >= after.busy + Duration::from_millis(5), "{busy:?}");
    }

    #[test]
    fn phases_add_up() {
        let clock = Clock::default();
        for (begin, end) in [(10, 15), (20, 20), (100, 1_000)] {
            clock.begin(begin);
            let so_far = clock.0.load(Relaxed);
            assert_eq!(Clock::at(so_far, begin + 3) - Clock::at(so_far, begin), 3);
            clock.end(end);
        }
        assert_eq!(Clock::at(clock.0.load(Relaxed), 5_000), 5 + 900);
    }

    #[test]
    fn no_time_goes_back_for_readers() {
        let phases = Arc::new(Phases::new());
        let stop = Arc::new(AtomicBool::new(false));
        let worker = std::thread::spawn({
            let (phases, stop) = (phases.clone(), stop.clone());
            move || {
                while !stop.load(Relaxed) {
                    let start = phases.now();
                    phases.begin(Phase::Polling, start);
                    let polled = phases.now();
                    phases.end(Phase::Polling, polled);
                    phases.begin(Phase::Sleeping, polled);
                    phases.end(Phase::Sleeping, phases.now());
                }
            }
        });
        let mut before = phases.times();
        for _ in 0..20_000 {
            let started = phases.now();
            let now = phases.times();
            let ended = phases.now();
            for (before, now) in
                [(before.busy, now.busy), (before.polling, now.polling), (before.sleeping, now.sleeping)]
            {
                assert!(now >= before, "{before:?} {now:?}");
            }
            let sum = (now.busy + now.polling + now.sleeping).as_nanos() as u64;
            assert!(sum <= ended + 10_000_000 && started <= sum, "{sum} at {started} to {ended}");
            before = now;
        }
        stop.store(true, Relaxed);
        worker.join().unwrap();
    }
}
