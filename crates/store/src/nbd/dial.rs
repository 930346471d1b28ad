//! Reaching a server: the connection, made by a thread of its own because that may wait for a name server, and the
//! handshake on it (fixed newstyle with `OPT_GO`), bounded in time and in the length of everything the server says.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{Either, select};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use spile_core::{Error, ErrorKind, Result, Segment, split_code};
use spile_engine::{Socket, sleep};
use spile_nbd_tls::{ClientConfig, ClientFiles, Tls, Transport};
use spile_nbd_wire::client::{
    GREETING_BYTES, OPTION_REPLY_BYTES, OptionReply, go_data, greeting, info_block_size, info_export, meta_context,
    meta_data, put_option,
};
use spile_nbd_wire::handshake::{FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, KEPT_CONTEXT, info, option, rep};
use spile_nbd_wire::reply::cut;
use spile_nbd_wire::uri::{Address, NbdUri, TlsQuery};

use super::call::{Notify, relock};
use super::options::{NbdFacts, NbdOptions};

/// A server that has not made a connection and shaken hands by then is not there.
const LIMIT: Duration = Duration::from_secs(10);
/// Replies to one option: an export's information comes in a few.
const MAX_REPLIES: usize = 64;
/// What a server takes at most in one request when it does not say.
const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// A connection in the transmission phase.
pub(super) struct Connection {
    pub(super) transport: Transport,
    pub(super) facts: NbdFacts,
    /// Replies are structured.
    pub(super) structured: bool,
    /// The number of `base:allocation`, where the server has it.
    pub(super) allocation: Option<u32>,
    /// What the server says of what keeps the export ([`KEPT_CONTEXT`]).
    pub(super) kept: Option<String>,
}

/// Connects to a server and shakes hands. `who` is a metadata context that says who asks: servers leave out those that they do not know.
///
/// # Errors
/// `TimedOut`; `NotFound` for an export that is not there; `Denied` for a server that asks for TLS, has none, or whose certificate is
/// not good; `Protocol` for a server that breaks it; the system's.
pub(super) async fn dial(uri: &NbdUri, options: &NbdOptions, who: &str) -> Result<Connection> {
    if uri.tls.as_ref().is_some_and(|tls| tls.psk_file.is_some()) {
        let error = Error::new(ErrorKind::Unsupported, "TLS with pre-shared keys (tls-psk-file) is not built in");
        return Err(error.hint("use certificates: tls-certificates=DIR"));
    }
    let work = async {
        let Reached { fd, tls } = connect(uri).await?;
        let transport = Transport::plain(Socket::to_store(fd)?);
        let found = Handshake { transport: &transport, uri, who }.run(options.structured, tls).await?;
        Ok((transport, found))
    };
    match select(pin!(work), pin!(sleep(LIMIT))).await {
        Either::Left((done, _)) => {
            let (transport, Found { facts, structured, allocation, kept }) = done?;
            Ok(Connection { transport, facts, structured, allocation, kept })
        }
        Either::Right(_) => {
            Err(Error::new(ErrorKind::TimedOut, format!("the server did not answer within {} s", LIMIT.as_secs())))
        }
    }
}

/// A server that was reached, and the certificates for it.
struct Reached {
    fd: OwnedFd,
    tls: Option<Arc<ClientConfig>>,
}

/// Connects and reads certificates on a thread of its own, which ends by itself.
async fn connect(uri: &NbdUri) -> Result<Reached> {
    type Place = (Mutex<Option<Result<Reached>>>, Notify);
    let place: Arc<Place> = Arc::default();
    let (theirs, uri) = (place.clone(), uri.clone());
    let thread = std::thread::Builder::new().name("spile-connect".to_owned()).spawn(move || {
        *relock(&theirs.0) = Some(reach(&uri));
        theirs.1.notify();
    });
    thread.map_err(|source| Error::io("start a thread", source))?;
    place.1.wait().await;
    relock(&place.0).take().expect("the thread has left its answer")
}

fn reach(uri: &NbdUri) -> Result<Reached> {
    let load = |tls: &TlsQuery| ClientFiles { folder: tls.certificates.clone() }.load();
    let tls = uri.tls.as_ref().map(load).transpose()?;
    let fd = connect_blocking(&uri.address, LIMIT).map_err(|source| Error::io("cannot connect", source))?;
    Ok(Reached { fd, tls })
}

/// The host for which the server's certificate must be: the one of the URI, unless that says another. On a Unix socket it is this
/// host.
fn host(uri: &NbdUri) -> &str {
    match (uri.tls.as_ref().and_then(|tls| tls.hostname.as_deref()), &uri.address) {
        (Some(host), _) => host,
        (None, Address::Tcp(host, _)) => host,
        (None, Address::Unix(_)) => "localhost",
    }
}

/// Connects, for `limit` at most once the host's addresses are known: each has an equal part of it.
fn connect_blocking(address: &Address, limit: Duration) -> std::io::Result<OwnedFd> {
    match address {
        Address::Unix(path) => connect_unix(path, limit),
        Address::Tcp(host, port) => {
            let addresses: Vec<SocketAddr> = (host.as_str(), *port).to_socket_addrs()?.collect();
            let mut last = std::io::Error::other("the host has no address");
            for address in &addresses {
                match TcpStream::connect_timeout(address, limit / addresses.len() as u32) {
                    Ok(stream) => return stream.set_nodelay(true).map(|()| stream.into()),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Connects to a Unix socket. A server that does not accept, and has its queue full, lets a connect wait for ever without a
/// limit of time for sends.
fn connect_unix(path: &Path, limit: Duration) -> std::io::Result<OwnedFd> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(limit))?;
    match rustix::net::connect(&fd, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => Err(Errno::TIMEDOUT)?,
        done => done?,
    }
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, None)?;
    Ok(fd)
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, what)
}

/// What a handshake has found.
struct Found {
    facts: NbdFacts,
    structured: bool,
    allocation: Option<u32>,
    kept: Option<String>,
}

struct Handshake<'a> {
    transport: &'a Transport,
    uri: &'a NbdUri,
    who: &'a str,
}

impl Handshake<'_> {
    async fn run(&self, structured: bool, tls: Option<Arc<ClientConfig>>) -> Result<Found> {
        let hello = self.receive::<GREETING_BYTES>().await?;
        let flags = greeting(&hello).ok_or_else(|| broken("this is no NBD server of the newstyle handshake"))?;
        if flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(broken("the server lacks the fixed newstyle handshake"));
        }
        let ours = u32::from(flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES));
        self.send(&ours.to_be_bytes()).await?;
        if let Some(config) = tls {
            self.start_tls(config).await?;
        }
        let structured = structured && self.ask(option::STRUCTURED_REPLY, &[], |_, _| Ok(())).await?.is_ok();
        let (mut allocation, mut kept) = (None, None);
        if structured {
            let data = meta_data(&self.uri.export, &["base:allocation", self.who, KEPT_CONTEXT]);
            let note = |kind, data: &[u8]| {
                match meta_context(data).filter(|_| kind == rep::META_CONTEXT) {
                    Some((number, "base:allocation")) => allocation = Some(number),
                    Some((_, name)) => {
                        let text = name.strip_prefix(KEPT_CONTEXT).and_then(|rest| rest.strip_prefix('='));
                        kept = text.map(str::to_owned).or(kept.take());
                    }
                    None => {}
                }
                Ok(())
            };
            // A server without it says so, and all of its export is data.
            let _ = self.ask(option::SET_META_CONTEXT, &data, note).await?;
        }
        Ok(Found { facts: self.go().await?, structured, allocation, kept })
    }

    /// Nothing that came before TLS is believed: no option was asked yet, and all that came was taken.
    async fn start_tls(&self, config: Arc<ClientConfig>) -> Result<()> {
        self.ask(option::STARTTLS, &[], |_, _| Ok(())).await?.map_err(|refused| {
            let error = Error::new(ErrorKind::Denied, "the server does not offer TLS").caused_by(refused);
            error.hint("switch TLS on in the server, or use nbd:// over a network that you trust")
        })?;
        let tls = Tls::connect(self.transport.socket(), config, host(self.uri)).await?;
        self.transport.start_tls(tls)
    }

    async fn go(&self) -> Result<NbdFacts> {
        let (mut export, mut sizes) = (None, (1, 1, MAX_PAYLOAD_BYTES));
        let note = |kind, data: &[u8]| {
            let (rep::INFO, Some((kind, data))) = (kind, data.split_first_chunk()) else { return Ok(()) };
            match u16::from_be_bytes(*kind) {
                info::EXPORT => export = Some(info_export(data).ok_or_else(|| broken("a bad INFO_EXPORT"))?),
                info::BLOCK_SIZE => {
                    sizes = info_block_size(data).ok_or_else(|| broken("block sizes that contradict each other"))?;
                }
                _ => {}
            }
            Ok(())
        };
        self.ask(option::GO, &go_data(&self.uri.export, &[info::BLOCK_SIZE]), note).await??;
        let (size_bytes, flags) = export.ok_or_else(|| broken("the server did not say how long the export is"))?;
        if size_bytes > i64::MAX as u64 {
            return Err(broken("the export is longer than any disk"));
        }
        let min = sizes.0;
        let max_payload_bytes = sizes.2.min(MAX_PAYLOAD_BYTES) / min * min;
        Ok(NbdFacts {
            size_bytes: size_bytes / u64::from(min) * u64::from(min),
            flags,
            min_block_bytes: min,
            max_payload_bytes,
        })
    }

    /// Asks one option, has `note` see each reply before the last, and returns whether it was granted.
    async fn ask(
        &self,
        number: u32,
        data: &[u8],
        mut note: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<Result<()>> {
        let mut out = Vec::new();
        put_option(&mut out, number, data);
        self.send(&out).await?;
        for _ in 0..MAX_REPLIES {
            let head = self.receive::<OPTION_REPLY_BYTES>().await?;
            let head = OptionReply::parse(&head).ok_or_else(|| broken("a bad reply to an option"))?;
            if head.option != number {
                return Err(broken("a reply to another option than was asked"));
            }
            let data = self.receive_vec(head.len_bytes as usize).await?;
            match head.kind {
                rep::ACK => return Ok(Ok(())),
                _ if head.is_error() => return Ok(Err(refusal(head.kind, &data))),
                kind => note(kind, &data)?,
            }
        }
        Err(broken("too many replies to an option"))
    }

    async fn send(&self, bytes: &[u8]) -> Result<()> {
        let segment = Segment::zeroed(bytes.len());
        segment.copy_from_slice(0, bytes);
        match self.transport.send(&[segment]).await {
            Ok(()) => Ok(()),
            Err(failed) => Err(self.last_word().await.unwrap_or(failed)),
        }
    }

    /// Why a server that does not listen any more has refused us, if it said so in TLS.
    async fn last_word(&self) -> Option<Error> {
        self.transport.recv(&Segment::zeroed(1)).await.err().filter(|error| error.kind() == ErrorKind::Denied)
    }

    async fn receive<const N: usize>(&self) -> Result<[u8; N]> {
        let bytes = self.receive_vec(N).await?;
        Ok(bytes.try_into().expect("as many as asked for"))
    }

    async fn receive_vec(&self, len: usize) -> Result<Vec<u8>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let segment = Segment::zeroed(len);
        match self.transport.recv_exact(&segment).await? {
            true => Ok(segment.to_vec()),
            false => Err(Error::new(ErrorKind::Io, "the server hung up during the handshake")),
        }
    }
}

/// The error of an option that was refused. The server's words are quoted: they go to a terminal.
fn refusal(kind: u32, data: &[u8]) -> Error {
    let words = String::from_utf8_lossy(data);
    let (code, words) = split_code(&words);
    let words = cut(words, 200);
    let said = if words.is_empty() { String::new() } else { format!(": {words:?}") };
    let error = |kind, what: &str| {
        let error = Error::new(kind, format!("{what}{said}"));
        code.into_iter().fold(error, Error::coded)
    };
    match kind {
        rep::ERR_UNKNOWN => error(ErrorKind::NotFound, "the server has no such export"),
        rep::ERR_POLICY => error(ErrorKind::Denied, "the server refuses"),
        rep::ERR_TLS_REQD => error(ErrorKind::Denied, "the server asks for TLS")
            .hint("use nbds:// (nbds+unix:// on a Unix socket) with tls-certificates=DIR"),
        _ => error(ErrorKind::Unsupported, "the server refuses the export"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use spile_core::Code;

    use super::*;

    #[test]
    fn a_refusal_has_the_code_that_stands_before_its_words() {
        let said = |words: &str| refusal(rep::ERR_POLICY, words.as_bytes());
        let coded = said("[name_free] nothing has it");
        assert!(coded.is(Code::NameFree) && coded.message() == "the server refuses: \"nothing has it\"", "{coded}");
        for words in ["[other] no", "name_free", "[name_free]"] {
            let plain = said(words);
            assert!(plain.code().is_none() && plain.message().contains(words), "{plain}");
        }
    }

    #[test]
    fn a_unix_socket_whose_server_does_not_accept_is_left_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let address = Address::Unix(path);
        rustix::net::listen(&listener, 0).unwrap();
        let limit = Duration::from_millis(100);
        let first = connect_blocking(&address, limit).unwrap();
        assert_eq!(sockopt::socket_timeout(&first, sockopt::Timeout::Send).unwrap(), None, "for the connect only");
        let begin = Instant::now();
        assert_eq!(connect_blocking(&address, limit).unwrap_err().kind(), std::io::ErrorKind::TimedOut);
        assert!(begin.elapsed() >= limit);
    }
}
