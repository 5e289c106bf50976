//! What a request costs that finds its clusters in the map of a qcow2 image, beside the same
//! request of a raw file.
//!
//! `cargo bench -p vshunt-block --bench hit` prints a table; `-- times` and `-- instructions` print
//! one half of it. The images are in /dev/shm, so a request ends before `start` returns.
//! Instructions are those of this program without the kernel, counted by valgrind: two runs of
//! different length are subtracted. Times are medians of rounds, in which the disks take turns.
//! They contain the system call.
//!
//! The rows of `lookup` call crate `qcow2` only, and their times contain no system call.

#![allow(clippy::disallowed_methods, reason = "it starts a copy of itself under valgrind")]

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use qcow2::create::{Options, create};
use qcow2::memory::Memory;
use qcow2::{
    Batch, Buf, Chain, Context, FastPath, Image, Request, Served, Settings, Step, Storage, User, Waker,
};
use vshunt_block::{Disk, DiskHandle, Io, Op};
use vshunt_engine::Uring;
use vshunt_types::spec::{DiskSpec, Format};

const DISK_BYTES: u64 = 64 << 20;
const LONGEST_BYTES: u64 = 128 << 10;
/// Requests that a queue takes at a time.
const BATCH: u64 = 32;
/// Requests of a round, and of the shorter and the longer run under valgrind.
const ROUND: u64 = 32 * BATCH;
const COUNTED: [u64; 2] = [32 * BATCH, 96 * BATCH];
const ROUNDS: usize = 61;

/// What is compared. The first one of each table is the base of the differences.
const TABLES: [[&str; 3]; 2] =
    [["raw", "qcow2", "extended"], ["lookup nothing", "lookup qcow2", "lookup extended"]];
/// Operation and bytes of the rows.
const ROWS: [(&str, u64); 4] = [("read", 4096), ("write", 4096), ("read", 128 << 10), ("write", 128 << 10)];

/// Something whose requests are measured.
trait Subject {
    /// Carries out a request at `offset`.
    fn request(&mut self, write: bool, offset: u64, bytes: u64);

    /// Begins or ends a batch of requests.
    fn batch(&mut self, begins: bool);
}

/// An open disk on an io_uring of this thread.
struct OpenDisk {
    handle: Option<DiskHandle>,
    uring: Uring,
    io: Box<Io>,
    buffer: Vec<u8>,
}

impl OpenDisk {
    fn open(path: &Path) -> Self {
        let format = if path.ends_with("raw") { Format::Raw } else { Format::Qcow2 };
        let file = Some(path.to_owned());
        let spec = DiskSpec { name: "d".into(), file, format: Some(format), ..DiskSpec::default() };
        let disk = Disk::open(&spec).expect("the image is opened");
        let mut uring = Uring::new().expect("an io_uring");
        let handle = Some(disk.attach(&mut uring));
        Self { handle, uring, io: Box::default(), buffer: vec![1; LONGEST_BYTES as usize] }
    }

    /// Makes an image and writes all of it.
    fn make(path: &Path) {
        let file = Memory::new(Vec::new(), DISK_BYTES);
        if path.ends_with("raw") {
            file.set_len(DISK_BYTES).expect("there is room");
        } else {
            let options = Options { extended_l2: path.ends_with("extended"), ..Options::new(DISK_BYTES) };
            create(&file, None, &options, &mut |_, _| {}).expect("the image is made");
        }
        std::fs::write(path, file.bytes()).expect("the image is written");
        let mut disk = Self::open(path);
        (0..DISK_BYTES / LONGEST_BYTES).for_each(|n| disk.request(true, n * LONGEST_BYTES, LONGEST_BYTES));
    }
}

impl Subject for OpenDisk {
    fn request(&mut self, write: bool, offset: u64, bytes: u64) {
        self.io.reset(if write { Op::Write } else { Op::Read }, offset, false);
        // SAFETY: the buffer and the boxed `io` stay until the request ends: `run` waits for it.
        unsafe { self.io.push(self.buffer.as_mut_ptr(), bytes as usize) };
        let handle = self.handle.as_ref().expect("it is there until the drop");
        handle.run(&mut self.uring, black_box(&mut self.io)).expect("the request succeeds");
    }

    fn batch(&mut self, begins: bool) {
        let handle = self.handle.as_ref().expect("it is there until the drop");
        if begins { handle.begin_batch() } else { handle.end_batch() }
    }
}

impl Drop for OpenDisk {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.detach(&mut self.uring);
        }
    }
}

/// The map of an image, without a disk.
struct Lookup {
    chain: Chain,
    user: User,
    batch: Option<Batch>,
}

impl Lookup {
    fn new(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("the image is read");
        let file = Memory::new(bytes, 2 * DISK_BYTES);
        let header = Image::open(&file).expect("an image").header().clone();
        let settings = Settings { file: 0, data: 0, cache_bytes: None, writable: true, room: false };
        let image = Arc::new(Served::open(&file, header, settings).expect("it is opened"));
        let user = image.join();
        let mut lookup = Self { chain: Chain::new(image, Vec::new()), user, batch: None };
        lookup.load(&file);
        lookup
    }

    /// Reads the whole disk, so that the map is in memory.
    fn load(&mut self, file: &Memory) {
        let (mut request, waker) = (Request::default(), Waker { who: 0, token: 0 });
        let mut result = None;
        loop {
            let (chain, user) = (&self.chain, &mut self.user);
            let mut cx = Context { chain, user, waker, wake: &mut |_| {}, readonly: false };
            let step = match result {
                None => request.start(qcow2::Op::Read, 0, DISK_BYTES, false, &mut cx),
                Some(res) => request.resume(res, &mut cx),
            };
            match step {
                Step::Done(res) => return assert_eq!(res, 0),
                Step::Read { offset, range, .. } => {
                    file.read_at(offset, &mut request.bytes(Buf::Meta)[range]).expect("it is in memory");
                }
                _ => {}
            }
            result = Some(0);
        }
    }
}

impl Subject for Lookup {
    fn request(&mut self, write: bool, offset: u64, bytes: u64) {
        let op = if write { qcow2::Op::Write } else { qcow2::Op::Read };
        let hit = FastPath::find(&self.chain, &mut self.user, op, black_box(offset), bytes);
        // None: the request reaches from one slice of the map into the next.
        if let Some(hit) = black_box(hit) {
            hit.end(&self.chain, &mut self.user);
        }
    }

    fn batch(&mut self, begins: bool) {
        if begins {
            self.batch = Some(Batch::begin(&self.chain, &mut self.user));
        } else if let Some(batch) = self.batch.take() {
            batch.end(&self.chain, &mut self.user);
        }
    }
}

/// What remains of the measurement without a look-up.
struct Nothing;

impl Subject for Nothing {
    fn request(&mut self, write: bool, offset: u64, bytes: u64) {
        black_box((write, offset, bytes));
    }

    fn batch(&mut self, begins: bool) {
        black_box(begins);
    }
}

/// Makes what `name` names.
fn subject(dir: &Path, name: &str) -> Box<dyn Subject> {
    match name.strip_prefix("lookup ") {
        Some("nothing") => Box::new(Nothing),
        Some(image) => Box::new(Lookup::new(&dir.join(image))),
        None => Box::new(OpenDisk::open(&dir.join(name))),
    }
}

/// Makes `count` requests at places that a sequence of random numbers chooses. A request of 4 KiB
/// lies in one cluster.
fn run(subject: &mut dyn Subject, write: bool, bytes: u64, count: u64) {
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..count / BATCH {
        subject.batch(true);
        for _ in 0..BATCH {
            let offset = random.u64(0..=(DISK_BYTES - bytes) / 4096) * 4096;
            subject.request(write, offset, bytes);
        }
        subject.batch(false);
    }
}

/// Returns the instructions of a request.
fn instructions(dir: &Path, name: &str, op: &str, bytes: u64) -> f64 {
    let collect = |count: u64| -> f64 {
        let program = std::env::current_exe().expect("this program has a path");
        let out = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(program)
            .args(["--only", &dir.display().to_string(), name, op, &bytes.to_string(), &count.to_string()])
            .output()
            .expect("valgrind starts");
        let text = String::from_utf8_lossy(&out.stderr);
        let collected = text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
        collected.unwrap_or_else(|| panic!("{text}"))
    };
    let [few, many] = COUNTED;
    (collect(many) - collect(few)) / (many - few) as f64
}

/// Returns the median time of a request of each subject, in nanoseconds.
fn times(subjects: &mut [Box<dyn Subject>], op: &str, bytes: u64) -> Vec<f64> {
    let mut times = vec![Vec::new(); subjects.len()];
    for _ in 0..ROUNDS {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            let begin = Instant::now();
            run(&mut **subject, op == "write", bytes, ROUND);
            times.push(begin.elapsed().as_nanos() as f64 / ROUND as f64);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    };
    times.into_iter().map(median).collect()
}

/// Prints a row for each name. The first one is the base of the differences.
fn print(unit: &str, names: &[&str], op: &str, bytes: u64, values: &[f64]) {
    for (name, value) in names.iter().zip(values) {
        println!("{name:16} {op:5} {:3} KiB {value:9.1} {unit} ({:+8.1})", bytes >> 10, value - values[0]);
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if let [only, dir, name, op, bytes, count] = &args[..]
        && only == "--only"
    {
        let number = |text: &str| text.parse().expect("a number");
        let mut subject = subject(Path::new(dir), name);
        return run(&mut *subject, op == "write", number(bytes), number(count));
    }
    let wants = |part: &str| args.is_empty() || args.iter().any(|arg| arg == part);
    let dir = tempfile::Builder::new().prefix("vshunt-hit-").tempdir_in("/dev/shm").expect("a tmpfs");
    TABLES[0].iter().for_each(|name| OpenDisk::make(&dir.path().join(name)));
    for names in TABLES {
        for (op, bytes) in ROWS {
            if wants("instructions") {
                let counts = names.map(|name| instructions(dir.path(), name, op, bytes));
                print("instructions", &names, op, bytes, &counts);
            }
            if wants("times") {
                let mut subjects = names.map(|name| subject(dir.path(), name));
                print("ns", &names, op, bytes, &times(&mut subjects, op, bytes));
            }
        }
    }
}
