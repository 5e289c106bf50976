use super::*;
use crate::testing::{Rng, iterations};

#[test]
fn marks_agree_with_a_bit_at_a_time() {
    for seed in 0..iterations(2000) {
        let mut rng = Rng::new(seed);
        let size = 1 + rng.below(9) as usize;
        let mut bits = vec![0u8; size + 2];
        // SAFETY: the vector outlives the log; the byte after the log is a guard.
        let log = unsafe { DirtyLog::new(bits.as_mut_ptr(), size, Arc::new(())) };
        let mut wanted = vec![0u8; size + 2];
        for _ in 0..rng.below(4) {
            let addr = if rng.one_in(10) { rng.next() } else { rng.below(size as u64 * 40_000) };
            let len = match rng.below(4) {
                0 => rng.below(3),
                1 => rng.next() >> rng.below(64),
                _ => rng.below(100_000),
            };
            log.mark(addr, len);
            for page in 0..size as u64 * 8 {
                let (start, end) = (u128::from(page) * 4096, u128::from(page) * 4096 + 4096);
                let (from, to) = (u128::from(addr), u128::from(addr) + u128::from(len));
                if len > 0 && from < end && to > start {
                    wanted[page as usize / 8] |= 1 << (page % 8);
                }
            }
        }
        drop(log);
        assert_eq!(bits, wanted);
    }
}

#[test]
fn covers_up_to_its_last_bit() {
    let mut bits = [0u8; 2];
    // SAFETY: the array outlives the log.
    let log = unsafe { DirtyLog::new(bits.as_mut_ptr(), bits.len(), Arc::new(())) };
    let last = 2 * 8 * LOG_PAGE_SIZE;
    for (end, covered) in [(0, true), (last - 1, true), (last, true), (last + 1, false), (u64::MAX, false)] {
        assert_eq!(log.covers(end), covered, "{end:#x}");
    }
}
