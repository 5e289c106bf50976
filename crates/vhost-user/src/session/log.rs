//! The dirty log, in which pages are marked that the device writes while the guest migrates.
//!
//! What must never happen: the kernel marks a page whose bit would lie outside of the log, in other
//! memory of this process.

use std::sync::Arc;

use vhost::vhost_user::Result;
use virtio::log::DirtyLog;
use virtio::mem::Region;
use virtio::ring::{RingFeatures, UsedLog, ring_sizes};

use super::super::memory::Mapping;
use super::{F_LOG_ALL, LOG_PAGE_BYTES, Session, UserAddrs, Vring, refuse};

impl Session {
    /// Returns whether the log has a bit for each page of these regions.
    pub(super) fn log_covers(&self, regions: &[Region]) -> bool {
        self.log.as_ref().is_some_and(|log| log.covers(end_of(regions)))
    }

    /// Returns the features for the server of the rings. The kernel does not check the end of the
    /// log, nor whether there is a log, and would write to other memory of this process. So logging
    /// is off in the kernel until a log covers all guest memory.
    pub(super) fn server_features(&self, features: u64) -> u64 {
        if features & F_LOG_ALL == 0 || self.log_covers(&self.regions) {
            return features;
        }
        tracing::debug!("{}: writes are not logged until there is a log for all of the memory", self.name);
        features & !F_LOG_ALL
    }

    /// Returns the end (guest address) of the area that a ring marks for its own writes, if it
    /// marks any.
    pub(super) fn own_log_end(&self, vring: &Vring) -> Option<u64> {
        let sizes = ring_sizes(vring.size, RingFeatures::from_bits(self.features));
        Some(vring.addrs?.log?.saturating_add(sizes.device as u64))
    }

    /// Returns the logs for the writes of a ring now: to buffers, and to its used ring.
    pub(super) fn logs(&self, addrs: UserAddrs) -> (Option<Arc<DirtyLog>>, Option<UsedLog>) {
        let Some(log) = self.log.clone().filter(|_| self.logging()) else { return (None, None) };
        let used = addrs
            .log
            .zip(self.mem.user_to_guest(addrs.desc))
            .map(|(device_addr, desc_addr)| UsedLog { log: log.clone(), device_addr, desc_addr });
        (Some(log), used)
    }

    /// Changes to a new dirty log.
    ///
    /// # Errors
    /// The log does not cover guest memory, or the server refuses it.
    pub(super) fn go_over_to(&mut self, map: &Arc<Mapping>) -> Result<()> {
        let (at, size) = (map.at(0), map.len() as u64);
        // SAFETY: the log lies inside the mapping and has its length. The log keeps the mapping.
        let told = Arc::new(unsafe { DirtyLog::new(at, map.len(), map.clone()) });
        // Running rings mark their own areas, too, and the kernel changes to the new log while they
        // run.
        let own = self.vrings.iter().filter(|v| v.running).filter_map(|v| self.own_log_end(v)).max();
        let last = end_of(&self.regions).max(own.unwrap_or(0));
        if !told.covers(last) {
            let covered = size.saturating_mul(8 * LOG_PAGE_BYTES);
            return Err(refuse(format!("the dirty log covers {covered:#x} of {last:#x} bytes of memory")));
        }
        // The old log is kept until the server uses this one.
        let old = (self.log.replace(told), self.log_map.replace(map.clone()));
        let server = self.server.clone();
        // SAFETY: the mapping covers all pages that are marked (checked above). `self.log` keeps it
        // until the server has another log, or, at the end of the session, features without
        // logging.
        let taken = unsafe { server.set_log_base(at) };
        if let Err(e) = taken.and_then(|()| server.set_features(self.server_features(self.features))) {
            // Some rings may use the new log already. Logging is switched off for all of them.
            self.log = None;
            self.update_log();
            if let Err(e) = server.set_features(self.server_features(self.features)) {
                tracing::error!("{}: logging cannot be switched off: {e}", self.name);
            }
            return Err(refuse(e));
        }
        drop(old);
        self.update_log();
        Ok(())
    }

    /// Passes the current log to the running queues, while no request of them is in flight.
    pub(super) fn update_log(&mut self) {
        for (index, vring) in (0u16..).zip(&self.vrings) {
            let (true, Some(addrs)) = (vring.running, vring.addrs) else { continue };
            let told = self.areas(vring, addrs).and_then(|areas| {
                let (log, used) = self.logs(addrs);
                // SAFETY: `areas` found the areas in `self.mem`, which `remap` has passed to the
                // server.
                unsafe { self.server.set_log(index, areas, log, used) }
            });
            if let Err(e) = told {
                self.reports.add(self.queue_of(index), None, &format!("its writes cannot be logged: {e}"));
            }
        }
    }
}

/// Returns the end (guest address) of the last region.
fn end_of(regions: &[Region]) -> u64 {
    regions.iter().map(|r| r.guest_addr.saturating_add(r.size)).max().unwrap_or(0)
}
