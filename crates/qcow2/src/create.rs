//! Creates images, with all options of `qemu-img create -f qcow2 -o help` except encryption.
//!
//! The header is written last, so a crash before that leaves a file that is not an image.

use crate::bytes::{low_u32, to_usize};
use crate::entry;
use crate::header::{
    BACKING_NAME_MAX, CLUSTER_BITS, Compression, Header, L1_BYTES_MAX, LAZY_REFCOUNTS, REFTABLE_BYTES_MAX,
    autoclear, incompatible,
};
use crate::{Error, Progress, Result, Storage, image, refcount};

/// How much of the disk is allocated from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// All tables. The clusters of data have offsets, but no space.
    Metadata,
    /// Space is reserved, too.
    Falloc,
    /// Zeroes are written, too.
    Full,
}

/// An external data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// The name as it is stored.
    pub name: String,
    /// Whether it has to remain a valid raw image.
    pub raw: bool,
}

/// An image to be created. [`Options::new`] has QEMU's defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Size of the disk in bytes; rounded up to 512.
    pub size: u64,
    /// 2 (compat=0.10) or 3 (compat=1.1).
    pub version: u32,
    /// Bytes of a cluster, a power of two, 512 to 2 MiB.
    pub cluster_size: u64,
    /// Bits of a reference count, a power of two, 1 to 64.
    pub refcount_bits: u64,
    /// Whether L2 entries have subclusters.
    pub extended_l2: bool,
    /// Whether reference counts may be written late.
    pub lazy_refcounts: bool,
    /// The method of compressed clusters.
    pub compression: Compression,
    /// Name and format of the backing file.
    pub backing: Option<(String, String)>,
    /// The file of guest data, if it is not in the image.
    pub data_file: Option<DataFile>,
    /// Whether that file is there, and its contents are the disk.
    pub keep_data_file: bool,
    /// How much is allocated from the start.
    pub preallocation: Preallocation,
}

impl Options {
    /// Returns QEMU's defaults for a disk of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            version: 3,
            cluster_size: 1 << 16,
            refcount_bits: 16,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
            keep_data_file: false,
            preallocation: Preallocation::Off,
        }
    }

    /// Returns the effective preallocation. A raw data file is valid only if all of it is
    /// allocated.
    fn preallocated(&self) -> Preallocation {
        match (&self.data_file, self.preallocation) {
            (Some(DataFile { raw: true, .. }), Preallocation::Off) => Preallocation::Metadata,
            (_, p) => p,
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    /// `Invalid`, with the option's name in `qemu-img`.
    pub fn check(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid(why));
        if !self.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&self.cluster_size.trailing_zeros())
        {
            return bad(format!("cluster_size={} is not a power of two from 512 to 2M", self.cluster_size));
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return bad(format!("refcount_bits={} is not a power of two from 1 to 64", self.refcount_bits));
        }
        let of_v3 = [
            ("extended_l2", self.extended_l2),
            ("lazy_refcounts", self.lazy_refcounts),
            ("data_file", self.data_file.is_some()),
            ("compression_type=zstd", self.compression != Compression::Zlib),
            ("refcount_bits other than 16", self.refcount_bits != 16),
        ];
        if let (2, Some((name, _))) = (self.version, of_v3.iter().find(|(_, on)| *on)) {
            return bad(format!("{name} needs compat=1.1"));
        }
        if self.extended_l2 && self.cluster_size < 1 << 14 {
            return bad("extended_l2 needs a cluster_size of 16K or more".into());
        }
        if let Some(DataFile { raw: true, .. }) = self.data_file
            && self.backing.is_some()
        {
            return bad(
                "a backing file and data_file_raw contradict each other: the data file would not be all"
                    .into(),
            );
        }
        if self.backing.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            return bad(
                "preallocation with a backing file needs extended_l2: it would hide what is below".into()
            );
        }
        if self.keep_data_file {
            self.check_kept()?;
        }
        if self.backing.as_ref().is_some_and(|(name, _)| name.len() > BACKING_NAME_MAX) {
            return bad(format!("a backing file's name has {BACKING_NAME_MAX} bytes at most"));
        }
        if self.size > i64::MAX as u64 - (1 << 21) {
            return bad(format!("a disk of {} bytes is too large", self.size));
        }
        Ok(())
    }

    /// Checks that the contents of a data file that is kept are the disk.
    fn check_kept(&self) -> Result<()> {
        let why = match self.preallocated() {
            _ if self.data_file.is_none() => "needs data_file: the name of the file that is kept",
            _ if self.backing.is_some() => {
                "and a backing file contradict each other: the contents of the data file would be hidden"
            }
            Preallocation::Off => {
                "needs data_file_raw=on or preallocation=metadata: the contents of the file would be hidden"
            }
            Preallocation::Metadata => return Ok(()),
            Preallocation::Falloc | Preallocation::Full => {
                "and preallocation=falloc or full contradict each other: the file would be overwritten"
            }
        };
        Err(Error::invalid(format!("keep_data_file {why}")))
    }
}

/// The offsets of everything: header, refcount table, refcount blocks, L1 table, L2 tables, data,
/// one after the other.
struct Layout {
    cluster_bits: u32,
    refcount_order: u32,
    reftable: u64,
    refblocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
}

impl Layout {
    fn of(h: &Header, preallocated: bool) -> Self {
        let clusters = |bytes: u64| bytes.div_ceil(h.cluster_size());
        let mut layout = Self {
            cluster_bits: h.cluster_bits,
            refcount_order: h.refcount_order,
            reftable: 1,
            refblocks: 1,
            l1: clusters(u64::from(h.l1_size) * 8),
            l2: if preallocated { u64::from(h.l1_size) } else { 0 },
            data: if preallocated && !h.has(incompatible::DATA_FILE) { h.clusters() } else { 0 },
        };
        // Refcount blocks take clusters that are counted, too.
        loop {
            let refblocks = layout.all().div_ceil(h.refblock_entries());
            let reftable = clusters(refblocks * 8);
            if (refblocks, reftable) == (layout.refblocks, layout.reftable) {
                return layout;
            }
            (layout.refblocks, layout.reftable) = (refblocks, reftable);
        }
    }

    fn l1_at(&self) -> u64 {
        1 + self.reftable + self.refblocks
    }

    fn l2_at(&self) -> u64 {
        self.l1_at() + self.l1
    }

    fn data_at(&self) -> u64 {
        self.l2_at() + self.l2
    }

    fn all(&self) -> u64 {
        self.data_at() + self.data
    }

    fn offset(&self, cluster: u64) -> u64 {
        cluster << self.cluster_bits
    }
}

/// Creates an image in `file`, which is empty, and prepares the data file's storage if there is
/// one. That is empty too, unless its contents are kept. Returns the header. Everything is on
/// stable storage then.
///
/// # Errors
/// Options that contradict each other, a disk that is too large for its clusters, and those of the
/// storage.
pub fn create(
    file: &dyn Storage,
    data: Option<&dyn Storage>,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Header> {
    options.check()?;
    let mut header = header(options)?;
    let preallocation = options.preallocated();
    let layout = Layout::of(&header, preallocation != Preallocation::Off);
    header.reftable_offset = layout.offset(1);
    header.reftable_clusters = low_u32(layout.reftable);
    header.l1_offset = layout.offset(layout.l1_at());
    if layout.reftable << header.cluster_bits > REFTABLE_BYTES_MAX.max(header.cluster_size()) {
        return Err(too_large(options));
    }
    let first = header.encode()?;

    let cannot = Error::io("cannot make the image");
    file.set_len(0).map_err(&cannot)?;
    file.set_len(layout.offset(layout.all())).map_err(&cannot)?;
    write_counts(file, &layout)?;
    if preallocation != Preallocation::Off {
        write_map(file, &header, &layout, options)?;
        if let Some(data) = data {
            let cannot = Error::io("cannot make the data file");
            // A file that is kept may be longer.
            if data.len().map_err(&cannot)? < header.size {
                data.set_len(header.size).map_err(&cannot)?;
            }
        }
    }
    sync_all(file, data)?;
    file.write_at(0, &first).map_err(&cannot)?;
    file.sync().map_err(&cannot)?;
    // The space comes last, since that can take long: until it is complete, the image is correct
    // and lacks only some of its space.
    if matches!(preallocation, Preallocation::Falloc | Preallocation::Full) {
        let of = match data {
            Some(data) => (data, 0, header.size),
            None => (file, layout.offset(layout.data_at()), layout.offset(layout.data)),
        };
        reserve(of, preallocation, progress)?;
        sync_all(file, data)?;
    }
    Ok(header)
}

fn sync_all(file: &dyn Storage, data: Option<&dyn Storage>) -> Result<()> {
    if let Some(data) = data {
        data.sync().map_err(Error::io("cannot bring the data file to stable storage"))?;
    }
    file.sync().map_err(Error::io("cannot make the image"))
}

fn too_large(options: &Options) -> Error {
    Error::invalid(format!(
        "a disk of {} bytes is too large for clusters of {} bytes; give a larger cluster_size",
        options.size, options.cluster_size
    ))
}

fn header(options: &Options) -> Result<Header> {
    let mut incompatible = 0;
    for (on, bit) in [
        (options.extended_l2, incompatible::EXTENDED_L2),
        (options.data_file.is_some(), incompatible::DATA_FILE),
        (options.compression != Compression::Zlib, incompatible::COMPRESSION),
    ] {
        incompatible |= if on { bit } else { 0 };
    }
    let mut header = Header {
        version: options.version,
        cluster_bits: options.cluster_size.trailing_zeros(),
        size: options.size.next_multiple_of(512),
        l1_size: 0,
        l1_offset: 0,
        reftable_offset: 0,
        reftable_clusters: 0,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible,
        compatible: if options.lazy_refcounts { LAZY_REFCOUNTS } else { 0 },
        autoclear: 0,
        refcount_order: options.refcount_bits.trailing_zeros(),
        compression: options.compression,
        backing: options.backing.as_ref().map(|(name, _)| name.clone()),
        backing_format: options.backing.as_ref().map(|(_, format)| format.clone()),
        data_file: options.data_file.as_ref().map(|d| d.name.clone()),
        bitmaps: None,
        mark: None,
        unknown: Vec::new(),
        extra: Vec::new(),
    };
    if options.data_file.as_ref().is_some_and(|d| d.raw) {
        header.autoclear |= autoclear::RAW_DATA;
    }
    // A disk without bytes has a table, too: QEMU makes one, and other programs may rely on it.
    let l1 = header.l1_needed().max(1);
    if l1 * 8 > L1_BYTES_MAX {
        return Err(too_large(options));
    }
    header.l1_size = low_u32(l1);
    Ok(header)
}

fn write_counts(file: &dyn Storage, layout: &Layout) -> Result<()> {
    let cannot = Error::io("cannot write the reference counts");
    let cluster = 1usize << layout.cluster_bits;
    let table: Vec<u64> = (0..layout.refblocks).map(|n| layout.offset(1 + layout.reftable + n)).collect();
    file.write_at(layout.offset(1), &image::to_bytes(&table)).map_err(&cannot)?;
    let entries = (cluster * 8) as u64 >> layout.refcount_order;
    for (n, at) in (0..).zip(&table) {
        let mut block = vec![0; cluster];
        for entry in 0..entries.min(layout.all() - n * entries) {
            refcount::set(&mut block, to_usize(entry), layout.refcount_order, 1);
        }
        file.write_at(*at, &block).map_err(&cannot)?;
    }
    Ok(())
}

/// Writes the L1 and L2 tables of a disk that is allocated completely.
fn write_map(file: &dyn Storage, h: &Header, layout: &Layout, options: &Options) -> Result<()> {
    let cannot = Error::io("cannot write the tables");
    let l1: Vec<u64> = (0..layout.l2).map(|n| layout.offset(layout.l2_at() + n) | entry::COPIED).collect();
    file.write_at(layout.offset(layout.l1_at()), &image::to_bytes(&l1)).map_err(&cannot)?;
    let external = h.has(incompatible::DATA_FILE);
    // Subclusters of a data file have its contents. Others read as the backing file, or as zeroes.
    let subclusters = if external && options.backing.is_none() { u64::from(u32::MAX) } else { 0 };
    let first = if external { 0 } else { layout.data_at() };
    for (n, at) in (0..).zip(&l1) {
        let range = n * h.l2_entries()..((n + 1) * h.l2_entries()).min(h.clusters());
        let mut table = Vec::with_capacity(1 << (h.cluster_bits - 3));
        for cluster in range {
            table.push(layout.offset(first + cluster) | entry::COPIED);
            if options.extended_l2 {
                table.push(subclusters);
            }
        }
        file.write_at(at & entry::OFFSET, &image::to_bytes(&table)).map_err(&cannot)?;
    }
    Ok(())
}

/// Reserves the space of `(storage, offset, bytes)`.
fn reserve(of: (&dyn Storage, u64, u64), how: Preallocation, progress: Progress<'_>) -> Result<()> {
    /// Bytes of one step: long enough to be fast, short enough to show progress.
    const PIECE: u64 = 8 << 20;
    let (file, offset, bytes) = of;
    let cannot = Error::io("cannot preallocate");
    let zeroes = if how == Preallocation::Full { vec![0; to_usize(PIECE.min(bytes))] } else { Vec::new() };
    let mut done = 0;
    while done < bytes && matches!(how, Preallocation::Falloc | Preallocation::Full) {
        let n = PIECE.min(bytes - done);
        match how {
            Preallocation::Falloc => file.allocate(offset + done, n).map_err(&cannot)?,
            _ => file
                .write_at(offset + done, zeroes.get(..to_usize(n)).unwrap_or_default())
                .map_err(&cannot)?,
        }
        done += n;
        progress(done, bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
