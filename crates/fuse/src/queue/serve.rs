//! The meaning of each request of a mount: POSIX for one regular file that has the disk's bytes.
//!
//! `begin` replies at once, or starts an operation of the disk, or gives a task to the blocking
//! thread. `io_done` and `task_done` continue from there until the reply. A write beyond the end
//! makes the file longer first, in the same slot. Both transports use this code.

use std::time::{Duration, Instant};

use vshunt_block::{FileAttributes, NewTime, Op, Step};
use vshunt_engine::{Direction, QueueStats, RequestKind, Token, Uring};

use super::blocking::{BufferBytes, Task, TaskResult};
use super::transport::{OP_DISK, QueueTransport, Request};
use super::{FuseQueue, TRANSFER_BYTES_MAX};
use crate::abi::{
    AttrOut, BLKGETSIZE64, FallocateIn, InHeader, InterruptIn, IoctlIn, IoctlOut, LseekIn, LseekOut, Plain,
    SetattrIn, StatxOut, TransferIn, WriteOut, fattr, op,
};
use vshunt_types::convert::{at_most, len_u32, to_usize};

/// Requests that get no reply.
fn is_silent(opcode: u32) -> bool {
    matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT)
}

/// A request that changes bytes of the disk.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// Writes the first `len` bytes of the buffer.
    Write {
        offset: u64,
        len: u32,
        fua: bool,
    },
    Zero {
        offset: u64,
        len: u64,
        unmap: bool,
    },
    Allocate {
        offset: u64,
        len: u64,
    },
}

/// What a fallocate(2) does.
struct Allocation {
    change: Change,
    /// There is nothing to do.
    is_empty: bool,
    /// How long the file must be before, if it is not.
    end: Option<u64>,
}

/// What to do when the operation or task of a slot has completed.
#[derive(Clone, Copy)]
pub(super) enum NextStep {
    /// Nothing is in flight.
    None,
    /// Reply with part of the buffer.
    Read { skip: u32, len: u32 },
    /// Reply how much was written.
    Written { len: u32 },
    /// Reply success.
    Done,
    /// Reply the file's attributes.
    Attr,
    /// Reply the file's attributes in the format of statx.
    Statx,
    /// The file is long enough now: start the change.
    Change(Change),
}

/// How long a request that waits for the limits continues after a signal to its task. A killed task
/// ends soon then, and few programs that handle a signal see the error.
const SIGNAL_WAIT: Duration = Duration::from_secs(1);

impl<T: QueueTransport> FuseQueue<T> {
    /// Starts a request.
    #[inline]
    pub(super) fn begin(&mut self, uring: &mut Uring, place: Token, request: &Request) {
        let Request { slot, header, args, payload_bytes, .. } = request;
        let (slot, payload_bytes) = (*slot, *payload_bytes);
        self.note_begun(request);
        match header.opcode {
            op::READ => self.read(uring, place, slot, args),
            op::WRITE => self.write(uring, place, slot, args, payload_bytes),
            opcode if is_silent(opcode) => {
                if opcode == op::INTERRUPT
                    && let Some(InterruptIn { unique }) = InterruptIn::read(args)
                {
                    self.shared.interrupt(unique);
                }
                self.recycle(uring, place, slot);
            }
            _ => self.other(uring, place, slot, header, args),
        }
    }

    /// Takes note of requests that wait for the limits, and whose task has got a signal.
    pub(super) fn note_interrupts(&mut self) {
        for unique in self.completions.take_interrupts() {
            if self.held.iter().any(|request| request.header.unique == unique) {
                self.interrupted.push((unique, Instant::now()));
            }
        }
    }

    /// Ends requests that have waited for the limits for [`SIGNAL_WAIT`] since their task got a
    /// signal. One that has begun completes and gets its usual reply: an operation of the disk
    /// cannot be withdrawn.
    pub(super) fn end_interrupted(&mut self, uring: &mut Uring, place: Token) {
        if self.interrupted.is_empty() {
            return;
        }
        for (unique, since) in std::mem::take(&mut self.interrupted) {
            let Some(at) = self.held.iter().position(|request| request.header.unique == unique) else {
                continue;
            };
            if since.elapsed() < SIGNAL_WAIT {
                self.interrupted.push((unique, since));
            } else if let Some(request) = self.held.remove(at) {
                self.note_begun(&request);
                self.end(uring, place, request.slot, -libc::EINTR);
            }
        }
        if self.held.is_empty() {
            self.limit.withdraw();
        }
    }

    /// Begins the slot's state of a request.
    #[inline]
    fn note_begun(&mut self, request: &Request) {
        let Request { slot, header, payload_bytes, .. } = request;
        let (slot, payload_bytes) = (*slot, *payload_bytes);
        self.in_flight += 1;
        let state = &mut self.slots[slot];
        state.unique = header.unique;
        state.taken = self.meter.stamp();
        state.kind = match header.opcode {
            op::READ => RequestKind::Read,
            op::WRITE => RequestKind::Write,
            op::FSYNC => RequestKind::Flush,
            _ => RequestKind::Other,
        };
        if payload_bytes > 0 {
            state.zeroed = 0;
        }
    }

    /// Returns what a request costs: its direction and its bytes. None: limits do not concern it,
    /// as requests for metadata.
    #[inline]
    pub(super) fn cost(&self, request: &Request) -> Option<(Direction, u64)> {
        let (op, offset, bytes) = self.charged(request)?;
        // A worker arms the queue before it takes a request.
        self.handle.as_ref()?.cost(op, offset, bytes)
    }

    /// Returns what limits look at: the operation, its offset, and its length within the file; for
    /// a request that is refused a length of 0. One that makes the file longer to zero a range is
    /// charged for the zeroes after that. None: requests that are no operation of the disk.
    fn charged(&self, request: &Request) -> Option<(Op, u64, u64)> {
        let args = &request.args;
        let end = self.shared.disk().size_bytes();
        let transfer = |end: u64| {
            let TransferIn { offset, size, .. } = TransferIn::read(args).unwrap_or_default();
            let len = size.min(TRANSFER_BYTES_MAX).into();
            (offset, end.saturating_sub(offset).min(len))
        };
        match request.header.opcode {
            op::READ => {
                let (offset, len) = transfer(end);
                Some((Op::Read, offset, len))
            }
            op::WRITE => {
                let end = match (self.shared.writable, self.shared.growable) {
                    (true, true) => u64::MAX,
                    (true, false) => end,
                    (false, _) => 0,
                };
                let (offset, len) = transfer(end);
                Some((Op::Write, offset, len.min(request.payload_bytes as u64)))
            }
            op::FALLOCATE => {
                let what = FallocateIn::read(args)?;
                Some(match self.allocation(what) {
                    Ok(Allocation { change: Change::Zero { offset, len, unmap }, end: None, .. }) => {
                        (Op::WriteZeroes { unmap }, offset, len)
                    }
                    _ => (Op::Allocate, 0, 0),
                })
            }
            _ => None,
        }
    }

    /// The file is long enough for a change: charges the zeroes, and starts it.
    #[cold]
    fn lengthened(&mut self, uring: &mut Uring, place: Token, slot: u16, change: Change) {
        if let Change::Zero { offset, len, unmap } = change
            && let Some(handle) = &self.handle
            && let Some((direction, bytes)) = handle.cost(Op::WriteZeroes { unmap }, offset, len)
        {
            // The operation was charged before.
            self.limit.settle(direction, 0, Some(bytes));
        }
        self.change(uring, place, slot, change);
    }

    /// Ends a request: replies 0, or a negative errno.
    fn end(&mut self, uring: &mut Uring, place: Token, slot: u16, result: i32) {
        self.end_with(uring, place, slot, result, &[]);
    }

    /// Ends a request: replies a structure, or a negative errno.
    fn end_with(&mut self, uring: &mut Uring, place: Token, slot: u16, result: i32, body: &[u8]) {
        self.slots[slot].next_step = NextStep::None;
        self.reply(slot, result.min(0), if result < 0 { &[] } else { body });
        self.release(uring, place, slot);
    }

    /// Ends a request with the result of the disk, and counts an error. A refusal is no error
    /// (ENXIO: no data behind an offset).
    fn end_by_disk(&mut self, uring: &mut Uring, place: Token, slot: u16, result: i32) {
        if result < 0 && result != -libc::ENXIO {
            QueueStats::add(&self.stats.errors, 1);
        }
        self.end(uring, place, slot, result);
    }

    #[inline]
    fn read(&mut self, uring: &mut Uring, place: Token, slot: u16, args: &[u8]) {
        let Some(TransferIn { offset, size, .. }) = TransferIn::read(args) else {
            return self.end(uring, place, slot, -libc::EINVAL);
        };
        let end = self.shared.disk().size_bytes();
        let len = at_most(end.saturating_sub(offset), size.min(TRANSFER_BYTES_MAX));
        self.iteration_bytes += u64::from(len);
        if self.shared.reads_are_zero || len == 0 {
            let zeroed = &mut self.slots[slot].zeroed;
            if len > *zeroed {
                // SAFETY: the slot's buffer is longer than the longest transfer. Nothing else uses
                // it until the reply.
                unsafe { self.buffers.at(slot).write_bytes(0, len as usize) };
                *zeroed = len;
            }
            return self.end_read(uring, place, slot, 0, len);
        }
        // The disk reads whole blocks, and the reply is a part of them.
        let mask = self.shared.disk().alignment() - 1;
        let (from, to) = (offset & !mask, (offset + u64::from(len) + mask) & !mask);
        let at = self.buffers.at(slot);
        let state = &mut self.slots[slot];
        state.next_step = NextStep::Read { skip: at_most(offset - from, TRANSFER_BYTES_MAX), len };
        state.io.reset(Op::Read, from, false);
        // SAFETY: the buffer has room for the longest transfer and two blocks. It belongs to the
        // slot until the reply, and is not unmapped while an operation is in flight.
        unsafe { state.io.push(at, to_usize(to - from)) };
        self.start(uring, place, slot);
    }

    fn end_read(&mut self, uring: &mut Uring, place: Token, slot: u16, skip: u32, len: u32) {
        QueueStats::add(&self.stats.read_bytes, u64::from(len));
        let state = &mut self.slots[slot];
        state.next_step = NextStep::None;
        self.transport.reply_data(&self.buffers, slot, state.unique, skip as usize, len as usize);
        self.release(uring, place, slot);
    }

    #[inline]
    fn write(&mut self, uring: &mut Uring, place: Token, slot: u16, args: &[u8], payload: usize) {
        let Some(TransferIn { offset, size, flags, .. }) = TransferIn::read(args) else {
            return self.end(uring, place, slot, -libc::EINVAL);
        };
        if !self.shared.writable {
            return self.end(uring, place, slot, -libc::EROFS);
        }
        let mut len = size.min(len_u32(payload)).min(TRANSFER_BYTES_MAX);
        self.iteration_bytes += u64::from(len);
        // O_SYNC contains the bit of O_DSYNC.
        let fua = flags & libc::O_DSYNC.cast_unsigned() != 0;
        let disk_end = self.shared.disk().size_bytes();
        let Some(end) = offset.checked_add(u64::from(len)) else {
            return self.end(uring, place, slot, -libc::EFBIG);
        };
        if end > disk_end {
            if self.shared.growable {
                return self.lengthen(slot, end, Change::Write { offset, len, fua });
            }
            if offset >= disk_end {
                return self.end(uring, place, slot, if len > 0 { -libc::ENOSPC } else { 0 });
            }
            len = at_most(disk_end - offset, len);
        }
        self.change(uring, place, slot, Change::Write { offset, len, fua });
    }

    /// Starts a change within the file.
    fn change(&mut self, uring: &mut Uring, place: Token, slot: u16, change: Change) {
        let at = self.buffers.at(slot);
        let state = &mut self.slots[slot];
        match change {
            Change::Write { offset, len, fua } => {
                state.next_step = NextStep::Written { len };
                if (offset | u64::from(len)) & (self.shared.disk().alignment() - 1) != 0 {
                    let bytes = BufferBytes(at, len as usize);
                    return self.submit(slot, Task::Merge { offset, bytes, fua, grow: self.shared.growable });
                }
                state.io.reset(Op::Write, offset, fua);
                // SAFETY: `len` is at most the longest transfer, for which the buffer has room. The
                // buffer belongs to the slot until the reply, and is not unmapped while an
                // operation is in flight.
                unsafe { state.io.push(at, len as usize) };
            }
            Change::Zero { offset, len, unmap } => {
                state.next_step = NextStep::Done;
                let block = self.shared.disk().zero_alignment();
                let (first, last) = (offset.next_multiple_of(block), (offset + len) & !(block - 1));
                state.io.reset(Op::WriteZeroes { unmap }, first, false);
                state.io.request.len = last.saturating_sub(first);
                if (offset | len) & (block - 1) != 0 {
                    // `task_done` zeroes the whole blocks in between.
                    return self.submit(slot, Task::ZeroEdges { offset, len, block });
                }
            }
            Change::Allocate { offset, len } => {
                state.next_step = NextStep::Done;
                state.io.reset(Op::Allocate, offset, false);
                state.io.request.len = len;
            }
        }
        self.start(uring, place, slot);
    }

    /// Makes the file at least `end` bytes long, and then starts `change`.
    #[cold]
    fn lengthen(&mut self, slot: u16, end: u64, change: Change) {
        self.slots[slot].next_step = NextStep::Change(change);
        self.submit(slot, Task::Lengthen { end });
    }

    /// Starts the slot's operation on the disk, or defers it while a read-modify-write is in
    /// flight.
    #[inline]
    pub(super) fn start(&mut self, uring: &mut Uring, place: Token, slot: u16) {
        let state = &mut self.slots[slot];
        let writes = matches!(state.io.request.op, Op::Write | Op::WriteZeroes { .. });
        if writes && !self.shared.lock_write(&self.write_share, &mut state.holds_lock) {
            self.deferred.push(slot);
            return;
        }
        if self.shared.growable && state.io.request.op == Op::Write {
            let (offset, end) = (state.io.request.offset, state.io.request.offset + state.io.request.len);
            if end > self.shared.disk().size_bytes() {
                // The file was shortened since its size was checked. That cannot happen while a
                // write holds the lock.
                self.shared.unlock_write(&self.write_share, &mut state.holds_lock);
                let (len, fua) = (at_most(state.io.request.len, TRANSFER_BYTES_MAX), state.io.request.fua);
                return self.lengthen(slot, end, Change::Write { offset, len, fua });
            }
        }
        // A worker arms the queue before anything is taken.
        let Some(handle) = &self.handle else { return self.io_done(uring, place, slot, -libc::EIO) };
        if let Step::Done(result) = handle.start(uring, &mut state.io, place.with(slot, OP_DISK)) {
            self.io_done(uring, place, slot, result);
        }
    }

    /// The slot's operation on the disk completed.
    #[inline]
    pub(super) fn io_done(&mut self, uring: &mut Uring, place: Token, slot: u16, result: i32) {
        let state = &mut self.slots[slot];
        self.shared.unlock_write(&self.write_share, &mut state.holds_lock);
        match state.next_step {
            NextStep::Read { skip, len } if result >= 0 => {
                self.end_read(uring, place, slot, skip, len);
            }
            NextStep::Written { len } if result >= 0 => self.end_write(uring, place, slot, len),
            _ => self.end_by_disk(uring, place, slot, result),
        }
    }

    fn end_write(&mut self, uring: &mut Uring, place: Token, slot: u16, len: u32) {
        QueueStats::add(&self.stats.write_bytes, u64::from(len));
        self.end_with(uring, place, slot, 0, WriteOut { size: len, padding: 0 }.bytes());
    }

    /// Replies the attributes in the format that `next_step` names: [`NextStep::Attr`] or
    /// [`NextStep::Statx`].
    fn end_attr(&mut self, uring: &mut Uring, place: Token, slot: u16, next_step: NextStep) {
        let Some(attributes) = self.shared.disk().file_attributes_now() else {
            self.slots[slot].next_step = next_step;
            return self.submit(slot, Task::Attributes);
        };
        self.end_attributes(uring, place, slot, next_step, &attributes);
    }

    fn end_attributes(
        &mut self,
        uring: &mut Uring,
        place: Token,
        slot: u16,
        next_step: NextStep,
        attributes: &FileAttributes,
    ) {
        if let NextStep::Statx = next_step {
            let out = StatxOut { stat: self.shared.statx(attributes), ..Default::default() };
            return self.end_with(uring, place, slot, 0, out.bytes());
        }
        let out = AttrOut { attr: self.shared.attr(attributes), ..Default::default() };
        self.end_with(uring, place, slot, 0, out.bytes());
    }

    /// Gives the blocking thread a task of the slot.
    fn submit(&mut self, slot: u16, task: Task) {
        self.tasks += 1;
        self.shared.submit(&self.completions, slot, task);
    }

    /// The blocking thread has completed the task of a slot.
    pub(super) fn task_done(&mut self, uring: &mut Uring, place: Token, slot: u16, result: TaskResult) {
        let next_step = self.slots[slot].next_step;
        match (result, next_step) {
            (TaskResult::Done(result), _) if result < 0 => self.end_by_disk(uring, place, slot, result),
            (TaskResult::Done(_), NextStep::Written { len }) => self.end_write(uring, place, slot, len),
            (TaskResult::Done(_), NextStep::Change(change)) => self.lengthened(uring, place, slot, change),
            (TaskResult::Done(_), NextStep::Attr) => self.end_attr(uring, place, slot, NextStep::Attr),
            (TaskResult::Attributes(attributes), next_step) => {
                self.end_attributes(uring, place, slot, next_step, &attributes);
            }
            // The ends of a range are zero: now the whole blocks in between.
            (TaskResult::Done(_), NextStep::Done) if self.slots[slot].io.request.len > 0 => {
                self.start(uring, place, slot);
            }
            (TaskResult::Done(_), _) => self.end(uring, place, slot, 0),
            (TaskResult::Offset(offset), _) => {
                self.end_with(uring, place, slot, 0, LseekOut { offset }.bytes());
            }
            (TaskResult::Statfs(out), _) => self.end_with(uring, place, slot, 0, out.bytes()),
        }
    }

    /// Starts a request other than a read or a write.
    #[cold]
    fn other(&mut self, uring: &mut Uring, place: Token, slot: u16, request: &InHeader, args: &[u8]) {
        match request.opcode {
            op::GETATTR => self.end_attr(uring, place, slot, NextStep::Attr),
            op::STATX => self.end_attr(uring, place, slot, NextStep::Statx),
            op::SETATTR => match SetattrIn::read(args) {
                Some(set) => self.setattr(uring, place, slot, &set),
                None => self.end(uring, place, slot, -libc::EINVAL),
            },
            op::OPEN => {
                let out = self.shared.open();
                self.end_with(uring, place, slot, 0, out.bytes());
            }
            // No data is held back until the file is closed. After this answer the kernel sends no
            // FLUSH any more, so a process that closes the file never waits.
            op::FLUSH => self.end(uring, place, slot, -libc::ENOSYS),
            op::DESTROY => self.end(uring, place, slot, 0),
            op::RELEASE => {
                self.shared.release();
                self.end(uring, place, slot, 0);
            }
            op::FSYNC => {
                let state = &mut self.slots[slot];
                state.next_step = NextStep::Done;
                state.io.reset(Op::Flush, 0, false);
                self.start(uring, place, slot);
            }
            op::FALLOCATE => match FallocateIn::read(args) {
                Some(what) => self.fallocate(uring, place, slot, what),
                None => self.end(uring, place, slot, -libc::EINVAL),
            },
            op::LSEEK => match LseekIn::read(args) {
                Some(LseekIn { offset, whence, .. })
                    if matches!(whence.cast_signed(), libc::SEEK_DATA | libc::SEEK_HOLE) =>
                {
                    self.slots[slot].next_step = NextStep::None;
                    let (size, hole) = (self.shared.size(), whence.cast_signed() == libc::SEEK_HOLE);
                    self.submit(slot, Task::Seek { offset, size, hole });
                }
                _ => self.end(uring, place, slot, -libc::EINVAL),
            },
            op::STATFS => self.submit(slot, Task::Statfs),
            op::IOCTL => self.ioctl(uring, place, slot, args),
            _ => self.end(uring, place, slot, -libc::ENOSYS),
        }
    }

    fn setattr(&mut self, uring: &mut Uring, place: Token, slot: u16, set: &SetattrIn) {
        let has = |bit| set.valid & bit != 0;
        if !self.shared.writable {
            return self.end(uring, place, slot, -libc::EROFS);
        }
        if has(fattr::MODE) {
            self.shared.set_mode(set.mode);
        }
        if has(fattr::UID | fattr::GID) {
            self.shared.set_owner(has(fattr::UID).then_some(set.uid), has(fattr::GID).then_some(set.gid));
        }
        if has(fattr::SIZE) {
            return match () {
                () if self.shared.growable => {
                    self.slots[slot].next_step = NextStep::Attr;
                    self.submit(slot, Task::Truncate { end: set.size });
                }
                () if set.size == self.shared.disk().size_bytes() => {
                    self.end_attr(uring, place, slot, NextStep::Attr)
                }
                // open(O_TRUNC), which a shell's `>` and cp use before they write. The size stays,
                // as that of a block device would. The kernel sends the same for truncate(2) to 0
                // by name. ftruncate(2) has a file handle.
                () if set.size == 0 && !has(fattr::FH) => self.end_attr(uring, place, slot, NextStep::Attr),
                () => self.end(uring, place, slot, -libc::EPERM),
            };
        }
        if has(fattr::ATIME | fattr::MTIME) {
            let time = |bit, now, s: u64, ns: u32| match (has(now), has(bit)) {
                (true, _) => NewTime::Now,
                (_, true) => NewTime::At((s.cast_signed(), ns)),
                _ => NewTime::Keep,
            };
            self.slots[slot].next_step = NextStep::Attr;
            let atime = time(fattr::ATIME, fattr::ATIME_NOW, set.atime, set.atimensec);
            let mtime = time(fattr::MTIME, fattr::MTIME_NOW, set.mtime, set.mtimensec);
            return self.submit(slot, Task::Times { atime, mtime });
        }
        self.end_attr(uring, place, slot, NextStep::Attr);
    }

    fn fallocate(&mut self, uring: &mut Uring, place: Token, slot: u16, what: FallocateIn) {
        match self.allocation(what) {
            Err(errno) => self.end(uring, place, slot, errno),
            Ok(Allocation { is_empty: true, .. }) => self.end(uring, place, slot, 0),
            Ok(Allocation { end: Some(end), change, .. }) => self.lengthen(slot, end, change),
            Ok(Allocation { change, .. }) => self.change(uring, place, slot, change),
        }
    }

    /// Returns what a fallocate(2) does.
    ///
    /// # Errors
    /// A negative errno if it is refused.
    fn allocation(&self, what: FallocateIn) -> Result<Allocation, i32> {
        const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        let FallocateIn { offset, length, mode, .. } = what;
        let (mode, size) = (mode.cast_signed(), self.shared.size());
        let end = offset.checked_add(length).ok_or(-libc::EFBIG)?;
        if !self.shared.writable {
            return Err(-libc::EROFS);
        }
        let keeps = mode & KEEP != 0;
        let len = if keeps { length.min(size.saturating_sub(offset)) } else { length };
        let change = match mode & !KEEP {
            0 => Change::Allocate { offset, len },
            ZERO => Change::Zero { offset, len, unmap: false },
            _ if mode == PUNCH => Change::Zero { offset, len, unmap: true },
            _ => return Err(-libc::EOPNOTSUPP),
        };
        let is_empty = len == 0;
        match () {
            () if is_empty || end <= size || keeps => Ok(Allocation { change, is_empty, end: None }),
            () if self.shared.growable => Ok(Allocation { change, is_empty, end: Some(end) }),
            () => Err(-libc::ENOSPC),
        }
    }

    /// The kernel passes on ioctls whose number contains the size of their argument. Block tools
    /// ask for the size of the file.
    fn ioctl(&mut self, uring: &mut Uring, place: Token, slot: u16, args: &[u8]) {
        match IoctlIn::read(args) {
            Some(IoctlIn { cmd: BLKGETSIZE64, out_size: 8.., .. }) => {
                let mut out = [0; size_of::<IoctlOut>() + 8];
                if let Some(size) = out.last_chunk_mut() {
                    *size = self.shared.size().to_ne_bytes();
                }
                self.end_with(uring, place, slot, 0, &out);
            }
            _ => self.end(uring, place, slot, -libc::ENOTTY),
        }
    }
}
