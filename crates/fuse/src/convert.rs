//! Conversions of numbers that neither truncate nor panic.

/// `n` as a 32-bit number, or `max` where `n` is larger.
#[inline]
pub(crate) fn at_most(n: u64, max: u32) -> u32 {
    u32::try_from(n).map_or(max, |n| n.min(max))
}

/// A length in memory as a 32-bit number. Lengths of messages are at most some MiB, so the limit is
/// never reached.
#[inline]
pub(crate) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// A length as the address space counts it. Nothing is cut off where addresses have 64 bits.
#[inline]
pub(crate) fn len_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_stay_within_the_limit() {
        assert_eq!((at_most(5, 9), at_most(10, 9), at_most(1 << 32, 9)), (5, 9, 9));
        assert_eq!(len_u32(usize::MAX), u32::MAX);
        assert_eq!(len_usize(7), 7);
    }
}
