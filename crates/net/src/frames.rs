//! Limits and directions that all queue pairs share.

use virtio::net::NET_HDR_BYTES;

/// Rings of a pair: the guest receives by the first and sends by the second (Virtio 1.3, 5.1.2).
pub const PAIR_RINGS: u16 = 2;

/// Most frames of a batch, in each direction.
pub(crate) const BATCH: u32 = 64;
/// Bytes of an Ethernet header: addresses and EtherType.
pub(crate) const ETH_HEADER_BYTES: usize = 14;
/// The longest frame: an IP packet of 64 KiB behind an Ethernet header with two VLAN tags.
pub const FRAME_MAX: usize = 65_535 + ETH_HEADER_BYTES + 2 * 4;

// Lengths of frames, with their headers, are told to the ring and to io_uring as `u32`.
const _: () = assert!(NET_HDR_BYTES + FRAME_MAX < u32::MAX as usize);

/// Direction of a virtqueue, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The guest receives on it.
    Receive,
    /// The guest sends on it.
    Transmit,
}

impl Direction {
    /// Returns the direction of a pair's virtqueue `nth`.
    pub(crate) fn of(nth: u16) -> Self {
        if nth == 0 { Self::Receive } else { Self::Transmit }
    }
}
