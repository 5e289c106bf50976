//! What one image alone knows about each part of its disk, and where the data is. For users who
//! want to know; requests use the map of [`Served`](crate::Served).
//!
//! Called on the thread of a command. At most one L2 table is in memory.

use crate::bytes::to_usize;
use crate::entry::{COMPRESSED, COPIED, OFFSET, ZERO};
use crate::header::{Header, incompatible, whole_sectors};
use crate::{Error, Image, Result, Storage, image, refcount, snapshot};

/// The contents of a part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// The backing file decides.
    Absent,
    /// It reads as zeroes.
    Zero,
    /// The image has data.
    Data,
}

/// A part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The contents.
    pub contents: Contents,
    /// Its length in bytes, at least 1.
    pub len: u64,
    /// The offset of its first byte in the image, or in its data file. `None` if it has no space,
    /// and for compressed data.
    pub offset: Option<u64>,
    /// Whether the data is compressed.
    pub compressed: bool,
}

impl Status {
    /// Returns whether `next` continues this part.
    fn joins(&self, next: &Self) -> bool {
        let continues = match (self.offset, next.offset) {
            (None, None) => true,
            (Some(at), Some(next)) => at.checked_add(self.len) == Some(next),
            _ => false,
        };
        continues && (self.contents, self.compressed) == (next.contents, next.compressed)
    }
}

/// A reader of the tables of an image.
pub struct Reader<'s> {
    image: Image<'s>,
    size: u64,
    l1: Vec<u64>,
    /// The L2 table that was read last, with its offset.
    table: (u64, Vec<u64>),
}

impl<'s> Reader<'s> {
    /// Reads the L1 table of the disk.
    ///
    /// # Errors
    /// Those of [`Image::open`]; the table is not in the file.
    pub fn new(file: &'s dyn Storage) -> Result<Self> {
        let image = Image::open(file)?;
        let h = image.header();
        let (at, size, entries) = (h.l1_offset, h.size, h.l1_needed());
        Self::of(image, at, entries, size)
    }

    /// Reads the L1 table of the internal snapshot with this id or name.
    ///
    /// # Errors
    /// There is none; those of [`new`](Self::new).
    pub fn of_snapshot(file: &'s dyn Storage, which: &str) -> Result<Self> {
        let image = Image::open(file)?;
        let found = snapshot::named(&image, which)?;
        let size = found.disk_size.map_or(image.header().size, whole_sectors);
        let entries = Header { size, ..image.header().clone() }.l1_needed().min(found.l1_size.into());
        Self::of(image, found.l1_offset, entries, size)
    }

    /// Reads an L1 table of `entries` entries at `at`, for a disk of `size` bytes.
    pub(crate) fn of(image: Image<'s>, at: u64, entries: u64, size: u64) -> Result<Self> {
        if entries * 8 > crate::header::L1_BYTES_MAX {
            return Err(Error::corrupt(format!("an L1 table of {entries} entries")));
        }
        let l1 = image.table(at, entries, "the L1 table")?;
        check_tables(&l1, image.header().cluster_size())?;
        Ok(Self { image, size, l1, table: (0, Vec::new()) })
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        self.image.header()
    }

    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the part of the disk that starts at `offset`, within the disk. It has at most `most`
    /// bytes, which are at least 1.
    ///
    /// # Errors
    /// A table is not in the file, or an entry of it is invalid.
    pub fn at(&mut self, offset: u64, most: u64) -> Result<Status> {
        let end = offset.saturating_add(most).min(self.size);
        let mut part = self.piece(offset)?;
        while offset + part.len < end {
            let next = self.piece(offset + part.len)?;
            if !part.joins(&next) {
                break;
            }
            part.len += next.len;
        }
        part.len = part.len.min(end.saturating_sub(offset)).max(1);
        Ok(part)
    }

    /// Returns the part at `offset` up to the end of its subcluster, cluster or missing L2 table.
    fn piece(&mut self, offset: u64) -> Result<Status> {
        let h = self.image.header();
        let (cluster, bits) = (h.cluster_size(), h.cluster_bits);
        let a_table = h.l2_entries() << bits;
        let absent = |len| Ok(Status { contents: Contents::Absent, len, offset: None, compressed: false });
        let at = self.l1.get(to_usize(offset / a_table)).map_or(0, |e| e & OFFSET);
        if at == 0 {
            return absent(a_table - offset % a_table);
        }
        if self.table.0 != at {
            let hole = self.image.file.is_hole(at, cluster).map_err(Error::io("cannot read an L2 table"))?;
            if hole && self.image.holds(at, cluster) {
                return absent(a_table - offset % a_table);
            }
            self.table = (at, image::words(&self.image.read(at, cluster, "an L2 table")?));
        }
        let words = to_usize(self.image.header().l2_entry_bytes() / 8);
        let entry = to_usize((offset % a_table) >> bits) * words;
        let word = |at: usize| self.table.1.get(at).copied().unwrap_or(0);
        self.decode(offset, word(entry), if words == 2 { word(entry + 1) } else { 0 })
    }

    /// Decodes an L2 entry, for the part of its cluster at `offset`.
    fn decode(&self, offset: u64, e: u64, bits: u64) -> Result<Status> {
        let h = self.image.header();
        let cluster = h.cluster_size();
        let (inside, extended) = (offset % cluster, h.has(incompatible::EXTENDED_L2));
        let external = h.has(incompatible::DATA_FILE);
        let bad =
            |what: &str| Err(Error::corrupt(format!("the L2 entry for offset {offset:#x} {what}: {e:#x}")));
        if e & COMPRESSED != 0 {
            if external || bits != 0 {
                return bad("is of compressed data, which cannot be there");
            }
            let part =
                Status { contents: Contents::Data, len: cluster - inside, offset: None, compressed: true };
            return Ok(part);
        }
        let host = e & OFFSET;
        let allocated = host != 0 || (external && e & COPIED != 0);
        if allocated && (!host.is_multiple_of(cluster) || (external && host != offset - inside)) {
            return bad("has an impossible offset");
        }
        let unit = if extended { cluster / u64::from(crate::entry::SUBCLUSTERS) } else { cluster };
        let (here, zero) = match extended {
            true => (bits >> (inside / unit) & 1 != 0, bits >> (32 + inside / unit) & 1 != 0),
            false => (allocated, e & ZERO != 0),
        };
        if extended && here && (zero || !allocated) || (zero && h.version < 3) {
            return bad("contradicts itself");
        }
        let contents = match (zero, here) {
            (true, _) => Contents::Zero,
            (false, true) => Contents::Data,
            (false, false) => Contents::Absent,
        };
        let at = allocated.then_some(host + inside);
        Ok(Status { contents, len: unit - inside % unit, offset: at, compressed: false })
    }

    /// Returns whether clusters seem to be allocated whose space the file does not have, as after
    /// `preallocation=metadata`. The holes of the file then say which data reads as zeroes.
    /// `space_bytes` is the space that the file occupies.
    ///
    /// # Errors
    /// The refcount table cannot be read.
    pub fn is_preallocated(&self, space_bytes: u64) -> Result<bool> {
        let h = self.image.header();
        let (cluster, order) = (h.cluster_size(), h.refcount_order);
        let real = space_bytes / cluster;
        // The share that QEMU chose.
        let enough = (real.saturating_mul(10) / 9).max(real + 2);
        let entries = u64::from(h.reftable_clusters) * cluster / 8;
        let table = self.image.table(h.reftable_offset, entries, "the refcount table")?;
        let mut end = self.image.len.div_ceil(cluster);
        // A correct image has space for each of its blocks. That bounds the search in a hostile
        // one.
        let (mut counted, mut blocks) = (0, 0);
        for at in table {
            if end == 0 || counted >= enough || blocks > real {
                break;
            }
            let here = h.refblock_entries().min(end);
            end -= here;
            if at & OFFSET == 0 || !self.image.holds(at & OFFSET, cluster) {
                continue;
            }
            blocks += 1;
            let block = self.image.read(at & OFFSET, cluster, "a refcount block")?;
            counted += (0..to_usize(here)).filter(|n| refcount::get(&block, *n, order) != 0).count() as u64;
        }
        Ok(counted >= enough)
    }
}

/// Checks that no two entries of an L1 table share an L2 table. So the work for a whole disk has
/// the bound of the tables that the file really has: 1 MiB of them could describe a disk of
/// petabytes otherwise.
///
/// # Errors
/// Two entries share a table, or parts of it.
fn check_tables(l1: &[u64], cluster: u64) -> Result<()> {
    let mut tables: Vec<u64> = l1.iter().map(|e| e & OFFSET).filter(|at| *at != 0).collect();
    if let Some(at) = tables.iter().find(|at| !at.is_multiple_of(cluster)) {
        return Err(Error::corrupt(format!("an L2 table at the impossible offset {at:#x}")));
    }
    tables.sort_unstable();
    match tables.iter().zip(tables.iter().skip(1)).find(|(one, next)| one == next) {
        Some((at, _)) => {
            Err(Error::corrupt(format!("two entries of the L1 table share the L2 table at offset {at:#x}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::{Options, Preallocation, create};
    use crate::memory::Memory;

    const CLUSTER: u64 = 1 << 16;

    fn made(options: &Options) -> Memory {
        let file = Memory::new(Vec::new(), 64 << 20);
        create(&file, None, options, &mut |_, _| ()).unwrap();
        file
    }

    /// Sets the L1 table's first entry, and entries of the L2 table behind the end of the file.
    fn with_entries(options: &Options, entries: &[(u64, u64)]) -> Memory {
        let file = made(options);
        let header = Image::open(&file).unwrap().header().clone();
        let l2 = file.len().unwrap().next_multiple_of(CLUSTER);
        file.set_len(l2 + CLUSTER).unwrap();
        file.write_at(header.l1_offset, &(l2 | COPIED).to_be_bytes()).unwrap();
        for (at, word) in entries {
            file.write_at(l2 + at * 8, &word.to_be_bytes()).unwrap();
        }
        file
    }

    /// Contents, length, offset, compressed.
    type Part = (Contents, u64, Option<u64>, bool);

    fn parts(file: &Memory) -> Result<Vec<Part>> {
        let mut reader = Reader::new(file)?;
        let (mut at, mut all) = (0, Vec::new());
        while at < reader.size() {
            let part = reader.at(at, u64::MAX)?;
            at += part.len;
            all.push((part.contents, part.len, part.offset, part.compressed));
        }
        Ok(all)
    }

    #[test]
    fn entries_of_all_kinds() {
        let options = Options::new(8 * CLUSTER + 512);
        assert_eq!(parts(&made(&options)).unwrap(), [(Contents::Absent, 8 * CLUSTER + 512, None, false)]);
        let at = 1 << 30;
        let file = with_entries(
            &options,
            &[
                (1, at | COPIED),
                (2, (at + CLUSTER) | COPIED),
                (3, (at + 3 * CLUSTER) | COPIED | ZERO),
                (4, ZERO),
                (5, COMPRESSED | 0x5_0001),
                (6, COMPRESSED | 0x5_0101),
                (8, ZERO),
            ],
        );
        let want = [
            (Contents::Absent, CLUSTER, None, false),
            (Contents::Data, 2 * CLUSTER, Some(at), false),
            (Contents::Zero, CLUSTER, Some(at + 3 * CLUSTER), false),
            (Contents::Zero, CLUSTER, None, false),
            (Contents::Data, 2 * CLUSTER, None, true),
            (Contents::Absent, CLUSTER, None, false),
            (Contents::Zero, 512, None, false),
        ];
        assert_eq!(parts(&file).unwrap(), want);
        let mut reader = Reader::new(&file).unwrap();
        let part = reader.at(CLUSTER + 100, 1000).unwrap();
        assert_eq!((part.len, part.offset), (1000, Some(at + 100)));
    }

    #[test]
    fn subclusters() {
        let options = Options { extended_l2: true, ..Options::new(2 * CLUSTER) };
        let unit = CLUSTER / 32;
        let file = with_entries(&options, &[(0, 1 << 20 | COPIED), (1, 0b0110 | 1 << 35)]);
        let want = [
            (Contents::Absent, unit, Some(1 << 20), false),
            (Contents::Data, 2 * unit, Some((1 << 20) + unit), false),
            (Contents::Zero, unit, Some((1 << 20) + 3 * unit), false),
            (Contents::Absent, 28 * unit, Some((1 << 20) + 4 * unit), false),
            (Contents::Absent, CLUSTER, None, false),
        ];
        assert_eq!(parts(&file).unwrap(), want);
        let file = with_entries(&options, &[(0, 1 << 20 | COPIED), (1, 1 | 1 << 32)]);
        assert!(parts(&file).unwrap_err().to_string().contains("contradicts"));
    }

    #[test]
    fn entries_that_no_image_has_are_refused() {
        let options = Options::new(8 * CLUSTER);
        for (entry, word) in [((1 << 30) + 512, "impossible"), (1 << 57 | 512, "impossible")] {
            let why = parts(&with_entries(&options, &[(0, entry)])).unwrap_err().to_string();
            assert!(why.contains(word) && why.contains("corrupt"), "{why}");
        }
        let old = Options { version: 2, ..options.clone() };
        assert!(parts(&with_entries(&old, &[(0, ZERO)])).is_err());
        for l2 in [512, 1 << 40, CLUSTER * 1000] {
            let file = made(&options);
            let header = Image::open(&file).unwrap().header().clone();
            file.write_at(header.l1_offset, &(l2 | COPIED).to_be_bytes()).unwrap();
            assert!(parts(&file).unwrap_err().to_string().contains("L2 table"), "{l2:#x}");
        }
    }

    #[test]
    fn a_small_file_does_not_describe_a_large_disk() {
        // 512 MiB for each L2 table.
        let file = made(&Options::new(2 << 30));
        let header = Image::open(&file).unwrap().header().clone();
        let l2 = file.len().unwrap().next_multiple_of(CLUSTER);
        file.set_len(l2 + 2 * CLUSTER).unwrap();
        let set = |l1: &[u64]| {
            let bytes: Vec<u8> = l1.iter().flat_map(|at| (at | COPIED).to_be_bytes()).collect();
            file.write_at(header.l1_offset, &bytes).unwrap();
            parts(&file).map(|parts| parts.len())
        };
        assert!(set(&[l2, l2 + CLUSTER, 0, 0]).unwrap() <= 4);
        for shared in [[l2, l2 + CLUSTER, 0, l2], [l2, l2, 0, 0]] {
            assert!(set(&shared).unwrap_err().to_string().contains("share the L2 table at offset"));
        }
        assert!(set(&[l2 + 512, 0, 0, 0]).unwrap_err().to_string().contains("impossible offset"));
    }

    #[test]
    fn space_that_is_missing_is_preallocated() {
        let file = made(&Options { preallocation: Preallocation::Metadata, ..Options::new(16 << 20) });
        let reader = Reader::new(&file).unwrap();
        assert!(reader.is_preallocated(5 * CLUSTER).unwrap());
        assert!(!reader.is_preallocated(file.len().unwrap()).unwrap());
    }
}
