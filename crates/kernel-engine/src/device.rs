//! The kernel's device, or devices, that serve the rings of an export, and what they serve.
//!
//! A disk has one device, whose rings are its queues and whose workers can be made and changed. A network has a device for
//! each queue pair, of two rings, with the one worker that came with it.

use std::sync::{Arc, Mutex};

use vhost_kernel::Vhost;
use vshunt_engine::{QueueStats, Settings, WorkerId, Workers};
use vshunt_types::error::Result;

use super::disk::ServedDisk;
use super::inflight::{self, TrackedRing};
use super::net::ServedNet;

/// See the module.
pub(super) enum KernelDevice {
    Disk(ServedDisk),
    Net(ServedNet),
}

impl KernelDevice {
    /// Rings of a queue.
    pub(super) fn rings_per_queue(&self) -> u16 {
        match self {
            Self::Disk(_) => 1,
            Self::Net(_) => 2,
        }
    }

    /// The device of a ring, and the ring's number there.
    pub(super) fn of(&self, ring: u16) -> (&Vhost, u32) {
        match self {
            Self::Disk(disk) => (&disk.device, ring.into()),
            Self::Net(net) => net.of(ring),
        }
    }

    pub(super) fn devices(&self) -> Vec<&Vhost> {
        match self {
            Self::Disk(disk) => vec![&disk.device],
            Self::Net(net) => net.devices().collect(),
        }
    }

    /// The virtio features of all its devices that can be passed on.
    pub(super) fn features(&self) -> vhost_kernel::Result<u64> {
        match self {
            Self::Disk(disk) => disk.device.features(),
            Self::Net(net) => net.features(),
        }
    }

    /// The guest agreed on these features.
    pub(super) fn negotiated(&self, features: u64) -> std::result::Result<(), String> {
        match self {
            Self::Disk(_) => Ok(()),
            Self::Net(net) => net.negotiated(features),
        }
    }

    /// Whether rings can note what they have in flight.
    pub(super) fn tracks(&self) -> bool {
        match self {
            Self::Disk(disk) => disk.tracks,
            Self::Net(_) => false,
        }
    }

    /// Tells the kernel how a ring that is about to start is tracked.
    ///
    /// # Safety
    /// As for [`inflight::tell`].
    pub(super) unsafe fn track(&self, ring: u16, tracked: Option<&TrackedRing>) -> vhost_kernel::Result<()> {
        match self {
            // SAFETY: `track` asks its caller for what `inflight::tell` asks for.
            Self::Disk(disk) if disk.tracks => unsafe { inflight::tell(&disk.device, ring.into(), tracked) },
            _ => Ok(()),
        }
    }

    /// Held over calls that wait for a disk: the kernel admits no other call to the device meanwhile. `None`: no call waits.
    pub(super) fn disk_calls(&self) -> Option<&Mutex<()>> {
        match self {
            Self::Disk(disk) => Some(disk.workers.disk_calls()),
            Self::Net(_) => None,
        }
    }

    /// Starts a ring that was set up (`on`), or stops it and waits until nothing of it is in flight.
    pub(super) fn run(&self, ring: u16, on: bool) -> vhost_kernel::Result<()> {
        match self {
            Self::Disk(disk) => disk.device.blk_set_vring(ring.into(), on),
            Self::Net(net) => net.run(ring, on),
        }
    }

    /// Lets a network deliver frames to a ring that is about to start (`on`), or stops that.
    pub(super) fn open(&self, ring: u16, on: bool) -> Result<()> {
        match self {
            Self::Disk(_) => Ok(()),
            Self::Net(net) => net.open(ring, on),
        }
    }

    pub(super) fn stats(&self, queue: u16) -> &Arc<QueueStats> {
        match self {
            Self::Disk(disk) => disk.workers.stats(queue),
            Self::Net(net) => net.stats(queue),
        }
    }

    /// Brings a queue's counters up to date, where the kernel counts.
    pub(super) fn count(&self, queue: u16) {
        if let Self::Disk(disk) = self {
            disk.workers.count(queue);
        }
    }

    /// Which worker a queue begins on.
    pub(super) fn first_worker(&self, queue: u16) -> WorkerId {
        match self {
            Self::Disk(disk) => disk.workers.first(),
            Self::Net(net) => net.worker(queue),
        }
    }

    /// Attaches a queue, which the caller has locked.
    pub(super) fn attach(&self, queue: u16, worker: WorkerId) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.workers.attach(queue, worker),
            Self::Net(net) => net.attach(queue, worker),
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
            Self::Disk(disk) => disk.workers.make(workers, name, settings),
            Self::Net(net) => Err(net.no_workers()),
        }
    }

    /// Takes note of the size that a disk's image has.
    pub(super) fn learn_size(&self) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.block_device.learn_size(),
            Self::Net(_) => Ok(()),
        }
    }
}
