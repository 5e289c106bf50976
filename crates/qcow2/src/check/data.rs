//! Entries of L2 tables: the clusters that they refer to, and the flag that says that nothing else
//! refers to them.

use super::counts::Class;
use super::{Checker, Repair};
use crate::bytes::to_usize;
use crate::entry::{COMPRESSED, COPIED, Compressed, L2_RESERVED, OFFSET, ZERO};
use crate::header::incompatible;
use crate::image;
use crate::{Error, Result};

/// Subclusters that are allocated, and those that read as zeroes.
const ALLOCATED: u64 = 0xffff_ffff;
const ZEROES: u64 = 0xffff_ffff_0000_0000;

/// An error of an entry, and the entry to replace it.
struct Wrong {
    why: String,
    entry: u64,
    subclusters: u64,
}

/// The allocated clusters of the active tables.
#[derive(Clone, Copy, Default)]
struct Placed {
    allocated: u64,
    fragmented: u64,
    compressed: u64,
    /// The offset at which the next cluster is not fragmented.
    next: u64,
}

impl Checker<'_, '_> {
    /// Returns the number of words of an L2 entry.
    fn words(&self) -> usize {
        to_usize(self.image.header.l2_entry_bytes()) / 8
    }

    /// Counts the references of the L2 tables. Each table is read once, and counted as often as it
    /// is referred to.
    pub(super) fn claim_data(&mut self, active: bool) -> Result<()> {
        let mut tables = std::mem::take(&mut self.l2);
        tables.sort_unstable();
        let each = tables.chunk_by(|a, b| a == b);
        // Those of the active table are read again because of their flags.
        self.total += each.clone().count() as u64 * if active { 2 } else { 1 };
        for same in each {
            let times = same.len() as u64;
            let Some(&at) = same.first() else { continue };
            self.claim_entries(at, times, if active { times } else { 0 })?;
            self.step();
        }
        Ok(())
    }

    fn read_l2(&self, at: u64) -> Result<Option<Vec<u64>>> {
        let bytes = self.image.header.cluster_size();
        if self.image.file.is_hole(at, bytes).map_err(Error::io("cannot read an L2 table"))? {
            return Ok(None);
        }
        Ok(Some(image::words(&self.image.read(at, bytes, "an L2 table")?)))
    }

    fn claim_entries(&mut self, at: u64, times: u64, of_active: u64) -> Result<()> {
        let Some(mut table) = self.read_l2(at)? else { return Ok(()) };
        let (words, mut placed, mut changed) = (self.words(), Placed::default(), false);
        for (entry, place) in table.chunks_mut(words).enumerate() {
            let [e, rest @ ..] = place else { continue };
            let mut no_bits = 0;
            let subclusters = rest.first_mut().unwrap_or(&mut no_bits);
            // One error after the other: the replacement of an entry may be wrong in another way.
            while let Some(wrong) = self.claim_entry(*e, *subclusters, times, &mut placed) {
                if !self.corrupt(format_args!("L2 table at {at:#x}, entry {entry}: {}", wrong.why)) {
                    break;
                }
                changed = true;
                (*e, *subclusters) = (wrong.entry, wrong.subclusters);
            }
        }
        self.result.allocated_clusters += placed.allocated * of_active;
        self.result.fragmented_clusters += placed.fragmented * of_active;
        self.result.compressed_clusters += placed.compressed * of_active;
        if changed {
            self.image.write(at, &image::to_bytes(&table), "cannot repair an L2 table")?;
        }
        Ok(())
    }

    /// Counts the references of an entry. If it is wrong, returns the error, and counts nothing.
    fn claim_entry(&mut self, e: u64, subclusters: u64, times: u64, placed: &mut Placed) -> Option<Wrong> {
        let wrong = |why: String, entry: u64, subclusters: u64| Some(Wrong { why, entry, subclusters });
        let extended = self.image.header.has(incompatible::EXTENDED_L2);
        let external = self.image.header.has(incompatible::DATA_FILE);
        let (zeroes_entry, zeroes) = self.zeroes();
        if e & COMPRESSED != 0 {
            return self.claim_compressed(e, subclusters, times, placed);
        }
        if e == 0 && subclusters == 0 {
            return None;
        }
        let no_zero_flag = extended || self.image.header.version < 3;
        let reserved = L2_RESERVED | if no_zero_flag { ZERO } else { 0 };
        if e & reserved != 0 {
            return wrong(format!("reserved bits are set: {e:#x}"), e & !reserved, subclusters);
        }
        let at = e & OFFSET;
        if subclusters & ALLOCATED & subclusters >> 32 != 0 {
            let why = format!("subclusters are both there and zeroes: {subclusters:#x}");
            return wrong(why, e, subclusters & !(subclusters << 32));
        }
        if at == 0 && !(external && e & COPIED != 0) {
            return match (e & COPIED != 0, subclusters & ALLOCATED != 0) {
                (false, false) => None,
                _ => wrong(format!("a cluster that is nowhere: {e:#x}"), e & !COPIED, subclusters & ZEROES),
            };
        }
        if !at.is_multiple_of(self.image.header.cluster_size()) {
            return wrong(format!("data at {at:#x} does not begin at a cluster"), zeroes_entry, zeroes);
        }
        if !external && let Err(why) = self.claim(at, self.image.header.cluster_size(), Class::Data, times) {
            return wrong(format!("data at {at:#x} {why}"), zeroes_entry, zeroes);
        }
        placed.allocated += 1;
        placed.fragmented += u64::from(placed.next != 0 && at != placed.next);
        placed.next = at + self.image.header.cluster_size();
        None
    }

    fn claim_compressed(
        &mut self,
        e: u64,
        subclusters: u64,
        times: u64,
        placed: &mut Placed,
    ) -> Option<Wrong> {
        let wrong = |why: &str, entry: u64, subclusters: u64| {
            Some(Wrong { why: format!("{why}: {e:#x}"), entry, subclusters })
        };
        let (zeroes_entry, zeroes) = self.zeroes();
        if self.image.header.has(incompatible::DATA_FILE) {
            return wrong("a compressed cluster in an image with a data file", zeroes_entry, zeroes);
        }
        if e & COPIED != 0 {
            return wrong("a compressed cluster is said to be writable", e & !COPIED, subclusters);
        }
        if subclusters != 0 {
            return wrong("a compressed cluster with subclusters", e, 0);
        }
        let c = Compressed::of(e, self.image.header.cluster_bits);
        if let Err(why) = self.claim(c.offset, c.bytes, Class::Data, times) {
            return wrong(&format!("compressed data {why}"), zeroes_entry, zeroes);
        }
        placed.allocated += 1;
        placed.compressed += 1;
        // They are wherever there was room.
        placed.fragmented += 1;
        None
    }

    /// Returns an entry that reads as zeroes without data, like data beyond the file's end. Version
    /// 2 has no such entry; there, it is an unallocated one.
    fn zeroes(&self) -> (u64, u64) {
        match (self.image.header.version, self.image.header.has(incompatible::EXTENDED_L2)) {
            (2, _) => (0, 0),
            (_, true) => (0, ZEROES),
            (_, false) => (ZERO, 0),
        }
    }

    /// Checks that an entry of the active tables has its flag exactly if its cluster is counted
    /// once.
    pub(super) fn check_flags(&mut self) -> Result<()> {
        let mut active = std::mem::take(&mut self.active);
        let mut changed = false;
        for (n, slot) in active.iter_mut().enumerate() {
            let e = *slot;
            if e & OFFSET == 0 {
                continue;
            }
            let one = self.counts.is_one((e & OFFSET) >> self.image.header.cluster_bits);
            if let Some(right) = self.flag(e, one, format_args!("L1 table, entry {n}")) {
                *slot = right;
                changed = true;
            }
        }
        if changed {
            let at = self.image.header.l1_offset;
            self.image.write(at, &image::to_bytes(&active), "cannot repair the L1 table")?;
        }
        // Each table is checked once, because hostile images refer to one very often.
        let mut tables: Vec<u64> = active.iter().map(|e| e & OFFSET).filter(|at| *at != 0).collect();
        tables.sort_unstable();
        tables.dedup();
        for at in tables {
            self.check_l2_flags(at)?;
            self.step();
        }
        self.image.sync_if(self.repair != Repair::No)
    }

    fn check_l2_flags(&mut self, at: u64) -> Result<()> {
        let Some(mut table) = self.read_l2(at)? else { return Ok(()) };
        let mut changed = false;
        for (entry, e) in table.iter_mut().step_by(self.words()).enumerate() {
            let place = e;
            let e = *place;
            let cluster_size = self.image.header.cluster_size();
            if e & COMPRESSED != 0 || e & OFFSET == 0 || !(e & OFFSET).is_multiple_of(cluster_size) {
                continue;
            }
            // Only one entry can refer to a cluster of a data file.
            let external = self.image.header.has(incompatible::DATA_FILE);
            let one = external || self.counts.is_one((e & OFFSET) >> self.image.header.cluster_bits);
            if let Some(right) = self.flag(e, one, format_args!("L2 table at {at:#x}, entry {entry}")) {
                *place = right;
                changed = true;
            }
        }
        if changed {
            self.image.write(at, &image::to_bytes(&table), "cannot repair an L2 table")?;
        }
        Ok(())
    }

    /// Returns the right entry if the flag is wrong.
    fn flag(&mut self, e: u64, one: bool, of: std::fmt::Arguments<'_>) -> Option<u64> {
        if one == (e & COPIED != 0) {
            return None;
        }
        let count = if one { "counted once" } else { "not counted once" };
        let text = format_args!("{of}: OFLAG_COPIED is wrong, its cluster is {count}: {e:#x}");
        // A repaired leak may leave a cluster that is counted once and whose flag does not say so
        // yet.
        let fix = if one && self.repair == Repair::Leaks && self.result.corruptions == 0 {
            self.fixed(text);
            true
        } else {
            self.corrupt(text)
        };
        fix.then_some(e ^ COPIED)
    }
}
