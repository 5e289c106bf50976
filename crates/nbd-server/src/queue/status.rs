//! The state of a range: where data is, which image of a chain has it, and which blocks bitmaps
//! have.

use std::ops::Range;

use ::nbd::Headers;
use ::nbd::allocation::{HOLE, ZERO};
use ::nbd::server::{DIRTY, ExtentRun, STATUS_EXTENTS_MAX, Work, add_status, errno};
use vshunt_block::{Bits, Extent, Found, Look, Op};
use vshunt_engine::{Token, Uring};
use vshunt_types::convert::len_u32;

use super::ConnectionQueue;
use crate::map::{Answer, Question, Runs};
use crate::shared::{Context, MINIMUM_MAX};

/// Longest range that the map of the disk is asked for at once, bytes.
const SEEK_BYTES_MAX: u64 = 1 << 30;
/// Most questions to the map of the disk for one request. The answer then covers a part of the
/// range, and the client asks for the rest.
const SEEKS_MAX: u32 = 256;
/// Most extents of all contexts together.
const EXTENTS_MAX: usize = 4096;
/// Questions that are answered at once before the worker looks at its other queues.
const SEEKS_AT_ONCE: u32 = 4;
/// Bytes of data that take a worker about as long as a request for the state of a range.
pub(super) const STATUS_BYTES: u64 = 256 << 10;
/// Most blocks of all bitmaps that are looked at for one request: 64 Ki words.
const BLOCKS_MAX: u64 = 1 << 22;
/// Blocks of each bitmap that are looked at in any case: no block of the protocol has more.
const BLOCKS_MIN: u64 = (MINIMUM_MAX / 512) as u64;
/// Longest extent without extended headers, bytes.
const COMPACT_MAX: u64 = (u32::MAX as u64) & !0xffff;

/// A request for the state of a range.
#[derive(Default)]
pub(super) struct Mapping {
    /// What is known of the present question.
    runs: Option<Runs>,
    seeks: u32,
    /// The present question is which image has the data.
    layers: bool,
    allocation: Vec<ExtentRun>,
    depth: Vec<ExtentRun>,
}

/// The depth of everything on a disk without a chain.
const TOP: u64 = 1;

impl ConnectionQueue {
    /// Starts a request for the state of a range. Returns whether an operation of the disk is to be
    /// started for it.
    pub(super) fn begin_status(&mut self, uring: &mut Uring, base: Token, index: u16, one: bool) -> bool {
        self.slot(index).mapping = Mapping::default();
        if !self.asks(|context| matches!(context, Context::Allocation)) {
            return self.begin_depth(index);
        }
        if self.maps_by_thread {
            self.questions += 1;
            let (answers, runs) = (self.answers.clone(), self.runs(index, one));
            let (range, block, most) = runs.question();
            self.shared.map.ask(Question { answers, slot: index, range, block, most });
            self.poll_answers(uring, base);
            return false;
        }
        self.slot(index).mapping.runs = Some(self.runs(index, one));
        self.seek(index)
    }

    fn asks(&self, what: impl Fn(&Context) -> bool) -> bool {
        self.contexts.iter().any(what)
    }

    /// Continues with the images of a chain. Returns whether an operation of the disk is to be
    /// started.
    fn begin_depth(&mut self, index: u16) -> bool {
        if !self.asks(|context| matches!(context, Context::Depth)) {
            self.end_status(index);
            return false;
        }
        let one = matches!(self.slot(index).work, Work::BlockStatus { one: true });
        let mut runs = self.runs(index, one);
        if self.maps_by_thread {
            runs.add(u64::MAX, TOP);
            self.slot(index).mapping.depth = runs.all;
            self.end_status(index);
            return false;
        }
        let mapping = &mut self.slot(index).mapping;
        (mapping.runs, mapping.seeks, mapping.layers) = (Some(runs), 0, true);
        self.seek(index)
    }

    /// Returns the empty list of extents for the range of a request.
    fn runs(&mut self, index: u16, one: bool) -> Runs {
        let (most, block) = (self.extents_max(one), u64::from(self.shared.blocks().minimum));
        let request = &self.slot(index).request;
        Runs::new(request.offset..request.offset + request.len, block, most)
    }

    /// Returns how many extents the answer for a context may have.
    fn extents_max(&self, one: bool) -> usize {
        let share = EXTENTS_MAX / self.contexts.len().max(1);
        if one { 1 } else { share.clamp(1, STATUS_EXTENTS_MAX) }
    }

    /// Returns whether other queues of the worker are to be served before the next question.
    pub(super) fn has_asked_enough(&mut self, index: u16) -> bool {
        let slot = self.slot(index);
        matches!(slot.work, Work::BlockStatus { .. }) && slot.mapping.seeks.is_multiple_of(SEEKS_AT_ONCE)
    }

    /// Fills in the next question to the map of the disk, and returns true; or completes the
    /// request.
    fn seek(&mut self, index: u16) -> bool {
        let slot = self.slot(index);
        let Mapping { runs: Some(runs), seeks, layers, .. } = &mut slot.mapping else {
            self.end(index, Err(errno::EIO));
            return false;
        };
        let end = slot.request.offset + slot.request.len;
        if let Some(at) = runs.next_at().filter(|_| *seeks < SEEKS_MAX) {
            *seeks += 1;
            let look = if *layers { Look::Layers } else { Look::Disk };
            slot.io.reset(Op::Seek { look }, at, false);
            slot.io.request.len = (end - at).min(SEEK_BYTES_MAX);
            return true;
        }
        let all = std::mem::take(&mut runs.all);
        if *layers {
            slot.mapping.depth = all;
            self.end_status(index);
            return false;
        }
        slot.mapping.allocation = all;
        self.begin_depth(index)
    }

    /// The map of the disk has answered. Returns whether it is to be asked again.
    pub(super) fn sought(&mut self, index: u16, result: i32) -> bool {
        if result < 0 {
            self.end(index, Err(errno::of(-result)));
            return false;
        }
        let slot = self.slot(index);
        let (at, asked) = (slot.io.request.offset, slot.io.request.len);
        let found = slot.io.request.found.filter(|found| found.len > 0);
        let layers = slot.mapping.layers;
        if let Some(runs) = &mut slot.mapping.runs {
            // Without an answer it counts as data.
            let found = found.unwrap_or(Found { extent: Extent::Data, len: asked });
            runs.add(at + found.len, if layers { depth(found.extent) } else { state(found.extent) });
        }
        self.seek(index)
    }

    /// The map thread has answered.
    pub(super) fn mapped(&mut self, index: u16, answer: Answer) {
        match answer {
            Err(e) => self.end(index, Err(errno::of(-e))),
            Ok(allocation) => {
                self.slot(index).mapping.allocation = allocation;
                // No disk whose map is asked by a thread has a chain, so no operation follows.
                let follows = self.begin_depth(index);
                debug_assert!(!follows, "an operation of the disk without a start");
            }
        }
    }

    /// Completes a request, with what is known.
    fn end_status(&mut self, index: u16) {
        let headers = self.headers;
        let slot = self.slot(index);
        let reply = slot.reply(headers);
        let range = slot.request.offset..slot.request.offset + slot.request.len;
        let one = matches!(slot.work, Work::BlockStatus { one: true });
        let (most, block) = (self.extents_max(one), u64::from(self.shared.blocks().minimum));
        let blocks_max = (BLOCKS_MAX / (self.contexts.len() as u64).max(1)).max(BLOCKS_MIN);
        let mut bytes = std::mem::take(&mut self.slot(index).status);
        let Mapping { allocation, depth, .. } = std::mem::take(&mut self.slot(index).mapping);
        bytes.clear();
        let last = self.contexts.len().saturating_sub(1);
        for (at, context) in self.contexts.iter().enumerate() {
            let runs = match context {
                Context::Allocation => compact(headers, &allocation, most),
                Context::Depth => compact(headers, &depth, most),
                // One that was disabled, removed or taken by a job meanwhile misses changes.
                Context::Bitmap(bitmap) => match bitmap.as_ref().and_then(|bitmap| bitmap.complete_bits()) {
                    Some(bits) => {
                        compact(headers, &dirty(&bits, range.clone(), block, most, blocks_max), most)
                    }
                    None => Vec::new(),
                },
            };
            if runs.is_empty() {
                return self.end(index, Err(errno::EINVAL));
            }
            add_status(&reply, len_u32(at), &runs, at == last, &mut bytes);
        }
        self.slot(index).status = bytes;
        self.end(index, Ok(()));
    }
}

/// Returns the flags of `base:allocation`.
fn state(extent: Extent) -> u64 {
    if extent == Extent::Zero { HOLE | ZERO } else { 0 }
}

/// Returns the depth for `qemu:allocation-depth`.
fn depth(extent: Extent) -> u64 {
    match extent {
        Extent::Layer(depth) => depth.into(),
        _ => TOP,
    }
}

/// Returns extents that are not longer than replies of this form can say.
fn compact(headers: Headers, runs: &[ExtentRun], most: usize) -> Vec<ExtentRun> {
    let longest = if headers == Headers::Extended { u64::MAX } else { COMPACT_MAX };
    let mut all = Vec::with_capacity(runs.len().min(most));
    for run in runs {
        let mut left = run.len;
        while left > 0 && all.len() < most {
            let len = left.min(longest);
            all.push(ExtentRun { len, flags: run.flags });
            left -= len;
        }
    }
    all
}

/// Returns the dirty and the clean extents at the start of a range. Looks at `left` blocks at most.
fn dirty(bits: &Bits, range: Range<u64>, block: u64, most: usize, mut left: u64) -> Vec<ExtentRun> {
    let mut runs = Runs::new(range.clone(), block, most);
    while let Some(at) = runs.next_at().filter(|_| left > 0) {
        let blocks = bits.blocks(at..range.end);
        if blocks.is_empty() {
            // The bitmap ends before the disk, which has grown.
            runs.add(range.end, 0);
            break;
        }
        let seen = blocks.start..blocks.end.min(blocks.start + left);
        let found = bits.run(seen.clone(), left).unwrap_or(seen.end..seen.end);
        left = left.saturating_sub(found.end - seen.start);
        let bytes = bits.bytes(found);
        // A block of the protocol that has both is dirty. One that was not seen to its end is left
        // for the next answer.
        let start = match bytes.is_empty() && seen.end == blocks.end {
            true => range.end,
            false => bytes.start / block * block,
        };
        if start > at {
            runs.add(start, 0);
        }
        if !bytes.is_empty() && runs.next_at().is_some() {
            runs.add(bytes.end.next_multiple_of(block), DIRTY);
        }
    }
    runs.all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_blocks_of_a_range() {
        let bits = Bits::new(1 << 20, 16).unwrap();
        bits.set(2..4);
        bits.set(15..16);
        let found = |range, most| {
            let runs = dirty(&bits, range, 512, most, 1 << 20);
            runs.iter().map(|run| (run.len >> 9, run.flags)).collect::<Vec<_>>()
        };
        assert_eq!(found(0..1 << 20, 9), [(256, 0), (256, 1), (1408, 0), (128, 1)]);
        assert_eq!(found(0..1 << 20, 1), [(256, 0)]);
        assert_eq!(found(131_072 + 512..131_072 + 1024, 9), [(1, 1)]);
        assert_eq!(found(262_144..262_144 + 512, 9), [(1, 0)]);
    }

    #[test]
    fn the_answer_ends_where_nobody_has_looked() {
        let bits = Bits::new(1 << 20, 16).unwrap();
        bits.set(5..16);
        let found = |left| {
            let runs = dirty(&bits, 0..1 << 20, 512, 9, left);
            runs.iter().map(|run| (run.len >> 16, run.flags)).collect::<Vec<_>>()
        };
        assert_eq!(found(3), [(3, 0)]);
        assert_eq!(found(7), [(5, 0), (2, DIRTY)]);
        assert_eq!(found(16), [(5, 0), (11, DIRTY)]);
        let fine = Bits::new(1 << 20, 9).unwrap();
        let runs = dirty(&fine, 0..1 << 20, 4096, 9, 100);
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), 12 * 4096);
    }

    #[test]
    fn a_block_of_the_protocol_with_any_dirty_part_is_dirty() {
        let bits = Bits::new(1 << 16, 9).unwrap();
        bits.set(9..10);
        let runs = dirty(&bits, 0..1 << 16, 4096, 9, 1 << 20);
        let runs: Vec<_> = runs.iter().map(|run| (run.len, run.flags)).collect();
        assert_eq!(runs, [(4096, 0), (4096, DIRTY), ((1 << 16) - 8192, 0)]);
    }

    #[test]
    fn what_a_disk_has_grown_by_is_clean() {
        let bits = Bits::new(1 << 16, 16).unwrap();
        bits.set(0..1);
        let runs = dirty(&bits, 0..1 << 20, 512, 9, 1 << 20);
        let runs: Vec<_> = runs.iter().map(|run| (run.len, run.flags)).collect();
        assert_eq!(runs, [(1 << 16, DIRTY), ((1 << 20) - (1 << 16), 0)]);
    }

    #[test]
    fn extents_without_extended_headers_fit_32_bits() {
        let runs = [ExtentRun { len: 10 << 30, flags: 3 }];
        let compacted = compact(Headers::Structured, &runs, 9);
        assert_eq!(compacted.len(), 3);
        assert!(compacted.iter().all(|run| run.flags == 3 && u32::try_from(run.len).is_ok()));
        assert_eq!(compacted.iter().map(|run| run.len).sum::<u64>(), 10 << 30);
        assert_eq!(compact(Headers::Structured, &runs, 1).len(), 1);
        assert_eq!(compact(Headers::Extended, &runs, 9), runs);
    }
}
