//! The queues of an export, whoever serves them: our workers or the kernel's.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::kernel::KernelQueues;
use crate::error::{Error, Result};
use crate::worker::{QueueSet, QueueStats, Settings, WorkerId};

/// See the module.
#[derive(Clone)]
pub enum Queues {
    /// Boxes that lie with workers of this process.
    User(Arc<QueueSet>),
    /// Virtqueues of the in-kernel engine.
    Kernel(Arc<KernelQueues>),
}

impl Queues {
    /// How many.
    pub fn len(&self) -> u16 {
        match self {
            Self::User(set) => set.len(),
            Self::Kernel(set) => set.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many virtqueues, as a front-end counts them.
    pub fn rings(&self) -> u16 {
        match self {
            Self::User(set) => set.len(),
            Self::Kernel(set) => set.rings(),
        }
    }

    /// The queue that a virtqueue is of.
    pub fn queue_of(&self, ring: u16) -> u16 {
        match self {
            Self::User(_) => ring,
            Self::Kernel(set) => set.queue_of(ring),
        }
    }

    /// Counters of a queue, as they are now.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        match self {
            Self::User(set) => set.stats(index),
            Self::Kernel(set) => set.stats(index),
        }
    }

    /// The worker a queue is attached to, and how often it was attached.
    pub fn home(&self, index: u16) -> (WorkerId, u32) {
        match self {
            Self::User(set) => set.home(index),
            Self::Kernel(set) => set.home(index),
        }
    }

    /// See [`QueueSet::attach`]. The kernel does not wait for requests in flight.
    ///
    /// # Errors
    /// The queue or the worker is not there, or the worker is not for this queue; the queue stays where it was.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        match self {
            Self::User(set) => set.attach(index, worker, timeout),
            Self::Kernel(set) => set.attach(index, worker),
        }
    }

    /// Makes a worker of the kernel for these queues.
    ///
    /// # Errors
    /// They are not the kernel's; or it makes none.
    pub fn new_kernel_worker(
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
    /// They cannot be brought to rest; nothing was changed.
    pub fn with_all_drained<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        match self {
            Self::User(set) => set.with_all_drained(f),
            Self::Kernel(set) => set.with_all_drained(f),
        }
    }

    /// What becomes readable when the kernel finds that ring broken.
    pub fn alarm(&self, ring: u16) -> Option<&OwnedFd> {
        match self {
            Self::User(_) => None,
            Self::Kernel(set) => Some(set.alarm(ring)),
        }
    }

    /// Whether the kernel serves them.
    pub fn kernel(&self) -> Option<&Arc<KernelQueues>> {
        match self {
            Self::User(_) => None,
            Self::Kernel(set) => Some(set),
        }
    }
}
