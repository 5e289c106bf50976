//! Frames from the guest: a virtqueue's requests, written to a tap's queue in batches.
//!
//! A request is one frame behind its virtio-net header, just as the tap wants it. Each is one operation on the worker's
//! ring that never waits, so a batch is through when the enter that sends it returns, in its order.

use virtio::ring::{Head, Seg};
use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use super::super::line::Line;
use super::super::rings::Side;
use super::super::tap_file::{Op, TapFile};
use super::super::{BATCH, ETH_HEADER_BYTES, FRAME_MAX};

/// Buffers of one frame at most: those of the longest chain, which the kernel takes in one call (UIO_MAXIOV).
const IOVECS_FRAME: usize = virtio::ring::MAX_QUEUE_SIZE as usize;
/// Buffers of a batch at most.
const IOVECS: usize = 2 * IOVECS_FRAME;

/// A frame on its way.
#[derive(Clone, Copy, Default)]
struct Write {
    head: Head,
    /// With its header.
    bytes: usize,
}

/// See the module.
pub(super) struct Tx {
    pub(super) line: Line,
    /// Bytes of the header before each frame.
    header: usize,
    writes: [Write; BATCH as usize],
    /// Operations on the ring.
    outstanding: u32,
    /// Of this batch: frames that the tap took, and their bytes.
    sent: u64,
    sent_bytes: u64,
    /// What they name. Never grows: they were told where it lies.
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the raw pointers (iovecs) lead into the guest's memory, which the line's table keeps mapped wherever the queue
// goes, and are used by operations alone, of which there are none while it moves.
unsafe impl Send for Tx {}

impl Tx {
    pub(super) fn new(mut line: Line, header: usize) -> Self {
        // The device writes nothing here: a guest that says so of a buffer (DPDK's virtio-user does) means nothing by it.
        line.vring.set_all_readable();
        // They may have been sent.
        line.discard(DropReason::Unknown, true);
        let writes = [Write::default(); BATCH as usize];
        Self {
            line,
            header,
            writes,
            outstanding: 0,
            sent: 0,
            sent_bytes: 0,
            iovecs: Vec::with_capacity(IOVECS),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.outstanding
    }

    pub(super) fn at_rest(&self) -> bool {
        self.outstanding == 0 && self.line.at_rest()
    }

    /// With a batch on the ring there is no room for another.
    pub(super) fn has_work(&self) -> bool {
        self.outstanding == 0 && self.line.has_avail()
    }

    /// Takes frames and begins to write them. Returns how many requests were taken.
    pub(super) fn take(&mut self, uring: &mut Uring, file: TapFile, token: Token, budget: u32) -> u32 {
        if self.outstanding > 0 {
            return 0;
        }
        self.iovecs.clear();
        let mut taken = 0;
        while taken < budget.min(BATCH) && self.iovecs.len() <= IOVECS - IOVECS_FRAME {
            if !self.line.pop() {
                break;
            }
            taken += 1;
            match self.frame() {
                Err(why) => self.refuse(why),
                Ok(bytes) => self.write(uring, file, token, bytes),
            }
        }
        taken
    }

    /// Bytes of the frame in the scratch chain, with its header.
    fn frame(&self) -> Result<usize, DropReason> {
        let chain = &self.line.chain;
        if chain.fault.is_some() || chain.readable != chain.segs.len() || chain.segs.len() > IOVECS_FRAME {
            return Err(DropReason::Malformed);
        }
        let bytes = chain.segs.iter().map(|seg| seg.len as usize).sum();
        match bytes {
            n if n < self.header + ETH_HEADER_BYTES => Err(DropReason::TooShort),
            n if n > self.header + FRAME_MAX => Err(DropReason::TooLong),
            n => Ok(n),
        }
    }

    fn refuse(&mut self, why: DropReason) {
        self.line.dropped(why, 1);
        self.line.push(self.line.chain.head, 0);
    }

    fn write(&mut self, uring: &mut Uring, file: TapFile, token: Token, bytes: usize) {
        let slot = self.outstanding as u16;
        self.outstanding += 1;
        // The kernel reads them once the whole batch is described.
        self.line.chain.segs.iter().take(2).for_each(Seg::prefetch);
        self.writes[usize::from(slot)] = Write { head: self.line.chain.head, bytes };
        let iovec = |seg: &Seg| libc::iovec { iov_base: seg.ptr.cast(), iov_len: seg.len as usize };
        let op = match &self.line.chain.segs[..] {
            [seg] => Op::Write(seg.ptr, seg.len),
            segs => {
                let at = self.iovecs.len();
                self.iovecs.extend(segs.iter().map(iovec));
                Op::Writev(&self.iovecs[at..])
            }
        };
        // SAFETY: the segments were translated on taking the chain, and the line's memory table, which the queue keeps until
        // it rests, has them mapped. `iovecs` has room for all of a batch, so it did not move, and is cleared when no
        // operation is left.
        unsafe { file.begin(uring, op, Token { slot, ..token }) }
    }

    /// A frame was written, or not. Returns the requests that are over.
    pub(super) fn complete(&mut self, slot: u16, result: i32) -> u32 {
        let Write { head, bytes } = self.writes[usize::from(slot)];
        self.outstanding -= 1;
        match result {
            0.. => {
                self.sent += 1;
                self.sent_bytes += (bytes - self.header) as u64;
            }
            _ => self.line.dropped(reason(-result), 1),
        }
        self.line.push(head, 0);
        if self.outstanding == 0 && self.sent > 0 {
            self.line.sent(std::mem::take(&mut self.sent), std::mem::take(&mut self.sent_bytes));
        }
        1
    }

    pub(super) fn sleep(&mut self, after: u32) -> bool {
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.line.broken && self.line.vring.enable_kick_after(after) && self.outstanding == 0
    }
}

impl Side for Tx {
    fn line(&self) -> &Line {
        &self.line
    }

    fn line_mut(&mut self) -> &mut Line {
        &mut self.line
    }

    fn stop(mut self, discard: bool) -> u32 {
        debug_assert!(self.at_rest());
        if discard {
            self.line.discard(DropReason::Detached, false);
        }
        self.line.vring.base()
    }
}

/// Why a tap did not take a frame.
pub(in crate::queue::net) fn reason(errno: i32) -> DropReason {
    match errno {
        libc::EINVAL => DropReason::BadHeader,
        libc::EMSGSIZE => DropReason::TooLong,
        libc::EIO | libc::EBADFD | libc::ENETDOWN => DropReason::Down,
        libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => DropReason::NoRoom,
        _ => DropReason::Other,
    }
}
