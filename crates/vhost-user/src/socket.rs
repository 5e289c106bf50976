//! The socket of an export: created by the daemon, or inherited. Called by control threads.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::SocketAccess;

use crate::socket_file::{self, SocketFile, Words};

/// The socket of an export.
pub enum Socket {
    /// A listening socket, and its file if the daemon made it. Dropping the file removes it.
    Listening(UnixListener, Option<SocketFile>),
    /// One connection. The export ends with it.
    Connected(UnixStream),
}

const WORDS: Words = Words {
    what: "socket",
    other: "another process listens",
    if_in_use: "choose another path",
    if_no_socket: "remove it or choose another path",
};

/// Makes a listening socket at `path`, to which those may connect whom `access` names. A stale
/// socket of a daemon that died is replaced.
///
/// # Errors
/// Anything else is at `path`, or the socket cannot be made or given to its owner.
pub fn listen(path: &Path, access: &SocketAccess) -> Result<Socket> {
    let (listener, file) = socket_file::bind(path, access, &WORDS)?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::io(format!("cannot listen on {}", path.display()), e))?;
    Ok(Socket::Listening(listener, Some(file)))
}

/// Takes an inherited socket: listening (socket activation) or connected (`--fd`).
///
/// # Errors
/// The descriptor is not a UNIX stream socket.
pub fn adopt(fd: RawFd) -> Result<Socket> {
    let bad = |e: io::Error| Error::io(format!("file descriptor {fd} is no UNIX stream socket"), e);
    // SAFETY: if the number is not an open descriptor, fcntl fails with EBADF and does nothing
    // else.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(bad(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is open (checked above). The caller's process inherited it, and
    // nothing else in the process owns it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    if rustix::net::sockopt::socket_acceptconn(&owned).map_err(|e| bad(e.into()))? {
        let listener = UnixListener::from(owned);
        listener.set_nonblocking(true).map_err(bad)?;
        return Ok(Socket::Listening(listener, None));
    }
    Ok(Socket::Connected(UnixStream::from(owned)))
}
