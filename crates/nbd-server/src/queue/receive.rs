//! What a client sends: headers, many at once, and the data of writes.

use ::nbd::server::{Request, Work, errno};
use ::nbd::{REQUEST_BYTES_MAX, Violation};
use io_uring::opcode;
use libc::{iovec, msghdr};
use vshunt_block::{Look, Op};
use vshunt_engine::{QueueStats, Token, Uring, UringFile, on_file};
use vshunt_types::convert::to_usize;

use super::memory::Lack;
use super::{ConnectionQueue, OP_RECEIVE, State};
use crate::shared::PAYLOAD_BYTES_MAX;

/// Bytes of the buffer of headers. It also holds what arrived with the handshake, and the data of
/// short writes.
const BUFFER_BYTES: usize = (64 << 10) + 4096;
const _: () = assert!(BUFFER_BYTES >= ::nbd::server::OPTION_BYTES_MAX + 16 + REQUEST_BYTES_MAX);
/// Bytes of headers that are received behind the data of a long write, so that little of the data
/// of the next one has to be copied.
const BUFFER_BYTES_LONG: usize = 1 << 10;
/// Bytes of data of a write from which on it is long.
const LONG_BYTES: u64 = 16 << 10;
/// Most questions of a connection to the map thread, which all connections of the export share.
const QUESTIONS_MAX: u32 = 4;

/// A request whose payload is not complete.
struct Incoming {
    slot: u16,
    /// Bytes of the payload.
    len: usize,
    /// Bytes that have arrived.
    got: usize,
    /// The error of a request that is refused. Its payload is dropped.
    refused: Option<u32>,
}

/// The receiving side.
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    /// The bytes of the buffer that are not used up.
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    /// Bytes of the receive in flight that go straight to the data of `incoming`.
    direct: usize,
    /// The last write was long.
    long: bool,
    segments: Box<[iovec; 2]>,
    message: Box<msghdr>,
    /// The client sends nothing more. What it has sent is still answered.
    finished: bool,
    /// A receive is in flight.
    pub(super) busy: bool,
}

// SAFETY: the pointers are to memory on the heap that the connection owns: the buffer, the segments
// and the data of slots. Nothing but the owning worker and the kernel uses them.
unsafe impl Send for Inbox {}

/// How a queue continues with what it has received.
pub(super) enum Next {
    /// A request was taken.
    Taken,
    /// There may be more.
    Again,
    /// More bytes, a slot or memory are needed.
    Wait,
    /// The request waits for its limits.
    Held,
}

const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl Inbox {
    /// `rest`: what has arrived, at most as much as a handshake leaves.
    pub(super) fn new(rest: &[u8]) -> Self {
        let mut buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        let end = rest.len().min(BUFFER_BYTES);
        if let (Some(to), Some(from)) = (buffer.get_mut(..end), rest.get(..end)) {
            to.copy_from_slice(from);
        }
        // SAFETY: the structure consists of integers and pointers, and zeroes are valid for it.
        let message = unsafe { std::mem::zeroed() };
        Self {
            buffer,
            start: 0,
            end,
            incoming: None,
            direct: 0,
            long: false,
            segments: Box::new([NO_SEGMENT; 2]),
            message: Box::new(message),
            finished: false,
            busy: false,
        }
    }

    fn bytes(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Takes note that `n` bytes are used up. They stay where they are, because a receive in flight
    /// puts more behind them.
    fn consume(&mut self, n: usize) {
        self.start += n;
        debug_assert!(self.start <= self.end);
    }

    /// Makes room behind the bytes that are not used up. Returns its length. No receive is in
    /// flight.
    fn room(&mut self) -> usize {
        debug_assert!(!self.busy);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.buffer.len() - self.end < self.buffer.len() / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let all = self.buffer.len() - self.end;
        if self.long { all.min(BUFFER_BYTES_LONG) } else { all }
    }
}

impl ConnectionQueue {
    /// Takes the next request, if it has arrived.
    pub(super) fn next(&mut self, uring: &mut Uring, base: Token, limited: bool) -> Next {
        if self.inbox.incoming.is_some() {
            return self.next_payload(uring, base);
        }
        if self.free.is_empty() {
            return Next::Wait;
        }
        match Request::parse(self.headers, self.inbox.bytes()) {
            Ok(Some((request, used))) => self.next_request(uring, base, limited, request, used),
            Ok(None) => self.starved(),
            Err(violation) => self.violated(violation),
        }
    }

    /// More bytes are needed. If none come, all that the client has sent is taken.
    fn starved(&mut self) -> Next {
        if self.inbox.finished {
            self.state = State::Closing;
        }
        Next::Wait
    }

    #[cold]
    fn violated(&mut self, Violation(what): Violation) -> Next {
        self.fail(Some(format!("is disconnected: it sent {what}")));
        Next::Wait
    }

    fn next_request(
        &mut self,
        uring: &mut Uring,
        base: Token,
        limited: bool,
        request: Request,
        used: usize,
    ) -> Next {
        let payload = request.payload(self.headers);
        if payload > u64::from(PAYLOAD_BYTES_MAX) {
            return self.violated(Violation("a request with more data than the largest block size"));
        }
        let work = request.check(&self.shared.rules(self.headers, !self.contexts.is_empty()));
        if work == Ok(Work::Disconnect) {
            self.state = State::Closing;
            return Next::Wait;
        }
        if self.questions >= QUESTIONS_MAX && matches!(work, Ok(Work::BlockStatus { .. })) {
            return Next::Wait;
        }
        let transfers = matches!(work, Ok(Work::Read | Work::Write { .. })) && request.len > 0;
        let data = match transfers.then(|| self.memory.take(to_usize(request.len))) {
            None => Ok(None),
            Some(Ok(data)) => Ok(Some(data)),
            Some(Err(Lack::Wait)) => return Next::Wait,
            Some(Err(Lack::NoMemory)) => Err(errno::ENOMEM),
        };
        if limited
            && let Some((op, bytes)) = charged(&request, work)
            && let Some((direction, bytes)) =
                self.handle.as_ref().and_then(|disk| disk.cost(op, request.offset, bytes))
            && !self.limit.ask(direction, bytes)
        {
            data.ok().flatten().into_iter().for_each(|data| self.memory.give(data));
            return Next::Held;
        }
        let Some(index) = self.free.pop() else { return Next::Wait };
        self.inbox.consume(used);
        let (work, refused) = match (work, &data) {
            (Ok(work), Ok(_)) => (work, None),
            (Err(error), _) => (Work::Flush, Some(error)),
            (Ok(_), Err(error)) => (Work::Flush, Some(*error)),
        };
        let slot = self.slot(index);
        (slot.request, slot.work) = (request, work);
        slot.data = data.ok().flatten();
        slot.reply_bytes = 0;
        slot.rest = 0..0;
        slot.flushes = false;
        if payload > 0 {
            // The data of a write that is refused goes to the buffer, and is dropped there.
            self.inbox.long = payload >= LONG_BYTES && self.slot(index).data.is_some();
            self.inbox.incoming = Some(Incoming { slot: index, len: to_usize(payload), got: 0, refused });
            return Next::Again;
        }
        self.begin(uring, base, index, refused);
        Next::Taken
    }

    /// Continues with a request whose payload arrives. Begins it when the payload is complete.
    fn next_payload(&mut self, uring: &mut Uring, base: Token) -> Next {
        let Some(mut incoming) = self.inbox.incoming.take() else { return Next::Again };
        let n = self.inbox.bytes().len().min(incoming.len - incoming.got);
        if n > 0 {
            let index = usize::from(incoming.slot);
            let data = self.slots.get_mut(index).and_then(|slot| slot.data.as_mut());
            let place = data.and_then(|data| data.bytes().get_mut(incoming.got..incoming.got + n));
            if let (Some(place), Some(bytes)) = (place, self.inbox.bytes().get(..n)) {
                place.copy_from_slice(bytes);
            }
            self.inbox.consume(n);
            incoming.got += n;
        }
        if incoming.got < incoming.len {
            self.inbox.incoming = Some(incoming);
            return self.starved();
        }
        // The queue may have been drained while the payload was on its way, and the disk resized.
        let rules = self.shared.rules(self.headers, !self.contexts.is_empty());
        let request = self.slot(incoming.slot).request;
        let refused = incoming.refused.or_else(|| request.check(&rules).err());
        self.begin(uring, base, incoming.slot, refused);
        Next::Taken
    }

    /// Receives more, if there is room and nothing is received yet.
    pub(super) fn receive(&mut self, uring: &mut Uring, base: Token) {
        if self.inbox.busy || self.inbox.finished || self.leaving || self.state != State::Open {
            return;
        }
        let Some(file) = self.file else { return };
        let mut payload = None;
        self.inbox.direct = 0;
        if let Some(incoming) = &self.inbox.incoming {
            let index = usize::from(incoming.slot);
            let data = self.slots.get_mut(index).and_then(|slot| slot.data.as_mut());
            // The bytes in the buffer come first. `next_payload` has taken them, unless the queue
            // has had its share of this iteration.
            if let Some(data) = data.filter(|_| self.inbox.bytes().is_empty() && incoming.refused.is_none()) {
                self.inbox.direct = incoming.len - incoming.got;
                let place = data.ptr().wrapping_add(incoming.got);
                payload = Some(iovec { iov_base: place.cast(), iov_len: self.inbox.direct });
            }
        }
        let room = self.inbox.room();
        let place = self.inbox.buffer.as_mut_ptr().wrapping_add(self.inbox.end);
        let rest = (room > 0).then_some(iovec { iov_base: place.cast(), iov_len: room });
        let (segments, count) = match (payload, rest) {
            (Some(payload), Some(rest)) => ([payload, rest], 2),
            (Some(only), None) | (None, Some(only)) => ([only, NO_SEGMENT], 1),
            (None, None) => return,
        };
        *self.inbox.segments = segments;
        self.inbox.message.msg_iov = self.inbox.segments.as_mut_ptr();
        self.inbox.message.msg_iovlen = count;
        let message = &raw mut *self.inbox.message;
        let entry = receive_entry(file, message);
        self.inbox.busy = true;
        // SAFETY: message, segments, buffer and data are on the heap. They stay there while the
        // receive is in flight: the queue is not dropped before it is at rest, the buffer is not
        // moved while `busy`, and the slot of `incoming` keeps its data until its payload is
        // complete, which it cannot be before this completion.
        unsafe { uring.push(entry, base.with(0, OP_RECEIVE)) };
    }

    /// A receive completed.
    pub(super) fn received(&mut self, result: i32) {
        self.inbox.busy = false;
        self.ready = true;
        QueueStats::add(&self.stats.kicks, 1);
        let Ok(n) = usize::try_from(result) else {
            match -result {
                libc::ECANCELED | libc::EINTR | libc::EAGAIN => {}
                libc::ECONNRESET | libc::EPIPE => self.fail(None),
                errno => {
                    let e = std::io::Error::from_raw_os_error(errno);
                    self.fail(Some(format!("is disconnected: nothing can be received from it: {e}")));
                }
            }
            return;
        };
        if n == 0 {
            if self.shared.is_stopping() {
                return self.fail(None);
            }
            // Requests that wait for a slot or for memory are taken before the connection closes.
            self.inbox.finished = true;
            return;
        }
        let direct = n.min(self.inbox.direct);
        if let Some(incoming) = &mut self.inbox.incoming {
            incoming.got += direct;
        }
        self.inbox.end += n - direct;
    }
}

fn receive_entry(file: UringFile, message: *mut msghdr) -> io_uring::squeue::Entry {
    on_file!(file, |fd| opcode::RecvMsg::new(fd, message).build())
}

/// Returns what limits look at: the operation and its length; for a request that is refused a
/// length of 0. None: requests that are no operation of the disk.
fn charged(request: &Request, work: Result<Work, u32>) -> Option<(Op, u64)> {
    use ::nbd::CommandKind as Kind;
    let op = match request.command()? {
        Kind::Read => Op::Read,
        Kind::Write => Op::Write,
        Kind::Trim => Op::Discard,
        Kind::WriteZeroes => {
            Op::WriteZeroes { unmap: matches!(work, Ok(Work::WriteZeroes { unmap: true, .. })) }
        }
        Kind::Flush => Op::Flush,
        Kind::BlockStatus => Op::Seek { look: Look::Disk },
        Kind::Disconnect => return None,
    };
    Some((op, if work.is_ok() { request.len } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_valid_request_is_charged() {
        let of = |kind| Request { flags: 0, kind, cookie: 0, offset: 0, len: 4 << 30 };
        let zeroes = Work::WriteZeroes { unmap: true, fua: false };
        let zero = Op::WriteZeroes { unmap: true };
        let seek = Op::Seek { look: Look::Disk };
        for (kind, work, wanted) in [
            (0, Ok(Work::Read), Some((Op::Read, 4 << 30))),
            (1, Ok(Work::Write { fua: false }), Some((Op::Write, 4 << 30))),
            (6, Ok(zeroes), Some((zero, 4 << 30))),
            (4, Ok(Work::Trim { fua: false }), Some((Op::Discard, 4 << 30))),
            (0, Err(errno::EINVAL), Some((Op::Read, 0))),
            (1, Err(errno::EPERM), Some((Op::Write, 0))),
            (3, Ok(Work::Flush), Some((Op::Flush, 4 << 30))),
            (7, Ok(Work::BlockStatus { one: false }), Some((seek, 4 << 30))),
            (99, Err(errno::EINVAL), None),
        ] {
            assert_eq!(charged(&of(kind), work), wanted, "type {kind}");
        }
    }
}
