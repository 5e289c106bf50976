//! Pull backups: a disk that shows another one as it was, for programs that copy it by themselves.
//!
//! The job copies nothing. It keeps the point in time until it is completed or cancelled, which is
//! refused while exports serve the frozen disk.
//!
//! What must never happen: an export of the frozen disk begins before the point in time, or a guest
//! waits for a program that reads it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vshunt_block::{CopyBeforeWrite, Disk};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format, JobStatus};

use super::fleece::sync_fleece;
use super::point::{StartedBitmap, release_source};
use super::run::{STALL, fleece_failed};
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;
use crate::event::Event;
use crate::job::{ActivePull, Job};
use crate::watched::Watched;

/// How often a job is checked for a failure of the fleecing file.
const TICK: Duration = Duration::from_millis(200);

/// What a pull backup uses, and how it ends.
pub(super) struct Pull {
    pub(super) source: Arc<DiskEntry>,
    /// The disk that shows the point in time.
    pub(super) frozen: Arc<DiskEntry>,
    pub(super) work: Arc<CopyBeforeWrite>,
    pub(super) started: Option<StartedBitmap>,
    /// Closed last, on the thread of the job: to free the space of a large file takes time.
    pub(super) fleece: Arc<Disk>,
}

/// Makes the disk of a pull backup, of this name, which is not in the list yet.
pub(super) fn frozen_disk(
    name: &str,
    source: &Arc<DiskEntry>,
    job: &Job,
    work: &Arc<CopyBeforeWrite>,
    fleece: &Arc<Disk>,
) -> Arc<DiskEntry> {
    let frozen = DiskEntry::new(
        DiskSpec {
            name: name.to_owned(),
            format: Some(Format::Frozen),
            readonly: true,
            locking: false,
            ..DiskSpec::default()
        },
        Disk::frozen(&source.disk, fleece.clone(), work.clone()),
        Watched::default(),
    );
    {
        let mut state = frozen.watched.state();
        (state.job, state.is_pull) = (Some(job.id.clone()), true);
    }
    Arc::new(frozen)
}

impl Daemon {
    /// Ends a pull backup: what was read from the frozen disk is the backup.
    ///
    /// # Errors
    /// It is ending already, or exports serve its disk.
    pub(super) fn pull_complete(&self, job: &Job) -> Result<()> {
        {
            let state = job.state();
            if !state.begun {
                return Err(Error::busy(format!(
                    "job {} has not begun; wait for the command that starts it",
                    job.id
                )));
            }
            if state.cancelled {
                return Err(Error::busy(format!("job {} is being cancelled", job.id)));
            }
        }
        self.withdraw_frozen(job)?;
        {
            let mut state = job.state();
            if state.status != JobStatus::Running || state.cancelled {
                return Err(Error::busy(format!("job {} is about to end; wait for it", job.id)));
            }
            state.completed = true;
        }
        job.wake();
        Ok(())
    }

    /// Removes the frozen disk of a pull backup that is to end from the disks of the daemon. No
    /// export of it can be added any more. Does nothing for other jobs.
    ///
    /// # Errors
    /// Exports serve it.
    pub(super) fn withdraw_frozen(&self, job: &Job) -> Result<()> {
        let Some(name) = &job.pull else { return Ok(()) };
        let mut state = self.state();
        // Another job may have the name of one that has ended meanwhile.
        let is_there = state.jobs.get(&job.id).is_some_and(|there| std::ptr::eq(&**there, job));
        let is_of = |entry: &Arc<DiskEntry>| entry.watched.job().as_deref() == Some(&*job.id);
        if !is_there || !state.disks.get(name).is_some_and(is_of) {
            return Ok(());
        }
        let users = state.users(name);
        if !users.is_empty() {
            return Err(Error::busy(format!(
                "job {} cannot end while its disk {name} is in use by {}; 'export remove' ends that, and 'job cancel --force' \
                 ends the job before",
                job.id,
                users.iter().map(|user| format!("export {user}")).collect::<Vec<_>>().join(", ")
            )));
        }
        state.disks.remove(name);
        Ok(())
    }

    /// Lets go of a frozen disk whose job has ended. If exports still serve it, the job has failed:
    /// the disk stays, without its files, until it is removed.
    fn give_up(&self, frozen: &Arc<DiskEntry>, why: &str) {
        // An export that is being made takes it as it is now.
        let _op = frozen.op_lock();
        frozen.disk.give_up();
        let name = &frozen.name;
        let exports = self.state().exports_of(frozen).unwrap_or_default();
        for export in &exports {
            // Its queues make handles again afterwards, which hold no files.
            if let Err(e) = export.with_all_drained(|| ()) {
                tracing::warn!("export {} still holds the files of disk {name}: {e}", export.spec.name);
            }
        }
        frozen.watched.state().bitmaps.clear();
        frozen.watched.release();
        {
            let mut state = self.state();
            if !state.disks.get(name).is_some_and(|there| Arc::ptr_eq(there, frozen)) {
                return;
            }
            if state.users(name).is_empty() {
                state.disks.remove(name);
                return;
            }
            if state.shut {
                // No export can use it any more.
                return;
            }
        }
        self.tell(&Event::DiskLost { name: name.clone(), reason: why.to_owned() });
    }
}

impl Pull {
    /// Runs the job, on its thread.
    pub(super) fn run(self, daemon: &Daemon, job: &Job) -> Result<()> {
        let held = job.decide(self.hold(job));
        daemon.tell_status(job);
        self.end(daemon, job, held)
    }

    /// Waits until the job is completed or cancelled, or old data cannot be stored. Called on the
    /// thread of the job.
    fn hold(&self, job: &Job) -> Result<()> {
        let thread = std::thread::current();
        job.state().pull = Some(ActivePull { work: self.work.clone(), thread });
        let (mut stores, mut moved) = (0, Instant::now());
        loop {
            if let Some(errno) = self.work.has_ended() {
                let e = std::io::Error::from_raw_os_error(-errno);
                return Err(match self.work.has_fleece_failed() {
                    true => fleece_failed(job, e),
                    false => Error::io(format_args!("disk {} cannot be read", job.disk), e),
                });
            }
            {
                let state = job.state();
                if state.cancelled {
                    return Err(Error::busy("it was cancelled"));
                }
                if state.completed {
                    return Ok(());
                }
            }
            let now = self.work.stores();
            if now != stores || self.work.held_up() == 0 {
                (stores, moved) = (now, Instant::now());
            } else if moved.elapsed() > STALL {
                return Err(Error::busy(format!(
                    "the fleecing file {} took nothing for {} s, for which guests' writes had to wait; choose faster \
                     storage for it (--fleece)",
                    job.fleece.as_deref().unwrap_or(Path::new("")).display(),
                    STALL.as_secs()
                )));
            }
            std::thread::park_timeout(TICK);
        }
    }

    /// Releases all that the job had.
    fn end(self, daemon: &Daemon, job: &Job, held: Result<()>) -> Result<()> {
        let Self { source, frozen, work, started, fleece } = self;
        // No guest stores anything from here on, and every read of the frozen disk fails.
        work.end_now();
        let result = held.and_then(|()| {
            // What was read from the file may be wrong if its write-back failed.
            sync_fleece(job, &fleece)?.map_err(|e| fleece_failed(job, e))
        });
        let why = match &result {
            Ok(()) => String::new(),
            Err(e) => format!("job {} has ended: {e}", job.id),
        };
        daemon.give_up(&frozen, &why);
        drop(frozen);
        job.state().pull = None;
        release_source(daemon, &source, started, result.is_ok());
        // It does not wait for the fleecing file.
        drop(source);
        result
    }
}

/// Returns the error of a command that only a job that copies has.
pub(super) fn no_copy(job: &Job) -> Error {
    Error::invalid(format!("job {} is a pull backup, which copies nothing by itself; only end it", job.id))
}
