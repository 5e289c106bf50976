//! What is done beside each write to a disk: dirty bitmaps take note of it, and a backup has what it replaces read before.
//!
//! Control puts a [`Watch`] in place while nothing is in flight; handles take it when they are made.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_types::error::{Error, Result};

use super::bits::Bits;
use super::copy_before_write::CopyBeforeWrite;

/// A dirty bitmap: which blocks were written since it was begun.
pub struct Bitmap {
    /// Its name, unique on its disk.
    pub name: String,
    /// It is kept in the image (qcow2) when the disk is closed.
    pub persistent: bool,
    /// What control changes of it.
    pub state: Mutex<BitmapState>,
}

/// What control changes of a bitmap, under its lock; workers never see it.
pub struct BitmapState {
    /// The bits that writes set. Replaced with nothing in flight.
    pub bits: Arc<Bits>,
    /// Whether writes set them.
    pub recording: bool,
    /// Writes may have been missed since it was begun, for it did not record all the time.
    pub gap: bool,
    /// The job that uses it; nobody else may then change it.
    pub job: Option<String>,
}

impl Bitmap {
    /// A new one, with no block dirty. `granularity` is in bytes, a power of two in 512..=2 GiB.
    ///
    /// # Errors
    /// `Invalid` for another granularity, `Limit` without memory.
    pub fn new(name: &str, size: u64, granularity: u64, persistent: bool) -> Result<Self> {
        if !granularity.is_power_of_two() || !(512..=1 << 31).contains(&granularity) {
            return Err(Error::invalid(format!(
                "bitmap {name}: a granularity of {granularity} bytes is not a power of two from 512 to 2G"
            )));
        }
        let bits = new_bits(name, size, granularity.trailing_zeros())?;
        let state = BitmapState { bits, recording: true, gap: false, job: None };
        Ok(Self { name: name.to_owned(), persistent, state: Mutex::new(state) })
    }

    /// One that was kept in the image.
    pub(super) fn kept(name: &str, bits: Bits, recording: bool) -> Self {
        let state = BitmapState { bits: Arc::new(bits), recording, gap: !recording, job: None };
        Self { name: name.to_owned(), persistent: true, state: Mutex::new(state) }
    }

    /// Its state; no holder does more than look or replace.
    pub fn state(&self) -> std::sync::MutexGuard<'_, BitmapState> {
        self.state.locked()
    }

    /// Makes it one for a disk of another size: what the disk grew by counts as dirty. With nothing in flight.
    ///
    /// # Errors
    /// `Limit` without memory; it is as before then.
    pub fn resize(&self, size: u64) -> Result<()> {
        let mut state = self.state();
        let old = &state.bits;
        let new = new_bits(&self.name, size, old.granularity().trailing_zeros())?;
        new.add(old);
        new.set(new.blocks(old.size().min(size)..size));
        state.bits = new;
        Ok(())
    }

    /// Its bits, and none set in it from now on. With nothing in flight.
    ///
    /// # Errors
    /// `Limit` without memory; it is as before then.
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

/// What a handle has to do with each write.
#[derive(Clone, Default)]
pub struct Watch {
    /// Bits to set.
    pub dirty: Vec<Arc<Bits>>,
    /// A backup that wants what is replaced.
    pub before: Option<Arc<CopyBeforeWrite>>,
}

impl Watch {
    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.dirty.is_empty() && self.before.is_none()
    }

    /// Takes note of a write, before it is begun: what is dirty may be clean, never the other way.
    #[inline]
    pub fn note(&self, range: Range<u64>) {
        for bits in &self.dirty {
            bits.set(bits.blocks(range.clone()));
        }
    }
}
