//! The fleecing file of a backup: made for the job, and without a name once it is open. So it ends
//! with the job, or with the daemon.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use vshunt_block::{Disk, own_mounts};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Direct, DiskSpec, Format};

use super::rounds::apart;
use super::run::took_nothing;
use crate::job::Job;

/// Makes a sparse file as large as a disk of `size` bytes, opens it, and removes its name.
///
/// # Errors
/// `Exists` if there is a file with this name, which is never overwritten. The system's.
pub(super) fn open(path: &Path, size: u64, job: &str) -> Result<Arc<Disk>> {
    let shown = path.display();
    own_mounts::check(path)?;
    let mut create = OpenOptions::new();
    let file = create.read(true).write(true).create_new(true).mode(0o600).open(path).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Error::exists(format!(
            "{shown} is there already, and a fleecing file (--fleece) has to be new: choose another name, or remove it"
        )),
        _ => Error::io(format_args!("cannot make the fleecing file {shown}"), e),
    })?;
    let sized = file.set_len(size.next_multiple_of(4096)).and_then(|()| file.metadata());
    drop(file);
    let spec = DiskSpec {
        name: format!("the fleecing file of job {job}"),
        format: Some(Format::Raw),
        file: Some(path.to_owned()),
        // The page cache takes what guests overwrite at once, and drops it if it is copied before
        // it is written. `Disk::sync` reports a write-back that failed.
        direct: Direct::Off,
        locking: true,
        ..DiskSpec::default()
    };
    let opened = match sized {
        // A user who can write to the folder could have put another file in its place.
        Ok(made) => Disk::open(&spec).map_err(|e| e.context("the fleecing file cannot be used")).and_then(|disk| {
            match disk.may_have_file((made.dev(), made.ino())) {
                true => Ok(disk),
                false => Err(Error::busy(format!(
                    "{shown} was exchanged when it had been made; give --fleece a folder that nobody else can write to"
                ))),
            }
        }),
        Err(e) => Err(Error::io(format_args!("the fleecing file {shown} cannot be as large as the disk"), e)),
    };
    let removed = std::fs::remove_file(path)
        .map_err(|e| Error::io(format_args!("cannot remove the name of the fleecing file {shown}"), e));
    opened.and_then(|disk| removed.map(|()| disk))
}

/// Returns how a fleecing file was made stable, on a thread of its own.
///
/// # Errors
/// The job was cancelled, and the thread ends later; or there is no thread.
pub(super) fn sync_fleece(job: &Job, file: &Arc<Disk>) -> Result<io::Result<()>> {
    let file = file.clone();
    apart(job, None, move || file.sync())?.ok_or_else(|| took_nothing(job))
}
