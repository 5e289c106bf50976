//! Frames to the guest: reads from a tap's queue directly into the receive buffers that the guest
//! offers.
//!
//! Reads are operations on the worker's io_uring that never wait. A batch is complete when the
//! `io_uring_enter` that submits it returns, so each read gets the frame after that of the previous
//! read.
//!
//! The length of a frame is known only after it was read. With merged buffers a frame may fill
//! many. While frames are short, a read gets one buffer, and behind it memory of the daemon
//! (*spill*) for the bytes that do not fit. So the first of several long frames are copied, and so
//! are the few frames whose buffers an earlier frame needs ([`Rx::deliver`]). While frames are
//! long, one frame is read at a time, with buffers for the longest.
//!
//! With limits, a read pays for a frame as long as those before it, because the frame is not known.
//! The completion corrects that. If the limits allow no further read, a poll tells whether there is
//! another frame, and only then the direction waits.
//!
//! What must never happen: a frame is dropped because there are no buffers. It waits for them.

use std::os::fd::RawFd;

use virtio::mem;
use virtio::ring::Seg;
use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use crate::frames::{BATCH, FRAME_MAX};
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::{Allowance, SideGate};
use crate::pair_rings::PairSide;
use crate::rx_buffers::{NoRoom, RxBuffers, SEGS_MAX};
use crate::rx_poll::RxPoll;
use crate::slots::{number, slot, slot_mut};
use crate::tap_file::{Op, TapFile};

/// Long frames are expected until this many frames after the last one that needed several buffers.
const LONG_HOLD: u8 = 64;
/// Most iovecs of a batch. The spill is one of each read.
const IOVECS: usize = 2 * (SEGS_MAX + 1);

/// One read, and the frame that it found.
#[derive(Clone, Copy, Default)]
struct Read {
    /// Its buffers: the number of the first, how many, their bytes.
    first: usize,
    buffers: usize,
    capacity: usize,
    /// The result of the operation: bytes, with the header, or a negative errno.
    result: i32,
    /// Whether the whole frame is in the spill.
    staged: bool,
}

/// See the module.
pub(super) struct Rx {
    pub(super) to: RxBuffers,
    /// The batch in flight, or frames that wait for buffers.
    reads: Vec<Read>,
    outstanding: u32,
    /// Iovecs of the operations. The kernel has their addresses, so the vector never grows.
    iovecs: Vec<libc::iovec>,
    /// [`spill_bytes`](Self::spill_bytes) for each read. A staged frame is there completely. The
    /// memory is reserved, and only the used part is touched.
    spill: Vec<u8>,
    /// Decides when to read.
    pub(super) rx_poll: RxPoll,
    /// Long frames are expected for this many more frames.
    long: u8,
    /// Bytes of an average frame of the last batch.
    expected: u64,
    /// Whether the reads of this batch have paid for a frame of `expected` bytes each.
    paid: bool,
    /// Whether limits ended this batch.
    cut: bool,
}

// SAFETY: the raw pointers in `iovecs` point into the guest's memory, which the virtqueue's memory
// table keeps mapped, or into the spill, which moves with this value. Only operations in flight use
// them, and there are none while the queue moves.
unsafe impl Send for Rx {}

impl Rx {
    pub(super) fn new(to: RxBuffers) -> Self {
        let spill = Vec::with_capacity((to.format.header + FRAME_MAX + 1) * BATCH as usize);
        Self {
            to,
            reads: Vec::with_capacity(BATCH as usize),
            outstanding: 0,
            iovecs: Vec::with_capacity(IOVECS),
            spill,
            rx_poll: RxPoll::new(),
            long: 0,
            expected: 0,
            paid: false,
            cut: false,
        }
    }

    /// Returns the bytes of a read: the longest frame with its header, and one more to detect a
    /// frame that is too long.
    fn spill_bytes(&self) -> usize {
        self.to.format.header + FRAME_MAX + 1
    }

    fn spill_at(&mut self, read: usize) -> *mut u8 {
        debug_assert!(read < BATCH as usize);
        // SAFETY: `new` reserved `spill_bytes` for each read of a batch, and `read` is below BATCH.
        unsafe { self.spill.as_mut_ptr().add(read * self.spill_bytes()) }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.outstanding
    }

    pub(super) fn at_rest(&self) -> bool {
        self.outstanding == 0 && self.rx_poll.at_rest() && self.to.virtqueue.at_rest()
    }

    /// Drops the frames that wait for buffers, because the guest does not use the pair for now.
    pub(super) fn drop_held(&mut self) {
        if self.holds() {
            let lost = self.reads.iter().filter(|read| read.result > 0).count() as u64;
            self.reads.clear();
            self.to.virtqueue.dropped(DropReason::NoBuffers, lost);
        }
    }

    /// Returns whether frames that were read wait for buffers.
    fn holds(&self) -> bool {
        self.outstanding == 0 && !self.reads.is_empty()
    }

    /// `held`: the limits allow no read now.
    pub(super) fn has_work(&self, held: bool) -> bool {
        match (self.outstanding, self.holds()) {
            (1.., _) => false,
            (0, true) => self.to.virtqueue.has_avail(),
            (0, false) => !held && self.rx_poll.ready && self.to.has_any(),
        }
    }

    /// Asks for a kick if only more buffers would help. Returns whether there is work already.
    pub(super) fn sleep(&mut self, held: bool) -> bool {
        let wants = self.holds() || (!held && self.rx_poll.ready && self.to.len() == 0);
        if self.to.virtqueue.broken || !wants {
            return self.has_work(held);
        }
        self.to.virtqueue.vring.enable_kick() || self.has_work(held)
    }

    /// Starts to read frames, as many as there are buffers for and as `limit` allows. Returns how
    /// many frames waited for buffers and have them now.
    pub(super) fn take(
        &mut self,
        uring: &mut Uring,
        file: TapFile,
        token: Token,
        budget: u32,
        mut limit: Allowance<'_>,
    ) -> u32 {
        if self.outstanding > 0 || self.to.virtqueue.broken {
            return 0;
        }
        let waited = if self.holds() { self.deliver() } else { 0 };
        if !self.reads.is_empty() || !self.rx_poll.ready || matches!(limit, Allowance::Nothing) {
            return waited;
        }
        let long = self.to.format.merge && self.long > 0;
        let most = if long { 1 } else { self.rx_poll.batch.min(budget) };
        self.iovecs.clear();
        let mut next = 0;
        while self.outstanding < most && self.iovecs.len() < IOVECS - SEGS_MAX {
            let Some(read) = self.buffers_for_read(next, long) else { break };
            if let Allowance::Ask(gate) = &mut limit
                && !self.pay(gate, uring, token)
            {
                break;
            }
            next = read.first + read.buffers;
            self.read(uring, file, token, read);
        }
        waited
    }

    /// Pays for the frame of one more read. If that is not possible, the direction waits, or this
    /// batch ends.
    fn pay(&mut self, gate: &mut SideGate, uring: &mut Uring, place: Token) -> bool {
        if gate.ask(self.expected) {
            self.paid = true;
            return true;
        }
        match self.outstanding {
            0 => gate.hold(uring, place, self.to.virtqueue.stats()),
            _ => self.cut = true,
        }
        false
    }

    /// Pays for the frames that the reads of a batch found, in place of those that were expected.
    #[cold]
    fn settle(&mut self, gate: &SideGate) {
        let (mut frames, mut bytes) = (0, 0);
        for read in &self.reads {
            let len = usize::try_from(read.result).ok().filter(|len| *len > 0);
            let moved = len.map(|len| len.saturating_sub(self.to.format.header) as u64);
            gate.settle(self.expected, moved);
            (frames, bytes) = (frames + u64::from(moved.is_some()), bytes + moved.unwrap_or(0));
        }
        // Without a frame nothing was learnt.
        self.expected = bytes.checked_div(frames).unwrap_or(self.expected);
    }

    /// Returns the buffers for one read, from number `first` on.
    fn buffers_for_read(&mut self, first: usize, long: bool) -> Option<Read> {
        let (mut next, mut capacity, mut segs) = (first, 0, 0);
        let want = if long { self.to.format.header + FRAME_MAX } else { 1 };
        while capacity < want {
            let Some(buffer) = self.to.get(next) else { break };
            segs += buffer.segs.len();
            if segs > SEGS_MAX && next > first {
                break;
            }
            capacity += buffer.bytes;
            next += 1;
        }
        (next > first).then_some(Read { first, buffers: next - first, capacity, ..Read::default() })
    }

    fn read(&mut self, uring: &mut Uring, file: TapFile, token: Token, read: Read) {
        let slot = self.outstanding as usize;
        self.outstanding += 1;
        self.reads.push(read);
        let rest = self.spill_bytes().saturating_sub(read.capacity);
        // It starts behind as many bytes as the buffers hold, so that the whole frame can be staged
        // there.
        let spill = self.spill_at(slot).wrapping_add(read.capacity);
        let at = self.iovecs.len();
        for buffer in self.to.range(read.first, read.buffers) {
            let iovec = |seg: &Seg| libc::iovec { iov_base: seg.ptr.cast(), iov_len: seg.len as usize };
            self.iovecs.extend(buffer.segs.iter().map(iovec));
        }
        if rest > 0 {
            self.iovecs.push(libc::iovec { iov_base: spill.cast(), iov_len: rest });
        }
        let iovecs = self.iovecs.get(at..).unwrap_or_default();
        // SAFETY: the ring translated the segments as device-writable, and the virtqueue keeps the
        // memory table, and with it the mapping, until the queue is at rest. Only this read uses
        // its part of the spill. `take` leaves room in `iovecs` for one more read, so the vector
        // does not move.
        unsafe { file.start(uring, Op::Readv(iovecs), Token { slot: number(slot), ..token }) }
    }

    /// Handles the completion of a read. The last one of a batch gives the frames to the guest.
    /// Returns their number.
    pub(super) fn complete(
        &mut self,
        uring: &mut Uring,
        slot: u16,
        poll: (RawFd, Token),
        result: i32,
        gate: &SideGate,
    ) -> u32 {
        slot_mut(&mut self.reads, slot).result = result;
        self.outstanding -= 1;
        if self.outstanding > 0 {
            return 0;
        }
        if std::mem::take(&mut self.paid) {
            self.settle(gate);
        }
        let active = number(self.reads.len()).into();
        let found = number(self.reads.iter().filter(|read| read.result > 0).count()).into();
        let bad = self.reads.iter().map(|read| read.result).find(|r| *r < 0 && *r != -libc::EAGAIN);
        match bad {
            None if std::mem::take(&mut self.cut) => {
                gate.withdraw();
                self.rx_poll.wait(uring, poll);
            }
            None => self.rx_poll.found(uring, poll, active, found),
            Some(result) => {
                let e = std::io::Error::from_raw_os_error(-result);
                self.to.virtqueue.mark_broken(&format!(
                    "its tap can no longer be read: {e} (if the interface is gone, remove the export and its \
                     network, then add both again)"
                ));
            }
        }
        self.deliver()
    }

    /// Gives the frames that were read to the guest, in order, each in the buffers at the front.
    /// These are mostly the buffers into which it was read. A frame is copied if an earlier read
    /// found nothing, or an earlier frame needed more buffers than it had. Frames without buffers
    /// stay. Returns how many were delivered or dropped.
    fn deliver(&mut self) -> u32 {
        let (mut used, mut frames, mut bytes, mut dropped) = (0, 0, 0, 0);
        let mut held = None;
        for i in 0..number(self.reads.len()) {
            let read = *slot(&self.reads, i);
            let Ok(len @ 1..) = usize::try_from(read.result) else { continue };
            if len < self.to.format.header || len >= self.spill_bytes() {
                dropped += 1;
                continue;
            }
            let in_place = !read.staged && read.first == used && len <= read.capacity;
            match if in_place { self.to.buffers_for(used, len) } else { self.place(i, used, len) } {
                Ok(count) => {
                    self.to.stage_used(used, count, len);
                    self.long = if count > 1 { LONG_HOLD } else { self.long.saturating_sub(1) };
                    used += count;
                    frames += 1;
                    bytes += (len - self.to.format.header) as u64;
                }
                Err(NoRoom::Permanent) => dropped += 1,
                Err(NoRoom::Temporary) => {
                    self.stage_from(i);
                    held = Some(i);
                    break;
                }
            }
        }
        match held {
            None => self.reads.clear(),
            // The others keep their part of the spill.
            Some(first) => self.reads.iter_mut().take(first.into()).for_each(|read| read.result = 0),
        }
        self.to.release(used);
        if frames > 0 {
            self.to.virtqueue.received(frames, bytes);
        }
        if dropped > 0 {
            self.to.virtqueue.dropped(DropReason::TooLong, dropped);
        }
        u32::try_from(frames + dropped).unwrap_or(u32::MAX)
    }

    /// Copies frame `i` of `len` bytes into the buffers from number `first` on. Returns the number
    /// of buffers.
    #[cold]
    fn place(&mut self, i: u16, first: usize, len: usize) -> Result<usize, NoRoom> {
        let count = self.to.buffers_for(first, len)?;
        // Later frames may be in the buffers that it gets.
        self.stage_from(i);
        let from = self.spill_at(i.into());
        // SAFETY: `stage_from` copied the whole frame of `len` bytes to the spill, which belongs to
        // this value.
        unsafe { self.to.copy(&mut self.to.start(first), from, len) };
        Ok(count)
    }

    /// Copies frame `i` and those after it to the spill, so that other frames can have their
    /// buffers.
    #[cold]
    fn stage_from(&mut self, first: u16) {
        for i in first..number(self.reads.len()) {
            let read = *slot(&self.reads, i);
            let Ok(len @ 1..) = usize::try_from(read.result) else { continue };
            // A frame that is too long is dropped.
            if read.staged || len >= self.spill_bytes() {
                continue;
            }
            let to = self.spill_at(i.into());
            let head = len.min(read.capacity);
            let mut done = 0;
            for seg in self.to.range(read.first, read.buffers).flat_map(|buffer| &buffer.segs) {
                let n = (seg.len as usize).min(head - done);
                // SAFETY: the virtqueue's memory table has the segment mapped. `head` is below
                // `spill_bytes`, so `done + n` is within this read's part of the spill.
                unsafe { mem::copy(seg.ptr, to.wrapping_add(done), n) };
                done += n;
            }
            slot_mut(&mut self.reads, i).staged = true;
        }
    }
}

impl PairSide for Rx {
    fn virtqueue(&self) -> &NetVirtqueue {
        &self.to.virtqueue
    }

    fn virtqueue_mut(&mut self) -> &mut NetVirtqueue {
        &mut self.to.virtqueue
    }

    /// Unused buffers are returned to the ring.
    fn stop(self, _discard: bool) -> u32 {
        debug_assert!(self.at_rest());
        let lost = self.reads.iter().filter(|read| read.result > 0).count() as u64;
        if lost > 0 {
            self.to.virtqueue.dropped(DropReason::NoBuffers, lost);
        }
        self.to.stop()
    }
}
