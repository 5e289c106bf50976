//! Conversions to narrower integers that lose nothing by mistake, and checked copies.
//!
//! Front ends and guests choose many of the numbers in this crate, and a panic would end every
//! guest of the process. So the crate denies the lints `indexing_slicing` and
//! `cast_possible_truncation`, and narrows numbers here.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("lengths and offsets in messages have 64 bits, and this crate keeps them in a usize");

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

/// Returns a length in memory, or the largest number if it does not fit. Messages and queues are
/// far shorter.
#[inline(always)]
pub(crate) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Returns a count of queues, or the largest number if it does not fit. Exports have at most 1024
/// queues.
#[inline(always)]
pub(crate) fn count_u16(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// Copies as many bytes as both have, from the start of `from` to the start of `to`.
pub(crate) fn copy_start(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_numbers_are_the_low_bits() {
        assert_eq!((low_u8(0x1234), low_u16(0x1_2345), low_u32(1 << 32 | 7)), (0x34, 0x2345, 7));
        assert_eq!(
            (to_usize(u64::MAX), len_u32(1 << 32), count_u16(1 << 16)),
            (usize::MAX, u32::MAX, u16::MAX)
        );
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
