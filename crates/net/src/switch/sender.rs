//! Frames that a port's queue has sent to other queues, until all their descriptions were returned.
//!
//! The owner numbers what it sends by slots. A slot is finished once all its descriptions were
//! returned, in any order. Descriptions that no worker takes are revoked when the queue leaves its
//! worker, and after [`TICK`] in any case, so that a guest that takes nothing holds up no other
//! guest.

use std::cell::UnsafeCell;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::Timespec;
use vshunt_engine::{PollState, Token, Uring};
use vshunt_types::spec::DropReason;

use super::frame::{Header, NEEDS_CSUM, Packet};
use super::port::Port;
use super::port_guard::PortGuard;
use super::port_queue::{Outcome, Piece, PortQueue, SentFrame, is_before};
use super::vlan::{FrameStart, NO_VLAN, TagForm};
use super::{LastRoute, Route, View};
use crate::pair_rings::OP_OWN;
use crate::slots::{number, slot, slot_mut};

const OP_SIGNALLED: u8 = OP_OWN;
const OP_TICK: u8 = OP_OWN + 1;
/// The first operation of an owner.
pub(super) const OP_OWNER: u8 = OP_OWN + 2;

/// The shortest time that a frame waits for a guest's buffers. The maximum is twice that.
static TICK: Timespec = Timespec::new().nsec(10_000_000);
/// Most buffers of a frame. Each description lists all of them, and a switch may have many ports.
pub(super) const BUFFERS_MAX: usize = 128;
/// Most pieces of a description: the copy of the frame's first bytes, and the rest of the buffers.
pub(super) const PIECES_MAX: usize = BUFFERS_MAX + 1;
/// Most frames in flight to a queue that has taken none for a while. They show whether it takes
/// frames again.
const STUCK_MAX: u32 = 4;
/// Number of destinations that stay listed.
const DESTINATIONS_KEPT: usize = 8;

/// A frame in flight.
#[derive(Clone, Copy, Default)]
struct SendSlot {
    /// Descriptions that were not returned.
    pending: u32,
    /// Whether a receiver took the frame.
    taken: bool,
    /// The time when it was sent.
    tick: u32,
}

/// The frames to one queue.
struct Destination {
    queue: Arc<PortQueue>,
    /// Descriptions of this iteration, not yet put into its inbox.
    frames: Vec<SentFrame>,
    /// Descriptions that were not returned.
    outstanding: u32,
    /// Whether it let frames wait for too long, and has taken none since.
    stuck: bool,
}

/// A slot that is finished.
#[derive(Clone, Copy)]
pub(super) struct Finished {
    pub(super) slot: u16,
    /// Whether a receiver took the frame.
    pub(super) taken: bool,
}

/// See the module. Belongs to the worker that has the queue.
pub(super) struct Sender {
    guard: Arc<PortGuard>,
    /// Number of the queue within its port.
    index: u16,
    /// The queue to which descriptions are returned, and at which frames of other ports arrive.
    pub(super) queue: Arc<PortQueue>,
    slots: Box<[SendSlot]>,
    /// The first bytes of each slot's frame, as they were checked. This worker writes one while its
    /// slot is finished. The workers that copy the frame read it until all descriptions of the slot
    /// were returned.
    starts: Box<[UnsafeCell<FrameStart>]>,
    /// Slots that are not finished.
    in_flight: u32,
    /// Finished slots that the owner has not taken.
    pub(super) finished: Vec<Finished>,
    /// Frames that a receiver did not get, by reason.
    no_room: u64,
    invalid: u64,
    over_mtu: u64,
    /// Unused descriptions.
    spare: Vec<SentFrame>,
    /// A slow destination slows this port down. A destination that takes nothing gets almost
    /// nothing after a while.
    destinations: Vec<Destination>,
    returned: Vec<SentFrame>,
    view: Arc<View>,
    version: u64,
    now_s: u32,
    /// The last route of this iteration.
    last: LastRoute,
    tick: u32,
    timer: PollState,
    /// The poll of the eventfd that other workers signal.
    eventfd: PollState,
    /// Whether the queue leaves its worker once all descriptions were returned.
    leaving: bool,
}

impl Sender {
    /// Makes the sender of queue `index` of a port, with no frames in flight.
    pub(super) fn new(guard: Arc<PortGuard>, index: u16) -> Self {
        let queue = slot(&guard.port.queues, index).clone();
        Self {
            guard,
            index,
            queue,
            slots: Box::default(),
            starts: Box::default(),
            in_flight: 0,
            finished: Vec::new(),
            no_room: 0,
            invalid: 0,
            over_mtu: 0,
            spare: Vec::new(),
            destinations: Vec::new(),
            returned: Vec::new(),
            view: Arc::default(),
            version: u64::MAX,
            now_s: 0,
            last: LastRoute::default(),
            tick: 0,
            timer: PollState::Off,
            eventfd: PollState::Off,
            leaving: false,
        }
    }

    /// Sets the number of slots. Called only while no frames are in flight.
    pub(super) fn set_slots(&mut self, count: u16) {
        debug_assert!(self.in_flight == 0);
        self.slots = (0..count).map(|_| SendSlot::default()).collect();
        self.starts = (0..count).map(|_| UnsafeCell::default()).collect();
    }

    pub(super) fn at_rest(&self) -> bool {
        self.in_flight == 0 && self.timer == PollState::Off && self.eventfd == PollState::Off
    }

    /// Starts an iteration: renews the snapshot of the ports and the time.
    pub(super) fn start_iteration(&mut self) {
        let switch = &self.guard.switch;
        let version = switch.version();
        if version != self.version {
            (self.view, self.version) = (switch.view(), version);
        }
        self.now_s = switch.now_s();
        self.last = LastRoute::default();
    }

    /// Describes a frame for all its receivers, except for queues that have `most` frames of this
    /// sender already. The slot is in flight until it is among [`finished`](Self::finished). On an
    /// error it never was in flight.
    ///
    /// The first bytes that are sent are those of the packet, because a guest may change its memory
    /// after the check. The rest is the memory that `pieces` adds to a description, without the
    /// number of bytes that it is given; that may be none. The memory stays mapped until the slot
    /// is finished.
    pub(super) fn send(
        &mut self,
        slot: u16,
        packet: &Packet<'_>,
        content: FrameContent,
        most: u32,
        pieces: impl Fn(usize, &mut Vec<Piece>),
    ) -> Result<(), DropReason> {
        let Self { guard, queue: own, destinations, spare, starts, view, now_s, last, tick, .. } = self;
        let (port, info) = (&*guard.port, &packet.info);
        let vlan = port.admit(packet, *now_s)?;
        let route = last.or_find(info, vlan, || guard.switch.route(view, port, info, vlan, *now_s))?;
        port.learn(info.hash, self.index, *now_s);
        // A frame that leaves unchanged from memory that no guest writes to needs no copy.
        let copied = !(content.stable && vlan == NO_VLAN);
        let start = copied.then(|| {
            // SAFETY: the owner passes a slot that is finished, so no other worker reads this
            // start. The sender belongs to this worker, and `&mut self` excludes another use here.
            let start = unsafe { &mut *slot_mut(starts, slot).get() };
            start.set(packet.first, vlan);
            &*start
        });
        let (mut pending, mut full) = (0, 0);
        let mut put = |to: &Port| -> Result<(), DropReason> {
            let form = to.accept(port, packet, vlan, *now_s)?;
            if start.is_some_and(|start| !start.has(form)) {
                return Err(DropReason::Vlan);
            }
            let queue = to.queue_for(info.hash, *now_s).ok_or(DropReason::NoReceiver)?;
            let at = number(position(destinations, queue));
            let destination = slot_mut(destinations, at);
            if destination.outstanding >= if destination.stuck { STUCK_MAX.min(most) } else { most } {
                full += 1;
                return Ok(());
            }
            let mut frame = spare.pop().unwrap_or_else(|| SentFrame::from(own));
            (frame.slot, frame.destination, frame.tick) = (slot, at, *tick);
            content.describe(&mut frame, start.map(|start| (start, form)));
            pieces(start.map_or(0, FrameStart::replaced), &mut frame.pieces);
            destination.frames.push(frame);
            destination.outstanding += 1;
            pending += 1;
            Ok(())
        };
        match route {
            Route::Port(at) => view.port(at.into()).map_or(Err(DropReason::NoReceiver), |to| put(to))?,
            Route::All => {
                for to in view.all().filter(|to| to.index != port.index) {
                    // A flooded frame counts as lost only at ports where it is too long.
                    self.over_mtu += u64::from(put(to) == Err(DropReason::OverMtu));
                }
            }
            Route::Nowhere => {}
        }
        self.no_room += full;
        match (pending, full) {
            (0, 0) => return Err(DropReason::NoReceiver),
            (0, _) => self.finished.push(Finished { slot, taken: false }),
            _ => self.in_flight += 1,
        }
        *slot_mut(&mut self.slots, slot) = SendSlot { pending, taken: false, tick: *tick };
        Ok(())
    }

    /// Returns whether a frame that entered by an uplink is a probe of the switch, which is not
    /// forwarded.
    #[inline]
    pub(super) fn is_probe(&self, first: &[u8]) -> bool {
        self.guard.switch.is_probe(&self.view, &self.guard.port, first, self.now_s)
    }

    /// Puts the descriptions of this iteration into the inboxes of their destinations.
    pub(super) fn deliver(&mut self) {
        for destination in &mut self.destinations {
            if !destination.frames.is_empty() {
                destination.queue.put(&mut destination.frames);
                // The frames for which there was no room.
                self.returned.append(&mut destination.frames);
            }
        }
        self.count_returned();
        // Few destinations stay listed, to keep the memory of their vectors.
        if self.destinations.len() > DESTINATIONS_KEPT && self.in_flight == 0 {
            self.destinations.clear();
        }
    }

    /// Takes the descriptions that were returned.
    pub(super) fn reap_returns(&mut self) {
        if self.queue.has_returns() {
            self.queue.take_returns(&mut self.returned);
            self.count_returned();
        }
    }

    /// Counts the returned descriptions. A slot with none pending is finished.
    fn count_returned(&mut self) {
        for frame in self.returned.drain(..) {
            let slot = slot_mut(&mut self.slots, frame.slot);
            slot.pending -= 1;
            let destination = slot_mut(&mut self.destinations, frame.destination);
            destination.outstanding -= 1;
            match frame.outcome {
                Outcome::Taken => (slot.taken, destination.stuck) = (true, false),
                Outcome::NoRoom => self.no_room += 1,
                Outcome::Invalid => self.invalid += 1,
            }
            if slot.pending == 0 {
                self.in_flight -= 1;
                self.finished.push(Finished { slot: frame.slot, taken: slot.taken });
            }
            self.spare.push(frame);
        }
    }

    /// Reports the frames that a receiver did not get since the last call.
    pub(super) fn count_lost(&mut self, mut lost: impl FnMut(DropReason, u64)) {
        for (why, count) in [
            (DropReason::NoRoom, &mut self.no_room),
            (DropReason::BadHeader, &mut self.invalid),
            (DropReason::OverMtu, &mut self.over_mtu),
        ] {
            if *count > 0 {
                lost(why, std::mem::take(count));
            }
        }
    }

    /// Prepares for a worker: other workers can signal it from now on.
    pub(super) fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.leaving = false;
        self.eventfd.start(uring, self.queue.as_raw_fd(), place.with(0, OP_SIGNALLED));
        self.watch(uring, place);
    }

    /// Starts the timer if frames are in flight.
    pub(super) fn watch(&mut self, uring: &mut Uring, place: Token) {
        if self.in_flight > 0 {
            self.timer.start_timeout(uring, &TICK, place.with(0, OP_TICK));
        }
    }

    /// Prepares to leave the worker: revokes all frames in flight. Frames that other workers copy
    /// at this time are returned by them, or put back and revoked at the next tick.
    pub(super) fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.leaving = true;
        if self.in_flight > 0 {
            self.revoke(self.tick.wrapping_add(1));
            self.count_returned();
        }
        self.watch(uring, place);
        self.leave_once_returned(uring, place);
    }

    /// Handles a completion. Returns whether it was one of the sender's own operations.
    pub(super) fn complete(&mut self, uring: &mut Uring, token: Token, more: bool) -> bool {
        match token.op {
            OP_SIGNALLED => {
                if !more && self.eventfd.ended().restarts() {
                    self.eventfd.start(uring, self.queue.as_raw_fd(), token);
                }
            }
            OP_TICK => self.ticked(uring, token),
            _ => return false,
        }
        if self.leaving {
            self.leave_once_returned(uring, token);
        }
        true
    }

    /// Revokes frames that were in flight for a whole tick, or all if the queue is leaving: another
    /// worker may have taken a frame and put it back since the last tick.
    fn ticked(&mut self, uring: &mut Uring, place: Token) {
        self.timer.ended();
        self.tick = self.tick.wrapping_add(1);
        let limit = if self.leaving { self.tick } else { self.tick.wrapping_sub(1) };
        if self.slots.iter().any(|slot| slot.pending > 0 && is_before(slot.tick, limit)) {
            let before = self.returned.len();
            self.revoke(limit);
            for frame in self.returned.iter().skip(before) {
                slot_mut(&mut self.destinations, frame.destination).stuck = true;
            }
            self.count_returned();
        }
        self.watch(uring, place);
    }

    /// Takes back frames that were sent before `tick` and were not taken yet.
    fn revoke(&mut self, tick: u32) {
        // Ports that joined after the snapshot cannot have frames of this sender.
        for other in self.view.all().flat_map(|port| &port.queues) {
            other.revoke(&self.queue, tick, &mut self.returned);
        }
    }

    /// Takes the returned frames. Ends the polls if no frames are in flight.
    fn leave_once_returned(&mut self, uring: &mut Uring, place: Token) {
        // Other workers signal what they return from now on. This takes what they returned before.
        self.queue.sleep();
        self.reap_returns();
        if self.in_flight == 0 {
            self.timer.end(uring, place.with(0, OP_TICK));
            self.eventfd.end(uring, place.with(0, OP_SIGNALLED));
        }
    }

    /// Returns whether the queue is about to leave its worker.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Records that the queue has left its worker.
    pub(super) fn left(&mut self) {
        self.leaving = false;
    }
}

/// Returns the position of `queue` among the destinations. Adds it if it is not there.
fn position(destinations: &mut Vec<Destination>, queue: &Arc<PortQueue>) -> usize {
    destinations.iter().position(|to| Arc::ptr_eq(&to.queue, queue)).unwrap_or_else(|| {
        let queue = queue.clone();
        destinations.push(Destination { queue, frames: Vec::new(), outstanding: 0, stuck: false });
        destinations.len() - 1
    })
}

/// The properties of a frame as it entered, without its bytes.
#[derive(Clone, Copy)]
pub(super) struct FrameContent {
    pub(super) header: Header,
    pub(super) len: usize,
    /// Whether the bytes do not change before the slot is finished, because they are not in guest
    /// memory.
    pub(super) stable: bool,
}

impl FrameContent {
    /// Fills a description. The frame begins with `start` in one form, or is unchanged. The caller
    /// adds the other pieces.
    fn describe(&self, frame: &mut SentFrame, start: Option<(&FrameStart, TagForm)>) {
        frame.outcome = Outcome::NoRoom;
        frame.pieces.clear();
        let Some((start, form)) = start else {
            (frame.len, frame.header) = (self.len, self.header);
            return;
        };
        let (first, longer) = (start.bytes(form), start.longer(form));
        frame.len = self.len.wrapping_add_signed(longer);
        frame.header = self.header.moved(longer);
        frame.pieces.push(Piece { ptr: first.as_ptr().cast_mut(), len: first.len() });
    }
}

/// Returns a guest's header as other guests see it. They must not rely on its flag for verified
/// checksums.
pub(super) fn relayed_header(header: Header) -> Header {
    Header { flags: header.flags & NEEDS_CSUM, ..header }
}
