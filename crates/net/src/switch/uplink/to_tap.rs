//! Frames to the host: written to a tap's queue from their senders' memory, in batches that never
//! wait.

use std::collections::VecDeque;

use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use super::from_tap::HEADER;
use crate::frames::BATCH;
use crate::slots::{number, slot_mut};
use crate::switch::frame::Header;
use crate::switch::offload::{AcceptedOffloads, Segments};
use crate::switch::port_queue::{Outcome, PortQueue, SentFrame};
use crate::switch::sender::PIECES_MAX;
use crate::tap_file::{Op, TapFile, drop_reason};

/// Most iovecs of a batch: a header and the pieces of each frame.
const IOVECS: usize = BATCH as usize * (PIECES_MAX + 1);

/// A write in flight.
enum Write {
    /// A frame as it was sent.
    Frame(SentFrame),
    /// A segment of a frame; its bytes.
    Segment(usize),
}

/// See the module.
pub(super) struct ToTap {
    accepted: AcceptedOffloads,
    /// Descriptions taken from the inbox. Empty between iterations.
    frames: VecDeque<SentFrame>,
    /// The batch in flight, its headers, and the iovecs of its operations. Neither grows, because
    /// the kernel has their addresses.
    writes: Vec<Option<Write>>,
    headers: Vec<[u8; HEADER]>,
    iovecs: Vec<libc::iovec>,
    outstanding: u32,
    /// Segments of a frame that the tap did not accept as it was sent. Not changed while a write
    /// uses them.
    segments: Segments,
    done: Vec<SentFrame>,
    /// Frames of this batch that the tap took, and their bytes.
    wrote: (u64, u64),
    /// Frames that the tap did not take through no fault of their senders, for the owner to count.
    pub(super) lost: Vec<DropReason>,
}

// SAFETY: only operations in flight use the raw pointers in `iovecs`. There are none while the
// queue moves to another worker, because it is at rest then.
unsafe impl Send for ToTap {}

impl ToTap {
    pub(super) fn new(accepted: AcceptedOffloads) -> Self {
        Self {
            accepted,
            frames: VecDeque::new(),
            writes: Vec::with_capacity(BATCH as usize),
            headers: Vec::with_capacity(BATCH as usize),
            iovecs: Vec::with_capacity(IOVECS),
            outstanding: 0,
            segments: Segments::default(),
            done: Vec::new(),
            wrote: (0, 0),
            lost: Vec::with_capacity(BATCH as usize),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.outstanding
    }

    /// Returns the number of segments that wait for the next batch.
    pub(super) fn held(&self) -> u64 {
        self.segments.len() as u64
    }

    pub(super) fn has_work(&self, queue: &PortQueue) -> bool {
        self.outstanding == 0 && (queue.has_frames() || self.segments.len() > 0)
    }

    /// Starts to write the waiting frames. Returns their number.
    pub(super) fn take(
        &mut self,
        uring: &mut Uring,
        file: TapFile,
        token: Token,
        queue: &PortQueue,
        budget: u32,
    ) -> u32 {
        if !self.has_work(queue) {
            return 0;
        }
        self.writes.clear();
        self.headers.clear();
        self.iovecs.clear();
        let most = budget.min(BATCH);
        queue.take(most as usize, &mut self.frames);
        while self.outstanding < most {
            // The rest of the previous frame comes first.
            if let Some(segment) = self.segments.next() {
                let len = segment.len();
                let iovec = libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: len };
                self.segments.pop();
                self.write(uring, file, token, Header::default(), |to| to.push(iovec));
                self.writes.push(Some(Write::Segment(len)));
                continue;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            if self.accepted.all_of(&frame.header) {
                let iovecs = |to: &mut Vec<libc::iovec>| {
                    to.extend(
                        frame
                            .pieces
                            .iter()
                            .map(|piece| libc::iovec { iov_base: piece.ptr.cast(), iov_len: piece.len }),
                    );
                };
                self.write(uring, file, token, frame.header, iovecs);
                self.writes.push(Some(Write::Frame(frame)));
            } else if self.writes.iter().any(|write| matches!(write, Some(Write::Segment(_)))) {
                // The segments have to be written before they are replaced.
                self.frames.push_front(frame);
                break;
            } else {
                frame.outcome =
                    if self.segments.make(&frame, self.accepted) { Outcome::Taken } else { Outcome::Invalid };
                self.done.push(frame);
            }
        }
        let taken = self.outstanding + u32::from(number(self.done.len()));
        if !self.frames.is_empty() {
            queue.put_back(&mut self.frames);
        }
        PortQueue::return_all(&mut self.done);
        taken
    }

    fn write(
        &mut self,
        uring: &mut Uring,
        file: TapFile,
        token: Token,
        header: Header,
        put: impl FnOnce(&mut Vec<libc::iovec>),
    ) {
        let slot = number(self.writes.len());
        self.outstanding += 1;
        self.headers.push(header.to_bytes());
        let header = slot_mut(&mut self.headers, slot).as_mut_ptr();
        let at = self.iovecs.len();
        self.iovecs.push(libc::iovec { iov_base: header.cast(), iov_len: HEADER });
        put(&mut self.iovecs);
        let iovecs = self.iovecs.get(at..).unwrap_or_default();
        // SAFETY: `new` reserved headers and iovecs for a whole batch, and a sender gives a frame
        // PIECES_MAX pieces at most. So both vectors do not move, and `take` clears them only when
        // no operation is in flight. The sender keeps a frame's memory mapped until its description
        // was returned; `writes` holds the description until the write completed. A segment is in
        // `self.segments`, which does not change before the batch has ended.
        unsafe { file.start(uring, Op::Writev(iovecs), Token { slot, ..token }) }
    }

    /// Handles the completion of a write. Returns whether it was the last one of a batch.
    pub(super) fn complete(&mut self, slot: u16, result: i32) -> bool {
        self.outstanding -= 1;
        let fault = (result < 0).then(|| drop_reason(-result));
        let bytes = match slot_mut(&mut self.writes, slot).take() {
            Some(Write::Frame(mut frame)) => {
                let len = frame.len;
                // The sender counts faults of its frame. This side counts faults of the tap.
                frame.outcome = match fault {
                    Some(DropReason::BadHeader) => Outcome::Invalid,
                    Some(DropReason::NoRoom) => Outcome::NoRoom,
                    _ => Outcome::Taken,
                };
                let taken = frame.outcome == Outcome::Taken;
                self.done.push(frame);
                if taken { len } else { 0 }
            }
            Some(Write::Segment(len)) => len,
            None => 0,
        };
        match fault {
            None => self.wrote = (self.wrote.0 + 1, self.wrote.1 + bytes as u64),
            Some(why) if bytes > 0 => self.lost.push(why),
            Some(_) => {}
        }
        self.outstanding == 0
    }

    /// Ends the batch and returns its descriptions. Returns the number of frames that the tap took,
    /// and their bytes.
    pub(super) fn finish_batch(&mut self) -> (u64, u64) {
        PortQueue::return_all(&mut self.done);
        std::mem::take(&mut self.wrote)
    }
}
