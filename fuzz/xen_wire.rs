//! What comes from xenstore: messages as bytes, and what a front end has written there. Used by the fuzz target of this
//! name and by its short run in the tests of `front-blkif`.

use std::io::Write;
use std::os::unix::net::UnixStream;

use spile_front_blkif::xenbus::{Offer, RingWish, State, guest_of, read_wish};
use spile_xen::store::wire::{self, HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MessageType};
use spile_xen::store::{Permission, Tx, XenStore};

/// Answers that are prepared at most: the keys of 64 queues of 16 pages are more.
const ANSWERS: u32 = 200;

/// Reads `data` as messages, as the keys of a front end, and as a store's own stream.
pub fn run(data: &[u8]) {
    let Some((selector, rest)) = data.split_first() else { return };
    match selector % 3 {
        0 => messages(rest),
        1 => keys(rest),
        _ => stream(rest),
    }
}

fn messages(mut data: &[u8]) {
    while let Some((head, rest)) = data.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(head) else { return };
        assert!(header.len as usize <= MAX_PAYLOAD_BYTES && header.encode() == *head);
        let (payload, rest) = rest.split_at(rest.len().min(header.len as usize));
        texts(payload);
        if let Some(kind) = header.message_type() {
            let again = wire::message(kind, header.req_id, header.tx_id, payload).expect("it is not too long");
            assert_eq!(again[HEADER_BYTES..], *payload);
        }
        data = rest;
    }
}

fn texts(payload: &[u8]) {
    let parts: Vec<_> = wire::split(payload).collect();
    assert!(parts.iter().map(|part| part.len() + 1).sum::<usize>() <= payload.len() + 1);
    if let Some((first, behind)) = wire::split_first(payload) {
        assert_eq!(first.len() + 1 + behind.len(), payload.len());
    }
    for part in parts {
        assert!(!part.contains(&0));
        if let Ok(permission) = Permission::parse(part) {
            assert_eq!(Permission::parse(permission.to_string().as_bytes()).ok(), Some(permission));
        }
        if let Some(number) = wire::decimal(part) {
            assert!(part.len() > 9 || number < 1_000_000_000);
        }
        if let Ok(text) = wire::text(part) {
            let _ = wire::errno_of(text).map(wire::errno_word).map(|word| assert_eq!(word, text));
            let _ = guest_of(text);
            assert!(State::parse(text).is_none_or(|state| text.trim_start_matches(['+', '0']) == state.text()));
        }
    }
}

/// The client asks for one key after the other; the answers are in the script, each a length and a value, 255 for none.
fn keys(mut data: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("descriptors are to be had");
    for number in 1..=ANSWERS {
        let (len, rest) = data.split_first().map_or((255, data), |(len, rest)| (*len, rest));
        let (value, rest) = rest.split_at(if len == 255 { 0 } else { rest.len().min(usize::from(len)) });
        let (kind, value) =
            if len == 255 { (MessageType::Error, &b"ENOENT\0"[..]) } else { (MessageType::Read, value) };
        let message = wire::message(kind, number, 0, value).expect("a value is short");
        theirs.write_all(&message).expect("the socket has room");
        data = rest;
    }
    drop(theirs.shutdown(std::net::Shutdown::Write));
    let offer = Offer { max_queues: 4, ..Offer::WIDEST };
    let mut store = XenStore::from_socket(ours);
    let Ok(wish) = read_wish(&mut store, "device/vbd/1", &offer) else { return };
    assert!((1..=4).contains(&wish.rings.len()));
    let mut all: Vec<_> = wish.rings.iter().flat_map(|ring| ring.refs.iter().chain(&ring.response_refs)).collect();
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "a page is in two rings");
    for RingWish { order, refs, .. } in &wish.rings {
        assert!(*order <= offer.max_order && refs.len() == 1 << order);
    }
}

/// A store that answers anything: the client complains or not, and does not wait.
fn stream(data: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("descriptors are to be had");
    theirs.write_all(&data[..data.len().min(32 << 10)]).expect("the socket has room");
    drop(theirs.shutdown(std::net::Shutdown::Write));
    let mut store = XenStore::from_socket(ours);
    let _ = store.read_optional(Tx::NONE, "a");
    let _ = store.list(Tx::NONE, "b");
    let _ = store.next_event(Some(std::time::Duration::ZERO));
    let _ = store.write(Tx::NONE, "c", "d");
}
