//! Messages of front ends: how they are read and answered (vhost-user specification, "Message structure").
//!
//! Called by session threads. A read never waits for the front end, and takes no byte beyond the message that it is for: a message that its front end
//! does not finish stays in a [`Reader`], whose deadline the session thread waits for beside all else. The read loop of crate
//! `vhost` cannot be used: it waits without limit, and retries when a message brings too many descriptors.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg, sockopt};
use vhost::vhost_user::{Error, Result};

use super::convert::{copy_start, len_u32, low_u32};
use super::receive::{Descriptors, ROOM_MAX, Receiver, look, read};

/// Back-end message: the configuration space changed; no payload.
const CONFIG_CHANGE_MSG: u32 = 2;

const HEADER_LEN: usize = 12;
/// Bytes of a payload at most: the largest are a configuration space and a memory table.
const BODY_MAX: usize = ROOM_MAX;
/// How long a message may take from its first byte to its last, and an answer that the front end does not read. Front ends
/// send a message by one system call.
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
    /// Its payload, of any length.
    pub(super) fn body(&self) -> Fields<'_> {
        Fields(&self.body)
    }

    /// Its payload, which must have that many bytes.
    pub(super) fn exactly(&self, len: usize) -> Result<Fields<'_>> {
        if self.body.len() == len { Ok(Fields(&self.body)) } else { Err(self.malformed()) }
    }

    /// Takes its descriptors.
    pub(super) fn files(&mut self) -> Vec<File> {
        std::mem::take(&mut self.fds.taken).into_iter().map(File::from).collect()
    }

    /// Takes its only descriptor, if there is one and no other.
    pub(super) fn file(&mut self) -> Option<File> {
        let mut files = self.files();
        if files.len() == 1 { files.pop() } else { None }
    }

    pub(super) fn has_fds(&self) -> bool {
        self.fds.len() > 0
    }

    /// What one of its descriptors was, in words, if that was not taken: its close could wait.
    pub(super) fn refused_fd(&self) -> Option<&str> {
        self.fds.refused.first().map(String::as_str)
    }

    /// The error of a message whose parts do not fit each other. It ends the connection.
    pub(super) fn malformed(&self) -> Error {
        invalid(format!("message {} is malformed", self.code))
    }
}

/// Numbers of a payload, by their place. The caller has checked the length.
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

/// Bytes and descriptors that were read from a connection and belong to no whole message yet.
#[derive(Default)]
pub(super) struct Reader {
    bytes: Vec<u8>,
    fds: Descriptors,
    /// When the first of these bytes came.
    begun: Option<Instant>,
}

impl Reader {
    /// Makes a connection ready to be read, and its answers bounded in time.
    pub(super) fn prepare(stream: &UnixStream) -> io::Result<()> {
        // An urgent byte would stay in the queue with its descriptors, beside the stream that is read.
        sockopt::set_socket_oobinline(stream, true)?;
        // Such a socket may come from systemd (PassCredentials=, PassSecurity=). What it adds to messages looks like descriptors,
        // or is one.
        for option in [libc::SO_PASSCRED, libc::SO_PASSSEC, libc::SO_PASSPIDFD] {
            set_option(stream, option, false)?;
        }
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(MESSAGE_WAIT))
    }

    /// Returns the next message, or none when not all of it is there yet. Does not wait for more; for what `receiver` does it
    /// waits some seconds at most.
    ///
    /// # Errors
    /// The front end closed the connection, or what it sends is no message. Nothing more can be read then.
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

    /// Reads what a connection that waits for its turn has sent, as far as there is room.
    ///
    /// # Errors
    /// The front end has gone, or has sent descriptors or more than a few messages. No front end does the latter before its
    /// first message was answered; and what descriptors hold open may be the connection that is waited for.
    pub(super) fn read_ahead(&mut self, stream: &UnixStream) -> io::Result<()> {
        loop {
            let room = BODY_MAX.saturating_sub(self.bytes.len());
            if room == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it sends too much before its turn"));
            }
            if !self.receive(stream, room, None)? {
                // The time that its message may take begins with its turn.
                self.begun = None;
                return Ok(());
            }
        }
    }

    /// Whether a message can be had without reading.
    pub(super) fn is_ready(&self) -> bool {
        self.wanted().map_or(true, |wanted| self.bytes.len() >= wanted)
    }

    /// When the message that has begun must be whole. None: no message has begun.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        if self.bytes.is_empty() {
            return None;
        }
        Some(*self.begun.get_or_insert_with(Instant::now) + MESSAGE_WAIT)
    }

    /// Bytes of the next message: those of its header until that is there.
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

    /// Takes the message that has this many bytes, all of which are there.
    fn take(&mut self, len: usize) -> Message {
        let rest = self.bytes.split_off(len);
        let body = self.bytes.split_off(HEADER_LEN);
        let header = Fields(&self.bytes);
        let (code, flags) = (header.u32(0), header.u32(4));
        self.bytes = rest;
        self.begun = None;
        Message { code, need_reply: flags & FLAG_NEED_REPLY != 0, body, fds: std::mem::take(&mut self.fds) }
    }

    /// Reads up to `room` bytes and what came along with them; without a receiver, descriptors are an error. False: there is
    /// nothing to be read now.
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

/// Switches an option of a socket that the kernel may not know on or off.
fn set_option(stream: &UnixStream, option: i32, on: bool) -> io::Result<()> {
    let value = libc::c_int::from(on);
    // SAFETY: the kernel reads one integer, which outlives the call.
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

/// The error of bytes that are no message. It ends the connection.
pub(super) fn invalid(why: String) -> Error {
    Error::SocketError(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// The error of a message that was not finished in time.
pub(super) fn unfinished() -> Error {
    let why = format!("a message was not finished within {} s", MESSAGE_WAIT.as_secs());
    Error::SocketError(io::Error::new(io::ErrorKind::TimedOut, why))
}

/// Answers a message.
///
/// # Errors
/// The front end has gone, or has not read its answers for some seconds. The connection is over then.
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

/// Tells the front-end that the configuration space changed.
pub(super) fn config_changed(channel: &OwnedFd) -> io::Result<()> {
    let mut message = [0u8; HEADER_LEN];
    copy_start(&mut message, [CONFIG_CHANGE_MSG.to_ne_bytes(), FLAG_VERSION.to_ne_bytes()].as_flattened());
    send(channel, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

#[cfg(test)]
mod tests;
