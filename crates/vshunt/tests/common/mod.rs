//! A daemon to test against, and commands for it.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod user;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest that anything here may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program, with nothing of the environment that it looks at.
pub(crate) fn vshunt() -> Command {
    vshunt_at(Path::new(env!("CARGO_BIN_EXE_vshunt")))
}

/// As [`vshunt`], of a copy.
pub(crate) fn vshunt_at(program: &Path) -> Command {
    let mut command = Command::new(program);
    for name in [
        "VSHUNT_CONTROL",
        "XDG_RUNTIME_DIR",
        "NOTIFY_SOCKET",
        "LISTEN_FDS",
        "LISTEN_PID",
        "JOURNAL_STREAM",
        "RUST_LOG",
    ] {
        command.env_remove(name);
    }
    // What the sandbox does not know of ends the daemon, and the test fails.
    command.env("VSHUNT_SANDBOX", "kill");
    command
}

/// Has `command` inherit `fd` under the number `to`. It may have that number already, and would be
/// closed then: dup2(2) does nothing.
pub(crate) fn pass(command: &mut Command, fd: OwnedFd, to: i32) {
    let inherit = move || {
        let from = fd.as_raw_fd();
        let rc = match from == to {
            // SAFETY: the call uses no memory, and the descriptor is the child's.
            true => unsafe { libc::fcntl(to, libc::F_SETFD, 0) },
            // SAFETY: the call uses no memory, and both descriptors are the child's.
            false => unsafe { libc::dup2(from, to) },
        };
        if rc < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: it runs between fork and exec. dup2 and fcntl are async-signal-safe, and it allocates
    // nothing.
    unsafe { command.pre_exec(inherit) };
}

/// Runs to its end.
pub(crate) fn output(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// Copies the program `vshunt`, with `cp`; all users may execute it. If this process wrote the
/// copy, a child that another test forks meanwhile would inherit the open descriptor, and executing
/// the copy would fail with ETXTBSY until that child calls `exec`.
pub(crate) fn copy_program(to: &Path) {
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_vshunt")).arg(to).status().unwrap();
    assert!(copied.success());
    // `cp` obeys the umask.
    std::fs::set_permissions(to, PermissionsExt::from_mode(0o755)).unwrap();
}

/// Waits until `what` holds.
pub(crate) fn wait_for(name: &str, mut what: impl FnMut() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "{name} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of `child`; its exit code.
pub(crate) fn wait(child: &mut Child) -> i32 {
    let mut code = None;
    wait_for("the end of the process", || {
        code = child.try_wait().unwrap();
        code.is_some()
    });
    code.and_then(|c| c.code()).unwrap_or(-1)
}

/// `vshunt serve` in a directory of its own; killed when dropped.
pub(crate) struct Daemon {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) child: Child,
    pub(crate) control: PathBuf,
}

impl Daemon {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| {})
    }

    pub(crate) fn start_with(args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        // Some tests open it to other users.
        let dir = user::folder(0o700);
        let control = dir.path().join("c.sock");
        let mut command = vshunt();
        command.arg("serve").args(args).arg("--control").arg(&control).current_dir(&dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        change(&mut command);
        let child = command.spawn().unwrap();
        let mut daemon = Self { dir, child, control };
        let control = daemon.control.clone();
        wait_for("the daemon", || {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon ended early");
            output(vshunt().arg("-c").arg(&control).args(["qmp", "query-version"])).0 == 0
        });
        daemon
    }

    /// Whether this process sees the descriptors of the daemon: in its sandbox it shows them to
    /// root alone. If not, prints that the test `name` is skipped.
    pub(crate) fn shows_descriptors(&self, name: &str) -> bool {
        let seen = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        if let Err(e) = &seen {
            println!("skip {name}: needs root, to see the daemon's descriptors: {e}");
        }
        seen.is_ok()
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A client's command.
    pub(crate) fn run(&self, args: &[&str]) -> (i32, String, String) {
        output(vshunt().arg("-c").arg(&self.control).args(args).current_dir(&self.dir))
    }

    /// A client's command that succeeds; what it printed.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let (code, out, err) = self.run(args);
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    }

    /// A client's command that fails with `code`; what it said.
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let (got, out, err) = self.run(args);
        assert_eq!((got, out.as_str()), (code, ""), "{args:?}: {err}");
        assert!(err.starts_with("vshunt: ") && err.ends_with('\n'), "{err:?}");
        err
    }

    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a child of this process that was not reaped, so the id is still its.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end; exit code, stdout and stderr.
    pub(crate) fn end(&mut self) -> (i32, String, String) {
        let code = wait(&mut self.child);
        let out = std::io::read_to_string(self.child.stdout.take().unwrap()).unwrap();
        let err = std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        (code, out, err)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
