//! What the system says about an image: file system, alignment, block sizes. At open, on a control thread.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, FallocateFlags, StatxFlags};

/// `BLKGETSIZE64` of linux/fs.h: `_IOR(0x12, 114, size_t)`, whose direction bits some architectures write differently.
const BLKGETSIZE64: libc::Ioctl =
    if NONE_BIT { 0x4008_1272u32 as libc::Ioctl } else { 0x8008_1272u32 as libc::Ioctl };
/// `BLKROGET` of linux/fs.h: `_IO(0x12, 94)`.
const BLKROGET: libc::Ioctl = if NONE_BIT { 0x2000_125e } else { 0x125e };
/// Whether `_IO` is marked by a bit of its own (MIPS, PowerPC, SPARC).
const NONE_BIT: bool = libc::BLKSSZGET & 0x2000_0000 != 0;

/// What decides how a file is best asked for its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A device, or a file on one.
    Disk,
    /// A file in memory: tmpfs and ramfs.
    Tmpfs,
    /// A file in memory that cannot be written by write(2).
    Hugetlbfs,
    /// A file that a program serves; virtiofs, too.
    Fuse,
}

/// File systems of the kernel's own, by their magic numbers (linux/magic.h): their files are no storage. What is written to
/// some of them changes the system, and `/proc/self/mem` is the daemon's memory.
const OF_THE_KERNEL: [(u32, &str); 19] = [
    (0x0000_9FA0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x0027_E0EB, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x7363_6673, "securityfs"),
    (0xF97C_FF8C, "selinuxfs"),
    (0x4341_5D53, "smackfs"),
    (0x5A3C_69F0, "apparmorfs"),
    (0xCAFE_4A11, "bpf"),
    (0x6165_676C, "pstore"),
    (0xDE5E_81E4, "efivarfs"),
    (0x6265_6570, "configfs"),
    (0x6E73_6673, "nsfs"),
    (0x6573_5543, "fusectl"),
    (0x1980_0202, "mqueue"),
    (0x4249_4E4D, "binfmt_misc"),
    (0x0765_5821, "resctrl"),
];

/// The name of the file system where a file is, if it is one of the kernel's own.
pub(crate) fn of_the_kernel(file: impl AsFd) -> io::Result<Option<&'static str>> {
    let magic = rustix::fs::fstatfs(file)?.f_type as u32;
    Ok(OF_THE_KERNEL.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name))
}

/// Where a file is, by its file system's magic number (linux/magic.h).
pub(super) fn place(file: &File) -> io::Result<Place> {
    Ok(match rustix::fs::fstatfs(file)?.f_type as u32 {
        0x0102_1994 | 0x8584_58f6 => Place::Tmpfs,
        0x9584_58f6 => Place::Hugetlbfs,
        0x6573_5546 => Place::Fuse,
        _ => Place::Disk,
    })
}

/// What O_DIRECT demands of memory and of offsets and lengths, bytes; `None`: the file system has no O_DIRECT for
/// this file after all.
pub(super) fn direct_align(file: &File, logical_block: u32) -> Option<(usize, u64)> {
    let asked = StatxFlags::DIOALIGN;
    match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, asked) {
        Ok(s) if s.stx_mask & asked.bits() != 0 => {
            let (memory, offset) = (s.stx_dio_mem_align, s.stx_dio_offset_align);
            let told = memory.is_power_of_two() && offset.is_power_of_two();
            // Less than a sector is of no use: requests are of whole ones.
            told.then(|| (memory as usize, u64::from(offset.max(512))))
        }
        // Not told: every device that has a driver takes memory that is aligned as its blocks are.
        _ => Some((logical_block as usize, u64::from(logical_block))),
    }
}

/// Whether the file system gives space back. Asked beyond the file's end, where there is nothing to lose.
pub(super) fn punches_holes(file: &File, size_bytes: u64) -> bool {
    const LEN: u64 = 4096;
    let Some(at) = size_bytes.checked_next_multiple_of(LEN).filter(|a| *a < i64::MAX as u64 - LEN) else {
        return true;
    };
    match rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, LEN) {
        Err(e) => !matches!(e, rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS),
        Ok(()) => true,
    }
}

/// What a block device says of itself. Bytes.
pub(super) struct Device {
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) min_io: u32,
    pub(super) opt_io: u32,
    /// 0: it has no discard.
    pub(super) discard_max: u64,
    pub(super) discard_align: u32,
}

/// Asks a block device.
pub(super) fn device(file: &File) -> io::Result<Device> {
    let logical_block = ioctl_u32(file, libc::BLKSSZGET)?;
    let queue = queue_dir(file);
    let read = |name: &str| -> Option<u64> {
        fs::read_to_string(queue.as_ref()?.join(name)).ok()?.trim().parse().ok()
    };
    let small = |name: &str| read(name).and_then(|n| u32::try_from(n).ok());
    Ok(Device {
        logical_block,
        physical_block: ioctl_u32(file, libc::BLKPBSZGET).unwrap_or(logical_block),
        min_io: small("minimum_io_size").unwrap_or(0),
        opt_io: small("optimal_io_size").unwrap_or(0),
        // Where sysfs cannot be read, as in a sandbox, the device is believed to have it: trying does no harm.
        discard_max: read("discard_max_bytes").unwrap_or(u64::MAX),
        discard_align: small("discard_granularity").unwrap_or(0),
    })
}

/// The size of a block device, bytes.
pub(super) fn device_size(file: &File) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: BLKGETSIZE64 writes a 64-bit number, for which there is room.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &mut size) } {
        0 => Ok(size),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a block device is set read-only: some can be opened for writing all the same.
pub(super) fn device_readonly(file: &File) -> bool {
    ioctl_u32(file, BLKROGET).is_ok_and(|ro| ro != 0)
}

fn ioctl_u32(file: &File, request: libc::Ioctl) -> io::Result<u32> {
    let mut value = 0u32;
    // SAFETY: the requests that are passed write an int, for which there is room.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The sysfs folder with a device's queue limits; a partition has its disk's.
fn queue_dir(file: &File) -> Option<PathBuf> {
    let dev = file.metadata().ok()?.rdev();
    let node = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(dev), libc::minor(dev)));
    let dirs = [node.join("queue"), node.canonicalize().ok()?.parent()?.join("queue")];
    dirs.into_iter().find(|d| d.is_dir())
}
