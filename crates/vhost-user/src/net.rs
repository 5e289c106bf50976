//! virtio-net behind a socket: features, configuration space, announcements (Virtio 1.3, section
//! 5.1).
//!
//! Most front ends serve the control virtqueue themselves, and enable the active queue pairs by
//! SET_VRING_ENABLE. For the others, [`control`] serves it: a pair gets frames while its receive
//! ring runs and the pair is active.

mod control;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vhost::vhost_user::VhostUserProtocolFeatures;
use virtio::features::{
    VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, bit,
};
use virtio::net::*;
use vshunt_engine::{LimitCell, Queue, QueueSet};
use vshunt_net::control::ControlQueue;
use vshunt_net::negotiated::{self, GUEST_OFFLOADS};
use vshunt_net::switch::{PortGuard, SwitchPair};
use vshunt_net::tap_pair::TapPair;
use vshunt_net::{NetStats, PAIR_RINGS, PairLimits};
use vshunt_sandbox::ThreadKind;
use vshunt_tap::{MTU_DEFAULT, Tap, TapQueue, check_mtu};
use vshunt_types::spec::{DropReason, NetQueueCounters, PortInfo};
use vshunt_virtqueue::{FrameFormat, RingParts, owner};

use self::control::Control;
use super::memory::Notes;
use super::{ConfigChange, Device, NetworkDevice, RingPlace};
use vshunt_types::convert::{copy_start, len_u16, low_u8, low_u16};

/// Number of the receive ring in its pair.
const RECEIVE: u16 = 0;
/// EtherType of RARP.
const ETH_RARP: u16 = 0x8035;
/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;

/// Names of the features of a network device.
const NAMES: &[(u32, &str)] = &[
    (VIRTIO_NET_F_CSUM, "CSUM"),
    (VIRTIO_NET_F_GUEST_CSUM, "GUEST_CSUM"),
    (VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, "CTRL_GUEST_OFFLOADS"),
    (VIRTIO_NET_F_MTU, "MTU"),
    (VIRTIO_NET_F_MAC, "MAC"),
    (VIRTIO_NET_F_GUEST_TSO4, "GUEST_TSO4"),
    (VIRTIO_NET_F_GUEST_TSO6, "GUEST_TSO6"),
    (VIRTIO_NET_F_GUEST_ECN, "GUEST_ECN"),
    (VIRTIO_NET_F_GUEST_UFO, "GUEST_UFO"),
    (VIRTIO_NET_F_HOST_TSO4, "HOST_TSO4"),
    (VIRTIO_NET_F_HOST_TSO6, "HOST_TSO6"),
    (VIRTIO_NET_F_HOST_ECN, "HOST_ECN"),
    (VIRTIO_NET_F_HOST_UFO, "HOST_UFO"),
    (VIRTIO_NET_F_MRG_RXBUF, "MRG_RXBUF"),
    (VIRTIO_NET_F_STATUS, "STATUS"),
    (VIRTIO_NET_F_CTRL_VQ, "CTRL_VQ"),
    (VIRTIO_NET_F_GUEST_ANNOUNCE, "GUEST_ANNOUNCE"),
    (VIRTIO_NET_F_MQ, "MQ"),
    (VIRTIO_NET_F_GUEST_USO4, "GUEST_USO4"),
    (VIRTIO_NET_F_GUEST_USO6, "GUEST_USO6"),
    (VIRTIO_NET_F_HOST_USO, "HOST_USO"),
];

/// Features of rings and buffers that workers of this process serve.
const RINGS_SERVED: u64 = bit(VIRTIO_NET_F_MRG_RXBUF)
    | bit(VIRTIO_RING_F_INDIRECT_DESC)
    | bit(VIRTIO_RING_F_EVENT_IDX)
    | bit(VIRTIO_F_VERSION_1)
    | bit(VIRTIO_F_RING_PACKED);

/// What a network device is connected to.
enum NetBackend {
    /// A tap. The kernel serves the rings, with these features.
    Kernel(Arc<Tap>, u64),
    /// A tap, with one queue for each pair.
    Tap(Arc<Tap>, Vec<Arc<TapQueue>>),
    /// A port of a switch.
    Switch(Arc<PortGuard>),
}

/// What was negotiated with the guest.
#[derive(Clone, Copy)]
struct Agreed {
    format: FrameFormat,
    features: u64,
}

/// A virtio-net device.
pub struct NetDevice {
    name: String,
    backend: NetBackend,
    mac: Option<[u8; MAC_BYTES]>,
    /// Bytes of the longest IP packet, for a tap whose MTU cannot be read.
    mtu: AtomicU32,
    /// The MTU of the export on a switch, which a front end may not exceed.
    mtu_max: Option<u32>,
    pairs: u16,
    /// Counters of each pair that workers of this process serve.
    stats: Vec<Arc<NetStats>>,
    /// Guards nothing else.
    agreed: Mutex<Agreed>,
    /// Offloads that the guest accepts now, as feature bits.
    takes: Arc<AtomicU64>,
    /// The control queue, if workers of this process serve the device.
    control: Option<Control>,
    /// The limits of the export.
    limits: Arc<LimitCell>,
}

/// Returns whether a device of `pairs` queue pairs, which workers of this process serve, has a
/// control queue. Messages have one byte for the index of a virtqueue.
pub fn has_control(pairs: u16) -> bool {
    PAIR_RINGS * pairs <= u8::MAX.into()
}

impl NetDevice {
    /// Makes a device of `pairs` queue pairs that the kernel serves. The kernel has the features
    /// `served`.
    pub fn of_kernel(
        name: &str,
        tap: Arc<Tap>,
        pairs: u16,
        mac: Option<[u8; MAC_BYTES]>,
        served: u64,
    ) -> Self {
        Self::make(name, NetBackend::Kernel(tap, served), pairs, mac)
    }

    /// Lets the frames of its queue pairs wait for `limits`.
    #[must_use]
    pub fn limited(self, limits: Arc<LimitCell>) -> Self {
        Self { limits, ..self }
    }

    /// Makes a device that workers of this process serve, with a queue pair for each queue of the
    /// tap.
    ///
    /// # Errors
    /// The kernel has no eventfd for the control queue.
    pub fn of_tap(
        name: &str,
        tap: Arc<Tap>,
        queues: Vec<Arc<TapQueue>>,
        set: Arc<QueueSet>,
        mac: Option<[u8; MAC_BYTES]>,
    ) -> io::Result<Self> {
        let pairs = len_u16(queues.len());
        Self::make(name, NetBackend::Tap(tap, queues), pairs, mac).controlled(set)
    }

    /// Makes a device on a switch, with a queue pair for each queue of the port. A front end may
    /// not set an MTU above `mtu_max`.
    ///
    /// # Errors
    /// The kernel has no eventfd for the control queue.
    pub fn of_switch(
        name: &str,
        guard: PortGuard,
        set: Arc<QueueSet>,
        mac: Option<[u8; MAC_BYTES]>,
        mtu_max: Option<u32>,
    ) -> io::Result<Self> {
        let pairs = len_u16(guard.port.queues.len());
        let device = Self::make(name, NetBackend::Switch(Arc::new(guard)), pairs, mac);
        Self { mtu_max, ..device }.controlled(set)
    }

    fn make(name: &str, backend: NetBackend, pairs: u16, mac: Option<[u8; MAC_BYTES]>) -> Self {
        let stats = (0..pairs).map(|_| Arc::default()).collect();
        let format = FrameFormat { header: NET_HDR_LEGACY_BYTES, merge: false };
        let agreed = Mutex::new(Agreed { format, features: 0 });
        let mtu = AtomicU32::new(MTU_DEFAULT);
        let takes = Arc::default();
        let name = name.to_owned();
        Self {
            name,
            backend,
            mac,
            mtu,
            mtu_max: None,
            pairs,
            stats,
            agreed,
            takes,
            control: None,
            limits: Arc::default(),
        }
    }

    fn agreed(&self) -> Agreed {
        *self.agreed.locked()
    }

    /// Lets a pair receive frames.
    ///
    /// # Errors
    /// The queue of the tap cannot be attached.
    fn link(&self, pair: u16) -> Result<(), String> {
        match &self.backend {
            NetBackend::Kernel(..) => {}
            NetBackend::Tap(_, queues) => {
                let queue =
                    queues.get(usize::from(pair)).ok_or_else(|| format!("there is no pair {pair}"))?;
                queue.attach().map_err(|e| e.to_string())?;
            }
            NetBackend::Switch(guard) => {
                if let Some(queue) = guard.port.queues.get(usize::from(pair)) {
                    queue.open();
                }
            }
        }
        Ok(())
    }

    /// Stops a pair from receiving frames. Frames that wait for it are dropped.
    fn unlink(&self, pair: u16) {
        let pair = usize::from(pair);
        match &self.backend {
            NetBackend::Kernel(..) => {}
            NetBackend::Tap(_, queues) => {
                let (Some(stats), Some(queue)) = (self.stats.get(pair), queues.get(pair)) else { return };
                stats.dropped(DropReason::Detached, queue.discard());
                if let Err(e) = queue.detach() {
                    tracing::warn!("{}: {e}", self.name);
                }
            }
            NetBackend::Switch(guard) => {
                if let Some(queue) = guard.port.queues.get(pair) {
                    queue.close();
                }
            }
        }
    }
}

impl Device for NetDevice {
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::NetSession
    }

    fn features(&self) -> u64 {
        let (served, tap) = match &self.backend {
            NetBackend::Kernel(tap, served) => (*served, Some(tap)),
            NetBackend::Tap(tap, _) => (RINGS_SERVED, Some(tap)),
            NetBackend::Switch(_) => (RINGS_SERVED, None),
        };
        let mut features = served
            | bit(VIRTIO_NET_F_CSUM)
            | bit(VIRTIO_NET_F_GUEST_CSUM)
            | bit(VIRTIO_NET_F_MTU)
            | bit(VIRTIO_NET_F_GUEST_TSO4)
            | bit(VIRTIO_NET_F_GUEST_TSO6)
            | bit(VIRTIO_NET_F_GUEST_ECN)
            | bit(VIRTIO_NET_F_HOST_TSO4)
            | bit(VIRTIO_NET_F_HOST_TSO6)
            | bit(VIRTIO_NET_F_HOST_ECN)
            | bit(VIRTIO_NET_F_STATUS)
            | bit(VIRTIO_NET_F_GUEST_ANNOUNCE);
        if tap.is_some() {
            features |= bit(VIRTIO_NET_F_GUEST_UFO) | bit(VIRTIO_NET_F_HOST_UFO);
        }
        if tap.is_none_or(|tap| tap.has_uso()) {
            features |=
                bit(VIRTIO_NET_F_GUEST_USO4) | bit(VIRTIO_NET_F_GUEST_USO6) | bit(VIRTIO_NET_F_HOST_USO);
        }
        if self.control.is_some() {
            features |= bit(VIRTIO_NET_F_CTRL_VQ) | bit(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
        }
        if self.mac.is_some() {
            features |= bit(VIRTIO_NET_F_MAC);
        }
        if self.pairs > 1 {
            features |= bit(VIRTIO_NET_F_MQ);
        }
        features
    }

    fn protocol(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MTU | VhostUserProtocolFeatures::RARP
    }

    /// If the kernel serves the rings, it gets the features elsewhere, and sets up the tap.
    fn negotiated(&self, features: u64) -> Result<(), String> {
        let format = match &self.backend {
            NetBackend::Kernel(..) => return Ok(()),
            NetBackend::Tap(tap, _) => negotiated::agree(tap, features)?,
            NetBackend::Switch(_) => negotiated::format(features),
        };
        *self.agreed.locked() = Agreed { format, features };
        self.takes.store(features & GUEST_OFFLOADS, Relaxed);
        if let Some(control) = &self.control {
            control.forget();
        }
        Ok(())
    }

    /// An MTU that a former front end gave would have the switch drop frames of this one. A tap's
    /// MTU is the host's.
    fn connected(&self) {
        if let NetBackend::Switch(guard) = &self.backend {
            guard.port.set_mtu(self.mtu_max.unwrap_or(MTU_DEFAULT));
        }
    }

    fn reset(&self) {}

    fn feature_names(&self) -> &'static [(u32, &'static str)] {
        NAMES
    }

    fn config(&self) -> Vec<u8> {
        let config = NetConfig {
            mac: self.mac.unwrap_or_default(),
            status: VIRTIO_NET_S_LINK_UP,
            max_virtqueue_pairs: self.pairs,
            mtu: match &self.backend {
                NetBackend::Kernel(tap, _) | NetBackend::Tap(tap, _) => {
                    // The MTU of a tap in another network namespace cannot be read: the last known
                    // value is used.
                    let mtu = tap.mtu().unwrap_or_else(|_| self.mtu.load(Relaxed));
                    self.mtu.store(mtu, Relaxed);
                    low_u16(mtu.into())
                }
                NetBackend::Switch(guard) => low_u16(guard.port.mtu().into()),
            },
        };
        config.to_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<ConfigChange, String> {
        Err(format!(
            "the guest writes {} bytes at {offset} of the configuration space; nothing is writable",
            bytes.len()
        ))
    }

    fn settle(&self) -> Result<(), String> {
        Ok(())
    }

    fn resumed(&self) -> Result<(), String> {
        Ok(())
    }

    fn rings(&self) -> u16 {
        PAIR_RINGS * self.pairs + u16::from(self.control.is_some())
    }

    fn place(&self, ring: u16) -> Option<RingPlace> {
        let control =
            self.control.as_ref().and_then(|_| negotiated::control_ring(self.agreed().features, self.pairs));
        place(ring, self.pairs, control)
    }

    fn queue(&self, place: RingPlace, parts: RingParts, others: Option<Box<dyn Queue>>) -> Box<dyn Queue> {
        let format = self.agreed().format;
        let RingPlace { queue: index, nth } = place;
        if let (Some(control), true) = (&self.control, index == self.pairs) {
            return Box::new(ControlQueue::new(parts, control.pending()));
        }
        let make = || -> Box<dyn Queue> {
            let Some(net) = self.stats.get(usize::from(index)).cloned() else {
                unreachable!("`place` names pairs of this device only")
            };
            let (stats, limits) = (parts.stats.clone(), PairLimits::new(&self.limits, index));
            match &self.backend {
                NetBackend::Kernel(..) => unreachable!("the kernel has these rings"),
                NetBackend::Tap(_, queues) => {
                    let Some(queue) = queues.get(usize::from(index)).cloned() else {
                        unreachable!("a tap has a queue for each pair")
                    };
                    Box::new(TapPair::new(queue, limits, stats, net))
                }
                NetBackend::Switch(guard) => {
                    let accepted = self.takes.clone();
                    Box::new(SwitchPair::new(guard.clone(), index, accepted, limits, stats, net))
                }
            }
        };
        let mut queue = others.unwrap_or_else(make);
        let pair = owner(queue.as_mut()).and_then(|owner| owner.pair());
        pair.expect("all other queues of a network device are pairs").add(nth, parts, format);
        queue
    }

    fn network(&self) -> Option<&dyn NetworkDevice> {
        Some(self)
    }
}

/// Returns the place of a ring of a device with `pairs` queue pairs, whose control queue is ring
/// `control`.
fn place(ring: u16, pairs: u16, control: Option<u16>) -> Option<RingPlace> {
    if control == Some(ring) {
        return Some(RingPlace { queue: pairs, nth: 0 });
    }
    (ring < PAIR_RINGS * pairs).then_some(RingPlace { queue: ring / PAIR_RINGS, nth: ring % PAIR_RINGS })
}

impl NetworkDevice for NetDevice {
    fn set_mtu(&self, mtu: u64) -> Result<(), String> {
        let mtu = u32::try_from(mtu).unwrap_or(u32::MAX);
        match &self.backend {
            NetBackend::Kernel(tap, _) | NetBackend::Tap(tap, _) => tap.set_mtu(mtu),
            NetBackend::Switch(guard) => match self.mtu_max {
                Some(most) if mtu > most => {
                    return Err(format!(
                        "the front end asks for an MTU of {mtu}, and the export has mtu={most}"
                    ));
                }
                _ => check_mtu(mtu).map(|()| guard.port.set_mtu(mtu)),
            },
        }
        .map_err(|e| e.to_string())
    }

    fn announce(&self, mac: [u8; MAC_BYTES]) -> Result<(), String> {
        // Without the announcement, the network learns the place from the next frame of the guest.
        // So an error is only logged.
        let frame = rarp(mac);
        let told = match &self.backend {
            NetBackend::Kernel(tap, _) | NetBackend::Tap(tap, _) => tap.inject(&frame),
            NetBackend::Switch(guard) => guard.switch.announce(&guard.port, &frame),
        };
        if let Err(e) = told {
            tracing::warn!("{}: the guest's new place is not announced: {e}", self.name);
        }
        Ok(())
    }

    /// The tap sends frames to all attached queues. So a queue is attached only while its ring
    /// runs.
    fn ring_starts(&self, place: RingPlace, fresh: bool) -> Result<(), String> {
        let RingPlace { queue, nth } = place;
        match (&self.control, nth) {
            (Some(control), _) if queue == self.pairs => self.control_starts(control, fresh),
            (Some(control), RECEIVE) if !control.runs(queue, true) => Ok(()),
            (_, RECEIVE) => self.link(queue),
            _ => Ok(()),
        }
    }

    fn transmits(&self, place: RingPlace) -> bool {
        place.queue < self.pairs && place.nth != RECEIVE
    }

    fn ring_closed(&self, place: RingPlace) {
        if place.queue < self.pairs && place.nth == RECEIVE {
            if let Some(control) = &self.control {
                control.runs(place.queue, false);
            }
            self.unlink(place.queue);
        }
    }

    fn command_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(Control::eventfd)
    }

    fn run_command(&self) {
        if let Some(control) = &self.control {
            self.run_pending(control);
        }
    }

    fn takes_notes(&self) -> bool {
        self.agreed().features & bit(VIRTIO_NET_F_CTRL_VQ) != 0
    }

    fn set_notes(&self, notes: Option<Notes>) {
        if let Some(control) = &self.control
            && let Err(why) = self.noted(control, notes)
        {
            tracing::warn!(
                "{}: queue pairs or offloads that the guest set cannot be restored: {why}; restart the guest",
                self.name
            );
        }
    }

    fn counters(&self, index: u16) -> Option<NetQueueCounters> {
        match &self.backend {
            NetBackend::Kernel(..) => None,
            _ => self.stats.get(usize::from(index)).map(|stats| stats.counters()),
        }
    }

    fn port(&self) -> Option<PortInfo> {
        match &self.backend {
            NetBackend::Switch(guard) => Some(guard.info()),
            _ => None,
        }
    }
}

/// Returns a RARP request of `mac` for itself, from which bridges and switches learn its place (RFC
/// 903).
fn rarp(mac: [u8; MAC_BYTES]) -> [u8; FRAME_MIN] {
    const BROADCAST: [u8; MAC_BYTES] = [0xFF; MAC_BYTES];
    // Ethernet, IPv4, the lengths of their addresses, "request reverse".
    const REQUEST: [u8; 8] = [0, 1, 8, 0, low_u8(MAC_BYTES as u64), 4, 0, 3];
    // Sender and target have the same hardware address, and no IP address.
    let parts: [&[u8]; 7] = [&BROADCAST, &mac, &ETH_RARP.to_be_bytes(), &REQUEST, &mac, &[0; 4], &mac];
    let mut frame = [0; FRAME_MIN];
    copy_start(&mut frame, &parts.concat());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_queue_follows_the_pairs_that_the_guest_knows_of() {
        let (control, mq) = (bit(VIRTIO_NET_F_CTRL_VQ), bit(VIRTIO_NET_F_MQ));
        // Features; where rings 2, 7, 8 and 9 of 4 pairs are.
        for (features, want) in [
            (0, [Some((1, 0)), Some((3, 1)), None, None]),
            (mq, [Some((1, 0)), Some((3, 1)), None, None]),
            (mq | control, [Some((1, 0)), Some((3, 1)), Some((4, 0)), None]),
            (control, [Some((4, 0)), Some((3, 1)), None, None]),
        ] {
            let at = |ring| {
                place(ring, 4, negotiated::control_ring(features, 4)).map(|place| (place.queue, place.nth))
            };
            assert_eq!([2, 7, 8, 9].map(at), want, "{features:#x}");
        }
    }

    #[test]
    fn an_announcement_is_a_rarp_request() {
        let mac = [2, 3, 4, 5, 6, 7];
        let frame = rarp(mac);
        assert_eq!(frame[..12], [255, 255, 255, 255, 255, 255, 2, 3, 4, 5, 6, 7]);
        assert_eq!(frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac[..], &mac[..]));
        assert_eq!(frame[38..], [0; 22]);
    }
}
