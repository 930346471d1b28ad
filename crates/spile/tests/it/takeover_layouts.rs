//! Takeovers between builds: what a build of layout 0 really said, byte by byte, against the code of today.
//!
//! `data/takeover-0` was recorded from such a build, which served a guest with requests in flight and a dirty log: what it
//! asks as a successor, how it refuses a line that it does not know, and what it gives.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;
use spile::serving::control::{Link, Request};
use spile::serving::fronts::{Listening, Role};
use spile::serving::identity::{Exported, Identity};
use spile::serving::takeover::{self, Orders, ask};

const ASKS: &str = include_str!("data/takeover-0/asks.jsonl");
const REFUSES: &str = include_str!("data/takeover-0/refuses.jsonl");
const GIVES: &str = include_str!("data/takeover-0/gives.jsonl");
const DONE: &str = "{\"fds\":0,\"message\":\"done\"}\n";

/// What comes after the count of descriptors in a line.
fn message(line: &str) -> Value {
    serde_json::from_str::<Value>(line).unwrap()["message"].clone()
}

fn asked_sockets() -> Vec<String> {
    serde_json::from_value(message(ASKS)["take_over"]["sockets"].clone()).unwrap()
}

/// Sends a recorded line, with as many descriptors as it says.
fn play(stream: &UnixStream, line: &str) {
    let count = serde_json::from_str::<Value>(line).unwrap()["fds"].as_u64().unwrap();
    let files: Vec<File> = (0..count).map(|_| File::open("/dev/null").unwrap()).collect();
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let sent = sendmsg(stream, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, line.len());
}

fn heard(stream: &UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

/// A server of layout 0 at `path`. Returns what it was asked, line by line.
fn old_server(path: &Path) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (first, _) = listener.accept().unwrap();
        let mut asked = vec![heard(&first)];
        play(&first, REFUSES);
        drop(first);
        let (second, _) = listener.accept().unwrap();
        asked.push(heard(&second));
        GIVES.split_inclusive('\n').for_each(|line| play(&second, line));
        asked.push(heard(&second));
        play(&second, DONE);
        asked
    })
}

#[test]
fn a_server_of_layout_0_hands_over_to_this_build_and_this_build_gives_what_that_one_gave() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("c");
    let server = old_server(&control);
    let disk = Identity::of(&"null:1M".parse().unwrap(), None, None);
    let exports = vec![Exported { name: String::new(), disk }];
    let mut given = ask(&control, asked_sockets(), 2, exports).unwrap().expect("a server is there");
    given.confirm().unwrap();
    let asked = server.join().unwrap();
    assert!(asked[0].contains("\"layout\":2"), "{}", asked[0]);
    assert_eq!(asked[1..], [ASKS, DONE], "a server of layout 0 is asked as it asks itself");
    // What was understood of a guest is all that was said.
    let listening: Vec<Listening> = asked_sockets()
        .into_iter()
        .map(|key| Listening {
            fd: given.take_socket(&key).unwrap(),
            role: Role::Nbd,
            key,
            address: None,
            published: None,
        })
        .collect();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    takeover::give(&Link::new(ours).unwrap(), 0, Vec::new(), Orders::default(), &listening, &given.connections)
        .unwrap();
    let mut bytes = String::new();
    theirs.read_to_string(&mut bytes).unwrap();
    assert_eq!(bytes, GIVES);
}

#[test]
fn this_build_understands_what_a_successor_of_layout_0_asks() {
    let request: Request = serde_json::from_value(message(ASKS)).unwrap();
    assert_eq!(request, Request::TakeOver { sockets: asked_sockets(), queues: 2, disks: None, layout: 0 });
    let resize = br#"{"resize":{"export":"","size_bytes":1024}}"#;
    assert!(matches!(serde_json::from_slice(resize).unwrap(), Request::Resize { size_bytes: 1024, .. }));
}
