//! The state of one connection: what the front end has set up, and the rings that run.
//!
//! Only the session thread uses it. A ring runs while it is enabled and has memory, addresses and a
//! kick descriptor. Then it belongs to a queue of a worker. It is drained and stopped before
//! anything that it uses is changed or released.

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

/// VHOST_F_LOG_ALL: writes to guest memory must be logged.
const F_LOG_ALL: u64 = bit(virtio::features::VHOST_F_LOG_ALL);
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL: u64 = bit(virtio::features::VHOST_USER_F_PROTOCOL_FEATURES);
/// Bytes of a page in the dirty log, which has one bit for each page. The specification fixes the
/// size.
const LOG_PAGE_BYTES: u64 = 4096;

/// The remedy if a front end shares no memory.
const SHARE_MEMORY: &str = "Give the VMM memory that it can share; QEMU: -object memory-backend-memfd,id=mem,size=SIZE,\
     share=on -machine memory-backend=mem";

/// What the front end has set for one ring.
#[derive(Default)]
struct Vring {
    size: u16,
    addrs: Option<UserAddrs>,
    base: u32,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<EventFd>>,
    err: Option<EventFd>,
    enabled: bool,
    /// Whether the front end has switched it off since it last was enabled or stopped.
    switched_off: bool,
    running: bool,
    /// Whether it runs switched off, and what the guest sends is discarded.
    discards: bool,
}

impl Vring {
    /// Returns whether the ring is stopped, and has all that it needs except memory.
    fn may_start(&self) -> bool {
        !self.running && self.enabled && self.is_complete()
    }

    fn is_complete(&self) -> bool {
        self.size > 0 && self.kick.is_some() && self.addrs.is_some()
    }
}

/// Ring addresses in the address space of the front end.
#[derive(Clone, Copy)]
struct UserAddrs {
    desc: u64,
    driver: u64,
    device: u64,
    /// Guest address of the device area, if writes to it must be logged.
    log: Option<u64>,
}

/// The state of one connection.
pub(super) struct Session {
    name: String,
    device: Arc<dyn Device>,
    server: Arc<dyn RingServer>,
    /// The negotiated features, which `status` reads.
    agreed: Arc<AtomicU64>,
    reports: Arc<Reports>,
    /// The limits of what it may map.
    budget: Arc<Budget>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    status: u64,
    regions: Vec<Region>,
    /// Regions that were added more than once.
    repeats: Repeats,
    mem: Arc<GuestMemory>,
    /// Whether there was a memory table with regions, or a warning that there is none.
    had_memory: bool,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    /// Why this guest cannot continue with its requests in flight, nor with others.
    cut_off: Option<String>,
    log: Option<Arc<DirtyLog>>,
    /// The mapping of the dirty log.
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
            tracing::warn!("{name}: what a former front end agreed on stays: {why}");
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
            repeats: Repeats::default(),
            mem: Arc::new(GuestMemory::empty()),
            had_memory: false,
            vrings,
            inflight: None,
            cut_off: None,
            log: None,
            log_map: None,
        }
    }

    /// Returns the device status that the guest has set.
    pub(super) fn status(&self) -> u64 {
        self.status
    }

    /// Returns whether messages are acknowledged, so that the front end can continue after one is
    /// refused.
    pub(super) fn acknowledges(&self) -> bool {
        self.has(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Returns whether a protocol feature was negotiated.
    pub(super) fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol.contains(feature)
    }

    /// Handles SET_STATUS. Status 0 resets the rings, but not the configuration space: QEMU also
    /// sends 0 when a virtual machine is paused, and does not send the configuration space when it
    /// resumes. The bases of the rings are kept, too: QEMU before 8.1 asks for them
    /// (GET_VRING_BASE) only after the status, and continues or migrates from there. A front end
    /// whose guest was reset sets them.
    pub(super) fn set_status(&mut self, status: u64) {
        self.status = status;
        if status == 0 {
            self.reset();
        }
    }

    /// Resets the rings, except their bases.
    fn reset(&mut self) {
        self.stop_all();
        self.status = 0;
        for vring in &mut self.vrings {
            vring.kick = None;
            vring.enabled = false;
            vring.switched_off = false;
        }
        if let Some(area) = &self.inflight {
            area.clear();
        }
        // A guest that was reset does not rely on earlier writes.
        self.cut_off = None;
    }

    /// Resets the rings, and their bases.
    fn restart(&mut self) {
        self.reset();
        self.vrings.iter_mut().for_each(|vring| vring.base = 0);
    }

    /// Returns the protocol features that are offered. An in-flight region is offered only if the
    /// server of the rings tracks requests (old versions of the kernel module and vhost-net do
    /// not), and if no completed write is lost with the daemon (otherwise the guest must be reset).
    fn offered(&self) -> VhostUserProtocolFeatures {
        let all = super::PROTOCOL_FEATURES.union(self.device.protocol());
        match self.server.tracks() && self.device.outlives_daemon() {
            true => all,
            false => all.difference(VhostUserProtocolFeatures::INFLIGHT_SHMFD),
        }
    }

    /// Completes a change of the configuration space while no request is in flight.
    fn settle(&self) -> Result<()> {
        let mut settled = Ok(());
        loop {
            let until = Instant::now() + DRAIN_LIMIT;
            match self.server.with_all_drained(until, &mut || settled = self.device.settle()) {
                // Only this guest waits, and only for its own requests.
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

/// Returns the error that refuses a message. A front end that asked for acknowledgements can
/// continue; otherwise its connection ends.
fn refuse(why: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(why.into()))
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
        // The notes lie in a mapping of the front end, which must be released.
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
