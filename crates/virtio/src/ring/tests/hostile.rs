//! A driver that writes random values. Nothing panics, hangs or leaves the regions.

use super::*;
use crate::inflight::{Inflight, inflight_queue_size};

/// Returns a plausible descriptor word: mostly small numbers and valid flags, some garbage.
fn word(rng: &mut Rng, packed: bool) -> u64 {
    if rng.one_in(6) {
        return rng.next();
    }
    let len = if rng.one_in(3) { rng.below(64) * 16 } else { rng.below(0x2000) };
    let flags = rng.below(8) | if packed { rng.below(4) << 7 & 0x80 | rng.below(2) << 15 } else { 0 };
    let small = rng.below(10);
    if packed { len | small << 32 | flags << 48 } else { len | flags << 32 | small << 48 }
}

fn addr(rng: &mut Rng) -> u64 {
    match rng.below(8) {
        0 => rng.next(),
        1 => RING + rng.below(0x2_0000),
        2 => TABLES + rng.below(64) * 16,
        3 => BUFFERS + 0x1_0000 - rng.below(64),
        4 => BUFFERS + 0x2_0000 - rng.below(64),
        _ => BUFFERS + rng.below(0x2_0000),
    }
}

#[test]
fn random_bytes_do_no_harm() {
    for seed in 0..iterations(1500) {
        let mut rng = Rng::new(seed);
        let arena = arena();
        let features =
            RingFeatures { indirect: !rng.one_in(4), event_idx: rng.one_in(2), packed: rng.one_in(2) };
        let size = if features.packed { 1 + rng.below(9) as u16 } else { 1 << rng.below(4) };
        let (addrs, guest) = arena.ring(RING, size, features);
        let scribble = |rng: &mut Rng, count: u64| {
            for _ in 0..count {
                let desc = guest[0] + 16 * rng.below(u64::from(size));
                arena.put_u64(desc, addr(rng));
                arena.put_u64(desc + 8, word(rng, features.packed));
                let entry = TABLES + 16 * rng.below(64);
                arena.put_u64(entry, addr(rng));
                arena.put_u64(entry + 8, word(rng, features.packed));
                if features.packed {
                    arena.put_u16(guest[1] + 2 * rng.below(2), rng.next() as u16);
                } else {
                    arena.put_u16(guest[1], rng.next() as u16);
                    arena.put_u16(guest[1] + 4 + 2 * rng.below(u64::from(size)), rng.below(10) as u16);
                }
            }
        };
        scribble(&mut rng, 40);
        let base = if features.packed { 0x8000_8000 } else { rng.below(65536) as u32 };
        // SAFETY: the arena outlives the ring.
        let mut ring = unsafe { DeviceRing::new(size, features, addrs, base) }.unwrap();
        let mut region = vec![0u64; inflight_queue_size(size, features.packed) / 8];
        if rng.one_in(2) {
            let (ptr, len) = (region.as_mut_ptr().cast(), region.len() * 8);
            // SAFETY: the vector outlives the ring.
            let inflight = unsafe { Inflight::new(ptr, len, size, features.packed, Arc::new(())) }.unwrap();
            assert_eq!(ring.set_inflight(inflight).unwrap(), []);
        }
        let mut chain = Chain::new();
        let mut heads = Vec::new();
        for _ in 0..30 {
            if !features.packed {
                let ahead =
                    if rng.one_in(20) { rng.next() as u16 } else { rng.below(u64::from(size) + 1) as u16 };
                arena.put_u16(guest[1] + 2, (ring.base() as u16).wrapping_add(ahead));
            }
            let _ = ring.has_avail();
            match ring.pop(&arena.mem, &mut chain) {
                Ok(true) => {
                    for (i, seg) in chain.segs.iter().enumerate() {
                        assert!(arena.inside(seg.ptr, seg.len as usize), "seed {seed}: {seg:?}");
                        if i >= chain.readable {
                            // SAFETY: inside a region, as was just checked.
                            unsafe { seg.ptr.write_bytes(rng.next() as u8, seg.len as usize) };
                        }
                    }
                    assert!(chain.readable <= chain.segs.len());
                    heads.push(chain.head);
                    let mut data = Vec::new();
                    let _ = crate::blk::split_request(&chain, &mut data);
                    assert!(data.iter().all(|s| arena.inside(s.ptr, s.len as usize)));
                }
                Ok(false) => {}
                Err(_) => break,
            }
            while !heads.is_empty() && rng.one_in(2) {
                let index = rng.below(heads.len() as u64) as usize;
                ring.push(heads.swap_remove(index), rng.next() as u32);
            }
            if rng.one_in(2) {
                let _ = ring.publish();
            }
            if rng.one_in(4) {
                let _ = ring.enable_kick();
                ring.disable_kick();
            }
            scribble(&mut rng, 3);
        }
        drop(ring);
        arena.check_guards();
    }
}

/// Tests that an in-flight region may contain garbage as well.
#[test]
fn random_inflight_regions_do_no_harm() {
    for seed in 0..iterations(3000) {
        let mut rng = Rng::new(seed);
        let arena = arena();
        let features = RingFeatures { packed: rng.one_in(2), ..Default::default() };
        let size = 8u16;
        let (addrs, _) = arena.ring(RING, size, features);
        let words = inflight_queue_size(size, features.packed) / 8;
        let mut region: Vec<u64> = (0..words)
            .map(|_| if rng.one_in(3) { rng.next() } else { rng.below(4) << (16 * rng.below(4)) })
            .collect();
        for word in &mut region {
            if rng.one_in(2) {
                *word = u64::from_le_bytes(std::array::from_fn(|_| (rng.below(3) * rng.below(5)) as u8));
            }
        }
        region[0] = 0;
        region[1] = region[1] & !0xffff_ffff | 1 | u64::from(size) << 16;
        let (ptr, len) = (region.as_mut_ptr().cast(), words * 8);
        // SAFETY: the vector and the arena outlive the ring.
        let mut ring = unsafe { DeviceRing::new(size, features, addrs, 0) }.unwrap();
        // SAFETY: the test's arena or region outlives the use.
        let inflight = unsafe { Inflight::new(ptr, len, size, features.packed, Arc::new(())) }.unwrap();
        let Ok(replays) = ring.set_inflight(inflight) else { continue };
        let mut chain = Chain::new();
        for replay in &replays {
            ring.replay(&arena.mem, replay, &mut chain).unwrap();
            assert!(chain.segs.iter().all(|s| arena.inside(s.ptr, s.len as usize)));
            ring.push(chain.head, 0);
        }
        let _ = ring.publish();
        let _ = ring.pop(&arena.mem, &mut chain);
        drop(ring);
        arena.check_guards();
    }
}
