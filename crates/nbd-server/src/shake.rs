//! A connection before its handshake is complete. It is served by the thread of the export, which
//! never waits for it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ::nbd::server::{Agreed, Negotiation, Offer, Progress};
use vshunt_tls::Socket;

use crate::tls::{Credentials, Secured, Step};

/// How long a handshake may take. Clients on other continents need about a second.
pub(crate) const SHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Most receives of one connection before the others have their turn.
const ROUNDS_MAX: u32 = 64;
/// Bytes of one receive.
const RECEIVE_BYTES: usize = 4096;

/// See the module.
pub(crate) struct Shake {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: String,
    pub(crate) until: Instant,
    negotiation: Negotiation,
    /// What TLS begins with, on an export that has it.
    credentials: Option<Credentials>,
    secured: Option<Secured>,
    agreed: Option<Agreed>,
    over: bool,
    /// It does not continue before a queue is free.
    pub(crate) held: bool,
    /// TLS follows what is sent now.
    starts_tls: bool,
    /// The handshake of TLS is not complete.
    tls_begins: bool,
    /// It has had its share, and may continue without anything from the client.
    more: bool,
}

/// A handshake that is complete.
pub(crate) struct Shaken {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: String,
    /// With TLS.
    pub(crate) secured: Option<Secured>,
    pub(crate) agreed: Agreed,
    /// Requests that came with the last option.
    pub(crate) rest: Vec<u8>,
}

/// How a handshake continues.
pub(crate) enum Outcome {
    /// It waits for the client.
    Waits,
    /// It is complete, see [`Shake::shaken`].
    Ready,
    /// The connection is to be closed; why, if the client did not end it as it should.
    Close(Option<String>),
}

impl Shake {
    pub(crate) fn new(socket: OwnedFd, peer: String, credentials: Option<Credentials>, now: Instant) -> Self {
        let negotiation = match credentials {
            Some(_) => Negotiation::with_tls(),
            None => Negotiation::new(),
        };
        Self {
            socket,
            peer,
            until: now + SHAKE_LIMIT,
            negotiation,
            credentials,
            secured: None,
            agreed: None,
            over: false,
            held: false,
            starts_tls: false,
            tls_begins: false,
            more: false,
        }
    }

    /// Returns whether it continues when the socket has room: to send an answer, or to look at
    /// options that have arrived already.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.sends() || self.more
    }

    fn sends(&self) -> bool {
        let encrypted = self.secured.as_ref().is_some_and(Secured::sends);
        encrypted || !self.negotiation.output().is_empty()
    }

    /// Returns whether it has a claim to a queue.
    pub(crate) fn has_agreed(&self) -> bool {
        self.agreed.is_some()
    }

    /// Returns whether the client asked for the export, and all queues had a client.
    pub(crate) fn was_refused(&self) -> bool {
        self.negotiation.was_refused()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Continues as far as possible without waiting.
    pub(crate) fn proceed(&mut self, offer: &Offer) -> Outcome {
        self.more = false;
        for _ in 0..ROUNDS_MAX {
            match self.round(offer) {
                Ok(None) => {}
                Ok(Some(outcome)) => return outcome,
                Err(e) => return failed(&e),
            }
        }
        self.more = true;
        Outcome::Waits
    }

    /// Continues by one receive at most. None: there may be more to do.
    fn round(&mut self, offer: &Offer) -> io::Result<Option<Outcome>> {
        if let Some(secured) = self.secured.as_mut().filter(|_| self.tls_begins) {
            match secured.shake(&self.socket)? {
                Step::Waits => return Ok(Some(Outcome::Waits)),
                Step::Again => return Ok(None),
                Step::Done => {
                    self.tls_begins = false;
                    self.negotiation.secured();
                }
            }
        }
        if !self.send()? {
            return Ok(Some(Outcome::Waits));
        }
        if self.agreed.is_some() {
            return Ok(Some(Outcome::Ready));
        }
        if self.over {
            if let Some(secured) = &mut self.secured {
                secured.close(&self.socket);
            }
            return Ok(Some(Outcome::Close(None)));
        }
        if self.starts_tls {
            return self.start_tls();
        }
        match self.negotiation.step(offer) {
            Ok(Progress::More) => {}
            Ok(Progress::StartTls) => self.starts_tls = true,
            Ok(Progress::Ready(agreed)) => self.agreed = Some(agreed),
            Ok(Progress::Over) => self.over = true,
            Err(violation) => {
                return Ok(Some(Outcome::Close(Some(format!("breaks the protocol: {violation}")))));
            }
        }
        if self.sends() || self.agreed.is_some() || self.over {
            return Ok(None);
        }
        self.receive()
    }

    /// Begins TLS, after the client was told that it may.
    fn start_tls(&mut self) -> io::Result<Option<Outcome>> {
        self.starts_tls = false;
        let Some(credentials) = &self.credentials else { return Ok(Some(Outcome::Close(None))) };
        self.secured = Some(credentials.begin().map_err(io::Error::other)?);
        self.tls_begins = true;
        Ok(None)
    }

    fn receive(&mut self) -> io::Result<Option<Outcome>> {
        let mut bytes = [0; RECEIVE_BYTES];
        let room = self.negotiation.room().min(RECEIVE_BYTES);
        let Some(bytes) = bytes.get_mut(..room) else { return Ok(Some(Outcome::Waits)) };
        let received = match &mut self.secured {
            Some(secured) => secured.receive(&self.socket, bytes),
            None => Socket(&self.socket).read(bytes),
        };
        match received {
            Ok(0) => Ok(Some(Outcome::Close(None))),
            Ok(n) => {
                self.negotiation.receive(bytes.get(..n).unwrap_or_default());
                Ok(None)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Some(Outcome::Waits)),
            Err(e) => Err(e),
        }
    }

    /// Sends what there is. Returns whether all of it was sent.
    fn send(&mut self) -> io::Result<bool> {
        while !self.negotiation.output().is_empty() {
            let output = self.negotiation.output();
            let sent = match &mut self.secured {
                Some(secured) => secured.send(&self.socket, output),
                None => Socket(&self.socket).write(output),
            };
            match sent {
                // TLS has no room before the client takes what it has.
                Ok(0) => return Ok(false),
                Ok(n) => self.negotiation.sent(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        match &mut self.secured {
            Some(secured) => secured.flush(&self.socket),
            None => Ok(true),
        }
    }

    /// Returns what the queue of the connection begins with. Called after [`Outcome::Ready`].
    pub(crate) fn shaken(self) -> Option<Shaken> {
        let Self { socket, peer, secured, negotiation, agreed, .. } = self;
        agreed.map(|agreed| Shaken { socket, peer, secured, agreed, rest: negotiation.into_rest() })
    }
}

fn failed(e: &io::Error) -> Outcome {
    use io::ErrorKind as Kind;
    match e.kind() {
        Kind::ConnectionReset | Kind::BrokenPipe | Kind::UnexpectedEof => Outcome::Close(None),
        // The client is at fault.
        Kind::InvalidData => Outcome::Close(Some(e.to_string())),
        _ => Outcome::Close(Some(format!("cannot be reached: {e}"))),
    }
}

/// Describes the peer of a connection for the log.
pub(crate) fn describe(socket: &OwnedFd) -> String {
    let name = rustix::net::getpeername(socket).ok().flatten();
    let tcp = name.and_then(|name| std::net::SocketAddr::try_from(name).ok());
    match (tcp, peer_process(socket)) {
        (Some(address), _) => address.to_string(),
        (None, Some(pid)) => format!("process {pid}"),
        (None, None) => format!("connection {}", socket.as_raw_fd()),
    }
}

/// Returns the process that connected to a UNIX socket (unix(7), `SO_PEERCRED`). None: the system
/// does not say, or it is in a PID namespace that this process does not see. For the latter the
/// system says 0, which the process numbers of rustix cannot be.
fn peer_process(socket: &OwnedFd) -> Option<libc::pid_t> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).ok()?;
    // SAFETY: the call writes at most `len` bytes, which is the length of `peer`. Both outlive it.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (failed == 0 && peer.pid > 0).then_some(peer.pid)
}
