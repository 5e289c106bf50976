use std::sync::Arc;

use super::*;

const ID: [u8; 16] = *b"a number of this";
const BOOT: [u8; 16] = *b"a run of machine";

#[derive(Clone)]
struct Memory(Arc<[AtomicU64]>);

impl Words for Memory {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

impl Memory {
    fn new(records: usize) -> Self {
        Self((0..HEAD_WORDS + RECORD_WORDS * records).map(|_| AtomicU64::new(0)).collect())
    }

    fn journal(&self) -> Journal {
        Journal::new(Box::new(self.clone()), ID, BOOT).unwrap().with_cluster(512)
    }

    fn records(&self) -> Vec<Record> {
        read(&self.0, ID, 0, BOOT).unwrap()
    }
}

fn entry(word: u64, bits: u64) -> Entry {
    Entry { word, bits }
}

#[cfg(not(loom))]
mod alone {
    use super::*;
    use crate::check::{Quiet, Repair, check};
    use crate::create::{Options, create};
    use crate::entry::COPIED;
    use crate::header::{Header, Open, incompatible};
    use crate::{Image, Storage, memory};

    #[test]
    fn neighbours_are_one_record() {
        let entries =
            [(512, 0), (1024, 0), (1536, 0), (0, 7), (0, 7), (9, 0)].map(|(word, bits)| entry(word, bits));
        let memory = Memory::new(16);
        assert_eq!(memory.journal().put(5, &entries), Put::Done);
        let record = |kind, index, count, entry| Record { kind, index, count, entry };
        let are = [
            record(RecordKind::Run, 5, 3, entries[0]),
            record(RecordKind::Same, 8, 2, entries[3]),
            record(RecordKind::Run, 10, 1, entries[5]),
        ];
        assert_eq!(memory.records(), are);
    }

    #[test]
    fn it_is_full_until_a_flush_made_room() {
        let memory = Memory::new(16);
        let journal = memory.journal();
        for round in 0..5u64 {
            for n in 0..16 {
                let put = journal.put(n, &[entry(round, n)]);
                assert_eq!(put, if n == 7 { Put::Half } else { Put::Done }, "{n}");
            }
            assert_eq!(journal.put_table(0, 512), Put::Full);
            let records = memory.records();
            assert!(records.iter().zip(0..).all(|(r, n)| (r.index, r.entry) == (n, entry(round, n))));
            assert_eq!(records.len(), 16);
            journal.forget(journal.mark());
            assert!(memory.records().is_empty());
        }
    }

    #[test]
    fn what_is_not_whole_or_of_another_is_not_there() {
        let memory = Memory::new(16);
        let journal = memory.journal();
        for n in 0..3 {
            journal.put(n, &[entry(512 * n, 0)]);
        }
        memory.0[HEAD_WORDS + RECORD_WORDS + 1].store(3, Relaxed);
        let indices: Vec<u64> = memory.records().iter().map(|r| r.index).collect();
        assert_eq!(indices, [0, 2]);
        assert!(read(&memory.0, BOOT, 0, BOOT).is_err() && read(&memory.0, ID, 0, ID).is_err());
        assert!(read(&memory.0[..HEAD_WORDS - 1], ID, 0, BOOT).is_err());
        // More records than there is room for.
        memory.0[AT_RECORDS].store(17, Relaxed);
        assert!(read(&memory.0, ID, 0, BOOT).is_err());
    }

    const OPEN: Open = Open::Journal { id: ID, generation: 0 };

    fn is_mine(header: &Header) -> bool {
        journal_of(header) == Some(OPEN)
    }

    fn refused(why: Refusal) -> Recovery {
        Recovery::Refused(why)
    }

    #[test]
    fn a_journal_is_of_one_state_of_the_image() {
        let memory = Memory::new(16);
        let journal = memory.journal();
        let fits = |generation| read(&memory.0, ID, generation, BOOT).map(|records| records.len());
        journal.put(0, &[entry(512, 0)]);
        assert_eq!((fits(0), fits(1)), (Ok(1), Err(Refusal::RolledBack)));
        // After a kill during a flush, the image has either generation.
        let mark = journal.mark();
        assert_eq!(journal.next_generation(), 1);
        assert_eq!((fits(0), fits(1), fits(2)), (Ok(1), Ok(1), Err(Refusal::RolledBack)));
        // A failed write may have left its own generation.
        assert_eq!(journal.next_generation(), 2);
        journal.wrote_generation(Some(2));
        journal.forget(mark);
        assert_eq!((fits(1), fits(2)), (Err(Refusal::RolledBack), Ok(0)));
        journal.forget(journal.mark());
        assert_eq!((fits(1), fits(2)), (Err(Refusal::RolledBack), Ok(0)));
        // If a write failed, the image may have either generation.
        assert_eq!(journal.next_generation(), 3);
        journal.wrote_generation(None);
        assert_eq!((fits(1), fits(2), fits(3)), (Err(Refusal::RolledBack), Ok(0), Ok(0)));
    }

    #[test]
    fn a_generation_lasts_for_a_while() {
        let journal = |lasts| Memory::new(16).journal().with_generations_of(lasts);
        assert!(journal(Duration::ZERO).needs_generation());
        assert!(!journal(Duration::MAX).needs_generation());
    }

    #[test]
    fn records_that_name_what_is_behind_the_images_end_are_another_states() {
        for data in [false, true] {
            let (file, memory) = (image(), Memory::new(16));
            mark_open(&file, ID).unwrap();
            let journal = memory.journal().with_cluster(4096);
            let end = file.len().unwrap().next_multiple_of(4096);
            journal.put_table(0, end | COPIED);
            file.set_len(end + 3 * 4096).unwrap();
            let places = [1, 2, 3].map(|n| entry((end + n * 4096) | COPIED, 0));
            journal.put(3, if data { &places } else { &places[..2] });
            // The image's file does not reach the third one.
            let is = if data { refused(Refusal::RolledBack) } else { Recovery::Done(2) };
            assert_eq!(recover(&file, &memory, BOOT).unwrap(), is);
        }
        let (file, memory) = (image(), Memory::new(16));
        mark_open(&file, ID).unwrap();
        memory.journal().put_table(0, file.len().unwrap().next_multiple_of(4096) | COPIED);
        assert_eq!(recover(&file, &memory, BOOT).unwrap(), refused(Refusal::RolledBack));
    }

    #[test]
    fn a_journal_of_an_earlier_version_is_refused() {
        let (file, memory) = (image(), Memory::new(16));
        mark_open(&file, ID).unwrap();
        memory.journal();
        // The former form: a number, and no generation.
        let len = u32::from_be_bytes(file.bytes()[100..104].try_into().unwrap()) as usize;
        let rest = file.bytes()[len + 32..4096].to_vec();
        file.write_at(len as u64 + 4, &16u32.to_be_bytes()).unwrap();
        file.write_at(len as u64 + 24, &rest).unwrap();
        assert_eq!(recover(&file, &memory, BOOT).unwrap(), refused(Refusal::Older));
        assert!(check(&file, Repair::All, &mut Quiet).unwrap().is_clean());
        assert!(!Image::open(&file).unwrap().header().is_open());
    }

    /// Makes an image whose header says that it is `len` bytes long.
    fn image_with_header(len: u32) -> memory::Memory {
        let file = memory::Memory::new(Vec::new(), 64 << 20);
        let options = Options { cluster_size: 1 << 16, ..Options::new(8 << 20) };
        create(&file, None, &options, &mut |_, _| {}).unwrap();
        file.write_at(100, &len.to_be_bytes()).unwrap();
        file.write_at(112, &vec![0; (1 << 16) - 112]).unwrap();
        file
    }

    #[test]
    fn the_mark_lies_in_the_first_sector_or_there_is_no_journal() {
        for len in [104, 112, 120, 480] {
            let file = image_with_header(len);
            let mut header_bytes = mark_open(&file, ID).unwrap();
            header_bytes.set_generation(7);
            file.write_at(0, header_bytes.bytes()).unwrap();
            let header = Image::open(&file).unwrap().header().clone();
            assert_eq!(journal_of(&header), Some(Open::Journal { id: ID, generation: 7 }), "{len}");
        }
        // 4072: the mark would end with the piece that flushes write. 8192: it would be behind it.
        for len in [488, 4064, 4072, 8192, (1 << 16) - 64] {
            let file = image_with_header(len);
            let before = file.bytes();
            let why = mark_open(&file, ID).unwrap_err().to_string();
            assert!(why.contains("first 512 bytes"), "{len}: {why}");
            assert!(file.bytes() == before, "{len}: a refused image was changed");
            mark_open_without_journal(&file, false).unwrap();
            assert!(Image::open(&file).unwrap().header().is_open());
        }
    }

    fn image() -> memory::Memory {
        let file = memory::Memory::new(Vec::new(), 64 << 20);
        create(&file, None, &Options { cluster_size: 4096, ..Options::new(8 << 20) }, &mut |_, _| {})
            .unwrap();
        file
    }

    #[test]
    fn a_journal_is_its_images_alone() {
        let (file, memory) = (image(), Memory::new(16));
        let before = file.bytes();
        let journal = memory.journal().with_cluster(4096);
        assert_eq!(
            recover(&file, &memory, BOOT).unwrap(),
            refused(Refusal::None),
            "a closed image lacks nothing"
        );
        mark_open(&file, ID).unwrap();
        assert!(mark_open(&file, ID).is_err(), "it was not closed");
        let header = Image::open(&file).unwrap().header().clone();
        assert!(header.has(incompatible::DIRTY) && is_mine(&header));
        assert_eq!(
            recover(&file, &memory, ID).unwrap(),
            refused(Refusal::Other),
            "another run of the machine"
        );
        // A table at the file's end, and two clusters behind it.
        let end = file.len().unwrap().next_multiple_of(4096);
        journal.put_table(0, end | 1 << 63);
        journal.put(3, &[entry((end + 4096) | 1 << 63, 0), entry((end + 8192) | 1 << 63, 0)]);
        file.write_at(end + 4096, &[7; 8192]).unwrap();
        for _ in 0..2 {
            assert_eq!(recover(&file, &memory, BOOT).unwrap(), Recovery::Done(2));
        }
        assert!(check(&file, Repair::All, &mut Quiet).unwrap().is_clean());
        let header = Image::open(&file).unwrap().header().clone();
        assert!(header.mark.is_none() && !header.has(incompatible::DIRTY));
        let mut l2 = [0; 16];
        file.read_at(end + 24, &mut l2).unwrap();
        assert_eq!(l2[..8], ((end + 4096) | 1 << 63).to_be_bytes());
        mark_open(&file, ID).unwrap();
        end_of(&file, &before);
    }

    fn end_of(file: &memory::Memory, before: &[u8]) {
        mark_closed(file).unwrap();
        assert_eq!(file.bytes()[..512], before[..512], "the header is what it was");
    }

    #[test]
    fn records_that_the_image_has_no_place_for_are_refused() {
        for record in [(0, 1), (1 << 40, 1)] {
            let (file, memory) = (image(), Memory::new(16));
            mark_open(&file, ID).unwrap();
            memory.journal().put(record.0, &[entry(4096 * record.1, 0)]);
            assert!(recover(&file, &memory, BOOT).is_err(), "{record:?}");
        }
        for (index, at) in [(1 << 40, 4096), (0, 0), (0, 512)] {
            let (file, memory) = (image(), Memory::new(16));
            mark_open(&file, ID).unwrap();
            memory.journal().put_table(index, at);
            assert!(recover(&file, &memory, BOOT).is_err(), "{index} {at}");
        }
    }

    #[test]
    fn a_mark_that_another_moved_says_nothing() {
        let file = image();
        mark_open(&file, ID).unwrap();
        let mut first = file.bytes()[..4096].to_vec();
        // QEMU writes unknown extensions behind those that it knows.
        let len = u32::from_be_bytes(first[100..104].try_into().unwrap()) as usize;
        let mut mark: Vec<u8> = first.drain(len..len + 32).collect();
        let names = u32::from_be_bytes(first[len + 4..len + 8].try_into().unwrap()) as usize;
        mark.extend(&first[len + 8 + names..]);
        first.truncate(len + 8 + names);
        first.extend(mark);
        let header = Header::parse(&first).unwrap();
        let mark = header.mark.unwrap();
        assert!(mark.open == OPEN && !mark.untouched && journal_of(&header).is_none());
        let again = Header::parse(&header.encode().unwrap()).unwrap();
        assert_eq!(again.mark, None, "it is not written first again");
    }
}

#[cfg(loom)]
mod interleavings {
    use super::*;
    use crate::Waker;
    use crate::map::{Load, Map};

    const NO_WAKER: Waker = Waker { who: 0, token: 0 };

    fn put(map: &Map, slice: u64) {
        if let Load::Yours = map.load(slice, NO_WAKER) {
            map.loaded(slice, Some(&[0; 8]), &mut |_| {});
        }
    }

    fn write(map: &Map, journal: &Journal, cluster: u64, word: u64) {
        assert_eq!(map.hold(cluster, 1, NO_WAKER), Some(1));
        let put = map.release(cluster, 1, Some(&[entry(word, 0)]), Some(journal), &mut |_| {});
        assert_ne!(put, Put::Full);
    }

    /// Tests that the copies of a flush and the records after it have all changes of two writers,
    /// whatever the flush sees.
    #[test]
    fn nothing_is_forgotten_that_was_not_copied() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 1, 2, 16));
            (0..2).for_each(|slice| put(&map, slice));
            let memory = Memory::new(4);
            let journal = Arc::new(memory.journal());
            let writers: Vec<_> = (0..2)
                .map(|cluster| {
                    let (map, journal) = (map.clone(), journal.clone());
                    loom::thread::spawn(move || write(&map, &journal, cluster, 512 + cluster))
                })
                .collect();
            let mut found = [0; 2];
            let mark = journal.mark();
            for copy in map.take_dirty() {
                found[copy.slice as usize] = u64::from_be_bytes(copy.bytes[..].try_into().unwrap());
            }
            journal.forget(mark);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            for record in memory.records() {
                found[record.index as usize] = record.entry.word;
            }
            assert_eq!(found, [512, 513]);
        });
    }

    /// Tests that every change which can be read from the map is in the journal.
    #[test]
    fn nothing_is_seen_before_it_is_put_in() {
        loom::model(|| {
            let map = Arc::new(Map::new(1, 1, 1, 8));
            put(&map, 0);
            let memory = Memory::new(4);
            let (other, journal) = (map.clone(), memory.journal());
            let writer = loom::thread::spawn(move || write(&other, &journal, 0, 512));
            if map.get(0).unwrap().word == 512 {
                assert_eq!(memory.records().len(), 1, "seen, and not put in");
            }
            writer.join().unwrap();
        });
    }
}
