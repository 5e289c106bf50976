//! Sockets that systemd passes (LISTEN_FDS): the control socket, the socket for metrics, and those
//! of exports.
//!
//! | socket | name of the descriptor (`FileDescriptorName=`) | or bound to |
//! | --- | --- | --- |
//! | export | the name of the export, or `socket` | the `socket` of the export |
//! | control | `control` | the path of the control socket |
//! | metrics | `metrics` | |
//!
//! Called once, on the main thread, before other threads exist.

use std::ffi::OsStr;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::net::{SocketAddrUnix, getsockname};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::ExportSpec;

/// A descriptor that the service manager passed.
#[derive(Debug)]
pub(crate) struct Inherited {
    fd: OwnedFd,
    name: String,
    path: Option<PathBuf>,
}

/// Takes the descriptors that the service manager passed. Empty if it passed none.
pub(crate) fn take() -> Result<Vec<Inherited>> {
    let fds = sd_notify::listen_fds_with_names()
        .map_err(|e| Error::io("cannot take the sockets named by LISTEN_FDS", e))?;
    Ok(fds.map(|(fd, name)| inherit(fd, name)).collect())
}

fn inherit(fd: RawFd, name: String) -> Inherited {
    // SAFETY: the descriptors from 3 on belong to this process if LISTEN_PID names it
    // (sd_listen_fds(3)). This runs once, before other code could have taken ownership of them.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = bound_path(&fd);
    Inherited { fd, name, path }
}

fn bound_path(fd: &OwnedFd) -> Option<PathBuf> {
    let address = SocketAddrUnix::try_from(getsockname(fd).ok()?).ok()?;
    address.path().map(|p| PathBuf::from(OsStr::from_bytes(p.to_bytes())))
}

impl Inherited {
    fn is(&self, name: &str, path: Option<&Path>) -> bool {
        let is_path = |p: &Path| Path::new(&self.name) == p || self.path.as_deref() == Some(p);
        self.name == name || path.is_some_and(is_path)
    }
}

/// Removes the control socket from `fds` and returns it, if it is there.
pub(crate) fn take_control(fds: &mut Vec<Inherited>, path: Option<&Path>) -> Option<OwnedFd> {
    let at = fds.iter().position(|i| i.is("control", path))?;
    Some(fds.swap_remove(at).fd)
}

/// Removes the socket for metrics from `fds` and returns it, if it is there.
pub(crate) fn take_metrics(fds: &mut Vec<Inherited>) -> Option<OwnedFd> {
    let at = fds.iter().position(|i| i.is("metrics", None))?;
    Some(fds.swap_remove(at).fd)
}

/// Assigns descriptors to their exports. The daemon owns them from then on.
pub(crate) fn give_to_exports(fds: &mut Vec<Inherited>, exports: &mut [ExportSpec]) {
    for export in exports.iter_mut().filter(|e| e.fd.is_none()) {
        if let Some(at) = fds.iter().position(|i| i.is(&export.name, export.socket.as_deref())) {
            export.fd = Some(fds.swap_remove(at).fd.into_raw_fd());
            export.socket = None;
        }
    }
    for left in fds.drain(..) {
        tracing::warn!(name = left.name, "an inherited socket belongs to no export; it is closed");
    }
}

/// Checks that a descriptor of a flag is an open socket, while the message can still name the flag.
pub(crate) fn check_fd(fd: RawFd) -> Result<()> {
    let bad = |why: &str| Error::invalid(format!("fd {fd} {why}; pass an open UNIX socket"));
    if fd < 0 {
        return Err(bad("is no file descriptor"));
    }
    check_open(fd).map_err(|_| bad("is not open"))?;
    // SAFETY: the number is borrowed during this call only, and getsockname of a number that is not
    // open fails with EBADF.
    let address = getsockname(unsafe { BorrowedFd::borrow_raw(fd) }).map_err(|_| bad("is no socket"))?;
    SocketAddrUnix::try_from(address).map(drop).map_err(|_| bad("is no UNIX socket"))
}

/// Checks that a descriptor of a network, 0 or more, is open.
pub(crate) fn check_open(fd: RawFd) -> Result<()> {
    // SAFETY: the number is borrowed during this call only, and fcntl of a number that is not open
    // fails with EBADF.
    let open = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    let why = "is not open; pass one of a tap, by the program that starts this one";
    open.map(drop).map_err(|_| Error::invalid(format!("fd {fd} {why}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn inherited(dir: &Path, file: &str, name: &str) -> Inherited {
        let fd = OwnedFd::from(UnixListener::bind(dir.join(file)).unwrap());
        let path = bound_path(&fd);
        Inherited { fd, name: name.into(), path }
    }

    fn export(name: &str, socket: &Path) -> ExportSpec {
        ExportSpec { name: name.into(), socket: Some(socket.into()), ..Default::default() }
    }

    #[test]
    fn by_name_by_path_and_control() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut fds = vec![
            inherited(dir, "a", "vm0"),
            inherited(dir, "b", "vshunt.socket"),
            inherited(dir, "c", "control"),
            inherited(dir, "d", "other"),
        ];
        assert!(take_control(&mut fds, None).is_some());
        let mut exports =
            [export("vm0", Path::new("/x")), export("vm1", &dir.join("b")), export("vm2", Path::new("/y"))];
        give_to_exports(&mut fds, &mut exports);
        assert!(fds.is_empty());
        assert!(exports[0].fd.is_some() && exports[0].socket.is_none());
        assert!(exports[1].fd.is_some());
        assert!(exports[2].fd.is_none() && exports[2].socket.is_some());
        let mut fds = vec![inherited(dir, "e", "vshunt.socket")];
        assert!(take_control(&mut fds, Some(&dir.join("e"))).is_some());
    }

    #[test]
    fn a_descriptor_that_is_no_socket_is_refused() {
        assert!(check_fd(-1).is_err());
        assert!(check_fd(999_999).unwrap_err().to_string().contains("is not open"));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(
            check_fd(std::os::fd::AsRawFd::as_raw_fd(&file))
                .unwrap_err()
                .to_string()
                .contains("is no socket")
        );
    }
}
