use std::rc::Rc;
use std::sync::mpsc::channel;
use std::sync::{Arc, atomic::AtomicU64};

use crate::create::Options;
use crate::header::{Header, incompatible};
use crate::journal::{Journal, Words, mark_open};
use crate::memory::Memory;
use crate::request::{Op, Step};
use crate::testing::{
    self,
    drive::{Disk, Started},
};
use crate::{Chain, Image, Served, Settings, Storage};

struct Shared(Vec<AtomicU64>);

impl Words for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// Makes a disk with a journal.
fn disk() -> Disk {
    let file = testing::new(&Options::new(1 << 20));
    let open_header = mark_open(&file, [1; 16]).unwrap();
    let header = Image::open(&file).unwrap().header().clone();
    let settings = Settings { file: 0, data: 0, cache_bytes: None, writable: true, room: true };
    let words = Shared((0..Journal::bytes(header.clusters()) / 8).map(|_| AtomicU64::new(0)).collect());
    let journal = Journal::new(Box::new(words), [1; 16], [2; 16]).unwrap();
    let image = Arc::new(Served::open(&file, header, settings).unwrap().with_journal(journal, open_header));
    let user = image.join();
    let other = || Rc::new(Memory::new(Vec::new(), 1 << 20));
    Disk { files: [Rc::new(file), other(), other()], chain: Chain::new(image, vec![]), user }
}

/// Starts a flush and runs it until its write of the header has started.
fn flush_to_header(disk: &mut Disk) -> Started {
    disk.write(0, &[7; 512]);
    let mut flush = disk.start(Op::Flush, 0, Vec::new(), 0);
    while !matches!(flush.step, Step::Write { offset: 0, .. }) {
        assert!(disk.step(&mut flush), "the header was not written");
    }
    flush
}

fn header(disk: &Disk) -> Header {
    Image::open(&*disk.files[0]).unwrap().header().clone()
}

#[test]
fn a_size_is_not_taken_back_by_a_flush_under_way() {
    const SIZE: u64 = 5 << 20;
    let mut disk = disk();
    let mut flush = flush_to_header(&mut disk);
    let image = disk.chain.top().clone();
    let (to_file, written) = channel::<Vec<u8>>();
    let (go_on, came) = channel();
    std::thread::scope(|scope| {
        let control = scope.spawn(move || {
            let write = |bytes: &[u8]| {
                to_file.send(bytes.to_vec()).unwrap();
                came.recv().unwrap();
                Ok(())
            };
            image.write_size(SIZE, write)
        });
        disk.files[0].write_at(0, &written.recv().unwrap()).unwrap();
        // The flush's write, with the former size, reaches the image last, and ends later.
        disk.step_without_result(&mut flush);
        go_on.send(()).unwrap();
        let step = flush.step.clone();
        assert!(matches!(step, Step::Write { offset: 0, .. }));
        disk.wake(&mut flush, 0);
        // Control writes again until it has reported that the size is there.
        while let Ok(bytes) = written.recv() {
            disk.files[0].write_at(0, &bytes).unwrap();
            go_on.send(()).unwrap();
        }
        control.join().unwrap().unwrap();
        assert_eq!(header(&disk).size, SIZE, "what was there when the size was said to be set");
    });
    while disk.step(&mut flush) {}
    assert_eq!(header(&disk).size, SIZE);
}

#[test]
fn a_flush_under_way_does_not_take_the_mark_of_a_corrupt_image_back() {
    let mut disk = disk();
    let mut flush = flush_to_header(&mut disk);
    let image = disk.chain.top().clone();
    let first = image.header_copy.as_ref().unwrap();
    let (bytes, mark) = first.set_corrupt();
    disk.files[0].write_at(0, &bytes).unwrap();
    disk.step_without_result(&mut flush);
    assert!(!header(&disk).has(incompatible::CORRUPT), "the older write came last");
    // So the write of the mark is not final.
    let (bytes, again) = first.ended(mark).expect("it is written again");
    disk.files[0].write_at(0, &bytes).unwrap();
    disk.wake(&mut flush, 0);
    while disk.step(&mut flush) {}
    let (bytes, last) = first.ended(again).expect("the flush's write was under way when this one began");
    disk.files[0].write_at(0, &bytes).unwrap();
    assert_eq!(first.ended(last), None);
    assert!(header(&disk).has(incompatible::CORRUPT));
}
