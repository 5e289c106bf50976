//! Records of the requests in flight, which a restarted process reads (vhost-user, "Inflight I/O
//! tracking").
//!
//! The front end keeps a shared region for each queue. A ring that owns an [`Inflight`] records
//! there which requests it takes and publishes. The order of the stores is such that a back end may
//! be killed between any two of them: its successor never replays published requests, and always
//! replays requests that were taken and not published.
//!
//! Only the queue's worker writes here. A kill loses no store that was executed, so only the
//! program's order matters, and volatile or atomic accesses keep it. The layouts are exactly those
//! of the specification, in the host's byte order, because another back end may have written them.
//!
//! Some steps of the specification leave a window. The steps here leave a narrower one, and the
//! specification's recovery can still read the region; see `packed.rs`.

mod packed;
mod split;

pub(crate) use packed::PackedTrack;
pub(crate) use split::SplitTrack;

use alloc::sync::Arc;
use core::any::Any;
use core::fmt;

use crate::desc::{Head, MAX_QUEUE_SIZE};
use crate::raw;

/// Alignment of a queue's part of the region in bytes (`INFLIGHT_ALIGNMENT` in QEMU and DPDK).
pub const INFLIGHT_ALIGN: usize = 64;

/// The only version that exists.
const VERSION: u16 = 1;

/// Returns the bytes before the array of descriptor states, and the bytes of one state.
const fn layout(packed: bool) -> (usize, usize) {
    if packed { (packed::HEADER_LEN, packed::ENTRY_LEN) } else { (split::HEADER_LEN, split::ENTRY_LEN) }
}

/// Returns the bytes of one queue's part of the region, rounded up to [`INFLIGHT_ALIGN`].
pub const fn inflight_queue_size(queue_size: u16, packed: bool) -> usize {
    let (header, entry) = layout(packed);
    (header + entry * queue_size as usize).next_multiple_of(INFLIGHT_ALIGN)
}

/// Why a region cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// It is shorter than its descriptors need.
    #[error("the in-flight region has {len} bytes, a queue of {queue_size} needs {need}")]
    TooShort {
        /// Its length in bytes.
        len: usize,
        /// The queue size it was made for.
        queue_size: u16,
        /// The bytes that are needed.
        need: usize,
    },
    /// It is not aligned to 8 bytes.
    #[error("the in-flight region is misaligned")]
    Misaligned,
    /// It has a version or features that are unknown here.
    #[error(
        "the in-flight region has version {version} and features {features:#x}, not version 1 without features"
    )]
    Version {
        /// The region's version.
        version: u16,
        /// The region's features.
        features: u64,
    },
    /// It was made for another queue size.
    #[error("the in-flight region is for a queue of {found}, not {expected}")]
    QueueSize {
        /// Descriptors that the region has.
        found: u16,
        /// The least number of descriptors that was expected.
        expected: u16,
    },
    /// It was made for the other layout.
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
    /// Whether the version was 0, which means that the region is empty.
    fresh: bool,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: only this queue uses the region (`Inflight::new`), on any thread.
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
    /// Checks the region of `len` bytes at `base`. Nothing is written yet.
    ///
    /// # Errors
    /// The region is too short, misaligned, of an unknown kind, or for another queue size.
    ///
    /// # Safety
    /// `base..base + len` stays mapped for reading and writing as long as `keep` lives, and nothing
    /// else writes there in that time.
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
        // SAFETY: both layouts start with features, version and desc_num. Length and alignment were
        // checked, and the caller promises that the region is mapped.
        let features = unsafe { raw::get_u64(base) };
        // SAFETY: inside of the region, whose length was checked and which the caller keeps mapped.
        let version = unsafe { raw::get_u16(base.wrapping_add(8)) };
        // SAFETY: inside of the region, whose length was checked and which the caller keeps mapped.
        let found = unsafe { raw::get_u16(base.wrapping_add(10)) };
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
    /// Packed: the entry where its descriptors are recorded.
    entry: u16,
}

impl Replay {
    /// Returns the name of the request.
    pub fn head(&self) -> Head {
        self.head
    }
}

/// The state that another server of a split ring needs to continue the region. That server keeps
/// this state itself, because it reads nothing from the region. The ring that read the region is
/// not used then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitNotes {
    /// The queue's part of the region.
    pub base: *mut u8,
    /// Descriptors that the part has room for.
    pub queue_size: u16,
    /// The number of the next request that is taken.
    pub counter: u64,
    /// The region's field of that name.
    pub last_batch_head: u16,
}

#[cfg(test)]
mod tests;
