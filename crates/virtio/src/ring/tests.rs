//! The driver and the device of this crate: random programs against a model, packed bases, the log.

mod faults;
mod hostile;
mod oracle;
mod threads;

use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::driver::{DriverRing, DriverSeg, Indirect};
use crate::log::LOG_PAGE_SIZE;
use crate::testing::{Arena, Rng, all_features, iterations};

const RING: u64 = 0x10_0000;
const TABLES: u64 = 0x11_0000;
const BUFFERS: u64 = 0x20_0000;

pub(super) fn arena() -> Arena {
    Arena::new(&[(RING, 0x4_0000), (BUFFERS, 0x1_0000), (BUFFERS + 0x1_0000, 0x1_0000)])
}

/// A driver and a device on one ring, and the expected state of both.
struct Sides {
    arena: Arena,
    driver: DriverRing,
    device: DeviceRing,
    size: u16,
    features: RingFeatures,
    cookie: u16,
    /// Requests that are added and not published; visible to the device; taken; pushed; published.
    added: Vec<(u16, Vec<DriverSeg>)>,
    visible: VecDeque<(u16, Vec<DriverSeg>)>,
    taken: Vec<(u16, Head)>,
    pushed: Vec<(u16, u32)>,
    done: VecDeque<(u16, u32)>,
    tables: Vec<u64>,
    device_sleeps: bool,
    driver_sleeps: bool,
    chain: Chain,
    completed: u64,
}

impl Sides {
    fn new(size: u16, features: RingFeatures) -> Self {
        let arena = arena();
        let (addrs, _) = arena.ring(RING, size, features);
        let base = if features.packed { 0x8000_8000 } else { 0 };
        // SAFETY: the arena contains both rings' areas, and is dropped last.
        let (driver, device) = unsafe {
            let driver = DriverRing::new(size, features, addrs);
            (driver, DeviceRing::new(size, features, addrs, base).unwrap())
        };
        Self {
            arena,
            driver,
            device,
            size,
            features,
            cookie: 0,
            added: Vec::new(),
            visible: VecDeque::new(),
            taken: Vec::new(),
            pushed: Vec::new(),
            done: VecDeque::new(),
            tables: (0..size).map(|i| TABLES + u64::from(i) * 128).collect(),
            device_sleeps: false,
            driver_sleeps: false,
            chain: Chain::new(),
            completed: 0,
        }
    }

    fn add(&mut self, rng: &mut Rng) {
        let count = 1 + rng.below(5) as usize;
        let readable = rng.below(count as u64 + 1) as usize;
        let segs: Vec<_> = (0..count)
            .map(|i| DriverSeg {
                // Some cross the border of the two adjoining regions, some are empty.
                addr: BUFFERS + if rng.one_in(4) { 0x1_0000 - rng.below(64) } else { rng.below(0x1_f000) },
                len: match rng.below(8) {
                    0 => 0,
                    1 if !cfg!(miri) => 1 + rng.below(0x1000) as u32,
                    _ => 1 + rng.below(64) as u32,
                },
                writable: i >= readable,
            })
            .collect();
        let table = if self.features.indirect && rng.one_in(2) { self.tables.last().copied() } else { None };
        let indirect = table.map(|addr| Indirect { ptr: self.arena.host(addr), addr, cap: 8 });
        let free = self.driver.free_descs();
        let need = if indirect.is_some() && count > 1 { 1 } else { count as u16 };
        let cookie = self.cookie;
        assert_eq!(self.driver.add(&segs, indirect, cookie).is_ok(), need <= free, "{need} of {free}");
        if need <= free {
            if indirect.is_some() && count > 1 {
                // Tables are read when the request is taken, which happens in order. As many tables
                // as the ring has descriptors, used in turn, are enough.
                self.tables.rotate_right(1);
            }
            self.cookie = self.cookie.wrapping_add(1);
            self.added.push((cookie, segs));
        }
    }

    fn driver_publish(&mut self) {
        let kick = self.driver.publish();
        let any = !self.added.is_empty();
        self.visible.extend(self.added.drain(..));
        assert!(any || !kick);
        if self.device_sleeps && any {
            assert!(kick, "lost kick: the device sleeps");
        }
        self.device_sleeps &= !kick;
    }

    fn pop(&mut self) {
        assert_eq!(self.device.has_avail(), !self.visible.is_empty());
        let got = self.device.pop(&self.arena.mem, &mut self.chain).unwrap();
        let Some((cookie, segs)) = self.visible.pop_front() else {
            assert!(!got);
            return;
        };
        assert!(got);
        assert_eq!(self.chain.fault, None);
        let bytes = |segs: &[Seg]| -> Vec<usize> {
            segs.iter().flat_map(|s| s.ptr.addr()..s.ptr.addr() + s.len as usize).collect()
        };
        let wanted = |writable| -> Vec<usize> {
            segs.iter()
                .filter(|s| s.writable == writable)
                .flat_map(|s| (0..s.len).map(|i| self.arena.host(s.addr + u64::from(i)).addr()))
                .collect()
        };
        let (readable, writable) = self.chain.segs.split_at(self.chain.readable);
        if !cfg!(miri) || self.completed.is_multiple_of(8) {
            assert_eq!(bytes(readable), wanted(false));
            assert_eq!(bytes(writable), wanted(true));
        }
        self.taken.push((cookie, self.chain.head));
        // After a return to the ring, the same request is taken again.
        if cookie.is_multiple_of(5) {
            let head = self.chain.head;
            self.device.unpop(head);
            assert!(self.device.pop(&self.arena.mem, &mut self.chain).unwrap());
            assert_eq!(self.chain.head, head);
        }
    }

    fn push(&mut self, rng: &mut Rng) {
        if self.taken.is_empty() {
            return;
        }
        let index = if rng.one_in(2) { 0 } else { rng.below(self.taken.len() as u64) as usize };
        let (cookie, head) = self.taken.remove(index);
        let written = rng.below(3) as u32 * 1000;
        self.device.push(head, written);
        self.pushed.push((cookie, written));
    }

    fn device_publish(&mut self) {
        assert_eq!(self.driver.has_used(), !self.done.is_empty());
        let notify = self.device.publish();
        let any = !self.pushed.is_empty();
        self.done.extend(self.pushed.drain(..));
        assert!(any || !notify);
        if self.driver_sleeps && any {
            assert!(notify, "lost notification: the driver sleeps");
        }
        self.driver_sleeps &= !notify;
    }

    fn poll(&mut self) {
        let used = self.driver.poll().map(|u| (u.cookie, u.len));
        assert_eq!(used, self.done.pop_front());
        self.completed += u64::from(used.is_some());
    }

    fn step(&mut self, rng: &mut Rng) {
        match rng.below(12) {
            0..=2 => (0..1 + rng.below(4)).for_each(|_| self.add(rng)),
            3 => self.driver_publish(),
            4..=5 if !self.device_sleeps => (0..1 + rng.below(8)).for_each(|_| self.pop()),
            6 => (0..1 + rng.below(4)).for_each(|_| self.push(rng)),
            7 => self.device_publish(),
            8..=9 if !self.driver_sleeps => (0..1 + rng.below(8)).for_each(|_| self.poll()),
            10 => match rng.below(2) {
                0 => {
                    self.device.disable_kick();
                    self.device_sleeps = false;
                }
                _ => {
                    let ready = self.device.enable_kick();
                    assert_eq!(ready, !self.visible.is_empty());
                    self.device_sleeps = !ready;
                }
            },
            11 => match rng.below(2) {
                0 => {
                    self.driver.disable_notify();
                    self.driver_sleeps = false;
                }
                _ => {
                    let ready = self.driver.enable_notify();
                    assert_eq!(ready, !self.done.is_empty());
                    self.driver_sleeps = !ready;
                }
            },
            _ => {}
        }
        // A side that gets a notification while it sleeps would have been woken before.
        if self.device_sleeps && rng.one_in(16) {
            self.device_sleeps = false;
        }
        if self.driver_sleeps && rng.one_in(16) {
            self.driver_sleeps = false;
        }
    }

    fn drain(&mut self, rng: &mut Rng) {
        self.driver_publish();
        while !self.visible.is_empty() || !self.taken.is_empty() {
            self.pop();
            self.push(rng);
        }
        self.device_publish();
        while !self.done.is_empty() {
            self.poll();
        }
        self.poll();
        assert_eq!(self.driver.free_descs(), self.size);
    }
}

#[test]
fn random_programs_complete_each_request_once() {
    for (i, features) in all_features().enumerate() {
        let sizes: &[u16] = if features.packed { &[1, 2, 3, 5, 7, 8, 16] } else { &[1, 2, 4, 8, 16] };
        // Miri is slow, so one size is enough.
        let sizes = if cfg!(miri) { &sizes[2..3] } else { sizes };
        for &size in sizes {
            for seed in 0..if cfg!(miri) { 1 } else { 4 } {
                let mut rng = Rng::new(seed << 32 | (i as u64) << 16 | u64::from(size));
                let mut sides = Sides::new(size, features);
                for _ in 0..if cfg!(miri) { 30 } else { 400 } {
                    // A sleeping side that is told to do something was woken by other means.
                    sides.step(&mut rng);
                }
                sides.drain(&mut rng);
                sides.arena.check_guards();
            }
        }
    }
}

#[test]
fn indices_wrap_around_16_bits() {
    if cfg!(miri) {
        return;
    }
    for features in all_features() {
        let mut rng = Rng::new(7);
        let mut sides = Sides::new(4, features);
        let seg = DriverSeg { addr: BUFFERS, len: 16, writable: false };
        // Sleeps at random during two laps of the indices, with one or two requests for each round.
        while sides.completed < 140_000 {
            for _ in 0..1 + rng.below(2) {
                if sides.driver.add(&[seg], None, sides.cookie).is_ok() {
                    sides.added.push((sides.cookie, vec![seg]));
                    sides.cookie = sides.cookie.wrapping_add(1);
                }
            }
            if rng.one_in(2) {
                sides.device_sleeps = !sides.device.enable_kick();
            }
            sides.driver_publish();
            sides.device_sleeps = false;
            while !sides.visible.is_empty() {
                sides.pop();
                sides.push(&mut rng);
            }
            if rng.one_in(2) {
                sides.driver_sleeps = !sides.driver.enable_notify();
            }
            sides.device_publish();
            sides.driver_sleeps = false;
            while !sides.done.is_empty() {
                sides.poll();
            }
        }
    }
}

#[test]
fn suppressed_notifications_are_not_sent() {
    for features in all_features() {
        let mut sides = Sides::new(8, features);
        let seg = DriverSeg { addr: BUFFERS, len: 16, writable: true };
        sides.device.disable_kick();
        sides.driver.disable_notify();
        let mut sent = 0;
        for round in 0..20 {
            sides.driver.add(&[seg], None, round).unwrap();
            sent += u32::from(sides.driver.publish());
            assert!(sides.device.pop(&sides.arena.mem, &mut sides.chain).unwrap());
            sides.device.push(sides.chain.head, 16);
            sent += u32::from(sides.device.publish());
            assert_eq!(sides.driver.poll().unwrap().cookie, round);
        }
        // A split ring with event indices defers notifications by leaving the index unchanged, so
        // the first of each is still sent.
        let allowed = if features.event_idx && !features.packed { 2 } else { 0 };
        assert_eq!(sent, allowed, "{features:?}");
    }
}

#[test]
fn a_ring_continues_from_its_base() {
    for features in all_features() {
        let mut rng = Rng::new(3);
        let mut sides = Sides::new(8, features);
        for _ in 0..iterations(50) {
            for _ in 0..1 + rng.below(3) {
                sides.add(&mut rng);
            }
            sides.drain(&mut rng);
            let (addrs, _) = sides.arena.ring(RING, 8, features);
            let base = sides.device.base();
            // SAFETY: the old ring is dropped with the assignment.
            sides.device = unsafe { DeviceRing::new(8, features, addrs, base) }.unwrap();
            if features.packed && base & 0xffff != 0 {
                // A front end that knows only the lower half.
                // SAFETY: the test's arena or region outlives the use.
                sides.device = unsafe { DeviceRing::new(8, features, addrs, base & 0xffff) }.unwrap();
            }
            assert_eq!(sides.device.base(), base);
        }
    }
}

#[test]
fn base_zero_of_a_packed_ring_is_fresh_unless_a_lap_was_made() {
    let features = RingFeatures { packed: true, ..Default::default() };
    let mut sides = Sides::new(4, features);
    let (addrs, _) = sides.arena.ring(RING, 4, features);
    let seg = DriverSeg { addr: BUFFERS, len: 16, writable: true };
    // Requests that wait on a new ring do not count as a lap.
    sides.driver.add(&[seg], None, 0).unwrap();
    let _ = sides.driver.publish();
    // SAFETY: the old ring is dropped with the assignment.
    sides.device = unsafe { DeviceRing::new(4, features, addrs, 0) }.unwrap();
    assert_eq!(sides.device.base(), 0x8000_8000);
    for round in 0..4 {
        assert!(sides.device.pop(&sides.arena.mem, &mut sides.chain).unwrap());
        sides.device.push(sides.chain.head, 16);
        let _ = sides.device.publish();
        assert_eq!(sides.driver.poll().unwrap().cookie, round);
        if round < 3 {
            sides.driver.add(&[seg], None, round + 1).unwrap();
            let _ = sides.driver.publish();
        }
    }
    assert_eq!(sides.device.base(), 0);
    // SAFETY: the test's arena or region outlives the use.
    sides.device = unsafe { DeviceRing::new(4, features, addrs, 0) }.unwrap();
    assert_eq!(sides.device.base(), 0);
    sides.driver.add(&[seg], None, 9).unwrap();
    let _ = sides.driver.publish();
    assert!(sides.device.pop(&sides.arena.mem, &mut sides.chain).unwrap());
}

#[test]
fn bad_sizes_bases_and_alignments_are_refused() {
    let arena = arena();
    let packed = RingFeatures { packed: true, ..Default::default() };
    let split = RingFeatures::default();
    let (addrs, _) = arena.ring(RING, 8, split);
    // SAFETY: the arena outlives the rings.
    let new =
        |size, features, addrs, base| unsafe { DeviceRing::new(size, features, addrs, base) }.map(|_| ());
    for (size, features) in [(0, split), (0, packed), (6, split), (2048, split), (1025, packed)] {
        assert_eq!(new(size, features, addrs, 0), Err(RingError::Size(size)));
    }
    assert_eq!(new(6, packed, addrs, 0x8006_8000), Err(RingError::Base(0x8006_8000)));
    assert_eq!(new(6, packed, addrs, 0x8001_0002), Err(RingError::Base(0x8001_0002)));
    for (name, odd) in [
        ("descriptor", RingAddrs { desc: addrs.desc.wrapping_add(8), ..addrs }),
        ("driver", RingAddrs { driver: addrs.driver.wrapping_add(1), ..addrs }),
        ("device", RingAddrs { device: addrs.device.wrapping_add(2), ..addrs }),
    ] {
        assert_eq!(new(8, split, odd, 0), Err(RingError::Misaligned(name)));
    }
}

/// Tests that the log has the writes to the used ring, and no others.
#[test]
fn the_log_has_what_the_ring_wrote() {
    for features in all_features() {
        let size = if features.packed { 700 } else { 1024 };
        let mut sides = Sides::new(size, features);
        let (_, guest) = sides.arena.ring(RING, size, features);
        let pages = (0x4_0000 / LOG_PAGE_SIZE) as usize;
        let first = (RING / LOG_PAGE_SIZE) as usize;
        let mut bits = vec![0u64; (first + pages).div_ceil(64)];
        // SAFETY: the vector outlives the ring's use of the log.
        let log = Arc::new(unsafe { DirtyLog::new(bits.as_mut_ptr().cast(), bits.len() * 8, Arc::new(())) });
        sides.device.set_used_log(Some(UsedLog { log, device_addr: guest[2], desc_addr: guest[0] }));
        let bits = bits.as_mut_ptr();
        let mut rng = Rng::new(11);
        let mut marked_any = false;
        for _ in 0..iterations(300) {
            for _ in 0..rng.below(40) {
                sides.add(&mut rng);
            }
            sides.driver_publish();
            let before = sides.arena.bytes(RING, 0x4_0000);
            for _ in 0..rng.below(40) {
                sides.pop();
                sides.push(&mut rng);
            }
            // Elements that are written and not published are not marked. From here on, only marks
            // of publish count.
            sides.device_publish();
            if rng.one_in(3) {
                sides.device.disable_kick();
            }
            if rng.one_in(3) {
                let _ = sides.device.enable_kick();
            }
            let after = sides.arena.bytes(RING, 0x4_0000);
            for page in 0..pages {
                let range = page * 4096..page * 4096 + 4096;
                let bit = first + page;
                // SAFETY: the vector is alive, and the ring is idle.
                let word = unsafe { &mut *bits.add(bit / 64) };
                let marked = *word >> (bit % 64) & 1 != 0;
                assert!(
                    marked || before[range.clone()] == after[range],
                    "{features:?}: page {page} is missing"
                );
                marked_any |= marked;
                *word &= !(1 << (bit % 64));
            }
            while !sides.done.is_empty() {
                sides.poll();
            }
            sides.device_sleeps = false;
        }
        assert!(marked_any);
        sides.device.set_used_log(None);
    }
}
