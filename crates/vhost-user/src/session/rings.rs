//! Starts and stops the rings of a session. A ring starts when it has all that it needs. It is
//! drained and stopped before any of that is changed or released.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};
use virtio::inflight::{Inflight, Replay, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use virtio::ring::{DeviceRing, RingAddrs, RingFeatures, ring_sizes};
use vshunt_engine::State;
use vshunt_virtqueue::{RingAreas, RingStart, Tracking};

use super::super::memory::Mapping;
use super::{F_LOG_ALL, F_PROTOCOL, SHARE_MEMORY, Session, UserAddrs, Vring, refuse};
use vshunt_types::convert::len_u16;

impl Session {
    /// Returns whether the front end truncated a shared file, and an access hit the missing part.
    pub(in super::super) fn lost_memory(&self) -> bool {
        self.budget.lost()
            || self.regions.iter().any(|r| r.keep.downcast_ref::<Mapping>().is_some_and(Mapping::lost))
            || self.inflight.as_ref().is_some_and(|area| area.map.lost())
            || self.log_map.as_ref().is_some_and(|map| map.lost())
    }

    /// Drains and stops every ring until the front end starts it again. Also called when the front
    /// end disconnects.
    pub(in super::super) fn stop_all(&mut self) {
        self.pause_all();
        (0..len_u16(self.vrings.len())).for_each(|index| self.server.close(index));
    }

    /// Pauses all rings (see [`pause`](Self::pause)). All queues are asked to drain before the
    /// first one is waited for.
    fn pause_all(&mut self) {
        let running = (0u16..).zip(&self.vrings).filter(|(_, vring)| vring.running).map(|(index, _)| index);
        let running: Vec<u16> = running.collect();
        let stopped = self.server.stop_all(&running);
        for index in running {
            if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
                (vring.running, vring.discards) = (false, false);
                tracing::debug!("{}:{index} stopped", self.name);
            }
        }
        for (index, base) in stopped {
            if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
                vring.base = base;
            }
        }
    }

    /// Handles SET_VRING_ENABLE. The network devices of QEMU send it as soon as the protocol
    /// features are negotiated, before the driver of the guest has negotiated the device features.
    ///
    /// # Errors
    /// Protocol features were not negotiated, there is no such ring, or it cannot start.
    pub(in super::super) fn enable(&mut self, ring: u32, on: bool) -> std::result::Result<(), String> {
        if self.protocol.is_empty() && self.features & F_PROTOCOL == 0 {
            return Err("a ring is switched on or off before protocol features are agreed on".to_owned());
        }
        self.set_vring_enable(ring, on).map_err(|e| e.to_string())
    }

    /// Stops a ring for GET_VRING_BASE. The front end may give the ring to another program next.
    pub(super) fn hand_over(&mut self, index: u16) {
        self.halt(index, false, true);
        self.server.close(index);
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.switched_off = false;
        }
    }

    /// Handles a ring that the front end disables: what the guest sends and what arrives for the
    /// guest is discarded (vhost-user specification, "Ring states"). A guest may still send after
    /// it has asked for fewer pairs, and a frame that stayed in the ring would hold up its
    /// connection.
    ///
    /// QEMU disables a ring before GET_VRING_BASE, so the front end may give the ring to another
    /// program next. The ring uses its memory until GET_VRING_BASE is answered. What is there
    /// already is discarded before this returns, so that the base does not depend on when the
    /// worker runs.
    ///
    /// # Errors
    /// The ring is not usable.
    pub(super) fn switch_off(&mut self, index: u16) -> Result<()> {
        let Some(vring) = self.vrings.get_mut(usize::from(index)) else { return Ok(()) };
        vring.switched_off = true;
        if vring.discards {
            return Ok(());
        }
        self.halt(index, true, true);
        self.server.close(index);
        self.start(index)
    }

    /// Starts a ring that the front end enables.
    ///
    /// # Errors
    /// The ring is not usable.
    pub(super) fn switch_on(&mut self, index: u16) -> Result<()> {
        self.stop_discarding(index);
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.switched_off = false;
        }
        self.start(index)
    }

    /// Stops a ring that is switched off, so that the front end can set it up again.
    pub(super) fn stop_discarding(&mut self, index: u16) {
        if self.vrings.get(usize::from(index)).is_some_and(|vring| vring.discards) {
            self.pause(index);
        }
    }

    /// Closes a ring that was paused and did not start again, so that nothing is kept for it.
    pub(super) fn close_if_stopped(&mut self, index: u16) {
        if self.vrings.get(usize::from(index)).is_some_and(|vring| !vring.running) {
            self.server.close(index);
        }
    }

    /// Stops all rings that are switched off.
    pub(super) fn stop_all_discarding(&mut self) {
        (0..len_u16(self.vrings.len())).for_each(|index| self.stop_discarding(index));
    }

    /// Stops a ring. The device keeps what arrives for it meanwhile. The base of the ring is
    /// updated.
    pub(super) fn pause(&mut self, index: u16) {
        self.halt(index, false, false);
    }

    fn halt(&mut self, index: u16, discard: bool, hand_over: bool) {
        let Some(vring) = self.vrings.get_mut(usize::from(index)) else { return };
        if !std::mem::take(&mut vring.running) {
            return;
        }
        vring.discards = false;
        if let Some(base) = self.server.stop(index, discard, hand_over) {
            vring.base = base;
        }
        tracing::debug!("{}:{index} stopped", self.name);
    }

    /// Returns whether a ring has all that it needs except memory, and there was no memory table
    /// yet.
    pub(in super::super) fn waits_for_memory(&self) -> bool {
        !self.had_memory && self.vrings.iter().any(Vring::may_start)
    }

    /// Warns once that rings wait for memory, and how to share it. Otherwise the guest would hang
    /// without a message.
    pub(in super::super) fn warn_of_no_memory(&mut self) {
        self.had_memory = true;
        tracing::warn!(
            "{}: the front end started a ring and has shared no memory, so the guest hangs. {SHARE_MEMORY}",
            self.name
        );
    }

    /// Starts a ring if it has all that it needs. One that is switched off starts only to discard.
    ///
    /// # Errors
    /// The ring is not usable.
    pub(super) fn start(&mut self, index: u16) -> Result<()> {
        let Some(vring) = self.vrings.get(usize::from(index)) else { return Ok(()) };
        let discards = vring.switched_off && !vring.running && self.server.discards(index);
        if !(vring.may_start() || discards && vring.is_complete()) || self.mem.regions().is_empty() {
            return Ok(());
        }
        let (Some(kick), Some(addrs)) = (vring.kick.clone(), vring.addrs) else { return Ok(()) };
        self.start_with(index, addrs, kick, discards)?;
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            (vring.running, vring.discards) = (true, discards);
        }
        tracing::debug!(discards, "{}:{index} started", self.name);
        Ok(())
    }

    /// Gives the ring to its server.
    fn start_with(&self, index: u16, addrs: UserAddrs, kick: Arc<OwnedFd>, discards: bool) -> Result<()> {
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
            // At the start of a packed ring both wrap counters are 1.
            fresh: ring.base() == if self.packed() { 0x8000_8000 } else { 0 },
            discards,
            vring: ring,
            mem: self.mem.clone(),
            kick,
            call,
            log,
            tracking,
            name: format!("{}:{index}", self.name),
            on_broken: Box::new(move |reason| reports.add(queue, Some(index), reason)),
        };
        // SAFETY: `areas` found the areas in `self.mem`, which `remap` has passed to the server.
        // The part of the in-flight region belongs to this ring only. `may_start` is false while
        // the ring runs, so it is never started twice.
        let started = unsafe { self.server.start(index, start) };
        started.map_err(|reason| self.unusable(index, &reason))?;
        if let Some(eventfd) = eventfd {
            // A former daemon may have died after it published and before it notified.
            eventfd.signal();
        }
        Ok(())
    }

    /// Tracks the requests of a ring, and returns those that a former daemon had in flight.
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

    /// Reports that a ring cannot start, and returns the error.
    fn unusable(&self, index: u16, reason: &str) -> Error {
        let queue = self.queue_of(index);
        self.reports.add(queue, None, reason);
        self.server.stats(queue).set_state(State::Broken);
        // Not by a report: the connection may end with this error.
        self.signal_error(index);
        refuse(format!("queue {index} cannot start: {reason}"))
    }

    /// Returns the queue of a ring; the last queue if the ring belongs to none.
    pub(in super::super) fn queue_of(&self, ring: u16) -> u16 {
        self.server.queue_of(ring).unwrap_or(self.server.queues().saturating_sub(1))
    }

    /// Returns the addresses of a ring in this process.
    ///
    /// # Errors
    /// A part of it lies outside of guest memory.
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
            // The kernel does not know the end of the log, and would mark memory of this process
            // beyond it.
            log: addrs.log.filter(|_| self.logging() && self.log.as_ref().is_some_and(covered)),
        })
    }

    /// Makes the device side of a ring.
    ///
    /// # Errors
    /// The ring is not valid.
    fn map_ring(&self, vring: &Vring, areas: &RingAreas) -> std::result::Result<DeviceRing, String> {
        let features = RingFeatures::from_bits(self.features);
        // SAFETY: the areas lie in regions that the memory table keeps mapped (checked by `areas`).
        // The server holds that table as long as it has the ring. `Vring::running` ensures that
        // each ring runs at most once.
        unsafe { DeviceRing::new(vring.size, features, areas.addrs, vring.base) }.map_err(|e| e.to_string())
    }

    /// Returns the part of the in-flight region that belongs to a ring. None if there is no region.
    ///
    /// # Errors
    /// The region has no room for the ring, or the guest cannot continue.
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
        // SAFETY: the part lies inside the mapping (checked above), and the Inflight keeps the
        // mapping.
        let inflight = unsafe {
            Inflight::new(area.map.at(offset), len, area.queue_size, self.packed(), area.map.clone())
        };
        inflight.map(Some).map_err(|e| self.bad_inflight(index, &e))
    }

    fn bad_inflight(&self, index: u16, e: &dyn std::fmt::Display) -> Error {
        refuse(format!("queue {index} cannot start: {e}"))
    }

    /// Changes the memory table. The running rings are stopped before and started after the change.
    /// If the change fails, the old table stays.
    ///
    /// Rings that wait for memory start, too. With `strict`, a ring that ran and lies outside of
    /// the new table is an error, unless it is switched off. Without, it waits: front ends replace
    /// a region by removing it and adding another.
    pub(super) fn remap(
        &mut self,
        strict: bool,
        change: impl FnOnce(&mut Vec<Region>) -> Result<()>,
    ) -> Result<()> {
        let mut regions = self.regions.clone();
        change(&mut regions)?;
        // SAFETY: `keep` of each region is the mapping that `host` points into (`map_region`).
        let mem = unsafe { GuestMemory::new(regions.clone()) };
        let mem = Arc::new(mem.map_err(|e| refuse(format!("the memory table is not usable: {e}")))?);
        let running: Vec<bool> = self.vrings.iter().map(|v| v.running && !v.discards).collect();
        self.pause_all();
        let server = self.server.clone();
        let taken = match self.logging() && !self.log_covers(&regions) {
            // The server must not mark pages for which the log has no bits: see `server_features`.
            true => server.set_features(self.features & !F_LOG_ALL),
            false => Ok(()),
        };
        let taken = taken.and_then(|()| server.set_memory(&mem, &self.mem));
        let mut result = taken.map_err(|e| refuse(format!("the memory table is not usable: {e}")));
        // On an error, the rings continue with the old table.
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
