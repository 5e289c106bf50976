//! A comparison with crate `imago`: both run random programs on one image in turn, and each reads
//! the other's writes.
//!
//! `QCOW2_IMAGO_SEEDS=N` runs N seeds instead of a few; `QCOW2_IMAGO_SEED=N` runs that one alone.

use std::path::Path;

use imago::file::File;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};

use qcow2::check::{Quiet, Repair, check};
use qcow2::create::{Options, create};
// The parts of the crate that `drive` uses.
use qcow2::{
    Buf, Chain, Context, Image, Layer, Op, Request, Served, Settings, Step, Storage, User, Waker, memory,
};

#[allow(dead_code)]
#[path = "../src/testing/drive.rs"]
mod drive;
#[path = "../src/testing/random.rs"]
mod random;

use drive::Disk;
use memory::Memory;
use random::Rng;

const SIZE: u64 = (1 << 20) + 1536;
const MOST: u64 = 64 << 20;

impl Rng {
    /// Returns a range of the disk, in whole sectors.
    fn range(&mut self) -> (u64, u64) {
        let first = self.below(SIZE / 512);
        let most = [1, 8, 200, 1000][self.below(4) as usize];
        (first * 512, (1 + self.below(most)).min(SIZE / 512 - first) * 512)
    }

    /// Returns bytes that can be compressed to some degree.
    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let (same, noise) = (self.next() as u8, self.below(3));
        (0..len).map(|_| if self.below(4) < noise { self.next() as u8 } else { same }).collect()
    }
}

/// Returns the kinds of images that imago can open: those without subclusters.
fn kinds() -> Vec<Options> {
    let o = || Options::new(SIZE);
    vec![
        o(),
        Options { cluster_size: 512, ..o() },
        Options { cluster_size: 4096, version: 2, ..o() },
        Options { cluster_size: 4096, refcount_bits: 1, ..o() },
        Options { cluster_size: 8192, refcount_bits: 64, ..o() },
        Options { cluster_size: 1 << 18, ..o() },
        Options { cluster_size: 1 << 14, backing: Some(("below.raw".into(), "raw".into())), ..o() },
    ]
}

/// Runs a program with this crate. Returns the image.
fn ours(random: &mut Rng, image: Vec<u8>, below: Option<&[u8]>, cluster: u64, model: &mut [u8]) -> Vec<u8> {
    let below = below.map(|b| Memory::new(b.to_vec(), MOST));
    let mut disk = Disk::open(Memory::new(image, MOST), below);
    assert!(disk.read(0, SIZE) == *model, "we read another disk");
    for _ in 0..30 {
        let (mut pos, mut len) = random.range();
        let whole = random.below(3) == 0;
        if whole {
            pos = pos / cluster * cluster;
            len = cluster.min(SIZE - pos);
        }
        let range = pos as usize..(pos + len) as usize;
        match random.below(8) {
            0..3 => {
                let bytes = random.bytes(len);
                model[range].copy_from_slice(&bytes);
                disk.write(pos, &bytes);
            }
            3 | 4 if whole => {
                let bytes = random.bytes(len);
                model[range].copy_from_slice(&bytes);
                assert_eq!(disk.run(Op::WriteCompressed, pos, bytes, len).0, 0);
            }
            3..6 => {
                model[range].fill(0);
                disk.other(Op::Zero { unmap: random.below(2) == 0 }, pos, len);
            }
            6 => {
                disk.other(Op::Discard, pos, len);
                let now = disk.read(pos, len);
                model[range].copy_from_slice(&now);
            }
            _ => disk.other(Op::Flush, 0, 0),
        }
    }
    disk.close().bytes()
}

/// Runs a program with imago, on the file.
fn theirs(random: &mut Rng, path: &Path, version: u32, model: &mut [u8]) {
    let opened = imago::qcow2::Qcow2::<File>::builder_path(path).write(true);
    let mut disk = FormatAccess::new(opened.open(PermissiveImplicitOpenGate::default()).unwrap());
    let mut all = vec![0; SIZE as usize];
    disk.read(&mut all[..], 0).unwrap();
    assert!(all == *model, "imago reads another disk");
    for _ in 0..30 {
        let (pos, len) = random.range();
        let range = pos as usize..(pos + len) as usize;
        // It writes no zeroes in version 2.
        match random.below(if version == 2 { 4 } else { 8 }) {
            0..4 => {
                let bytes = random.bytes(len);
                disk.write(&bytes[..], pos).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            4 | 5 => {
                disk.write_zeroes(pos, len).unwrap();
                model[range].fill(0);
            }
            6 => {
                disk.discard_to_zero(pos, len).unwrap();
                model[range].fill(0);
            }
            _ => disk.flush().unwrap(),
        }
    }
    disk.flush().unwrap();
}

fn run(seed: u64) {
    let mut random = Rng::new(seed);
    let all = kinds();
    let options = &all[(seed % all.len() as u64) as usize];
    let of = format!("seed {seed}, {options:?}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let mut model = vec![0; SIZE as usize];
    let below = options.backing.as_ref().map(|_| random.bytes(SIZE / 2 / 512 * 512));
    if let Some(bytes) = &below {
        std::fs::write(dir.path().join("below.raw"), bytes).unwrap();
        model[..bytes.len()].copy_from_slice(bytes);
    }
    let file = Memory::new(Vec::new(), MOST);
    create(&file, None, options, &mut |_, _| {}).unwrap();
    let mut image = file.bytes();
    for round in 0..3 {
        image = ours(&mut random, image, below.as_deref(), options.cluster_size, &mut model);
        let found = check(&Memory::new(image.clone(), MOST), Repair::No, &mut Quiet).unwrap();
        assert!(found.is_clean(), "{of}, round {round}, by us: {found:?}");
        std::fs::write(&path, &image).unwrap();
        theirs(&mut random, &path, options.version, &mut model);
        image = std::fs::read(&path).unwrap();
        let found = check(&Memory::new(image.clone(), MOST), Repair::No, &mut Quiet).unwrap();
        assert_eq!((found.corruptions, found.check_errors), (0, 0), "{of}, round {round}, by imago");
    }
}

#[test]
fn each_reads_what_the_other_wrote() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    if let Some(seed) = number("QCOW2_IMAGO_SEED") {
        return run(seed);
    }
    for seed in 0..number("QCOW2_IMAGO_SEEDS").unwrap_or(40) {
        if let Err(e) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("QCOW2_IMAGO_SEED={seed}");
            std::panic::resume_unwind(e);
        }
    }
}
