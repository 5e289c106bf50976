//! The queues of an export, whoever serves them: our workers or the kernel's.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

use vshunt_engine::{QueueSet, QueueStats, Settings, WorkerId};
use vshunt_types::error::{Error, Result};

use super::card::control_ring;
use super::kernel::KernelQueues;
use crate::queue::net::RINGS;

/// Boxes that lie with workers of this process; each is of one virtqueue, or of several.
pub struct UserQueues {
    set: Arc<QueueSet>,
    /// Virtqueues of each.
    rings_each: u16,
    /// Of a card whose last queue is for control, of one virtqueue: which that is, as the guest agreed, or [`NO_RING`].
    control: Option<AtomicU16>,
}

/// The number of none.
const NO_RING: u16 = u16::MAX;

impl UserQueues {
    /// The queue that a virtqueue is of, and which of its virtqueues it is; none where there is no such one for this guest.
    pub fn place(&self, ring: u16) -> Option<(u16, u16)> {
        if self.control.as_ref().is_some_and(|control| control.load(Relaxed) == ring) {
            return Some((self.set.len() - 1, 0));
        }
        (ring < self.rings_each * self.pairs()).then_some((ring / self.rings_each, ring % self.rings_each))
    }

    /// Queues of `rings_each` virtqueues.
    fn pairs(&self) -> u16 {
        self.set.len() - u16::from(self.control.is_some())
    }
}

impl Deref for UserQueues {
    type Target = QueueSet;

    fn deref(&self) -> &QueueSet {
        &self.set
    }
}

/// See the module.
#[derive(Clone)]
pub enum Queues {
    /// Those of our workers.
    User(Arc<UserQueues>),
    /// Virtqueues of the in-kernel engine.
    Kernel(Arc<KernelQueues>),
}

impl Queues {
    /// Those of our workers, each of `rings_each` virtqueues.
    pub fn user(set: Arc<QueueSet>, rings_each: u16) -> Self {
        Self::User(Arc::new(UserQueues { set, rings_each, control: None }))
    }

    /// Those of a card, for our workers: pairs, and behind them, if `control`, a queue of one virtqueue.
    pub fn card(set: Arc<QueueSet>, control: bool) -> Self {
        let control = control.then(|| AtomicU16::new(NO_RING));
        Self::User(Arc::new(UserQueues { set, rings_each: RINGS, control }))
    }

    /// The guest agreed on features: which virtqueue is the control queue follows from them (Virtio 1.3, 5.1.2). While none
    /// runs.
    pub fn agreed(&self, features: u64) {
        if let Self::User(set) = self
            && let Some(control) = &set.control
        {
            control.store(control_ring(features, set.pairs()).unwrap_or(NO_RING), Relaxed);
        }
    }

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
            Self::User(set) => set.pairs() * set.rings_each + u16::from(set.control.is_some()),
            Self::Kernel(set) => set.rings(),
        }
    }

    /// The queue that a virtqueue is of; the last one where that is of none.
    pub fn queue_of(&self, ring: u16) -> u16 {
        match self {
            Self::User(set) => set.place(ring).map_or(set.len() - 1, |(queue, _)| queue),
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
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        match self {
            Self::User(set) => set.placement(index),
            Self::Kernel(set) => set.placement(index),
        }
    }

    /// See [`QueueSet::attach`]. The kernel does not wait for requests in flight; `timeout` bounds the wait for a queue of the
    /// export that is about to stop.
    ///
    /// # Errors
    /// The queue or the worker is not there, or the worker is not for this queue; the queue stays where it was.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        match self {
            Self::User(set) => set.attach(index, worker, timeout),
            Self::Kernel(set) => set.attach(index, worker, timeout),
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
    /// They cannot be brought to rest by `until`; nothing was changed.
    pub fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        match self {
            Self::User(set) => set.with_all_drained(until, f),
            Self::Kernel(set) => set.with_all_drained(until, f),
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

#[cfg(test)]
mod tests {
    use virtio::features::bit;
    use virtio::net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};
    use vshunt_engine::Workers;

    use super::*;

    #[test]
    fn the_control_queue_is_behind_the_pairs_that_the_guest_knows_of() {
        let workers = Workers::new(0).unwrap();
        let worker = workers.create(None, &Settings::default()).unwrap();
        let set = Arc::new(QueueSet::new("c0", &workers, &[worker; 5]).unwrap());
        let queues = Queues::card(set, true);
        let Queues::User(user) = &queues else { unreachable!() };
        let (control, mq) = (bit(VIRTIO_NET_F_CTRL_VQ), bit(VIRTIO_NET_F_MQ));
        assert_eq!((queues.len(), queues.rings()), (5, 9));
        // Features; what rings 2, 7, 8 and 9 are.
        for (features, want) in [
            (0, [Some((1, 0)), Some((3, 1)), None, None]),
            (mq, [Some((1, 0)), Some((3, 1)), None, None]),
            (mq | control, [Some((1, 0)), Some((3, 1)), Some((4, 0)), None]),
            (control, [Some((4, 0)), Some((3, 1)), None, None]),
        ] {
            queues.agreed(features);
            assert_eq!([2, 7, 8, 9].map(|ring| user.place(ring)), want, "{features:#x}");
        }
    }
}
