//! Writes to clusters that are unallocated, or that are shared.

use super::fetch::Fetch;
use super::flush::Flush;
use super::generation::NewGeneration;
use super::{Buf, Context, EIO, Next, Op, Pending, Request, Step};
use crate::bytes::to_usize;
use crate::lock::Locked;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::alloc::{Reserve, Take};
use crate::entry::{COMPRESSED, COPIED, Compressed, Entry, OFFSET, ZERO};
use crate::journal::{Journal, Put};
use crate::served::{Chain, Miss, Served, Source};

/// Most clusters that one change holds.
pub(super) const HELD_MAX: u64 = 512;

/// A write to clusters that are unallocated, or that are shared.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) first: u64,
    pub(super) held: u64,
    pub(super) olds: Vec<Entry>,
    /// The offset for the first cluster. `None`: it is not known yet.
    host: Option<u64>,
    /// The clusters that were taken for it, which are returned if it fails.
    taken: Reserve,
    /// The range of the disk that is written, which includes bytes that the guest does not cover.
    pub(super) from: u64,
    pub(super) to: u64,
    /// The guest's part of that range.
    pub(super) guest: (u64, u64),
    head_fetched: bool,
    /// Whether the range reads as zeroes below, and gets entries that say so.
    pub(super) zero: bool,
    pub(super) stage: Stage,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// [`Op::Populate`]: what is below has to be fetched.
    Below,
    /// [`Op::Populate`]: it was fetched.
    Cut,
    /// Clusters have to be taken.
    Take,
    /// It has to be determined whether the bytes around the guest's have to be written.
    Around,
    /// These bytes were fetched.
    Put,
    /// The data is being written.
    Written,
    /// The data was written. The entries wait for room in the journal.
    Enter,
}

impl Change {
    /// Determines the bytes that are written: whole units, and whole clusters where the old version
    /// stays.
    #[expect(clippy::indexing_slicing, reason = "a change has at least one cluster")]
    pub(super) fn span(&mut self, image: &Served) {
        let (bits, sub) = (image.cluster_bits, (1u64 << image.sub_bits()) - 1);
        let end = (self.first + self.held) << bits;
        self.guest.1 = self.guest.1.min(end);
        let (first, last) = (self.olds[0], self.olds[self.olds.len() - 1]);
        self.from = if image.is_kept(first) { self.first << bits } else { self.guest.0 & !sub };
        self.to = if image.is_kept(last) { end } else { (self.guest.1 + sub) & !sub };
    }

    /// Adds the clusters that it holds, without the first `keep` ones, to the holes of a data file,
    /// where it has not written them.
    pub(super) fn add_holes(&self, image: &Served, keep: u64) {
        if image.external && self.olds.iter().all(|old| image.host(*old).is_none()) {
            image.add_holes(std::iter::once((self.first + keep, self.held - keep)));
        }
    }
}

/// Returns whether all of the range reads as zeroes.
pub(super) fn is_zero(chain: &Chain, mut pos: u64, end: u64) -> Result<bool, (usize, Miss)> {
    while pos < end {
        match chain.find(pos, end - pos)? {
            (_, Source::Zero | Source::Below, n) => pos += n,
            _ => return Ok(false),
        }
    }
    Ok(true)
}

impl Served {
    /// Returns whether the cluster of this entry is not shared.
    pub(super) fn is_own(&self, entry: Entry) -> bool {
        self.host(entry).is_some() && entry.word & COPIED != 0
    }

    /// Returns whether the old version of a cluster is shared or compressed, and is not written.
    /// The new version is written completely then.
    pub(super) fn is_kept(&self, old: Entry) -> bool {
        old.word & COMPRESSED != 0 || (self.host(old).is_some() && old.word & COPIED == 0)
    }

    /// Adds clusters in the data file, which the caller holds and which the map no longer refers
    /// to, to the holes.
    pub(super) fn add_holes(&self, places: impl Iterator<Item = (u64, u64)>) {
        let epoch = self.epochs.now();
        let mut holes = self.holes.locked();
        places.for_each(|(first, count)| holes.add(first, count, epoch));
    }

    /// Lowers the counts of clusters whose entries were removed from the map.
    pub(super) fn remove_clusters(&self, olds: &[Entry]) {
        // Most clusters are written for the first time.
        if olds.iter().all(|old| old.word & COMPRESSED == 0 && self.host(*old).is_none()) {
            return;
        }
        let epoch = self.epochs.now();
        let mut alloc = self.alloc.locked();
        for old in olds {
            if old.word & COMPRESSED != 0 {
                let c = Compressed::of(old.word, self.cluster_bits);
                let (first, last) = (self.cluster(c.offset), self.cluster(c.offset + c.bytes - 1));
                (first..=last).for_each(|cluster| alloc.remove(cluster, 1, epoch));
            } else if !self.external && self.host(*old).is_some() {
                alloc.remove(self.cluster(old.word & OFFSET), 1, epoch);
            }
        }
    }
}

impl Request {
    /// Writes from `pos` to `limit`: the guest's bytes, or zeroes.
    pub(super) fn step_write(&mut self, limit: u64, cx: &mut Context<'_>) -> Next {
        let chain = cx.chain;
        let (image, pos) = (chain.top(), self.pos);
        let cluster = image.cluster(pos);
        let entry = match self.writable(cluster, cx) {
            Ok(entry) => entry,
            Err(next) => return next,
        };
        if let Some((offset, n)) = image.in_place_run(entry, pos, limit - pos) {
            if !image.fits(offset, pos) {
                return Next::Fail(EIO);
            }
            let step = match self.op {
                Op::Write => Step::Data { file: image.data, offset, data: self.guest(pos, n) },
                // Otherwise only whole clusters are given back.
                op => {
                    let punch = image.raw_data && op == Op::Zero { unmap: true };
                    Step::ZeroFile { file: image.data, offset, len: n, punch }
                }
            };
            return self.step(Pending::Data(n), step);
        }
        self.begin_change(limit, cx)
    }

    /// Holds the entries of the clusters from `pos` to `limit`, and begins a change of the first
    /// ones that are of one kind. Their table may be written.
    pub(super) fn begin_change(&mut self, mut limit: u64, cx: &mut Context<'_>) -> Next {
        let (image, pos) = (cx.chain.top(), self.pos);
        let cluster = image.cluster(pos);
        let count = (image.cluster(limit - 1) - cluster + 1).min(image.map.slice_end(cluster) - cluster);
        let held = match image.map.hold(cluster, count.min(HELD_MAX), cx.waker) {
            None => return Next::Again,
            Some(0) => return self.park(),
            Some(held) => held,
        };
        let get = |i: u64| image.map.get(cluster + i).expect("held slices stay");
        let first = get(0);
        let has_to = match self.op {
            Op::Populate => match image.run(pos, limit - pos) {
                Ok((Source::Below, n)) => {
                    limit = pos + n;
                    true
                }
                _ => false,
            },
            _ => image.in_place_run(first, pos, 1).is_none(),
        };
        if !has_to {
            // Another request was faster.
            image.map.release(cluster, held, None, None, cx.wake);
            return Next::Again;
        }
        let own = image.is_own(first);
        let keep = if own { 1 } else { 1 + (1..held).take_while(|i| !image.is_own(get(*i))).count() as u64 };
        let keep = keep.min(image.cluster(limit - 1) - cluster + 1);
        image.map.shorten(cluster, held, keep, cx.wake);
        if image.external && !image.holes.locked().keep(cluster, keep, cx.waker) {
            image.map.release(cluster, keep, None, None, cx.wake);
            return self.park();
        }
        self.change = Some(Change {
            first: cluster,
            held: keep,
            olds: (0..keep).map(get).collect(),
            host: if own || image.external {
                Some(if own { first.word & OFFSET } else { cluster << image.cluster_bits })
            } else {
                None
            },
            taken: Reserve::default(),
            from: 0,
            to: 0,
            guest: (pos, limit),
            head_fetched: false,
            zero: false,
            stage: if self.op == Op::Populate { Stage::Below } else { Stage::Take },
        });
        Next::Again
    }

    /// Returns the entry of a cluster in a table that may be written, or what has to be done first.
    pub(super) fn writable(&mut self, cluster: u64, cx: &mut Context<'_>) -> Result<Entry, Next> {
        let image = cx.chain.top();
        // Only once, because other requests may make it crowded again as fast.
        if image.map.is_crowded() && !std::mem::replace(&mut self.made_room, true) {
            self.flush = Some(Box::new(Flush::new(true)));
            return Err(Next::Again);
        }
        if !matches!(image.table_of(cluster), Some((_, true))) {
            self.make_table(image.table_index(cluster));
            return Err(Next::Again);
        }
        match image.map.get(cluster) {
            Some(entry) => Ok(entry),
            None => Err(self.load(0, Miss::Slice(image.map.slice_of(cluster)), cx)),
        }
    }

    /// Takes clusters from the reserve. If it is empty, fills it first.
    pub(super) fn take(&mut self, most: u64, cx: &mut Context<'_>) -> Result<Reserve, Next> {
        let image = cx.chain.top();
        let reserve = &mut cx.user.reserve;
        if reserve.count == 0 {
            let want = most.max(image.reserve_clusters);
            let took = image.alloc.locked().take(want, cx.waker);
            match took {
                Take::Got(got) => *reserve = got,
                other => return Err(self.load_counts(other, image)),
            }
        }
        if let Some(next) = self.extend(image, cx) {
            return Err(next);
        }
        let reserve = &mut cx.user.reserve;
        let got = Reserve { count: reserve.count.min(most), ..*reserve };
        (reserve.start, reserve.count) = (reserve.start + got.count, reserve.count - got.count);
        Ok(got)
    }

    /// Lets space for the reserve and more be allocated, or waits for that. `None`: the space is
    /// there.
    fn extend(&mut self, image: &Served, cx: &mut Context<'_>) -> Option<Next> {
        let reserve = &cx.user.reserve;
        let end = (reserve.start + reserve.count) << image.cluster_bits;
        if !reserve.zero || image.external || end <= image.file_len.load(Acquire) {
            return None;
        }
        let mut growth = image.growth.locked();
        // It may have grown since.
        if end <= image.file_len.load(Acquire) {
            return None;
        }
        if growth.running {
            growth.waiting.push(cx.waker);
            drop(growth);
            return Some(self.park());
        }
        growth.running = true;
        drop(growth);
        let more = if self.no_more { 0 } else { image.growth_bytes };
        // Whole clusters: other programs may not read a last one that is cut.
        let to = (end + more).next_multiple_of(image.cluster_size());
        let offset = image.file_len.load(Acquire);
        let step = Step::Extend { file: image.file, offset, len: to - offset };
        Some(self.step(Pending::Extend { to, need: end }, step))
    }

    /// Makes the file longer where no space is allocated ahead, by a write to the end of the
    /// reserve: other programs may not read a last cluster that is cut. `end` is the end of the
    /// reserve, whose clusters read as zeroes and are this queue's, so no other write is lost.
    pub(super) fn lengthen(&mut self, end: u64, cx: &Context<'_>) -> Step {
        let image = cx.chain.top();
        let unit = image.unit();
        // The data buffer may have what the request is going to write.
        self.meta.reset(to_usize(unit));
        self.pending = Pending::Lengthen(end);
        Step::Write { file: image.file, offset: end - unit, buf: Buf::Meta, range: 0..to_usize(unit) }
    }

    /// There was no space. Returns whether there may be space for less: first no space is allocated
    /// ahead, then the reserve becomes smaller, down to one cluster.
    pub(super) fn wants_less(&mut self, cx: &mut Context<'_>) -> bool {
        if !std::mem::replace(&mut self.no_more, true) {
            return true;
        }
        let reserve = &mut cx.user.reserve;
        if reserve.count == 1 {
            return false;
        }
        let keep = reserve.count / 2;
        let rest = Reserve { start: reserve.start + keep, count: reserve.count - keep, ..*reserve };
        reserve.count = keep;
        cx.chain.top().alloc.locked().return_unwritten(rest);
        true
    }

    /// Records that space was allocated up to `len`. `None`: that failed.
    pub(super) fn extended(&mut self, len: Option<u64>, cx: &mut Context<'_>) {
        let image = cx.chain.top();
        let mut growth = image.growth.locked();
        growth.running = false;
        image.file_len.fetch_max(len.unwrap_or(0), AcqRel);
        let waiting = std::mem::take(&mut growth.waiting);
        drop(growth);
        waiting.into_iter().for_each(&mut *cx.wake);
    }

    pub(super) fn step_change(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let change = self.change.as_ref().expect("a change is under way");
        match change.stage {
            Stage::Below => self.fetch_below(image),
            Stage::Cut => self.cut(image, cx),
            Stage::Take => {
                let want = change.held;
                let taken = match change.host {
                    Some(_) => None,
                    None => match self.take(want, cx) {
                        Ok(taken) => Some(taken),
                        Err(next) => return next,
                    },
                };
                self.place(image, taken, cx);
                Next::Again
            }
            Stage::Around => self.around(cx),
            Stage::Put => self.put(image),
            // The result of its step continues it.
            Stage::Written => Next::Fail(EIO),
            Stage::Enter => {
                self.changed(cx);
                Next::Again
            }
        }
    }

    /// Records the new offset, and determines the bytes that have to be written.
    fn place(&mut self, image: &Served, taken: Option<Reserve>, cx: &mut Context<'_>) {
        let change = self.change.as_mut().expect("a change is under way");
        if let Some(taken) = taken {
            image.map.shorten(change.first, change.held, taken.count, cx.wake);
            change.held = taken.count;
            change.olds.truncate(to_usize(taken.count));
            change.host = Some(taken.start << image.cluster_bits);
            change.taken = taken;
        }
        change.span(image);
        // Otherwise all bytes were fetched.
        change.stage = if self.op == Op::Populate { Stage::Put } else { Stage::Around };
    }

    /// Fetches the bytes that the guest does not cover, unless they read as zeroes and the new
    /// cluster does, too.
    fn around(&mut self, cx: &mut Context<'_>) -> Next {
        let change = self.change.as_mut().expect("a change is under way");
        let (begin, end) = change.guest;
        let is_zero = |from, to| is_zero(cx.chain, from, to);
        let nothing = if change.taken.zero {
            is_zero(change.from, begin).and_then(|a| Ok(a && is_zero(end, change.to)?))
        } else {
            Ok(false)
        };
        let nothing = match nothing {
            Ok(nothing) => nothing,
            Err((layer, miss)) => return self.load(layer, miss, cx),
        };
        // Bytes that are zero already are not written, but count as written.
        let (from, to) = if nothing { (begin, end) } else { (change.from, change.to) };
        let (head, middle) =
            (to_usize(begin - from), if self.op == Op::Write { 0 } else { to_usize(end - begin) });
        let tail = to_usize(to - end);
        change.stage = Stage::Put;
        self.data.reset(head + middle + tail);
        // The tail first: a fetch has one range, and the head's range follows it in `put`.
        if tail > 0 {
            self.fetch = Some(Fetch::new(end, to, head + middle));
        }
        Next::Again
    }

    fn put(&mut self, image: &Served) -> Next {
        let change = self.change.as_mut().expect("a change is under way");
        let (begin, end) = change.guest;
        if self.op == Op::Populate {
            change.stage = Stage::Written;
            let at =
                change.host.expect("it has its place") + (change.from - (change.first << image.cluster_bits));
            let range = 0..to_usize(change.to - change.from);
            let step = Step::Write { file: image.data, offset: at, buf: Buf::Data, range };
            return self.step(Pending::Change, step);
        }
        let len = self.data.len();
        let middle = if self.op == Op::Write { 0 } else { to_usize(end - begin) };
        // Either everything around the guest's bytes was fetched, or nothing has to be.
        let head = if len > middle { to_usize(begin - change.from) } else { 0 };
        let tail = len - middle - head;
        if head > 0 && !std::mem::replace(&mut change.head_fetched, true) {
            self.fetch = Some(Fetch::new(change.from, begin, 0));
            return Next::Again;
        }
        change.stage = Stage::Written;
        let at = change.host.expect("it has its place") + (begin - (change.first << image.cluster_bits));
        let offset = at - head as u64;
        let step = if self.op != Op::Write {
            Step::Write { file: image.data, offset, buf: Buf::Data, range: 0..len }
        } else if len == 0 {
            Step::Data { file: image.data, offset, data: begin - self.begin..end - self.begin }
        } else {
            Step::Around { file: image.data, offset, head, data: begin - self.begin..end - self.begin, tail }
        };
        self.step(Pending::Change, step)
    }

    /// Changes the entries, after the data was written.
    #[expect(clippy::indexing_slicing, reason = "a change has at least one cluster")]
    pub(super) fn changed(&mut self, cx: &mut Context<'_>) {
        let image = cx.chain.top();
        let mut change = self.change.take().expect("a change is under way");
        let host = change.host.unwrap_or(0);
        debug_assert!(change.host.is_some() || change.zero);
        let entry = |(i, old): (usize, &Entry)| {
            let word = (host + ((i as u64) << image.cluster_bits)) | COPIED;
            if !image.extended {
                return Entry { word: if change.zero { ZERO } else { word }, bits: 0 };
            }
            let begin = (change.first + i as u64) << image.cluster_bits;
            let first = (change.from.max(begin) - begin) >> image.sub_bits();
            let last = (change.to.min(begin + image.cluster_size()) - begin) >> image.sub_bits();
            let written = (u64::MAX >> (64 - (last - first))) << first;
            if change.zero {
                return Entry { word: old.word, bits: old.bits | (written << 32) };
            }
            // If a cluster moves, all its subclusters are written.
            Entry { word, bits: (old.bits | written) & !(written << 32) }
        };
        let entries: Vec<Entry> = change.olds.iter().enumerate().map(entry).collect();
        let journal = image.journal.as_ref();
        if change.zero {
            // While it holds them. The map never referred to their clusters.
            change.add_holes(image, 0);
        }
        let put = image.map.release(change.first, change.held, Some(&entries), journal, cx.wake);
        if !self.entered(put, image) {
            change.stage = Stage::Enter;
            self.change = Some(change);
            return;
        }
        if !change.zero && !image.is_own(change.olds[0]) {
            image.remove_clusters(&change.olds);
        }
        self.pos = if self.op == Op::Populate { change.to } else { change.guest.1 };
    }

    /// Continues after records were put into the journal: a flush makes room, or the image gets a
    /// new generation. Returns false if they are not in, and can be put in after the flush.
    pub(super) fn entered(&mut self, put: Put, image: &Served) -> bool {
        if put != Put::Done {
            self.flush.get_or_insert_with(|| Box::new(Flush::new(true)));
        } else if image.journal.as_ref().is_some_and(Journal::needs_generation) {
            self.generation = Some(NewGeneration::Due);
        }
        put != Put::Full
    }

    pub(super) fn abandon_change(&mut self, cx: &mut Context<'_>) {
        let Some(change) = self.change.take() else { return };
        let image = cx.chain.top();
        change.add_holes(image, 0);
        image.map.release(change.first, change.held, None, None, cx.wake);
        // Something may have been written there.
        let taken = Reserve { zero: false, ..change.taken };
        image.alloc.locked().give_back(taken);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
