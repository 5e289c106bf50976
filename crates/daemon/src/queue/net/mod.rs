//! A pair of virtqueues of a network card, and what its frames go through: a tap's queue ([`tap`]) or the switch ([`switch`]).
//!
//! One queue for two rings: both ends of a flow's packets stay together, on one worker. Each ring comes and goes as the guest
//! starts and stops it, while the queue is on no worker.

mod buffers;
pub mod control;
mod counters;
mod line;
mod looks;
mod rings;
pub mod switch;
pub mod tap;
mod tap_file;

use std::sync::Arc;

use virtio::log::DirtyLog;
use virtio::ring::UsedLog;
use vshunt_engine::EventFd;

pub use self::counters::NetStats;
use self::line::Line;
use super::{Parts, Vring};

/// Rings of a pair: the guest receives by the first and sends by the second (Virtio 1.3, 5.1.2).
pub const RINGS: u16 = 2;

/// Frames that a batch can have, each way.
const BATCH: u32 = 64;
/// Addresses and EtherType.
const ETH_HEADER_BYTES: usize = 14;
/// The longest frame: an IP packet of 64 KiB behind an Ethernet header with two VLAN tags.
const FRAME_MAX: usize = 65_535 + ETH_HEADER_BYTES + 2 * 4;

/// How frames lie in buffers, as the guest agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Bytes of the header before each frame: 10 or 12.
    pub header: usize,
    /// Whether a frame may fill several receive buffers.
    pub merge: bool,
}

/// A queue pair, for the frontend that starts and stops its rings. Only while it is on no worker, but where it says so.
pub trait Pair {
    /// A ring starts: `way` 0 to receive, 1 to send.
    fn add(&mut self, way: u16, parts: Parts, format: Format);
    /// A ring stops; `discard`: what the guest still has sent is dropped, not kept for later. Returns where it stands, and
    /// whether the other one is there.
    fn remove(&mut self, way: u16, discard: bool) -> (u32, bool);
    /// The guest does not use it for now: what waits for its receive buffers is dropped. On its worker, between turns.
    fn set_aside(&mut self);
    /// Whether one of its rings is broken.
    fn is_broken(&self) -> bool;
    /// The ring, for those who change it.
    fn ring(&mut self, way: u16) -> Option<&mut dyn Vring>;
}

impl Vring for Line {
    fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        Line::set_call(self, call);
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>) {
        Line::set_log(self, log, used);
    }

    fn allow_kicks(&mut self) {
        self.vring.allow_kicks();
    }
}
