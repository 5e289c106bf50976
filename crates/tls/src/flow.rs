//! Bytes between two sockets that do not wait.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Bytes that one read takes, and that are kept at most.
pub(crate) const BUFFER_BYTES: usize = 64 << 10;

/// A connected socket of which reads and writes do not wait, whatever its mode is.
#[derive(Debug)]
pub struct Socket<F>(pub F);

impl<F: AsFd> Read for Socket<F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let (_, n) = recv(&self.0, to, RecvFlags::DONTWAIT)?;
        Ok(n)
    }
}

impl<F: AsFd> Write for Socket<F> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(send(&self.0, from, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: AsFd> AsFd for Socket<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Bytes that wait for one side.
pub(crate) struct Bytes {
    all: Box<[u8]>,
    start: usize,
    pub(crate) end: usize,
}

impl Default for Bytes {
    fn default() -> Self {
        Self { all: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 }
    }
}

impl Bytes {
    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub(crate) fn is_full(&self) -> bool {
        self.end == self.all.len()
    }

    pub(crate) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// Adds the bytes of one read; there has to be room. Returns false at the end of the source.
    pub(crate) fn fill(&mut self, from: &mut impl Read) -> io::Result<bool> {
        match from.read(&mut self.all[self.end..]) {
            Ok(bytes) => {
                self.end += bytes;
                Ok(bytes > 0)
            }
            Err(e) if would_block(&e) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Writes what waits, as far as it is taken.
    pub(crate) fn drain(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.all[self.start..self.end]) {
                Ok(0) => break,
                Ok(bytes) => self.start += bytes,
                Err(e) if would_block(&e) => break,
                Err(e) => return Err(e),
            }
        }
        if self.is_empty() {
            self.clear();
        }
        Ok(())
    }
}

pub(crate) fn would_block(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
