//! Frames from the host: read from a tap's queue into slots of the daemon, in batches that never
//! wait, and sent to the ports.
//!
//! A slot is free again once all descriptions of its frame were returned. While none is free
//! nothing is read, and frames wait in the tap. Many flows share these slots, and no flow may wait
//! for the guest of another flow. So a destination gets no more slots than are free, and slow
//! destinations together leave some.

use std::io;
use std::os::fd::RawFd;

use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use crate::frames::{BATCH, ETH_HEADER_BYTES, FRAME_MAX};
use crate::rx_poll::RxPoll;
use crate::slots::{self, number, slot_mut};
use crate::switch::frame::{Header, INSPECTED_BYTES, Packet};
use crate::switch::port_queue::Piece;
use crate::switch::sender::{FrameContent, Sender};
use crate::tap_file::{Op, TapFile};

/// Most frames in flight.
pub(super) const SLOTS: u16 = 512;
/// Bytes of the header before each frame.
pub(super) const HEADER: usize = 12;
/// Bytes of a slot: the longest frame, and one more byte to detect a frame that is too long, in
/// whole cache lines.
const SLOT_BYTES: usize = (HEADER + FRAME_MAX + 1).next_multiple_of(64);
#[expect(clippy::cast_possible_truncation, reason = "a constant below 2^17")]
const SLOT_BYTES_U32: u32 = SLOT_BYTES as u32;

/// A read in flight.
#[derive(Clone, Copy)]
struct Read {
    slot: u16,
    result: i32,
}

/// See the module.
pub(super) struct FromTap {
    /// [`SLOT_BYTES`] for each slot. It is reserved, and only what is used is touched.
    memory: Vec<u8>,
    /// Bytes of the frame in each slot.
    lens: Box<[usize]>,
    /// The slot used last is taken first, because it may still be in the caches.
    free: Vec<u16>,
    /// The batch in flight.
    reads: Vec<Read>,
    outstanding: u32,
    /// Decides when to read.
    pub(super) rx_poll: RxPoll,
    /// Frames that were dropped, for the owner to count.
    pub(super) lost: Vec<DropReason>,
}

impl FromTap {
    pub(super) fn new() -> Self {
        Self {
            memory: Vec::with_capacity(usize::from(SLOTS) * SLOT_BYTES),
            lens: vec![0; SLOTS.into()].into(),
            free: (0..SLOTS).rev().collect(),
            reads: Vec::with_capacity(BATCH as usize),
            outstanding: 0,
            rx_poll: RxPoll::new(),
            lost: Vec::with_capacity(BATCH as usize),
        }
    }

    fn at(&mut self, slot: u16) -> *mut u8 {
        debug_assert!(slot < SLOTS);
        // SAFETY: `new` reserved SLOTS times SLOT_BYTES, and numbers of slots are below SLOTS.
        unsafe { self.memory.as_mut_ptr().add(usize::from(slot) * SLOT_BYTES) }
    }

    /// Frees the slot of a frame. Returns the bytes of the frame.
    pub(super) fn free(&mut self, slot: u16) -> usize {
        self.free.push(slot);
        *crate::slots::slot(&self.lens, slot)
    }

    pub(super) fn in_flight(&self) -> u32 {
        u32::from(SLOTS - number(self.free.len()))
    }

    pub(super) fn at_rest(&self) -> bool {
        self.outstanding == 0 && self.rx_poll.at_rest()
    }

    pub(super) fn has_work(&self) -> bool {
        self.outstanding == 0 && self.rx_poll.ready && !self.free.is_empty()
    }

    /// Starts to read frames, as many as there are slots for.
    pub(super) fn take(&mut self, uring: &mut Uring, file: TapFile, token: Token, budget: u32) {
        if !self.has_work() {
            return;
        }
        self.reads.clear();
        for read in 0..number(self.rx_poll.batch.min(budget) as usize) {
            let Some(slot) = self.free.pop() else { break };
            self.reads.push(Read { slot, result: 0 });
            self.outstanding += 1;
            let to = self.at(slot);
            let op = Op::Read(to, SLOT_BYTES_U32);
            // SAFETY: the slot's memory belongs to `self.memory`, which never grows and so does not
            // move. The slot is not free until the read completed, and the queue is not at rest (so
            // not dropped) before that.
            unsafe { file.start(uring, op, Token { slot: read, ..token }) }
        }
    }

    /// Handles the completion of a read. The last one of a batch sends its frames.
    ///
    /// # Errors
    /// The tap can no longer be read.
    pub(super) fn complete(
        &mut self,
        uring: &mut Uring,
        read: u16,
        poll: (RawFd, Token),
        result: i32,
        sender: &mut Sender,
    ) -> io::Result<()> {
        slot_mut(&mut self.reads, read).result = result;
        self.outstanding -= 1;
        if self.outstanding > 0 {
            return Ok(());
        }
        let (active, mut found, mut bad) = (u32::from(number(self.reads.len())), 0, None);
        sender.start_iteration();
        for read in 0..number(self.reads.len()) {
            let Read { slot, result } = *slots::slot(&self.reads, read);
            match usize::try_from(result) {
                Ok(len @ 1..) => {
                    found += 1;
                    if let Err(why) = self.send(slot, len, sender) {
                        self.free.push(slot);
                        self.lost.push(why);
                    }
                }
                _ => {
                    self.free.push(slot);
                    bad = Some(-result).filter(|errno| *errno > 0 && *errno != libc::EAGAIN).or(bad);
                }
            }
        }
        sender.deliver();
        if let Some(errno) = bad {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.rx_poll.found(uring, poll, active, found);
        Ok(())
    }

    /// Sends the frame in a slot, of `len` bytes with its header.
    fn send(&mut self, slot: u16, len: usize, sender: &mut Sender) -> Result<(), DropReason> {
        let at = self.at(slot);
        // SAFETY: the completed read initialized `len` bytes, at most SLOT_BYTES. Nothing writes
        // there before the slot is free.
        let bytes = unsafe { std::slice::from_raw_parts(at, len) };
        let frame = match bytes.get(HEADER..) {
            Some(frame) if frame.len() >= ETH_HEADER_BYTES => frame,
            _ => return Err(DropReason::TooShort),
        };
        if frame.len() > FRAME_MAX {
            return Err(DropReason::TooLong);
        }
        // The kernel wrote the header. Its verified checksums can be relied on.
        let header = Header::parse(*bytes.first_chunk().ok_or(DropReason::TooShort)?);
        let (first, len) = (frame.get(..INSPECTED_BYTES).unwrap_or(frame), frame.len());
        if sender.is_probe(first) {
            self.free.push(slot);
            return Ok(());
        }
        let packet = Packet::new(first, &header, len).ok_or(DropReason::BadHeader)?;
        *slot_mut(&mut self.lens, slot) = len;
        let frame = at.wrapping_add(HEADER);
        let pieces = |replaced: usize, to: &mut Vec<Piece>| {
            if replaced < len {
                to.push(Piece { ptr: frame.wrapping_add(replaced), len: len - replaced });
            }
        };
        let most = number(self.free.len()).into();
        sender.send(slot, &packet, FrameContent { header, len, stable: true }, most, pieces)
    }
}
