//! Guest memory: a flat, sorted, immutable table of regions, and the translations between address
//! spaces.
//!
//! The front end builds it whenever the memory table changes. It is shared as `Arc<GuestMemory>`,
//! and every worker reads it without a lock. It maps nothing: [`Region::keep`] contains the owner
//! of a mapping. It must never return a pointer for a range that is not entirely inside the
//! regions.

mod copy;

pub use copy::{copy, fill, read, write, write_u8};

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::bits::to_usize;

/// Most regions: as many as the kernel's vhost accepts by default (`max_mem_regions`), with room
/// for QEMU's own.
pub const MAX_REGIONS: usize = 509;

/// One piece of guest memory that is mapped here.
#[derive(Clone)]
pub struct Region {
    /// Guest-physical address of the first byte.
    pub guest_addr: u64,
    /// The front end's virtual address of the first byte.
    pub user_addr: u64,
    /// Length in bytes; not zero.
    pub size: u64,
    /// Address of `guest_addr` in this process.
    pub host: *mut u8,
    /// Owner of the mapping; dropped with the table.
    pub keep: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("guest_addr", &format_args!("{:#x}", self.guest_addr))
            .field("user_addr", &format_args!("{:#x}", self.user_addr))
            .field("size", &format_args!("{:#x}", self.size))
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

/// Why a table was refused, or a range is not guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// A region has no bytes.
    #[error("the region at guest address {guest_addr:#x} is empty")]
    Empty {
        /// First byte of the region.
        guest_addr: u64,
    },
    /// A region ends past the end of an address space.
    #[error("the region at guest address {guest_addr:#x} runs past the end of an address space")]
    Overflow {
        /// First byte of the region.
        guest_addr: u64,
    },
    /// Two regions share guest addresses.
    #[error("two regions overlap at guest address {guest_addr:#x}")]
    Overlap {
        /// First byte of the later one.
        guest_addr: u64,
    },
    /// More regions than [`MAX_REGIONS`].
    #[error("{0} regions, the table holds {MAX_REGIONS}")]
    TooMany(usize),
    /// A range is not, or not wholly, inside the regions.
    #[error("guest range {guest_addr:#x}, {len} bytes, is outside of guest memory")]
    Outside {
        /// First byte of the range.
        guest_addr: u64,
        /// Length of the range in bytes.
        len: u64,
    },
}

/// The region that was hit last. There is one hint for each queue, so that a queue's neighbouring
/// buffers are translated in a few instructions. An outdated value is harmless.
#[derive(Default, Clone, Copy, Debug)]
pub struct RegionHint(usize);

/// The part of a region that translation needs. One cache line has room for two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flat {
    guest: u64,
    size: u64,
    host: *mut u8,
}

impl Flat {
    /// A region that contains nothing, not even a range of no bytes.
    pub(crate) const NONE: Flat = Flat { guest: 0, size: 0, host: core::ptr::null_mut() };

    /// Returns the host address of the whole range, if it is in the region.
    #[inline(always)]
    pub(crate) fn find(&self, guest_addr: u64, len: u64) -> Option<*mut u8> {
        let offset = guest_addr.wrapping_sub(self.guest);
        if offset < self.size && len <= self.size - offset {
            Some(self.host.wrapping_add(to_usize(offset)))
        } else {
            None
        }
    }
}

/// Returns the id of the next table. Ids do not repeat within the life of a process.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// An immutable snapshot of the guest's memory, sorted by guest address.
#[derive(Debug)]
pub struct GuestMemory {
    /// Differs from every other table's id, also from those of dropped tables, so that a cached
    /// region is never used for another table.
    id: u64,
    flat: Vec<Flat>,
    regions: Vec<Region>,
}

// SAFETY: the pointers are only returned, never followed here. `keep` owns their memory and is Send
// + Sync. The table does not change after it was made.
unsafe impl Send for GuestMemory {}
// SAFETY: nothing changes behind a shared reference, and `keep` is Sync.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Makes a table of `regions`, in any order.
    ///
    /// # Errors
    /// A region is empty, overlaps another one or exceeds an address space, or there are more than
    /// [`MAX_REGIONS`].
    ///
    /// # Safety
    /// Each region's `host..host + size` stays mapped for reading and writing as long as its `keep`
    /// lives.
    pub unsafe fn new(mut regions: Vec<Region>) -> Result<Self, MemError> {
        if regions.len() > MAX_REGIONS {
            return Err(MemError::TooMany(regions.len()));
        }
        regions.sort_by_key(|r| r.guest_addr);
        let mut end = 0u64;
        for r in &regions {
            let guest_addr = r.guest_addr;
            if r.size == 0 {
                return Err(MemError::Empty { guest_addr });
            }
            let overflow = MemError::Overflow { guest_addr };
            if isize::try_from(r.size).is_err()
                || r.user_addr.checked_add(r.size).is_none()
                || (r.host.addr() as u64).checked_add(r.size).is_none()
            {
                return Err(overflow);
            }
            if guest_addr < end {
                return Err(MemError::Overlap { guest_addr });
            }
            end = guest_addr.checked_add(r.size).ok_or(overflow)?;
        }
        let flat = regions.iter().map(|r| Flat { guest: r.guest_addr, size: r.size, host: r.host }).collect();
        Ok(Self { id: next_id(), flat, regions })
    }

    /// Makes a table without memory, which translates nothing.
    pub fn empty() -> Self {
        Self { id: next_id(), flat: Vec::new(), regions: Vec::new() }
    }

    /// Returns the regions, sorted by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the host address of a range that is entirely inside one region. A range of no bytes
    /// must still start inside.
    #[inline]
    pub fn translate(&self, hint: &mut RegionHint, guest_addr: u64, len: u64) -> Option<*mut u8> {
        if let Some(ptr) = self.window(*hint).find(guest_addr, len) {
            return Some(ptr);
        }
        *hint = self.region_of(guest_addr);
        self.window(*hint).find(guest_addr, len)
    }

    /// Returns the id; see the field.
    #[inline(always)]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the region that contains `guest_addr`, or an empty one.
    #[inline]
    pub(crate) fn window_of(&self, guest_addr: u64) -> Flat {
        self.window(self.region_of(guest_addr))
    }

    /// Returns the region that `hint` stands for, or an empty one.
    #[inline(always)]
    fn window(&self, hint: RegionHint) -> Flat {
        self.flat.get(hint.0).copied().unwrap_or(Flat::NONE)
    }

    /// Returns the index of the region that contains `guest_addr`, or any other value if there is
    /// none.
    #[inline]
    fn region_of(&self, guest_addr: u64) -> RegionHint {
        RegionHint(self.flat.partition_point(|f| f.guest <= guest_addr).saturating_sub(1))
    }

    /// Passes a range, which may cover adjoining regions, piece by piece and in order. A range of
    /// no bytes has no pieces.
    ///
    /// # Errors
    /// A byte is outside of the regions. Pieces that were passed by then are to be ignored.
    pub fn translate_each(
        &self,
        hint: &mut RegionHint,
        guest_addr: u64,
        len: u64,
        mut f: impl FnMut(*mut u8, usize),
    ) -> Result<(), MemError> {
        let outside = MemError::Outside { guest_addr, len };
        guest_addr.checked_add(len).ok_or(outside)?;
        let (mut at, mut left) = (guest_addr, len);
        while left > 0 {
            let mut flat = self.window(*hint);
            if flat.find(at, 0).is_none() {
                *hint = self.region_of(at);
                flat = self.window(*hint);
            }
            let ptr = flat.find(at, 0).ok_or(outside)?;
            let piece = left.min(flat.size - (at - flat.guest));
            f(ptr, to_usize(piece));
            at += piece;
            left -= piece;
        }
        Ok(())
    }

    /// Returns the host address of a range of the front end's virtual addresses that is entirely
    /// inside one region.
    pub fn user_to_host(&self, user_addr: u64, len: u64) -> Option<*mut u8> {
        self.regions
            .iter()
            .find_map(|r| Flat { guest: r.user_addr, size: r.size, host: r.host }.find(user_addr, len))
    }

    /// Returns the guest address of one of the front end's virtual addresses.
    pub fn user_to_guest(&self, user_addr: u64) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = user_addr.checked_sub(r.user_addr)?;
            (offset < r.size).then(|| r.guest_addr + offset)
        })
    }

    /// Returns the guest address of a byte at `host` in this process.
    pub fn host_to_guest(&self, host: *const u8) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = (host.addr() as u64).checked_sub(r.host.addr() as u64)?;
            (offset < r.size).then(|| r.guest_addr + offset)
        })
    }
}

#[cfg(test)]
mod tests;
