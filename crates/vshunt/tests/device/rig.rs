//! A daemon in this process, drivers for its sockets, and load that verifies itself.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use virtio::ring::RingFeatures;
use vshunt_daemon::{Daemon, Event};
use vshunt_guest::driver::{
    Area, Memory, Options, PAGE, Queue, QueueShape, RegionSpec, RingParts, RingSetup, Session, fresh_base,
    request, status,
};
use vshunt_guest::{Disk, Error};
use vshunt_types::spec::{Direct, DiskSpec, Engine, ExportSpec, Format, QueueInfo};

/// Longest that anything here may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
pub(crate) const MIB: u64 = 1 << 20;

/// A seeded generator.
pub(crate) struct Rng(fastrand::Rng);

impl Rng {
    /// A generator with the seed `VSHUNT_SEED`, or 1. A failed test shows the seed.
    pub(crate) fn new() -> Self {
        let seed = std::env::var("VSHUNT_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
        println!("VSHUNT_SEED={seed}");
        Self::from(seed)
    }

    pub(crate) fn from(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(n).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Whether exports are to be served by the kernel (`VSHUNT_TEST_ENGINE=kernel`): what is tested of
/// the session, of rings and memory then holds for those that are handed over, too.
/// tests/kernel-relay runs it so, in a VM.
pub(crate) fn by_kernel() -> bool {
    std::env::var_os("VSHUNT_TEST_ENGINE").is_some_and(|engine| engine == "kernel")
}

/// Whether all disks are to be thin images (`VSHUNT_TEST_FORMAT=qcow2`): what holds for requests
/// holds for theirs, too.
pub(crate) fn by_qcow2() -> bool {
    std::env::var_os("VSHUNT_TEST_FORMAT").is_some_and(|format| format == "qcow2")
}

/// An empty image.
pub(crate) fn thin(size: u64) -> Vec<u8> {
    use qcow2::create::{Options, create};
    let file = qcow2::memory::Memory::new(Vec::new(), 64 * MIB);
    let cluster_size = if size > 64 * MIB { 1 << 16 } else { 4096 };
    create(&file, None, &Options { cluster_size, ..Options::new(size) }, &mut |_, _| {}).unwrap();
    file.bytes()
}

/// Split and packed rings, with and without indirect descriptors and EVENT_IDX.
pub(crate) fn shapes() -> Vec<Options> {
    let mut shapes = Vec::new();
    // The kernel has no packed ones.
    for packed in [false, true].into_iter().filter(|packed| !(*packed && by_kernel())) {
        for (indirect, event_idx) in [(true, true), (false, true), (true, false), (false, false)] {
            let queue_size = if packed { 100 } else { 64 };
            shapes.push(Options { packed, indirect, event_idx, queue_size, ..small() });
        }
    }
    shapes
}

/// One split, one packed.
pub(crate) fn layouts() -> Vec<Options> {
    let packed = Options { packed: true, queue_size: 100, ..small() };
    if by_kernel() { vec![small()] } else { vec![small(), packed] }
}

/// A driver with little memory.
pub(crate) fn small() -> Options {
    Options { queue_size: 64, buffer_bytes: 4 << 20, timeout: PATIENCE, ..Options::default() }
}

/// What a disk is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    Ram,
    /// A file on a real file system, past the page cache.
    Direct,
    /// The same through the page cache.
    Buffered,
    /// A file in memory.
    Tmpfs,
    /// A thin image on a real file system, of small clusters so that there are many.
    Qcow2,
}

/// A daemon and a place for its files.
pub(crate) struct Rig {
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) dir: tempfile::TempDir,
    shm: tempfile::TempDir,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let daemon = Daemon::new(vshunt_daemon::Options::default()).unwrap();
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = events.clone();
        daemon.on_event(Box::new(move |event| sink.lock().unwrap().push(event.clone())));
        let dir = tempfile::Builder::new().prefix("vshunt-device").tempdir_in("/var/tmp").unwrap();
        let shm = tempfile::Builder::new().prefix("vshunt-device").tempdir_in("/dev/shm").unwrap();
        Self { daemon, dir, shm, events }
    }

    /// A daemon with a disk `d` in memory and its export `e`.
    pub(crate) fn ram(size: u64, queues: u16) -> Self {
        Self::with(Backing::Ram, size, queues)
    }

    /// The same with a disk that outlives the daemon, for which an in-flight region is offered.
    pub(crate) fn lasting(size: u64, queues: u16) -> Self {
        Self::with(Backing::Tmpfs, size, queues)
    }

    fn with(backing: Backing, size: u64, queues: u16) -> Self {
        let rig = Self::new();
        rig.disk("d", backing, size, |_| {});
        rig.export("e", "d", queues, |_| {});
        rig
    }

    pub(crate) fn disk(&self, name: &str, backing: Backing, size: u64, change: impl FnOnce(&mut DiskSpec)) {
        let mut spec = DiskSpec { name: name.into(), locking: true, ..DiskSpec::default() };
        // The kernel takes what can be a block device.
        let backing = if by_kernel() && backing == Backing::Ram { Backing::Tmpfs } else { backing };
        let backing = if by_qcow2() { Backing::Qcow2 } else { backing };
        match backing {
            Backing::Ram => (spec.format, spec.size) = (Some(Format::Ram), Some(size)),
            _ => {
                let dir = if backing == Backing::Tmpfs { &self.shm } else { &self.dir };
                let file = dir.path().join(format!("{name}.img"));
                if backing == Backing::Qcow2 {
                    std::fs::write(&file, thin(size)).unwrap();
                    spec.format = Some(Format::Qcow2);
                } else {
                    std::fs::File::create(&file).unwrap().set_len(size).unwrap();
                }
                spec.file = Some(file);
                spec.direct = if backing == Backing::Direct { Direct::On } else { Direct::Auto };
                if backing == Backing::Buffered {
                    spec.direct = Direct::Off;
                }
            }
        }
        change(&mut spec);
        self.daemon.disk_add(spec).unwrap();
    }

    pub(crate) fn export(&self, name: &str, disk: &str, queues: u16, change: impl FnOnce(&mut ExportSpec)) {
        let mut spec = ExportSpec {
            name: name.into(),
            disk: disk.into(),
            socket: Some(self.socket(name)),
            queues: Some(queues),
            engine: by_kernel().then_some(Engine::Kernel),
            ..ExportSpec::default()
        };
        change(&mut spec);
        self.daemon.export_add(spec).unwrap();
    }

    pub(crate) fn socket(&self, export: &str) -> PathBuf {
        self.dir.path().join(format!("{export}.sock"))
    }

    pub(crate) fn connect(&self, export: &str, options: Options) -> Client {
        Client::new(Disk::connect(self.socket(export), options).unwrap())
    }

    pub(crate) fn queue(&self, export: &str, index: u16) -> QueueInfo {
        self.daemon.queues().into_iter().find(|q| q.export == export && q.index == index).unwrap()
    }

    /// Waits until an event has come of which `f` makes something.
    pub(crate) fn event<T>(&self, what: &str, mut f: impl FnMut(&Event) -> Option<T>) -> T {
        wait_for(what, || self.events.lock().unwrap().iter().find_map(&mut f))
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// Waits for the word that a queue is broken, and what it says.
    pub(crate) fn broken(&self, name: &str, queue: u16) -> String {
        self.event("QueueBroken", |event| match event {
            Event::QueueBroken { export, index, reason } if export == name && *index == queue => {
                Some(reason.clone())
            }
            _ => None,
        })
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.daemon.shutdown();
        }
    }
}

/// Moves a queue. A busy machine may not run a worker for a second; the attach is then refused, and
/// tried again.
pub(crate) fn attach(daemon: &Daemon, export: &str, queue: u16, worker: u32) {
    let start = Instant::now();
    while let Err(e) = daemon.queue_attach(export, queue, worker, PATIENCE) {
        assert!(e.to_string().contains("(stalled)") && start.elapsed() < PATIENCE, "{e}");
    }
}

/// Polls until `what` gives something.
pub(crate) fn wait_for<T>(name: &str, mut what: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = what() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{name} did not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Whether an eventfd was signalled within `wait`.
pub(crate) fn signalled(fd: &OwnedFd, wait: Duration) -> bool {
    let limit = rustix::event::Timespec::try_from(wait).unwrap();
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
}

/// What came of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u8,
    /// As the used element has it.
    pub(crate) len: u32,
    /// The device-writable bytes before the status.
    pub(crate) data: Vec<u8>,
}

/// The bytes of a request's header.
pub(crate) fn header(kind: u32, sector: u64) -> [u8; 16] {
    (u128::from(kind) | u128::from(sector) << 64).to_le_bytes()
}

/// The bytes of a range of DISCARD or WRITE_ZEROES.
pub(crate) fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    (u128::from(sector) | u128::from(sectors) << 64 | u128::from(flags) << 96).to_le_bytes()
}

/// A connected disk, and room for a request's parts.
pub(crate) struct Client {
    pub(crate) disk: Disk,
    pub(crate) arena: Area,
}

/// Where the parts of a plain request lie in the arena.
const OUT_AT: usize = 4096;
const IN_AT: usize = 1 << 20;
const STATUS_AT: usize = 64;
/// Bytes of a client's arena.
pub(crate) const ARENA: usize = 2 << 20;

impl Client {
    pub(crate) fn new(disk: Disk) -> Self {
        let arena = disk.memory().alloc(ARENA, PAGE).unwrap();
        Self { disk, arena }
    }

    /// A request of at most four buffers: header, `out` for the device to read, room for it to
    /// write, status.
    pub(crate) fn go(&mut self, q: u16, kind: u32, sector: u64, out: &[u8], room: usize) -> Reply {
        use vshunt_guest::driver::DriverSeg;
        self.arena.write(0, &header(kind, sector));
        self.arena.write(OUT_AT, out);
        self.arena.part(IN_AT, room).fill(0xa5);
        self.arena.write(STATUS_AT, &[status::UNTOUCHED]);
        let at = |offset: usize, len: usize, writable| DriverSeg {
            addr: self.arena.guest() + offset as u64,
            len: len as u32,
            writable,
        };
        let mut segs = vec![at(0, 16, false)];
        if !out.is_empty() {
            segs.push(at(OUT_AT, out.len(), false));
        }
        if room > 0 {
            segs.push(at(IN_AT, room, true));
        }
        segs.push(at(STATUS_AT, 1, true));
        let indirect = self.disk.queue(q).indirect();
        let cookie = self.disk.submit(q, &segs, indirect).unwrap();
        let completion = self.disk.wait_for(q, Some(cookie)).unwrap();
        Reply {
            status: self.arena.part(STATUS_AT, 1).to_vec()[0],
            len: completion.len,
            data: self.arena.part(IN_AT, room).to_vec(),
        }
    }

    /// The status alone.
    pub(crate) fn status(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> u8 {
        let reply = self.go(0, kind, sector, out, room);
        assert!(reply.len as usize <= room + 1, "{reply:?} of {room} bytes and a status");
        reply.status
    }

    pub(crate) fn read(&mut self, sector: u64, bytes: usize) -> Vec<u8> {
        let reply = self.go(0, request::IN, sector, &[], bytes);
        assert_eq!((reply.status, reply.len as usize), (status::OK, bytes + 1));
        reply.data
    }

    pub(crate) fn write(&mut self, sector: u64, bytes: &[u8]) {
        let reply = self.go(0, request::OUT, sector, bytes, 0);
        assert_eq!((reply.status, reply.len), (status::OK, 1));
    }
}

/// A driver whose connection and queues are apart, so that threads load the queues while a test
/// plays with the connection.
pub(crate) struct Machine {
    pub(crate) session: Session,
    pub(crate) memory: Arc<Memory>,
    pub(crate) parts: Vec<RingParts>,
    pub(crate) options: Options,
    pub(crate) shape: QueueShape,
    queues: Vec<Option<Queue>>,
}

impl Machine {
    /// Connects and negotiates; rings and memory are not told yet.
    pub(crate) fn open(path: &Path, options: Options) -> Self {
        let session = Session::open(path.to_owned(), &options).unwrap();
        let features = RingFeatures::from_bits(session.features());
        let shape = QueueShape { size: options.queue_size, features, indirect_cap: options.indirect_cap };
        let mut specs = options.regions.clone();
        if specs.is_empty() {
            let size = (shape.memory() + MIB) * u64::from(options.queues) + options.buffer_bytes;
            specs.push(RegionSpec { guest_addr: 0x4000_0000, size: size.next_multiple_of(2 * MIB) });
        }
        let memory = Memory::new(&specs).unwrap();
        let queues: Vec<_> =
            (0..options.queues).map(|q| Some(Queue::new(&memory, q, shape).unwrap())).collect();
        let parts = queues.iter().flatten().map(|q| q.parts().clone()).collect();
        Self { session, memory, parts, options, shape, queues }
    }

    /// The same, and set going.
    pub(crate) fn connect(path: &Path, options: Options) -> Self {
        let mut machine = Self::open(path, options);
        machine.start().unwrap();
        machine
    }

    pub(crate) fn start(&mut self) -> Result<(), Error> {
        let base = fresh_base(self.shape.features.packed);
        let rings: Vec<_> = self.parts.iter().map(|parts| RingSetup { parts, base }).collect();
        self.session.start(&self.memory, &rings)
    }

    /// Makes all rings again, as a driver does after a reset.
    pub(crate) fn renew(&mut self) {
        self.queues = (0..self.options.queues)
            .map(|q| Some(Queue::new(&self.memory, q, self.shape).unwrap()))
            .collect();
        self.parts = self.queues.iter().flatten().map(|q| q.parts().clone()).collect();
    }

    /// The same for one ring.
    pub(crate) fn renew_one(&mut self, q: u16) {
        let queue = Queue::new(&self.memory, q, self.shape).unwrap();
        self.parts[usize::from(q)] = queue.parts().clone();
        self.queues[usize::from(q)] = Some(queue);
    }

    pub(crate) fn take_queue(&mut self, q: u16) -> Queue {
        self.queues[usize::from(q)].take().expect("nobody else drives it")
    }

    /// Gives back what [`take_queue`](Self::take_queue) took, or [`Load::end`] gave.
    pub(crate) fn put_queue(&mut self, queue: Queue) {
        let q = usize::from(queue.parts().index);
        self.queues[q] = Some(queue);
    }

    /// Loads queue `q`, on a region of the disk of its own, until told to stop.
    pub(crate) fn load(&mut self, q: u16) -> Load {
        let queue = self.take_queue(q);
        Load::start(queue, &self.memory)
    }
}

/// Bytes of a block of the load.
pub(crate) const BLOCK: usize = 4096;
/// Blocks of one queue's region of the disk.
const BLOCKS: u64 = 64;
/// Bytes of the disk that one queue's load uses.
pub(crate) const LOAD_BYTES: u64 = BLOCKS * BLOCK as u64;
const DEPTH: usize = 8;

/// Load on one queue by a thread: writes stamped blocks, reads them back, and panics at any that is
/// not what was written last, at any completion too many, and when none comes for long.
pub(crate) struct Load {
    thread: Option<JoinHandle<Queue>>,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    /// Longest that a request took, µs.
    longest_us: Arc<AtomicU64>,
}

impl Load {
    fn start(queue: Queue, memory: &Arc<Memory>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (done, longest_us) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let buffers: Vec<_> = (0..DEPTH).map(|_| memory.alloc(BLOCK, 512).unwrap()).collect();
        let (s, d, l) = (stop.clone(), done.clone(), longest_us.clone());
        let thread = std::thread::Builder::new()
            .name(format!("load-{}", queue.parts().index))
            .spawn(move || drive(queue, &buffers, &s, &d, &l))
            .unwrap();
        Self { thread: Some(thread), stop, done, longest_us }
    }

    /// Requests completed.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub(crate) fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Ordering::Relaxed))
    }

    pub(crate) fn forget_longest(&self) {
        self.longest_us.store(0, Ordering::Relaxed);
    }

    /// Waits until `n` more requests are done: the load is alive.
    pub(crate) fn progress(&self, n: u64) {
        let from = self.done();
        wait_for("progress of the load", || {
            assert!(!self.thread.as_ref().unwrap().is_finished(), "the load ended early");
            (self.done() >= from + n).then_some(())
        });
    }

    /// Ends it and gives the queue back, idle.
    pub(crate) fn end(mut self) -> Queue {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            assert!(result.is_ok() || std::thread::panicking(), "the load failed");
        }
    }
}

#[derive(Clone, Copy)]
struct Outstanding {
    buffer: usize,
    block: u64,
    write: bool,
    since: Instant,
}

fn stamp(queue: u16, block: u64, generation: u32) -> [u8; 16] {
    (u128::from(queue) << 96 | u128::from(block) << 32 | u128::from(generation)).to_le_bytes()
}

fn drive(
    mut queue: Queue,
    buffers: &[Area],
    stop: &AtomicBool,
    done: &AtomicU64,
    longest_us: &AtomicU64,
) -> Queue {
    let index = queue.parts().index;
    let never = new_eventfd();
    let mut rng = Rng::from(u64::from(index) + 77);
    let base = u64::from(index) * LOAD_BYTES / 512;
    let mut generations = vec![0u32; BLOCKS as usize];
    let mut busy = vec![false; BLOCKS as usize];
    let mut free: Vec<usize> = (0..buffers.len()).collect();
    let mut out: Vec<Option<Outstanding>> = vec![None; usize::from(queue.parts().size)];
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        while !stopping && let Some(buffer) = free.pop() {
            let block = rng.below(BLOCKS);
            let Some(slot) = (!busy[block as usize]).then(|| queue.take_slot()).flatten() else {
                free.push(buffer);
                break;
            };
            let write = generations[block as usize] == 0 || rng.chance(50);
            let area = &buffers[buffer];
            if write {
                generations[block as usize] += 1;
                let stamp = stamp(index, block, generations[block as usize]);
                for at in (0..BLOCK).step_by(16) {
                    area.write(at, &stamp);
                }
            } else {
                area.fill(0xbd);
            }
            let kind = if write { request::OUT } else { request::IN };
            if !queue.stage(slot, kind, base + block * 8, (area.guest(), BLOCK as u32)) {
                generations[block as usize] -= u32::from(write);
                queue.give_slot(slot);
                free.push(buffer);
                break;
            }
            busy[block as usize] = true;
            out[usize::from(slot)] = Some(Outstanding { buffer, block, write, since: Instant::now() });
        }
        queue.publish();
        if stopping && free.len() == buffers.len() {
            return queue;
        }
        if free.len() < buffers.len() {
            let since = Instant::now();
            // A notification may come without a completion: for a new descriptor, or late.
            while !queue.has_used() && since.elapsed() < PATIENCE {
                queue.wait(PATIENCE, never.as_fd());
            }
            assert!(
                queue.has_used(),
                "queue {index}: no completion for {PATIENCE:?}: {:?}",
                queue.next_used()
            );
        }
        while let Some(completion) = queue.poll().unwrap() {
            let slot = completion.cookie;
            let o = out[usize::from(slot)].take().expect("completed twice");
            assert_eq!(queue.status(slot), status::OK, "queue {index}, block {}", o.block);
            let len = if o.write { 1 } else { BLOCK as u32 + 1 };
            assert_eq!(completion.len, len, "queue {index}, block {}, write {}", o.block, o.write);
            if !o.write {
                let want = stamp(index, o.block, generations[o.block as usize]);
                let got = buffers[o.buffer].to_vec();
                let bad = got.chunks(16).position(|c| c != want);
                assert!(bad.is_none(), "queue {index}, block {}: not what was written", o.block);
            }
            longest_us.fetch_max(o.since.elapsed().as_micros() as u64, Ordering::Relaxed);
            busy[o.block as usize] = false;
            free.push(o.buffer);
            queue.give_slot(slot);
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}
