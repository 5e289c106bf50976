//! Where the metadata of a served image is, so that guest data never overwrites it, even if the map
//! is wrong.
//!
//! [`OverlapCheck`] is made when an image is opened for writing, from the tables in memory. An
//! image whose tables overlap is refused. Metadata that is read later is checked once, when it is
//! read: a slice of the map must not name a cluster of metadata, and a refcount block must not call
//! a cluster of metadata free. So a request that finds its entry in the map needs no check.
//!
//! Two cases are not detected. A cluster of data that the counts call free may become metadata
//! while an entry in memory refers to it. Allocations before an image is served, or afterwards for
//! bitmaps, rely on the counts.
//!
//! An error is reported once ([`OverlapCheck::mark_corrupt`]). Metadata that is wrong is not kept
//! in memory.
//!
//! Lock order: last.

use crate::bytes::to_usize;
use crate::lock::Locked;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use crate::header::{Header, L1_BYTES_MAX};
use crate::{Error, Image, Result, Storage, bitmap, snapshot};

/// Most bits of the filter: 64 KiB, which stay in a processor's cache.
const FILTER_BITS_MAX: u64 = 1 << 19;

/// The check of one image, shared by all workers; see the module.
pub(crate) struct OverlapCheck {
    /// One bit for some neighbouring clusters: 0 if none of them is metadata.
    filter: Box<[AtomicU64]>,
    filter_shift: u32,
    /// Clusters of metadata, as disjoint ranges: start, end, and kind.
    ranges: Mutex<BTreeMap<u64, (u64, &'static str)>>,
    /// The error that was found.
    wrong: OnceLock<String>,
    /// Whether the image could be marked for that.
    marked: OnceLock<bool>,
    reported: AtomicBool,
}

impl OverlapCheck {
    /// Makes the check for an image with these tables. `l2` and `blocks` are the offsets of L2
    /// tables and refcount blocks.
    ///
    /// # Errors
    /// Two of them overlap, or tables of snapshots or bitmaps cannot be read.
    pub(crate) fn new(
        storage: &dyn Storage,
        header: &Header,
        l2: impl Iterator<Item = u64>,
        blocks: &[u64],
    ) -> Result<Self> {
        let image = Image::open(storage)?;
        // The largest size that the file can get.
        let clusters = image.len.div_ceil(header.cluster_size()).max(header.clusters()).max(64);
        let bits = clusters.next_power_of_two().min(FILTER_BITS_MAX);
        let guard = Self {
            filter: (0..bits / 64).map(|_| AtomicU64::new(0)).collect(),
            filter_shift: clusters.div_ceil(bits).next_power_of_two().trailing_zeros(),
            ranges: Mutex::default(),
            wrong: OnceLock::new(),
            marked: OnceLock::new(),
            reported: AtomicBool::new(false),
        };
        let cluster = header.cluster_size();
        let add = |what, offset: u64, bytes: u64| {
            let end = offset.saturating_add(bytes).div_ceil(cluster);
            if bytes == 0 { Ok(()) } else { guard.add_range(what, offset / cluster, end) }
        };
        add("the header", 0, 1)?;
        add("the L1 table", header.l1_offset, u64::from(header.l1_size) * 8)?;
        add("the refcount table", header.reftable_offset, u64::from(header.reftable_clusters) * cluster)?;
        let (snapshots, bytes) = snapshot::read_table(&image)?;
        add("the snapshot table", header.snapshots_offset, bytes)?;
        for s in &snapshots {
            add("a snapshot's L1 table", s.l1_offset, (u64::from(s.l1_size) * 8).min(L1_BYTES_MAX))?;
        }
        if let Some(at) =
            header.bitmaps.filter(|_| bitmap::read_directory(&image).is_ok_and(|l| !l.is_empty()))
        {
            add("the bitmap directory", at.directory_offset, at.directory_bytes)?;
        }
        for offset in blocks.iter().filter(|at| **at != 0) {
            add("a refcount block", *offset, cluster)?;
        }
        for offset in l2.filter(|at| *at != 0) {
            add("an L2 table", offset, cluster)?;
        }
        // A block that does not exist yet counts all its clusters as free.
        for (start, (end, what)) in guard.ranges.locked().iter() {
            let entries = header.refblock_entries();
            for n in start / entries..=(end - 1) / entries {
                if blocks.get(to_usize(n)).is_none_or(|at| *at == 0) {
                    return Err(Error::corrupt(format!(
                        "no refcount block counts {what} in cluster {start:#x}"
                    )));
                }
            }
        }
        Ok(guard)
    }

    fn add_range(&self, what: &'static str, start: u64, end: u64) -> Result<()> {
        let mut ranges = self.ranges.locked();
        if let Some((there, (_, other))) = ranges.range(..end).next_back().filter(|(_, (to, _))| *to > start)
        {
            return Err(Error::corrupt(format!(
                "{what} in clusters {start:#x} to {:#x}, and {other} in those from {there:#x} on",
                end - 1
            )));
        }
        ranges.insert(start, (end, what));
        drop(ranges);
        let (first, last) = (start >> self.filter_shift, (end - 1) >> self.filter_shift);
        for bit in first..=last.min(first + self.filter.len() as u64 * 64) {
            let (word, mask) = self.filter_bit(bit);
            word.fetch_or(mask, Relaxed);
        }
        Ok(())
    }

    #[expect(
        clippy::indexing_slicing,
        reason = "the mask is the length less 1, and the length a power of two"
    )]
    fn filter_bit(&self, bit: u64) -> (&AtomicU64, u64) {
        (&self.filter[(bit / 64) as usize & (self.filter.len() - 1)], 1 << (bit % 64))
    }

    /// Adds a cluster of metadata, which was free or counted as free.
    pub(crate) fn add(&self, what: &'static str, cluster: u64) {
        if let Err(e) = self.add_range(what, cluster, cluster + 1)
            && self.mark_corrupt(e.to_string())
        {
            self.set_marked(false);
        }
    }

    /// Removes a cluster of metadata, which was a range by itself.
    pub(crate) fn remove(&self, cluster: u64) {
        self.ranges.locked().remove(&cluster);
    }

    /// Returns the kind of metadata in a cluster.
    #[inline]
    pub(crate) fn holds(&self, cluster: u64) -> Option<&'static str> {
        let (word, mask) = self.filter_bit(cluster >> self.filter_shift);
        if word.load(Relaxed) & mask == 0 { None } else { self.find_range(cluster) }
    }

    fn find_range(&self, cluster: u64) -> Option<&'static str> {
        let ranges = self.ranges.locked();
        let (_, (end, what)) = ranges.range(..=cluster).next_back()?;
        (cluster < *end).then_some(*what)
    }

    /// Returns the first cluster of metadata from `start` to `end` for which `bad` is true, and its
    /// kind.
    pub(crate) fn find(
        &self,
        start: u64,
        end: u64,
        bad: impl Fn(u64) -> bool,
    ) -> Option<(u64, &'static str)> {
        let ranges = self.ranges.locked();
        // One range may start before.
        let from = ranges.range(..start).next_back().map_or(start, |(from, _)| *from);
        ranges.range(from..end).find_map(|(from, (to, what))| {
            let mut clusters = (*from).max(start)..(*to).min(end);
            clusters.find(|cluster| bad(*cluster)).map(|cluster| (cluster, *what))
        })
    }

    pub(crate) fn is_corrupt(&self) -> bool {
        self.wrong.get().is_some()
    }

    /// Records an error. Returns whether it is the first one.
    pub(crate) fn mark_corrupt(&self, why: String) -> bool {
        self.wrong.set(why).is_ok()
    }

    /// Records whether the request that found the first error could mark the image.
    pub(crate) fn set_marked(&self, marked: bool) {
        let _ = self.marked.set(marked);
    }

    /// Returns the error, and whether the image is marked. Returns it once.
    pub(crate) fn take_error(&self) -> Option<(&str, bool)> {
        let (wrong, marked) = (self.wrong.get()?, self.marked.get()?);
        (!self.reported.swap(true, Relaxed)).then_some((wrong.as_str(), *marked))
    }
}
