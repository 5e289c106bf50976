//! Descriptors, positions and faults, for the rings and the in-flight region.
//!
//! [`ring`](crate::ring) exports the public ones.

use crate::bits::{low_u16, low_u32};
use crate::raw;

/// Most descriptors of one ring, and of one indirect table. QEMU allows as many
/// (`VIRTQUEUE_MAX_SIZE`), and they are enough for the longest request of a block driver (1022
/// segments, header, status).
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Bytes of one descriptor, in every layout (2.7.5, 2.8.13).
pub const DESC_LEN: usize = 16;

/// Descriptor flag: another descriptor of the chain follows.
pub(crate) const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes the buffer.
pub(crate) const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub(crate) const DESC_F_INDIRECT: u16 = 4;
/// Packed descriptor flag: made available in the lap of this wrap counter.
pub(crate) const DESC_F_AVAIL: u16 = 1 << 7;
/// Packed descriptor flag: used in the lap of this wrap counter.
pub(crate) const DESC_F_USED: u16 = 1 << 15;

/// Names a request when it is returned.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Split: index of the first descriptor. Packed: buffer id.
    pub id: u16,
    /// Descriptors of the ring that the chain occupies. An indirect table counts as the descriptor
    /// that refers to it.
    pub descs: u16,
}

impl Head {
    /// Both fields in one word. If they were stored one by one and loaded as one word, the load
    /// would stall until the stores have left the processor's store buffer. That took a quarter of
    /// the time of a request.
    #[inline(always)]
    pub(crate) fn new(id: u16, descs: u16) -> Self {
        let word = u32::from(id) | u32::from(descs) << 16;
        // SAFETY: two 16-bit integers in the order of the fields, as `repr(C)` lays them out; any
        // bits make them.
        unsafe { core::mem::transmute::<u32, Head>(word) }
    }
}

/// A position on a packed ring: a slot, and the wrap counter of the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pos {
    pub(crate) slot: u16,
    pub(crate) wrap: bool,
}

impl Pos {
    /// Makes a position from `slot | wrap << 15`.
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self { slot: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// Returns `slot | wrap << 15`.
    #[inline(always)]
    pub(crate) const fn to_bits(self) -> u16 {
        self.slot | (self.wrap as u16) << 15
    }

    /// Returns the position `count` slots further, which is at most one lap.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn advance(self, count: u16, size: u16) -> Self {
        let slot = self.slot + count;
        if slot >= size { Self { slot: slot - size, wrap: !self.wrap } } else { Self { slot, ..self } }
    }

    /// Returns the position `count` slots back, which is at most one lap.
    #[must_use]
    pub(crate) const fn retreat(self, count: u16, size: u16) -> Self {
        if count > self.slot {
            Self { slot: self.slot + (size - count), wrap: !self.wrap }
        } else {
            Self { slot: self.slot - count, ..self }
        }
    }

    /// Returns the number of slots from here to `to`, which is at most one lap ahead.
    pub(crate) const fn distance(self, to: Self, size: u16) -> u16 {
        if self.wrap == to.wrap { to.slot.wrapping_sub(self.slot) } else { size - self.slot + to.slot }
    }

    /// Returns the `AVAIL` and `USED` flags of a slot that is used in this lap.
    #[inline(always)]
    pub(crate) const fn used_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 }
    }

    /// Returns the `AVAIL` and `USED` flags of a slot that was made available in this lap.
    #[inline(always)]
    pub(crate) const fn avail_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }
}

/// A fault of the ring itself. Nothing on the ring can be trusted any more, and the queue must stop
/// (`DEVICE_NEEDS_RESET`, 2.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Broken {
    /// The available index is further ahead than the ring is long.
    #[error("available index {avail} is more than a ring ahead of {next}")]
    AvailIndex {
        /// The driver's index.
        avail: u16,
        /// The next index that the device would have taken.
        next: u16,
    },
    /// A chain's first descriptor is outside of the descriptor table.
    #[error("chain head {head} is outside of a ring of {size}")]
    Head {
        /// The driver's value.
        head: u16,
        /// Descriptors in the ring.
        size: u16,
    },
    /// A packed chain does not end within the descriptors that the driver can make available.
    #[error("the packed chain at slot {slot} does not end")]
    Endless {
        /// The slot where it starts.
        slot: u16,
    },
    /// More requests are in flight than the ring has descriptors.
    #[error("more requests in flight than the ring has descriptors")]
    Overcommitted,
    /// A chain was requested by its head on a packed ring, which has no such heads.
    #[error("a packed ring has no chain heads to look up")]
    NoHeads,
    /// The in-flight region no longer describes a request.
    #[error("the in-flight region is damaged at entry {entry}")]
    Inflight {
        /// Index of the entry.
        entry: u16,
    },
}

/// A copy of one descriptor, which was read once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawDesc {
    pub(crate) addr: u64,
    /// `len`, then two 16-bit fields: split `flags`, `next`; packed `id`, `flags`.
    pub(crate) word: u64,
}

impl RawDesc {
    #[inline(always)]
    pub(crate) fn len(self) -> u32 {
        low_u32(self.word)
    }

    /// Returns bits 32 to 47: split flags, packed buffer id.
    #[inline(always)]
    pub(crate) fn mid(self) -> u16 {
        low_u16(self.word >> 32)
    }

    /// Returns bits 48 to 63: split next, packed flags.
    #[inline(always)]
    pub(crate) fn top(self) -> u16 {
        low_u16(self.word >> 48)
    }

    /// Reads a descriptor, each byte once.
    ///
    /// # Safety
    /// `ptr` is readable for 16 bytes and aligned to 8.
    #[inline(always)]
    pub(crate) unsafe fn read(ptr: *const u8) -> Self {
        // SAFETY: the caller promises that 16 bytes are readable, and that `ptr` is aligned to 8.
        let addr = unsafe { raw::get_u64(ptr) };
        // SAFETY: the caller promises that all 16 bytes are readable and aligned.
        let word = unsafe { raw::get_u64(ptr.wrapping_add(8)) };
        Self { addr, word }
    }
}
