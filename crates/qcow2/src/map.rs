//! Where the disk's clusters lie: slices of L2 tables, kept in memory.
//!
//! A slice is what a table is read and written by: 4 KiB, or all of a smaller table. Looking up in one that is here takes
//! no lock: each frame counts its changes (odd: one is under way), and who saw the count move looks again. All else goes
//! by a shard's lock, of which slices share some: what is dirty, being read in, or held by a request that changes it.
//!
//! Lock order: frames, then a shard. Neither is held over I/O.
//!
//! What must never happen: an entry of one slice taken for another's; a dirty slice dropped.

#![allow(
    clippy::indexing_slicing,
    reason = "clusters are below the end of the disk, for which the directory and the frames were made"
)]

use crate::bytes::{be64, low_u32, to_usize};
use crate::lock::Locked;
use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;

use crate::sync::Ordering::*;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, fence, pause};

use crate::Waker;
use crate::entry::Entry;
use crate::journal::{Journal, Put};

/// Bytes of a slice at most.
const SLICE_BYTES: u64 = 4096;
const SHARDS: usize = if cfg!(loom) { 1 } else { 64 };
/// Slices that there is room for, whatever the setting.
const FRAMES_MIN: u64 = if cfg!(loom) { 1 } else { 4 };
/// No frame, no slice.
const NONE: u32 = 0;
const NO_SLICE: u64 = u64::MAX;
/// Words of an entry at most.
const WORDS: usize = 2;
/// Slices that one part of the directory has entries for: 4 KiB of them.
const PART_BITS: u32 = 10;
/// Slices of one image at most, so that its directory has at most 128 MiB. With clusters of 64 KiB the disk has 1 PiB then.
const SLICES_MAX: u64 = 1 << 25;

/// Room for one slice.
struct SliceFrame {
    /// Grows with each change; odd while one is under way.
    seq: AtomicU32,
    /// Which slice is here.
    slice: AtomicU64,
    /// Used since the hand passed.
    used: AtomicBool,
    /// Requests that are going to change it; it stays. Changed under the shard's lock.
    pins: AtomicU32,
    /// Whether its slice is among the dirty ones. Changed under the shard's lock.
    dirty: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

/// Of the slices that fall to it.
#[derive(Default)]
pub(crate) struct Shard {
    /// Being read in, with those who wait for that.
    loading: HashMap<u64, Vec<Waker>>,
    /// Clusters whose entries a request is about to change, with those who wait for that.
    busy: HashMap<u64, Vec<Waker>>,
    dirty: BTreeSet<u64>,
}

struct FreeFrames {
    /// FreeFrames that were never used begin here.
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
    /// SliceFrame number + 1 of each slice. A part is made when the first of its slices is read: the header of a small sparse file
    /// can claim a disk that needs a large directory.
    directory: Box<[OnceLock<Part>]>,
    frames: Box<[SliceFrame]>,
    shards: Box<[Mutex<Shard>]>,
    free: Mutex<FreeFrames>,
    dirty: AtomicU32,
    /// Slices read in since the image was opened.
    loads: AtomicU64,
}

/// What became of the wish for a slice.
pub(crate) enum Load {
    /// It is here.
    Here,
    /// The caller reads it, and says so ([`Map::loaded`]).
    Yours,
    /// Another reads it; the caller is woken.
    Wait,
}

/// A copy of a dirty slice, as it goes into the image.
pub(crate) struct Copy {
    pub(crate) slice: u64,
    pub(crate) bytes: Box<[u8]>,
}

/// Returns the entries of a slice of tables with `table_entries` entries of `entry_words` words.
fn slice_entries(table_entries: u64, entry_words: usize) -> u64 {
    table_entries.min(SLICE_BYTES / (8 * entry_words as u64))
}

impl Map {
    /// Returns how many clusters a disk with such tables can have at most: a multiple of `table_entries`.
    pub(crate) fn clusters_max(table_entries: u64, entry_words: usize) -> u64 {
        SLICES_MAX * slice_entries(table_entries, entry_words)
    }

    /// For tables of `table_entries` entries of `entry_words` words, for a disk of `clusters`, in `cache_bytes` of memory.
    /// `clusters` is [`clusters_max`](Self::clusters_max) at most.
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

    pub(crate) fn slice_of(&self, cluster: u64) -> u64 {
        cluster >> self.slice_bits
    }

    /// The first cluster behind the slice that `cluster` is in.
    pub(crate) fn slice_end(&self, cluster: u64) -> u64 {
        (self.slice_of(cluster) + 1) << self.slice_bits
    }

    pub(crate) fn slice_bytes(&self) -> usize {
        to_usize(self.slice_entries) * self.entry_words * 8
    }

    /// Slices of one L2 table.
    pub(crate) fn slices_a_table(&self, table_entries: u64) -> u64 {
        table_entries / self.slice_entries
    }

    /// Slices read in so far.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Relaxed)
    }

    /// How many parts the directory has.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> usize {
        self.directory.iter().filter(|part| part.get().is_some()).count()
    }

    /// Bytes of memory that slices can come to take.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.frames.len() as u64 * self.slice_bytes() as u64
    }

    /// Whether so many are dirty that they should be written before more are: never where there is room for all.
    pub(crate) fn is_crowded(&self) -> bool {
        self.dirty.load(Relaxed) as usize >= self.frames.len() / 2 && (self.frames.len() as u64) < self.slices
    }

    fn shard(&self, slice: u64) -> MutexGuard<'_, Shard> {
        self.shards[to_usize(slice) % SHARDS].locked()
    }

    /// The number of the frame that a slice is in, plus 1; or [`NONE`].
    fn number_of(&self, slice: u64) -> u32 {
        let part = self.directory[(slice >> PART_BITS) as usize].get();
        part.map_or(NONE, |part| part[(slice & ((1 << PART_BITS) - 1)) as usize].load(Acquire))
    }

    fn set_number(&self, slice: u64, number: u32) {
        let first = slice >> PART_BITS << PART_BITS;
        let part = self.directory[(slice >> PART_BITS) as usize].get_or_init(|| {
            (first..self.slices.min(first + (1 << PART_BITS))).map(|_| AtomicU32::new(NONE)).collect()
        });
        part[to_usize(slice - first)].store(number, Release);
    }

    fn frame_of(&self, slice: u64) -> Option<&SliceFrame> {
        match self.number_of(slice) {
            NONE => None,
            n => Some(&self.frames[n as usize - 1]),
        }
    }

    /// The entry of a cluster, if its slice is here. Takes no lock.
    #[inline]
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
            // Else it was given to another slice since we looked into the directory, which knows by now.
            if let Some(entry) = entry {
                if !frame.used.load(Relaxed) {
                    frame.used.store(true, Relaxed);
                }
                return Some(entry);
            }
        }
    }

    fn read(&self, frame: &SliceFrame, cluster: u64) -> Entry {
        let at = to_usize(cluster & (self.slice_entries - 1)) * self.entry_words;
        let words = frame.words.get().expect("a frame with a slice has room");
        let bits = if self.entry_words == WORDS { words[at + 1].load(Relaxed) } else { 0 };
        Entry { word: words[at].load(Relaxed), bits }
    }

    /// Asks for a slice that `get` did not find.
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

    /// The slice was read (its bytes; none: it could not be, or is not to be kept): puts it into a frame, and wakes those
    /// who wait. False if no frame can be had, for all are dirty or in use.
    pub(crate) fn loaded(&self, slice: u64, bytes: Option<&[u8]>, wake: &mut dyn FnMut(Waker)) -> bool {
        let placed = bytes.is_some_and(|bytes| self.place(slice, bytes));
        let waiting = self.shard(slice).loading.remove(&slice).unwrap_or_default();
        waiting.into_iter().for_each(wake);
        placed
    }

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

    /// One changer at a time: the frame's shard's lock, or that it is nobody's yet.
    fn change(&self, frame: &SliceFrame, f: impl FnOnce()) {
        let seq = frame.seq.load(Relaxed);
        frame.seq.store(seq.wrapping_add(1), Relaxed);
        fence(Release);
        f();
        frame.seq.store(seq.wrapping_add(2), Release);
    }

    /// A frame that holds nothing: a fresh one, or one whose slice was not used for a while.
    fn claim(&self) -> Option<u32> {
        let mut free = self.free.locked();
        if (free.fresh as usize) < self.frames.len() {
            free.fresh += 1;
            return Some(free.fresh - 1);
        }
        // Twice around: the first time takes their marks.
        for _ in 0..2 * self.frames.len() {
            let number = free.hand;
            free.hand = (free.hand + 1) % low_u32(self.frames.len() as u64);
            let frame = &self.frames[number as usize];
            let slice = frame.slice.load(Relaxed);
            // Those without a slice are being filled.
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

    /// Says that the caller is about to change the entries of clusters from `first`, at most `count`, all of one slice that
    /// is here. How many of them nobody else is changing, from the first: that many are the caller's, until
    /// [`release`](Self::release). None: the slice is gone again. 0: the caller is woken.
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

    /// Of clusters that are held only some are needed.
    pub(crate) fn shorten(&self, first: u64, held: u64, keep: u64, wake: &mut dyn FnMut(Waker)) {
        let mut shard = self.shard(self.slice_of(first));
        let waiting: Vec<_> =
            (keep..held).filter_map(|i| shard.busy.remove(&(first + i))).flatten().collect();
        drop(shard);
        waiting.into_iter().for_each(wake);
    }

    /// Changes entries that are held, and stay so. As in [`release`](Self::release), nothing is changed without room in the
    /// journal.
    pub(crate) fn put(&self, first: u64, entries: &[Entry], journal: Option<&Journal>) -> Put {
        self.enter(&mut self.shard(self.slice_of(first)), first, entries, journal)
    }

    /// Under the lock of the entries' shard.
    fn enter(&self, shard: &mut Shard, first: u64, entries: &[Entry], journal: Option<&Journal>) -> Put {
        let slice = self.slice_of(first);
        let frame = self.frame_of(slice).expect("held slices stay");
        // Under the lock that copies for a flush are made under: see `Journal::mark`.
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

    /// Changes entries that are held, if there is anything to change, and gives them back. Where there is a journal that
    /// has no room for that, nothing is changed and they stay held.
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

    /// Copies of all dirty slices, which count as clean from now on.
    pub(crate) fn take_dirty(&self) -> Vec<Copy> {
        let mut copies = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.locked();
            for slice in std::mem::take(&mut shard.dirty) {
                self.dirty.fetch_sub(1, Relaxed);
                let frame = self.frame_of(slice).expect("dirty slices stay");
                frame.dirty.store(false, Relaxed);
                let words = frame.words.get().expect("a frame with a slice has room");
                // Changed under this lock alone.
                let bytes = words.iter().flat_map(|w| w.load(Relaxed).to_be_bytes()).collect();
                // Until it is written, what is in the image is older than this.
                frame.pins.fetch_add(1, Relaxed);
                copies.push(Copy { slice, bytes });
            }
        }
        copies
    }

    /// A copy was written, or (`false`) could not be: then the slice is dirty again.
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

    const NOBODY: Waker = Waker { who: 0, token: 0 };

    #[test]
    fn the_directory_of_a_huge_disk_has_the_parts_that_were_read() {
        // With half a part at the end.
        let clusters = Map::clusters_max(1 << 13, 1) - (512 << 9);
        let map = Map::new(1 << 13, 1, clusters, 1 << 20);
        assert_eq!((map.parts(), map.directory.len()), (0, 1 << 15));
        for (parts, cluster) in [(1, 0), (1, 512), (2, clusters / 2), (3, clusters - 1)] {
            assert_eq!(map.get(cluster), None);
            assert!(matches!(map.load(map.slice_of(cluster), NOBODY), Load::Yours));
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

    const NOBODY: Waker = Waker { who: 0, token: 0 };

    fn put(map: &Map, slice: u64, word: u64) {
        if let Load::Yours = map.load(slice, NOBODY) {
            map.loaded(slice, Some(&word.to_be_bytes()), &mut |_| {});
        }
    }

    /// Two slices of one entry share one frame.
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

    /// Both words of an entry are of the same time.
    #[test]
    fn an_entry_is_read_whole() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 2, 1, 16));
            if let Load::Yours = map.load(0, NOBODY) {
                map.loaded(0, Some(&[0; 16]), &mut |_| {});
            }
            let other = map.clone();
            let writer = loom::thread::spawn(move || {
                assert_eq!(other.hold(0, 1, NOBODY), Some(1));
                other.release(0, 1, Some(&[Entry { word: 7, bits: 7 }]), None, &mut |_| {});
            });
            let entry = map.get(0).unwrap();
            assert_eq!(entry.word, entry.bits, "half of an entry");
            writer.join().unwrap();
            assert_eq!(map.get(0).unwrap(), Entry { word: 7, bits: 7 });
        });
    }

    /// Of two that want the same cluster one waits, and is woken.
    #[test]
    fn one_holds_and_the_other_is_woken() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 1, 1, 8));
            put(&map, 0, 0);
            let woken = Arc::new(AtomicU32::new(0));
            let turn = |map: &Map, woken: &AtomicU32| match map.hold(0, 1, NOBODY) {
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
            let second = loom::thread::spawn(move || turn(&other, &counter));
            let waited = turn(&map, &woken) + second.join().unwrap();
            assert_eq!(woken.load(SeqCst), waited);
            assert_eq!(map.get(0).unwrap().word, 2 - u64::from(waited));
        });
    }
}
