//! The thread of a connection.
//!
//! It never buffers without a bound. While the worker does not take what arrived, it reads nothing
//! from the peer, and the other way round.

use std::io::{self, BufReader};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::Connection;

use crate::flow::{BUFFER_BYTES, Bytes, Socket, would_block};
use crate::{LINGER, Side};

/// Encrypted bytes that wait for the peer, at most.
const WAITING_BYTES: usize = 256 << 10;

pub(crate) struct Carrier {
    tls: Connection,
    /// One read takes many records, and rustls alone takes about one.
    peer: BufReader<Socket<OwnedFd>>,
    own: UnixStream,
    side: Side,
    /// For the peer, not encrypted yet.
    up: Bytes,
    /// For the worker.
    down: Bytes,
    /// Why the peer sends nothing more.
    peer_ended: Option<String>,
    /// Why the peer takes nothing more. It may have answered before, and said why.
    unsent: Option<io::Error>,
    /// The worker sends nothing more.
    worker_ended: bool,
    /// The worker has closed its end: until when the peer may take the rest.
    closing: Option<Instant>,
}

impl Carrier {
    pub(crate) fn new(mut tls: Connection, peer: OwnedFd, own: UnixStream, side: Side) -> Self {
        tls.set_buffer_limit(Some(WAITING_BYTES));
        Self {
            tls,
            peer: BufReader::with_capacity(BUFFER_BYTES, Socket(peer)),
            own,
            side,
            up: Bytes::default(),
            down: Bytes::default(),
            peer_ended: None,
            unsent: None,
            worker_ended: false,
            closing: None,
        }
    }

    /// Carries bytes until one side ends. Returns why.
    pub(crate) fn run(&mut self) -> io::Result<String> {
        let mut told = false;
        loop {
            self.deliver()?;
            if let Some(why) = self.peer_ended.as_ref().filter(|_| !told && self.down.is_empty()) {
                if self.side == Side::Client {
                    return Ok(why.clone());
                }
                // The worker still answers what came before.
                let _ = self.own.shutdown(Shutdown::Write);
                told = true;
            }
            if self.unsent.is_none() {
                self.unsent = self.send().err();
            }
            // What the client has asked is not answered any more. The worker would wait until what
            // it has sent is taken.
            if let Some(e) = self.unsent.take_if(|_| self.side == Side::Server) {
                return Err(e);
            }
            let flushed = self.side == Side::Client || !self.tls.wants_write();
            if self.worker_ended && self.up.is_empty() && flushed {
                return Ok("this side closed it".to_owned());
            }
            let (from_peer, from_worker) = self.wait()?;
            if from_peer {
                self.peer_ended = self.read_peer()?;
            } else if let Some(e) = self.unsent.take_if(|_| self.down.is_empty()) {
                return Err(e);
            }
            if from_worker && !self.up.fill(&mut self.own)? {
                self.worker_ended = true;
                self.tls.send_close_notify();
            }
        }
    }

    /// Passes on what arrived, as far as the worker has taken what arrived before. An error of its
    /// socket shows in `wait`.
    fn deliver(&mut self) -> io::Result<()> {
        if self.closing.is_some() {
            return Ok(());
        }
        let _ = self.down.drain(&mut self.own);
        while self.down.is_empty() && self.peer_ended.is_none() {
            self.peer_ended = self.gather()?;
            if self.down.is_empty() {
                break;
            }
            let _ = self.down.drain(&mut self.own);
        }
        Ok(())
    }

    /// Encrypts and sends what the worker has written, as far as the peer takes it.
    fn send(&mut self) -> io::Result<()> {
        loop {
            self.up.drain(&mut self.tls.writer())?;
            while self.tls.wants_write() {
                match self.tls.write_tls(self.peer.get_mut()) {
                    Ok(_) => {}
                    Err(e) if would_block(&e) => return Ok(()),
                    Err(e) => return Err(e),
                }
            }
            // There is room for the rest now, and nothing else would wake this up.
            if self.up.is_empty() {
                return Ok(());
            }
        }
    }

    /// Decrypts for the worker what has arrived, as far as there is room. Returns why the
    /// connection has ended, if it has.
    fn gather(&mut self) -> io::Result<Option<String>> {
        while !self.down.is_full() {
            let before = self.down.end;
            if !self.down.fill(&mut self.tls.reader())? {
                return Ok(Some(self.closed()));
            }
            if self.down.end > before {
                continue;
            }
            if self.peer.buffer().is_empty() {
                break;
            }
            if let Some(why) = self.read_peer()? {
                return Ok(Some(why));
            }
        }
        Ok(None)
    }

    fn closed(&self) -> String {
        let peer = if self.side == Side::Client { "server" } else { "client" };
        format!("the {peer} closed it")
    }

    /// Takes what arrived, as far as one read of rustls goes. Returns why the connection has ended,
    /// if it has.
    fn read_peer(&mut self) -> io::Result<Option<String>> {
        match self.tls.read_tls(&mut self.peer) {
            Ok(0) => return Ok(Some(self.closed())),
            Ok(_) => {}
            Err(e) if would_block(&e) => return Ok(None),
            Err(e) => return Err(e),
        }
        self.tls.process_new_packets().map(|_| None).map_err(|e| {
            // The peer is told why, if it still listens.
            let _ = self.tls.write_tls(self.peer.get_mut());
            io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {e}"))
        })
    }

    /// Waits until something can be done. Returns whether the peer, and the worker, can be read. If
    /// the peer takes nothing more, this does not wait for it.
    fn wait(&mut self) -> io::Result<(bool, bool)> {
        let flags = |reads: bool, writes: bool| {
            let read = if reads { PollFlags::IN } else { PollFlags::empty() };
            read | if writes { PollFlags::OUT } else { PollFlags::empty() }
        };
        let (sends, open) = (self.unsent.is_none(), self.closing.is_none());
        let reads_peer = open && self.peer_ended.is_none() && self.down.is_empty() && self.tls.wants_read();
        let reads_worker = !self.worker_ended && sends && self.up.is_empty();
        if !open && reads_worker {
            return Ok((false, true));
        }
        let of_peer = flags(reads_peer, sends && self.tls.wants_write());
        let mut both = [
            PollFd::from_borrowed_fd(self.own.as_fd(), flags(reads_worker, !self.down.is_empty())),
            PollFd::from_borrowed_fd(self.peer.get_ref().as_fd(), of_peer),
        ];
        // The end of a peer of which nothing is wanted now shows later.
        let wanted = match (open, of_peer.is_empty()) {
            (true, true) => &mut both[..1],
            (true, false) => &mut both[..],
            (false, _) => &mut both[1..],
        };
        poll_until(wanted, if !sends && self.down.is_empty() { Some(Instant::now()) } else { self.closing })?;
        let [worker, peer] = both.map(|fd| fd.revents());
        let closed = PollFlags::HUP | PollFlags::ERR;
        if worker.intersects(closed) {
            self.worker_closed(reads_worker)?;
        } else if sends && self.closing.is_some_and(|until| until <= Instant::now()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let readable = PollFlags::IN | closed;
        Ok((reads_peer && peer.intersects(readable), reads_worker && worker.intersects(readable)))
    }

    /// The worker has closed its end: it takes nothing more, and what it has sent can be read.
    fn worker_closed(&mut self, reads_worker: bool) -> io::Result<()> {
        match self.side {
            Side::Server => {
                self.closing = Some(Instant::now() + LINGER);
                self.down.clear();
                Ok(())
            }
            Side::Client if reads_worker => Ok(()),
            // Nobody reads what would still be carried.
            Side::Client => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

fn poll_until(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        match poll(fds, left.as_ref()) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
