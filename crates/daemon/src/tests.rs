//! What happens to a daemon's things while other things happen to them. Nobody drives a queue here.
//!
//! A listener that does not return holds the thread that tells of an event, and with it the step it
//! is in.

use std::io::{Read, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vshunt_types::error::{Error, Kind};
use vshunt_types::spec::{DiskSpec, ExportSpec, Format, WorkerSpec, Workers};

use super::{Daemon, Event, Options};

/// Longest that anything here may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long what is not to happen is waited for.
const A_WHILE: Duration = Duration::from_millis(100);
const MIB: u64 = 1 << 20;

struct Rig {
    daemon: Arc<Daemon>,
    dir: tempfile::TempDir,
    events: Mutex<Receiver<Event>>,
}

impl Rig {
    /// A daemon with a disk `d` of 1 MiB.
    fn new() -> Self {
        let daemon = Daemon::new(Options { poll_us: 0 }).unwrap();
        let spec = DiskSpec {
            name: "d".into(),
            format: Some(Format::Ram),
            size: Some(MIB),
            locking: true,
            ..DiskSpec::default()
        };
        daemon.disk_add(spec).unwrap();
        let (send, events) = channel();
        let send = Mutex::new(send);
        daemon.on_event(Box::new(move |e| drop(send.lock().unwrap().send(e.clone()))));
        Self { daemon, dir: tempfile::tempdir().unwrap(), events: events.into() }
    }

    fn socket(&self, export: &str) -> PathBuf {
        self.dir.path().join(export)
    }

    /// An export of `d`.
    fn spec(&self, name: &str) -> ExportSpec {
        ExportSpec {
            name: name.into(),
            disk: "d".into(),
            socket: Some(self.socket(name)),
            queues: Some(2),
            ..ExportSpec::default()
        }
    }

    fn export(&self, name: &str) {
        self.daemon.export_add(self.spec(name)).unwrap();
    }

    fn names(&self) -> Vec<String> {
        self.daemon.exports().into_iter().map(|e| e.spec.name).collect()
    }

    fn await_event(&self, want: &Event) {
        let events = self.events.lock().unwrap();
        while events.recv_timeout(PATIENCE).expect("the event did not come") != *want {}
    }

    /// Blocks the thread that reports an event that `which` selects, once: says that it does so,
    /// and waits for a word.
    fn hold(&self, which: fn(&Event) -> bool) -> (Receiver<()>, Sender<()>) {
        let ((held, is_held), (go, may_go)) = (channel(), channel());
        let (once, ends) = (AtomicBool::new(true), Mutex::new((held, may_go)));
        self.daemon.on_event(Box::new(move |event| {
            if which(event) && once.swap(false, SeqCst) {
                let ends = ends.lock().unwrap();
                ends.0.send(()).unwrap();
                let _ = ends.1.recv_timeout(PATIENCE);
            }
        }));
        (is_held, go)
    }

    /// Does something on a thread of its own.
    fn spawn<T: Send + 'static>(&self, f: impl FnOnce(&Daemon) -> T + Send + 'static) -> JoinHandle<T> {
        let daemon = self.daemon.clone();
        std::thread::spawn(move || f(&daemon))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.daemon.shutdown();
        }
    }
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> Kind {
    result.unwrap_err().kind()
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_export_is_in_use_until_its_removal_is_over() {
    let rig = Rig::new();
    rig.export("e");
    let (is_held, go) = rig.hold(|e| matches!(e, Event::ExportDisconnected { .. }));
    let _guest = UnixStream::connect(rig.socket("e")).unwrap();
    rig.await_event(&Event::ExportConnected { name: "e".into() });
    assert_eq!(kind(rig.daemon.export_remove("e", false)), Kind::Busy);
    let removal = rig.spawn(|d| d.export_remove("e", true));
    is_held.recv_timeout(PATIENCE).unwrap();

    assert_eq!(rig.names(), ["e"]);
    assert_eq!(rig.daemon.disks()[0].exports, ["e"]);
    assert_eq!(kind(rig.daemon.export_add(rig.spec("other"))), Kind::Busy, "a second writer");
    assert_eq!(kind(rig.daemon.export_add(ExportSpec { readonly: true, ..rig.spec("e") })), Kind::Exists);
    assert_eq!(kind(rig.daemon.disk_remove("d")), Kind::Busy);
    let again = rig.daemon.export_remove("e", true).unwrap_err();
    assert!(again.kind() == Kind::Busy && again.to_string().contains("is being removed"), "{again}");
    assert_eq!(kind(rig.daemon.queue_attach("e", 0, 0, PATIENCE)), Kind::Busy);
    let end = rig.spawn(Daemon::shutdown);
    std::thread::sleep(A_WHILE);
    assert!(!end.is_finished() && !removal.is_finished());

    go.send(()).unwrap();
    removal.join().unwrap().unwrap();
    end.join().unwrap();
    assert!(rig.names().is_empty() && rig.daemon.workers().is_empty() && !rig.socket("e").exists());
    rig.await_event(&Event::ExportDeleted { name: "e".into() });
}

#[test]
fn when_a_removal_is_told_the_name_is_free() {
    let rig = Rig::new();
    rig.export("e");
    let (is_held, go) = rig.hold(|e| matches!(e, Event::ExportDeleted { .. }));
    let removal = rig.spawn(|d| d.export_remove("e", false));
    is_held.recv_timeout(PATIENCE).unwrap();
    rig.export("e");
    go.send(()).unwrap();
    removal.join().unwrap().unwrap();
}

#[test]
fn a_disks_resizes_and_new_exports_take_turns() {
    let rig = Rig::new();
    let (is_held, go) = rig.hold(|e| matches!(e, Event::DiskResized { .. }));
    let first = rig.spawn(|d| d.disk_resize("d", MIB / 2));
    is_held.recv_timeout(PATIENCE).unwrap();
    let second = rig.spawn(|d| d.disk_resize("d", MIB / 4));
    let spec = rig.spec("e");
    let added = rig.spawn(move |d| d.export_add(spec));
    std::thread::sleep(A_WHILE);
    assert!(!second.is_finished() && !added.is_finished());
    // Others do not wait.
    assert_eq!((rig.daemon.disks()[0].size_bytes, rig.names().len()), (MIB / 2, 0));
    go.send(()).unwrap();
    for thread in [first, second, added] {
        thread.join().unwrap().unwrap();
    }
    assert_eq!((rig.daemon.disks()[0].size_bytes, rig.names().len()), (MIB / 4, 1));
}

#[test]
fn a_disk_that_went_while_its_turn_was_waited_for() {
    let rig = Rig::new();
    let (is_held, go) = rig.hold(|e| matches!(e, Event::DiskResized { .. }));
    let first = rig.spawn(|d| d.disk_resize("d", MIB / 2));
    is_held.recv_timeout(PATIENCE).unwrap();
    let second = rig.spawn(|d| d.disk_resize("d", MIB / 4));
    std::thread::sleep(A_WHILE);
    // It waits for the first to let go of the disk, which is gone for others.
    let removal = rig.spawn(|d| d.disk_remove("d"));
    while !rig.daemon.disks().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    go.send(()).unwrap();
    removal.join().unwrap().unwrap();
    first.join().unwrap().unwrap();
    assert_eq!(kind(second.join().unwrap()), Kind::NotFound);
}

#[test]
fn a_disk_keeps_to_its_exports_block_size() {
    let rig = Rig::new();
    rig.daemon.export_add(ExportSpec { block_size: Some(4096), ..rig.spec("e") }).unwrap();
    let e = rig.daemon.disk_resize("d", MIB - 512).unwrap_err();
    assert!(e.kind() == Kind::Invalid && e.to_string().contains("block-size=4096"), "{e}");
    assert_eq!(rig.daemon.disks()[0].size_bytes, MIB);
    rig.daemon.disk_resize("d", MIB - 4096).unwrap();
}

#[test]
fn a_socket_with_a_full_backlog_is_in_use_and_holds_up_nobody() {
    let rig = Rig::new();
    let theirs = UnixListener::bind(rig.socket("e")).unwrap();
    rustix::net::listen(&theirs, 0).unwrap();
    let _waits = UnixStream::connect(rig.socket("e")).unwrap();
    let e = rig.daemon.export_add(rig.spec("e")).unwrap_err();
    assert!(e.kind() == Kind::Busy && e.to_string().contains("another process listens"), "{e}");
    rig.daemon.export_add(ExportSpec { socket: Some(rig.socket("elsewhere")), ..rig.spec("e") }).unwrap();
}

#[test]
fn a_socket_that_another_process_put_in_the_same_place_stays() {
    let rig = Rig::new();
    rig.export("e");
    std::fs::remove_file(rig.socket("e")).unwrap();
    let _theirs = UnixListener::bind(rig.socket("e")).unwrap();
    rig.daemon.export_remove("e", false).unwrap();
    UnixStream::connect(rig.socket("e")).unwrap();
}

#[test]
fn an_export_ends_with_its_one_connection() {
    let rig = Rig::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let spec = ExportSpec { socket: None, fd: Some(theirs.into_raw_fd()), ..rig.spec("e") };
    rig.daemon.export_add(spec).unwrap();
    drop(ours);
    rig.await_event(&Event::ExportDeleted { name: "e".into() });
    rig.daemon.wait_all_gone();
}

/// Of a front end that comes and goes in a loop not all is told, but at last whether one is
/// connected.
#[test]
fn a_front_end_cannot_fill_the_queues_of_events() {
    let rig = Rig::new();
    rig.export("e");
    let begin = Instant::now();
    let served = || loop {
        let mut stream = UnixStream::connect(rig.socket("e")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
        // One that finds too many waiting is closed.
        if stream.write_all(&get_features).is_ok() && stream.read(&mut [0]).is_ok_and(|n| n == 1) {
            return stream;
        }
        assert!(begin.elapsed() < PATIENCE, "none is served");
    };
    for _ in 0..200 {
        drop(served());
    }
    let last = served();
    let events = rig.events.lock().unwrap();
    let mut told: Vec<Event> = events.try_iter().collect();
    let (connected, disconnected) =
        (Event::ExportConnected { name: "e".into() }, Event::ExportDisconnected { name: "e".into() });
    if told.last() != Some(&connected) {
        told.push(events.recv_timeout(PATIENCE).unwrap());
        assert_eq!(told.last(), Some(&connected));
    }
    drop(last);
    assert_eq!(events.recv_timeout(PATIENCE).unwrap(), disconnected);
    let most = 64 + 8 * (begin.elapsed().as_secs() as usize + 1);
    assert!(told.len() < most, "{} events", told.len());
    assert!(told.windows(2).all(|two| two[0] != two[1]), "one is told twice");
}

#[test]
fn an_image_that_another_disk_has_is_refused_at_once() {
    let rig = Rig::new();
    let image = rig.dir.path().join("i");
    std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    std::os::unix::fs::symlink(&image, rig.dir.path().join("j")).unwrap();
    let disk = |name: &str, file: &str, readonly| DiskSpec {
        name: name.into(),
        file: Some(rig.dir.path().join(file)),
        readonly,
        locking: true,
        ..DiskSpec::default()
    };
    rig.daemon.disk_add(disk("one", "i", false)).unwrap();
    let start = Instant::now();
    for round in 0..24 {
        let e = rig.daemon.disk_add(disk("two", "j", round % 2 == 1)).unwrap_err();
        assert!(e.kind() == Kind::Busy && e.to_string().contains("image of disk one of this daemon"), "{e}");
    }
    // Each would be waited for five seconds.
    assert!(start.elapsed() < PATIENCE, "somebody is waited for");
    rig.daemon.disk_add(DiskSpec { locking: false, ..disk("two", "i", false) }).unwrap();
    rig.daemon.disk_remove("one").unwrap();
    rig.daemon.disk_add(disk("one", "i", true)).unwrap();
    rig.daemon.disk_add(disk("three", "j", true)).unwrap();
}

#[test]
fn what_failed_leaves_nothing() {
    let rig = Rig::new();
    let spec = ExportSpec { workers: Workers::PerQueue, poll_us: Some(u32::MAX), ..rig.spec("e") };
    assert_eq!(kind(rig.daemon.export_add(spec)), Kind::Invalid);
    assert_eq!((rig.names().len(), rig.daemon.workers().len()), (0, 1));
    assert!(!rig.socket("e").exists());
    rig.export("e");
}

#[test]
fn an_exports_own_workers_go_with_it() {
    let rig = Rig::new();
    rig.daemon.export_add(ExportSpec { workers: Workers::PerQueue, ..rig.spec("e") }).unwrap();
    rig.daemon.export_add(ExportSpec { readonly: true, ..rig.spec("other") }).unwrap();
    let ids: Vec<_> = rig.daemon.workers().iter().map(|w| w.id).collect();
    assert_eq!(ids, [0, 1, 2]);
    // A busy machine may not run a worker for a second; the attach is then refused.
    wait_for("the attach", || rig.daemon.queue_attach("other", 1, 2, PATIENCE).is_ok());
    rig.daemon.export_remove("e", false).unwrap();
    let ids: Vec<_> = rig.daemon.workers().iter().map(|w| w.id).collect();
    assert_eq!(ids, [0, 2], "2 has a queue of another export");
}

#[test]
fn worker_0_is_there_always() {
    let rig = Rig::new();
    let e = rig.daemon.worker_free(0).unwrap_err();
    assert!(e.to_string().contains("worker 0 is there always"), "{e}");
    rig.export("e");
}

#[test]
fn a_workers_name_is_changed() {
    let rig = Rig::new();
    let id = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
    let named = |name: &str| WorkerSpec { name: Some(name.into()), ..WorkerSpec::default() };
    rig.daemon.worker_set(id, named("fast")).unwrap();
    assert_eq!(rig.daemon.workers()[1].name, "fast");
    for name in ["", "7", "a b"] {
        let wrong = WorkerSpec { poll_us: Some(7), ..named(name) };
        assert_eq!(kind(rig.daemon.worker_set(id, wrong)), Kind::Invalid, "{name:?}");
    }
    let worker = &rig.daemon.workers()[1];
    assert_eq!((worker.name.as_str(), worker.poll_us), ("fast", 0));
}

/// Everything at once from four threads: it comes to an end, and a disk never has two writers.
#[test]
fn any_command_at_any_time() {
    let rig = Arc::new(Rig::new());
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let rig = rig.clone();
            std::thread::spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed);
                let mut below = move |n: u64| rng.u64(..n);
                for _ in 0..60 {
                    let name = ["a", "b", "c"][below(3) as usize];
                    let result = match below(7) {
                        0 | 1 => {
                            let workers = [Workers::Default, Workers::PerQueue][below(2) as usize];
                            rig.daemon.export_add(ExportSpec { workers, ..rig.spec(name) })
                        }
                        2 => rig.daemon.export_add(ExportSpec { readonly: true, ..rig.spec(name) }),
                        3 => rig.daemon.export_remove(name, true),
                        4 => rig.daemon.disk_resize("d", MIB / (1 + below(4)) / 512 * 512),
                        5 => rig.daemon.queue_attach(name, 1, 0, PATIENCE),
                        _ => {
                            drop(UnixStream::connect(rig.socket(name)));
                            Ok(())
                        }
                    };
                    let fine = |e: &Error| matches!(e.kind(), Kind::Busy | Kind::Exists | Kind::NotFound);
                    assert!(result.as_ref().err().is_none_or(fine), "{result:?}");
                    let writers = rig.daemon.exports().iter().filter(|e| !e.spec.readonly).count();
                    assert!(writers <= 1, "{writers} writers");
                }
            })
        })
        .collect();
    wait_for("the end", || threads.iter().all(JoinHandle::is_finished));
    for thread in threads {
        thread.join().unwrap();
    }
    rig.daemon.shutdown();
    assert!(rig.daemon.workers().is_empty());
}

#[test]
fn a_name_is_no_option_and_no_folder() {
    let rig = Rig::new();
    let disk = |name: &str| {
        let (name, format) = (name.into(), Some(Format::Null));
        rig.daemon.disk_add(DiskSpec { name, format, size: Some(MIB), ..DiskSpec::default() })
    };
    for name in ["-", "--help", "-x", ".", "..", "...", ""] {
        for refused in [disk(name), rig.daemon.export_add(rig.spec(name))] {
            let e = refused.unwrap_err();
            assert!(e.kind() == Kind::Invalid && e.to_string().contains("letter"), "{name:?}: {e}");
        }
    }
    for name in ["a-", ".hidden", "_", "1", "a..b"] {
        disk(name).unwrap();
    }
    rig.export(".e");
}
