//! A QMP client for the control socket. The command line uses it; tests and tools may use it.
//!
//! It runs one command at a time, on the caller's thread. Events that arrive meanwhile are kept for
//! [`Client::event`].

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::geteuid;
use serde_json::{Map, Value, json};

use crate::outcome::Failure;

/// The time limit for the greeting of the daemon. Commands have no limit here, because an attach
/// may take long.
const GREETING_TIME: Duration = Duration::from_secs(10);

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
    reader: BufReader<UnixStream>,
    events: VecDeque<Value>,
}

impl Client {
    /// Connects to the daemon at `path` and negotiates the capabilities.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: path.to_owned(), source };
        Self::start(UnixStream::connect(path).map_err(unreachable)?, path)
    }

    /// Connects to the daemon at `path`, if this user or root listens there.
    pub(crate) fn connect_to_own(path: &Path) -> Result<Self, ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(unreachable)?;
        let peer = socket_peercred(&stream).map_err(|e| unreachable(e.into()))?;
        if peer.uid != geteuid() && !peer.uid.is_root() {
            return Err(ClientError::Broken(format!(
                "user {} listens on {}, and not this user or root; give -c SOCKET to use it all the same",
                peer.uid.as_raw(),
                path.display()
            )));
        }
        Self::start(stream, path)
    }

    /// Negotiates the capabilities.
    fn start(stream: UnixStream, path: &Path) -> Result<Self, ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: path.to_owned(), source };
        stream.set_read_timeout(Some(GREETING_TIME)).map_err(unreachable)?;
        let mut client = Self { reader: BufReader::new(stream), events: VecDeque::new() };
        let greeting = client.read().map_err(|e| match e {
            // The peer ended the connection or sent no greeting, so it is not a working daemon.
            ClientError::Broken(why) => unreachable(io::Error::other(why)),
            e => e,
        })?;
        if let Some(desc) = greeting["error"]["desc"].as_str() {
            return Err(ClientError::Refused { class: "GenericError".into(), desc: desc.into() });
        }
        if greeting.get("QMP").is_none() {
            return Err(ClientError::Broken(format!("{} is no QMP socket", path.display())));
        }
        client.reader.get_ref().set_read_timeout(None).map_err(unreachable)?;
        client.execute("qmp_capabilities", Map::new())?;
        Ok(client)
    }

    /// Runs one command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Map<String, Value>) -> Result<Value, ClientError> {
        let mut text = json!({ "execute": command, "arguments": arguments }).to_string();
        text.push('\n');
        self.reader.get_ref().write_all(text.as_bytes()).map_err(broken)?;
        self.answer()
    }

    /// Passes a descriptor in a new set, and returns the number of the set. `query-fdsets` shows
    /// `what`.
    pub fn add_fd(&mut self, fd: impl AsFd, what: &str) -> Result<u64, ClientError> {
        let text = json!({ "execute": "add-fd", "arguments": { "opaque": what } }).to_string();
        let (fds, mut space) = ([fd.as_fd()], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let stream = self.reader.get_ref();
        let bytes = [IoSlice::new(text.as_bytes())];
        // The descriptor is sent with the first byte.
        let sent =
            sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL).map_err(|e| broken(e.into()))?;
        let mut stream = stream;
        stream.write_all(&text.as_bytes()[sent..]).and_then(|()| stream.write_all(b"\n")).map_err(broken)?;
        let answer = self.answer()?;
        let id = answer["fdset-id"].as_u64();
        id.ok_or_else(|| ClientError::Broken(format!("the daemon sent what is no answer: {answer}")))
    }

    fn answer(&mut self) -> Result<Value, ClientError> {
        loop {
            let mut answer = self.read()?;
            if answer.get("event").is_some() {
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
            None => self.read(),
        }
    }

    /// Waits until the daemon closes the connection, at most for `time`. Returns whether it did.
    pub fn wait_closed(mut self, time: Duration) -> bool {
        // A timeout of zero would mean no timeout.
        let time = time.max(Duration::from_millis(1));
        if self.reader.get_ref().set_read_timeout(Some(time)).is_err() {
            return false;
        }
        let mut line = String::new();
        loop {
            line.clear();
            match self.reader.read_line(&mut line) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }

    fn read(&mut self) -> Result<Value, ClientError> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).map_err(broken)? == 0 {
            return Err(ClientError::Broken("the daemon closed the connection".into()));
        }
        serde_json::from_str(&line)
            .map_err(|e| ClientError::Broken(format!("the daemon sent what is no JSON: {e}")))
    }
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
