//! Discards, and writes of zeroes: by changes of the map if possible.

use super::change::{HELD_MAX, is_zero};
use super::{Context, Next, Op, Pending, Request, Step};
use crate::entry::{COPIED, Entry, OFFSET, ZERO};
use crate::journal::{Journal, Put};
use crate::served::{Chain, Source};

/// The bit of each subcluster that reads as zeroes.
const ALL_ZERO: u64 = 0xffff_ffff_0000_0000;

impl Request {
    /// Makes clusters read as zeroes, or discards them.
    #[expect(clippy::indexing_slicing, reason = "both lists have an entry for each held cluster")]
    pub(super) fn step_zero(&mut self, cx: &mut Context<'_>) -> Next {
        let chain = cx.chain;
        let (image, pos) = (chain.top(), self.pos);
        let (cluster, size) = (image.cluster(pos), image.cluster_size());
        let next = (cluster + 1) << image.cluster_bits;
        let discard = self.op == Op::Discard;
        if discard && image.raw_data {
            return self.step_discard_raw(cx);
        }
        let whole = pos & (size - 1) == 0 && self.end >= next.min(image.size());
        let by_entry = chain.marks_zeroes();
        if discard && !(whole && by_entry) {
            self.pos = next.min(self.end);
            return Next::Again;
        }
        if !(whole && by_entry) {
            let to = next.min(self.end);
            return match is_zero(chain, pos, to) {
                // A raw data file has zeroes where its entries say so, for every reader.
                Ok(true) if !image.raw_data => {
                    self.pos = to;
                    Next::Again
                }
                Ok(_) => self.step_write(to, cx),
                Err((layer, miss)) => self.load(layer, miss, cx),
            };
        }
        if image.table_of(cluster).is_none() && !chain.has_below() {
            self.pos = (image.table_end(cluster) << image.cluster_bits).min(self.end);
            return Next::Again;
        }
        if let Err(next) = self.writable(cluster, cx) {
            return next;
        }
        // A last cluster that the disk does not fill counts as a whole one.
        let last =
            if self.end >= image.size() { image.size().div_ceil(size) } else { image.cluster(self.end) };
        let count = (last - cluster).min(image.map.slice_end(cluster) - cluster).min(HELD_MAX);
        let count = count.min(image.journal.as_ref().map_or(HELD_MAX, Journal::change_max));
        let held = match image.map.hold(cluster, count, cx.waker) {
            None => return Next::Again,
            Some(0) => return self.park(),
            Some(held) => held,
        };
        let olds: Vec<Entry> =
            (0..held).map(|i| image.map.get(cluster + i).expect("held slices stay")).collect();
        let entries: Vec<Entry> = olds.iter().map(|old| self.emptied(chain, *old)).collect();
        let changed = entries != olds;
        let put = if changed { image.map.put(cluster, &entries, image.journal.as_ref()) } else { Put::Done };
        let goes = |i: usize| image.host(entries[i]).is_none() && olds[i] != entries[i];
        if changed && put != Put::Full && image.external {
            let went = (0..olds.len()).filter(|i| goes(*i) && image.host(olds[*i]).is_some());
            image.add_holes(went.map(|i| (cluster + i as u64, 1)));
        }
        image.map.release(cluster, held, None, None, cx.wake);
        if changed {
            if !self.entered(put, image) {
                return Next::Again;
            }
            let gone: Vec<Entry> = (0..olds.len()).filter(|i| goes(*i)).map(|i| olds[i]).collect();
            image.remove_clusters(&gone);
        }
        self.pos = ((cluster + held) << image.cluster_bits).min(self.end);
        Next::Again
    }

    /// Discards a range of a raw data file. Every reader sees this file as the disk, so its
    /// clusters stay where they are, and the discarded range is punched in place, where a write of
    /// that range would go.
    fn step_discard_raw(&mut self, cx: &mut Context<'_>) -> Next {
        let (image, pos, end) = (cx.chain.top(), self.pos, self.end);
        let (what, n) = match image.run(pos, end - pos) {
            Ok(run) => run,
            Err(miss) => return self.load(0, miss, cx),
        };
        match what {
            Source::Data(offset) => {
                self.step(Pending::Data(n), Step::Discard { file: image.data, offset, len: n })
            }
            // It reads as zeroes already.
            _ => {
                self.pos += n;
                Next::Again
            }
        }
    }

    /// Returns the new entry of a cluster that is discarded, or that has to read as zeroes.
    fn emptied(&self, chain: &Chain, old: Entry) -> Entry {
        let image = chain.top();
        let keeps = self.op == (Op::Zero { unmap: false }) && image.is_own(old);
        let place = if keeps { old.word & (OFFSET | COPIED) } else { 0 };
        // Without a backing file it reads as zeroes anyway.
        let says_zero = image.version >= 3 && (keeps || chain.has_below() || self.op != Op::Discard);
        match (says_zero, image.extended) {
            (false, _) => Entry::default(),
            (true, false) => Entry { word: place | ZERO, bits: 0 },
            (true, true) => Entry { word: place, bits: ALL_ZERO },
        }
    }
}
