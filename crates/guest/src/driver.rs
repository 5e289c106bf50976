//! A guest driver without a guest: connection, memory, virtqueues and block requests over vhost-user.
//!
//! [`Disk`] is the synchronous face for tests; [`crate::load`] takes the same parts and drives them from many threads.
//! The connection and everything that is set up belong to one thread; a [`Queue`] to whoever drives it.

mod channel;
mod config;
mod disk;
mod kernel;
mod layout;
mod log;
mod memory;
mod queue;
mod session;
mod transport;
mod wire;

use std::ops::Deref;
use std::time::Duration;

pub use self::channel::BackendChannel;
pub use self::config::{CONFIG_LEN, Config, NET_CONFIG_LEN, NetConfig, feature, request, status};
pub use self::disk::Disk;
pub(crate) use self::disk::status_name;
pub use self::kernel::{Kernel, KernelHandle, KernelOptions, LogSwitch, Workers};
pub(crate) use self::kernel::{kernel_region, kernel_vring_addr};
pub use self::layout::{Shuffle, Span};
pub use self::log::{DirtyLog, MissedPage};
pub use self::memory::{Area, DEFAULT_BASE, Memory, PAGE, Region, RegionSpec};
pub use self::queue::{Completion, FRAME_HEAD, Queue, QueueShape, RingParts};
pub use self::session::{InflightRegion, Session, packed_base, split_base};
pub use self::transport::{PollEvent, Transport};
pub use self::wire::{Code, Message, NEED_REPLY, Payload, REPLY, VERSION, Wire, protocol};
pub use virtio::driver::DriverSeg;

/// Bytes of a sector, the unit of every address in a block request.
pub const SECTOR: u64 = 512;

/// What kind of device is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// A block device.
    #[default]
    Disk,
    /// A network device: a receive and a transmit queue in turn.
    Net {
        /// Feature bits of the device that the driver takes.
        wanted: u64,
    },
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// What for.
    pub class: Class,
    /// Queues to set up.
    pub queues: u16,
    /// Descriptors a queue.
    pub queue_size: u16,
    /// Ask for packed rings; an error if they are not offered.
    pub packed: bool,
    /// Take indirect descriptors if offered.
    pub indirect: bool,
    /// Take EVENT_IDX if offered.
    pub event_idx: bool,
    /// Descriptors of the indirect table that each slot has.
    pub indirect_cap: u16,
    /// Guest memory; empty: one region that fits.
    pub regions: Vec<RegionSpec>,
    /// Bytes of guest memory for buffers, beside rings and slots, if `regions` is empty.
    pub buffer_bytes: u64,
    /// How long an answer, or a request of the synchronous calls, may take.
    pub timeout: Duration,
    /// Virtio feature bits to refuse although offered.
    pub refuse_features: u64,
    /// Protocol feature bits to refuse although offered.
    pub refuse_protocol: u64,
    /// After a reconnect tell packed rings' bases as QEMU does: those of the last start, long stale.
    pub stale_packed_base: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            class: Class::Disk,
            queues: 1,
            queue_size: 256,
            packed: false,
            indirect: true,
            event_idx: true,
            indirect_cap: 64,
            regions: Vec::new(),
            buffer_bytes: 16 << 20,
            timeout: Duration::from_secs(10),
            refuse_features: 0,
            refuse_protocol: 0,
            stale_packed_base: false,
        }
    }
}

/// The features of block devices that this driver understands.
const BLK_FEATURES: u64 = feature::BLK_SIZE_MAX
    | feature::BLK_SEG_MAX
    | feature::BLK_RO
    | feature::BLK_BLK_SIZE
    | feature::BLK_FLUSH
    | feature::BLK_TOPOLOGY
    | feature::BLK_CONFIG_WCE
    | feature::BLK_MQ
    | feature::BLK_DISCARD
    | feature::BLK_WRITE_ZEROES;

impl Options {
    /// The virtio feature bits that this driver understands and was not told to refuse.
    pub fn wanted_features(&self) -> u64 {
        let mut wanted = match self.class {
            Class::Disk => BLK_FEATURES,
            Class::Net { wanted } => wanted,
        };
        wanted |= feature::VERSION_1;
        if self.indirect {
            wanted |= feature::INDIRECT_DESC;
        }
        if self.event_idx {
            wanted |= feature::EVENT_IDX;
        }
        if self.packed {
            wanted |= feature::RING_PACKED;
        }
        wanted & !self.refuse_features
    }
}

/// A ring and where the server is to take it up.
#[derive(Clone, Copy, Debug)]
pub struct RingSetup<'a> {
    /// The ring.
    pub parts: &'a RingParts,
    /// As SET_VRING_BASE has it.
    pub base: u32,
}

impl Deref for RingSetup<'_> {
    type Target = RingParts;
    fn deref(&self) -> &RingParts {
        self.parts
    }
}

/// The base of a fresh ring: packed rings begin with both wrap counters set.
pub fn fresh_base(packed: bool) -> u32 {
    if packed { packed_base(0, true) } else { 0 }
}
