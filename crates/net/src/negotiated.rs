//! The effects of the features that a guest accepted, on its network device and on the tap behind
//! it. They are the same for all engines.

use virtio::features::{VIRTIO_F_VERSION_1, bit};
use virtio::net::*;
use vshunt_virtqueue::FrameFormat;

use crate::frames::PAIR_RINGS;
use vshunt_tap::{HEADER_LONG, HEADER_SHORT, Offloads, Tap};
use vshunt_types::convert::len_u32;

/// Sets the tap's headers and offloads for the features of the guest. Returns the format of frames
/// in the guest's buffers.
///
/// # Errors
/// The setting that the tap does not support, in words.
pub fn agree(tap: &Tap, features: u64) -> Result<FrameFormat, String> {
    let format = format(features);
    let result = tap.set_header(len_u32(format.header)).and_then(|()| tap.set_offloads(offloads(features)));
    result.map(|()| format).map_err(|e| e.to_string())
}

/// Returns the format of frames in the guest's buffers.
pub fn format(features: u64) -> FrameFormat {
    let has = |number| features & bit(number) != 0;
    let merge = has(VIRTIO_NET_F_MRG_RXBUF);
    let header = if merge || has(VIRTIO_F_VERSION_1) { HEADER_LONG } else { HEADER_SHORT };
    FrameFormat { header: header as usize, merge }
}

/// Returns the number of the control virtqueue of a device with `pairs` queue pairs, if it has one.
/// It follows the pairs that the driver knows (Virtio 1.3, 5.1.2).
pub fn control_ring(features: u64, pairs: u16) -> Option<u16> {
    let has = |number| features & bit(number) != 0;
    has(VIRTIO_NET_F_CTRL_VQ).then_some(PAIR_RINGS * if has(VIRTIO_NET_F_MQ) { pairs } else { 1 })
}

/// Features that tell which frames a driver accepts. It may change them at run time.
pub const GUEST_OFFLOADS: u64 = bit(VIRTIO_NET_F_GUEST_CSUM)
    | bit(VIRTIO_NET_F_GUEST_TSO4)
    | bit(VIRTIO_NET_F_GUEST_TSO6)
    | bit(VIRTIO_NET_F_GUEST_ECN)
    | bit(VIRTIO_NET_F_GUEST_UFO)
    | bit(VIRTIO_NET_F_GUEST_USO4)
    | bit(VIRTIO_NET_F_GUEST_USO6);

/// Returns the offloads that a driver accepts if it negotiated these features, or set these
/// offloads.
pub fn offloads(features: u64) -> Offloads {
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
