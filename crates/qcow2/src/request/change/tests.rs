use crate::Storage;
use crate::create::Options;
use crate::memory::Memory;
use crate::request::{ENOSPC, Op};
use crate::testing::{self, drive::Disk};

#[test]
fn no_space_is_when_there_is_none() {
    const CLUSTER: u64 = 1 << 16;
    // A reserve is 64 clusters, and 16 MiB are taken ahead.
    let options = Options::new(1 << 30);
    for room in [0, 1, 2, 3, 7, 40, 64, 65, 100] {
        let image = testing::new(&options).bytes();
        let most = image.len() as u64 + (room + 1) * CLUSTER;
        let mut disk = Disk::open(Memory::new(image, most), None);
        // One more is the L2 table.
        for n in 0..room {
            assert_eq!(disk.run(Op::Write, n * CLUSTER, vec![n as u8; 512], 512).0, 0, "{n} of {room}");
        }
        for _ in 0..3 {
            assert_eq!(disk.run(Op::Write, room * CLUSTER, vec![1; 512], 512).0, ENOSPC, "{room}");
        }
        for n in 0..room {
            assert_eq!(disk.read(n * CLUSTER, 512), [n as u8; 512], "{n} of {room}");
        }
        let file = disk.close();
        assert!(file.len().unwrap() <= most);
        testing::assert_clean(&*file, &format!("{room}"));
    }
}
