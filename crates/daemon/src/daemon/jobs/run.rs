//! The thread of a job. It starts the copying queue, limits its speed, and waits for its end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::sync::mpsc::{Sender, channel};
use std::thread::Thread;
use std::time::{Duration, Instant};

use vshunt_block::copy::{Copy, CopyQueue, DEPTH_MAX, NO_LIMIT, Side};
use vshunt_engine::{QueueSet, Settings};
use vshunt_types::error::{Error, Result};

use super::share::{Share, WINDOW, Window};
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;
use crate::job::{ActiveCopy, Job};

/// How often a job without a speed limit is checked.
const TICK: Duration = Duration::from_millis(200);
/// How long writes of guests wait for a target that makes no progress, before the job is given up.
const STALL: Duration = Duration::from_secs(15);

/// What a job copies, and for which disk.
pub(super) struct CopyPlan {
    /// The disk whose guests keep most of their speed. None: guests wait for the copy.
    pub(super) entry: Option<Arc<DiskEntry>>,
    pub(super) copy: Box<dyn FnOnce(Thread) -> Copy + Send>,
}

/// Returns the error of a job whose fleecing file cannot be written or read.
fn fleece_failed(job: &Job, e: std::io::Error) -> Error {
    let file = job.fleece.as_deref().unwrap_or(Path::new("")).display();
    match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::limit(format!(
            "the fleecing file {file} cannot keep what guests overwrite: {e}; choose a file system with more space \
             (--fleece), which may take as much as the disk"
        )),
        _ => Error::io(format_args!("the fleecing file {file} cannot be used"), e),
    }
}

/// The body of a job, which runs on its thread.
pub(super) type JobBody = Box<dyn FnOnce(&Daemon) + Send>;

impl Daemon {
    /// Copies until all is copied, the copy fails, or the job is cancelled. Called on the thread of
    /// the job.
    pub(super) fn copy(&self, job: &Job, plan: CopyPlan) -> Result<()> {
        let copy = Arc::new((plan.copy)(std::thread::current()));
        let worker = self.workers.create(Some(job.id.clone()), &Settings::default());
        let worker = worker.map_err(|e| e.context(format!("job {} has no worker", job.id)))?;
        let copied = self.copy_on(job, plan.entry.as_ref(), &copy, worker);
        if let Err(e) = self.workers.free(worker) {
            tracing::debug!("worker {worker} stays: {e}");
        }
        copied
    }

    fn copy_on(
        &self,
        job: &Job,
        entry: Option<&Arc<DiskEntry>>,
        copy: &Arc<Copy>,
        worker: u32,
    ) -> Result<()> {
        let set = Arc::new(QueueSet::new(&job.id, &self.workers, &[worker])?);
        {
            let mut state = job.state();
            // Guests wait for this copy, so it has no limit.
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
        let stalled = self.supervise(job, entry, copy);
        drop(set.stop(0));
        {
            let mut state = job.state();
            state.done = copy.done.load(Relaxed);
            state.active = None;
        }
        if stalled {
            return Err(Error::busy(format!(
                "{} took nothing for {} s, for which guests' writes had to wait",
                job.target,
                STALL.as_secs()
            )));
        }
        match copy.failure() {
            None if job.state().cancelled => Err(Error::busy("it was cancelled")),
            None => Ok(()),
            Some((Side::Source, at, e)) => {
                Err(Error::io(format_args!("disk {} cannot be read at byte {at}", job.disk), e))
            }
            Some((Side::Fleece, _, e)) => Err(fleece_failed(job, e)),
            Some((Side::Target, at, e)) => {
                Err(Error::io(format_args!("{} cannot be written at byte {at}", job.target), e))
            }
        }
    }

    /// Waits until the queue reports its end. Returns true if the job was given up.
    fn supervise(&self, job: &Job, entry: Option<&Arc<DiskEntry>>, copy: &Copy) -> bool {
        let mut share = Share::default();
        let (mut seen, mut pieces) = (self.requests_of(entry), 0);
        let mut last = Instant::now();
        let (mut done, mut moved) = (0, Instant::now());
        let mut stalled = false;
        while !copy.over.load(Acquire) {
            // Guests wait for this copy, so it has no limit.
            let speed = if entry.is_some() { job.state().speed } else { Some(0) };
            let tick = if speed == Some(0) { TICK } else { WINDOW };
            std::thread::park_timeout(tick.saturating_sub(last.elapsed()));
            let now = Instant::now();
            // Progress that writes of guests may wait for.
            let progress = copy.done.load(Relaxed) + copy.work.stores();
            if progress != done || copy.work.held_up() == 0 {
                (done, moved) = (progress, now);
            } else if now - moved > STALL {
                stalled = true;
                copy.stop.store(true, Relaxed);
                copy.work.notify();
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
        stalled
    }

    /// Returns the requests that users of a disk have completed so far.
    fn requests_of(&self, entry: Option<&Arc<DiskEntry>>) -> u64 {
        let Some(entry) = entry else { return 0 };
        let exports = self.state().exports_of(entry).unwrap_or_default();
        exports.iter().map(|e| e.requests()).sum()
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
