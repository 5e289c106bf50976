//! The observers of the writes of a disk: its dirty bitmaps, and its job.

use std::sync::{Arc, Mutex, MutexGuard};

use vshunt_block::{Bitmap, Bits, CopyAfterWrite, CopyBeforeWrite, Disk};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::BitmapInfo;
use vshunt_types::sync::Locked;

/// The observers of the writes of one disk. The lock is held for look-ups and changes only, and
/// taken after `op_lock` of the disk.
#[derive(Default)]
pub(super) struct Watched(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    pub(super) bitmaps: Vec<Arc<Bitmap>>,
    /// The job that reads the disk or writes to it.
    pub(super) job: Option<String>,
    /// Whether that job writes to the disk: then nothing else may use it.
    pub(super) is_target: bool,
    /// Whether that job ends by a command only.
    pub(super) is_pull: bool,
    /// Blocks that were written during a round of a commit or a mirror.
    pub(super) written: Option<Arc<Bits>>,
    /// Blocks that the job copies before they are overwritten.
    pub(super) before: Option<Arc<CopyBeforeWrite>>,
    /// The copy that writes wait for.
    pub(super) after: Option<Arc<CopyAfterWrite>>,
}

impl Watched {
    /// Makes the observers of a disk that was opened, with the bitmaps of its image.
    pub(super) fn of(disk: &Disk) -> Result<Self> {
        let state = State { bitmaps: disk.load_bitmaps()?, ..State::default() };
        Ok(Self(Mutex::new(state)))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
    }

    /// Returns the job that uses the disk.
    pub(super) fn job(&self) -> Option<String> {
        self.state().job.clone()
    }

    /// Checks that no job uses the disk of that name.
    pub(super) fn check_free(&self, disk: &str) -> Result<()> {
        self.state().check_free(disk)
    }

    /// Reserves the disk as the source of a job that is being started.
    pub(super) fn claim_source(&self, disk: &str, job: &str) -> Result<()> {
        let mut state = self.state();
        state.check_free(disk)?;
        state.job = Some(job.to_owned());
        Ok(())
    }

    /// Reserves the disk as the target of a job. Nothing else may use it.
    pub(super) fn claim_target(&self, disk: &str, job: &str) -> Result<()> {
        let mut state = self.state();
        state.check_free(disk)?;
        (state.job, state.is_target) = (Some(job.to_owned()), true);
        Ok(())
    }

    /// Checks that the disk may have an export: no job writes to it.
    pub(super) fn check_exportable(&self, disk: &str) -> Result<()> {
        let state = self.state();
        if state.is_target { state.check_free(disk) } else { Ok(()) }
    }

    /// Releases the disk at the end of a job.
    pub(super) fn release(&self) {
        let mut state = self.state();
        (state.job, state.is_target, state.is_pull) = (None, false, false);
        (state.before, state.after, state.written) = (None, None, None);
    }

    pub(super) fn bitmap_infos(&self) -> Vec<BitmapInfo> {
        let bitmaps = self.state().bitmaps.clone();
        let info = |bitmap: &Arc<Bitmap>| {
            let state = bitmap.state();
            let bits = &state.bits;
            BitmapInfo {
                name: bitmap.name.clone(),
                granularity: bits.granularity(),
                count: bits.count() * bits.granularity(),
                recording: state.recording,
                persistent: bitmap.persistent,
                busy: state.job.is_some(),
            }
        };
        bitmaps.iter().map(info).collect()
    }

    /// Returns a bitmap by its name.
    pub(super) fn bitmap(&self, disk: &str, name: &str) -> Result<Arc<Bitmap>> {
        self.state().bitmaps.iter().find(|b| b.name == name).cloned().ok_or_else(|| {
            Error::not_found(format!(
                "disk {disk} has no bitmap {name}; 'bitmap list {disk}' shows what it has"
            ))
        })
    }

    /// Returns a bitmap by its name, if no job uses it.
    pub(super) fn free_bitmap(&self, disk: &str, name: &str) -> Result<Arc<Bitmap>> {
        let bitmap = self.bitmap(disk, name)?;
        let job = bitmap.state().job.clone();
        match job {
            Some(job) => Err(Error::busy(format!("bitmap {name} is in use by job {job}"))),
            None => Ok(bitmap),
        }
    }
}

impl State {
    fn check_free(&self, disk: &str) -> Result<()> {
        let Some(job) = &self.job else { return Ok(()) };
        let remedy = if self.is_pull { "complete it" } else { "wait for it" };
        Err(Error::busy(format!("disk {disk} is in use by job {job}; {remedy}, or cancel it")))
    }
}
