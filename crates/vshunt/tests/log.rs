//! The log of a daemon, as its users see it.

mod common;

use std::fs::File;
use std::io::Read;
use std::process::Command;

use common::{Daemon, output, vshunt};
use serde_json::{Map, Value};
use vshunt::client::Client;

const DISK: [&str; 4] = [
    "--disk",
    "name=d0,format=ram,size=1M",
    "--export",
    "type=vhost-user-blk,name=e,disk=d0,socket=e.sock,queues=1",
];

/// Starts a daemon whose log goes to the file `log`.
fn start(args: &[&str], change: impl FnOnce(&mut Command)) -> (Daemon, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let log = File::create(dir.path().join("log")).unwrap();
    let daemon = Daemon::start_with(&[&DISK[..], args].concat(), |command| {
        change(command.stderr(log));
    });
    (daemon, dir)
}

/// Ends a daemon; the lines of its log.
fn ended((mut daemon, dir): (Daemon, tempfile::TempDir)) -> Vec<String> {
    daemon.ok(&["quit"]);
    assert_eq!(common::wait(&mut daemon.child), 0);
    let text = std::fs::read_to_string(dir.path().join("log")).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// Connects a front end, which sets up its queues, and goes.
fn use_disk(daemon: &Daemon) {
    let disk = vshunt_guest::Disk::connect(daemon.path().join("e.sock"), Default::default()).unwrap();
    drop(disk);
}

/// Whether a line begins with a time such as 2026-11-25T17:00:00.123456Z.
fn is_stamped(line: &str) -> bool {
    let shape = |c: char| if c.is_ascii_digit() { '0' } else { c };
    let stamp: String = line.chars().take(28).map(shape).collect();
    stamp == "0000-00-00T00:00:00.000000Z "
}

#[test]
fn verbose_lines_have_the_time_and_others_do_not() {
    let lines = ended(start(&[], |_| {}));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("vshunt: serving e on e.sock"), "{lines:?}");
    let (daemon, dir) = start(&["-v"], |_| {});
    daemon.ok(&["worker", "new"]);
    let lines = ended((daemon, dir));
    assert!(lines.iter().all(|line| is_stamped(line)), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("Z vshunt: info: worker made id=1")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("Z vshunt: serving e on e.sock")), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("debug")), "{lines:?}");
}

#[test]
fn queues_that_are_attached_together_are_one_line() {
    let own = ["-v", "--disk", "name=d1,format=null,size=1G", "--export", "disk=d1,socket=f.sock"];
    let (daemon, dir) = start(&own, |_| {});
    let id = daemon.ok(&["worker", "new"]);
    daemon.ok(&["attach", "d1", id.trim()]);
    daemon.ok(&["attach", "d1:3", "0"]);
    let lines = ended((daemon, dir));
    let moved: Vec<_> = lines.iter().filter_map(|line| line.split_once("info: queue")).collect();
    let want = [format!("s d1:0-255 are on worker {}", id.trim()), " d1:3 is on worker 0".to_owned()];
    assert_eq!(moved.iter().map(|(_, rest)| *rest).collect::<Vec<_>>(), want, "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("QUEUE_ATTACHED")), "{lines:#?}");
}

#[test]
fn twice_verbose_shows_messages_and_commands_without_their_data() {
    let (daemon, dir) = start(&["-vv"], |_| {});
    use_disk(&daemon);
    daemon.fails(1, &["disk", "remove", "nonesuch"]);
    let lines = ended((daemon, dir));
    for want in [
        "debug: e: message GET_FEATURES of 0 bytes",
        "debug: e: answer to GET_FEATURES of 8 bytes",
        "debug: e: message SET_VRING_KICK of 8 bytes, 1 descriptor",
        "debug: control command command=\"disk-remove\"",
        "debug: control command failed: there is no disk nonesuch",
    ] {
        assert!(lines.iter().any(|line| line.contains(want)), "{want}: {lines:#?}");
    }
    // A name and numbers, nothing of the payload.
    let outline = |line: &str| {
        let rest = line.split_once(": e: message ")?.1;
        let (name, rest) = rest.split_once(" of ")?;
        let plain = |c: char| c.is_ascii_digit() || "bytesdcripor, ".contains(c);
        Some(name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_') && rest.chars().all(plain))
    };
    let outlines: Vec<bool> = lines.iter().filter_map(|line| outline(line)).collect();
    assert!(outlines.len() > 5 && outlines.iter().all(|ok| *ok), "{lines:#?}");
}

#[test]
fn json_is_an_object_a_line_to_the_end() {
    let (daemon, dir) = start(&["-vv", "--log-format=json"], |_| {});
    use_disk(&daemon);
    let lines = ended((daemon, dir));
    let objects: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(objects.iter().all(|o| o["time"].is_string() && o["program"] == "vshunt"), "{lines:?}");
    let of = |level: &str, message: &str| {
        let is = |o: &&Value| o["level"] == level && o["message"].as_str().unwrap().contains(message);
        objects.iter().find(is).unwrap_or_else(|| panic!("{level} {message}: {lines:#?}"))
    };
    of("notice", "serving e on e.sock");
    assert_eq!(of("debug", "control command")["fields"]["command"], "qmp_capabilities");
    assert_eq!(of("debug", "GET_FEATURES")["target"], "vshunt_vhost_user::session_thread");
    // Also the reason why it did not start.
    let dir = tempfile::tempdir().unwrap();
    let mut command = vshunt();
    command.args(["serve", "--log-format=json", "--disk", "name=d,file=none", "--control", "c"]);
    let (code, _, err) = output(command.current_dir(&dir));
    let last: Value = serde_json::from_str(&err).expect(&err);
    assert_eq!((code, &last["level"]), (1, &"error".into()));
    assert!(last["message"].as_str().unwrap().contains("none"), "{err}");
}

#[test]
fn journald_gets_priorities_and_no_times() {
    let (daemon, dir) = start(&["-v", "--log-format=journald"], |_| {});
    daemon.ok(&["worker", "new"]);
    let lines = ended((daemon, dir));
    assert!(lines.iter().any(|line| line.starts_with("<6>worker made id=1")), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("<5>serving e on e.sock")), "{lines:?}");
    assert!(lines.iter().all(|line| line.starts_with('<')), "{lines:?}");
}

#[test]
fn the_format_can_be_in_the_configuration_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("v.toml");
    std::fs::write(&file, "log-format = \"json\"\n").unwrap();
    let lines = ended(start(&["--config", file.to_str().unwrap()], |_| {}));
    assert!(lines.iter().all(|line| line.starts_with("{\"time\":")), "{lines:?}");
}

#[test]
fn an_unknown_format_is_usage() {
    let (code, _, err) = output(vshunt().args(["serve", "--log-format=xml"]));
    assert!(code == 2 && err.contains("'xml'") && err.contains("text, json, journald"), "{err}");
}

#[test]
fn rust_log_is_honoured_or_refused_aloud() {
    let (daemon, dir) = start(&[], |command| {
        command.env("RUST_LOG", "vshunt=debug,nonesuch=info");
    });
    use_disk(&daemon);
    let lines = ended((daemon, dir));
    assert!(lines.iter().any(|line| line.contains("message GET_FEATURES")), "{lines:?}");
    let named = |line: &String| line.contains("RUST_LOG: `nonesuch` is neither a level nor a module");
    assert!(lines.iter().any(named), "{lines:?}");
    // Flags count more than a bare level.
    let lines = ended(start(&["-q"], |command| {
        command.env("RUST_LOG", "trace");
    }));
    assert_eq!(lines, Vec::<String>::new());
    let (code, _, err) = output(vshunt().args(["serve", "--control", "c"]).env("RUST_LOG", "vshunt=loud"));
    assert!(code == 2 && err.contains("RUST_LOG=vshunt=loud is not understood"), "{code}: {err}");
}

#[test]
fn a_log_that_nobody_reads_blocks_nothing() {
    // The pipe of stderr is not read until the end.
    let mut daemon = Daemon::start(&[&DISK[..], &["-vv"]].concat());
    let mut client = Client::connect(&daemon.control).unwrap();
    for _ in 0..5_000 {
        client.execute("query-disks", Map::new()).unwrap();
    }
    use_disk(&daemon);
    let mut stderr = daemon.child.stderr.take().unwrap();
    let mut some = [0; 32 << 10];
    stderr.read_exact(&mut some).unwrap();
    client.execute("query-disks", Map::new()).unwrap();
    drop(client);
    daemon.ok(&["quit"]);
    assert_eq!(common::wait(&mut daemon.child), 0);
    let rest = std::io::read_to_string(stderr).unwrap();
    assert!(
        rest.contains(" lines are missing here: stderr was full, or nothing read it\n"),
        "{}",
        rest.len()
    );
    assert!(rest.lines().all(|line| is_stamped(line) || !line.starts_with("20")), "whole lines");
}
