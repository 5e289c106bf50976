//! A frozen disk: another disk as it was when a pull backup began.
//!
//! From that moment on, each write to the source first stores what it replaces in the fleecing file
//! (`copy_before_write`). A read of the frozen disk takes a block from that file if it is there,
//! and from the source otherwise (`handle/frozen`). Readers and writers take no lock for each
//! other.
//!
//! What must never happen: a read returns bytes that were written after that moment. When old data
//! cannot be stored any more, every read fails.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use super::copy_before_write::CopyBeforeWrite;

/// Bytes in the fleecing file for which a read from the source is interrupted.
const LONG_BYTES: u64 = 64 << 10;

/// What is known about a range of the source after it was read.
pub(super) enum Seen {
    /// It has the bytes of the frozen disk, except for the blocks that are in the fleecing file.
    Frozen,
    /// Writes may have replaced bytes that are nowhere else.
    Lost,
}

/// Returns whether what was read from the source before this call is valid.
///
/// A write to the source begins after its blocks were marked as kept, or after the end of the copy
/// was stored (`CopyBeforeWrite`). So if a read has seen a byte of the write, this thread sees the
/// mark or the end after the read. Marks are never removed during a pull backup.
pub(super) fn see(work: &CopyBeforeWrite) -> Seen {
    // Orders the bytes of a disk in memory, which were copied by this thread, before the loads.
    fence(Ordering::SeqCst);
    match work.has_ended() {
        None => Seen::Frozen,
        Some(_) => Seen::Lost,
    }
}

/// Returns the end of the next read from the source, which begins at `bytes.start`: the end of the
/// range, or the start of a long run of blocks in the fleecing file. The source is read through
/// short runs, whose blocks are read from the file afterwards: that is less requests.
pub(super) fn source_end(work: &CopyBeforeWrite, bytes: Range<u64>) -> u64 {
    let mut at = bytes.start;
    while let Some(run) = work.kept_run(at..bytes.end) {
        if run.end - run.start >= LONG_BYTES && run.start > bytes.start {
            return run.start;
        }
        at = run.end;
    }
    bytes.end
}

#[cfg(test)]
mod tests;
