//! The device side of a virtqueue: take descriptor chains, give used elements back, and the notification rules.
//!
//! One [`DeviceRing`] belongs to one queue and is called only by the worker that owns the queue. The life of a
//! request is [`pop`](DeviceRing::pop) → work → [`push`](DeviceRing::push) → [`publish`](DeviceRing::publish); a batch
//! of pops, then a batch of pushes and one publish is what it is made for.
//!
//! The driver on the other side is hostile. Each field of its structures is read once, walks are bounded by the ring
//! or by [`MAX_QUEUE_SIZE`], and what cannot be made sense of is either a [`ChainFault`] (one request is bad, the
//! queue goes on) or [`Broken`] (the ring itself is, the queue must stop).

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

/// Which of the ring features were negotiated.
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
    /// Picks the ring features out of a device's feature word.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            indirect: bits & features::bit(features::VIRTIO_RING_F_INDIRECT_DESC) != 0,
            event_idx: bits & features::bit(features::VIRTIO_RING_F_EVENT_IDX) != 0,
            packed: bits & features::bit(features::VIRTIO_F_RING_PACKED) != 0,
        }
    }
}

/// Where the three areas of a ring lie in this process (2.7, 2.8).
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

/// How long the areas of a ring of `size` descriptors are.
///
/// A split ring's include the two event fields whether `VIRTIO_RING_F_EVENT_IDX` was negotiated or not, as 2.7.6
/// and 2.7.8 lay them out.
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
    /// An area is not aligned as the specification has it.
    #[error("the ring's {0} area is misaligned")]
    Misaligned(&'static str),
    /// A packed ring's base lies outside of the ring.
    #[error("base {0:#x} lies outside of the packed ring")]
    Base(u32),
}

/// Where used-ring writes are to be marked while the guest migrates.
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
    /// 2.7.
    Split(SplitRing),
    /// 2.8.
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
    /// A ring of `size` descriptors over `addrs`, going on from `base` as `VHOST_USER_SET_VRING_BASE` has it: split,
    /// the next available index; packed, the available position in bits 0 to 14 with its wrap counter in bit 15, and
    /// the used position likewise in bits 16 to 31.
    ///
    /// Front-ends exist that know less of packed rings. An upper half of zero means that both positions are the same;
    /// a base of zero on a ring that no device has written to is a fresh ring, whose wrap counters are 1.
    ///
    /// # Errors
    /// A size, alignment or base that no ring has.
    ///
    /// # Safety
    /// The areas of `addrs`, [`ring_sizes`] long, stay mapped for reading and writing, and no one else is on the device
    /// side of them, for as long as the ring lives.
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
        // SAFETY: size and alignment were checked, the rest is the caller's promise.
        unsafe {
            if features.packed {
                PackedRing::new(size, features, addrs, base).map(Self::Packed)
            } else {
                Ok(Self::Split(SplitRing::new(size, features, addrs, low_u16(base.into()))))
            }
        }
    }

    /// Descriptors in the ring.
    #[inline]
    pub fn size(&self) -> u16 {
        each!(self, r => r.size())
    }

    /// Whether a request is there; cheap enough to poll.
    #[inline]
    pub fn has_avail(&self) -> bool {
        each!(self, r => r.has_avail())
    }

    /// Requests that were there at the last look and are not taken yet. A packed ring does not tell: 0.
    #[inline]
    pub fn seen_waiting(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.seen_waiting(),
            Self::Packed(_) => 0,
        }
    }

    /// Takes the next request, if there is one, and fills `chain` with it. A request that cannot be carried out has
    /// [`Chain::fault`] set; it is taken all the same and wants a [`push`](Self::push).
    ///
    /// # Errors
    /// The ring is broken and the queue must stop.
    #[inline]
    pub fn pop(&mut self, mem: &GuestMemory, chain: &mut Chain) -> Result<bool, Broken> {
        each!(self, r => r.pop(mem, chain))
    }

    /// Gives back a request that was popped and not pushed, as if it had not been taken: the next [`pop`](Self::pop) takes it
    /// again. Of several the one popped last goes first, and none that was popped after it may be under way or pushed.
    pub fn unpop(&mut self, head: Head) {
        each!(self, r => r.unpop(head));
    }

    /// Reads the chain with head index `id` again, without taking anything from the available ring. Split only.
    ///
    /// # Errors
    /// `id` is outside of the ring, or the ring is packed (there, see [`replay`](Self::replay)).
    pub fn pop_head(&mut self, mem: &GuestMemory, chain: &mut Chain, id: u16) -> Result<bool, Broken> {
        match self {
            Self::Split(r) => r.pop_head(mem, chain, id).map(|()| true),
            Self::Packed(_) => Err(Broken::NoHeads),
        }
    }

    /// Stages a used element: the request is done and `written` bytes of its device-writable buffers were written.
    /// Invisible to the driver until [`publish`](Self::publish).
    #[inline]
    pub fn push(&mut self, head: Head, written: u32) {
        each!(self, r => r.push(head, written))
    }

    /// Makes everything that was pushed visible at once. True: the driver wants a notification for it.
    #[inline]
    #[must_use = "true: the driver sleeps until it is notified"]
    pub fn publish(&mut self) -> bool {
        each!(self, r => r.publish())
    }

    /// Tells the driver that kicks are not needed for now. A hint; does nothing on a split ring with
    /// `VIRTIO_RING_F_EVENT_IDX`, where not moving the event index says so already.
    #[inline]
    pub fn disable_kick(&mut self) {
        each!(self, r => r.disable_kick())
    }

    /// Asks for a kick with the next request. True: requests are there already and may come without one; do not sleep.
    #[inline]
    #[must_use = "true: there is work, and no kick may come for it"]
    pub fn enable_kick(&mut self) -> bool {
        self.enable_kick_after(1)
    }

    /// Asks for a kick once `count` more requests are there (packed: descriptors; at least 1, at most the ring's size).
    /// True: so many are there already. A driver that stops short of `count` does not kick: whoever asks for more than
    /// one has to look by itself after a while. Without `VIRTIO_RING_F_EVENT_IDX` every `count` is 1.
    #[inline]
    #[must_use = "true: there is work, and no kick may come for it"]
    pub fn enable_kick_after(&mut self, count: u16) -> bool {
        each!(self, r => r.enable_kick_after(count))
    }

    /// Where the ring stands, as `VHOST_USER_GET_VRING_BASE` wants it; see [`new`](Self::new).
    pub fn base(&self) -> u32 {
        each!(self, r => r.base())
    }

    /// Takes back what [`disable_kick`](Self::disable_kick) said, for a ring that is given up.
    ///
    /// The next owner of the device side may be another program, which relies on a kick for the first request. Does
    /// nothing on a split ring with `VIRTIO_RING_F_EVENT_IDX`, whose driver goes by an index that the next owner sets.
    pub fn allow_kicks(&mut self) {
        each!(self, r => r.allow_kicks());
    }

    /// How far used elements are published: split, the used index; packed, the position with the wrap counter in
    /// bit 15.
    pub fn used_index(&self) -> u16 {
        each!(self, r => r.used_index())
    }

    /// Turns marking of the ring's own writes on or off. Off costs a predictable branch a batch.
    pub fn set_used_log(&mut self, log: Option<UsedLog>) {
        each!(self, r => r.set_used_log(log));
    }

    /// Takes every buffer as device-readable from now on: for rings on which the device writes nothing, as a network
    /// card's transmit ring. DPDK's virtio-user marks the header's buffer there as device-writable, and DPDK's vhost
    /// library ignores the flag. The write flag of a descriptor that refers to an indirect table is ignored on every
    /// ring (2.7.5.3.2, 2.8.19).
    pub fn set_all_readable(&mut self) {
        each!(self, r => r.set_all_readable());
    }

    /// Tracks requests in `inflight` from now on, and says what was taken and not published when the last owner of the
    /// region went away, in the order in which it was taken. Repairs the ring's positions first: they follow from the
    /// region, whatever base the front-end gave. Call it before the first [`pop`](Self::pop).
    ///
    /// The first [`publish`](Self::publish) after this notifies always: the last owner may have died between
    /// publishing and notifying. If there is nothing to replay, notify once all the same.
    ///
    /// # Errors
    /// The region was made for the other layout or for a smaller ring, or is damaged; the ring is unchanged.
    pub fn set_inflight(&mut self, inflight: Inflight) -> Result<Vec<Replay>, InflightError> {
        each!(self, r => r.set_inflight(inflight))
    }

    /// What another server goes on with in the region of [`set_inflight`](Self::set_inflight); this ring is not to be used any
    /// more then. None: the ring is packed, or not tracked.
    pub fn notes(&self) -> Option<SplitNotes> {
        match self {
            Self::Split(ring) => ring.notes(),
            Self::Packed(_) => None,
        }
    }

    /// Fills `chain` with a request that [`set_inflight`](Self::set_inflight) named. It then goes on as if popped.
    ///
    /// # Errors
    /// The region is damaged.
    pub fn replay(&mut self, mem: &GuestMemory, replay: &Replay, chain: &mut Chain) -> Result<(), Broken> {
        each!(self, r => r.replay(mem, replay, chain))
    }
}

/// Whether a side that asked to be notified once the other's index passes `event` is to be, when the index moved from
/// `old` to `new` (2.7.10, `vring_need_event`). All modulo 2^16.
#[inline(always)]
pub(crate) const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests;
