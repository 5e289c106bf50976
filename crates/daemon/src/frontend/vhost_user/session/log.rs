//! Where the pages are marked that a guest's device writes, while the guest migrates.
//!
//! What must never happen: the kernel told to mark pages whose bits would lie outside of the log, which is memory of ours.

use std::sync::Arc;

use vhost::vhost_user::Result;
use virtio::log::DirtyLog;
use virtio::mem::Region;
use virtio::ring::{RingFeatures, UsedLog, ring_sizes};
use vshunt_virtqueue as virtqueue;

use super::super::memory::Mapping;
use super::{F_LOG_ALL, LOG_PAGE_BYTES, Session, UserAddrs, Vring, refuse};
use crate::frontend::Queues;

impl Session {
    /// Whether the log has a bit for each page of these regions.
    pub(super) fn log_covers(&self, regions: &[Region]) -> bool {
        self.log.as_ref().is_some_and(|log| log.covers(end_of(regions)))
    }

    /// What the kernel is told of `features`. It marks pages wherever the log would have their bits, also beyond its end
    /// and where there is none, which is memory of ours: so it marks none until a log covers all of the guest's memory.
    pub(super) fn kernel_features(&self, features: u64) -> u64 {
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
        let told = Arc::new(unsafe { DirtyLog::new(at, size as usize, map.clone()) });
        // Also what running rings mark of themselves: the kernel goes over to the new log in the midst of that.
        let own = self.vrings.iter().filter(|v| v.running).filter_map(|v| self.own_log_end(v)).max();
        let last = end_of(&self.regions).max(own.unwrap_or(0));
        if !told.covers(last) {
            let covered = size.saturating_mul(8 * LOG_PAGE_BYTES);
            return Err(refuse(format!("the dirty log covers {covered:#x} of {last:#x} bytes of memory")));
        }
        // The old one is kept until the kernel has gone over to this one.
        let old = (self.log.replace(told), self.log_map.replace(map.clone()));
        if let Some(kernel) = self.queues.kernel().cloned() {
            // SAFETY: it covers all that is marked (above), and `self.log` keeps the mapping until another log was told
            // or, when the session ends, features without logging.
            let taken = unsafe { kernel.set_log_base(at) };
            if let Err(e) = taken.and_then(|()| kernel.set_features(self.kernel_features(self.features))) {
                // Some rings may have gone over to it: none marks anything any more.
                self.log = None;
                self.update_log();
                if let Err(e) = kernel.set_features(self.kernel_features(self.features)) {
                    tracing::error!("{}: logging cannot be switched off: {e}", self.name);
                }
                return Err(refuse(e));
            }
        }
        drop(old);
        self.update_log();
        Ok(())
    }

    /// Tells running queues whether and where to log, between two requests.
    pub(super) fn update_log(&mut self) {
        for (index, vring) in self.vrings.iter().enumerate() {
            let (true, Some(addrs), Some(kick)) = (vring.running, vring.addrs, &vring.kick) else { continue };
            match &self.queues {
                Queues::User(set) => {
                    let (log, used) = self.logs(addrs);
                    let (at, way) = set.place(index as u16).expect("it runs");
                    set.with_drained(at, |q| {
                        if let Some(v) = virtqueue::owner(q).and_then(|owner| owner.ring(way)) {
                            v.set_log(log, used);
                        }
                    });
                }
                Queues::Kernel(kernel) => {
                    let setup = self.setup(vring, addrs, kick);
                    // SAFETY: as when it was started.
                    if let Err(e) = unsafe { kernel.set_addresses(index as u16, &setup) } {
                        let queue = self.queues.queue_of(index as u16);
                        self.reports.add(queue, None, &format!("its writes cannot be logged: {e}"));
                    }
                }
            }
        }
    }
}

/// The guest address behind the last region.
fn end_of(regions: &[Region]) -> u64 {
    regions.iter().map(|r| r.guest_addr.saturating_add(r.size)).max().unwrap_or(0)
}
