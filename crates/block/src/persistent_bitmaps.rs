//! Persistent dirty bitmaps: they are loaded from the image when the disk is opened, and saved when
//! it is closed.

use std::sync::Arc;

use qcow2::bitmap::{self, Loaded};
use vshunt_types::error::{Error, Result};

use super::bits::Bits;
use super::dirty_bitmap::Bitmap;
use super::disk::Disk;

impl Disk {
    /// Loads the bitmaps of the image. The caller records every write in them, from the first one
    /// on.
    ///
    /// # Errors
    /// `Limit` if there is no memory.
    pub fn load_bitmaps(&self) -> Result<Vec<Arc<Bitmap>>> {
        let load = |loaded: Loaded| {
            let bits =
                Bits::from_bytes(loaded.bits.size(), loaded.bits.granularity_bits(), loaded.bits.bytes());
            let bits = bits.ok_or_else(|| Error::limit(format!("no memory for bitmap {}", loaded.name)))?;
            Ok(Arc::new(Bitmap::loaded(&loaded.name, bits, loaded.enabled)))
        };
        self.take_bitmaps().into_iter().map(load).collect()
    }

    /// Saves the persistent ones of these bitmaps when the image is closed. Called after the last
    /// write.
    pub fn save_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) {
        let kept = bitmaps.iter().filter(|b| b.persistent).filter_map(|b| {
            let state = b.state();
            let (size, bits) = (state.bits.size(), &state.bits);
            let shift = bits.granularity().trailing_zeros();
            match bitmap::Bits::of(size, shift, bits.to_bytes()) {
                Ok(bits) => Some(Loaded {
                    name: b.name.clone(),
                    bits,
                    enabled: state.recording,
                    inconsistent: false,
                    // A bitmap that does not record is known to lack later writes.
                    missed: state.gap && state.recording,
                }),
                Err(e) => {
                    // Without the bitmap, no bitmap of that name lacks a block that was written.
                    tracing::error!("bitmap {} is lost: {e}", b.name);
                    None
                }
            }
        });
        self.put_bitmaps(kept.collect());
    }
}
