//! The messages that crate `vhost` has no arm for, read and answered by hand: status, the back-end's channel,
//! the log's eventfd, what is a network's; and two that it refuses in a form that front ends use: SET_VRING_ENABLE before the guest
//! chose its features, and SET_MEM_TABLE with no region, or with room for more regions than there are.
//! (vhost-user specification, "Front-end message types".)

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio::net::MAC_BYTES;

const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_ENABLE: u32 = 18;
const SEND_RARP: u32 = 19;
const NET_SET_MTU: u32 = 20;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_INFLIGHT_FD: u32 = 31;
const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;

/// Back-end message: the configuration space changed; no payload.
const CONFIG_CHANGE_MSG: u32 = 2;

const HEADER_LEN: usize = 12;
const BODY_LEN: usize = 8;
/// Regions that one SET_MEM_TABLE may have: as many descriptors as crate `vhost` takes with a message. The specification has 8.
const TABLE_REGIONS_MAX: usize = 32;
/// Bytes of one region in it.
const REGION_LEN: usize = 32;
const BODY_MAX: usize = BODY_LEN + TABLE_REGIONS_MAX * REGION_LEN;
const FLAG_VERSION: u32 = 1;
const FLAG_VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message that we handle ourselves.
pub(super) enum Own {
    /// Device status as the guest sets it; 0 is a reset.
    SetStatus(u64),
    /// What is the device status?
    GetStatus,
    /// The channel for messages to the front-end.
    BackendChannel(OwnedFd),
    /// The whole of the guest's memory: regions, and a file for each.
    MemTable(Vec<VhostUserMemoryRegion>, Vec<File>),
    /// The longest IP packet that the guest may send, as it is told.
    SetMtu(u64),
    /// The guest with this address is here now; its network is to know.
    Announce([u8; MAC_BYTES]),
    /// A ring is switched on or off.
    Enable { ring: u32, on: bool },
    /// An eventfd for the dirty log, which nobody reads any more: taken and closed.
    LogFd,
}

/// The message and what its answer needs.
pub(super) struct OwnMessage {
    pub(super) what: Own,
    code: u32,
    pub(super) need_reply: bool,
}

/// The next message's header, not consumed.
#[derive(Clone, Copy)]
pub(super) struct Next {
    code: u32,
    flags: u32,
}

impl Next {
    /// Waits until a message begins. One that the peer does not finish is `None`.
    pub(super) fn peek(stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut bytes = [0u8; 8];
        let (n, _) = recv(stream, &mut bytes, RecvFlags::PEEK | RecvFlags::WAITALL)?;
        let word = |i: usize| u32::from_ne_bytes(bytes[i..i + 4].try_into().expect("4 bytes"));
        Ok((n == bytes.len()).then(|| Self { code: word(0), flags: word(4) }))
    }

    /// Whether the message is one of ours.
    pub(super) fn is_own(self) -> bool {
        matches!(
            self.code,
            SET_MEM_TABLE
                | SET_LOG_FD
                | SET_VRING_ENABLE
                | SEND_RARP
                | NET_SET_MTU
                | SET_BACKEND_REQ_FD
                | SET_STATUS
                | GET_STATUS
        )
    }

    /// Whether the front-end is told when the message is refused, where acknowledgements were agreed on. Those with
    /// an answer of their own have no way to say no.
    pub(super) fn is_acknowledged(self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
            && !matches!(self.code, SET_LOG_BASE | GET_VRING_BASE | GET_INFLIGHT_FD)
    }
}

/// Reads such a message.
pub(super) fn read_own(stream: &UnixStream) -> io::Result<OwnMessage> {
    let mut header = [0u8; HEADER_LEN];
    let mut fds = Vec::new();
    recv_all(stream, &mut header, &mut fds)?;
    let word = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().expect("4 bytes"));
    let (code, flags, size) = (word(0), word(4), word(8) as usize);
    let size_max = if code == SET_MEM_TABLE { BODY_MAX } else { BODY_LEN };
    let mut body = [0u8; BODY_MAX];
    if flags & FLAG_VERSION_MASK != FLAG_VERSION || flags & FLAG_REPLY != 0 || size > size_max {
        return Err(malformed(code));
    }
    recv_all(stream, &mut body[..size], &mut fds)?;
    let what = match code {
        SET_MEM_TABLE => table(&body[..size], fds)?,
        _ => small(code, size, *body.first_chunk().expect("it is longer"), fds.pop())?,
    };
    Ok(OwnMessage { what, code, need_reply: flags & FLAG_NEED_REPLY != 0 })
}

/// A message of one number at most, and its last descriptor.
fn small(code: u32, size: usize, body: [u8; BODY_LEN], fd: Option<OwnedFd>) -> io::Result<Own> {
    Ok(match (code, size) {
        (SET_STATUS, BODY_LEN) => Own::SetStatus(u64::from_ne_bytes(body)),
        (GET_STATUS, 0) => Own::GetStatus,
        (NET_SET_MTU, BODY_LEN) => Own::SetMtu(u64::from_ne_bytes(body)),
        // The address, and two bytes of nothing.
        (SEND_RARP, BODY_LEN) => Own::Announce(*body.first_chunk().expect("8 bytes")),
        // QEMU sends no payload with this one; others send an empty u64.
        (SET_BACKEND_REQ_FD, _) => Own::BackendChannel(fd.ok_or_else(|| malformed(code))?),
        (SET_VRING_ENABLE, BODY_LEN) => {
            let half = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().expect("4 bytes"));
            match half(4) {
                on @ (0 | 1) => Own::Enable { ring: half(0), on: on == 1 },
                _ => return Err(malformed(code)),
            }
        }
        (SET_LOG_FD, _) => Own::LogFd,
        _ => return Err(malformed(code)),
    })
}

/// SET_MEM_TABLE: a count, padding, regions. User-mode Linux always sends room for two regions, whatever the count says.
fn table(body: &[u8], fds: Vec<OwnedFd>) -> io::Result<Own> {
    let (count, rest) = body.split_at_checked(BODY_LEN).ok_or_else(|| malformed(SET_MEM_TABLE))?;
    let count = u32::from_ne_bytes(*count.first_chunk().expect("8 bytes")) as usize;
    if count > rest.len() / REGION_LEN || fds.len() != count {
        return Err(malformed(SET_MEM_TABLE));
    }
    let region = |bytes: &[u8]| {
        let word = |i: usize| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().expect("8 bytes"));
        VhostUserMemoryRegion::new(word(0), word(1), word(2), word(3))
    };
    let regions = rest.chunks_exact(REGION_LEN).take(count).map(region).collect();
    Ok(Own::MemTable(regions, fds.into_iter().map(File::from).collect()))
}

/// Answers a [`Own::GetStatus`], or acknowledges another if the front-end asked for that.
pub(super) fn answer(mut stream: &UnixStream, to: &OwnMessage, value: u64) -> io::Result<()> {
    if !to.need_reply && !matches!(to.what, Own::GetStatus) {
        return Ok(());
    }
    let mut reply = [0u8; HEADER_LEN + BODY_LEN];
    reply[..4].copy_from_slice(&to.code.to_ne_bytes());
    reply[4..8].copy_from_slice(&(FLAG_VERSION | FLAG_REPLY).to_ne_bytes());
    reply[8..12].copy_from_slice(&(BODY_LEN as u32).to_ne_bytes());
    reply[12..].copy_from_slice(&value.to_ne_bytes());
    stream.write_all(&reply)
}

/// Tells the front-end that the configuration space changed.
pub(super) fn config_changed(channel: &OwnedFd) -> io::Result<()> {
    let mut message = [0u8; HEADER_LEN];
    message[..4].copy_from_slice(&CONFIG_CHANGE_MSG.to_ne_bytes());
    message[4..8].copy_from_slice(&FLAG_VERSION.to_ne_bytes());
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    rustix::net::send(channel, &message, flags)?;
    Ok(())
}

fn malformed(code: u32) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("message {code} is malformed"))
}

/// Fills `buf`, and appends the descriptors that came along: a message of more than [`TABLE_REGIONS_MAX`] is refused.
fn recv_all(stream: &UnixStream, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TABLE_REGIONS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(&mut buf[done..])];
        let got = recvmsg(stream.as_fd(), &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += got.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if fds.len() > TABLE_REGIONS_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message has too many descriptors"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
