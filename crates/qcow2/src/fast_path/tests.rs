use super::*;
use crate::create::Options;
use crate::memory::Memory;
use crate::snapshot;
use crate::testing::{self, drive::Disk};
use crate::{Image, Storage};

const SIZE: u64 = 1 << 20;
const CLUSTER: u64 = 1 << 16;

fn disk() -> Disk {
    Disk::open(testing::new(&Options::new(SIZE)), None)
}

/// Returns the location of the range, if the fast path finds it.
fn short(disk: &mut Disk, op: Op, pos: u64, len: u64) -> Option<(FileId, u64)> {
    let fast_path = FastPath::find(&disk.chain, &mut disk.user, op, pos, len)?;
    let place = (fast_path.file, fast_path.offset);
    fast_path.end(&disk.chain, &mut disk.user);
    Some(place)
}

/// Returns whether the fast path can read, and write.
fn both(disk: &mut Disk, pos: u64, len: u64) -> (bool, bool) {
    (short(disk, Op::Read, pos, len).is_some(), short(disk, Op::Write, pos, len).is_some())
}

#[test]
fn what_is_mapped_is_found_where_it_is() {
    let mut disk = disk();
    assert_eq!(both(&mut disk, 4096, 4096), (false, false), "there is no table");
    let bytes: Vec<u8> = (0..2 * CLUSTER).map(|i| (i >> 9) as u8).collect();
    disk.write(CLUSTER, &bytes);
    assert_eq!(both(&mut disk, 0, 4096), (false, false), "nothing is there");
    for (pos, len) in
        [(CLUSTER, 4096), (CLUSTER + 8192, 512), (2 * CLUSTER - 4096, 8192), (CLUSTER, 2 * CLUSTER)]
    {
        let place = short(&mut disk, Op::Read, pos, len).unwrap();
        assert_eq!(short(&mut disk, Op::Write, pos, len), Some(place));
        let mut there = vec![0; len as usize];
        disk.files[0].read_at(place.1, &mut there).unwrap();
        assert_eq!(there, bytes[(pos - CLUSTER) as usize..][..len as usize], "{pos} {len}");
    }
    assert_eq!(both(&mut disk, 3 * CLUSTER - 4096, 8192), (false, false), "half of it is not there");
    assert_eq!(short(&mut disk, Op::Discard, CLUSTER, CLUSTER), None);
    assert_eq!(short(&mut disk, Op::Flush, 0, 0), None);
}

#[test]
fn what_is_zero_or_gone_is_not() {
    let mut disk = disk();
    disk.write(0, &vec![7; SIZE as usize]);
    disk.other(Op::Zero { unmap: false }, CLUSTER, CLUSTER);
    disk.other(Op::Zero { unmap: true }, 2 * CLUSTER, CLUSTER);
    disk.other(Op::Discard, 3 * CLUSTER, CLUSTER);
    for n in 1..4 {
        assert_eq!(both(&mut disk, n * CLUSTER, 4096), (false, false), "{n}");
    }
    assert_eq!(both(&mut disk, 4 * CLUSTER, 4096), (true, true));
}

#[test]
fn what_is_below_is_read_there_and_not_written() {
    let below: Vec<u8> = (0..SIZE / 2).map(|i| (i >> 9) as u8).collect();
    let mut disk = Disk::open(testing::new(&Options::new(SIZE)), Some(Memory::new(below, SIZE)));
    disk.write(0, &[7; 512]);
    assert_eq!(both(&mut disk, 0, 4096), (true, true));
    assert_eq!(short(&mut disk, Op::Read, CLUSTER, 4096), Some((2, CLUSTER)));
    assert_eq!(short(&mut disk, Op::Write, CLUSTER, 4096), None);
    assert_eq!(both(&mut disk, SIZE / 2, 4096), (false, false), "behind its end");
}

#[test]
fn what_a_snapshot_has_too_is_read_and_not_written() {
    let mut disk = disk();
    disk.write(0, &vec![7; SIZE as usize]);
    let file = disk.close();
    snapshot::create(&mut Image::open(&*file).unwrap(), "s", (0, 0)).unwrap();
    let mut disk = Disk::open(Memory::new(file.bytes(), 64 << 20), None);
    // This loads the slice.
    disk.read(0, 512);
    assert_eq!(both(&mut disk, 0, 4096), (true, false));
    disk.write(0, &[8; 512]);
    assert_eq!(both(&mut disk, 0, 4096), (true, true), "it has a place of its own now");
    assert_eq!(both(&mut disk, CLUSTER, 4096), (true, false));
}

#[test]
fn what_is_compressed_is_not() {
    let file = testing::new(&Options::new(SIZE));
    testing::write(&mut Image::open(&file).unwrap(), 1, 7, true);
    testing::write(&mut Image::open(&file).unwrap(), 2, 7, false);
    let mut disk = Disk::open(file, None);
    disk.read(0, 512);
    assert_eq!(both(&mut disk, CLUSTER, 4096), (false, false));
    assert_eq!(both(&mut disk, 2 * CLUSTER, 4096), (true, true));
}

#[test]
fn what_another_is_about_to_place_is_not() {
    let mut disk = disk();
    disk.write(0, &[7; 512]);
    let mut started = disk.start(Op::Write, CLUSTER, vec![8; 4096], 4096);
    for steps in 0.. {
        assert_eq!(both(&mut disk, CLUSTER, 4096), (false, false), "after {steps} steps");
        assert!(disk.step(&mut started));
        if matches!(started.step, crate::Step::Done(_)) {
            break;
        }
    }
    assert_eq!(both(&mut disk, CLUSTER, 4096), (true, true));
}

#[test]
fn of_subclusters_only_those_that_are_there() {
    let options = Options { extended_l2: true, ..Options::new(SIZE) };
    let mut disk = Disk::open(testing::new(&options), None);
    let sub = CLUSTER / 32;
    disk.write(0, &vec![7; 2 * sub as usize]);
    assert_eq!(both(&mut disk, 0, 2 * sub), (true, true));
    assert_eq!(both(&mut disk, 512, 512), (true, true));
    assert_eq!(both(&mut disk, sub, 2 * sub), (false, false));
    assert_eq!(both(&mut disk, 2 * sub, 512), (false, false));
}

#[test]
fn a_cluster_that_goes_stays_until_the_transfer_ends() {
    let mut disk = disk();
    disk.write(0, &vec![7; SIZE as usize]);
    disk.other(Op::Flush, 0, 0);
    let other = disk.chain.top().join();
    let mut reader = std::mem::replace(&mut disk.user, other);
    let fast_path = FastPath::find(&disk.chain, &mut reader, Op::Read, CLUSTER, 4096).unwrap();
    disk.other(Op::Discard, CLUSTER, CLUSTER);
    let there = |disk: &Disk| {
        let mut bytes = [0; 4096];
        disk.files[0].read_at(fast_path.offset, &mut bytes).unwrap();
        bytes[0]
    };
    for _ in 0..4 {
        disk.other(Op::Flush, 0, 0);
        disk.write(0, &[9; 4096]);
        assert_eq!(there(&disk), 7, "it was given back, or to another");
    }
    let offset = fast_path.offset;
    fast_path.end(&disk.chain, &mut reader);
    (0..2).for_each(|_| disk.other(Op::Flush, 0, 0));
    let mut bytes = [1; 4096];
    disk.files[0].read_at(offset, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096], "nobody uses it any more");
    disk.chain.top().leave(reader);
}

#[test]
fn a_cluster_that_goes_during_a_batch_stays_until_the_batch_ends() {
    let mut disk = disk();
    disk.write(0, &vec![7; SIZE as usize]);
    disk.other(Op::Flush, 0, 0);
    let other = disk.chain.top().join();
    let mut reader = std::mem::replace(&mut disk.user, other);
    let batch = Batch::begin(&disk.chain, &mut reader);
    let found = FastPath::find(&disk.chain, &mut reader, Op::Read, CLUSTER, 4096).unwrap();
    let at = found.offset;
    found.end(&disk.chain, &mut reader);
    disk.other(Op::Discard, CLUSTER, CLUSTER);
    let first_byte = |disk: &Disk| {
        let mut bytes = [0];
        disk.files[0].read_at(at, &mut bytes).unwrap();
        bytes[0]
    };
    for _ in 0..4 {
        disk.other(Op::Flush, 0, 0);
        assert_eq!(first_byte(&disk), 7, "it was freed during the batch");
        // The map is the present one all the same.
        assert!(FastPath::find(&disk.chain, &mut reader, Op::Read, CLUSTER, 4096).is_none());
    }
    batch.end(&disk.chain, &mut reader);
    (0..2).for_each(|_| disk.other(Op::Flush, 0, 0));
    assert_eq!(first_byte(&disk), 0, "it is not freed after the batch");
    disk.chain.top().leave(reader);
}
