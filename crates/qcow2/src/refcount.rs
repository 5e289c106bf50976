//! Reference counts as they lie in refcount blocks: 1 to 64 bits each.

/// Count number `at` of a block whose counts have `1 << order` bits.
pub fn get(block: &[u8], at: usize, order: u32) -> u64 {
    match order {
        0..=2 => {
            let bit = at << order;
            u64::from(block[bit / 8] >> (bit % 8)) & ((1 << (1 << order)) - 1)
        }
        _ => {
            let bytes = 1usize << (order - 3);
            block[at * bytes..(at + 1) * bytes].iter().fold(0, |n, b| n << 8 | u64::from(*b))
        }
    }
}

/// Sets it; `count` fits into the bits.
pub fn set(block: &mut [u8], at: usize, order: u32, count: u64) {
    match order {
        0..=2 => {
            let bit = at << order;
            let mask = ((1u32 << (1 << order)) - 1) as u8;
            let byte = &mut block[bit / 8];
            *byte = *byte & !(mask << (bit % 8)) | (count as u8 & mask) << (bit % 8);
        }
        _ => {
            let bytes = 1usize << (order - 3);
            block[at * bytes..(at + 1) * bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
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
