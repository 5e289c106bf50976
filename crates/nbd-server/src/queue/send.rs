//! Replies: those that are ready go out in one message.

use io_uring::opcode;
use libc::{iovec, msghdr};
use vshunt_engine::{QueueStats, Token, Uring, on_file};

use super::{ConnectionQueue, OP_SEND, SLOTS, Slot};

/// Segments of the longest message: a header and data of each request.
const SEGMENTS_MAX: usize = SLOTS as usize * 2;

/// Most bytes that a slot keeps for the state of a later range.
const STATUS_BYTES_KEPT: usize = 16 << 10;

const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The message that is sent.
pub(super) struct Outbox {
    segments: Box<[iovec]>,
    /// The segments that are not sent.
    first: usize,
    count: usize,
    /// The slots of the message.
    batch: Vec<u16>,
    message: Box<msghdr>,
    /// A send is in flight.
    pub(super) busy: bool,
}

// SAFETY: the pointers are to memory on the heap that the connection owns: the segments, and the
// headers and data of slots. Nothing but the owning worker and the kernel uses them.
unsafe impl Send for Outbox {}

impl Outbox {
    pub(super) fn new() -> Self {
        // SAFETY: the structure consists of integers and pointers, and zeroes are valid for it.
        let message = unsafe { std::mem::zeroed() };
        Self {
            segments: vec![NO_SEGMENT; SEGMENTS_MAX].into_boxed_slice(),
            first: 0,
            count: 0,
            batch: Vec::with_capacity(usize::from(SLOTS)),
            message: Box::new(message),
            busy: false,
        }
    }

    /// Returns whether all of the message is sent.
    pub(super) fn is_empty(&self) -> bool {
        self.first == self.count
    }

    fn push(&mut self, at: *const u8, len: usize) {
        if len > 0
            && let Some(segment) = self.segments.get_mut(self.count)
        {
            *segment = iovec { iov_base: at.cast_mut().cast(), iov_len: len };
            self.count += 1;
        }
    }

    /// Adds the reply of a slot.
    fn add(&mut self, index: u16, slot: &Slot) {
        self.batch.push(index);
        self.push(slot.header.as_ptr(), slot.header_bytes);
        match &slot.data {
            Some(data) if slot.reply_bytes > 0 => self.push(data.ptr(), slot.reply_bytes),
            _ => self.push(slot.status.as_ptr(), slot.status.len()),
        }
    }

    /// Takes note that `n` bytes of the message were sent.
    fn advance(&mut self, mut n: usize) {
        while n > 0 && self.first < self.count {
            let Some(segment) = self.segments.get_mut(self.first) else { return };
            if n < segment.iov_len {
                segment.iov_base = segment.iov_base.wrapping_byte_add(n);
                segment.iov_len -= n;
                return;
            }
            n -= segment.iov_len;
            self.first += 1;
        }
    }
}

impl ConnectionQueue {
    /// Sends what is left of a message, or the replies that are ready.
    pub(super) fn send(&mut self, uring: &mut Uring, base: Token) {
        if self.leaving || !self.may_send() {
            return;
        }
        let Some(file) = self.file else { return };
        // A request is in the histograms before its client can see that it is complete.
        self.meter.publish();
        if self.outbox.is_empty() {
            (self.outbox.first, self.outbox.count) = (0, 0);
            while let Some(index) = self.replies.pop_front() {
                let Some(slot) = self.slots.get(usize::from(index)) else { continue };
                self.outbox.add(index, slot);
            }
        }
        let segments = self.outbox.segments.as_mut_ptr().wrapping_add(self.outbox.first);
        self.outbox.message.msg_iov = segments;
        self.outbox.message.msg_iovlen = (self.outbox.count - self.outbox.first) as _;
        let message = &raw const *self.outbox.message;
        let flags = libc::MSG_NOSIGNAL.cast_unsigned();
        let entry = on_file!(file, |fd| opcode::SendMsg::new(fd, message).flags(flags).build());
        self.outbox.busy = true;
        // SAFETY: message and segments are on the heap, and so are the slots with their headers,
        // data and states. The slots of the message are not free before it is sent, and the queue
        // is not dropped before it is at rest.
        unsafe { uring.push(entry, base.with(0, OP_SEND)) };
    }

    /// A send completed. Without MSG_WAITALL it may have sent a part; one that was cancelled has
    /// sent nothing.
    pub(super) fn sent(&mut self, result: i32) {
        self.outbox.busy = false;
        let Ok(n) = usize::try_from(result) else {
            match -result {
                libc::ECANCELED | libc::EINTR | libc::EAGAIN => {}
                libc::ECONNRESET | libc::EPIPE => self.fail(None),
                errno => {
                    let e = std::io::Error::from_raw_os_error(errno);
                    self.fail(Some(format!("is disconnected: nothing can be sent to it: {e}")));
                }
            }
            return;
        };
        self.outbox.advance(n);
        if !self.outbox.is_empty() {
            return;
        }
        QueueStats::add(&self.stats.notifications, 1);
        self.has_sent = true;
        let mut batch = std::mem::take(&mut self.outbox.batch);
        for index in batch.drain(..) {
            self.release(index);
        }
        self.outbox.batch = batch;
        self.ready = true;
    }

    /// Frees a slot whose reply is sent.
    fn release(&mut self, index: u16) {
        let slot = self.slot(index);
        slot.status.clear();
        if slot.status.capacity() > STATUS_BYTES_KEPT {
            slot.status = Vec::new();
        }
        if let Some(data) = slot.data.take() {
            self.memory.give(data);
        }
        self.free.push(index);
    }
}
