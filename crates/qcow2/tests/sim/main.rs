//! A simulation of many workers on one image. A seed decides which request continues next, and what
//! a crash leaves.
//!
//! `QCOW2_SIM_SEEDS=N` runs N seeds instead of a few; `QCOW2_SIM_SEED=N` runs that one alone.

mod check;
mod file;
mod kill;
mod model;
#[path = "../../src/testing/random.rs"]
mod random;
mod rollback;

use std::sync::Arc;
use std::time::Duration;

use file::{File, SECTOR};
use kill::Shared;
use model::{Model, Time};
use qcow2::header::{Compression, Header, autoclear, incompatible};
use qcow2::{
    Chain, Context, FastPath, Layer, Op, Request, Served, Settings, Step, Storage, User, Waker, journal,
};
use random::Rng;

/// The parameters of a simulation.
#[derive(Clone, Debug)]
struct Shape {
    cluster_bits: u32,
    refcount_order: u32,
    extended: bool,
    version: u32,
    size: u64,
    workers: usize,
    slots: usize,
    cache_bytes: u64,
    below: bool,
    /// One step of this number fails. 0: none does.
    faults: u64,
    /// Clusters of the file that are counted without being used: every n-th, or none if 0.
    holes: u64,
    /// Records of the map's journal. 0: there is none, as for version 2.
    records: usize,
    /// How long a generation of the journal lasts: until a flush, or until the next record.
    generation_lasts: Duration,
    data: Data,
    /// Whether space can be allocated ahead at the file's end.
    extends: bool,
}

/// The location of the disk's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    /// In the image.
    Within,
    /// In an external data file.
    External,
    /// In an external data file that is the disk byte for byte.
    Raw,
}

impl Shape {
    fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let extended = rng.below(4) == 0;
        let cluster_bits = if extended { 14 } else { [9, 9, 10, 12, 12, 16][rng.below(6) as usize] };
        let size = match cluster_bits {
            9 => 300 << 10,
            10..=12 => 1 << 20,
            _ => 4 << 20,
        };
        let mut shape = Self {
            cluster_bits,
            refcount_order: [4, 4, 0, 1, 3, 5, 6][rng.below(7) as usize],
            extended,
            version: if !extended && rng.below(4) == 0 { 2 } else { 3 },
            size: size + rng.below(3) * 512 * 3,
            workers: 1 + rng.below(4) as usize,
            slots: 1 + rng.below(4) as usize,
            cache_bytes: [0, 1 << 20][rng.below(2) as usize],
            below: rng.below(3) == 0,
            faults: [0, 0, 0, 100, 20][rng.below(5) as usize],
            holes: [0, 0, 3][rng.below(3) as usize],
            records: [0, 16, 64, 4096][rng.below(4) as usize],
            generation_lasts: if seed & 1 == 0 { Duration::MAX } else { Duration::ZERO },
            data: [Data::Within, Data::Within, Data::External, Data::Raw][rng.below(4) as usize],
            extends: rng.below(3) > 0,
        };
        if shape.version == 2 {
            (shape.records, shape.data) = (0, Data::Within);
        }
        if shape.data == Data::Raw {
            // A raw data file contains the whole disk.
            shape.below = false;
        }
        shape
    }
}

fn up(n: u64, unit: u64) -> u64 {
    n.div_ceil(unit) * unit
}

/// Makes an empty image: header, refcount table and block, L1 table.
fn blank(shape: &Shape) -> Vec<u8> {
    let order = if shape.version == 2 { 4 } else { shape.refcount_order };
    let mut h = Header {
        version: shape.version,
        cluster_bits: shape.cluster_bits,
        size: shape.size,
        l1_size: 0,
        l1_offset: 0,
        reftable_offset: 1 << shape.cluster_bits,
        reftable_clusters: 1,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: if shape.extended { incompatible::EXTENDED_L2 } else { 0 }
            | if shape.data == Data::Within { 0 } else { incompatible::DATA_FILE },
        compatible: 0,
        autoclear: if shape.data == Data::Raw { autoclear::RAW_DATA } else { 0 },
        refcount_order: order,
        compression: Compression::Zlib,
        backing: None,
        backing_format: None,
        data_file: (shape.data != Data::Within).then(|| "data".to_owned()),
        bitmaps: None,
        mark: None,
        unknown: vec![],
        extra: vec![],
    };
    let size = h.cluster_size();
    h.l1_size = h.l1_needed() as u32;
    // Room in the refcount table for several times the disk.
    h.reftable_clusters = up(up(shape.size * 4 / size, h.refblock_entries()) / h.refblock_entries() * 8, size)
        as u32
        / size as u32;
    h.l1_offset = h.reftable_offset + u64::from(h.reftable_clusters) * size;
    let block_at = h.l1_offset + up(u64::from(h.l1_size) * 8, size);
    let mut clusters = block_at / size;
    // As many refcount blocks as the clusters up to them need.
    let mut blocks = 1;
    while (clusters + blocks).div_ceil(h.refblock_entries()) > blocks {
        blocks += 1;
    }
    clusters += blocks;
    let used = clusters;
    if shape.holes > 0 {
        clusters = (clusters + 64).min(blocks * h.refblock_entries());
    }
    let mut image = vec![0; (clusters * size) as usize];
    let first = h.encode().unwrap();
    image[..first.len()].copy_from_slice(&first);
    for i in 0..blocks {
        let at = (h.reftable_offset + i * 8) as usize;
        image[at..at + 8].copy_from_slice(&(block_at + i * size).to_be_bytes());
    }
    let bits = 1usize << order;
    let in_use = |c: &u64| *c < used || c.is_multiple_of(shape.holes.max(1));
    for cluster in (0..clusters).filter(in_use) {
        let at = block_at as usize + (cluster / h.refblock_entries() * size) as usize;
        let i = (cluster % h.refblock_entries()) as usize;
        match bits {
            1..8 => image[at + i * bits / 8] |= 1 << (i * bits % 8),
            _ => image[at + i * bits / 8 + bits / 8 - 1] = 1,
        }
    }
    // The old contents are not zero.
    for cluster in (used..clusters).filter(|c| !in_use(c)) {
        image[(cluster * size) as usize..][..size as usize].fill(0x6b);
    }
    image
}

/// A request of the simulation.
struct Slot {
    request: Request,
    op: Op,
    begin: Time,
    first: usize,
    guest: Vec<u8>,
    step: Option<Step>,
    /// The fast path that it took. The step is then its only one.
    fast_path: Option<FastPath>,
    /// Whether it was woken while it waits.
    woken: bool,
}

struct Sim {
    rng: Rng,
    shape: Shape,
    /// The image, its backing file, its data file.
    files: [File; 3],
    chain: Chain,
    /// The memory of the map's journal.
    shared: Option<Shared>,
    users: Vec<User>,
    slots: Vec<Slot>,
    model: Model,
    now: Time,
    stamp: u32,
    crashes: u32,
    kills: u32,
    faults: u64,
    fast_paths: u64,
    log: bool,
}

/// Opens an image that was closed or repaired.
fn open(file: &File, shape: &Shape, shared: Option<&Shared>) -> Chain {
    let open_header = match shared {
        Some(shared) => Some(journal::mark_open(file, shared.id).unwrap()),
        None => {
            journal::mark_open_without_journal(file, false).unwrap();
            None
        }
    };
    let mut first = vec![0; 1 << 16];
    file.read_at(0, &mut first).unwrap();
    let header = Header::parse(&first).unwrap();
    let data = if shape.data == Data::Within { 0 } else { 2 };
    let settings =
        Settings { file: 0, data, cache_bytes: Some(shape.cache_bytes), writable: true, room: false };
    let mut image = Served::open(file, header, settings).unwrap();
    if let Some((shared, open_header)) = shared.zip(open_header) {
        image = image.with_journal(shared.journal(), open_header);
    }
    Chain::new(Arc::new(image), below(shape))
}

/// Returns the layers below the image.
fn below(shape: &Shape) -> Vec<Layer> {
    let below = Layer::Raw { file: 1, size: shape.size / 2 / 512 * 512 };
    if shape.below { vec![below] } else { vec![] }
}

impl Sim {
    fn new(seed: u64) -> Self {
        Self::of(seed, Shape::of(seed))
    }

    fn of(seed: u64, shape: Shape) -> Self {
        let sectors = (shape.size / SECTOR as u64) as usize;
        let mut model = Model::new(sectors);
        let mut below = vec![0u8; shape.size as usize / 2 / 512 * 512];
        if shape.below {
            for (i, sector) in below.chunks_mut(SECTOR).enumerate() {
                fill(sector, 0x4000_0000 + i as u32);
                model.set_known(i, 0x4000_0000 + i as u32, 1);
            }
        }
        let files = [File::of(blank(&shape)), File::of(below), File::default()];
        let mut rng = Rng::new(seed);
        let shared = Shared::new(&shape, &mut rng);
        let chain = open(&files[0], &shape, shared.as_ref());
        let mut sim = Self {
            rng,
            shape,
            files,
            chain,
            shared,
            users: vec![],
            slots: vec![],
            model,
            now: 10,
            stamp: 0,
            crashes: 0,
            kills: 0,
            faults: 0,
            fast_paths: 0,
            log: std::env::var_os("QCOW2_SIM_LOG").is_some(),
        };
        sim.join();
        sim
    }

    fn join(&mut self) {
        let image = self.chain.top().clone();
        self.users = (0..self.shape.workers).map(|_| image.join()).collect();
        let slot = |_| Slot {
            request: Request::default(),
            op: Op::Read,
            begin: 0,
            first: 0,
            guest: vec![],
            step: None,
            fast_path: None,
            woken: false,
        };
        self.slots = (0..self.shape.workers * self.shape.slots).map(slot).collect();
    }

    fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    /// Makes one random event happen.
    fn step(&mut self) {
        let i = self.rng.below(self.slots.len() as u64) as usize;
        match self.slots[i].step.clone() {
            None if self.rng.below(3) > 0 => self.start(i),
            Some(Step::Park) if !self.slots[i].woken => {}
            Some(step) => self.go_on(i, &step),
            None => {}
        }
    }

    fn start(&mut self, i: usize) {
        let sectors = self.model_len();
        let op = match self.rng.below(17) {
            0..4 => Op::Read,
            4..10 => Op::Write,
            10 => Op::WriteCompressed,
            11 => Op::Zero { unmap: true },
            12 => Op::Zero { unmap: false },
            13 | 14 => Op::Discard,
            15 => Op::Populate,
            _ => Op::Flush,
        };
        let cluster = (1u64 << self.shape.cluster_bits) / SECTOR as u64;
        let most = match self.rng.below(4) {
            0 => 1,
            1 => cluster,
            2 => cluster * 3,
            _ => cluster * 40,
        };
        // Half of all events happen in a small part of the disk.
        let range = if self.rng.below(2) == 0 { sectors } else { (sectors / 16).max(1) };
        let mut first = self.rng.below(range);
        let mut len = (1 + self.rng.below(most)).min(sectors - first).min((2 << 20) / SECTOR as u64);
        if self.rng.below(3) == 0 {
            first = first / cluster * cluster;
            len = up(len, cluster).min(sectors - first);
        }
        if op == Op::WriteCompressed {
            first = first / cluster * cluster;
            len = cluster.min(sectors - first);
        }
        if op == Op::Flush {
            (first, len) = (0, 0);
        }
        let begin = self.tick();
        let stable = op != Op::Read && self.rng.below(8) == 0;
        if self.log {
            eprintln!("{begin}: slot {i} {op:?} {first}+{len}");
        }
        self.stamp += 1;
        let writes = matches!(op, Op::Write | Op::WriteCompressed);
        let value = if writes { self.stamp } else { 0 };
        // The disk reads the same before and after it.
        if !matches!(op, Op::Read | Op::Flush | Op::Populate) {
            (first..first + len).for_each(|s| self.model.start(s as usize, value, begin, op == Op::Discard));
        }
        let slot = &mut self.slots[i];
        (slot.op, slot.begin, slot.first) = (op, begin, first as usize);
        slot.guest = vec![0xee; len as usize * SECTOR];
        if writes {
            slot.guest.chunks_mut(SECTOR).for_each(|sector| fill(sector, value));
        }
        let bytes = (first * SECTOR as u64, len * SECTOR as u64);
        let user = &mut self.users[i / self.shape.slots];
        let fast_path = if stable { None } else { FastPath::find(&self.chain, user, op, bytes.0, bytes.1) };
        if let Some(fast_path) = fast_path {
            self.fast_paths += 1;
            let slot = &mut self.slots[i];
            slot.step = Some(Step::Data { file: fast_path.file, offset: fast_path.offset, data: 0..bytes.1 });
            slot.fast_path = Some(fast_path);
            return;
        }
        self.with(i, |request, cx| request.start(op, bytes.0, bytes.1, stable, cx));
    }

    fn model_len(&self) -> u64 {
        self.shape.size / SECTOR as u64
    }

    /// Calls a request, stores its next step, and wakes other requests.
    fn with(&mut self, i: usize, call: impl FnOnce(&mut Request, &mut Context<'_>) -> Step) {
        let mut woken = Vec::new();
        let slot = &mut self.slots[i];
        let user = &mut self.users[i / self.shape.slots];
        let mut wake = |w: Waker| woken.push(w);
        let waker = Waker { who: (i / self.shape.slots) as u64, token: i as u64 };
        let step = {
            let mut cx = Context { chain: &self.chain, user, waker, wake: &mut wake, readonly: false };
            call(&mut slot.request, &mut cx)
        };
        slot.woken = false;
        slot.step = Some(step.clone());
        for w in woken {
            let other = &mut self.slots[w.token as usize];
            // It may be about to wait: its own call pushed the waker and has not returned.
            other.woken = true;
        }
        if let Step::Done(res) = step {
            self.end(i, res);
        }
    }

    fn go_on(&mut self, i: usize, step: &Step) {
        let fails = self.shape.faults > 0 && *step != Step::Park && self.rng.below(self.shape.faults) == 0;
        self.faults += u64::from(fails);
        let res = match step {
            _ if !fails => 0,
            Step::Extend { .. } => -28,
            _ => -5,
        };
        // A failed step may have been carried out.
        let nothing = matches!(step, Step::Extend { .. }) && !self.shape.extends;
        if !nothing && (!fails || self.rng.below(2) > 0) {
            let slot = &mut self.slots[i];
            perform(&self.files, &mut slot.request, slot.op, &mut slot.guest, step);
        }
        match self.slots[i].fast_path.take() {
            Some(fast_path) => {
                fast_path.end(&self.chain, &mut self.users[i / self.shape.slots]);
                self.end(i, res);
            }
            None => self.with(i, |request, cx| request.resume(res, cx)),
        }
    }

    fn end(&mut self, i: usize, res: i32) {
        let now = self.tick();
        let slot = &mut self.slots[i];
        slot.step = None;
        assert!(res == 0 || self.shape.faults > 0, "{:?} failed", slot.op);
        let len = slot.guest.len() / SECTOR;
        if self.log {
            eprintln!("{now}: slot {i} is over");
        }
        match slot.op {
            Op::Populate => {}
            Op::Flush | Op::Read if res != 0 => {}
            Op::Flush => self.model.flushed(slot.begin, now),
            Op::Read => {
                for (n, sector) in slot.guest.chunks(SECTOR).enumerate() {
                    let value =
                        value_of(sector).unwrap_or_else(|| panic!("a torn sector {}", slot.first + n));
                    assert!(
                        self.model.may_read(slot.first + n, value, slot.begin, now),
                        "sector {} reads as {value:#x}",
                        slot.first + n
                    );
                }
            }
            _ => (slot.first..slot.first + len).for_each(|s| self.model.end(s, slot.begin, now, res == 0)),
        }
    }

    /// Lets all requests in flight end.
    fn finish(&mut self) {
        let mut idle = 0;
        while self.slots.iter().any(|s| s.step.is_some()) {
            let mut moved = false;
            for i in 0..self.slots.len() {
                match self.slots[i].step.clone() {
                    None => {}
                    Some(Step::Park) if !self.slots[i].woken => {}
                    Some(step) => {
                        moved = true;
                        self.go_on(i, &step);
                    }
                }
            }
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 3, "requests wait that nobody wakes");
        }
    }

    /// Runs one request alone.
    fn single(&mut self, op: Op, first: u64, len: u64) -> Vec<u8> {
        self.slots[0].op = op;
        self.slots[0].begin = self.now;
        let mut slot = Slot {
            request: Request::default(),
            op,
            begin: 0,
            first: 0,
            guest: vec![0; len as usize],
            step: None,
            fast_path: None,
            woken: false,
        };
        std::mem::swap(&mut slot, &mut self.slots[0]);
        let keep = slot;
        let image = self.chain.top().clone();
        let mut user = image.join();
        let mut woken = |_: Waker| {};
        let mut step = {
            let mut cx = Context {
                chain: &self.chain,
                user: &mut user,
                waker: Waker { who: 0, token: 0 },
                wake: &mut woken,
                readonly: false,
            };
            self.slots[0].request.start(op, first, len, false, &mut cx)
        };
        loop {
            let slot = &mut self.slots[0];
            if let Step::Done(res) = step {
                assert_eq!(res, 0);
                break;
            }
            assert_ne!(step, Step::Park, "nobody else is there");
            perform(&self.files, &mut slot.request, slot.op, &mut slot.guest, &step);
            let mut cx = Context {
                chain: &self.chain,
                user: &mut user,
                waker: Waker { who: 0, token: 0 },
                wake: &mut woken,
                readonly: false,
            };
            step = slot.request.resume(0, &mut cx);
        }
        image.leave(user);
        let slot = std::mem::replace(&mut self.slots[0], keep);
        slot.guest
    }

    /// Lets the power fail, and opens the remaining image again.
    fn crash(&mut self) {
        let at = self.tick();
        let all = self.rng.below(4);
        let rng = &mut self.rng;
        let mut keep = || match all {
            0 => false,
            1 => true,
            _ => rng.below(2) == 0,
        };
        let (left, data) = (self.files[0].crashed(&mut keep), self.files[2].crashed(&mut keep));
        if let Err(e) = check::check(&left) {
            panic!("after a crash at {at}: {e}");
        }
        sample(&left, "after a crash", self.crashes.is_multiple_of(8));
        self.crashes += 1;
        (self.files[0], self.files[2]) = (File::of(left), File::of(data));
        // The memory was lost.
        self.shared = None;
        self.repair();
        self.reopen();
        self.check_sectors(|model, sector, value, _| model.may_survive(sector, value, at), "survives");
    }

    /// Reads the whole disk, with nothing in flight, and checks it.
    fn check_sectors(&mut self, may: impl Fn(&Model, usize, u32, Time) -> bool, what: &str) {
        let all = self.single(Op::Read, 0, self.shape.size);
        let now = self.tick();
        for (sector, bytes) in all.chunks(SECTOR).enumerate() {
            let value = value_of(bytes);
            let value = value.unwrap_or_else(|| panic!("a torn sector {sector}: {:?}", &bytes[..16]));
            assert!(may(&self.model, sector, value, now), "{value:#x} {what} in sector {sector}");
            self.model.set_known(sector, value, now);
        }
        self.model.flushed(now, now);
    }

    /// Ends in the regular way, and checks that nothing leaks.
    fn close(&mut self) {
        self.finish();
        self.check_sectors(|model, sector, value, now| model.may_read(sector, value, now, now), "is");
        let image = self.chain.top().clone();
        for user in std::mem::take(&mut self.users) {
            image.leave(user);
        }
        for _ in 0..3 {
            self.single(Op::Flush, 0, 0);
        }
        journal::mark_closed(&self.files[0]).unwrap();
        let bytes = self.files[0].bytes();
        assert!(!Header::parse(&bytes).unwrap().is_open(), "it is not marked as closed");
        let leaks = check::check(&bytes).unwrap_or_else(|e| panic!("at the end: {e}"));
        assert!(self.shape.faults == 0 || self.faults > 0, "nothing failed");
        assert!(self.fast_paths > 0, "no request went the fast path");
        let holes = self.shape.holes > 0;
        assert!(holes || self.crashes > 0 || leaks == 0, "{leaks} clusters leak");
        sample(&bytes, "at the end", true);
        if self.shape.data != Data::Within && (self.shape.faults, self.crashes, self.kills) == (0, 0, 0) {
            self.check_data_file(&bytes);
        }
    }

    /// Checks that the data file has no more than the disk needs, or is the disk if it is raw.
    fn check_data_file(&mut self, image: &[u8]) {
        let disk = self.single(Op::Read, 0, self.shape.size);
        let mut data = vec![0; disk.len()];
        self.files[2].read_at(0, &mut data).unwrap();
        if self.shape.data == Data::Raw {
            assert!(data == disk, "the data file is not the disk");
        }
        let cluster = 1 << self.shape.cluster_bits;
        let mapped = check::mapped(image);
        for (n, bytes) in data.chunks(cluster).enumerate().filter(|(n, _)| !mapped.contains(n)) {
            assert!(bytes.iter().all(|b| *b == 0), "cluster {n} was not given back");
        }
    }
}

/// Carries out a request's step. The backing file is not written.
fn perform(files: &[File; 3], request: &mut Request, op: Op, guest: &mut [u8], step: &Step) {
    let read = |file: u16, offset, bytes: &mut [u8]| files[usize::from(file)].read_at(offset, bytes).unwrap();
    let own = |file: u16| {
        assert_ne!(file, 1, "the image below is not written");
        &files[usize::from(file)]
    };
    match step {
        Step::Data { file, offset, data } => {
            let bytes = &mut guest[data.start as usize..data.end as usize];
            match op {
                Op::Read => read(*file, *offset, bytes),
                _ => own(*file).write_at(*offset, bytes).unwrap(),
            }
        }
        Step::Zeroes { data } => guest[data.start as usize..data.end as usize].fill(0),
        Step::Copy { data, at } => {
            let from = &request.bytes(qcow2::Buf::Data)[*at..][..(data.end - data.start) as usize];
            guest[data.start as usize..data.end as usize].copy_from_slice(from);
        }
        Step::Gather { data, at } => {
            let from = &guest[data.start as usize..data.end as usize];
            request.bytes(qcow2::Buf::Data)[*at..][..from.len()].copy_from_slice(from);
        }
        Step::Read { file, offset, buf, range } => {
            read(*file, *offset, &mut request.bytes(*buf)[range.clone()]);
        }
        Step::Write { file, offset, buf, range } => {
            own(*file).write_at(*offset, &request.bytes(*buf)[range.clone()]).unwrap();
        }
        Step::Around { file, offset, head, data, tail } => {
            let buf = request.bytes(qcow2::Buf::Data);
            let middle = &guest[data.start as usize..data.end as usize];
            let all = [&buf[..*head], middle, &buf[*head..*head + *tail]].concat();
            own(*file).write_at(*offset, &all).unwrap();
        }
        Step::ZeroFile { file, offset, len, .. } | Step::Discard { file, offset, len } => {
            own(*file).zero(*offset, *len);
        }
        Step::Extend { file, offset, len } => own(*file).extend(*offset + *len),
        Step::Sync { file } => own(*file).sync().unwrap(),
        Step::Park => {}
        Step::Done(_) => unreachable!("it ended"),
    }
}

/// Runs `qemu-img check` on an image, if there is a qemu-img.
fn sample(image: &[u8], when: &str, wanted: bool) {
    if !wanted {
        return;
    }
    let name = format!("vshunt-sim-{}-{:?}", std::process::id(), std::thread::current().id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("image.qcow2"), image).unwrap();
    // Its contents are not checked.
    std::fs::write(folder.join("data"), "").unwrap();
    // Data files are searched in the folder in which it runs.
    let ran = std::process::Command::new("qemu-img")
        .args(["check", "-f", "qcow2", "image.qcow2"])
        .current_dir(&folder)
        .output();
    std::fs::remove_dir_all(&folder).unwrap();
    let Ok(out) = ran else { return };
    // 3: only leaks.
    let code = out.status.code().unwrap_or(-1);
    assert!(
        matches!(code, 0 | 3),
        "{when} qemu-img check says {code}: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

fn fill(sector: &mut [u8], value: u32) {
    sector.chunks_mut(4).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
}

fn value_of(sector: &[u8]) -> Option<u32> {
    let first: [u8; 4] = sector[..4].try_into().unwrap();
    sector.chunks(4).all(|word| word == first).then(|| u32::from_le_bytes(first))
}

fn run(seed: u64) {
    let mut sim = Sim::new(seed);
    let iterations = 3000;
    for iteration in 0..iterations {
        sim.step();
        if iteration % 256 == 255 {
            let oldest = sim.slots.iter().filter(|s| s.step.is_some()).map(|s| s.begin).min();
            let oldest = oldest.unwrap_or(sim.now);
            sim.model.prune(oldest);
            // Some end with a crash, some with a kill, some with either, some with none.
            match seed % 4 {
                1 => sim.crash(),
                2 if sim.shared.is_some() => sim.kill(),
                3 if sim.shared.is_some() && sim.rng.below(2) == 0 => sim.kill(),
                3 => sim.crash(),
                _ => {}
            }
        }
    }
    sim.close();
}

#[test]
fn any_interleaving_and_any_crash() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    if let Some(seed) = number("QCOW2_SIM_SEED") {
        eprintln!("{:?}", Shape::of(seed));
        run(seed);
        return;
    }
    let seeds = number("QCOW2_SIM_SEEDS").unwrap_or(200);
    for seed in 0..seeds {
        if let Err(e) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("QCOW2_SIM_SEED={seed}: {:?}", Shape::of(seed));
            std::panic::resume_unwind(e);
        }
    }
}
