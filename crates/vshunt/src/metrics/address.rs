//! The address of the server for metrics: how users write it, and listening on it.

use std::ffi::OsStr;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;

use rustix::net::{SocketAddrUnix, getsockname, sockopt};
use serde::Deserialize;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ListenAddress, SocketAccess};
use vshunt_vhost_user::socket_file::{self, SocketFile, Words};

const WORDS: Words = Words {
    what: "metrics socket",
    other: "another program answers",
    if_in_use: "give --metrics another path",
    if_no_socket: "choose another path for --metrics",
};

/// An address: `PORT` (of 127.0.0.1), `ADDRESS:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match ListenAddress::read(text, 9150, "127.0.0.1:9150 or unix:PATH")? {
            ListenAddress::Tcp(address) => Ok(Self::Tcp(address)),
            ListenAddress::Unix(path) => Ok(Self::Unix(path)),
        }
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}/metrics"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listening socket.
pub(super) struct Listening {
    pub(super) fd: OwnedFd,
    /// The file of a UNIX socket. It is dropped before `fd` is closed.
    pub(super) file: Option<SocketFile>,
    /// The address. For port 0 it has the port that the system chose.
    pub(super) at: Address,
}

impl Address {
    /// Listens. The descriptor is non-blocking.
    ///
    /// # Errors
    /// Another program listens there, or the system refuses.
    pub(super) fn listen(&self) -> Result<Listening> {
        let cannot = |e| Error::io(format!("cannot serve metrics on {self}"), e);
        match self {
            Self::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(|e| refused(*address, e))?;
                listener.set_nonblocking(true).map_err(cannot)?;
                let at = Self::Tcp(listener.local_addr().map_err(cannot)?);
                Ok(Listening { fd: listener.into(), file: None, at })
            }
            Self::Unix(path) => {
                let (listener, file) = socket_file::bind(path, &SocketAccess::default(), &WORDS)?;
                listener.set_nonblocking(true).map_err(cannot)?;
                Ok(Listening { fd: listener.into(), file: Some(file), at: self.clone() })
            }
        }
    }
}

impl Listening {
    /// Takes a listening socket that the service manager made.
    ///
    /// # Errors
    /// The descriptor is not a listening socket.
    pub(super) fn inherited(fd: OwnedFd) -> Result<Self> {
        let cannot =
            |e: rustix::io::Errno| Error::io("cannot use the inherited socket for metrics", e.into());
        if !sockopt::socket_acceptconn(&fd).map_err(cannot)? {
            return Err(Error::invalid(
                "the inherited socket for metrics does not listen; pass a listening one (ListenStream=, Accept=no)",
            ));
        }
        rustix::io::ioctl_fionbio(&fd, true).map_err(cannot)?;
        let bound = getsockname(&fd).map_err(cannot)?;
        let at = match SocketAddr::try_from(bound.clone()) {
            Ok(address) => Address::Tcp(address),
            Err(_) => {
                let unix = SocketAddrUnix::try_from(bound).map_err(cannot)?;
                Address::Unix(OsStr::from_bytes(unix.path_bytes().unwrap_or_default()).into())
            }
        };
        Ok(Self { fd, file: None, at })
    }
}

fn refused(address: SocketAddr, e: std::io::Error) -> Error {
    let hint = match e.raw_os_error() {
        Some(libc::EADDRINUSE) => {
            return Error::busy(format!(
                "cannot serve metrics on {address}: another program listens there; give --metrics another port"
            ));
        }
        Some(libc::EADDRNOTAVAIL) => " (give --metrics an address of this machine)",
        Some(libc::EACCES) => " (ports below 1024 are for root; give --metrics another one)",
        _ => "",
    };
    Error::io(format!("cannot serve metrics on {address}{hint}"), e)
}

#[cfg(test)]
mod tests {
    use vshunt_types::error::Kind;

    use super::*;

    #[test]
    fn the_ways_to_write_it() {
        let tcp = |text: &str| Address::Tcp(text.parse().unwrap());
        let cases = [
            ("9150", tcp("127.0.0.1:9150")),
            ("localhost:9150", tcp("127.0.0.1:9150")),
            ("0.0.0.0:80", tcp("0.0.0.0:80")),
            ("[::1]:9150", tcp("[::1]:9150")),
            ("unix:m.sock", Address::Unix("m.sock".into())),
            ("unix:/a:b", Address::Unix("/a:b".into())),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse(), Ok(want), "{text}");
        }
        let wrong = [
            (":9150", "write 127.0.0.1:9150, or 0.0.0.0:9150"),
            ("10.0.0.1", "names no port; write 10.0.0.1:9150"),
            ("::1", "write [::1]:9150"),
            ("unix:", "names no path"),
            ("", "is no address"),
            ("70000", "is no address"),
            ("host:9150", "is no address"),
            ("/tmp/m.sock", "or unix:PATH"),
        ];
        for (text, want) in wrong {
            let said = text.parse::<Address>().unwrap_err();
            assert!(said.contains(want), "{text}: {said}");
        }
    }

    #[test]
    fn a_taken_one_is_said_at_once() {
        let first = "127.0.0.1:0".parse::<Address>().unwrap().listen().unwrap();
        let Address::Tcp(at) = first.at else { panic!("{:?}", first.at) };
        assert_ne!(at.port(), 0);
        let e = Address::Tcp(at).listen().err().unwrap();
        assert_eq!(e.kind(), Kind::Busy);
        assert!(e.to_string().contains(&format!("{at}: another program listens there")), "{e}");
        let e = "192.0.2.1:0".parse::<Address>().unwrap().listen().err().unwrap();
        assert!(e.to_string().contains("an address of this machine"), "{e}");
    }
}
