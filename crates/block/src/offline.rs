//! Changes of a qcow2 image that require it to be closed: its size, and internal snapshots. The
//! exports of the disk stay and pause.
//!
//! Called under the conditions of [`replace`](super::replace). The image is checked first, since
//! such a change writes to clusters that are free by their reference counts. So the pause grows
//! with the tables of the image (about 2 MiB for each 16 GiB in use).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use qcow2::Image;
use qcow2::check::{Quiet, Repair, check};
use qcow2::create::Preallocation;
use qcow2::resize::Around;
use qcow2::snapshot::{self, Snapshot, read_table};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::DiskSpec;

use super::backend::Backend;
use super::disk::Disk;
use super::limits::SECTOR_BYTES;
use super::qcow2::repair_command;
use super::replace::{Closed, shown};

/// An internal snapshot, with the fields of QEMU's SnapshotInfo.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Unique in its image.
    pub id: String,
    /// The name that the user gave.
    pub name: String,
    /// When it was taken, seconds since 1970.
    pub date_s: u32,
    /// Nanoseconds of that time.
    pub date_ns: u32,
    /// Size of the VM state, bytes, if QEMU took the snapshot of a running VM.
    pub vm_state_bytes: u64,
    /// How long the guest had been running, nanoseconds.
    pub vm_clock_ns: u64,
}

impl From<&Snapshot> for SnapshotInfo {
    fn from(s: &Snapshot) -> Self {
        Self {
            id: s.id(),
            name: s.name(),
            date_s: s.date_s,
            date_ns: s.date_ns,
            vm_state_bytes: s.vm_state_bytes,
            vm_clock_ns: s.vm_clock_ns,
        }
    }
}

impl Disk {
    /// Changes the size of a qcow2 disk while its image is closed; see [`replace`](Self::replace).
    /// A growable disk stays growable.
    ///
    /// # Errors
    /// Those of the change, which leave the image unchanged, and those of
    /// [`replace`](Self::replace).
    pub fn resize_closed(self: &Arc<Self>, now: &DiskSpec, size_bytes: u64) -> Result<()> {
        Self::check_size(size_bytes)?;
        let resized = self.offline_owned(now, self.size_bytes().min(size_bytes), |image, closed| {
            if self.growable() {
                return Ok(qcow2::resize::resize_with_room(image, size_bytes, closed.backing_bytes));
            }
            let data = match image.header().data_file {
                Some(_) => Some(closed.file(1)?),
                None => None,
            };
            let data = data.as_deref();
            let around = Around { data, below: closed.backing_bytes, preallocation: Preallocation::Off };
            Ok(qcow2::resize::resize(image, size_bytes, &around, &mut |_, _| {}))
        });
        self.times.changed();
        resized
    }

    /// Copies the last cluster of the disk from the backing image if the disk ends inside it.
    /// Otherwise bytes of the backing image would show when the disk grows. The contents of the
    /// disk do not change. Blocks.
    ///
    /// # Errors
    /// `Io` if the cluster cannot be read or written.
    pub fn own_last_cluster(self: &Arc<Self>) -> Result<()> {
        self.backend().lives().map_err(|e| Error::io("the disk's server does not answer", e))?;
        self.own_cluster(self.size_bytes())
    }

    /// Copies the cluster around `end` from the backing image.
    fn own_cluster(self: &Arc<Self>, end: u64) -> Result<()> {
        let backend = self.backend();
        let Backend::Qcow2(image) = &backend else { return Ok(()) };
        if image.backing_bytes().is_none() || end.is_multiple_of(image.cluster_bytes()) {
            return Ok(());
        }
        // A write of the last sector copies the cluster; with extended L2 entries, the subcluster.
        self.rewrite(end - SECTOR_BYTES, SECTOR_BYTES)
            .map_err(|e| Error::io("the disk's last cluster cannot be copied from the image below", e))
    }

    /// Prepares a qcow2 disk for users of a mount that change its size. The image is closed for
    /// that; see [`replace`](Self::replace). It gets a larger L1 table, so that later growth is one
    /// write of the header. Other disks need no preparation.
    ///
    /// # Errors
    /// Those of the change, for an image with a data file or with a backing image that is
    /// too large; those of [`replace`](Self::replace).
    pub fn make_growable(self: &Arc<Self>, now: &DiskSpec) -> Result<()> {
        if !self.is_qcow2() {
            return Ok(());
        }
        self.growable.store(true, Ordering::Relaxed);
        let room = |image: &mut Image<'_>, closed: &Closed| {
            Ok(qcow2::resize::make_room(image, closed.backing_bytes))
        };
        self.offline_owned(now, self.size_bytes(), room)
            .inspect_err(|_| self.growable.store(false, Ordering::Relaxed))
    }

    /// Takes an internal snapshot.
    ///
    /// # Errors
    /// `Exists` if there is a snapshot of that name; those of the change, which leave the
    /// image unchanged; those of [`replace`](Self::replace).
    pub fn save_snapshot(&self, now: &DiskSpec, name: &str) -> Result<()> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = (u32::try_from(time.as_secs()).unwrap_or(u32::MAX), time.subsec_nanos());
        self.offline(now, |image, _| {
            if list(now, image)?.iter().any(|s| s.name == name) {
                return Err(Error::exists(format!("{} has a snapshot {name} already", shown(now))));
            }
            snapshot::create(image, name, time).map(drop).map_err(|e| wrong(now, &e))
        })
    }

    /// Deletes an internal snapshot by its id, its name or both, and returns it.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Invalid` if several match; the image is unchanged
    /// then. Those of [`replace`](Self::replace).
    pub fn delete_snapshot(
        &self,
        now: &DiskSpec,
        id: Option<&str>,
        name: Option<&str>,
    ) -> Result<SnapshotInfo> {
        self.offline(now, |image, _| {
            let all = list(now, image)?;
            let of = |s: &&SnapshotInfo| id.is_none_or(|id| s.id == id) && name.is_none_or(|name| s.name == name);
            let mut found = all.iter().filter(of);
            let shown = shown(now);
            let (first, more) = (found.next(), found.next());
            let which = name.or(id).unwrap_or_default();
            let Some(saved) = first else {
                return Err(Error::not_found(format!(
                    "{shown} has no snapshot {which}; 'vshunt image snapshot -l -U {shown}' shows those that are there"
                )));
            };
            if more.is_some() {
                return Err(Error::invalid(format!("{shown} has several snapshots {which}: give its id, too")));
            }
            // It is deleted by its id, unless that is also the name of another snapshot.
            if all.iter().filter(|s| s.id == saved.id || s.name == saved.id).count() > 1 {
                return Err(Error::invalid(format!(
                    "{shown} has several snapshots that could be meant by id {}: end the daemon, and use 'vshunt image \
                     snapshot -d'",
                    saved.id
                )));
            }
            snapshot::delete(image, &saved.id).map_err(|e| wrong(now, &e))?;
            Ok(saved.clone())
        })
    }

    /// Calls `change` with the closed image. If it fails with [`qcow2::Error::LastClusterBelow`],
    /// copies the cluster around `end` from the backing image and calls it again. A refused change
    /// writes nothing.
    fn offline_owned(
        self: &Arc<Self>,
        now: &DiskSpec,
        end: u64,
        change: impl Fn(&mut Image<'_>, &Closed) -> Result<qcow2::Result<()>>,
    ) -> Result<()> {
        let attempt = |last: bool| {
            self.offline(now, |image, closed| match change(image, closed)? {
                Err(qcow2::Error::LastClusterBelow(_)) if !last => Ok(false),
                done => done.map(|()| true).map_err(|e| wrong(now, &e)),
            })
        };
        if !attempt(false)? {
            self.own_cluster(end)?;
            attempt(true)?;
        }
        Ok(())
    }

    /// Checks the image and calls `change` while it is closed.
    fn offline<R>(
        &self,
        now: &DiskSpec,
        change: impl FnOnce(&mut Image<'_>, &Closed) -> Result<R>,
    ) -> Result<R> {
        if !self.is_qcow2() || self.readonly {
            let what = match self.readonly {
                true => "is open with readonly=on, and cannot be changed",
                false => {
                    "is no qcow2 image, which this needs; 'vshunt snapshot --to' and 'vshunt resize' work for raw ones"
                }
            };
            return Err(Error::invalid(format!("disk {} {what}", now.name)));
        }
        let mut done = None;
        self.replace(now, now, &[], |closed| {
            let file = closed.file(0)?;
            let found = check(&*file, Repair::No, &mut Quiet).map_err(|e| wrong(now, &e))?;
            if found.corruptions > 0 || found.check_errors > 0 {
                return Err(Error::invalid(format!(
                    "{} has errors and stays as it is: end the daemon, and repair it by '{}'",
                    shown(now),
                    repair_command(Path::new(&now.image()), now.uri.is_some(), "all")
                )));
            }
            let mut image = Image::open(&*file).map_err(|e| wrong(now, &e))?;
            if image.header().is_open() {
                return Err(Error::busy(format!(
                    "{} could not be closed, and stays as it is; try again",
                    shown(now)
                )));
            }
            done = Some(change(&mut image, closed)?);
            Ok(())
        })?;
        Ok(done.expect("`replace` succeeded, so it was set"))
    }
}

fn list(now: &DiskSpec, image: &Image<'_>) -> Result<Vec<SnapshotInfo>> {
    let (list, _) = read_table(image).map_err(|e| wrong(now, &e))?;
    Ok(list.iter().map(SnapshotInfo::from).collect())
}

fn wrong(spec: &DiskSpec, e: &qcow2::Error) -> Error {
    Error::invalid(format!("{}: {e}", shown(spec)))
}
