//! The packed ring's part of the region. It has copies of the descriptors, in lists, because the
//! ring's own descriptors are overwritten.
//!
//! Free entries form a list from `free_head`. A request is a list of `num` entries from its head
//! entry. The fields named `old_*` are in force until the batch that is being published is
//! complete.
//!
//! Two steps are narrower than those of the specification, and compatible with them:
//! - `free_head` and `old_free_head` are in one aligned word, and are stored at once when a request
//!   is taken. So the request is in flight completely or not at all. The used and old used
//!   positions share a word, too, so that a batch which ends a lap cannot be seen with the new slot
//!   and the old wrap counter.
//! - Before it publishes, the ring writes the flags of all used descriptors except the first of the
//!   batch. If it dies there, those flags would look valid once the successor publishes anything.
//!   Recovery turns them back.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::any::Any;
use core::sync::atomic::Ordering;

use crate::bits::{Table, low_u8, low_u16};
use crate::desc::{Broken, DESC_F_AVAIL, DESC_F_USED, DESC_LEN, Head, Pos, RawDesc};
use crate::raw;

use super::{Inflight, InflightError, Replay, VERSION};

// QueueRegionPacked
/// `version`, `desc_num`, `free_head`, `old_free_head`: 16 bits each.
const LISTS_AT: usize = 8;
/// `used_idx`, `old_used_idx`: 16 bits; `used_wrap_counter`, `old_used_wrap_counter`: 8 bits;
/// padding.
const POSITIONS_AT: usize = 16;
pub(super) const HEADER_LEN: usize = 32;

// DescStatePacked
const INFLIGHT_AT: usize = 0;
const NEXT_AT: usize = 2;
const LAST_AT: usize = 4;
const NUM_AT: usize = 6;
const COUNTER_AT: usize = 8;
/// `id`, `flags`: 16 bits; `len`: 32 bits.
const ID_AT: usize = 16;
const FLAGS_AT: usize = 18;
const LEN_AT: usize = 20;
const ADDR_AT: usize = 24;
pub(super) const ENTRY_LEN: usize = 32;

/// Buffer ids that a driver may choose from.
const IDS: usize = 1 << 16;

/// Tracks one packed ring. Decisions are based on the state kept here. After recovery the region is
/// only written.
#[derive(Debug)]
pub(crate) struct PackedTrack {
    base: *mut u8,
    queue_size: u16,
    counter: u64,
    /// First free entry; `queue_size` or more if there is none.
    free_head: u16,
    old_free_head: u16,
    free_count: u16,
    used: Pos,
    /// The lists' links, as in the region.
    next: Table,
    /// For a head entry, its list's last entry and length.
    last: Table,
    num: Table,
    /// The head entry of the request with a buffer id, plus one; 0 for none. Most of its pages stay
    /// zero and unused.
    entry_of_id: Table,
    /// Descriptors of the chain being taken.
    noted: Vec<RawDesc>,
    /// Head entries that were pushed and not published.
    staged: Vec<u16>,
    _keep: Arc<dyn Any + Send + Sync>,
}

/// The result of recovery.
pub(crate) struct Recovered {
    pub(crate) track: PackedTrack,
    pub(crate) replays: Vec<Replay>,
    /// Position of the next used descriptor.
    pub(crate) used: Pos,
    /// Slots of the requests in flight.
    pub(crate) taken: u16,
}

impl PackedTrack {
    /// Takes over the region, for a ring of `size` descriptors at `desc` that would otherwise
    /// continue at `used`. A kill at any point is harmless: it can be repeated.
    ///
    /// # Safety
    /// `desc` is a packed descriptor ring of `size` slots, mapped and aligned to 16. No other
    /// device serves it.
    pub(crate) unsafe fn recover(
        inflight: Inflight,
        size: u16,
        desc: *mut u8,
        used: Pos,
    ) -> Result<Recovered, InflightError> {
        inflight.fits(size, true)?;
        let Inflight { base, queue_size, fresh, keep, .. } = inflight;
        let n = queue_size as usize;
        let mut track = Self {
            base,
            queue_size,
            counter: 0,
            free_head: 0,
            old_free_head: 0,
            free_count: queue_size,
            used,
            next: Table::list(queue_size),
            last: Table::zeroed(n),
            num: Table::zeroed(n),
            entry_of_id: Table::zeroed(IDS),
            noted: Vec::with_capacity(size as usize),
            staged: Vec::with_capacity(size as usize),
            _keep: keep,
        };
        if fresh {
            track.format();
            return Ok(Recovered { track, replays: Vec::new(), used, taken: 0 });
        }
        // SAFETY: the caller promises that `desc` is the ring of `size` descriptors, mapped and
        // aligned.
        let used = unsafe { track.settle(size, desc)? };
        let replays = track.list(size)?;
        let taken = replays.iter().map(|r| r.head.descs).sum();
        // SAFETY: the caller promises that `desc` is the ring of `size` descriptors, and `settle`
        // returned a position in it.
        unsafe { unuse(desc, size, used, taken) };
        Ok(Recovered { track, replays, used, taken })
    }

    /// Returns the address of the state of a descriptor.
    #[inline(always)]
    fn entry(&self, index: u16) -> *mut u8 {
        debug_assert!(index < self.queue_size);
        // SAFETY: callers pass indices below the queue size, for which `Inflight::new` checked the
        // length.
        unsafe { self.base.add(HEADER_LEN + ENTRY_LEN * index as usize) }
    }

    // The fields of the state of a descriptor, by their offsets. The front end shares the region,
    // so each access is volatile, and a shared reference suffices to write.

    /// Reads a field of 16 bits. `at`: its offset in the state of descriptor `index`.
    #[inline(always)]
    fn get_u16(&self, index: u16, at: usize) -> u16 {
        debug_assert!(at + 2 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::get_u16(self.entry(index).wrapping_add(at)) }
    }

    /// Reads a field of 32 bits.
    #[inline(always)]
    fn get_u32(&self, index: u16, at: usize) -> u32 {
        debug_assert!(at + 4 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::get_u32(self.entry(index).wrapping_add(at)) }
    }

    /// Reads a field of 64 bits.
    #[inline(always)]
    fn get_u64(&self, index: u16, at: usize) -> u64 {
        debug_assert!(at + 8 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::get_u64(self.entry(index).wrapping_add(at)) }
    }

    /// Writes a field of 16 bits.
    #[inline(always)]
    fn put_u16(&self, index: u16, at: usize, value: u16) {
        debug_assert!(at + 2 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::put_u16(self.entry(index).wrapping_add(at), value) };
    }

    /// Writes a field of 32 bits.
    #[inline(always)]
    fn put_u32(&self, index: u16, at: usize, value: u32) {
        debug_assert!(at + 4 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::put_u32(self.entry(index).wrapping_add(at), value) };
    }

    /// Writes a field of 64 bits.
    #[inline(always)]
    fn put_u64(&self, index: u16, at: usize, value: u64) {
        debug_assert!(at + 8 <= ENTRY_LEN);
        // SAFETY: inside of the region: see `entry`, and the field lies in it.
        unsafe { raw::put_u64(self.entry(index).wrapping_add(at), value) };
    }

    /// Writes whether the request of a descriptor is in flight.
    #[inline(always)]
    fn put_in_flight(&self, index: u16, value: u8) {
        // SAFETY: inside of the region: see `entry`.
        unsafe { raw::put_u8(self.entry(index).wrapping_add(INFLIGHT_AT), value) };
    }

    /// Stores the heads of both free lists, with the constants beside them.
    #[inline]
    fn store_lists(&mut self, old_free_head: u16) {
        self.old_free_head = old_free_head;
        let fields = [VERSION, self.queue_size, self.free_head, old_free_head];
        let word = fields.iter().rev().fold(0, |word, &field| word << 16 | u64::from(field));
        // SAFETY: inside of the region and aligned to 8, as `Inflight::new` checked.
        unsafe { raw::store_u64(self.base.wrapping_add(LISTS_AT), word, Ordering::Release) };
    }

    /// Stores both used positions.
    #[inline]
    fn store_positions(&mut self, used: Pos, old: Pos) {
        let word = u64::from(used.slot)
            | u64::from(old.slot) << 16
            | u64::from(used.wrap) << 32
            | u64::from(old.wrap) << 40;
        // SAFETY: inside of the region and aligned to 8, as `Inflight::new` checked.
        unsafe { raw::store_u64(self.base.wrapping_add(POSITIONS_AT), word, Ordering::Release) };
    }

    /// Writes an empty region. The word with the version comes last and makes the region valid.
    fn format(&mut self) {
        for index in 0..self.queue_size {
            (0..ENTRY_LEN).step_by(8).for_each(|at| self.put_u64(index, at, 0));
            self.put_u16(index, NEXT_AT, index + 1);
        }
        for at in [0, 24] {
            // SAFETY: inside of the header, whose length and alignment `Inflight::new` checked.
            unsafe { raw::put_u64(self.base.wrapping_add(at), 0) };
        }
        self.store_positions(self.used, self.used);
        self.store_lists(0);
    }

    /// "When reconnecting", first half: finds out whether the batch that was being published was
    /// completed, and completes or reverts it.
    ///
    /// # Safety
    /// That of [`recover`](Self::recover).
    unsafe fn settle(&mut self, size: u16, desc: *mut u8) -> Result<Pos, InflightError> {
        let [lists, positions] = [LISTS_AT, POSITIONS_AT].map(|at| {
            // SAFETY: inside of the header, whose length and alignment `Inflight::new` checked.
            unsafe { raw::get_u64(self.base.wrapping_add(at)) }
        });
        let (free_head, old_free_head) = (low_u16(lists >> 32), low_u16(lists >> 48));
        let mut used = Pos { slot: low_u16(positions), wrap: low_u8(positions >> 32) != 0 };
        let old = Pos { slot: low_u16(positions >> 16), wrap: low_u8(positions >> 40) != 0 };
        if used.slot >= size || old.slot >= size {
            return Err(InflightError::Damaged("a used position is outside of the ring"));
        }
        self.free_head = free_head;
        // The batch was completed if the slot was used in its lap, or even made available again
        // since.
        // SAFETY: the caller promises that `desc` is the ring of `size` slots, mapped and aligned.
        // The slot is below the size.
        let through =
            used != old && unsafe { slot_flags(desc, old) & DESC_F_USED == old.used_flags() & DESC_F_USED };
        if !through {
            used = old;
            self.free_head = old_free_head;
        }
        self.used = used;
        self.store_lists(self.free_head);
        self.store_positions(used, used);
        Ok(used)
    }

    /// Second half: lists the entries that are not free and are marked, which are in flight.
    fn list(&mut self, size: u16) -> Result<Vec<Replay>, InflightError> {
        let n = self.queue_size;
        let mut seen = vec![false; n as usize];
        for index in 0..n {
            self.next.set(index, self.get_u16(index, NEXT_AT));
        }
        self.free_count = 0;
        let mut index = self.free_head;
        while let Some(seen) = seen.get_mut(index as usize) {
            if core::mem::replace(seen, true) {
                return Err(InflightError::Damaged("the free list loops"));
            }
            self.put_in_flight(index, 0);
            self.free_count += 1;
            index = self.next.get(index);
        }
        let (mut found, mut taken) = (Vec::new(), 0u16);
        for entry in 0..n {
            // SAFETY: inside of the region: see `entry`.
            let inflight = unsafe { self.entry(entry).wrapping_add(INFLIGHT_AT).read_volatile() };
            let (counter, num) = (self.get_u64(entry, COUNTER_AT), self.get_u16(entry, NUM_AT));
            if inflight != 1 {
                continue;
            }
            if num == 0 || num > size - taken {
                return Err(InflightError::Damaged("requests are longer than the ring"));
            }
            taken += num;
            let (mut last, mut index) = (entry, entry);
            for _ in 0..num {
                let taken = seen.get_mut(index as usize).is_none_or(|seen| core::mem::replace(seen, true));
                if taken {
                    return Err(InflightError::Damaged("two lists share an entry"));
                }
                (last, index) = (index, self.next.get(index));
            }
            self.last.set(entry, last);
            self.num.set(entry, num);
            let id = self.get_u16(last, ID_AT);
            self.entry_of_id.set(id, entry + 1);
            found.push((counter, Replay { head: Head { id, descs: num }, entry }));
        }
        found.sort_by_key(|&(counter, _)| counter);
        self.counter = found.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok(found.into_iter().map(|(_, replay)| replay).collect())
    }

    /// Starts a chain.
    #[inline]
    pub(crate) fn begin(&mut self) {
        self.noted.clear();
    }

    /// Adds the next descriptor of the chain that is being taken.
    #[inline]
    pub(crate) fn note(&mut self, d: RawDesc) {
        self.noted.push(d);
    }

    /// Records that a request was taken, with the descriptors added since [`begin`](Self::begin).
    pub(crate) fn take(&mut self, head: Head) -> Result<(), Broken> {
        // A chain has at most as many descriptors as the ring.
        let num = low_u16(self.noted.len() as u64);
        if num == 0 || num > self.free_count {
            // This happens only if a driver uses an id twice at a time.
            return Err(Broken::Overcommitted);
        }
        let entry = self.free_head;
        let (mut last, mut free) = (entry, entry);
        for d in &self.noted {
            // `next` has the size of the queue, so `free` is below it.
            let Some(next) = self.next.find(free) else { return Err(Broken::Inflight { entry: free }) };
            self.put_u16(free, ID_AT, d.mid());
            self.put_u16(free, FLAGS_AT, d.top());
            self.put_u32(free, LEN_AT, d.len());
            self.put_u64(free, ADDR_AT, d.addr);
            (last, free) = (free, next);
        }
        self.put_u16(entry, LAST_AT, last);
        self.put_u16(entry, NUM_AT, num);
        self.put_u64(entry, COUNTER_AT, self.counter);
        self.put_in_flight(entry, 1);
        self.counter = self.counter.wrapping_add(1);
        self.last.set(entry, last);
        self.num.set(entry, num);
        self.free_count -= num;
        self.free_head = free;
        self.entry_of_id.set(head.id, entry + 1);
        // Until here the head entry is in the free list, and recovery would clear its mark. From
        // here on it is in flight.
        self.store_lists(free);
        Ok(())
    }

    /// Records that a request was returned to the ring untouched.
    pub(crate) fn untake(&mut self, id: u16) {
        let Some(entry) = self.entry_of_id.take(id).checked_sub(1) else { return };
        let last = self.last.get(entry);
        self.next.set(last, self.free_head);
        self.put_u16(last, NEXT_AT, self.free_head);
        self.free_head = entry;
        self.free_count += self.num.get(entry);
        // From here on it is free, and recovery would clear its mark.
        self.store_lists(entry);
        self.put_in_flight(entry, 0);
    }

    /// Records that a request is part of the next batch.
    #[inline]
    pub(crate) fn stage(&mut self, id: u16) {
        if let Some(entry) = self.entry_of_id.take(id).checked_sub(1) {
            self.staged.push(entry);
        }
    }

    /// Frees the batch's entries for the case that it is completed. The used position will then be
    /// `used`.
    pub(crate) fn before_publish(&mut self, used: Pos) {
        for &entry in &self.staged {
            let last = self.last.get(entry);
            self.next.set(last, self.free_head);
            self.put_u16(last, NEXT_AT, self.free_head);
            self.free_head = entry;
            self.free_count += self.num.get(entry);
        }
        self.store_lists(self.old_free_head);
        self.store_positions(used, self.used);
    }

    /// Records that the batch is complete.
    pub(crate) fn after_publish(&mut self, used: Pos) {
        for &entry in &self.staged {
            self.put_in_flight(entry, 0);
        }
        self.staged.clear();
        self.used = used;
        self.store_lists(self.free_head);
        self.store_positions(used, used);
    }

    /// Passes the descriptors of a request in flight to `f`, in order.
    pub(crate) fn each_desc(&self, replay: &Replay, mut f: impl FnMut(RawDesc)) -> Result<(), Broken> {
        let broken = Broken::Inflight { entry: replay.entry };
        let mut index = replay.entry;
        for _ in 0..replay.head.descs {
            if index >= self.queue_size {
                return Err(broken);
            }
            let id_flags = u64::from(self.get_u32(index, ID_AT));
            f(RawDesc {
                addr: self.get_u64(index, ADDR_AT),
                word: u64::from(self.get_u32(index, LEN_AT)) | id_flags << 32,
            });
            index = self.next.get(index);
        }
        Ok(())
    }
}

/// Returns the flags of a slot.
///
/// # Safety
/// That of [`PackedTrack::recover`]. The slot is below the ring's size.
unsafe fn slot_flags(desc: *mut u8, at: Pos) -> u16 {
    let flags = desc.wrapping_add(at.slot as usize * DESC_LEN + 14);
    // SAFETY: the caller promises that the ring is mapped and aligned, and that the slot is in it.
    unsafe { raw::load_u16(flags, Ordering::Acquire) }
}

/// Turns used descriptors that were written and never published back into available ones. They are
/// between the used and the available position, where the driver has not looked yet.
///
/// # Safety
/// That of [`PackedTrack::recover`]. `from` is a position of the ring.
unsafe fn unuse(desc: *mut u8, size: u16, from: Pos, count: u16) {
    const OWNER: u16 = DESC_F_AVAIL | DESC_F_USED;
    let mut at = from;
    for _ in 0..count {
        // SAFETY: the caller promises that the ring is mapped and aligned, and that `from` is in
        // it. `advance` keeps the slot below the size.
        let flags = unsafe { slot_flags(desc, at) };
        if flags & OWNER == at.used_flags() {
            let flags = flags & !OWNER | at.avail_flags();
            let to = desc.wrapping_add(at.slot as usize * DESC_LEN + 14);
            // SAFETY: the caller promises the same as for the read of these flags.
            unsafe { raw::put_u16(to, flags) };
        }
        at = at.advance(1, size);
    }
}
