use crate::create::{DataFile, Options};
use crate::entry::OFFSET;
use crate::memory::Memory;
use crate::request::{ENOSPC, Extent, Look, Op};
use crate::testing::{self, Rng, drive::Disk, kinds};
use crate::{Image, Storage};

const SIZE: u64 = (1 << 20) + 1536;

fn options() -> Vec<Options> {
    let data_file = Some(DataFile { name: "data".to_owned(), raw: false });
    let mut all = kinds(SIZE);
    all.push(Options { cluster_size: 4096, data_file, ..Options::new(SIZE) });
    let backed = |o: Options| Options { backing: Some(("below".to_owned(), "raw".to_owned())), ..o };
    all.into_iter().map(backed).collect()
}

fn plain() -> Options {
    Options {
        cluster_size: 4096,
        backing: Some(("below".to_owned(), "raw".to_owned())),
        ..Options::new(SIZE)
    }
}

/// A backing file of which every fifth part of 1,000 bytes, and the end of the disk, has no data.
fn below() -> Memory {
    let mut bytes = vec![0; SIZE as usize - 40_000];
    for (n, part) in bytes.chunks_mut(1000).enumerate().filter(|(n, _)| n % 5 > 0) {
        part.fill(n as u8 | 1);
    }
    Memory::new(bytes, 64 << 20)
}

fn some_writes(disk: &mut Disk, random: &mut Rng) {
    for n in 0..60u8 {
        let len = 512 * (1 + random.below(40));
        let pos = 512 * random.below((SIZE - len) / 512);
        match random.below(4) {
            0 => disk.other(Op::Zero { unmap: true }, pos, len),
            1 => disk.other(Op::Discard, pos, len),
            _ => disk.write(pos, &vec![n; len as usize]),
        }
    }
}

#[test]
fn what_was_populated_needs_no_backing_file() {
    for (n, options) in options().iter().enumerate() {
        let mut random = Rng::new(n as u64);
        let mut disk = Disk::open(testing::new(options), Some(below()));
        some_writes(&mut disk, &mut random);
        let before = disk.read(0, SIZE);
        let mut pos = 0;
        while pos < SIZE {
            // Anywhere, not only at the ends of clusters.
            let len = (512 * (1 + random.below(200))).min(SIZE - pos);
            disk.other(Op::Populate, pos, len);
            pos += len;
        }
        assert_eq!(disk.read(0, SIZE), before, "{options:?}");
        let data = disk.files[1].clone();
        let file = disk.close();
        testing::assert_clean(&*file, &format!("{options:?}"));
        let mut alone = Disk::open(Memory::new(file.bytes(), 64 << 20), None);
        alone.files[1] = data;
        assert_eq!(alone.read(0, SIZE), before, "{options:?}");
    }
}

#[test]
fn what_is_there_already_stays_where_it_is() {
    let mut disk = Disk::open(testing::new(&plain()), Some(below()));
    disk.write(0, &[7; 512]);
    disk.other(Op::Zero { unmap: true }, 8192, 8192);
    disk.other(Op::Populate, 0, 65536);
    let len = disk.files[0].len().unwrap();
    let bytes = disk.files[0].bytes();
    disk.other(Op::Populate, 0, 65536);
    assert_eq!(disk.files[0].len().unwrap(), len);
    assert!(disk.files[0].bytes() == bytes, "the second time, something was written");
    assert_eq!(disk.read(0, 512), [7; 512]);
    assert_eq!(disk.read(8192, 8192), [0; 8192]);
    // Behind it, nothing was copied.
    let mut seek = disk.start(Op::Seek { look: Look::Image }, 65536, Vec::new(), 4096);
    while disk.step(&mut seek) {}
    assert_eq!(seek.request.found().unwrap().extent, Extent::Absent);
}

#[test]
fn zeroes_below_take_no_space() {
    for options in &options() {
        let mut bytes = vec![0; SIZE as usize];
        bytes[500_000..600_000].fill(5);
        let mut disk = Disk::open(testing::new(options), Some(Memory::new(bytes.clone(), 64 << 20)));
        disk.write(200_000, &[7; 512]);
        bytes[200_000..][..512].fill(7);
        for at in (0..SIZE).step_by(1 << 17) {
            disk.other(Op::Populate, at, (SIZE - at).min(1 << 17));
        }
        let mut at = 0;
        let mut data = 0;
        while at < SIZE {
            let mut seek = disk.start(Op::Seek { look: Look::Image }, at, Vec::new(), SIZE - at);
            while disk.step(&mut seek) {}
            let found = seek.request.found().unwrap();
            assert_ne!(found.extent, Extent::Absent, "{options:?}: at {at}");
            data += if found.extent == Extent::Data { found.len } else { 0 };
            at += found.len;
        }
        let zeroes_are_entries = options.version >= 3;
        assert_eq!(data < 200_000, zeroes_are_entries, "{options:?}: {data} bytes of data");
        assert!(disk.read(0, SIZE) == bytes, "{options:?}");
        let other = disk.files[1].clone();
        let file = disk.close();
        testing::assert_clean(&*file, &format!("{options:?}"));
        let mut alone = Disk::open(Memory::new(file.bytes(), 64 << 20), None);
        alone.files[1] = other;
        assert!(alone.read(0, SIZE) == bytes, "{options:?}, alone");
    }
}

/// Removes the flag of all clusters that they have no other user, as a program that was killed
/// while it took a snapshot may have done.
fn without_copied(file: &Memory) {
    let image = Image::open(file).unwrap();
    let h = image.header().clone();
    let l1 = image.table(h.l1_offset, u64::from(h.l1_size), "L1").unwrap();
    for at in l1.iter().map(|e| e & OFFSET).filter(|at| *at != 0) {
        let mut table = vec![0; h.cluster_size() as usize];
        file.read_at(at, &mut table).unwrap();
        for entry in table.chunks_mut(h.l2_entry_bytes() as usize) {
            entry[0] &= 0x7f;
        }
        file.write_at(at, &table).unwrap();
    }
}

#[test]
fn shared_clusters_are_copied_with_what_they_have() {
    let backing = Some(("below".to_owned(), "raw".to_owned()));
    let options = Options { cluster_size: 1 << 14, extended_l2: true, backing, ..Options::new(SIZE) };
    for begin in [0, 512, 4096, 20_000] {
        let mut disk = Disk::open(testing::new(&options), Some(below()));
        // Single subclusters of some clusters.
        for n in 0..20u64 {
            disk.write(n * 40_960 + 1024, &[n as u8 + 1; 1536]);
        }
        let before = disk.read(0, SIZE);
        let file = disk.close();
        without_copied(&file);
        let mut disk = Disk::open(Memory::new(file.bytes(), 64 << 20), Some(below()));
        let mut pos = begin;
        while pos < SIZE {
            disk.other(Op::Populate, pos, (SIZE - pos).min(100_000));
            pos += 100_000;
        }
        assert!(disk.read(0, SIZE) == before, "from {begin}");
    }
}

#[test]
fn without_space_nothing_is_lost() {
    let image = testing::new(&plain()).bytes();
    let most = image.len() as u64 + 5 * 4096;
    let mut disk = Disk::open(Memory::new(image, most), Some(below()));
    let before = disk.read(0, SIZE);
    assert_eq!(disk.run(Op::Populate, 0, Vec::new(), SIZE).0, ENOSPC);
    assert_eq!(disk.read(0, SIZE), before);
    let file = disk.close();
    testing::assert_clean(&*file, "full");
}
