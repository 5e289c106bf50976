//! One export's life: create, serve, remove.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, RwLock, RwLockReadGuard};

use super::check::check_one_place;
use super::spec::{Engine, ExportInfo, ExportKind, ExportSpec, MountInfo, QueueInfo, Workers as Spread};
use crate::backend::block::Disk;
use crate::backend::net::Tap;
use crate::error::{Error, Result};
use crate::frontend::fuse::{self, Fuse};
use crate::frontend::kernel::{self, KernelQueues};
use crate::frontend::vhost_user::blk::BlkDevice;
use crate::frontend::vhost_user::net::NetDevice;
use crate::frontend::vhost_user::{Device, Socket, VhostUser, adopt, listen};
use crate::frontend::{Observer, Queues};
use crate::queue::fuse::abi;
use crate::worker::{FIRST_WORKER, QueueSet, QueueStats, Settings, State, WorkerId, Workers};

/// Virtqueues of one export: what QEMU's virtio devices can have less their own needs, and a VMM's usual most.
pub const MAX_QUEUES: u16 = 256;
/// Queue pairs of one network's export: vhost-user has 8 bits for a virtqueue's number.
pub const MAX_PAIRS: u16 = 128;

/// What an export serves.
pub(super) enum Backend {
    Disk(Arc<Disk>),
    /// With the most queue pairs that it is for, if somebody said so.
    Net(Arc<Tap>, Option<u16>),
}

/// An export, served until it is removed. Control threads call it. Lock order: `served`, then a queue set's slot.
pub(super) struct Export {
    pub(super) spec: ExportSpec,
    pub(super) readonly: bool,
    /// None once it is removed. Read for as long as the queues are used, which may be until a drain is over;
    /// written once, after the front-end was stopped, when no drain can last any more.
    served: RwLock<Option<Served>>,
    /// Made for it, and freed with it.
    own_workers: Vec<WorkerId>,
    workers: Arc<Workers>,
}

struct Served {
    frontend: Frontend,
    queues: Queues,
    /// Why not the kernel, where that was left to us.
    engine_why: Option<String>,
}

enum Frontend {
    VhostUser(VhostUser),
    Fuse(Fuse),
}

impl Frontend {
    fn connected(&self) -> bool {
        match self {
            Self::VhostUser(socket) => socket.connected(),
            Self::Fuse(_) => true,
        }
    }

    fn config_changed(&self) {
        match self {
            Self::VhostUser(socket) => socket.config_changed(),
            Self::Fuse(mount) => mount.config_changed(),
        }
    }

    fn packed(&self) -> bool {
        matches!(self, Self::VhostUser(socket) if socket.packed())
    }

    fn features(&self) -> Vec<String> {
        match self {
            Self::VhostUser(socket) => socket.feature_names(),
            Self::Fuse(mount) => feature_names(mount.features(), &INIT_NAMES),
        }
    }

    fn mount(&self) -> Option<MountInfo> {
        let Self::Fuse(mount) = self else { return None };
        let plan = mount.plan().clone();
        Some(MountInfo {
            transport: plan.transport,
            transport_why: plan.transport_why,
            passthrough: plan.passthrough,
            passthrough_why: plan.passthrough_why,
            allow_other: mount.allow_other(),
            open_files: mount.open_files(),
        })
    }

    fn stop(&self) {
        match self {
            Self::VhostUser(socket) => socket.stop(),
            Self::Fuse(mount) => mount.stop(),
        }
    }
}

/// What is opened before anything is made.
enum Opened {
    Socket(Socket, Server, Arc<Disk>),
    Mount(fuse::Plan, Arc<Disk>),
    Card(Socket, kernel::NetPlan, Arc<Tap>),
}

/// Who is to serve the rings of a socket.
enum Server {
    User { why: Option<String> },
    Kernel(kernel::Plan),
}

impl Export {
    /// Checks the whole request before anything is made; what was made is unmade on an error.
    pub(super) fn create(
        mut spec: ExportSpec,
        backend: Backend,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let queues = spec.queues.unwrap_or_else(online_cpus);
        // As it is shown, whatever directory the reader is in.
        spec.mountpoint = spec.mountpoint.take().map(|path| std::path::absolute(&path).unwrap_or(path));
        let mut readonly = spec.refuses_writes();
        let opened = match backend {
            Backend::Disk(disk) => {
                check(&spec, &disk)?;
                readonly |= disk.readonly();
                if spec.kind == ExportKind::Fuse {
                    Opened::Mount(fuse::plan(&spec, &disk, MAX_QUEUES, queues)?, disk)
                } else {
                    spec.queues = Some(queues);
                    let server = server(&spec, &disk, queues)?;
                    Opened::Socket(open_socket(&spec)?, server, disk)
                }
            }
            Backend::Net(tap, most) => {
                let pairs = pairs(&spec, &tap, most)?;
                spec.queues = Some(pairs);
                let plan = net_server(&spec, &tap, pairs)?;
                Opened::Card(open_socket(&spec)?, plan, tap)
            }
        };
        let mut own_workers = Vec::new();
        match Self::serve(&spec, opened, workers, observer, &mut own_workers) {
            Ok(served) => {
                let served = RwLock::new(Some(served));
                Ok(Self { spec, readonly, served, own_workers, workers: workers.clone() })
            }
            Err(e) => {
                free(workers, &own_workers);
                Err(e)
            }
        }
    }

    fn serve(
        spec: &ExportSpec,
        opened: Opened,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
        own_workers: &mut Vec<WorkerId>,
    ) -> Result<Served> {
        let mut user_queues = |count| -> Result<Arc<QueueSet>> {
            let homes = homes(spec, count, workers, own_workers)?;
            Ok(Arc::new(QueueSet::new(&spec.name, workers, &homes)?))
        };
        let start = |socket, device: Arc<dyn Device>, queues: Queues, engine_why| {
            let socket = VhostUser::start(&spec.name, socket, device, queues.clone(), observer.clone())?;
            Ok(Served { frontend: Frontend::VhostUser(socket), queues, engine_why })
        };
        match opened {
            Opened::Socket(socket, server, disk) => {
                let count = spec.queues.unwrap_or(1);
                let serial = spec.serial.as_deref().unwrap_or(&spec.disk);
                let device = BlkDevice::new(disk, count, spec.block_size.unwrap_or(0), serial, spec.readonly);
                match server {
                    Server::User { why } => {
                        let queues = Queues::User(user_queues(count)?);
                        start(socket, Arc::new(device), queues, why)
                    }
                    Server::Kernel(plan) => match kernel_queues(spec, plan, count, serial, workers) {
                        Ok(set) => {
                            let device = device.served_by_kernel(set.features());
                            start(socket, Arc::new(device), Queues::Kernel(set), None)
                        }
                        // It was not to be seen before that it would refuse.
                        Err(e) if spec.engine == Some(Engine::Auto) => {
                            let queues = Queues::User(user_queues(count)?);
                            start(socket, Arc::new(device), queues, Some(not_the_kernel(spec, e.to_string())))
                        }
                        Err(e) => Err(e),
                    },
                }
            }
            Opened::Card(socket, plan, tap) => {
                let set = KernelQueues::new_net(&spec.name, plan, workers)?;
                if spec.workers == Spread::PerCpu {
                    pin_each(&set)?;
                }
                if let Some(mtu) = spec.mtu {
                    tap.set_mtu(mtu)?;
                }
                let mac = spec.mac.map(|mac| mac.0);
                let device = NetDevice::new(&spec.name, tap, set.len(), mac, set.features());
                start(socket, Arc::new(device), Queues::Kernel(set), None)
            }
            Opened::Mount(plan, disk) => {
                let set = user_queues(plan.queues)?;
                let mount = Fuse::start(spec, plan, disk, &set, observer)?;
                Ok(Served { frontend: Frontend::Fuse(mount), queues: Queues::User(set), engine_why: None })
            }
        }
    }

    fn served(&self) -> RwLockReadGuard<'_, Option<Served>> {
        self.served.read().expect("no holder panics")
    }

    pub(super) fn connected(&self) -> bool {
        self.served().as_ref().is_some_and(|s| s.frontend.connected())
    }

    /// Lets go of a mount that nobody has open, so that removing it hurts nobody.
    pub(super) fn release(&self) -> Result<()> {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => mount.release(),
            _ => Ok(()),
        }
    }

    /// Whether a front-end would lose its device; a mount says so itself.
    pub(super) fn in_use(&self) -> bool {
        self.spec.kind != ExportKind::Fuse && self.connected()
    }

    /// Whether it is the mount with that device number.
    pub(super) fn is_on(&self, device: u64) -> bool {
        matches!(&*self.served(), Some(Served { frontend: Frontend::Fuse(mount), .. }) if mount.device() == device)
    }

    /// Whether the kernel changes the disk's size without asking us.
    pub(super) fn grows_by_itself(&self) -> bool {
        match &*self.served() {
            Some(Served { frontend: Frontend::Fuse(mount), .. }) => {
                mount.plan().passthrough && self.spec.growable == Some(true)
            }
            _ => false,
        }
    }

    pub(super) fn config_changed(&self) {
        if let Some(served) = &*self.served() {
            if let Some(kernel) = served.queues.kernel()
                && let Err(e) = kernel.resized()
            {
                tracing::error!("export {}: {e}", self.spec.name);
            }
            served.frontend.config_changed();
        }
    }

    /// Whether the kernel serves it.
    pub(super) fn is_kernel(&self) -> bool {
        self.served().as_ref().is_some_and(|s| s.queues.kernel().is_some())
    }

    /// Calls a function with the queues. [`Busy`](crate::error::Kind::Busy) once the export is removed.
    pub(super) fn with_queues<R>(&self, f: impl FnOnce(&Queues) -> Result<R>) -> Result<R> {
        match &*self.served() {
            Some(served) => f(&served.queues),
            None => Err(removing(&self.spec.name)),
        }
    }

    /// Whether all requests of its users come by us, so that we can hold them back.
    pub(super) fn check_held(&self) -> Result<()> {
        let name = &self.spec.name;
        match &*self.served() {
            Some(served) if served.queues.kernel().is_some() => Err(Error::unsupported(format!(
                "export {name} is served by the kernel, which would go on with the image: remove it, and add it with \
                 engine=user"
            ))),
            Some(Served { frontend: Frontend::Fuse(mount), .. }) if mount.plan().passthrough => {
                Err(Error::unsupported(format!(
                    "export {name} has passthrough, by which the kernel goes on with the image: remove it, and add it with \
                     passthrough=off"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Calls a function while nothing is in flight on any queue.
    pub(super) fn with_all_drained<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        match &*self.served() {
            Some(served) => served.queues.with_all_drained(f),
            None => Ok(f()),
        }
    }

    /// Whether a disk of that size can be this export's.
    pub(super) fn check_size(&self, size_bytes: u64) -> Result<()> {
        check_block_size(&self.spec, size_bytes)
    }

    pub(super) fn info(&self) -> ExportInfo {
        let served = self.served();
        ExportInfo {
            spec: self.spec.clone(),
            // By the guard that is held: a second one would wait for who waits for the first.
            engine: match served.as_ref().is_some_and(|s| s.queues.kernel().is_some()) {
                true => Engine::Kernel,
                false => Engine::User,
            },
            engine_why: served.as_ref().and_then(|s| s.engine_why.clone()),
            connected: served.as_ref().is_some_and(|s| s.frontend.connected()),
            features: served.as_ref().map_or(Vec::new(), |s| s.frontend.features()),
            mount: served.as_ref().and_then(|s| s.frontend.mount()),
            queue_list: served.as_ref().map_or(Vec::new(), |s| self.list(s)),
        }
    }

    /// Requests that its users had done so far.
    pub(super) fn requests(&self) -> u64 {
        self.served()
            .as_ref()
            .map_or(0, |s| (0..s.queues.len()).map(|i| s.queues.stats(i).requests.load(Relaxed)).sum())
    }

    pub(super) fn queue_infos(&self) -> Vec<QueueInfo> {
        self.served().as_ref().map_or(Vec::new(), |s| self.list(s))
    }

    fn list(&self, served: &Served) -> Vec<QueueInfo> {
        let packed = served.frontend.packed();
        (0..served.queues.len()).map(|index| self.queue_info(&served.queues, index, packed)).collect()
    }

    fn queue_info(&self, queues: &Queues, index: u16, packed: bool) -> QueueInfo {
        queue_info(&self.spec.name, index, queues.home(index), queues.stats(index), packed)
    }

    /// 1 disconnects, drains and removes the socket, 2 waits for those who use the queues and lets the queues go,
    /// 3 frees the workers made for it that have no other queue. Idempotent.
    pub(super) fn remove(&self) {
        if let Some(served) = &*self.served() {
            served.frontend.stop();
        }
        let served = self.served.write().expect("no holder panics").take();
        drop(served);
        free(&self.workers, &self.own_workers);
    }
}

/// A queue as it is.
pub(super) fn queue_info(
    export: &str,
    index: u16,
    (worker, generation): (WorkerId, u32),
    stats: &QueueStats,
    packed: bool,
) -> QueueInfo {
    let state = match stats.state() {
        State::Stopped => "stopped",
        State::Running => "running",
        State::Broken => "broken",
    };
    QueueInfo {
        export: export.to_owned(),
        index,
        worker,
        state: state.to_owned(),
        size: stats.size.load(Relaxed),
        packed,
        in_flight: stats.in_flight.load(Relaxed),
        generation,
        requests: stats.requests.load(Relaxed),
        errors: stats.errors.load(Relaxed),
        read_bytes: stats.read_bytes.load(Relaxed),
        write_bytes: stats.write_bytes.load(Relaxed),
        kicks: stats.kicks.load(Relaxed),
        notifications: stats.notifications.load(Relaxed),
    }
}

fn free(workers: &Workers, ids: &[WorkerId]) {
    for &id in ids {
        if let Err(e) = workers.free(id) {
            tracing::debug!("worker {id} stays: {e}");
        }
    }
}

pub(super) fn removing(name: &str) -> Error {
    Error::busy(format!("export {name} is being removed; wait until that is over"))
}

/// What is wrong with it for this disk; the rest was seen by [`Check`](super::Check).
fn check(spec: &ExportSpec, disk: &Disk) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    if spec.writable == Some(true) && disk.readonly() {
        return wrong(format!(
            "disk {} is read-only; leave out writable=on, or open the disk without readonly=on",
            spec.disk
        ));
    }
    let is_file = || disk.image().and_then(|i| i.metadata().ok()).is_none_or(|m| m.file_type().is_file());
    if spec.growable == Some(true) && !is_file() {
        return wrong(format!(
            "disk {} is a block device, which no file can grow; leave out growable=on",
            spec.disk
        ));
    }
    if spec.growable == Some(true) && !disk.watch().is_idle() {
        return wrong(format!(
            "disk {} has a job or dirty bitmaps, which no growable file can have: leave out growable=on",
            spec.disk
        ));
    }
    let least = disk.limits().block_size;
    if spec.block_size.is_some_and(|size| size < least) {
        return Err(Error::invalid(format!(
            "export {}: the disk needs block-size={least} at least",
            spec.name
        )));
    }
    check_block_size(spec, disk.size_bytes())
}

fn check_block_size(spec: &ExportSpec, size_bytes: u64) -> Result<()> {
    match spec.block_size {
        Some(block) if !size_bytes.is_multiple_of(u64::from(block)) => Err(Error::invalid(format!(
            "export {}: a disk of {size_bytes} bytes is no multiple of its block-size={block}",
            spec.name
        ))),
        _ => Ok(()),
    }
}

/// Who serves the rings of a socket, and all that it takes.
fn server(spec: &ExportSpec, disk: &Disk, queues: u16) -> Result<Server> {
    let asked = spec.engine.unwrap_or_default();
    if asked == Engine::User {
        return Ok(Server::User { why: None });
    }
    match (kernel::plan(spec, disk, queues), asked) {
        (Ok(plan), _) => Ok(Server::Kernel(plan)),
        (Err(why), Engine::Auto) => Ok(Server::User { why: Some(not_the_kernel(spec, why)) }),
        (Err(why), _) => {
            Err(Error::unsupported(format!("export {} cannot be served by the kernel: {why}", spec.name)))
        }
    }
}

/// Takes note of why an export is not the kernel's.
fn not_the_kernel(spec: &ExportSpec, why: String) -> String {
    tracing::info!("export {}: not served by the kernel: {why}", spec.name);
    why
}

/// The queues of a disk in the kernel's hands, with their workers.
fn kernel_queues(
    spec: &ExportSpec,
    plan: kernel::Plan,
    count: u16,
    serial: &str,
    workers: &Arc<Workers>,
) -> Result<Arc<KernelQueues>> {
    let set = KernelQueues::new(&spec.name, plan, count, serial, workers)?;
    spread_kernel(spec, &set)?;
    Ok(set)
}

/// How many queue pairs a network's export has.
fn pairs(spec: &ExportSpec, tap: &Tap, most: Option<u16>) -> Result<u16> {
    let most = most.unwrap_or(MAX_PAIRS).min(MAX_PAIRS);
    match spec.queues {
        Some(asked) if asked > most => Err(Error::invalid(format!(
            "export {}: queues={asked}, and its network has {most}; give that one more, or this one fewer",
            spec.name
        ))),
        Some(asked) => Ok(asked),
        None if tap.multi_queue() => Ok(online_cpus().min(most)),
        None => Ok(1),
    }
}

/// What it takes for a network to be served: the kernel does it, or nobody yet.
fn net_server(spec: &ExportSpec, tap: &Arc<Tap>, pairs: u16) -> Result<kernel::NetPlan> {
    if spec.engine == Some(Engine::User) {
        return Err(Error::unsupported(format!(
            "export {}: workers of this process do not serve networks yet; give engine=kernel, or leave it out",
            spec.name
        )));
    }
    kernel::plan_net(spec, tap, pairs).map_err(|why| {
        Error::unsupported(format!("export {} cannot be served by the kernel: {why}", spec.name))
    })
}

/// Keeps the worker of each queue on a CPU, in turn.
fn pin_each(set: &KernelQueues) -> Result<()> {
    let cpus = crate::worker::allowed_cpus();
    (0..set.len()).try_for_each(|i| set.pin(set.first_worker(i), cpus[usize::from(i) % cpus.len()]))
}

/// Deals the queues out to new workers of the kernel, as the spec asks. The first is there; all go with the device.
fn spread_kernel(spec: &ExportSpec, set: &KernelQueues) -> Result<()> {
    let queues = set.len();
    let count = match spec.workers {
        Spread::Default => return Ok(()),
        Spread::PerQueue | Spread::PerCpu => u32::from(queues),
        Spread::Count(n) => n,
    };
    let mut ids = vec![set.first_worker(0)];
    for i in 1..count {
        ids.push(set.new_worker(Some(format!("{}/{i}", spec.name)), &Settings::default())?);
    }
    if spec.workers == Spread::PerCpu {
        let cpus = crate::worker::allowed_cpus();
        for (i, &id) in ids.iter().enumerate() {
            set.pin(id, cpus[i % cpus.len()])?;
        }
    }
    for (index, &id) in (0..queues).zip(ids.iter().cycle()) {
        set.attach(index, id)?;
    }
    Ok(())
}

fn open_socket(spec: &ExportSpec) -> Result<Socket> {
    check_one_place(spec)?;
    match (&spec.socket, spec.fd) {
        (Some(path), _) => listen(path),
        (None, Some(fd)) => adopt(fd),
        (None, None) => unreachable!("checked above"),
    }
}

/// Which worker each queue starts on; new ones are made as the spec asks.
fn homes(
    spec: &ExportSpec,
    queues: u16,
    workers: &Workers,
    own: &mut Vec<WorkerId>,
) -> Result<Vec<WorkerId>> {
    let count = match spec.workers {
        Spread::Default => return Ok(vec![FIRST_WORKER; queues.into()]),
        Spread::PerQueue | Spread::PerCpu => u32::from(queues),
        Spread::Count(n) => n,
    };
    let mut settings = Settings { poll_us: spec.poll_us, ..Settings::default() };
    if spec.workers == Spread::PerCpu {
        // A worker beside the task that it serves, on the same CPU: woken at once it takes the CPU for each request, as a
        // batch it takes what gathered until the task waits.
        settings.batch = spec.kind == ExportKind::Fuse;
        // Who polls on the CPU of the one whom it serves keeps it from running.
        settings.poll_us = Some(spec.poll_us.unwrap_or(0));
    }
    let cpus = crate::worker::allowed_cpus();
    for i in 0..count {
        if spec.workers == Spread::PerCpu {
            // That of the ring queue, if we may run there.
            let own = Some(i as usize).filter(|cpu| cpus.contains(cpu));
            settings.cpu = Some(vec![own.unwrap_or(cpus[i as usize % cpus.len()])]);
        }
        own.push(workers.create(Some(format!("{}/{i}", spec.name)), &settings)?);
    }
    Ok(own.iter().copied().cycle().take(queues.into()).collect())
}

fn online_cpus() -> u16 {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(n).unwrap_or(MAX_QUEUES).min(MAX_QUEUES)
}

/// Flags of FUSE's INIT that a mount may have.
const INIT_NAMES: [(u64, &str); 5] = [
    (abi::init::ASYNC_DIO, "ASYNC_DIO"),
    (abi::init::MAX_PAGES, "MAX_PAGES"),
    (abi::init::DIRECT_IO_ALLOW_MMAP, "DIRECT_IO_ALLOW_MMAP"),
    (abi::init::PASSTHROUGH, "PASSTHROUGH"),
    (abi::init::OVER_IO_URING, "OVER_IO_URING"),
];

fn feature_names(bits: u64, names: &[(u64, &str)]) -> Vec<String> {
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).to_owned()).collect()
}
