//! A ring queue of a mount (FUSE over io_uring, Linux 6.14): the requests of the tasks on one CPU, in entries.
//!
//! An entry is a header and a payload buffer that the kernel fills with a request; committing the reply fetches the next
//! one into it. Its command lives on the io_uring that it was submitted to, and the kernel gives it back in two cases
//! only: with a request, or when the connection ends. Closing that io_uring, or ending its thread, gives idle entries back
//! too, but a request that the kernel has just put into one of them is lost.
//!
//! So idle entries stay on the io_uring of the former worker when a queue moves. That worker forwards each that comes back
//! with a request ([`Returned`]) to the queue, which serves the request and commits the reply on its present worker's
//! io_uring: the entry has moved. The kernel gives the next request to the entry that became idle last, so entries in
//! steady use have moved after one request each.
//!
//! What must never happen: the buffers freed while an entry is with the kernel. [`Entries::idle`] counts those.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use io_uring::{opcode, types};
use libc::iovec;
use vshunt_engine::EventFd;
use vshunt_engine::{Forwarder, Token, Uring};

use super::abi::{OutHeader, Plain, RingCommand, RingHeader, RingInOut, ring};
use super::buffer::Buffers;

/// Where `addr` and `len` lie in a submission entry (io_uring_enter(2)): of the crate's builder for 80 command bytes
/// there is no way to set the length.
const SQE_ADDR: usize = 16;
const SQE_LEN: usize = 24;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum At {
    /// Not known to the kernel.
    New,
    /// With the kernel, waiting for a request, on the present worker's io_uring.
    Kernel,
    /// The same, on that of a former worker.
    Away,
    /// With us: a request to serve, or being served.
    Here,
    /// With us: the reply is written, to be committed.
    Replied,
    /// The kernel is done with it.
    Dead,
}

/// The entries of one queue.
pub(super) struct Entries {
    fd: Arc<OwnedFd>,
    qid: u16,
    headers: Buffers,
    payload_len: usize,
    /// For registering: what the kernel reads when it takes the submission.
    vectors: Box<[[iovec; 2]]>,
    at: Box<[At]>,
    /// Entries with the kernel, wherever.
    idle: u32,
    /// Those of them on io_urings of former workers; for the frontend.
    away: Arc<AtomicU32>,
    returned: Arc<Returned>,
}

/// Entries that came back on the io_uring of a former worker.
pub(super) struct Returned {
    /// Indexes and results. Held for a push or a swap.
    list: Mutex<Vec<(u16, i32)>>,
    /// Rung after a push; the queue's present worker polls it.
    eventfd: Arc<EventFd>,
}

/// On a former worker: passes entries that come back there on to their queue.
struct EntryForwarder {
    to: Arc<Returned>,
    left: u32,
}

impl Forwarder for EntryForwarder {
    fn forward(&mut self, token: Token, result: i32) {
        self.left = self.left.saturating_sub(1);
        self.to.list.locked().push((token.slot, result));
        self.to.eventfd.signal();
    }

    fn left(&self) -> u32 {
        self.left
    }
}

// SAFETY: the addresses in `vectors` are of buffers that the queue owns and takes along.
unsafe impl Send for Entries {}

impl Entries {
    /// Entries of the queue for CPU `qid`; payloads of `payload_len` bytes are in `payloads`. `eventfd` calls the queue, and
    /// `away` is kept up to date for other threads.
    pub(super) fn new(
        fd: Arc<OwnedFd>,
        qid: u16,
        payloads: &Buffers,
        count: u16,
        payload_len: usize,
        eventfd: Arc<EventFd>,
        away: Arc<AtomicU32>,
    ) -> std::io::Result<Self> {
        let headers = Buffers::new(1, usize::from(count) * HEADER_STRIDE)?;
        let vector = |i: u16| {
            let header = headers.at(0).wrapping_add(usize::from(i) * HEADER_STRIDE);
            [
                iovec { iov_base: header.cast(), iov_len: size_of::<RingHeader>() },
                iovec { iov_base: payloads.at(i).cast(), iov_len: payload_len },
            ]
        };
        let vectors = (0..count).map(vector).collect();
        let at = vec![At::New; count.into()].into();
        let returned = Arc::new(Returned { list: Mutex::default(), eventfd });
        Ok(Self { fd, qid, headers, payload_len, vectors, at, idle: 0, away, returned })
    }

    pub(super) fn payload_len(&self) -> usize {
        self.payload_len
    }

    fn header_ptr(&self, index: u16) -> *mut RingHeader {
        self.headers.at(0).wrapping_add(usize::from(index) * HEADER_STRIDE).cast()
    }

    /// The header of an entry that is with us.
    #[inline]
    pub(super) fn header(&self, index: u16) -> RingHeader {
        debug_assert!(matches!(self.at[usize::from(index)], At::Here));
        // SAFETY: ours, aligned, of any bytes; the kernel leaves it alone until the commit.
        unsafe { self.header_ptr(index).read() }
    }

    pub(super) fn at(&self, index: u16) -> At {
        self.at[usize::from(index)]
    }

    fn set(&mut self, index: u16, to: At) {
        let from = std::mem::replace(&mut self.at[usize::from(index)], to);
        let is_idle = |at| matches!(at, At::Kernel | At::Away);
        self.idle = self.idle + u32::from(is_idle(to)) - u32::from(is_idle(from));
        if from == At::Away || to == At::Away {
            let away = self.away() + u32::from(to == At::Away) - u32::from(from == At::Away);
            self.away.store(away, Relaxed);
        }
    }

    /// Entries with the kernel.
    pub(super) fn idle(&self) -> u32 {
        self.idle
    }

    /// Those of them on io_urings of former workers.
    pub(super) fn away(&self) -> u32 {
        self.away.load(Relaxed)
    }

    /// The queue leaves its worker, and idle entries do not: what is to take them there.
    pub(super) fn leave(&mut self) -> Option<Box<dyn Forwarder>> {
        let mut left = 0;
        for index in 0..self.at.len() as u16 {
            if self.at(index) == At::Kernel {
                self.set(index, At::Away);
                left += 1;
            }
        }
        (left > 0).then(|| Box::new(EntryForwarder { to: self.returned.clone(), left }) as Box<dyn Forwarder>)
    }

    /// Keeps the headers' memory, as [`Buffers::leak`] does.
    pub(super) fn leak(&mut self) {
        self.headers.leak();
        // The kernel may not have read those of a submission yet.
        std::mem::forget(std::mem::take(&mut self.vectors));
    }

    /// Takes the entries that came back on former workers.
    pub(super) fn take_returned(&mut self) -> Vec<(u16, i32)> {
        if self.away() == 0 {
            return Vec::new();
        }
        std::mem::take(&mut *self.returned.list.locked())
    }

    /// The kernel gave an entry back: with a request, or for good.
    pub(super) fn back(&mut self, index: u16, result: i32) -> bool {
        self.set(index, if result == 0 { At::Here } else { At::Dead });
        result == 0
    }

    /// Notes the reply of an entry: an error, or `payload` bytes that lie in its payload buffer.
    #[inline]
    pub(super) fn reply(&mut self, index: u16, unique: u64, error: i32, payload: usize) {
        let len = (size_of::<OutHeader>() + payload) as u32;
        let header = OutHeader { len, error, unique };
        // SAFETY: ours while it is here; the places are within the header, which is aligned to 8.
        unsafe {
            let to = self.header_ptr(index);
            (&raw mut (*to).in_out).cast::<OutHeader>().write(header);
            (&raw mut (*to).ent).write(RingInOut {
                commit_id: unique,
                payload_sz: payload as u32,
                ..Default::default()
            });
        }
        self.set(index, At::Replied);
    }

    /// Hands an entry to the kernel: new ones are registered, replies committed.
    #[inline]
    pub(super) fn submit(&mut self, index: u16, uring: &mut Uring, token: Token) {
        let mut command = RingCommand { qid: self.qid, ..Default::default() };
        let operation = match self.at(index) {
            At::New => ring::REGISTER,
            At::Replied => {
                // SAFETY: ours until it is committed; aligned, of any bytes.
                command.commit_id = unsafe { (&raw const (*self.header_ptr(index)).ent.commit_id).read() };
                ring::COMMIT_AND_FETCH
            }
            _ => return,
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<RingCommand>()].copy_from_slice(command.bytes());
        let mut entry = opcode::UringCmd80::new(types::Fd(self.fd.as_raw_fd()), operation).cmd(bytes).build();
        if operation == ring::REGISTER {
            let vector = self.vectors[usize::from(index)].as_ptr();
            // SAFETY: an Entry128 is the 128 bytes of the kernel's structure (the crate asserts its size); both places
            // are inside and aligned.
            unsafe {
                let sqe = (&raw mut entry).cast::<u8>();
                sqe.add(SQE_ADDR).cast::<u64>().write(vector as u64);
                sqe.add(SQE_LEN).cast::<u32>().write(2);
            }
        }
        self.set(index, At::Kernel);
        // SAFETY: the vectors, headers and payloads live until the queue is dropped, at rest: with no entry at the
        // kernel.
        unsafe { uring.push_wide(entry, token) }
    }
}

/// Headers lie a cache line apart.
const HEADER_STRIDE: usize = size_of::<RingHeader>().next_multiple_of(64);
