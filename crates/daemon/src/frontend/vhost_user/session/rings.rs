//! Rings of a session: started when all that they need is there, stopped and drained before any of it goes.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};
use virtio::inflight::{Inflight, Replay, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use virtio::ring::{DeviceRing, RingAddrs, RingFeatures, ring_sizes};
use vshunt_engine::State;
use vshunt_virtqueue::{self as virtqueue, RingParts};

use super::super::memory::Mapping;
use super::{F_LOG_ALL, F_PROTOCOL, SHARE_MEMORY, Session, UserAddrs, Vring, refuse};
use crate::frontend::kernel::{KernelQueues, RingSetup, Tracking};
use crate::frontend::{Queues, UserQueues};

impl Session {
    /// Whether the front end cut a file short that it shares, and an access found that out.
    pub(in super::super) fn lost_memory(&self) -> bool {
        self.budget.lost()
            || self.regions.iter().any(|r| r.keep.downcast_ref::<Mapping>().is_some_and(Mapping::lost))
            || self.inflight.as_ref().is_some_and(|area| area.map.lost())
            || self.log_map.as_ref().is_some_and(|map| map.lost())
    }

    /// Drains and stops every ring, until it is told to start; called when the front-end goes, too.
    pub(in super::super) fn stop_all(&mut self) {
        self.pause_all();
        (0..self.vrings.len()).for_each(|index| self.close(index));
    }

    /// [`pause`](Self::pause) for all rings: all queues are asked for their requests in flight before one is waited for.
    fn pause_all(&mut self) {
        let Queues::User(set) = self.queues.clone() else {
            return (0..self.vrings.len()).for_each(|index| self.pause(index));
        };
        for (at, queue) in set.stop_all() {
            let mut left = Some(queue);
            for (index, vring) in self.vrings.iter_mut().enumerate().filter(|(_, vring)| vring.running) {
                if let Some((_, way)) = set.place(index as u16).filter(|(of, _)| *of == at)
                    && let Some(queue) = left.take()
                {
                    let (base, rest) = virtqueue::take_ring(queue, way, false, false);
                    (vring.running, vring.base) = (false, base);
                    left = rest.map(|rest| rest.queue);
                    tracing::debug!("{}:{index} stopped", self.name);
                }
            }
            debug_assert!(left.is_none(), "a queue has no ring that does not run");
        }
    }

    /// SET_VRING_ENABLE. QEMU's network cards send it once protocol features are agreed on, before the guest's driver chose
    /// the device's.
    ///
    /// # Errors
    /// Protocol features were not agreed on, there is no such ring, or it cannot be started; in words.
    pub(in super::super) fn enable(&mut self, ring: u32, on: bool) -> std::result::Result<(), String> {
        if self.protocol.is_empty() && self.features & F_PROTOCOL == 0 {
            return Err("a ring is switched on or off before protocol features are agreed on".to_owned());
        }
        self.set_vring_enable(ring, on).map_err(|e| e.to_string())
    }

    /// Stops a ring for GET_VRING_BASE: the front-end may give the ring to another program next.
    pub(super) fn hand_over(&mut self, index: usize) {
        self.halt(index, false, true);
        self.close(index);
    }

    /// Stops a ring that is switched off: what its device or its guest has for it meanwhile is for nobody
    /// (vhost-user specification, "Ring states"). QEMU switches a ring off before it asks for its base, so the front end may
    /// give this ring to another program, too. Its memory stays the ring's until GET_VRING_BASE is answered.
    pub(super) fn switch_off(&mut self, index: usize) {
        self.halt(index, true, true);
        self.close(index);
    }

    fn close(&mut self, index: usize) {
        match &self.queues {
            Queues::User(set) => {
                if let Some((at, way)) = set.place(index as u16) {
                    self.device.closed(at, way);
                }
            }
            Queues::Kernel(kernel) => kernel.close(index as u16),
        }
    }

    /// Closes a ring that was paused and does not run again: nobody is to keep anything for it.
    pub(super) fn close_if_stopped(&mut self, index: usize) {
        if !self.vrings[index].running {
            self.close(index);
        }
    }

    /// Stops a ring, whose device keeps what comes for it meanwhile; its base is where it came to.
    pub(super) fn pause(&mut self, index: usize) {
        self.halt(index, false, false);
    }

    fn halt(&mut self, index: usize, discard: bool, hand_over: bool) {
        if !std::mem::take(&mut self.vrings[index].running) {
            return;
        }
        let base = match &self.queues {
            Queues::User(set) => {
                let (at, way) = set.place(index as u16).expect("it ran");
                set.stop(at).map(|queue| {
                    let (base, rest) = virtqueue::take_ring(queue, way, discard, hand_over);
                    if let Some(rest) = rest {
                        set.start(at, rest.queue);
                        if rest.broken {
                            set.stats(at).set_state(State::Broken);
                        }
                    }
                    base
                })
            }
            Queues::Kernel(kernel) => kernel.stop(index as u16),
        };
        if let Some(base) = base {
            self.vrings[index].base = base;
        }
        tracing::debug!("{}:{index} stopped", self.name);
    }

    /// Whether a ring has all that it needs, except for memory, and no memory ever came.
    pub(in super::super) fn waits_for_memory(&self) -> bool {
        !self.had_memory && self.vrings.iter().any(Vring::may_start)
    }

    /// Says once that rings wait for memory, and how to share it: the guest waits, too, and shows nothing of it.
    pub(in super::super) fn warn_of_no_memory(&mut self) {
        self.had_memory = true;
        tracing::warn!(
            "{}: the front end started a ring and has shared no memory, so the guest hangs. {SHARE_MEMORY}",
            self.name
        );
    }

    /// Starts a ring if all that it needs is there.
    pub(super) fn start(&mut self, index: usize) -> Result<()> {
        let vring = &self.vrings[index];
        if !vring.may_start() || self.mem.regions().is_empty() {
            return Ok(());
        }
        let (Some(kick), Some(addrs)) = (vring.kick.clone(), vring.addrs) else { return Ok(()) };
        match self.queues.clone() {
            Queues::User(set) => self.start_user(index, addrs, kick, &set)?,
            Queues::Kernel(kernel) => self.start_kernel(index, addrs, &kick, &kernel)?,
        }
        self.vrings[index].running = true;
        tracing::debug!("{}:{index} started", self.name);
        Ok(())
    }

    /// Gives the ring to a worker, as a queue.
    fn start_user(
        &mut self,
        index: usize,
        addrs: UserAddrs,
        kick: Arc<OwnedFd>,
        queues: &UserQueues,
    ) -> Result<()> {
        let Some((at, way)) = queues.place(index as u16) else {
            return Err(
                self.unusable(index, "there is no such queue with the features that the guest agreed on")
            );
        };
        let vring = &self.vrings[index];
        let call = vring.call.clone();
        let mut ring = self.map_ring(vring, addrs).map_err(|reason| self.unusable(index, &reason))?;
        let mut replays = Vec::new();
        let inflight = self.inflight_of(index)?;
        let tracked = inflight.is_some();
        if let Some(inflight) = inflight {
            replays = self.replays_of(index, &mut ring, inflight)?;
        }
        let (log, used) = self.logs(addrs);
        ring.set_used_log(used);
        let eventfd = call.clone().filter(|_| tracked);
        let reports = self.reports.clone();
        let stats = queues.stats(at).clone();
        // Where a packed ring begins, both wrap counters are 1.
        let fresh = ring.base() == if self.packed() { 0x8000_8000 } else { 0 };
        let parts = RingParts {
            vring: ring,
            mem: self.mem.clone(),
            replays,
            kick,
            call,
            log,
            stats: stats.clone(),
            name: format!("{}:{index}", self.name),
            on_broken: Box::new(move |reason| reports.add(at, Some(index as u16), reason)),
        };
        self.device.opened(at, way, fresh).map_err(|reason| self.unusable(index, &reason))?;
        stats.size.store(vring.size, Relaxed);
        // Its other ring, if it has one, runs.
        let mut others = queues.stop(at);
        let broken =
            others.as_mut().and_then(|q| virtqueue::owner(q.as_mut())).is_some_and(|owner| owner.is_broken());
        queues.start(at, self.device.queue(at, way, parts, others));
        if broken {
            stats.set_state(State::Broken);
        }
        if let Some(eventfd) = eventfd {
            // The daemon before us may have died between publishing and notifying.
            eventfd.signal();
        }
        Ok(())
    }

    /// Tracks a ring, and finds what a former daemon had in flight there.
    fn replays_of(&self, index: usize, ring: &mut DeviceRing, inflight: Inflight) -> Result<Vec<Replay>> {
        let replays = ring.set_inflight(inflight).map_err(|e| self.bad_inflight(index, &e))?;
        if !replays.is_empty() {
            tracing::info!(
                "{}:{index}: {} requests were in flight when a former daemon ended",
                self.name,
                replays.len()
            );
        }
        Ok(replays)
    }

    /// Hands the ring over to the kernel.
    fn start_kernel(
        &mut self,
        index: usize,
        addrs: UserAddrs,
        kick: &OwnedFd,
        kernel: &KernelQueues,
    ) -> Result<()> {
        let vring = &self.vrings[index];
        // For its checks, and to find what was in flight.
        let mut ring = self.map_ring(vring, addrs).map_err(|reason| self.unusable(index, &reason))?;
        let mut setup = self.setup(vring, addrs, kick);
        if let (Some(inflight), Some(area)) = (self.inflight_of(index)?, &self.inflight) {
            let replays = self.replays_of(index, &mut ring, inflight)?;
            let notes =
                ring.notes().ok_or_else(|| self.unusable(index, "the kernel serves no packed rings"))?;
            setup.base = ring.base();
            setup.tracking = Some(Tracking::new(notes, &replays, area.map.clone()));
        }
        let eventfd = vring.call.clone().filter(|_| setup.tracking.is_some());
        // SAFETY: its parts were found to lie in the guest's memory, which the kernel has the same table of (`remap`). Its part
        // of the region was found to lie in a mapping that the tracking keeps, and `ring` is not used any more.
        unsafe { kernel.start(index as u16, setup) }.map_err(|reason| self.unusable(index, &reason))?;
        if let Some(eventfd) = eventfd {
            // The daemon before us may have died between publishing and notifying.
            eventfd.signal();
        }
        Ok(())
    }

    /// What the kernel is told of a ring, which was mapped before.
    pub(super) fn setup<'a>(&self, vring: &Vring, addrs: UserAddrs, kick: &'a OwnedFd) -> RingSetup<'a> {
        let at = |addr| self.mem.user_to_host(addr, 1).expect("the whole part lies within");
        RingSetup {
            size: vring.size,
            base: vring.base,
            parts: [at(addrs.desc), at(addrs.driver), at(addrs.device)],
            // Beyond the log's end the kernel would mark memory of ours.
            log: addrs.log.filter(|_| {
                let covered =
                    |log: &Arc<DirtyLog>| self.own_log_end(vring).is_some_and(|end| log.covers(end));
                self.logging() && self.log.as_ref().is_some_and(covered)
            }),
            kick,
            call: vring.call.clone(),
            tracking: None,
        }
    }

    /// Signals a ring's error descriptor (VHOST_USER_SET_VRING_ERR), if the front end gave one.
    pub(in super::super) fn signal_error(&self, ring: u16) {
        if let Some(err) = self.vrings.get(usize::from(ring)).and_then(|vring| vring.err.as_ref()) {
            err.signal();
        }
    }

    /// A ring that cannot start: told to all who want to know.
    fn unusable(&self, index: usize, reason: &str) -> Error {
        let queue = self.queues.queue_of(index as u16);
        self.reports.add(queue, None, reason);
        self.queues.stats(queue).set_state(State::Broken);
        // At once: the connection may end by this error.
        self.signal_error(index as u16);
        refuse(format!("queue {index} cannot start: {reason}"))
    }

    /// The error says what is wrong with the ring.
    fn map_ring(&self, vring: &Vring, addrs: UserAddrs) -> std::result::Result<DeviceRing, String> {
        let features = RingFeatures::from_bits(self.features);
        let sizes = ring_sizes(vring.size, features);
        let at = |addr, len: usize| {
            self.mem.user_to_host(addr, len as u64).ok_or_else(|| {
                format!("{len} bytes of the ring at {addr:#x} lie outside of the guest's memory")
            })
        };
        let areas = RingAddrs {
            desc: at(addrs.desc, sizes.desc)?,
            driver: at(addrs.driver, sizes.driver)?,
            device: at(addrs.device, sizes.device)?,
        };
        // SAFETY: the areas lie in regions that the memory table keeps mapped; the queue holds that table for
        // as long as it has the ring, and one ring index runs at most once.
        unsafe { DeviceRing::new(vring.size, features, areas, vring.base) }.map_err(|e| e.to_string())
    }

    fn inflight_of(&self, index: usize) -> Result<Option<Inflight>> {
        if let Some(why) = &self.cut_off {
            return Err(self.bad_inflight(index, why));
        }
        let Some(area) = &self.inflight else { return Ok(None) };
        if index >= usize::from(area.queues) || self.vrings[index].size > area.queue_size {
            return Err(self.bad_inflight(index, &"the in-flight region has no room for this queue"));
        }
        let len = inflight_queue_size(area.queue_size, self.packed());
        let offset = index * len;
        if offset + len > area.map.len() {
            return Err(self.bad_inflight(index, &"it ends before this queue's part"));
        }
        // SAFETY: inside the mapping, which is kept by the Inflight itself.
        let inflight = unsafe {
            Inflight::new(area.map.at(offset), len, area.queue_size, self.packed(), area.map.clone())
        };
        inflight.map(Some).map_err(|e| self.bad_inflight(index, &e))
    }

    fn bad_inflight(&self, index: usize, e: &dyn std::fmt::Display) -> Error {
        refuse(format!("queue {index} cannot start: {e}"))
    }

    /// Changes the memory table between a stop and a start of the rings that run: whole, or not at all.
    ///
    /// Rings that wait for memory start, too. With `strict`, one that ran and lies outside of the new table is an
    /// error; without, it waits: front-ends replace a region by removing it and adding another.
    pub(super) fn remap(
        &mut self,
        strict: bool,
        change: impl FnOnce(&mut Vec<Region>) -> Result<()>,
    ) -> Result<()> {
        let mut regions = self.regions.clone();
        change(&mut regions)?;
        // SAFETY: each region's `keep` is the mapping that `host` points into.
        let mem = unsafe { GuestMemory::new(regions.clone()) };
        let mem = Arc::new(mem.map_err(|e| refuse(format!("the memory table is not usable: {e}")))?);
        let running: Vec<bool> = self.vrings.iter().map(|v| v.running).collect();
        self.pause_all();
        let kernel = self.queues.kernel().cloned();
        let taken = kernel.as_ref().map_or(Ok(()), |kernel| {
            // Not to be marked where the log has no bits: see `kernel_features`.
            if self.logging() && !self.log_covers(&regions) {
                kernel.set_features(self.features & !F_LOG_ALL)?;
            }
            kernel.set_memory(&mem, &self.mem)
        });
        let mut result = taken.map_err(|e| refuse(format!("the memory table is not usable: {e}")));
        // Else rings go on with the old one.
        if result.is_ok() {
            self.had_memory |= !regions.is_empty();
            (self.regions, self.mem) = (regions, mem);
        }
        if let Some(kernel) = kernel.filter(|_| self.logging()) {
            result = result.and(kernel.set_features(self.kernel_features(self.features)).map_err(refuse));
        }
        for (index, ran) in running.into_iter().enumerate() {
            let vring = &self.vrings[index];
            let lies_within = vring.addrs.is_some_and(|addrs| self.map_ring(vring, addrs).is_ok());
            if lies_within || (ran && strict) {
                result = result.and(self.start(index));
            } else if ran {
                tracing::info!("{}:{index} waits for the memory that it lies in", self.name);
            }
            if ran {
                self.close_if_stopped(index);
            }
        }
        result
    }
}
