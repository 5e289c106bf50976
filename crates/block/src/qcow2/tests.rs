use std::os::unix::fs::MetadataExt;

use vshunt_types::spec::{DiskSpec, Format};

use super::*;
use crate::tests::{raw_spec, scratch};
use crate::{Disk, NewImage};

const CLUSTER: u64 = 64 << 10;

/// A flush frees the clusters that requests of the same batch discarded before it.
#[test]
fn a_flush_does_not_wait_for_its_own_batch() {
    let dir = scratch("/dev/shm");
    let path = dir.path().join("d.qcow2");
    let new = NewImage { path: &path, format: Format::Qcow2, size: 4 << 20, backing: None, overwrite: false };
    new.make().unwrap();
    let disk = Disk::open(&DiskSpec { format: Some(Format::Qcow2), ..raw_spec(&path) }).unwrap();
    let mut uring = Uring::new().unwrap();
    let handle = disk.attach(&mut uring);
    let mut bytes = vec![7; 1 << 20];
    let mut io = Io::default();
    let mut run = |op: Op, offset: u64, len: u64| {
        io.reset(op, offset, false);
        if matches!(op, Op::Read | Op::Write) {
            // SAFETY: `bytes` and `io` stay where they are until `run` returns, which waits for the
            // request.
            unsafe { io.push(bytes.as_mut_ptr(), len as usize) };
        } else {
            io.request.len = len;
        }
        handle.run(&mut uring, &mut io).unwrap();
    };
    run(Op::Write, 0, 1 << 20);
    run(Op::Flush, 0, 0);
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    handle.begin_batch();
    run(Op::Read, 0, 4096);
    run(Op::Discard, CLUSTER, 8 * CLUSTER);
    run(Op::Read, 0, 4096);
    run(Op::Flush, 0, 0);
    let freed = (before - blocks()) * 512;
    assert!(freed >= 8 * CLUSTER, "{freed} bytes");
    handle.end_batch();
    handle.begin_batch();
    run(Op::Read, 0, 4096);
    handle.end_batch();
    handle.detach(&mut uring);
    disk.close().unwrap();
}
