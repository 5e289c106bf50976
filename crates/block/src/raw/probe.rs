//! Asks the kernel about an image: file system, alignment, block sizes. Called by control threads
//! when an image is opened.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, FallocateFlags, StatxFlags};

use crate::file_times::{FileTimes, NewTime, set_times};

/// `BLKGETSIZE64` of linux/fs.h: `_IOR(0x12, 114, size_t)`. The direction bits differ between
/// architectures.
const BLKGETSIZE64: libc::Ioctl =
    if NONE_BIT { 0x4008_1272u32 as libc::Ioctl } else { 0x8008_1272u32 as libc::Ioctl };
/// `BLKROGET` of linux/fs.h: `_IO(0x12, 94)`.
const BLKROGET: libc::Ioctl = if NONE_BIT { 0x2000_125e } else { 0x125e };
/// Whether `_IO` sets a bit of its own (MIPS, PowerPC, SPARC).
const NONE_BIT: bool = libc::BLKSSZGET & 0x2000_0000 != 0;

/// The type of the file system of an image. It determines the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileSystem {
    /// A block device, or a file on one.
    Disk,
    /// A file on another host.
    Network,
    /// A file in memory, on tmpfs or ramfs.
    Tmpfs,
    /// A file in memory that write(2) cannot write.
    Hugetlbfs,
    /// A file that another program serves: FUSE or virtiofs.
    Fuse,
}

/// Returns the type of a file's file system, by its magic number (linux/magic.h).
pub(super) fn file_system(file: &File) -> io::Result<FileSystem> {
    Ok(match rustix::fs::fstatfs(file)?.f_type as u32 {
        0x0102_1994 | 0x8584_58f6 => FileSystem::Tmpfs,
        0x9584_58f6 => FileSystem::Hugetlbfs,
        0x6573_5546 => FileSystem::Fuse,
        // NFS, SMB, CIFS, Ceph, 9p, AFS (two), OCFS2, GFS2, Lustre, GPFS, BeeGFS.
        0x6969 | 0xfe53_4d42 | 0xff53_4d42 | 0x00c3_6400 | 0x0102_1997 | 0x5346_414f | 0x6b41_4653
        | 0x7461_636f | 0x0116_1970 | 0x0bd0_0bd0 | 0x4750_4653 | 0x1983_0326 => FileSystem::Network,
        _ => FileSystem::Disk,
    })
}

/// Returns the alignment that O_DIRECT requires of memory, and of offsets and lengths, bytes.
/// `None`: the file system has no O_DIRECT for this file.
pub(super) fn direct_align(file: &File, logical_block: u32) -> Option<(usize, u64)> {
    let asked = StatxFlags::DIOALIGN;
    match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, asked) {
        Ok(s) if s.stx_mask & asked.bits() != 0 => {
            let (memory, offset) = (s.stx_dio_mem_align, s.stx_dio_offset_align);
            let told = memory.is_power_of_two() && offset.is_power_of_two();
            // Requests are whole sectors, so a smaller alignment is of no use.
            told.then(|| (memory as usize, u64::from(offset.max(512))))
        }
        // Without an answer: every block device takes memory with the alignment of its blocks.
        _ => Some((logical_block as usize, u64::from(logical_block))),
    }
}

/// Returns whether the file system can punch holes. It is tried beyond the end of the file, where
/// there is no data. The file keeps its time of the last change.
pub(super) fn punches_holes(file: &File, size_bytes: u64) -> bool {
    const LEN: u64 = 4096;
    let Some(at) = size_bytes.checked_next_multiple_of(LEN).filter(|a| *a < i64::MAX as u64 - LEN) else {
        return true;
    };
    let mtime = || file.metadata().ok().map(|metadata| FileTimes::of(&metadata).mtime);
    let before = mtime();
    match rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, LEN) {
        Err(e) => !matches!(e, rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS),
        Ok(()) => {
            // Most file systems count the attempt as a write. Only the owner of the file and root
            // may set another time.
            if let Some(before) = before.filter(|before| mtime() != Some(*before)) {
                let _ = set_times(file, NewTime::Keep, NewTime::At(before));
            }
            true
        }
    }
}

/// The properties of a block device, in bytes.
pub(super) struct Device {
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) min_io: u32,
    pub(super) opt_io: u32,
    /// 0 if it has no discard.
    pub(super) discard_max: u64,
    pub(super) discard_align: u32,
    /// 0 if it has no command to write zeroes, or that is not known.
    pub(super) zeroes_max: u64,
}

/// Reads the properties of a block device.
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
        // If sysfs cannot be read, as in a sandbox, discards are tried.
        discard_max: read("discard_max_bytes").unwrap_or(u64::MAX),
        discard_align: small("discard_granularity").unwrap_or(0),
        zeroes_max: read("write_zeroes_max_bytes").unwrap_or(0),
    })
}

/// Returns the size of a block device, bytes.
pub(super) fn device_size(file: &File) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: BLKGETSIZE64 writes a 64-bit number, and `size` is one.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &mut size) } {
        0 => Ok(size),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether a block device is set read-only. Some devices can be opened for writing
/// nevertheless.
pub(super) fn device_readonly(file: &File) -> bool {
    ioctl_u32(file, BLKROGET).is_ok_and(|ro| ro != 0)
}

fn ioctl_u32(file: &File, request: libc::Ioctl) -> io::Result<u32> {
    let mut value = 0u32;
    // SAFETY: callers pass only requests that write an int, and `value` is one.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the sysfs folder with the queue limits of a device; for a partition, that of its disk.
fn queue_dir(file: &File) -> Option<PathBuf> {
    let dev = file.metadata().ok()?.rdev();
    let node = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(dev), libc::minor(dev)));
    let dirs = [node.join("queue"), node.canonicalize().ok()?.parent()?.join("queue")];
    dirs.into_iter().find(|d| d.is_dir())
}
