//! A fleecing file: old data waits there until the copy queue writes it to the target. Under a pull
//! backup it stays there, for the readers of the frozen disk.
//!
//! A block has the same offset in the file as on the disk. Each block is written at most once, and
//! the file is new, so a block of zeroes is a hole.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

use super::bits::Bits;

/// The blocks in a fleecing file. The file itself is a [`Disk`](super::Disk).
pub(super) struct Fleece {
    /// Blocks that are in the file and not in the target. Changed while the lock of
    /// [`CopyBeforeWrite`](super::CopyBeforeWrite) is held.
    kept: Bits,
    /// Number of bits in `kept`, to be read without the lock.
    count: AtomicU64,
    /// Number of blocks that were stored since the start.
    stored: AtomicU64,
}

impl Fleece {
    /// Makes an empty map for a disk with the blocks of `todo`. `None` if there is no memory.
    pub(super) fn new(todo: &Bits) -> Option<Self> {
        let kept = Bits::new(todo.size(), todo.granularity().trailing_zeros())?;
        Some(Self { kept, count: AtomicU64::new(0), stored: AtomicU64::new(0) })
    }

    /// Returns the blocks in the file.
    pub(super) fn kept(&self) -> &Bits {
        &self.kept
    }

    /// Returns the number of blocks in the file.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        self.count.load(SeqCst)
    }

    /// Returns the number of blocks that were stored since the start.
    pub(super) fn stored(&self) -> u64 {
        self.stored.load(Relaxed)
    }

    /// Adds blocks whose old data is in the file. Returns whether there were none before.
    pub(super) fn add(&self, blocks: Range<u64>) -> bool {
        let n = blocks.end - blocks.start;
        self.kept.set(blocks);
        self.stored.fetch_add(n, Relaxed);
        self.count.fetch_add(n, SeqCst) == 0
    }

    /// Removes the blocks of a range, and adds their runs to `runs`.
    pub(super) fn take(&self, blocks: Range<u64>, runs: &mut Vec<Range<u64>>) {
        let mut at = blocks.start;
        while let Some(run) = self.kept.run(at..blocks.end, u64::MAX - blocks.end) {
            at = run.end;
            self.count.fetch_sub(run.end - run.start, SeqCst);
            self.kept.clear(run.clone());
            runs.push(run);
        }
    }
}
