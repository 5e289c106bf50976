//! Workers of the kernel engine: vhost tasks of a device, and which queue of a disk is on which.
//!
//! The kernel makes one worker with the device's owner, and others when asked. It gives them small
//! numbers that hold for the device. For users they have ids in the list of all workers. They are
//! threads of this process, so CPUs, nice value and CPU time work as for any thread.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vhost_kernel::Vhost;
use virtio::vhost::VHOST_BLK_VRINGS_MAX;
use vshunt_engine::{KernelWorker, QueueStats, Settings, WorkerId, Workers, lock_until, own_threads};
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

/// The number of the worker that comes with the owner.
const DEFAULT: u32 = 0;

/// Longest wait of a control thread for calls of other threads that wait for the disk.
pub(super) const CONTROL_WAIT_MAX: Duration = Duration::from_secs(10);

/// The device's workers and the counters of its queues.
///
/// `list` guards itself and the order in which counters are read. It is held for calls that return
/// at once. `disk_calls` guards no data. While it is held, the kernel may wait for the disk and
/// hold the device's own lock. A call that needs the kernel's lock would wait, too, in a state that
/// no signal ends.
pub(super) struct DiskWorkers {
    export: String,
    device: Arc<Vhost>,
    first: OnceLock<WorkerId>,
    disk_calls: Mutex<()>,
    list: Mutex<WorkerList>,
    stats: Vec<Arc<QueueStats>>,
}

#[derive(Default)]
struct WorkerList {
    /// The kernel's numbers of the workers.
    numbers: BTreeMap<WorkerId, u32>,
    /// Requests completed, by worker.
    done: BTreeMap<WorkerId, u64>,
    /// The worker of each queue, and how many of its completed requests are counted in `done`.
    queues: Vec<(WorkerId, u64)>,
    /// The kernel's number of the worker that the device's unused rings are attached to.
    parked: u32,
}

struct DiskWorker {
    workers: Weak<DiskWorkers>,
    export: String,
    id: WorkerId,
    number: u32,
}

impl KernelWorker for DiskWorker {
    fn export(&self) -> &str {
        &self.export
    }

    fn free(&self) -> Result<()> {
        let Some(workers) = self.workers.upgrade() else { return Ok(()) };
        let cannot = |e| Error::unsupported(format!("worker {} cannot be freed: {e}", self.id));
        let _calls =
            lock_until(workers.disk_calls(), Instant::now() + CONTROL_WAIT_MAX).ok_or_else(|| {
                Error::busy(format!(
                    "worker {} cannot be freed now: a queue of export {} waits for its disk; try again later",
                    self.id, self.export
                ))
            })?;
        workers.move_parked_rings(self.number).map_err(cannot)?;
        workers.device.free_worker(self.number).map_err(cannot)?;
        let mut list = workers.list();
        list.numbers.remove(&self.id);
        list.done.remove(&self.id);
        Ok(())
    }

    fn requests(&self) -> u64 {
        let Some(workers) = self.workers.upgrade() else { return 0 };
        (0..workers.stats.len()).for_each(|i| workers.count(i as u16));
        workers.list().done.get(&self.id).copied().unwrap_or(0)
    }
}

/// Makes this process the device's owner, with workers that are its threads.
pub(super) fn own(device: &Vhost) -> vhost_kernel::Result<()> {
    // If the call is missing, workers are threads of this process anyway, or the kernel's parameter
    // decides. `adopt` finds out.
    if let Err(e) = device.set_fork_from_owner() {
        tracing::debug!("{e}");
    }
    device.set_owner()
}

/// Adds a worker that the kernel makes because of `call`, which returns the kernel's number of it.
/// `undo` frees it. `worker` gets its id and that number.
pub(super) fn adopt(
    export: &str,
    workers: &Workers,
    name: Option<String>,
    settings: &Settings,
    call: impl FnOnce() -> vhost_kernel::Result<u32>,
    undo: impl FnOnce(u32),
    worker: impl FnOnce(WorkerId, u32) -> Arc<dyn KernelWorker>,
) -> Result<WorkerId> {
    workers.adopt(name, settings, |id| {
        let _making = (!numbers_are_the_kernels()).then(|| MAKING.locked());
        let list = || {
            let unlisted = |e| Error::io(format!("export {export}: the kernel's workers cannot be found"), e);
            vhost_threads().map_err(unlisted)
        };
        let before = list()?;
        let number = call().map_err(|e| cannot(export, &e))?;
        // In kthread mode the worker is not a thread of this process.
        let not_ours = || {
            Error::unsupported(format!(
                "export {export}: the kernel's workers are not threads of this process (vhost's \
                 fork_from_owner_default=0, and this kernel cannot be asked otherwise); load vhost with \
                 fork_from_owner_default=1, or take engine=user for a disk"
            ))
        };
        let found = list().and_then(|after| after.difference(&before).copied().next().ok_or_else(not_ours));
        let tid = found.inspect_err(|_| undo(number))?;
        Ok((tid, worker(id, number)))
    })
}

fn cannot(export: &str, e: &vhost_kernel::Error) -> Error {
    match e.errno() {
        Errno::NOMEM | Errno::AGAIN => Error::limit(format!(
            "export {export}: the kernel makes no more workers ({e}); free one, or raise the limit of threads \
             (ulimit -u, LimitNPROC=)"
        )),
        _ => Error::unsupported(format!("export {export}: {e}")),
    }
}

/// Held while the kernel makes a worker, if the worker's name does not say which thread asked. The
/// new thread is then that worker.
static MAKING: Mutex<()> = Mutex::new(());

/// Returns whether thread ids here are the numbers in the kernel's names of its workers. They are
/// not in a container. The inode number of the outermost PID namespace is fixed
/// (PROC_PID_INIT_INO).
fn numbers_are_the_kernels() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|ns| ns.as_os_str() == "pid:[4026531836]")
}

/// Returns the threads of this process that the kernel made because this thread asked
/// (`vhost-TID`). If thread ids are not the kernel's, returns those that any thread asked for.
fn vhost_threads() -> io::Result<BTreeSet<i32>> {
    let asker = numbers_are_the_kernels().then(|| rustix::thread::gettid().to_string());
    let is_one = |tid: &i32| {
        let comm = fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap_or_default();
        let number = comm.trim_end().strip_prefix("vhost-").filter(|n| n.parse::<u32>().is_ok());
        number.is_some_and(|number| asker.as_ref().is_none_or(|asker| asker == number))
    };
    Ok(own_threads()?.into_iter().filter(is_one).collect())
}

impl DiskWorkers {
    /// Makes this process the owner of the device, which makes the first worker.
    pub(super) fn start(
        export: &str,
        device: &Arc<Vhost>,
        queues: u16,
        workers: &Arc<Workers>,
    ) -> Result<Arc<Self>> {
        let this = Arc::new(Self {
            export: export.to_owned(),
            device: device.clone(),
            first: OnceLock::new(),
            disk_calls: Mutex::default(),
            list: Mutex::default(),
            stats: (0..queues).map(|_| Arc::default()).collect(),
        });
        let owner = || own(device).map(|()| DEFAULT);
        let first = this.adopt(workers, Some(format!("{export}/0")), &Settings::default(), owner)?;
        this.list().queues = vec![(first, 0); queues.into()];
        let _ = this.first.set(first);
        Ok(this)
    }

    /// Makes another worker.
    pub(super) fn make(
        self: &Arc<Self>,
        workers: &Workers,
        name: Option<String>,
        settings: &Settings,
    ) -> Result<WorkerId> {
        self.adopt(workers, name, settings, || self.device.new_worker())
    }

    fn adopt(
        self: &Arc<Self>,
        workers: &Workers,
        name: Option<String>,
        settings: &Settings,
        call: impl FnOnce() -> vhost_kernel::Result<u32>,
    ) -> Result<WorkerId> {
        let undo = |number| drop(self.device.free_worker(number));
        adopt(&self.export, workers, name, settings, call, undo, |id, number| {
            let mut list = self.list();
            list.numbers.insert(id, number);
            list.done.insert(id, 0);
            drop(list);
            Arc::new(DiskWorker { workers: Arc::downgrade(self), export: self.export.clone(), id, number })
        })
    }

    /// See [`DiskWorkers`].
    pub(super) fn disk_calls(&self) -> &Mutex<()> {
        &self.disk_calls
    }

    /// Moves the rings that no queue uses off the worker `number`, so that it can be freed. The
    /// kernel attaches every ring that a device can have to the first worker, and frees no worker
    /// with rings.
    fn move_parked_rings(&self, number: u32) -> vhost_kernel::Result<()> {
        let mut list = self.list();
        if list.parked != number {
            return Ok(());
        }
        // The worker of a queue exists longest. When the device ends, only one worker without
        // queues is left.
        let with_queues = list.queues.iter().filter_map(|(worker, _)| list.numbers.get(worker));
        let Some(other) = with_queues.chain(list.numbers.values()).copied().find(|&other| other != number)
        else {
            return Ok(());
        };
        let unused = self.stats.len() as u32..VHOST_BLK_VRINGS_MAX;
        unused.into_iter().try_for_each(|ring| self.device.attach(ring, other))?;
        list.parked = other;
        Ok(())
    }

    fn list(&self) -> MutexGuard<'_, WorkerList> {
        self.list.locked()
    }

    /// Returns the worker that came with the device.
    pub(super) fn first(&self) -> WorkerId {
        *self.first.get().expect("set before anyone else has it")
    }

    pub(super) fn stats(&self, index: u16) -> &Arc<QueueStats> {
        &self.stats[usize::from(index)]
    }

    /// Updates the counters of a queue and of its worker.
    pub(super) fn count(&self, index: u16) {
        // The lock is held from here on, so that values are entered in the order in which they were
        // read.
        let mut list = self.list();
        let Ok(now) = self.device.blk_vring_stats(index.into()) else { return };
        let stats = self.stats(index);
        stats.in_flight.store(now.in_flight, Relaxed);
        stats.requests.store(now.requests, Relaxed);
        stats.errors.store(now.errors + now.unsupported, Relaxed);
        stats.read_bytes.store(now.read_bytes, Relaxed);
        stats.write_bytes.store(now.written_bytes, Relaxed);
        stats.kicks.store(now.kicks, Relaxed);
        stats.notifications.store(now.signals, Relaxed);
        let WorkerList { done, queues, .. } = &mut *list;
        // There is no queue yet while the device is being made.
        let Some((worker, counted)) = queues.get_mut(usize::from(index)) else { return };
        if let Some(done) = done.get_mut(worker) {
            *done += now.requests.saturating_sub(*counted);
        }
        *counted = now.requests;
    }

    /// Attaches a queue. The caller has locked it.
    pub(super) fn attach(&self, index: u16, worker: WorkerId) -> Result<()> {
        self.count(index);
        let number = self.list().numbers.get(&worker).copied();
        let gone = || Error::not_found(format!("there is no worker {worker}"));
        self.device.attach(index.into(), number.ok_or_else(gone)?).map_err(|e| {
            Error::unsupported(format!(
                "queue {}:{index} cannot be attached to worker {worker}: {e}",
                self.export
            ))
        })?;
        self.list().queues[usize::from(index)].0 = worker;
        Ok(())
    }
}
