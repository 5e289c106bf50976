//! A switch: the exports of one daemon joined to each other as an Ethernet segment.
//!
//! Each export is a port, each of its queue pairs an [`End`]. Who sends finds the port by the frame's destination
//! ([`macs`]), and the end by its flow ([`flows`]): the one on which that guest last sent the flow, so that "transmit follows
//! receive". The frame itself stays where it is, in the sender's memory; its description goes to the end's inbox, the worker
//! that has the end copies the bytes into its guest's buffers, once, and sends the description home.
//!
//! Ports do not trust each other. The sender's worker decides whether a frame passes ([`port`]): by its source, its VLAN
//! ([`vlan`]), its length, and what both ports may do. It decides by a copy of the frame's first bytes, and that copy is what
//! is sent. Uplinks that lead to the same network are found by probes ([`probe`]).
//!
//! Ports come and go under the switch's lock; senders have a snapshot of them, which they renew when its number changed. What
//! must never happen: a frame's memory unmapped while another worker may copy it. Its ring is not at rest before each
//! description is home ([`End::revoke`] fetches those that nobody took).

mod end;
mod flows;
mod frame;
mod macs;
mod pins;
mod port;
mod probe;
mod vlan;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use vshunt_types::sync::Locked;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{AddressOrigin, DropReason, Mac, NetAddress};

pub use self::end::End;
pub use self::frame::{
    Fate, Frame, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_UDP, Header, LOOK_BYTES, Look, NEEDS_CSUM, Packet, Piece,
    look, payload,
};
pub use self::macs::MACS_MAX;
use self::macs::{Address, Macs};
use self::pins::{Pin, Pins};
pub use self::port::{MACS_GUEST, MACS_UPLINK, Port, PortOptions};
pub use self::probe::PROBE_EVERY_S;
pub use self::vlan::{Form, Lan, NO_VLAN, Start};

/// Ports of one switch at most.
pub const PORTS_MAX: usize = 256;

/// Where a frame is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// To one port.
    Port(u16),
    /// To all ports but its own.
    All,
    /// It would come back to where it is from.
    Nowhere,
}

/// The last route of a turn that led to one port: most frames of a turn are between the same two stations. A sender keeps it for
/// one turn only, in which neither its view of the ports nor the time changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastRoute(Option<Known>);

impl LastRoute {
    /// Returns the route of a frame in a VLAN: the last one if it was of the same stations, else what `find` finds.
    ///
    /// # Errors
    /// Those of `find`.
    #[inline]
    pub fn or_find(
        &mut self,
        look: &Look,
        vlan: u16,
        find: impl FnOnce() -> Result<Route, DropReason>,
    ) -> Result<Route, DropReason> {
        let Look { source, destination, .. } = *look;
        if let Some(known) = &self.0
            && (known.source, known.destination, known.vlan) == (source, destination, vlan)
        {
            return Ok(Route::Port(known.port));
        }
        let route = find()?;
        if let Route::Port(port) = route {
            self.0 = Some(Known { source, destination, vlan, port });
        }
        Ok(route)
    }
}

/// What was looked up for a frame.
#[derive(Clone, Copy, Debug)]
struct Known {
    source: Address,
    destination: Address,
    vlan: u16,
    port: u16,
}

/// The ports of a switch at some time.
#[derive(Default)]
pub struct View {
    /// By number.
    pub ports: Vec<Option<Arc<Port>>>,
    pins: Pins,
}

impl View {
    /// The port of that number, if there is one.
    pub fn port(&self, index: usize) -> Option<&Arc<Port>> {
        self.ports.get(index)?.as_ref()
    }

    /// All ports.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().flatten()
    }

    /// Ports by configuration of an address in a VLAN.
    fn pinned(&self, address: Address, vlan: u16) -> impl Iterator<Item = Pin> + '_ {
        let in_vlan =
            move |pin: &Pin| self.port(pin.port.into()).is_some_and(|port| port.lan.form(vlan).is_some());
        self.pins.of(address).filter(in_vlan)
    }
}

/// What changes when ports come and go.
#[derive(Default)]
struct State {
    view: Arc<View>,
    /// Addresses of the host behind uplinks, by port.
    hosts: BTreeMap<u16, Vec<[u8; 6]>>,
}

impl State {
    /// Makes a view of these ports.
    fn renew(&mut self, ports: Vec<Option<Arc<Port>>>) {
        let exports = ports
            .iter()
            .flatten()
            .filter_map(|port| Some(Pin { address: port.mac?, port: port.index, host: false }));
        let hosts = self.hosts.iter().flat_map(|(port, addresses)| {
            addresses.iter().map(|bytes| Pin { address: Address::new(*bytes), port: *port, host: true })
        });
        let pins = Pins::new(exports.chain(hosts));
        self.view = Arc::new(View { ports, pins });
    }
}

/// See the module.
pub struct Switch {
    name: String,
    /// Guards the list of ports, and the addresses that are theirs by configuration.
    state: Mutex<State>,
    /// Counts its changes.
    version: AtomicU64,
    macs: Macs,
    start: Instant,
}

impl Switch {
    /// One without ports.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            state: Mutex::default(),
            version: AtomicU64::new(0),
            macs: Macs::new(),
            start: Instant::now(),
        }
    }

    /// Seconds since it was made, and one: the clock of all that ages here.
    pub fn now_s(&self) -> u32 {
        self.start.elapsed().as_secs() as u32 + 1
    }

    /// A new port with so many queue pairs.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] already, or its address is another port's that it shares a VLAN with.
    pub fn join(&self, pairs: u16, options: PortOptions) -> Result<Arc<Port>> {
        let mut state = self.state.locked();
        let mut list = state.view.ports.clone();
        let free = list.iter().position(Option::is_none).unwrap_or(list.len());
        if free >= PORTS_MAX {
            return Err(Error::limit(format!(
                "switch {} has {PORTS_MAX} ports, and no more are possible",
                self.name
            )));
        }
        if free == list.len() {
            list.push(None);
        }
        let name = options.name.clone();
        let ends = (0..pairs).map(|_| End::new()).collect::<std::io::Result<_>>();
        let ends = ends.map_err(|e| Error::io(format!("no port of switch {} can be made", self.name), e))?;
        let port = Arc::new(Port::new(free as u16, ends, options));
        let same =
            |other: &&Arc<Port>| port.mac.is_some() && other.mac == port.mac && port.lan.meets(&other.lan);
        if let Some(other) = state.view.all().find(same) {
            return Err(Error::invalid(format!(
                "export {name}: its mac is that of export {} on switch {}, too; give each a mac of its own",
                other.name, self.name
            )));
        }
        list[free] = Some(port.clone());
        state.renew(list);
        self.version.fetch_add(1, Ordering::Release);
        Ok(port)
    }

    /// A port goes; its queues are at rest.
    pub fn leave(&self, port: u16) {
        let mut state = self.state.locked();
        let mut list = state.view.ports.clone();
        list[usize::from(port)] = None;
        state.hosts.remove(&port);
        state.renew(list);
        self.macs.forget(port);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The host behind an uplink has these addresses: no other port may use them.
    pub fn set_hosts(&self, port: &Port, addresses: Vec<[u8; 6]>) {
        let mut state = self.state.locked();
        if state.hosts.get(&port.index).map_or(&[][..], Vec::as_slice) == addresses {
            return;
        }
        state.hosts.insert(port.index, addresses);
        let list = state.view.ports.clone();
        state.renew(list);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// How often the ports changed: whether a snapshot is to be renewed.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The ports now.
    pub fn view(&self) -> Arc<View> {
        self.state.locked().view.clone()
    }

    /// Where a frame goes that a port took, in a VLAN; its sender is learnt.
    ///
    /// # Errors
    /// Its source is another port's by configuration.
    pub fn route(
        &self,
        view: &View,
        from: &Port,
        look: &Look,
        vlan: u16,
        now_s: u32,
    ) -> Result<Route, DropReason> {
        // The port's own address is pinned to it: `join` lets no other port of its VLANs have the same.
        if from.mac != Some(look.source) {
            let mut owners = view.pinned(look.source, vlan).peekable();
            if owners.peek().is_none() {
                self.macs.learn(look.source, vlan, from.index, &from.learnt, now_s);
            } else if owners.all(|pin| pin.port != from.index && !(pin.host && from.is_uplink())) {
                // The host's frames may come by several uplinks.
                return Err(DropReason::ForeignSource);
            }
        }
        if look.destination.is_group() {
            return Ok(Route::All);
        }
        // The host can have several uplinks, one of which makes a loop.
        let forwards = |port: &u16| view.port((*port).into()).is_some_and(|port| !port.is_blocked(now_s));
        let pinned = view.pinned(look.destination, vlan).map(|pin| pin.port).find(forwards);
        let to = pinned.or_else(|| self.macs.find(look.destination, vlan, now_s));
        Ok(match to {
            Some(port) if port == from.index => Route::Nowhere,
            Some(port) => Route::Port(port),
            None => Route::All,
        })
    }

    /// Tells of the station at a port that sends `frame`: to the switch itself, and to all that its uplinks lead to.
    ///
    /// # Errors
    /// The port may not send that frame, or an uplink's interface is down; all others were told.
    pub fn announce(&self, from: &Port, frame: &[u8]) -> Result<()> {
        let (view, now_s) = (self.view(), self.now_s());
        let refused = |why: DropReason| {
            Error::invalid(format!(
                "switch {} does not take it from {}: {}",
                self.name,
                from.name,
                why.name()
            ))
        };
        let Some(packet) = Packet::new(frame, &Header::default(), frame.len()) else { return Ok(()) };
        let vlan = from.admit(&packet, now_s).map_err(refused)?;
        self.route(&view, from, &packet.look, vlan, now_s).map_err(refused)?;
        let start = Start::new(frame, vlan);
        let mut all = Ok(());
        for port in view.all().filter(|port| port.index != from.index) {
            let tap = port.tap.as_ref().and_then(std::sync::Weak::upgrade);
            let (Some(tap), Ok(form)) = (tap, port.accept(from, &packet, vlan, now_s)) else { continue };
            if start.has(form) {
                all = all.and(tap.inject(&[start.bytes(form), &frame[start.taken()..]].concat()));
            }
        }
        all
    }

    /// Queue pairs of all ports.
    pub fn ends(&self) -> u16 {
        self.view().all().map(|port| port.ends.len() as u16).sum()
    }

    /// Addresses that are known now, with their ports.
    pub fn addresses(&self) -> usize {
        self.macs.len(self.now_s()) + self.view().pins.len()
    }

    /// All addresses that are known now: those by configuration, then those that were learnt, each by port, VLAN and address.
    /// At most [`MACS_MAX`] were learnt.
    pub fn stations(&self) -> Vec<NetAddress> {
        let (view, now_s) = (self.view(), self.now_s());
        let name = |port: u16| view.port(port.into()).map(|port| port.name().to_owned());
        let pinned = view.pins.all().filter_map(|pin| {
            let origin = if pin.host { AddressOrigin::Host } else { AddressOrigin::Configured };
            let (address, export) = (Mac(pin.address.bytes()), name(pin.port)?);
            Some(NetAddress { address, vlan: None, export, origin, age_s: None })
        });
        let learnt = self.macs.all(now_s).into_iter().filter_map(|known| {
            // Frames for it go to the port by configuration.
            if view.pinned(known.address, known.vlan).next().is_some() {
                return None;
            }
            Some(NetAddress {
                address: Mac(known.address.bytes()),
                vlan: Some(known.vlan).filter(|vlan| *vlan != NO_VLAN),
                export: name(known.port)?,
                origin: AddressOrigin::Learnt,
                age_s: Some(known.age_s),
            })
        });
        let mut all: Vec<_> = pinned.chain(learnt).collect();
        all.sort_by_cached_key(|a| {
            (a.origin == AddressOrigin::Learnt, a.export.clone(), a.vlan, a.address.0)
        });
        all
    }

    /// Addresses that were learnt behind a port.
    pub fn addresses_of(&self, port: &Port) -> u32 {
        self.macs.count(port.index)
    }
}

#[cfg(test)]
mod tests;
