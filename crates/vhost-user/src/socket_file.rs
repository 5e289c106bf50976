//! The file of a listening UNIX socket. It is never taken from a live process, and removed only by
//! its owner.
//!
//! Exports, the control socket and the metrics server call this, from any thread and without
//! holding locks: they may wait for the lock of the folder, and for the end of a killed process.
//!
//! What must never happen: waiting without a limit for the process that owns the socket.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::SocketAccess;

use super::accounts;

/// The mode of a socket until it has its owner and its group.
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Connections that may wait for accept.
const BACKLOG: i32 = 64;

/// How often, 10 ms apart, the lock of the folder is tried. Other programs may hold the lock for
/// other reasons.
const LOCK_TRIES: u32 = 50;

/// Whether a folder could not be locked in that time.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// How long a listener of a process that was killed may stay open.
const DYING_WAIT: Duration = Duration::from_millis(1000);

/// Words for messages: the name of a kind of socket, and remedies.
pub struct Words {
    /// For example `control socket`.
    pub what: &'static str,
    /// Subject of the message that the socket is in use.
    pub other: &'static str,
    /// The remedy if the socket is in use.
    pub if_in_use: &'static str,
    /// The remedy if the file is not a socket.
    pub if_no_socket: &'static str,
}

/// The file of a bound socket. Dropping it removes the file. It must be dropped before its
/// listener: as long as the listener is open, no other daemon takes the socket for a stale one, and
/// the inode number is not used again.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = |m: fs::Metadata| (m.dev(), m.ino()) == (self.device, self.inode);
        let remove = || {
            if fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
                let _ = fs::remove_file(&self.path);
            }
        };
        // A session thread may not remove files: its sandbox forbids it.
        let _ = sandbox::errand(remove);
    }
}

/// Listens at `path`. `access`: the owner, the group and the mode of the file; without a mode, the
/// umask decides. A stale socket is replaced.
///
/// Nobody can connect before `access` is in force: the file is private until then, and the socket
/// does not listen yet.
///
/// # Errors
/// Anything else is at `path`, there is no such user or group, or the socket cannot be made or
/// given to them.
pub fn bind(path: &Path, access: &SocketAccess, words: &Words) -> Result<(UnixListener, SocketFile)> {
    let wanted = Wanted::of(access).map_err(|e| e.context(format!("{} {}", words.what, path.display())))?;
    // Before the lock is taken: others do not wait for it that long.
    wait_for_end(path);
    let _lock = lock_directory(path);
    remove_stale(path, words)?;
    let cannot = |e: Errno| {
        let hint = match e {
            Errno::NOENT => " (does its folder exist?)",
            Errno::NAMETOOLONG => " (a socket's path has at most 107 bytes)",
            Errno::STALE => " (another file was put in its place)",
            Errno::MFILE => " (raise the limit of open files: ulimit -n, LimitNOFILE=)",
            _ => "",
        };
        Error::io(format!("cannot listen on {} {}{hint}", words.what, path.display()), e.into())
    };
    let address = SocketAddrUnix::new(path).map_err(cannot)?;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(cannot)?;
    if *access != SocketAccess::default() {
        // On Linux, the mode of an unbound socket becomes the mode of its file, less the umask.
        rustix::fs::fchmod(&fd, PRIVATE).map_err(cannot)?;
    }
    rustix::net::bind(&fd, &address).map_err(cannot)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let bound = rustix::fs::open(path, flags, Mode::empty()).map_err(cannot)?;
    let meta = rustix::fs::fstat(&bound).map_err(cannot)?;
    let file = SocketFile { path: path.to_owned(), device: meta.st_dev, inode: meta.st_ino };
    if *access != SocketAccess::default() {
        check_own(&meta).map_err(cannot)?;
        wanted.put(&bound, path, words)?;
    }
    rustix::net::listen(&fd, BACKLOG).map_err(cannot)?;
    Ok((UnixListener::from(fd), file))
}

/// Checks that the file at the path of a socket is the one that was made there: in a folder that
/// others may write, it can have been replaced by a link to another file.
fn check_own(meta: &Stat) -> std::result::Result<(), Errno> {
    let socket = FileType::from_raw_mode(meta.st_mode) == FileType::Socket;
    let own = meta.st_uid == rustix::process::geteuid().as_raw();
    if socket && own && meta.st_nlink == 1 { Ok(()) } else { Err(Errno::STALE) }
}

/// The owner, the group and the mode that a socket gets.
struct Wanted<'a> {
    access: &'a SocketAccess,
    owner: Option<Uid>,
    group: Option<Gid>,
}

impl<'a> Wanted<'a> {
    /// Finds the numbers of the user and the group.
    fn of(access: &'a SocketAccess) -> Result<Self> {
        Ok(Self {
            access,
            owner: access.owner.as_deref().map(accounts::user).transpose()?.map(Uid::from_raw),
            group: access.group.as_deref().map(accounts::group).transpose()?.map(Gid::from_raw),
        })
    }

    /// Changes the file that `bound` refers to. The mode is last: before, the file is private.
    fn put(&self, bound: &OwnedFd, path: &Path, words: &Words) -> Result<()> {
        let what = format!("{} {}", words.what, path.display());
        if self.owner.is_some() || self.group.is_some() {
            rustix::fs::chownat(bound, c"", self.owner, self.group, AtFlags::EMPTY_PATH)
                .map_err(|e| self.not_given(&what, e))?;
        }
        let Some(mode) = self.access.mode() else {
            return Ok(());
        };
        // A descriptor that is open with O_PATH can be changed only by this name.
        let name = format!("/proc/self/fd/{}", bound.as_raw_fd());
        rustix::fs::chmod(name, Mode::from_bits_truncate(mode.bits()))
            .map_err(|e| Error::io(format!("cannot give {what} the mode {mode}"), e.into()))
    }

    /// Returns the error that the owner or the group cannot be changed.
    fn not_given(&self, what: &str, e: Errno) -> Error {
        let (to, remedy) = match (&self.access.owner, &self.access.group) {
            (Some(owner), _) => (
                format!("user {owner}"),
                "only root may: start the daemon as root, or leave out the owner and give a group of the \
                 daemon's user"
                    .to_owned(),
            ),
            (None, group) => {
                let group = group.as_deref().unwrap_or_default();
                let remedy = format!(
                    "start the daemon as root, or make its user a member: usermod -aG {group} USER, and log in again"
                );
                (format!("group {group}"), remedy)
            }
        };
        let remedy = if e == Errno::PERM { format!(" ({remedy})") } else { String::new() };
        Error::io(format!("cannot give {what} to {to}{remedy}"), e.into())
    }
}

/// Locks the folder, so that two daemons that find the same stale socket do not replace it at the
/// same time. None if the folder cannot be read or locked: then there is a short race, in which one
/// of the two may replace the socket of the other.
fn lock_directory(path: &Path) -> Option<OwnedFd> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags, Mode::empty()).ok()?;
    // Any user who may read the folder can keep it locked. That costs one wait, and not one for
    // each of many sockets.
    let tries = if GIVEN_UP.load(Relaxed) { 1 } else { LOCK_TRIES };
    for _ in 0..tries {
        if rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Some(directory);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    if !GIVEN_UP.swap(true, Relaxed) {
        tracing::warn!(
            "another process keeps the folder {} locked (flock), so sockets are made there without its lock: two daemons that \
             start at the same time with the same path could both listen; keep sockets in a folder that only their user may read",
            parent.display()
        );
    }
    None
}

fn remove_stale(path: &Path, words: &Words) -> Result<()> {
    let (what, shown) = (words.what, path.display());
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(format!("cannot look at {what} {shown}"), e)),
        Ok(m) if !m.file_type().is_socket() => {
            return Err(Error::exists(format!("{shown} is there and is no socket; {}", words.if_no_socket)));
        }
        Ok(_) => {}
    }
    match is_live(path) {
        Ok(true) => Err(Error::busy(format!("{} on {shown}; {}", words.other, words.if_in_use))),
        Ok(false) => {
            fs::remove_file(path).map_err(|e| Error::io(format!("cannot remove the stale {what} {shown}"), e))
        }
        Err(e) => Err(Error::io(format!("cannot tell whether {what} {shown} is in use"), e.into())),
    }
}

/// Connects to the socket at `path`, without waiting.
fn connect(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Waits, for [`DYING_WAIT`] at most, until the listener at `path` closes the connection.
///
/// A killed process may have its listener open for a moment, and so may a child that it has forked
/// just before. When the listener is closed, a connection to it hangs up.
fn wait_for_end(path: &Path) {
    let Ok(fd) = connect(path) else { return };
    let limit = Timespec::try_from(DYING_WAIT).expect("a second fits");
    // A greeting of the other end does not count.
    let _ = poll(&mut [PollFd::new(&fd, PollFlags::RDHUP)], Some(&limit));
}

/// Returns whether a process listens at `path`. Does not wait: a listener whose backlog is full is
/// live.
fn is_live(path: &Path) -> rustix::io::Result<bool> {
    match connect(path) {
        Ok(_) | Err(Errno::AGAIN | Errno::INPROGRESS) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use vshunt_types::error::Kind;

    use super::*;

    /// The umask decides.
    const OPEN: SocketAccess = SocketAccess { owner: None, group: None, mode: None };

    const WORDS: Words = Words {
        what: "socket",
        other: "another listens",
        if_in_use: "go away",
        if_no_socket: "look elsewhere",
    };

    #[test]
    fn a_live_one_is_kept_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let live = UnixListener::bind(&path).unwrap();
        let e = bind(&path, &OPEN, &WORDS).unwrap_err();
        assert_eq!(
            (e.kind(), e.to_string()),
            (Kind::Busy, format!("another listens on {}; go away", path.display()))
        );
        drop(live);
        bind(&path, &OPEN, &WORDS).unwrap();
    }

    #[test]
    fn a_folder_that_another_keeps_locked_holds_nobody_long() {
        let dir = tempfile::tempdir().unwrap();
        let held = fs::File::open(dir.path()).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
        let sockets: Vec<_> =
            (0..200).map(|n| bind(&dir.path().join(n.to_string()), &OPEN, &WORDS).unwrap()).collect();
        assert!(GIVEN_UP.load(Relaxed) && sockets.len() == 200);
    }

    #[test]
    fn one_with_a_full_backlog_is_live_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (listener, _file) = bind(&path, &OPEN, &WORDS).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        for _ in 0..4 {
            assert_eq!(bind(&path, &OPEN, &WORDS).unwrap_err().kind(), Kind::Busy);
        }
    }

    #[test]
    fn one_whose_process_is_ending_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        // A copy of the listener, as a child of a killed process has it for a moment.
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(listener);
        });
        bind(&path, &OPEN, &WORDS).unwrap();
        ending.join().unwrap();
    }

    #[test]
    fn one_that_closes_connections_and_listens_is_live() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let closes = std::thread::spawn(move || {
            drop(listener.accept().unwrap());
            listener
        });
        assert_eq!(bind(&path, &OPEN, &WORDS).unwrap_err().kind(), Kind::Busy);
        drop(closes.join().unwrap());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path, &OPEN, &WORDS).unwrap_err().kind(), Kind::Exists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_file_that_another_put_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_listener, ours) = bind(&path, &OPEN, &WORDS).unwrap();
        fs::remove_file(&path).unwrap();
        let (_others, theirs) = bind(&path, &OPEN, &WORDS).unwrap();
        drop(ours);
        assert!(path.exists());
        drop(theirs);
        assert!(!path.exists());
    }

    #[test]
    fn what_cannot_be_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        let said = |path: &Path| bind(path, &OPEN, &WORDS).unwrap_err().to_string();
        assert!(said(&dir.path().join("no/s")).contains("does its folder exist?"));
        assert!(said(&dir.path().join("x".repeat(120))).contains("at most 107 bytes"));
    }

    fn access(owner: Option<&str>, group: Option<&str>, mode: Option<&str>) -> SocketAccess {
        let text = |text: &str| text.to_owned();
        SocketAccess {
            owner: owner.map(text),
            group: group.map(text),
            mode: mode.map(|mode| mode.parse().unwrap()),
        }
    }

    /// The owner, the group and the permissions of a file.
    fn of(path: &Path) -> (u32, u32, u32) {
        let meta = fs::symlink_metadata(path).unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o7777)
    }

    #[test]
    fn it_has_the_owner_the_group_and_the_mode_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let own = gid.to_string();
        let cases = [
            (access(None, None, Some("0600")), (uid, gid, 0o600)),
            (access(None, None, Some("0666")), (uid, gid, 0o666)),
            (access(None, Some(&own), None), (uid, gid, 0o660)),
            (access(None, Some(&own), Some("0600")), (uid, gid, 0o600)),
        ];
        for (access, want) in cases {
            let (_listener, file) = bind(&path, &access, &WORDS).unwrap();
            assert_eq!(of(&path), want, "{access:?}");
            drop(file);
        }
        if uid != 0 {
            return;
        }
        let given = access(Some("65534"), Some("1234"), Some("0660"));
        // Also if it replaces a socket of a daemon that has died.
        drop(UnixListener::bind(&path).unwrap());
        let (_listener, _file) = bind(&path, &given, &WORDS).unwrap();
        assert_eq!(of(&path), (65534, 1234, 0o660));
    }

    #[test]
    fn a_group_never_connects_before_the_file_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let own = rustix::process::getegid().as_raw();
        // Only root can choose another group.
        let group = if rustix::process::geteuid().is_root() { 1234 } else { own };
        let wanted = access(None, Some(&group.to_string()), None);
        let done = std::sync::atomic::AtomicBool::new(false);
        let watch = || {
            let mut seen = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let Ok(meta) = fs::symlink_metadata(&path) else { continue };
                seen += 1;
                let mode = meta.mode() & 0o777;
                assert!(
                    mode & !0o600 == 0 || (meta.gid(), mode) == (group, 0o660),
                    "{} {mode:o}",
                    meta.gid()
                );
            }
            seen
        };
        let seen = std::thread::scope(|scope| {
            let watcher = scope.spawn(watch);
            for _ in 0..300 {
                bind(&path, &wanted, &WORDS).unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            watcher.join().unwrap()
        });
        assert!(seen > 0);
    }

    #[test]
    fn users_and_groups_that_are_none_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // A stale socket stays if there is an error.
        drop(UnixListener::bind(&path).unwrap());
        for (access, want) in [
            (access(Some("nonesuch"), None, None), "there is no user nonesuch in /etc/passwd"),
            (access(None, Some("nonesuch"), None), "there is no group nonesuch in /etc/group"),
        ] {
            let e = bind(&path, &access, &WORDS).unwrap_err().to_string();
            assert!(e.starts_with(&format!("socket {}: ", path.display())) && e.contains(want), "{e}");
            assert!(path.exists());
        }
    }

    #[test]
    fn what_the_system_refuses_has_a_remedy() {
        let path = Path::new("/run/s");
        let said = |access: &SocketAccess| {
            Wanted::of(access)
                .unwrap()
                .not_given(&format!("socket {}", path.display()), Errno::PERM)
                .to_string()
        };
        let owner = said(&access(Some("65534"), None, None));
        assert!(owner.contains("cannot give socket /run/s to user 65534 (only root may: start"), "{owner}");
        let group = said(&access(None, Some("1234"), None));
        assert!(
            group.contains("to group 1234 (start the daemon as root, or make its user a member"),
            "{group}"
        );
        assert!(group.contains("usermod -aG 1234 USER"), "{group}");
    }

    #[test]
    fn a_file_that_replaced_the_socket_is_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let stat = || rustix::fs::lstat(&path).unwrap();
        check_own(&stat()).unwrap();
        fs::hard_link(&path, dir.path().join("link")).unwrap();
        assert_eq!(check_own(&stat()), Err(Errno::STALE));
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(check_own(&stat()), Err(Errno::STALE));
    }
}
