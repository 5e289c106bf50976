//! What a card's queue pair counts, besides what every queue does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_engine::QueueStats;
use vshunt_types::spec::{DROP_REASONS, DropReason, NetDrops, NetQueueCounters};

/// Counters of one queue pair. Written by the owning worker alone, or while the pair is on none; read by anyone. But for
/// [`Detached`](DropReason::Detached), which the session thread alone counts.
#[derive(Debug, Default)]
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
    /// Frames that the guest got together.
    pub(super) fn received(&self, packets: u64, bytes: u64) {
        QueueStats::add(&self.to_guest_packets, packets);
        QueueStats::add(&self.to_guest_bytes, bytes);
        QueueStats::add(&self.to_guest_batches, 1);
    }

    /// Frames of the guest that the network took together.
    pub(super) fn sent(&self, packets: u64, bytes: u64) {
        QueueStats::add(&self.from_guest_packets, packets);
        QueueStats::add(&self.from_guest_bytes, bytes);
        QueueStats::add(&self.from_guest_batches, 1);
    }

    /// Frames that did not get through.
    pub fn dropped(&self, why: DropReason, packets: u64) {
        QueueStats::add(&self.drops[why as usize], packets);
    }

    /// As they are now.
    pub fn counters(&self) -> NetQueueCounters {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        NetQueueCounters {
            to_guest_packets: get(&self.to_guest_packets),
            to_guest_bytes: get(&self.to_guest_bytes),
            to_guest_batches: get(&self.to_guest_batches),
            from_guest_packets: get(&self.from_guest_packets),
            from_guest_bytes: get(&self.from_guest_bytes),
            from_guest_batches: get(&self.from_guest_batches),
            drops: NetDrops::new(|why| get(&self.drops[why as usize])),
        }
    }
}
