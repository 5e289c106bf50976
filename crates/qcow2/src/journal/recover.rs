//! Beginning and ending with a journal, and what is done when its image was not closed.

use super::{Kind, Record, Words, read};
use crate::entry::{COPIED, OFFSET};
use crate::header::{Header, Mark, incompatible};
use crate::map::Entry;
use crate::{Error, Image, Result, Storage};

/// Marks a version 3 image that was closed: what it lacks is in the journal of this number from now on, and its
/// reference counts may be wrong.
///
/// # Errors
/// An image of version 2, one that was not closed, a header that has no room, and the storage's.
pub fn begin(file: &dyn Storage, id: [u8; 16]) -> Result<()> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    if header.version < 3 || header.has(incompatible::DIRTY) {
        return Err(Error::invalid("only a version 3 image that was closed can begin a journal"));
    }
    let journal = Some(Mark { id, untouched: true });
    image.replace_header(Header {
        incompatible: header.incompatible | incompatible::DIRTY,
        journal,
        ..header
    })
}

/// The image has all, with right counts, on stable storage: takes the mark away.
///
/// # Errors
/// The storage's.
pub fn end(file: &dyn Storage) -> Result<()> {
    let mut image = Image::open(file)?;
    let header = image.header().clone();
    let incompatible = header.incompatible & !incompatible::DIRTY;
    image.replace_header(Header { incompatible, journal: None, ..header })
}

/// The journal that may have changes of an image: none if it was closed, or if another program changed it since.
pub fn journal_of(header: &Header) -> Option<Mark> {
    header.journal.filter(|mark| mark.untouched && header.has(incompatible::DIRTY))
}

/// Writes what the journal in `memory` has into its image. How many records that were; none: it is not the image's
/// journal, or not of this run of the machine, and nothing was done.
///
/// All that was written to the data file, where that is another, has to be stable. Reference counts are wrong
/// afterwards and are to be [repaired](crate::check), which ends the journal; until then all of it can be done again
/// from the start, wherever it was broken off.
///
/// # Errors
/// A journal that cannot be this image's, and the storage's.
pub fn recover(file: &dyn Storage, memory: &dyn Words, boot: [u8; 16]) -> Result<Option<u64>> {
    let image = Image::open(file)?;
    let Some(mark) = journal_of(image.header()) else { return Ok(None) };
    let Some(records) = read(memory.words(), mark.id, boot) else { return Ok(None) };
    // The data that the entries name is stable before they are, as in every flush.
    image.sync()?;
    let h = image.header();
    let l1 = image.table(h.l1_offset, h.l1_size.into(), "the L1 table")?;
    let mut replay = Replay { l1, image };
    for record in &records {
        replay.apply(record)?;
    }
    replay.image.sync()?;
    Ok(Some(records.len() as u64))
}

struct Replay<'s> {
    image: Image<'s>,
    l1: Vec<u64>,
}

impl Replay<'_> {
    fn apply(&mut self, record: &Record) -> Result<()> {
        let h = self.image.header();
        let (cluster, entries) = (h.cluster_size(), h.l2_entries());
        if record.kind == Kind::Table {
            return self.apply_table(record.index, record.entry.word & OFFSET);
        }
        let table = self.l1.get((record.index / entries) as usize).map_or(0, |e| e & OFFSET);
        let at = record.index % entries;
        if table == 0 || record.count == 0 || at + record.count > entries {
            return Err(foreign());
        }
        let mut bytes = Vec::with_capacity((record.count * h.l2_entry_bytes()) as usize);
        for i in 0..record.count {
            let step = if record.kind == Kind::Run { i * cluster } else { 0 };
            let entry = Entry { word: record.entry.word.wrapping_add(step), ..record.entry };
            bytes.extend_from_slice(&entry.word.to_be_bytes());
            if h.has(incompatible::EXTENDED_L2) {
                bytes.extend_from_slice(&entry.bits.to_be_bytes());
            }
        }
        self.image.write(table + at * h.l2_entry_bytes(), &bytes, "cannot write an L2 table")
    }

    fn apply_table(&mut self, index: u64, table: u64) -> Result<()> {
        let (at, cluster) = (self.image.header().l1_offset + 8 * index, self.image.header().cluster_size());
        let entry = self.l1.get_mut(index as usize);
        let entry = entry.filter(|_| table != 0 && table & (cluster - 1) == 0).ok_or_else(foreign)?;
        *entry = table | COPIED;
        let bytes = entry.to_be_bytes();
        // The file may not reach so far: nothing but zeroes was there yet.
        let file = self.image.file;
        let len = file.len().map_err(Error::io("the file's length"))?;
        if len < table + cluster {
            file.set_len(table + cluster).map_err(Error::io("cannot make the file longer"))?;
        }
        self.image.write(at, &bytes, "cannot write the L1 table")
    }
}

fn foreign() -> Error {
    Error::corrupt("the journal in memory has entries that the image has no place for")
}
