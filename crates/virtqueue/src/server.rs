//! The servers of the rings that a front end starts: workers of this process, or the kernel.

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

/// The addresses of a ring in this process.
#[derive(Clone, Copy, Debug)]
pub struct RingAreas {
    /// Number of descriptors.
    pub size: u16,
    /// Its three areas.
    pub addrs: RingAddrs,
    /// Guest address of the device area, if writes there have to be logged and the log has bits for
    /// all of it.
    pub log: Option<u64>,
}

/// The start state of a tracked ring, whose requests the in-flight region records.
pub struct Tracking {
    /// Requests that were in flight when a former daemon died, oldest first.
    pub replays: Vec<Replay>,
    /// Keeps the region mapped.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// The parameters of a ring's start.
pub struct RingStart {
    /// The ring's areas, which are in `mem`.
    pub areas: RingAreas,
    /// The device side of the ring, checked and with its in-flight region attached. A server that
    /// is not in this process takes the ring's base from it, and then drops it.
    pub vring: DeviceRing,
    /// Whether the guest has not used the ring yet.
    pub fresh: bool,
    /// Whether the ring is switched off, and what the guest sends is discarded.
    pub discards: bool,
    /// The guest's memory at this time.
    pub mem: Arc<GuestMemory>,
    /// The eventfd by which the guest kicks.
    pub kick: Arc<OwnedFd>,
    /// The eventfd that notifies the guest. `None`: the guest polls.
    pub call: Option<Arc<EventFd>>,
    /// The log of writes to buffers.
    pub log: Option<Arc<DirtyLog>>,
    /// Set only if the server [tracks](RingServer::tracks) requests.
    pub tracking: Option<Tracking>,
    /// Name for messages, `export:index`.
    pub name: String,
    /// Called once when the guest has broken the ring. It may run on a worker, so it neither blocks
    /// nor logs.
    pub on_broken: Box<dyn Fn(&str) + Send>,
}

/// Serves the virtqueues of an export. The session thread of the front end calls it. Errors are in
/// words, for the log.
///
/// A ring is a virtqueue as the front end numbers them. A queue is the unit that users see and
/// attach. It has one ring or several.
pub trait RingServer: Send + Sync {
    /// Returns the most rings that there can be.
    fn rings(&self) -> u16;
    /// Returns the number of queues.
    fn queues(&self) -> u16;
    /// Returns the queue of a ring. `None`: there is no such ring with the features of the guest.
    fn queue_of(&self, ring: u16) -> Option<u16>;
    /// Returns the counters of a queue, updated.
    fn stats(&self, queue: u16) -> &Arc<QueueStats>;

    /// Starts a ring.
    ///
    /// # Safety
    /// The areas are in `start.mem`, with the lengths for the ring's size and features. `start.mem`
    /// is the last memory that [`set_memory`](Self::set_memory) got. While the ring runs, only its
    /// server writes to its part of the in-flight region.
    ///
    /// # Errors
    /// It cannot run. Nothing was changed.
    unsafe fn start(&self, ring: u16, start: RingStart) -> std::result::Result<(), String>;
    /// Returns whether a ring is also served while it is switched off, to discard what the guest
    /// sends: a transmit ring of a network device (vhost-user specification, "Ring states").
    fn discards(&self, ring: u16) -> bool;
    /// Stops a ring when nothing of it is in flight, and returns its base. `None`: it did not run,
    /// or its base is not known. For `discard` and `hand_over` see [`take_ring`](crate::take_ring).
    fn stop(&self, ring: u16, discard: bool, hand_over: bool) -> Option<u32>;
    /// Stops rings like [`stop`](Self::stop) without `discard` and `hand_over`. Returns their
    /// bases.
    fn stop_all(&self, rings: &[u16]) -> Vec<(u16, u32)> {
        rings.iter().filter_map(|&ring| Some((ring, self.stop(ring, false, false)?))).collect()
    }
    /// Records that a stopped ring does not start again soon, so that nothing waits for it.
    /// Idempotent.
    fn close(&self, ring: u16);
    /// Replaces the descriptor that notifies the guest of a running ring, and signals the new one
    /// once.
    fn set_call(&self, ring: u16, call: Option<Arc<EventFd>>) -> std::result::Result<(), String>;
    /// Changes the log of a running ring's writes, between two requests.
    ///
    /// # Safety
    /// The areas are in the last memory that [`set_memory`](Self::set_memory) got.
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
    /// [`Busy`](vshunt_types::error::Kind::Busy): the queues are not at rest at `until`. The
    /// function was not called.
    fn with_all_drained(&self, until: Instant, f: &mut dyn FnMut()) -> Result<()>;

    /// Returns whether the rings are served outside of this process, by the kernel. The methods
    /// below concern only such servers.
    fn is_external(&self) -> bool {
        false
    }
    /// Returns whether rings can record their requests in flight, so that another daemon continues
    /// with them.
    fn tracks(&self) -> bool {
        true
    }
    /// Returns the most regions of guest memory.
    fn regions_max(&self) -> u64 {
        MAX_REGIONS as u64
    }
    /// Sets the features that the guest accepted. `VHOST_F_LOG_ALL` is among them only while the
    /// log has bits for all of the guest's memory, because the server does not know the log's
    /// length.
    fn set_features(&self, _features: u64) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Sets the guest's memory in place of `old`, while no ring runs.
    ///
    /// # Errors
    /// The server keeps `old`.
    fn set_memory(&self, _mem: &GuestMemory, _old: &GuestMemory) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Sets the log of the pages that the server writes.
    ///
    /// # Safety
    /// `at` is a shared mapping that is long enough for the guest's memory, and to which there are
    /// no references. It stays mapped as long as `VHOST_F_LOG_ALL` is among the features.
    unsafe fn set_log_base(&self, _at: *mut u8) -> std::result::Result<(), String> {
        Ok(())
    }
    /// Returns a descriptor that becomes readable when the server finds the ring broken.
    fn alarm(&self, _ring: u16) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Acknowledges an alarm. Returns whether the ring is broken and was not known as broken.
    fn is_broken(&self, _ring: u16) -> bool {
        false
    }
}
