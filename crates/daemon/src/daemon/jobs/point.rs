//! The point in time of a backup, and the dirty bitmaps that jobs restart.

use std::sync::Arc;
use std::time::Instant;

use vshunt_block::{Bitmap, Bits, CopyBeforeWrite, Disk};
use vshunt_engine::DRAIN_LIMIT;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::BackupSpec;

use crate::daemon::Daemon;
use crate::daemon::bitmaps::{check_new, persistent};
use crate::disk_entry::DiskEntry;
use crate::drained::drained_until;

/// log2 of the size of a block. Blocks are small, so that a small write causes a small copy. Large
/// disks have larger blocks.
const BLOCK_SHIFT: u32 = 12;
const BLOCKS_MAX: u64 = 1 << 26;
/// log2 of the size of a block for a compressed image: a cluster.
pub(super) const CLUSTER_SHIFT: u32 = 16;

/// A bitmap that a backup or a mirror restarts.
pub(super) struct StartedBitmap {
    pub(super) bitmap: Arc<Bitmap>,
    /// Its bits before, which are restored if the backup fails. None: the bitmap was made for this
    /// backup.
    pub(super) old: Option<Arc<Bits>>,
    /// Whether it recorded, and whether there was a gap in its recording.
    before: (bool, bool),
}

/// The point in time of a backup, before it is frozen.
pub(super) struct Point {
    pub(super) work: Arc<CopyBeforeWrite>,
    pub(super) fleece: Option<Arc<Disk>>,
}

impl Point {
    /// Makes the maps of a backup of `entry`.
    ///
    /// # Errors
    /// There is no memory, or no eventfd.
    pub(super) fn new(spec: &BackupSpec, entry: &DiskEntry, fleece: Option<&Arc<Disk>>) -> Result<Self> {
        let todo = Bits::new(entry.disk.size_bytes(), shift(spec, &entry.disk));
        let todo = todo.ok_or_else(|| {
            Error::limit(format!("no memory for the map of what is copied of disk {}", spec.disk))
        })?;
        let work = CopyBeforeWrite::new(todo).and_then(|work| match fleece {
            Some(_) => work.fleeced(),
            None => Ok(work),
        });
        let work = Arc::new(work.map_err(|e| Error::io("a job cannot be set up", e))?);
        Ok(Self { work, fleece: fleece.cloned() })
    }
}

/// Releases the disk. If the backup failed, its bitmap is restored.
pub(super) fn release_source(
    daemon: &Daemon,
    entry: &Arc<DiskEntry>,
    started: Option<StartedBitmap>,
    good: bool,
) {
    let _op = entry.op_lock();
    restore_bitmap(entry, started, good);
    entry.watched.release();
    entry.disk.set_fleece(None);
    let exports = daemon.state().exports_of(entry).unwrap_or_default();
    // Also queues of read-only exports have the fleecing file open.
    let exports: Vec<_> = exports.into_iter().filter(|e| !e.is_kernel()).collect();
    if let Err(e) = drained_until(&exports, Instant::now() + DRAIN_LIMIT, &mut || entry.watch()) {
        // The queues that are there keep their observers: each of their writes still costs a
        // check. Others do not get any.
        entry.watch();
        tracing::warn!("{e}");
    }
}

/// Releases the bitmap of a job. If the job is not `good`, it is as if that had never begun.
pub(super) fn restore_bitmap(entry: &DiskEntry, started: Option<StartedBitmap>, good: bool) {
    let Some(StartedBitmap { bitmap, old, before }) = started else { return };
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

/// Checks that a bitmap says what changed. `full`: the job that restarts it.
pub(super) fn check_complete(entry: &DiskEntry, name: &str, full: &str) -> Result<()> {
    let bitmap = entry.watched.bitmap(&entry.name, name)?;
    let state = bitmap.state();
    if state.recording && !state.gap {
        return Ok(());
    }
    let does = if state.recording { "did not record writes for a while" } else { "does not record writes" };
    Err(Error::invalid(format!(
        "bitmap {name} {does}, so it does not say what changed: restart it with a full {full} (--bitmap {name})"
    )))
}

/// Restarts a bitmap. It has to exist if it is `incremental`. Called while no write is in flight.
pub(super) fn start_bitmap(
    entry: &Arc<DiskEntry>,
    bitmap: Option<&str>,
    incremental: Option<&str>,
    job: &str,
) -> Result<Option<StartedBitmap>> {
    let Some(name) = incremental.or(bitmap) else { return Ok(None) };
    let there = entry.watched.bitmap(&entry.name, name);
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
        Err(e) if incremental.is_some() => return Err(e),
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
fn shift(spec: &BackupSpec, disk: &Disk) -> u32 {
    if spec.compress {
        return CLUSTER_SHIFT;
    }
    let mut shift = BLOCK_SHIFT;
    while disk.size_bytes() >> shift > BLOCKS_MAX || disk.alignment() >> shift > 1 {
        shift += 1;
    }
    shift
}
