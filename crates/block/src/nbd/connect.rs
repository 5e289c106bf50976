//! Connecting to an export, with the handshake.
//!
//! When a disk is opened, a control thread makes the first connection. Later ones are made by the
//! disk's thread `vshunt-nbd` ([`maker`](super::maker)).

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use ::nbd::{HandshakeError, Settings, greet};

use super::port::Connected;
use super::stream::{Limit, Stream, Timed, connect_tcp, connect_unix};
use super::tls::{Tls, carry};

/// Where a server is, after its name was looked up.
pub(super) enum Place {
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
}

/// An export of a server.
pub(super) struct Target {
    /// Its name.
    pub(super) export: String,
    pub(super) place: Place,
    /// With TLS.
    pub(super) tls: Option<Tls>,
}

impl Target {
    /// Connects, and does the handshake. Ends at the limit at the latest.
    ///
    /// # Errors
    /// A clause about the server.
    pub(super) fn connect(&self, limit: Limit<'_>) -> Result<Connected, String> {
        let refused = |e: io::Error| match e.kind() {
            io::ErrorKind::ConnectionRefused => {
                "refuses the connection; does the server run, and listen there?".to_owned()
            }
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "does not answer in time".to_owned(),
            io::ErrorKind::NotFound => "names a socket that does not exist; does the server run?".to_owned(),
            _ => format!("cannot be connected: {e}"),
        };
        let mut stream = match &self.place {
            Place::Tcp(addresses) => connect_tcp(addresses, limit).map(Stream::Tcp),
            Place::Unix(path) => connect_unix(path, limit).map(Stream::Unix),
        }
        .map_err(refused)?;
        let mut timed = Timed { stream: &mut stream, limit };
        let said = |e: HandshakeError| e.to_string();
        let greeted = greet(&mut timed).map_err(said)?;
        let Some(tls) = &self.tls else {
            let settings = greeted.negotiate(&mut timed, &self.export).map_err(said)?;
            stream.set_nonblocking(false).map_err(refused)?;
            return Ok(Connected { socket: stream.into_fd(), settings, replied: false, ended: None });
        };
        greeted.start_tls(&mut timed).map_err(said)?;
        let mut secured = tls.start(&mut timed)?;
        let mut inside = rustls::Stream::new(&mut secured, &mut timed);
        let settings = greeted.negotiate(&mut inside, &self.export);
        let settings = settings.map_err(|e| format!("{e}{}", tls.remedy(&e)))?;
        let carried = carry(secured, stream).map_err(|e| format!("cannot be used with TLS: {e}"))?;
        Ok(Connected { socket: carried.0.into(), settings, replied: false, ended: Some(carried.1) })
    }
}

/// What the disk needs, whatever server answers.
pub(super) struct Needs {
    pub(super) readonly: bool,
    /// What was agreed on when the disk was opened.
    pub(super) settings: Settings,
}

impl Needs {
    /// Compares what a server offers now with what the disk was opened with.
    ///
    /// # Errors
    /// A clause about the server.
    pub(super) fn check(&self, now: &Settings) -> Result<(), String> {
        use ::nbd::transmission_flag::{
            CAN_MULTI_CONN, READ_ONLY, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
        };
        let then = &self.settings;
        // A larger one may be another disk, too.
        if now.size != then.size {
            return Err(format!(
                "has {} bytes now and had {}: remove the disk and add it again if that is right",
                now.size, then.size
            ));
        }
        if !self.readonly && now.has(READ_ONLY) {
            return Err("refuses writes now".to_owned());
        }
        let lacks = |flag| then.has(flag) && !now.has(flag);
        // Without CAN_MULTI_CONN a flush need not cover what other connections have written.
        if [CAN_MULTI_CONN, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES].into_iter().any(lacks)
            || now.blocks.minimum > then.blocks.minimum
            || (then.allocation.is_some() && now.allocation.is_none())
        {
            return Err("can do less than when the disk was opened".to_owned());
        }
        Ok(())
    }
}
