//! Frames to the guest: copied from their senders' memory into the receive buffers that the guest
//! offers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_engine::QueueStats;
use vshunt_types::spec::DropReason;

use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::Allowance;
use crate::pair_rings::PairSide;
use crate::rx_buffers::{Cursor, NoRoom, RxBuffers};
use crate::switch::frame::Header;
use crate::switch::offload::{AcceptedOffloads, Segments};
use crate::switch::port_queue::{Outcome, PortQueue, SentFrame};

/// See the module.
pub(super) struct Rx {
    pub(super) to: RxBuffers,
    accepted: Arc<AtomicU64>,
    /// Descriptions taken from the inbox. Empty between iterations.
    frames: VecDeque<SentFrame>,
    /// Descriptions to be returned. Empty between iterations.
    done: Vec<SentFrame>,
    /// The rest of a frame that the guest did not accept as it was sent.
    segments: Segments,
    /// Whether frames wait for buffers.
    waiting: bool,
}

/// The results of one call of [`Rx::take`].
#[derive(Default)]
struct Progress {
    /// Number of buffers that have frames.
    used: usize,
    frames: u64,
    bytes: u64,
    /// Number of frames that fit into no buffers.
    lost: u64,
    /// Number of frames that the limits did not let pass.
    refused: u64,
}

impl Rx {
    pub(super) fn new(to: RxBuffers, accepted: Arc<AtomicU64>) -> Self {
        Self {
            to,
            accepted,
            frames: VecDeque::new(),
            done: Vec::new(),
            segments: Segments::default(),
            waiting: false,
        }
    }

    pub(super) fn has_work(&self, queue: &PortQueue) -> bool {
        if self.to.virtqueue.broken {
            return false;
        }
        match self.waiting {
            true => self.to.virtqueue.has_avail() || queue.has_changed(),
            false => queue.has_frames(),
        }
    }

    /// Asks for a kick if only more buffers would help. Returns whether there is work already.
    pub(super) fn sleep(&mut self, queue: &PortQueue) -> bool {
        let virtqueue = &mut self.to.virtqueue;
        let more = self.waiting && !virtqueue.broken && virtqueue.vring.enable_kick();
        more || self.has_work(queue)
    }

    /// Gives frames to the guest, and drops those that `limit` does not let pass. Returns how many
    /// it took from the inbox or dropped.
    pub(super) fn take(
        &mut self,
        queue: &PortQueue,
        budget: u32,
        mut limit: Allowance<'_>,
        stats: &QueueStats,
    ) -> u32 {
        if self.to.virtqueue.broken || !(queue.has_frames() || self.waiting) {
            return 0;
        }
        self.waiting = false;
        queue.take_changed();
        if !queue.is_open() {
            // The guest does not use this pair any more.
            self.drop_segments();
        }
        let accepted = AcceptedOffloads::new(self.accepted.load(Relaxed));
        let mut progress = Progress::default();
        queue.take(budget as usize, &mut self.frames);
        loop {
            // The rest of the previous frame comes first.
            self.give_segments(&mut progress, &limit);
            if self.waiting {
                break;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            if let Allowance::Ask(gate) = &mut limit
                && !gate.ask_next()
            {
                // The receiver counts it. Its sender must not wait for the limits of another guest.
                gate.refuse(stats);
                progress.refused += 1;
                frame.outcome = Outcome::Taken;
                self.done.push(frame);
                continue;
            }
            if !accepted.all_of(&frame.header) {
                let made = self.segments.make(&frame, accepted);
                frame.outcome = if made { Outcome::Taken } else { Outcome::Invalid };
                self.done.push(frame);
                continue;
            }
            match self.give(&frame, accepted, &mut progress) {
                Ok(()) => limit.charge(frame.len),
                // The receiver counts it as lost. Its sender can do nothing about it.
                Err(NoRoom::Permanent) => progress.lost += 1,
                Err(NoRoom::Temporary) => {
                    self.waiting = true;
                    self.frames.push_front(frame);
                    break;
                }
            }
            frame.outcome = Outcome::Taken;
            self.done.push(frame);
        }
        self.to.release(progress.used);
        if !self.frames.is_empty() {
            queue.put_back(&mut self.frames);
        }
        PortQueue::return_all(&mut self.done);
        let Progress { frames, bytes, lost, refused, .. } = progress;
        if frames > 0 {
            self.to.virtqueue.received(frames, bytes);
        }
        if lost > 0 {
            self.to.virtqueue.dropped(DropReason::TooLong, lost);
        }
        if refused > 0 {
            self.to.virtqueue.dropped(DropReason::Limited, refused);
        }
        u32::try_from(frames + lost + refused).unwrap_or(u32::MAX)
    }

    /// Copies a whole frame into buffers.
    #[inline]
    fn give(
        &mut self,
        frame: &SentFrame,
        accepted: AcceptedOffloads,
        progress: &mut Progress,
    ) -> Result<(), NoRoom> {
        let bytes = self.to.format.header + frame.len;
        let buffers = self.to.buffers_for(progress.used, bytes)?;
        let mut to = self.write_header(progress.used, accepted.shown(frame.header));
        for piece in &frame.pieces {
            // SAFETY: the sender keeps its memory mapped until the description was returned, and
            // `frame` is that description. If both guests share memory, the receiver gets bytes of
            // one of the two.
            unsafe { self.to.copy(&mut to, piece.ptr, piece.len) };
        }
        self.to.stage_used(progress.used, buffers, bytes);
        progress.used += buffers;
        progress.frames += 1;
        progress.bytes += frame.len as u64;
        Ok(())
    }

    /// Copies segments into buffers, until none is left or there is no room.
    fn give_segments(&mut self, progress: &mut Progress, limit: &Allowance<'_>) {
        while let Some(segment) = self.segments.next() {
            let (from, len) = (segment.as_ptr(), segment.len());
            let bytes = self.to.format.header + len;
            match self.to.buffers_for(progress.used, bytes) {
                Ok(buffers) => {
                    let mut to = self.write_header(progress.used, Header::default());
                    // SAFETY: `self.segments` owns the segment and is not changed before `pop`.
                    unsafe { self.to.copy(&mut to, from, len) };
                    self.to.stage_used(progress.used, buffers, bytes);
                    limit.charge(len);
                    progress.used += buffers;
                    progress.frames += 1;
                    progress.bytes += len as u64;
                }
                Err(NoRoom::Permanent) => progress.lost += 1,
                Err(NoRoom::Temporary) => {
                    self.waiting = true;
                    return;
                }
            }
            self.segments.pop();
        }
    }

    /// Drops the rest of a frame that was cut into segments.
    pub(super) fn drop_segments(&mut self) {
        let lost = self.segments.len() as u64;
        if lost > 0 {
            self.to.virtqueue.dropped(DropReason::NoBuffers, lost);
            self.segments = Segments::default();
        }
    }

    /// Writes a frame's header into the buffers from number `first` on. Returns the position behind
    /// it.
    fn write_header(&self, first: usize, header: Header) -> Cursor {
        let bytes = header.to_bytes();
        let mut to = self.to.start(first);
        // SAFETY: `bytes` is a local array of 12 bytes, and no header is longer.
        unsafe { self.to.copy(&mut to, bytes.as_ptr(), self.to.format.header) };
        to
    }
}

impl PairSide for Rx {
    fn virtqueue(&self) -> &NetVirtqueue {
        &self.to.virtqueue
    }

    fn virtqueue_mut(&mut self) -> &mut NetVirtqueue {
        &mut self.to.virtqueue
    }

    /// Unused buffers are returned to the ring.
    fn stop(mut self, _discard: bool) -> u32 {
        self.drop_segments();
        self.to.stop()
    }
}
