//! Commits: the data of the overlay of a disk is copied to its backing file, and the disk continues
//! there.
//!
//! The copy runs in rounds while guests write to the overlay. Each round copies what was written
//! during the previous one. When little is left, guests wait for the last round and for the switch
//! to the backing file.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vshunt_block::copy::Copy;
use vshunt_block::{Bits, CommitTarget, CopyBeforeWrite, Disk};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::JobKind;

use super::run::CopyPlan;
use crate::daemon::Daemon;
use crate::daemon::bitmaps::at_rest;
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::job::Job;

/// log2 of the size of a block, in most cases a cluster.
const BLOCK_SHIFT: u32 = 16;
/// Bytes that guests wait for at most, unless they write faster than the job copies.
const LAST_BYTES: u64 = 8 << 20;
/// Rounds at most.
const ROUNDS: u32 = 12;

/// A running commit.
struct Commit {
    entry: Arc<DiskEntry>,
    /// The backing file, open for writing. None once it is closed.
    below: Option<CommitTarget>,
}

impl Daemon {
    /// Starts to commit the overlay of a disk to its backing file. Returns the name of the job.
    ///
    /// # Errors
    /// The disk has no overlay, or is in use in a way that does not allow it.
    pub fn commit_start(
        &self,
        name: &str,
        job: Option<&str>,
        speed: Option<u64>,
        auto_dismiss: bool,
    ) -> Result<String> {
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        let exports = self.changeable(&entry)?;
        if let Some(export) = exports.iter().find(|e| e.spec.growable == Some(true)) {
            return Err(Error::unsupported(format!(
                "export {} of disk {name} is growable=on, which a disk that is committed cannot be; remove it first",
                export.spec.name
            )));
        }
        let id = self.state().job_name(job, "commit")?;
        let dirty = bits(&entry.disk)?;
        let below = entry.disk.open_commit_target(&entry.spec())?;
        let target = below.next.file.as_ref().map(|f| f.display().to_string()).unwrap_or_default();
        let mut job = Job::new(&id, JobKind::Commit, name, target, speed);
        job.auto_dismiss = auto_dismiss;
        let job = Arc::new(job);
        let commit = Commit { entry: entry.clone(), below: Some(below) };
        let thread = self.job_thread(&id)?;
        self.state().enter(job.clone())?;
        let begun = at_rest(exports.iter().find(|e| !e.readonly), || {
            let mut state = entry.watched.state();
            (state.job, state.committing) = (Some(id.clone()), Some(dirty));
            drop(state);
            entry.watch();
        });
        if let Err(e) = begun {
            self.withdraw(&id);
            return Err(e);
        }
        // Before the caller can change the job.
        self.tell_status(&job);
        let body = move |daemon: &Daemon| {
            let result = commit.run(daemon, &job);
            daemon.conclude(&job, result);
        };
        thread.send(Box::new(body)).expect("it waits");
        Ok(id)
    }
}

impl Commit {
    /// Runs the commit, on the thread of the job.
    fn run(mut self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let entry = self.entry.clone();
        let rounds = self.rounds(daemon, job);
        let settled = job.decide(rounds);
        daemon.tell_status(job);
        let result = settled.and_then(|()| self.last(daemon, job));
        let _op = entry.op_lock();
        // This closes the backing file, if it is open.
        drop(self);
        entry.watched.release();
        let exports = daemon.state().exports_of(&entry).unwrap_or_default();
        if let Err(e) = at_rest(exports.iter().find(|e| !e.readonly), || entry.watch()) {
            // A bitmap that is not read any more is still being set.
            tracing::warn!("{e}");
        }
        result
    }

    /// Copies in rounds until little is left.
    fn rounds(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let disk = &self.entry.disk;
        let todo = bits(disk)?;
        disk.own_blocks(&todo)
            .map_err(|e| Error::io(format_args!("cannot read the map of disk {}", job.disk), e))?;
        self.copy(daemon, job, &todo, true)?;
        for _ in 1..ROUNDS {
            let dirty = self.entry.watched.state().committing.clone();
            if dirty.is_none_or(|d| d.count() * d.granularity() <= LAST_BYTES) {
                break;
            }
            let written = self.written(daemon)?;
            self.copy(daemon, job, &written, true)?;
        }
        Ok(())
    }

    /// Returns what was written since the last call, taken while no write is in flight.
    fn written(&self, daemon: &Daemon) -> Result<Arc<Bits>> {
        let entry = &self.entry;
        let _op = entry.op_lock();
        let exports = daemon.state().exports_of(entry)?;
        let fresh = bits(&entry.disk)?;
        at_rest(exports.iter().find(|e| !e.readonly), || {
            let old = entry.watched.state().committing.replace(fresh);
            entry.watch();
            old.expect("set for as long as the job lasts")
        })
    }

    /// Copies the rest while guests wait, and switches the disk to the backing file.
    fn last(&mut self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let entry = self.entry.clone();
        let _op = entry.op_lock();
        let exports = daemon.state().exports_of(&entry)?;
        let sync = |disk: &Disk| {
            let synced = disk.sync().and_then(|()| disk.sync());
            synced.map_err(|e| Error::io(format_args!("{} cannot be made stable", job.target), e))
        };
        // Most data is stable before guests must wait.
        sync(self.below()?)?;
        let now = entry.spec();
        with_disk_drained(&entry, &exports, || {
            let written = entry.watched.state().committing.clone();
            let written = written.expect("set for as long as the job lasts");
            self.copy(daemon, job, &written, false)?;
            sync(self.below()?)?;
            // The backing file is closed here before the disk opens it.
            let Some(below) = self.below.take() else { return Ok(()) };
            let next = below.close();
            entry.disk.switch_to_backing(&now, &next).inspect_err(|_| entry.disk.relock_backing(&next))?;
            entry.set_spec(next);
            Ok(())
        })
    }

    fn below(&self) -> Result<&Arc<Disk>> {
        let below = self.below.as_ref().map(|b| &b.disk);
        below.ok_or_else(|| Error::busy("the image below is closed already"))
    }

    /// Copies one round.
    fn copy(&self, daemon: &Daemon, job: &Arc<Job>, what: &Bits, guests: bool) -> Result<()> {
        let todo = Bits::new(what.size(), BLOCK_SHIFT).ok_or_else(no_memory)?;
        todo.add(what);
        let bytes = todo.count() * todo.granularity();
        let work = CopyBeforeWrite::new(todo).map_err(|e| Error::io("a job cannot be set up", e))?;
        let done = {
            let mut state = job.state();
            state.total += bytes;
            state.done
        };
        let (source, target) = (self.entry.disk.clone(), self.below()?.clone());
        let plan = CopyPlan {
            entry: guests.then(|| self.entry.clone()),
            copy: Box::new(move |owner| {
                let copy = Copy::new(source, target, Arc::new(work), owner).in_place();
                copy.done.store(done, Relaxed);
                copy
            }),
        };
        daemon.copy(job, plan)
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        if let Some(below) = self.below.take() {
            let next = below.close();
            self.entry.disk.relock_backing(&next);
        }
    }
}

fn bits(disk: &Disk) -> Result<Arc<Bits>> {
    Bits::new(disk.size_bytes(), BLOCK_SHIFT).map(Arc::new).ok_or_else(no_memory)
}

fn no_memory() -> Error {
    Error::limit("no memory for the map of what is committed")
}
