//! Access of a front end to a queue that owns virtqueues: it finds the rings, changes them, and
//! takes them out.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::GuestMemory;
use virtio::ring::{DeviceRing, UsedLog};
use vshunt_engine::{EventFd, Queue, QueueStats, State};

/// The parts of a started ring.
pub struct RingParts {
    /// The device side of the virtqueue, with the in-flight region attached.
    pub vring: DeviceRing,
    /// The guest's memory at this time.
    pub mem: Arc<GuestMemory>,
    /// Requests that were in flight when a former daemon died, oldest first.
    pub replays: Vec<Replay>,
    /// The eventfd by which the guest kicks.
    pub kick: Arc<OwnedFd>,
    /// The eventfd that notifies the guest. `None`: the guest polls.
    pub call: Option<Arc<EventFd>>,
    /// The log of writes to guest memory while the guest migrates.
    pub log: Option<Arc<DirtyLog>>,
    /// Whether all that the guest sends is discarded.
    pub discards: bool,
    /// Counters of the ring's queue.
    pub stats: Arc<QueueStats>,
    /// Name for messages, `export:index`.
    pub name: String,
    /// Called once when the guest has broken the ring. It runs on the worker, so it must neither
    /// block nor log.
    pub on_broken: Box<dyn Fn(&str) + Send>,
}

/// The properties of a virtqueue that a front end may change, on its queue's worker or at rest.
pub trait Vring {
    /// Replaces the eventfd that notifies the guest, and signals the new one once.
    fn set_call(&mut self, call: Option<Arc<EventFd>>);
    /// Switches the marking of written guest pages: buffers, and the ring's own areas. Called only
    /// at rest, because a request in flight does not record where it writes.
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>);
    /// Asks for kicks again, for the program that serves the ring next. Called only at rest.
    fn allow_kicks(&mut self);
}

/// The format of frames in buffers, as negotiated with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameFormat {
    /// Bytes of the header before each frame: 10 or 12.
    pub header: usize,
    /// Whether a frame may fill several receive buffers.
    pub merge: bool,
}

/// A queue that owns virtqueues. A disk's queue and a network's control queue own one, a network's
/// queue pair owns two. `nth` is a virtqueue's number in its queue, from 0.
pub trait VirtqueueOwner: Queue {
    /// Returns one of its virtqueues, if it runs.
    fn ring(&mut self, nth: u16) -> Option<&mut dyn Vring>;
    /// Stops a virtqueue. Returns its base (as GET_VRING_BASE reports it), and whether another one
    /// still runs. `discard`: requests that the guest has made available are dropped, not kept for
    /// later. Called only at rest.
    fn remove(&mut self, nth: u16, discard: bool) -> (u32, bool);
    /// Returns whether one of its virtqueues is broken.
    fn is_broken(&self) -> bool;
    /// Returns whether it does more than discard what the guest sends.
    fn is_used(&self) -> bool {
        true
    }
    /// Returns the queue as a network's queue pair, if it is one.
    fn pair(&mut self) -> Option<&mut dyn QueuePair> {
        None
    }
}

/// A network's queue pair: a virtqueue to receive (number 0) and one to send (number 1), which
/// start and stop independently (Virtio 1.3, 5.1.2).
pub trait QueuePair {
    /// Starts a virtqueue. Called only at rest.
    fn add(&mut self, nth: u16, parts: RingParts, format: FrameFormat);
    /// Drops the frames that wait for the pair's receive buffers, because the guest does not use
    /// the pair for now. Called on its worker, between two iterations.
    fn set_aside(&mut self);
}

/// The cast of one type of queues to its [`VirtqueueOwner`].
struct OwnerCast(fn(&mut dyn Any) -> Option<&mut dyn VirtqueueOwner>);

/// Returns the value for [`Queue::extension`] of a queue of type `Q`, by which [`owner`] finds its
/// [`VirtqueueOwner`].
pub fn extension<Q: VirtqueueOwner>() -> &'static dyn Any {
    const { &OwnerCast(|queue| queue.downcast_mut::<Q>().map(|queue| queue as &mut dyn VirtqueueOwner)) }
}

/// Returns the virtqueues of a queue. `None`: it has none, such as a mount's queue.
pub fn owner(queue: &mut dyn Queue) -> Option<&mut dyn VirtqueueOwner> {
    let cast = queue.extension().downcast_ref::<OwnerCast>()?;
    (cast.0)(queue)
}

/// Returns the state of a queue on a worker, as users see it.
pub fn state_of(owner: &dyn VirtqueueOwner) -> State {
    match (owner.is_broken(), owner.is_used()) {
        (true, _) => State::Broken,
        (false, true) => State::Running,
        (false, false) => State::Stopped,
    }
}

/// Takes a virtqueue out of a queue that is on no worker. Returns the ring's base, as
/// GET_VRING_BASE reports it, and the queue, if it has another virtqueue.
///
/// `discard`: the ring is switched off, so that frames that the guest still has to send are
/// dropped, not sent later. `hand_over`: the front end may give the ring to another device side,
/// which has to be kicked. The caller knows that the ring's memory still belongs to the ring. In
/// all other cases the front end may already use that memory for something else, and nothing is
/// written there.
pub fn take_ring(
    mut queue: Box<dyn Queue>,
    nth: u16,
    discard: bool,
    hand_over: bool,
) -> (u32, Option<Box<dyn Queue>>) {
    let Some(owner) = owner(queue.as_mut()) else { return (0, None) };
    if hand_over && let Some(ring) = owner.ring(nth) {
        ring.allow_kicks();
    }
    let (base, more) = owner.remove(nth, discard);
    (base, more.then_some(queue))
}
