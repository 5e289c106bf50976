//! The device side of a virtqueue: takes descriptor chains, returns used elements, and applies the
//! notification rules.
//!
//! One [`DeviceRing`] belongs to one queue, and only the worker that owns the queue calls it. The
//! steps of a request are [`pop`](DeviceRing::pop) → work → [`push`](DeviceRing::push) →
//! [`publish`](DeviceRing::publish). The ring is made for batches: several pops, then several
//! pushes and one publish.
//!
//! The driver is untrusted. Each field of its structures is read once, and walks are bounded by the
//! ring or by [`MAX_QUEUE_SIZE`]. An invalid structure is either a [`ChainFault`] (one request is
//! bad, and the queue continues) or [`Broken`] (the ring itself is bad, and the queue must stop).

mod chain;
mod packed;
mod split;
mod walk;

pub use crate::desc::{Broken, DESC_LEN, Head, MAX_QUEUE_SIZE};
pub use chain::{Chain, ChainFault, Seg, gather, scatter};
pub use packed::PackedRing;
pub use split::SplitRing;

pub(crate) use packed::{EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE};

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::bits::low_u16;
use crate::features;
use crate::inflight::{Inflight, InflightError, Replay, SplitNotes};
use crate::log::DirtyLog;
use crate::mem::GuestMemory;

/// The ring features that were negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `VIRTIO_RING_F_INDIRECT_DESC`.
    pub indirect: bool,
    /// `VIRTIO_RING_F_EVENT_IDX`.
    pub event_idx: bool,
    /// `VIRTIO_F_RING_PACKED`.
    pub packed: bool,
}

impl RingFeatures {
    /// Takes the ring features from a device's feature word.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            indirect: bits & features::bit(features::VIRTIO_RING_F_INDIRECT_DESC) != 0,
            event_idx: bits & features::bit(features::VIRTIO_RING_F_EVENT_IDX) != 0,
            packed: bits & features::bit(features::VIRTIO_F_RING_PACKED) != 0,
        }
    }
}

/// Addresses of the three areas of a ring in this process (2.7, 2.8).
#[derive(Clone, Copy, Debug)]
pub struct RingAddrs {
    /// Descriptor table, or packed descriptor ring. Aligned to 16.
    pub desc: *mut u8,
    /// Available ring (aligned to 2), or the driver's event suppression structure (aligned to 4).
    pub driver: *mut u8,
    /// Used ring, or the device's event suppression structure. Aligned to 4.
    pub device: *mut u8,
}

/// Lengths of the three areas in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSizes {
    /// Of [`RingAddrs::desc`].
    pub desc: usize,
    /// Of [`RingAddrs::driver`].
    pub driver: usize,
    /// Of [`RingAddrs::device`].
    pub device: usize,
}

/// Returns the lengths of the areas of a ring of `size` descriptors.
///
/// Those of a split ring include the two event fields, whether `VIRTIO_RING_F_EVENT_IDX` was
/// negotiated or not, according to 2.7.6 and 2.7.8.
pub const fn ring_sizes(size: u16, features: RingFeatures) -> RingSizes {
    let n = size as usize;
    if features.packed {
        RingSizes { desc: DESC_LEN * n, driver: 4, device: 4 }
    } else {
        RingSizes { desc: DESC_LEN * n, driver: 6 + 2 * n, device: 6 + 8 * n }
    }
}

/// Why a ring cannot be set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The size is zero, above [`MAX_QUEUE_SIZE`], or for a split ring not a power of two.
    #[error("queue size {0} is not one a ring can have (1 to {MAX_QUEUE_SIZE}; a power of two if split)")]
    Size(u16),
    /// An area does not have the alignment that the specification demands.
    #[error("the ring's {0} area is misaligned")]
    Misaligned(&'static str),
    /// A packed ring's base is outside of the ring.
    #[error("base {0:#x} lies outside of the packed ring")]
    Base(u32),
}

/// The log for writes to the used ring while the guest migrates.
#[derive(Clone, Debug)]
pub struct UsedLog {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// Guest address of the device area: used ring, or the device's event suppression structure.
    pub device_addr: u64,
    /// Guest address of the descriptor area. Only a packed ring writes there: used descriptors.
    pub desc_addr: u64,
}

/// The device side of a virtqueue.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one a queue; a box would cost a load a request")]
pub enum DeviceRing {
    /// Split (2.7).
    Split(SplitRing),
    /// Packed (2.8).
    Packed(PackedRing),
}

macro_rules! each {
    ($self:expr, $ring:ident => $body:expr) => {
        match $self {
            DeviceRing::Split($ring) => $body,
            DeviceRing::Packed($ring) => $body,
        }
    };
}

impl DeviceRing {
    /// Makes a ring of `size` descriptors over `addrs` that continues at `base`, which has the
    /// format of `VHOST_USER_SET_VRING_BASE`. Split: the next available index. Packed: the
    /// available position in bits 0 to 14 with its wrap counter in bit 15, and the used position in
    /// bits 16 to 31 in the same format.
    ///
    /// Some front ends support packed rings only in part. If the upper half is zero, both positions
    /// are the same. A base of zero on a ring that no device has written to means a new ring, whose
    /// wrap counters are 1.
    ///
    /// # Errors
    /// No ring can have this size, alignment or base.
    ///
    /// # Safety
    /// The areas of `addrs`, whose lengths are those of [`ring_sizes`], stay mapped for reading and
    /// writing as long as the ring lives, and nothing else acts as the device on them.
    pub unsafe fn new(
        size: u16,
        features: RingFeatures,
        addrs: RingAddrs,
        base: u32,
    ) -> Result<Self, RingError> {
        if size == 0 || size > MAX_QUEUE_SIZE || (!features.packed && !size.is_power_of_two()) {
            return Err(RingError::Size(size));
        }
        let driver_align = if features.packed { 4 } else { 2 };
        for (ptr, align, name) in [
            (addrs.desc, 16, "descriptor"),
            (addrs.driver, driver_align, "driver"),
            (addrs.device, 4, "device"),
        ] {
            if !ptr.addr().is_multiple_of(align) {
                return Err(RingError::Misaligned(name));
            }
        }
        if features.packed {
            // SAFETY: size and alignment were checked. The caller promises that the areas stay
            // mapped with the lengths of `ring_sizes`, and that no other device uses them.
            unsafe { PackedRing::new(size, features, addrs, base) }.map(Self::Packed)
        } else {
            // SAFETY: as for packed rings, size and alignment were checked, and the caller promises
            // that the areas stay mapped and that no other device uses them.
            Ok(Self::Split(unsafe { SplitRing::new(size, features, addrs, low_u16(base.into())) }))
        }
    }

    /// Returns the number of descriptors of the ring.
    #[inline]
    pub fn size(&self) -> u16 {
        each!(self, r => r.size())
    }

    /// Returns whether there is a request. It is cheap enough for polling.
    #[inline]
    pub fn has_avail(&self) -> bool {
        each!(self, r => r.has_avail())
    }

    /// Returns the number of requests that were there at the last look and are not taken yet. A
    /// packed ring returns 0, because it does not know.
    #[inline]
    pub fn seen_waiting(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.seen_waiting(),
            Self::Packed(_) => 0,
        }
    }

    /// Takes the next request, if there is one, and fills `chain` with it. A request that cannot be
    /// carried out has [`Chain::fault`] set. It is taken, too, and needs a [`push`](Self::push).
    ///
    /// # Errors
    /// The ring is broken, and the queue must stop.
    #[inline]
    pub fn pop(&mut self, mem: &GuestMemory, chain: &mut Chain) -> Result<bool, Broken> {
        each!(self, r => r.pop(mem, chain))
    }

    /// Returns a request that was popped and not pushed to the ring, as if it had not been taken.
    /// The next [`pop`](Self::pop) takes it again. Several requests are returned in reverse order,
    /// and no request that was popped after one of them may be in use or pushed.
    pub fn unpop(&mut self, head: Head) {
        each!(self, r => r.unpop(head));
    }

    /// Reads the chain with head index `id` again, without taking anything from the available ring.
    /// Split only.
    ///
    /// # Errors
    /// `id` is outside of the ring, or the ring is packed, for which there is
    /// [`replay`](Self::replay).
    pub fn pop_head(&mut self, mem: &GuestMemory, chain: &mut Chain, id: u16) -> Result<bool, Broken> {
        match self {
            Self::Split(r) => r.pop_head(mem, chain, id).map(|()| true),
            Self::Packed(_) => Err(Broken::NoHeads),
        }
    }

    /// Stages a used element: the request is done, and `written` bytes of its device-writable
    /// buffers were written. The driver cannot see it until [`publish`](Self::publish).
    #[inline]
    pub fn push(&mut self, head: Head, written: u32) {
        each!(self, r => r.push(head, written))
    }

    /// Makes all pushed elements visible at once. Returns whether the driver asked to be notified
    /// of them.
    #[inline]
    #[must_use = "true: the driver sleeps until it is notified"]
    pub fn publish(&mut self) -> bool {
        each!(self, r => r.publish())
    }

    /// Tells the driver that it need not kick for now. This is a hint. It does nothing on a split
    /// ring with `VIRTIO_RING_F_EVENT_IDX`, where an unchanged event index has the same meaning.
    #[inline]
    pub fn disable_kick(&mut self) {
        each!(self, r => r.disable_kick())
    }

    /// Asks for a kick with the next request. Returns true if there are requests already, which may
    /// have come without a kick; the caller must not sleep then.
    #[inline]
    #[must_use = "true: there is work, and no kick may come for it"]
    pub fn enable_kick(&mut self) -> bool {
        self.enable_kick_after(1)
    }

    /// Asks for a kick once `count` more requests are there (packed: descriptors). `count` is at
    /// least 1 and at most the ring's size. Returns true if as many are there already.
    ///
    /// A driver that stops before `count` does not kick, so a caller that asks for more than one
    /// has to look again after a while. Without `VIRTIO_RING_F_EVENT_IDX`, every `count` counts as
    /// 1.
    #[inline]
    #[must_use = "true: there is work, and no kick may come for it"]
    pub fn enable_kick_after(&mut self, count: u16) -> bool {
        each!(self, r => r.enable_kick_after(count))
    }

    /// Returns the position of the ring in the format of `VHOST_USER_GET_VRING_BASE`; see
    /// [`new`](Self::new).
    pub fn base(&self) -> u32 {
        each!(self, r => r.base())
    }

    /// Revokes [`disable_kick`](Self::disable_kick) on a ring that this process stops serving.
    ///
    /// The next server may be another program, which relies on a kick for the first request. This
    /// does nothing on a split ring with `VIRTIO_RING_F_EVENT_IDX`, whose driver uses an index that
    /// the next server sets.
    pub fn allow_kicks(&mut self) {
        each!(self, r => r.allow_kicks());
    }

    /// Returns the position up to which used elements are published. Split: the used index. Packed:
    /// the position, with the wrap counter in bit 15.
    pub fn used_index(&self) -> u16 {
        each!(self, r => r.used_index())
    }

    /// Switches the marking of the ring's own writes on or off. If it is off, it costs one
    /// predictable branch for each batch.
    pub fn set_used_log(&mut self, log: Option<UsedLog>) {
        each!(self, r => r.set_used_log(log));
    }

    /// Treats every buffer as device-readable from now on. This is for rings on which the device
    /// writes nothing, such as the transmit ring of a network device. DPDK's virtio-user marks the
    /// header's buffer there as device-writable, and DPDK's vhost library ignores the flag. The
    /// write flag of a descriptor that refers to an indirect table is ignored on every ring
    /// (2.7.5.3.2, 2.8.19).
    pub fn set_all_readable(&mut self) {
        each!(self, r => r.set_all_readable());
    }

    /// Tracks requests in `inflight` from now on. Returns the requests that the last owner of the
    /// region had taken and not published, in the order in which they were taken.
    ///
    /// It repairs the ring's positions first. They follow from the region, whatever base the front
    /// end gave. To be called before the first [`pop`](Self::pop).
    ///
    /// The first [`publish`](Self::publish) after this always notifies, because the last owner may
    /// have died between publishing and notifying. If there is nothing to replay, the caller has to
    /// notify once.
    ///
    /// # Errors
    /// The region was made for the other layout or for a smaller ring, or is damaged. The ring is
    /// unchanged.
    pub fn set_inflight(&mut self, inflight: Inflight) -> Result<Vec<Replay>, InflightError> {
        each!(self, r => r.set_inflight(inflight))
    }

    /// Returns the state with which another server continues the region of
    /// [`set_inflight`](Self::set_inflight). This ring must not be used after that. `None`: the
    /// ring is packed, or not tracked.
    pub fn notes(&self) -> Option<SplitNotes> {
        match self {
            Self::Split(ring) => ring.notes(),
            Self::Packed(_) => None,
        }
    }

    /// Fills `chain` with a request that [`set_inflight`](Self::set_inflight) returned, which is
    /// then handled like a popped one.
    ///
    /// # Errors
    /// The region is damaged.
    pub fn replay(&mut self, mem: &GuestMemory, replay: &Replay, chain: &mut Chain) -> Result<(), Broken> {
        each!(self, r => r.replay(mem, replay, chain))
    }
}

/// Returns whether a change of the index from `old` to `new` passes `event`, so that the other side
/// has to be notified (2.7.10, `vring_need_event`). All values are modulo 2^16.
#[inline(always)]
pub(crate) const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests;
