//! Conversions to narrow integers, and tables with a narrow index, that neither panic nor lose bits
//! by mistake.
//!
//! Called by the rings, the in-flight region, the drivers and the formats. A guest chooses many of
//! these values, and a panic would end every guest of the process. So the lints `indexing_slicing`
//! and `cast_possible_truncation` are denied in this crate, and intended truncations are made here.

use alloc::boxed::Box;
use alloc::vec;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("guest addresses and lengths have 64 bits, and this crate keeps them in a usize");

/// Returns the low 8 bits.
#[inline(always)]
pub(crate) const fn low_u8(word: u64) -> u8 {
    let [a, ..] = word.to_le_bytes();
    a
}

/// Returns the low 16 bits.
#[inline(always)]
pub(crate) const fn low_u16(word: u64) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Returns the low 32 bits.
#[inline(always)]
pub(crate) const fn low_u32(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Returns the same number: a usize has 64 bits here.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a usize has 64 bits: checked above")]
pub(crate) const fn to_usize(word: u64) -> usize {
    word as usize
}

/// Returns sixteen bytes as two little-endian words.
#[inline(always)]
pub(crate) const fn words(bytes: [u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
    [u64::from_le_bytes([a, b, c, d, e, f, g, h]), u64::from_le_bytes([i, j, k, l, m, n, o, p])]
}

/// Returns the size of a type in bytes, which has to be less than 2^14. An ioctl number has room
/// for no more.
pub(crate) const fn size_u32<T>() -> u32 {
    assert!(size_of::<T>() < 1 << 14);
    low_u32(size_of::<T>() as u64)
}

/// Numbers by a 16-bit index.
///
/// The owner's invariants keep each index below the length. If they are broken, a debug build
/// panics. In a release build the index then reads as [`Table::OUTSIDE`], and a write to it is
/// dropped.
#[derive(Debug)]
pub(crate) struct Table(Box<[u16]>);

impl Table {
    /// The value of an index outside of the table. No ring or region is as long.
    pub(crate) const OUTSIDE: u16 = u16::MAX;

    /// Makes a table of `len` zeroes, which take no memory until they are written.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self(vec![0; len].into_boxed_slice())
    }

    /// Makes a list of `len` elements: each has the index of the next one, and the last one has
    /// `len`.
    pub(crate) fn list(len: u16) -> Self {
        Self((1..=len).collect())
    }

    /// Returns the number at an index.
    #[inline(always)]
    pub(crate) fn get(&self, index: u16) -> u16 {
        debug_assert!((index as usize) < self.0.len());
        self.0.get(index as usize).copied().unwrap_or(Self::OUTSIDE)
    }

    /// Returns the number at an index that another party chose, if the index is inside the table.
    #[inline(always)]
    pub(crate) fn find(&self, index: u16) -> Option<u16> {
        self.0.get(index as usize).copied()
    }

    /// Changes the number at an index.
    #[inline(always)]
    pub(crate) fn set(&mut self, index: u16, value: u16) {
        debug_assert!((index as usize) < self.0.len());
        if let Some(at) = self.0.get_mut(index as usize) {
            *at = value;
        }
    }

    /// Returns the number at an index and sets it to 0. Returns 0 for an index outside.
    #[inline(always)]
    pub(crate) fn take(&mut self, index: u16) -> u16 {
        self.0.get_mut(index as usize).map_or(0, core::mem::take)
    }
}
