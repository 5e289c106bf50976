//! The transport of a device: a vhost-user socket, or the ioctls of the kernel's `/dev/vhost-blk`.
//!
//! Rings, memory, load and verification are the same for both. The differences are here, in
//! [`Session`] and in [`Kernel`]. It belongs to the thread that owns the device.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::PollFlags;

use super::config::{Config, feature};
use super::kernel::Kernel;
use super::log::DirtyLog;
use super::memory::Memory;
use super::session::Session;
use super::{Code, RingParts, RingSetup};
use crate::error::Result;

/// A device that is open and negotiated.
#[derive(Debug)]
pub enum Transport {
    /// vhost-user.
    Socket(Box<Session>),
    /// vhost ioctls.
    Kernel(Box<Kernel>),
}

/// The result of a wait on [`Transport::fds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollEvent {
    /// Nothing relevant.
    Nothing,
    /// The server closed the connection.
    Gone,
    /// The device reports a changed configuration.
    Changed(Config),
}

impl Transport {
    /// Returns the negotiated virtio features.
    pub fn features(&self) -> u64 {
        match self {
            Self::Socket(session) => session.features(),
            Self::Kernel(kernel) => kernel.features(),
        }
    }

    /// Returns the configuration as last read.
    pub fn config(&self) -> &Config {
        match self {
            Self::Socket(session) => session.config(),
            Self::Kernel(kernel) => kernel.config(),
        }
    }

    /// Returns the number of queues of the device.
    pub fn max_queues(&self) -> u16 {
        match self {
            Self::Socket(session) => session.max_queues(),
            Self::Kernel(_) => virtio::vhost::VHOST_BLK_VRINGS_MAX as u16,
        }
    }

    /// Passes memory and rings to the device, and starts them.
    pub fn start(&mut self, memory: &Memory, rings: &[RingSetup<'_>]) -> Result<()> {
        match self {
            Self::Socket(session) => session.start(memory, rings),
            Self::Kernel(kernel) => kernel.start(memory, rings),
        }
    }

    /// Starts a stopped ring again. `log`: the device logs its writes to the used ring.
    pub fn start_ring(&mut self, ring: &RingSetup<'_>, log: bool) -> Result<()> {
        match self {
            Self::Socket(session) => {
                session.set_ring(ring, log)?;
                session.enable(ring.index, true)?;
            }
            Self::Kernel(kernel) => kernel.start_ring(ring, log)?,
        }
        ring.kick();
        Ok(())
    }

    /// Stops a ring after its last request in flight. Returns its base.
    pub fn stop_ring(&mut self, ring: u16) -> Result<u32> {
        match self {
            Self::Socket(session) => session.stop_ring(ring),
            Self::Kernel(kernel) => kernel.stop_ring(ring),
        }
    }

    /// Gives a dirty log to the device. [`Transport::switch_logging`] starts its use.
    pub fn set_log(&mut self, log: &DirtyLog) -> Result<()> {
        match self {
            Self::Socket(session) => {
                let (size, fd) = log.share();
                session.set_log(size, fd)
            }
            Self::Kernel(kernel) => kernel.set_log(log),
        }
    }

    /// Switches logging for rings that run, as a VMM does: the feature, then each ring's address
    /// again.
    pub fn switch_logging(&mut self, parts: &[RingParts], on: bool) -> Result<()> {
        let features = self.features() | if on { feature::LOG_ALL } else { 0 };
        match self {
            Self::Socket(session) => {
                session.set_features(features)?;
                for parts in parts {
                    session.set_ring_addr(&RingSetup { parts, base: 0 }, on)?;
                }
                // The answer to any message shows that the previous messages were processed.
                session.wire().ask_u64(Code::GetFeatures).map(drop)
            }
            Self::Kernel(kernel) => kernel.logger().switch(parts, on),
        }
    }

    /// Returns the file descriptors to wait on, and the events. [`Transport::poll_event`]
    /// interprets them.
    pub fn fds(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        match self {
            Self::Socket(session) => {
                let (socket, channel) = session.fds();
                let mut fds = vec![(socket, PollFlags::IN | PollFlags::RDHUP)];
                fds.extend(channel.map(|fd| (fd, PollFlags::IN)));
                fds
            }
            Self::Kernel(kernel) => kernel.error_fds().map(|fd| (fd, PollFlags::IN)).collect(),
        }
    }

    /// Interprets which of [`Transport::fds`] are ready. A broken ring is an error.
    pub fn poll_event(&mut self, ready: &[bool]) -> Result<PollEvent> {
        match self {
            Self::Socket(session) => {
                if ready.first() == Some(&true) {
                    return Ok(PollEvent::Gone);
                }
                if ready.get(1) != Some(&true) {
                    return Ok(PollEvent::Nothing);
                }
                let config = session.wait_config_change(Duration::ZERO)?;
                Ok(config.map_or(PollEvent::Nothing, PollEvent::Changed))
            }
            Self::Kernel(kernel) => {
                let broken = ready.iter().position(|&ready| ready);
                broken.map_or(Ok(PollEvent::Nothing), |ring| Err(kernel.broken(ring as u16)))
            }
        }
    }

    /// Returns the file descriptor to wait on in addition to a ring's completions.
    pub fn ring_fd(&self, ring: u16) -> BorrowedFd<'_> {
        match self {
            Self::Socket(session) => session.fds().0,
            Self::Kernel(kernel) => kernel.error_fd(ring),
        }
    }

    /// Returns the process id of the server.
    pub fn peer_pid(&self) -> Option<u32> {
        match self {
            Self::Socket(session) => session.peer_pid(),
            Self::Kernel(_) => None,
        }
    }

    /// Returns the kernel's device, if this is one.
    pub fn kernel(&self) -> Option<&Kernel> {
        match self {
            Self::Socket(_) => None,
            Self::Kernel(kernel) => Some(kernel),
        }
    }
}
