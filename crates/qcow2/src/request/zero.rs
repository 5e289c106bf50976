//! Discards, and what makes clusters read as zeroes: by the map where that can say so.

use super::change::{HELD_MAX, is_zero};
use super::{Context, Next, Op, Pending, Request, Step};
use crate::entry::{COPIED, Entry, OFFSET, ZERO};
use crate::journal::{Journal, Put};
use crate::served::{Chain, What};

/// Bit of each subcluster that reads as zeroes.
const ALL_ZERO: u64 = 0xffff_ffff_0000_0000;

impl Request {
    /// Makes clusters read as zeroes, or forgets them.
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
        // Whether an entry can say so.
        let by_entry = !image.raw_data && (image.version >= 3 || !chain.has_below());
        if discard && !(whole && by_entry) {
            self.pos = next.min(self.end);
            return Next::Again;
        }
        if !(whole && by_entry) {
            let to = next.min(self.end);
            return match is_zero(chain, pos, to) {
                // A raw data file is zeroes where its entries say so, whoever reads it.
                Ok(true) if !image.raw_data => {
                    self.pos = to;
                    Next::Again
                }
                Ok(_) => self.step_write(to, cx),
                Err((layer, miss)) => self.load(layer, miss, cx),
            };
        }
        if image.table_of(cluster).is_none() && !chain.has_below() {
            self.pos = (((cluster / image.table_entries + 1) * image.table_entries) << image.cluster_bits)
                .min(self.end);
            return Next::Again;
        }
        if let Err(next) = self.writable(cluster, cx) {
            return next;
        }
        // A last cluster that the disk does not fill counts as whole.
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
            image.let_go(&gone);
        }
        self.pos = ((cluster + held) << image.cluster_bits).min(self.end);
        Next::Again
    }

    /// A raw data file is the disk, whoever reads it: so its clusters stay where they are, and what is discarded is given
    /// back in place, as a write of that range would go there.
    fn step_discard_raw(&mut self, cx: &mut Context<'_>) -> Next {
        let (image, pos, end) = (cx.chain.top(), self.pos, self.end);
        let (what, n) = match image.run(pos, end - pos) {
            Ok(run) => run,
            Err(miss) => return self.load(0, miss, cx),
        };
        match what {
            What::Data(offset) => {
                self.step(Pending::Data(n), Step::Discard { file: image.data, offset, len: n })
            }
            // Zeroes already.
            _ => {
                self.pos += n;
                Next::Again
            }
        }
    }

    /// What an entry becomes when its cluster is discarded, or is to read as zeroes.
    fn emptied(&self, chain: &Chain, old: Entry) -> Entry {
        let image = chain.top();
        let keeps = self.op == (Op::Zero { unmap: false }) && image.is_own(old);
        let place = if keeps { old.word & (OFFSET | COPIED) } else { 0 };
        // Without an image below it reads as zeroes by itself.
        let says_zero = image.version >= 3 && (keeps || chain.has_below() || self.op != Op::Discard);
        match (says_zero, image.extended) {
            (false, _) => Entry::default(),
            (true, false) => Entry { word: place | ZERO, bits: 0 },
            (true, true) => Entry { word: place, bits: ALL_ZERO },
        }
    }
}
