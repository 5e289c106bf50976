//! TLS with clients: what this side shows them, and how they are verified.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, Error as TlsError, ServerConfig, ServerConnection};
use vshunt_engine::EventFd;
use vshunt_sandbox::ThreadKind;
use vshunt_tls::{End, Folder, Side, Socket};

/// Certificates of an export that has TLS.
#[derive(Clone)]
pub struct Credentials(Arc<ServerConfig>);

impl Credentials {
    /// Reads `server-cert.pem` and `server-key.pem` of a folder; with `verify_peer` also
    /// `ca-cert.pem`, whose authority has to have signed the certificates of clients, and
    /// `ca-crl.pem`, if there is one. Called by control threads.
    ///
    /// # Errors
    /// A clause that begins with a verb, about what names the folder.
    pub fn read(folder: &Path, verify_peer: bool) -> Result<Self, String> {
        let folder = Folder(folder);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let cannot = |e: TlsError| format!("cannot be used with TLS: {e}");
        let builder = builder.with_safe_default_protocol_versions().map_err(cannot)?;
        let builder = if verify_peer {
            let roots = Arc::new(folder.authorities(
                " that has signed the certificates of clients; tls-verify-peer=off would let every client in",
            )?);
            builder.with_client_cert_verifier(folder.revoked(|revoked| {
                WebPkiClientVerifier::builder_with_provider(roots, provider).with_crls(revoked).build()
            })?)
        } else {
            builder.with_no_client_auth()
        };
        let config = folder.own("server", |own, key| builder.with_single_cert(own, key))?;
        let Some(mut config) = config else {
            let folder = folder.0.display();
            return Err(format!("needs {folder}/server-cert.pem and {folder}/server-key.pem"));
        };
        // Each client is verified, and nothing of it is kept.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    pub(crate) fn begin(&self) -> Result<Secured, TlsError> {
        ServerConnection::new(self.0.clone()).map(|tls| Secured { tls: Box::new(tls) })
    }
}

/// A connection with TLS, until its queue begins.
pub(crate) struct Secured {
    tls: Box<ServerConnection>,
}

/// How a handshake of TLS stands.
pub(crate) enum Step {
    /// It is complete.
    Done,
    /// It continues at once.
    Again,
    /// It waits for the client.
    Waits,
}

impl Secured {
    /// Returns whether something waits for room in the socket.
    pub(crate) fn sends(&self) -> bool {
        self.tls.wants_write()
    }

    /// Continues with the handshake of TLS.
    ///
    /// # Errors
    /// Of kind `InvalidData`: the client is refused. Otherwise those of the socket.
    pub(crate) fn shake(&mut self, socket: &OwnedFd) -> io::Result<Step> {
        if !self.flush(socket)? {
            return Ok(Step::Waits);
        }
        if !self.tls.is_handshaking() {
            return Ok(Step::Done);
        }
        match self.take(socket) {
            Ok(0) => Err(io::ErrorKind::ConnectionReset.into()),
            Ok(_) => Ok(Step::Again),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Step::Waits),
            Err(e) => Err(e),
        }
    }

    /// Sends what is encrypted. Returns whether all of it was sent.
    pub(crate) fn flush(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Sends bytes, and returns how many were taken.
    pub(crate) fn send(&mut self, socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
        let n = self.tls.writer().write(bytes)?;
        self.flush(socket)?;
        Ok(n)
    }

    /// Receives bytes. Returns 0 at the end.
    pub(crate) fn receive(&mut self, socket: &OwnedFd, to: &mut [u8]) -> io::Result<usize> {
        match self.tls.reader().read(to) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
        if self.take(socket)? == 0 {
            return Ok(0);
        }
        self.tls.reader().read(to)
    }

    /// Takes what the client has sent, as far as one read goes. Returns how many bytes there were.
    fn take(&mut self, socket: &OwnedFd) -> io::Result<usize> {
        let n = self.tls.read_tls(&mut Socket(socket))?;
        if n > 0 {
            self.tls.process_new_packets().map_err(|e| {
                // The client is told why, if it still listens.
                let _ = self.tls.write_tls(&mut Socket(socket));
                io::Error::new(io::ErrorKind::InvalidData, refusal(&e))
            })?;
        }
        Ok(n)
    }

    /// Says that nothing more comes.
    pub(crate) fn close(&mut self, socket: &OwnedFd) {
        self.tls.send_close_notify();
        let _ = self.flush(socket);
    }
}

/// The thread that carries the bytes of a connection.
pub(crate) struct Carrier {
    /// The socket of the client.
    client: OwnedFd,
    thread: JoinHandle<()>,
    ended: Arc<OnceLock<End>>,
}

impl Carrier {
    /// Starts the thread, which signals `eventfd` at its end. Also returns the socket for the
    /// queue.
    ///
    /// # Errors
    /// The system has no descriptors or no thread.
    pub(crate) fn start(
        export: &str,
        eventfd: Arc<EventFd>,
        socket: OwnedFd,
        secured: Secured,
    ) -> io::Result<(OwnedFd, Self)> {
        let client = socket.try_clone()?;
        let ended = Arc::new(OnceLock::new());
        let theirs = ended.clone();
        let tell = move |end| {
            let _ = theirs.set(end);
            eventfd.signal();
        };
        let name = format!("{export}/tls").chars().take(15).collect();
        let thread = (ThreadKind::NbdServer, name);
        let (worker, thread) = vshunt_tls::carry(*secured.tls, socket, Side::Server, thread, tell)?;
        Ok((worker.into(), Self { client, thread, ended }))
    }

    /// Returns why the thread has ended, if it has.
    pub(crate) fn end(&self) -> Option<&End> {
        self.ended.get()
    }

    /// Ends the connection. The worker's socket is shut down before.
    pub(crate) fn stop(self) {
        shut_down(&self.client);
        // It waits in poll(2) only, for sockets that are shut down.
        let _ = self.thread.join();
    }
}

/// Ends both directions of a socket.
pub(crate) fn shut_down(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Returns why a client is refused, as a clause about it.
fn refusal(e: &TlsError) -> String {
    use CertificateError as C;
    let shows = |what: &str| format!("is refused: it shows a certificate {what}");
    match e {
        TlsError::NoCertificatesPresented => {
            "is refused: it shows no certificate, which tls-verify-peer=on requires".to_owned()
        }
        TlsError::InvalidCertificate(why) => match why {
            C::UnknownIssuer => shows("of an unknown authority"),
            C::Expired | C::ExpiredContext { .. } => shows("that has expired"),
            C::NotValidYet | C::NotValidYetContext { .. } => shows("that is not valid yet"),
            C::Revoked => shows("that was revoked"),
            other => shows(&format!("that cannot be used: {other}")),
        },
        e => format!("breaks TLS: {e}"),
    }
}
