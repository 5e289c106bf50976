//! Who may connect to the sockets of a daemon, tried as another user.

mod common;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::{Daemon, output, user, vshunt};

const NOBODY: libc::c_long = user::NOBODY as libc::c_long;
/// A group that only the test gives to anybody.
const GROUP: libc::c_long = 1234;

/// A disk, and an export of it with these keys.
fn served(keys: &str) -> [String; 4] {
    let export = format!("type=vhost-user-blk,name=vm0,disk=d0,queues=1,{keys}");
    ["--disk".into(), "name=d0,format=ram,size=1M".into(), "--export".into(), export]
}

fn start(keys: &str, more: &[&str]) -> Daemon {
    let args = served(keys);
    let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let daemon = Daemon::start(&args);
    fs::set_permissions(&daemon.dir, fs::Permissions::from_mode(0o711)).unwrap();
    daemon
}

/// Connects to a socket as the user nobody, who is in these groups.
fn connect_as_nobody(path: &Path, groups: &[libc::gid_t]) -> io::Result<()> {
    let become_nobody = || {
        let count = groups.len();
        // The system calls, unlike the functions of the C library, change only this thread.
        // SAFETY: the kernel reads `count` numbers of `groups`, which outlives the call.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setgroups, count, groups.as_ptr()) }, 0);
        // SAFETY: this call takes no memory.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY) }, 0);
        // SAFETY: this call takes no memory.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) }, 0);
        UnixStream::connect(path).map(drop)
    };
    std::thread::scope(|scope| scope.spawn(become_nobody).join().unwrap())
}

fn assert_only_the_group_connects(path: &Path) {
    let e = connect_as_nobody(path, &[]).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{}", path.display());
    connect_as_nobody(path, &[GROUP as libc::gid_t]).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn members_of_the_group_connect_and_others_do_not() {
    if !user::root_or_skip("members_of_the_group_connect_and_others_do_not") {
        return;
    }
    let daemon = start("socket=vm0.sock,group=1234", &["--control-group", "1234"]);
    for socket in [daemon.path().join("vm0.sock"), daemon.control.clone()] {
        assert_eq!(mode(&socket), 0o660);
        assert_only_the_group_connects(&socket);
    }
    // An export that is added later, from within the sandbox, in the place of a dead socket.
    let later = daemon.path().join("vm1.sock");
    drop(UnixListener::bind(&later).unwrap());
    let spec = "type=vhost-user-blk,name=vm1,disk=d0,queues=1,socket=vm1.sock,owner=nobody,group=1234,mode=0600,readonly=on";
    daemon.ok(&["export", "add", spec]);
    let meta = fs::symlink_metadata(&later).unwrap();
    assert_eq!((meta.uid(), meta.gid(), mode(&later)), (NOBODY as u32, GROUP as u32, 0o600));
    connect_as_nobody(&later, &[]).unwrap();
    let exports = daemon.json(&["export", "list", "--json"]);
    let vm1 = exports.as_array().unwrap().iter().find(|e| e["name"] == "vm1").unwrap();
    assert_eq!([&vm1["owner"], &vm1["group"], &vm1["mode"]], ["nobody", "1234", "0600"]);
}

#[test]
fn a_restart_gives_a_dead_socket_to_the_group_again() {
    if !user::root_or_skip("a_restart_gives_a_dead_socket_to_the_group_again") {
        return;
    }
    let mut first = start("socket=vm0.sock,group=1234", &[]);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    let socket = first.path().join("vm0.sock");
    assert!(socket.exists());
    let path = format!("socket={},group=1234", socket.display());
    let _second = start(&path, &[]);
    assert_only_the_group_connects(&socket);
}

#[test]
fn without_keys_modes_are_as_before() {
    let daemon = start("socket=vm0.sock", &[]);
    assert_eq!(mode(&daemon.control), 0o600);
    let plain = daemon.path().join("plain");
    let _listener = UnixListener::bind(&plain).unwrap();
    assert_eq!(mode(&daemon.path().join("vm0.sock")), mode(&plain));
}

#[test]
fn a_mode_alone_counts_whatever_the_umask_is() {
    let daemon = start("socket=vm0.sock,mode=0666", &["--control-mode", "0660"]);
    assert_eq!((mode(&daemon.path().join("vm0.sock")), mode(&daemon.control)), (0o666, 0o660));
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let cases: [(&str, &[&str], i32, &str); 9] = [
        ("socket=s,mode=0770", &[], 2, "`0770` is no mode of a socket; it is 0600, 0660, 0606 or 0666"),
        ("socket=s,mode=0640", &[], 2, "connecting needs the write permission"),
        ("fd=0,group=1234", &[], 2, "export vm0: group is of a socket that the daemon makes"),
        ("socket=s,group=nonesuch", &[], 1, "there is no group nonesuch in /etc/group"),
        ("socket=s,owner=nonesuch", &[], 1, "socket s: there is no user nonesuch in /etc/passwd"),
        ("socket=s", &["--control-mode", "0777"], 2, "`0777` is no mode of a socket"),
        ("socket=s", &["--control-group", "nonesuch"], 1, "control socket c: there is no group nonesuch"),
        ("socket=s", &["--control-owner", "4294967295"], 1, "the highest number is 4294967294"),
        ("mountpoint=m,group=1234", &[], 2, "group is of type=vhost-user-blk and vhost-user-net"),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (keys, more, code, want) in cases {
        let mut args = served(keys);
        if keys.starts_with("mountpoint") {
            args[3] = args[3].replace("vhost-user-blk", "fuse");
        }
        let mut command = vshunt();
        let (got, _, err) =
            output(command.arg("serve").args(args).args(more).args(["--control", "c"]).current_dir(&dir));
        assert!(got == code && err.contains(want), "{keys} {more:?}: {got}: {err}");
        assert!(!dir.path().join("s").exists(), "{keys}");
    }
    let mut none = vshunt();
    none.arg("serve")
        .args(served("socket=s"))
        .args(["--no-control", "--control-group", "0"])
        .current_dir(&dir);
    let (code, _, err) = output(&mut none);
    assert!(code == 2 && err.contains("--control-group is given, and there is no control socket"), "{err}");
}

#[test]
fn a_socket_of_the_service_manager_is_not_changed() {
    // Descriptor 3 and its name, as systemd passes it.
    let passed = |name: &str, more: &str| {
        let dir = tempfile::tempdir().unwrap();
        let [disk, ram, export, spec] = served("socket=s,mode=0600");
        let plain = spec.replace(",mode=0600", "");
        let spec = if name == "vm0" { spec } else { plain };
        let python = format!(
            "import os, socket, sys\n\
             s = socket.socket(socket.AF_UNIX)\n\
             s.bind('passed'); s.listen(); os.dup2(s.fileno(), 3)\n\
             os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES='{name}')\n\
             os.execv(sys.argv[1], sys.argv[1:])"
        );
        let mut command = Command::new("python3");
        command.args(["-c", &python, env!("CARGO_BIN_EXE_vshunt"), "serve", &disk, &ram, &export, &spec]);
        command.args(["--control", "c"]).args(more.split_whitespace()).current_dir(&dir);
        command.env("VSHUNT_SANDBOX", "kill");
        output(&mut command)
    };
    let (code, _, err) = passed("vm0", "");
    assert!(code == 2 && err.contains("mode is of a socket that the daemon makes"), "{code}: {err}");
    assert!(err.contains("SocketMode="), "{err}");
    let (code, _, err) = passed("control", "--control-group 0");
    assert!(code == 2 && err.contains("the control socket is passed to the daemon"), "{code}: {err}");
}

#[test]
fn a_user_without_rights_is_told_the_remedy() {
    if !user::root_or_skip("a_user_without_rights_is_told_the_remedy") {
        return;
    }
    let dir = user::folder(0o777);
    let program = user::program(dir.path());
    let refused = |keys: &str| {
        let mut command = Command::new(&program);
        command.arg("serve").uid(user::NOBODY).gid(user::NOBODY);
        output(command.args(served(keys)).args(["--control", "c"]).current_dir(&dir))
    };
    let (code, _, err) = refused("socket=s,group=1234");
    assert!(
        code == 1 && err.contains("cannot give socket s to group 1234 (start the daemon as root"),
        "{err}"
    );
    assert!(err.contains("usermod -aG 1234 USER"), "{err}");
    let (code, _, err) = refused("socket=s,owner=root");
    assert!(code == 1 && err.contains("cannot give socket s to user root (only root may"), "{err}");
    assert!(!dir.path().join("s").exists());
}
