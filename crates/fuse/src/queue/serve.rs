//! What each request of a mount means, as POSIX has it for one regular file on the disk's bytes.
//!
//! `begin` decides at once, or starts an operation of the disk, or orders something of the clerk; `io_done` and
//! `answered` go on from there, until the reply. A write beyond the end has the file made longer first, in the same slot.

use std::fs::Metadata;

use vshunt_block::{Op, Step};
use vshunt_engine::{QueueStats, Token, Uring};

use super::abi::{
    AttrOut, FallocateIn, InHeader, IoctlIn, IoctlOut, LseekIn, LseekOut, Plain, SetattrIn, StatxOut,
    TransferIn, WriteOut, fattr, op,
};
use super::clerk::{Answer, Bytes, Task};
use super::shared::look;
use super::{FuseQueue, OP_IO, TRANSFER_BYTES_MAX};

/// Requests that are not replied to.
fn is_silent(opcode: u32) -> bool {
    matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT)
}

/// What changes bytes of the disk.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// The buffer's first bytes.
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

/// What follows when the operation under way is done.
#[derive(Clone, Copy)]
pub(super) enum Then {
    /// None is under way.
    Nothing,
    /// Reply with part of the buffer.
    Read { skip: u32, len: u32 },
    /// Reply how much was written.
    Written { len: u32 },
    /// Reply that it is done.
    Done,
    /// Reply the file's attributes.
    Attr,
    /// The same, as statx has them.
    Statx,
    /// The file is long enough now.
    Go(Change),
}

impl FuseQueue {
    /// Begins a request in slot `index`; its payload, if any, is in the slot's buffer.
    #[inline]
    pub(super) fn begin(
        &mut self,
        uring: &mut Uring,
        place: Token,
        index: u16,
        request: &InHeader,
        args: &[u8],
        payload: usize,
    ) {
        let slot = &mut self.slots[usize::from(index)];
        slot.unique = request.unique;
        if payload > 0 {
            slot.zeroed = 0;
        }
        match request.opcode {
            op::READ => self.read(uring, place, index, args),
            op::WRITE => self.write(uring, place, index, args, payload),
            silent if is_silent(silent) => {
                // What is under way is seen through: an answer that comes is an answer, and the disk's operation
                // cannot be taken back.
                self.recycle(uring, place, index);
            }
            _ => self.other(uring, place, index, request, args),
        }
    }

    /// Replies 0 or an errno and ends the request.
    fn end(&mut self, uring: &mut Uring, place: Token, index: u16, result: i32) {
        self.end_with(uring, place, index, result, &[]);
    }

    fn end_with(&mut self, uring: &mut Uring, place: Token, index: u16, result: i32, small: &[u8]) {
        self.slots[usize::from(index)].then = Then::Nothing;
        self.reply(index, result.min(0), if result < 0 { &[] } else { small });
        self.release(uring, place, index);
    }

    /// The same for what the disk answered: a failure of it is one. (What is refused by rule is none: ENOTTY, ENXIO.)
    fn end_of_disk(&mut self, uring: &mut Uring, place: Token, index: u16, result: i32) {
        if result < 0 && result != -libc::ENXIO {
            QueueStats::add(&self.stats.errors, 1);
        }
        self.end(uring, place, index, result);
    }

    #[inline]
    fn read(&mut self, uring: &mut Uring, place: Token, index: u16, args: &[u8]) {
        let Some(TransferIn { offset, size, .. }) = TransferIn::read(args) else {
            return self.end(uring, place, index, -libc::EINVAL);
        };
        let end = self.shared.disk().size_bytes();
        let len = u64::from(size.min(TRANSFER_BYTES_MAX)).min(end.saturating_sub(offset));
        self.turn_bytes += len;
        if self.shared.gives_nothing || len == 0 {
            let zeroed = &mut self.slots[usize::from(index)].zeroed;
            if len > u64::from(*zeroed) {
                // SAFETY: the slot's buffer is ours and has that many bytes.
                unsafe { self.buffers.at(index).write_bytes(0, len as usize) };
                *zeroed = len as u32;
            }
            return self.end_read(uring, place, index, 0, len as usize);
        }
        // Whole blocks, of which the reply is a part.
        let mask = self.shared.disk().alignment() - 1;
        let (from, to) = (offset & !mask, (offset + len + mask) & !mask);
        let at = self.buffers.at(index);
        let slot = &mut self.slots[usize::from(index)];
        slot.then = Then::Read { skip: (offset - from) as u32, len: len as u32 };
        slot.io.reset(Op::Read, from, false);
        // SAFETY: the buffer has room for the longest read and two blocks; it is the slot's until the reply, and the
        // slot does not move.
        unsafe { slot.io.push(at, (to - from) as usize) };
        self.start(uring, place, index);
    }

    fn end_read(&mut self, uring: &mut Uring, place: Token, index: u16, skip: usize, len: usize) {
        QueueStats::add(&self.stats.read_bytes, len as u64);
        self.slots[usize::from(index)].then = Then::Nothing;
        self.reply_data(index, skip, len);
        self.release(uring, place, index);
    }

    #[inline]
    fn write(&mut self, uring: &mut Uring, place: Token, index: u16, args: &[u8], payload: usize) {
        let Some(TransferIn { offset, size, flags, .. }) = TransferIn::read(args) else {
            return self.end(uring, place, index, -libc::EINVAL);
        };
        if !self.shared.writable {
            return self.end(uring, place, index, -libc::EROFS);
        }
        let mut len = (size as usize).min(payload).min(TRANSFER_BYTES_MAX as usize) as u32;
        self.turn_bytes += u64::from(len);
        // O_SYNC has O_DSYNC's bit.
        let fua = flags & libc::O_DSYNC as u32 != 0;
        let disk_end = self.shared.disk().size_bytes();
        let Some(end) = offset.checked_add(u64::from(len)) else {
            return self.end(uring, place, index, -libc::EFBIG);
        };
        if end > disk_end {
            if self.shared.growable {
                return self.lengthen(index, end, Change::Write { offset, len, fua });
            }
            if offset >= disk_end {
                return self.end(uring, place, index, if len > 0 { -libc::ENOSPC } else { 0 });
            }
            len = (disk_end - offset) as u32;
        }
        self.change(uring, place, index, Change::Write { offset, len, fua });
    }

    /// Starts what changes bytes that are there.
    fn change(&mut self, uring: &mut Uring, place: Token, index: u16, change: Change) {
        let at = self.buffers.at(index);
        let slot = &mut self.slots[usize::from(index)];
        match change {
            Change::Write { offset, len, fua } => {
                slot.then = Then::Written { len };
                if (offset | u64::from(len)) & (self.shared.disk().alignment() - 1) != 0 {
                    let bytes = Bytes(at, len as usize);
                    return self.order(index, Task::Merge { offset, bytes, fua, grow: self.shared.growable });
                }
                slot.io.reset(Op::Write, offset, fua);
                // SAFETY: the payload is in the slot's buffer, which is the slot's until the reply.
                unsafe { slot.io.push(at, len as usize) };
            }
            Change::Zero { offset, len, unmap } => {
                slot.then = Then::Done;
                let block = self.shared.disk().zero_alignment();
                let (first, last) = (offset.next_multiple_of(block), (offset + len) & !(block - 1));
                slot.io.reset(Op::WriteZeroes { unmap }, first, false);
                slot.io.request.len = last.saturating_sub(first);
                if (offset | len) & (block - 1) != 0 {
                    // What lies between the ends follows when they are done.
                    return self.order(index, Task::Edges { offset, len, block });
                }
            }
            Change::Allocate { offset, len } => {
                slot.then = Then::Done;
                slot.io.reset(Op::Allocate, offset, false);
                slot.io.request.len = len;
            }
        }
        self.start(uring, place, index);
    }

    /// Has the file made long enough for what lies before `end`, and goes on with `change`.
    #[cold]
    fn lengthen(&mut self, index: u16, end: u64, change: Change) {
        self.slots[usize::from(index)].then = Then::Go(change);
        self.order(index, Task::Lengthen { end });
    }

    /// Starts the slot's operation, or puts it off while the gate is closed.
    #[inline]
    pub(super) fn start(&mut self, uring: &mut Uring, place: Token, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        let writes = matches!(slot.io.request.op, Op::Write | Op::WriteZeroes { .. });
        if writes && !self.shared.enter(self.index, slot) {
            self.deferred.push(index);
            return;
        }
        if self.shared.growable && slot.io.request.op == Op::Write {
            let (offset, end) = (slot.io.request.offset, slot.io.request.offset + slot.io.request.len);
            if end > self.shared.disk().size_bytes() {
                // Cut since it was found to be long enough; it is not cut while we are within the gate.
                self.shared.leave(self.index, slot);
                let (len, fua) = (slot.io.request.len as u32, slot.io.request.fua);
                return self.lengthen(index, end, Change::Write { offset, len, fua });
            }
        }
        let Some(handle) = &self.handle else { unreachable!("armed before anything is taken") };
        if let Step::Done(result) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.io_done(uring, place, index, result);
        }
    }

    /// The slot's operation is over.
    #[inline]
    pub(super) fn io_done(&mut self, uring: &mut Uring, place: Token, index: u16, result: i32) {
        let slot = &mut self.slots[usize::from(index)];
        self.shared.leave(self.index, slot);
        match slot.then {
            Then::Read { skip, len } if result >= 0 => {
                self.end_read(uring, place, index, skip as usize, len as usize);
            }
            Then::Written { len } if result >= 0 => self.end_write(uring, place, index, len),
            _ => self.end_of_disk(uring, place, index, result),
        }
    }

    fn end_write(&mut self, uring: &mut Uring, place: Token, index: u16, len: u32) {
        QueueStats::add(&self.stats.write_bytes, u64::from(len));
        self.end_with(uring, place, index, 0, WriteOut { size: len, padding: 0 }.bytes());
    }

    /// Replies the attributes, as `then` has them: [`Then::Attr`] or [`Then::Statx`].
    fn end_attr(&mut self, uring: &mut Uring, place: Token, index: u16, then: Then) {
        if self.shared.looks_wait {
            self.slots[usize::from(index)].then = then;
            return self.order(index, Task::Look);
        }
        let seen = look(self.shared.disk());
        self.end_looked(uring, place, index, then, seen.as_ref());
    }

    fn end_looked(
        &mut self,
        uring: &mut Uring,
        place: Token,
        index: u16,
        then: Then,
        seen: Option<&Metadata>,
    ) {
        if let Then::Statx = then {
            let out = StatxOut { stat: self.shared.statx(seen), ..Default::default() };
            return self.end_with(uring, place, index, 0, out.bytes());
        }
        let out = AttrOut { attr: self.shared.attr(seen), ..Default::default() };
        self.end_with(uring, place, index, 0, out.bytes());
    }

    /// Has the clerk do something for the slot.
    fn order(&mut self, index: u16, task: Task) {
        self.tasks += 1;
        self.shared.order(&self.desk, index, task);
    }

    /// The clerk is done.
    pub(super) fn answered(&mut self, uring: &mut Uring, place: Token, index: u16, answer: Answer) {
        let then = self.slots[usize::from(index)].then;
        match (answer, then) {
            (Answer::Done(result), _) if result < 0 => self.end_of_disk(uring, place, index, result),
            (Answer::Done(_), Then::Written { len }) => self.end_write(uring, place, index, len),
            (Answer::Done(_), Then::Go(change)) => self.change(uring, place, index, change),
            (Answer::Done(_), Then::Attr) => self.end_attr(uring, place, index, Then::Attr),
            (Answer::Looked(seen), then) => self.end_looked(uring, place, index, then, seen.as_deref()),
            // The ends of a range are zero: now what is between.
            (Answer::Done(_), Then::Done) if self.slots[usize::from(index)].io.request.len > 0 => {
                self.start(uring, place, index);
            }
            (Answer::Done(_), _) => self.end(uring, place, index, 0),
            (Answer::Offset(offset), _) => {
                self.end_with(uring, place, index, 0, LseekOut { offset }.bytes());
            }
            (Answer::Statfs(out), _) => self.end_with(uring, place, index, 0, out.bytes()),
        }
    }

    /// Everything but reads and writes.
    #[cold]
    fn other(&mut self, uring: &mut Uring, place: Token, index: u16, request: &InHeader, args: &[u8]) {
        match request.opcode {
            op::GETATTR => self.end_attr(uring, place, index, Then::Attr),
            op::STATX => self.end_attr(uring, place, index, Then::Statx),
            op::SETATTR => match SetattrIn::read(args) {
                Some(set) => self.setattr(uring, place, index, &set),
                None => self.end(uring, place, index, -libc::EINVAL),
            },
            op::OPEN => {
                let out = self.shared.open();
                self.end_with(uring, place, index, 0, out.bytes());
            }
            // Nothing is kept back from the disk until a file is closed. After this answer the kernel sends no other: a
            // process that closes the file waits for nobody.
            op::FLUSH => self.end(uring, place, index, -libc::ENOSYS),
            op::DESTROY => self.end(uring, place, index, 0),
            op::RELEASE => {
                self.shared.release();
                self.end(uring, place, index, 0);
            }
            op::FSYNC => {
                let slot = &mut self.slots[usize::from(index)];
                slot.then = Then::Done;
                slot.io.reset(Op::Flush, 0, false);
                self.start(uring, place, index);
            }
            op::FALLOCATE => match FallocateIn::read(args) {
                Some(what) => self.fallocate(uring, place, index, what),
                None => self.end(uring, place, index, -libc::EINVAL),
            },
            op::LSEEK => match LseekIn::read(args) {
                Some(LseekIn { offset, whence, .. })
                    if matches!(whence as i32, libc::SEEK_DATA | libc::SEEK_HOLE) =>
                {
                    self.slots[usize::from(index)].then = Then::Nothing;
                    self.order(
                        index,
                        Task::Seek {
                            offset,
                            size: self.shared.size(),
                            hole: whence as i32 == libc::SEEK_HOLE,
                        },
                    );
                }
                _ => self.end(uring, place, index, -libc::EINVAL),
            },
            op::STATFS => self.order(index, Task::Statfs),
            op::IOCTL => self.ioctl(uring, place, index, args),
            _ => self.end(uring, place, index, -libc::ENOSYS),
        }
    }

    fn setattr(&mut self, uring: &mut Uring, place: Token, index: u16, set: &SetattrIn) {
        let has = |bit| set.valid & bit != 0;
        if !self.shared.writable {
            return self.end(uring, place, index, -libc::EROFS);
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
                    self.slots[usize::from(index)].then = Then::Attr;
                    self.order(index, Task::Truncate { end: set.size });
                }
                () if set.size == self.shared.disk().size_bytes() => {
                    self.end_attr(uring, place, index, Then::Attr)
                }
                // open(O_TRUNC), as a shell's `>` and cp do. They go on to write, and the size stays as a block device's
                // would. The kernel sends the same for truncate(2) to 0 by name; ftruncate(2) has a file.
                () if set.size == 0 && !has(fattr::FH) => self.end_attr(uring, place, index, Then::Attr),
                () => self.end(uring, place, index, -libc::EPERM),
            };
        }
        if has(fattr::ATIME | fattr::MTIME) {
            let time = |bit, now, s: u64, ns: u32| match (has(now), has(bit)) {
                (true, _) => (0, libc::UTIME_NOW),
                (_, true) => (s as i64, i64::from(ns)),
                _ => (0, libc::UTIME_OMIT),
            };
            self.slots[usize::from(index)].then = Then::Attr;
            let atime = time(fattr::ATIME, fattr::ATIME_NOW, set.atime, set.atimensec);
            let mtime = time(fattr::MTIME, fattr::MTIME_NOW, set.mtime, set.mtimensec);
            return self.order(index, Task::Times { atime, mtime });
        }
        self.end_attr(uring, place, index, Then::Attr);
    }

    fn fallocate(&mut self, uring: &mut Uring, place: Token, index: u16, what: FallocateIn) {
        const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        let FallocateIn { offset, length, mode, .. } = what;
        let (mode, size) = (mode as i32, self.shared.size());
        let Some(end) = offset.checked_add(length) else {
            return self.end(uring, place, index, -libc::EFBIG);
        };
        if !self.shared.writable {
            return self.end(uring, place, index, -libc::EROFS);
        }
        let keeps = mode & KEEP != 0;
        let len = if keeps { length.min(size.saturating_sub(offset)) } else { length };
        let change = match mode & !KEEP {
            0 => Change::Allocate { offset, len },
            ZERO => Change::Zero { offset, len, unmap: false },
            _ if mode == PUNCH => Change::Zero { offset, len, unmap: true },
            _ => return self.end(uring, place, index, -libc::EOPNOTSUPP),
        };
        match () {
            () if len == 0 => self.end(uring, place, index, 0),
            () if end <= size || keeps => self.change(uring, place, index, change),
            () if self.shared.growable => self.lengthen(index, end, change),
            () => self.end(uring, place, index, -libc::ENOSPC),
        }
    }

    /// The kernel lets a file's server see ioctls whose number tells their size. Block tools ask for the size.
    fn ioctl(&mut self, uring: &mut Uring, place: Token, index: u16, args: &[u8]) {
        match IoctlIn::read(args) {
            Some(IoctlIn { cmd: super::abi::BLKGETSIZE64, out_size: 8.., .. }) => {
                let mut out = [0; size_of::<IoctlOut>() + 8];
                out[size_of::<IoctlOut>()..].copy_from_slice(&self.shared.size().to_ne_bytes());
                self.end_with(uring, place, index, 0, &out);
            }
            _ => self.end(uring, place, index, -libc::ENOTTY),
        }
    }
}
