//! Measures the cost of the device side of a ring in nanoseconds for each request, and that of
//! crate `virtio-queue` for comparison. Chains of three descriptors are taken, translated, returned
//! and published in batches of 32. All memory is in the cache.
//!
//! `cargo run --release -p virtio --example ring_speed`

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use virtio::inflight::{Inflight, inflight_queue_size};
use virtio::mem::{GuestMemory, Region};
use virtio::ring::{Chain, DeviceRing, Head, RingAddrs, RingFeatures};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// Requests between two publications.
const BATCH: usize = 32;
/// Batches on the ring before it is refilled, which is not measured.
const BATCHES: usize = 10;
const CHAINS: usize = BATCH * BATCHES;
const ROUNDS: usize = 20_000;

const DESC: u64 = 0x1_0000;
const DRIVER: u64 = 0x2_0000;
const DEVICE: u64 = 0x3_0000;
const TABLES: u64 = 0x8_0000;
const BUFFERS: u64 = 0x10_0000;
const SIZE: u64 = 0x100_0000;

/// A guest whose rings and buffers are in one region at address 0.
struct Guest {
    vm: GuestMemoryMmap,
    base: *mut u8,
    mem: GuestMemory,
}

impl Guest {
    fn new() -> Self {
        let vm = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), SIZE as usize)]).expect("guest memory");
        let base = vm.get_host_address(GuestAddress(0)).expect("address 0");
        let region = Region {
            guest_addr: 0,
            user_addr: 0x7000_0000,
            size: SIZE,
            host: base,
            keep: Arc::new(vm.clone()),
        };
        // SAFETY: the region keeps the mapping alive.
        let mem = unsafe { GuestMemory::new(vec![region]) }.expect("one region");
        Self { vm, base, mem }
    }

    fn addrs(&self) -> RingAddrs {
        let at = self.base.wrapping_add(0);
        RingAddrs {
            desc: at.wrapping_add(DESC as usize),
            driver: at.wrapping_add(DRIVER as usize),
            device: at.wrapping_add(DEVICE as usize),
        }
    }

    fn put<T: vm_memory::ByteValued>(&self, addr: u64, value: T) {
        self.vm.write_obj(value, GuestAddress(addr)).expect("inside");
    }

    /// The three buffers of a request: header, 4 KiB of data, status.
    fn buffers(chain: usize) -> [(u64, u32, u16); 3] {
        let at = BUFFERS + chain as u64 * 0x2000;
        [(at, 16, 0), (at + 0x1000, 4096, 2), (at + 32, 1, 2)]
    }

    fn split_desc(&self, at: u64, (addr, len, flags): (u64, u32, u16), next: Option<u16>) {
        self.put(at, addr);
        self.put(at + 8, len);
        self.put(at + 12, flags | u16::from(next.is_some()));
        self.put(at + 14, next.unwrap_or(0));
    }

    /// Fills a split ring: chains one after the other, or one descriptor and one table for each.
    fn fill_split(&self, size: u64, indirect: bool) {
        for chain in 0..CHAINS {
            let head = (chain * 3) as u16;
            for (i, buffer) in Self::buffers(chain).into_iter().enumerate() {
                let next = (i < 2).then_some(i as u16 + 1);
                if indirect {
                    self.split_desc(TABLES + (chain * 64 + i * 16) as u64, buffer, next);
                } else {
                    let at = DESC + 16 * (u64::from(head) + i as u64);
                    self.split_desc(at, buffer, next.map(|n| n + head));
                }
            }
            if indirect {
                self.split_desc(DESC + 16 * u64::from(head), (TABLES + chain as u64 * 64, 48, 4), None);
            }
        }
        for slot in 0..size {
            self.put(DRIVER + 4 + 2 * slot, (slot % CHAINS as u64 * 3) as u16);
        }
    }

    /// Fills a packed ring for one lap.
    fn fill_packed(&self, wrap: bool, indirect: bool) {
        let owner: u16 = if wrap { 1 << 7 } else { 1 << 15 };
        let put = |at: u64, (addr, len, flags): (u64, u32, u16), id: u16| {
            self.put(at, addr);
            self.put(at + 8, len);
            self.put(at + 12, id);
            self.put(at + 14, flags);
        };
        for chain in 0..CHAINS {
            for (i, buffer) in Self::buffers(chain).into_iter().enumerate() {
                let (addr, len, flags) = buffer;
                if indirect {
                    put(TABLES + (chain * 64 + i * 16) as u64, buffer, 0);
                } else {
                    let flags = flags | u16::from(i < 2) | owner;
                    put(DESC + (chain * 48 + i * 16) as u64, (addr, len, flags), chain as u16);
                }
            }
            if indirect {
                let table = (TABLES + chain as u64 * 64, 48, 4 | owner);
                put(DESC + chain as u64 * 16, table, chain as u16);
            }
        }
    }
}

/// Nanoseconds for each request: the median of many short rounds, and the best one, which an idle
/// machine would show.
#[derive(Clone, Copy)]
struct Cost {
    median: f64,
    best: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6.2} ({:6.2})", self.median, self.best)
    }
}

fn measure(mut round: impl FnMut(usize) -> Duration) -> Cost {
    let mut spent: Vec<f64> =
        (0..ROUNDS).map(|at| round(at).as_secs_f64() * 1e9 / CHAINS as f64).skip(ROUNDS / 10).collect();
    spent.sort_by(f64::total_cmp);
    Cost { median: spent[spent.len() / 2], best: spent[0] }
}

/// Runs one batch through a ring of this crate.
#[inline(never)]
fn serve(ring: &mut DeviceRing, mem: &GuestMemory, chain: &mut Chain, heads: &mut [Head; BATCH]) {
    for head in heads.iter_mut() {
        assert!(ring.pop(mem, chain).expect("sound ring"));
        black_box(chain.segs.as_ptr());
        *head = chain.head;
    }
    for head in heads.iter() {
        ring.push(*head, 4097);
    }
    black_box(ring.publish());
}

fn ours(guest: &Guest, features: RingFeatures, tracked: bool) -> Cost {
    let (size, base) = match (features.packed, features.indirect) {
        (true, false) => (3 * CHAINS as u16, 0x8000_8000),
        (true, true) => (CHAINS as u16, 0x8000_8000),
        _ => (1024, 0),
    };
    guest.put(DEVICE, [0u8; 16]);
    guest.put(DRIVER, 0u32);
    if !features.packed {
        guest.fill_split(size.into(), features.indirect);
    }
    // SAFETY: the areas are in the guest, which outlives the ring, and nothing else uses them.
    let mut ring = unsafe { DeviceRing::new(size, features, guest.addrs(), base) }.expect("a good ring");
    let mut region = vec![0u64; inflight_queue_size(size, features.packed) / 8];
    if tracked {
        let (ptr, len) = (region.as_mut_ptr().cast(), region.len() * 8);
        // SAFETY: the region outlives the ring.
        let inflight = unsafe { Inflight::new(ptr, len, size, features.packed, Arc::new(())) };
        let replays = ring.set_inflight(inflight.expect("a fresh region")).expect("a region that fits");
        assert!(replays.is_empty());
    }
    let (mut chain, mut heads) = (Chain::new(), [Head::default(); BATCH]);
    // SAFETY: the available index is in the guest.
    let avail = unsafe { AtomicU16::from_ptr(guest.addrs().driver.add(2).cast()) };
    measure(|round| {
        if features.packed {
            guest.fill_packed(round % 2 == 0, features.indirect);
        }
        let start = Instant::now();
        for _ in 0..BATCHES {
            if !features.packed {
                avail.store(avail.load(Ordering::Relaxed).wrapping_add(BATCH as u16), Ordering::Release);
            }
            serve(&mut ring, &guest.mem, &mut chain, &mut heads);
        }
        start.elapsed()
    })
}

fn virtio_queue(guest: &Guest, indirect: bool, event_idx: bool) -> Cost {
    guest.put(DEVICE, [0u8; 16]);
    guest.put(DRIVER, 0u32);
    guest.fill_split(1024, indirect);
    let mut queue = Queue::new(1024).expect("a good size");
    queue.set_size(1024);
    queue.set_event_idx(event_idx);
    queue.try_set_desc_table_address(GuestAddress(DESC)).expect("aligned");
    queue.try_set_avail_ring_address(GuestAddress(DRIVER)).expect("aligned");
    queue.try_set_used_ring_address(GuestAddress(DEVICE)).expect("aligned");
    queue.set_ready(true);
    // SAFETY: the available index is in the guest.
    let avail = unsafe { AtomicU16::from_ptr(guest.addrs().driver.add(2).cast()) };
    let mut heads = [0; BATCH];
    measure(|_| {
        let start = Instant::now();
        for _ in 0..BATCHES {
            avail.store(avail.load(Ordering::Relaxed).wrapping_add(BATCH as u16), Ordering::Release);
            for head in &mut heads {
                let chain = queue.pop_descriptor_chain(&guest.vm).expect("a request");
                *head = chain.head_index();
                for desc in chain {
                    black_box(guest.vm.get_slice(desc.addr(), desc.len() as usize).expect("inside").len());
                }
            }
            for head in &heads {
                queue.add_used(&guest.vm, *head, 4097).expect("a good head");
            }
            black_box(queue.needs_notification(&guest.vm).expect("inside"));
        }
        start.elapsed()
    })
}

fn main() {
    let guest = Guest::new();
    println!("ns a request: 3 descriptors, batches of {BATCH}, device side only; median (best)");
    for event_idx in [false, true] {
        for indirect in [false, true] {
            let of = |packed, tracked| ours(&guest, RingFeatures { indirect, event_idx, packed }, tracked);
            println!(
                "{:<9}{:<10} split {}  packed {}  in-flight tracked: split {}  packed {}  virtio-queue, split {}",
                if indirect { "indirect" } else { "direct" },
                if event_idx { "event_idx" } else { "" },
                of(false, false),
                of(true, false),
                of(false, true),
                of(true, true),
                virtio_queue(&guest, indirect, event_idx),
            );
        }
    }
}
