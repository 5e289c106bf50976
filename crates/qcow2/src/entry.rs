//! Entries of L1 and L2 tables.

use crate::bytes::low_u32;

/// The reference count of the cluster that an entry names is 1, so it may be overwritten in place
/// (bit 63).
pub const COPIED: u64 = 1 << 63;
/// A compressed cluster (bit 62 of an L2 entry).
pub const COMPRESSED: u64 = 1 << 62;
/// Reads as zeroes (bit 0 of a standard L2 entry, version 3 without extended L2).
pub const ZERO: u64 = 1;
/// Host offset of a cluster or table (bits 9 to 55).
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits of an L1 entry that have to be 0.
pub const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits of a standard L2 entry that have to be 0, except [`ZERO`].
pub const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// Subclusters of a cluster with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;

/// Unit of the length of a compressed cluster, in bytes.
pub const COMPRESSED_SECTOR: u64 = 512;

/// An L2 entry. `bits` is 0 except in extended ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The standard part.
    pub(crate) word: u64,
    /// Allocated subclusters, from bit 0; those that read as zeroes, from bit 32.
    pub(crate) bits: u64,
}

impl Entry {
    /// Returns the masks of the subclusters that are allocated, and of those that read as zeroes.
    #[inline]
    pub(crate) fn masks(self) -> (u32, u32) {
        (low_u32(self.bits), low_u32(self.bits >> 32))
    }
}

/// The location of a compressed cluster's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Host offset in bytes, with any alignment.
    pub offset: u64,
    /// Bytes up to the end of the last 512-byte sector of the data. The data itself may end
    /// earlier.
    pub bytes: u64,
}

impl Compressed {
    /// Decodes an L2 entry that has [`COMPRESSED`].
    pub fn of(entry: u64, cluster_bits: u32) -> Self {
        // The number of bits for the sector count follows from the cluster size (Compressed
        // Clusters Descriptor).
        let x = 62 - (cluster_bits - 8);
        let offset = entry & ((1 << x) - 1);
        let sectors = ((entry & (COMPRESSED - 1)) >> x) + 1;
        Self { offset, bytes: sectors * COMPRESSED_SECTOR - offset % COMPRESSED_SECTOR }
    }

    /// Returns the entry for `bytes` of data at `offset`.
    pub fn entry(offset: u64, bytes: u64, cluster_bits: u32) -> u64 {
        let x = 62 - (cluster_bits - 8);
        let sectors = (offset % COMPRESSED_SECTOR + bytes).div_ceil(COMPRESSED_SECTOR);
        COMPRESSED | (sectors - 1) << x | offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_descriptors_there_and_back() {
        for cluster_bits in 9..=21 {
            for offset in [0x1000, 0x1001, 0x11ff, 0x1_2345_6789] {
                for bytes in [1, 511, 512, 513, (1 << cluster_bits) - 1] {
                    let c = Compressed::of(Compressed::entry(offset, bytes, cluster_bits), cluster_bits);
                    assert_eq!(c.offset, offset, "{cluster_bits}");
                    assert!(c.bytes >= bytes && c.bytes < bytes + 512, "{cluster_bits}: {bytes} {}", c.bytes);
                }
            }
        }
    }
}
