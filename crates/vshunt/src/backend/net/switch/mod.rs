//! A switch: the exports of one daemon joined to each other as an Ethernet segment.
//!
//! Each export is a port, each of its queue pairs an [`End`]. Who sends finds the port by the frame's destination
//! ([`macs`]), and the end by its flow ([`flows`]): the one on which that guest last sent the flow, so that "transmit follows
//! receive". The frame itself stays where it is, in the sender's memory; its description goes to the end's inbox, the worker
//! that has the end copies the bytes into its guest's buffers, once, and sends the description home.
//!
//! Ports come and go under the switch's lock; senders have a snapshot of them, which they renew when its number changed. What
//! must never happen: a frame's memory unmapped while another worker may copy it. Its ring is not at rest before each
//! description is home ([`End::revoke`] fetches those that nobody took).

mod end;
mod flows;
mod frame;
mod macs;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

pub use self::end::End;
use self::flows::Flows;
pub use self::frame::{
    Fate, Frame, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_UDP, Header, LOOK_BYTES, Look, NEEDS_CSUM, Piece, look,
};
use self::macs::Macs;
use super::Tap;
use crate::error::{Error, Result};

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

/// The ports of a switch at some time, by number.
pub type Ports = Arc<Vec<Option<Arc<Port>>>>;

/// One export on a switch.
pub struct Port {
    /// Its number.
    pub index: u16,
    /// Its queue pairs.
    pub ends: Vec<Arc<End>>,
    /// Of an uplink: where it leads, for as long as the network is there. Senders keep ports for longer.
    tap: Option<Weak<Tap>>,
    flows: Flows,
}

impl Port {
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
}

/// See the module.
pub struct Switch {
    name: String,
    /// Guards the list of ports.
    ports: Mutex<Ports>,
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
            ports: Mutex::default(),
            version: AtomicU64::new(0),
            macs: Macs::new(),
            start: Instant::now(),
        }
    }

    /// Seconds since it was made: the clock of all that ages here.
    pub fn now_s(&self) -> u32 {
        self.start.elapsed().as_secs() as u32
    }

    /// A new port with so many queue pairs, which leads to a tap or to a guest.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] already.
    pub fn join(&self, pairs: u16, tap: Option<&Arc<Tap>>) -> Result<Arc<Port>> {
        let mut ports = self.ports.lock().expect("no holder panics");
        let mut list = Vec::clone(&ports);
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
        let ends = (0..pairs).map(|_| End::new()).collect::<std::io::Result<_>>();
        let ends = ends.map_err(|e| Error::io(format!("no port of switch {} can be made", self.name), e))?;
        let port =
            Arc::new(Port { index: free as u16, ends, tap: tap.map(Arc::downgrade), flows: Flows::new() });
        list[free] = Some(port.clone());
        *ports = Arc::new(list);
        self.version.fetch_add(1, Ordering::Release);
        Ok(port)
    }

    /// A port goes; its queues are at rest.
    pub fn leave(&self, port: u16) {
        let mut ports = self.ports.lock().expect("no holder panics");
        let mut list = Vec::clone(&ports);
        list[usize::from(port)] = None;
        *ports = Arc::new(list);
        self.macs.forget(port);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// How often the ports changed: whether a snapshot is to be renewed.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The ports now.
    pub fn ports(&self) -> Ports {
        self.ports.lock().expect("no holder panics").clone()
    }

    /// Where a frame from port `from` goes; its sender is learnt.
    pub fn route(&self, from: u16, look: &Look, now_s: u32) -> Route {
        if !look.source.is_group() {
            self.macs.learn(look.source, from, now_s);
        }
        if look.destination.is_group() {
            return Route::All;
        }
        match self.macs.find(look.destination, now_s) {
            Some(port) if port == from => Route::Nowhere,
            Some(port) => Route::Port(port),
            None => Route::All,
        }
    }

    /// Tells of the station at port `from` that sends `frame`: to the switch itself, and to all that its uplinks lead to.
    ///
    /// # Errors
    /// An uplink's interface is down; all others were told.
    pub fn announce(&self, from: u16, frame: &[u8]) -> Result<()> {
        self.route(from, &look(frame), self.now_s());
        let ports = self.ports();
        let taps = ports.iter().flatten().filter_map(|port| port.tap.as_ref()?.upgrade());
        let mut all = Ok(());
        for told in taps.map(|tap| tap.inject(frame)) {
            all = all.and(told);
        }
        all
    }

    /// Queue pairs of all ports.
    pub fn ends(&self) -> u16 {
        self.ports().iter().flatten().map(|port| port.ends.len() as u16).sum()
    }

    /// Addresses that are known now, with their ports.
    pub fn addresses(&self) -> usize {
        self.macs.len(self.now_s())
    }
}

#[cfg(test)]
mod tests;
