//! Mappings of what a front-end shares: guest memory, the in-flight region, the dirty log.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio::mem::Region;

use super::guard::{Watch, watch};

/// A shared mapping, unmapped when its last holder lets go.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
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
        let size = file.metadata()?.len();
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
        let mut map = Self { base, len, watch: None };
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
