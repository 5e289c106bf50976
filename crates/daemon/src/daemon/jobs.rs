//! Jobs: long operations on a disk in use. Each has a copying queue on a worker, and a thread that
//! controls it.

mod backup;
mod commit;
mod fleece;
mod mirror;
mod point;
mod pull;
mod rounds;
mod run;
mod share;
mod stream;
mod target;
mod target_file;
mod together;

pub use self::together::PointAction;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use vshunt_engine::QueueSet;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{JobInfo, JobKind, JobStatus, QueueInfo};

pub use self::mirror::{HOLD, HOLD_MAX};
use super::shutdown::END_LIMIT;
use super::{Daemon, REMOVE_LIMIT};
use crate::disk_entry::DiskEntry;
use crate::event::Event;
use crate::export::{Export, queue_info};
use crate::job::Job;

/// Concluded jobs that are kept at most. The oldest is dropped first.
const CONCLUDED_MAX: usize = 64;
/// How long the end of the daemon waits for jobs before it says which ones.
const QUIET_END: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 3 });
/// How long it waits for requests of jobs that were cancelled. What such a job has copied is
/// incomplete.
const CANCELLED_LIMIT: Duration = REMOVE_LIMIT;
/// How long it waits for jobs that have copied all: their target is being made stable, which can
/// take long. Then time is left for exports and disks, until [`END_LIMIT`].
const PENDING_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 40 });
/// When those of them whose target is not stable yet, and that have not changed their disk, fail,
/// so that their disk is closed in good order.
const STABLE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 35 });
const _: () = assert!(QUIET_END.as_nanos() < CANCELLED_LIMIT.as_nanos());
const _: () = assert!(PENDING_LIMIT.as_nanos() + 2 * REMOVE_LIMIT.as_nanos() <= END_LIMIT.as_nanos());

/// The claim of a job that is being started to the disk that it reads. It ends when it is dropped.
#[must_use = "the disk is free at once"]
struct SourceClaim(Option<Arc<DiskEntry>>);

impl SourceClaim {
    /// Leaves the disk to the job, which has started.
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for SourceClaim {
    fn drop(&mut self) {
        if let Some(entry) = &self.0 {
            entry.watched.release();
        }
    }
}

/// The name of a job that is being started. No other job and no export gets it meanwhile. When this
/// is dropped, the job is in the list, or the name is free.
struct JobName<'a> {
    daemon: &'a Daemon,
    id: String,
}

impl std::ops::Deref for JobName<'_> {
    type Target = String;

    fn deref(&self) -> &String {
        &self.id
    }
}

impl Drop for JobName<'_> {
    fn drop(&mut self) {
        self.daemon.state().starting.remove(&self.id);
    }
}

impl Daemon {
    /// Chooses the name of a job: the requested one if it is free, otherwise the first free one.
    fn job_name(&self, asked: Option<&str>, kind: &str) -> Result<JobName<'_>> {
        let id = self.state().reserve_job_name(asked, kind)?;
        Ok(JobName { daemon: self, id })
    }

    /// Returns all jobs, sorted by name, including concluded jobs that were not dismissed.
    pub fn jobs(&self) -> Vec<JobInfo> {
        let jobs: Vec<_> = self.state().jobs.values().cloned().collect();
        jobs.iter().map(|j| j.info()).collect()
    }

    /// Cancels a job, and returns at once. Its target is not usable as a backup. `force`: also if
    /// exports serve the disk of a pull backup, whose reads fail then.
    ///
    /// # Errors
    /// There is no such job, it is about to end, or exports serve the disk of a pull backup.
    pub fn job_cancel(&self, id: &str, force: bool) -> Result<()> {
        let job = self.running(id)?;
        if !force {
            self.withdraw_frozen(&job)?;
        }
        self.cancel(&job)
    }

    /// Cancels a job, even if exports serve its disk.
    fn cancel(&self, job: &Job) -> Result<()> {
        let id = &job.id;
        {
            let mut state = job.state();
            match state.status {
                JobStatus::Pending if !state.awaits_finalize => {
                    return Err(Error::busy(format!(
                        "job {id} has copied all and is about to end; wait for it"
                    )));
                }
                // It ends already, with an error of its own.
                JobStatus::Aborting => return Ok(()),
                _ => state.cancelled = true,
            }
        }
        if let Some(work) = job.active() {
            work.copy.stop.store(true, Relaxed);
        }
        job.wake();
        Ok(())
    }

    /// Completes a job that waits for it: a pull backup, or a mirror that is ready. `switch`: the
    /// disk of a mirror continues in the target; if not, the target is a copy of the disk as it is
    /// now. `hold`: for how long guests may be held for what they have written last, 1 ms to
    /// [`HOLD_MAX`]; None is [`HOLD`]. A mirror that cannot be completed stays ready, and its error
    /// says why.
    ///
    /// # Errors
    /// There is no such job, it completes by itself, is not ready, is ending already, or exports
    /// serve the disk of a pull backup.
    pub fn job_complete(&self, id: &str, switch: bool, hold: Option<Duration>) -> Result<()> {
        let job = self.running(id)?;
        match job.kind {
            JobKind::Mirror => self.mirror_complete(&job, switch, hold.unwrap_or(HOLD)),
            _ if hold.is_some() => Err(Error::invalid(format!(
                "job {id} is no mirror, and holds no guests; leave out --hold (hold-ms)"
            ))),
            JobKind::Backup if job.pull.is_some() && !switch => Err(Error::invalid(format!(
                "job {id} is a pull backup, which moves no disk; leave out --no-switch (switch false)"
            ))),
            JobKind::Backup if job.pull.is_some() => self.pull_complete(&job),
            JobKind::Backup | JobKind::Commit | JobKind::Stream => Err(Error::invalid(format!(
                "job {id} completes by itself when all is copied; only a pull backup or a mirror is completed by a command"
            ))),
        }
    }

    /// Finalizes a job that has copied all, and does not do that by itself.
    ///
    /// # Errors
    /// There is no such job, it finalizes by itself, or has not copied all.
    pub fn job_finalize(&self, id: &str) -> Result<()> {
        let job = self.running(id)?;
        if job.auto_finalize {
            return Err(Error::invalid(format!(
                "job {id} finalizes by itself; only one that was started with --no-finalize (auto-finalize false) is finalized by a \
                 command"
            )));
        }
        {
            let mut state = job.state();
            if state.cancelled {
                return Err(Error::busy(format!("job {id} is being cancelled")));
            }
            match state.status {
                JobStatus::Pending if state.awaits_finalize && !state.finalized => state.finalized = true,
                JobStatus::Pending => {
                    return Err(Error::busy(format!("job {id} is being finalized already")));
                }
                JobStatus::Aborting => return Err(Error::busy(format!("job {id} has failed"))),
                JobStatus::Ready => {
                    return Err(Error::busy(format!("job {id} is ready, and must be completed first")));
                }
                _ => return Err(Error::busy(format!("job {id} is not pending: it still copies"))),
            }
        }
        job.wake();
        Ok(())
    }

    /// Announces that a job waits to be finalized.
    fn announce_pending(&self, job: &Job) {
        {
            let mut state = job.state();
            state.thread = Some(std::thread::current());
            (state.status, state.paused) = (JobStatus::Pending, false);
            (state.awaits_finalize, state.finalized) = (true, false);
        }
        self.tell_status(job);
        self.tell(&Event::JobPending(job.info()));
    }

    /// Waits, on the thread of a job that has copied all, until it may be finalized.
    ///
    /// # Errors
    /// It was cancelled meanwhile.
    fn await_finalize(&self, job: &Job) -> Result<()> {
        if job.auto_finalize {
            return Ok(());
        }
        self.announce_pending(job);
        loop {
            {
                let state = job.state();
                if state.cancelled {
                    return Err(run::cancelled());
                }
                if state.finalized {
                    return Ok(());
                }
            }
            std::thread::park();
        }
    }

    /// Ends a job that a front end of QEMU cancels without force: a mirror that is ready completes,
    /// and its disk stays where it is.
    pub fn job_cancel_softly(&self, id: &str) -> Result<()> {
        let job = self.running(id)?;
        let ready = job.kind == JobKind::Mirror && job.state().status == JobStatus::Ready;
        if ready { self.mirror_complete(&job, false, HOLD) } else { self.job_cancel(id, false) }
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
        if job.pull.is_some() {
            return Err(pull::no_copy(&job));
        }
        {
            let mut state = job.state();
            if state.status == JobStatus::Ready {
                return Err(Error::busy(format!(
                    "job {id} is ready, and copies only what guests write; complete it, or cancel it"
                )));
            }
            if state.awaits_finalize {
                return Err(Error::busy(format!(
                    "job {id} has copied all, and waits to be finalized: finalize it, or cancel it"
                )));
            }
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
        if job.pull.is_some() {
            return Err(pull::no_copy(&job));
        }
        job.state().speed = speed;
        job.wake();
        Ok(())
    }

    /// Returns the exports of a disk that a job changes or leaves, whose size must stay.
    ///
    /// # Errors
    /// The disk cannot be changed now, or users of an export could change its size.
    fn exports_for_job(&self, entry: &Arc<DiskEntry>) -> Result<Vec<Arc<Export>>> {
        let exports = self.changeable(entry)?;
        match exports.iter().find(|e| e.spec.growable == Some(true)) {
            Some(export) => Err(Error::unsupported(format!(
                "export {} of disk {} is growable=on: its users could change the size while the job runs; remove it first",
                export.spec.name, entry.name
            ))),
            None => Ok(exports),
        }
    }

    /// Claims a disk for a job that reads it, before the job has started. The caller holds its
    /// `op_lock`.
    ///
    /// # Errors
    /// The disk does not exist any more, or another job uses it.
    fn claim_source(&self, entry: &Arc<DiskEntry>, job: &str) -> Result<SourceClaim> {
        // The disk is removed under this lock.
        let state = self.state();
        state.exports_of(entry)?;
        entry.watched.claim_source(&entry.name, job)?;
        Ok(SourceClaim(Some(entry.clone())))
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

    /// Cancels all jobs, and waits for their end, until [`CANCELLED_LIMIT`] or [`PENDING_LIMIT`].
    /// No job is started any more. Returns those that have not ended, or not with the storage of
    /// their target.
    pub(super) fn end_jobs(&self) -> Vec<String> {
        let jobs: Vec<_> = self.state().jobs.values().cloned().collect();
        for job in jobs.iter().filter(|job| !job.is_concluded()) {
            let _ = self.cancel(job);
        }
        let (begin, mut told, mut late) = (Instant::now(), false, None);
        loop {
            let state = self.state();
            let left: Vec<_> = state.jobs.values().filter(|job| !job.is_concluded()).cloned().collect();
            let limit = match left.iter().any(|job| job.is_pending()) {
                true => PENDING_LIMIT,
                false => CANCELLED_LIMIT,
            };
            let passed = begin.elapsed();
            if left.is_empty() || passed >= limit {
                drop(state);
                let mut unended: Vec<_> = left.iter().map(|job| given_up(job, limit)).collect();
                unended.extend(late.unwrap_or_default());
                unended.sort();
                unended.dedup();
                return unended;
            }
            if passed >= QUIET_END && !told {
                drop(state);
                told = true;
                left.iter().for_each(|job| warn_of_end(job));
                continue;
            }
            if passed >= STABLE_LIMIT && late.is_none() {
                drop(state);
                late = Some(left.iter().filter_map(|job| give_up_target(job)).collect::<Vec<_>>());
                continue;
            }
            let steps = [(told, QUIET_END), (late.is_some(), STABLE_LIMIT), (false, limit)];
            let next = steps.iter().filter(|(done, _)| !done).map(|(_, at)| *at).min();
            let time = next.unwrap_or(limit).saturating_sub(passed);
            drop(self.changed.wait_timeout(state, time));
        }
    }

    /// Returns whether the daemon ends. Nothing waits for storage then that others do not need.
    fn is_ending(&self) -> bool {
        self.state().shut
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

/// Says what the end of the daemon waits for.
fn warn_of_end(job: &Job) {
    tracing::warn!(
        "the daemon ends when job {} does, which waits for {}, and without it {} s after it was told to end",
        job.id,
        job.storage_in_use().unwrap_or_else(|| job.target.clone()),
        if job.is_pending() { PENDING_LIMIT } else { CANCELLED_LIMIT }.as_secs()
    );
}

/// Makes a backup fail that waits for its target to be stable, and returns its name. Others change
/// their disk, or have a limit of their own.
fn give_up_target(job: &Job) -> Option<String> {
    if job.kind != JobKind::Backup || !job.is_pending() {
        return None;
    }
    tracing::warn!(
        "job {} has copied all, but {} is not on stable storage after {} s: it is no backup",
        job.id,
        job.target,
        STABLE_LIMIT.as_secs()
    );
    job.state().cancelled = true;
    job.wake();
    Some(job.id.clone())
}

/// Says which job the daemon does not wait for any more, and returns its name.
fn given_up(job: &Job, limit: Duration) -> String {
    tracing::warn!(
        "job {} has requests that do not end within {} s, of {}. The daemon ends without it",
        job.id,
        limit.as_secs(),
        job.storage_in_use().unwrap_or_else(|| job.target.clone())
    );
    job.id.clone()
}

/// Adds to the error of a job what to do against it.
fn remedied(e: Error, job: &Job) -> Error {
    match (e.errno(), job.kind) {
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Commit) => e.remedy(format_args!(
            "disk {} continues in its overlay: free space for {}, and commit again",
            job.disk, job.target
        )),
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Stream) => e.remedy(format_args!(
            "disk {} keeps its backing image: free space for {}, and start the stream again",
            job.disk, job.target
        )),
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Backup) => {
            e.remedy("free space there, or choose a target on another file system")
        }
        (Some(libc::ENOSPC | libc::EDQUOT), JobKind::Mirror) => e.remedy(format_args!(
            "disk {} stays where it is: free space there, or choose another target",
            job.disk
        )),
        _ => e,
    }
}

#[cfg(test)]
mod tests {
    use vshunt_types::error::Kind;
    use vshunt_types::spec::{DiskSpec, Format};

    use super::*;
    use crate::daemon::Options;
    use crate::job::JobOptions;

    #[test]
    fn the_disk_of_a_job_that_is_being_started_stays() {
        let daemon = Daemon::new(Options::default()).unwrap();
        let (name, format) = ("d0".to_owned(), Some(Format::Ram));
        daemon.disk_add(DiskSpec { name, format, size: Some(1 << 20), ..DiskSpec::default() }).unwrap();
        let entry = daemon.state().disk("d0").unwrap();
        let claim = daemon.claim_source(&entry, "j0").unwrap();
        let refused = daemon.disk_remove("d0").unwrap_err();
        assert!(refused.kind() == Kind::Busy && refused.to_string().contains("j0"), "{refused}");
        assert!(daemon.claim_source(&entry, "j1").is_err());
        // It did not start.
        drop((claim, entry));
        daemon.disk_remove("d0").unwrap();
        daemon.shutdown();
    }

    #[test]
    fn a_job_that_fails_keeps_its_error_when_it_is_cancelled() {
        let daemon = Daemon::new(Options::default()).unwrap();
        let job = Arc::new(Job::new("j0", JobKind::Mirror, "d0", "there".to_owned(), JobOptions::default()));
        daemon.state().enter(job.clone()).unwrap();
        let failed = job.decide(Err(Error::invalid("no")));
        daemon.job_cancel("j0", false).unwrap();
        daemon.conclude(&job, failed);
        assert_eq!((job.info().error.as_deref(), job.info().cancelled), (Some("no"), false));
        daemon.shutdown();
    }
}
