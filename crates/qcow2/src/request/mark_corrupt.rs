//! Marks an image as corrupt when metadata refers to clusters of other metadata.
//!
//! Such metadata is found when it is read, before it is used. The request fails. The mark in the
//! header keeps all programs from opening the image for writing before it is repaired.

use super::{Buf, Context, EIO, Next, Pending, Request, Step};
use crate::bytes::{be64, to_usize};
use crate::entry::{COMPRESSED, COPIED, Compressed, OFFSET};
use crate::header_copy::Copied;
use crate::lock::Locked;
use crate::refcount;
use crate::served::Served;

/// The progress of the header's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Begin,
    /// A write with this number, of the header's first bytes, is in flight.
    Written(u64),
    Stable,
}

impl Served {
    /// Returns the error of a slice of the map that was read.
    pub(super) fn wrong_slice(&self, slice: u64, bytes: &[u8]) -> Option<String> {
        let overlap = self.overlap.as_ref()?;
        let step = if self.extended { 16 } else { 8 };
        // Clusters that were ever taken are below this. An entry that is read now cannot refer to a
        // later one.
        let end = self.alloc.locked().end();
        let first = slice * (bytes.len() / step) as u64;
        bytes.chunks_exact(step).enumerate().find_map(|(i, entry)| {
            let word = be64(entry, 0);
            // In a data file, 0 is the offset of the first cluster.
            let place = if self.external { OFFSET | COPIED | COMPRESSED } else { OFFSET | COMPRESSED };
            if word & place == 0 {
                return None;
            }
            let (pos, at) = ((first + i as u64) << self.cluster_bits, word & OFFSET);
            let why = if word & COMPRESSED != 0 {
                let c = Compressed::of(word, self.cluster_bits);
                let (first, last) = (self.cluster(c.offset), self.cluster(c.offset + c.bytes - 1));
                match (first..=last).find_map(|cluster| overlap.holds(cluster)) {
                    _ if self.external => "which a data file has no room for".to_owned(),
                    Some(what) => format!("where {what} is"),
                    None if first >= end => "beyond the end of the file".to_owned(),
                    None => return None,
                }
            } else if self.external {
                if at == pos || (at == 0 && word & COPIED == 0) {
                    return None;
                }
                "which is not its place in the data file".to_owned()
            } else if at & (self.cluster_size() - 1) != 0 {
                "where no cluster begins".to_owned()
            } else if let Some(what) = overlap.holds(self.cluster(at)) {
                format!("where {what} is")
            } else if self.cluster(at) >= end {
                "beyond the end of the file".to_owned()
            } else {
                return None;
            };
            Some(format!(
                "the entry of the disk's bytes from {pos:#x} on, {word:#x}, leads to {at:#x}, {why}"
            ))
        })
    }

    /// Returns the error of clusters that the map no longer refers to.
    pub(super) fn wrong_removed(&self, start: u64, count: u64) -> Option<String> {
        let (cluster, what) = self.overlap.as_ref()?.find(start, start + count, |_| true)?;
        Some(format!(
            "the last entry of the map that named {:#x} went, where {what} is",
            cluster << self.cluster_bits
        ))
    }

    /// Returns the error of a refcount block that was read.
    pub(super) fn wrong_counts(&self, index: u64, bytes: &[u8]) -> Option<String> {
        let (entries, order) = (self.header.refblock_entries(), self.header.refcount_order);
        let (start, end) = (index * entries, (index + 1) * entries);
        let free = |cluster: u64| refcount::get(bytes, to_usize(cluster - start), order) == 0;
        let (cluster, what) = self.overlap.as_ref()?.find(start, end, free)?;
        let at = cluster << self.cluster_bits;
        Some(format!(
            "the refcount block for clusters from {start:#x} on calls {at:#x} free, where {what} is"
        ))
    }
}

impl Request {
    /// Fails the request for this reason. The request that finds the first error marks the image.
    pub(super) fn mark_corrupt(&mut self, why: String, cx: &mut Context<'_>) -> Step {
        match self.step_mark_corrupt(why, cx) {
            Next::Fail(e) => self.fail(e, cx),
            _ => self.run_steps(cx),
        }
    }

    /// Like [`mark_corrupt`](Self::mark_corrupt), within a step.
    pub(super) fn step_mark_corrupt(&mut self, why: String, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let first = image.overlap.as_ref().is_some_and(|overlap| overlap.mark_corrupt(why));
        if let Some(flush) = &mut self.flush {
            // These clusters are not freed, because the next flush would stop there, too.
            flush.leak_freed();
        }
        // Version 2 has no bit for the mark.
        if first && image.version < 3 {
            self.marked(false, cx);
        }
        if !first || image.version < 3 {
            return Next::Fail(EIO);
        }
        self.mark = Some(Mark::Begin);
        Next::Again
    }

    /// Records that the mark was made, or cannot be made.
    pub(super) fn marked(&self, yes: bool, cx: &Context<'_>) {
        if let Some(overlap) = &cx.chain.top().overlap {
            overlap.set_marked(yes);
        }
    }

    pub(super) fn step_mark(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let Some(first) = &image.header_copy else {
            self.marked(false, cx);
            return Next::Fail(EIO);
        };
        let mark = self.mark.expect("the image is being marked");
        let (next, step) = match mark {
            Mark::Begin => self.write_first(first.set_corrupt(), image),
            Mark::Written(number) => match first.ended(number) {
                Some(copied) => self.write_first(copied, image),
                None => (Mark::Stable, Step::Sync { file: image.file }),
            },
            Mark::Stable => {
                self.marked(true, cx);
                return Next::Fail(EIO);
            }
        };
        self.mark = Some(next);
        self.step(Pending::Mark, step)
    }

    /// Handles a failed step of marking.
    pub(super) fn mark_failed(&mut self, cx: &Context<'_>) {
        if let (Some(Mark::Written(number)), Some(first)) = (self.mark, &cx.chain.top().header_copy) {
            first.failed(number);
        }
        self.marked(false, cx);
    }

    /// Writes a copy of the header's first bytes, which flushes and control change, too.
    fn write_first(&mut self, (bytes, number): Copied, image: &Served) -> (Mark, Step) {
        let range = 0..bytes.len();
        self.meta.set(&bytes);
        (Mark::Written(number), Step::Write { file: image.file, offset: 0, buf: Buf::Meta, range })
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
