//! Walks from descriptors to host segments, for both layouts.
//!
//! The rings call it for each request. A walk must never return a segment outside of guest memory,
//! and must always end.
//!
//! There are two walkers. [`Fast`] handles the chains of regular drivers, and gives up without a
//! result on everything else: faults, buffers across a region's end, empty buffers. Its state is a
//! few integers that stay in registers. [`Careful`] then walks the chain again from its first
//! descriptor. Each walker reads a field once, and nothing that the first one read is kept. So a
//! driver gains nothing by writing in between.

use alloc::vec::Vec;

use crate::bits::{low_u16, low_u32};
use crate::desc::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, Head, MAX_QUEUE_SIZE, RawDesc};
use crate::mem::{self, Flat, GuestMemory, RegionHint};

use super::chain::{Chain, ChainFault, Seg};

/// Most descriptors of one chain: a full ring, and one table.
const MAX_DESCS: usize = 2 * MAX_QUEUE_SIZE as usize;

/// Most bytes of an indirect table.
const MAX_TABLE_LEN: usize = MAX_QUEUE_SIZE as usize * DESC_LEN;

/// Most segments of one chain. They are enough if each descriptor crosses one region's end. Without
/// a limit, a descriptor could have as many segments as there are regions.
const MAX_SEGS: usize = 2 * MAX_DESCS;

/// State that a ring keeps between chains to make walking cheap.
#[derive(Debug)]
pub(super) struct Walker {
    /// The id of the memory table that `window` belongs to.
    mem_id: u64,
    /// The region of the last hint.
    window: Flat,
    indirect: bool,
    /// Whether every buffer counts as device-readable, whatever its write flag is.
    all_readable: bool,
    /// A copy of an indirect table that is misaligned or crosses a region's end.
    table: Vec<[u64; 2]>,
}

impl Walker {
    /// Makes a walker. `indirect`: whether indirect descriptors were negotiated.
    pub(super) fn new(indirect: bool) -> Self {
        Self { mem_id: 0, window: Flat::NONE, indirect, all_readable: false, table: Vec::new() }
    }

    /// Ignores the write flags of buffers from now on: all buffers are device-readable.
    pub(super) fn set_all_readable(&mut self) {
        self.all_readable = true;
    }
}

/// The walker of regular chains. None of its methods lets its address escape, so its fields stay in
/// registers.
pub(super) struct Fast<'a> {
    mem: &'a GuestMemory,
    walker: &'a mut Walker,
    /// The walker's window.
    window: Flat,
    /// The chain's segments, with room for [`MAX_DESCS`]. They are written up to `next`.
    segs: *mut Seg,
    next: *mut Seg,
    /// The first device-writable segment, once there is one.
    writable: *mut Seg,
}

impl<'a> Fast<'a> {
    #[inline(always)]
    pub(super) fn new(walker: &'a mut Walker, mem: &'a GuestMemory, chain: &mut Chain) -> Self {
        if chain.segs.capacity() < MAX_DESCS {
            warm_up(&mut chain.segs);
        }
        if walker.mem_id != mem.id() {
            cold();
            walker.mem_id = mem.id();
            walker.window = Flat::NONE;
        }
        let window = walker.window;
        let segs = chain.segs.as_mut_ptr();
        Self { mem, walker, window, segs, next: segs, writable: core::ptr::null_mut() }
    }

    /// Returns the number of segments up to `end`.
    #[inline(always)]
    fn count(&self, end: *mut Seg) -> usize {
        (end.addr() - self.segs.addr()) / size_of::<Seg>()
    }

    /// Ends the walk. `chain`, which is the one given to [`new`](Self::new), then has its segments.
    #[inline(always)]
    pub(super) fn finish(self, chain: &mut Chain, head: Head) {
        chain.head = head;
        chain.fault = None;
        let all_readable = self.writable.is_null() || self.walker.all_readable;
        let writable = if all_readable { self.next } else { self.writable };
        chain.readable = self.count(writable);
        // SAFETY: the segments before `next` were written, and `new` reserved memory for them.
        unsafe { chain.segs.set_len(self.count(self.next)) };
    }

    /// Returns the host address of a range in one region.
    #[inline(always)]
    fn find(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        let found = self.window.find(addr, len.into());
        if found.is_some() {
            return found;
        }
        cold();
        self.window = self.mem.window_of(addr);
        self.walker.window = self.window;
        self.window.find(addr, len.into())
    }

    /// Adds one buffer. Returns false if it is not in one region. A chain has at most [`MAX_DESCS`]
    /// buffers.
    #[inline(always)]
    #[must_use]
    fn buffer(&mut self, addr: u64, len: u32) -> bool {
        let Some(ptr) = self.find(addr, len) else { return false };
        debug_assert!(self.count(self.next) < MAX_DESCS);
        // SAFETY: `new` reserved memory for all descriptors that a chain can have.
        unsafe { self.next.write(Seg { ptr, len }) };
        // SAFETY: the end of the element that was written is inside the reserved memory, or at its
        // end.
        self.next = unsafe { self.next.add(1) };
        true
    }

    /// Returns the host address of an indirect table and its number of descriptors, if the table is
    /// regular.
    #[inline(always)]
    fn table(&mut self, addr: u64, len: u32) -> Option<(*const u8, usize)> {
        let len_ok = (DESC_LEN..=MAX_TABLE_LEN).contains(&(len as usize));
        if !self.walker.indirect || !(len as usize).is_multiple_of(DESC_LEN) || !len_ok {
            return None;
        }
        let ptr = self.find(addr, len)?;
        ptr.addr().is_multiple_of(8).then_some((ptr.cast_const(), len as usize / DESC_LEN))
    }

    /// Walks a split chain. Returns the number of descriptors of the ring that it occupies, or
    /// `None` if it is irregular.
    ///
    /// # Safety
    /// `desc` is readable for `size` descriptors and aligned to 8; `head` is below `size`.
    #[inline(always)]
    pub(super) unsafe fn split(&mut self, desc: *const u8, size: usize, head: u16) -> Option<u16> {
        // SAFETY: the caller promises that `head` is below `size`, and that `desc` is readable for
        // `size` descriptors and aligned to 8.
        let d = unsafe { RawDesc::read(desc.wrapping_add(head as usize * DESC_LEN)) };
        if d.mid() & DESC_F_INDIRECT == 0 {
            // SAFETY: the caller promises that `desc` is readable for `size` descriptors and
            // aligned to 8.
            unsafe { self.split_list(desc, size, d)? };
            // At most `MAX_DESCS` segments.
            return Some(low_u16(self.count(self.next) as u64));
        }
        if d.mid() & DESC_F_NEXT != 0 {
            return None;
        }
        let (table, count) = self.table(d.addr, d.len())?;
        // SAFETY: `Self::table` returned a table of `count` descriptors, of which there is at least
        // one, aligned to 8.
        let first = unsafe { RawDesc::read(table) };
        // SAFETY: `Self::table` returned a table of `count` descriptors, and `first` is its first
        // one.
        unsafe { self.split_list(table, count, first)? };
        Some(1)
    }

    /// Walks a list of split descriptors that starts with `d`, from `table`, which is the ring's or
    /// an indirect one.
    ///
    /// # Safety
    /// `table` is readable for `count` descriptors and aligned to 8.
    #[inline(always)]
    unsafe fn split_list(&mut self, table: *const u8, count: usize, mut d: RawDesc) -> Option<()> {
        // Each descriptor becomes one segment, so this ends a list that loops.
        let last = self.segs.wrapping_add(count);
        // Follows the link of the last descriptor that was added.
        macro_rules! follow {
            () => {
                let index = d.top() as usize;
                if index >= count || self.next == last {
                    return None;
                }
                // SAFETY: `index` is below `count`, and the caller upholds this function's
                // contract.
                d = unsafe { RawDesc::read(table.wrapping_add(index * DESC_LEN)) };
            };
        }
        // There is a loop for each direction, so that one branch decides the kind of a descriptor
        // and whether it is the last one.
        while d.mid() & KIND == DESC_F_NEXT {
            if !self.buffer(d.addr, d.len()) {
                return None;
            }
            follow!();
        }
        if d.mid() & DESC_F_WRITE != 0 {
            self.writable = self.next;
            while d.mid() & KIND == DESC_F_NEXT | DESC_F_WRITE {
                if !self.buffer(d.addr, d.len()) {
                    return None;
                }
                follow!();
            }
            if d.mid() & KIND != DESC_F_WRITE {
                return None;
            }
        } else if d.mid() & KIND != 0 {
            return None;
        }
        self.buffer(d.addr, d.len()).then_some(())
    }

    /// Walks a packed chain that starts with `d`, read from `slot`, within `limit` slots. Returns
    /// its buffer id and the number of its slots, or `None` if it is irregular. `note` is called
    /// with each descriptor.
    ///
    /// # Safety
    /// `desc` is readable for `size` descriptors and aligned to 8; `slot` is below `size`.
    #[inline(always)]
    pub(super) unsafe fn packed(
        &mut self,
        desc: *const u8,
        size: usize,
        mut slot: usize,
        limit: u16,
        mut d: RawDesc,
        mut note: impl FnMut(RawDesc),
    ) -> Option<(u16, u16)> {
        note(d);
        if d.top() & DESC_F_INDIRECT != 0 {
            let whole = d.top() & DESC_F_NEXT == 0 && self.packed_table(d);
            return whole.then(|| (d.mid(), 1));
        }
        let mut left = limit;
        // Moves to the slot after the descriptor that was added.
        macro_rules! follow {
            () => {
                left -= 1;
                if left == 0 {
                    return None;
                }
                slot += 1;
                if slot == size {
                    slot = 0;
                }
                // SAFETY: `slot` is below `size`, and the caller upholds this function's contract.
                d = unsafe { RawDesc::read(desc.add(slot * DESC_LEN)) };
                note(d);
            };
        }
        while d.top() & KIND == DESC_F_NEXT {
            if !self.buffer(d.addr, d.len()) {
                return None;
            }
            follow!();
        }
        if d.top() & DESC_F_WRITE != 0 {
            self.writable = self.next;
            while d.top() & KIND == DESC_F_NEXT | DESC_F_WRITE {
                if !self.buffer(d.addr, d.len()) {
                    return None;
                }
                follow!();
            }
            if d.top() & KIND != DESC_F_WRITE {
                return None;
            }
        } else if d.top() & KIND != 0 {
            return None;
        }
        self.buffer(d.addr, d.len()).then(|| (d.mid(), limit - left + 1))
    }

    /// Adds the buffers of an indirect table. Returns false if the table is irregular.
    #[inline(always)]
    #[must_use]
    fn packed_table(&mut self, d: RawDesc) -> bool {
        let Some((table, count)) = self.table(d.addr, d.len()) else { return false };
        (0..count).all(|index| {
            // SAFETY: `index` is below `count`, the length of the table that `Self::table`
            // returned.
            let d = unsafe { RawDesc::read(table.wrapping_add(index * DESC_LEN)) };
            d.top() & DESC_F_INDIRECT == 0 && self.packed_buffer(d)
        })
    }

    /// Adds one buffer of a packed ring's table. Returns false if it is irregular.
    #[inline(always)]
    #[must_use]
    fn packed_buffer(&mut self, d: RawDesc) -> bool {
        if d.top() & DESC_F_WRITE != 0 {
            if self.writable.is_null() {
                self.writable = self.next;
            }
        } else if !self.writable.is_null() && !self.walker.all_readable {
            return false;
        }
        self.buffer(d.addr, d.len())
    }
}

/// The flags that decide how a split descriptor is handled.
const KIND: u16 = DESC_F_NEXT | DESC_F_WRITE | DESC_F_INDIRECT;

/// Makes room in a chain's segments for any regular chain.
#[cold]
#[inline(never)]
fn warm_up(segs: &mut Vec<Seg>) {
    segs.clear();
    segs.reserve(MAX_DESCS);
}

/// Marks the path that calls it as unlikely.
#[cold]
#[inline(always)]
fn cold() {}

/// The walker of irregular chains. It finds the fault, and continues as far as is safe.
pub(super) struct Careful<'a> {
    chain: &'a mut Chain,
    mem: &'a GuestMemory,
    walker: &'a mut Walker,
    hint: RegionHint,
}

impl<'a> Careful<'a> {
    /// Starts a walk, and clears `chain`.
    pub(super) fn new(walker: &'a mut Walker, mem: &'a GuestMemory, chain: &'a mut Chain) -> Self {
        chain.segs.clear();
        chain.readable = 0;
        chain.fault = None;
        Self { chain, mem, walker, hint: RegionHint::default() }
    }

    /// Records a fault. The first one is kept.
    fn fault(&mut self, fault: ChainFault) {
        self.chain.fault.get_or_insert(fault);
    }

    /// Adds one buffer.
    fn buffer(&mut self, addr: u64, len: u32, write: bool) {
        let Self { chain, mem, hint, .. } = self;
        let before = chain.segs.len();
        if len == 0 {
            // There is nothing to read or write, so the address does not matter.
            return;
        }
        let write = write && !self.walker.all_readable;
        if !write && chain.readable != before {
            return self.fault(ChainFault::Order);
        }
        let mut fits = true;
        let walked = mem.translate_each(hint, addr, u64::from(len), |ptr, piece| {
            // A piece is no longer than `len`, which has 32 bits.
            match chain.segs.len() < MAX_SEGS {
                true => chain.segs.push(Seg { ptr, len: low_u32(piece as u64) }),
                false => fits = false,
            }
        });
        if walked.is_err() || !fits {
            chain.segs.truncate(before);
            self.fault(if fits { ChainFault::Addr } else { ChainFault::TooLong });
        } else if !write {
            chain.readable = chain.segs.len();
        }
    }

    /// Copies an indirect table to where it can be read. Returns its number of descriptors.
    fn table(&mut self, addr: u64, len: u32) -> Option<usize> {
        let count = len as usize / DESC_LEN;
        if !self.walker.indirect || count == 0 || !(len as usize).is_multiple_of(DESC_LEN) {
            self.fault(ChainFault::Indirect);
            return None;
        }
        if count > MAX_QUEUE_SIZE as usize {
            self.fault(ChainFault::TooLong);
            return None;
        }
        let table = &mut self.walker.table;
        table.clear();
        table.resize(count, [0; 2]);
        // SAFETY: the vector owns `count` times 16 bytes, which is `len`, and any bytes are valid
        // elements.
        let bytes = unsafe { core::slice::from_raw_parts_mut(table.as_mut_ptr().cast::<u8>(), len as usize) };
        let mut done = 0;
        let walked = self.mem.translate_each(&mut self.hint, addr, u64::from(len), |ptr, piece| {
            // The pieces add up to `len`.
            let Some(to) = bytes.get_mut(done..done + piece) else { return };
            // SAFETY: `translate_each` gave `piece` bytes of guest memory, which is mapped as
            // `GuestMemory::new` demands.
            unsafe { mem::read(ptr, to) };
            done += piece;
        });
        if walked.is_err() {
            self.fault(ChainFault::Addr);
            return None;
        }
        Some(count)
    }

    /// Returns a descriptor of the copied table, if it has that many.
    fn table_desc(&self, index: usize) -> Option<RawDesc> {
        self.walker.table.get(index).map(|&[addr, word]| RawDesc { addr, word })
    }

    /// Walks a split chain (2.7.5). Returns the number of descriptors of the ring that it occupies.
    ///
    /// # Safety
    /// `desc` is readable for `size` descriptors and aligned to 8; `head` is below `size`.
    pub(super) unsafe fn split(&mut self, desc: *const u8, size: usize, head: u16) -> u16 {
        let mut index = head as usize;
        let mut descs = 0;
        loop {
            // SAFETY: `index` is below `size`, and the caller promises that `desc` is readable for
            // `size` descriptors and aligned to 8.
            let d = unsafe { RawDesc::read(desc.wrapping_add(index * DESC_LEN)) };
            let flags = d.mid();
            descs += 1;
            if flags & DESC_F_INDIRECT == 0 {
                self.buffer(d.addr, d.len(), flags & DESC_F_WRITE != 0);
            } else {
                self.split_table(d.addr, d.len());
                if flags & DESC_F_NEXT != 0 {
                    self.fault(ChainFault::Indirect);
                    break;
                }
            }
            if flags & DESC_F_NEXT == 0 {
                break;
            }
            index = d.top() as usize;
            if index >= size {
                self.fault(ChainFault::Addr);
                break;
            }
            if descs as usize == size {
                self.fault(ChainFault::Loop);
                break;
            }
        }
        descs
    }

    /// Walks a split ring's indirect table (2.7.5.3): a chain of its own, linked by `next`.
    fn split_table(&mut self, addr: u64, len: u32) {
        let Some(count) = self.table(addr, len) else { return };
        let mut index = 0;
        for _ in 0..count {
            let Some(d) = self.table_desc(index) else { return self.fault(ChainFault::Addr) };
            let flags = d.mid();
            if flags & DESC_F_INDIRECT != 0 {
                self.fault(ChainFault::Indirect);
            } else {
                self.buffer(d.addr, d.len(), flags & DESC_F_WRITE != 0);
            }
            if flags & DESC_F_NEXT == 0 {
                return;
            }
            index = d.top() as usize;
        }
        // If the last descriptor that may be read links out of the table, that is the same fault.
        self.fault(if index < count { ChainFault::Loop } else { ChainFault::Addr });
    }

    /// Adds one descriptor of a packed ring. An indirect table (2.8.8) is read in order, and only
    /// the write flags in it count. A table in the middle of a chain is not walked, which bounds
    /// the chain.
    pub(super) fn packed(&mut self, d: RawDesc) {
        let flags = d.top();
        if flags & DESC_F_INDIRECT == 0 {
            return self.buffer(d.addr, d.len(), flags & DESC_F_WRITE != 0);
        }
        if flags & DESC_F_NEXT != 0 {
            return self.fault(ChainFault::Indirect);
        }
        for index in 0..self.table(d.addr, d.len()).unwrap_or(0) {
            let Some(d) = self.table_desc(index) else { return };
            if d.top() & DESC_F_INDIRECT != 0 {
                self.fault(ChainFault::Indirect);
            } else {
                self.buffer(d.addr, d.len(), d.top() & DESC_F_WRITE != 0);
            }
        }
    }
}
