//! Compares the image's counts with those that were counted. Repairs them, or writes all of them
//! again.

use std::collections::{BTreeMap, BTreeSet};

use super::counts::{Class, PAGE};
use super::{Checker, Repair};
use crate::bytes::{low_u32, to_usize};
use crate::header::{Header, REFTABLE_BYTES_MAX};
use crate::{Error, Result, image, refcount};

impl Checker<'_, '_> {
    fn order(&self) -> u32 {
        self.image.header.refcount_order
    }

    pub(super) fn compare(&mut self) -> Result<()> {
        let mut highest = 0;
        self.total += self.reftable.iter().filter(|at| **at != 0).count() as u64;
        let mut number = 0;
        while let Some(&at) = self.reftable.get(number) {
            if at != 0 {
                self.compare_block(number as u64, at, &mut highest)?;
                self.step();
            }
            number += 1;
        }
        self.compare_uncounted(&mut highest);
        self.image.sync_if(self.repair != Repair::No)?;
        self.result.image_end_offset = (highest + 1) << self.image.header.cluster_bits;
        if self.rebuild && self.repair == Repair::All {
            self.rebuild()?;
        }
        Ok(())
    }

    fn compare_block(&mut self, n: u64, at: u64, highest: &mut u64) -> Result<()> {
        let (bytes, entries) = (self.image.header.cluster_size(), self.image.header.refblock_entries());
        let hole = self.image.file.is_hole(at, bytes).map_err(Error::io("cannot read a refcount block"))?;
        let mut block =
            if hole { vec![0; to_usize(bytes)] } else { self.image.read(at, bytes, "a refcount block")? };
        let before = block.clone();
        let page_bytes = to_usize(PAGE) << self.order() >> 3;
        for (k, first) in (n * entries..(n + 1) * entries).step_by(to_usize(PAGE)).enumerate() {
            let part = block.get(k * page_bytes..(k + 1) * page_bytes).unwrap_or_default();
            if self.counts.page(first / PAGE).is_none() && part.iter().all(|b| *b == 0) {
                continue;
            }
            for i in 0..PAGE {
                let slot = k * to_usize(PAGE) + to_usize(i);
                let there = refcount::get(&block, slot, self.order());
                if let Some(count) = self.compare_one(first + i, there, highest) {
                    refcount::set(&mut block, slot, self.order(), count);
                }
            }
        }
        // In a rebuild these are dropped.
        if block != before && !(self.rebuild && self.repair == Repair::All) {
            self.image.write(at, &block, "cannot repair a refcount block")?;
        }
        Ok(())
    }

    /// Returns the count to write in place of a wrong one.
    fn compare_one(&mut self, cluster: u64, there: u64, highest: &mut u64) -> Option<u64> {
        let counted = self.counts.count(cluster);
        // Beyond the end of the file, a count without a reference costs nothing yet. QEMU does not
        // look there.
        let beyond =
            self.repair == Repair::No && cluster >= self.image.len.div_ceil(self.image.header.cluster_size());
        if counted == 0 && (there == 0 || beyond) {
            return None;
        }
        *highest = (*highest).max(cluster);
        let fix = match there.cmp(&counted) {
            std::cmp::Ordering::Equal => false,
            std::cmp::Ordering::Greater if self.repair == Repair::No => {
                self.result.leaks += 1;
                self.report("Leaked", format_args!("cluster {cluster} refcount={there} reference={counted}"));
                false
            }
            std::cmp::Ordering::Greater => {
                self.result.leaks_fixed += 1;
                self.report(
                    "Repairing",
                    format_args!("cluster {cluster} refcount={there} reference={counted}"),
                );
                true
            }
            std::cmp::Ordering::Less if counted > self.image.header.refcount_max() => {
                let most = self.image.header.refcount_max();
                self.unrepairable(format_args!(
                    "cluster {cluster} refcount={there} reference={counted}; {most} is the most that can be counted"
                ));
                false
            }
            std::cmp::Ordering::Less => {
                self.corrupt(format_args!("cluster {cluster} refcount={there} reference={counted}"))
            }
        };
        if counted > 0 {
            let now = if fix { counted } else { there };
            self.counts.set_one(cluster, now == 1);
        }
        fix.then_some(counted)
    }

    /// Reports clusters in use that have no refcount block.
    fn compare_uncounted(&mut self, highest: &mut u64) {
        let entries = self.image.header.refblock_entries();
        for page in self.counts.page_numbers() {
            for cluster in page * PAGE..(page + 1) * PAGE {
                let block = usize::try_from(cluster / entries).unwrap_or(usize::MAX);
                if self.reftable.get(block).is_some_and(|at| *at != 0) || self.counts.count(cluster) == 0 {
                    continue;
                }
                self.rebuild = true;
                self.compare_one(cluster, 0, highest);
            }
        }
    }

    /// Writes a new refcount table and new blocks behind everything else, and then refers to them.
    fn rebuild(&mut self) -> Result<()> {
        let h = self.image.header.clone();
        let (entries, bits) = (h.refblock_entries(), h.cluster_bits);
        let used = self.used_blocks(entries);
        let first = self.image.len.div_ceil(h.cluster_size());
        // Blocks for the clusters in use, for themselves and for the table.
        let (mut blocks, mut table);
        let mut added = BTreeSet::new();
        loop {
            blocks = used.union(&added).copied().collect::<BTreeSet<u64>>();
            let last = blocks.last().copied().unwrap_or(0);
            table = ((last + 1) * 8).div_ceil(h.cluster_size());
            let end = first + blocks.len() as u64 + table;
            let more: BTreeSet<u64> = (first / entries..end.div_ceil(entries)).collect();
            if more.is_subset(&blocks) {
                break;
            }
            added.extend(more);
        }
        if table << bits > REFTABLE_BYTES_MAX.max(h.cluster_size()) {
            return Err(Error::unsupported("the file is too large for its reference counts to be rebuilt"));
        }
        let own = first..first + blocks.len() as u64 + table;
        let places: BTreeMap<u64, u64> = blocks.iter().copied().zip(first..).collect();
        for (n, place) in &places {
            self.write_block(*n, *place, &own)?;
        }
        let last = blocks.last().copied().unwrap_or(0);
        let words: Vec<u64> = (0..=last).map(|n| places.get(&n).map_or(0, |place| place << bits)).collect();
        let table_at = (first + blocks.len() as u64) << bits;
        let mut bytes = image::to_bytes(&words);
        bytes.resize(to_usize(table << bits), 0);
        self.image.write(table_at, &bytes, "cannot write the refcount table")?;
        self.image.sync()?;
        // At most `REFTABLE_BYTES_MAX` bytes.
        let reftable_clusters = low_u32(table);
        self.image.replace_header(Header { reftable_offset: table_at, reftable_clusters, ..h })?;
        self.result.image_end_offset = own.end << bits;
        Ok(())
    }

    /// Returns the numbers of the blocks that count something other than the old table and blocks.
    fn used_blocks(&self, entries: u64) -> BTreeSet<u64> {
        let mut used = BTreeSet::new();
        for page in self.counts.page_numbers() {
            for cluster in page * PAGE..(page + 1) * PAGE {
                if self.kept(cluster) > 0 {
                    used.insert(cluster / entries);
                }
            }
        }
        used
    }

    /// Returns the references to a cluster without those of the old table and blocks.
    fn kept(&self, cluster: u64) -> u64 {
        match self.counts.class(cluster) {
            Class::RefTable | Class::RefBlock => 0,
            _ => self.counts.count(cluster),
        }
    }

    fn write_block(&mut self, n: u64, place: u64, own: &std::ops::Range<u64>) -> Result<()> {
        let h = &self.image.header;
        let (entries, most) = (h.refblock_entries(), h.refcount_max());
        let mut block = vec![0; to_usize(h.cluster_size())];
        for page in (n * entries / PAGE)..((n + 1) * entries / PAGE) {
            let near =
                self.counts.page(page).is_some() || (page * PAGE < own.end && own.start < (page + 1) * PAGE);
            if !near {
                continue;
            }
            for cluster in page * PAGE..(page + 1) * PAGE {
                let count = u64::from(own.contains(&cluster)) + self.kept(cluster);
                refcount::set(&mut block, to_usize(cluster % entries), self.order(), count.min(most));
                if count > 0 {
                    self.counts.set_one(cluster, count == 1);
                }
            }
        }
        self.image.write(place << self.image.header.cluster_bits, &block, "cannot write a refcount block")
    }
}
