//! Changes of a qcow2 image that need it closed: another size, internal snapshots. The disk's exports stay, and pause.
//!
//! Called as [`replace`](super::replace) has it. The image is checked first, since an offline change writes to what the
//! counts call free; so the pause grows with the image's tables (some 2 MiB for each 16 GiB in use).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use qcow2::check::{Quiet, Repair, check};
use qcow2::create::Preallocation;
use qcow2::resize::Around;
use qcow2::snapshot::{self, Snapshot, read_table};
use qcow2::{Image, Storage};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::DiskSpec;

use super::replace::{Closed, shown};
use super::{Disk, Kind, SECTOR_BYTES};

/// An internal snapshot, as QEMU's SnapshotInfo has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Unique in its image.
    pub id: String,
    /// As the user named it.
    pub name: String,
    /// When it was taken, seconds since 1970.
    pub date_s: u32,
    /// And nanoseconds.
    pub date_ns: u32,
    /// Bytes of a saved VM, for snapshots that QEMU took of a running one.
    pub vm_state_bytes: u64,
    /// For how long the guest had been running, nanoseconds.
    pub vm_clock_ns: u64,
}

impl From<&Snapshot> for Saved {
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
    /// Whether its image is qcow2.
    pub fn is_qcow2(&self) -> bool {
        matches!(&*self.kind(), Kind::Qcow2(_))
    }

    /// [`resize`](Self::resize) of a qcow2 disk, closed for it; see [`replace`](Self::replace). A disk that can grow while it is
    /// served still can afterwards.
    ///
    /// # Errors
    /// Those of the change, which leave the image as it was, and of [`replace`](Self::replace).
    pub fn resize_closed(self: &Arc<Self>, now: &DiskSpec, size_bytes: u64) -> Result<()> {
        Self::check_size(size_bytes)?;
        self.offline_owned(now, self.size_bytes().min(size_bytes), |image, closed| {
            if self.grows() {
                return Ok(qcow2::resize::resize_with_room(image, size_bytes, closed.below));
            }
            let data = match image.header().data_file {
                Some(_) => Some(closed.file(1)?),
                None => None,
            };
            let data = data.as_ref().map(|d| d as &dyn Storage);
            let around = Around { data, below: closed.below, preallocation: Preallocation::Off };
            Ok(qcow2::resize::resize(image, size_bytes, &around, &mut |_, _| {}))
        })
    }

    /// Copies the disk's last cluster up from the image below, where the disk ends within it: only then can the rest of the
    /// cluster be hidden when the disk grows. The disk's contents stay as they are. Blocks.
    ///
    /// # Errors
    /// The cluster cannot be read or written.
    pub fn own_last_cluster(self: &Arc<Self>) -> Result<()> {
        self.own_cluster(self.size_bytes())
    }

    /// The same for the cluster that `end` lies in.
    fn own_cluster(self: &Arc<Self>, end: u64) -> Result<()> {
        let kind = self.kind();
        let Kind::Qcow2(image) = &*kind else { return Ok(()) };
        if image.below().is_none() || end.is_multiple_of(image.cluster_bytes()) {
            return Ok(());
        }
        // A write of its last sector copies the cluster, or with extended L2 entries the subcluster.
        self.rewrite(end - SECTOR_BYTES, SECTOR_BYTES)
            .map_err(|e| Error::io("the disk's last cluster cannot be copied from the image below", e))
    }

    /// Lets the users of a mount change the size of a qcow2 disk, closed for it; see [`replace`](Self::replace). Its image
    /// gets an L1 table with room, so that to grow later is one write of its header. For all other disks there is nothing to
    /// do.
    ///
    /// # Errors
    /// An image with a data file, or that stands on one too large; those of [`replace`](Self::replace).
    pub fn make_growable(self: &Arc<Self>, now: &DiskSpec) -> Result<()> {
        if !self.is_qcow2() {
            return Ok(());
        }
        self.grows.store(true, Ordering::Relaxed);
        let room = |image: &mut Image<'_>, closed: &Closed| Ok(qcow2::resize::make_room(image, closed.below));
        self.offline_owned(now, self.size_bytes(), room)
            .inspect_err(|_| self.grows.store(false, Ordering::Relaxed))
    }

    /// Takes an internal snapshot.
    ///
    /// # Errors
    /// There is one of that name, or the image can have none; the image is as it was then. Those of
    /// [`replace`](Self::replace).
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

    /// Deletes the internal snapshot with that id and that name, as far as they are given.
    ///
    /// # Errors
    /// There is none, or several have that name; the image is as it was then. Those of [`replace`](Self::replace).
    pub fn delete_snapshot(&self, now: &DiskSpec, id: Option<&str>, name: Option<&str>) -> Result<Saved> {
        self.offline(now, |image, _| {
            let all = list(now, image)?;
            let of = |s: &&Saved| id.is_none_or(|id| s.id == id) && name.is_none_or(|name| s.name == name);
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
            // By its id, unless that is another's name.
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

    /// Has `change` done to the image while it is closed. If nothing but [`qcow2::Error::LastClusterBelow`] is in the way of
    /// it, the cluster that `end` lies in is copied up, and it is done then: what is refused writes nothing.
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

    /// Has `change` done to the image while it is closed.
    fn offline<R>(
        &self,
        now: &DiskSpec,
        change: impl FnOnce(&mut Image<'_>, &Closed) -> Result<R>,
    ) -> Result<R> {
        if !self.is_qcow2() || self.readonly {
            let what = if self.readonly { "is open with readonly=on" } else { "is no qcow2 image" };
            return Err(Error::invalid(format!("disk {} {what}, and cannot be changed so", now.name)));
        }
        let mut done = None;
        self.replace(now, now, &[], |closed| {
            let file = closed.file(0)?;
            let found = check(&file, Repair::No, &mut Quiet).map_err(|e| wrong(now, &e))?;
            if found.corruptions > 0 || found.check_errors > 0 {
                return Err(Error::invalid(format!(
                    "{} has errors and stays as it is: end the daemon, and 'vshunt image check -r all' it",
                    shown(now)
                )));
            }
            let mut image = Image::open(&file).map_err(|e| wrong(now, &e))?;
            if image.header().is_open() {
                return Err(Error::busy(format!(
                    "{} could not be closed, and stays as it is; try again",
                    shown(now)
                )));
            }
            done = Some(change(&mut image, closed)?);
            Ok(())
        })?;
        Ok(done.expect("set where nothing failed"))
    }
}

fn list(now: &DiskSpec, image: &Image<'_>) -> Result<Vec<Saved>> {
    let (list, _) = read_table(image).map_err(|e| wrong(now, &e))?;
    Ok(list.iter().map(Saved::from).collect())
}

fn wrong(spec: &DiskSpec, e: &qcow2::Error) -> Error {
    Error::invalid(format!("{}: {e}", shown(spec)))
}
