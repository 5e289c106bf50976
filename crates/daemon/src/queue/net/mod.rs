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
use vshunt_virtqueue::Vring;

pub use self::counters::NetStats;
use self::line::Line;

/// Rings of a pair: the guest receives by the first and sends by the second (Virtio 1.3, 5.1.2).
pub const RINGS: u16 = 2;

/// Frames that a batch can have, each way.
const BATCH: u32 = 64;
/// Addresses and EtherType.
const ETH_HEADER_BYTES: usize = 14;
/// The longest frame: an IP packet of 64 KiB behind an Ethernet header with two VLAN tags.
const FRAME_MAX: usize = 65_535 + ETH_HEADER_BYTES + 2 * 4;

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
