//! The receive buffers that a guest offers. They are popped off its ring before frames arrive, in
//! order, and used in that order.
//!
//! Buffers that are unused when the ring stops are returned to it. What must never happen: a buffer
//! is returned to the guest as used before buffers that were popped earlier, because those could
//! not be returned unused then.

use std::collections::VecDeque;

use virtio::mem;
use virtio::ring::{Head, Seg};
use vshunt_virtqueue::FrameFormat;

use crate::net_virtqueue::NetVirtqueue;

/// Offset of the number of merged buffers in the header (Virtio 1.3, 5.1.6).
const NUM_BUFFERS_AT: usize = 10;
/// Most segments of a buffer. With one more they are the limit of a call of the kernel
/// (UIO_MAXIOV).
pub(crate) const SEGS_MAX: usize = 1023;

/// One buffer that was popped and is unused.
#[derive(Default)]
pub(crate) struct RxBuffer {
    head: Head,
    pub(crate) segs: Vec<Seg>,
    pub(crate) bytes: usize,
}

/// A position in the buffers.
pub(crate) struct Cursor {
    buffer: usize,
    seg: usize,
    at: usize,
}

/// The reason why there are no buffers for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// There are not enough at this time.
    Temporary,
    /// The frame does not fit into what this guest offers.
    Permanent,
}

/// See the module. Belongs to the worker that has the queue.
pub(crate) struct RxBuffers {
    pub(crate) virtqueue: NetVirtqueue,
    pub(crate) format: FrameFormat,
    /// The buffers, oldest first. A buffer's number is its position from the front.
    buffers: VecDeque<RxBuffer>,
    /// Number of descriptors of the ring that they use.
    descs: u32,
    /// Empty buffers, whose memory is reused.
    spare: Vec<RxBuffer>,
}

// SAFETY: the segments point into the guest's memory. The virtqueue keeps the memory table, and
// with it the mapping, wherever the queue goes.
unsafe impl Send for RxBuffers {}

impl RxBuffers {
    pub(crate) fn new(virtqueue: NetVirtqueue, format: FrameFormat) -> Self {
        let mut this = Self { virtqueue, format, buffers: VecDeque::new(), descs: 0, spare: Vec::new() };
        // A former daemon popped these before all later buffers, so they could not be returned
        // later.
        while !this.virtqueue.replays.is_empty() && this.fetch() {}
        this
    }

    /// Returns the number of buffers that were popped and are unused.
    pub(crate) fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Returns whether there is a buffer, or one can be popped.
    pub(crate) fn has_any(&self) -> bool {
        !self.virtqueue.broken && (!self.buffers.is_empty() || self.virtqueue.has_avail())
    }

    /// Returns buffers `first..first + count`, which exist.
    pub(crate) fn range(&self, first: usize, count: usize) -> impl Iterator<Item = &RxBuffer> {
        self.buffers.range(first..first + count)
    }

    /// Returns the buffer of a number. Pops one more off the ring if it is the next one.
    pub(crate) fn get(&mut self, number: usize) -> Option<&RxBuffer> {
        if number == self.buffers.len() && !self.fetch() {
            return None;
        }
        self.buffers.get(number)
    }

    fn fetch(&mut self) -> bool {
        let replayed = !self.virtqueue.replays.is_empty();
        if !self.virtqueue.pop() {
            return false;
        }
        let chain = &self.virtqueue.chain;
        let bytes: usize = chain.segs.iter().map(|seg| seg.len as usize).sum();
        let bad = chain.fault.is_some() || chain.readable != 0 || chain.segs.len() > SEGS_MAX;
        if bad || bytes < self.format.header {
            // The buffer can neither be used nor be skipped. It is the first to be returned to the
            // ring.
            let why = match chain.fault {
                Some(fault) => fault.to_string(),
                None if chain.readable != 0 => "the device is to write it and may only read it".to_owned(),
                None => format!("it has {bytes} bytes in {} pieces", chain.segs.len()),
            };
            if !replayed {
                self.virtqueue.vring.unpop(chain.head);
            }
            self.virtqueue.mark_broken(&format!("a receive buffer is unusable: {why}"));
            return false;
        }
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.head = chain.head;
        buffer.bytes = bytes;
        self.descs += u32::from(chain.head.descs);
        buffer.segs.clear();
        buffer.segs.extend_from_slice(&chain.segs);
        self.buffers.push_back(buffer);
        true
    }

    /// Returns how many buffers from number `first` on `len` bytes need, header included.
    pub(crate) fn buffers_for(&mut self, first: usize, len: usize) -> Result<usize, NoRoom> {
        let (mut count, mut room) = (0, 0);
        while room < len {
            if count > 0 && !self.format.merge {
                return Err(NoRoom::Permanent);
            }
            let Some(buffer) = self.get(first + count) else {
                // If the guest has offered the whole ring and no buffer is about to be returned,
                // there will be no more.
                let all = first == 0 && self.descs >= u32::from(self.virtqueue.vring.size());
                return Err(if all { NoRoom::Permanent } else { NoRoom::Temporary });
            };
            room += buffer.bytes;
            count += 1;
        }
        Ok(count)
    }

    /// Returns the position where buffer `first` starts.
    pub(crate) fn start(&self, first: usize) -> Cursor {
        Cursor { buffer: first, seg: 0, at: 0 }
    }

    /// Copies bytes to a position and moves it behind them. The caller checked that there is room.
    /// A cursor visits each segment once, however short it is, so the cost of a frame is bounded by
    /// its bytes and its segments.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes. They may overlap with the buffers, and a guest may write
    /// to them at the same time.
    pub(crate) unsafe fn copy(&self, to: &mut Cursor, from: *const u8, len: usize) {
        let mut done = 0;
        while done < len {
            let Some(buffer) = self.buffers.get(to.buffer) else {
                debug_assert!(false, "the caller checked that there is room");
                return;
            };
            let Some(seg) = buffer.segs.get(to.seg) else {
                *to = Cursor { buffer: to.buffer + 1, seg: 0, at: 0 };
                continue;
            };
            let n = (seg.len as usize - to.at).min(len - done);
            // SAFETY: `to.at + n` is at most the segment's length. The ring translated the segment
            // as device-writable, and the virtqueue's memory table has it mapped. The caller
            // promises that `from` is readable.
            unsafe { mem::copy(from.wrapping_add(done), seg.ptr.wrapping_add(to.at), n) };
            done += n;
            to.at += n;
            if to.at == seg.len as usize {
                (to.seg, to.at) = (to.seg + 1, 0);
            }
        }
    }

    /// Moves a position over bytes of one buffer.
    fn skip(&self, to: &mut Cursor, mut len: usize) {
        while let Some(seg) = self.buffers.get(to.buffer).and_then(|buffer| buffer.segs.get(to.seg)) {
            let n = (seg.len as usize - to.at).min(len);
            len -= n;
            to.at += n;
            if to.at < seg.len as usize {
                return;
            }
            (to.seg, to.at) = (to.seg + 1, 0);
        }
    }

    /// Stages the used elements of a frame of `len` bytes, header included, in buffers
    /// `first..first + count`.
    pub(crate) fn stage_used(&mut self, first: usize, count: usize, len: usize) {
        if self.format.header > NUM_BUFFERS_AT {
            // A ring has fewer than 2^16 buffers.
            let number = crate::slots::number(count).to_le_bytes();
            let mut to = self.start(first);
            self.skip(&mut to, NUM_BUFFERS_AT);
            // SAFETY: `number` is a local array.
            unsafe { self.copy(&mut to, number.as_ptr(), number.len()) };
        }
        let mut left = len;
        for buffer in self.buffers.range(first..first + count) {
            let n = left.min(buffer.bytes);
            if self.virtqueue.logs() {
                self.virtqueue.mark(&buffer.segs, n);
            }
            // A frame with its header has fewer than 2^32 bytes, see `frames`.
            self.virtqueue.push(buffer.head, u32::try_from(n).unwrap_or(u32::MAX));
            left -= n;
        }
    }

    /// Removes the first `count` buffers, which are used.
    pub(crate) fn release(&mut self, count: usize) {
        for buffer in self.buffers.drain(..count) {
            self.descs -= u32::from(buffer.head.descs);
            self.spare.push(buffer);
        }
    }

    /// Stops the ring. Unused buffers are returned to it. Returns its base.
    pub(crate) fn stop(mut self) -> u32 {
        for buffer in self.buffers.iter().rev() {
            self.virtqueue.vring.unpop(buffer.head);
        }
        self.virtqueue.vring.base()
    }
}
