use super::*;
use crate::create::{Options, Preallocation};
use crate::entry::{COPIED, OFFSET, ZERO};
use crate::memory::Memory;
use crate::testing::{Rng, assert_clean, checked, contents, kinds, new, write};
use crate::{bitmap, refcount, snapshot};

const SIZE: u64 = 256 << 10;

fn open(file: &Memory) -> Image<'_> {
    Image::open(file).unwrap()
}

/// Makes an image with data, a snapshot and a bitmap.
fn filled(options: &Options) -> Memory {
    let file = new(options);
    for n in 0..6 {
        write(&mut open(&file), n * 3, n as u8 + 1, n == 4);
    }
    snapshot::create(&mut open(&file), "s", (1, 2)).unwrap();
    write(&mut open(&file), 0, 99, false);
    if options.version == 3 {
        bitmap::add(&mut open(&file), "b", Some(9), true).unwrap();
        let mut bits = bitmap::load(&open(&file), "b").unwrap();
        bits.set_range(0, 5000);
        bitmap::tests::put(&mut open(&file), "b", &bits).unwrap();
    }
    assert_clean(&file, "filled");
    file
}

fn put(file: &Memory, at: u64, value: u64) {
    file.write_at(at, &value.to_be_bytes()).unwrap();
}

fn get(file: &Memory, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_at(at, &mut bytes).unwrap();
    u64::from_be_bytes(bytes)
}

/// Returns the offset of the L2 entry of a cluster of the disk, and the entry.
fn l2_entry(file: &Memory, cluster: u64) -> (u64, u64) {
    let image = open(file);
    let h = image.header();
    let l2 = get(file, h.l1_offset + cluster / h.l2_entries() * 8) & OFFSET;
    let at = l2 + cluster % h.l2_entries() * h.l2_entry_bytes();
    (at, get(file, at))
}

fn set_count(file: &Memory, cluster: u64, count: u64) {
    let image = open(file);
    let h = image.header();
    let at = get(file, h.reftable_offset + cluster / h.refblock_entries() * 8);
    let mut block = vec![0; h.cluster_size() as usize];
    file.read_at(at, &mut block).unwrap();
    refcount::set(&mut block, (cluster % h.refblock_entries()) as usize, h.refcount_order, count);
    file.write_at(at, &block).unwrap();
}

/// Checks that the error is found, repaired and then absent. Returns the findings.
fn repaired(file: &Memory, of: &str) -> CheckResult {
    let found = checked(file);
    assert!(found.corruptions > 0, "{of}: not found");
    let r = check(file, Repair::All, &mut Quiet).unwrap();
    assert!(r.is_clean() && r.corruptions_fixed > 0, "{of}: {r:?}");
    assert_clean(file, of);
    found
}

#[test]
fn counts_too_low_and_too_high() {
    for options in kinds(SIZE) {
        let file = filled(&options);
        let before = contents(&file);
        let cluster = (l2_entry(&file, 0).1 & OFFSET) / options.cluster_size;
        set_count(&file, cluster, 0);
        repaired(&file, &format!("{options:?}: not counted"));
        set_count(&file, cluster, 3);
        let found = checked(&file);
        // A cluster that is counted too often has a wrong flag, too.
        assert_eq!((found.leaks, found.corruptions), (1, 1));
        let r = check(&file, Repair::Leaks, &mut Quiet).unwrap();
        assert_eq!((r.leaks_fixed, r.is_clean()), (1, true), "{r:?}");
        assert_eq!(contents(&file), before);
    }
}

#[test]
fn flags_that_are_wrong() {
    for options in kinds(SIZE) {
        let file = filled(&options);
        for cluster in [0, 3] {
            let (at, e) = l2_entry(&file, cluster);
            put(&file, at, e ^ COPIED);
            assert_eq!(repaired(&file, "a flag").corruptions, 1);
            assert_eq!(l2_entry(&file, cluster).1, e);
        }
        let l1 = open(&file).header().l1_offset;
        put(&file, l1, get(&file, l1) ^ COPIED);
        repaired(&file, "a flag of the L1 table");
    }
}

#[test]
fn entries_that_cannot_be_read_as_zeroes() {
    for options in kinds(SIZE) {
        let file = filled(&options);
        let header = open(&file).header().clone();
        let (at, _) = l2_entry(&file, 0);
        for wrong in [1 << 50, header.l1_offset, header.reftable_offset, 1u64 << 56 | 1 << 50] {
            put(&file, at, wrong | COPIED);
            repaired(&file, &format!("{options:?}: {wrong:#x}"));
            let e = l2_entry(&file, 0).1;
            let zero = if options.version == 2 || options.extended_l2 { 0 } else { ZERO };
            // The refcount table can be moved, and then the entry is valid.
            let header = open(&file).header().clone();
            assert!(e == zero || header.reftable_offset != wrong, "{options:?}: {wrong:#x} became {e:#x}");
        }
        let l1 = header.l1_offset;
        put(&file, open(&file).header().l1_offset, 1 << 50);
        repaired(&file, "an L2 table behind the end");
        assert_eq!(get(&file, l1), 0);
    }
}

#[test]
fn counts_are_rebuilt() {
    for options in kinds(SIZE) {
        for wrong in [0, 512 * 3, 1 << 50, 0x200 | 1 << 40] {
            let file = filled(&options);
            let before = contents(&file);
            let at = open(&file).header().reftable_offset;
            put(&file, at, wrong);
            repaired(&file, &format!("{options:?}: refcount block at {wrong:#x}"));
            assert_eq!(contents(&file), before, "{wrong:#x}");
        }
        let file = filled(&options);
        let (before, l2) =
            (contents(&file), l2_entry(&file, 0).0 / options.cluster_size * options.cluster_size);
        // A refcount table that overlaps the disk's own tables is given up.
        put(&file, open(&file).header().reftable_offset, l2);
        repaired(&file, "counts over an L2 table");
        assert_eq!(contents(&file), before);
        put(&file, 48, 1 << 50);
        repaired(&file, "a refcount table behind the end");
        assert_eq!(contents(&file), before);
    }
}

#[test]
fn snapshots_and_bitmaps_that_cannot_be_read_go() {
    for options in kinds(SIZE).into_iter().filter(|o| o.version == 3) {
        let file = filled(&options);
        let before = contents(&file);
        let (at, l1) = (open(&file).header().snapshots_offset, open(&file).header().l1_offset);
        // An L1 table that overlaps the disk's own.
        put(&file, at, l1);
        repaired(&file, "a snapshot");
        assert_eq!((open(&file).header().snapshots, contents(&file) == before), (0, true));
        snapshot::create(&mut open(&file), "good", (0, 0)).unwrap();
        put(&file, 64, 1 << 50);
        repaired(&file, "a snapshot table behind the end");
        assert_eq!(open(&file).header().snapshots, 0);
        let directory = open(&file).header().bitmaps.unwrap().directory_offset;
        let (table, l2) =
            (get(&file, directory), l2_entry(&file, 3).0 / options.cluster_size * options.cluster_size);
        put(&file, table, l2);
        repaired(&file, "bits over an L2 table");
        assert_eq!((open(&file).header().bitmaps, contents(&file) == before), (None, true));
    }
}

#[test]
fn a_dirty_image_is_repaired_and_closed() {
    let file = filled(&Options { lazy_refcounts: true, cluster_size: 512, ..Options::new(SIZE) });
    let before = contents(&file);
    let cluster = (l2_entry(&file, 0).1 & OFFSET) / 512;
    set_count(&file, cluster, 0);
    put(&file, 72, incompatible::DIRTY);
    assert!(open(&file).header().has(incompatible::DIRTY));
    repaired(&file, "dirty");
    assert!(!open(&file).header().has(incompatible::DIRTY));
    assert_eq!(contents(&file), before);
}

#[test]
fn two_that_refer_to_one_cluster_share_it() {
    let file = filled(&Options { cluster_size: 512, ..Options::new(SIZE) });
    let ((at, _), (_, e)) = (l2_entry(&file, 3), l2_entry(&file, 0));
    put(&file, at, e);
    repaired(&file, "two on one");
    assert_eq!((contents(&file)[&3], contents(&file)[&0]), ((99, 99), (99, 99)));
    assert!([0, 3].iter().all(|c| l2_entry(&file, *c).1 & COPIED == 0));
}

#[test]
fn bits_flipped_anywhere_are_repaired_or_refused() {
    let mut repaired = 0;
    for (seed, options) in (1..).zip(kinds(SIZE)) {
        let file = filled(&Options { preallocation: Preallocation::Off, ..options });
        let good = file.bytes();
        let mut random = Rng::new(seed);
        for iteration in 0..300 {
            let mut bytes = good.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len() as u64) as usize;
                // Near the start of a cluster, where entries are.
                let at = if random.below(2) == 0 { at } else { at / 512 * 512 + at % 16 };
                bytes[at] ^= 1 << random.below(8);
            }
            let file = Memory::new(bytes, 64 << 20);
            let Ok(found) = check(&file, Repair::No, &mut Quiet) else { continue };
            if found.is_clean() {
                continue;
            }
            let r = check(&file, Repair::All, &mut Quiet).unwrap();
            assert!(r.is_clean(), "seed {seed}, iteration {iteration}: {found:?} became {r:?}");
            repaired += 1;
        }
    }
    assert!(repaired > 100, "{repaired} were corrupt: the test tests little");
}

#[test]
fn an_l1_entry_without_a_table_has_no_flag() {
    for options in kinds(SIZE) {
        let file = filled(&options);
        let header = open(&file).header().clone();
        let before = contents(&file);
        // An entry behind the tables of the disk, in its own table and in that of the snapshot.
        let last = header.l1_offset + u64::from(header.l1_size) * 8 - 8;
        let table = get(&file, last);
        let of_snapshot = snapshot::read_table(&open(&file)).unwrap().0[0].l1_offset;
        for (at, what) in [(last, "the active table"), (of_snapshot, "the table of a snapshot")] {
            let old = get(&file, at);
            put(&file, at, COPIED);
            repaired(&file, &format!("{options:?}: {what}"));
            assert_eq!(get(&file, at), 0, "{options:?}: {what}");
            // The old target has no reference any more.
            assert!(old == 0 || check(&file, Repair::No, &mut Quiet).unwrap().is_clean());
        }
        if table == 0 {
            assert_eq!(contents(&file), before, "{options:?}");
        }
    }
}

#[test]
fn a_place_of_no_snapshots_is_repaired() {
    for options in kinds(SIZE) {
        for wrong in [0x201, 1 << 50, u64::MAX - 511] {
            let file = new(&options);
            write(&mut open(&file), 1, 7, false);
            let before = contents(&file);
            assert_eq!(open(&file).header().snapshots, 0);
            put(&file, 64, wrong);
            repaired(&file, &format!("{options:?}: a snapshot table at {wrong:#x}"));
            let header = open(&file).header().clone();
            assert_eq!((header.snapshots, header.snapshots_offset), (0, 0), "{options:?}: {wrong:#x}");
            assert_eq!(contents(&file), before);
        }
    }
}
