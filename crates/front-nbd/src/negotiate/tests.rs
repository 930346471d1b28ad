//! Handshakes without sockets: every rule of the option phase, and strangers' bytes.

use proptest::prelude::*;

use super::*;
use crate::wire::handshake::{OPTION_MAGIC, OPTION_REPLY_MAGIC};

fn offers(names: &[&str]) -> Arc<[Offer]> {
    let offer = |name: &&str| Offer {
        name: name.to_string(),
        description: "for tests".into(),
        size_bytes: 1 << 20,
        read_only: false,
        minimum_bytes: 1,
        preferred_bytes: 4096,
        maximum_bytes: 32 << 20,
        checkpoints: vec!["mon".into(), "tue".into()],
        kept: Some("here".into()),
        is_alone: false,
    };
    names.iter().map(offer).collect()
}

fn started(names: &[&str], tls: TlsMode) -> Negotiator {
    let mut negotiator = Negotiator::new(offers(names), tls, &mut Vec::new());
    assert_eq!(negotiator.step(&3u32.to_be_bytes(), &mut Vec::new()), Some(Step { consumed: 4, next: Next::Continue }));
    negotiator
}

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len, data].concat()
}

fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go_data(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    data
}

fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&counted(query)));
    data
}

/// Sends one option; the replies as (type, data), and how to go on.
fn ask(negotiator: &mut Negotiator, option: u32, data: &[u8]) -> (Vec<(u32, Vec<u8>)>, Next) {
    let input = option_bytes(option, data);
    let mut out = Vec::new();
    let step = negotiator.step(&input, &mut out).expect("the option is complete");
    assert_eq!(step.consumed, input.len());
    let mut replies = Vec::new();
    let mut rest = &out[..];
    while option != option::EXPORT_NAME && !rest.is_empty() {
        assert_eq!(rest[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(rest[8..12], option.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
        let end = 20 + word(16) as usize;
        replies.push((word(12), rest[20..end].to_vec()));
        rest = &rest[end..];
    }
    (replies, step.next)
}

fn kinds(replies: &[(u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|reply| reply.0).collect()
}

#[test]
fn unknown_client_flags_end_the_session() {
    for flags in [4u32, 1 << 31, u32::MAX] {
        let mut negotiator = Negotiator::new(offers(&["a"]), TlsMode::Off, &mut Vec::new());
        let step = negotiator.step(&flags.to_be_bytes(), &mut Vec::new()).unwrap();
        assert_eq!(step.next, Next::HangUp);
    }
}

#[test]
fn a_client_without_fixed_newstyle_may_only_name_its_export() {
    let mut negotiator = Negotiator::new(offers(&["a"]), TlsMode::Off, &mut Vec::new());
    negotiator.step(&0u32.to_be_bytes(), &mut Vec::new()).unwrap();
    let mut out = Vec::new();
    let step = negotiator.step(&option_bytes(option::EXPORT_NAME, b"a"), &mut out).unwrap();
    assert!(matches!(step.next, Next::Transmit(_)));
    assert_eq!(out.len(), 134);
    let mut negotiator = Negotiator::new(offers(&["a"]), TlsMode::Off, &mut Vec::new());
    negotiator.step(&0u32.to_be_bytes(), &mut Vec::new()).unwrap();
    let step = negotiator.step(&option_bytes(option::LIST, b""), &mut out).unwrap();
    assert_eq!(step.next, Next::HangUp);
}

#[test]
fn no_zeroes_shortens_the_answer_to_export_name() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    let mut out = Vec::new();
    negotiator.step(&option_bytes(option::EXPORT_NAME, b"a"), &mut out).unwrap();
    assert_eq!(out.len(), 10);
}

#[test]
fn an_unknown_export_name_ends_the_session() {
    for name in [&b"b"[..], b"a\0", &[0xff], &[b'x'; 4096], &[b'x'; 4097]] {
        let mut negotiator = started(&["a"], TlsMode::Off);
        assert_eq!(ask(&mut negotiator, option::EXPORT_NAME, name).1, Next::HangUp);
    }
}

#[test]
fn go_gives_what_was_asked_for() {
    let mut negotiator = started(&["a", "b"], TlsMode::Off);
    let all = [info::EXPORT, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 77];
    let (replies, next) = ask(&mut negotiator, option::GO, &go_data("b", &all));
    assert_eq!(kinds(&replies), [rep::INFO, rep::INFO, rep::INFO, rep::INFO, rep::ACK]);
    assert_eq!(replies.iter().map(|r| r.1.len()).collect::<Vec<_>>(), [12, 3, 11, 14, 0]);
    assert_eq!(
        next,
        Next::Transmit(Session {
            export: 1,
            size_bytes: 1 << 20,
            structured: false,
            contexts: Vec::new(),
            names_link: false
        })
    );
}

#[test]
fn info_does_not_enter_transmission_and_a_failed_go_does_not_either() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    assert_eq!(ask(&mut negotiator, option::INFO, &go_data("a", &[])).1, Next::Continue);
    let (replies, next) = ask(&mut negotiator, option::GO, &go_data("zzz", &[]));
    assert_eq!((kinds(&replies), next), (vec![rep::ERR_UNKNOWN], Next::Continue));
    assert!(matches!(ask(&mut negotiator, option::GO, &go_data("a", &[])).1, Next::Transmit(_)));
}

#[test]
fn the_empty_name_is_the_only_export_or_the_one_named_so() {
    let session = |names: &[&str]| match ask(&mut started(names, TlsMode::Off), option::GO, &go_data("", &[])).1 {
        Next::Transmit(session) => Some(session.export),
        _ => None,
    };
    assert_eq!(session(&["a"]), Some(0));
    assert_eq!(session(&["a", ""]), Some(1));
    assert_eq!(session(&["a", "b"]), None);
}

#[test]
fn names_of_4096_bytes_are_looked_up_and_longer_ones_refused() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    let (replies, _) = ask(&mut negotiator, option::INFO, &go_data(&"x".repeat(4096), &[]));
    assert_eq!(kinds(&replies), [rep::ERR_UNKNOWN]);
    assert!(replies[0].1.len() <= 4096, "CVE-2020-10761: the error text stays a legal string");
    let (replies, _) = ask(&mut negotiator, option::INFO, &go_data(&"x".repeat(4097), &[]));
    assert_eq!(kinds(&replies), [rep::ERR_INVALID]);
}

#[test]
fn list_names_every_export() {
    let mut negotiator = started(&["a", "bc"], TlsMode::Off);
    let (replies, _) = ask(&mut negotiator, option::LIST, b"");
    assert_eq!(kinds(&replies), [rep::SERVER, rep::SERVER, rep::ACK]);
    assert_eq!(replies[1].1, b"\0\0\0\x02bcfor tests");
    assert_eq!(kinds(&ask(&mut negotiator, option::LIST, b"x").0), [rep::ERR_INVALID]);
}

#[test]
fn metadata_needs_structured_replies_and_the_same_export() {
    let mut negotiator = started(&["a", "b"], TlsMode::Off);
    let query = meta_data("a", &["base:allocation"]);
    let (replies, _) = ask(&mut negotiator, option::SET_META_CONTEXT, &query);
    assert_eq!(kinds(&replies), [rep::ERR_INVALID]);
    ask(&mut negotiator, option::STRUCTURED_REPLY, b"");
    let (replies, _) = ask(&mut negotiator, option::SET_META_CONTEXT, &query);
    assert_eq!(kinds(&replies), [rep::META_CONTEXT, rep::ACK]);
    let (_, next) = ask(&mut negotiator, option::GO, &go_data("b", &[]));
    assert_eq!(
        next,
        Next::Transmit(Session {
            export: 1,
            size_bytes: 1 << 20,
            structured: true,
            contexts: Vec::new(),
            names_link: false
        })
    );
}

#[test]
fn a_failed_selection_clears_the_one_before() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    ask(&mut negotiator, option::STRUCTURED_REPLY, b"");
    let query = meta_data("a", &["base:allocation"]);
    ask(&mut negotiator, option::SET_META_CONTEXT, &query);
    ask(&mut negotiator, option::SET_META_CONTEXT, &meta_data("a", &["x-no:thing"]));
    let Next::Transmit(session) = ask(&mut negotiator, option::GO, &go_data("a", &[])).1 else { panic!("go failed") };
    assert!(session.structured && session.contexts.is_empty());
}

#[test]
fn wildcards_list_but_do_not_select() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    ask(&mut negotiator, option::STRUCTURED_REPLY, b"");
    for (queries, listed, selected) in [
        (&[][..], true, false),
        (&["base:"][..], true, false),
        (&["base:allocation"][..], true, true),
        (&["base:other", "x-y:z"][..], false, false),
        (&["qemu:"][..], true, false),
        (&["qemu:dirty-bitmap:mon"][..], true, true),
    ] {
        let found = |replies: Vec<(u32, Vec<u8>)>| kinds(&replies).contains(&rep::META_CONTEXT);
        let data = meta_data("a", queries);
        assert_eq!(found(ask(&mut negotiator, option::LIST_META_CONTEXT, &data).0), listed);
        assert_eq!(found(ask(&mut negotiator, option::SET_META_CONTEXT, &data).0), selected);
    }
    let (replies, _) = ask(&mut negotiator, option::SET_META_CONTEXT, &meta_data("a", &["nocolon"]));
    assert_eq!(kinds(&replies), [rep::ERR_INVALID]);
}

/// It is no context of which a client can ask the block status.
#[test]
fn who_asks_by_what_an_export_is_kept_is_told() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    ask(&mut negotiator, option::STRUCTURED_REPLY, b"");
    let names = |replies: Vec<(u32, Vec<u8>)>| -> Vec<String> {
        let contexts = replies.into_iter().filter(|(kind, _)| *kind == rep::META_CONTEXT);
        contexts.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect()
    };
    let wanted = meta_data("a", &["base:allocation", KEPT_CONTEXT]);
    assert_eq!(names(ask(&mut negotiator, option::LIST_META_CONTEXT, &wanted).0), ["base:allocation"]);
    assert_eq!(
        names(ask(&mut negotiator, option::SET_META_CONTEXT, &wanted).0),
        ["base:allocation", "spile:kept=here"]
    );
    let Next::Transmit(session) = ask(&mut negotiator, option::GO, &go_data("a", &[])).1 else { panic!("go failed") };
    assert_eq!(session.contexts.len(), 1);
}

#[test]
fn required_tls_refuses_all_but_starttls_and_abort() {
    let mut negotiator = started(&["a"], TlsMode::Required);
    for option in [option::LIST, option::INFO, option::GO, option::STRUCTURED_REPLY, 99] {
        assert_eq!(kinds(&ask(&mut negotiator, option, b"").0), [rep::ERR_TLS_REQD]);
    }
    assert_eq!(ask(&mut negotiator, option::STARTTLS, b"").1, Next::StartTls);
    negotiator.tls_started(offers(&["a"]));
    assert_eq!(kinds(&ask(&mut negotiator, option::STARTTLS, b"").0), [rep::ERR_INVALID]);
    assert_eq!(kinds(&ask(&mut negotiator, option::LIST, b"").0), [rep::SERVER, rep::ACK]);
    let mut plain = started(&["a"], TlsMode::Required);
    assert_eq!(ask(&mut plain, option::EXPORT_NAME, b"a").1, Next::HangUp);
    let mut plain = started(&["a"], TlsMode::Required);
    assert_eq!(ask(&mut plain, option::ABORT, b"").1, Next::HangUp);
}

#[test]
fn starttls_voids_what_was_agreed_before() {
    let mut negotiator = started(&["a"], TlsMode::Optional);
    ask(&mut negotiator, option::STRUCTURED_REPLY, b"");
    negotiator.refuse("a", &Error::new(ErrorKind::Busy, "not now"));
    negotiator.offer(offers(&["b"]).first().cloned());
    ask(&mut negotiator, option::SET_META_CONTEXT, &meta_data("b", &["base:allocation", LINK_CONTEXT]));
    assert_eq!(ask(&mut negotiator, option::STARTTLS, b"").1, Next::StartTls);
    negotiator.tls_started(offers(&["a"]));
    let (_, next) = ask(&mut negotiator, option::GO, &go_data("a", &[]));
    assert_eq!(
        next,
        Next::Transmit(Session {
            export: 0,
            size_bytes: 1 << 20,
            structured: false,
            contexts: Vec::new(),
            names_link: false
        })
    );
}

#[test]
fn starttls_without_tls_is_refused_by_policy() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    let (replies, next) = ask(&mut negotiator, option::STARTTLS, b"");
    assert_eq!((kinds(&replies), next), (vec![rep::ERR_POLICY], Next::Continue));
    let mut negotiator = started(&["a"], TlsMode::Optional);
    let (replies, next) = ask(&mut negotiator, option::STARTTLS, b"x");
    assert_eq!((kinds(&replies), next), (vec![rep::ERR_INVALID], Next::Continue));
}

#[test]
fn unknown_options_are_skipped_and_the_next_is_understood() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    for option in [0, 4, 11, 12, u32::MAX] {
        let (replies, next) = ask(&mut negotiator, option, &[7; 300]);
        assert_eq!((kinds(&replies), next), (vec![rep::ERR_UNSUP], Next::Continue));
    }
    assert_eq!(kinds(&ask(&mut negotiator, option::LIST, b"").0), [rep::SERVER, rep::ACK]);
}

#[test]
fn long_option_data_is_skipped_in_bounded_memory() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    for (option, error) in [(option::GO, rep::ERR_TOO_BIG), (99, rep::ERR_UNSUP)] {
        let mut header = option_bytes(option, b"");
        header[12..].copy_from_slice(&(1u32 << 20).to_be_bytes());
        let mut out = Vec::new();
        assert_eq!(negotiator.step(&header, &mut out).unwrap().consumed, 16);
        for piece in 0..16 {
            assert!(out.is_empty(), "answered before piece {piece}");
            assert_eq!(negotiator.step(&[0; 1 << 16], &mut out).unwrap().consumed, 1 << 16);
        }
        assert_eq!(out[12..16], error.to_be_bytes());
    }
}

#[test]
fn option_lengths_of_all_ones_end_the_session() {
    for option in [option::EXPORT_NAME, option::GO, option::LIST, 99] {
        let mut negotiator = started(&["a"], TlsMode::Off);
        let mut header = option_bytes(option, b"");
        header[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(negotiator.step(&header, &mut Vec::new()).unwrap().next, Next::HangUp);
    }
}

#[test]
fn a_flood_of_options_is_bounded() {
    let mut negotiator = started(&["a"], TlsMode::Off);
    let ended = (0..=MAX_OPTIONS)
        .position(|_| {
            let step = negotiator.step(&option_bytes(99, b""), &mut Vec::new()).unwrap();
            step.next == Next::HangUp
        })
        .expect("the flood ends");
    assert_eq!(ended as u32, MAX_OPTIONS);
}

#[test]
fn a_request_before_go_ends_the_session() {
    use crate::wire::request::{Command, Request};
    let request = Request { flags: 0, command: Command::Read, cookie: 1, offset_bytes: 0, len_bytes: 512 };
    let mut negotiator = started(&["a"], TlsMode::Off);
    let step = negotiator.step(&request.encode(), &mut Vec::new()).unwrap();
    assert_eq!(step.next, Next::HangUp);
}

proptest! {
    #[test]
    fn strangers_bytes_never_break_it(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz_handshake(&data);
    }

    #[test]
    fn strange_options_never_break_it(
        options in prop::collection::vec((0u32..14, prop::collection::vec(any::<u8>(), 0..60)), 0..12)
    ) {
        let mut data = 3u32.to_be_bytes().to_vec();
        options.iter().for_each(|(option, bytes)| data.extend(option_bytes(*option, bytes)));
        fuzz_handshake(&data);
    }

    /// What is answered does not depend on how the bytes arrive.
    #[test]
    fn byte_by_byte_is_the_same(name in "[a-z]{0,9}", infos in prop::collection::vec(0u16..5, 0..4)) {
        let mut stream = option_bytes(option::STRUCTURED_REPLY, b"");
        stream.extend(option_bytes(option::LIST, b""));
        stream.extend(option_bytes(option::INFO, &go_data(&name, &infos)));
        stream.extend(option_bytes(option::GO, &go_data("a", &infos)));
        let drive = |sizes: usize| {
            let mut negotiator = started(&["a"], TlsMode::Off);
            let (mut out, mut start, mut end) = (Vec::new(), 0, 0);
            loop {
                match negotiator.step(&stream[start..end], &mut out) {
                    Some(Step { next: Next::Transmit(session), .. }) => return (out, session),
                    Some(step) => start += step.consumed,
                    None => end = (end + sizes).min(stream.len()),
                }
            }
        };
        prop_assert_eq!(drive(1), drive(1 << 16));
    }
}
