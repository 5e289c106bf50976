//! Tests of every kind of disk, on every kind of backing file or device that this machine has. Also
//! the rig of the other tests here.

mod bitmaps;
mod bytes;
mod copy;
mod odd;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use vshunt_engine::{Token, Uring};
use vshunt_types::error::Kind as ErrorKind;
use vshunt_types::spec::{Cache, Direct, DiskSpec, Format};

use super::*;

/// Makes a folder that is removed when it is dropped. `parent` decides the file system.
pub(super) fn scratch(parent: &str) -> TempDir {
    tempfile::Builder::new().prefix("vshunt-test-").tempdir_in(parent).unwrap()
}

/// Makes an image of zeroes.
pub(super) fn image(dir: &TempDir, name: &str, bytes: u64) -> PathBuf {
    let path = dir.path().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

pub(super) fn raw_spec(path: &Path) -> DiskSpec {
    DiskSpec { name: "d".to_owned(), file: Some(path.to_owned()), locking: true, ..DiskSpec::default() }
}

pub(super) fn memory_spec(format: Format, size: u64) -> DiskSpec {
    DiskSpec {
        name: "d".to_owned(),
        format: Some(format),
        size: Some(size),
        locking: true,
        ..DiskSpec::default()
    }
}

/// Opens a disk whose image was closed just now. A child process of another test has the
/// descriptors of this process between its fork and exec, and with them the locks.
pub(super) fn open_soon(spec: &DiskSpec) -> Arc<Disk> {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        match Disk::open(spec) {
            Ok(disk) => return disk,
            Err(e) if e.kind() == ErrorKind::Busy && std::time::Instant::now() < until => {
                std::thread::yield_now()
            }
            Err(e) => panic!("{e}"),
        }
    }
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A loop device over a file; detached when dropped.
pub(super) struct LoopDevice(pub(super) PathBuf);

impl LoopDevice {
    /// Attaches a loop device. `None`, and a line with the reason, if this machine or user cannot
    /// have one.
    pub(super) fn new(file: &Path, sector: u32) -> Option<Self> {
        Self::with(file, &["--sector-size", &sector.to_string()])
    }

    /// Attaches a loop device with these flags of losetup.
    pub(super) fn with(file: &Path, flags: &[&str]) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: block devices, because loop devices need root");
            return None;
        }
        let out = Command::new("losetup").args(flags).args(["--show", "-f"]).arg(file).output();
        match out {
            Ok(out) if out.status.success() => {
                Some(Self(PathBuf::from(String::from_utf8(out.stdout).unwrap().trim().to_owned())))
            }
            Ok(out) => {
                eprintln!(
                    "skipped: block devices, because losetup says {}",
                    String::from_utf8_lossy(&out.stderr)
                );
                None
            }
            Err(e) => {
                eprintln!("skipped: block devices, because losetup cannot be run: {e}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// Runs `f` on a thread in a mount namespace of its own. `f` gets `mount`, which takes arguments
/// and the mountpoint.
pub(super) fn in_own_mounts(f: impl FnOnce(&dyn Fn(&[&str], &TempDir) -> bool) + Send) {
    let mount = |args: &[&str], dir: &TempDir| {
        // This thread makes the child, so it shares the namespace.
        let done = Command::new("mount").args(args).arg(dir.path()).status().unwrap().success();
        if !done {
            eprintln!("skipped: what needs mount {args:?}");
        }
        done
    };
    std::thread::scope(|s| {
        s.spawn(|| {
            // SAFETY: the call accesses no memory. CLONE_NEWNS on one thread does not affect the
            // others.
            if unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) } != 0 {
                eprintln!("skipped: what needs mounts: {}", std::io::Error::last_os_error());
                return;
            }
            let made = Command::new("mount").args(["--make-rprivate", "/"]).status();
            assert!(made.unwrap().success(), "what is mounted now would be everybody's");
            f(&mount);
        });
    });
}

/// Random numbers from a seed. Each test names its seed.
pub(super) struct Random(fastrand::Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n)
    }
}

/// One worker with one queue.
pub(super) struct Rig {
    pub(super) uring: Uring,
    pub(super) handle: DiskHandle,
}

/// A request, with data segments as (address, length).
pub(super) struct Ask {
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) fua: bool,
    pub(super) segments: Vec<(*mut u8, usize)>,
}

impl Ask {
    pub(super) fn new(op: Op, offset: u64, len: u64) -> Self {
        Self { op, offset, len, fua: false, segments: Vec::new() }
    }

    pub(super) fn with(op: Op, offset: u64, data: &mut [u8]) -> Self {
        Self { segments: vec![(data.as_mut_ptr(), data.len())], ..Self::new(op, offset, data.len() as u64) }
    }
}

impl Rig {
    pub(super) fn new(spec: &DiskSpec) -> Self {
        let disk = open_soon(spec);
        let mut uring = Uring::new().unwrap();
        let handle = disk.attach(&mut uring);
        Self { uring, handle }
    }

    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.handle.disk
    }

    /// Runs requests at the same time. `lie` may change a result before the backend gets it.
    pub(super) fn run_with(&mut self, asks: &[Ask], mut lie: impl FnMut(&Io, i32) -> i32) -> Vec<i32> {
        let mut ios: Box<[Io]> = asks.iter().map(|_| Io::default()).collect();
        let mut done: Vec<Option<i32>> = vec![None; asks.len()];
        for (i, (ask, io)) in asks.iter().zip(ios.iter_mut()).enumerate() {
            io.reset(ask.op, ask.offset, ask.fua);
            for &(ptr, len) in &ask.segments {
                // SAFETY: tests pass memory that outlives the run; `ios` neither moves nor is
                // dropped before the end.
                unsafe { io.push(ptr, len) };
            }
            if ask.segments.is_empty() {
                io.request.len = ask.len;
            }
            let token = Token { index: 1, generation: 2, slot: i as u16, op: 3 };
            if let Step::Done(res) = self.handle.start(&mut self.uring, io, token) {
                done[i] = Some(res);
            }
        }
        let handle = &self.handle;
        self.uring
            .run_until_idle(|uring, token, res| {
                let i = usize::from(token.slot);
                assert_eq!(done[i], None, "a completion after the end");
                let res = lie(&ios[i], res);
                if let Step::Done(res) = handle.resume(uring, &mut ios[i], token, res) {
                    done[i] = Some(res);
                }
            })
            .unwrap();
        assert!(
            ios.iter().all(|io| io.request.iov.left_bytes() == 0 && !io.request.iov.on_heap()),
            "room is kept in a slot"
        );
        done.into_iter().map(|d| d.expect("every request ends")).collect()
    }

    pub(super) fn run(&mut self, ask: Ask) -> i32 {
        self.run_with(&[ask], |_, res| res)[0]
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> i32 {
        let mut data = data.to_vec();
        self.run(Ask::with(Op::Write, offset, &mut data))
    }

    pub(super) fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0xee; len];
        assert_eq!(self.run(Ask::with(Op::Read, offset, &mut data)), 0);
        data
    }

    pub(super) fn flush(&mut self) -> i32 {
        self.run(Ask::new(Op::Flush, 0, 0))
    }
}

/// Random requests, several at a time, against a model of the disk.
struct Fuzz {
    random: Random,
    model: Vec<u8>,
    guest: Vec<u8>,
    /// The alignment of segments, in bytes.
    grain: u64,
}

impl Fuzz {
    const GUEST_BYTES: usize = 4 << 20;

    fn new(seed: u64, disk_bytes: u64, grain: u64) -> Self {
        let model = vec![0; disk_bytes as usize];
        Self { random: Random::new(seed), model, guest: vec![0; Self::GUEST_BYTES + 4096], grain }
    }

    /// Returns segments of `len` bytes in total, each of at least a grain, from `at` on in guest
    /// memory, with gaps.
    fn split(&mut self, at: &mut usize, mut len: u64) -> Vec<(*mut u8, usize)> {
        let mut parts = Vec::new();
        let base = self.guest.as_mut_ptr();
        // Aligned to a page, so that a grain decides the alignment.
        let base = base.wrapping_add(base.align_offset(4096));
        while len > 0 {
            let part = match self.random.below(3) {
                0 => len,
                _ => ((1 + self.random.below(len)).next_multiple_of(self.grain)).min(len),
            };
            *at += (self.random.below(3) * self.grain) as usize;
            parts.push((base.wrapping_add(*at), part as usize));
            *at += part as usize;
            len -= part;
        }
        parts
    }

    /// Returns ranges for a batch that do not overlap.
    fn ranges(&mut self) -> Vec<(u64, u64)> {
        let sectors = self.model.len() as u64 / SECTOR_BYTES;
        let n = 1 + self.random.below(8);
        let lane = sectors / n;
        (0..n)
            .map(|i| {
                // Half of them start at page boundaries, as those of guests do.
                let unit = if self.random.below(2) == 0 { 8 } else { 1 };
                let at = self.random.below(lane) / unit * unit;
                let longest = (lane - at).min(if self.random.below(8) == 0 { 700 } else { 40 });
                let len = (1 + self.random.below(longest)).next_multiple_of(unit).min(lane - at);
                ((i * lane + at) * SECTOR_BYTES, len * SECTOR_BYTES)
            })
            .collect()
    }

    fn batch(&mut self, rig: &mut Rig) {
        let mut at = 0;
        let mut asks = Vec::new();
        for (offset, len) in self.ranges() {
            let op = match self.random.below(20) {
                0 => Op::Flush,
                1 => Op::Discard,
                2 => Op::WriteZeroes { unmap: true },
                3 => Op::WriteZeroes { unmap: false },
                n if n < 12 => Op::Write,
                _ => Op::Read,
            };
            let mut ask = Ask::new(op, offset, if op == Op::Flush { 0 } else { len });
            ask.fua = self.random.below(5) == 0;
            if matches!(op, Op::Read | Op::Write) {
                if at + 2 * len as usize + (64 << 10) > Self::GUEST_BYTES {
                    break;
                }
                ask.segments = self.split(&mut at, len);
                let fill = self.random.below(256) as u8;
                for &(ptr, len) in &ask.segments {
                    for i in 0..len {
                        // SAFETY: `split` stays within guest memory, checked above with room for
                        // its gaps.
                        unsafe { ptr.wrapping_add(i).write(fill.wrapping_add(i as u8)) };
                    }
                }
            }
            asks.push(ask);
        }
        assert!(at <= Self::GUEST_BYTES, "the gaps took more than was left for them");
        let results = rig.run_with(&asks, |_, res| res);
        assert!(results.iter().all(|r| *r == 0), "{results:?}");
        for ask in &asks {
            let range = ask.offset as usize..(ask.offset + ask.len) as usize;
            let bytes = || {
                ask.segments
                    .iter()
                    .flat_map(|&(p, n)| (0..n).map(move |i| (p, i)))
                    // SAFETY: each segment is memory of this test, of `n` bytes.
                    .map(|(p, i)| unsafe { p.wrapping_add(i).read() })
            };
            match ask.op {
                Op::Read => assert!(bytes().eq(self.model[range].iter().copied()), "read at {}", ask.offset),
                Op::Write => self.model[range].iter_mut().zip(bytes()).for_each(|(m, b)| *m = b),
                Op::WriteZeroes { .. } => self.model[range].fill(0),
                // The device decides the content after a discard.
                Op::Discard => {
                    let now = rig.read(ask.offset, ask.len as usize);
                    self.model[range].copy_from_slice(&now);
                }
                Op::Flush | Op::Allocate | Op::Seek { .. } | Op::WriteCompressed | Op::Populate => {}
            }
        }
    }
}

/// Runs random requests against a disk, then compares the whole disk, and its image file if it has
/// one.
fn fuzz(what: &str, spec: &DiskSpec, seed: u64, grain: u64) {
    let mut rig = Rig::new(spec);
    let size = rig.disk().size_bytes();
    eprintln!(
        "{what}: path {}, direct {}, seed {seed}, grain {grain}",
        rig.disk().path(),
        rig.disk().direct_in_use()
    );
    let mut fuzz = Fuzz::new(seed, size, grain);
    for _ in 0..150 {
        fuzz.batch(&mut rig);
    }
    for (i, part) in fuzz.model.chunks(1 << 20).enumerate() {
        assert!(rig.read((i as u64) << 20, part.len()) == part, "{what}: differs in MiB {i}");
    }
    assert_eq!(rig.flush(), 0);
    if let Some(path) = &spec.file {
        assert!(fs::read(path).unwrap() == fuzz.model, "{what}: the image differs");
    }
    let Rig { mut uring, handle } = rig;
    handle.detach(&mut uring);
    assert_eq!(uring.pending(), 0);
}

const FUZZ_BYTES: u64 = (3 << 20) + 512;

#[test]
fn random_io_on_tmpfs() {
    let dir = scratch("/dev/shm");
    let path = image(&dir, "disk.img", FUZZ_BYTES);
    for (seed, grain) in [(1, 512), (2, 1)] {
        fs::write(&path, vec![0; FUZZ_BYTES as usize]).unwrap();
        fuzz("tmpfs", &raw_spec(&path), seed, grain);
    }
    assert_eq!(open_soon(&raw_spec(&path)).path(), "inline");
}

#[test]
fn random_io_on_a_file_system() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", FUZZ_BYTES);
    let mut seed = 10;
    for direct in [Direct::Auto, Direct::Off] {
        for cache in [Cache::Writeback, Cache::Writethrough, Cache::Unsafe] {
            for grain in [512, 1] {
                fs::write(&path, vec![0; FUZZ_BYTES as usize]).unwrap();
                fuzz("/var/tmp", &DiskSpec { direct, cache, ..raw_spec(&path) }, seed, grain);
                seed += 1;
            }
        }
    }
}

#[test]
fn random_io_on_a_block_device() {
    for (parent, sector) in [("/var/tmp", 512), ("/dev/shm", 512), ("/dev/shm", 4096)] {
        let dir = scratch(parent);
        let path = image(&dir, "disk.img", 3 << 20);
        let Some(device) = LoopDevice::new(&path, sector) else { return };
        for direct in [Direct::On, Direct::Off] {
            for grain in [512, 1] {
                fs::write(&path, vec![0; 3 << 20]).unwrap();
                Command::new("blockdev").arg("--flushbufs").arg(&device.0).status().unwrap();
                let what = format!("loop over {parent}, sectors of {sector}");
                fuzz(&what, &DiskSpec { direct, ..raw_spec(&device.0) }, u64::from(sector) + grain, grain);
            }
        }
    }
}

#[test]
fn random_io_in_memory() {
    fuzz("ram", &memory_spec(Format::Ram, FUZZ_BYTES), 30, 512);
    fuzz("ram", &memory_spec(Format::Ram, FUZZ_BYTES), 31, 1);
}

#[test]
fn null_completes_and_leaves_the_buffer() {
    let mut rig = Rig::new(&memory_spec(Format::Null, 1 << 40));
    assert_eq!(rig.disk().path(), "none");
    assert_eq!(rig.read(1 << 39, 4096), vec![0xee; 4096]);
    assert_eq!(rig.write(0, &[1; 512]), 0);
    assert_eq!(rig.flush(), 0);
    rig.disk().resize(1 << 20).unwrap();
    assert_eq!(rig.disk().size_bytes(), 1 << 20);
}

#[test]
fn ram_refuses_what_is_not_mapped() {
    let mut rig = Rig::new(&memory_spec(Format::Ram, 4096));
    for offset in [4096, 8192, 1 << 30, 1 << 41, !511] {
        assert_eq!(rig.write(offset, &[1; 512]), -libc::EIO, "{offset}");
        assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, offset, 1 << 63)), -libc::EIO);
    }
    assert_eq!(rig.write(3584, &[1; 1024]), -libc::EIO);
    assert_eq!(rig.write(3584, &[1; 512]), 0);
}

#[test]
fn ram_reads_zeroes_where_it_grew() {
    let mut rig = Rig::new(&memory_spec(Format::Ram, 10 * 512));
    assert_eq!(rig.write(0, &[7; 5120]), 0);
    rig.disk().resize(512).unwrap();
    // A write after the disk has shrunk, like one of a queue that was not drained.
    assert_eq!(rig.write(1024, &[9; 512]), 0);
    rig.disk().resize(64 << 20).unwrap();
    assert_eq!(rig.read(0, 512), [7; 512]);
    assert_eq!(rig.read(512, 9216), [0; 9216]);
    assert_eq!(rig.write((64 << 20) - 512, &[8; 512]), 0);
    let e = Disk::open(&memory_spec(Format::Ram, 1 << 62)).err().expect("there is no such address space");
    assert!(e.to_string().contains("cannot map 4611686018427387904 bytes for disk d"), "{e}");
    let e = rig.disk().resize(1 << 62).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Limit);
    assert_eq!(rig.disk().size_bytes(), 64 << 20);
}

#[test]
fn ram_is_resized_under_io() {
    let disk = Disk::open(&memory_spec(Format::Ram, 1 << 20)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        for seed in 0..2 {
            let (disk, stop) = (&disk, &stop);
            s.spawn(move || {
                let mut uring = Uring::new().unwrap();
                let mut rig = Rig { handle: disk.attach(&mut uring), uring };
                let mut random = Random::new(seed);
                while !stop.load(Ordering::Relaxed) {
                    // Also offsets within the former size, like those of a queue that has checked a
                    // request already.
                    let offset = random.below(4 << 20) & !511;
                    let res = rig.write(offset, &[seed as u8; 8192]);
                    assert!(res == 0 || res == -libc::EIO);
                }
            });
        }
        let mut random = Random::new(99);
        for _ in 0..2000 {
            disk.resize((1 + random.below(8192)) * 512).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn readonly_disks_refuse_changes() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", 1 << 20);
    let in_memory = scratch("/dev/shm");
    let inline = image(&in_memory, "disk.img", 1 << 20);
    for mut spec in [raw_spec(&path), raw_spec(&inline), memory_spec(Format::Ram, 1 << 20)] {
        spec.readonly = true;
        let mut rig = Rig::new(&spec);
        assert!(rig.disk().readonly());
        assert!(rig.write(0, &[1; 512]) < 0);
        assert!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, 0, 512)) < 0);
        assert_eq!(rig.read(0, 512), [0; 512]);
        assert_eq!(rig.flush(), 0);
        let limits = rig.disk().limits();
        assert!(!limits.can_discard && !limits.can_zero && limits.max_discard_bytes == 0);
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let fails = |spec: DiskSpec, wanted: &[&str]| {
        let e = Disk::open(&spec).err().unwrap_or_else(|| panic!("{spec:?} is accepted"));
        assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
        for w in wanted {
            assert!(e.to_string().contains(w), "{e}");
        }
    };
    let none = DiskSpec { name: "d".to_owned(), ..DiskSpec::default() };
    fails(none.clone(), &["disk d", "add file=PATH"]);
    for format in [Format::Null, Format::Ram] {
        fails(DiskSpec { format: Some(format), ..none.clone() }, &["needs a size", "size=1G"]);
        fails(memory_spec(format, 0), &["disk d cannot have 0 bytes"]);
        fails(memory_spec(format, 1000), &["not a multiple of 512; 1024 is"]);
        fails(memory_spec(format, 1 << 63), &["more than a file can have"]);
        fails(DiskSpec { file: Some("x.img".into()), ..memory_spec(format, 512) }, &["leave out file=x.img"]);
        fails(DiskSpec { direct: Direct::On, ..memory_spec(format, 512) }, &["leave out direct=on"]);
    }
}
