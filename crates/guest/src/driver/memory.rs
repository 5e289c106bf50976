//! Guest memory: memfds mapped here and, by their descriptors, in the server.
//!
//! Made before the rings, lives as long as anything points into it ([`Area`] holds it). The server writes to it at
//! any time, so nothing here ever makes a reference into it: bytes go in and out by copies through raw pointers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use virtio::mem;

use crate::error::{Error, Kind, Result, fail};

/// Pages of guest memory and of the dirty log.
pub const PAGE: u64 = 4096;

/// Where the first region lies if nobody says otherwise: not 0, so that offsets taken for addresses are found out.
pub const DEFAULT_BASE: u64 = 0x4000_0000;

/// One region of guest memory as asked for.
#[derive(Clone, Copy, Debug)]
pub struct RegionSpec {
    /// Guest-physical address, a multiple of 4096.
    pub guest_addr: u64,
    /// Bytes, a multiple of 4096.
    pub size: u64,
}

/// One mapped region.
#[derive(Debug)]
pub struct Region {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    host: *mut u8,
    fd: OwnedFd,
}

impl Region {
    /// Where the region lies in this process: what vhost-user calls the user address.
    pub fn user_addr(&self) -> u64 {
        self.host as u64
    }

    /// The memfd that backs it, from offset 0.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn map(spec: RegionSpec) -> Result<Self> {
        if spec.size == 0 || !spec.size.is_multiple_of(PAGE) || !spec.guest_addr.is_multiple_of(PAGE) {
            return Err(fail!(
                Usage,
                "a memory region must have a size and an address that are multiples of 4096"
            ));
        }
        let oops = |what: &str, e: rustix::io::Errno| {
            Error::with(Kind::System, format!("{} MiB of guest memory: {what} failed", spec.size >> 20), e)
        };
        let fd = memfd_create("vshunt-bench", MemfdFlags::CLOEXEC).map_err(|e| oops("memfd_create", e))?;
        ftruncate(&fd, spec.size).map_err(|e| oops("ftruncate", e))?;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let host = unsafe {
            mmap(
                ptr::null_mut(),
                spec.size as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }
        .map_err(|e| oops("mmap", e))?;
        Ok(Self { guest_addr: spec.guest_addr, size: spec.size, host: host.cast(), fd })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `host` and `size` are those of the mapping made in `map`; every Area into it holds the Memory.
        let _ = unsafe { munmap(self.host.cast(), self.size as usize) };
    }
}

/// All of guest memory, with an allocator that never frees: what is set up lives as long as the device.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Region>,
    /// Bytes handed out from each region.
    used: Mutex<Vec<u64>>,
}

// SAFETY: the raw pointers in `regions` are only handed out as bounds-checked Areas, whose accesses are copies of
// bytes that the server may change at any time anyway; the allocator's state is behind a lock.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the regions, each from a memfd of its own.
    pub fn new(specs: &[RegionSpec]) -> Result<Arc<Self>> {
        let regions = specs.iter().map(|&spec| Region::map(spec)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self { used: Mutex::new(vec![0; regions.len()]), regions }))
    }

    /// The regions as mapped.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Hands out `len` bytes at a guest address that is a multiple of `align` (a power of two).
    pub fn alloc(self: &Arc<Self>, len: usize, align: u64) -> Result<Area> {
        for index in 0..self.regions.len() {
            if let Some(area) = self.alloc_in(index, len, align) {
                return Ok(area);
            }
        }
        let total: u64 = self.regions.iter().map(|r| r.size).sum();
        Err(fail!(
            System,
            "guest memory of {} MiB has no {len} bytes left: ask for more at connect",
            total >> 20
        ))
    }

    /// As [`Memory::alloc`], from the region `index`; `None` if it is full.
    pub fn alloc_in(self: &Arc<Self>, index: usize, len: usize, align: u64) -> Option<Area> {
        let region = self.regions.get(index)?;
        let mut used = self.used.lock().unwrap_or_else(|e| e.into_inner());
        let guest = (region.guest_addr + used[index]).next_multiple_of(align);
        let offset = guest - region.guest_addr;
        if offset.checked_add(len as u64)? > region.size {
            return None;
        }
        used[index] = offset + len as u64;
        drop(used);
        self.area(guest, len)
    }

    /// The area at a guest address, allocated or not; `None` if it is not within one region.
    pub fn area(self: &Arc<Self>, guest: u64, len: usize) -> Option<Area> {
        let region = self.regions.iter().find(|r| guest >= r.guest_addr && guest - r.guest_addr < r.size)?;
        let offset = guest - region.guest_addr;
        if offset.checked_add(len as u64)? > region.size {
            return None;
        }
        // SAFETY: offset + len lies within the region's mapping, as checked above.
        let host = unsafe { region.host.add(offset as usize) };
        Some(Area { memory: Arc::clone(self), guest, host, len })
    }
}

/// A piece of guest memory; keeps the mapping alive.
#[derive(Clone, Debug)]
pub struct Area {
    memory: Arc<Memory>,
    guest: u64,
    host: *mut u8,
    len: usize,
}

// SAFETY: an Area is a bounds-checked window on memory that it keeps mapped; see Memory.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Guest-physical address of the first byte.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Where it lies in this process; valid as long as this Area or a clone lives.
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part from `offset`, `len` bytes long. Panics if it reaches past the end.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Area {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "part past the end of an area");
        // SAFETY: in bounds by the assertion; the mapping lives as long as `memory`.
        let host = unsafe { self.host.add(offset) };
        Area { memory: Arc::clone(&self.memory), guest: self.guest + offset as u64, host, len }
    }

    /// The memory that it is part of.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Any area of the same memory; `None` if it is not within one region.
    pub fn elsewhere(&self, guest: u64, len: usize) -> Option<Area> {
        self.memory.area(guest, len)
    }

    /// Copies `bytes` to `offset`. Panics if they reach past the end.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "write past the end of an area"
        );
        // SAFETY: in bounds by the assertion; the mapping lives as long as `memory`; `bytes` is not guest memory,
        // to which no references exist.
        unsafe { mem::write(self.host.add(offset), bytes) }
    }

    /// Copies from `offset` into `bytes`. Panics if that reaches past the end.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "read past the end of an area"
        );
        // SAFETY: as in `write`.
        unsafe { mem::read(self.host.add(offset), bytes) }
    }

    /// Sets every byte; also what faults the pages in before time is measured.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the whole area is mapped as long as `memory` lives.
        unsafe { mem::fill(self.host, byte, self.len) }
    }

    /// All bytes, copied out.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }

    /// The 16-bit number at `offset` (little endian, aligned), read once with acquire order: a ring's index.
    pub fn load_u16(&self, offset: usize) -> u16 {
        assert!(
            offset + 2 <= self.len && (self.guest + offset as u64).is_multiple_of(2),
            "u16 outside of an area"
        );
        // SAFETY: in bounds and aligned by the assertion; shared memory is read as an atomic.
        let atomic = unsafe { std::sync::atomic::AtomicU16::from_ptr(self.host.add(offset).cast()) };
        u16::from_le(atomic.load(std::sync::atomic::Ordering::Acquire))
    }

    /// Stores a 16-bit number at `offset` (little endian, aligned) with release order.
    pub fn store_u16(&self, offset: usize, value: u16) {
        assert!(
            offset + 2 <= self.len && (self.guest + offset as u64).is_multiple_of(2),
            "u16 outside of an area"
        );
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { std::sync::atomic::AtomicU16::from_ptr(self.host.add(offset).cast()) };
        atomic.store(value.to_le(), std::sync::atomic::Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocates_aligned_until_full() {
        let memory = Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size: 3 * PAGE }]).unwrap();
        let a = memory.alloc(10, 16).unwrap();
        let b = memory.alloc(PAGE as usize, PAGE).unwrap();
        assert_eq!(a.guest(), DEFAULT_BASE);
        assert_eq!(b.guest(), DEFAULT_BASE + PAGE);
        assert!(memory.alloc(PAGE as usize + 1, PAGE).is_err());
        b.write(5, b"abc");
        let mut back = [0; 3];
        memory.area(DEFAULT_BASE + PAGE + 5, 3).unwrap().read(0, &mut back);
        assert_eq!(&back, b"abc");
    }

    #[test]
    fn an_area_stays_within_one_region() {
        let specs = [RegionSpec { guest_addr: 0, size: PAGE }, RegionSpec { guest_addr: PAGE, size: PAGE }];
        let memory = Memory::new(&specs).unwrap();
        assert!(memory.area(PAGE - 1, 2).is_none());
        assert!(memory.area(2 * PAGE, 1).is_none());
        assert!(memory.area(u64::MAX, 1).is_none());
        assert_eq!(memory.alloc_in(1, 8, 8).unwrap().guest(), PAGE);
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn writing_past_the_end_panics() {
        let memory = Memory::new(&[RegionSpec { guest_addr: 0, size: PAGE }]).unwrap();
        memory.alloc(4, 4).unwrap().write(2, b"abc");
    }
}
