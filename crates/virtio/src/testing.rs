//! Helpers for this crate's tests: memory with guards, a seeded generator, a crash after the n-th
//! store.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::mem::{GuestMemory, Region};
use crate::ring::{RingAddrs, RingFeatures, ring_sizes};

/// Returns the number of iterations of a test: fewer under Miri.
pub(crate) const fn iterations(count: u64) -> u64 {
    if cfg!(miri) { count.div_ceil(100) } else { count }
}

/// A seeded generator of random numbers.
#[derive(Clone)]
pub(crate) struct Rng(fastrand::Rng);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Returns a number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    /// Returns true once in `n` calls on average.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

thread_local! {
    static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Crash;

/// Runs after each store of this crate.
pub(crate) fn crash_point() {
    STORES_LEFT.with(|left| match left.get() {
        Some(0) => {
            left.set(None);
            resume_unwind(Box::new(Crash));
        }
        Some(n) => left.set(Some(n - 1)),
        None => {}
    });
}

/// Runs `f` and stops it after `stores` more stores. Returns `None` if it was stopped.
pub(crate) fn stop_after<T>(stores: u64, f: impl FnOnce() -> T) -> Option<T> {
    STORES_LEFT.with(|left| left.set(Some(stores)));
    let result = catch_unwind(AssertUnwindSafe(f));
    STORES_LEFT.with(|left| left.set(None));
    match result {
        Ok(value) => Some(value),
        Err(payload) if payload.is::<Crash>() => None,
        Err(payload) => resume_unwind(payload),
    }
}

const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xa5;

/// Memory with guards around each region.
pub(crate) struct Arena {
    base: *mut u8,
    layout: Layout,
    /// Guest address, host pointer, size.
    regions: Vec<(u64, *mut u8, usize)>,
    pub(crate) mem: Arc<GuestMemory>,
}

impl Arena {
    /// Makes regions from guest addresses and sizes.
    pub(crate) fn new(regions: &[(u64, usize)]) -> Self {
        let total = GUARD + regions.iter().map(|r| r.1.next_multiple_of(4096) + GUARD).sum::<usize>();
        let layout = Layout::from_size_align(total, 4096).unwrap();
        // SAFETY: the layout is not empty; the bytes are initialised at once.
        let base = unsafe { alloc(layout) };
        assert!(!base.is_null());
        // SAFETY: the memory was just allocated.
        unsafe { base.write_bytes(GUARD_BYTE, total) };
        let mut at = GUARD;
        let mut placed = Vec::new();
        for &(guest, size) in regions {
            // SAFETY: inside of the allocation.
            let host = unsafe { base.add(at) };
            // SAFETY: inside of a region, which the arena owns.
            unsafe { host.write_bytes(0, size) };
            placed.push((guest, host, size));
            at += size.next_multiple_of(4096) + GUARD;
        }
        let table = placed
            .iter()
            .map(|&(guest_addr, host, size)| Region {
                guest_addr,
                user_addr: 0x7f00_0000_0000 + guest_addr * 2,
                size: size as u64,
                host,
                keep: Arc::new(()),
            })
            .collect();
        // SAFETY: the arena outlives the tests' use of the table.
        let mem = Arc::new(unsafe { GuestMemory::new(table) }.unwrap());
        Self { base, layout, regions: placed, mem }
    }

    /// Returns the host pointer of a guest address.
    pub(crate) fn host(&self, guest: u64) -> *mut u8 {
        let &(start, host, _) =
            self.regions.iter().find(|r| guest >= r.0 && guest - r.0 < r.2 as u64).unwrap();
        host.wrapping_add((guest - start) as usize)
    }

    /// Returns whether a host range is inside one region.
    pub(crate) fn inside(&self, ptr: *const u8, len: usize) -> bool {
        self.regions.iter().any(|r| {
            ptr.addr() >= r.1.addr()
                && ptr.addr() - r.1.addr() <= r.2
                && len <= r.2 - (ptr.addr() - r.1.addr())
        })
    }

    /// Checks that nothing wrote between the regions.
    pub(crate) fn check_guards(&self) {
        let mut at = 0;
        for &(_, host, size) in
            self.regions.iter().chain([&(0, self.base.wrapping_add(self.layout.size()), 0)])
        {
            for offset in at..host.addr() - self.base.addr() {
                // SAFETY: inside of the allocation.
                assert_eq!(unsafe { self.base.add(offset).read() }, GUARD_BYTE, "guard at {offset:#x}");
            }
            at = host.addr() - self.base.addr() + size;
        }
    }

    /// Returns the areas of a ring from a guest address on, each at its own multiple of 4 KiB.
    pub(crate) fn ring(&self, guest: u64, size: u16, features: RingFeatures) -> (RingAddrs, [u64; 3]) {
        let sizes = ring_sizes(size, features);
        let driver = guest + (sizes.desc as u64).next_multiple_of(4096);
        let device = driver + (sizes.driver as u64).next_multiple_of(4096);
        let addrs =
            RingAddrs { desc: self.host(guest), driver: self.host(driver), device: self.host(device) };
        (addrs, [guest, driver, device])
    }

    pub(crate) fn put_u64(&self, guest: u64, value: u64) {
        // SAFETY: inside of a region, aligned by the tests.
        unsafe { self.host(guest).cast::<u64>().write_unaligned(value) };
    }

    pub(crate) fn put_u16(&self, guest: u64, value: u16) {
        // SAFETY: inside of a region, which the arena owns.
        unsafe { self.host(guest).cast::<u16>().write_unaligned(value) };
    }

    /// Returns a copy of the bytes.
    pub(crate) fn bytes(&self, guest: u64, len: usize) -> Vec<u8> {
        // SAFETY: inside of a region by the tests.
        (0..len).map(|i| unsafe { self.host(guest).add(i).read() }).collect()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// Returns all combinations of ring features.
pub(crate) fn all_features() -> impl Iterator<Item = RingFeatures> {
    (0..8u8).map(|bits| RingFeatures {
        indirect: bits & 1 != 0,
        event_idx: bits & 2 != 0,
        packed: bits & 4 != 0,
    })
}
