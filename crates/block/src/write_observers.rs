//! What handles do beside each write: dirty bitmaps record it, a backup reads what it replaces, and
//! a mirror copies it before it is complete.
//!
//! Control threads install [`WriteObservers`] while no request is in flight. Handles take them when
//! they are made.

use std::ops::Range;
use std::sync::Arc;

use super::bits::Bits;
use super::copy_after_write::CopyAfterWrite;
use super::copy_before_write::CopyBeforeWrite;

/// What a handle does beside each write.
#[derive(Clone, Default)]
pub struct WriteObservers {
    /// The bits of dirty bitmaps.
    pub dirty: Vec<Arc<Bits>>,
    /// A backup that reads what a write replaces.
    pub copy_before_write: Option<Arc<CopyBeforeWrite>>,
    /// A mirror whose target gets a write before it is complete.
    pub copy_after_write: Option<Arc<CopyAfterWrite>>,
}

impl WriteObservers {
    /// Returns whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.dirty.is_empty() && self.copy_before_write.is_none() && self.copy_after_write.is_none()
    }

    /// Records a write before it starts. So a dirty block may be clean, but a clean block was never
    /// written.
    #[inline]
    pub fn record(&self, range: Range<u64>) {
        for bits in &self.dirty {
            bits.set(bits.blocks(range.clone()));
        }
    }
}
