//! How a worker rests: the regimes, and the choice between them by what each was measured to give.
//!
//! **The objective: most requests per second; among regimes that give as many, least CPU time.**
//!
//! A worker without work polls, sleeps, or sleeps until several requests are there. Which of them
//! is best depends on things that it cannot see: where the peer runs, whether the peer sleeps, what
//! a wake-up costs today. And a system of two parties has states that keep themselves up: while
//! both are awake nobody pays for wake-ups, while both sleep each round pays for two. Averages over
//! the worker's own rests cannot tell how the other state would be. So the policy tries: from time
//! to time it rests in another regime for a window of about [`WINDOW_NS`], and compares requests
//! per second and CPU time per request with those of the windows around. A regime that lost is
//! tried again after twice the time, up to [`GAP_MAX_NS`]; all are tried again soon when the load
//! changes.
//!
//! No regime spends more than the polling limit without a request, so an idle worker uses no CPU.

/// Length of a window. A window with few requests is longer, up to the second number.
const WINDOW_NS: u64 = 1_000_000;
const WINDOW_MAX_NS: u64 = 10_000_000;
/// Requests that make a window of less than [`WINDOW_MAX_NS`] full.
const WINDOW_REQUESTS: u64 = 128;
/// Requests below which a window says nothing.
const WINDOW_REQUESTS_MIN: u64 = 8;
/// Time after a change of the regime that does not count: both sides have to find their new rhythm.
/// In rare trials it is longer, up to the second number.
const SETTLE_NS: u64 = 200_000;
const SETTLE_MAX_NS: u64 = 4_000_000;
/// A sleep of this length ends what was measured: there was no load.
const IDLE_NS: u64 = 5_000_000;
/// Shortest and longest time between two trials of a regime that lost.
const GAP_MIN_NS: u64 = 4_000_000;
const GAP_MAX_NS: u64 = 1_000_000_000;
/// A regime that lost is not tried again before this many times the length of its trial.
const TRIAL_SHARE: u64 = 16;
/// Least difference of two rates that counts, next to the noise of a window.
const RATE_MARGIN: f64 = 0.03;
/// Least difference of two CPU times per request that counts.
const CPU_MARGIN: f64 = 0.1;
/// How far the rates of windows are from their average before that is measured.
const SPREAD: f64 = 0.1;
/// A rate that is so many times another needs no second trial.
const CLEAR: f64 = 1.3;
/// A change of the rate by this factor, in this number of windows in a row, is another load.
const CHANGE: f64 = 1.5;
const CHANGE_WINDOWS: u32 = 3;
/// Longest time for which requests may wait for more to come.
const COALESCE_LIMIT_NS: u64 = 50_000;
/// About the time that a woken thread takes to run: as many requests as arrive in it may coalesce.
const WAKE_NS: f64 = 24_000.0;
/// Lengths of the pauses in which requests gather.
const PAUSES_NS: [u64; 2] = [2_500, 8_000];
/// Fewest and most requests that a sleep waits for. The most is half of the size of most queues.
const COALESCE_MIN: u32 = 2;
const COALESCE_MAX: u32 = 64;
/// Sleeps that ended with as many requests as asked for, in a row, after which more are asked for.
const STREAK: u32 = 16;

/// A way to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Regime {
    /// Sleeps at once, and is woken by the first request.
    Sleep,
    /// Sleeps until several requests have arrived, or for a limited time.
    Coalesce,
    /// Polls without pause up to the limit, then sleeps.
    Poll,
    /// Polls, with pauses of [`PAUSES_NS`] in which requests gather. The ring's memory does not
    /// move between the CPUs for each request.
    ShortPauses,
    /// The same with longer pauses.
    LongPauses,
}

const REGIMES: [Regime; 5] =
    [Regime::Sleep, Regime::Coalesce, Regime::Poll, Regime::ShortPauses, Regime::LongPauses];

impl Regime {
    /// Returns the length of a pause, for a regime that polls.
    fn pause_ns(self) -> Option<u64> {
        match self {
            Self::Sleep | Self::Coalesce => None,
            Self::Poll => Some(0),
            Self::ShortPauses => Some(PAUSES_NS[0]),
            Self::LongPauses => Some(PAUSES_NS[1]),
        }
    }
}

/// How a worker without work rests, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Polls up to the limit, then sleeps until kicked.
    Poll {
        /// The time in ns between two looks.
        pause_ns: u64,
    },
    /// Sleeps until kicked.
    Sleep,
    /// Sleeps until a number of requests has arrived, or for a limited time.
    Coalesce {
        /// The number, over all queues.
        requests: u32,
        /// The time in ns, after which the worker looks at its queues.
        limit_ns: u64,
    },
}

/// What the worker's thread has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// CPU time in ns.
    pub(super) cpu_ns: u64,
    /// How often another thread took its CPU.
    pub(super) preempted: u64,
}

/// What a window gave.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    requests: u64,
    ns: u64,
    cpu_ns: u64,
    preempted: u64,
}

impl Sample {
    fn rate(&self) -> f64 {
        self.requests as f64 / self.ns.max(1) as f64
    }

    /// Returns how often another thread took the CPU, per ns.
    fn preemptions(&self) -> f64 {
        self.preempted as f64 / self.ns.max(1) as f64
    }

    fn cpu(&self) -> f64 {
        self.cpu_ns as f64 / self.requests.max(1) as f64
    }

    /// Adds a window. Older ones count half once they are longer than [`WINDOW_MAX_NS`] together.
    fn add(&mut self, other: &Self) {
        if self.ns > WINDOW_MAX_NS {
            *self = Self {
                requests: self.requests / 2,
                ns: self.ns / 2,
                cpu_ns: self.cpu_ns / 2,
                preempted: self.preempted / 2,
            };
        }
        self.requests += other.requests;
        self.ns += other.ns;
        self.cpu_ns += other.cpu_ns;
        self.preempted += other.preempted;
    }
}

/// The trials of one regime.
#[derive(Clone, Copy, Debug)]
struct Trials {
    /// Time until the next one, once it has lost.
    gap_ns: u64,
    due: u64,
    /// Trials won in a row.
    won: u32,
}

/// The window that is being measured.
#[derive(Clone, Copy, Debug)]
struct Window {
    regime: Regime,
    start: u64,
    settling: bool,
    /// What was used, and done, at its start.
    usage: Usage,
    requests: u64,
}

/// The policy of one worker; see the module. Times are in ns since any moment, and do not go back.
pub(super) struct RestPolicy {
    /// The regime that is best, as far as known.
    best: Regime,
    /// What it gave of late.
    kept: Sample,
    changed: u32,
    /// Average square of how far the windows' rates were from the average rate, relative to it.
    spread: f64,
    window: Window,
    trials: [Trials; REGIMES.len()],
    /// All requests so far, and those at the last rest.
    requests: u64,
    at_last_rest: u64,
    /// Most requests that a sleep waits for, the last number, and sleeps in a row that got them.
    gather: u32,
    asked: u32,
    streak: u32,
    /// Times at which the best regime changed.
    #[cfg(test)]
    switches: Vec<u64>,
    /// The only regime, if it is given.
    #[cfg(test)]
    forced: Option<Regime>,
}

impl RestPolicy {
    pub(super) fn new(now: u64) -> Self {
        let window =
            Window { regime: Regime::Poll, start: now, settling: true, usage: Usage::default(), requests: 0 };
        Self {
            best: Regime::Poll,
            kept: Sample::default(),
            changed: 0,
            spread: SPREAD * SPREAD,
            window,
            trials: [Trials { gap_ns: GAP_MIN_NS, due: now, won: 0 }; REGIMES.len()],
            requests: 0,
            at_last_rest: 0,
            gather: COALESCE_MAX,
            asked: COALESCE_MAX,
            streak: 0,
            #[cfg(test)]
            switches: Vec::new(),
            #[cfg(test)]
            forced: None,
        }
    }

    /// Records that requests were taken or completed.
    pub(super) fn found(&mut self, requests: u64) {
        self.requests += requests;
    }

    /// Returns the time for which a worker that found few requests pauses before it looks again.
    pub(super) fn pause_ns(&self) -> Option<u64> {
        self.window.regime.pause_ns().filter(|&ns| ns > 0)
    }

    /// Returns how to rest now. `polling` says whether polling is allowed, and `usage` what this
    /// thread has used.
    pub(super) fn plan(&mut self, now: u64, polling: bool, usage: impl FnOnce() -> Usage) -> Rest {
        self.observe(now, polling, usage);
        self.rest(self.window.regime, polling)
    }

    /// Ends a window if it is time to. Called at each rest, and in pauses.
    pub(super) fn observe(&mut self, now: u64, polling: bool, usage: impl FnOnce() -> Usage) {
        #[cfg(test)]
        if let Some(regime) = self.forced {
            self.window.regime = regime;
            return;
        }
        let age = now.saturating_sub(self.window.start);
        // Requests often come in bursts. A window begins and ends after one.
        let after_some = self.requests > self.at_last_rest;
        self.at_last_rest = self.requests;
        if self.window.settling {
            if age >= self.settle_ns() && (after_some || age >= WINDOW_MAX_NS) {
                self.window = Window {
                    start: now,
                    settling: false,
                    usage: usage(),
                    requests: self.requests,
                    ..self.window
                };
            }
        } else {
            let requests = self.requests - self.window.requests;
            let expected = (self.kept.rate() * age as f64) as u64;
            if age >= WINDOW_MAX_NS
                || (age >= WINDOW_NS
                    && requests.max(expected) >= WINDOW_REQUESTS
                    && (after_some || requests < expected / 2))
            {
                let (used, before) = (usage(), self.window.usage);
                let sample = Sample {
                    requests,
                    ns: age,
                    cpu_ns: used.cpu_ns.saturating_sub(before.cpu_ns),
                    preempted: used.preempted.saturating_sub(before.preempted),
                };
                self.judge(now, &sample, polling);
                self.window = Window { start: now, usage: used, requests: self.requests, ..self.window };
            }
        }
    }

    /// Returns the time for which the regime of the window may settle: longer in rare trials.
    fn settle_ns(&self) -> u64 {
        if self.window.regime == self.best {
            return SETTLE_NS;
        }
        (self.trials[self.window.regime as usize].gap_ns / 128).clamp(SETTLE_NS, SETTLE_MAX_NS)
    }

    fn rest(&mut self, regime: Regime, polling: bool) -> Rest {
        match regime {
            Regime::Coalesce => {
                let arriving = (self.kept.rate() * WAKE_NS) as u32;
                self.asked = arriving.clamp(COALESCE_MIN, self.gather);
                Rest::Coalesce { requests: self.asked, limit_ns: COALESCE_LIMIT_NS }
            }
            _ => match regime.pause_ns() {
                Some(pause_ns) if polling => Rest::Poll { pause_ns },
                _ => Rest::Sleep,
            },
        }
    }

    /// Records that the worker slept from `start` to `now`. With a limit, `woken` says whether the
    /// requests that it waited for came before that.
    pub(super) fn slept(&mut self, start: u64, now: u64, limited: bool, woken: bool) {
        if now.saturating_sub(start) >= IDLE_NS {
            self.begin(now, self.best);
            self.kept = Sample::default();
        }
        if limited && !woken {
            self.streak = 0;
            self.gather = (self.asked / 2).max(COALESCE_MIN);
        } else if limited {
            self.streak += 1;
            if self.streak >= STREAK {
                self.streak = 0;
                self.gather = (self.gather * 2).min(COALESCE_MAX);
            }
        }
    }

    /// Begins to rest in a regime, whose window begins after [`SETTLE_NS`].
    fn begin(&mut self, now: u64, regime: Regime) {
        self.window = Window { regime, start: now, settling: true, ..self.window };
    }

    /// Takes the result of a window, and chooses the regime of the next one.
    fn judge(&mut self, now: u64, sample: &Sample, polling: bool) {
        let regime = self.window.regime;
        if regime != self.best {
            let better = self.is_better(regime, sample);
            let trials = &mut self.trials[regime as usize];
            match better {
                Verdict::Clearly => trials.won = 2,
                Verdict::Yes => trials.won += 1,
                Verdict::No | Verdict::Far => trials.won = 0,
            }
            if trials.won >= 2 {
                self.choose(now, regime, *sample);
            } else {
                if trials.won == 0 {
                    let times = if better == Verdict::Far { 8 } else { 2 };
                    trials.gap_ns = (trials.gap_ns * times).max(sample.ns * TRIAL_SHARE).min(GAP_MAX_NS);
                    trials.due = now + trials.gap_ns;
                }
                // Otherwise it is due again after the next window of the best one.
                self.begin(now, self.best);
            }
            return;
        }
        self.keep(now, sample);
        let due =
            |r: &Regime| *r != self.best && now >= self.trials[*r as usize].due && self.may_pay(*r, polling);
        if sample.requests < WINDOW_REQUESTS_MIN {
            // Nothing can be found out. Sleeping costs least.
            if self.best != Regime::Sleep {
                self.choose(now, Regime::Sleep, *sample);
            }
        } else if let Some(&next) =
            REGIMES.iter().filter(|r| due(r)).min_by_key(|r| self.trials[**r as usize].due)
        {
            self.begin(now, next);
        }
    }

    /// Returns whether a regime can be better than the best one. Requests that arrive one by one
    /// have nothing to wait for.
    fn may_pay(&self, regime: Regime, polling: bool) -> bool {
        let arrive_in = |ns: f64| self.kept.rate() * ns;
        match regime {
            Regime::Sleep => true,
            Regime::Coalesce => arrive_in(WAKE_NS) >= f64::from(COALESCE_MIN),
            _ => polling && regime.pause_ns().is_none_or(|ns| ns == 0 || arrive_in(ns as f64) >= 1.0),
        }
    }

    /// Adds a window of the best regime to what is known of it.
    fn keep(&mut self, now: u64, sample: &Sample) {
        let ratio = sample.rate() / self.kept.rate().max(f64::MIN_POSITIVE);
        let changed = self.kept.requests > 0 && !(1.0 / CHANGE..=CHANGE).contains(&ratio);
        self.changed = if changed { self.changed + 1 } else { 0 };
        if self.changed >= CHANGE_WINDOWS {
            self.changed = 0;
            self.kept = *sample;
            self.try_all(now, GAP_MIN_NS);
        } else {
            let off = if self.kept.requests > 0 { (ratio - 1.0).abs().min(1.0) } else { SPREAD };
            self.spread += (off * off - self.spread) / 8.0;
            self.kept.add(sample);
        }
    }

    fn try_all(&mut self, now: u64, gap_ns: u64) {
        for trials in &mut self.trials {
            *trials = Trials { gap_ns, due: now, won: 0 };
        }
    }

    fn choose(&mut self, now: u64, regime: Regime, sample: Sample) {
        self.best = regime;
        self.kept = sample;
        self.changed = 0;
        for trials in &mut self.trials {
            *trials = Trials { gap_ns: GAP_MIN_NS, due: now + GAP_MIN_NS, won: 0 };
        }
        self.begin(now, regime);
        #[cfg(test)]
        self.switches.push(now);
    }

    /// Compares a window of another regime with the best one.
    fn is_better(&self, regime: Regime, sample: &Sample) -> Verdict {
        if regime.pause_ns().is_some() && sample.preemptions() > self.kept.preemptions() {
            // It took the CPU from a thread that had work.
            return Verdict::No;
        }
        if sample.requests < WINDOW_REQUESTS_MIN || self.kept.requests < WINDOW_REQUESTS_MIN {
            return Verdict::No;
        }
        let ratio = sample.rate() / self.kept.rate();
        let noise = RATE_MARGIN + 2.0 * self.spread.sqrt();
        let cheaper = ratio > 1.0 - RATE_MARGIN && sample.cpu() < self.kept.cpu() * (1.0 - CPU_MARGIN);
        if ratio > CLEAR + noise {
            Verdict::Clearly
        } else if ratio > 1.0 + noise || cheaper {
            Verdict::Yes
        } else if ratio < 1.0 / CLEAR || sample.cpu() > 2.0 * self.kept.cpu() {
            Verdict::Far
        } else {
            Verdict::No
        }
    }
}

/// Whether a regime is better than the best one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// So far from it that the next trial can wait.
    Far,
    No,
    Yes,
    Clearly,
}

#[cfg(test)]
mod tests;
