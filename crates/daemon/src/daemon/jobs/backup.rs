//! Backups: a copy of a disk at one point in time.

use std::path::Path;
use std::sync::Arc;

use vshunt_block::copy::Copy;
use vshunt_block::{Bitmap, Bits, CopyBeforeWrite, Disk, NewImage};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BackupSpec, DiskSpec, Format, JobKind};

use super::fleece;
use super::run::CopyPlan;
use super::target::TargetFile;
use crate::daemon::Daemon;
use crate::daemon::bitmaps::{at_rest, check_new, persistent, writer};
use crate::disk_entry::DiskEntry;
use crate::export::Export;
use crate::job::Job;

/// log2 of the size of a block. Blocks are small, so that a small write causes a small copy. Large
/// disks have larger blocks.
const BLOCK_SHIFT: u32 = 12;
const BLOCKS_MAX: u64 = 1 << 26;
/// log2 of the size of a block for a compressed image: a cluster.
const CLUSTER_SHIFT: u32 = 16;

/// The target of a backup.
struct Target {
    disk: Arc<Disk>,
    /// The file that was made for the backup.
    new_file: Option<TargetFile>,
    /// The disk of the daemon that is the target.
    entry: Option<Arc<DiskEntry>>,
    /// Whether the target reads as zeroes.
    fresh: bool,
}

/// A bitmap that a backup restarts.
struct StartedBitmap {
    bitmap: Arc<Bitmap>,
    /// Its bits before, which are restored if the backup fails. None: the bitmap was made for this
    /// backup.
    old: Option<Arc<Bits>>,
    /// Whether it recorded, and whether there was a gap in its recording.
    before: (bool, bool),
}

impl Daemon {
    /// Starts a backup, and returns the name of its job. The point in time is before the return.
    ///
    /// # Errors
    /// The request is wrong, or the target cannot be used.
    pub fn backup_start(&self, spec: &BackupSpec, auto_dismiss: bool) -> Result<String> {
        check(spec)?;
        let entry = self.state().disk(&spec.disk)?;
        let _op = entry.op_lock();
        let exports = self.state().exports_of(&entry)?;
        let writer = writer(&exports, &entry)?;
        entry.watched.check_free(&spec.disk)?;
        if let Some(name) = &spec.incremental {
            let bitmap = entry.watched.bitmap(&spec.disk, name)?;
            let state = bitmap.state();
            if !state.recording || state.gap {
                let does = if state.recording {
                    "did not record writes for a while"
                } else {
                    "does not record writes"
                };
                return Err(Error::invalid(format!(
                    "bitmap {name} {does}, so it does not say what changed: restart it with a full backup (--bitmap {name})"
                )));
            }
        }
        let id = self.state().job_name(spec.job.as_deref(), "backup")?;
        let size = entry.disk.size_bytes();
        let fleece = spec.fleece.as_deref().map(|path| fleece::open(path, size, &id)).transpose()?;
        let target = self.target(spec, &id, &entry)?;
        let shown = match (&spec.to, &spec.target) {
            (Some(path), _) => path.display().to_string(),
            (None, name) => format!("disk {}", name.as_deref().unwrap_or_default()),
        };
        let mut job = Job::new(&id, JobKind::Backup, &spec.disk, shown, spec.speed);
        job.fleece.clone_from(&spec.fleece);
        job.auto_dismiss = auto_dismiss;
        let job = Arc::new(job);
        self.start_job(spec, &job, &entry, writer, (target, fleece)).map(|()| id)
    }

    /// Freezes the point in time, and starts the thread of the job.
    fn start_job(
        &self,
        spec: &BackupSpec,
        job: &Arc<Job>,
        entry: &Arc<DiskEntry>,
        writer: Option<Arc<Export>>,
        (target, fleece): (Target, Option<Arc<Disk>>),
    ) -> Result<()> {
        let ready = self.job_thread(&job.id).and_then(|thread| {
            if let Some(name) = &spec.bitmap {
                self.place_bitmap(entry, name, 1 << CLUSTER_SHIFT, None)?;
            }
            let (work, started) = self.freeze(spec, job, entry, writer, fleece.as_ref())?;
            Ok((thread, work, started))
        });
        let (thread, work, started) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                drop_target(target);
                return Err(e);
            }
        };
        let (source, to, for_cleanup) = (entry.disk.clone(), target.disk.clone(), work.clone());
        let (compress, fresh, fleece_for_copy) = (spec.compress, target.fresh, fleece.clone());
        let plan = CopyPlan {
            entry: Some(entry.clone()),
            copy: Box::new(move |owner| {
                let copy = Copy::new(source, to, work, owner).fleeced(fleece_for_copy);
                copy.onto_fresh(fresh).compressed(compress)
            }),
        };
        // The job owns the target, so that it is closed when the job cleanup.
        let cleanup = Cleanup { entry: entry.clone(), work: for_cleanup, started, target, fleece };
        // Before the caller can change the job.
        self.tell_status(job);
        let job = job.clone();
        let body = move |daemon: &Daemon| {
            let copied = job.decide(daemon.copy(&job, plan));
            daemon.tell_status(&job);
            let result = cleanup.end(daemon, copied);
            daemon.conclude(&job, result);
        };
        thread.send(Box::new(body)).expect("it waits");
        Ok(())
    }

    /// Freezes the point in time, with no write in flight.
    fn freeze(
        &self,
        spec: &BackupSpec,
        job: &Arc<Job>,
        entry: &Arc<DiskEntry>,
        writer: Option<Arc<Export>>,
        fleece: Option<&Arc<Disk>>,
    ) -> Result<(Arc<CopyBeforeWrite>, Option<StartedBitmap>)> {
        let no_memory =
            || Error::limit(format!("no memory for the map of what is copied of disk {}", spec.disk));
        let size = entry.disk.size_bytes();
        let todo = Bits::new(size, shift(spec, size)).ok_or_else(no_memory)?;
        let work = CopyBeforeWrite::new(todo).and_then(|work| match fleece {
            Some(_) => work.fleeced(),
            None => Ok(work),
        });
        let work = Arc::new(work.map_err(|e| Error::io("a job cannot be set up", e))?);
        self.state().enter(job.clone())?;
        let frozen = at_rest(writer.as_ref(), || {
            // The observers of writes can be changed now: nothing is in flight.
            let started = start_bitmap(spec, entry, &job.id)?;
            entry.disk.set_fleece(fleece.cloned());
            match started.as_ref().filter(|_| spec.incremental.is_some()) {
                Some(StartedBitmap { old: Some(old), .. }) => work.todo().add(old),
                _ => work.todo().set(work.todo().all()),
            }
            // Later writes remove blocks from it.
            job.state().total = (work.todo().count() * work.todo().granularity()).min(size);
            let mut state = entry.watched.state();
            state.job = Some(job.id.clone());
            state.before = Some(work.clone());
            drop(state);
            entry.watch();
            Ok(started)
        });
        match frozen.and_then(|r| r) {
            Ok(started) => Ok((work, started)),
            Err(e) => {
                self.withdraw(&job.id);
                Err(e)
            }
        }
    }

    /// Opens the target, which is made first if the request says so.
    fn target(&self, spec: &BackupSpec, id: &str, source: &Arc<DiskEntry>) -> Result<Target> {
        let size = source.disk.size_bytes();
        if let Some(name) = &spec.target {
            let entry = self.state().disk(name)?;
            if Arc::ptr_eq(&entry, source) {
                return Err(Error::invalid(format!("disk {name} cannot be its own backup")));
            }
            entry.watched.claim_target(name, id)?;
            if let Err(e) = self.check_target(&entry, spec, size) {
                entry.watched.release();
                return Err(e);
            }
            return Ok(Target { disk: entry.disk.clone(), new_file: None, entry: Some(entry), fresh: false });
        }
        let path = spec.to.as_deref().expect("checked: one of the two");
        let format = spec.format.unwrap_or(Format::Qcow2);
        let below_path = spec.backing.as_deref().map(backing).transpose()?;
        let fresh = below_path.is_none();
        let backing = below_path.as_ref().map(|(name, format)| (beside(path, name), *format));
        // Kept open, so that the new file cannot replace one of the locked images.
        let _below = below_path.as_ref().map(|(name, format)| below(path, name, *format)).transpose()?;
        if source.disk.has_file(path) {
            return Err(Error::invalid(format!(
                "{} is of disk {} itself; choose another name",
                path.display(),
                spec.disk
            )));
        }
        let disk_of = |path: &Path| DiskSpec {
            name: format!("the target of job {id}"),
            format: Some(format),
            file: Some(path.to_owned()),
            locking: true,
            ..DiskSpec::default()
        };
        self.check_image(&disk_of(path))?;
        let new_file = TargetFile::create(path, spec.overwrite)?;
        let disk = disk_of(new_file.part());
        let may_be_emptied = match source.disk.has_file(new_file.part()) {
            true => Err(Error::invalid(format!(
                "{} is of disk {} itself; choose another name",
                new_file.part().display(),
                spec.disk
            ))),
            false => self.check_image(&disk),
        };
        if let Err(e) = may_be_emptied {
            new_file.remove();
            return Err(e);
        }
        let image = NewImage { path: new_file.part(), format, size, backing, overwrite: true };
        if let Err(e) = image.make() {
            // The existing file may be in use by another process.
            new_file.remove();
            return Err(e);
        }
        let new_file = new_file.take();
        match Disk::open(&disk) {
            Ok(disk) => Ok(Target { disk, new_file: Some(new_file), entry: None, fresh }),
            Err(e) => {
                new_file.remove();
                Err(e)
            }
        }
    }

    /// Checks that a disk of the daemon can be the target.
    fn check_target(&self, entry: &Arc<DiskEntry>, spec: &BackupSpec, size: u64) -> Result<()> {
        let name = &entry.name;
        if let Some(export) = self.state().exports_of(entry)?.first() {
            return Err(Error::busy(format!(
                "disk {name} is in use by export {}; remove that, or back up to another",
                export.spec.name
            )));
        }
        entry.check_returned()?;
        if entry.disk.readonly() {
            return Err(Error::invalid(format!("disk {name} is read-only; nothing can be copied to it")));
        }
        if entry.disk.size_bytes() != size {
            return Err(Error::invalid(format!(
                "disk {name} has {} bytes and disk {} has {size}; a backup needs a disk as large",
                entry.disk.size_bytes(),
                spec.disk
            )));
        }
        Ok(())
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
    /// Makes the target stable, and releases all that the job had.
    fn end(self, daemon: &Daemon, copied: Result<()>) -> Result<()> {
        let result = copied.and_then(|()| self.make_stable());
        let Self { entry, work, started, target, fleece: _fleece } = self;
        if result.is_err() {
            // The queue may never have run. No write may wait for it.
            work.end_now();
        }
        // Closing a target that failed may hang. So this comes last, when nothing else is held.
        let (result, failed) = match result {
            Ok(()) => (keep_target(target), None),
            Err(e) => (Err(e), Some(target)),
        };
        release_source(daemon, &entry, started, result.is_ok());
        drop(entry);
        if let Some(target) = failed {
            drop_target(target);
        }
        result
    }

    /// Makes the target stable.
    fn make_stable(&self) -> Result<()> {
        if let Some(file) = &self.fleece {
            // Old data that was read back may be wrong if its write-back failed.
            file.sync().map_err(|e| Error::io("the fleecing file cannot be written", e))?;
        }
        let target = &self.target;
        let synced = target.disk.sync().and_then(|()| target.disk.sync());
        synced.map_err(|e| Error::io("the backup cannot be made stable", e))
    }
}

/// Releases the disk. If the backup failed, its bitmap is restored.
fn release_source(daemon: &Daemon, entry: &Arc<DiskEntry>, started: Option<StartedBitmap>, good: bool) {
    let _op = entry.op_lock();
    if let Some(StartedBitmap { bitmap, old, before }) = started {
        match old.filter(|_| !good) {
            Some(old) => {
                let mut state = bitmap.state();
                state.bits.add(&old);
                (state.recording, state.gap) = before;
            }
            None if !good => entry.watched.state().bitmaps.retain(|b| !Arc::ptr_eq(b, &bitmap)),
            None => {}
        }
        bitmap.state().job = None;
    }
    entry.watched.release();
    entry.disk.set_fleece(None);
    let exports = daemon.state().exports_of(entry).unwrap_or_default();
    let writer = exports.iter().find(|e| !e.readonly);
    if let Err(e) = at_rest(writer, || entry.watch()) {
        // Nothing is left to be copied, according to the map of the job. It still costs each write
        // a check.
        tracing::warn!("{e}");
    }
}

/// Closes a complete target. A file gets its final name.
fn keep_target(target: Target) -> Result<()> {
    let Target { disk, new_file, entry, .. } = target;
    let Some(new_file) = new_file else {
        drop(disk);
        if let Some(entry) = entry {
            entry.watched.release();
        }
        return Ok(());
    };
    if let Err(e) = disk.close() {
        new_file.remove();
        return Err(e);
    }
    new_file.put()
}

/// Closes an incomplete target, and removes a file that was made for it.
fn drop_target(target: Target) {
    let Target { disk, new_file, entry, .. } = target;
    if new_file.is_some() {
        disk.abandon();
    }
    drop(disk);
    if let Some(entry) = entry {
        entry.watched.release();
    }
    if let Some(new_file) = new_file {
        new_file.remove();
    }
}

/// Restarts the bitmap of the backup at the point in time.
fn start_bitmap(spec: &BackupSpec, entry: &Arc<DiskEntry>, job: &str) -> Result<Option<StartedBitmap>> {
    let Some(name) = spec.incremental.as_ref().or(spec.bitmap.as_ref()) else { return Ok(None) };
    let there = entry.watched.bitmap(&spec.disk, name);
    let started = match there {
        Ok(bitmap) => {
            if let Some(other) = &bitmap.state().job {
                return Err(Error::busy(format!("bitmap {name} is in use by job {other}")));
            }
            let old = bitmap.take()?;
            let mut state = bitmap.state();
            let before = (state.recording, state.gap);
            (state.recording, state.gap) = (true, false);
            drop(state);
            StartedBitmap { bitmap, old: Some(old), before }
        }
        Err(e) if spec.incremental.is_some() => return Err(e),
        Err(_) => {
            check_new(entry, name)?;
            let persistent = persistent(entry, None)?;
            let bitmap =
                Arc::new(Bitmap::new(name, entry.disk.size_bytes(), 1 << CLUSTER_SHIFT, persistent)?);
            entry.watched.state().bitmaps.push(bitmap.clone());
            StartedBitmap { bitmap, old: None, before: (true, false) }
        }
    };
    started.bitmap.state().job = Some(job.to_owned());
    Ok(Some(started))
}

/// Returns log2 of the size of a block.
fn shift(spec: &BackupSpec, size: u64) -> u32 {
    if spec.compress {
        return CLUSTER_SHIFT;
    }
    let mut shift = BLOCK_SHIFT;
    while size >> shift > BLOCKS_MAX {
        shift += 1;
    }
    shift
}

/// Checks the request itself.
fn check(spec: &BackupSpec) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("backup of disk {}: {why}", spec.disk)));
    let qcow2 = spec.format.unwrap_or(Format::Qcow2) == Format::Qcow2;
    match (&spec.to, &spec.target) {
        (None, None) => return wrong("where to? give a file, or a disk as its target"),
        (Some(_), Some(_)) => return wrong("a file and a disk as its target are given; choose one"),
        (None, Some(_)) if spec.format.is_some() || spec.overwrite || spec.backing.is_some() => {
            return wrong("format, overwrite and backing are of a file; leave them out");
        }
        _ => {}
    }
    if !matches!(spec.format, None | Some(Format::Qcow2 | Format::Raw)) {
        return wrong("the format of a backup is qcow2 or raw");
    }
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

/// Opens the backing file of a new file.
fn below(path: &Path, name: &str, format: Format) -> Result<Arc<Disk>> {
    if std::fs::canonicalize(path).is_ok_and(|path| path == Path::new(name)) {
        return Err(Error::invalid(format!(
            "{name} cannot be replaced by a backup that has it as its backing image; choose another name"
        )));
    }
    Disk::open(&DiskSpec {
        name: "the backup before".into(),
        format: Some(format),
        file: Some(name.into()),
        readonly: true,
        locking: true,
        ..DiskSpec::default()
    })
}

/// Returns how a new file names its backing file: by its name only if both are in one folder, so
/// that the folder can be moved.
fn beside(path: &Path, name: &str) -> String {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let below = Path::new(name);
    match (std::fs::canonicalize(folder), below.file_name().and_then(|n| n.to_str())) {
        (Ok(folder), Some(alone)) if below.parent() == Some(&folder) => alone.to_owned(),
        _ => name.to_owned(),
    }
}

/// Returns the name and the format of the previous backup. Its format must be qcow2: the format of
/// a raw file would be guessed from data of the guest.
fn backing(path: &Path) -> Result<(String, Format)> {
    let shown = path.display();
    let path = std::fs::canonicalize(path).map_err(|e| Error::io(format_args!("cannot open {shown}"), e))?;
    let Some(name) = path.to_str() else {
        return Err(Error::invalid(format!("{shown} has a name that no image can hold: it is not UTF-8")));
    };
    Ok((name.to_owned(), Format::Qcow2))
}
