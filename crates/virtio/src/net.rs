//! virtio-net: feature bits, configuration space and the header before each frame (Virtio 1.3,
//! section 5.1).

use alloc::vec;
use alloc::vec::Vec;

/// The device accepts frames whose checksum is not computed yet (5.1.3).
pub const VIRTIO_NET_F_CSUM: u32 = 0;
/// The driver accepts such frames.
pub const VIRTIO_NET_F_GUEST_CSUM: u32 = 1;
/// The driver can change the offloads that it accepts at run time, through the control virtqueue.
pub const VIRTIO_NET_F_CTRL_GUEST_OFFLOADS: u32 = 2;
/// The configuration space has an MTU.
pub const VIRTIO_NET_F_MTU: u32 = 3;
/// The configuration space has a MAC address.
pub const VIRTIO_NET_F_MAC: u32 = 5;
/// The driver accepts TCP segments over IPv4 that are longer than the MTU.
pub const VIRTIO_NET_F_GUEST_TSO4: u32 = 7;
/// The driver accepts TCP segments over IPv6 that are longer than the MTU.
pub const VIRTIO_NET_F_GUEST_TSO6: u32 = 8;
/// The driver accepts such segments with ECN.
pub const VIRTIO_NET_F_GUEST_ECN: u32 = 9;
/// The driver accepts unfragmented UDP datagrams that are longer than the MTU.
pub const VIRTIO_NET_F_GUEST_UFO: u32 = 10;
/// The device accepts TCP segments over IPv4 that are longer than the MTU.
pub const VIRTIO_NET_F_HOST_TSO4: u32 = 11;
/// The device accepts TCP segments over IPv6 that are longer than the MTU.
pub const VIRTIO_NET_F_HOST_TSO6: u32 = 12;
/// The device accepts such segments with ECN.
pub const VIRTIO_NET_F_HOST_ECN: u32 = 13;
/// The device accepts unfragmented UDP datagrams that are longer than the MTU.
pub const VIRTIO_NET_F_HOST_UFO: u32 = 14;
/// A frame may fill several receive buffers.
pub const VIRTIO_NET_F_MRG_RXBUF: u32 = 15;
/// The configuration space has the link's status.
pub const VIRTIO_NET_F_STATUS: u32 = 16;
/// There is a control virtqueue.
pub const VIRTIO_NET_F_CTRL_VQ: u32 = 17;
/// The driver can announce itself to the network when the device asks for it.
pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u32 = 21;
/// There are several queue pairs.
pub const VIRTIO_NET_F_MQ: u32 = 22;
/// The driver accepts UDP segments over IPv4 that are longer than the MTU.
pub const VIRTIO_NET_F_GUEST_USO4: u32 = 54;
/// The driver accepts UDP segments over IPv6 that are longer than the MTU.
pub const VIRTIO_NET_F_GUEST_USO6: u32 = 55;
/// The device accepts UDP segments that are longer than the MTU.
pub const VIRTIO_NET_F_HOST_USO: u32 = 56;

/// In [`NetConfig::status`]: the link is up.
pub const VIRTIO_NET_S_LINK_UP: u16 = 1;

/// Bytes of the header with its number of buffers, which every driver of Virtio 1.x uses (5.1.6).
pub const NET_HDR_BYTES: usize = 12;
/// Bytes of the header of a legacy driver without merged buffers.
pub const NET_HDR_LEGACY_BYTES: usize = 10;
/// Bytes of an Ethernet address.
pub const MAC_BYTES: usize = 6;

/// The configuration space, up to the last field that an offered feature uses (5.1.4).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetConfig {
    /// The device's address, with [`VIRTIO_NET_F_MAC`].
    pub mac: [u8; MAC_BYTES],
    /// [`VIRTIO_NET_S_LINK_UP`] or 0.
    pub status: u16,
    /// Queue pairs, with [`VIRTIO_NET_F_MQ`].
    pub max_virtqueue_pairs: u16,
    /// Bytes of the longest IP packet, with [`VIRTIO_NET_F_MTU`].
    pub mtu: u16,
}

const _: () = assert!(size_of::<NetConfig>() == 12);

impl NetConfig {
    /// Returns the space as the driver reads it.
    pub fn to_bytes(self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        bytes[..6].copy_from_slice(&self.mac);
        bytes[6..8].copy_from_slice(&self.status.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.max_virtqueue_pairs.to_le_bytes());
        bytes[10..].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }
}

/// The device's answer to a command that was carried out (5.1.6.5).
pub const VIRTIO_NET_OK: u8 = 0;
/// The device's answer to a command that was not carried out.
pub const VIRTIO_NET_ERR: u8 = 1;

// Classes of commands, and the known command of each.
const CTRL_ANNOUNCE: u8 = 3;
const CTRL_ANNOUNCE_ACK: u8 = 0;
const CTRL_MQ: u8 = 4;
const CTRL_MQ_VQ_PAIRS_SET: u8 = 0;
const CTRL_GUEST_OFFLOADS: u8 = 5;
const CTRL_GUEST_OFFLOADS_SET: u8 = 0;

/// A driver's command on the control virtqueue (5.1.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The driver has announced itself to the network as it was asked to (5.1.6.5.4).
    Announced,
    /// This number of queue pairs is in use (5.1.6.5.5).
    Pairs(u16),
    /// The offloads that the driver accepts, as a mask of feature bits (5.1.6.5.6.1).
    Offloads(u64),
}

impl Command {
    /// Bytes of the longest command.
    pub const BYTES_MAX: usize = 10;

    /// Parses a command from all bytes that the driver wrote: class, command, data. `None`: the
    /// command is unknown, or has another length.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK] => Some(Self::Announced),
            [CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, a, b] => Some(Self::Pairs(u16::from_le_bytes([*a, *b]))),
            [CTRL_GUEST_OFFLOADS, CTRL_GUEST_OFFLOADS_SET, data @ ..] => {
                data.try_into().ok().map(|data| Self::Offloads(u64::from_le_bytes(data)))
            }
            _ => None,
        }
    }

    /// Returns the bytes of the command.
    pub fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Announced => vec![CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK],
            Self::Pairs(pairs) => [&[CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET][..], &pairs.to_le_bytes()].concat(),
            Self::Offloads(bits) => {
                [&[CTRL_GUEST_OFFLOADS, CTRL_GUEST_OFFLOADS_SET][..], &bits.to_le_bytes()].concat()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_laid_out_as_specified() {
        assert_eq!(Command::parse(&[4, 0, 3, 1]), Some(Command::Pairs(0x103)));
        assert_eq!(Command::parse(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 1]), Some(Command::Offloads(1 << 56 | 2)));
        for command in [Command::Announced, Command::Pairs(2), Command::Offloads(0x82)] {
            let bytes = command.to_bytes();
            assert!(bytes.len() <= Command::BYTES_MAX);
            assert_eq!(Command::parse(&bytes), Some(command));
            assert_eq!(Command::parse(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Command::parse(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(Command::parse(&[4, 1, 0, 0]), None);
        assert_eq!(Command::parse(&[0, 0, 1]), None);
    }

    #[test]
    fn the_space_is_laid_out_as_specified() {
        let config = NetConfig { mac: [1, 2, 3, 4, 5, 6], status: 1, max_virtqueue_pairs: 0x0203, mtu: 1500 };
        assert_eq!(config.to_bytes(), [1, 2, 3, 4, 5, 6, 1, 0, 3, 2, 0xDC, 5]);
    }
}
