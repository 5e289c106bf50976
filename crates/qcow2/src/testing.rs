//! Helpers for the tests of this crate: images with data, and the states that a crash at any point
//! can leave.

#[cfg(not(loom))]
pub(crate) mod drive;
mod random;

use std::collections::BTreeMap;

use crate::change::Change;
use crate::check::{CheckResult, Quiet, Repair, check};
use crate::create::{Options, create};
use crate::entry::{COMPRESSED, COPIED, Compressed, OFFSET, ZERO};
use crate::memory::{Event, Memory};
use crate::{Image, Storage, image};
pub(crate) use random::Rng;

pub(crate) fn new(options: &Options) -> Memory {
    let file = Memory::new(Vec::new(), 64 << 20);
    create(&file, None, options, &mut |_, _| {}).unwrap();
    file
}

/// Returns kinds of images that differ in the layout of their tables.
pub(crate) fn kinds(size: u64) -> Vec<Options> {
    let o = || Options::new(size);
    vec![
        Options { cluster_size: 512, ..o() },
        Options { cluster_size: 512, refcount_bits: 64, ..o() },
        Options { cluster_size: 1024, refcount_bits: 8, lazy_refcounts: true, ..o() },
        Options { cluster_size: 4096, version: 2, ..o() },
        Options { cluster_size: 1 << 14, extended_l2: true, ..o() },
    ]
}

/// Writes a cluster of one byte as a guest would, or a compressed one of 600 meaningless bytes.
pub(crate) fn write(image: &mut Image<'_>, cluster: u64, byte: u8, compressed: bool) {
    let mut header = image.header.clone();
    let (size, per) = (header.cluster_size(), header.l2_entries());
    let mut change = Change::start(image).unwrap();
    let words = change.words();
    let mut l1 = change.l1().unwrap();
    let e = &mut l1[(cluster / per) as usize];
    let mut table = vec![0; per as usize * words];
    if *e & OFFSET != 0 {
        table = change.l2(*e & OFFSET).unwrap();
        change.release(*e & OFFSET, 1).unwrap();
    }
    let slot = (cluster % per) as usize * words;
    for old in change.referred(table[slot]) {
        change.add(old, false).unwrap();
    }
    let bytes = if compressed { 600 } else { size };
    let at = change.put(vec![byte; bytes as usize]).unwrap();
    table[slot] = if compressed { Compressed::entry(at, bytes, header.cluster_bits) } else { at | COPIED };
    if words == 2 {
        table[slot + 1] = if compressed { 0 } else { 0xffff_ffff };
    }
    *e = change.put(image::to_bytes(&table)).unwrap();
    change.set_flags(&mut l1).unwrap();
    change.replace_l1(&l1, &mut header).unwrap();
    change.commit(header).unwrap();
}

/// Returns the first and the last byte of each cluster of the disk that has data, and of compressed
/// ones the first byte.
pub(crate) fn contents(file: &dyn Storage) -> BTreeMap<u64, (u8, u8)> {
    let image = Image::open(file).unwrap();
    let h = &image.header;
    let l1 = image.table(h.l1_offset, u64::from(h.l1_size), "L1").unwrap();
    let (words, mut all) = (h.l2_entry_bytes() as usize / 8, BTreeMap::new());
    for cluster in 0..h.clusters() {
        let at = l1[(cluster / h.l2_entries()) as usize] & OFFSET;
        if at == 0 {
            continue;
        }
        let table = image::words(&image.read(at, h.cluster_size(), "L2").unwrap());
        let e = table[(cluster % h.l2_entries()) as usize * words];
        let read = |at: u64| {
            let mut byte = [0];
            file.read_at(at, &mut byte).unwrap();
            byte[0]
        };
        if e & COMPRESSED != 0 {
            let at = Compressed::of(e, h.cluster_bits).offset;
            all.insert(cluster, (read(at), read(at)));
        } else if e & OFFSET != 0 && e & ZERO == 0 {
            let at = e & OFFSET;
            all.insert(cluster, (read(at), read(at + h.cluster_size() - 1)));
        }
    }
    all
}

pub(crate) fn checked(file: &dyn Storage) -> CheckResult {
    struct Print;
    impl crate::check::Findings for Print {
        fn found(&mut self, text: &str) {
            println!("{text}");
        }
        fn progress(&mut self, _: u64, _: u64) {}
    }
    check(file, Repair::No, &mut Print).unwrap()
}

pub(crate) fn assert_clean(file: &dyn Storage, of: &str) {
    let r = checked(file);
    assert!(r.is_clean(), "{of}: {r:?}");
}

/// Number of images of one crash test, out of some two thousand, that QEMU checks, too.
const QEMU_CHECKS: u64 = 6;

/// Reads the disk with QEMU, if there is a qemu-img.
#[cfg(not(loom))]
pub(crate) fn qemu_contents(file: &Memory) -> Option<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let (image, raw) = (dir.path().join("disk.qcow2"), dir.path().join("disk.raw"));
    std::fs::write(&image, file.bytes()).unwrap();
    let mut convert = std::process::Command::new("qemu-img");
    let done = convert.args(["convert", "-f", "qcow2", "-O", "raw"]).args([&image, &raw]).output().ok()?;
    assert!(done.status.success(), "{done:?}");
    Some(std::fs::read(&raw).unwrap())
}

/// Checks that `qemu-img check` finds no corruption, if there is a qemu-img (tests/image reports if
/// there is none).
pub(crate) fn qemu_agrees(file: &Memory, of: &str) {
    use std::process::Command;
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let n = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("vshunt-qcow2-{}-{n}", std::process::id()));
    std::fs::write(&path, file.bytes()).unwrap();
    let done = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    let Ok(done) = done else { return };
    // 3: leaks, which are allowed.
    assert!(matches!(done.status.code(), Some(0 | 3)), "{of}: {done:?}");
}

/// Makes `change` to the image, and then checks the states that a crash at any point can leave:
/// after each write, and with writes lost that were not on stable storage yet. `same` has to hold
/// for each state.
pub(crate) fn crash(
    file: &Memory,
    seed: u64,
    change: impl FnOnce(&mut Image<'_>),
    same: impl FnMut(&Memory, &str),
) {
    let before = file.bytes();
    file.record();
    change(&mut Image::open(file).unwrap());
    let events = file.events();
    assert!(events.contains(&Event::Sync));
    assert_clean(file, "after the change");
    crashes(&before, &events, seed, same);
}

/// Checks the states after each of the events.
pub(crate) fn crashes(before: &[u8], events: &[Event], seed: u64, mut same: impl FnMut(&Memory, &str)) {
    let mut random = Rng::new(seed);
    let (mut synced, mut number) = (0, 0);
    for at in 0..=events.len() {
        let orders = if at > synced { 3 } else { 1 };
        for order in 0..orders {
            let there = Memory::new(before.to_vec(), 64 << 20);
            for (n, event) in events[..at].iter().enumerate() {
                if n < synced || order == 0 || random.below(2) == 0 {
                    there.apply(event).unwrap();
                }
            }
            let of = format!("event {at} of {}, order {order}, seed {seed}", events.len());
            let r = check(&there, Repair::No, &mut Quiet).unwrap();
            assert_eq!((r.corruptions, r.check_errors), (0, 0), "{of}");
            same(&there, &of);
            if random.below(events.len() as u64) < QEMU_CHECKS {
                qemu_agrees(&there, &of);
            }
            number += 1;
        }
        if events.get(at) == Some(&Event::Sync) {
            synced = at;
        }
    }
    assert!(number > events.len());
}
