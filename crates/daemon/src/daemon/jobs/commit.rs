//! Commits: the data of the overlay of a disk is copied to its backing file, and the disk continues
//! there.

use std::sync::Arc;
use std::time::Duration;

use vshunt_block::{CommitTarget, Disk};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{JobKind, OverlayJobSpec};

use super::rounds::{Destination, HoldLimits, Rounds, bits, sync_apart};
use super::run::took_nothing;
use crate::daemon::Daemon;
use crate::drained::with_disk_drained;
use crate::job::{Job, JobOptions};

/// How often it is looked whether the backing file is still in use.
const TICK: Duration = Duration::from_millis(100);

/// A running commit.
struct Commit {
    rounds: Rounds,
    /// The backing file, open for writing. None once it is closed.
    below: Option<CommitTarget>,
}

impl Daemon {
    /// Starts to commit the overlay of a disk to its backing file. Returns the name of the job.
    ///
    /// # Errors
    /// The disk has no overlay, or is in use in a way that does not allow it.
    pub fn commit_start(&self, spec: &OverlayJobSpec, auto_dismiss: bool) -> Result<String> {
        let name = &spec.disk;
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        let exports = self.exports_for_job(&entry)?;
        let id = self.job_name(spec.job.as_deref(), "commit")?;
        let claim = self.claim_source(&entry, &id)?;
        let below = entry.disk.open_commit_target(&entry.spec())?;
        let target = below.next.image();
        let options = JobOptions { speed: spec.speed, auto_finalize: spec.auto_finalize, auto_dismiss };
        let job = Arc::new(Job::new(&id, JobKind::Commit, name, target, options));
        // Blocks that are read through the overlay must not move.
        let ready = self.job_thread(&id).and_then(|thread| {
            self.state().enter(job.clone())?;
            match Rounds::begin(self, &entry, &exports, (&id, true), || Ok(())) {
                Ok((rounds, ())) => Ok((thread, rounds)),
                Err(e) => {
                    self.withdraw(&id);
                    Err(e)
                }
            }
        });
        let (thread, rounds) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                let next = below.close();
                entry.disk.relock_backing(&next);
                return Err(e);
            }
        };
        claim.keep();
        let commit = Commit { rounds, below: Some(below) };
        self.launch(thread, job, |daemon, job| commit.run(daemon, job));
        Ok(id.clone())
    }
}

impl Commit {
    /// Runs the commit, on the thread of the job.
    fn run(mut self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        // Most data is stable before guests must wait.
        let copied = self.copy(daemon, job).and_then(|()| sync_apart(job, self.below()?, None));
        let copied = copied.and_then(|()| self.await_finalize(daemon, job));
        let settled = job.decide(copied);
        daemon.tell_status(job);
        let result = settled.and_then(|()| self.last(daemon, job));
        self.rounds.await_source();
        // The image below is of the disk, which is locked by it until it is closed here. At the end
        // of the daemon the disk is closed first, since the image below may answer nothing.
        let below = match self.await_below(daemon, job) {
            true => None,
            false => self.below.take(),
        };
        {
            let entry = self.rounds.entry.clone();
            let _op = entry.op_lock();
            self.close_below();
            self.rounds.end(daemon);
        }
        self.rounds.end_copies(daemon, job);
        if let Some(below) = below {
            while !is_unused(&below) {
                std::thread::park_timeout(TICK);
            }
            below.close();
        }
        result
    }

    /// Copies in rounds until little is left.
    fn copy(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let disk = &self.rounds.entry.disk;
        let todo = bits(disk)?;
        disk.own_blocks(&todo)
            .map_err(|e| Error::io(format_args!("cannot read the map of disk {}", job.disk), e))?;
        self.rounds.copy(daemon, job, &todo, Destination { disk: self.below()?, fresh: false })?;
        self.rounds.shrink(daemon, job, self.below()?)
    }

    /// Waits until the commit may be finalized, and copies what guests have written meanwhile.
    fn await_finalize(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        if job.auto_finalize {
            return Ok(());
        }
        daemon.await_finalize(job)?;
        self.rounds.shrink(daemon, job, self.below()?)?;
        sync_apart(job, self.below()?, None)
    }

    /// Copies the rest while guests wait, and switches the disk to the backing file.
    fn last(&mut self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let entry = self.rounds.entry.clone();
        let _op = entry.op_lock();
        let exports = daemon.state().exports_of(&entry)?;
        let now = entry.spec();
        with_disk_drained(&entry, &exports, || {
            if !self.rounds.last(daemon, job, self.below()?, HoldLimits::default())? {
                return Err(took_nothing(job));
            }
            // The backing file is closed here before the disk opens it.
            let Some(below) = self.below.take() else { return Ok(()) };
            let next = below.close();
            entry.disk.switch_to_backing(&now, &next).inspect_err(|_| entry.disk.relock_backing(&next))?;
            job.state().continues_in = Some(next.image());
            entry.set_spec(next);
            Ok(())
        })
    }

    /// Waits until nobody else has the backing file: a copy that was left may have requests, or a
    /// thread still makes it stable. Returns false if the daemon ends meanwhile.
    fn await_below(&self, daemon: &Daemon, job: &Job) -> bool {
        loop {
            let ended = self.rounds.try_end_left(daemon, job);
            if ended && self.below.as_ref().is_none_or(is_unused) {
                return true;
            }
            if daemon.is_ending() {
                return false;
            }
            std::thread::park_timeout(TICK);
        }
    }

    fn below(&self) -> Result<&Arc<Disk>> {
        let below = self.below.as_ref().map(|b| &b.disk);
        below.ok_or_else(|| Error::busy("the image below is closed already"))
    }

    /// Closes the backing file, if it is open.
    fn close_below(&mut self) {
        if let Some(below) = self.below.take() {
            let next = below.close();
            self.rounds.entry.disk.relock_backing(&next);
        }
    }
}

/// Returns whether nobody else has the backing file.
fn is_unused(below: &CommitTarget) -> bool {
    Arc::strong_count(&below.disk) == 1
}
