//! A queue that copies one disk to another. It is attached to a worker like all queues.
//!
//! It reads ahead through the blocks to be copied, and writes old data that writes of guests have
//! read (`copy_before_write`). With a fleecing file, it reads ahead through both, disk and file,
//! and writes them to the target together. Or it copies what guests write, again and again, until
//! it is stopped (`copy_after_write`).
//!
//! What must never happen: a block is left out without an error; a guest waits for a copy that has
//! ended.

mod work;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread::Thread;

use vshunt_engine::{PollState, Queue, QueueStats, Token, Uring};
use vshunt_types::sync::Locked;

pub use self::work::Work;
use crate::bits::Bits;
use crate::bounce::{AlignedBuf, is_zero};
use crate::copy_before_write::OldData;
use crate::disk::Disk;
use crate::handle::DiskHandle;
use crate::{Extent, Io, Look, Op, Step};

/// Operation of a token: the poll of the eventfd.
const OP_EVENTFD: u8 = 1;
/// Operation of a token: a read or write.
const OP_IO: u8 = 2;

/// Bytes of a read ahead.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Most reads ahead at a time, each with the writes that follow it.
pub const DEPTH_MAX: u32 = 16;
/// Most writes of old data at a time.
const OLD_DATA_MAX: usize = 128;
/// Unit in which zeroes are detected, bytes.
const ZERO_UNIT: u64 = 64 << 10;
/// Credit of a copy without a speed limit.
pub const NO_LIMIT: i64 = i64::MAX / 2;

/// Which side of a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Reading.
    Source,
    /// Writing.
    Target,
    /// The fleecing file.
    Fleece,
}

/// A copy, shared by control threads and its queues.
pub struct Copy {
    /// The disk that is read. None once a copy that has to end needs it no more. Locked when a
    /// queue is attached and when the copy ends, never for a request.
    source: Mutex<Option<Arc<Disk>>>,
    /// Queues that have a handle of the source.
    readers: AtomicU32,
    /// The disk that is written.
    pub target: Arc<Disk>,
    /// The fleecing file of the source.
    pub fleece: Option<Arc<Disk>>,
    /// The blocks that are left, and old data.
    pub work: Work,
    /// Whether whole clusters are written compressed.
    pub compress: bool,
    /// Whether zeroes keep the space of the target.
    pub in_place: bool,
    /// Whether the target reads as zeroes where it was not written.
    pub fresh: bool,
    /// Whether the source, an image, gets what its backing images have. There is no target then.
    populates: bool,
    /// Bytes that may be read ahead. Old data of guests does not count.
    pub credit: AtomicI64,
    /// Most reads ahead at a time.
    pub depth: AtomicU32,
    /// Whether reading ahead is paused.
    pub paused: AtomicBool,
    /// Whether the copy has to end.
    pub stop: AtomicBool,
    /// Bytes that are copied.
    pub done: AtomicU64,
    /// Number of writes of old data.
    pub old_data_writes: AtomicU64,
    /// Slots in use in all queues of the copy.
    under_way: AtomicU32,
    /// Whether the copy has ended: all is copied, it failed, or it was stopped, and nothing is
    /// in flight.
    pub over: AtomicBool,
    /// The positive errno of the first failure; 0 if there is none.
    errno: AtomicI32,
    /// The side of the first failure, as a number.
    side: AtomicU8,
    /// Offset of the first failure, bytes.
    at: AtomicU64,
    /// The thread that is unparked when the copy has ended.
    pub owner: Thread,
}

impl Copy {
    /// Creates a copy of `work` without a speed limit. `owner` is unparked when the copy has ended.
    pub fn new(source: Arc<Disk>, target: Arc<Disk>, work: impl Into<Work>, owner: Thread) -> Self {
        Self {
            source: Mutex::new(Some(source)),
            readers: AtomicU32::new(0),
            target,
            fleece: None,
            work: work.into(),
            compress: false,
            fresh: false,
            in_place: false,
            populates: false,
            credit: AtomicI64::new(NO_LIMIT),
            depth: AtomicU32::new(DEPTH_MAX),
            paused: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            done: AtomicU64::new(0),
            old_data_writes: AtomicU64::new(0),
            under_way: AtomicU32::new(0),
            over: AtomicBool::new(false),
            errno: AtomicI32::new(0),
            side: AtomicU8::new(Side::Source as u8),
            at: AtomicU64::new(0),
            owner,
        }
    }

    /// Creates a copy that gives a qcow2 image what its backing images have in the blocks of
    /// `work`, which no guest looks at.
    pub fn populating(image: Arc<Disk>, work: impl Into<Work>, owner: Thread) -> Self {
        Self { populates: true, ..Self::new(image.clone(), image, work, owner) }
    }

    /// Sets whether the target reads as zeroes where it was not written.
    pub fn onto_fresh(self, fresh: bool) -> Self {
        Self { fresh, ..self }
    }

    /// Makes zeroes keep the space of the target. Clusters of the target that are read at the same
    /// time then stay in place.
    pub fn in_place(self) -> Self {
        Self { in_place: true, ..self }
    }

    /// Sets the fleecing file of the source ([`Disk::set_fleece`]).
    pub fn fleeced(self, fleece: Option<Arc<Disk>>) -> Self {
        Self { fleece, ..self }
    }

    /// Sets whether whole clusters are written compressed.
    pub fn compressed(self, compress: bool) -> Self {
        Self { compress, ..self }
    }

    /// Returns the first failure: its side, its offset in bytes, and the error.
    pub fn failure(&self) -> Option<(Side, u64, std::io::Error)> {
        let errno = self.errno.load(Acquire);
        let all = [Side::Source, Side::Target, Side::Fleece];
        let side = all[usize::from(self.side.load(Relaxed))];
        (errno != 0).then(|| (side, self.at.load(Relaxed), std::io::Error::from_raw_os_error(errno)))
    }

    /// Gives up the source of a copy that was stopped or has failed, once nothing reads it, even if
    /// the target still has requests. Returns whether the copy does not need it any more.
    pub fn leave_source(&self) -> bool {
        let mut source = self.source.locked();
        if self.must_end() && self.readers.load(Acquire) == 0 {
            *source = None;
        }
        source.is_none()
    }

    fn must_end(&self) -> bool {
        self.stop.load(Relaxed) || self.errno.load(Relaxed) != 0
    }

    /// Makes a handle of the source for a queue, unless the copy has to end.
    fn attach_source(&self, uring: &mut Uring) -> Option<DiskHandle> {
        let source = self.source.locked();
        let source = source.as_ref().filter(|_| !self.must_end())?;
        self.readers.fetch_add(1, AcqRel);
        Some(source.attach(uring))
    }

    /// Stores the first failure.
    fn fail(&self, side: Side, at: u64, errno: i32) {
        if self.errno.load(Relaxed) == 0 {
            self.side.store(side as u8, Relaxed);
            self.at.store(at, Relaxed);
            self.errno.store(errno.abs().max(1), Release);
        }
    }
}

/// The data of a slot.
enum Bytes {
    None,
    /// Read ahead by the queue.
    Chunk(AlignedBuf),
    /// Read by a write of a guest.
    OldData(OldData),
}

/// The operation in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It asks whether there is data.
    Seek,
    /// The image copies from below.
    Populate,
    Read,
    /// It reads the fleecing file.
    ReadStored,
    Write,
    /// It frees space of the fleecing file.
    Free,
}

/// A request of the queue: a read ahead with its writes, or a write of old data.
struct CopySlot {
    io: Io,
    bytes: Bytes,
    blocks: Range<u64>,
    /// The blocks whose old data is in the fleecing file, as runs.
    stored: Vec<Range<u64>>,
    /// What was read from the fleecing file, if the chunk has other blocks, too.
    second: Option<AlignedBuf>,
    /// The range on the disk, bytes.
    range: Range<u64>,
    /// Start of the next write, bytes.
    at: u64,
    /// End of the part that counts as done, bytes.
    counted: u64,
    stage: Stage,
    /// Whether all of it is zeroes, which was known without a read.
    zero: bool,
}

impl CopySlot {
    /// Returns the blocks from the first to the last one in the fleecing file.
    fn stored_span(&self) -> Range<u64> {
        let ends = self.stored.first().zip(self.stored.last());
        ends.map_or(0..0, |(first, last)| first.start..last.end)
    }

    /// Puts the blocks from the fleecing file to their places in the chunk.
    fn merge(&mut self, blocks: &Bits) {
        let (start, span) = (self.range.start, blocks.bytes(self.stored_span()));
        let (Bytes::Chunk(chunk), Some(second)) = (&mut self.bytes, &mut self.second) else { return };
        for run in &self.stored {
            let bytes = blocks.bytes(run.clone());
            let len = (bytes.end - bytes.start) as usize;
            let from = &second.bytes()[(bytes.start - span.start) as usize..][..len];
            chunk.bytes()[(bytes.start - start) as usize..][..len].copy_from_slice(from);
        }
    }
}

/// A queue of a copy. A copy may have several queues, on different workers.
pub struct CopyQueue {
    copy: Arc<Copy>,
    stats: Arc<QueueStats>,
    slots: Box<[CopySlot]>,
    free: Vec<u16>,
    spare: Vec<AlignedBuf>,
    /// Number of slots that read ahead or write what they read.
    ahead: u32,
    /// Number of slots that read the source.
    reading: u32,
    /// The block after the last read ahead.
    cursor: u64,
    /// Whether nothing is left to read ahead.
    exhausted: bool,
    source: Option<DiskHandle>,
    target: Option<DiskHandle>,
    fleece: Option<DiskHandle>,
    listen: PollState,
}

// SAFETY: requests refer to buffers of the queue's own slots, on the heap, so they stay valid when
// the queue moves. The handles belong to one thread; `leave` drops them before the queue moves to
// another.
unsafe impl Send for CopyQueue {}

impl CopyQueue {
    /// Creates a queue that is not attached to a worker.
    pub fn new(copy: Arc<Copy>, stats: Arc<QueueStats>) -> Self {
        let count = OLD_DATA_MAX + DEPTH_MAX as usize;
        let slot = || CopySlot {
            io: Io::default(),
            bytes: Bytes::None,
            blocks: 0..0,
            stored: Vec::new(),
            second: None,
            range: 0..0,
            at: 0,
            counted: 0,
            stage: Stage::Write,
            zero: false,
        };
        stats.size.store(count as u16, Relaxed);
        Self {
            copy,
            stats,
            slots: std::iter::repeat_with(slot).take(count).collect(),
            free: (0..count as u16).rev().collect(),
            spare: Vec::new(),
            ahead: 0,
            reading: 0,
            cursor: 0,
            exhausted: false,
            source: None,
            target: None,
            fleece: None,
            listen: PollState::Off,
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether the queue may read ahead.
    fn may_read_ahead(&self) -> bool {
        let copy = &self.copy;
        (!self.exhausted || copy.work.has_more())
            && self.ahead < copy.depth.load(Relaxed).clamp(1, DEPTH_MAX)
            && copy.credit.load(Relaxed) > 0
            && (!copy.paused.load(Relaxed) || copy.work.follows_writes())
    }

    fn must_end(&self) -> bool {
        self.copy.must_end()
    }

    /// Lets go of the source if the copy has to end, and nothing reads it. So the source does not
    /// wait for requests of a target that hangs.
    fn leave_source(&mut self, uring: &mut Uring) {
        if self.reading > 0 || !self.must_end() {
            return;
        }
        if let Some(handle) = self.source.take() {
            handle.detach(uring);
            self.copy.readers.fetch_sub(1, AcqRel);
            self.copy.owner.unpark();
        }
    }

    /// Starts a write of old data.
    fn begin_old_data(&mut self, uring: &mut Uring, place: Token) -> bool {
        self.copy.under_way.fetch_add(1, AcqRel);
        let Some(old) = self.copy.work.take_old() else {
            self.copy.under_way.fetch_sub(1, AcqRel);
            return false;
        };
        self.copy.old_data_writes.fetch_add(1, Relaxed);
        let index = self.free.pop().expect("the caller looked");
        let slot = &mut self.slots[index as usize];
        (slot.range, slot.at, slot.counted, slot.zero) = (old.bytes(), old.offset(), old.offset(), false);
        slot.bytes = Bytes::OldData(old);
        self.write(uring, place, index);
        true
    }

    /// Starts the next read ahead.
    fn begin_chunk(&mut self, uring: &mut Uring, place: Token) -> bool {
        let work = &self.copy.work;
        // Before the blocks are removed from the work, so that no other queue takes that for the
        // end.
        self.copy.under_way.fetch_add(1, AcqRel);
        let index = *self.free.last().expect("the caller looked");
        let slot = &mut self.slots[index as usize];
        let paused = self.copy.paused.load(Relaxed);
        let Some(blocks) = work.next(self.cursor, CHUNK_BYTES, paused, &mut slot.stored) else {
            self.copy.under_way.fetch_sub(1, AcqRel);
            self.exhausted = true;
            return false;
        };
        self.cursor = blocks.end;
        let range = work.blocks().bytes(blocks.clone());
        let len = range.end - range.start;
        let need = match self.copy.populates {
            // The image has the bytes in its own buffer.
            true => 4096,
            false => (len as usize).next_multiple_of(4096).max(CHUNK_BYTES as usize),
        };
        let (all_stored, two) = (slot.stored.first() == Some(&blocks), !slot.stored.is_empty());
        let mut buf = || self.spare.pop().filter(|b| b.len() >= need).or_else(|| AlignedBuf::new(need));
        let second = (two && !all_stored).then(&mut buf);
        let (Some(buf), false) = (buf(), matches!(second, Some(None))) else {
            self.copy.fail(Side::Source, range.start, libc::ENOMEM);
            slot.stored.clear();
            work.has_read(blocks, &mut |w| uring.wake(w.who, w.token));
            self.copy.under_way.fetch_sub(1, AcqRel);
            return false;
        };
        self.copy.credit.fetch_sub(len as i64, Relaxed);
        self.ahead += 1;
        self.free.pop();
        slot.second = second.flatten();
        (slot.at, slot.counted) = (range.start, range.start);
        (slot.range, slot.blocks, slot.zero) = (range.clone(), blocks, false);
        slot.bytes = Bytes::Chunk(buf);
        if all_stored {
            self.read_stored(uring, place, index);
            return true;
        }
        self.reading += 1;
        if two || (self.copy.work.follows_writes() && len < ZERO_UNIT) {
            self.read(uring, place, index);
        } else {
            let (op, stage) = match self.copy.populates {
                true => (Op::Populate, Stage::Populate),
                false => (Op::Seek { look: Look::Disk }, Stage::Seek),
            };
            slot.io.reset(op, range.start, false);
            slot.io.request.len = len;
            slot.stage = stage;
            let handle = self.source.as_ref().expect("armed");
            if let Step::Done(res) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
                self.stepped(uring, place, index, res);
            }
        }
        true
    }

    /// Reads a chunk that may have data.
    fn read(&mut self, uring: &mut Uring, place: Token, index: u16) {
        let slot = &mut self.slots[index as usize];
        let Bytes::Chunk(buf) = &mut slot.bytes else { unreachable!("only chunks are read") };
        slot.io.reset(Op::Read, slot.range.start, false);
        // SAFETY: the slot owns the buffer, which has as many bytes (`begin_chunk`), until the
        // request completes. Slots are boxed and do not move.
        unsafe { slot.io.push(buf.bytes().as_mut_ptr(), (slot.range.end - slot.range.start) as usize) };
        slot.stage = Stage::Read;
        let handle = self.source.as_ref().expect("armed");
        if let Step::Done(res) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.stepped(uring, place, index, res);
        }
    }

    /// Reads old data from the fleecing file: the whole span of it in the chunk at once, with
    /// blocks between that are not used.
    fn read_stored(&mut self, uring: &mut Uring, place: Token, index: u16) {
        let slot = &mut self.slots[index as usize];
        let range = self.copy.work.blocks().bytes(slot.stored_span());
        let Bytes::Chunk(chunk) = &mut slot.bytes else { unreachable!("only chunks are read") };
        let buf = slot.second.as_mut().unwrap_or(chunk);
        slot.io.reset(Op::Read, range.start, false);
        // SAFETY: the slot owns the buffer, which has as many bytes (`begin_chunk`), until the
        // request completes. Slots are boxed and do not move.
        unsafe { slot.io.push(buf.bytes().as_mut_ptr(), (range.end - range.start) as usize) };
        slot.stage = Stage::ReadStored;
        let handle = self.fleece.as_ref().expect("armed, and blocks are in it");
        if let Step::Done(res) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.stepped(uring, place, index, res);
        }
    }

    /// Frees the space of old data in the fleecing file, then the slot. No write stores blocks of
    /// this chunk there any more.
    fn free_stored(&mut self, uring: &mut Uring, place: Token, index: u16) {
        let slot = &mut self.slots[index as usize];
        let range = self.copy.work.blocks().bytes(slot.stored_span());
        slot.io.reset(Op::Discard, range.start, false);
        slot.io.request.len = range.end - range.start;
        slot.stage = Stage::Free;
        let handle = self.fleece.as_ref().expect("armed, and blocks were in it");
        if let Step::Done(_) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.free_slot(uring, index);
        }
    }

    /// Starts the next write of a slot that has its data. Frees the slot after the last write.
    fn write(&mut self, uring: &mut Uring, place: Token, index: u16) {
        loop {
            let slot = &mut self.slots[index as usize];
            // After each part, since to compress a whole chunk takes long.
            self.copy.done.fetch_add(slot.at - slot.counted, Relaxed);
            slot.counted = slot.at;
            if slot.at == slot.range.end {
                QueueStats::add(&self.stats.requests, 1);
                self.copy.work.has_copied(&slot.blocks, &mut |w| uring.wake(w.who, w.token));
                match slot.stored.is_empty() {
                    true => self.free_slot(uring, index),
                    false => self.free_stored(uring, place, index),
                }
                return;
            }
            let bytes = match &mut slot.bytes {
                Bytes::Chunk(buf) => buf.bytes(),
                Bytes::OldData(old) => old.contents(),
                Bytes::None => unreachable!("a slot in use has bytes"),
            };
            let unit = match self.copy.compress {
                true => self.copy.work.blocks().granularity(),
                false => ZERO_UNIT,
            };
            let (skip, end) =
                ((slot.at - slot.range.start) as usize, (slot.range.end - slot.range.start) as usize);
            let mut parts = bytes[skip..end].chunks(unit as usize);
            let first = parts.next().expect("not at its end");
            let zero = slot.zero || is_zero(first);
            let mut len = first.len();
            if slot.zero {
                len = end - skip;
            } else if zero || !self.copy.compress {
                len += parts.take_while(|part| is_zero(part) == zero).map(<[u8]>::len).sum::<usize>();
            }
            let at = slot.at;
            slot.at += len as u64;
            if zero && self.copy.fresh {
                continue;
            }
            // Where the target continues behind the copy, the last cluster is not a whole one.
            let packs = self.copy.compress
                && (len as u64 == unit || at + len as u64 == self.copy.target.size_bytes());
            let op = match (zero, packs) {
                (true, _) => Op::WriteZeroes { unmap: !self.copy.in_place },
                (false, true) => Op::WriteCompressed,
                (false, false) => Op::Write,
            };
            slot.io.reset(op, at, false);
            slot.stage = Stage::Write;
            if zero {
                slot.io.request.len = len as u64;
            } else {
                // SAFETY: the slot owns the chunk or the old data until the request completes, and
                // `len` bytes are left in it. Slots are boxed and do not move.
                unsafe { slot.io.push(bytes[skip..].as_mut_ptr(), len) };
            }
            let handle = self.target.as_ref().expect("armed");
            match handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
                Step::Wait => return,
                Step::Done(res) if res < 0 => {
                    self.failed(uring, index, Side::Target, at, res);
                    return;
                }
                Step::Done(_) => QueueStats::add(&self.stats.write_bytes, len as u64),
            }
        }
    }

    /// Handles the result of a slot's operation.
    fn stepped(&mut self, uring: &mut Uring, place: Token, index: u16, res: i32) {
        let slot = &mut self.slots[index as usize];
        let (stage, at) = (slot.stage, slot.io.request.offset);
        if stage == Stage::Seek && res >= 0 {
            let found = slot.io.request.found.filter(|f| f.extent == Extent::Zero);
            slot.zero = found.is_some_and(|f| f.len >= slot.range.end - slot.range.start);
            if !slot.zero && !self.must_end() {
                self.read(uring, place, index);
                return;
            }
        }
        if stage == Stage::Free {
            // If the file system cannot do that, the file stays as large as it is.
            self.free_slot(uring, index);
            return;
        }
        let slot = &mut self.slots[index as usize];
        if matches!(stage, Stage::Seek | Stage::Read | Stage::Populate) {
            // The read has ended, even if it failed.
            self.reading -= 1;
            self.copy.work.has_read(slot.blocks.clone(), &mut |w| uring.wake(w.who, w.token));
        }
        if res < 0 {
            let side = match stage {
                Stage::Write | Stage::Populate => Side::Target,
                Stage::ReadStored => Side::Fleece,
                _ => Side::Source,
            };
            self.failed(uring, index, side, at, res);
            return;
        }
        if stage == Stage::Populate {
            let slot = &mut self.slots[index as usize];
            slot.zero = true;
            slot.at = slot.range.end;
        }
        let slot = &self.slots[index as usize];
        if stage == Stage::Read {
            QueueStats::add(&self.stats.read_bytes, slot.range.end - slot.range.start);
        } else if stage == Stage::Write && !matches!(slot.io.request.op, Op::WriteZeroes { .. }) {
            QueueStats::add(&self.stats.write_bytes, slot.io.request.len);
        }
        if self.must_end() {
            self.free_slot(uring, index);
            return;
        }
        if stage == Stage::Read && !slot.stored.is_empty() {
            self.read_stored(uring, place, index);
            return;
        }
        if stage == Stage::ReadStored {
            self.slots[index as usize].merge(self.copy.work.blocks());
        }
        self.write(uring, place, index);
    }

    /// Ends the copy after a failure.
    fn failed(&mut self, uring: &mut Uring, index: u16, side: Side, at: u64, errno: i32) {
        self.copy.fail(side, at, errno);
        QueueStats::add(&self.stats.errors, 1);
        self.copy.work.end(&mut |w| uring.wake(w.who, w.token));
        self.free_slot(uring, index);
    }

    fn free_slot(&mut self, uring: &mut Uring, index: u16) {
        let slot = &mut self.slots[index as usize];
        match std::mem::replace(&mut slot.bytes, Bytes::None) {
            Bytes::Chunk(buf) => {
                self.ahead -= 1;
                self.spare.push(buf);
            }
            Bytes::OldData(old) => self.copy.work.old_is_written(old, &mut |w| uring.wake(w.who, w.token)),
            Bytes::None => unreachable!("a slot in use has bytes"),
        }
        self.spare.extend(slot.second.take());
        slot.stored.clear();
        self.copy.under_way.fetch_sub(1, AcqRel);
        self.free.push(index);
    }

    /// Ends the copy if all is done and nothing is in flight.
    fn look_for_end(&mut self, uring: &mut Uring) {
        if self.copy.over.load(Relaxed) {
            return;
        }
        if let Some(errno) = self.copy.work.has_ended().filter(|e| *e < 0) {
            // A write of a guest could not read the old data.
            let fleece = self.copy.work.has_fleece_failed();
            self.copy.fail(if fleece { Side::Fleece } else { Side::Source }, 0, errno);
        }
        let all_done = || self.exhausted && self.copy.work.is_over();
        if !(self.must_end() || all_done()) {
            return;
        }
        // After the check of the work above: see `begin_chunk`.
        if self.copy.under_way.load(SeqCst) > 0 {
            return;
        }
        if self.must_end() {
            // The queue takes no more old data, so no write may wait for that.
            self.copy.work.end(&mut |w| uring.wake(w.who, w.token));
        }
        self.copy.over.store(true, Release);
        self.copy.owner.unpark();
    }
}

impl Queue for CopyQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.source.is_none() {
            self.source = self.copy.attach_source(uring);
        }
        self.target.get_or_insert_with(|| self.copy.target.attach(uring));
        if let Some(file) = &self.copy.fleece {
            self.fleece.get_or_insert_with(|| file.attach(uring));
        }
        self.listen.start(uring, self.copy.work.eventfd(), place.with(0, OP_EVENTFD));
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        if self.must_end() {
            // At once, even if requests are in flight.
            self.copy.work.end(&mut |w| uring.wake(w.who, w.token));
        }
        while taken < budget && !self.free.is_empty() && !self.must_end() {
            let old = self.copy.work.has_old() && self.begin_old_data(uring, place);
            let begun = old || (self.may_read_ahead() && self.begin_chunk(uring, place));
            if !begun {
                break;
            }
            taken += 1;
        }
        self.leave_source(uring);
        self.look_for_end(uring);
        self.stats.in_flight.store(self.in_flight() as u32, Relaxed);
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if token.op == OP_EVENTFD {
            if !more && self.listen.ended().restarts() {
                self.arm(uring, token);
            }
            return 0;
        }
        let slot = &mut self.slots[token.slot as usize];
        let handle = match slot.stage {
            Stage::Write => &self.target,
            Stage::ReadStored | Stage::Free => &self.fleece,
            Stage::Seek | Stage::Read | Stage::Populate => &self.source,
        };
        let Some(handle) = handle else { return 0 };
        if let Step::Done(res) = handle.resume(uring, &mut slot.io, token, result) {
            self.stepped(uring, token, token.slot, res);
            self.leave_source(uring);
            self.look_for_end(uring);
            self.stats.in_flight.store(self.in_flight() as u32, Relaxed);
            return 1;
        }
        0
    }

    fn publish(&mut self) -> bool {
        false
    }

    fn has_work(&self) -> bool {
        if self.copy.over.load(Relaxed) {
            return false;
        }
        let let_go = self.copy.work.has_ended().is_some();
        if let_go || self.must_end() {
            // Also if others have let guests go: the source waits for this queue (`leave_source`).
            let holds = self.must_end() && self.source.is_some() && self.reading == 0;
            return !let_go || holds || self.copy.under_way.load(Relaxed) == 0;
        }
        !self.free.is_empty() && (self.copy.work.has_old() || self.may_read_ahead())
    }

    fn wake(&mut self) {
        self.copy.work.set_asleep(false);
    }

    fn sleep(&mut self, _uring: &mut Uring, _place: Token, _after: u32) -> bool {
        self.copy.work.set_asleep(true);
        let work = self.has_work();
        if work {
            self.copy.work.set_asleep(false);
        }
        work
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.listen.end(uring, place.with(0, OP_EVENTFD));
    }

    fn at_rest(&self) -> bool {
        self.in_flight() == 0 && self.listen == PollState::Off
    }

    fn leave(&mut self, uring: &mut Uring) {
        let source = self.source.take().inspect(|_| {
            self.copy.readers.fetch_sub(1, AcqRel);
        });
        let handles = [source, self.target.take(), self.fleece.take()];
        for handle in handles.into_iter().flatten() {
            handle.detach(uring);
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation on the io_uring at a time.
        self.slots.len() as u32
    }
}

#[cfg(test)]
pub(crate) mod tests;
