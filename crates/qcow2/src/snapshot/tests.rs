use super::*;
use crate::create::Options;
use crate::journal;
use crate::memory::Memory;
use crate::testing::{Rng, assert_clean, contents, crash, kinds, new, write};

const SIZE: u64 = 256 << 10;

fn open(file: &Memory) -> Image<'_> {
    Image::open(file).unwrap()
}

fn fill(file: &Memory, options: &Options, seed: u64, clusters: u64) {
    let mut random = Rng::new(seed);
    for _ in 0..clusters {
        let cluster = random.below(SIZE / options.cluster_size);
        let compressed = random.below(4) == 0;
        write(&mut open(file), cluster, random.next() as u8 | 1, compressed);
    }
    assert_clean(file, &format!("{options:?}"));
}

#[test]
fn an_image_that_was_not_closed_is_not_changed() {
    for version in [2, 3] {
        let file = new(&Options { version, ..Options::new(SIZE) });
        journal::mark_open_without_journal(&file, true).unwrap();
        let before = file.bytes();
        assert!(create(&mut open(&file), "s", (1, 7)).is_err(), "version {version}");
        assert!(file.bytes() == before);
        journal::mark_closed(&file).unwrap();
        create(&mut open(&file), "s", (1, 7)).unwrap();
    }
}

#[test]
fn taken_applied_and_deleted_in_any_order() {
    for (seed, options) in (1..).zip(kinds(SIZE)) {
        let file = new(&options);
        let mut random = Rng::new(seed);
        let mut was = Vec::new();
        for step in 0..25 {
            let of = format!("{options:?}, step {step}");
            match random.below(4) {
                0 | 1 => fill(&file, &options, random.next(), 4),
                2 if was.len() < 5 => {
                    let name = format!("s{step}");
                    create(&mut open(&file), &name, (step, 7)).unwrap();
                    was.push((name, contents(&file)));
                }
                _ if was.is_empty() => {}
                _ => {
                    let at = random.below(was.len() as u64) as usize;
                    if random.below(2) == 0 {
                        apply(&mut open(&file), &was[at].0).unwrap();
                        assert_eq!(contents(&file), was[at].1, "{of}");
                    } else {
                        let before = contents(&file);
                        delete(&mut open(&file), &was.remove(at).0).unwrap();
                        assert_eq!(contents(&file), before, "{of}");
                    }
                }
            }
            assert_clean(&file, &of);
            let (list, _) = read_table(&open(&file)).unwrap();
            let names: Vec<String> = list.iter().map(Snapshot::name).collect();
            assert_eq!(names, was.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_crash_leaves_the_image_before_or_after() {
    for (seed, options) in (1..).zip(kinds(SIZE)) {
        let file = new(&options);
        fill(&file, &options, seed, 12);
        let first = contents(&file);
        crash(
            &file,
            seed,
            |i| drop(create(i, "one", (1, 2)).unwrap()),
            |f, of| assert_eq!(contents(f), first, "{of}"),
        );
        fill(&file, &options, seed + 100, 6);
        let second = contents(&file);
        crash(
            &file,
            seed,
            |i| apply(i, "one").unwrap(),
            |f, of| {
                let now = contents(f);
                assert!(now == first || now == second, "{of}");
            },
        );
        crash(&file, seed, |i| delete(i, "one").unwrap(), |f, of| assert_eq!(contents(f), first, "{of}"));
        assert_clean(&file, "at the end");
    }
}

#[test]
fn a_snapshot_keeps_its_size() {
    let file = new(&Options { cluster_size: 512, ..Options::new(SIZE) });
    write(&mut open(&file), 3, 9, false);
    create(&mut open(&file), "small", (0, 0)).unwrap();
    let around = crate::resize::Around { data: None, below: None, preallocation: Default::default() };
    crate::resize::resize(&mut open(&file), 64 * SIZE, &around, &mut |_, _| {}).unwrap();
    write(&mut open(&file), 60 * SIZE / 512, 8, false);
    assert_clean(&file, "grown");
    create(&mut open(&file), "large", (0, 0)).unwrap();
    apply(&mut open(&file), "small").unwrap();
    assert_eq!((open(&file).header.size, contents(&file).len()), (SIZE, 1));
    apply(&mut open(&file), "large").unwrap();
    assert_eq!((open(&file).header.size, contents(&file).len()), (64 * SIZE, 2));
    assert_clean(&file, "at the end");
}

#[test]
fn what_cannot_be_is_refused() {
    let file = new(&Options { refcount_bits: 1, ..Options::new(SIZE) });
    write(&mut open(&file), 0, 1, false);
    let before = file.bytes();
    let e = create(&mut open(&file), "x", (0, 0)).unwrap_err().to_string();
    assert!(e.contains("refcount_bits"), "{e}");
    for e in [apply(&mut open(&file), "x").unwrap_err(), delete(&mut open(&file), "1").unwrap_err()] {
        assert!(e.to_string().contains("there is no snapshot"), "{e}");
    }
    assert!(create(&mut open(&file), "", (0, 0)).is_err());
    assert!(create(&mut open(&file), &"x".repeat(256), (0, 0)).is_err());
    assert_eq!(file.bytes()[..before.len().min(65536)], before[..65536]);
    assert_clean(&file, "refused");
}
