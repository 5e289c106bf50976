//! A copy in rounds while guests write. Each round copies what was written during the previous one.
//! When little is left, guests wait for the last round, after which source and target are the same.
//!
//! What must never happen: a round writes a block to the target while an earlier one still does.

mod follow;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use vshunt_block::copy::Copy;
use vshunt_block::{Bits, CopyBeforeWrite, Disk};
use vshunt_engine::DRAIN_LIMIT;
use vshunt_types::error::{Error, Result};

use self::follow::Following;
use super::run::{CopyPlan, Patience, RunningCopy, STALL, cancelled, took_nothing};
use crate::daemon::Daemon;
use crate::daemon::bitmaps::at_rest;
use crate::disk_entry::DiskEntry;
use crate::export::Export;
use crate::job::Job;

/// log2 of the size of a block, in most cases a cluster.
pub(super) const BLOCK_SHIFT: u32 = 16;
/// Rounds go on while more than this is left, unless they make it no less.
const LAST_BYTES: u64 = 8 << 20;
/// Rounds at most for that.
const ROUNDS: u32 = 12;
/// A smaller round counts as one of this many bytes: most of its time is the same for each round.
const PACE_BYTES: u64 = 1 << 20;
/// How long guests are held at most for the beginning of a round, at first. One slow request must
/// not hold up the others. Each try in vain doubles it.
const REST_LIMIT: Duration = Duration::from_millis(500);
/// After a try in vain, guests go on for this many times as long.
const REST_PAUSE: u32 = 20;
/// How often the thread of a job that waits for storage looks whether the job was cancelled.
const CANCEL_TICK: Duration = Duration::from_millis(50);

/// The rounds of a job.
pub(super) struct Rounds {
    pub(super) entry: Arc<DiskEntry>,
    /// Whether zeroes keep the space of the target.
    in_place: bool,
    /// The worker of the copying queues.
    worker: u32,
    /// A copy that was left, and still has requests in flight.
    left: RefCell<Option<RunningCopy>>,
    /// The copy that writes of guests wait for. There are no rounds then.
    following: RefCell<Option<Following>>,
    /// Bytes of the latest round, and the time it took.
    pace: Cell<(u64, Duration)>,
    /// For how long guests are held at most for the next round, and when they may be.
    rest: Cell<(Duration, Option<Instant>)>,
}

/// For how long guests are held for the last round. Guests never wait for more than [`STALL`] for a
/// target that makes no progress.
#[derive(Clone, Copy, Default)]
pub(super) struct HoldLimits {
    /// The time by which the rest has to be copied. None: guests wait for it.
    pub(super) copied: Option<Instant>,
    /// The time by which the target has to be stable. None: [`STALL`] after the copy.
    pub(super) stable: Option<Instant>,
}

impl Rounds {
    /// Records what guests write to a disk from now on, and calls `f` first, while no write is in
    /// flight. The caller holds its `op_lock`.
    ///
    /// # Errors
    /// There is no memory, or writes do not come to rest, or those of `f`. Nothing was changed.
    pub(super) fn begin<R>(
        daemon: &Daemon,
        entry: &Arc<DiskEntry>,
        exports: &[Arc<Export>],
        (job, in_place): (&str, bool),
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Self, R)> {
        let written = bits(&entry.disk)?;
        let worker = daemon.job_worker(job)?;
        let begun = at_rest(exports.iter().find(|e| !e.readonly), || {
            let result = f()?;
            let mut state = entry.watched.state();
            (state.job, state.written) = (Some(job.to_owned()), Some(written));
            drop(state);
            entry.watch();
            Ok(result)
        });
        let begun = begun.and_then(|result| result).inspect_err(|_| daemon.free_job_worker(worker))?;
        let pace = Cell::new((0, Duration::ZERO));
        let (left, following) = (RefCell::default(), RefCell::default());
        let rest = Cell::new((REST_LIMIT, None));
        Ok((Self { entry: entry.clone(), in_place, worker, left, following, pace, rest }, begun))
    }

    /// Returns the number of bytes that were written since the last round began.
    pub(super) fn written_bytes(&self) -> u64 {
        self.entry.watched.state().written.as_ref().map_or(0, |bits| bits.count() * bits.granularity())
    }

    /// Copies blocks while guests go on.
    pub(super) fn copy(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        what: &Bits,
        to: Destination<'_>,
    ) -> Result<()> {
        self.await_left(daemon, job)?;
        let (plan, begin) = (self.plan(job, what, to, Some(self.entry.clone()))?, Instant::now());
        if !daemon.copy_or_leave(job, plan, Patience::Source, &mut self.left.borrow_mut())? {
            return Err(took_nothing(job));
        }
        self.pace.set((what.count() * what.granularity(), begin.elapsed()));
        Ok(())
    }

    /// Returns how long guests would wait for the rest, by what the latest round took.
    pub(super) fn rest_takes(&self) -> Duration {
        let (bytes, took) = self.pace.get();
        took.mul_f64(self.written_bytes() as f64 / bytes.max(PACE_BYTES) as f64)
    }

    /// Waits for the requests of a copy that was left, until the job is cancelled.
    ///
    /// # Errors
    /// The job was cancelled.
    pub(super) fn await_left(&self, daemon: &Daemon, job: &Job) -> Result<()> {
        daemon.await_left(job, &mut self.left.borrow_mut())
    }

    /// Leaves a copy that was stopped. Neither guests nor the source wait for its requests.
    pub(super) fn leave(&self, running: RunningCopy) {
        *self.left.borrow_mut() = Some(running);
    }

    /// Copies in rounds, while guests go on, until little is left, or a round makes it no less.
    pub(super) fn shrink(&self, daemon: &Daemon, job: &Arc<Job>, target: &Arc<Disk>) -> Result<()> {
        let mut before = u64::MAX;
        for _ in 1..ROUNDS {
            let written = self.written_bytes();
            if written <= LAST_BYTES || written > before / 4 * 3 {
                break;
            }
            before = written;
            if !self.next(daemon, job, target)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns whether requests of guests did not end in time, so that they are not held for now.
    fn is_left_alone(&self) -> bool {
        self.rest.get().1.is_some_and(|from| Instant::now() < from)
    }

    /// Calls `f` while no write is in flight, for a moment. The caller holds `op_lock` of the disk.
    ///
    /// # Errors
    /// Writes do not come to rest soon, or did not some moments ago.
    fn at_rest<R>(&self, daemon: &Daemon, f: impl FnOnce() -> R) -> Result<R> {
        let exports = daemon.state().exports_of(&self.entry)?;
        let Some(writer) = exports.iter().find(|e| !e.readonly) else { return Ok(f()) };
        if self.is_left_alone() {
            return Err(Error::busy(
                "requests of guests did not end in time, and they are left alone for now",
            ));
        }
        let limit = self.rest.get().0;
        let result = writer.with_all_drained_until(Instant::now() + limit, f);
        self.rest.set(match result {
            Ok(_) => (REST_LIMIT, None),
            Err(_) => ((limit * 2).min(DRAIN_LIMIT), Some(Instant::now() + limit * REST_PAUSE)),
        });
        result
    }

    /// Copies what was written since the last round began, while guests go on.
    /// Returns false if writes do not come to rest now.
    pub(super) fn next(&self, daemon: &Daemon, job: &Arc<Job>, target: &Arc<Disk>) -> Result<bool> {
        debug_assert!(!self.is_following(), "the map of what is written is not all that the target lacks");
        let written = {
            let entry = &self.entry;
            let _op = entry.op_lock();
            let fresh = bits(&entry.disk)?;
            self.at_rest(daemon, || {
                let old = entry.watched.state().written.replace(fresh);
                entry.watch();
                old.expect("set for as long as the job lasts")
            })
        };
        let written = match written {
            Ok(written) => written,
            Err(e) => {
                tracing::debug!("job {}: {e}", job.id);
                return Ok(false);
            }
        };
        self.copy(daemon, job, &written, Destination { disk: target, fresh: false }).map(|()| true)
    }

    /// Copies the rest, and makes the target stable. No write is in flight, and guests wait.
    /// Returns false if the rest is not copied in time. It is left for a later round then.
    ///
    /// # Errors
    /// The copy fails, the job is cancelled, or the target is not stable in time.
    pub(super) fn last(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        target: &Arc<Disk>,
        limits: HoldLimits,
    ) -> Result<bool> {
        debug_assert!(!self.is_following(), "the map of what is written is not all that the target lacks");
        let written = self.entry.watched.state().written.clone();
        let written = written.expect("set for as long as the job lasts");
        let plan = self.plan(job, &written, Destination { disk: target, fresh: false }, None)?;
        let patience = Patience::Guests { until: limits.copied };
        if !daemon.copy_or_leave(job, plan, patience, &mut self.left.borrow_mut())? {
            return Ok(false);
        }
        let stable = limits.stable.unwrap_or_else(|| Instant::now() + STALL);
        sync_apart(job, target, Some(stable)).map(|()| true)
    }

    /// Waits until a copy that was left does not need the disk any more.
    pub(super) fn await_source(&self) {
        Daemon::await_source(self.left.borrow().as_ref());
    }

    /// Stops to record writes. No copy uses the disk. The caller holds its `op_lock`.
    pub(super) fn end(&self, daemon: &Daemon) {
        let entry = &self.entry;
        entry.watched.release();
        let exports = daemon.state().exports_of(entry).unwrap_or_default();
        if let Err(e) = at_rest(exports.iter().find(|e| !e.readonly), || entry.watch()) {
            // A bitmap that is not read any more is still being set.
            tracing::warn!("{e}");
        }
    }

    /// Ends a copy that was left, if its requests have ended. Returns whether there is none any
    /// more.
    pub(super) fn try_end_left(&self, daemon: &Daemon, job: &Job) -> bool {
        let mut left = self.left.borrow_mut();
        if left.as_ref().is_none_or(|running| running.copy().over.load(Acquire)) {
            daemon.end_left(job, left.take());
        }
        left.is_none()
    }

    /// Waits for the requests of a copy that was left, and frees the worker. Nobody else waits for
    /// that: the disk is not used any more.
    pub(super) fn end_copies(self, daemon: &Daemon, job: &Job) {
        let Self { entry, left, worker, .. } = self;
        drop(entry);
        daemon.end_left(job, left.into_inner());
        daemon.free_job_worker(worker);
    }

    /// Returns the plan of a round. `guests`: the disk whose guests go on.
    fn plan(
        &self,
        job: &Job,
        what: &Bits,
        to: Destination<'_>,
        guests: Option<Arc<DiskEntry>>,
    ) -> Result<CopyPlan> {
        let todo = Bits::new(what.size(), BLOCK_SHIFT).ok_or_else(no_memory)?;
        todo.add(what);
        let bytes = (todo.count() * todo.granularity()).min(what.size());
        let work = CopyBeforeWrite::new(todo).map_err(|e| Error::io("a job cannot be set up", e))?;
        let done = {
            let mut state = job.state();
            state.total += bytes;
            state.done
        };
        let (source, target) = (self.entry.disk.clone(), to.disk.clone());
        let (fresh, in_place) = (to.fresh, self.in_place);
        Ok(CopyPlan {
            entry: guests,
            worker: Some(self.worker),
            copy: Box::new(move |owner| {
                let copy = Copy::new(source, target, Arc::new(work), owner).onto_fresh(fresh);
                let copy = if in_place { copy.in_place() } else { copy };
                copy.done.store(done, Relaxed);
                copy
            }),
        })
    }
}

/// Where a round copies to.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub(super) disk: &'a Arc<Disk>,
    /// Whether it reads as zeroes where it was not written.
    pub(super) fresh: bool,
}

/// Makes a target stable. Blocks.
///
/// # Errors
/// The system's.
pub(super) fn sync(job: &Job, target: &Disk) -> Result<()> {
    // The second call also reports the errors of writes that the first one began.
    let synced = target.sync().and_then(|()| target.sync());
    synced.map_err(|e| Error::io(format_args!("{} cannot be made stable", job.target), e))
}

/// Makes a target stable, as [`apart`] does.
///
/// # Errors
/// The system's, or the job is cancelled; it was not stable at `until`.
pub(super) fn sync_apart(job: &Arc<Job>, target: &Arc<Disk>, until: Option<Instant>) -> Result<()> {
    let (of, target) = (job.clone(), target.clone());
    apart(job, until, move || sync(&of, &target))?.unwrap_or_else(|| Err(took_nothing(job)))
}

/// Calls `f`, which may wait for storage, on a thread of its own. Returns nothing if it has not
/// returned at `until`; the thread ends later then.
///
/// # Errors
/// The job was cancelled, and the thread ends later; or there is no thread.
pub(super) fn apart<R: Send + 'static>(
    job: &Job,
    until: Option<Instant>,
    f: impl FnOnce() -> R + Send + 'static,
) -> Result<Option<R>> {
    apart_while(job, until, f, || Ok(()))
}

/// Does what [`apart`] does, and calls `meanwhile` again and again until `f` returns.
///
/// # Errors
/// Also those of `meanwhile`; the thread ends later then.
pub(super) fn apart_while<R: Send + 'static>(
    job: &Job,
    until: Option<Instant>,
    f: impl FnOnce() -> R + Send + 'static,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<Option<R>> {
    let (done, wait) = sync_channel(1);
    let thread = std::thread::Builder::new().name(format!("sync-{}", job.id));
    let spawned = thread.spawn(move || {
        // All that `f` has is dropped before the caller continues.
        let result = f();
        let _ = done.send(result);
    });
    spawned.map_err(|e| Error::io(format_args!("job {} has no thread", job.id), e))?;
    loop {
        let left = until.map_or(CANCEL_TICK, |until| until.saturating_duration_since(Instant::now()));
        match wait.recv_timeout(left.min(CANCEL_TICK)) {
            Ok(result) => return Ok(Some(result)),
            _ if job.state().cancelled => return Err(cancelled()),
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => meanwhile()?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// Returns an empty map of the blocks of a disk.
pub(super) fn bits(disk: &Disk) -> Result<Arc<Bits>> {
    Bits::new(disk.size_bytes(), BLOCK_SHIFT).map(Arc::new).ok_or_else(no_memory)
}

pub(super) fn no_memory() -> Error {
    Error::limit("no memory for the map of what is copied")
}
