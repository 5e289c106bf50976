//! Which mounts exist and where, without a request to a FUSE server, which may never answer.
//!
//! The rest of [`mount`](super) calls it, from any thread. What must never happen: this process
//! sends a request to a FUSE server. A task that waits for a server that does not answer cannot be
//! killed.
//!
//! | call | sends a request |
//! | --- | --- |
//! | open with O_PATH | no: the root of a mount is not looked up again |
//! | statx with AT_STATX_DONT_SYNC | no: the kernel returns cached attributes, and knows device and mount |
//! | reading mountinfo, umount2 | no |
//! | stat, fstat, other statx | yes: GETATTR, when the cached attributes are too old |
//! | statfs, access, open without O_PATH, operations on a file opened so | yes |

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags, openat, statx};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

/// A thread may have a mount namespace of its own. This file describes the one where mount(2) of
/// the calling thread acts.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";

/// How long a server may take to answer the probe.
const PROBE_WAIT: Duration = Duration::from_secs(1);
/// Exit statuses of the probe: the connection has no server; the request failed otherwise.
const PROBE_SAYS_DEAD: i32 = 42;
const PROBE_SAYS_FAILED: i32 = 43;

/// State of the server of a FUSE mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    /// It answered.
    Alive,
    /// There is no server.
    Dead,
    /// It did not answer in time, or the request failed. A server that was just killed is in this
    /// state until the kernel has ended its io_uring, which happens after the process is gone.
    Unclear,
}

/// STATX_MNT_ID_UNIQUE (Linux 6.8), which rustix does not name.
const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Identity of a mount, different from that of other mounts that were or will be at the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MountId {
    /// The number in mountinfo. The kernel uses it again once the mount is gone.
    pub(super) id: u64,
    /// A number that is never used again. None before Linux 6.8: there another mount with the same
    /// two other numbers cannot be told apart.
    unique: Option<u64>,
    /// The device number, major and minor. For FUSE it is also the number of the connection. It is
    /// used again, too.
    pub(super) device: (u32, u32),
}

/// The attributes of the file that an O_PATH descriptor refers to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) mount: MountId,
    /// The file is the root of its mount.
    pub(super) is_mount_root: bool,
    /// Unknown for a mount that this process may not examine.
    pub(super) kind: FileType,
    pub(super) inode: u64,
    pub(super) size_bytes: u64,
}

/// Opens the file at `path`, of any type, with O_PATH. Follows a symbolic link if `follow`.
pub(super) fn open_path(path: &Path, follow: bool) -> rustix::io::Result<OwnedFd> {
    let nofollow = if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
    openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC | nofollow, Mode::empty())
}

/// Returns the attributes of an open file, without a request to a FUSE server.
pub(super) fn look(fd: impl AsFd) -> rustix::io::Result<Seen> {
    let ask = |mask| statx(&fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, mask);
    // With an empty mask FUSE tells the device even to a user without any permission. The mount's
    // id is always there.
    let s: Statx = ask(StatxFlags::empty())?;
    let unique = ask(UNIQUE).ok().filter(|s| s.stx_mask & UNIQUE.bits() != 0).map(|s| s.stx_mnt_id);
    let is_mount_root = s.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    // The attributes of a file below a root may need a request. No mount of this program has such
    // files.
    let file = if is_mount_root { s } else { ask(StatxFlags::BASIC_STATS)? };
    Ok(Seen {
        mount: MountId { id: s.stx_mnt_id, unique, device: (s.stx_dev_major, s.stx_dev_minor) },
        is_mount_root,
        kind: FileType::from_raw_mode(file.stx_mode.into()),
        inode: file.stx_ino,
        size_bytes: file.stx_size,
    })
}

/// The path that `fd` was opened by, absolute and without symbolic links.
pub(super) fn path_of(fd: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let path = rustix::fs::readlinkat(CWD, proc_path(fd), Vec::new())?;
    Ok(OsString::from_vec(path.into_bytes()).into())
}

/// A path that leads to the open file, even if another file has its name by now.
pub(super) fn proc_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// A line of mountinfo.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) device: (u32, u32),
    /// Where it is mounted, relative to the root folder of this process.
    pub(super) point: PathBuf,
    pub(super) fs_type: OsString,
    pub(super) source: OsString,
}

/// Returns the mount with that number in mountinfo.
///
/// # Errors
/// The system's: /proc is not mounted.
pub(super) fn entry(id: u64) -> Result<Option<Entry>> {
    let text = fs::read(MOUNTINFO)
        .map_err(|e| Error::io(format!("cannot read {MOUNTINFO} (is /proc mounted?)"), e))?;
    Ok(text.split(|&b| b == b'\n').filter_map(parse).find(|e| e.id == id))
}

/// See proc_pid_mountinfo(5): `id parent major:minor root point options [optional]... - type source
/// options`.
fn parse(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|&b| b == b' ');
    let number = |f: &[u8]| std::str::from_utf8(f).ok()?.parse::<u64>().ok();
    let id = number(fields.next()?)?;
    let device = std::str::from_utf8(fields.nth(1)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let point = unescape(fields.nth(1)?);
    let mut fields = fields.skip_while(|f| *f != b"-");
    Some(Entry {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        point: point.into(),
        fs_type: unescape(fields.nth(1)?),
        source: unescape(fields.next()?),
    })
}

/// Undoes the kernel's escapes: it writes blanks, line ends, backslashes and number signs as a
/// backslash and three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let is_octal = |digits: &[u8]| digits.iter().all(|b| (b'0'..=b'7').contains(b));
        match after.split_at_checked(3).filter(|(digits, _)| first == b'\\' && is_octal(digits)) {
            Some((digits, after)) => {
                out.push(digits.iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
                rest = after;
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    OsStr::from_bytes(&out).to_owned()
}

/// Whether the FUSE mount that `root` refers to has a server.
///
/// Only a request can tell. A connection without a server refuses it at once. A server that does
/// not answer holds the task that asks, and SIGKILL does not end that task. So a child process
/// asks. A child that is held costs a process, and a copy of the memory that this process changes
/// meanwhile, until that server continues or ends.
///
/// The launcher does it: control threads may neither make processes nor signal them.
pub(super) fn ask_server(root: &OwnedFd) -> Server {
    sandbox::errand(|| ask_here(root)).unwrap_or(Server::Unclear)
}

/// The part of [`ask_server`] that control threads may not do themselves.
fn ask_here(root: &OwnedFd) -> Server {
    let fd = root.as_raw_fd();
    // SAFETY: the child only makes system calls (see `probe`) and ends. So it takes no lock of user
    // space, which another thread may have held at the time of the fork.
    let child = match unsafe { libc::fork() } {
        0 => probe(fd),
        pid => match Pid::from_raw(pid) {
            Some(pid) if pid.as_raw_nonzero().get() > 0 => pid,
            _ => return Server::Unclear,
        },
    };
    if let Ok(pidfd) = pidfd_open(child, PidfdFlags::empty()) {
        let timeout = Timespec::try_from(PROBE_WAIT).expect("a second fits");
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
    }
    if let Ok(Some((_, status))) = waitpid(Some(child), WaitOptions::NOHANG) {
        return match status.exit_status() {
            Some(0) => Server::Alive,
            Some(PROBE_SAYS_DEAD) => Server::Dead,
            _ => Server::Unclear,
        };
    }
    let _ = kill_process(child, Signal::KILL);
    // A thread that waits for a child can be killed, unlike that child. So this thread does not
    // keep the process from ending.
    let reaper = std::thread::Builder::new().name("fuse-probe".into());
    #[expect(clippy::disallowed_methods, reason = "an errand of the launcher makes it")]
    let _ = reaper.spawn(move || waitpid(Some(child), WaitOptions::empty()));
    Server::Unclear
}

/// The code of the child process of [`ask_server`].
fn probe(fd: RawFd) -> ! {
    const NOT_CONNECTED: [i32; 2] = [libc::ENOTCONN, libc::ECONNABORTED];
    // SAFETY: dup2 takes no memory.
    unsafe { libc::dup2(fd, 0) };
    // All descriptors except the one in question are closed: a child that is held must not hold
    // locks of disks or mounts.
    // SAFETY: the call takes no memory, and this process uses none of the descriptors any more.
    unsafe { libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0) };
    let mut buffer = std::mem::MaybeUninit::<libc::statx>::uninit();
    let (flags, out) = (libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC, buffer.as_mut_ptr());
    // SAFETY: the call reads an empty C string, and writes at most one statx to `buffer`.
    let rc = unsafe { libc::statx(0, c"".as_ptr(), flags, libc::STATX_BASIC_STATS, out) };
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    let status = match rc {
        0 => 0,
        // The mount of another user: the kernel refuses the request whether or not there is a
        // server.
        _ if errno == libc::EACCES => 0,
        _ if NOT_CONNECTED.contains(&errno) => PROBE_SAYS_DEAD,
        _ => PROBE_SAYS_FAILED,
    };
    // SAFETY: _exit takes no memory, and runs no code of this process.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_read_with_its_escapes() {
        let line = b"99 27 0:45 / /a\\040b\\134c,d\\011\xff rw,nosuid shared:3 master:1 - fuse.vshunt vshunt:d\\0430 rw,fd=7";
        let entry = parse(line).unwrap();
        assert_eq!(
            entry,
            Entry {
                id: 99,
                device: (0, 45),
                point: OsStr::from_bytes(b"/a b\\c,d\t\xff").into(),
                fs_type: "fuse.vshunt".into(),
                source: "vshunt:d#0".into(),
            }
        );
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"1 2 3"), None);
        assert_eq!(unescape(b"\\"), "\\");
        assert_eq!(unescape(b"\\09x"), "\\09x");
    }

    #[test]
    fn what_is_seen_agrees_with_mountinfo() {
        let seen = look(open_path(Path::new("/proc"), true).unwrap()).unwrap();
        assert!(seen.is_mount_root);
        let entry = entry(seen.mount.id).unwrap().unwrap();
        assert_eq!((entry.point.as_path(), entry.device), (Path::new("/proc"), seen.mount.device));
        assert_eq!(entry.fs_type, "proc");
        let below = look(open_path(Path::new("/proc/self"), true).unwrap()).unwrap();
        assert_eq!((below.mount, below.is_mount_root), (seen.mount, false));
    }
}
