//! A job's thread: it starts the copying queue, holds it back as far as that is asked for, and
//! looks after its end.

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
use crate::job::{AtWork, Job};

/// How often a job is looked at that nothing holds back.
const TICK: Duration = Duration::from_millis(200);
/// How long writes of guests wait for a target that takes nothing, before the job is given up.
const STALL: Duration = Duration::from_secs(15);

/// What a job copies.
pub(super) struct Plan {
    /// Whose guests keep most of their speed; none: they wait for it.
    pub(super) entry: Option<Arc<DiskEntry>>,
    pub(super) copy: Box<dyn FnOnce(Thread) -> Copy + Send>,
}

/// What a job does, on its thread.
pub(super) type Life = Box<dyn FnOnce(&Daemon) + Send>;

impl Daemon {
    /// Copies, until all is copied, or it failed or was cancelled. On the job's thread.
    pub(super) fn copy(&self, job: &Job, plan: Plan) -> Result<()> {
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
            // Guests that wait are not to wait for longer.
            copy.paused.store(state.paused && entry.is_some(), Relaxed);
            if state.speed != Some(0) && entry.is_some() {
                // Until it is looked after for the first time.
                copy.credit.store(0, Relaxed);
            }
            copy.stop.store(state.cancelled, Relaxed);
            let thread = std::thread::current();
            state.at_work = Some(AtWork { copy: copy.clone(), queue: set.clone(), thread });
        }
        set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
        let stalled = self.look_after(job, entry, copy);
        drop(set.stop(0));
        {
            let mut state = job.state();
            state.done = copy.done.load(Relaxed);
            state.at_work = None;
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
            Some((Side::Target, at, e)) => {
                Err(Error::io(format_args!("{} cannot be written at byte {at}", job.target), e))
            }
        }
    }

    /// Until the queue says that it is over. True: it was given up.
    fn look_after(&self, job: &Job, entry: Option<&Arc<DiskEntry>>, copy: &Copy) -> bool {
        let mut share = Share::default();
        let (mut seen, mut pieces) = (self.requests_of(entry), 0);
        let mut last = Instant::now();
        let (mut done, mut moved) = (0, Instant::now());
        let mut stalled = false;
        while !copy.over.load(Acquire) {
            // Guests that wait are not to wait for longer.
            let speed = if entry.is_some() { job.state().speed } else { Some(0) };
            let tick = if speed == Some(0) { TICK } else { WINDOW };
            std::thread::park_timeout(tick.saturating_sub(last.elapsed()));
            let now = Instant::now();
            // What writes wait for.
            if copy.done.load(Relaxed) != done || copy.work.held_up() == 0 {
                (done, moved) = (copy.done.load(Relaxed), now);
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
                    // Nothing is saved up for later, but for a chunk.
                    let left = copy.credit.load(Relaxed).min(more);
                    (left.saturating_add(more), DEPTH_MAX)
                }
                None => match share
                    .next(requests.saturating_sub(seen), copy.old_data_writes.load(Relaxed) - pieces)
                {
                    Window::Free => (NO_LIMIT, DEPTH_MAX),
                    Window::Look => (0, 1),
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

    /// Requests that users of a disk had done so far.
    fn requests_of(&self, entry: Option<&Arc<DiskEntry>>) -> u64 {
        let Some(entry) = entry else { return 0 };
        let exports = self.state().exports_of(entry).unwrap_or_default();
        exports.iter().map(|e| e.requests()).sum()
    }

    /// A thread for a job, which waits for what it is to do: had before the job's disk is watched,
    /// so that nothing has to be undone where there is none.
    pub(super) fn job_thread(&self, id: &str) -> Result<Sender<Life>> {
        let daemon = self.this.upgrade().expect("it is calling");
        let (life, is_given) = channel::<Life>();
        let thread = std::thread::Builder::new().name(format!("job-{id}"));
        let spawned = thread.spawn(move || {
            if let Ok(life) = is_given.recv() {
                life(&daemon);
            }
        });
        spawned.map_err(|e| Error::io(format_args!("job {id} has no thread"), e))?;
        Ok(life)
    }
}
