//! Integers out of an image's bytes, and conversions that lose nothing.
//!
//! Used by all modules that read what an image says. An image is hostile, and a panic would end every guest of the process:
//! the crate denies the lints `indexing_slicing` and `cast_possible_truncation`, and what is narrowed on purpose is
//! narrowed here.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("offsets in an image have 64 bits, and this crate keeps them in a usize");

/// The same number: a usize has 64 bits here.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a usize has 64 bits: checked above")]
pub(crate) const fn to_usize(number: u64) -> usize {
    number as usize
}

/// The low 8 bits.
#[inline(always)]
pub(crate) const fn low_u8(word: u64) -> u8 {
    let [a, ..] = word.to_le_bytes();
    a
}

/// The low 16 bits.
#[inline(always)]
pub(crate) const fn low_u16(word: u64) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// The low 32 bits.
#[inline(always)]
pub(crate) const fn low_u32(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// The `N` bytes from `at` on, if there are so many.
#[inline(always)]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The big-endian number at `at`; 0 past the end, which reads as "absent" in all structures of the format.
#[inline(always)]
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    array(bytes, at).map_or(0, u16::from_be_bytes)
}

/// As [`be16`], for 32 bits.
#[inline(always)]
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    array(bytes, at).map_or(0, u32::from_be_bytes)
}

/// As [`be16`], for 64 bits.
#[inline(always)]
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    array(bytes, at).map_or(0, u64::from_be_bytes)
}

/// Copies `from` to `to` at `at`. Does nothing, and panics in a debug build, if it does not fit.
#[inline]
pub(crate) fn put(to: &mut [u8], at: usize, from: &[u8]) {
    let place = at.checked_add(from.len()).and_then(|end| to.get_mut(at..end));
    debug_assert!(place.is_some());
    if let Some(place) = place {
        place.copy_from_slice(from);
    }
}
