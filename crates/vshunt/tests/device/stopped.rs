//! Disks whose file system does not answer, and front ends that would have a worker wait:
//! neighbours on the same worker go on.
//!
//! The file system is a mount of another vshunt, which is stopped by a signal.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};
use vshunt_guest::Disk;
use vshunt_guest::driver::{Code, DriverSeg, Options, Payload, request, status};
use vshunt_types::error::Kind;
use vshunt_types::spec::{Direct, DiskSpec, WorkerSpec};

use super::rig::{
    Backing, Client, LOAD_BYTES, MIB, Machine, PATIENCE, Rig, attach, by_kernel, header, range, small,
    wait_for,
};

/// Operations that hang at the same time: more than io-wq has threads by itself, on a machine of up
/// to 15 CPUs.
const HUNG: usize = 64;
/// Bytes of each.
const PIECE: usize = 4096;
/// Longest request of a neighbour. It takes some milliseconds; what waits for a stopped server
/// takes for ever.
const NEIGHBOUR_MAX: Duration = Duration::from_secs(20);

/// Files on a FUSE mount each, whose one server can be stopped. Dropped, it ends, and what hangs
/// fails.
struct Below {
    server: Child,
    mounts: Vec<PathBuf>,
}

impl Below {
    /// None where this user may not mount; the test is left out then.
    fn new(dir: &Path, size: u64, count: usize) -> Option<Self> {
        if by_kernel() || !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            println!("left out: mounting needs root and /dev/fuse, and the kernel engine has other waits");
            return None;
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_vshunt"));
        for name in ["VSHUNT_CONTROL", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID"] {
            command.env_remove(name);
        }
        command.arg("serve").arg("--control").arg(dir.join("below.sock"));
        let mounts: Vec<_> = (0..count).map(|n| dir.join(format!("below{n}.mnt"))).collect();
        for (n, mount) in mounts.iter().enumerate() {
            let image = dir.join(format!("below{n}.img"));
            std::fs::File::create(&image).unwrap().set_len(size).unwrap();
            command.arg("--disk").arg(format!("name=b{n},file={}", image.display()));
            command.arg("--export").arg(format!(
                "type=fuse,name=f{n},disk=b{n},mountpoint={},transport=dev,passthrough=off,writable=on,growable=on",
                mount.display()
            ));
        }
        let log = std::fs::File::create(dir.join("below.log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut below = Self { server: command.spawn().unwrap(), mounts };
        wait_for("the mounts below", || {
            if below.server.try_wait().unwrap().is_some() {
                panic!("{}", std::fs::read_to_string(dir.join("below.log")).unwrap());
            }
            let there = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|m| m.len() == size);
            below.mounts.iter().all(there).then_some(())
        });
        Some(below)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.server)
    }

    fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        // One of its threads learns of it at once, the others when they run.
        let tasks = format!("/proc/{}/task", self.server.id());
        wait_for("the server stands still", || {
            let stopped = std::fs::read_dir(&tasks).unwrap().flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
            });
            stopped.then_some(())
        });
    }

    fn go_on(&self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        for mount in &self.mounts {
            let path = std::ffi::CString::new(mount.as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: a path that ends with a zero, read by the call alone.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

fn disk_on(rig: &Rig, name: &str, file: &Path) {
    let spec = DiskSpec {
        name: name.into(),
        file: Some(file.to_owned()),
        direct: Direct::Off,
        locking: true,
        ..DiskSpec::default()
    };
    rig.daemon.disk_add(spec).unwrap();
}

/// Puts request `n` of a kind on the queue, whose parts lie where others do not.
fn submit(client: &mut Client, kind: u32, n: usize) -> u16 {
    let (head, status_at, data) = (2048 + n * 16, 1024 + n, MIB as usize + n * PIECE);
    let sector = (n * PIECE / 512) as u64;
    client.arena.write(status_at, &[status::UNTOUCHED]);
    let base = client.arena.guest();
    let seg =
        |at: usize, len: usize, writable| DriverSeg { addr: base + at as u64, len: len as u32, writable };
    let mut segs = vec![seg(head, 16, false)];
    client
        .arena
        .write(head, &header(kind, if kind == request::IN || kind == request::OUT { sector } else { 0 }));
    match kind {
        request::IN => segs.push(seg(data, PIECE, true)),
        request::OUT => segs.push(seg(data, PIECE, false)),
        request::WRITE_ZEROES => {
            client.arena.write(data, &range(sector, (PIECE / 512) as u32, 1));
            segs.push(seg(data, 16, false));
        }
        _ => {}
    }
    segs.push(seg(status_at, 1, true));
    client.disk.submit(0, &segs, false).unwrap()
}

fn in_flight(rig: &Rig, export: &str, count: u32) {
    wait_for("requests in flight", || (rig.queue(export, 0).in_flight == count).then_some(()));
}

#[test]
fn a_disk_that_hangs_with_many_operations_stops_no_other() {
    let rig = Rig::new();
    let Some(below) = Below::new(rig.dir.path(), MIB, 1) else { return };
    disk_on(&rig, "d", &below.mounts[0]);
    rig.disk("other", Backing::Direct, MIB, |_| {});
    rig.export("e", "d", 1, |_| {});
    rig.export("other", "other", 1, |_| {});
    let mut client = rig.connect("e", Options { queues: 1, queue_size: 256, ..small() });
    let mut other = rig.connect("other", Options { queues: 1, timeout: NEIGHBOUR_MAX, ..small() });
    for kind in [request::FLUSH, request::WRITE_ZEROES, request::IN, request::OUT] {
        below.stop();
        let cookies: Vec<_> = (0..HUNG).map(|n| submit(&mut client, kind, n)).collect();
        in_flight(&rig, "e", HUNG as u32);
        // Writes and discards of other files may share a bucket of io-wq's hash with those that
        // hang (docs/control.md).
        let to = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
        for worker in [to, 0] {
            for _ in 0..5 {
                assert_eq!(other.status(request::FLUSH, 0, &[], 0), status::OK);
                other.read(0, PIECE);
            }
            attach(&rig.daemon, "other", 0, worker);
        }
        assert_eq!(rig.queue("e", 0).in_flight, HUNG as u32, "they hang");
        // On a busy machine, a worker may look so for a while.
        wait_for("workers that run", || rig.daemon.workers().iter().all(|w| !w.stalled).then_some(()));
        rig.daemon.worker_free(to).unwrap();
        below.go_on();
        for cookie in cookies {
            client.disk.wait_for(0, Some(cookie)).unwrap();
        }
        assert_eq!(client.arena.part(1024, HUNG).to_vec(), [status::OK; HUNG], "of kind {kind}");
    }
    drop((client, other));
    rig.daemon.shutdown();
}

/// Waits for requests of a hung disk have limits. What fails leaves all as it was; a removal
/// continues by itself.
#[test]
fn commands_do_not_wait_for_a_disk_that_hangs() {
    let rig = Rig::new();
    let Some(below) = Below::new(rig.dir.path(), MIB, 2) else { return };
    let mut clients = Vec::new();
    for (n, mount) in below.mounts.iter().enumerate() {
        disk_on(&rig, &format!("d{n}"), mount);
        rig.export(&format!("e{n}"), &format!("d{n}"), 1, |_| {});
        clients.push(rig.connect(&format!("e{n}"), Options { queues: 1, ..small() }));
    }
    below.stop();
    let cookie = submit(&mut clients[0], request::IN, 0);
    submit(&mut clients[1], request::IN, 0);
    (0..2).for_each(|n| in_flight(&rig, &format!("e{n}"), 1));
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| rig.daemon.export_remove("e1", true).unwrap_err());
        let start = Instant::now();
        let error = rig.daemon.disk_resize("d0", MIB / 2).unwrap_err();
        assert!(error.kind() == Kind::Busy && error.to_string().contains("queue e0:0"), "{error}");
        assert_eq!(rig.daemon.disks()[0].size_bytes, MIB);
        let error = removal.join().unwrap();
        assert!(
            error.kind() == Kind::Busy && error.to_string().contains("queue e1:0 on worker 0"),
            "{error}"
        );
        assert!(start.elapsed() < PATIENCE);
    });
    let error = rig.daemon.export_remove("e1", true).unwrap_err();
    assert!(error.to_string().contains("being removed"), "{error}");
    assert!(rig.daemon.exports().iter().any(|e| e.spec.name == "e1" && e.removing), "status does not say so");
    // Another image is compared with those that are open, whose servers are not asked.
    let other = rig.dir.path().join("other.img");
    std::fs::File::create(&other).unwrap().set_len(MIB).unwrap();
    disk_on(&rig, "other", &other);
    // The queue is at work: it takes what comes.
    let beyond = MIB as usize / PIECE - 1;
    let segs = whole_read(&mut clients[0], beyond);
    let last = clients[0].disk.submit(0, &segs, false).unwrap();
    in_flight(&rig, "e0", 2);
    below.go_on();
    clients[0].disk.wait_for(0, Some(cookie)).unwrap();
    clients[0].disk.wait_for(0, Some(last)).unwrap();
    assert_eq!(clients[0].arena.part(8, 1).to_vec(), [status::OK], "the disk has its old size");
    wait_for("the export is gone", || rig.daemon.exports().iter().all(|e| e.spec.name != "e1").then_some(()));
    rig.daemon.disk_resize("d0", MIB / 2).unwrap();
    drop(clients);
    rig.daemon.shutdown();
}

/// Whether a front end would lose its device does not depend on when its session ends.
#[test]
fn a_front_end_that_has_gone_is_no_user() {
    let rig = Rig::new();
    let Some(below) = Below::new(rig.dir.path(), MIB, 1) else { return };
    disk_on(&rig, "d", &below.mounts[0]);
    rig.export("e", "d", 1, |_| {});
    let mut client = rig.connect("e", Options { queues: 1, ..small() });
    let export = || rig.daemon.exports().into_iter().find(|e| e.spec.name == "e").unwrap();
    assert!(export().connected && !export().leaving);
    let error = rig.daemon.export_remove("e", false).unwrap_err();
    assert!(error.to_string().contains("front end connected"), "{error}");
    below.stop();
    submit(&mut client, request::IN, 0);
    in_flight(&rig, "e", 1);
    drop(client);
    // A process that another test starts has its socket until it runs its program.
    wait_for("it has gone", || export().leaving.then_some(()));
    assert!(export().connected, "its request hangs");
    let error = rig.daemon.export_remove("e", false).unwrap_err();
    assert!(error.to_string().contains("has requests that do not end"), "{error}");
    below.go_on();
    wait_for("the export is gone", || rig.daemon.exports().is_empty().then_some(()));
    rig.daemon.shutdown();
}

/// A daemon in a process of its own, which logs to `daemon.log`; killed when dropped.
struct Served {
    child: Child,
    log: PathBuf,
}

impl Served {
    fn start(dir: &Path, args: &[String]) -> Self {
        let log = dir.join("daemon.log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_vshunt"));
        command.arg("serve").args(args).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(std::fs::File::create(&log).unwrap()).env("VSHUNT_SANDBOX", "kill");
        for name in ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "JOURNAL_STREAM", "RUST_LOG"] {
            command.env_remove(name);
        }
        Self { child: command.spawn().unwrap(), log }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn signal(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests in flight of the queue of an export, as the command line client tells.
fn told_in_flight(control: &str, export: &str) -> Option<u64> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vshunt"));
    let output = command.args(["-c", control, "status", "--json"]).output().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let queues = status["queues"].as_array()?;
    queues.iter().find(|q| q["export"] == export)?["in-flight"].as_u64()
}

/// A signal ends the exports whose disks answer at once, however many do not. For those the daemon
/// waits; it says that a second signal ends it, and one does.
#[test]
fn a_second_signal_ends_a_daemon_whose_disks_hang() {
    let dir = tempfile::Builder::new().prefix("vshunt-device").tempdir_in("/var/tmp").unwrap();
    let Some(below) = Below::new(dir.path(), MIB, 2) else { return };
    let path = |name: &str| dir.path().join(name).display().to_string();
    let control = path("daemon.sock");
    let mut args = vec!["--control".to_owned(), control.clone()];
    let disks = ["a", "b"]
        .iter()
        .zip(&below.mounts)
        .map(|(n, mount)| (*n, format!("file={},direct=off", mount.display())));
    for (name, disk) in disks.chain([("z", "format=ram,size=1M".to_owned())]) {
        args.extend(["--disk".into(), format!("name={name},{disk}"), "--export".into()]);
        args.push(format!(
            "type=vhost-user-blk,name={name},disk={name},socket={},queues=1",
            path(&format!("{name}.sock"))
        ));
    }
    let mut served = Served::start(dir.path(), &args);
    let mut clients = Vec::new();
    for name in ["a", "b"] {
        let socket = dir.path().join(format!("{name}.sock"));
        wait_for("the export", || {
            assert!(served.child.try_wait().unwrap().is_none(), "{}", served.log());
            std::os::unix::net::UnixStream::connect(&socket).ok()
        });
        clients.push(Client::new(Disk::connect(&socket, Options { queues: 1, ..small() }).unwrap()));
    }
    below.stop();
    for (client, name) in clients.iter_mut().zip(["a", "b"]) {
        submit(client, request::IN, 0);
        wait_for("a request in flight", || (told_in_flight(&control, name) == Some(1)).then_some(()));
    }
    served.signal();
    let other = dir.path().join("z.sock");
    wait_for("the end of the other export", || (!other.exists()).then_some(()));
    assert!(!served.log().contains("do not end"), "it waited for those that hang: {}", served.log());
    wait_for("a word on how to end it", || served.log().contains("send SIGTERM again").then_some(()));
    assert!(served.child.try_wait().unwrap().is_none(), "{}", served.log());
    served.signal();
    let code = wait_for("the end of the daemon", || served.child.try_wait().unwrap());
    assert_eq!(code.code(), Some(4), "{}", served.log());
    assert!(served.log().contains("told to end twice"), "{}", served.log());
}

/// A read of piece `n` of the disk, with its status at 8.
fn whole_read(client: &mut Client, n: usize) -> Vec<DriverSeg> {
    client.arena.write(512, &header(request::IN, (n * PIECE / 512) as u64));
    client.arena.write(8, &[status::UNTOUCHED]);
    let base = client.arena.guest();
    let seg = |at: u64, len, writable| DriverSeg { addr: base + at, len, writable };
    vec![seg(512, 16, false), seg(3 << 19, PIECE as u32, true), seg(8, 1, true)]
}

/// The call descriptor's flag is cleared after it was handed over, and its counter is full: a write
/// to it waits for ever.
#[test]
fn a_call_descriptor_that_would_wait_stops_no_worker() {
    let rig = Rig::ram(MIB, 1);
    rig.disk("other", Backing::Ram, LOAD_BYTES, |_| {});
    rig.export("other", "other", 1, |_| {});
    let mut neighbour = Machine::connect(&rig.socket("other"), small());
    let load = neighbour.load(0);
    let mut client = rig.connect("e", Options { queues: 1, ..small() });
    let call = client.disk.queue(0).parts().call.clone();
    fcntl_setfl(&*call, OFlags::NONBLOCK).unwrap();
    let told = client.disk.session().wire().tell(Code::SetVringCall, &Payload::new().u64(0), &[call.as_fd()]);
    told.unwrap();
    client.write(0, &[1; 512]);
    client.disk.queue(0).enable_notify();
    let _ = rustix::io::read(&*call, &mut [0; 8]);
    rustix::io::write(&*call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fcntl_setfl(&*call, OFlags::empty()).unwrap();
    let cookies: Vec<_> = (0..4).map(|n| submit(&mut client, request::OUT, n)).collect();
    load.progress(100);
    for cookie in cookies {
        client.disk.wait_for(0, Some(cookie)).unwrap();
    }
    wait_for("workers that run", || rig.daemon.workers().iter().all(|w| !w.stalled).then_some(()));
    load.progress(100);
}
