//! The listening socket of an export. Called by control threads.

use std::net::TcpListener;
use std::os::fd::OwnedFd;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ListenAddress, SocketAccess};
use vshunt_vhost_user::socket_file::{self, SocketFile, Words};

const WORDS: Words = Words {
    what: "NBD socket",
    other: "another process listens",
    if_in_use: "choose another path",
    if_no_socket: "remove it or choose another path",
};

/// A listening socket.
pub struct Listening {
    /// Removes the file of a UNIX socket. Dropped before `fd` is closed, see [`SocketFile`].
    pub(crate) file: Option<SocketFile>,
    pub(crate) fd: OwnedFd,
}

/// Listens at an address. `access`: the owner, the group and the mode of a UNIX socket.
///
/// # Errors
/// Another process listens there, or the system refuses.
pub fn listen(address: &ListenAddress, access: &SocketAccess) -> Result<Listening> {
    let cannot = |e| Error::io(format_args!("cannot listen on {address}"), e);
    match address {
        ListenAddress::Unix(path) => {
            let (listener, file) = socket_file::bind(path, access, &WORDS)?;
            listener.set_nonblocking(true).map_err(cannot)?;
            Ok(Listening { file: Some(file), fd: listener.into() })
        }
        ListenAddress::Tcp(address) => {
            let listener = TcpListener::bind(address).map_err(|e| refused(address, e))?;
            listener.set_nonblocking(true).map_err(cannot)?;
            Ok(Listening { file: None, fd: listener.into() })
        }
    }
}

fn refused(address: &std::net::SocketAddr, e: std::io::Error) -> Error {
    let hint = match e.raw_os_error() {
        Some(libc::EADDRINUSE) => {
            return Error::busy(format!(
                "cannot listen on {address}: another program does; give listen= another port"
            ));
        }
        Some(libc::EADDRNOTAVAIL) => " (give listen= an address of this machine)",
        Some(libc::EACCES) => {
            " (ports below 1024 need the capability NET_BIND_SERVICE; give listen= another one)"
        }
        _ => "",
    };
    Error::io(format!("cannot listen on {address}{hint}"), e)
}
