//! Split virtqueues, driver side (Virtio 1.3, 2.7).

use core::sync::atomic::{Ordering, fence};

use crate::bits::{Table, low_u16, low_u32};
use crate::desc::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN};
use crate::raw;
use crate::ring::{RingAddrs, RingFeatures, need_event};

use super::{DriverSeg, Full, Indirect, Used};

const IDX: usize = 2;
const ELEMS: usize = 4;
const USED_LEN: usize = 8;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`, and `VIRTQ_USED_F_NO_NOTIFY`.
const SUPPRESS: u16 = 1;

/// The driver side of a split virtqueue.
#[derive(Debug)]
pub struct SplitDriver {
    addrs: RingAddrs,
    mask: u16,
    event_idx: bool,
    free_head: u16,
    free: u16,
    /// The next available index to fill; `published..next_avail` is staged.
    next_avail: u16,
    published: u16,
    /// The next used index to read.
    next_used: u16,
    /// Links of the free list and of chains, which the device cannot overwrite.
    next: Table,
    /// For a head in flight, the descriptors of its chain, otherwise 0; and the cookie.
    descs: Table,
    cookies: Table,
}

// SAFETY: only this ring acts as the driver on the addresses (`DriverRing::new`), on any thread.
unsafe impl Send for SplitDriver {}

impl SplitDriver {
    pub(super) fn new(size: u16, features: RingFeatures, addrs: RingAddrs) -> Self {
        Self {
            addrs,
            mask: size - 1,
            event_idx: features.event_idx,
            free_head: 0,
            free: size,
            next_avail: 0,
            published: 0,
            next_used: 0,
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
        let head = self.free_head;
        let descs = match indirect {
            Some(table) if segs.len() > 1 => {
                if segs.len() > table.cap as usize || self.free == 0 {
                    return Err(Full);
                }
                for (i, seg) in (0..).zip(segs) {
                    let more = i as usize + 1 < segs.len();
                    // SAFETY: the index is below the table's capacity. The caller promises what
                    // `Indirect` says.
                    unsafe { write_desc(table.ptr, i, seg, i + 1, more) };
                }
                let len = low_u32((segs.len() * DESC_LEN) as u64);
                // SAFETY: the free list has indices below the size; the table is mapped
                // (`DriverRing::new`).
                unsafe { put_desc(self.addrs.desc, head, table.addr, len, DESC_F_INDIRECT, 0) };
                self.free_head = self.next.get(head);
                1
            }
            _ => {
                if segs.is_empty() || segs.len() > self.free as usize {
                    return Err(Full);
                }
                let mut index = head;
                for (i, seg) in segs.iter().enumerate() {
                    let next = self.next.get(index);
                    // SAFETY: the free list has indices below the size; the table is mapped
                    // (`DriverRing::new`).
                    unsafe { write_desc(self.addrs.desc, index, seg, next, i + 1 < segs.len()) };
                    index = next;
                }
                self.free_head = index;
                // At most `free`.
                low_u16(segs.len() as u64)
            }
        };
        self.free -= descs;
        self.descs.set(head, descs);
        self.cookies.set(head, cookie);
        let slot = (self.next_avail & self.mask) as usize;
        // SAFETY: the slot is below the size. The driver owns the available ring, which is mapped.
        unsafe { raw::put_u16(self.addrs.driver.wrapping_add(ELEMS + 2 * slot), head) };
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_avail);
        if old == new {
            return false;
        }
        // Release: the device sees descriptors and ring entries before the index.
        // SAFETY: the available ring stays mapped and aligned: the caller of `DriverRing::new`
        // promises it.
        unsafe { raw::store_u16(self.addrs.driver.wrapping_add(IDX), new, Ordering::Release) };
        self.published = new;
        // A full barrier between the index and the read of the device's request for a kick. Its
        // counterpart is in `enable_kick`.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let at = ELEMS + USED_LEN * (self.mask as usize + 1);
            // SAFETY: `ring_sizes` has room for the event field after the used ring, which stays
            // mapped and aligned: the caller of `DriverRing::new` promises it.
            let event = unsafe { raw::load_u16(self.addrs.device.wrapping_add(at), Ordering::Relaxed) };
            need_event(event, new, old)
        } else {
            // SAFETY: the used ring begins with its flags. It stays mapped and aligned: the caller
            // of `DriverRing::new` promises it.
            let flags = unsafe { raw::load_u16(self.addrs.device, Ordering::Relaxed) };
            flags & SUPPRESS == 0
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        // Acquire: the elements and their data are seen after the index.
        // SAFETY: the used ring stays mapped and aligned.
        unsafe { raw::load_u16(self.addrs.device.wrapping_add(IDX), Ordering::Acquire) != self.next_used }
    }

    #[inline]
    pub(super) fn poll(&mut self) -> Option<Used> {
        while self.has_used() {
            let slot = (self.next_used & self.mask) as usize;
            let elem = self.addrs.device.wrapping_add(ELEMS + USED_LEN * slot);
            // SAFETY: the slot is below the size, so the element is in the used ring, which stays
            // mapped and aligned: the caller of `DriverRing::new` promises it.
            let id = unsafe { raw::get_u32(elem) };
            // SAFETY: bytes 4 to 7 of an element of the used ring, which stays mapped and aligned.
            let len = unsafe { raw::get_u32(elem.wrapping_add(4)) };
            self.next_used = self.next_used.wrapping_add(1);
            let Ok(head) = u16::try_from(id) else { continue };
            let descs = self.descs.take(head);
            if descs == 0 {
                continue;
            }
            // The chain is put back on the free list as it is.
            let last = (1..descs).fold(head, |index, _| self.next.get(index));
            self.next.set(last, self.free_head);
            self.free_head = head;
            self.free += descs;
            return Some(Used { cookie: self.cookies.get(head), len });
        }
        None
    }

    #[inline]
    pub(super) fn disable_notify(&mut self) {
        if !self.event_idx {
            // SAFETY: the driver owns the available ring, which is mapped.
            unsafe { raw::store_u16(self.addrs.driver, SUPPRESS, Ordering::Relaxed) };
        }
    }

    #[inline]
    pub(super) fn enable_notify(&mut self) -> bool {
        self.enable_notify_after(1)
    }

    #[inline]
    pub(super) fn enable_notify_after(&mut self, count: u16) -> bool {
        let count = if self.event_idx { count.max(1) } else { 1 };
        if self.event_idx {
            let at = ELEMS + 2 * (self.mask as usize + 1);
            let event = self.next_used.wrapping_add(count - 1);
            // SAFETY: `ring_sizes` has room for the event field after the available ring, which
            // stays mapped and aligned: the caller of `DriverRing::new` promises it.
            unsafe { raw::store_u16(self.addrs.driver.wrapping_add(at), event, Ordering::Relaxed) };
        } else {
            // SAFETY: the available ring begins with its flags. It stays mapped and aligned: the
            // caller of `DriverRing::new` promises it.
            unsafe { raw::store_u16(self.addrs.driver, 0, Ordering::Relaxed) };
        }
        // A full barrier between the request and the look at the index. Its counterpart is in the
        // device's `publish`.
        fence(Ordering::SeqCst);
        // SAFETY: the used ring stays mapped and aligned. Acquire: as in `has_used`.
        let used = unsafe { raw::load_u16(self.addrs.device.wrapping_add(IDX), Ordering::Acquire) };
        used.wrapping_sub(self.next_used) >= count
    }

    #[inline]
    pub(super) fn free_descs(&self) -> u16 {
        self.free
    }
}

/// Writes a descriptor for a buffer.
///
/// # Safety
/// That of [`put_desc`].
#[inline(always)]
unsafe fn write_desc(table: *mut u8, index: u16, seg: &DriverSeg, next: u16, more: bool) {
    let write = if seg.writable { DESC_F_WRITE } else { 0 };
    let (flags, next) = if more { (write | DESC_F_NEXT, next) } else { (write, 0) };
    // SAFETY: the caller promises that the table is writable up to this descriptor, and aligned.
    unsafe { put_desc(table, index, seg.addr, seg.len, flags, next) };
}

/// Writes a descriptor.
///
/// # Safety
/// `table` is writable for `16 * (index + 1)` bytes and aligned to 8.
#[inline(always)]
unsafe fn put_desc(table: *mut u8, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
    let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
    let desc = table.wrapping_add(index as usize * DESC_LEN);
    // SAFETY: the caller promises that the table is writable up to the end of this descriptor, and
    // aligned to 8.
    unsafe { raw::put_u64(desc, addr) };
    // SAFETY: the caller promises that the table is writable up to the end of this descriptor.
    unsafe { raw::put_u64(desc.wrapping_add(8), word) };
}
