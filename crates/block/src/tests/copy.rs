//! Requests of jobs that copy disks: where data is, and writes of compressed clusters.

use ::qcow2::Extent::{Absent, Data, Zero};
use ::qcow2::create::{Options, create};
use ::qcow2::memory::Memory;

use super::*;

const CLUSTER: u64 = 65536;
const BYTES: u64 = 32 * CLUSTER;

impl Rig {
    fn seek(&mut self, own: bool, offset: u64, len: u64) -> (Extent, u64) {
        let (mut io, handle) = (Box::new(Io::default()), &self.handle);
        let look = if own { Look::Image } else { Look::Disk };
        io.reset(Op::Seek { look }, offset, false);
        io.request.len = len;
        let token = Token { index: 1, generation: 2, slot: 0, op: 3 };
        let mut step = handle.start(&mut self.uring, &mut io, token);
        self.uring
            .run_until_idle(|uring, token, res| step = handle.resume(uring, &mut io, token, res))
            .unwrap();
        assert_eq!(step, Step::Done(0));
        let found = io.request.found.expect("an answer");
        (found.extent, found.len)
    }
}

/// Calls `f` with a disk of `BYTES`, on each file system.
fn images(backing: bool, mut f: impl FnMut(&DiskSpec)) {
    for parent in ["/dev/shm", "/var/tmp"] {
        let dir = scratch(parent);
        let file = Memory::new(Vec::new(), BYTES);
        let mut options = Options::new(BYTES);
        if backing {
            fs::write(image(&dir, "below.img", BYTES / 2), vec![3; CLUSTER as usize]).unwrap();
            options.backing = Some(("below.img".to_owned(), "raw".to_owned()));
        }
        create(&file, None, &options, &mut |_, _| {}).unwrap();
        let path = dir.path().join("disk.qcow2");
        fs::write(&path, file.bytes()).unwrap();
        f(&DiskSpec { format: Some(Format::Qcow2), ..raw_spec(&path) });
    }
}

#[test]
fn compressed_clusters_take_less_and_read_the_same() {
    images(false, |spec| {
        let mut rig = Rig::new(spec);
        let mut random = Random::new(7);
        let all: Vec<u8> = (0..BYTES).map(|i| if i % 8 == 0 { random.below(256) as u8 } else { 7 }).collect();
        for (n, cluster) in all.chunks(CLUSTER as usize).enumerate() {
            let mut data = cluster.to_vec();
            let at = n as u64 * CLUSTER;
            if n == 5 {
                // The cluster is allocated already.
                assert_eq!(rig.write(at, &[1; 512]), 0);
            }
            let (mut half, whole) = (data[512..].to_vec(), Ask::with(Op::WriteCompressed, at, &mut data));
            assert_eq!(rig.run(Ask::with(Op::WriteCompressed, at + 512, &mut half)), -libc::EINVAL);
            assert_eq!(rig.run(whole), 0);
        }
        assert!(rig.read(0, BYTES as usize) == all);
        let path = spec.file.clone().unwrap();
        let Rig { mut uring, handle } = rig;
        handle.detach(&mut uring);
        let len = fs::metadata(&path).unwrap().len();
        assert!(len < BYTES / 2 + (1 << 20), "{len}");
        let mut rig = Rig::new(spec);
        assert!(rig.read(0, BYTES as usize) == all);
    });
}

#[test]
fn a_qcow2_disk_says_where_data_is() {
    images(true, |spec| {
        let mut rig = Rig::new(spec);
        assert_eq!(rig.write(4 * CLUSTER, &[1; 512]), 0);
        assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, 5 * CLUSTER, CLUSTER)), 0);
        let mut found = |own, cluster| {
            let (extent, len) = rig.seek(own, cluster * CLUSTER, BYTES - cluster * CLUSTER);
            (extent, len / CLUSTER)
        };
        assert_eq!(found(true, 0), (Absent, 4));
        assert_eq!(found(true, 4), (Data, 1));
        assert_eq!(found(true, 5), (Zero, 1));
        assert_eq!(found(true, 6), (Absent, 26));
        assert_eq!(found(false, 0), (Data, 1), "what is below ends there");
        assert_eq!(found(false, 1), (Zero, 3));
        assert_eq!(found(false, 5), (Zero, 27));
        assert_eq!(rig.seek(false, 0, 512), (Data, 512));
    });
}

#[test]
fn others_say_what_they_know() {
    for spec in [memory_spec(Format::Null, BYTES), memory_spec(Format::Ram, BYTES)] {
        let mut rig = Rig::new(&spec);
        assert_eq!(rig.seek(false, 0, BYTES), (Data, BYTES));
        assert_eq!(rig.run(Ask::with(Op::WriteCompressed, 0, &mut [0; 4096])), -libc::EOPNOTSUPP);
    }
    for (parent, knows) in [("/dev/shm", true), ("/var/tmp", false)] {
        let dir = scratch(parent);
        let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", BYTES)));
        assert_eq!(rig.write(CLUSTER, &[1; CLUSTER as usize]), 0);
        let knows = knows && rig.disk().path() == "inline";
        let expected = |extent, len| if knows { (extent, len) } else { (Data, len) };
        assert_eq!(rig.seek(true, 0, CLUSTER), expected(Zero, CLUSTER));
        assert_eq!(rig.seek(true, CLUSTER + 512, 512), (Data, 512));
        if knows {
            assert_eq!(rig.seek(true, 0, BYTES), (Zero, CLUSTER));
            assert_eq!(rig.seek(true, CLUSTER, BYTES - CLUSTER), (Data, CLUSTER));
            assert_eq!(rig.seek(true, 2 * CLUSTER, BYTES - 2 * CLUSTER), (Zero, BYTES - 2 * CLUSTER));
        }
        assert_eq!(rig.run(Ask::with(Op::WriteCompressed, 0, &mut [0; 4096])), -libc::EOPNOTSUPP);
    }
}
