//! Integers from an image's bytes, and conversions without loss.
//!
//! All modules that parse an image use it. An image is untrusted, and a panic would end every guest
//! of the process. So the crate denies the lints `indexing_slicing` and `cast_possible_truncation`,
//! and intended truncations are made here.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("offsets in an image have 64 bits, and this crate keeps them in a usize");

/// Returns the same number: a usize has 64 bits here.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a usize has 64 bits: checked above")]
pub(crate) const fn to_usize(number: u64) -> usize {
    number as usize
}

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

/// Returns the `N` bytes from `at` on, if there are that many.
#[inline(always)]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Returns the big-endian number at `at`. Past the end it is 0, which means "absent" in all
/// structures of the format.
#[inline(always)]
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    array(bytes, at).map_or(0, u16::from_be_bytes)
}

/// Returns a number of 32 bits, like [`be16`].
#[inline(always)]
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    array(bytes, at).map_or(0, u32::from_be_bytes)
}

/// Returns a number of 64 bits, like [`be16`].
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
