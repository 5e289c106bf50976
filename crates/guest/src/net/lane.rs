//! One queue pair under load: it sends, receives, or sends back frames.
//!
//! One load thread owns it for the length of a run. Nothing here allocates or takes a lock after
//! its creation.

mod receive;

use std::sync::atomic::Ordering;

use self::receive::Partial;
use super::device::{HEADER, Pair};
use super::flows::{Flows, Tally};
use super::frame::{self, CSUM_OFFSET, CSUM_START, Direction, HEAD, LEN_PLAIN, Mark, MarkedFrame, SEGMENT};
use super::rate::Rate;
use super::{Mode, NetPlan};
use crate::driver::{DriverSeg, Queue};
use crate::error::Result;
use crate::load::gauge::LoadGauge;
use crate::load::thread::Drive;

/// Header flags: the checksum is not complete yet.
pub(super) const NEEDS_CSUM: u8 = 1;
/// `gso_type`: UDP segmentation.
const GSO_UDP_L4: u8 = 5;
/// With --verify, the driver puts the header of each third frame into a separate buffer.
const APART_EVERY: u64 = 3;

/// Counts of a lane.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    /// Frames of an echo for which the transmit ring had no room.
    pub(super) no_room: u64,
    pub(super) received: Tally,
    pub(super) kicks: u64,
    pub(super) calls: u64,
}

/// One queue pair under load.
pub(super) struct Lane<'a> {
    pub(super) plan: &'a NetPlan,
    pub(super) pair: &'a mut Pair,
    pub(super) index: u32,
    pub(super) gauges: &'a [LoadGauge],
    pub(super) flows: &'a Flows,
    pub(super) merge: bool,
    /// Whether frames may be sent without a checksum.
    pub(super) csum: bool,
    uso: bool,
    /// Flows of a source, and their next numbers.
    sources: Vec<(u16, u64)>,
    next_source: usize,
    pace: Option<Rate>,
    /// Number of frames that may still be sent.
    quota: u64,
    /// Whether a sink still has to announce its address.
    announces: bool,
    pub(super) stopped: bool,
    tx_outstanding: u32,
    tx_done: u64,
    pub(super) scratch: Box<[u8]>,
    partial: Partial,
    pub(super) counted: Counted,
    calls_before: u64,
}

/// Features that the device offers to its driver, for all lanes.
#[derive(Clone, Copy)]
pub(super) struct Negotiated {
    pub(super) merge: bool,
    pub(super) csum: bool,
    pub(super) uso: bool,
}

impl<'a> Lane<'a> {
    pub(super) fn new(
        plan: &'a NetPlan,
        index: u16,
        pair: &'a mut Pair,
        gauges: &'a [LoadGauge],
        flows: &'a Flows,
        negotiated: Negotiated,
        quota: u64,
    ) -> Self {
        let mine = (0..plan.flows).filter(|flow| flow % plan.pairs == index);
        let source = plan.mode == Mode::Source;
        let sources: Vec<_> = mine.filter(|_| source).map(|flow| (flow, 0)).collect();
        let share = sources.len() as f64 / f64::from(plan.flows);
        let calls_before = pair.rx.queue.calls() + pair.tx.queue.calls();
        // A frame is at most as long as all buffers that its number of buffers can count.
        let longest = pair.rx.each * usize::from(plan.queue_size);
        let longest = longest.min(frame::LEN_MAX + HEADER + pair.rx.each);
        Self {
            index: u32::from(index),
            gauges,
            flows,
            merge: negotiated.merge,
            csum: negotiated.csum,
            uso: negotiated.uso,
            next_source: 0,
            pace: plan.rate.map(|rate| Rate::new((rate * share).max(1e-3), plan.batch)),
            quota: if sources.is_empty() && source { 0 } else { quota },
            sources,
            announces: plan.announce && plan.mode == Mode::Sink,
            stopped: false,
            tx_outstanding: 0,
            tx_done: 0,
            scratch: vec![0; longest.max(pair.rx.each)].into(),
            partial: Partial::default(),
            counted: Counted::default(),
            calls_before,
            plan,
            pair,
        }
    }

    /// Returns the counts.
    pub(super) fn counted(mut self) -> Counted {
        let calls = self.pair.rx.queue.calls() + self.pair.tx.queue.calls();
        self.counted.calls = calls - self.calls_before;
        self.counted
    }

    fn receives(&self) -> bool {
        self.plan.mode != Mode::Source
    }

    /// Takes the completions of sent frames.
    pub(super) fn reap_tx(&mut self) -> Result<u32> {
        let mut count = 0;
        while let Some(done) = self.pair.tx.queue.poll()? {
            self.pair.tx.queue.give_slot(done.cookie);
            count += 1;
        }
        self.tx_outstanding -= count;
        self.tx_done += u64::from(count);
        if count > 0 {
            self.gauges[1].done.store(self.tx_done, Ordering::Relaxed);
            self.gauges[1].bytes.store(self.counted.sent_bytes, Ordering::Relaxed);
            self.gauges[1].outstanding.store(self.tx_outstanding.into(), Ordering::Relaxed);
        }
        Ok(count)
    }

    /// Stages a slot's buffer of `len` bytes with its header.
    #[inline]
    pub(super) fn stage(&mut self, slot: u16, len: usize) -> bool {
        let tx = &mut self.pair.tx;
        let addr = tx.buffers.guest() + tx.at(slot) as u64;
        let seg = |from: usize, to: usize| DriverSeg {
            addr: addr + from as u64,
            len: (to - from) as u32,
            writable: false,
        };
        let apart = self.plan.verify && self.counted.sent.is_multiple_of(APART_EVERY);
        let segs = [seg(0, HEADER), seg(HEADER, len)];
        let staged = match apart {
            true => tx.queue.stage_chain(slot, &segs, tx.queue.indirect()),
            false => tx.queue.stage_chain(slot, &[seg(0, len)], false),
        };
        if !staged {
            tx.queue.give_slot(slot);
            return false;
        }
        self.tx_outstanding += 1;
        self.counted.sent += 1;
        self.counted.sent_bytes += (len - HEADER) as u64;
        true
    }

    /// Sends one frame from the address to which sources send, so that a switch learns it.
    fn announce(&mut self) {
        let Some(slot) = self.pair.tx.queue.take_slot() else { return };
        let mark = Mark { run: self.plan.run, flow: 0, number: 0 };
        let frame = MarkedFrame::new(Direction::In, mark, frame::LEN_MIN, false);
        let mut bytes = [0; HEADER + frame::LEN_MIN];
        frame.write(&mut bytes[HEADER..]);
        let tx = &self.pair.tx;
        tx.buffers.write(tx.at(slot), &bytes);
        if self.stage(slot, bytes.len()) {
            self.counted.kicks += u64::from(self.pair.tx.queue.publish());
        }
    }

    /// Makes and stages the next frame of the next flow.
    #[inline]
    fn send_next(&mut self) -> bool {
        let Some(slot) = self.pair.tx.queue.take_slot() else { return false };
        let (flow, number) = self.sources[self.next_source];
        let len = self.plan.sizes.len(number);
        let frame =
            MarkedFrame::new(Direction::Out, Mark { run: self.plan.run, flow, number }, len, self.csum);
        let tx = &self.pair.tx;
        let at = tx.at(slot);
        tx.buffers.write(at, &header(self.csum, self.uso && len > LEN_PLAIN));
        tx.buffers.write(at + HEADER, &frame.head);
        tx.buffers.write(at + HEADER + HEAD, frame.tail);
        if !self.stage(slot, HEADER + len) {
            return false;
        }
        self.sources[self.next_source].1 += 1;
        self.next_source = (self.next_source + 1) % self.sources.len();
        true
    }

    /// Sends a source's batches, as long as there is room for whole ones.
    fn send_batches(&mut self) {
        while self.quota > 0 {
            let mut count = self.quota.min(self.plan.batch.into());
            if let Some(pace) = &mut self.pace {
                let allowed = pace.allowed();
                if allowed < pace.batch {
                    return;
                }
                count = count.min(allowed);
            }
            if (self.pair.tx.queue.free_slots() as u64) < count {
                return;
            }
            let staged = (0..count).take_while(|_| self.send_next()).count() as u64;
            self.counted.kicks += u64::from(self.pair.tx.queue.publish());
            self.quota -= staged;
            if let Some(pace) = &mut self.pace {
                pace.submitted += staged;
            }
            self.gauges[1].outstanding.store(self.tx_outstanding.into(), Ordering::Relaxed);
            if staged < count {
                return;
            }
        }
    }
}

/// Returns the header of a frame. The arguments tell what the device has to complete: the checksum,
/// the segments.
#[inline]
fn header(csum: bool, segments: bool) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    if csum {
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&CSUM_START.to_le_bytes());
        header[8..10].copy_from_slice(&CSUM_OFFSET.to_le_bytes());
    }
    if segments {
        header[1] = GSO_UDP_L4;
        // Ethernet, IPv4 and UDP headers.
        header[2..4].copy_from_slice(&42u16.to_le_bytes());
        header[4..6].copy_from_slice(&SEGMENT.to_le_bytes());
    }
    header
}

impl Drive for Lane<'_> {
    fn reap(&mut self) -> Result<u32> {
        let sent = self.reap_tx()?;
        let received = if self.receives() { self.reap_rx()? } else { 0 };
        Ok(sent + received)
    }

    fn fill(&mut self) {
        if std::mem::take(&mut self.announces) {
            self.announce();
        }
        if self.receives() && self.pair.rx.queue.free_slots() > 0 {
            self.refill();
        }
        if self.plan.mode == Mode::Source {
            self.send_batches();
        }
    }

    fn stop(&mut self) {
        self.stopped = true;
        self.quota = 0;
    }

    fn is_waiting(&self) -> bool {
        self.tx_outstanding > 0 || self.receives() && !self.stopped
    }

    fn is_finished(&self) -> bool {
        self.tx_outstanding == 0
            && match self.plan.mode {
                Mode::Source => self.quota == 0,
                Mode::Sink | Mode::Echo => self.stopped,
            }
    }

    fn due_ns(&self) -> Option<u64> {
        let pace = self.pace.as_ref().filter(|_| self.quota > 0)?;
        // While the ring is full, only completions make progress possible.
        (self.pair.tx.queue.free_slots() as u64 >= pace.batch).then(|| pace.due_ns())
    }

    fn note_base(&mut self) {
        // The rest of a frame that the previous server gave in part does not arrive.
        if self.partial.got > 0 {
            self.partial = Partial::default();
        }
        for (gauge, side) in self.gauges.iter().zip([&self.pair.rx, &self.pair.tx]) {
            gauge.base.store(side.queue.base_after_loss().into(), Ordering::Release);
        }
        self.gauges[1].outstanding.store(self.tx_outstanding.into(), Ordering::Release);
    }

    fn has_used(&self) -> bool {
        self.pair.tx.queue.has_used() || self.receives() && self.pair.rx.queue.has_used()
    }

    fn arm(&mut self) -> bool {
        // Only a full ring and the end of a run wait for sent frames. As Linux does: at three
        // quarters of them.
        let most = (self.tx_outstanding * 3 / 4).max(1) as u16;
        let count = if self.quota == 0 { self.tx_outstanding.max(1) as u16 } else { most };
        let sent = self.pair.tx.queue.enable_notify_after(count) && self.tx_outstanding > 0;
        let received = self.receives() && self.pair.rx.queue.enable_notify();
        sent || received
    }

    fn disarm(&mut self) {
        self.pair.tx.queue.disable_notify();
        self.pair.rx.queue.disable_notify();
    }

    fn queues(&mut self) -> [Option<&mut Queue>; 2] {
        let both = self.plan.mode == Mode::Echo;
        let Pair { rx, tx } = &mut *self.pair;
        match self.plan.mode {
            Mode::Source => [None, Some(&mut tx.queue)],
            Mode::Sink | Mode::Echo => [Some(&mut rx.queue), both.then_some(&mut tx.queue)],
        }
    }
}
