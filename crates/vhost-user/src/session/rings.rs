//! Rings of a session: started when all that they need is there, stopped and drained before any of it goes.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};
use virtio::inflight::{Inflight, Replay, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use virtio::ring::{DeviceRing, RingAddrs, RingFeatures, ring_sizes};
use vshunt_engine::State;
use vshunt_virtqueue::{RingAreas, RingStart, Tracking};

use super::super::convert::count_u16;
use super::super::memory::Mapping;
use super::{F_LOG_ALL, F_PROTOCOL, SHARE_MEMORY, Session, UserAddrs, Vring, refuse};

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
        (0..count_u16(self.vrings.len())).for_each(|index| self.server.close(index));
    }

    /// [`pause`](Self::pause) for all rings: all queues are asked for their requests in flight before one is waited for.
    fn pause_all(&mut self) {
        let running = (0u16..).zip(&self.vrings).filter(|(_, vring)| vring.running).map(|(index, _)| index);
        let running: Vec<u16> = running.collect();
        let stopped = self.server.stop_all(&running);
        for index in running {
            if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
                vring.running = false;
                tracing::debug!("{}:{index} stopped", self.name);
            }
        }
        for (index, base) in stopped {
            if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
                vring.base = base;
            }
        }
    }

    /// SET_VRING_ENABLE. QEMU's network devices send it once protocol features are agreed on, before the guest's driver chose
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
    pub(super) fn hand_over(&mut self, index: u16) {
        self.halt(index, false, true);
        self.server.close(index);
    }

    /// Stops a ring that is switched off: what its device or its guest has for it meanwhile is for nobody
    /// (vhost-user specification, "Ring states"). QEMU switches a ring off before it asks for its base, so the front end may
    /// give this ring to another program, too. Its memory stays the ring's until GET_VRING_BASE is answered.
    pub(super) fn switch_off(&mut self, index: u16) {
        self.halt(index, true, true);
        self.server.close(index);
    }

    /// Closes a ring that was paused and does not run again: nobody is to keep anything for it.
    pub(super) fn close_if_stopped(&mut self, index: u16) {
        if self.vrings.get(usize::from(index)).is_some_and(|vring| !vring.running) {
            self.server.close(index);
        }
    }

    /// Stops a ring, whose device keeps what comes for it meanwhile; its base is where it came to.
    pub(super) fn pause(&mut self, index: u16) {
        self.halt(index, false, false);
    }

    fn halt(&mut self, index: u16, discard: bool, hand_over: bool) {
        let Some(vring) = self.vrings.get_mut(usize::from(index)) else { return };
        if !std::mem::take(&mut vring.running) {
            return;
        }
        if let Some(base) = self.server.stop(index, discard, hand_over) {
            vring.base = base;
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
    pub(super) fn start(&mut self, index: u16) -> Result<()> {
        let Some(vring) = self.vrings.get(usize::from(index)) else { return Ok(()) };
        if !vring.may_start() || self.mem.regions().is_empty() {
            return Ok(());
        }
        let (Some(kick), Some(addrs)) = (vring.kick.clone(), vring.addrs) else { return Ok(()) };
        self.start_with(index, addrs, kick)?;
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.running = true;
        }
        tracing::debug!("{}:{index} started", self.name);
        Ok(())
    }

    /// Gives the ring to its server.
    fn start_with(&self, index: u16, addrs: UserAddrs, kick: Arc<OwnedFd>) -> Result<()> {
        let Some(queue) = self.server.queue_of(index) else {
            return Err(
                self.unusable(index, "there is no such queue with the features that the guest agreed on")
            );
        };
        let Some(vring) = self.vrings.get(usize::from(index)) else { return Ok(()) };
        let call = vring.call.clone();
        let areas = self.areas(vring, addrs).map_err(|reason| self.unusable(index, &reason))?;
        let mut ring = self.map_ring(vring, &areas).map_err(|reason| self.unusable(index, &reason))?;
        let mut tracking = None;
        if let (Some(inflight), Some(area)) = (self.inflight_of(index, vring)?, &self.inflight) {
            let replays = self.replays_of(index, &mut ring, inflight)?;
            tracking = Some(Tracking { replays, keep: area.map.clone() });
        }
        let (log, used) = self.logs(addrs);
        ring.set_used_log(used);
        let eventfd = call.clone().filter(|_| tracking.is_some());
        let reports = self.reports.clone();
        let start = RingStart {
            areas,
            // Where a packed ring begins, both wrap counters are 1.
            fresh: ring.base() == if self.packed() { 0x8000_8000 } else { 0 },
            vring: ring,
            mem: self.mem.clone(),
            kick,
            call,
            log,
            tracking,
            name: format!("{}:{index}", self.name),
            on_broken: Box::new(move |reason| reports.add(queue, Some(index), reason)),
        };
        // SAFETY: `areas` found the areas in `self.mem`, which `remap` handed over. The part of the in-flight region belongs to
        // this ring, and `vring.running` keeps the ring from being started twice.
        let started = unsafe { self.server.start(index, start) };
        started.map_err(|reason| self.unusable(index, &reason))?;
        if let Some(eventfd) = eventfd {
            // A former daemon may have died between publishing and notifying.
            eventfd.signal();
        }
        Ok(())
    }

    /// Tracks a ring, and finds what a former daemon had in flight there.
    fn replays_of(&self, index: u16, ring: &mut DeviceRing, inflight: Inflight) -> Result<Vec<Replay>> {
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

    /// Signals a ring's error descriptor (VHOST_USER_SET_VRING_ERR), if the front end gave one.
    pub(in super::super) fn signal_error(&self, ring: u16) {
        if let Some(err) = self.vrings.get(usize::from(ring)).and_then(|vring| vring.err.as_ref()) {
            err.signal();
        }
    }

    /// A ring that cannot start: told to all who want to know.
    fn unusable(&self, index: u16, reason: &str) -> Error {
        let queue = self.queue_of(index);
        self.reports.add(queue, None, reason);
        self.server.stats(queue).set_state(State::Broken);
        // At once: the connection may end by this error.
        self.signal_error(index);
        refuse(format!("queue {index} cannot start: {reason}"))
    }

    /// The queue of a ring; the last one for a ring that is of none.
    pub(in super::super) fn queue_of(&self, ring: u16) -> u16 {
        self.server.queue_of(ring).unwrap_or(self.server.queues().saturating_sub(1))
    }

    /// Where a ring lies in this process.
    ///
    /// # Errors
    /// A part of it lies outside of the guest's memory.
    pub(super) fn areas(&self, vring: &Vring, addrs: UserAddrs) -> std::result::Result<RingAreas, String> {
        let sizes = ring_sizes(vring.size, RingFeatures::from_bits(self.features));
        let at = |addr, len: usize| {
            self.mem.user_to_host(addr, len as u64).ok_or_else(|| {
                format!("{len} bytes of the ring at {addr:#x} lie outside of the guest's memory")
            })
        };
        let covered = |log: &Arc<DirtyLog>| self.own_log_end(vring).is_some_and(|end| log.covers(end));
        Ok(RingAreas {
            size: vring.size,
            addrs: RingAddrs {
                desc: at(addrs.desc, sizes.desc)?,
                driver: at(addrs.driver, sizes.driver)?,
                device: at(addrs.device, sizes.device)?,
            },
            // Beyond the end of the log a server that knows no end would mark memory of this process.
            log: addrs.log.filter(|_| self.logging() && self.log.as_ref().is_some_and(covered)),
        })
    }

    /// The device side of a ring.
    ///
    /// # Errors
    /// What is wrong with the ring.
    fn map_ring(&self, vring: &Vring, areas: &RingAreas) -> std::result::Result<DeviceRing, String> {
        let features = RingFeatures::from_bits(self.features);
        // SAFETY: the areas lie in regions that the memory table keeps mapped (`areas`); the ring's server holds that table for
        // as long as it has the ring, and `Vring::running` says that one ring index runs at most once.
        unsafe { DeviceRing::new(vring.size, features, areas.addrs, vring.base) }.map_err(|e| e.to_string())
    }

    fn inflight_of(&self, index: u16, vring: &Vring) -> Result<Option<Inflight>> {
        if let Some(why) = &self.cut_off {
            return Err(self.bad_inflight(index, why));
        }
        let Some(area) = &self.inflight else { return Ok(None) };
        if index >= area.queues || vring.size > area.queue_size {
            return Err(self.bad_inflight(index, &"the in-flight region has no room for this queue"));
        }
        let len = inflight_queue_size(area.queue_size, self.packed());
        let offset = usize::from(index) * len;
        if offset + len > area.map.len() {
            return Err(self.bad_inflight(index, &"it ends before this queue's part"));
        }
        // SAFETY: inside the mapping, which is kept by the Inflight itself.
        let inflight = unsafe {
            Inflight::new(area.map.at(offset), len, area.queue_size, self.packed(), area.map.clone())
        };
        inflight.map(Some).map_err(|e| self.bad_inflight(index, &e))
    }

    fn bad_inflight(&self, index: u16, e: &dyn std::fmt::Display) -> Error {
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
        let server = self.server.clone();
        let taken = match self.logging() && !self.log_covers(&regions) {
            // Not to be marked where the log has no bits: see `server_features`.
            true => server.set_features(self.features & !F_LOG_ALL),
            false => Ok(()),
        };
        let taken = taken.and_then(|()| server.set_memory(&mem, &self.mem));
        let mut result = taken.map_err(|e| refuse(format!("the memory table is not usable: {e}")));
        // Else rings go on with the old one.
        if result.is_ok() {
            self.had_memory |= !regions.is_empty();
            (self.regions, self.mem) = (regions, mem);
        }
        if self.logging() {
            result = result.and(server.set_features(self.server_features(self.features)).map_err(refuse));
        }
        for (index, ran) in (0u16..).zip(running) {
            let Some(vring) = self.vrings.get(usize::from(index)) else { break };
            let is_mapped =
                |addrs| self.areas(vring, addrs).and_then(|areas| self.map_ring(vring, &areas)).is_ok();
            let lies_within = vring.addrs.is_some_and(is_mapped);
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
