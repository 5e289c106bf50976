//! Backups: a copy of a disk at one point in time.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use vshunt_block::copy::Copy;
use vshunt_block::{Bitmap, CopyBeforeWrite, Disk};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BackupSpec, Format, JobKind};

use super::fleece::{self, sync_fleece};
use super::point::{Point, StartedBitmap, check_complete, release_source, restore_bitmap, start_bitmap};
use super::pull::{Pull, frozen_disk};
use super::rounds::sync_apart;
use super::run::{CopyPlan, JobBody, Patience, RunningCopy, took_nothing};
use super::target::{Target, Wanted};
use crate::check::check_name;
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;
use crate::job::{Job, JobOptions};

/// A backup whose point in time can be frozen. Its job is in the list.
pub(super) struct Prepared {
    pub(super) spec: BackupSpec,
    pub(super) job: Arc<Job>,
    pub(super) entry: Arc<DiskEntry>,
    pub(super) point: Point,
    pub(super) thread: Sender<JobBody>,
    pub(super) to: To,
}

/// Where a backup goes to.
pub(super) enum To {
    Copy {
        target: Box<Target>,
        fleece: Option<Arc<Disk>>,
    },
    /// The frozen disk, and the fleecing file.
    Pull(Arc<DiskEntry>, Arc<Disk>),
}

impl Daemon {
    /// Makes what a backup needs. The caller holds `op_lock` of the disk, whose writer it has
    /// checked.
    pub(super) fn prepare_backup(
        &self,
        spec: &BackupSpec,
        auto_dismiss: bool,
        entry: &Arc<DiskEntry>,
    ) -> Result<Prepared> {
        check(spec)?;
        entry.watched.check_free(&spec.disk)?;
        if let Some(name) = &spec.incremental {
            check_complete(entry, name, "backup")?;
        }
        let id = self.job_name(spec.job.as_deref(), "backup")?;
        let size = entry.disk.size_bytes();
        if let Some(name) = &spec.pull {
            self.state().check_unnamed(name)?;
        }
        let fleece = spec.fleece.as_deref().map(|path| fleece::open(path, size, &id)).transpose()?;
        let options = JobOptions { speed: spec.speed, auto_finalize: spec.auto_finalize, auto_dismiss };
        let mut job = Job::new(&id, JobKind::Backup, &spec.disk, wanted(spec).shown(), options);
        job.fleece.clone_from(&spec.fleece);
        job.pull.clone_from(&spec.pull);
        let job = Arc::new(job);
        let to = match (&spec.pull, fleece) {
            (Some(name), Some(fleece)) => (None, Some(name), Some(fleece)),
            (_, fleece) => (Some(self.open_target(&wanted(spec), &id, entry)?), None, fleece),
        };
        let ready = self.job_thread(&id).and_then(|thread| {
            let point = Point::new(spec, entry, to.2.as_ref())?;
            self.state().enter(job.clone())?;
            Ok((thread, point))
        });
        let (thread, point) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                if let Some(target) = to.0 {
                    target.give_up();
                }
                return Err(e);
            }
        };
        let to = match to {
            (Some(target), _, fleece) => To::Copy { target: Box::new(target), fleece },
            (None, name, fleece) => {
                let (name, fleece) = name.zip(fleece).expect("a pull backup has both");
                To::Pull(frozen_disk(name, entry, &job, &point.work, &fleece), fleece)
            }
        };
        Ok(Prepared { spec: spec.clone(), job, entry: entry.clone(), point, thread, to })
    }

    /// Withdraws a backup that was not frozen.
    pub(super) fn withdraw_backup(&self, prepared: Prepared) {
        self.withdraw(&prepared.job.id);
        if let To::Copy { target, .. } = prepared.to {
            target.give_up();
        }
    }

    /// Starts the job of a backup that is frozen.
    pub(super) fn launch_backup(&self, prepared: Prepared, started: Option<StartedBitmap>) {
        let Prepared { spec, job, entry, point, thread, to } = prepared;
        let (target, fleece) = match to {
            To::Pull(frozen, fleece) => {
                job.state().begun = true;
                let pull = Pull { source: entry, frozen, work: point.work, started, fleece };
                return self.launch(thread, job, move |daemon, job| pull.run(daemon, job));
            }
            To::Copy { target, fleece } => (*target, fleece),
        };
        let (source, to, work) = (entry.disk.clone(), target.disk.clone(), point.work.clone());
        let (compress, fresh, fleece_for_copy) = (spec.compress, target.fresh, fleece.clone());
        let plan = CopyPlan {
            entry: Some(entry.clone()),
            worker: None,
            copy: Box::new(move |owner| {
                let copy = Copy::new(source, to, work, owner).fleeced(fleece_for_copy);
                copy.onto_fresh(fresh).compressed(compress)
            }),
        };
        // The job owns the target, so that it is closed by the thread of the job.
        let cleanup = Cleanup { entry, work: point.work, started, target, fleece };
        self.launch(thread, job, move |daemon, job| {
            let mut left = None;
            let copied = match daemon.copy_or_leave(job, plan, Patience::Source, &mut left) {
                Ok(true) => daemon.await_finalize(job),
                Ok(false) => Err(took_nothing(job)),
                Err(e) => Err(e),
            };
            let copied = job.decide(copied);
            daemon.tell_status(job);
            cleanup.end(daemon, job, copied, left)
        });
    }
}

impl Prepared {
    /// Returns the disk of a pull backup.
    pub(super) fn frozen(&self) -> Option<Arc<DiskEntry>> {
        match &self.to {
            To::Pull(frozen, _) => Some(frozen.clone()),
            To::Copy { .. } => None,
        }
    }

    /// Freezes the point in time. No write is in flight, so the observers of writes can be changed.
    ///
    /// # Errors
    /// The bitmap cannot be used. Nothing was changed.
    pub(super) fn freeze(&self) -> Result<Option<StartedBitmap>> {
        let Self { spec, job, entry, point, .. } = self;
        let (work, size) = (&point.work, entry.disk.size_bytes());
        let started = start_bitmap(entry, spec.bitmap.as_deref(), spec.incremental.as_deref(), &job.id)?;
        entry.disk.set_fleece(point.fleece.clone());
        // The frozen disk of a pull backup shows all blocks.
        match started.as_ref().filter(|_| spec.incremental.is_some() && spec.pull.is_none()) {
            Some(StartedBitmap { old: Some(old), .. }) => work.todo().add(old),
            _ => work.todo().set(work.todo().all()),
        }
        // Later writes remove blocks from it.
        if spec.pull.is_none() {
            job.state().total = (work.todo().count() * work.todo().granularity()).min(size);
        }
        let mut state = entry.watched.state();
        (state.job, state.is_pull) = (Some(job.id.clone()), spec.pull.is_some());
        state.before = Some(work.clone());
        drop(state);
        entry.watch();
        if let (To::Pull(frozen, _), Some(bitmap)) = (&self.to, &spec.incremental)
            && let Some(StartedBitmap { old: Some(old), .. }) = &started
        {
            let bitmap = Bitmap::frozen(bitmap, old.clone(), &job.id);
            frozen.watched.state().bitmaps.push(Arc::new(bitmap));
        }
        Ok(started)
    }

    /// Undoes [`freeze`](Self::freeze), while still no write is in flight.
    pub(super) fn thaw(&self, started: Option<StartedBitmap>) {
        restore_bitmap(&self.entry, started, false);
        self.entry.watched.release();
        self.entry.disk.set_fleece(None);
        self.entry.watch();
    }
}

/// What remains to be done after the copy.
struct Cleanup {
    entry: Arc<DiskEntry>,
    work: Arc<CopyBeforeWrite>,
    started: Option<StartedBitmap>,
    target: Target,
    /// Closed last, on the thread of the job: to free the space of a large file takes time.
    fleece: Option<Arc<Disk>>,
}

impl Cleanup {
    /// Makes the target stable, and releases all that the job had. `left`: a copy that failed and
    /// still has requests in flight.
    fn end(
        self,
        daemon: &Daemon,
        job: &Arc<Job>,
        copied: Result<()>,
        left: Option<RunningCopy>,
    ) -> Result<()> {
        let result = copied.and_then(|()| self.make_stable(job));
        let Self { entry, work, started, target, fleece: _fleece } = self;
        if result.is_err() {
            // The queue may never have run. No write may wait for it.
            work.end_now();
        }
        // A target that failed may answer nothing. So this comes last, when nothing else is held.
        let (result, failed) = match result {
            Ok(()) => (target.keep(), None),
            Err(e) => (Err(e), Some(target)),
        };
        release_source(daemon, &entry, started, result.is_ok());
        drop(entry);
        daemon.end_left(job, left);
        if let Some(target) = failed {
            target.give_up();
        }
        result
    }

    /// Makes the target stable.
    fn make_stable(&self, job: &Arc<Job>) -> Result<()> {
        if let Some(file) = &self.fleece {
            // Old data that was read back may be wrong if its write-back failed.
            let cannot = |e| Error::io("the fleecing file cannot be written", e);
            sync_fleece(job, file)?.map_err(cannot)?;
        }
        sync_apart(job, &self.target.disk, None)
    }
}

/// Returns the target that a backup asks for. Of a pull backup it is the disk that is made.
fn wanted(spec: &BackupSpec) -> Wanted<'_> {
    Wanted {
        to: spec.to.as_deref(),
        disk: spec.target.as_deref().or(spec.pull.as_deref()),
        format: spec.format,
        overwrite: spec.overwrite,
        backing: spec.backing.as_deref(),
        stays_open: false,
    }
}

/// Checks the request itself.
fn check(spec: &BackupSpec) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("backup of disk {}: {why}", spec.disk)));
    if let Some(name) = &spec.pull {
        check_name("disk", name)?;
        return check_pull(spec).map_or(Ok(()), wrong);
    }
    let wanted = wanted(spec);
    wanted.check(&format!("backup of disk {}", spec.disk))?;
    let qcow2 = wanted.format() == Format::Qcow2;
    if spec.compress && (!qcow2 || spec.target.is_some()) {
        return wrong("only a new qcow2 file can be compressed; leave out compress");
    }
    if spec.bitmap.is_some() && spec.incremental.is_some() {
        return wrong("an incremental backup restarts its bitmap by itself; leave out bitmap");
    }
    if spec.backing.is_some() && (spec.incremental.is_none() || !qcow2) {
        return wrong("backing is of an incremental backup in a qcow2 file");
    }
    if spec.incremental.is_some() && spec.target.is_none() && spec.backing.is_none() {
        return wrong(
            "an incremental backup has only what changed: give the backup before as its backing, or a disk that holds \
             it as the target",
        );
    }
    Ok(())
}

/// Checks the request for a pull backup.
fn check_pull(spec: &BackupSpec) -> Option<&'static str> {
    let of_copies =
        spec.to.is_some() || spec.target.is_some() || spec.format.is_some() || spec.backing.is_some();
    if of_copies || spec.overwrite || spec.compress || spec.speed.is_some() || spec.auto_finalize.is_some() {
        return Some(
            "pull copies nothing: leave out to, target, format, backing, overwrite, compress, speed and auto-finalize",
        );
    }
    match (&spec.fleece, &spec.bitmap, &spec.incremental) {
        (None, ..) => Some("pull needs a fleecing file, which keeps what guests overwrite: add fleece"),
        (_, Some(_), Some(_)) => {
            Some("an incremental backup restarts its bitmap by itself; leave out bitmap")
        }
        _ => None,
    }
}
