//! The backend channel, on which the server sends messages. This driver uses only the message that
//! the configuration changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::wire::{HEADER_LEN, NEED_REPLY, REPLY, VERSION, recv_message};
use crate::error::{Error, Kind, Result};

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;

/// The driver's end of the backend channel.
#[derive(Debug)]
pub struct BackendChannel {
    ours: UnixStream,
}

impl BackendChannel {
    /// Returns a pair: the driver's end, and the end for the server.
    pub fn pair() -> Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()
            .map_err(|e| Error::with(Kind::System, "cannot make the backend channel", e))?;
        Ok((Self { ours }, theirs))
    }

    /// Returns the file descriptor to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }

    /// Takes one message if one arrives within `wait`. Returns whether it announced a changed
    /// configuration. The end of the channel is not an error, because the connection reports it.
    pub fn take(&self, wait: Duration) -> Result<bool> {
        let wait = rustix::event::Timespec::try_from(wait)
            .map_err(|_| Error::new(Kind::Usage, "that is too long a time to wait"))?;
        let mut fds = [PollFd::new(&self.ours, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&wait)).unwrap_or(0);
        if ready == 0 {
            return Ok(false);
        }
        let message = match recv_message(&self.ours) {
            Ok(message) => message,
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(e) => return Err(Error::with(Kind::Lost, "the backend channel broke", e)),
        };
        if message.flags & NEED_REPLY != 0 {
            self.acknowledge(message.code, u64::from(message.code != CONFIG_CHANGE))?;
        }
        Ok(message.code == CONFIG_CHANGE)
    }

    fn acknowledge(&self, code: u32, status: u64) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_LEN + 8);
        bytes.extend_from_slice(&code.to_le_bytes());
        bytes.extend_from_slice(&(VERSION | REPLY).to_le_bytes());
        bytes.extend_from_slice(&8u32.to_le_bytes());
        bytes.extend_from_slice(&status.to_le_bytes());
        std::io::Write::write_all(&mut &self.ours, &bytes)
            .map_err(|e| Error::with(Kind::Lost, "the backend channel broke", e))
    }
}
