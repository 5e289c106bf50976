use super::*;
use crate::create::{DataFile, Options};
use crate::header::Compression;
use crate::memory::Memory;
use crate::request::EINVAL;
use crate::testing::{self, Rng, drive::Disk};
use crate::{Image, Step, Storage};

const SIZE: u64 = 1 << 20;

/// Returns bytes that can be compressed to about a quarter, or not at all.
fn some(len: u64, seed: u64, packs: bool) -> Vec<u8> {
    let mut random = Rng::new(seed);
    let noise = (0..len).map(|at| if packs && at % 4 > 0 { 7 } else { random.next() as u8 });
    noise.collect()
}

fn kinds() -> Vec<Options> {
    let o = || Options::new(SIZE + 1536);
    vec![
        Options { cluster_size: 512, ..o() },
        Options { cluster_size: 4096, ..o() },
        Options { cluster_size: 4096, refcount_bits: 1, ..o() },
        Options { cluster_size: 4096, refcount_bits: 2, compression: Compression::Zstd, ..o() },
        Options { cluster_size: 1 << 14, version: 2, ..o() },
        Options { cluster_size: 1 << 14, extended_l2: true, refcount_bits: 64, ..o() },
        Options { compression: Compression::Zstd, ..o() },
        Options { cluster_size: 1 << 18, ..o() },
    ]
}

/// Returns the clusters of a disk as start and length.
fn clusters(options: &Options) -> impl Iterator<Item = (u64, u64)> + use<> {
    let (size, cluster) = (options.size, options.cluster_size);
    (0..size.div_ceil(cluster)).map(move |n| (n * cluster, cluster.min(size - n * cluster)))
}

fn pack(disk: &mut Disk, pos: u64, bytes: &[u8]) -> i32 {
    disk.run(Op::WriteCompressed, pos, bytes.to_vec(), bytes.len() as u64).0
}

#[test]
fn what_is_packed_reads_as_it_was() {
    for options in kinds() {
        let file = testing::new(&options);
        let mut disk = Disk::open(file, None);
        let mut all = Vec::new();
        for (n, (pos, len)) in clusters(&options).enumerate() {
            let bytes = some(len, pos, n % 5 != 4);
            assert_eq!(pack(&mut disk, pos, &bytes), 0, "{options:?}");
            all.extend_from_slice(&bytes);
        }
        assert!(disk.read(0, options.size) == all, "{options:?}");
        let file = disk.close();
        testing::assert_clean(&*file, &format!("{options:?}"));
        testing::qemu_agrees(&file, &format!("{options:?}"));
        assert!(testing::qemu_contents(&file).is_none_or(|theirs| theirs == all), "{options:?}");
        let found = testing::checked(&*file);
        assert_eq!(found.compressed_clusters > 0, options.cluster_size > 512, "{options:?}");
        if options.refcount_bits > 1 && (4096..1 << 16).contains(&options.cluster_size) {
            assert!(found.image_end_offset < SIZE / 4 * 3, "{options:?}: {} bytes", found.image_end_offset);
        }
        let mut disk = Disk::open(Memory::new(file.bytes(), 64 << 20), None);
        assert!(disk.read(0, options.size) == all, "{options:?}");
    }
}

#[test]
fn pieces_go_when_their_clusters_do() {
    for options in kinds() {
        let mut random = Rng::new(3);
        let mut disk = Disk::open(testing::new(&options), None);
        let mut all = vec![0; options.size as usize];
        for round in 0..4 {
            for (pos, len) in clusters(&options) {
                let range = pos as usize..(pos + len) as usize;
                match random.below(8) {
                    0..4 => {
                        // Some are allocated already.
                        let bytes = some(len, random.next(), true);
                        assert_eq!(pack(&mut disk, pos, &bytes), 0);
                        all[range].copy_from_slice(&bytes);
                    }
                    4 => {
                        disk.write(pos, &[round; 512]);
                        all[range][..512].fill(round);
                    }
                    5 | 6 => {
                        disk.other(Op::Discard, pos, len);
                        all[range].fill(0);
                    }
                    _ => disk.other(Op::Flush, 0, 0),
                }
            }
            assert!(disk.read(0, options.size) == all, "{options:?}");
        }
        let file = disk.close();
        testing::assert_clean(&*file, &format!("{options:?}"));
        testing::qemu_agrees(&file, &format!("{options:?}"));
    }
}

#[test]
fn a_crash_leaks_at_worst() {
    for options in kinds() {
        let file = testing::new(&options);
        let before = file.bytes();
        file.record();
        let mut disk = Disk::open(file, None);
        for (n, (pos, len)) in clusters(&options).take(20).enumerate() {
            assert_eq!(pack(&mut disk, pos, &some(len, pos, true)), 0);
            if n % 6 == 5 {
                disk.other(Op::Flush, 0, 0);
                let r = testing::checked(&*disk.files[0]);
                assert!(r.corruptions == 0 && r.check_errors == 0, "{options:?}");
            }
            if n % 4 == 3 {
                disk.other(Op::Discard, pos, len);
            }
        }
        let file = disk.close();
        testing::crashes(&before, &file.events(), 5, |_, _| {});
        testing::assert_clean(&*file, &format!("{options:?}"));
    }
}

#[test]
fn several_at_a_time_and_some_that_fail() {
    let (mut went, mut failed) = (0, 0);
    for (seed, options) in kinds().into_iter().enumerate() {
        let mut random = Rng::new(seed as u64);
        let mut disk = Disk::open(testing::new(&options), None);
        let all: Vec<_> = clusters(&options).take(40).collect();
        let begin = |disk: &mut Disk, (pos, len)| {
            let started = disk.start(Op::WriteCompressed, pos, some(len, pos, true), len);
            (pos, len, started)
        };
        let mut under_way: Vec<_> = all.iter().map(|at| begin(&mut disk, *at)).collect();
        let mut done = Vec::new();
        while !under_way.is_empty() {
            let at = random.below(under_way.len() as u64) as usize;
            match under_way[at].2.step {
                Step::Done(res) => {
                    let (pos, len, _) = under_way.swap_remove(at);
                    done.push((pos, len, res));
                }
                // Some wait for others, and each is resumed again and again.
                Step::Park => disk.wake(&mut under_way[at].2, 0),
                _ if random.below(20) == 0 => disk.wake(&mut under_way[at].2, -5),
                _ => drop(disk.step(&mut under_way[at].2)),
            }
        }
        went += done.iter().filter(|d| d.2 == 0).count();
        failed += done.iter().filter(|d| d.2 != 0).count();
        for (pos, len, res) in done {
            let expected = if res == 0 { some(len, pos, true) } else { vec![0; len as usize] };
            // A request that failed before it was compressed, or after it was written, may have
            // been carried out.
            assert!(res != 0 || disk.read(pos, len) == expected, "{options:?}");
        }
        let file = disk.close();
        testing::assert_clean(&*file, &format!("{options:?}"));
    }
    assert!(went > 0 && failed > 0, "{went} {failed}");
}

#[test]
fn only_whole_clusters() {
    let mut disk = Disk::open(testing::new(&Options::new(SIZE + 1536)), None);
    for (pos, len) in [(0, 4096), (512, 65536), (0, 131_072), (SIZE, 512), (SIZE, 0)] {
        assert_eq!(pack(&mut disk, pos, &vec![1; len]), EINVAL, "{pos} {len}");
    }
    assert_eq!(pack(&mut disk, SIZE, &[1; 1536]), 0);
}

#[test]
fn a_data_file_has_plain_clusters() {
    let data_file = Some(DataFile { name: "d".to_owned(), raw: false });
    let mut disk = Disk::open(testing::new(&Options { data_file, ..Options::new(SIZE) }), None);
    assert_eq!(pack(&mut disk, 65536, &[7; 65536]), 0);
    let mut there = vec![0; 65536];
    disk.files[1].read_at(65536, &mut there).unwrap();
    assert!(there == [7; 65536]);
    let file = disk.close();
    assert!(Image::open(&*file).is_ok());
    testing::assert_clean(&*file, "data file");
}
