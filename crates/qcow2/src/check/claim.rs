//! Claims clusters: for the header, reference counts, L1 tables, snapshots, bitmaps and L2 tables.

use super::Checker;
use super::counts::Class;
use crate::entry::{self, L1_RESERVED};
use crate::header::L1_BYTES_MAX;
use crate::image;
use crate::snapshot::{self, EXTRA_V3};
use crate::{Error, Result, bitmap};

/// Why a range of the file cannot be claimed.
pub(super) enum Refused {
    Unaligned,
    Outside,
    Holds(Class),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unaligned => f.write_str("does not begin at a cluster"),
            Self::Outside => f.write_str("lies beyond the end of the file"),
            Self::Holds(class) => write!(f, "lies where {} is", class.name()),
        }
    }
}

impl Checker<'_, '_> {
    /// Counts a reference to all clusters of a range, or to none.
    pub(super) fn claim(
        &mut self,
        offset: u64,
        bytes: u64,
        class: Class,
        n: u64,
    ) -> std::result::Result<(), Refused> {
        let bits = self.image.header.cluster_bits;
        if bytes == 0 {
            return Ok(());
        }
        if class != Class::Data && !offset.is_multiple_of(1 << bits) {
            return Err(Refused::Unaligned);
        }
        // Only the header is at offset 0, and only compressed data starts within a cluster.
        if !self.image.reaches(offset, bytes) {
            return Err(Refused::Outside);
        }
        let clusters = offset >> bits..(offset + bytes).div_ceil(1 << bits);
        for cluster in clusters.clone() {
            if let Err(there) = self.counts.add(cluster, class, n) {
                self.unclaim(clusters.start..cluster, class, n);
                return Err(Refused::Holds(there));
            }
        }
        Ok(())
    }

    fn unclaim(&mut self, clusters: std::ops::Range<u64>, class: Class, n: u64) {
        for cluster in clusters {
            let left = self.counts.count(cluster).saturating_sub(n);
            self.counts.forget(cluster);
            if left > 0 {
                let _ = self.counts.add(cluster, class, left);
            }
        }
    }

    /// Counts all references. The most important ones come first, and keep clusters that two of
    /// them claim: the disk, its snapshots, its bitmaps, and last the reference counts, which can
    /// be rebuilt.
    pub(super) fn claim_all(&mut self) -> Result<()> {
        // The first cluster of a new image may be incomplete.
        let _ = self.counts.add(0, Class::Header, 1);
        self.claim_active()?;
        let (at, entries) = (self.image.header.l1_offset, self.image.header.l1_size);
        self.active = self.claim_l2_tables("L1 table", at, entries)?;
        self.claim_data(true)?;
        for (at, entries) in self.claim_snapshots()? {
            self.claim_l2_tables("snapshot's L1 table", at, entries)?;
        }
        self.claim_data(false)?;
        self.claim_bitmaps()?;
        self.claim_refcounts(self.image.header.cluster_size())
    }

    fn claim_refcounts(&mut self, cluster: u64) -> Result<()> {
        let (at, clusters) = (self.image.header.reftable_offset, self.image.header.reftable_clusters);
        let bytes = u64::from(clusters) * cluster;
        if let Err(why) = self.claim(at, bytes, Class::RefTable, 1) {
            self.rebuild = true;
            self.corrupt(format_args!("refcount table at {at:#x} {why}"));
            return Ok(());
        }
        let mut table = self.image.table(at, bytes / 8, "the refcount table")?;
        for (n, at) in table.iter_mut().enumerate().filter(|(_, at)| **at != 0) {
            if let Err(why) = self.claim(*at, cluster, Class::RefBlock, 1) {
                self.rebuild = true;
                self.corrupt(format_args!("refcount block {n} at {at:#x} {why}"));
                *at = 0;
            }
        }
        self.reftable = table;
        Ok(())
    }

    fn claim_active(&mut self) -> Result<()> {
        let (at, entries) = (self.image.header.l1_offset, self.image.header.l1_size);
        if entries == 0 {
            return Ok(());
        }
        match self.claim(at, u64::from(entries) * 8, Class::L1, 1) {
            Ok(()) => Ok(()),
            Err(why) => Err(Error::corrupt(format!("its L1 table at {at:#x} {why}"))),
        }
    }

    /// Claims the L1 tables of readable snapshots, and returns them.
    fn claim_snapshots(&mut self) -> Result<Vec<(u64, u32)>> {
        let header = &self.image.header;
        let (at, version, size) = (header.snapshots_offset, header.version, header.size);
        if header.snapshots == 0 && !self.image.holds(at, 0) {
            // QEMU refuses to open such an image although the table has no entry.
            self.corrupt(format_args!("snapshot table of no entries at {at:#x}, where the file has none"));
            self.defects.snapshots = Some(Vec::new());
            return Ok(Vec::new());
        }
        let (list, bytes) = match snapshot::read_table(&self.image) {
            Ok(read) => read,
            Err(e @ Error::Io { .. }) => return Err(e),
            Err(e) => {
                self.corrupt(format_args!("{e}"));
                self.defects.snapshots = Some(Vec::new());
                return Ok(Vec::new());
            }
        };
        let mut wrong = false;
        if let Err(why) = self.claim(at, bytes, Class::Snapshots, 1) {
            self.corrupt(format_args!("snapshot table at {at:#x} {why}"));
            wrong = true;
        }
        let (mut tables, mut kept) = (Vec::with_capacity(list.len()), Vec::with_capacity(list.len()));
        for mut s in list {
            let (id, bytes) = (s.id(), u64::from(s.l1_size) * 8);
            if version >= 3 && s.disk_size.is_none() {
                self.corrupt(format_args!("snapshot {id} has less than {EXTRA_V3} bytes of extra data"));
                s.disk_size = Some(size);
                wrong = true;
            }
            let claimed = match bytes > L1_BYTES_MAX {
                true => Err(Refused::Outside),
                false => self.claim(s.l1_offset, bytes, Class::L1, 1),
            };
            if let Err(why) = claimed {
                self.corrupt(format_args!("L1 table of snapshot {id} at {:#x} {why}", s.l1_offset));
                wrong = true;
                continue;
            }
            tables.push((s.l1_offset, s.l1_size));
            kept.push(s);
        }
        self.defects.snapshots = wrong.then_some(kept);
        Ok(tables)
    }

    fn claim_bitmaps(&mut self) -> Result<()> {
        match self.claim_all_bitmaps() {
            Err(Error::Corrupt(why)) => {
                self.corrupt(format_args!("{why}"));
                self.defects.bitmaps = true;
                Ok(())
            }
            other => other,
        }
    }

    fn claim_all_bitmaps(&mut self) -> Result<()> {
        let list = bitmap::read_directory(&self.image)?;
        let Some(at) = self.image.header.bitmaps.filter(|_| !list.is_empty()) else { return Ok(()) };
        let bad = |what: String, why: Refused| Error::corrupt(format!("{what} {why}"));
        self.claim(at.directory_offset, at.directory_bytes, Class::Bitmaps, 1)
            .map_err(|why| bad(format!("bitmap directory at {:#x}", at.directory_offset), why))?;
        for b in &list {
            let bytes = u64::from(b.table_size) * 8;
            self.claim(b.table_offset, bytes, Class::Bitmaps, 1)
                .map_err(|why| bad(format!("table of bitmap {} at {:#x}", b.name(), b.table_offset), why))?;
            let table = self.image.table(b.table_offset, u64::from(b.table_size), "a bitmap table")?;
            for (n, e) in table.into_iter().enumerate().filter(|(_, e)| *e != 0) {
                let what = || format!("bitmap {}, table entry {n}: {e:#x}", b.name());
                let at = e & entry::OFFSET;
                if e & bitmap::TABLE_RESERVED != 0 || (at != 0 && e & bitmap::ALL_ONES != 0) {
                    return Err(Error::corrupt(format!("{} has reserved bits set", what())));
                }
                if at != 0 {
                    self.claim(at, self.image.header.cluster_size(), Class::Bitmaps, 1)
                        .map_err(|why| bad(what(), why))?;
                }
            }
        }
        Ok(())
    }

    /// Counts the L2 tables of an L1 table, and returns that table.
    fn claim_l2_tables(&mut self, of: &str, offset: u64, entries: u32) -> Result<Vec<u64>> {
        let mut table = self.image.table(offset, u64::from(entries), "an L1 table")?;
        let (cluster, mut changed) = (self.image.header.cluster_size(), false);
        for (n, e) in table.iter_mut().enumerate().filter(|(_, e)| **e != 0) {
            if *e & L1_RESERVED != 0
                && self.corrupt(format_args!("{of}, entry {n} has reserved bits set: {e:#x}"))
            {
                *e &= !L1_RESERVED;
                changed = true;
            }
            let at = *e & entry::OFFSET;
            if at == 0 {
                // QEMU's write path relies on the flag and would use the header as the L2 table.
                if *e & entry::COPIED != 0
                    && self
                        .corrupt(format_args!("{of}, entry {n} has no L2 table and the flag COPIED: {e:#x}"))
                {
                    *e = 0;
                    changed = true;
                }
                continue;
            }
            match self.claim(at, cluster, Class::L2, 1) {
                Ok(()) => self.l2.push(at),
                Err(why) => {
                    let fix = self.corrupt(format_args!("{of}, entry {n}: the L2 table at {at:#x} {why}"));
                    changed |= fix;
                    // The entry is treated as unused, because it does not refer to a table.
                    *e = 0;
                }
            }
        }
        if changed {
            self.image.write(offset, &image::to_bytes(&table), "cannot repair an L1 table")?;
        }
        Ok(table)
    }
}
