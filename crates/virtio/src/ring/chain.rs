//! One request's buffers: walking descriptors into host segments, shared by both layouts.
//!
//! Called by the rings for each request. What must never happen: a segment outside of guest memory.

use crate::mem::{Flat, GuestMemory, Hit};
use crate::raw;

use super::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, MAX_QUEUE_SIZE};

/// Segments of one chain at most. A chain has up to twice [`MAX_QUEUE_SIZE`] descriptors (ring and one table); this
/// allows each to run over one region's end. Without a limit, a descriptor could be as many segments as there are
/// regions.
const MAX_SEGS: usize = 4 * MAX_QUEUE_SIZE as usize;

/// A piece of guest memory in this process; never empty when it comes from a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seg {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: u32,
}

// SAFETY: a segment is an address and a length; whoever follows it answers for the thread that does so, and for the
// memory table that it came from being alive.
unsafe impl Send for Seg {}

/// What a request is known by when it is given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Split: index of the first descriptor. Packed: buffer id.
    pub id: u16,
    /// Descriptors of the ring that the chain takes up; an indirect table counts as the one that refers to it.
    pub descs: u16,
}

/// What is wrong with one chain. The ring itself is sound and the request can be answered, if a status byte is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer, or the descriptor that is to come next, is out of bounds.
    #[error("a buffer or descriptor lies outside of guest memory or table")]
    Addr,
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("a device-readable buffer follows a device-writable one")]
    Order,
    /// More descriptors than there are: the chain bites its tail.
    #[error("the descriptor chain loops")]
    Loop,
    /// More descriptors or segments than a request may have.
    #[error("the descriptor chain is too long")]
    TooLong,
    /// An indirect table that is nested, not negotiated, chained on, or of a bad length (2.7.5.3.1).
    #[error("a bad indirect descriptor")]
    Indirect,
}

/// A request's buffers. Scratch that is used again for each request: it allocates only until it is warm.
#[derive(Debug, Default)]
pub struct Chain {
    /// Who the request is.
    pub head: Head,
    /// Device-readable segments first, then device-writable ones; in order.
    pub segs: Vec<Seg>,
    /// `segs[..readable]` are device-readable.
    pub readable: usize,
    /// The first thing that was wrong. The walk goes on as far as is safe, so that the status byte may still be found;
    /// buffers that are wrong are left out.
    pub fault: Option<ChainFault>,
}

impl Chain {
    /// An empty chain.
    pub fn new() -> Self {
        Self::default()
    }
}

/// One descriptor as it was read: once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawDesc {
    pub(crate) addr: u64,
    /// `len`, then two 16-bit fields: split `flags`, `next`; packed `id`, `flags`.
    pub(crate) word: u64,
}

impl RawDesc {
    #[inline(always)]
    pub(crate) fn len(self) -> u32 {
        self.word as u32
    }

    /// Bits 32 to 47: split flags, packed buffer id.
    #[inline(always)]
    pub(crate) fn mid(self) -> u16 {
        (self.word >> 32) as u16
    }

    /// Bits 48 to 63: split next, packed flags.
    #[inline(always)]
    pub(crate) fn top(self) -> u16 {
        (self.word >> 48) as u16
    }

    /// Reads a descriptor, each byte once.
    ///
    /// # Safety
    /// `ptr` is readable for [`DESC_LEN`] bytes and aligned to 8.
    #[inline(always)]
    pub(crate) unsafe fn read(ptr: *const u8) -> Self {
        // SAFETY: the caller's.
        unsafe { Self { addr: raw::get_u64(ptr), word: raw::get_u64(ptr.add(8)) } }
    }
}

/// What a ring keeps between chains so that walking is cheap.
#[derive(Debug, Default)]
pub(super) struct Walker {
    hit: Hit,
    /// A copy of an indirect table that is misaligned or runs over a region's end.
    table: Vec<u64>,
    indirect: bool,
}

impl Walker {
    /// `indirect`: whether indirect descriptors were negotiated.
    pub(super) fn new(indirect: bool) -> Self {
        Self { indirect, ..Self::default() }
    }
}

/// A chain being gathered.
pub(super) struct Gather<'a> {
    pub(super) chain: &'a mut Chain,
    mem: &'a GuestMemory,
    walker: &'a mut Walker,
    /// The region of the last hit, kept in registers.
    window: Flat,
}

impl<'a> Gather<'a> {
    /// Starts afresh: `chain` is cleared.
    #[inline(always)]
    pub(super) fn new(walker: &'a mut Walker, mem: &'a GuestMemory, chain: &'a mut Chain) -> Self {
        chain.segs.clear();
        chain.readable = 0;
        chain.fault = None;
        let window = mem.window(walker.hit);
        Self { chain, mem, walker, window }
    }

    /// Notes what is wrong; the first fault stays.
    #[cold]
    pub(super) fn fault(&mut self, fault: ChainFault) {
        self.chain.fault.get_or_insert(fault);
    }

    /// Adds one buffer.
    #[inline(always)]
    pub(super) fn buffer(&mut self, addr: u64, len: u32, write: bool) {
        if len == 0 {
            // Nothing to read or write, so the address does not matter either.
            return;
        }
        let ordered = write || self.chain.readable == self.chain.segs.len();
        match self.window.find(addr, u64::from(len)) {
            Some(ptr) if ordered => {
                self.chain.segs.push(Seg { ptr, len });
                self.chain.readable += usize::from(!write);
            }
            _ => self.buffer_slow(addr, len, write),
        }
    }

    /// Another region, several of them, or a fault.
    #[cold]
    #[inline(never)]
    fn buffer_slow(&mut self, addr: u64, len: u32, write: bool) {
        let chain = &mut *self.chain;
        if !write && chain.readable != chain.segs.len() {
            return self.fault(ChainFault::Order);
        }
        let before = chain.segs.len();
        let mut fits = true;
        let walked = self.mem.translate_each(&mut self.walker.hit, addr, u64::from(len), |ptr, piece| {
            // A piece is no longer than `len`, which is 32 bits wide.
            match chain.segs.len() < MAX_SEGS {
                true => chain.segs.push(Seg { ptr, len: piece as u32 }),
                false => fits = false,
            }
        });
        self.window = self.mem.window(self.walker.hit);
        if walked.is_err() || !fits {
            chain.segs.truncate(before);
            let fault = if fits { ChainFault::Addr } else { ChainFault::TooLong };
            self.fault(fault);
        } else if !write {
            chain.readable = chain.segs.len();
        }
    }

    /// Finds the table that an indirect descriptor refers to: where it can be read, and how many descriptors it has.
    fn table(&mut self, addr: u64, len: u32) -> Option<(*const u8, usize)> {
        let count = len as usize / DESC_LEN;
        if !self.walker.indirect || count == 0 || !(len as usize).is_multiple_of(DESC_LEN) {
            self.fault(ChainFault::Indirect);
            return None;
        }
        if count > MAX_QUEUE_SIZE as usize {
            self.fault(ChainFault::TooLong);
            return None;
        }
        let in_place = self.window.find(addr, u64::from(len));
        if let Some(ptr) = in_place.or_else(|| self.mem.translate(&mut self.walker.hit, addr, u64::from(len)))
        {
            self.window = self.mem.window(self.walker.hit);
            if ptr.addr().is_multiple_of(8) {
                return Some((ptr, count));
            }
        }
        self.copy_table(addr, len).then(|| (self.walker.table.as_ptr().cast(), count))
    }

    /// Copies a table that cannot be read where it lies.
    #[cold]
    fn copy_table(&mut self, addr: u64, len: u32) -> bool {
        let Walker { hit, table, .. } = &mut *self.walker;
        table.clear();
        table.resize(len as usize / 8, 0);
        // SAFETY: the vector owns `len` bytes (`len` is a multiple of 16), and any bytes make a u64.
        let bytes = unsafe { std::slice::from_raw_parts_mut(table.as_mut_ptr().cast::<u8>(), len as usize) };
        let mut done = 0;
        let walked = self.mem.translate_each(hit, addr, u64::from(len), |ptr, piece| {
            // SAFETY: `translate_each` gave `piece` bytes of guest memory, mapped as `GuestMemory::new` demands.
            unsafe { raw::copy_out(ptr, &mut bytes[done..done + piece]) };
            done += piece;
        });
        self.window = self.mem.window(*hit);
        if walked.is_err() {
            self.fault(ChainFault::Addr);
        }
        walked.is_ok()
    }

    /// Walks a split ring's indirect table (2.7.5.3): a chain of its own, linked by `next`.
    #[inline(never)]
    pub(super) fn indirect_split(&mut self, addr: u64, len: u32) {
        let Some((table, count)) = self.table(addr, len) else { return };
        let mut index = 0;
        for _ in 0..count {
            // SAFETY: `index` is below `count`, and the table's `count` descriptors are readable and aligned to 8.
            let d = unsafe { RawDesc::read(table.add(index * DESC_LEN)) };
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
            if index >= count {
                return self.fault(ChainFault::Addr);
            }
        }
        self.fault(ChainFault::Loop);
    }

    /// Walks a packed ring's indirect table (2.8.8): all of it, in order. Only the write flag means anything.
    #[inline(never)]
    pub(super) fn indirect_packed(&mut self, addr: u64, len: u32) {
        let Some((table, count)) = self.table(addr, len) else { return };
        for index in 0..count {
            // SAFETY: as in `indirect_split`.
            let d = unsafe { RawDesc::read(table.add(index * DESC_LEN)) };
            if d.top() & DESC_F_INDIRECT != 0 {
                self.fault(ChainFault::Indirect);
            } else {
                self.buffer(d.addr, d.len(), d.top() & DESC_F_WRITE != 0);
            }
        }
    }
}
