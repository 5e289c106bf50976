//! A new L2 table: the first one, or a copy of one that a snapshot shares.

use super::generation::NewGeneration;
use super::{Buf, Context, Next, Pending, Request, Step};
use crate::alloc::Reserve;
use crate::bytes::to_usize;
use crate::entry::{COPIED, OFFSET};
use crate::journal::Put;
use crate::lock::Locked;
use std::sync::atomic::Ordering::{Acquire, Release};

/// A table that is being made.
#[derive(Debug)]
pub(super) struct NewTable {
    /// The index of its entry in the L1 table.
    index: u64,
    /// Whether this request makes it, and not another one.
    ours: bool,
    place: Option<Reserve>,
    stage: Stage,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Begin,
    Fill,
    Copied,
    Ready,
}

impl Request {
    pub(super) fn make_table(&mut self, index: u64) {
        self.table = Some(NewTable { index, ours: false, place: None, stage: Stage::Begin });
    }

    #[expect(clippy::indexing_slicing, reason = "the L1 table is as long as the size of the disk needs")]
    pub(super) fn step_table(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let table = self.table.as_mut().expect("a table is under way");
        let index = table.index;
        if !table.ours {
            let mut tables = image.tables.locked();
            if matches!(image.table_of(index * image.table_entries), Some((_, true))) {
                drop(tables);
                self.table = None;
                return Next::Again;
            }
            if let Some(waiting) = tables.making.get_mut(&index) {
                waiting.push(cx.waker);
                drop(tables);
                self.table = None;
                return self.park();
            }
            tables.making.insert(index, Vec::new());
            table.ours = true;
        }
        let Some(place) = table.place else {
            let place = match self.take(1, cx) {
                Ok(place) => place,
                Err(next) => return next,
            };
            self.table.as_mut().expect("a table is under way").place = Some(place);
            return Next::Again;
        };
        let (old, len) = (image.l1[to_usize(index)].load(Acquire) & OFFSET, image.cluster_size());
        let offset = place.start << image.cluster_bits;
        match table.stage {
            Stage::Begin if old != 0 => {
                table.stage = Stage::Fill;
                self.data.reset(to_usize(len));
                let range = 0..to_usize(len);
                self.step(Pending::Table, Step::Read { file: image.file, offset: old, buf: Buf::Data, range })
            }
            Stage::Begin if !place.zero => {
                table.stage = Stage::Copied;
                self.step(Pending::Table, Step::ZeroFile { file: image.file, offset, len, punch: false })
            }
            Stage::Begin => {
                // The cluster reads as zeroes already. But the file has to reach to its end before
                // an entry refers to it, which is not ensured if no space is allocated ahead.
                table.stage = Stage::Copied;
                let unit = image.unit();
                self.data.reset(to_usize(unit));
                let (offset, range) = (offset + len - unit, 0..to_usize(unit));
                self.step(Pending::Table, Step::Write { file: image.file, offset, buf: Buf::Data, range })
            }
            Stage::Fill => {
                table.stage = Stage::Copied;
                let range = 0..to_usize(len);
                self.step(Pending::Table, Step::Write { file: image.file, offset, buf: Buf::Data, range })
            }
            Stage::Copied | Stage::Ready => {
                table.stage = Stage::Ready;
                self.table_made(cx);
                Next::Again
            }
        }
    }

    /// Handles the end of a step. After the last one the table belongs to the image.
    #[expect(clippy::indexing_slicing, reason = "`step_table` has checked the index")]
    pub(super) fn table_made(&mut self, cx: &mut Context<'_>) {
        let image = cx.chain.top();
        let Some(table) = self.table.take_if(|table| table.stage == Stage::Ready) else { return };
        let place = table.place.expect("a ready table has its place");
        let entry = &image.l1[to_usize(table.index)];
        let old = entry.load(Acquire) & OFFSET;
        let mut tables = image.tables.locked();
        let put = match &image.journal {
            Some(journal) => journal.put_table(table.index, place.start << image.cluster_bits | COPIED),
            None => Put::Done,
        };
        if put == Put::Full {
            drop(tables);
            self.table = Some(table);
            self.entered(put, image);
            return;
        }
        entry.store(place.start << image.cluster_bits | COPIED, Release);
        tables.dirty.insert(table.index);
        if let Some(overlap) = &image.overlap {
            if old != 0 {
                overlap.remove(image.cluster(old));
            }
            overlap.add("an L2 table", place.start);
        }
        let waiting = tables.making.remove(&table.index).unwrap_or_default();
        drop(tables);
        if old != 0 {
            image.alloc.locked().remove(image.cluster(old), 1, image.epochs.now());
        }
        waiting.into_iter().for_each(&mut *cx.wake);
        self.entered(put, image);
        if image.journal.is_some() {
            // At once, because an image without this table would lose everything that the table
            // maps.
            self.generation = Some(NewGeneration::Due);
        }
    }

    pub(super) fn abandon_table(&mut self, cx: &mut Context<'_>) {
        let Some(table) = self.table.take().filter(|table| table.ours) else { return };
        let image = cx.chain.top();
        if let Some(place) = table.place {
            let place = Reserve { zero: false, ..place };
            image.alloc.locked().give_back(place);
        }
        let waiting = image.tables.locked().making.remove(&table.index);
        waiting.into_iter().flatten().for_each(&mut *cx.wake);
    }
}
