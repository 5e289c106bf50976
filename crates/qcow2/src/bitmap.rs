//! Persistent dirty bitmaps: their directory and tables, their bits, and operations that add,
//! remove and change them.

mod bits;
mod edit;
mod served;

use crate::bytes::{be16, be32, be64, low_u8, low_u16, low_u32};
use crate::header::autoclear;
use crate::image::Image;
use crate::{Error, Result};

pub use bits::Bits;
pub use edit::{add, clear, enable, load, merge, remove};
pub(crate) use edit::{after_apply, after_resize, replace_directory};
pub use served::{Loaded, load_all, mark_in_use, store};

/// Bytes of one directory entry's fixed part.
const ENTRY: usize = 24;
/// Most bitmaps of an image (QEMU's limit).
pub const COUNT_MAX: u32 = 65535;
/// Most bytes of a bitmap's name (QEMU's limit).
pub const NAME_MAX: usize = 1023;
/// Most bytes of the directory (QEMU's limit).
const DIRECTORY_BYTES_MAX: u64 = COUNT_MAX as u64 * 1024;
/// Most entries of a bitmap's table (QEMU's limit).
const TABLE_ENTRIES_MAX: u32 = 1 << 27;
/// log2 of the bytes for each bit (QEMU's limits).
pub const GRANULARITY_BITS: std::ops::RangeInclusive<u32> = 9..=31;
/// The only type that is specified: a dirty tracking bitmap.
const DIRTY_TRACKING: u8 = 1;

/// Bits of a directory entry's flags.
pub mod flag {
    /// The last writer did not write the bitmap back, so the bitmap is inconsistent.
    pub const IN_USE: u32 = 1 << 0;
    /// The bitmap is enabled: every write to the disk has to be tracked.
    pub const AUTO: u32 = 1 << 1;
    /// The bitmap may be used although its extra data is unknown.
    pub const EXTRA_COMPATIBLE: u32 = 1 << 2;
    /// The flags that are specified.
    pub const KNOWN: u32 = IN_USE | AUTO | EXTRA_COMPATIBLE;
}

/// A bitmap table's entry without a cluster: all bits of that cluster are set.
pub(crate) const ALL_ONES: u64 = 1;
/// Bits of a bitmap table's entry that have to be 0, except [`ALL_ONES`].
pub(crate) const TABLE_RESERVED: u64 = 0xff00_0000_0000_01fe;

/// A bitmap as the directory describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap {
    /// The name as it is stored, which may not be text.
    pub name: Vec<u8>,
    /// Bits of [`flag`].
    pub flags: u32,
    /// log2 of the bytes of the disk for each bit.
    pub granularity_bits: u32,
    /// The offset of its table.
    pub table_offset: u64,
    /// The number of entries of its table.
    pub table_size: u32,
    /// The type; 1 is a dirty tracking bitmap.
    pub kind: u8,
    /// Unknown extra data, which is kept.
    pub extra: Vec<u8>,
}

impl Bitmap {
    /// Returns the name as text.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Returns whether a flag is set.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.table_offset.to_be_bytes());
        out.extend_from_slice(&self.table_size.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&[self.kind, low_u8(self.granularity_bits.into())]);
        out.extend_from_slice(&low_u16(self.name.len() as u64).to_be_bytes());
        out.extend_from_slice(&low_u32(self.extra.len() as u64).to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
    }

    /// Checks it in an image of `size` bytes with clusters of `1 << cluster_bits` bytes.
    fn check(&self, size: u64, cluster_bits: u32) -> Result<()> {
        let bad = |why: String| Err(Error::corrupt(format!("bitmap {}: {why}", self.name())));
        if self.kind != DIRTY_TRACKING || self.flags & !flag::KNOWN != 0 {
            return bad(format!("type {} with flags {:#x}", self.kind, self.flags));
        }
        if !GRANULARITY_BITS.contains(&self.granularity_bits) {
            return bad(format!("a granularity of 2^{} bytes", self.granularity_bits));
        }
        if self.name.is_empty() || self.name.len() > NAME_MAX || self.table_size > TABLE_ENTRIES_MAX {
            return bad(format!("a name of {} bytes, {} table entries", self.name.len(), self.table_size));
        }
        let needed = table_entries(size, self.granularity_bits, cluster_bits);
        // The table of a bitmap in use may have the size for a former size of the disk.
        if !self.has(flag::IN_USE) && u64::from(self.table_size) != needed {
            return bad(format!("{} table entries; the disk's size needs {needed}", self.table_size));
        }
        Ok(())
    }
}

/// Returns the number of clusters of a bitmap for a disk of `size` bytes.
pub(crate) fn table_entries(size: u64, granularity_bits: u32, cluster_bits: u32) -> u64 {
    let bits = size.div_ceil(1 << granularity_bits);
    bits.div_ceil(8).div_ceil(1 << cluster_bits)
}

/// Returns whether the image's bitmaps extension is valid. If not, the image counts as one without
/// bitmaps.
pub fn consistent(image: &Image<'_>) -> bool {
    image.header.bitmaps.is_some() && image.header.autoclear & autoclear::BITMAPS != 0
}

/// Returns the bitmaps of an image. There are none if the extension is not [`consistent`].
///
/// # Errors
/// The directory is not in the file, or is invalid.
pub fn read_directory(image: &Image<'_>) -> Result<Vec<Bitmap>> {
    let Some(at) = image.header.bitmaps.filter(|_| consistent(image)) else { return Ok(Vec::new()) };
    if at.count == 0 || at.count > COUNT_MAX || at.directory_bytes > DIRECTORY_BYTES_MAX {
        return Err(Error::corrupt(format!(
            "{} bitmaps in a directory of {} bytes",
            at.count, at.directory_bytes
        )));
    }
    let bytes = image.read(at.directory_offset, at.directory_bytes, "a bitmap directory")?;
    let (mut rest, mut list) = (&bytes[..], Vec::new());
    for n in 0..at.count {
        let (bitmap, len) = entry(rest)
            .ok_or_else(|| Error::corrupt(format!("bitmap {n} does not fit into the directory")))?;
        bitmap.check(image.header.size, image.header.cluster_bits)?;
        list.push(bitmap);
        rest = rest.get(len..).unwrap_or_default();
    }
    if !rest.is_empty() {
        return Err(Error::corrupt(format!("{} bytes behind the last bitmap of the directory", rest.len())));
    }
    Ok(list)
}

/// Parses the entry at the start of `bytes`. Returns it and its length.
fn entry(bytes: &[u8]) -> Option<(Bitmap, usize)> {
    let fixed = bytes.get(..ENTRY)?;
    let name_at = ENTRY.checked_add(be32(fixed, 20) as usize)?;
    let end = name_at.checked_add(be16(fixed, 18).into())?;
    let len = end.checked_next_multiple_of(8)?;
    bytes.get(..len)?;
    let bitmap = Bitmap {
        name: bytes.get(name_at..end)?.to_vec(),
        flags: be32(fixed, 12),
        granularity_bits: (*fixed.get(17)?).into(),
        table_offset: be64(fixed, 0),
        table_size: be32(fixed, 8),
        kind: *fixed.get(16)?,
        extra: bytes.get(ENTRY..name_at)?.to_vec(),
    };
    Some((bitmap, len))
}

#[cfg(test)]
pub(crate) mod tests;
