//! A network device on its guest's side: the connection, memory, and two queues for each pair.

use std::path::Path;
use std::sync::Arc;

use virtio::ring::RingFeatures;

use super::NetPlan;
use super::frame::LEN_PLAIN;
use crate::driver::{
    Area, Class, DEFAULT_BASE, Memory, NetConfig, Options, PAGE, Queue, QueueShape, RegionSpec, RingSetup,
    Session, Transport, feature, fresh_base, protocol,
};
use crate::error::{Result, fail};

/// Bytes of the header before each frame (virtio 1.3, 5.1.6).
pub(super) const HEADER: usize = 12;
/// Bytes of a receive buffer if a frame may fill several.
const MERGED_BYTES: usize = 2048;
/// The longest frame of a device with segmentation: IPv6's limit and headers.
const LONGEST: usize = 65550;

/// Offloads that a driver with `--offloads` takes. All of them need checksums.
const OFFLOADS: u64 = feature::NET_CSUM | feature::NET_GUEST_CSUM | feature::NET_HOST_USO;
/// Offloads that need buffers for long frames.
const LONG_FRAMES: u64 =
    feature::NET_GUEST_TSO4 | feature::NET_GUEST_TSO6 | feature::NET_GUEST_USO4 | feature::NET_GUEST_USO6;

/// One direction of a pair: a queue, and a buffer for each of its slots.
pub(super) struct Side {
    pub(super) queue: Queue,
    pub(super) buffers: Area,
    /// Bytes of each buffer.
    pub(super) each: usize,
}

impl Side {
    fn new(memory: &Arc<Memory>, index: u16, shape: QueueShape, each: usize) -> Result<Self> {
        let queue = Queue::new(memory, index, shape)?;
        let buffers = memory.alloc(usize::from(shape.size) * each, PAGE)?;
        // Faults the buffers in before time is measured.
        buffers.fill(0);
        Ok(Self { queue, buffers, each })
    }

    /// Returns the offset of a slot's buffer.
    #[inline]
    pub(super) fn at(&self, slot: u16) -> usize {
        usize::from(slot) * self.each
    }
}

/// A receive and a transmit queue.
pub(super) struct Pair {
    pub(super) rx: Side,
    pub(super) tx: Side,
}

/// A connected device.
pub struct NetDevice {
    pub(super) transport: Transport,
    pub(super) memory: Arc<Memory>,
    pub(super) pairs: Vec<Pair>,
}

impl NetDevice {
    /// Connects to a vhost-user socket, negotiates, and starts the queues.
    ///
    /// # Errors
    /// The socket cannot be reached, its server has no network device, or the device lacks a
    /// feature that the plan needs.
    pub fn connect(socket: &Path, plan: &NetPlan) -> Result<Self> {
        let options = options(plan);
        let session = Session::open(socket.to_path_buf(), &options)?;
        check(&session, plan)?;
        let features = session.features();
        let has = |bit: u64| features & bit != 0;
        let ring = RingFeatures {
            indirect: has(feature::INDIRECT_DESC),
            event_idx: has(feature::EVENT_IDX),
            packed: has(feature::RING_PACKED),
        };
        let shape = QueueShape { size: plan.queue_size, features: ring, indirect_cap: 2 };
        let longest = if has(LONG_FRAMES) { LONGEST } else { plan.sizes.max().max(LONG_MTU) };
        let rx_bytes = match has(feature::NET_MRG_RXBUF) {
            true => MERGED_BYTES,
            false => (HEADER + longest).next_multiple_of(64),
        };
        let sent = if plan.mode == super::Mode::Echo { longest } else { plan.sizes.max() };
        let tx_bytes = (HEADER + sent.max(LEN_PLAIN)).next_multiple_of(64);
        let buffers = usize::from(plan.queue_size) * (rx_bytes + tx_bytes);
        let a_pair = 2 * shape.memory() + buffers as u64 + 2 * PAGE;
        let size = (a_pair * u64::from(plan.pairs)).next_multiple_of(2 << 20);
        let memory = Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size }])?;
        let pair = |k: u16| {
            let rx = Side::new(&memory, 2 * k, shape, rx_bytes)?;
            Ok(Pair { rx, tx: Side::new(&memory, 2 * k + 1, shape, tx_bytes)? })
        };
        let pairs = (0..plan.pairs).map(pair).collect::<Result<Vec<_>>>()?;
        let mut device = Self { transport: Transport::Socket(Box::new(session)), memory, pairs };
        let base = fresh_base(ring.packed);
        let queues = device.pairs.iter().flat_map(|pair| [&pair.rx.queue, &pair.tx.queue]);
        let rings: Vec<_> = queues.map(|queue| RingSetup { parts: queue.parts(), base }).collect();
        device.transport.start(&device.memory, &rings)?;
        Ok(device)
    }

    /// Returns whether a feature was negotiated.
    pub fn has(&self, bit: u64) -> bool {
        self.transport.features() & bit != 0
    }
}

/// The longest frame at an MTU of 9000, the usual large MTU.
const LONG_MTU: usize = 9000 + 14;

fn options(plan: &NetPlan) -> Options {
    let mut wanted = feature::NET_MQ | feature::NET_MAC | feature::NET_STATUS | feature::NET_MTU;
    if plan.merge {
        wanted |= feature::NET_MRG_RXBUF;
    }
    if plan.offloads {
        wanted |= OFFLOADS | LONG_FRAMES;
    }
    Options {
        class: Class::Net { wanted },
        queues: 2 * plan.pairs,
        queue_size: plan.queue_size,
        packed: plan.packed,
        indirect: plan.indirect,
        event_idx: plan.event_idx,
        timeout: plan.timeout,
        ..Options::default()
    }
}

/// Checks that the device supports the plan.
fn check(session: &Session, plan: &NetPlan) -> Result<()> {
    let told = session.device().copied().unwrap_or(NetConfig::default()).pairs;
    let has = |bit: u64| session.features() & bit != 0;
    // Some servers count rings in GET_QUEUE_NUM, and others count pairs.
    let most = match told {
        0 => session.max_queues(),
        pairs => pairs.min(session.max_queues()),
    };
    if plan.pairs > 1 && (!has(feature::NET_MQ) || plan.pairs > most) {
        let most = if has(feature::NET_MQ) { most } else { 1 };
        return Err(fail!(
            Usage,
            "{} queue pairs were asked for, the server has {most}: use --queues 1 to {most}",
            plan.pairs
        ));
    }
    if plan.merge && !has(feature::NET_MRG_RXBUF) {
        return Err(fail!(Usage, "the server does not offer VIRTIO_NET_F_MRG_RXBUF: give --no-mrg"));
    }
    if plan.offloads && !has(feature::NET_CSUM) {
        return Err(fail!(Usage, "the server does not offer VIRTIO_NET_F_CSUM: leave --offloads out"));
    }
    // The server overwrites a packed ring's descriptors. Only the in-flight region keeps those that
    // it had taken.
    if plan.reconnect.is_some() && plan.packed && session.protocol() & protocol::INFLIGHT_SHMFD == 0 {
        return Err(fail!(
            Usage,
            "--reconnect with packed rings needs an in-flight region (INFLIGHT_SHMFD), which this server does not \
             offer"
        ));
    }
    if !plan.queue_size.is_power_of_two() && !plan.packed {
        return Err(fail!(Usage, "a split ring's size is a power of two, not {}", plan.queue_size));
    }
    if usize::from(plan.batch) > usize::from(plan.queue_size) || plan.batch == 0 {
        return Err(fail!(
            Usage,
            "--batch {} frames in rings of {} descriptors: use --batch 1 to {1}, or a larger --queue-size",
            plan.batch,
            plan.queue_size
        ));
    }
    Ok(())
}
