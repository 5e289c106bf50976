//! One disk of the daemon, with its description and what watches its writes.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vshunt_block::{Bitmap, Disk, WriteObservers};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::DiskSpec;
use vshunt_types::sync::Locked;

use crate::watched::Watched;

/// How long somebody is waited for whose use of a disk's image by the kernel is about to end.
const RETURN_PATIENCE: Duration = Duration::from_millis(500);

/// A disk of the daemon.
pub(super) struct DiskEntry {
    pub(super) name: String,
    /// As it is now: a snapshot gives a disk another file. Guards it alone; held for a look.
    spec: Mutex<DiskSpec>,
    pub(super) disk: Arc<Disk>,
    /// Held over a resize or snapshot, and while an export is made: these come one at a time, and
    /// each knows all exports.
    turn: Mutex<()>,
    /// What watches its writes.
    pub(super) watched: Watched,
}

impl DiskEntry {
    pub(super) fn new(spec: DiskSpec, disk: Arc<Disk>, watched: Watched) -> Self {
        Self { name: spec.name.clone(), spec: Mutex::new(spec), disk, turn: Mutex::default(), watched }
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.locked()
    }

    /// Whether all writers of the image come by us, but for exports that are there. With its turn
    /// held; waits for a moment for who is about to end.
    pub(super) fn check_returned(&self) -> Result<()> {
        let begin = Instant::now();
        while self.disk.passthrough_in_use() {
            if begin.elapsed() > RETURN_PATIENCE {
                return Err(Error::busy(format!(
                    "the image of disk {} is still written by the kernel, for those who have the file of a former mount \
                     open: an export with passthrough was taken from them by force; end them",
                    self.name
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// What the disk is now.
    pub(super) fn spec(&self) -> DiskSpec {
        self.spec.locked().clone()
    }

    /// It is another now; with its turn held.
    pub(super) fn set_spec(&self, spec: DiskSpec) {
        *self.spec.locked() = spec;
    }

    /// Has handles that are made from now on do what is to be done. With nothing in flight.
    pub(super) fn watch(&self) {
        let state = self.watched.state();
        let recording = |b: &Arc<Bitmap>| {
            let state = b.state();
            state.recording.then(|| state.bits.clone())
        };
        let dirty = state.bitmaps.iter().filter_map(recording).chain(state.committing.clone()).collect();
        self.disk.set_write_observers(WriteObservers { dirty, copy_before_write: state.before.clone() });
    }

    /// Calls `f`, which may close the disk's image and open it or another one, with what belongs in
    /// the image kept there meanwhile. With nothing in flight.
    pub(super) fn with_bitmaps_kept<R>(&self, f: impl FnOnce() -> R) -> R {
        self.disk.save_bitmaps(&self.watched.state().bitmaps);
        let result = f();
        // Ours are the same, and go on being set.
        drop(self.disk.take_bitmaps());
        result
    }

    /// Gives a disk another size, and its bitmaps with it. With nothing in flight.
    pub(super) fn resize_watched(&self, size_bytes: u64, resize: impl FnOnce() -> Result<()>) -> Result<()> {
        let bitmaps = self.watched.state().bitmaps.clone();
        let old = self.disk.size_bytes();
        let resized = bitmaps.iter().try_for_each(|b| b.resize(size_bytes));
        let resized = resized.and_then(|()| resize());
        if resized.is_err() {
            // What a bitmap was cut by counts as dirty then.
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
        // No export is left, and no job.
        self.disk.save_bitmaps(&self.watched.state().bitmaps);
    }
}
