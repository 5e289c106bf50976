use super::*;
use crate::create::Options;
use crate::memory::Memory;
use crate::resize::{Around, resize};
use crate::snapshot;
use crate::testing::{Rng, assert_clean, crash, kinds, new, write};

const SIZE: u64 = (4 << 20) + 512;

fn open(file: &Memory) -> Image<'_> {
    Image::open(file).unwrap()
}

fn names(file: &Memory) -> Vec<(String, u32)> {
    read_directory(&open(file)).unwrap().iter().map(|b| (b.name(), b.flags)).collect()
}

/// Replaces the bits of a bitmap.
pub(crate) fn put(image: &mut Image<'_>, name: &str, bits: &Bits) -> Result<()> {
    let mut all = load_all(image)?;
    all.iter_mut().find(|b| b.name == name).expect("it is there").bits = bits.clone();
    store(image, all)
}

#[test]
fn bits_are_those_of_the_ranges() {
    let mut random = Rng::new(1);
    for granularity_bits in [9, 12, 16] {
        let (mut bits, mut model) =
            (Bits::new(SIZE, granularity_bits).unwrap(), vec![false; SIZE as usize >> 9]);
        for _ in 0..20 {
            let (at, n) = (random.below(SIZE + 4096), random.below(200_000));
            bits.set_range(at, n);
            for sector in (0..model.len() as u64).filter(|s| n > 0 && s * 512 < at + n && at < (s + 1) * 512)
            {
                model[sector as usize] = true;
            }
        }
        for at in 0..bits.len() {
            let sectors = 1usize << (granularity_bits - 9);
            let from = at as usize * sectors;
            let want = model[from..(from + sectors).min(model.len())].iter().any(|b| *b);
            assert_eq!(bits.get(at), want, "{granularity_bits} {at}");
        }
        let mut other = Bits::new(SIZE, 10).unwrap();
        other.merge(&bits).unwrap();
        for at in 0..bits.len() {
            let offset = at << granularity_bits;
            assert!(!bits.get(at) || other.get(offset >> 10));
        }
        assert!(other.merge(&Bits::new(SIZE + 512, 10).unwrap()).is_err());
    }
    assert!(Bits::new(1 << 50, 9).is_err());
}

#[test]
fn stored_bits_are_loaded_again() {
    for (seed, options) in (1..).zip(kinds(SIZE)).filter(|(_, o)| o.version == 3) {
        let file = new(&options);
        let mut random = Rng::new(seed);
        write(&mut open(&file), 0, 1, false);
        add(&mut open(&file), "a", Some(9), true).unwrap();
        add(&mut open(&file), "b", None, false).unwrap();
        assert_eq!(names(&file), [("a".into(), flag::AUTO), ("b".into(), 0)]);
        for _ in 0..5 {
            let mut bits = Bits::new(SIZE, 9).unwrap();
            for _ in 0..random.below(4) {
                bits.set_range(random.below(SIZE), random.below(SIZE));
            }
            mark_in_use(&mut open(&file)).unwrap();
            assert_eq!(names(&file)[0].1, flag::AUTO | flag::IN_USE);
            assert!(load(&open(&file), "a").is_err());
            put(&mut open(&file), "a", &bits).unwrap();
            assert_eq!(load(&open(&file), "a").unwrap(), bits);
            assert_clean(&file, &format!("{options:?}"));
        }
        let mut all = load(&open(&file), "b").unwrap();
        all.set_range(0, SIZE);
        merge(&mut open(&file), "b", &load(&open(&file), "a").unwrap()).unwrap();
        merge(&mut open(&file), "b", &all).unwrap();
        assert_eq!(load(&open(&file), "b").unwrap(), all);
        clear(&mut open(&file), "b").unwrap();
        enable(&mut open(&file), "b", true).unwrap();
        assert_eq!(load(&open(&file), "b").unwrap(), Bits::new(SIZE, all.granularity_bits()).unwrap());
        remove(&mut open(&file), "a").unwrap();
        assert_eq!(names(&file), [("b".into(), flag::AUTO)]);
        remove(&mut open(&file), "b").unwrap();
        assert_eq!(open(&file).header.bitmaps, None);
        assert_clean(&file, "without bitmaps");
    }
}

#[test]
fn a_crash_leaves_the_bits_before_or_after() {
    for (seed, options) in (1..).zip(kinds(SIZE)).filter(|(_, o)| o.version == 3) {
        let file = new(&options);
        add(&mut open(&file), "a", Some(9), true).unwrap();
        let old = load(&open(&file), "a").unwrap();
        let mut bits = Bits::new(SIZE, 9).unwrap();
        bits.set_range(5000, 3 << 20);
        let change = |i: &mut Image<'_>| put(i, "a", &bits).unwrap();
        crash(&file, seed, change, |f, of| {
            let now = load(&open(f), "a").unwrap();
            assert!(now == old || now == bits, "{of}");
        });
        crash(
            &file,
            seed,
            |i| add(i, "second", None, false).unwrap(),
            |f, of| {
                assert_eq!(load(&open(f), "a").unwrap(), bits, "{of}");
            },
        );
    }
}

#[test]
fn a_disk_of_another_size_has_bits_of_it() {
    let file = new(&Options { cluster_size: 512, ..Options::new(SIZE) });
    add(&mut open(&file), "a", Some(9), false).unwrap();
    add(&mut open(&file), "t", Some(12), true).unwrap();
    let mut bits = load(&open(&file), "a").unwrap();
    bits.set_range(SIZE - 1, 1);
    bits.set_range(0, 1);
    put(&mut open(&file), "a", &bits).unwrap();
    snapshot::create(&mut open(&file), "s", (0, 0)).unwrap();
    let around = Around { data: None, below: None, preallocation: Default::default() };
    for size in [SIZE * 3, SIZE - 512, 512] {
        resize(&mut open(&file), size, &around, &mut |_, _| {}).unwrap();
        assert_clean(&file, &format!("{size}"));
        let now = load(&open(&file), "a").unwrap();
        assert_eq!((now.get(0), now.get(SIZE / 512 - 1), now.len()), (true, size > SIZE, size / 512));
    }
    snapshot::apply(&mut open(&file), "s").unwrap();
    let (a, t) = (load(&open(&file), "a").unwrap(), load(&open(&file), "t").unwrap());
    assert_eq!((a.size(), a.get(1), t.size()), (SIZE, false, SIZE));
    assert!((0..t.len()).all(|at| t.get(at)), "everything was written, as far as one knows");
    assert_clean(&file, "applied");
}

#[test]
fn what_cannot_be_is_refused() {
    let file = new(&Options::new(SIZE));
    add(&mut open(&file), "a", None, true).unwrap();
    for (e, says) in [
        (add(&mut open(&file), "a", None, true), "already"),
        (add(&mut open(&file), "", None, true), "name"),
        (add(&mut open(&file), &"x".repeat(1024), None, true), "name"),
        (add(&mut open(&file), "g", Some(8), true), "granularity"),
        (remove(&mut open(&file), "b"), "no bitmap b"),
        (put(&mut open(&file), "a", &Bits::new(SIZE + 512, 9).unwrap()), "size"),
    ] {
        let e = e.unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
    let old = new(&Options { version: 2, ..Options::new(SIZE) });
    assert!(add(&mut open(&old), "a", None, true).is_err());
}

fn loaded(name: &str, bits: &Bits, enabled: bool, inconsistent: bool) -> Loaded {
    Loaded { name: name.into(), bits: bits.clone(), enabled, inconsistent, missed: false }
}

#[test]
fn those_of_a_served_disk_come_and_go() {
    for options in kinds(SIZE).into_iter().filter(|o| o.version == 3) {
        let file = new(&options);
        assert_eq!(load_all(&open(&file)).unwrap(), []);
        mark_in_use(&mut open(&file)).unwrap();
        for (name, enabled) in [("a", true), ("b", false), ("c", true)] {
            add(&mut open(&file), name, Some(12), enabled).unwrap();
        }
        let mut all = load_all(&open(&file)).unwrap();
        let empty = Bits::new(SIZE, 12).unwrap();
        assert_eq!(all, [("a", true), ("b", false), ("c", true)].map(|(n, e)| loaded(n, &empty, e, false)));
        mark_in_use(&mut open(&file)).unwrap();
        assert!(names(&file).iter().all(|(_, flags)| flags & flag::IN_USE != 0));
        all[0].bits.set_range(100_000, 5000);
        all[0].bits = Bits::of(SIZE, 12, all[0].bits.bytes().to_vec()).unwrap();
        all[1].enabled = true;
        // One is removed, one is replaced by another of the same name, one is new.
        all[2] = loaded("c", &Bits::new(SIZE, 9).unwrap(), false, false);
        all.push(loaded("new", &all[0].bits, true, false));
        all.remove(1);
        store(&mut open(&file), all.clone()).unwrap();
        assert_eq!(load_all(&open(&file)).unwrap(), all);
        assert_eq!(names(&file), [("a".into(), flag::AUTO), ("c".into(), 0), ("new".into(), flag::AUTO)]);
        assert_clean(&file, &format!("{options:?}"));
        crate::testing::qemu_agrees(&file, &format!("{options:?}"));
        let twice = vec![all[0].clone(), all[0].clone()];
        assert!(store(&mut open(&file), twice).unwrap_err().to_string().contains("two"));
        store(&mut open(&file), vec![]).unwrap();
        assert_eq!(open(&file).header.bitmaps, None);
        assert_clean(&file, "without");
    }
}

#[test]
fn those_that_were_not_written_back_have_all_bits_set() {
    let file = new(&Options::new(SIZE));
    add(&mut open(&file), "a", Some(12), true).unwrap();
    add(&mut open(&file), "b", Some(12), false).unwrap();
    mark_in_use(&mut open(&file)).unwrap();
    let mut ones = Bits::new(SIZE, 12).unwrap();
    ones.set_range(0, SIZE);
    let mut all = load_all(&open(&file)).unwrap();
    assert_eq!(all, [loaded("a", &ones, true, true), loaded("b", &ones, false, true)]);
    // Missed writes have the same effect as a crash.
    all[0].bits = Bits::new(SIZE, 12).unwrap();
    all[0].missed = true;
    store(&mut open(&file), all).unwrap();
    assert_eq!(names(&file), [("a".into(), flag::AUTO | flag::IN_USE), ("b".into(), 0)]);
    let all = load_all(&open(&file)).unwrap();
    assert_eq!(all, [loaded("a", &ones, true, true), loaded("b", &ones, false, false)]);
    // It is then valid again.
    store(&mut open(&file), all).unwrap();
    assert_eq!(load(&open(&file), "a").unwrap(), ones);
    assert_clean(&file, "inconsistent");
}

#[test]
fn a_crash_while_they_are_marked_or_stored_misses_nothing() {
    for (seed, options) in (1..).zip(kinds(SIZE)).filter(|(_, o)| o.version == 3) {
        let file = new(&options);
        add(&mut open(&file), "a", Some(9), true).unwrap();
        let empty = load(&open(&file), "a").unwrap();
        crash(
            &file,
            seed,
            |i| mark_in_use(i).unwrap(),
            |f, of| {
                let a = load_all(&open(f)).unwrap().remove(0);
                assert!(a.inconsistent || a.bits == empty, "{of}");
            },
        );
        let mut bits = empty;
        bits.set_range(5000, 3 << 20);
        crash(
            &file,
            seed,
            |i| put(i, "a", &bits).unwrap(),
            |f, of| {
                let a = load_all(&open(f)).unwrap().remove(0);
                assert!(a.inconsistent || a.bits == bits, "{of}");
            },
        );
    }
}

#[test]
fn many_and_fine_ones_are_refused() {
    // 64 MiB of bits each, which take no room in the file.
    let file = new(&Options::new(1 << 38));
    for name in ["1", "2", "3", "4", "5", "6", "7", "8", "9"] {
        add(&mut open(&file), name, Some(9), false).unwrap();
    }
    assert!(load_all(&open(&file)).unwrap_err().to_string().contains("memory"));
}
