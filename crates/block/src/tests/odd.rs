//! Images whose length is no whole number of sectors: raw files in every role, and qcow2 images
//! whose header gives such a size.

use std::os::unix::fs::FileExt;

use ::qcow2::create::{DataFile, Options, create};

use super::*;
use crate::file_storage::FileStorage;

/// The longest file that is tried, bytes: two pages and one byte.
const LEN_MAX: u64 = 8193;
/// Bytes of the qcow2 disks over it.
const DISK_BYTES: u64 = 12 << 10;
/// Bytes of a sector that guests write.
const WRITTEN: [u8; 512] = [0xaa; 512];

/// A folder with a raw file in every role.
struct Roles<'a> {
    dir: &'a Path,
    direct: Direct,
    /// The contents of the raw file. None of the bytes is 0.
    bytes: Vec<u8>,
}

impl<'a> Roles<'a> {
    fn new(dir: &'a Path, direct: Direct) -> Self {
        let bytes = (0..LEN_MAX).map(|i| (i % 251 + 1) as u8).collect();
        let roles = Self { dir, direct, bytes };
        roles.overlay("one.qcow2", "odd.raw", Format::Raw);
        roles.overlay("two.qcow2", "one.qcow2", Format::Qcow2);
        let data_file = Some(DataFile { name: "data.raw".to_owned(), raw: true });
        let new = |name: &str| {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(true).open(dir.join(name));
            FileStorage::new(file.unwrap())
        };
        let (image, data) = (new("data.qcow2"), new("data.raw"));
        let options = Options { data_file, ..Options::new(DISK_BYTES) };
        create(&image, Some(&data), &options, &mut |_, _| {}).unwrap();
        roles
    }

    fn overlay(&self, name: &str, below: &str, format: Format) {
        let new = NewImage {
            path: &self.dir.join(name),
            format: Format::Qcow2,
            size: DISK_BYTES,
            backing: Some((below.to_owned(), format)),
            overwrite: true,
        };
        new.make().unwrap();
    }

    /// Gives the raw files this length.
    fn set_len(&self, len: u64) {
        for name in ["odd.raw", "data.raw"] {
            let file = File::options().write(true).create(true).truncate(false).open(self.dir.join(name));
            let file = file.unwrap();
            file.set_len(len).unwrap();
            file.write_all_at(&self.bytes[..len as usize], 0).unwrap();
        }
    }

    fn open(&self, name: &str, readonly: bool) -> Rig {
        let format = if name.ends_with(".raw") { Format::Raw } else { Format::Qcow2 };
        let (format, direct) = (Some(format), self.direct);
        Rig::new(&DiskSpec { format, direct, readonly, ..raw_spec(&self.dir.join(name)) })
    }

    /// Returns what a disk of `size` bytes reads as.
    fn disk(&self, len: u64, size: u64) -> Vec<u8> {
        let mut bytes = self.bytes[..len.min(size) as usize].to_vec();
        bytes.resize(size as usize, 0);
        bytes
    }

    /// Reads the disk in one role, or in every role.
    fn read(&self, what: &str, len: u64, role: Option<usize>) {
        let whole = len.next_multiple_of(512);
        let roles = [
            ("odd.raw", whole),
            ("one.qcow2", DISK_BYTES),
            ("two.qcow2", DISK_BYTES),
            ("data.qcow2", DISK_BYTES),
        ];
        for (name, size) in roles.into_iter().skip(role.unwrap_or(0)).take(role.map_or(4, |_| 1)) {
            let what = format!("{what}: {name}, {len} bytes");
            let (mut rig, disk) = (self.open(name, true), self.disk(len, size));
            assert_eq!(rig.disk().size_bytes(), size, "{what}");
            assert!(rig.read(0, size as usize) == disk, "{what}: all of it");
            let last = whole as usize - 512;
            assert!(rig.read(last as u64, 512) == disk[last..][..512], "{what}: the last sector");
        }
    }

    /// Writes to the last sector in every role. No file gets longer than its disk.
    fn write(&self, what: &str, len: u64) {
        let (whole, last) = (len.next_multiple_of(512), (len - 1) / 512 * 512);
        self.overlay("new.qcow2", "odd.raw", Format::Raw);
        for (name, size) in [("new.qcow2", DISK_BYTES), ("odd.raw", whole), ("data.qcow2", DISK_BYTES)] {
            let what = format!("{what}: {name}, {len} bytes");
            let (mut rig, mut disk) = (self.open(name, false), self.disk(len, size));
            if last > 0 {
                assert_eq!(rig.write(0, &WRITTEN), 0, "{what}");
                disk[..512].copy_from_slice(&WRITTEN);
            }
            let length = |name: &str| fs::metadata(self.dir.join(name)).unwrap().len();
            let raw = if name == "data.qcow2" { "data.raw" } else { "odd.raw" };
            assert_eq!(length(raw), len, "{what}: a write that ends before");
            assert_eq!(rig.write(last, &WRITTEN), 0, "{what}");
            disk[last as usize..][..512].copy_from_slice(&WRITTEN);
            assert!(rig.read(0, size as usize) == disk, "{what}");
            assert_eq!(rig.flush(), 0, "{what}");
            assert_eq!(length(raw), if name == "new.qcow2" { len } else { whole }, "{what}");
        }
        self.set_len(len);
    }
}

/// Tries a file system. `every`: the step from one length to the next. If it is 1, each length is
/// read in one role, and each role has lengths that end at each byte of a sector.
fn try_all(what: &str, dir: &Path, direct: Direct, every: usize) {
    let roles = Roles::new(dir, direct);
    for len in (1..=LEN_MAX).rev().step_by(every) {
        roles.set_len(len);
        let role = ((len / 512 + len) % 4) as usize;
        roles.read(what, len, (every == 1).then_some(role));
    }
    for sector in [0, 512, 3584, 4096, 7680] {
        for len in [sector + 1, sector + 193, sector + 511] {
            roles.set_len(len);
            roles.write(what, len);
        }
    }
}

#[test]
fn raw_files_of_any_length_are_disks_and_below_disks() {
    try_all("direct", scratch("/var/tmp").path(), Direct::Auto, 1);
    try_all("buffered", scratch("/var/tmp").path(), Direct::Off, 61);
    try_all("in memory", scratch("/dev/shm").path(), Direct::Auto, 61);
}

#[test]
fn raw_files_of_any_length_where_blocks_are_long() {
    let (files, dir) = (scratch("/var/tmp"), scratch("/var/tmp"));
    let Some(device) = LoopDevice::new(&image(&files, "fs.img", 64 << 20), 4096) else { return };
    let made = Command::new("mkfs.ext4").args(["-q", "-b", "4096"]).arg(&device.0).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: a file system with long blocks, because mkfs.ext4 cannot make it");
        return;
    }
    in_own_mounts(|mount| {
        if !mount(&[device.0.to_str().unwrap()], &dir) {
            return;
        }
        let path = image(&dir, "aligned", 4096);
        assert_eq!(open_soon(&raw_spec(&path)).alignment(), 4096, "O_DIRECT takes less than a block");
        try_all("long blocks", dir.path(), Direct::Auto, 61);
        try_all("long blocks, buffered", dir.path(), Direct::Off, 509);
    });
}

/// QEMU leaves out the part of a sector at the end of such a disk.
#[test]
fn qcow2_disks_of_any_size_have_whole_sectors() {
    let dir = scratch("/var/tmp");
    let roles = Roles::new(dir.path(), Direct::Auto);
    let new = |name, backing, size| {
        let (path, format) = (&dir.path().join(name), Format::Qcow2);
        NewImage { path, format, size, backing, overwrite: true }.make().unwrap();
    };
    new("odd.qcow2", None, DISK_BYTES);
    new("over.qcow2", Some(("odd.qcow2".to_owned(), Format::Qcow2)), DISK_BYTES);
    let mut rig = roles.open("odd.qcow2", false);
    let mut bytes = roles.bytes.clone();
    bytes.resize(DISK_BYTES as usize, 0xbb);
    assert_eq!(rig.write(0, &bytes), 0);
    drop(rig);
    let header = File::options().write(true).open(dir.path().join("odd.qcow2")).unwrap();
    for size in 1..=LEN_MAX {
        header.write_all_at(&size.to_be_bytes(), ::qcow2::header::SIZE_AT).unwrap();
        let whole = size / 512 * 512;
        let mut rig = roles.open("odd.qcow2", true);
        assert_eq!(rig.disk().size_bytes(), whole, "{size} bytes");
        assert!(whole == 0 || rig.read(0, whole as usize) == roles.disk(whole, whole), "{size} bytes");
        let mut rig = roles.open("over.qcow2", true);
        assert!(rig.read(0, DISK_BYTES as usize) == roles.disk(whole, DISK_BYTES), "{size} bytes, below");
    }
}
