//! An NBD server for tests of the client: an honest handshake, and the rest as the test says.
#![allow(dead_code, reason = "each test program uses its part")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use spile_nbd_wire::handshake::{
    OPTION_HEADER_BYTES, OptionHeader, option, put_greeting, put_reply, rep, transmission,
};
use spile_nbd_wire::reply;
use spile_nbd_wire::request::{Command, REQUEST_BYTES, Request};
use spile_nbd_wire::uri::{Address, NbdUri};
use tempfile::TempDir;

const SIZE_BYTES: u64 = 16 << 20;
/// A server with a flush, on one connection.
pub const FLUSHES: u16 = transmission::HAS_FLAGS | transmission::SEND_FLUSH;
/// The same on several connections.
pub const MANY: u16 = FLUSHES | transmission::CAN_MULTI_CONN;

pub fn read_exact<const N: usize>(stream: &mut UnixStream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).ok().map(|()| bytes)
}

/// The server's side of the handshake, honest; `None` when the client has gone.
pub fn shake_hands(stream: &mut UnixStream, flags: u16) -> Option<()> {
    let mut out = Vec::new();
    put_greeting(&mut out);
    stream.write_all(&out).ok()?;
    read_exact::<4>(stream)?;
    loop {
        let head = OptionHeader::parse(&read_exact::<OPTION_HEADER_BYTES>(stream)?)?;
        let mut data = vec![0; head.len_bytes as usize];
        stream.read_exact(&mut data).ok()?;
        let mut out = Vec::new();
        if head.option == option::GO {
            let info = [&[0, 0][..], &SIZE_BYTES.to_be_bytes(), &flags.to_be_bytes()].concat();
            put_reply(&mut out, head.option, rep::INFO, &[&info]);
        }
        put_reply(&mut out, head.option, rep::ACK, &[]);
        stream.write_all(&out).ok()?;
        if head.option == option::GO {
            return Some(());
        }
    }
}

/// What a server does with a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// It says that the request is done; a read has zeroes.
    Done,
    /// It says nothing.
    Silence,
    /// It hangs up.
    HangUp,
}

/// Tells what to do with a request, by the connection's number, counted from 0.
type React = fn(usize, Command) -> Reaction;

/// A server with simple replies, with a thread for each connection.
pub struct Server {
    folder: TempDir,
    /// The requests that came, with the numbers of their connections.
    seen: Arc<Mutex<Vec<(usize, Command)>>>,
}

impl Server {
    pub fn start(flags: u16, react: React) -> Self {
        let server = Self { folder: tempfile::tempdir().unwrap(), seen: Arc::default() };
        let (listener, seen) = (UnixListener::bind(server.path()).unwrap(), server.seen.clone());
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (stream, seen) = (stream.unwrap(), seen.clone());
                std::thread::spawn(move || {
                    serve(stream, flags, &|command| {
                        seen.lock().unwrap().push((number, command));
                        react(number, command)
                    })
                });
            }
        });
        server
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub fn uri(&self) -> NbdUri {
        NbdUri::new(Address::Unix(self.path()), "")
    }

    /// The connections on which this command came, sorted.
    pub fn connections_with(&self, command: Command) -> Vec<usize> {
        let seen = self.seen.lock().unwrap();
        let mut numbers: Vec<usize> = seen.iter().filter(|one| one.1 == command).map(|one| one.0).collect();
        numbers.sort_unstable();
        numbers
    }
}

/// Serves one connection; `None` when it has ended.
fn serve(mut stream: UnixStream, flags: u16, react: &dyn Fn(Command) -> Reaction) -> Option<()> {
    shake_hands(&mut stream, flags)?;
    loop {
        let request = Request::parse(&read_exact::<REQUEST_BYTES>(&mut stream)?)?;
        let mut payload = vec![0; request.len_bytes as usize];
        if request.command == Command::Write {
            stream.read_exact(&mut payload).ok()?;
        }
        match react(request.command) {
            Reaction::HangUp => return None,
            Reaction::Silence => continue,
            Reaction::Done => stream.write_all(&reply::simple(request.cookie, 0)).ok()?,
        }
        if request.command == Command::Read {
            stream.write_all(&payload).ok()?;
        }
    }
}
