//! vhost-user: a device for a VMM over a UNIX socket.
//!
//! Each export has one session thread. It listens, and serves one front end after the other. It never sees a request: a
//! [`RingServer`] serves the rings that the guest starts, as queues of workers ([`WorkerRings`]) or in the kernel. A front end
//! that misbehaves loses its connection, and nobody else loses anything.
//!
//! What must never happen: guest memory unmapped, or an answer to GET_VRING_BASE sent, while a request is in flight.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//! use vshunt_block::Disk;
//! use vshunt_engine::{Observer, QueueSet, Settings, Workers};
//! use vshunt_types::spec::{DiskSpec, Format};
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
//!     VhostUser::start("vm", listen(Path::new("/run/vm.sock"))?, device, rings, observer, false)
//! }
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

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
mod session;
mod socket;
pub mod socket_file;
mod waiting;
mod worker_rings;

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vhost::vhost_user::{Error as VhostError, VhostUserProtocolFeatures};
use virtio::features::{VIRTIO_F_RING_PACKED, bit};
use vshunt_engine::Observer;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{NetQueueCounters, PortInfo};
use vshunt_virtqueue::RingServer;

use self::budget::Budget;
pub use self::device::{ConfigChange, Device, NetworkDevice, RingPlace};
use self::dispatch::{Answer, answers_itself, dispatch};
use self::messages::Message;
use self::rate::Rate;
use self::receive::Receiver;
pub use self::receive::process::start as start_receivers;
use self::session::Session;
pub use self::socket::{Socket, adopt, listen};
use self::waiting::{Connection, Waiting};
pub use self::worker_rings::WorkerRings;

/// What we offer of the protocol.
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

/// The session thread's stack: messages are small, and only pages that it touched count.
const STACK_BYTES: usize = 256 << 10;
/// How long rings may wait for the first memory table before the user is told. Front ends may send it last.
const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// How long connections that are over, and could not be closed, wait for the next try.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

/// What the names of session threads begin with.
pub const THREAD_PREFIX: &str = "vu-";
/// How many events an export tells of its front ends and broken queues at once, and a second after that. A front end that
/// connects and leaves in a loop would fill the queues of those who listen.
const EVENTS: Rate = Rate::new(64, 8);

/// A served socket.
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
    /// Guards the account alone; taken by the session thread, and held for no call.
    told: Mutex<Told>,
    features: Arc<AtomicU64>,
    /// The connection, to be shut down by others; guards nothing else.
    stream: Mutex<Option<UnixStream>>,
    /// The channel to the front-end; held for one send.
    channel: Mutex<Option<OwnedFd>>,
    /// What receives descriptors. Only the session thread uses it; held for one call.
    receiver: Mutex<Receiver>,
}

impl VhostUser {
    /// Begins to serve `device`, whose rings `server` serves. `memory_may_block`: see
    /// [`ExportSpec`](vshunt_types::spec::ExportSpec).
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
            told: Mutex::new(Told { connected: false, rate: EVENTS }),
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

    /// Whether a front-end is connected.
    pub fn connected(&self) -> bool {
        self.inner.connected.load(Relaxed)
    }

    /// Features that the guest agreed on.
    pub fn features(&self) -> u64 {
        self.inner.features.load(Relaxed)
    }

    /// Their names.
    pub fn feature_names(&self) -> Vec<String> {
        let of_device = self.inner.device.feature_names();
        let agreed = self.features();
        let names = of_device.iter().chain(FEATURE_NAMES).filter(|(number, _)| agreed & bit(*number) != 0);
        names.map(|(_, name)| (*name).to_owned()).collect()
    }

    /// Whether the guest agreed on packed rings.
    pub fn packed(&self) -> bool {
        self.features() & bit(VIRTIO_F_RING_PACKED) != 0
    }

    /// The port of a switch that the device is on.
    pub fn port(&self) -> Option<PortInfo> {
        self.inner.device.network().and_then(|network| network.port())
    }

    /// What went through a queue of a network.
    pub fn net_counters(&self, index: u16) -> Option<NetQueueCounters> {
        self.inner.device.network().and_then(|network| network.counters(index))
    }

    /// Tells the front-end that the configuration space changed, if it listens.
    pub fn config_changed(&self) {
        let channel = self.inner.channel.locked();
        if let Some(channel) = &*channel
            && let Err(e) = messages::config_changed(channel)
            // One that has gone needs no telling: it asks for all of it when it comes back.
            && e.kind() != io::ErrorKind::BrokenPipe
            && e.kind() != io::ErrorKind::ConnectionReset
        {
            tracing::warn!("{}: the front-end was not told of the change: {e}", self.inner.name);
        }
    }

    /// Disconnects, drains, removes the socket. Idempotent; returns when all is over.
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

/// A queue broke.
struct Report {
    queue: u16,
    /// The virtqueue of it whose error descriptor is to be signalled.
    ring: Option<u16>,
    reason: String,
}

/// What workers have to tell, passed to the session thread, which may log and block where a worker may not. It signals error
/// descriptors, too: so no worker has them, and none needs an io_uring ([`EventFd`](vshunt_engine::EventFd)) that is there beforehand.
struct Reports {
    /// Guards the list alone; held for a push or a swap.
    list: Mutex<Vec<Report>>,
    /// Wakes the session thread, to read the list or to end.
    eventfd: OwnedFd,
}

impl Reports {
    fn new() -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { list: Mutex::default(), eventfd })
    }

    /// A queue broke, for a reason. Once a start of a ring at most, so the list is bounded.
    fn add(&self, queue: u16, ring: Option<u16>, reason: &str) {
        let report = Report { queue, ring, reason: reason.to_owned() };
        self.list.locked().push(report);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Report> {
        let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
        std::mem::take(&mut *self.list.locked())
    }
}

/// What the observer was told.
struct Told {
    /// Whether a front end is connected.
    connected: bool,
    rate: Rate,
}

impl Told {
    /// Whether the observer is to be told of this state at `now`. If so, it counts as told.
    fn take(&mut self, connected: bool, now: Instant) -> bool {
        let take = self.connected != connected && self.rate.take(now);
        if take {
            self.connected = connected;
        }
        take
    }

    /// When the observer is to be told of this state, `now` or later; none: it knows.
    fn due(&self, connected: bool, now: Instant) -> Option<Instant> {
        (self.connected != connected).then(|| self.rate.next(now))
    }
}

/// What ended a wait of the session thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// There is something to read.
    Readable,
    /// The time is over.
    Late,
    /// The export ends.
    Ends,
}

impl Inner {
    /// The session thread.
    fn serve(&self, socket: Socket) {
        match socket {
            Socket::Connected(stream) => {
                let mut waiting = Waiting::new(&self.name, None);
                self.take(stream, &mut waiting);
                waiting.end(&mut self.receiver(), false);
            }
            Socket::Listening(listener, file) => {
                // One that others have, too, goes on to listen for the next daemon.
                self.listen(&listener, file.is_some());
                // Before the listener goes: see `SocketFile`.
                drop(file);
                return;
            }
        }
        if !self.stopping.load(Relaxed) {
            self.observer.ended();
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.locked()
    }

    /// Tells the observer whether a front end is connected, unless it knows, or too much was told; then [`wait`](Self::wait)
    /// makes up for it.
    fn tell_connected(&self) {
        let connected = self.connected.load(Relaxed);
        if self.told().take(connected, Instant::now()) {
            self.observer.connected(connected);
        }
    }

    /// What receives descriptors; held for one of its calls.
    fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.locked()
    }

    /// Serves one connection after the other until the export ends. `ours`: nobody else has the listener.
    fn listen(&self, listener: &UnixListener, ours: bool) {
        let mut waiting = Waiting::new(&self.name, Some(listener));
        loop {
            if let Some(next) = waiting.next() {
                self.session(next, &mut waiting);
                continue;
            }
            match self.wait(listener.as_fd(), None, None) {
                Woken::Ends => break,
                Woken::Late => continue,
                Woken::Readable => {}
            }
            match listener.accept() {
                Ok((stream, _)) => self.take(stream, &mut waiting),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => waiting.cannot_accept(&e),
            }
        }
        waiting.end(&mut self.receiver(), ours);
    }

    fn take(&self, stream: UnixStream, waiting: &mut Waiting<'_>) {
        // Not in the match: a session takes the lock itself.
        let connection = Connection::new(stream, &mut self.receiver());
        match connection {
            Ok(connection) => self.session(connection, waiting),
            Err(e) => tracing::error!("{}: cannot take a connection: {e}", self.name),
        }
    }

    /// Does what workers ask for. Broken queues are reported to the log, the listeners and the front end.
    fn pass_on_reports(&self, session: Option<&Session>) {
        for Report { queue, ring, reason } in self.reports.take() {
            let name = &self.name;
            tracing::warn!("queue {name}:{queue} is broken: {reason}; it stands until it is started anew");
            if self.told().rate.take(Instant::now()) {
                self.observer.queue_broken(queue, &reason);
            }
            if let (Some(session), Some(ring)) = (session, ring) {
                session.signal_error(ring);
            }
        }
    }

    /// Waits until `fd` is readable, or until a time, and does what workers, the device and connections that wait for their
    /// turn ask for meanwhile. `with`: the session, and the connections that wait; without, `fd` is the listener. No connection is
    /// taken while too many stay open that are over.
    fn wait(
        &self,
        fd: BorrowedFd<'_>,
        until: Option<Instant>,
        with: Option<(&Session, &mut Waiting<'_>)>,
    ) -> Woken {
        let (session, mut waiting) = with.unzip();
        loop {
            self.pass_on_reports(session);
            // After the eventfd was silenced: whoever ends us sets the flag first and rings then.
            if self.stopping.load(SeqCst) {
                return Woken::Ends;
            }
            let (room, again) = {
                let mut receiver = self.receiver();
                (receiver.has_room(&self.name), receiver.has_ended().then(|| Instant::now() + ROOM_PAUSE))
            };
            let awaited = if room || session.is_some() { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = vec![
                PollFd::new(&self.reports.eventfd, PollFlags::IN),
                PollFd::from_borrowed_fd(fd, awaited),
            ];
            let alarms = (0..self.server.rings()).filter_map(|ring| self.server.alarm(ring));
            fds.extend(alarms.map(|alarm| PollFd::from_borrowed_fd(alarm, PollFlags::IN)));
            let alarms_end = fds.len();
            let commands = self.device.network().and_then(|network| network.command_eventfd());
            fds.extend(commands.map(|eventfd| PollFd::from_borrowed_fd(eventfd, PollFlags::IN)));
            let device_end = fds.len();
            let others = waiting.iter().filter(|_| room).flat_map(|w| w.fds());
            fds.extend(others.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            self.tell_connected();
            let now = Instant::now();
            let due = self.told().due(self.connected.load(Relaxed), now);
            let left =
                until.into_iter().chain(due).chain(again).min().map(|at| at.saturating_duration_since(now));
            let left = left.map(|left| rustix::event::Timespec::try_from(left).expect("it is short"));
            match poll(&mut fds, left.as_ref()) {
                Ok(0) if until.is_some_and(|until| until <= Instant::now()) => return Woken::Late,
                Ok(0) => continue,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Woken::Ends,
            }
            let signalled: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if signalled[device_end..].contains(&true)
                && let Some(waiting) = &mut waiting
            {
                waiting.look(&mut self.receiver());
            }
            if signalled[alarms_end..device_end].contains(&true)
                && let Some(network) = self.device.network()
            {
                network.run_command();
            }
            for (ring, _) in (0u16..).zip(&signalled[2..alarms_end]).filter(|(_, signalled)| **signalled) {
                if self.server.is_broken(ring) {
                    let queue = self.server.queue_of(ring).unwrap_or_default();
                    self.reports.add(queue, Some(ring), "the kernel finds its ring or its addresses wrong");
                }
            }
            if signalled[1] {
                return if self.stopping.load(Relaxed) { Woken::Ends } else { Woken::Readable };
            }
        }
    }

    /// Serves one front-end until it goes, misbehaves, or the export ends.
    fn session(&self, mut connection: Connection, waiting: &mut Waiting<'_>) {
        let clones = (connection.stream.try_clone(), connection.stream.try_clone());
        let (Ok(ours), Ok(to_shut_down)) = clones else {
            tracing::error!("{}: a connection is closed: this process has no more descriptors", self.name);
            return waiting::turn_away(connection.stream, &mut self.receiver());
        };
        let ours = Arc::new(ours);
        channel::enter(&ours);
        *self.stream.locked() = ours.try_clone().ok();
        self.connected.store(true, Relaxed);
        self.tell_connected();
        tracing::info!("{}: a front-end is connected", self.name);
        let mut session = Session::new(
            &self.name,
            self.device.clone(),
            self.server.clone(),
            self.features.clone(),
            self.reports.clone(),
            Budget::new(Some(to_shut_down.into()), self.memory_may_block),
        );
        let ended = self.converse(&mut connection, &mut session, waiting);
        match ended {
            _ if session.lost_memory() => tracing::warn!(
                "{}: the front end cut memory short that it shares: its queues stop and its connection is closed; start \
                 the guest anew",
                self.name
            ),
            None => {}
            Some(VhostError::Disconnected) => tracing::info!("{}: the front-end went", self.name),
            Some(_) if self.stopping.load(Relaxed) => {}
            Some(e) => {
                tracing::warn!("{}: the front-end's connection is closed: {}", self.name, words_of(&e))
            }
        }
        // What it has sent and nobody reads may hold other connections open; the drain may take long.
        self.receiver().close(connection.stream);
        drop(connection.reader);
        session.stop_all();
        drop(session);
        // Nor does a process that is late with receiving or closing descriptors hold it open.
        let _ = ours.shutdown(Shutdown::Both);
        *self.channel.locked() = None;
        *self.stream.locked() = None;
        self.connected.store(false, Relaxed);
        self.tell_connected();
    }

    /// Does what the front end asks for, message by message; returns why that ended. None: the export ends.
    fn converse(
        &self,
        connection: &mut Connection,
        session: &mut Session,
        waiting: &mut Waiting<'_>,
    ) -> Option<VhostError> {
        let Connection { stream, reader } = connection;
        loop {
            let message_ends = reader.deadline();
            let memory_comes = session.waits_for_memory().then(|| Instant::now() + MEMORY_WAIT);
            let until = message_ends.into_iter().chain(memory_comes).min();
            if !reader.is_ready() {
                match self.wait(stream.as_fd(), until, Some((&*session, &mut *waiting))) {
                    Woken::Ends => return None,
                    Woken::Late if message_ends.is_some_and(|end| end <= Instant::now()) => {
                        return Some(messages::unfinished());
                    }
                    Woken::Late if session.waits_for_memory() => session.warn_of_no_memory(),
                    Woken::Late | Woken::Readable => {}
                }
            }
            let next = reader.next(stream, &mut self.receiver());
            let handled = match next {
                Ok(Some(message)) => self.message(stream, session, message),
                Ok(None) => Ok(()),
                Err(e) => Err(e),
            };
            if let Err(e) = handled {
                return Some(e);
            }
        }
    }

    fn message(
        &self,
        stream: &UnixStream,
        session: &mut Session,
        message: Message,
    ) -> std::result::Result<(), VhostError> {
        let (code, need_reply) = (message.code, message.need_reply);
        let value = match dispatch(self, stream, session, message) {
            Ok(Answer::Payload(bytes, file)) => {
                return messages::answer(stream, code, &bytes, file.as_ref())
                    .map_err(VhostError::SocketError);
            }
            Ok(Answer::Done) => 0u64,
            Err(VhostError::ReqHandlerError(e))
                if need_reply && !answers_itself(code) && session.acknowledges() =>
            {
                tracing::warn!("{}: a message is refused: {e}", self.name);
                1
            }
            Err(e) => return Err(e),
        };
        if need_reply && session.acknowledges() {
            messages::answer(stream, code, &value.to_ne_bytes(), None).map_err(VhostError::SocketError)?;
        }
        Ok(())
    }
}

/// Returns the text of an error. Where crate `vhost`'s type wraps a reason of this module, only the reason.
fn words_of(e: &VhostError) -> String {
    match e {
        VhostError::ReqHandlerError(e) | VhostError::SocketError(e) => e.to_string(),
        e => e.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_state_is_told_however_often_it_changed() {
        let now = Instant::now();
        let mut told = Told { connected: false, rate: Rate::new(2, 1) };
        assert!(!told.take(false, now) && told.due(false, now).is_none());
        assert!(told.take(true, now) && !told.take(true, now) && told.take(false, now));
        assert!(!told.take(true, now));
        let due = told.due(true, now).unwrap();
        assert_eq!(due, now + Duration::from_secs(1));
        assert!(told.due(false, now).is_none(), "it is as it was told");
        assert!(told.take(true, due) && told.due(true, due).is_none());
    }
}
