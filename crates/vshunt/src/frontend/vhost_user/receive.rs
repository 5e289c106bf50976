//! What front ends send, and the descriptors that come with it.
//!
//! Whoever receives a descriptor closes it some day, at the latest when it ends, and that close may wait: a file of a FUSE mount or
//! of NFS asks its server each time. A process that waits there cannot be killed. So the daemon itself never receives a descriptor
//! that a front end has chosen. It looks at what is there without taking it, and reads bytes without room for descriptors: the
//! kernel drops those, which asks no server to flush. (Where nobody else has such a file open, dropping it may still wait: see
//! docs/threat-model.md.) Where descriptors come along, a [`process`] of its own receives them, and passes on
//! those whose close waits for nobody: eventfds, UNIX sockets, files in memory. It has nothing else of the daemon's.
//!
//! Called by session threads. Where no such process was started (tests of the library), the calling thread does the same itself.

pub(super) mod process;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::socket_domain;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg,
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
    let mut iov = [IoSliceMut::new(&mut bytes[..room.min(ROOM_MAX)])];
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

/// What receives the descriptors of one export's front ends.
pub(super) struct Receiver {
    /// Whether all descriptors are taken: the export allows memory that may block.
    any: bool,
    /// A process that has not closed yet what it received. While there is one, there is no other for this export: front ends
    /// cannot fill the system with them.
    unfinished: Option<Process>,
}

impl Receiver {
    pub(super) fn new(any: bool) -> Self {
        Self { any, unfinished: None }
    }

    /// Reads up to `room` bytes with the descriptors that come along.
    ///
    /// # Errors
    /// There are too many; or what came before is still being closed. Bytes may be lost then, so the connection has to end.
    pub(super) fn receive(&mut self, stream: &UnixStream, room: usize) -> io::Result<(Vec<u8>, Descriptors)> {
        let process = match self.unfinished.take() {
            None => Process::take()?,
            Some(process) if process.is_finished(PROCESS_WAIT)? => Some(process),
            Some(process) => {
                let why = format!(
                    "a descriptor that a front end handed over before is still being closed by process {}: its file \
                     system does not answer",
                    process.id()
                );
                self.unfinished = Some(process);
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        };
        let Some(process) = process else {
            return receive(stream.as_fd(), room, self.any)?.into_parts();
        };
        let answer = process.receive(stream.as_fd(), room, self.any, PROCESS_WAIT);
        match process.is_finished(CLOSE_WAIT) {
            Ok(true) => process.give_back(),
            Ok(false) => self.unfinished = Some(process),
            // It has ended.
            Err(_) => {}
        }
        answer
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

/// Reads up to `room` bytes, with their descriptors. Unless `any` is set, only those are taken whose close waits for nobody. Does
/// not wait, and closes nothing.
fn receive(stream: BorrowedFd<'_>, room: usize, any: bool) -> io::Result<Receipt> {
    let mut bytes = [0u8; ROOM_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(&mut bytes[..room.min(ROOM_MAX)])];
    let got = recvmsg(stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?;
    let (mut descriptors, mut others) = (Descriptors::default(), Vec::new());
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(fds) = message else { continue };
        for fd in fds {
            if any || closes_at_once(&fd) {
                descriptors.taken.push(fd);
            } else {
                descriptors.refused.push(name(&fd));
                others.push(fd);
            }
        }
    }
    // There may be room for one more.
    let too_many = got.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > FDS_MAX;
    Ok(Receipt { bytes: bytes[..got.bytes].to_vec(), descriptors, _others: others, too_many })
}

/// Whether the last close of a descriptor waits for nobody. No file system is asked.
fn closes_at_once(fd: &OwnedFd) -> bool {
    // The kernel knows seals of files of tmpfs and hugetlbfs alone, memfds among them.
    rustix::fs::fcntl_get_seals(fd).is_ok()
        || link(fd).is_ok_and(|link| link == "anon_inode:[eventfd]")
        // One of TCP may have been told to linger.
        || socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
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
