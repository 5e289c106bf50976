//! What the daemon's threads may still do once it serves, as the kernel tells it.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Daemon, output, user, vshunt, wait, wait_for};
use serde_json::{Value, json};
use vshunt_daemon::{Daemon as Library, Options};
use vshunt_types::error::Kind;
use vshunt_types::spec::{DiskSpec, Format, NetKind, NetSpec};

/// Bits of capability sets in /proc/PID/status.
const IPC_LOCK: u64 = 1 << 14;
const SYS_ADMIN: u64 = 1 << 21;
const SYS_MODULE: u64 = 1 << 16;
const SYS_PTRACE: u64 = 1 << 19;

/// One field of every thread's status, with the threads' names.
fn threads(pid: u32, field: &str) -> Vec<(String, String)> {
    // A listing during which a thread ends may lack others.
    let list = || -> BTreeSet<PathBuf> {
        fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| task.unwrap().path()).collect()
    };
    let mut tasks = list();
    loop {
        let again = list();
        if again == tasks {
            break;
        }
        tasks = again;
    }
    let of_thread = |task: &Path| -> Option<(String, String)> {
        let status = fs::read_to_string(task.join("status")).ok()?;
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|value| value.trim().to_owned())
        };
        Some((value("Name")?, value(field)?))
    };
    tasks.iter().filter_map(|task| of_thread(task)).collect()
}

/// A daemon, and the folder of its export's socket.
struct Served {
    daemon: Daemon,
    _dir: tempfile::TempDir,
}

impl std::ops::Deref for Served {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

fn status(daemon: &Daemon) -> Value {
    let (code, text, error) = output(vshunt().arg("-c").arg(&daemon.control).args(["status", "--json"]));
    assert_eq!(code, 0, "{error}");
    serde_json::from_str::<Value>(&text).unwrap()["sandbox"].clone()
}

fn serve(mode: &str, more: &[&str]) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("type=vhost-user-blk,name=e0,disk=d0,socket={}/s", dir.path().display());
    let mut args = vec!["--disk", "name=d0,format=null,size=1M", "--export", &socket, "--worker", "name=w1"];
    args.extend(more);
    let daemon = Daemon::start_with(&args, |command| {
        command.env_remove("VSHUNT_SANDBOX");
        if !mode.is_empty() {
            command.args(["--sandbox", mode]);
        }
    });
    Served { daemon, _dir: dir }
}

/// Whether it is the launcher, or a thread that it made for an errand: those may be there for a
/// moment after the start.
fn of_the_launcher(name: &str) -> bool {
    matches!(name, "launcher" | "errand")
}

#[test]
fn by_default_every_thread_is_confined() {
    let daemon = serve("", &[]);
    let pid = daemon.child.id();
    for (name, value) in threads(pid, "NoNewPrivs") {
        assert!(value == "1" || of_the_launcher(&name), "{name}: {value}");
    }
    let mut sessions = 0;
    for (name, value) in threads(pid, "Seccomp") {
        let open = of_the_launcher(&name) || name.starts_with("worker-") || name == "w1";
        assert_eq!(value == "2", !open, "{name}: {value}");
        sessions += usize::from(name == "vu-e0");
    }
    assert_eq!(sessions, 1);
    for (name, value) in threads(pid, "CapEff") {
        let set = u64::from_str_radix(&value, 16).unwrap();
        assert_eq!(set & SYS_MODULE, 0, "{name}: {value}");
        assert!(set & SYS_PTRACE == 0 || of_the_launcher(&name), "{name}: {value}");
        assert!(set == 0 || !name.starts_with("worker-"), "{name}: {value}");
        assert!(set & !IPC_LOCK == 0 || name != "vu-e0", "{name}: {value}");
    }
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = |name: &str| -> u64 {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        // The soft limit, the hard limit, the unit.
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    for name in ["Max core file size", "Max msgqueue size", "Max realtime priority"] {
        assert_eq!(limit(name), 0, "{limits}");
    }
    assert!(limit("Max open files") <= 524_288, "{limits}");
    let info = status(&daemon);
    assert_eq!((&info["mode"], &info["refused"]), (&Value::from("on"), &Value::from(0)));
    assert_eq!(
        info["filtered"],
        serde_json::json!(["control", "session", "net-session", "mount", "metrics", "remote", "nbd-server"])
    );
    let (_, text, _) = output(vshunt().arg("-c").arg(&daemon.control).arg("status"));
    assert!(text.lines().last().unwrap().starts_with("sandbox: on; "), "{text}");
}

#[test]
fn workers_made_later_are_confined_like_the_first() {
    let daemon = serve("kill", &[]);
    let (code, id, error) = output(vshunt().arg("-c").arg(&daemon.control).args(["worker", "new"]));
    assert_eq!(code, 0, "{error}");
    let name = format!("worker-{}", id.trim());
    let made = threads(daemon.child.id(), "Seccomp");
    assert!(made.contains(&(name.clone(), "2".to_owned())), "{name}: {made:?}");
    let capable = threads(daemon.child.id(), "CapEff");
    let set = &capable.iter().find(|(thread, _)| *thread == name).unwrap().1;
    assert_eq!(u64::from_str_radix(set, 16), Ok(0));
}

#[test]
fn off_restricts_nothing() {
    let daemon = serve("off", &[]);
    let pid = daemon.child.id();
    let own = threads(std::process::id(), "CapEff").pop().unwrap().1;
    assert!(threads(pid, "Seccomp").iter().all(|(_, value)| value == "0"));
    assert!(threads(pid, "NoNewPrivs").iter().all(|(_, value)| value == "0"));
    assert!(threads(pid, "CapEff").iter().all(|(_, value)| *value == own));
    assert_eq!(status(&daemon)["mode"], "off");
}

#[test]
fn log_filters_and_restricts_nothing_else() {
    let daemon = serve("log", &["--sandbox-workers"]);
    let pid = daemon.child.id();
    let own = threads(std::process::id(), "CapEff").pop().unwrap().1;
    assert!(threads(pid, "CapEff").iter().all(|(_, value)| *value == own));
    let filtered = threads(pid, "Seccomp");
    assert!(filtered.iter().all(|(name, value)| value == "2" || of_the_launcher(name)), "{filtered:?}");
    let info = status(&daemon);
    assert_eq!((&info["mode"], &info["landlock"]), (&Value::from("log"), &Value::from("off")));
    let line = daemon.ok(&["status"]).lines().last().unwrap().to_owned();
    let capabilities = if info["capabilities"] == json!([]) { "none" } else { "all" };
    assert!(line.contains(&format!("capabilities: {capabilities}; ")), "{line}");
}

#[test]
fn a_wrong_mode_is_named() {
    let (code, _, error) = output(vshunt().args(["serve"]).env("VSHUNT_SANDBOX", "much"));
    assert_eq!((code, error.trim()), (2, "vshunt: VSHUNT_SANDBOX: `much` is not one of on, log, off, kill"));
    let (code, _, error) = output(vshunt().args(["serve", "--sandbox=much"]));
    assert!(code == 2 && error.contains("[possible values: on, log, off, kill]"), "{error}");
    let (code, _, error) = output(vshunt().args(["serve", "--sandbox=off", "--allow-path=/tmp"]));
    assert!(code == 2 && error.contains("--allow-path has no effect"), "{error}");
}

/// Landlock is missing on some kernels; then there is nothing to see.
fn has_landlock(daemon: &Daemon) -> bool {
    let missing = status(daemon)["landlock"] == "missing";
    if missing {
        println!("skip: this kernel has no Landlock");
    }
    !missing
}

fn add(daemon: &Daemon, name: &str, file: &Path) -> (i32, String, String) {
    let disk = format!("name={name},file={}", file.display());
    output(vshunt().arg("-c").arg(&daemon.control).args(["disk", "add", &disk]))
}

/// A command of the socket, as a client gives it that passes nothing.
fn qmp(daemon: &Daemon, command: &str, arguments: &Value) -> (i32, String) {
    let arguments = arguments.to_string();
    let (code, _, error) = output(vshunt().arg("-c").arg(&daemon.control).args(["qmp", command, &arguments]));
    (code, error)
}

#[test]
fn what_is_neither_configured_nor_allowed_is_not_opened() {
    let (inside, outside) = (tempfile::tempdir_in("/tmp").unwrap(), tempfile::tempdir_in("/tmp").unwrap());
    for dir in [&inside, &outside] {
        fs::write(dir.path().join("a.img"), vec![0; 1 << 20]).unwrap();
    }
    let daemon = serve("kill", &["--allow-path", inside.path().to_str().unwrap()]);
    if !has_landlock(&daemon) {
        return;
    }
    assert_eq!(status(&daemon)["landlock"], "process");
    let disk = |name: &str, dir: &Path| json!({ "name": name, "file": dir.join("a.img") });
    let (code, error) = qmp(&daemon, "disk-add", &disk("in", inside.path()));
    assert_eq!(code, 0, "{error}");
    let (code, error) = qmp(&daemon, "disk-add", &disk("out", outside.path()));
    assert!(code == 1 && error.contains("ermission denied") && error.contains("--allow-path"), "{error}");
    // The same holds without it; the command line passes what its caller may open.
    let daemon = serve("kill", &[]);
    assert_eq!(status(&daemon)["landlock"], "process");
    let (code, error) = qmp(&daemon, "disk-add", &disk("out", outside.path()));
    assert!(code == 1 && error.contains("ermission denied"), "{error}");
    let (code, _, error) = add(&daemon, "out", &outside.path().join("a.img"));
    assert_eq!(code, 0, "{error}");
    assert_eq!(status(&daemon)["refused"], 0);
}

/// Descriptors of the daemon that are of files in a folder.
fn open_in(daemon: &Daemon, folder: &Path) -> Vec<PathBuf> {
    let fds = fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).filter(|path| path.starts_with(folder)).collect()
}

#[test]
fn the_command_line_passes_what_it_names() {
    if !rustix::process::getuid().is_root() {
        println!("skip the_command_line_passes_what_it_names: needs root, to see the daemon's descriptors");
        return;
    }
    let (images, elsewhere) = (tempfile::tempdir_in("/tmp").unwrap(), tempfile::tempdir_in("/tmp").unwrap());
    let image = |name: &str| images.path().join(name).to_str().unwrap().to_owned();
    let other = |name: &str| elsewhere.path().join(name).to_str().unwrap().to_owned();
    let daemon = serve("kill", &[]);
    if !has_landlock(&daemon) {
        return;
    }
    fs::write(image("base"), vec![7; 1 << 20]).unwrap();
    daemon.ok(&["image", "create", "-q", "-f", "qcow2", "-b", &image("base"), "-F", "raw", &image("top")]);
    daemon.ok(&["disk", "add", &format!("name=d1,format=qcow2,file={}", image("top"))]);
    // Each opens the image again, long after its descriptors were passed.
    daemon.ok(&["resize", "d1", "2M"]);
    daemon.ok(&["snapshot", "d1", "--internal", "s"]);
    daemon.ok(&["snapshot", "d1", "--delete", "s"]);
    daemon.ok(&["snapshot", "d1", "--to", &other("overlay")]);
    daemon.ok(&["snapshot", "d1", "--internal", "s"]);
    daemon.ok(&["snapshot", "d1", "--delete", "s"]);
    daemon.ok(&["export", "add", &format!("type=vhost-user-blk,name=e1,disk=d1,socket={}", other("s"))]);
    assert!(UnixStream::connect(other("s")).is_ok());
    daemon.ok(&["backup", "start", "d1", "--to", &image("backup"), "--bitmap", "b", "--wait"]);
    let increment = ["--incremental", "b", "--backing", &image("backup")];
    daemon.ok(&[&["backup", "start", "d1", "--to", &other("increment"), "--wait"], &increment[..]].concat());
    let fleece = ["--fleece", &other("fleece"), "--wait"];
    daemon.ok(&[&["backup", "start", "d1", "--to", &image("fleeced")], &fleece[..]].concat());
    daemon.ok(&["commit", "d1", "--wait"]);
    daemon.ok(&["export", "remove", "e1"]);
    // What cannot be opened here is for the daemon to refuse.
    let said = daemon.fails(1, &["disk", "add", &format!("name=d2,file={}", other("none"))]);
    assert!(said.contains("there is no image"), "{said}");
    assert_eq!(daemon.json(&["qmp", "query-fdsets"]), json!([]));
    let open = open_in(&daemon, elsewhere.path());
    assert!(open.is_empty(), "what no disk has any more is closed: {open:?}");
    daemon.ok(&["disk", "remove", "d1"]);
    let open = open_in(&daemon, images.path());
    assert!(open.is_empty(), "{open:?}");
    let info = status(&daemon);
    assert_eq!(info["refused"], 0);
}

#[test]
fn folders_of_sockets_and_of_images_below_are_closed_to_files() {
    let [images, below, sockets] = [(); 3].map(|()| tempfile::tempdir_in("/tmp").unwrap());
    let at = |dir: &tempfile::TempDir, name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (top, base, pidfile) = (at(&images, "top"), at(&below, "base"), at(&below, "pid"));
    fs::write(&base, vec![7; 1 << 20]).unwrap();
    fs::write(at(&sockets, "a.img"), vec![0; 1 << 20]).unwrap();
    let made =
        output(vshunt().args(["image", "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top]));
    assert_eq!(made.0, 0, "{}", made.2);
    let disk = format!("name=d1,format=qcow2,file={top}");
    let export = format!("type=vhost-user-blk,name=e1,disk=d1,socket={}", at(&sockets, "s"));
    let free = "name=d2,format=null,size=1M";
    let args = ["--disk", &disk, "--export", &export, "--pidfile", &pidfile, "--disk", free];
    let mut daemon = serve("kill", &args);
    if !has_landlock(&daemon) {
        return;
    }
    let snapshot = |to: String| json!({ "device": "d1", "snapshot-file": to });
    let refused = |(code, error): (i32, String)| {
        assert!(code == 1 && error.contains("ermission denied") && error.contains("--allow-path"), "{error}");
    };
    refused(qmp(&daemon, "disk-add", &json!({ "name": "d3", "file": at(&sockets, "a.img") })));
    refused(qmp(&daemon, "blockdev-snapshot-sync", &snapshot(at(&below, "over"))));
    refused(qmp(&daemon, "blockdev-snapshot-sync", &snapshot(at(&sockets, "over"))));
    assert!(!Path::new(&at(&below, "over")).exists() && !Path::new(&at(&sockets, "over")).exists());
    // Sockets can be made in a folder of sockets, and images beside an image.
    let socket = json!({ "type": "vhost-user-blk", "name": "e2", "disk": "d2", "socket": at(&sockets, "t") });
    let (code, error) = qmp(&daemon, "export-add", &socket);
    assert_eq!(code, 0, "{error}");
    let (code, error) = qmp(&daemon, "blockdev-snapshot-sync", &snapshot(at(&images, "over")));
    assert_eq!(code, 0, "{error}");
    // A commit opens the image below for writing.
    let (code, error) = qmp(&daemon, "block-commit", &json!({ "device": "d1" }));
    assert_eq!(code, 0, "{error}");
    assert!(fs::read_to_string(&pidfile).unwrap().trim() == daemon.child.id().to_string());
    daemon.ok(&["quit"]);
    let (code, _, error) = daemon.daemon.end();
    assert_eq!(code, 0, "{error}");
    assert!(!Path::new(&pidfile).exists());
}

#[test]
fn an_overlay_that_the_sandbox_hides_is_to_be_allowed() {
    let [images, elsewhere] = [(); 2].map(|()| tempfile::tempdir_in("/tmp").unwrap());
    let image = images.path().join("a.img");
    let (base, over) = (image.to_str().unwrap(), elsewhere.path().join("over"));
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let daemon = serve("kill", &["--disk", &format!("name=d1,file={base}")]);
    if !has_landlock(&daemon) {
        return;
    }
    // Needs marks (extended attributes of users).
    daemon.ok(&["snapshot", "d1", "--to", over.to_str().unwrap()]);
    drop(daemon);
    if !marked(&image) {
        println!("skip an_overlay_that_the_sandbox_hides_is_to_be_allowed: no extended attributes in /tmp");
        return;
    }
    let (disk, control) = (format!("name=d1,file={base}"), images.path().join("c"));
    let (code, _, error) = output(vshunt().args(["serve", "--disk", &disk, "-c"]).arg(control));
    let remedy = format!("--allow-path={}", elsewhere.path().display());
    let at = |what: &str| error.find(what).unwrap_or_else(|| panic!("{what} is missing: {error}"));
    assert!(code == 1 && at(&remedy) < at("setfattr"), "{error}");
}

/// Whether the image is marked as having an overlay.
fn marked(image: &Path) -> bool {
    rustix::fs::getxattr(image, "user.vshunt.overlay", &mut [0u8; 4096]).is_ok()
}

#[test]
fn mountpoints_and_namespaces_are_configured_or_allowed_too() {
    let (inside, outside) = (tempfile::tempdir_in("/tmp").unwrap(), tempfile::tempdir_in("/tmp").unwrap());
    let daemon = serve("kill", &["--allow-path", inside.path().to_str().unwrap()]);
    if !has_landlock(&daemon) {
        return;
    }
    fs::write(outside.path().join("there"), "").unwrap();
    std::os::unix::fs::symlink(outside.path().join("there"), inside.path().join("link")).unwrap();
    let mount = |path: &Path| json!({ "type": "fuse", "name": "f0", "disk": "d0", "mountpoint": path });
    for path in [outside.path().join("there"), outside.path().join("new"), inside.path().join("link")] {
        let (code, error) = qmp(&daemon, "export-add", &mount(&path));
        assert!(code == 1 && error.contains("--allow-path"), "{}: {error}", path.display());
    }
    assert!(!outside.path().join("new").exists());
    // The daemon's own, which it may open in any case.
    let own = format!("/proc/{}/ns/net", daemon.child.id());
    let tap = json!({ "type": "tap", "name": "n0", "ifname": "vsnone0", "netns": own });
    let (code, error) = qmp(&daemon, "net-add", &tap);
    assert!(code == 1 && error.contains("--allow-path"), "{error}");
}

#[test]
fn without_a_control_socket_it_serves_and_ends_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (dir.path().join("a.img"), dir.path().join("s"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let mut child = vshunt()
        .args(["serve", "--no-control", "--disk", &format!("name=d,file={}", image.display())])
        .args(["--export", &format!("type=vhost-user-blk,name=e,disk=d,socket={}", socket.display())])
        .spawn()
        .unwrap();
    wait_for("the export's socket", || UnixStream::connect(&socket).is_ok());
    let capable = threads(child.id(), "CapEff");
    for (name, value) in &capable {
        assert_eq!(u64::from_str_radix(value, 16).unwrap() & SYS_ADMIN, 0, "{name}: {value}");
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(wait(&mut child), 0);
    assert!(!socket.exists(), "the socket is left");
}

#[test]
fn its_memory_is_closed_to_processes_of_its_user() {
    let name = "its_memory_is_closed_to_processes_of_its_user";
    if !user::root_or_skip(name) {
        return;
    }
    if output(Command::new("setpriv").arg("--version")).0 != 0 {
        println!("skip {name}: needs setpriv (package util-linux)");
        return;
    }
    let dir = user::folder(0o777);
    let program = user::program(dir.path());
    let control = dir.path().join("c");
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut child = Command::new("setpriv")
        .args(nobody)
        .arg(&program)
        .args(["serve", "-c"])
        .arg(&control)
        .spawn()
        .unwrap();
    wait_for("the control socket", || UnixStream::connect(&control).is_ok());
    let memory = format!("/proc/{}/mem", child.id());
    let (code, _, _) = output(Command::new("setpriv").args(nobody).args(["head", "-c1", &memory]));
    let (ended, _, error) = output(vshunt().arg("-c").arg(&control).arg("quit"));
    assert!(ended == 0 && wait(&mut child) == 0, "{error}");
    assert_ne!(code, 0, "another process of the same user reads its memory");
}

#[test]
fn no_more_disks_and_networks_than_the_constants_say() {
    let daemon = Library::new(Options::default()).unwrap();
    let disk = |at: usize| DiskSpec {
        name: format!("d{at}"),
        format: Some(Format::Null),
        size: Some(1 << 20),
        ..DiskSpec::default()
    };
    let full = (0..).find_map(|at| daemon.disk_add(disk(at)).err().map(|e| (at, e)));
    let (at, error) = full.unwrap();
    assert_eq!((at, error.kind()), (1024, Kind::Limit), "{error}");
    let switch = |at: usize| NetSpec { kind: NetKind::Switch, name: format!("s{at}"), ..net() };
    let full = (0..).find_map(|at| daemon.net_add(switch(at)).err().map(|e| (at, e)));
    let (at, error) = full.unwrap();
    assert_eq!((at, error.kind()), (1024, Kind::Limit), "{error}");
    daemon.shutdown();
}

fn net() -> NetSpec {
    serde_json::from_value(serde_json::json!({ "type": "switch", "name": "s" })).unwrap()
}
