//! A switch: exports of one daemon that are joined to each other as an Ethernet segment.
//!
//! Each export is a [`Port`], each of its queue pairs a [`PortQueue`]. The sender finds the port by
//! the frame's destination ([`macs`]), and the queue by its flow ([`flows`]): the one on which that
//! guest last sent the flow, which is "transmit follows receive". The frame stays in the sender's
//! memory. Its description ([`SentFrame`]) goes to the inbox of the receiver's queue. The worker
//! that has that queue copies the bytes into its guest's buffers, once, and returns the description
//! to the sender's queue ([`sender`]).
//!
//! ```text
//! sender's worker                    receiver's worker
//! transmit ring -> Sender ---put---> PortQueue (inbox) ---take---> receive buffers
//!                  reap   <-return-- PortQueue (returns of the sender)
//! ```
//!
//! [`pair`] is a guest's queue pair. A tap is a port like a guest ([`uplink`]).
//!
//! Ports do not trust each other. The sender's worker decides whether a frame passes ([`port`]): by
//! its source, its VLAN ([`vlan`]), its length, and the options of both ports. It decides by a copy
//! of the frame's first bytes, and that copy is sent. Uplinks that lead to the same network are
//! found by probes ([`probe`], [`loops`]).
//!
//! Ports come and go under the switch's lock. Senders have a snapshot of them, which they renew
//! when its version changed. What must never happen: a frame's memory is unmapped while another
//! worker may copy it. So a ring is not at rest before each description was returned
//! ([`PortQueue::revoke`] takes those back that no worker has taken).

mod flows;
mod frame;
mod loops;
mod macs;
mod offload;
mod pair;
mod port;
mod port_guard;
mod port_queue;
mod probe;
mod sender;
mod static_entries;
mod uplink;
mod vlan;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{AddressOrigin, DropReason, Mac, NetAddress};
use vshunt_types::sync::Locked;

use self::frame::{FrameInfo, Header, Packet};
pub use self::macs::MACS_MAX;
use self::macs::{Address, Macs};
pub use self::pair::SwitchPair;
pub use self::port::{MACS_GUEST, MACS_UPLINK, Port, PortOptions};
pub use self::port_guard::PortGuard;
pub use self::port_queue::PortQueue;
#[cfg(doc)]
use self::port_queue::SentFrame;
use self::static_entries::{StaticEntries, StaticEntry};
pub use self::uplink::Uplink;
pub use self::vlan::VlanConfig;
use self::vlan::{FrameStart, NO_VLAN};

/// Ports of one switch at most.
pub const PORTS_MAX: usize = 256;

/// The destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// To one port.
    Port(u16),
    /// To all ports except its own.
    All,
    /// Nowhere: its destination is behind the port by which it entered.
    Nowhere,
}

/// The last route of an iteration that led to one port. Most frames of an iteration are between the
/// same two stations. A sender keeps it for one iteration only, in which neither its view of the
/// ports nor the time changes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastRoute(Option<KnownRoute>);

impl LastRoute {
    /// Returns the route of a frame in a VLAN: the last route if it was of the same stations, else
    /// the one that `find` returns.
    ///
    /// # Errors
    /// Those of `find`.
    #[inline]
    pub(crate) fn or_find(
        &mut self,
        info: &FrameInfo,
        vlan: u16,
        find: impl FnOnce() -> Result<Route, DropReason>,
    ) -> Result<Route, DropReason> {
        let FrameInfo { source, destination, .. } = *info;
        if let Some(known) = &self.0
            && (known.source, known.destination, known.vlan) == (source, destination, vlan)
        {
            return Ok(Route::Port(known.port));
        }
        let route = find()?;
        if let Route::Port(port) = route {
            self.0 = Some(KnownRoute { source, destination, vlan, port });
        }
        Ok(route)
    }
}

/// A route that was found.
#[derive(Clone, Copy, Debug)]
struct KnownRoute {
    source: Address,
    destination: Address,
    vlan: u16,
    port: u16,
}

/// A snapshot of the ports of a switch.
#[derive(Default)]
pub(crate) struct View {
    /// By number.
    ports: Vec<Option<Arc<Port>>>,
    static_entries: StaticEntries,
}

impl View {
    /// Returns the port of that number, if there is one.
    pub(crate) fn port(&self, index: usize) -> Option<&Arc<Port>> {
        self.ports.get(index)?.as_ref()
    }

    /// Returns all ports.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().flatten()
    }

    /// Returns the static entries of an address in a VLAN.
    fn static_entries(&self, address: Address, vlan: u16) -> impl Iterator<Item = StaticEntry> + '_ {
        let in_vlan = move |entry: &StaticEntry| {
            self.port(entry.port.into()).is_some_and(|port| port.vlans.form(vlan).is_some())
        };
        self.static_entries.of(address).filter(in_vlan)
    }
}

/// State that changes with the ports.
#[derive(Default)]
struct State {
    view: Arc<View>,
    /// Addresses of the host behind uplinks, by port.
    hosts: BTreeMap<u16, Vec<[u8; 6]>>,
}

impl State {
    /// Makes a snapshot of these ports.
    fn renew(&mut self, ports: Vec<Option<Arc<Port>>>) {
        let exports = ports
            .iter()
            .flatten()
            .filter_map(|port| Some(StaticEntry { address: port.mac?, port: port.index, host: false }));
        let hosts = self.hosts.iter().flat_map(|(port, addresses)| {
            addresses.iter().map(|bytes| StaticEntry {
                address: Address::new(*bytes),
                port: *port,
                host: true,
            })
        });
        let static_entries = StaticEntries::new(exports.chain(hosts));
        self.view = Arc::new(View { ports, static_entries });
    }
}

/// See the module.
pub struct Switch {
    name: String,
    /// Guards the list of ports and the static entries.
    state: Mutex<State>,
    /// Counts the changes of `state`.
    version: AtomicU64,
    macs: Macs,
    start: Instant,
}

impl Switch {
    /// Makes a switch without ports.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            state: Mutex::default(),
            version: AtomicU64::new(0),
            macs: Macs::new(),
            start: Instant::now(),
        }
    }

    /// Returns the seconds since the switch was created, plus one. Everything that ages uses this
    /// clock.
    pub fn now_s(&self) -> u32 {
        u32::try_from(self.start.elapsed().as_secs()).unwrap_or(u32::MAX - 1) + 1
    }

    /// Adds a port with `pairs` queue pairs.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] already, or another port that shares a VLAN with it has the same
    /// address.
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
        // Below PORTS_MAX.
        let index = u16::try_from(free).unwrap_or(u16::MAX);
        let queues = (0..pairs).map(|_| PortQueue::new()).collect::<std::io::Result<_>>();
        let queues =
            queues.map_err(|e| Error::io(format!("no port of switch {} can be made", self.name), e))?;
        let port = Arc::new(Port::new(index, queues, options));
        let same = |other: &&Arc<Port>| {
            port.mac.is_some() && other.mac == port.mac && port.vlans.shares_vlan(&other.vlans)
        };
        if let Some(other) = state.view.all().find(same) {
            return Err(Error::invalid(format!(
                "export {name}: its mac is that of export {} on switch {}, too; give each a mac of its own",
                other.name, self.name
            )));
        }
        if let Some(place) = list.get_mut(free) {
            *place = Some(port.clone());
        }
        state.renew(list);
        self.version.fetch_add(1, Ordering::Release);
        Ok(port)
    }

    /// Removes a port. Its queues are at rest.
    pub fn leave(&self, port: u16) {
        let mut state = self.state.locked();
        let mut list = state.view.ports.clone();
        if let Some(place) = list.get_mut(usize::from(port)) {
            *place = None;
        }
        state.hosts.remove(&port);
        state.renew(list);
        self.macs.forget(port);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Sets the addresses of the host behind an uplink. No other port may use them.
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

    /// Returns the number of changes of the ports. A snapshot has to be renewed when this changed.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns a snapshot of the ports.
    pub(crate) fn view(&self) -> Arc<View> {
        self.state.locked().view.clone()
    }

    /// Returns where a frame of a VLAN goes that entered by the port `from`, and learns its source.
    ///
    /// # Errors
    /// A static entry gives its source to another port.
    pub(crate) fn route(
        &self,
        view: &View,
        from: &Port,
        info: &FrameInfo,
        vlan: u16,
        now_s: u32,
    ) -> Result<Route, DropReason> {
        // The port's own address has a static entry: `join` lets no other port of its VLANs have
        // the same.
        if from.mac != Some(info.source) {
            let mut owners = view.static_entries(info.source, vlan).peekable();
            if owners.peek().is_none() {
                self.macs.learn(info.source, vlan, from.index, &from.learnt, now_s);
            } else if owners.all(|entry| entry.port != from.index && !(entry.host && from.is_uplink())) {
                // The host's frames may enter by several uplinks.
                return Err(DropReason::ForeignSource);
            }
        }
        if info.destination.is_group() {
            return Ok(Route::All);
        }
        // The host can have several uplinks, and one of them may be blocked.
        let forwards = |port: &u16| view.port((*port).into()).is_some_and(|port| !port.is_blocked(now_s));
        let configured = view.static_entries(info.destination, vlan).map(|entry| entry.port).find(forwards);
        let to = configured.or_else(|| self.macs.find(info.destination, vlan, now_s));
        Ok(match to {
            Some(port) if port == from.index => Route::Nowhere,
            Some(port) => Route::Port(port),
            None => Route::All,
        })
    }

    /// Announces the station at a port that sends `frame`, to the switch itself and to the networks
    /// of its uplinks.
    ///
    /// # Errors
    /// The port may not send that frame, or an uplink's interface is down. All others were
    /// informed.
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
        self.route(&view, from, &packet.info, vlan, now_s).map_err(refused)?;
        let start = FrameStart::new(frame, vlan);
        let mut all = Ok(());
        for port in view.all().filter(|port| port.index != from.index) {
            let tap = port.tap.as_ref().and_then(std::sync::Weak::upgrade);
            let (Some(tap), Ok(form)) = (tap, port.accept(from, &packet, vlan, now_s)) else { continue };
            if start.has(form) {
                all = all.and(tap.inject(
                    &[start.bytes(form), frame.get(start.replaced()..).unwrap_or_default()].concat(),
                ));
            }
        }
        all
    }

    /// Returns the number of queue pairs of all ports.
    pub fn queues(&self) -> u16 {
        self.view().all().map(|port| u16::try_from(port.queues.len()).unwrap_or(u16::MAX)).sum()
    }

    /// Returns the number of addresses that are known now.
    pub fn addresses(&self) -> usize {
        self.macs.len(self.now_s()) + self.view().static_entries.len()
    }

    /// Returns all addresses that are known now: static entries, then those that were learnt, each
    /// sorted by port, VLAN and address. At most [`MACS_MAX`] were learnt.
    pub fn stations(&self) -> Vec<NetAddress> {
        let (view, now_s) = (self.view(), self.now_s());
        let name = |port: u16| view.port(port.into()).map(|port| port.name().to_owned());
        let fixed = view.static_entries.all().filter_map(|entry| {
            let origin = if entry.host { AddressOrigin::Host } else { AddressOrigin::Configured };
            let (address, export) = (Mac(entry.address.bytes()), name(entry.port)?);
            Some(NetAddress { address, vlan: None, export, origin, age_s: None })
        });
        let learnt = self.macs.all(now_s).into_iter().filter_map(|known| {
            // A static entry takes precedence.
            if view.static_entries(known.address, known.vlan).next().is_some() {
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
        let mut all: Vec<_> = fixed.chain(learnt).collect();
        all.sort_by_cached_key(|a| {
            (a.origin == AddressOrigin::Learnt, a.export.clone(), a.vlan, a.address.0)
        });
        all
    }

    /// Returns the number of addresses that were learnt behind a port.
    pub fn addresses_of(&self, port: &Port) -> u32 {
        self.macs.count(port.index)
    }
}

#[cfg(test)]
mod tests;
