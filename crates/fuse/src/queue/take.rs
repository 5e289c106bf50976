//! How requests are taken: by reading a channel, or as entries of a ring that came back.

use std::time::Instant;

use vshunt_engine::{Token, Uring};

use super::abi::{self, ARGS_MAX, InHeader, Plain};
use super::clerk::News;
use super::dev::{FRONT_ARGS, Taken};
use super::{FuseQueue, Listen, OP_READABLE, TURN_BYTES, Transport};

/// Bursts of one request after which the next is taken for one, too, without a look.
const ALONE: u8 = 16;

impl FuseQueue {
    /// Takes what is there from a channel.
    pub(super) fn take_channel(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        self.seen.set(false);
        loop {
            if taken >= budget || self.turn_bytes >= TURN_BYTES || self.gone {
                return taken;
            }
            let Some(&index) = self.free.last() else {
                self.pass();
                return taken;
            };
            let Transport::Channel { channel, .. } = &self.transport else { return taken };
            // SAFETY: the slot is free, so its buffer is nobody's.
            match unsafe { channel.read(self.buffers.at(index), self.buffers.piece()) } {
                Taken::Request { front, in_buffer } => {
                    self.free.pop();
                    taken += 1;
                    self.burst();
                    self.begin_front(uring, place, index, &front, in_buffer);
                    if self.was_alone() {
                        return taken;
                    }
                }
                // What was handed over so far may lie in the buffer.
                Taken::Again => self.slots[usize::from(index)].zeroed = 0,
                Taken::Nothing => {
                    self.reserve();
                    return taken;
                }
                Taken::Gone => self.gone(),
            }
        }
    }

    /// A request was taken from the channel. Where it has been so for long another channel is called, if there is work for
    /// it: something waits while the request just taken is not answered. A single task that waits for each reply, however
    /// quickly it comes back, never makes that so.
    #[inline]
    fn burst(&mut self) {
        let Transport::Channel { herd, burst, channel, .. } = &mut self.transport else { return };
        match burst {
            None => *burst = Some((Instant::now(), 1)),
            Some((since, n)) => {
                *n += 1;
                if since.elapsed().as_micros() >= u128::from(herd.call_after_us()) {
                    if channel.is_readable() {
                        herd.call();
                    }
                    *since = Instant::now();
                }
            }
        }
    }

    /// Whether the request just taken is likely to be the only one there: bursts have been of one lately, as those of a
    /// task are that waits for each reply. Then the kernel is not asked for more; it is when the worker rests.
    fn was_alone(&mut self) -> bool {
        let Transport::Channel { ready, leads: true, burst, alone, .. } = &mut self.transport else {
            return false;
        };
        if *alone == 0 || !burst.is_some_and(|(_, n)| n == 1) {
            return false;
        }
        *alone -= 1;
        *ready = false;
        *burst = None;
        true
    }

    /// Nothing more is there.
    fn reserve(&mut self) {
        let Transport::Channel { herd, ready, leads, burst, alone, called, .. } = &mut self.transport else {
            return;
        };
        *ready = false;
        let found = burst.take().map_or(0, |(_, n)| n);
        match found {
            0 => {}
            1 => *alone = ALONE,
            _ => *alone = 0,
        }
        if std::mem::take(called) {
            herd.called(found);
        }
        if !*leads {
            *leads = herd.reserve(self.index);
        }
    }

    /// Asks to be told when something is there, if that is this channel's part.
    pub(super) fn listen(&mut self, uring: &mut Uring, place: Token) {
        if let Transport::Channel { channel, leads: true, listen, ready: false, .. } = &mut self.transport
            && *listen == Listen::Off
            && !self.gone
            && !self.free.is_empty()
        {
            uring.poll_once(channel.fd(), place.with(0, OP_READABLE));
            *listen = Listen::On;
        }
    }

    /// Another channel is to lead.
    fn pass(&mut self) {
        if let Transport::Channel { herd, leads, ready, burst, .. } = &mut self.transport {
            *leads = false;
            *burst = None;
            // Looked at again when a slot is free.
            *ready = false;
            herd.pass(self.index);
        }
    }

    pub(super) fn take_ring(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        while taken < budget && self.turn_bytes < TURN_BYTES {
            let Transport::Ring { entries, ready, serving } = &mut self.transport else { break };
            let Some(index) = ready.pop() else { break };
            *serving += 1;
            taken += 1;
            let header = entries.header(index);
            let Some(request) = InHeader::read(&header.in_out) else { continue };
            self.begin(uring, place, index, &request, &header.op_in, header.ent.payload_sz as usize);
        }
        taken
    }

    /// Begins what a channel gave: what of the arguments is in the buffer is put behind those in front.
    #[inline]
    fn begin_front(&mut self, uring: &mut Uring, place: Token, index: u16, front: &[u8], in_buffer: usize) {
        let (header, first) = front.split_at(size_of::<InHeader>());
        let Some(header) = InHeader::read(header) else { return };
        let mut args = [0; ARGS_MAX];
        args[..FRONT_ARGS].copy_from_slice(first);
        if header.opcode == abi::op::SETATTR {
            let more = in_buffer.min(ARGS_MAX - FRONT_ARGS);
            // SAFETY: the kernel wrote that many bytes to the slot's buffer, which is ours.
            unsafe {
                std::ptr::copy_nonoverlapping(self.buffers.at(index), args[FRONT_ARGS..].as_mut_ptr(), more);
            }
        }
        self.begin(uring, place, index, &header, &args, in_buffer);
    }

    /// Entries that came back on former workers of this queue.
    pub(super) fn take_returned(&mut self) {
        if let Transport::Ring { entries, .. } = &mut self.transport {
            for (index, result) in entries.take_returned() {
                self.entry_back(index, result);
            }
        }
    }

    /// An entry of the ring came back.
    pub(super) fn entry_back(&mut self, index: u16, result: i32) {
        let Transport::Ring { entries, ready, .. } = &mut self.transport else { return };
        if entries.back(index, result) {
            ready.push(index);
            return;
        }
        if matches!(-result, libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV) {
            return self.gone();
        }
        let why = format!("the kernel gave entry {index} back for good: errno {}", -result);
        self.shared.tell(News::Broken { queue: self.index, why });
    }
}
