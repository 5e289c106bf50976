//! A queue pair on a switch: frames go from guest to guest, memory to memory, with one copy.
//!
//! A frame sent is described, and the description put before the end that it goes to ([`sender`]); the worker that has that
//! end copies the bytes ([`rx`]) and sends the description home, by which the request is over ([`tx`]). Another worker may be
//! copying from this guest's memory, so the pair is not at rest before all descriptions are home; those that nobody takes are
//! fetched back when the pair leaves, and after a while in any case, so that a guest that takes nothing holds nobody up.
//!
//! A tap is a port like a guest ([`uplink`]): its frames are described where they were read.

mod offload;
mod rx;
mod sender;
mod tx;
pub mod uplink;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_engine::{Queue, QueueStats, Token, Uring};
use vshunt_net::Switch;
use vshunt_net::switch::Port;
use vshunt_types::spec::PortInfo;
use vshunt_virtqueue::{FrameFormat, QueuePair, RingParts, VirtqueueOwner, Vring};

pub use self::offload::Takes;
use self::rx::Rx;
use self::sender::Sender;
use self::tx::Tx;
use super::NetStats;
use super::buffers::Buffers;
use super::line::Line;
use super::rings::Rings;

/// A port of a switch.
pub struct Plug {
    /// The switch.
    pub switch: Arc<Switch>,
    /// The port.
    pub port: Arc<Port>,
}

impl Plug {
    /// The port as it is.
    pub fn info(&self) -> PortInfo {
        let Self { switch, port } = self;
        PortInfo {
            number: port.index,
            state: port.state(switch.now_s()),
            mac_filter: port.mac_filter(),
            addresses: switch.addresses_of(port),
            mac_limit: port.mac_limit(),
            mtu: port.mtu(),
            loops: port.loops(),
        }
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        self.switch.leave(self.port.index);
    }
}

/// See the module.
pub struct SwitchPair {
    rings: Rings<Rx, Tx>,
    sender: Sender,
    /// What this guest takes, as features; its front-end may change it at any time.
    takes: Arc<AtomicU64>,
    // Any thread's.
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
}

impl SwitchPair {
    /// Pair `index` of a port, without rings.
    pub fn new(
        plug: Arc<Plug>,
        index: u16,
        takes: Arc<AtomicU64>,
        stats: Arc<QueueStats>,
        net: Arc<NetStats>,
    ) -> Self {
        Self { rings: Rings::new(), sender: Sender::new(plug, index), takes, stats, net }
    }

    /// Ends the requests that are over. Returns how many.
    fn reserve(&mut self) -> u32 {
        let done = self.rings.tx.as_mut().map_or(0, |tx| tx.reserve(&mut self.sender));
        self.stats.in_flight.store(self.rings.tx.as_ref().map_or(0, Tx::in_flight), Relaxed);
        done
    }
}

impl VirtqueueOwner for SwitchPair {
    fn ring(&mut self, way: u16) -> Option<&mut dyn Vring> {
        self.rings.ring(way)
    }

    fn remove(&mut self, way: u16, discard: bool) -> (u32, bool) {
        self.rings.remove(way, discard)
    }

    fn is_broken(&self) -> bool {
        self.rings.is_broken()
    }

    fn pair(&mut self) -> Option<&mut dyn QueuePair> {
        Some(self)
    }
}

impl QueuePair for SwitchPair {
    fn add(&mut self, way: u16, parts: RingParts, format: FrameFormat) {
        let line = Line::new(parts, self.net.clone());
        match way {
            0 => self.rings.rx = Some(Rx::new(Buffers::new(line, format), self.takes.clone())),
            _ => {
                self.sender.set_slots(line.vring.size());
                self.rings.tx = Some(Tx::new(line, format.header));
            }
        }
    }

    /// The frames that wait belong to their senders (the pair's port queue is closed), except for pieces of a frame.
    fn set_aside(&mut self) {
        if let Some(rx) = &mut self.rings.rx {
            rx.drop_pieces();
        }
    }
}

impl Queue for SwitchPair {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.rings.arm(uring, place);
        self.sender.arm(uring, place);
    }

    fn take(&mut self, uring: &mut Uring, place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        if let Some(rx) = &mut self.rings.rx {
            let end = &self.sender.end;
            taken += rx.take(end, budget);
            if rx.to.line.broken && end.is_open() {
                end.close();
            }
        }
        if let Some(tx) = &mut self.rings.tx {
            self.sender.come_home();
            tx.reserve(&mut self.sender);
            taken += tx.take(&mut self.sender, budget);
            self.sender.watch(uring, place);
        }
        self.reserve();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if !self.sender.complete(uring, token, more) {
            self.rings.kicked(uring, token, result, more);
        }
        self.reserve()
    }

    fn publish(&mut self) -> bool {
        self.rings.publish()
    }

    fn has_work(&self) -> bool {
        let end = &self.sender.end;
        // An end that was opened again is to be closed.
        let open = |rx: &Rx| rx.to.line.broken && end.is_open();
        self.rings.rx.as_ref().is_some_and(|rx| rx.has_work(end) || open(rx))
            || self.rings.tx.as_ref().is_some_and(|tx| end.has_returns() || tx.has_work())
    }

    fn wake(&mut self) {
        self.sender.end.wake();
        self.rings.wake();
    }

    fn sleep(&mut self, _ring: &mut Uring, _place: Token, after: u32) -> bool {
        let end = &self.sender.end;
        end.sleep();
        // Both, whatever the first one says.
        let rx = self.rings.rx.as_mut().is_some_and(|rx| rx.sleep(end));
        let tx = self.rings.tx.as_mut().is_some_and(|tx| tx.sleep(after) || end.has_returns());
        rx || tx
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.rings.disarm(uring, place);
        self.sender.disarm(uring, place);
        self.reserve();
    }

    fn at_rest(&self) -> bool {
        self.sender.at_rest()
            && self.rings.rx.as_ref().is_none_or(|rx| rx.to.line.at_rest())
            && self.rings.tx.as_ref().is_none_or(|tx| tx.line.at_rest())
    }

    fn leave(&mut self, _ring: &mut Uring) {
        self.sender.left();
    }

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

impl Drop for SwitchPair {
    fn drop(&mut self) {
        debug_assert!(self.at_rest(), "a queue pair dropped with frames on their way");
    }
}
