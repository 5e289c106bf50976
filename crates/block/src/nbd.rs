//! `nbd`: a disk on a server, over the NBD protocol.
//!
//! | thread | does |
//! | --- | --- |
//! | control, when the disk is opened | looks the host up, connects, does the handshake |
//! | `vshunt-nbd`, one for each disk ([`maker`]) | connects again, does the handshake, writes log lines |
//! | `vshunt-nbd-one`, one for each disk ([`One`]) | serves the shared connection, for workers without one |
//! | worker | sends requests and takes replies by its io_uring ([`Conn`]) |
//!
//! A worker has one connection for all of its queues that use the disk. That needs a server that
//! lets several connections be used at once (NBD_FLAG_CAN_MULTI_CONN), and gives them: it may
//! refuse the next one, close it, or leave it unanswered. So there is always one connection that
//! all workers share. A worker passes its requests to it, until it has a connection of its own, and
//! again when it has lost that.
//!
//! With TLS, each connection has a thread of its own ([`tls`]).
//!
//! A worker never connects and never waits for a server. It asks the [`Connector`], and the socket
//! arrives in its [`Port`].
//!
//! What must never happen: a request completes while the kernel still has its memory. So a
//! connection that is lost is shut down first, and its requests are sent again, or fail, after the
//! last operation on its socket has completed.

mod conn;
mod connect;
mod connector;
mod flush;
mod in_use;
mod maker;
mod one;
mod open;
mod port;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod tls;
mod unflushed;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ::nbd::Settings;
use vshunt_engine::{ClientId, Token, Uring};
use vshunt_types::spec::{Cache, ConnectionsInfo};

use self::conn::Conn;
use self::connector::Connector;
pub(super) use self::flush::begin;
use self::in_use::InUse;
pub(super) use self::in_use::place_of;
use self::one::One;
pub use self::open::certificates_of;
pub(super) use self::open::{check, check_others, open, open_part};
use self::port::Port;
use self::table::{Dest, Start};
use self::unflushed::Unflushed;
use super::memory::Mapping;
use super::shared_client::{ClientHandle, join, part};
use super::{Io, Op, Step};

/// An open disk on a server.
pub(super) struct Nbd {
    shared: Arc<Shared>,
    /// The thread of the shared connection, for its end.
    _one: One,
    /// Held until the last request has ended, also by a thread whose caller has given up. None: the
    /// disk has `locking=off`.
    _in_use: Option<InUse>,
}

/// What the disk's connections share. Control threads make it; workers read it.
struct Shared {
    connector: Arc<Connector>,
    /// The port of the shared connection.
    common: Arc<Port>,
    /// The server has answered a request since the shared connection was made.
    answered: Flag,
    /// What was agreed on when the disk was opened. Later connections offer at least that.
    settings: Settings,
    readonly: bool,
    cache: Cache,
    /// How long requests wait for a lost connection, ms.
    reconnect_ms: u64,
    /// For servers without WriteZeroes.
    zeroes: Mapping,
    unflushed: Unflushed,
}

/// The disk, as one queue of a worker uses it.
pub(super) struct NbdHandle {
    nbd: Arc<Nbd>,
    /// The client of this worker, which has a connection or passes requests on.
    conn: ClientId,
    /// Until then requests wait for a lost connection. None: the server has answered one.
    first_until: Cell<Option<Instant>>,
}

impl Nbd {
    /// Makes the disk usable by one queue of the worker that owns `uring`.
    pub(super) fn attach(self: &Arc<Self>, uring: &mut Uring) -> NbdHandle {
        let conn = join::<Conn>(&self.shared, uring);
        uring.with_client(conn, |conn: &mut Conn, _| conn.queue_came());
        self.handle(conn)
    }

    /// [`attach`](Self::attach) for a thread that never has a connection of its own: between its
    /// requests it does nothing for its io_uring, so it could not hand it over.
    pub(super) fn attach_aside(self: &Arc<Self>, uring: &mut Uring) -> NbdHandle {
        let conn = join::<Conn>(&self.shared, uring);
        uring.with_client(conn, |conn: &mut Conn, _| conn.do_without());
        self.handle(conn)
    }

    /// [`attach_aside`](Self::attach_aside) for a request that fails as later ones do while the
    /// connection is lost.
    fn attach_late(self: &Arc<Self>, uring: &mut Uring) -> NbdHandle {
        let handle = self.attach_aside(uring);
        handle.first_until.set(None);
        handle
    }

    fn handle(self: &Arc<Self>, conn: ClientId) -> NbdHandle {
        let first_until = Cell::new(Some(self.shared.connector.first_until()));
        NbdHandle { nbd: self.clone(), conn, first_until }
    }

    /// Describes the connections.
    pub(super) fn connections(&self) -> ConnectionsInfo {
        self.shared.connector.info()
    }

    /// Returns the URI.
    pub(super) fn uri(&self) -> &str {
        &self.shared.connector.uri
    }

    /// Returns what the server said about the disk when it was opened.
    pub(super) fn settings(&self) -> &Settings {
        &self.shared.settings
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        self.shared.connector.stop();
    }
}

impl Shared {
    /// Decides what becomes of a request. Nothing: it goes to the server.
    #[inline]
    fn at_once(&self, io: &mut Io) -> Option<i32> {
        let (request, settings) = (&io.request, &self.settings);
        let range = request.offset | request.len;
        match request.op {
            Op::Read | Op::Write if request.len == 0 => return Some(0),
            Op::Read => {}
            Op::Flush => {
                let needed =
                    settings.has(::nbd::transmission_flag::SEND_FLUSH) && self.cache != Cache::Unsafe;
                return (!needed || self.readonly).then_some(0);
            }
            Op::Seek { .. } if settings.allocation.is_none() || request.len == 0 => {
                return Some(io.all_data());
            }
            // Its map may call zero what it has in a cache.
            Op::Seek { .. } if !self.unflushed.is_empty() && !self.unflushed.flush_is_due() => {
                return Some(io.all_data());
            }
            Op::Seek { .. } => {}
            Op::WriteCompressed | Op::Populate | Op::Allocate => return Some(-libc::EOPNOTSUPP),
            _ if self.readonly => return Some(-libc::EROFS),
            // A discard is a hint: a server may ignore it.
            Op::Discard if request.len == 0 || !settings.has(::nbd::transmission_flag::SEND_TRIM) => {
                return Some(0);
            }
            Op::WriteZeroes { .. } if request.len == 0 => return Some(0),
            Op::Write | Op::Discard | Op::WriteZeroes { .. } => {}
        }
        let fits = request.offset.checked_add(request.len).is_some_and(|end| end <= settings.size);
        let aligned = range & (u64::from(settings.blocks.minimum) - 1) == 0;
        match (fits, aligned) {
            (false, _) => Some(-libc::EIO),
            (true, false) => Some(-libc::EINVAL),
            (true, true) => None,
        }
    }

    /// Takes a request from its slot, for a table of requests.
    #[inline]
    fn begin(&self, io: &mut Io, dest: Dest) -> Start {
        let request = &mut io.request;
        let durable = request.is_durable(self.cache);
        let (offset, len) = request.range();
        Start {
            dest,
            op: request.op,
            fua: durable && matches!(request.op, Op::Write | Op::WriteZeroes { .. }),
            flush_first: matches!(request.op, Op::Seek { .. }) && !self.unflushed.is_empty(),
            offset,
            len,
            iov: std::mem::take(&mut request.iov),
            lost_at: None,
            first_until: None,
        }
    }
}

impl ClientHandle for NbdHandle {
    #[inline]
    fn start(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        if let Some(res) = self.nbd.shared.at_once(io) {
            return Step::Done(res);
        }
        let started = self.nbd.shared.begin(io, Dest::Here(token));
        let started = Start { first_until: self.first_until.get(), ..started };
        uring.with_client(self.conn, |conn: &mut Conn, uring| conn.start(uring, self.conn, started));
        Step::Wait
    }

    fn detach(self, uring: &mut Uring) {
        part::<Conn>(self.conn, uring);
    }
}

impl NbdHandle {
    /// See [`DiskHandle::resume`](super::DiskHandle::resume).
    #[inline]
    pub(super) fn resume(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        self.heard(res);
        if !matches!(io.request.op, Op::Seek { .. }) {
            return Step::Done(res);
        }
        let token = token.pack();
        let found = (res == 0)
            .then(|| uring.with_client(self.conn, |conn: &mut Conn, uring| conn.take_found(uring, token)))
            .flatten();
        // A server that does not know has said nothing against data. If it cannot be asked at all,
        // reading that data shows it.
        if found.is_none() {
            return Step::Done(io.all_data());
        }
        io.request.found = found;
        Step::Done(0)
    }

    /// Notes the result of a request.
    #[inline]
    pub(super) fn heard(&self, res: i32) {
        if res >= 0 && self.first_until.get().is_some() {
            self.first_until.set(None);
        }
    }

    /// Returns the URI, for messages.
    pub(super) fn path(&self) -> &std::path::Path {
        std::path::Path::new(&self.nbd.shared.connector.uri)
    }
}

/// A flag that threads set and others read.
#[derive(Default)]
struct Flag(AtomicBool);

impl Flag {
    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
