use super::*;
use crate::create::Options;
use crate::memory::Memory;
use crate::request::Op;
use crate::testing::{self, drive::Disk};
use crate::{Image, Storage};

const SIZE: u64 = 1 << 20;
const CLUSTER: u64 = 1 << 16;

/// Returns all runs of the disk.
fn map(disk: &mut Disk, look: Look) -> Vec<(Extent, u64)> {
    let (mut pos, mut runs) = (0, Vec::new());
    while pos < SIZE {
        let mut started = disk.start(Op::Seek { look }, pos, Vec::new(), SIZE - pos);
        while disk.step(&mut started) {}
        assert_eq!(started.step, crate::Step::Done(0));
        let found = started.request.found().unwrap();
        runs.push((found.extent, found.len / CLUSTER));
        pos += found.len;
    }
    runs
}

#[test]
fn runs_are_whole() {
    use Extent::{Absent, Data, Zero};
    let below = Memory::new(vec![1; SIZE as usize / 2], SIZE);
    let file = testing::new(&Options { cluster_size: CLUSTER, ..Options::new(SIZE) });
    testing::write(&mut Image::open(&file).unwrap(), 5, 7, true);
    let mut disk = Disk::open(file, Some(below));
    disk.write(CLUSTER, &[7; 512]);
    disk.write(4 * CLUSTER, &[7; CLUSTER as usize]);
    disk.other(Op::Zero { unmap: true }, 6 * CLUSTER, CLUSTER);
    disk.other(Op::Zero { unmap: false }, 4 * CLUSTER, CLUSTER / 2);
    disk.write(14 * CLUSTER, &[7; CLUSTER as usize]);
    let own =
        [(Absent, 1), (Data, 1), (Absent, 2), (Data, 2), (Zero, 1), (Absent, 7), (Data, 1), (Absent, 1)];
    assert_eq!(map(&mut disk, Look::Image), own);
    let all = [(Data, 6), (Zero, 1), (Data, 1), (Zero, 6), (Data, 1), (Zero, 1)];
    assert_eq!(map(&mut disk, Look::Disk), all);
    let layers = [(2, 1), (1, 1), (2, 2), (1, 3), (2, 7), (1, 1), (2, 1)];
    assert_eq!(map(&mut disk, Look::Layers), layers.map(|(layer, n)| (Extent::Layer(layer), n)));
}

#[test]
fn slices_are_read_for_it_and_an_empty_disk_is_one_run() {
    // With 512-byte clusters, a slice has 64 of them.
    let file = testing::new(&Options { cluster_size: 512, ..Options::new(SIZE) });
    let mut disk = Disk::open(file, None);
    assert_eq!(map(&mut disk, Look::Image), [(Extent::Absent, 16)]);
    assert_eq!(map(&mut disk, Look::Disk), [(Extent::Zero, 16)]);
    assert_eq!(map(&mut disk, Look::Layers), [(Extent::Layer(0), 16)]);
    disk.write(0, &vec![7; SIZE as usize]);
    let file = disk.close();
    let mut disk = Disk::open(Memory::new(file.bytes(), 64 << 20), None);
    let loads = disk.chain.top().map_loads();
    assert_eq!(map(&mut disk, Look::Image), [(Extent::Data, 16)]);
    assert_eq!(disk.chain.top().map_loads() - loads, 32);
    let mut small = disk.start(Op::Seek { look: Look::Image }, 512, Vec::new(), 4096);
    while disk.step(&mut small) {}
    assert_eq!(small.request.found(), Some(Found { extent: Extent::Data, len: 4096 }));
    assert!(disk.files[0].len().unwrap() > SIZE);
}
