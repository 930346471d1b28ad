//! Certificates and keys in PEM files, as a server and as a client use them.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite};
use spile_core::{Error, ErrorKind, Result, ResultExt};

/// The files of the server's certificates, and whether TLS is required.
#[derive(Clone, Debug)]
pub struct ServerFiles {
    /// The file of the server's certificate and those between it and the root, PEM.
    pub cert_chain_pem: PathBuf,
    /// The file of the server's private key, PEM.
    pub key_pem: PathBuf,
    /// When set, a client must show a certificate that one of these authorities signed.
    pub client_ca_pem: Option<PathBuf>,
    /// True: no export is shown or served without TLS. False: clients may ask for it.
    pub required: bool,
}

impl ServerFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// When a file cannot be read or holds nothing usable, with its path.
    pub fn load(&self) -> Result<Arc<ServerConfig>> {
        let (chain, key) = identity(&self.cert_chain_pem, &self.key_pem)?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable("no TLS version", e))?;
        let builder = match &self.client_ca_pem {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots(path)?.into(), provider())
                    .build()
                    .map_err(|e| unusable("no usable client authority", e))
                    .at_path(path)?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, key).map_err(do_not_fit).at_path(&self.cert_chain_pem)?;
        Ok(Arc::new(config))
    }
}

/// The authorities of the system, where distributions keep them.
const SYSTEM_AUTHORITIES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// Where a client finds certificates: in a folder with the file names of libnbd and QEMU. `ca-cert.pem` has the authorities that
/// may have signed the server's certificate. `client-cert.pem` and `client-key.pem` are shown to a server that asks who we are,
/// and may be missing. Without a folder, the system's authorities are believed.
#[derive(Clone, Debug)]
pub struct ClientFiles {
    /// The folder.
    pub folder: Option<PathBuf>,
}

impl ClientFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// When a file cannot be read or holds nothing usable, with its path.
    pub fn load(&self) -> Result<Arc<ClientConfig>> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable("no TLS version", e))?
            .with_root_certificates(roots(&self.authorities()?)?);
        let config = match self.own() {
            Some((cert, key)) => {
                let (chain, key) = identity(&cert, &key)?;
                builder.with_client_auth_cert(chain, key).map_err(do_not_fit).at_path(&cert)?
            }
            None => builder.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }

    fn authorities(&self) -> Result<PathBuf> {
        if let Some(folder) = &self.folder {
            return Ok(folder.join("ca-cert.pem"));
        }
        let found = SYSTEM_AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
        found.ok_or_else(|| {
            let error = Error::new(ErrorKind::NotFound, "TLS: this system has no list of authorities");
            error.hint("name a folder that has ca-cert.pem: tls-certificates=DIR in the URI")
        })
    }

    /// The client's certificate and key, where the folder has a certificate.
    fn own(&self) -> Option<(PathBuf, PathBuf)> {
        let folder = self.folder.as_ref()?;
        let cert = folder.join("client-cert.pem");
        cert.exists().then(|| (cert, folder.join("client-key.pem")))
    }
}

/// The algorithms. TLS 1.2 changes no keys under way, so a session of AES-GCM has to end after 2^24 records, which a busy disk has sent
/// in minutes: of TLS 1.2 only what has no such limit is offered.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.cipher_suites.retain(|suite| match suite {
        SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit == u64::MAX,
        SupportedCipherSuite::Tls13(_) => true,
    });
    Arc::new(provider)
}

/// No file of certificates is longer: a system's list has a few hundred KiB.
const MOST_BYTES: u64 = 16 << 20;

/// What a file holds. A pipe in its place is not waited for.
fn read(path: &Path) -> Result<Vec<u8>, pem::Error> {
    let refused = |why: String| pem::Error::Io(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    // It is looked at before it is opened: to open a pipe would wait for its other end.
    let stat = path.metadata().map_err(pem::Error::Io)?;
    if !stat.is_file() {
        return Err(refused("this is no file".to_owned()));
    }
    let file = File::open(path).map_err(pem::Error::Io)?;
    let mut text = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut text).map_err(pem::Error::Io)?;
    match text.len() as u64 > MOST_BYTES {
        true => Err(refused(format!("the file has {} bytes, and may have {MOST_BYTES} at most", stat.len()))),
        false => Ok(text),
    }
}

/// A certificate with those between it and the root, and its key.
fn identity(cert: &Path, key: &Path) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let chain = certificates(cert)?;
    let key = read(key)
        .and_then(|text| PrivateKeyDer::from_pem_slice(&text))
        .map_err(|e| unread("no private key", e))
        .at_path(key)?;
    Ok((chain, key))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain: Vec<_> = read(path)
        .and_then(|text| CertificateDer::pem_slice_iter(&text).collect())
        .map_err(|e| unread("no certificate", e))
        .at_path(path)?;
    if chain.is_empty() {
        let error = Error::new(ErrorKind::InvalidInput, "the file holds no certificate");
        return Err(error.at_path(path).hint("give a PEM file with a CERTIFICATE section"));
    }
    Ok(chain)
}

/// The authorities of a file. What is in a system's list and cannot be used is passed over, as long as something can.
fn roots(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(certificates(path)?);
    if usable == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "TLS: no usable authority").at_path(path));
    }
    Ok(roots)
}

/// A file that holds nothing usable, or that cannot be read now: the latter may pass.
fn unread(what: &str, error: pem::Error) -> Error {
    match error {
        pem::Error::Io(source) => Error::io("read a PEM file", source),
        error => unusable(what, error),
    }
}

fn do_not_fit(error: rustls::Error) -> Error {
    unusable("the certificate and its key do not fit", error)
}

pub(crate) fn unusable(what: &str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("TLS: {what}")).caused_by(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_tls_are_offered_and_no_session_has_to_end() {
        let provider = provider();
        let limit = |suite: &SupportedCipherSuite| match suite {
            SupportedCipherSuite::Tls12(suite) => Some(suite.common.confidentiality_limit),
            SupportedCipherSuite::Tls13(_) => None,
        };
        let limits: Vec<_> = provider.cipher_suites.iter().map(limit).collect();
        assert!(limits.contains(&None) && limits.contains(&Some(u64::MAX)), "{limits:?}");
        assert!(limits.iter().flatten().all(|limit| *limit == u64::MAX), "{limits:?}");
    }
}
