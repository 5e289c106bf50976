//! Dirty bitmaps: the blocks of a disk that were written since the bitmap was created.
//!
//! Control threads create and change them. Workers only set bits, through
//! [`WriteObservers`](super::WriteObservers).

use std::sync::{Arc, Mutex, MutexGuard};

use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

use super::bits::Bits;

/// A dirty bitmap.
pub struct Bitmap {
    /// The name, unique on its disk.
    pub name: String,
    /// Whether it is saved in the image (qcow2) when the disk is closed.
    pub persistent: bool,
    /// Whether its bits do not change any more.
    frozen: bool,
    /// Guards what control threads change.
    pub state: Mutex<BitmapState>,
}

/// The part of a bitmap that control threads change. Workers never see it.
pub struct BitmapState {
    /// The bits that writes set. Replaced while no request is in flight.
    pub bits: Arc<Bits>,
    /// Whether writes set them.
    pub recording: bool,
    /// Whether writes may be missing, because it did not record all the time.
    pub gap: bool,
    /// The job that uses it. Only that job may change it.
    pub job: Option<String>,
}

impl Bitmap {
    /// Creates a bitmap without dirty blocks. `granularity` is a power of two from 512 to 2 GiB,
    /// bytes.
    ///
    /// # Errors
    /// `Invalid` for another granularity; `Limit` if there is no memory.
    pub fn new(name: &str, size: u64, granularity: u64, persistent: bool) -> Result<Self> {
        if !granularity.is_power_of_two() || !(512..=1 << 31).contains(&granularity) {
            return Err(Error::invalid(format!(
                "bitmap {name}: a granularity of {granularity} bytes is not a power of two from 512 to 2G"
            )));
        }
        let bits = new_bits(name, size, granularity.trailing_zeros())?;
        let state = BitmapState { bits, recording: true, gap: false, job: None };
        Ok(Self { name: name.to_owned(), persistent, frozen: false, state: Mutex::new(state) })
    }

    /// Creates a bitmap from the bits in an image.
    pub(super) fn loaded(name: &str, bits: Bits, recording: bool) -> Self {
        let state = BitmapState { bits: Arc::new(bits), recording, gap: !recording, job: None };
        Self { name: name.to_owned(), persistent: true, frozen: false, state: Mutex::new(state) }
    }

    /// Creates a bitmap of bits that do not change any more, which `job` uses.
    pub fn frozen(name: &str, bits: Arc<Bits>, job: &str) -> Self {
        let state = BitmapState { bits, recording: false, gap: false, job: Some(job.to_owned()) };
        Self { name: name.to_owned(), persistent: false, frozen: true, state: Mutex::new(state) }
    }

    /// Returns the bits if they have all writes since the start of the bitmap. A job that restarts
    /// a bitmap has a part of them until it ends. A frozen one has those up to its time.
    pub fn complete_bits(&self) -> Option<Arc<Bits>> {
        let state = self.state();
        let complete = !state.gap && (self.frozen || (state.recording && state.job.is_none()));
        complete.then(|| state.bits.clone())
    }

    /// Locks the state. A holder only reads or replaces it.
    pub fn state(&self) -> MutexGuard<'_, BitmapState> {
        self.state.locked()
    }

    /// Changes the size to that of the disk. New blocks count as dirty. No request is in flight.
    ///
    /// # Errors
    /// `Limit` if there is no memory; the bitmap is unchanged then.
    pub fn resize(&self, size: u64) -> Result<()> {
        let mut state = self.state();
        let old = &state.bits;
        let new = new_bits(&self.name, size, old.granularity().trailing_zeros())?;
        new.add(old);
        new.set(new.blocks(old.size().min(size)..size));
        state.bits = new;
        Ok(())
    }

    /// Returns the bits and clears the bitmap. No request is in flight.
    ///
    /// # Errors
    /// `Limit` if there is no memory; the bitmap is unchanged then.
    pub fn take(&self) -> Result<Arc<Bits>> {
        let mut state = self.state();
        let old = &state.bits;
        let new = new_bits(&self.name, old.size(), old.granularity().trailing_zeros())?;
        Ok(std::mem::replace(&mut state.bits, new))
    }
}

fn new_bits(name: &str, size: u64, shift: u32) -> Result<Arc<Bits>> {
    let bits = Bits::new(size, shift)
        .ok_or_else(|| Error::limit(format!("no memory for bitmap {name}; give it a larger granularity")))?;
    Ok(Arc::new(bits))
}
