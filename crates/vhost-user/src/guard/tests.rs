use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};

use super::super::budget::Budget;
use super::super::memory::{Mapping, shared_file};
use super::*;

const MIB: usize = 1 << 20;

fn memfd(len: usize) -> std::fs::File {
    let file = std::fs::File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len as u64).unwrap();
    file
}

fn map(file: &std::fs::File, len: usize) -> Arc<Mapping> {
    Mapping::new(&Budget::new(None, false), file, 0, len as u64).unwrap()
}

fn get(map: &Mapping, at: usize) -> u8 {
    // SAFETY: inside the mapping, which only the threads of this test use. The guard serves
    // accesses behind the end of the file.
    unsafe { map.at(at).read_volatile() }
}

fn put(map: &Mapping, at: usize, byte: u8) {
    // SAFETY: inside the mapping, which only the threads of this test use. The guard serves
    // accesses behind the end of the file.
    unsafe { map.at(at).write_volatile(byte) }
}

#[test]
fn a_file_that_is_cut_short_becomes_zeroes_and_its_connection_ends() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let budget = Budget::new(Some(ours.into()), false);
    let file = memfd(MIB);
    let map = Mapping::new(&budget, &file, 0, MIB as u64).unwrap();
    put(&map, 0, 9);
    put(&map, 8192, 7);
    assert!(!map.lost());
    file.set_len(4096).unwrap();
    assert_eq!(get(&map, 0), 9, "the file still has this page");
    assert!(!map.lost());
    assert_eq!((get(&map, 8192), get(&map, 0)), (0, 0), "the whole mapping is replaced");
    assert!(map.lost());
    // Writes stay, and harm nobody.
    put(&map, MIB / 2, 1);
    assert_eq!(get(&map, MIB / 2), 1);
    assert_eq!(std::io::Read::read(&mut &theirs, &mut [0]).unwrap(), 0, "the connection was shut down");
    let other = Mapping::new(&budget, &shared_file("other", 4096).unwrap(), 0, 4096).unwrap();
    assert!(!other.lost() && !budget.lost());
    drop(map);
    assert!(budget.lost(), "that is known longer than the mapping is there");
}

#[test]
fn a_mapping_in_the_place_of_a_lost_one_has_none_of_its_bytes() {
    // The kernel likes to give the same address again.
    for _ in 0..20 {
        let file = memfd(MIB);
        let lost = map(&file, MIB);
        file.set_len(0).unwrap();
        assert_eq!(get(&lost, 4096), 0);
        put(&lost, 4096, 0xEE);
    }
}

#[test]
fn huge_pages_that_are_missing_are_replaced() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let Ok(fd) = memfd_create("huge", flags) else {
        println!("skip huge_pages_that_are_missing_are_replaced: the kernel has no hugetlbfs");
        return;
    };
    let file = std::fs::File::from(fd);
    let size = rustix::fs::fstatfs(&file).unwrap().f_bsize as usize;
    file.set_len(2 * size as u64).unwrap();
    // The second page, from its middle.
    let map = Mapping::new(&Budget::new(None, false), &file, size as u64 + 4096, 4096).unwrap();
    // Without reserved huge pages the first access fails already; else one after the end was moved.
    get(&map, 0);
    file.set_len(0).unwrap();
    assert_eq!(get(&map, 0), 0);
    assert!(map.lost());
}

const CHILD: &str = "VSHUNT_TEST_MAPPINGS_LEFT";
const LIMIT_TEST: &str = "at_the_limit_of_mappings_nothing_else_is_replaced";

/// The kernel's limit binds the whole process, so each attempt is made by a child.
#[test]
fn at_the_limit_of_mappings_nothing_else_is_replaced() {
    if let Ok(left) = std::env::var(CHILD) {
        return at_the_limit(left.parse().unwrap());
    }
    for left in [0, 1, 2] {
        let name = format!("{}::{LIMIT_TEST}", module_path!().split_once("::").unwrap().1);
        let mut command = Command::new(std::env::current_exe().unwrap());
        let child = command.args(["--exact", &name, "--nocapture"]).env(CHILD, left.to_string()).output();
        let child = child.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&child.stdout), text(&child.stderr));
        assert!(child.status.success(), "{left} mappings left: {:?}\n{out}\n{err}", child.status);
        assert!(out.contains("held") || out.contains("skip"), "{out}\n{err}");
    }
}

/// More than this takes too long to make.
const LIMIT_MAX: usize = 2 << 20;
/// Mappings that are made one by one, so that the process comes to the limit plus one.
const SINGLES: usize = 64;

/// A process that has all mappings that it may have, but `left`, loses guest memory on four threads
/// at once.
fn at_the_limit(left: usize) {
    let limit: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if limit > LIMIT_MAX {
        return println!("skip: vm.max_map_count is {limit}");
    }
    let bytes = 64 * MIB;
    let other = || {
        let map = map(&memfd(MIB), MIB);
        (0..MIB).step_by(4096).for_each(|at| put(&map, at, 0xA5));
        map
    };
    // Neighbours in the address space, on both sides.
    let mut others: Vec<_> = (0..4).map(|_| other()).collect();
    let file = memfd(bytes);
    let lost = map(&file, bytes);
    others.extend((0..4).map(|_| other()));
    let (go, started) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..4)
        .map(|i| {
            let (lost, go, started) = (lost.clone(), go.clone(), started.clone());
            std::thread::spawn(move || {
                started.fetch_add(1, Ordering::Release);
                while !go.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                (i * 4096..bytes).step_by(4 * 4096).for_each(|at| put(&lost, at, 1));
            })
        })
        .collect();
    // The start of a thread allocates.
    while started.load(Ordering::Acquire) < threads.len() {
        std::thread::yield_now();
    }
    let rest = fill(limit, left);
    file.set_len(0).unwrap();
    go.store(true, Ordering::Release);
    // Nothing here allocates until there is room again.
    while threads.iter().any(|thread| !thread.is_finished()) {
        std::thread::yield_now();
    }
    rest();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(lost.lost());
    assert!((0..bytes).step_by(4096).all(|at| get(&lost, at) == 1));
    for map in &others {
        assert!(!map.lost());
        assert!((0..MIB).step_by(4096).all(|at| get(map, at) == 0xA5));
    }
    let start = lost.at(0).addr();
    let range = format!("{:x}-{:x} ", start, start + bytes);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.lines().any(|line| line.starts_with(&range)), "it is one mapping: {range} of\n{maps}");
    println!("held");
}

/// Makes mappings until the kernel refuses one, and unmaps `left` of them. Returns what unmaps the
/// rest.
fn fill(limit: usize, left: usize) -> impl FnOnce() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let new = |len, prot| {
        // SAFETY: a new mapping where the kernel likes; nothing is ever in it.
        unsafe { libc::mmap(null_mut(), len, prot, flags, -1, 0) }
    };
    let all = (limit + 2) * PAGE;
    let many = new(all, libc::PROT_NONE);
    assert_ne!(many, libc::MAP_FAILED);
    let mut singles = [libc::MAP_FAILED; SINGLES];
    let mut made = 0usize;
    // Neighbours differ, so that they do not merge.
    let single = |made: &mut usize| {
        *made += 1;
        new(PAGE, if made.is_multiple_of(2) { libc::PROT_READ } else { libc::PROT_WRITE })
    };
    singles[..left].iter_mut().for_each(|at| *at = single(&mut made));
    // Every other page with other rights: two mappings more each.
    // SAFETY: pages of the mapping made just now.
    let split = |i: usize| unsafe { libc::mprotect(many.byte_add(i * PAGE), PAGE, libc::PROT_READ) };
    assert!((1..limit + 1).step_by(2).any(|i| split(i) != 0), "there is no limit");
    for at in &mut singles[made..] {
        *at = single(&mut made);
        if *at == libc::MAP_FAILED {
            break;
        }
    }
    assert_eq!(singles[SINGLES - 1], libc::MAP_FAILED, "the limit does not bind");
    // SAFETY: mappings made above, which nothing is in.
    let free = move |at, len| unsafe { libc::munmap(at, len) };
    for single in &mut singles[..left] {
        assert_eq!(free(*single, PAGE), 0);
        *single = libc::MAP_FAILED;
    }
    move || {
        free(many, all);
        singles.iter().filter(|at| **at != libc::MAP_FAILED).for_each(|at| _ = free(*at, PAGE));
    }
}

#[test]
fn a_fault_that_repeats_in_a_replaced_mapping_ends_the_process() {
    let file = memfd(MIB);
    let lost = map(&file, MIB);
    file.set_len(0).unwrap();
    assert_eq!(get(&lost, 4096), 0);
    let addr = lost.at(4096).addr();
    // As the kernel tells of a page that it cannot have.
    assert!((0..LATE_MAX).all(|_| handle(addr, libc::BUS_ADRERR)));
    assert!(!handle(addr, libc::BUS_ADRERR) && !handle(addr, libc::BUS_ADRERR));
    drop(lost);
    // Another mapping in that slot of the table begins again.
    let file = memfd(MIB);
    let lost = map(&file, MIB);
    file.set_len(0).unwrap();
    assert_eq!(get(&lost, 4096), 0);
    assert!(handle(lost.at(4096).addr(), libc::BUS_ADRERR));
}
