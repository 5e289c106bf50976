//! One export: creation, service, removal.
//!
//! `prepared` checks a request and opens what it names. `start` makes queues and a front end of it.
//! `served` and `queues` are the state while it is served.

mod prepared;
mod queues;
mod served;
mod start;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use vshunt_block::Disk;
use vshunt_engine::Observer;
use vshunt_engine::{DRAIN_LIMIT, LimitCell, QueueStats, Settings, State, WorkerId, Workers};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{
    Engine, ExportInfo, ExportKind, ExportSpec, LatencyInfo, LatencyMode, QueueInfo, Workers as Spread,
};
use vshunt_types::sync::{Locked, LockedShared};

pub(crate) use self::prepared::Backend;
pub use self::prepared::check_certificates;
use self::prepared::{Prepared, check_block_size};
use self::queues::ExportQueues;
use self::served::{Frontend, Served};
use self::start::Start;
use super::service_totals::ServiceEstimates;

/// An export, which is served until it is removed. Called by control threads. Lock order: `served`,
/// then the slot of a queue set.
pub(super) struct Export {
    pub(super) spec: ExportSpec,
    pub(super) readonly: bool,
    /// None after the removal. Locked for reading while the queues are used, which may be until the
    /// end of a drain. Locked for writing once, after the front end was stopped. No drain can last
    /// any longer then.
    served: RwLock<Option<Served>>,
    /// Workers that were made for the export, and are freed with it. Locked for a copy or a change.
    own_workers: Mutex<Vec<WorkerId>>,
    workers: Arc<Workers>,
    since: Instant,
    /// The limits, which its queues read.
    limits: Arc<LimitCell>,
    /// Set by the removal, when the queues are at rest.
    moved: OnceLock<Moved>,
    /// The service time of all its operations.
    pub(super) service_estimates: ServiceEstimates,
}

/// What an export has moved since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes that its user read.
    pub read_bytes: u64,
    /// Bytes that its user wrote.
    pub write_bytes: u64,
    /// The time from its start to its end.
    pub lasted: Duration,
}

impl Export {
    /// Makes an export. Checks the whole request before anything is made, and undoes everything on
    /// an error. `prepare_image` changes the image of a mounted disk as the mount needs it, after
    /// all checks.
    pub(super) fn create(
        mut spec: ExportSpec,
        backend: Backend,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
        prepare_image: &dyn Fn() -> Result<()>,
        limits: Arc<LimitCell>,
    ) -> Result<Self> {
        let (prepared, readonly) = Prepared::open(&mut spec, backend)?;
        let mut own_workers = Vec::new();
        let start = Start {
            spec: &spec,
            workers,
            observer,
            prepare_image,
            own_workers: &mut own_workers,
            limits: &limits,
        };
        match start.run(prepared) {
            Ok(served) => {
                let served = RwLock::new(Some(served));
                let (workers, since, moved) = (workers.clone(), Instant::now(), OnceLock::new());
                let own_workers = Mutex::new(own_workers);
                let service_estimates = ServiceEstimates::default();
                Ok(Self {
                    spec,
                    readonly,
                    served,
                    own_workers,
                    workers,
                    since,
                    limits,
                    moved,
                    service_estimates,
                })
            }
            Err(e) => {
                workers.end_these(&own_workers);
                Err(e)
            }
        }
    }

    /// Returns the workers that were made for it, in the order in which its queues got them.
    /// Of an export whose number of workers follows load, those that are still there.
    pub(super) fn own_workers(&self) -> Vec<WorkerId> {
        let mut own = self.own_workers.locked().clone();
        if self.sizes_itself() {
            let there = self.workers.user_ids();
            own.retain(|id| there.contains(id));
        }
        own
    }

    /// Returns whether its number of workers follows load.
    pub(super) fn sizes_itself(&self) -> bool {
        self.spec.workers == Spread::Auto
    }

    /// Makes one more worker for it, with the settings of its first one.
    ///
    /// # Errors
    /// It is being removed, or no worker can be made.
    pub(super) fn one_more_worker(&self) -> Result<WorkerId> {
        // Held until the worker is in the list, which the removal reads after this.
        let served = self.served();
        if served.is_none() {
            return Err(removing(&self.spec.name));
        }
        let states = self.workers.states();
        let names: BTreeSet<_> = states.iter().map(|w| w.name.as_str()).collect();
        let mut free =
            (1..).map(|i| format!("{}/{i}", self.spec.name)).filter(|n| !names.contains(n.as_str()));
        let first = self.own_workers().first().and_then(|id| states.iter().find(|w| w.id == *id));
        let settings =
            first.map_or(Settings { poll_us: self.spec.poll_us, ..Settings::default() }, |w| Settings {
                cpu: Some(w.cpu.clone()),
                nice: Some(w.nice),
                poll_us: Some(w.poll_us),
                ..Settings::default()
            });
        let id = self.workers.create(free.next(), &settings)?;
        self.own_workers.locked().push(id);
        Ok(id)
    }

    /// Frees a worker that was made for it.
    ///
    /// # Errors
    /// The worker has a queue.
    pub(super) fn one_less_worker(&self, id: WorkerId) -> Result<()> {
        // The thread of the worker is waited for without the lock.
        self.own_workers.locked().retain(|other| *other != id);
        self.workers.free(id).inspect_err(|_| {
            let served = self.served();
            match served.is_some() {
                true => self.own_workers.locked().push(id),
                false => self.workers.end_these(&[id]),
            }
        })
    }

    fn served(&self) -> RwLockReadGuard<'_, Option<Served>> {
        self.served.read_locked()
    }

    /// Unmounts a mount that has no open file, so that the removal disturbs no program.
    pub(super) fn release(&self) -> Result<()> {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => mount.release(),
            _ => Ok(()),
        }
    }

    /// Returns whether a front end or a client would lose its device. A mount knows this itself,
    /// and an uplink has no front end.
    pub(super) fn in_use(&self) -> bool {
        let kinds = [ExportKind::VhostUserBlk, ExportKind::VhostUserNet, ExportKind::Nbd];
        let uses = |s: &Served| {
            // In this order: what is leaving may have gone before it is asked whether it is there.
            let leaving = s.frontend.leaving();
            s.frontend.connected() && !leaving
        };
        kinds.contains(&self.spec.kind) && self.served().as_ref().is_some_and(uses)
    }

    /// Returns what is connected to an export that is [`in_use`](Self::in_use), and what it loses
    /// when the export is removed.
    pub(super) fn users(&self) -> (&'static str, &'static str) {
        match self.spec.kind {
            ExportKind::Nbd => ("a client", "its clients lose their connections"),
            _ => ("a front end", "its front end loses the device"),
        }
    }

    /// Checks that its mount does not lie over the image of `disk`. Such an image has no name while
    /// it is mounted.
    ///
    /// # Errors
    /// `Busy`, with the mount and the remedy.
    pub(super) fn check_uncovered(&self, disk: &Disk) -> Result<()> {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => {
                let (path, below) = mount.below();
                match disk.has_inode(below) {
                    true => Err(Error::busy(format!(
                        "export {0} is mounted over the image {1}, which cannot be opened by its name meanwhile: remove \
                         export {0}, and add it with another mountpoint",
                        self.spec.name,
                        path.display()
                    ))),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the kernel may change the size of the disk without telling the daemon.
    pub(super) fn grows_by_itself(&self) -> bool {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => {
                mount.plan().passthrough && self.spec.growable == Some(true)
            }
            _ => false,
        }
    }

    pub(super) fn config_changed(&self) {
        if let Some(served) = &*self.served() {
            if let Some(kernel) = served.queues.kernel()
                && let Err(e) = kernel.resized()
            {
                tracing::error!("export {}: {e}", self.spec.name);
            }
            served.frontend.config_changed();
        }
    }

    /// Returns whether the kernel serves its rings.
    pub(super) fn is_kernel(&self) -> bool {
        self.served().as_ref().is_some_and(|s| s.queues.kernel().is_some())
    }

    /// Calls a function with the queues.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy) after the removal of the export.
    pub(super) fn with_queues<R>(&self, f: impl FnOnce(&ExportQueues) -> Result<R>) -> Result<R> {
        match &*self.served() {
            Some(served) => f(&served.queues),
            None => Err(removing(&self.spec.name)),
        }
    }

    /// Returns where its queues find its limits.
    pub(super) fn limits(&self) -> &Arc<LimitCell> {
        &self.limits
    }

    /// Checks that its requests can be limited.
    pub(super) fn check_limitable(&self) -> Result<()> {
        let name = &self.spec.name;
        if self.spec.kind.limits().is_none() {
            return Err(Error::unsupported(format!(
                "export {name} is an uplink, which has no limits; limit the exports that join its switch"
            )));
        }
        match &*self.served() {
            Some(served) if served.queues.kernel().is_some() => Err(Error::unsupported(format!(
                "export {name} is served by the kernel, which has no limits: remove it, and add it with engine=user"
            ))),
            Some(Served { frontend: Frontend::Fuse(mount), .. }) if mount.plan().passthrough => {
                Err(Error::unsupported(format!(
                    "export {name} has passthrough, by which the kernel reads and writes the image without limits: remove it, \
                     and add it with passthrough=off"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Checks that its queues can follow load.
    pub(super) fn check_balanced(&self) -> Result<()> {
        let name = &self.spec.name;
        if self.spec.kind == ExportKind::Fuse {
            return Err(Error::unsupported(format!(
                "export {name} is a mount, whose channels share its requests already; leave it out of balance"
            )));
        }
        match self.is_kernel() {
            true => Err(Error::unsupported(format!(
                "export {name} is served by the kernel, whose queues do not follow load: remove it, and add it with \
                 engine=user"
            ))),
            false => Ok(()),
        }
    }

    /// Checks that all requests of its users pass through this process, so that they can be held
    /// back.
    pub(super) fn check_held(&self) -> Result<()> {
        let name = &self.spec.name;
        match &*self.served() {
            Some(served) if served.queues.kernel().is_some() => Err(Error::unsupported(format!(
                "export {name} is served by the kernel, which would go on with the image: remove it, and add it with \
                 engine=user"
            ))),
            Some(Served { frontend: Frontend::Fuse(mount), .. }) if mount.plan().passthrough => {
                Err(Error::unsupported(format!(
                    "export {name} has passthrough, by which the kernel continues to use the image: remove it, and add it with \
                     passthrough=off"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Calls a function while nothing is in flight on any queue.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the queues are not at rest within
    /// [`DRAIN_LIMIT`].
    pub(super) fn with_all_drained<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        self.with_all_drained_until(Instant::now() + DRAIN_LIMIT, f)
    }

    /// [`with_all_drained`](Self::with_all_drained) with another deadline.
    pub(super) fn with_all_drained_until<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        match &*self.served() {
            Some(served) => served.queues.with_all_drained(until, f),
            None => Ok(f()),
        }
    }

    /// Checks that the disk of this export may have that size.
    pub(super) fn check_size(&self, size_bytes: u64) -> Result<()> {
        check_block_size(&self.spec, size_bytes)
    }

    pub(super) fn info(&self) -> ExportInfo {
        let served = self.served();
        let queue_list = served.as_ref().map_or(Vec::new(), |s| self.list(s));
        ExportInfo {
            spec: self.spec.clone(),
            // Uses the guard that is held already. A second one would wait for a writer that waits
            // for the first.
            engine: match served.as_ref().is_some_and(|s| s.queues.kernel().is_some()) {
                true => Engine::Kernel,
                false => Engine::User,
            },
            engine_reason: served.as_ref().and_then(|s| s.engine_reason.clone()),
            connected: served.as_ref().is_some_and(|s| s.frontend.connected()),
            leaving: served.as_ref().is_some_and(|s| s.frontend.leaving()),
            removing: false,
            features: served.as_ref().map_or(Vec::new(), |s| s.frontend.features()),
            mount: served.as_ref().and_then(|s| s.frontend.mount()),
            port: served.as_ref().and_then(|s| s.frontend.port()),
            service_times: LatencyInfo::sum(
                queue_list.iter().filter_map(|queue| queue.service_times.as_ref()),
            ),
            balancing: None,
            limited_ms_max: None,
            queue_list,
            queues_left_out: 0,
        }
    }

    /// Resets the service times. Returns whether they are measured.
    pub(super) fn reset_latency(&self) -> bool {
        let served = self.served();
        let Some(served) = served.as_ref().filter(|served| served.queues.kernel().is_none()) else {
            return false;
        };
        // A queue that never started has nothing to reset.
        (0..served.queues.len()).for_each(|index| served.queues.stats(index).latency.reset());
        matches!(self.spec.kind, ExportKind::VhostUserBlk | ExportKind::Fuse | ExportKind::Nbd)
            && self.spec.latency.unwrap_or_default() != LatencyMode::Off
    }

    /// Returns the requests that its users have completed so far.
    pub(super) fn requests(&self) -> u64 {
        self.served()
            .as_ref()
            .map_or(0, |s| (0..s.queues.len()).map(|i| s.queues.stats(i).requests.load(Relaxed)).sum())
    }

    pub(super) fn queue_infos(&self) -> Vec<QueueInfo> {
        self.served().as_ref().map_or(Vec::new(), |s| self.list(s))
    }

    fn list(&self, served: &Served) -> Vec<QueueInfo> {
        let packed = served.frontend.packed();
        let info = |index| QueueInfo {
            net: served.frontend.net_counters(index),
            ..queue_info(
                &self.spec.name,
                index,
                served.queues.placement(index),
                served.queues.stats(index),
                packed,
            )
        };
        (0..served.queues.len()).map(info).collect()
    }

    fn sum(&self, served: &Served) -> Moved {
        let none = Moved { lasted: self.since.elapsed(), ..Moved::default() };
        self.list(served).iter().fold(none, |sum, queue| Moved {
            read_bytes: sum.read_bytes.saturating_add(queue.read_bytes),
            write_bytes: sum.write_bytes.saturating_add(queue.write_bytes),
            ..sum
        })
    }

    /// Returns what it had moved when it was removed.
    pub(super) fn moved(&self) -> Moved {
        self.moved.get().copied().unwrap_or_default()
    }

    /// Removes the export in three steps: 1 disconnects the front end, drains the queues and
    /// removes the socket; 2 waits for threads that use the queues, and drops the queues; 3 frees
    /// the workers that were made for it and have no other queue. May be called more than once.
    pub(super) fn remove(&self) {
        if let Some(served) = &*self.served() {
            served.frontend.stop();
            self.moved.get_or_init(|| self.sum(served));
        }
        let served = self.served.write_locked().take();
        drop(served);
        self.workers.end_these(&self.own_workers());
    }
}

/// Describes a queue.
pub(super) fn queue_info(
    export: &str,
    index: u16,
    (worker, generation): (WorkerId, u32),
    stats: &QueueStats,
    packed: bool,
) -> QueueInfo {
    let state = match stats.state() {
        State::Stopped => "stopped",
        State::Running => "running",
        State::Broken => "broken",
    };
    QueueInfo {
        export: export.to_owned(),
        index,
        worker,
        state: state.to_owned(),
        size: stats.size.load(Relaxed),
        packed,
        in_flight: stats.in_flight.load(Relaxed),
        generation,
        requests: stats.requests.load(Relaxed),
        reads: stats.reads.load(Relaxed),
        writes: stats.writes.load(Relaxed),
        flushes: stats.flushes.load(Relaxed),
        errors: stats.errors.load(Relaxed),
        read_bytes: stats.read_bytes.load(Relaxed),
        write_bytes: stats.write_bytes.load(Relaxed),
        kicks: stats.kicks.load(Relaxed),
        notifications: stats.notifications.load(Relaxed),
        limited_us: stats.limited_ns.load(Relaxed) / 1000,
        limited: stats.limited_now.load(Relaxed) > 0,
        net: None,
        service_times: stats.latency.info(),
    }
}

pub(super) fn removing(name: &str) -> Error {
    Error::busy(format!("export {name} is being removed; wait until that is over"))
}
