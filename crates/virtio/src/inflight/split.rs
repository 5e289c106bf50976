//! The split ring's part of the region: one state for each descriptor, and a list through the last
//! batch of used ones.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;

use crate::desc::Head;
use crate::raw;

use super::{Inflight, InflightError, Replay, SplitNotes, VERSION};

// QueueRegionSplit
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
pub(super) const HEADER_LEN: usize = 16;

// DescStateSplit
const INFLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
pub(super) const ENTRY_LEN: usize = 16;

/// Tracks one split ring.
#[derive(Debug)]
pub(crate) struct SplitTrack {
    base: *mut u8,
    queue_size: u16,
    counter: u64,
    last_batch_head: u16,
    /// Heads that were pushed and not published.
    staged: Vec<u16>,
    _keep: Arc<dyn Any + Send + Sync>,
}

impl SplitTrack {
    /// Takes over the region, for a ring of `size` descriptors whose used index is `used`. A kill
    /// at any point is harmless: it can be repeated.
    pub(crate) fn recover(
        inflight: Inflight,
        size: u16,
        used: u16,
    ) -> Result<(Self, Vec<Replay>), InflightError> {
        inflight.fits(size, false)?;
        let Inflight { base, queue_size, fresh, keep, .. } = inflight;
        let mut track = Self {
            base,
            queue_size,
            counter: 0,
            last_batch_head: 0,
            staged: Vec::with_capacity(size as usize),
            _keep: keep,
        };
        let mut replays = Vec::new();
        if fresh {
            track.format(used);
        } else {
            replays = track.repair(size, used);
        }
        Ok((track, replays))
    }

    /// Returns the state with which it would continue.
    pub(crate) fn notes(&self) -> SplitNotes {
        let Self { base, queue_size, counter, last_batch_head, .. } = *self;
        SplitNotes { base, queue_size, counter, last_batch_head }
    }

    /// Returns the address of the state of a descriptor.
    #[inline(always)]
    fn entry(&self, index: u16) -> *mut u8 {
        debug_assert!(index < self.queue_size);
        // SAFETY: callers pass indices below the queue size, for which `Inflight::new` checked the
        // length.
        unsafe { self.base.add(HEADER_LEN + ENTRY_LEN * index as usize) }
    }

    /// Writes an empty region. The version comes last and makes the region valid.
    fn format(&mut self, used: u16) {
        // SAFETY: all inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe {
            raw::put_u64(self.base, 0);
            for index in 0..self.queue_size {
                let entry = self.entry(index);
                raw::put_u64(entry, 0);
                raw::put_u64(entry.add(COUNTER_AT), 0);
            }
            raw::put_u16(self.base.add(DESC_NUM_AT), self.queue_size);
            raw::put_u16(self.base.add(LAST_BATCH_HEAD_AT), 0);
            raw::put_u16(self.base.add(USED_IDX_AT), used);
            raw::put_u16(self.base.add(VERSION_AT), VERSION);
        }
    }

    /// "When reconnecting": completes the last batch, and lists the requests in flight.
    fn repair(&mut self, size: u16, used: u16) -> Vec<Replay> {
        // SAFETY: inside of the region, as in `format`; list indices are checked before use.
        unsafe {
            let recorded = raw::get_u16(self.base.add(USED_IDX_AT));
            self.last_batch_head = raw::get_u16(self.base.add(LAST_BATCH_HEAD_AT));
            if recorded != used {
                let mut index = self.last_batch_head;
                // A batch is at most as long as the ring. A larger difference means that the ring
                // was started anew.
                for _ in 0..used.wrapping_sub(recorded).min(self.queue_size) {
                    if index >= self.queue_size {
                        break;
                    }
                    raw::put_u8(self.entry(index).add(INFLIGHT_AT), 0);
                    index = raw::get_u16(self.entry(index).add(NEXT_AT));
                }
                raw::put_u16(self.base.add(USED_IDX_AT), used);
            }
        }
        let mut found: Vec<(u64, Replay)> = (0..size)
            .filter_map(|index| {
                let entry = self.entry(index);
                // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
                let (inflight, counter) =
                    unsafe { (entry.add(INFLIGHT_AT).read_volatile(), raw::get_u64(entry.add(COUNTER_AT))) };
                let head = Head { id: index, descs: 0 };
                (inflight == 1).then_some((counter, Replay { head, entry: index }))
            })
            .collect();
        found.sort_by_key(|&(counter, _)| counter);
        self.counter = found.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        found.into_iter().map(|(_, replay)| replay).collect()
    }

    /// Records that a request was taken. `head` is below the ring's size.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        let entry = self.entry(head);
        // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe {
            raw::put_u64(entry.add(COUNTER_AT), self.counter);
            raw::put_u8(entry.add(INFLIGHT_AT), 1);
        }
        self.counter = self.counter.wrapping_add(1);
    }

    /// Records that a request was returned to the ring untouched. `head` is below the ring's size.
    pub(crate) fn untake(&mut self, head: u16) {
        if head < self.queue_size {
            // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
            unsafe { raw::put_u8(self.entry(head).add(INFLIGHT_AT), 0) };
        }
    }

    /// Records that a request is part of the next batch.
    #[inline]
    pub(crate) fn stage(&mut self, head: u16) {
        if head < self.queue_size {
            self.staged.push(head);
        }
    }

    /// Links the batch, before the used index changes.
    pub(crate) fn before_publish(&mut self) {
        for &head in &self.staged {
            // SAFETY: inside of the region; `stage` checked the head.
            unsafe {
                raw::put_u16(self.entry(head).add(NEXT_AT), self.last_batch_head);
                raw::put_u16(self.base.add(LAST_BATCH_HEAD_AT), head);
            }
            self.last_batch_head = head;
        }
    }

    /// Records that the used index is now `used`, so the batch is no longer in flight.
    pub(crate) fn after_publish(&mut self, used: u16) {
        for &head in &self.staged {
            // SAFETY: inside of the region; `stage` checked the head.
            unsafe { raw::put_u8(self.entry(head).add(INFLIGHT_AT), 0) };
        }
        self.staged.clear();
        // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe { raw::put_u16(self.base.add(USED_IDX_AT), used) };
    }
}
