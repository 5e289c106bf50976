//! virtio-net behind a socket: features, configuration space, announcements (Virtio 1.3, section 5.1).
//!
//! Front-ends have the control virtqueue themselves, and tell us of active queue pairs by SET_VRING_ENABLE.

use std::sync::Arc;

use vhost::vhost_user::VhostUserProtocolFeatures;
use virtio::features::bit;
use virtio::net::*;

use super::{Device, Then, VringParts};
use crate::backend::net::Tap;
use crate::worker::Queue;

/// EtherType of RARP.
const ETH_RARP: u16 = 0x8035;
/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;

/// Names of a network card's features.
const NAMES: &[(u32, &str)] = &[
    (VIRTIO_NET_F_CSUM, "CSUM"),
    (VIRTIO_NET_F_GUEST_CSUM, "GUEST_CSUM"),
    (VIRTIO_NET_F_MTU, "MTU"),
    (VIRTIO_NET_F_MAC, "MAC"),
    (VIRTIO_NET_F_GUEST_TSO4, "GUEST_TSO4"),
    (VIRTIO_NET_F_GUEST_TSO6, "GUEST_TSO6"),
    (VIRTIO_NET_F_GUEST_ECN, "GUEST_ECN"),
    (VIRTIO_NET_F_GUEST_UFO, "GUEST_UFO"),
    (VIRTIO_NET_F_HOST_TSO4, "HOST_TSO4"),
    (VIRTIO_NET_F_HOST_TSO6, "HOST_TSO6"),
    (VIRTIO_NET_F_HOST_ECN, "HOST_ECN"),
    (VIRTIO_NET_F_HOST_UFO, "HOST_UFO"),
    (VIRTIO_NET_F_MRG_RXBUF, "MRG_RXBUF"),
    (VIRTIO_NET_F_STATUS, "STATUS"),
    (VIRTIO_NET_F_GUEST_ANNOUNCE, "GUEST_ANNOUNCE"),
    (VIRTIO_NET_F_MQ, "MQ"),
    (VIRTIO_NET_F_GUEST_USO4, "GUEST_USO4"),
    (VIRTIO_NET_F_GUEST_USO6, "GUEST_USO6"),
    (VIRTIO_NET_F_HOST_USO, "HOST_USO"),
];

/// A tap as a guest's card.
pub struct NetDevice {
    name: String,
    tap: Arc<Tap>,
    pairs: u16,
    mac: Option<[u8; MAC_BYTES]>,
    /// What whoever moves the frames has.
    served: u64,
}

impl NetDevice {
    /// A card of `pairs` queue pairs, whose rings have the features `served`.
    pub fn new(name: &str, tap: Arc<Tap>, pairs: u16, mac: Option<[u8; MAC_BYTES]>, served: u64) -> Self {
        Self { name: name.to_owned(), tap, pairs, mac, served }
    }
}

impl Device for NetDevice {
    fn features(&self) -> u64 {
        let mut features = self.served
            | bit(VIRTIO_NET_F_CSUM)
            | bit(VIRTIO_NET_F_GUEST_CSUM)
            | bit(VIRTIO_NET_F_MTU)
            | bit(VIRTIO_NET_F_GUEST_TSO4)
            | bit(VIRTIO_NET_F_GUEST_TSO6)
            | bit(VIRTIO_NET_F_GUEST_ECN)
            | bit(VIRTIO_NET_F_GUEST_UFO)
            | bit(VIRTIO_NET_F_HOST_TSO4)
            | bit(VIRTIO_NET_F_HOST_TSO6)
            | bit(VIRTIO_NET_F_HOST_ECN)
            | bit(VIRTIO_NET_F_HOST_UFO)
            | bit(VIRTIO_NET_F_STATUS)
            | bit(VIRTIO_NET_F_GUEST_ANNOUNCE);
        if self.tap.has_uso() {
            features |=
                bit(VIRTIO_NET_F_GUEST_USO4) | bit(VIRTIO_NET_F_GUEST_USO6) | bit(VIRTIO_NET_F_HOST_USO);
        }
        if self.mac.is_some() {
            features |= bit(VIRTIO_NET_F_MAC);
        }
        if self.pairs > 1 {
            features |= bit(VIRTIO_NET_F_MQ);
        }
        features
    }

    fn protocol(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MTU | VhostUserProtocolFeatures::RARP
    }

    /// The rings' server is told, and tells the tap.
    fn negotiated(&self, _features: u64) {}

    fn reset(&self) {}

    fn feature_names(&self) -> &'static [(u32, &'static str)] {
        NAMES
    }

    fn config(&self) -> Vec<u8> {
        let config = NetConfig {
            mac: self.mac.unwrap_or_default(),
            status: VIRTIO_NET_S_LINK_UP,
            max_virtqueue_pairs: self.pairs,
            // A tap that is gone has none to tell; its guest is cut off anyway.
            mtu: self.tap.mtu().map_or(0, |mtu| mtu as u16),
        };
        config.to_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<Then, String> {
        Err(format!(
            "the guest writes {} bytes at {offset} of the configuration space; nothing is writable",
            bytes.len()
        ))
    }

    fn settle(&self) -> Result<(), String> {
        Ok(())
    }

    fn resumed(&self) -> Result<(), String> {
        Ok(())
    }

    fn set_mtu(&self, mtu: u64) -> Result<(), String> {
        let mtu = u32::try_from(mtu).unwrap_or(u32::MAX);
        self.tap.set_mtu(mtu).map_err(|e| e.to_string())
    }

    fn announce(&self, mac: [u8; MAC_BYTES]) -> Result<(), String> {
        // A network that does not hear of it learns by the guest's next frame: no reason to end the connection.
        if let Err(e) = self.tap.inject(&rarp(mac)) {
            tracing::warn!("{}: the guest's new place is not announced: {e}", self.name);
        }
        Ok(())
    }

    fn queue(&self, _parts: VringParts) -> Box<dyn Queue> {
        unreachable!("the kernel has the rings of every network's export")
    }
}

/// A RARP request of `mac` for itself, by which bridges and switches learn where it is (RFC 903).
fn rarp(mac: [u8; MAC_BYTES]) -> [u8; FRAME_MIN] {
    let mut frame = [0; FRAME_MIN];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&[0xFF; MAC_BYTES]);
    put(&mac);
    put(&ETH_RARP.to_be_bytes());
    // Ethernet, IPv4, their addresses' lengths, "request reverse".
    put(&[0, 1, 8, 0, MAC_BYTES as u8, 4, 0, 3]);
    // Sender and target: the same hardware address, no IP address.
    put(&mac);
    put(&[0; 4]);
    put(&mac);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_a_rarp_request() {
        let mac = [2, 3, 4, 5, 6, 7];
        let frame = rarp(mac);
        assert_eq!(frame[..12], [255, 255, 255, 255, 255, 255, 2, 3, 4, 5, 6, 7]);
        assert_eq!(frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac[..], &mac[..]));
        assert_eq!(frame[38..], [0; 22]);
    }
}
