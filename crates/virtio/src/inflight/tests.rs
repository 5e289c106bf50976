//! A device that is killed after any store, and its successor.

use std::collections::HashSet;

use super::*;
use crate::driver::{DriverRing, DriverSeg, Indirect};
use crate::ring::{Chain, DeviceRing, RingAddrs, RingFeatures};
use crate::testing::{Arena, Rng, all_features, stop_after};

const RING: u64 = 0x1_0000;
const TABLES: u64 = 0x1_8000;
const BUFFERS: u64 = 0x4_0000;

/// The guest and the region, which outlive the device.
struct World {
    arena: Arena,
    features: RingFeatures,
    size: u16,
    addrs: RingAddrs,
    region: Vec<u64>,
    driver: DriverRing,
    /// Requests that were added, and that were returned.
    added: u16,
    done: HashSet<u16>,
    /// Numbers in the order in which the device started to take them.
    order: Vec<u16>,
}

impl World {
    fn new(size: u16, features: RingFeatures) -> Self {
        let arena = Arena::new(&[(RING, 0x1_0000), (BUFFERS, 0x1_0000)]);
        let (addrs, _) = arena.ring(RING, size, features);
        // SAFETY: the arena outlives the ring.
        let driver = unsafe { DriverRing::new(size, features, addrs) };
        let region = vec![0; inflight_queue_size(size, features.packed) / 8];
        let (done, order) = (HashSet::new(), Vec::new());
        Self { arena, features, size, addrs, region, driver, added: 0, done, order }
    }

    fn inflight(&mut self) -> Inflight {
        let (ptr, len) = (self.region.as_mut_ptr().cast(), self.region.len() * 8);
        // SAFETY: the region outlives the device.
        unsafe { Inflight::new(ptr, len, self.size, self.features.packed, Arc::new(())) }.unwrap()
    }

    /// Makes a device as it starts after `VHOST_USER_SET_VRING_BASE`, with a base that may be
    /// wrong.
    fn device(&mut self, base: u32) -> (DeviceRing, Vec<Replay>) {
        // SAFETY: the arena outlives the ring.
        let mut ring = unsafe { DeviceRing::new(self.size, self.features, self.addrs, base) }.unwrap();
        let replays = ring.set_inflight(self.inflight()).unwrap();
        (ring, replays)
    }

    /// Adds and publishes requests. Each has its number in its first buffer.
    fn add(&mut self, count: u64, rng: &mut Rng) {
        for _ in 0..count {
            let slot = BUFFERS + u64::from(self.added % 64) * 64;
            let seg = |i: u64| DriverSeg { addr: slot + i * 8, len: 8, writable: i > 0 };
            let segs: Vec<_> = (0..1 + rng.below(3)).map(seg).collect();
            let addr = TABLES + u64::from(self.added % 64) * 64;
            let table = Indirect { ptr: self.arena.host(addr), addr, cap: 4 };
            let indirect = (self.features.indirect && rng.one_in(2)).then_some(table);
            if self.driver.add(&segs, indirect, self.added).is_ok() {
                self.arena.put_u64(slot, u64::from(self.added));
                self.added += 1;
            }
        }
        let _ = self.driver.publish();
    }

    /// Returns the number of a chain's request.
    fn number(chain: &Chain) -> u16 {
        assert_eq!(chain.fault, None);
        // SAFETY: the ring found it in the arena.
        unsafe { chain.segs[0].ptr.cast::<u64>().read_unaligned() as u16 }
    }

    /// Takes the requests that the device returned. None may return twice.
    fn poll(&mut self) {
        while let Some(used) = self.driver.poll() {
            assert!(self.done.insert(used.cookie), "request {} came back twice", used.cookie);
        }
    }

    /// Serves for some rounds.
    fn serve(&mut self, ring: &mut DeviceRing, rounds: u32, rng: &mut Rng) {
        let mut chain = Chain::new();
        let mut taken = Vec::new();
        for _ in 0..rounds {
            for _ in 0..rng.below(4) {
                if ring.pop(&self.arena.mem.clone(), &mut chain).unwrap() {
                    let number = Self::number(&chain);
                    self.order.push(number);
                    taken.push((number, chain.head));
                }
            }
            // Requests that were popped last may be returned untouched.
            for _ in 0..rng.below(8).saturating_sub(5) {
                if let Some((_, head)) = taken.pop_if(|(number, _)| self.order.last() == Some(number)) {
                    self.order.pop();
                    ring.unpop(head);
                }
            }
            for _ in 0..rng.below(4) {
                if !taken.is_empty() {
                    let index = rng.below(taken.len() as u64) as usize;
                    ring.push(taken.remove(index).1, 8);
                }
            }
            let _ = ring.publish();
        }
    }

    /// Completes everything that is left.
    fn finish(&mut self, mut ring: DeviceRing, replays: &[Replay]) {
        self.poll();
        let mut chain = Chain::new();
        let mem = self.arena.mem.clone();
        let mut heads = Vec::new();
        let mut last = None;
        for replay in replays {
            ring.replay(&mem, replay, &mut chain).unwrap();
            let number = Self::number(&chain);
            assert!(!self.done.contains(&number), "published request {number} replayed");
            // Numbers grow in the order in which requests are taken.
            assert!(last < Some(number), "replayed out of order");
            last = Some(number);
            heads.push(chain.head);
        }
        // A request that was surely taken (the device saw it) and did not return is among the
        // replays.
        let replayed = heads.len();
        let owed = self.order.iter().filter(|n| !self.done.contains(n)).count();
        assert!(replayed >= owed, "{replayed} replayed, {owed} owed");
        while ring.pop(&mem, &mut chain).unwrap() {
            heads.push(chain.head);
        }
        let half = heads.len() / 2;
        // Out of order, one by one or in two batches. One by one finds a used element that was
        // never published.
        let singly = replays.len().is_multiple_of(2);
        heads.rotate_left(half);
        for (i, head) in heads.iter().enumerate() {
            ring.push(*head, 8);
            if singly || i == half {
                let _ = ring.publish();
                self.poll();
            }
        }
        let _ = ring.publish();
        self.poll();
        assert_eq!(self.done.len(), usize::from(self.added), "requests were lost");
        assert_eq!(self.driver.free_descs(), self.size);
        assert!(!ring.has_avail());
    }
}

/// Runs a device that is killed after `kill` stores, and a recovery that is killed after `again`
/// stores. Returns false if the device ended before it was killed.
fn killed(features: RingFeatures, size: u16, seed: u64, kill: u64, again: Option<u64>) -> bool {
    let mut rng = Rng::new(seed);
    let mut world = World::new(size, features);
    let fresh = if features.packed { 0x8000_8000 } else { 0 };
    let (mut ring, replays) = world.device(fresh);
    assert!(replays.is_empty());
    // The laps and free lists are then not at their start.
    for _ in 0..rng.below(12) {
        world.add(1, &mut rng);
        let mut chain = Chain::new();
        if ring.pop(&world.arena.mem, &mut chain).unwrap() {
            ring.push(chain.head, 0);
            let _ = ring.publish();
        }
        world.poll();
    }
    let count = 1 + rng.below(u64::from(size));
    world.add(count, &mut rng);
    let alive = stop_after(kill, || world.serve(&mut ring, 5, &mut rng)).is_some();
    drop(ring);
    // The driver continues in the meantime.
    if seed.is_multiple_of(2) {
        world.poll();
        world.add(2, &mut rng);
    }
    // The base that a front end uses when the back end is gone.
    let base = if features.packed { fresh } else { 0 };
    if let Some(stores) = again {
        stop_after(stores, || world.device(base));
    }
    let (ring, replays) = world.device(base);
    world.finish(ring, &replays);
    !alive
}

#[test]
fn nothing_is_lost_or_done_twice_wherever_the_device_is_killed() {
    let seeds = if cfg!(miri) { 1 } else { 12 };
    let mut kills = 0;
    for features in all_features().filter(|f| !f.event_idx) {
        for seed in 0..seeds {
            let size = if features.packed { 3 + (seed as u16 * 2) % 7 } else { 2 << (seed % 3) };
            let mut kill = 0;
            while killed(features, size, seed, kill, None) {
                kill += if cfg!(miri) { 37 } else { 1 };
            }
            kills += kill;
        }
    }
    assert!(kills > 1000 || cfg!(miri), "{kills} kills");
}

#[test]
fn recovery_may_be_killed_too() {
    let seeds = if cfg!(miri) { 1 } else { 6 };
    for features in all_features().filter(|f| !f.event_idx) {
        for seed in 0..seeds {
            let size = if features.packed { 5 } else { 4 };
            let mut kill = 0;
            while killed(features, size, seed, kill, Some(kill % 29)) {
                kill += if cfg!(miri) { 41 } else { 1 };
            }
        }
    }
}

#[test]
fn the_layouts_are_the_specifications() {
    assert_eq!((split::HEADER_LEN, split::ENTRY_LEN), (16, 16));
    assert_eq!((packed::HEADER_LEN, packed::ENTRY_LEN), (32, 32));
    // The values that QEMU's libvhost-user and DPDK compute.
    assert_eq!(inflight_queue_size(128, false), 2112);
    assert_eq!(inflight_queue_size(1, false), 64);
    assert_eq!(inflight_queue_size(256, true), 8256);
    // Split: two requests taken, the second published.
    let mut world = World::new(4, RingFeatures::default());
    let (mut ring, _) = world.device(0);
    let mut rng = Rng::new(0);
    let mut chain = Chain::new();
    let seg = DriverSeg { addr: BUFFERS, len: 8, writable: true };
    for cookie in 0..2 {
        world.driver.add(&[seg], None, cookie).unwrap();
    }
    let _ = world.driver.publish();
    for _ in 0..2 {
        assert!(ring.pop(&world.arena.mem, &mut chain).unwrap());
    }
    ring.push(chain.head, 8);
    let _ = ring.publish();
    let bytes = |region: &[u64]| -> Vec<u8> { region.iter().flat_map(|w| w.to_ne_bytes()).collect() };
    let region = bytes(&world.region);
    // features, version, desc_num, last_batch_head, used_idx
    assert_eq!(region[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 0, 1, 0, 1, 0]);
    // inflight, padding, next, counter
    assert_eq!(region[16..32], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(region[32..48], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // Packed, like above.
    let mut world = World::new(4, RingFeatures { packed: true, ..Default::default() });
    let (mut ring, _) = world.device(0x8000_8000);
    for cookie in 0..2 {
        world.driver.add(&[seg], None, cookie).unwrap();
    }
    let _ = world.driver.publish();
    for _ in 0..2 {
        assert!(ring.pop(&world.arena.mem, &mut chain).unwrap());
    }
    ring.push(chain.head, 8);
    let _ = ring.publish();
    let region = bytes(&world.region);
    // features; version, desc_num, free_head, old_free_head; used_idx, old_used_idx, both wrap
    // counters, padding
    assert_eq!(region[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 0, 1, 0, 1, 0]);
    assert_eq!(region[16..32], [1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // inflight, padding, next, last, num, counter, id, flags, len, addr
    let first =
        [1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x82, 0, 8, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0];
    assert_eq!(region[32..64], first);
    let second =
        [0, 0, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x82, 0, 8, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0];
    assert_eq!(region[64..96], second);
    let _ = rng.next();
}

/// Tests a split region of a back end that follows the steps of the specification exactly and dies
/// right after the used index. The last batch is cleared, and the other requests are replayed in
/// the order of their counters.
#[test]
fn another_back_ends_region_is_understood() {
    let mut world = World::new(4, RingFeatures::default());
    let used = world.arena.ring(RING, 4, world.features).1[2] + 2;
    world.arena.put_u16(used, 12);
    let put = |region: &mut [u64], entry: usize, inflight: u64, next: u64, counter: u64| {
        region[2 + 2 * entry] = inflight | next << 48;
        region[3 + 2 * entry] = counter;
    };
    // version 1, 4 descriptors, last_batch_head 2, used_idx 10
    world.region[1] = 1 | 4 << 16 | 2 << 32 | 10 << 48;
    put(&mut world.region, 0, 1, 0, 9);
    put(&mut world.region, 1, 1, 0, 5);
    put(&mut world.region, 2, 1, 3, 6);
    put(&mut world.region, 3, 1, 0, 7);
    let (ring, replays) = world.device(0);
    assert_eq!(replays.iter().map(|r| r.head().id).collect::<Vec<_>>(), [1, 0]);
    assert_eq!((ring.base(), ring.used_index()), (14, 12));
    assert_eq!(world.region[1] >> 48, 12);
}

#[test]
fn regions_that_do_not_fit_are_refused() {
    let mut region = vec![0u64; 64];
    let ptr: *mut u8 = region.as_mut_ptr().cast();
    // SAFETY: the vector outlives the call.
    let new =
        |ptr, len, size, packed| unsafe { Inflight::new(ptr, len, size, packed, Arc::new(())) }.map(|_| ());
    assert_eq!(new(ptr, 79, 4, false), Err(InflightError::TooShort { len: 79, queue_size: 4, need: 80 }));
    assert_eq!(new(ptr.wrapping_add(4), 500, 4, false), Err(InflightError::Misaligned));
    assert!(new(ptr, 512, 0, false).is_err());
    region[1] = 2 | 4 << 16;
    assert_eq!(new(ptr, 512, 4, false), Err(InflightError::Version { version: 2, features: 0 }));
    region[1] = 1 | 8 << 16;
    assert_eq!(new(ptr, 512, 4, false), Err(InflightError::QueueSize { found: 8, expected: 4 }));
    let mut world = World::new(4, RingFeatures { packed: true, ..Default::default() });
    // SAFETY: the arena outlives the ring.
    let mut ring = unsafe { DeviceRing::new(4, world.features, world.addrs, 0) }.unwrap();
    // SAFETY: the vector outlives the ring.
    let small =
        unsafe { Inflight::new(world.region.as_mut_ptr().cast(), 128, 2, true, Arc::new(())) }.unwrap();
    assert_eq!(ring.set_inflight(small), Err(InflightError::QueueSize { found: 2, expected: 4 }));
    // SAFETY: the test's arena or region outlives the use.
    let split =
        unsafe { Inflight::new(world.region.as_mut_ptr().cast(), 128, 4, false, Arc::new(())) }.unwrap();
    assert_eq!(ring.set_inflight(split), Err(InflightError::Layout));
}
