//! Conversions to narrower integers that lose nothing by mistake.

/// Returns the low 16 bits.
#[inline(always)]
pub(crate) const fn low_u16(word: u64) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Returns a count or length in memory, or the largest number if it does not fit. Tables and
/// headers are far shorter.
#[inline(always)]
pub(crate) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_numbers_are_the_low_bits_or_the_largest() {
        assert_eq!((low_u16(0x1_2345), low_u16(u64::MAX)), (0x2345, u16::MAX));
        assert_eq!((len_u32(7), len_u32(1 << 32)), (7, u32::MAX));
    }
}
