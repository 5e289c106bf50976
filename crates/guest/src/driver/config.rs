//! The configuration spaces of a block device (virtio 1.3, 5.2.4) and of a network device (5.1.4),
//! parsed from their bytes.

use super::wire::{read_u16, read_u32, read_u64};

/// Bytes to request: up to the fields before secure erase, which every server of this device has.
pub const CONFIG_LEN: usize = 60;

/// Configuration of a block device. A field is valid only if its feature was negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Size in sectors of 512 bytes.
    pub capacity: u64,
    /// Most bytes of a segment (F_SIZE_MAX).
    pub size_max: u32,
    /// Most data segments of a request (F_SEG_MAX).
    pub seg_max: u32,
    /// Bytes of a logical block (F_BLK_SIZE).
    pub blk_size: u32,
    /// Log2 of the logical blocks in a physical block (F_TOPOLOGY).
    pub physical_block_exp: u8,
    /// First aligned logical block (F_TOPOLOGY).
    pub alignment_offset: u8,
    /// Suggested minimum I/O size in logical blocks (F_TOPOLOGY).
    pub min_io_size: u16,
    /// Suggested optimal I/O size in logical blocks (F_TOPOLOGY).
    pub opt_io_size: u32,
    /// 1: write-back cache (F_CONFIG_WCE).
    pub writeback: u8,
    /// Number of request queues (F_MQ).
    pub num_queues: u16,
    /// Most sectors of a discard segment (F_DISCARD).
    pub max_discard_sectors: u32,
    /// Most segments of a discard (F_DISCARD).
    pub max_discard_seg: u32,
    /// Alignment of discards in sectors (F_DISCARD).
    pub discard_sector_alignment: u32,
    /// Most sectors of a write-zeroes segment (F_WRITE_ZEROES).
    pub max_write_zeroes_sectors: u32,
    /// Most segments of a write-zeroes request (F_WRITE_ZEROES).
    pub max_write_zeroes_seg: u32,
    /// Whether write-zeroes may unmap (F_WRITE_ZEROES).
    pub write_zeroes_may_unmap: u8,
}

impl Config {
    /// Parses the bytes of the space. Returns `None` if there are fewer than [`CONFIG_LEN`].
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            capacity: read_u64(bytes, 0)?,
            size_max: read_u32(bytes, 8)?,
            seg_max: read_u32(bytes, 12)?,
            blk_size: read_u32(bytes, 20)?,
            physical_block_exp: *bytes.get(24)?,
            alignment_offset: *bytes.get(25)?,
            min_io_size: read_u16(bytes, 26)?,
            opt_io_size: read_u32(bytes, 28)?,
            writeback: *bytes.get(32)?,
            num_queues: read_u16(bytes, 34)?,
            max_discard_sectors: read_u32(bytes, 36)?,
            max_discard_seg: read_u32(bytes, 40)?,
            discard_sector_alignment: read_u32(bytes, 44)?,
            max_write_zeroes_sectors: read_u32(bytes, 48)?,
            max_write_zeroes_seg: read_u32(bytes, 52)?,
            write_zeroes_may_unmap: *bytes.get(56)?,
        })
    }
}

/// Bytes to request of a network device's space: address, status, queue pairs, MTU.
pub const NET_CONFIG_LEN: usize = 12;

/// Configuration of a network device. A field is valid only if its feature was negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetConfig {
    /// MAC address (F_MAC).
    pub mac: [u8; 6],
    /// Bit 0: the link is up (F_STATUS).
    pub status: u16,
    /// Number of queue pairs (F_MQ).
    pub pairs: u16,
    /// Most bytes of an IP packet (F_MTU).
    pub mtu: u16,
}

impl NetConfig {
    /// Parses the bytes of the space. Returns `None` if there are fewer than [`NET_CONFIG_LEN`].
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            mac: bytes.get(..6)?.try_into().ok()?,
            status: read_u16(bytes, 6)?,
            pairs: read_u16(bytes, 8)?,
            mtu: read_u16(bytes, 10)?,
        })
    }
}

/// Feature bits of the device and of the transport, as masks. The device-independent bits are those
/// of virtio 1.3, section 6.
#[allow(missing_docs)] // the names are the specification's
pub mod feature {
    pub const BLK_SIZE_MAX: u64 = 1 << 1;
    pub const BLK_SEG_MAX: u64 = 1 << 2;
    pub const BLK_RO: u64 = 1 << 5;
    pub const BLK_BLK_SIZE: u64 = 1 << 6;
    pub const BLK_FLUSH: u64 = 1 << 9;
    pub const BLK_TOPOLOGY: u64 = 1 << 10;
    pub const BLK_CONFIG_WCE: u64 = 1 << 11;
    pub const BLK_MQ: u64 = 1 << 12;
    pub const BLK_DISCARD: u64 = 1 << 13;
    pub const BLK_WRITE_ZEROES: u64 = 1 << 14;
    pub const NET_CSUM: u64 = 1 << 0;
    pub const NET_GUEST_CSUM: u64 = 1 << 1;
    pub const NET_MTU: u64 = 1 << 3;
    pub const NET_MAC: u64 = 1 << 5;
    pub const NET_GUEST_TSO4: u64 = 1 << 7;
    pub const NET_GUEST_TSO6: u64 = 1 << 8;
    pub const NET_HOST_TSO4: u64 = 1 << 11;
    pub const NET_HOST_TSO6: u64 = 1 << 12;
    pub const NET_MRG_RXBUF: u64 = 1 << 15;
    pub const NET_STATUS: u64 = 1 << 16;
    pub const NET_MQ: u64 = 1 << 22;
    pub const NET_GUEST_USO4: u64 = 1 << 54;
    pub const NET_GUEST_USO6: u64 = 1 << 55;
    pub const NET_HOST_USO: u64 = 1 << 56;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Request types (virtio 1.3, 5.2.6).
#[allow(missing_docs)] // the names are the specification's
pub mod request {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Status bytes.
#[allow(missing_docs)] // the names are the specification's
pub mod status {
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    pub const UNSUPP: u8 = 2;
    /// The driver initializes a status byte with this value. No server returns it.
    pub const UNTOUCHED: u8 = 0xee;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_at_the_specified_offsets() {
        let bytes: Vec<u8> = (0..CONFIG_LEN as u8).collect();
        let config = Config::parse(&bytes).unwrap();
        assert_eq!(config.capacity, 0x0706_0504_0302_0100);
        assert_eq!(config.seg_max, 0x0f0e_0d0c);
        assert_eq!(config.blk_size, 0x1716_1514);
        assert_eq!(config.num_queues, 0x2322);
        assert_eq!(config.max_write_zeroes_seg, 0x3736_3534);
        assert_eq!(config.write_zeroes_may_unmap, 56);
        assert!(Config::parse(&bytes[..56]).is_none());
        let device = NetConfig::parse(&bytes).unwrap();
        assert_eq!((device.mac, device.status), ([0, 1, 2, 3, 4, 5], 0x0706));
        assert_eq!((device.pairs, device.mtu), (0x0908, 0x0b0a));
        assert!(NetConfig::parse(&bytes[..11]).is_none());
    }
}
