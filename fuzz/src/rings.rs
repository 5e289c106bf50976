//! A driver that sends hostile bytes to the device side of split and packed virtqueues, with
//! in-flight tracking, the dirty log, and restarts.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a fuzz target, in which one block has one purpose")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

use virtio::blk::split_request;
use virtio::inflight::{Inflight, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region, RegionHint};
use virtio::ring::{Chain, DeviceRing, Head, RingAddrs, RingFeatures, UsedLog, ring_sizes};

use crate::bytes::Bytes;

/// A separate block of memory, so that the address sanitizer detects accesses beyond its ends.
struct Block(*mut u8, Layout);

// SAFETY: a block is plain memory. Only the one thread of the fuzz target uses it.
unsafe impl Send for Block {}
// SAFETY: a block is plain memory. Only the one thread of the fuzz target uses it.
unsafe impl Sync for Block {}

impl Block {
    fn new(len: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(len.max(1), 4096).unwrap();
        // SAFETY: the layout is not empty.
        Arc::new(Self(unsafe { alloc_zeroed(layout) }, layout))
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        if at.checked_add(bytes.len()).is_some_and(|end| end <= self.1.size()) {
            // SAFETY: the check above ensures that the range is inside the block.
            unsafe { std::ptr::copy(bytes.as_ptr(), self.0.add(at), bytes.len()) }
        }
    }

    fn u16(&self, at: usize) -> u16 {
        assert!(at + 2 <= self.1.size());
        // SAFETY: the check above ensures that the number is inside the block.
        unsafe { self.0.add(at).cast::<u16>().read_unaligned() }
    }

    fn holds(&self, ptr: *mut u8, len: usize) -> bool {
        let start = self.0.addr();
        ptr.addr() >= start && ptr.addr().checked_add(len).is_some_and(|end| end <= start + self.1.size())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this layout, and nothing else frees it.
        unsafe { dealloc(self.0, self.1) }
    }
}

/// Guest addresses of the data regions: two adjacent ones, and one at the end of the address space.
const DATA: [(u64, usize); 3] = [(0x1_0000, 0x2000), (0x1_2000, 0x1000), (u64::MAX - 0x1000, 0x1000)];

struct Guest {
    blocks: Vec<Arc<Block>>,
    memory: GuestMemory,
    desc: Arc<Block>,
    driver: Arc<Block>,
    device: Arc<Block>,
    inflight: Arc<Block>,
    log: Arc<DirtyLog>,
    size: u16,
    features: RingFeatures,
    // The driver's position in a packed ring.
    slot: u16,
    wrap: bool,
}

impl Guest {
    fn new(size: u16, features: RingFeatures) -> Self {
        let blocks: Vec<_> = DATA.iter().map(|&(_, len)| Block::new(len)).collect();
        let regions = DATA.iter().zip(&blocks).map(|(&(guest_addr, len), block)| Region {
            guest_addr,
            user_addr: guest_addr / 2,
            size: len as u64,
            host: block.0,
            keep: Arc::clone(block) as _,
        });
        // SAFETY: each region keeps its block alive.
        let memory = unsafe { GuestMemory::new(regions.collect()) }.expect("the regions are sound");
        let sizes = ring_sizes(size, features);
        let log = Block::new(64);
        // SAFETY: the log keeps its block alive.
        let log = Arc::new(unsafe { DirtyLog::new(log.0, 64, Arc::clone(&log) as _) });
        Self {
            blocks,
            memory,
            desc: Block::new(sizes.desc),
            driver: Block::new(sizes.driver),
            device: Block::new(sizes.device),
            inflight: Block::new(inflight_queue_size(size, features.packed)),
            log,
            size,
            features,
            slot: 0,
            wrap: true,
        }
    }

    fn ring(&self, base: u32) -> Option<DeviceRing> {
        let addrs = RingAddrs { desc: self.desc.0, driver: self.driver.0, device: self.device.0 };
        // SAFETY: the areas have the lengths of `ring_sizes` and outlive the ring.
        unsafe { DeviceRing::new(self.size, self.features, addrs, base) }.ok()
    }

    fn track(&self, ring: &mut DeviceRing) -> Option<Vec<virtio::inflight::Replay>> {
        let block = &self.inflight;
        // SAFETY: only this queue uses the block, and the region keeps it alive.
        let region = unsafe {
            Inflight::new(block.0, block.1.size(), self.size, self.features.packed, Arc::clone(block) as _)
        };
        ring.set_inflight(region.ok()?).ok()
    }

    fn address(&self, b: &mut Bytes<'_>) -> u64 {
        match b.u8() % 8 {
            0 => b.u64(),
            1 => u64::MAX - u64::from(b.u8()),
            kind => {
                let (start, len) = DATA[usize::from(kind) % 3];
                start.wrapping_add(b.below(len + 16) as u64)
            }
        }
    }

    /// Makes a descriptor that is nearly valid.
    fn describe(&mut self, b: &mut Bytes<'_>) {
        let addr = self.address(b);
        let len = match b.u8() % 6 {
            0 => b.u32(),
            1 => 0,
            2 => 1,
            3 => 16,
            _ => u32::from(b.u16() % 0x1100),
        };
        let choice = b.u8();
        let mut flags = u16::from(choice & 7);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        if self.features.packed {
            let right = if self.wrap { 0x80 } else { 0x8000 };
            flags |= if choice & 0xF8 == 0xF8 { b.u16() } else { right };
            bytes[12..14].copy_from_slice(&(b.u8() as u16 % self.size.saturating_add(2)).to_le_bytes());
            bytes[14..].copy_from_slice(&flags.to_le_bytes());
            self.desc.put(usize::from(self.slot) * 16, &bytes);
            self.slot += 1;
            if self.slot == self.size {
                (self.slot, self.wrap) = (0, !self.wrap);
            }
        } else {
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            let next = if choice & 0x80 != 0 { b.u16() } else { u16::from(b.u8()) % self.size };
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            let at = b.below(usize::from(self.size));
            self.desc.put(at * 16, &bytes);
        }
    }

    /// Makes the descriptors of an indirect table, in data memory.
    fn table(&mut self, b: &mut Bytes<'_>) {
        let block = b.below(3);
        let at = b.below(64) * 16;
        for entry in 0..b.below(8) {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&self.address(b).to_le_bytes());
            bytes[8..12].copy_from_slice(&u32::from(b.u16() % 600).to_le_bytes());
            bytes[12..14].copy_from_slice(&u16::from(b.u8() & 7).to_le_bytes());
            bytes[14..].copy_from_slice(&u16::from(b.u8() & 15).to_le_bytes());
            self.blocks[block].put(at + entry * 16, &bytes);
        }
    }

    /// Split: makes descriptors available. Packed: nothing to do, because the flags already did it.
    fn offer(&mut self, b: &mut Bytes<'_>) {
        if self.features.packed {
            return;
        }
        let idx = self.driver.u16(2);
        let n = b.u8();
        let count = if n == 255 { b.u16() } else { u16::from(n % 5) };
        for i in 0..count.min(8) {
            let slot = usize::from(idx.wrapping_add(i) % self.size);
            let head = u16::from(b.u8());
            let head = if head == 255 { b.u16() } else { head % self.size };
            self.driver.put(4 + 2 * slot, &head.to_le_bytes());
        }
        self.driver.put(2, &idx.wrapping_add(count).to_le_bytes());
    }

    /// Checks the properties of a popped chain, which must hold for any contents of the ring.
    fn check(&self, chain: &Chain, data: &mut Vec<virtio::ring::Seg>) {
        assert!(chain.readable <= chain.segs.len());
        for (i, seg) in chain.segs.iter().enumerate() {
            if seg.len == 0 {
                continue;
            }
            let len = seg.len as usize;
            assert!(
                self.blocks.iter().any(|b| b.holds(seg.ptr, len)),
                "segment {i} outside of guest memory: {seg:?}"
            );
            // SAFETY: the assertion above ensures that the segment is inside a block.
            unsafe {
                let last = seg.ptr.add(len - 1).read_volatile();
                if i >= chain.readable {
                    seg.ptr.add(len - 1).write_volatile(last);
                }
            }
        }
        match split_request(chain, data) {
            Ok(request) => {
                assert!(chain.fault.is_none());
                assert_eq!(data.iter().map(|s| u64::from(s.len)).sum::<u64>(), request.data_len);
                assert!(self.blocks.iter().any(|b| b.holds(request.status, 1)));
            }
            Err(e) => {
                if let Some(status) = e.status {
                    assert!(self.blocks.iter().any(|b| b.holds(status, 1)));
                }
            }
        }
    }
}

/// The fuzz target.
pub fn rings(data: &[u8]) {
    let mut b = Bytes(data);
    let bits = b.u8();
    let features = RingFeatures { indirect: bits & 1 != 0, event_idx: bits & 2 != 0, packed: bits & 4 != 0 };
    let size = match b.u8() % 4 {
        0 => 8,
        1 => 4,
        2 => b.u16() % 1026,
        _ => 1 << (b.u8() % 11),
    };
    if size == 0 || size > 1024 || (!features.packed && !size.is_power_of_two()) {
        return;
    }
    let mut guest = Guest::new(size, features);
    let base = if bits & 8 != 0 { b.u32() } else { 0 };
    let Some(mut ring) = guest.ring(base) else { return };
    if !features.packed {
        guest.driver.put(2, &(base as u16).to_le_bytes());
        guest.device.put(2, &(base as u16).to_le_bytes());
    }
    let tracked = bits & 16 != 0;
    if tracked && guest.track(&mut ring).is_none() {
        return;
    }
    if bits & 32 != 0 {
        let log = UsedLog { log: Arc::clone(&guest.log), device_addr: b.u64(), desc_addr: b.u64() };
        ring.set_used_log(Some(log));
    }
    let mut chain = Chain::new();
    let mut segs = Vec::new();
    let mut taken: Vec<Head> = Vec::new();
    let mut hint = RegionHint::default();
    while !b.is_empty() {
        match b.u8() % 16 {
            0..=3 => guest.describe(&mut b),
            4 => guest.table(&mut b),
            5 | 6 => guest.offer(&mut b),
            7..=9 => {
                for _ in 0..=b.u8() % 4 {
                    match ring.pop(&guest.memory, &mut chain) {
                        Ok(true) => {
                            guest.check(&chain, &mut segs);
                            taken.push(chain.head);
                        }
                        Ok(false) => break,
                        Err(_) => return,
                    }
                }
            }
            10 if !taken.is_empty() => {
                let head = taken.swap_remove(b.below(taken.len()));
                ring.push(head, b.u32());
            }
            11 => {
                let _ = ring.publish();
            }
            12 => match b.u8() % 4 {
                0 => ring.disable_kick(),
                1 => {
                    let _ = ring.enable_kick();
                }
                2 => {
                    let _ = ring.enable_kick_after(b.u16() % size + 1);
                }
                _ => {
                    let _ = (ring.has_avail(), ring.base(), ring.used_index());
                }
            },
            13 => {
                let (addr, len) = (guest.address(&mut b), u64::from(b.u16()));
                if let Some(ptr) = guest.memory.translate(&mut hint, addr, len) {
                    assert!(len == 0 || guest.blocks.iter().any(|k| k.holds(ptr, len as usize)));
                }
                let _ = guest.memory.translate_each(&mut hint, addr, len, |ptr, n| {
                    assert!(guest.blocks.iter().any(|k| k.holds(ptr, n)));
                });
                guest.log.mark(addr, len);
            }
            14 => {
                // Unmodified bytes of the input, anywhere in the ring.
                let area = [&guest.desc, &guest.driver, &guest.device, &guest.inflight][b.below(4)];
                let at = b.below(area.1.size());
                let n = b.below(9);
                area.put(at, b.take(n));
            }
            15 => {
                // The daemon was killed. Another one continues.
                let base = ring.base();
                let Some(next) = guest.ring(base) else { return };
                ring = next;
                if !tracked {
                    taken.clear();
                    continue;
                }
                let Some(replays) = guest.track(&mut ring) else { return };
                assert!(replays.len() <= usize::from(size));
                taken.clear();
                for replay in &replays {
                    if ring.replay(&guest.memory, replay, &mut chain).is_err() {
                        return;
                    }
                    guest.check(&chain, &mut segs);
                    taken.push(chain.head);
                }
            }
            _ => {}
        }
    }
}
