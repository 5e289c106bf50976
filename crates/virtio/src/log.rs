//! The dirty page log that a front end shares while it migrates the guest (vhost-user,
//! "Migration").
//!
//! Queues on any worker mark pages at any time, and the front end reads and clears the marks. So
//! every mark is an atomic OR. A mark comes after the store that it stands for. The reader clears a
//! bit and then copies the page: an earlier mark could be cleared while the page is still old.

use alloc::sync::Arc;
use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicU8, Ordering, fence};

use crate::bits::{low_u8, to_usize};

/// Bytes of guest memory that one bit stands for (`VHOST_LOG_PAGE`).
pub const LOG_PAGE_SIZE: u64 = 4096;

/// One bit for each page of guest-physical memory from address 0, least significant bit first.
pub struct DirtyLog {
    base: *mut u8,
    size: usize,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all accesses to the log are atomic, and the value that keeps it mapped is Send + Sync.
unsafe impl Send for DirtyLog {}
// SAFETY: all accesses through a shared reference are atomic.
unsafe impl Sync for DirtyLog {}

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyLog").field("base", &self.base).field("size", &self.size).finish_non_exhaustive()
    }
}

impl DirtyLog {
    /// Makes a log of `size` bytes at `base`.
    ///
    /// # Safety
    /// `base..base + size` stays mapped for reading and writing as long as `keep` lives, and all
    /// concurrent accesses are atomic.
    pub unsafe fn new(base: *mut u8, size: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, size, _keep: keep }
    }

    /// Returns whether it has a bit for every page below a guest address.
    pub fn covers(&self, end: u64) -> bool {
        end.div_ceil(LOG_PAGE_SIZE).div_ceil(8) <= self.size as u64
    }

    /// Marks every page that has a byte in the range. Pages past the end of the log are ignored.
    pub fn mark(&self, guest_addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let pages = (self.size as u64).saturating_mul(8);
        let first = guest_addr / LOG_PAGE_SIZE;
        let last = guest_addr.saturating_add(len - 1) / LOG_PAGE_SIZE;
        if first >= pages {
            return;
        }
        // The stores that are logged come before the bit, also for a reader on a weakly ordered
        // machine.
        fence(Ordering::Release);
        let mut page = first;
        let end = last.min(pages - 1) + 1;
        while page < end {
            // All bits of one byte at once.
            let in_byte = (8 - page % 8).min(end - page);
            let mask = low_u8(((1 << in_byte) - 1) << (page % 8));
            // SAFETY: `page` is below `pages`, so its byte is below `size`; `keep` keeps the
            // mapping, as `new` requires.
            let byte = unsafe { AtomicU8::from_ptr(self.base.wrapping_add(to_usize(page / 8))) };
            // The bit is not read first: if it is set, the reader may clear it before the logged
            // store is visible.
            byte.fetch_or(mask, Ordering::Release);
            page += in_byte;
        }
    }
}

#[cfg(test)]
mod tests;
