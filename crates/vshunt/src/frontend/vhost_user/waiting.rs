//! Connections that wait while another front end is served, and what keeps them from holding that one open.
//!
//! A connection ends when the last descriptor of the front end's end is closed. A hostile front end may send that very end in a
//! connection that waits in the listener's queue, where nobody reads it, and leave. So connections are accepted at once, and what
//! they send is read ahead. One that sends descriptors before its turn is closed, and with it they are; so is one that finds all
//! places taken. Used by the session thread alone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use super::messages::Reader;

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
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        Reader::prepare(&stream)?;
        Ok(Self { stream, reader: Reader::default() })
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

    /// Reads ahead from all, forgets those that left or are closed, and accepts a connection.
    pub(super) fn look(&mut self) {
        let name = self.name;
        self.list.retain_mut(|connection| match connection.reader.read_ahead(&connection.stream) {
            Ok(()) => true,
            Err(e) => {
                if e.kind() == io::ErrorKind::InvalidData {
                    tracing::warn!("{name}: a front end that waits for its turn is closed: {e}");
                }
                false
            }
        });
        match self.listener.map(UnixListener::accept) {
            Some(Ok((stream, _))) => self.add(stream),
            Some(Err(e)) if e.kind() != io::ErrorKind::WouldBlock => self.cannot_accept(&e),
            _ => {}
        }
    }

    /// Says so, and pauses: the connection stays in the listener's queue, and would be tried again at once.
    pub(super) fn cannot_accept(&self, why: &io::Error) {
        tracing::error!("{}: cannot take a connection: {why}", self.name);
        std::thread::sleep(ACCEPT_PAUSE);
    }

    fn add(&mut self, stream: UnixStream) {
        if self.list.len() >= WAITING_MAX {
            tracing::warn!(
                "{}: a front end is closed: {WAITING_MAX} others wait for the one that is served to leave",
                self.name
            );
            return;
        }
        match Connection::new(stream) {
            Ok(connection) => self.list.push(connection),
            Err(e) => tracing::error!("{}: cannot take a connection: {e}", self.name),
        }
    }
}

#[cfg(test)]
mod tests;
