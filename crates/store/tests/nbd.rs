//! The NBD client against servers that break the protocol: none of their replies is believed, and the request is sent again
//! on the next connection.

mod nbd_server;

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use nbd_server::{FLUSHES, read_exact, shake_hands};
use spile_core::{ErrorKind, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine};
use spile_nbd_wire::client::{go_data, put_option};
use spile_nbd_wire::handshake::option;
use spile_nbd_wire::reply;
use spile_nbd_wire::request::{Command, REQUEST_BYTES, Request};
use spile_nbd_wire::uri::{Address, NbdUri};
use spile_store::{NbdOptions, NbdStore};

const LEN: u32 = 4096;

/// What a server answers to a read, as bytes.
type Answer = fn(&Request) -> Vec<u8>;

/// Serves each connection with the next of `answers`, and all after them honestly.
fn serve(listener: &UnixListener, answers: &[Answer]) {
    for number in 0.. {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let answer = answers.get(number).copied().unwrap_or(honest);
        if shake_hands(&mut stream, FLUSHES).is_none() {
            continue;
        }
        while let Some(request) = read_exact::<REQUEST_BYTES>(&mut stream).and_then(|bytes| Request::parse(&bytes)) {
            if request.command == Command::Disconnect {
                return;
            }
            let _ = stream.write_all(&answer(&request));
        }
    }
}

/// A chunk of data that an honest server would not send.
fn data(request: &Request, offset: u64, len: u32, done: bool) -> Vec<u8> {
    chunk(request, offset, len, done, 0xee)
}

fn chunk(request: &Request, offset: u64, len: u32, done: bool, byte: u8) -> Vec<u8> {
    let head = reply::offset_data(request.cookie, done, offset, len);
    [&head[..], &vec![byte; len as usize]].concat()
}

fn honest(request: &Request) -> Vec<u8> {
    let half = request.len_bytes / 2;
    let second = chunk(request, request.offset_bytes + u64::from(half), half, false, 0x5a);
    [second, chunk(request, request.offset_bytes, half, true, 0x5a)].concat()
}

/// Reads once from a server that answers the first connections so. The bytes must be the honest server's.
fn read_through(answers: &'static [Answer]) {
    read_with(answers, NbdOptions::default()).unwrap();
}

/// As [`read_through`], with these options.
fn read_with(answers: &'static [Answer], options: NbdOptions) -> Result<()> {
    read_many(answers, options, LEN)
}

fn read_many(answers: &'static [Answer], options: NbdOptions, len: u32) -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || serve(&listener, answers));
    let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
    let uri = NbdUri::new(Address::Unix(path.clone()), "");
    let outcome = engine.run_on(0, move || async move {
        let store = NbdStore::open_with(uri, OpenMode::ReadOnly, options).await.unwrap();
        let into = Segments::zeroed(len as usize);
        store.read_at(StoreOffset(8192), &into, Via::Direct).await?;
        assert!(into.to_vec().iter().all(|byte| *byte == 0x5a));
        Ok(())
    });
    engine.shutdown();
    // A server that was not spoken to any more ends by one more connection that says nothing.
    let mut last = UnixStream::connect(&path);
    let _ = last.as_mut().map(|last| last.write_all(&good_bye()));
    server.join().unwrap();
    outcome
}

/// A client that shakes hands and leaves.
fn good_bye() -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    put_option(&mut bytes, option::GO, &go_data("", &[]));
    let end = Request { flags: 0, command: Command::Disconnect, cookie: 0, offset_bytes: 0, len_bytes: 0 };
    bytes.extend(end.encode());
    bytes
}

/// The odd parts of 512 bytes, and then the even ones.
fn in_sectors(request: &Request) -> Vec<u8> {
    let count = request.len_bytes / 512;
    let sector =
        |number| chunk(request, request.offset_bytes + u64::from(number) * 512, 512, number == count - 2, 0x5a);
    (1..count).step_by(2).chain((0..count).step_by(2)).flat_map(sector).collect()
}

#[test]
fn a_large_read_may_come_in_many_parts() {
    let options = NbdOptions { reconnect_limit: Duration::ZERO, ..NbdOptions::default() };
    read_many(&[in_sectors], options, 8 << 20).unwrap();
}

/// What the server never says.
fn silent(_: &Request) -> Vec<u8> {
    Vec::new()
}

const SHORT: Duration = Duration::from_millis(200);

#[test]
fn a_server_that_owes_an_answer_for_too_long_is_left_and_asked_again() {
    let options = NbdOptions { answer_limit: SHORT, ..NbdOptions::default() };
    read_with(&[silent, silent], options).unwrap();
}

#[test]
fn without_reconnecting_the_reason_is_told_at_once() {
    let options = NbdOptions { answer_limit: SHORT, reconnect_limit: Duration::ZERO, ..NbdOptions::default() };
    let error = read_with(&[silent], options).unwrap_err();
    assert!(error.kind() == ErrorKind::TimedOut && error.to_string().contains("did not answer"), "{error}");
}

#[test]
fn a_server_that_does_not_come_back_fails_what_waits_and_is_tried_anew_by_the_next_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let uri = NbdUri::new(Address::Unix(path.clone()), "");
    let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
    let begin = |answers: &'static [Answer]| {
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            shake_hands(&mut stream, FLUSHES).unwrap();
            for answer in answers {
                let bytes = read_exact::<REQUEST_BYTES>(&mut stream).unwrap();
                stream.write_all(&answer(&Request::parse(&bytes).unwrap())).unwrap();
            }
        })
    };
    let first = begin(&[honest]);
    let options = NbdOptions { reconnect_limit: SHORT, ..NbdOptions::default() };
    let store = engine.run_on(0, move || NbdStore::open_with(uri, OpenMode::ReadOnly, options)).unwrap();
    let read = || {
        let store = store.clone();
        let into = Segments::zeroed(LEN as usize);
        engine.run_on(0, move || async move { store.read_at(StoreOffset(0), &into, Via::Direct).await })
    };
    read().unwrap();
    first.join().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::NotFound);
    let second = begin(&[honest]);
    read().unwrap();
    second.join().unwrap();
    drop(store);
    engine.shutdown();
}

#[test]
fn replies_that_break_the_protocol_are_not_believed() {
    static ANSWERS: [Answer; 10] = [
        |_| vec![0xff; 64],
        // Nothing that was asked.
        |request| data(&Request { cookie: 99, ..*request }, request.offset_bytes, LEN, true),
        // Before, past, twice, too little, none at all.
        |request| data(request, request.offset_bytes - 1, LEN, true),
        |request| data(request, request.offset_bytes + 1, LEN, true),
        |request| {
            [data(request, request.offset_bytes, 512, false), data(request, request.offset_bytes, 512, true)].concat()
        },
        |request| data(request, request.offset_bytes, LEN / 2, true),
        |request| reply::none(request.cookie).to_vec(),
        // Longer than all that a client waits for.
        |request| reply::offset_hole(request.cookie, true, request.offset_bytes, u32::MAX).to_vec(),
        |request| reply::block_status(request.cookie, true, 1, 1 << 28).to_vec(),
        // A simple reply where structured ones were agreed.
        |request| reply::simple(request.cookie, 0).to_vec(),
    ];
    // Few at a time: the pauses between the tries grow.
    ANSWERS.chunks(2).for_each(read_through);
}

#[test]
fn honest_servers_may_answer_in_any_order() {
    read_through(&[]);
}

#[test]
fn what_is_no_server_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        for greeting in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b""] {
            let _ = listener.accept().unwrap().0.write_all(greeting);
        }
    });
    let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
    let kind = |path: &Path, scheme: &str| {
        let uri = format!("{scheme}+unix:///?socket={}", path.display());
        engine.run_on(0, move || async move { NbdStore::open(&uri, OpenMode::ReadOnly).await.err().map(|e| e.kind()) })
    };
    assert_eq!(kind(&path, "nbd"), Some(ErrorKind::Protocol));
    // Such as a balancer whose servers are away.
    assert_eq!(kind(&path, "nbd"), Some(ErrorKind::Io));
    assert_eq!(kind(&path.with_extension("none"), "nbd"), Some(ErrorKind::NotFound));
    server.join().unwrap();
    engine.shutdown();
}
