//! A client of NBD for tests: the NBD store, each call of which waits for its end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use spile::uri::NbdUri;
use spile_core::{ErrorKind, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine};
use spile_nbd_wire::client::{GREETING_BYTES, OPTION_REPLY_BYTES, OptionReply, go_data, put_option};
use spile_nbd_wire::handshake::{option, rep};
use spile_nbd_wire::request::{Command, Request};
use spile_store::{NbdFacts, NbdOptions, NbdStore};

/// One connection, which is never made again.
pub struct Client {
    engine: Engine,
    store: Option<NbdStore>,
}

impl Client {
    pub fn connect(uri: &NbdUri) -> Result<Self> {
        Self::connect_with(uri, NbdOptions { reconnect_limit: Duration::ZERO, ..NbdOptions::default() }, 1)
    }

    /// Connects with these options, for so many workers.
    pub fn connect_with(uri: &NbdUri, options: NbdOptions, workers: usize) -> Result<Self> {
        let engine = Engine::start(Config { workers, ..Config::default() })?;
        let uri = uri.clone();
        let store = engine.run_on(0, move || async move {
            match NbdStore::open_with(uri.clone(), OpenMode::ReadWrite, options).await {
                Err(error) if error.kind() == ErrorKind::ReadOnly => {
                    NbdStore::open_with(uri, OpenMode::ReadOnly, options).await
                }
                opened => opened,
            }
        })?;
        Ok(Self { engine, store: Some(store) })
    }

    /// The engine and the store, for what needs more than one call at a time.
    pub fn parts(&self) -> (&Engine, NbdStore) {
        (&self.engine, self.store.clone().expect("it is open"))
    }

    pub fn facts(&self) -> NbdFacts {
        self.parts().1.facts()
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (bytes, (engine, store)) = (Segments::zeroed(into.len()), self.parts());
        let filled = bytes.clone();
        engine.run_on(0, move || async move { store.read_at(StoreOffset(offset), &filled, Via::Direct).await })?;
        into.copy_from_slice(&bytes.to_vec());
        Ok(())
    }

    /// Writes; `durable`: the answer comes when the bytes are durable.
    pub fn write(&self, offset: u64, from: &[u8], durable: bool) -> Result<()> {
        let (bytes, (engine, store)) = (Segments::copied(from), self.parts());
        let at = StoreOffset(offset);
        engine.run_on(0, move || async move {
            match durable {
                true => store.write_durable(at, &bytes).await,
                false => store.write_at(at, &bytes, Via::Direct).await,
            }
        })
    }

    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<()> {
        let (engine, store) = self.parts();
        engine.run_on(0, move || async move { store.punch_hole(StoreOffset(offset), len).await })
    }

    pub fn flush(&self) -> Result<()> {
        let (engine, store) = self.parts();
        engine.run_on(0, move || async move { store.sync().await })
    }
}

impl Drop for Client {
    /// The server has heard the good-bye when this returns.
    fn drop(&mut self) {
        self.store = None;
        self.engine.shutdown();
    }
}

/// A socket after the handshake with the default export, for a client that does not behave.
pub fn raw_connection(socket: &Path) -> UnixStream {
    raw_connection_to(socket, "")
}

/// The same to an export of this name.
pub fn raw_connection_to(socket: &Path, export: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.read_exact(&mut [0; GREETING_BYTES]).unwrap();
    let mut out = 3u32.to_be_bytes().to_vec();
    put_option(&mut out, option::GO, &go_data(export, &[]));
    stream.write_all(&out).unwrap();
    loop {
        let mut head = [0; OPTION_REPLY_BYTES];
        stream.read_exact(&mut head).unwrap();
        let reply = OptionReply::parse(&head).unwrap();
        stream.read_exact(&mut vec![0; reply.len_bytes as usize]).unwrap();
        if reply.kind == rep::ACK {
            return stream;
        }
    }
}

/// The bytes of a request to read from the start.
pub fn read_request(cookie: u64, len_bytes: u32) -> Vec<u8> {
    read_request_at(cookie, 0, len_bytes)
}

/// The bytes of a request to read.
pub fn read_request_at(cookie: u64, offset_bytes: u64, len_bytes: u32) -> Vec<u8> {
    Request { flags: 0, command: Command::Read, cookie, offset_bytes, len_bytes }.encode().to_vec()
}
