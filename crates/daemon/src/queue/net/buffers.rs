//! The receive buffers that a guest offers: taken off its ring ahead of the frames, in order, and used in that order.
//!
//! Those that were not needed when the ring stops go back to it. What must never happen: a buffer shown to the guest before
//! those taken earlier, for those could not go back.

use std::collections::VecDeque;

use virtio::mem;
use virtio::ring::{Head, Seg};

use super::line::Line;
use vshunt_virtqueue::FrameFormat;

/// Offset of the number of merged buffers in the header (Virtio 1.3, 5.1.6).
const NUM_BUFFERS_AT: usize = 10;
/// Pieces of one buffer at most: with one more, what the kernel takes in a call (UIO_MAXIOV).
pub(super) const SEGS_MAX: usize = 1023;

/// One buffer, taken and not used.
#[derive(Default)]
pub(super) struct Buf {
    head: Head,
    pub(super) segs: Vec<Seg>,
    pub(super) bytes: usize,
}

/// A place in the buffers.
pub(super) struct Cursor {
    buf: usize,
    seg: usize,
    at: usize,
}

/// Why a frame finds no buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// There are not enough now.
    Now,
    /// It fits into none that this guest offers.
    Ever,
}

/// See the module. Belongs to the worker that has the queue.
pub(super) struct Buffers {
    pub(super) line: Line,
    pub(super) format: FrameFormat,
    /// The oldest first. Named by their places from the front.
    bufs: VecDeque<Buf>,
    /// Descriptors of the ring that they take up.
    descs: u32,
    /// Emptied ones, for their memory.
    spare: Vec<Buf>,
}

// SAFETY: the segments lead into the guest's memory, which the line's table keeps mapped wherever the queue goes.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(super) fn new(line: Line, format: FrameFormat) -> Self {
        let mut buffers = Self { line, format, bufs: VecDeque::new(), descs: 0, spare: Vec::new() };
        // What a former daemon had taken was taken before all that comes: it could not go back later.
        while !buffers.line.replays.is_empty() && buffers.fetch() {}
        buffers
    }

    /// How many were taken and not used.
    pub(super) fn len(&self) -> usize {
        self.bufs.len()
    }

    /// Whether there is one, or one to be taken.
    pub(super) fn has_any(&self) -> bool {
        !self.line.broken && (!self.bufs.is_empty() || self.line.has_avail())
    }

    /// Buffers `first..first + count`.
    pub(super) fn range(&self, first: usize, count: usize) -> impl Iterator<Item = &Buf> {
        self.bufs.range(first..first + count)
    }

    /// The one at a place; takes one more off the ring if it is the next.
    pub(super) fn get(&mut self, at: usize) -> Option<&Buf> {
        if at == self.bufs.len() && !self.fetch() {
            return None;
        }
        self.bufs.get(at)
    }

    fn fetch(&mut self) -> bool {
        let replayed = !self.line.replays.is_empty();
        if !self.line.pop() {
            return false;
        }
        let chain = &self.line.chain;
        let bytes: usize = chain.segs.iter().map(|seg| seg.len as usize).sum();
        let bad = chain.fault.is_some() || chain.readable != 0 || chain.segs.len() > SEGS_MAX;
        if bad || bytes < self.format.header {
            // Neither to be used nor to be passed over. It goes back first of all.
            let why = match chain.fault {
                Some(fault) => fault.to_string(),
                None if chain.readable != 0 => "the device is to write it and may only read it".to_owned(),
                None => format!("it has {bytes} bytes in {} pieces", chain.segs.len()),
            };
            if !replayed {
                self.line.vring.unpop(chain.head);
            }
            self.line.break_off(&format!("a receive buffer is unusable: {why}"));
            return false;
        }
        let mut buf = self.spare.pop().unwrap_or_default();
        buf.head = chain.head;
        buf.bytes = bytes;
        self.descs += u32::from(chain.head.descs);
        buf.segs.clear();
        buf.segs.extend_from_slice(&chain.segs);
        self.bufs.push_back(buf);
        true
    }

    /// How many buffers from place `first` on it takes for `len` bytes, header included.
    pub(super) fn room(&mut self, first: usize, len: usize) -> Result<usize, NoRoom> {
        let (mut count, mut room) = (0, 0);
        while room < len {
            if count > 0 && !self.format.merge {
                return Err(NoRoom::Ever);
            }
            let Some(buf) = self.get(first + count) else {
                // Where the guest has no more to give, and none is on its way back to it, no more will come.
                let all = first == 0 && self.descs >= u32::from(self.line.vring.size());
                return Err(if all { NoRoom::Ever } else { NoRoom::Now });
            };
            room += buf.bytes;
            count += 1;
        }
        Ok(count)
    }

    /// Where the bytes of buffers from place `first` on begin.
    pub(super) fn start(&self, first: usize) -> Cursor {
        Cursor { buf: first, seg: 0, at: 0 }
    }

    /// Copies bytes to a cursor, and moves it behind them; there is room. Each piece of memory is looked at once by a cursor,
    /// however short: a frame costs what its bytes and its pieces do.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes. They may be among the buffers, and others may write there meanwhile.
    pub(super) unsafe fn copy(&self, to: &mut Cursor, from: *const u8, len: usize) {
        let mut done = 0;
        while done < len {
            let Some(buf) = self.bufs.get(to.buf) else {
                debug_assert!(false, "the caller looked for room");
                return;
            };
            let Some(seg) = buf.segs.get(to.seg) else {
                *to = Cursor { buf: to.buf + 1, seg: 0, at: 0 };
                continue;
            };
            let n = (seg.len as usize - to.at).min(len - done);
            // SAFETY: inside of the segment, which the line's table has mapped and which is the guest's to be written; the
            // rest is the caller's promise.
            unsafe { mem::copy(from.add(done), seg.ptr.add(to.at), n) };
            done += n;
            to.at += n;
            if to.at == seg.len as usize {
                (to.seg, to.at) = (to.seg + 1, 0);
            }
        }
    }

    /// Moves a cursor on, over bytes that are there.
    fn skip(&self, to: &mut Cursor, mut len: usize) {
        while let Some(seg) = self.bufs.get(to.buf).and_then(|buf| buf.segs.get(to.seg)) {
            let n = (seg.len as usize - to.at).min(len);
            len -= n;
            to.at += n;
            if to.at < seg.len as usize {
                return;
            }
            (to.seg, to.at) = (to.seg + 1, 0);
        }
    }

    /// Stages the used elements of a frame of `len` bytes, header included, that lies in buffers `first..first + count`.
    pub(super) fn show(&mut self, first: usize, count: usize, len: usize) {
        if self.format.header > NUM_BUFFERS_AT {
            let number = (count as u16).to_le_bytes();
            let mut to = self.start(first);
            self.skip(&mut to, NUM_BUFFERS_AT);
            // SAFETY: two bytes of ours.
            unsafe { self.copy(&mut to, number.as_ptr(), number.len()) };
        }
        let mut left = len;
        for buf in self.bufs.range(first..first + count) {
            let n = left.min(buf.bytes);
            if self.line.logs() {
                self.line.mark(&buf.segs, n);
            }
            self.line.push(buf.head, n as u32);
            left -= n;
        }
    }

    /// The first `count` buffers are the guest's again.
    pub(super) fn shown(&mut self, count: usize) {
        for buf in self.bufs.drain(..count) {
            self.descs -= u32::from(buf.head.descs);
            self.spare.push(buf);
        }
    }

    /// The ring stops: what was not used goes back to it. Returns where it stands.
    pub(super) fn stop(mut self) -> u32 {
        for buf in self.bufs.iter().rev() {
            self.line.vring.unpop(buf.head);
        }
        self.line.vring.base()
    }
}
