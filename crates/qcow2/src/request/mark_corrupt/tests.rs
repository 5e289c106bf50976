use std::sync::mpsc::channel;

use crate::create::{DataFile, Options};
use crate::entry::{COMPRESSED, COPIED, Compressed, OFFSET};
use crate::header::{Header, incompatible};
use crate::memory::Memory;
use crate::request::{EIO, Op, Step};
use crate::testing::{self, drive::Disk};
use crate::{Error, FastPath, FileId, Image, Served, Settings, Storage, snapshot};

const CLUSTER: u64 = 1 << 16;

fn word(file: &Memory, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_at(at, &mut bytes).unwrap();
    u64::from_be_bytes(bytes)
}

fn set(file: &Memory, at: u64, word: u64) {
    file.write_at(at, &word.to_be_bytes()).unwrap();
}

fn header(file: &Memory) -> Header {
    Image::open(file).unwrap().header().clone()
}

/// Makes an image with a snapshot and two clusters of the disk, both in one table. Returns it, and
/// the offset of the first cluster's entry.
fn image(options: &Options) -> (Memory, u64) {
    let file = testing::new(options);
    snapshot::create(&mut Image::open(&file).unwrap(), "s", (0, 0)).unwrap();
    let mut disk = Disk::open(file, None);
    disk.write(0, &[7; 2 << 16]);
    let file = disk.close();
    let l2 = word(&file, header(&file).l1_offset) & OFFSET;
    (Memory::new(file.bytes(), 64 << 20), l2)
}

fn places(file: &Memory, l2: u64) -> Vec<(&'static str, u64)> {
    let h = header(file);
    let list = snapshot::read_table(&Image::open(file).unwrap()).unwrap().0;
    vec![
        ("the header", 0),
        ("the L1 table", h.l1_offset),
        ("the refcount table", h.reftable_offset),
        ("a refcount block", word(file, h.reftable_offset)),
        ("the snapshot table", h.snapshots_offset),
        ("a snapshot's L1 table", list[0].l1_offset),
        ("an L2 table", l2),
        ("beyond the end", 1 << 40),
    ]
}

/// Returns the file's bytes without the mark.
fn without_mark(file: &Memory) -> Vec<u8> {
    let mut bytes = file.bytes();
    bytes[79] &= !(incompatible::CORRUPT as u8);
    bytes
}

/// Checks that requests on the first two clusters fail, that the image is marked, and that nothing
/// else in it changes.
fn assert_refused(file: Memory, what: &str) {
    let (before, version) = (file.bytes(), header(&file).version);
    for op in [Op::Write, Op::Discard, Op::Zero { unmap: false }, Op::Zero { unmap: true }, Op::Read] {
        let mut disk = Disk::open(Memory::new(before.clone(), 64 << 20), None);
        for pos in [CLUSTER, 0, CLUSTER] {
            let fast_path = FastPath::find(&disk.chain, &mut disk.user, op, pos, 512);
            assert!(fast_path.is_none(), "{what}");
            assert_eq!(disk.run(op, pos, vec![9; 1 << 16], 1 << 16).0, EIO, "{what}, {op:?}");
        }
        let (said, marked) = disk.chain.top().take_corruption().expect("it was found");
        assert!(said.contains(what), "{said:?} does not name {what}");
        assert_eq!(marked, version >= 3);
        assert_eq!(disk.chain.top().take_corruption(), None, "it is said twice");
        let file = disk.close();
        assert!(without_mark(&file) == before, "{what} was written over by {op:?}");
        assert_eq!(header(&file).has(incompatible::CORRUPT), version >= 3, "{what}");
    }
}

#[test]
fn an_entry_that_leads_to_metadata() {
    for version in [2, 3] {
        let (file, l2) = image(&Options { version, ..Options::new(1 << 30) });
        let bytes = file.bytes();
        for (what, at) in places(&file, l2) {
            let packed = Compressed::entry(at + 1024, 512, 16);
            for entry in [at | COPIED, at, packed] {
                // Offset 0 is not an offset, in an image without a data file.
                if entry & (OFFSET | COMPRESSED) != 0 {
                    let file = Memory::new(bytes.clone(), 64 << 20);
                    set(&file, l2, entry);
                    assert_refused(file, what);
                }
            }
        }
        let file = Memory::new(bytes, 64 << 20);
        set(&file, l2, ((word(&file, l2) & OFFSET) + 512) | COPIED);
        assert_refused(file, "no cluster begins");
    }
}

#[test]
fn a_flag_without_a_place_is_none() {
    let (file, l2) = image(&Options::new(1 << 30));
    set(&file, l2, COPIED);
    let mut disk = Disk::open(file, None);
    assert_eq!(disk.read(0, 512), [0; 512]);
    disk.write(0, &[9; 512]);
    assert_eq!((disk.read(0, 512), disk.chain.top().take_corruption()), (vec![9; 512], None));
}

#[test]
fn others_go_on() {
    let (file, l2) = image(&Options::new(1 << 30));
    set(&file, l2, l2 | COPIED);
    let mut disk = Disk::open(file, None);
    assert_eq!(disk.run(Op::Write, 0, vec![9; 512], 512).0, EIO);
    disk.write(1 << 29, &[5; 512]);
    assert_eq!(disk.read(1 << 29, 512), [5; 512]);
}

#[test]
fn an_entry_that_leads_elsewhere_in_a_data_file() {
    let data_file = Some(DataFile { name: "data".to_owned(), raw: false });
    let file = testing::new(&Options { data_file, ..Options::new(1 << 30) });
    let mut disk = Disk::open(file, None);
    disk.write(0, &[7; 2 << 16]);
    let bytes = disk.close().bytes();
    for entry in [(5 * CLUSTER) | COPIED, 5 * CLUSTER, Compressed::entry(0, 512, 16)] {
        let file = Memory::new(bytes.clone(), 64 << 20);
        let l2 = word(&file, header(&file).l1_offset) & OFFSET;
        set(&file, l2, entry);
        assert_refused(file, "data file");
    }
}

#[test]
fn counts_that_call_metadata_free() {
    let (file, l2) = image(&Options::new(1 << 30));
    let block = word(&file, header(&file).reftable_offset);
    for (what, at) in places(&file, l2).into_iter().filter(|(_, at)| *at < 1 << 40) {
        let file = Memory::new(file.bytes(), 64 << 20);
        file.write_at(block + at / CLUSTER * 2, &[0, 0]).unwrap();
        let before = file.bytes();
        let mut disk = Disk::open(file, None);
        assert_eq!(disk.run(Op::Write, 5 * CLUSTER, vec![9; 512], 512).0, EIO, "{what}");
        assert!(disk.chain.top().take_corruption().unwrap().0.contains(what));
        // Clusters that are allocated already need no counts.
        disk.write(0, &[7; 512]);
        let file = disk.close();
        assert!(without_mark(&file) == before, "{what} was written over");
        assert!(header(&file).has(incompatible::CORRUPT));
    }
}

fn open(file: &Memory, writable: bool) -> crate::Result<Served> {
    let settings = Settings { file: 0 as FileId, data: 0, cache_bytes: None, writable, room: false };
    Served::open(file, header(file), settings)
}

#[test]
fn tables_over_one_another_are_refused() {
    let (file, l2) = image(&Options::new(1 << 30));
    let (h, bytes) = (header(&file), file.bytes());
    let block = word(&file, h.reftable_offset);
    // The second table of the map, and the second refcount block.
    for (at, taken) in [(h.l1_offset + 8, COPIED), (h.reftable_offset + 8, 0)] {
        for place in [h.l1_offset, h.reftable_offset, block, h.snapshots_offset, l2] {
            let file = Memory::new(bytes.clone(), 64 << 20);
            set(&file, at, place | taken);
            assert!(matches!(open(&file, true), Err(Error::Corrupt(_))), "{place:#x} at {at:#x}");
            assert!(open(&file, false).is_ok(), "it can be read");
        }
    }
    set(&file, h.reftable_offset, 0);
    assert!(matches!(open(&file, true), Err(Error::Corrupt(_))), "nothing is counted");
}

/// Tests that a mark and a size that are written at the same time are both in the image at the end,
/// also without a journal.
#[test]
fn a_mark_and_a_size_do_not_take_each_other_back() {
    const SIZE: u64 = (1 << 30) - (1 << 16);
    let (file, l2) = image(&Options::new(1 << 30));
    set(&file, l2, l2 | COPIED);
    let bytes = file.bytes();
    for mark_comes_last in [false, true] {
        let mut disk = Disk::open(Memory::new(bytes.clone(), 64 << 20), None);
        let mut write = disk.start(Op::Write, 0, vec![9; 512], 512);
        while !matches!(write.step, Step::Write { offset: 0, .. }) {
            assert!(disk.step(&mut write), "the header was not written");
        }
        let served = disk.chain.top().clone();
        let (to_file, written) = channel::<Vec<u8>>();
        let (go_on, came) = channel();
        std::thread::scope(|scope| {
            let control = scope.spawn(move || {
                served.write_size(SIZE, |bytes| {
                    to_file.send(bytes.to_vec()).unwrap();
                    came.recv().unwrap();
                    Ok(())
                })
            });
            // Both writes are in flight, and reach the image in either order.
            let size = written.recv().unwrap();
            if mark_comes_last {
                disk.files[0].write_at(0, &size).unwrap();
            }
            disk.step_without_result(&mut write);
            if !mark_comes_last {
                disk.files[0].write_at(0, &size).unwrap();
            }
            go_on.send(()).unwrap();
            disk.wake(&mut write, 0);
            while let Ok(bytes) = written.recv() {
                disk.files[0].write_at(0, &bytes).unwrap();
                go_on.send(()).unwrap();
            }
            control.join().unwrap().unwrap();
            assert_eq!(header(&disk.files[0]).size, SIZE, "what was there when the size was said to be set");
        });
        while disk.step(&mut write) {}
        assert!(matches!(write.step, Step::Done(EIO)));
        let header = header(&disk.files[0]);
        assert!(header.size == SIZE && header.has(incompatible::CORRUPT), "{header:?}");
        assert!(disk.chain.top().take_corruption().unwrap().1, "it is marked");
    }
}
