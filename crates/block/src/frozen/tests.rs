//! A frozen disk is read while its source is written. Each read returns what the source had at the
//! start.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use vshunt_engine::Uring;
use vshunt_types::spec::{DiskSpec, Format};

use crate::copy::tests::{SIZE, ask, contents, fill, guest, open};
use crate::tests::Random;
use crate::{Bits, CopyBeforeWrite, Disk, Extent, Io, Look, Op, WriteObservers};

/// Freezes a disk, with blocks of `1 << shift` bytes.
fn freeze(source: &Arc<Disk>, fleece: Arc<Disk>, shift: u32) -> (Arc<Disk>, Arc<CopyBeforeWrite>) {
    let todo = Bits::new(SIZE, shift).unwrap();
    todo.set(todo.all());
    let work = Arc::new(CopyBeforeWrite::new(todo).unwrap().fleeced().unwrap());
    source.set_fleece(Some(fleece.clone()));
    source.set_write_observers(WriteObservers {
        copy_before_write: Some(work.clone()),
        ..WriteObservers::default()
    });
    (Disk::frozen(source, fleece, work.clone()), work)
}

/// Reads at random places in several segments until `stop` is set, and compares. The handle is made
/// again from time to time, as when a queue moves to another worker. Counts in `reads`.
fn reader(frozen: &Arc<Disk>, before: &[u8], seed: u64, stop: &AtomicBool, reads: &AtomicU64) {
    let mut random = Random::new(seed);
    while !stop.load(Relaxed) {
        let mut uring = Uring::new().unwrap();
        let handle = frozen.attach(&mut uring);
        for _ in 0..64 {
            let most = [8, 64, 512, 4096][random.below(4) as usize];
            let len = 512 * (1 + random.below(most));
            let at = random.below((SIZE - len) / 512) * 512;
            let mut bytes = vec![0xee; len as usize];
            let mut io = Io::default();
            io.reset(Op::Read, at, false);
            for segment in bytes.chunks_mut(512 * (1 + random.below(300) as usize)) {
                // SAFETY: the buffer and `io` stay here until the request is done.
                unsafe { io.push(segment.as_mut_ptr(), segment.len()) };
            }
            handle.run(&mut uring, &mut io).unwrap();
            let want = &before[at as usize..][..len as usize];
            let wrong = want.chunks(512).zip(bytes.chunks(512)).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "the first wrong sector of a read of {len} bytes at {at}");
            reads.fetch_add(1, Relaxed);
        }
        handle.detach(&mut uring);
    }
}

fn under_load(dir: &Path, format: Format, shift: u32) {
    let (source, fleece) = (open(dir, format, "s"), open(dir, Format::Raw, "f"));
    fill(&source);
    let before = contents(&source);
    let (frozen, work) = freeze(&source, fleece, shift);
    assert_eq!((frozen.size_bytes(), frozen.readonly(), frozen.path()), (SIZE, true, "frozen"));
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (mut guests, mut readers) = (Vec::new(), Vec::new());
        for (i, half) in [0..SIZE / 2, SIZE / 2..SIZE].into_iter().enumerate() {
            let source = &source;
            guests.push(scope.spawn(move || {
                // Each round has a handle of its own, as when a queue moves.
                for round in 0..8 {
                    guest(source, half.clone(), 100 * round + i as u64, &AtomicBool::new(true));
                }
            }));
        }
        for seed in 0..2 {
            let (frozen, before, stop, reads) = (&frozen, &before, &stop, &reads);
            readers.push(scope.spawn(move || reader(frozen, before, seed, stop, reads)));
        }
        // A reader that has ended has failed.
        let waits = || reads.load(Relaxed) < 128 && !readers.iter().any(|reader| reader.is_finished());
        while guests.iter().any(|guest| !guest.is_finished()) || waits() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(work.has_ended(), None);
    assert!(reads.load(Relaxed) >= 128, "{} reads", reads.load(Relaxed));
    assert!(work.stored_bytes().is_some_and(|bytes| bytes > SIZE / 8), "{:?}", work.stored_bytes());
    assert!(contents(&source) != before, "nothing was written meanwhile");
    assert!(contents(&frozen) == before, "the frozen disk has changed");
}

#[test]
fn reads_return_what_the_disk_was() {
    for parent in ["/dev/shm", "/var/tmp"] {
        for (format, shift) in [(Format::Ram, 12), (Format::Raw, 12), (Format::Qcow2, 12), (Format::Raw, 16)]
        {
            let Ok(dir) = tempfile::tempdir_in(parent) else {
                eprintln!("skipped: {parent}, which cannot be written");
                continue;
            };
            under_load(dir.path(), format, shift);
        }
    }
}

/// Runs one request on a handle of its own. Returns its result.
fn result(disk: &Arc<Disk>, op: Op, offset: u64, bytes: &mut [u8]) -> std::io::Result<Io> {
    let (mut uring, mut io) = (Uring::new().unwrap(), Io::default());
    let handle = disk.attach(&mut uring);
    io.reset(op, offset, false);
    match op {
        // SAFETY: the buffer and `io` stay here until the request is done.
        Op::Read | Op::Write => unsafe { io.push(bytes.as_mut_ptr(), bytes.len()) },
        _ => io.request.len = bytes.len() as u64,
    }
    let done = handle.run(&mut uring, &mut io);
    handle.detach(&mut uring);
    done.map(|()| io)
}

#[test]
fn without_the_old_data_every_read_fails_and_no_write() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let source = open(dir.path(), Format::Ram, "s");
    fill(&source);
    drop(open(dir.path(), Format::Raw, "f"));
    let file = Some(dir.path().join("f"));
    let spec = DiskSpec { name: "f".to_owned(), file, readonly: true, locking: false, ..DiskSpec::default() };
    let (frozen, work) = freeze(&source, Disk::open(&spec).unwrap(), 12);
    let mut bytes = vec![0; 8192];
    result(&frozen, Op::Read, 2 << 20, &mut bytes).unwrap();
    let (mut uring, mut new) = (Uring::new().unwrap(), vec![9; 8192]);
    let handle = source.attach(&mut uring);
    // Zeroes need no place in the file.
    ask(&mut uring, &handle, Op::Write, 1 << 20, &mut new);
    assert_eq!((work.has_ended(), work.stored_bytes()), (None, Some(8192)));
    ask(&mut uring, &handle, Op::Write, (1 << 20) + (256 << 10), &mut new);
    handle.detach(&mut uring);
    assert!(work.has_ended().is_some_and(|errno| errno < 0) && work.has_fleece_failed());
    for (op, at) in [(Op::Read, 0), (Op::Read, 1 << 20), (Op::Seek { look: Look::Disk }, 2 << 20)] {
        let e = result(&frozen, op, at, &mut bytes).err().and_then(|e| e.raw_os_error());
        assert_eq!(e, Some(libc::EIO), "{op:?} at {at}");
    }
    frozen.give_up();
    assert_eq!(frozen.path(), "gone");
    assert!(result(&frozen, Op::Read, 0, &mut bytes).is_err());
}

#[test]
fn nothing_can_be_written_and_the_map_is_of_the_start() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (source, fleece) = (open(dir.path(), Format::Qcow2, "s"), open(dir.path(), Format::Raw, "f"));
    let mut bytes = vec![7; 64 << 10];
    result(&source, Op::Write, 0, &mut bytes).unwrap();
    let (frozen, work) = freeze(&source, fleece, 12);
    for op in [Op::Write, Op::Discard, Op::WriteZeroes { unmap: true }] {
        let e = result(&frozen, op, 0, &mut bytes).err().and_then(|e| e.raw_os_error());
        assert_eq!(e, Some(libc::EROFS), "{op:?}");
    }
    let extent = |at: u64, len: usize| {
        let io = result(&frozen, Op::Seek { look: Look::Disk }, at, &mut vec![0; len]).unwrap();
        io.request.found.map(|found| (found.extent, found.len)).unwrap()
    };
    assert_eq!(extent(0, 1 << 20), (Extent::Data, 64 << 10));
    assert_eq!(extent(64 << 10, 1 << 20), (Extent::Zero, 1 << 20));
    // What is data, and a hole now.
    result(&source, Op::WriteZeroes { unmap: true }, 0, &mut bytes).unwrap();
    assert_eq!(extent(0, 1 << 20), (Extent::Data, 64 << 10));
    assert_eq!(extent(512, 512), (Extent::Data, 512));
    // What was a hole, and is data now. Old data of zeroes counts as data.
    result(&source, Op::Write, 1 << 20, &mut bytes).unwrap();
    assert_eq!(extent(128 << 10, 1 << 20), (Extent::Zero, (1 << 20) - (128 << 10)));
    assert_eq!(extent(1 << 20, 1 << 20), (Extent::Data, 64 << 10));
    assert_eq!(work.stored_bytes(), Some(128 << 10));
    let all = contents(&frozen);
    assert!(all[..64 << 10].iter().all(|b| *b == 7) && all[64 << 10..].iter().all(|b| *b == 0));
}
