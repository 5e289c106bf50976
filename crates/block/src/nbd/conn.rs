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
//! | state | requests |
//! | --- | --- |
//! | waiting | wait for a connection |
//! | up | are sent |
//! | draining | wait until the kernel has no bytes of them any more; then they wait or fail |
//! | failed | fail at once, until there is a connection |

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::nbd::{CommandKind, DISCONNECT, HEADER_BYTES_MAX, REQUEST_BYTES_MAX, Receiver, Settings};
use io_uring::{opcode, squeue, types};
use libc::{iovec, msghdr};
use qcow2::Found;
use vshunt_engine::{ClientId, RingClient, Uring, UringFile, on_file};

use super::Shared;
use super::port::{Ask, Connected, Lost, Message, Port, Reason};
use super::table::{Dest, LONG_BYTES, Next, Start, Table};
use crate::shared_client::SharedClient;

/// Operations of a connection.
const OP_EVENT: u8 = 1;
const OP_SEND: u8 = 2;
const OP_RECEIVE: u8 = 3;
/// Most requests in one message.
const BATCH: usize = 128;
/// Most segments in one message (the kernel's UIO_MAXIOV).
const SEGMENTS_MAX: usize = 1024;
/// Bytes that are read at once into the buffer. They hold the replies of some ten short reads.
const BUFFER_BYTES: usize = 64 << 10;
/// The same while long reads are in flight, so that little of their data is copied.
const BUFFER_BYTES_LONG: usize = 1 << 10;
const _: () = assert!(BUFFER_BYTES_LONG > HEADER_BYTES_MAX && (BUFFER_BYTES_LONG as u64) < LONG_BYTES);

const NO_SEGMENT: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Up,
    Draining,
    Failed,
}

/// Segments of a message that the kernel sends or fills.
struct Segments {
    all: Box<[iovec]>,
    count: usize,
    bytes: u64,
    header: Box<msghdr>,
}

impl Segments {
    fn new() -> Self {
        // SAFETY: the structure consists of integers and pointers, and zeroes are valid for it.
        let header = unsafe { std::mem::zeroed() };
        let all = vec![NO_SEGMENT; SEGMENTS_MAX].into_boxed_slice();
        Self { all, count: 0, bytes: 0, header: Box::new(header) }
    }

    fn clear(&mut self) {
        (self.count, self.bytes) = (0, 0);
    }

    fn room(&self) -> usize {
        self.all.len() - self.count
    }

    /// Adds a segment, as a part of the last one if it follows it. Returns false if there is no
    /// room.
    #[inline]
    fn push(&mut self, ptr: *mut u8, len: usize) -> bool {
        if self.count > 0 {
            let last = &mut self.all[self.count - 1];
            if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == ptr {
                last.iov_len += len;
                self.bytes += len as u64;
                return true;
            }
        }
        if self.room() == 0 {
            return false;
        }
        self.all[self.count] = iovec { iov_base: ptr.cast(), iov_len: len };
        self.count += 1;
        self.bytes += len as u64;
        true
    }

    /// Returns the header of a message with the segments from `first` on.
    fn message(&mut self, first: usize) -> *mut msghdr {
        self.header.msg_iov = self.all[first..self.count].as_mut_ptr();
        self.header.msg_iovlen = (self.count - first) as _;
        &raw mut *self.header
    }
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
}

/// A connection. It belongs to one ring.
pub(super) struct Conn {
    shared: Arc<Shared>,
    port: Arc<Port>,
    /// Handles that use it.
    users: u32,
    state: State,
    table: Table,
    /// Requests that are to be sent, in order.
    waiting: VecDeque<u32>,
    socket: Option<(Arc<dyn AsRawFd + Send + Sync>, UringFile)>,
    settings: Settings,
    /// With TLS: where the reason is, once the connection has ended.
    ended: Option<Reason>,
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
    /// Answers to [`Op::Seek`](crate::Op::Seek) that their queues have not taken: packed tokens.
    found: Vec<(u64, Found)>,
    messages: Vec<Message>,
}

// SAFETY: the pointers are those of segments, of which `IoVecs` says the same, and those to memory
// on the heap that the connection owns.
unsafe impl Send for Conn {}

impl SharedClient for Conn {
    type Disk = Shared;

    /// If no eventfd can be made, its requests fail.
    fn add(shared: &Arc<Shared>, uring: &mut Uring) -> ClientId {
        match Port::new() {
            Ok(port) => Self::add_with(shared, uring, Arc::new(port)),
            Err(_) => Self::insert(shared, uring, None),
        }
    }

    fn disk(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn users(&mut self) -> &mut u32 {
        &mut self.users
    }
}

impl Conn {
    /// Adds a connection with this port to a ring.
    pub(super) fn add_with(shared: &Arc<Shared>, uring: &mut Uring, port: Arc<Port>) -> ClientId {
        let id = Self::insert(shared, uring, Some(port.clone()));
        uring.submit_client(id);
        let until = shared.connector.first_until();
        shared.connector.ask(Ask { port, until: Some(until), lost: None });
        id
    }

    fn insert(shared: &Arc<Shared>, uring: &mut Uring, port: Option<Arc<Port>>) -> ClientId {
        let state = if port.is_some() { State::Waiting } else { State::Failed };
        let settings = shared.settings;
        let sender = Sender {
            headers: vec![0; BATCH * REQUEST_BYTES_MAX].into_boxed_slice(),
            segments: Segments::new(),
            first: 0,
            batch: Vec::with_capacity(BATCH + 1),
            partial: None,
            busy: false,
        };
        let reader = Reader {
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            direct: 0,
            segments: Segments::new(),
            receiver: Receiver::new(settings.headers, settings.allocation),
            busy: false,
        };
        uring.add_client(Box::new(Self {
            shared: shared.clone(),
            port: port.unwrap_or_else(|| shared.connector.no_port()),
            users: 0,
            state,
            table: Table::new(),
            waiting: VecDeque::new(),
            socket: None,
            settings,
            ended: None,
            sender,
            reader,
            listens: false,
            leaves: false,
            why: String::new(),
            replied: false,
            found: Vec::new(),
            messages: Vec::new(),
        }))
    }

    /// Takes a request. Its result arrives as a completion.
    #[inline]
    pub(super) fn start(&mut self, uring: &mut Uring, id: ClientId, start: Start) {
        let at = self.table.add(start);
        if self.state == State::Failed {
            return self.finish(uring, at, -libc::EIO);
        }
        self.waiting.push_back(at);
        if self.state == State::Up && !self.sender.busy {
            uring.submit_client(id);
        }
    }

    /// Removes and returns the answer to a request for the state of a range.
    pub(super) fn take_found(&mut self, token: u64) -> Option<Found> {
        let at = self.found.iter().position(|(of, _)| *of == token)?;
        Some(self.found.swap_remove(at).1)
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
                    self.port.put_found(ring, token, found);
                }
                uring.wake_with(ring, token, res);
            }
        }
    }

    fn fail_all(&mut self, uring: &mut Uring) {
        while let Some(at) = self.waiting.pop_front() {
            self.finish(uring, at, -libc::EIO);
        }
    }

    /// Fails the requests that were in flight on a connection that was lost at `time` or before.
    fn fail_lost(&mut self, uring: &mut Uring, time: Instant) {
        let (failed, left) =
            self.waiting.drain(..).partition::<Vec<_>, _>(|at| self.table.was_lost_by(*at, time));
        self.waiting.extend(left);
        for at in failed {
            self.finish(uring, at, -libc::EIO);
        }
    }

    /// Handles the messages of the port.
    fn read_messages(&mut self, uring: &mut Uring, id: ClientId) {
        let mut messages = std::mem::take(&mut self.messages);
        self.port.take(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Connected(connected) => self.up(uring, id, connected),
                Message::Expired if self.state == State::Waiting => {
                    self.state = State::Failed;
                    self.fail_all(uring);
                }
                Message::Expired => {}
                Message::Request(start) => self.start(uring, id, start),
            }
        }
        self.messages = messages;
    }

    /// Uses a new connection.
    fn up(&mut self, uring: &mut Uring, id: ClientId, connected: Connected) {
        if self.leaves || !matches!(self.state, State::Waiting | State::Failed) {
            return;
        }
        let file: Arc<dyn AsRawFd + Send + Sync> = Arc::new(connected.socket);
        let registered = uring.register_file(&file);
        self.socket = Some((file, registered));
        self.settings = connected.settings;
        self.ended = connected.ended;
        self.reader.receiver = Receiver::new(self.settings.headers, self.settings.allocation);
        (self.reader.start, self.reader.end) = (0, 0);
        self.sender.partial = None;
        self.replied = false;
        self.state = State::Up;
        self.receive(uring, id);
        uring.submit_client(id);
    }

    /// Ends a connection that is of no more use. Its requests stay until the kernel has no bytes of
    /// them.
    fn lost(&mut self, uring: &mut Uring, why: String) {
        if self.state != State::Up {
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
        let now = Instant::now();
        let delay = Duration::from_millis(self.shared.reconnect_ms);
        let until = match self.table.lost_first() {
            // The server may have ended long ago, while nothing was asked of it.
            None if !self.replied => self.shared.connector.first_until(),
            // Replies have arrived since then: this is another loss.
            Some(_) if self.replied => now + delay,
            since => since.unwrap_or(now) + delay,
        };
        self.table.again(&mut self.waiting, &self.settings, now);
        if !self.leaves {
            self.shared.unflushed.forget();
        }
        // A request with which each connection ends must not be sent for ever.
        if let Some(before) = now.checked_sub(delay) {
            self.fail_lost(uring, before.min(now - Duration::from_nanos(1)));
        }
        let waits = until > now;
        self.state = if waits { State::Waiting } else { State::Failed };
        if !waits {
            self.fail_all(uring);
        }
        if !self.leaves {
            let lost = Some(Lost { why: std::mem::take(&mut self.why), replied: self.replied });
            self.shared.connector.ask(Ask { port: self.port.clone(), until: waits.then_some(until), lost });
        }
    }

    /// Makes a message of the requests that wait.
    fn gather(&mut self) {
        let Self { sender, table, waiting, settings, shared, .. } = self;
        let Sender { headers, segments, first, batch, partial, .. } = sender;
        segments.clear();
        batch.clear();
        *first = 0;
        let mut used = 0;
        if let Some((at, from)) = partial.take() {
            batch.push(at);
            *partial = payload(segments, table, shared, settings, at, from);
        }
        while partial.is_none() && batch.len() < BATCH && segments.room() > 2 {
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
        if self.state != State::Up {
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
    }

    /// Starts the next read.
    fn receive(&mut self, uring: &mut Uring, id: ClientId) {
        let Some((_, file)) = &self.socket else { return };
        let reader = &mut self.reader;
        if reader.busy || self.state != State::Up {
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
        self.reader.busy = false;
        if self.state != State::Up {
            return self.settle(uring);
        }
        let bytes = match u64::try_from(res) {
            Ok(0) => return self.broken(uring, "the server closed it".to_owned()),
            Ok(bytes) => bytes,
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
        self.receive(uring, id);
        if !self.waiting.is_empty() && !self.sender.busy {
            uring.submit_client(id);
        }
    }

    /// Ends the requests whose reply is complete.
    #[inline]
    fn end(&mut self, uring: &mut Uring) {
        while let Some(at) = self.table.ended.pop() {
            match self.table.after(at, &self.settings, &self.shared.unflushed) {
                Next::Done(res) => {
                    self.replied = true;
                    self.finish(uring, at, res);
                }
                Next::Send => {
                    self.replied = true;
                    self.waiting.push_back(at);
                }
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
        if !self.listens && !self.leaves {
            self.listens = true;
            let poll = opcode::PollAdd::new(types::Fd(self.port.fd()), libc::POLLIN as u32).multi(true);
            let entry: squeue::Entry = poll.build();
            // SAFETY: a poll names no memory.
            unsafe { uring.push_for_client(entry, id, OP_EVENT) };
        }
        if self.state == State::Up && !self.sender.busy {
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
        self.leaves = true;
        self.port.gone.set();
        if self.listens {
            uring.cancel_for_client(id, OP_EVENT);
        }
        if self.state != State::Up {
            return;
        }
        if let Some((file, _)) = self.socket.as_ref().filter(|_| !self.sender.busy) {
            let mut header = [0; REQUEST_BYTES_MAX];
            let len = DISCONNECT.encode(self.settings.headers, &mut header);
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: the call reads the header, which is on this stack, before it returns.
            unsafe { libc::send(file.as_raw_fd(), header.as_ptr().cast(), len, flags) };
        }
        self.state = State::Draining;
        self.shut_down();
        self.settle(uring);
    }
}
