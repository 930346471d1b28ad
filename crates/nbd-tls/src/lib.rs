//! TLS for NBD, as server and as client: certificates from files, and a session over a socket of the engine.
//!
//! [`ServerFiles`] and [`ClientFiles`] read certificates. [`Transport`] is a connection's socket, plain at first and with TLS from
//! [`Transport::start_tls`] on; [`Tls`] is the session. rustls works in memory only, so the bytes go through the same worker and
//! ring as those of plain connections.
//!
//! rustls has no external pre-shared keys, so there is no TLS-PSK here.
#![forbid(unsafe_code)]

mod files;
mod session;
mod transport;

pub use files::{ClientFiles, ServerFiles};
pub use rustls::{ClientConfig, ServerConfig};
pub use session::Tls;
pub use transport::Transport;
