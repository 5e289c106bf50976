//! A disk of the daemon, with its description and the observers of its writes.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use vshunt_block::{Bitmap, Disk, WriteObservers};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::DiskSpec;
use vshunt_types::sync::Locked;

use crate::watched::Watched;

/// How long to wait for an end of a use of the image by the kernel that is ending already.
const RETURN_PATIENCE: Duration = Duration::from_millis(500);

/// A disk of the daemon.
pub(super) struct DiskEntry {
    pub(super) name: String,
    /// The current description. A snapshot changes the file of a disk. Guards itself alone; held
    /// for a read or a change.
    spec: Mutex<DiskSpec>,
    pub(super) disk: Arc<Disk>,
    /// Held during a resize or a snapshot, and while an export is made. So these operations run one
    /// after the other, and each knows all exports.
    op_lock: Mutex<()>,
    /// The observers of its writes.
    pub(super) watched: Watched,
}

impl DiskEntry {
    pub(super) fn new(spec: DiskSpec, disk: Arc<Disk>, watched: Watched) -> Self {
        Self { name: spec.name.clone(), spec: Mutex::new(spec), disk, op_lock: Mutex::default(), watched }
    }

    pub(super) fn op_lock(&self) -> MutexGuard<'_, ()> {
        self.op_lock.locked()
    }

    /// Returns the lock if nobody has it.
    pub(super) fn try_op_lock(&self) -> Option<MutexGuard<'_, ()>> {
        match self.op_lock.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Checks that all writes to the image pass through this process, except those of current
    /// exports. The caller holds `op_lock`. Waits a moment for a use that is ending.
    pub(super) fn check_returned(&self) -> Result<()> {
        let begin = Instant::now();
        while self.disk.passthrough_in_use() {
            if begin.elapsed() > RETURN_PATIENCE {
                return Err(Error::busy(format!(
                    "the kernel still writes the image of disk {} for processes that have the file of a former mount open: \
                     an export with passthrough was removed by force; end these processes",
                    self.name
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the current description.
    pub(super) fn spec(&self) -> DiskSpec {
        self.spec.locked().clone()
    }

    /// Changes the description. The caller holds `op_lock`.
    pub(super) fn set_spec(&self, spec: DiskSpec) {
        *self.spec.locked() = spec;
    }

    /// Sets the observers for handles that are made from now on. Called while nothing is in flight.
    pub(super) fn watch(&self) {
        let state = self.watched.state();
        let recording = |b: &Arc<Bitmap>| {
            let state = b.state();
            state.recording.then(|| state.bits.clone())
        };
        let dirty = state.bitmaps.iter().filter_map(recording).chain(state.written.clone()).collect();
        self.disk.set_write_observers(WriteObservers {
            dirty,
            copy_before_write: state.before.clone(),
            copy_after_write: state.after.clone(),
        });
    }

    /// Calls `f`, which may close the image of the disk and open it or another one. Meanwhile the
    /// bitmaps are stored in the image. Called while nothing is in flight.
    pub(super) fn with_bitmaps_kept<R>(&self, f: impl FnOnce() -> R) -> R {
        self.disk.save_bitmaps(&self.watched.state().bitmaps);
        let result = f();
        // The bitmaps of the entry are the same ones, and stay in use.
        drop(self.disk.take_bitmaps());
        result
    }

    /// Resizes a disk together with its bitmaps. Called while nothing is in flight.
    pub(super) fn resize_watched(&self, size_bytes: u64, resize: impl FnOnce() -> Result<()>) -> Result<()> {
        let bitmaps = self.watched.state().bitmaps.clone();
        let old = self.disk.size_bytes();
        let resized = bitmaps.iter().try_for_each(|b| b.resize(size_bytes));
        let resized = resized.and_then(|()| resize());
        if resized.is_err() {
            // Blocks that a bitmap had lost count as dirty afterwards.
            let back = bitmaps.iter().try_for_each(|b| b.resize(old));
            self.watch();
            return resized.and(back);
        }
        self.watch();
        resized
    }
}

impl Drop for DiskEntry {
    fn drop(&mut self) {
        // There is no export any more, and no job.
        self.disk.save_bitmaps(&self.watched.state().bitmaps);
    }
}
