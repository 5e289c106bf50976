//! The transport over /dev/fuse: a queue reads requests from a channel, and writes replies to it.
//!
//! All channels of a mount see the same requests; the [`ChannelGroup`] decides which of them waits.
//! A read takes one request into the buffer of a free slot.

pub(super) mod device;
pub(super) mod group;

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use vshunt_engine::{QueueStats, Token, Uring};

use self::device::{Device, PREFIX_ARGS, Prefix, ReadOutcome};
use self::group::ChannelGroup;
use super::buffers::Buffers;
use super::transport::{Failure, Next, OP_TRANSPORT, PollOp, QueueTransport, Request};
use crate::abi::{self, ARGS_MAX};

/// Requests of one channel in flight.
pub(crate) const CHANNEL_SLOTS: u16 = 128;
/// After a burst of one request, that many bursts are taken for bursts of one request without a
/// further read.
const SINGLES: u8 = 16;

/// The requests that a channel finds without a gap.
struct Burst {
    since: Instant,
    requests: u32,
}

/// See the module.
pub(crate) struct ChannelTransport {
    device: Device,
    group: Arc<ChannelGroup>,
    /// Index of the queue in its export, which is the channel's in the group.
    index: u16,
    stats: Arc<QueueStats>,
    /// Slots without a request.
    free: Vec<u16>,
    /// The channel may have a request.
    is_ready: bool,
    /// A look found the channel readable.
    seen_readable: Cell<bool>,
    /// The poll of the channel.
    poll: PollOp,
    /// The channel leads the group, as far as it knows.
    leads: bool,
    /// The burst at present.
    burst: Option<Burst>,
    /// For how many more bursts it is assumed that they consist of one request.
    singles: u8,
    /// The group woke the channel, which has not read since.
    was_woken: bool,
    /// The mount is gone.
    is_gone: bool,
}

impl ChannelTransport {
    /// A transport for the queue `index` of its export, over the descriptor `fd` of /dev/fuse.
    pub(crate) fn new(
        fd: Arc<OwnedFd>,
        group: Arc<ChannelGroup>,
        index: u16,
        stats: Arc<QueueStats>,
    ) -> Self {
        Self {
            device: Device::new(fd),
            group,
            index,
            stats,
            free: (0..CHANNEL_SLOTS).rev().collect(),
            is_ready: true,
            seen_readable: Cell::new(false),
            poll: PollOp::Off,
            leads: false,
            burst: None,
            singles: 0,
            was_woken: false,
            is_gone: false,
        }
    }

    fn can_take(&self) -> bool {
        !self.is_gone && !self.free.is_empty()
    }

    /// Counts a request that was read. If the channel has found requests without a gap for long,
    /// and another request waits, wakes another channel. A single task that waits for each reply
    /// does not cause that, however fast it is: no request waits while its last one is in flight.
    #[inline]
    fn note_request(&mut self) {
        let Some(burst) = &mut self.burst else {
            self.burst = Some(Burst { since: Instant::now(), requests: 1 });
            return;
        };
        burst.requests = burst.requests.saturating_add(1);
        if burst.since.elapsed().as_micros() >= u128::from(self.group.wake_after_us()) {
            if self.device.is_readable() {
                self.group.wake();
            }
            burst.since = Instant::now();
        }
    }

    /// Whether the request just read is likely to be the only one: bursts have been of one request
    /// lately, as those of a task are that waits for each reply. Then the kernel is not asked for
    /// more until the worker is about to sleep.
    fn is_single(&mut self) -> bool {
        if !self.leads || self.singles == 0 || self.burst.as_ref().is_none_or(|b| b.requests != 1) {
            return false;
        }
        self.singles -= 1;
        self.is_ready = false;
        self.burst = None;
        true
    }

    /// The channel has no more requests.
    fn note_empty(&mut self) {
        self.is_ready = false;
        let found = self.burst.take().map_or(0, |burst| burst.requests);
        match found {
            0 => {}
            1 => self.singles = SINGLES,
            _ => self.singles = 0,
        }
        if std::mem::take(&mut self.was_woken) {
            self.group.note_help(found);
        }
        if !self.leads {
            self.leads = self.group.lead_or_idle(self.index);
        }
    }

    /// All slots are in use: another channel leads.
    fn hand_off(&mut self) {
        self.leads = false;
        self.burst = None;
        // `recycle` sets it again.
        self.is_ready = false;
        self.group.hand_off(self.index);
    }

    /// Makes a request of what was read: arguments beyond the prefix are in the slot's buffer.
    #[inline]
    fn request(&mut self, buffers: &Buffers, slot: u16, prefix: &Prefix, in_buffer: usize) -> Request {
        let header = prefix.header();
        let mut args = [0; ARGS_MAX];
        if let Some((first, rest)) = args.split_first_chunk_mut::<PREFIX_ARGS>() {
            *first = *prefix.args();
            if header.opcode == abi::op::SETATTR {
                let len = in_buffer.min(rest.len());
                // SAFETY: the kernel has written `in_buffer` bytes to the slot's buffer, and the
                // slot is in use by this queue. `rest` has `len` bytes.
                unsafe { std::ptr::copy_nonoverlapping(buffers.at(slot), rest.as_mut_ptr(), len) };
            }
        }
        Request { slot, header, args, payload_bytes: in_buffer, is_last: self.is_single() }
    }
}

impl QueueTransport for ChannelTransport {
    const SLOTS: u16 = CHANNEL_SLOTS;
    const REPLIES_IN_BUFFER: bool = false;
    const CALL_FOR_EACH: bool = true;

    fn arm(&mut self, _: &mut Uring, _: Token) -> Vec<Failure> {
        self.is_ready = true;
        Vec::new()
    }

    #[inline]
    fn next(&mut self, buffers: &Buffers) -> Next {
        self.seen_readable.set(false);
        if self.is_gone {
            return Next::Nothing;
        }
        let Some(&slot) = self.free.last() else {
            self.hand_off();
            return Next::Nothing;
        };
        // SAFETY: a piece of the buffers has that many bytes. The slot is free, so nothing uses its
        // piece.
        match unsafe { self.device.read(buffers.at(slot), buffers.piece_bytes()) } {
            ReadOutcome::Request { prefix, in_buffer } => {
                self.free.pop();
                self.note_request();
                Next::Request(self.request(buffers, slot, &prefix, in_buffer))
            }
            ReadOutcome::Again => Next::Retry { slot },
            ReadOutcome::Nothing => {
                self.note_empty();
                Next::Nothing
            }
            ReadOutcome::Gone => {
                self.is_gone = true;
                Next::Gone
            }
        }
    }

    #[inline]
    fn reply(&mut self, _: &Buffers, _: u16, unique: u64, error: i32, body: &[u8]) {
        // SAFETY: there is no data.
        unsafe { self.device.reply(unique, error, body, (std::ptr::null(), 0)) };
    }

    #[inline]
    fn reply_data(&mut self, buffers: &Buffers, slot: u16, unique: u64, skip: usize, len: usize) {
        let data = buffers.at(slot).wrapping_add(skip);
        debug_assert!(skip.saturating_add(len) <= buffers.piece_bytes());
        // SAFETY: `serve` rounds a read of at most the longest transfer to blocks, so that `skip`
        // and `len` are within the slot's piece. No operation is in flight for the slot.
        unsafe { self.device.reply(unique, 0, &[], (data, len)) };
    }

    #[inline]
    fn recycle(&mut self, slot: u16, _: &mut Uring, _: Token) {
        self.free.push(slot);
        self.is_ready |= self.free.len() == 1;
    }

    #[inline]
    fn has_work(&self) -> bool {
        (self.is_ready || self.seen_readable.get()) && self.can_take()
    }

    fn look(&self) -> bool {
        if self.leads && self.poll == PollOp::Off && !self.has_work() && self.can_take() {
            self.seen_readable.set(self.device.is_readable());
        }
        self.has_work()
    }

    fn sleep(&mut self, uring: &mut Uring, place: Token) {
        if self.leads && !self.is_ready && self.poll == PollOp::Off && self.can_take() {
            uring.poll_once(self.device.fd(), place.with(0, OP_TRANSPORT));
            self.poll = PollOp::On;
        }
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.is_ready = false;
        self.leads = false;
        if self.poll == PollOp::On {
            uring.cancel(place.with(0, OP_TRANSPORT));
            self.poll = PollOp::Cancelled;
        }
        self.group.hand_off(self.index);
    }

    fn complete(&mut self, _: u16, _: i32, is_leaving: bool) -> Option<Failure> {
        QueueStats::add(&self.stats.kicks, 1);
        self.poll = PollOp::Off;
        self.is_ready = !is_leaving;
        None
    }

    fn signalled(&mut self, is_leaving: bool) -> Vec<Failure> {
        if !is_leaving && !self.leads {
            self.group.leave_idle(self.index);
            self.is_ready = true;
            self.was_woken = true;
        }
        Vec::new()
    }

    fn may_leave(&self, _: bool) -> bool {
        true
    }

    fn is_at_rest(&self) -> bool {
        self.poll == PollOp::Off
    }
}
