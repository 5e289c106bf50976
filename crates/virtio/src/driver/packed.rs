//! Packed virtqueues, driver side (Virtio 1.3, 2.8).

use core::sync::atomic::{Ordering, fence};

use crate::bits::{Table, low_u16, low_u32};
use crate::desc::{DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, DESC_LEN, Pos};
use crate::raw;
use crate::ring::{EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, RingAddrs, RingFeatures, need_event};

use super::{DriverSeg, Full, Indirect, Used};

const WORD: usize = 8;
const FLAGS: usize = 14;

/// The driver side of a packed virtqueue.
#[derive(Debug)]
pub struct PackedDriver {
    addrs: RingAddrs,
    size: u16,
    event_idx: bool,
    /// First free buffer id. The free ids are a list through `next`.
    free_id: u16,
    free: u16,
    /// Position of the next chain.
    avail: Pos,
    /// Position of the first staged chain, and the flags of its first descriptor, which are written
    /// last.
    published: Pos,
    first_flags: u16,
    staged: u16,
    /// Position of the next used descriptor.
    used: Pos,
    next: Table,
    /// For an id in flight, the slots of its chain, otherwise 0; and the cookie.
    descs: Table,
    cookies: Table,
}

// SAFETY: only this ring acts as the driver on the addresses (`DriverRing::new`), on any thread.
unsafe impl Send for PackedDriver {}

impl PackedDriver {
    pub(super) fn new(size: u16, features: RingFeatures, addrs: RingAddrs) -> Self {
        let start = Pos { slot: 0, wrap: true };
        Self {
            addrs,
            size,
            event_idx: features.event_idx,
            free_id: 0,
            free: size,
            avail: start,
            published: start,
            first_flags: 0,
            staged: 0,
            used: start,
            next: Table::list(size),
            descs: Table::zeroed(size as usize),
            cookies: Table::zeroed(size as usize),
        }
    }

    #[inline]
    pub(super) fn add(
        &mut self,
        segs: &[DriverSeg],
        indirect: Option<Indirect>,
        cookie: u16,
    ) -> Result<(), Full> {
        let id = self.free_id;
        let descs = match indirect {
            Some(table) if segs.len() > 1 => {
                if segs.len() > table.cap as usize || self.free == 0 {
                    return Err(Full);
                }
                for (i, seg) in segs.iter().enumerate() {
                    let write = if seg.writable { DESC_F_WRITE } else { 0 };
                    let desc = table.ptr.wrapping_add(i * DESC_LEN);
                    // SAFETY: the index is below the table's capacity. The caller of
                    // `DriverRing::new` promises that tables are as `Indirect` says.
                    unsafe { raw::put_u64(desc, seg.addr) };
                    let word = u64::from(seg.len) | u64::from(write) << 48;
                    // SAFETY: bytes 8 to 15 of a descriptor of the table, whose index is below its
                    // capacity.
                    unsafe { raw::put_u64(desc.wrapping_add(WORD), word) };
                }
                self.slot(table.addr, low_u32((segs.len() * DESC_LEN) as u64), id, DESC_F_INDIRECT, true);
                1
            }
            _ => {
                if segs.is_empty() || segs.len() > self.free as usize {
                    return Err(Full);
                }
                for (i, seg) in segs.iter().enumerate() {
                    let write = if seg.writable { DESC_F_WRITE } else { 0 };
                    let next = if i + 1 < segs.len() { DESC_F_NEXT } else { 0 };
                    self.slot(seg.addr, seg.len, id, write | next, i == 0);
                }
                // At most `free`.
                low_u16(segs.len() as u64)
            }
        };
        self.staged += descs;
        self.free -= descs;
        self.free_id = self.next.get(id);
        self.descs.set(id, descs);
        self.cookies.set(id, cookie);
        Ok(())
    }

    /// Fills the next slot, but holds back the flags of the batch's first one.
    #[inline(always)]
    fn slot(&mut self, addr: u64, len: u32, id: u16, flags: u16, head: bool) {
        let flags = flags | self.avail.avail_flags();
        let desc = self.addrs.desc.wrapping_add(self.avail.slot as usize * DESC_LEN);
        // SAFETY: `advance` keeps positions below the size, and the caller of `DriverRing::new`
        // promises that the descriptor ring stays mapped and aligned. The driver may write this
        // slot, because `free` counts it.
        unsafe { raw::put_u64(desc, addr) };
        // SAFETY: inside of that slot, which stays mapped and belongs to the driver.
        unsafe { raw::put_u32(desc.wrapping_add(WORD), len) };
        // SAFETY: inside of that slot, which stays mapped and belongs to the driver.
        unsafe { raw::put_u16(desc.wrapping_add(WORD + 4), id) };
        if head && self.staged == 0 {
            self.first_flags = flags;
        } else {
            // The device reads chains in order, and the first one of the batch still stops it.
            // SAFETY: inside of that slot, which stays mapped and belongs to the driver.
            unsafe { raw::put_u16(desc.wrapping_add(FLAGS), flags) };
        }
        self.avail = self.avail.advance(1, self.size);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.staged == 0 {
            return false;
        }
        let staged = core::mem::take(&mut self.staged);
        // Release: the device sees the whole batch before its first flags.
        let flags = self.addrs.desc.wrapping_add(self.published.slot as usize * DESC_LEN + FLAGS);
        // SAFETY: `advance` keeps positions below the size, and the caller of `DriverRing::new`
        // promises that the descriptor ring stays mapped and aligned.
        unsafe { raw::store_u16(flags, self.first_flags, Ordering::Release) };
        // A full barrier between the flags and the read of the device's request for a kick. Its
        // counterpart is in `enable_kick`.
        fence(Ordering::SeqCst);
        // SAFETY: the device area is one event structure of 4 bytes, which stays mapped and
        // aligned: the caller of `DriverRing::new` promises it.
        let event = unsafe { raw::load_u32(self.addrs.device, Ordering::Relaxed) };
        self.published = self.avail;
        match low_u16((event >> 16).into()) {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => {
                let at = Pos::from_bits(low_u16(event.into()));
                let new = self.avail;
                let slot = if at.wrap == new.wrap { at.slot } else { at.slot.wrapping_sub(self.size) };
                need_event(slot, new.slot, new.slot.wrapping_sub(staged))
            }
            _ => true,
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.load_used().is_some()
    }

    /// Returns length and id of the next used descriptor, if it is there.
    #[inline(always)]
    fn load_used(&self) -> Option<u64> {
        // Acquire: the data is seen after the flags; length and id come in the same load.
        let at = self.addrs.desc.wrapping_add(self.used.slot as usize * DESC_LEN + WORD);
        // SAFETY: `advance` keeps positions below the size, and the caller of `DriverRing::new`
        // promises that the descriptor ring stays mapped and aligned.
        let word = unsafe { raw::load_u64(at, Ordering::Acquire) };
        let owner = low_u16(word >> 48) & (DESC_F_AVAIL | DESC_F_USED);
        (self.free < self.size && owner == self.used.used_flags()).then_some(word)
    }

    #[inline]
    pub(super) fn poll(&mut self) -> Option<Used> {
        let word = self.load_used()?;
        let (len, id, flags) = (low_u32(word), low_u16(word >> 32), low_u16(word >> 48));
        // After an id that is not in flight, the position of the next descriptor is unknown. The
        // ring then stops.
        let descs = Some(self.descs.take(id)).filter(|&descs| descs != 0)?;
        self.used = self.used.advance(descs, self.size);
        self.next.set(id, self.free_id);
        self.free_id = id;
        self.free += descs;
        // Without the flag the length is undefined (2.8.6).
        let len = if flags & DESC_F_WRITE != 0 { len } else { 0 };
        Some(Used { cookie: self.cookies.get(id), len })
    }

    #[inline]
    pub(super) fn disable_notify(&mut self) {
        self.set_event(0, EVENT_DISABLE);
    }

    #[inline]
    pub(super) fn enable_notify(&mut self) -> bool {
        self.enable_notify_after(1)
    }

    #[inline]
    pub(super) fn enable_notify_after(&mut self, count: u16) -> bool {
        if self.event_idx {
            let at = self.used.advance(count.clamp(1, self.size) - 1, self.size);
            self.set_event(at.to_bits(), EVENT_DESC);
        } else {
            self.set_event(0, EVENT_ENABLE);
        }
        // A full barrier between the request and the look at the ring. Its counterpart is in the
        // device's `publish`.
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Writes the driver's event suppression structure, both halves at once.
    #[inline]
    fn set_event(&mut self, at: u16, flags: u16) {
        // SAFETY: the driver owns the structure, which is mapped and aligned to 4.
        unsafe {
            raw::store_u32(self.addrs.driver, u32::from(at) | u32::from(flags) << 16, Ordering::Relaxed)
        };
    }

    #[inline]
    pub(super) fn free_descs(&self) -> u16 {
        self.free
    }
}
