//! Operations that add, remove and change bitmaps. Each is one [`Change`].

use super::bits::Bits;
use super::{
    ALL_ONES, Bitmap, COUNT_MAX, DIRECTORY_BYTES_MAX, DIRTY_TRACKING, GRANULARITY_BITS, NAME_MAX, consistent,
    flag, read_directory, table_entries,
};
use crate::bytes::{low_u32, to_usize};
use crate::change::Change;
use crate::entry::OFFSET;
use crate::header::{BitmapsAt, Header, autoclear};
use crate::{Error, Image, Result, image};

/// The new state of a bitmap.
pub(crate) struct Edited {
    pub(super) bitmap: Bitmap,
    pub(super) contents: Contents,
}

pub(super) enum Contents {
    /// The bits stay.
    Keep,
    /// The bitmap gets these bits. It may be new.
    New(Bits),
    /// The bitmap is removed.
    Gone,
}

/// Reads the bits of a bitmap.
///
/// # Errors
/// There is none of that name, it is inconsistent, or its table has an invalid offset.
pub fn load(image: &Image<'_>, name: &str) -> Result<Bits> {
    let list = read_directory(image)?;
    let bitmap = list.iter().find(|b| b.name == name.as_bytes()).ok_or_else(|| missing(name))?;
    load_bits(image, bitmap)
}

pub(super) fn load_bits(image: &Image<'_>, bitmap: &Bitmap) -> Result<Bits> {
    usable(bitmap)?;
    let mut bits = Bits::new(image.header.size, bitmap.granularity_bits)?;
    let table = image.table(bitmap.table_offset, u64::from(bitmap.table_size), "a bitmap table")?;
    let cluster = image.header.cluster_size();
    for (e, chunk) in table.iter().zip(bits.bytes_mut().chunks_mut(to_usize(cluster))) {
        match e & OFFSET {
            0 => chunk.fill(if e & ALL_ONES != 0 { 0xff } else { 0 }),
            at => {
                let read = image.read(at, cluster, "bits of a bitmap")?;
                chunk.iter_mut().zip(read).for_each(|(to, from)| *to = from);
            }
        }
    }
    bits.clear_tail();
    Ok(bits)
}

fn missing(name: &str) -> Error {
    Error::invalid(format!("there is no bitmap {name}"))
}

fn usable(bitmap: &Bitmap) -> Result<()> {
    if bitmap.has(flag::IN_USE) {
        return Err(Error::invalid(format!(
            "bitmap {} is inconsistent: the last writer of the image did not write it back; remove it and add it again",
            bitmap.name()
        )));
    }
    if !bitmap.extra.is_empty() && !bitmap.has(flag::EXTRA_COMPATIBLE) {
        return Err(Error::unsupported(format!("bitmap {} has extra data that is not known", bitmap.name())));
    }
    Ok(())
}

/// Adds a bitmap with no bits set. A bit stands for `1 << granularity_bits` bytes, by default for
/// one cluster, limited to 4 to 64 KiB. An enabled bitmap tracks writes.
///
/// # Errors
/// There is one of that name, the name is too long, the granularity is out of range, or the image
/// has version 2.
pub fn add(image: &mut Image<'_>, name: &str, granularity_bits: Option<u32>, enabled: bool) -> Result<()> {
    if image.header.version < 3 {
        return Err(Error::unsupported("images with compat=0.10 have no bitmaps"));
    }
    let granularity_bits = granularity_bits.unwrap_or(image.header.cluster_bits.clamp(12, 16));
    if !GRANULARITY_BITS.contains(&granularity_bits) {
        return Err(Error::invalid("a bitmap's granularity is a power of two, 512 bytes to 2G"));
    }
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Error::invalid(format!("a bitmap's name has 1 to {NAME_MAX} bytes")));
    }
    let bits = Bits::new(image.header.size, granularity_bits)?;
    let mut list = kept(image)?;
    if list.iter().any(|e| e.bitmap.name == name.as_bytes()) {
        return Err(Error::invalid(format!("there is a bitmap {name} already")));
    }
    let flags = if enabled { flag::AUTO } else { 0 };
    let name = name.as_bytes().to_vec();
    let bitmap = Bitmap { name, flags, granularity_bits, kind: DIRTY_TRACKING, ..Bitmap::default() };
    list.push(Edited { bitmap, contents: Contents::New(bits) });
    commit(image, list)
}

/// Removes a bitmap, which may be inconsistent.
///
/// # Errors
/// There is none of that name.
pub fn remove(image: &mut Image<'_>, name: &str) -> Result<()> {
    edit(image, name, |_, e| {
        e.contents = Contents::Gone;
        Ok(())
    })
}

/// Sets all bits to 0.
///
/// # Errors
/// There is none of that name, or it is inconsistent.
pub fn clear(image: &mut Image<'_>, name: &str) -> Result<()> {
    edit(image, name, |image, e| {
        usable(&e.bitmap)?;
        e.contents = Contents::New(Bits::new(image.header.size, e.bitmap.granularity_bits)?);
        Ok(())
    })
}

/// Sets whether it tracks writes.
///
/// # Errors
/// There is none of that name, or it is inconsistent.
pub fn enable(image: &mut Image<'_>, name: &str, enabled: bool) -> Result<()> {
    edit(image, name, |_, e| {
        usable(&e.bitmap)?;
        e.bitmap.flags = e.bitmap.flags & !flag::AUTO | if enabled { flag::AUTO } else { 0 };
        Ok(())
    })
}

/// Sets all bits that `from` has set.
///
/// # Errors
/// There is none of that name, it is inconsistent, or `from` is for a disk of another size.
pub fn merge(image: &mut Image<'_>, name: &str, from: &Bits) -> Result<()> {
    edit(image, name, |image, e| {
        let mut bits = load_bits(image, &e.bitmap)?;
        bits.merge(from)?;
        e.contents = Contents::New(bits);
        Ok(())
    })
}

/// Returns all bitmaps unchanged.
pub(super) fn kept(image: &Image<'_>) -> Result<Vec<Edited>> {
    Ok(read_directory(image)?.into_iter().map(|bitmap| Edited { bitmap, contents: Contents::Keep }).collect())
}

fn edit(
    image: &mut Image<'_>,
    name: &str,
    how: impl FnOnce(&Image<'_>, &mut Edited) -> Result<()>,
) -> Result<()> {
    let mut list = kept(image)?;
    let e = list.iter_mut().find(|e| e.bitmap.name == name.as_bytes()).ok_or_else(|| missing(name))?;
    how(image, e)?;
    commit(image, list)
}

pub(super) fn commit(image: &mut Image<'_>, list: Vec<Edited>) -> Result<()> {
    let mut header = image.header.clone();
    let mut change = Change::start(image)?;
    replace_directory(&mut change, list, &mut header)?;
    change.commit(header)
}

/// Returns the bitmaps after a change of the disk's contents and size. Those that track writes have
/// all bits set. `None`: there are no bitmaps.
pub(crate) fn after_apply(image: &Image<'_>, size: u64) -> Result<Option<Vec<Edited>>> {
    let mut list = kept(image)?;
    for e in list.iter_mut().filter(|e| !e.bitmap.has(flag::IN_USE)) {
        if e.bitmap.has(flag::AUTO) {
            let mut bits = Bits::new(size, e.bitmap.granularity_bits)?;
            bits.set_range(0, size);
            e.contents = Contents::New(bits);
        } else if size != image.header.size {
            e.contents = Contents::New(load_bits(image, &e.bitmap)?.resized(size)?);
        }
    }
    Ok(if list.is_empty() { None } else { Some(list) })
}

/// Returns the bitmaps after a change of the disk's size. `None`: there are no bitmaps.
pub(crate) fn after_resize(image: &Image<'_>, size: u64) -> Result<Option<Vec<Edited>>> {
    let mut list = kept(image)?;
    let bits = image.header.cluster_bits;
    for e in list.iter_mut().filter(|e| !e.bitmap.has(flag::IN_USE)) {
        let same = table_entries(size, e.bitmap.granularity_bits, bits) == u64::from(e.bitmap.table_size);
        if !same || size < image.header.size {
            e.contents = Contents::New(load_bits(image, &e.bitmap)?.resized(size)?);
        }
    }
    Ok(if list.is_empty() { None } else { Some(list) })
}

/// Writes a new directory and the new bits. `header` then refers to it.
pub(crate) fn replace_directory(
    change: &mut Change<'_, '_>,
    list: Vec<Edited>,
    header: &mut Header,
) -> Result<()> {
    if let Some(at) = header.bitmaps.filter(|_| consistent(change.image)) {
        change.release(at.directory_offset, at.directory_bytes)?;
    }
    (header.bitmaps, header.autoclear) = (None, header.autoclear & !autoclear::BITMAPS);
    let (mut directory, mut count) = (Vec::new(), 0);
    for mut e in list {
        if !matches!(e.contents, Contents::Keep) {
            release(change, &e.bitmap)?;
        }
        match e.contents {
            Contents::Gone => continue,
            Contents::Keep => {}
            Contents::New(bits) => write_bits(change, &mut e.bitmap, &bits)?,
        }
        count += 1;
        e.bitmap.encode(&mut directory);
    }
    if count == 0 {
        return Ok(());
    }
    let directory_bytes = directory.len() as u64;
    if count > COUNT_MAX || directory_bytes > DIRECTORY_BYTES_MAX {
        return Err(Error::invalid("the image has as many bitmaps as it can have"));
    }
    let directory_offset = change.put(directory)?;
    header.bitmaps = Some(BitmapsAt { count, directory_bytes, directory_offset });
    header.autoclear |= autoclear::BITMAPS;
    Ok(())
}

/// Frees the clusters of a bitmap. A new one has none.
fn release(change: &mut Change<'_, '_>, bitmap: &Bitmap) -> Result<()> {
    if bitmap.table_offset == 0 {
        return Ok(());
    }
    let entries = u64::from(bitmap.table_size);
    let table = change.image.table(bitmap.table_offset, entries, "a bitmap table")?;
    for at in table.iter().map(|e| e & OFFSET).filter(|at| *at != 0) {
        change.release(at, 1)?;
    }
    change.release(bitmap.table_offset, entries * 8)
}

fn write_bits(change: &mut Change<'_, '_>, bitmap: &mut Bitmap, bits: &Bits) -> Result<()> {
    let cluster = to_usize(change.header().cluster_size());
    let mut table = Vec::new();
    for chunk in bits.bytes().chunks(cluster) {
        table.push(match chunk {
            _ if chunk.iter().all(|b| *b == 0) => 0,
            // In the last cluster, the bits behind the last one are 0.
            _ if chunk.len() == cluster && chunk.iter().all(|b| *b == 0xff) => ALL_ONES,
            _ => change.put(chunk.to_vec())?,
        });
    }
    bitmap.table_size = low_u32(table.len() as u64);
    bitmap.table_offset = if table.is_empty() { 0 } else { change.put(image::to_bytes(&table))? };
    Ok(())
}
