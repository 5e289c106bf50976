//! A worker without a connection of its own, and how it gives one away.
//!
//! It passes requests to the shared connection ([`One`](super::super::one::One)): new ones, and
//! those of a connection that it has lost. A connection of its own arrives in its port.
//!
//! If the shared connection is lost, the server may give no other one than those that workers have.
//! Then a worker hands its own over, without ending it:
//!
//! 1. It sends nothing more. Requests that are not sent, and new ones, wait.
//! 2. It waits for the replies to what is in flight.
//! 3. It cancels the read that waits for the next reply, until that has completed ([`OP_CANCEL`]).
//! 4. The socket becomes the shared one (`Connector::hand_over`).
//! 5. The requests that wait are passed on, behind the socket.
//!
//! If another connection becomes the shared one before step 4, the worker keeps its own
//! (`Message::Keep`). A worker that leaves does the same from step 3 on: another worker may need
//! the connection, or the shared one has just ended.
//!
//! | the read that is cancelled | the cancel | then |
//! | --- | --- | --- |
//! | ends with ECANCELED, EINTR or EAGAIN | 0 or EALREADY | it has taken no bytes: step 4 |
//! | ends with bytes | ENOENT | nothing was asked for, so they break the protocol: the connection is lost |
//! | ends with 0 | ENOENT | the server has closed it: the connection is lost |
//! | waits again, because it was at work and found nothing | ENOENT or EALREADY | it is cancelled again after [`CANCEL_PAUSE`] |
//!
//! What must never happen: a request is passed on while the kernel has its memory here.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{opcode, types};
use qcow2::Found;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vshunt_engine::{ClientId, Uring};

use super::super::connector::TRY;
use super::super::port::{Connected, Lost, Message};
use super::super::table::{Dest, Start};
use super::{Conn, OP_CANCEL, OP_PAUSE, OP_RECEIVE, State};

/// After so many requests, a worker asks for a connection of its own. Commands that send a few only
/// do without: some servers count connections for ever.
pub(in super::super) const ASK_AFTER: u32 = 8;
/// Pause before a read is cancelled again.
static CANCEL_PAUSE: types::Timespec = types::Timespec::new().nsec(1_000_000);

impl Conn {
    /// Says that a queue has come to the worker.
    pub(in super::super) fn queue_came(&mut self) {
        if self.state == State::Sharing && self.passed >= ASK_AFTER && self.port.is_some() {
            self.shared.connector.hurry();
        }
    }

    /// Lets the ring do without a connection of its own: it is not a worker's.
    pub(in super::super) fn do_without(&mut self) {
        self.passed = ASK_AFTER;
        if !std::mem::replace(&mut self.aside, true) {
            self.shared.connector.part(None);
        }
    }

    /// Passes a new request on. Asks for a connection if this worker sends many.
    pub(super) fn pass_first(&mut self, uring: &mut Uring, start: Start) {
        self.pass(uring, start);
        if self.passed < ASK_AFTER {
            self.passed += 1;
            if let Some(port) = self.port.as_ref().filter(|_| self.passed == ASK_AFTER) {
                self.shared.connector.ask(port);
            }
        }
    }

    /// Passes a request to the shared connection. Its result arrives from there.
    fn pass(&self, uring: &mut Uring, start: Start) {
        let dest = match start.dest {
            Dest::Here(token) => {
                uring.expect_wake();
                Dest::Ring { ring: uring.id(), token: token.pack() }
            }
            there => there,
        };
        self.shared.common.pass(Start { dest, ..start });
    }

    /// Passes on the requests that are not sent.
    fn pass_waiting(&mut self, uring: &mut Uring) {
        while let Some(at) = self.waiting.pop_front() {
            let start = self.table.take(at);
            self.pass(uring, start);
        }
    }

    /// Removes and returns the answer to a request for the state of a range, which a packed token
    /// names.
    pub(in super::super) fn take_found(&mut self, uring: &Uring, token: u64) -> Option<Found> {
        match self.found.iter().position(|(of, _)| *of == token) {
            Some(at) => Some(self.found.swap_remove(at).1),
            None => self.shared.common.take_found(uring.id(), token),
        }
    }

    /// Continues after the loss of the worker's connection at `now`. Its requests go by the shared
    /// one, as after a connection that was made again: those that were in flight fail if they have
    /// been sent again for `delay`. Without a delay all fail, except the first ones of a queue: the
    /// server may be another one, and the guest is to know. A connection that never answered was of
    /// no use, and nothing fails because the server gave it.
    pub(super) fn settle_own(&mut self, uring: &mut Uring, now: Instant, delay: Duration) {
        self.table.again(&mut self.waiting, &self.settings, now);
        if self.replied && delay.is_zero() {
            self.fail_others(uring);
        } else if let Some(before) = now.checked_sub(if self.replied { delay } else { delay.max(TRY) }) {
            self.fail_lost(uring, before);
        }
        self.state = State::Sharing;
        self.pass_waiting(uring);
        if let Some(port) = self.port.as_ref().filter(|_| !self.leaves) {
            let why = std::mem::take(&mut self.why);
            self.shared.connector.lost_own(port, Lost { why, replied: self.replied });
        }
    }

    /// Begins to give the connection away, if there is one.
    pub(super) fn begin_hand_over(&mut self, uring: &mut Uring, id: ClientId) {
        if self.own && self.state == State::Up {
            self.state = State::HandingOver;
            self.continue_hand_over(uring, id);
        }
    }

    /// Gives the connection away as soon as nothing is in flight on it.
    pub(super) fn continue_hand_over(&mut self, uring: &mut Uring, id: ClientId) {
        if self.state != State::HandingOver {
            return;
        }
        if !self.is_at_rest() {
            return self.receive(uring, id);
        }
        if self.reader.busy {
            if !self.reader.stops {
                self.reader.stops = true;
                uring.try_cancel_for_client(id, OP_RECEIVE, OP_CANCEL);
            }
            return;
        }
        if self.reader.start != self.reader.end || !self.reader.receiver.is_at_header() {
            return self.lost(uring, "the server broke the protocol: a reply to nothing".to_owned());
        }
        // Nothing is in flight. The server that has ended the shared connection may have ended this
        // one, too.
        if self.has(PollFlags::IN) {
            return self.broken(uring, "the server closed it".to_owned());
        }
        self.give(uring);
    }

    /// Returns whether the server has no request of the connection.
    fn is_at_rest(&self) -> bool {
        !self.sender.busy && self.table.len() == self.waiting.len()
    }

    /// Handles the completion of a cancel of the read.
    pub(super) fn cancelled(&mut self, uring: &mut Uring, id: ClientId, res: i32) {
        if res >= 0 || !self.reader.busy || !self.reader.stops {
            return;
        }
        let entry = opcode::Timeout::new(&raw const CANCEL_PAUSE).build();
        // SAFETY: the time is a static.
        unsafe { uring.push_for_client(entry, id, OP_PAUSE) };
    }

    /// Cancels the read again, after a pause.
    pub(super) fn cancel_again(&mut self, uring: &mut Uring, id: ClientId) {
        if self.reader.busy && self.reader.stops {
            uring.try_cancel_for_client(id, OP_RECEIVE, OP_CANCEL);
        }
    }

    /// Keeps the connection that was to be given away. If its read is cancelled already, that ends
    /// without bytes, and the next one follows ([`read_on`](Self::read_on)).
    pub(super) fn keep(&mut self, uring: &mut Uring, id: ClientId) {
        if self.state == State::HandingOver && !self.leaves {
            self.state = State::Up;
            self.receive(uring, id);
            uring.submit_client(id);
        }
    }

    /// Offers a connection to the others. If none needs it, the thread of the shared one ends it.
    pub(super) fn offer(&self, connected: Connected) {
        let port = self.port.as_ref().filter(|_| self.own);
        if let Some(connected) = self.shared.connector.hand_over(port, connected) {
            self.shared.common.send(Message::Spare(connected));
        }
    }

    /// Ends a connection that no worker needs, unless the shared one, which this is, ends at this
    /// moment: a server that counts connections for ever would give no other one.
    pub(super) fn take_spare(&mut self, connected: Connected) {
        match self.state {
            State::Up if !self.has(PollFlags::empty()) => connected.end(),
            State::Up | State::Draining => self.spare = Some(connected),
            // The connector knows that it is lost.
            _ => self.offer(connected),
        }
    }

    /// Returns whether the server has ended the connection, or, with IN among the flags, has sent
    /// something that is unread. A worker's thread may not receive by a system call.
    fn has(&self, flags: PollFlags) -> bool {
        let Some((file, _)) = &self.socket else { return true };
        let mut fds = [PollFd::new(file, flags | PollFlags::RDHUP)];
        !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0) | Err(Errno::INTR))
    }

    fn give(&mut self, uring: &mut Uring) {
        let (Some((file, _)), Some(port)) = (self.socket.take(), &self.port) else { return };
        uring.unregister_file(file.as_raw_fd());
        self.state = State::Sharing;
        let (settings, replied, ended) = (self.settings, self.replied, self.ended.take());
        match Arc::into_inner(file) {
            Some(socket) => self.offer(Connected { socket, settings, replied, ended }),
            // Never: the ring had the only other reference.
            None => {
                let why = "its socket is in use".to_owned();
                self.shared.connector.lost_own(port, Lost { why, replied });
            }
        }
        self.pass_waiting(uring);
    }

    /// Leaves the disk. Returns whether the connection is given away instead of being ended.
    pub(super) fn leave_own(&mut self, uring: &mut Uring, id: ClientId) -> bool {
        if !self.aside {
            self.shared.connector.part(self.port.as_ref());
        }
        // From now on none is given to this worker. One may have arrived that it has not seen.
        let mut messages = Vec::new();
        if let Some(port) = &self.port {
            port.take(&mut messages);
        }
        for message in messages {
            if let Message::Connected(connected) = message {
                self.offer(connected);
            }
        }
        // A worker that ends with requests in flight waits for no server.
        if self.state == State::Up && self.table.len() == 0 && self.is_at_rest() {
            self.state = State::HandingOver;
        }
        self.continue_hand_over(uring, id);
        self.state == State::HandingOver
    }
}
