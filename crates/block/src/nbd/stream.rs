//! Connected sockets of servers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A connected socket of a server.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Limits each read and write. None: they wait.
    pub(super) fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_read_timeout(limit).and_then(|()| s.set_write_timeout(limit)),
            Self::Unix(s) => s.set_read_timeout(limit).and_then(|()| s.set_write_timeout(limit)),
        }
    }

    pub(super) fn into_fd(self) -> rustix::fd::OwnedFd {
        match self {
            Self::Tcp(s) => s.into(),
            Self::Unix(s) => s.into(),
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

/// A stream whose reads and writes end at a given time.
pub(super) struct Timed<'a> {
    pub(super) stream: &'a mut Stream,
    pub(super) until: Instant,
}

impl Timed<'_> {
    fn limit(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.limit(Some(left.max(Duration::from_millis(1))))
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.read(to)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
