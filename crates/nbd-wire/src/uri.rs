//! NBD URIs (as in the NBD project's doc/uri.md) and the addresses in them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port of NBD.
pub const NBD_PORT: u16 = 10809;

/// Where a server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name or IP address (without brackets) and a port.
    Tcp(String, u16),
}

/// `unix:PATH` or `tcp:HOST:PORT` (an IPv6 host in brackets; port 0 lets the system choose).
impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is not an address; write unix:PATH or tcp:HOST:PORT");
        if let Some(path) = text.strip_prefix("unix:") {
            return (!path.is_empty()).then(|| Self::Unix(path.into())).ok_or_else(bad);
        }
        let rest = text.strip_prefix("tcp:").ok_or_else(bad)?;
        let (host, port) = split_host_port(rest).ok_or_else(bad)?;
        Ok(Self::Tcp(host, port.ok_or_else(bad)?))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// One export of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Where.
    pub address: Address,
    /// Which; the empty name is the default export.
    pub export: String,
    /// With TLS (`nbds`), and what is said of it.
    pub tls: Option<TlsQuery>,
}

/// What a URI says of TLS in its query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsQuery {
    /// `tls-certificates=DIR`: the folder of the certificates.
    pub certificates: Option<PathBuf>,
    /// `tls-hostname=NAME`: the host for which the server's certificate must be.
    pub hostname: Option<String>,
    /// `tls-psk-file=FILE`: pre-shared keys.
    pub psk_file: Option<PathBuf>,
}

/// The keys of a [`TlsQuery`], in the order of its fields.
const TLS_KEYS: [&str; 3] = ["tls-certificates", "tls-hostname", "tls-psk-file"];

impl TlsQuery {
    /// The values by their keys.
    fn pairs(&self) -> impl Iterator<Item = (&'static str, Option<String>)> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.to_string_lossy().into_owned());
        TLS_KEYS.into_iter().zip([path(&self.certificates), self.hostname.clone(), path(&self.psk_file)])
    }
}

impl NbdUri {
    /// An export without TLS.
    pub fn new(address: Address, export: impl Into<String>) -> Self {
        Self { address, export: export.into(), tls: None }
    }
}

impl FromStr for NbdUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| not_a_uri(text))?;
        let (tls, unix) = match scheme {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(not_a_uri(text)),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = percent_decode(export).ok_or_else(|| not_a_uri(text))?;
        let address = match unix {
            true => unix_address(text, authority, query)?,
            false => {
                let (host, port) = split_host_port(authority).ok_or_else(|| not_a_uri(text))?;
                Address::Tcp(host, port.unwrap_or(NBD_PORT))
            }
        };
        let tls = tls_query(text, query, tls)?;
        Ok(Self { address, export, tls })
    }
}

fn not_a_uri(text: &str) -> String {
    format!("`{text}` is not an NBD URI; write nbd+unix:///EXPORT?socket=PATH or nbd://HOST:PORT/EXPORT")
}

/// The value of a key of the query; `None` when it is not there or empty.
fn value_of(text: &str, query: &str, key: &str) -> Result<Option<String>, String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let Some((_, value)) = pairs.into_iter().find(|(found, _)| *found == key) else { return Ok(None) };
    let value = percent_decode(value).ok_or_else(|| not_a_uri(text))?;
    Ok(Some(value).filter(|value| !value.is_empty()))
}

fn tls_query(text: &str, query: &str, tls: bool) -> Result<Option<TlsQuery>, String> {
    let [certificates, hostname, psk_file] = TLS_KEYS.map(|key| value_of(text, query, key));
    let (certificates, psk_file) = (certificates?.map(PathBuf::from), psk_file?.map(PathBuf::from));
    let found = TlsQuery { certificates, hostname: hostname?, psk_file };
    let mut keys = query.split('&').filter_map(|pair| pair.split('=').next()).filter(|key| key.starts_with("tls-"));
    match tls {
        true => match keys.find(|key| value_of(text, query, key) == Ok(None) || !TLS_KEYS.contains(key)) {
            // Whoever means to name certificates does not want others.
            Some(key) => Err(format!("`{text}` has no value for `{key}`, or that is none of {}", TLS_KEYS.join(", "))),
            None => Ok(Some(found)),
        },
        // Somebody who speaks of certificates does not want to send data in plain text.
        false if keys.next().is_some() => {
            Err(format!("`{text}` speaks of TLS but does not ask for it; write nbds:// or nbds+unix://"))
        }
        false => Ok(None),
    }
}

fn unix_address(text: &str, authority: &str, query: &str) -> Result<Address, String> {
    match value_of(text, query, "socket")? {
        Some(path) if authority.is_empty() => Ok(Address::Unix(path.into())),
        _ => Err(not_a_uri(text)),
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.tls.is_some() { "s" } else { "" };
        let export = percent_encode(&self.export);
        match &self.address {
            Address::Unix(path) => {
                let socket = percent_encode(&path.to_string_lossy());
                write!(f, "nbd{s}+unix:///{export}?socket={socket}")?;
            }
            Address::Tcp(host, port) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                write!(f, "nbd{s}://{host}:{port}/{export}")?;
            }
        }
        let mut mark = if matches!(self.address, Address::Unix(_)) { '&' } else { '?' };
        for (key, value) in self.tls.iter().flat_map(TlsQuery::pairs) {
            if let Some(value) = value {
                write!(f, "{mark}{key}={}", percent_encode(&value))?;
                mark = '&';
            }
        }
        Ok(())
    }
}

fn split_host_port(text: &str) -> Option<(String, Option<u16>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']')?;
            (host, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        Some(port) => Some(port.parse().ok()?),
        None => None,
    };
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(byte as char);
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

fn hex(digit: u8) -> Option<u8> {
    (digit as char).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_read_back() {
        for text in [
            "nbd+unix:///?socket=/tmp/s",
            "nbds+unix:///a/b%20c?socket=/tmp/a%3Fb",
            "nbd://localhost:10809/",
            "nbds://[::1]:99/x",
            "nbds://h:1/x?tls-certificates=/a%20b&tls-hostname=c.d",
            "nbds+unix:///?socket=/s&tls-certificates=/a",
            "nbds+unix:///?socket=/s&tls-psk-file=/k",
        ] {
            let uri: NbdUri = text.parse().unwrap();
            assert_eq!(uri.to_string(), text);
        }
    }

    #[test]
    fn the_port_may_be_left_out() {
        let uri: NbdUri = "nbd://example".parse().unwrap();
        assert_eq!((uri.address, uri.export.as_str()), (Address::Tcp("example".into(), 10809), ""));
    }

    #[test]
    fn what_is_not_a_uri_is_refused() {
        for text in [
            "",
            "/tmp/s",
            "http://x/",
            "nbd://",
            "nbd+unix:///",
            "nbd+unix://h/?socket=x",
            "nbd://h:x/",
            "nbd+unix:///?socket=%zz",
            "nbd://h/?tls-certificates=/a",
            "nbd+unix:///?socket=/s&tls-hostname=h",
            "nbd://h/?tls-certificates=",
            "nbd://h/?tls-certificate=/a",
            "nbds://h/?tls-certificates=",
            "nbds://h/?tls-certificates",
            "nbds://h/?tls-certificate=/a",
            "nbds://h/?tls-hostname=h&tls-ca=/a",
        ] {
            assert!(text.parse::<NbdUri>().is_err(), "{text}");
        }
    }

    #[test]
    fn listen_addresses() {
        assert_eq!("tcp:[::1]:0".parse(), Ok(Address::Tcp("::1".into(), 0)));
        assert_eq!("unix:/a:b".parse(), Ok(Address::Unix("/a:b".into())));
        for text in ["unix:", "tcp:localhost", "tcp::1", "udp:x:1", ""] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
