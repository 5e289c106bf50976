//! The limits of workers: ours, and the owner's.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};

use common::{PATIENCE, output, user, wait_for};
use vshunt_daemon::{Daemon, Options};
use vshunt_engine::MAX_WORKERS;
use vshunt_guest::Disk;
use vshunt_guest::driver::{self, Code, Payload};
use vshunt_types::error::Kind;
use vshunt_types::spec::WorkerSpec;

#[test]
fn no_more_workers_than_the_constant_says() {
    if !user::many_urings_or_skip("no_more_workers_than_the_constant_says") {
        return;
    }
    let daemon = Daemon::new(Options::default()).unwrap();
    for _ in 1..MAX_WORKERS {
        daemon.worker_new(WorkerSpec::default()).unwrap();
    }
    let error = daemon.worker_new(WorkerSpec::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Limit);
    assert!(error.to_string().contains(&MAX_WORKERS.to_string()), "{error}");
    daemon.worker_free(17).unwrap();
    daemon.worker_new(WorkerSpec::default()).unwrap();
    daemon.shutdown();
}

/// Descriptors that front ends are told of broken rings by: those of 128 queues took 128 io_urings.
#[test]
fn an_error_descriptor_takes_no_ring() {
    const QUEUES: u16 = 8;
    let export = format!("type=vhost-user-blk,name=e,disk=d,socket=e.sock,queues={QUEUES}");
    let daemon = common::Daemon::start(&["--disk", "name=d,format=ram,size=1M", "--export", &export]);
    if !daemon.shows_descriptors("an_error_descriptor_takes_no_ring") {
        return;
    }
    let rings = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().flatten();
        let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        links.filter(|link| link.to_string_lossy().contains("io_uring")).count()
    };
    let options = driver::Options { queues: QUEUES, queue_size: 64, timeout: PATIENCE, ..Default::default() };
    let mut disk = Disk::connect(daemon.path().join("e.sock"), options).unwrap();
    let before = rings();
    assert!(before > usize::from(QUEUES), "each call descriptor has one, and each worker");
    let err = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    for queue in 0..u64::from(QUEUES) {
        let wire = disk.session().wire();
        wire.tell(Code::SetVringErr, &Payload::new().u64(queue), &[err.as_fd()]).unwrap();
    }
    // All of it was done once a later message is answered.
    disk.session().read_config().unwrap();
    assert_eq!(rings(), before);
}

/// RLIMIT_NPROC does not bind root, so the daemon runs as another user. It is one that no other
/// process has, because the limit counts all threads of a user.
#[test]
fn the_owners_limit_of_threads_is_named() {
    let run_as = |command: &mut Command| output(command).0 == 0;
    let name = "the_owners_limit_of_threads_is_named";
    if !user::root_or_skip(name) {
        return;
    }
    if !run_as(Command::new("setpriv").arg("--version")) {
        println!("skip {name}: needs setpriv (package util-linux)");
        return;
    }
    let dir = user::folder(0o777);
    let program = user::program(dir.path());
    let control = dir.path().join("c.sock");
    let number = 0x4000_0000 + std::process::id();
    let as_user = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={number}"), format!("--regid={number}")]);
        command.args(["--clear-groups", "prlimit", "--nproc=16:16"]);
        command.arg(&program).args(args).env("VSHUNT_CONTROL", &control);
        command
    };
    let mut daemon = Ends(as_user(&["serve"]).spawn().unwrap());
    // One connection: each new one would need a thread of the daemon's, too.
    let mut stream = None;
    wait_for("the control socket", || {
        stream = UnixStream::connect(&control).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut ask = |command: &str| {
        writeln!(&stream, "{{\"execute\": \"{command}\"}}").unwrap();
        loop {
            let line = lines.next().unwrap().unwrap();
            if line.contains("\"return\"") || line.contains("\"error\"") {
                return line;
            }
        }
    };
    ask("qmp_capabilities");
    let mut made = 0;
    let error = loop {
        let answer = ask("worker-new");
        if answer.contains("\"error\"") {
            break answer;
        }
        made += 1;
        assert!(made < 16, "the limit does not bind");
    };
    assert!(error.contains("RLIMIT_NPROC is 16") && error.contains("ulimit -u"), "{error}");
    let list = ask("query-workers");
    assert_eq!(list.matches("\"tid\"").count(), made + 1, "it continues with the workers it has: {list}");
    ask("quit");
    assert!(daemon.0.wait().unwrap().success());
}

/// Killed when a test fails.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
