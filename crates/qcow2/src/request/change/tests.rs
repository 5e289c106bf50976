use crate::create::{DataFile, Options};
use crate::memory::Memory;
use crate::request::{ENOSPC, Op, Step};
use crate::testing::{
    self,
    drive::{Disk, Started},
};
use crate::{Storage, make_ready_in_fixed_file};

#[test]
fn no_space_is_when_there_is_none() {
    const CLUSTER: u64 = 1 << 16;
    // A reserve has 64 clusters, and 16 MiB are allocated ahead.
    let options = Options::new(1 << 30);
    for room in [0, 1, 2, 3, 7, 40, 64, 65, 100] {
        let image = testing::new(&options).bytes();
        let most = image.len() as u64 + (room + 1) * CLUSTER;
        let mut disk = Disk::open(Memory::new(image, most), None);
        // One more is the L2 table.
        for n in 0..room {
            assert_eq!(disk.run(Op::Write, n * CLUSTER, vec![n as u8; 512], 512).0, 0, "{n} of {room}");
        }
        for _ in 0..3 {
            assert_eq!(disk.run(Op::Write, room * CLUSTER, vec![1; 512], 512).0, ENOSPC, "{room}");
        }
        for n in 0..room {
            assert_eq!(disk.read(n * CLUSTER, 512), [n as u8; 512], "{n} of {room}");
        }
        let file = disk.close();
        assert!(file.len().unwrap() <= most);
        testing::assert_clean(&*file, &format!("{room}"));
    }
}

#[test]
fn a_file_of_a_fixed_length_is_filled_and_never_exceeded() {
    for cluster_size in [1 << 16, 512] {
        // With the small clusters, the last ones are behind those of several refcount blocks. The
        // rest at the end is less than a cluster.
        let options = Options { cluster_size, ..Options::new(16 << 20) };
        let (len, rest) = (if cluster_size == 512 { 300 << 10 } else { 40 * cluster_size }, cluster_size / 2);
        let image = testing::new(&options);
        image.set_len(len + rest).unwrap();
        make_ready_in_fixed_file(&image).unwrap();
        let mut disk = Disk::open_fixed(image);
        let mut written = 0;
        let full = loop {
            match disk.run(Op::Write, written, vec![7; 512], 512).0 {
                0 => written += cluster_size,
                res => break res,
            }
        };
        assert_eq!(full, ENOSPC);
        assert!(written > len / 2, "{written} of {len}");
        assert_eq!(disk.run(Op::Write, written, vec![1; 512], 512).0, ENOSPC);
        for pos in (0..written).step_by(cluster_size as usize) {
            assert_eq!(disk.read(pos, 512), [7; 512], "{pos:#x}");
        }
        // What is given back can be used again.
        disk.other(Op::Discard, 0, 4 * cluster_size);
        (0..3).for_each(|_| disk.other(Op::Flush, 0, 0));
        disk.write(0, &[9; 512]);
        let file = disk.close();
        assert_eq!(file.len().unwrap(), len + rest);
        testing::assert_clean(&*file, &format!("{cluster_size}"));
    }
}

fn with_data_file(raw: bool) -> Disk {
    let data_file = Some(DataFile { name: "data".to_owned(), raw });
    Disk::open(testing::new(&Options { data_file, ..Options::new(1 << 20) }), None)
}

fn data_of(disk: &Disk, cluster: u64) -> u8 {
    let mut byte = [0];
    disk.files[1].read_at(cluster << 16, &mut byte).unwrap();
    byte[0]
}

/// Starts a flush and runs it until it is about to punch.
fn flush_to_punch(disk: &mut Disk) -> Started {
    let mut flush = disk.start(Op::Flush, 0, Vec::new(), 0);
    while !matches!(flush.step, Step::Discard { .. }) {
        assert!(disk.step(&mut flush), "nothing was punched");
    }
    flush
}

#[test]
fn a_discard_reaches_the_data_file_with_the_flush() {
    let mut disk = with_data_file(false);
    disk.write(0, &[7; 1 << 18]);
    disk.other(Op::Discard, 0, 3 << 16);
    disk.other(Op::Zero { unmap: true }, 3 << 16, 1 << 16);
    disk.write(1 << 16, &[8; 512]);
    let data = |disk: &Disk| [0, 1, 2, 3].map(|n| data_of(disk, n));
    assert_eq!(data(&disk), [7, 8, 7, 7]);
    disk.other(Op::Flush, 0, 0);
    assert_eq!(data(&disk), [0, 8, 0, 0], "what was written again stays");
    assert_eq!(disk.read(0, 1 << 16), [0; 1 << 16]);
    assert_eq!(disk.read((1 << 16) + 512, 512), [0; 512], "what was there before is not");
    testing::assert_clean(&*disk.close(), "after discards");
}

#[test]
fn a_write_waits_for_the_punch_of_its_place() {
    let mut disk = with_data_file(false);
    disk.write(0, &[7; 1 << 17]);
    disk.other(Op::Discard, 0, 1 << 17);
    let mut flush = flush_to_punch(&mut disk);
    let mut write = disk.start(Op::Write, 4096, vec![9; 512], 512);
    assert_eq!(write.step, Step::Park);
    assert!(disk.step(&mut flush));
    while disk.step(&mut flush) {}
    disk.wake(&mut write, 0);
    while disk.step(&mut write) {}
    assert_eq!(write.step, Step::Done(0));
    assert_eq!(disk.read(4096, 512), [9; 512]);
}

#[test]
fn a_punch_that_fails_costs_nothing_but_space() {
    let mut disk = with_data_file(false);
    disk.write(0, &[7; 1 << 16]);
    disk.other(Op::Discard, 0, 1 << 16);
    let mut flush = flush_to_punch(&mut disk);
    disk.wake(&mut flush, -5);
    while disk.step(&mut flush) {}
    assert_eq!(flush.step, Step::Done(0));
    assert_eq!((data_of(&disk, 0), disk.read(0, 512)), (7, vec![0; 512]));
}

#[test]
fn a_raw_data_file_is_the_disk() {
    let mut disk = with_data_file(true);
    disk.write(0, &[7; 1 << 18]);
    // Also less than a cluster.
    disk.other(Op::Discard, 512, 1 << 17);
    disk.other(Op::Zero { unmap: true }, 3 << 16, 1 << 16);
    let mut data = vec![0; 1 << 18];
    disk.files[1].read_at(0, &mut data).unwrap();
    assert!(data == disk.read(0, 1 << 18), "the data file is not the disk");
    assert_eq!((data[0], data[512], data[1 << 17], data[(1 << 17) + 512], data[3 << 16]), (7, 0, 0, 7, 0));
    testing::assert_clean(&*disk.close(), "after discards");
}

#[test]
fn a_table_lies_within_the_file_where_no_space_is_taken_ahead() {
    let mut disk = Disk::open(testing::new(&Options::new(1 << 30)), None);
    let mut write = disk.start(Op::Write, 0, vec![1; 512], 512);
    loop {
        match write.step {
            Step::Extend { .. } => disk.wake(&mut write, 0),
            Step::Data { .. } | Step::Around { .. } => break,
            _ => assert!(disk.step(&mut write), "it wrote nothing"),
        }
    }
    disk.wake(&mut write, -5);
    assert_eq!(write.step, Step::Done(-5));
    disk.other(Op::Flush, 0, 0);
    let mut entry = [0; 8];
    let header = disk.chain.top().header().clone();
    disk.files[0].read_at(header.l1_offset, &mut entry).unwrap();
    let table = u64::from_be_bytes(entry) & crate::entry::OFFSET;
    assert_ne!(table, 0);
    assert!(table + header.cluster_size() <= disk.files[0].len().unwrap());
}

/// Runs a write, or another change, on a file that has no space ahead.
fn run_without_space_ahead(disk: &mut Disk, mut started: Started) {
    loop {
        match started.step {
            Step::Extend { .. } => disk.wake(&mut started, -95),
            Step::Done(res) => break assert_eq!(res, 0),
            _ => assert!(disk.step(&mut started)),
        }
    }
}

#[test]
fn the_file_has_all_of_its_last_cluster_where_no_space_is_taken_ahead() {
    for cluster_size in [512, 1 << 16] {
        let options = Options { cluster_size, ..Options::new(1 << 20) };
        let below = Memory::new(vec![0; 1 << 20], 64 << 20);
        below.write_at(1 << 18, &[5; 1 << 17]).unwrap();
        let backing = Some(("base".to_owned(), "raw".to_owned()));
        let mut disk = Disk::open(testing::new(&Options { backing, ..options }), Some(below));
        let whole = |disk: &Disk, what: &str| {
            let len = disk.files[0].len().unwrap();
            assert!(len.is_multiple_of(cluster_size), "{what}: {len} bytes in clusters of {cluster_size}");
            assert!(len >= disk.chain.top().end(), "{what}: {len} bytes");
        };
        for (n, at) in [0, 1 << 19, 1 << 17].into_iter().enumerate() {
            let write = disk.start(Op::Write, at + 512, vec![n as u8 + 1; 512], 512);
            run_without_space_ahead(&mut disk, write);
            whole(&disk, "after a write");
        }
        let populate = disk.start(Op::Populate, 1 << 18, Vec::new(), 1 << 17);
        run_without_space_ahead(&mut disk, populate);
        whole(&disk, "after a copy from below");
        disk.other(Op::Flush, 0, 0);
        whole(&disk, "after a flush");
        assert_eq!(disk.read((1 << 19) + 512, 512), [2; 512]);
        assert_eq!(disk.read(1 << 18, 1 << 17), [5; 1 << 17]);
        testing::assert_clean(&*disk.close(), "after all");
    }
}
