//! Connections that wait while another front end is served. They must not keep its connection open.
//!
//! A connection ends when the last descriptor of the front end's socket is closed. A hostile front
//! end may send that socket over a second connection, which waits in the queue of the listener, and
//! disconnect. So connections are accepted at once, and their messages are read ahead. A connection
//! that sends descriptors before it is served is closed, together with these descriptors. A
//! connection is also closed if too many others wait. Used by the session thread only.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use super::messages::Reader;
use super::receive::Receiver;

/// Connections that may wait. One is usual: a VMM that takes over from another.
const WAITING_MAX: usize = 4;
/// The pause after a connection could not be accepted because descriptors or memory were used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection, and the bytes that were read from it.
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) reader: Reader,
}

impl Connection {
    /// Prepares a connection for reading.
    ///
    /// # Errors
    /// A socket option cannot be set. The connection is closed.
    pub(super) fn new(stream: UnixStream, receiver: &mut Receiver) -> io::Result<Self> {
        match Reader::prepare(&stream) {
            Ok(()) => Ok(Self { stream, reader: Reader::default() }),
            Err(e) => {
                close_unserved(stream, receiver);
                Err(e)
            }
        }
    }
}

/// See the module.
pub(super) struct Waiting<'a> {
    /// The export, for messages.
    name: &'a str,
    /// None if the export serves only one connection.
    listener: Option<&'a UnixListener>,
    /// In the order in which they connected.
    list: Vec<Connection>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(name: &'a str, listener: Option<&'a UnixListener>) -> Self {
        Self { name, listener, list: Vec::new() }
    }

    /// Takes the connection that is served next.
    pub(super) fn next(&mut self) -> Option<Connection> {
        if self.list.is_empty() { None } else { Some(self.list.remove(0)) }
    }

    /// Returns the descriptors that become readable when [`update`](Self::update) has something to
    /// do.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let connections = self.list.iter().map(|connection| connection.stream.as_fd());
        self.listener.iter().map(|listener| listener.as_fd()).chain(connections)
    }

    /// Reads ahead from all connections, closes those that ended or are refused, and accepts a
    /// connection.
    pub(super) fn update(&mut self, receiver: &mut Receiver) {
        for mut connection in std::mem::take(&mut self.list) {
            match connection.reader.read_ahead(&connection.stream) {
                Ok(()) => self.list.push(connection),
                Err(e) => {
                    if e.kind() == io::ErrorKind::InvalidData {
                        tracing::warn!("{}: a front end that waits for its turn is closed: {e}", self.name);
                    }
                    close_unserved(connection.stream, receiver);
                }
            }
        }
        match self.listener.map(UnixListener::accept) {
            Some(Ok((stream, _))) => self.add(stream, receiver),
            Some(Err(e)) if e.kind() != io::ErrorKind::WouldBlock => self.cannot_accept(&e),
            _ => {}
        }
    }

    /// Logs that a connection could not be accepted, and pauses. The connection stays in the queue
    /// of the listener, and would be tried again at once.
    pub(super) fn cannot_accept(&self, why: &io::Error) {
        tracing::error!("{}: cannot take a connection: {why}", self.name);
        std::thread::sleep(ACCEPT_PAUSE);
    }

    /// Closes all connections that wait. If the listener is `ours`, also closes those that were not
    /// accepted.
    pub(super) fn end(self, receiver: &mut Receiver, ours: bool) {
        self.list.into_iter().for_each(|connection| close_unserved(connection.stream, receiver));
        if let Some(listener) = self.listener
            && ours
        {
            // After this, no process can connect.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Read);
            while let Ok((stream, _)) = listener.accept() {
                close_unserved(stream, receiver);
            }
        }
    }

    fn add(&mut self, stream: UnixStream, receiver: &mut Receiver) {
        if self.list.len() >= WAITING_MAX {
            tracing::warn!(
                "{}: a front end is closed: {WAITING_MAX} others wait for the one that is served to leave",
                self.name
            );
            close_unserved(stream, receiver);
            return;
        }
        match Connection::new(stream, receiver) {
            Ok(connection) => self.list.push(connection),
            Err(e) => tracing::error!("{}: cannot take a connection: {e}", self.name),
        }
    }
}

/// Closes a connection that was never served.
pub(super) fn close_unserved(stream: UnixStream, receiver: &mut Receiver) {
    // Another process may have the socket open until its queued descriptors are closed.
    let _ = stream.shutdown(Shutdown::Both);
    receiver.close(stream);
}

#[cfg(test)]
mod tests;
