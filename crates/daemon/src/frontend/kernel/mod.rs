//! The kernel engine: virtqueues of a front-end handed over to `/dev/vhost-blk` or `/dev/vhost-net`.
//!
//! We stay the vhost-user backend: negotiate, map the guest's memory, answer for the configuration space. What the
//! front-end says of its rings is translated and passed on, and no request comes to us. Devices are opened once an
//! export and kept over front-ends that come and go, and so are their workers: tasks of the kernel in our process, in the
//! same list as ours.
//!
//! A queue is what users see and attach: a ring of a disk, or the two rings of a network's queue pair. Rings are counted as
//! the front-end counts them.
//!
//! Called by the session thread (rings, memory) and by control threads (attach, workers, counters). What must never
//! happen: guest memory unmapped while the kernel has a request in flight there; [`KernelQueues::stop`] drains.

mod behind;
mod disk;
mod inflight;
mod loop_device;
mod net;
mod ring;
mod workers;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use rustix::event::{EventfdFlags, eventfd};
use virtio::features::{VHOST_F_LOG_ALL, bit};
use virtio::mem::{GuestMemory, MAX_REGIONS};
use virtio::vhost::MemoryRegion;
use vshunt_engine::EventFd;
use vshunt_engine::{Placement, QueueStats, Settings, State, WorkerId, Workers, lock_until};
use vshunt_types::error::{Error, Result};

use self::behind::Behind;
use self::disk::Served;
pub use self::disk::{Plan, plan};
pub use self::inflight::Tracking;
use self::net::Card;
pub use self::net::{NetPlan, plan_net};
pub use self::ring::RingSetup;
use self::ring::{Slot, addresses};
use self::workers::PATIENCE;

/// vhost's default of its parameter max_mem_regions.
const REGIONS_DEFAULT: u64 = 64;

/// The queues of one export, served by the kernel. Lock order: slots by index, then the turn of calls that wait for a disk,
/// then the workers' list, then what a disk's workers keep.
///
/// The session thread takes slots and turn without a limit, since it has nothing else to do; a slot or the turn may be held
/// for as long as a disk does not answer, so that control threads take them with one.
pub struct KernelQueues {
    // Fixed.
    name: String,
    behind: Behind,
    features: u64,
    workers: Arc<Workers>,
    /// Rung by the kernel when it finds a ring broken.
    alarms: Vec<OwnedFd>,
    // Any thread's.
    slots: Vec<Mutex<Slot>>,
    placement: Placement,
}

impl KernelQueues {
    /// Takes the device for a disk's export of `queues` queues, all on its first worker, which is made with it.
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
        let served = Served::new(export, plan, queues, serial, workers)?;
        Self::make(export, Behind::Disk(served), queues, workers)
    }

    /// Takes the devices for a network's export, one for each queue pair, each with its worker.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new_net(export: &str, plan: NetPlan, workers: &Arc<Workers>) -> Result<Arc<Self>> {
        let pairs = plan.pairs();
        Self::make(export, Behind::Net(Card::new(export, plan, workers)?), pairs, workers)
    }

    fn make(export: &str, behind: Behind, queues: u16, workers: &Arc<Workers>) -> Result<Arc<Self>> {
        // On an error from here on, dropping it undoes what was done.
        let mut set = Self {
            name: export.to_owned(),
            behind,
            features: 0,
            workers: workers.clone(),
            alarms: Vec::new(),
            slots: Vec::new(),
            placement: Placement::default(),
        };
        let features = set.behind.features();
        set.features = features.map_err(|e| Error::unsupported(format!("export {export}: {e}")))?;
        for queue in 0..queues {
            let worker = set.behind.first_worker(queue);
            for ring in 0..set.behind.rings_a_queue() {
                let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                    .map_err(|e| Error::io(format!("export {export}: no eventfd can be had"), e.into()))?;
                set.alarms.push(alarm);
                if ring == 0 {
                    set.workers.reserve_kernel(worker, export)?;
                }
                set.slots.push(Mutex::new(Slot { worker, running: false, generation: 0, tracking: None }));
            }
            set.placement.push(worker);
        }
        Ok(Arc::new(set))
    }

    /// The virtio features that the kernel's device has.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether rings can note what they have in flight, so that another daemon goes on with it.
    pub fn tracks(&self) -> bool {
        self.behind.tracks()
    }

    /// Pieces of guest memory at most.
    pub fn regions_max(&self) -> u64 {
        let text = std::fs::read_to_string("/sys/module/vhost/parameters/max_mem_regions");
        let limit = text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(REGIONS_DEFAULT);
        limit.min(MAX_REGIONS as u64)
    }

    /// How many queues.
    pub fn len(&self) -> u16 {
        self.placement.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.placement.is_empty()
    }

    /// How many rings, as the front-end counts them.
    pub fn rings(&self) -> u16 {
        self.slots.len() as u16
    }

    /// The queue that a ring is of.
    pub fn queue_of(&self, ring: u16) -> u16 {
        ring / self.behind.rings_a_queue()
    }

    /// Whether a ring is the one that says how its queue is.
    fn leads(&self, ring: u16) -> bool {
        ring.is_multiple_of(self.behind.rings_a_queue())
    }

    /// Counters of a queue, as they are now.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        self.behind.count(index);
        self.behind.stats(index)
    }

    /// The worker a queue is attached to, and how often it was attached.
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        self.placement.get(index)
    }

    /// Becomes readable when the kernel finds the ring broken.
    pub fn alarm(&self, ring: u16) -> &OwnedFd {
        &self.alarms[usize::from(ring)]
    }

    fn slot(&self, ring: u16) -> MutexGuard<'_, Slot> {
        self.slots[usize::from(ring)].locked()
    }

    /// A slot for a control thread, which gives up at `until`. The error names the ring.
    fn slot_until(&self, ring: u16, until: Instant) -> Result<MutexGuard<'_, Slot>> {
        lock_until(&self.slots[usize::from(ring)], until).ok_or_else(|| {
            Error::busy(format!(
                "queue {}:{} waits for its disk; try again when the disk answers",
                self.name,
                self.queue_of(ring)
            ))
        })
    }

    /// The turn for a call that may wait for the disk.
    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.behind.turn().map(|turn| turn.locked())
    }

    /// The turn for a control thread, which gives up at `until`. The error names the export.
    fn turn_until(&self, until: Instant) -> Result<Option<MutexGuard<'_, ()>>> {
        let Some(turn) = self.behind.turn() else { return Ok(None) };
        lock_until(turn, until).map(Some).ok_or_else(|| {
            Error::busy(format!(
                "a queue of export {} waits for its disk; try again when the disk answers",
                self.name
            ))
        })
    }

    fn note_placement(&self, ring: u16, slot: &Slot) {
        self.placement.note(self.queue_of(ring), slot.worker, slot.generation);
    }

    /// Tells the kernel what the guest agreed on, and whether writes to its memory are logged: only with a log that has
    /// bits for all of it, since the kernel looks for no end.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn set_features(&self, features: u64) -> std::result::Result<(), String> {
        let known = self.features | bit(VHOST_F_LOG_ALL);
        self.behind.agreed(features)?;
        self.with_devices(|device| device.set_features(features & known))
    }

    fn with_devices(
        &self,
        call: impl Fn(&vhost_kernel::Vhost) -> vhost_kernel::Result<()>,
    ) -> std::result::Result<(), String> {
        // Switching the log waits for what is in flight.
        let _turn = self.turn();
        self.behind.devices().into_iter().try_for_each(|device| call(device).map_err(|e| e.to_string()))
    }

    /// Hands the guest's memory over in place of what it has, `old`. No ring runs.
    ///
    /// # Errors
    /// The kernel's, in words; it has the old one then.
    pub fn set_memory(&self, mem: &GuestMemory, old: &GuestMemory) -> std::result::Result<(), String> {
        self.tell_memory(mem).inspect_err(|_| {
            // Of several devices some may have taken it.
            if let Err(e) = self.tell_memory(old) {
                tracing::error!("{}: the kernel does not take the memory back that it had: {e}", self.name);
            }
        })
    }

    fn tell_memory(&self, mem: &GuestMemory) -> std::result::Result<(), String> {
        let region = |r: &virtio::mem::Region| MemoryRegion {
            guest_phys_addr: r.guest_addr,
            memory_size: r.size,
            userspace_addr: r.host.addr() as u64,
            ..MemoryRegion::default()
        };
        let regions: Vec<_> = mem.regions().iter().map(region).collect();
        // SAFETY: guest memory, mapped shared, to which we hold raw pointers only.
        self.with_devices(|device| unsafe { device.set_mem_table(&regions) })
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
        self.with_devices(|device| unsafe { device.set_log_base(at.addr() as u64) })
    }

    /// Starts a ring.
    ///
    /// # Safety
    /// Its parts lie in the guest's memory as it was handed over last, and are as long as its size says; its tracking is of a
    /// region that nobody else writes to while it runs.
    ///
    /// # Errors
    /// The kernel's, in words; the ring is as it was.
    pub unsafe fn start(&self, ring: u16, setup: RingSetup<'_>) -> std::result::Result<(), String> {
        let mut slot = self.slot(ring);
        debug_assert!(!slot.running);
        let (device, at) = self.behind.of(ring);
        let told = (|| {
            device.set_vring_num(at, setup.size.into())?;
            device.set_vring_base(at, setup.base)?;
            // SAFETY: the caller's.
            unsafe { device.set_vring_addr(&addresses(at, &setup)) }?;
            device.set_vring_call(at, setup.call.as_ref().map(|c| c.as_fd()))?;
            device.set_vring_err(at, Some(self.alarm(ring).as_fd()))?;
            device.set_vring_kick(at, Some(setup.kick.as_fd()))?;
            // SAFETY: the caller's; the slot has it for as long as the ring runs.
            unsafe { self.behind.track(ring, setup.tracking.as_ref()) }
        })();
        told.map_err(|e: vhost_kernel::Error| e.to_string())?;
        self.behind.open(ring, true).map_err(|e| e.to_string())?;
        if let Err(e) = self.behind.run(ring, true) {
            let _ = self.behind.open(ring, false);
            return Err(e.to_string());
        }
        slot.running = true;
        slot.tracking = setup.tracking;
        slot.generation += 1;
        if self.leads(ring) {
            self.note_placement(ring, &slot);
            let stats = self.behind.stats(self.queue_of(ring));
            stats.size.store(setup.size, Relaxed);
            stats.set_state(State::Running);
        }
        Ok(())
    }

    /// Stops a ring, drained, and tells where it came to. None if it does not run.
    pub fn stop(&self, ring: u16) -> Option<u32> {
        let mut slot = self.slot(ring);
        if !std::mem::take(&mut slot.running) {
            return None;
        }
        let turn = self.turn();
        self.rest(ring);
        drop(turn);
        slot.tracking = None;
        // What was signalled for this ring is not for the next.
        self.silence(ring);
        if self.leads(ring) {
            self.behind.stats(self.queue_of(ring)).set_state(State::Stopped);
        }
        let (device, at) = self.behind.of(ring);
        match device.vring_base(at) {
            Ok(base) => Some(base),
            Err(e) => {
                tracing::error!("{}: where ring {ring} stands is not known: {e}", self.name);
                Some(0)
            }
        }
    }

    /// A ring that does not run is not to start again soon: nothing is to wait for it. Idempotent.
    pub fn close(&self, ring: u16) {
        let slot = self.slot(ring);
        if slot.running {
            return;
        }
        if let Err(e) = self.behind.open(ring, false) {
            tracing::warn!("{}: {e}", self.name);
        }
        // Kicks of a guest that stopped it wake nobody, and nothing of a front-end that went is kept open.
        let (device, at) = self.behind.of(ring);
        for dropped in
            [device.set_vring_kick(at, None), device.set_vring_call(at, None), device.set_vring_err(at, None)]
        {
            if let Err(e) = dropped {
                tracing::debug!("{}: ring {ring}: {e}", self.name);
            }
        }
    }

    /// Returns when nothing is in flight on a ring. The caller has the turn. It cannot be told from a ring that cannot be stopped whether the
    /// kernel writes to guest memory, so we end there.
    fn rest(&self, ring: u16) {
        if let Err(e) = self.behind.run(ring, false) {
            tracing::error!("ring {ring} of {} cannot be stopped: {e}; ending at once", self.name);
            std::process::abort();
        }
    }

    /// Replaces the descriptor that notifies the guest; signalled once, for what the old one missed.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn set_call(&self, ring: u16, call: Option<Arc<EventFd>>) -> std::result::Result<(), String> {
        let fd = call.as_ref().map(|c| c.as_fd());
        let (device, at) = self.behind.of(ring);
        device.set_vring_call(at, fd).map_err(|e| e.to_string())?;
        if let Some(call) = call {
            call.signal();
        }
        Ok(())
    }

    /// Changes whether a running ring's own writes are logged.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    ///
    /// # Errors
    /// The kernel's, in words.
    pub unsafe fn set_addresses(&self, ring: u16, setup: &RingSetup<'_>) -> std::result::Result<(), String> {
        let _slot = self.slot(ring);
        let (device, at) = self.behind.of(ring);
        // SAFETY: the caller's.
        unsafe { device.set_vring_addr(&addresses(at, setup)) }.map_err(|e| e.to_string())
    }

    /// Takes note of an alarm: whether the ring is broken, and was not known to be.
    pub fn is_broken(&self, ring: u16) -> bool {
        if !self.silence(ring) {
            return false;
        }
        let slot = self.slot(ring);
        let stats = self.behind.stats(self.queue_of(ring));
        if !slot.running || stats.state() == State::Broken {
            return false;
        }
        stats.set_state(State::Broken);
        true
    }

    fn silence(&self, ring: u16) -> bool {
        rustix::io::read(self.alarm(ring), &mut [0u8; 8]).is_ok()
    }

    /// Attaches a queue to a worker of the kernel, whole or not at all; requests in flight go on.
    ///
    /// # Errors
    /// The queue or the worker is not there, or the worker is not for it. [`Busy`](vshunt_types::error::Kind::Busy): a queue of this
    /// export is about to stop, and waits for its disk longer than `timeout`.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        self.placement.check(&self.name, index)?;
        let ring = index * self.behind.rings_a_queue();
        let until = Instant::now() + timeout;
        let mut slot = self.slot_until(ring, until)?;
        let _turn = self.turn_until(until)?;
        self.workers.reserve_kernel(worker, &self.name)?;
        if let Err(e) = self.behind.attach(index, worker) {
            self.workers.release(worker);
            return Err(e);
        }
        self.workers.release(slot.worker);
        if slot.running && slot.worker != worker {
            slot.generation += 1;
        }
        slot.worker = worker;
        self.note_placement(ring, &slot);
        Ok(())
    }

    /// Makes another worker.
    ///
    /// # Errors
    /// The kernel's, and those of the settings.
    pub fn new_worker(&self, name: Option<String>, settings: &Settings) -> Result<WorkerId> {
        let _turn = self.turn_until(Instant::now() + PATIENCE)?;
        self.behind.new_worker(&self.workers, name, settings)
    }

    /// Keeps a worker on one CPU.
    ///
    /// # Errors
    /// The system's.
    pub fn pin(&self, worker: WorkerId, cpu: usize) -> Result<()> {
        self.workers.set(worker, None, &Settings { cpu: Some(vec![cpu]), ..Settings::default() })
    }

    /// The worker that a queue began on.
    pub fn first_worker(&self, index: u16) -> WorkerId {
        self.behind.first_worker(index)
    }

    /// Calls a function while nothing is in flight on any queue. Waits for other threads that stop a queue until `until`; the wait
    /// for requests in flight has no limit.
    pub(super) fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        let slots = (0..self.rings()).map(|i| self.slot_until(i, until)).collect::<Result<Vec<_>>>()?;
        let _turn = self.turn_until(until)?;
        let running = || slots.iter().zip(0u16..).filter(|(slot, _)| slot.running);
        running().for_each(|(_, i)| self.rest(i));
        let result = f();
        let learnt = self.behind.learn_size();
        // One that broke stands until its guest resets it.
        let broken = |i| self.behind.stats(self.queue_of(i)).state() == State::Broken;
        for (_, i) in running().filter(|(_, i)| !broken(*i)) {
            if let Err(e) = self.behind.run(i, true) {
                tracing::error!("ring {i} of {} cannot go on: {e}", self.name);
                // As if the kernel had said so: the session tells all who want to know.
                let _ = rustix::io::write(self.alarm(i), &1u64.to_ne_bytes());
            }
        }
        learnt.map(|()| result)
    }

    /// The image has another size.
    pub fn resized(&self) -> Result<()> {
        self.behind.learn_size()
    }
}

impl Drop for KernelQueues {
    fn drop(&mut self) {
        for (slot, ring) in self.slots.iter().zip(0u16..) {
            let slot = slot.locked();
            debug_assert!(!slot.running, "stopped before it is dropped");
            if self.leads(ring) {
                self.workers.release(slot.worker);
            }
        }
        self.workers.forget(&self.name);
    }
}
