//! What is wrong with a request by itself, whatever the machine and the daemon are like.
//!
//! Control asks before anything is begun: the command line or the configuration is wrong then. [`Daemon`](super::Daemon)
//! asks again, for other clients of the protocol.

use super::life::MAX_QUEUES;
use super::spec::{DiskSpec, ExportKind, ExportSpec, WorkerKind, WorkerSpec, Workers as Spread};
use crate::backend::block::Disk;
use crate::error::{Error, Result};
use crate::queue::blk::SERIAL_MAX;
use crate::worker::{Settings, WorkerId};

/// A request that can be wrong by itself.
pub trait Check {
    /// # Errors
    /// [`Invalid`](crate::error::Kind::Invalid), with what would be right.
    fn check(&self) -> Result<()>;
}

impl Check for DiskSpec {
    fn check(&self) -> Result<()> {
        check_name("disk", &self.name)?;
        Disk::check(self)
    }
}

impl Check for WorkerSpec {
    fn check(&self) -> Result<()> {
        check_worker_name(self.name.as_deref())?;
        match (self.kind.unwrap_or_default(), &self.export) {
            (WorkerKind::Kernel, None) => {
                return Err(Error::invalid(
                    "a worker of the kernel is of one export; name it: export=NAME (--export NAME)",
                ));
            }
            (WorkerKind::User, Some(export)) => {
                return Err(Error::invalid(format!(
                    "a worker of this process is of no export; leave out {export}, or give kind=kernel"
                )));
            }
            (WorkerKind::Kernel, Some(_)) => settings(self).check_kernel()?,
            (WorkerKind::User, None) => {}
        }
        settings(self).check()
    }
}

impl Check for ExportSpec {
    fn check(&self) -> Result<()> {
        check_name("export", &self.name)?;
        let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", self.name)));
        check_kind(self)?;
        if self.socket.is_some() && self.fd.is_some() {
            return check_one_place(self);
        }
        if let Some(queues) = self.queues
            && !(1..=MAX_QUEUES).contains(&queues)
        {
            return wrong(format!("queues={queues} is out of range; 1 to {MAX_QUEUES} is possible"));
        }
        if self.workers == Spread::Count(0) {
            return wrong("workers=0 would serve nothing; give 1 or more, or per-queue".to_owned());
        }
        if let Some(serial) = &self.serial
            && serial.len() > SERIAL_MAX
        {
            return wrong(format!("the serial has {} bytes; {SERIAL_MAX} is the most", serial.len()));
        }
        if let Some(size) = self.block_size
            && (!size.is_power_of_two() || !(512..=4096).contains(&size))
        {
            return wrong(format!("block-size={size} is not one of 512, 1024, 2048, 4096"));
        }
        Settings { poll_us: self.poll_us, ..Settings::default() }.check()
    }
}

/// Whether a disk may be asked to have that size.
///
/// # Errors
/// [`Invalid`](crate::error::Kind::Invalid), with what would be right.
pub fn check_disk_size(size_bytes: u64) -> Result<()> {
    Disk::check_size(size_bytes)
}

/// Whether an export has exactly one place: a socket or a mountpoint. In [`Check`] a socket may be missing: the service
/// manager may pass it.
///
/// # Errors
/// [`Invalid`](crate::error::Kind::Invalid).
pub fn check_one_place(spec: &ExportSpec) -> Result<()> {
    match spec.kind {
        ExportKind::VhostUserBlk if spec.socket.is_some() == spec.fd.is_some() => {
            Err(Error::invalid(format!("export {}: give either socket=PATH or fd=N", spec.name)))
        }
        ExportKind::Fuse if spec.mountpoint.is_none() => {
            Err(Error::invalid(format!("export {}: give mountpoint=PATH, the file to mount over", spec.name)))
        }
        _ => Ok(()),
    }
}

/// Whether what is asked for is of this kind of export.
fn check_kind(spec: &ExportSpec) -> Result<()> {
    let fuse = [
        ("mountpoint", spec.mountpoint.is_some()),
        ("writable", spec.writable.is_some()),
        ("growable", spec.growable.is_some()),
        ("allow-other", spec.allow_other.is_some()),
        ("transport", spec.transport.is_some()),
        ("passthrough", spec.passthrough.is_some()),
    ];
    let vhost_user = [
        ("socket", spec.socket.is_some()),
        ("fd", spec.fd.is_some()),
        ("serial", spec.serial.is_some()),
        ("block-size", spec.block_size.is_some()),
        ("readonly", spec.readonly),
        ("engine", spec.engine.is_some()),
    ];
    let (foreign, kind, other) = match spec.kind {
        ExportKind::VhostUserBlk => (&fuse[..], "vhost-user-blk", "fuse"),
        ExportKind::Fuse => (&vhost_user[..], "fuse", "vhost-user-blk"),
    };
    let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    match foreign.iter().find(|(_, given)| *given) {
        Some(("readonly", _)) => {
            wrong("a mount is read-only unless writable=on is given; leave out readonly".into())
        }
        Some((key, _)) => wrong(format!("{key} is of type={other}, not of type={kind}; leave it out")),
        None if spec.growable == Some(true) && spec.writable != Some(true) => {
            wrong("growable=on needs writable=on".into())
        }
        None => Ok(()),
    }
}

/// What is asked of a worker besides its name.
pub(super) fn settings(spec: &WorkerSpec) -> Settings {
    Settings { cpu: spec.cpu.clone(), nice: spec.nice, poll_us: spec.poll_us }
}

/// Names are taken for ids where they are numbers.
fn check_worker_name(name: Option<&str>) -> Result<()> {
    let Some(name) = name else { return Ok(()) };
    check_name("worker", name)?;
    match name.parse::<WorkerId>() {
        Ok(_) => Err(Error::invalid(format!("worker name {name:?} would be taken for an id; add a letter"))),
        Err(_) => Ok(()),
    }
}

fn check_name(what: &str, name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
        return Err(Error::invalid(format!(
            "{what} name {name:?} is not usable; take 1 to 64 letters, digits, '-', '_' or '.'"
        )));
    }
    Ok(())
}
