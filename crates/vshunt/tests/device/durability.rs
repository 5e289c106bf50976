//! What is on stable storage when a request completes: seen in the page cache of a buffered image,
//! where a page that was written and not yet stored is dirty or under writeback (cachestat(2),
//! Linux 6.5).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use vshunt_guest::driver::{DriverSeg, Options, feature, request, status};
use vshunt_types::spec::{WorkerSpec, Workers};

use super::restart::{Server, connect, image};
use super::rig::{Backing, Client, LOAD_BYTES, MIB, Machine, PATIENCE, Rig, Rng, attach, header, layouts};

/// Where the tests' writes go: far from one another, for a page's neighbours may be dirty with it.
const APART: u64 = MIB;
const APART_SECTORS: u64 = APART / 512;
/// The configuration space's `writeback` (Virtio 1.3, 5.2.4).
const WRITEBACK_AT: u32 = 32;

/// An image as the page cache has it.
struct Cache(File);

impl Cache {
    /// None where the system cannot tell, or the file system does not (overlayfs); the test is left
    /// out then.
    fn of(image: &Path) -> Option<Self> {
        let cache = Self(File::options().read(true).write(true).open(image).unwrap());
        if cache.ask(0, 0).is_none() {
            println!("left out: this system has no cachestat(2)");
            return None;
        }
        let write = || {
            cache.0.write_all_at(&[0; 4096], 0).unwrap();
            0
        };
        if !cache.stays(write) {
            println!("left out: nothing that is written here is seen to be dirty");
            return None;
        }
        Some(cache)
    }

    /// Bytes of the range that are not on stable storage.
    fn unstored(&self, at: u64, len: u64) -> u64 {
        self.ask(at, len).expect("asked before") * 4096
    }

    fn ask(&self, at: u64, len: u64) -> Option<u64> {
        const SYS_CACHESTAT: libc::c_long = 451;
        let range = [at, len];
        // Pages cached, dirty, under writeback, evicted, evicted lately.
        let mut pages = [0u64; 5];
        // SAFETY: a struct cachestat_range and a struct cachestat, which outlive the call.
        let rc = unsafe {
            libc::syscall(SYS_CACHESTAT, self.0.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0)
        };
        (rc == 0).then_some(pages[1] + pages[2])
    }

    /// Whether a write completed without being stored. Somebody else may store it at any time, so
    /// try again.
    fn stays(&self, mut write: impl FnMut() -> u64) -> bool {
        (0..20).any(|_| {
            let at = write();
            self.unstored(at, APART) > 0
        })
    }
}

/// Writes 4 KiB of the `n`th part of the disk by queue `q`; where that is.
fn write(client: &mut Client, q: u16, n: u64) -> u64 {
    let reply = client.go(q, request::OUT, n * APART_SECTORS, &[n as u8 + 1; 4096], 0);
    assert_eq!((reply.status, reply.len), (status::OK, 1));
    n * APART
}

fn flush(client: &mut Client, q: u16) {
    assert_eq!(client.go(q, request::FLUSH, 0, &[], 0).status, status::OK);
}

/// A new daemon does not know whether the guest had switched its cache off.
#[test]
fn a_successor_writes_through_until_the_guests_first_flush() {
    for (wce, options) in layouts().into_iter().flat_map(|o| [(true, o.clone()), (false, o)]) {
        let refuse_features = if wce { 0 } else { feature::BLK_CONFIG_WCE };
        let options = Options { queues: 2, refuse_features, ..options };
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = image(dir.path());
        let Some(cache) = Cache::of(&file) else { return };
        let server = Server::start_with(dir.path(), &file, "direct=off");
        let mut client = Client::new(connect(dir.path(), &options));
        assert!(cache.stays(|| write(&mut client, 0, 0)), "the cache is on");
        server.kill();
        let _server = Server::start_with(dir.path(), &file, "direct=off");
        client.disk.reconnect(PATIENCE).unwrap();
        if wce {
            for (q, n) in [(0, 1), (1, 2), (0, 1)] {
                let at = write(&mut client, q, n);
                assert_eq!(cache.unstored(at, APART), 0, "{options:?}: queue {q} does not write through");
            }
            flush(&mut client, 1);
        }
        // A guest that cannot switch its cache off need not be waited for.
        for q in [0, 1] {
            assert!(
                cache.stays(|| write(&mut client, q, 3)),
                "{options:?}: queue {q} writes through for ever"
            );
        }
        flush(&mut client, 0);
        assert_eq!(cache.unstored(0, 16 * MIB), 0);
    }
}

/// A write that is in flight while the guest switches its cache off is complete once, and covered
/// by the switch.
#[test]
fn the_cache_is_switched_off_under_load() {
    let rig = Rig::new();
    rig.disk("d", Backing::Buffered, 2 * LOAD_BYTES, |_| {});
    rig.export("e", "d", 2, |spec| spec.workers = Workers::PerQueue);
    let Some(cache) = Cache::of(&rig.dir.path().join("d.img")) else { return };
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options });
        let mut dirty = 0;
        for round in 0..20 {
            machine.session.write_config_bytes(WRITEBACK_AT, &[1]).unwrap();
            // The load checks what it reads, and that each request completes once.
            let load = [machine.load(0), machine.load(1)];
            load.iter().for_each(|l| l.progress(50));
            dirty += cache.unstored(0, 2 * LOAD_BYTES);
            machine.session.write_config_bytes(WRITEBACK_AT, &[0]).unwrap();
            if round % 2 == 0 {
                load.iter().for_each(|l| l.progress(50));
            }
            for queue in load.map(|l| l.end()) {
                machine.put_queue(queue);
            }
            assert_eq!(cache.unstored(0, 2 * LOAD_BYTES), 0, "round {round}");
        }
        assert!(dirty > 0, "the cache was on before");
        machine.session.write_config_bytes(WRITEBACK_AT, &[1]).unwrap();
    }
    assert_eq!(rig.daemon.queues().iter().map(|q| q.errors).sum::<u64>(), 0);
}

/// Bytes of a request of the next test, and how many are under way beside the flush.
const LONG: usize = 64 << 10;
const MANY: u64 = 8;

/// Puts `MANY` writes on queue 0 and waits for half of them; says which completed.
fn half_of_many(client: &mut Client) -> Vec<u64> {
    let base = client.arena.guest();
    let seg =
        |at: usize, len: usize, writable| DriverSeg { addr: base + at as u64, len: len as u32, writable };
    let mut cookies = Vec::new();
    for n in 0..MANY {
        let at = n as usize;
        // Beside what `Client::go` uses.
        let (head, data, status) = (2048 + at * 16, MIB as usize + at * LONG, 3072 + at);
        client.arena.write(head, &header(request::OUT, n * APART_SECTORS));
        let segs = [seg(head, 16, false), seg(data, LONG, false), seg(status, 1, true)];
        cookies.push(client.disk.submit(0, &segs, false).unwrap());
    }
    (0..MANY / 2)
        .map(|_| {
            let done = client.disk.wait(0).unwrap().cookie;
            cookies.iter().position(|&c| c == done).unwrap() as u64
        })
        .collect()
}

/// Op::Flush covers whatever completed before it, by any queue on any worker, also while queues
/// move.
#[test]
fn a_flush_covers_the_writes_of_other_queues() {
    let rig = Rig::new();
    rig.disk("d", Backing::Buffered, MANY * APART, |_| {});
    rig.export("e", "d", 2, |spec| spec.workers = Workers::PerQueue);
    let Some(cache) = Cache::of(&rig.dir.path().join("d.img")) else { return };
    let extra = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
    assert_ne!(rig.queue("e", 0).worker, rig.queue("e", 1).worker);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for moving in [false, true] {
            let mover = moving.then(|| {
                scope.spawn(|| {
                    let mut rng = Rng::from(5);
                    let start = Instant::now();
                    while !over.load(Ordering::Relaxed) && start.elapsed() < PATIENCE {
                        let (q, w) = (rng.below(2) as u16, rng.below(u64::from(extra) + 1) as u32);
                        attach(&rig.daemon, "e", q, w);
                    }
                })
            });
            for options in layouts() {
                let mut client = rig.connect("e", Options { queues: 2, ..options });
                let mut dirty = 0;
                for round in 0..30 {
                    let done = half_of_many(&mut client);
                    dirty += done.iter().map(|n| cache.unstored(n * APART, LONG as u64)).sum::<u64>();
                    flush(&mut client, 1);
                    for n in done {
                        let left = cache.unstored(n * APART, LONG as u64);
                        assert_eq!(left, 0, "round {round}, write {n}, moving {moving}");
                    }
                    for _ in 0..MANY / 2 {
                        client.disk.wait(0).unwrap();
                    }
                }
                assert!(dirty > 0, "there was something to flush");
            }
            over.store(moving, Ordering::Relaxed);
            mover.into_iter().for_each(|m| m.join().unwrap());
        }
        assert!(rig.queue("e", 0).generation > 20, "{:?}", rig.queue("e", 0));
    });
}
