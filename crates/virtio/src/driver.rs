//! The driver side of a virtqueue, for load generators and tests that act as a guest.
//!
//! The code that drives the device calls it, on one thread for each ring. It does not rely on the
//! device: ids and lengths that a device returns are checked or only passed on. Guest addresses
//! name the buffers. The ring's areas and the indirect tables, which the driver writes, also have
//! addresses in this process.

mod packed;
mod split;

pub use packed::PackedDriver;
pub use split::SplitDriver;

use crate::ring::{RingAddrs, RingFeatures, ring_sizes};

/// One buffer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverSeg {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

/// Memory for an indirect table. It must not change until the request has returned.
#[derive(Clone, Copy, Debug)]
pub struct Indirect {
    /// Address of the table in this process, writable for `16 * cap` bytes and aligned to 8.
    pub ptr: *mut u8,
    /// Guest-physical address of the table.
    pub addr: u64,
    /// Descriptors that it has room for.
    pub cap: u16,
}

/// A request that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The value that [`DriverRing::add`] was given.
    pub cookie: u16,
    /// Bytes that the device reports as written.
    pub len: u32,
}

/// There are not enough free descriptors, or the indirect table has no room, or the request has no
/// buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not enough free descriptors for the request")]
pub struct Full;

/// The driver side of a virtqueue.
#[derive(Debug)]
pub enum DriverRing {
    /// Split (2.7).
    Split(SplitDriver),
    /// Packed (2.8).
    Packed(PackedDriver),
}

macro_rules! each {
    ($self:expr, $ring:ident => $body:expr) => {
        match $self {
            DriverRing::Split($ring) => $body,
            DriverRing::Packed($ring) => $body,
        }
    };
}

impl DriverRing {
    /// Makes a new ring, and zeroes its areas.
    ///
    /// # Panics
    /// The size is zero, or is not a power of two for a split ring.
    ///
    /// # Safety
    /// The areas of `addrs`, whose lengths are those of [`ring_sizes`] and whose alignment is that
    /// of [`RingAddrs`], stay mapped for reading and writing as long as the ring lives. Nothing
    /// else acts as the driver on them. Each [`Indirect`] table that is passed in later is as its
    /// fields say.
    pub unsafe fn new(size: u16, features: RingFeatures, addrs: RingAddrs) -> Self {
        assert!(size > 0 && (features.packed || size.is_power_of_two()), "queue size {size}");
        let sizes = ring_sizes(size, features);
        // SAFETY: the caller promises that the descriptor area is writable and has this length.
        unsafe { addrs.desc.write_bytes(0, sizes.desc) };
        // SAFETY: the caller promises the same of the driver area.
        unsafe { addrs.driver.write_bytes(0, sizes.driver) };
        // SAFETY: the caller promises the same of the device area.
        unsafe { addrs.device.write_bytes(0, sizes.device) };
        if features.packed {
            Self::Packed(PackedDriver::new(size, features, addrs))
        } else {
            Self::Split(SplitDriver::new(size, features, addrs))
        }
    }

    /// Adds a request: device-readable buffers first, then device-writable ones. The device cannot
    /// see it until [`publish`](Self::publish).
    ///
    /// With `indirect` and more than one buffer the request takes one descriptor and a table. The
    /// feature must have been negotiated. [`poll`](Self::poll) returns `cookie`, which need not be
    /// unique.
    ///
    /// # Errors
    /// [`Full`]: nothing was added.
    #[inline]
    pub fn add(&mut self, segs: &[DriverSeg], indirect: Option<Indirect>, cookie: u16) -> Result<(), Full> {
        each!(self, r => r.add(segs, indirect, cookie))
    }

    /// Makes the added requests visible. Returns whether to kick the device.
    #[inline]
    #[must_use = "true: the device sleeps until it is kicked"]
    pub fn publish(&mut self) -> bool {
        each!(self, r => r.publish())
    }

    /// Returns the next request that the device has returned. An id that is not in flight is
    /// skipped.
    #[inline]
    pub fn poll(&mut self) -> Option<Used> {
        each!(self, r => r.poll())
    }

    /// Returns whether the device has returned something.
    #[inline]
    pub fn has_used(&self) -> bool {
        each!(self, r => r.has_used())
    }

    /// Tells the device that it need not notify for now. This is a hint, and does nothing on a
    /// split ring with `VIRTIO_RING_F_EVENT_IDX`.
    #[inline]
    pub fn disable_notify(&mut self) {
        each!(self, r => r.disable_notify())
    }

    /// Asks for a notification with the next completion. Returns true if there are completions
    /// already; the caller must not sleep then.
    #[inline]
    #[must_use = "true: there are completions, and no notification may come for them"]
    pub fn enable_notify(&mut self) -> bool {
        each!(self, r => r.enable_notify())
    }

    /// Asks for a notification like [`enable_notify`](Self::enable_notify). With
    /// `VIRTIO_RING_F_EVENT_IDX` it comes when `count` more chains (packed: descriptors) have
    /// returned. At least as many must be in flight. Returns true if as many (packed: some) have
    /// returned already.
    #[inline]
    #[must_use = "true: there are completions, and no notification may come for them"]
    pub fn enable_notify_after(&mut self, count: u16) -> bool {
        each!(self, r => r.enable_notify_after(count))
    }

    /// Returns the number of free descriptors.
    #[inline]
    pub fn free_descs(&self) -> u16 {
        each!(self, r => r.free_descs())
    }
}

#[cfg(test)]
mod tests;
