//! The number of workers of exports with `workers=auto`.

use std::collections::BTreeMap;
use std::sync::Arc;

use vshunt_engine::WorkerId;
use vshunt_engine::balance::{Balancer, Pool, Resize};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BalanceMode, BalanceOutcome, ResizeDecision, ResizeOutcome};

use super::{Balancing, Daemon, MOVE_LIMIT};
use crate::event::Event;
use crate::export::Export;

impl Daemon {
    /// Makes and frees workers as the last sample says, and makes the moves after which a worker is
    /// not needed.
    pub(super) fn resize(
        &self,
        state: &mut Balancing,
        exports: &[Arc<Export>],
        workers_of: &BTreeMap<String, Vec<WorkerId>>,
    ) {
        let pools = self.sized(exports, workers_of, BalanceMode::Auto);
        for pool in &pools {
            let moves = state.auto.gather(pool);
            if moves.first().is_some_and(|first| self.may_end(&pool.export, first.from)) {
                state.auto.begin(&moves);
                moves.iter().for_each(|decision| self.carry_out(state, decision));
                return;
            }
        }
        for (name, resize) in state.auto.resize(&pools) {
            if let Some(export) = exports.iter().find(|export| export.spec.name == name) {
                let now_ns = state.now_ns();
                self.carry_out_resize(&mut state.auto, now_ns, export, resize, false);
            }
        }
        let pools = self.sized(exports, workers_of, BalanceMode::DryRun);
        for decision in pools.iter().flat_map(|pool| state.dry_run.gather(pool)).collect::<Vec<_>>() {
            state.dry_run.told(&decision, state.now_ns());
            self.note(&decision, BalanceOutcome::DryRun, decision.to_string());
        }
        for (name, resize) in state.dry_run.resize(&pools) {
            state.dry_run.not_resized(&name, resize, state.now_ns());
            let there = workers_of.get(&name).map_or(0, Vec::len);
            self.note_resize(&name, there, resize, None, ResizeOutcome::DryRun, resize.to_string());
        }
    }

    /// Frees the workers that exports do not need while no requests come.
    pub(super) fn resize_at_rest(&self, state: &mut Balancing, exports: &[Arc<Export>]) {
        let workers_of = self.pools(exports);
        for pool in self.sized(exports, &workers_of, BalanceMode::Auto) {
            let Some(export) = exports.iter().find(|export| export.spec.name == pool.export) else {
                continue;
            };
            for &idle in pool.workers.iter().skip(1) {
                let now_ns = state.now_ns();
                self.carry_out_resize(&mut state.auto, now_ns, export, Resize::Less { idle }, true);
            }
        }
    }

    /// Returns the exports in this mode whose number of workers follows load.
    fn sized(
        &self,
        exports: &[Arc<Export>],
        workers_of: &BTreeMap<String, Vec<WorkerId>>,
        mode: BalanceMode,
    ) -> Vec<Pool> {
        let wanted = exports.iter().filter(|export| {
            export.sizes_itself()
                && !export.own_workers().is_empty()
                && self.balance.mode_of(&export.spec.name) == mode
        });
        let pool = |export: &Arc<Export>| {
            let name = &export.spec.name;
            let workers = workers_of.get(name).cloned().filter(|workers| !workers.is_empty())?;
            let most = self.workers.loads(&workers.iter().take(1).copied().collect()).first()?.cpus.len();
            Some(Pool { export: name.clone(), workers, most })
        };
        wanted.filter_map(pool).collect()
    }

    /// Returns whether a worker of an export may end: it has no queue of another export or of a
    /// job, and none that stays.
    fn may_end(&self, export: &str, worker: WorkerId) -> bool {
        let of_a_job = self.job_queues().iter().any(|queue| queue.worker == worker);
        let is_held = |other: Arc<Export>| {
            let (name, own) = (&other.spec.name, other.spec.name == export);
            let held = other.with_queues(|of| {
                let mut here = (0..of.len()).filter(|index| of.placement(*index).0 == worker);
                Ok(here.any(|index| !own || self.balance.stays(name, index)))
            });
            // An export that is being removed has no queues.
            held.unwrap_or(false)
        };
        !of_a_job && !self.shown().into_iter().any(is_held)
    }

    fn carry_out_resize(
        &self,
        balancer: &mut Balancer,
        now_ns: u64,
        export: &Export,
        resize: Resize,
        at_rest: bool,
    ) {
        let name = &export.spec.name;
        if let Resize::Less { idle } = resize
            && !self.may_end(name, idle)
        {
            balancer.not_resized(name, resize, now_ns);
            return;
        }
        let result = match resize {
            Resize::More { .. } => export.one_more_worker().inspect(|&id| {
                balancer.made(name, id, now_ns);
                self.tell(&Event::WorkerNew { id });
            }),
            Resize::Less { idle } => self.free_idle(export, idle).map(|()| {
                balancer.ended(name, idle, now_ns, at_rest);
                self.tell(&Event::WorkerFreed { id: idle });
                idle
            }),
        };
        let there = export.own_workers().len();
        match result {
            Ok(id) => {
                self.note_resize(name, there, resize, Some(id), ResizeOutcome::Done, resize.to_string())
            }
            Err(e) => {
                balancer.not_resized(name, resize, now_ns);
                let reason = format!("{resize}; but {e}");
                self.note_resize(name, there, resize, None, ResizeOutcome::Failed, reason);
            }
        }
    }

    /// Frees a worker. Its queues, which have no requests, go to the first worker.
    fn free_idle(&self, export: &Export, idle: WorkerId) -> Result<()> {
        let name = &export.spec.name;
        let first = *export.own_workers().first().ok_or_else(|| Error::busy("the export has no worker"))?;
        export.with_queues(|queues| {
            for index in (0..queues.len()).filter(|index| queues.placement(*index).0 == idle) {
                let attach = || queues.attach(index, first, MOVE_LIMIT);
                match self.balance.moved(name, index, attach) {
                    Some(result) => result?,
                    None => return Err(Error::busy(format!("queue {name}:{index} stays on it"))),
                }
                self.tell(&Event::QueueAttached { export: name.clone(), index, worker: first });
            }
            Ok(())
        })?;
        export.one_less_worker(idle)
    }

    /// Records a decision about the number of workers, and reports it.
    fn note_resize(
        &self,
        export: &str,
        there: usize,
        resize: Resize,
        worker: Option<WorkerId>,
        outcome: ResizeOutcome,
        reason: String,
    ) {
        let wanted = match (outcome, resize) {
            (ResizeOutcome::Done, _) => there,
            (_, Resize::More { .. }) => there + 1,
            (_, Resize::Less { .. }) => there.saturating_sub(1),
        };
        let decision = ResizeDecision { workers: wanted as u32, worker, outcome, reason, age_s: 0 };
        self.balance.note_resize(export, decision.clone());
        self.tell(&Event::WorkersBalanced { export: export.to_owned(), decision });
    }
}
