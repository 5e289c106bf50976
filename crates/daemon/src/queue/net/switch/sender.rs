//! What a port's queue has on its way to others: descriptions put before the ends that they go to, until they are home.
//!
//! Slots are the owner's numbers of what it sends; one is over once all its descriptions are home, in whatever order. Those
//! that nobody takes are fetched back when the queue leaves its worker, and after a while in any case.

use std::cell::UnsafeCell;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::Timespec;
use vshunt_engine::PollState;
use vshunt_engine::{Token, Uring};
use vshunt_net::switch::{
    End, Fate, Form, Frame, Header, LastRoute, NEEDS_CSUM, NO_VLAN, Packet, Piece, Port, Route, Start, View,
};
use vshunt_types::spec::DropReason;

use super::super::rings::OP_OWN;
use super::Plug;

const OP_BELL: u8 = OP_OWN;
const OP_TICK: u8 = OP_OWN + 1;
/// Operations of an owner begin there.
pub(super) const OP_OWNER: u8 = OP_OWN + 2;

/// How long a frame waits for a guest's buffers at least; at most twice that.
static TICK: Timespec = Timespec::new().nsec(10_000_000);
/// Buffers of a frame at most: each description has them all, and a switch may have many ports.
pub(super) const BUFFERS_MAX: usize = 128;
/// Pieces of a description at most: our copy of the frame's first bytes goes before the rest of the buffers.
pub(super) const PIECES_MAX: usize = BUFFERS_MAX + 1;
/// Frames on their way to an end that has taken none for a while: enough to find out whether it does again.
const STUCK_MAX: u32 = 4;
/// Ends that stay listed.
const LANES_KEPT: usize = 8;

/// A frame on its way.
#[derive(Clone, Copy, Default)]
struct Slot {
    /// Descriptions that are not home.
    left: u32,
    /// One came through.
    taken: bool,
    tick: u32,
}

/// What is on its way to one end.
struct Lane {
    end: Arc<End>,
    /// Of this turn.
    frames: Vec<Frame>,
    /// Not home.
    outstanding: u32,
    /// It let frames wait for too long, and has taken none since.
    stuck: bool,
}

/// A slot that is over.
#[derive(Clone, Copy)]
pub(super) struct Over {
    pub(super) slot: u16,
    /// Somebody got the frame.
    pub(super) taken: bool,
}

/// See the module. Belongs to the worker that has the queue.
pub(super) struct Sender {
    plug: Arc<Plug>,
    /// Of the queue within its port.
    index: u16,
    /// Where descriptions come home, and others' frames come to.
    pub(super) end: Arc<End>,
    slots: Box<[Slot]>,
    /// The first bytes of each slot's frame, as they were checked. Written while the slot is over, read by the workers that
    /// copy the frame until all its descriptions are home.
    starts: Box<[UnsafeCell<Start>]>,
    /// Slots that are not over.
    out: u32,
    /// What came to be over, for the owner to take; and frames that somebody did not get.
    pub(super) over: Vec<Over>,
    no_room: u64,
    lies: u64,
    over_mtu: u64,
    /// Descriptions that are home.
    spare: Vec<Frame>,
    /// By where they go. One that is slow has this port wait; one that takes nothing soon gets hardly anything.
    lanes: Vec<Lane>,
    returned: Vec<Frame>,
    view: Arc<View>,
    version: u64,
    now_s: u32,
    /// Of this turn.
    last: LastRoute,
    tick: u32,
    timer: PollState,
    /// The eventfd, which others ring.
    eventfd: PollState,
    /// The queue leaves its worker once all is home.
    leaving: bool,
}

impl Sender {
    /// Of queue `index` of a port; with nothing to send.
    pub(super) fn new(plug: Arc<Plug>, index: u16) -> Self {
        let end = plug.port.ends[usize::from(index)].clone();
        Self {
            plug,
            index,
            end,
            slots: Box::default(),
            starts: Box::default(),
            out: 0,
            over: Vec::new(),
            no_room: 0,
            lies: 0,
            over_mtu: 0,
            spare: Vec::new(),
            lanes: Vec::new(),
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

    /// It has so many slots from now on. Only while none is on its way.
    pub(super) fn set_slots(&mut self, count: u16) {
        debug_assert!(self.out == 0);
        self.slots = (0..count).map(|_| Slot::default()).collect();
        self.starts = (0..count).map(|_| UnsafeCell::default()).collect();
    }

    pub(super) fn at_rest(&self) -> bool {
        self.out == 0 && self.timer == PollState::Off && self.eventfd == PollState::Off
    }

    /// A turn begins: who is there now, and what time it is.
    pub(super) fn look_around(&mut self) {
        let switch = &self.plug.switch;
        let version = switch.version();
        if version != self.version {
            (self.view, self.version) = (switch.view(), version);
        }
        self.now_s = switch.now_s();
        self.last = LastRoute::default();
    }

    /// Describes a frame for all its receivers, except ends that have `most` frames already. Its slot is not over until it is
    /// among [`over`](Self::over); on an error it never was on its way.
    ///
    /// The first bytes that are sent are those of the packet: a guest may change its memory after they were looked at. The rest
    /// is the memory that `pieces` adds to a description, without as many bytes as it is told; that may be none. It stays mapped
    /// until then.
    pub(super) fn send(
        &mut self,
        slot: u16,
        packet: &Packet<'_>,
        told: Told,
        most: u32,
        pieces: impl Fn(usize, &mut Vec<Piece>),
    ) -> Result<(), DropReason> {
        let Self {
            plug, end: home, lanes, spare, starts, view, now_s, last, tick, no_room, over_mtu, ..
        } = self;
        let (port, look) = (&*plug.port, &packet.look);
        let vlan = port.admit(packet, *now_s)?;
        let route = last.or_find(look, vlan, || plug.switch.route(view, port, look, vlan, *now_s))?;
        port.learn(look.hash, self.index, *now_s);
        // What nobody else writes to, and what leaves as it came, is sent from where it is.
        let copied = !(told.stable && vlan == NO_VLAN);
        let start = copied.then(|| {
            // SAFETY: the slot is over, so that no other worker reads there, and this worker alone has the sender.
            let start = unsafe { &mut *starts[usize::from(slot)].get() };
            start.set(packet.first, vlan);
            &*start
        });
        let (mut left, mut full) = (0, 0);
        let mut put = |to: &Port| -> Result<(), DropReason> {
            let form = to.accept(port, packet, vlan, *now_s)?;
            if start.is_some_and(|start| !start.has(form)) {
                return Err(DropReason::Vlan);
            }
            let end = to.end_of(look.hash, *now_s).ok_or(DropReason::NoReceiver)?;
            let at = lanes.iter().position(|lane| Arc::ptr_eq(&lane.end, end)).unwrap_or_else(|| {
                lanes.push(Lane { end: end.clone(), frames: Vec::new(), outstanding: 0, stuck: false });
                lanes.len() - 1
            });
            let lane = &mut lanes[at];
            if lane.outstanding >= if lane.stuck { STUCK_MAX.min(most) } else { most } {
                full += 1;
                return Ok(());
            }
            let mut frame = spare.pop().unwrap_or_else(|| Frame::at(home));
            (frame.slot, frame.lane, frame.tick) = (slot, at as u16, *tick);
            told.describe(&mut frame, start.map(|start| (start, form)));
            pieces(start.map_or(0, Start::taken), &mut frame.pieces);
            lane.frames.push(frame);
            lane.outstanding += 1;
            left += 1;
            Ok(())
        };
        match route {
            Route::Port(at) => view.port(at.into()).map_or(Err(DropReason::NoReceiver), |to| put(to))?,
            Route::All => {
                for to in view.all().filter(|to| to.index != port.index) {
                    // Those that are not for it do not count; those that it is too long for do.
                    *over_mtu += u64::from(put(to) == Err(DropReason::OverMtu));
                }
            }
            Route::Nowhere => {}
        }
        *no_room += full;
        match (left, full) {
            (0, 0) => return Err(DropReason::NoReceiver),
            (0, _) => self.over.push(Over { slot, taken: false }),
            _ => self.out += 1,
        }
        self.slots[usize::from(slot)] = Slot { left, taken: false, tick: *tick };
        Ok(())
    }

    /// Whether a frame that came in by an uplink is a probe of the switch, which ends here.
    #[inline]
    pub(super) fn is_probe(&self, first: &[u8]) -> bool {
        self.plug.switch.is_probe(&self.view, &self.plug.port, first, self.now_s)
    }

    /// Puts this turn's descriptions where they go.
    pub(super) fn deliver(&mut self) {
        for lane in &mut self.lanes {
            if !lane.frames.is_empty() {
                lane.end.put(&mut lane.frames);
                // Those for which there was no room.
                self.returned.append(&mut lane.frames);
            }
        }
        self.reserve();
        // They stay listed while they are few, for their lists' memory.
        if self.lanes.len() > LANES_KEPT && self.out == 0 {
            self.lanes.clear();
        }
    }

    /// Takes the descriptions that came home.
    pub(super) fn come_home(&mut self) {
        if self.end.has_returns() {
            self.end.take_home(&mut self.returned);
            self.reserve();
        }
    }

    /// Looks at the descriptions that are home: slots without any on its way are over.
    fn reserve(&mut self) {
        for frame in self.returned.drain(..) {
            let slot = &mut self.slots[usize::from(frame.slot)];
            slot.left -= 1;
            let lane = &mut self.lanes[usize::from(frame.lane)];
            lane.outstanding -= 1;
            match frame.fate {
                Fate::Taken => (slot.taken, lane.stuck) = (true, false),
                Fate::NoRoom => self.no_room += 1,
                Fate::Lie => self.lies += 1,
            }
            if slot.left == 0 {
                self.out -= 1;
                self.over.push(Over { slot: frame.slot, taken: slot.taken });
            }
            self.spare.push(frame);
        }
    }

    /// Counts frames that somebody did not get, since the last time.
    pub(super) fn count_lost(&mut self, mut lost: impl FnMut(DropReason, u64)) {
        for (why, count) in [
            (DropReason::NoRoom, &mut self.no_room),
            (DropReason::BadHeader, &mut self.lies),
            (DropReason::OverMtu, &mut self.over_mtu),
        ] {
            if *count > 0 {
                lost(why, std::mem::take(count));
            }
        }
    }

    /// Attach: it can be signalled from now on.
    pub(super) fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.leaving = false;
        self.eventfd.begin(uring, self.end.as_raw_fd(), place.with(0, OP_BELL));
        self.watch(uring, place);
    }

    /// Sees to it that time passes while something is on its way.
    pub(super) fn watch(&mut self, uring: &mut Uring, place: Token) {
        if self.out > 0 {
            self.timer.begin_timeout(uring, &TICK, place.with(0, OP_TICK));
        }
    }

    /// Detach: fetches all that is on its way; what others are copying just now comes home by itself, or is fetched later.
    pub(super) fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.leaving = true;
        if self.out > 0 {
            self.revoke(self.tick.wrapping_add(1));
            self.reserve();
        }
        self.watch(uring, place);
        self.leave_once_home(uring, place);
    }

    /// An operation of its own is over, or has news. Whether it was one.
    pub(super) fn complete(&mut self, uring: &mut Uring, token: Token, more: bool) -> bool {
        match token.op {
            OP_BELL => {
                if !more && self.eventfd.ended().restarts() {
                    self.eventfd.begin(uring, self.end.as_raw_fd(), token);
                }
            }
            OP_TICK => self.ticked(uring, token),
            _ => return false,
        }
        if self.leaving {
            self.leave_once_home(uring, token);
        }
        true
    }

    /// Time passed: what was on its way for longer is fetched back, or all if the queue is leaving: another may have taken it
    /// and put it back since the last time.
    fn ticked(&mut self, uring: &mut Uring, place: Token) {
        self.timer.ended();
        self.tick = self.tick.wrapping_add(1);
        let limit = if self.leaving { self.tick } else { self.tick.wrapping_sub(1) };
        let is_old = |slot: &Slot| slot.left > 0 && (slot.tick.wrapping_sub(limit) as i32) < 0;
        if self.slots.iter().any(is_old) {
            let before = self.returned.len();
            self.revoke(limit);
            for frame in &self.returned[before..] {
                self.lanes[usize::from(frame.lane)].stuck = true;
            }
            self.reserve();
        }
        self.watch(uring, place);
    }

    /// Fetches what was sent before `tick` and was not taken yet.
    fn revoke(&mut self, tick: u32) {
        // Those that joined since cannot have any.
        for other in self.view.all().flat_map(|port| &port.ends) {
            other.revoke(&self.end, tick, &mut self.returned);
        }
    }

    /// Takes what came home, and rests once there is nothing to come.
    fn leave_once_home(&mut self, uring: &mut Uring, place: Token) {
        // Rung for from here on; what came before is looked at.
        self.end.sleep();
        self.come_home();
        if self.out == 0 {
            // No time has to pass any more.
            self.timer.end(uring, place.with(0, OP_TICK));
            self.eventfd.end(uring, place.with(0, OP_BELL));
        }
    }

    /// Whether it is to leave its worker.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// It left its worker.
    pub(super) fn left(&mut self) {
        self.leaving = false;
    }
}

/// What is told of a frame besides its bytes, as it came.
#[derive(Clone, Copy)]
pub(super) struct Told {
    pub(super) header: Header,
    pub(super) len: usize,
    /// Nobody changes its bytes before its slot is over: they are not a guest's.
    pub(super) stable: bool,
}

impl Told {
    /// Describes the frame as it begins with `start`, in one form, or as it came; the rest of its pieces is to be added.
    fn describe(&self, frame: &mut Frame, start: Option<(&Start, Form)>) {
        frame.fate = Fate::NoRoom;
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

/// A header as it is told to others: what it says of checksums that were found right is not for them to believe.
pub(super) fn told(header: Header) -> Header {
    Header { flags: header.flags & NEEDS_CSUM, ..header }
}
