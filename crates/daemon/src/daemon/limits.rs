//! Limits of exports, and resets of their service times.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::LimitsSpec;

use super::Daemon;
use crate::check::check_limits;
use crate::export::removing;

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

    /// Sets the limits of an export in place of those that it has; `None` lifts them. They take
    /// effect within 100 ms, and their buckets are empty.
    ///
    /// # Errors
    /// There is no such export, it cannot have limits, or they are wrong.
    pub fn export_limit(&self, name: &str, limits: Option<&LimitsSpec>) -> Result<()> {
        let export = self.serving(name)?;
        let Some(limits) = limits else {
            self.limits.lift(name);
            return Ok(());
        };
        export.check_limitable()?;
        let kind = export.spec.kind;
        check_limits(name, kind.limits(), limits)?;
        self.limits.set(name, kind, export.limits(), limits)?;
        // The removal lifts them, too. It may have done so in the meantime.
        match self.serving(name) {
            Ok(now) if Arc::ptr_eq(&now, &export) => Ok(()),
            _ => {
                self.limits.lift(name);
                Err(removing(name))
            }
        }
    }
}
