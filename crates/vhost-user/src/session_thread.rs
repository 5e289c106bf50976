//! The session thread of an export: it listens, accepts connections, and serves one front end after
//! the other.
//!
//! Called by [`VhostUser::start`](super::VhostUser::start). It ends when the export stops, or when
//! its only connection ends.

mod wait;

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use vhost::vhost_user::Error as VhostError;
use vshunt_types::sync::Locked;

use self::wait::Wakeup;
use super::budget::Budget;
use super::dispatch::{Answer, answers_itself, dispatch};
use super::messages::Message;
use super::receive::Receiver;
use super::reports::{ConnectionNews, Report};
use super::session::Session;
use super::socket::Socket;
use super::waiting::{Connection, Waiting};
use super::{Inner, channel, messages, waiting};

/// How long rings may wait for the first memory table before the user is told. Front ends may send
/// it last.
const MEMORY_WAIT: Duration = Duration::from_secs(1);

impl Inner {
    /// Runs the session thread.
    pub(super) fn serve(&self, socket: Socket) {
        match socket {
            Socket::Connected(stream) => {
                let mut waiting = Waiting::new(&self.name, None);
                self.take(stream, &mut waiting);
                waiting.end(&mut self.receiver(), false);
            }
            Socket::Listening(listener, file) => {
                // A listener that was passed in may be used by the next daemon, so its connections
                // stay.
                self.listen(&listener, file.is_some());
                // The file must be removed before the listener is closed: see `SocketFile`.
                drop(file);
                return;
            }
        }
        if !self.stopping.load(Relaxed) {
            self.observer.ended();
        }
    }

    fn news(&self) -> MutexGuard<'_, ConnectionNews> {
        self.news.locked()
    }

    /// Tells the observer whether a front end is connected, unless it knows. If the rate of events
    /// is used up, [`wait`](Self::wait) tells it later.
    fn tell_connected(&self) {
        let connected = self.connected.load(Relaxed);
        if self.news().take(connected, Instant::now()) {
            self.observer.connected(connected);
        }
    }

    /// Locks the receiver of descriptors; held for one of its calls.
    fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.locked()
    }

    /// Serves one connection after the other until the export ends. `ours`: no other process has
    /// the listener.
    fn listen(&self, listener: &UnixListener, ours: bool) {
        let mut waiting = Waiting::new(&self.name, Some(listener));
        loop {
            if let Some(next) = waiting.next() {
                self.session(next, &mut waiting);
                continue;
            }
            match self.wait(listener.as_fd(), None, None) {
                Wakeup::Ends => break,
                Wakeup::Late => continue,
                Wakeup::Readable => {}
            }
            match listener.accept() {
                Ok((stream, _)) => self.take(stream, &mut waiting),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => waiting.cannot_accept(&e),
            }
        }
        waiting.end(&mut self.receiver(), ours);
    }

    fn take(&self, stream: UnixStream, waiting: &mut Waiting<'_>) {
        // The lock must be free before the match: a session takes it, too.
        let connection = Connection::new(stream, &mut self.receiver());
        match connection {
            Ok(connection) => self.session(connection, waiting),
            Err(e) => tracing::error!("{}: cannot take a connection: {e}", self.name),
        }
    }

    /// Passes reports of broken queues on to the log, the observer and the front end.
    fn pass_on_reports(&self, session: Option<&Session>) {
        for Report { queue, ring, reason } in self.reports.take() {
            let name = &self.name;
            tracing::warn!(
                "queue {name}:{queue} is broken: {reason}; it serves no requests until it is restarted"
            );
            if self.news().rate.take(Instant::now()) {
                self.observer.queue_broken(queue, &reason);
            }
            if let (Some(session), Some(ring)) = (session, ring) {
                session.signal_error(ring);
            }
        }
    }

    /// Serves one front end until it disconnects, misbehaves, or the export ends.
    fn session(&self, mut connection: Connection, waiting: &mut Waiting<'_>) {
        let clones = (connection.stream.try_clone(), connection.stream.try_clone());
        let (Ok(ours), Ok(to_shut_down)) = clones else {
            tracing::error!("{}: a connection is closed: this process has no more descriptors", self.name);
            return waiting::close_unserved(connection.stream, &mut self.receiver());
        };
        let ours = Arc::new(ours);
        channel::register(&ours);
        *self.stream.locked() = ours.try_clone().ok();
        self.connected.store(true, Relaxed);
        self.tell_connected();
        tracing::info!("{}: a front end is connected", self.name);
        let mut session = Session::new(
            &self.name,
            self.device.clone(),
            self.server.clone(),
            self.features.clone(),
            self.reports.clone(),
            Budget::new(Some(to_shut_down.into()), self.memory_may_block),
        );
        let ended = self.converse(&mut connection, &mut session, waiting);
        match ended {
            _ if session.lost_memory() => tracing::warn!(
                "{}: the front end cut memory short that it shares: its queues stop and its connection is closed; \
                 restart the guest",
                self.name
            ),
            None => {}
            Some(VhostError::Disconnected) => tracing::info!("{}: the front end went", self.name),
            Some(_) if self.stopping.load(Relaxed) => {}
            Some(e) => {
                tracing::warn!("{}: the front end's connection is closed: {}", self.name, words_of(&e))
            }
        }
        // Unread messages may carry descriptors that hold other connections open, and the drain
        // below may take long.
        self.receiver().close(connection.stream);
        drop(connection.reader);
        session.stop_all();
        drop(session);
        // A process that receives descriptors may have the socket open for longer: the connection
        // must end now.
        let _ = ours.shutdown(Shutdown::Both);
        *self.channel.locked() = None;
        *self.stream.locked() = None;
        self.connected.store(false, Relaxed);
        self.tell_connected();
    }

    /// Handles the messages of the front end. Returns why the connection ended; none if the export
    /// ends.
    fn converse(
        &self,
        connection: &mut Connection,
        session: &mut Session,
        waiting: &mut Waiting<'_>,
    ) -> Option<VhostError> {
        let Connection { stream, reader } = connection;
        loop {
            let message_ends = reader.deadline();
            let memory_comes = session.waits_for_memory().then(|| Instant::now() + MEMORY_WAIT);
            let until = message_ends.into_iter().chain(memory_comes).min();
            if !reader.is_ready() {
                match self.wait(stream.as_fd(), until, Some((&*session, &mut *waiting))) {
                    Wakeup::Ends => return None,
                    Wakeup::Late if message_ends.is_some_and(|end| end <= Instant::now()) => {
                        return Some(messages::unfinished());
                    }
                    Wakeup::Late if session.waits_for_memory() => session.warn_of_no_memory(),
                    Wakeup::Late | Wakeup::Readable => {}
                }
            }
            let next = reader.next(stream, &mut self.receiver());
            let handled = match next {
                Ok(Some(message)) => self.message(stream, session, message),
                Ok(None) => Ok(()),
                Err(e) => Err(e),
            };
            if let Err(e) = handled {
                return Some(e);
            }
        }
    }

    /// Handles one message, and answers it.
    fn message(
        &self,
        stream: &UnixStream,
        session: &mut Session,
        message: Message,
    ) -> std::result::Result<(), VhostError> {
        let (code, need_reply) = (message.code, message.need_reply);
        // Only the name and sizes: payloads hold addresses and bytes of the guest.
        tracing::debug!("{}: {}", self.name, message.outline());
        let value = match dispatch(self, stream, session, message) {
            Ok(Answer::Payload(bytes, file)) => {
                tracing::debug!("{}: answer to {} of {} bytes", self.name, messages::name(code), bytes.len());
                return messages::answer(stream, code, &bytes, file.as_ref())
                    .map_err(VhostError::SocketError);
            }
            Ok(Answer::Done) => 0u64,
            Err(VhostError::ReqHandlerError(e))
                if need_reply && !answers_itself(code) && session.acknowledges() =>
            {
                tracing::warn!("{}: a message is refused: {e}", self.name);
                1
            }
            Err(e) => return Err(e),
        };
        if need_reply && session.acknowledges() {
            messages::answer(stream, code, &value.to_ne_bytes(), None).map_err(VhostError::SocketError)?;
        }
        Ok(())
    }
}

/// Returns the text of an error. Where crate `vhost`'s type wraps a reason of this module, only the
/// reason.
fn words_of(e: &VhostError) -> String {
    match e {
        VhostError::ReqHandlerError(e) | VhostError::SocketError(e) => e.to_string(),
        e => e.to_string(),
    }
}
