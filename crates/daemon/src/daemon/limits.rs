//! Limits of exports, and resets of their service times.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportInfo, LimitsSpec};

use super::Daemon;
use crate::check::check_limits;
use crate::export::removing;
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
}
