//! What front ends send, and the descriptors that come with it.
//!
//! Whoever receives a descriptor closes it some day, at the latest when it ends, and that close may wait: a file of a FUSE mount or
//! of NFS asks its server each time. A process that waits there cannot be killed. So the daemon itself never receives a descriptor
//! that a front end has chosen. It looks at what is there without taking it, and reads bytes without room for descriptors: the
//! kernel says then whether there are some. Where descriptors come along, a [`process`] of its own receives them, and passes on
//! those whose close waits for nobody: eventfds, UNIX stream sockets, files in memory. It has nothing else of the daemon's.
//!
//! What nobody has received is closed with the socket that it waits in, so such a process also closes connections that end with
//! descriptors unread, and empties the sockets that it passes on.
//!
//! Called by session threads. Where no such process was started (tests of the library), the calling thread does the same itself.

pub(super) mod process;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_oobinline, socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketType, recvmsg,
};

use self::process::Process;

/// Bytes read at once at most: a whole payload.
pub(super) const ROOM_MAX: usize = 4096;
/// Descriptors of one message at most: those of a memory table. The specification has 8.
pub(super) const FDS_MAX: usize = 32;
/// How long a process may take for an answer, and for closing what an earlier message brought. It is there at once, as a rule.
const PROCESS_WAIT: Duration = Duration::from_secs(5);
/// How long its end of work is waited for where nothing depends on it.
const CLOSE_WAIT: Duration = Duration::from_millis(100);
/// Connections that an export may have ended and not closed. With more, it takes no other.
const ENDED_MAX: usize = 8;
/// Bytes of the name of a descriptor that was not taken, at most.
const NAME_MAX: usize = 64;

/// Descriptors that came with bytes.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    /// Those that were taken.
    pub(super) taken: Vec<OwnedFd>,
    /// What the others were, in words: they are closed.
    pub(super) refused: Vec<String>,
}

impl Descriptors {
    /// How many came.
    pub(super) fn len(&self) -> usize {
        self.taken.len() + self.refused.len()
    }

    /// Adds those that came later with the same message.
    ///
    /// # Errors
    /// They are too many.
    pub(super) fn append(&mut self, mut more: Self) -> io::Result<()> {
        self.taken.append(&mut more.taken);
        self.refused.append(&mut more.refused);
        if self.len() > FDS_MAX { Err(too_many()) } else { Ok(()) }
    }
}

/// What is there to be read.
pub(super) struct Look {
    /// How many bytes; 0: the connection has ended.
    pub(super) bytes: usize,
    /// Whether descriptors come with them.
    pub(super) fds: bool,
}

/// Looks at what can be read, up to `room` bytes, and takes nothing. None: there is nothing. Does not wait.
pub(super) fn look(stream: &UnixStream, room: usize) -> io::Result<Option<Look>> {
    let mut bytes = [0u8; ROOM_MAX];
    let mut iov = [IoSliceMut::new(start_of(&mut bytes, room))];
    // Without room for descriptors the kernel only says whether there are some.
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recvmsg(stream, &mut iov, &mut RecvAncillaryBuffer::default(), flags) {
        Ok(got) => Ok(Some(Look { bytes: got.bytes, fds: got.flags.contains(ReturnFlags::CTRUNC) })),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Reads bytes that [`look`] found to come without descriptors. Nobody else reads the connection.
///
/// # Errors
/// A descriptor came all the same, and the kernel dropped it: where it has no memory, a look does not show descriptors.
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

/// What receives the descriptors of one export's front ends.
pub(super) struct Receiver {
    /// Whether all descriptors are taken: the export allows memory that may block.
    any: bool,
    /// A process that has not closed yet what it received. While there is one, no other receives for this export: front ends
    /// cannot fill the system with them.
    unfinished: Option<Process>,
    /// Connections that are over, with descriptors that nobody has read. They stay open until a process can close them.
    ended: Vec<UnixStream>,
    /// The process that closes one of those; a front end that is served does not wait for it.
    closing: Option<Process>,
    /// Why none was found for it when it was last wanted.
    no_process: Option<io::Error>,
    /// Whether there are too many of those, and the user was told.
    full: bool,
}

/// Connections of exports that were removed, with descriptors that nobody has read, for which there was no process.
static LEFT: Mutex<Vec<UnixStream>> = Mutex::new(Vec::new());

impl Receiver {
    pub(super) fn new(any: bool) -> Self {
        Self { any, unfinished: None, ended: Vec::new(), closing: None, no_process: None, full: false }
    }

    /// Takes a connection that is over, and what it has sent and nobody has read. Afterwards the front end cannot send any more,
    /// though others may still have the connection.
    pub(super) fn close(&mut self, stream: UnixStream) {
        let _ = stream.shutdown(Shutdown::Read);
        // A look does not show an urgent byte that is kept apart.
        let _ = set_socket_oobinline(&stream, true);
        let has_fds = loop {
            match look(&stream, ROOM_MAX) {
                Ok(Some(Look { bytes: 0, .. })) => break false,
                Ok(Some(Look { bytes, fds: false })) if read(&stream, bytes).is_ok() => {}
                // There are some, or there may be.
                _ => break true,
            }
        };
        if has_fds {
            self.ended.push(stream);
            self.close_ended();
        }
    }

    /// Goes on with closing what is over. Whether another connection may be taken; when that changes to no, it is logged.
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

    /// Whether something is over and not closed, so that [`has_room`](Self::has_room) is to be called again.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Has a process close what is over, one connection after the other.
    fn close_ended(&mut self) {
        self.closing = self.closing.take().and_then(|process| process.unless_finished(Duration::ZERO));
        self.no_process = None;
        while self.closing.is_none()
            && let Some(stream) = self.ended.pop()
        {
            match Process::close(stream.as_fd()) {
                Ok(Some(process)) => match process.keep_if_finished(CLOSE_WAIT) {
                    Ok(unfinished) => self.closing = unfinished,
                    // It has ended.
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

    /// Reads up to `room` bytes with the descriptors that come along.
    ///
    /// # Errors
    /// There are too many; or what came before is still being closed. Bytes may be lost then, so the connection has to end.
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
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.append(&mut self.ended);
        let mut process = self.closing.take();
        if process.is_none()
            && let Some(first) = left.first()
            && let Ok(Some(closing)) = Process::close(first.as_fd())
        {
            left.remove(0);
            process = Some(closing);
        }
        // It closes them after all else, and ends.
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

/// What one read of a connection brought.
struct Receipt {
    bytes: Vec<u8>,
    descriptors: Descriptors,
    /// Descriptors that are not taken. Whoever drops this closes them, and may wait.
    _others: Vec<OwnedFd>,
    /// Whether there were more than there is room for.
    too_many: bool,
}

impl Receipt {
    /// Closes what is not taken.
    fn into_parts(self) -> io::Result<(Vec<u8>, Descriptors)> {
        if self.too_many { Err(too_many()) } else { Ok((self.bytes, self.descriptors)) }
    }
}

/// Reads up to `room` bytes, with their descriptors. Unless `any` is set, only those are taken whose close waits for nobody. Closes
/// nothing but what sockets among them have in their queues.
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
    // There may be room for one more.
    let too_many = got.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > FDS_MAX;
    Ok(Receipt { bytes: start_of(&mut bytes, got.bytes).to_vec(), descriptors, _others: others, too_many })
}

/// Whether the last close of a descriptor waits for nobody. No file system is asked.
fn closes_at_once(fd: &OwnedFd) -> bool {
    // The kernel knows seals of files of tmpfs and hugetlbfs alone, memfds among them.
    rustix::fs::fcntl_get_seals(fd).is_ok() || link(fd).is_ok_and(|link| link == "anon_inode:[eventfd]")
}

/// Whether a socket is one whose queue could be emptied, and stays empty: a UNIX stream socket that does not listen. (One of TCP may
/// have been told to linger.)
fn empties(fd: &OwnedFd) -> bool {
    if socket_domain(fd) != Ok(AddressFamily::UNIX) || socket_type(fd) != Ok(SocketType::STREAM) {
        return false;
    }
    stop_reading(fd);
    // Looked at last: one that is made to listen from now on gets no connection.
    socket_acceptconn(fd) == Ok(false)
}

/// Ends the receiving direction of a UNIX socket, and closes what is queued there, which may wait.
pub(super) fn stop_reading(fd: impl AsFd) {
    // Nobody can queue anything after this.
    let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Read);
    // Descriptors are closed, since there is no room for them in these calls.
    let read = |flags| {
        let mut scrap = [0u8; ROOM_MAX];
        let mut iov = [IoSliceMut::new(&mut scrap)];
        recvmsg(&fd, &mut iov, &mut RecvAncillaryBuffer::default(), flags | RecvFlags::DONTWAIT)
    };
    let _ = read(RecvFlags::OOB);
    while read(RecvFlags::empty()).is_ok_and(|got| got.bytes > 0) {}
}

/// What a descriptor is, for messages.
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
