//! Malformed chains: random descriptors, tables and headers, most of them nearly valid.
//!
//! The fuzz target `rings` uses the same method. A device detects a completely random chain at its
//! first descriptor. So each chain is a valid request with some errors. A chain names writable
//! memory only in the arena, unless it aims at the rings.

use crate::driver::{Area, request};
use crate::rng::Draws;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// Bytes at the start of the arena that are for tables. The rest is for data.
const TABLES: usize = 64 << 10;

/// A descriptor with the fields of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Desc {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Desc {
    pub(super) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// How a chain is put on the ring, and what the device may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offer {
    /// Once: one answer, or a broken ring.
    Once,
    /// The same head this many times: at most as many answers.
    Again(u16),
    /// The available index moves by this number, over entries with any contents.
    Jump(u16),
    /// Once, but the device may write to the ring itself.
    AtTheRing,
}

/// A chain, in the ring's descriptor table.
pub(super) struct Draft {
    pub(super) descs: Vec<Desc>,
    pub(super) head: u16,
    pub(super) offer: Offer,
    /// The expected place of the status byte, if it is in the arena.
    pub(super) status: Option<u64>,
    /// Whether header and status are valid. Then an answer has a status.
    pub(super) has_status: bool,
}

/// The source of the chains.
pub(super) struct Source<'a> {
    pub(super) rng: Draws,
    /// Memory for tables, headers and data.
    pub(super) arena: &'a Area,
    /// Guest addresses of the ring's parts.
    pub(super) rings: [u64; 3],
    pub(super) size: u16,
    pub(super) capacity: u64,
    pub(super) indirect: bool,
    /// Whether the descriptors of this chain are valid. The request may still be malformed.
    pub(super) valid: bool,
}

impl Source<'_> {
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.below(of.len() as u64) as usize]
    }

    /// Returns a random data address: usually in the arena, otherwise at its end, in no region, or
    /// in a range that a driver may not name.
    pub(super) fn address(&mut self) -> u64 {
        // Long segments may reach into the upper half.
        let data = self.arena.len() / 2 - TABLES;
        let inside = self.arena.guest() + (TABLES as u64) + self.rng.below(data as u64);
        match if self.valid { 6 + self.rng.below(26) } else { self.rng.below(32) } {
            0 => self.rng.draw(),
            1 => u64::MAX - self.rng.below(300),
            2 => 0xffff_8880_0000_0000 + self.rng.below(1 << 30),
            3 => self.rng.below(1 << 20),
            4 => self.arena.guest() + self.arena.len() as u64 - self.rng.below(600),
            5 => self.arena.guest() + self.arena.len() as u64,
            6..=15 => inside & !511,
            _ => inside,
        }
    }

    pub(super) fn len(&mut self) -> u32 {
        match if self.valid { 3 + self.rng.below(21) } else { self.rng.below(24) } {
            0 => 0,
            1 => self.rng.draw() as u32,
            2 => self.pick(&[u32::MAX, 1 << 31, 0x7fff_ffff, 0xffff_f000, 1 << 30]),
            3 => self.pick(&[1 << 20, (1 << 20) - 1, 1 << 19]),
            4..=6 => 1 + self.rng.below(1025) as u32,
            7 => 1,
            _ => 512 * (1 + self.rng.below(16)) as u32,
        }
    }

    fn kind(&mut self) -> u32 {
        match self.rng.below(16) {
            0 => self.rng.draw() as u32,
            1 => self.rng.below(32) as u32,
            2 | 3 => request::FLUSH,
            4 => request::GET_ID,
            5 => request::DISCARD,
            6 => request::WRITE_ZEROES,
            7..=10 => request::OUT,
            _ => request::IN,
        }
    }

    fn sector(&mut self) -> u64 {
        match self.rng.below(10) {
            0 => self.rng.draw(),
            1 => u64::MAX - self.rng.below(4096),
            2 => (1 << 55) - self.rng.below(4),
            3 | 4 => self.capacity.saturating_sub(self.rng.below(40)),
            5 => self.capacity + self.rng.below(40),
            _ => self.rng.below(self.capacity.max(1)),
        }
    }

    /// Puts a header at a random place of the arena. The bytes after it are ranges for DISCARD.
    fn header(&mut self) -> u64 {
        let at = TABLES + self.rng.below((self.arena.len() - TABLES - 512) as u64) as usize;
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&self.kind().to_le_bytes());
        bytes[8..].copy_from_slice(&self.sector().to_le_bytes());
        self.arena.write(at, &bytes);
        for range in 0..8 {
            let count = if self.rng.one_in(4) { self.rng.draw() as u32 } else { self.rng.below(64) as u32 };
            let flags = if self.rng.one_in(4) { self.rng.draw() as u32 } else { self.rng.below(2) as u32 };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&self.sector().to_le_bytes());
            bytes[8..12].copy_from_slice(&count.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            self.arena.write(at + 16 + 16 * range, &bytes);
        }
        self.arena.guest() + at as u64
    }

    /// Makes a nearly valid request of header, data and status, as a list.
    fn request(&mut self, most: usize) -> (Vec<Desc>, Option<u64>, bool) {
        let header = self.header();
        let writes = !self.rng.one_in(3);
        let count = match self.rng.below(12) {
            0 => 0,
            1 => self.rng.below(most as u64) as usize,
            2 => most,
            _ => 1 + self.rng.below(6) as usize,
        };
        let mut sound = self.valid;
        let header_len = if self.rng.one_in(12) { self.rng.below(200) as u32 } else { 16 };
        let mut descs = vec![Desc { addr: header, len: header_len, flags: 0, next: 0 }];
        for _ in 0..count {
            let flags = if writes != (!self.valid && self.rng.one_in(40)) { WRITE } else { 0 };
            let (addr, len) = (self.address(), self.len());
            descs.push(Desc { addr, len, flags, next: 0 });
        }
        let mut status = None;
        if !self.rng.one_in(12) {
            let flags = if self.rng.one_in(16) { 0 } else { WRITE };
            let addr = self.address();
            let len = if self.rng.one_in(8) { u32::from(self.valid) + self.rng.below(40) as u32 } else { 1 };
            descs.push(Desc { addr, len, flags, next: 0 });
            let last = addr.wrapping_add(u64::from(len.max(1)) - 1);
            let offset = last.wrapping_sub(self.arena.guest());
            status = (flags == WRITE && len > 0 && offset < self.arena.len() as u64).then_some(last);
        }
        sound &= header_len >= 16 && status.is_some();
        if !self.valid && self.rng.one_in(12) {
            let (a, b) = (self.rng.below(descs.len() as u64), self.rng.below(descs.len() as u64));
            descs.swap(a as usize, b as usize);
        }
        (descs, status, sound)
    }

    /// Makes an error in a list of linked descriptors.
    fn damage(&mut self, descs: &mut [Desc], size: u16) {
        let at = self.rng.below(descs.len() as u64) as usize;
        match self.rng.below(14) {
            0 => descs[at].next = self.rng.draw() as u16,
            1 => descs[at].next = size,
            2 => descs[at].next = at as u16,
            3 => (descs[at].next, descs[at].flags) = (0, descs[at].flags | NEXT),
            4 => descs[at].flags ^= NEXT,
            5 => descs[at].flags = self.rng.draw() as u16,
            6 => descs[at].flags |= INDIRECT,
            7 => descs[at].addr = self.address(),
            8 => descs[at].len = self.len(),
            _ => {}
        }
    }

    /// Puts a list into the arena as an indirect table, with one descriptor for it. It may have an
    /// error.
    fn as_table(&mut self, descs: &[Desc]) -> Vec<Desc> {
        let room = TABLES / 16 - descs.len();
        let at = self.rng.below(room as u64) as usize * 16 + if self.rng.one_in(16) { 8 } else { 0 };
        let at = if self.valid { at & !15 } else { at.min(TABLES - 16 * descs.len()) };
        for (i, desc) in descs.iter().enumerate() {
            self.arena.write(at + 16 * i, &desc.bytes());
        }
        let whole = (descs.len() * 16) as u32;
        let len = match if self.valid { 4 } else { self.rng.below(16) } {
            0 => self.len(),
            1 => 0,
            2 => whole - 1,
            3 => whole + 16 * self.rng.below(2000) as u32,
            _ => whole,
        };
        let addr =
            if !self.valid && self.rng.one_in(24) { self.address() } else { self.arena.guest() + at as u64 };
        let flags = match if self.valid { 2 } else { self.rng.below(16) } {
            0 => INDIRECT | WRITE,
            1 => INDIRECT | NEXT,
            _ => INDIRECT,
        };
        vec![Desc { addr, len, flags, next: 1 }]
    }

    /// Makes the next chain.
    pub(super) fn draft(&mut self) -> Draft {
        self.valid = !self.rng.one_in(3);
        let most = if self.rng.one_in(8) { usize::from(self.size).min(1000) } else { 30 };
        let table = self.rng.one_in(2) && (self.indirect || !self.valid && self.rng.one_in(8));
        let fits = if table { most } else { most.min(usize::from(self.size)).saturating_sub(2) };
        let (mut descs, status, has_status) = self.request(fits);
        let last = descs.len() - 1;
        for (i, desc) in descs[..last].iter_mut().enumerate() {
            desc.next = i as u16 + 1;
            desc.flags |= NEXT;
        }
        let limit = if table { descs.len() as u16 } else { self.size };
        if !self.valid {
            self.damage(&mut descs, limit);
        }
        if table {
            descs = self.as_table(&descs);
        }
        descs.truncate(usize::from(self.size));
        let mut offer = match if self.valid { 39 } else { self.rng.below(20) } {
            0 => Offer::Again(2 + self.rng.below(6) as u16),
            1 => Offer::Jump(self.rng.below(2 * u64::from(self.size) + 2) as u16),
            2 => Offer::Jump(self.rng.draw() as u16),
            3 => Offer::AtTheRing,
            _ => Offer::Once,
        };
        if offer == Offer::AtTheRing {
            let at = self.rng.below(descs.len() as u64) as usize;
            descs[at].addr = self.pick(&self.rings.clone()) + 16 * self.rng.below(8);
        }
        let head = match if self.valid { 59 } else { self.rng.below(30) } {
            0 => self.size,
            1 => self.rng.draw() as u16,
            _ => 0,
        };
        // Another head refers to previous contents: any chain, possibly one that aims at the ring.
        if head != 0 && offer == Offer::Once {
            offer = Offer::AtTheRing;
        }
        Draft { descs, head, offer, status, has_status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{DEFAULT_BASE, Memory, RegionSpec};
    use crate::rng::Rng;

    #[test]
    fn chains_are_of_every_sort_and_the_same_for_a_seed() {
        let memory = Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size: 1 << 20 }]).unwrap();
        let arena = memory.alloc(1 << 20, 4096).unwrap();
        let corpus: Vec<u8> = (0..50_000u32).map(|i| ((i * i) >> 5) as u8).collect();
        let draw = |seed| {
            let bytes = if seed == 8 { corpus.clone() } else { vec![] };
            let mut source = Source {
                rng: Draws::new(bytes.clone(), Rng::new(seed, 0)),
                arena: &arena,
                rings: [0x1000, 0x2000, 0x3000],
                size: 64,
                capacity: 2048,
                indirect: true,
                valid: false,
            };
            (0..3000).map(|_| source.draft()).collect::<Vec<_>>()
        };
        assert!(draw(8).iter().map(|c| &c.head).ne(draw(7).iter().map(|c| &c.head)), "a corpus is used");
        let chains = draw(7);
        let again = draw(7);
        assert!(chains.iter().zip(&again).all(|(a, b)| {
            a.head == b.head
                && a.offer == b.offer
                && a.descs.iter().map(Desc::bytes).eq(b.descs.iter().map(Desc::bytes))
        }));
        assert!(chains.iter().all(|c| !c.descs.is_empty() && c.descs.len() <= 64));
        let share = |f: fn(&Draft) -> bool| chains.iter().filter(|c| f(c)).count();
        assert!(share(|c| c.offer == Offer::Once) > 2000);
        assert!(share(|c| matches!(c.offer, Offer::Again(_) | Offer::Jump(_))) > 50);
        assert!(share(|c| c.descs[0].flags & INDIRECT != 0) > 500);
        assert!(share(|c| c.status.is_none()) > 200 && share(|c| c.has_status) > 1000);
    }
}
