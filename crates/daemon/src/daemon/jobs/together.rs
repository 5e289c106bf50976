//! What happens to several disks at one point in time: backups, and changes of dirty bitmaps.
//!
//! All is prepared first. Then the writing exports of all these disks are drained, and each action
//! is done, or none.

use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use vshunt_block::{Bitmap, Bits};
use vshunt_engine::DRAIN_LIMIT;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{BackupSpec, BitmapSpec};

use super::SourceClaim;
use super::backup::Prepared;
use super::point::{CLUSTER_SHIFT, StartedBitmap};
use crate::daemon::Daemon;
use crate::daemon::bitmaps::{AddedBitmap, GRANULARITY, check_changeable, new_bitmap, writer};
use crate::disk_entry::DiskEntry;
use crate::drained::drained_until;

/// What is done to a disk at a point in time.
#[derive(Clone, Debug)]
pub enum PointAction {
    /// A backup begins.
    Backup {
        /// The backup.
        spec: BackupSpec,
        /// Whether its job leaves the list when it ends.
        auto_dismiss: bool,
    },
    /// A dirty bitmap is added.
    BitmapAdd(BitmapSpec),
    /// A dirty bitmap is cleared.
    BitmapClear {
        /// The name of the disk.
        disk: String,
        /// The name of the bitmap.
        name: String,
    },
}

impl PointAction {
    fn disk(&self) -> &str {
        match self {
            Self::Backup { spec, .. } => &spec.disk,
            Self::BitmapAdd(spec) => &spec.disk,
            Self::BitmapClear { disk, .. } => disk,
        }
    }

    /// Returns the bitmap that it adds, unless there is one of that name.
    fn added_bitmap(&self) -> Option<AddedBitmap<'_>> {
        match self {
            Self::Backup { spec, .. } => spec.bitmap.as_deref().map(|name| AddedBitmap {
                name,
                granularity: 1 << CLUSTER_SHIFT,
                persistent: None,
            }),
            Self::BitmapAdd(spec) => Some(AddedBitmap {
                name: &spec.name,
                granularity: spec.granularity.unwrap_or(GRANULARITY),
                persistent: spec.persistent,
            }),
            Self::BitmapClear { .. } => None,
        }
    }
}

/// An action that is prepared, with its disk.
enum Ready<'a> {
    Backup(Box<Prepared>),
    BitmapAdd(&'a Arc<DiskEntry>, &'a BitmapSpec),
    BitmapClear(&'a Arc<DiskEntry>, &'a str),
}

/// An action that was done, with what undoes it.
enum Done {
    Backup(Option<StartedBitmap>),
    BitmapAdd(Arc<Bitmap>),
    /// Its bits before, and whether there was a gap in its recording.
    BitmapClear(Arc<Bitmap>, Arc<Bits>, bool),
}

impl Ready<'_> {
    /// Does the action. No write of its disk is in flight.
    fn act(&self) -> Result<Done> {
        match self {
            Self::Backup(prepared) => prepared.freeze().map(Done::Backup),
            Self::BitmapAdd(entry, spec) => {
                let bitmap = new_bitmap(entry, spec)?;
                entry.watch();
                Ok(Done::BitmapAdd(bitmap))
            }
            Self::BitmapClear(entry, name) => {
                let bitmap = entry.watched.free_bitmap(&entry.name, name)?;
                let old = bitmap.take()?;
                let mut state = bitmap.state();
                let gap = state.gap;
                state.gap = !state.recording;
                drop(state);
                entry.watch();
                Ok(Done::BitmapClear(bitmap, old, gap))
            }
        }
    }

    /// Undoes the action. Still no write is in flight.
    fn undo(&self, done: Done) {
        match (self, done) {
            (Self::Backup(prepared), Done::Backup(started)) => prepared.thaw(started),
            (Self::BitmapAdd(entry, _), Done::BitmapAdd(bitmap)) => {
                entry.watched.state().bitmaps.retain(|b| !Arc::ptr_eq(b, &bitmap));
                entry.watch();
            }
            (_, Done::BitmapClear(bitmap, old, gap)) => {
                let mut state = bitmap.state();
                state.bits.add(&old);
                state.gap = gap;
            }
            _ => unreachable!("what was done is of the same kind"),
        }
    }

    fn prepared(&self) -> Option<&Prepared> {
        match self {
            Self::Backup(prepared) => Some(prepared),
            Self::BitmapAdd(..) | Self::BitmapClear(..) => None,
        }
    }
}

/// Does all actions, or none.
fn act(all: &[Ready<'_>]) -> Result<Vec<Done>> {
    let mut done = Vec::new();
    for ready in all {
        match ready.act() {
            Ok(this) => done.push(this),
            Err(e) => {
                while let Some(this) = done.pop() {
                    all[done.len()].undo(this);
                }
                return Err(e);
            }
        }
    }
    Ok(done)
}

impl Daemon {
    /// Starts a backup, and returns the name of its job. The point in time is before the return.
    ///
    /// # Errors
    /// The request is wrong, or the target cannot be used.
    pub fn backup_start(&self, spec: &BackupSpec, auto_dismiss: bool) -> Result<String> {
        let names = self.point_in_time(&[PointAction::Backup { spec: spec.clone(), auto_dismiss }])?;
        Ok(names.into_iter().next().unwrap_or_default())
    }

    /// Does all that is asked for at one point in time, or nothing. Returns the names of the jobs
    /// of its backups, in their order.
    ///
    /// # Errors
    /// Those of the first action that is impossible, or a disk has two backups. Nothing is changed.
    pub fn point_in_time(&self, actions: &[PointAction]) -> Result<Vec<String>> {
        let mut disks: Vec<_> = actions.iter().map(PointAction::disk).collect();
        disks.sort_unstable();
        disks.dedup();
        let backups = |disk: &str| {
            actions.iter().filter(|a| matches!(a, PointAction::Backup { .. }) && a.disk() == disk).count()
        };
        if let Some(disk) = disks.iter().find(|disk| backups(disk) > 1) {
            return Err(Error::invalid(format!("disk {disk} has two backups; leave one out")));
        }
        let entries: Result<Vec<_>> = disks.iter().map(|disk| self.state().disk(disk)).collect();
        let entries = entries?;
        // Two calls lock common disks in the same order.
        let _ops: Vec<_> = entries.iter().map(|entry| entry.op_lock()).collect();
        let mut writers = Vec::new();
        for entry in &entries {
            let exports = self.state().exports_of(entry)?;
            writers.extend(writer(&exports, entry)?);
        }
        let mut all = Vec::new();
        let prepared = actions.iter().try_for_each(|action| {
            let entry = entries.iter().find(|entry| entry.name == action.disk()).expect("it was looked up");
            all.push(self.prepare_action(action, entry)?);
            Ok(())
        });
        let placed = prepared.and_then(|()| {
            entries.iter().try_for_each(|entry| {
                let of_disk = actions.iter().filter(|action| action.disk() == entry.name);
                let added: Vec<_> = of_disk.filter_map(PointAction::added_bitmap).collect();
                self.place_bitmaps(entry, &added)
            })
        });
        // From here on no disk of a job is removed.
        let claimed: Result<Vec<_>> = placed.and_then(|()| {
            let backups = all.iter().filter_map(Ready::prepared);
            backups.map(|prepared| self.claim_source(&prepared.entry, &prepared.job.id)).collect()
        });
        let frozen: Vec<_> = all.iter().filter_map(Ready::prepared).filter_map(Prepared::frozen).collect();
        let done = claimed.and_then(|claims| {
            // Exports of these disks wait for the point in time.
            let _ops: Vec<MutexGuard<'_, _>> = frozen.iter().map(|frozen| frozen.op_lock()).collect();
            let done = self.add_frozen(&frozen).and_then(|()| {
                let mut done = Ok(Vec::new());
                drained_until(&writers, Instant::now() + DRAIN_LIMIT, &mut || done = act(&all))?;
                done
            });
            let done = done.inspect_err(|_| self.remove_frozen(&frozen))?;
            claims.into_iter().for_each(SourceClaim::keep);
            Ok(done)
        });
        match done {
            Ok(done) => Ok(self.launch_all(all, done)),
            Err(e) => {
                all.into_iter().for_each(|ready| {
                    if let Ready::Backup(prepared) = ready {
                        self.withdraw_backup(*prepared);
                    }
                });
                Err(e)
            }
        }
    }

    fn add_frozen(&self, frozen: &[Arc<DiskEntry>]) -> Result<()> {
        for disk in frozen {
            let mut state = self.state();
            state.check_unnamed(&disk.name)?;
            state.disks.insert(disk.name.clone(), disk.clone());
        }
        Ok(())
    }

    fn remove_frozen(&self, frozen: &[Arc<DiskEntry>]) {
        for disk in frozen {
            let mut state = self.state();
            if state.disks.get(&disk.name).is_some_and(|there| Arc::ptr_eq(there, disk)) {
                state.disks.remove(&disk.name);
            }
        }
    }

    fn prepare_action<'a>(&self, action: &'a PointAction, entry: &'a Arc<DiskEntry>) -> Result<Ready<'a>> {
        match action {
            PointAction::Backup { spec, auto_dismiss } => {
                self.prepare_backup(spec, *auto_dismiss, entry).map(|p| Ready::Backup(Box::new(p)))
            }
            PointAction::BitmapAdd(spec) => {
                check_changeable(entry)?;
                Ok(Ready::BitmapAdd(entry, spec))
            }
            PointAction::BitmapClear { name, .. } => {
                check_changeable(entry)?;
                Ok(Ready::BitmapClear(entry, name))
            }
        }
    }

    /// Starts the jobs of backups that are frozen. Returns their names.
    fn launch_all(&self, all: Vec<Ready<'_>>, done: Vec<Done>) -> Vec<String> {
        let mut names = Vec::new();
        for pair in all.into_iter().zip(done) {
            if let (Ready::Backup(prepared), Done::Backup(started)) = pair {
                names.push(prepared.job.id.clone());
                self.launch_backup(*prepared, started);
            }
        }
        names
    }
}
