//! Connected sockets of servers, and connecting to them with a limit of time.
//!
//! Called by threads that may wait. All waits end when the time is over, and when the try is
//! [interrupted](Limit::interrupt).

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use vshunt_engine::EventFd;

/// Pause while the queue of a UNIX socket is full.
const FULL: Duration = Duration::from_millis(20);
/// A TCP connection counts as lost when sent data is not acknowledged for so long.
const TCP_TIMEOUT_MS: u32 = 30_000;
/// An idle TCP connection is probed after this time, and then as often; it is lost after so many
/// probes without an answer.
const TCP_IDLE: Duration = Duration::from_secs(10);
const TCP_PROBES: u32 = 3;

/// When waits end.
#[derive(Clone, Copy)]
pub(super) struct Limit<'a> {
    pub(super) until: Instant,
    /// Readable: the connection is not wanted any more.
    pub(super) interrupt: &'a EventFd,
}

impl Limit<'_> {
    /// Waits until a socket is ready.
    ///
    /// # Errors
    /// `TimedOut`; `ConnectionAborted` after an interruption.
    fn wait(self, socket: BorrowedFd<'_>, ready: PollFlags) -> io::Result<()> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut fds =
                [PollFd::from_borrowed_fd(socket, ready), PollFd::new(self.interrupt, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                // Not `Interrupted`, after which a read is repeated.
                Ok(_) if !fds[1].revents().is_empty() => return Err(io::ErrorKind::ConnectionAborted.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits for `pause`.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn sleep(self, pause: Duration) -> io::Result<()> {
        let until = self.until.min(Instant::now() + pause);
        match (Limit { until, ..self }).wait(self.interrupt.as_fd(), PollFlags::empty()) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut && Instant::now() < self.until => Ok(()),
            ended => ended,
        }
    }
}

/// A connected socket of a server.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Lets reads and writes wait, or not.
    pub(super) fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_nonblocking(nonblocking),
            Self::Unix(s) => s.set_nonblocking(nonblocking),
        }
    }

    pub(super) fn into_fd(self) -> rustix::fd::OwnedFd {
        match self {
            Self::Tcp(s) => s.into(),
            Self::Unix(s) => s.into(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(s) => s.as_fd(),
            Self::Unix(s) => s.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => s.read(to),
            Self::Unix(s) => s.read(to),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => s.write(from),
            Self::Unix(s) => s.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A stream that does not block, whose reads and writes end at a limit.
pub(super) struct Timed<'a> {
    pub(super) stream: &'a mut Stream,
    pub(super) limit: Limit<'a>,
}

impl Timed<'_> {
    /// Repeats a call until it has not to wait. A server that always has bytes ready is held to the
    /// limit, too.
    fn retry<T>(
        &mut self,
        ready: PollFlags,
        mut call: impl FnMut(&mut Stream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            self.limit.wait(self.stream.as_fd(), ready)?;
            match call(self.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.retry(PollFlags::IN, |stream| stream.read(to))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.retry(PollFlags::OUT, |stream| stream.write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects to the first of these addresses that answers. The stream does not block.
///
/// # Errors
/// That of the last address; `TimedOut`; `ConnectionAborted` after an interruption.
pub(super) fn connect_tcp(addresses: &[SocketAddr], limit: Limit<'_>) -> io::Result<TcpStream> {
    let mut failed = io::ErrorKind::TimedOut.into();
    for (i, address) in addresses.iter().enumerate() {
        // One that does not answer leaves time for the others.
        let now = Instant::now();
        let left = limit.until.saturating_duration_since(now) / (addresses.len() - i) as u32;
        if left.is_zero() {
            break;
        }
        match connect_address(address, Limit { until: now + left, ..limit }) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, TCP_IDLE)?;
                sockopt::set_tcp_keepintvl(&stream, TCP_IDLE)?;
                sockopt::set_tcp_keepcnt(&stream, TCP_PROBES)?;
                sockopt::set_tcp_user_timeout(&stream, TCP_TIMEOUT_MS)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => return Err(e),
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

fn connect_address(address: &SocketAddr, limit: Limit<'_>) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, address) {
        Ok(()) => {}
        Err(rustix::io::Errno::INPROGRESS) => {
            limit.wait(socket.as_fd(), PollFlags::OUT)?;
            sockopt::socket_error(&socket)??;
        }
        Err(e) => return Err(e.into()),
    }
    Ok(socket.into())
}

/// Connects to a UNIX socket. connect(2) would wait without a limit while its queue is full. The
/// stream does not block.
///
/// # Errors
/// The system's; `TimedOut`; `ConnectionAborted` after an interruption.
pub(super) fn connect_unix(path: &Path, limit: Limit<'_>) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(rustix::io::Errno::AGAIN) => limit.sleep(FULL)?,
            Err(e) => return Err(e.into()),
        }
    }
}
