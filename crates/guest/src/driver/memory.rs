//! Guest memory: memfds that are mapped here and, through their descriptors, in the server.
//!
//! The memory is made before the rings, and lives as long as an [`Area`] of it. The server may
//! write to it at any time. So nothing makes a reference into it: bytes are copied through raw
//! pointers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use virtio::mem;

use crate::error::{Error, Kind, Result, fail};

/// Pages of guest memory and of the dirty log.
pub const PAGE: u64 = 4096;

/// Default address of the first region. It is not 0, so that offsets used as addresses are
/// detected.
pub const DEFAULT_BASE: u64 = 0x4000_0000;

/// One region of guest memory to make.
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
    /// Size in bytes.
    pub size: u64,
    host: *mut u8,
    fd: OwnedFd,
}

impl Region {
    /// Returns the address of the region in this process, which vhost-user calls the user address.
    pub fn user_addr(&self) -> u64 {
        self.host as u64
    }

    /// Returns the memfd of the region, which starts at offset 0.
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
        let failed = |what: &str, e: rustix::io::Errno| {
            Error::with(Kind::System, format!("{} MiB of guest memory: {what} failed", spec.size >> 20), e)
        };
        let fd = memfd_create("vshunt-bench", MemfdFlags::CLOEXEC).map_err(|e| failed("memfd_create", e))?;
        ftruncate(&fd, spec.size).map_err(|e| failed("ftruncate", e))?;
        // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
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
        .map_err(|e| failed("mmap", e))?;
        Ok(Self { guest_addr: spec.guest_addr, size: spec.size, host: host.cast(), fd })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `host` and `size` are those of the mapping that `map` made. No Area of it exists,
        // because each holds the Memory.
        let _ = unsafe { munmap(self.host.cast(), self.size as usize) };
    }
}

/// All of guest memory, with an allocator that never frees. Everything that is set up lives as long
/// as the device.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Region>,
    /// Bytes allocated from each region.
    used: Mutex<Vec<u64>>,
}

// SAFETY: the raw pointers in `regions` leave this module only as bounds-checked Areas. Their
// accesses are copies of bytes that the server may change at any time. A lock guards the
// allocator's state.
unsafe impl Send for Memory {}
// SAFETY: shared access is bounds-checked copies through Areas, and a lock guards the allocator's
// state.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the regions, each from its own memfd.
    pub fn new(specs: &[RegionSpec]) -> Result<Arc<Self>> {
        let regions = specs.iter().map(|&spec| Region::map(spec)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self { used: Mutex::new(vec![0; regions.len()]), regions }))
    }

    /// Returns the mapped regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Allocates `len` bytes at a guest address that is a multiple of `align` (a power of two).
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

    /// Like [`Memory::alloc`], from the region `index`. Returns `None` if it is full.
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

    /// Returns the area at a guest address, allocated or not. Returns `None` if it is not in one
    /// region.
    pub fn area(self: &Arc<Self>, guest: u64, len: usize) -> Option<Area> {
        let region = self.regions.iter().find(|r| guest >= r.guest_addr && guest - r.guest_addr < r.size)?;
        let offset = guest - region.guest_addr;
        if offset.checked_add(len as u64)? > region.size {
            return None;
        }
        // SAFETY: offset + len is inside the region's mapping, as checked above.
        let host = unsafe { region.host.add(offset as usize) };
        Some(Area { memory: Arc::clone(self), guest, host, len })
    }
}

/// A piece of guest memory. It keeps the mapping alive.
#[derive(Clone, Debug)]
pub struct Area {
    memory: Arc<Memory>,
    guest: u64,
    host: *mut u8,
    len: usize,
}

// SAFETY: an Area is a bounds-checked range of memory that it keeps mapped. Its accesses are copies
// through raw pointers.
unsafe impl Send for Area {}
// SAFETY: shared access copies bytes through raw pointers, which is allowed while other threads and
// the server write.
unsafe impl Sync for Area {}

impl Area {
    /// Returns the guest-physical address of the first byte.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Returns the address in this process. It is valid as long as this Area or a clone of it
    /// exists.
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the part from `offset`, `len` bytes long. Panics if it is not inside the area.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Area {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "part past the end of an area");
        // SAFETY: the assertion above checks the bounds. `memory` keeps the mapping.
        let host = unsafe { self.host.add(offset) };
        Area { memory: Arc::clone(&self.memory), guest: self.guest + offset as u64, host, len }
    }

    /// Returns the memory that it is part of.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns any area of the same memory. Returns `None` if it is not in one region.
    pub fn elsewhere(&self, guest: u64, len: usize) -> Option<Area> {
        self.memory.area(guest, len)
    }

    /// Copies `bytes` to `offset`. Panics if they are not inside the area.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "write past the end of an area"
        );
        // SAFETY: the assertion above checks the bounds, and `memory` keeps the mapping. `bytes` is
        // not guest memory, because there are no references into guest memory.
        unsafe { mem::write(self.host.wrapping_add(offset), bytes) }
    }

    /// Copies from `offset` into `bytes`. Panics if the range is not inside the area.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "read past the end of an area"
        );
        // SAFETY: the assertion above checks the bounds, and `memory` keeps the mapping. `bytes` is
        // not guest memory, because there are no references into guest memory.
        unsafe { mem::read(self.host.wrapping_add(offset), bytes) }
    }

    /// Sets every byte. This also faults the pages in before a measurement.
    pub fn fill(&self, byte: u8) {
        // SAFETY: `memory` keeps the whole area mapped.
        unsafe { mem::fill(self.host, byte, self.len) }
    }

    /// Returns a copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }

    /// Loads the 16-bit number at `offset` (little endian, aligned) with acquire order, such as a
    /// ring's index.
    pub fn load_u16(&self, offset: usize) -> u16 {
        assert!(
            offset + 2 <= self.len && (self.guest + offset as u64).is_multiple_of(2),
            "u16 outside of an area"
        );
        // SAFETY: the assertion above checks bounds and alignment. Shared memory is accessed as an
        // atomic.
        let atomic = unsafe { std::sync::atomic::AtomicU16::from_ptr(self.host.wrapping_add(offset).cast()) };
        u16::from_le(atomic.load(std::sync::atomic::Ordering::Acquire))
    }

    /// Stores a 16-bit number at `offset` (little endian, aligned) with release order.
    pub fn store_u16(&self, offset: usize, value: u16) {
        assert!(
            offset + 2 <= self.len && (self.guest + offset as u64).is_multiple_of(2),
            "u16 outside of an area"
        );
        // SAFETY: the assertion above checks bounds and alignment. Shared memory is accessed as an
        // atomic.
        let atomic = unsafe { std::sync::atomic::AtomicU16::from_ptr(self.host.wrapping_add(offset).cast()) };
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
