//! Writes that the server has not made stable.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ::nbd::Settings;
use ::nbd::transmission_flag::SEND_FLUSH;
use vshunt_types::spec::Cache;

/// Least time between two flushes for the sake of [`Op::Seek`](crate::Op::Seek).
const SEEK_FLUSH_PAUSE: Duration = Duration::from_secs(1);

/// What the server may keep in a cache of its own. A map of where data is need not know of it:
/// nbdkit's filter `cache` calls such ranges zero.
// Each write changes it, and each request reads what is beside it.
#[repr(align(128))]
pub(super) struct Unflushed {
    /// The map matters, and a flush helps.
    counts: bool,
    /// Writes that are complete and were not stable by themselves, beginning with 1 for those of
    /// earlier clients.
    written: AtomicU64,
    /// Those of them that a completed flush covers.
    flushed: AtomicU64,
    /// When a seek may flush again, in ms after `start`.
    next_ms: AtomicU64,
    start: Instant,
}

impl Unflushed {
    pub(super) fn new(settings: &Settings, readonly: bool, cache: Cache) -> Self {
        let flushes = settings.has(SEND_FLUSH);
        Self {
            counts: settings.allocation.is_some() && flushes && !readonly && cache != Cache::Unsafe,
            written: AtomicU64::new(1),
            flushed: AtomicU64::new(0),
            next_ms: AtomicU64::new(0),
            start: Instant::now(),
        }
    }

    /// Counts a completed write.
    #[inline]
    pub(super) fn write(&self) {
        if self.counts {
            self.written.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Returns what a flush that is sent now will cover.
    pub(super) fn mark(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Counts a flush that is complete.
    pub(super) fn flush(&self, mark: u64) {
        self.flushed.fetch_max(mark, Ordering::AcqRel);
    }

    /// Counts a server that may be another process now, with other caches.
    pub(super) fn forget(&self) {
        self.write();
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.counts || self.flushed.load(Ordering::Acquire) >= self.written.load(Ordering::Acquire)
    }

    /// Returns whether a seek is to flush first, which happens now and then only.
    pub(super) fn flush_is_due(&self) -> bool {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let next = self.next_ms.load(Ordering::Relaxed);
        let later = now.saturating_add(SEEK_FLUSH_PAUSE.as_millis() as u64);
        now >= next
            && self.next_ms.compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
