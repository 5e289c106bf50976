//! The thread that has queues follow load, and its commands.
//!
//! It runs while an export wants it, and takes samples while requests come. It reads counters, and
//! moves queues by the same attach as commands. The data path takes no lock for it.

mod size;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use vshunt_engine::balance::{Balancer, Decision, QueueName, QueueSample, Sample};
use vshunt_engine::{State, WorkerId};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::{BalanceDecision, BalanceInfo, BalanceMode, BalanceOutcome, QueueInfo};

use super::Daemon;
use crate::event::Event;
use crate::export::Export;

/// Time between two samples while requests come.
const EVERY: Duration = Duration::from_millis(100);
/// Time between two looks while none come.
const IDLE: Duration = Duration::from_secs(1);
/// Samples without a request after which the thread rests.
const IDLE_SAMPLES: u32 = 10;
/// The number of looks without a request after which workers end that are not needed, and after
/// which those are tried again that had a queue of another export.
const REST: u32 = 5;
/// How long a move waits for requests in flight. The queue takes nothing new meanwhile.
const MOVE_LIMIT: Duration = Duration::from_millis(200);

/// The state of the thread.
struct Balancing {
    auto: Balancer,
    dry_run: Balancer,
    since: Instant,
    /// Requests of the exports so far.
    requests: u64,
    /// Samples without a new request.
    quiet: u32,
}

impl Balancing {
    fn new() -> Self {
        let (auto, dry_run) = (Balancer::default(), Balancer::default());
        Self { auto, dry_run, since: Instant::now(), requests: 0, quiet: IDLE_SAMPLES }
    }

    fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }
}

impl Daemon {
    /// Sets the mode of an export, or that of the daemon, which is for exports without a mode of
    /// their own. `None` takes the mode of an export away. Queues that commands attached may be
    /// moved again.
    ///
    /// # Errors
    /// There is no such export, or its queues cannot follow load.
    pub fn balance_set(&self, export: Option<&str>, mode: Option<BalanceMode>) -> Result<()> {
        match export {
            None => self.balance.set(mode.unwrap_or_default()),
            Some(name) => {
                let serving = self.serving(name)?;
                if mode.is_some_and(|mode| mode != BalanceMode::Off) {
                    serving.check_balanced()?;
                }
                self.balance.set_of(name, mode);
            }
        }
        self.start_balancing();
        Ok(())
    }

    /// Returns the mode of the daemon.
    pub fn balance_mode(&self) -> BalanceMode {
        self.balance.mode()
    }

    /// Returns whether a queue stays on its worker, because a command or the configuration attached
    /// it, or because its export is not balanced.
    pub fn queue_stays(&self, export: &str, index: u16) -> bool {
        self.balance.stays(export, index) || self.balance.mode_of(export) != BalanceMode::Auto
    }

    /// Adds to the error of a worker that is not freed that `balance=auto` moves queues to it, if a
    /// queue of it may have been moved so.
    pub(super) fn name_balance(&self, worker: WorkerId, error: Error) -> Error {
        let may_move = |queue: &QueueInfo| {
            let balanced = || self.serving(&queue.export).is_ok_and(|export| export.check_balanced().is_ok());
            queue.worker == worker && !self.queue_stays(&queue.export, queue.index) && balanced()
        };
        let found = match error.kind() {
            Kind::Busy => self.queues().into_iter().find(may_move),
            _ => None,
        };
        match found {
            Some(QueueInfo { export, .. }) => {
                error.remedy(format!("balance=auto moves queues of {export} there: `vshunt balance off --export {export}` ends that"))
            }
            None => error,
        }
    }

    /// Returns the own mode of an export, and how its queues follow load.
    pub(super) fn balancing(&self, export: &Export) -> (Option<BalanceMode>, Option<BalanceInfo>) {
        let (own, info) = self.balance.of(&export.spec.name);
        (own, info.filter(|_| export.check_balanced().is_ok()))
    }

    /// Starts the thread if an export wants it.
    pub(super) fn start_balancing(&self) {
        if !self.balance.claim() {
            return;
        }
        let (this, balance) = (self.this.clone(), self.balance.clone());
        let run = move || {
            let mut state = Balancing::new();
            let mut pause = EVERY;
            while balance.wait(pause) {
                let Some(daemon) = this.upgrade() else { return };
                pause = daemon.balance_once(&mut state);
            }
        };
        if let Err(e) = std::thread::Builder::new().name("balance".into()).spawn(run) {
            self.balance.unclaim();
            tracing::error!("no thread can be had that has queues follow load (balance=): {e}");
        }
    }

    /// Takes a sample and makes the moves that follow from it. Returns the time until the next one.
    fn balance_once(&self, state: &mut Balancing) -> Duration {
        let exports: Vec<_> =
            self.shown().into_iter().filter(|export| export.check_balanced().is_ok()).collect();
        let is_on = |export: &&Arc<Export>| self.balance.mode_of(&export.spec.name) != BalanceMode::Off;
        let requests =
            exports.iter().filter(is_on).map(|export| export.requests()).fold(0, u64::wrapping_add);
        state.quiet = if state.requests == requests { state.quiet.saturating_add(1) } else { 0 };
        state.requests = requests;
        if state.quiet >= IDLE_SAMPLES {
            state.auto.pause();
            state.dry_run.pause();
            if state.quiet > IDLE_SAMPLES && (state.quiet - IDLE_SAMPLES).is_multiple_of(REST) {
                self.resize_at_rest(state, &exports);
            }
            return IDLE;
        }
        let pools = self.pools(&exports);
        let sample = |mode| self.sample(&exports, &pools, mode, state.now_ns());
        let (auto, dry_run) = (sample(BalanceMode::Auto), sample(BalanceMode::DryRun));
        let decisions = state.auto.observe(auto);
        for decision in state.dry_run.observe(dry_run) {
            state.dry_run.told(&decision, state.now_ns());
            self.note(&decision, BalanceOutcome::DryRun, decision.to_string());
        }
        if decisions.is_empty() {
            self.resize(state, &exports, &pools);
            return EVERY;
        }
        state.auto.begin(&decisions);
        for decision in decisions {
            self.carry_out(state, &decision);
        }
        EVERY
    }

    /// Returns the workers that the queues of each export may be on: those that were made for it,
    /// or else worker 0 and those that belong to no export and no job.
    fn pools(&self, exports: &[Arc<Export>]) -> BTreeMap<String, Vec<WorkerId>> {
        let mut taken: BTreeSet<WorkerId> =
            self.shown().iter().flat_map(|export| export.own_workers()).collect();
        taken.extend(self.job_queues().iter().map(|queue| queue.worker).filter(|id| *id != 0));
        let all = self.workers.user_ids();
        let pool = |export: &Arc<Export>| match &export.own_workers()[..] {
            [] => all.iter().copied().filter(|id| !taken.contains(id)).collect(),
            own => all.iter().copied().filter(|id| own.contains(id)).collect(),
        };
        exports.iter().map(|export| (export.spec.name.clone(), pool(export))).collect()
    }

    /// Returns the present counters. The queues of exports with this mode may move.
    fn sample(
        &self,
        exports: &[Arc<Export>],
        pools: &BTreeMap<String, Vec<WorkerId>>,
        mode: BalanceMode,
        now_ns: u64,
    ) -> Sample {
        let mut queues = Vec::new();
        for export in exports {
            let name = &export.spec.name;
            let pool = pools.get(name).filter(|_| self.balance.mode_of(name) == mode);
            // An export that is being removed has no queues.
            let _ = export.with_queues(|of| {
                for index in (0..of.len()).filter(|index| of.stats(*index).state() == State::Running) {
                    let (stats, (worker, _)) = (of.stats(index), of.placement(index));
                    let pool = pool.filter(|_| !self.balance.stays(name, index));
                    queues.push(QueueSample {
                        name: QueueName { export: name.clone(), index },
                        worker,
                        requests: stats.requests.load(Relaxed),
                        bytes: stats.read_bytes.load(Relaxed).wrapping_add(stats.write_bytes.load(Relaxed)),
                        targets: pool.cloned().unwrap_or_default(),
                    });
                }
                Ok(())
            });
        }
        let mut ids: BTreeSet<WorkerId> = queues.iter().map(|queue| queue.worker).collect();
        ids.extend(queues.iter().flat_map(|queue| queue.targets.iter().copied()));
        Sample { now_ns, workers: self.workers.loads(&ids), queues }
    }

    fn carry_out(&self, state: &mut Balancing, decision: &Decision) {
        let QueueName { export, index } = &decision.queue;
        let started = Instant::now();
        let attach = || {
            let serving = self.serving(export)?;
            serving.with_queues(|queues| queues.attach(*index, decision.to, MOVE_LIMIT))
        };
        // None: the user has changed something in the meantime.
        let Some(result) = self.balance.moved(export, *index, attach) else { return };
        let took_ns = started.elapsed().as_nanos() as u64;
        match result {
            Ok(()) => {
                state.auto.moved(decision, state.now_ns(), took_ns);
                self.tell(&Event::QueueAttached {
                    export: export.clone(),
                    index: *index,
                    worker: decision.to,
                });
                self.note(decision, BalanceOutcome::Moved, decision.to_string());
            }
            Err(e) => {
                state.auto.failed(decision, state.now_ns(), took_ns);
                self.note(decision, BalanceOutcome::Failed, format!("{decision}; but {e}"));
            }
        }
    }

    /// Records a decision and reports it.
    fn note(&self, decision: &Decision, outcome: BalanceOutcome, reason: String) {
        let Decision { queue: QueueName { export, index }, from, to, .. } = decision;
        let (index, from, worker) = (*index, *from, *to);
        let noted = BalanceDecision { index, from, worker, outcome, reason: reason.clone(), age_s: 0 };
        self.balance.note(export, noted);
        self.tell(&Event::QueueBalanced { export: export.clone(), index, from, worker, outcome, reason });
    }
}
