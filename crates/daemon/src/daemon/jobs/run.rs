//! The thread of a job. It starts the copying queue, limits its speed, and waits for its end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::sync::mpsc::{Sender, channel};
use std::thread::Thread;
use std::time::{Duration, Instant};

use vshunt_block::copy::{Copy, CopyQueue, DEPTH_MAX, NO_LIMIT, Side};
use vshunt_engine::{QueueSet, Settings};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::JobKind;

use super::share::{Share, WINDOW, Window};
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;
use crate::job::{ActiveCopy, Job};

/// How often a job without a speed limit is checked.
const TICK: Duration = Duration::from_millis(200);
/// How long writes of guests wait for a target or a fleecing file that makes no progress, before
/// the job is given up.
pub(super) const STALL: Duration = Duration::from_secs(15);
/// How long the end of a job waits for those who look at its queue, or move it.
const RELEASE: Duration = Duration::from_secs(30);

/// What a job copies, and for which disk.
pub(super) struct CopyPlan {
    /// The disk whose guests keep most of their speed. None: guests wait for the copy.
    pub(super) entry: Option<Arc<DiskEntry>>,
    /// The worker of its queue. None, or if that was freed: one is made.
    pub(super) worker: Option<u32>,
    pub(super) copy: Box<dyn FnOnce(Thread) -> Copy + Send>,
}

/// A copy that was started.
pub(super) struct RunningCopy {
    copy: Arc<Copy>,
    /// See [`CopyPlan`].
    entry: Option<Arc<DiskEntry>>,
    set: Arc<QueueSet>,
    /// The worker that was made for it.
    worker: Option<u32>,
}

impl RunningCopy {
    pub(super) fn copy(&self) -> &Arc<Copy> {
        &self.copy
    }

    /// Makes the copy end. Requests may be in flight.
    pub(super) fn stop(&self) {
        self.copy.stop.store(true, Relaxed);
        self.copy.work.notify();
    }
}

/// How long the thread of a job waits for a copy.
#[derive(Clone, Copy)]
pub(super) enum Patience {
    /// Until it is over.
    Whole,
    /// Until it is over; or it has to end, and does not need the source any more. The target may
    /// still have requests then.
    Source,
    /// Guests wait, too: until it is over or is cancelled, or until this time, if there is one.
    Guests { until: Option<Instant> },
}

/// How the thread of a job came back from a copy.
enum Outcome {
    /// The copy is over.
    Over,
    /// The target, or the fleecing file, made no progress for [`STALL`] while guests waited for it.
    Stalled,
    /// The patience ended first. Requests may be in flight.
    Left,
}

/// Returns the error of a job for which guests waited too long.
pub(super) fn took_nothing(job: &Job) -> Error {
    Error::busy(format!(
        "{} took nothing for {} s, for which guests' writes had to wait",
        job.target,
        STALL.as_secs()
    ))
}

/// Returns the error of a job that was cancelled.
pub(super) fn cancelled() -> Error {
    Error::busy("it was cancelled")
}

/// Returns the error of a job whose fleecing file cannot be written or read.
pub(super) fn fleece_failed(job: &Job, e: std::io::Error) -> Error {
    let file = job.fleece.as_deref().unwrap_or(Path::new("")).display();
    match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::limit(format!(
            "the fleecing file {file} cannot keep what guests overwrite: {e}; choose a file system with more space \
             (--fleece), which may take as much as the disk"
        )),
        _ => Error::new(
            Kind::Io,
            format!("the fleecing file {file} cannot be used: {e}; choose other storage for it (--fleece)"),
        ),
    }
}

/// The body of a job, which runs on its thread.
pub(super) type JobBody = Box<dyn FnOnce(&Daemon) + Send>;

impl Daemon {
    /// Copies until all is copied, the copy fails, or the job is cancelled. Called on the thread of
    /// the job.
    pub(super) fn copy(&self, job: &Job, plan: CopyPlan) -> Result<()> {
        let running = self.begin_copy(job, plan)?;
        let stalled = matches!(self.supervise(job, &running, Patience::Whole), Outcome::Stalled);
        let copy = running.copy.clone();
        self.end_copy(job, running);
        if stalled { Err(took_nothing(job)) } else { self.result(job, &copy) }
    }

    /// Copies on the thread of the job. Returns false if guests wait, and the time has come. `left`
    /// gets a copy that still has requests in flight, for [`end_left`](Self::end_left). Neither
    /// guests nor the source wait for these.
    ///
    /// # Errors
    /// The copy fails, or is cancelled; or guests wait, and the target makes no progress for
    /// [`STALL`].
    pub(super) fn copy_or_leave(
        &self,
        job: &Job,
        plan: CopyPlan,
        patience: Patience,
        left: &mut Option<RunningCopy>,
    ) -> Result<bool> {
        let mut running = self.begin_copy(job, plan)?;
        let outcome = self.supervise(job, &running, patience);
        let result = match outcome {
            Outcome::Stalled => Err(took_nothing(job)),
            Outcome::Over | Outcome::Left => self.result(job, &running.copy),
        };
        if matches!(outcome, Outcome::Over) {
            self.end_copy(job, running);
            return result.map(|()| true);
        }
        // The disk may be removed while the target hangs.
        running.entry = None;
        *left = Some(running);
        result.map(|()| false)
    }

    /// Waits until a copy that was left does not need the source any more, on the thread of the
    /// job.
    pub(super) fn await_source(left: Option<&RunningCopy>) {
        let Some(running) = left else { return };
        while !(running.copy.over.load(Acquire) || running.copy.leave_source()) {
            std::thread::park_timeout(TICK);
        }
    }

    /// Waits for the requests of a copy that was left, on the thread of the job.
    pub(super) fn end_left(&self, job: &Job, left: Option<RunningCopy>) {
        let Some(running) = left else { return };
        while !running.copy.over.load(Acquire) {
            std::thread::park_timeout(TICK);
        }
        self.end_copy(job, running);
    }

    /// Waits for the requests of a copy that was left, until the job is cancelled.
    ///
    /// # Errors
    /// The job was cancelled. `left` may still have the copy.
    pub(super) fn await_left(&self, job: &Job, left: &mut Option<RunningCopy>) -> Result<()> {
        let Some(running) = left else { return Ok(()) };
        while !running.copy.over.load(Acquire) {
            if job.state().cancelled && running.copy.leave_source() {
                return Err(cancelled());
            }
            std::thread::park_timeout(TICK);
        }
        self.end_left(job, left.take());
        Ok(())
    }

    /// Makes a worker for the queue of a job.
    pub(super) fn job_worker(&self, id: &str) -> Result<u32> {
        let worker = self.workers.create(Some(id.to_owned()), &Settings::default());
        worker.map_err(|e| e.context(format!("job {id} has no worker")))
    }

    /// Frees the worker of a job, whose own queues are gone. It stays if guests' queues were
    /// attached to it.
    pub(super) fn free_job_worker(&self, worker: u32) {
        if let Err(e) = self.workers.free(worker) {
            tracing::info!("worker {worker} of a job stays: {e}");
        }
    }

    /// Starts a copy on the thread of the job.
    pub(super) fn begin_copy(&self, job: &Job, plan: CopyPlan) -> Result<RunningCopy> {
        let copy = Arc::new((plan.copy)(std::thread::current()));
        let there = plan.worker.and_then(|worker| QueueSet::new(&job.id, &self.workers, &[worker]).ok());
        let (set, worker) = match there {
            Some(set) => (Arc::new(set), None),
            None => {
                let worker = self.job_worker(&job.id)?;
                let set = QueueSet::new(&job.id, &self.workers, &[worker]).inspect_err(|_| {
                    let _ = self.workers.free(worker);
                })?;
                (Arc::new(set), Some(worker))
            }
        };
        let entry = plan.entry;
        {
            let mut state = job.state();
            // Guests wait for a copy without an entry, so it has no limit.
            copy.paused.store(state.paused && entry.is_some(), Relaxed);
            if state.speed != Some(0) && entry.is_some() {
                // No speed until the first check.
                copy.credit.store(0, Relaxed);
            }
            copy.stop.store(state.cancelled, Relaxed);
            let thread = std::thread::current();
            state.active = Some(ActiveCopy { copy: copy.clone(), queue: set.clone(), thread });
        }
        set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
        Ok(RunningCopy { copy, entry, set, worker })
    }

    /// Releases what a copy had that is over.
    pub(super) fn end_copy(&self, job: &Job, running: RunningCopy) {
        let RunningCopy { copy, set, worker, .. } = running;
        drop(set.stop(0));
        {
            let mut state = job.state();
            state.done = copy.done.load(Relaxed);
            state.active = None;
        }
        // Others may still look at the queue, or move it.
        let until = Instant::now() + RELEASE;
        while Arc::strong_count(&set) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(set);
        worker.inspect(|&worker| self.free_job_worker(worker));
    }

    /// Returns the result of a copy that has ended, or has to end.
    pub(super) fn result(&self, job: &Job, copy: &Copy) -> Result<()> {
        match copy.failure() {
            None if job.state().cancelled => Err(cancelled()),
            None => Ok(()),
            Some((Side::Source, at, e)) => {
                Err(Error::io(format_args!("disk {} cannot be read at byte {at}", job.disk), e))
            }
            Some((Side::Fleece, _, e)) => Err(fleece_failed(job, e)),
            Some((Side::Target, at, e)) if job.kind == JobKind::Stream => Err(Error::io(
                format_args!(
                    "what is below {} cannot be copied to it at byte {at} (the log names the file that failed)",
                    job.target
                ),
                e,
            )),
            Some((Side::Target, at, e)) => {
                Err(Error::io(format_args!("{} cannot be written at byte {at}", job.target), e))
            }
        }
    }

    /// Waits until the queue reports its end, or the patience ends.
    fn supervise(&self, job: &Job, running: &RunningCopy, patience: Patience) -> Outcome {
        let (copy, entry) = (&running.copy, running.entry.as_ref());
        let mut share = Share::default();
        let (mut seen, mut pieces) = (self.requests_of(entry), 0);
        let mut last = Instant::now();
        let (mut done, mut moved) = (0, Instant::now());
        let mut stalled = false;
        while !copy.over.load(Acquire) {
            let (speed, cancelled) = {
                let state = job.state();
                // There is no limit while guests wait for the copy, or the user who completes or
                // finalizes a mirror.
                let limited = !state.completed || !(job.auto_finalize || state.finalized);
                let speed = if entry.is_some() && limited { state.speed } else { Some(0) };
                (speed, state.cancelled)
            };
            let tick = if speed == Some(0) { TICK } else { WINDOW };
            let mut pause = tick.saturating_sub(last.elapsed());
            if let Patience::Guests { until } = patience {
                let left = until.map_or(tick, |until| until.saturating_duration_since(Instant::now()));
                if cancelled || left.is_zero() {
                    copy.stop.store(true, Relaxed);
                    copy.work.notify();
                    return Outcome::Left;
                }
                pause = pause.min(left);
            }
            if matches!(patience, Patience::Source) && copy.leave_source() {
                return if stalled { Outcome::Stalled } else { Outcome::Left };
            }
            std::thread::park_timeout(pause);
            let now = Instant::now();
            // Progress that writes of guests may wait for.
            let progress = copy.done.load(Relaxed) + copy.work.stores();
            if progress != done || (entry.is_some() && copy.work.held_up() == 0) {
                (done, moved) = (progress, now);
            } else if now - moved > STALL {
                stalled = true;
                copy.stop.store(true, Relaxed);
                copy.work.notify();
                if entry.is_none() {
                    return Outcome::Stalled;
                }
            }
            let passed = now - last;
            if passed < tick && speed != Some(0) {
                continue;
            }
            last = now;
            let requests = self.requests_of(entry);
            let (credit, depth) = match speed {
                Some(0) => (NO_LIMIT, DEPTH_MAX),
                Some(speed) => {
                    let more = ((speed as f64 * passed.as_secs_f64()) as i64).max(1);
                    // Unused speed is not kept for later, except for one chunk.
                    let left = copy.credit.load(Relaxed).min(more);
                    (left.saturating_add(more), DEPTH_MAX)
                }
                None => match share
                    .next(requests.saturating_sub(seen), copy.old_data_writes.load(Relaxed) - pieces)
                {
                    Window::Free => (NO_LIMIT, DEPTH_MAX),
                    Window::Measure => (0, 1),
                    Window::Bytes(n) => (copy.credit.load(Relaxed).min(0).saturating_add(n as i64), 2),
                },
            };
            (seen, pieces) = (requests, copy.old_data_writes.load(Relaxed));
            copy.depth.store(depth, Relaxed);
            copy.credit.store(credit, Relaxed);
            copy.work.notify();
        }
        if stalled { Outcome::Stalled } else { Outcome::Over }
    }

    /// Returns the requests that users of a disk have completed so far.
    fn requests_of(&self, entry: Option<&Arc<DiskEntry>>) -> u64 {
        let Some(entry) = entry else { return 0 };
        let exports = self.state().exports_of(entry).unwrap_or_default();
        exports.iter().map(|e| e.requests()).sum()
    }

    /// Starts a job that is in the list, on its thread. `body` copies, and returns its result.
    pub(super) fn launch(
        &self,
        thread: Sender<JobBody>,
        job: Arc<Job>,
        body: impl FnOnce(&Self, &Arc<Job>) -> Result<()> + Send + 'static,
    ) {
        // Before the caller can change the job.
        self.tell_status(&job);
        let body = move |daemon: &Self| {
            let result = body(daemon, &job);
            daemon.conclude(&job, result);
        };
        thread.send(Box::new(body)).expect("it waits");
    }

    /// Makes the thread of a job, which waits for its body. The thread is made before the disk of
    /// the job is watched, so that nothing must be undone if there is no thread.
    pub(super) fn job_thread(&self, id: &str) -> Result<Sender<JobBody>> {
        let daemon = self.this.upgrade().expect("it is calling");
        let (sender, receiver) = channel::<JobBody>();
        let thread = std::thread::Builder::new().name(format!("job-{id}"));
        let spawned = thread.spawn(move || {
            if let Ok(body) = receiver.recv() {
                body(&daemon);
            }
        });
        spawned.map_err(|e| Error::io(format_args!("job {id} has no thread"), e))?;
        Ok(sender)
    }
}
