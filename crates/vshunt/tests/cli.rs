//! The program as its users see it: commands, messages, exit codes, signals, sockets. No data path
//! is needed.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

mod common;

use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use common::{Daemon, output, pass, user, vshunt, wait, wait_for};
use serde_json::json;

const RAM: [&str; 2] = ["--disk", "name=d0,format=ram,size=1M"];

/// The program under its other name.
fn vshunt_blk() -> Command {
    let mut command = vshunt();
    command.arg0("/usr/libexec/vshunt-blk");
    command
}

/// An image of `size` bytes.
fn image(dir: &std::path::Path, size: u64) -> String {
    let path = dir.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn help_and_version_succeed_and_nothing_is_usage() {
    let (code, out, err) = output(vshunt().arg("--help"));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("Exit status:") && out.contains("attach"), "{out}");
    assert_eq!(output(vshunt().arg("--version")).1, concat!("vshunt ", env!("CARGO_PKG_VERSION"), "\n"));
    for args in [&["serve", "--help"][..], &["worker", "new", "--help"], &["qmp", "--help"]] {
        let (code, out, _) = output(vshunt().args(args));
        assert!(code == 0 && out.contains("Examples:"), "{args:?}");
    }
}

#[test]
fn without_a_subcommand_there_are_three_examples() {
    for args in [&[][..], &["worker"], &["image"], &["-c", "/x", "disk"], &["export"], &["job", "-v"]] {
        let (code, out, err) = output(vshunt().args(args));
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        let name =
            args.iter().find(|arg| arg.len() > 2).map_or("vshunt".to_owned(), |arg| format!("vshunt {arg}"));
        assert!(err.starts_with(&format!("Usage: {name} ")) && err.contains("\nCommands:\n  "), "{err}");
        let (_, examples) = err.split_once("\nExamples:\n").unwrap();
        assert_eq!(examples.matches("\n  vshunt ").count(), 2, "{err}");
    }
}

#[test]
fn usage_is_2_and_names_the_key() {
    let ram_export = |keys: &str| format!("type=vhost-user-blk,name=e,disk=d0,{keys}");
    let (none, many, both, sector) = (
        ram_export("queues=0,socket=s"),
        ram_export("queues=257,socket=s"),
        ram_export("fd=3,socket=s"),
        ram_export("socket=s,block-size=513"),
    );
    let nowhere = ram_export("queues=1");
    let cases: [(&[&str], &str); 33] = [
        (&["serve", "--disk", "disk.img"], "`disk.img` has no key; write name=disk,file=disk.img"),
        (&["-c", "/x", "disk", "add", "/a/b.raw,readonly=on"], "write name=b,file=/a/b.raw"),
        (&["serve", "--disk", "name=a:b,format=ram,size=1M"], "disk name \"a:b\" is not usable"),
        (&["-c", "/x", "disk", "add", "name=a:b,format=ram,size=1M"], "disk name \"a:b\" is not usable"),
        (&["serve", "--disk", "name=d,format=ram"], "needs a size"),
        (&["serve", "--disk", "name=d,format=ram,size=1000"], "not a multiple of 512"),
        (&["serve", "--disk", "name=d"], "needs an image"),
        (&["serve", RAM[0], RAM[1], RAM[0], RAM[1]], "there are two of disk d0"),
        (&["serve", "--poll-us", "9999999"], "the most is 10000"),
        (&["serve", "--poll-us", "x"], "`x` is not a whole number in range"),
        (&["serve", "--worker", "nice=99"], "-20 to 19 is possible"),
        (&["serve", "--worker", "name=3"], "would be taken for an id"),
        (&["serve", "--export", &nowhere], "disk d0, which is not there"),
        (&["serve", RAM[0], RAM[1], "--control", "/x/y", "--export", &none], "1 to 256 is possible"),
        (&["serve", RAM[0], RAM[1], "--export", &many], "1 to 256 is possible"),
        (&["serve", RAM[0], RAM[1], "--export", &both], "either socket=PATH or fd=N"),
        (&["serve", RAM[0], RAM[1], "--export", &sector], "not one of 512, 1024"),
        (&["-c", "/x", "export", "add", &both], "either socket=PATH or fd=N"),
        (&["-c", "/x", "worker", "new", "--nice", "99"], "-20 to 19 is possible"),
        (&["-c", "/x", "worker", "new", "--poll-us", "9999999"], "the most is 10000"),
        (&["-c", "/x", "worker", "new", "--name", "7"], "would be taken for an id"),
        (&["-c", "/x", "worker", "new", "--cpu", "5000"], "there is no CPU 5000"),
        (&["-c", "/x", "resize", "--shrink", "d0", "100"], "not a multiple of 512"),
        (&["frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (&["serve", "--disk", "name=d", "--frob"], "unexpected argument '--frob'"),
        (&["serve", "--no-control", "--export", &nowhere], "disk d0, which is not there"),
        (
            &["serve", "--disk", "name=d,fil=x"],
            "unknown key `fil` (did you mean `file`?); the keys are name, format, file",
        ),
        (&["serve", "--export", "name=e"], "key `type` is missing"),
        (&["serve", "--net", "name=n,type=switch,mtux=3"], "unknown key `mtux`; the keys are type, name\n"),
        (&["serve", "--no-control"], "nothing to do"),
        (&["serve", "--no-control", "--control", "/x"], "cannot be used with"),
        (&["-c", "/x", "attach", "vm0:3-2", "2"], "write EXPORT:INDEX"),
        (&["-c", "/x", "qmp", "query-disks", "[]"], "not a JSON object"),
    ];
    for (args, want) in cases {
        let (code, out, err) = output(vshunt().args(args));
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.starts_with("vshunt: ") && err.contains(want), "{args:?}: {err}");
    }
}

#[test]
fn queues_that_never_start_cost_no_descriptors_and_are_one_line() {
    let export = |queues: &str| format!("type=vhost-user-blk,name=vm0,disk=d0,socket=vm0.sock{queues}");
    let start = |queues: &str, more: &[&str]| {
        Daemon::start(&[&[RAM[0], RAM[1], "--export", &export(queues)], more].concat())
    };
    let descriptors = |d: &Daemon| std::fs::read_dir(format!("/proc/{}/fd", d.child.id())).unwrap().count();
    let (few, many) = (start(",queues=1", &[]), start("", &[]));
    // The connections of clients may still be open.
    if few.shows_descriptors("queues_that_never_start_cost_no_descriptors_and_are_one_line, in part") {
        assert!(descriptors(&many) < descriptors(&few) + 16);
    }
    let queues = many.json(&["qmp", "query-queues"]);
    assert_eq!(queues.as_array().unwrap().len(), 256);
    let text = many.ok(&["status"]);
    assert!(text.contains("\nvm0: queues 0-255 stopped\n") && !text.contains("vm0:7"), "{text}");
    assert!(text.contains("  vm0:0-255\n"), "{text}");
    assert!(few.ok(&["status"]).contains("\nvm0:0 "));
    // As many workers as CPUs, and each has its share of the queues.
    let spread = start(",workers=per-queue", &[]);
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert_eq!(spread.json(&["worker", "list", "--json"]).as_array().unwrap().len(), 1 + cpus);
    let queues = spread.json(&["qmp", "query-queues"]);
    let workers: std::collections::BTreeSet<_> =
        queues.as_array().unwrap().iter().map(|q| q["worker"].as_u64().unwrap()).collect();
    assert_eq!(workers.len(), cpus);
}

#[test]
fn no_daemon_is_3() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none");
    for _ in 0..2 {
        let (code, _, err) = output(vshunt().arg("-c").arg(&socket).arg("status"));
        assert_eq!(code, 3);
        assert!(err.contains("no vshunt answers on") && err.contains("none"), "{err}");
        // Once there is nothing, once there is a socket that nobody listens on.
        drop(UnixListener::bind(&socket));
    }
    let (code, _, err) = output(vshunt().env("VSHUNT_CONTROL", &socket).args(["worker", "list"]));
    assert_eq!(code, 3, "{err}");
}

#[test]
fn a_daemon_is_set_up_asked_and_ended() {
    let args = [RAM[0], RAM[1], "--worker", "name=fast,poll-us=5"];
    let export = ["--export", "type=vhost-user-blk,name=vm0,disk=d0,socket=vm0.sock,queues=2"];
    let mut daemon = Daemon::start(&[&args[..], &export[..], &["--pidfile", "pid"]].concat());
    let mode = std::fs::metadata(&daemon.control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let pid = std::fs::read_to_string(daemon.path().join("pid")).unwrap();
    assert_eq!(pid, format!("{}\n", daemon.child.id()));

    let status = daemon.ok(&["status"]);
    for word in ["DISK", "d0", "EXPORT", "vm0", "vm0:1", "WORKER", "fast"] {
        assert!(status.contains(word), "{word}: {status}");
    }
    let status = daemon.json(&["status", "--json"]);
    assert_eq!(status["disks"][0]["size-bytes"], 1 << 20);
    assert_eq!(status["exports"][0]["queues"], 2);
    assert_eq!(status["workers"][1]["poll-us"], 5);

    let id = daemon.ok(&["worker", "new", "--name", "x"]);
    let id = id.trim_end();
    assert_eq!(id.parse::<u32>().unwrap().to_string(), id);
    assert_eq!(daemon.ok(&["attach", "vm0:1", id, "--timeout", "5s"]), format!("vm0:1 is on worker {id}\n"));
    assert_eq!(daemon.json(&["qmp", "query-queues"])[1]["worker"].to_string(), id);
    daemon.ok(&["attach", "vm0:1", "fast"]);
    let workers = |queues: serde_json::Value| [queues[0]["worker"].clone(), queues[1]["worker"].clone()];
    assert_eq!(daemon.ok(&["attach", "vm0", id]), format!("vm0:0-1 are on worker {id}\n"));
    assert_eq!(workers(daemon.json(&["qmp", "query-queues"])).map(|w| w.to_string()), [id, id]);
    daemon.ok(&["attach", "vm0:0-1", "fast"]);
    daemon.ok(&["attach", "vm0:*", "0"]);
    assert_eq!(workers(daemon.json(&["qmp", "query-queues"])), [0, 0]);
    daemon.fails(1, &["attach", "vm0:1-2", "0"]);
    daemon.ok(&["worker", "set", "x", "--poll-us", "0"]);
    assert_eq!(daemon.json(&["worker", "list", "--json"])[2]["poll-us"], 0);
    daemon.ok(&["worker", "free", id]);

    daemon.ok(&["disk", "add", "name=d1,format=null,size=1G"]);
    daemon.ok(&["export", "add", "type=vhost-user-blk,name=vm1,disk=d1,socket=vm1.sock,queues=1"]);
    let exports = daemon.json(&["export", "list", "--json"]);
    let socket = daemon.path().canonicalize().unwrap().join("vm1.sock");
    assert_eq!(exports[1]["socket"], json!(socket), "paths are the client's");
    daemon.ok(&["resize", "d1", "2G"]);
    assert_eq!(daemon.json(&["disk", "list", "--json"])[1]["size-bytes"], 2u64 << 30);
    assert!(daemon.fails(1, &["resize", "d1", "1G"]).contains("--shrink"));
    daemon.ok(&["resize", "--shrink", "d1", "1G"]);
    assert_eq!(daemon.json(&["disk", "list", "--json"])[1]["size-bytes"], 1u64 << 30);
    daemon.ok(&["resize", "d1", "+64M"]);
    assert!(daemon.fails(1, &["resize", "d1", "-64M"]).contains("--shrink"));
    daemon.ok(&["resize", "d1", "-64M", "--shrink"]);
    assert_eq!(daemon.json(&["disk", "list", "--json"])[1]["size-bytes"], 1u64 << 30);
    assert!(daemon.fails(1, &["resize", "d1", "-2G", "--shrink"]).contains("cannot be changed by that much"));
    daemon.ok(&["export", "remove", "vm1", "--force"]);
    daemon.ok(&["disk", "remove", "d1"]);

    daemon.ok(&["quit"]);
    assert!(!daemon.control.exists() && !daemon.path().join("pid").exists(), "quit returns when all is gone");
    let said = format!("vshunt: serving vm0 on vm0.sock, control on {}\n", daemon.control.display());
    assert_eq!(daemon.end(), (0, String::new(), said));
}

#[test]
fn the_end_of_a_job_is_one_line() {
    let daemon = Daemon::start(&RAM);
    let start = ["backup", "start", "d0", "--format", "raw", "--to"];
    let line = daemon.ok(&[&start[..], &["b0", "--wait"]].concat());
    assert!(line.starts_with("backup0 is done: 1 MiB (1048576 bytes) in "), "{line}");
    assert!(line.ends_with("/s\n") && line.lines().count() == 1, "{line}");
    assert_eq!(daemon.ok(&[&["-q"], &start[..], &["b1", "--wait"]].concat()), "");
    let refused = daemon.fails(1, &[&start[..], &["b1"]].concat());
    assert!(refused.contains("is there already") && refused.contains("--overwrite"), "{refused}");
    // A job that had ended before the wait has no rate.
    let name = daemon.ok(&[&start[..], &["b2"]].concat());
    daemon.ok(&["-q", "job", "wait", name.trim()]);
    assert_eq!(daemon.ok(&["job", "wait", name.trim()]), format!("{} is done: 1048576 bytes\n", name.trim()));
}

#[test]
fn a_status_has_no_empty_tables() {
    let daemon = Daemon::start(&[]);
    let text = daemon.ok(&["status"]);
    assert!(text.starts_with("WORKER ") && !text.contains("DISK") && !text.contains("QUEUE "), "{text}");
    daemon.ok(&["disk", "add", "name=d0,format=ram,size=1M"]);
    let text = daemon.ok(&["status"]);
    assert!(text.starts_with("DISK ") && !text.contains("EXPORT "), "{text}");
}

#[test]
fn what_the_daemon_refuses_is_1() {
    let daemon = Daemon::start(&RAM);
    let cases: [(&[&str], &str); 10] = [
        (&["disk", "remove", "nope"], "there is no disk nope; see `vshunt disk list`"),
        (&["disk", "add", "name=d0,format=ram,size=1M"], "d0"),
        (&["worker", "free", "77"], "there is no worker 77; see `vshunt worker list`"),
        (&["worker", "free", "nobody"], "there is no worker nobody"),
        (&["attach", "vm0:0", "0"], "there is no export vm0; see `vshunt export list`"),
        (&["export", "remove", "vm0"], "there is no export vm0; see `vshunt export list`"),
        (&["attach", "vm0", "0"], "there is no export vm0; see `vshunt export list`"),
        (&["export", "add", "type=vhost-user-blk,name=e,disk=nope,socket=s"], "nope"),
        (&["export", "add", "type=vhost-user-blk,name=e,disk=d0,fd=0"], "file descriptor"),
        (&["qmp", "no-such"], "The command no-such has not been found"),
    ];
    for (args, want) in cases {
        let err = daemon.fails(1, args);
        assert!(err.contains(want), "{args:?}: {err}");
    }
    assert!(daemon.fails(2, &["worker", "set", "0"]).contains("nothing to change"));
    assert!(daemon.fails(2, &["status", ""]).contains("an empty name; leave it out"));
    assert!(daemon.fails(2, &["limit", "vm0", "--group", ""]).contains("group name \"\" is not usable"));
}

#[test]
fn signals_end_it_cleanly() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let mut daemon = Daemon::start(&RAM);
        daemon.signal(signal);
        let (code, out, err) = daemon.end();
        assert_eq!((code, out.as_str(), err.lines().count()), (0, "", 1), "signal {signal}");
        assert!(
            err.contains("serving nothing yet, control on ") && err.contains("vshunt export add"),
            "{err}"
        );
        assert!(!daemon.control.exists());
    }
}

#[test]
fn the_control_socket_is_taken_from_nobody() {
    let mut first = Daemon::start(&[]);
    let control = first.control.to_str().unwrap().to_owned();
    let (code, _, err) = output(vshunt().args(["serve", "--control", &control]));
    assert_eq!(code, 1);
    assert!(err.contains("another vshunt answers on"), "{err}");
    first.ok(&["status"]);
    first.signal(libc::SIGKILL);
    wait(&mut first.child);
    assert!(first.control.exists(), "killed, it leaves its socket");
    let mut next = vshunt().args(["serve", "--control", &control]).spawn().unwrap();
    wait_for("the next daemon", || output(vshunt().args(["-c", &control, "status"])).0 == 0);
    assert_eq!(output(vshunt().args(["-c", &control, "quit"])).0, 0);
    assert_eq!(wait(&mut next), 0);

    let file = first.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let (code, _, err) = output(vshunt().arg("serve").arg("--control").arg(&file));
    assert!(code == 1 && err.contains("is no socket"), "{err}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_failed_start_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| output(vshunt().arg("serve").args(args).current_dir(&dir));
    let (code, out, err) = run(&["--control", "c", "--disk", "name=d,file=missing.img"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with("vshunt: ") && err.contains("missing.img"), "{err}");
    let export = "type=vhost-user-blk,name=e,disk=d,fd=77";
    let mut command = vshunt();
    command.args([
        "serve",
        "--control",
        "c",
        RAM[0],
        RAM[1],
        "--export",
        "type=vhost-user-blk,name=e,disk=d0,fd=3",
    ]);
    let close = || {
        // SAFETY: in the child only, where nothing of this program relies on the descriptor.
        unsafe { libc::close(3) };
        Ok(())
    };
    // SAFETY: between fork and exec; close is async-signal-safe.
    unsafe { command.pre_exec(close) };
    let (code, _, err) = output(command.current_dir(&dir));
    assert!(code == 1 && err.contains("fd 3 is not open"), "{err}");
    let (code, _, err) = run(&["--control", "c", RAM[0], "name=d,format=ram,size=1M", "--export", export]);
    assert!(code == 1 && err.contains("fd 77 is not open"), "{err}");
    let (code, _, err) = run(&["--control", "c", "--pidfile", "no/such/dir/pid"]);
    assert!(code == 1 && err.contains("pidfile"), "{err}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn a_configuration_file_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("vm.toml");
    let text = "[[disk]]\nname = \"c0\"\nformat = \"ram\"\nsize = \"1M\"\n[[worker]]\nname = \"w\"\n";
    std::fs::write(&config, text).unwrap();
    let daemon = Daemon::start(&[RAM[0], RAM[1], "--config", config.to_str().unwrap()]);
    let mut names: Vec<String> = daemon
        .json(&["disk", "list", "--json"])
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["c0", "d0"]);
    std::fs::write(&config, "[[disk]]\nname = \"c0\"\nfil = 1\n").unwrap();
    let (code, _, err) = output(vshunt().arg("serve").arg("--config").arg(&config));
    assert!(code == 2 && err.contains("3:1: disk c0: unknown key `fil` (did you mean `file`?)"), "{err}");
    let (code, _, err) = output(vshunt().args(["serve", "--config", "/no/such.toml"]));
    assert!(code == 2 && err.contains("/no/such.toml"), "{err}");
}

#[test]
fn the_service_manager_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut daemon = Daemon::start_with(&RAM, |c| {
        c.env("NOTIFY_SOCKET", &path);
    });
    let mut bytes = [0; 4096];
    let mut next = || {
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    let ready = next();
    assert!(ready.contains("READY=1") && ready.contains("STATUS="), "{ready}");
    daemon.ok(&["quit"]);
    assert!(next().contains("STOPPING=1"));
    assert_eq!(daemon.end().0, 0);
}

#[test]
fn sockets_of_the_service_manager_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let listener = UnixListener::bind(&path).unwrap();
    // A shell sets LISTEN_PID to what becomes the daemon's own id.
    let script = format!("LISTEN_PID=$$ exec {} serve", env!("CARGO_BIN_EXE_vshunt"));
    let mut command = Command::new("sh");
    command
        .args(["-c", &script])
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "control")
        .stdin(Stdio::null());
    pass(&mut command, listener.try_clone().unwrap().into(), 3);
    let mut child = command.spawn().unwrap();
    let (code, _, err) = output(vshunt().arg("-c").arg(&path).arg("quit"));
    assert_eq!(code, 0, "{err}");
    assert_eq!(wait(&mut child), 0);
    assert!(path.exists(), "the socket is the service manager's");
}

#[test]
fn vshunt_blk_prints_its_capabilities_whatever_else_is_said() {
    let (code, out, err) = output(vshunt_blk().args(["--fd=x", "--print-capabilities", "--frobnicate"]));
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n");
    let (code, _, err) = output(vshunt_blk().arg("--blk-file=/x"));
    assert!(code == 2 && err.starts_with("vshunt-blk: "), "{err}");
}

#[test]
fn vshunt_blk_ends_with_its_peer() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), 1 << 20);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = vshunt_blk();
    command.args(["--fd=3", "--read-only", &format!("--blk-file={image}")]).stdin(Stdio::null());
    pass(&mut command, theirs.into(), 3);
    let mut child = command.spawn().unwrap();
    // The parent's copy of the child's end is in `command`.
    drop(command);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none(), "it serves for as long as the peer is there");
    drop(ours);
    assert_eq!(wait(&mut child), 0);
}

#[test]
fn vshunt_blk_listens_and_obeys_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), 1 << 20);
    let control = dir.path().join("c");
    let mut command = vshunt_blk();
    command.arg(format!("--socket-path={}", dir.path().join("s").display()));
    command.args([&format!("--blk-file={image}"), "--num-queues=2", "-c"]).arg(&control);
    let mut child = command.spawn().unwrap();
    let status = || output(vshunt().arg("-c").arg(&control).args(["export", "list", "--json"]));
    wait_for("vshunt-blk", || status().0 == 0);
    let exports: serde_json::Value = serde_json::from_str(&status().1).unwrap();
    assert_eq!(exports[0]["queues"], 2);
    // SAFETY: a child of this process that was not reaped.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    assert_eq!(wait(&mut child), 0);
    assert!(!control.exists());
}

#[test]
fn man_pages_and_completions() {
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("man");
    assert_eq!(output(vshunt().arg("man").arg(&man)).0, 0);
    assert!(man.join("vshunt-worker-new.1").exists() && man.join("vshunt-blk.1").exists());
    let (code, out, _) = output(vshunt().args(["completions", "bash"]));
    assert!(code == 0 && out.contains("_vshunt"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors, which are ours on success.
    let (read, write) = unsafe {
        assert_eq!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    };
    drop(read);
    let mut child = vshunt().args(["completions", "zsh"]).stdout(Stdio::from(write)).spawn().unwrap();
    assert_eq!(wait(&mut child), 0);
}

#[test]
fn it_takes_as_many_open_files_as_it_may_have() {
    if !user::many_urings_or_skip("it_takes_as_many_open_files_as_it_may_have") {
        return;
    }
    let daemon = Daemon::start_with(&[], |command| {
        // SAFETY: between fork and exec; setrlimit is async-signal-safe and is about the child
        // only.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 64, rlim_max: 512 };
                match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
    });
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.child.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = line.split_whitespace().filter_map(|w| w.parse::<u64>().ok()).collect();
    assert_eq!(numbers, [512, 512]);
    let error = loop {
        let (code, _, error) = daemon.run(&["worker", "new"]);
        if code != 0 {
            break error;
        }
    };
    assert!(error.contains("ulimit -n") && error.contains("LimitNOFILE="), "{error}");
    // The daemon can still be told to release something.
    daemon.ok(&["worker", "free", "1"]);
}

#[test]
fn a_client_is_served_when_clients_have_all_descriptors() {
    let daemon = Daemon::start(&[]);
    if !daemon.shows_descriptors("a_client_is_served_when_clients_have_all_descriptors") {
        return;
    }
    let pid = daemon.child.id();
    let descriptors = || -> Vec<u64> {
        let list = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let mut list: Vec<_> =
            list.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
        list.sort_unstable();
        list
    };
    // The client that saw the daemon start may still have one. The kernel lists the daemon's end of
    // a connection by the path of the socket, in state 03.
    wait_for("the last client to leave", || {
        let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap();
        let path = daemon.control.to_str().unwrap();
        !sockets.lines().any(|socket| socket.ends_with(path) && socket.contains(" 03 "))
    });
    let used = descriptors();
    // The limit is for the numbers of new ones. It is above that of the reserve, which is an
    // eventfd: its number can then be used again.
    let is_eventfd = |fd: &&u64| {
        std::fs::read_link(format!("/proc/{pid}/fd/{fd}"))
            .is_ok_and(|to| to.ends_with("anon_inode:[eventfd]"))
    };
    let most = used.iter().filter(is_eventfd).max().unwrap() + 4;
    let left = (0..most).filter(|fd| !used.contains(fd)).count();
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the call reads `limit` and writes nothing.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    // Each client has one, until there are none.
    let clients: Vec<_> = (0..left)
        .map(|_| {
            let mut client = UnixStream::connect(&daemon.control).unwrap();
            client.read_exact(&mut [0; 8]).unwrap();
            client
        })
        .collect();
    assert!(daemon.ok(&["worker", "list"]).contains("worker-0"));
    drop(clients);
}

#[test]
fn a_workers_name_and_cpus_change_and_worker_0_stays() {
    let daemon = Daemon::start(&[]);
    let worker = |id: usize| daemon.json(&["worker", "list", "--json"])[id].clone();
    let all = worker(0)["cpu"].clone();
    assert_eq!(daemon.ok(&["worker", "new", "--cpu", &all[0].to_string()]), "1\n");
    assert_eq!(worker(1)["cpu"], json!([all[0]]));
    daemon.ok(&["worker", "set", "1", "--name", "fast", "--cpu", "all"]);
    assert_eq!((&worker(1)["cpu"], &worker(1)["name"]), (&all, &json!("fast")));
    daemon.ok(&["worker", "free", "fast"]);
    assert!(daemon.fails(1, &["worker", "free", "0"]).contains("worker 0 is there always"));
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    let daemon = Daemon::start_with(&["-v"], |command| {
        command.stderr(std::fs::File::options().write(true).open("/dev/full").unwrap());
    });
    // Each of these is logged.
    daemon.ok(&["worker", "new"]);
    daemon.ok(&["worker", "free", "1"]);
    daemon.ok(&["status"]);
}

#[test]
fn quiet_says_nothing() {
    let mut daemon = Daemon::start(&["-q"]);
    daemon.ok(&["quit"]);
    assert_eq!(daemon.end(), (0, String::new(), String::new()));
}

/// A front end whose channel for such news is closed goes, or has gone: no reason to warn.
#[test]
fn a_front_end_that_cannot_be_told_any_more_is_no_warning() {
    let export = "type=vhost-user-blk,name=e,disk=d0,socket=e.sock,queues=1";
    let mut daemon = Daemon::start(&[RAM[0], RAM[1], "--export", export]);
    let mut disk = vshunt_guest::Disk::connect(daemon.path().join("e.sock"), Default::default()).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let fd = std::os::fd::AsFd::as_fd(&theirs);
    disk.session().wire().tell(vshunt_guest::driver::Code::SetBackendReqFd, &[], &[fd]).unwrap();
    drop(ours);
    daemon.ok(&["resize", "d0", "2M"]);
    let refused = daemon.fails(1, &["quit"]);
    assert!(
        refused.contains("export e has a front end (VMM) connected") && refused.contains("--force"),
        "{refused}"
    );
    assert_eq!(daemon.ok(&["quit", "--force"]), "disconnected: e\n");
    let (code, _, err) = daemon.end();
    assert_eq!((code, err.lines().count()), (0, 1), "{err}");
}
