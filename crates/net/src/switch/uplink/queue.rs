//! A queue of a tap as a queue of a switch's port.
//!
//! It has no virtqueue and no guest. Frames are read into memory of the daemon and sent like a
//! guest's ([`FromTap`]). Frames of other ports are written to the tap from their senders' memory
//! ([`ToTap`]).

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vshunt_engine::{Queue, QueueStats, State, Token, Uring};
use vshunt_types::spec::DropReason;

use super::from_tap::{FromTap, SLOTS};
use super::to_tap::ToTap;
use crate::counters::NetStats;
use crate::switch::offload::AcceptedOffloads;
use crate::switch::port_guard::PortGuard;
use crate::switch::sender::{Finished, OP_OWNER, Sender};
use crate::tap_file::TapFile;
use vshunt_tap::TapQueue;

/// Operations of a token.
const OP_POLL: u8 = OP_OWNER;
const OP_READ: u8 = OP_OWNER + 1;
const OP_WRITE: u8 = OP_OWNER + 2;

/// The parts of an uplink's queue.
pub(super) struct UplinkParts {
    /// The tap's queue, which has headers of 12 bytes.
    pub(super) tap: Arc<TapQueue>,
    /// The port of the switch.
    pub(super) guard: Arc<PortGuard>,
    /// The number of the queue in its port.
    pub(super) index: u16,
    /// The offload work that the tap does itself.
    pub(super) accepted: AcceptedOffloads,
    /// Counters.
    pub(super) stats: Arc<QueueStats>,
    /// Network counters. The tap is counted as the guest.
    pub(super) net: Arc<NetStats>,
    /// Called with the reason once the tap is gone.
    pub(super) on_broken: Box<dyn Fn(&str) + Send>,
}

/// See the module.
#[repr(align(128))]
pub(super) struct UplinkQueue {
    tap: Arc<TapQueue>,
    /// The tap as a file of the owning worker's io_uring. `None` while the queue is on no worker.
    file: Option<TapFile>,
    sender: Sender,
    from: FromTap,
    to: ToTap,
    broken: bool,
    on_broken: Box<dyn Fn(&str) + Send>,
    // Used by any thread.
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
}

impl UplinkQueue {
    /// Makes a queue that is on no worker.
    pub(super) fn new(parts: UplinkParts) -> Self {
        let UplinkParts { tap, guard, index, accepted, stats, net, on_broken } = parts;
        let mut sender = Sender::new(guard, index);
        sender.set_slots(SLOTS);
        Self {
            tap,
            file: None,
            sender,
            from: FromTap::new(),
            to: ToTap::new(accepted),
            broken: false,
            on_broken,
            stats,
            net,
        }
    }

    /// Counts the finished frames. Returns their number.
    fn reap(&mut self) -> u32 {
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
        let finished = crate::slots::number(sender.finished.len());
        for Finished { slot, taken } in sender.finished.drain(..) {
            let len = from.free(slot);
            if taken {
                (sent, bytes) = (sent + 1, bytes + len as u64);
            }
        }
        QueueStats::add(&stats.requests, finished.into());
        if sent > 0 {
            net.sent(sent, bytes);
            QueueStats::add(&stats.write_bytes, bytes);
        }
        stats.in_flight.store(from.in_flight() + to.in_flight(), Relaxed);
        finished.into()
    }

    /// Handles the loss of the tap: nothing more is read, and senders find the port queue closed.
    #[cold]
    fn mark_broken(&mut self, e: &std::io::Error) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(&format!("its tap can no longer be read: {e}"));
        self.sender.queue.close();
    }

    /// Counts a finished batch of writes. Returns the number of frames that the tap took.
    fn wrote(&mut self) -> u32 {
        let (frames, bytes) = self.to.finish_batch();
        if frames > 0 {
            self.net.received(frames, bytes);
            QueueStats::add(&self.stats.requests, frames);
            QueueStats::add(&self.stats.read_bytes, bytes);
        }
        u32::try_from(frames).unwrap_or(u32::MAX)
    }
}

impl Queue for UplinkQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        if self.file.is_none() {
            self.file = Some(TapFile::register(uring, &self.tap));
        }
        self.from.rx_poll.arm();
        self.sender.arm(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        // This is also done if the tap is gone.
        self.sender.reap_returns();
        self.reap();
        let Some(file) = self.file.filter(|_| !self.broken) else { return 0 };
        let taken = self.to.take(uring, file, place.with(0, OP_WRITE), &self.sender.queue, budget);
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
                    self.mark_broken(&e);
                }
                if self.sender.is_leaving() {
                    // The frames of this batch are in flight now and are revoked like the others.
                    self.sender.disarm(uring, token);
                }
                self.sender.watch(uring, token);
            }
            OP_WRITE => {
                if self.to.complete(token.slot, result) {
                    done = self.wrote();
                }
            }
            OP_POLL => self.from.rx_poll.polled(uring, poll, result),
            _ => drop(self.sender.complete(uring, token, more)),
        }
        done + self.reap()
    }

    /// A port queue signals its worker itself when a frame is put into it.
    fn publish(&mut self) -> bool {
        false
    }

    fn has_work(&self) -> bool {
        let queue = &self.sender.queue;
        !self.broken && (self.to.has_work(queue) || self.from.has_work()) || queue.has_returns()
    }

    fn wake(&mut self) {
        self.sender.queue.wake();
    }

    fn sleep(&mut self, _: &mut Uring, _: Token, _: u32) -> bool {
        self.sender.queue.sleep();
        self.has_work()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.from.rx_poll.disarm(uring, place.with(0, OP_POLL));
        self.sender.disarm(uring, place);
        self.reap();
    }

    fn at_rest(&self) -> bool {
        self.sender.at_rest() && self.from.at_rest() && self.to.in_flight() == 0
    }

    fn leave(&mut self, uring: &mut Uring) {
        self.sender.left();
        if self.file.take().is_some() {
            TapFile::unregister(uring, &self.tap);
        }
    }
}

impl Drop for UplinkQueue {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "an uplink dropped with frames in flight");
        self.net.dropped(DropReason::Detached, self.to.held());
    }
}
