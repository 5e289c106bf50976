//! The target of a job: a file that is made for it, or a disk of the daemon.

use std::path::Path;
use std::sync::Arc;

use vshunt_block::{Disk, NewImage};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

use super::target_file::TargetFile;
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;

/// The target that a job asks for: a file, or a disk.
pub(super) struct Wanted<'a> {
    /// The path of the file.
    pub(super) to: Option<&'a Path>,
    /// The name of the disk.
    pub(super) disk: Option<&'a str>,
    /// The format of the file. None: qcow2.
    pub(super) format: Option<Format>,
    /// Whether an existing file is replaced.
    pub(super) overwrite: bool,
    /// The backing image of the file.
    pub(super) backing: Option<&'a Path>,
    /// Whether the file stays open when it is complete, because the source continues in it.
    pub(super) stays_open: bool,
}

impl Wanted<'_> {
    /// Checks the request itself. `job`: what asks, for messages.
    ///
    /// # Errors
    /// `Invalid`, with the remedy.
    pub(super) fn check(&self, job: &str) -> Result<()> {
        let of_file = [
            ("format", self.format.is_some()),
            ("overwrite", self.overwrite),
            ("backing", self.backing.is_some()),
        ];
        let why = match (self.to, self.disk, of_file.into_iter().find(|(_, given)| *given)) {
            (None, None, _) => "where to? give a file, or a disk as its target".to_owned(),
            (Some(_), Some(_), _) => "a file and a disk as its target are given; choose one".to_owned(),
            (None, Some(_), Some((key, _))) => {
                format!("{key} is for a file that is made, not for a disk as the target; leave it out")
            }
            _ if !matches!(self.format(), Format::Qcow2 | Format::Raw) => {
                "the format of a file is qcow2 or raw".to_owned()
            }
            _ => return Ok(()),
        };
        Err(Error::invalid(format!("{job}: {why}")))
    }

    /// Returns the format of the file.
    pub(super) fn format(&self) -> Format {
        self.format.unwrap_or(Format::Qcow2)
    }

    /// Returns what it is, for lists and messages.
    pub(super) fn shown(&self) -> String {
        match self.to {
            Some(path) => path.display().to_string(),
            None => format!("disk {}", self.disk.unwrap_or_default()),
        }
    }
}

/// An open target.
pub(super) struct Target {
    pub(super) disk: Arc<Disk>,
    /// The description of a disk that is made of the target.
    pub(super) spec: DiskSpec,
    /// The file that was made for the job.
    new_file: Option<Arc<TargetFile>>,
    /// The disk of the daemon that is the target.
    pub(super) entry: Option<Arc<DiskEntry>>,
    /// Whether the target reads as zeroes.
    pub(super) fresh: bool,
}

impl Daemon {
    /// Opens the target, which is made first if the request says so.
    pub(super) fn open_target(
        &self,
        wanted: &Wanted<'_>,
        id: &str,
        source: &Arc<DiskEntry>,
    ) -> Result<Target> {
        if let Some(name) = wanted.disk {
            let entry = self.state().disk(name)?;
            if Arc::ptr_eq(&entry, source) {
                return Err(Error::invalid(format!("disk {name} cannot be its own target")));
            }
            // Nobody is in the middle of a change of it.
            let Some(op) = entry.try_op_lock() else {
                return Err(Error::busy(format!(
                    "disk {name} is being changed; try again when that is over"
                )));
            };
            {
                // The disk is removed under this lock.
                let state = self.state();
                state.exports_of(&entry)?;
                entry.watched.claim_target(name, id)?;
            }
            if let Err(e) = self.check_target(&entry, source) {
                entry.watched.release();
                return Err(e);
            }
            let (disk, spec) = (entry.disk.clone(), entry.spec());
            drop(op);
            return Ok(Target { disk, spec, new_file: None, entry: Some(entry), fresh: false });
        }
        let path = wanted.to.expect("checked: one of the two");
        let below_path = wanted.backing.map(backing).transpose()?;
        let fresh = below_path.is_none();
        let backing = below_path.as_ref().map(|(name, format)| (beside(path, name), *format));
        // Kept open, so that the new file cannot replace one of the locked images.
        let _below = below_path.as_ref().map(|(name, format)| below(path, name, *format)).transpose()?;
        check_other(source, path)?;
        let settings = match wanted.stays_open {
            true => continued(&source.spec()),
            false => DiskSpec { locking: true, ..DiskSpec::default() },
        };
        let disk_of = |path: &Path| DiskSpec {
            name: format!("the target of job {id}"),
            format: Some(wanted.format()),
            file: Some(path.to_owned()),
            ..settings.clone()
        };
        if !wanted.stays_open {
            self.check_image(&disk_of(path))?;
        }
        self.check_no_disk(path)?;
        let new_file = match wanted.stays_open {
            true => {
                let like = source.disk.file_metadata();
                let raw = (wanted.format() == Format::Raw).then_some(source.disk.size_bytes());
                TargetFile::create_in_place(path, wanted.overwrite, raw, &source.spec(), like.as_ref())?
            }
            false => TargetFile::create(path, wanted.overwrite)?,
        };
        let spec_path = new_file.part().to_owned();
        let spec = disk_of(&spec_path);
        if let Err(e) = check_other(source, new_file.part()).and_then(|()| self.check_image(&spec)) {
            new_file.remove();
            return Err(e);
        }
        let size = source.disk.size_bytes();
        let image =
            NewImage { path: new_file.part(), format: wanted.format(), size, backing, overwrite: true };
        if let Err(e) = image.make() {
            // The existing file may be in use by another process.
            new_file.remove();
            return Err(e);
        }
        let new_file = if wanted.stays_open { new_file } else { new_file.take() };
        // Of another file that has the name by now, nothing is known.
        let opened = Disk::open_unchecked(&spec).and_then(|disk| match new_file.is_image_of(&disk) {
            true => Ok(disk),
            false => Err(Error::invalid(format!("{} was replaced while it was made", spec_path.display()))),
        });
        match opened {
            Ok(disk) => {
                // A device has old data.
                let fresh = fresh && (wanted.format() == Format::Qcow2 || new_file.is_regular());
                let new_file = Some(Arc::new(new_file));
                Ok(Target { disk, spec, new_file, entry: None, fresh })
            }
            Err(e) => {
                new_file.remove();
                Err(e)
            }
        }
    }

    /// Checks that no disk of the daemon has a file that a job would replace. Its lock does not
    /// tell if that disk has none.
    fn check_no_disk(&self, path: &Path) -> Result<()> {
        let disks: Vec<_> = self.state().disks.values().cloned().collect();
        match disks.iter().find(|entry| entry.disk.has_file(path)) {
            Some(entry) => Err(Error::busy(format!(
                "{} is of disk {} of this daemon; choose another name, or remove that disk first",
                path.display(),
                entry.name
            ))),
            None => Ok(()),
        }
    }

    /// Checks that a disk of the daemon can be the target.
    fn check_target(&self, entry: &Arc<DiskEntry>, source: &DiskEntry) -> Result<()> {
        let (name, size) = (&entry.name, source.disk.size_bytes());
        if let Some(export) = self.state().users(name).first() {
            return Err(Error::busy(format!(
                "disk {name} is in use by export {export}; remove that, or choose another target"
            )));
        }
        entry.check_returned()?;
        if entry.disk.shares_a_file_with(&source.disk) {
            return Err(Error::invalid(format!(
                "disks {name} and {} have a file in common, so one cannot be copied to the other; choose another target",
                source.name
            )));
        }
        if entry.disk.readonly() {
            return Err(Error::invalid(format!("disk {name} is read-only; nothing can be copied to it")));
        }
        if entry.disk.size_bytes() != size {
            return Err(Error::invalid(format!(
                "disk {name} has {} bytes and disk {} has {size}; the target has to be as large",
                entry.disk.size_bytes(),
                source.name
            )));
        }
        Ok(())
    }
}

impl Target {
    /// Closes a complete target. A file gets its final name.
    pub(super) fn keep(self) -> Result<()> {
        let Self { disk, new_file, entry, .. } = self;
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
    pub(super) fn give_up(self) {
        let Self { disk, new_file, entry, .. } = self;
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

    /// Returns the description of the disk `now` when it continues in the target.
    pub(super) fn next(&self, now: &DiskSpec) -> DiskSpec {
        DiskSpec { name: now.name.clone(), ..self.spec.clone() }
    }

    /// Returns the file that was made for the job, if there is one. Its calls may wait for storage.
    pub(super) fn new_file(&self) -> Option<Arc<TargetFile>> {
        self.new_file.clone()
    }
}

/// Returns the settings that a disk keeps when it continues in a new file.
fn continued(now: &DiskSpec) -> DiskSpec {
    let local = now.file.is_some();
    DiskSpec {
        cache: now.cache,
        locking: now.locking || !local,
        direct: if local { now.direct } else { Default::default() },
        cache_size: now.cache_size.filter(|_| local),
        ..DiskSpec::default()
    }
}

/// Checks that a path does not lead to a file of the source.
fn check_other(source: &DiskEntry, path: &Path) -> Result<()> {
    match source.disk.has_file(path) {
        true => Err(Error::invalid(format!(
            "{} is of disk {} itself; choose another name",
            path.display(),
            source.name
        ))),
        false => Ok(()),
    }
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
