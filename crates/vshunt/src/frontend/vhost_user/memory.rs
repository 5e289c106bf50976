//! Mappings of what a front-end shares: guest memory, the in-flight region, the dirty log.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio::mem::Region;

use super::guard::{Watch, watch};

/// A shared mapping, unmapped when its last holder lets go.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Device and number of the file.
    file: (u64, u64),
    /// None only while it is dropped.
    watch: Option<Watch>,
}

// SAFETY: it owns a range of address space; access to what lies there is the business of those who hold it.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only read the range's bounds.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from the start of `file`, readable and writable. The file must be that long: touching
    /// a page past its end would be a SIGBUS, against which
    /// only a file that is cut short later is guarded.
    pub(super) fn new(file: &File, len: u64) -> io::Result<Arc<Self>> {
        let meta = file.metadata()?;
        let size = meta.len();
        if len == 0 || size < len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes to be mapped of a file that has {size}"),
            ));
        }
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping where the kernel likes; no existing memory is touched.
        let base =
            unsafe { mmap(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, file.as_fd(), 0) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the range was mapped just now. Guests' memory does not belong into our core dumps.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        let mut map = Self { base, len, file: (meta.dev(), meta.ino()), watch: None };
        map.watch = Some(watch(base.as_ptr(), len)?);
        Ok(Arc::new(map))
    }

    /// The byte at `offset`, which the caller checked to lie inside.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Whether the front-end took memory away from under it.
    pub(super) fn lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::lost)
    }

    /// Whether it is one of that file.
    pub(super) fn is_of(&self, file: &File) -> bool {
        file.metadata().is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file)
    }

    /// How far into the file a byte of it is.
    pub(super) fn offset_of(&self, at: *const u8) -> u64 {
        at.addr().wrapping_sub(self.base.as_ptr().addr()) as u64
    }

    /// Bytes mapped.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watch = None;
        // SAFETY: mapped by `new`, and nobody holds it any more: memory tables and rings hold an Arc of it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Room behind the rings' parts of the in-flight region, for what a device is to know again after a restart.
pub struct Notes {
    map: Arc<Mapping>,
    offset: usize,
}

impl Notes {
    /// Bytes of it: whether there is something, and that.
    pub(super) const BYTES: usize = 2 * size_of::<u64>();
    /// Says that there is, and is not what others would have there.
    const MARK: u64 = 0x5653_4E4F_5445_0000;

    /// At that offset, if the mapping has room there.
    pub(super) fn new(map: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let offset = offset.checked_next_multiple_of(size_of::<u64>())?;
        let end = offset.checked_add(Self::BYTES)?;
        (end <= map.len()).then(|| Self { map: map.clone(), offset })
    }

    fn words(&self) -> [&AtomicU64; 2] {
        // SAFETY: `new` found room for two words there; the mapping begins at a page and the offset is a multiple of eight, so
        // that they are aligned. It lives as long as this. A front-end that writes there changes what it is told.
        [0, 8].map(|at| unsafe { &*self.map.at(self.offset + at).cast::<AtomicU64>() })
    }

    /// What was noted: a number of 16 bits, and one of 64.
    pub fn read(&self) -> Option<(u16, u64)> {
        let [first, second] = self.words();
        let word = first.load(Acquire);
        (word & !0xFFFF == Self::MARK).then(|| (word as u16, second.load(Relaxed)))
    }

    /// Notes that.
    pub fn write(&self, first: u16, second: u64) {
        let words = self.words();
        words[1].store(second, Relaxed);
        words[0].store(Self::MARK | u64::from(first), Release);
    }
}

/// Maps one memory region as the front-end describes it. The mapping begins at the file's start, since huge
/// pages could not be mapped from an odd offset.
pub(super) fn map_region(region: &VhostUserMemoryRegion, file: &File) -> io::Result<Region> {
    let end = region.mmap_offset.checked_add(region.memory_size).ok_or(io::ErrorKind::InvalidInput)?;
    let mapping = Mapping::new(file, end)?;
    let offset = usize::try_from(region.mmap_offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    if offset >= mapping.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(Region {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        size: region.memory_size,
        host: mapping.at(offset),
        keep: mapping,
    })
}

/// Whether a descriptor is an eventfd; of others we could wait for ever, or never, or block in a write.
pub(super) fn is_eventfd(fd: impl AsFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    // Without /proc it cannot be told.
    std::fs::read_link(link).map_or(true, |target| target.as_os_str() == "anon_inode:[eventfd]")
}

/// A memfd of `len` zero bytes, for the in-flight region.
pub(super) fn shared_file(name: &str, len: u64) -> io::Result<File> {
    let fd = rustix::fs::memfd_create(
        name,
        rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING,
    )?;
    let file = File::from(fd);
    file.set_len(len)?;
    rustix::fs::fcntl_add_seals(
        &file,
        rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL,
    )?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_where_they_were_written() {
        let file = shared_file("notes", 4096).unwrap();
        let map = Mapping::new(&file, 4096).unwrap();
        assert!(Notes::new(&map, 4096 - Notes::BYTES + 1).is_none());
        assert!(Notes::new(&map, usize::MAX).is_none());
        let notes = Notes::new(&map, 4096 - Notes::BYTES - 3).unwrap();
        assert_eq!(notes.read(), None);
        notes.write(0xFFFF, u64::MAX);
        notes.write(3, 0x82);
        // By another daemon.
        let again = Notes::new(&Mapping::new(&file, 4096).unwrap(), 4096 - Notes::BYTES).unwrap();
        assert_eq!(again.read(), Some((3, 0x82)));
    }
}
