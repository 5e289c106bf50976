//! One front-end's connection: what it set up, and the rings that run by it.
//!
//! All of it belongs to the session thread. A ring runs when it has memory, addresses, a kick and is enabled;
//! it is then a queue on a worker and comes back, drained, before anything that it leans on goes away.

mod handler;
mod inflight;
mod log;
mod repeats;
mod rings;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use vhost::vhost_user::{Error, Result, VhostUserProtocolFeatures};
use virtio::features::{VIRTIO_F_RING_PACKED, bit};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use vshunt_engine::DRAIN_LIMIT;
use vshunt_engine::EventFd;
use vshunt_virtqueue::RingServer;

use self::inflight::InflightArea;
use self::repeats::Repeats;
use super::Device;
use super::budget::Budget;
use super::memory::Mapping;
use super::reports::Reports;

/// VHOST_F_LOG_ALL: writes to guest memory are to be logged.
const F_LOG_ALL: u64 = bit(virtio::features::VHOST_F_LOG_ALL);
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL: u64 = bit(virtio::features::VHOST_USER_F_PROTOCOL_FEATURES);
/// Page size of the dirty log, fixed by the specification: one bit each.
const LOG_PAGE_BYTES: u64 = 4096;

/// What to do where a front end shares no memory.
const SHARE_MEMORY: &str = "Give the VMM memory that it can share; QEMU: -object memory-backend-memfd,id=mem,size=SIZE,\
     share=on -machine memory-backend=mem";

/// What the front-end told of one ring.
#[derive(Default)]
struct Vring {
    size: u16,
    addrs: Option<UserAddrs>,
    base: u32,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<EventFd>>,
    err: Option<EventFd>,
    enabled: bool,
    running: bool,
}

impl Vring {
    /// Whether it stands, and has all that it needs except for memory.
    fn may_start(&self) -> bool {
        !self.running && self.enabled && self.size > 0 && self.kick.is_some() && self.addrs.is_some()
    }
}

/// Ring addresses as the front-end has them: in its own address space.
#[derive(Clone, Copy)]
struct UserAddrs {
    desc: u64,
    driver: u64,
    device: u64,
    /// Guest address of the device area, if writes there are to be logged.
    log: Option<u64>,
}

/// See the module.
pub(super) struct Session {
    name: String,
    device: Arc<dyn Device>,
    server: Arc<dyn RingServer>,
    /// Features agreed on, for `status` to read.
    agreed: Arc<AtomicU64>,
    reports: Arc<Reports>,
    /// What it may map.
    budget: Arc<Budget>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    status: u64,
    regions: Vec<Region>,
    /// Regions that were added again.
    again: Repeats,
    mem: Arc<GuestMemory>,
    /// Whether a memory table with regions came, or the user was told that none did.
    had_memory: bool,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    /// Why this guest does not go on with its requests in flight, nor with others.
    cut_off: Option<String>,
    log: Option<Arc<DirtyLog>>,
    /// What it lies in.
    log_map: Option<Arc<Mapping>>,
}

impl Session {
    pub(super) fn new(
        name: &str,
        device: Arc<dyn Device>,
        server: Arc<dyn RingServer>,
        agreed: Arc<AtomicU64>,
        reports: Arc<Reports>,
        budget: Arc<Budget>,
    ) -> Self {
        let vrings = (0..server.rings()).map(|_| Vring::default()).collect();
        agreed.store(0, Relaxed);
        if let Err(why) = device.negotiated(0) {
            tracing::warn!("{name}: what a former front-end agreed on stays: {why}");
        }
        if let Some(network) = device.network() {
            network.set_notes(None);
        }
        device.connected();
        Self {
            name: name.to_owned(),
            device,
            server,
            agreed,
            reports,
            budget,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            status: 0,
            regions: Vec::new(),
            again: Repeats::default(),
            mem: Arc::new(GuestMemory::empty()),
            had_memory: false,
            vrings,
            inflight: None,
            cut_off: None,
            log: None,
            log_map: None,
        }
    }

    /// The device status, as the guest set it.
    pub(super) fn status(&self) -> u64 {
        self.status
    }

    /// Whether refused messages are answered by a word, so that the front-end may go on.
    pub(super) fn acknowledges(&self) -> bool {
        self.has(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Whether a protocol feature was agreed on.
    pub(super) fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol.contains(feature)
    }

    /// SET_STATUS; 0 resets the rings. Not what the guest chose in the configuration space: QEMU writes 0 whenever
    /// a virtual machine is paused, too, and tells nothing of that space when it goes on.
    pub(super) fn set_status(&mut self, status: u64) {
        self.status = status;
        if status == 0 {
            self.reset();
        }
    }

    fn reset(&mut self) {
        self.stop_all();
        self.status = 0;
        for vring in &mut self.vrings {
            vring.kick = None;
            vring.base = 0;
            vring.enabled = false;
        }
        if let Some(area) = &self.inflight {
            area.clear();
        }
        // A guest that begins anew knows of no completed writes.
        self.cut_off = None;
    }

    /// What we offer of the protocol. A module of before, and vhost-net, note nowhere what they have in flight; and a guest whose
    /// writes may be lost with us is to be reset, rather than to go on.
    fn offered(&self) -> VhostUserProtocolFeatures {
        let all = super::PROTOCOL_FEATURES.union(self.device.protocol());
        match self.server.tracks() && self.device.outlives_daemon() {
            true => all,
            false => all.difference(VhostUserProtocolFeatures::INFLIGHT_SHMFD),
        }
    }

    /// Makes a change of the configuration space whole while nothing is in flight.
    fn settle(&self) -> Result<()> {
        let mut settled = Ok(());
        loop {
            let until = Instant::now() + DRAIN_LIMIT;
            match self.server.with_all_drained(until, &mut || settled = self.device.settle()) {
                // The guest waits for its own requests, for as long as they take.
                Err(e) if e.kind() == vshunt_types::error::Kind::Busy => tracing::warn!("{}: {e}", self.name),
                drained => break drained.map_err(|e| refuse(e.to_string()))?,
            }
        }
        settled.map_err(refuse)
    }

    fn packed(&self) -> bool {
        self.features & bit(VIRTIO_F_RING_PACKED) != 0
    }

    fn logging(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    /// Checks a ring's number as a front end sends it.
    fn ring_index(&self, index: u32) -> Result<u16> {
        let ring = u16::try_from(index).ok().filter(|ring| usize::from(*ring) < self.vrings.len());
        ring.ok_or_else(|| refuse(format!("there is no queue {index} of {}", self.vrings.len())))
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.vrings.len();
        self.vrings
            .get_mut(index as usize)
            .ok_or_else(|| refuse(format!("there is no queue {index} of {count}")))
    }
}

/// Refuses a message: the front-end is told if it asked for acknowledgements and may go on then; else its
/// connection ends.
fn refuse(why: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(why.into()))
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
        // They lie in the front end's memory, which keeps its connection open.
        if let Some(network) = self.device.network() {
            network.set_notes(None);
        }
        self.agreed.store(0, Relaxed);
        let forgotten = self
            .server
            .set_features(0)
            .and_then(|()| self.server.set_memory(&GuestMemory::empty(), &self.mem));
        if let Err(e) = forgotten {
            tracing::warn!("{}: the kernel still knows of a guest that went: {e}", self.name);
        }
    }
}
