//! Limits of exports, and resets of their service times.

use std::sync::Arc;

use vshunt_block::SECTOR_BYTES;
use vshunt_fuse::TRANSFER_BYTES_MAX;
use vshunt_nbd_server::PAYLOAD_BYTES_MAX;
use vshunt_net::FRAME_MAX;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportInfo, ExportKind, LimitKind, LimitsSpec};
use vshunt_vhost_user::blk::{REQUEST_BYTES_MAX, ZERO_SECTORS_MAX};

use super::Daemon;
use crate::check::check_limits;
use crate::export::removing;
use crate::limits::rates;
use crate::registry::Phase;
use crate::service_totals::ServiceTotals;

impl Daemon {
    /// Resets the service times of an export.
    ///
    /// # Errors
    /// There is no such export, or its service times are not measured.
    pub fn export_latency_reset(&self, name: &str) -> Result<()> {
        match self.serving(name)?.reset_latency() {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "service times of export {name} are not measured; they are for disks over vhost-user-blk and FUSE that the \
                 daemon serves with latency=sampled or latency=on"
            ))),
        }
    }

    /// Returns the service time of all operations of an export with this state, which
    /// [`exports`](Self::exports) returned. 0 if nothing is measured, or the export was removed.
    pub fn service_totals(&self, export: &ExportInfo) -> ServiceTotals {
        let entry = self.state().exports.get(&export.spec.name).and_then(|e| e.phase.export().cloned());
        entry.map_or(ServiceTotals::default(), |entry| entry.service_estimates.update(export))
    }

    /// Sets the limits of an export in place of those that it has; `None` lifts them. They take
    /// effect within 100 ms. What is in the buckets of limits that the export or its group has
    /// stays there, with other rates, too.
    ///
    /// # Errors
    /// There is no such export, it cannot have limits, or they are wrong.
    pub fn export_limit(&self, name: &str, limits: Option<&LimitsSpec>) -> Result<()> {
        let export = self.serving(name)?;
        let kind = export.spec.kind;
        if let Some(limits) = limits {
            export.check_limitable()?;
            check_limits(name, kind.limits(), limits)?;
        }
        // With the lock until the limits are set: a removal marks the export first, and lifts the
        // limits afterwards. So none are set for an export that is gone, and none are lifted of
        // another one that has its name since.
        let state = self.state();
        match state.phase(name)? {
            Phase::Serving(now) if Arc::ptr_eq(&now, &export) => {}
            _ => return Err(removing(name)),
        }
        match limits {
            None => self.limits.lift(name),
            Some(limits) => self.limits.set(name, kind, export.limits(), limits)?,
        }
        drop(state);
        Ok(())
    }

    /// Says of each export with limits how long these hold back a request at most.
    pub(super) fn add_longest_waits(&self, infos: &mut [ExportInfo]) {
        let limited = |info: &ExportInfo| info.spec.limits.is_some();
        let longest: Vec<u64> = infos
            .iter()
            .map(|info| if limited(info) { self.longest_request_bytes(info) } else { 0 })
            .collect();
        let groups: Vec<Option<String>> = infos
            .iter()
            .map(|info| info.spec.limits.as_ref().and_then(|limits| limits.group.clone()))
            .collect();
        for (at, info) in infos.iter_mut().enumerate() {
            let Some(limits) = &info.spec.limits else { continue };
            let shares =
                |other: &usize| *other == at || (groups[at].is_some() && groups[*other] == groups[at]);
            let members: Vec<usize> = (0..groups.len()).filter(shares).collect();
            let bytes = members.iter().filter_map(|member| longest.get(*member)).max().copied().unwrap_or(0);
            let queues = match info.spec.kind.limits() {
                // Two rings a pair. The control queue has no frames.
                Some(LimitKind::Network) => {
                    2 * info.queue_list.iter().filter(|queue| queue.net.is_some()).count()
                }
                _ => info.queue_list.len(),
            };
            let wait = rates(limits).longest_wait(bytes, queues as u64, members.len() as u64);
            info.limited_ms_max = Some(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        }
    }

    /// Returns the most bytes that one request of an export costs.
    fn longest_request_bytes(&self, info: &ExportInfo) -> u64 {
        let disk = self.state().disk(&info.spec.disk).ok();
        let zeroes = |most: u64| {
            disk.as_ref().map_or(0, |entry| entry.disk.zeroes_cost_max(most.min(entry.disk.size_bytes())))
        };
        match info.spec.kind {
            ExportKind::VhostUserBlk => {
                REQUEST_BYTES_MAX.max(zeroes(u64::from(ZERO_SECTORS_MAX) * SECTOR_BYTES))
            }
            // Its users may make the disk longer.
            ExportKind::Fuse if info.spec.growable == Some(true) => {
                let zeroes = disk.as_ref().map_or(0, |entry| entry.disk.zeroes_cost_max(u64::MAX));
                u64::from(TRANSFER_BYTES_MAX).max(zeroes)
            }
            ExportKind::Fuse => u64::from(TRANSFER_BYTES_MAX).max(zeroes(u64::MAX)),
            ExportKind::Nbd => u64::from(PAYLOAD_BYTES_MAX).max(zeroes(u64::MAX)),
            ExportKind::VhostUserNet | ExportKind::Uplink => FRAME_MAX as u64,
        }
    }
}
