//! Start and end of a journal, and the recovery of an image that was not closed.

use super::{Record, RecordKind, Words, read};
use crate::bytes::{low_u32, put, to_usize};
use crate::entry::{COMPRESSED, COPIED, Compressed, Entry, OFFSET, ZERO};
use crate::header::{Header, Mark, Open, UNIT, generation_at, incompatible};
use crate::{Error, Image, Result, Storage};

/// The first bytes of an image that is open for writing. Flushes write the journal's generation
/// there.
#[derive(Clone, Debug)]
pub struct OpenHeader {
    bytes: Vec<u8>,
    /// The offset of the generation in them. `None`: there is no journal.
    generation_at: Option<usize>,
}

impl OpenHeader {
    /// Reads the first bytes of an image without a journal.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn of(file: &dyn Storage, header: &Header) -> Result<Self> {
        let mut bytes = vec![0; to_usize(UNIT.min(header.cluster_size()))];
        file.read_at(0, &mut bytes).map_err(Error::io("cannot read the header"))?;
        Ok(Self { bytes, generation_at: None })
    }

    /// Returns the first bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the first bytes, for changes of header fields with a fixed offset.
    pub(crate) fn fields(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Sets the journal's generation, if there is a journal.
    pub fn set_generation(&mut self, generation: u64) {
        if let Some(at) = self.generation_at {
            put(&mut self.bytes, at, &generation.to_be_bytes());
        }
    }
}

/// Marks a version 3 image that was closed. From now on, the journal of this number has the changes
/// that the image lacks, and the image's reference counts may be wrong.
///
/// # Errors
/// An image of version 2, one that was not closed, a header without room or so long that the mark
/// would not be in the first sector, and those of the storage.
pub fn mark_open(file: &dyn Storage, id: [u8; 16]) -> Result<OpenHeader> {
    let header = Image::open(file)?.header().clone();
    if header.version >= 3 && generation_at(&header).is_none() {
        return Err(Error::unsupported(
            "its header is so long that a journal's mark does not fit into the first 512 bytes; 'vshunt image convert' makes an \
             image with a short one",
        ));
    }
    let header = mark(file, Open::Journal { id, generation: 0 })?;
    let generation_at = generation_at(&header).expect("a mark does not change the header's length");
    Ok(OpenHeader { generation_at: Some(generation_at), ..OpenHeader::of(file, &header)? })
}

/// Marks an image that was closed, of any version, and is written without a journal. Its reference
/// counts may be wrong from now on. `stable`: each completed write is on stable storage, so none
/// can be missing.
///
/// # Errors
/// Those of [`mark_open`].
pub fn mark_open_without_journal(file: &dyn Storage, stable: bool) -> Result<OpenHeader> {
    mark(file, Open::Without { stable }).and_then(|header| OpenHeader::of(file, &header))
}

fn mark(file: &dyn Storage, open: Open) -> Result<Header> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    // Other programs would not see the mark in an image of version 2, and would change it while a
    // journal exists.
    if header.is_open() || (header.version < 3 && !matches!(open, Open::Without { .. })) {
        return Err(Error::invalid("only a version 3 image that was closed can start a journal"));
    }
    let dirty = if header.version < 3 { 0 } else { incompatible::DIRTY };
    let mark = Some(Mark { open, untouched: true });
    image.replace_header(Header { incompatible: header.incompatible | dirty, mark, ..header })?;
    Ok(image.header().clone())
}

/// Removes the mark. The image has all changes and right counts, on stable storage.
///
/// # Errors
/// Those of the storage.
pub fn mark_closed(file: &dyn Storage) -> Result<()> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    let incompatible = header.incompatible & !incompatible::DIRTY;
    image.replace_header(Header { incompatible, mark: None, ..header })
}

/// Returns how the last writer opened the image, if it did not close it and no other program has
/// changed the image since.
pub fn journal_of(header: &Header) -> Option<Open> {
    header.mark.filter(|mark| mark.untouched && header.is_open()).map(|mark| mark.open)
}

/// Why the journal in memory does not apply to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The image has none.
    None,
    /// It belongs to another image, or to another run of the machine.
    Other,
    /// The image is in another state than the one that the journal belongs to.
    RolledBack,
    /// An earlier version of this program wrote it, without the state of the image that it belongs
    /// to.
    Older,
}

/// The result of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// This number of records was applied.
    Done(u64),
    /// Nothing was done.
    Refused(Refusal),
}

/// The changes of a journal for an image.
#[derive(Clone, Debug)]
pub struct Changes(Vec<Record>);

impl Changes {
    /// Reads the changes in `memory` for an image with this header, in a file of `len` bytes, in
    /// the run `boot` of the machine.
    ///
    /// # Errors
    /// The journal does not apply to this image.
    pub fn read(
        header: &Header,
        len: u64,
        memory: &dyn Words,
        boot: [u8; 16],
    ) -> std::result::Result<Self, Refusal> {
        let records = match journal_of(header) {
            Some(Open::Journal { id, generation }) => read(memory.words(), id, generation, boot)?,
            Some(Open::Older) => return Err(Refusal::Older),
            Some(Open::Without { .. }) | None => return Err(Refusal::None),
        };
        // The data that a record refers to was written before the record, so the file is long
        // enough.
        match records.iter().any(|record| names_from(header, record).is_some_and(|at| at >= len)) {
            true => Err(Refusal::RolledBack),
            false => Ok(Self(records)),
        }
    }

    /// Returns the number of records.
    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Writes all changes into the image.
    ///
    /// # Errors
    /// Changes that do not fit the image, and those of the storage.
    fn apply(&self, file: &dyn Storage) -> Result<()> {
        let image = Image::open(file)?;
        // The data that the entries refer to is stable before the entries are, as in every flush.
        image.sync()?;
        let h = image.header();
        let l1 = image.table(h.l1_offset, h.l1_size.into(), "the L1 table")?;
        let mut replay = Replay { l1, image };
        self.0.iter().try_for_each(|record| replay.apply(record))?;
        replay.image.sync()
    }

    /// Applies the changes of the L1 table to one that was read.
    ///
    /// # Errors
    /// An entry that the table does not have.
    pub(crate) fn patch_l1(&self, header: &Header, l1: &mut [u64]) -> Result<()> {
        self.0
            .iter()
            .filter(|r| r.kind == RecordKind::Table)
            .try_for_each(|r| table_entry(header, l1, r).map(drop))
    }

    /// Applies the changes to the entries of the map from that of cluster `first` on, as they were
    /// read.
    pub(crate) fn patch(&self, header: &Header, first: u64, bytes: &mut [u8]) {
        let each = header.l2_entry_bytes();
        let end = first + bytes.len() as u64 / each;
        for record in self.0.iter().filter(|r| r.kind != RecordKind::Table) {
            for cluster in record.index.max(first)..(record.index + record.count).min(end) {
                let at = to_usize((cluster - first) * each);
                let Some(place) = bytes.get_mut(at..at + to_usize(each)) else { continue };
                entry_bytes(header, record, cluster - record.index, place);
            }
        }
    }
}

/// Encodes entry number `i` of a record as it is in the image.
fn entry_bytes(header: &Header, record: &Record, i: u64, bytes: &mut [u8]) {
    let step = if record.kind == RecordKind::Run { i * header.cluster_size() } else { 0 };
    let entry = Entry { word: record.entry.word.wrapping_add(step), ..record.entry };
    put(bytes, 0, &entry.word.to_be_bytes());
    if header.has(incompatible::EXTENDED_L2) {
        put(bytes, 8, &entry.bits.to_be_bytes());
    }
}

/// Returns the last offset in the image's file at which there is something that a record refers to.
/// `None`: it refers to nothing in that file.
fn names_from(header: &Header, record: &Record) -> Option<u64> {
    let Entry { word, bits } = record.entry;
    let external = header.has(incompatible::DATA_FILE);
    match record.kind {
        RecordKind::Table => Some(word & OFFSET),
        _ if external || word & OFFSET == 0 => None,
        _ if word & COMPRESSED != 0 => Some(Compressed::of(word, header.cluster_bits).offset),
        // A reserved offset for a cluster of zeroes.
        _ if header.has(incompatible::EXTENDED_L2) && low_u32(bits) == 0 => None,
        _ if !header.has(incompatible::EXTENDED_L2) && word & ZERO != 0 => None,
        RecordKind::Run => Some((word & OFFSET) + (record.count - 1) * header.cluster_size()),
        RecordKind::Same => Some(word & OFFSET),
    }
}

/// Applies a record to the L1 table. Returns the former entry.
fn table_entry(header: &Header, l1: &mut [u64], record: &Record) -> Result<u64> {
    let table = record.entry.word & OFFSET;
    let entry = l1.get_mut(to_usize(record.index));
    let entry =
        entry.filter(|_| table != 0 && table & (header.cluster_size() - 1) == 0).ok_or_else(foreign)?;
    *entry = table | COPIED;
    Ok(*entry)
}

/// Writes the changes of the journal in `memory` into its image, if the journal belongs to the
/// image's present state.
///
/// Everything that was written to an external data file has to be stable. Afterwards the reference
/// counts are wrong and have to be [repaired](crate::check), which ends the journal. Until then,
/// the whole recovery can be repeated from the start, wherever it was interrupted.
///
/// # Errors
/// A journal that cannot belong to this image, and those of the storage.
pub fn recover(file: &dyn Storage, memory: &dyn Words, boot: [u8; 16]) -> Result<Recovery> {
    let image = Image::open(file)?;
    let len = file.len().map_err(Error::io("the file's length"))?;
    let changes = match Changes::read(image.header(), len, memory, boot) {
        Ok(changes) => changes,
        Err(why) => return Ok(Recovery::Refused(why)),
    };
    changes.apply(file)?;
    Ok(Recovery::Done(changes.count()))
}

struct Replay<'s> {
    image: Image<'s>,
    l1: Vec<u64>,
}

impl Replay<'_> {
    fn apply(&mut self, record: &Record) -> Result<()> {
        let h = self.image.header();
        let (entries, each) = (h.l2_entries(), h.l2_entry_bytes());
        if record.kind == RecordKind::Table {
            return self.apply_table(record);
        }
        let table = self.l1.get(to_usize(record.index / entries)).map_or(0, |e| e & OFFSET);
        let at = record.index % entries;
        if table == 0 || record.count == 0 || at + record.count > entries {
            return Err(foreign());
        }
        let mut bytes = vec![0; to_usize(record.count * each)];
        for (i, entry) in (0..).zip(bytes.chunks_exact_mut(to_usize(each))) {
            entry_bytes(h, record, i, entry);
        }
        self.image.write(table + at * each, &bytes, "cannot write an L2 table")
    }

    fn apply_table(&mut self, record: &Record) -> Result<()> {
        let (index, table) = (record.index, record.entry.word & OFFSET);
        let entry = table_entry(self.image.header(), &mut self.l1, record)?;
        let (at, cluster) = (self.image.header().l1_offset + 8 * index, self.image.header().cluster_size());
        // The file may be too short, if there were only zeroes so far.
        let file = self.image.file;
        let len = file.len().map_err(Error::io("the file's length"))?;
        if len < table + cluster {
            file.set_len(table + cluster).map_err(Error::io("cannot make the file longer"))?;
        }
        self.image.write(at, &entry.to_be_bytes(), "cannot write the L1 table")
    }
}

fn foreign() -> Error {
    Error::corrupt("the journal in memory has entries that the image has no place for")
}
