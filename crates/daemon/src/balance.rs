//! Which exports' queues follow load, which of their queues stay, and what was decided.
//!
//! Control threads and the balancing thread call it. The decisions are those of
//! [`vshunt_engine::balance`]; `daemon/balance` has the thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vshunt_types::error::Result;
use vshunt_types::spec::{BalanceDecision, BalanceInfo, BalanceMode, BalanceOutcome, ResizeDecision};
use vshunt_types::sync::Locked;

/// The settings and the record of decisions.
#[derive(Clone, Default)]
pub(crate) struct Balance(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Guards the settings. Held for look-ups and changes only.
    state: Mutex<State>,
    /// Signalled when a setting changes.
    changed: Condvar,
    /// Held by the balancing thread from its last look at the settings to the end of a move. A
    /// command that attaches a queue waits for it, so that its own move is the last.
    moving: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// The mode of exports that have none of their own.
    mode: BalanceMode,
    exports: BTreeMap<String, OfExport>,
    /// The balancing thread runs.
    running: bool,
    shut: bool,
}

#[derive(Default)]
struct OfExport {
    mode: Option<BalanceMode>,
    /// Its number of workers follows load: without a mode of its own it is balanced.
    sized: bool,
    /// Queues that stay, because a command attached them.
    attached: BTreeSet<u16>,
    moves: u64,
    decisions: u64,
    last: Option<(Instant, BalanceDecision)>,
    resized: Option<(Instant, ResizeDecision)>,
}

impl OfExport {
    /// Returns the mode that does not follow that of the daemon.
    fn mode(&self) -> Option<BalanceMode> {
        self.mode.or(self.sized.then_some(BalanceMode::Auto))
    }
}

impl State {
    fn mode_of(&self, export: &str) -> BalanceMode {
        self.exports.get(export).and_then(OfExport::mode).unwrap_or(self.mode)
    }

    fn is_wanted(&self) -> bool {
        !self.shut && self.exports.keys().any(|name| self.mode_of(name) != BalanceMode::Off)
    }
}

impl Balance {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.locked()
    }

    /// Notes an export, with its own mode if it has one. `sized`: its number of workers follows
    /// load.
    pub(crate) fn add(&self, export: &str, mode: Option<BalanceMode>, sized: bool) {
        self.state().exports.insert(export.to_owned(), OfExport { mode, sized, ..OfExport::default() });
    }

    /// Forgets an export.
    pub(crate) fn remove(&self, export: &str) {
        self.state().exports.remove(export);
    }

    /// Sets the mode of the daemon. Queues of the exports without a mode of their own may move
    /// again.
    pub(crate) fn set(&self, mode: BalanceMode) {
        let mut state = self.state();
        state.mode = mode;
        state.exports.values_mut().filter(|of| of.mode().is_none()).for_each(|of| of.attached.clear());
        drop(state);
        self.0.changed.notify_all();
    }

    /// Sets the mode of an export; `None` is that of the daemon. All of its queues may move again.
    pub(crate) fn set_of(&self, export: &str, mode: Option<BalanceMode>) {
        if let Some(of) = self.state().exports.get_mut(export) {
            of.mode = mode;
            of.attached.clear();
        }
        self.0.changed.notify_all();
    }

    /// Returns the mode of the daemon.
    pub(crate) fn mode(&self) -> BalanceMode {
        self.state().mode
    }

    /// Returns the mode that is in force for an export.
    pub(crate) fn mode_of(&self, export: &str) -> BalanceMode {
        self.state().mode_of(export)
    }

    /// Returns whether a queue stays, because a command attached it.
    pub(crate) fn stays(&self, export: &str, index: u16) -> bool {
        self.state().exports.get(export).is_some_and(|of| of.attached.contains(&index))
    }

    /// Attaches a queue for a command. It stays from then on, also if it is there already.
    pub(crate) fn attached_by_command(
        &self,
        export: &str,
        index: u16,
        attach: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let new = self.state().exports.get_mut(export).is_some_and(|of| of.attached.insert(index));
        drop(self.0.moving.locked());
        attach().inspect_err(|_| {
            if new && let Some(of) = self.state().exports.get_mut(export) {
                of.attached.remove(&index);
            }
        })
    }

    /// Moves a queue by a decision, unless it stays or the mode has changed.
    pub(crate) fn moved(
        &self,
        export: &str,
        index: u16,
        attach: impl FnOnce() -> Result<()>,
    ) -> Option<Result<()>> {
        let _moving = self.0.moving.locked();
        if self.stays(export, index) || self.mode_of(export) != BalanceMode::Auto {
            return None;
        }
        Some(attach())
    }

    /// Records a decision.
    pub(crate) fn note(&self, export: &str, decision: BalanceDecision) {
        if let Some(of) = self.state().exports.get_mut(export) {
            of.decisions += 1;
            of.moves += u64::from(decision.outcome == BalanceOutcome::Moved);
            of.last = Some((Instant::now(), decision));
        }
    }

    /// Records a decision about the number of workers.
    pub(crate) fn note_resize(&self, export: &str, decision: ResizeDecision) {
        if let Some(of) = self.state().exports.get_mut(export) {
            of.resized = Some((Instant::now(), decision));
        }
    }

    /// Returns the own mode of an export, and what there is to say about it.
    pub(crate) fn of(&self, export: &str) -> (Option<BalanceMode>, Option<BalanceInfo>) {
        let state = self.state();
        let Some(of) = state.exports.get(export) else { return (None, None) };
        let mode = state.mode_of(export);
        let last = of
            .last
            .as_ref()
            .map(|(at, decision)| BalanceDecision { age_s: at.elapsed().as_secs(), ..decision.clone() });
        let resized = of
            .resized
            .as_ref()
            .map(|(at, decision)| ResizeDecision { age_s: at.elapsed().as_secs(), ..decision.clone() });
        let info = BalanceInfo {
            mode,
            moves: of.moves,
            decisions: of.decisions,
            attached: of.attached.iter().copied().collect(),
            last,
            resized,
        };
        (of.mode, (mode != BalanceMode::Off || of.decisions > 0 || of.resized.is_some()).then_some(info))
    }

    /// Ends the thread.
    pub(crate) fn shut(&self) {
        self.state().shut = true;
        self.0.changed.notify_all();
    }

    /// Returns true if the thread is wanted and does not run. It then counts as running.
    pub(crate) fn claim(&self) -> bool {
        let mut state = self.state();
        let missing = state.is_wanted() && !state.running;
        state.running |= missing;
        missing
    }

    /// Notes that the thread could not be started.
    pub(crate) fn unclaim(&self) {
        self.state().running = false;
    }

    /// Waits for some time, or until a setting changes. Returns false if the thread is to end: no
    /// export has queues that follow load.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let mut state = self.state();
        if state.is_wanted() {
            let waited = self.0.changed.wait_timeout(state, time);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        state.running = state.is_wanted();
        state.running
    }
}
