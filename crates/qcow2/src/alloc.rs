//! Which clusters of the image file are used: reference counts, reservations, what comes back.
//!
//! Workers take clusters in runs (a [`Reserve`] each) and use them up by themselves; only a new run takes the lock here. A
//! run is counted as used from the start: what a crash leaves of it leaks.
//!
//! A cluster that goes waits twice: until the map without it is on stable storage (the flush after), and until no request
//! that knew it is under way ([`crate::epoch`]). Only then its count drops and it can be taken again.
//!
//! The lock is never held over I/O; a refcount block that is not here is read by who needs it.

#![allow(clippy::indexing_slicing, reason = "a refcount block that is in memory has its entry in the table")]

mod pack;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::bytes::to_usize;
use crate::epoch::{Epoch, Epochs};
use crate::overlap::OverlapCheck;
use crate::{Waker, refcount};

/// Consecutive clusters, counted as used, that nobody uses yet.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reserve {
    /// The first.
    pub(crate) start: u64,
    /// How many.
    pub(crate) count: u64,
    /// They read as zeroes.
    pub(crate) zero: bool,
}

/// Clusters that went.
#[derive(Debug, Clone, Copy)]
struct Gone {
    start: u64,
    count: u64,
    epoch: Epoch,
    /// The flush that made the map without them stable; `u64::MAX` before.
    flush: u64,
}

/// What became of a wish.
#[derive(Debug)]
pub(crate) enum Take {
    /// Clusters.
    Got(Reserve),
    /// This refcount block is to be read first (it lies there), and handed to [`Alloc::loaded`].
    Load(u64, u64),
    /// Another reads it; the caller is woken.
    Wait,
    /// There is no room for more in the refcount table.
    Full,
}

struct Block {
    data: Box<[u8]>,
    dirty: bool,
    /// A copy of it is on its way into the image, which is older till then.
    writing: bool,
    /// When it was used last.
    used: u64,
}

/// One image's. Behind one lock.
pub(crate) struct Alloc {
    cluster_bits: u32,
    order: u32,
    entries: u64,
    /// Where each refcount block lies; 0: there is none, all is free.
    table: Vec<u64>,
    /// Entries of it that are not in the image yet.
    table_dirty: BTreeSet<usize>,
    blocks: HashMap<u64, Block>,
    blocks_max: usize,
    loading: HashMap<u64, Vec<Waker>>,
    clock: u64,
    /// Where to look next.
    cursor: u64,
    /// From here on no cluster was ever written: they read as zeroes.
    virgin: u64,
    gone: Vec<Gone>,
    /// Is told of new refcount blocks.
    overlap: Option<Arc<OverlapCheck>>,
    /// Flushes begun.
    flushes: u64,
    /// Where the next compressed piece goes, within a cluster that is counted once for this; see [`pack`].
    tail: Option<u64>,
}

/// Something to write: a refcount block, or a piece of their table.
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
            virgin: file_clusters,
            gone: Vec::new(),
            overlap: None,
            flushes: 0,
            tail: None,
        }
    }

    pub(crate) fn with_overlap_check(self, overlap: Option<Arc<OverlapCheck>>) -> Self {
        Self { overlap, ..self }
    }

    /// The first cluster that was never used.
    pub(crate) fn end(&self) -> u64 {
        self.virgin
    }

    /// Takes a run of 1 to `most` clusters.
    pub(crate) fn take(&mut self, most: u64, waker: Waker) -> Take {
        loop {
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

    /// A refcount block for a range that has none: it lies in the range's first cluster, and counts itself.
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
        self.virgin = self.virgin.max(at + 1);
    }

    /// The next free run of a block that is here, from the cursor on.
    fn run(&mut self, index: u64, most: u64) -> Option<Reserve> {
        self.clock += 1;
        let (order, entries, clock) = (self.order, self.entries, self.clock);
        let block = self.blocks.get_mut(&index).expect("it is here");
        block.used = clock;
        let free = |block: &Block, i: u64| refcount::get(&block.data, to_usize(i), order) == 0;
        let first = (self.cursor % entries..entries).find(|i| free(block, *i))?;
        let start = index * entries + first;
        // What is known to be zero and what is not are different runs.
        let end = if start < self.virgin { entries.min(first + self.virgin - start) } else { entries };
        let count = (first..end).take(to_usize(most)).take_while(|i| free(block, *i)).count() as u64;
        (first..first + count).for_each(|i| refcount::set(&mut block.data, to_usize(i), order, 1));
        block.dirty = true;
        self.cursor = start + count;
        let zero = start >= self.virgin;
        self.virgin = self.virgin.max(start + count);
        Some(Reserve { start, count, zero })
    }

    /// A block was read (none: it could not be).
    pub(crate) fn loaded(&mut self, index: u64, data: Option<Box<[u8]>>, wake: &mut dyn FnMut(Waker)) {
        if let Some(data) = data {
            self.make_room();
            self.clock += 1;
            self.blocks.insert(index, Block { data, dirty: false, writing: false, used: self.clock });
        }
        self.loading.remove(&index).unwrap_or_default().into_iter().for_each(wake);
    }

    /// Lets go of the clean block that was not used for longest, if there are many.
    fn make_room(&mut self) {
        while self.blocks.len() >= self.blocks_max {
            let clean = self.blocks.iter().filter(|(_, b)| !b.dirty && !b.writing);
            let Some(oldest) = clean.min_by_key(|(_, b)| b.used).map(|(index, _)| *index) else { return };
            self.blocks.remove(&oldest);
        }
    }

    /// Gives back clusters that never were in the map; nobody uses them any more.
    pub(crate) fn give_back(&mut self, rest: Reserve) {
        if rest.count > 0 {
            self.gone.push(Gone { start: rest.start, count: rest.count, epoch: 0, flush: 0 });
        }
    }

    /// Gives back clusters of one run that were taken and never written: they can be taken again at once.
    pub(crate) fn untake(&mut self, rest: Reserve) {
        let Some(block) = self.blocks.get_mut(&(rest.start / self.entries)) else {
            return self.give_back(rest);
        };
        for cluster in rest.start..rest.start + rest.count {
            refcount::set(&mut block.data, to_usize(cluster % self.entries), self.order, 0);
        }
        block.dirty |= rest.count > 0;
        self.cursor = self.cursor.min(rest.start);
        if rest.zero && self.virgin == rest.start + rest.count {
            self.virgin = rest.start;
        }
    }

    /// Clusters are not in the map any more.
    pub(crate) fn gone(&mut self, start: u64, count: u64, epoch: Epoch) {
        if let Some(last) = self.gone.last_mut()
            && (last.start + last.count, last.epoch, last.flush) == (start, epoch, u64::MAX)
        {
            last.count += count;
            return;
        }
        self.gone.push(Gone { start, count, epoch, flush: u64::MAX });
    }

    /// Before a flush copies the map: its number. What went before is stable with it.
    pub(crate) fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        let flush = self.flushes;
        self.gone.iter_mut().filter(|g| g.flush == u64::MAX).for_each(|g| g.flush = flush);
        flush
    }

    /// The flush did not come to its end: what went with it waits for the next.
    pub(crate) fn failed_flush(&mut self, flush: u64) {
        self.gone.iter_mut().filter(|g| g.flush == flush).for_each(|g| g.flush = u64::MAX);
    }

    /// Some clusters that went with flushes up to `flush`, which are stable, and that nobody uses: they are the caller's, to
    /// punch and to count down.
    pub(crate) fn next_gone(&mut self, flush: u64, epochs: &Epochs) -> Option<(u64, u64)> {
        let at = self.gone.iter().position(|g| g.flush <= flush && epochs.is_over(g.epoch))?;
        let gone = self.gone.swap_remove(at);
        Some((gone.start, gone.count))
    }

    /// How many of the clusters, from the first on, are alike in whether this was their last use; and whether it was.
    ///
    /// # Errors
    /// What is to be done first.
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

    /// Counts clusters down, of one block, after [`last_uses`](Self::last_uses) found it here; `false`: it went since.
    pub(crate) fn count_down(&mut self, start: u64, count: u64) -> bool {
        let Some(block) = self.blocks.get_mut(&(start / self.entries)) else {
            return self.table.get(to_usize(start / self.entries)).is_none_or(|at| *at == 0);
        };
        for cluster in start..start + count {
            let at = to_usize(cluster % self.entries);
            let was = refcount::get(&block.data, at, self.order);
            // 0: the image counted it wrong before.
            refcount::set(&mut block.data, at, self.order, was.saturating_sub(1));
            if was == 1 {
                self.cursor = self.cursor.min(cluster);
            }
        }
        block.dirty = true;
        true
    }

    /// Copies of all dirty blocks, which count as clean from now on.
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

    /// Copies of the pieces of the table, `unit` bytes each, that have new entries; offsets are those in the table.
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

    /// What was taken was written, or (`false`) could not be: then it is dirty again.
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
