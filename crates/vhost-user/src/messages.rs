//! Reads and answers messages of front ends (vhost-user specification, "Message structure").
//!
//! Called by session threads. A read never waits for the front end, and never reads beyond the
//! current message. An unfinished message stays in a [`Reader`], whose deadline is one of the
//! events that the session thread waits for. The read loop of crate `vhost` is not used: it waits
//! without limit, and retries when a message has too many descriptors.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg, sockopt};
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{Error, Result};

use super::receive::{Descriptors, ROOM_MAX, Receiver, look, read};
use vshunt_types::convert::{copy_start, len_u32, low_u32};

/// Back-end message: the configuration space changed; no payload.
const CONFIG_CHANGE_MSG: u32 = 2;

const HEADER_LEN: usize = 12;
/// Bytes of a payload at most. The largest payloads are a configuration space and a memory table.
const BODY_MAX: usize = ROOM_MAX;
/// How long a message may take from its first byte to its last, and how long an answer may stay
/// unread. Front ends send a message with one system call.
const MESSAGE_WAIT: Duration = Duration::from_secs(5);
const FLAG_VERSION: u32 = 1;
const FLAG_VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A whole message of a front end.
pub(super) struct Message {
    pub(super) code: u32,
    pub(super) need_reply: bool,
    body: Vec<u8>,
    fds: Descriptors,
}

impl Message {
    /// Returns the payload, of any length.
    pub(super) fn body(&self) -> Fields<'_> {
        Fields(&self.body)
    }

    /// Returns the payload, which must have `len` bytes.
    ///
    /// # Errors
    /// It has another length.
    pub(super) fn exactly(&self, len: usize) -> Result<Fields<'_>> {
        if self.body.len() == len { Ok(Fields(&self.body)) } else { Err(self.malformed()) }
    }

    /// Takes the descriptors.
    pub(super) fn files(&mut self) -> Vec<File> {
        std::mem::take(&mut self.fds.taken).into_iter().map(File::from).collect()
    }

    /// Takes the descriptor, if there is exactly one.
    pub(super) fn file(&mut self) -> Option<File> {
        let mut files = self.files();
        if files.len() == 1 { files.pop() } else { None }
    }

    /// Describes the message for the log, without its payload.
    pub(super) fn outline(&self) -> String {
        let descriptors = match self.fds.len() {
            0 => String::new(),
            1 => ", 1 descriptor".to_owned(),
            n => format!(", {n} descriptors"),
        };
        format!("message {} of {} bytes{descriptors}", name(self.code), self.body.len())
    }

    /// Returns whether the message came with descriptors.
    pub(super) fn has_fds(&self) -> bool {
        self.fds.len() > 0
    }

    /// Returns the name of a refused descriptor, if there is one. Its close could have blocked.
    pub(super) fn refused_fd(&self) -> Option<&str> {
        self.fds.refused.first().map(String::as_str)
    }

    /// Returns the error for a message whose parts do not match. It ends the connection.
    pub(super) fn malformed(&self) -> Error {
        invalid(format!("message {} is malformed", self.code))
    }
}

/// Returns the name of a message of a front end, or its number.
pub(super) fn name(code: u32) -> String {
    FrontendReq::try_from(code).map_or_else(|_| code.to_string(), |known| format!("{known:?}"))
}

/// Reads the numbers of a payload by their offset. The caller has checked the length.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.array(at))
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    pub(super) fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }

    /// Returns the bytes at `at`; zeroes if the payload ends before.
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        debug_assert!(bytes.is_some(), "the caller has checked the length");
        bytes.copied().unwrap_or([0; N])
    }
}

/// Bytes and descriptors that were read from a connection and are not a complete message yet.
#[derive(Default)]
pub(super) struct Reader {
    bytes: Vec<u8>,
    fds: Descriptors,
    /// When the first of these bytes was read.
    begun: Option<Instant>,
}

impl Reader {
    /// Prepares a connection for reading, and limits the time of its answers.
    ///
    /// # Errors
    /// A socket option cannot be set.
    pub(super) fn prepare(stream: &UnixStream) -> io::Result<()> {
        // Otherwise an urgent byte would stay in the queue with its descriptors.
        sockopt::set_socket_oobinline(stream, true)?;
        // A socket of systemd may have these options (PassCredentials=, PassSecurity=). Their
        // control messages look like descriptors, or are descriptors.
        for option in [libc::SO_PASSCRED, libc::SO_PASSSEC, libc::SO_PASSPIDFD] {
            set_option(stream, option, false)?;
        }
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(MESSAGE_WAIT))
    }

    /// Returns the next message, or none if it is not complete yet. It does not wait for the front
    /// end, and some seconds at most for `receiver`.
    ///
    /// # Errors
    /// The front end closed the connection, or sent something that is not a message. Nothing more
    /// can be read.
    pub(super) fn next(&mut self, stream: &UnixStream, receiver: &mut Receiver) -> Result<Option<Message>> {
        loop {
            let wanted = self.wanted()?;
            if self.bytes.len() >= wanted {
                return Ok(Some(self.take(wanted)));
            }
            match self.receive(stream, wanted - self.bytes.len(), Some(&mut *receiver)) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && self.bytes.is_empty() => {
                    return Err(Error::Disconnected);
                }
                Err(e) => return Err(Error::SocketError(e)),
            }
        }
    }

    /// Reads the messages of a connection that is not served yet, as far as there is room.
    ///
    /// # Errors
    /// The front end disconnected, or sent descriptors, or more than a few messages. Front ends do
    /// not send more before their first message is answered. Descriptors may keep the current
    /// connection open.
    pub(super) fn read_ahead(&mut self, stream: &UnixStream) -> io::Result<()> {
        loop {
            let room = BODY_MAX.saturating_sub(self.bytes.len());
            if room == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it sends too much before its turn"));
            }
            if !self.receive(stream, room, None)? {
                // The time limit of the message begins when the connection is served.
                self.begun = None;
                return Ok(());
            }
        }
    }

    /// Returns whether a complete message was read already.
    pub(super) fn is_ready(&self) -> bool {
        self.wanted().map_or(true, |wanted| self.bytes.len() >= wanted)
    }

    /// Returns when the current message must be complete. None if no message has begun.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        if self.bytes.is_empty() {
            return None;
        }
        Some(*self.begun.get_or_insert_with(Instant::now) + MESSAGE_WAIT)
    }

    /// Returns the bytes of the next message; those of its header until that is complete.
    fn wanted(&self) -> Result<usize> {
        if self.bytes.len() < HEADER_LEN {
            return Ok(HEADER_LEN);
        }
        let header = Fields(&self.bytes);
        let (code, flags, size) = (header.u32(0), header.u32(4), header.u32(8) as usize);
        let known = FLAG_VERSION_MASK | FLAG_REPLY | FLAG_NEED_REPLY;
        if flags & FLAG_VERSION_MASK != FLAG_VERSION
            || flags & FLAG_REPLY != 0
            || flags & !known != 0
            || size > BODY_MAX
        {
            return Err(invalid(format!("message {code} is malformed")));
        }
        Ok(HEADER_LEN + size)
    }

    /// Takes the message of `len` bytes, which is complete.
    fn take(&mut self, len: usize) -> Message {
        let rest = self.bytes.split_off(len);
        let body = self.bytes.split_off(HEADER_LEN);
        let header = Fields(&self.bytes);
        let (code, flags) = (header.u32(0), header.u32(4));
        self.bytes = rest;
        self.begun = None;
        Message { code, need_reply: flags & FLAG_NEED_REPLY != 0, body, fds: std::mem::take(&mut self.fds) }
    }

    /// Reads up to `room` bytes and their descriptors. Without a receiver, descriptors are an
    /// error. Returns false if there is nothing to read now.
    fn receive(
        &mut self,
        stream: &UnixStream,
        room: usize,
        receiver: Option<&mut Receiver>,
    ) -> io::Result<bool> {
        let Some(there) = look(stream, room)? else { return Ok(false) };
        let bytes = match receiver {
            _ if there.bytes == 0 => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended within a message"));
            }
            _ if !there.fds => read(stream, there.bytes)?,
            Some(receiver) => {
                let (bytes, fds) = receiver.receive(stream, there.bytes)?;
                self.fds.append(fds)?;
                bytes
            }
            None => {
                let why = "it sends descriptors before its turn";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        };
        self.begun.get_or_insert_with(Instant::now);
        self.bytes.extend_from_slice(&bytes);
        Ok(true)
    }
}

/// Switches a socket option on or off. An option that the kernel does not know is ignored.
fn set_option(stream: &UnixStream, option: i32, on: bool) -> io::Result<()> {
    let value = libc::c_int::from(on);
    // SAFETY: the kernel reads one integer, and `value` lives longer than the call.
    let rc = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            low_u32(size_of::<libc::c_int>() as u64),
        )
    };
    match io::Error::last_os_error() {
        e if rc < 0 && !matches!(e.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP)) => Err(e),
        _ => Ok(()),
    }
}

/// Returns the error for bytes that are not a message. It ends the connection.
pub(super) fn invalid(why: String) -> Error {
    Error::SocketError(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Returns the error for a message that was not complete in time.
pub(super) fn unfinished() -> Error {
    let why = format!("a message was not finished within {} s", MESSAGE_WAIT.as_secs());
    Error::SocketError(io::Error::new(io::ErrorKind::TimedOut, why))
}

/// Answers a message.
///
/// # Errors
/// The front end disconnected, or has not read its answers for some seconds. The connection must
/// end.
pub(super) fn answer(stream: &UnixStream, code: u32, body: &[u8], file: Option<&File>) -> io::Result<()> {
    let mut reply = Vec::with_capacity(HEADER_LEN + body.len());
    for word in [code, FLAG_VERSION | FLAG_REPLY, len_u32(body.len())] {
        reply.extend_from_slice(&word.to_ne_bytes());
    }
    reply.extend_from_slice(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = file.map(AsFd::as_fd);
    if let Some(fd) = &fds {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    let unread = |e: Errno| match e {
        Errno::AGAIN => io::Error::new(io::ErrorKind::TimedOut, "it does not read its answers"),
        e => e.into(),
    };
    let first = sendmsg(stream, &[IoSlice::new(&reply)], &mut control, SendFlags::NOSIGNAL);
    let mut done = first.map_err(unread)?;
    while let Some(rest) = reply.get(done..).filter(|rest| !rest.is_empty()) {
        done += send(stream, rest, SendFlags::NOSIGNAL).map_err(unread)?;
    }
    Ok(())
}

/// Tells the front end that the configuration space changed. Does not wait.
pub(super) fn config_changed(channel: &OwnedFd) -> io::Result<()> {
    let mut message = [0u8; HEADER_LEN];
    copy_start(&mut message, [CONFIG_CHANGE_MSG.to_ne_bytes(), FLAG_VERSION.to_ne_bytes()].as_flattened());
    send(channel, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

#[cfg(test)]
mod tests;
