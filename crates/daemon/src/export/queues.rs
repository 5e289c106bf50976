//! The queues of an export: of workers of this process, or of the kernel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vshunt_engine::{QueueSet, QueueStats, Settings, WorkerId};
use vshunt_kernel_engine::KernelQueues;
use vshunt_types::error::{Error, Result};

/// The queues of an export.
pub(crate) enum ExportQueues {
    /// Queues of workers of this process.
    User(Arc<QueueSet>),
    /// Queues of the kernel engine.
    Kernel(Arc<KernelQueues>),
}

impl ExportQueues {
    /// Returns the number of queues.
    pub(crate) fn len(&self) -> u16 {
        match self {
            Self::User(set) => set.len(),
            Self::Kernel(set) => set.len(),
        }
    }

    /// Returns the current counters of a queue.
    pub(crate) fn stats(&self, index: u16) -> &Arc<QueueStats> {
        match self {
            Self::User(set) => set.stats(index),
            Self::Kernel(set) => set.stats(index),
        }
    }

    /// Returns the worker that a queue is attached to, and how often it was attached.
    pub(crate) fn placement(&self, index: u16) -> (WorkerId, u32) {
        match self {
            Self::User(set) => set.placement(index),
            Self::Kernel(set) => set.placement(index),
        }
    }

    /// Attaches a queue to a worker, see [`QueueSet::attach`]. The kernel does not wait for
    /// requests in flight; there, `timeout` limits the wait for a queue of the export that is being
    /// stopped.
    ///
    /// # Errors
    /// There is no such queue or worker, or the worker cannot have this queue. The queue stays on
    /// its worker.
    pub(crate) fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        match self {
            Self::User(set) => set.attach(index, worker, timeout),
            Self::Kernel(set) => set.attach(index, worker, timeout),
        }
    }

    /// Makes a worker of the kernel for these queues.
    ///
    /// # Errors
    /// The kernel does not serve them, or makes no worker.
    pub(crate) fn new_kernel_worker(
        &self,
        export: &str,
        name: Option<String>,
        settings: &Settings,
    ) -> Result<WorkerId> {
        match self {
            Self::User(_) => Err(Error::unsupported(format!(
                "export {export} is not served by the kernel (engine=user); leave out kind=kernel, or add it with \
                 engine=kernel"
            ))),
            Self::Kernel(set) => set.new_worker(name, settings),
        }
    }

    /// Calls a function while nothing is in flight on any queue.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the queues are not at rest at `until`. The
    /// function was not called.
    pub(crate) fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        match self {
            Self::User(set) => set.with_all_drained(until, f),
            Self::Kernel(set) => set.with_all_drained(until, f),
        }
    }

    /// Returns the queues, if the kernel serves them.
    pub(crate) fn kernel(&self) -> Option<&Arc<KernelQueues>> {
        match self {
            Self::User(_) => None,
            Self::Kernel(set) => Some(set),
        }
    }
}
