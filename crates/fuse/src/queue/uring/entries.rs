//! The entries of a ring queue.
//!
//! An entry is a header and a payload buffer. The kernel fills them with a request; the command
//! that commits the reply also fetches the next request. That command is on the io_uring that it
//! was submitted to. The kernel completes it in two cases only: with a request, or when the
//! connection ends. If that io_uring is closed or its thread ends, idle entries come back too, but
//! a request that the kernel has just put into one of them is lost.
//!
//! So idle entries stay on the io_uring of the former worker when a queue moves. That worker
//! forwards each entry that comes back with a request ([`ReturnedEntries`]) to the queue, which
//! serves it and commits the reply on the io_uring of its present worker. That moves the entry. The
//! kernel gives the next request to the entry that became idle last, so entries in steady use have
//! moved after one request each.
//!
//! What must never happen: the buffers are freed while an entry is with the kernel.
//! [`Entries::idle`] counts those.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use io_uring::{opcode, types};
use libc::iovec;
use vshunt_engine::EventFd;
use vshunt_engine::{Forwarder, Token, Uring};

use super::super::TRANSFER_BYTES_MAX;
use super::super::buffers::Buffers;
use super::super::per_slot::PerSlot;
use super::super::transport::OP_TRANSPORT;
use super::RingQueue;
use crate::abi::{ARGS_MAX, InHeader, OutHeader, Plain, RingCommand, RingHeader, RingInOut, ring};
use vshunt_types::convert::len_u32;

/// Where `addr` and `len` are in a submission entry (io_uring_enter(2)). The builder of the crate
/// `io_uring` for commands of 80 bytes cannot set the length.
const SQE_ADDR: usize = 16;
const SQE_LEN: usize = 24;
/// Headers are whole cache lines apart.
const HEADER_STRIDE: usize = size_of::<RingHeader>().next_multiple_of(64);
/// Bytes of a payload that the kernel is told of.
const PAYLOAD_BYTES: usize = TRANSFER_BYTES_MAX as usize;

/// Where an entry is. Edges: see [`Entries::set`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EntryState {
    /// The kernel does not know it yet.
    Unregistered,
    /// With the kernel, waiting for a request, on the io_uring of the present worker.
    Idle,
    /// The same, on the io_uring of a former worker.
    IdleOnFormer,
    /// With the queue: it has a request.
    Taken,
    /// With the queue: the reply is written, and is to be committed.
    Replied,
    /// The kernel does not use it any more.
    Dead,
}

impl EntryState {
    fn is_idle(self) -> bool {
        matches!(self, Self::Idle | Self::IdleOnFormer)
    }
}

/// See the module.
pub(super) struct Entries {
    fd: Arc<OwnedFd>,
    cpu: u16,
    headers: Buffers,
    /// Addresses of header and payload, which the kernel reads when an entry is registered.
    vectors: PerSlot<[iovec; 2]>,
    states: PerSlot<EntryState>,
    /// Entries that are with the kernel, on any io_uring.
    idle: u32,
    /// Those of them that are on io_urings of former workers. Other threads read it.
    forwarded: Arc<AtomicU32>,
    returned: Arc<ReturnedEntries>,
}

/// Entries that came back on the io_uring of a former worker.
struct ReturnedEntries {
    /// Indexes and results. Held for a push or a swap.
    list: Mutex<Vec<(u16, i32)>>,
    /// Signalled after a push. The queue's present worker polls it.
    eventfd: Arc<EventFd>,
}

/// Passes entries that come back on a former worker to their queue.
struct EntryForwarder {
    to: Arc<ReturnedEntries>,
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

// SAFETY: `vectors` holds addresses within `headers` and within the buffers of the same queue. Both
// move with the queue, and neither is tied to a thread.
unsafe impl Send for Entries {}

impl Entries {
    /// `count` entries, a power of two, with their payloads in `payloads`.
    ///
    /// # Errors
    /// The system's: no memory.
    pub(super) fn new(ring: RingQueue, payloads: &Buffers, count: u16) -> std::io::Result<Self> {
        let headers = Buffers::new(1, usize::from(count) * HEADER_STRIDE)?;
        debug_assert!(payloads.piece_bytes() >= PAYLOAD_BYTES);
        let vectors = PerSlot::new(count, |index| {
            let header = header_in(&headers, index);
            [
                iovec { iov_base: header.cast(), iov_len: size_of::<RingHeader>() },
                iovec { iov_base: payloads.at(index).cast(), iov_len: PAYLOAD_BYTES },
            ]
        });
        Ok(Self {
            fd: ring.fd,
            cpu: ring.cpu,
            headers,
            vectors,
            states: PerSlot::new(count, |_| EntryState::Unregistered),
            idle: 0,
            forwarded: ring.forwarded,
            returned: Arc::new(ReturnedEntries { list: Mutex::default(), eventfd: ring.eventfd }),
        })
    }

    /// The header, arguments and payload length of the request that an entry has.
    #[inline]
    pub(super) fn request(&self, index: u16) -> (InHeader, [u8; ARGS_MAX], usize) {
        debug_assert_eq!(self.states[index], EntryState::Taken);
        let header = header_in(&self.headers, index);
        // SAFETY: `header` is within `headers` and aligned to 64. The entry is with the queue, so
        // the kernel does not write to it, and any bytes are a value of the type.
        let header = unsafe { &*header };
        let args = header.op_in.first_chunk().copied().unwrap_or([0; ARGS_MAX]);
        let payload_bytes = usize::try_from(header.ent.payload_sz).unwrap_or(0);
        (InHeader::read(&header.in_out).unwrap_or_default(), args, payload_bytes)
    }

    /// The one setter of an entry's state. It keeps the counters.
    fn set(&mut self, index: u16, to: EntryState) {
        let from = std::mem::replace(&mut self.states[index], to);
        self.idle = self.idle + u32::from(to.is_idle()) - u32::from(from.is_idle());
        let (was_forwarded, is_forwarded) =
            (from == EntryState::IdleOnFormer, to == EntryState::IdleOnFormer);
        if was_forwarded != is_forwarded {
            let forwarded = self.forwarded.load(Relaxed) + u32::from(is_forwarded) - u32::from(was_forwarded);
            self.forwarded.store(forwarded, Relaxed);
        }
    }

    /// Entries that are with the kernel.
    pub(super) fn idle(&self) -> u32 {
        self.idle
    }

    /// The queue leaves its worker, and idle entries do not. Returns what takes them there.
    pub(super) fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        let mut left = 0;
        for index in self.states.indexes() {
            if self.states[index] == EntryState::Idle {
                self.set(index, EntryState::IdleOnFormer);
                left += 1;
            }
        }
        (left > 0).then(|| Box::new(EntryForwarder { to: self.returned.clone(), left }) as Box<dyn Forwarder>)
    }

    /// Keeps the memory for as long as the process runs.
    pub(super) fn leak(&mut self) {
        self.headers.leak();
        // The kernel may not have read the vectors of a submission yet.
        self.vectors.leak();
    }

    /// Takes the entries that came back on former workers: indexes and results.
    pub(super) fn take_returned(&mut self) -> Vec<(u16, i32)> {
        if self.forwarded.load(Relaxed) == 0 {
            return Vec::new();
        }
        std::mem::take(&mut *self.returned.list.locked())
    }

    /// The kernel gave an entry back. Returns whether it has a request; otherwise the kernel does
    /// not use it any more.
    pub(super) fn back(&mut self, index: u16, result: i32) -> bool {
        self.set(index, if result == 0 { EntryState::Taken } else { EntryState::Dead });
        result == 0
    }

    /// Writes the reply of an entry: an error, or `payload` bytes that are in its payload buffer.
    #[inline]
    pub(super) fn reply(&mut self, index: u16, unique: u64, error: i32, payload: usize) {
        debug_assert!(payload <= PAYLOAD_BYTES);
        let reply = OutHeader { len: len_u32(size_of::<OutHeader>() + payload), error, unique };
        // SAFETY: the pointer is within `headers` and aligned to 64. The entry is with the queue,
        // so that the kernel does not use it, and `self` is borrowed mutably.
        let header = unsafe { &mut *header_in(&self.headers, index) };
        if let Some(place) = header.in_out.first_chunk_mut() {
            *place = reply.to_bytes();
        }
        header.ent = RingInOut { commit_id: unique, payload_sz: len_u32(payload), ..Default::default() };
        self.set(index, EntryState::Replied);
    }

    /// Registers the entries that the kernel does not know yet.
    pub(super) fn register(&mut self, uring: &mut Uring, place: Token) {
        for index in self.states.indexes() {
            if self.states[index] == EntryState::Unregistered {
                self.submit(index, uring, place.with(index, OP_TRANSPORT));
            }
        }
    }

    /// Gives an entry to the kernel: a new one is registered, a reply is committed.
    #[inline]
    pub(super) fn submit(&mut self, index: u16, uring: &mut Uring, token: Token) {
        let mut command = RingCommand { qid: self.cpu, ..Default::default() };
        let operation = match self.states[index] {
            EntryState::Unregistered => ring::REGISTER,
            EntryState::Replied => {
                // SAFETY: the pointer is within `headers` and aligned to 64. The entry is with the
                // queue until this commit.
                command.commit_id = unsafe { (*header_in(&self.headers, index)).ent.commit_id };
                ring::COMMIT_AND_FETCH
            }
            _ => return,
        };
        let mut bytes = [0; 80];
        if let Some(place) = bytes.first_chunk_mut() {
            *place = command.to_bytes();
        }
        let mut entry = opcode::UringCmd80::new(types::Fd(self.fd.as_raw_fd()), operation).cmd(bytes).build();
        if operation == ring::REGISTER {
            let sqe = (&raw mut entry).cast::<u8>();
            let vectors = self.vectors[index].as_ptr() as u64;
            // SAFETY: an Entry128 is the kernel's structure of 128 bytes, aligned to 8 (the crate
            // asserts its size), so that its field of 8 bytes at offset 16 is inside and aligned.
            unsafe { sqe.wrapping_add(SQE_ADDR).cast::<u64>().write(vectors) };
            // SAFETY: the field of 4 bytes at offset 24 of that Entry128 is inside and aligned.
            unsafe { sqe.wrapping_add(SQE_LEN).cast::<u32>().write(2) };
        }
        self.set(index, EntryState::Idle);
        // SAFETY: vectors, headers and payloads live until the queue is dropped. It is dropped only
        // when no entry is with the kernel, or else it leaks them.
        unsafe { uring.push_wide(entry, token) }
    }
}

/// The address of an entry's header: within `headers`, since these were made with a stride for each
/// entry, and aligned to 64.
#[inline]
fn header_in(headers: &Buffers, index: u16) -> *mut RingHeader {
    headers.at(0).wrapping_add(usize::from(index) * HEADER_STRIDE).cast()
}
