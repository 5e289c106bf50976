//! Split virtqueues, device side (Virtio 1.3, 2.7).
//!
//! Called by the queue's worker. Descriptor table and available ring belong to the driver and are only read; the used
//! ring is ours. Indices run freely modulo 2^16; slots are the index masked by the size, a power of two.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{Ordering, fence};

use crate::bits::low_u16;
use crate::inflight::{Inflight, InflightError, Replay, SplitNotes, SplitTrack};
use crate::mem::GuestMemory;
use crate::raw;

use super::walk::{Careful, Fast, Walker};
use super::{Broken, Chain, Head, RingAddrs, RingFeatures, UsedLog, need_event};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const USED_F_NO_NOTIFY: u16 = 1;

/// Both rings start with `flags` and `idx`, 16 bits each; the elements follow.
const IDX: usize = 2;
const ELEMS: usize = 4;
/// Bytes of a used element: id and length.
const USED_LEN: usize = 8;

/// The device side of a split virtqueue.
#[derive(Debug)]
pub struct SplitRing {
    addrs: RingAddrs,
    mask: u16,
    event_idx: bool,
    /// The next available index to take.
    next_avail: u16,
    /// The driver's index as last seen; `next_avail..seen_avail` is known to be there.
    seen_avail: u16,
    /// The next used index to fill; `published..next_used` is staged.
    next_used: u16,
    published: u16,
    /// Notify with the next publish, whatever the driver says.
    notify_due: bool,
    walker: Walker,
    inflight: Option<Box<SplitTrack>>,
    log: Option<UsedLog>,
}

// SAFETY: the addresses are the ring's alone on the device side (`DeviceRing::new`), on whichever thread it is.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// # Safety
    /// As [`super::DeviceRing::new`], which also checked size and alignment.
    pub(super) unsafe fn new(size: u16, features: RingFeatures, addrs: RingAddrs, base: u16) -> Self {
        // SAFETY: the used ring is mapped and aligned by the caller's promise.
        let used = unsafe { raw::load_u16(addrs.device.add(IDX), Ordering::Relaxed) };
        Self {
            addrs,
            mask: size - 1,
            event_idx: features.event_idx,
            next_avail: base,
            seen_avail: base,
            next_used: used,
            published: used,
            notify_due: false,
            walker: Walker::new(features.indirect),
            inflight: None,
            log: None,
        }
    }

    #[inline(always)]
    pub(super) fn size(&self) -> u16 {
        self.mask + 1
    }

    /// The driver's index. Acquire pairs with the driver's release of it: ring entries and descriptors that were
    /// written before are seen after.
    #[inline(always)]
    fn load_avail(&self) -> u16 {
        // SAFETY: the available ring stays mapped and is aligned to 2 (`DeviceRing::new`).
        unsafe { raw::load_u16(self.addrs.driver.add(IDX), Ordering::Acquire) }
    }

    #[inline]
    pub(super) fn has_avail(&self) -> bool {
        self.seen_avail != self.next_avail || self.load_avail() != self.next_avail
    }

    #[inline]
    pub(super) fn seen_waiting(&self) -> u16 {
        self.seen_avail.wrapping_sub(self.next_avail)
    }

    #[inline]
    pub(super) fn pop(&mut self, mem: &GuestMemory, chain: &mut Chain) -> Result<bool, Broken> {
        if self.next_avail == self.seen_avail {
            let avail = self.load_avail();
            let count = avail.wrapping_sub(self.next_avail);
            if count == 0 {
                return Ok(false);
            }
            if count > self.size() {
                return Err(Broken::AvailIndex { avail, next: self.next_avail });
            }
            self.seen_avail = avail;
        }
        let slot = (self.next_avail & self.mask) as usize;
        // SAFETY: the slot is below the size; the ring stays mapped.
        let head = unsafe { raw::get_u16(self.addrs.driver.add(ELEMS + 2 * slot)) };
        self.pop_head(mem, chain, head)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(track) = &mut self.inflight {
            track.take(head);
        }
        Ok(true)
    }

    pub(super) fn unpop(&mut self, head: Head) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        if let Some(track) = &mut self.inflight {
            track.untake(head.id);
        }
    }

    #[inline(always)]
    pub(super) fn pop_head(&mut self, mem: &GuestMemory, chain: &mut Chain, head: u16) -> Result<(), Broken> {
        if head > self.mask {
            return Err(Broken::Head { head, size: self.size() });
        }
        let (desc, size) = (self.addrs.desc, self.size() as usize);
        let mut fast = Fast::new(&mut self.walker, mem, chain);
        // SAFETY: the descriptor table has `size` descriptors, stays mapped and is aligned to 16 (`DeviceRing::new`).
        if let Some(descs) = unsafe { fast.split(desc, size, head) } {
            fast.finish(chain, Head::new(head, descs));
        } else {
            self.careful(mem, chain, head);
        }
        Ok(())
    }

    /// Walks a chain that is odd; `head` is below the size.
    #[cold]
    #[inline(never)]
    fn careful(&mut self, mem: &GuestMemory, chain: &mut Chain, head: u16) {
        let (desc, size) = (self.addrs.desc, self.size() as usize);
        // SAFETY: `pop_head` checked `head`; the table has `size` descriptors, is mapped and aligned (`DeviceRing::new`).
        let descs = unsafe { Careful::new(&mut self.walker, mem, chain).split(desc, size, head) };
        chain.head = Head::new(head, descs);
    }

    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        let slot = (self.next_used & self.mask) as usize;
        // SAFETY: the slot is below the size; the used ring stays mapped, is aligned to 4 and ours to write.
        unsafe {
            let elem = self.addrs.device.add(ELEMS + USED_LEN * slot);
            raw::put_u32(elem, u32::from(head.id));
            raw::put_u32(elem.add(4), written);
        }
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(track) = &mut self.inflight {
            track.stage(head.id);
        }
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        if let Some(track) = &mut self.inflight {
            track.before_publish();
        }
        // Release: the elements, and what the device wrote to the buffers, are seen before the index.
        // SAFETY: the used ring stays mapped and is aligned to 4.
        unsafe { raw::store_u16(self.addrs.device.add(IDX), new, Ordering::Release) };
        self.published = new;
        // A full barrier between our index and the driver's event index or flags: the driver stores the latter and
        // then looks at the index again, so one of the two sees the other (2.7.7, 2.7.10).
        fence(Ordering::SeqCst);
        if self.inflight.is_some() || self.log.is_some() {
            self.after_publish(old, new);
        }
        let due = core::mem::take(&mut self.notify_due);
        due | self.wants_notification(old, new)
    }

    /// What only a tracked or logged queue does.
    #[cold]
    fn after_publish(&mut self, old: u16, new: u16) {
        if let Some(track) = &mut self.inflight {
            track.after_publish(new);
        }
        if let Some(UsedLog { log, device_addr, .. }) = &self.log {
            // More than a ring was staged only if someone pushed what was not popped; then all of it was written.
            let count = new.wrapping_sub(old).min(self.size()) as usize;
            let first = (old & self.mask) as usize;
            let to_end = count.min(self.size() as usize - first);
            let elem = |slot: usize| device_addr.wrapping_add((ELEMS + USED_LEN * slot) as u64);
            log.mark(elem(first), (USED_LEN * to_end) as u64);
            log.mark(elem(0), (USED_LEN * (count - to_end)) as u64);
            log.mark(device_addr.wrapping_add(IDX as u64), 2);
        }
    }

    #[inline(always)]
    fn wants_notification(&self, old: u16, new: u16) -> bool {
        if self.event_idx {
            // `used_event` follows the available ring (2.7.6).
            // SAFETY: `ring_sizes` includes it.
            let event = unsafe {
                raw::load_u16(self.addrs.driver.add(ELEMS + 2 * self.size() as usize), Ordering::Relaxed)
            };
            need_event(event, new, old)
        } else {
            // SAFETY: the available ring stays mapped.
            let flags = unsafe { raw::load_u16(self.addrs.driver, Ordering::Relaxed) };
            flags & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    #[inline]
    pub(super) fn disable_kick(&mut self) {
        if !self.event_idx {
            self.set_control(0, USED_F_NO_NOTIFY);
        }
    }

    pub(super) fn allow_kicks(&mut self) {
        if !self.event_idx {
            self.set_control(0, 0);
        }
    }

    #[inline]
    pub(super) fn enable_kick_after(&mut self, count: u16) -> bool {
        let mut ahead = 0;
        if self.event_idx {
            ahead = count.clamp(1, self.size()) - 1;
            // `avail_event` follows the used ring (2.7.8); the kick comes when the index passes it (2.7.7.2).
            let event = self.next_avail.wrapping_add(ahead);
            self.set_control(ELEMS + USED_LEN * self.size() as usize, event);
        } else {
            self.set_control(0, 0);
        }
        // A full barrier between the request for a kick and the look at the index; the driver has its like between its
        // index and the look at our request.
        fence(Ordering::SeqCst);
        self.load_avail().wrapping_sub(self.next_avail) > ahead
    }

    /// Writes one of the two 16-bit fields of the used ring that steer the driver.
    #[inline]
    fn set_control(&mut self, offset: usize, value: u16) {
        // SAFETY: both offsets are inside of the used ring as `ring_sizes` has it, and even.
        unsafe { raw::store_u16(self.addrs.device.add(offset), value, Ordering::Relaxed) };
        if let Some(UsedLog { log, device_addr, .. }) = &self.log {
            log.mark(device_addr.wrapping_add(offset as u64), 2);
        }
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    pub(super) fn used_index(&self) -> u16 {
        self.published
    }

    pub(super) fn set_all_readable(&mut self) {
        self.walker.set_all_readable();
    }

    pub(super) fn set_used_log(&mut self, log: Option<UsedLog>) {
        self.log = log;
    }

    pub(super) fn set_inflight(&mut self, inflight: Inflight) -> Result<Vec<Replay>, InflightError> {
        let (track, replays) = SplitTrack::recover(inflight, self.size(), self.published)?;
        // Requests are taken in the ring's order, so the next one follows from how many there are: at most the ring's size.
        self.next_avail = self.published.wrapping_add(low_u16(replays.len() as u64));
        self.seen_avail = self.next_avail;
        self.next_used = self.published;
        self.notify_due = true;
        self.inflight = Some(Box::new(track));
        Ok(replays)
    }

    pub(super) fn notes(&self) -> Option<SplitNotes> {
        self.inflight.as_ref().map(|track| track.notes())
    }

    pub(super) fn replay(
        &mut self,
        mem: &GuestMemory,
        replay: &Replay,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        self.pop_head(mem, chain, replay.head().id)
    }
}
