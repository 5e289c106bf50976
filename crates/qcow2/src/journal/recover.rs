//! Beginning and ending with a journal, and what is done when its image was not closed.

use super::{Record, RecordKind, Words, read};
use crate::bytes::{low_u32, put, to_usize};
use crate::entry::{COMPRESSED, COPIED, Compressed, Entry, OFFSET, ZERO};
use crate::header::{Header, Mark, Open, UNIT, generation_at, incompatible};
use crate::{Error, Image, Result, Storage};

/// The first bytes of an image that is open for writing, where flushes write the journal's generation.
#[derive(Clone, Debug)]
pub struct Begun {
    bytes: Vec<u8>,
    /// Where the generation lies in them; none: there is no journal.
    generation_at: Option<usize>,
}

impl Begun {
    /// Reads the first bytes of an image without a journal.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn of(file: &dyn Storage, header: &Header) -> Result<Self> {
        let mut bytes = vec![0; to_usize(UNIT.min(header.cluster_size()))];
        file.read_at(0, &mut bytes).map_err(Error::io("cannot read the header"))?;
        Ok(Self { bytes, generation_at: None })
    }

    /// The first bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The first bytes, for fields of the header that have a fixed place.
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

/// Marks a version 3 image that was closed: from now on what it lacks is in the journal of this number, and its reference
/// counts may be wrong.
///
/// # Errors
/// An image of version 2, one that was not closed, a header that has no room or is so long that the mark would not lie in the
/// first sector, and the storage's.
pub fn begin(file: &dyn Storage, id: [u8; 16]) -> Result<Begun> {
    let header = Image::open(file)?.header().clone();
    if header.version >= 3 && generation_at(&header).is_none() {
        return Err(Error::unsupported(
            "its header is so long that a journal's mark does not fit into the first 512 bytes; 'vshunt image convert' makes an \
             image with a short one",
        ));
    }
    let header = mark(file, Open::Journal { id, generation: 0 })?;
    let generation_at = generation_at(&header).expect("a mark does not change the header's length");
    Ok(Begun { generation_at: Some(generation_at), ..Begun::of(file, &header)? })
}

/// Marks an image that was closed, of any version, and that is written without a journal: its reference counts may be wrong
/// from now on. `stable`: each completed write is on stable storage, so that none can be missing.
///
/// # Errors
/// Those of [`begin`].
pub fn begin_without(file: &dyn Storage, stable: bool) -> Result<Begun> {
    mark(file, Open::Without { stable }).and_then(|header| Begun::of(file, &header))
}

fn mark(file: &dyn Storage, open: Open) -> Result<Header> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    // Other programs would not see the mark in an image of version 2, and change it under a journal.
    if header.is_open() || (header.version < 3 && !matches!(open, Open::Without { .. })) {
        return Err(Error::invalid("only a version 3 image that was closed can begin a journal"));
    }
    let dirty = if header.version < 3 { 0 } else { incompatible::DIRTY };
    let mark = Some(Mark { open, untouched: true });
    image.replace_header(Header { incompatible: header.incompatible | dirty, mark, ..header })?;
    Ok(image.header().clone())
}

/// The image has all, with right counts, on stable storage: takes the mark away.
///
/// # Errors
/// The storage's.
pub fn end(file: &dyn Storage) -> Result<()> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    let incompatible = header.incompatible & !incompatible::DIRTY;
    image.replace_header(Header { incompatible, mark: None, ..header })
}

/// Returns how the image was opened by its last writer, if that did not close it and no other program changed the image
/// since.
pub fn journal_of(header: &Header) -> Option<Open> {
    header.mark.filter(|mark| mark.untouched && header.is_open()).map(|mark| mark.open)
}

/// Why the journal in memory says nothing about an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The image has none.
    None,
    /// It is another image's, or of another run of the machine.
    Other,
    /// The image is in another state than the one that the journal belongs to.
    RolledBack,
    /// It was written by an earlier version of this program, which did not say for which state of the image.
    Older,
}

/// What became of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// So many records were brought in.
    Done(u64),
    /// Nothing was done.
    Refused(Refusal),
}

/// What a journal has for an image.
#[derive(Clone, Debug)]
pub struct Changes(Vec<Record>);

impl Changes {
    /// Reads what the journal in `memory` has for an image with this header, in a file of `len` bytes, in the run of the
    /// machine `boot`.
    ///
    /// # Errors
    /// The journal says nothing about this image.
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
        // What a record names was written before it, and made the file so long.
        match records.iter().any(|record| names_from(header, record).is_some_and(|at| at >= len)) {
            true => Err(Refusal::RolledBack),
            false => Ok(Self(records)),
        }
    }

    /// How many records.
    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Writes all of it into its image.
    ///
    /// # Errors
    /// Changes that the image has no place for, and the storage's.
    fn apply(&self, file: &dyn Storage) -> Result<()> {
        let image = Image::open(file)?;
        // The data that the entries name is stable before they are, as in every flush.
        image.sync()?;
        let h = image.header();
        let l1 = image.table(h.l1_offset, h.l1_size.into(), "the L1 table")?;
        let mut replay = Replay { l1, image };
        self.0.iter().try_for_each(|record| replay.apply(record))?;
        replay.image.sync()
    }

    /// Brings changes of the L1 table into one that was read.
    ///
    /// # Errors
    /// An entry that the table has no place for.
    pub(crate) fn patch_l1(&self, header: &Header, l1: &mut [u64]) -> Result<()> {
        self.0
            .iter()
            .filter(|r| r.kind == RecordKind::Table)
            .try_for_each(|r| table_entry(header, l1, r).map(drop))
    }

    /// Brings changes into the entries of the map from that of cluster `first` on, as they were read.
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

/// The entry number `i` of a record as it is in the image.
fn entry_bytes(header: &Header, record: &Record, i: u64, bytes: &mut [u8]) {
    let step = if record.kind == RecordKind::Run { i * header.cluster_size() } else { 0 };
    let entry = Entry { word: record.entry.word.wrapping_add(step), ..record.entry };
    put(bytes, 0, &entry.word.to_be_bytes());
    if header.has(incompatible::EXTENDED_L2) {
        put(bytes, 8, &entry.bits.to_be_bytes());
    }
}

/// The last place in the image's file from which on there is something that a record names; none: it names nothing there.
fn names_from(header: &Header, record: &Record) -> Option<u64> {
    let Entry { word, bits } = record.entry;
    let external = header.has(incompatible::DATA_FILE);
    match record.kind {
        RecordKind::Table => Some(word & OFFSET),
        _ if external || word & OFFSET == 0 => None,
        _ if word & COMPRESSED != 0 => Some(Compressed::of(word, header.cluster_bits).offset),
        // A place that is kept for a cluster of zeroes.
        _ if header.has(incompatible::EXTENDED_L2) && low_u32(bits) == 0 => None,
        _ if !header.has(incompatible::EXTENDED_L2) && word & ZERO != 0 => None,
        RecordKind::Run => Some((word & OFFSET) + (record.count - 1) * header.cluster_size()),
        RecordKind::Same => Some(word & OFFSET),
    }
}

/// Puts a record into the L1 table; the entry that it has then.
fn table_entry(header: &Header, l1: &mut [u64], record: &Record) -> Result<u64> {
    let table = record.entry.word & OFFSET;
    let entry = l1.get_mut(to_usize(record.index));
    let entry =
        entry.filter(|_| table != 0 && table & (header.cluster_size() - 1) == 0).ok_or_else(foreign)?;
    *entry = table | COPIED;
    Ok(*entry)
}

/// Writes what the journal in `memory` has into its image, if it belongs to that image in its present state.
///
/// All that was written to the data file, where that is another, has to be stable. Reference counts are wrong
/// afterwards and are to be [repaired](crate::check), which ends the journal; until then all of it can be done again
/// from the start, wherever it was broken off.
///
/// # Errors
/// A journal that cannot be this image's, and the storage's.
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
        // The file may not reach so far: nothing but zeroes was there yet.
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
