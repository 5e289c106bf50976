//! The requests of a connection: those that wait to be sent, and those that wait for a reply.
//!
//! A request that is longer than the server takes is done in pieces, one after the other. Its
//! segments stay whole until it is complete, so a piece can be sent again.

use std::collections::VecDeque;
use std::time::Instant;

use ::nbd::{
    Command, CommandKind, Covered, Expected, Requests, Settings, Wanted, command_flag, transmission_flag,
};
use qcow2::{Extent, Found};
use vshunt_engine::Token;

use super::unflushed::Unflushed;
use crate::limits::SECTOR_BYTES;
use crate::{IoVecs, Op};

/// Most bytes of zeroes in one write, for servers without WriteZeroes.
pub(super) const ZERO_BYTES: u64 = 1 << 20;
/// Most bytes of a command without a payload: servers may need long for more.
const RANGE_BYTES: u64 = 1 << 30;
/// Most bytes of a read or write, whatever the server takes.
const PAYLOAD_BYTES: u64 = 32 << 20;
/// Reads of at least as many bytes are long: their data goes straight to guest memory.
pub(super) const LONG_BYTES: u64 = 16 << 10;

/// Where the result of a request goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dest {
    /// To a queue of this ring.
    Here(Token),
    /// To another ring: its id, and a packed token.
    Ring { ring: u64, token: u64 },
}

/// A request that is started.
pub(super) struct Start {
    pub(super) dest: Dest,
    pub(super) op: Op,
    /// A write is complete when it is on stable storage.
    pub(super) fua: bool,
    /// An [`Op::Seek`]: the server is to know of all writes before it answers.
    pub(super) flush_first: bool,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) iov: IoVecs,
    /// When a connection was lost for the first time that the request was in flight on.
    pub(super) lost_at: Option<Instant>,
    /// Until then it waits for a lost connection even if others fail: it is among the first
    /// requests of its queue. None: it is not.
    pub(super) first_until: Option<Instant>,
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The slot is free.
    Free,
    /// The request waits to be sent.
    Waiting,
    /// The kernel has bytes of the request that are not sent.
    Sending,
    /// The server has the request.
    Sent,
}

/// A slot, with its request.
pub(super) struct Slot {
    pub(super) start: Start,
    pub(super) state: State,
    /// Changes with each sending, so that a late reply finds no wrong request.
    generation: u32,
    /// The reply is complete. While the kernel has bytes of the request, it is not ended.
    replied: bool,
    /// The writes are done. A flush makes them stable, because the server knows no FUA.
    flushing: bool,
    /// What the flush that is under way covers ([`Unflushed`]).
    mark: u64,
    /// Bytes of the request that are complete.
    done: u64,
    /// Bytes of the current piece, and those of them that have not arrived.
    piece: u64,
    left: u64,
    /// The parts of the current piece that have begun to arrive.
    covered: Covered,
    /// The error of the reply, positive; 0 if there is none.
    errno: i32,
    /// The answer to [`Op::Seek`]: length and flags.
    extent: Option<(u64, u64)>,
}

/// What happens after a reply.
pub(super) enum Next {
    /// The request is complete, with 0 or a negative errno.
    Done(i32),
    /// Another command is to be sent.
    Send,
    /// The server says that it ends. The request is to be sent to another one.
    Again,
}

/// The requests of a connection.
pub(super) struct Table {
    pub(super) slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests whose reply is complete.
    pub(super) ended: Vec<u32>,
    /// Long reads among the requests.
    pub(super) long_reads: u32,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), ended: Vec::new(), long_reads: 0 }
    }

    /// Takes a request. Returns its slot.
    #[inline]
    pub(super) fn add(&mut self, start: Start) -> u32 {
        if start.op == Op::Read && start.len >= LONG_BYTES {
            self.long_reads += 1;
        }
        let slot = Slot {
            start,
            state: State::Waiting,
            generation: 0,
            replied: false,
            flushing: false,
            mark: 0,
            done: 0,
            piece: 0,
            left: 0,
            covered: Covered::default(),
            errno: 0,
            extent: None,
        };
        if let Some(at) = self.free.pop() {
            let place = &mut self.slots[at as usize];
            let generation = place.generation;
            *place = Slot { generation, ..slot };
            return at;
        }
        self.slots.push(slot);
        u32::try_from(self.slots.len() - 1).expect("requests are fewer than slots of queues")
    }

    /// Frees a slot. Returns where its result goes, and the answer to [`Op::Seek`].
    #[inline]
    pub(super) fn remove(&mut self, at: u32) -> (Dest, Option<Found>) {
        let slot = &mut self.slots[at as usize];
        debug_assert!(matches!(slot.state, State::Waiting | State::Sent));
        slot.state = State::Free;
        slot.start.iov.clear();
        if slot.start.op == Op::Read && slot.start.len >= LONG_BYTES {
            self.long_reads -= 1;
        }
        self.free.push(at);
        (slot.start.dest, slot.found())
    }

    /// Removes a request that waits to be sent, for another connection, which begins it again.
    pub(super) fn take(&mut self, at: u32) -> Start {
        let start = &mut self.slots[at as usize].start;
        let iov = std::mem::take(&mut start.iov);
        let Start { dest, op, fua, flush_first, offset, len, lost_at, first_until, .. } = *start;
        self.remove(at);
        Start { dest, op, fua, flush_first, offset, len, iov, lost_at, first_until }
    }

    /// Returns the number of requests.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns until when a request waits for a lost connection even if others fail.
    pub(super) fn first_until(&self, at: u32) -> Option<Instant> {
        self.slots[at as usize].start.first_until
    }

    /// Returns the command for the next piece of a request, and the number of bytes of its payload.
    #[inline]
    pub(super) fn command(&mut self, at: u32, settings: &Settings, unflushed: &Unflushed) -> (Command, u64) {
        let slot = &mut self.slots[at as usize];
        slot.state = State::Sending;
        slot.generation = slot.generation.wrapping_add(1);
        slot.replied = false;
        slot.errno = 0;
        let cookie = u64::from(slot.generation) << 32 | u64::from(at);
        if slot.is_flush() {
            (slot.piece, slot.left, slot.mark) = (0, 0, unflushed.mark());
            return (Command { kind: CommandKind::Flush, flags: 0, cookie, offset: 0, len: 0 }, 0);
        }
        let rest = slot.start.len - slot.done;
        let sends_zeroes = slot.sends_zeroes(settings);
        let (kind, len_max) = match slot.start.op {
            Op::Read => (CommandKind::Read, payload_max(settings)),
            Op::WriteZeroes { .. } if sends_zeroes => {
                (CommandKind::Write, payload_max(settings).min(ZERO_BYTES))
            }
            Op::WriteZeroes { .. } => (CommandKind::WriteZeroes, RANGE_BYTES),
            Op::Discard => (CommandKind::Trim, RANGE_BYTES),
            Op::Seek { .. } => (CommandKind::BlockStatus, RANGE_BYTES),
            _ => (CommandKind::Write, payload_max(settings)),
        };
        slot.piece = rest.min(len_max);
        slot.covered.clear();
        slot.left = if kind == CommandKind::Read { slot.piece } else { 0 };
        let mut flags = 0;
        if slot.start.fua && settings.has(transmission_flag::SEND_FUA) {
            flags |= command_flag::FUA;
        }
        match slot.start.op {
            Op::WriteZeroes { unmap: false } if !sends_zeroes => flags |= command_flag::NO_HOLE,
            Op::Seek { .. } => flags |= command_flag::REQ_ONE,
            _ => {}
        }
        let payload = if kind == CommandKind::Write { slot.piece } else { 0 };
        (Command { kind, flags, cookie, offset: slot.start.offset + slot.done, len: slot.piece }, payload)
    }

    /// Returns whether a request has a complete reply, after its last byte was sent.
    pub(super) fn sent(&mut self, at: u32) -> bool {
        let slot = &mut self.slots[at as usize];
        slot.state = State::Sent;
        slot.replied
    }

    /// Decides what happens after a reply.
    #[inline]
    pub(super) fn after(&mut self, at: u32, settings: &Settings, unflushed: &Unflushed) -> Next {
        let slot = &mut self.slots[at as usize];
        slot.replied = false;
        if slot.is_flush() {
            if slot.errno == 0 {
                unflushed.flush(slot.mark);
            }
        } else if slot.start.op == Op::Write && !slot.start.fua {
            unflushed.write();
        }
        match slot.errno {
            // The next command has a delay of its own, unless a loss begins the request again.
            0 if !slot.start.fua || settings.has(transmission_flag::SEND_FUA) => slot.start.lost_at = None,
            0 => {}
            libc::ESHUTDOWN => return Next::Again,
            errno => return Next::Done(-errno),
        }
        if std::mem::take(&mut slot.start.flush_first) {
            slot.state = State::Waiting;
            return Next::Send;
        }
        slot.done += slot.piece;
        let seeks = matches!(slot.start.op, Op::Seek { .. });
        if !seeks && slot.done < slot.start.len {
            slot.state = State::Waiting;
            return Next::Send;
        }
        let flushes = slot.start.fua
            && !slot.flushing
            && !settings.has(transmission_flag::SEND_FUA)
            && settings.has(transmission_flag::SEND_FLUSH);
        if flushes {
            slot.flushing = true;
            slot.state = State::Waiting;
            return Next::Send;
        }
        Next::Done(0)
    }

    /// Makes the requests that the server had wait again, after the connection was lost at `now`.
    /// Their slots are added to the front of `waiting`. `settings`: those of the lost connection.
    pub(super) fn again(&mut self, waiting: &mut VecDeque<u32>, settings: &Settings, now: Instant) {
        self.ended.clear();
        for at in (0..self.slots.len()).rev() {
            let slot = &mut self.slots[at];
            if slot.state == State::Free {
                continue;
            }
            // A server that comes back may have lost what only a flush would have made stable.
            if slot.start.fua && !settings.has(transmission_flag::SEND_FUA) {
                (slot.done, slot.flushing) = (0, false);
            }
            if matches!(slot.state, State::Sending | State::Sent) {
                slot.state = State::Waiting;
                slot.replied = false;
                slot.errno = 0;
                slot.extent = None;
                slot.start.lost_at.get_or_insert(now);
                waiting.push_front(at as u32);
            }
        }
    }

    /// Returns when the first connection was lost that one of the requests was in flight on.
    pub(super) fn lost_first(&self) -> Option<Instant> {
        let used = self.slots.iter().filter(|slot| slot.state != State::Free);
        used.filter_map(|slot| slot.start.lost_at).min()
    }

    /// Returns whether a request was in flight on a connection that was lost at `time` or before.
    pub(super) fn was_lost_by(&self, at: u32, time: Instant) -> bool {
        self.slots[at as usize].start.lost_at.is_some_and(|lost_at| lost_at <= time)
    }

    /// Calls `f` for each piece of memory of a part of the current piece: `from` to its end, or
    /// `len` bytes.
    #[inline]
    pub(super) fn memory(&self, at: u32, from: u64, len: u64, f: impl FnMut(*mut u8, usize)) {
        let slot = &self.slots[at as usize];
        let start = slot.done + from;
        slot.start.iov.for_range(start..start + len, f);
    }

    /// Returns the length of the current piece of a request, bytes.
    pub(super) fn piece(&self, at: u32) -> u64 {
        self.slots[at as usize].piece
    }

    /// Returns whether the payload of a request is zeroes that are not in its segments.
    pub(super) fn sends_zeroes(&self, at: u32, settings: &Settings) -> bool {
        self.slots[at as usize].sends_zeroes(settings)
    }

    fn slot(&mut self, at: u32) -> &mut Slot {
        &mut self.slots[at as usize]
    }
}

impl Slot {
    /// Returns whether the next command of the request, or the one that is under way, is a flush.
    fn is_flush(&self) -> bool {
        self.flushing || self.start.flush_first || self.start.op == Op::Flush
    }

    fn sends_zeroes(&self, settings: &Settings) -> bool {
        matches!(self.start.op, Op::WriteZeroes { .. }) && !settings.has(transmission_flag::SEND_WRITE_ZEROES)
    }

    fn found(&self) -> Option<Found> {
        let Op::Seek { .. } = self.start.op else { return None };
        let (len, flags) = self.extent?;
        let extent = if flags & ::nbd::allocation::ZERO != 0 { Extent::Zero } else { Extent::Data };
        let len = len.min(self.piece);
        // The end of the disk may be no whole sector away; other ends are cut.
        match if len == self.start.len { len } else { len / SECTOR_BYTES * SECTOR_BYTES } {
            0 => Some(Found { extent: Extent::Data, len: SECTOR_BYTES.min(self.start.len) }),
            len => Some(Found { extent, len }),
        }
    }
}

/// Returns the longest read or write that the server is sent, bytes.
pub(super) fn payload_max(settings: &Settings) -> u64 {
    let blocks = settings.blocks;
    let unit = u64::from(blocks.minimum).max(SECTOR_BYTES);
    let most = u64::from(blocks.maximum).min(PAYLOAD_BYTES);
    if most < unit { u64::from(blocks.minimum) } else { most / unit * unit }
}

impl Requests for Table {
    #[inline]
    fn find(&mut self, cookie: u64) -> Option<Expected> {
        let at = cookie as u32;
        let slot = self.slots.get(at as usize)?;
        let is_it = u64::from(slot.generation) == cookie >> 32
            && matches!(slot.state, State::Sending | State::Sent)
            && !slot.replied;
        if !is_it {
            return None;
        }
        let wanted = match slot.start.op {
            _ if slot.is_flush() => Wanted::Nothing,
            Op::Read => Wanted::Data,
            Op::Seek { .. } => Wanted::Status,
            _ => Wanted::Nothing,
        };
        Some(Expected {
            slot: at,
            wanted,
            offset: slot.start.offset + slot.done,
            len: slot.piece,
            left: slot.left,
            failed: slot.errno != 0,
        })
    }

    #[inline]
    fn covers(&mut self, slot: u32, at: u64, len: u64) -> bool {
        self.slot(slot).covered.add(at, len)
    }

    #[inline]
    fn data(&mut self, slot: u32, at: u64, bytes: &[u8]) {
        let slot = self.slot(slot);
        let start = slot.done + at;
        // SAFETY: the segments are valid until the request is complete, by the contract of
        // `IoVecs::push`, and the receiver stays within the range of the request.
        unsafe { slot.start.iov.scatter_range(start..start + bytes.len() as u64, bytes) };
    }

    fn zeroes(&mut self, slot: u32, at: u64, len: u64) {
        let slot = self.slot(slot);
        let start = slot.done + at;
        // SAFETY: as for `data`.
        unsafe { slot.start.iov.zero_range(start..start + len) };
    }

    #[inline]
    fn arrived(&mut self, slot: u32, len: u64) {
        self.slot(slot).left -= len;
    }

    fn status(&mut self, slot: u32, len: u64, flags: u64) {
        self.slot(slot).extent.get_or_insert((len, flags));
    }

    fn error(&mut self, slot: u32, errno: i32) {
        self.slot(slot).errno = errno;
    }

    #[inline]
    fn done(&mut self, at: u32) {
        let slot = self.slot(at);
        slot.replied = true;
        if slot.state == State::Sent {
            self.ended.push(at);
        }
    }
}
