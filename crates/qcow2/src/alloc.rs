//! The allocator: reference counts, reservations, and clusters that are to be freed.
//!
//! Workers take clusters in runs (a [`Reserve`] each) and use them without a lock. Only a new run
//! takes the lock here. A run is counted as used from the start, so the clusters of it that are
//! unused at a crash leak.
//!
//! A cluster that was removed from the map waits twice: until the map without it is on stable
//! storage (after the next flush), and until no request that knew it is in flight
//! ([`crate::epoch`]). Only then its count is lowered, and it can be taken again.
//!
//! The lock is never held during I/O. A refcount block that is not in memory is read by the request
//! that needs it.

mod pack;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::bytes::to_usize;
use crate::epoch::{Epoch, Epochs};
use crate::overlap::OverlapCheck;
use crate::{Waker, refcount};

/// Consecutive clusters that are counted as used and are not in use yet.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reserve {
    /// The first cluster.
    pub(crate) start: u64,
    /// The number of clusters.
    pub(crate) count: u64,
    /// Whether they read as zeroes.
    pub(crate) zero: bool,
}

/// Clusters that were removed from the map.
#[derive(Debug, Clone, Copy)]
struct Removed {
    start: u64,
    count: u64,
    epoch: Epoch,
    /// The flush that made the map without them stable; `u64::MAX` before that.
    flush: u64,
}

/// The result of a request for clusters.
#[derive(Debug)]
pub(crate) enum Take {
    /// The clusters.
    Got(Reserve),
    /// This refcount block (index, offset) has to be read and passed to [`Alloc::loaded`] first.
    Load(u64, u64),
    /// Another request reads it. The caller is woken.
    Wait,
    /// The refcount table or the file has no room for more.
    Full,
}

struct Block {
    data: Box<[u8]>,
    dirty: bool,
    /// Whether a copy of it is being written into the image, which has older contents until then.
    writing: bool,
    /// The time of its last use.
    used: u64,
}

/// The allocator of one image. One lock guards it.
pub(crate) struct Alloc {
    cluster_bits: u32,
    order: u32,
    entries: u64,
    /// The offset of each refcount block. 0: there is none, and all its clusters are free.
    table: Vec<u64>,
    /// Entries of the table that are not in the image yet.
    table_dirty: BTreeSet<usize>,
    blocks: HashMap<u64, Block>,
    blocks_max: usize,
    loading: HashMap<u64, Vec<Waker>>,
    clock: u64,
    /// Where the next search starts.
    cursor: u64,
    /// The first cluster that was never written. From here on, clusters read as zeroes.
    unwritten: u64,
    /// The first cluster that the file has no room for.
    limit: u64,
    removed: Vec<Removed>,
    /// Is told of new refcount blocks.
    overlap: Option<Arc<OverlapCheck>>,
    /// Flushes started.
    flushes: u64,
    /// The offset of the next compressed piece, in a cluster that is counted once for this; see
    /// [`pack`].
    tail: Option<u64>,
}

/// Something to write: a refcount block, or a piece of the refcount table.
pub(crate) struct Dirty {
    pub(crate) index: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: Box<[u8]>,
}

impl Alloc {
    pub(crate) fn new(
        cluster_bits: u32,
        order: u32,
        table: Vec<u64>,
        file_clusters: u64,
        cache_bytes: u64,
    ) -> Self {
        Self {
            cluster_bits,
            order,
            entries: (8u64 << cluster_bits) >> order,
            table,
            table_dirty: BTreeSet::new(),
            blocks: HashMap::new(),
            blocks_max: to_usize((cache_bytes >> cluster_bits).max(4)),
            loading: HashMap::new(),
            clock: 0,
            cursor: 0,
            unwritten: file_clusters,
            limit: u64::MAX,
            removed: Vec::new(),
            overlap: None,
            flushes: 0,
            tail: None,
        }
    }

    pub(crate) fn with_overlap_check(self, overlap: Option<Arc<OverlapCheck>>) -> Self {
        Self { overlap, ..self }
    }

    /// Sets the number of clusters that the file has room for.
    pub(crate) fn limit_to(&mut self, clusters: u64) {
        self.limit = clusters;
    }

    /// Returns the first cluster that was never used.
    pub(crate) fn end(&self) -> u64 {
        self.unwritten
    }

    /// Takes a run of 1 to `most` clusters.
    pub(crate) fn take(&mut self, most: u64, waker: Waker) -> Take {
        loop {
            if self.cursor >= self.limit {
                return Take::Full;
            }
            let index = self.cursor / self.entries;
            let Some(&offset) = self.table.get(to_usize(index)) else { return Take::Full };
            if !self.blocks.contains_key(&index) {
                if offset != 0 {
                    return self.ask(index, offset, waker);
                }
                self.make_block(index);
                continue;
            }
            if let Some(got) = self.run(index, most) {
                return Take::Got(got);
            }
            self.cursor = (index + 1) * self.entries;
        }
    }

    fn ask(&mut self, index: u64, offset: u64, waker: Waker) -> Take {
        if let Some(waiting) = self.loading.get_mut(&index) {
            waiting.push(waker);
            return Take::Wait;
        }
        self.loading.insert(index, Vec::new());
        Take::Load(index, offset)
    }

    /// Makes a refcount block for a range that has none. The block is in the range's first cluster,
    /// and counts itself.
    #[expect(clippy::indexing_slicing, reason = "the caller chose a range that the table covers")]
    fn make_block(&mut self, index: u64) {
        let at = index * self.entries;
        let mut data = vec![0; 1 << self.cluster_bits].into_boxed_slice();
        refcount::set(&mut data, 0, self.order, 1);
        self.make_room();
        self.blocks.insert(index, Block { data, dirty: true, writing: false, used: self.clock });
        self.table[to_usize(index)] = at << self.cluster_bits;
        self.table_dirty.insert(to_usize(index));
        if let Some(overlap) = &self.overlap {
            overlap.add("a refcount block", at);
        }
        self.unwritten = self.unwritten.max(at + 1);
    }

    /// Returns the next free run of a block that is in memory, from the cursor on.
    fn run(&mut self, index: u64, most: u64) -> Option<Reserve> {
        self.clock += 1;
        let (order, entries, clock) = (self.order, self.entries, self.clock);
        let room = entries.min(self.limit - index * entries);
        let block = self.blocks.get_mut(&index).expect("it is here");
        block.used = clock;
        let free = |block: &Block, i: u64| refcount::get(&block.data, to_usize(i), order) == 0;
        let first = (self.cursor % entries..room).find(|i| free(block, *i))?;
        let start = index * entries + first;
        // A run contains only clusters that are known to be zero, or only other clusters.
        let end = if start < self.unwritten { room.min(first + self.unwritten - start) } else { room };
        let count = (first..end).take(to_usize(most)).take_while(|i| free(block, *i)).count() as u64;
        (first..first + count).for_each(|i| refcount::set(&mut block.data, to_usize(i), order, 1));
        block.dirty = true;
        self.cursor = start + count;
        let zero = start >= self.unwritten;
        self.unwritten = self.unwritten.max(start + count);
        Some(Reserve { start, count, zero })
    }

    /// Stores a block that was read. `None`: it could not be read.
    pub(crate) fn loaded(&mut self, index: u64, data: Option<Box<[u8]>>, wake: &mut dyn FnMut(Waker)) {
        if let Some(data) = data {
            self.make_room();
            self.clock += 1;
            self.blocks.insert(index, Block { data, dirty: false, writing: false, used: self.clock });
        }
        self.loading.remove(&index).unwrap_or_default().into_iter().for_each(wake);
    }

    /// Drops the clean block that was unused for the longest time, if there are many.
    fn make_room(&mut self) {
        while self.blocks.len() >= self.blocks_max {
            let clean = self.blocks.iter().filter(|(_, b)| !b.dirty && !b.writing);
            let Some(oldest) = clean.min_by_key(|(_, b)| b.used).map(|(index, _)| *index) else { return };
            self.blocks.remove(&oldest);
        }
    }

    /// Returns clusters that never were in the map and have no users.
    pub(crate) fn give_back(&mut self, rest: Reserve) {
        if rest.count > 0 {
            self.removed.push(Removed { start: rest.start, count: rest.count, epoch: 0, flush: 0 });
        }
    }

    /// Returns clusters of one run that were taken and never written. They can be taken again at
    /// once.
    pub(crate) fn return_unwritten(&mut self, rest: Reserve) {
        let Some(block) = self.blocks.get_mut(&(rest.start / self.entries)) else {
            return self.give_back(rest);
        };
        for cluster in rest.start..rest.start + rest.count {
            refcount::set(&mut block.data, to_usize(cluster % self.entries), self.order, 0);
        }
        block.dirty |= rest.count > 0;
        self.cursor = self.cursor.min(rest.start);
        if rest.zero && self.unwritten == rest.start + rest.count {
            self.unwritten = rest.start;
        }
    }

    /// Records that clusters were removed from the map.
    pub(crate) fn remove(&mut self, start: u64, count: u64, epoch: Epoch) {
        if let Some(last) = self.removed.last_mut()
            && (last.start + last.count, last.epoch, last.flush) == (start, epoch, u64::MAX)
        {
            last.count += count;
            return;
        }
        self.removed.push(Removed { start, count, epoch, flush: u64::MAX });
    }

    /// Starts a flush, before it copies the map. Returns its number. Clusters that were removed
    /// before are stable with it.
    pub(crate) fn start_flush(&mut self) -> u64 {
        self.flushes += 1;
        let flush = self.flushes;
        self.removed.iter_mut().filter(|g| g.flush == u64::MAX).for_each(|g| g.flush = flush);
        flush
    }

    /// Records that the flush failed. Clusters that were removed before it wait for the next one.
    pub(crate) fn failed_flush(&mut self, flush: u64) {
        self.removed.iter_mut().filter(|g| g.flush == flush).for_each(|g| g.flush = u64::MAX);
    }

    /// Returns some clusters that are removed with flushes up to `flush`, which are stable, and
    /// that have no users. The caller then has to punch them and to count them down.
    pub(crate) fn next_removed(&mut self, flush: u64, epochs: &Epochs) -> Option<(u64, u64)> {
        let at = self.removed.iter().position(|g| g.flush <= flush && epochs.is_over(g.epoch))?;
        let gone = self.removed.swap_remove(at);
        Some((gone.start, gone.count))
    }

    /// Returns for how many of the clusters, from the first on, the answer is the same, and whether
    /// this was their last use.
    ///
    /// # Errors
    /// What has to be done first.
    pub(crate) fn last_uses(&mut self, start: u64, count: u64, waker: Waker) -> Result<(u64, bool), Take> {
        let index = start / self.entries;
        let here = count.min((index + 1) * self.entries - start);
        let Some(&offset) = self.table.get(to_usize(index)).filter(|at| **at != 0) else {
            return Ok((here, false));
        };
        self.clock += 1;
        let Some(block) = self.blocks.get_mut(&index) else { return Err(self.ask(index, offset, waker)) };
        block.used = self.clock;
        let first = start % self.entries;
        let last_use = |i: u64| refcount::get(&block.data, to_usize(first + i), self.order) == 1;
        let is_last = last_use(0);
        Ok(((0..here).take_while(|i| last_use(*i) == is_last).count() as u64, is_last))
    }

    /// Counts down clusters of one block, after [`last_uses`](Self::last_uses) found it in memory.
    /// Returns false if the block was dropped since.
    pub(crate) fn count_down(&mut self, start: u64, count: u64) -> bool {
        let Some(block) = self.blocks.get_mut(&(start / self.entries)) else {
            return self.table.get(to_usize(start / self.entries)).is_none_or(|at| *at == 0);
        };
        for cluster in start..start + count {
            let at = to_usize(cluster % self.entries);
            let was = refcount::get(&block.data, at, self.order);
            // 0: the image had a wrong count.
            refcount::set(&mut block.data, at, self.order, was.saturating_sub(1));
            if was == 1 {
                self.cursor = self.cursor.min(cluster);
            }
        }
        block.dirty = true;
        true
    }

    /// Returns copies of all dirty blocks, which count as clean from now on.
    #[expect(clippy::indexing_slicing, reason = "a block in memory has its entry in the table")]
    pub(crate) fn take_dirty(&mut self) -> Vec<Dirty> {
        let table = &self.table;
        let dirty = self.blocks.iter_mut().filter(|(_, b)| b.dirty);
        dirty
            .map(|(&index, block)| {
                (block.dirty, block.writing) = (false, true);
                Dirty { index, offset: table[to_usize(index)], bytes: block.data.clone() }
            })
            .collect()
    }

    /// Returns copies of the pieces of the table, `unit` bytes each, that have new entries. Offsets
    /// are those in the table.
    #[expect(
        clippy::indexing_slicing,
        reason = "a dirty index is one of the table's, and is not below the start of its unit"
    )]
    pub(crate) fn take_table(&mut self, unit: u64) -> Vec<Dirty> {
        let mut pieces: Vec<Dirty> = Vec::new();
        for index in std::mem::take(&mut self.table_dirty) {
            let offset = 8 * index as u64 / unit * unit;
            if pieces.last().is_none_or(|piece| piece.offset != offset) {
                let words = self.table[to_usize(offset) / 8..].iter().take(to_usize(unit) / 8);
                pieces.push(Dirty {
                    index: index as u64,
                    offset,
                    bytes: words.flat_map(|w| w.to_be_bytes()).collect(),
                });
            }
        }
        pieces
    }

    /// Records that the copies were written. If not (`done` is false), they are dirty again.
    pub(crate) fn written(&mut self, blocks: &[Dirty], table: &[Dirty], done: bool) {
        for dirty in blocks {
            let block = self.blocks.get_mut(&dirty.index).expect("what is being written stays");
            block.writing = false;
            block.dirty |= !done;
        }
        if !done {
            self.table_dirty.extend(table.iter().map(|d| to_usize(d.index)));
        }
    }
}
