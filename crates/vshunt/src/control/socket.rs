//! The control socket's file: made with mode 0600, never taken from a live daemon, removed only while it is ours.
//!
//! Called on the main thread, at the start and at the end.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Error, Result};

/// Connections that may wait for accept.
const BACKLOG: i32 = 64;

/// How often, 10 ms apart, the lock of the directory is tried. Others may hold it for reasons of theirs.
const LOCK_TRIES: u32 = 50;

/// A listening control socket.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    /// The file that we made, with its device and inode; none for an inherited socket.
    file: Option<(PathBuf, (u64, u64))>,
}

impl ControlSocket {
    /// Listens at `path`. A socket file whose daemon is gone is replaced; anything else there is an error.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let shown = path.display();
        let cannot = |e: io::Error| Error::io(format!("cannot listen on control socket {shown}"), e);
        let _turn = lock_directory(path);
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|e| cannot(e.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|e| cannot(e.into()))?;
        // On Linux the mode of an unbound socket becomes that of its file: no moment at which others could connect.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(|e| cannot(e.into()))?;
        rustix::net::bind(&fd, &address).map_err(|e| cannot(e.into()))?;
        let identity = fs::symlink_metadata(path).map(|m| (m.dev(), m.ino())).map_err(cannot)?;
        rustix::net::listen(&fd, BACKLOG).map_err(|e| cannot(e.into()))?;
        Ok(Self { listener: UnixListener::from(fd), file: Some((path.to_owned(), identity)) })
    }

    /// A listening socket that the service manager made and keeps.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Self { listener: UnixListener::from(fd), file: None }
    }

    /// The listener, for the server.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// What to call it in a message.
    pub(crate) fn shown(&self) -> String {
        match &self.file {
            Some((path, _)) => path.display().to_string(),
            None => "the inherited socket".to_owned(),
        }
    }

    /// Removes the file, if it is still the one that we made.
    pub(crate) fn remove(&mut self) {
        let Some((path, identity)) = self.file.take() else { return };
        if fs::symlink_metadata(&path).is_ok_and(|m| (m.dev(), m.ino()) == identity) {
            let _ = fs::remove_file(&path);
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Two daemons that find the same stale socket take turns. Without the lock (no right to read the directory) there
/// is a short race between them and nothing worse.
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

fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(format!("cannot look at control socket {shown}"), e)),
        Ok(m) if !m.file_type().is_socket() => {
            return Err(Error::exists(format!(
                "{shown} is there and is no socket; choose another path for --control"
            )));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .map_err(|e| Error::io(format!("cannot remove the stale control socket {shown}"), e)),
        Err(e) if e.kind() != io::ErrorKind::WouldBlock => {
            Err(Error::io(format!("cannot tell whether control socket {shown} is in use"), e))
        }
        _ => Err(Error::busy(format!(
            "another vshunt answers on {shown}; give this one its own --control SOCKET, or --no-control"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn its_file_is_private_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let socket = ControlSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_one_is_kept_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let live = UnixListener::bind(&path).unwrap();
        let e = ControlSocket::bind(&path).unwrap_err();
        assert_eq!(e.kind(), Kind::Busy);
        assert!(e.to_string().starts_with("another vshunt answers on"), "{e}");
        drop(live);
        ControlSocket::bind(&path).unwrap();
    }

    #[test]
    fn what_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        fs::write(&path, "precious").unwrap();
        assert_eq!(ControlSocket::bind(&path).unwrap_err().kind(), Kind::Exists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_file_that_another_put_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let mut ours = ControlSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _theirs = UnixListener::bind(&path).unwrap();
        ours.remove();
        assert!(path.exists());
    }
}
