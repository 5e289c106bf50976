//! Where a ring of the kernel notes what it has in flight, and what it begins with.
//!
//! The session looks at the in-flight region first, as for a ring that this process serves: that repairs it and lists the
//! requests of a former daemon. The kernel then goes on with the region, and begins these requests before it takes others.
//! Called by the session thread. What must never happen: the region or the list unmapped while the ring runs.

use std::any::Any;
use std::sync::Arc;

use vhost_kernel::Vhost;
use virtio::inflight::{Replay, SplitNotes};
use virtio::vhost::BlkVringInflight;

/// `flags` and `idx` of a `struct vring_avail`, in front of its ring.
const AVAIL_HEADER: usize = 2;

/// What a ring is tracked with, for as long as it runs.
pub struct Tracking {
    notes: SplitNotes,
    /// A `struct vring_avail` whose ring has the heads of requests to begin again.
    replays: Vec<u16>,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region is written to by the kernel alone while this lives; here its address is a number.
unsafe impl Send for Tracking {}

impl Tracking {
    /// `keep` keeps the region of `notes` mapped; `replays` are the requests that were in flight, in their order.
    pub fn new(notes: SplitNotes, replays: &[Replay], keep: Arc<dyn Any + Send + Sync>) -> Self {
        let heads = replays.iter().map(|replay| replay.head().id);
        let replays = std::iter::repeat_n(0, AVAIL_HEADER).chain(heads).collect();
        Self { notes, replays, _keep: keep }
    }

    fn told(&self, ring: u32) -> BlkVringInflight {
        BlkVringInflight {
            region_user_addr: self.notes.base.addr() as u64,
            counter: self.notes.counter,
            replay_user_addr: self.replays.as_ptr().addr() as u64,
            num: self.notes.queue_size,
            last_batch_head: self.notes.last_batch_head,
            replay_num: (self.replays.len() - AVAIL_HEADER) as u16,
            ..nothing(ring)
        }
    }
}

/// A ring notes nothing.
fn nothing(ring: u32) -> BlkVringInflight {
    BlkVringInflight {
        size: size_of::<BlkVringInflight>() as u32,
        index: ring,
        ..BlkVringInflight::default()
    }
}

/// Whether the module can note requests at all: those of before cannot.
pub(super) fn is_offered(device: &Vhost) -> bool {
    // SAFETY: no region.
    unsafe { device.blk_set_vring_inflight(&nothing(0)) }.is_ok()
}

/// Tells the kernel how a stopped ring is tracked from its next start on.
///
/// # Safety
/// The tracking stays as long as the ring runs, and its notes are of a region that only this ring's server writes to.
pub(super) unsafe fn tell(
    device: &Vhost,
    ring: u32,
    tracking: Option<&Tracking>,
) -> vhost_kernel::Result<()> {
    let told = tracking.map_or_else(|| nothing(ring), |tracking| tracking.told(ring));
    // SAFETY: the caller's.
    unsafe { device.blk_set_vring_inflight(&told) }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn the_kernel_is_told_of_the_region_and_of_no_request() {
        let notes = SplitNotes {
            base: null_mut::<u8>().wrapping_add(64),
            queue_size: 8,
            counter: 5,
            last_batch_head: 3,
        };
        let tracking = Tracking::new(notes, &[], Arc::new(()));
        let told = tracking.told(2);
        assert_eq!((told.size, told.index, told.replay_num, told.reserved), (40, 2, 0, 0));
        assert_eq!((told.region_user_addr, told.num, told.counter, told.last_batch_head), (64, 8, 5, 3));
        assert_eq!(told.replay_user_addr, tracking.replays.as_ptr().addr() as u64);
    }
}
