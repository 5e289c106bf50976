//! Reference counts in refcount blocks, with 1 to 64 bits each.

use crate::bytes::{low_u8, put};

/// Returns count number `at` of a block whose counts have `1 << order` bits. A count that the block
/// does not have reads as the largest one, so its cluster counts as used.
pub fn get(block: &[u8], at: usize, order: u32) -> u64 {
    let most = u64::MAX >> (64 - (1u32 << order));
    match order {
        0..=2 => {
            let bit = at << order;
            block.get(bit / 8).map_or(most, |byte| u64::from(byte >> (bit % 8)) & most)
        }
        _ => {
            let bytes = 1usize << (order - 3);
            let count = block.get(at * bytes..(at + 1) * bytes);
            count.map_or(most, |count| count.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
        }
    }
}

/// Sets count number `at`, which the block has. `count` fits into the bits.
pub fn set(block: &mut [u8], at: usize, order: u32, count: u64) {
    match order {
        0..=2 => {
            let bit = at << order;
            let mask = 0xffu8 >> (8 - (1u32 << order));
            debug_assert!(bit / 8 < block.len());
            if let Some(byte) = block.get_mut(bit / 8) {
                *byte = *byte & !(mask << (bit % 8)) | (low_u8(count) & mask) << (bit % 8);
            }
        }
        _ => {
            let bytes = 1usize << (order - 3);
            put(block, at * bytes, count.to_be_bytes().get(8 - bytes..).unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_widths() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1u32 << order));
            let mut block = vec![0; 512];
            for at in [0, 1, 2, 7, 8, 63] {
                set(&mut block, at, order, most);
                assert_eq!(get(&block, at, order), most);
                set(&mut block, at, order, 1);
            }
            let ones: Vec<usize> = (0..64).filter(|at| get(&block, *at, order) == 1).collect();
            assert_eq!(ones, [0, 1, 2, 7, 8, 63], "{order}");
        }
    }

    #[test]
    fn bits_below_a_byte_begin_with_the_lowest() {
        let mut block = [0; 8];
        set(&mut block, 1, 0, 1);
        set(&mut block, 3, 2, 0xa);
        assert_eq!((block[0], block[1]), (0b10, 0xa0));
        set(&mut block, 1, 4, 0x1234);
        assert_eq!(block[2..4], [0x12, 0x34]);
    }
}
