//! Counters that a load thread publishes while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a lane tells the watching thread, once a batch.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct LoadGauge {
    /// Requests completed.
    pub(crate) done: AtomicU64,
    /// Bytes of data completed.
    pub(crate) bytes: AtomicU64,
    /// Requests outstanding.
    pub(crate) outstanding: AtomicU64,
    /// While parked: the vring base that continues the ring.
    pub(crate) base: AtomicU64,
}

impl LoadGauge {
    /// Requests outstanding, as last told.
    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }
}
