//! vhost-user messages on the front end's side: numbers, headers, one request and its answer.
//!
//! This is written from the specification ("Vhost-user Protocol"). It shares no crate with the
//! server, so that a common error of both ends is detected. Tests can also send messages that a
//! library would refuse. The thread that owns the connection calls this. A call blocks until the
//! server has answered or the timeout has passed.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::error::{Error, Kind, Result, fail};

/// Requests from front end to back end.
#[allow(missing_docs)] // the names are the specification's
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    SetMemTable = 5,
    SetLogBase = 6,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    SetBackendReqFd = 21,
    GetConfig = 24,
    SetConfig = 25,
    GetInflightFd = 31,
    SetInflightFd = 32,
    ResetDevice = 34,
    GetMaxMemSlots = 36,
    AddMemReg = 37,
    RemMemReg = 38,
    SetStatus = 39,
    GetStatus = 40,
}

/// Protocol features, as bit masks.
#[allow(missing_docs)] // the names are the specification's
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    /// The features that this driver takes if they are offered.
    pub const SUPPORTED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Header flags: version 1.
pub const VERSION: u32 = 1;
/// Header flags: the message is an answer.
pub const REPLY: u32 = 1 << 2;
/// Header flags: the sender asks for an acknowledgement.
pub const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header: request, flags, size.
pub(super) const HEADER_LEN: usize = 12;
/// Most bytes of a payload. No message of this device is longer.
const PAYLOAD_MAX: usize = 4096;
/// Most descriptors of one message (SET_MEM_TABLE has 8 regions).
const FDS_MAX: usize = 8;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// The request number.
    pub code: u32,
    /// Version and flags.
    pub flags: u32,
    /// The bytes after the header.
    pub payload: Vec<u8>,
    /// File descriptors that arrived with it.
    pub fds: Vec<OwnedFd>,
}

/// Builds a payload field by field, in little endian.
#[derive(Default)]
pub struct Payload(Vec<u8>);

impl Payload {
    /// Returns an empty payload.
    pub fn new() -> Self {
        Self::default()
    }
    /// Appends a 16-bit number.
    #[must_use]
    pub fn u16(mut self, v: u16) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    /// Appends a 32-bit number.
    #[must_use]
    pub fn u32(mut self, v: u32) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    /// Appends a 64-bit number.
    #[must_use]
    pub fn u64(mut self, v: u64) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    /// Appends bytes.
    #[must_use]
    pub fn bytes(mut self, v: &[u8]) -> Self {
        self.0.extend_from_slice(v);
        self
    }
}

impl std::ops::Deref for Payload {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// The connection to a server.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    timeout: Duration,
    /// Whether REPLY_ACK was negotiated. Then the server acknowledges every request, and reports
    /// each refusal.
    pub reply_ack: bool,
}

impl Wire {
    /// Connects to the socket at `path`. `timeout` limits the wait for each answer.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|e| {
            let hint = match e.kind() {
                io::ErrorKind::NotFound => "; start the server first, or check --socket",
                io::ErrorKind::ConnectionRefused => {
                    "; no server listens there any more: start the server again"
                }
                io::ErrorKind::PermissionDenied => "; run as the socket's owner",
                _ => "",
            };
            Error::with(Kind::Connect, format!("cannot connect to {}{hint}", path.display()), e)
        })?;
        let set =
            stream.set_read_timeout(Some(timeout)).and_then(|()| stream.set_write_timeout(Some(timeout)));
        set.map_err(|e| Error::with(Kind::Connect, "cannot set the socket's time limit", e))?;
        Ok(Self { stream, timeout, reply_ack: false })
    }

    /// Takes a connected socket, such as one that a test's listener accepted.
    pub fn from_stream(stream: UnixStream, timeout: Duration) -> Self {
        Self { stream, timeout, reply_ack: false }
    }

    /// Returns the socket, to wait for its end.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the process id of the server when it started to listen, from the kernel.
    pub fn peer_pid(&self) -> Option<u32> {
        let cred = rustix::net::sockopt::socket_peercred(&self.stream).ok()?;
        u32::try_from(cred.pid.as_raw_nonzero().get()).ok()
    }

    /// Sends a message unchecked, with any number and any flags. Tests of a hostile front end use
    /// this.
    pub fn send(&mut self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut header = [0; HEADER_LEN];
        header[0..4].copy_from_slice(&code.to_le_bytes());
        header[4..8].copy_from_slice(&flags.to_le_bytes());
        header[8..12].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        let bytes = [&header[..], payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        let mut sent = sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        while sent < bytes.len() {
            let mut none = SendAncillaryBuffer::default();
            sent += sendmsg(&self.stream, &[IoSlice::new(&bytes[sent..])], &mut none, SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    /// Receives one message of any kind.
    pub fn recv(&mut self) -> io::Result<Message> {
        recv_message(&self.stream)
    }

    /// Sends a request whose answer has a payload. Returns the answer.
    pub fn ask(&mut self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message> {
        self.send(code as u32, VERSION, payload, fds).map_err(|e| self.unsent(code, e))?;
        let reply = self.recv().map_err(|e| self.lost(code, e))?;
        if reply.code != code as u32 || reply.flags & REPLY == 0 {
            return Err(fail!(
                Lost,
                "{code:?} was answered by message {} with flags {:#x}",
                reply.code,
                reply.flags
            ));
        }
        Ok(reply)
    }

    /// Like [`Wire::ask`], for an answer that is one 64-bit number.
    pub fn ask_u64(&mut self, code: Code) -> Result<u64> {
        let reply = self.ask(code, &[], &[])?;
        read_u64(&reply.payload, 0)
            .ok_or_else(|| fail!(Lost, "{code:?} was answered by {} bytes", reply.payload.len()))
    }

    /// Sends a request without an answer. Waits for the acknowledgement if REPLY_ACK was
    /// negotiated.
    pub fn tell(&mut self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = if self.reply_ack { VERSION | NEED_REPLY } else { VERSION };
        self.send(code as u32, flags, payload, fds).map_err(|e| self.unsent(code, e))?;
        if !self.reply_ack {
            return Ok(());
        }
        let reply = self.recv().map_err(|e| self.lost(code, e))?;
        match (reply.code == code as u32, read_u64(&reply.payload, 0)) {
            (true, Some(0)) => Ok(()),
            (true, Some(status)) => Err(fail!(Lost, "the server refused {code:?} (status {status})")),
            _ => Err(fail!(Lost, "{code:?} was answered by message {}", reply.code)),
        }
    }

    /// Returns the error of a message that could not be sent. The peer may have sent a greeting
    /// first.
    fn unsent(&self, code: Code, e: io::Error) -> Error {
        let said = match e.kind() {
            io::ErrorKind::BrokenPipe => recv_message(&self.stream).err().filter(speaks_qmp),
            _ => None,
        };
        self.lost(code, said.unwrap_or(e))
    }

    fn lost(&self, code: Code, e: io::Error) -> Error {
        match e.kind() {
            _ if speaks_qmp(&e) => fail!(Lost, "{e}"),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                fail!(Lost, "the server did not answer {code:?} within {:?}", self.timeout)
            }
            _ => Error::with(Kind::Lost, format!("the server closed the connection at {code:?}"), e),
        }
    }
}

/// The peer is a control socket, because it sent a QMP greeting.
#[derive(Debug)]
struct SpeaksQmp;

impl std::fmt::Display for SpeaksQmp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "this is a control socket, which speaks QMP and not vhost-user: give the socket of an export \
             (`vshunt -c CONTROL status` lists them)",
        )
    }
}

impl std::error::Error for SpeaksQmp {}

fn speaks_qmp(e: &io::Error) -> bool {
    e.get_ref().is_some_and(|e| e.is::<SpeaksQmp>())
}

/// Receives one message from the socket or the backend channel.
pub(crate) fn recv_message(stream: &UnixStream) -> io::Result<Message> {
    let mut header = [0; HEADER_LEN];
    let mut fds = Vec::new();
    let mut got = 0;
    while got < HEADER_LEN {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(&mut header[got..])];
        let n = recvmsg(stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        got += n;
    }
    if header.starts_with(b"{\"QMP\"") {
        return Err(io::Error::new(io::ErrorKind::InvalidData, SpeaksQmp));
    }
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let size = word(8) as usize;
    if size > PAYLOAD_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {size} bytes")));
    }
    let mut payload = vec![0; size];
    (&*stream).read_exact(&mut payload)?;
    Ok(Message { code: word(0), flags: word(4), payload, fds })
}

/// Returns the 64-bit number at `at`.
pub(crate) fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Returns the 32-bit number at `at`.
pub(crate) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the 16-bit number at `at`.
pub(crate) fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}
