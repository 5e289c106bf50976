//! A port: one export on a switch, with the rules for what it takes and gives. All of them are applied by the worker of the
//! sending queue, to its own copy of the frame's first bytes.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use vshunt_types::spec::{DropReason, PortState};

use super::End;
use super::flows::Flows;
use super::frame::Packet;
use super::macs::{Address, Learnt};
use super::probe::Probe;
use super::vlan::{Form, Lan};
use crate::Tap;

/// Addresses that are learnt behind a guest's port at most, if nothing is said.
pub const MACS_GUEST: u32 = 256;
/// Those behind an uplink: a network of the host may have many stations.
pub const MACS_UPLINK: u32 = 4096;
/// Seconds that an uplink is blocked for after a probe showed a loop: some probes may be lost.
pub(super) const BLOCK_S: u32 = 7;

/// What a port is to be.
#[derive(Clone, Debug)]
pub struct PortOptions {
    /// The export's name.
    pub name: String,
    /// The export's address, which no other port may use.
    pub mac: Option<[u8; 6]>,
    /// Only frames from `mac` are taken.
    pub mac_filter: bool,
    /// Addresses that are learnt at most.
    pub mac_limit: u32,
    /// Its VLANs.
    pub lan: Lan,
    /// No frames go between it and other isolated ports.
    pub isolated: bool,
    /// Frames to 01:80:c2:00:00:00 to 0f pass, between ports that say so.
    pub reserved: bool,
    /// Bytes of the longest IP packet.
    pub mtu: u32,
    /// Of an uplink: where it leads.
    pub tap: Option<Weak<Tap>>,
}

/// One export on a switch.
pub struct Port {
    /// Its number.
    pub index: u16,
    /// Its queue pairs.
    pub ends: Vec<Arc<End>>,
    /// Of an uplink: where it leads, for as long as the network is there. Senders keep ports for longer.
    pub(super) tap: Option<Weak<Tap>>,
    pub(super) name: String,
    pub(super) mac: Option<Address>,
    pub(super) lan: Lan,
    pub(super) learnt: Learnt,
    mac_filter: bool,
    isolated: bool,
    reserved: bool,
    flows: Flows,
    // Any thread's.
    mtu: AtomicU32,
    /// Until when it takes and gives nothing, in seconds of the switch; 0: it is not blocked.
    blocked_until_s: AtomicU32,
    /// Times that it was blocked.
    loops: AtomicU64,
    /// The uplink with which it makes a loop.
    loop_with: AtomicU32,
    /// Of its own loop probes.
    pub(super) probe: Probe,
}

impl Port {
    pub(super) fn new(index: u16, ends: Vec<Arc<End>>, options: PortOptions) -> Self {
        Self {
            index,
            ends,
            tap: options.tap,
            name: options.name,
            mac: options.mac.map(Address::new),
            lan: options.lan,
            learnt: Learnt::new(options.mac_limit),
            mac_filter: options.mac_filter,
            isolated: options.isolated,
            reserved: options.reserved,
            flows: Flows::new(),
            mtu: AtomicU32::new(options.mtu),
            blocked_until_s: AtomicU32::new(0),
            loops: AtomicU64::new(0),
            loop_with: AtomicU32::new(0),
            probe: Probe::new(),
        }
    }

    /// The end for a flow: where the guest sends it, or by its hash among those that take frames; none takes any.
    pub fn end_of(&self, hash: u32, now_s: u32) -> Option<&Arc<End>> {
        let learnt = self.flows.find(hash, now_s).and_then(|pair| self.ends.get(usize::from(pair)));
        if let Some(end) = learnt.filter(|end| end.is_open()) {
            return Some(end);
        }
        let open = self.ends.iter().filter(|end| end.is_open()).count();
        (open > 0).then(|| self.ends.iter().filter(|end| end.is_open()).nth(hash as usize % open))?
    }

    /// The guest sent a flow on a pair.
    pub fn learn(&self, hash: u32, pair: u16, now_s: u32) {
        self.flows.learn(hash, pair, now_s);
    }

    /// The export's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is an uplink.
    pub fn is_uplink(&self) -> bool {
        self.tap.is_some()
    }

    /// Whether only frames from the export's address are taken.
    pub fn mac_filter(&self) -> bool {
        self.mac_filter
    }

    /// Addresses that are learnt at most.
    pub fn mac_limit(&self) -> u32 {
        self.learnt.limit()
    }

    /// Bytes of the longest IP packet.
    pub fn mtu(&self) -> u32 {
        self.mtu.load(Relaxed)
    }

    /// Sets it, at any time.
    pub fn set_mtu(&self, mtu: u32) {
        self.mtu.store(mtu, Relaxed);
    }

    /// The VLAN of a frame that came in by it, if it takes the frame.
    ///
    /// # Errors
    /// Why it does not.
    #[inline]
    pub fn admit(&self, packet: &Packet<'_>, now_s: u32) -> Result<u16, DropReason> {
        let look = &packet.look;
        if self.is_blocked(now_s) {
            return Err(DropReason::Loop);
        }
        if !look.source.is_stations() {
            return Err(DropReason::BadSource);
        }
        if self.mac_filter && self.mac != Some(look.source) {
            return Err(DropReason::ForeignSource);
        }
        if look.destination.is_reserved() && !self.reserved {
            return Err(DropReason::Reserved);
        }
        // The kernel keeps to a tap's MTU by itself, and knows at once when it changes.
        if !self.is_uplink() && packet.bytes > self.mtu() as usize {
            return Err(DropReason::OverMtu);
        }
        self.lan.admits(packet.first).ok_or(DropReason::Vlan)
    }

    /// How a frame of a VLAN, which another port took, leaves by this one.
    ///
    /// # Errors
    /// Why it does not.
    #[inline]
    pub fn accept(
        &self,
        from: &Self,
        packet: &Packet<'_>,
        vlan: u16,
        now_s: u32,
    ) -> Result<Form, DropReason> {
        let form = self.lan.form(vlan).ok_or(DropReason::NoReceiver)?;
        if self.isolated && from.isolated {
            return Err(DropReason::Isolated);
        }
        if self.is_blocked(now_s) {
            return Err(DropReason::Loop);
        }
        if packet.look.destination.is_reserved() && !self.reserved {
            return Err(DropReason::Reserved);
        }
        match packet.bytes > self.mtu() as usize {
            true => Err(DropReason::OverMtu),
            false => Ok(form),
        }
    }

    /// Whether a frame can go from the one to the other.
    pub(super) fn meets(&self, other: &Self) -> bool {
        !(self.isolated && other.isolated) && self.lan.meets(&other.lan)
    }

    /// Whether it takes and gives nothing, since it makes a loop.
    #[inline]
    pub fn is_blocked(&self, now_s: u32) -> bool {
        self.blocked_until_s.load(Relaxed) > now_s
    }

    /// A probe showed a loop with another uplink. Whether it was not blocked before.
    pub(super) fn block(&self, with: u16, now_s: u32) -> bool {
        let fresh = !self.is_blocked(now_s);
        self.loop_with.store(with.into(), Relaxed);
        self.blocked_until_s.store(now_s + BLOCK_S, Relaxed);
        if fresh {
            self.loops.fetch_add(1, Relaxed);
        }
        fresh
    }

    /// Times that it was blocked for a loop.
    pub fn loops(&self) -> u64 {
        self.loops.load(Relaxed)
    }

    /// The number of the uplink with which it made a loop last.
    pub(super) fn loop_with(&self) -> u16 {
        self.loop_with.load(Relaxed) as u16
    }

    /// Whether it forwards frames.
    pub fn state(&self, now_s: u32) -> PortState {
        match self.is_blocked(now_s) {
            true => PortState::Blocked,
            false => PortState::Forwarding,
        }
    }
}
