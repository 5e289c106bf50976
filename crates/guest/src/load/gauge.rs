//! Counters that a load thread publishes while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

/// Values that a lane publishes to the watching thread after each batch.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct LoadGauge {
    /// Requests completed.
    pub(crate) done: AtomicU64,
    /// Bytes of data completed.
    pub(crate) bytes: AtomicU64,
    /// Requests outstanding.
    pub(crate) outstanding: AtomicU64,
    /// The vring base that continues the ring, while parked.
    pub(crate) base: AtomicU64,
}

impl LoadGauge {
    /// Returns the requests in flight, as last published.
    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }
}
