use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

fn budget() -> Arc<Budget> {
    Budget::new(None, false)
}

fn memfd(len: u64) -> File {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

fn describe(guest: u64, size: u64, offset: u64) -> VhostUserMemoryRegion {
    VhostUserMemoryRegion::new(guest, size, 0x7000_0000, offset)
}

#[test]
fn notes_are_read_where_they_were_written() {
    let file = shared_file("notes", 4096).unwrap();
    let map = Mapping::new(&budget(), &file, 0, 4096).unwrap();
    assert!(Notes::new(&map, 4096 - Notes::BYTES + 1).is_none());
    assert!(Notes::new(&map, usize::MAX).is_none());
    let notes = Notes::new(&map, 4096 - Notes::BYTES - 3).unwrap();
    assert_eq!(notes.read(), None);
    notes.write(0xFFFF, u64::MAX);
    notes.write(3, 0x82);
    // By another daemon.
    let map = Mapping::new(&budget(), &file, 0, 4096).unwrap();
    let again = Notes::new(&map, 4096 - Notes::BYTES).unwrap();
    assert_eq!(again.read(), Some((3, 0x82)));
    let odd = Mapping::new(&budget(), &file, 1, 4095).unwrap();
    assert!(Notes::new(&odd, 0).is_none(), "words are aligned");
}

#[test]
fn only_what_a_region_covers_is_mapped() {
    let budget = budget();
    let file = memfd(1 << 42);
    // As many as a hostile front end used, each at an offset of some TiB.
    let mut regions = Vec::new();
    for i in 0..82 {
        let offset = (1 << 42) - 1 - i * 4096;
        let region = describe(i << 12, 1, offset);
        regions.push(map_region(&budget, &region, &file, &regions).unwrap());
    }
    // SAFETY: the one byte of each region, which nobody else uses.
    unsafe {
        regions[0].host.write_volatile(7);
        assert_eq!((regions[0].host.read_volatile(), regions[1].host.read_volatile()), (7, 0));
    }
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, (1 << 42) - 1).unwrap();
    assert_eq!(byte, [7]);
    assert!(budget.bytes() < 82 * 4 * 4096, "{}", budget.bytes());
    drop(regions);
    assert_eq!(budget.bytes(), 0);
}

#[test]
fn a_front_end_gets_so_much_address_space_and_no_more() {
    let budget = budget();
    let file = memfd(1 << 42);
    let whole = |size| map_region(&budget, &describe(0, size, 0), &file, &[]);
    let e = whole(1 << 42).unwrap_err();
    assert!(e.to_string().contains("more than 4096 GiB"), "{e}");
    let first = whole(1 << 41).unwrap();
    assert!(whole((1 << 41) - 4096).is_err(), "the sum is too much");
    // The same again costs nothing.
    let again =
        map_region(&budget, &describe(1 << 41, 1 << 41, 0), &file, std::slice::from_ref(&first)).unwrap();
    assert_eq!(first.host, again.host);
    drop((first, again));
    assert!(whole((1 << 42) - (8 << 20)).is_ok(), "and it was given back");
}

#[test]
fn a_region_beyond_its_file_is_refused() {
    let file = memfd(8192);
    for (offset, size) in [(0, 8193), (8192, 1), (4096, 4097), (u64::MAX, 1), (1, u64::MAX), (0, 0)] {
        let e = map_region(&budget(), &describe(0, size, offset), &file, &[]).unwrap_err();
        assert!(e.to_string().contains("a file that has 8192"), "{e}");
    }
    assert!(map_region(&budget(), &describe(0, 8191, 1), &file, &[]).is_ok());
}

/// So that the kernel can use huge pages for it.
#[test]
fn large_mappings_lie_as_in_their_file() {
    let file = memfd(16 << 20);
    for (offset, size) in [(0, 2 << 20), (1 << 20, 8 << 20), (12288, 4 << 20)] {
        let map = Mapping::new(&budget(), &file, offset, size).unwrap();
        assert_eq!((map.at(0).addr() as u64).wrapping_sub(offset) % (2 << 20), 0);
    }
}

#[test]
fn memory_is_not_a_file_on_a_disk_unless_the_user_says_so() {
    let shm = tempfile::tempfile_in("/dev/shm").unwrap();
    shm.set_len(4096).unwrap();
    assert!(Mapping::new(&budget(), &shm, 0, 4096).is_ok());
    // A file that is neither on tmpfs nor a device, on whatever this test's own program is.
    let own = File::open(std::env::current_exe().unwrap()).unwrap();
    let on_disk = tempfile::tempfile_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    on_disk.set_len(4096).unwrap();
    if rustix::fs::fstatfs(&on_disk).unwrap().f_type as u32 == libc::TMPFS_MAGIC as u32 {
        return println!("skip memory_is_not_a_file_on_a_disk_unless_the_user_says_so: all is on tmpfs");
    }
    for file in [own, on_disk.try_clone().unwrap(), File::open("/dev/null").unwrap()] {
        let e = Mapping::new(&budget(), &file, 0, 4096).map(|_| ()).unwrap_err();
        assert!(e.to_string().contains("memory-may-block=on"), "{e}");
    }
    assert!(Mapping::new(&Budget::new(None, true), &on_disk, 0, 4096).is_ok());
}
