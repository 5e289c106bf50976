//! Internal snapshots: their table, and operations that make, apply and delete one.

use crate::bytes::{array, be16, be32, be64, low_u16, low_u32, to_usize};
use crate::change::Change;
use crate::entry::{COPIED, OFFSET};
use crate::header::{Header, L1_BYTES_MAX, SNAPSHOTS_MAX, incompatible, whole_sectors};
use crate::{Error, Image, Result, bitmap, image};

/// Bytes of one entry's fixed part.
const ENTRY: usize = 40;
/// Most bytes of extra data of one entry (QEMU's limit).
const EXTRA_MAX: usize = 1024;
/// Most bytes of the table (QEMU's limit).
pub(crate) const TABLE_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a snapshot's name (QEMU's limit).
const NAME_MAX: usize = 255;
/// Bytes of extra data that version 3 requires: state size and disk size.
pub(crate) const EXTRA_V3: usize = 16;

/// One snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Offset of its L1 table.
    pub l1_offset: u64,
    /// Entries of the L1 table.
    pub l1_size: u32,
    /// The unique id as it is stored, which may not be text.
    pub id: Vec<u8>,
    /// The name as it is stored, which may not be text.
    pub name: Vec<u8>,
    /// The time at which it was taken, in seconds since 1970.
    pub date_s: u32,
    /// The nanoseconds of that time.
    pub date_ns: u32,
    /// The time that the guest had been running, in nanoseconds.
    pub vm_clock_ns: u64,
    /// Size of the saved state of a VM in bytes.
    pub vm_state_bytes: u64,
    /// Size of the disk in bytes, if the entry has it.
    pub disk_size: Option<u64>,
    /// Count of instructions, if the entry has one.
    pub icount: Option<u64>,
    /// Extra data behind these, which is kept.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// Returns the id as text.
    pub fn id(&self) -> String {
        String::from_utf8_lossy(&self.id).into_owned()
    }

    /// Returns the name as text.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Appends the entry to a table.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let mut extra = Vec::with_capacity(24 + self.extra.len());
        extra.extend_from_slice(&self.vm_state_bytes.to_be_bytes());
        if let Some(size) = self.disk_size {
            extra.extend_from_slice(&size.to_be_bytes());
            if let Some(icount) = self.icount {
                extra.extend_from_slice(&icount.to_be_bytes());
                extra.extend_from_slice(&self.extra);
            }
        }
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&low_u16(self.id.len() as u64).to_be_bytes());
        out.extend_from_slice(&low_u16(self.name.len() as u64).to_be_bytes());
        out.extend_from_slice(&self.date_s.to_be_bytes());
        out.extend_from_slice(&self.date_ns.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_ns.to_be_bytes());
        out.extend_from_slice(&u32::try_from(self.vm_state_bytes).unwrap_or(0).to_be_bytes());
        out.extend_from_slice(&low_u32(extra.len() as u64).to_be_bytes());
        for part in [&extra, &self.id, &self.name] {
            out.extend_from_slice(part);
        }
        out.resize(out.len().next_multiple_of(8), 0);
    }
}

/// Reads the table of an image. Returns its snapshots, and its length in bytes.
///
/// # Errors
/// It is not in the file, or an entry of it is too long.
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
    let (id_len, name_len) = (usize::from(be16(&fixed, 12)), usize::from(be16(&fixed, 14)));
    let extra_len = be32(&fixed, 36) as usize;
    if extra_len > EXTRA_MAX {
        return Err(Error::corrupt(format!("{extra_len} bytes of extra data; {EXTRA_MAX} is the most")));
    }
    let mut rest = vec![0; extra_len + id_len + name_len];
    read(at + ENTRY as u64, &mut rest)?;
    // `rest` is as long as the three parts.
    let (extra, names) = rest.split_at(extra_len);
    let (id, name) = names.split_at(id_len);
    let known = |at: usize| array(extra, at).map(u64::from_be_bytes);
    let snapshot = Snapshot {
        l1_offset: be64(&fixed, 0),
        l1_size: be32(&fixed, 8),
        id: id.to_vec(),
        name: name.to_vec(),
        date_s: be32(&fixed, 16),
        date_ns: be32(&fixed, 20),
        vm_clock_ns: be64(&fixed, 24),
        vm_state_bytes: known(0).unwrap_or_else(|| be32(&fixed, 32).into()),
        disk_size: known(8),
        icount: known(16),
        extra: extra.get(24..).unwrap_or_default().to_vec(),
    };
    Ok((snapshot, ((ENTRY + rest.len()) as u64).next_multiple_of(8)))
}

/// Makes the error for a name or id that no snapshot has.
fn missing(which: &str) -> Error {
    Error::invalid(format!("there is no snapshot {which}"))
}

fn allowed(image: &Image<'_>) -> Result<()> {
    if image.header.has(incompatible::DATA_FILE) {
        return Err(Error::unsupported("an image with a data file has no snapshots"));
    }
    Ok(())
}

/// Returns the snapshots, and the index of the one with this id or name.
fn find(image: &Image<'_>, which: &str) -> Result<(Vec<Snapshot>, usize)> {
    let (list, _) = read_table(image)?;
    let at = list.iter().position(|s| s.id == which.as_bytes() || s.name == which.as_bytes());
    at.map(|at| (list, at)).ok_or_else(|| missing(which))
}

/// Returns the snapshot with this id or name.
///
/// # Errors
/// There is none; those of [`read_table`].
pub(crate) fn named(image: &Image<'_>, which: &str) -> Result<Snapshot> {
    let (mut list, at) = find(image, which)?;
    Ok(list.swap_remove(at))
}

/// Writes the table of `list`, which is then in `header`, and frees the old one.
fn replace_table(change: &mut Change<'_, '_>, list: &[Snapshot], header: &mut Header) -> Result<()> {
    let (_, bytes) = read_table(change.image)?;
    change.release(header.snapshots_offset, bytes)?;
    (header.snapshots, header.snapshots_offset) = (low_u32(list.len() as u64), 0);
    if list.is_empty() {
        return Ok(());
    }
    let mut out = Vec::new();
    for s in list {
        s.encode(&mut out);
    }
    if list.len() > SNAPSHOTS_MAX as usize || out.len() as u64 > TABLE_BYTES_MAX {
        return Err(Error::invalid("the image has as many snapshots as it can have"));
    }
    header.snapshots_offset = change.put(out)?;
    Ok(())
}

/// Takes a snapshot of the disk. `now` is seconds and nanoseconds since 1970. Returns the id.
///
/// # Errors
/// A data file, a name that is too long, reference counts or a table at their limit; those of the
/// storage. The image is then unchanged.
pub fn create(image: &mut Image<'_>, name: &str, now: (u32, u32)) -> Result<String> {
    allowed(image)?;
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Error::invalid(format!("a snapshot's name has 1 to {NAME_MAX} bytes")));
    }
    let (mut list, _) = read_table(image)?;
    let last = list.iter().filter_map(|s| s.id().parse::<u64>().ok()).max().unwrap_or(0);
    let id = last.saturating_add(1).to_string();
    let mut header = image.header.clone();
    let mut change = Change::start(image)?;
    let mut l1 = change.l1()?;
    let bits = header.cluster_bits;
    for e in &mut l1 {
        let at = *e & OFFSET;
        if at == 0 {
            continue;
        }
        let mut table = change.l2(at)?;
        change.add_entries(&table, true)?;
        // From now on everything is shared, and nothing in it may be overwritten in place.
        if clear_flags(&mut table, change.words()) {
            change.add(at >> bits, false)?;
            *e = change.put(image::to_bytes(&table))?;
        } else {
            *e = at;
        }
        change.add(*e >> bits, true)?;
    }
    list.push(Snapshot {
        l1_offset: change.put(image::to_bytes(&l1))?,
        l1_size: low_u32(l1.len() as u64),
        id: id.clone().into_bytes(),
        name: name.as_bytes().to_vec(),
        date_s: now.0,
        date_ns: now.1,
        disk_size: Some(header.size),
        icount: Some(u64::MAX),
        ..Snapshot::default()
    });
    change.replace_l1(&l1, &mut header)?;
    replace_table(&mut change, &list, &mut header)?;
    change.commit(header)?;
    Ok(id)
}

/// Clears all flags. Returns whether there was one.
fn clear_flags(table: &mut [u64], words: usize) -> bool {
    let mut found = false;
    for e in table.iter_mut().step_by(words) {
        found |= *e & COPIED != 0;
        *e &= !COPIED;
    }
    found
}

/// Restores the disk as it was when the snapshot of this id or name was taken, its size included.
/// Bitmaps that track writes then have all bits set.
///
/// # Errors
/// There is no such snapshot; those of the storage. The image is then unchanged.
pub fn apply(image: &mut Image<'_>, which: &str) -> Result<()> {
    allowed(image)?;
    let (list, at) = find(image, which)?;
    let snapshot = list.get(at).ok_or_else(|| missing(which))?;
    let mut header = image.header.clone();
    header.size = snapshot.disk_size.map_or(header.size, whole_sectors);
    if header.size > i64::MAX as u64 {
        return Err(Error::corrupt(format!("snapshot {which} of a disk of {} bytes", header.size)));
    }
    let entries = u64::from(snapshot.l1_size);
    let mut l1 = image.table(snapshot.l1_offset, entries, "the snapshot's L1 table")?;
    let needed = header.l1_needed().max(1);
    if needed > u64::from(snapshot.l1_size) && needed * 8 > L1_BYTES_MAX {
        return Err(Error::corrupt(format!("snapshot {which} of a disk of {} bytes", header.size)));
    }
    l1.resize(l1.len().max(to_usize(needed)), 0);
    let bitmaps = bitmap::after_apply(image, header.size)?;
    let mut change = Change::start(image)?;
    let active = change.l1()?;
    change.add_tables(&l1, true)?;
    change.add_tables(&active, false)?;
    change.set_flags(&mut l1)?;
    change.replace_l1(&l1, &mut header)?;
    if let Some(bitmaps) = bitmaps {
        bitmap::replace_directory(&mut change, bitmaps, &mut header)?;
    }
    change.commit(header)
}

/// Removes the snapshot of this id or name.
///
/// # Errors
/// There is no such snapshot; those of the storage. The image is then unchanged.
pub fn delete(image: &mut Image<'_>, which: &str) -> Result<()> {
    let (mut list, at) = find(image, which)?;
    let snapshot = list.remove(at);
    let entries = u64::from(snapshot.l1_size);
    let l1 = image.table(snapshot.l1_offset, entries, "the snapshot's L1 table")?;
    let mut header = image.header.clone();
    let mut change = Change::start(image)?;
    change.add_tables(&l1, false)?;
    change.release(snapshot.l1_offset, entries * 8)?;
    let mut active = change.l1()?;
    change.set_flags(&mut active)?;
    change.replace_l1(&active, &mut header)?;
    replace_table(&mut change, &list, &mut header)?;
    change.commit(header)
}

#[cfg(test)]
mod tests;
