//! Messages to the thread that has a connection.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, OnceLock};

use ::nbd::{DISCONNECT, REQUEST_BYTES_MAX, Settings};
use qcow2::Found;
use rustix::fd::OwnedFd;
use vshunt_engine::EventFd;
use vshunt_types::sync::Locked;

use super::Flag;
use super::table::Start;

/// Why a TLS connection ended, for the log. Empty until then.
pub(super) type Reason = Arc<OnceLock<String>>;

/// A connected socket after the handshake.
pub(super) struct Connected {
    /// It blocks: an io_uring waits for it by itself.
    pub(super) socket: OwnedFd,
    pub(super) settings: Settings,
    /// The server has answered a request on it: another thread had it before.
    pub(super) replied: bool,
    /// With TLS: where the reason is, once it has ended.
    pub(super) ended: Option<Reason>,
}

impl Connected {
    /// Ends a connection on which nothing is in flight.
    pub(super) fn end(self) {
        say_goodbye(&self.socket, &self.settings);
        // SAFETY: the call takes no memory; the descriptor is open.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

/// Tells the server that the client leaves, if there is room for that.
pub(super) fn say_goodbye(socket: &OwnedFd, settings: &Settings) {
    let mut header = [0; REQUEST_BYTES_MAX];
    let len = DISCONNECT.encode(settings.headers, &mut header);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the call reads the header, which is on this stack, before it returns.
    unsafe { libc::send(socket.as_raw_fd(), header.as_ptr().cast(), len, flags) };
}

/// A message.
pub(super) enum Message {
    /// There is a connection.
    Connected(Connected),
    /// To the shared connection: it is not there, and the time for which requests wait is over.
    Expired,
    /// To the shared connection: a request of a worker.
    Request(Start),
    /// To the shared connection: a connection that no worker needs.
    Spare(Connected),
    /// To a worker: the shared connection needs the worker's own.
    HandOver,
    /// To a worker: the shared connection needs it no more.
    Keep,
}

/// What a connection waits for.
pub(super) struct Port {
    /// Guards the messages that were not taken. Held for a push or a swap.
    messages: Mutex<Vec<Message>>,
    /// Guards the answers to [`Op::Seek`](crate::Op::Seek) of other threads' rings: ring, token,
    /// answer. Held for a push or a removal.
    found: Mutex<Vec<(u64, u64, Found)>>,
    event: EventFd,
    /// The connection is of no more use.
    pub(super) gone: Flag,
}

/// A connection that has ended.
pub(super) struct Lost {
    /// Why, for the log.
    pub(super) why: String,
    /// The server has answered a request on it.
    pub(super) replied: bool,
}

impl Port {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            messages: Mutex::default(),
            found: Mutex::default(),
            event: EventFd::make()?,
            gone: Flag::default(),
        })
    }

    /// Returns the descriptor that becomes readable when there are messages.
    pub(super) fn fd(&self) -> i32 {
        self.event.fd()
    }

    pub(super) fn send(&self, message: Message) {
        let mut messages = self.messages.locked();
        let first = messages.is_empty();
        messages.push(message);
        drop(messages);
        if first {
            self.event.signal();
        }
    }

    /// Wakes the receiver without a message.
    pub(super) fn wake(&self) {
        self.event.signal();
    }

    /// Passes a request to the shared connection.
    pub(super) fn pass(&self, start: Start) {
        self.send(Message::Request(start));
    }

    /// Moves the messages to `into`, which is empty.
    pub(super) fn take(&self, into: &mut Vec<Message>) {
        self.event.take();
        std::mem::swap(&mut *self.messages.locked(), into);
    }

    pub(super) fn put_found(&self, ring: u64, token: u64, found: Found) {
        self.found.locked().push((ring, token, found));
    }

    pub(super) fn take_found(&self, ring: u64, token: u64) -> Option<Found> {
        let mut all = self.found.locked();
        let at = all.iter().position(|(r, t, _)| (*r, *t) == (ring, token))?;
        Some(all.swap_remove(at).2)
    }
}
