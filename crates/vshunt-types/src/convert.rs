//! Conversions of numbers that neither lose bits by mistake nor panic.
//!
//! Crates that read hostile bytes deny the lints `indexing_slicing` and `cast_possible_truncation`,
//! because a panic ends every guest of the process. They narrow numbers here. `virtio` and `qcow2`
//! depend on no other crate and have their own.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("lengths and offsets in messages have 64 bits, and these crates keep them in a usize");

/// Returns the same number: a usize has 64 bits here.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a usize has 64 bits: checked above")]
pub const fn to_usize(number: u64) -> usize {
    number as usize
}

/// Returns the low 8 bits.
#[inline(always)]
pub const fn low_u8(word: u64) -> u8 {
    let [a, ..] = word.to_le_bytes();
    a
}

/// Returns the low 16 bits.
#[inline(always)]
pub const fn low_u16(word: u64) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Returns the low 32 bits.
#[inline(always)]
pub const fn low_u32(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Returns the low and the high 32 bits.
pub const fn halves(word: u64) -> [i32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([e, f, g, h])]
}

/// Returns a count or a length in memory, or the largest number if it does not fit. Tables, names
/// and numbers of queues are far smaller.
#[inline(always)]
pub fn len_u16(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}

/// Returns a count or a length in memory, or the largest number if it does not fit. Messages and
/// queues are far shorter.
#[inline(always)]
pub fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Returns `number`, or `max` if it is larger.
#[inline]
pub fn at_most(number: u64, max: u32) -> u32 {
    u32::try_from(number).map_or(max, |number| number.min(max))
}

/// Copies as many bytes as both have, from the start of `from` to the start of `to`.
pub fn copy_start(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_numbers_are_the_low_bits() {
        assert_eq!((low_u8(0x1234), low_u16(0x1_2345), low_u32(1 << 32 | 7)), (0x34, 0x2345, 7));
        assert_eq!((to_usize(u64::MAX), halves(0xFFFF_FFFF_0000_0007)), (usize::MAX, [7, -1]));
    }

    #[test]
    fn large_numbers_stay_within_the_limit() {
        assert_eq!((len_u16(7), len_u16(1 << 16)), (7, u16::MAX));
        assert_eq!((len_u32(7), len_u32(1 << 32)), (7, u32::MAX));
        assert_eq!((at_most(5, 9), at_most(10, 9), at_most(1 << 32, 9)), (5, 9, 9));
    }

    #[test]
    fn a_copy_ends_with_the_shorter_one() {
        let mut to = [0; 3];
        copy_start(&mut to, &[1, 2]);
        assert_eq!(to, [1, 2, 0]);
        copy_start(&mut to, &[4, 5, 6, 7]);
        assert_eq!(to, [4, 5, 6]);
    }
}
