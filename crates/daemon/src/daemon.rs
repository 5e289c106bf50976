//! The daemon, with one method for each command. Any control thread may call them.

mod balance;
mod bitmaps;
mod convert;
mod jobs;
mod limits;
mod nets;
mod resize;
mod shutdown;
mod snapshot;

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
use vshunt_types::sync::{Locked, LockedShared};

use vshunt_block::{Disk, sweep_journals};
use vshunt_engine::Observer;
use vshunt_engine::{DEFAULT_POLL_US, LimitCell, Settings, WorkerId, Workers};
use vshunt_fuse::mount::{identity, remove_left_behind, uncover};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{
    DiskInfo, DiskSpec, ExportInfo, ExportSpec, QueueInfo, WorkerInfo, WorkerKind, WorkerSpec,
    Workers as Spread,
};

pub use self::convert::ToConvert;
pub use self::jobs::{HOLD, HOLD_MAX, PointAction};
pub use self::shutdown::END_LIMIT;
pub use self::snapshot::{OverlayMode, SnapshotWish};
use crate::balance::Balance;
use crate::check::{Check, settings};
use crate::disk_entry::DiskEntry;
use crate::event::{Event, Listener};
use crate::export::{Backend, Export, Moved, removing};
use crate::limits::LimitGroups;
use crate::registry::{ExportEntry, Phase, Registry, no_disk, no_export};
use crate::watched::Watched;

/// How long an attach waits for requests in flight by default.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the removal of an export waits for requests in flight.
const REMOVE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// Settings of the daemon.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Limit of polling for workers without a limit of their own, µs.
    pub poll_us: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { poll_us: DEFAULT_POLL_US }
    }
}

/// Disks, exports and workers of one process.
///
/// Lock order: `op_lock` of a disk, `state`, `served` of an export, the slot of a queue set, the
/// list of workers. The lock of the groups of limits comes after `state`, too. `state` guards the
/// registry and is held for look-ups only: never while a socket, a worker or a file is opened, and
/// never while a queue drains. Meanwhile the name is reserved or marked, see [`Phase`].
pub struct Daemon {
    state: Mutex<Registry>,
    /// Signalled when the phase of an export changes, or when an export is gone.
    pub(super) changed: Condvar,
    pub(super) workers: Arc<Workers>,
    listeners: RwLock<Vec<Listener>>,
    limits: LimitGroups,
    balance: Balance,
    pub(super) this: Weak<Daemon>,
}

struct ExportObserver {
    name: String,
    daemon: Weak<Daemon>,
}

impl Observer for ExportObserver {
    fn connected(&self, yes: bool) {
        let name = self.name.clone();
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.tell(&if yes {
                Event::ExportConnected { name }
            } else {
                Event::ExportDisconnected { name }
            });
        }
    }

    fn queue_broken(&self, index: u16, reason: &str) {
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.tell(&Event::QueueBroken { export: self.name.clone(), index, reason: reason.to_owned() });
        }
    }

    fn resized(&self, size_bytes: u64) {
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.resized_by(&self.name, size_bytes);
        }
    }

    fn ended(&self) {
        // A session thread or a worker calls this, and cannot wait for its own end.
        let (name, daemon) = (self.name.clone(), self.daemon.clone());
        let remove = move || {
            if let Some(daemon) = daemon.upgrade()
                && let Err(e) = daemon.export_remove(&name, true)
            {
                tracing::debug!("{e}");
            }
        };
        let builder = std::thread::Builder::new().name("export-end".into());
        if let Err(e) = sandbox::spawn(ThreadKind::Control, builder, remove) {
            // The export serves no front end any more. It is removed by the next command or with
            // the daemon.
            tracing::error!(
                "export {}: its peer went, and no thread can be had to remove it: {e}",
                self.name
            );
        }
    }
}

impl Daemon {
    /// Makes a daemon that has worker 0 and nothing else.
    pub fn new(options: Options) -> Result<Arc<Self>> {
        let workers = Workers::new(options.poll_us)?;
        workers.create(None, &Settings::default())?;
        Ok(Arc::new_cyclic(|this| Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            workers,
            listeners: RwLock::default(),
            limits: LimitGroups::default(),
            balance: Balance::default(),
            this: this.clone(),
        }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, Registry> {
        self.state.locked()
    }

    /// Calls `f` for each event from now on. `f` must not block.
    pub fn on_event(&self, f: Listener) {
        self.listeners.write_locked().push(f);
    }

    pub(super) fn tell(&self, event: &Event) {
        for listener in self.listeners.read_locked().iter() {
            listener(event);
        }
    }

    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, Registry>) -> MutexGuard<'a, Registry> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to remove files that killed daemons left in /dev/shm for images that do not exist any
    /// more. Called once, after the disks are added. It runs on a thread of its own, because
    /// opening an image may wait for its file system.
    pub fn sweep_journals(&self) {
        let thread = std::thread::Builder::new().name("vshunt-sweep".to_owned());
        // It opens images by their file handles, which control threads are not allowed to. If there
        // is no thread, the files stay until the next daemon starts.
        let _ = thread.spawn(|| sandbox::errand(sweep_journals));
    }

    /// Opens a disk.
    ///
    /// # Errors
    /// The name is in use, the description is wrong, or the image cannot be opened.
    pub fn disk_add(&self, spec: DiskSpec) -> Result<()> {
        spec.check()?;
        self.state().check_unnamed(&spec.name)?;
        // Without the lock, because it may wait for the image.
        if let Some(file) = &spec.file {
            uncover(file)?;
        }
        self.check_image(&spec)?;
        let disk = Disk::open(&spec)?;
        // The list shows the format that is used.
        let spec = DiskSpec { format: Some(spec.format()), ..spec };
        let watched = Watched::of(&disk)?;
        let mut state = self.state();
        state.check_unnamed(&spec.name)?;
        let name = spec.name.clone();
        let entry = Arc::new(DiskEntry::new(spec, disk, watched));
        entry.watch();
        state.disks.insert(name, entry);
        Ok(())
    }

    /// Checks that no disk of this daemon has the image. The lock of the image would report another
    /// process, after waiting for it.
    pub(super) fn check_image(&self, spec: &DiskSpec) -> Result<()> {
        let disks: Vec<_> = self.state().disks.values().cloned().collect();
        let Some(other) = disks.iter().find(|d| d.disk.locks_out(spec)) else { return Ok(()) };
        let readonly = if spec.readonly { "make that readonly=on too" } else { "give both readonly=on" };
        Err(Error::busy(format!(
            "{} is the image of disk {} of this daemon already; export that one, or {readonly}",
            spec.image(),
            other.name
        )))
    }

    /// Removes mounts that a killed daemon left at mountpoints of exports, or over images of
    /// `disks`. Called before the images are checked, which such a mount hides, and before they are
    /// opened: a dead mount with passthrough keeps the locks of its image.
    ///
    /// # Errors
    /// `Busy` if a dead mount cannot be removed; errors of the system.
    pub fn take_over<'a>(mountpoints: impl IntoIterator<Item = &'a Path>, disks: &[DiskSpec]) -> Result<()> {
        mountpoints.into_iter().try_for_each(|path| Self::take_over_mountpoint(path, disks))?;
        for file in disks.iter().filter_map(|disk| disk.file.as_deref()) {
            uncover(file)?;
        }
        Ok(())
    }

    fn take_over_mountpoint(path: &Path, disks: &[DiskSpec]) -> Result<()> {
        if uncover(path)? {
            let below = identity(path);
            // An empty image may be mounted over itself.
            let is_image = |disk: &DiskSpec| disk.file.as_deref().and_then(identity) == below;
            if !disks.iter().any(is_image) {
                remove_left_behind(path);
            }
        }
        Ok(())
    }

    /// Checks that a mount hides no image. A mount over an image hides it from every program that
    /// opens it by name. Only the disk that is mounted may have that image, because it is open
    /// already.
    fn check_mountpoint(&self, spec: &ExportSpec) -> Result<()> {
        let Some(path) = &spec.mountpoint else { return Ok(()) };
        let Some(inode) = identity(path) else { return Ok(()) };
        let disks: Vec<_> = self.state().disks.values().cloned().collect();
        let shown = path.display();
        if let Some(job) = self.state().jobs.values().find(|job| job.target_has_file(inode)) {
            return Err(Error::busy(format!(
                "{shown} is the target of job {}; wait for it to end, or name another file, for example {shown}.raw",
                job.id
            )));
        }
        for entry in disks.iter().filter(|entry| entry.disk.has_inode(inode)) {
            let name = &entry.name;
            if *name != spec.disk || !entry.disk.image_has_inode(inode) {
                return Err(Error::invalid(format!(
                    "{shown} is an image of disk {name} and cannot be mounted over; name another file, for example \
                     {shown}.raw"
                )));
            }
            if let Some(job) = entry.watched.job() {
                return Err(Error::busy(format!(
                    "{shown} is the image of disk {name}, whose job {job} may have to open it by its name; wait for the \
                     job to end, or name another file, for example {shown}.raw"
                )));
            }
        }
        Ok(())
    }

    /// Closes a disk that no export uses, or forgets an overlay that waits for its snapshot.
    ///
    /// # Errors
    /// There is no such disk, or it is in use.
    pub fn disk_remove(&self, name: &str) -> Result<()> {
        let removed = {
            let mut state = self.state();
            if state.overlays.remove(name).is_some() {
                return Ok(());
            }
            if let Some(user) = state.users(name).first() {
                return Err(Error::busy(format!(
                    "disk {name} is in use by export {user}; remove that first"
                )));
            }
            state.disk(name)?.watched.check_free(name)?;
            state.disks.remove(name).ok_or_else(|| no_disk(name))?
        };
        // Other threads use the entry only for a moment. The image is closed when this returns.
        while Arc::strong_count(&removed) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Returns whether a disk, the target of a mirror, or an overlay that waits, has the file with
    /// that device number and inode as its image or as a backing file. Also true for a disk whose
    /// image is being replaced. Does not wait.
    pub fn has_file(&self, id: (u64, u64)) -> bool {
        let state = self.state();
        state.disks.values().any(|entry| entry.disk.may_have_file(id))
            || state.jobs.values().any(|job| job.target_has_file(id))
            || state.overlays.values().any(|overlay| overlay.id == Some(id))
    }

    /// Returns all disks, sorted by name.
    pub fn disks(&self) -> Vec<DiskInfo> {
        self.learn_sizes();
        let disks: Vec<_> = {
            let state = self.state();
            state.disks.values().map(|entry| (entry.clone(), state.users(&entry.name))).collect()
        };
        // Without the lock, because this waits for an image that is being replaced.
        let info = |(entry, exports): (Arc<DiskEntry>, _)| DiskInfo {
            spec: entry.spec(),
            size_bytes: entry.disk.size_bytes(),
            direct_in_use: entry.disk.direct_in_use(),
            path: entry.disk.path().to_owned(),
            connections: entry.disk.connections(),
            exports,
            job: entry.watched.job(),
            bitmaps: entry.watched.bitmap_infos(),
        };
        disks.into_iter().map(info).collect()
    }

    /// Serves a disk or a network. Waits for the end of a resize of that disk.
    ///
    /// # Errors
    /// The name is in use, the description is wrong, or something cannot be opened.
    pub fn export_add(&self, spec: ExportSpec) -> Result<()> {
        spec.check()?;
        if spec.net.is_some() {
            let backend = self.state().reserve_nets(&spec)?;
            return self.make(spec, backend, &|| Ok(()));
        }
        let entry = self.state().disk(&spec.disk)?;
        let _op = entry.op_lock();
        self.check_mountpoint(&spec)?;
        if !spec.refuses_writes() && self.state().writer(&spec.disk).is_none() {
            entry.check_returned()?;
        }
        self.state().reserve(&spec, &entry)?;
        let growable = spec.growable == Some(true);
        let prepare = || if growable { self.make_growable(&entry) } else { Ok(()) };
        // The entry is not kept: the removal of the disk waits until nothing uses it.
        let weak = Arc::downgrade(&entry);
        let bitmaps =
            move || weak.upgrade().map_or_else(Vec::new, |entry| entry.watched.state().bitmaps.clone());
        self.make(spec, Backend::Disk(entry.disk.clone(), Box::new(bitmaps)), &prepare)
    }

    /// Makes an export whose name is reserved. `prepare` is called when nothing can be refused any
    /// more.
    fn make(&self, spec: ExportSpec, backend: Backend, prepare: &dyn Fn() -> Result<()>) -> Result<()> {
        let name = spec.name.clone();
        let observer = ExportObserver { name: name.clone(), daemon: self.this.clone() };
        // Before the first request can come.
        let (balance, sized) = (spec.balance, spec.workers == Spread::Auto);
        let (kind, limits) = (spec.kind, spec.limits.clone());
        let cell = Arc::<LimitCell>::default();
        let limited = limits.map_or(Ok(()), |limits| self.limits.set(&name, kind, &cell, &limits));
        let made = limited
            .and_then(|()| Export::create(spec, backend, &self.workers, Arc::new(observer), prepare, cell));
        match &made {
            Ok(_) => self.balance.add(&name, balance, sized),
            Err(_) => self.limits.lift(&name),
        }
        let mut state = self.state();
        let result = match made {
            Ok(export) => {
                let reserved = state.exports.get_mut(&name).expect("what is being made stays");
                reserved.phase = Phase::Serving(Arc::new(export));
                Ok(())
            }
            Err(e) => {
                state.exports.remove(&name);
                Err(e)
            }
        };
        drop(state);
        self.changed.notify_all();
        self.start_balancing();
        result
    }

    /// Removes an export, and returns when it is gone.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy) if the export is being removed already, or if a
    /// front end is connected and `hard` is false. Also `Busy` if requests do not end within 10 s:
    /// then the front end is disconnected, and the export is removed when they end.
    pub fn export_remove(&self, name: &str, hard: bool) -> Result<()> {
        self.export_take_down(name, hard).map(drop)
    }

    /// Does what [`export_remove`](Self::export_remove) does. Returns whether a front end lost its
    /// device, and what the export had moved.
    pub fn export_take_down(&self, name: &str, hard: bool) -> Result<(bool, Moved)> {
        let export = {
            let mut state = self.state();
            loop {
                match state.phase(name)? {
                    Phase::Making => {}
                    Phase::Removing(_) => return Err(removing(name)),
                    Phase::Serving(export) if !hard && export.in_use() => {
                        return Err(Error::busy(format!(
                            "export {name} has {} connected; end that, or remove it by force (--force)",
                            export.users().0
                        )));
                    }
                    Phase::Serving(_) => break,
                }
                state = self.wait(state);
            }
            state.mark_removing(name)
        };
        if !hard && let Err(e) = export.release() {
            self.state().exports.get_mut(name).expect("ours to remove").phase = Phase::Serving(export);
            self.changed.notify_all();
            return Err(e);
        }
        let used = export.in_use();
        if used {
            tracing::warn!("export {name} is removed by force: {}", export.users().1);
        }
        let ended = self.start_removal(name, export.clone());
        await_end(name, &export, &ended, Instant::now() + REMOVE_LIMIT)?;
        Ok((used, export.moved()))
    }

    /// Starts to remove an export that is marked as being removed, on a thread of its own. The
    /// receiver gets a message at the end.
    fn start_removal(&self, name: &str, export: Arc<Export>) -> Receiver<()> {
        let (done, is_done) = std::sync::mpsc::sync_channel(1);
        let (this, of, theirs) = (self.this.upgrade(), name.to_owned(), export.clone());
        let theirs_done = done.clone();
        let end = move || {
            if let Some(daemon) = this {
                daemon.end(&of, &theirs);
            }
            drop(theirs);
            let _ = theirs_done.send(());
        };
        if std::thread::Builder::new().name("export-end".into()).spawn(end).is_err() {
            // If there is no thread, the removal has no time limit.
            self.end(name, &export);
            let _ = done.send(());
        }
        is_done
    }

    /// Removes an export that is marked as being removed. Waits for its requests in flight, without
    /// a limit.
    fn end(&self, name: &str, export: &Export) {
        export.remove();
        self.limits.lift(name);
        self.balance.remove(name);
        {
            let mut state = self.state();
            state.exports.remove(name);
            state.untold += 1;
        }
        // Without the lock, and after the name became free.
        self.tell(&Event::ExportDeleted { name: name.to_owned() });
        self.state().untold -= 1;
        self.changed.notify_all();
    }

    /// Returns all exports, sorted by name.
    pub fn exports(&self) -> Vec<ExportInfo> {
        let shown = |entry: &ExportEntry| {
            let export = entry.phase.export()?.clone();
            Some((export, matches!(entry.phase, Phase::Removing(_))))
        };
        let shown: Vec<_> = self.state().exports.values().filter_map(shown).collect();
        let info = |(export, removing): (Arc<Export>, _)| {
            let mut info = ExportInfo { removing, ..export.info() };
            info.spec.limits = self.limits.of(&export.spec.name);
            (info.spec.balance, info.balancing) = self.balancing(&export);
            info
        };
        let mut infos: Vec<_> = shown.into_iter().map(info).collect();
        self.add_longest_waits(&mut infos);
        infos
    }

    pub(super) fn shown(&self) -> Vec<Arc<Export>> {
        self.state().exports.values().filter_map(|e| e.phase.export().cloned()).collect()
    }

    /// Makes a worker, and returns its id.
    ///
    /// # Errors
    /// The description is wrong, or the system has no thread for it.
    pub fn worker_new(&self, spec: WorkerSpec) -> Result<WorkerId> {
        spec.check()?;
        let settings = settings(&spec);
        let id = match &spec.export {
            None => self.workers.create(spec.name, &settings)?,
            Some(export) => {
                let serving = self.serving(export)?;
                serving.with_queues(|queues| queues.new_kernel_worker(export, spec.name, &settings))?
            }
        };
        self.tell(&Event::WorkerNew { id });
        Ok(id)
    }

    /// Frees a worker that has no queues. Worker 0 cannot be freed.
    ///
    /// # Errors
    /// There is no such worker, or it has queues.
    pub fn worker_free(&self, id: WorkerId) -> Result<()> {
        self.workers.free(id).map_err(|e| self.name_balance(id, e))?;
        self.tell(&Event::WorkerFreed { id });
        Ok(())
    }

    /// Changes the settings that are given; if one of them fails, none is changed. The thread keeps
    /// its name.
    ///
    /// # Errors
    /// There is no such worker, or a setting is wrong.
    pub fn worker_set(&self, id: WorkerId, spec: WorkerSpec) -> Result<()> {
        spec.check()?;
        let settings = settings(&spec);
        if spec.kind.is_some() || spec.export.is_some() {
            return Err(Error::invalid(
                "the kind and the export of a worker cannot be changed; leave them out",
            ));
        }
        self.workers.set(id, spec.name, &settings)
    }

    /// Returns all workers, sorted by id.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let mut queues: HashMap<WorkerId, Vec<String>> = HashMap::new();
        for queue in self.queues() {
            let name = format!("{}:{}", queue.export, queue.index);
            queues.entry(queue.worker).or_default().push(name);
        }
        let stalled = self.workers.stalled();
        let states = self.workers.states();
        states
            .into_iter()
            .map(|w| WorkerInfo {
                queues: queues.remove(&w.id).unwrap_or_default(),
                id: w.id,
                name: w.name,
                kind: if w.kernel_of.is_some() { WorkerKind::Kernel } else { WorkerKind::User },
                export: w.kernel_of,
                tid: w.tid,
                cpu: w.cpu,
                nice: w.nice,
                poll_us: w.poll_us,
                cpu_time_us: w.cpu_time_us,
                busy_us: w.times.busy.as_micros() as u64,
                polling_us: w.times.polling.as_micros() as u64,
                sleeping_us: w.times.sleeping.as_micros() as u64,
                sleeps: w.sleeps,
                requests: w.requests,
                stalled: stalled.contains(&w.id),
            })
            .collect()
    }

    /// Returns, for each export, the workers that were made for it. A worker that was freed since
    /// is listed, too.
    pub fn own_workers(&self) -> Vec<(String, Vec<WorkerId>)> {
        self.shown().iter().map(|e| (e.spec.name.clone(), e.own_workers())).collect()
    }

    /// Attaches a queue to a worker while I/O runs. It stays there until `balance` is set again.
    ///
    /// # Errors
    /// The queue stays on its worker: there is no such queue or worker, or requests in flight did
    /// not end within `timeout`.
    pub fn queue_attach(&self, export: &str, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        match self.job_queue(export) {
            Some(queue) => queue.attach(index, worker, timeout)?,
            None => {
                let serving = self.serving(export)?;
                let attach = || serving.with_queues(|queues| queues.attach(index, worker, timeout));
                self.balance.attached_by_command(export, index, attach)?;
            }
        }
        self.tell(&Event::QueueAttached { export: export.to_owned(), index, worker });
        Ok(())
    }

    fn serving(&self, export: &str) -> Result<Arc<Export>> {
        let phase = self.state().phase(export)?;
        match phase {
            Phase::Making => Err(no_export(export)),
            Phase::Removing(_) => Err(removing(export)),
            Phase::Serving(export) => Ok(export),
        }
    }

    /// Returns all queues of all exports and jobs.
    pub fn queues(&self) -> Vec<QueueInfo> {
        let mut queues: Vec<_> = self.shown().iter().flat_map(|e| e.queue_infos()).collect();
        queues.extend(self.job_queues());
        queues
    }

    /// Waits until there is no export any more.
    pub fn wait_all_gone(&self) {
        let mut state = self.state();
        while !state.is_quiet() {
            state = self.wait(state);
        }
    }
}

/// Waits for the end of an export until `until`, which is [`REMOVE_LIMIT`] after its start.
///
/// # Errors
/// [`Busy`](vshunt_types::error::Kind::Busy): requests are still in flight. The export is removed
/// when they end.
fn await_end(name: &str, export: &Export, ended: &Receiver<()>, until: Instant) -> Result<()> {
    match ended.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Err(RecvTimeoutError::Timeout) => Err(still_busy(name, export)),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::busy(format!("export {name} is not removed: its thread failed; see the log")))
        }
        Ok(()) => Ok(()),
    }
}

fn still_busy(name: &str, export: &Export) -> Error {
    let queues = export.queue_infos();
    let busy = queues.iter().filter(|q| q.in_flight > 0);
    let busy: Vec<_> = busy
        .map(|q| {
            format!("queue {}:{} on worker {} has {} in flight", q.export, q.index, q.worker, q.in_flight)
        })
        .collect();
    let busy = if busy.is_empty() { "a queue is not at rest".to_owned() } else { busy.join(", ") };
    Error::busy(format!(
        "export {name} has requests that do not end within {} s: {busy}; its users are disconnected, and it goes when they \
         end ('status' shows whether a worker is stalled)",
        REMOVE_LIMIT.as_secs()
    ))
}
