//! A mirror whose guests wait: a write is complete only when the target has it, too (copy mode
//! `write-blocking`).
//!
//! It begins when the disk is copied once, and takes the place of the rounds: a queue copies what
//! is left and what guests write, until the job ends. So the target never lacks more than what is
//! in flight. If the target takes nothing for [`STALL`], guests go on without it, and rounds
//! follow.
//!
//! What must never happen: a write that the copy has not seen counts as copied; a guest waits for
//! longer than [`STALL`] for a target that answers nothing.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vshunt_block::copy::Copy;
use vshunt_block::{CopyAfterWrite, Disk};
use vshunt_types::error::{Error, Result};

use super::{Rounds, bits, no_memory};
use crate::daemon::Daemon;
use crate::daemon::bitmaps::at_rest;
use crate::daemon::jobs::run::{CopyPlan, RunningCopy, STALL};
use crate::job::Job;

/// log2 of the size of a block: most writes of guests are of this size.
const BLOCK_SHIFT: u32 = 12;
/// Blocks of a disk at most. The blocks of larger disks are larger. The maps take 3 bits a block.
const BLOCKS_MAX: u64 = 1 << 28;
/// How long guests wait for the end of a copy that has nothing in flight.
const END: Duration = Duration::from_secs(1);

/// How often it is looked whether guests wait for a target that takes nothing.
const GUARD_TICK: Duration = Duration::from_millis(200);

/// A copy that writes of guests wait for.
pub(super) struct Following {
    work: Arc<CopyAfterWrite>,
    running: RunningCopy,
    /// Ends with this.
    _guard: Guard,
}

/// A thread that lets guests go if the target takes nothing, whatever the thread and the worker of
/// the job do meanwhile.
struct Guard {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    fn new(job: &Job, work: Arc<CopyAfterWrite>, copy: Arc<Copy>) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = std::thread::Builder::new().name(format!("guard-{}", job.id));
        let spawned = thread.spawn(move || {
            let (mut before, mut since) = (u64::MAX, Instant::now());
            while !ends.load(Relaxed) {
                let done = copy.done.load(Relaxed);
                if done != before || work.waiting() == 0 {
                    (before, since) = (done, Instant::now());
                }
                let hangs = work.waiting() > 0 && work.oldest().is_some_and(|age| age > STALL);
                if hangs || since.elapsed() > STALL {
                    copy.stop.store(true, Relaxed);
                    return work.end_now();
                }
                std::thread::park_timeout(GUARD_TICK);
            }
        });
        let thread = spawned.map_err(|e| Error::io(format_args!("job {} has no thread", job.id), e))?;
        Ok(Self { over, thread: Some(thread) })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        let _ = thread.join();
    }
}

impl Rounds {
    /// Makes guests wait for the target from now on. No copy has requests in flight. Returns false
    /// if writes do not come to rest now.
    pub(in crate::daemon::jobs) fn begin_following(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        target: &Arc<Disk>,
    ) -> Result<bool> {
        if self.is_left_alone() {
            return Ok(false);
        }
        let entry = &self.entry;
        let (size, source) = (entry.disk.size_bytes(), entry.disk.clone());
        let least = source.alignment().max(target.alignment()).max(size.div_ceil(BLOCKS_MAX));
        let shift = least.next_power_of_two().trailing_zeros().max(BLOCK_SHIFT);
        let work = Arc::new(CopyAfterWrite::new(size, shift).map_err(|_| no_memory())?);
        let fresh = bits(&entry.disk)?;
        let (done, of, to) = (job.state().done, work.clone(), target.clone());
        let plan = CopyPlan {
            entry: None,
            worker: Some(self.worker),
            copy: Box::new(move |owner| {
                let copy = Copy::new(source, to, of, owner);
                copy.done.store(done, Relaxed);
                copy
            }),
        };
        // It has nothing to do yet.
        let running = daemon.begin_copy(job, plan)?;
        let guard = Guard::new(job, work.clone(), running.copy().clone()).inspect_err(|_| running.stop());
        let guard = match guard {
            Ok(guard) => guard,
            Err(e) => {
                self.leave(running);
                return Err(e);
            }
        };
        let _op = entry.op_lock();
        let begun = self.at_rest(daemon, || {
            let mut state = entry.watched.state();
            // From here on this map has what the rounds must copy if guests stop to wait.
            let earlier = state.written.replace(fresh).expect("set for as long as the job lasts");
            work.add(&earlier);
            state.after = Some(work.clone());
            drop(state);
            entry.watch();
        });
        if let Err(e) = begun {
            tracing::debug!("job {}: {e}", job.id);
            running.stop();
            self.leave(running);
            return Ok(false);
        }
        *self.following.borrow_mut() = Some(Following { work, running, _guard: guard });
        Ok(true)
    }

    /// Returns whether guests wait for the target.
    pub(in crate::daemon::jobs) fn is_following(&self) -> bool {
        self.following.borrow().is_some()
    }

    /// Returns the bytes that were written before guests waited and that the target lacks, and sets
    /// the progress.
    pub(in crate::daemon::jobs) fn following_left(&self, job: &Job) -> u64 {
        let following = self.following.borrow();
        let Some(Following { work, running, .. }) = following.as_ref() else { return 0 };
        let left = work.backlog_bytes();
        job.state().total = running.copy().done.load(Relaxed) + left;
        left
    }

    /// Returns whether guests still wait for the target. If not, it took nothing for long, and the
    /// caller has to end it.
    ///
    /// # Errors
    /// The copy has failed.
    pub(in crate::daemon::jobs) fn check_following(&self, daemon: &Daemon, job: &Job) -> Result<bool> {
        let following = self.following.borrow();
        let Some(Following { work, running, .. }) = following.as_ref() else { return Ok(true) };
        daemon.result(job, running.copy())?;
        Ok(!work.has_ended())
    }

    /// Lets guests go on without the target. What it lacks is left for rounds. Requests of the
    /// target may still be in flight.
    pub(in crate::daemon::jobs) fn end_following(&self, daemon: &Daemon) {
        let Some(Following { work, running, .. }) = self.following.take() else { return };
        running.stop();
        // Its worker may be busy with the queue, or its thread.
        work.end_now();
        self.leave(running);
        let entry = &self.entry;
        let _op = entry.op_lock();
        let written = {
            let mut state = entry.watched.state();
            state.after = None;
            state.written.clone()
        };
        if let Some(written) = written {
            work.add_left_to(&written);
        }
        let exports = daemon.state().exports_of(entry).unwrap_or_default();
        if let Err(e) = at_rest(exports.iter().find(|e| !e.readonly), || entry.watch()) {
            // Writes still look whether the copy has ended.
            tracing::debug!("{e}");
        }
    }

    /// Ends the copy that guests wait for while they are held: the target has all that they have
    /// written. Returns false if it still lacks something at `until`.
    pub(in crate::daemon::jobs) fn finish_following(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        until: Instant,
    ) -> Result<bool> {
        // What is in flight now, no guest has waited for.
        loop {
            let following = self.following.borrow();
            let Some(Following { work, running, .. }) = following.as_ref() else { return Ok(false) };
            if work.is_idle() {
                break;
            }
            daemon.result(job, running.copy())?;
            if work.has_ended() || Instant::now() > until {
                return Ok(false);
            }
            drop(following);
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let fresh = bits(&self.entry.disk)?;
        let Some(Following { running, .. }) = self.following.take() else { return Ok(false) };
        running.stop();
        let until = Instant::now() + END;
        while !running.copy().over.load(Acquire) && Instant::now() < until {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let over = running.copy().over.load(Acquire);
        match over {
            true => daemon.end_copy(job, running),
            false => self.leave(running),
        }
        let mut state = self.entry.watched.state();
        state.after = None;
        if over {
            // What it had recorded since the copy began is in the target.
            state.written = Some(fresh);
        }
        drop(state);
        self.entry.watch();
        Ok(over)
    }
}
