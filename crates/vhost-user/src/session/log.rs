//! Where the pages are marked that a guest's device writes, while the guest migrates.
//!
//! What must never happen: the kernel told to mark pages whose bits would lie outside of the log, which is memory of ours.

use std::sync::Arc;

use vhost::vhost_user::Result;
use virtio::log::DirtyLog;
use virtio::mem::Region;
use virtio::ring::{RingFeatures, UsedLog, ring_sizes};

use super::super::memory::Mapping;
use super::{F_LOG_ALL, LOG_PAGE_BYTES, Session, UserAddrs, Vring, refuse};

impl Session {
    /// Whether the log has a bit for each page of these regions.
    pub(super) fn log_covers(&self, regions: &[Region]) -> bool {
        self.log.as_ref().is_some_and(|log| log.covers(end_of(regions)))
    }

    /// The features that the rings' server is told of. The kernel marks pages wherever the log would have their bits, also
    /// beyond the end of the log and where there is none. That is memory of this process. So the kernel marks no page until a
    /// log covers all of the guest's memory.
    pub(super) fn server_features(&self, features: u64) -> u64 {
        if features & F_LOG_ALL == 0 || self.log_covers(&self.regions) {
            return features;
        }
        tracing::debug!("{}: writes are not logged until there is a log for all of the memory", self.name);
        features & !F_LOG_ALL
    }

    /// The guest address behind what a ring marks of itself, if it does.
    pub(super) fn own_log_end(&self, vring: &Vring) -> Option<u64> {
        let sizes = ring_sizes(vring.size, RingFeatures::from_bits(self.features));
        Some(vring.addrs?.log?.saturating_add(sizes.device as u64))
    }

    /// Where a ring's writes are to be marked now, buffers and its own areas.
    pub(super) fn logs(&self, addrs: UserAddrs) -> (Option<Arc<DirtyLog>>, Option<UsedLog>) {
        let Some(log) = self.log.clone().filter(|_| self.logging()) else { return (None, None) };
        let used = addrs
            .log
            .zip(self.mem.user_to_guest(addrs.desc))
            .map(|(device_addr, desc_addr)| UsedLog { log: log.clone(), device_addr, desc_addr });
        (Some(log), used)
    }

    /// Marks pages from now on in a mapping.
    pub(super) fn go_over_to(&mut self, map: &Arc<Mapping>) -> Result<()> {
        let (at, size) = (map.at(0), map.len() as u64);
        // SAFETY: inside the mapping, which the log keeps.
        let told = Arc::new(unsafe { DirtyLog::new(at, map.len(), map.clone()) });
        // Also what running rings mark of themselves: the kernel changes over to the new log while they run.
        let own = self.vrings.iter().filter(|v| v.running).filter_map(|v| self.own_log_end(v)).max();
        let last = end_of(&self.regions).max(own.unwrap_or(0));
        if !told.covers(last) {
            let covered = size.saturating_mul(8 * LOG_PAGE_BYTES);
            return Err(refuse(format!("the dirty log covers {covered:#x} of {last:#x} bytes of memory")));
        }
        // The old log is kept until the server has changed over to this one.
        let old = (self.log.replace(told), self.log_map.replace(map.clone()));
        let server = self.server.clone();
        // SAFETY: the mapping covers all that is marked (above). `self.log` keeps it until the server has another log or, when the
        // session ends, features without logging.
        let taken = unsafe { server.set_log_base(at) };
        if let Err(e) = taken.and_then(|()| server.set_features(self.server_features(self.features))) {
            // Some rings may have changed over to it: none marks anything any more.
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

    /// Tells running queues whether and where to log, between two requests.
    pub(super) fn update_log(&mut self) {
        for (index, vring) in (0u16..).zip(&self.vrings) {
            let (true, Some(addrs)) = (vring.running, vring.addrs) else { continue };
            let told = self.areas(vring, addrs).and_then(|areas| {
                let (log, used) = self.logs(addrs);
                // SAFETY: `areas` found the areas in `self.mem`, which `remap` handed over.
                unsafe { self.server.set_log(index, areas, log, used) }
            });
            if let Err(e) = told {
                self.reports.add(self.queue_of(index), None, &format!("its writes cannot be logged: {e}"));
            }
        }
    }
}

/// The guest address behind the last region.
fn end_of(regions: &[Region]) -> u64 {
    regions.iter().map(|r| r.guest_addr.saturating_add(r.size)).max().unwrap_or(0)
}
