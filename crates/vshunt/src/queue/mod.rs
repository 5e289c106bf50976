//! Queues: take a request, drive a backend, complete it. One folder a device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio::log::DirtyLog;
use virtio::ring::UsedLog;

use crate::worker::Queue;

pub mod blk;

/// An eventfd of the front-end's that we signal. Its counter may be full, and then a write would block the worker.
pub struct Bell {
    fd: OwnedFd,
    /// It is not O_NONBLOCK, so that it is asked before each write. (QEMU's is.)
    may_block: bool,
}

impl Bell {
    /// For an eventfd as the front-end passed it.
    pub fn new(fd: OwnedFd) -> Self {
        let flags = rustix::fs::fcntl_getfl(&fd).unwrap_or(rustix::fs::OFlags::empty());
        Self { may_block: !flags.contains(rustix::fs::OFlags::NONBLOCK), fd }
    }

    /// Adds one to it. A counter that is full is a signal, too.
    #[inline]
    pub fn ring(&self) {
        if !self.may_block || self.has_room() {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    fn has_room(&self) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::OUT)];
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n == 1)
    }
}

/// What a frontend may change of a queue that is a virtqueue, on its worker or at rest.
pub trait Vring {
    /// Where the ring stands, as GET_VRING_BASE reports it. Only at rest.
    fn base(&self) -> u32;
    /// Replaces the descriptor that notifies the guest, and notifies once on it.
    fn set_call(&mut self, call: Option<OwnedFd>);
    /// Replaces the descriptor that reports a broken ring.
    fn set_err(&mut self, err: Option<OwnedFd>);
    /// Switches the marking of written guest pages: buffers, and the ring's own areas. Only at rest, since a
    /// request under way was not told to note where it writes.
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>);
}

/// The virtqueue in a worker's queue; None if it is of another kind.
pub fn vring(queue: &mut dyn Queue) -> Option<&mut dyn Vring> {
    queue.as_any().downcast_mut::<blk::BlkQueue>().map(|q| q as &mut dyn Vring)
}
