//! Limits of exports.

use std::sync::Arc;

use vshunt_types::error::Result;
use vshunt_types::spec::LimitsSpec;

use super::Daemon;
use crate::check::check_limits;
use crate::export::removing;

impl Daemon {
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
        check_limits(name, limits)?;
        export.check_limitable()?;
        self.limits.set(name, export.limits(), limits)?;
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
