//! Frames to the guest: copied out of their senders' memory into the receive buffers that the guest offers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_net::switch::{End, Fate, Frame, Header};
use vshunt_types::spec::DropReason;

use super::super::buffers::{Buffers, Cursor, NoRoom};
use super::super::line::Line;
use super::super::rings::Side;
use super::offload::{Pieces, Takes};

/// See the module.
pub(super) struct Rx {
    pub(super) to: Buffers,
    takes: Arc<AtomicU64>,
    /// Descriptions taken from the inbox; within one turn.
    frames: VecDeque<Frame>,
    done: Vec<Frame>,
    /// What a frame was made into that this guest does not take as it was sent.
    pieces: Pieces,
    /// Frames wait for buffers.
    waiting: bool,
}

impl Rx {
    pub(super) fn new(to: Buffers, takes: Arc<AtomicU64>) -> Self {
        Self {
            to,
            takes,
            frames: VecDeque::new(),
            done: Vec::new(),
            pieces: Pieces::default(),
            waiting: false,
        }
    }

    pub(super) fn has_work(&self, end: &End) -> bool {
        if self.to.line.broken {
            return false;
        }
        match self.waiting {
            true => self.to.line.has_avail() || end.has_changed(),
            false => end.has_frames(),
        }
    }

    /// Asks for a kick where only more buffers would help. Whether there is work already.
    pub(super) fn sleep(&mut self, end: &End) -> bool {
        let more = self.waiting && !self.to.line.broken && self.to.line.vring.enable_kick();
        more || self.has_work(end)
    }

    /// Gives frames to the guest; returns how many.
    pub(super) fn take(&mut self, end: &End, budget: u32) -> u32 {
        if self.to.line.broken || !(end.has_frames() || self.waiting) {
            return 0;
        }
        self.waiting = false;
        end.take_changed();
        if !end.is_open() {
            // The guest uses this pair no more: what is left of a frame is for nobody.
            self.drop_pieces();
        }
        let takes = Takes::new(self.takes.load(Relaxed));
        let (mut used, mut count, mut bytes, mut lost) = (0, 0, 0, 0);
        end.take(budget as usize, &mut self.frames);
        loop {
            // What is left of the frame before goes first.
            while let Some(piece) = self.pieces.next() {
                let (from, len) = (piece.as_ptr(), piece.len());
                match self.to.room(used, self.to.format.header + len) {
                    Ok(bufs) => {
                        let mut to = self.begin(used, Header::default());
                        // SAFETY: the piece is ours.
                        unsafe { self.to.copy(&mut to, from, len) };
                        self.to.show(used, bufs, self.to.format.header + len);
                        (used, count, bytes) = (used + bufs, count + 1, bytes + len as u64);
                        self.pieces.pop();
                    }
                    Err(NoRoom::Ever) => {
                        lost += 1;
                        self.pieces.pop();
                    }
                    Err(NoRoom::Now) => {
                        self.waiting = true;
                        break;
                    }
                }
            }
            if self.waiting {
                break;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            if !takes.all_of(&frame.header) {
                frame.fate = if self.pieces.make(&frame, takes) { Fate::Taken } else { Fate::Lie };
                self.done.push(frame);
                continue;
            }
            match self.to.room(used, self.to.format.header + frame.len) {
                Ok(bufs) => {
                    let mut to = self.begin(used, takes.shown(frame.header));
                    for piece in &frame.pieces {
                        // SAFETY: the sender's memory is mapped until the description is home. Whose buffers overlap with it
                        // shares memory with another guest, and gets what it asked for: bytes of one of the two.
                        unsafe { self.to.copy(&mut to, piece.ptr, piece.len) };
                    }
                    self.to.show(used, bufs, self.to.format.header + frame.len);
                    (used, count, bytes) = (used + bufs, count + 1, bytes + frame.len as u64);
                    frame.fate = Fate::Taken;
                    self.done.push(frame);
                }
                Err(NoRoom::Ever) => {
                    // It is lost here, whatever its sender could do.
                    frame.fate = Fate::Taken;
                    lost += 1;
                    self.done.push(frame);
                }
                Err(NoRoom::Now) => {
                    self.waiting = true;
                    self.frames.push_front(frame);
                    break;
                }
            }
        }
        self.to.shown(used);
        if !self.frames.is_empty() {
            end.put_back(&mut self.frames);
        }
        End::send_home(&mut self.done);
        if count > 0 {
            self.to.line.received(count, bytes);
        }
        if lost > 0 {
            self.to.line.dropped(DropReason::TooLong, lost);
        }
        (count + lost) as u32
    }

    /// What is left of a frame that was cut is not given to the guest.
    pub(super) fn drop_pieces(&mut self) {
        let lost = self.pieces.len() as u64;
        if lost > 0 {
            self.to.line.dropped(DropReason::NoBuffers, lost);
            self.pieces = Pieces::default();
        }
    }

    /// Writes a frame's header into the buffers from place `first` on; the frame goes behind it.
    fn begin(&self, first: usize, header: Header) -> Cursor {
        let bytes = header.to_bytes();
        let mut to = self.to.start(first);
        // SAFETY: bytes of ours, as many as a header has at most.
        unsafe { self.to.copy(&mut to, bytes.as_ptr(), self.to.format.header) };
        to
    }
}

impl Side for Rx {
    fn line(&self) -> &Line {
        &self.to.line
    }

    fn line_mut(&mut self) -> &mut Line {
        &mut self.to.line
    }

    /// What was not used goes back to the ring.
    fn stop(mut self, _discard: bool) -> u32 {
        self.drop_pieces();
        self.to.stop()
    }
}
