//! What a copy has to do, and who waits for it.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use qcow2::Waker;

use crate::bits::Bits;
use crate::copy_after_write::CopyAfterWrite;
use crate::copy_before_write::{CopyBeforeWrite, OldData};

/// Most bytes of a copy, if writes wait for copies.
const CHUNK_BYTES: u64 = 256 << 10;

/// The work of a copy, shared with the handles of its source.
#[derive(Clone)]
pub enum Work {
    /// Blocks are copied once. Writes of guests may read old data for it.
    Before(Arc<CopyBeforeWrite>),
    /// Blocks are copied until the copy is stopped. Writes of guests wait for their copy.
    After(Arc<CopyAfterWrite>),
}

impl From<Arc<CopyBeforeWrite>> for Work {
    fn from(work: Arc<CopyBeforeWrite>) -> Self {
        Self::Before(work)
    }
}

impl From<Arc<CopyAfterWrite>> for Work {
    fn from(work: Arc<CopyAfterWrite>) -> Self {
        Self::After(work)
    }
}

impl Work {
    /// Returns a map of the blocks, for their size and places.
    pub(super) fn blocks(&self) -> &Bits {
        match self {
            Self::Before(work) => work.todo(),
            Self::After(work) => work.blocks(),
        }
    }

    /// Returns whether writes wait until their blocks are copied. The source then has to be read
    /// when that begins: no earlier answer tells where it has data.
    pub(super) fn follows_writes(&self) -> bool {
        matches!(self, Self::After(_))
    }

    /// Takes the next blocks, at most `bytes` of them: see [`CopyBeforeWrite::read_ahead`].
    /// `paused`: only what writes wait for.
    pub(super) fn next(
        &self,
        from: u64,
        bytes: u64,
        paused: bool,
        kept: &mut Vec<Range<u64>>,
    ) -> Option<Range<u64>> {
        match self {
            Self::Before(work) => work.read_ahead(from, bytes, kept),
            Self::After(work) => work.next(bytes.min(CHUNK_BYTES), !paused),
        }
    }

    /// Returns whether [`next`](Self::next) may find something, other than the blocks of which
    /// there is a list since the start.
    pub(super) fn has_more(&self) -> bool {
        match self {
            Self::Before(work) => work.has_stored(),
            Self::After(work) => work.has_more(),
        }
    }

    /// Ends the read of blocks of the source.
    pub(super) fn has_read(&self, blocks: Range<u64>, wake: &mut dyn FnMut(Waker)) {
        match self {
            Self::Before(work) => work.end_read_ahead(blocks, wake),
            Self::After(_) => {}
        }
    }

    /// Takes note that blocks are in the target.
    pub(super) fn has_copied(&self, blocks: &Range<u64>, wake: &mut dyn FnMut(Waker)) {
        match self {
            Self::Before(_) => {}
            Self::After(work) => work.copied(blocks, wake),
        }
    }

    /// Returns whether there is old data to be written.
    pub(super) fn has_old(&self) -> bool {
        matches!(self, Self::Before(work) if work.has_full())
    }

    /// Returns old data to be written to the target.
    pub(super) fn take_old(&self) -> Option<OldData> {
        match self {
            Self::Before(work) => work.take(),
            Self::After(_) => None,
        }
    }

    /// Returns the memory of old data after it was written.
    pub(super) fn old_is_written(&self, old: OldData, wake: &mut dyn FnMut(Waker)) {
        if let Self::Before(work) = self {
            work.written(old, wake);
        }
    }

    /// Returns whether all is copied, and nothing more will come.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Before(work) => work.is_over(),
            Self::After(_) => false,
        }
    }

    /// Returns how the copy ended, or nothing while it runs: 0 if it was stopped, or the negative
    /// errno of a failed read by a write of a guest.
    pub(super) fn has_ended(&self) -> Option<i32> {
        match self {
            Self::Before(work) => work.has_ended(),
            Self::After(work) => work.has_ended().then_some(0),
        }
    }

    /// Returns whether the copy ended because the fleecing file could not be written.
    pub(super) fn has_fleece_failed(&self) -> bool {
        matches!(self, Self::Before(work) if work.has_fleece_failed())
    }

    /// Ends the copy. All waiting writes continue.
    pub(super) fn end(&self, wake: &mut dyn FnMut(Waker)) {
        match self {
            Self::Before(work) => work.end(wake),
            Self::After(work) => work.end(wake),
        }
    }

    /// Returns the eventfd that wakes the copy queue while it sleeps.
    pub(super) fn eventfd(&self) -> RawFd {
        match self {
            Self::Before(work) => work.eventfd(),
            Self::After(work) => work.eventfd(),
        }
    }

    /// Sets whether the copy queue sleeps.
    pub(super) fn set_asleep(&self, yes: bool) {
        match self {
            Self::Before(work) => work.set_asleep(yes),
            Self::After(work) => work.set_asleep(yes),
        }
    }

    /// Wakes the copy queue if it sleeps.
    pub fn notify(&self) {
        match self {
            Self::Before(work) => work.notify(),
            Self::After(work) => work.look_again(),
        }
    }

    /// Returns the old data in the fleecing file that the copy queue has not taken, bytes. None:
    /// there is no such file.
    pub fn stored_bytes(&self) -> Option<u64> {
        match self {
            Self::Before(work) => work.stored_bytes(),
            Self::After(_) => None,
        }
    }

    /// Returns a number that rises when old data was stored in the fleecing file.
    pub fn stores(&self) -> u64 {
        match self {
            Self::Before(work) => work.stores(),
            Self::After(_) => 0,
        }
    }

    /// Returns the number of writes that wait for the copy queue.
    pub fn held_up(&self) -> usize {
        match self {
            Self::Before(work) => work.held_up(),
            Self::After(work) => work.waiting(),
        }
    }
}
