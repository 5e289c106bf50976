//! fusermount3: a set-user-id program of the FUSE package, which mounts and unmounts for users
//! without that permission.
//!
//! The rest of [`mount`](super) calls it, from any thread. What must never happen: a wait for it
//! without a limit.

use std::ffi::OsString;
use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use vshunt_sandbox as sandbox;

/// The name of the program.
pub(super) const NAME: &str = "fusermount3";
/// Folders where it is searched for besides PATH, since the PATH of a service may lack them.
const FOLDERS: [&str; 6] = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"];
/// How long it may take. It makes a few system calls only.
const RUN_LIMIT: Duration = Duration::from_secs(10);
/// Its settings. One of them permits `allow_other`.
const SETTINGS: &str = "/etc/fuse.conf";

/// Returns the path of fusermount3, if it is installed.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .filter(|folder| folder.is_absolute())
        .chain(FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join(NAME))
        .find(|program| rustix::fs::access(program, Access::EXEC_OK).is_ok())
}

/// Returns whether fusermount3 mounts with `allow_other` for this user.
pub fn may_allow_other() -> bool {
    rustix::process::getuid().is_root() || fs::read_to_string(SETTINGS).is_ok_and(|text| says_allow(&text))
}

fn says_allow(settings: &str) -> bool {
    settings.lines().any(|line| line.split('#').next().is_some_and(|l| l.trim() == "user_allow_other"))
}

/// Mounts over `point`. Returns the session's descriptor.
///
/// # Errors
/// The message of the program.
pub(super) fn mount(
    program: &Path,
    point: &Path,
    source: &str,
    flags: &[&str],
) -> std::result::Result<OwnedFd, String> {
    let (ours, its) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(say)?;
    let mut options = OsString::from(format!("subtype=vshunt,fsname={}", escape(source)));
    for flag in flags {
        options.push(",");
        options.push(flag);
    }
    let mut command = Command::new(program);
    command.arg("-o").arg(options).arg("--").arg(point);
    // The socket becomes its standard input: so no other child inherits it at any moment.
    command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(its));
    run(command)?;
    let session = receive(&ours).map_err(say)?.ok_or("it ended well and sent no descriptor")?;
    let flags = rustix::fs::fcntl_getfl(&session).map_err(say)?;
    rustix::fs::fcntl_setfl(&session, flags | OFlags::NONBLOCK).map_err(say)?;
    Ok(session)
}

/// Unmounts the mount at `point`.
///
/// # Errors
/// The message of the program.
pub(super) fn unmount(program: &Path, point: &Path, lazy: bool) -> std::result::Result<(), String> {
    let mut command = Command::new(program);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(point).stdin(Stdio::null());
    run(command)
}

/// Escapes a value of an option: a comma would end it, and a backslash would change the meaning of
/// the next byte.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,")
}

fn say(error: impl Into<io::Error>) -> String {
    error.into().to_string()
}

fn run(mut command: Command) -> std::result::Result<(), String> {
    // Its messages begin with the name that it was called by. This code reads them, so they must
    // not be translated.
    command.arg0(NAME).env("LC_ALL", "C").current_dir("/").stdout(Stdio::null()).stderr(Stdio::piped());
    sandbox::errand(move || run_here(command)).map_err(say)?
}

/// The part of [`run`] that control threads may not do.
fn run_here(mut command: Command) -> std::result::Result<(), String> {
    #[expect(clippy::disallowed_methods, reason = "the caller is an errand of the launcher")]
    let mut child = command.spawn().map_err(say)?;
    // Closes the parent's copy of the socket.
    drop(command);
    let status = end_of(&mut child, RUN_LIMIT).map_err(say)?;
    let status = status.ok_or_else(|| format!("nothing for {} s", RUN_LIMIT.as_secs()))?;
    if status.success() {
        return Ok(());
    }
    let said = said(&child);
    let said = said.trim().strip_prefix(NAME).map_or(said.trim(), |rest| rest.trim_start_matches([':', ' ']));
    Err(if said.is_empty() { status.to_string() } else { said.replace('\n', "; ") })
}

/// Waits for the end of a child. Returns none if it did not end within `limit`, and was killed.
fn end_of(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let ended = wait(child, limit)?;
    if ended.is_none() {
        child.kill()?;
        // Collects the zombie. With a limit: the child may be in a system call that no signal ends.
        wait(child, RUN_LIMIT)?;
    }
    Ok(ended)
}

/// Waits for the end of a child. Returns none if it does not end within `limit`.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let limit = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            None if Instant::now() <= limit => std::thread::sleep(Duration::from_millis(2)),
            ended => return Ok(ended),
        }
    }
}

/// Returns what the ended child wrote to its standard error. Reads once, since another process may
/// hold the pipe open.
fn said(child: &Child) -> String {
    let Some(pipe) = &child.stderr else { return String::new() };
    let mut buffer = [0; 2048];
    let ready = poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&Timespec::default()));
    let n = if ready == Ok(1) { rustix::io::read(pipe, &mut buffer).unwrap_or(0) } else { 0 };
    String::from_utf8_lossy(buffer.get(..n).unwrap_or_default()).into_owned()
}

fn receive(socket: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_counts_where_it_is_not_commented_out() {
        assert!(says_allow("# comment\nmount_max = 10\n user_allow_other # yes\n"));
        assert!(!says_allow("#user_allow_other\n"));
        assert!(!says_allow("user_allow_others\n"));
    }

    #[test]
    fn commas_and_backslashes_stay_in_the_value() {
        assert_eq!(escape("vshunt:a,b\\c"), "vshunt:a\\,b\\\\c");
    }

    #[test]
    fn one_that_hangs_is_killed_and_leaves_no_zombie() {
        let mut child = Command::new("/bin/sh").args(["-c", "exec sleep 1000"]).spawn().unwrap();
        assert_eq!(end_of(&mut child, Duration::ZERO).unwrap(), None);
        assert!(!Path::new(&format!("/proc/{}", child.id())).exists());
    }

    #[test]
    fn what_a_program_said_is_the_error() {
        let run_shell = |text: &str| {
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(text).stdin(Stdio::null());
            run(command)
        };
        assert_eq!(run_shell("true"), Ok(()));
        assert_eq!(run_shell("echo fusermount3: no >&2; exit 1"), Err("no".into()));
        assert_eq!(run_shell("exit 3"), Err("exit status: 3".into()));
    }
}
