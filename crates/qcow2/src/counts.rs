//! Reference counts of any width in a refcount block's bytes.

/// The count at `index`, of 2^order bits.
pub(crate) fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..=2 => {
            let (bits, per) = (1usize << order, 8usize >> order);
            // Entries of less than a byte begin at its least significant bit.
            u64::from(block[index / per]) >> (index % per * bits) & ((1 << bits) - 1)
        }
        _ => {
            let bytes = 1usize << (order - 3);
            block[index * bytes..][..bytes].iter().fold(0, |n, b| n << 8 | u64::from(*b))
        }
    }
}

/// Changes the count at `index`, of 2^order bits, which `count` fits into.
pub(crate) fn set(block: &mut [u8], order: u32, index: usize, count: u64) {
    match order {
        0..=2 => {
            let (bits, per) = (1usize << order, 8usize >> order);
            let (mask, shift) = (((1u16 << bits) - 1) as u8, index % per * bits);
            let byte = &mut block[index / per];
            *byte = *byte & !(mask << shift) | ((count as u8) << shift);
        }
        _ => {
            let bytes = 1usize << (order - 3);
            block[index * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_there_and_back() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1u32 << order));
            let mut block = vec![0; 512];
            let count = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & max;
            let entries = (512 * 8) >> order;
            (0..entries).for_each(|i| set(&mut block, order, i, count(i)));
            (0..entries).for_each(|i| assert_eq!(get(&block, order, i), count(i), "order {order}, {i}"));
            set(&mut block, order, 3, 0);
            assert_eq!(
                (get(&block, order, 2), get(&block, order, 3), get(&block, order, 4)),
                (count(2), 0, count(4))
            );
        }
        // As the format says: 16 bits are big-endian; single bits begin at the lowest.
        let mut block = vec![0; 4];
        set(&mut block, 4, 1, 0x1234);
        assert_eq!(block, [0, 0, 0x12, 0x34]);
        set(&mut block, 0, 1, 1);
        assert_eq!(block[0], 2);
    }
}
