//! Jobs: long operations on a disk in use. Each has a copying queue on a worker, and a thread that
//! controls it.

mod backup;
mod commit;
mod fleece;
mod run;
mod share;
mod target;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vshunt_engine::QueueSet;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{JobInfo, JobKind, JobStatus, QueueInfo};

use super::Daemon;
use crate::event::Event;
use crate::export::queue_info;
use crate::job::Job;

/// Concluded jobs that are kept at most. The oldest is dropped first.
const CONCLUDED_MAX: usize = 64;

impl Daemon {
    /// Returns all jobs, sorted by name, including concluded jobs that were not dismissed.
    pub fn jobs(&self) -> Vec<JobInfo> {
        let jobs: Vec<_> = self.state().jobs.values().cloned().collect();
        jobs.iter().map(|j| j.info()).collect()
    }

    /// Cancels a job, and returns at once. Its target is not usable as a backup.
    pub fn job_cancel(&self, id: &str) -> Result<()> {
        let job = self.running(id)?;
        {
            let mut state = job.state();
            if state.status == JobStatus::Pending {
                return Err(Error::busy(format!("job {id} has copied all and is about to end; wait for it")));
            }
            state.cancelled = true;
        }
        if let Some(work) = job.active() {
            work.copy.stop.store(true, Relaxed);
        }
        job.wake();
        Ok(())
    }

    /// Pauses a job: it copies only what guests overwrite, until it is resumed.
    pub fn job_pause(&self, id: &str) -> Result<()> {
        self.set_paused(id, true)
    }

    /// Undoes [`job_pause`](Self::job_pause).
    pub fn job_resume(&self, id: &str) -> Result<()> {
        self.set_paused(id, false)
    }

    fn set_paused(&self, id: &str, paused: bool) -> Result<()> {
        let job = self.running(id)?;
        {
            let mut state = job.state();
            if !matches!(state.status, JobStatus::Running | JobStatus::Paused) {
                return Err(Error::busy(format!("job {id} is about to end; wait for it")));
            }
            state.paused = paused;
            if let Some(work) = &state.active {
                work.copy.paused.store(paused, Relaxed);
            }
            if matches!(state.status, JobStatus::Running | JobStatus::Paused) {
                state.status = if paused { JobStatus::Paused } else { JobStatus::Running };
            }
        }
        job.wake();
        self.tell_status(&job);
        Ok(())
    }

    /// Sets the speed limit of a job, bytes per second. 0: no limit. None: guests keep most of
    /// their speed.
    pub fn job_set_speed(&self, id: &str, speed: Option<u64>) -> Result<()> {
        let job = self.running(id)?;
        job.state().speed = speed;
        job.wake();
        Ok(())
    }

    /// Removes a job that failed before it started.
    pub(super) fn withdraw(&self, id: &str) {
        self.state().jobs.remove(id);
        self.changed.notify_all();
    }

    /// Forgets a concluded job.
    ///
    /// # Errors
    /// There is no such job, or it is running.
    pub fn job_dismiss(&self, id: &str) -> Result<()> {
        let mut state = self.state();
        if !state.job(id)?.is_concluded() {
            return Err(Error::busy(format!("job {id} is not over; cancel it first, or wait for it")));
        }
        state.jobs.remove(id);
        Ok(())
    }

    fn running(&self, id: &str) -> Result<Arc<Job>> {
        let job = self.state().job(id)?;
        match job.is_concluded() {
            true => Err(Error::invalid(format!("job {id} is over"))),
            false => Ok(job),
        }
    }

    pub(super) fn tell_status(&self, job: &Job) {
        let status = job.state().status;
        self.tell(&Event::JobStatus { id: job.id.clone(), status });
    }

    /// Concludes a job, and tells listeners and threads that wait.
    pub(super) fn conclude(&self, job: &Arc<Job>, result: Result<()>) {
        {
            let mut registry = self.state();
            let ended = registry.jobs_ended;
            registry.jobs_ended += 1;
            let mut state = job.state();
            if let Some(work) = state.active.take() {
                state.done = work.copy.done.load(Relaxed);
            }
            state.ended = ended;
            state.error = result.err().filter(|_| !state.cancelled).map(|e| remedied(e, job).to_string());
            state.status = JobStatus::Concluded;
            drop(state);
            let over: Vec<_> = registry.jobs.values().filter(|j| j.is_concluded()).cloned().collect();
            if job.auto_dismiss {
                registry.jobs.remove(&job.id);
            } else if over.len() > CONCLUDED_MAX
                && let Some(oldest) = over.iter().min_by_key(|j| j.state().ended)
            {
                registry.jobs.remove(&oldest.id);
            }
        }
        self.changed.notify_all();
        self.tell_status(job);
        let info = job.info();
        if let Some(why) = &info.error {
            tracing::error!("job {}: {why}", job.id);
        }
        self.tell(&Event::JobEnded(info));
    }

    /// Cancels all jobs, and waits for their end. No job is started any more.
    pub(super) fn end_jobs(&self) {
        for info in self.jobs() {
            let _ = self.job_cancel(&info.id);
        }
        let mut state = self.state();
        while state.jobs.values().any(|j| !j.is_concluded()) {
            state = self.wait(state);
        }
    }

    /// Returns the queue of a job, so that it can be attached to a worker.
    pub(super) fn job_queue(&self, id: &str) -> Option<Arc<QueueSet>> {
        let job = self.state().jobs.get(id).cloned()?;
        job.active().map(|w| w.queue)
    }

    /// Returns the queues of all jobs.
    pub(super) fn job_queues(&self) -> Vec<QueueInfo> {
        let jobs: Vec<_> = self.state().jobs.values().cloned().collect();
        let info = |job: &Arc<Job>| {
            job.active().map(|w| queue_info(&job.id, 0, w.queue.placement(0), w.queue.stats(0), false))
        };
        jobs.iter().filter_map(info).collect()
    }
}

/// Adds to the error of a job what to do against it.
fn remedied(e: Error, job: &Job) -> Error {
    match (e.errno(), job.kind) {
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Commit) => e.remedy(format_args!(
            "disk {} continues in its overlay: free space for {}, and commit again",
            job.disk, job.target
        )),
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Backup) => {
            e.remedy("free space there, or choose a target on another file system")
        }
        _ => e,
    }
}
