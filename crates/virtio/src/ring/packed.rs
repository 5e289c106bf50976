//! Packed virtqueues, device side (Virtio 1.3, 2.8).
//!
//! The queue's worker calls it. Driver and device write the same descriptor ring. The flags `AVAIL`
//! and `USED`, compared with a wrap counter, say which side owns a slot. A used descriptor is
//! written to the next unused slot, and skips as many slots as its chain had.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{Ordering, fence};

use crate::bits::low_u16;
use crate::desc::{
    Broken, DESC_F_AVAIL, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, DESC_LEN, Head, Pos, RawDesc,
};
use crate::inflight::{Inflight, InflightError, PackedTrack, Replay};
use crate::mem::GuestMemory;
use crate::raw;

use super::walk::{Careful, Fast, Walker};
use super::{Chain, RingAddrs, RingError, RingFeatures, UsedLog, need_event};

/// Event suppression flag (2.8.10): notify always.
pub(crate) const EVENT_ENABLE: u16 = 0;
/// Notify never.
pub(crate) const EVENT_DISABLE: u16 = 1;
/// Notify at the descriptor that the structure names. Only with `VIRTIO_RING_F_EVENT_IDX`.
pub(crate) const EVENT_DESC: u16 = 2;

/// Offset of `len`, `id` and `flags`, 8 bytes, in a descriptor.
const WORD: usize = 8;
/// Offset of `flags` in a descriptor.
const FLAGS: usize = 14;

/// The device side of a packed virtqueue.
#[derive(Debug)]
pub struct PackedRing {
    addrs: RingAddrs,
    size: u16,
    event_idx: bool,
    /// Position where the next chain starts.
    avail: Pos,
    /// Position of the next used descriptor.
    used: Pos,
    /// Position of the first staged used descriptor; equal to `used` if nothing is staged.
    published: Pos,
    /// Flags of the first staged descriptor, which are written last.
    first_flags: u16,
    /// Slots that are staged.
    staged: u16,
    /// Slots that were taken and not pushed. A driver can make slots available over and over;
    /// because of this number the positions cannot overtake each other.
    taken: u16,
    /// Whether the next publish notifies even if the driver does not ask for it.
    notify_due: bool,
    walker: Walker,
    inflight: Option<Box<PackedTrack>>,
    log: Option<UsedLog>,
}

// SAFETY: only this ring acts as the device on the addresses (`DeviceRing::new`), on any thread.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// Makes a ring.
    ///
    /// # Safety
    /// That of [`super::DeviceRing::new`], which also checked size and alignment.
    pub(super) unsafe fn new(
        size: u16,
        features: RingFeatures,
        addrs: RingAddrs,
        base: u32,
    ) -> Result<Self, RingError> {
        let mut avail = Pos::from_bits(low_u16(base.into()));
        let written = |slot: u16| {
            let flags = addrs.desc.wrapping_add(slot as usize * DESC_LEN + FLAGS);
            // SAFETY: the slot is below the size. By the function's contract the descriptor ring is
            // mapped; its alignment was checked.
            unsafe { raw::load_u16(flags, Ordering::Relaxed) & DESC_F_USED != 0 }
        };
        // With wrap counter 0 at slot 0, some slot must have been used in the lap before.
        if base == 0 && !(0..size).any(written) {
            avail.wrap = true;
        }
        let used = if base >> 16 == 0 { avail } else { Pos::from_bits(low_u16((base >> 16).into())) };
        // This check comes before the distance, which needs slots of the ring.
        if avail.slot >= size || used.slot >= size {
            return Err(RingError::Base(base));
        }
        let taken = used.distance(avail, size);
        if taken > size {
            return Err(RingError::Base(base));
        }
        Ok(Self {
            addrs,
            size,
            event_idx: features.event_idx,
            avail,
            used,
            published: used,
            first_flags: 0,
            staged: 0,
            taken,
            notify_due: false,
            walker: Walker::new(features.indirect),
            inflight: None,
            log: None,
        })
    }

    #[inline(always)]
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Returns the address of the descriptor at a slot.
    #[inline(always)]
    fn slot(&self, slot: u16) -> *mut u8 {
        debug_assert!(slot < self.size);
        // SAFETY: positions stay below the size (`Pos::advance`), so this is inside the descriptor
        // ring.
        unsafe { self.addrs.desc.add(slot as usize * DESC_LEN) }
    }

    /// Returns length, id and flags of the slot where the next chain starts, if the driver made it
    /// available.
    #[inline(always)]
    fn load_avail(&self) -> Option<u64> {
        // One load for the three fields: a single-copy atomic access cannot see the flags, which
        // the driver stores last, without the rest. Acquire: later loads see the address and the
        // chain's other descriptors, too.
        // SAFETY: the descriptor ring stays mapped and is aligned to 16 (`DeviceRing::new`).
        let word = unsafe { raw::load_u64(self.slot(self.avail.slot).wrapping_add(WORD), Ordering::Acquire) };
        let owner = low_u16(word >> 48) & (DESC_F_AVAIL | DESC_F_USED);
        (owner == self.avail.avail_flags()).then_some(word)
    }

    /// Returns whether the driver made the slot at `pos` available.
    fn is_avail(&self, pos: Pos) -> bool {
        // SAFETY: a position's slot is below the size; the descriptor ring stays mapped and aligned
        // (`DeviceRing::new`).
        let word = unsafe { raw::load_u64(self.slot(pos.slot).wrapping_add(WORD), Ordering::Acquire) };
        low_u16(word >> 48) & (DESC_F_AVAIL | DESC_F_USED) == pos.avail_flags()
    }

    #[inline]
    pub(super) fn has_avail(&self) -> bool {
        self.taken < self.size && self.load_avail().is_some()
    }

    #[inline]
    pub(super) fn pop(&mut self, mem: &GuestMemory, chain: &mut Chain) -> Result<bool, Broken> {
        if self.taken >= self.size {
            return Ok(false);
        }
        let Some(word) = self.load_avail() else { return Ok(false) };
        let taken = match self.inflight {
            None => self.fast::<false>(mem, chain, word)?,
            Some(_) => self.fast::<true>(mem, chain, word)?,
        };
        if !taken {
            self.careful(mem, chain)?;
        }
        Ok(true)
    }

    /// Takes the chain at the available position, whose first descriptor's `word` was read already.
    /// Returns false, with nothing taken, if the chain is irregular.
    #[inline(always)]
    fn fast<const TRACK: bool>(
        &mut self,
        mem: &GuestMemory,
        chain: &mut Chain,
        word: u64,
    ) -> Result<bool, Broken> {
        let (desc, slot) = (self.addrs.desc, self.avail.slot as usize);
        let limit = self.size - self.taken;
        let mut fast = Fast::new(&mut self.walker, mem, chain);
        if TRACK && let Some(track) = &mut self.inflight {
            track.begin();
        }
        // SAFETY: the available position is below the size; the ring stays mapped and aligned.
        let addr = unsafe { raw::get_u64(desc.wrapping_add(slot * DESC_LEN)) };
        let first = RawDesc { addr, word };
        // The acquire in `load_avail` orders the loads of the chain's other descriptors. A driver
        // makes a chain available by its first descriptor's flags, so the flags of the others need
        // no check.
        // SAFETY: `slot` is below `size`, and the descriptor ring stays mapped and aligned
        // (`DeviceRing::new`).
        let walked = unsafe {
            fast.packed(desc, self.size.into(), slot, limit, first, |d| {
                if TRACK && let Some(track) = &mut self.inflight {
                    track.note(d);
                }
            })
        };
        let Some((id, descs)) = walked else { return Ok(false) };
        let head = Head::new(id, descs);
        fast.finish(chain, head);
        self.took::<TRACK>(head)?;
        Ok(true)
    }

    /// Takes an irregular chain.
    #[cold]
    #[inline(never)]
    fn careful(&mut self, mem: &GuestMemory, chain: &mut Chain) -> Result<(), Broken> {
        let mut walk = Careful::new(&mut self.walker, mem, chain);
        let mut pos = self.avail;
        let mut left = self.size - self.taken;
        if let Some(track) = &mut self.inflight {
            track.begin();
        }
        let id = loop {
            // SAFETY: a position's slot is below the size; the descriptor ring stays mapped and
            // aligned (`DeviceRing::new`).
            let d = unsafe { RawDesc::read(self.addrs.desc.wrapping_add(pos.slot as usize * DESC_LEN)) };
            left -= 1;
            pos = pos.advance(1, self.size);
            if let Some(track) = &mut self.inflight {
                track.note(d);
            }
            walk.packed(d);
            if d.top() & DESC_F_NEXT == 0 {
                break d.mid();
            }
            if left == 0 {
                // The end of the chain is unknown, and so are the buffer id and the next chain.
                return Err(Broken::Endless { slot: self.avail.slot });
            }
        };
        chain.head = Head::new(id, self.size - self.taken - left);
        self.took::<true>(chain.head)
    }

    /// Records that the device now owns the chain at the available position.
    #[inline(always)]
    fn took<const TRACK: bool>(&mut self, head: Head) -> Result<(), Broken> {
        if TRACK && let Some(track) = &mut self.inflight {
            track.take(head)?;
        }
        self.avail = self.avail.advance(head.descs, self.size);
        self.taken += head.descs;
        Ok(())
    }

    pub(super) fn unpop(&mut self, head: Head) {
        let descs = head.descs.min(self.taken);
        self.avail = self.avail.retreat(descs, self.size);
        self.taken -= descs;
        if let Some(track) = &mut self.inflight {
            track.untake(head.id);
        }
    }

    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        let write = if written != 0 { DESC_F_WRITE } else { 0 };
        let flags = self.used.used_flags() | write;
        let slot = self.slot(self.used.slot);
        // The address is not changed, because a driver does not read it. Length and id are one
        // word, without the flags.
        // SAFETY: the slot is inside the descriptor ring, which stays mapped and aligned
        // (`DeviceRing::new`). The device owns the slots from the used to the available position.
        unsafe { raw::put_u32(slot.wrapping_add(WORD), written) };
        // SAFETY: inside of that slot, which stays mapped and belongs to the device.
        unsafe { raw::put_u16(slot.wrapping_add(WORD + 4), head.id) };
        if self.staged == 0 {
            self.first_flags = flags;
        } else {
            // The driver reads used descriptors in order, and the first one of the batch still
            // stops it.
            // SAFETY: inside of that slot, which stays mapped and belongs to the device.
            unsafe { raw::put_u16(slot.wrapping_add(FLAGS), flags) };
        }
        // `pop` returns no chain with zero or too many slots.
        let descs = head.descs.clamp(1, self.size);
        self.used = self.used.advance(descs, self.size);
        self.staged = self.staged.saturating_add(descs);
        self.taken = self.taken.saturating_sub(descs);
        if let Some(track) = &mut self.inflight {
            track.stage(head.id);
        }
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.staged == 0 {
            return false;
        }
        let (old, new, staged) = (self.published, self.used, core::mem::take(&mut self.staged));
        if let Some(track) = &mut self.inflight {
            track.before_publish(new);
        }
        // Release: the driver sees the batch's other descriptors, the length and id of this one,
        // and the device's writes to the buffers before the flags that it waits for.
        // SAFETY: inside the descriptor ring, which is aligned to 16.
        unsafe {
            raw::store_u16(self.slot(old.slot).wrapping_add(FLAGS), self.first_flags, Ordering::Release)
        };
        self.published = new;
        // A full barrier between the flags and the driver's event suppression structure. The driver
        // stores the structure and then reads the flags again, so one side sees the store of the
        // other (2.8.10).
        fence(Ordering::SeqCst);
        if self.inflight.is_some() || self.log.is_some() {
            self.after_publish(old, staged, new);
        }
        let due = core::mem::take(&mut self.notify_due);
        due | self.wants_notification(staged, new)
    }

    /// The work of `publish` for a tracked or logged queue only.
    #[cold]
    fn after_publish(&mut self, old: Pos, staged: u16, new: Pos) {
        if let Some(track) = &mut self.inflight {
            track.after_publish(new);
        }
        if let Some(UsedLog { log, desc_addr, .. }) = &self.log {
            // The slots between used descriptors were not written. Marking them, too, costs
            // nothing.
            let count = usize::from(staged.min(self.size));
            let to_end = count.min((self.size - old.slot) as usize);
            let at = |slot: usize| desc_addr.wrapping_add((DESC_LEN * slot) as u64);
            log.mark(at(old.slot as usize), (DESC_LEN * to_end) as u64);
            log.mark(at(0), (DESC_LEN * (count - to_end)) as u64);
        }
    }

    #[inline(always)]
    fn wants_notification(&self, staged: u16, new: Pos) -> bool {
        // Position and flags are read in one load, so that they belong together.
        // SAFETY: the driver's event suppression structure stays mapped and is aligned to 4.
        let event = unsafe { raw::load_u32(self.addrs.driver, Ordering::Relaxed) };
        match low_u16((event >> 16).into()) & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => {
                let at = Pos::from_bits(low_u16(event.into()));
                // In terms of this lap, a slot of the lap before is one ring size less.
                let slot = if at.wrap == new.wrap { at.slot } else { at.slot.wrapping_sub(self.size) };
                need_event(slot, new.slot, new.slot.wrapping_sub(staged))
            }
            _ => true,
        }
    }

    #[inline]
    pub(super) fn disable_kick(&mut self) {
        self.set_event(0, EVENT_DISABLE);
    }

    pub(super) fn allow_kicks(&mut self) {
        self.set_event(0, EVENT_ENABLE);
    }

    #[inline]
    pub(super) fn enable_kick_after(&mut self, count: u16) -> bool {
        let mut ahead = 0;
        if self.event_idx {
            ahead = count.clamp(1, self.size) - 1;
            self.set_event(self.avail.advance(ahead, self.size).to_bits(), EVENT_DESC);
        } else {
            self.set_event(0, EVENT_ENABLE);
        }
        // A full barrier between the request for a kick and the look at the ring. The driver has
        // one between its flags and the read of the request.
        fence(Ordering::SeqCst);
        let last = self.avail.advance(ahead, self.size);
        self.taken + ahead < self.size && self.is_avail(last)
    }

    /// Writes the device's event suppression structure, both halves at once.
    #[inline]
    fn set_event(&mut self, at: u16, flags: u16) {
        // SAFETY: the structure stays mapped and is aligned to 4.
        unsafe {
            raw::store_u32(self.addrs.device, u32::from(at) | u32::from(flags) << 16, Ordering::Relaxed)
        };
        if let Some(UsedLog { log, device_addr, .. }) = &self.log {
            log.mark(*device_addr, 4);
        }
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.avail.to_bits()) | u32::from(self.published.to_bits()) << 16
    }

    pub(super) fn used_index(&self) -> u16 {
        self.published.to_bits()
    }

    pub(super) fn set_all_readable(&mut self) {
        self.walker.set_all_readable();
    }

    pub(super) fn set_used_log(&mut self, log: Option<UsedLog>) {
        self.log = log;
    }

    pub(super) fn set_inflight(&mut self, inflight: Inflight) -> Result<Vec<Replay>, InflightError> {
        // SAFETY: the descriptor ring has `size` slots and stays mapped, and only this ring acts as
        // the device on it (`DeviceRing::new`).
        let recovered =
            unsafe { PackedTrack::recover(inflight, self.size, self.addrs.desc, self.published)? };
        self.used = recovered.used;
        self.published = recovered.used;
        self.taken = recovered.taken;
        self.avail = recovered.used.advance(recovered.taken, self.size);
        self.staged = 0;
        self.notify_due = true;
        self.inflight = Some(Box::new(recovered.track));
        Ok(recovered.replays)
    }

    pub(super) fn replay(
        &mut self,
        mem: &GuestMemory,
        replay: &Replay,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        let mut walk = Careful::new(&mut self.walker, mem, chain);
        if let Some(track) = &self.inflight {
            track.each_desc(replay, |d| walk.packed(d))?;
        }
        chain.head = replay.head();
        Ok(())
    }
}
