//! An open image: the state that its workers share.

use crate::bytes::{be64, to_usize};
use crate::lock::Locked;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::alloc::{Alloc, Reserve};
use crate::change::Change;
use crate::entry::{COPIED, OFFSET};
use crate::epoch::{Epochs, Member};
use crate::header::{Header, REFTABLE_BYTES_MAX, UNIT, autoclear, incompatible};
use crate::header_copy::HeaderCopy;
use crate::holes::Holes;
use crate::journal::{Changes, Journal, OpenHeader};
use crate::map::Map;
use crate::overlap::OverlapCheck;
use crate::{Error, FileId, Image, Result, Storage, Waker};

/// Most bytes that are allocated ahead at the file's end.
const GROWTH_BYTES_MAX: u64 = 16 << 20;
/// Most bytes of clusters that a worker reserves at a time; and how many such reserves the disk has
/// room for at least.
const RESERVE_BYTES_MAX: u64 = 4 << 20;
const RESERVES: u64 = 256;
/// Default limit of memory for L2 slices (QEMU's).
const CACHE_MAX: u64 = 32 << 20;

/// How long control waits for a request's write of the header, which is one piece of metadata. It
/// waits as long for a worker.
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// Settings for opening an image.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The file of the image.
    pub file: FileId,
    /// The file of the guest's data: the image's, or the external data file.
    pub data: FileId,
    /// Memory for the map in bytes. `None`: enough for the whole disk, at most 32 MiB.
    pub cache_bytes: Option<u64>,
    /// Whether it will be written. Its tables are then compared with the location of its metadata.
    pub writable: bool,
    /// Whether its disk may grow while it is served, as far as its L1 table reaches.
    pub room: bool,
}

/// L2 tables that are being made.
#[derive(Default)]
pub(crate) struct Tables {
    /// The requests that wait for them.
    pub(crate) making: HashMap<u64, Vec<Waker>>,
    /// Entries of the L1 table that are not in the image yet.
    pub(crate) dirty: BTreeSet<u64>,
}

/// The running flush, and the requests that wait for it.
#[derive(Default)]
pub(crate) struct FlushQueue {
    pub(crate) running: bool,
    /// Flushes that were requested.
    pub(crate) asked: u64,
    /// Requested flushes that are done.
    pub(crate) done: u64,
    pub(crate) waiting: Vec<Waker>,
}

/// The request that allocates space at the file's end, so that no write goes beyond it: file
/// systems execute such writes one at a time.
#[derive(Default)]
pub(crate) struct Growth {
    /// Whether a request makes the file longer.
    pub(crate) running: bool,
    pub(crate) waiting: Vec<Waker>,
}

/// An open image. Shared by all workers.
pub struct Served {
    pub(crate) cluster_bits: u32,
    pub(crate) version: u32,
    pub(crate) table_entries: u64,
    pub(crate) extended: bool,
    pub(crate) external: bool,
    /// Whether the external data file is a raw image by itself.
    pub(crate) raw_data: bool,
    pub(crate) file: FileId,
    pub(crate) data: FileId,
    /// Size of the disk in bytes. Only control changes it, while no change of the disk is in
    /// flight.
    size: AtomicU64,
    /// Largest size while the image is open, in bytes.
    room: u64,
    /// Clusters that a worker reserves at a time.
    pub(crate) reserve_clusters: u64,
    pub(crate) l1_offset: u64,
    pub(crate) reftable_offset: u64,
    pub(crate) header: Header,
    pub(crate) l1: Box<[AtomicU64]>,
    pub(crate) map: Map,
    pub(crate) tables: Mutex<Tables>,
    pub(crate) alloc: Mutex<Alloc>,
    /// Holes in an external data file.
    pub(crate) holes: Mutex<Holes>,
    pub(crate) epochs: Epochs,
    pub(crate) flushes: Mutex<FlushQueue>,
    pub(crate) growth: Mutex<Growth>,
    /// The end of the allocated space. It only grows.
    pub(crate) file_len: AtomicU64,
    /// Bytes that are allocated ahead.
    pub(crate) growth_bytes: u64,
    /// The overlap check of an image that is written.
    pub(crate) overlap: Option<Arc<OverlapCheck>>,
    /// The journal, which gets changes of the map before other requests see them, so that they
    /// outlive the process.
    pub(crate) journal: Option<Journal>,
    /// The first bytes of an image that is written. The header is changed only there.
    pub(crate) header_copy: Option<HeaderCopy>,
    /// The changes of a killed writer's journal that the file does not have, for an image that is
    /// only read.
    pub(crate) changes: Option<Changes>,
}

/// The contents of a piece of the disk, as far as one image says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The backing file decides.
    Below,
    /// It reads as zeroes.
    Zero,
    /// It is at this offset of the data file.
    Data(u64),
    /// It is in a compressed cluster with this entry.
    Compressed(u64),
}

/// Why the map has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// This slice is not in memory.
    Slice(u64),
    /// The image is corrupt.
    Corrupt,
}

/// Prepares an image for writing. Unknown autoclear bits are cleared, as the format demands of a
/// writer. The refcount table is made long enough for everything that the disk can need, because it
/// stays where it is while the image is served. The header may change.
///
/// # Errors
/// Those of the storage; an image that is dirty or corrupt.
pub fn make_ready(storage: &dyn Storage) -> Result<()> {
    make_ready_for(storage, false)
}

/// Like [`make_ready`], for a disk that may need everything that its L1 table reaches (`room`, see
/// [`Settings::room`]).
///
/// # Errors
/// Those of [`make_ready`].
pub fn make_ready_for(storage: &dyn Storage, room: bool) -> Result<()> {
    ready(storage, |h| if room { reached(h) } else { h.clusters() })
}

/// Like [`make_ready`], for a file that keeps its length ([`Served::with_fixed_file`]).
///
/// # Errors
/// Those of [`make_ready`].
pub fn make_ready_in_fixed_file(storage: &dyn Storage) -> Result<()> {
    ready(storage, |_| 0)
}

/// Prepares an image for writing. `more` returns the clusters that the disk may need beyond those
/// that the file has room for.
fn ready(storage: &dyn Storage, more: impl Fn(&Header) -> u64) -> Result<()> {
    let mut image = Image::open(storage)?;
    if image.header().autoclear & !autoclear::KNOWN != 0 {
        // This clears them.
        image.replace_header(image.header().clone())?;
    }
    let h = image.header().clone();
    let (entries, table) = (h.refblock_entries(), u64::from(h.reftable_clusters) * h.cluster_size() / 8);
    let there = image.len.div_ceil(h.cluster_size());
    let disk = if h.has(incompatible::DATA_FILE) { 0 } else { more(&h) };
    // Clusters that wait to be freed, and the blocks that count all this.
    let all = if more(&h) == 0 { there } else { (there + disk + h.l1_needed()) / 4 * 5 };
    let need = (all + all / entries).div_ceil(entries) + 1;
    let most = REFTABLE_BYTES_MAX.max(h.cluster_size()) / 8;
    if need.min(most) <= table {
        return Ok(());
    }
    let mut change = Change::start(&mut image)?;
    change.widen(need.min(most));
    change.commit(h)
}

/// Returns the number of clusters that the L1 table reaches.
fn reached(h: &Header) -> u64 {
    u64::from(h.l1_size) * h.l2_entries()
}

/// Reads a table of `count` words.
fn read_words(storage: &dyn Storage, what: &'static str, offset: u64, count: u64) -> Result<Vec<u64>> {
    let mut bytes = vec![0; to_usize(count) * 8];
    storage.read_at(offset, &mut bytes).map_err(Error::io(what))?;
    Ok(bytes.chunks_exact(8).map(|b| be64(b, 0)).collect())
}

/// Reads and checks the L1 table of an image whose file has `file_clusters` clusters.
fn read_l1(storage: &dyn Storage, header: &Header, file_clusters: u64) -> Result<Vec<u64>> {
    let l1 = read_words(storage, "the L1 table", header.l1_offset, header.l1_size.into())?;
    if let Some(bad) = l1.iter().find(|e| **e & OFFSET & (header.cluster_size() - 1) != 0) {
        return Err(Error::corrupt(format!("an L2 table at {:#x}, where no cluster begins", bad & OFFSET)));
    }
    if let Some(bad) = l1.iter().find(|e| (**e & OFFSET) >> header.cluster_bits >= file_clusters.max(1)) {
        return Err(Error::corrupt(format!("an L2 table at {:#x}, beyond the file's end", bad & OFFSET)));
    }
    Ok(l1)
}

/// Reads and checks the refcount table.
fn read_reftable(storage: &dyn Storage, header: &Header) -> Result<Vec<u64>> {
    let cluster = header.cluster_size();
    let count = u64::from(header.reftable_clusters) * cluster / 8;
    let reftable = read_words(storage, "the refcount table", header.reftable_offset, count)?;
    match reftable.iter().find(|at| **at & (cluster - 1) != 0 || **at >> 56 != 0) {
        Some(at) => Err(Error::corrupt(format!("a refcount block at {at:#x}, where none can be"))),
        None => Ok(reftable),
    }
}

impl Served {
    /// Opens an image whose header was read. Reads its L1 and refcount tables.
    ///
    /// # Errors
    /// Invalid tables, and those of the storage.
    pub fn open(storage: &dyn Storage, header: Header, settings: Settings) -> Result<Self> {
        let first = match settings.writable {
            true => Some(HeaderCopy::new(OpenHeader::of(storage, &header)?)),
            false => None,
        };
        let entry_words = to_usize(header.l2_entry_bytes()) / 8;
        let most = Map::clusters_max(header.l2_entries(), entry_words);
        let needed = header.l1_needed() * header.l2_entries();
        if needed > most {
            return Err(Error::unsupported(format!(
                "a disk of {} bytes is too large to be served: with clusters of {} bytes the most is {} bytes",
                header.size,
                header.cluster_size(),
                u128::from(most) * u128::from(header.cluster_size())
            )));
        }
        let cluster = header.cluster_size();
        let file_len = storage.len().map_err(Error::io("the file's length"))?;
        let file_clusters = file_len.div_ceil(cluster);
        let l1 = read_l1(storage, &header, file_clusters)?;
        let reftable = read_reftable(storage, &header)?;
        let overlap = match settings.writable {
            true => {
                let beyond = |at: &&u64| **at >> header.cluster_bits >= file_clusters.max(1);
                if let Some(bad) = reftable.iter().find(beyond) {
                    return Err(Error::corrupt(format!(
                        "a refcount block at {bad:#x}, beyond the file's end"
                    )));
                }
                let l2 = l1.iter().map(|e| e & OFFSET);
                Some(Arc::new(OverlapCheck::new(storage, &header, l2, &reftable)?))
            }
            false => None,
        };
        // The map has slices for whole tables.
        let clusters = if settings.room { reached(&header).min(most) } else { needed };
        let whole = clusters * header.l2_entry_bytes();
        let cache = settings.cache_bytes.unwrap_or(CACHE_MAX).min(whole.max(UNIT));
        let alloc = Alloc::new(
            header.cluster_bits,
            header.refcount_order,
            reftable,
            file_clusters,
            (cache / 4).max(1 << 20),
        )
        .with_overlap_check(overlap.clone());
        Ok(Self {
            cluster_bits: header.cluster_bits,
            version: header.version,
            table_entries: header.l2_entries(),
            extended: header.has(incompatible::EXTENDED_L2),
            external: header.has(incompatible::DATA_FILE),
            raw_data: header.has(incompatible::DATA_FILE) && header.autoclear & autoclear::RAW_DATA != 0,
            file: settings.file,
            data: settings.data,
            size: AtomicU64::new(header.size),
            room: match settings.room {
                true => clusters.saturating_mul(cluster).min(i64::MAX as u64 & !511),
                false => header.size,
            },
            // Long runs for large disks. Small disks must not become large by reserved clusters.
            reserve_clusters: (header.size / RESERVES).min(RESERVE_BYTES_MAX) >> header.cluster_bits,
            l1_offset: header.l1_offset,
            reftable_offset: header.reftable_offset,
            l1: l1.into_iter().map(AtomicU64::new).collect(),
            map: Map::new(header.l2_entries(), entry_words, clusters, cache),
            tables: Mutex::default(),
            alloc: Mutex::new(alloc),
            holes: Mutex::default(),
            epochs: Epochs::default(),
            flushes: Mutex::default(),
            growth: Mutex::default(),
            file_len: AtomicU64::new(file_len),
            journal: None,
            header_copy: first,
            changes: None,
            overlap,
            growth_bytes: (header.size / 64).clamp(1 << 20, GROWTH_BYTES_MAX),
            header,
        })
    }

    /// Uses this journal for changes of the map from now on. The journal was
    /// [started](crate::journal::mark_open) in the image.
    pub fn with_journal(self, journal: Journal, open_header: OpenHeader) -> Self {
        let journal = Some(journal.with_cluster(self.cluster_size()));
        Self { journal, ..self.with_open_header(open_header) }
    }

    /// Sets the first bytes of an image that was marked after it was opened.
    pub fn with_open_header(self, open_header: OpenHeader) -> Self {
        Self { header_copy: Some(HeaderCopy::new(open_header)), ..self }
    }

    /// Reads the image's first bytes again, if it is not known whether the image was marked.
    ///
    /// # Errors
    /// Those of the storage.
    pub fn reload_open_header(&mut self, storage: &dyn Storage) -> Result<()> {
        self.header_copy = Some(HeaderCopy::new(OpenHeader::of(storage, &self.header)?));
        Ok(())
    }

    /// Takes no cluster behind the end of the file, which has `bytes` bytes and keeps that length:
    /// a device, or an export of a server. A write that needs one fails with `ENOSPC`.
    pub fn with_fixed_file(self, bytes: u64) -> Self {
        self.alloc.locked().limit_to(bytes >> self.cluster_bits);
        self
    }

    /// Lets an image that is only read appear as if these changes were in it.
    ///
    /// # Errors
    /// Changes that do not fit the image.
    pub fn with_changes(self, changes: Changes) -> Result<Self> {
        let mut l1: Vec<u64> = self.l1.iter().map(|e| e.load(Relaxed)).collect();
        changes.patch_l1(&self.header, &mut l1)?;
        let l1 = l1.into_iter().map(AtomicU64::new).collect();
        Ok(Self { l1, changes: Some(changes), ..self })
    }

    /// Applies changes of a journal to a slice of the map that was read.
    pub(crate) fn patch_slice(&self, slice: u64, bytes: &mut [u8]) {
        if let Some(changes) = &self.changes {
            let first = slice * (bytes.len() as u64 / self.header.l2_entry_bytes());
            changes.patch(&self.header, first, bytes);
        }
    }

    /// Returns the header that it was opened with.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the size of the disk in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Acquire)
    }

    /// Returns the largest size of the disk in bytes while the image is open: see
    /// [`Settings::room`].
    pub fn room(&self) -> u64 {
        self.room
    }

    /// Writes the size of the disk in bytes into the image with `write`.
    ///
    /// `write` gets the image's first bytes. It is called again if a request has changed them in
    /// the meantime, or has written an older copy of them. This function blocks: it waits for the
    /// end of a request's write in flight, which could revert the size.
    ///
    /// # Errors
    /// Those of `write`. `TimedOut`: a request's write does not end, and the image has either size.
    /// `ReadOnlyFilesystem`: the image is not written.
    pub fn write_size(
        &self,
        size: u64,
        mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let first = self.header_copy.as_ref().ok_or(std::io::ErrorKind::ReadOnlyFilesystem)?;
        let mut copied = first.set_size(size);
        let failed = loop {
            if let Err(e) = write(&copied.0) {
                first.failed(copied.1);
                break e;
            }
            match first.wait_settled(copied.1, FIRST_WAIT) {
                Ok(Some(newer)) => copied = newer,
                Ok(None) => return Ok(()),
                Err(e) => break e,
            }
        };
        // Later writes of requests have the size that the disk keeps.
        first.failed(first.set_size(self.size()).1);
        Err(failed)
    }

    /// Sets the size of the disk, at most `room`, which the header on the storage has already. No
    /// write, discard or WriteZeroes may be in flight.
    pub fn set_size(&self, size: u64) {
        debug_assert!(size <= self.room);
        self.size.store(size, Release);
    }

    /// Returns whether its data file is a raw image by itself.
    pub fn has_raw_data(&self) -> bool {
        self.raw_data
    }

    /// Returns the bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns whether an error of its metadata was found since it was opened. It has to be
    /// repaired then.
    pub fn is_corrupt(&self) -> bool {
        self.overlap.as_ref().is_some_and(|overlap| overlap.is_corrupt())
    }

    /// Returns the error of its metadata that was found since it was opened, and whether the image
    /// is marked as corrupt. Requests that need that metadata fail. Returns it once, and not before
    /// the marking has ended. Takes no lock.
    pub fn take_corruption(&self) -> Option<(&str, bool)> {
        self.overlap.as_ref()?.take_error()
    }

    /// Returns the number of slices of the map read so far.
    pub fn map_loads(&self) -> u64 {
        self.map.loads()
    }

    /// Returns the end of the last cluster that was ever used, in bytes. The file need not be
    /// longer.
    pub fn end(&self) -> u64 {
        self.alloc.locked().end() << self.cluster_bits
    }

    /// Starts the use by a queue on a worker.
    pub fn join(&self) -> User {
        User { member: self.epochs.join(), reserve: Reserve::default() }
    }

    /// Ends the use by a queue, which has no request in flight. Its reserved clusters are returned.
    pub fn leave(&self, user: User) {
        self.epochs.leave(&user.member);
        self.alloc.locked().give_back(user.reserve);
    }

    #[inline]
    pub(crate) fn cluster(&self, pos: u64) -> u64 {
        pos >> self.cluster_bits
    }

    /// Returns the index of the L1 entry of a cluster.
    #[inline]
    pub(crate) fn table_index(&self, cluster: u64) -> u64 {
        // A table has a power of two of entries. A division would cost as much as the rest of a
        // look-up.
        cluster >> self.table_entries.trailing_zeros()
    }

    /// Returns the first cluster behind those of the L2 table of `cluster`.
    pub(crate) fn table_end(&self, cluster: u64) -> u64 {
        (self.table_index(cluster) + 1) * self.table_entries
    }

    /// Returns the offset of the L2 table of a cluster, and whether the table may be written.
    /// `None`: there is no table.
    #[inline]
    pub(crate) fn table_of(&self, cluster: u64) -> Option<(u64, bool)> {
        let entry = self.l1.get(to_usize(self.table_index(cluster)))?.load(Acquire);
        (entry & OFFSET != 0).then_some((entry & OFFSET, entry & COPIED != 0))
    }

    /// Returns the offset of a slice in the file. `None`: there is no table.
    pub(crate) fn slice_offset(&self, slice: u64) -> Option<u64> {
        let a_table = self.map.slices_a_table(self.table_entries);
        let (table, _) = self.table_of(slice / a_table * self.table_entries)?;
        Some(table + slice % a_table * self.map.slice_bytes() as u64)
    }

    /// Returns the bytes of a piece of metadata as it is written.
    pub(crate) fn unit(&self) -> u64 {
        UNIT.min(self.cluster_size())
    }

    /// Returns copies of the pieces of the L1 table that have new entries, with the entries. The
    /// pieces' offsets are in the file.
    pub(crate) fn take_l1(&self) -> Vec<(u64, u64, Vec<u8>)> {
        let mut tables = self.tables.locked();
        let words = self.unit() / 8;
        let mut pieces: Vec<(u64, u64, Vec<u8>)> = Vec::new();
        for index in std::mem::take(&mut tables.dirty) {
            let first = index / words * words;
            let offset = self.l1_offset + first * 8;
            if pieces.last().is_none_or(|(_, last, _)| *last != offset) {
                // Entries are changed under the lock that is held.
                let word = |i: u64| self.l1.get(to_usize(i)).map_or(0, |e| e.load(Acquire));
                pieces.push((
                    index,
                    offset,
                    (first..first + words).flat_map(|i| word(i).to_be_bytes()).collect(),
                ));
            }
        }
        pieces
    }
}

/// The state that one queue has on an image. The queue is on one worker at a time.
#[derive(Debug)]
pub struct User {
    pub(crate) member: Arc<Member>,
    pub(crate) reserve: Reserve,
}

/// An image with its backing files.
pub struct Chain {
    /// The image that is written.
    top: Arc<Served>,
    /// All layers. The first one is `top`.
    layers: Vec<Layer>,
}

/// A layer of a chain.
pub enum Layer {
    /// A qcow2 image.
    Qcow2(Arc<Served>),
    /// A raw one.
    Raw {
        /// Its file.
        file: FileId,
        /// Its size in bytes.
        size: u64,
    },
}

impl Chain {
    /// Returns the number of images below the one that is served.
    pub fn backing_images(&self) -> usize {
        self.layers.len() - 1
    }

    /// Makes a chain of the image that is served, its backing file, and so on.
    pub fn new(image: Arc<Served>, below: Vec<Layer>) -> Self {
        let mut layers = vec![Layer::Qcow2(image.clone())];
        layers.extend(below);
        Self { top: image, layers }
    }

    /// Returns the image that is written.
    #[inline]
    pub fn top(&self) -> &Arc<Served> {
        &self.top
    }

    /// Returns whether an entry of the map can say that a whole cluster reads as zeroes. If not,
    /// the zeroes are written to the image or to its data file.
    pub fn marks_zeroes(&self) -> bool {
        let top = self.top();
        !top.raw_data && (top.version >= 3 || !self.has_below())
    }

    pub(crate) fn has_below(&self) -> bool {
        self.layers.len() > 1
    }

    #[expect(clippy::indexing_slicing, reason = "layers are numbered by this module")]
    pub(crate) fn image(&self, layer: usize) -> &Served {
        match &self.layers[layer] {
            Layer::Qcow2(image) => image,
            Layer::Raw { .. } => unreachable!("only qcow2 images have maps"),
        }
    }

    /// Returns the contents of the disk from `pos` on: the layer, the contents, and for how many
    /// bytes they hold. What no layer has is below the last one, and reads as zeroes.
    pub(crate) fn find(
        &self,
        pos: u64,
        len: u64,
    ) -> std::result::Result<(usize, Source, u64), (usize, Miss)> {
        let mut n = len;
        for (i, layer) in self.layers.iter().enumerate() {
            let size = match layer {
                Layer::Qcow2(image) => image.size(),
                Layer::Raw { size, .. } => *size,
            };
            // A backing file may be shorter.
            if pos >= size {
                return Ok((i, Source::Zero, n));
            }
            n = n.min(size - pos);
            match layer {
                Layer::Raw { .. } => return Ok((i, Source::Data(pos), n)),
                Layer::Qcow2(image) => match image.run(pos, n).map_err(|miss| (i, miss))? {
                    (Source::Below, m) => n = m,
                    (what, m) => return Ok((i, what, m)),
                },
            }
        }
        Ok((self.layers.len() - 1, Source::Below, n))
    }

    /// Returns the file with a layer's data.
    #[expect(clippy::indexing_slicing, reason = "layers are numbered by this module")]
    pub(crate) fn data_of(&self, layer: usize) -> FileId {
        match &self.layers[layer] {
            Layer::Qcow2(image) => image.data,
            Layer::Raw { file, .. } => *file,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::{Options, create};
    use crate::header::SIZE_AT;
    use crate::memory::Memory;

    #[test]
    fn a_writer_clears_what_it_does_not_know_and_has_room_to_count() {
        let file = Memory::new(Vec::new(), 64 << 20);
        let options = Options { cluster_size: 512, ..Options::new(24 << 20) };
        create(&file, None, &options, &mut |_, _| {}).unwrap();
        let before = Image::open(&file).unwrap().header().clone();
        file.write_at(88, &(1u64 << 63 | autoclear::RAW_DATA).to_be_bytes()).unwrap();
        make_ready(&file).unwrap();
        let after = Image::open(&file).unwrap().header().clone();
        assert_eq!(after.autoclear, autoclear::RAW_DATA, "those that are known stay");
        let counted =
            |h: &Header| u64::from(h.reftable_clusters) * h.cluster_size() / 8 * h.refblock_entries();
        assert!(counted(&before) < before.clusters() && counted(&after) > after.clusters());
        let found = crate::check::check(&file, crate::check::Repair::No, &mut crate::check::Quiet).unwrap();
        assert_eq!((found.corruptions, found.leaks), (0, 0));
        let bytes = file.bytes();
        make_ready(&file).unwrap();
        assert!(file.bytes() == bytes, "once is enough");
    }
    /// Makes an image with clusters of 2 MiB and an L1 table of 32 MiB, all zeroes, whose header
    /// claims a disk of `size` bytes.
    fn sparse(size: u64) -> (Memory, Header) {
        let file = Memory::new(Vec::new(), 64 << 20);
        let options = Options { cluster_size: 2 << 20, ..Options::new(1 << 20) };
        create(&file, None, &options, &mut |_, _| {}).unwrap();
        let l1 = file.len().unwrap().next_multiple_of(2 << 20);
        for (at, field) in [(SIZE_AT, size), (40, l1)] {
            file.write_at(at, &field.to_be_bytes()).unwrap();
        }
        file.write_at(36, &(1u32 << 22).to_be_bytes()).unwrap();
        file.write_at(l1 + (32 << 20) - 1, &[0]).unwrap();
        let header = Image::open(&file).unwrap().header().clone();
        (file, header)
    }

    #[test]
    fn a_header_that_claims_a_huge_disk_takes_no_memory_for_it() {
        let settings = |room| Settings { file: 0, data: 0, cache_bytes: Some(1 << 20), writable: true, room };
        let most = 1 << 55;
        for (size, served) in [(1 << 60, false), (most + 512, false), (most, true)] {
            let (file, header) = sparse(size);
            let image = Served::open(&file, header, settings(false));
            assert_eq!(image.is_ok(), served, "{size:#x}");
            match image {
                Err(Error::Unsupported(why)) => assert!(why.contains(&most.to_string()), "{why}"),
                Err(e) => panic!("{e}"),
                Ok(image) => assert_eq!(image.map.parts(), 0),
            }
        }
        // An image that may grow does so as far as its map can.
        let (file, header) = sparse(4 << 20);
        let image = Served::open(&file, header, settings(true)).unwrap();
        assert_eq!((image.map.parts(), image.room()), (0, most));
    }
}
