use std::fs;
use std::sync::Arc;

use ::qcow2::create::{Options, create};
use ::qcow2::memory::Memory;
use vshunt_engine::Uring;
use vshunt_types::spec::{DiskSpec, Format};

use super::*;
use crate::tests::{image, memory_spec, raw_spec, scratch};
use crate::{DiskHandle, Io, Op};

const OLD: Time = (1_000, 5);
/// Before 1970.
const ANCIENT: Time = (-1_000, 999_999_999);

fn request(handle: &DiskHandle, uring: &mut Uring, op: Op) {
    let (mut bytes, mut io) = ([7; 4096], Io::default());
    io.reset(op, 0, false);
    match op {
        // SAFETY: `bytes` and `io` live until `run` returns, which waits for the request.
        Op::Read | Op::Write => unsafe { io.push(bytes.as_mut_ptr(), bytes.len()) },
        Op::Flush => {}
        _ => io.request.len = 4096,
    }
    handle.run(uring, &mut io).unwrap();
}

fn times(disk: &Disk) -> FileTimes {
    disk.file_attributes().times
}

/// Sets the times into the past.
fn reset(disk: &Disk) {
    disk.set_file_times(NewTime::At(ANCIENT), NewTime::At(OLD)).unwrap();
    let seen = times(disk);
    assert_eq!((seen.atime, seen.mtime), (ANCIENT, OLD));
}

/// Calls `change`, and checks that the times are of then, and stay so.
fn changes(disk: &Disk, what: &str, change: impl FnOnce()) {
    reset(disk);
    let before = times(disk);
    change();
    let after = times(disk);
    assert!(after.mtime > OLD && after.ctime >= before.ctime, "{what}: {before:?}, {after:?}");
    assert_eq!(after, times(disk), "{what}: the times do not stay");
}

fn check(disk: &Arc<Disk>) {
    let mut uring = Uring::new().unwrap();
    let (first, second) = (disk.attach(&mut uring), disk.attach(&mut uring));
    for handle in [&first, &second] {
        for op in [Op::Write, Op::WriteZeroes { unmap: false }, Op::WriteZeroes { unmap: true }, Op::Discard]
        {
            changes(disk, &format!("{op:?}"), || request(handle, &mut uring, op));
        }
    }
    reset(disk);
    request(&first, &mut uring, Op::Read);
    request(&first, &mut uring, Op::Flush);
    assert_eq!(times(disk).mtime, OLD, "a read or a flush changes it");
    changes(disk, "a handle that is gone", || {
        request(&second, &mut uring, Op::Write);
        second.detach(&mut uring);
        disk.attach(&mut uring).detach(&mut uring);
    });
    changes(disk, "merge", || disk.merge(3, &[1, 2, 3], false).unwrap());
    reset(disk);
    disk.set_file_times(NewTime::Keep, NewTime::Now).unwrap();
    assert!(times(disk).mtime > OLD && times(disk).atime == ANCIENT);
    first.detach(&mut uring);
}

#[test]
fn times_follow_writes_of_each_handle() {
    let dir = scratch("/var/tmp");
    let (path, file) = (dir.path().join("disk.qcow2"), Memory::new(Vec::new(), 1 << 20));
    create(&file, None, &Options::new(1 << 20), &mut |_, _| {}).unwrap();
    fs::write(&path, file.bytes()).unwrap();
    let specs = [
        memory_spec(Format::Null, 1 << 20),
        memory_spec(Format::Ram, 1 << 20),
        raw_spec(&image(&dir, "raw", 1 << 20)),
        DiskSpec { format: Some(Format::Qcow2), ..raw_spec(&path) },
    ];
    for spec in specs {
        check(&Disk::open(&spec).unwrap());
    }
}

#[test]
fn times_are_kept_beside_a_node_that_cannot_have_them() {
    let node = FileTimes { atime: (2_000, 0), mtime: (2_000, 0), ctime: (2_000, 0) };
    let times = Times::new(Some(FileTimes { atime: OLD, mtime: OLD, ctime: OLD }));
    assert_eq!(times.beside(node), node);
    times.set(NewTime::Keep, NewTime::At(OLD), Some(node));
    let seen = times.beside(node);
    assert_eq!((seen.atime, seen.mtime), (node.atime, OLD));
    let read = FileTimes { atime: (3_000, 0), ..node };
    assert_eq!((times.beside(read).atime, times.beside(read).mtime), (read.atime, OLD));
    let written = FileTimes { mtime: (3_000, 0), ..read };
    assert_eq!(times.beside(written).mtime, written.mtime);
}

#[test]
fn the_write_of_a_handle_that_is_gone_counts() {
    let times = Times::new(Some(FileTimes { atime: OLD, mtime: OLD, ctime: OLD }));
    let (gone, stays) = (times.mark(), times.mark());
    gone.set();
    drop(gone);
    drop(times.mark());
    assert!(times.current().mtime > OLD);
    stays.set();
    times.set(NewTime::Keep, NewTime::At(OLD), None);
    assert_eq!(times.current().mtime, OLD);
}

#[test]
fn a_worker_does_not_wait_for_attributes_while_the_image_is_replaced() {
    let disk = Disk::open(&memory_spec(Format::Ram, 1 << 20)).unwrap();
    assert!(disk.file_attributes_now().is_some());
    let replaced = disk.backend.write().unwrap();
    assert!(disk.file_attributes_now().is_none());
    drop(replaced);
    assert!(disk.file_attributes_now().is_some());
}
