//! The expected contents of every block: 32 bits for each block in memory, and the same in a file
//! for a later run.
//!
//! A [`Partition`] belongs to the only queue that writes its blocks, so nothing here is shared.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{Error, Kind, Result, fail};

/// Set while a write of the block is in flight. It may then have this generation or the previous
/// one.
const UNSETTLED: u32 = 1 << 31;

/// The blocks of one queue.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    first: u64,
    states: Vec<u32>,
}

impl Partition {
    /// Makes a partition of `count` blocks from `first` on, none of them written.
    pub fn new(first: u64, count: usize) -> Self {
        Self { first, states: vec![0; count] }
    }

    /// Returns the number of its first block.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Returns whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    #[inline]
    fn state(&mut self, block: u64) -> &mut u32 {
        &mut self.states[(block - self.first) as usize]
    }

    /// Starts a write of `block`. Returns its generation, or `None` if a write is in flight.
    #[inline]
    pub fn begin_write(&mut self, block: u64) -> Option<u32> {
        let state = self.state(block);
        if *state & UNSETTLED != 0 {
            return None;
        }
        *state = (*state + 1) | UNSETTLED;
        Some(*state & !UNSETTLED)
    }

    /// Undoes the start of a write that was not submitted.
    #[inline]
    pub fn cancel_write(&mut self, block: u64) {
        let state = self.state(block);
        *state = (*state & !UNSETTLED) - 1;
    }

    /// Records the completion of a write of `block`.
    #[inline]
    pub fn end_write(&mut self, block: u64) {
        *self.state(block) &= !UNSETTLED;
    }

    /// Returns the oldest generation of `block` that a read that starts now may find. 0: unknown.
    #[inline]
    pub fn settled(&mut self, block: u64) -> u32 {
        let state = *self.state(block);
        if state & UNSETTLED != 0 { (state & !UNSETTLED) - 1 } else { state }
    }

    /// Returns the newest generation of `block` that a read that ends now may find.
    #[inline]
    pub fn newest(&mut self, block: u64) -> u32 {
        *self.state(block) & !UNSETTLED
    }

    /// Returns the first written block from `from` (an index into the partition) on.
    pub fn next_written(&self, from: usize) -> Option<usize> {
        let found = self.states.get(from..)?.iter().position(|&s| s & !UNSETTLED != 0)?;
        Some(from + found)
    }

    /// Returns the number of blocks that were written at least once.
    pub fn written(&self) -> u64 {
        self.states.iter().filter(|&&s| s & !UNSETTLED != 0).count() as u64
    }
}

/// The state of a whole run in a file, which `vshunt-bench verify` reads.
#[derive(Clone, Debug)]
pub struct StateFile {
    /// The run's seed.
    pub seed: u32,
    /// Bytes of each block.
    pub block: u32,
    /// The partitions, with their first blocks.
    pub partitions: Vec<Partition>,
}

const MAGIC: &[u8; 8] = b"vshuntS1";

impl StateFile {
    /// Writes the state to a file next to `path` and renames it, so that a crash leaves the old
    /// file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let temporary = path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            let mut out = std::io::BufWriter::new(File::create(&temporary)?);
            out.write_all(MAGIC)?;
            out.write_all(&self.seed.to_le_bytes())?;
            out.write_all(&self.block.to_le_bytes())?;
            out.write_all(&(self.partitions.len() as u64).to_le_bytes())?;
            for partition in &self.partitions {
                out.write_all(&partition.first.to_le_bytes())?;
                out.write_all(&(partition.states.len() as u64).to_le_bytes())?;
                for state in &partition.states {
                    out.write_all(&state.to_le_bytes())?;
                }
            }
            out.into_inner()?.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|e| {
            Error::with(Kind::System, format!("cannot write the state file {}", path.display()), e)
        })
    }

    /// Reads the file of [`StateFile::save`].
    pub fn load(path: &Path) -> Result<Self> {
        let mut bytes = Vec::new();
        File::open(path).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(|e| {
            Error::with(Kind::Usage, format!("cannot read the state file {}", path.display()), e)
        })?;
        Self::parse(&bytes).ok_or_else(|| {
            fail!(Usage, "{} is not a state file of vshunt-bench: it is what --state wrote", path.display())
        })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let u32_of = |rest: &mut &[u8]| {
            let (head, tail) = rest.split_first_chunk::<4>()?;
            *rest = tail;
            Some(u32::from_le_bytes(*head))
        };
        let seed = u32_of(&mut rest)?;
        let block = u32_of(&mut rest)?;
        let u64_of = |rest: &mut &[u8]| {
            let (head, tail) = rest.split_first_chunk::<8>()?;
            *rest = tail;
            Some(u64::from_le_bytes(*head))
        };
        let mut partitions = Vec::new();
        for _ in 0..u64_of(&mut rest)? {
            let first = u64_of(&mut rest)?;
            let count = usize::try_from(u64_of(&mut rest)?).ok()?;
            let (states, tail) = rest.split_at_checked(count.checked_mul(4)?)?;
            rest = tail;
            let states =
                states.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
            partitions.push(Partition { first, states });
        }
        // Partitions of one run are adjacent, which `deal` needs.
        let adjoin =
            partitions.windows(2).all(|p| p[0].first.checked_add(p[0].len() as u64) == Some(p[1].first));
        (rest.is_empty() && block > 0 && adjoin).then_some(Self { seed, block, partitions })
    }

    /// Returns the number of written blocks.
    pub fn written(&self) -> u64 {
        self.partitions.iter().map(Partition::written).sum()
    }

    /// Returns the same blocks in at most `count` partitions of equal size.
    #[must_use]
    pub fn deal(self, count: usize) -> Vec<Partition> {
        let first = self.partitions.first().map_or(0, Partition::first);
        let states: Vec<u32> = self.partitions.into_iter().flat_map(|p| p.states).collect();
        let share = states.len().div_ceil(count.max(1)).max(1);
        let part = |(i, states): (usize, &[u32])| Partition {
            first: first + (i * share) as u64,
            states: states.into(),
        };
        states.chunks(share).enumerate().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_write_at_a_time() {
        let mut p = Partition::new(100, 10);
        assert_eq!(p.begin_write(103), Some(1));
        assert_eq!(p.begin_write(103), None);
        assert_eq!((p.settled(103), p.newest(103)), (0, 1));
        p.end_write(103);
        assert_eq!((p.settled(103), p.newest(103)), (1, 1));
        assert_eq!(p.begin_write(103), Some(2));
        assert_eq!((p.settled(103), p.newest(103)), (1, 2));
        p.cancel_write(103);
        assert_eq!((p.settled(103), p.newest(103)), (1, 1));
        assert_eq!((p.next_written(0), p.next_written(4)), (Some(3), None));
        assert_eq!(p.written(), 1);
    }

    #[test]
    fn the_state_file_comes_back_as_it_was() {
        let mut p = Partition::new(7, 3);
        p.begin_write(8);
        let path = std::env::temp_dir().join(format!("vshunt-bench-state-{}", std::process::id()));
        let state = StateFile { seed: 5, block: 4096, partitions: vec![p, Partition::new(10, 1)] };
        state.save(&path).unwrap();
        let back = StateFile::load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((back.seed, back.block, back.written()), (5, 4096, 1));
        assert_eq!(back.partitions[0].states, state.partitions[0].states);
        assert!(StateFile::parse(b"vshuntS1").is_none());
        let dealt = back.deal(2);
        assert_eq!(dealt.iter().map(Partition::len).sum::<usize>(), 4);
        assert_eq!(dealt[0].first(), 7);
    }
}
