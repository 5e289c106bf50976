//! The file of a listening UNIX socket. It is never taken from a live process, and removed only by
//! its owner.
//!
//! Exports, the control socket and the metrics server call this, from any thread and without
//! holding locks: they may wait for the lock of the folder, and for the end of a killed process.
//!
//! What must never happen: waiting without a limit for the process that owns the socket.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

/// Connections that may wait for accept.
const BACKLOG: i32 = 64;

/// How often, 10 ms apart, the lock of the folder is tried. Other programs may hold the lock for
/// other reasons.
const LOCK_TRIES: u32 = 50;

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

/// Listens at `path`. `mode`: the permissions of the file; without, the umask decides. A stale
/// socket is replaced.
///
/// # Errors
/// Anything else is at `path`, or the socket cannot be made.
pub fn bind(path: &Path, mode: Option<Mode>, words: &Words) -> Result<(UnixListener, SocketFile)> {
    // Before the lock is taken: others do not wait for it that long.
    wait_for_end(path);
    let _lock = lock_directory(path);
    remove_stale(path, words)?;
    let cannot = |e: Errno| {
        let hint = match e {
            Errno::NOENT => " (does its folder exist?)",
            Errno::NAMETOOLONG => " (a socket's path has at most 107 bytes)",
            Errno::MFILE => " (raise the limit of open files: ulimit -n, LimitNOFILE=)",
            _ => "",
        };
        Error::io(format!("cannot listen on {} {}{hint}", words.what, path.display()), e.into())
    };
    let address = SocketAddrUnix::new(path).map_err(cannot)?;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(cannot)?;
    if let Some(mode) = mode {
        // On Linux, the mode of an unbound socket becomes the mode of its file. So the file never
        // has other permissions.
        rustix::fs::fchmod(&fd, mode).map_err(cannot)?;
    }
    rustix::net::bind(&fd, &address).map_err(cannot)?;
    let meta = rustix::fs::lstat(path).map_err(cannot)?;
    let file = SocketFile { path: path.to_owned(), device: meta.st_dev, inode: meta.st_ino };
    rustix::net::listen(&fd, BACKLOG).map_err(cannot)?;
    Ok((UnixListener::from(fd), file))
}

/// Locks the folder, so that two daemons that find the same stale socket do not replace it at the
/// same time. None if the folder cannot be read or locked: then there is a short race, in which one
/// of the two may replace the socket of the other.
fn lock_directory(path: &Path) -> Option<OwnedFd> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags, Mode::empty()).ok()?;
    for _ in 0..LOCK_TRIES {
        if rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Some(directory);
        }
        std::thread::sleep(Duration::from_millis(10));
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
        let e = bind(&path, None, &WORDS).unwrap_err();
        assert_eq!(
            (e.kind(), e.to_string()),
            (Kind::Busy, format!("another listens on {}; go away", path.display()))
        );
        drop(live);
        bind(&path, None, &WORDS).unwrap();
    }

    #[test]
    fn one_with_a_full_backlog_is_live_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (listener, _file) = bind(&path, None, &WORDS).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        for _ in 0..4 {
            assert_eq!(bind(&path, None, &WORDS).unwrap_err().kind(), Kind::Busy);
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
        bind(&path, None, &WORDS).unwrap();
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
        assert_eq!(bind(&path, None, &WORDS).unwrap_err().kind(), Kind::Busy);
        drop(closes.join().unwrap());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path, None, &WORDS).unwrap_err().kind(), Kind::Exists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_file_that_another_put_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_listener, ours) = bind(&path, None, &WORDS).unwrap();
        fs::remove_file(&path).unwrap();
        let (_others, theirs) = bind(&path, None, &WORDS).unwrap();
        drop(ours);
        assert!(path.exists());
        drop(theirs);
        assert!(!path.exists());
    }

    #[test]
    fn what_cannot_be_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        let said = |path: &Path| bind(path, None, &WORDS).unwrap_err().to_string();
        assert!(said(&dir.path().join("no/s")).contains("does its folder exist?"));
        assert!(said(&dir.path().join("x".repeat(120))).contains("at most 107 bytes"));
    }
}
