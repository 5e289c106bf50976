//! A queue that copies one disk to another: it goes ahead through what is to be copied, and writes to the target what
//! guests' writes had read before them (`block/copy_before_write`). Attached to a worker like all queues.
//!
//! What must never happen: a block left out and not reported; a guest that waits for a copy which has ended.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering::*};
use std::thread::Thread;

use vshunt_engine::{PollState, Queue, QueueStats, Token, Uring};

use crate::{AlignedBuf, CopyBeforeWrite, Disk, DiskHandle, Extent, Io, Op, Piece, Step};

const OP_BELL: u8 = 1;
const OP_IO: u8 = 2;

/// Bytes that are read ahead at once.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Reads ahead at most, with the writes that follow them.
pub const DEPTH_MAX: u32 = 16;
/// Pieces of guests that are written at once, at most.
const PIECES_MAX: usize = 128;
/// What is zeroes is told apart in units of it.
const ZERO_UNIT: u64 = 64 << 10;
/// Credit of who is not held back.
pub const NO_LIMIT: i64 = i64::MAX / 2;

/// Which side of a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Reading.
    Source,
    /// Writing.
    Target,
}

/// A copy: what control and the queue share.
pub struct Copy {
    /// Read from.
    pub source: Arc<Disk>,
    /// Written to.
    pub target: Arc<Disk>,
    /// What is left to do.
    pub work: Arc<CopyBeforeWrite>,
    /// Whole clusters are written compressed.
    pub compress: bool,
    /// Space of the target stays where it is.
    pub keep: bool,
    /// The target reads as zeroes where it was not written.
    pub fresh: bool,
    /// Bytes that may be read ahead; guests' pieces are not counted.
    pub credit: AtomicI64,
    /// Reads ahead at a time.
    pub depth: AtomicU32,
    /// Nothing is read ahead.
    pub paused: AtomicBool,
    /// It is to end.
    pub stop: AtomicBool,
    /// Bytes dealt with.
    pub done: AtomicU64,
    /// Pieces that guests' writes had read before them.
    pub pieces: AtomicU64,
    /// Slots in use, of all queues that copy.
    under_way: AtomicU32,
    /// It is over: all is copied, or it failed, or was stopped; nothing is under way.
    pub over: AtomicBool,
    /// errno of the first failure (positive), 0 for none; its side and its place.
    errno: AtomicI32,
    at_target: AtomicBool,
    at: AtomicU64,
    /// Woken when it is over.
    pub owner: Thread,
}

impl Copy {
    /// One that is not held back, of the work given. `owner` is unparked when it is over.
    pub fn new(source: Arc<Disk>, target: Arc<Disk>, work: Arc<CopyBeforeWrite>, owner: Thread) -> Self {
        Self {
            source,
            target,
            work,
            compress: false,
            fresh: false,
            keep: false,
            credit: AtomicI64::new(NO_LIMIT),
            depth: AtomicU32::new(DEPTH_MAX),
            paused: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            done: AtomicU64::new(0),
            pieces: AtomicU64::new(0),
            under_way: AtomicU32::new(0),
            over: AtomicBool::new(false),
            errno: AtomicI32::new(0),
            at_target: AtomicBool::new(false),
            at: AtomicU64::new(0),
            owner,
        }
    }

    /// Whether the target reads as zeroes.
    pub fn onto_fresh(self, fresh: bool) -> Self {
        Self { fresh, ..self }
    }

    /// Zeroes leave space where it is: what is read of the target meanwhile stays in its place.
    pub fn in_place(self) -> Self {
        Self { keep: true, ..self }
    }

    /// Whether whole clusters are written compressed.
    pub fn compressed(self, compress: bool) -> Self {
        Self { compress, ..self }
    }

    /// The first failure: its side, its place on the disk in bytes, and why.
    pub fn failure(&self) -> Option<(Side, u64, std::io::Error)> {
        let errno = self.errno.load(Acquire);
        let side = if self.at_target.load(Relaxed) { Side::Target } else { Side::Source };
        (errno != 0).then(|| (side, self.at.load(Relaxed), std::io::Error::from_raw_os_error(errno)))
    }

    fn fail(&self, side: Side, at: u64, errno: i32) {
        if self.errno.load(Relaxed) == 0 {
            self.at_target.store(side == Side::Target, Relaxed);
            self.at.store(at, Relaxed);
            self.errno.store(errno.abs().max(1), Release);
        }
    }
}

/// Where the bytes of a slot are.
enum Bytes {
    None,
    /// Read ahead; the blocks are its own.
    Chunk(AlignedBuf),
    /// A guest's write had them read.
    Piece(Piece),
}

/// What the operation under way is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Asking whether there is data.
    Seek,
    Read,
    Write,
}

struct Slot {
    io: Io,
    bytes: Bytes,
    blocks: Range<u64>,
    /// Of the disk.
    range: Range<u64>,
    /// Up to where it is written.
    at: u64,
    stage: Stage,
    /// All of it is zeroes, which was known without reading.
    zero: bool,
}

/// A queue of a copy; there may be several, on workers of their own.
pub struct CopyQueue {
    copy: Arc<Copy>,
    stats: Arc<QueueStats>,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    spare: Vec<AlignedBuf>,
    /// Slots that read ahead or write what they read.
    ahead: u32,
    /// The next block to look at.
    cursor: u64,
    /// Nothing is left to be read ahead.
    exhausted: bool,
    source: Option<DiskHandle>,
    target: Option<DiskHandle>,
    listen: PollState,
}

// SAFETY: what its requests name are buffers of its own slots, which go where it goes; its handles, which are a
// thread's, are None while it moves (`leave`).
unsafe impl Send for CopyQueue {}

impl CopyQueue {
    /// A queue that is not yet on a worker.
    pub fn new(copy: Arc<Copy>, stats: Arc<QueueStats>) -> Self {
        let count = PIECES_MAX + DEPTH_MAX as usize;
        let slot = || Slot {
            io: Io::default(),
            bytes: Bytes::None,
            blocks: 0..0,
            range: 0..0,
            at: 0,
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
            cursor: 0,
            exhausted: false,
            source: None,
            target: None,
            listen: PollState::Off,
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether it may read ahead.
    fn may_go_ahead(&self) -> bool {
        let copy = &self.copy;
        !self.exhausted
            && self.ahead < copy.depth.load(Relaxed).clamp(1, DEPTH_MAX)
            && copy.credit.load(Relaxed) > 0
            && !copy.paused.load(Relaxed)
    }

    fn has_ended(&self) -> bool {
        self.copy.stop.load(Relaxed) || self.copy.errno.load(Relaxed) != 0
    }

    /// Writes what a guest's write had read.
    fn begin_piece(&mut self, uring: &mut Uring, place: Token) -> bool {
        self.copy.under_way.fetch_add(1, AcqRel);
        let Some(piece) = self.copy.work.take() else {
            self.copy.under_way.fetch_sub(1, AcqRel);
            return false;
        };
        self.copy.pieces.fetch_add(1, Relaxed);
        let index = self.free.pop().expect("the caller looked");
        let slot = &mut self.slots[index as usize];
        (slot.range, slot.at, slot.zero) = (piece.bytes(), piece.offset(), false);
        slot.bytes = Bytes::Piece(piece);
        self.write(uring, place, index);
        true
    }

    /// Reads the next chunk.
    fn begin_chunk(&mut self, uring: &mut Uring, place: Token) -> bool {
        let work = &self.copy.work;
        // Before it is taken off what is left to do, so that no other queue takes that for the end.
        self.copy.under_way.fetch_add(1, AcqRel);
        let Some(blocks) = work.ahead(self.cursor, CHUNK_BYTES) else {
            self.copy.under_way.fetch_sub(1, AcqRel);
            self.exhausted = true;
            return false;
        };
        self.cursor = blocks.end;
        let range = work.todo().bytes(blocks.clone());
        let len = range.end - range.start;
        let need = (len as usize).next_multiple_of(4096).max(CHUNK_BYTES as usize);
        let buf = self.spare.pop().filter(|b| b.len() >= need).or_else(|| AlignedBuf::new(need));
        let Some(buf) = buf else {
            self.copy.fail(Side::Source, range.start, libc::ENOMEM);
            work.copied(blocks, &mut |w| uring.wake(w.who, w.token));
            self.copy.under_way.fetch_sub(1, AcqRel);
            return false;
        };
        self.copy.credit.fetch_sub(len as i64, Relaxed);
        self.ahead += 1;
        let index = self.free.pop().expect("the caller looked");
        let slot = &mut self.slots[index as usize];
        slot.io.reset(Op::Seek { own: false }, range.start, false);
        slot.io.len = len;
        (slot.at, slot.range, slot.blocks, slot.zero) = (range.start, range, blocks, false);
        slot.bytes = Bytes::Chunk(buf);
        slot.stage = Stage::Seek;
        let handle = self.source.as_ref().expect("armed");
        if let Step::Done(res) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.stepped(uring, place, index, res);
        }
        true
    }

    /// Reads a chunk that may have data.
    fn read(&mut self, uring: &mut Uring, place: Token, index: u16) {
        let slot = &mut self.slots[index as usize];
        let Bytes::Chunk(buf) = &mut slot.bytes else { unreachable!("pieces are read") };
        slot.io.reset(Op::Read, slot.range.start, false);
        // SAFETY: the buffer is the slot's until the read is done, and slots do not move.
        unsafe { slot.io.push(buf.bytes().as_mut_ptr(), (slot.range.end - slot.range.start) as usize) };
        slot.stage = Stage::Read;
        let handle = self.source.as_ref().expect("armed");
        if let Step::Done(res) = handle.start(uring, &mut slot.io, place.with(index, OP_IO)) {
            self.stepped(uring, place, index, res);
        }
    }

    /// Begins the next write of a slot that has its bytes; frees it after the last.
    fn write(&mut self, uring: &mut Uring, place: Token, index: u16) {
        loop {
            let slot = &mut self.slots[index as usize];
            if slot.at == slot.range.end {
                let len = slot.range.end - slot.range.start;
                self.copy.done.fetch_add(len, Relaxed);
                QueueStats::add(&self.stats.requests, 1);
                self.free_slot(uring, index);
                return;
            }
            let bytes = match &mut slot.bytes {
                Bytes::Chunk(buf) => buf.bytes(),
                Bytes::Piece(piece) => piece.contents(),
                Bytes::None => unreachable!("a slot in use has bytes"),
            };
            let unit = match self.copy.compress {
                true => self.copy.work.todo().granularity(),
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
            let op = match (zero, self.copy.compress) {
                (true, _) => Op::WriteZeroes { unmap: !self.copy.keep },
                (false, true) => Op::WriteCompressed,
                (false, false) => Op::Write,
            };
            slot.io.reset(op, at, false);
            slot.stage = Stage::Write;
            if zero {
                slot.io.len = len as u64;
            } else {
                // SAFETY: as in `begin_chunk`; a piece is the slot's likewise.
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

    /// A slot's read or write is over.
    fn stepped(&mut self, uring: &mut Uring, place: Token, index: u16, res: i32) {
        let slot = &mut self.slots[index as usize];
        let (stage, at) = (slot.stage, slot.io.offset);
        if stage == Stage::Seek && res >= 0 {
            let found = slot.io.found.filter(|f| f.extent == Extent::Zero);
            slot.zero = found.is_some_and(|f| f.len >= slot.range.end - slot.range.start);
            if !slot.zero && !self.has_ended() {
                self.read(uring, place, index);
                return;
            }
        }
        let slot = &mut self.slots[index as usize];
        if stage != Stage::Write {
            // Failed or not, nobody reads it any more.
            self.copy.work.copied(slot.blocks.clone(), &mut |w| uring.wake(w.who, w.token));
        }
        if res < 0 {
            let side = if stage == Stage::Write { Side::Target } else { Side::Source };
            self.failed(uring, index, side, at, res);
            return;
        }
        let slot = &self.slots[index as usize];
        if stage == Stage::Read {
            QueueStats::add(&self.stats.read_bytes, slot.range.end - slot.range.start);
        } else if stage == Stage::Write && !matches!(slot.io.op, Op::WriteZeroes { .. }) {
            QueueStats::add(&self.stats.write_bytes, slot.io.len);
        }
        if self.has_ended() {
            self.free_slot(uring, index);
            return;
        }
        self.write(uring, place, index);
    }

    /// Ends the copy.
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
            Bytes::Piece(piece) => self.copy.work.written(piece, &mut |w| uring.wake(w.who, w.token)),
            Bytes::None => unreachable!("a slot in use has bytes"),
        }
        self.copy.under_way.fetch_sub(1, AcqRel);
        self.free.push(index);
    }

    /// Looks whether all is done, with nothing of its own under way.
    fn look_for_end(&mut self, uring: &mut Uring) {
        if self.copy.over.load(Relaxed) {
            return;
        }
        if let Some(errno) = self.copy.work.has_ended().filter(|e| *e < 0) {
            // A guest's write found that it cannot be read.
            self.copy.fail(Side::Source, 0, errno);
        }
        let all_done = || self.exhausted && self.copy.work.is_over();
        if !(self.has_ended() || all_done()) {
            return;
        }
        // After what is left to do was looked at.
        if self.copy.under_way.load(SeqCst) > 0 {
            return;
        }
        if self.has_ended() {
            // Nobody takes pieces any more: no write is to wait for that.
            self.copy.work.end(&mut |w| uring.wake(w.who, w.token));
        }
        self.copy.over.store(true, Release);
        self.copy.owner.unpark();
    }
}

impl Queue for CopyQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.source.get_or_insert_with(|| self.copy.source.attach(uring));
        self.target.get_or_insert_with(|| self.copy.target.attach(uring));
        self.listen.begin(uring, self.copy.work.eventfd(), place.with(0, OP_BELL));
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        if self.has_ended() {
            // At once, whatever is still under way.
            self.copy.work.end(&mut |w| uring.wake(w.who, w.token));
        }
        while taken < budget && !self.free.is_empty() && !self.has_ended() {
            let piece = self.copy.work.has_full() && self.begin_piece(uring, place);
            let begun = piece || (self.may_go_ahead() && self.begin_chunk(uring, place));
            if !begun {
                break;
            }
            taken += 1;
        }
        self.look_for_end(uring);
        self.stats.in_flight.store(self.in_flight() as u32, Relaxed);
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if token.op == OP_BELL {
            if !more && self.listen.ended().restarts() {
                self.arm(uring, token);
            }
            return 0;
        }
        let slot = &mut self.slots[token.slot as usize];
        let handle = if slot.stage == Stage::Write { &self.target } else { &self.source };
        let Some(handle) = handle else { return 0 };
        if let Step::Done(res) = handle.resume(uring, &mut slot.io, token, result) {
            self.stepped(uring, token, token.slot, res);
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
        if let_go || self.has_ended() {
            return !let_go || self.copy.under_way.load(Relaxed) == 0;
        }
        !self.free.is_empty() && (self.copy.work.has_full() || self.may_go_ahead())
    }

    fn wake(&mut self) {
        self.copy.work.sleeps(false);
    }

    fn sleep(&mut self, _ring: &mut Uring, _place: Token, _after: u32) -> bool {
        self.copy.work.sleeps(true);
        let work = self.has_work();
        if work {
            self.copy.work.sleeps(false);
        }
        work
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.listen.end(uring, place.with(0, OP_BELL));
    }

    fn at_rest(&self) -> bool {
        self.in_flight() == 0 && self.listen == PollState::Off
    }

    fn leave(&mut self, uring: &mut Uring) {
        for handle in [self.source.take(), self.target.take()].into_iter().flatten() {
            handle.detach(uring);
        }
    }

    fn waits_max(&self) -> u32 {
        // A request has one operation on the ring at a time.
        self.slots.len() as u32
    }
}

/// Whether all bytes are 0.
fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: any bytes are a u64.
    let (head, words, tail) = unsafe { bytes.align_to::<u64>() };
    let zero = |b: &u8| *b == 0;
    // In stretches, so that what is not zero is seen soon and the rest is read by wide instructions.
    head.iter().all(zero)
        && words.chunks(64).all(|c| c.iter().fold(0, |a, w| a | w) == 0)
        && tail.iter().all(zero)
}

#[cfg(test)]
mod tests;
