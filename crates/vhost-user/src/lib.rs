//! vhost-user: a device for a VMM over a UNIX socket.
//!
//! Each export has one session thread. It listens, and serves one front end after the other. It
//! never handles requests: a [`RingServer`] serves the rings that the guest starts, as queues of
//! workers ([`WorkerRings`]) or in the kernel. A front end that misbehaves loses its connection.
//! Other exports are not affected.
//!
//! What must never happen: guest memory is unmapped, or GET_VRING_BASE is answered, while a request
//! is in flight.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//! use vshunt_block::Disk;
//! use vshunt_engine::{Observer, QueueSet, Settings, Workers};
//! use vshunt_types::spec::{DiskSpec, Format, SocketAccess};
//! use vshunt_vhost_user::blk::BlkDevice;
//! use vshunt_vhost_user::{Device, VhostUser, WorkerRings, listen};
//!
//! fn serve(observer: Arc<dyn Observer>) -> vshunt_types::error::Result<VhostUser> {
//!     let spec = DiskSpec { name: "d".into(), format: Some(Format::Ram), size: Some(1 << 20), ..Default::default() };
//!     let device: Arc<dyn Device> = Arc::new(BlkDevice::new(Disk::open(&spec)?, 1, 0, "serial", false));
//!     let workers = Workers::new(0)?;
//!     let worker = workers.create(None, &Settings::default())?;
//!     let queues = Arc::new(QueueSet::new("vm", &workers, &[worker])?);
//!     let rings = Arc::new(WorkerRings::new(queues, device.clone()));
//!     VhostUser::start("vm", listen(Path::new("/run/vm.sock"), &SocketAccess::default())?, device, rings, observer, false)
//! }
//! ```

#![deny(
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::multiple_unsafe_ops_per_block,
        reason = "a failed test may panic"
    )
)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

pub mod accounts;
pub mod blk;
mod budget;
mod channel;
mod device;
mod dispatch;
mod guard;
mod memory;
mod messages;
pub mod net;
pub mod rate;
mod receive;
mod reports;
mod session;
mod session_thread;
mod socket;
pub mod socket_file;
mod waiting;
mod worker_rings;

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vshunt_types::sync::Locked;

use vhost::vhost_user::VhostUserProtocolFeatures;
use virtio::features::{VIRTIO_F_RING_PACKED, bit};
use vshunt_engine::Observer;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{NetQueueCounters, PortInfo};
use vshunt_virtqueue::RingServer;

pub use self::device::{ConfigChange, Device, NetworkDevice, RingPlace};
use self::rate::Rate;
use self::receive::Receiver;
pub use self::receive::process::{Receivers, start as start_receivers};
use self::reports::{ConnectionNews, Reports};
pub use self::socket::{Socket, adopt, listen};
pub use self::worker_rings::WorkerRings;

/// Protocol features that are offered for every device.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::STATUS);

/// Names of features that every device may have.
const FEATURE_NAMES: &[(u32, &str)] = &[
    (26, "LOG_ALL"),
    (28, "INDIRECT_DESC"),
    (29, "EVENT_IDX"),
    (30, "PROTOCOL_FEATURES"),
    (32, "VERSION_1"),
    (34, "RING_PACKED"),
    (35, "IN_ORDER"),
];

/// Bytes of the stack of a session thread. Only the pages that it touches use memory.
const STACK_BYTES: usize = 256 << 10;

/// Prefix of the names of session threads.
pub const THREAD_PREFIX: &str = "vu-";
/// Events about front ends and broken queues that an export sends: at once, and each second after
/// that. A front end that connects and disconnects in a loop must not fill the queues of QMP
/// clients.
const EVENTS: Rate = Rate::new(64, 8);

/// A device that is served on a socket.
pub struct VhostUser {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    name: String,
    device: Arc<dyn Device>,
    server: Arc<dyn RingServer>,
    observer: Arc<dyn Observer>,
    /// Whether front ends may share files that are not in memory.
    memory_may_block: bool,
    stopping: AtomicBool,
    reports: Arc<Reports>,
    connected: AtomicBool,
    /// Guards itself alone; used by the session thread, and held for no call.
    news: Mutex<ConnectionNews>,
    features: Arc<AtomicU64>,
    /// The connection, so that other threads can shut it down. Guards itself alone.
    stream: Mutex<Option<UnixStream>>,
    /// The channel for messages to the front end. Held for one send.
    channel: Mutex<Option<OwnedFd>>,
    /// Receives descriptors. Only the session thread uses it; held for one call.
    receiver: Mutex<Receiver>,
}

impl VhostUser {
    /// Starts a session thread for `device`, whose rings `server` serves. `memory_may_block`: see
    /// [`ExportSpec`](vshunt_types::spec::ExportSpec).
    ///
    /// # Errors
    /// The system has no thread or no eventfd.
    pub fn start(
        name: &str,
        socket: Socket,
        device: Arc<dyn Device>,
        server: Arc<dyn RingServer>,
        observer: Arc<dyn Observer>,
        memory_may_block: bool,
    ) -> Result<Self> {
        let reports = Reports::new().map_err(|e| Error::io(format!("cannot serve {name}"), e))?;
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            device,
            server,
            observer,
            memory_may_block,
            stopping: AtomicBool::new(false),
            reports: Arc::new(reports),
            connected: AtomicBool::new(false),
            news: Mutex::new(ConnectionNews { connected: false, rate: EVENTS }),
            features: Arc::default(),
            stream: Mutex::new(None),
            channel: Mutex::new(None),
            receiver: Mutex::new(Receiver::new(memory_may_block)),
        });
        let theirs = inner.clone();
        let kind = inner.device.thread_kind();
        let builder = std::thread::Builder::new()
            .name(format!("{THREAD_PREFIX}{name}").chars().take(15).collect())
            .stack_size(STACK_BYTES);
        let thread = sandbox::spawn(kind, builder, move || theirs.serve(socket))
            .map_err(|e| Error::io(format!("cannot start the session thread of {name}"), e))?;
        Ok(Self { inner, thread: Mutex::new(Some(thread)) })
    }

    /// Returns whether a front end is connected.
    pub fn connected(&self) -> bool {
        self.inner.connected.load(Relaxed)
    }

    /// Returns whether the front end that is connected has closed its end: the connection ends when
    /// its requests have ended.
    pub fn leaving(&self) -> bool {
        self.inner.stream.locked().as_ref().and_then(channel::has_hung_up) == Some(true)
    }

    /// Returns the negotiated features, one bit each.
    pub fn features(&self) -> u64 {
        self.inner.features.load(Relaxed)
    }

    /// Returns the names of the negotiated features.
    pub fn feature_names(&self) -> Vec<String> {
        let of_device = self.inner.device.feature_names();
        let agreed = self.features();
        let names = of_device.iter().chain(FEATURE_NAMES).filter(|(number, _)| agreed & bit(*number) != 0);
        names.map(|(_, name)| (*name).to_owned()).collect()
    }

    /// Returns whether packed rings were negotiated.
    pub fn packed(&self) -> bool {
        self.features() & bit(VIRTIO_F_RING_PACKED) != 0
    }

    /// Returns the port of the device on a switch. None for other devices.
    pub fn port(&self) -> Option<PortInfo> {
        self.inner.device.network().and_then(|network| network.port())
    }

    /// Returns the counters of a queue of a network device. None for other devices.
    pub fn net_counters(&self, index: u16) -> Option<NetQueueCounters> {
        self.inner.device.network().and_then(|network| network.counters(index))
    }

    /// Tells the front end that the configuration space changed, if there is a channel for that.
    pub fn config_changed(&self) {
        let channel = self.inner.channel.locked();
        if let Some(channel) = &*channel
            && let Err(e) = messages::config_changed(channel)
            // A front end that disconnected reads the configuration space when it connects again.
            && e.kind() != io::ErrorKind::BrokenPipe
            && e.kind() != io::ErrorKind::ConnectionReset
        {
            tracing::warn!("{}: the front end was not told of the change: {e}", self.inner.name);
        }
    }

    /// Disconnects the front end, drains the rings, and removes the socket. May be called more than
    /// once. Returns when the session thread has ended.
    pub fn stop(&self) {
        self.inner.stopping.store(true, SeqCst);
        self.inner.reports.wake();
        if let Some(stream) = &*self.inner.stream.locked() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let thread = self.thread.locked().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop();
    }
}
