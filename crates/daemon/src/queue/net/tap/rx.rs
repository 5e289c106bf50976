//! Frames to the guest: reads from a tap's queue, straight into the receive buffers that the guest offers.
//!
//! Reads are operations on the worker's ring that never wait; a batch of them is through when the enter that sends it
//! returns, so each gets the frame after the one before.
//!
//! How long a frame is shows only when it was read. With merged buffers a frame may fill many, but while frames are short a
//! read gets one buffer, and behind it a piece of memory of ours (*spill*) that holds what does not fit: the first frames of
//! a row of long ones are copied, and so are the few that found a place other than theirs ([`Rx::settle`]). While frames are
//! long, one is read at a time, with buffers for the longest.
//!
//! What must never happen: a frame lost for want of buffers. It waits for them.

use std::os::fd::RawFd;

use virtio::mem;
use virtio::ring::Seg;
use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use super::super::buffers::{Buffers, NoRoom, SEGS_MAX};
use super::super::line::Line;
use super::super::looks::Looks;
use super::super::rings::Side;
use super::super::tap_file::{Op, TapFile};
use super::super::{BATCH, FRAME_MAX};

/// Frames after the last one of several buffers for which long ones are reckoned with.
const LONG_HOLD: u8 = 64;
/// Pieces that a batch's reads name at most: the spill is one of each.
const IOVECS: usize = 2 * (SEGS_MAX + 1);

/// One frame, wherever its bytes are.
#[derive(Clone, Copy, Default)]
struct Read {
    /// Its buffers: the first, how many, their bytes.
    first: usize,
    bufs: usize,
    capacity: usize,
    /// As the kernel gave it: bytes, with the header, or a negative errno.
    result: i32,
    /// All of it is in the spill.
    staged: bool,
}

/// See the module.
pub(super) struct Rx {
    pub(super) to: Buffers,
    /// The batch on the ring, or frames that wait for buffers.
    reads: Vec<Read>,
    outstanding: u32,
    /// What the operations name. Never grows: they were told where it lies.
    iovecs: Vec<libc::iovec>,
    /// [`spill_bytes`](Self::spill_bytes) for each read: where a frame lies whole if it is staged. Reserved, and touched as far
    /// as it is used.
    spill: Vec<u8>,
    /// When to read.
    pub(super) looks: Looks,
    /// Long frames are reckoned with for so many more.
    long: u8,
}

// SAFETY: as of `Tx`: the raw pointers (iovecs) lead into the guest's memory, which the line's table keeps mapped wherever
// the queue goes, or into the spill, and are used by operations alone, of which there are none while it moves.
unsafe impl Send for Rx {}

impl Rx {
    pub(super) fn new(to: Buffers) -> Self {
        let spill = Vec::with_capacity((to.format.header + FRAME_MAX + 1) * BATCH as usize);
        Self {
            to,
            reads: Vec::with_capacity(BATCH as usize),
            outstanding: 0,
            iovecs: Vec::with_capacity(IOVECS),
            spill,
            looks: Looks::new(),
            long: 0,
        }
    }

    /// Bytes of a read: the longest frame with its header, and one more, by which one that is too long shows.
    fn spill_bytes(&self) -> usize {
        self.to.format.header + FRAME_MAX + 1
    }

    fn spill_at(&mut self, read: usize) -> *mut u8 {
        debug_assert!(read < BATCH as usize);
        // SAFETY: `new` reserved that for each of a batch's reads.
        unsafe { self.spill.as_mut_ptr().add(read * self.spill_bytes()) }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.outstanding
    }

    pub(super) fn at_rest(&self) -> bool {
        self.outstanding == 0 && self.looks.at_rest() && self.to.line.at_rest()
    }

    /// The guest uses the pair no more, or not now: frames that wait for its buffers are dropped.
    pub(super) fn drop_held(&mut self) {
        if self.holds() {
            let lost = self.reads.iter().filter(|read| read.result > 0).count() as u64;
            self.reads.clear();
            self.to.line.dropped(DropReason::NoBuffers, lost);
        }
    }

    /// Whether frames that were read wait for buffers.
    fn holds(&self) -> bool {
        self.outstanding == 0 && !self.reads.is_empty()
    }

    pub(super) fn has_work(&self) -> bool {
        match (self.outstanding, self.holds()) {
            (1.., _) => false,
            (0, true) => self.to.line.has_avail(),
            (0, false) => self.looks.ready && self.to.has_any(),
        }
    }

    /// Asks for a kick where only more buffers would help. Whether they are there already.
    pub(super) fn sleep(&mut self) -> bool {
        let wants = self.holds() || (self.looks.ready && self.to.len() == 0);
        if self.to.line.broken || !wants {
            return self.has_work();
        }
        self.to.line.vring.enable_kick() || self.has_work()
    }

    /// Begins to read frames, as many as there are buffers for. Returns how many waited for buffers and have them now.
    pub(super) fn take(&mut self, uring: &mut Uring, file: TapFile, token: Token, budget: u32) -> u32 {
        if self.outstanding > 0 || self.to.line.broken {
            return 0;
        }
        let waited = if self.holds() { self.reserve() } else { 0 };
        if !self.reads.is_empty() || !self.looks.ready {
            return waited;
        }
        let long = self.to.format.merge && self.long > 0;
        let limit = if long { 1 } else { self.looks.batch.min(budget) };
        self.iovecs.clear();
        let mut next = 0;
        while self.outstanding < limit && self.iovecs.len() < IOVECS - SEGS_MAX {
            let Some(read) = self.gather(next, long) else { break };
            next = read.first + read.bufs;
            self.read(uring, file, token, read);
        }
        waited
    }

    /// Buffers for one read, from place `first` on.
    fn gather(&mut self, first: usize, long: bool) -> Option<Read> {
        let (mut next, mut capacity, mut segs) = (first, 0, 0);
        let want = if long { self.to.format.header + FRAME_MAX } else { 1 };
        while capacity < want {
            let Some(buf) = self.to.get(next) else { break };
            segs += buf.segs.len();
            if segs > SEGS_MAX && next > first {
                break;
            }
            capacity += buf.bytes;
            next += 1;
        }
        (next > first).then_some(Read { first, bufs: next - first, capacity, ..Read::default() })
    }

    fn read(&mut self, uring: &mut Uring, file: TapFile, token: Token, read: Read) {
        let slot = self.outstanding as usize;
        self.outstanding += 1;
        self.reads.push(read);
        let rest = self.spill_bytes().saturating_sub(read.capacity);
        // Behind as many bytes as the buffers hold, so that a frame can be made whole there.
        let spill = self.spill_at(slot).wrapping_add(read.capacity);
        let at = self.iovecs.len();
        for buf in self.to.range(read.first, read.bufs) {
            let iovec = |seg: &Seg| libc::iovec { iov_base: seg.ptr.cast(), iov_len: seg.len as usize };
            self.iovecs.extend(buf.segs.iter().map(iovec));
        }
        if rest > 0 {
            self.iovecs.push(libc::iovec { iov_base: spill.cast(), iov_len: rest });
        }
        let iovecs = &self.iovecs[at..];
        // SAFETY: the segments were translated on taking the chain, and the line's memory table, which the queue keeps until
        // it rests, has them mapped; the spill is ours, and this read's alone. `iovecs` has room for one more read whenever
        // one begins (`take`), so it did not move.
        unsafe { file.begin(uring, Op::Readv(iovecs), Token { slot: slot as u16, ..token }) }
    }

    /// A read is over. With the last of a batch, the frames go to the guest; returns how many.
    pub(super) fn complete(
        &mut self,
        uring: &mut Uring,
        slot: u16,
        poll: (RawFd, Token),
        result: i32,
    ) -> u32 {
        self.reads[usize::from(slot)].result = result;
        self.outstanding -= 1;
        if self.outstanding > 0 {
            return 0;
        }
        let asked = self.reads.len() as u32;
        let found = self.reads.iter().filter(|read| read.result > 0).count() as u32;
        let bad = self.reads.iter().map(|read| read.result).find(|r| *r < 0 && *r != -libc::EAGAIN);
        match bad {
            None => self.looks.found(uring, poll, asked, found),
            Some(result) => {
                let e = std::io::Error::from_raw_os_error(-result);
                self.to.line.break_off(&format!(
                    "its tap can no longer be read: {e} (if the interface is gone, remove the export and its \
                     network, then add both again)"
                ));
            }
        }
        self.reserve()
    }

    /// Gives the frames that were read to the guest, in order, each in the buffers at the front: mostly in those that it was
    /// read into. Where an earlier read found nothing, or an earlier frame took more buffers than it had, it is copied.
    /// Frames for which there are no buffers stay. Returns how many got through, or never will.
    fn reserve(&mut self) -> u32 {
        let (mut used, mut frames, mut bytes, mut dropped) = (0, 0, 0, 0);
        let mut held = None;
        for i in 0..self.reads.len() {
            let read = self.reads[i];
            let Ok(len @ 1..) = usize::try_from(read.result) else { continue };
            if len < self.to.format.header || len >= self.spill_bytes() {
                dropped += 1;
                continue;
            }
            let in_place = !read.staged && read.first == used && len <= read.capacity;
            match if in_place { self.to.room(used, len) } else { self.place(i, used, len) } {
                Ok(count) => {
                    self.to.show(used, count, len);
                    self.long = if count > 1 { LONG_HOLD } else { self.long.saturating_sub(1) };
                    used += count;
                    frames += 1;
                    bytes += (len - self.to.format.header) as u64;
                }
                Err(NoRoom::Ever) => dropped += 1,
                Err(NoRoom::Now) => {
                    self.stage_from(i);
                    held = Some(i);
                    break;
                }
            }
        }
        match held {
            None => self.reads.clear(),
            // The others stay where they are, for each has its place in the spill.
            Some(first) => self.reads[..first].iter_mut().for_each(|read| read.result = 0),
        }
        self.to.shown(used);
        if frames > 0 {
            self.to.line.received(frames, bytes);
        }
        if dropped > 0 {
            self.to.line.dropped(DropReason::TooLong, dropped);
        }
        (frames + dropped) as u32
    }

    /// Copies frame `i` of `len` bytes into the buffers from place `first` on; says how many.
    #[cold]
    fn place(&mut self, i: usize, first: usize, len: usize) -> Result<usize, NoRoom> {
        let count = self.to.room(first, len)?;
        // Its new place may be where later frames lie.
        self.stage_from(i);
        let from = self.spill_at(i);
        // SAFETY: the frame lies whole in the spill (staged), which is not the guest's.
        unsafe { self.to.copy(&mut self.to.start(first), from, len) };
        Ok(count)
    }

    /// Makes frame `i` and those after it whole in the spill, so that their buffers can have others.
    #[cold]
    fn stage_from(&mut self, i: usize) {
        for i in i..self.reads.len() {
            let read = self.reads[i];
            let Ok(len @ 1..) = usize::try_from(read.result) else { continue };
            // What is too long goes nowhere.
            if read.staged || len >= self.spill_bytes() {
                continue;
            }
            let to = self.spill_at(i);
            let head = len.min(read.capacity);
            let mut done = 0;
            for seg in self.to.range(read.first, read.bufs).flat_map(|buf| &buf.segs) {
                let n = (seg.len as usize).min(head - done);
                // SAFETY: the segment is the guest's, mapped by the line's table; a read's place in the spill has room for its
                // buffers' bytes and for what it read behind them, and is ours.
                unsafe { mem::copy(seg.ptr, to.add(done), n) };
                done += n;
            }
            self.reads[i].staged = true;
        }
    }
}

impl Side for Rx {
    fn line(&self) -> &Line {
        &self.to.line
    }

    fn line_mut(&mut self) -> &mut Line {
        &mut self.to.line
    }

    /// What was not used goes back to the ring.
    fn stop(self, _discard: bool) -> u32 {
        debug_assert!(self.at_rest());
        let lost = self.reads.iter().filter(|read| read.result > 0).count() as u64;
        if lost > 0 {
            self.to.line.dropped(DropReason::NoBuffers, lost);
        }
        self.to.stop()
    }
}
