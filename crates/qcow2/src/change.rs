//! A change of an image's tables that one write makes effective.
//!
//! New contents are written to free clusters: copies of refcount blocks, of the refcount table, of
//! L1, L2 and other tables. One write of the header's fields, which are in one sector, then refers
//! to all of it at once. A crash before that write leaves the old image, a crash after it the new
//! one. There is no state in between.
//!
//! The image's reference counts must be right, because otherwise a cluster in use may look free.
//! The caller has [checked](crate::check) the image, or has maintained the counts itself.
//!
//! Steps:
//! 1. Tables and counts are copied and changed.
//! 2. [`commit`](Change::commit) writes the rest of them and syncs.
//! 3. The header is written.
//! 4. The space of clusters that are free now is given back.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::bytes::{low_u32, to_usize};
use crate::entry::{COMPRESSED, COPIED, Compressed, OFFSET};
use crate::header::{Header, REFTABLE_BYTES_MAX, incompatible};
use crate::{Error, Image, Result, image, refcount};

/// Bytes of refcount blocks in memory, for each of the two kinds.
const CACHE_BYTES: u64 = 32 << 20;
/// Most free ranges whose space is given back. The space of further ranges stays with the file for
/// later use.
const FREED_MAX: usize = 1 << 20;

/// A change that is being made. If it is dropped without [`commit`](Self::commit), the image is
/// unchanged.
pub(crate) struct Change<'i, 's> {
    pub(crate) image: &'i mut Image<'s>,
    /// The old refcount table, and blocks of it.
    old_table: Vec<u64>,
    old: BTreeMap<u64, Vec<u8>>,
    /// The new refcount table. Its blocks in memory have to be written.
    table: Vec<u64>,
    blocks: BTreeMap<u64, Vec<u8>>,
    /// Numbers of blocks that have a new offset already.
    moved: HashSet<u64>,
    /// Counts that have to be set.
    pending: Vec<(u64, u64)>,
    /// The search for free clusters starts here.
    next: u64,
    freed: Vec<Range<u64>>,
}

impl<'i, 's> Change<'i, 's> {
    /// Starts a change.
    ///
    /// # Errors
    /// The image was not closed or is corrupt, or its refcount table cannot be read.
    pub(crate) fn start(image: &'i mut Image<'s>) -> Result<Self> {
        if image.header.is_open() || image.header.has(incompatible::CORRUPT) {
            return Err(Error::corrupt("it was not closed, or is marked as corrupt"));
        }
        Self::start_repair(image)
    }

    /// Starts a change that is part of a repair. The counts are right, although the header may
    /// still be marked.
    ///
    /// # Errors
    /// The image's refcount table cannot be read.
    pub(crate) fn start_repair(image: &'i mut Image<'s>) -> Result<Self> {
        let h = &image.header;
        let entries = u64::from(h.reftable_clusters) * h.cluster_size() / 8;
        let table = image.table(h.reftable_offset, entries, "the refcount table")?;
        Ok(Self {
            image,
            old_table: table.clone(),
            old: BTreeMap::new(),
            table,
            blocks: BTreeMap::new(),
            moved: HashSet::new(),
            pending: Vec::new(),
            next: 1,
            freed: Vec::new(),
        })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.image.header
    }

    fn split(&self, cluster: u64) -> (u64, usize) {
        let entries = self.image.header.refblock_entries();
        (cluster / entries, to_usize(cluster % entries))
    }

    fn cached_most(&self) -> usize {
        to_usize((CACHE_BYTES / self.image.header.cluster_size()).max(2))
    }

    fn read_block(&self, at: u64) -> Result<Vec<u8>> {
        let bytes = self.image.header.cluster_size();
        if at == 0 {
            return Ok(vec![0; to_usize(bytes)]);
        }
        let mut block = vec![0; to_usize(bytes)];
        if !at.is_multiple_of(bytes) {
            return Err(Error::corrupt(format!("a refcount block at {at:#x}")));
        }
        self.image.file.read_at(at, &mut block).map_err(Error::io("cannot read a refcount block"))?;
        Ok(block)
    }

    /// Returns a cluster's old count.
    #[expect(clippy::indexing_slicing, reason = "the block was inserted above, if it was missing")]
    fn old_count(&mut self, cluster: u64) -> Result<u64> {
        let (number, slot) = self.split(cluster);
        let at = self.old_table.get(to_usize(number)).copied().unwrap_or(0);
        if at == 0 {
            return Ok(0);
        }
        if !self.old.contains_key(&number) {
            if self.old.len() >= self.cached_most() {
                self.old.clear();
            }
            let block = self.read_block(at)?;
            self.old.insert(number, block);
        }
        Ok(refcount::get(&self.old[&number], slot, self.image.header.refcount_order))
    }

    /// Returns a cluster's new count.
    #[expect(clippy::indexing_slicing, reason = "`load` has inserted the block")]
    pub(crate) fn count(&mut self, cluster: u64) -> Result<u64> {
        let (number, slot) = self.split(cluster);
        if !self.moved.contains(&number) {
            return self.old_count(cluster);
        }
        self.load(number)?;
        Ok(refcount::get(&self.blocks[&number], slot, self.image.header.refcount_order))
    }

    /// Reads a block that has to be changed, and gives it a new offset.
    #[expect(clippy::indexing_slicing, reason = "the table was made long enough above")]
    fn load(&mut self, number: u64) -> Result<()> {
        if self.blocks.contains_key(&number) {
            return Ok(());
        }
        if self.blocks.len() >= self.cached_most() {
            self.write_blocks()?;
        }
        if number >= REFTABLE_BYTES_MAX / 8 {
            return Err(Error::unsupported("there is no room in the image's refcount table"));
        }
        if self.table.len() <= to_usize(number) {
            self.table.resize(to_usize(number) + 1, 0);
        }
        let at = self.table[to_usize(number)];
        let block = self.read_block(at)?;
        self.blocks.insert(number, block);
        if self.moved.insert(number) {
            let place = self.find(1)?;
            self.next = place + 1;
            self.table[to_usize(number)] = place << self.image.header.cluster_bits;
            self.pending.push((place, 1));
            if at != 0 {
                let cluster = at >> self.image.header.cluster_bits;
                self.pending.push((cluster, 0));
                self.record_freed(cluster);
            }
        }
        Ok(())
    }

    /// Sets a count, and the counts of blocks that move because of it, each block once.
    fn set(&mut self, cluster: u64, count: u64) -> Result<()> {
        self.pending.push((cluster, count));
        while let Some((cluster, count)) = self.pending.pop() {
            let (number, slot) = self.split(cluster);
            self.load(number)?;
            let order = self.image.header.refcount_order;
            if let Some(block) = self.blocks.get_mut(&number) {
                refcount::set(block, slot, order, count);
            }
        }
        Ok(())
    }

    #[expect(
        clippy::indexing_slicing,
        reason = "`load` made the table long enough for each block that it keeps"
    )]
    fn write_blocks(&mut self) -> Result<()> {
        for (number, block) in std::mem::take(&mut self.blocks) {
            self.image.write(self.table[to_usize(number)], &block, "cannot write a refcount block")?;
        }
        Ok(())
    }

    /// Returns the first of `n` clusters that were free before and are not taken by this change.
    fn find(&mut self, n: u64) -> Result<u64> {
        let (mut first, mut at) = (self.next, self.next);
        while at < first + n {
            if self.old_count(at)? != 0 {
                first = at + 1;
            }
            at += 1;
        }
        if first.checked_add(n).is_none_or(|end| end > OFFSET >> self.image.header.cluster_bits) {
            return Err(Error::unsupported("there is no room in the image"));
        }
        Ok(first)
    }

    /// Makes the refcount table at least `entries` long.
    pub(crate) fn widen(&mut self, entries: u64) {
        self.table.resize(to_usize(entries).max(self.table.len()), 0);
    }

    /// Limits the search for free clusters to this cluster and those behind it.
    pub(crate) fn search_from(&mut self, cluster: u64) {
        self.next = self.next.max(cluster);
    }

    /// Takes `n` consecutive clusters, and returns the first.
    pub(crate) fn take(&mut self, n: u64) -> Result<u64> {
        let first = self.find(n)?;
        self.next = first + n;
        for cluster in first..self.next {
            self.set(cluster, 1)?;
        }
        Ok(first << self.image.header.cluster_bits)
    }

    /// Writes bytes to new clusters, and returns their offset. If there are no bytes, returns 0.
    pub(crate) fn put(&mut self, mut bytes: Vec<u8>) -> Result<u64> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let n = (bytes.len() as u64).div_ceil(self.image.header.cluster_size());
        bytes.resize(to_usize(n << self.image.header.cluster_bits), 0);
        let at = self.take(n)?;
        self.image.write(at, &bytes, "cannot write a table")?;
        self.image.len = self.image.len.max(at + bytes.len() as u64);
        Ok(at)
    }

    /// Raises or lowers a cluster's count by one, and returns the new count.
    pub(crate) fn add(&mut self, cluster: u64, up: bool) -> Result<u64> {
        if !self.image.reaches(cluster << self.image.header.cluster_bits, 1) {
            return Err(Error::corrupt(format!(
                "it refers to cluster {cluster}, behind the end of the file"
            )));
        }
        let count = self.count(cluster)?;
        let most = self.image.header.refcount_max();
        let new = match up {
            true if count == most => {
                return Err(Error::unsupported(format!(
                    "the image's reference counts end at {most} (refcount_bits): no more snapshots of it can be taken"
                )));
            }
            true => count + 1,
            false => count
                .checked_sub(1)
                .ok_or_else(|| Error::corrupt(format!("cluster {cluster} is in use and not counted")))?,
        };
        self.set(cluster, new)?;
        if new == 0 {
            self.record_freed(cluster);
        }
        Ok(new)
    }

    /// Lowers the counts of all clusters of a range.
    pub(crate) fn release(&mut self, offset: u64, bytes: u64) -> Result<()> {
        for cluster in self.clusters(offset, bytes) {
            self.add(cluster, false)?;
        }
        Ok(())
    }

    fn clusters(&self, offset: u64, bytes: u64) -> Range<u64> {
        let bits = self.image.header.cluster_bits;
        if bytes == 0 {
            // A table without entries takes no cluster, whatever its offset is.
            return 0..0;
        }
        offset >> bits..offset.saturating_add(bytes).div_ceil(1 << bits)
    }

    fn record_freed(&mut self, cluster: u64) {
        let room = self.freed.len() < FREED_MAX;
        match self.freed.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ if room => self.freed.push(cluster..cluster + 1),
            _ => {}
        }
    }

    /// Reads an L2 table. Returns its words, one or two for each entry.
    pub(crate) fn l2(&self, at: u64) -> Result<Vec<u64>> {
        Ok(image::words(&self.image.read(at, self.image.header.cluster_size(), "an L2 table")?))
    }

    /// Returns the number of words of an L2 entry.
    pub(crate) fn words(&self) -> usize {
        to_usize(self.image.header.l2_entry_bytes()) / 8
    }

    /// Returns the clusters of the image that an L2 entry refers to.
    pub(crate) fn referred(&self, e: u64) -> Range<u64> {
        if e & COMPRESSED != 0 {
            let c = Compressed::of(e, self.image.header.cluster_bits);
            return self.clusters(c.offset, c.bytes);
        }
        let external = self.image.header.has(incompatible::DATA_FILE);
        if external || e & OFFSET == 0 { 0..0 } else { self.clusters(e & OFFSET, 1) }
    }

    /// Raises or lowers the counts of all clusters that an L2 table refers to.
    pub(crate) fn add_entries(&mut self, table: &[u64], up: bool) -> Result<()> {
        for e in table.iter().step_by(self.words()) {
            for cluster in self.referred(*e) {
                self.add(cluster, up)?;
            }
        }
        Ok(())
    }

    /// Raises or lowers the counts of all clusters that an L1 table refers to, its L2 tables
    /// included.
    pub(crate) fn add_tables(&mut self, l1: &[u64], up: bool) -> Result<()> {
        for at in l1.iter().map(|e| e & OFFSET).filter(|at| *at != 0) {
            let table = self.l2(at)?;
            self.add_entries(&table, up)?;
            self.add(at >> self.image.header.cluster_bits, up)?;
        }
        Ok(())
    }

    /// Sets the flags of the entries of active tables according to the new counts. An L2 table
    /// whose flags change is written to a new offset.
    pub(crate) fn set_flags(&mut self, l1: &mut [u64]) -> Result<()> {
        let bits = self.image.header.cluster_bits;
        for e in l1.iter_mut() {
            let mut at = *e & OFFSET;
            if at == 0 {
                continue;
            }
            let mut table = self.l2(at)?;
            if self.set_entry_flags(&mut table)? {
                self.add(at >> bits, false)?;
                at = self.put(image::to_bytes(&table))?;
            }
            let one = self.count(at >> bits)? == 1;
            *e = at | if one { COPIED } else { 0 };
        }
        Ok(())
    }

    /// Sets the flags of one table. Returns whether one changed.
    fn set_entry_flags(&mut self, table: &mut [u64]) -> Result<bool> {
        let external = self.image.header.has(incompatible::DATA_FILE);
        let mut changed = false;
        for place in table.iter_mut().step_by(self.words()) {
            let e = *place;
            if external || e & COMPRESSED != 0 || e & OFFSET == 0 {
                continue;
            }
            let one = self.count((e & OFFSET) >> self.image.header.cluster_bits)? == 1;
            *place = e & !COPIED | if one { COPIED } else { 0 };
            changed |= *place != e;
        }
        Ok(changed)
    }

    /// Returns the active L1 table.
    pub(crate) fn l1(&self) -> Result<Vec<u64>> {
        let h = &self.image.header;
        self.image.table(h.l1_offset, u64::from(h.l1_size), "the L1 table")
    }

    /// Replaces the active L1 table by a new one at a new offset, which is then in `header`.
    pub(crate) fn replace_l1(&mut self, l1: &[u64], header: &mut Header) -> Result<()> {
        let h = &self.image.header;
        let (at, bytes) = (h.l1_offset, u64::from(h.l1_size) * 8);
        self.release(at, bytes)?;
        header.l1_offset = self.put(image::to_bytes(l1))?;
        header.l1_size = low_u32(l1.len() as u64);
        Ok(())
    }

    /// Makes the change effective: `header` becomes the image's.
    pub(crate) fn commit(mut self, mut header: Header) -> Result<()> {
        let room = (u64::from(header.reftable_clusters) << header.cluster_bits) / 8;
        if !self.moved.is_empty() || self.table.len() as u64 > room {
            self.move_table(&mut header)?;
        }
        if header.snapshots == 0 {
            // The offset of a table without entries takes no cluster, and the file may end before
            // it.
            header.snapshots_offset = 0;
        }
        self.write_blocks()?;
        self.image.sync()?;
        self.image.replace_header(header)?;
        self.image.len = self.image.file.len().map_err(Error::io("cannot read the file's length"))?;
        // The image is changed. If this fails, only space is lost.
        let _ = self.give_back();
        Ok(())
    }

    /// Writes the refcount table to a new offset, and frees the old one.
    fn move_table(&mut self, header: &mut Header) -> Result<()> {
        let (at, bytes) =
            (header.reftable_offset, u64::from(header.reftable_clusters) << header.cluster_bits);
        self.release(at, bytes)?;
        loop {
            let n = (self.table.len() as u64 * 8).div_ceil(header.cluster_size());
            if n << header.cluster_bits > REFTABLE_BYTES_MAX.max(header.cluster_size()) {
                return Err(Error::unsupported("there is no room in the image's refcount table"));
            }
            let place = self.take(n)?;
            if (self.table.len() as u64 * 8).div_ceil(header.cluster_size()) == n {
                (header.reftable_offset, header.reftable_clusters) = (place, low_u32(n));
                break;
            }
            // Its own clusters made the table longer.
            self.release(place, n << header.cluster_bits)?;
        }
        let mut bytes = image::to_bytes(&self.table);
        bytes.resize((header.reftable_clusters as usize) << header.cluster_bits, 0);
        self.image.write(header.reftable_offset, &bytes, "cannot write the refcount table")
    }

    /// Gives back the space of clusters that are free now.
    ///
    /// # Errors
    /// The system's; only space is lost then.
    fn give_back(mut self) -> Result<()> {
        // Reads from now on see what was written: nothing is pending.
        self.old_table = self.table.clone();
        self.old.clear();
        self.moved.clear();
        let bits = self.image.header.cluster_bits;
        for range in std::mem::take(&mut self.freed) {
            let mut from = range.start;
            for cluster in range.clone() {
                if self.old_count(cluster)? != 0 {
                    self.punch(from..cluster, bits);
                    from = cluster + 1;
                }
            }
            self.punch(from..range.end, bits);
        }
        self.trim()
    }

    /// Lets the file end with the last cluster in use. A wrong count makes it no longer than whole
    /// clusters.
    fn trim(&mut self) -> Result<()> {
        let (h, order) = (&self.image.header, self.image.header.refcount_order);
        let (size, entries) = (h.cluster_size(), h.refblock_entries());
        for (n, at) in self.old_table.iter().enumerate().rev().filter(|(_, at)| **at != 0) {
            let block = self.read_block(*at)?;
            let last = (0..to_usize(entries)).rev().find(|slot| refcount::get(&block, *slot, order) != 0);
            if let Some(slot) = last {
                let end = (n as u64 * entries + slot as u64 + 1) * size;
                let end = end.min(self.image.len.next_multiple_of(size));
                if end != self.image.len && self.image.file.set_len(end).is_ok() {
                    self.image.len = end;
                }
                break;
            }
        }
        Ok(())
    }

    fn punch(&self, range: Range<u64>, bits: u32) {
        if !range.is_empty() {
            let _ = self.image.file.punch(range.start << bits, (range.end - range.start) << bits);
        }
    }
}

/// Returns whether an entry of a standard L2 table, or of an extended one, refers to data.
pub(crate) fn is_data(e: u64) -> bool {
    e & COMPRESSED == 0 && e & OFFSET != 0
}
