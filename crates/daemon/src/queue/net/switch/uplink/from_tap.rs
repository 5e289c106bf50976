//! Frames of the host: read from a tap's queue into slots of ours, in batches that never wait, and described to the ports.
//!
//! A slot is free again once all descriptions of its frame are home. While none is free nothing is read, and frames wait in
//! the tap. Many flows come by here, and none is to wait for a guest that another one is for: an end has no more slots than are
//! free, so that the slow ones together leave some.

use std::io;
use std::os::fd::RawFd;

use vshunt_engine::{Token, Uring};
use vshunt_net::switch::{Header, LOOK_BYTES, Packet, Piece};
use vshunt_types::spec::DropReason;

use super::super::super::looks::Looks;
use super::super::super::tap_file::{Op, TapFile};
use super::super::super::{BATCH, ETH_HEADER_BYTES, FRAME_MAX};
use super::super::sender::{Sender, Told};

/// Frames on their way at most.
pub(super) const SLOTS: u16 = 512;
/// Bytes of the header before each frame.
pub(super) const HEADER: usize = 12;
/// Bytes of a slot: the longest frame, and one more, by which one that is too long shows; whole cache lines.
const SLOT_BYTES: usize = (HEADER + FRAME_MAX + 1).next_multiple_of(64);

/// A read on the ring.
#[derive(Clone, Copy)]
struct Read {
    slot: u16,
    result: i32,
}

/// See the module.
pub(super) struct FromTap {
    /// [`SLOT_BYTES`] for each slot. Reserved, and touched as far as it is used.
    memory: Vec<u8>,
    /// Bytes of the frame in each slot.
    lens: Box<[usize]>,
    /// The one used last is taken first, for what the caches still have.
    free: Vec<u16>,
    /// The batch on the ring.
    reads: Vec<Read>,
    outstanding: u32,
    /// When to read.
    pub(super) looks: Looks,
    /// Frames that went nowhere; for the pair to count.
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
            looks: Looks::new(),
            lost: Vec::with_capacity(BATCH as usize),
        }
    }

    fn at(&mut self, slot: u16) -> *mut u8 {
        debug_assert!(slot < SLOTS);
        // SAFETY: `new` reserved that for each slot.
        unsafe { self.memory.as_mut_ptr().add(usize::from(slot) * SLOT_BYTES) }
    }

    /// A frame is over: its slot is free. Returns its bytes.
    pub(super) fn free(&mut self, slot: u16) -> usize {
        self.free.push(slot);
        self.lens[usize::from(slot)]
    }

    pub(super) fn in_flight(&self) -> u32 {
        u32::from(SLOTS) - self.free.len() as u32
    }

    pub(super) fn at_rest(&self) -> bool {
        self.outstanding == 0 && self.looks.at_rest()
    }

    pub(super) fn has_work(&self) -> bool {
        self.outstanding == 0 && self.looks.ready && !self.free.is_empty()
    }

    /// Begins to read frames, as many as there are slots for.
    pub(super) fn take(&mut self, uring: &mut Uring, file: TapFile, token: Token, budget: u32) {
        if !self.has_work() {
            return;
        }
        self.reads.clear();
        for i in 0..self.looks.batch.min(budget) {
            let Some(slot) = self.free.pop() else { break };
            self.reads.push(Read { slot, result: 0 });
            self.outstanding += 1;
            let to = self.at(slot);
            let op = Op::Read(to, SLOT_BYTES as u32);
            // SAFETY: the slot's memory is ours, does not move (the vector never grows), and is this read's alone until it is
            // over: the slot is not free, and the queue is not at rest before.
            unsafe { file.begin(uring, op, Token { slot: i as u16, ..token }) }
        }
    }

    /// A read is over. With the last of a batch its frames are sent on their ways.
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
        self.reads[usize::from(read)].result = result;
        self.outstanding -= 1;
        if self.outstanding > 0 {
            return Ok(());
        }
        let (asked, mut found, mut bad) = (self.reads.len() as u32, 0, None);
        sender.look_around();
        for i in 0..self.reads.len() {
            let Read { slot, result } = self.reads[i];
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
        self.looks.found(uring, poll, asked, found);
        Ok(())
    }

    /// Sends the frame in a slot on its way; `len` bytes with its header.
    fn send(&mut self, slot: u16, len: usize, sender: &mut Sender) -> Result<(), DropReason> {
        let at = self.at(slot);
        // SAFETY: the read wrote so many bytes there, at most as many as a slot has; nobody else does before it is free.
        let bytes = unsafe { std::slice::from_raw_parts(at, len) };
        let frame = match bytes.get(HEADER..) {
            Some(frame) if frame.len() >= ETH_HEADER_BYTES => frame,
            _ => return Err(DropReason::TooShort),
        };
        if frame.len() > FRAME_MAX {
            return Err(DropReason::TooLong);
        }
        // Of the kernel, which is believed in what it found right, too.
        let header = Header::parse(bytes[..10].try_into().expect("ten bytes"));
        let (first, len) = (&frame[..frame.len().min(LOOK_BYTES)], frame.len());
        if sender.is_probe(first) {
            self.free.push(slot);
            return Ok(());
        }
        let packet = Packet::new(first, &header, len).ok_or(DropReason::BadHeader)?;
        self.lens[usize::from(slot)] = len;
        let frame = at.wrapping_add(HEADER);
        let pieces = |taken: usize, to: &mut Vec<Piece>| {
            if taken < len {
                to.push(Piece { ptr: frame.wrapping_add(taken), len: len - taken });
            }
        };
        let most = self.free.len() as u32;
        sender.send(slot, &packet, Told { header, len, stable: true }, most, pieces)
    }
}
