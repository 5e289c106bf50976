//! The daemon dies at any moment and is started again: the guest notices a pause, and every request
//! is done once.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vshunt_guest::driver::{Code, DriverSeg, Options, Payload, request, status};
use vshunt_guest::load::{self, LoadPlan, Progress, Rw, Tick};
use vshunt_guest::{Disk, Kind};

use super::rig::{Client, MIB, PATIENCE, Rig, Rng, by_qcow2, header, layouts, shapes, small, thin, wait_for};

/// `vshunt serve`, killed when dropped.
pub(super) struct Server {
    child: Child,
    image: PathBuf,
}

impl Server {
    fn start(dir: &Path, file: &Path) -> Self {
        Self::start_with(dir, file, "direct=auto")
    }

    /// `keys`: more of the disk.
    pub(super) fn start_with(dir: &Path, file: &Path, keys: &str) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_vshunt")), dir, file, keys)
    }

    /// By a command that takes the arguments.
    fn start_by(mut command: Command, dir: &Path, file: &Path, keys: &str) -> Self {
        for name in ["VSHUNT_CONTROL", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID"] {
            command.env_remove(name);
        }
        let keys = if by_qcow2() && !keys.contains("format") {
            format!("format=qcow2,{keys}")
        } else {
            keys.to_owned()
        };
        let disk = format!("name=d,file={},{keys}", file.display());
        let export = format!("type=vhost-user-blk,name=e,disk=d,socket={},queues=2", socket(dir).display());
        command.args(["serve", "--disk", &disk, "--export", &export, "--control"]).arg(dir.join("c.sock"));
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Self { child: command.spawn().unwrap(), image: file.to_owned() }
    }

    /// What it left in memory stays, for the next.
    pub(super) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.image = PathBuf::new();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.image.exists() {
            let _ = std::fs::remove_file(journal_of(&self.image));
        }
    }
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("e.sock")
}

pub(super) fn image(dir: &Path) -> PathBuf {
    if by_qcow2() {
        return thin_image(dir);
    }
    let file = dir.join("d.img");
    std::fs::File::create(&file).unwrap().set_len(16 * MIB).unwrap();
    file
}

fn thin_image(dir: &Path) -> PathBuf {
    let file = dir.join("d.qcow2");
    std::fs::write(&file, thin(16 * MIB)).unwrap();
    file
}

pub(super) fn connect(dir: &Path, options: &Options) -> Disk {
    wait_for("the server", || Disk::connect(socket(dir), options.clone()).ok())
}

#[test]
fn verified_load_over_many_deaths() {
    let mut rng = Rng::new();
    for (i, options) in shapes().into_iter().enumerate() {
        let dir = tempfile::tempdir_in(if i % 2 == 0 { "/var/tmp" } else { "/dev/shm" }).unwrap();
        let file = image(dir.path());
        many_deaths(&mut rng, dir.path(), &file, &options, "direct=auto");
        let _ = std::fs::remove_file(journal_of(&file));
    }
}

/// A thin disk has its map in memory: what a killed daemon had not written of it is brought in by
/// the next.
#[test]
fn verified_load_over_many_deaths_on_a_thin_disk() {
    let mut rng = Rng::new();
    for options in layouts() {
        for (folder, keys) in [
            ("/var/tmp", "format=qcow2"),
            ("/var/tmp", "format=qcow2,direct=off,cache-size=16384"),
            ("/var/tmp", "format=qcow2,cache=unsafe"),
            ("/dev/shm", "format=qcow2"),
        ] {
            let dir = tempfile::tempdir_in(folder).unwrap();
            let file = thin_image(dir.path());
            many_deaths(&mut rng, dir.path(), &file, &options, keys);
            // The last one was killed, too; what it had not written is brought in by any repair.
            let journal = journal_of(&file);
            assert!(journal.exists());
            let mut repair = Command::new(env!("CARGO_BIN_EXE_vshunt"));
            let out = repair.args(["image", "check", "-r", "all"]).arg(&file).output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            // It says so if the journal had changes that the image had not.
            assert!(out.status.success() && !said.contains("may be lost"), "{said}");
            assert!(!journal.exists(), "it is left behind");
        }
    }
}

/// How often the server dies under one load.
const DEATHS: u32 = 5;
/// Requests that a load has done at least.
const SOME: u64 = 100;

/// Keeps count of a load's requests.
struct Count(Arc<AtomicU64>);

impl Progress for Count {
    fn phase(&mut self, _: &str, _: Option<Duration>, _: Option<u64>) {}
    fn tick(&mut self, tick: &Tick) {
        self.0.store(tick.ios, Ordering::Relaxed);
    }
    fn note(&mut self, _: &str) {}
}

/// Kills the server during a verified load, starts it again, and kills it at last.
fn many_deaths(rng: &mut Rng, dir: &Path, file: &Path, options: &Options, keys: &str) {
    let mut server = Server::start_with(dir, file, keys);
    let mut disk = connect(dir, &Options { queues: 2, ..options.clone() });
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let plan = LoadPlan {
        rw: Rw::Randrw,
        iodepth: 16,
        stop: Some(stop.clone()),
        interval: Duration::from_millis(10),
        verify: true,
        flush_every: 50,
        reconnect: Some(PATIENCE),
        stale_packed_base: rng.chance(50),
        ..LoadPlan::default()
    };
    let mut progress = Count(count.clone());
    let runner = std::thread::spawn(move || load::run(&mut disk, &plan, &mut progress));
    let mut deaths = 0;
    while deaths < DEATHS && !runner.is_finished() {
        std::thread::sleep(Duration::from_millis(20 + rng.below(100)));
        server.kill();
        deaths += 1;
        server = Server::start_with(dir, file, keys);
    }
    wait_for("the load's requests", || {
        (count.load(Ordering::Relaxed) > SOME || runner.is_finished()).then_some(())
    });
    stop.store(true, Ordering::Relaxed);
    let outcome = runner.join().unwrap();
    server.kill();
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    let outcome = outcome.unwrap_or_else(|e| panic!("{options:?} {keys} after {deaths} deaths: {e}\n{log}"));
    assert!(outcome.reconnects > 0 && outcome.ios() > SOME, "{options:?} {keys}: {outcome:?}");
    assert!(!log.contains("panicked"), "{log}");
}

/// Where the journal of an image's map lies.
fn journal_of(image: &Path) -> PathBuf {
    let meta = std::fs::metadata(image).unwrap();
    let (dev, ino) = (std::os::unix::fs::MetadataExt::dev(&meta), std::os::unix::fs::MetadataExt::ino(&meta));
    PathBuf::from(format!("/dev/shm/vshunt-map-{dev:x}-{ino:x}"))
}

/// A thin disk without its journal lacks completed writes: its guest is told to go rather than to
/// read what was there before; another guest has the disk.
#[test]
fn a_guest_whose_writes_are_lost_does_not_go_on() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = thin_image(dir.path());
    let server = Server::start_with(dir.path(), &file, "format=qcow2");
    let mut client = Client::new(connect(dir.path(), &small()));
    client.write(0, &[1; 512]);
    server.kill();
    std::fs::remove_file(journal_of(&file)).unwrap();
    let server = Server::start_with(dir.path(), &file, "format=qcow2");
    wait_for("the server", || std::os::unix::net::UnixStream::connect(socket(dir.path())).ok());
    wait_for("a word of it", || {
        client.disk.reconnect(Duration::from_secs(2)).expect_err("it went on");
        let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
        (log.contains("may be lost") && log.contains("cannot go on")).then_some(())
    });
    let mut other = Client::new(connect(dir.path(), &small()));
    other.write(0, &[2; 512]);
    server.kill();
    // That one's writes are not lost.
    let _server = Server::start_with(dir.path(), &file, "format=qcow2");
    other.disk.reconnect(PATIENCE).unwrap();
    other.write(512, &[3; 512]);
}

/// Where there is no room for a journal a thin disk is served all the same, and the in-flight
/// region is not offered.
#[test]
fn without_room_for_a_journal_nobody_is_promised_to_go_on() {
    let name = "without_room_for_a_journal_nobody_is_promised_to_go_on";
    let mount = "mount -t tmpfs -o size=16k none /dev/shm";
    let can = Command::new("unshare").args(["-m", "sh", "-c", mount]).output();
    if !can.is_ok_and(|out| out.status.success()) {
        eprintln!("skip {name}: mounting needs root, and unshare");
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = thin_image(dir.path());
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &format!("{mount} && exec \"$@\""), "sh", env!("CARGO_BIN_EXE_vshunt")]);
    let server = Server::start_by(command, dir.path(), &file, "format=qcow2");
    let mut client = Client::new(connect(dir.path(), &small()));
    client.write(0, &[1; 512]);
    drop(client);
    let mut machine = super::rig::Machine::open(&socket(dir.path()), small());
    machine.start().unwrap();
    assert!(machine.session.inflight().is_none(), "the region is offered");
    server.kill();
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    assert_eq!(log.matches("has no journal").count(), 1, "{log}");
    assert!(!journal_of(&file).exists());
}

/// Requests put on a ring while no server is there, and taken up by the next.
#[test]
fn what_was_offered_while_the_server_was_dead_is_done_once() {
    for options in layouts() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = image(dir.path());
        let server = Server::start(dir.path(), &file);
        let mut client = Client::new(connect(dir.path(), &options));
        client.write(0, &[1; 512]);
        server.kill();
        client.arena.write(0, &header(request::IN, 0));
        let base = client.arena.guest();
        let at = |offset: u64, len, writable| DriverSeg { addr: base + offset, len, writable };
        let mut cookies = Vec::new();
        for i in 0..8 {
            let segs = [at(0, 16, false), at(4096 + i * 512, 512, true), at(64 + i, 1, true)];
            cookies.push(client.disk.submit(0, &segs, false).unwrap());
        }
        for _ in 0..3 {
            let server = Server::start(dir.path(), &file);
            client.disk.reconnect(PATIENCE).unwrap();
            if cookies.is_empty() {
                client.write(0, &[1; 512]);
            }
            for cookie in cookies.drain(..) {
                assert_eq!(client.disk.wait_for(0, Some(cookie)).unwrap().len, 513);
            }
            server.kill();
        }
        assert_eq!(client.arena.part(4096, 8 * 512).to_vec(), [1; 8 * 512]);
        assert_eq!(client.arena.part(64, 8).to_vec(), [status::OK; 8]);
        let _ = std::fs::remove_file(journal_of(&file));
    }
}

/// The front end hands over a region that is not what it should be: refused with a reason, and no
/// harm done.
#[test]
fn damaged_inflight_regions_are_refused() {
    let mut rng = Rng::new();
    let rig = Rig::lasting(MIB, 1);
    for options in layouts() {
        // Of a version not known, of another size, features not known.
        for (at, bytes) in [(8usize, &[2u8, 0][..]), (8, &[0xff, 0xff]), (10, &[1, 0]), (0, &[1])] {
            let mut machine = super::rig::Machine::open(&rig.socket("e"), options.clone());
            machine.start().unwrap();
            let load = machine.load(0);
            load.progress(10);
            load.end();
            machine.session.stop_ring(0).unwrap();
            let region = machine.session.inflight().unwrap();
            let file = std::fs::File::from(region.fd.try_clone().unwrap());
            std::os::unix::fs::FileExt::write_all_at(&file, bytes, at as u64).unwrap();
            let ring = vshunt_guest::driver::RingSetup { parts: &machine.parts[0].clone(), base: 0 };
            let e = machine.session.set_ring(&ring, false).unwrap_err();
            assert!(e.to_string().contains("refused"), "{at} {bytes:x?}: {e}");
            assert_eq!(rig.queue("e", 0).state, "stopped");
        }
        // Garbage everywhere else: whatever comes of it, the daemon lives.
        for _ in 0..200 {
            let mut machine = super::rig::Machine::open(&rig.socket("e"), options.clone());
            machine.start().unwrap();
            machine.session.stop_ring(0).unwrap();
            let region = machine.session.inflight().unwrap();
            let file = std::fs::File::from(region.fd.try_clone().unwrap());
            let size = region.size as usize;
            for _ in 0..1 + rng.below(6) {
                let (at, n) = (12 + rng.below(size as u64 - 16), 1 + rng.below(4));
                let bytes =
                    if rng.chance(50) { vec![rng.below(3) as u8; n as usize] } else { rng.bytes(n as usize) };
                std::os::unix::fs::FileExt::write_all_at(&file, &bytes, at).unwrap();
            }
            let ring = vshunt_guest::driver::RingSetup { parts: &machine.parts[0].clone(), base: 0 };
            let _ = machine.session.set_ring(&ring, false);
            machine.parts[0].kick();
        }
        let mut client = rig.connect("e", options);
        client.write(0, &[1; 512]);
    }
}

#[test]
fn inflight_regions_of_wrong_size_are_refused() {
    let rig = Rig::ram(MIB, 1);
    for options in layouts() {
        let size = options.queue_size;
        for (mmap_size, offset, queues, queue_size) in [
            (64u64, 0u64, 1u16, size), // shorter than the queue needs
            (1 << 20, 0, 1, size),     // longer than the file
            (0, 0, 1, size),
            (4096, u64::MAX - 4095, 1, size),
            (2048, 3, 1, size), // misaligned
            (4096, 0, 1, 5000),
        ] {
            let mut machine = super::rig::Machine::open(&rig.socket("e"), options.clone());
            let features = machine.session.features();
            machine.session.set_features(features).unwrap();
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(4096).unwrap();
            let payload = Payload::new().u64(mmap_size).u64(offset).u16(queues).u16(queue_size).u32(0);
            let fd = std::os::fd::AsFd::as_fd(&file);
            let first = machine.session.wire().tell(Code::SetInflightFd, &payload, &[fd]);
            let told = first.and_then(|()| {
                let region = &machine.memory.clone();
                let region = &region.regions()[0];
                let payload = Payload::new().u64(0).u64(region.guest_addr).u64(region.size);
                let payload = payload.u64(region.user_addr()).u64(0);
                machine.session.wire().tell(Code::AddMemReg, &payload, &[region.fd()])?;
                let parts = machine.parts[0].clone();
                let ring = vshunt_guest::driver::RingSetup { parts: &parts, base: 0 };
                machine.session.set_ring(&ring, false)?;
                machine.session.enable(0, true)
            });
            let e = told.expect_err(&format!("{mmap_size} {offset} {queue_size}"));
            assert_eq!(e.kind(), Kind::Lost);
        }
    }
    rig.connect("e", small()).write(0, &[1; 512]);
}
