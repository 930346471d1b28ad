//! The client against a scripted store at the other end of a pair of sockets.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;
use spile_core::{Error, ErrorKind};

use super::wire::{self, HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MessageType};
use super::{Access, Permission, Tx, WatchEvent, XenStore};
use crate::DomId;

const NOW: Option<Duration> = Some(Duration::ZERO);

/// The store's side, as the script of a test moves it.
struct Peer {
    socket: UnixStream,
    asked: Header,
}

impl Peer {
    /// Takes the next request, which must be this.
    fn expect(&mut self, kind: MessageType, payload: &[u8]) -> &mut Self {
        let mut header = [0; HEADER_BYTES];
        self.socket.read_exact(&mut header).unwrap();
        self.asked = Header::decode(&header).unwrap();
        let mut got = vec![0; self.asked.len as usize];
        self.socket.read_exact(&mut got).unwrap();
        let shown = (got.escape_ascii().to_string(), payload.escape_ascii().to_string());
        assert_eq!((self.asked.message_type(), shown.0), (Some(kind), shown.1));
        self
    }

    fn send(&mut self, kind: MessageType, req_id: u32, payload: &[u8]) -> &mut Self {
        self.socket.write_all(&wire::message(kind, req_id, self.asked.tx_id, payload).unwrap()).unwrap();
        self
    }

    /// Answers the request taken last.
    fn answer(&mut self, payload: &[u8]) -> &mut Self {
        self.send(self.asked.message_type().unwrap(), self.asked.req_id, payload)
    }

    fn refuse(&mut self, word: &str) -> &mut Self {
        self.send(MessageType::Error, self.asked.req_id, &wire::join([word]))
    }

    fn event(&mut self, path: &str, token: &str) -> &mut Self {
        self.send(MessageType::WatchEvent, 0, &wire::join([path, token]))
    }
}

/// A client, and its store, which does `script` and then waits for the client to go.
fn scripted(script: impl FnOnce(&mut Peer) + Send + 'static) -> (XenStore, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let thread = thread::spawn(move || {
        let mut peer = Peer { socket: theirs, asked: Header { kind: 0, req_id: 0, tx_id: 0, len: 0 } };
        script(&mut peer);
        let mut rest = Vec::new();
        // A client that goes with messages unread resets the connection, which is as good an end.
        let _ = peer.socket.read_to_end(&mut rest);
        assert!(rest.is_empty(), "the client sent more: {}", rest.escape_ascii());
    });
    (XenStore::from_socket(ours), thread)
}

fn end(store: XenStore, thread: JoinHandle<()>) {
    drop(store);
    thread.join().unwrap();
}

fn event(path: &str, token: &str) -> WatchEvent {
    WatchEvent { path: path.into(), token: token.into() }
}

#[test]
fn each_request_is_what_the_specification_says() {
    use MessageType as M;
    let (mut store, thread) = scripted(|p| {
        p.expect(M::Read, b"/a\0").answer(b"1\0\xff");
        p.expect(M::Write, b"/a\0two").answer(b"OK\0");
        p.expect(M::Mkdir, b"/a\0").answer(b"OK\0");
        p.expect(M::Rm, b"/a\0").answer(b"OK\0");
        p.expect(M::Directory, b"/a\0").answer(b"x\0y\0");
        p.expect(M::Directory, b"/a\0").answer(b"");
        p.expect(M::GetPerms, b"/a\0").answer(b"n0\0r7\0");
        p.expect(M::SetPerms, b"/a\0b0\0w65535\0").answer(b"OK\0");
        p.expect(M::Watch, b"/a\0t\0").answer(b"OK\0");
        p.expect(M::Unwatch, b"/a\0t\0").answer(b"OK\0");
        p.expect(M::GetDomainPath, b"7\0").answer(b"/local/domain/7\0");
        p.expect(M::Read, b"domid\0").answer(b"3");
    });
    let none = Tx::NONE;
    assert_eq!(store.read(none, "/a").unwrap(), b"1\0\xff");
    store.write(none, "/a", "two").unwrap();
    store.make_folder(none, "/a").unwrap();
    store.remove(none, "/a").unwrap();
    assert_eq!(store.list(none, "/a").unwrap(), ["x", "y"]);
    assert_eq!(store.list(none, "/a").unwrap(), [""; 0]);
    let permission = |domain, access| Permission { domain: DomId(domain), access };
    assert_eq!(store.permissions(none, "/a").unwrap(), [permission(0, Access::None), permission(7, Access::Read)]);
    store.set_permissions(none, "/a", &[permission(0, Access::Both), permission(65535, Access::Write)]).unwrap();
    store.watch("/a", "t").unwrap();
    store.unwatch("/a", "t").unwrap();
    assert_eq!(store.domain_path(DomId(7)).unwrap(), "/local/domain/7");
    assert_eq!(store.own_domid().unwrap(), DomId(3));
    end(store, thread);
}

#[test]
fn errors_name_operation_path_and_word_and_do_no_harm() {
    let (mut store, thread) = scripted(|p| {
        for word in ["EACCES", "ENOENT", "ENOENT", "ENONSENSE"] {
            p.expect(MessageType::Read, b"/local/x\0").refuse(word);
        }
        p.expect(MessageType::Watch, b"/local/x\0t\0").refuse("EEXIST");
        p.expect(MessageType::Read, b"/local/x\0").answer(b"\xff");
        p.expect(MessageType::Write, b"/local/x\0v").answer(b"NO\0");
        p.expect(MessageType::Read, b"/local/x\0").answer(b"v");
    });
    let mut read = || store.read_string(Tx::NONE, "/local/x").unwrap_err();
    let denied = read();
    assert!(denied.to_string().starts_with("read /local/x: EACCES"), "{denied}");
    assert_eq!((denied.kind(), denied.os_errno()), (ErrorKind::Denied, Some(libc::EACCES)));
    assert_eq!(read().kind(), ErrorKind::NotFound);
    assert_eq!(store.read_optional(Tx::NONE, "/local/x").unwrap(), None);
    let unknown = store.read(Tx::NONE, "/local/x").unwrap_err();
    assert!(unknown.kind() == ErrorKind::Io && unknown.to_string().contains("`ENONSENSE`"), "{unknown}");
    assert_eq!(store.watch("/local/x", "t").unwrap_err().kind(), ErrorKind::Exists);
    assert_eq!(store.read_optional(Tx::NONE, "/local/x").unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(store.write(Tx::NONE, "/local/x", "v").unwrap_err().kind(), ErrorKind::Protocol);
    assert_eq!(store.read_optional(Tx::NONE, "/local/x").unwrap().as_deref(), Some("v"));
    end(store, thread);
}

#[test]
fn what_cannot_be_sent_is_refused_before_it_is() {
    let (mut store, thread) = scripted(|_| {});
    let long = "x".repeat(wire::MAX_PATH_BYTES + 1);
    let value = "x".repeat(MAX_PAYLOAD_BYTES);
    let failures = [
        store.read(Tx::NONE, "").unwrap_err(),
        store.read(Tx::NONE, "/a\0b").unwrap_err(),
        store.read(Tx::NONE, &long).unwrap_err(),
        store.write(Tx::NONE, "/a", &value).unwrap_err(),
        store.watch("/a", "t\0u").unwrap_err(),
    ];
    for failure in failures {
        assert_eq!(failure.kind(), ErrorKind::InvalidInput, "{failure}");
        assert!(failure.to_string().len() < 200, "{failure}");
    }
    end(store, thread);
}

#[test]
fn an_answer_in_single_bytes_is_one_answer() {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Read, b"/a\0");
        let message = wire::message(MessageType::Read, p.asked.req_id, 0, b"value").unwrap();
        message.iter().for_each(|byte| p.socket.write_all(&[*byte]).unwrap());
    });
    assert_eq!(store.read(Tx::NONE, "/a").unwrap(), b"value");
    end(store, thread);
}

#[test]
fn events_between_are_kept_and_equal_ones_are_one() {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Read, b"/a\0");
        p.event("/x", "1").event("/x", "2").event("/x", "1");
        // A kernel may put more texts after the two.
        p.send(MessageType::WatchEvent, 99, b"/y\x001\0more\0").answer(b"v").event("/z", "3");
    });
    assert_eq!(store.read(Tx::NONE, "/a").unwrap(), b"v");
    for expected in [event("/x", "1"), event("/x", "2"), event("/y", "1")] {
        assert_eq!(store.next_event(NOW).unwrap(), Some(expected));
    }
    assert_eq!(store.next_event(None).unwrap(), Some(event("/z", "3")));
    assert_eq!(store.next_event(NOW).unwrap(), None);
    end(store, thread);
}

#[test]
fn half_an_event_waits_for_its_other_half() {
    let (mut store, thread) = scripted(|p| {
        let message = wire::message(MessageType::WatchEvent, 0, 0, b"/x\x001\0").unwrap();
        p.expect(MessageType::Read, b"/a\0").answer(b"");
        p.socket.write_all(&message[..18]).unwrap();
        p.expect(MessageType::Mkdir, b"/b\0");
        p.socket.write_all(&message[18..]).unwrap();
        p.answer(b"OK\0");
    });
    store.read(Tx::NONE, "/a").unwrap();
    assert_eq!(store.next_event(NOW).unwrap(), None);
    assert_eq!(store.next_event(Some(Duration::from_millis(20))).unwrap(), None);
    store.make_folder(Tx::NONE, "/b").unwrap();
    assert_eq!(store.next_event(NOW).unwrap(), Some(event("/x", "1")));
    end(store, thread);
}

#[test]
fn a_flood_below_one_watch_is_one_event() {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Read, b"/a\0");
        let mut send = |name: &str, token| {
            let payload = wire::join([name, token]);
            p.socket.write_all(&wire::message(MessageType::WatchEvent, 0, 0, &payload).unwrap()).unwrap();
        };
        send("/other", "u");
        (0..4500).for_each(|n| send(&format!("/w/{n}"), "t"));
        p.answer(b"v");
    });
    assert_eq!(store.read(Tx::NONE, "/a").unwrap(), b"v");
    assert_eq!(store.next_event(NOW).unwrap(), Some(event("/other", "u")));
    assert_eq!(store.next_event(NOW).unwrap(), Some(event("/w/0", "t")));
    let left = std::iter::from_fn(|| store.next_event(NOW).unwrap()).count();
    assert!(left < 4096, "{left}");
    end(store, thread);
}

#[test]
fn too_many_different_events_end_the_connection() {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Read, b"/a\0");
        let message = |n: u32| wire::message(MessageType::WatchEvent, 0, 0, &wire::join(["/a", &n.to_string()]));
        // The client goes before it has read all.
        let _ = (0..5000).try_for_each(|n| p.socket.write_all(&message(n).unwrap()));
    });
    assert_eq!(store.read(Tx::NONE, "/a").unwrap_err().kind(), ErrorKind::Exhausted);
    end(store, thread);
}

/// A store that breaks the protocol in answer to a read: the error, which every later call gives too.
fn broken_by(script: impl FnOnce(&mut Peer) + Send + 'static) -> Error {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Read, b"/a\0");
        script(p);
    });
    store.set_reply_limit(Duration::from_millis(100));
    let error = store.read(Tx::NONE, "/a").unwrap_err();
    assert!(error.to_string().starts_with("read /a: "), "{error}");
    assert_eq!(store.make_folder(Tx::NONE, "/b").unwrap_err().to_string(), error.to_string());
    assert_eq!(store.next_event(None).unwrap_err().to_string(), error.to_string());
    end(store, thread);
    error
}

#[test]
fn a_store_that_breaks_the_protocol_is_left() {
    let wrong_number = broken_by(|p| _ = p.send(MessageType::Read, p.asked.req_id + 1, b"v"));
    assert!(wrong_number.to_string().contains("an answer to request 2, where 1 was asked"), "{wrong_number}");
    let wrong_type = broken_by(|p| _ = p.send(MessageType::Directory, p.asked.req_id, b"v"));
    assert!(wrong_type.to_string().contains("an answer of type 1 to one of 2"), "{wrong_type}");
    let too_long = broken_by(|p| {
        let header = Header { len: MAX_PAYLOAD_BYTES as u32 + 1, ..p.asked };
        p.socket.write_all(&header.encode()).unwrap();
    });
    assert!(too_long.to_string().contains("a message of 4097 bytes"), "{too_long}");
    let no_token = broken_by(|p| _ = p.send(MessageType::WatchEvent, 0, b"/x\0"));
    let no_text = broken_by(|p| _ = p.send(MessageType::WatchEvent, 0, b"/\xff\0t\0"));
    for error in [wrong_number, wrong_type, too_long, no_token, no_text] {
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    }
}

#[test]
fn a_store_that_goes_or_hangs_is_left() {
    let gone = broken_by(|p| {
        p.socket.write_all(&p.asked.encode()[..9]).unwrap();
        p.socket.shutdown(std::net::Shutdown::Both).unwrap();
    });
    assert!(gone.kind() == ErrorKind::Io && gone.to_string().contains("closed"), "{gone}");
    assert_eq!(broken_by(|_| {}).kind(), ErrorKind::TimedOut);
}

#[test]
fn events_do_not_count_as_signs_of_life() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let messages = [(MessageType::WatchEvent, 0, b"/x\0t\0".as_slice()), (MessageType::Read, 1, b"late")];
    for (kind, req_id, payload) in messages {
        theirs.write_all(&wire::message(kind, req_id, 0, payload).unwrap()).unwrap();
    }
    let mut store = XenStore::from_socket(ours);
    store.set_reply_limit(Duration::ZERO);
    assert_eq!(store.read(Tx::NONE, "/a").unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn only_watches_may_be_answered_without_a_number() {
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Watch, b"/a\0t\0").event("/a", "t").send(MessageType::Watch, 0, b"OK\0");
        p.expect(MessageType::Unwatch, b"/a\0t\0").send(MessageType::Unwatch, 0, b"OK\0");
    });
    store.watch("/a", "t").unwrap();
    store.unwatch("/a", "t").unwrap();
    end(store, thread);
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Watch, b"/a\0t\0").send(MessageType::Watch, 7, b"OK\0");
    });
    assert_eq!(store.watch("/a", "t").unwrap_err().kind(), ErrorKind::Protocol);
    end(store, thread);
    assert_eq!(broken_by(|p| _ = p.send(MessageType::Read, 0, b"v")).kind(), ErrorKind::Protocol);
}

#[test]
fn a_message_that_nothing_asked_for_is_no_event() {
    let (mut store, thread) = scripted(|p| _ = p.send(MessageType::Read, 1, b"v"));
    let error = store.next_event(None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    end(store, thread);
}

#[test]
fn long_lists_come_in_parts() {
    use MessageType::DirectoryPart as Part;
    let (mut store, thread) = scripted(|p| {
        p.expect(MessageType::Directory, b"/a\0").refuse("E2BIG");
        p.expect(Part, b"/a\x000\0").answer(b"5\0old\0");
        p.expect(Part, b"/a\x004\0").answer(b"6\0new\0");
        p.expect(Part, b"/a\x000\0").answer(b"6\0one\0two\0");
        p.expect(Part, b"/a\x008\0").answer(b"6\0three\0\0");
        p.expect(MessageType::Directory, b"/a\0").refuse("E2BIG");
        p.expect(Part, b"/a\x000\0").answer(b"7\0\0");
    });
    assert_eq!(store.list(Tx::NONE, "/a").unwrap(), ["one", "two", "three"]);
    assert_eq!(store.list(Tx::NONE, "/a").unwrap(), [""; 0]);
    end(store, thread);
}

#[test]
fn lists_without_end_have_one() {
    let long = "n".repeat(4000);
    let part = wire::join(["1", &long]);
    let listed = |parts: Vec<Vec<u8>>| {
        let (mut store, thread) = scripted(move |p| {
            p.expect(MessageType::Directory, b"/a\0").refuse("E2BIG");
            let mut asked = 0;
            for part in parts {
                p.expect(MessageType::DirectoryPart, format!("/a\0{asked}\0").as_bytes()).answer(&part);
                asked = if part.len() < 9 { 0 } else { asked + 4001 };
            }
        });
        let error = store.list(Tx::NONE, "/a").unwrap_err();
        end(store, thread);
        error.kind()
    };
    assert_eq!(listed(vec![part.clone(); 263]), ErrorKind::Protocol);
    for broken in [b"1".as_slice(), b"1\0", b"1\0name"] {
        assert_eq!(listed(vec![broken.to_vec()]), ErrorKind::Protocol);
    }
    let changing = (0..20).flat_map(|_| [part.clone(), b"2\0x\0".to_vec()]).collect();
    assert_eq!(listed(changing), ErrorKind::Busy);
}

#[test]
fn a_crossed_transaction_is_done_again() {
    use MessageType as M;
    let (mut store, thread) = scripted(|p| {
        for (number, verdict) in [(5, "EAGAIN"), (6, "EAGAIN"), (7, "")] {
            p.expect(M::TransactionStart, b"\0").answer(format!("{number}\0").as_bytes());
            p.expect(M::Write, b"/a\0v").answer(b"OK\0");
            assert_eq!(p.asked.tx_id, number);
            p.expect(M::TransactionEnd, b"T\0");
            assert_eq!(p.asked.tx_id, number);
            if verdict.is_empty() {
                p.answer(b"OK\0")
            } else {
                p.refuse(verdict)
            };
        }
    });
    let mut times = 0;
    let value = store.transaction(|store, tx| {
        times += 1;
        store.write(tx, "/a", "v")?;
        Ok(times)
    });
    assert_eq!(value.unwrap(), 3);
    end(store, thread);
}

#[test]
fn a_failed_transaction_is_forgotten() {
    use MessageType as M;
    let (mut store, thread) = scripted(|p| {
        p.expect(M::TransactionStart, b"\0").answer(b"5\0");
        p.expect(M::Read, b"/a\0").refuse("ENOENT");
        p.expect(M::TransactionEnd, b"F\0").answer(b"OK\0");
        for number in ["0\0", "x\0", ""] {
            p.expect(M::TransactionStart, b"\0").answer(number.as_bytes());
        }
    });
    let error = store.transaction(|store, tx| store.read(tx, "/a")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    for _ in 0..3 {
        assert_eq!(store.transaction(|_, _| Ok(())).unwrap_err().kind(), ErrorKind::Protocol);
    }
    end(store, thread);
}

#[test]
fn a_transaction_that_is_always_crossed_is_given_up() {
    let (mut store, thread) = scripted(|p| {
        for _ in 0..100 {
            p.expect(MessageType::TransactionStart, b"\0").answer(b"5\0");
            p.expect(MessageType::TransactionEnd, b"T\0").refuse("EAGAIN");
        }
    });
    assert_eq!(store.transaction(|_, _| Ok(())).unwrap_err().kind(), ErrorKind::Busy);
    end(store, thread);
}

#[test]
fn a_store_is_found_at_a_socket_only_or_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let [socket, missing, file] = ["socket", "missing", "file"].map(|name| folder.path().join(name));
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::write(&file, "").unwrap();
    let open = |path: &Path| XenStore::open(path).map(drop).map_err(|e| e.kind());
    assert_eq!(open(&socket), Ok(()));
    assert_eq!(open(&missing), Err(ErrorKind::NotFound));
    assert_eq!(open(&file), Err(ErrorKind::InvalidInput));
    assert!(XenStore::open_first(&[missing.clone(), socket]).is_ok());
    let error = XenStore::open_first(&[missing.clone(), file.clone()]).map(drop).unwrap_err();
    for path in [missing, file] {
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
    assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains("XENSTORED_PATH"), "{error}");
}

/// Devices that every machine has: one that says nothing, one that says only zeroes, one that takes nothing.
#[test]
fn devices_are_read_and_written() {
    let read = |path: &str| {
        let mut store = XenStore::open(Path::new(path)).unwrap();
        ["/a", "/b"].map(|path| store.read(Tx::NONE, path).unwrap_err())
    };
    assert!(read("/dev/null")[1].to_string().contains("closed"));
    assert_eq!(read("/dev/zero")[1].kind(), ErrorKind::Protocol);
    // What a device refuses has not gone anywhere, so the next request is tried as well.
    let [first, second] = read("/dev/full");
    assert_eq!((first.os_errno(), second.os_errno()), (Some(libc::ENOSPC), Some(libc::ENOSPC)));
    for (error, what) in [(first, "read /a: send to xenstore"), (second, "read /b: send to xenstore")] {
        assert!(error.to_string().starts_with(what), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_a_store_says_the_client_lives(
        kinds in prop::collection::vec((0..24u32, 0..3u32, any::<Vec<u8>>()), 0..6),
    ) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        for (kind, req_id, payload) in &kinds {
            let len = payload.len() as u32;
            ours.write_all(&Header { kind: *kind, req_id: *req_id, tx_id: 0, len }.encode()).unwrap();
            ours.write_all(payload).unwrap();
        }
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut store = XenStore::from_socket(theirs);
        let asked = store.list(Tx::NONE, "/a");
        let said = kinds.iter().any(|(kind, req_id, _)| *kind == 1 && *req_id == 1);
        prop_assert!(asked.is_err() || said);
        let events = std::iter::from_fn(|| store.next_event(NOW).ok().flatten()).count();
        prop_assert!(events <= kinds.len());
        prop_assert!(store.permissions(Tx::NONE, "/a").is_err() || !kinds.is_empty());
    }
}
