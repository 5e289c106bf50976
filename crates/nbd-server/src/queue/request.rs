//! How a request is started on the disk and completed.

use ::nbd::CommandKind;
use ::nbd::server::{Work, errno};
use vshunt_block::{Op, Step};
use vshunt_engine::{QueueStats, RequestKind, Token, Uring};
use vshunt_types::convert::{len_u32, to_usize};
use vshunt_types::spec::Cache;

use super::status::STATUS_BYTES;
use super::{ConnectionQueue, OP_DISK, OP_NEXT, State, slot_of};

/// Bytes of the parts in which a range is discarded or zeroed: what guests may ask for at once.
const PART_BYTES: u64 = 1 << 40;
/// Most parts of a range.
const PARTS_MAX: u64 = 256;
/// The length of a part is a multiple of it.
const PART_UNIT: u64 = 1 << 20;

impl ConnectionQueue {
    /// Starts a request whose payload is complete. `refused`: it is answered with this error.
    #[inline]
    pub(super) fn begin(&mut self, uring: &mut Uring, base: Token, index: u16, refused: Option<u32>) {
        let taken = self.meter.stamp();
        let slot = self.slot(index);
        slot.taken = taken;
        slot.kind = match slot.request.command() {
            Some(CommandKind::Read) => RequestKind::Read,
            Some(CommandKind::Write) => RequestKind::Write,
            Some(CommandKind::Flush) => RequestKind::Flush,
            _ => RequestKind::Other,
        };
        let (request, work) = (slot.request, slot.work);
        self.in_flight += 1;
        if let Some(error) = refused {
            return self.end(index, Err(error));
        }
        let slot = self.slot(index);
        match work {
            Work::Read | Work::Write { .. } => {
                let (op, fua) = match work {
                    Work::Write { fua } => (Op::Write, fua),
                    _ => (Op::Read, false),
                };
                slot.io.reset(op, request.offset, fua);
                let Some(data) = &slot.data else { return self.end(index, Ok(())) };
                // SAFETY: the buffer has at least `len` bytes (`Memory::take`). It belongs to the
                // slot until the reply is sent, and slots do not move.
                unsafe { slot.io.push(data.ptr(), to_usize(request.len)) };
                self.taken_bytes += request.len;
            }
            Work::Flush | Work::Disconnect => {
                if self.shared.readonly || self.shared.disk.cache() == Cache::Unsafe {
                    return self.end(index, Ok(()));
                }
                let mark = self.unflushed.mark();
                self.slot(index).covers = mark;
                self.slot(index).io.reset(Op::Flush, 0, false);
            }
            Work::Trim { .. } | Work::WriteZeroes { .. } => {
                slot.rest = request.offset..request.offset + request.len;
                slot.flushes = matches!(work, Work::Trim { fua: true });
                if !self.next_part(index) {
                    return self.end(index, Ok(()));
                }
            }
            Work::BlockStatus { one } => {
                self.taken_bytes += STATUS_BYTES;
                if !self.begin_status(uring, base, index, one) {
                    return;
                }
            }
        }
        self.start(uring, base, index);
    }

    /// Fills in the next operation of a range that is done in parts. Returns false if nothing is
    /// left.
    fn next_part(&mut self, index: u16) -> bool {
        let unsafe_cache = self.shared.disk.cache() == Cache::Unsafe;
        let slot = self.slot(index);
        let (at, left) = (slot.rest.start, slot.rest.end - slot.rest.start);
        if left == 0 {
            if !std::mem::take(&mut slot.flushes) || unsafe_cache {
                return false;
            }
            slot.io.reset(Op::Flush, 0, false);
            return true;
        }
        let part = PART_BYTES.max((slot.request.len / PARTS_MAX).next_multiple_of(PART_UNIT));
        let len = left.min(part);
        slot.rest.start += len;
        match slot.work {
            Work::WriteZeroes { unmap, fua } => slot.io.reset(Op::WriteZeroes { unmap }, at, fua),
            _ => slot.io.reset(Op::Discard, at, false),
        }
        slot.io.request.len = len;
        true
    }

    /// Starts the operation of a slot, and those that follow it without a wait.
    #[inline]
    pub(super) fn start(&mut self, uring: &mut Uring, base: Token, index: u16) {
        loop {
            let io = &mut slot_of(&mut self.slots, index).io;
            // A worker arms the queue before anything is taken.
            let Some(handle) = &self.handle else { return self.end(index, Err(errno::EIO)) };
            match handle.start(uring, io, base.with(index, OP_DISK)) {
                Step::Done(result) if self.advance(index, result) => {
                    if self.has_asked_enough(index) {
                        return uring.defer(base.with(index, OP_NEXT));
                    }
                }
                Step::Done(_) | Step::Wait => return,
            }
        }
    }

    /// Returns whether another operation follows for a request.
    fn is_in_parts(&mut self, index: u16) -> bool {
        let slot = self.slot(index);
        matches!(slot.work, Work::BlockStatus { .. }) || !slot.rest.is_empty()
    }

    /// Continues after the operation of a slot completed. Returns whether the next one is to be
    /// started.
    #[inline]
    pub(super) fn advance(&mut self, index: u16, result: i32) -> bool {
        let work = self.slot(index).work;
        match work {
            // No client waits for the rest.
            _ if self.state == State::Failed && result >= 0 && self.is_in_parts(index) => {
                self.end(index, Err(errno::EIO));
            }
            Work::BlockStatus { .. } => return self.sought(index, result),
            _ if result < 0 => self.end(index, Err(errno::of(-result))),
            Work::Trim { .. } | Work::WriteZeroes { .. } if self.next_part(index) => return true,
            _ => self.end(index, Ok(())),
        }
        false
    }

    /// Completes a request: its reply is ready.
    pub(super) fn end(&mut self, index: u16, result: Result<(), u32>) {
        let (stats, slot) = (&self.stats, slot_of(&mut self.slots, index));
        let reply = slot.reply(self.headers);
        slot.reply_bytes = 0;
        match (result, slot.work) {
            (Err(error), work) => {
                QueueStats::add(&stats.errors, 1);
                if matches!(work, Work::Write { .. } | Work::Trim { .. } | Work::WriteZeroes { .. }) {
                    self.unflushed.changed(false);
                }
                slot.status.clear();
                slot.header_bytes = reply.error(error, &mut slot.header);
            }
            (Ok(()), Work::Read) => {
                slot.reply_bytes = to_usize(slot.request.len);
                slot.header_bytes = reply.success(len_u32(slot.reply_bytes), &mut slot.header);
                QueueStats::add(&stats.read_bytes, slot.request.len);
            }
            // The state of the range has its headers.
            (Ok(()), Work::BlockStatus { .. }) => slot.header_bytes = 0,
            (Ok(()), work) => {
                slot.header_bytes = reply.success(0, &mut slot.header);
                match work {
                    Work::Write { fua } => {
                        QueueStats::add(&stats.write_bytes, slot.request.len);
                        self.unflushed.changed(fua);
                    }
                    Work::Trim { fua } | Work::WriteZeroes { fua, .. } => self.unflushed.changed(fua),
                    _ => self.unflushed.flushed(slot.covers),
                }
            }
        }
        let (taken, kind) = (slot.taken, slot.kind);
        stats.completed(kind);
        self.meter.done(taken, kind);
        self.in_flight -= 1;
        self.completed = self.completed.wrapping_add(1);
        self.replies.push_back(index);
    }
}
