use super::*;
use crate::create::{DataFile, Options, create};
use crate::memory::Memory;
use crate::snapshot;
use crate::testing::{Rng, assert_clean, checked, contents, crash, kinds, new, write};

const SIZE: u64 = 256 << 10;

fn open(file: &Memory) -> Image<'_> {
    Image::open(file).unwrap()
}

fn around(below: Option<u64>, preallocation: Preallocation) -> Around<'static> {
    Around { data: None, below, preallocation }
}

fn to(file: &Memory, size: u64) {
    resize(&mut open(file), size, &around(None, Preallocation::Off), &mut |_, _| {}).unwrap();
}

#[test]
fn the_place_of_a_snapshot_table_without_entries_goes_with_the_end_of_the_file() {
    let file = new(&Options { cluster_size: 4096, ..Options::new(SIZE) });
    let end = file.len().unwrap().next_multiple_of(4096);
    file.set_len(end + 8 * 4096).unwrap();
    file.write_at(64, &(end + 7 * 4096).to_be_bytes()).unwrap();
    assert_clean(&file, "a place within the file");
    to(&file, 2 * SIZE);
    assert!(file.len().unwrap() < end + 7 * 4096, "the file was not cut");
    assert_clean(&file, "the file is shorter");
}

#[test]
fn a_growth_moves_tables_if_something_behind_the_end_has_to_be_hidden() {
    let file = new(&Options { cluster_size: 4096, ..Options::new(SIZE) });
    let moves = |below| growth_moves_tables(&open(&file), below).unwrap();
    write(&mut open(&file), SIZE / 4096 - 1, 7, false);
    assert!(!moves(None) && !moves(Some(SIZE)));
    assert!(moves(Some(SIZE + 512)), "a longer backing image");
    file.write_at(24, &(SIZE / 2).to_be_bytes()).unwrap();
    assert!(moves(None), "an entry behind the end");
}

#[test]
fn what_is_within_stays_and_what_is_beyond_goes() {
    for (seed, options) in (1..).zip(kinds(SIZE)) {
        let file = new(&options);
        let mut random = Rng::new(seed);
        for step in 0..20 {
            let size = 512 * (1 + random.below(4 * SIZE / 512));
            let cluster = random.below(open(&file).header.clusters());
            write(&mut open(&file), cluster, random.next() as u8 | 1, false);
            if step == 8 && options.version == 3 {
                snapshot::create(&mut open(&file), "s", (0, 0)).unwrap();
            }
            let before = contents(&file);
            to(&file, size);
            let of = format!("{options:?}, step {step}: {size}");
            assert_clean(&file, &of);
            let now = contents(&file);
            let end = size.div_ceil(options.cluster_size);
            for (cluster, (first, last)) in &before {
                match now.get(cluster) {
                    // The cluster in which the disk ends keeps its start.
                    Some((f, l)) => assert!(f == first && (l == last || *l == 0), "{of}: cluster {cluster}"),
                    None => assert!(*cluster >= end, "{of}: cluster {cluster} is gone"),
                }
            }
            assert!(now.keys().all(|c| before.contains_key(c) && *c < end), "{of}");
        }
    }
}

#[test]
fn a_crash_leaves_the_disk_before_or_after() {
    for (seed, options) in (1..).zip(kinds(SIZE)) {
        let file = new(&options);
        for cluster in [0, 1, SIZE / options.cluster_size - 1] {
            write(&mut open(&file), cluster, 7, false);
        }
        for size in [40 * SIZE, SIZE / 2 + 512, SIZE] {
            let old = (open(&file).header.size, contents(&file));
            let change = |i: &mut Image<'_>| {
                resize(i, size, &around(None, Preallocation::Off), &mut |_, _| {}).unwrap();
            };
            crash(&file, seed, change, |f, of| {
                let now = (open(f).header.size, contents(f));
                assert!(now == old || now.0 == size, "{of}: {now:?}");
            });
        }
    }
}

#[test]
fn what_a_shorter_disk_hid_does_not_come_back() {
    for shared in [false, true] {
        let file = new(&Options { cluster_size: 4096, ..Options::new(8192) });
        write(&mut open(&file), 1, 5, false);
        if shared {
            snapshot::create(&mut open(&file), "s", (0, 0)).unwrap();
        }
        to(&file, 4096 + 512);
        to(&file, 1 << 20);
        assert_eq!(contents(&file)[&1], (5, 0));
        assert_clean(&file, "grown");
        if shared {
            snapshot::apply(&mut open(&file), "s").unwrap();
            assert_eq!(contents(&file)[&1], (5, 5));
            assert_clean(&file, "applied");
        }
    }
}

#[test]
fn preallocated_growth_has_its_places() {
    for how in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        for options in kinds(SIZE) {
            let file = new(&options);
            write(&mut open(&file), 3, 5, false);
            resize(&mut open(&file), 4 * SIZE, &around(None, how), &mut |_, _| {}).unwrap();
            let r = checked(&file);
            let grown = 3 * SIZE / options.cluster_size;
            assert_eq!((r.is_clean(), r.allocated_clusters), (true, grown + 1), "{options:?}");
            assert!(contents(&file).iter().all(|(c, ends)| *c == 3 || *ends == (0, 0)), "{options:?}");
        }
    }
}

#[test]
fn preallocated_growth_lies_over_an_image_below() {
    for how in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        for mut options in kinds(SIZE) {
            options.backing = Some(("base".to_owned(), "raw".to_owned()));
            // The backing file ends within the last cluster of the disk, before its end, or far
            // behind it.
            for below in [SIZE - 100, SIZE / 2, 2 * SIZE] {
                if options.version < 3 && below > SIZE {
                    continue;
                }
                let file = new(&options);
                write(&mut open(&file), 3, 5, false);
                let of = format!("{options:?}, {how:?} over {below}");
                let around = around(Some(below), how);
                resize(&mut open(&file), 4 * SIZE, &around, &mut |_, _| {}).expect(&of);
                let r = checked(&file);
                let grown = 3 * SIZE / options.cluster_size;
                assert_eq!((r.is_clean(), r.allocated_clusters), (true, grown + 1), "{of}");
                assert!(contents(&file).iter().all(|(c, ends)| *c == 3 || *ends == (0, 0)), "{of}");
            }
        }
    }
}

#[test]
fn a_larger_image_below_does_not_show() {
    let backing = || Some(("base".to_owned(), "raw".to_owned()));
    for extended_l2 in [false, true] {
        let options = Options { backing: backing(), extended_l2, ..Options::new(SIZE) };
        let file = new(&options);
        resize(&mut open(&file), 4 * SIZE, &around(Some(3 * SIZE), Preallocation::Off), &mut |_, _| {})
            .unwrap();
        assert_clean(&file, "grown");
        let i = open(&file);
        let l1 = i.table(i.header.l1_offset, 1, "L1").unwrap();
        let table = image::words(&i.read(l1[0] & OFFSET, 65536, "L2").unwrap());
        let words = if extended_l2 { 2 } else { 1 };
        let zero = |n: u64| {
            let at = n as usize * words;
            if extended_l2 { table[at + 1] == 0xffff_ffff << 32 } else { table[at] == ZERO }
        };
        let clusters = SIZE >> 16;
        assert!((clusters..3 * clusters).all(zero) && !(0..clusters).any(zero) && !zero(3 * clusters));
    }
    let file = new(&Options { backing: backing(), ..Options::new(SIZE + 512) });
    let e = resize(&mut open(&file), 4 * SIZE, &around(Some(4 * SIZE), Preallocation::Off), &mut |_, _| {});
    assert!(e.unwrap_err().to_string().contains("below"));
    // Subclusters can be hidden one by one. No data is needed if the disk ends at the end of one.
    let options = Options { backing: backing(), extended_l2: true, ..Options::new(SIZE + 4096) };
    let file = new(&options);
    resize(&mut open(&file), 2 * SIZE, &around(Some(4 * SIZE), Preallocation::Off), &mut |_, _| {}).unwrap();
    assert_clean(&file, "grown within a cluster");
    let i = open(&file);
    let l1 = i.table(i.header.l1_offset, 1, "L1").unwrap();
    let table = image::words(&i.read(l1[0] & OFFSET, 65536, "L2").unwrap());
    let at = (SIZE >> 16) as usize * 2;
    assert_eq!((table[at], table[at + 1]), (0, 0xffff_fffc << 32));
    let file = new(&Options { backing: backing(), version: 2, ..Options::new(SIZE) });
    let e = resize(&mut open(&file), 4 * SIZE, &around(Some(4 * SIZE), Preallocation::Off), &mut |_, _| {});
    assert!(e.unwrap_err().to_string().contains("version 2"));
}

#[test]
fn a_raw_data_file_follows() {
    let (file, data) = (Memory::new(Vec::new(), 8 << 20), Memory::new(Vec::new(), 8 << 20));
    let options = Options { data_file: Some(DataFile { name: "d".into(), raw: true }), ..Options::new(SIZE) };
    create(&file, Some(&data), &options, &mut |_, _| {}).unwrap();
    for size in [4 * SIZE, SIZE / 4] {
        let around = Around { data: Some(&data), below: None, preallocation: Preallocation::Off };
        resize(&mut open(&file), size, &around, &mut |_, _| {}).unwrap();
        let r = checked(&file);
        assert_eq!((r.is_clean(), r.allocated_clusters, data.bytes().len() as u64), (true, size >> 16, size));
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let file = new(&Options { cluster_size: 512, ..Options::new(SIZE) });
    for size in [1 << 50, u64::MAX] {
        let e =
            resize(&mut open(&file), size, &around(None, Preallocation::Off), &mut |_, _| {}).unwrap_err();
        assert!(e.to_string().contains("too large"), "{e}");
    }
    write(&mut open(&file), 1, 1, true);
    let e = resize(&mut open(&file), 512 + 12, &around(None, Preallocation::Off), &mut |_, _| {});
    e.unwrap();
    let file = new(&Options { cluster_size: 4096, ..Options::new(SIZE) });
    write(&mut open(&file), 1, 1, true);
    let e = resize(&mut open(&file), 4096 + 512, &around(None, Preallocation::Off), &mut |_, _| {});
    assert!(e.unwrap_err().to_string().contains("compressed"));
}

#[test]
fn room_to_grow_changes_nothing_but_what_lies_behind_the_end() {
    for (seed, options) in (1..).zip(kinds(SIZE + 512)) {
        // The image names no backing file, because QEMU checks it, too.
        let below = (options.version == 3).then_some(2 * SIZE);
        let file = new(&options);
        let last = SIZE / options.cluster_size;
        for cluster in [0, last] {
            write(&mut open(&file), cluster, 7, false);
        }
        let before = contents(&file);
        let make = |i: &mut Image<'_>| make_room(i, below).unwrap();
        crash(&file, seed, make, |f, of| {
            assert_eq!(open(f).header.size, SIZE + 512, "{of}");
            assert_eq!(contents(f)[&0], (7, 7), "{of}");
        });
        make(&mut open(&file));
        assert_clean(&file, &format!("{options:?}"));
        let i = open(&file);
        assert!(u64::from(i.header.l1_size) >= ROOM_L1_ENTRIES && i.header.size == SIZE + 512);
        // The header alone makes the disk longer, and the new part reads as zeroes.
        let mut after = before.clone();
        after.insert(last, (7, if options.cluster_size > 512 { 0 } else { 7 }));
        file.write_at(24, &(3 * SIZE).to_be_bytes()).unwrap();
        assert_eq!(contents(&file), after, "{options:?}");
        assert_clean(&file, "grown");
        if below.is_some() {
            let per = i.header.l2_entries();
            let words = i.header.l2_entry_bytes() as usize / 8;
            let zero = |cluster: u64| {
                let l1 = i.table(i.header.l1_offset, u64::from(i.header.l1_size), "L1").unwrap();
                let at = l1[(cluster / per) as usize] & OFFSET;
                let table = image::words(&i.read(at, i.header.cluster_size(), "L2").unwrap());
                let slot = (cluster % per) as usize * words;
                if words == 2 { table[slot + 1] >> 32 == 0xffff_ffff } else { table[slot] & ZERO != 0 }
            };
            let end = 2 * SIZE / options.cluster_size;
            assert!((last + 1..end).all(zero), "{options:?}: the image below shows");
        }
    }
}

/// Tests that a disk with room gets another size and keeps its room, in one change.
#[test]
fn another_size_with_room_is_one_change() {
    for (seed, options) in (1..).zip(kinds(SIZE + 512)) {
        let below = (options.version == 3).then_some(2 * SIZE);
        for size in [SIZE / 2 + 1024, SIZE, 3 * SIZE + 512] {
            let file = new(&options);
            for cluster in [0, SIZE / 2 / options.cluster_size, SIZE / options.cluster_size] {
                write(&mut open(&file), cluster, 7, false);
            }
            make_room(&mut open(&file), below).unwrap();
            let make = |i: &mut Image<'_>| resize_with_room(i, size, below).unwrap();
            crash(&file, seed, make, |f, of| {
                let i = open(f);
                assert!([SIZE + 512, size].contains(&i.header.size), "{of}");
                assert!(u64::from(i.header.l1_size) >= ROOM_L1_ENTRIES, "{of}");
            });
            make(&mut open(&file));
            assert_clean(&file, &format!("{options:?}, {size} bytes"));
            // The result is the same as that of both changes one after the other: nothing shows
            // behind the end.
            let before = contents(&file);
            make_room(&mut open(&file), below).unwrap();
            assert_eq!(contents(&file), before, "{options:?}, {size} bytes");
        }
    }
}

/// Tests that the check for the backing file is the last one, and that nothing is written before
/// it.
#[test]
fn what_is_refused_leaves_each_byte_as_it_was() {
    for version in [2, 3] {
        let options = Options { version, ..Options::new(SIZE + 512) };
        let file = new(&options);
        let before = file.bytes();
        let refused = |what: &dyn Fn(&mut Image<'_>) -> Result<()>, shows: bool| {
            let e = what(&mut open(&file)).unwrap_err();
            assert_eq!(matches!(e, Error::LastClusterBelow(_)), shows, "{e}");
            assert!(file.bytes() == before, "{e}: and the file has changed");
        };
        refused(&|i| make_room(i, Some(2 * SIZE)), version == 3);
        refused(&|i| resize_with_room(i, SIZE / 2 + 512, Some(2 * SIZE)), version == 3);
        refused(&|i| resize_with_room(i, i64::MAX as u64 - 1023, Some(2 * SIZE)), false);
        refused(&|i| make_room(i, Some(1 << 60)), false);
    }
}
