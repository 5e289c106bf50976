//! What each queue costs its worker, learnt from samples.

use std::collections::{BTreeMap, VecDeque};

use super::{Balancer, MOVE_EVERY_NS, QueueName, QueueSample, STAY_NS, STAY_NS_MAX, Sample};

/// The part of a new sample in an average.
const NEW: f64 = 0.4;
/// The part of a new load in a long average.
const LONG: f64 = 0.04;
/// Samples in about a second.
const LATER: usize = 10;
/// The variance of a load of which nothing is known, which is taken to be steady.
const STEADY_AT_FIRST: f64 = 0.01;
/// The part of an error by which costs are corrected.
const CORRECTION: f64 = 0.5;
/// The change of a queue's load after which what was learnt of its moves does not hold.
const CHANGED: f64 = 0.25;
/// Samples after a move in which the queue that moved explains an error.
const FRESH: u32 = 8;
/// Bytes that are taken to cost as much as a request, until more is known.
const BYTES_AS_REQUEST: f64 = 8192.0;
/// The lowest cost of a request, as a part of the average on its worker.
const COST_LEAST: f64 = 0.1;
/// The time of a move, until one is measured, ns.
const MOVE_NS: f64 = 2e6;
/// The time that a move takes of control and of the two workers, ns.
const MOVE_FIXED_NS: f64 = 1e5;

/// What is known of a queue.
#[derive(Clone, Debug)]
pub(super) struct Learnt {
    /// Its worker, as of the last sample or move.
    pub(super) worker: u32,
    /// Time of its worker for one request, ns.
    pub(super) cost_ns: f64,
    /// The share of its worker's time that it needs: expected for the next second, on average of
    /// the last samples, and in the last sample.
    pub(super) expected: f64,
    pub(super) load: f64,
    pub(super) last_load: f64,
    /// Its requests per ns, on average and in the last sample.
    pub(super) rate: f64,
    pub(super) last_rate: f64,
    steadiness: Steadiness,
    moved_at: Option<u64>,
    /// It stays until this time.
    stays_until: u64,
    stays_at_load: f64,
    stay_ns: u64,
    /// How long a move of it takes, ns.
    move_ns: f64,
    /// Samples in which an error of its worker's time is taken to be its own, because it came last.
    fresh: u32,
}

impl Learnt {
    fn new(worker: u32) -> Self {
        Self {
            worker,
            cost_ns: 0.0,
            expected: 0.0,
            load: 0.0,
            last_load: 0.0,
            rate: 0.0,
            last_rate: 0.0,
            steadiness: Steadiness::default(),
            moved_at: None,
            stays_until: 0,
            stays_at_load: 0.0,
            stay_ns: STAY_NS,
            move_ns: MOVE_NS,
            fresh: 0,
        }
    }

    /// Notes a move, or an attempt, that took `took_ns`.
    pub(super) fn moved(&mut self, now_ns: u64, took_ns: u64) {
        self.moved_at = Some(now_ns);
        self.move_ns = 0.5 * self.move_ns + 0.5 * took_ns as f64;
        self.fresh = FRESH;
    }

    /// Has the queue stay for some time, longer each time, or until its load changes.
    pub(super) fn stay(&mut self, now_ns: u64) {
        self.stays_until = now_ns + self.stay_ns;
        self.stays_at_load = self.load;
        self.stay_ns = (self.stay_ns * 2).min(STAY_NS_MAX);
    }

    /// Returns whether its last move is long enough ago.
    pub(super) fn may_move_again(&self, now_ns: u64) -> bool {
        self.moved_at.is_none_or(|at| now_ns >= at + MOVE_EVERY_NS)
    }

    /// Returns whether it may be moved.
    pub(super) fn may_move(&self, now_ns: u64) -> bool {
        let changed = (self.load - self.stays_at_load).abs() > CHANGED;
        self.may_move_again(now_ns) && (now_ns >= self.stays_until || changed)
    }

    /// Returns the work that is not done because of a move, ns.
    pub(super) fn move_cost_ns(&self) -> f64 {
        self.move_ns * self.load + MOVE_FIXED_NS
    }
}

/// How well the load of a queue tells its load a second later.
///
/// A load that lasts is expected to stay as it is. One that changes all the time is expected to be
/// as it is on a long average, because a move would come too late for anything else.
#[derive(Clone, Debug)]
struct Steadiness {
    /// The last loads, the oldest first.
    past: VecDeque<f64>,
    /// The long average. None before the first load.
    mean: Option<f64>,
    /// The variance of the load, and its covariance with the load a second later.
    variance: f64,
    covariance: f64,
}

impl Default for Steadiness {
    fn default() -> Self {
        Self { past: VecDeque::new(), mean: None, variance: STEADY_AT_FIRST, covariance: STEADY_AT_FIRST }
    }
}

impl Steadiness {
    /// Adds a load, and returns what is expected a second later.
    fn expect(&mut self, load: f64) -> f64 {
        let mean = self.mean.map_or(load, |mean| mean + LONG * (load - mean));
        self.mean = Some(mean);
        self.past.push_back(load);
        if self.past.len() > LATER {
            let then = self.past.pop_front().unwrap_or(load) - mean;
            self.variance += LONG * (then * then - self.variance);
            self.covariance += LONG * (then * (load - mean) - self.covariance);
        }
        let part = (self.covariance / self.variance.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        mean + part * (load - mean)
    }
}

fn average(old: f64, new: f64) -> f64 {
    old + NEW * (new - old)
}

impl Balancer {
    /// Forgets queues and workers that are gone.
    pub(super) fn keep(&mut self, sample: &Sample) {
        let mut known = std::mem::take(&mut self.queues);
        for queue in &sample.queues {
            let (name, mut learnt) = known
                .remove_entry(&queue.name)
                .unwrap_or_else(|| (queue.name.clone(), Learnt::new(queue.worker)));
            learnt.worker = queue.worker;
            self.queues.insert(name, learnt);
        }
        let is_there = |id: &u32| sample.workers.iter().any(|worker| worker.id == *id);
        self.other.retain(|id, _| is_there(id));
        self.ran.retain(|id, _| is_there(id));
    }

    /// Learns from two samples. Returns false if they do not fit together, because a queue was
    /// moved in between.
    pub(super) fn learn(&mut self, before: &Sample, now: &Sample) -> bool {
        let ns = now.now_ns.saturating_sub(before.now_ns) as f64;
        let was: BTreeMap<&QueueName, &QueueSample> = before.queues.iter().map(|q| (&q.name, q)).collect();
        let stayed = |q: &QueueSample| was.get(&q.name).is_none_or(|before| before.worker == q.worker);
        if ns <= 0.0 || !now.queues.iter().all(stayed) {
            return false;
        }
        for worker in &now.workers {
            let Some(earlier) = before.workers.iter().find(|w| w.id == worker.id) else { continue };
            let ran = worker.ran_ns.saturating_sub(earlier.ran_ns) as f64 / ns;
            let average_ran = self.ran.entry(worker.id).or_insert(ran);
            *average_ran = average(*average_ran, ran.min(1.0));
            let busy_ns = (worker.busy_ns.saturating_sub(earlier.busy_ns) as f64).min(ns);
            let here = now.queues.iter().filter(|q| q.worker == worker.id);
            let done: Vec<_> = here.filter_map(|q| Some(Done::between(was.get(&q.name)?, q))).collect();
            self.learn_worker(worker.id, busy_ns, ns, &done);
        }
        true
    }

    /// Divides the time of a worker among its queues.
    fn learn_worker(&mut self, id: u32, busy_ns: f64, ns: f64, done: &[Done<'_>]) {
        let weights: f64 = done.iter().map(Done::weight).sum();
        for d in done {
            let Some(learnt) = self.queues.get_mut(d.name) else { continue };
            if learnt.cost_ns == 0.0 && d.requests > 0.0 {
                learnt.cost_ns = busy_ns * d.weight() / weights / d.requests;
            }
        }
        let cost = |queues: &BTreeMap<QueueName, Learnt>, name| queues.get(name).map_or(0.0, |q| q.cost_ns);
        let expected: f64 = done.iter().map(|d| cost(&self.queues, d.name) * d.requests).sum();
        let fresh = |queues: &BTreeMap<QueueName, Learnt>, d: &Done<'_>| {
            d.requests > 0.0 && queues.get(d.name).is_some_and(|q| q.fresh > 0)
        };
        let some_fresh = done.iter().any(|d| fresh(&self.queues, d));
        let requests: f64 = done.iter().map(|d| d.requests).sum();
        let least = if requests > 0.0 { COST_LEAST * busy_ns / requests } else { 0.0 };
        // The queues that an error is divided among, by what they are expected to need.
        let wrong: Vec<_> =
            done.iter().filter(|d| d.requests > 0.0 && (!some_fresh || fresh(&self.queues, d))).collect();
        let theirs: f64 = wrong.iter().map(|d| cost(&self.queues, d.name) * d.requests).sum();
        for d in wrong.into_iter().filter(|_| theirs > 0.0) {
            if let Some(learnt) = self.queues.get_mut(d.name) {
                let part = learnt.cost_ns * d.requests / theirs;
                let correction = CORRECTION * (busy_ns - expected) * part / d.requests;
                learnt.cost_ns = (learnt.cost_ns + correction).max(least);
                learnt.fresh = learnt.fresh.saturating_sub(1);
            }
        }
        let expected: f64 = done.iter().map(|d| cost(&self.queues, d.name) * d.requests).sum();
        let scale = if expected > 0.0 { busy_ns / expected } else { 0.0 };
        for d in done {
            let Some(learnt) = self.queues.get_mut(d.name) else { continue };
            learnt.last_load = learnt.cost_ns * d.requests * scale / ns;
            learnt.last_rate = d.requests / ns;
            learnt.load = average(learnt.load, learnt.last_load);
            learnt.expected = learnt.steadiness.expect(learnt.load);
            learnt.rate = average(learnt.rate, learnt.last_rate);
        }
        let other = if expected > 0.0 { 0.0 } else { busy_ns / ns };
        let old = self.other.entry(id).or_insert(other);
        *old = average(*old, other);
    }
}

/// What a queue did between two samples.
struct Done<'a> {
    name: &'a QueueName,
    requests: f64,
    bytes: f64,
}

impl<'a> Done<'a> {
    fn between(before: &QueueSample, now: &'a QueueSample) -> Self {
        Self {
            name: &now.name,
            requests: now.requests.saturating_sub(before.requests) as f64,
            bytes: now.bytes.saturating_sub(before.bytes) as f64,
        }
    }

    fn weight(&self) -> f64 {
        self.requests + self.bytes / BYTES_AS_REQUEST
    }
}
