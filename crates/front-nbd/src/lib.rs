//! The NBD front: serves disks to NBD clients over Unix and TCP sockets, plain or through TLS.
//!
//! A [`Server`] has exports and listeners and runs on an engine's workers. Each connection lives on one worker;
//! its requests run at the same time and complete in any order. The protocol is the fixed newstyle handshake
//! and its transmission phase as of github.com/NetworkBlockDevice/nbd, doc/proto.md; extended headers are not
//! offered. Clients are not trusted: every length, name and flag is checked before it is used, memory and time
//! per connection are bounded, and a client's mistake ends at most that client's connection.
//!
//! - [`wire`]: pure parsing and encoding, a crate of its own for the client's sake. [`negotiate`]: the handshake as a state machine without I/O.
//! - `connection`, `session`, `intake`, `execute`, `outflow`: one connection and its tasks.
//! - [`contexts`]: what block status tells besides allocation. [`errors`]: the error numbers of the wire. `metrics`: what is counted.
#![forbid(unsafe_code)]

mod budget;
mod connection;
pub mod contexts;
pub mod errors;
mod execute;
mod finder;
mod inbound;
mod intake;
mod metrics;
pub mod negotiate;
mod outflow;
mod server;
mod session;
mod signal;

pub use finder::{Find, Found, Wanted};
pub use server::{Export, Server, ServerConfig};
pub use spile_nbd_tls::ServerFiles as TlsFiles;
pub use spile_nbd_wire as wire;
