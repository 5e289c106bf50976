//! Receives the bytes and the descriptors that front ends send.
//!
//! A process that receives a descriptor must close it, at the latest when it exits. That close may
//! block: a file of a FUSE mount or of NFS calls its server on each close. A process that is
//! blocked there cannot be killed. So the daemon never receives a descriptor of a front end
//! directly:
//!
//! - The daemon peeks at a socket, and reads bytes without room for descriptors. The kernel reports
//!   whether there are descriptors.
//! - A separate [`process`] receives descriptors. It passes on those whose close never blocks:
//!   eventfds, UNIX stream sockets, and files in memory. It holds nothing else of the daemon.
//! - A descriptor that was never received is closed together with the socket in whose queue it
//!   lies. So such a process also closes connections that end with unread descriptors, and empties
//!   the queues of sockets that it passes on.
//!
//! Called by session threads. If no such process was started (tests of the library), the calling
//! thread does the same itself.

pub(super) mod process;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;
use vshunt_types::sync::Locked;

use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_oobinline, socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketType, recvmsg,
};

use self::process::Process;

/// Bytes that are read at once at most: the largest payload.
pub(super) const ROOM_MAX: usize = 4096;
/// Descriptors of one message at most: those of a memory table. The specification allows 8.
pub(super) const FDS_MAX: usize = 32;
/// How long a process may take for an answer, and for closing the descriptors of an earlier
/// message. Normally it answers at once.
const PROCESS_WAIT: Duration = Duration::from_secs(5);
/// How long to wait for the end of its work if nothing depends on it.
const CLOSE_WAIT: Duration = Duration::from_millis(100);
/// Ended connections of an export that are not closed yet, at most. With more, the export accepts
/// no other connection.
const ENDED_MAX: usize = 8;
/// Bytes of the name of a refused descriptor at most.
const NAME_MAX: usize = 64;

/// Descriptors that were received with bytes.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    /// Accepted descriptors.
    pub(super) taken: Vec<OwnedFd>,
    /// Names of the refused descriptors, which are closed.
    pub(super) refused: Vec<String>,
}

impl Descriptors {
    /// Returns how many were received.
    pub(super) fn len(&self) -> usize {
        self.taken.len() + self.refused.len()
    }

    /// Adds descriptors that were received later with the same message.
    ///
    /// # Errors
    /// There are too many.
    pub(super) fn append(&mut self, mut more: Self) -> io::Result<()> {
        self.taken.append(&mut more.taken);
        self.refused.append(&mut more.refused);
        if self.len() > FDS_MAX { Err(too_many()) } else { Ok(()) }
    }
}

/// What can be read from a connection.
pub(super) struct Look {
    /// Number of bytes; 0: the connection has ended.
    pub(super) bytes: usize,
    /// Whether descriptors come with them.
    pub(super) fds: bool,
}

/// Peeks at the next `room` bytes at most, without reading them. None if there is nothing to read.
/// Does not wait.
pub(super) fn look(stream: &UnixStream, room: usize) -> io::Result<Option<Look>> {
    let mut bytes = [0u8; ROOM_MAX];
    let mut iov = [IoSliceMut::new(start_of(&mut bytes, room))];
    // Without room for descriptors, the kernel only reports whether there are some.
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recvmsg(stream, &mut iov, &mut RecvAncillaryBuffer::default(), flags) {
        Ok(got) => Ok(Some(Look { bytes: got.bytes, fds: got.flags.contains(ReturnFlags::CTRUNC) })),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Reads bytes that [`look`] has found to have no descriptors. No other thread or process reads the
/// connection.
///
/// # Errors
/// There was a descriptor, and the kernel dropped it: when the kernel has no memory, a peek does
/// not report descriptors.
pub(super) fn read(stream: &UnixStream, bytes: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0u8; bytes];
    let mut iov = [IoSliceMut::new(&mut buffer)];
    let got = recvmsg(stream, &mut iov, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)?;
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the descriptors of a message were lost"));
    }
    buffer.truncate(got.bytes);
    Ok(buffer)
}

/// Returns the first `len` bytes, or all if there are fewer.
fn start_of(bytes: &mut [u8], len: usize) -> &mut [u8] {
    let len = len.min(bytes.len());
    bytes.split_at_mut(len).0
}

/// Receives the descriptors of the front ends of one export.
pub(super) struct Receiver {
    /// Whether all descriptors are accepted: the export allows memory that may block.
    any: bool,
    /// A process that has not closed all that it received yet. Meanwhile no other process receives
    /// for this export, so that front ends cannot start many processes.
    unfinished: Option<Process>,
    /// Ended connections with unread descriptors. They stay open until a process can close them.
    ended: Vec<UnixStream>,
    /// The process that closes one of them. The connected front end does not wait for it.
    closing: Option<Process>,
    /// Why no process was available for that the last time.
    no_process: Option<io::Error>,
    /// Whether too many connections are not closed, and this was logged.
    full: bool,
}

/// Connections of removed exports with unread descriptors, for which there was no process. Guards
/// the list alone.
static LEFT: Mutex<Vec<UnixStream>> = Mutex::new(Vec::new());

impl Receiver {
    pub(super) fn new(any: bool) -> Self {
        Self { any, unfinished: None, ended: Vec::new(), closing: None, no_process: None, full: false }
    }

    /// Takes over an ended connection, with its unread bytes and descriptors. Afterwards the front
    /// end cannot send any more, even if the connection is still open.
    pub(super) fn close(&mut self, stream: UnixStream) {
        let _ = stream.shutdown(Shutdown::Read);
        // A peek does not show an urgent byte that is not in line.
        let _ = set_socket_oobinline(&stream, true);
        let has_fds = loop {
            match look(&stream, ROOM_MAX) {
                Ok(Some(Look { bytes: 0, .. })) => break false,
                Ok(Some(Look { bytes, fds: false })) if read(&stream, bytes).is_ok() => {}
                // There are descriptors, or there may be.
                _ => break true,
            }
        };
        if has_fds {
            self.ended.push(stream);
            self.close_ended();
        }
    }

    /// Continues to close ended connections. Returns whether another connection may be accepted. A
    /// change to false is logged.
    pub(super) fn has_room(&mut self, export: &str) -> bool {
        self.close_ended();
        let full = self.ended.len() >= ENDED_MAX;
        if full && !self.full {
            let why = match &self.no_process {
                Some(e) => e.to_string(),
                None => {
                    "closing a descriptor waits, as it does where a file system does not answer".to_owned()
                }
            };
            tracing::warn!(
                "{export}: no front end is served: {ENDED_MAX} have left descriptors that are still open: {why}"
            );
        }
        self.full = full;
        !full
    }

    /// Returns whether an ended connection is not closed yet. Then [`has_room`](Self::has_room)
    /// must be called again.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Lets a process close the ended connections, one after the other.
    fn close_ended(&mut self) {
        self.closing = self.closing.take().and_then(|process| process.unless_finished(Duration::ZERO));
        self.no_process = None;
        while self.closing.is_none()
            && let Some(stream) = self.ended.pop()
        {
            match Process::close(stream.as_fd()) {
                Ok(Some(process)) => match process.keep_if_finished(CLOSE_WAIT) {
                    Ok(unfinished) => self.closing = unfinished,
                    // The process has ended.
                    Err(_) => return self.ended.push(stream),
                },
                Ok(None) => stop_reading(&stream),
                Err(e) => {
                    self.no_process = Some(e);
                    return self.ended.push(stream);
                }
            }
        }
    }

    /// Reads up to `room` bytes with their descriptors.
    ///
    /// # Errors
    /// There are too many descriptors, or earlier ones are still being closed. Bytes may be lost,
    /// so the connection must end.
    pub(super) fn receive(&mut self, stream: &UnixStream, room: usize) -> io::Result<(Vec<u8>, Descriptors)> {
        self.unfinished = self.unfinished.take().and_then(|process| process.unless_finished(PROCESS_WAIT));
        if let Some(process) = &self.unfinished {
            let why = format!(
                "process {} is still closing what a front end handed over before, which waits, as it does where a file system \
                 does not answer",
                process.id()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        let Some(process) = Process::receive(stream.as_fd(), room, self.any)? else {
            return receive(stream.as_fd(), room, self.any)?.into_parts();
        };
        let answer = process.answer(PROCESS_WAIT);
        self.unfinished = process.unless_finished(CLOSE_WAIT);
        answer
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.close_ended();
        let mut left = LEFT.locked();
        left.append(&mut self.ended);
        let mut process = self.closing.take();
        if process.is_none()
            && let Some(first) = left.first()
            && let Ok(Some(closing)) = Process::close(first.as_fd())
        {
            left.remove(0);
            process = Some(closing);
        }
        // The process closes them after its current work, and ends.
        if let Some(process) = process {
            left.retain(|stream| process.close_later(stream.as_fd()).is_err());
        }
        if !left.is_empty() {
            tracing::error!(
                "{} connections that front ends have left with descriptors stay open until there is a process to close them",
                left.len()
            );
        }
    }
}

/// The result of one read of a connection.
struct Receipt {
    bytes: Vec<u8>,
    descriptors: Descriptors,
    /// Refused descriptors. Dropping this closes them, and may block.
    _others: Vec<OwnedFd>,
    /// Whether there were more descriptors than allowed.
    too_many: bool,
}

impl Receipt {
    /// Closes the refused descriptors, and returns the rest.
    fn into_parts(self) -> io::Result<(Vec<u8>, Descriptors)> {
        if self.too_many { Err(too_many()) } else { Ok((self.bytes, self.descriptors)) }
    }
}

/// Reads up to `room` bytes, with their descriptors. Unless `any` is set, it accepts only
/// descriptors whose close never blocks. It closes nothing except the descriptors in the queues of
/// received sockets.
fn receive(stream: BorrowedFd<'_>, room: usize, any: bool) -> io::Result<Receipt> {
    let mut bytes = [0u8; ROOM_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(start_of(&mut bytes, room))];
    let got = recvmsg(stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?;
    let (mut descriptors, mut others) = (Descriptors::default(), Vec::new());
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(fds) = message else { continue };
        for fd in fds {
            let take = if socket_type(&fd).is_ok() { empties(&fd) } else { any || closes_at_once(&fd) };
            if take {
                descriptors.taken.push(fd);
            } else {
                descriptors.refused.push(name(&fd));
                others.push(fd);
            }
        }
    }
    // The buffer may have room for one more descriptor than is allowed.
    let too_many = got.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > FDS_MAX;
    Ok(Receipt { bytes: start_of(&mut bytes, got.bytes).to_vec(), descriptors, _others: others, too_many })
}

/// Returns whether the last close of a descriptor never blocks. No file system is called.
fn closes_at_once(fd: &OwnedFd) -> bool {
    // Only files of tmpfs and hugetlbfs have seals, which includes memfds.
    rustix::fs::fcntl_get_seals(fd).is_ok() || link(fd).is_ok_and(|link| link == "anon_inode:[eventfd]")
}

/// Empties the queue of a socket. Returns whether it stays empty: the socket is a UNIX stream
/// socket that does not listen. (The close of a TCP socket may block, by SO_LINGER.)
fn empties(fd: &OwnedFd) -> bool {
    if socket_domain(fd) != Ok(AddressFamily::UNIX) || socket_type(fd) != Ok(SocketType::STREAM) {
        return false;
    }
    stop_reading(fd);
    // Checked last: a socket that starts to listen after the shutdown gets no connection.
    socket_acceptconn(fd) == Ok(false)
}

/// Shuts the receiving direction of a UNIX socket down, and closes what is queued there, which may
/// block.
pub(super) fn stop_reading(fd: impl AsFd) {
    // After this, nothing can be queued.
    let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Read);
    // These calls have no room for descriptors, so the kernel closes them.
    let read = |flags| {
        let mut scrap = [0u8; ROOM_MAX];
        let mut iov = [IoSliceMut::new(&mut scrap)];
        recvmsg(&fd, &mut iov, &mut RecvAncillaryBuffer::default(), flags | RecvFlags::DONTWAIT)
    };
    let _ = read(RecvFlags::OOB);
    while read(RecvFlags::empty()).is_ok_and(|got| got.bytes > 0) {}
}

/// Returns the name of a descriptor, for messages.
fn name(fd: &OwnedFd) -> String {
    let name = link(fd).unwrap_or_else(|_| "a file".to_owned());
    name.escape_default().take(NAME_MAX).collect()
}

fn link(fd: &OwnedFd) -> io::Result<String> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let link = rustix::fs::readlinkat(rustix::fs::CWD, path, Vec::new())?;
    Ok(link.to_string_lossy().into_owned())
}

fn too_many() -> io::Error {
    let why = "a message has too many descriptors, or this process has no more (ulimit -n, LimitNOFILE=)";
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests;
