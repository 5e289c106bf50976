//! The file of the control socket. Its mode is 0600 unless
//! another one or a group is asked for. It is not taken from a live daemon, and
//! is removed only if it is still the same file.
//!
//! Called on the main thread, at the start and at the end of the daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use vshunt_types::error::Result;
use vshunt_types::spec::{SocketAccess, SocketMode};
use vshunt_vhost_user::socket_file::{self, SocketFile, Words};

const WORDS: Words = Words {
    what: "control socket",
    other: "another vshunt answers",
    if_in_use: "give this one its own --control SOCKET, or --no-control",
    if_no_socket: "choose another path for --control",
};

/// A listening control socket.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    /// The file that this process made. None for an inherited socket. It is dropped before the
    /// listener.
    file: Option<SocketFile>,
    listener: UnixListener,
}

impl ControlSocket {
    /// Listens on `path`. A socket file of a daemon that has ended is replaced. Any other file
    /// there is an error. Without a mode or a group in `access`, only the owner may connect.
    pub(crate) fn bind(path: &Path, access: &SocketAccess) -> Result<Self> {
        let mode = access.mode().unwrap_or(SocketMode::OWNER);
        if mode.is_for_all() {
            tracing::warn!(
                "the mode {mode} of the control socket lets all users of this machine control the daemon"
            );
        }
        let access = SocketAccess { mode: Some(mode), ..access.clone() };
        let (listener, file) = socket_file::bind(path, &access, &WORDS)?;
        Ok(Self { file: Some(file), listener })
    }

    /// Takes a listening socket that the service manager made. Its file is not removed.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Self { file: None, listener: UnixListener::from(fd) }
    }

    /// Returns whether the service manager made it.
    pub(crate) fn is_inherited(&self) -> bool {
        self.file.is_none()
    }

    /// Returns the listener for the server.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// Returns its name for messages.
    pub(crate) fn shown(&self) -> String {
        match &self.file {
            Some(file) => file.path().display().to_string(),
            None => "the inherited socket".to_owned(),
        }
    }

    /// Removes the file if it is still the one that this process made.
    pub(crate) fn remove(&mut self) {
        self.file = None;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use vshunt_types::error::Kind;

    use super::*;

    #[test]
    fn its_file_is_private_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let mut socket = ControlSocket::bind(&path, &SocketAccess::default()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let e = ControlSocket::bind(&path, &SocketAccess::default()).unwrap_err();
        assert_eq!(e.kind(), Kind::Busy);
        assert!(e.to_string().starts_with("another vshunt answers on"), "{e}");
        socket.remove();
        assert!(!path.exists());
    }
}
