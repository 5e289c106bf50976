//! The contents of written sectors, and the contents that a read may return.
//!
//! Each 512-byte sector contains its number, the write that wrote it (generation) and the seed. The
//! rest is filled with numbers that follow from these three, and a checksum is at the end. So a
//! sector can be identified at a wrong place, and compared completely.
//!
//! A block has at most one write in flight. A read that runs at the same time as writes may return
//! any of their generations. It may also return words of several, because a sector need not be
//! written atomically. Anything else is an error.

mod state;

use std::fmt;

use virtio::mem;

pub use self::state::{Partition, StateFile};

/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// 64-bit words of a sector.
const WORDS: usize = SECTOR / 8;
/// The first word of every sector that this program writes.
const MAGIC: u64 = u64::from_le_bytes(*b"vshuntV1");

/// The identity of a sector's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Absolute sector number.
    pub sector: u64,
    /// Number of the write of its block, from 1.
    pub generation: u32,
    /// The run's seed.
    pub seed: u32,
}

impl Stamp {
    /// Returns the sector's contents.
    fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[0] = MAGIC;
        words[1] = self.sector;
        words[2] = u64::from(self.generation) | u64::from(self.seed) << 32;
        let mut state = mix(words[1] ^ words[2].rotate_left(17));
        for word in &mut words[3..WORDS - 1] {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            *word = state ^ state >> 29;
        }
        words[WORDS - 1] = checksum(&words[..WORDS - 1]);
        words
    }
}

/// The finalizer of splitmix64: every bit of the input affects every bit of the output.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn checksum(words: &[u64]) -> u64 {
    words
        .iter()
        .fold(0x9e37_79b9_7f4a_7c15, |sum, &w| (sum.rotate_left(5) ^ w).wrapping_mul(0x2545_f491_4f6c_dd1d))
}

/// Writes the contents of the sectors from `stamp` on to `at`.
///
/// # Safety
/// `at..at + 512 * sectors` is writable. Other threads and the device may read it at the same time.
pub unsafe fn write_sectors(at: *mut u8, stamp: Stamp, sectors: usize) {
    for i in 0..sectors {
        let words = Stamp { sector: stamp.sector + i as u64, ..stamp }.words();
        // SAFETY: the caller promises that `512 * sectors` bytes are writable, and `i` is below
        // `sectors`.
        unsafe { mem::copy(words.as_ptr().cast(), at.wrapping_add(i * SECTOR), SECTOR) };
    }
}

/// Checks the sectors from `stamp.sector` on at `at`. The generation of each must be in
/// `lowest..=stamp.generation`.
///
/// # Errors
/// The first wrong sector.
///
/// # Safety
/// `at..at + 512 * sectors` is readable. The device may write it at the same time, because it is
/// copied first.
pub unsafe fn check_sectors(
    at: *const u8,
    stamp: Stamp,
    lowest: u32,
    sectors: usize,
) -> Result<(), Box<Mismatch>> {
    for i in 0..sectors {
        let mut found = [0; WORDS];
        // SAFETY: the caller promises that `512 * sectors` bytes are readable, and `i` is below the
        // number of sectors. `found` is a local array of one sector.
        unsafe { mem::copy(at.wrapping_add(i * SECTOR), found.as_mut_ptr().cast(), SECTOR) };
        check_words(&found, Stamp { sector: stamp.sector + i as u64, ..stamp }, lowest)?;
    }
    Ok(())
}

fn check_words(found: &[u64; WORDS], newest: Stamp, lowest: u32) -> Result<(), Box<Mismatch>> {
    let generation = found[2] as u32;
    if (lowest..=newest.generation).contains(&generation)
        && *found == (Stamp { generation, ..newest }).words()
    {
        return Ok(());
    }
    let candidates = lowest..=newest.generation;
    // There are only a few, because a read overlaps with few writes of its block.
    if lowest < newest.generation && newest.generation - lowest < 16 {
        let all: Vec<_> = candidates.map(|generation| Stamp { generation, ..newest }.words()).collect();
        if (0..WORDS).all(|w| all.iter().any(|words| words[w] == found[w])) {
            return Ok(());
        }
    }
    Err(Box::new(Mismatch { expected: newest, lowest, found: *found }))
}

/// A sector with wrong contents.
#[derive(Clone, Debug)]
pub struct Mismatch {
    /// The newest expected contents.
    pub expected: Stamp,
    /// The oldest generation that is allowed.
    pub lowest: u32,
    /// The contents.
    pub found: [u64; WORDS],
}

impl Mismatch {
    fn describe_found(&self) -> String {
        let found = &self.found;
        if found.iter().all(|&w| w == 0) {
            return "zeroes".into();
        }
        if found[0] != MAGIC {
            return format!(
                "data that no run of vshunt-bench wrote (first bytes {:016x})",
                found[0].swap_bytes()
            );
        }
        let stamp = Stamp { sector: found[1], generation: found[2] as u32, seed: (found[2] >> 32) as u32 };
        let whole = *found == stamp.words();
        let name = format!("sector {}, generation {}, seed {}", stamp.sector, stamp.generation, stamp.seed);
        if whole {
            return name;
        }
        let expected = stamp.words();
        let at = (0..WORDS).find(|&w| found[w] != expected[w]).unwrap_or(0) * 8;
        format!("{name}, but torn or damaged from byte {at} on (its checksum fails)")
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stamp { sector, generation, seed } = self.expected;
        write!(f, "sector {sector}: expected generation ")?;
        if self.lowest < generation {
            write!(f, "{} to ", self.lowest)?;
        }
        write!(f, "{generation} of seed {seed}, found {}", self.describe_found())
    }
}

#[cfg(test)]
mod tests;
