//! The folder for sockets, and the daemon on the control socket.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use serde_json::Value;

use super::Finding;
use crate::config::control_path;
use crate::run_folder;

/// The time limit for the greeting of the daemon.
const GREETING_TIME: Duration = Duration::from_millis(300);
/// The longest greeting in bytes. That of vshunt has less than 200.
const GREETING_MAX: usize = 4096;

pub(super) fn checks(control: Option<&PathBuf>) -> Vec<Finding> {
    vec![folder(run_folder::look()), daemon(control_path(control).as_deref())]
}

fn folder(looked: Result<(PathBuf, bool), String>) -> Finding {
    const CHECK: &str = "run-folder";
    match looked {
        Ok((path, true)) => Finding::ok(
            CHECK,
            format!("{} can be written", path.display()),
            "`vshunt serve FILE` makes its socket there.",
        ),
        Ok((path, false)) => Finding::ok(
            CHECK,
            format!("{} can be made", path.display()),
            "`vshunt serve FILE` makes it, and its socket there.",
        ),
        Err(why) => Finding::warning(CHECK, why, "`vshunt serve FILE` and exports without socket= are refused.")
            .remedy("log in so that XDG_RUNTIME_DIR is set (su -, machinectl shell), or give socket=PATH and --control PATH"),
    }
}

fn daemon(path: Option<&Path>) -> Finding {
    const CHECK: &str = "daemon";
    const START: &str = "vshunt serve FILE, or: systemctl start vshunt";
    let Some(path) = path else {
        return Finding::warning(
            CHECK,
            "there is no default control socket",
            "Commands such as `vshunt status` need -c SOCKET.",
        )
        .remedy("give -c SOCKET, or set VSHUNT_CONTROL or XDG_RUNTIME_DIR");
    };
    let shown = path.display();
    match greeting(path) {
        Ok(()) => Finding::ok(
            CHECK,
            format!("one answers on {shown}"),
            "`vshunt status` and other commands reach it.",
        ),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Finding::ok(
            CHECK,
            format!("none runs: there is no {shown}"),
            "Commands such as `vshunt status` need one. `vshunt image` does not.",
        )
        .remedy(START),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Finding::warning(
            CHECK,
            format!("none runs: {shown} was left behind"),
            "Commands such as `vshunt status` need one. The next daemon replaces the file.",
        )
        .remedy(START),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Finding::warning(
            CHECK,
            format!("this user may not use {shown}"),
            "Commands such as `vshunt status` fail for this user.",
        )
        .remedy("run them as the user of the daemon or as root, or give -c SOCKET of a daemon of this user"),
        Err(e) => Finding::warning(
            CHECK,
            format!("no vshunt answers on {shown}: {e}"),
            "Commands such as `vshunt status` fail or wait.",
        )
        .remedy(format!(
            "see which program has the socket: fuser -v {shown}; give -c SOCKET if it is another one"
        )),
    }
}

/// Connects, and waits for the greeting of QMP for a limited time.
fn greeting(path: &Path) -> io::Result<()> {
    let until = Instant::now() + GREETING_TIME;
    // A connection that would wait for room in the queue of the listener fails at once.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let late = || io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time");
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|e| match e {
        Errno::AGAIN => late(),
        e => e.into(),
    })?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    let mut bytes = Vec::new();
    while !bytes.contains(&b'\n') {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        socket.set_read_timeout(Some(left))?;
        let mut part = [0; GREETING_MAX];
        match recv(&socket, &mut part[..GREETING_MAX - bytes.len()], RecvFlags::empty()) {
            Ok((_, 0)) => return Err(io::Error::other("it ended the connection, or sent too much")),
            Ok((_, count)) => bytes.extend_from_slice(&part[..count]),
            Err(Errno::AGAIN) => return Err(late()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    match serde_json::from_slice::<Value>(line) {
        Ok(value) if value.get("QMP").is_some() => Ok(()),
        _ => Err(io::Error::other("it is no QMP socket")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::super::Status;
    use super::*;

    /// Checks a socket whose listener answers with `answer`, if any, and ends if `ends`.
    fn answered(answer: Option<&[u8]>, ends: bool) -> Finding {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let (done, wait) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                let Some(answer) = answer else { return wait.recv().unwrap_or_default() };
                let mut peer = listener.accept().unwrap().0;
                // The other side may have ended already.
                let _ = peer.write_all(answer);
                if !ends {
                    wait.recv().unwrap_or_default();
                }
            });
            let finding = daemon(Some(&path));
            drop(done);
            finding
        })
    }

    #[test]
    fn a_daemon_that_answers_is_found() {
        assert_eq!(answered(Some(b"{\"QMP\": {}}\r\n"), false).status, Status::Ok);
    }

    #[test]
    fn peers_that_are_no_daemon_do_not_hold_it_up() {
        let start = Instant::now();
        for (answer, ends, found) in [
            (None, false, "does not answer in time"),
            (Some(&b"{\"QMP\""[..]), false, "does not answer in time"),
            (Some(b"{\"QMP\""), true, "ended the connection"),
            (Some(&[b'x'; GREETING_MAX + 1]), false, "sent too much"),
            (Some(b"HTTP/1.1 400\r\n"), false, "no QMP socket"),
            (Some(b"{}\n"), false, "no QMP socket"),
        ] {
            let finding = answered(answer, ends);
            assert_eq!(finding.status, Status::Warning);
            assert!(finding.found.contains(found), "{finding:?}");
        }
        assert!(start.elapsed() < GREETING_TIME * 20);
    }

    #[test]
    fn sockets_without_a_daemon_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let finding = daemon(Some(&path));
        assert_eq!(finding.status, Status::Ok);
        assert!(finding.found.starts_with("none runs: there is no") && finding.remedy.is_some());
        drop(UnixListener::bind(&path).unwrap());
        assert!(daemon(Some(&path)).found.contains("was left behind"));
        assert!(daemon(Some(Path::new(&"/long".repeat(100)))).found.starts_with("no vshunt answers"));
        assert_eq!(daemon(None).status, Status::Warning);
    }

    #[test]
    fn the_folder_for_sockets_is_described() {
        assert_eq!(folder(Ok(("/run/vshunt".into(), false))).status, Status::Ok);
        assert_eq!(folder(Ok(("/run/vshunt".into(), true))).status, Status::Ok);
        let finding = folder(Err("all users may change the folder /run/vshunt".into()));
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.remedy.unwrap().contains("socket=PATH"));
    }
}
