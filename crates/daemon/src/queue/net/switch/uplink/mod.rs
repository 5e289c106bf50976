//! A tap's queue that is an end of a switch: the port by which its guests reach what the host reaches.
//!
//! No virtqueue and no guest: frames are read into memory of ours and described to the other ports like a guest's
//! ([`from_tap`]), and those of other ports are written to the tap where their senders have them ([`to_tap`]).

mod from_tap;
mod to_tap;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vshunt_engine::{Queue, QueueStats, State, Token, Uring};
use vshunt_net::TapQueue;
use vshunt_types::spec::DropReason;

use self::from_tap::FromTap;
use self::to_tap::ToTap;
use super::sender::{OP_OWNER, Sender};
use super::{Plug, Takes};
use crate::queue::net::NetStats;
use crate::queue::net::tap_file::TapFile;

/// Operations of a token.
const OP_POLL: u8 = OP_OWNER;
const OP_READ: u8 = OP_OWNER + 1;
const OP_WRITE: u8 = OP_OWNER + 2;

/// What one end of an uplink is made of.
pub struct Parts {
    /// The tap's queue, which has headers of 12 bytes.
    pub tap: Arc<TapQueue>,
    /// The port of the switch.
    pub plug: Arc<Plug>,
    /// Which of its ends.
    pub index: u16,
    /// What the tap takes.
    pub takes: Takes,
    /// Counters.
    pub stats: Arc<QueueStats>,
    /// More of them: the tap is the guest.
    pub net: Arc<NetStats>,
    /// Told why, once the tap is gone.
    pub on_broken: Box<dyn Fn(&str) + Send>,
}

/// See the module.
pub struct UplinkPair {
    tap: Arc<TapQueue>,
    /// The tap, as the owning worker's ring knows it; none while it moves.
    file: Option<TapFile>,
    sender: Sender,
    from: FromTap,
    to: ToTap,
    broken: bool,
    on_broken: Box<dyn Fn(&str) + Send>,
    // Any thread's.
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
}

impl UplinkPair {
    /// One that moves frames once it is on a worker.
    pub fn new(parts: Parts) -> Self {
        let Parts { tap, plug, index, takes, stats, net, on_broken } = parts;
        let mut sender = Sender::new(plug, index);
        sender.set_slots(from_tap::SLOTS);
        Self {
            tap,
            file: None,
            sender,
            from: FromTap::new(),
            to: ToTap::new(takes),
            broken: false,
            on_broken,
            stats,
            net,
        }
    }

    /// Counts what is over. Returns how many frames.
    fn reserve(&mut self) -> u32 {
        let Self { sender, from, to, stats, net, .. } = self;
        let lost = |why, frames| {
            net.dropped(why, frames);
            QueueStats::add(&stats.errors, frames);
        };
        sender.count_lost(lost);
        for why in from.lost.drain(..).chain(to.lost.drain(..)) {
            lost(why, 1);
            QueueStats::add(&stats.requests, 1);
        }
        let (mut sent, mut bytes) = (0, 0);
        let over = sender.over.len() as u32;
        for over in sender.over.drain(..) {
            let len = from.free(over.slot);
            if over.taken {
                (sent, bytes) = (sent + 1, bytes + len as u64);
            }
        }
        QueueStats::add(&stats.requests, over.into());
        if sent > 0 {
            net.sent(sent, bytes);
            QueueStats::add(&stats.write_bytes, bytes);
        }
        stats.in_flight.store(from.in_flight() + to.in_flight(), Relaxed);
        over
    }

    /// The tap is gone: nothing more is taken, and others learn that nobody is there.
    #[cold]
    fn break_off(&mut self, e: &std::io::Error) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(&format!("its tap can no longer be read: {e}"));
        self.sender.end.close();
    }

    /// A batch of writes is over. Returns how many frames the tap took.
    fn wrote(&mut self) -> u32 {
        let (frames, bytes) = self.to.reserve();
        if frames > 0 {
            self.net.received(frames, bytes);
            QueueStats::add(&self.stats.requests, frames);
            QueueStats::add(&self.stats.read_bytes, bytes);
        }
        frames as u32
    }
}

impl Queue for UplinkPair {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.file.is_none() {
            self.file = Some(TapFile::know(uring, &self.tap));
        }
        self.from.looks.arm();
        self.sender.arm(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        // Those of one whose tap is gone, too.
        self.sender.come_home();
        self.reserve();
        let Some(file) = self.file.filter(|_| !self.broken) else { return 0 };
        let taken = self.to.take(uring, file, place.with(0, OP_WRITE), &self.sender.end, budget);
        self.from.take(uring, file, place.with(0, OP_READ), budget);
        self.sender.watch(uring, place);
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        let poll = (self.tap.as_raw_fd(), token.with(0, OP_POLL));
        let mut done = 0;
        match token.op {
            OP_READ => {
                if let Err(e) = self.from.complete(uring, token.slot, poll, result, &mut self.sender) {
                    self.break_off(&e);
                }
                if self.sender.is_leaving() {
                    // What was still read is on its way now, and is fetched like the rest.
                    self.sender.disarm(uring, token);
                }
                self.sender.watch(uring, token);
            }
            OP_WRITE => {
                if self.to.complete(token.slot, result) {
                    done = self.wrote();
                }
            }
            OP_POLL => self.from.looks.polled(uring, poll, result),
            _ => drop(self.sender.complete(uring, token, more)),
        }
        done + self.reserve()
    }

    /// Nobody is to be notified: an end rings whom it put a frame before.
    fn publish(&mut self) -> bool {
        false
    }

    fn has_work(&self) -> bool {
        let end = &self.sender.end;
        !self.broken && (self.to.has_work(end) || self.from.has_work()) || end.has_returns()
    }

    fn wake(&mut self) {
        self.sender.end.wake();
    }

    fn sleep(&mut self, _ring: &mut Uring, _place: Token, _after: u32) -> bool {
        self.sender.end.sleep();
        self.has_work()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.from.looks.disarm(uring, place.with(0, OP_POLL));
        self.sender.disarm(uring, place);
        self.reserve();
    }

    fn at_rest(&self) -> bool {
        self.sender.at_rest() && self.from.at_rest() && self.to.in_flight() == 0
    }

    fn leave(&mut self, uring: &mut Uring) {
        self.sender.left();
        if self.file.take().is_some() {
            TapFile::forget(uring, &self.tap);
        }
    }
}

impl Drop for UplinkPair {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "an uplink dropped with frames on their way");
        self.net.dropped(DropReason::Detached, self.to.held());
    }
}
