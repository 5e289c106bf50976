//! The driver side of a virtqueue, for the bench and for tests: it plays the guest.
//!
//! Called by whoever drives the device, on one thread a ring. It trusts the device no further than its own memory:
//! ids and lengths that a device returns are checked or only passed on. Buffers are named by guest addresses; the ring's
//! areas and indirect tables, which the driver writes, by addresses in this process as well.

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

/// Room for an indirect table. Must stay as it is until the request comes back.
#[derive(Clone, Copy, Debug)]
pub struct Indirect {
    /// Where the table lies in this process; writable for `16 * cap` bytes, aligned to 8.
    pub ptr: *mut u8,
    /// Its guest-physical address.
    pub addr: u64,
    /// Descriptors that it can hold.
    pub cap: u16,
}

/// A request that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`DriverRing::add`] was given.
    pub cookie: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// There are not enough free descriptors (or room in the indirect table), or the request has no buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not enough free descriptors for the request")]
pub struct Full;

/// The driver side of a virtqueue.
#[derive(Debug)]
pub enum DriverRing {
    /// 2.7.
    Split(SplitDriver),
    /// 2.8.
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
    /// A fresh ring; zeroes its areas.
    ///
    /// # Panics
    /// The size is zero, or of a split ring and not a power of two: a programmer's mistake.
    ///
    /// # Safety
    /// The areas of `addrs`, [`ring_sizes`] long and aligned as
    /// [`RingAddrs`] says, stay mapped for reading and writing, and nobody else is on the driver side of them, for as
    /// long as the ring lives. [`Indirect`] tables that are handed in are what they say.
    pub unsafe fn new(size: u16, features: RingFeatures, addrs: RingAddrs) -> Self {
        assert!(size > 0 && (features.packed || size.is_power_of_two()), "queue size {size}");
        let sizes = ring_sizes(size, features);
        // SAFETY: the caller upholds this function's contract, which is the same.
        unsafe {
            addrs.desc.write_bytes(0, sizes.desc);
            addrs.driver.write_bytes(0, sizes.driver);
            addrs.device.write_bytes(0, sizes.device);
        }
        if features.packed {
            Self::Packed(PackedDriver::new(size, features, addrs))
        } else {
            Self::Split(SplitDriver::new(size, features, addrs))
        }
    }

    /// Adds a request: device-readable buffers first, then device-writable ones. Invisible until
    /// [`publish`](Self::publish). With `indirect` and more than one buffer it takes one descriptor and a table; the
    /// feature must have been negotiated. `cookie` comes back from [`poll`](Self::poll) and need not be unique.
    ///
    /// # Errors
    /// [`Full`]; nothing was added.
    #[inline]
    pub fn add(&mut self, segs: &[DriverSeg], indirect: Option<Indirect>, cookie: u16) -> Result<(), Full> {
        each!(self, r => r.add(segs, indirect, cookie))
    }

    /// Makes what was added visible. True: kick the device.
    #[inline]
    #[must_use = "true: the device sleeps until it is kicked"]
    pub fn publish(&mut self) -> bool {
        each!(self, r => r.publish())
    }

    /// The next request that came back. An id that the device made up is skipped.
    #[inline]
    pub fn poll(&mut self) -> Option<Used> {
        each!(self, r => r.poll())
    }

    /// Whether something came back.
    #[inline]
    pub fn has_used(&self) -> bool {
        each!(self, r => r.has_used())
    }

    /// Tells the device that notifications are not needed for now. A hint; does nothing on a split ring with
    /// `VIRTIO_RING_F_EVENT_IDX`.
    #[inline]
    pub fn disable_notify(&mut self) {
        each!(self, r => r.disable_notify())
    }

    /// Asks for a notification with the next completion. True: completions are there already; do not sleep.
    #[inline]
    #[must_use = "true: there are completions, and no notification may come for them"]
    pub fn enable_notify(&mut self) -> bool {
        each!(self, r => r.enable_notify())
    }

    /// As [`enable_notify`](Self::enable_notify), with `VIRTIO_RING_F_EVENT_IDX` for when `count` more chains (packed:
    /// descriptors) have come back; so many must be outstanding. True: they are there already (packed: some are).
    #[inline]
    #[must_use = "true: there are completions, and no notification may come for them"]
    pub fn enable_notify_after(&mut self, count: u16) -> bool {
        each!(self, r => r.enable_notify_after(count))
    }

    /// Descriptors that are free.
    #[inline]
    pub fn free_descs(&self) -> u16 {
        each!(self, r => r.free_descs())
    }
}

#[cfg(test)]
mod tests;
