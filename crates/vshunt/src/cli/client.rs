//! A QMP client for the control socket. The command line uses it; tests and tools may use it.
//!
//! It runs one command at a time, on the caller's thread. Events that arrive meanwhile are kept for
//! [`Client::event`].

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sendmsg,
};
use rustix::process::geteuid;
use serde_json::{Map, Value, json};

use crate::outcome::Failure;

/// The limits of a connection: what is not a working daemon must not hold the caller, nor fill its
/// memory.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The time for connecting and for the greeting.
    greeting: Duration,
    /// The time for the answer to a question (`query-…`), which a daemon answers at once. Other
    /// commands may take long, an attach for example. After each such time of waiting, they look
    /// whether the daemon greets other clients.
    answer: Duration,
    /// Bytes of a line. The longest honest one lists queues, with about 700 bytes for each.
    line: usize,
    /// Events that are kept for [`Client::event`].
    events: usize,
}

const LIMITS: Limits = Limits {
    greeting: Duration::from_secs(10),
    answer: Duration::from_secs(60),
    line: 256 << 20,
    events: 1 << 16,
};

/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

/// Why a command failed.
#[derive(Debug)]
pub enum ClientError {
    /// No daemon answers on the socket.
    Unreachable {
        /// The path of the control socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The daemon refused the command.
    Refused {
        /// The error class of QMP.
        class: String,
        /// The message: one sentence.
        desc: String,
    },
    /// The connection ended, or the daemon sent something that is not QMP.
    Broken(String),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { path, source } => {
                let path = path.display();
                let remedy = match source.kind() {
                    io::ErrorKind::PermissionDenied => {
                        "only its daemon's user may use it: run as that user, or as root"
                    }
                    io::ErrorKind::TimedOut => {
                        "is its daemon stopped or overloaded? end it, with kill -9 if it has to be, and start it again"
                    }
                    _ => "is the daemon up, and is this its --control?",
                };
                write!(f, "no vshunt answers on {path}: {source}; {remedy}")
            }
            Self::Refused { desc, .. } => f.write_str(desc),
            Self::Broken(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for ClientError {}

/// A connection on which the capabilities have been negotiated.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    path: PathBuf,
    limits: Limits,
    /// What was read. The lines before `taken` were returned, and there is no end of a line from
    /// there up to `searched`.
    buffer: Vec<u8>,
    taken: usize,
    searched: usize,
    events: VecDeque<Value>,
}

impl Client {
    /// Connects to the daemon at `path` and negotiates the capabilities.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::start(connected(path, LIMITS)?, path, LIMITS)
    }

    /// Connects to the daemon at `path`, if this user or root listens there.
    pub(crate) fn connect_to_own(path: &Path) -> Result<Self, ClientError> {
        let stream = connected(path, LIMITS)?;
        let peer = socket_peercred(&stream).map_err(|e| unreachable(path, e.into()))?;
        if peer.uid != geteuid() && !peer.uid.is_root() {
            return Err(ClientError::Broken(format!(
                "user {} listens on {}, and not this user or root; give -c SOCKET to use it all the same",
                peer.uid.as_raw(),
                path.display()
            )));
        }
        Self::start(stream, path, LIMITS)
    }

    /// Negotiates the capabilities.
    fn start(stream: UnixStream, path: &Path, limits: Limits) -> Result<Self, ClientError> {
        let mut client = Self::new(stream, path, limits);
        client.greet()?;
        client.stream.set_write_timeout(Some(limits.answer)).map_err(|e| unreachable(path, e))?;
        client.execute("qmp_capabilities", Map::new())?;
        Ok(client)
    }

    fn new(stream: UnixStream, path: &Path, limits: Limits) -> Self {
        let (buffer, taken, searched, events) = Default::default();
        Self { stream, path: path.to_owned(), limits, buffer, taken, searched, events }
    }

    /// Reads the greeting.
    fn greet(&mut self) -> Result<(), ClientError> {
        let until = Instant::now() + self.limits.greeting;
        let greeting = self.read(Some(until)).map_err(|e| match e {
            // The peer ended the connection or sent no greeting, so it is not a working daemon.
            ClientError::Broken(why) => unreachable(&self.path, io::Error::other(why)),
            e => e,
        })?;
        let greeting = greeting.ok_or_else(|| self.silent("no greeting came", self.limits.greeting))?;
        if let Some(desc) = greeting["error"]["desc"].as_str() {
            return Err(ClientError::Refused { class: "GenericError".into(), desc: desc.into() });
        }
        match greeting.get("QMP") {
            Some(_) => Ok(()),
            None => Err(ClientError::Broken(format!("{} is no QMP socket", self.path.display()))),
        }
    }

    /// Returns the error for a daemon that was waited for in vain.
    fn silent(&self, what: &str, time: Duration) -> ClientError {
        let why = format!("{what} for {} s", time.as_secs_f64());
        unreachable(&self.path, io::Error::new(io::ErrorKind::TimedOut, why))
    }

    /// Checks that the daemon greets another client.
    fn check_alive(&self) -> Result<(), ClientError> {
        let stream = connected(&self.path, self.limits)?;
        match Self::new(stream, &self.path, self.limits).greet() {
            // It has too many clients, which is a sign of life, too.
            Err(ClientError::Refused { .. }) => Ok(()),
            greeted => greeted,
        }
    }

    /// Runs one command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Map<String, Value>) -> Result<Value, ClientError> {
        let mut text = json!({ "execute": command, "arguments": arguments }).to_string();
        text.push('\n');
        (&self.stream).write_all(text.as_bytes()).map_err(|e| self.not_sent(e))?;
        self.answer(command)
    }

    /// Returns the error for a command that cannot be sent.
    fn not_sent(&self, e: io::Error) -> ClientError {
        match e.kind() {
            io::ErrorKind::WouldBlock => self.silent("it did not read a command", self.limits.answer),
            _ => broken(e),
        }
    }

    /// Passes a descriptor in a new set, and returns the number of the set. `query-fdsets` shows
    /// `what`.
    pub fn add_fd(&mut self, fd: impl AsFd, what: &str) -> Result<u64, ClientError> {
        let text = json!({ "execute": "add-fd", "arguments": { "opaque": what } }).to_string();
        let (fds, mut space) = ([fd.as_fd()], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let bytes = [IoSlice::new(text.as_bytes())];
        // The descriptor is sent with the first byte.
        let sent = sendmsg(&self.stream, &bytes, &mut control, SendFlags::NOSIGNAL)
            .map_err(|e| self.not_sent(e.into()))?;
        let rest = [&text.as_bytes()[sent..], b"\n"].concat();
        (&self.stream).write_all(&rest).map_err(|e| self.not_sent(e))?;
        let answer = self.answer("add-fd")?;
        let id = answer["fdset-id"].as_u64();
        id.ok_or_else(|| ClientError::Broken(format!("the daemon sent what is no answer: {answer}")))
    }

    /// Waits for the answer to a command.
    fn answer(&mut self, command: &str) -> Result<Value, ClientError> {
        let quick = command.starts_with("query-") || ["qmp_capabilities", "add-fd"].contains(&command);
        let mut until = Instant::now() + self.limits.answer;
        loop {
            let Some(mut answer) = self.read(Some(until))? else {
                if quick {
                    return Err(self.silent(&format!("no answer to {command} came"), self.limits.answer));
                }
                self.check_alive()?;
                until = Instant::now() + self.limits.answer;
                continue;
            };
            if answer.get("event").is_some() {
                if self.events.len() >= self.limits.events {
                    return Err(ClientError::Broken(format!(
                        "the daemon on {} sent {} events and no answer to {command}; is it a vshunt?",
                        self.path.display(),
                        self.limits.events
                    )));
                }
                self.events.push_back(answer);
            } else if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            } else {
                let text = |name: &str| answer["error"][name].as_str().map(str::to_owned);
                return Err(match (text("class"), text("desc")) {
                    (Some(class), Some(desc)) => ClientError::Refused { class, desc },
                    _ => ClientError::Broken(format!("the daemon sent what is no answer: {answer}")),
                });
            }
        }
    }

    /// Waits for the next event and returns it.
    pub fn event(&mut self) -> Result<Value, ClientError> {
        match self.events.pop_front() {
            Some(event) => Ok(event),
            // Without a limit there always is a line, or an error.
            None => self.read(None).map(Option::unwrap_or_default),
        }
    }

    /// Waits until the daemon closes the connection, at most for `time`. Returns whether it did.
    pub fn wait_closed(mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut bytes = [0; READ_BYTES];
        loop {
            match self.receive(&mut bytes, Some(until)) {
                Ok(Some(0)) => return true,
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(e) => return e.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }

    /// Reads some bytes. None if none have come until then.
    fn receive(&mut self, bytes: &mut [u8], until: Option<Instant>) -> io::Result<Option<usize>> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            self.stream.set_read_timeout(left)?;
            match self.stream.read(bytes) {
                Ok(count) => return Ok(Some(count)),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads a line. None if it has not come until then; what has come is kept.
    fn read(&mut self, until: Option<Instant>) -> Result<Option<Value>, ClientError> {
        let mut bytes = [0; READ_BYTES];
        loop {
            let end = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end.map(|end| self.searched + end) {
                let line = &self.buffer[self.taken..end];
                let value = serde_json::from_slice(line)
                    .map_err(|e| ClientError::Broken(format!("the daemon sent what is no JSON: {e}")));
                (self.taken, self.searched) = (end + 1, end + 1);
                return value.map(Some);
            }
            self.buffer.drain(..self.taken);
            (self.taken, self.searched) = (0, self.buffer.len());
            if self.buffer.len() >= self.limits.line {
                return Err(ClientError::Broken(format!(
                    "the daemon on {} sent a line of more than {} bytes; is it a vshunt?",
                    self.path.display(),
                    self.limits.line
                )));
            }
            match self.receive(&mut bytes, until).map_err(broken)? {
                Some(0) => return Err(ClientError::Broken("the daemon closed the connection".into())),
                Some(count) => self.buffer.extend_from_slice(&bytes[..count]),
                None => return Ok(None),
            }
        }
    }
}

/// Connects. A daemon that accepts no clients is not waited for without a limit.
fn connected(path: &Path, limits: Limits) -> Result<UnixStream, ClientError> {
    let connect = || -> io::Result<UnixStream> {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // The limit for sending is that for connecting, too.
        set_socket_timeout(&fd, Timeout::Send, Some(limits.greeting))?;
        match rustix::net::connect(&fd, &SocketAddrUnix::new(path)?) {
            Err(rustix::io::Errno::AGAIN) => {
                let why = format!("it accepted no client for {} s", limits.greeting.as_secs_f64());
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
            done => Ok(done.map(|()| fd.into())?),
        }
    };
    connect().map_err(|e| unreachable(path, e))
}

fn unreachable(path: &Path, source: io::Error) -> ClientError {
    ClientError::Unreachable { path: path.to_owned(), source }
}

fn broken(e: io::Error) -> ClientError {
    ClientError::Broken(format!("the connection to the daemon broke: {e}"))
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        match e {
            ClientError::Unreachable { .. } => Self::Unreachable(e.to_string()),
            _ => Self::Failed(e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
