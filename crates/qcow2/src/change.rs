//! A change of an image's tables that is made by one write.
//!
//! What changes is written where the file counts nothing: copies of refcount blocks, of the refcount table, of L1, L2
//! and other tables. One write of the header's fields, which lie in one sector, then refers to all of it at once. A
//! crash before leaves the image as it was, one after as it is to be: in between there is nothing.
//!
//! What must hold: the image's reference counts are right. Where they are not, a cluster in use may look free; who
//! calls this has [checked](crate::check) the image, or has kept the counts itself.
//!
//! Steps: 1 tables and counts are copied and changed; 2 [`commit`](Change::commit) writes what is left of them and
//! syncs; 3 the header; 4 what is free now gives its space back.

#![allow(
    clippy::indexing_slicing,
    reason = "a block is loaded, and the table made long enough for it, before it is used"
)]

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::bytes::{low_u32, to_usize};
use crate::entry::{COMPRESSED, COPIED, Compressed, OFFSET};
use crate::header::{Header, REFTABLE_BYTES_MAX, incompatible};
use crate::{Error, Image, Result, image, refcount};

/// Bytes of refcount blocks that are kept in memory, of each kind.
const CACHE_BYTES: u64 = 32 << 20;
/// Free ranges whose space is given back, at most; of more it stays with the file, for later use.
const FREED_MAX: usize = 1 << 20;

/// A change under way. Dropped without [`commit`](Self::commit) it has not happened.
pub(crate) struct Change<'i, 's> {
    pub(crate) image: &'i mut Image<'s>,
    /// The refcount table as it was, and blocks of it.
    old_table: Vec<u64>,
    old: BTreeMap<u64, Vec<u8>>,
    /// As it will be; blocks in memory have to be written.
    table: Vec<u64>,
    blocks: BTreeMap<u64, Vec<u8>>,
    /// Numbers of blocks that have their new place.
    moved: HashSet<u64>,
    /// Counts to be set.
    pending: Vec<(u64, u64)>,
    /// Nothing below is looked at for free clusters any more.
    next: u64,
    freed: Vec<Range<u64>>,
}

impl<'i, 's> Change<'i, 's> {
    /// Begins one.
    ///
    /// # Errors
    /// The image was not closed or is corrupt, or its refcount table cannot be read.
    pub(crate) fn begin(image: &'i mut Image<'s>) -> Result<Self> {
        if image.header.is_open() || image.header.has(incompatible::CORRUPT) {
            return Err(Error::corrupt("it was not closed, or is marked as corrupt"));
        }
        Self::begin_repair(image)
    }

    /// Begins one that is part of a repair: the counts are right, whatever the marks still say.
    ///
    /// # Errors
    /// The image's refcount table cannot be read.
    pub(crate) fn begin_repair(image: &'i mut Image<'s>) -> Result<Self> {
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

    /// A cluster's count as it was.
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

    /// A cluster's count as it will be.
    pub(crate) fn count(&mut self, cluster: u64) -> Result<u64> {
        let (number, slot) = self.split(cluster);
        if !self.moved.contains(&number) {
            return self.old_count(cluster);
        }
        self.load(number)?;
        Ok(refcount::get(&self.blocks[&number], slot, self.image.header.refcount_order))
    }

    /// Brings a block that is to be changed into memory, at its new place.
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
                self.note_freed(cluster);
            }
        }
        Ok(())
    }

    /// Sets a count; and those of blocks that move for it, and so on, each once.
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

    fn write_blocks(&mut self) -> Result<()> {
        for (number, block) in std::mem::take(&mut self.blocks) {
            self.image.write(self.table[to_usize(number)], &block, "cannot write a refcount block")?;
        }
        Ok(())
    }

    /// The first of `n` clusters that are free, were free before, and are not taken by this change.
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

    /// Makes the refcount table at least so long.
    pub(crate) fn widen(&mut self, entries: u64) {
        self.table.resize(to_usize(entries).max(self.table.len()), 0);
    }

    /// Looks for free clusters at and behind this one only.
    pub(crate) fn look_from(&mut self, cluster: u64) {
        self.next = self.next.max(cluster);
    }

    /// Takes `n` clusters in a row; where they begin.
    pub(crate) fn take(&mut self, n: u64) -> Result<u64> {
        let first = self.find(n)?;
        self.next = first + n;
        for cluster in first..self.next {
            self.set(cluster, 1)?;
        }
        Ok(first << self.image.header.cluster_bits)
    }

    /// Writes bytes to clusters of their own; where they begin. No bytes are nowhere: 0.
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

    /// Raises or lowers a cluster's count by one; the new count.
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
            self.note_freed(cluster);
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
            // Where a table without entries lies, it takes no cluster.
            return 0..0;
        }
        offset >> bits..offset.saturating_add(bytes).div_ceil(1 << bits)
    }

    fn note_freed(&mut self, cluster: u64) {
        let room = self.freed.len() < FREED_MAX;
        match self.freed.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ if room => self.freed.push(cluster..cluster + 1),
            _ => {}
        }
    }

    /// Reads an L2 table: its words, one or two an entry.
    pub(crate) fn l2(&self, at: u64) -> Result<Vec<u64>> {
        Ok(image::words(&self.image.read(at, self.image.header.cluster_size(), "an L2 table")?))
    }

    /// Words of an L2 entry.
    pub(crate) fn words(&self) -> usize {
        to_usize(self.image.header.l2_entry_bytes()) / 8
    }

    /// Clusters of the image that an L2 entry refers to.
    pub(crate) fn referred(&self, e: u64) -> Range<u64> {
        if e & COMPRESSED != 0 {
            let c = Compressed::of(e, self.image.header.cluster_bits);
            return self.clusters(c.offset, c.bytes);
        }
        let external = self.image.header.has(incompatible::DATA_FILE);
        if external || e & OFFSET == 0 { 0..0 } else { self.clusters(e & OFFSET, 1) }
    }

    /// Raises or lowers the counts of all that an L2 table refers to.
    pub(crate) fn add_entries(&mut self, table: &[u64], up: bool) -> Result<()> {
        for e in table.iter().step_by(self.words()) {
            for cluster in self.referred(*e) {
                self.add(cluster, up)?;
            }
        }
        Ok(())
    }

    /// Raises or lowers the counts of all that an L1 table refers to, its L2 tables included.
    pub(crate) fn add_tables(&mut self, l1: &[u64], up: bool) -> Result<()> {
        for at in l1.iter().map(|e| e & OFFSET).filter(|at| *at != 0) {
            let table = self.l2(at)?;
            self.add_entries(&table, up)?;
            self.add(at >> self.image.header.cluster_bits, up)?;
        }
        Ok(())
    }

    /// Gives the entries of active tables their flags by the counts as they will be. An L2 table whose flags change
    /// gets a new place.
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

    /// Whether a flag is another now.
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

    /// The active L1 table.
    pub(crate) fn l1(&self) -> Result<Vec<u64>> {
        let h = &self.image.header;
        self.image.table(h.l1_offset, u64::from(h.l1_size), "the L1 table")
    }

    /// Gives the active L1 table new contents, at a new place that `header` then names.
    pub(crate) fn replace_l1(&mut self, l1: &[u64], header: &mut Header) -> Result<()> {
        let h = &self.image.header;
        let (at, bytes) = (h.l1_offset, u64::from(h.l1_size) * 8);
        self.release(at, bytes)?;
        header.l1_offset = self.put(image::to_bytes(l1))?;
        header.l1_size = low_u32(l1.len() as u64);
        Ok(())
    }

    /// Makes it so: `header` becomes the image's.
    pub(crate) fn commit(mut self, mut header: Header) -> Result<()> {
        let room = (u64::from(header.reftable_clusters) << header.cluster_bits) / 8;
        if !self.moved.is_empty() || self.table.len() as u64 > room {
            self.move_table(&mut header)?;
        }
        if header.snapshots == 0 {
            // The place of a table without entries counts as nothing, and the file may come to end before it.
            header.snapshots_offset = 0;
        }
        self.write_blocks()?;
        self.image.sync()?;
        self.image.replace_header(header)?;
        self.image.len = self.image.file.len().map_err(Error::io("cannot read the file's length"))?;
        self.give_back()
    }

    /// The refcount table at a new place; the old one is free.
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
            // Its own clusters made it longer.
            self.release(place, n << header.cluster_bits)?;
        }
        let mut bytes = image::to_bytes(&self.table);
        bytes.resize((header.reftable_clusters as usize) << header.cluster_bits, 0);
        self.image.write(header.reftable_offset, &bytes, "cannot write the refcount table")
    }

    /// What is free now is not needed on the disk. That it stays is no harm, so that errors are none.
    fn give_back(mut self) -> Result<()> {
        // What is read from now on is as it was written: nothing is under way.
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

    /// Ends the file where the last cluster in use ends.
    fn trim(&mut self) -> Result<()> {
        let (h, order) = (&self.image.header, self.image.header.refcount_order);
        let (size, entries) = (h.cluster_size(), h.refblock_entries());
        for (n, at) in self.old_table.iter().enumerate().rev().filter(|(_, at)| **at != 0) {
            let block = self.read_block(*at)?;
            let last = (0..to_usize(entries)).rev().find(|slot| refcount::get(&block, *slot, order) != 0);
            if let Some(slot) = last {
                let end = (n as u64 * entries + slot as u64 + 1) * size;
                if end < self.image.len && self.image.file.set_len(end).is_ok() {
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

/// Whether an entry of a standard L2 table, or of an extended one, refers to data of its own.
pub(crate) fn is_data(e: u64) -> bool {
    e & COMPRESSED == 0 && e & OFFSET != 0
}
