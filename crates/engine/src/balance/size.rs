//! How many workers an export with `workers=auto` has: as many as pay.
//!
//! | step | when |
//! | --- | --- |
//! | one more | a worker has had no time left for a while, and no move between the workers that are there helps |
//! | queues leave a worker | for some seconds, the others had room for them |
//! | one less | for some seconds, a worker had nothing to do |
//!
//! Whether one more worker pays is measured: [`judge`](Balancer::judge) undoes moves that gave
//! nothing. The worker has nothing to do then, and ends. The next one is made later, and later each
//! time.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::{FULL, HOT, LOAD_LEAST, Place, ROOM};
use super::{Balancer, Decision, QueueName, Reason, STAY_NS, STAY_NS_MAX, WorkerId};

/// Samples in turn in which one more worker is wanted before it is made.
const GROW_AFTER: u32 = 5;
/// Time for which a worker had nothing to do before it ends, and for which others had room for its
/// queues before they leave it, ns.
const SHRINK_AFTER_NS: u64 = 5_000_000_000;
/// The life of a worker that did not pay is shorter, ns.
const PAID_AFTER_NS: u64 = 2 * SHRINK_AFTER_NS;

/// The workers of an export that may get more of them.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The export.
    pub export: String,
    /// Its workers. The first one stays.
    pub workers: Vec<WorkerId>,
    /// Workers at most: the number of CPUs.
    pub most: usize,
}

/// A change of the number of workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Resize {
    /// One more.
    More {
        /// The worker that has no time left.
        full: WorkerId,
        /// The number of its queues that have requests.
        queues: usize,
    },
    /// One less.
    Less {
        /// The worker that has nothing to do.
        idle: WorkerId,
    },
}

impl std::fmt::Display for Resize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::More { full, queues } => {
                write!(
                    f,
                    "worker {full} has no time left for its {queues} queues, and no other worker has room"
                )
            }
            Self::Less { idle } => {
                write!(f, "worker {idle} had nothing to do for {} s", SHRINK_AFTER_NS / 1_000_000_000)
            }
        }
    }
}

/// What is known about the number of workers of an export.
#[derive(Clone, Debug, Default)]
pub(super) struct Size {
    /// Samples in turn in which one more was wanted.
    wanted: u32,
    /// No worker is made before.
    not_before_ns: u64,
    /// How long the next one that does not pay keeps others from being made, ns.
    wait_ns: u64,
    /// When workers were made.
    made: BTreeMap<WorkerId, u64>,
    /// Since when workers have had nothing to do.
    idle: BTreeMap<WorkerId, u64>,
    /// Since when the others have had room for the queues of a worker.
    fits: Option<(WorkerId, u64)>,
}

/// A queue of a worker: its name, its load, and where it may go.
type Placed<'a> = (&'a QueueName, f64, &'a [WorkerId]);

impl Balancer {
    /// Returns how the numbers of workers should change, by export, after
    /// [`observe`](Self::observe) has taken a sample with these workers as targets. `pools` has all
    /// exports with `workers=auto`.
    pub fn resize(&mut self, pools: &[Pool]) -> Vec<(String, Resize)> {
        let mut known = std::mem::take(&mut self.sizes);
        let Some(now_ns) = self.previous.as_ref().map(|sample| sample.now_ns) else {
            self.sizes = known;
            return Vec::new();
        };
        let mut found = Vec::new();
        for pool in pools {
            let mut size = known.remove(&pool.export).unwrap_or_default();
            found.extend(self.resize_by(&mut size, now_ns, pool).map(|resize| (pool.export.clone(), resize)));
            self.sizes.insert(pool.export.clone(), size);
        }
        found
    }

    fn resize_by(&self, size: &mut Size, now_ns: u64, pool: &Pool) -> Option<Resize> {
        let is_idle = |id: &&WorkerId| self.loads_of(**id).all(|(_, load, _)| load <= LOAD_LEAST);
        let idle: BTreeSet<WorkerId> = pool.workers.iter().skip(1).filter(is_idle).copied().collect();
        size.idle.retain(|id, _| idle.contains(id));
        idle.iter().for_each(|id| _ = size.idle.entry(*id).or_insert(now_ns));
        let long = |since: &u64| now_ns >= since + SHRINK_AFTER_NS;
        let ends = size.idle.iter().find(|(_, since)| long(since));
        if let Some((&idle, _)) = ends {
            return Some(Resize::Less { idle });
        }
        let more = self.one_more(pool, !idle.is_empty()).filter(|_| now_ns >= size.not_before_ns);
        size.wanted = if more.is_some() { size.wanted + 1 } else { 0 };
        more.filter(|_| size.wanted >= GROW_AFTER)
    }

    /// Returns the queues that are on a worker.
    fn loads_of(&self, worker: WorkerId) -> impl Iterator<Item = Placed<'_>> {
        let queues = self.previous.iter().flat_map(|sample| &sample.queues);
        queues
            .filter(move |q| q.worker == worker)
            .filter_map(|q| Some((&q.name, self.queues.get(&q.name)?.expected, q.targets.as_slice())))
    }

    /// Says which worker one more would relieve. No other worker must have room for its queues, or
    /// else moves must not have helped.
    fn one_more(&self, pool: &Pool, one_is_idle: bool) -> Option<Resize> {
        let sample = self.previous.as_ref()?;
        let places = self.places(sample, |queue| queue.expected);
        let place_of: BTreeMap<_, _> = sample.workers.iter().map(|w| (w.id, Place::of(w))).collect();
        let load =
            |id: &WorkerId| place_of.get(id).and_then(|place| places.get(place)).copied().unwrap_or(0.0);
        let used: f64 = self.ran_of_places(sample).values().map(|ran| ran.min(1.0)).sum();
        if used >= FULL * pool.most as f64 || one_is_idle || pool.workers.len() >= pool.most {
            return None;
        }
        let is_moving = self.trial.is_some() || self.streak > 0;
        if is_moving && pool.workers.iter().any(|id| load(id) < ROOM) {
            return None;
        }
        let movable = |id: &WorkerId| {
            let loaded = self.loads_of(*id).filter(|(_, load, _)| *load > LOAD_LEAST);
            let (all, may) =
                loaded.fold((0, 0), |n, (_, _, to)| (n.0 + 1, n.1 + usize::from(!to.is_empty())));
            (all >= 2 && may >= 1).then_some(all)
        };
        let full = pool.workers.iter().filter(|id| load(id) >= FULL);
        full.filter_map(|id| Some((*id, movable(id)?)))
            .max_by_key(|(_, queues)| *queues)
            .map(|(full, queues)| Resize::More { full, queues })
    }

    /// Returns the moves after which a worker of an export has nothing to do, if the others have
    /// had room for its queues for some seconds. They are reported like those of
    /// [`observe`](Self::observe), which has to have returned none.
    pub fn gather(&mut self, pool: &Pool) -> Vec<Decision> {
        let Some(now_ns) = self.previous.as_ref().map(|sample| sample.now_ns) else { return Vec::new() };
        if self.trial.is_some() || self.streak > 0 {
            return Vec::new();
        }
        let Some(fits) = self.sizes.get(&pool.export).map(|size| size.fits) else { return Vec::new() };
        // Of workers that are as busy, the one that was found before.
        let before =
            fits.and_then(|(worker, since)| Some((worker, since, self.leave(worker, now_ns, pool)?)));
        let found = before.or_else(|| {
            let worker = self.least_busy(pool)?;
            Some((worker, now_ns, self.leave(worker, now_ns, pool)?))
        });
        let Some(size) = self.sizes.get_mut(&pool.export) else { return Vec::new() };
        let Some((worker, since, moves)) = found else {
            size.fits = None;
            return Vec::new();
        };
        size.fits = Some((worker, since));
        if now_ns < since + SHRINK_AFTER_NS {
            return Vec::new();
        }
        size.fits = None;
        moves
    }

    /// Returns the share for which the queues of each worker of an export need it.
    fn needs(&self, pool: &Pool) -> BTreeMap<WorkerId, f64> {
        let sum = |id: WorkerId| self.loads_of(id).map(|(_, load, _)| load).sum::<f64>();
        pool.workers.iter().map(|id| (*id, sum(*id))).collect()
    }

    /// Returns the least busy worker that has something to do.
    fn least_busy(&self, pool: &Pool) -> Option<WorkerId> {
        let needs = self.needs(pool);
        let others = pool.workers.iter().skip(1).copied();
        others.filter(|id| needs[id] > LOAD_LEAST).min_by(|a, b| needs[a].total_cmp(&needs[b]))
    }

    /// Returns where the queues of a worker would go. None: they have to stay, or have no room.
    fn leave(&self, from: WorkerId, now_ns: u64, pool: &Pool) -> Option<Vec<Decision>> {
        let mut loads = self.needs(pool);
        let mut queues: Vec<Placed<'_>> =
            self.loads_of(from).filter(|(_, load, _)| *load > LOAD_LEAST).collect();
        queues.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut moves = Vec::new();
        for (name, load, targets) in queues {
            if !self.queues.get(name).is_some_and(|queue| queue.may_move(now_ns)) {
                return None;
            }
            // Those that have nothing to do are to end.
            let others = targets.iter().filter(|id| **id != from && loads.contains_key(id));
            let used = others.filter(|id| loads[id] > LOAD_LEAST || Some(*id) == pool.workers.first());
            let &to = used.min_by(|a, b| loads[a].total_cmp(&loads[b]))?;
            let busy = loads.entry(to).or_default();
            *busy += load;
            if *busy > HOT {
                return None;
            }
            moves.push(Decision {
                queue: name.clone(),
                from,
                to,
                reason: Reason::Fewer { to_busy: *busy, load },
            });
        }
        (!moves.is_empty()).then_some(moves)
    }

    /// Notes that a worker was made for an export.
    pub fn made(&mut self, export: &str, worker: WorkerId, now_ns: u64) {
        let size = self.sizes.entry(export.to_owned()).or_default();
        size.wanted = 0;
        size.made.insert(worker, now_ns);
        // Queues may go to it at once.
        self.patience = super::PATIENCE;
    }

    /// Notes that a worker of an export has ended. `at_rest`: while no requests came, which says
    /// nothing about what it gave.
    pub fn ended(&mut self, export: &str, worker: WorkerId, now_ns: u64, at_rest: bool) {
        let size = self.sizes.entry(export.to_owned()).or_default();
        size.idle.remove(&worker);
        let Some(made) = size.made.remove(&worker) else { return };
        match now_ns < made + PAID_AFTER_NS {
            _ if at_rest => {}
            true => size.not_paid(now_ns),
            false => size.wait_ns = 0,
        }
    }

    /// Notes that the number of workers was not changed, because that failed, may not be, or is a
    /// dry run.
    pub fn not_resized(&mut self, export: &str, resize: Resize, now_ns: u64) {
        let size = self.sizes.entry(export.to_owned()).or_default();
        match resize {
            Resize::More { .. } => size.not_paid(now_ns),
            // It is asked for again when the time is over once more.
            Resize::Less { .. } => size.idle.clear(),
        }
    }
}

impl Size {
    /// Forgets what was seen in the samples before a pause.
    pub(super) fn pause(&mut self) {
        self.wanted = 0;
        self.fits = None;
        self.idle.clear();
    }

    fn not_paid(&mut self, now_ns: u64) {
        self.wanted = 0;
        self.wait_ns = (self.wait_ns * 2).clamp(STAY_NS, STAY_NS_MAX);
        self.not_before_ns = now_ns + self.wait_ns;
    }
}
