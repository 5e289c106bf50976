//! The in-flight record of a ring of the kernel, and the requests that the ring starts with.
//!
//! The session reads the in-flight region first, as for a ring that this process serves. That
//! repairs the region and lists the requests of a former daemon. The kernel then continues with the
//! region, and starts these requests before it takes others. The session thread calls this module.
//! The region and the list must stay mapped while the ring runs.

use std::any::Any;
use std::sync::Arc;

use vhost_kernel::Vhost;
use virtio::inflight::{Replay, SplitNotes};
use virtio::vhost::BlkVringInflight;

/// Number of 16-bit fields (`flags` and `idx`) of a `struct vring_avail` in front of its ring.
const AVAIL_HEADER: usize = 2;

/// The memory that the kernel has addresses of while a tracked ring runs.
pub(super) struct TrackedRing {
    notes: SplitNotes,
    /// A `struct vring_avail` whose ring has the heads of the requests to start again.
    replays: Vec<u16>,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: only the kernel writes to the region while this value lives (see [`set`]); this type only
// reads the address as a number.
unsafe impl Send for TrackedRing {}

impl TrackedRing {
    /// Makes the value from `notes` and from `replays`, the requests that were in flight, in their
    /// order. `keep` keeps the region of `notes` mapped.
    pub(super) fn new(notes: SplitNotes, replays: &[Replay], keep: Arc<dyn Any + Send + Sync>) -> Self {
        let heads = replays.iter().map(|replay| replay.head().id);
        let replays = std::iter::repeat_n(0, AVAIL_HEADER).chain(heads).collect();
        Self { notes, replays, _keep: keep }
    }

    fn argument(&self, ring: u32) -> BlkVringInflight {
        BlkVringInflight {
            region_user_addr: self.notes.base.addr() as u64,
            counter: self.notes.counter,
            replay_user_addr: self.replays.as_ptr().addr() as u64,
            num: self.notes.queue_size,
            last_batch_head: self.notes.last_batch_head,
            replay_num: (self.replays.len() - AVAIL_HEADER) as u16,
            ..no_tracking(ring)
        }
    }
}

/// Returns the argument for a ring that records nothing.
fn no_tracking(ring: u32) -> BlkVringInflight {
    BlkVringInflight {
        size: size_of::<BlkVringInflight>() as u32,
        index: ring,
        ..BlkVringInflight::default()
    }
}

/// Returns whether the module can record requests in flight. Old modules cannot.
pub(super) fn is_offered(device: &Vhost) -> bool {
    // SAFETY: the argument names no region, so the kernel gets no address.
    unsafe { device.blk_set_vring_inflight(&no_tracking(0)) }.is_ok()
}

/// Tells the kernel how a stopped ring is tracked from its next start on.
///
/// # Safety
/// `tracked` lives as long as the ring runs, and nothing else writes to its part of the region in
/// that time.
pub(super) unsafe fn set(
    device: &Vhost,
    ring: u32,
    tracked: Option<&TrackedRing>,
) -> vhost_kernel::Result<()> {
    let argument = tracked.map_or_else(|| no_tracking(ring), |tracked| tracked.argument(ring));
    // SAFETY: the addresses point into `tracked`, which the caller keeps. The caller promises that
    // only the kernel writes there.
    unsafe { device.blk_set_vring_inflight(&argument) }
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
        let tracked = TrackedRing::new(notes, &[], Arc::new(()));
        let argument = tracked.argument(2);
        assert_eq!((argument.size, argument.index, argument.replay_num, argument.reserved), (40, 2, 0, 0));
        assert_eq!(
            (argument.region_user_addr, argument.num, argument.counter, argument.last_batch_head),
            (64, 8, 5, 3)
        );
        assert_eq!(argument.replay_user_addr, tracked.replays.as_ptr().addr() as u64);
    }
}
