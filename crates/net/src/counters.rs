//! Counters of a queue pair, besides those that every queue has.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_engine::QueueStats;
use vshunt_types::spec::{DROP_REASONS, DropReason, NetDrops, NetQueueCounters};

/// Counters of one queue pair. Only the owning worker writes them, or the session thread while the
/// pair is on no worker. Any thread reads them. Exception: only the session thread counts
/// [`Detached`](DropReason::Detached).
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct NetStats {
    to_guest_packets: AtomicU64,
    to_guest_bytes: AtomicU64,
    to_guest_batches: AtomicU64,
    from_guest_packets: AtomicU64,
    from_guest_bytes: AtomicU64,
    from_guest_batches: AtomicU64,
    drops: [AtomicU64; DROP_REASONS],
}

impl NetStats {
    /// Counts a batch of frames that the guest received.
    pub(crate) fn received(&self, packets: u64, bytes: u64) {
        QueueStats::add(&self.to_guest_packets, packets);
        QueueStats::add(&self.to_guest_bytes, bytes);
        QueueStats::add(&self.to_guest_batches, 1);
    }

    /// Counts a batch of frames that the network took from the guest.
    pub(crate) fn sent(&self, packets: u64, bytes: u64) {
        QueueStats::add(&self.from_guest_packets, packets);
        QueueStats::add(&self.from_guest_bytes, bytes);
        QueueStats::add(&self.from_guest_batches, 1);
    }

    /// Counts frames that were dropped.
    pub fn dropped(&self, why: DropReason, packets: u64) {
        QueueStats::add(self.drop_counter(why), packets);
    }

    #[expect(clippy::indexing_slicing, reason = "DROP_REASONS is the number of variants")]
    fn drop_counter(&self, why: DropReason) -> &AtomicU64 {
        &self.drops[why as usize]
    }

    /// Returns the counters as they are now.
    pub fn counters(&self) -> NetQueueCounters {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        NetQueueCounters {
            to_guest_packets: get(&self.to_guest_packets),
            to_guest_bytes: get(&self.to_guest_bytes),
            to_guest_batches: get(&self.to_guest_batches),
            from_guest_packets: get(&self.from_guest_packets),
            from_guest_bytes: get(&self.from_guest_bytes),
            from_guest_batches: get(&self.from_guest_batches),
            drops: NetDrops::new(|why| get(self.drop_counter(why))),
        }
    }
}
