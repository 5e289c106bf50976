//! The moves that are worth their cost.
//!
//! Requests wait for their worker the more, the busier it is. For a worker that is busy for the
//! share L of the time, the wait per second is taken as L²: it is nothing for an idle worker, and
//! the square is below what queueing theory has for any arrivals (L²/(1 - L)). A move from a busy
//! worker to a less busy one lowers the sum.

use std::collections::{BTreeMap, BTreeSet};

use super::learn::Learnt;
use super::{AHEAD_NS, Balancer, Decision, QueueName, QueueSample, Reason, Sample, WorkerId, WorkerSample};

/// The least share for which a worker is busy before a queue leaves it.
pub(super) const HOT: f64 = 0.5;
/// The share from which on a worker has no time left.
pub(super) const FULL: f64 = 0.95;
/// How certain it is that the other queues of a full worker have more to do.
const MORE_TO_DO: f64 = 0.5;
/// The least gain of all moves of a plan in the next second, ns.
const GAIN_LEAST_NS: f64 = 3e7;
/// How often the gain has to pay the cost.
const PAYS: f64 = 2.0;
/// Moves of a plan at most.
const MOVES_MAX: usize = 32;
/// The share for which a worker runs above which it has no room for a queue whose need is not
/// known.
pub(super) const ROOM: f64 = 0.85;
/// The part of its worker's load from which on a queue is alone there.
const ALONE: f64 = 0.995;
/// The least share of a queue that is worth a move.
pub(super) const LOAD_LEAST: f64 = 1e-4;

/// What can be used by one thread at a time: a worker, or a CPU that workers are pinned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Worker(WorkerId),
    Cpu(usize),
}

impl Place {
    pub(super) fn of(worker: &WorkerSample) -> Self {
        match worker.cpus[..] {
            [cpu] => Self::Cpu(cpu),
            _ => Self::Worker(worker.id),
        }
    }
}

impl Balancer {
    /// Returns the share for which each place is busy, with given loads of queues.
    pub(super) fn places(&self, sample: &Sample, load: impl Fn(&Learnt) -> f64) -> BTreeMap<Place, f64> {
        let mut places = BTreeMap::new();
        for worker in &sample.workers {
            let of_queues = self.queues.values().filter(|q| q.worker == worker.id).map(&load);
            let other = self.other.get(&worker.id).copied().unwrap_or(0.0);
            *places.entry(Place::of(worker)).or_insert(0.0) += other + of_queues.sum::<f64>();
        }
        places
    }

    /// Returns the share for which the busiest place of these workers is busy.
    pub(super) fn hottest(
        &self,
        sample: &Sample,
        of: &BTreeSet<WorkerId>,
        load: impl Fn(&Learnt) -> f64,
    ) -> f64 {
        let places = self.places(sample, load);
        let meant = sample.workers.iter().filter(|worker| of.contains(&worker.id));
        meant.filter_map(|worker| places.get(&Place::of(worker))).copied().fold(0.0, f64::max)
    }

    /// Returns the share of the time for which the workers of each place ran.
    pub(super) fn ran_of_places(&self, sample: &Sample) -> BTreeMap<Place, f64> {
        let mut ran = BTreeMap::new();
        for worker in &sample.workers {
            *ran.entry(Place::of(worker)).or_insert(0.0) += self.ran.get(&worker.id).copied().unwrap_or(0.0);
        }
        ran
    }

    /// Returns the places with their loads, and the place of each worker. None: no CPU has time, so
    /// that no worker can do more than it does.
    fn places_with_time(&self, sample: &Sample) -> Option<(BTreeMap<Place, f64>, BTreeMap<WorkerId, Place>)> {
        let places = self.places(sample, |queue| queue.expected);
        let cpus: BTreeSet<usize> = sample.workers.iter().flat_map(|w| w.cpus.iter().copied()).collect();
        let used: f64 = self.ran_of_places(sample).values().map(|ran| ran.min(1.0)).sum();
        let place_of = sample.workers.iter().map(|w| (w.id, Place::of(w))).collect();
        (used < FULL * cpus.len() as f64).then_some((places, place_of))
    }

    /// Returns a move from a worker that has no time left, if its gain cannot be predicted: the
    /// other queues may have more to do, and costs may be wrong that only a move shows.
    ///
    /// A worker that shares CPUs with its clients may be busy nearly all the time, because it waits
    /// for a CPU. It has room if it ran for a smaller part, and had nothing to do now and then.
    pub(super) fn attempt(&self, sample: &Sample) -> Option<Decision> {
        let (places, place_of) = self.places_with_time(sample)?;
        let ran = self.ran_of_places(sample);
        let load_of = |place: &Place| places.get(place).copied().unwrap_or(0.0);
        let queues = sample.queues.iter().filter_map(|queue| {
            let from = place_of.get(&queue.worker).filter(|place| load_of(place) >= FULL)?;
            let learnt = self.queues.get(&queue.name)?;
            if !learnt.may_move(sample.now_ns)
                || learnt.expected <= LOAD_LEAST
                || learnt.expected > ALONE * load_of(from)
            {
                return None;
            }
            let targets = queue.targets.iter().filter_map(|id| Some((*id, *place_of.get(id)?)));
            let (to, place) = targets
                .filter(|(_, place)| place != from)
                .min_by(|a, b| load_of(&a.1).total_cmp(&load_of(&b.1)).then(a.0.cmp(&b.0)))?;
            let (to_busy, load) = (load_of(&place), learnt.expected);
            let to_ran = ran.get(&place).copied().unwrap_or(0.0);
            let fit = (1.0 - to_ran - load).abs();
            let decision = Decision {
                queue: queue.name.clone(),
                from: queue.worker,
                to,
                reason: Reason::Try { to_busy, load },
            };
            (to_ran < ROOM && to_busy < FULL).then_some((fit, decision))
        });
        queues.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, decision)| decision)
    }

    /// Returns the moves that are worth their cost, if their gain together is.
    pub(super) fn plan(&self, sample: &Sample) -> Vec<Decision> {
        let Some((mut places, place_of)) = self.places_with_time(sample) else { return Vec::new() };
        let mut done = BTreeSet::new();
        let mut decisions: Vec<Decision> = Vec::new();
        let mut gain_ns = 0.0;
        while decisions.len() < MOVES_MAX {
            let hot = places.iter().filter(|(place, load)| **load >= HOT && !done.contains(*place));
            let Some((&hot, _)) = hot.max_by(|a, b| a.1.total_cmp(b.1)) else { break };
            let chosen: BTreeSet<&QueueName> = decisions.iter().map(|d| &d.queue).collect();
            let here = sample.queues.iter().filter(|q| {
                !q.targets.is_empty() && place_of.get(&q.worker) == Some(&hot) && !chosen.contains(&q.name)
            });
            let moves = here.filter_map(|q| self.best_move(sample.now_ns, q, hot, &places, &place_of));
            let best = moves.max_by(|a, b| a.net_ns().total_cmp(&b.net_ns()));
            let Some(best) = best.filter(|best| best.gain_ns > PAYS * best.cost_ns) else {
                done.insert(hot);
                continue;
            };
            gain_ns += best.gain_ns;
            decisions.push(best.decision(&places, hot));
            *places.entry(hot).or_default() -= best.load;
            *places.entry(best.place).or_default() += best.load;
        }
        if gain_ns < GAIN_LEAST_NS { Vec::new() } else { decisions }
    }

    /// Returns the move of a queue to the least busy worker that it may be on.
    fn best_move<'a>(
        &self,
        now_ns: u64,
        queue: &'a QueueSample,
        hot: Place,
        places: &BTreeMap<Place, f64>,
        place_of: &BTreeMap<WorkerId, Place>,
    ) -> Option<Candidate<'a>> {
        let learnt =
            self.queues.get(&queue.name).filter(|q| q.may_move(now_ns) && q.expected > LOAD_LEAST)?;
        let load_of = |place: &Place| places.get(place).copied().unwrap_or(0.0);
        let targets = queue.targets.iter().filter_map(|id| Some((*id, *place_of.get(id)?)));
        let (to, place) = targets
            .filter(|(_, place)| *place != hot)
            .min_by(|a, b| load_of(&a.1).total_cmp(&load_of(&b.1)).then(a.0.cmp(&b.0)))?;
        let (from_busy, to_busy, load) = (load_of(&hot), load_of(&place), learnt.expected);
        // L² of both, before minus after.
        let mut gain = 2.0 * load * (from_busy - to_busy - load);
        if from_busy >= FULL && to_busy + load <= 1.0 {
            // Those that stay can use what it leaves. Nobody can if it is alone.
            gain += MORE_TO_DO * load.min(from_busy - load).max(0.0);
        }
        let cost_ns = learnt.move_cost_ns();
        Some(Candidate { queue, to, place, load, gain_ns: gain * AHEAD_NS, cost_ns })
    }
}

struct Candidate<'a> {
    queue: &'a QueueSample,
    to: WorkerId,
    place: Place,
    load: f64,
    gain_ns: f64,
    cost_ns: f64,
}

impl Candidate<'_> {
    fn net_ns(&self) -> f64 {
        self.gain_ns - self.cost_ns
    }

    fn decision(&self, places: &BTreeMap<Place, f64>, hot: Place) -> Decision {
        let busy = |place| places.get(place).copied().unwrap_or(0.0).min(1.0);
        Decision {
            queue: self.queue.name.clone(),
            from: self.queue.worker,
            to: self.to,
            reason: Reason::Gain {
                from_busy: busy(&hot),
                to_busy: busy(&self.place),
                load: self.load,
                gain_ns: self.gain_ns,
                cost_ns: self.cost_ns,
            },
        }
    }
}
