//! Files with certificates. QEMU, nbdkit and libnbd use the same names.

use std::io;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

/// The certificates of the authority, in a folder of certificates.
const AUTHORITY: &str = "ca-cert.pem";
/// The certificates that the authority has revoked.
const REVOKED: &str = "ca-crl.pem";

/// A folder of certificates. Errors are clauses that begin with a verb, about what names the
/// folder.
#[derive(Clone, Copy, Debug)]
pub struct Folder<'a>(pub &'a Path);

impl Folder<'_> {
    /// Reads the certificates of the authority, `ca-cert.pem`. `otherwise`: the remedy if they are
    /// missing and nobody has them.
    ///
    /// # Errors
    /// The file is missing, or has no certificate.
    pub fn authorities(&self, otherwise: &str) -> Result<RootCertStore, String> {
        let path = self.0.join(AUTHORITY);
        let mut roots = RootCertStore::empty();
        for certificate in all::<CertificateDer<'static>>(&path)?.unwrap_or_default() {
            roots.add(certificate).map_err(|e| wrong(&path, &e))?;
        }
        match roots.is_empty() {
            true => Err(format!("needs {} with the certificate of the authority{otherwise}", path.display())),
            false => Ok(roots),
        }
    }

    /// Reads what the authority has revoked, `ca-crl.pem`. A missing file is an empty list.
    /// `verifier` makes what uses it.
    ///
    /// # Errors
    /// The file has no list, or the list cannot be used.
    pub fn revoked<T, E: std::fmt::Display>(
        &self,
        verifier: impl FnOnce(Vec<CertificateRevocationListDer<'static>>) -> Result<T, E>,
    ) -> Result<T, String> {
        let path = self.0.join(REVOKED);
        let revoked = all::<CertificateRevocationListDer<'static>>(&path)?;
        if revoked.as_ref().is_some_and(Vec::is_empty) {
            // Without a list, no certificate would count as revoked.
            return Err(wrong(&path, &"it has no list of revoked certificates (X509 CRL, as PEM)"));
        }
        verifier(revoked.unwrap_or_default()).map_err(|e| wrong(&path, &e))
    }

    /// Reads a certificate with its chain, `NAME-cert.pem`, and its key, `NAME-key.pem`. `use_them`
    /// makes what uses them. None: both files are missing.
    ///
    /// # Errors
    /// One of the files is missing, or cannot be used.
    pub fn own<T>(
        &self,
        name: &str,
        use_them: impl FnOnce(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) -> Result<T, rustls::Error>,
    ) -> Result<Option<T>, String> {
        let path = |what: &str| self.0.join(format!("{name}-{what}.pem"));
        let (certificate, key) = (path("cert"), path("key"));
        match (all::<CertificateDer<'static>>(&certificate)?, PrivateKeyDer::from_pem_file(&key)) {
            (None, Err(e)) if is_absent(&e) => Ok(None),
            (None, _) => Err(format!("needs {} for {}", certificate.display(), key.display())),
            (Some(own), Ok(secret)) => use_them(own, secret).map(Some).map_err(|e| wrong(&certificate, &e)),
            (Some(_), Err(e)) if is_absent(&e) => {
                Err(format!("needs {} for {}", key.display(), certificate.display()))
            }
            (Some(_), Err(e)) => Err(wrong(&key, &e)),
        }
    }
}

/// Reads what a file holds. None: there is no such file.
fn all<T: PemObject>(path: &Path) -> Result<Option<Vec<T>>, String> {
    match T::pem_file_iter(path).and_then(Iterator::collect) {
        Ok(all) => Ok(Some(all)),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(wrong(path, &e)),
    }
}

fn is_absent(e: &PemError) -> bool {
    matches!(e, PemError::Io(e) if e.kind() == io::ErrorKind::NotFound)
}

fn wrong(path: &Path, e: &dyn std::fmt::Display) -> String {
    format!("cannot be used with {}: {e}", path.display())
}
