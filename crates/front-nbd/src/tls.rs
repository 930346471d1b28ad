//! TLS over a socket of the engine. rustls works in memory only, so the bytes go through the same worker and ring as
//! others.
//!
//! Contract: after [`Tls::accept`] only the reading task calls [`Tls::recv`] and only the writing task calls
//! [`Tls::send`]. What rustls itself has to send (key updates) goes out with the next reply.

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use spile_core::{Error, ErrorKind, Result, ResultExt, Segment};
use spile_engine::Socket;

/// The files of the server's certificates, and whether TLS is required.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// The file of the server's certificate and those between it and the root, PEM.
    pub cert_chain_pem: PathBuf,
    /// The file of the server's private key, PEM.
    pub key_pem: PathBuf,
    /// When set, a client must show a certificate that one of these authorities signed.
    pub client_ca_pem: Option<PathBuf>,
    /// True: no export is shown or served without TLS. False: clients may ask for it.
    pub required: bool,
}

impl TlsConfig {
    /// Reads the files.
    ///
    /// # Errors
    /// When a file cannot be read or holds nothing usable, with its path.
    pub(crate) fn load(&self) -> Result<Arc<ServerConfig>> {
        let chain = certificates(&self.cert_chain_pem)?;
        let key = PrivateKeyDer::from_pem_file(&self.key_pem)
            .map_err(|e| unusable("no private key", e))
            .at_path(&self.key_pem)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable("no TLS version", e))?;
        let builder = match &self.client_ca_pem {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots(path)?.into(), provider)
                    .build()
                    .map_err(|e| unusable("no usable client authority", e))
                    .at_path(path)?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder
            .with_single_cert(chain, key)
            .map_err(|e| unusable("the certificate and its key do not fit", e))
            .at_path(&self.cert_chain_pem)?;
        Ok(Arc::new(config))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|e| unusable("no certificate", e))
        .at_path(path)?;
    if chain.is_empty() {
        let error = Error::new(ErrorKind::InvalidInput, "the file holds no certificate");
        return Err(error.at_path(path).hint("give a PEM file with a CERTIFICATE section"));
    }
    Ok(chain)
}

fn roots(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|e| unusable("bad authority", e)).at_path(path)?;
    }
    Ok(roots)
}

fn unusable(what: &str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("TLS: {what}")).caused_by(source)
}

/// The most bytes of ciphertext that are received or sent at a time.
const CIPHER_BYTES: usize = 128 << 10;
/// The buffer through which plain bytes pass, in bytes: one TLS record.
const SCRATCH_BYTES: usize = 16 << 10;

/// One TLS session.
pub(crate) struct Tls {
    session: RefCell<ServerConnection>,
    inbound: Segment,
    /// The part of `inbound` that rustls has not taken yet.
    pending: Cell<(usize, usize)>,
    outbound: Segment,
    scratch: RefCell<Vec<u8>>,
}

impl Tls {
    /// Does the TLS handshake, as the server.
    ///
    /// # Errors
    /// When the handshake fails. The peer was sent an alert if that was possible.
    pub(crate) async fn accept(socket: &Socket, config: Arc<ServerConfig>) -> Result<Self> {
        let mut session = ServerConnection::new(config).map_err(|e| unusable("no session", e))?;
        session.set_buffer_limit(Some(CIPHER_BYTES));
        let tls = Self {
            session: RefCell::new(session),
            inbound: Segment::zeroed(CIPHER_BYTES),
            pending: Cell::new((0, 0)),
            outbound: Segment::zeroed(CIPHER_BYTES),
            scratch: RefCell::new(vec![0; SCRATCH_BYTES]),
        };
        let done = tls.shake_hands(socket).await;
        let flushed = tls.flush(socket).await;
        done.and(flushed)?;
        Ok(tls)
    }

    async fn shake_hands(&self, socket: &Socket) -> Result<()> {
        while self.session.borrow().is_handshaking() {
            self.flush(socket).await?;
            if self.pending.get().0 == self.pending.get().1 && !self.refill(socket).await? {
                return Err(Error::new(ErrorKind::Protocol, "hung up during the TLS handshake"));
            }
            self.feed()?;
        }
        Ok(())
    }

    /// Receives plain bytes into `into`; 0 at the end of the stream.
    pub(crate) async fn recv(&self, socket: &Socket, into: &Segment) -> Result<usize> {
        loop {
            if let Some(n) = self.take_plain(into)? {
                return Ok(n);
            }
            // An end without close_notify may be the work of an attacker. It does nothing but end the session.
            if self.pending.get().0 == self.pending.get().1 && !self.refill(socket).await? {
                return Ok(0);
            }
            self.feed()?;
        }
    }

    /// Sends `parts`, encrypted, in order.
    pub(crate) async fn send(&self, socket: &Socket, parts: &[Segment]) -> Result<()> {
        for part in parts {
            let mut done = 0;
            while done < part.len() {
                let taken = self.put_plain(&part.slice(done..part.len()))?;
                done += taken;
                if taken == 0 {
                    self.flush(socket).await?; // full: rustls keeps no more than its buffer limit
                }
            }
        }
        self.flush(socket).await
    }

    /// Sends the end of the TLS session (close_notify). Errors do not matter any more.
    pub(crate) async fn close(&self, socket: &Socket) {
        self.session.borrow_mut().send_close_notify();
        let _ = self.flush(socket).await;
    }

    fn take_plain(&self, into: &Segment) -> Result<Option<usize>> {
        let mut scratch = self.scratch.borrow_mut();
        let want = into.len().min(scratch.len());
        match self.session.borrow_mut().reader().read(&mut scratch[..want]) {
            Ok(n) => {
                into.copy_from_slice(0, &scratch[..n]);
                Ok(Some(n))
            }
            Err(e) if e.kind() == IoKind::WouldBlock => Ok(None),
            Err(e) => Err(Error::io("TLS receive", e)),
        }
    }

    fn put_plain(&self, from: &Segment) -> Result<usize> {
        let mut scratch = self.scratch.borrow_mut();
        let n = from.len().min(scratch.len());
        from.copy_to_slice(0, &mut scratch[..n]);
        let mut session = self.session.borrow_mut();
        session.writer().write(&scratch[..n]).map_err(|e| Error::io("TLS send", e))
    }

    async fn refill(&self, socket: &Socket) -> Result<bool> {
        let n = socket.recv(&self.inbound).await?;
        self.pending.set((0, n));
        Ok(n > 0)
    }

    /// Gives rustls some of the bytes that have arrived, as many as it has room for.
    fn feed(&self) -> Result<()> {
        let (start, end) = self.pending.get();
        let mut scratch = self.scratch.borrow_mut();
        let len = (end - start).min(scratch.len());
        self.inbound.copy_to_slice(start, &mut scratch[..len]);
        let mut session = self.session.borrow_mut();
        let taken = session.read_tls(&mut &scratch[..len]).map_err(|e| Error::io("TLS", e))?;
        self.pending.set((start + taken, end));
        session
            .process_new_packets()
            .map_err(|e| Error::new(ErrorKind::Protocol, "the peer broke the TLS protocol").caused_by(e))?;
        Ok(())
    }

    /// Sends all the ciphertext that waits.
    async fn flush(&self, socket: &Socket) -> Result<()> {
        loop {
            let filled = self.take_cipher()?;
            if filled == 0 {
                return Ok(());
            }
            socket.send(&[self.outbound.slice(0..filled)]).await?;
        }
    }

    fn take_cipher(&self) -> Result<usize> {
        let mut session = self.session.borrow_mut();
        let mut sink = SegmentWriter { segment: &self.outbound, filled: 0 };
        while session.wants_write() && sink.filled < self.outbound.len() {
            session.write_tls(&mut sink).map_err(|e| Error::io("TLS", e))?;
        }
        Ok(sink.filled)
    }
}

/// Writes into a segment from its start, until it is full.
struct SegmentWriter<'a> {
    segment: &'a Segment,
    filled: usize,
}

impl Write for SegmentWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = bytes.len().min(self.segment.len() - self.filled);
        self.segment.copy_from_slice(self.filled, &bytes[..n]);
        self.filled += n;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
