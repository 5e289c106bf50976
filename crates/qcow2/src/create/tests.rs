use super::*;
use crate::check::{Repair, check};
use crate::memory::Memory;

fn made(options: &Options) -> Memory {
    let file = Memory::new(Vec::new(), 64 << 20);
    create(&file, None, options, &mut |_, _| {}).unwrap();
    file
}

#[test]
fn what_is_made_is_clean_and_says_what_was_asked_for() {
    for cluster_size in [512, 4096, 65536, 2 << 20] {
        for refcount_bits in [1, 2, 16, 64] {
            for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Full] {
                for extended_l2 in [false, true] {
                    let o = Options {
                        cluster_size,
                        refcount_bits,
                        preallocation,
                        extended_l2: extended_l2 && cluster_size >= 1 << 14,
                        ..Options::new((1 << 20) + 512)
                    };
                    let file = made(&o);
                    let header = Header::parse(&file.bytes()).unwrap();
                    assert_eq!((header.size, header.cluster_size()), (o.size, cluster_size));
                    let r = check(&file, Repair::No, &mut crate::check::Quiet).unwrap();
                    assert_eq!((r.corruptions, r.leaks, r.check_errors), (0, 0, 0), "{o:?}");
                    assert_eq!(r.image_end_offset, file.bytes().len() as u64, "{o:?}");
                    let all = (o.size).div_ceil(cluster_size);
                    assert_eq!(r.total_clusters, all);
                    let allocated = if preallocation == Preallocation::Off { 0 } else { all };
                    assert_eq!((r.allocated_clusters, r.fragmented_clusters), (allocated, 0), "{o:?}");
                }
            }
        }
    }
}

#[test]
fn an_image_is_correct_before_its_space_is_reserved() {
    let o = Options { preallocation: Preallocation::Full, ..Options::new(20 << 20) };
    let file = Memory::new(Vec::new(), 64 << 20);
    let mut steps = 0;
    create(&file, None, &o, &mut |done, all| {
        steps += 1;
        let r = check(&file, Repair::No, &mut crate::check::Quiet).unwrap();
        assert_eq!((r.corruptions, r.leaks, r.check_errors), (0, 0, 0), "{done} of {all} bytes");
    })
    .unwrap();
    assert_eq!(steps, 3);
}

#[test]
fn what_contradicts_itself_is_refused() {
    let new = || Options::new(1 << 20);
    let backing = || Some(("base".to_owned(), "raw".to_owned()));
    let data = |raw| Some(DataFile { name: "data".into(), raw });
    for (options, says) in [
        (Options { cluster_size: 1000, ..new() }, "cluster_size=1000"),
        (Options { cluster_size: 256, ..new() }, "cluster_size=256"),
        (Options { cluster_size: 4 << 20, ..new() }, "cluster_size="),
        (Options { refcount_bits: 3, ..new() }, "refcount_bits=3"),
        (Options { refcount_bits: 128, ..new() }, "refcount_bits=128"),
        (Options { version: 2, refcount_bits: 8, ..new() }, "refcount_bits"),
        (Options { version: 2, lazy_refcounts: true, ..new() }, "lazy_refcounts"),
        (Options { version: 2, data_file: data(false), ..new() }, "data_file"),
        (Options { version: 2, compression: Compression::Zstd, ..new() }, "zstd"),
        (Options { extended_l2: true, cluster_size: 8192, ..new() }, "16K"),
        (Options { data_file: data(true), backing: backing(), ..new() }, "data_file_raw"),
        (Options { preallocation: Preallocation::Metadata, backing: backing(), ..new() }, "extended_l2"),
        (Options { keep_data_file: true, ..new() }, "needs data_file"),
        (Options { keep_data_file: true, data_file: data(false), ..new() }, "preallocation=metadata"),
        (
            Options {
                keep_data_file: true,
                data_file: data(true),
                preallocation: Preallocation::Falloc,
                ..new()
            },
            "overwritten",
        ),
        (
            Options {
                keep_data_file: true,
                data_file: data(false),
                preallocation: Preallocation::Metadata,
                extended_l2: true,
                backing: backing(),
                ..new()
            },
            "hidden",
        ),
        (Options { cluster_size: 512, ..Options::new(1 << 40) }, "too large"),
        (Options::new(u64::MAX), "too large"),
        (Options { backing: Some(("x".repeat(2000), "raw".into())), ..new() }, "1023"),
        (
            Options { cluster_size: 512, backing: Some(("x".repeat(600), "raw".into())), ..new() },
            "larger clusters",
        ),
    ] {
        let file = Memory::new(Vec::new(), 1 << 20);
        let e = create(&file, None, &options, &mut |_, _| {}).unwrap_err().to_string();
        assert!(e.contains(says), "{options:?}: {e}");
        assert!(file.bytes().is_empty(), "{e}: the file was touched");
    }
}

#[test]
fn the_header_comes_last() {
    let file = Memory::new(Vec::new(), 8 << 20);
    file.record();
    create(
        &file,
        None,
        &Options { preallocation: Preallocation::Metadata, ..Options::new(1 << 20) },
        &mut |_, _| {},
    )
    .unwrap();
    use crate::memory::Event;
    let events = file.events();
    let at = events.iter().position(|e| matches!(e, Event::Write(0, _))).unwrap();
    assert_eq!(events[at - 1], Event::Sync);
    assert_eq!(events[at + 1..], [Event::Sync]);
}

#[test]
fn a_raw_data_file_has_all_its_places() {
    let (file, data) = (Memory::new(Vec::new(), 8 << 20), Memory::new(Vec::new(), 8 << 20));
    let options =
        Options { data_file: Some(DataFile { name: "d.raw".into(), raw: true }), ..Options::new(1 << 20) };
    create(&file, Some(&data), &options, &mut |_, _| {}).unwrap();
    assert_eq!(data.bytes().len(), 1 << 20);
    let r = check(&file, Repair::No, &mut crate::check::Quiet).unwrap();
    assert_eq!((r.corruptions, r.allocated_clusters), (0, 16));
}

#[test]
fn a_data_file_that_is_kept_has_its_contents_and_at_least_the_size_of_the_disk() {
    for (bytes, after) in [(1000, 1 << 20), (2 << 20, 2 << 20)] {
        let (file, data) = (Memory::new(Vec::new(), 8 << 20), Memory::new(vec![7; bytes], 8 << 20));
        let data_file = Some(DataFile { name: "d.raw".into(), raw: true });
        let options = Options { data_file, keep_data_file: true, ..Options::new(1 << 20) };
        create(&file, Some(&data), &options, &mut |_, _| {}).unwrap();
        let kept = data.bytes();
        assert!(kept[..bytes].iter().all(|b| *b == 7) && kept[bytes..].iter().all(|b| *b == 0));
        assert_eq!(kept.len(), after);
    }
}
