//! The NBD client and servers that die or stall: what is sent again, what fails, and which flushes may still succeed.

mod nbd_server;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nbd_server::{FLUSHES, MANY, Reaction, Server};
use spile_core::{ErrorKind, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine};
use spile_nbd_wire::request::Command;
use spile_store::{NbdOptions, NbdStore};

const LEN: usize = 4096;
const SHORT: Duration = Duration::from_millis(200);

/// A store with two workers.
struct Client {
    engine: Engine,
    store: Option<NbdStore>,
}

impl Client {
    fn connect(server: &Server, options: NbdOptions) -> Self {
        let engine = Engine::start(Config { workers: 2, ..Config::default() }).unwrap();
        let (uri, options) = (server.uri(), NbdOptions { structured: false, ..options });
        let store = engine.run_on(0, move || NbdStore::open_with(uri, OpenMode::ReadWrite, options)).unwrap();
        Self { engine, store: Some(store) }
    }

    fn write(&self, worker: usize) -> Result<()> {
        let store = self.store.clone().unwrap();
        let from = Segments::zeroed(LEN);
        self.engine.run_on(worker, move || async move { store.write_at(StoreOffset(0), &from, Via::Direct).await })
    }

    fn read(&self, worker: usize) -> Result<()> {
        let store = self.store.clone().unwrap();
        let into = Segments::zeroed(LEN);
        self.engine.run_on(worker, move || async move { store.read_at(StoreOffset(0), &into, Via::Direct).await })
    }

    fn sync(&self, worker: usize) -> Result<()> {
        let store = self.store.clone().unwrap();
        self.engine.run_on(worker, move || async move { store.sync().await })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.store = None;
        self.engine.shutdown();
    }
}

#[track_caller]
fn assert_lost(outcome: Result<()>) {
    let error = outcome.unwrap_err();
    assert!(error.to_string().contains("may be gone"), "{error}");
}

#[test]
fn a_flush_covers_the_writes_of_every_connection() {
    let server = Server::start(MANY, |_, _| Reaction::Done);
    let client = Client::connect(&server, NbdOptions::default());
    client.write(0).unwrap();
    client.write(1).unwrap();
    client.sync(1).unwrap();
    assert_eq!(server.connections_with(Command::Flush), [0, 1]);
    // There is nothing to flush any more: one is enough.
    client.sync(1).unwrap();
    assert_eq!(server.connections_with(Command::Flush), [0, 1, 1]);
}

/// The server has lost the write of the first connection when the second one is made, and the first does not know it.
#[test]
fn a_flush_does_not_succeed_through_a_server_that_has_come_back_without_the_write() {
    let server = Server::start(MANY, |connection, command| match (connection, command) {
        (0, Command::Flush) => Reaction::HangUp,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions::default());
    client.write(0).unwrap();
    assert_lost(client.sync(1));
    assert_lost(client.sync(0));
}

#[test]
fn a_connection_that_is_lost_with_nothing_unflushed_fails_no_flush() {
    let server = Server::start(MANY, |connection, command| match (connection, command) {
        (0, Command::Read) => Reaction::HangUp,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions::default());
    client.write(0).unwrap();
    client.sync(0).unwrap();
    client.write(1).unwrap();
    client.read(0).unwrap();
    client.sync(0).unwrap();
    assert_eq!(server.connections_with(Command::Read), [0, 2], "the read was sent again on a new connection");
}

/// The stalled server may do the write at any later time, so that the write must not be sent again.
#[test]
fn a_write_that_a_server_does_not_answer_fails_and_so_does_every_later_flush() {
    let server = Server::start(FLUSHES, |connection, _| match connection {
        0 => Reaction::Silence,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions { answer_limit: SHORT, ..NbdOptions::default() });
    let error = client.write(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert_eq!(server.connections_with(Command::Write), [0], "it was sent once");
    client.read(0).unwrap();
    assert_lost(client.sync(0));
}

#[test]
fn a_read_that_a_server_does_not_answer_is_sent_again_and_fails_no_flush() {
    let server = Server::start(FLUSHES, |connection, command| match (connection, command) {
        (0, Command::Read) => Reaction::Silence,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions { answer_limit: SHORT, ..NbdOptions::default() });
    client.write(0).unwrap();
    client.sync(0).unwrap();
    client.read(0).unwrap();
    assert_eq!(server.connections_with(Command::Read), [0, 1]);
    client.sync(0).unwrap();
}

/// The server would be found well after 200 connections.
#[test]
fn a_server_that_hangs_up_at_each_request_is_left_after_a_while() {
    let server = Server::start(FLUSHES, |connection, _| match connection {
        0..200 => Reaction::HangUp,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions { reconnect_limit: SHORT, ..NbdOptions::default() });
    let error = client.read(0).unwrap_err();
    assert!(error.to_string().contains("hung up"), "{error}");
    let tries = server.connections_with(Command::Read).len();
    assert!((2..10).contains(&tries), "{tries}");
}

/// Other requests that are answered meanwhile do not keep one alive that ends each connection.
#[test]
fn a_request_at_which_the_server_hangs_up_fails_among_others_that_are_answered() {
    let server = Server::start(FLUSHES, |connection, command| match (connection, command) {
        (0..200, Command::Write) => Reaction::HangUp,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions { reconnect_limit: SHORT, ..NbdOptions::default() });
    let reader = client.store.clone().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = is_over.clone();
    client.engine.spawn_on(0, move || async move {
        while !seen.load(Ordering::SeqCst) {
            // It fails too when the time is over.
            let _ = reader.read_at(StoreOffset(0), &Segments::zeroed(LEN), Via::Direct).await;
        }
    });
    let written = client.write(0);
    is_over.store(true, Ordering::SeqCst);
    written.unwrap_err();
}

#[test]
fn without_reconnecting_each_worker_connects_once() {
    let server = Server::start(MANY, |connection, command| match (connection, command) {
        (1, Command::Write) => Reaction::HangUp,
        _ => Reaction::Done,
    });
    let client = Client::connect(&server, NbdOptions { reconnect_limit: Duration::ZERO, ..NbdOptions::default() });
    client.read(0).unwrap();
    client.read(1).unwrap();
    client.write(1).unwrap_err();
    client.read(1).unwrap_err();
    assert_eq!(server.connections_with(Command::Read), [0, 1]);
}
