//! What serves the rings that a front end starts: workers of this process, or the kernel.

use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, MAX_REGIONS};
use virtio::ring::{DeviceRing, RingAddrs, UsedLog};
use vshunt_engine::{EventFd, QueueStats};
use vshunt_types::error::Result;

/// Where a ring lies in this process.
#[derive(Clone, Copy, Debug)]
pub struct RingAreas {
    /// Descriptors.
    pub size: u16,
    /// Its three areas.
    pub addrs: RingAddrs,
    /// Guest address of the device area, if writes there are to be logged and the log has bits for all of it.
    pub log: Option<u64>,
}

/// What a tracked ring begins with: the in-flight region knows its requests.
pub struct Tracking {
    /// Requests that were in flight when a former daemon died, oldest first.
    pub replays: Vec<Replay>,
    /// Keeps the region mapped.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// What a ring is started with.
pub struct RingStart {
    /// The ring's areas, which lie in `mem`.
    pub areas: RingAreas,
    /// The device side of the ring, checked and with its in-flight region attached. A server that is not in this process takes
    /// from it where the ring stands, and then drops it.
    pub vring: DeviceRing,
    /// Whether the guest has not used the ring yet.
    pub fresh: bool,
    /// The guest's memory at this time.
    pub mem: Arc<GuestMemory>,
    /// The guest's kicks.
    pub kick: Arc<OwnedFd>,
    /// Notifies the guest. `None`: the guest polls.
    pub call: Option<Arc<EventFd>>,
    /// Where writes to buffers are marked.
    pub log: Option<Arc<DirtyLog>>,
    /// Only if the server [tracks](RingServer::tracks) requests.
    pub tracking: Option<Tracking>,
    /// Name for messages, `export:index`.
    pub name: String,
    /// Called once when the guest broke the ring. It may run on a worker, so it neither blocks nor logs.
    pub on_broken: Box<dyn Fn(&str) + Send>,
}

/// What serves the virtqueues of an export. The session thread of the front end calls it; errors are in words, for the log.
///
/// A ring is a virtqueue as the front end counts them. A queue is what users see and attach; it has one ring or several.
pub trait RingServer: Send + Sync {
    /// How many rings there can be.
    fn rings(&self) -> u16;
    /// How many queues.
    fn queues(&self) -> u16;
    /// The queue of a ring. `None`: there is no such ring with the features that the guest agreed on.
    fn queue_of(&self, ring: u16) -> Option<u16>;
    /// Counters of a queue, as they are now.
    fn stats(&self, queue: u16) -> &Arc<QueueStats>;

    /// Starts a ring.
    ///
    /// # Safety
    /// The areas lie in `start.mem`, as long as the ring's size and features say. `start.mem` is the memory that was handed
    /// over last, by [`set_memory`](Self::set_memory). While the ring runs, only its server writes to its part of the
    /// in-flight region.
    ///
    /// # Errors
    /// It cannot run; nothing was changed.
    unsafe fn start(&self, ring: u16, start: RingStart) -> std::result::Result<(), String>;
    /// Stops a ring when nothing of it is in flight, and returns where it stands. `None`: it did not run, or its place is not
    /// known. For `discard` and `hand_over` see [`take_ring`](crate::take_ring).
    fn stop(&self, ring: u16, discard: bool, hand_over: bool) -> Option<u32>;
    /// Stops rings, as [`stop`](Self::stop) without `discard` and `hand_over`. Returns where they stand.
    fn stop_all(&self, rings: &[u16]) -> Vec<(u16, u32)> {
        rings.iter().filter_map(|&ring| Some((ring, self.stop(ring, false, false)?))).collect()
    }
    /// Takes note that a stopped ring does not start again soon: nothing waits for it any more. Idempotent.
    fn close(&self, ring: u16);
    /// Replaces the descriptor that notifies the guest of a running ring, and signals the new one once.
    fn set_call(&self, ring: u16, call: Option<Arc<EventFd>>) -> std::result::Result<(), String>;
    /// Changes where the writes of a running ring are marked, between two requests.
    ///
    /// # Safety
    /// As for [`start`](Self::start): the areas lie in the memory that was handed over last.
    unsafe fn set_log(
        &self,
        ring: u16,
        areas: RingAreas,
        log: Option<Arc<DirtyLog>>,
        used: Option<UsedLog>,
    ) -> std::result::Result<(), String>;
    /// Calls a function while nothing is in flight on any queue.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the queues are not at rest at `until`. The function was not called.
    fn with_all_drained(&self, until: Instant, f: &mut dyn FnMut()) -> Result<()>;

    /// Whether the rings are served outside of this process, by the kernel. The methods below concern such servers only.
    fn is_external(&self) -> bool {
        false
    }
    /// Whether rings can note their requests in flight, so that another daemon continues with them.
    fn tracks(&self) -> bool {
        true
    }
    /// Regions of guest memory at most.
    fn regions_max(&self) -> u64 {
        MAX_REGIONS as u64
    }
    /// Sets the features that the guest agreed on. `VHOST_F_LOG_ALL` is among them only while the log has bits for all of the
    /// guest's memory, because the server knows no end of the log.
    fn set_features(&self, _features: u64) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Hands over the guest's memory in place of `old`, while no ring runs.
    ///
    /// # Errors
    /// The server keeps `old`.
    fn set_memory(&self, _mem: &GuestMemory, _old: &GuestMemory) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Sets where the server marks the pages that it writes.
    ///
    /// # Safety
    /// `at` is a shared mapping that is long enough for the guest's memory, and to which there are no references. It stays for
    /// as long as `VHOST_F_LOG_ALL` is among the features.
    unsafe fn set_log_base(&self, _at: *mut u8) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Becomes readable when the server finds the ring broken.
    fn alarm(&self, _ring: u16) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Takes note of an alarm. Returns whether the ring is broken and was not known to be.
    fn is_broken(&self, _ring: u16) -> bool {
        false
    }
}
