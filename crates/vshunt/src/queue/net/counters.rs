//! What a card's queue pair counts, besides what every queue does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::backend::net::switch::Refusal;
use crate::export::spec::{NetDrops, NetQueueCounters};
use crate::worker::QueueStats;

/// Why a frame did not get through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// Its descriptors lead outside of the guest's memory, or are no chain.
    Malformed,
    /// Shorter than its virtio-net header and an Ethernet header.
    TooShort,
    /// Longer than any frame, or than the one receive buffer that it is to fit in.
    TooLong,
    /// The guest had no receive buffers left for it when its ring stopped.
    NoBuffers,
    /// The host found its virtio-net header wrong.
    BadHeader,
    /// The interface is down.
    Down,
    /// The host has no room for it.
    NoRoom,
    /// It waited in a tap's queue that was detached.
    Detached,
    /// In flight when a former daemon ended: it may have been sent, and is not sent twice.
    Unknown,
    /// No other port of the switch takes it.
    NoReceiver,
    /// Its source is a group's address, or zero.
    BadSource,
    /// Its source is not the port's address, or is another port's.
    ForeignSource,
    /// It is for a station that bridges do not forward to.
    Reserved,
    /// Its port is not in its VLAN, or it has tags that the port does not take.
    Vlan,
    /// It is longer than a port's MTU.
    OverMtu,
    /// Its port and the other one are isolated.
    Isolated,
    /// Its port, or the other one, is blocked: an uplink that makes a loop.
    Loop,
    /// The host took it not, for another reason.
    Other,
}

impl From<Refusal> for Drop {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::NoReceiver => Self::NoReceiver,
            Refusal::BadSource => Self::BadSource,
            Refusal::ForeignSource => Self::ForeignSource,
            Refusal::Reserved => Self::Reserved,
            Refusal::Vlan => Self::Vlan,
            Refusal::OverMtu => Self::OverMtu,
            Refusal::Isolated => Self::Isolated,
            Refusal::Loop => Self::Loop,
        }
    }
}

const DROPS: usize = Drop::Other as usize + 1;

/// Counters of one queue pair. Written by the owning worker alone, or while the pair is on none; read by anyone. But for
/// [`Detached`](Drop::Detached), which the session thread alone counts.
#[derive(Debug, Default)]
pub struct NetStats {
    to_guest_packets: AtomicU64,
    to_guest_bytes: AtomicU64,
    to_guest_batches: AtomicU64,
    from_guest_packets: AtomicU64,
    from_guest_bytes: AtomicU64,
    from_guest_batches: AtomicU64,
    drops: [AtomicU64; DROPS],
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
    pub fn dropped(&self, why: Drop, packets: u64) {
        QueueStats::add(&self.drops[why as usize], packets);
    }

    /// As they are now.
    pub fn counters(&self) -> NetQueueCounters {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let of = |why: Drop| get(&self.drops[why as usize]);
        NetQueueCounters {
            to_guest_packets: get(&self.to_guest_packets),
            to_guest_bytes: get(&self.to_guest_bytes),
            to_guest_batches: get(&self.to_guest_batches),
            from_guest_packets: get(&self.from_guest_packets),
            from_guest_bytes: get(&self.from_guest_bytes),
            from_guest_batches: get(&self.from_guest_batches),
            drops: NetDrops {
                malformed: of(Drop::Malformed),
                too_short: of(Drop::TooShort),
                too_long: of(Drop::TooLong),
                no_buffers: of(Drop::NoBuffers),
                bad_header: of(Drop::BadHeader),
                down: of(Drop::Down),
                no_room: of(Drop::NoRoom),
                detached: of(Drop::Detached),
                unknown: of(Drop::Unknown),
                no_receiver: of(Drop::NoReceiver),
                bad_source: of(Drop::BadSource),
                foreign_source: of(Drop::ForeignSource),
                reserved: of(Drop::Reserved),
                vlan: of(Drop::Vlan),
                over_mtu: of(Drop::OverMtu),
                isolated: of(Drop::Isolated),
                looped: of(Drop::Loop),
                other: of(Drop::Other),
            },
        }
    }
}
