//! Dirty bitmaps that are kept in the image: from there when the disk is opened, back when it is closed.

use std::sync::Arc;

use qcow2::bitmap::{self, Loaded};
use vshunt_types::error::{Error, Result};

use super::bits::Bits;
use super::{Bitmap, Disk};

impl Disk {
    /// The bitmaps of its image, which are to be kept up from before the first write on.
    ///
    /// # Errors
    /// `Limit` without memory.
    pub fn load_bitmaps(&self) -> Result<Vec<Arc<Bitmap>>> {
        let load = |loaded: Loaded| {
            let bits =
                Bits::from_bytes(loaded.bits.size(), loaded.bits.granularity_bits(), loaded.bits.bytes());
            let bits = bits.ok_or_else(|| Error::limit(format!("no memory for bitmap {}", loaded.name)))?;
            Ok(Arc::new(Bitmap::kept(&loaded.name, bits, loaded.enabled)))
        };
        self.take_bitmaps().into_iter().map(load).collect()
    }

    /// Leaves them with the image, which is written when it is closed. After the last write.
    pub fn keep_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) {
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
                    // One that records nothing is known not to say what was written since.
                    missed: state.gap && state.recording,
                }),
                Err(e) => {
                    // It is not kept, and no bitmap of that name says less than was written.
                    tracing::error!("bitmap {} is lost: {e}", b.name);
                    None
                }
            }
        });
        self.put_bitmaps(kept.collect());
    }
}
