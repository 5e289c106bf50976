//! The control socket's file: made with mode 0600, never taken from a live daemon, removed only
//! while it is ours.
//!
//! Called on the main thread, at the start and at the end.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::Mode;
use vshunt_types::error::Result;
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
    /// The file that we made; none for an inherited socket. Goes before the listener.
    file: Option<SocketFile>,
    listener: UnixListener,
}

impl ControlSocket {
    /// Listens at `path`. A socket file whose daemon is gone is replaced; anything else there is an
    /// error.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let (listener, file) = socket_file::bind(path, Some(Mode::RUSR | Mode::WUSR), &WORDS)?;
        Ok(Self { file: Some(file), listener })
    }

    /// A listening socket that the service manager made and keeps.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Self { file: None, listener: UnixListener::from(fd) }
    }

    /// The listener, for the server.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// What to call it in a message.
    pub(crate) fn shown(&self) -> String {
        match &self.file {
            Some(file) => file.path().display().to_string(),
            None => "the inherited socket".to_owned(),
        }
    }

    /// Removes the file, if it is still the one that we made.
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
        let mut socket = ControlSocket::bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let e = ControlSocket::bind(&path).unwrap_err();
        assert_eq!(e.kind(), Kind::Busy);
        assert!(e.to_string().starts_with("another vshunt answers on"), "{e}");
        socket.remove();
        assert!(!path.exists());
    }
}
