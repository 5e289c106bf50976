//! Connections that wait while another front end is served, and what keeps them from holding that one open.
//!
//! A connection ends when the last descriptor of the front end's end is closed. A hostile front end may send that very end in a
//! connection that waits in the listener's queue, where nobody reads it, and leave. So connections are accepted at once, and what
//! they send is read ahead. One that sends descriptors before its turn is closed, and with it they are; so is one that finds all
//! places taken. Used by the session thread alone.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use super::messages::Reader;
use super::receive::Receiver;

/// Connections that wait at most. One is usual: a VMM that takes over from another.
const WAITING_MAX: usize = 4;
/// How long to wait after a connection could not be accepted, which is for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection, and what was read of it.
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) reader: Reader,
}

impl Connection {
    /// Makes it ready to be read.
    ///
    /// # Errors
    /// It cannot be, and is closed.
    pub(super) fn new(stream: UnixStream, receiver: &mut Receiver) -> io::Result<Self> {
        match Reader::prepare(&stream) {
            Ok(()) => Ok(Self { stream, reader: Reader::default() }),
            Err(e) => {
                turn_away(stream, receiver);
                Err(e)
            }
        }
    }
}

/// See the module.
pub(super) struct Waiting<'a> {
    /// The export, for messages.
    name: &'a str,
    /// None: one connection is served, and no other.
    listener: Option<&'a UnixListener>,
    /// In the order in which they came.
    list: Vec<Connection>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(name: &'a str, listener: Option<&'a UnixListener>) -> Self {
        Self { name, listener, list: Vec::new() }
    }

    /// Takes the next connection to be served.
    pub(super) fn next(&mut self) -> Option<Connection> {
        if self.list.is_empty() { None } else { Some(self.list.remove(0)) }
    }

    /// What becomes readable when [`look`](Self::look) has something to do.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let connections = self.list.iter().map(|connection| connection.stream.as_fd());
        self.listener.iter().map(|listener| listener.as_fd()).chain(connections)
    }

    /// Reads ahead from all, closes those that left or have to go, and accepts a connection.
    pub(super) fn look(&mut self, receiver: &mut Receiver) {
        for mut connection in std::mem::take(&mut self.list) {
            match connection.reader.read_ahead(&connection.stream) {
                Ok(()) => self.list.push(connection),
                Err(e) => {
                    if e.kind() == io::ErrorKind::InvalidData {
                        tracing::warn!("{}: a front end that waits for its turn is closed: {e}", self.name);
                    }
                    turn_away(connection.stream, receiver);
                }
            }
        }
        match self.listener.map(UnixListener::accept) {
            Some(Ok((stream, _))) => self.add(stream, receiver),
            Some(Err(e)) if e.kind() != io::ErrorKind::WouldBlock => self.cannot_accept(&e),
            _ => {}
        }
    }

    /// Says so, and pauses: the connection stays in the listener's queue, and would be tried again at once.
    pub(super) fn cannot_accept(&self, why: &io::Error) {
        tracing::error!("{}: cannot take a connection: {why}", self.name);
        std::thread::sleep(ACCEPT_PAUSE);
    }

    /// Closes all that wait, and, of a listener that is `ours`, those that nobody has accepted.
    pub(super) fn end(self, receiver: &mut Receiver, ours: bool) {
        self.list.into_iter().for_each(|connection| turn_away(connection.stream, receiver));
        if let Some(listener) = self.listener
            && ours
        {
            // Nobody can connect after this.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Read);
            while let Ok((stream, _)) = listener.accept() {
                turn_away(stream, receiver);
            }
        }
    }

    fn add(&mut self, stream: UnixStream, receiver: &mut Receiver) {
        if self.list.len() >= WAITING_MAX {
            tracing::warn!(
                "{}: a front end is closed: {WAITING_MAX} others wait for the one that is served to leave",
                self.name
            );
            turn_away(stream, receiver);
            return;
        }
        match Connection::new(stream, receiver) {
            Ok(connection) => self.list.push(connection),
            Err(e) => tracing::error!("{}: cannot take a connection: {e}", self.name),
        }
    }
}

/// Closes a connection that was never served.
pub(super) fn turn_away(stream: UnixStream, receiver: &mut Receiver) {
    // Others may have it until its descriptors are closed.
    let _ = stream.shutdown(Shutdown::Both);
    receiver.close(stream);
}

#[cfg(test)]
mod tests;
