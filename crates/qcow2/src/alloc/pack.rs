//! Compressed pieces, which share clusters. A cluster is counted once for every piece that is in
//! it.
//!
//! The tail is the cluster that the next piece goes to. It is counted once more, so that it stays
//! in use whatever happens to its pieces. The piece that fills the cluster takes over this count.
//! Otherwise the count is removed, also by a flush, so that only pieces are counted on stable
//! storage.

use super::{Alloc, Reserve, Take};
use crate::bytes::to_usize;
use crate::{Waker, refcount};

impl Alloc {
    /// Finds room for a piece of `bytes`, which are whole sectors and less than a cluster, and
    /// counts it. Returns its offset and whether `fresh` was used.
    ///
    /// `fresh` is a cluster that was taken for the piece, in case it is needed. `None`: a fresh
    /// cluster is needed.
    ///
    /// # Errors
    /// What has to be done first.
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
        // A piece may continue in the next cluster. The tail's count of the first cluster then
        // becomes the piece's.
        let at = self.tail.filter(|at| at + left == begin).unwrap_or(begin);
        let before = self.tail;
        self.count_piece(fresh, at + bytes, waker)?;
        if let Some(before) = before.filter(|_| at == begin) {
            self.uncount_tail(before);
        }
        Ok(Some((at, true)))
    }

    /// Counts a piece in a cluster that is counted for the tail. The tail starts at `end` from now
    /// on.
    #[expect(clippy::indexing_slicing, reason = "the cluster was allocated, so the table covers it")]
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

    /// Closes the tail, so that the next piece goes to another cluster.
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
            // This is the last use, or the block is not in memory. It is handled like other
            // clusters that are returned.
            None => self.give_back(Reserve { start, count: 1, zero: false }),
        }
    }
}
