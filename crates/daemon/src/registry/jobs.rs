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

    /// Returns a name for a job: the requested one if it is free, otherwise the first free one.
    pub(crate) fn job_name(&self, asked: Option<&str>, kind: &str) -> Result<String> {
        let taken = |id: &str| self.exports.contains_key(id) || self.has_job(id);
        match asked {
            Some(id) if taken(id) => {
                Err(Error::exists(format!("there is a job or an export {id} already; choose another name")))
            }
            Some(id) => check_job_name(id).map(|()| id.to_owned()),
            None => Ok((0..)
                .map(|n| format!("{kind}{n}"))
                .find(|id| !taken(id) && !self.jobs.contains_key(id))
                .expect("numbers do not end")),
        }
    }

    /// Returns whether a job of that name is running.
    pub(crate) fn has_job(&self, id: &str) -> bool {
        self.jobs.get(id).is_some_and(|j| !j.is_concluded())
    }

    /// Adds a job.
    pub(crate) fn enter(&mut self, job: Arc<Job>) -> Result<()> {
        self.check_up()?;
        self.job_name(Some(&job.id), "")?;
        self.jobs.insert(job.id.clone(), job);
        Ok(())
    }
}
