//! Messages to the thread that has a connection.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use ::nbd::Settings;
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
    /// With TLS: where the reason is, once it has ended.
    pub(super) ended: Option<Reason>,
}

/// A message.
pub(super) enum Message {
    /// There is a connection.
    Connected(Connected),
    /// There is none yet, and the time for which requests wait is over.
    Expired,
    /// A request of another thread, for the only connection of a disk.
    Request(Start),
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

/// A connection that is wanted.
pub(super) struct Ask {
    pub(super) port: Arc<Port>,
    /// Until when requests wait. None: they have failed already.
    pub(super) until: Option<Instant>,
    /// The former connection. None: there was none.
    pub(super) lost: Option<Lost>,
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

    /// Passes a request of another thread.
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
