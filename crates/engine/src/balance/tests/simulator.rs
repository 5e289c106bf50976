//! Workers that serve queues, as flows: in each tick a worker divides its time fairly among its
//! queues, and each takes what it needs of its part.

use super::super::*;

/// Length of a tick, s.
pub(super) const TICK: f64 = 0.02;
/// Ticks between two samples.
const SAMPLE: usize = 5;

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The same load all the time.
    Steady,
    /// Queues change their loads every few seconds.
    Shifting,
    /// Queues start and stop several times a second.
    Bursty,
    /// Most queues do nothing.
    Idle,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Steady, Self::Shifting, Self::Bursty, Self::Idle];
}

#[derive(Clone, Debug)]
pub(super) struct SimQueue {
    worker: usize,
    /// Time for a request, s.
    cost: f64,
    bytes: u64,
    /// Share of a worker that it could use, from a time on.
    demand: Vec<(f64, f64)>,
    /// Time in which a move keeps it from being served, s.
    stall: f64,
    pinned: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Load {
    seed: u64,
    /// Length of the run, s.
    seconds: f64,
    /// The CPUs of each worker.
    workers: Vec<Vec<usize>>,
    cpus: usize,
    queues: Vec<SimQueue>,
    /// Error of measured times.
    noise: f64,
}

impl Load {
    /// Makes a load of queues that each want the same all the time: their workers, and shares of a
    /// worker.
    pub(super) fn steady(workers: Vec<Vec<usize>>, cpus: usize, queues: &[(usize, f64)]) -> Self {
        let queue = |&(worker, wants): &(usize, f64)| SimQueue {
            worker,
            cost: 1e-6,
            bytes: 4096,
            demand: vec![(0.0, wants)],
            stall: 1e-3,
            pinned: false,
        };
        let queues = queues.iter().map(queue).collect();
        Self { seed: 1, seconds: 15.0, workers, cpus, queues, noise: 0.02 }
    }

    /// Has all queues want the same from a time on, until the end.
    pub(super) fn change(&mut self, at: f64, wants: f64, seconds: f64) {
        self.seconds = seconds;
        self.queues.iter_mut().for_each(|queue| queue.demand.push((at, wants)));
    }

    /// Gives each worker a CPU, and lets it run on all.
    pub(super) fn floating(mut self) -> Self {
        self.cpus = self.workers.len();
        self.workers.fill((0..self.cpus).collect());
        self
    }

    /// Has a queue stay.
    pub(super) fn pin(&mut self, queue: usize) {
        self.queues[queue].pinned = true;
    }
}

pub(super) struct Run {
    pub(super) moves: Vec<(f64, Decision)>,
    /// How the number of workers changed.
    pub(super) resized: Vec<(f64, Resize)>,
    /// The number of workers in each tick.
    pub(super) workers: Vec<usize>,
    /// Work done in each tick, in shares of one worker.
    done: Vec<f64>,
}

impl Run {
    /// Returns the work per second from a time on.
    pub(super) fn work(&self, from: f64) -> f64 {
        let done = &self.done[(from / TICK) as usize..];
        done.iter().sum::<f64>() / done.len() as f64
    }
}

/// xorshift64*
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        let mut new = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..4 {
            new.next();
        }
        new
    }

    fn next(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }
}

/// Makes the load of a seed.
pub(super) fn load(seed: u64, kind: Kind, seconds: f64) -> Load {
    let r = &mut Random::new(seed);
    let count = 2 + r.below(5);
    let cpus = if r.next() < 0.7 { count } else { 1 + r.below(count) };
    // Floating, one on each CPU, or some on the same.
    let pinned = r.below(4);
    let of = |at: usize| match pinned {
        0 | 1 => (0..cpus).collect(),
        2 => vec![at % cpus],
        _ => vec![at % cpus.div_ceil(2)],
    };
    let workers: Vec<Vec<usize>> = (0..count).map(of).collect();
    let most = if r.next() < 0.2 { 64 } else { 12 };
    let queues = 1 + r.below(most);
    let (turn, start) = (r.next() < 0.5, r.below(count));
    let stall = 10f64.powf(r.between(-4.0, -1.7));
    let mut queue = |at: usize| SimQueue {
        worker: if turn { at % count } else { start },
        cost: 10f64.powf(r.between(-6.5, -4.5)),
        bytes: [0, 512, 4096, 65536][r.below(4)],
        demand: demand(r, kind, seconds),
        stall: stall * (0.5 + r.next()),
        pinned: false,
    };
    let queues = (0..queues).map(&mut queue).collect();
    Load { seed, seconds, workers, cpus, queues, noise: Random::new(!seed).between(0.0, 0.05) }
}

/// A queue wants nothing, a little, much, or all that it can get.
fn wanted(r: &mut Random, idle: f64) -> f64 {
    match r.next() {
        x if x < idle => 0.0,
        x if x < idle + (1.0 - idle) * 0.5 => r.between(0.005, 0.15),
        x if x < idle + (1.0 - idle) * 0.8 => r.between(0.15, 0.8),
        _ => 2.0,
    }
}

fn demand(r: &mut Random, kind: Kind, seconds: f64) -> Vec<(f64, f64)> {
    let (every, idle) = match kind {
        Kind::Steady => return vec![(0.0, wanted(r, 0.2))],
        Kind::Shifting => (r.between(2.0, 8.0), 0.3),
        Kind::Bursty => (r.between(0.05, 0.8), 0.5),
        Kind::Idle => (r.between(0.5, 8.0), 0.9),
    };
    let (mut at, mut demand) = (0.0, Vec::new());
    while at < seconds {
        demand.push((at, wanted(r, idle)));
        at += every * r.between(0.5, 1.5);
    }
    demand
}

impl SimQueue {
    fn wants(&self, at: f64) -> f64 {
        let started = self.demand.partition_point(|(from, _)| *from <= at);
        self.demand[started.max(1) - 1].1
    }
}

/// Divides `time` among wants: each gets the same part at most, and nobody more than it wants.
fn divide(time: f64, wants: &[f64]) -> Vec<f64> {
    let mut order: Vec<_> = (0..wants.len()).collect();
    order.sort_by(|a, b| wants[*a].total_cmp(&wants[*b]));
    let (mut left, mut parts) = (time, vec![0.0; wants.len()]);
    for (done, at) in order.iter().enumerate() {
        let part = wants[*at].min(left / (wants.len() - done) as f64);
        parts[*at] = part;
        left -= part;
    }
    parts
}

/// What each queue gets in a tick, and whether each worker wants more than it gets.
fn serve(load: &Load, workers: &[usize], wants: &[f64]) -> (Vec<f64>, Vec<bool>) {
    let mut got = vec![0.0; wants.len()];
    let mut more = vec![false; load.workers.len()];
    let of_worker: Vec<Vec<usize>> = (0..load.workers.len())
        .map(|worker| (0..wants.len()).filter(|queue| workers[*queue] == worker).collect())
        .collect();
    let by_worker: Vec<f64> =
        of_worker.iter().map(|queues| queues.iter().map(|q| wants[*q]).sum::<f64>().min(1.0)).collect();
    let mut time = vec![0.0; load.workers.len()];
    let pinned = |w: &usize| load.workers[*w].len() == 1 && load.cpus > 1;
    for cpu in 0..load.cpus {
        let here: Vec<usize> =
            (0..load.workers.len()).filter(|w| pinned(w) && load.workers[*w][0] == cpu).collect();
        let parts = divide(1.0, &here.iter().map(|w| by_worker[*w]).collect::<Vec<_>>());
        here.iter().zip(parts).for_each(|(w, part)| time[*w] = part);
    }
    let free: Vec<usize> = (0..load.workers.len()).filter(|w| !pinned(w)).collect();
    let parts = divide(load.cpus as f64, &free.iter().map(|w| by_worker[*w]).collect::<Vec<_>>());
    free.iter().zip(parts).for_each(|(w, part)| time[*w] = part.min(1.0));
    for (worker, queues) in of_worker.iter().enumerate() {
        let wanted: Vec<f64> = queues.iter().map(|q| wants[*q]).collect();
        let parts = divide(time[worker], &wanted);
        more[worker] = wanted.iter().sum::<f64>() > time[worker] + 1e-9;
        queues.iter().zip(parts).for_each(|(queue, part)| got[*queue] = part);
    }
    (got, more)
}

/// How queues get workers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum With {
    /// All are there, and queues stay where they start.
    Fixed,
    /// All are there, and queues move.
    Balance,
    /// `workers=auto`: one is there, and all queues are on it.
    Auto,
}

/// Runs a load, with the queues where they start, or balanced.
pub(super) fn run(load: &Load, balance: bool) -> Run {
    run_with(load, if balance { With::Balance } else { With::Fixed })
}

fn gather(balancer: &mut Balancer, there: &BTreeSet<usize>) -> Vec<Decision> {
    balancer.gather(&pool(there, 0))
}

fn pool(there: &BTreeSet<usize>, most: usize) -> Pool {
    let workers: Vec<WorkerId> = there.iter().map(|id| *id as WorkerId).collect();
    Pool { export: "vm".to_owned(), workers, most }
}

/// Has the balancer change the number of workers.
fn resize(
    balancer: &mut Balancer,
    there: &mut BTreeSet<usize>,
    most: usize,
    at: f64,
    worker_of: &mut [usize],
) -> Option<Resize> {
    let (_, resize) = balancer.resize(&[pool(there, most)]).pop()?;
    match resize {
        Resize::More { .. } => {
            let new = (0..most).find(|id| !there.contains(id)).expect("there is room");
            there.insert(new);
            balancer.made("vm", new as WorkerId, ns(at));
        }
        Resize::Less { idle } => {
            there.remove(&(idle as usize));
            worker_of.iter_mut().filter(|worker| **worker == idle as usize).for_each(|worker| *worker = 0);
            balancer.ended("vm", idle, ns(at), false);
        }
    }
    Some(resize)
}

/// Runs a load.
pub(super) fn run_with(load: &Load, with: With) -> Run {
    let r = &mut Random::new(load.seed ^ 0x5555);
    let mut balancer = Balancer::default();
    let mut worker_of: Vec<usize> = load.queues.iter().map(|q| q.worker).collect();
    let mut there: BTreeSet<usize> = (0..load.workers.len()).collect();
    if with == With::Auto {
        worker_of.fill(0);
        there = BTreeSet::from([0]);
    }
    let mut stalled_until = vec![0.0; load.queues.len()];
    let mut requests = vec![0.0; load.queues.len()];
    let mut busy = vec![0.0; load.workers.len()];
    let mut ran = vec![0.0; load.workers.len()];
    let (mut got, mut more, mut last, mut placed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut out = Run { moves: Vec::new(), resized: Vec::new(), workers: Vec::new(), done: Vec::new() };
    for tick in 0..(load.seconds / TICK) as usize {
        let at = tick as f64 * TICK;
        let served = |q: usize| (1.0 - (stalled_until[q] - at) / TICK).clamp(0.0, 1.0);
        let wants: Vec<f64> =
            load.queues.iter().enumerate().map(|(q, queue)| queue.wants(at) * served(q)).collect();
        if last != wants || placed != worker_of {
            (got, more) = serve(load, &worker_of, &wants);
            (last, placed) = (wants, worker_of.clone());
        }
        for (q, got) in got.iter().enumerate() {
            requests[q] += got * TICK / load.queues[q].cost;
            ran[worker_of[q]] += got * TICK;
            let error = 1.0 + load.noise * (2.0 * r.next() - 1.0);
            busy[worker_of[q]] += if more[worker_of[q]] { 0.0 } else { got * TICK * error };
        }
        busy.iter_mut().zip(&more).for_each(|(busy, more)| *busy += if *more { TICK } else { 0.0 });
        out.done.push(got.iter().sum());
        out.workers.push(there.len());
        if with == With::Fixed || tick % SAMPLE != 0 {
            continue;
        }
        let sample = sample(load, at, &there, &worker_of, &requests, &busy, &ran);
        let mut decisions = balancer.observe(sample);
        if with == With::Auto && decisions.is_empty() {
            decisions = gather(&mut balancer, &there);
        }
        if with == With::Auto && decisions.is_empty() {
            let resized = resize(&mut balancer, &mut there, load.workers.len(), at, &mut worker_of);
            out.resized.extend(resized.map(|resize| (at, resize)));
            if resized.is_some() {
                continue;
            }
        }
        balancer.begin(&decisions);
        let mut now = at + TICK;
        for decision in decisions {
            let q = usize::from(decision.queue.index);
            let stall = load.queues[q].stall;
            stalled_until[q] = now + stall;
            worker_of[q] = decision.to as usize;
            now += stall;
            balancer.moved(&decision, ns(at), ns(stall));
            out.moves.push((at, decision));
        }
    }
    out
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn sample(
    load: &Load,
    at: f64,
    there: &BTreeSet<usize>,
    worker_of: &[usize],
    requests: &[f64],
    busy: &[f64],
    ran: &[f64],
) -> Sample {
    let all: Vec<WorkerId> = there.iter().map(|id| *id as WorkerId).collect();
    let worker = |(id, cpus): (usize, &Vec<usize>)| WorkerSample {
        id: id as WorkerId,
        cpus: cpus.clone(),
        busy_ns: ns(busy[id]),
        ran_ns: ns(ran[id]),
    };
    let queue = |(q, queue): (usize, &SimQueue)| QueueSample {
        name: QueueName { export: "vm".to_owned(), index: q as u16 },
        worker: worker_of[q] as WorkerId,
        requests: requests[q] as u64,
        bytes: requests[q] as u64 * queue.bytes,
        targets: if queue.pinned { Vec::new() } else { all.clone() },
    };
    Sample {
        now_ns: ns(at),
        workers: load.workers.iter().enumerate().filter(|(id, _)| there.contains(id)).map(worker).collect(),
        queues: load.queues.iter().enumerate().map(queue).collect(),
    }
}

/// Runs a load whose queues stay, and returns what would be done.
pub(super) fn dry_run(load: &Load) -> Vec<Decision> {
    let mut balancer = Balancer::default();
    let worker_of: Vec<usize> = load.queues.iter().map(|q| q.worker).collect();
    let wants: Vec<f64> = load.queues.iter().map(|q| q.wants(0.0)).collect();
    let (got, _) = serve(load, &worker_of, &wants);
    let mut told = Vec::new();
    for second in 0..150 {
        let at = f64::from(second) * 0.1;
        let requests: Vec<f64> = got.iter().zip(&load.queues).map(|(got, q)| got * at / q.cost).collect();
        let busy_of =
            |worker| got.iter().zip(&worker_of).filter(move |(_, w)| **w == worker).map(|(got, _)| got * at);
        let busy: Vec<f64> = (0..load.workers.len()).map(|worker| busy_of(worker).sum()).collect();
        let decisions = balancer.observe(sample(
            load,
            at,
            &(0..load.workers.len()).collect(),
            &worker_of,
            &requests,
            &busy,
            &busy,
        ));
        decisions.iter().for_each(|decision| balancer.told(decision, ns(at)));
        told.extend(decisions);
    }
    told
}

/// Returns the work per second of the best placement of a steady load that is found by trying
/// single moves and exchanges, from several starts.
pub(super) fn best(load: &Load) -> f64 {
    let wants: Vec<f64> = load.queues.iter().map(|q| q.wants(0.0)).collect();
    let work = |workers: &[usize]| serve(load, workers, &wants).0.iter().sum::<f64>();
    let (queues, workers) = (load.queues.len(), load.workers.len());
    let mut best: f64 = 0.0;
    let mut order: Vec<usize> = (0..queues).collect();
    order.sort_by(|a, b| wants[*b].total_cmp(&wants[*a]));
    for start in 0..3 {
        let mut place: Vec<usize> =
            (0..queues).map(|q| [q % workers, 0, (q * 7 + 3) % workers][start]).collect();
        let mut now = work(&place);
        loop {
            let mut better = false;
            for q in &order {
                for to in 0..workers {
                    let from = std::mem::replace(&mut place[*q], to);
                    let then = work(&place);
                    if then > now + 1e-6 {
                        (now, better) = (then, true);
                    } else {
                        place[*q] = from;
                    }
                }
            }
            if !better {
                break;
            }
        }
        best = best.max(now);
    }
    best
}
