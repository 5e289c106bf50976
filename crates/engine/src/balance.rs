//! Decides which queues move to another worker, so that queues follow load.
//!
//! [`Balancer`] is a function of samples: it makes no system call, knows no clock and moves
//! nothing. The daemon's control thread calls it several times a second while requests come, moves
//! what it decides with [`QueueSet::attach`](super::QueueSet::attach), and tells it how long that
//! took.
//!
//! | step | method |
//! | --- | --- |
//! | 1. what each queue costs its worker | [`Balancer::observe`], `learn` |
//! | 2. the moves that are worth their cost | `plan` |
//! | 3. a plan is carried out when it has been the same for a while | `patience` |
//! | 4. what the moves gave; those that gave nothing are undone | `judge` |
//! | 5. how many workers an export has, with `workers=auto` | `size` |

mod learn;
mod plan;
mod size;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::WorkerId;
use learn::Learnt;
use size::Size;
pub use size::{Pool, Resize};

/// Time between two moves of one queue, ns.
pub const MOVE_EVERY_NS: u64 = 1_000_000_000;
/// The prediction reaches so far ahead, ns.
const AHEAD_NS: f64 = 1e9;
/// Samples for which a plan has to be worth it before it is carried out.
const PATIENCE: u32 = 2;
/// The same for a move that cannot be predicted.
const PATIENCE_TRY: u32 = 6;
/// The same after moves that gave nothing: it doubles up to this number.
const PATIENCE_MAX: u32 = 12;
/// Samples after moves that are not counted, because queues start again in them.
const SETTLE: u32 = 1;
/// Samples after that from which moves are judged.
const JUDGE: u32 = 3;
/// Time for which a queue stays after a move that gave nothing. It doubles with each of them.
const STAY_NS: u64 = 4_000_000_000;
/// The longest such time.
const STAY_NS_MAX: u64 = 128_000_000_000;
/// Rate of work below which moves have failed, as a part of the rate before them.
const WORSE: f64 = 0.99;
/// Rate of work from which on moves have paid.
const BETTER: f64 = 1.02;

/// The name of a queue.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueName {
    /// Its export.
    pub export: String,
    /// Its index in the export.
    pub index: u16,
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.export, self.index)
    }
}

/// A worker at the time of a sample.
#[derive(Clone, Debug)]
pub struct WorkerSample {
    /// Its id.
    pub id: WorkerId,
    /// The CPUs that it may run on.
    pub cpus: Vec<usize>,
    /// Time since its start in which it had work: it ran without polling, or waited for a CPU. ns.
    pub busy_ns: u64,
    /// The part of it in which it ran. ns.
    pub ran_ns: u64,
}

/// A queue at the time of a sample.
#[derive(Clone, Debug)]
pub struct QueueSample {
    /// Its name.
    pub name: QueueName,
    /// Its worker.
    pub worker: WorkerId,
    /// Requests completed so far.
    pub requests: u64,
    /// Bytes moved so far.
    pub bytes: u64,
    /// The workers that it may be moved to. Empty: it stays.
    pub targets: Vec<WorkerId>,
}

/// What is known at one time.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The time, ns. It must not go back.
    pub now_ns: u64,
    /// All workers.
    pub workers: Vec<WorkerSample>,
    /// All queues in use, also those that stay.
    pub queues: Vec<QueueSample>,
}

/// A move that is worth its cost, with the figures that say so.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The queue.
    pub queue: QueueName,
    /// Its worker.
    pub from: WorkerId,
    /// The worker that it should be on.
    pub to: WorkerId,
    /// Why.
    pub reason: Reason,
}

/// Why a queue moves. Shares are of one worker's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    /// Requests will wait less for their worker.
    Gain {
        /// Share for which its worker is busy, before the move.
        from_busy: f64,
        /// Share for which the other worker is busy, before the move.
        to_busy: f64,
        /// The share that the queue needs.
        load: f64,
        /// Time that requests wait less in the next second, ns.
        gain_ns: f64,
        /// Cost of the move, as earlier moves were measured, ns.
        cost_ns: f64,
    },
    /// Its worker has no time left and another one has. Whether the move pays cannot be predicted.
    Try {
        /// Share for which the other worker is busy.
        to_busy: f64,
        /// The share that the queue seems to need.
        load: f64,
    },
    /// Its worker is to end, because the others have room for its queues.
    Fewer {
        /// Share for which the other worker will be busy.
        to_busy: f64,
        /// The share that the queue needs.
        load: f64,
    },
    /// An earlier move did not pay.
    Undo {
        /// Work done per second after the move, as a part of that before it.
        rate: f64,
    },
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        match self.reason {
            Reason::Gain { from_busy, to_busy, load, gain_ns, cost_ns } => write!(
                f,
                "worker {} is {} % busy, worker {} {} %; the queue needs {} %: gain {:.0} ms per second, cost {:.1} ms",
                self.from,
                percent(from_busy),
                self.to,
                percent(to_busy),
                percent(load),
                gain_ns / 1e6,
                cost_ns / 1e6
            ),
            Reason::Try { to_busy, load } => write!(
                f,
                "worker {} has no time left, worker {} is {} % busy; a try: the queue seems to need {} %",
                self.from,
                self.to,
                percent(to_busy),
                percent(load)
            ),
            Reason::Fewer { to_busy, load } => write!(
                f,
                "worker {} is not needed: the queue needs {} %, and worker {} will be {} % busy",
                self.from,
                percent(load),
                self.to,
                percent(to_busy)
            ),
            Reason::Undo { rate } => {
                write!(f, "the move from worker {} gave {} % of the work before it", self.to, percent(rate))
            }
        }
    }
}

/// A queue that was moved, and where it was.
#[derive(Clone, Debug)]
struct Moved {
    queue: QueueName,
    from: WorkerId,
    undoes: bool,
}

/// Moves whose result is not known yet.
#[derive(Clone, Debug)]
struct Trial {
    moved: Vec<Moved>,
    /// The workers that they touch.
    workers: BTreeSet<WorkerId>,
    /// Samples since the moves.
    samples: u32,
    /// The moves make a worker idle: they have to harm nobody, and nobody gains by them.
    fewer: bool,
    /// The costs of requests and their rates before the moves.
    costs_before: BTreeMap<QueueName, f64>,
    /// The load of the busiest place that the moves touch, before them.
    hottest_before: f64,
    rates_before: BTreeMap<QueueName, f64>,
    /// The sums of the samples since the moves.
    rates: BTreeMap<QueueName, f64>,
    hottest: f64,
}

impl Trial {
    /// Returns the work per second since the moves, as a part of that before them: the geometric
    /// mean of that by the costs of requests that were known before, and by those that are known
    /// now.
    fn work_rate(&self, queues: &BTreeMap<QueueName, Learnt>) -> f64 {
        let sum = |rates: &BTreeMap<QueueName, f64>, cost: &dyn Fn(&QueueName) -> f64| -> f64 {
            rates.iter().map(|(name, rate)| rate * cost(name)).sum()
        };
        let now = |name: &QueueName| queues.get(name).map_or(0.0, |queue| queue.cost_ns);
        let before = |name: &QueueName| self.costs_before.get(name).copied().unwrap_or_else(|| now(name));
        let quotient = |cost: &dyn Fn(&QueueName) -> f64| {
            sum(&self.rates, cost) / sum(&self.rates_before, cost).max(f64::MIN_POSITIVE)
        };
        (quotient(&before) * quotient(&now)).sqrt()
    }
}

/// The state between samples. One thread uses it.
#[derive(Clone, Debug)]
pub struct Balancer {
    previous: Option<Sample>,
    queues: BTreeMap<QueueName, Learnt>,
    /// Share of each worker's time that belongs to no queue.
    other: BTreeMap<WorkerId, f64>,
    /// Share of the time in which each worker had work and ran.
    ran: BTreeMap<WorkerId, f64>,
    /// Samples for which a plan has been worth it.
    streak: u32,
    patience: u32,
    trial: Option<Trial>,
    /// The exports with `workers=auto`.
    sizes: BTreeMap<String, Size>,
}

impl Default for Balancer {
    fn default() -> Self {
        Self {
            previous: None,
            queues: BTreeMap::new(),
            other: BTreeMap::new(),
            ran: BTreeMap::new(),
            streak: 0,
            patience: PATIENCE,
            trial: None,
            sizes: BTreeMap::new(),
        }
    }
}

impl Balancer {
    /// Takes a sample, and returns the moves that should be made now, in this order. Each is to be
    /// reported by [`moved`](Self::moved), [`failed`](Self::failed) or [`told`](Self::told).
    ///
    /// The time between two samples should be 50 ms or more.
    pub fn observe(&mut self, sample: Sample) -> Vec<Decision> {
        let Some(previous) = self.previous.take() else {
            self.keep(&sample);
            self.previous = Some(sample);
            return Vec::new();
        };
        let known = self.learn(&previous, &sample);
        self.keep(&sample);
        let decisions = match (known, self.trial.is_some()) {
            (false, _) => Vec::new(),
            (true, true) => self.judge(&sample),
            (true, false) => self.decide(&sample),
        };
        self.previous = Some(sample);
        decisions
    }

    /// Forgets the last sample, after a time in which none was taken.
    pub fn pause(&mut self) {
        self.previous = None;
        self.streak = 0;
        self.trial = None;
        self.sizes.values_mut().for_each(Size::pause);
    }

    fn decide(&mut self, sample: &Sample) -> Vec<Decision> {
        let (mut decisions, mut patience) = (self.plan(sample), self.patience);
        if decisions.is_empty() {
            decisions.extend(self.attempt(sample));
            patience = patience.max(PATIENCE_TRY);
        }
        if decisions.is_empty() {
            self.streak = 0;
            return decisions;
        }
        self.streak += 1;
        if self.streak < patience {
            return Vec::new();
        }
        self.streak = 0;
        decisions
    }

    /// Starts to count what these moves give. Called right before they are made.
    pub fn begin(&mut self, decisions: &[Decision]) {
        if decisions.is_empty() {
            return;
        }
        let of_all = |value: fn(&Learnt) -> f64| {
            self.queues.iter().map(|(name, q)| (name.clone(), value(q))).collect::<BTreeMap<_, _>>()
        };
        let workers: BTreeSet<_> = decisions.iter().flat_map(|d| [d.from, d.to]).collect();
        let places = self.previous.as_ref().map(|sample| self.hottest(sample, &workers, |queue| queue.load));
        self.trial = Some(Trial {
            moved: Vec::new(),
            workers,
            samples: 0,
            fewer: decisions.iter().all(|d| matches!(d.reason, Reason::Fewer { .. })),
            costs_before: of_all(|queue| queue.cost_ns),
            rates_before: of_all(|queue| queue.rate),
            hottest_before: places.unwrap_or(0.0),
            rates: BTreeMap::new(),
            hottest: 0.0,
        });
    }

    /// Notes that a move was made at `now_ns`. It took `took_ns`, during which the queue was not
    /// served.
    pub fn moved(&mut self, decision: &Decision, now_ns: u64, took_ns: u64) {
        let Some(learnt) = self.queues.get_mut(&decision.queue) else { return };
        learnt.moved(now_ns, took_ns);
        learnt.worker = decision.to;
        let undoes = matches!(decision.reason, Reason::Undo { .. });
        let moved = Moved { queue: decision.queue.clone(), from: decision.from, undoes };
        self.trial.iter_mut().for_each(|trial| trial.moved.push(moved.clone()));
        // The next sample has requests of both workers.
        self.previous = None;
    }

    /// Notes that a move was tried and did not succeed, for example because requests in flight did
    /// not complete. The queue stays for some time.
    pub fn failed(&mut self, decision: &Decision, now_ns: u64, took_ns: u64) {
        if let Some(learnt) = self.queues.get_mut(&decision.queue) {
            learnt.moved(now_ns, took_ns);
            learnt.stay(now_ns);
        }
        self.previous = None;
    }

    /// Notes that a move was shown only (dry run). It is not shown again for some time.
    pub fn told(&mut self, decision: &Decision, now_ns: u64) {
        if let Some(learnt) = self.queues.get_mut(&decision.queue) {
            learnt.stay(now_ns);
        }
    }

    /// Counts a sample after moves. At the last one, says whether they paid, and returns those that
    /// are to be undone.
    fn judge(&mut self, sample: &Sample) -> Vec<Decision> {
        let Some(mut trial) = self.trial.take() else { return Vec::new() };
        trial.samples += 1;
        if trial.samples > SETTLE {
            for (name, queue) in &self.queues {
                *trial.rates.entry(name.clone()).or_default() += queue.last_rate / f64::from(JUDGE);
            }
            trial.hottest += self.hottest(sample, &trial.workers, |queue| queue.last_load);
        }
        if trial.samples < SETTLE + JUDGE {
            self.trial = Some(trial);
            return Vec::new();
        }
        let rate = trial.work_rate(&self.queues);
        let hottest = trial.hottest / f64::from(JUDGE);
        let relieved = trial.hottest_before - hottest > 0.05;
        match trial.fewer {
            true if rate >= WORSE => return Vec::new(),
            true => {}
            false if rate >= BETTER || relieved => {
                self.patience = PATIENCE;
                return Vec::new();
            }
            false => self.patience = (self.patience * 2).min(PATIENCE_MAX),
        }
        let undo = rate < WORSE && trial.moved.iter().all(|moved| !moved.undoes);
        let mut decisions = Vec::new();
        for Moved { queue, from, .. } in trial.moved {
            let Some(learnt) = self.queues.get_mut(&queue) else { continue };
            let worker = learnt.worker;
            learnt.stay(sample.now_ns);
            let may = |q: &&QueueSample| q.name == queue && q.worker == worker && q.targets.contains(&from);
            if undo && learnt.may_move_again(sample.now_ns) && sample.queues.iter().any(|q| may(&q)) {
                decisions.push(Decision { queue, from: worker, to: from, reason: Reason::Undo { rate } });
            }
        }
        decisions
    }
}
