//! Makes everything that was completed stable: data and reference counts first, then the entries
//! that refer to them.
//!
//! 1. Copies are made: of slices of the map, of the L1 table, then of counts. Later changes belong
//!    to the next flush.
//! 2. Counts are written. Sync: all data that the copies refer to is stable, too.
//! 3. New entries of the refcount table are written, if there are any. Sync.
//! 4. Slices and L1 entries are written, in any order, because a new table was all zeroes in the
//!    image before step 2. Then the journal's next generation is written, if there is a journal.
//!    Sync.
//! 5. Clusters that were removed from the map before step 1, and that have no users, are punched
//!    and counted down. These counts belong to the next flush. Clusters in an external data file
//!    are only punched.
//!
//! One flush runs at a time. Requests that arrive meanwhile wait, and one of them does the next
//! flush for all.

use super::{Buf, Context, Next, Pending, Request, Step};
use crate::alloc::Dirty;
use crate::header_copy::Copied;
use crate::journal::Journal;
use crate::lock::Locked;
use crate::map::Copy;
use crate::served::Served;

/// Most clusters that one flush frees, so that it ends.
const FREED_MAX: u64 = 1 << 20;
/// Bytes of a data file that are punched at a time. A write to one of them waits for that.
const PUNCH_BYTES_MAX: u64 = 1 << 30;

/// A flush, or the wait for one.
#[derive(Debug)]
pub(super) struct Flush {
    /// Whether it only makes room in the map or in its journal. The request continues after it.
    aside: bool,
    /// The number of the flush that it asked for. `None`: it has not asked yet.
    ticket: Option<u64>,
    run: Option<Run>,
}

/// A running flush.
struct Run {
    /// When it is done, all requests up to this number are done.
    covers: u64,
    /// The position of the journal before the copies were made.
    mark: u64,
    /// The allocator's number of the flush.
    number: u64,
    slices: Vec<Copy>,
    /// L1 entries: the index, and offset and bytes of the piece that contains it.
    l1: Vec<(u64, u64, Vec<u8>)>,
    blocks: Vec<Dirty>,
    table: Vec<Dirty>,
    /// The journal's generation for the written map, and the copy of the header's piece that has
    /// it.
    generation: Option<(u64, Copied)>,
    stage: Stage,
    /// The number of the stage's pieces that are written.
    at: usize,
    /// Clusters that are being freed: the first, their number, and how many of them are being
    /// punched.
    back: (u64, u64, u64),
    freed: u64,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Run({:?}, {} of it)", self.stage, self.at)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Counts,
    Data,
    DataFile,
    Table,
    TableSync,
    Map,
    Generation,
    MapSync,
    Back,
}

impl Flush {
    pub(super) fn new(aside: bool) -> Self {
        Self { aside, ticket: None, run: None }
    }
}

impl Request {
    pub(super) fn step_flush(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let flush = self.flush.as_mut().expect("a flush is under way");
        if flush.run.is_none() {
            let mut flushes = image.flushes.locked();
            let ticket = *flush.ticket.get_or_insert_with(|| {
                flushes.asked += 1;
                flushes.asked
            });
            if flushes.done >= ticket {
                drop(flushes);
                self.flush = None;
                return Next::Again;
            }
            if flushes.running {
                flushes.waiting.push(cx.waker);
                drop(flushes);
                if flush.aside {
                    // Another request's flush was enough.
                    self.flush = None;
                }
                return self.park();
            }
            flushes.running = true;
            let covers = flushes.asked;
            drop(flushes);
            flush.run = Some(Run::new(image, covers));
        }
        self.step_run(cx)
    }

    fn step_run(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        loop {
            let run = self.flush.as_mut().and_then(|f| f.run.as_mut()).expect("it runs");
            let piece = match run.stage {
                Stage::Counts => run.blocks.get(run.at).map(|b| (b.offset, b.bytes.to_vec())),
                Stage::Table => {
                    run.table.get(run.at).map(|t| (image.reftable_offset + t.offset, t.bytes.to_vec()))
                }
                Stage::Map => run.map_piece(image),
                Stage::Generation => run.generation.as_ref().map(|(_, (bytes, _))| (0, bytes.clone())),
                Stage::Data | Stage::TableSync | Stage::MapSync => {
                    return self.step(Pending::Flush, Step::Sync { file: image.file });
                }
                Stage::DataFile => return self.step(Pending::Flush, Step::Sync { file: image.data }),
                Stage::Back => return self.step_back(cx),
            };
            if let Some((offset, bytes)) = piece {
                let range = 0..bytes.len();
                self.meta.set(&bytes);
                return self
                    .step(Pending::Flush, Step::Write { file: image.file, offset, buf: Buf::Meta, range });
            }
            run.next_stage(image);
        }
    }

    /// Handles the end of a step of a flush.
    pub(super) fn flushed(&mut self, failed: i32, image: &Served) -> Result<(), i32> {
        let Some(run) = self.flush.as_mut().and_then(|f| f.run.as_mut()) else { return Ok(()) };
        if run.stage == Stage::Generation {
            return run.wrote_generation(failed, image);
        }
        match run.stage {
            // Clusters that cannot be punched are freed, too.
            Stage::Back => {}
            _ if failed < 0 => return Err(failed),
            Stage::Counts | Stage::Table | Stage::Map => run.at += 1,
            Stage::Generation => {}
            Stage::Data if image.data != image.file => run.stage = Stage::DataFile,
            Stage::Data => (run.stage, run.at) = (Stage::Table, 0),
            Stage::DataFile => (run.stage, run.at) = (Stage::Table, 0),
            Stage::TableSync => (run.stage, run.at) = (Stage::Map, 0),
            Stage::MapSync => run.stage = Stage::Back,
        }
        Ok(())
    }

    /// Frees clusters that were removed before. The flush is done after that.
    fn step_back(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let run = self.flush.as_mut().and_then(|f| f.run.as_mut()).expect("it runs");
        // The written copies are clean from here on, so a failure below does not make them dirty
        // again.
        run.finish(image, true);
        // Twice, if no request is in flight that started before.
        image.epochs.advance();
        image.epochs.advance();
        if image.external {
            let mut holes = image.holes.locked();
            let parked = holes.punched();
            let most = (PUNCH_BYTES_MAX >> image.cluster_bits).min(FREED_MAX.saturating_sub(run.freed));
            let next = if most > 0 { holes.next(run.number, most, &image.epochs) } else { None };
            drop(holes);
            parked.into_iter().for_each(&mut *cx.wake);
            if let Some((start, count)) = next {
                run.freed += count;
                let (offset, len) = (start << image.cluster_bits, count << image.cluster_bits);
                // A device may end where the disk does.
                let len = len.min(image.size() - offset);
                return self.step(Pending::Flush, Step::Discard { file: image.data, offset, len });
            }
        }
        let mut alloc = image.alloc.locked();
        loop {
            let (start, count, punched) = run.back;
            if punched > 0 {
                if !alloc.count_down(start, punched) {
                    // Its block was dropped, and is read again.
                    run.back.2 = 0;
                    continue;
                }
                run.back = (start + punched, count - punched, 0);
                continue;
            }
            if count > 0 {
                match alloc.last_uses(start, count, cx.waker) {
                    Ok((n, last)) => {
                        run.back.2 = n;
                        if last {
                            drop(alloc);
                            if let Some(why) = image.wrong_removed(start, n) {
                                return self.step_mark_corrupt(why, cx);
                            }
                            let (offset, len) = (start << image.cluster_bits, n << image.cluster_bits);
                            let step = Step::ZeroFile { file: image.file, offset, len, punch: true };
                            return self.step(Pending::Flush, step);
                        }
                        continue;
                    }
                    Err(take) => {
                        drop(alloc);
                        return self.load_counts(take, image);
                    }
                }
            }
            match alloc.next_removed(run.number, &image.epochs).filter(|_| run.freed < FREED_MAX) {
                Some((start, count)) => {
                    run.freed += count;
                    run.back = (start, count, 0);
                }
                None => break,
            }
        }
        drop(alloc);
        let covers = run.covers;
        self.flush = None;
        finish_flush(image, Some(covers), cx);
        Next::Again
    }

    pub(super) fn abandon_flush(&mut self, cx: &mut Context<'_>) {
        let Some(mut run) = self.flush.take().and_then(|f| f.run) else { return };
        let image = cx.chain.top();
        run.finish(image, false);
        let mut alloc = image.alloc.locked();
        alloc.failed_flush(run.number);
        let (start, count, _) = run.back;
        if count > 0 {
            alloc.remove(start, count, image.epochs.now());
        }
        drop(alloc);
        image.holes.locked().failed_flush(run.number);
        finish_flush(image, None, cx);
    }
}

/// Lets the next request flush.
pub(super) fn finish_flush(image: &Served, done: Option<u64>, cx: &mut Context<'_>) {
    let mut flushes = image.flushes.locked();
    flushes.running = false;
    flushes.done = flushes.done.max(done.unwrap_or(0));
    let waiting = std::mem::take(&mut flushes.waiting);
    drop(flushes);
    waiting.into_iter().for_each(&mut *cx.wake);
}

impl Flush {
    /// Lets the clusters that are being freed leak.
    pub(super) fn leak_freed(&mut self) {
        if let Some(run) = &mut self.run {
            run.back = (0, 0, 0);
        }
    }
}

impl Run {
    fn new(image: &Served, covers: u64) -> Self {
        // First the removed clusters are noted, then the map is copied, so that no removed cluster
        // is in the copies. Counts are last, so that they include everything that the copies refer
        // to.
        let number = image.alloc.locked().start_flush();
        if image.external {
            image.holes.locked().start_flush(number);
        }
        let mark = image.journal.as_ref().map_or(0, Journal::mark);
        let slices = image.map.take_dirty();
        let l1 = image.take_l1();
        let mut alloc = image.alloc.locked();
        alloc.close_tail();
        let (blocks, table) = (alloc.take_dirty(), alloc.take_table(image.unit()));
        Self {
            covers,
            mark,
            number,
            slices,
            l1,
            blocks,
            table,
            generation: None,
            stage: Stage::Counts,
            at: 0,
            back: (0, 0, 0),
            freed: 0,
        }
    }

    fn next_stage(&mut self, image: &Served) {
        self.at = 0;
        self.stage = match self.stage {
            Stage::Counts => Stage::Data,
            Stage::Table if self.table.is_empty() => Stage::Map,
            Stage::Table => Stage::TableSync,
            Stage::Map if self.slices.is_empty() && self.l1.is_empty() => Stage::Back,
            Stage::Map => match (&image.journal, &image.header_copy) {
                (Some(journal), Some(first)) => {
                    let generation = journal.next_generation();
                    self.generation = Some((generation, first.set_generation(generation)));
                    Stage::Generation
                }
                _ => Stage::MapSync,
            },
            other => other,
        };
    }

    /// Handles the end of the write of the piece with the generation. It is repeated if an older
    /// write may have come later.
    fn wrote_generation(&mut self, failed: i32, image: &Served) -> Result<(), i32> {
        let (Some((generation, copied)), Some(first)) = (&mut self.generation, &image.header_copy) else {
            return Ok(());
        };
        if failed < 0 {
            first.failed(copied.1);
            return Err(failed);
        }
        match first.ended(copied.1) {
            Some(again) => *copied = again,
            None => {
                let written = Some(*generation);
                image.journal.iter().for_each(|journal| journal.wrote_generation(written));
                self.stage = Stage::MapSync;
            }
        }
        Ok(())
    }

    /// Returns the next slice, or piece of the L1 table.
    fn map_piece(&self, image: &Served) -> Option<(u64, Vec<u8>)> {
        match self.slices.get(self.at) {
            Some(copy) => {
                let offset = image.slice_offset(copy.slice).expect("a slice that was changed has a table");
                Some((offset, copy.bytes.to_vec()))
            }
            None => {
                self.l1.get(self.at - self.slices.len()).map(|(_, offset, bytes)| (*offset, bytes.clone()))
            }
        }
    }

    /// Records that the copies were written, or makes their contents dirty again.
    fn finish(&mut self, image: &Served, done: bool) {
        if let Some(journal) = image.journal.as_ref().filter(|_| done) {
            journal.forget(self.mark);
        }
        for copy in std::mem::take(&mut self.slices) {
            image.map.written(copy.slice, done);
        }
        let l1 = std::mem::take(&mut self.l1);
        if !done {
            image.tables.locked().dirty.extend(l1.iter().map(|(index, _, _)| *index));
        }
        let (blocks, table) = (std::mem::take(&mut self.blocks), std::mem::take(&mut self.table));
        image.alloc.locked().written(&blocks, &table, done);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
