//! The order of blocks, and whether each is read or written.

use crate::rng::Rng;

/// The access pattern, with fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Sequential reads and writes mixed.
    Rw,
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Random reads and writes mixed.
    Randrw,
}

impl Rw {
    /// All patterns.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Rw, Self::Randread, Self::Randwrite, Self::Randrw];

    /// Returns whether blocks are random.
    pub fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randrw)
    }

    /// Returns whether the pattern writes.
    pub fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::Randread)
    }

    /// Returns the share of reads, in units of 2^-32. `percent` applies to the mixed patterns.
    fn read_share(self, percent: u8) -> u64 {
        match self {
            Self::Read | Self::Randread => 1 << 32,
            Self::Write | Self::Randwrite => 0,
            Self::Rw | Self::Randrw => (u64::from(percent) << 32) / 100,
        }
    }

    /// Returns the name as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Rw => "rw",
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Randrw => "randrw",
        }
    }
}

/// The pattern of one queue over blocks `first..first + count`.
#[derive(Clone, Debug)]
pub struct Pattern {
    first: u64,
    count: u64,
    cursor: u64,
    random: bool,
    read_share: u64,
    rng: Rng,
}

impl Pattern {
    /// Makes a pattern. `count` is not 0.
    pub fn new(rw: Rw, read_percent: u8, first: u64, count: u64, rng: Rng) -> Self {
        assert!(count > 0, "a pattern over no blocks");
        Self { first, count, cursor: 0, random: rw.is_random(), read_share: rw.read_share(read_percent), rng }
    }

    /// Returns the next request: its block, and whether it is a read.
    #[inline]
    pub fn advance(&mut self) -> (u64, bool) {
        let is_read = match self.read_share {
            0 => false,
            share if share == 1 << 32 => true,
            share => (self.rng.draw() >> 32) < share,
        };
        let offset = if self.random {
            // The high half of the product is uniform over the range, and needs no division.
            ((u128::from(self.rng.draw()) * u128::from(self.count)) >> 64) as u64
        } else {
            let at = self.cursor;
            self.cursor = if at + 1 == self.count { 0 } else { at + 1 };
            at
        };
        (self.first + offset, is_read)
    }

    /// Returns the block after `block`. The first block follows the last.
    #[inline]
    pub fn after(&self, block: u64) -> u64 {
        if block + 1 == self.first + self.count { self.first } else { block + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_goes_around() {
        let mut p = Pattern::new(Rw::Write, 50, 10, 3, Rng::new(1, 0));
        let blocks: Vec<_> = (0..4).map(|_| p.advance()).collect();
        assert_eq!(blocks, [(10, false), (11, false), (12, false), (10, false)]);
        assert_eq!((p.after(11), p.after(12)), (12, 10));
    }

    #[test]
    fn random_stays_within_and_mixes_as_asked() {
        let mut p = Pattern::new(Rw::Randrw, 70, 100, 50, Rng::new(9, 2));
        let mut seen = [0u32; 50];
        let reads = (0..50_000).filter(|_| {
            let (block, is_read) = p.advance();
            seen[(block - 100) as usize] += 1;
            is_read
        });
        let reads = reads.count();
        assert!((34_000..36_000).contains(&reads), "{reads}");
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }
}
