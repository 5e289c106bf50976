//! The connections of scrapers. One thread serves all of them and waits for none.
//!
//! A connection has three states: asking, answering, leaving. After the answer, the daemon shuts
//! down its direction of the stream. It then reads and discards bytes for a moment, because closing
//! a socket with unread bytes could discard the answer. Each state has a time limit. If there are
//! too many connections, an old one is closed.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags};

use super::http::{self, Asked, REQUEST_BYTES_MAX};

/// The most connections at the same time. A Prometheus server has one or two.
const CONNECTIONS_MAX: usize = 32;

/// The time limit for a request, from the start of the connection.
const ASKING_TIME: Duration = Duration::from_secs(10);

/// The time limit for sending an answer. By default, a scraper waits for 10 s.
const ANSWERING_TIME: Duration = Duration::from_secs(30);

/// The time limit for the client to close its end.
const LEAVING_TIME: Duration = Duration::from_secs(1);

/// How long no connection is accepted after the system had no free descriptor. The connection stays
/// pending.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the text. Called on the thread of [`Scrapes::run`], once for all requests that arrive at
/// the same time.
pub(super) type Render = Box<dyn Fn() -> String + Send>;

/// All connections. Only its thread uses it.
pub(super) struct Scrapes {
    listener: Arc<OwnedFd>,
    /// An eventfd that is readable when the thread has to end.
    wake: Arc<OwnedFd>,
    render: Render,
    /// The connections, the oldest first.
    connections: Vec<Connection>,
    accept_paused_until: Option<Instant>,
}

impl Scrapes {
    pub(super) fn new(listener: Arc<OwnedFd>, wake: Arc<OwnedFd>, render: Render) -> Self {
        Self { listener, wake, render, connections: Vec::new(), accept_paused_until: None }
    }

    /// Answers until `wake` is readable.
    pub(super) fn run(mut self) {
        loop {
            match self.poll_once() {
                Ok(true) | Err(Errno::INTR) => {}
                Ok(false) => return,
                Err(e) => {
                    tracing::error!("metrics are not served any more: {e}");
                    return;
                }
            }
        }
    }

    /// Waits until a connection can proceed, and serves it. Returns false if the thread has to end.
    fn poll_once(&mut self) -> rustix::io::Result<bool> {
        let now = Instant::now();
        self.accept_paused_until = self.accept_paused_until.filter(|until| *until > now);
        let wanted = if self.accept_paused_until.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.listener, wanted)];
        fds.extend(self.connections.iter().map(|c| PollFd::new(&c.fd, c.state.wanted())));
        let next = self.connections.iter().map(|c| c.until).chain(self.accept_paused_until).min();
        poll(&mut fds, next.map(|at| timespec(at.saturating_duration_since(now))).as_ref())?;
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return Ok(false);
        }
        let mut page = Page { render: &self.render, text: None };
        for (connection, _) in self.connections.iter_mut().zip(&ready[2..]).filter(|(_, ready)| **ready) {
            connection.proceed(&mut page);
        }
        let now = Instant::now();
        self.connections.retain(|c| !matches!(c.state, State::Over) && c.until > now);
        if ready[1] {
            self.accept(now);
        }
        Ok(true)
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..CONNECTIONS_MAX {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => {
                    self.make_room();
                    self.connections.push(Connection::new(fd, now));
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // There probably are no free descriptors. The connection stays pending, so the
                    // loop pauses.
                    tracing::warn!("cannot accept a scraper of metrics: {e}");
                    self.accept_paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Closes a connection if there are too many: the oldest that was answered, otherwise the
    /// oldest without a request, otherwise the oldest of all.
    fn make_room(&mut self) {
        if self.connections.len() < CONNECTIONS_MAX {
            return;
        }
        let first = |is: fn(&State) -> bool| self.connections.iter().position(|c| is(&c.state));
        let leaving = first(|s| matches!(s, State::Leaving));
        let victim = leaving.or_else(|| first(|s| matches!(s, State::Asking(_)))).unwrap_or(0);
        self.connections.remove(victim);
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// The text for all requests of one iteration.
struct Page<'a> {
    render: &'a Render,
    text: Option<Arc<str>>,
}

impl Page<'_> {
    fn text(&mut self) -> Arc<str> {
        self.text.get_or_insert_with(|| (self.render)().into()).clone()
    }
}

struct Connection {
    fd: OwnedFd,
    state: State,
    /// The time at which the connection is closed in any state.
    until: Instant,
}

enum State {
    /// The bytes of its request that have arrived.
    Asking(Vec<u8>),
    Answering(Answer),
    Leaving,
    Over,
}

impl State {
    fn wanted(&self) -> PollFlags {
        match self {
            Self::Asking(_) | Self::Leaving => PollFlags::IN,
            Self::Answering(_) => PollFlags::OUT,
            Self::Over => PollFlags::empty(),
        }
    }
}

/// The answer: the header, then the body.
struct Answer {
    head: Vec<u8>,
    body: Arc<str>,
    /// The number of bytes sent.
    sent: usize,
}

impl Answer {
    fn new(outcome: Result<http::Target, http::Refusal>, head_only: bool, page: &mut Page<'_>) -> Self {
        let (head, body) = match outcome {
            Ok(http::Target::About) => {
                let (head, text) = http::about();
                (head, text.into())
            }
            Ok(http::Target::Metrics(format)) => {
                let text = page.text();
                (format.head(text.len()), text)
            }
            Err(why) => (why.head(), why.text().into()),
        };
        Self { head, body: if head_only { "".into() } else { body }, sent: 0 }
    }

    fn rest(&self) -> &[u8] {
        match self.head.get(self.sent..) {
            Some(head) if !head.is_empty() => head,
            _ => &self.body.as_bytes()[self.sent - self.head.len()..],
        }
    }
}

impl Connection {
    fn new(fd: OwnedFd, now: Instant) -> Self {
        Self { fd, state: State::Asking(Vec::new()), until: now + ASKING_TIME }
    }

    /// Proceeds as far as possible without waiting.
    fn proceed(&mut self, page: &mut Page<'_>) {
        if let State::Asking(_) = self.state {
            self.ask(page);
        }
        match self.state {
            State::Answering(_) => self.answer(),
            State::Leaving => self.discard_input(),
            State::Asking(_) | State::Over => {}
        }
    }

    fn ask(&mut self, page: &mut Page<'_>) {
        let State::Asking(bytes) = &mut self.state else { return };
        let mut more = [0; REQUEST_BYTES_MAX];
        let room = REQUEST_BYTES_MAX - bytes.len();
        match rustix::io::read(&self.fd, &mut more[..room]) {
            Ok(0) => self.state = State::Over,
            Ok(count) => {
                bytes.extend_from_slice(&more[..count]);
                if let Asked::Whole { outcome, head_only } = http::read(bytes) {
                    self.state = State::Answering(Answer::new(outcome, head_only, page));
                    self.until = Instant::now() + ANSWERING_TIME;
                }
            }
            Err(e) => self.stop_at(e),
        }
    }

    fn answer(&mut self) {
        while let State::Answering(answer) = &mut self.state {
            let rest = answer.rest();
            if rest.is_empty() {
                // An error means that the client has disconnected. The state leaving detects that.
                let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
                self.state = State::Leaving;
                self.until = Instant::now() + LEAVING_TIME;
                return;
            }
            match rustix::net::send(&self.fd, rest, SendFlags::NOSIGNAL) {
                Ok(count) => answer.sent += count,
                Err(e) => return self.stop_at(e),
            }
        }
    }

    /// Discards the bytes that still arrive.
    fn discard_input(&mut self) {
        match rustix::io::read(&self.fd, &mut [0; REQUEST_BYTES_MAX]) {
            Ok(0) => self.state = State::Over,
            Ok(_) => {}
            Err(e) => self.stop_at(e),
        }
    }

    /// Handles an error: the connection waits if the operation would block, and ends otherwise.
    fn stop_at(&mut self, e: Errno) {
        if !matches!(e, Errno::AGAIN | Errno::INTR) {
            self.state = State::Over;
        }
    }
}

#[cfg(test)]
mod tests;
