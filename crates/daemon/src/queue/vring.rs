//! What queues that are made of virtqueues have in common, for the frontend that starts and stops the rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::GuestMemory;
use virtio::ring::{DeviceRing, UsedLog};
use vshunt_engine::EventFd;
use vshunt_engine::{Queue, QueueStats};

use super::net::control::ControlQueue;
use super::{blk, net};

/// What a started ring brings with it.
pub struct Parts {
    /// Device side of the virtqueue, in-flight region attached.
    pub vring: DeviceRing,
    /// The guest's memory as of now.
    pub mem: Arc<GuestMemory>,
    /// Requests that were in flight when a former daemon died, oldest first.
    pub replays: Vec<Replay>,
    /// The guest's kicks.
    pub kick: Arc<OwnedFd>,
    /// Notifies the guest; none: it polls.
    pub call: Option<Arc<EventFd>>,
    /// Where writes to guest memory are marked while it migrates.
    pub log: Option<Arc<DirtyLog>>,
    /// Counters of its queue.
    pub stats: Arc<QueueStats>,
    /// Name for messages, `export:index`.
    pub name: String,
    /// Told once when the guest broke the ring; called on the worker, so it must not block (nor log).
    pub on_broken: Box<dyn Fn(&str) + Send>,
}

/// What a frontend may change of a virtqueue, on its queue's worker or at rest.
pub trait Vring {
    /// Replaces the descriptor that notifies the guest, and notifies once on it.
    fn set_call(&mut self, call: Option<Arc<EventFd>>);
    /// Switches the marking of written guest pages: buffers, and the ring's own areas. Only at rest, since a
    /// request under way was not told to note where it writes.
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>);
    /// Says that kicks are wanted again, for the program that has the ring next. Only at rest.
    fn allow_kicks(&mut self);
}

/// A virtqueue of a worker's queue: the only one of a disk's or of a card's control (`way` 0), or one of a pair's two.
pub fn ring(queue: &mut dyn Queue, way: u16) -> Option<&mut dyn Vring> {
    // Asked first, since a borrow that is given back on one way is taken on all.
    if queue.as_any().is::<blk::BlkQueue>() {
        return queue.as_any().downcast_mut::<blk::BlkQueue>().map(|q| q as &mut dyn Vring);
    }
    if queue.as_any().is::<ControlQueue>() {
        return queue.as_any().downcast_mut::<ControlQueue>().map(ControlQueue::ring);
    }
    pair(queue)?.ring(way)
}

/// A network card's queue pair; its control queue is none.
pub fn pair(queue: &mut dyn Queue) -> Option<&mut dyn net::Pair> {
    if queue.as_any().is::<net::tap::TapPair>() {
        return queue.as_any().downcast_mut::<net::tap::TapPair>().map(|q| q as &mut dyn net::Pair);
    }
    queue.as_any().downcast_mut::<net::switch::SwitchPair>().map(|q| q as &mut dyn net::Pair)
}

/// A queue without one of its virtqueues.
pub struct Rest {
    /// The queue.
    pub queue: Box<dyn Queue>,
    /// Whether another one of it is broken.
    pub broken: bool,
}

/// Takes a virtqueue out of a queue that is on no worker: where it stands, as GET_VRING_BASE reports it, and the queue, if
/// that has another.
///
/// `discard`: the ring is switched off, so that what a guest's card still has to send is dropped, not sent some time later.
/// `hand_over`: the ring's memory is still the ring's, and the front end may give the ring to another device side, which is
/// to be kicked. In all other cases the front-end may use that memory for something else by now, and nothing is written there.
pub fn take_ring(mut queue: Box<dyn Queue>, way: u16, discard: bool, hand_over: bool) -> (u32, Option<Rest>) {
    if hand_over && let Some(ring) = ring(queue.as_mut(), way) {
        ring.allow_kicks();
    }
    if let Some(pair) = pair(queue.as_mut()) {
        let (base, more) = pair.remove(way, discard);
        let broken = pair.is_broken();
        return (base, more.then_some(Rest { queue, broken }));
    }
    if let Some(control) = queue.as_any().downcast_mut::<ControlQueue>() {
        return (control.base(), None);
    }
    let disk = queue.as_any().downcast_mut::<blk::BlkQueue>();
    (disk.map_or(0, |q| q.base()), None)
}
