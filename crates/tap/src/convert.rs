//! Conversions to narrower integers that lose nothing by mistake.

/// Returns the low 16 bits.
pub(super) const fn low_u16(word: usize) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Returns the low and the high 32 bits.
pub(super) const fn halves(word: u64) -> [i32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([e, f, g, h])]
}

/// Returns a count or length, or the largest number if it does not fit. A tap has at most 256
/// queues, and its name has at most 15 bytes.
pub(super) fn len_u16(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}

/// Returns a length in memory, or the largest number if it does not fit. Messages and programs are
/// far shorter.
pub(super) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_numbers_are_the_low_bits_or_the_largest() {
        assert_eq!((low_u16(0x1_2345), low_u16(usize::MAX)), (0x2345, u16::MAX));
        assert_eq!(halves(0xFFFF_FFFF_0000_0007), [7, -1]);
        assert_eq!((len_u16(7), len_u16(1 << 16)), (7, u16::MAX));
        assert_eq!((len_u32(7), len_u32(1 << 32)), (7, u32::MAX));
    }
}
