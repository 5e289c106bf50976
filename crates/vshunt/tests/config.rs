//! `vshunt config`: files that are checked, and a file of what runs that starts the same again.

mod common;

use std::fs;
use std::path::Path;

use common::{Daemon, output, pass, vshunt};

/// Runs `vshunt config check` on a file with this text; exit code, stdout and stderr.
fn check(dir: &Path, text: &str) -> (i32, String, String) {
    fs::write(dir.join("f.toml"), text).unwrap();
    output(vshunt().args(["config", "check", "f.toml"]).env_remove("VSHUNT_SANDBOX").current_dir(dir))
}

const GOOD: &str = r#"
control = "c"
control-group = 0
[[disk]]
name = "d0"
format = "ram"
size = "1M"
[[disk]]
name = "d1"
format = "null"
size = "1G"
[[worker]]
name = "fast"
[[worker]]
nice = 5
[[export]]
type = "vhost-user-blk"
name = "vm0"
disk = "d0"
socket = "vm0.sock"
queues = 4
mode = "0660"
[[export]]
type = "vhost-user-blk"
name = "vm1"
disk = "d1"
socket = "vm1.sock"
queues = 2
workers = 2
[[attach]]
queues = "vm0:1-2"
worker = "fast"
[[attach]]
queues = "vm0:3"
worker = 2
[[attach]]
queues = "vm1:0"
worker = "vm1/1"
"#;

#[test]
fn a_good_file_is_said_to_be_good() {
    let dir = tempfile::tempdir().unwrap();
    let (code, out, err) = check(dir.path(), GOOD);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, "f.toml: no errors; 2 disks, 0 networks, 2 workers, 2 exports\n");
    assert!(!dir.path().join("vm0.sock").exists() && !dir.path().join("c").exists());
}

#[test]
fn all_errors_are_shown_with_their_places() {
    let dir = tempfile::tempdir().unwrap();
    let text =
        "control = \"s\"\n[[disk]]\nname = \"d0\"\nfil = \"x\"\n[[export]]\ntype = \"fuse\"\nsocket = 1\n";
    let (code, out, err) = check(dir.path(), text);
    assert_eq!((code, out.as_str()), (2, ""));
    let lines: Vec<&str> = err.lines().collect();
    assert!(
        lines[0].starts_with("vshunt: f.toml:4:1: disk d0: unknown key `fil` (did you mean `file`?)"),
        "{err}"
    );
    assert!(
        lines[1].starts_with("vshunt: f.toml:7:10: export number 1: key `socket`: invalid type"),
        "{err}"
    );
    assert_eq!(lines.len(), 2, "{err}");
    // Errors of the whole, each in its place.
    let whole = "control = \"s\"\n[[disk]]\nname = \"disk\"\nformat = \"ram\"\nsize = \"1M\"\n[[disk]]\nname = \"disk\"\n\
                 format = \"null\"\nsize = \"1M\"\n[[export]]\ntype = \"vhost-user-blk\"\nname = \"a\"\ndisk = \"dsik\"\n\
                 socket = \"s\"\nqueues = 2\n[[export]]\ntype = \"vhost-user-net\"\nname = \"b\"\nnet = \"n\"\nsocket = \"./s\"\n\
                 [[attach]]\nqueues = \"a:2\"\nworker = 0\n[[attach]]\nqueues = \"x\"\nworker = 0\n[[attach]]\nqueues = \"a\"\n\
                 worker = \"quick\"\n";
    let (code, _, err) = check(dir.path(), whole);
    let wants = [
        "f.toml:6:1: there are two of disk disk; give one another name",
        "f.toml:10:1: export a is of disk dsik, which is not there (did you mean disk?); add [[disk]]",
        "f.toml:16:1: export b is of network n, which is not there; add [[net]]",
        "f.toml:10:1: export a: s is used by the control socket already; choose another path",
        "f.toml:16:1: export b: ./s is used by the control socket already",
        "f.toml:21:1: queue 2 of export a is attached, which has queues 0 to 1",
        "f.toml:24:1: queues of export x are attached, which is not there",
        "f.toml:27:1: worker quick is not there",
    ];
    assert_eq!(code, 2);
    for want in wants {
        assert!(err.contains(&format!("vshunt: {want}")), "{want}\n{err}");
    }
    assert_eq!(err.lines().count(), wants.len(), "{err}");
    // `serve` says the same.
    let (code, _, same) = output(vshunt().args(["serve", "--config", "f.toml"]).current_dir(&dir));
    assert_eq!((code, same), (2, err));
}

#[test]
fn what_is_missing_here_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let text = "control = \"no/c\"\ncontrol-group = \"nonesuch\"\nallow-path = [\"/nonesuch\"]\n[[disk]]\nname = \"d\"\n\
                file = \"no.img\"\n[[export]]\ntype = \"vhost-user-blk\"\nname = \"e\"\ndisk = \"d\"\nsocket = \"no/s\"\n\
                owner = \"nonesuch\"\n";
    let (code, out, err) = check(dir.path(), text);
    assert_eq!(
        (code, out.as_str()),
        (0, "f.toml: no errors; 1 disk, 0 networks, 0 workers, 1 export\n"),
        "{err}"
    );
    let wants = [
        "f.toml:4:1: disk d: there is no file no.img",
        "f.toml:7:1: export e: there is no folder no for no/s",
        "f.toml:7:1: export e: there is no user nonesuch in /etc/passwd",
        "f.toml: there is no folder no for no/c",
        "f.toml: control socket: there is no group nonesuch in /etc/group",
        "f.toml: allow-path: there is no folder /nonesuch",
    ];
    for want in wants {
        assert!(err.contains(&format!("vshunt: warning: {want}")), "{want}\n{err}");
    }
    assert_eq!(err.lines().count(), wants.len(), "{err}");
}

#[test]
fn a_file_that_serves_nothing_or_is_none_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (code, _, err) = check(dir.path(), "control = false\n");
    assert!(code == 2 && err.contains("neither an [[export]] nor a control socket"), "{err}");
    let (code, _, err) = check(dir.path(), "control = false\ncontrol-mode = \"0600\"\n");
    assert!(code == 2 && err.contains("--control-mode is given, and there is no control socket"), "{err}");
    let (code, _, err) = check(dir.path(), "sandbox = \"off\"\nsandbox-workers = true\n");
    assert!(code == 2 && err.contains("has no effect with --sandbox=off"), "{err}");
    let (code, _, err) = output(vshunt().args(["config", "check", "/nonesuch.toml"]));
    assert!(code == 2 && err.contains("cannot read configuration /nonesuch.toml"), "{err}");
    // A file without an end, and a device by its name.
    let script = r#"exec "$0" config check /dev/stdin </dev/zero"#;
    let (code, _, err) =
        output(std::process::Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_vshunt")]));
    assert!(code == 2 && err.contains("/dev/stdin: a configuration has at most 16 MiB"), "{err}");
    let (code, _, err) = output(vshunt().args(["config", "check", "/dev/zero"]));
    assert!(code == 2 && err.contains("/dev/zero is no file; a configuration is a file"), "{err}");
}

/// The worker of each queue of an export, by its name.
fn workers(daemon: &Daemon, export: &str) -> Vec<String> {
    let (queues, workers) =
        (daemon.json(&["qmp", "query-queues"]), daemon.json(&["worker", "list", "--json"]));
    let name = |id: &serde_json::Value| {
        let found = workers.as_array().unwrap().iter().find(|worker| worker["id"] == *id);
        found.unwrap()["name"].as_str().unwrap().to_owned()
    };
    let of_export = queues.as_array().unwrap().iter().filter(|queue| queue["export"] == export);
    of_export.map(|queue| name(&queue["worker"])).collect()
}

#[test]
fn queues_start_where_a_file_puts_them() {
    if !common::user::is_root() {
        println!("skip queues_start_where_a_file_puts_them: needs root, for the control socket of group 0");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f.toml");
    fs::write(&file, GOOD).unwrap();
    let daemon = Daemon::start(&["--config", file.to_str().unwrap()]);
    assert_eq!(workers(&daemon, "vm0"), ["worker-0", "fast", "fast", "worker-2"]);
    assert_eq!(workers(&daemon, "vm1"), ["vm1/1", "vm1/1"]);
}

#[test]
fn what_runs_is_a_file_that_starts_the_same_again() {
    let export = "type=vhost-user-blk,name=vm0,disk=d0,socket=vm0.sock,queues=4,workers=2,mode=0660";
    let args = ["--disk", "name=d0,format=ram,size=1M", "--export", export, "--metrics", "unix:m.sock"];
    let more = ["--poll-us", "9", "--pidfile", "pid", "--log-format", "text", "--control-mode", "0660"];
    let mut first = Daemon::start(&[&args[..], &more[..]].concat());
    fs::write(first.path().join("a.img"), vec![0; 1 << 20]).unwrap();
    for command in [
        &["disk", "add", "name=d1,file=a.img,readonly=on"][..],
        &["disk", "add", "name=d2,format=null,size=1G"],
        &["resize", "d2", "2G"],
        &["worker", "new"],
        &["worker", "new", "--name", "fast", "--nice", "3", "--poll-us", "0"],
        &["worker", "free", "3"],
        &["worker", "set", "0", "--poll-us", "8"],
        &["net", "add", "type=switch,name=s0"],
        &["export", "add", "type=vhost-user-blk,name=vm1,disk=d1,socket=vm1.sock,queues=3,readonly=on"],
        &[
            "export",
            "add",
            "type=vhost-user-net,name=c0,net=s0,socket=c0.sock,queues=2,mac=52:54:00:12:34:56",
        ],
        &["export", "remove", "vm1"],
        &["export", "add", "type=vhost-user-blk,name=vm2,disk=d2,socket=vm2.sock,queues=3"],
        &["attach", "vm2:1-2", "fast"],
        &["attach", "vm0:0", "0"],
        &["attach", "vm0:3", "fast"],
        &["attach", "c0:1", "vm0/0"],
    ] {
        first.ok(command);
    }
    let shown = first.ok(&["config", "show"]);
    let placed = |daemon: &Daemon| ["vm0", "vm2", "c0"].map(|export| workers(daemon, export));
    let placement = placed(&first);
    first.ok(&["quit"]);
    assert_eq!(common::wait(&mut first.child), 0);

    fs::write(first.path().join("f.toml"), &shown).unwrap();
    let file = first.path().join("f.toml");
    let (code, _, err) = output(vshunt().args(["config", "check"]).arg(&file));
    assert_eq!((code, err.as_str()), (0, ""), "{shown}");
    // Without any other flag, and in another folder.
    let mut command = vshunt();
    command.arg("serve").arg("--config").arg(&file).current_dir("/");
    let child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    let mut second = Daemon { dir: tempfile::tempdir().unwrap(), child, control: first.control.clone() };
    common::wait_for("the daemon", || second.run(&["qmp", "query-version"]).0 == 0);
    assert_eq!(second.ok(&["config", "show"]), shown);
    assert_eq!(placed(&second), placement);
    second.ok(&["quit"]);
    assert_eq!(common::wait(&mut second.child), 0);
}

#[test]
fn what_a_file_cannot_express_is_a_comment() {
    let dir = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("l")).unwrap();
    let fd = std::os::fd::OwnedFd::from(listener);
    let export = "type=vhost-user-blk,name=vm0,disk=d0,fd=9,queues=2";
    let args = ["--disk", "name=d0,format=ram,size=1M", "--export", export];
    let daemon = Daemon::start_with(&args, |command| pass(command, fd, 9));
    daemon.ok(&["bitmap", "add", "d0", "b0"]);
    let shown = daemon.ok(&["config", "show"]);
    for want in [
        "# The socket of export vm0 was passed to the daemon; give it a path as `socket`.\n",
        "# [[export]]\n# type = \"vhost-user-blk\"\n# name = \"vm0\"\n",
        "# Disk d0 has dirty bitmaps: b0.\n",
    ] {
        assert!(shown.contains(want), "{want}\n{shown}");
    }
    let (code, out, err) = check(dir.path(), &shown);
    assert!(code == 0 && out.contains("1 disk,") && out.contains("0 exports"), "{out}{err}");
}
