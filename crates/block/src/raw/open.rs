//! Opens a raw image. Called by control threads, before there are requests.

use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8};

use qcow2::header::Header;
use rustix::mm::ProtFlags;
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::{Cache, Direct, DiskSpec, Format};

use super::probe::{self, Device, FileSystem};
use super::{Durable, Raw, SharedFile, ZERO_BYTES, method};
use crate::bounce::BOUNCE_ALIGN;
use crate::file_times::FileTimes;
use crate::limits::{Limits, SECTOR_BYTES, why_no_size};
use crate::lock;
use crate::memory::Mapping;
use crate::path_fd::{PathFd, has_name_of_qcow2, open_image};

/// Adds to the error for a missing image of a disk how a new one is made. Not for an image that
/// another one names: a new file in its place would read as zeroes.
pub(crate) fn with_way_to_make(e: Error, spec: &DiskSpec) -> Error {
    let Some(path) = &spec.file else { return e };
    let device = path.starts_with("/dev") && !path.starts_with("/dev/shm");
    let in_folder = path.parent().is_none_or(|p| p.as_os_str().is_empty() || p.exists());
    // Else another file is missing that the image needs, or the remedy is given already.
    let missing = std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    if e.kind() != Kind::NotFound || device || !in_folder || !missing {
        return e;
    }
    let shown = path.display();
    let makes = match spec.format() == Format::Qcow2 || has_name_of_qcow2(path) {
        true => format!("vshunt image create -f qcow2 {shown} 10G"),
        false => format!("truncate -s 10G {shown}"),
    };
    e.remedy(format!("{makes} would make an empty one of 10 GiB"))
}

/// Opens, locks and probes a file: the image of a raw disk, or a file below an image format.
/// Returns it with the [size of the disk](image_size) in it, bytes.
pub(crate) fn open(spec: &DiskSpec) -> Result<(Raw, u64, Limits)> {
    let Some(path) = &spec.file else { return Err(no_image(spec)) };
    let shown = path.display();
    let path_fd = PathFd::open(path).map_err(|e| open_error(path, spec, e))?;
    path_fd.check(path)?;
    let (file, direct) = open_file(&path_fd, path, spec)?;
    // After the file is open: NFS then learns what it is, and overlayfs may replace it by another
    // one.
    let meta = file.metadata().map_err(|e| Error::io(format_args!("cannot look at {shown}"), e))?;
    let block_device = meta.file_type().is_block_device();
    if block_device && !spec.readonly && probe::device_readonly(&file) {
        return Err(Error::invalid(format!("{shown} is a read-only device: add readonly=on")));
    }
    if spec.locking {
        lock::lock(&file, path, spec.readonly)?;
    }
    let size_bytes = image_size(&file, path, block_device)?;
    if spec.size.is_some_and(|s| s != size_bytes) {
        return Err(Error::invalid(format!(
            "{shown} has {size_bytes} bytes, not {}: the size of a raw disk is taken from the file, leave out size=",
            spec.size.unwrap_or(0)
        )));
    }
    let file_system = file_system(&file, path, block_device, spec)?;
    let device = block_device.then(|| probe::device(&file)).transpose();
    let device = device.map_err(|e| Error::io(format_args!("cannot ask {shown} for its block size"), e))?;
    let inline = matches!(file_system, FileSystem::Tmpfs | FileSystem::Hugetlbfs);
    let Aligned { file, direct, memory_mask, offset_mask, buffered } =
        align(file, direct, inline, &device, (&path_fd, path), spec)?;
    let punches = match &device {
        _ if spec.readonly => false,
        Some(_) => true,
        None => probe::punches_holes(&file, size_bytes),
    };
    let limits = limits(&meta, device.as_ref(), spec.readonly, punches);
    let zeroes =
        Mapping::new(ZERO_BYTES, ProtFlags::READ).map_err(|e| Error::io("cannot map a page of zeroes", e))?;
    let mut methods = method::ZERO_RANGE;
    if punches {
        methods |= method::PUNCH;
    }
    if block_device {
        methods |= method::COMMAND;
    }
    let file = Arc::new(file);
    let raw = Raw {
        path: path.clone(),
        id: (meta.dev(), meta.ino()),
        times: FileTimes::of(&meta),
        known: file.clone(),
        file,
        buffered,
        block_device,
        memory_mask,
        offset_mask,
        direct,
        inline,
        offload: file_system == FileSystem::Fuse,
        attributes_wait: matches!(file_system, FileSystem::Fuse | FileSystem::Network),
        durable: match spec.cache {
            Cache::Writeback => Durable::OnRequest,
            Cache::Writethrough => Durable::Always,
            Cache::Unsafe => Durable::Never,
        },
        readonly: spec.readonly,
        zeroes,
        methods: AtomicU8::new(methods),
        writes_zeroes: AtomicBool::new(device.as_ref().is_some_and(|device| device.zeroes_max == 0)),
        flush_failed: AtomicI32::new(0),
    };
    Ok((raw, size_bytes, limits))
}

/// Returns the file system of an image.
///
/// # Errors
/// The file system is not known, or its files cannot be written as the disk needs it.
fn file_system(file: &File, path: &Path, block_device: bool, spec: &DiskSpec) -> Result<FileSystem> {
    if block_device {
        return Ok(FileSystem::Disk);
    }
    let shown = path.display();
    let found = probe::file_system(file).map_err(|e| Error::io(format_args!("cannot look at {shown}"), e))?;
    if found == FileSystem::Hugetlbfs && !spec.readonly {
        return Err(Error::unsupported(format!(
            "{shown} is on a hugetlbfs, whose files cannot be written by write(2): put it on a tmpfs \
             (mount -t tmpfs -o huge=always ...), or add readonly=on"
        )));
    }
    Ok(found)
}

pub(crate) fn no_image(spec: &DiskSpec) -> Error {
    Error::invalid(format!("disk {} has format raw, which needs an image: add file=PATH", spec.name))
}

/// Returns the size of the disk in an image, a multiple of 512 bytes.
///
/// A file may have any length. As in QEMU, the disk ends with the sector that the file ends in, and
/// the rest of that sector reads as zeroes. A write to the sector makes the file longer. An empty
/// file is a disk of 0 bytes.
///
/// # Errors
/// `Invalid` for a length that no disk can have; `Io` for errors of the system.
pub(super) fn image_size(file: &File, path: &Path, block_device: bool) -> Result<u64> {
    let size = if block_device { probe::device_size(file) } else { file.metadata().map(|m| m.len()) };
    let size =
        size.map_err(|e| Error::io(format_args!("cannot ask for the size of {}", path.display()), e))?;
    let rounded = match block_device {
        true => size,
        false => size.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(size),
    };
    match why_no_size(rounded) {
        Some(_) if rounded == 0 && !block_device => Ok(0),
        None => Ok(rounded),
        Some(why) => {
            let remedy = if block_device { "choose another device" } else { "choose another file" };
            let path = path.display();
            Err(Error::invalid(format!(
                "{path} has {size} bytes, which is no size of a disk: {why}; {remedy}"
            )))
        }
    }
}

/// Returns the remedy for a file that begins like a qcow2 image where a raw image is expected, or
/// nothing for other files. Used only in messages: a guest may write such a beginning to its raw
/// disk.
pub(crate) fn begins_as_qcow2(path: &Path) -> Option<String> {
    let mut start = [0; 8];
    open_image(path, false).and_then(|mut file| io::Read::read_exact(&mut file, &mut start)).ok()?;
    Some(match Header::probe(&start)? {
        version if Header::knows(version) => "say format=qcow2 (vshunt-blk: --format=qcow2)".to_owned(),
        version => format!(
            "its version {version} is not known (2 and 3 are), convert it with 'qemu-img convert -O qcow2'"
        ),
    })
}

/// Opens the image, with O_DIRECT if it is wanted and possible.
fn open_file(path_fd: &PathFd, path: &Path, spec: &DiskSpec) -> Result<(File, bool)> {
    let open_with = |flags| path_fd.reopen(!spec.readonly, flags);
    if spec.direct == Direct::Off {
        return open_with(0).map(|f| (f, false)).map_err(|e| open_error(path, spec, e));
    }
    match open_with(libc::O_DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(e) if e.raw_os_error() != Some(libc::EINVAL) => Err(open_error(path, spec, e)),
        Err(_) if spec.direct == Direct::On => Err(no_direct(path, "its file system has no O_DIRECT")),
        Err(_) => match open_with(0) {
            Ok(file) => Ok((file, false)),
            Err(e) => Err(open_error(path, spec, e)),
        },
    }
}

fn no_direct(path: &Path, why: impl Display) -> Error {
    Error::unsupported(format!("{} cannot be used with direct=on: {why}; use direct=auto", path.display()))
}

fn open_error(path: &Path, spec: &DiskSpec, e: io::Error) -> Error {
    let readonly = spec.readonly;
    let shown = path.display();
    match e.raw_os_error() {
        Some(libc::ENOENT) if path.starts_with("/dev") && !path.starts_with("/dev/shm") => Error::not_found(
            format!("there is no device {shown}; check the name, and activate its volume (vgchange -ay)"),
        ),
        Some(libc::ENOENT) if path.parent().is_some_and(|p| !p.as_os_str().is_empty() && !p.exists()) => {
            Error::not_found(format!("there is no image {shown}, nor its folder"))
        }
        Some(libc::ENOENT) => Error::not_found(format!("there is no image {shown}")),
        Some(libc::EROFS) if !readonly => Error::io(
            format_args!("cannot open {shown} for writing (add readonly=on to serve it read-only)"),
            e,
        ),
        Some(libc::EACCES | libc::EPERM) if !readonly => Error::io(
            format_args!(
                "cannot open {shown} for reading and writing (if it may only be read, add readonly=on)"
            ),
            e,
        ),
        Some(libc::ETXTBSY) => {
            Error::busy(format!("{shown} is a program that runs; add readonly=on, or choose a disk image"))
        }
        _ => Error::io(format_args!("cannot open {shown}"), e),
    }
}

/// A file, and the alignment that its O_DIRECT requires.
struct Aligned {
    file: File,
    direct: bool,
    memory_mask: usize,
    offset_mask: u64,
    buffered: Option<SharedFile>,
}

/// Finds the alignment that O_DIRECT requires. If that is too large, opens a second descriptor or
/// gives O_DIRECT up.
fn align(
    file: File,
    direct: bool,
    inline: bool,
    device: &Option<Device>,
    (path_fd, path): (&PathFd, &Path),
    spec: &DiskSpec,
) -> Result<Aligned> {
    // A file in memory ignores O_DIRECT and takes any alignment.
    let without_direct =
        |file| Aligned { file, direct: false, memory_mask: 0, offset_mask: 0, buffered: None };
    if inline || !direct {
        return Ok(without_direct(file));
    }
    let logical_block = device.as_ref().map_or(512, |d| d.logical_block);
    // SAFETY: sysconf takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let why = match probe::direct_align(&file, logical_block) {
        None => "its file system has no O_DIRECT for it".to_owned(),
        Some((_, offset)) if offset > 512 && offset < page => {
            // `Raw::buffered` explains why these two cannot be combined.
            format!(
                "it takes O_DIRECT in units of {offset} bytes only, less than this system's pages of {page}"
            )
        }
        Some((memory, _)) if memory > BOUNCE_ALIGN => {
            format!("it takes O_DIRECT with memory aligned to {memory} bytes only")
        }
        Some((memory, offset)) => {
            let buffered = if offset > 512 { Some(open_buffered(path_fd, path, spec)?) } else { None };
            return Ok(Aligned { file, direct, memory_mask: memory - 1, offset_mask: offset - 1, buffered });
        }
    };
    if spec.direct == Direct::On {
        return Err(no_direct(path, why));
    }
    // This changes the open file itself, so that its locks stay.
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty())
        .map_err(|e| Error::io(format_args!("cannot leave O_DIRECT for {}", path.display()), e.into()))?;
    Ok(without_direct(file))
}

/// Opens the same file again, without O_DIRECT.
fn open_buffered(path_fd: &PathFd, path: &Path, spec: &DiskSpec) -> Result<SharedFile> {
    let second = path_fd.reopen(!spec.readonly, 0).map_err(|e| open_error(path, spec, e))?;
    // An error is ignored: the call only switches read-ahead off.
    // SAFETY: posix_fadvise takes no pointers.
    unsafe { libc::posix_fadvise(second.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    Ok(Arc::new(second))
}

fn limits(meta: &Metadata, device: Option<&Device>, readonly: bool, punches: bool) -> Limits {
    let power = |n: u32, or: u32| if n.is_power_of_two() { n } else { or };
    let (logical, physical, min_io, opt_io, discard, discard_max) = match device {
        Some(d) => (d.logical_block, d.physical_block, d.min_io, d.opt_io, d.discard_align, d.discard_max),
        None => {
            let block = u32::try_from(meta.blksize()).unwrap_or(4096);
            (512, block, block, 0, block, u64::MAX)
        }
    };
    let block_size = power(logical, 512).clamp(512, 4096);
    let physical = power(physical, 4096).max(block_size);
    let discard_align = power(discard, block_size).max(block_size);
    let can_discard = !readonly && punches && discard_max > 0;
    Limits {
        block_size,
        physical_block_exp: (physical / block_size).ilog2() as u8,
        min_io: min_io.max(block_size),
        opt_io,
        max_discard_bytes: if can_discard { Limits::DISCARD_BYTES_MAX } else { 0 },
        discard_align,
        can_discard,
        can_zero: !readonly,
    }
}
