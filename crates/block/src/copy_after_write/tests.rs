use std::collections::HashSet;

use super::*;
use crate::tests::Random;

const BLOCKS: u64 = 96;

fn waker(token: u64) -> Waker {
    Waker { who: 0, token }
}

/// Random orders of writes, copies that begin, and copies that end, beside a model: for each write,
/// the blocks that no later copy has brought.
#[test]
fn a_write_waits_for_a_copy_of_each_block_that_began_later() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let work = CopyAfterWrite::new(BLOCKS << 12, 12).unwrap();
        let earlier = Bits::new(BLOCKS << 12, 13).unwrap();
        for _ in 0..random.below(6) {
            let at = random.below(BLOCKS / 2);
            earlier.set(at..(at + 1 + random.below(8)).min(BLOCKS / 2));
        }
        work.add(&earlier);
        // Block by block: in the target, or not.
        let mut missing: HashSet<u64> =
            (0..BLOCKS).filter(|b| earlier.any(earlier.blocks(b << 12..(b + 1) << 12))).collect();
        let mut flying: Vec<(Range<u64>, HashSet<u64>)> = Vec::new();
        let mut waits: Vec<(u64, HashSet<u64>)> = Vec::new();
        let mut woken = Vec::new();
        for token in 0..400 {
            match random.below(5) {
                0 | 1 if token < 300 => {
                    let at = random.below(BLOCKS << 3) * 512;
                    let bytes = at..(at + 512 * (1 + random.below(64))).min(BLOCKS << 12);
                    let blocks: HashSet<u64> = (bytes.start >> 12..bytes.end.div_ceil(1 << 12)).collect();
                    if random.below(12) == 0 {
                        work.failed(bytes);
                    } else {
                        assert!(work.wrote(bytes, waker(token)));
                        waits.push((token, blocks.clone()));
                    }
                    missing.extend(blocks);
                }
                2 | 3 => {
                    let Some(run) = work.next(1 << (12 + random.below(5)), random.below(3) > 0) else {
                        continue;
                    };
                    let busy = flying.iter().any(|(other, _)| other.start < run.end && run.start < other.end);
                    assert!(!busy, "seed {seed}: a block is copied twice at a time");
                    assert!(run.clone().all(|b| missing.remove(&b)), "seed {seed}: nobody wanted {run:?}");
                    // The writes that this copy may end.
                    flying.push((run, waits.iter().map(|(token, _)| *token).collect()));
                }
                _ if !flying.is_empty() => {
                    let (run, serves) = flying.swap_remove(random.below(flying.len() as u64) as usize);
                    work.copied(&run, &mut |w| woken.push(w.token));
                    for (token, blocks) in waits.iter_mut().filter(|(token, _)| serves.contains(token)) {
                        assert!(!blocks.is_empty(), "{token} was to be woken");
                        blocks.retain(|b| !run.contains(b));
                    }
                    let mut over: Vec<u64> = waits
                        .extract_if(.., |(_, blocks)| blocks.is_empty())
                        .map(|(token, _)| token)
                        .collect();
                    over.sort_unstable();
                    woken.sort_unstable();
                    assert_eq!(std::mem::take(&mut woken), over, "seed {seed}");
                }
                _ => {}
            }
            assert_eq!(work.waiting(), waits.len());
        }
        for (run, _) in flying.drain(..) {
            work.copied(&run, &mut |w| woken.push(w.token));
        }
        while let Some(run) = work.next(1 << 20, true) {
            assert!(run.clone().all(|b| missing.remove(&b)));
            assert!(!work.is_idle());
            work.copied(&run, &mut |w| woken.push(w.token));
        }
        assert!(missing.is_empty() && work.is_idle() && work.waiting() == 0, "seed {seed}");
        assert!(work.is_idle());
    }
}

#[test]
fn an_end_wakes_all_and_keeps_what_is_left() {
    let work = CopyAfterWrite::new(BLOCKS << 12, 12).unwrap();
    assert!(work.wrote(0..4096, waker(1)) && work.wrote(1 << 16..1 << 17, waker(2)));
    let run = work.next(4096, true).unwrap();
    assert_eq!(run, 0..1);
    let mut woken = Vec::new();
    work.end(&mut |w| woken.push(w.token));
    assert_eq!(woken, [1, 2]);
    assert!(!work.wrote(0..4096, waker(3)) && work.next(4096, true).is_none() && work.has_ended());
    let left = Bits::new(BLOCKS << 12, 12).unwrap();
    work.add_left_to(&left);
    assert_eq!((left.count(), left.any(0..1)), (17, true));
}

/// Writes come faster than they are copied, and the backlog becomes empty all the same. A long
/// write does not hold up a short one.
#[test]
fn writes_do_not_hold_up_the_backlog() {
    let work = CopyAfterWrite::new(BLOCKS << 12, 12).unwrap();
    let earlier = Bits::new(BLOCKS << 12, 12).unwrap();
    earlier.set(BLOCKS / 2..BLOCKS);
    work.add(&earlier);
    let mut flying = VecDeque::new();
    for n in 0..4 * BLOCKS {
        for write in 0..2 {
            let at = ((n * 2 + write) % (BLOCKS / 2)) << 12;
            assert!(work.wrote(at..at + 4096, waker(n)));
        }
        flying.push_back(work.next(4096, true).unwrap());
        if flying.len() > 6 {
            work.copied(&flying.pop_front().unwrap(), &mut |_| {});
        }
    }
    assert_eq!(work.backlog_bytes(), 0);
    // 64 blocks, and then one.
    let work = CopyAfterWrite::new(BLOCKS << 12, 12).unwrap();
    assert!(work.wrote(0..64 << 12, waker(1)) && work.wrote(80 << 12..81 << 12, waker(2)));
    let first: Vec<_> = (0..2).map(|_| work.next(16384, true).unwrap()).collect();
    assert_eq!(first, [0..4, 80..81]);
}

/// A search of the backlog is cut into parts, and finds all.
#[test]
fn a_large_backlog_is_searched_in_parts() {
    let blocks = 3 * SEARCH_BLOCKS + 5;
    let work = CopyAfterWrite::new(blocks << 9, 9).unwrap();
    let earlier = Bits::new(blocks << 9, 9).unwrap();
    let wanted = [7, SEARCH_BLOCKS * 2, blocks - 1];
    wanted.iter().for_each(|&at| earlier.set(at..at + 1));
    work.add(&earlier);
    let mut found = Vec::new();
    while work.has_more() {
        let Some(run) = work.next(512, true) else { continue };
        work.copied(&run, &mut |_| {});
        found.push(run.start);
    }
    assert_eq!(found, wanted);
    assert!(work.is_idle());
}
