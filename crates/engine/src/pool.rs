//! The workers of a daemon. Control makes, changes, lists and frees them while I/O runs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use rustix::process::{Pid, getpid, getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::cpu_list;

use super::WorkerId;
use super::balance::WorkerSample;
use super::kernel::KernelWorker;
use super::mailbox::{Ending, Message, Shared};
use super::no_uring::{UringSetting, why_no_uring};
use super::phases::WorkerTimes;
use super::thread::{POLL_US_MAX, Worker};
use super::ticket::Withdrawn;

/// Most workers at a time. This is far more than a host has CPUs. It stops a runaway script, as
/// RLIMIT_NPROC does for a user.
pub const MAX_WORKERS: usize = 1024;
/// Stack size of a worker. The loop is flat, and only pages that it touched use memory.
const STACK_BYTES: usize = 256 << 10;
/// Time that a worker has to start to end, and then that its thread has to end.
pub(super) const END_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });
/// Time between two checks whether it has ended.
const END_EVERY: Duration = Duration::from_micros(200);
/// Longest thread name that the kernel keeps.
const THREAD_NAME_MAX: usize = 15;

/// The worker that always exists. Queues of exports that ask for no workers of their own start on
/// it.
pub const FIRST_WORKER: WorkerId = 0;

/// Settings of a worker. `None` leaves a setting as it is.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// CPUs that it may run on. An empty list stands for all CPUs of the process's main thread.
    pub cpu: Option<Vec<usize>>,
    /// Nice value, -20 to 19.
    pub nice: Option<i32>,
    /// Polling limit in µs.
    pub poll_us: Option<u32>,
    /// Whether the woken worker does not preempt other threads (SCHED_BATCH). This is for a worker
    /// that shares a CPU with the threads that it serves: when they rest, they have more work for
    /// it.
    pub batch: bool,
}

impl Settings {
    /// Checks that a worker of the in-kernel engine can have these settings.
    ///
    /// # Errors
    /// It cannot have one of them.
    pub fn check_kernel(&self) -> Result<()> {
        match self.poll_us {
            None => Ok(()),
            Some(_) => Err(Error::unsupported("workers of the kernel engine do not poll; leave out poll-us")),
        }
    }

    /// Checks the settings without regard to the machine.
    ///
    /// # Errors
    /// A value is out of range.
    pub fn check(&self) -> Result<()> {
        self.poll_us.map_or(Ok(()), check_poll)?;
        if let Some(nice) = self.nice
            && !(-20..=19).contains(&nice)
        {
            return Err(Error::invalid(format!("nice {nice} is out of range; -20 to 19 is possible")));
        }
        match self.cpu.iter().flatten().find(|&&cpu| cpu >= CpuSet::MAX_CPU) {
            Some(cpu) => {
                Err(Error::invalid(format!("there is no CPU {cpu}; see /sys/devices/system/cpu/online")))
            }
            None => Ok(()),
        }
    }
}

/// The present state of a worker.
#[derive(Clone, Debug)]
pub struct WorkerState {
    /// The id.
    pub id: WorkerId,
    /// The name.
    pub name: String,
    /// The export that it belongs to, for a worker of the in-kernel engine.
    pub kernel_of: Option<String>,
    /// The thread id.
    pub tid: i32,
    /// The CPUs that it may run on.
    pub cpu: Vec<usize>,
    /// The nice value.
    pub nice: i32,
    /// The polling limit in µs.
    pub poll_us: u32,
    /// The CPU time used, in µs.
    pub cpu_time_us: u64,
    /// How it has spent its time. Of a worker of the in-kernel engine, which does not poll: the CPU
    /// time, and the rest of its life.
    pub times: WorkerTimes,
    /// How often it slept.
    pub sleeps: u64,
    /// The requests completed on it.
    pub requests: u64,
}

struct Entry {
    name: String,
    tid: i32,
    runner: Runner,
    /// When it was made.
    made: Instant,
    /// Queues that are attached to it, running or not. A worker with queues is not freed.
    reserved: u32,
    /// It is being freed: it gets no queue, and is listed until its end is certain.
    ending: bool,
    /// Its thread, if this process made it.
    thread: Option<JoinHandle<()>>,
}

/// What runs the worker.
#[derive(Clone)]
enum Runner {
    User { shared: Arc<Shared> },
    Kernel(Arc<dyn KernelWorker>),
}

impl Runner {
    /// Tells the worker to end. Returns the ticket to wait for, or `None` if the worker has ended.
    ///
    /// # Errors
    /// The kernel refuses. The worker works as before.
    fn tell_to_end(&self) -> Result<Option<Arc<Ending>>> {
        let shared = match self {
            Self::User { shared } => shared,
            Self::Kernel(worker) => return worker.free().map(|()| None),
        };
        let ending = Ending::new(());
        shared.send(Message::Stop { ending: ending.clone() });
        Ok(Some(ending))
    }

    /// Waits until `until` for a worker that was told to end to start to end.
    ///
    /// # Errors
    /// The worker is stalled. It works as before when it runs again.
    fn await_end(id: WorkerId, ending: &Ending, until: Instant) -> Result<()> {
        if ending.wait(until.saturating_duration_since(Instant::now())).is_some() {
            return Ok(());
        }
        match ending.withdraw() {
            Withdrawn::Back(()) => Err(Error::busy(format!(
                "worker {id} has not run for {} s (stalled), and stays; free it when it runs again",
                END_LIMIT.as_secs()
            ))),
            Withdrawn::Started | Withdrawn::Answered(()) => Ok(()),
        }
    }
}

/// A worker that was told to end.
struct EndingWorker {
    id: WorkerId,
    runner: Runner,
    /// The ticket to wait for. `None`: the worker has ended.
    ending: Option<Arc<Ending>>,
}

impl Entry {
    fn new(name: String, tid: i32, runner: Runner, thread: Option<JoinHandle<()>>) -> Self {
        Self { name, tid, runner, made: Instant::now(), reserved: 0, ending: false, thread }
    }

    /// Checks that the worker is not being freed.
    fn check_stays(&self, id: WorkerId) -> Result<()> {
        match self.ending {
            true => Err(Error::busy(format!("worker {id} is being freed"))),
            false => Ok(()),
        }
    }

    /// Waits until `until` for a thread that has started to end. If FUSE ring queues left idle
    /// entries on its ring, the thread stays until the last of them is gone, and is not waited for.
    fn join(self, id: WorkerId, until: Instant) {
        let (Runner::User { shared }, Some(thread)) = (self.runner, self.thread) else { return };
        // No queue is on the worker, so this number can only fall.
        let left = shared.left.load(Acquire);
        if left > 0 {
            tracing::info!(
                "the thread of worker {id} stays until {left} idle entries of ring queues have left it"
            );
            return;
        }
        while !thread.is_finished() && Instant::now() < until {
            std::thread::sleep(END_EVERY);
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// All workers.
///
/// The lock guards the list only. It is held for look-ups and for system calls that return at once,
/// never during a wait for a worker's start or end.
pub struct Workers {
    list: Mutex<List>,
    default_poll_us: u32,
}

struct List {
    next: WorkerId,
    /// Workers that are being made. They count for the limit.
    making: usize,
    /// Freed workers whose threads may still forward completions. They count for the limit.
    forwarding: Vec<Arc<Shared>>,
    by_id: BTreeMap<WorkerId, Entry>,
}

impl Workers {
    /// Makes an empty list. Workers that are made without a polling limit get `default_poll_us`.
    pub fn new(default_poll_us: u32) -> Result<Arc<Self>> {
        check_poll(default_poll_us)?;
        let list = Mutex::new(List {
            next: FIRST_WORKER,
            making: 0,
            forwarding: Vec::new(),
            by_id: BTreeMap::new(),
        });
        Ok(Arc::new(Self { list, default_poll_us }))
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.locked()
    }

    /// Makes a worker, and returns its id when it is ready to take queues. If this fails, the id is
    /// not used again.
    pub fn create(&self, name: Option<String>, settings: &Settings) -> Result<WorkerId> {
        let poll_us = settings.poll_us.unwrap_or(self.default_poll_us);
        let wanted = Wanted::check(settings)?;
        let id = self.claim_id()?;
        let name = name.unwrap_or_else(|| format!("worker-{id}"));
        let made = start(id, name, poll_us, &wanted);
        let mut list = self.list();
        list.making -= 1;
        let entry = made?;
        tracing::info!(id, tid = entry.tid, "worker made");
        list.by_id.insert(id, entry);
        Ok(id)
    }

    /// Adds a worker that the kernel makes. `make` gets its id and name, and returns the worker
    /// with the kernel's thread id.
    pub fn adopt(
        &self,
        name: Option<String>,
        settings: &Settings,
        make: impl FnOnce(WorkerId) -> Result<(i32, Arc<dyn KernelWorker>)>,
    ) -> Result<WorkerId> {
        settings.check_kernel()?;
        let wanted = Wanted::check(settings)?;
        let id = self.claim_id()?;
        let made = make(id).and_then(|(tid, worker)| match wanted.apply(tid) {
            Ok(()) => Ok((tid, worker)),
            Err(e) => {
                let _ = worker.free();
                Err(e)
            }
        });
        let mut list = self.list();
        list.making -= 1;
        let (tid, worker) = made?;
        tracing::info!(id, tid, "kernel worker made");
        let name = name.unwrap_or_else(|| format!("worker-{id}"));
        list.by_id.insert(id, Entry::new(name, tid, Runner::Kernel(worker), None));
        Ok(id)
    }

    /// Removes the workers of an export whose device was closed. The kernel ended them with the
    /// device.
    pub fn forget(&self, export: &str) {
        self.list().by_id.retain(|_, e| match &e.runner {
            Runner::Kernel(worker) => worker.export() != export,
            Runner::User { .. } => true,
        });
    }

    fn claim_id(&self) -> Result<WorkerId> {
        let mut list = self.list();
        list.forwarding.retain(|shared| shared.left.load(Acquire) > 0);
        let forwarding = list.forwarding.len();
        if list.by_id.len() + list.making + forwarding >= MAX_WORKERS {
            let also = match forwarding {
                0 => String::new(),
                n => format!(
                    " ({n} of them are freed, and end when requests have taken the last idle entries of FUSE queues from \
                     them, or with the mount)"
                ),
            };
            return Err(Error::limit(format!(
                "there are {MAX_WORKERS} workers already{also}, which is the most; free one with 'worker free ID'"
            )));
        }
        list.making += 1;
        list.next += 1;
        Ok(list.next - 1)
    }

    /// Ends a worker that has no queues.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): it has queues, or is stalled.
    /// [`Unsupported`](vshunt_types::error::Kind::Unsupported): it is the [`FIRST_WORKER`].
    pub fn free(&self, id: WorkerId) -> Result<()> {
        if id == FIRST_WORKER {
            return Err(Error::unsupported(format!(
                "worker {id} is there always: exports without workers of their own start on it"
            )));
        }
        self.end(id)
    }

    /// Ends all workers that have no queues, the [`FIRST_WORKER`] included, at the end of the
    /// daemon.
    pub fn end_all(&self) {
        let ids: Vec<_> = self.list().by_id.keys().copied().collect();
        self.end_these(&ids);
    }

    /// Ends those of these workers that have no queues. All are told to end before one is waited
    /// for, and the waits have one deadline.
    pub fn end_these(&self, ids: &[WorkerId]) {
        let told: Vec<_> = ids.iter().map(|&id| self.tell_to_end(id)).collect();
        let until = Instant::now() + END_LIMIT;
        let ended: Vec<_> = told.into_iter().map(|told| self.await_end(told?, until)).collect();
        let until = Instant::now() + END_LIMIT;
        for ended in ended {
            match ended {
                Ok((id, entry)) => entry.into_iter().for_each(|entry| entry.join(id, until)),
                Err(e) => tracing::debug!("{e}"),
            }
        }
    }

    fn end(&self, id: WorkerId) -> Result<()> {
        let told = self.tell_to_end(id)?;
        let (id, entry) = self.await_end(told, Instant::now() + END_LIMIT)?;
        if let Some(entry) = entry {
            entry.join(id, Instant::now() + END_LIMIT);
        }
        Ok(())
    }

    /// Tells a worker that has no queues to end.
    fn tell_to_end(&self, id: WorkerId) -> Result<EndingWorker> {
        let runner = {
            let mut list = self.list();
            let entry = list.by_id.get_mut(&id).ok_or_else(|| unknown(id))?;
            entry.check_stays(id)?;
            let queues = entry.reserved;
            if queues > 0 {
                return Err(Error::busy(format!(
                    "worker {id} has {queues} queue{}; attach {} to another worker first",
                    if queues == 1 { "" } else { "s" },
                    if queues == 1 { "it" } else { "them" },
                )));
            }
            entry.ending = true;
            entry.runner.clone()
        };
        match runner.tell_to_end() {
            Ok(ending) => Ok(EndingWorker { id, runner, ending }),
            Err(e) => {
                self.list().by_id.entry(id).and_modify(|entry| entry.ending = false);
                Err(e)
            }
        }
    }

    /// Waits until `until`, and takes a worker that ends off the list.
    fn await_end(&self, told: EndingWorker, until: Instant) -> Result<(WorkerId, Option<Entry>)> {
        let EndingWorker { id, runner, ending } = told;
        let ended = ending.map_or(Ok(()), |ending| Runner::await_end(id, &ending, until));
        let entry = {
            let mut list = self.list();
            if let Err(e) = ended {
                list.by_id.entry(id).and_modify(|entry| entry.ending = false);
                return Err(e);
            }
            if let Runner::User { shared } = &runner
                && shared.left.load(Acquire) > 0
            {
                list.forwarding.push(shared.clone());
            }
            list.by_id.remove(&id)
        };
        tracing::info!(id, "worker freed");
        Ok((id, entry))
    }

    /// Changes a worker while it runs, and its name in lists (its thread keeps the old one). On an
    /// error nothing is changed.
    pub fn set(&self, id: WorkerId, name: Option<String>, settings: &Settings) -> Result<()> {
        let wanted = Wanted::check(settings)?;
        let mut list = self.list();
        let entry = list.by_id.get_mut(&id).ok_or_else(|| unknown(id))?;
        if let Runner::Kernel(_) = entry.runner {
            settings.check_kernel()?;
        }
        wanted.apply(entry.tid)?;
        if let (Some(us), Runner::User { shared }) = (settings.poll_us, &entry.runner) {
            shared.poll_us.store(us, Relaxed);
        }
        if let Some(name) = name {
            entry.name = name;
        }
        Ok(())
    }

    /// Returns the ids of the workers that are threads of this process and are not being freed.
    pub fn user_ids(&self) -> Vec<WorkerId> {
        let list = self.list();
        let usable = |e: &Entry| matches!(e.runner, Runner::User { .. }) && !e.ending;
        list.by_id.iter().filter(|(_, e)| usable(e)).map(|(&id, _)| id).collect()
    }

    /// Returns how busy these workers have been. Those of the in-kernel engine are left out.
    pub fn loads(&self, of: &BTreeSet<WorkerId>) -> Vec<WorkerSample> {
        let list = self.list();
        let listed = of.iter().filter_map(|id| Some((*id, list.by_id.get(id)?)));
        let load = |(id, e): (WorkerId, &Entry)| match &e.runner {
            Runner::User { shared } => {
                let cpus = sched_getaffinity(Pid::from_raw(e.tid)).map_or(Vec::new(), |set| cpus(&set));
                let times = shared.phases.times();
                let busy_ns = times.busy.as_nanos() as u64;
                let ran_ns = (cpu_time_us(e.tid) * 1000).saturating_sub(times.polling.as_nanos() as u64);
                Some(WorkerSample { id, cpus, busy_ns, ran_ns: ran_ns.min(busy_ns) })
            }
            Runner::Kernel(_) => None,
        };
        listed.filter_map(load).collect()
    }

    /// Returns all workers, by id.
    pub fn states(&self) -> Vec<WorkerState> {
        let list = self.list();
        list.by_id.iter().map(|(&id, e)| state(id, e)).collect()
    }

    /// Returns the workers that were asked to read their mailbox and have not done so for one
    /// second. Returns at once if all run, and otherwise at the end of that second. Workers of the
    /// in-kernel engine are not asked.
    pub fn stalled(&self) -> Vec<WorkerId> {
        let user = |(id, entry): (&WorkerId, &Entry)| match &entry.runner {
            Runner::User { shared } => Some((*id, shared.clone())),
            Runner::Kernel(_) => None,
        };
        let asked: Vec<_> = self.list().by_id.iter().filter_map(user).collect();
        asked.iter().for_each(|(_, shared)| shared.ask());
        asked.into_iter().filter(|(_, shared)| shared.is_stalled()).map(|(id, _)| id).collect()
    }

    /// Checks that there is such a worker.
    pub fn check(&self, id: WorkerId) -> Result<()> {
        self.list().by_id.get(&id).map(|_| ()).ok_or_else(|| unknown(id))
    }

    /// Counts one more queue for a worker, and returns the worker's mailbox.
    pub(super) fn reserve(&self, id: WorkerId) -> Result<Arc<Shared>> {
        let mut list = self.list();
        let entry = list.by_id.get_mut(&id).ok_or_else(|| unknown(id))?;
        entry.check_stays(id)?;
        let shared = match &entry.runner {
            Runner::User { shared } => shared.clone(),
            Runner::Kernel(worker) => {
                let export = worker.export();
                return Err(Error::unsupported(format!(
                    "worker {id} is the kernel's, for queues of export {export} only; 'worker new' makes one of this \
                     process"
                )));
            }
        };
        if entry.reserved as usize >= super::thread::QUEUES_MAX {
            return Err(Error::limit(format!("worker {id} has as many queues as it can have")));
        }
        entry.reserved += 1;
        Ok(shared)
    }

    /// Counts one more queue for a worker of the in-kernel engine, which has to belong to the
    /// queue's export.
    pub fn reserve_kernel(&self, id: WorkerId, export: &str) -> Result<()> {
        let mut list = self.list();
        let entry = list.by_id.get_mut(&id).ok_or_else(|| unknown(id))?;
        entry.check_stays(id)?;
        let of = match &entry.runner {
            Runner::Kernel(worker) if worker.export() == export => {
                entry.reserved += 1;
                return Ok(());
            }
            Runner::Kernel(worker) => format!("the kernel's for export {}", worker.export()),
            Runner::User { .. } => "of this process".to_owned(),
        };
        Err(Error::unsupported(format!(
            "worker {id} is {of}; queues of export {export} are served by the kernel: \
             'worker new --kind kernel --export {export}' makes a worker for them"
        )))
    }

    /// Undoes one [`reserve`](Self::reserve).
    pub fn release(&self, id: WorkerId) {
        if let Some(entry) = self.list().by_id.get_mut(&id) {
            debug_assert!(entry.reserved > 0);
            entry.reserved = entry.reserved.saturating_sub(1);
        }
    }
}

/// Starts a worker's thread, and waits until it can take queues.
fn start(id: WorkerId, name: String, poll_us: u32, wanted: &Wanted) -> Result<Entry> {
    let cannot = |e| Error::io(format!("cannot make worker {id}{}", files_hint(&e)), e);
    let shared = Arc::new(Shared::new(id, poll_us).map_err(cannot)?);
    let (ready, is_ready) = sync_channel::<io::Result<i32>>(1);
    let theirs = shared.clone();
    let builder = std::thread::Builder::new().name(thread_name(&name)).stack_size(STACK_BYTES);
    let thread = sandbox::spawn(ThreadKind::Worker, builder, move || body(theirs, &ready))
        .map_err(|e| spawn_error(id, e))?;
    let tid = match is_ready.recv() {
        Ok(Ok(tid)) => tid,
        Ok(Err(e)) => return Err(ring_error(id, e)),
        Err(_) => return Err(Error::limit(format!("worker {id} ended before it began"))),
    };
    if let Err(e) = wanted.apply(tid) {
        shared.send(Message::Stop { ending: Ending::new(()) });
        let _ = thread.join();
        return Err(e);
    }
    Ok(Entry::new(name, tid, Runner::User { shared }, Some(thread)))
}

fn body(shared: Arc<Shared>, ready: &std::sync::mpsc::SyncSender<io::Result<i32>>) {
    let mut worker = match Worker::new(shared) {
        Ok(worker) => worker,
        Err(e) => {
            let _ = ready.send(Err(e));
            return;
        }
    };
    if let Err(e) = sandbox::ring_is_made() {
        let _ = ready.send(Err(e));
        return;
    }
    let _ = ready.send(Ok(rustix::thread::gettid().as_raw_nonzero().get()));
    if let Err(e) = worker.run() {
        // The queues of the worker cannot be returned safely with operations in flight. The process
        // ends as by kill -9, so that the in-flight region gives the requests back after a restart.
        tracing::error!("a worker's io_uring failed ({e}); ending at once");
        std::process::abort();
    }
}

fn unknown(id: WorkerId) -> Error {
    Error::not_found(format!("there is no worker {id}; see `vshunt worker list`"))
}

fn check_poll(us: u32) -> Result<()> {
    if us > POLL_US_MAX {
        return Err(Error::invalid(format!("poll-us {us} is too long; the most is {POLL_US_MAX}")));
    }
    Ok(())
}

fn spawn_error(id: WorkerId, e: io::Error) -> Error {
    if e.raw_os_error() != Some(libc::EAGAIN) {
        return Error::io(format!("cannot start worker {id}"), e);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nproc).current;
    let limit = limit.map_or("no limit".to_owned(), |n| n.to_string());
    Error::limit(format!(
        "cannot start worker {id}: the system allows no more threads (RLIMIT_NPROC is {limit}); \
         free a worker or raise the limit (ulimit -u, LimitNPROC=)"
    ))
}

fn files_hint(e: &io::Error) -> &'static str {
    match e.raw_os_error() {
        Some(libc::EMFILE) => " (raise the limit of open files: ulimit -n, LimitNOFILE=)",
        _ => "",
    }
}

fn ring_error(id: WorkerId, e: io::Error) -> Error {
    let (why, remedy) = why_no_uring(&e, &UringSetting::read());
    Error::io(format!("worker {id} cannot have an io_uring ({why}; {remedy})"), e)
}

fn thread_name(name: &str) -> String {
    let mut end = name.len().min(THREAD_NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].replace('\0', "_")
}

/// Scheduling settings that were checked, so only the system can still refuse them.
struct Wanted {
    cpu: Option<CpuSet>,
    nice: Option<i32>,
    batch: bool,
}

impl Wanted {
    fn check(settings: &Settings) -> Result<Self> {
        settings.check()?;
        let cpu = settings.cpu.as_deref().map(cpu_set).transpose()?;
        Ok(Self { cpu, nice: settings.nice, batch: settings.batch })
    }

    /// Applies all settings or none. The nice value comes last, because an unprivileged process
    /// cannot lower it again.
    fn apply(&self, tid: i32) -> Result<()> {
        if self.batch {
            let none = libc::sched_param { sched_priority: 0 };
            // SAFETY: the kernel reads the parameters. If it refuses, the worker runs without them.
            unsafe { libc::sched_setscheduler(tid, libc::SCHED_BATCH, &none) };
        }
        let pid = Pid::from_raw(tid);
        let before = sched_getaffinity(pid);
        if let Some(set) = &self.cpu {
            sched_setaffinity(pid, set).map_err(|e| {
                let (wanted, may) = (cpu_list(&cpus(set)), cpu_set(&[]).map(|set| cpu_list(&cpus(&set))));
                match (e, may) {
                    (rustix::io::Errno::INVAL, Ok(may)) => Error::unsupported(format!(
                        "cannot pin a worker to CPU {wanted}: the daemon may use {may}"
                    )),
                    _ => Error::io(format!("cannot pin a worker to CPU {wanted}"), e.into()),
                }
            })?;
        }
        if let Some(nice) = self.nice
            && let Err(e) = setpriority_process(pid, nice)
        {
            if let (Some(_), Ok(before)) = (&self.cpu, before) {
                let _ = sched_setaffinity(pid, &before);
            }
            let what = format!("cannot set nice {nice} (below 0 needs CAP_SYS_NICE or RLIMIT_NICE)");
            return Err(Error::io(what, e.into()));
        }
        Ok(())
    }
}

/// Returns the CPUs that the daemon may run on, ascending. There is at least one.
pub fn allowed_cpus() -> Vec<usize> {
    let mut allowed = sched_getaffinity(Some(getpid())).map_or(Vec::new(), |set| cpus(&set));
    if allowed.is_empty() {
        allowed.push(0);
    }
    allowed
}

fn cpu_set(wanted: &[usize]) -> Result<CpuSet> {
    if wanted.is_empty() {
        return sched_getaffinity(Some(getpid()))
            .map_err(|e| Error::io("cannot tell on which CPUs the daemon may run", e.into()));
    }
    let mut set = CpuSet::new();
    wanted.iter().for_each(|&cpu| set.set(cpu));
    Ok(set)
}

fn cpus(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

fn state(id: WorkerId, e: &Entry) -> WorkerState {
    let pid = Pid::from_raw(e.tid);
    let cpu = sched_getaffinity(pid).map_or(Vec::new(), |set| cpus(&set));
    let cpu_time_us = cpu_time_us(e.tid);
    let (kernel_of, poll_us, sleeps, requests) = match &e.runner {
        Runner::User { shared } => {
            let (sleeps, requests) = (shared.sleeps.load(Relaxed), shared.requests.load(Relaxed));
            (None, shared.poll_us.load(Relaxed), sleeps, requests)
        }
        Runner::Kernel(worker) => (Some(worker.export().to_owned()), 0, sleeps(e.tid), worker.requests()),
    };
    let times = match &e.runner {
        Runner::User { shared } => shared.phases.times(),
        Runner::Kernel(_) => {
            let busy = Duration::from_micros(cpu_time_us);
            WorkerTimes { busy, polling: Duration::ZERO, sleeping: e.made.elapsed().saturating_sub(busy) }
        }
    };
    WorkerState {
        id,
        name: e.name.clone(),
        kernel_of,
        tid: e.tid,
        cpu,
        nice: getpriority_process(pid).unwrap_or(0),
        poll_us,
        cpu_time_us,
        times,
        sleeps,
        requests,
    }
}

/// Returns how often a thread slept (proc(5), /proc/pid/task/tid/status).
fn sleeps(tid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// Returns a thread's CPU time in µs (proc(5), /proc/pid/task/tid/schedstat: the first field is ns
/// on CPU).
fn cpu_time_us(tid: i32) -> u64 {
    std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))
        .ok()
        .and_then(|s| s.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |ns| ns / 1000)
}
