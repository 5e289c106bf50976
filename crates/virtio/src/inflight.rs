//! Requests in flight, written down where a restart finds them (vhost-user, "Inflight I/O tracking").
//!
//! The front-end keeps a shared region for each queue. A ring that owns an [`Inflight`] records there what it takes and
//! what it publishes, in such an order that a back-end which is killed between any two stores leaves behind what its
//! successor needs: data that was published is never replayed, a request that was taken and not published always is.
//!
//! Only the queue's worker writes here. Being killed loses no store that was executed, so that the program's order is
//! all that matters, and volatile or atomic accesses keep it. The layouts are those of the specification, in the
//! host's byte order, to the byte: another back-end may have written them.
//!
//! Where the specification's steps leave a window, ours are narrower and still readable by its recovery; see
//! `packed.rs`.

mod packed;
mod split;

pub(crate) use packed::PackedTrack;
pub(crate) use split::SplitTrack;

use alloc::sync::Arc;
use core::any::Any;
use core::fmt;

use crate::desc::{Head, MAX_QUEUE_SIZE};
use crate::raw;

/// What a queue's part of the region is aligned to, in bytes (`INFLIGHT_ALIGNMENT` in QEMU and DPDK).
pub const INFLIGHT_ALIGN: usize = 64;

/// The only version there is.
const VERSION: u16 = 1;

/// Bytes before the array of descriptors, and bytes of one descriptor's state.
const fn layout(packed: bool) -> (usize, usize) {
    if packed { (packed::HEADER_LEN, packed::ENTRY_LEN) } else { (split::HEADER_LEN, split::ENTRY_LEN) }
}

/// Bytes of one queue's part of the region, rounded up to [`INFLIGHT_ALIGN`].
pub const fn inflight_queue_size(queue_size: u16, packed: bool) -> usize {
    let (header, entry) = layout(packed);
    (header + entry * queue_size as usize).next_multiple_of(INFLIGHT_ALIGN)
}

/// Why a region cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// Shorter than its descriptors need.
    #[error("the in-flight region has {len} bytes, a queue of {queue_size} needs {need}")]
    TooShort {
        /// Its length in bytes.
        len: usize,
        /// The queue size it was made for.
        queue_size: u16,
        /// Bytes that are needed.
        need: usize,
    },
    /// Not aligned to 8 bytes.
    #[error("the in-flight region is misaligned")]
    Misaligned,
    /// Written by a version, or with features, that are not known here.
    #[error(
        "the in-flight region has version {version} and features {features:#x}, not version 1 without features"
    )]
    Version {
        /// The region's version.
        version: u16,
        /// The region's features.
        features: u64,
    },
    /// Made for another queue size.
    #[error("the in-flight region is for a queue of {found}, not {expected}")]
    QueueSize {
        /// Descriptors that the region has.
        found: u16,
        /// Descriptors that were expected, at least.
        expected: u16,
    },
    /// Made for the other layout.
    #[error("the in-flight region is for the other ring layout")]
    Layout,
    /// Its lists or positions contradict each other.
    #[error("the in-flight region is damaged: {0}")]
    Damaged(&'static str),
}

/// One queue's part of the in-flight region, not yet in use; see
/// [`DeviceRing::set_inflight`](crate::ring::DeviceRing::set_inflight).
pub struct Inflight {
    base: *mut u8,
    queue_size: u16,
    packed: bool,
    /// Version 0 was found: nothing is in there yet.
    fresh: bool,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region is this queue's alone (`Inflight::new`), on whichever thread that is.
unsafe impl Send for Inflight {}

impl fmt::Debug for Inflight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inflight")
            .field("base", &self.base)
            .field("queue_size", &self.queue_size)
            .field("packed", &self.packed)
            .field("fresh", &self.fresh)
            .finish_non_exhaustive()
    }
}

impl Inflight {
    /// Looks at the region of `len` bytes at `base`; writes nothing yet.
    ///
    /// # Errors
    /// Too short, misaligned, or written by something unknown or for another queue size.
    ///
    /// # Safety
    /// `base..base + len` stays mapped for reading and writing for as long as `keep` lives, and nobody else writes
    /// there meanwhile.
    pub unsafe fn new(
        base: *mut u8,
        len: usize,
        queue_size: u16,
        packed: bool,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, InflightError> {
        if queue_size == 0 || queue_size > MAX_QUEUE_SIZE {
            return Err(InflightError::QueueSize { found: queue_size, expected: MAX_QUEUE_SIZE });
        }
        let (header, entry) = layout(packed);
        let need = header + entry * queue_size as usize;
        if len < need {
            return Err(InflightError::TooShort { len, queue_size, need });
        }
        if !base.addr().is_multiple_of(8) {
            return Err(InflightError::Misaligned);
        }
        // SAFETY: both layouts start with features, version and desc_num; length and alignment were checked.
        let (features, version, found) =
            unsafe { (raw::get_u64(base), raw::get_u16(base.add(8)), raw::get_u16(base.add(10))) };
        match version {
            0 => {}
            VERSION if features == 0 => {
                if found != queue_size {
                    return Err(InflightError::QueueSize { found, expected: queue_size });
                }
            }
            _ => return Err(InflightError::Version { version, features }),
        }
        Ok(Self { base, queue_size, packed, fresh: version == 0, keep })
    }

    /// Checks that a ring of `size` descriptors can be tracked here.
    fn fits(&self, size: u16, packed: bool) -> Result<(), InflightError> {
        if self.packed != packed {
            return Err(InflightError::Layout);
        }
        if self.queue_size < size {
            return Err(InflightError::QueueSize { found: self.queue_size, expected: size });
        }
        Ok(())
    }
}

/// A request that was taken and not published by the region's last owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    head: Head,
    /// Packed: where its descriptors are written down.
    entry: u16,
}

impl Replay {
    /// Who the request is.
    pub fn head(&self) -> Head {
        self.head
    }
}

/// What another server of a split ring needs to write the region on, where the ring that looked at it is not used: what it
/// keeps by itself, since it reads nothing there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitNotes {
    /// The queue's part of the region.
    pub base: *mut u8,
    /// Descriptors that it has room for.
    pub queue_size: u16,
    /// What the next request taken is numbered with.
    pub counter: u64,
    /// The region's field of that name.
    pub last_batch_head: u16,
}

#[cfg(test)]
mod tests;
