//! What stands behind the rings: the kernel's device or devices, and what they serve.
//!
//! A disk has one device, whose rings are its queues and whose workers can be made and changed. A network has a device for
//! each queue pair, of two rings, with the one worker that came with it.

use std::sync::{Arc, Mutex};

use vhost_kernel::Vhost;
use vshunt_engine::{QueueStats, Settings, WorkerId, Workers};
use vshunt_types::error::Result;

use super::disk::Served;
use super::inflight::{self, Tracking};
use super::net::Card;

/// See the module.
pub(super) enum Behind {
    Disk(Served),
    Net(Card),
}

impl Behind {
    /// Rings of a queue.
    pub(super) fn rings_a_queue(&self) -> u16 {
        match self {
            Self::Disk(_) => 1,
            Self::Net(_) => 2,
        }
    }

    /// The device of a ring, and the ring's number there.
    pub(super) fn of(&self, ring: u16) -> (&Vhost, u32) {
        match self {
            Self::Disk(served) => (&served.device, ring.into()),
            Self::Net(card) => card.of(ring),
        }
    }

    pub(super) fn devices(&self) -> Vec<&Vhost> {
        match self {
            Self::Disk(served) => vec![&served.device],
            Self::Net(card) => card.devices().collect(),
        }
    }

    /// The virtio features of all its devices that can be passed on.
    pub(super) fn features(&self) -> vhost_kernel::Result<u64> {
        match self {
            Self::Disk(served) => served.device.features(),
            Self::Net(card) => card.features(),
        }
    }

    /// The guest agreed on these.
    pub(super) fn agreed(&self, features: u64) -> std::result::Result<(), String> {
        match self {
            Self::Disk(_) => Ok(()),
            Self::Net(card) => card.agreed(features),
        }
    }

    /// Whether rings can note what they have in flight.
    pub(super) fn tracks(&self) -> bool {
        match self {
            Self::Disk(served) => served.tracks,
            Self::Net(_) => false,
        }
    }

    /// Tells a ring that is about to start how it is tracked.
    ///
    /// # Safety
    /// As for [`inflight::tell`]; and only where it [`tracks`](Self::tracks).
    pub(super) unsafe fn track(&self, ring: u16, tracking: Option<&Tracking>) -> vhost_kernel::Result<()> {
        match self {
            // SAFETY: the caller's.
            Self::Disk(served) if served.tracks => unsafe {
                inflight::tell(&served.device, ring.into(), tracking)
            },
            _ => Ok(()),
        }
    }

    /// Held over calls that wait for a disk, which keep other calls out of the kernel's device meanwhile; none where no call
    /// waits.
    pub(super) fn turn(&self) -> Option<&Mutex<()>> {
        match self {
            Self::Disk(served) => Some(served.tasks.turn()),
            Self::Net(_) => None,
        }
    }

    /// Starts a ring that was set up, or stops it and waits until nothing of it is in flight.
    pub(super) fn run(&self, ring: u16, on: bool) -> vhost_kernel::Result<()> {
        match self {
            Self::Disk(served) => served.device.blk_set_vring(ring.into(), on),
            Self::Net(card) => card.run(ring, on),
        }
    }

    /// Lets what comes from outside come to a ring that is about to start, or no more to one that is over.
    pub(super) fn open(&self, ring: u16, on: bool) -> Result<()> {
        match self {
            Self::Disk(_) => Ok(()),
            Self::Net(card) => card.open(ring, on),
        }
    }

    pub(super) fn stats(&self, queue: u16) -> &Arc<QueueStats> {
        match self {
            Self::Disk(served) => served.tasks.stats(queue),
            Self::Net(card) => card.stats(queue),
        }
    }

    /// Brings a queue's counters up to date, where the kernel counts.
    pub(super) fn count(&self, queue: u16) {
        if let Self::Disk(served) = self {
            served.tasks.count(queue);
        }
    }

    /// Which worker a queue begins on.
    pub(super) fn first_worker(&self, queue: u16) -> WorkerId {
        match self {
            Self::Disk(served) => served.tasks.first(),
            Self::Net(card) => card.worker(queue),
        }
    }

    /// Attaches a queue, which the caller has locked.
    pub(super) fn attach(&self, queue: u16, worker: WorkerId) -> Result<()> {
        match self {
            Self::Disk(served) => served.tasks.attach(queue, worker),
            Self::Net(card) => card.attach(queue, worker),
        }
    }

    /// Makes another worker.
    pub(super) fn new_worker(
        &self,
        workers: &Workers,
        name: Option<String>,
        settings: &Settings,
    ) -> Result<WorkerId> {
        match self {
            Self::Disk(served) => served.tasks.make(workers, name, settings),
            Self::Net(card) => Err(card.no_workers()),
        }
    }

    /// Takes note of the size that a disk's image has.
    pub(super) fn learn_size(&self) -> Result<()> {
        match self {
            Self::Disk(served) => served.disk.learn_size(),
            Self::Net(_) => Ok(()),
        }
    }
}
