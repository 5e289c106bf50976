//! The messages that wait for one client, and for how long the client has been waited for.
//!
//! The reader thread of the client puts answers, any thread puts events, and the writer thread
//! takes both. Both kinds have a bound in bytes. The reader waits for room before it runs a
//! command, so a client has at most one answer above the bound. An event that does not fit ends the
//! connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};
use vshunt_types::sync::Locked;

/// The bytes of answers that a client has not read, from which on none of its commands runs.
pub(super) const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The most bytes of events that wait for a client: about 30,000 events. One attach of an export
/// with 256 queues has 256 of them.
pub(super) const EVENT_BYTES_MAX: usize = 4 << 20;

/// How long a client may leave its answers unread when no more fit into its socket.
pub(super) const READ_TIME: Duration = Duration::from_secs(60);

pub(super) type Line = Arc<str>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Answer,
    Event,
}

#[derive(Default)]
struct State {
    lines: VecDeque<(Kind, Line)>,
    /// Bytes of answers, with those of the line that is being written.
    answer_bytes: usize,
    /// Bytes of events.
    event_bytes: usize,
    /// Nothing more is put. The writer ends after the last line.
    complete: bool,
    /// The connection is closed. Nothing is sent any more.
    closed: bool,
    /// The time of the last bytes from the client, while the rest of its negotiation or of a
    /// command is waited for.
    unfinished_since: Option<Instant>,
    /// The time when the client read something last, while a line is being written.
    unread_since: Option<Instant>,
}

impl State {
    fn bytes(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::Answer => &mut self.answer_bytes,
            Kind::Event => &mut self.event_bytes,
        }
    }

    fn put(&mut self, kind: Kind, line: Line) {
        *self.bytes(kind) += line.len();
        self.lines.push_back((kind, line));
    }

    /// Returns whether the client should read what waits for it. A client may leave events unread.
    fn has_to_read(&self) -> bool {
        self.answer_bytes > 0 || self.complete
    }

    /// Returns since when the client has been waited for. None if it is not: a command runs, or the
    /// client has negotiated and waits for events.
    fn waited_for_since(&self) -> Option<Instant> {
        self.unread_since.filter(|_| self.has_to_read()).or(self.unfinished_since)
    }
}

/// The connection was closed.
pub(super) struct Closed;

/// The messages and the connection of one client.
pub(super) struct Outbox {
    stream: UnixStream,
    /// Held for a look or a change, and for one `send` that does not wait. It is taken with the map
    /// of clients locked, never the other way round.
    state: Mutex<State>,
    changed: Condvar,
}

impl Outbox {
    /// Makes the outbox of a client that has just connected.
    pub(super) fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(READ_TIME))?;
        let state = State { unfinished_since: Some(Instant::now()), ..State::default() };
        Ok(Self { stream, state: state.into(), changed: Condvar::new() })
    }

    /// Returns the connection, to read from it.
    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Queues an answer.
    pub(super) fn answer(&self, line: String) -> Result<(), Closed> {
        let mut state = self.state.locked();
        if state.closed {
            return Err(Closed);
        }
        state.put(Kind::Answer, line.into());
        self.changed.notify_all();
        Ok(())
    }

    /// Queues an event. Returns false if too many wait.
    pub(super) fn event(&self, line: &Line) -> bool {
        let mut state = self.state.locked();
        if state.closed || state.complete {
            return true;
        }
        if state.event_bytes + line.len() > EVENT_BYTES_MAX {
            return false;
        }
        state.put(Kind::Event, Arc::clone(line));
        self.changed.notify_all();
        true
    }

    /// Notes that bytes of the client are waited for. `unfinished`: they are the rest of its
    /// negotiation or of a command.
    pub(super) fn expect(&self, unfinished: bool) {
        self.state.locked().unfinished_since = unfinished.then(Instant::now);
    }

    /// Notes that bytes have come.
    pub(super) fn received(&self) -> Result<(), Closed> {
        let mut state = self.state.locked();
        state.unfinished_since = None;
        if state.closed { Err(Closed) } else { Ok(()) }
    }

    /// Waits until one more answer may be queued.
    pub(super) fn wait_for_room(&self) -> Result<(), Closed> {
        let full = |state: &mut State| state.answer_bytes >= ANSWER_BYTES_MAX && !state.closed;
        let state = self.changed.wait_while(self.state.locked(), full);
        if state.unwrap_or_else(PoisonError::into_inner).closed { Err(Closed) } else { Ok(()) }
    }

    /// Notes that nothing more is put.
    pub(super) fn complete(&self) {
        self.state.locked().complete = true;
        self.changed.notify_all();
    }

    /// Closes the connection.
    pub(super) fn close(&self) {
        self.close_locked(&mut self.state.locked());
    }

    fn close_locked(&self, state: &mut State) {
        state.closed = true;
        state.lines = VecDeque::new();
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }

    /// Returns since when the client has been waited for, if it is.
    pub(super) fn waited_for_since(&self) -> Option<Instant> {
        let state = self.state.locked();
        if state.closed { None } else { state.waited_for_since() }
    }

    /// Closes the connection of a client that has been waited for since `since`. Tells it why, if
    /// that can be done at once. Returns false if the client did something meanwhile.
    pub(super) fn dismiss(&self, since: Instant, why: &str) -> bool {
        let mut state = self.state.locked();
        if state.closed || state.waited_for_since() != Some(since) {
            return false;
        }
        if state.lines.is_empty() && state.unread_since.is_none() {
            let _ = send(&self.stream, why.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        self.close_locked(&mut state);
        true
    }

    /// Returns the bytes of answers that the client has not read.
    #[cfg(test)]
    pub(super) fn answer_bytes(&self) -> usize {
        self.state.locked().answer_bytes
    }

    /// Waits for a line. None if there will be no more.
    fn next(&self) -> Option<(Kind, Line)> {
        let none = |state: &mut State| state.lines.is_empty() && !state.complete && !state.closed;
        let state = self.changed.wait_while(self.state.locked(), none);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let next = state.lines.pop_front();
        state.unread_since = next.is_some().then(Instant::now);
        next
    }

    /// Writes lines until nothing more is put, or the connection is closed. Then closes it.
    pub(super) fn write(&self, id: u64) {
        while let Some((kind, line)) = self.next() {
            if !self.write_line(&line) {
                tracing::warn!(
                    client = id,
                    "control client does not read its answers for {} s; its connection is closed",
                    READ_TIME.as_secs()
                );
                break;
            }
            let mut state = self.state.locked();
            state.unread_since = None;
            *state.bytes(kind) -= line.len();
            drop(state);
            self.changed.notify_all();
        }
        // This also ends the reader if the client has only stopped to receive.
        self.close();
    }

    /// Writes one line, or as much as the client takes before it closes the connection. Returns
    /// false if it reads nothing for [`READ_TIME`].
    fn write_line(&self, line: &str) -> bool {
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match (&self.stream).write(rest) {
                Ok(count) if count > 0 => {
                    rest = &rest[count..];
                    self.state.locked().unread_since = Some(Instant::now());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // The time limit of the socket.
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if self.state.locked().has_to_read() {
                        return false;
                    }
                }
                Ok(_) | Err(_) => {
                    self.close();
                    return true;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_client_may_leave_events_unread_and_answers_only_for_a_time() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let outbox = Arc::new(Outbox::new(ours).unwrap());
        outbox.stream().set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let writer = {
            let outbox = Arc::clone(&outbox);
            thread::spawn(move || outbox.write(0))
        };
        let line: Line = "x".repeat(64 << 10).into();
        (0..16).for_each(|_| assert!(outbox.event(&line)));
        thread::sleep(Duration::from_millis(500));
        assert!(!writer.is_finished() && outbox.waited_for_since().is_some(), "it has not negotiated");
        outbox.expect(false);
        assert_eq!(outbox.waited_for_since(), None);
        assert!(outbox.answer("answer".into()).is_ok());
        writer.join().unwrap();
        assert!(outbox.answer("answer".into()).is_err() && outbox.wait_for_room().is_err());
    }

    #[test]
    fn an_event_that_does_not_fit_is_refused() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let outbox = Outbox::new(ours).unwrap();
        let line: Line = "x".repeat(EVENT_BYTES_MAX / 2).into();
        assert_eq!([0; 3].map(|_| outbox.event(&line)), [true, true, false]);
        assert!(outbox.answer("answers have a bound of their own".into()).is_ok());
    }

    #[test]
    fn a_client_that_did_something_is_not_dismissed() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let outbox = Outbox::new(ours).unwrap();
        let since = outbox.waited_for_since().unwrap();
        assert!(outbox.received().is_ok());
        assert!(!outbox.dismiss(since, "why"));
        outbox.expect(true);
        assert!(outbox.dismiss(outbox.waited_for_since().unwrap(), "why"));
        assert!(outbox.received().is_err());
    }
}
