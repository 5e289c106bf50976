//! Frames from the guest. Each is described, and its description goes to the queues of its
//! receivers.
//!
//! The first bytes of a frame are read once, into the sender's own memory. The checks read that
//! copy, and that copy is sent, because the guest may change its memory while the frame waits.

use std::collections::VecDeque;

use virtio::ring::{Head, Seg, gather};
use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use crate::frames::{ETH_HEADER_BYTES, FRAME_MAX};
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::Allowance;
use crate::pair_rings::PairSide;
use crate::slots::{slot, slot_mut};
use crate::switch::frame::{HEADER_BYTES, Header, INSPECTED_BYTES, Packet};
use crate::switch::port_queue::Piece;
use crate::switch::sender::{BUFFERS_MAX, Finished, FrameContent, Sender, relayed_header};

/// A request whose frame is in flight, or that waits for requests before it.
#[derive(Clone, Copy, Default)]
struct TxSlot {
    head: Head,
    bytes: usize,
    finished: bool,
    taken: bool,
}

/// See the module.
pub(super) struct Tx {
    pub(super) virtqueue: NetVirtqueue,
    /// Bytes of the header before each frame.
    header: usize,
    slots: Box<[TxSlot]>,
    free: Vec<u16>,
    /// Requests that were not completed, the oldest first. They complete in the ring's order, so
    /// that a front end without an in-flight region knows from the used index where the ring stands
    /// after this process is gone.
    order: VecDeque<u16>,
}

// SAFETY: the segments point into the guest's memory. The virtqueue keeps the memory table, and
// with it the mapping, wherever the queue goes. The queue is not at rest before all descriptions
// were returned, so it is not dropped before that.
unsafe impl Send for Tx {}

impl Tx {
    pub(super) fn new(mut virtqueue: NetVirtqueue, header: usize) -> Self {
        // The device writes nothing here. Some guests (DPDK's virtio-user) mark buffers as writable
        // by mistake.
        virtqueue.vring.set_all_readable();
        // A former daemon may have sent them.
        virtqueue.discard(DropReason::Unknown, true);
        let size = virtqueue.vring.size();
        Self {
            virtqueue,
            header,
            slots: (0..size).map(|_| TxSlot::default()).collect(),
            free: (0..size).rev().collect(),
            order: VecDeque::with_capacity(size.into()),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        crate::slots::number(self.order.len()).into()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.free.is_empty() && self.virtqueue.has_avail()
    }

    /// Takes frames and sends them, as far as `limit` allows. Returns how many requests were taken.
    pub(super) fn take(
        &mut self,
        uring: &mut Uring,
        place: Token,
        sender: &mut Sender,
        budget: u32,
        mut limit: Allowance<'_>,
    ) -> u32 {
        let held = matches!(limit, Allowance::Nothing);
        if held || self.virtqueue.broken || !self.virtqueue.has_avail() {
            return 0;
        }
        sender.start_iteration();
        let mut taken = 0;
        while taken < budget && !self.free.is_empty() {
            if !self.virtqueue.pop() {
                break;
            }
            let len = self.frame_len();
            if let Allowance::Ask(gate) = &mut limit
                && !self.virtqueue.discards
                && !gate.ask(len.map_or(0, |len| len as u64))
            {
                self.virtqueue.vring.unpop(self.virtqueue.chain.head);
                gate.hold(uring, place, self.virtqueue.stats());
                break;
            }
            taken += 1;
            let Some(slot) = self.free.pop() else { unreachable!("checked by the loop's condition") };
            self.order.push_back(slot);
            *slot_mut(&mut self.slots, slot) =
                TxSlot { head: self.virtqueue.chain.head, ..TxSlot::default() };
            match len.and_then(|len| self.send(slot, len, sender)) {
                Ok(bytes) => slot_mut(&mut self.slots, slot).bytes = bytes,
                Err(why) => {
                    slot_mut(&mut self.slots, slot).finished = true;
                    self.virtqueue.lost(why, 1);
                }
            }
        }
        sender.deliver();
        taken
    }

    /// Returns the bytes of the frame in the scratch chain, without its header.
    fn frame_len(&self) -> Result<usize, DropReason> {
        let chain = &self.virtqueue.chain;
        if chain.fault.is_some() || chain.readable != chain.segs.len() || chain.segs.len() > BUFFERS_MAX {
            return Err(DropReason::Malformed);
        }
        if self.virtqueue.discards {
            return Err(DropReason::Detached);
        }
        let bytes: usize = chain.segs.iter().map(|seg| seg.len as usize).sum();
        let len = match bytes.checked_sub(self.header) {
            Some(len @ ETH_HEADER_BYTES..) => len,
            _ => return Err(DropReason::TooShort),
        };
        if len > FRAME_MAX { Err(DropReason::TooLong) } else { Ok(len) }
    }

    /// Sends the frame in the scratch chain, the request of `slot`, which has `len` bytes behind
    /// its header. Returns `len`.
    fn send(&mut self, slot: u16, len: usize, sender: &mut Sender) -> Result<usize, DropReason> {
        let chain = &self.virtqueue.chain;
        let mut first = [0; HEADER_BYTES + 2 + INSPECTED_BYTES];
        let wanted = self.header + INSPECTED_BYTES.min(len);
        let first = first.get_mut(..wanted).ok_or(DropReason::BadHeader)?;
        // SAFETY: the ring translated the segments when the chain was popped, and the virtqueue
        // keeps the memory table, and with it the mapping, until the queue is at rest.
        unsafe { gather(&chain.segs, first) };
        // The header has at least that many bytes.
        let header = Header::parse(*first.first_chunk().ok_or(DropReason::TooShort)?);
        let frame = first.get(self.header..).ok_or(DropReason::TooShort)?;
        let packet = Packet::new(frame, &header, len).ok_or(DropReason::BadHeader)?;
        let pieces =
            |replaced: usize, to: &mut Vec<Piece>| skip_into(&chain.segs, self.header + replaced, to);
        let content = FrameContent { header: relayed_header(header), len, stable: false };
        // No limit: a guest that sends to a slow guest waits for it.
        sender.send(slot, &packet, content, u32::MAX, pieces)?;
        Ok(len)
    }

    /// Completes the requests that are finished, in the ring's order. Returns their number.
    pub(super) fn reap(&mut self, sender: &mut Sender) -> u32 {
        sender.count_lost(|why, frames| self.virtqueue.lost(why, frames));
        for Finished { slot, taken } in sender.finished.drain(..) {
            let slot = slot_mut(&mut self.slots, slot);
            (slot.finished, slot.taken) = (true, taken);
        }
        let (mut done, mut sent, mut bytes) = (0, 0, 0);
        while let Some(&first) = self.order.front() {
            let slot = *slot(&self.slots, first);
            if !slot.finished {
                break;
            }
            match slot.taken {
                true => (sent, bytes) = (sent + 1, bytes + slot.bytes as u64),
                false => self.virtqueue.ended(1),
            }
            self.virtqueue.push(slot.head, 0);
            self.order.pop_front();
            self.free.push(first);
            done += 1;
        }
        if sent > 0 {
            self.virtqueue.sent(sent, bytes);
        }
        done
    }

    /// Asks for kicks. Returns whether there is work already.
    pub(super) fn sleep(&mut self, after: u32) -> bool {
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.virtqueue.broken && self.virtqueue.vring.enable_kick_after(after) && !self.free.is_empty()
    }
}

impl PairSide for Tx {
    fn virtqueue(&self) -> &NetVirtqueue {
        &self.virtqueue
    }

    fn virtqueue_mut(&mut self) -> &mut NetVirtqueue {
        &mut self.virtqueue
    }

    fn stop(mut self, discard: bool) -> u32 {
        debug_assert!(self.order.is_empty());
        if discard {
            self.virtqueue.discard(DropReason::Detached, false);
        }
        self.virtqueue.vring.base()
    }
}

/// Adds all segments except the first `skip` bytes.
fn skip_into(from: &[Seg], mut skip: usize, to: &mut Vec<Piece>) {
    for seg in from {
        let n = skip.min(seg.len as usize);
        skip -= n;
        if n < seg.len as usize {
            to.push(Piece { ptr: seg.ptr.wrapping_add(n), len: seg.len as usize - n });
        }
    }
}
