//! Queues: take a request, drive a backend, complete it. One folder a device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio::log::DirtyLog;
use virtio::ring::UsedLog;

use crate::worker::Queue;

pub mod blk;

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
