//! Queues: take a request, drive a backend, complete it. One folder a device.

use std::os::fd::OwnedFd;

pub mod blk;
pub mod copy;
pub mod fuse;
mod listen;
pub mod net;
mod vring;

pub use vring::{Parts, Rest, Vring, pair, ring, take_ring};

/// An eventfd that we write to, the front-end's mostly.
///
/// It must not block us: its counter may be full, by the front-end's doing. Where it is not O_NONBLOCK (and we may not
/// make it so: the flag is shared with those who read it) we look first. A front-end that clears the flag later, and
/// fills the counter, stops the worker that serves it; a daemon for each tenant is the remedy for that.
pub struct Bell {
    fd: OwnedFd,
    nonblocking: bool,
}

impl Bell {
    /// From an eventfd.
    pub fn new(fd: OwnedFd) -> Self {
        let nonblocking =
            rustix::fs::fcntl_getfl(&fd).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK));
        Self { fd, nonblocking }
    }

    /// One of our own.
    pub fn make() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Its descriptor, for those who wait on it.
    pub fn fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.fd)
    }

    /// Whether it was rung since the last time.
    fn take(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 8]).is_ok()
    }

    /// Its descriptor, for those to whom it is handed over.
    pub fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    /// Adds one to the counter. A full one is a notification, too.
    #[inline]
    pub fn ring(&self) {
        if self.nonblocking || self.has_room() {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    fn has_room(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n == 1)
    }
}
