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

    /// Reads a field of 16 bits of the header.
    #[inline(always)]
    fn header_u16(&self, at: usize) -> u16 {
        debug_assert!(at < HEADER_LEN);
        // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe { raw::get_u16(self.base.wrapping_add(at)) }
    }

    /// Writes a field of 16 bits of the header.
    #[inline(always)]
    fn put_header_u16(&mut self, at: usize, value: u16) {
        debug_assert!(at < HEADER_LEN);
        // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe { raw::put_u16(self.base.wrapping_add(at), value) };
    }

    /// Writes whether a descriptor's request is in flight.
    #[inline(always)]
    fn put_in_flight(&mut self, index: u16, value: u8) {
        // SAFETY: inside of the region, whose length `Inflight::new` checked: see `entry`.
        unsafe { raw::put_u8(self.entry(index).wrapping_add(INFLIGHT_AT), value) };
    }

    /// Writes an empty region. The version comes last and makes the region valid.
    fn format(&mut self, used: u16) {
        // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
        unsafe { raw::put_u64(self.base, 0) };
        for index in 0..self.queue_size {
            let entry = self.entry(index);
            // SAFETY: inside of an entry of the region, whose length `Inflight::new` checked.
            unsafe { raw::put_u64(entry, 0) };
            // SAFETY: inside of an entry of the region, whose length `Inflight::new` checked.
            unsafe { raw::put_u64(entry.wrapping_add(COUNTER_AT), 0) };
        }
        self.put_header_u16(DESC_NUM_AT, self.queue_size);
        self.put_header_u16(LAST_BATCH_HEAD_AT, 0);
        self.put_header_u16(USED_IDX_AT, used);
        self.put_header_u16(VERSION_AT, VERSION);
    }

    /// "When reconnecting": completes the last batch, and lists the requests in flight.
    fn repair(&mut self, size: u16, used: u16) -> Vec<Replay> {
        let recorded = self.header_u16(USED_IDX_AT);
        self.last_batch_head = self.header_u16(LAST_BATCH_HEAD_AT);
        if recorded != used {
            let mut index = self.last_batch_head;
            // A batch is at most as long as the ring. A larger difference means that the ring was
            // restarted.
            for _ in 0..used.wrapping_sub(recorded).min(self.queue_size) {
                if index >= self.queue_size {
                    break;
                }
                self.put_in_flight(index, 0);
                // SAFETY: inside of the region, because the index was checked above.
                index = unsafe { raw::get_u16(self.entry(index).wrapping_add(NEXT_AT)) };
            }
            self.put_header_u16(USED_IDX_AT, used);
        }
        let mut found: Vec<(u64, Replay)> = (0..size)
            .filter_map(|index| {
                let entry = self.entry(index);
                // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
                let inflight = unsafe { entry.wrapping_add(INFLIGHT_AT).read_volatile() };
                // SAFETY: inside of an entry of the region, whose length `Inflight::new` checked.
                let counter = unsafe { raw::get_u64(entry.wrapping_add(COUNTER_AT)) };
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
        unsafe { raw::put_u64(entry.wrapping_add(COUNTER_AT), self.counter) };
        self.put_in_flight(head, 1);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Records that a request was returned to the ring untouched. `head` is below the ring's size.
    pub(crate) fn untake(&mut self, head: u16) {
        if head < self.queue_size {
            self.put_in_flight(head, 0);
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
            unsafe { raw::put_u16(self.entry(head).wrapping_add(NEXT_AT), self.last_batch_head) };
            // SAFETY: inside of the region, whose length and alignment `Inflight::new` checked.
            unsafe { raw::put_u16(self.base.wrapping_add(LAST_BATCH_HEAD_AT), head) };
            self.last_batch_head = head;
        }
    }

    /// Records that the used index is now `used`, so the batch is no longer in flight.
    pub(crate) fn after_publish(&mut self, used: u16) {
        for &head in &self.staged {
            // SAFETY: inside of the region; `stage` checked the head.
            unsafe { raw::put_u8(self.entry(head).wrapping_add(INFLIGHT_AT), 0) };
        }
        self.staged.clear();
        self.put_header_u16(USED_IDX_AT, used);
    }
}
