//! The jobs of the registry.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};

use super::Registry;
use crate::check::check_job_name;
use crate::job::Job;

impl Registry {
    pub(crate) fn job(&self, id: &str) -> Result<Arc<Job>> {
        self.jobs
            .get(id)
            .cloned()
            .ok_or_else(|| Error::not_found(format!("there is no job {id}; see `vshunt job list`")))
    }

    /// Reserves a name for a job: the requested one if it is free, otherwise the first free one.
    pub(crate) fn reserve_job_name(&mut self, asked: Option<&str>, kind: &str) -> Result<String> {
        let taken = |id: &str| self.exports.contains_key(id) || self.has_job(id);
        let id = match asked {
            Some(id) if taken(id) => {
                return Err(Error::exists(format!(
                    "there is a job or an export {id} already; choose another name"
                )));
            }
            Some(id) => check_job_name(id).map(|()| id.to_owned())?,
            None => (0..)
                .map(|n| format!("{kind}{n}"))
                .find(|id| !taken(id) && !self.jobs.contains_key(id))
                .expect("numbers do not end"),
        };
        self.starting.insert(id.clone());
        Ok(id)
    }

    /// Returns whether a job of that name is running, or is being started.
    pub(crate) fn has_job(&self, id: &str) -> bool {
        self.starting.contains(id) || self.jobs.get(id).is_some_and(|j| !j.is_concluded())
    }

    /// Adds a job, whose name was reserved.
    pub(crate) fn enter(&mut self, job: Arc<Job>) -> Result<()> {
        self.check_up()?;
        self.jobs.insert(job.id.clone(), job);
        Ok(())
    }
}
