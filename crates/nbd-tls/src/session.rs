//! [`Tls`]: one TLS session over a socket of the engine, as the server or as the client.
//!
//! Contract: after the handshake only the reading task calls [`Tls::recv`] and only the writing task calls
//! [`Tls::send`]. What rustls itself has to send (key updates) goes out with the next message.

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection,
};
use spile_core::{Error, ErrorKind, Result, Segment};
use spile_engine::Socket;

use crate::files::unusable;

/// The most bytes of ciphertext that are received or sent at a time.
const CIPHER_BYTES: usize = 128 << 10;
/// The buffer through which plain bytes pass, in bytes: one TLS record.
const SCRATCH_BYTES: usize = 16 << 10;

/// One TLS session.
pub struct Tls {
    session: RefCell<Connection>,
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
    pub async fn accept(socket: &Socket, config: Arc<ServerConfig>) -> Result<Self> {
        let session = ServerConnection::new(config).map_err(|e| unusable("no session", e))?;
        Self::begin(socket, session.into()).await
    }

    /// Does the TLS handshake, as the client of a server whose certificate must be for `host`.
    ///
    /// # Errors
    /// `InvalidInput` when `host` is no host name; `Denied` when the server's certificate is not good, or ours is not for the server;
    /// else as [`Tls::accept`].
    pub async fn connect(socket: &Socket, config: Arc<ClientConfig>, host: &str) -> Result<Self> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|e| unusable(&format!("{host:?} is no host name"), e).hint("say tls-hostname=NAME in the URI"))?;
        let session = ClientConnection::new(config, name).map_err(|e| unusable("no session", e))?;
        Self::begin(socket, session.into()).await
    }

    async fn begin(socket: &Socket, mut session: Connection) -> Result<Self> {
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
                return Err(Error::new(ErrorKind::Io, "hung up during the TLS handshake"));
            }
            self.feed()?;
        }
        Ok(())
    }

    /// Receives plain bytes into `into`; 0 at the end of the stream.
    ///
    /// # Errors
    /// When the connection is broken, or the peer breaks TLS; `Denied` when it refuses us.
    pub async fn recv(&self, socket: &Socket, into: &Segment) -> Result<usize> {
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
    ///
    /// # Errors
    /// When the connection is broken.
    pub async fn send(&self, socket: &Socket, parts: &[Segment]) -> Result<()> {
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
    pub async fn close(&self, socket: &Socket) {
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
        session.process_new_packets().map_err(failed)?;
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

/// The error of a session that has failed, with what can be done.
fn failed(error: rustls::Error) -> Error {
    let (what, hint) = match &error {
        // A bad signature: an authority of the same name, and not the one that signed.
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => (
            "TLS: no authority that is believed has signed the server's certificate",
            "have the authority's certificate in ca-cert.pem of a folder, and say tls-certificates=DIR in the URI",
        ),
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => (
            "TLS: the server's certificate is for another host",
            "connect to the host that the certificate names, or say tls-hostname=NAME in the URI",
        ),
        rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
            ("TLS: the other side's certificate is not valid", "have the certificate renewed, or the clock set")
        }
        rustls::Error::PeerIncompatible(_)
        | rustls::Error::AlertReceived(AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion) => (
            "TLS: both sides have no version or cipher suite in common",
            "TLS 1.3 is offered, and of TLS 1.2 the suites of ChaCha20-Poly1305",
        ),
        rustls::Error::AlertReceived(_) => (
            "TLS: the other side refuses the connection",
            "a server may ask for a client certificate: client-cert.pem and client-key.pem in the folder of \
             tls-certificates=DIR, signed by an authority that the server believes",
        ),
        _ => return Error::new(ErrorKind::Protocol, "the peer broke the TLS protocol").caused_by(error),
    };
    Error::new(ErrorKind::Denied, what).caused_by(error).hint(hint)
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
