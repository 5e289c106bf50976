//! The header, its extensions and the names behind it: the first cluster of an image.

mod mark;

pub(crate) use self::mark::generation_at;
pub use self::mark::{Mark, Open};

use crate::bytes::{be32, be64, low_u32, put, to_usize};
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"QFI\xfb";
const LEN_V2: usize = 72;
/// Offset of the disk's size in a header, which has 64 bits.
pub const SIZE_AT: u64 = 24;
/// Offset of the incompatible features in a version 3 header.
pub(crate) const INCOMPATIBLE_AT: usize = 72;
const LEN_V3: usize = 104;
/// Length with the compression type, padded to a multiple of 8.
const LEN_COMPRESSION: usize = 112;

/// Bytes of a sector of the disk.
const SECTOR: u64 = 512;
/// Least bytes of a write of metadata, unless clusters are smaller.
pub(crate) const UNIT: u64 = 4096;
/// log2 of the smallest and the largest cluster.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Most bytes of an L1 table (QEMU's limit).
pub const L1_BYTES_MAX: u64 = 32 << 20;
/// Most bytes of a refcount table (QEMU's limit).
pub const REFTABLE_BYTES_MAX: u64 = 8 << 20;
/// Most snapshots (QEMU's limit).
pub const SNAPSHOTS_MAX: u32 = 65536;
/// Most bytes of a backing file's name.
pub const BACKING_NAME_MAX: usize = 1023;

/// Incompatible features. A program that does not know one of them must not open the image.
pub mod incompatible {
    /// Reference counts may be wrong.
    pub const DIRTY: u64 = 1 << 0;
    /// Metadata is wrong. The image may only be opened for reading.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in another file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// The header has the compression method.
    pub const COMPRESSION: u64 = 1 << 3;
    /// L2 entries of 128 bits, with subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// The features that this crate knows.
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
}

/// Compatible feature: reference counts may be written late, with [`incompatible::DIRTY`] set.
pub const LAZY_REFCOUNTS: u64 = 1 << 0;

/// Autoclear features. A program that writes to the image clears those that it does not know.
pub mod autoclear {
    /// The bitmaps extension is valid.
    pub const BITMAPS: u64 = 1 << 0;
    /// The external data file is a raw image by itself.
    pub const RAW_DATA: u64 = 1 << 1;
    /// The features that this crate knows.
    pub const KNOWN: u64 = BITMAPS | RAW_DATA;
}

mod extension {
    pub(super) const END: u32 = 0;
    pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(super) const FEATURES: u32 = 0x6803_f857;
    pub(super) const BITMAPS: u32 = 0x2385_2875;
    pub(super) const CRYPTO: u32 = 0x0537_be77;
    pub(super) const DATA_FILE: u32 = 0x4441_5441;
    /// Only this program knows it: see [`super::Mark`].
    pub(super) const MARK: u32 = u32::from_be_bytes(*b"VSJN");
}

/// The compression method of clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate.
    #[default]
    Zlib,
    /// zstd.
    Zstd,
}

/// The location of the bitmaps (Bitmaps extension).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitmapsAt {
    /// The number of bitmaps.
    pub count: u32,
    /// Bytes of their directory.
    pub directory_bytes: u64,
    /// Offset of the directory, at the start of a cluster.
    pub directory_offset: u64,
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// log2 of a cluster's bytes.
    pub cluster_bits: u32,
    /// Size of the disk in bytes. A header that was parsed has whole sectors of 512 bytes.
    pub size: u64,
    /// Entries of the L1 table.
    pub l1_size: u32,
    /// Offset of the L1 table.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub reftable_offset: u64,
    /// Clusters of the refcount table.
    pub reftable_clusters: u32,
    /// Number of internal snapshots.
    pub snapshots: u32,
    /// Offset of the snapshot table.
    pub snapshots_offset: u64,
    /// Bits of [`incompatible`].
    pub incompatible: u64,
    /// [`LAZY_REFCOUNTS`], and unknown bits.
    pub compatible: u64,
    /// Bits of [`autoclear`], and unknown bits.
    pub autoclear: u64,
    /// log2 of a refcount's bits, up to 6.
    pub refcount_order: u32,
    /// Method of compressed clusters.
    pub compression: Compression,
    /// Name of the backing file as it is stored.
    pub backing: Option<String>,
    /// Format of the backing file as it is stored.
    pub backing_format: Option<String>,
    /// Name of the external data file as it is stored.
    pub data_file: Option<String>,
    /// Location of the persistent bitmaps.
    pub bitmaps: Option<BitmapsAt>,
    /// The mark of this program, if the image is open for writing or was not closed.
    pub mark: Option<Mark>,
    /// Unknown extensions, which are kept: type and contents.
    pub unknown: Vec<(u32, Vec<u8>)>,
    /// The unknown bytes behind the known header, which are kept.
    pub extra: Vec<u8>,
}

/// Returns the size of a disk for the size that an image gives, in bytes. As in QEMU, a disk has
/// whole sectors of 512 bytes, and ends before a sector that it would have in part. (Other programs
/// make images of any size.)
pub(crate) fn whole_sectors(size: u64) -> u64 {
    size / SECTOR * SECTOR
}

fn text(bytes: &[u8], what: &str) -> Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::corrupt(format!("{what} is not UTF-8")))
}

impl Header {
    /// Bytes to read from the image's start. They contain any header; images may be shorter.
    pub const BYTES_MAX: usize = 1 << 21;

    /// Returns the version of the qcow2 image that begins with `start`, or nothing for a file
    /// without the magic number.
    ///
    /// The version may be one that [`peek_cluster_bits`](Self::peek_cluster_bits) refuses. Such a
    /// file is an image, too. If it was used as a raw disk, its metadata would appear as data, and
    /// writes would destroy it.
    pub fn probe(start: &[u8]) -> Option<u32> {
        (start.len() >= 8 && start.starts_with(&MAGIC)).then(|| be32(start, 4))
    }

    /// Returns whether images of that version are supported.
    pub fn knows(version: u32) -> bool {
        matches!(version, 2 | 3)
    }

    /// Returns log2 of the cluster size, so that the first cluster can be read. `start` has 24
    /// bytes.
    ///
    /// # Errors
    /// Not an image, an unsupported version, or an invalid cluster size.
    pub fn peek_cluster_bits(start: &[u8]) -> Result<u32> {
        if start.len() < 24 || !start.starts_with(&MAGIC) {
            return Err(Error::NotQcow2);
        }
        match be32(start, 4) {
            n if Self::knows(n) => {}
            1 => return Err(Error::unsupported("qcow version 1: convert it with qemu-img".to_owned())),
            n => return Err(Error::unsupported(format!("qcow2 version {n}; versions 2 and 3 are known"))),
        }
        let bits = be32(start, 20);
        if !CLUSTER_BITS.contains(&bits) {
            return Err(Error::corrupt(format!(
                "clusters of 2^{bits} bytes; 512 bytes to 2 MiB are possible"
            )));
        }
        Ok(bits)
    }

    /// Parses the first cluster of an image, or all of a shorter image.
    ///
    /// # Errors
    /// The header is invalid, or needs an unsupported feature. Encrypted images are refused,
    /// because their encrypted contents would be served.
    pub fn parse(first: &[u8]) -> Result<Self> {
        let cluster_bits = Self::peek_cluster_bits(first)?;
        let version = be32(first, 4);
        let short = || Error::corrupt("it ends within its header");
        if first.len() < if version == 2 { LEN_V2 } else { LEN_V3 } {
            return Err(short());
        }
        if be32(first, 32) != 0 {
            return Err(Error::unsupported("the image is encrypted; encrypted images are not served"));
        }
        let mut h = Self {
            version,
            cluster_bits,
            size: whole_sectors(be64(first, to_usize(SIZE_AT))),
            l1_size: be32(first, 36),
            l1_offset: be64(first, 40),
            reftable_offset: be64(first, 48),
            reftable_clusters: be32(first, 56),
            snapshots: be32(first, 60),
            snapshots_offset: be64(first, 64),
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            compression: Compression::Zlib,
            backing: None,
            backing_format: None,
            data_file: None,
            bitmaps: None,
            mark: None,
            unknown: Vec::new(),
            extra: Vec::new(),
        };
        let mut len = LEN_V2;
        if version >= 3 {
            len = be32(first, 100) as usize;
            if len < LEN_V3 || !len.is_multiple_of(8) || len > first.len() || len > 1 << cluster_bits {
                return Err(Error::corrupt(format!("its header has {len} bytes")));
            }
            (h.incompatible, h.compatible, h.autoclear) = (be64(first, 72), be64(first, 80), be64(first, 88));
            h.refcount_order = be32(first, 96);
            if let Some(kind) = first.get(LEN_V3).filter(|_| len > LEN_V3) {
                h.compression = match kind {
                    0 => Compression::Zlib,
                    1 => Compression::Zstd,
                    n => {
                        return Err(Error::unsupported(format!(
                            "compression type {n}; 0 (zlib) and 1 (zstd) are known"
                        )));
                    }
                };
            }
            if (h.incompatible & incompatible::COMPRESSION != 0) != (h.compression != Compression::Zlib) {
                return Err(Error::corrupt("the compression type and its feature bit contradict each other"));
            }
            h.extra = first.get(LEN_COMPRESSION..len).unwrap_or_default().to_vec();
        }
        let features = h.extensions(first, len)?;
        h.check_features(&features)?;
        h.read_backing(first)?;
        h.check()?;
        Ok(h)
    }

    /// Parses the extensions. Returns the table of feature names.
    fn extensions(&mut self, first: &[u8], mut at: usize) -> Result<Vec<(u8, u8, String)>> {
        let (name_at, mut features) = (be64(first, 8), Vec::new());
        let begin = at;
        // They end where the name of the backing file starts.
        let end = if name_at == 0 {
            first.len()
        } else {
            usize::try_from(name_at).unwrap_or(usize::MAX).min(first.len())
        };
        while at + 8 <= end {
            let (kind, len) = (be32(first, at), be32(first, at + 4) as usize);
            if kind == extension::END {
                break;
            }
            at += 8;
            let Some(data) = first.get(at..end).and_then(|rest| rest.get(..len)) else {
                return Err(Error::corrupt(format!(
                    "header extension {kind:#x} of {len} bytes does not fit"
                )));
            };
            match kind {
                extension::BACKING_FORMAT => self.backing_format = Some(text(data, "the backing format")?),
                extension::DATA_FILE => self.data_file = Some(text(data, "the data file's name")?),
                extension::FEATURES => features = data.chunks_exact(48).map(feature).collect(),
                extension::BITMAPS if len == 24 => {
                    self.bitmaps = Some(BitmapsAt {
                        count: be32(data, 0),
                        directory_bytes: be64(data, 8),
                        directory_offset: be64(data, 16),
                    });
                }
                extension::BITMAPS => {
                    return Err(Error::corrupt(format!("a bitmaps extension of {len} bytes")));
                }
                extension::CRYPTO => {
                    return Err(Error::unsupported(
                        "the image is encrypted; encrypted images are not served",
                    ));
                }
                // A mark in another form has no meaning, and is removed by the next change of the
                // header.
                extension::MARK => {
                    let mark = Open::decode(data).map(|open| Mark { open, untouched: at == begin + 8 });
                    self.mark = self.mark.or(mark);
                }
                _ => self.unknown.push((kind, data.to_vec())),
            }
            at = at.saturating_add(len.next_multiple_of(8));
        }
        Ok(features)
    }

    fn check_features(&self, names: &[(u8, u8, String)]) -> Result<()> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown == 0 {
            return Ok(());
        }
        let name = |bit: u8| {
            let found = names.iter().find(|(kind, at, _)| (*kind, *at) == (0, bit));
            found.map_or_else(|| format!("bit {bit}"), |(_, _, name)| name.clone())
        };
        let list: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 != 0).map(name).collect();
        Err(Error::unsupported(format!("the image needs features that are not known: {}", list.join(", "))))
    }

    fn read_backing(&mut self, first: &[u8]) -> Result<()> {
        let (at, len) = (be64(first, 8), be32(first, 16) as usize);
        if at == 0 || len == 0 {
            return Ok(());
        }
        let name = first.get(to_usize(at)..).and_then(|rest| rest.get(..len));
        let Some(name) = name.filter(|_| len <= BACKING_NAME_MAX) else {
            return Err(Error::corrupt("the backing file's name does not lie in the first cluster"));
        };
        self.backing = Some(text(name, "the backing file's name")?);
        Ok(())
    }

    /// Checks the conditions that hold for every image, without reading its tables.
    fn check(&self) -> Result<()> {
        let cluster = self.cluster_size();
        if self.refcount_order > 6 {
            return Err(Error::corrupt(format!(
                "refcounts of 2^{} bits; 64 is the most",
                self.refcount_order
            )));
        }
        if self.has(incompatible::EXTENDED_L2) && self.cluster_bits < 14 {
            return Err(Error::corrupt("extended L2 entries need clusters of 16 KiB"));
        }
        if self.has(incompatible::DATA_FILE) != self.data_file.is_some() && self.has(incompatible::DATA_FILE)
        {
            return Err(Error::unsupported("the image's data file has no name in it"));
        }
        let table = |what: &str, offset: u64, bytes: u64, most: u64| {
            if bytes > most {
                return Err(Error::corrupt(format!("{what} of {bytes} bytes; {most} is the most")));
            }
            let fits =
                offset.is_multiple_of(cluster) && offset.checked_add(bytes).is_some_and(|end| end >> 56 == 0);
            if bytes > 0 && (offset == 0 || !fits) {
                return Err(Error::corrupt(format!("{what} at {offset:#x}, where it cannot be")));
            }
            Ok(())
        };
        table("an L1 table", self.l1_offset, u64::from(self.l1_size) * 8, L1_BYTES_MAX)?;
        table(
            "a refcount table",
            self.reftable_offset,
            u64::from(self.reftable_clusters) << self.cluster_bits,
            REFTABLE_BYTES_MAX.max(cluster),
        )?;
        if self.reftable_clusters == 0 {
            return Err(Error::corrupt("it has no refcount table"));
        }
        if self.snapshots > SNAPSHOTS_MAX
            || (self.snapshots > 0 && !self.snapshots_offset.is_multiple_of(cluster))
        {
            return Err(Error::corrupt(format!(
                "{} snapshots at {:#x}",
                self.snapshots, self.snapshots_offset
            )));
        }
        if u64::from(self.l1_size) < self.l1_needed() {
            return Err(Error::corrupt(format!(
                "an L1 table of {} entries for {} bytes, which need {}",
                self.l1_size,
                self.size,
                self.l1_needed()
            )));
        }
        Ok(())
    }

    /// Returns whether an incompatible feature is set.
    pub fn has(&self, bit: u64) -> bool {
        self.incompatible & bit != 0
    }

    /// Returns whether its last writer did not close it. Its reference counts may then be wrong,
    /// and completed writes may be missing.
    pub fn is_open(&self) -> bool {
        // Version 2 has no bit for it.
        self.has(incompatible::DIRTY) || (self.version < 3 && self.mark.is_some())
    }

    /// Returns the bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the bytes of an L2 entry.
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.has(incompatible::EXTENDED_L2) { 16 } else { 8 }
    }

    /// Returns the number of entries of an L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_size() / self.l2_entry_bytes()
    }

    /// Returns the number of clusters of the disk.
    pub fn clusters(&self) -> u64 {
        self.size.div_ceil(self.cluster_size())
    }

    /// Returns the number of L1 entries that the disk's size needs.
    pub fn l1_needed(&self) -> u64 {
        self.clusters().div_ceil(self.l2_entries())
    }

    /// Returns the number of clusters whose counts are in one refcount block.
    pub fn refblock_entries(&self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    /// Returns the largest count of a cluster.
    pub fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - (1u32 << self.refcount_order))
    }

    /// Returns the bytes of the header as it is written, without extensions and names.
    fn known_bytes(&self) -> usize {
        if self.version >= 3 { LEN_COMPRESSION + self.extra.len() } else { LEN_V2 }
    }

    /// Returns the first cluster: header, extensions, names.
    ///
    /// # Errors
    /// They do not fit into a cluster.
    pub fn encode(&self) -> Result<Vec<u8>> {
        // The names of features are for error messages. They are left out if they do not fit.
        self.encode_with(self.version >= 3).or_else(|_| self.encode_with(false))
    }

    fn encode_with(&self, names: bool) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(512);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&[0; 12]); // the backing file's name: below
        out.extend_from_slice(&self.cluster_bits.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&0u32.to_be_bytes()); // not encrypted
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.reftable_offset.to_be_bytes());
        out.extend_from_slice(&self.reftable_clusters.to_be_bytes());
        out.extend_from_slice(&self.snapshots.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            for n in [self.incompatible, self.compatible, self.autoclear] {
                out.extend_from_slice(&n.to_be_bytes());
            }
            out.extend_from_slice(&self.refcount_order.to_be_bytes());
            out.extend_from_slice(&low_u32(self.known_bytes() as u64).to_be_bytes());
            out.push(u8::from(self.compression == Compression::Zstd));
            out.extend_from_slice(&[0; 7]);
            out.extend_from_slice(&self.extra);
        }
        self.encode_extensions(&mut out, names);
        if let Some(name) = &self.backing {
            let (at, len) = (out.len() as u64, low_u32(name.len() as u64));
            if name.len() > BACKING_NAME_MAX {
                return Err(Error::invalid(format!(
                    "a backing file's name of {len} bytes; {BACKING_NAME_MAX} is the most"
                )));
            }
            put(&mut out, 8, &at.to_be_bytes());
            put(&mut out, 16, &len.to_be_bytes());
            out.extend_from_slice(name.as_bytes());
        }
        if out.len() as u64 > self.cluster_size() {
            return Err(Error::invalid(format!(
                "header and names need {} bytes, a cluster has {}: take larger clusters or shorter names",
                out.len(),
                self.cluster_size()
            )));
        }
        Ok(out)
    }

    fn encode_extensions(&self, out: &mut Vec<u8>, names: bool) {
        let mut add = |kind: u32, data: &[u8]| {
            out.extend_from_slice(&kind.to_be_bytes());
            // The caller refuses more than one cluster of data.
            out.extend_from_slice(&low_u32(data.len() as u64).to_be_bytes());
            out.extend_from_slice(data);
            out.resize(out.len().next_multiple_of(8), 0);
        };
        // The mark is the first extension, in the first sector with the fields. A change of both is
        // then one write that no storage tears.
        if let Some(data) = self.mark.filter(|mark| mark.untouched).and_then(|mark| mark.open.encode()) {
            add(extension::MARK, &data);
        }
        if let Some(b) = &self.bitmaps {
            let mut data = [0; 24];
            data[..4].copy_from_slice(&b.count.to_be_bytes());
            data[8..16].copy_from_slice(&b.directory_bytes.to_be_bytes());
            data[16..].copy_from_slice(&b.directory_offset.to_be_bytes());
            add(extension::BITMAPS, &data);
        }
        if let Some(format) = &self.backing_format {
            add(extension::BACKING_FORMAT, format.as_bytes());
        }
        if let Some(name) = &self.data_file {
            add(extension::DATA_FILE, name.as_bytes());
        }
        if names {
            add(extension::FEATURES, &feature_names());
        }
        for (kind, data) in &self.unknown {
            add(*kind, data);
        }
        add(extension::END, &[]);
    }
}

/// Parses an entry of the feature name table: kind, bit, name.
fn feature(line: &[u8]) -> (u8, u8, String) {
    let [kind, bit, name @ ..] = line else { return Default::default() };
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    // The name goes to terminals, and the image is not trusted.
    let name = String::from_utf8_lossy(name).replace(char::is_control, "?");
    (*kind, *bit, name)
}

/// Returns the feature name table that is written, with all known features.
fn feature_names() -> Vec<u8> {
    let lines: [(u8, u8, &str); 8] = [
        (0, 0, "dirty bit"),
        (0, 1, "corrupt bit"),
        (0, 2, "external data file"),
        (0, 3, "compression type"),
        (0, 4, "extended L2 entries"),
        (1, 0, "lazy refcounts"),
        (2, 0, "bitmaps"),
        (2, 1, "raw external data"),
    ];
    let mut table = Vec::with_capacity(48 * lines.len());
    for (kind, bit, name) in lines {
        table.extend_from_slice(&[kind, bit]);
        table.extend_from_slice(name.as_bytes());
        table.resize(table.len().next_multiple_of(48), 0);
    }
    table
}

#[cfg(test)]
mod tests;
