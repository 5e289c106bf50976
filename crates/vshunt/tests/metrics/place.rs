//! Where metrics are asked for, by whom, and what becomes of those who only connect.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::common::{Daemon, PATIENCE, output, pass, vshunt, wait, wait_for};
use crate::openmetrics::parse;
use crate::{GET, RAM, ask, scrape};

/// What the daemon says on stderr when all is up.
fn said(daemon: &mut Daemon) -> String {
    let mut line = Vec::new();
    let stderr = daemon.child.stderr.as_mut().unwrap();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        assert_eq!(stderr.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&line));
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

fn address(said: &str) -> SocketAddr {
    let (_, place) = said.split_once("metrics on http://").unwrap_or_else(|| panic!("{said}"));
    let (place, _) = place.split_once("/metrics").unwrap();
    place.parse().unwrap()
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Entries of a directory in /proc of the daemon: its threads, its descriptors.
fn entries(daemon: &Daemon, of: &str) -> usize {
    std::fs::read_dir(format!("/proc/{}/{of}", daemon.child.id())).unwrap().count()
}

#[test]
fn on_a_port_for_this_machine_only_unless_told_otherwise() {
    let mut daemon = Daemon::start(&["--metrics", "0"]);
    let at = address(&said(&mut daemon));
    assert!(at.ip().is_loopback(), "{at}");
    parse(&ask(connect(at)));
    // Taken: said before anything else is begun, and with what to do.
    let dir = tempfile::tempdir().unwrap();
    let disk = "name=d,file=missing.img";
    let (code, out, err) = output(
        vshunt()
            .args(["serve", "--disk", disk, "--control", "c", "--metrics", &at.to_string()])
            .current_dir(&dir),
    );
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert_eq!(
        err,
        format!(
            "vshunt: cannot serve metrics on {at}: another program listens there; give --metrics another port\n"
        )
    );
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "a failed start leaves nothing");
    daemon.ok(&["quit"]);
    assert_eq!(daemon.end().0, 0);
    assert!(TcpStream::connect(at).is_err());
}

#[test]
fn what_is_no_address_is_usage() {
    for (address, want) in
        [(":9150", "write 127.0.0.1:9150, or 0.0.0.0:9150"), ("/tmp/m.sock", "or unix:PATH")]
    {
        let (code, _, err) = output(vshunt().args(["serve", "--metrics", address]));
        assert!(code == 2 && err.contains(want), "{err}");
    }
}

#[test]
fn a_sockets_file_is_taken_from_nobody_and_goes_with_the_daemon() {
    let mut daemon = Daemon::start(&["--metrics", "unix:m.sock"]);
    let socket = daemon.path().join("m.sock");
    assert!(said(&mut daemon).contains(", metrics on unix:m.sock;"));
    let serve = |control: &str| {
        let mut command = vshunt();
        command
            .args(["serve", "--control", control, "--metrics", "unix:m.sock"])
            .current_dir(daemon.dir.path());
        command
    };
    let (code, _, err) = output(&mut serve("other"));
    assert!(
        code == 1 && err.contains("another program answers on m.sock; give --metrics another path"),
        "{err}"
    );
    scrape(&socket);
    daemon.signal(libc::SIGKILL);
    wait(&mut daemon.child);
    assert!(socket.exists(), "killed, it leaves its socket");
    let mut next = serve("next").spawn().unwrap();
    wait_for("the next daemon", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    scrape(&socket);
    assert_eq!(output(vshunt().arg("-c").arg(daemon.path().join("next")).arg("quit")).0, 0);
    assert_eq!(wait(&mut next), 0);
    assert!(!socket.exists());
}

#[test]
fn the_backend_programs_and_the_configuration_file_have_it_too() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::File::create(dir.path().join("d.img")).unwrap().set_len(1 << 20).unwrap();
    let config = "control = false\nmetrics = \"unix:m.sock\"\n[[disk]]\nname = \"d\"\nfile = \"d.img\"\n\
        [[export]]\ntype = \"vhost-user-blk\"\nname = \"blk\"\ndisk = \"d\"\nsocket = \"s\"\n";
    std::fs::write(dir.path().join("vm.toml"), config).unwrap();
    let mut program = vshunt();
    program.arg0("/usr/libexec/vshunt-blk");
    program.args(["--socket-path=s", "--blk-file=d.img", "--metrics=unix:m.sock", "-q"]);
    let mut file = vshunt();
    file.args(["serve", "--config", "vm.toml", "-q"]);
    for command in [&mut program, &mut file] {
        let mut child = command.current_dir(&dir).spawn().unwrap();
        let socket = dir.path().join("m.sock");
        wait_for("its socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        let exports = scrape(&socket).labels("vshunt_export_info", "export");
        assert_eq!(exports.into_iter().collect::<Vec<_>>(), ["blk"]);
        // SAFETY: a child of this process that was not reaped, so the id is still its.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
        assert_eq!(wait(&mut child), 0);
        assert!(!socket.exists());
    }
}

/// As the service manager would: `fd` under number 3, with a name.
fn activated(fd: OwnedFd, name: &str) -> Command {
    let mut shell = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_vshunt");
    shell.arg("-c").arg("LISTEN_PID=$$ exec \"$@\"").arg("sh").arg(program).arg("serve");
    shell.env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", name);
    pass(&mut shell, fd, 3);
    shell
}

#[test]
fn a_socket_of_the_service_manager() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut command = activated(listener.try_clone().unwrap().into(), "metrics");
    let mut child = command.args(["--control", "c.sock", "-q"]).current_dir(&dir).spawn().unwrap();
    parse(&ask(connect(at)));
    assert_eq!(output(vshunt().arg("-c").arg(dir.path().join("c.sock")).arg("quit")).0, 0);
    assert_eq!(wait(&mut child), 0);
    // It is the manager's: who comes now waits for the next daemon.
    let mut waits = connect(at);
    waits.write_all(GET).unwrap();
    let mut command = activated(listener.into(), "metrics");
    let mut child = command.args(["--control", "c.sock", "-q"]).current_dir(&dir).spawn().unwrap();
    let mut answer = String::new();
    waits.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_eq!(output(vshunt().arg("-c").arg(dir.path().join("c.sock")).arg("quit")).0, 0);
    assert_eq!(wait(&mut child), 0);

    let datagram = UnixDatagram::unbound().unwrap();
    let mut command = activated(datagram.into(), "metrics");
    let (code, _, err) = output(command.args(["--control", "c.sock"]).current_dir(&dir));
    assert!(code == 1 && err.contains("does not listen"), "{err}");
}

#[test]
fn hundreds_of_connections_hold_up_nobody() {
    let mut daemon = Daemon::start(&[RAM[0], RAM[1], "--metrics", "0"]);
    if !daemon.shows_descriptors("hundreds_of_connections_hold_up_nobody") {
        return;
    }
    let at = address(&said(&mut daemon));
    parse(&ask(connect(at)));
    let idle = entries(&daemon, "fd");
    let many: Vec<TcpStream> = (0..200)
        .map(|i| {
            let mut stream = connect(at);
            // Nothing, a beginning, an endless header, a question whose answer is not read.
            let _ = match i % 4 {
                0 => Ok(()),
                1 => stream.write_all(b"GET /met"),
                2 => stream.write_all(format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(10_000)).as_bytes()),
                _ => stream.write_all(GET),
            };
            stream
        })
        .collect();
    for _ in 0..5 {
        parse(&ask(connect(at)));
        daemon.ok(&["status"]);
    }
    assert!(entries(&daemon, "task") < 100, "no thread is made for a connection");
    assert!(entries(&daemon, "fd") < 150, "connections have a bound");
    drop(many);
    wait_for("the end of all connections", || entries(&daemon, "fd") <= idle);
    daemon.ok(&["quit"]);
    let (code, _, err) = daemon.end();
    assert_eq!((code, err.as_str()), (0, ""), "nobody writes log lines for them");
}
