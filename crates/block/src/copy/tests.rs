//! A disk is copied while it is written. The copy has the content of the disk at its start.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use vshunt_engine::{QueueSet, Settings, Workers};
use vshunt_types::spec::{DiskSpec, Format};

use super::*;
use crate::tests::Random;
use crate::{Bits, CopyAfterWrite, CopyBeforeWrite, WriteObservers};

pub(crate) const SIZE: u64 = 24 << 20;

pub(crate) fn open(dir: &Path, format: Format, name: &str) -> Arc<Disk> {
    let path = dir.join(name);
    let spec = DiskSpec { name: name.to_owned(), format: Some(format), locking: true, ..DiskSpec::default() };
    let spec = match format {
        Format::Ram => DiskSpec { size: Some(SIZE), ..spec },
        _ => {
            let new = crate::NewImage { path: &path, format, size: SIZE, backing: None, overwrite: false };
            new.make().unwrap();
            DiskSpec { file: Some(path), ..spec }
        }
    };
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        // A child process of another test may hold the lock between its fork and exec.
        match Disk::open(&spec) {
            Ok(disk) => return disk,
            Err(e) if Instant::now() < until => drop(e),
            Err(e) => panic!("{e}"),
        }
    }
}

/// Runs one request and waits for it.
pub(crate) fn ask(uring: &mut Uring, handle: &DiskHandle, op: Op, offset: u64, bytes: &mut [u8]) {
    let mut io = Io::default();
    io.reset(op, offset, false);
    match op {
        // SAFETY: the buffer and `io` stay here until the request is done.
        Op::Read | Op::Write => unsafe { io.push(bytes.as_mut_ptr(), bytes.len()) },
        _ => io.request.len = bytes.len() as u64,
    }
    handle.run(uring, &mut io).unwrap();
}

pub(crate) fn contents(disk: &Arc<Disk>) -> Vec<u8> {
    let (mut uring, mut all) = (Uring::new().unwrap(), vec![0; SIZE as usize]);
    let handle = disk.attach(&mut uring);
    ask(&mut uring, &handle, Op::Read, 0, &mut all);
    handle.detach(&mut uring);
    all
}

/// Writes its own part of the disk, until `stop` is set and it has written some.
pub(crate) fn guest(disk: &Arc<Disk>, stretch: Range<u64>, seed: u64, stop: &AtomicBool) {
    let mut random = Random::new(seed);
    let mut uring = Uring::new().unwrap();
    let handle = disk.attach(&mut uring);
    let mut data = vec![0; 128 << 10];
    let mut n = 0;
    while n < 300 || !stop.load(Relaxed) {
        n += 1;
        let len = 512 * (1 + random.below(if n % 8 == 0 { 256 } else { 16 }));
        let at = stretch.start + random.below((stretch.end - stretch.start - len) / 512) * 512;
        data[..len as usize].fill(random.below(255) as u8 + 1);
        let op = match random.below(10) {
            0 => Op::WriteZeroes { unmap: n % 2 == 0 },
            1 => Op::Discard,
            _ => Op::Write,
        };
        ask(&mut uring, &handle, op, at, &mut data[..len as usize]);
    }
    handle.detach(&mut uring);
}

pub(crate) fn fill(disk: &Arc<Disk>) {
    let (mut uring, mut random) = (Uring::new().unwrap(), Random::new(7));
    let handle = disk.attach(&mut uring);
    let mut data = vec![0; 256 << 10];
    for at in (0..SIZE).step_by(256 << 10).filter(|at| at % (1 << 20) != 0) {
        data.iter_mut().for_each(|b| *b = random.below(256) as u8);
        ask(&mut uring, &handle, Op::Write, at, &mut data);
    }
    handle.detach(&mut uring);
}

/// Copies `source` to `target` while two guests write. The queue moves meanwhile.
fn copy_under_load(source: &Arc<Disk>, target: &Arc<Disk>, shift: u32, compress: bool) -> Arc<Copy> {
    copy_fleeced(source, target, shift, compress, None)
}

/// [`copy_under_load`] with a fleecing file.
fn copy_fleeced(
    source: &Arc<Disk>,
    target: &Arc<Disk>,
    shift: u32,
    compress: bool,
    fleece: Option<Arc<Disk>>,
) -> Arc<Copy> {
    fill(source);
    let before = contents(source);
    let todo = Bits::new(SIZE, shift).unwrap();
    todo.set(todo.all());
    let work = CopyBeforeWrite::new(todo).unwrap();
    let work = Arc::new(match &fleece {
        Some(_) => work.fleeced().unwrap(),
        None => work,
    });
    source.set_fleece(fleece.clone());
    source.set_write_observers(WriteObservers {
        copy_before_write: Some(work.clone()),
        ..WriteObservers::default()
    });
    let copy = Copy::new(source.clone(), target.clone(), work, std::thread::current());
    let copy = Arc::new(copy.onto_fresh(true).compressed(compress).fleeced(fleece));
    // At first, only blocks that guests write are copied.
    copy.paused.store(true, Relaxed);
    let workers = Workers::new(50).unwrap();
    let ids: Vec<_> = (0..2).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
    let set = QueueSet::new("copy", &workers, &ids[..1]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (i, half) in [0..SIZE / 2, SIZE / 2..SIZE].into_iter().enumerate() {
            let (source, stop) = (source, &stop);
            scope.spawn(move || guest(source, half, 11 + i as u64, stop));
        }
        set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
        let limit = Instant::now() + Duration::from_secs(60);
        // Guests write for a while.
        let changed =
            || contents(source).chunks(512).zip(before.chunks(512)).filter(|(now, then)| now != then).count();
        while changed() < 200 && Instant::now() < limit {
            std::thread::park_timeout(Duration::from_millis(3));
        }
        copy.paused.store(false, Relaxed);
        copy.work.notify();
        let mut round = 0;
        while !copy.over.load(Acquire) && Instant::now() < limit {
            round += 1;
            set.attach(0, ids[round % 2], Duration::from_secs(60)).unwrap();
            std::thread::park_timeout(Duration::from_millis(3));
        }
        stop.store(true, Relaxed);
    });
    drop(set.stop(0));
    drop(set);
    workers.end_all();
    assert!(copy.over.load(Acquire), "it does not end");
    if copy.failure().is_none() {
        assert!(contents(source) != before, "nothing was written meanwhile");
        let after = contents(target);
        let wrong = before.chunks(512).zip(after.chunks(512)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "the first wrong sector");
    }
    copy
}

#[test]
fn the_copy_is_what_the_disk_was() {
    let kinds = [Format::Ram, Format::Raw, Format::Qcow2];
    for parent in ["/dev/shm", "/var/tmp"] {
        let Ok(dir) = tempfile::tempdir_in(parent) else {
            eprintln!("skipped: {parent}, which cannot be written");
            continue;
        };
        for (i, source) in kinds.into_iter().enumerate() {
            let target = if source == Format::Qcow2 { Format::Raw } else { Format::Qcow2 };
            let source = open(dir.path(), source, &format!("s{i}"));
            let target = open(dir.path(), target, &format!("t{i}"));
            let copy = copy_under_load(&source, &target, 12, false);
            assert!(copy.failure().is_none(), "{:?}", copy.failure());
            assert_eq!(copy.done.load(Relaxed), SIZE);
        }
    }
}

#[test]
fn so_it_is_when_it_is_compressed() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (source, target) = (open(dir.path(), Format::Ram, "s"), open(dir.path(), Format::Qcow2, "t"));
    let copy = copy_under_load(&source, &target, 16, true);
    assert!(copy.failure().is_none(), "{:?}", copy.failure());
}

#[test]
fn so_it_is_with_a_fleecing_file() {
    for parent in ["/dev/shm", "/var/tmp"] {
        let Ok(dir) = tempfile::tempdir_in(parent) else {
            eprintln!("skipped: {parent}, which cannot be written");
            continue;
        };
        for (i, compress) in [false, true].into_iter().enumerate() {
            let source = open(dir.path(), if compress { Format::Ram } else { Format::Raw }, &format!("s{i}"));
            let target = open(dir.path(), Format::Qcow2, &format!("t{i}"));
            let fleece = open(dir.path(), Format::Raw, &format!("f{i}"));
            let shift = if compress { 16 } else { 12 };
            let copy = copy_fleeced(&source, &target, shift, compress, Some(fleece.clone()));
            assert!(copy.failure().is_none(), "{:?}", copy.failure());
            assert_eq!(copy.done.load(Relaxed), SIZE);
            assert!(copy.work.stores() > 0, "nothing was stored in the file");
            assert_eq!((copy.work.stored_bytes(), copy.old_data_writes.load(Relaxed)), (Some(0), 0));
            assert!(contents(&fleece).iter().all(|b| *b == 0), "its space is freed");
        }
    }
}

#[test]
fn a_fleecing_file_that_fails_ends_the_copy_and_no_guest() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (source, target) = (open(dir.path(), Format::Ram, "s"), open(dir.path(), Format::Qcow2, "t"));
    drop(open(dir.path(), Format::Raw, "f"));
    let spec = DiskSpec {
        name: "f".to_owned(),
        file: Some(dir.path().join("f")),
        readonly: true,
        locking: false,
        ..DiskSpec::default()
    };
    let copy = copy_fleeced(&source, &target, 12, false, Some(Disk::open(&spec).unwrap()));
    let (side, _, e) = copy.failure().expect("it failed");
    assert_eq!((side, e.raw_os_error()), (Side::Fleece, Some(libc::EBADF)));
    assert!(copy.work.has_ended().is_some_and(|errno| errno < 0));
}

/// Writes its own part of the disk, and finds each write in the target when it is complete, if
/// `follows` says so.
fn followed_guest(source: &Arc<Disk>, target: &Arc<Disk>, part: Range<u64>, seed: u64, follows: &AtomicBool) {
    let mut random = Random::new(seed);
    let (mut uring, mut beside) = (Uring::new().unwrap(), Uring::new().unwrap());
    let (handle, copy) = (source.attach(&mut uring), target.attach(&mut beside));
    let (mut data, mut there) = (vec![0; 128 << 10], vec![0; 128 << 10]);
    for n in 0..250 {
        let len = (512 * (1 + random.below(if n % 8 == 0 { 256 } else { 16 }))) as usize;
        let at = part.start + random.below((part.end - part.start - len as u64) / 512) * 512;
        data[..len].fill(random.below(255) as u8 + 1);
        let op = match random.below(10) {
            0 => Op::WriteZeroes { unmap: n % 2 == 0 },
            _ => Op::Write,
        };
        let sure = follows.load(Acquire);
        ask(&mut uring, &handle, op, at, &mut data[..len]);
        if !(sure && follows.load(Acquire)) {
            continue;
        }
        if op != Op::Write {
            data[..len].fill(0);
        }
        ask(&mut beside, &copy, Op::Read, at, &mut there[..len]);
        assert!(data[..len] == there[..len], "write {n} at {at} of {len} bytes is not in the target");
    }
    handle.detach(&mut uring);
    copy.detach(&mut beside);
}

/// Two guests write, and each write is in the target when it is complete. The queue of the copy
/// moves, and is stopped at the end, or in the middle.
#[test]
fn the_target_has_each_write_before_it_completes() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    for (i, (from, to)) in
        [(Format::Ram, Format::Qcow2), (Format::Qcow2, Format::Raw), (Format::Raw, Format::Ram)]
            .into_iter()
            .enumerate()
    {
        let (source, target) =
            (open(dir.path(), from, &format!("s{i}")), open(dir.path(), to, &format!("t{i}")));
        fill(&source);
        let work = Arc::new(CopyAfterWrite::new(SIZE, 12).unwrap());
        let all = Bits::new(SIZE, 16).unwrap();
        all.set(all.all());
        work.add(&all);
        let observers = WriteObservers { copy_after_write: Some(work.clone()), ..WriteObservers::default() };
        source.set_write_observers(observers);
        let copy = Copy::new(source.clone(), target.clone(), work.clone(), std::thread::current());
        let copy = Arc::new(copy);
        let workers = Workers::new(50).unwrap();
        let ids: Vec<_> = (0..2).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
        let set = QueueSet::new("copy", &workers, &ids[..1]).unwrap();
        let follows = AtomicBool::new(true);
        let stop_early = i == 2;
        std::thread::scope(|scope| {
            let guests: Vec<_> = [0..SIZE / 2, SIZE / 2..SIZE]
                .into_iter()
                .enumerate()
                .map(|(i, half)| {
                    let (source, target, follows) = (&source, &target, &follows);
                    scope.spawn(move || followed_guest(source, target, half, 23 + i as u64, follows))
                })
                .collect();
            set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
            let begin = Instant::now();
            let mut round = 0;
            while !guests.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                round += 1;
                set.attach(0, ids[round % 2], Duration::from_secs(60)).unwrap();
                std::thread::park_timeout(Duration::from_millis(3));
                if stop_early && round == 5 {
                    follows.store(false, Release);
                    copy.stop.store(true, Relaxed);
                    copy.work.notify();
                }
                assert!(begin.elapsed() < Duration::from_secs(60), "{} writes wait", work.waiting());
            }
        });
        let limit = Instant::now() + Duration::from_secs(60);
        while !stop_early && !work.is_idle() {
            assert!(Instant::now() < limit, "{} bytes are left", work.backlog_bytes());
            std::thread::park_timeout(Duration::from_millis(3));
        }
        copy.stop.store(true, Relaxed);
        copy.work.notify();
        while !copy.over.load(Acquire) {
            assert!(Instant::now() < limit, "it does not end");
            std::thread::park_timeout(Duration::from_millis(3));
        }
        drop(set.stop(0));
        drop(set);
        workers.end_all();
        assert!(copy.failure().is_none(), "{:?}", copy.failure());
        if !stop_early {
            let (there, here) = (contents(&target), contents(&source));
            assert_eq!(here.chunks(512).zip(there.chunks(512)).position(|(a, b)| a != b), None);
        }
    }
}

#[test]
fn a_target_that_fails_ends_the_copy_and_no_guest() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let source = open(dir.path(), Format::Ram, "s");
    // A read-only disk cannot be written.
    drop(open(dir.path(), Format::Raw, "t"));
    let spec = DiskSpec {
        name: "t".to_owned(),
        file: Some(dir.path().join("t")),
        readonly: true,
        locking: false,
        ..DiskSpec::default()
    };
    let target = Disk::open(&spec).unwrap();
    let copy = copy_under_load(&source, &target, 12, false);
    let (side, _, e) = copy.failure().expect("it failed");
    assert_eq!((side, e.raw_os_error()), (Side::Target, Some(libc::EBADF)));
    assert_eq!(copy.work.has_ended(), Some(0));
}

#[test]
fn a_copy_that_is_stopped_lets_all_writes_go() {
    const LARGE: u64 = 40 << 20;
    for round in 0..8 {
        let ram = |name: &str| {
            let spec = DiskSpec {
                name: name.to_owned(),
                format: Some(Format::Ram),
                size: Some(LARGE),
                ..DiskSpec::default()
            };
            Disk::open(&spec).unwrap()
        };
        let (source, target) = (ram("s"), ram("t"));
        let todo = Bits::new(LARGE, 12).unwrap();
        todo.set(todo.all());
        let work = Arc::new(CopyBeforeWrite::new(todo).unwrap());
        source.set_write_observers(WriteObservers {
            copy_before_write: Some(work.clone()),
            ..WriteObservers::default()
        });
        let copy = Arc::new(Copy::new(source.clone(), target, work, std::thread::current()));
        copy.paused.store(round % 2 == 0, Relaxed);
        let workers = Workers::new(0).unwrap();
        let home = workers.create(None, &Settings::default()).unwrap();
        let set = QueueSet::new("copy", &workers, &[home]).unwrap();
        set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
        let (done, is_done) = std::sync::mpsc::channel();
        // More data than the pieces hold, so that the copy has to wait for a reader.
        std::thread::spawn(move || {
            let mut uring = Uring::new().unwrap();
            let handle = source.attach(&mut uring);
            let mut data = vec![1; 64 << 10];
            for at in (0..LARGE).step_by(64 << 10) {
                ask(&mut uring, &handle, Op::Write, at, &mut data);
            }
            handle.detach(&mut uring);
            done.send(()).unwrap();
        });
        std::thread::sleep(Duration::from_micros(500 * round));
        copy.stop.store(true, Relaxed);
        copy.work.notify();
        is_done.recv_timeout(Duration::from_secs(60)).expect("a write waits for a copy that has ended");
        let limit = Instant::now() + Duration::from_secs(60);
        while !copy.over.load(Acquire) && Instant::now() < limit {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        assert!(copy.over.load(Acquire));
        drop(set.stop(0));
        drop(set);
        workers.end_all();
    }
}
