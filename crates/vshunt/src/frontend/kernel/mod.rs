//! The kernel engine: virtqueues of a front-end handed over to `/dev/vhost-blk`.
//!
//! We stay the vhost-user backend: negotiate, map the guest's memory, answer for the configuration space. What the
//! front-end says of its rings is translated and passed on, and no request comes to us. The device is opened once an
//! export and kept over front-ends that come and go, and so are its workers: tasks of the kernel in our process, in the
//! same list as ours.
//!
//! Called by the session thread (rings, memory) and by control threads (attach, workers, counters). What must never
//! happen: guest memory unmapped while the kernel has a request in flight there; [`KernelQueues::stop`] drains.

mod disk;
mod loop_device;
mod workers;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};
use vhost_kernel::Vhost;
use virtio::features::{VHOST_F_LOG_ALL, bit};
use virtio::mem::{GuestMemory, MAX_REGIONS};
use virtio::vhost::{MemoryRegion, VHOST_BLK_BACKEND_READONLY, VHOST_VRING_F_LOG, VringAddr};

use self::disk::BlockDevice;
pub use self::disk::{Plan, plan};
use self::workers::Tasks;
use crate::error::{Error, Result};
use crate::queue::Bell;
use crate::worker::{QueueStats, Settings, State, WorkerId, Workers};

/// vhost's default of its parameter max_mem_regions.
const REGIONS_DEFAULT: u64 = 64;

/// What a ring is started with. Addresses are ours.
pub struct RingSetup<'a> {
    /// Descriptors, a power of two.
    pub size: u16,
    /// The next available index.
    pub base: u32,
    /// Descriptor table, available ring, used ring.
    pub parts: [*mut u8; 3],
    /// Guest address of the used ring, if writes there are to be logged.
    pub log: Option<u64>,
    /// The guest's kicks.
    pub kick: &'a OwnedFd,
    /// Notifies the guest; none: it polls.
    pub call: Option<Arc<Bell>>,
    /// Tells the front-end that the ring broke.
    pub err: Option<Arc<Bell>>,
}

/// One queue. Its lock is held over a whole start, stop or attach, so that these exclude one another.
struct Slot {
    worker: WorkerId,
    running: bool,
    /// Times it was started, or attached while it ran.
    generation: u32,
    /// The front-end's.
    err: Option<Arc<Bell>>,
}

/// The queues of one export, served by the kernel. Lock order: slots by index, then the workers' list, then `tasks`.
pub struct KernelQueues {
    // Fixed.
    name: String,
    device: Arc<Vhost>,
    features: u64,
    disk: BlockDevice,
    workers: Arc<Workers>,
    /// Rung by the kernel when it finds a ring broken.
    alarms: Vec<OwnedFd>,
    // Any thread's.
    slots: Vec<Mutex<Slot>>,
    tasks: Arc<Tasks>,
    /// Worker and generation, for whoever looks without waiting.
    homes: Vec<AtomicU64>,
}

impl KernelQueues {
    /// Takes the device for an export of `queues` queues, all on its first worker, which is made with it.
    ///
    /// # Errors
    /// The kernel's; a plan that was made before may be outdated.
    pub fn new(
        export: &str,
        plan: Plan,
        queues: u16,
        serial: &str,
        workers: &Arc<Workers>,
    ) -> Result<Arc<Self>> {
        let Plan { device, disk, readonly } = plan;
        let cannot = |e: vhost_kernel::Error| Error::unsupported(format!("export {export}: {e}"));
        let tasks = workers::begin(export, &device, queues, workers)?;
        let first = tasks.first();
        // On an error from here on, dropping it undoes what was done.
        let mut set = Self {
            name: export.to_owned(),
            features: 0,
            device,
            disk,
            workers: workers.clone(),
            alarms: Vec::new(),
            slots: Vec::new(),
            tasks,
            homes: Vec::new(),
        };
        set.features = set.device.features().map_err(cannot)?;
        let flags = if readonly { VHOST_BLK_BACKEND_READONLY } else { 0 };
        set.device.blk_set_backend(set.disk.as_fd(), flags, serial).map_err(cannot)?;
        for _ in 0..queues {
            let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| Error::io(format!("export {export}: no eventfd can be had"), e.into()))?;
            set.alarms.push(alarm);
            set.workers.settle_kernel(first, export)?;
            set.slots.push(Mutex::new(Slot { worker: first, running: false, generation: 0, err: None }));
            set.homes.push(AtomicU64::new(pack_home(first, 0)));
        }
        Ok(Arc::new(set))
    }

    /// The virtio features that the kernel's device has.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Pieces of guest memory at most.
    pub fn regions_max(&self) -> u64 {
        let text = std::fs::read_to_string("/sys/module/vhost/parameters/max_mem_regions");
        let limit = text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(REGIONS_DEFAULT);
        limit.min(MAX_REGIONS as u64)
    }

    /// How many queues.
    pub fn len(&self) -> u16 {
        self.slots.len() as u16
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Counters of a queue, as they are now.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        self.tasks.count(index);
        self.tasks.stats(index)
    }

    /// The worker a queue is attached to, and how often it was attached.
    pub fn home(&self, index: u16) -> (WorkerId, u32) {
        let home = self.homes[usize::from(index)].load(Relaxed);
        ((home >> 32) as WorkerId, home as u32)
    }

    /// Becomes readable when the kernel finds the ring broken.
    pub fn alarm(&self, index: u16) -> &OwnedFd {
        &self.alarms[usize::from(index)]
    }

    fn slot(&self, index: u16) -> MutexGuard<'_, Slot> {
        self.slots[usize::from(index)].lock().expect("no holder panics")
    }

    fn note_home(&self, index: u16, slot: &Slot) {
        self.homes[usize::from(index)].store(pack_home(slot.worker, slot.generation), Relaxed);
    }

    /// Tells the kernel what the guest agreed on, and whether writes to its memory are logged.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn set_features(&self, features: u64) -> std::result::Result<(), String> {
        let known = self.features | bit(VHOST_F_LOG_ALL);
        self.device.set_features(features & known).map_err(|e| e.to_string())
    }

    /// Hands the guest's memory over. No ring runs.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn set_memory(&self, mem: &GuestMemory) -> std::result::Result<(), String> {
        let region = |r: &virtio::mem::Region| MemoryRegion {
            guest_phys_addr: r.guest_addr,
            memory_size: r.size,
            userspace_addr: r.host.addr() as u64,
            ..MemoryRegion::default()
        };
        let regions: Vec<_> = mem.regions().iter().map(region).collect();
        // SAFETY: guest memory, mapped shared, to which we hold raw pointers only.
        unsafe { self.device.set_mem_table(&regions) }.map_err(|e| e.to_string())
    }

    /// Where the kernel marks the pages that it writes.
    ///
    /// # Safety
    /// A mapping that is long enough for the guest's memory, shared, without references to it, for as long as
    /// VHOST_F_LOG_ALL is among the features.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub unsafe fn set_log_base(&self, at: *mut u8) -> std::result::Result<(), String> {
        // SAFETY: the caller's.
        unsafe { self.device.set_log_base(at.addr() as u64) }.map_err(|e| e.to_string())
    }

    /// Starts a ring.
    ///
    /// # Safety
    /// Its parts lie in the guest's memory as it was handed over last, and are as long as its size says.
    ///
    /// # Errors
    /// The kernel's, in words; the ring is as it was.
    pub unsafe fn start(&self, index: u16, setup: RingSetup<'_>) -> std::result::Result<(), String> {
        let mut slot = self.slot(index);
        debug_assert!(!slot.running);
        let at = u32::from(index);
        let started = (|| {
            self.device.set_vring_num(at, setup.size.into())?;
            self.device.set_vring_base(at, setup.base)?;
            // SAFETY: the caller's.
            unsafe { self.device.set_vring_addr(&addresses(at, &setup)) }?;
            self.device.set_vring_call(at, setup.call.as_ref().map(|c| c.as_fd()))?;
            self.device.set_vring_err(at, Some(self.alarm(index).as_fd()))?;
            self.device.set_vring_kick(at, Some(setup.kick.as_fd()))?;
            self.device.blk_set_vring(at, true)
        })();
        started.map_err(|e: vhost_kernel::Error| e.to_string())?;
        slot.running = true;
        slot.err = setup.err;
        slot.generation += 1;
        self.note_home(index, &slot);
        let stats = self.tasks.stats(index);
        stats.size.store(setup.size, Relaxed);
        stats.set_state(State::Running);
        Ok(())
    }

    /// Stops a ring, drained, and tells where it came to. None if it does not run.
    pub fn stop(&self, index: u16) -> Option<u32> {
        let mut slot = self.slot(index);
        if !std::mem::take(&mut slot.running) {
            return None;
        }
        self.rest(index);
        slot.err = None;
        // What was rung for this ring is not for the next.
        self.silence(index);
        self.tasks.stats(index).set_state(State::Stopped);
        match self.device.vring_base(index.into()) {
            Ok(base) => Some(base),
            Err(e) => {
                tracing::error!("queue {}:{index}: where it stands is not known: {e}", self.name);
                Some(0)
            }
        }
    }

    /// Returns when nothing is in flight on a ring. It cannot be told from a ring that cannot be stopped whether the
    /// kernel writes to guest memory, so we end there.
    fn rest(&self, index: u16) {
        if let Err(e) = self.device.blk_set_vring(index.into(), false) {
            tracing::error!("queue {}:{index} cannot be stopped: {e}; ending at once", self.name);
            std::process::abort();
        }
    }

    /// Replaces the descriptor that notifies the guest; rung once, for what the old one missed.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn set_call(&self, index: u16, call: Option<Arc<Bell>>) -> std::result::Result<(), String> {
        let fd = call.as_ref().map(|c| c.as_fd());
        self.device.set_vring_call(index.into(), fd).map_err(|e| e.to_string())?;
        if let Some(call) = call {
            call.ring();
        }
        Ok(())
    }

    /// Replaces the descriptor that tells the front-end of a broken ring.
    pub fn set_err(&self, index: u16, err: Option<Arc<Bell>>) {
        self.slot(index).err = err;
    }

    /// Changes whether a running ring's own writes are logged.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    ///
    /// # Errors
    /// The kernel's, in words.
    pub unsafe fn set_addresses(&self, index: u16, setup: &RingSetup<'_>) -> std::result::Result<(), String> {
        let _slot = self.slot(index);
        // SAFETY: the caller's.
        unsafe { self.device.set_vring_addr(&addresses(index.into(), setup)) }.map_err(|e| e.to_string())
    }

    /// Takes note of an alarm: whether the ring is broken, and was not known to be.
    pub fn is_broken(&self, index: u16) -> bool {
        if !self.silence(index) {
            return false;
        }
        let slot = self.slot(index);
        let stats = self.tasks.stats(index);
        if !slot.running || stats.state() == State::Broken {
            return false;
        }
        stats.set_state(State::Broken);
        if let Some(err) = &slot.err {
            err.ring();
        }
        true
    }

    fn silence(&self, index: u16) -> bool {
        rustix::io::read(self.alarm(index), &mut [0u8; 8]).is_ok()
    }

    /// Attaches a queue to a worker of the kernel, whole or not at all; requests in flight go on.
    ///
    /// # Errors
    /// The queue or the worker is not there, or the worker is not for it.
    pub fn attach(&self, index: u16, worker: WorkerId) -> Result<()> {
        if index >= self.len() {
            let last = self.len() - 1;
            let export = &self.name;
            return Err(Error::not_found(format!(
                "export {export} has no queue {index}; it has 0 to {last}"
            )));
        }
        let mut slot = self.slot(index);
        self.workers.settle_kernel(worker, &self.name)?;
        if let Err(e) = self.tasks.attach(index, worker) {
            self.workers.unsettle(worker);
            return Err(e);
        }
        self.workers.unsettle(slot.worker);
        if slot.running && slot.worker != worker {
            slot.generation += 1;
        }
        slot.worker = worker;
        self.note_home(index, &slot);
        Ok(())
    }

    /// Makes another worker.
    ///
    /// # Errors
    /// The kernel's, and those of the settings.
    pub fn new_worker(&self, name: Option<String>, settings: &Settings) -> Result<WorkerId> {
        workers::make(&self.tasks, &self.workers, name, settings)
    }

    /// Keeps a worker on one CPU.
    ///
    /// # Errors
    /// The system's.
    pub fn pin(&self, worker: WorkerId, cpu: usize) -> Result<()> {
        self.workers.set(worker, None, &Settings { cpu: Some(vec![cpu]), ..Settings::default() })
    }

    /// The worker that came with the device.
    pub fn first_worker(&self) -> WorkerId {
        self.tasks.first()
    }

    /// Calls a function while nothing is in flight on any queue.
    pub(super) fn with_all_drained<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        let slots: Vec<_> = (0..self.len()).map(|i| self.slot(i)).collect();
        let running = || slots.iter().zip(0u16..).filter(|(slot, _)| slot.running);
        running().for_each(|(_, i)| self.rest(i));
        let result = f();
        let learnt = self.disk.learn_size();
        for (_, i) in running() {
            if let Err(e) = self.device.blk_set_vring(i.into(), true) {
                tracing::error!("queue {}:{i} cannot go on: {e}", self.name);
                self.tasks.stats(i).set_state(State::Broken);
            }
        }
        learnt.map(|()| result)
    }

    /// The image has another size.
    pub fn resized(&self) -> Result<()> {
        self.disk.learn_size()
    }
}

impl Drop for KernelQueues {
    fn drop(&mut self) {
        for slot in &self.slots {
            let slot = slot.lock().expect("no holder panics");
            debug_assert!(!slot.running, "stopped before it is dropped");
            self.workers.unsettle(slot.worker);
        }
        // The device goes with the last holder, who may be a control thread that looks at a worker.
        if let Err(e) = self.device.blk_clear_backend() {
            tracing::warn!("export {}: {e}", self.name);
        }
        self.workers.forget(&self.name);
    }
}

fn addresses(index: u32, setup: &RingSetup<'_>) -> VringAddr {
    let [desc, driver, device] = setup.parts.map(|p| p.addr() as u64);
    VringAddr {
        index,
        flags: u32::from(setup.log.is_some()) << VHOST_VRING_F_LOG,
        desc_user_addr: desc,
        used_user_addr: device,
        avail_user_addr: driver,
        log_guest_addr: setup.log.unwrap_or(0),
    }
}

fn pack_home(worker: WorkerId, generation: u32) -> u64 {
    u64::from(worker) << 32 | u64::from(generation)
}
