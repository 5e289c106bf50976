//! The kernel engine: virtqueues of a front end that `/dev/vhost-blk` or `/dev/vhost-net` serves.
//!
//! This process remains the vhost-user back end: it negotiates, maps the guest's memory and serves
//! the configuration space. It translates the front end's messages about rings and passes them to
//! the kernel. No request reaches this process. An export opens its devices once and keeps them
//! while front ends connect and disconnect. It keeps the workers, too. They are tasks of the kernel
//! in this process, and in the same list as the other workers.
//!
//! A queue is the unit that users see and attach: a ring of a disk, or the two rings of a network's
//! queue pair. Rings have the front end's numbers. A session uses [`RingServer`]. Control threads
//! attach queues, make workers and read counters.
//!
//! Guest memory must stay mapped while the kernel has a request in flight there.
//! [`RingServer::stop`] drains.
//!
//! ```no_run
//! use vshunt_block::Disk;
//! use vshunt_engine::Workers;
//! use vshunt_kernel_engine::{KernelQueues, plan};
//! use vshunt_types::spec::{DiskSpec, ExportSpec};
//! use vshunt_virtqueue::RingServer;
//!
//! let disk = Disk::open(&DiskSpec { name: "d".into(), file: Some("/dev/vg/d".into()), ..Default::default() })?;
//! let export = ExportSpec { name: "vm".into(), disk: "d".into(), ..Default::default() };
//! let plan = plan(&export, &disk, 4).map_err(vshunt_types::error::Error::unsupported)?;
//! let queues = KernelQueues::new("vm", plan, 4, "serial", &Workers::new(0)?)?;
//! assert_eq!((queues.len(), queues.rings()), (4, 4));
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

mod device;
mod disk;
mod inflight;
mod loop_device;
mod net;
mod rings;
mod workers;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vshunt_engine::{EventFd, Placement, QueueStats, Settings, State, WorkerId, Workers, lock_until};
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;
#[cfg(doc)]
use vshunt_virtqueue::RingServer;

use self::device::KernelDevice;
use self::disk::ServedDisk;
pub use self::disk::{DiskPlan, plan};
use self::net::ServedNet;
pub use self::net::{NetPlan, plan_net};
use self::rings::RingSlot;
use self::workers::CONTROL_WAIT_MAX;

/// The queues of one export, served by the kernel.
///
/// Lock order: slots by index, then the lock of calls that wait for a disk, then the workers' list,
/// then the list of a disk's workers. The session thread takes the first two without a limit,
/// because it has no other task. A slot or the lock of calls may be held for as long as a disk does
/// not answer, so control threads take them with a limit.
pub struct KernelQueues {
    // Constant.
    name: String,
    device: KernelDevice,
    features: u64,
    workers: Arc<Workers>,
    /// One eventfd for each ring. The kernel signals it when it finds the ring broken.
    alarms: Vec<EventFd>,
    // Used by any thread.
    slots: Vec<Mutex<RingSlot>>,
    placement: Placement,
}

impl KernelQueues {
    /// Sets up the device for a disk's export with `queues` queues. All of them are on its first
    /// worker, which is made with it.
    ///
    /// # Errors
    /// The kernel's. The plan may be outdated.
    pub fn new(
        export: &str,
        plan: DiskPlan,
        queues: u16,
        serial: &str,
        workers: &Arc<Workers>,
    ) -> Result<Arc<Self>> {
        let served = ServedDisk::new(export, plan, queues, serial, workers)?;
        Self::with_device(export, KernelDevice::Disk(served), queues, workers)
    }

    /// Sets up the devices for a network's export, one for each queue pair, each with its worker.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new_net(export: &str, plan: NetPlan, workers: &Arc<Workers>) -> Result<Arc<Self>> {
        let pairs = plan.pairs();
        let served = ServedNet::new(export, plan, workers)?;
        Self::with_device(export, KernelDevice::Net(served), pairs, workers)
    }

    fn with_device(
        export: &str,
        device: KernelDevice,
        queues: u16,
        workers: &Arc<Workers>,
    ) -> Result<Arc<Self>> {
        // On an error from here on, dropping the set undoes the steps so far.
        let mut set = Self {
            name: export.to_owned(),
            device,
            features: 0,
            workers: workers.clone(),
            alarms: Vec::new(),
            slots: Vec::new(),
            placement: Placement::default(),
        };
        let features = set.device.features();
        set.features = features.map_err(|e| Error::unsupported(format!("export {export}: {e}")))?;
        for queue in 0..queues {
            let worker = set.device.first_worker(queue);
            for ring in 0..set.device.rings_per_queue() {
                let alarm = EventFd::make()
                    .map_err(|e| Error::io(format!("export {export}: no eventfd can be had"), e))?;
                set.alarms.push(alarm);
                if ring == 0 {
                    set.workers.reserve_kernel(worker, export)?;
                }
                set.slots.push(Mutex::new(RingSlot::new(worker)));
            }
            set.placement.push(worker);
        }
        Ok(Arc::new(set))
    }

    /// Returns the virtio features of the kernel's device.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the number of queues.
    pub fn len(&self) -> u16 {
        self.placement.len()
    }

    /// Returns whether there are no queues.
    pub fn is_empty(&self) -> bool {
        self.placement.is_empty()
    }

    /// Returns the counters of a queue, updated.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        self.device.count(index);
        self.device.stats(index)
    }

    /// Returns the worker that a queue is attached to, and how often the queue was attached.
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        self.placement.get(index)
    }

    /// Attaches a queue to a worker of the kernel, or leaves everything as it is. Requests in
    /// flight continue.
    ///
    /// # Errors
    /// There is no such queue or worker, or the worker is not for this queue.
    /// [`Busy`](vshunt_types::error::Kind::Busy): a queue of this export is about to stop, and
    /// waits for its disk longer than `timeout`.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        self.placement.check(&self.name, index)?;
        let ring = index * self.device.rings_per_queue();
        let until = Instant::now() + timeout;
        let mut slot = self.slot_until(ring, until)?;
        let _calls = self.disk_calls_until(until)?;
        self.workers.reserve_kernel(worker, &self.name)?;
        if let Err(e) = self.device.attach(index, worker) {
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
        let _calls = self.disk_calls_until(Instant::now() + CONTROL_WAIT_MAX)?;
        self.device.new_worker(&self.workers, name, settings)
    }

    /// Pins a worker to one CPU.
    ///
    /// # Errors
    /// The system's.
    pub fn pin(&self, worker: WorkerId, cpu: usize) -> Result<()> {
        self.workers.set(worker, None, &Settings { cpu: Some(vec![cpu]), ..Settings::default() })
    }

    /// Returns the worker that a queue started on.
    pub fn first_worker(&self, index: u16) -> WorkerId {
        self.device.first_worker(index)
    }

    /// Calls a function while nothing is in flight on any queue. Waits until `until` for other
    /// threads that stop a queue; the wait for requests in flight has no limit.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): other threads were not ready at `until`, and the
    /// function was not called. The system's, if the disk's new size is not known.
    pub fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        let rings = 0..self.slots.len() as u16;
        let slots = rings.map(|ring| self.slot_until(ring, until)).collect::<Result<Vec<_>>>()?;
        let _calls = self.disk_calls_until(until)?;
        let running = || slots.iter().zip(0u16..).filter(|(slot, _)| slot.running);
        running().for_each(|(_, ring)| self.drain(ring));
        let result = f();
        let learnt = self.device.reload_size();
        // A broken ring stays stopped until its guest resets it.
        let broken = |ring| self.device.stats(self.queue_index(ring)).state() == State::Broken;
        for (_, ring) in running().filter(|(_, ring)| !broken(*ring)) {
            if let Err(e) = self.device.run(ring, true) {
                tracing::error!("{}: ring {ring} cannot continue: {e}", self.name);
                // The alarm is signalled as if the kernel had found the ring broken. The session
                // then reports it.
                self.signal_alarm(ring);
            }
        }
        learnt.map(|()| result)
    }

    /// Reads the size of the image again.
    ///
    /// # Errors
    /// The system's.
    pub fn resized(&self) -> Result<()> {
        self.device.reload_size()
    }

    /// Returns the queue of a ring.
    fn queue_index(&self, ring: u16) -> u16 {
        ring / self.device.rings_per_queue()
    }

    /// Returns whether a ring is the first one of its queue. That ring stands for the queue.
    fn is_first(&self, ring: u16) -> bool {
        ring.is_multiple_of(self.device.rings_per_queue())
    }

    fn slot(&self, ring: u16) -> MutexGuard<'_, RingSlot> {
        self.slots[usize::from(ring)].locked()
    }

    /// Locks a slot for a control thread, which gives up at `until`. The error names the ring.
    fn slot_until(&self, ring: u16, until: Instant) -> Result<MutexGuard<'_, RingSlot>> {
        lock_until(&self.slots[usize::from(ring)], until).ok_or_else(|| {
            Error::busy(format!(
                "queue {}:{} waits for its disk; try again when the disk answers",
                self.name,
                self.queue_index(ring)
            ))
        })
    }

    /// Takes the lock of calls that may wait for the disk.
    fn disk_calls(&self) -> Option<MutexGuard<'_, ()>> {
        self.device.disk_calls().map(|lock| lock.locked())
    }

    /// Takes the lock of calls that may wait for the disk, for a control thread, which gives up at
    /// `until`. The error names the export.
    fn disk_calls_until(&self, until: Instant) -> Result<Option<MutexGuard<'_, ()>>> {
        let Some(lock) = self.device.disk_calls() else { return Ok(None) };
        lock_until(lock, until).map(Some).ok_or_else(|| {
            Error::busy(format!(
                "a queue of export {} waits for its disk; try again when the disk answers",
                self.name
            ))
        })
    }

    fn note_placement(&self, ring: u16, slot: &RingSlot) {
        self.placement.note(self.queue_index(ring), slot.worker, slot.generation);
    }

    /// Stops a ring, and returns when nothing of it is in flight. The caller holds the lock of
    /// calls that may wait for the disk.
    ///
    /// If the ring cannot be stopped, the kernel may still write to guest memory. The process then
    /// ends.
    fn drain(&self, ring: u16) {
        if let Err(e) = self.device.run(ring, false) {
            tracing::error!("ring {ring} of {} cannot be stopped: {e}; ending at once", self.name);
            std::process::abort();
        }
    }
}

impl Drop for KernelQueues {
    fn drop(&mut self) {
        for (slot, ring) in self.slots.iter().zip(0u16..) {
            let slot = slot.locked();
            debug_assert!(!slot.running, "stopped before it is dropped");
            if self.is_first(ring) {
                self.workers.release(slot.worker);
            }
        }
        self.workers.forget(&self.name);
    }
}
