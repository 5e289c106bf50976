//! What a disk is made of: memory, a raw file, a qcow2 image, a server, or nothing.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Direct, DiskSpec, Format};

use super::cost::Zeroing;
use super::file_times::FileTimes;
use super::image_file::Remote;
use super::limits::{Limits, SECTOR_BYTES, why_no_size};
use super::memory::Ram;
use super::nbd::{self, Nbd};
use super::qcow2::{self, Qcow2};
use super::raw::{self, Raw};
use super::{Io, Op};

/// What a disk is made of. A clone refers to the same memory or files.
#[derive(Clone)]
pub(super) enum Backend {
    /// Requests complete at once. A read leaves the guest's buffer as it is, like QEMU's `null-co`
    /// with `read-zeroes=off`.
    Null,
    Ram(Arc<Ram>),
    Raw(Arc<Raw>),
    Qcow2(Arc<Qcow2>),
    Nbd(Arc<Nbd>),
    /// Another disk as it was: `Disk::frozen`.
    Frozen,
    /// The image could not be opened again. Every request fails with EIO.
    Gone,
}

impl Backend {
    /// Waits for a sign of life of the server, if the disk is on one. Control threads call it
    /// before they wait for a request. Blocks.
    ///
    /// # Errors
    /// Those of [`Nbd::lives`].
    pub(super) fn lives(&self) -> std::io::Result<()> {
        match self {
            Self::Nbd(nbd) => nbd.lives(),
            Self::Qcow2(image) => image.remote().map_or(Ok(()), Remote::lives),
            _ => Ok(()),
        }
    }

    /// Opens and locks the backend that `spec` describes. Returns it with its size in bytes and its
    /// limits. `growable`: a qcow2 image gets room to grow while it is served.
    ///
    /// # Errors
    /// Those of [`Disk::open`](super::Disk::open).
    pub(super) fn open(spec: &DiskSpec, growable: bool) -> Result<(Self, u64, Limits)> {
        Self::open_again(spec, growable, None)
    }

    /// [`open`](Self::open) for an image whose file on a server is open already.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub(super) fn open_again(
        spec: &DiskSpec,
        growable: bool,
        remote: Option<Remote>,
    ) -> Result<(Self, u64, Limits)> {
        Ok(match spec.format() {
            Format::Raw => {
                let (raw, size_bytes, limits) =
                    raw::open(spec).map_err(|e| raw::with_way_to_make(e, spec))?;
                (Self::Raw(Arc::new(raw)), size_bytes, limits)
            }
            Format::Qcow2 => {
                let (image, size_bytes, limits) = qcow2::open(spec, growable, remote)?;
                (Self::Qcow2(Arc::new(image)), size_bytes, limits)
            }
            Format::Nbd => {
                let (nbd, size_bytes, limits) = nbd::open(spec)?;
                (Self::Nbd(Arc::new(nbd)), size_bytes, limits)
            }
            Format::Null => (Self::Null, memory_size(spec)?, Limits::memory(spec.readonly)),
            Format::Ram => {
                let size_bytes = memory_size(spec)?;
                let ram = Ram::new(&spec.name, size_bytes)?;
                (Self::Ram(Arc::new(ram)), size_bytes, Limits::memory(spec.readonly))
            }
            Format::Frozen => return Err(no_frozen(spec)),
        })
    }

    /// Returns the files of this host: the image, then its data file and its backing images.
    pub(super) fn files(&self) -> impl Iterator<Item = &Raw> {
        let (raw, image) = match self {
            Self::Raw(raw) => (Some(&**raw), None),
            Self::Qcow2(image) => (None, Some(image)),
            Self::Null | Self::Ram(_) | Self::Nbd(_) | Self::Frozen | Self::Gone => (None, None),
        };
        raw.into_iter().chain(image.into_iter().flat_map(|image| image.files()))
    }

    /// Returns the times that the files of the disk itself had before they were opened: for a qcow2
    /// image the later ones of the image and its data file. None without such a file.
    pub(super) fn file_times(&self) -> Option<FileTimes> {
        let files = match self {
            Self::Raw(raw) => return Some(raw.times()),
            Self::Qcow2(image) => image.own_files(),
            Self::Null | Self::Ram(_) | Self::Nbd(_) | Self::Frozen | Self::Gone => return None,
        };
        files.map(Raw::times).reduce(FileTimes::later)
    }

    /// Returns the URI if the disk, or its image, is on a server.
    pub(super) fn uri(&self) -> Option<&str> {
        match self {
            Self::Nbd(nbd) => Some(nbd.uri()),
            Self::Qcow2(image) => image.image().uri(),
            Self::Null | Self::Ram(_) | Self::Raw(_) | Self::Frozen | Self::Gone => None,
        }
    }

    /// Returns the file of the image if it is one of this host.
    pub(super) fn image(&self) -> Option<&Raw> {
        match self {
            Self::Raw(raw) => Some(raw),
            Self::Qcow2(image) => image.image().local(),
            Self::Null | Self::Ram(_) | Self::Nbd(_) | Self::Frozen | Self::Gone => None,
        }
    }

    /// Returns the file of a qcow2 image if it is on a server.
    pub(super) fn remote(&self) -> Option<&Remote> {
        match self {
            Self::Qcow2(image) => image.remote(),
            _ => None,
        }
    }

    /// See [`Disk::alignment`](super::Disk::alignment).
    pub(super) fn alignment(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.alignment(),
            // The format works on whole sectors of its files.
            Self::Qcow2(_) => SECTOR_BYTES,
            Self::Nbd(nbd) => u64::from(nbd.settings().blocks.minimum),
            // A frozen disk has that of its source.
            Self::Null | Self::Ram(_) | Self::Frozen | Self::Gone => 1,
        }
    }

    /// Returns how a range is zeroed whose space is to be kept, which is what costs most.
    pub(super) fn zeroing(&self) -> Zeroing {
        match self {
            Self::Null | Self::Ram(_) | Self::Frozen | Self::Gone => Zeroing::Marks,
            Self::Raw(raw) => raw.zeroing(false),
            Self::Qcow2(image) => image.zeroing(),
            Self::Nbd(_) => Zeroing::Writes,
        }
    }

    /// See [`Disk::zero_alignment`](super::Disk::zero_alignment).
    pub(super) fn zero_alignment(&self, block_size: u32) -> u64 {
        match self {
            Self::Raw(raw) if !raw.is_file() => u64::from(block_size),
            Self::Qcow2(_) => SECTOR_BYTES,
            Self::Nbd(nbd) => u64::from(nbd.settings().blocks.minimum),
            Self::Raw(_) | Self::Null | Self::Ram(_) | Self::Frozen | Self::Gone => 1,
        }
    }

    /// Whether the image was found to be corrupt since it was opened. It could not be opened again
    /// for writing.
    pub(super) fn is_corrupt(&self) -> bool {
        matches!(self, Self::Qcow2(image) if image.is_corrupt())
    }
}

/// Returns the error of a frozen disk that is not made by a job.
pub(super) fn no_frozen(spec: &DiskSpec) -> Error {
    Error::invalid(format!(
        "disk {}: format frozen is of the disk that `backup start --pull` makes; choose another format",
        spec.name
    ))
}

/// Carries out a request on a disk of format `null`. Returns 0 or a negative errno.
#[inline]
pub(super) fn null(io: &mut Io) -> i32 {
    match io.request.op {
        Op::WriteCompressed | Op::Populate => -libc::EOPNOTSUPP,
        Op::Seek { .. } => io.all_data(),
        _ => 0,
    }
}

/// Returns the size of a disk without an image, bytes.
///
/// # Errors
/// `Invalid` if the size is missing or impossible, or if `spec` has a key that only images have.
pub(super) fn memory_size(spec: &DiskSpec) -> Result<u64> {
    let (name, format) = (&spec.name, if spec.format() == Format::Null { "null" } else { "ram" });
    if let Some(file) = &spec.file {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which has no image: leave out file={} or use format=raw",
            file.display()
        )));
    }
    if spec.direct == Direct::On {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which has no page cache: leave out direct=on"
        )));
    }
    let Some(size) = spec.size else {
        return Err(Error::invalid(format!(
            "disk {name} has format {format}, which needs a size: add size=1G, say"
        )));
    };
    match why_no_size(size) {
        None => Ok(size),
        Some(why) => Err(Error::invalid(format!("disk {name} cannot have {size} bytes: {why}"))),
    }
}
