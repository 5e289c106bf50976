use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vshunt_types::error::Kind;
use vshunt_types::spec::DiskSpec;

use crate::Disk;
use crate::tests::{image, open_soon, raw_spec, scratch};

fn reader(spec: &DiskSpec) -> DiskSpec {
    DiskSpec { readonly: true, ..spec.clone() }
}

#[test]
fn writers_exclude_everyone_and_readers_writers() {
    let dir = scratch("/var/tmp");
    let write = raw_spec(&image(&dir, "disk.img", 1 << 20));
    let read = reader(&write);

    let held = Disk::open(&write).unwrap();
    for other in [&write, &read] {
        let e = Disk::open(other).err().expect("the image is locked");
        assert_eq!(e.kind(), Kind::Busy);
        let text = e.to_string();
        assert!(text.contains("disk.img is in use by another process (its write lock is held)"), "{text}");
        assert!(text.contains("locking=off"), "{text}");
    }
    Disk::open(&DiskSpec { locking: false, ..write.clone() }).unwrap();
    drop(held);

    let readers = [open_soon(&read), Disk::open(&read).unwrap()];
    let text = Disk::open(&write).err().expect("readers do not share write").to_string();
    assert!(text.contains("lets no other process write to it"), "{text}");
    assert!(text.contains("readonly=on"), "{text}");
    drop(readers);
    open_soon(&write);
}

#[test]
fn a_failed_open_leaves_no_lock() {
    let dir = scratch("/var/tmp");
    let spec = raw_spec(&image(&dir, "disk.img", 1 << 20));
    let held = Disk::open(&reader(&spec)).unwrap();
    assert!(Disk::open(&spec).is_err());
    open_soon(&reader(&spec));
    drop(held);
    open_soon(&spec);
}

/// The locks of a killed process are released a moment after its death.
#[test]
fn a_lock_that_is_released_soon_is_waited_for() {
    let dir = scratch("/var/tmp");
    let spec = raw_spec(&image(&dir, "disk.img", 1 << 20));
    let held = Disk::open(&spec).unwrap();
    let goes = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
    });
    Disk::open(&spec).unwrap();
    goes.join().unwrap();
}

/// A killed process whose io_uring has requests in flight keeps its locks for as long as those
/// last.
#[test]
fn the_locks_of_a_killed_process_are_waited_for_longer() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", 1 << 20);
    let mut gone = Command::new("true").spawn().unwrap();
    let pid = i64::from(gone.id());
    let held = File::options().read(true).write(true).open(&path).unwrap();
    for at in [101, 201, super::PROCESS_BASE + pid] {
        super::hold(&held, at).unwrap();
    }
    let probe = File::options().read(true).open(&path).unwrap();
    // Until it is waited for, it is there as a zombie.
    let until = Instant::now() + Duration::from_secs(30);
    while !super::were_killed(&probe) {
        assert!(Instant::now() < until, "a process that has ended counts as one that runs");
        std::thread::sleep(Duration::from_millis(10));
    }
    gone.wait().unwrap();
    assert!(super::were_killed(&probe));
    let goes = std::thread::spawn(move || {
        std::thread::sleep(super::PATIENCE + Duration::from_millis(500));
        drop(held);
    });
    let mut told = None;
    let mine = File::options().read(true).write(true).open(&path).unwrap();
    super::lock_telling(&mine, &path, false, &mut |patience| told = Some(patience)).unwrap();
    assert_eq!(told, Some(super::PATIENCE_KILLED));
    goes.join().unwrap();
    // This process runs, and nobody else holds it.
    assert!(!super::were_killed(&probe) && !super::were_killed(&mine));
}

/// A QEMU program that has the image open until it is dropped.
struct Holder(Child);

impl Holder {
    fn start(mut command: Command) -> Self {
        // While its input is open, qemu-io waits at its prompt.
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Waits until it has taken byte `at`.
    fn takes(self, path: &Path, at: i64) -> Self {
        let file = File::options().read(true).open(path).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while !super::held_by_another(&file, at).unwrap() {
            assert!(Instant::now() < until, "the lock of byte {at} is not taken");
            std::thread::sleep(Duration::from_millis(20));
        }
        self
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn missing(program: &str) -> bool {
    let missing = Command::new(program).arg("--version").output().is_err();
    if missing {
        eprintln!("skipped: locks against {program}, which is not on the PATH");
    }
    missing
}

/// qemu-io shares all permissions, so only the permissions that this program does not share cause a
/// refusal.
#[test]
fn qemu_io_and_vshunt_refuse_each_other() {
    if missing("qemu-io") {
        return;
    }
    let dir = scratch("/dev/shm");
    let path = image(&dir, "disk.img", 1 << 20);
    let (write, read) = (raw_spec(&path), reader(&raw_spec(&path)));
    let qemu = |args: &[&str]| {
        let mut c = Command::new("qemu-io");
        c.args(["-f", "raw"]).args(args).arg(&path);
        c
    };
    let qemu_may = |args: &[&str]| {
        let out = qemu(args).args(["-c", "length"]).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(text.is_empty(), !text.contains("Failed to get \"write\" lock"), "{text}");
        text.is_empty()
    };

    for spec in [&write, &read] {
        let _held = open_soon(spec);
        assert!(!qemu_may(&[]));
        assert!(qemu_may(&["-r"]));
    }

    let holder = Holder::start(qemu(&[])).takes(&path, 101);
    for spec in [&write, &read] {
        assert_eq!(Disk::open(spec).err().unwrap().kind(), Kind::Busy);
    }
    drop(holder);
    let _holder = Holder::start(qemu(&["-r"])).takes(&path, 100);
    for spec in [&write, &read] {
        open_soon(spec);
    }
}

/// A disk of a QEMU guest does not grant others to write.
#[test]
fn qemu_guests_and_vshunt_refuse_each_other() {
    if missing("qemu-system-x86_64") {
        return;
    }
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", 1 << 20);
    let (write, read) = (raw_spec(&path), reader(&raw_spec(&path)));
    let guest = |more: &str| {
        let mut c = Command::new("qemu-system-x86_64");
        c.args([
            "-S",
            "-display",
            "none",
            "-serial",
            "none",
            "-monitor",
            "none",
            "-machine",
            "q35,accel=tcg",
        ]);
        c.arg("-drive").arg(format!("file={},format=raw,if=virtio{more}", path.display()));
        c
    };

    let holder = Holder::start(guest("")).takes(&path, 201);
    for spec in [&write, &read] {
        let text = Disk::open(spec).err().unwrap().to_string();
        assert!(text.contains("its write lock is held"), "{text}");
    }
    drop(holder);
    let holder = Holder::start(guest(",readonly=on")).takes(&path, 201);
    open_soon(&read);
    let text = Disk::open(&write).err().unwrap().to_string();
    assert!(text.contains("readonly=on"), "{text}");
    drop(holder);

    for (spec, readonly_may) in [(&write, false), (&read, true)] {
        let _held = open_soon(spec);
        for (more, may) in [("", false), (",readonly=on", readonly_may)] {
            let mut command = guest(more);
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            if may {
                std::thread::sleep(Duration::from_millis(500));
                assert!(child.try_wait().unwrap().is_none(), "QEMU ended");
                drop(Holder(child));
            } else {
                assert!(!child.wait().unwrap().success());
                let text = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
                assert!(text.contains("\"write\" lock"), "{text}");
            }
        }
    }
}
