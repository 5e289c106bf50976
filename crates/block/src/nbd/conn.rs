//! A connection to a server, as a client of one io_uring.
//!
//! Requests of all queues of the worker gather in a [`Table`]. Before each enter, those that wait
//! go into one message: headers, and the segments of guest memory behind those of writes. One
//! message is in flight at a time, and one read.
//!
//! A read takes many replies at once. Their headers and short data arrive in a buffer. Data that is
//! announced and has not arrived goes straight to guest memory, with the buffer behind it for the
//! next headers.
//!
//! There is one that all workers share ([`One`](super::one::One)). A worker may have its own; while
//! it has none, it passes its requests to the shared one ([`own`]).
//!
//! | state | requests |
//! | --- | --- |
//! | waiting (shared) | wait for a connection |
//! | up | are sent |
//! | draining | wait until the kernel has no bytes of them any more. Then those of a worker are passed to the shared connection; those of the shared one wait or fail |
//! | failed (shared) | fail at once, until there is a connection. The first ones of a queue wait |
//! | sharing (own) | are passed to the shared connection |
//! | handing over (own) | wait until it is given away, and are passed on then; those in flight are waited for |

mod own;
mod segments;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use self::own::ASK_AFTER;

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::nbd::{CommandKind, HEADER_BYTES_MAX, REQUEST_BYTES_MAX, Receiver, Settings};
use io_uring::{opcode, squeue, types};
use qcow2::Found;
use rustix::fd::OwnedFd;
use vshunt_engine::{ClientId, RingClient, Uring, UringFile, on_file};

use self::segments::Segments;
use super::Shared;
use super::connector::Ask;
use super::port::{Connected, Lost, Message, Port, Reason, say_goodbye};
use super::table::{Dest, LONG_BYTES, Next, Start, Table};
use crate::shared_client::SharedClient;

/// Operations of a connection.
const OP_EVENT: u8 = 1;
const OP_SEND: u8 = 2;
const OP_RECEIVE: u8 = 3;
const OP_CANCEL: u8 = 4;
const OP_PAUSE: u8 = 5;
/// Most requests in one message.
const BATCH: usize = 128;
/// Bytes that are read at once into the buffer. They hold the replies of some ten short reads.
const BUFFER_BYTES: usize = 64 << 10;
/// The same while long reads are in flight, so that little of their data is copied.
const BUFFER_BYTES_LONG: usize = 1 << 10;
const _: () = assert!(BUFFER_BYTES_LONG > HEADER_BYTES_MAX && (BUFFER_BYTES_LONG as u64) < LONG_BYTES);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Up,
    Draining,
    Failed,
    Sharing,
    HandingOver,
}

/// The sending side.
struct Sender {
    /// The headers of the requests of the message.
    headers: Box<[u8]>,
    segments: Segments,
    /// Segments that are sent.
    first: usize,
    /// The requests of the message.
    batch: Vec<u32>,
    /// The request whose payload did not fit, and the bytes of it that are in messages.
    partial: Option<(u32, u64)>,
    busy: bool,
}

/// The receiving side.
struct Reader {
    buffer: Box<[u8]>,
    /// The bytes of the buffer that are not used up.
    start: usize,
    end: usize,
    /// Bytes that the read in flight puts straight to guest memory.
    direct: u64,
    segments: Segments,
    receiver: Receiver,
    busy: bool,
    /// The read in flight is to end: a cancel of it, or a pause before the next cancel, is in
    /// flight.
    stops: bool,
}

/// A connection. It belongs to one ring.
pub(super) struct Conn {
    shared: Arc<Shared>,
    /// None: it has no connection, and waits for none.
    port: Option<Arc<Port>>,
    /// It is for one worker. Otherwise all workers share it.
    own: bool,
    /// Requests that a worker has passed on before it asked for a connection of its own.
    passed: u32,
    /// The ring is not a worker's.
    aside: bool,
    /// Handles that use it.
    users: u32,
    state: State,
    table: Table,
    /// Requests that are to be sent, in order.
    waiting: VecDeque<u32>,
    socket: Option<(Arc<OwnedFd>, UringFile)>,
    settings: Settings,
    /// With TLS: where the reason is, once the connection has ended.
    ended: Option<Reason>,
    /// Without buffers until there is a connection.
    sender: Sender,
    reader: Reader,
    /// A poll of the port is in flight.
    listens: bool,
    /// It was removed from its ring.
    leaves: bool,
    /// Why the connection ended, for the log.
    why: String,
    /// A reply has arrived on this connection.
    replied: bool,
    /// The shared one: a connection that no worker needs, kept because this one ends.
    spare: Option<Connected>,
    /// Answers to [`Op::Seek`](crate::Op::Seek) that their queues have not taken: packed tokens.
    found: Vec<(u64, Found)>,
    messages: Vec<Message>,
}

// SAFETY: the pointers are those of segments, of which `IoVecs` says the same, and those to memory
// on the heap that the connection owns.
unsafe impl Send for Conn {}

impl SharedClient for Conn {
    type Disk = Shared;

    /// Without an eventfd it passes all its requests on.
    fn add(shared: &Arc<Shared>, uring: &mut Uring) -> ClientId {
        let port = if shared.connector.several { Port::new().ok().map(Arc::new) } else { None };
        shared.connector.join();
        let listens = port.is_some();
        let id = uring.add_client(Box::new(Self::new(shared, port, State::Sharing)));
        if listens {
            uring.submit_client(id);
        }
        id
    }

    fn disk(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn users(&mut self) -> &mut u32 {
        &mut self.users
    }
}

impl Sender {
    /// Without buffers.
    fn empty() -> Self {
        let (headers, segments) = (Box::default(), Segments::empty());
        Self { headers, segments, first: 0, batch: Vec::new(), partial: None, busy: false }
    }

    fn new() -> Self {
        let headers = vec![0; BATCH * REQUEST_BYTES_MAX].into_boxed_slice();
        Self { headers, segments: Segments::new(), batch: Vec::with_capacity(BATCH + 1), ..Self::empty() }
    }
}

impl Reader {
    /// Without buffers.
    fn empty(settings: &Settings) -> Self {
        let receiver = Receiver::new(settings.headers, settings.allocation);
        let (buffer, segments) = (Box::default(), Segments::empty());
        Self { buffer, start: 0, end: 0, direct: 0, segments, receiver, busy: false, stops: false }
    }

    fn new(settings: &Settings) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Self { buffer, segments: Segments::new(), ..Self::empty(settings) }
    }
}

impl Conn {
    /// Adds the shared connection to a ring. The first socket is in its port already.
    pub(super) fn add_common(shared: &Arc<Shared>, uring: &mut Uring) {
        let conn = Self::new(shared, Some(shared.common.clone()), State::Waiting);
        let id = uring.add_client(Box::new(conn));
        uring.submit_client(id);
    }

    fn new(shared: &Arc<Shared>, port: Option<Arc<Port>>, state: State) -> Self {
        let settings = shared.settings;
        Self {
            shared: shared.clone(),
            port,
            own: state == State::Sharing,
            passed: 0,
            aside: false,
            users: 0,
            state,
            table: Table::new(),
            waiting: VecDeque::new(),
            socket: None,
            settings,
            ended: None,
            sender: Sender::empty(),
            reader: Reader::empty(&settings),
            listens: false,
            leaves: false,
            why: String::new(),
            replied: false,
            spare: None,
            found: Vec::new(),
            messages: Vec::new(),
        }
    }

    /// Takes a request. Its result arrives as a completion.
    #[inline]
    pub(super) fn start(&mut self, uring: &mut Uring, id: ClientId, start: Start) {
        if self.own && !self.carries() {
            return self.pass_first(uring, start);
        }
        let at = self.table.add(start);
        if self.state == State::Failed && !self.waits_still(at) {
            return self.finish(uring, at, -libc::EIO);
        }
        self.waiting.push_back(at);
        if self.state == State::Failed {
            self.wait_for_first();
        }
        if self.state == State::Up && !self.sender.busy {
            uring.submit_client(id);
        }
    }

    /// Returns whether the connection is of use.
    fn carries(&self) -> bool {
        matches!(self.state, State::Up | State::HandingOver)
    }

    #[inline]
    fn finish(&mut self, uring: &mut Uring, at: u32, res: i32) {
        let (dest, found) = self.table.remove(at);
        let found = found.filter(|_| res == 0);
        match dest {
            Dest::Here(token) => {
                if let Some(found) = found {
                    self.found.push((token.pack(), found));
                }
                uring.done(token, res);
            }
            Dest::Ring { ring, token } => {
                if let Some(found) = found {
                    self.shared.common.put_found(ring, token, found);
                }
                uring.wake_with(ring, token, res);
            }
        }
    }

    /// Returns whether a request waits for a lost connection even if others fail.
    fn waits_still(&self, at: u32) -> bool {
        self.table.first_until(at).is_some_and(|until| until > Instant::now())
    }

    /// Returns until when the first of those requests waits. It may be over by now.
    fn first_wait(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|at| self.table.first_until(*at)).min()
    }

    /// Lets the connector tell when the time of the first of them is over.
    fn wait_for_first(&self) {
        if let Some(until) = self.first_wait() {
            self.shared.connector.wait_until(until);
        }
    }

    /// Fails requests that wait for a lost connection, except those that [wait
    /// still](Self::waits_still).
    fn fail_others(&mut self, uring: &mut Uring) {
        let waiting = std::mem::take(&mut self.waiting);
        for at in waiting {
            match self.waits_still(at) {
                true => self.waiting.push_back(at),
                false => self.finish(uring, at, -libc::EIO),
            }
        }
    }

    /// Fails the requests that were in flight on a connection that was lost at `time` or before,
    /// except those that [wait still](Self::waits_still).
    fn fail_lost(&mut self, uring: &mut Uring, time: Instant) {
        let waiting = std::mem::take(&mut self.waiting);
        for at in waiting {
            match self.table.was_lost_by(at, time) && !self.waits_still(at) {
                true => self.finish(uring, at, -libc::EIO),
                false => self.waiting.push_back(at),
            }
        }
    }

    /// Handles the messages of the port.
    fn read_messages(&mut self, uring: &mut Uring, id: ClientId) {
        let mut messages = std::mem::take(&mut self.messages);
        if let Some(port) = &self.port {
            port.take(&mut messages);
        }
        for message in messages.drain(..) {
            match message {
                Message::Connected(connected) => self.up(uring, id, connected),
                Message::Expired if matches!(self.state, State::Waiting | State::Failed) => {
                    self.state = State::Failed;
                    self.fail_others(uring);
                    self.wait_for_first();
                }
                Message::Expired => {}
                Message::Request(start) => self.start(uring, id, start),
                Message::Spare(connected) => self.take_spare(connected),
                Message::HandOver => self.begin_hand_over(uring, id),
                Message::Keep => self.keep(uring, id),
            }
        }
        self.messages = messages;
    }

    /// Uses a new connection.
    fn up(&mut self, uring: &mut Uring, id: ClientId, connected: Connected) {
        if self.leaves || !matches!(self.state, State::Waiting | State::Failed | State::Sharing) {
            return self.offer(connected);
        }
        let file = Arc::new(connected.socket);
        let registered: Arc<dyn AsRawFd + Send + Sync> = file.clone();
        self.socket = Some((file, uring.register_file(&registered)));
        self.settings = connected.settings;
        self.ended = connected.ended;
        if self.reader.buffer.is_empty() {
            (self.sender, self.reader) = (Sender::new(), Reader::new(&self.settings));
        }
        self.reader.receiver = Receiver::new(self.settings.headers, self.settings.allocation);
        (self.reader.start, self.reader.end) = (0, 0);
        self.sender.partial = None;
        self.replied = connected.replied;
        if !self.own && !self.replied {
            self.shared.answered.clear();
        }
        self.state = State::Up;
        self.receive(uring, id);
        uring.submit_client(id);
    }

    /// Ends a connection that is of no more use. Its requests stay until the kernel has no bytes of
    /// them.
    fn lost(&mut self, uring: &mut Uring, why: String) {
        if !self.carries() {
            return;
        }
        self.state = State::Draining;
        self.why = why;
        self.shut_down();
        self.settle(uring);
    }

    /// Ends a connection of which an operation failed. With TLS, its thread knows why.
    fn broken(&mut self, uring: &mut Uring, why: String) {
        let known = self.ended.as_ref().and_then(|ended| ended.get().cloned());
        self.lost(uring, known.unwrap_or(why));
    }

    fn shut_down(&self) {
        if let Some((file, _)) = &self.socket {
            // SAFETY: the call takes no memory; the descriptor is open.
            unsafe { libc::shutdown(file.as_raw_fd(), libc::SHUT_RDWR) };
        }
    }

    /// Continues after the loss of a connection, once its operations are complete.
    fn settle(&mut self, uring: &mut Uring) {
        if self.state != State::Draining || self.sender.busy || self.reader.busy {
            return;
        }
        if let Some((file, _)) = self.socket.take() {
            uring.unregister_file(file.as_raw_fd());
        }
        self.sender.partial = None;
        self.sender.batch.clear();
        self.reader.stops = false;
        let now = Instant::now();
        let delay = Duration::from_millis(self.shared.reconnect_ms);
        if !self.leaves {
            self.shared.unflushed.forget();
        }
        if self.own {
            return self.settle_own(uring, now, delay);
        }
        let until = match self.table.lost_first() {
            // The server may have ended long ago, while nothing was asked of it.
            None if !self.shared.answered.is_set() => self.shared.connector.first_until(),
            // Replies have arrived since then: this is another loss.
            Some(_) if self.replied => now + delay,
            since => since.unwrap_or(now) + delay,
        };
        self.table.again(&mut self.waiting, &self.settings, now);
        // A request with which each connection ends must not be sent for ever.
        if let Some(before) = now.checked_sub(delay) {
            self.fail_lost(uring, before.min(now - Duration::from_nanos(1)));
        }
        let waits = until > now;
        self.state = if waits { State::Waiting } else { State::Failed };
        if !waits {
            self.fail_others(uring);
        }
        let until = if waits { Some(until) } else { self.first_wait() };
        if let Some(port) = self.port.clone().filter(|_| !self.leaves) {
            let why = std::mem::take(&mut self.why);
            let lost = Lost { why, replied: self.replied };
            self.shared.connector.lost(Ask { port, until, tried: false }, lost);
            if let Some(spare) = self.spare.take() {
                self.offer(spare);
            }
        }
    }

    /// Makes a message of the requests that wait.
    fn gather(&mut self) {
        let Self { sender, table, waiting, settings, shared, state, .. } = self;
        let Sender { headers, segments, first, batch, partial, .. } = sender;
        segments.clear();
        batch.clear();
        *first = 0;
        let mut used = 0;
        if let Some((at, from)) = partial.take() {
            batch.push(at);
            *partial = payload(segments, table, shared, settings, at, from);
        }
        let takes = *state == State::Up;
        while takes && partial.is_none() && batch.len() < BATCH && segments.room() > 2 {
            let Some(at) = waiting.pop_front() else { break };
            let (command, bytes) = table.command(at, settings, &shared.unflushed);
            batch.push(at);
            let mut header = [0; REQUEST_BYTES_MAX];
            let len = command.encode(settings.headers, &mut header);
            let place = &mut headers[used..used + len];
            place.copy_from_slice(&header[..len]);
            segments.push(place.as_mut_ptr(), len);
            used += len;
            if bytes > 0 {
                *partial = payload(segments, table, shared, settings, at, 0);
            }
            debug_assert!(bytes > 0 || command.kind != CommandKind::Write);
        }
    }

    /// Sends what is left of the message.
    fn send(&mut self, uring: &mut Uring, id: ClientId) {
        let Some((_, file)) = &self.socket else { return };
        let message = self.sender.segments.message(self.sender.first);
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        let entry = on_file!(*file, |fd| opcode::SendMsg::new(fd, message).flags(flags).build());
        self.sender.busy = true;
        // SAFETY: the message, its segments and the headers are on the heap, and stay there while
        // this connection exists, which is until the completion (`Uring::remove_client`). The
        // memory of requests is valid until they are complete, which they are not while the sender
        // is busy with them (`Table::sent`, `settle`).
        unsafe { uring.push_for_client(entry, id, OP_SEND) };
    }

    fn sent(&mut self, uring: &mut Uring, id: ClientId, res: i32) {
        self.sender.busy = false;
        if !self.carries() {
            return self.settle(uring);
        }
        let Ok(mut bytes) = u64::try_from(res) else {
            return self.broken(uring, std::io::Error::from_raw_os_error(-res).to_string());
        };
        let segments = &mut self.sender.segments;
        if bytes < segments.bytes {
            segments.bytes -= bytes;
            while let Some(segment) = segments.all[..segments.count].get_mut(self.sender.first) {
                let len = segment.iov_len as u64;
                if bytes < len {
                    segment.iov_base = segment.iov_base.wrapping_byte_add(bytes as usize);
                    segment.iov_len -= bytes as usize;
                    break;
                }
                bytes -= len;
                self.sender.first += 1;
            }
            return self.send(uring, id);
        }
        let partial = self.sender.partial.map(|(at, _)| at);
        for i in 0..self.sender.batch.len() {
            let at = self.sender.batch[i];
            if Some(at) != partial && self.table.sent(at) {
                self.table.ended.push(at);
            }
        }
        self.end(uring);
        if partial.is_some() || !self.waiting.is_empty() {
            uring.submit_client(id);
        }
        self.continue_hand_over(uring, id);
    }

    /// Starts the next read.
    fn receive(&mut self, uring: &mut Uring, id: ClientId) {
        let Some((_, file)) = &self.socket else { return };
        let reader = &mut self.reader;
        if reader.busy || !matches!(self.state, State::Up | State::HandingOver) {
            return;
        }
        if reader.start > 0 {
            // What is left is a part of a header.
            reader.buffer.copy_within(reader.start..reader.end, 0);
            (reader.start, reader.end) = (0, reader.end - reader.start);
        }
        let room = if self.table.long_reads > 0 { BUFFER_BYTES_LONG } else { BUFFER_BYTES };
        reader.direct = 0;
        let entry = match reader.receiver.direct().filter(|_| reader.end == 0) {
            None => {
                let (ptr, len) = (reader.buffer[reader.end..].as_mut_ptr(), room - reader.end);
                on_file!(*file, |fd| opcode::Recv::new(fd, ptr, len as u32).build())
            }
            Some(direct) => {
                reader.segments.clear();
                let segments = &mut reader.segments;
                let mut fits = true;
                self.table.memory(direct.slot, direct.at, direct.left, |ptr, len| {
                    fits = fits && segments.push(ptr, len);
                });
                reader.direct = segments.bytes;
                if fits {
                    segments.push(reader.buffer.as_mut_ptr(), room);
                }
                let message = segments.message(0);
                on_file!(*file, |fd| opcode::RecvMsg::new(fd, message).build())
            }
        };
        reader.busy = true;
        // SAFETY: the message, its segments and the buffer are on the heap, and stay there while
        // this connection exists, which is until the completion. The memory of a request is valid
        // until it is complete, which it is not before its data has arrived or the reader has ended
        // (`settle`).
        unsafe { uring.push_for_client(entry, id, OP_RECEIVE) };
    }

    fn received(&mut self, uring: &mut Uring, id: ClientId, res: i32) {
        (self.reader.busy, self.reader.stops) = (false, false);
        if !self.carries() {
            return self.settle(uring);
        }
        let bytes = match u64::try_from(res) {
            Ok(0) => return self.broken(uring, "the server closed it".to_owned()),
            Ok(bytes) => bytes,
            // It has taken no bytes: a cancel has ended it, perhaps while a thread of io-wq was in
            // it.
            Err(_) if matches!(-res, libc::ECANCELED | libc::EINTR | libc::EAGAIN) => {
                return self.read_on(uring, id);
            }
            Err(_) => return self.broken(uring, std::io::Error::from_raw_os_error(-res).to_string()),
        };
        let reader = &mut self.reader;
        let direct = bytes.min(reader.direct);
        if direct > 0 {
            reader.receiver.received(direct, &mut self.table);
        }
        reader.end += (bytes - direct) as usize;
        match reader.receiver.take(&reader.buffer[reader.start..reader.end], &mut self.table) {
            Ok(used) => reader.start += used,
            Err(violation) => {
                return self.lost(uring, format!("the server broke the protocol: {violation}"));
            }
        }
        self.end(uring);
        self.read_on(uring, id);
        if self.state == State::Up && !self.waiting.is_empty() && !self.sender.busy {
            uring.submit_client(id);
        }
    }

    /// Continues after a read.
    fn read_on(&mut self, uring: &mut Uring, id: ClientId) {
        match self.state {
            State::HandingOver => self.continue_hand_over(uring, id),
            _ => self.receive(uring, id),
        }
    }

    /// Ends the requests whose reply is complete.
    #[inline]
    fn end(&mut self, uring: &mut Uring) {
        while let Some(at) = self.table.ended.pop() {
            let next = self.table.after(at, &self.settings, &self.shared.unflushed);
            if !matches!(next, Next::Again) {
                self.replied = true;
                if !self.shared.answered.is_set() {
                    self.shared.answered.set();
                }
            }
            match next {
                Next::Done(res) => self.finish(uring, at, res),
                Next::Send => self.waiting.push_back(at),
                Next::Again => return self.lost(uring, "the server says that it ends".to_owned()),
            }
        }
    }
}

/// Adds the payload of a write, from the byte `from` on. Returns how far it fits, if not to its
/// end.
fn payload(
    segments: &mut Segments,
    table: &Table,
    shared: &Shared,
    settings: &Settings,
    at: u32,
    from: u64,
) -> Option<(u32, u64)> {
    let len = table.piece(at);
    if table.sends_zeroes(at, settings) {
        // One piece is no longer than the zeroes.
        segments.push(shared.zeroes.ptr(), len as usize);
        return None;
    }
    let before = segments.bytes;
    let mut fits = true;
    table.memory(at, from, len - from, |ptr, len| fits = fits && segments.push(ptr, len));
    (!fits).then(|| (at, from + segments.bytes - before))
}

impl RingClient for Conn {
    fn submit(&mut self, uring: &mut Uring, id: ClientId) {
        if let Some(port) = self.port.as_ref().filter(|_| !self.listens && !self.leaves) {
            self.listens = true;
            let poll = opcode::PollAdd::new(types::Fd(port.fd()), libc::POLLIN as u32).multi(true);
            let entry: squeue::Entry = poll.build();
            // SAFETY: a poll names no memory.
            unsafe { uring.push_for_client(entry, id, OP_EVENT) };
        }
        if self.carries() && !self.sender.busy {
            self.gather();
            if self.sender.segments.bytes > 0 {
                self.send(uring, id);
            }
        }
    }

    fn complete(&mut self, uring: &mut Uring, id: ClientId, op: u8, result: i32, more: bool) {
        match op {
            OP_SEND => self.sent(uring, id, result),
            OP_RECEIVE => self.received(uring, id, result),
            OP_CANCEL => self.cancelled(uring, id, result),
            OP_PAUSE => self.cancel_again(uring, id),
            _ => {
                if !more {
                    self.listens = false;
                    if !self.leaves {
                        uring.submit_client(id);
                    }
                }
                self.read_messages(uring, id);
            }
        }
    }

    fn leave(&mut self, uring: &mut Uring, id: ClientId) {
        // A ring that is dropped asks again.
        if std::mem::replace(&mut self.leaves, true) {
            return;
        }
        if let Some(port) = &self.port {
            port.gone.set();
        }
        if self.listens {
            uring.cancel_for_client(id, OP_EVENT);
        }
        if self.own && self.leave_own(uring, id) {
            return;
        }
        if self.state != State::Up {
            return;
        }
        if let Some((file, _)) = self.socket.as_ref().filter(|_| !self.sender.busy) {
            say_goodbye(file, &self.settings);
        }
        self.state = State::Draining;
        self.shut_down();
        self.settle(uring);
    }
}
