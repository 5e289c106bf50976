//! A guest driver without a guest: connection, memory, virtqueues and block requests over
//! vhost-user.
//!
//! [`Disk`] has synchronous calls for tests. [`crate::load`] uses the same parts from many threads.
//! One thread owns the connection and everything that is set up. A [`Queue`] belongs to the thread
//! that drives it.

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

/// The kind of device that the driver expects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// A block device.
    #[default]
    Disk,
    /// A network device: queues are receive and transmit queues alternately.
    Net {
        /// Feature bits of the device that the driver takes.
        wanted: u64,
    },
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kind of device.
    pub class: Class,
    /// Queues to set up.
    pub queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Requires packed rings. It is an error if the device does not offer them.
    pub packed: bool,
    /// Takes indirect descriptors if they are offered.
    pub indirect: bool,
    /// Takes EVENT_IDX if it is offered.
    pub event_idx: bool,
    /// Descriptors of the indirect table that each slot has.
    pub indirect_cap: u16,
    /// Guest memory. Empty: one region that is large enough.
    pub regions: Vec<RegionSpec>,
    /// Bytes of guest memory for buffers, in addition to rings and slots. Used if `regions` is
    /// empty.
    pub buffer_bytes: u64,
    /// Limit for each answer, and for each request of the synchronous calls.
    pub timeout: Duration,
    /// Virtio feature bits that are refused if the device offers them.
    pub refuse_features: u64,
    /// Protocol feature bits that are refused if the device offers them.
    pub refuse_protocol: u64,
    /// After a reconnect, sends packed rings' bases as QEMU does: those of the last start, which
    /// are out of date.
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

/// Features of block devices that this driver supports.
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
    /// Returns the virtio feature bits that this driver supports and does not refuse.
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

/// A ring, and the position from which the server continues it.
#[derive(Clone, Copy, Debug)]
pub struct RingSetup<'a> {
    /// The ring.
    pub parts: &'a RingParts,
    /// Value for SET_VRING_BASE.
    pub base: u32,
}

impl Deref for RingSetup<'_> {
    type Target = RingParts;
    fn deref(&self) -> &RingParts {
        self.parts
    }
}

/// Returns the base of a new ring. Packed rings start with both wrap counters set.
pub fn fresh_base(packed: bool) -> u32 {
    if packed { packed_base(0, true) } else { 0 }
}
