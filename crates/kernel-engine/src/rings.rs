//! The rings of the kernel as a session uses them: memory, features, starts and stops.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use vhost_kernel::Vhost;
use virtio::features::{VHOST_F_LOG_ALL, bit};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, MAX_REGIONS};
use virtio::ring::UsedLog;
use virtio::vhost::{MemoryRegion, VHOST_VRING_F_LOG, VringAddr};
use vshunt_engine::{EventFd, QueueStats, State, WorkerId};
use vshunt_virtqueue::{RingAreas, RingServer, RingStart};

use super::KernelQueues;
use super::inflight::TrackedRing;

/// Default of vhost's parameter max_mem_regions.
const REGIONS_DEFAULT: u64 = 64;

/// One ring. The lock is held for a whole start, stop or attach, so that these exclude one another.
/// The first ring of a queue contains the queue's worker.
pub(super) struct RingSlot {
    pub(super) worker: WorkerId,
    pub(super) running: bool,
    /// How often it was started, or attached while it ran.
    pub(super) generation: u32,
    /// The memory that the kernel has addresses of while the ring runs.
    tracked: Option<TrackedRing>,
}

impl RingSlot {
    /// Makes a ring that does not run.
    pub(super) fn new(worker: WorkerId) -> Self {
        Self { worker, running: false, generation: 0, tracked: None }
    }
}

/// Returns a ring's addresses as the kernel takes them.
fn addresses(index: u32, areas: &RingAreas) -> VringAddr {
    let [desc, driver, device] =
        [areas.addrs.desc, areas.addrs.driver, areas.addrs.device].map(|at| at.addr() as u64);
    VringAddr {
        index,
        flags: u32::from(areas.log.is_some()) << VHOST_VRING_F_LOG,
        desc_user_addr: desc,
        used_user_addr: device,
        avail_user_addr: driver,
        log_guest_addr: areas.log.unwrap_or(0),
    }
}

impl KernelQueues {
    fn with_devices(&self, call: impl Fn(&Vhost) -> vhost_kernel::Result<()>) -> Result<(), String> {
        // A change of the log waits for requests in flight.
        let _calls = self.disk_calls();
        self.device.devices().into_iter().try_for_each(|device| call(device).map_err(|e| e.to_string()))
    }

    fn set_mem_tables(&self, mem: &GuestMemory) -> Result<(), String> {
        let region = |r: &virtio::mem::Region| MemoryRegion {
            guest_phys_addr: r.guest_addr,
            memory_size: r.size,
            userspace_addr: r.host.addr() as u64,
            ..MemoryRegion::default()
        };
        let regions: Vec<_> = mem.regions().iter().map(region).collect();
        // SAFETY: each region is a shared mapping that `mem` keeps, and this process has only raw
        // pointers to it. The session keeps `mem` until it has set another memory table, and stops
        // all rings before that.
        self.with_devices(|device| unsafe { device.set_mem_table(&regions) })
    }

    /// Clears an alarm. Returns whether it was signalled.
    fn clear_alarm(&self, ring: u16) -> bool {
        self.alarms[usize::from(ring)].take()
    }

    pub(super) fn signal_alarm(&self, ring: u16) {
        self.alarms[usize::from(ring)].signal();
    }

    /// Configures a ring that does not run.
    ///
    /// # Safety
    /// That of [`RingServer::start`]. `tracked` lives as long as the ring runs.
    unsafe fn set_up(
        &self,
        ring: u16,
        base: u32,
        start: &RingStart,
        tracked: Option<&TrackedRing>,
    ) -> vhost_kernel::Result<()> {
        let (device, at) = self.device.of(ring);
        device.set_vring_num(at, start.areas.size.into())?;
        device.set_vring_base(at, base)?;
        // SAFETY: the areas are in the memory that the kernel was told of last, as the caller of
        // `start` promises.
        unsafe { device.set_vring_addr(&addresses(at, &start.areas)) }?;
        device.set_vring_call(at, start.call.as_ref().map(|call| call.as_fd()))?;
        device.set_vring_err(at, Some(self.alarms[usize::from(ring)].as_fd()))?;
        device.set_vring_kick(at, Some(start.kick.as_fd()))?;
        // SAFETY: the caller of `start` promises that nothing else writes to the region. `start`
        // keeps `tracked` in the ring's slot while the ring runs.
        unsafe { self.device.track(ring, tracked) }
    }
}

impl RingServer for KernelQueues {
    fn rings(&self) -> u16 {
        self.slots.len() as u16
    }

    fn queues(&self) -> u16 {
        self.len()
    }

    fn queue_of(&self, ring: u16) -> Option<u16> {
        Some(self.queue_index(ring))
    }

    fn stats(&self, queue: u16) -> &Arc<QueueStats> {
        KernelQueues::stats(self, queue)
    }

    unsafe fn start(&self, ring: u16, start: RingStart) -> Result<(), String> {
        let mut tracked = None;
        if let Some(tracking) = &start.tracking {
            let notes = start.vring.notes().ok_or("the kernel serves no packed rings")?;
            tracked = Some(TrackedRing::new(notes, &tracking.replays, tracking.keep.clone()));
        }
        let mut slot = self.slot(ring);
        debug_assert!(!slot.running);
        // SAFETY: the caller promises that the areas are in the memory that the kernel was told of
        // last, and that nothing else writes to the region. The slot keeps `tracked` below, and if
        // the ring does not start, the kernel does not use it.
        let started = unsafe { self.set_up(ring, start.vring.base(), &start, tracked.as_ref()) };
        started.map_err(|e| e.to_string())?;
        self.device.open(ring, true).map_err(|e| e.to_string())?;
        if let Err(e) = self.device.run(ring, true) {
            let _ = self.device.open(ring, false);
            return Err(e.to_string());
        }
        slot.running = true;
        slot.tracked = tracked;
        slot.generation += 1;
        if self.is_first(ring) {
            self.note_placement(ring, &slot);
            let stats = self.device.stats(self.queue_index(ring));
            stats.size.store(start.areas.size, Relaxed);
            stats.set_state(State::Running);
        }
        Ok(())
    }

    /// Both flags have no effect: the kernel keeps requests of a ring that stops, and kicks are in
    /// the ring's memory.
    fn stop(&self, ring: u16, _discard: bool, _hand_over: bool) -> Option<u32> {
        let mut slot = self.slot(ring);
        if !std::mem::take(&mut slot.running) {
            return None;
        }
        let calls = self.disk_calls();
        self.drain(ring);
        drop(calls);
        slot.tracked = None;
        // A signal for this ring must not count for the next one.
        self.clear_alarm(ring);
        if self.is_first(ring) {
            self.device.stats(self.queue_index(ring)).set_state(State::Stopped);
        }
        let (device, at) = self.device.of(ring);
        match device.vring_base(at) {
            Ok(base) => Some(base),
            Err(e) => {
                tracing::error!("{}: where ring {ring} stands is not known: {e}", self.name);
                Some(0)
            }
        }
    }

    fn discards(&self, ring: u16) -> bool {
        self.device.sends_when_off(ring)
    }

    fn close(&self, ring: u16) {
        let slot = self.slot(ring);
        if slot.running {
            return;
        }
        if let Err(e) = self.device.open(ring, false) {
            tracing::warn!("{}: {e}", self.name);
        }
        // Kicks of a guest that stopped the ring then wake no worker, and no descriptor of a former
        // front end stays open.
        let (device, at) = self.device.of(ring);
        for dropped in
            [device.set_vring_kick(at, None), device.set_vring_call(at, None), device.set_vring_err(at, None)]
        {
            if let Err(e) = dropped {
                tracing::debug!("{}: ring {ring}: {e}", self.name);
            }
        }
    }

    fn set_call(&self, ring: u16, call: Option<Arc<EventFd>>) -> Result<(), String> {
        let fd = call.as_ref().map(|call| call.as_fd());
        let (device, at) = self.device.of(ring);
        device.set_vring_call(at, fd).map_err(|e| e.to_string())?;
        if let Some(call) = call {
            call.signal();
        }
        Ok(())
    }

    /// Changes whether the ring's own writes are logged. The features decide whether writes to
    /// buffers are logged.
    unsafe fn set_log(
        &self,
        ring: u16,
        areas: RingAreas,
        _log: Option<Arc<DirtyLog>>,
        _used: Option<UsedLog>,
    ) -> Result<(), String> {
        let _slot = self.slot(ring);
        let (device, at) = self.device.of(ring);
        // SAFETY: the caller promises that the areas are in the memory that the kernel was told of
        // last.
        unsafe { device.set_vring_addr(&addresses(at, &areas)) }.map_err(|e| e.to_string())
    }

    fn with_all_drained(&self, until: Instant, f: &mut dyn FnMut()) -> vshunt_types::error::Result<()> {
        KernelQueues::with_all_drained(self, until, f)
    }

    fn is_external(&self) -> bool {
        true
    }

    fn tracks(&self) -> bool {
        self.device.tracks()
    }

    fn regions_max(&self) -> u64 {
        let text = std::fs::read_to_string("/sys/module/vhost/parameters/max_mem_regions");
        let limit = text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(REGIONS_DEFAULT);
        limit.min(MAX_REGIONS as u64)
    }

    fn set_features(&self, features: u64) -> Result<(), String> {
        let known = self.features | bit(VHOST_F_LOG_ALL);
        self.device.negotiated(features)?;
        self.with_devices(|device| device.set_features(features & known))
    }

    fn set_memory(&self, mem: &GuestMemory, old: &GuestMemory) -> Result<(), String> {
        self.set_mem_tables(mem).inspect_err(|_| {
            // Some of several devices may have taken the new memory.
            if let Err(e) = self.set_mem_tables(old) {
                tracing::error!("{}: the kernel does not take the memory back that it had: {e}", self.name);
            }
        })
    }

    unsafe fn set_log_base(&self, at: *mut u8) -> Result<(), String> {
        // SAFETY: the caller promises a mapping that is long enough, has no references, and stays
        // while the features include VHOST_F_LOG_ALL.
        self.with_devices(|device| unsafe { device.set_log_base(at.addr() as u64) })
    }

    fn alarm(&self, ring: u16) -> Option<BorrowedFd<'_>> {
        self.alarms.get(usize::from(ring)).map(|alarm| alarm.as_fd())
    }

    fn is_broken(&self, ring: u16) -> bool {
        if !self.clear_alarm(ring) {
            return false;
        }
        let slot = self.slot(ring);
        let stats = self.device.stats(self.queue_index(ring));
        if !slot.running || stats.state() == State::Broken {
            return false;
        }
        stats.set_state(State::Broken);
        true
    }
}
