//! What a guest learns about a disk: block sizes, discards, and which sizes a disk can have.

use std::io;

use vshunt_types::error::{Error, Result};

/// The unit of sizes and offsets, in bytes. The size of a disk is a multiple of it for all logical
/// block sizes (virtio 1.3, section 5.2.4: the capacity is in sectors of 512 bytes).
pub const SECTOR_BYTES: u64 = 512;

/// What a guest learns about a disk. Lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Logical block size: a power of two from 512 to 4096.
    pub block_size: u32,
    /// log2 of the number of logical blocks in a physical block.
    pub physical_block_exp: u8,
    /// Requests that are multiples of this need no read-modify-write; 0 if that is unknown.
    pub min_io: u32,
    /// Optimal request size; 0 if that is unknown.
    pub opt_io: u32,
    /// Longest discard; 0 if there are none.
    pub max_discard_bytes: u64,
    /// Optimal alignment of a discard.
    pub discard_align: u32,
    /// Whether a discard releases space. If not, discards succeed without effect.
    pub can_discard: bool,
    /// Whether WriteZeroes is possible. It is on every writable disk.
    pub can_zero: bool,
}

impl Limits {
    /// The longest range of a discard or WriteZeroes in virtio is 2^32 - 1 sectors. This is rounded
    /// down to whole physical blocks.
    pub(super) const DISCARD_BYTES_MAX: u64 = (u32::MAX as u64 * SECTOR_BYTES) & !4095;

    /// Returns the limits of a disk without an image.
    pub(super) fn memory(readonly: bool) -> Self {
        Self {
            block_size: 512,
            physical_block_exp: 3,
            min_io: 4096,
            opt_io: 0,
            max_discard_bytes: if readonly { 0 } else { Self::DISCARD_BYTES_MAX },
            discard_align: 4096,
            can_discard: !readonly,
            can_zero: !readonly,
        }
    }
}

/// Checks whether a disk can have a size.
///
/// # Errors
/// `Invalid`, with the size and the reason.
pub(super) fn check_size(size_bytes: u64) -> Result<()> {
    match why_no_size(size_bytes) {
        None => Ok(()),
        Some(why) => Err(Error::invalid(format!("a disk cannot have {size_bytes} bytes: {why}"))),
    }
}

/// Returns why no disk can have this size, or nothing if one can.
pub(super) fn why_no_size(size_bytes: u64) -> Option<String> {
    if size_bytes == 0 {
        return Some("it has to be at least 512".to_owned());
    }
    if size_bytes > i64::MAX as u64 {
        return Some("that is more than a file can have".to_owned());
    }
    let up = size_bytes.next_multiple_of(SECTOR_BYTES);
    (up != size_bytes).then(|| format!("not a multiple of 512; {up} is"))
}

/// Rounds the length of a file up to whole sectors.
///
/// # Errors
/// `EFBIG` if no file can be that long.
pub(super) fn whole_sectors(end: u64) -> io::Result<u64> {
    let rounded = end.checked_next_multiple_of(SECTOR_BYTES).filter(|size| i64::try_from(*size).is_ok());
    rounded.ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}
