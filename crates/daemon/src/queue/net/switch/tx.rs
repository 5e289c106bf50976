//! Frames from the guest: each is described, and its description put before the ends that it goes to.
//!
//! The first bytes of a frame are read once, into the sender's own memory. The checks read that copy, and that copy is sent: the
//! guest may change its memory while the frame waits.

use std::collections::VecDeque;

use virtio::ring::{Head, Seg, gather};
use vshunt_net::switch::{Header, LOOK_BYTES, Packet, Piece};
use vshunt_types::spec::DropReason;

use super::super::line::Line;
use super::super::rings::Side;
use super::super::{ETH_HEADER_BYTES, FRAME_MAX};
use super::sender::{BUFFERS_MAX, Over, Sender, Told, told};

/// Bytes of the header that say something.
const HEADER_BYTES: usize = 10;

/// A request whose frame is on its way, or which waits for those taken before it.
#[derive(Clone, Copy, Default)]
struct Slot {
    head: Head,
    bytes: usize,
    over: bool,
    taken: bool,
}

/// See the module.
pub(super) struct Tx {
    pub(super) line: Line,
    header: usize,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Requests that did not end, the oldest first: they end in the ring's order. So where the ring stands follows from what
    /// is used, for front-ends that know no more when we are gone.
    order: VecDeque<u16>,
}

// SAFETY: segments lead into the guest's memory, which the line's table keeps mapped for as long as the ring is here; it is
// not at rest before all descriptions are home.
unsafe impl Send for Tx {}

impl Tx {
    pub(super) fn new(mut line: Line, header: usize) -> Self {
        // The device writes nothing here: a guest that says so of a buffer (DPDK's virtio-user does) means nothing by it.
        line.vring.set_all_readable();
        // They may have been sent.
        line.discard(DropReason::Unknown, true);
        let size = line.vring.size();
        Self {
            line,
            header,
            slots: (0..size).map(|_| Slot::default()).collect(),
            free: (0..size).rev().collect(),
            order: VecDeque::with_capacity(size.into()),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.order.len() as u32
    }

    pub(super) fn has_work(&self) -> bool {
        !self.free.is_empty() && self.line.has_avail()
    }

    /// Takes frames and sends them on their ways. Returns how many requests were taken.
    pub(super) fn take(&mut self, sender: &mut Sender, budget: u32) -> u32 {
        if self.line.broken || !self.line.has_avail() {
            return 0;
        }
        sender.look_around();
        let mut taken = 0;
        while taken < budget && !self.free.is_empty() {
            if !self.line.pop() {
                break;
            }
            taken += 1;
            let Some(slot) = self.free.pop() else { unreachable!("looked at above") };
            self.order.push_back(slot);
            self.slots[usize::from(slot)] = Slot { head: self.line.chain.head, ..Slot::default() };
            match self.send(slot, sender) {
                Ok(bytes) => self.slots[usize::from(slot)].bytes = bytes,
                Err(why) => {
                    self.slots[usize::from(slot)].over = true;
                    self.line.lost(why, 1);
                }
            }
        }
        sender.deliver();
        taken
    }

    /// Sends the frame in the scratch chain, the request of `slot`. Returns its bytes.
    fn send(&mut self, slot: u16, sender: &mut Sender) -> Result<usize, DropReason> {
        let chain = &self.line.chain;
        if chain.fault.is_some() || chain.readable != chain.segs.len() || chain.segs.len() > BUFFERS_MAX {
            return Err(DropReason::Malformed);
        }
        let bytes: usize = chain.segs.iter().map(|seg| seg.len as usize).sum();
        let len = match bytes.checked_sub(self.header) {
            Some(len @ ETH_HEADER_BYTES..) => len,
            _ => return Err(DropReason::TooShort),
        };
        if len > FRAME_MAX {
            return Err(DropReason::TooLong);
        }
        let mut first = [0; HEADER_BYTES + 2 + LOOK_BYTES];
        let first = &mut first[..(self.header + LOOK_BYTES).min(bytes)];
        // SAFETY: the segments were translated on taking the chain; the line's memory table is alive.
        unsafe { gather(&chain.segs, first) };
        let header = Header::parse(first[..HEADER_BYTES].try_into().expect("ten bytes"));
        let packet = Packet::new(&first[self.header..], &header, len).ok_or(DropReason::BadHeader)?;
        let pieces = |taken: usize, to: &mut Vec<Piece>| skip_into(&chain.segs, self.header + taken, to);
        // It waits for whomever it sends to.
        sender.send(slot, &packet, Told { header: told(header), len, stable: false }, u32::MAX, pieces)?;
        Ok(len)
    }

    /// Ends the requests that are over, in the ring's order. Returns how many.
    pub(super) fn reserve(&mut self, sender: &mut Sender) -> u32 {
        sender.count_lost(|why, frames| self.line.lost(why, frames));
        for Over { slot, taken } in sender.over.drain(..) {
            let slot = &mut self.slots[usize::from(slot)];
            (slot.over, slot.taken) = (true, taken);
        }
        let (mut done, mut sent, mut bytes) = (0, 0, 0);
        while let Some(&first) = self.order.front() {
            let slot = self.slots[usize::from(first)];
            if !slot.over {
                break;
            }
            match slot.taken {
                true => (sent, bytes) = (sent + 1, bytes + slot.bytes as u64),
                false => self.line.ended(1),
            }
            self.line.push(slot.head, 0);
            self.order.pop_front();
            self.free.push(first);
            done += 1;
        }
        if sent > 0 {
            self.line.sent(sent, bytes);
        }
        done
    }

    /// Asks for kicks. Whether there is work already.
    pub(super) fn sleep(&mut self, after: u32) -> bool {
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.line.broken && self.line.vring.enable_kick_after(after) && !self.free.is_empty()
    }
}

impl Side for Tx {
    fn line(&self) -> &Line {
        &self.line
    }

    fn line_mut(&mut self) -> &mut Line {
        &mut self.line
    }

    fn stop(mut self, discard: bool) -> u32 {
        debug_assert!(self.order.is_empty());
        if discard {
            self.line.discard(DropReason::Detached, false);
        }
        self.line.vring.base()
    }
}

/// All segments but the first `skip` bytes.
fn skip_into(from: &[Seg], mut skip: usize, to: &mut Vec<Piece>) {
    for seg in from {
        let n = skip.min(seg.len as usize);
        skip -= n;
        if n < seg.len as usize {
            to.push(Piece { ptr: seg.ptr.wrapping_add(n), len: seg.len as usize - n });
        }
    }
}
