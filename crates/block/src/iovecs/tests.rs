use super::*;
use crate::io::Stage;
use crate::{Io, Op};

/// Pushes parts of `memory`.
fn segments(memory: &mut [u8], parts: &[(usize, usize)]) -> IoVecs {
    let mut iov = IoVecs::default();
    for &(at, len) in parts {
        assert!(at + len <= memory.len());
        // SAFETY: within `memory`, which outlives the segments in each test.
        unsafe { iov.push(memory.as_mut_ptr().wrapping_add(at), len) };
    }
    iov
}

fn lens(iov: &IoVecs) -> Vec<usize> {
    iov.left().iter().map(|s| s.iov_len).collect()
}

#[test]
fn segments_keep_their_order_inline_and_spilled() {
    let mut memory = [0; 64];
    for n in 0..6 {
        let parts: Vec<_> = (0..n).map(|i| (i * 10, i + 1)).collect();
        let iov = segments(&mut memory, &parts);
        assert_eq!(lens(&iov), (1..=n).collect::<Vec<_>>());
        assert_eq!(iov.left_bytes(), (n * (n + 1) / 2) as u64);
    }
}

#[test]
fn room_for_long_requests_is_kept_by_the_worker_and_not_by_slots() {
    let mut memory = [0; 1];
    let mut iovs: Vec<_> = (0..256).map(|_| IoVecs::default()).collect();
    for most in [3, 16, 17, 126, 128, 129, 1024] {
        let at = memory.as_mut_ptr();
        for iov in &mut iovs {
            for _ in 0..most {
                // SAFETY: never followed here.
                unsafe { iov.push(at, 1) };
            }
            assert_eq!((iov.left().len(), iov.left_bytes()), (most, most as u64));
            let room = if most <= 16 { 16 } else { most.next_power_of_two().max(128) };
            assert_eq!(iov.heap.capacity(), room);
        }
        iovs.iter_mut().for_each(IoVecs::clear);
        assert!(iovs.iter().all(|iov| iov.heap.capacity() == 0));
        assert!(iovec_cache::kept_bytes() <= iovec_cache::KEPT_BYTES_MAX);
    }
    // Requests of Linux need no allocation: the memory of earlier requests is used again, in any
    // slot.
    let mut rooms = std::collections::HashSet::new();
    for iov in &mut iovs {
        for _ in 0..126 {
            // SAFETY: never followed here.
            unsafe { iov.push(memory.as_mut_ptr(), 1) };
        }
        rooms.insert(iov.heap.as_ptr());
        iov.clear();
    }
    assert_eq!(rooms.len(), 1);
}

#[test]
fn empty_segments_are_left_out() {
    let mut memory = [0; 8];
    let iov = segments(&mut memory, &[(0, 0), (1, 2), (3, 0), (3, 1), (4, 0), (4, 4)]);
    assert_eq!(lens(&iov), [2, 1, 4]);
}

#[test]
fn advance_cuts_at_every_byte() {
    let mut memory = [0; 32];
    let parts = [(0, 3), (8, 1), (16, 5), (24, 2)];
    for count in 1..=parts.len() {
        let total: u64 = parts[..count].iter().map(|p| p.1 as u64).sum();
        for first in 0..=total {
            for second in 0..=total - first {
                let mut iov = segments(&mut memory, &parts[..count]);
                iov.advance(first);
                iov.advance(second);
                assert_eq!(iov.left_bytes(), total - first - second);
                assert_eq!(lens(&iov).iter().sum::<usize>() as u64, iov.left_bytes());
                assert!(iov.left().iter().all(|s| s.iov_len > 0));
            }
        }
    }
}

#[test]
fn copies_follow_the_segments_from_where_they_stand() {
    let mut memory: Vec<u8> = (0..32).collect();
    let parts = [(0, 3), (8, 1), (16, 5)];
    let mut iov = segments(&mut memory, &parts);
    let mut out = [0xff; 9];
    iov.advance(1);
    // SAFETY: `out` has 8 bytes, and `memory` outlives the call.
    unsafe { iov.gather(out.as_mut_ptr(), 8) };
    assert_eq!(out, [1, 2, 8, 16, 17, 18, 19, 20, 0xff]);
    let from = [100, 101, 102, 103, 104, 105];
    // SAFETY: `from` has 6 bytes.
    unsafe { iov.scatter(from.as_ptr(), 6) };
    iov.advance(6);
    // SAFETY: `memory` outlives the call.
    unsafe { iov.zero_rest() };
    assert_eq!(iov.left_bytes(), 0);
    drop(iov);
    assert_eq!(&memory[..4], [0, 100, 101, 3]);
    assert_eq!(&memory[7..10], [7, 102, 9]);
    assert_eq!(&memory[15..22], [15, 103, 104, 105, 0, 0, 21]);
}

#[test]
fn alignment_counts_base_and_length_of_each_segment() {
    let base = std::ptr::without_provenance_mut::<u8>(4096);
    let check = |parts: &[(usize, usize)]| {
        let mut iov = IoVecs::default();
        for &(at, len) in parts {
            // SAFETY: these are never followed.
            unsafe { iov.push(base.wrapping_add(at), len) };
        }
        iov.aligned(3, 511)
    };
    assert!(check(&[(0, 512), (4, 1024)]));
    assert!(!check(&[(0, 512), (2, 1024)]));
    assert!(!check(&[(0, 100), (4, 412)]));
}

#[test]
fn a_slot_used_again_has_no_old_segments() {
    let mut memory = [0; 64];
    let mut io = Io::default();
    for n in [5, 1, 2, 3, 0, 4] {
        io.reset(Op::Read, 512, false);
        for i in 0..n {
            // SAFETY: within `memory`.
            unsafe { io.push(memory.as_mut_ptr().wrapping_add(i), 1) };
        }
        assert_eq!((io.request.len, io.request.iov.left().len()), (n as u64, n));
    }
}

#[test]
#[cfg(debug_assertions)]
fn a_request_dropped_under_way_shows() {
    let mut io = Io::default();
    io.state.stage = Stage::Transfer;
    assert!(std::panic::catch_unwind(move || drop(io)).is_err());
}

#[test]
fn any_range_of_what_is_left() {
    let mut memory = [1u8; 64];
    // 5, 7 and 4 bytes, with gaps.
    let mut iov = segments(&mut memory, &[(0, 5), (10, 7), (30, 4)]);
    for begin in 0..16u64 {
        for end in begin..=16 {
            let mut bytes = 0;
            iov.for_range(begin..end, |_, len| bytes += len as u64);
            assert_eq!(bytes, end - begin);
        }
    }
    let from: Vec<u8> = (100..109).collect();
    // SAFETY: the segments are in `memory`.
    unsafe { iov.scatter_range(3..12, &from) };
    // SAFETY: the segments are in `memory`.
    unsafe { iov.zero_range(12..13) };
    iov.clear();
    assert_eq!(memory[..5], [1, 1, 1, 100, 101]);
    assert_eq!(memory[10..18], [102, 103, 104, 105, 106, 107, 108, 1]);
    assert_eq!(memory[30..34], [0, 1, 1, 1]);
}

#[test]
fn hidden_segments_come_back_in_their_order() {
    let mut memory: Vec<u8> = (0..200).collect();
    for parts in
        [&[(0, 50)][..], &[(3, 7), (20, 1), (40, 60)], &[(0, 9), (10, 9), (20, 9), (30, 9), (100, 90)]]
    {
        let whole: Vec<u8> = parts.iter().flat_map(|&(at, len)| at as u8..(at + len) as u8).collect();
        for piece in 1..whole.len() as u64 {
            // A backend consumes the segments, or it does not.
            for uses_up in [true, false] {
                let mut iov = segments(&mut memory, parts);
                let mut seen = Vec::new();
                loop {
                    let left = iov.left_bytes();
                    let hidden = (left > piece).then(|| iov.hide_after(piece));
                    let shown = left.min(piece);
                    assert_eq!(iov.left_bytes(), shown);
                    assert_eq!(lens(&iov).iter().sum::<usize>() as u64, shown);
                    let mut bytes = vec![0; shown as usize];
                    // SAFETY: `bytes` has that many bytes, and the segments are in `memory`.
                    unsafe { iov.gather(bytes.as_mut_ptr(), shown) };
                    seen.extend(bytes);
                    if uses_up {
                        iov.advance(shown);
                    }
                    match hidden {
                        Some(hidden) => iov.show(hidden),
                        None => break,
                    }
                }
                assert_eq!(seen, whole, "in pieces of {piece}");
                iov.clear();
                assert!(iov.left().is_empty() && !iov.on_heap());
            }
        }
    }
}
