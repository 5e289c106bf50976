//! What a queue asks of the transport that delivers its requests and takes its replies.
//!
//! Two types implement it: [`ChannelTransport`](super::channel::ChannelTransport) and
//! [`UringTransport`](super::uring::UringTransport). Each queue has one of them for its whole life,
//! so [`FuseQueue`](super::FuseQueue) is generic over it, and a request passes no dispatch between
//! the two.
//!
//! All methods run on the thread of the worker that owns the queue. None of them waits.

use vshunt_engine::{Forwarder, Token, Uring};

use super::buffers::Buffers;
use crate::abi::{ARGS_MAX, InHeader};

/// Operation of the disk.
pub(crate) const OP_DISK: u8 = 0;
/// Operation of the transport: the poll of a channel, or an entry of a ring queue.
pub(crate) const OP_TRANSPORT: u8 = 1;
/// Poll of the queue's eventfd.
pub(crate) const OP_EVENTFD: u8 = 2;
/// The timer of a queue that waits for its limits.
pub(crate) const OP_LIMIT: u8 = 3;

/// Whether a poll is on the worker's io_uring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PollOp {
    /// It is not.
    Off,
    /// It is.
    On,
    /// It is cancelled, and its last completion is still to come.
    Cancelled,
}

/// A request that a transport delivered.
pub(crate) struct Request {
    /// Its request slot. The payload is in the slot's buffer.
    pub(crate) slot: u16,
    pub(crate) header: InHeader,
    pub(crate) args: [u8; ARGS_MAX],
    pub(crate) payload_bytes: usize,
    /// The transport expects no other request now.
    pub(crate) is_last: bool,
}

/// Result of [`QueueTransport::next`].
pub(crate) enum Next {
    Request(Request),
    /// Nothing was delivered, and the next attempt may deliver something. The kernel may have
    /// written to the slot's buffer.
    Retry {
        slot: u16,
    },
    /// There is no request now.
    Nothing,
    /// The mount is gone.
    Gone,
}

/// What a transport lost.
pub(crate) enum Failure {
    /// The mount is gone.
    Gone,
    /// The kernel does not use this entry any more.
    Entry { index: u16, errno: i32 },
}

/// See the module.
pub(crate) trait QueueTransport: Send + 'static {
    /// Requests that one queue serves at the same time. A power of two.
    const SLOTS: u16;
    /// Whether the structure of a reply is written to the slot's buffer.
    const REPLIES_IN_BUFFER: bool;
    /// Whether each request and each reply is a system call of its own, so that the times of a
    /// batch are not the times of its requests.
    const CALL_FOR_EACH: bool;

    /// Attach, step 4: starts to deliver requests.
    fn arm(&mut self, uring: &mut Uring, place: Token) -> Vec<Failure>;

    /// Takes a request, if there is one and a free slot for it.
    fn next(&mut self, buffers: &Buffers) -> Next;

    /// Replies to the request of a slot with a structure, or with an error (0 or a negative errno)
    /// and nothing else.
    fn reply(&mut self, buffers: &Buffers, slot: u16, unique: u64, error: i32, body: &[u8]);

    /// Replies with `len` bytes of the slot's buffer that begin at `skip`.
    fn reply_data(&mut self, buffers: &Buffers, slot: u16, unique: u64, skip: usize, len: usize);

    /// Takes a slot back whose request is replied to, or needs no reply.
    fn recycle(&mut self, slot: u16, uring: &mut Uring, place: Token);

    /// Whether [`next`](Self::next) is likely to deliver a request.
    fn has_work(&self) -> bool;

    /// [`has_work`](Self::has_work), after a system call if that is needed to know it.
    fn look(&self) -> bool;

    /// The worker is about to sleep: asks the kernel for a notification of the next request.
    fn sleep(&mut self, uring: &mut Uring, place: Token);

    /// Attach, step 2: delivers nothing more.
    fn disarm(&mut self, uring: &mut Uring, place: Token);

    /// The operation [`OP_TRANSPORT`] completed. `is_leaving`: between disarm and arm.
    fn complete(&mut self, slot: u16, result: i32, is_leaving: bool) -> Option<Failure>;

    /// The queue's eventfd was signalled.
    fn signalled(&mut self, is_leaving: bool) -> Vec<Failure>;

    /// Whether the kernel gives back by itself all operations that must be back before the queue
    /// leaves, and has done so. `is_closing`: the connection has ended.
    fn may_leave(&self, is_closing: bool) -> bool;

    /// Whether no poll of the transport is on the worker's io_uring.
    fn is_at_rest(&self) -> bool {
        true
    }

    /// See [`Queue::forwarder`](vshunt_engine::Queue::forwarder).
    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        None
    }

    /// The queue ends. If the kernel still uses the memory of requests, keeps the transport's part
    /// for ever and returns true: the caller must keep the buffers, too.
    fn keep_if_in_use(&mut self) -> bool {
        false
    }
}
