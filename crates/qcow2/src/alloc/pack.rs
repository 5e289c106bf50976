//! Compressed pieces, which share clusters: each cluster is counted once for every piece that lies in it.
//!
//! The cluster that the next piece goes to, the tail, is counted once more, so that it stays whatever becomes of the pieces.
//! That count goes over to the piece that fills the cluster, or is taken away: by a flush too, so that what is stable counts
//! pieces alone.

use super::{Alloc, Reserve, Take};
use crate::bytes::to_usize;
use crate::{Waker, refcount};

impl Alloc {
    /// Finds room for a piece of `bytes`, whole sectors and less than a cluster, and counts it: where it goes. `fresh`: a
    /// cluster that was taken for it, if it is needed; whether it was. None: it is needed.
    ///
    /// # Errors
    /// What is to be done first.
    pub(crate) fn pack(
        &mut self,
        bytes: u64,
        fresh: Option<u64>,
        waker: Waker,
    ) -> Result<Option<(u64, bool)>, Take> {
        let size = 1u64 << self.cluster_bits;
        let left = self.tail.map_or(0, |at| at.next_multiple_of(size) - at);
        if let Some(at) = self.tail.filter(|_| left >= bytes) {
            self.count_piece(at >> self.cluster_bits, at + bytes, waker)?;
            return Ok(Some((at, false)));
        }
        let Some(fresh) = fresh else { return Ok(None) };
        let begin = fresh << self.cluster_bits;
        // A piece may go on into the cluster behind; the tail's count of the one before is the piece's then.
        let at = self.tail.filter(|at| at + left == begin).unwrap_or(begin);
        let before = self.tail;
        self.count_piece(fresh, at + bytes, waker)?;
        if let Some(before) = before.filter(|_| at == begin) {
            self.uncount_tail(before);
        }
        Ok(Some((at, true)))
    }

    /// Counts a piece in a cluster that is counted for the tail, which begins at `end` from now on.
    fn count_piece(&mut self, cluster: u64, end: u64, waker: Waker) -> Result<(), Take> {
        let (index, slot) = (cluster / self.entries, to_usize(cluster % self.entries));
        self.clock += 1;
        let Some(block) = self.blocks.get_mut(&index) else {
            return Err(self.ask(index, self.table[to_usize(index)], waker));
        };
        block.used = self.clock;
        let count = refcount::get(&block.data, slot, self.order);
        let most = u64::MAX >> (64 - (1u32 << self.order));
        if count == most || end.is_multiple_of(1 << self.cluster_bits) {
            self.tail = None;
        } else {
            refcount::set(&mut block.data, slot, self.order, count + 1);
            block.dirty = true;
            self.tail = Some(end);
        }
        Ok(())
    }

    /// The next piece goes to another cluster.
    pub(crate) fn close_tail(&mut self) {
        if let Some(at) = self.tail.take() {
            self.uncount_tail(at);
        }
    }

    fn uncount_tail(&mut self, at: u64) {
        let start = at >> self.cluster_bits;
        let slot = to_usize(start % self.entries);
        let block = self.blocks.get_mut(&(start / self.entries));
        match block.filter(|b| refcount::get(&b.data, slot, self.order) > 1) {
            Some(block) => {
                let count = refcount::get(&block.data, slot, self.order);
                refcount::set(&mut block.data, slot, self.order, count - 1);
                block.dirty = true;
            }
            // It is the last use, or the block is not here: as with all that is given back.
            None => self.give_back(Reserve { start, count: 1, zero: false }),
        }
    }
}
