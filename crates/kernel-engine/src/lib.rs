//! The kernel engine: virtqueues of a front end that are handed over to `/dev/vhost-blk` or `/dev/vhost-net`.
//!
//! This process stays the vhost-user back end: it negotiates, maps the guest's memory and answers for the configuration space.
//! What the front end says of its rings is translated and passed on, and no request comes to this process. An export opens its
//! devices once and keeps them over front ends that come and go. The same holds for the workers: they are tasks of the kernel in
//! this process, and in the same list as the workers of this process.
//!
//! A queue is what users see and attach: a ring of a disk, or the two rings of a network's queue pair. Rings are counted as
//! the front end counts them. [`RingServer`] is what a session asks for; control threads attach queues, make workers and read
//! counters.
//!
//! What must never happen: guest memory unmapped while the kernel has a request in flight there. [`RingServer::stop`] drains.
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

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use vshunt_engine::{Placement, QueueStats, Settings, State, WorkerId, Workers, lock_until};
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
/// Lock order: slots by index, then the lock of calls that wait for a disk, then the workers' list, then what a disk's workers
/// keep. The session thread takes the first two without a limit, since it has nothing else to do. A slot or the lock of calls
/// may be held for as long as a disk does not answer, so control threads take them with a limit.
pub struct KernelQueues {
    // Fixed.
    name: String,
    device: KernelDevice,
    features: u64,
    workers: Arc<Workers>,
    /// The kernel signals one when it finds the ring broken.
    alarms: Vec<OwnedFd>,
    // Any thread's.
    slots: Vec<Mutex<RingSlot>>,
    placement: Placement,
}

impl KernelQueues {
    /// Takes the device for a disk's export with `queues` queues. All of them are on its first worker, which is made with it.
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

    /// Takes the devices for a network's export, one for each queue pair, each with its worker.
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
        // On an error from here on, dropping it undoes what was done.
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
                let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                    .map_err(|e| Error::io(format!("export {export}: no eventfd can be had"), e.into()))?;
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

    /// The virtio features that the kernel's device has.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// How many queues.
    pub fn len(&self) -> u16 {
        self.placement.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.placement.is_empty()
    }

    /// Counters of a queue, as they are now.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        self.device.count(index);
        self.device.stats(index)
    }

    /// The worker that a queue is attached to, and how often the queue was attached.
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        self.placement.get(index)
    }

    /// Attaches a queue to a worker of the kernel, whole or not at all. Requests in flight continue.
    ///
    /// # Errors
    /// There is no such queue or worker, or the worker is not for this queue. [`Busy`](vshunt_types::error::Kind::Busy): a queue of
    /// this export is about to stop, and waits for its disk longer than `timeout`.
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

    /// Keeps a worker on one CPU.
    ///
    /// # Errors
    /// The system's.
    pub fn pin(&self, worker: WorkerId, cpu: usize) -> Result<()> {
        self.workers.set(worker, None, &Settings { cpu: Some(vec![cpu]), ..Settings::default() })
    }

    /// The worker that a queue began on.
    pub fn first_worker(&self, index: u16) -> WorkerId {
        self.device.first_worker(index)
    }

    /// Calls a function while nothing is in flight on any queue. Waits until `until` for other threads that stop a queue; the
    /// wait for requests in flight has no limit.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): other threads were not ready at `until`, and the function was not called. The
    /// system's, if the disk's new size is not known.
    pub fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        let rings = 0..self.slots.len() as u16;
        let slots = rings.map(|ring| self.slot_until(ring, until)).collect::<Result<Vec<_>>>()?;
        let _calls = self.disk_calls_until(until)?;
        let running = || slots.iter().zip(0u16..).filter(|(slot, _)| slot.running);
        running().for_each(|(_, ring)| self.drain(ring));
        let result = f();
        let learnt = self.device.learn_size();
        // A broken ring stands until its guest resets it.
        let broken = |ring| self.device.stats(self.queue_index(ring)).state() == State::Broken;
        for (_, ring) in running().filter(|(_, ring)| !broken(*ring)) {
            if let Err(e) = self.device.run(ring, true) {
                tracing::error!("{}: ring {ring} cannot continue: {e}", self.name);
                // As if the kernel had found the ring broken: the session then reports it.
                self.signal_alarm(ring);
            }
        }
        learnt.map(|()| result)
    }

    /// Takes note that the image has another size.
    ///
    /// # Errors
    /// The system's.
    pub fn resized(&self) -> Result<()> {
        self.device.learn_size()
    }

    /// The queue of a ring.
    fn queue_index(&self, ring: u16) -> u16 {
        ring / self.device.rings_per_queue()
    }

    /// Whether a ring is the first one of its queue, which stands for the queue.
    fn is_first(&self, ring: u16) -> bool {
        ring.is_multiple_of(self.device.rings_per_queue())
    }

    fn slot(&self, ring: u16) -> MutexGuard<'_, RingSlot> {
        self.slots[usize::from(ring)].locked()
    }

    /// A slot for a control thread, which gives up at `until`. The error names the ring.
    fn slot_until(&self, ring: u16, until: Instant) -> Result<MutexGuard<'_, RingSlot>> {
        lock_until(&self.slots[usize::from(ring)], until).ok_or_else(|| {
            Error::busy(format!(
                "queue {}:{} waits for its disk; try again when the disk answers",
                self.name,
                self.queue_index(ring)
            ))
        })
    }

    /// The lock of calls that may wait for the disk.
    fn disk_calls(&self) -> Option<MutexGuard<'_, ()>> {
        self.device.disk_calls().map(|lock| lock.locked())
    }

    /// The lock of calls that may wait for the disk, for a control thread, which gives up at `until`. The error names the export.
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

    /// Returns when nothing is in flight on a ring. The caller holds the lock of calls that may wait for the disk.
    ///
    /// If the ring cannot be stopped, nobody knows whether the kernel still writes to guest memory. The process ends then.
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
