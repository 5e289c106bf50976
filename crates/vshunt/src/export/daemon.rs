//! The daemon: everything control may ask for. Its methods are called from any control thread.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, Weak};
use std::time::Duration;

use super::life::Export;
use super::spec::{DiskInfo, DiskSpec, ExportInfo, ExportSpec, QueueInfo, WorkerInfo, WorkerSpec};
use crate::backend::block::Disk;
use crate::error::{Error, Result};
use crate::frontend::vhost_user::Observer;
use crate::worker::{DEFAULT_POLL_US, Settings, WorkerId, Workers};

/// How long an attach waits for requests in flight where nobody says.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of the daemon.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bound of polling for workers that have none of their own, µs.
    pub poll_us: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { poll_us: DEFAULT_POLL_US }
    }
}

/// What happened; told to listeners on the thread where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A front-end connected.
    ExportConnected {
        /// The export.
        name: String,
    },
    /// The front-end went.
    ExportDisconnected {
        /// The export.
        name: String,
    },
    /// An export is gone.
    ExportDeleted {
        /// The export.
        name: String,
    },
    /// A queue moved.
    QueueAttached {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// Where it is now.
        worker: WorkerId,
    },
    /// A guest misused a ring; it stands until the guest resets it.
    QueueBroken {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// What the guest did.
        reason: String,
    },
    /// A worker was made.
    WorkerNew {
        /// Its id.
        id: WorkerId,
    },
    /// A worker was freed.
    WorkerFreed {
        /// Its id.
        id: WorkerId,
    },
    /// A disk has another size.
    DiskResized {
        /// The disk.
        name: String,
        /// Bytes now.
        size_bytes: u64,
    },
}

type Listener = Box<dyn Fn(&Event) + Send + Sync>;

/// Disks, exports and workers of one process. Lock order: `state`, then a queue set's slot, then the workers'
/// list. `state` guards the two maps and is never held while a queue drains.
pub struct Daemon {
    state: Mutex<Maps>,
    /// Signalled when an export is gone.
    gone: Condvar,
    workers: Arc<Workers>,
    listeners: RwLock<Vec<Listener>>,
    this: Weak<Daemon>,
}

#[derive(Default)]
struct Maps {
    disks: BTreeMap<String, (DiskSpec, Arc<Disk>)>,
    exports: BTreeMap<String, Arc<Export>>,
    shut: bool,
}

struct Watch {
    name: String,
    daemon: Weak<Daemon>,
}

impl Observer for Watch {
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

    fn ended(&self) {
        // Called by the session thread, which cannot wait for itself.
        let (name, daemon) = (self.name.clone(), self.daemon.clone());
        std::thread::spawn(move || {
            if let Some(daemon) = daemon.upgrade() {
                let _ = daemon.export_remove(&name, true);
            }
        });
    }
}

impl Daemon {
    /// A daemon with worker 0 and nothing else.
    pub fn new(options: Options) -> Result<Arc<Self>> {
        let workers = Workers::new(options.poll_us)?;
        workers.create(None, &Settings::default())?;
        Ok(Arc::new_cyclic(|this| Self {
            state: Mutex::default(),
            gone: Condvar::new(),
            workers,
            listeners: RwLock::default(),
            this: this.clone(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, Maps> {
        self.state.lock().expect("no holder panics")
    }

    /// Calls `f` for each event from now on; it must return at once.
    pub fn on_event(&self, f: Listener) {
        self.listeners.write().expect("no holder panics").push(f);
    }

    fn tell(&self, event: &Event) {
        for listener in self.listeners.read().expect("no holder panics").iter() {
            listener(event);
        }
    }

    /// Opens a disk.
    pub fn disk_add(&self, spec: DiskSpec) -> Result<()> {
        check_name("disk", &spec.name)?;
        let check = |state: &Maps| match state.disks.contains_key(&spec.name) {
            true => Err(Error::exists(format!("there is a disk {} already", spec.name))),
            false => Ok(()),
        };
        check(&self.state())?;
        // Without the lock: it may wait for the image.
        let disk = Disk::open(&spec)?;
        let mut state = self.state();
        check(&state)?;
        state.disks.insert(spec.name.clone(), (spec, disk));
        Ok(())
    }

    /// Closes a disk that no export uses.
    pub fn disk_remove(&self, name: &str) -> Result<()> {
        let mut state = self.state();
        let users = state.users(name);
        if !state.disks.contains_key(name) {
            return Err(no_disk(name));
        }
        if let Some(user) = users.first() {
            return Err(Error::busy(format!("disk {name} is in use by export {user}; remove that first")));
        }
        state.disks.remove(name);
        Ok(())
    }

    /// Gives a disk another size, or takes note of a block device's new one; guests are told.
    pub fn disk_resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let (disk, exports): (Arc<Disk>, Vec<Arc<Export>>) = {
            let state = self.state();
            let (_, disk) = state.disks.get(name).ok_or_else(|| no_disk(name))?;
            (disk.clone(), state.exports.values().filter(|e| e.spec.disk == name).cloned().collect())
        };
        // A write in flight beyond a new, nearer end would make the image longer again.
        let writer = exports.iter().find(|e| !e.readonly).filter(|_| size_bytes < disk.size_bytes());
        match writer {
            Some(export) => export.queue_set().with_all_drained(|| disk.resize(size_bytes))?,
            None => disk.resize(size_bytes)?,
        }
        for export in exports {
            export.config_changed();
        }
        self.tell(&Event::DiskResized { name: name.to_owned(), size_bytes });
        Ok(())
    }

    /// All disks, by name.
    pub fn disks(&self) -> Vec<DiskInfo> {
        let state = self.state();
        let info = |(spec, disk): &(DiskSpec, Arc<Disk>)| DiskInfo {
            spec: spec.clone(),
            size_bytes: disk.size_bytes(),
            direct_in_use: disk.direct_in_use(),
            path: disk.path().to_owned(),
            exports: state.users(&spec.name),
        };
        state.disks.values().map(info).collect()
    }

    /// Serves a disk.
    pub fn export_add(&self, spec: ExportSpec) -> Result<()> {
        check_name("export", &spec.name)?;
        let name = spec.name.clone();
        let mut state = self.state();
        if state.shut {
            return Err(Error::busy("the daemon is ending"));
        }
        if state.exports.contains_key(&name) {
            return Err(Error::exists(format!("there is an export {name} already")));
        }
        let (disk_spec, disk) = state.disks.get(&spec.disk).ok_or_else(|| no_disk(&spec.disk))?;
        let readonly = spec.readonly || disk_spec.readonly;
        let writer = state.exports.values().find(|e| e.spec.disk == spec.disk && !e.readonly);
        if let Some(writer) = writer
            && !readonly
        {
            return Err(Error::busy(format!(
                "disk {} is written by export {} already; give readonly=on, or remove that export",
                spec.disk, writer.spec.name
            )));
        }
        let watch = Watch { name: name.clone(), daemon: self.this.clone() };
        let export = Export::create(spec, disk.clone(), &self.workers, Arc::new(watch))?;
        state.exports.insert(name, Arc::new(export));
        Ok(())
    }

    /// Ends an export. Without `hard`, one with a front-end connected is [`Busy`](crate::error::Kind::Busy).
    pub fn export_remove(&self, name: &str, hard: bool) -> Result<()> {
        let export = {
            let mut state = self.state();
            let export = state.exports.get(name).ok_or_else(|| no_export(name))?;
            if !hard && export.connected() {
                return Err(Error::busy(format!(
                    "export {name} has a front-end connected; end that, or remove it by force"
                )));
            }
            state.exports.remove(name).expect("seen above")
        };
        export.remove();
        self.tell(&Event::ExportDeleted { name: name.to_owned() });
        let _guard = self.state();
        self.gone.notify_all();
        Ok(())
    }

    /// All exports, by name.
    pub fn exports(&self) -> Vec<ExportInfo> {
        self.state().exports.values().map(|e| e.info()).collect()
    }

    /// Makes a worker.
    pub fn worker_new(&self, spec: WorkerSpec) -> Result<WorkerId> {
        let settings = settings(&spec);
        let id = self.workers.create(spec.name, &settings)?;
        self.tell(&Event::WorkerNew { id });
        Ok(id)
    }

    /// Ends a worker that has no queues.
    pub fn worker_free(&self, id: WorkerId) -> Result<()> {
        self.workers.free(id)?;
        self.tell(&Event::WorkerFreed { id });
        Ok(())
    }

    /// Changes a worker; what is not given stays. A name cannot be changed.
    pub fn worker_set(&self, id: WorkerId, spec: WorkerSpec) -> Result<()> {
        if spec.name.is_some() {
            return Err(Error::invalid("a worker keeps the name that it was made with"));
        }
        self.workers.set(id, None, &settings(&spec))
    }

    /// All workers, by id.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let queues = self.queues();
        let on =
            |id| queues.iter().filter(move |q| q.worker == id).map(|q| format!("{}:{}", q.export, q.index));
        let states = self.workers.states();
        states
            .into_iter()
            .map(|w| WorkerInfo {
                queues: on(w.id).collect(),
                id: w.id,
                name: w.name,
                kind: "user".to_owned(),
                tid: w.tid,
                cpu: w.cpu,
                nice: w.nice,
                poll_us: w.poll_us,
                cpu_time_us: w.cpu_time_us,
                sleeps: w.sleeps,
                requests: w.requests,
            })
            .collect()
    }

    /// Attaches a queue to a worker, whole or not at all, while I/O runs.
    pub fn queue_attach(&self, export: &str, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        let set = {
            let state = self.state();
            state.exports.get(export).ok_or_else(|| no_export(export))?.queue_set().clone()
        };
        set.attach(index, worker, timeout)?;
        self.tell(&Event::QueueAttached { export: export.to_owned(), index, worker });
        Ok(())
    }

    /// All queues of all exports.
    pub fn queues(&self) -> Vec<QueueInfo> {
        let exports: Vec<Arc<Export>> = self.state().exports.values().cloned().collect();
        exports.iter().flat_map(|e| e.queue_infos()).collect()
    }

    /// Waits until no export is left.
    pub fn wait_all_gone(&self) {
        let mut state = self.state();
        while !state.exports.is_empty() {
            state = self.gone.wait(state).expect("no holder panics");
        }
    }

    /// Ends everything: exports are disconnected and drained, disks closed, workers freed. Idempotent.
    pub fn shutdown(&self) {
        let (exports, disks) = {
            let mut state = self.state();
            state.shut = true;
            (std::mem::take(&mut state.exports), std::mem::take(&mut state.disks))
        };
        for (name, export) in exports {
            export.remove();
            self.tell(&Event::ExportDeleted { name });
        }
        drop(disks);
        self.workers.end_all();
        let _guard = self.state();
        self.gone.notify_all();
    }
}

impl Maps {
    fn users(&self, disk: &str) -> Vec<String> {
        self.exports.values().filter(|e| e.spec.disk == disk).map(|e| e.spec.name.clone()).collect()
    }
}

fn settings(spec: &WorkerSpec) -> Settings {
    Settings { cpu: spec.cpu.clone(), nice: spec.nice, poll_us: spec.poll_us }
}

fn check_name(what: &str, name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
        return Err(Error::invalid(format!(
            "{what} name {name:?} is not usable; take 1 to 64 letters, digits, '-', '_' or '.'"
        )));
    }
    Ok(())
}

fn no_disk(name: &str) -> Error {
    Error::not_found(format!("there is no disk {name}; 'disk list' shows those that are there"))
}

fn no_export(name: &str) -> Error {
    Error::not_found(format!("there is no export {name}; 'export list' shows those that are there"))
}
