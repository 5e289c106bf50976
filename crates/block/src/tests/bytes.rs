//! Requests of files that virtual machines do not send: any size, any byte offset, allocation.

use super::*;

fn everywhere(mut test: impl FnMut(&str, &mut Rig, Option<&Path>)) {
    const SIZE: u64 = 1 << 20;
    for (what, parent, direct) in [
        ("tmpfs", "/dev/shm", Direct::Auto),
        ("direct", "/var/tmp", Direct::Auto),
        ("buffered", "/var/tmp", Direct::Off),
    ] {
        let dir = scratch(parent);
        let path = image(&dir, "d.img", SIZE);
        test(what, &mut Rig::new(&DiskSpec { direct, ..raw_spec(&path) }), Some(&path));
    }
    test("ram", &mut Rig::new(&memory_spec(Format::Ram, SIZE)), None);
}

#[test]
fn a_new_size_is_whole_sectors_and_truncated_data_is_lost() {
    everywhere(|what, rig, path| {
        let size = rig.disk().size_bytes();
        assert_eq!(rig.write(0, &vec![7; size as usize]), 0);
        // Smaller with an incomplete sector, larger, empty, and larger again.
        for (to, comes_to) in [(5000, 5120), (9000, 9216), (0, 0), (4096, 4096)] {
            rig.disk().truncate(to).unwrap();
            assert_eq!(rig.disk().size_bytes(), comes_to, "{what} to {to}");
            if let Some(path) = path {
                assert_eq!(fs::metadata(path).unwrap().len(), comes_to, "{what} to {to}");
            }
        }
        assert!(rig.read(0, 4096).iter().all(|b| *b == 0), "{what}: bytes came back");
        rig.disk().truncate(8192).unwrap();
        assert_eq!(rig.write(0, &[7; 8192]), 0);
        rig.disk().truncate(5000).unwrap();
        let read = rig.read(0, 5120);
        assert!(read[..5000].iter().all(|b| *b == 7), "{what}: too much is gone");
        assert!(read[5000..].iter().all(|b| *b == 0), "{what}: too little is gone");
    });
}

#[test]
fn it_gets_longer_and_never_shorter() {
    everywhere(|what, rig, _| {
        let size = rig.disk().size_bytes();
        for (end, longer, comes_to) in [(100, false, size), (size, false, size), (size + 1, true, size + 512)]
        {
            assert_eq!(rig.disk().lengthen(end).unwrap(), longer, "{what} to {end}");
            assert_eq!(rig.disk().size_bytes(), comes_to, "{what} to {end}");
        }
        assert!(rig.read(size, 512).iter().all(|b| *b == 0), "{what}");
    });
}

#[test]
fn a_device_keeps_its_size() {
    let dir = scratch("/var/tmp");
    let Some(device) = LoopDevice::new(&image(&dir, "d.img", 64 << 10), 512) else { return };
    let rig = Rig::new(&raw_spec(&device.0));
    for result in [rig.disk().truncate(512), rig.disk().lengthen(1 << 20).map(drop)] {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
    assert_eq!(rig.disk().size_bytes(), 64 << 10);
}

#[test]
fn allocated_space_is_there_and_reads_as_zeroes() {
    everywhere(|what, rig, path| {
        assert_eq!(rig.run(Ask::new(Op::Allocate, 65536, 65536)), 0, "{what}");
        assert!(rig.read(65536, 65536).iter().all(|b| *b == 0), "{what}");
        if let Some(path) = path {
            use std::os::unix::fs::MetadataExt;
            assert!(fs::metadata(path).unwrap().blocks() * 512 >= 65536, "{what}");
        }
    });
}

#[test]
fn any_bytes_can_be_merged_in() {
    for (what, direct) in [("direct", Direct::Auto), ("buffered", Direct::Off)] {
        let dir = scratch("/var/tmp");
        let path = image(&dir, "d.img", 64 << 10);
        let mut rig = Rig::new(&DiskSpec { direct, ..raw_spec(&path) });
        let mut random = Random::new(11);
        let mut model = vec![0u8; 64 << 10];
        for i in 0..300u64 {
            let at = random.below(model.len() as u64);
            let len = (1 + random.below(3000)).min(model.len() as u64 - at);
            let bytes = vec![i as u8 | 1; len as usize];
            rig.disk().merge(at, &bytes, i % 7 == 0).unwrap();
            model[at as usize..][..len as usize].copy_from_slice(&bytes);
        }
        assert!(rig.read(0, model.len()) == model, "{what}");
        assert_eq!(rig.flush(), 0);
        assert!(fs::read(&path).unwrap() == model, "{what}: the image");
    }
}

#[test]
fn large_blocks_are_merged_up_to_the_images_end() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "d.img", 64 << 10);
    let Some(device) = LoopDevice::new(&path, 4096) else { return };
    let mut rig = Rig::new(&raw_spec(&device.0));
    assert_eq!(rig.write(0, &[3; 64 << 10]), 0);
    rig.disk().merge(4095, &[9; 2], true).unwrap();
    rig.disk().merge((64 << 10) - 1, &[9], true).unwrap();
    let read = rig.read(0, 64 << 10);
    assert_eq!(read.iter().filter(|b| **b == 9).count(), 3);
    assert_eq!((read[4095], read[4096], read[65535]), (9, 9, 9));
}
