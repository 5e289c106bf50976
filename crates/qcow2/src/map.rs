//! The map of the disk's clusters: slices of L2 tables in memory.
//!
//! A slice is the unit in which a table is read and written: 4 KiB, or all of a smaller table. A
//! look-up in a slice that is in memory takes no lock. Each frame counts its changes (the count is
//! odd during one), and a reader that sees the count change looks again. All other accesses take a
//! shard's lock, which several slices share. They are for dirty slices, slices that are being read,
//! and slices that a request holds to change them.
//!
//! Lock order: frames, then a shard. Neither is held during I/O.
//!
//! An entry of one slice must never be used for another slice, and a dirty slice must never be
//! dropped.

use crate::bytes::{be64, low_u32, to_usize};
use crate::lock::Locked;
use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;

use crate::sync::Ordering::*;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, fence, pause};

use crate::Waker;
use crate::entry::Entry;
use crate::journal::{Journal, Put};

/// Most bytes of a slice.
const SLICE_BYTES: u64 = 4096;
const SHARDS: usize = if cfg!(loom) { 1 } else { 64 };
/// Least number of frames, whatever the setting is.
const FRAMES_MIN: u64 = if cfg!(loom) { 1 } else { 4 };
/// No frame for the slice.
const NONE: u32 = 0;
const NO_SLICE: u64 = u64::MAX;
/// Most words of an entry.
const WORDS: usize = 2;
/// log2 of the slices in one part of the directory, which has 4 KiB.
const PART_BITS: u32 = 10;
/// Most slices of one image, so that its directory has at most 128 MiB. With clusters of 64 KiB,
/// the disk then has 1 PiB.
const SLICES_MAX: u64 = 1 << 25;

/// Memory for one slice.
struct SliceFrame {
    /// Grows with each change. It is odd during a change.
    seq: AtomicU32,
    /// The slice that is in the frame.
    slice: AtomicU64,
    /// Whether it was used since the clock hand passed.
    used: AtomicBool,
    /// Requests that are going to change it. It stays in memory as long as there are some. Changed
    /// under the shard's lock.
    pins: AtomicU32,
    /// Whether its slice is among the dirty ones. Changed under the shard's lock.
    dirty: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

/// The state of the slices that belong to one shard.
#[derive(Default)]
pub(crate) struct Shard {
    /// Slices that are being read, with the requests that wait for them.
    loading: HashMap<u64, Vec<Waker>>,
    /// Clusters whose entries a request is about to change, with the requests that wait for them.
    busy: HashMap<u64, Vec<Waker>>,
    dirty: BTreeSet<u64>,
}

struct FreeFrames {
    /// The first frame that was never used.
    fresh: u32,
    hand: u32,
}

type Part = Box<[AtomicU32]>;

/// The slices of one image that are in memory.
pub(crate) struct Map {
    entry_words: usize,
    slice_entries: u64,
    slice_bits: u32,
    slices: u64,
    /// Frame number + 1 of each slice. A part is made when the first of its slices is read, because
    /// the header of a small sparse file can claim a disk that needs a large directory.
    directory: Box<[OnceLock<Part>]>,
    frames: Box<[SliceFrame]>,
    shards: Box<[Mutex<Shard>]>,
    free: Mutex<FreeFrames>,
    dirty: AtomicU32,
    /// Slices read since the image was opened.
    loads: AtomicU64,
}

/// The result of a request for a slice.
pub(crate) enum Load {
    /// It is in memory.
    Here,
    /// The caller has to read it, and to call [`Map::loaded`].
    Yours,
    /// Another request reads it. The caller is woken.
    Wait,
}

/// A copy of a dirty slice, in the format of the image.
pub(crate) struct Copy {
    pub(crate) slice: u64,
    pub(crate) bytes: Box<[u8]>,
}

/// Returns the entries of a slice of tables with `table_entries` entries of `entry_words` words.
fn slice_entries(table_entries: u64, entry_words: usize) -> u64 {
    table_entries.min(SLICE_BYTES / (8 * entry_words as u64))
}

impl Map {
    /// Returns the most clusters of a disk with such tables: a multiple of `table_entries`.
    pub(crate) fn clusters_max(table_entries: u64, entry_words: usize) -> u64 {
        SLICES_MAX * slice_entries(table_entries, entry_words)
    }

    /// Makes a map for tables of `table_entries` entries of `entry_words` words, for a disk of
    /// `clusters`, in `cache_bytes` of memory. `clusters` is at most
    /// [`clusters_max`](Self::clusters_max).
    pub(crate) fn new(table_entries: u64, entry_words: usize, clusters: u64, cache_bytes: u64) -> Self {
        let slice_entries = slice_entries(table_entries, entry_words);
        let slices = clusters.div_ceil(slice_entries).max(1);
        let frames = (cache_bytes / (slice_entries * 8 * entry_words as u64))
            .clamp(FRAMES_MIN, slices.max(FRAMES_MIN));
        let frame = |_| SliceFrame {
            seq: AtomicU32::new(0),
            slice: AtomicU64::new(NO_SLICE),
            used: AtomicBool::new(false),
            pins: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
            words: OnceLock::new(),
        };
        Self {
            entry_words,
            slice_entries,
            slice_bits: slice_entries.trailing_zeros(),
            slices,
            directory: (0..slices.div_ceil(1 << PART_BITS)).map(|_| OnceLock::new()).collect(),
            frames: (0..frames).map(frame).collect(),
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect(),
            free: Mutex::new(FreeFrames { fresh: 0, hand: 0 }),
            dirty: AtomicU32::new(0),
            loads: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn slice_of(&self, cluster: u64) -> u64 {
        cluster >> self.slice_bits
    }

    /// Returns the first cluster behind the slice of `cluster`.
    pub(crate) fn slice_end(&self, cluster: u64) -> u64 {
        (self.slice_of(cluster) + 1) << self.slice_bits
    }

    pub(crate) fn slice_bytes(&self) -> usize {
        to_usize(self.slice_entries) * self.entry_words * 8
    }

    /// Returns the number of slices of one L2 table.
    pub(crate) fn slices_a_table(&self, table_entries: u64) -> u64 {
        table_entries / self.slice_entries
    }

    /// Returns the number of slices read so far.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Relaxed)
    }

    /// Returns the number of parts of the directory.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> usize {
        self.directory.iter().filter(|part| part.get().is_some()).count()
    }

    /// Returns whether so many slices are dirty that they should be written before more become
    /// dirty. Never true if there is room for all.
    pub(crate) fn is_crowded(&self) -> bool {
        self.dirty.load(Relaxed) as usize >= self.frames.len() / 2 && (self.frames.len() as u64) < self.slices
    }

    #[expect(clippy::indexing_slicing, reason = "a number modulo the length of the array")]
    fn shard(&self, slice: u64) -> MutexGuard<'_, Shard> {
        self.shards[to_usize(slice) % SHARDS].locked()
    }

    /// Returns the number of a slice's frame plus 1, or [`NONE`].
    #[inline(always)]
    #[expect(
        clippy::indexing_slicing,
        reason = "the directory was made for all slices of the disk, and a part for each of its own"
    )]
    fn number_of(&self, slice: u64) -> u32 {
        let part = self.directory[(slice >> PART_BITS) as usize].get();
        part.map_or(NONE, |part| part[(slice & ((1 << PART_BITS) - 1)) as usize].load(Acquire))
    }

    #[expect(
        clippy::indexing_slicing,
        reason = "the directory was made for all slices of the disk, and a part for each of its own"
    )]
    fn set_number(&self, slice: u64, number: u32) {
        let first = slice >> PART_BITS << PART_BITS;
        let part = self.directory[(slice >> PART_BITS) as usize].get_or_init(|| {
            (first..self.slices.min(first + (1 << PART_BITS))).map(|_| AtomicU32::new(NONE)).collect()
        });
        part[to_usize(slice - first)].store(number, Release);
    }

    #[inline(always)]
    #[expect(clippy::indexing_slicing, reason = "`set_number` was given the number of a frame")]
    fn frame_of(&self, slice: u64) -> Option<&SliceFrame> {
        match self.number_of(slice) {
            NONE => None,
            n => Some(&self.frames[n as usize - 1]),
        }
    }

    /// Returns the entry of a cluster, if its slice is in memory. Takes no lock.
    #[inline(always)]
    pub(crate) fn get(&self, cluster: u64) -> Option<Entry> {
        let slice = self.slice_of(cluster);
        loop {
            let frame = self.frame_of(slice)?;
            let seq = frame.seq.load(Acquire);
            if seq & 1 != 0 {
                pause();
                continue;
            }
            let here = frame.slice.load(Relaxed) == slice;
            let entry = here.then(|| self.read(frame, cluster));
            fence(Acquire);
            if frame.seq.load(Relaxed) != seq {
                continue;
            }
            // Otherwise the frame was given to another slice after the look into the directory,
            // which is up to date by now.
            if let Some(entry) = entry {
                if !frame.used.load(Relaxed) {
                    frame.used.store(true, Relaxed);
                }
                return Some(entry);
            }
        }
    }

    #[inline(always)]
    #[expect(
        clippy::indexing_slicing,
        reason = "the mask keeps an entry within its slice, for which the frame was made"
    )]
    fn read(&self, frame: &SliceFrame, cluster: u64) -> Entry {
        let at = to_usize(cluster & (self.slice_entries - 1)) * self.entry_words;
        let words = frame.words.get().expect("a frame with a slice has room");
        let bits = if self.entry_words == WORDS { words[at + 1].load(Relaxed) } else { 0 };
        Entry { word: words[at].load(Relaxed), bits }
    }

    /// Requests a slice that `get` did not find.
    pub(crate) fn load(&self, slice: u64, waker: Waker) -> Load {
        let mut shard = self.shard(slice);
        if self.number_of(slice) != NONE {
            return Load::Here;
        }
        match shard.loading.get_mut(&slice) {
            Some(waiting) => {
                waiting.push(waker);
                Load::Wait
            }
            None => {
                shard.loading.insert(slice, Vec::new());
                Load::Yours
            }
        }
    }

    /// Stores a slice that was read in a frame, and wakes the waiting requests. `bytes` is `None`
    /// if it could not be read or is not to be kept. Returns false if no frame is available,
    /// because all are dirty or in use.
    pub(crate) fn loaded(&self, slice: u64, bytes: Option<&[u8]>, wake: &mut dyn FnMut(Waker)) -> bool {
        let placed = bytes.is_some_and(|bytes| self.place(slice, bytes));
        let waiting = self.shard(slice).loading.remove(&slice).unwrap_or_default();
        waiting.into_iter().for_each(wake);
        placed
    }

    #[expect(clippy::indexing_slicing, reason = "`claim` returns the number of a frame")]
    fn place(&self, slice: u64, bytes: &[u8]) -> bool {
        let Some(number) = self.claim() else { return false };
        self.loads.fetch_add(1, Relaxed);
        let frame = &self.frames[number as usize];
        let words = frame.words.get_or_init(|| {
            (0..to_usize(self.slice_entries) * self.entry_words).map(|_| AtomicU64::new(0)).collect()
        });
        self.change(frame, || {
            for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
                word.store(be64(bytes, 0), Relaxed);
            }
            frame.slice.store(slice, Relaxed);
        });
        frame.used.store(true, Relaxed);
        self.set_number(slice, number + 1);
        true
    }

    /// Makes a change of a frame. The caller holds its shard's lock or is the only user of the
    /// frame, so there is one change at a time.
    fn change(&self, frame: &SliceFrame, f: impl FnOnce()) {
        let seq = frame.seq.load(Relaxed);
        frame.seq.store(seq.wrapping_add(1), Relaxed);
        fence(Release);
        f();
        frame.seq.store(seq.wrapping_add(2), Release);
    }

    /// Returns an empty frame: a new one, or one whose slice was not used for a while.
    #[expect(clippy::indexing_slicing, reason = "the hand is reduced modulo the number of frames")]
    fn claim(&self) -> Option<u32> {
        let mut free = self.free.locked();
        if (free.fresh as usize) < self.frames.len() {
            free.fresh += 1;
            return Some(free.fresh - 1);
        }
        // Two rounds: the first one clears the marks.
        for _ in 0..2 * self.frames.len() {
            let number = free.hand;
            free.hand = (free.hand + 1) % low_u32(self.frames.len() as u64);
            let frame = &self.frames[number as usize];
            let slice = frame.slice.load(Relaxed);
            // Frames without a slice are being filled.
            if slice == NO_SLICE || frame.used.swap(false, Relaxed) {
                continue;
            }
            let _shard = self.shard(slice);
            let is_its = self.number_of(slice) == number + 1;
            if !is_its || frame.pins.load(Relaxed) > 0 || frame.dirty.load(Relaxed) {
                continue;
            }
            self.set_number(slice, NONE);
            self.change(frame, || frame.slice.store(NO_SLICE, Relaxed));
            return Some(number);
        }
        None
    }

    /// Holds clusters to change their entries: from `first` on, at most `count`, all of one slice
    /// that is in memory. Returns how many of them, from the first on, no other request holds;
    /// those are held until [`release`](Self::release). `None`: the slice was dropped. 0: the
    /// caller is woken.
    pub(crate) fn hold(&self, first: u64, count: u64, waker: Waker) -> Option<u64> {
        let slice = self.slice_of(first);
        let mut shard = self.shard(slice);
        let frame = self.frame_of(slice)?;
        let mut held = 0;
        while held < count {
            match shard.busy.get_mut(&(first + held)) {
                Some(waiting) if held == 0 => {
                    waiting.push(waker);
                    return Some(0);
                }
                Some(_) => break,
                None => drop(shard.busy.insert(first + held, Vec::new())),
            }
            held += 1;
        }
        frame.pins.fetch_add(1, Relaxed);
        Some(held)
    }

    /// Releases all held clusters except the first `keep`.
    pub(crate) fn shorten(&self, first: u64, held: u64, keep: u64, wake: &mut dyn FnMut(Waker)) {
        let mut shard = self.shard(self.slice_of(first));
        let waiting: Vec<_> =
            (keep..held).filter_map(|i| shard.busy.remove(&(first + i))).flatten().collect();
        drop(shard);
        waiting.into_iter().for_each(wake);
    }

    /// Changes entries that are held, and keeps them held. As in [`release`](Self::release),
    /// nothing is changed if the journal has no room.
    pub(crate) fn put(&self, first: u64, entries: &[Entry], journal: Option<&Journal>) -> Put {
        self.enter(&mut self.shard(self.slice_of(first)), first, entries, journal)
    }

    /// Changes entries under the lock of their shard.
    #[expect(
        clippy::indexing_slicing,
        reason = "the mask keeps an entry within its slice, for which the frame was made"
    )]
    fn enter(&self, shard: &mut Shard, first: u64, entries: &[Entry], journal: Option<&Journal>) -> Put {
        let slice = self.slice_of(first);
        let frame = self.frame_of(slice).expect("held slices stay");
        // Under the lock under which a flush makes its copies: see `Journal::mark`.
        let put = journal.map_or(Put::Done, |journal| journal.put(first, entries));
        if put == Put::Full {
            return put;
        }
        let words = frame.words.get().expect("a frame with a slice has room");
        self.change(frame, || {
            for (i, entry) in entries.iter().enumerate() {
                let at = to_usize((first + i as u64) & (self.slice_entries - 1)) * self.entry_words;
                words[at].store(entry.word, Relaxed);
                if self.entry_words == WORDS {
                    words[at + 1].store(entry.bits, Relaxed);
                }
            }
        });
        if !frame.dirty.swap(true, Relaxed) {
            shard.dirty.insert(slice);
            self.dirty.fetch_add(1, Relaxed);
        }
        put
    }

    /// Changes entries that are held, if there is something to change, and releases them. If there
    /// is a journal and it has no room, nothing is changed and they stay held.
    pub(crate) fn release(
        &self,
        first: u64,
        held: u64,
        entries: Option<&[Entry]>,
        journal: Option<&Journal>,
        wake: &mut dyn FnMut(Waker),
    ) -> Put {
        let slice = self.slice_of(first);
        let mut shard = self.shard(slice);
        let frame = self.frame_of(slice).expect("held slices stay");
        let mut put = Put::Done;
        if let Some(entries) = entries {
            put = self.enter(&mut shard, first, entries, journal);
            if put == Put::Full {
                return put;
            }
        }
        frame.pins.fetch_sub(1, Relaxed);
        let waiting: Vec<_> = (0..held).filter_map(|i| shard.busy.remove(&(first + i))).flatten().collect();
        drop(shard);
        waiting.into_iter().for_each(wake);
        put
    }

    /// Returns copies of all dirty slices, which count as clean from now on.
    pub(crate) fn take_dirty(&self) -> Vec<Copy> {
        let mut copies = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.locked();
            for slice in std::mem::take(&mut shard.dirty) {
                self.dirty.fetch_sub(1, Relaxed);
                let frame = self.frame_of(slice).expect("dirty slices stay");
                frame.dirty.store(false, Relaxed);
                let words = frame.words.get().expect("a frame with a slice has room");
                // The words change only under this lock.
                let bytes = words.iter().flat_map(|w| w.load(Relaxed).to_be_bytes()).collect();
                // Until it is written, the image has older contents.
                frame.pins.fetch_add(1, Relaxed);
                copies.push(Copy { slice, bytes });
            }
        }
        copies
    }

    /// Records that a copy was written. If not (`done` is false), the slice is dirty again.
    pub(crate) fn written(&self, slice: u64, done: bool) {
        let mut shard = self.shard(slice);
        let frame = self.frame_of(slice).expect("pinned slices stay");
        frame.pins.fetch_sub(1, Relaxed);
        if !done && !frame.dirty.swap(true, Relaxed) {
            shard.dirty.insert(slice);
            self.dirty.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const NO_WAKER: Waker = Waker { who: 0, token: 0 };

    #[test]
    fn the_directory_of_a_huge_disk_has_the_parts_that_were_read() {
        // The last part is half used.
        let clusters = Map::clusters_max(1 << 13, 1) - (512 << 9);
        let map = Map::new(1 << 13, 1, clusters, 1 << 20);
        assert_eq!((map.parts(), map.directory.len()), (0, 1 << 15));
        for (parts, cluster) in [(1, 0), (1, 512), (2, clusters / 2), (3, clusters - 1)] {
            assert_eq!(map.get(cluster), None);
            assert!(matches!(map.load(map.slice_of(cluster), NO_WAKER), Load::Yours));
            assert!(map.loaded(map.slice_of(cluster), Some(&[1; 4096]), &mut |_| {}));
            assert_eq!(map.get(cluster).map(|e| e.word), Some(u64::from_be_bytes([1; 8])));
            assert_eq!(map.parts(), parts);
        }
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use std::sync::Arc;

    const NO_WAKER: Waker = Waker { who: 0, token: 0 };

    fn put(map: &Map, slice: u64, word: u64) {
        if let Load::Yours = map.load(slice, NO_WAKER) {
            map.loaded(slice, Some(&word.to_be_bytes()), &mut |_| {});
        }
    }

    /// Tests two slices that share one frame.
    #[test]
    fn no_slice_is_taken_for_another() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 1, 2, 8));
            put(&map, 0, 10);
            let other = map.clone();
            let mover = loom::thread::spawn(move || {
                put(&other, 1, 11);
                put(&other, 0, 10);
            });
            if let Some(entry) = map.get(0) {
                assert_eq!(entry.word, 10, "another slice's entry");
            }
            mover.join().unwrap();
        });
    }

    /// Tests that both words of an entry belong together.
    #[test]
    fn an_entry_is_read_whole() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 2, 1, 16));
            if let Load::Yours = map.load(0, NO_WAKER) {
                map.loaded(0, Some(&[0; 16]), &mut |_| {});
            }
            let other = map.clone();
            let writer = loom::thread::spawn(move || {
                assert_eq!(other.hold(0, 1, NO_WAKER), Some(1));
                other.release(0, 1, Some(&[Entry { word: 7, bits: 7 }]), None, &mut |_| {});
            });
            let entry = map.get(0).unwrap();
            assert_eq!(entry.word, entry.bits, "half of an entry");
            writer.join().unwrap();
            assert_eq!(map.get(0).unwrap(), Entry { word: 7, bits: 7 });
        });
    }

    /// Tests that of two requests for the same cluster, one waits and is woken.
    #[test]
    fn one_holds_and_the_other_is_woken() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 1, 1, 8));
            put(&map, 0, 0);
            let woken = Arc::new(AtomicU32::new(0));
            let hold_once = |map: &Map, woken: &AtomicU32| match map.hold(0, 1, NO_WAKER) {
                Some(1) => {
                    let word = map.get(0).unwrap().word + 1;
                    let wake = &mut |_| {
                        woken.fetch_add(1, SeqCst);
                    };
                    map.release(0, 1, Some(&[Entry { word, bits: 0 }]), None, wake);
                    0
                }
                Some(0) => 1,
                other => panic!("{other:?}"),
            };
            let (other, counter) = (map.clone(), woken.clone());
            let second = loom::thread::spawn(move || hold_once(&other, &counter));
            let waited = hold_once(&map, &woken) + second.join().unwrap();
            assert_eq!(woken.load(SeqCst), waited);
            assert_eq!(map.get(0).unwrap().word, 2 - u64::from(waited));
        });
    }
}
