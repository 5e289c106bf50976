//! Split virtqueues, device side (Virtio 1.3, 2.7).
//!
//! The queue's worker calls it. The driver owns the descriptor table and the available ring, which
//! are only read here. The device owns the used ring. Indices run freely modulo 2^16. A slot is the
//! index modulo the size, which is a power of two.

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
    /// The driver's index when it was last read. The requests in `next_avail..seen_avail` are known
    /// to be there.
    seen_avail: u16,
    /// The next used index to fill; `published..next_used` is staged.
    next_used: u16,
    published: u16,
    /// Whether the next publish notifies even if the driver does not ask for it.
    notify_due: bool,
    walker: Walker,
    inflight: Option<Box<SplitTrack>>,
    log: Option<UsedLog>,
}

// SAFETY: only this ring acts as the device on the addresses (`DeviceRing::new`), on any thread.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// Makes a ring.
    ///
    /// # Safety
    /// That of [`super::DeviceRing::new`], which also checked size and alignment.
    pub(super) unsafe fn new(size: u16, features: RingFeatures, addrs: RingAddrs, base: u16) -> Self {
        // SAFETY: by the function's contract the used ring is mapped; its alignment was checked.
        let used = unsafe { raw::load_u16(addrs.device.wrapping_add(IDX), Ordering::Relaxed) };
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

    /// Returns the driver's index. The acquire pairs with the driver's release: ring entries and
    /// descriptors that were written before are seen after.
    #[inline(always)]
    fn load_avail(&self) -> u16 {
        // SAFETY: the available ring stays mapped and is aligned to 2 (`DeviceRing::new`).
        unsafe { raw::load_u16(self.addrs.driver.wrapping_add(IDX), Ordering::Acquire) }
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
        let head = unsafe { raw::get_u16(self.addrs.driver.wrapping_add(ELEMS + 2 * slot)) };
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
        // SAFETY: the descriptor table has `size` descriptors, stays mapped and is aligned to 16
        // (`DeviceRing::new`).
        if let Some(descs) = unsafe { fast.split(desc, size, head) } {
            fast.finish(chain, Head::new(head, descs));
        } else {
            self.careful(mem, chain, head);
        }
        Ok(())
    }

    /// Walks an irregular chain. `head` is below the size.
    #[cold]
    #[inline(never)]
    fn careful(&mut self, mem: &GuestMemory, chain: &mut Chain, head: u16) {
        let (desc, size) = (self.addrs.desc, self.size() as usize);
        // SAFETY: `pop_head` checked `head`; the table has `size` descriptors, is mapped and
        // aligned (`DeviceRing::new`).
        let descs = unsafe { Careful::new(&mut self.walker, mem, chain).split(desc, size, head) };
        chain.head = Head::new(head, descs);
    }

    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        let slot = (self.next_used & self.mask) as usize;
        let elem = self.addrs.device.wrapping_add(ELEMS + USED_LEN * slot);
        // SAFETY: the slot is below the size, so the element is in the used ring. The caller of
        // `DeviceRing::new` promises that it stays mapped and that only this ring writes it; its
        // alignment was checked there.
        unsafe { raw::put_u32(elem, u32::from(head.id)) };
        // SAFETY: bytes 4 to 7 of an element of the used ring, which stays mapped and aligned.
        unsafe { raw::put_u32(elem.wrapping_add(4), written) };
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
        // Release: the driver sees the elements, and the device's writes to the buffers, before the
        // index.
        // SAFETY: the used ring stays mapped and is aligned to 4.
        unsafe { raw::store_u16(self.addrs.device.wrapping_add(IDX), new, Ordering::Release) };
        self.published = new;
        // A full barrier between the index and the driver's event index or flags. The driver stores
        // those and then reads the index again, so one side sees the store of the other (2.7.7,
        // 2.7.10).
        fence(Ordering::SeqCst);
        if self.inflight.is_some() || self.log.is_some() {
            self.after_publish(old, new);
        }
        let due = core::mem::take(&mut self.notify_due);
        due | self.wants_notification(old, new)
    }

    /// The work of `publish` for a tracked or logged queue only.
    #[cold]
    fn after_publish(&mut self, old: u16, new: u16) {
        if let Some(track) = &mut self.inflight {
            track.after_publish(new);
        }
        if let Some(UsedLog { log, device_addr, .. }) = &self.log {
            // More elements than the ring has are staged only if some were pushed that were not
            // popped. Then all of the ring was written.
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
                raw::load_u16(
                    self.addrs.driver.wrapping_add(ELEMS + 2 * self.size() as usize),
                    Ordering::Relaxed,
                )
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
            // `avail_event` follows the used ring (2.7.8); the kick comes when the index passes it
            // (2.7.7.2).
            let event = self.next_avail.wrapping_add(ahead);
            self.set_control(ELEMS + USED_LEN * self.size() as usize, event);
        } else {
            self.set_control(0, 0);
        }
        // A full barrier between the request for a kick and the look at the index. The driver has
        // one between its index and the read of the request.
        fence(Ordering::SeqCst);
        self.load_avail().wrapping_sub(self.next_avail) > ahead
    }

    /// Writes one of the two 16-bit fields of the used ring that control the driver's
    /// notifications.
    #[inline]
    fn set_control(&mut self, offset: usize, value: u16) {
        // SAFETY: both offsets are inside the used ring, as `ring_sizes` defines it, and even.
        unsafe { raw::store_u16(self.addrs.device.wrapping_add(offset), value, Ordering::Relaxed) };
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
        // Requests are taken in the ring's order. The next one therefore follows from their number,
        // which is at most the ring's size.
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
