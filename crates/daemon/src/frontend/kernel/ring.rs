//! One ring: what the kernel is told of it, and what is kept here while it has it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio::vhost::{VHOST_VRING_F_LOG, VringAddr};
use vshunt_engine::EventFd;
use vshunt_engine::WorkerId;

use super::inflight::Tracking;

/// What a ring is started with. Addresses are ours.
pub struct RingSetup<'a> {
    /// Descriptors, a power of two.
    pub size: u16,
    /// The next available index.
    pub base: u32,
    /// Descriptor table, available ring, used ring.
    pub parts: [*mut u8; 3],
    /// Guest address of the used ring, if writes there are to be logged; the log has bits for all of it.
    pub log: Option<u64>,
    /// The guest's kicks.
    pub kick: &'a OwnedFd,
    /// Notifies the guest; none: it polls.
    pub call: Option<Arc<EventFd>>,
    /// Where it notes what it has in flight; only if the queues [track](super::KernelQueues::tracks) that.
    pub tracking: Option<Tracking>,
}

/// One ring. Its lock is held over a whole start, stop or attach, so that these exclude one another. Of a queue with several
/// rings the first says where it is.
pub(super) struct Slot {
    pub(super) worker: WorkerId,
    pub(super) running: bool,
    /// Times it was started, or attached while it ran.
    pub(super) generation: u32,
    /// What the kernel has addresses of while it runs.
    pub(super) tracking: Option<Tracking>,
}

/// A ring's addresses as the kernel takes them.
pub(super) fn addresses(index: u32, setup: &RingSetup<'_>) -> VringAddr {
    let [desc, driver, device] = setup.parts.map(|p| p.addr() as u64);
    VringAddr {
        index,
        flags: u32::from(setup.log.is_some()) << VHOST_VRING_F_LOG,
        desc_user_addr: desc,
        used_user_addr: device,
        avail_user_addr: driver,
        log_guest_addr: setup.log.unwrap_or(0),
    }
}
