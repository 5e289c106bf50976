//! `vshunt doctor` on this host: as root and as another user, and where something is taken away.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use crate::common::user::{NOBODY, is_root};
use crate::common::{Daemon, PATIENCE, output, user, vshunt};

/// Runs it with `--json`. Returns the exit code, the report and stderr.
fn report(command: &mut Command) -> (i32, Value, String) {
    let start = Instant::now();
    let (code, out, err) = output(command.args(["doctor", "--json"]));
    assert!(start.elapsed() < PATIENCE);
    (code, serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out} {err}")), err)
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no check {name}"))
}

/// Refuses a system call with EPERM in this process and its children.
fn refuse(number: libc::c_long) -> std::io::Result<()> {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The first word of struct seccomp_data is the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: this option takes numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel reads `program` and `filter`, which outlive the call.
    match unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Lets the program change itself before it starts.
fn before(command: &mut Command, change: impl Fn() -> std::io::Result<()> + Send + Sync + 'static) {
    // SAFETY: the closures of this file make system calls and allocate nothing.
    unsafe { command.pre_exec(change) };
}

#[test]
fn this_host_serves_disks_and_a_daemon_is_found() {
    let daemon = Daemon::start(&["--disk", "name=d,format=null,size=1M"]);
    let (code, found, err) = report(vshunt().arg("-c").arg(&daemon.control));
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(found["works"], true);
    assert_eq!(check(&found, "io_uring")["status"], "ok");
    assert_eq!(check(&found, "io_uring")["required"], true);
    assert_eq!(check(&found, "daemon")["status"], "ok");
    let (code, out, err) = output(vshunt().arg("-c").arg(&daemon.control).arg("doctor"));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("ok       kernel: Linux ") && out.ends_with("work on this host.\n"), "{out}");
}

#[test]
fn a_seccomp_filter_against_io_uring_is_found() {
    for (number, text) in [(libc::SYS_io_uring_setup, false), (libc::SYS_io_uring_enter, true)] {
        let mut command = vshunt();
        before(&mut command, move || refuse(number));
        if text {
            let (code, out, err) = output(command.arg("doctor"));
            assert_eq!(code, 1);
            assert!(out.contains("missing  io_uring: ") && !out.contains("work on this host."), "{out}");
            assert!(err.starts_with("vshunt: disks over vhost-user do not work on this host"), "{err}");
            assert!(err.ends_with(": io_uring\n"), "{err}");
            continue;
        }
        let (code, found, err) = report(&mut command);
        assert_eq!((code, &found["works"]), (1, &Value::Bool(false)));
        assert!(err.ends_with(": io_uring\n"), "{err}");
        let ring = check(&found, "io_uring");
        assert_eq!(ring["status"], "missing");
        assert!(ring["remedy"].as_str().unwrap().contains("seccomp"), "{ring}");
    }
}

#[test]
fn a_user_who_is_not_root_is_told_what_that_user_lacks() {
    if !user::root_or_skip("a_user_who_is_not_root_is_told_what_that_user_lacks") {
        return;
    }
    let dir = user::folder(0o755);
    let program = user::program(dir.path());
    let mut command = Command::new(&program);
    command.env_remove("VSHUNT_CONTROL").env_remove("XDG_RUNTIME_DIR").uid(NOBODY).gid(NOBODY);
    let (code, found, err) = report(&mut command);
    assert_eq!((code, err.as_str(), &found["works"]), (0, "", &Value::Bool(true)));
    assert_eq!(check(&found, "net-admin")["status"], "warning");
    let folder = check(&found, "run-folder");
    assert!(folder["found"].as_str().unwrap().contains("XDG_RUNTIME_DIR is not set"), "{folder}");
    assert_eq!(check(&found, "daemon")["status"], "warning");
    // Another user's daemon.
    let daemon = Daemon::start(&["--disk", "name=d,format=null,size=1M"]);
    std::fs::set_permissions(daemon.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(&program);
    let (_, found, _) = report(command.arg("-c").arg(&daemon.control).uid(NOBODY).gid(NOBODY));
    assert!(check(&found, "daemon")["found"].as_str().unwrap().contains("may not use"), "{found}");
}

#[test]
fn limits_and_cpus_that_were_taken_away_are_found() {
    let mut command = vshunt();
    before(&mut command, || {
        let few = |most| rustix::process::Rlimit { current: Some(most), maximum: Some(most) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few(32))?;
        let mut one = rustix::thread::CpuSet::new();
        let all = rustix::thread::sched_getaffinity(None)?;
        if let Some(cpu) = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)) {
            one.set(cpu);
        }
        rustix::thread::sched_setaffinity(None, &one).map_err(Into::into)
    });
    let (code, found, err) = report(&mut command);
    assert_eq!(code, 1);
    assert!(err.ends_with(": open-files\n"), "{err}");
    assert_eq!(check(&found, "open-files")["status"], "missing");
    let cpus = check(&found, "cpus");
    assert!(cpus["found"].as_str().unwrap().contains("may use one CPU"), "{cpus}");
}

#[test]
fn it_changes_nothing_and_makes_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = vshunt();
    command.env("XDG_RUNTIME_DIR", dir.path());
    if is_root() {
        println!("as root the folder is in /run; only the loaded modules are compared");
    }
    let before = std::fs::read_to_string("/proc/misc").unwrap();
    let (code, found, _) = report(&mut command);
    assert_eq!((code, &found["works"]), (0, &Value::Bool(true)));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    assert_eq!(std::fs::read_to_string("/proc/misc").unwrap(), before);
}
