//! A blocking NBD client: the handshake, one request at a time, and the socket for those who pipeline.
//!
//! Fixed newstyle with GO, simple replies only (no structured replies are asked for), no TLS. Written from the
//! NBD protocol document; used by `spile load` and by the tests.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};

use spile_server::uri::{Address, NbdUri};

const MAGIC_NBD: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const MAGIC_REQUEST: u32 = 0x2560_9513;
const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;

const OPTION_ABORT: u32 = 2;
const OPTION_LIST: u32 = 3;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_SERVER: u32 = 2;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The bytes of a request before its data.
pub const REQUEST_BYTES: usize = 28;
/// The bytes of a simple reply before its data.
pub const REPLY_BYTES: usize = 16;

/// The commands of the transmission phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Bytes come back.
    Read = 0,
    /// Bytes follow.
    Write = 1,
    /// An orderly end; no reply.
    Disconnect = 2,
    /// All replied writes become durable.
    Flush = 3,
    /// The range may be freed.
    Trim = 4,
    /// The range becomes zeroes.
    WriteZeroes = 6,
}

/// Request flag: durable before the reply.
pub const FLAG_FUA: u16 = 1;

/// Transmission flags of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportFlags(pub u16);

impl ExportFlags {
    /// Writes are refused.
    pub fn read_only(self) -> bool {
        self.0 & 1 << 1 != 0
    }
    /// FLUSH is served.
    pub fn flush(self) -> bool {
        self.0 & 1 << 2 != 0
    }
    /// FUA is served.
    pub fn fua(self) -> bool {
        self.0 & 1 << 3 != 0
    }
    /// TRIM is served.
    pub fn trim(self) -> bool {
        self.0 & 1 << 5 != 0
    }
    /// WRITE_ZEROES is served.
    pub fn write_zeroes(self) -> bool {
        self.0 & 1 << 6 != 0
    }
    /// Several connections see each other's writes and flushes.
    pub fn multi_conn(self) -> bool {
        self.0 & 1 << 8 != 0
    }
}

/// What the server said of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The size in bytes.
    pub size_bytes: u64,
    /// What it can do.
    pub flags: ExportFlags,
    /// Requests must be multiples of this many bytes (1 when the server did not say).
    pub min_block_bytes: u32,
    /// The largest payload in bytes (32 MiB when the server did not say).
    pub max_block_bytes: u32,
}

/// A connected socket of either family.
#[derive(Debug)]
pub enum Stream {
    /// A Unix socket.
    Unix(UnixStream),
    /// A TCP socket.
    Tcp(TcpStream),
}

impl Stream {
    /// Connects to `address`.
    ///
    /// # Errors
    /// With the address in the message.
    pub fn connect(address: &Address) -> Result<Self> {
        let stream = match address {
            Address::Unix(path) => UnixStream::connect(path).map(Self::Unix),
            Address::Tcp(host, port) => TcpStream::connect((host.as_str(), *port)).and_then(|stream| {
                stream.set_nodelay(true)?;
                Ok(Self::Tcp(stream))
            }),
        };
        stream.map_err(|e| Error::io(format!("cannot connect to {address}"), e))
    }

    /// How long a read or a write may block before it fails; `None` = for ever.
    ///
    /// # Errors
    /// When the socket refuses.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(s) => s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout)),
            Self::Tcp(s) => s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout)),
        }
    }

    /// Ends one or both directions.
    ///
    /// # Errors
    /// When the socket is not connected any more.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Unix(s) => s.shutdown(how),
            Self::Tcp(s) => s.shutdown(how),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(s) => s.as_fd(),
            Self::Tcp(s) => s.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(s) => s.read(into),
            Self::Tcp(s) => s.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(s) => s.write(from),
            Self::Tcp(s) => s.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection in the transmission phase.
#[derive(Debug)]
pub struct Client {
    stream: Stream,
    info: ExportInfo,
    next_cookie: u64,
}

impl Client {
    /// Connects and negotiates the export of `uri`.
    ///
    /// # Errors
    /// `NotFound` for an unknown export, `Unsupported` for `nbds`, `Protocol` for a server that is not one.
    pub fn connect(uri: &NbdUri) -> Result<Self> {
        Self::connect_inner(uri).map_err(|e| Error::new(e.kind(), format!("cannot use {uri}")).caused_by(e))
    }

    fn connect_inner(uri: &NbdUri) -> Result<Self> {
        if uri.tls {
            return Err(Error::new(ErrorKind::Unsupported, "this client does not speak TLS"));
        }
        let mut stream = Stream::connect(&uri.address)?;
        stream.set_timeout(Some(Duration::from_secs(30))).map_err(|e| Error::io("socket", e))?;
        greet(&mut stream)?;
        let info = go(&mut stream, &uri.export)?;
        Ok(Self { stream, info, next_cookie: 1 })
    }

    /// The names of the exports that the server at `address` lists.
    ///
    /// # Errors
    /// `Denied` or `Unsupported` when it does not list.
    pub fn list(address: &Address) -> Result<Vec<String>> {
        let mut stream = Stream::connect(address)?;
        stream.set_timeout(Some(Duration::from_secs(30))).map_err(|e| Error::io("socket", e))?;
        greet(&mut stream)?;
        send_option(&mut stream, OPTION_LIST, &[])?;
        let mut names = Vec::new();
        each_reply(&mut stream, OPTION_LIST, |kind, data| match kind {
            REPLY_SERVER => listed_name(data).map(|name| names.push(name)),
            _ => Ok(()),
        })?;
        send_option(&mut stream, OPTION_ABORT, &[])?;
        Ok(names)
    }

    /// What the server said of the export.
    pub fn info(&self) -> ExportInfo {
        self.info
    }

    /// The socket, for a caller that pipelines its own requests.
    pub fn into_stream(self) -> Stream {
        self.stream
    }

    /// The socket.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Fills `into` from `offset_bytes`.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn read(&mut self, offset_bytes: u64, into: &mut [u8]) -> Result<()> {
        self.request(Command::Read, 0, offset_bytes, into.len(), &[], into)
    }

    /// Writes `from` at `offset_bytes`.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn write(&mut self, offset_bytes: u64, from: &[u8], fua: bool) -> Result<()> {
        let flags = if fua { FLAG_FUA } else { 0 };
        self.request(Command::Write, flags, offset_bytes, from.len(), from, &mut [])
    }

    /// Makes what was replied to before durable.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn flush(&mut self) -> Result<()> {
        self.request(Command::Flush, 0, 0, 0, &[], &mut [])
    }

    /// Frees a range.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn trim(&mut self, offset_bytes: u64, len_bytes: usize) -> Result<()> {
        self.request(Command::Trim, 0, offset_bytes, len_bytes, &[], &mut [])
    }

    /// Zeroes a range; it may be freed.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn write_zeroes(&mut self, offset_bytes: u64, len_bytes: usize) -> Result<()> {
        self.request(Command::WriteZeroes, 0, offset_bytes, len_bytes, &[], &mut [])
    }

    /// Ends the connection in order.
    ///
    /// # Errors
    /// When it was lost before.
    pub fn disconnect(mut self) -> Result<()> {
        let header = request_header(Command::Disconnect, 0, 0, 0, 0);
        self.stream.write_all(&header).map_err(lost)
    }

    fn request(
        &mut self,
        command: Command,
        flags: u16,
        offset_bytes: u64,
        len: usize,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<()> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let len = u32::try_from(len).map_err(|_| Error::new(ErrorKind::InvalidInput, "a request of 4 GiB or more"))?;
        let header = request_header(command, flags, cookie, offset_bytes, len);
        self.stream.write_all(&header).map_err(lost)?;
        self.stream.write_all(data).map_err(lost)?;
        let mut head = [0; REPLY_BYTES];
        self.stream.read_exact(&mut head).map_err(lost)?;
        let reply = parse_reply(&head)?;
        if reply.cookie != cookie {
            return Err(protocol("a reply with a cookie that was not asked for"));
        }
        match reply.errno {
            0 => self.stream.read_exact(into).map_err(lost),
            errno => Err(server_error(command, offset_bytes, errno)),
        }
    }
}

/// The bytes of one request.
pub fn request_header(
    command: Command,
    flags: u16,
    cookie: u64,
    offset_bytes: u64,
    len_bytes: u32,
) -> [u8; REQUEST_BYTES] {
    let mut header = [0; REQUEST_BYTES];
    header[0..4].copy_from_slice(&MAGIC_REQUEST.to_be_bytes());
    header[4..6].copy_from_slice(&flags.to_be_bytes());
    header[6..8].copy_from_slice(&(command as u16).to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..24].copy_from_slice(&offset_bytes.to_be_bytes());
    header[24..28].copy_from_slice(&len_bytes.to_be_bytes());
    header
}

/// The head of a simple reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0, or the wire's error.
    pub errno: u32,
    /// The request's.
    pub cookie: u64,
}

/// Reads the head of a simple reply.
///
/// # Errors
/// `Protocol` when the magic is wrong.
pub fn parse_reply(head: &[u8; REPLY_BYTES]) -> Result<Reply> {
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if word(0) != MAGIC_SIMPLE_REPLY {
        return Err(protocol("a reply with a wrong magic number"));
    }
    Ok(Reply { errno: word(4), cookie: u64::from(word(8)) << 32 | u64::from(word(12)) })
}

/// The error that stands for a server's errno.
pub fn server_error(command: Command, offset_bytes: u64, errno: u32) -> Error {
    // NBD fixes its own numbers; all but ESHUTDOWN (108) and EOVERFLOW (75) are Linux's on every system.
    Error::errno(format!("the server refused {command:?}"), errno as i32).at_offset(offset_bytes)
}

fn protocol(message: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the server broke the NBD protocol: {message}"))
}

fn lost(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => Error::new(ErrorKind::TimedOut, "the server did not answer in time"),
        _ => Error::io("the connection was lost", error),
    }
}

fn greet(stream: &mut Stream) -> Result<()> {
    let mut hello = [0; 18];
    stream.read_exact(&mut hello).map_err(lost)?;
    if be64(&hello[0..8]) != MAGIC_NBD || be64(&hello[8..16]) != MAGIC_OPTION {
        return Err(protocol("it does not greet as a newstyle NBD server"));
    }
    if hello[17] & 1 == 0 {
        return Err(protocol("it does not offer the fixed newstyle handshake"));
    }
    let no_zeroes = u32::from(hello[17] & 2);
    stream.write_all(&(1 | no_zeroes).to_be_bytes()).map_err(lost)
}

fn send_option(stream: &mut Stream, option: u32, data: &[u8]) -> Result<()> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend(MAGIC_OPTION.to_be_bytes());
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes).map_err(lost)
}

fn read_option_reply(stream: &mut Stream, option: u32) -> Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    stream.read_exact(&mut head).map_err(lost)?;
    if be64(&head[0..8]) != MAGIC_OPTION_REPLY || be32(&head[8..12]) != option {
        return Err(protocol("it answered another option than was sent"));
    }
    let len = be32(&head[16..20]) as usize;
    if len > 1 << 20 {
        return Err(protocol("an option reply of more than 1 MiB"));
    }
    let mut data = vec![0; len];
    stream.read_exact(&mut data).map_err(lost)?;
    Ok((be32(&head[12..16]), data))
}

/// No server has so many exports, or so much to say of one.
const MAX_REPLIES: usize = 10_000;

/// Hands the replies to an option to `take`, up to the one that ends them.
fn each_reply(stream: &mut Stream, option: u32, mut take: impl FnMut(u32, &[u8]) -> Result<()>) -> Result<()> {
    for _ in 0..MAX_REPLIES {
        match read_option_reply(stream, option)? {
            (REPLY_ACK, _) => return Ok(()),
            (kind, data) if kind >> 31 == 1 => return Err(option_error(kind, &data)),
            (kind, data) => take(kind, &data)?,
        }
    }
    Err(protocol("it answers an option without end"))
}

fn go(stream: &mut Stream, export: &str) -> Result<ExportInfo> {
    let mut data = Vec::with_capacity(8 + export.len());
    data.extend((export.len() as u32).to_be_bytes());
    data.extend(export.as_bytes());
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    send_option(stream, OPTION_GO, &data)?;
    let mut info = None;
    let (mut min_block_bytes, mut max_block_bytes) = (1, 32 << 20);
    each_reply(stream, OPTION_GO, |kind, data| {
        match (kind, data.len()) {
            (REPLY_INFO, 12) if be16(data) == INFO_EXPORT => {
                info = Some((be64(&data[2..10]), ExportFlags(be16(&data[10..12]))));
            }
            (REPLY_INFO, 14) if be16(data) == INFO_BLOCK_SIZE => {
                min_block_bytes = be32(&data[2..6]);
                max_block_bytes = be32(&data[10..14]);
            }
            _ => {}
        }
        Ok(())
    })?;
    let (size_bytes, flags) = info.ok_or_else(|| protocol("it did not describe the export"))?;
    Ok(ExportInfo { size_bytes, flags, min_block_bytes, max_block_bytes })
}

fn listed_name(data: &[u8]) -> Result<String> {
    let bad = || protocol("a listed export whose name has a wrong length");
    let len = data.get(0..4).map(be32).ok_or_else(bad)? as usize;
    let name = data.get(4..4 + len).ok_or_else(bad)?;
    Ok(String::from_utf8_lossy(name).into_owned())
}

fn option_error(reply: u32, data: &[u8]) -> Error {
    let (kind, text) = match reply {
        0x8000_0001 => (ErrorKind::Unsupported, "the server does not know the option"),
        0x8000_0002 => (ErrorKind::Denied, "the server's policy refused"),
        0x8000_0005 => (ErrorKind::Denied, "the server demands TLS"),
        0x8000_0006 => (ErrorKind::NotFound, "the server has no such export"),
        0x8000_0007 => (ErrorKind::Shutdown, "the server is shutting down"),
        _ => (ErrorKind::Protocol, "the server refused the export"),
    };
    let detail = String::from_utf8_lossy(data);
    match detail.is_empty() {
        true => Error::new(kind, text),
        false => Error::new(kind, format!("{text} ({detail})")),
    }
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(bytes)) << 32 | u64::from(be32(&bytes[4..]))
}
