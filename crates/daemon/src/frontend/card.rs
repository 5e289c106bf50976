//! What a guest's choice of features means for the tap behind its network card, whoever serves the rings.

use virtio::features::{VIRTIO_F_VERSION_1, bit};
use virtio::net::*;
use vshunt_net::tap::{HEADER_LONG, HEADER_SHORT};
use vshunt_net::{Offloads, Tap};
use vshunt_virtqueue::FrameFormat;

use crate::queue::net::RINGS;

/// Sets the tap's headers and offloads as the guest agreed, and says how frames lie in its buffers.
///
/// # Errors
/// What the tap cannot do, in words.
pub(super) fn agree(tap: &Tap, features: u64) -> Result<FrameFormat, String> {
    let format = format(features);
    let told = tap.set_header(format.header as u32).and_then(|()| tap.set_offloads(offloads(features)));
    told.map(|()| format).map_err(|e| e.to_string())
}

/// How frames lie in the guest's buffers.
pub(super) fn format(features: u64) -> FrameFormat {
    let has = |number| features & bit(number) != 0;
    let merge = has(VIRTIO_NET_F_MRG_RXBUF);
    let header = if merge || has(VIRTIO_F_VERSION_1) { HEADER_LONG } else { HEADER_SHORT };
    FrameFormat { header: header as usize, merge }
}

/// Which virtqueue is the control queue of a card of `pairs` queue pairs: it is behind those that the driver knows of (Virtio
/// 1.3, 5.1.2).
pub(super) fn control_ring(features: u64, pairs: u16) -> Option<u16> {
    let has = |number| features & bit(number) != 0;
    has(VIRTIO_NET_F_CTRL_VQ).then_some(RINGS * if has(VIRTIO_NET_F_MQ) { pairs } else { 1 })
}

/// Features of what a driver takes, which it may change at run time.
pub(super) const GUEST_OFFLOADS: u64 = bit(VIRTIO_NET_F_GUEST_CSUM)
    | bit(VIRTIO_NET_F_GUEST_TSO4)
    | bit(VIRTIO_NET_F_GUEST_TSO6)
    | bit(VIRTIO_NET_F_GUEST_ECN)
    | bit(VIRTIO_NET_F_GUEST_UFO)
    | bit(VIRTIO_NET_F_GUEST_USO4)
    | bit(VIRTIO_NET_F_GUEST_USO6);

/// What a driver that agreed on these features, or set these offloads, takes.
pub(super) fn offloads(features: u64) -> Offloads {
    let has = |number| features & bit(number) != 0;
    Offloads {
        csum: has(VIRTIO_NET_F_GUEST_CSUM),
        tso4: has(VIRTIO_NET_F_GUEST_TSO4),
        tso6: has(VIRTIO_NET_F_GUEST_TSO6),
        ecn: has(VIRTIO_NET_F_GUEST_ECN),
        ufo: has(VIRTIO_NET_F_GUEST_UFO),
        // The kernel has both or none.
        uso: has(VIRTIO_NET_F_GUEST_USO4) && has(VIRTIO_NET_F_GUEST_USO6),
    }
}
