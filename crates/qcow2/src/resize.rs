//! Changes of a disk's size.

mod grow;

use crate::bytes::to_usize;
use crate::change::{Change, is_data};
use crate::create::Preallocation;
use crate::entry::{COMPRESSED, COPIED, OFFSET, SUBCLUSTERS, ZERO};
use crate::header::{Header, L1_BYTES_MAX, autoclear, incompatible};
use crate::{Error, Image, Progress, Result, Storage, bitmap, image};
use grow::Grown;

/// The surroundings of an image that a resize needs.
pub struct Around<'d> {
    /// The external data file, if there is one.
    pub data: Option<&'d dyn Storage>,
    /// Size of the backing disk, if there is one. The new part of the disk has to hide it.
    pub below: Option<u64>,
    /// How much of the new part is allocated.
    pub preallocation: Preallocation,
}

/// Makes the disk `size` bytes long, rounded up to 512. A new part reads as zeroes; a removed part
/// is lost.
///
/// # Errors
/// A size that the image's tables cannot have, or that needs data of the backing file or of a
/// compressed cluster to be copied; those of the storage. The image is then unchanged.
pub fn resize(image: &mut Image<'_>, size: u64, around: &Around<'_>, progress: Progress<'_>) -> Result<()> {
    if size > i64::MAX as u64 - (1 << 21) {
        return Err(Error::invalid(format!("a disk of {size} bytes is too large")));
    }
    set_size(image, size.next_multiple_of(512), around, false, progress)
}

/// Entries of the L1 table that leave room for a disk that grows while it is served. Their 256 KiB
/// cover 16 TiB with clusters of 64 KiB, and 1 GiB with clusters of 512 bytes.
const ROOM_L1_ENTRIES: u64 = 32 << 10;

/// Prepares the image so that its disk can grow while it is served by a change of the header's size
/// alone. Its L1 table becomes long enough, and behind the disk's end there is neither old data nor
/// data of the backing file. The disk stays as it is.
///
/// # Errors
/// An image with a data file; a backing file that is larger than the room, or that shows through
/// the disk's last cluster ([`Error::LastClusterBelow`], found after all other checks); those of
/// the storage. The image is then unchanged.
pub fn make_room(image: &mut Image<'_>, below: Option<u64>) -> Result<()> {
    resize_with_room(image, image.header.size, below)
}

/// Makes the disk of an image `size` bytes long, as [`resize`] does, and prepares it for growth, as
/// [`make_room`] does. It does both or neither.
///
/// # Errors
/// Those of both.
pub fn resize_with_room(image: &mut Image<'_>, size: u64, below: Option<u64>) -> Result<()> {
    if image.header.has(incompatible::DATA_FILE) {
        return Err(Error::unsupported("an image with a data file does not grow while it is served"));
    }
    let around = Around { data: None, below, preallocation: Preallocation::Off };
    set_size(image, size, &around, true, &mut |_, _| {})
}

/// Returns whether [`resize`] to a larger size would write L2 tables at new places, because
/// something is to be hidden or removed behind the disk's end. `below`: the size of the backing
/// disk, if there is one.
///
/// # Errors
/// A table cannot be read.
#[expect(clippy::indexing_slicing, reason = "the slot is reduced modulo the entries of a table")]
pub fn growth_moves_tables(image: &Image<'_>, below: Option<u64>) -> Result<bool> {
    let h = &image.header;
    if below.is_some_and(|below| below > h.size) {
        return Ok(true);
    }
    let (first, per) = (h.size.div_ceil(h.cluster_size()), h.l2_entries());
    let words = to_usize(h.l2_entry_bytes()) / 8;
    let l1 = image.table(h.l1_offset, u64::from(h.l1_size), "the L1 table")?;
    for (n, entry) in (0..).zip(&l1).skip(to_usize(first / per)) {
        let at = entry & OFFSET;
        if at == 0 {
            continue;
        }
        let table = image::words(&image.read(at, h.cluster_size(), "an L2 table")?);
        let skip = if n == first / per { to_usize(first % per) * words } else { 0 };
        if table[skip..].iter().any(|word| *word != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sets the size. All checks come first, and the last one is whether the backing file shows
/// through. `room`: see [`make_room`].
fn set_size(
    image: &mut Image<'_>,
    size: u64,
    around: &Around<'_>,
    room: bool,
    progress: Progress<'_>,
) -> Result<()> {
    let old = image.header.size;
    let mut header = Header { size, ..image.header.clone() };
    let (grows, shrinks) = (size > old || room, size < old || (size == old && !room));
    let l1_entries = check_size(image, &header, room)?;
    let end = old.min(size);
    // With room, the disk is treated as if it was as long as the backing file.
    let long =
        Header { size: if room { around.below.unwrap_or(0).max(size) } else { size }, ..header.clone() };
    let grown = Grown { from: end.div_ceil(header.cluster_size()), header: &long };
    if grows {
        if long.l1_needed() > l1_entries {
            return Err(Error::unsupported(
                "the image below is too large for the disk to grow while it is served",
            ));
        }
        grown.check(around)?;
    }
    let bitmaps = if size == old && room { None } else { bitmap::after_resize(image, size)? };
    let tail = Tail::find(image, end, around, grows, shrinks)?;
    let mut change = Change::start(image)?;
    let mut l1 = change.l1()?;
    cut(&mut change, &mut l1, end)?;
    if grows {
        l1.resize(to_usize(l1_entries), 0);
        grown.hide_below(&mut change, &mut l1, around)?;
        grown.preallocate(&mut change, &mut l1, around, progress)?;
    }
    let place = match tail {
        Some(tail) => tail.own(&mut change, &mut l1)?,
        None => None,
    };
    change.set_flags(&mut l1)?;
    change.replace_l1(&l1, &mut header)?;
    if let Some(bitmaps) = bitmaps {
        bitmap::replace_directory(&mut change, bitmaps, &mut header)?;
    }
    if grows && !shrinks {
        // Before the disk grows, nothing reads the bytes behind its end.
        clear_tail(change.image.file, around.data, place)?;
    }
    let raw = header.autoclear & autoclear::RAW_DATA != 0;
    let data = around.data.filter(|_| raw);
    if let Some(data) = data.filter(|_| size > old) {
        data.set_len(size).map_err(Error::io("cannot resize the data file"))?;
    }
    change.commit(header)?;
    if size < old {
        clear_tail(image.file, around.data, place)?;
        if let Some(data) = data {
            data.set_len(size).map_err(Error::io("cannot resize the data file"))?;
        }
        image.sync()?;
    }
    Ok(())
}

/// Returns the number of entries for the L1 table, if the disk does not only shrink.
///
/// # Errors
/// A size that the image cannot have.
fn check_size(image: &Image<'_>, header: &Header, room: bool) -> Result<u64> {
    let needed = header.l1_needed();
    if needed * 8 > L1_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a disk of {} bytes is too large for clusters of {} bytes",
            header.size,
            header.cluster_size()
        )));
    }
    if header.size != image.header.size && header.snapshots > 0 && header.version < 3 {
        return Err(Error::unsupported("a version 2 image with snapshots keeps its size; delete them first"));
    }
    let entries = if room { ROOM_L1_ENTRIES.max(needed * 2).min(L1_BYTES_MAX / 8) } else { needed };
    Ok(entries.max(image.header.l1_size.into()))
}

/// The bytes of the last cluster behind the disk's end: offset and length in the file that contains
/// them.
#[derive(Clone, Copy)]
struct TailRange {
    external: bool,
    offset: u64,
    bytes: u64,
}

/// Clears these bytes, because a later growth of the disk would show them.
fn clear_tail(file: &dyn Storage, data: Option<&dyn Storage>, place: Option<TailRange>) -> Result<()> {
    let Some(place) = place else { return Ok(()) };
    let of = if place.external { data } else { Some(file) };
    let Some(of) = of else { return Err(Error::invalid("the image's data file is needed")) };
    let cannot = Error::io("cannot clear what is behind the disk's end");
    // Beyond the end of the file there are zeroes.
    let bytes = place.bytes.min(of.len().map_err(&cannot)?.saturating_sub(place.offset));
    of.write_at(place.offset, &vec![0; to_usize(bytes)]).map_err(&cannot)?;
    of.sync().map_err(&cannot)
}

/// The disk's last cluster, if the disk ends within it and the rest of it needs a change.
struct Tail {
    l1: usize,
    slot: usize,
    /// The offset in the cluster at which the disk ends.
    within: u64,
    /// Whether it is allocated, so that the rest of it has to be cleared.
    data: bool,
    /// Subclusters behind the end that have to read as zeroes, as the bits of an extended entry.
    hide: u64,
}

impl Tail {
    /// Finds the last cluster of a disk that ends, or ended, at `end`. `grows`: nothing may show
    /// behind it; `shrinks`: data is cut off there.
    #[expect(clippy::indexing_slicing, reason = "the slot is reduced modulo the entries of a table")]
    fn find(
        image: &Image<'_>,
        end: u64,
        around: &Around<'_>,
        grows: bool,
        shrinks: bool,
    ) -> Result<Option<Self>> {
        let h = &image.header;
        let within = end % h.cluster_size();
        if within == 0 {
            return Ok(None);
        }
        let cluster = end >> h.cluster_bits;
        let l1 = image.table(h.l1_offset, u64::from(h.l1_size), "the L1 table")?;
        let at = l1.get(to_usize(cluster / h.l2_entries())).map_or(0, |e| e & OFFSET);
        let words = to_usize(h.l2_entry_bytes()) / 8;
        let slot = to_usize(cluster % h.l2_entries()) * words;
        let (e, subclusters) = match at {
            0 => (0, 0),
            at => {
                let table = image::words(&image.read(at, h.cluster_size(), "an L2 table")?);
                (table[slot], table[slot + words - 1])
            }
        };
        let external = h.has(incompatible::DATA_FILE) && e & COPIED != 0;
        let data = (is_data(e) || external) && e & ZERO == 0;
        let shows = grows && e & COMPRESSED == 0 && around.below.is_some_and(|below| below > end);
        let (hidden, hide) = match (shows, words) {
            (false, _) => (true, 0),
            (true, 1) => (data || e & ZERO != 0, 0),
            (true, _) => hide_subclusters(subclusters, within, h.cluster_size()),
        };
        if e & COMPRESSED != 0 && shrinks {
            return Err(Error::unsupported(format!(
                "{end} lies within a compressed cluster; give a multiple of {} bytes",
                h.cluster_size()
            )));
        }
        if !hidden {
            return Err(Error::LastClusterBelow(end));
        }
        let l1 = to_usize(cluster / h.l2_entries());
        Ok((data || hide != 0).then_some(Self { l1, slot, within, data, hide }))
    }

    /// Makes sure that the cluster is not shared, and returns its location if it is allocated.
    #[expect(
        clippy::indexing_slicing,
        reason = "the entry was found in the tables before, and an L2 table has a cluster of entries"
    )]
    fn own(&self, change: &mut Change<'_, '_>, l1: &mut [u64]) -> Result<Option<TailRange>> {
        let bits = change.header().cluster_bits;
        let (external, size) = (change.header().has(incompatible::DATA_FILE), change.header().cluster_size());
        let at = l1[self.l1] & OFFSET;
        let mut table = match at {
            0 => vec![0; to_usize(change.header().l2_entries()) * change.words()],
            at => change.l2(at)?,
        };
        let mut from = table[self.slot] & OFFSET;
        let shared = self.data && !external && change.count(from >> bits)? != 1;
        if shared {
            let mut data = vec![0; to_usize(size)];
            change.image.file.read_at(from, &mut data).map_err(Error::io("cannot read the last cluster"))?;
            let to = change.put(data)?;
            change.release(from, 1)?;
            table[self.slot] = to | table[self.slot] & !(OFFSET | COPIED);
            from = to;
        }
        if self.hide != 0 {
            table[self.slot + 1] |= self.hide;
        }
        if shared || self.hide != 0 {
            if at != 0 {
                change.release(at, 1)?;
            }
            l1[self.l1] = change.put(image::to_bytes(&table))?;
        }
        let place = TailRange { external, offset: from + self.within, bytes: size - self.within };
        Ok(self.data.then_some(place))
    }
}

/// Returns whether the backing file can be hidden behind byte `within` of a cluster with these
/// subclusters, and the bits that do it. For that, the subcluster in which the disk ends has to be
/// allocated, or be zeroes.
fn hide_subclusters(subclusters: u64, within: u64, cluster_size: u64) -> (bool, u64) {
    let sub_size = cluster_size / u64::from(SUBCLUSTERS);
    let known = subclusters | subclusters >> 32;
    let last = within / sub_size;
    let hidden = within.is_multiple_of(sub_size) || known >> last & 1 != 0;
    let behind = (0xffff_ffff << within.div_ceil(sub_size)) & 0xffff_ffff;
    (hidden, (behind & !known) << 32)
}

/// Frees everything behind `end`.
#[expect(clippy::indexing_slicing, reason = "the range is not longer than an L2 table")]
fn cut(change: &mut Change<'_, '_>, l1: &mut [u64], end: u64) -> Result<()> {
    let (bits, entries) = (change.header().cluster_bits, change.header().l2_entries());
    let clusters = end.div_ceil(change.header().cluster_size());
    let words = change.words();
    for (n, e) in (0..).zip(l1.iter_mut()) {
        let (at, first) = (*e & OFFSET, n * entries);
        if at == 0 || first + entries <= clusters {
            continue;
        }
        let mut table = change.l2(at)?;
        let keep = to_usize(clusters.saturating_sub(first)) * words;
        if keep > 0 && table[keep..].iter().all(|e| *e == 0) {
            continue;
        }
        let gone = table.split_off(keep);
        change.add_entries(&gone, false)?;
        change.add(at >> bits, false)?;
        *e = 0;
        if keep > 0 {
            *e = change.put(image::to_bytes(&table))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
