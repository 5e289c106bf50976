//! Frames from the guest: a virtqueue's requests, written to a tap's queue in batches.
//!
//! A request is one frame behind its virtio-net header, as the tap expects it. Each is one
//! operation on the worker's io_uring that never waits. So a batch is complete, in order, when the
//! `io_uring_enter` that submits it returns.

use virtio::ring::{Head, Seg};
use vshunt_engine::{Token, Uring};
use vshunt_types::spec::DropReason;

use crate::frames::{BATCH, ETH_HEADER_BYTES, FRAME_MAX};
use crate::net_virtqueue::NetVirtqueue;
use crate::pair_limits::Allowance;
use crate::pair_rings::PairSide;
use crate::slots::{number, slot_mut};
use crate::tap_file::{Op, TapFile, drop_reason};

/// Most buffers of one frame: those of the longest chain, which the kernel takes in one call
/// (UIO_MAXIOV).
const IOVECS_FRAME: usize = virtio::ring::MAX_QUEUE_SIZE as usize;
/// Most buffers of a batch.
const IOVECS: usize = 2 * IOVECS_FRAME;

/// A frame in flight.
#[derive(Clone, Copy, Default)]
struct Write {
    head: Head,
    /// Bytes of the frame with its header.
    bytes: usize,
}

/// See the module.
pub(super) struct Tx {
    pub(super) virtqueue: NetVirtqueue,
    /// Bytes of the header before each frame.
    header: usize,
    writes: [Write; BATCH as usize],
    /// Number of operations in flight.
    outstanding: u32,
    /// Frames of this batch that the tap took, and their bytes.
    sent: u64,
    sent_bytes: u64,
    /// Iovecs of the operations. The kernel has their addresses, so the vector never grows.
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the raw pointers in `iovecs` point into the guest's memory, which the virtqueue's memory
// table keeps mapped. Only operations in flight use them, and there are none while the queue moves
// to another worker.
unsafe impl Send for Tx {}

impl Tx {
    pub(super) fn new(mut virtqueue: NetVirtqueue, header: usize) -> Self {
        // The device writes nothing here. Some guests (DPDK's virtio-user) mark buffers as writable
        // by mistake.
        virtqueue.vring.set_all_readable();
        // A former daemon may have sent them.
        virtqueue.discard(DropReason::Unknown, true);
        let writes = [Write::default(); BATCH as usize];
        Self {
            virtqueue,
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
        self.outstanding == 0 && self.virtqueue.at_rest()
    }

    /// Returns whether there is work. A batch is submitted only when no other is in flight.
    pub(super) fn has_work(&self) -> bool {
        self.outstanding == 0 && self.virtqueue.has_avail()
    }

    /// Takes frames and starts to write them, as far as `limit` allows. Returns how many requests
    /// were taken.
    pub(super) fn take(
        &mut self,
        uring: &mut Uring,
        file: TapFile,
        token: Token,
        budget: u32,
        mut limit: Allowance<'_>,
    ) -> u32 {
        if self.outstanding > 0 {
            return 0;
        }
        self.iovecs.clear();
        let mut taken = 0;
        while taken < budget.min(BATCH) && self.iovecs.len() <= IOVECS - IOVECS_FRAME {
            if !self.virtqueue.pop() {
                break;
            }
            let frame = self.frame();
            if let Allowance::Ask(gate) = &mut limit
                && !self.virtqueue.discards
                && !gate.ask(frame.map_or(0, |bytes| (bytes - self.header) as u64))
            {
                self.virtqueue.vring.unpop(self.virtqueue.chain.head);
                gate.hold(uring, token, self.virtqueue.stats());
                break;
            }
            taken += 1;
            match frame {
                Err(why) => self.refuse(why),
                Ok(bytes) => self.write(uring, file, token, bytes),
            }
        }
        taken
    }

    /// Returns the bytes of the frame in the scratch chain, with its header.
    fn frame(&self) -> Result<usize, DropReason> {
        let chain = &self.virtqueue.chain;
        if chain.fault.is_some() || chain.readable != chain.segs.len() || chain.segs.len() > IOVECS_FRAME {
            return Err(DropReason::Malformed);
        }
        if self.virtqueue.discards {
            return Err(DropReason::Detached);
        }
        let bytes = chain.segs.iter().map(|seg| seg.len as usize).sum();
        match bytes {
            n if n < self.header + ETH_HEADER_BYTES => Err(DropReason::TooShort),
            n if n > self.header + FRAME_MAX => Err(DropReason::TooLong),
            n => Ok(n),
        }
    }

    fn refuse(&mut self, why: DropReason) {
        self.virtqueue.dropped(why, 1);
        self.virtqueue.push(self.virtqueue.chain.head, 0);
    }

    fn write(&mut self, uring: &mut Uring, file: TapFile, token: Token, bytes: usize) {
        // At most BATCH.
        let slot = number(self.outstanding as usize);
        self.outstanding += 1;
        // The kernel reads them when the whole batch is submitted.
        self.virtqueue.chain.segs.iter().take(2).for_each(Seg::prefetch);
        *slot_mut(&mut self.writes, slot) = Write { head: self.virtqueue.chain.head, bytes };
        let iovec = |seg: &Seg| libc::iovec { iov_base: seg.ptr.cast(), iov_len: seg.len as usize };
        let op = match self.virtqueue.chain.segs.as_slice() {
            [seg] => Op::Write(seg.ptr, seg.len),
            segs => {
                let at = self.iovecs.len();
                self.iovecs.extend(segs.iter().map(iovec));
                Op::Writev(self.iovecs.get(at..).unwrap_or_default())
            }
        };
        // SAFETY: the ring translated the segments when the chain was popped, and the virtqueue
        // keeps the memory table, and with it the mapping, until the queue is at rest. `take`
        // leaves room in `iovecs` for one more frame, so the vector does not move, and clears it
        // only when no operation is in flight.
        unsafe { file.start(uring, op, Token { slot, ..token }) }
    }

    /// Handles the completion of a write. Returns how many requests it completes.
    pub(super) fn complete(&mut self, slot: u16, result: i32) -> u32 {
        let Write { head, bytes } = *crate::slots::slot(&self.writes, slot);
        self.outstanding -= 1;
        match result {
            0.. => {
                self.sent += 1;
                self.sent_bytes += (bytes - self.header) as u64;
            }
            _ => self.virtqueue.dropped(drop_reason(-result), 1),
        }
        self.virtqueue.push(head, 0);
        if self.outstanding == 0 && self.sent > 0 {
            self.virtqueue.sent(std::mem::take(&mut self.sent), std::mem::take(&mut self.sent_bytes));
        }
        1
    }

    pub(super) fn sleep(&mut self, after: u32) -> bool {
        let after = u16::try_from(after).unwrap_or(u16::MAX);
        !self.virtqueue.broken && self.virtqueue.vring.enable_kick_after(after) && self.outstanding == 0
    }
}

impl PairSide for Tx {
    fn virtqueue(&self) -> &NetVirtqueue {
        &self.virtqueue
    }

    fn virtqueue_mut(&mut self) -> &mut NetVirtqueue {
        &mut self.virtqueue
    }

    fn stop(mut self, discard: bool) -> u32 {
        debug_assert!(self.at_rest());
        if discard {
            self.virtqueue.discard(DropReason::Detached, false);
        }
        self.virtqueue.vring.base()
    }
}
