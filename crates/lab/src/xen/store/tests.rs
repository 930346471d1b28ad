use rustix::io::Errno;
use spile_xen::DomId;
use spile_xen::store::wire::{self, HEADER_BYTES, Header, MessageType as M};

use super::server::{ConnId, Xenstored};

/// One connection of a domain.
struct Client {
    id: ConnId,
    tx: u32,
}

impl Client {
    fn new(store: &mut Xenstored, domain: u16) -> Self {
        Self { id: store.connect(DomId(domain)), tx: 0 }
    }

    /// The answer's texts, joined by spaces; or the error's word.
    fn ask(&self, store: &mut Xenstored, kind: M, payload: &[u8]) -> Result<String, String> {
        let header = Header { kind: kind.raw(), req_id: 77, tx_id: self.tx, len: payload.len() as u32 };
        store.handle(self.id, header, payload);
        // The answer is before the events that it brings, and after those of others.
        let mut events = Vec::new();
        loop {
            let (header, bytes) = self.next(store).expect("an answer");
            if header.message_type() == Some(M::WatchEvent) {
                events.push((header, bytes));
                continue;
            }
            assert_eq!((header.req_id, header.tx_id), (77, self.tx));
            assert!(events.is_empty(), "take events before you ask");
            let shown = show(&bytes);
            return if header.message_type() == Some(M::Error) { Err(shown) } else { Ok(shown) };
        }
    }

    fn texts(&self, store: &mut Xenstored, kind: M, texts: &[&str]) -> Result<String, String> {
        self.ask(store, kind, &wire::join(texts.iter().copied()))
    }

    fn write(&self, store: &mut Xenstored, path: &str, value: &str) -> Result<String, String> {
        self.ask(store, M::Write, &[path.as_bytes(), b"\0", value.as_bytes()].concat())
    }

    fn read(&self, store: &mut Xenstored, path: &str) -> Result<String, String> {
        self.texts(store, M::Read, &[path])
    }

    fn next(&self, store: &mut Xenstored) -> Option<(Header, Vec<u8>)> {
        let outbox = store.outbox(self.id);
        let message = outbox.front()?.to_vec();
        outbox.advance(message.len());
        let header = Header::decode(message.first_chunk().unwrap()).unwrap();
        Some((header, message[HEADER_BYTES..].to_vec()))
    }

    /// All events that wait, as `path token`.
    fn events(&self, store: &mut Xenstored) -> Vec<String> {
        std::iter::from_fn(|| self.next(store)).map(|(_, bytes)| show(&bytes)).collect()
    }

    fn start(&mut self, store: &mut Xenstored) {
        self.tx = 0;
        self.tx = self.ask(store, M::TransactionStart, b"\0").unwrap().parse().unwrap();
    }

    fn end(&mut self, store: &mut Xenstored, verdict: &str) -> Result<String, String> {
        let answer = self.texts(store, M::TransactionEnd, &[verdict]);
        self.tx = 0;
        answer
    }
}

fn show(bytes: &[u8]) -> String {
    let texts: Vec<_> = wire::split(bytes).map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    texts.join(" ")
}

fn word(errno: Errno) -> Result<String, String> {
    Err(wire::errno_word(errno.raw_os_error()).to_owned())
}

fn ok(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

#[test]
fn nodes_are_made_listed_read_and_removed() {
    let mut s = Xenstored::new();
    let dom0 = Client::new(&mut s, 0);
    assert_eq!(dom0.write(&mut s, "/a/b/c", "v"), ok("OK"));
    assert_eq!(dom0.texts(&mut s, M::Mkdir, &["/a/b/c"]), ok("OK"));
    assert_eq!(dom0.texts(&mut s, M::Mkdir, &["/a/d"]), ok("OK"));
    assert_eq!(dom0.read(&mut s, "/a/b/c"), ok("v"));
    assert_eq!(dom0.read(&mut s, "/a/b"), ok(""));
    assert_eq!(dom0.texts(&mut s, M::Directory, &["/a"]), ok("b d"));
    assert_eq!(dom0.texts(&mut s, M::Rm, &["/a/b"]), ok("OK"));
    assert_eq!(dom0.read(&mut s, "/a/b/c"), word(Errno::NOENT));
    assert_eq!(dom0.texts(&mut s, M::Directory, &["/a"]), ok("d"));
    assert_eq!(dom0.texts(&mut s, M::Rm, &["/a/b"]), ok("OK"), "its folder is there");
    assert_eq!(dom0.texts(&mut s, M::Rm, &["/x/y"]), word(Errno::NOENT));
    assert_eq!(dom0.texts(&mut s, M::Rm, &["/"]), word(Errno::INVAL));
}

#[test]
fn what_is_no_request_gets_an_error() {
    let mut s = Xenstored::new();
    let mut dom0 = Client::new(&mut s, 0);
    let long = format!("/{}", "a".repeat(3072));
    for path in ["", "//", "/a/", "/a//b", "/a b", "/\u{e4}", &long] {
        assert_eq!(dom0.write(&mut s, path, "v"), word(Errno::INVAL), "{path:?}");
    }
    assert_eq!(dom0.texts(&mut s, M::Introduce, &["1"]), word(Errno::NOSYS));
    assert_eq!(dom0.texts(&mut s, M::Control, &["/x"]), word(Errno::NOSYS));
    assert_eq!(dom0.texts(&mut s, M::Watch, &["/a"]), word(Errno::INVAL), "no token");
    assert_eq!(dom0.texts(&mut s, M::Watch, &["@other", "t"]), word(Errno::INVAL));
    assert_eq!(dom0.texts(&mut s, M::SetPerms, &["/local", "q0"]), word(Errno::INVAL));
    assert_eq!(dom0.texts(&mut s, M::GetDomainPath, &["x"]), word(Errno::INVAL));
    dom0.tx = 99;
    assert_eq!(dom0.read(&mut s, "/"), word(Errno::NOENT));
    assert_eq!(dom0.end(&mut s, "T"), word(Errno::NOENT));
}

#[test]
fn long_folders_are_listed_in_parts() {
    let mut s = Xenstored::new();
    let dom0 = Client::new(&mut s, 0);
    let name = |number: usize| format!("{number:04}{}", "n".repeat(96));
    (0..100).for_each(|number| assert!(dom0.write(&mut s, &format!("/f/{}", name(number)), "").is_ok()));
    assert_eq!(dom0.texts(&mut s, M::Directory, &["/f"]), word(Errno::TOOBIG));
    let (mut names, mut offset) = (Vec::new(), 0);
    loop {
        let part = dom0.texts(&mut s, M::DirectoryPart, &["/f", &offset.to_string()]).unwrap();
        let more: Vec<_> = part.split(' ').skip(1).map(str::to_owned).collect();
        let is_end = more.last().is_some_and(String::is_empty);
        names.extend(more.into_iter().filter(|name| !name.is_empty()));
        offset = names.len() * 101;
        if is_end || names.len() > 100 {
            break;
        }
    }
    assert_eq!(names, (0..100).map(name).collect::<Vec<_>>());
}

#[test]
fn a_guest_has_its_own_nodes_and_sees_no_others() {
    let mut s = Xenstored::new();
    s.introduce(DomId(3));
    s.introduce(DomId(4));
    let (dom0, guest, other) = (Client::new(&mut s, 0), Client::new(&mut s, 3), Client::new(&mut s, 4));
    assert_eq!(guest.read(&mut s, "domid"), ok("3"));
    assert_eq!(guest.write(&mut s, "data/x", "1"), ok("OK"));
    assert_eq!(dom0.read(&mut s, "/local/domain/3/data/x"), ok("1"));
    assert_eq!(other.read(&mut s, "/local/domain/3/data/x"), word(Errno::ACCESS));
    assert_eq!(other.read(&mut s, "/local/domain/3/data/none"), word(Errno::ACCESS));
    assert_eq!(guest.write(&mut s, "x", "1"), word(Errno::ACCESS));
    assert_eq!(guest.write(&mut s, "/local/domain/0/x", "1"), word(Errno::ACCESS));
    assert_eq!(guest.texts(&mut s, M::Rm, &["/local/domain/4"]), word(Errno::ACCESS));
    assert_eq!(guest.texts(&mut s, M::SetPerms, &["data/x", "n3", "r4"]), ok("OK"));
    assert_eq!(other.read(&mut s, "/local/domain/3/data/x"), ok("1"));
    assert_eq!(other.write(&mut s, "/local/domain/3/data/x", "2"), word(Errno::ACCESS));
    assert_eq!(guest.texts(&mut s, M::SetPerms, &["data/x", "n4"]), word(Errno::PERM), "given away");
    assert_eq!(other.texts(&mut s, M::GetPerms, &["/local/domain/3/data/x"]), ok("n3 r4"));
    assert_eq!(dom0.texts(&mut s, M::SetPerms, &["/local/domain/3/data/x", "b0", "n3"]), ok("OK"));
    assert_eq!(other.write(&mut s, "/local/domain/3/data/x", "2"), ok("OK"), "the first entry is for all others");
    assert_eq!(guest.read(&mut s, "data/x"), word(Errno::ACCESS), "named, with nothing");
    assert_eq!(guest.texts(&mut s, M::GetDomainPath, &["4"]), ok("/local/domain/4"));
    assert_eq!(guest.texts(&mut s, M::IsDomainIntroduced, &["4"]), ok("T"));
    assert_eq!(guest.texts(&mut s, M::IsDomainIntroduced, &["5"]), ok("F"));
}

#[test]
fn watches_fire_at_once_and_for_what_lies_below() {
    let mut s = Xenstored::new();
    let (dom0, watcher) = (Client::new(&mut s, 0), Client::new(&mut s, 0));
    for (path, token) in [("/a", "t"), ("/a/b/c", "deep"), ("data", "rel"), ("/", "all")] {
        assert_eq!(watcher.texts(&mut s, M::Watch, &[path, token]), ok("OK"));
        assert_eq!(watcher.events(&mut s), [format!("{path} {token}")]);
    }
    assert_eq!(watcher.texts(&mut s, M::Watch, &["/a", "t"]), word(Errno::EXIST));
    dom0.write(&mut s, "/a/b/c", "1").unwrap();
    assert_eq!(watcher.events(&mut s), ["/a/b/c t", "/a/b/c deep", "/a/b/c all"]);
    dom0.write(&mut s, "/ab", "1").unwrap();
    dom0.write(&mut s, "data/x", "1").unwrap();
    assert_eq!(watcher.events(&mut s), ["/ab all", "data/x rel", "/local/domain/0/data/x all"]);
    dom0.texts(&mut s, M::Rm, &["/a"]).unwrap();
    assert_eq!(watcher.events(&mut s), ["/a t", "/a all", "/a/b/c deep"]);
    assert_eq!(watcher.texts(&mut s, M::Unwatch, &["/a", "other"]), word(Errno::NOENT));
    assert_eq!(watcher.texts(&mut s, M::Unwatch, &["/", "all"]), ok("OK"));
    dom0.write(&mut s, "/ab", "2").unwrap();
    dom0.read(&mut s, "/ab").unwrap();
    assert_eq!(watcher.events(&mut s), [""; 0]);
    assert_eq!(watcher.texts(&mut s, M::ResetWatches, &[""]), ok("OK"));
    dom0.write(&mut s, "/a", "2").unwrap();
    assert_eq!(watcher.events(&mut s), [""; 0]);
}

#[test]
fn who_may_not_read_hears_nothing() {
    let mut s = Xenstored::new();
    s.introduce(DomId(3));
    let (dom0, guest) = (Client::new(&mut s, 0), Client::new(&mut s, 3));
    for path in ["/secret", "@releaseDomain"] {
        guest.texts(&mut s, M::Watch, &[path, "t"]).unwrap();
        assert_eq!(guest.events(&mut s), [format!("{path} t")]);
    }
    dom0.write(&mut s, "/secret/a", "1").unwrap();
    dom0.texts(&mut s, M::SetPerms, &["/secret", "n0"]).unwrap();
    guest.events(&mut s);
    dom0.write(&mut s, "/secret", "1").unwrap();
    s.release(DomId(4));
    assert_eq!(guest.events(&mut s), [""; 0]);
    dom0.texts(&mut s, M::SetPerms, &["/secret", "n0", "r3"]).unwrap();
    assert_eq!(guest.events(&mut s), ["/secret t"]);
}

#[test]
fn domains_that_come_and_go_are_told() {
    let mut s = Xenstored::new();
    let dom0 = Client::new(&mut s, 0);
    for name in ["@introduceDomain", "@releaseDomain"] {
        dom0.texts(&mut s, M::Watch, &[name, "t"]).unwrap();
        assert_eq!(dom0.events(&mut s), [format!("{name} t")]);
    }
    s.introduce(DomId(7));
    s.release(DomId(7));
    assert_eq!(dom0.events(&mut s), ["@introduceDomain t", "@releaseDomain t"]);
    assert_eq!(dom0.read(&mut s, "/local/domain/7/domid"), ok("7"), "nodes stay");
}

#[test]
fn events_that_wait_are_not_doubled() {
    let mut s = Xenstored::new();
    let (dom0, watcher) = (Client::new(&mut s, 0), Client::new(&mut s, 0));
    watcher.texts(&mut s, M::Watch, &["/a", "t"]).unwrap();
    watcher.events(&mut s);
    (0..100).for_each(|_| ["/a/x", "/a/y", "/a/z"].iter().for_each(|path| drop(dom0.write(&mut s, path, "1"))));
    for _ in 0..2 {
        assert_eq!(watcher.events(&mut s), ["/a/x t", "/a/y t", "/a/z t"]);
        ["/a/x", "/a/y", "/a/z"].iter().for_each(|path| drop(dom0.write(&mut s, path, "1")));
    }
}

#[test]
fn a_transaction_is_all_or_nothing() {
    let mut s = Xenstored::new();
    let (mut tx, dom0) = (Client::new(&mut s, 0), Client::new(&mut s, 0));
    dom0.texts(&mut s, M::Watch, &["/t", "w"]).unwrap();
    dom0.events(&mut s);
    for (verdict, seen) in [("F", word(Errno::NOENT)), ("T", ok("1"))] {
        tx.start(&mut s);
        assert_eq!(tx.write(&mut s, "/t/a", "1"), ok("OK"));
        assert_eq!(tx.write(&mut s, "/t/b", "2"), ok("OK"));
        assert_eq!(tx.texts(&mut s, M::Rm, &["/t/b"]), ok("OK"));
        assert_eq!((tx.read(&mut s, "/t/a"), tx.texts(&mut s, M::Directory, &["/t"])), (ok("1"), ok("a")));
        assert_eq!(dom0.read(&mut s, "/t/a"), word(Errno::NOENT));
        assert_eq!(tx.end(&mut s, verdict), ok("OK"));
        assert_eq!(dom0.next(&mut s).is_some(), verdict == "T", "events come with the end");
        dom0.events(&mut s);
        assert_eq!(dom0.read(&mut s, "/t/a"), seen);
    }
    tx.start(&mut s);
    assert_eq!(tx.ask(&mut s, M::TransactionStart, b"\0"), word(Errno::BUSY));
    assert_eq!(tx.end(&mut s, "x"), word(Errno::INVAL));
}

#[test]
fn transactions_that_cross_are_told_to_come_again() {
    // What one does in its transaction, what another does meanwhile, and whether they cross.
    type Step<'a> = (&'a str, &'a str);
    let cases: [(Step<'_>, Step<'_>, bool); 6] = [
        (("read", "/t/a"), ("write", "/t/a"), true),
        (("write", "/t/a"), ("write", "/t/a"), true),
        (("read", "/t/none"), ("write", "/t/none"), true),
        (("write", "/t/new"), ("write", "/t/other"), true),
        (("write", "/t/a"), ("write", "/t/b"), false),
        (("read", "/t/a"), ("read", "/t/a"), false),
    ];
    for (mine, other, crosses) in cases {
        let mut s = Xenstored::new();
        let (mut tx, dom0) = (Client::new(&mut s, 0), Client::new(&mut s, 0));
        dom0.write(&mut s, "/t/a", "0").unwrap();
        dom0.write(&mut s, "/t/b", "0").unwrap();
        tx.start(&mut s);
        for (client, (what, path)) in [(&tx, mine), (&dom0, other)] {
            let _ = if what == "read" { client.read(&mut s, path) } else { client.write(&mut s, path, "1") };
        }
        let expected = if crosses { word(Errno::AGAIN) } else { ok("OK") };
        assert_eq!(tx.end(&mut s, "T"), expected, "{mine:?} {other:?}");
    }
}

#[test]
fn a_guest_cannot_take_without_end() {
    let mut s = Xenstored::new();
    s.introduce(DomId(3));
    let mut guest = Client::new(&mut s, 3);
    let count = |mut f: Box<dyn FnMut(usize) -> Result<String, String> + '_>| {
        (0..2000).map(&mut f).find_map(Result::err).expect("a bound")
    };
    assert_eq!(count(Box::new(|n| guest.write(&mut s, &format!("data/{n}"), ""))), "ENOSPC");
    guest.start(&mut s);
    guest.texts(&mut s, M::Rm, &["data/1"]).unwrap();
    assert_eq!(guest.write(&mut s, "data/x", ""), ok("OK"), "one for another");
    assert_eq!(guest.write(&mut s, "data/y", ""), word(Errno::NOSPC));
    guest.end(&mut s, "F").unwrap();
    // Some in a transaction, the others are there already.
    guest.texts(&mut s, M::Rm, &["data/1"]).unwrap();
    guest.texts(&mut s, M::Rm, &["data/2"]).unwrap();
    guest.start(&mut s);
    assert_eq!(count(Box::new(|n| guest.write(&mut s, &format!("data/x{n}"), ""))), "ENOSPC");
    assert_eq!(guest.end(&mut s, "T"), ok("OK"));
    for what in [M::Read, M::Write] {
        guest.start(&mut s);
        let path = |number| if what == M::Read { format!("data/none{number}") } else { "data/5".to_owned() };
        let full = (0..5000).find(|number| guest.texts(&mut s, what, &[&path(*number)]) == word(Errno::NOSPC));
        assert!(full.is_some(), "{what:?}");
        guest.end(&mut s, "F").unwrap();
    }
    let watched = |n: usize| format!("data/w{n}");
    let mut last = Ok(String::new());
    for number in 0..200 {
        last = guest.texts(&mut s, M::Watch, &[&watched(number), "t"]);
        guest.events(&mut s);
        if last.is_err() {
            break;
        }
    }
    assert_eq!(last, word(Errno::TOOBIG));
    assert_eq!(guest.write(&mut s, "data/5", &"v".repeat(2049)), word(Errno::NOSPC));
    assert_eq!(guest.texts(&mut s, M::SetPerms, &["data/5", "n3", "r4", "r5", "r6", "r7", "r8"]), word(Errno::NOSPC));
    let start = |s: &mut Xenstored| guest.ask(s, M::TransactionStart, b"\0");
    assert_eq!((0..20).find_map(|_| start(&mut s).err()), Some("ENOSPC".to_owned()));
}

#[test]
fn who_does_not_read_is_cut_off_in_the_end() {
    let mut s = Xenstored::new();
    let (dom0, deaf) = (Client::new(&mut s, 0), Client::new(&mut s, 0));
    deaf.texts(&mut s, M::Watch, &["/a", &"t".repeat(1024)]).unwrap();
    for number in 0..10_000 {
        dom0.write(&mut s, &format!("/a/{number}"), "").unwrap();
        if s.outbox(deaf.id).is_overrun() {
            return;
        }
    }
    panic!("it may let as much gather as it likes");
}
