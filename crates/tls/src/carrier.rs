//! The thread of a connection.
//!
//! It never buffers without a bound. While the worker does not take what arrived, it reads nothing
//! from the peer, and the other way round.

use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ClientConnection;

use crate::flow::{BUFFER_BYTES, Bytes, Socket, would_block};

/// Why a connection has ended that its server has closed.
const CLOSED: &str = "the server closed it";
/// Encrypted bytes that wait for the peer, at most.
const WAITING_BYTES: usize = 256 << 10;

pub(crate) struct Carrier {
    tls: ClientConnection,
    /// One read takes many records, and rustls alone takes about one.
    peer: BufReader<Socket<OwnedFd>>,
    own: UnixStream,
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
}

impl Carrier {
    pub(crate) fn new(mut tls: ClientConnection, peer: OwnedFd, own: UnixStream) -> Self {
        tls.set_buffer_limit(Some(WAITING_BYTES));
        Self {
            tls,
            peer: BufReader::with_capacity(BUFFER_BYTES, Socket(peer)),
            own,
            up: Bytes::default(),
            down: Bytes::default(),
            peer_ended: None,
            unsent: None,
            worker_ended: false,
        }
    }

    /// Carries bytes until one side ends. Returns why.
    pub(crate) fn run(&mut self) -> io::Result<String> {
        loop {
            self.deliver()?;
            if let Some(why) = self.peer_ended.as_ref().filter(|_| self.down.is_empty()) {
                return Ok(why.clone());
            }
            if self.unsent.is_none() {
                self.unsent = self.send().err();
            }
            if self.worker_ended && self.up.is_empty() {
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
                return Ok(Some(CLOSED.to_owned()));
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

    /// Takes what arrived, as far as one read of rustls goes. Returns why the connection has ended,
    /// if it has.
    fn read_peer(&mut self) -> io::Result<Option<String>> {
        match self.tls.read_tls(&mut self.peer) {
            Ok(0) => return Ok(Some(CLOSED.to_owned())),
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
        let sends = self.unsent.is_none();
        let reads_peer = self.peer_ended.is_none() && self.down.is_empty() && self.tls.wants_read();
        let reads_worker = !self.worker_ended && sends && self.up.is_empty();
        let of_peer = flags(reads_peer, sends && self.tls.wants_write());
        let mut both = [
            PollFd::from_borrowed_fd(self.own.as_fd(), flags(reads_worker, !self.down.is_empty())),
            PollFd::from_borrowed_fd(self.peer.get_ref().as_fd(), of_peer),
        ];
        // The end of a peer of which nothing is wanted now shows later.
        let wanted = if of_peer.is_empty() { &mut both[..1] } else { &mut both[..] };
        wait_for(wanted, sends || !self.down.is_empty())?;
        let [worker, peer] = both.map(|fd| fd.revents());
        let closed = PollFlags::HUP | PollFlags::ERR;
        if worker.intersects(closed) && !reads_worker {
            // Nobody reads what would still be carried.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let readable = PollFlags::IN | closed;
        Ok((reads_peer && peer.intersects(readable), reads_worker && worker.intersects(readable)))
    }
}

/// Polls, and waits for an event if `waits`.
fn wait_for(fds: &mut [PollFd<'_>], waits: bool) -> io::Result<()> {
    let at_once = Timespec::default();
    loop {
        match poll(fds, (!waits).then_some(&at_once)) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
