//! One export: create, serve, remove.
//!
//! `prepared` checks and opens what a request names, `start` makes queues and front end of it,
//! `served` and `queues` are what an export has while it is served.

mod prepared;
mod queues;
mod served;
mod start;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, RwLock, RwLockReadGuard};
use std::time::Instant;

use vshunt_block::Disk;
use vshunt_engine::Observer;
use vshunt_engine::{DRAIN_LIMIT, QueueStats, State, WorkerId, Workers};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Engine, ExportInfo, ExportKind, ExportSpec, QueueInfo};
use vshunt_types::sync::LockedShared;

pub(crate) use self::prepared::Backend;
use self::prepared::{Prepared, check_block_size};
use self::queues::ExportQueues;
use self::served::{Frontend, Served};
use self::start::Start;

/// An export, served until it is removed. Control threads call it. Lock order: `served`, then a
/// queue set's slot.
pub(super) struct Export {
    pub(super) spec: ExportSpec,
    pub(super) readonly: bool,
    /// None once it is removed. Read for as long as the queues are used, which may be until a drain
    /// is over; written once, after the front-end was stopped, when no drain can last any more.
    served: RwLock<Option<Served>>,
    /// Made for it, and freed with it.
    own_workers: Vec<WorkerId>,
    workers: Arc<Workers>,
}

impl Export {
    /// Checks the whole request before anything is made; what was made is unmade on an error.
    /// `prepare_image` changes the image of a mount's disk as the mount needs it, after all that is
    /// checked.
    pub(super) fn create(
        mut spec: ExportSpec,
        backend: Backend,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
        prepare_image: &dyn Fn() -> Result<()>,
    ) -> Result<Self> {
        let (prepared, readonly) = Prepared::open(&mut spec, backend)?;
        let mut own_workers = Vec::new();
        let start = Start { spec: &spec, workers, observer, prepare_image, own_workers: &mut own_workers };
        match start.run(prepared) {
            Ok(served) => {
                let served = RwLock::new(Some(served));
                Ok(Self { spec, readonly, served, own_workers, workers: workers.clone() })
            }
            Err(e) => {
                workers.end_these(&own_workers);
                Err(e)
            }
        }
    }

    fn served(&self) -> RwLockReadGuard<'_, Option<Served>> {
        self.served.read_locked()
    }

    pub(super) fn connected(&self) -> bool {
        self.served().as_ref().is_some_and(|s| s.frontend.connected())
    }

    /// Lets go of a mount that nobody has open, so that removing it hurts nobody.
    pub(super) fn release(&self) -> Result<()> {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => mount.release(),
            _ => Ok(()),
        }
    }

    /// Whether a front-end would lose its device; a mount says so itself, and an uplink has none.
    pub(super) fn in_use(&self) -> bool {
        matches!(self.spec.kind, ExportKind::VhostUserBlk | ExportKind::VhostUserNet) && self.connected()
    }

    /// Whether its mount lies over the image of `disk` itself, so that the image has no name while
    /// the mount is there.
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

    /// Whether the kernel changes the disk's size without asking us.
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

    /// Whether the kernel serves it.
    pub(super) fn is_kernel(&self) -> bool {
        self.served().as_ref().is_some_and(|s| s.queues.kernel().is_some())
    }

    /// Calls a function with the queues. [`Busy`](vshunt_types::error::Kind::Busy) once the export
    /// is removed.
    pub(super) fn with_queues<R>(&self, f: impl FnOnce(&ExportQueues) -> Result<R>) -> Result<R> {
        match &*self.served() {
            Some(served) => f(&served.queues),
            None => Err(removing(&self.spec.name)),
        }
    }

    /// Whether all requests of its users come by us, so that we can hold them back.
    pub(super) fn check_held(&self) -> Result<()> {
        let name = &self.spec.name;
        match &*self.served() {
            Some(served) if served.queues.kernel().is_some() => Err(Error::unsupported(format!(
                "export {name} is served by the kernel, which would go on with the image: remove it, and add it with \
                 engine=user"
            ))),
            Some(Served { frontend: Frontend::Fuse(mount), .. }) if mount.plan().passthrough => {
                Err(Error::unsupported(format!(
                    "export {name} has passthrough, by which the kernel goes on with the image: remove it, and add it with \
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

    /// Whether a disk of that size can be this export's.
    pub(super) fn check_size(&self, size_bytes: u64) -> Result<()> {
        check_block_size(&self.spec, size_bytes)
    }

    pub(super) fn info(&self) -> ExportInfo {
        let served = self.served();
        ExportInfo {
            spec: self.spec.clone(),
            // By the guard that is held: a second one would wait for who waits for the first.
            engine: match served.as_ref().is_some_and(|s| s.queues.kernel().is_some()) {
                true => Engine::Kernel,
                false => Engine::User,
            },
            engine_reason: served.as_ref().and_then(|s| s.engine_reason.clone()),
            connected: served.as_ref().is_some_and(|s| s.frontend.connected()),
            removing: false,
            features: served.as_ref().map_or(Vec::new(), |s| s.frontend.features()),
            mount: served.as_ref().and_then(|s| s.frontend.mount()),
            port: served.as_ref().and_then(|s| s.frontend.port()),
            queue_list: served.as_ref().map_or(Vec::new(), |s| self.list(s)),
        }
    }

    /// Requests that its users had done so far.
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

    /// 1 disconnects, drains and removes the socket, 2 waits for those who use the queues and lets
    /// the queues go, 3 frees the workers made for it that have no other queue. Idempotent.
    pub(super) fn remove(&self) {
        if let Some(served) = &*self.served() {
            served.frontend.stop();
        }
        let served = self.served.write_locked().take();
        drop(served);
        self.workers.end_these(&self.own_workers);
    }
}

/// A queue as it is.
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
        errors: stats.errors.load(Relaxed),
        read_bytes: stats.read_bytes.load(Relaxed),
        write_bytes: stats.write_bytes.load(Relaxed),
        kicks: stats.kicks.load(Relaxed),
        notifications: stats.notifications.load(Relaxed),
        net: None,
    }
}

pub(super) fn removing(name: &str) -> Error {
    Error::busy(format!("export {name} is being removed; wait until that is over"))
}
