//! Internal snapshots: their table, and what makes, applies and deletes one.

use crate::image::Image;
use crate::{Error, Result};

/// Bytes of one entry's fixed part.
const ENTRY: usize = 40;
/// Bytes of extra data of one entry at most, as QEMU has it.
const EXTRA_MAX: usize = 1024;
/// Bytes of the table at most, as QEMU has it.
pub(crate) const TABLE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of extra data that version 3 demands: state size and disk size.
pub(crate) const EXTRA_V3: usize = 16;

/// One snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table begins.
    pub l1_offset: u64,
    /// Entries of it.
    pub l1_size: u32,
    /// The unique id; as it is written, which may be no text.
    pub id: Vec<u8>,
    /// The name, likewise.
    pub name: Vec<u8>,
    /// When it was taken, seconds since 1970.
    pub date_s: u32,
    /// And nanoseconds.
    pub date_ns: u32,
    /// For how long the guest had been running, nanoseconds.
    pub vm_clock_ns: u64,
    /// Size of the saved state of a VM, bytes.
    pub vm_state_bytes: u64,
    /// Size of the disk, bytes, where the entry says so.
    pub disk_size: Option<u64>,
    /// Count of instructions, where the entry has one.
    pub icount: Option<u64>,
    /// Extra data behind these, kept.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// The id, readable.
    pub fn id(&self) -> String {
        String::from_utf8_lossy(&self.id).into_owned()
    }

    /// The name, readable.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }
}

/// The table of an image: its snapshots, and its length in bytes.
///
/// # Errors
/// It does not lie in the file, or an entry of it is too long.
pub fn read_table(image: &Image<'_>) -> Result<(Vec<Snapshot>, u64)> {
    let h = &image.header;
    let (mut at, mut list) = (h.snapshots_offset, Vec::new());
    for n in 0..h.snapshots {
        let (snapshot, bytes) =
            read_entry(image, at).map_err(|e| Error::corrupt(format!("snapshot table, entry {n}: {e}")))?;
        list.push(snapshot);
        at += bytes;
        if at - h.snapshots_offset > TABLE_BYTES_MAX {
            return Err(Error::corrupt("a snapshot table of more than 64 MiB"));
        }
    }
    Ok((list, at - h.snapshots_offset))
}

fn read_entry(image: &Image<'_>, at: u64) -> Result<(Snapshot, u64)> {
    let beyond = || Error::corrupt(format!("at {at:#x}, where the file has none"));
    let read = |at: u64, buf: &mut [u8]| {
        if at == 0 || !image.reaches(at, buf.len() as u64) {
            return Err(beyond());
        }
        image.file.read_at(at, buf).map_err(Error::io("cannot read the snapshot table"))
    };
    let mut fixed = [0; ENTRY];
    read(at, &mut fixed)?;
    let number = |range: std::ops::Range<usize>| fixed[range].iter().fold(0, |n, b| n << 8 | u64::from(*b));
    let (id_len, name_len, extra_len) =
        (number(12..14) as usize, number(14..16) as usize, number(36..40) as usize);
    if extra_len > EXTRA_MAX {
        return Err(Error::corrupt(format!("{extra_len} bytes of extra data; {EXTRA_MAX} is the most")));
    }
    let mut rest = vec![0; extra_len + id_len + name_len];
    read(at + ENTRY as u64, &mut rest)?;
    let extra = |from: usize| {
        let part = rest[..extra_len].get(from..from + 8)?;
        Some(u64::from_be_bytes(part.try_into().expect("eight bytes")))
    };
    let snapshot = Snapshot {
        l1_offset: number(0..8),
        l1_size: number(8..12) as u32,
        id: rest[extra_len..extra_len + id_len].to_vec(),
        name: rest[extra_len + id_len..].to_vec(),
        date_s: number(16..20) as u32,
        date_ns: number(20..24) as u32,
        vm_clock_ns: number(24..32),
        vm_state_bytes: extra(0).unwrap_or_else(|| number(32..36)),
        disk_size: extra(8),
        icount: extra(16),
        extra: rest[extra_len.min(24)..extra_len].to_vec(),
    };
    Ok((snapshot, ((ENTRY + rest.len()) as u64).next_multiple_of(8)))
}
