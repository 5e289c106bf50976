//! The kernel's devices that serve the rings of an export, and their backends.
//!
//! A disk has one device. Its rings are the queues of the disk, and its workers can be made and
//! changed. A network has one device for each queue pair, with two rings and the one worker that
//! came with the device.

use std::sync::{Arc, Mutex};

use vhost_kernel::Vhost;
use vshunt_engine::{QueueStats, Settings, WorkerId, Workers};
use vshunt_types::error::Result;

use super::disk::ServedDisk;
use super::inflight::{self, TrackedRing};
use super::net::ServedNet;

/// The devices of one export; see the module.
pub(super) enum KernelDevice {
    Disk(ServedDisk),
    Net(ServedNet),
}

impl KernelDevice {
    /// Returns the number of rings of a queue.
    pub(super) fn rings_per_queue(&self) -> u16 {
        match self {
            Self::Disk(_) => 1,
            Self::Net(_) => 2,
        }
    }

    /// Returns the device of a ring, and the ring's number on it.
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

    /// Returns the virtio features of all its devices that can be offered to the guest.
    pub(super) fn features(&self) -> vhost_kernel::Result<u64> {
        match self {
            Self::Disk(disk) => disk.device.features(),
            Self::Net(net) => net.features(),
        }
    }

    /// Sets the features that the guest accepted.
    pub(super) fn negotiated(&self, features: u64) -> std::result::Result<(), String> {
        match self {
            Self::Disk(_) => Ok(()),
            Self::Net(net) => net.negotiated(features),
        }
    }

    /// Returns whether rings can record their requests in flight.
    pub(super) fn tracks(&self) -> bool {
        match self {
            Self::Disk(disk) => disk.tracks,
            Self::Net(_) => false,
        }
    }

    /// Tells the kernel how a ring that is about to start is tracked.
    ///
    /// # Safety
    /// `tracked` lives as long as the ring runs, and nothing else writes to its part of the
    /// in-flight region in that time.
    pub(super) unsafe fn track(&self, ring: u16, tracked: Option<&TrackedRing>) -> vhost_kernel::Result<()> {
        match self {
            // SAFETY: the caller keeps `tracked` as long as the ring runs, and promises that only
            // the kernel writes to its part of the region.
            Self::Disk(disk) if disk.tracks => unsafe { inflight::set(&disk.device, ring.into(), tracked) },
            _ => Ok(()),
        }
    }

    /// Returns the lock that is held during calls that wait for a disk. The kernel admits no other
    /// call to the device meanwhile. `None`: no call waits.
    pub(super) fn disk_calls(&self) -> Option<&Mutex<()>> {
        match self {
            Self::Disk(disk) => Some(disk.workers.disk_calls()),
            Self::Net(_) => None,
        }
    }

    /// Starts a ring that was set up (`on`), or stops it and waits until nothing of it is in
    /// flight.
    pub(super) fn run(&self, ring: u16, on: bool) -> vhost_kernel::Result<()> {
        match self {
            Self::Disk(disk) => disk.device.blk_set_vring(ring.into(), on),
            Self::Net(net) => net.run(ring, on),
        }
    }

    /// Returns whether a ring continues while it is switched off. The kernel has no way to discard
    /// what the guest sends, so it sends it.
    pub(super) fn sends_when_off(&self, ring: u16) -> bool {
        matches!(self, Self::Net(_)) && ServedNet::transmits(ring)
    }

    /// Lets a network deliver frames to a ring that is about to start (`on`), or ends that.
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

    /// Updates a queue's counters, if the kernel counts.
    pub(super) fn count(&self, queue: u16) {
        if let Self::Disk(disk) = self {
            disk.workers.count(queue);
        }
    }

    /// Returns the worker that a queue starts on.
    pub(super) fn first_worker(&self, queue: u16) -> WorkerId {
        match self {
            Self::Disk(disk) => disk.workers.first(),
            Self::Net(net) => net.worker(queue),
        }
    }

    /// Attaches a queue. The caller has locked it.
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

    /// Reads the size of a disk's image again.
    pub(super) fn reload_size(&self) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.block_device.reload_size(),
            Self::Net(_) => Ok(()),
        }
    }
}
