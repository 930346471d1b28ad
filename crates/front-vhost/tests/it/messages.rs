//! Messages that break the protocol: every rule of `docs/interop/vhost-user.rst` that the server holds front ends to.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use spile_core::ErrorKind;
use spile_lab::vhost::Connection;
use spile_lab::vhost::proto::{
    FLAG_REPLY, Header, Request, VERSION, VringAddresses, feature, protocol_feature, vring_state,
};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{
    Guest, NONE, OK, Options, READ, W, WITHOUT_ACK, assert_hung_up, assert_refused, event, negotiate,
};
use crate::common::messages::{all, answer, file, send};
use crate::common::{PATIENCE, Rig, rig, rig_with};

/// A connection that has only agreed on features.
fn connect(rig: &Rig) -> Connection {
    negotiate(&rig.path(), &Options::default()).0
}

on_each_engine! {
    fn headers_of_another_version_replies_and_long_payloads_are_hung_up_on(kind) {
        let rig = rig(kind);
        for (flags, len_bytes) in [(0, 0), (2, 0), (3, 0), (VERSION | FLAG_REPLY, 0), (VERSION, 513), (VERSION, u32::MAX)] {
            let connection = connect(&rig);
            connection.socket().send_raw(Header { request: 1, flags, len_bytes }, &[], &[]).unwrap();
            assert_hung_up("a bad header", &connection);
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn unknown_requests_are_hung_up_on(kind) {
        let rig = rig(kind);
        let known: Vec<u32> = all().iter().map(|good| good.request).collect();
        for request in (0..=64).chain([u32::MAX]).filter(|request| !known.contains(request)) {
            let answer = answer(&connect(&rig), request, &[0; 8], &[]);
            assert!(answer.is_none(), "request {request} was answered");
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn every_message_has_its_size_to_the_byte(kind) {
        let rig = rig(kind);
        for good in all() {
            let longer = [&good.payload[..], &[0]].concat();
            let shorter = good.payload.split_last().map(|(_, rest)| rest);
            for payload in [Some(&longer[..]), shorter].into_iter().flatten() {
                let answer = answer(&connect(&rig), good.request, payload, &good.fds);
                assert!(answer.is_none(), "request {} with {} bytes was answered", good.request, payload.len());
            }
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn descriptors_come_where_they_are_due_and_nowhere_else(kind) {
        let rig = rig(kind);
        for mut good in all() {
            assert!(answer(&connect(&rig), good.request, &good.payload, &good.fds).is_some(), "{}", good.request);
            if good.fds.pop().is_some() {
                let short = answer(&connect(&rig), good.request, &good.payload, &good.fds);
                assert!(short.is_none(), "request {} without its descriptor was answered", good.request);
                good.fds.push(event());
            }
            // One that may come with REM_MEM_REG is closed unused; a second one may not.
            let more = if good.request == 38 { 2 } else { 1 };
            good.fds.extend((0..more).map(|_| event()));
            let answer = answer(&connect(&rig), good.request, &good.payload, &good.fds);
            assert!(answer.is_none(), "request {} with a descriptor too many was answered", good.request);
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn more_descriptors_than_any_message_has_are_hung_up_on(kind) {
        let rig = rig(kind);
        for count in [9, 64, 253] {
            let fds: Vec<OwnedFd> = (0..count).map(|_| event()).collect();
            assert!(answer(&connect(&rig), 3, &[], &fds).is_none(), "{count} descriptors");
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn queues_that_there_are_not_are_refused(kind) {
        let rig = rig(kind);
        for index in [4, 255, 256, u32::MAX] {
            let connection = connect(&rig);
            assert_refused("size", connection.set_vring_size(index, 16));
            assert_refused("base", connection.set_vring_base(index, 0));
            assert_refused("addresses", connection.set_vring_addresses(VringAddresses { index, ..Default::default() }));
            assert_refused("enable", connection.enable_vring(index, true));
            for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
                // The number of a queue has eight bits there.
                let result = connection.set_vring_fd(request, index.min(255) as u8, event().as_fd());
                assert_refused("descriptor", result);
            }
            // Its answer has no room for an error.
            assert!(answer(&connection, Request::GetVringBase as u32, &vring_state(index, 0), &[]).is_none());
        }
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn a_queue_has_a_power_of_two_of_descriptors_up_to_32768(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        for size in [0, 3, 6, 32767, 32769, 65536, 65536 + 16, u32::MAX] {
            assert_refused("a size", connection.set_vring_size(0, size));
        }
        for size in [1, 2, 16, 32768] {
            connection.set_vring_size(0, size).unwrap();
        }
    }

    fn a_base_has_16_bits(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let set = |base: u32| connection.tell(Request::SetVringBase, &vring_state(0, base), &[]);
        set(65535).unwrap();
        assert_refused("17 bits", set(65536));
        assert_refused("32 bits", set(u32::MAX));
        assert_eq!(connection.stop_vring(0).unwrap(), 65535);
    }

    fn a_ring_is_enabled_by_0_or_1(kind) {
        let rig = rig(kind);
        assert!(answer(&connect(&rig), Request::SetVringEnable as u32, &vring_state(0, 2), &[]).is_none());
        rig.assert_serves();
    }

    fn features_that_were_not_offered_are_refused(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let offered = connection.features().unwrap();
        for bit in (0..64).filter(|bit| offered & 1 << bit == 0) {
            assert_refused("a feature", connection.set_features(offered | 1 << bit));
        }
        let offered = connection.offered_protocol_features().unwrap();
        for bit in (0..64).filter(|bit| offered & 1 << bit == 0) {
            let set = connection.tell(Request::SetProtocolFeatures, &(offered | 1 << bit).to_ne_bytes(), &[]);
            assert_refused("a protocol feature", set);
        }
        // What it had agreed on is still so.
        connection.set_owner().unwrap();
    }

    fn rings_lie_in_the_memory_on_even_addresses(kind) {
        let rig = rig(kind);
        let guest = Guest::negotiated(&rig.path(), Options::default());
        let set = |addresses| guest.connection.set_vring_addresses(addresses);
        let good = guest.addresses(0);
        assert_refused("before its size", set(good));
        guest.connection.set_vring_size(0, 16).unwrap();
        assert_refused("before the memory", set(good));
        guest.share_memory().unwrap();
        set(good).unwrap();
        // The two regions lie side by side also for the front end; no ring goes on from one to the other.
        let seam = guest.memory.regions()[1].payload().user_address;
        let end = seam + guest.memory.regions()[1].bytes.len() as u64;
        for at in [0, u64::MAX, u64::MAX - 15, seam - 16, end - 16, end, good.descriptors - (8 << 20)] {
            assert_refused("descriptors", set(VringAddresses { descriptors: at, ..good }));
            assert_refused("available", set(VringAddresses { available: at, ..good }));
            assert_refused("used", set(VringAddresses { used: at, ..good }));
        }
        assert_refused("descriptors", set(VringAddresses { descriptors: good.descriptors + 8, ..good }));
        assert_refused("available", set(VringAddresses { available: good.available + 1, ..good }));
        assert_refused("used", set(VringAddresses { used: good.used + 2, ..good }));
    }

    fn kick_call_and_err_are_eventfds(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        let folder = std::fs::File::open("/").unwrap().into();
        for fd in [file(4096), UnixStream::pair().unwrap().0.into(), pipe, folder] {
            for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
                assert_refused("another file", guest.connection.set_vring_fd(request, 0, fd.as_fd()));
            }
        }
        guest.assert_works(0);
    }

    fn a_queue_without_a_kick_is_refused_and_one_without_a_call_is_served(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let without = |request| guest.connection.tell(request, &(1u64 << 8).to_ne_bytes(), &[]);
        assert_refused("polling", without(Request::SetVringKick));
        without(Request::SetVringCall).unwrap();
        without(Request::SetVringErr).unwrap();
        guest.assert_works(0);
    }

    fn a_kick_before_the_memory_is_kept_until_there_is_a_ring(kind) {
        let rig = rig(kind);
        let mut guest = Guest::negotiated(&rig.path(), Options::default());
        let kick = |guest: &Guest, index: usize| {
            guest.connection.set_vring_fd(Request::SetVringKick, index as u8, guest.rings[index].kick.as_fd()).unwrap();
        };
        kick(&guest, 0);
        guest.connection.enable_vring(0, true).unwrap();
        guest.rings[0].kick();
        guest.connection.set_vring_size(0, 16).unwrap();
        assert_refused("addresses before the memory", guest.connection.set_vring_addresses(guest.addresses(0)));
        guest.share_memory().unwrap();
        let asked = guest.ask(0, 4, 0, &[]);
        guest.connection.set_vring_addresses(guest.addresses(0)).unwrap();
        guest.rings[0].take();
        assert_eq!(asked.status(), OK);
    }

    fn messages_before_set_owner_and_a_second_owner_do_no_harm(kind) {
        let rig = rig(kind);
        let connection = Connection::connect(&rig.path()).unwrap();
        assert_ne!(connection.features().unwrap(), 0);
        connection.set_features(feature::PROTOCOL_FEATURES).unwrap();
        connection.set_owner().unwrap();
        connection.set_owner().unwrap();
        assert_eq!(connection.ask(Request::GetQueueNum, &[], &[]).unwrap().u64().unwrap(), 4);
        rig.assert_serves();
    }

    fn resets_stop_the_rings(kind) {
        let rig = rig(kind);
        for request in [Request::ResetOwner, Request::ResetDevice] {
            let mut guest = rig.guest();
            guest.assert_works(1);
            guest.connection.tell(request, &[], &[]).unwrap();
            let metrics = rig.server.metrics();
            assert_eq!(metrics.ring_starts, metrics.ring_stops, "{request:?}: no queue is at work");
            let left = guest.ask(1, READ, 0, &[]);
            guest.connection.enable_vring(1, true).unwrap();
            assert_eq!((guest.rings[1].used(), left.status()), (0, NONE));
            // It goes on where it ended once it has a kick again.
            let kick = guest.rings[1].kick.as_fd();
            guest.connection.set_vring_fd(Request::SetVringKick, 1, kick).unwrap();
            guest.rings[1].take();
            guest.assert_works(1);
        }
    }

    fn what_is_refused_changes_nothing(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let connection = &guest.connection;
        assert_refused("size", connection.set_vring_size(0, 3));
        assert_refused("features", connection.set_features(1 << 63));
        assert_refused("addresses", connection.set_vring_addresses(VringAddresses::default()));
        let too_far = spile_lab::vhost::proto::RegionPayload { len_bytes: 1 << 40, ..guest.memory.regions()[0].payload() };
        assert_refused("memory", connection.set_memory_table(&[too_far], &[guest.memory.file()]));
        assert_refused("log", connection.tell(Request::SetLogBase, &[0; 16], &[guest.memory.file()]));
        assert_refused("inflight", connection.tell(Request::SetInflightFd, &[0; 24], &[guest.memory.file()]));
        guest.assert_works(0);
        guest.assert_works(1);
        assert_eq!(rig.server.metrics().ring_starts, 2, "not even stopped in between");
    }

    fn without_reply_ack_a_refused_message_ends_the_connection(kind) {
        let rig = rig(kind);
        let options = Options { protocol: WITHOUT_ACK, ..Options::default() };
        let mut guest = Guest::with(&rig.path(), options);
        guest.assert_works(0);
        guest.connection.set_vring_size(0, 3).unwrap();
        assert_hung_up("a refused message", &guest.connection);
        rig.assert_serves();
        rig.assert_quiet();
    }

    fn a_queue_has_its_size_before_its_addresses_but_the_order_is_free_otherwise(kind) {
        let rig = rig(kind);
        let mut guest = Guest::negotiated(&rig.path(), Options::default());
        guest.connection.enable_vring(0, true).unwrap();
        guest.share_memory().unwrap();
        guest.connection.set_vring_base(0, 0).unwrap();
        guest.connection.set_vring_fd(Request::SetVringCall, 0, guest.rings[0].call.as_fd()).unwrap();
        guest.connection.set_vring_size(0, 16).unwrap();
        guest.connection.set_vring_fd(Request::SetVringKick, 0, guest.rings[0].kick.as_fd()).unwrap();
        guest.connection.set_vring_addresses(guest.addresses(0)).unwrap();
        guest.assert_works(0);
        guest.connection.enable_vring(0, false).unwrap();
        let asked = guest.ask(0, READ, 0, &[]);
        guest.connection.set_owner().unwrap();
        assert_eq!(guest.rings[0].used(), 0, "a disabled ring is not looked at");
        guest.connection.enable_vring(0, true).unwrap();
        guest.rings[0].take();
        assert_eq!(asked.status(), OK);
    }

    fn without_protocol_features_rings_are_enabled_from_the_start(kind) {
        let rig = rig(kind);
        let features = !(feature::PROTOCOL_FEATURES | feature::LOG_ALL);
        let mut guest = Guest::negotiated(&rig.path(), Options { features, ..Options::default() });
        guest.share_memory().unwrap();
        guest.connection.set_vring_size(0, 16).unwrap();
        guest.connection.set_vring_addresses(guest.addresses(0)).unwrap();
        guest.connection.set_vring_fd(Request::SetVringKick, 0, guest.rings[0].kick.as_fd()).unwrap();
        guest.assert_works(0);
    }

    fn a_message_may_come_byte_by_byte_and_many_at_once(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let message = Header { request: 11, flags: VERSION, len_bytes: 8 }.to_bytes();
        for byte in message.iter().chain(&vring_state(2, 0)) {
            connection.socket().send_bytes(&[*byte], &[]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(connection.socket().receive().unwrap().payload, vring_state(2, 0));
        let many = Header { request: 1, flags: VERSION, len_bytes: 0 }.to_bytes().repeat(50);
        connection.socket().send_bytes(&many, &[]).unwrap();
        for _ in 0..50 {
            assert_ne!(connection.socket().receive().unwrap().u64().unwrap(), 0);
        }
    }
}

/// Not twice: waiting is the socket's, whatever the engine.
#[test]
fn who_is_stuck_within_a_message_is_hung_up_on_and_holds_up_nobody() {
    let rig = rig_with(Default::default(), |setup| setup.config.max_connections = 8);
    let header = Header { request: 10, flags: VERSION, len_bytes: 8 }.to_bytes();
    let [silent, bodiless, dripping, deaf] = [(); 4].map(|()| connect(&rig));
    let socket = |connection: &Connection, bytes: &[u8]| connection.socket().send_bytes(bytes, &[]);
    socket(&silent, &header[..5]).unwrap();
    socket(&bodiless, &header).unwrap();
    deaf.socket().set_patience(PATIENCE).unwrap();
    let ask_on = std::thread::spawn(move || {
        let ask = Header { request: 24, flags: VERSION, len_bytes: 12 + 256 }.to_bytes();
        let ask = [&ask[..], &[0; 4], &256u32.to_ne_bytes(), &[0; 4 + 256]].concat();
        (0..).map(|_| deaf.socket().send_bytes(&ask, &[])).find_map(Result::err).unwrap()
    });
    let began = Instant::now();
    // A byte at a time, and never to the end.
    let dripped = (0..).find(|at| {
        rig.assert_serves();
        std::thread::sleep(Duration::from_millis(300));
        assert!(began.elapsed() < PATIENCE, "it may go on for ever");
        let long = Header { request: 5, flags: VERSION, len_bytes: 500 }.to_bytes();
        socket(&dripping, &[long.get(*at).copied().unwrap_or(0)]).is_err()
    });
    assert!(dripped > Some(3), "hung up on too early: {dripped:?}");
    for connection in [silent, bodiless] {
        connection.socket().set_patience(PATIENCE).unwrap();
        assert_hung_up("half a message", &connection);
    }
    assert_eq!(ask_on.join().unwrap().kind(), ErrorKind::Io);
    rig.assert_quiet();
}

/// Messages that have an answer of their own are answered with that also when one asks for an acknowledgement.
#[test]
fn an_acknowledgement_never_takes_the_place_of_an_answer() {
    let rig = rig(Default::default());
    let connection = connect(&rig);
    assert!(connection.protocol_features() & protocol_feature::REPLY_ACK != 0);
    send(&connection, 1, &[], &[]).unwrap();
    assert!(connection.socket().receive().unwrap().u64().unwrap() > 1);
    // Once, not twice.
    send(&connection, 17, &[], &[]).unwrap();
    let reply = connection.socket().receive().unwrap();
    assert_eq!((reply.header.request, reply.u64().unwrap()), (17, 4));
    let mut guest = rig.guest();
    let area = guest.take(512);
    assert_eq!(guest.run(0, READ, 0, &[(area.address, 512, W)]), (OK, 513));
}
