//! A port: one export on a switch, with the rules for the frames that enter and leave by it. The
//! worker of the sending queue applies all rules, to its own copy of the frame's first bytes.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use vshunt_types::spec::{DropReason, PortState};

use super::flows::Flows;
use super::frame::Packet;
use super::macs::{Address, Learnt};
use super::port_queue::PortQueue;
use super::probe::Probe;
use super::vlan::{TagForm, VlanConfig};
use vshunt_tap::Tap;

/// Default limit of addresses that are learnt behind a guest's port.
pub const MACS_GUEST: u32 = 256;
/// Default limit behind an uplink. A network of the host may have many stations.
pub const MACS_UPLINK: u32 = 4096;
/// Seconds for which an uplink is blocked after a probe showed a loop. It allows for probes that
/// are lost.
pub(super) const BLOCK_S: u32 = 7;

/// Options of a port.
#[derive(Clone, Debug)]
pub struct PortOptions {
    /// The export's name.
    pub name: String,
    /// The export's address, which no other port may use.
    pub mac: Option<[u8; 6]>,
    /// Whether only frames from `mac` are taken.
    pub mac_filter: bool,
    /// Limit of addresses that are learnt.
    pub mac_limit: u32,
    /// Its VLANs.
    pub vlans: VlanConfig,
    /// Whether frames to other isolated ports are dropped.
    pub isolated: bool,
    /// Whether frames to 01:80:c2:00:00:00 to 0f pass, between ports with this option.
    pub reserved: bool,
    /// Bytes of the longest IP packet.
    pub mtu: u32,
    /// The tap of an uplink.
    pub tap: Option<Weak<Tap>>,
}

/// One export on a switch.
pub struct Port {
    /// Its number.
    pub index: u16,
    /// Its queue pairs.
    pub queues: Vec<Arc<PortQueue>>,
    /// The tap of an uplink. Weak, because senders keep ports for longer than the network exists.
    pub(super) tap: Option<Weak<Tap>>,
    pub(super) name: String,
    pub(super) mac: Option<Address>,
    pub(super) vlans: VlanConfig,
    pub(super) learnt: Learnt,
    mac_filter: bool,
    isolated: bool,
    reserved: bool,
    flows: Flows,
    // Used by any thread.
    mtu: AtomicU32,
    /// The time until which no frames enter or leave by it, in seconds of the switch. 0: it is not
    /// blocked.
    blocked_until_s: AtomicU32,
    /// How many times it was blocked.
    loops: AtomicU64,
    /// The uplink with which it makes a loop.
    loop_with: AtomicU16,
    /// Its loop probes.
    pub(super) probe: Probe,
}

impl Port {
    pub(super) fn new(index: u16, queues: Vec<Arc<PortQueue>>, options: PortOptions) -> Self {
        Self {
            index,
            queues,
            tap: options.tap,
            name: options.name,
            mac: options.mac.map(Address::new),
            vlans: options.vlans,
            learnt: Learnt::new(options.mac_limit),
            mac_filter: options.mac_filter,
            isolated: options.isolated,
            reserved: options.reserved,
            flows: Flows::new(),
            mtu: AtomicU32::new(options.mtu),
            blocked_until_s: AtomicU32::new(0),
            loops: AtomicU64::new(0),
            loop_with: AtomicU16::new(0),
            probe: Probe::new(),
        }
    }

    /// Returns the queue for a flow: the one on which the guest sends it, or one of the open ones
    /// by the flow's hash. `None`: no queue is open.
    pub fn queue_for(&self, hash: u32, now_s: u32) -> Option<&Arc<PortQueue>> {
        let learnt = self.flows.find(hash, now_s).and_then(|pair| self.queues.get(usize::from(pair)));
        if let Some(end) = learnt.filter(|end| end.is_open()) {
            return Some(end);
        }
        let open = self.queues.iter().filter(|end| end.is_open()).count();
        (open > 0).then(|| self.queues.iter().filter(|end| end.is_open()).nth(hash as usize % open))?
    }

    /// Records that the guest sent a flow on a pair.
    pub fn learn(&self, hash: u32, pair: u16, now_s: u32) {
        self.flows.learn(hash, pair, now_s);
    }

    /// Returns the export's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether it is an uplink.
    pub fn is_uplink(&self) -> bool {
        self.tap.is_some()
    }

    /// Returns whether only frames from the export's address enter.
    pub fn mac_filter(&self) -> bool {
        self.mac_filter
    }

    /// Returns the limit of addresses that are learnt.
    pub fn mac_limit(&self) -> u32 {
        self.learnt.limit()
    }

    /// Returns the bytes of the longest IP packet.
    pub fn mtu(&self) -> u32 {
        self.mtu.load(Relaxed)
    }

    /// Sets the MTU. This is allowed at any time.
    pub fn set_mtu(&self, mtu: u32) {
        self.mtu.store(mtu, Relaxed);
    }

    /// Returns the VLAN of a frame that enters by the port.
    ///
    /// # Errors
    /// The reason why the port drops the frame.
    #[inline]
    pub fn admit(&self, packet: &Packet<'_>, now_s: u32) -> Result<u16, DropReason> {
        let info = &packet.info;
        if self.is_blocked(now_s) {
            return Err(DropReason::Loop);
        }
        if !info.source.is_stations() {
            return Err(DropReason::BadSource);
        }
        if self.mac_filter && self.mac != Some(info.source) {
            return Err(DropReason::ForeignSource);
        }
        if info.destination.is_reserved() && !self.reserved {
            return Err(DropReason::Reserved);
        }
        // The kernel enforces a tap's MTU, and knows its changes at once.
        if !self.is_uplink() && packet.bytes > self.mtu() as usize {
            return Err(DropReason::OverMtu);
        }
        self.vlans.admits(packet.first).ok_or(DropReason::Vlan)
    }

    /// Returns the form in which a frame of a VLAN leaves by the port. It entered by the port
    /// `from`.
    ///
    /// # Errors
    /// The reason why it does not leave by the port.
    #[inline]
    pub fn accept(
        &self,
        from: &Self,
        packet: &Packet<'_>,
        vlan: u16,
        now_s: u32,
    ) -> Result<TagForm, DropReason> {
        let form = self.vlans.form(vlan).ok_or(DropReason::NoReceiver)?;
        if self.isolated && from.isolated {
            return Err(DropReason::Isolated);
        }
        if self.is_blocked(now_s) {
            return Err(DropReason::Loop);
        }
        if packet.info.destination.is_reserved() && !self.reserved {
            return Err(DropReason::Reserved);
        }
        match packet.bytes > self.mtu() as usize {
            true => Err(DropReason::OverMtu),
            false => Ok(form),
        }
    }

    /// Returns whether a frame can go from one of the two ports to the other.
    pub(super) fn can_reach(&self, other: &Self) -> bool {
        !(self.isolated && other.isolated) && self.vlans.shares_vlan(&other.vlans)
    }

    /// Returns whether no frames enter or leave by it, because it makes a loop.
    #[inline]
    pub fn is_blocked(&self, now_s: u32) -> bool {
        self.blocked_until_s.load(Relaxed) > now_s
    }

    /// Blocks the port, because a probe showed a loop with the uplink `with`. Returns whether it
    /// was not blocked before.
    pub(super) fn block(&self, with: u16, now_s: u32) -> bool {
        let fresh = !self.is_blocked(now_s);
        self.loop_with.store(with, Relaxed);
        self.blocked_until_s.store(now_s + BLOCK_S, Relaxed);
        if fresh {
            self.loops.fetch_add(1, Relaxed);
        }
        fresh
    }

    /// Returns how many times it was blocked because of a loop.
    pub fn loops(&self) -> u64 {
        self.loops.load(Relaxed)
    }

    /// Returns the number of the uplink with which it made the last loop.
    pub(super) fn loop_with(&self) -> u16 {
        self.loop_with.load(Relaxed)
    }

    /// Returns whether it forwards frames.
    pub fn state(&self, now_s: u32) -> PortState {
        match self.is_blocked(now_s) {
            true => PortState::Blocked,
            false => PortState::Forwarding,
        }
    }
}
