//! Mappings of files that a front end shares: guest memory, the in-flight region, the dirty log.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio::mem::Region;

use super::budget::{Budget, Share};
use super::guard::{RangeWatch, watch};
use vshunt_types::convert::{low_u16, low_u32, to_usize};

/// Bytes of a page. At least this much reserved address space lies on each side of a mapping.
const PAGE: usize = 4096;
/// Bytes of a transparent huge page. The address of a mapping and its offset in the file have the
/// same remainder modulo this size, so that the kernel can use huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// A shared mapping of a part of a file. It is unmapped when its last holder drops it.
///
/// Reserved address space surrounds it, so that to the kernel it is one mapping (VMA) that never
/// merges with a neighbour (see `super::guard`).
pub(super) struct Mapping {
    /// Start of the mapping, which consists of whole pages.
    base: NonNull<u8>,
    base_len: usize,
    /// Start of the reserved address space around it.
    reserved: NonNull<u8>,
    reserved_len: usize,
    /// Bytes of the mapping before the requested part.
    skip: usize,
    /// Bytes of the requested part.
    len: usize,
    /// Offset of the requested part in the file, bytes.
    file_offset: u64,
    /// Device and inode number of the file.
    file: (u64, u64),
    /// None only while the mapping is dropped.
    watch: Option<RangeWatch>,
    share: Share,
}

// SAFETY: a mapping owns a range of address space, which is not bound to a thread. Holders
// synchronise their own accesses to it.
unsafe impl Send for Mapping {}
// SAFETY: the methods only read the bounds of the range, which do not change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset` of `file`, readable and writable, and only the pages that
    /// contain them.
    ///
    /// # Errors
    /// The file is shorter, or is not in memory (see [`Budget::may_block`]); or the budget of the
    /// front end or the address space is used up. The length is checked because the guard protects
    /// only from a file that is truncated later.
    pub(super) fn new(budget: &Arc<Budget>, file: &File, offset: u64, len: u64) -> io::Result<Arc<Self>> {
        Self::of(budget, &Shared::new(budget, file)?, offset, len)
    }

    /// Does what [`new`](Self::new) does, for a file that was checked.
    fn of(budget: &Arc<Budget>, shared: &Shared<'_>, offset: u64, len: u64) -> io::Result<Arc<Self>> {
        let Shared { file, meta, page } = shared;
        let page = *page;
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= meta.len()).ok_or_else(|| {
            let why = format!("{len} bytes at {offset:#x} of a file that has {}", meta.len());
            io::Error::new(io::ErrorKind::InvalidInput, format!("shared memory cannot be mapped: {why}"))
        })?;
        let number = |n: u64| usize::try_from(n).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        // The mapping does not extend beyond the file: a file on hugetlbfs consists of whole huge
        // pages.
        let first = offset / page * page;
        let base_len =
            number(end.checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)? - first)?;
        let align = number(page)?.max(if base_len >= HUGE_PAGE { HUGE_PAGE } else { PAGE });
        let reserved_len = base_len.checked_add(align + PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        let share = budget.take(reserved_len as u64)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses does not change existing
        // memory.
        let reserved = unsafe { mmap_anonymous(null_mut(), reserved_len, ProtFlags::empty(), flags) }?;
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let at = reserved.addr().get() + PAGE;
        let ahead = to_usize(first).wrapping_sub(at) & (align - 1);
        // SAFETY: `ahead` is less than `align`, so the mapping and a page after it lie in the
        // reserved address space.
        let base = unsafe { reserved.add(PAGE + ahead) };
        let mut map = Self {
            base,
            base_len,
            reserved,
            reserved_len,
            skip: number(offset - first)?,
            len: number(len)?,
            file_offset: offset,
            file: (meta.dev(), meta.ino()),
            watch: None,
            share,
        };
        map.fill(file, first)?;
        Ok(Arc::new(map))
    }

    /// Maps the file into the reserved address space, and watches the mapping.
    fn fill(&mut self, file: &File, first: u64) -> io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let (at, prot) = (self.base.as_ptr().cast(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the mapping replaces address space that `of` reserved, and nothing uses that yet.
        unsafe { mmap(at, self.base_len, prot, flags, file.as_fd(), first) }?;
        // Memory of guests is kept out of core dumps.
        // SAFETY: the range was mapped just now, and the advice does not change its contents.
        let _ = unsafe { madvise(at, self.base_len, Advice::LinuxDontDump) };
        let socket = self.share.budget().socket();
        // SAFETY: the range stays mapped, and the budget keeps the socket open, until `drop` has
        // dropped the watch. The memory is shared with the front end, which may write zeroes at any
        // time, so every access tolerates them.
        self.watch = Some(unsafe { watch(self.base.as_ptr(), self.base_len, socket) }?);
        Ok(())
    }

    /// Returns the address of the byte at `offset` of the requested part. The caller has checked
    /// that it lies inside.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: `offset` is less than `len` (checked by the caller), so the byte lies inside the
        // mapping.
        unsafe { self.base.as_ptr().add(self.skip + offset) }
    }

    /// Returns whether the front end truncated the file, and the mapping was replaced.
    pub(super) fn lost(&self) -> bool {
        self.watch.as_ref().is_some_and(RangeWatch::lost)
    }

    /// Returns whether this is a mapping of that part of that file.
    pub(super) fn is_of(&self, shared: &Shared<'_>, offset: u64, len: u64) -> bool {
        let meta = &shared.meta;
        meta.is_file()
            && (meta.dev(), meta.ino()) == self.file
            && (self.file_offset, self.len as u64) == (offset, len)
    }

    /// Returns the bytes of the requested part.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.lost() {
            self.share.budget().note_loss();
        }
        self.watch = None;
        // SAFETY: `of` reserved this range. Memory tables and rings hold an Arc of the mapping, so
        // none of them uses it any more.
        let _ = unsafe { munmap(self.reserved.as_ptr().cast(), self.reserved_len) };
    }
}

/// A file that a front end shares, and that was checked: an access to it never waits for a file
/// system, or the user accepts that.
pub(super) struct Shared<'f> {
    file: &'f File,
    meta: Metadata,
    /// Bytes of one of its pages.
    page: u64,
}

impl<'f> Shared<'f> {
    /// Checks a file. Without [`Budget::may_block`] no call is made that a file system could delay.
    /// For example, the attributes of a file on a FUSE mount come from its server, which may not
    /// answer.
    ///
    /// # Errors
    /// The file is not in memory, and the user does not accept other files.
    pub(super) fn new(budget: &Budget, file: &'f File) -> io::Result<Self> {
        // The kernel answers this only for files of tmpfs and hugetlbfs, which includes memfds, and
        // calls no file system.
        let in_memory = rustix::fs::fcntl_get_seals(file).is_ok();
        if !in_memory && !budget.may_block() {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
            return Err(not_memory(
                &path.map_or_else(|_| "a file".into(), |path| path.display().to_string()),
            ));
        }
        let (meta, fs) = (file.metadata()?, rustix::fs::fstatfs(file)?);
        // Sign extension differs between architectures: only the low 32 bits are compared.
        let magic = |number: i64| low_u32(number.cast_unsigned());
        let huge = magic(fs.f_type) == magic(libc::HUGETLBFS_MAGIC);
        let page = if huge { u64::try_from(fs.f_bsize).unwrap_or(0).max(PAGE as u64) } else { PAGE as u64 };
        Ok(Self { file, meta, page })
    }
}

/// Returns the error for a file that is not in memory. `path` is its name.
pub(super) fn not_memory(path: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!(
            "the front end shares {path}, which is not memory (memfd, tmpfs or hugetlbfs): where its file system does not \
             answer, all queues of a worker wait. Share memory (QEMU: memory-backend-memfd,share=on; libvirt: \
             <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>), or add the export with \
             memory-may-block=on"
        ),
    )
}

/// Room after the parts of the rings in the in-flight region, for state that a device needs again
/// after a restart.
pub struct Notes {
    map: Arc<Mapping>,
    offset: usize,
}

impl Notes {
    /// Bytes of the notes: a mark with 16 bits of state, and 64 bits of state.
    pub(super) const BYTES: usize = 2 * size_of::<u64>();
    /// Marks valid notes. No other program writes this value there.
    const MARK: u64 = 0x5653_4E4F_5445_0000;

    /// Returns the notes at `offset` rounded up to a multiple of eight, if the mapping has room
    /// there and begins at a multiple of eight.
    pub(super) fn new(map: &Arc<Mapping>, offset: usize) -> Option<Self> {
        if !map.at(0).addr().is_multiple_of(size_of::<u64>()) {
            return None;
        }
        let offset = offset.checked_next_multiple_of(size_of::<u64>())?;
        let end = offset.checked_add(Self::BYTES)?;
        (end <= map.len()).then(|| Self { map: map.clone(), offset })
    }

    fn words(&self) -> [&AtomicU64; 2] {
        // SAFETY: `new` checked that two words fit there and are aligned. `self.map` keeps them
        // mapped. The front end may write there at any time; all accesses are atomic.
        [0, 8].map(|at| unsafe { &*self.map.at(self.offset + at).cast::<AtomicU64>() })
    }

    /// Reads the notes: a number of 16 bits, and one of 64 bits. None if there are none.
    pub fn read(&self) -> Option<(u16, u64)> {
        let [first, second] = self.words();
        let word = first.load(Acquire);
        (word & !0xFFFF == Self::MARK).then(|| (low_u16(word), second.load(Relaxed)))
    }

    /// Writes the notes.
    pub fn write(&self, first: u16, second: u64) {
        let [word, other] = self.words();
        other.store(second, Relaxed);
        word.store(Self::MARK | u64::from(first), Release);
    }
}

/// Maps one memory region as the front end describes it. If one of the regions in `has` maps the
/// same part of the same file, that mapping is used again.
pub(super) fn map_region(
    budget: &Arc<Budget>,
    region: &VhostUserMemoryRegion,
    file: &File,
    has: &[Region],
) -> io::Result<Region> {
    let (offset, size) = (region.mmap_offset, region.memory_size);
    let shared = Shared::new(budget, file)?;
    let same = |r: &Region| {
        let mapping = r.keep.clone().downcast::<Mapping>().ok()?;
        mapping.is_of(&shared, offset, size).then_some(mapping)
    };
    let mapping = match has.iter().find_map(same) {
        Some(mapping) => mapping,
        None => Mapping::of(budget, &shared, offset, size)?,
    };
    Ok(Region {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        size,
        host: mapping.at(0),
        keep: mapping,
    })
}

/// Returns whether a descriptor is an eventfd. Others may never become readable, or may block a
/// write.
pub(super) fn is_eventfd(fd: impl AsFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    // Without /proc the type is not known, and the descriptor is accepted.
    std::fs::read_link(link).map_or(true, |target| target.as_os_str() == "anon_inode:[eventfd]")
}

/// Makes a memfd of `len` zero bytes, for the in-flight region.
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
mod tests;
