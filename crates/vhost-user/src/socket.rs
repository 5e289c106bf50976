//! Where an export's front-ends come from: a socket that we make, or one that we inherit. Called by control threads.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use vshunt_types::error::{Error, Result};

use crate::socket_file::{self, SocketFile, Words};

/// Where the front-end comes from.
pub enum Socket {
    /// We listen; the file, if it is ours to remove (dropping it does).
    Listening(UnixListener, Option<SocketFile>),
    /// One connection, with which the export ends.
    Connected(UnixStream),
}

const WORDS: Words = Words {
    what: "socket",
    other: "another process listens",
    if_in_use: "choose another path",
    if_no_socket: "remove it or choose another path",
};

/// A listening socket at `path`. A socket left by a daemon that died is replaced; anything else there is an
/// error that says so.
pub fn listen(path: &Path) -> Result<Socket> {
    let (listener, file) = socket_file::bind(path, None, &WORDS)?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::io(format!("cannot listen on {}", path.display()), e))?;
    Ok(Socket::Listening(listener, Some(file)))
}

/// An inherited socket: listening (socket activation) or connected (`--fd`).
pub fn adopt(fd: RawFd) -> Result<Socket> {
    let bad = |e: io::Error| Error::io(format!("file descriptor {fd} is no UNIX stream socket"), e);
    // SAFETY: fcntl on a number that may be no descriptor fails with EBADF and does nothing else.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(bad(io::Error::last_os_error()));
    }
    // SAFETY: it is open (checked above) and was passed to this process to be its own.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    if rustix::net::sockopt::socket_acceptconn(&owned).map_err(|e| bad(e.into()))? {
        let listener = UnixListener::from(owned);
        listener.set_nonblocking(true).map_err(bad)?;
        return Ok(Socket::Listening(listener, None));
    }
    Ok(Socket::Connected(UnixStream::from(owned)))
}
