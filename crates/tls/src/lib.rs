//! TLS of NBD connections, of clients and of servers.
//!
//! [`carry`] starts a thread for each connection, between the socket of the peer and a pair of
//! connected sockets. The other end of the pair is what the worker's io_uring reads and writes, so
//! that there is one data path, with TLS and without. [`Folder`] reads certificates.
//!
//! What must never happen: the thread buffers without a bound, waits in another place than poll(2),
//! or outlives its connection.

mod carrier;
mod flow;
mod pem;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use rustls::Connection;
use vshunt_sandbox::{self as sandbox, ThreadKind};

use self::carrier::Carrier;
pub use self::flow::Socket;
pub use self::pem::Folder;

/// Which side of a connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It asks. When the server sends nothing more, the connection is of no more use.
    Client,
    /// It answers, also after the client has said that it sends nothing more. When the worker has
    /// closed its end, the client has [`LINGER`] to take the last answers.
    Server,
}

/// How long a client may take for its last answers, after the worker has closed its end.
pub const LINGER: std::time::Duration = std::time::Duration::from_secs(10);

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The reason.
    pub why: String,
    /// The peer broke TLS.
    pub violation: bool,
}

/// Starts the thread of a connection whose TLS handshake is complete, with that name. What `tls`
/// has decrypted already is carried first. Returns the socket for the worker, which blocks, and the
/// thread. `ended` is called on the thread at its end, before the worker can see the end.
///
/// # Errors
/// The system has no sockets or no thread.
pub fn carry(
    tls: impl Into<Connection>,
    peer: OwnedFd,
    side: Side,
    (kind, name): (ThreadKind, String),
    ended: impl FnOnce(End) + Send + 'static,
) -> io::Result<(UnixStream, JoinHandle<()>)> {
    let (own, worker) = UnixStream::pair()?;
    own.set_nonblocking(true)?;
    let mut carrier = Carrier::new(tls.into(), peer, own, side);
    let run = move || {
        let end = match carrier.run() {
            Ok(why) => End { why, violation: false },
            Err(e) => End { violation: e.kind() == io::ErrorKind::InvalidData, why: e.to_string() },
        };
        ended(end);
        drop(carrier);
    };
    let thread = sandbox::spawn(kind, std::thread::Builder::new().name(name), run)?;
    Ok((worker, thread))
}
