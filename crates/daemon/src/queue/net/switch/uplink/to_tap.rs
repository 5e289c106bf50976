//! Frames for the host: written to a tap's queue out of their senders' memory, in batches that never wait.

use std::collections::VecDeque;

use vshunt_engine::{Token, Uring};
use vshunt_net::switch::{End, Fate, Frame, Header};
use vshunt_types::spec::DropReason;

use super::super::super::BATCH;
use super::super::super::tap::reason;
use super::super::super::tap_file::{Op, TapFile};
use super::super::offload::{Pieces, Takes};
use super::super::sender::PIECES_MAX;
use super::from_tap::HEADER;

/// What a batch's writes name at most: a header and the pieces of each.
const IOVECS: usize = BATCH as usize * (PIECES_MAX + 1);

/// A write on the ring.
enum Write {
    /// Of a frame as it is.
    Frame(Frame),
    /// Of a piece that was made of one; its bytes.
    Piece(usize),
}

/// See the module.
pub(super) struct ToTap {
    takes: Takes,
    /// Descriptions taken from the inbox; within one turn.
    frames: VecDeque<Frame>,
    /// The batch on the ring; its headers, and what its operations name: neither grows, they were told where they lie.
    writes: Vec<Option<Write>>,
    headers: Vec<[u8; HEADER]>,
    iovecs: Vec<libc::iovec>,
    outstanding: u32,
    /// What a frame was made into that this tap does not take as it was sent. Not made anew while a write names it.
    pieces: Pieces,
    done: Vec<Frame>,
    /// Of this batch: frames that the tap took, and their bytes.
    wrote: (u64, u64),
    /// Frames that it did not take and that are no fault of their senders; for the pair to count.
    pub(super) lost: Vec<DropReason>,
}

// SAFETY: the raw pointers (iovecs) are used by operations alone, of which there are none while the queue moves.
unsafe impl Send for ToTap {}

impl ToTap {
    pub(super) fn new(takes: Takes) -> Self {
        Self {
            takes,
            frames: VecDeque::new(),
            writes: Vec::with_capacity(BATCH as usize),
            headers: Vec::with_capacity(BATCH as usize),
            iovecs: Vec::with_capacity(IOVECS),
            outstanding: 0,
            pieces: Pieces::default(),
            done: Vec::new(),
            wrote: (0, 0),
            lost: Vec::with_capacity(BATCH as usize),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.outstanding
    }

    /// Pieces that wait for the next batch.
    pub(super) fn held(&self) -> u64 {
        self.pieces.len() as u64
    }

    pub(super) fn has_work(&self, end: &End) -> bool {
        self.outstanding == 0 && (end.has_frames() || self.pieces.len() > 0)
    }

    /// Begins to write what waits. Returns how many frames that are.
    pub(super) fn take(
        &mut self,
        uring: &mut Uring,
        file: TapFile,
        token: Token,
        end: &End,
        budget: u32,
    ) -> u32 {
        if !self.has_work(end) {
            return 0;
        }
        self.writes.clear();
        self.headers.clear();
        self.iovecs.clear();
        let most = budget.min(BATCH);
        end.take(most as usize, &mut self.frames);
        while self.outstanding < most {
            // What is left of the frame before goes first.
            if let Some(piece) = self.pieces.next() {
                let len = piece.len();
                let iovec = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: len };
                self.pieces.pop();
                self.write(uring, file, token, Header::default(), |to| to.push(iovec));
                self.writes.push(Some(Write::Piece(len)));
                continue;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            if self.takes.all_of(&frame.header) {
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
            } else if self.writes.iter().any(|write| matches!(write, Some(Write::Piece(_)))) {
                // Those are written first.
                self.frames.push_front(frame);
                break;
            } else {
                frame.fate = if self.pieces.make(&frame, self.takes) { Fate::Taken } else { Fate::Lie };
                self.done.push(frame);
            }
        }
        let taken = self.outstanding + self.done.len() as u32;
        if !self.frames.is_empty() {
            end.put_back(&mut self.frames);
        }
        End::send_home(&mut self.done);
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
        let slot = self.outstanding as u16;
        self.outstanding += 1;
        self.headers.push(header.to_bytes());
        let header = self.headers[usize::from(slot)].as_mut_ptr();
        let at = self.iovecs.len();
        self.iovecs.push(libc::iovec { iov_base: header.cast(), iov_len: HEADER });
        put(&mut self.iovecs);
        let iovecs = &self.iovecs[at..];
        // SAFETY: headers and iovecs have room for all of a batch (a frame has PIECES_MAX pieces at most, which its sender saw
        // to), so they do not move, and are cleared when no operation is left. A frame's memory is its sender's, mapped until
        // the description is home, which we keep until the write is over; a piece's is ours, and as long.
        unsafe { file.begin(uring, Op::Writev(iovecs), Token { slot, ..token }) }
    }

    /// A frame was written, or not. Whether it was the last one of a batch.
    pub(super) fn complete(&mut self, slot: u16, result: i32) -> bool {
        self.outstanding -= 1;
        let fault = (result < 0).then(|| reason(-result));
        let bytes = match self.writes[usize::from(slot)].take() {
            Some(Write::Frame(mut frame)) => {
                let len = frame.len;
                // The sender counts what is about its frame, and we what is about the tap.
                frame.fate = match fault {
                    Some(DropReason::BadHeader) => Fate::Lie,
                    Some(DropReason::NoRoom) => Fate::NoRoom,
                    _ => Fate::Taken,
                };
                let ours = frame.fate == Fate::Taken;
                self.done.push(frame);
                if ours { len } else { 0 }
            }
            Some(Write::Piece(len)) => len,
            None => 0,
        };
        match fault {
            None => self.wrote = (self.wrote.0 + 1, self.wrote.1 + bytes as u64),
            Some(why) if bytes > 0 => self.lost.push(why),
            Some(_) => {}
        }
        self.outstanding == 0
    }

    /// The batch is over: descriptions go home. Returns how many frames the tap took, and their bytes.
    pub(super) fn reserve(&mut self) -> (u64, u64) {
        End::send_home(&mut self.done);
        std::mem::take(&mut self.wrote)
    }
}
