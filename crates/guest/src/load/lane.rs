//! One queue under load: takes completions, checks them, and fills the queue to its depth.
//!
//! One load thread owns it for the length of a phase. Nothing here allocates or takes a lock after
//! its creation.

use std::sync::atomic::Ordering;

use super::gauge::LoadGauge;
use super::loggate::Notes;
use super::pattern::Pattern;
use super::thread::Drive;
use super::{LoadPlan, SECTOR};
use crate::driver::{Area, FRAME_HEAD, Queue, request, status};
use crate::error::{Error, Kind, Result, fail};
use crate::rng::Rng;
use crate::stats::{Ops, SLOW_NS, Slow, SlowRequest, now_ns};
use crate::verify::{Partition, Stamp, check_sectors, write_sectors};

/// Bytes around the data of a shuffled request: for its header, its status, and a random start of
/// the data.
pub(super) const FRAME_ROOM: usize = 1024;

/// Number of neighbours to try if the chosen block already has a write in flight.
const PROBES: usize = 8;

/// The source of requests.
pub(super) enum Source {
    /// The load.
    Load(Pattern),
    /// Reads back all written blocks. The index is that of the next block of the partition.
    Readback(usize),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Read,
    Write,
    Flush,
}

/// The request of a slot.
#[derive(Clone, Copy)]
struct InFlight {
    start_ns: u64,
    block: u64,
    op: Op,
    /// Verified reads: the oldest generation that may be found. 0: not checked.
    lowest: u32,
    /// Its buffer, and the offset of its data in the lane's memory.
    buffer: u32,
    at: usize,
}

/// One queue under load.
pub(super) struct Lane<'a> {
    pub(super) queue: &'a mut Queue,
    gauge: &'a LoadGauge,
    data: Area,
    block_bytes: u32,
    depth: u16,
    source: Source,
    partition: Option<&'a mut Partition>,
    seed: u32,
    /// Number of requests that may still be submitted.
    quota: u64,
    flush_every: u32,
    writes_since_flush: u32,
    in_flight: Vec<InFlight>,
    outstanding: u16,
    buffers: Buffers,
    notes: Option<Notes<'a>>,
    reads: Ops,
    writes: Ops,
    flushes: Ops,
    slow: Slow,
}

/// The positions of the requests' data in a lane's memory.
struct Buffers {
    stride: usize,
    taken: Vec<bool>,
    /// Whether requests use all buffers in turn, so that each is reused late. Otherwise a slot has
    /// its own buffer.
    round: bool,
    next: usize,
    /// Whether data starts at a random position, with room around it.
    framed: bool,
    rng: Rng,
}

impl Buffers {
    fn new(plan: &LoadPlan, stream: u64) -> Self {
        Self {
            stride: plan.stride(),
            taken: vec![false; plan.buffer_count()],
            round: plan.buffers > plan.iodepth,
            next: 0,
            framed: plan.shuffle > 0,
            rng: Rng::new(u64::from(plan.seed), 2000 + stream),
        }
    }

    /// Returns a buffer for the request in `slot`: its number, and the offset of its data. Slots
    /// are taken last in, first out. So only the first `depth` slots, for which there are buffers,
    /// are ever in use.
    #[inline]
    fn take(&mut self, slot: u16) -> (u32, usize) {
        let mut buffer = usize::from(slot);
        if self.round {
            // Fewer requests are in flight than there are buffers, so one is free.
            while self.taken[self.next] {
                self.next = (self.next + 1) % self.taken.len();
            }
            buffer = self.next;
            self.next = (self.next + 1) % self.taken.len();
        }
        self.taken[buffer] = true;
        let start = buffer * self.stride;
        if !self.framed {
            return (buffer as u32, start);
        }
        let shift = match self.rng.one_in(2) {
            true => SECTOR as usize,
            false => FRAME_HEAD + self.rng.below((FRAME_ROOM - FRAME_HEAD) as u64) as usize,
        };
        (buffer as u32, start + shift)
    }
}

/// Counts of a lane.
#[derive(Default)]
pub(super) struct Counted {
    pub(super) reads: Ops,
    pub(super) writes: Ops,
    pub(super) flushes: Ops,
    pub(super) slow: Slow,
}

/// The part of the work that a lane does.
pub(super) struct Share<'a> {
    pub(super) source: Source,
    pub(super) partition: Option<&'a mut Partition>,
    pub(super) quota: u64,
}

impl<'a> Lane<'a> {
    /// Makes a lane of `queue`, with `data` cut into one block for each slot.
    pub(super) fn new(
        queue: &'a mut Queue,
        gauge: &'a LoadGauge,
        data: Area,
        plan: &'a LoadPlan,
        share: Share<'a>,
    ) -> Self {
        let size = usize::from(queue.parts().size);
        let buffers = Buffers::new(plan, u64::from(queue.parts().index));
        assert!(data.len() >= buffers.stride * buffers.taken.len(), "room for every buffer");
        let notes = plan.log.as_ref().map(|gate| Notes::new(gate, queue.parts(), buffers.taken.len()));
        let idle = InFlight { start_ns: 0, block: 0, op: Op::Flush, lowest: 0, buffer: 0, at: 0 };
        Self {
            queue,
            gauge,
            data,
            block_bytes: plan.block,
            depth: plan.iodepth,
            source: share.source,
            partition: share.partition,
            seed: plan.seed,
            quota: share.quota,
            flush_every: plan.flush_every,
            writes_since_flush: 0,
            in_flight: vec![idle; size],
            outstanding: 0,
            buffers,
            notes,
            reads: Ops::default(),
            writes: Ops::default(),
            flushes: Ops::default(),
            slow: Slow::of_a_queue(),
        }
    }

    #[inline]
    fn finish(&mut self, slot: u16, now: u64) -> Result<()> {
        let InFlight { start_ns, block, op, lowest, buffer, at } = self.in_flight[usize::from(slot)];
        let status = self.queue.status(slot);
        if let Some(notes) = &mut self.notes {
            let data = if op == Op::Read { self.block_bytes } else { 0 };
            let data = (self.data.guest() + at as u64, data);
            notes.completed(self.queue.next_used().0, self.queue.status_addr(slot), data);
        }
        if status != status::OK {
            return Err(self.failed(op, block, status));
        }
        let latency = now.saturating_sub(start_ns);
        match op {
            Op::Read => {
                if lowest != 0 {
                    self.check(at, block, lowest)?;
                }
                self.reads.record(self.block_bytes, latency);
            }
            Op::Write => {
                if let Some(partition) = &mut self.partition {
                    partition.end_write(block);
                }
                self.writes.record(self.block_bytes, latency);
            }
            Op::Flush => self.flushes.record(0, latency),
        }
        if latency >= SLOW_NS {
            self.slow.record(SlowRequest { end_ns: now, latency_ns: latency });
        }
        self.queue.give_slot(slot);
        self.buffers.taken[buffer as usize] = false;
        self.outstanding -= 1;
        Ok(())
    }

    #[cold]
    fn failed(&self, op: Op, block: u64, status: u8) -> Error {
        let what = match op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
        };
        fail!(
            Io,
            "{what} of {} bytes at sector {} on queue {} failed: {}",
            self.block_bytes,
            self.sector(block),
            self.queue.parts().index,
            crate::driver::status_name(status)
        )
    }

    fn check(&mut self, at: usize, block: u64, lowest: u32) -> Result<()> {
        let Some(partition) = &mut self.partition else { return Ok(()) };
        let generation = partition.newest(block);
        let stamp = Stamp { sector: self.sector(block), generation, seed: self.seed };
        let sectors = self.block_bytes as usize / SECTOR as usize;
        let at = self.host(at);
        // SAFETY: the buffer has `block_bytes` bytes, and `data` keeps it mapped.
        let checked = unsafe { check_sectors(at, stamp, lowest, sectors) };
        checked.map_err(|mismatch| {
            let queue = self.queue.parts().index;
            Error::new(
                Kind::Verify,
                format!("verification failed on queue {queue}, block {block}: {mismatch}"),
            )
        })
    }

    #[inline]
    fn sector(&self, block: u64) -> u64 {
        block * (u64::from(self.block_bytes) / SECTOR)
    }

    /// Returns the address of a buffer's data in this process.
    #[inline]
    fn host(&self, at: usize) -> *mut u8 {
        debug_assert!(at + self.block_bytes as usize <= self.data.len());
        // SAFETY: `Buffers` returns offsets inside the memory whose size `new` checked.
        unsafe { self.data.host().add(at) }
    }

    #[inline]
    fn stage(&mut self, slot: u16, op: Op, block: u64, at: usize) -> bool {
        let (kind, sector) = match op {
            Op::Read => (request::IN, self.sector(block)),
            Op::Write => (request::OUT, self.sector(block)),
            Op::Flush => (request::FLUSH, 0),
        };
        let len = if op == Op::Flush { 0 } else { self.block_bytes };
        if self.buffers.framed {
            return self.queue.stage_framed(slot, kind, sector, &self.data, (at, len));
        }
        self.queue.stage(slot, kind, sector, (self.data.guest() + at as u64, len))
    }

    /// Returns the next operation, or `None` if there is nothing to do now.
    #[inline]
    fn next_op(&mut self) -> Option<(Op, u64)> {
        let pattern = match &mut self.source {
            Source::Load(pattern) => pattern,
            Source::Readback(cursor) => {
                let partition = self.partition.as_deref()?;
                let index = partition.next_written(*cursor)?;
                *cursor = index + 1;
                return Some((Op::Read, partition.first() + index as u64));
            }
        };
        if self.flush_every != 0 && self.writes_since_flush >= self.flush_every {
            self.writes_since_flush = 0;
            return Some((Op::Flush, 0));
        }
        let (mut block, is_read) = pattern.advance();
        if is_read {
            return Some((Op::Read, block));
        }
        self.writes_since_flush += 1;
        let Some(partition) = &mut self.partition else { return Some((Op::Write, block)) };
        for _ in 0..PROBES {
            if partition.begin_write(block).is_some() {
                return Some((Op::Write, block));
            }
            block = pattern.after(block);
        }
        // All neighbours are being written. They are tried again after a completion.
        self.writes_since_flush -= 1;
        None
    }

    /// Puts the data of a write into its slot's buffer. Returns the oldest generation that a read
    /// may find.
    #[inline]
    fn prepare(&mut self, at: usize, op: Op, block: u64) -> u32 {
        let Some(partition) = &mut self.partition else { return 0 };
        match op {
            Op::Flush => 0,
            Op::Read => partition.settled(block),
            Op::Write => {
                let generation = partition.newest(block);
                let stamp = Stamp { sector: self.sector(block), generation, seed: self.seed };
                let at = self.host(at);
                // SAFETY: the buffer has `block_bytes` bytes. No request in flight uses it, so the
                // device does not access it.
                unsafe { write_sectors(at, stamp, self.block_bytes as usize / SECTOR as usize) };
                0
            }
        }
    }

    /// Undoes the preparation of a request for which the ring had no room.
    #[cold]
    fn take_back(&mut self, slot: u16, op: Op, block: u64) {
        if let (Op::Write, Some(partition)) = (op, &mut self.partition) {
            partition.cancel_write(block);
        }
        if let Source::Readback(cursor) = &mut self.source {
            *cursor -= 1;
        }
        self.queue.give_slot(slot);
    }

    fn no_more(&self, cursor: usize) -> bool {
        self.partition.as_deref().is_none_or(|p| p.next_written(cursor).is_none())
    }

    /// Returns the counts.
    pub(super) fn counted(self) -> Counted {
        Counted { reads: self.reads, writes: self.writes, flushes: self.flushes, slow: self.slow }
    }
}

impl Drive for Lane<'_> {
    fn reap(&mut self) -> Result<u32> {
        if let Some(notes) = &mut self.notes {
            notes.look(self.outstanding == 0);
        }
        let mut count = 0;
        let mut now = 0;
        while let Some(completion) = self.queue.poll()? {
            if count == 0 {
                now = now_ns();
            }
            count += 1;
            self.finish(completion.cookie, now)?;
        }
        if count > 0 {
            let ios = self.reads.ios + self.writes.ios + self.flushes.ios;
            self.gauge.done.store(ios, Ordering::Relaxed);
            self.gauge.bytes.store(self.reads.bytes + self.writes.bytes, Ordering::Relaxed);
        }
        Ok(count)
    }

    fn fill(&mut self) {
        let before = self.outstanding;
        let mut now = 0;
        while self.outstanding < self.depth && self.quota > 0 {
            if self.notes.as_mut().is_some_and(|notes| !notes.may_submit()) {
                break;
            }
            let Some(slot) = self.queue.take_slot() else { break };
            let Some((op, block)) = self.next_op() else {
                self.queue.give_slot(slot);
                break;
            };
            let (buffer, at) = self.buffers.take(slot);
            let lowest = self.prepare(at, op, block);
            // The latency does not include the preparation of this request or of others before it.
            if now == 0 || self.partition.is_some() {
                now = now_ns();
            }
            self.in_flight[usize::from(slot)] = InFlight { start_ns: now, block, op, lowest, buffer, at };
            if !self.stage(slot, op, block, at) {
                self.buffers.taken[buffer as usize] = false;
                self.take_back(slot, op, block);
                break;
            }
            self.outstanding += 1;
            self.quota -= 1;
        }
        if self.outstanding != before {
            self.queue.publish();
            self.gauge.outstanding.store(u64::from(self.outstanding), Ordering::Relaxed);
        }
    }

    fn stop(&mut self) {
        self.quota = 0;
    }

    fn is_finished(&self) -> bool {
        self.outstanding == 0
            && (self.quota == 0 || matches!(self.source, Source::Readback(c) if self.no_more(c)))
    }

    fn is_waiting(&self) -> bool {
        self.outstanding > 0
    }

    fn note_base(&mut self) {
        self.gauge.base.store(u64::from(self.queue.base_after_loss()), Ordering::Release);
        self.gauge.outstanding.store(u64::from(self.outstanding), Ordering::Release);
    }

    fn end_notes(&mut self) {
        if let Some(notes) = &mut self.notes {
            notes.end();
        }
    }

    fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    fn arm(&mut self) -> bool {
        self.queue.enable_notify()
    }

    fn disarm(&mut self) {
        self.queue.disable_notify();
    }

    fn queues(&mut self) -> [Option<&mut Queue>; 2] {
        [Some(self.queue), None]
    }
}
