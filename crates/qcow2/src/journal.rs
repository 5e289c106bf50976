//! The journal of the map: the changes since the last flush, in memory that outlives this process.
//!
//! The data of completed writes is in the file, or in the system's cache of it. But the entries
//! that lead to the data are in the memory of the process until a flush. Each change of an entry is
//! recorded here first. After a `kill -9`, the next opening writes these entries into the image
//! ([`recover`](fn@recover)), so that no completed write is lost, as with a raw file. A crash of
//! the machine loses the memory. Then only the writes that a flush covered are safe.
//!
//! Requests put records in on their workers, under the lock of what they change (a shard of the
//! map, the L1 table); flushes call it, too. It has no lock of its own. A counter gives each record
//! its place, and a record counts once its last word is there: a checksum over the others and its
//! number. Records are in a ring. A flush that wrote the map frees the places of the records that
//! were put in before it copied the map.
//!
//! A journal belongs to one state of its image. Its records refer to data that was written before
//! them, which an earlier state of the image does not have. So a number in the header, the
//! generation, grows with the records. Each flush that writes the map writes a larger generation.
//! So does a request that puts a record in when the last generation is older than
//! [`GENERATION_LASTS`] ([`crate::request`], `generation`). The journal contains the generation,
//! too, once it is in the image. An image with another generation was rolled back, or restored from
//! a copy, and its journal is refused. If a record refers to an offset behind the end of the
//! image's file, the journal is refused whatever the generation is.
//!
//! One rollback is not detected: to a state from after the last write of a generation, if records
//! were put in between that state and the process's death. All these records were put in within the
//! time that a generation lasts, or during the last flush. No L2 table is among them except during
//! a flush, because a record that refers to one is followed by a new generation at once.
//!
//! The file's modification time does not help. The last write before a process's death is recorded
//! nowhere, and later writes by other programs set the time in the same way. `cp` over an image
//! makes it newer, and a rollback makes it older, but so does a clock that is set back, or the
//! clock of a file server.
//!
//! Three things must never happen: other requests read an entry before its record is complete; a
//! place is used again while its record is needed; a journal is applied to an image that another
//! program changed (see [`Mark`](crate::header::Mark)).

mod recover;
#[cfg(test)]
mod tests;

pub use self::recover::{
    Changes, OpenHeader, Recovery, Refusal, journal_of, mark_closed, mark_open, mark_open_without_journal,
    recover,
};

use std::time::{Duration, Instant};

use crate::bytes::{be64, to_usize};
use crate::entry::Entry;
use crate::sync::AtomicU64;
use crate::sync::Ordering::{Acquire, Relaxed, Release};

/// The last digit is the version of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"VSJNMAP2");

/// Words before the records, and their meaning. Numbers of 16 bytes take two words.
const HEAD_WORDS: usize = 16;
const AT_MAGIC: usize = 0;
const AT_ID: usize = 1;
const AT_BOOT: usize = 3;
const AT_RECORDS: usize = 5;
/// Number of the first record that is needed.
const AT_FIRST: usize = 6;
/// The generation that was last written into the image.
const AT_GENERATION: usize = 7;
/// The largest generation whose write has started.
const AT_TRIED: usize = 8;

/// How long a generation lasts. A record that is put in later than this needs a new generation,
/// which costs one write of the header's piece. The time is short enough that a rollback within it
/// is unlikely, and long enough that a hard disk loses little speed.
pub const GENERATION_LASTS: Duration = Duration::from_millis(250);

const RECORD_WORDS: usize = 4;
/// Bits of a record's first word: the index, the number of entries, their kind.
const INDEX_BITS: u32 = 44;
const COUNT_BITS: u32 = 16;
/// Least number of records. One change of the map has to fit in with room to spare.
const RECORDS_MIN: u64 = if cfg!(loom) { 4 } else { 16 };
/// Most records: 2 MiB.
const RECORDS_MAX: u64 = 1 << 16;

/// Memory that outlives this process. It is zero when it is new, and has the length that was asked
/// for.
pub trait Words: Send + Sync {
    /// Returns all of it. The length never changes.
    fn words(&self) -> &[AtomicU64];
}

/// Converts a number of 16 bytes to two words.
fn halves(id: [u8; 16]) -> [u64; 2] {
    [be64(&id, 0), be64(&id, 8)]
}

/// Returns the head of a journal's memory, and its places for records. `None`: the memory is too
/// short for a head.
fn parts(words: &[AtomicU64]) -> Option<(&[AtomicU64; HEAD_WORDS], &[[AtomicU64; RECORD_WORDS]])> {
    let (head, places) = words.split_first_chunk()?;
    Some((head, places.as_chunks().0))
}

/// Entries that are put in together: `count` of them, from `index` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    kind: RecordKind,
    index: u64,
    count: u64,
    /// The first entry. For an L1 entry there is only this one.
    entry: Entry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordKind {
    /// L2 entries that refer to consecutive clusters.
    Run = 1,
    /// L2 entries that are equal.
    Same = 2,
    /// An entry of the L1 table.
    Table = 3,
}

impl Record {
    fn words(&self) -> [u64; 3] {
        debug_assert!(self.index >> INDEX_BITS == 0 && self.count >> COUNT_BITS == 0);
        let first = (self.kind as u64) << (INDEX_BITS + COUNT_BITS) | self.count << INDEX_BITS | self.index;
        [first, self.entry.word, self.entry.bits]
    }

    fn of(words: [u64; 3]) -> Option<Self> {
        let kind = match words[0] >> (INDEX_BITS + COUNT_BITS) {
            1 => RecordKind::Run,
            2 => RecordKind::Same,
            3 => RecordKind::Table,
            _ => return None,
        };
        Some(Self {
            kind,
            index: words[0] & ((1 << INDEX_BITS) - 1),
            count: words[0] >> INDEX_BITS & ((1 << COUNT_BITS) - 1),
            entry: Entry { word: words[1], bits: words[2] },
        })
    }
}

/// Returns the last word of a record.
fn checksum(key: u64, number: u64, words: [u64; 3]) -> u64 {
    let mut sum = key ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in words {
        sum = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        sum ^= sum >> 32;
    }
    sum
}

/// Converts entries of the map to records. Neighbours that continue in the same way are one record.
#[derive(Clone)]
struct Records<'e> {
    first: u64,
    entries: &'e [Entry],
    /// Bytes of a cluster.
    step: u64,
}

impl Iterator for Records<'_> {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let (&entry, rest) = self.entries.split_first()?;
        let continues = |step: u64| {
            let mut word = entry.word;
            let alike = rest.iter().take_while(move |e| {
                word = word.wrapping_add(step);
                **e == Entry { word, ..entry }
            });
            alike.count()
        };
        let (runs, same) = (continues(self.step), continues(0));
        let (kind, more) = if same > runs { (RecordKind::Same, same) } else { (RecordKind::Run, runs) };
        let count = (more + 1).min((1 << COUNT_BITS) - 1);
        let record = Record { kind, index: self.first, count: count as u64, entry };
        let rest = self.entries.get(count..).unwrap_or_default();
        (self.first, self.entries) = (self.first + count as u64, rest);
        Some(record)
    }
}

/// The result of putting records in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// They are in, and the journal is now half full. A flush should make room.
    Half,
    /// There is no room until the next flush. Nothing was put in.
    Full,
}

/// An atomic in a cache line of its own.
#[repr(align(64))]
struct CacheLine(AtomicU64);

/// A journal that is being written.
pub struct Journal {
    memory: Box<dyn Words>,
    records: u64,
    key: u64,
    /// Bytes of a cluster of the image.
    step: u64,
    /// Number of the next record.
    next: CacheLine,
    /// When the journal was made, the nanoseconds from then to the last write of a generation, and
    /// how long a generation lasts.
    made: Instant,
    written: AtomicU64,
    lasts: Duration,
}

impl Journal {
    /// Returns the bytes of memory that a disk of `clusters` should have.
    pub fn bytes(clusters: u64) -> usize {
        let records = (2 * clusters).clamp(RECORDS_MAX / 64, RECORDS_MAX);
        (HEAD_WORDS + records as usize * RECORD_WORDS) * 8
    }

    /// Makes a journal in `memory`, which is all zero. `id` is its random number. `boot` is the
    /// number of this run of the machine, so that a journal of another run is not accepted. The
    /// image gets the number by [`mark_open`] afterwards.
    ///
    /// `None`: the memory is too small.
    pub fn new(memory: Box<dyn Words>, id: [u8; 16], boot: [u8; 16]) -> Option<Self> {
        let words = memory.words();
        let records = (words.len().saturating_sub(HEAD_WORDS) / RECORD_WORDS) as u64;
        if records < RECORDS_MIN {
            return None;
        }
        let (head, _) = parts(words)?;
        let numbers = [(AT_ID, halves(id)), (AT_BOOT, halves(boot))];
        for (at, [first, second]) in numbers {
            for (word, half) in head.iter().skip(at).zip([first, second]) {
                word.store(half, Relaxed);
            }
        }
        head[AT_RECORDS].store(records, Relaxed);
        head[AT_FIRST].store(0, Relaxed);
        head[AT_MAGIC].store(MAGIC, Release);
        let (next, written, made) = (CacheLine(AtomicU64::new(0)), AtomicU64::new(0), Instant::now());
        let (key, lasts) = (halves(id)[1], GENERATION_LASTS);
        Some(Self { records, key, step: 0, next, memory, made, written, lasts })
    }

    /// Makes a generation last for another time than [`GENERATION_LASTS`].
    pub fn with_generations_of(self, lasts: Duration) -> Self {
        Self { lasts, ..self }
    }

    /// Sets the bytes of a cluster of the image.
    pub(crate) fn with_cluster(mut self, bytes: u64) -> Self {
        self.step = bytes;
        self
    }

    /// Returns the most entries of one change. As many fit after a flush has made room, however
    /// different they are.
    pub(crate) fn change_max(&self) -> u64 {
        self.records / 2
    }

    /// Puts entries of the map in, from that of cluster `first` on. The caller holds the lock under
    /// which these change.
    pub(crate) fn put(&self, first: u64, entries: &[Entry]) -> Put {
        self.add(Records { first, entries, step: self.step })
    }

    /// Puts an entry of the L1 table in. The caller holds the lock under which it changes.
    pub(crate) fn put_table(&self, index: u64, word: u64) -> Put {
        let entry = Entry { word, bits: 0 };
        self.add(std::iter::once(Record { kind: RecordKind::Table, index, count: 1, entry }))
    }

    fn add(&self, records: impl Iterator<Item = Record> + Clone) -> Put {
        let count = records.clone().count() as u64;
        let Some((head, places)) = parts(self.memory.words()) else { return Put::Full };
        let mut number = self.next.0.load(Relaxed);
        let used = loop {
            // Acquire: the flush has saved the records that are no longer needed before their
            // places are overwritten.
            let used = number.saturating_sub(head[AT_FIRST].load(Acquire));
            if used + count > self.records {
                return Put::Full;
            }
            match self.next.0.compare_exchange_weak(number, number + count, Relaxed, Relaxed) {
                Ok(_) => break used,
                Err(now) => number = now,
            }
        };
        for record in records {
            // The memory had that many places when `records` was counted, and `Words` does not
            // shrink.
            let Some(place) = places.get(to_usize(number % self.records)) else { return Put::Full };
            let parts = record.words();
            for (word, part) in place.iter().zip(parts) {
                word.store(part, Relaxed);
            }
            place[3].store(checksum(self.key, number, parts), Release);
            number += 1;
        }
        let half = self.records / 2;
        if used < half && used + count >= half { Put::Half } else { Put::Done }
    }

    /// Returns a word of the head.
    #[allow(
        clippy::indexing_slicing,
        reason = "`new` checked that the memory has a head, and `Words` does not shrink"
    )]
    fn head(&self, at: usize) -> &AtomicU64 {
        &self.memory.words()[at]
    }

    /// Returns the position of the journal before a flush copies the map. All records before it are
    /// in the copies, because they were put in under the lock under which the copies are made.
    pub(crate) fn mark(&self) -> u64 {
        self.next.0.load(Relaxed)
    }

    /// Returns whether a record that was just put in needs a new generation.
    pub(crate) fn needs_generation(&self) -> bool {
        let written = Duration::from_nanos(self.written.load(Relaxed));
        self.made.elapsed().saturating_sub(written) >= self.lasts
    }

    /// Returns the generation to write into the header. Only one request at a time calls it: the
    /// one that [`FlushQueue`](crate::served::FlushQueue) calls running.
    pub(crate) fn next_generation(&self) -> u64 {
        let tried = self.head(AT_TRIED);
        // A failed write may have left its generation in the image, so that one is not used.
        let next = tried.load(Relaxed) + 1;
        tried.store(next, Release);
        next
    }

    /// Records that the write of this generation into the header has ended. `None`: it failed, and
    /// the generation may be there or not. The same request calls it.
    pub(crate) fn wrote_generation(&self, generation: Option<u64>) {
        if let Some(generation) = generation {
            self.head(AT_GENERATION).store(generation, Release);
        }
        self.written.store(u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Frees the records before `mark`. The copies that were made since then are in the image, on
    /// stable storage. If the map was written, so is a new generation, which
    /// [`wrote_generation`](Self::wrote_generation) was told before: no journal without these
    /// records fits an image without these copies. One flush at a time calls it.
    pub(crate) fn forget(&self, mark: u64) {
        self.head(AT_FIRST).store(mark, Release);
    }
}

/// Reads the records of a journal, oldest first, for an image with this number and generation, in
/// this run of the machine.
fn read(words: &[AtomicU64], id: [u8; 16], generation: u64, boot: [u8; 16]) -> Result<Vec<Record>, Refusal> {
    let (head, places) = parts(words).ok_or(Refusal::Other)?;
    let get = |at: usize| head.get(at).map_or(0, |word| word.load(Acquire));
    let is = |at: usize, number: [u8; 16]| halves(number) == [get(at), get(at + 1)];
    if get(AT_MAGIC) != MAGIC || !is(AT_ID, id) || !is(AT_BOOT, boot) {
        return Err(Refusal::Other);
    }
    let (records, first) = (get(AT_RECORDS), get(AT_FIRST));
    if records == 0 || records > places.len() as u64 {
        return Err(Refusal::Other);
    }
    // The writer may have been killed before or after its last write of a generation.
    if !(get(AT_GENERATION)..=get(AT_TRIED)).contains(&generation) {
        return Err(Refusal::RolledBack);
    }
    let record = |number: u64| {
        let [first, second, third, last] = places.get(to_usize(number % records))?;
        let parts = [first, second, third].map(|word| word.load(Acquire));
        let whole = last.load(Acquire) == checksum(halves(id)[1], number, parts);
        // A record that is not complete was being put in. Its change had not happened yet.
        if whole { Record::of(parts) } else { None }
    };
    Ok((0..records).filter_map(|i| record(first.wrapping_add(i))).collect())
}
