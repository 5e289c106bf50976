//! The transport over io_uring (Linux 6.14): the kernel has a ring queue for each CPU, with entries
//! that a queue registers.
//!
//! An entry that completes carries a request. To commit its reply is also to fetch the next request
//! into it.

mod entries;

use std::collections::VecDeque;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use vshunt_engine::{EventFd, Forwarder, Token, Uring};

use self::entries::Entries;
use super::buffers::Buffers;
use super::transport::{Failure, Next, OP_TRANSPORT, QueueTransport, Request};

/// Entries of one ring queue.
pub(crate) const RING_ENTRIES: u16 = 64;

/// Where the ring queue is and what observes it.
pub(crate) struct RingQueue {
    /// A descriptor of the connection.
    pub(crate) fd: Arc<OwnedFd>,
    /// The kernel's number of the ring queue: its CPU.
    pub(crate) cpu: u16,
    /// Signalled when an entry came back on the io_uring of a former worker.
    pub(crate) eventfd: Arc<EventFd>,
    /// Kept up to date: idle entries on io_urings of former workers.
    pub(crate) forwarded: Arc<AtomicU32>,
}

/// See the module.
pub(crate) struct UringTransport {
    entries: Entries,
    /// Entries with requests that are not taken yet.
    ready: VecDeque<u16>,
}

impl UringTransport {
    /// A transport whose payloads are in `buffers`.
    ///
    /// # Errors
    /// The system's: no memory.
    pub(super) fn new(ring: RingQueue, buffers: &Buffers) -> std::io::Result<Self> {
        Ok(Self {
            entries: Entries::new(ring, buffers, RING_ENTRIES)?,
            ready: VecDeque::with_capacity(RING_ENTRIES.into()),
        })
    }

    /// The kernel gave an entry back.
    fn entry_back(&mut self, index: u16, result: i32) -> Option<Failure> {
        if self.entries.back(index, result) {
            self.ready.push_back(index);
            return None;
        }
        match -result {
            libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV => Some(Failure::Gone),
            errno => Some(Failure::Entry { index, errno }),
        }
    }

    /// Takes the entries that came back on io_urings of former workers.
    fn take_returned(&mut self) -> Vec<Failure> {
        let returned = self.entries.take_returned();
        returned.into_iter().filter_map(|(index, result)| self.entry_back(index, result)).collect()
    }
}

impl QueueTransport for UringTransport {
    const SLOTS: u16 = RING_ENTRIES;
    const REPLIES_IN_BUFFER: bool = true;
    const CALL_FOR_EACH: bool = false;

    fn arm(&mut self, uring: &mut Uring, place: Token) -> Vec<Failure> {
        self.entries.register(uring, place);
        self.take_returned()
    }

    #[inline]
    fn next(&mut self, _: &Buffers) -> Next {
        // In the order of their arrival: with limits a request may wait here.
        let Some(slot) = self.ready.pop_front() else { return Next::Nothing };
        let (header, args, payload_bytes) = self.entries.request(slot);
        Next::Request(Request { slot, header, args, payload_bytes, is_last: false })
    }

    #[inline]
    fn reply(&mut self, buffers: &Buffers, slot: u16, unique: u64, error: i32, body: &[u8]) {
        debug_assert!(body.len() <= buffers.piece_bytes());
        // SAFETY: the slot's piece belongs to the queue until the reply is committed. It is longer
        // than each structure of the protocol, and `body` is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(body.as_ptr(), buffers.at(slot), body.len()) };
        self.entries.reply(slot, unique, error, body.len());
    }

    #[inline]
    fn reply_data(&mut self, buffers: &Buffers, slot: u16, unique: u64, skip: usize, len: usize) {
        debug_assert!(skip.saturating_add(len) <= buffers.piece_bytes());
        if skip > 0 {
            let to = buffers.at(slot);
            // SAFETY: `serve` rounds a read of at most the longest transfer to blocks, so that both
            // ranges are within the slot's piece, which belongs to the queue until the reply is
            // committed. They may overlap.
            unsafe { std::ptr::copy(to.wrapping_add(skip), to, len) };
        }
        self.entries.reply(slot, unique, 0, len);
    }

    #[inline]
    fn recycle(&mut self, slot: u16, uring: &mut Uring, place: Token) {
        // Also while the queue leaves: the entry then stays on this io_uring, and the reply does
        // not wait for the move.
        self.entries.submit(slot, uring, place.with(slot, OP_TRANSPORT));
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.ready.is_empty()
    }

    fn look(&self) -> bool {
        self.has_work()
    }

    fn sleep(&mut self, _: &mut Uring, _: Token) {}

    fn disarm(&mut self, _: &mut Uring, _: Token) {}

    #[inline]
    fn complete(&mut self, slot: u16, result: i32, _: bool) -> Option<Failure> {
        self.entry_back(slot, result)
    }

    fn signalled(&mut self, _: bool) -> Vec<Failure> {
        self.take_returned()
    }

    fn may_leave(&self, is_closing: bool) -> bool {
        !is_closing || self.entries.idle() == 0
    }

    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        self.entries.forwarder()
    }

    fn keep_if_in_use(&mut self) -> bool {
        let in_use = self.entries.idle() > 0;
        if in_use {
            self.entries.leak();
        }
        in_use
    }
}
