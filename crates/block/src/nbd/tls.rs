//! TLS with servers: how they are verified, and what this side shows them. A thread for each
//! connection, `vshunt-nbd-tls`, encrypts and decrypts (`vshunt_tls`).

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use ::nbd::{HandshakeError, Server, Uri};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use vshunt_sandbox::ThreadKind;
use vshunt_tls::{Folder, Side};

use super::port::Reason;
use super::stream::Stream;

/// How the servers of a disk are verified.
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads the certificates that a URI names.
    ///
    /// # Errors
    /// A clause that begins with a verb, about the URI.
    pub(super) fn new(uri: &Uri) -> Result<Option<Self>, String> {
        let Some(wanted) = &uri.tls else { return Ok(None) };
        let host = match (&wanted.hostname, &uri.server) {
            (Some(name), _) => name.as_str(),
            (None, Server::Tcp { host, .. }) => host,
            (None, Server::Unix(_)) => "localhost",
        };
        let name = match host.parse::<IpAddr>() {
            Ok(address) => ServerName::IpAddress(address.into()),
            Err(_) => ServerName::try_from(host.to_owned())
                .map_err(|_| format!("names the host {host}, which no certificate can have"))?,
        };
        let config = config(wanted.certificates.as_deref())?;
        Ok(Some(Self { config: Arc::new(config), name }))
    }

    /// Does the handshake of TLS on a stream with a limit of time.
    ///
    /// # Errors
    /// A clause about the server.
    pub(super) fn start<S: Read + Write>(&self, stream: &mut S) -> Result<ClientConnection, String> {
        let made = ClientConnection::new(self.config.clone(), self.name.clone());
        let mut tls = made.map_err(|e| format!("cannot be asked for TLS: {e}"))?;
        while tls.is_handshaking() {
            tls.complete_io(stream).map_err(|e| self.refusal(&e))?;
        }
        Ok(tls)
    }

    /// Returns the remedy if a server that verifies its clients has refused this one. In TLS 1.3
    /// its verdict comes after the handshake, and not all tell it.
    pub(super) fn remedy(&self, e: &HandshakeError) -> &'static str {
        use io::ErrorKind::{TimedOut, WouldBlock};
        match e {
            HandshakeError::Io(e) if matches!(e.kind(), WouldBlock | TimedOut) => "",
            HandshakeError::Io(_) if !self.config.client_auth_cert_resolver.has_certs() => {
                "; if it verifies its clients, it needs client-cert.pem and client-key.pem in the folder that the URI names, \
                 ?tls-certificates=FOLDER"
            }
            _ => "",
        }
    }

    fn refusal(&self, e: &io::Error) -> String {
        use rustls::CertificateError as C;
        let host = self.name.to_str();
        match e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(why)) => match why {
                C::UnknownIssuer => {
                    "has a certificate of an unknown authority: name the folder with its ca-cert.pem in the \
                                     URI, ?tls-certificates=FOLDER"
                        .to_owned()
                }
                C::NotValidForName | C::NotValidForNameContext { .. } => format!(
                    "has a certificate that is not for {host}: if it is the right server, name it in the URI, \
                     ?tls-hostname=NAME (the name is one of its subjectAltName)"
                ),
                C::Expired | C::ExpiredContext { .. } => "has a certificate that has expired".to_owned(),
                C::NotValidYet | C::NotValidYetContext { .. } => {
                    "has a certificate that is not valid yet; is the clock right?".to_owned()
                }
                C::Revoked => "has a certificate that was revoked".to_owned(),
                other => format!("has a certificate that is refused: {other}"),
            },
            Some(e) => format!("refuses TLS: {e}"),
            None if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                "does not answer in time".to_owned()
            }
            None => format!("breaks TLS off: {e}"),
        }
    }
}

/// Starts the thread of a connection. Returns the socket for the worker, and where the reason will
/// be when it ends.
///
/// # Errors
/// The system has no sockets or no thread.
pub(super) fn carry(tls: ClientConnection, server: Stream) -> io::Result<(UnixStream, Reason)> {
    let reason = Reason::default();
    let theirs = reason.clone();
    let thread = (ThreadKind::Remote, "vshunt-nbd-tls".to_owned());
    let ended = move |end: vshunt_tls::End| drop(theirs.set(end.why));
    let (worker, _) = vshunt_tls::carry(tls, server.into_fd(), Side::Client, thread, ended)?;
    Ok((worker, reason))
}

/// Makes the settings of TLS from a folder with certificates, or with the authorities of the
/// system.
fn config(folder: Option<&Path>) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let cannot = |e: rustls::Error| format!("cannot be used with TLS: {e}");
    let builder = builder.with_safe_default_protocol_versions().map_err(cannot)?;
    let Some(folder) = folder.map(Folder) else {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err("needs certificates: the system trusts no authority (Debian package ca-certificates); name the \
                        folder of your own, ?tls-certificates=FOLDER"
                .to_owned());
        }
        return Ok(builder.with_root_certificates(roots).with_no_client_auth());
    };
    let roots = Arc::new(folder.authorities("")?);
    let verifier = folder.revoked(|revoked| {
        WebPkiServerVerifier::builder_with_provider(roots, provider).with_crls(revoked).build()
    })?;
    let builder = builder.with_webpki_verifier(verifier);
    let own = folder.own("client", |own, key| builder.clone().with_client_auth_cert(own, key))?;
    Ok(own.unwrap_or_else(|| builder.with_no_client_auth()))
}
