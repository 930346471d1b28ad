//! A connection goes on at another server, and its front end notices nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use spile_core::ErrorKind;
use spile_engine::EngineKind;
use spile_front_vhost::{Config, Handover, Server};
use spile_lab::vhost::proto::{Header, VERSION, vring_state};
use spile_lab::vhost::{BackendChannel, BackendRequest, Device, DeviceOptions, DirtyLog, QueueOptions};

use crate::common::disk::TestDisk;
use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, OK, Options, R, WRITE, assert_hung_up, assert_refused, rings};
use crate::common::load::{under_load, wait_for_more};
use crate::common::{PATIENCE, Rig, rig, until};

fn config(queues: u16) -> Config {
    Config { name: "heir".to_owned(), queues, ..Config::default() }
}

/// Another server of the same disk, as another process would have it.
fn heir(rig: &Rig, queues: u16) -> Server<TestDisk> {
    Server::new(rig.engine.clone(), rig.disk.clone(), config(queues)).unwrap()
}

/// What arrives in the other process: the numbers as text, the descriptors as they are.
fn sent(handover: Handover) -> Handover {
    let text = serde_json::to_string(&handover.state).unwrap();
    Handover { state: serde_json::from_str(&text).unwrap(), ..handover }
}

/// Hands all of a server's connections to another.
fn move_all(from: &Server<TestDisk>, to: &Server<TestDisk>) -> usize {
    let handovers = from.hand_over();
    assert_eq!(from.connections(), 0);
    let count = handovers.len();
    handovers.into_iter().for_each(|handover| to.adopt(sent(handover)).unwrap());
    count
}

/// One connection, handed over and not adopted.
fn taken(rig: &Rig) -> Handover {
    let mut handovers = rig.server.hand_over();
    assert_eq!(handovers.len(), 1);
    handovers.pop().unwrap()
}

fn end(server: &Server<TestDisk>) {
    server.stop();
    server.wait_drained();
}

/// Both ends of a heap of descriptors, to make one go missing.
fn without_one(handover: Handover, number: usize) -> Handover {
    let Handover { socket, state, mut fds } = handover;
    fds.remove(number);
    Handover { socket, state, fds }
}

on_each_engine! {
    fn a_loaded_guest_goes_from_server_to_server(kind) {
        let rig = rig(kind);
        let mut device = Device::connect(&rig.path(), DeviceOptions::default()).unwrap();
        let options = QueueOptions { queues: 3, depth: 8, data_bytes: 4096, regions: 2, ..QueueOptions::default() };
        let queues = device.start(&options).unwrap();
        let mut last: Option<Server<TestDisk>> = None;
        under_load(queues, |answered| {
            for _ in 0..15 {
                wait_for_more(answered);
                let next = heir(&rig, 4);
                assert_eq!(move_all(last.as_ref().unwrap_or(&rig.server), &next), 1);
                last = Some(next);
            }
            wait_for_more(answered);
            // The connection is as it was, also for messages.
            assert_eq!(device.read_config().unwrap().size_bytes(), crate::common::SIZE);
            let bases = device.stop().unwrap();
            device.resume(&bases).unwrap();
            wait_for_more(answered);
        });
    }

    fn requests_in_flight_are_answered_before_the_connection_moves(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { inflight: true, ..Options::default() });
        guest.assert_works(0);
        rig.disk.hold();
        let asked: Vec<_> = (0..4).map(|_| guest.offer(0, FLUSH, 0, &[])).collect();
        guest.rings[0].publish_and_kick();
        until("they are in flight", || rig.disk.held() == 4);
        let heir = heir(&rig, 4);
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| move_all(&rig.server, &heir));
            // Longer than a front end may be within a message: this one is not.
            std::thread::sleep(Duration::from_millis(60));
            assert!(!moving.is_finished() && guest.rings[0].used() == 0);
            rig.disk.release();
            assert_eq!(moving.join().unwrap(), 1);
        });
        assert!(asked.iter().all(|asked| asked.status() == OK));
        guest.rings[0].take_ids(4);
        guest.assert_works(0);
        guest.assert_works(1);
        guest.connection.set_owner().unwrap();
        end(&heir);
        assert_hung_up("the heir has ended", &guest.connection);
    }

    fn what_the_disk_leaves_undone_is_not_answered_and_done_by_the_heir(kind) {
        for inflight in [true, false] {
            let rig = rig(kind);
            let mut guest = Guest::with(&rig.path(), Options { inflight, ..Options::default() });
            guest.assert_works(0);
            rig.disk.fail(Some(ErrorKind::Shutdown));
            rig.disk.take_did();
            let asked: Vec<_> = (0..4).map(|_| guest.offer(0, FLUSH, 0, &[])).collect();
            guest.rings[0].publish_and_kick();
            let mut did = 0;
            until("all are left undone", || {
                did += rig.disk.take_did().len();
                did == 4
            });
            let heir = heir(&rig, 4);
            assert_eq!(move_all(&rig.server, &heir), 1);
            assert_eq!(guest.rings[0].used(), 0, "what was left undone is answered");
            // The heir leaves them undone as well, to its own heir.
            let last = self::heir(&rig, 4);
            assert_eq!(move_all(&heir, &last), 1);
            rig.disk.fail(None);
            let done = self::heir(&rig, 4);
            assert_eq!(move_all(&last, &done), 1);
            guest.rings[0].take_ids(4);
            assert!(asked.iter().all(|asked| asked.status() == OK));
            guest.assert_works(0);
            guest.assert_works(1);
            end(&done);
        }
    }

    fn everything_that_was_agreed_on_is_kept(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { features: u64::MAX, inflight: true, ..Options::default() });
        let log = DirtyLog::new(guest.memory.end_address()).unwrap();
        guest.connection.set_log(log.len_bytes(), 0, log.file()).unwrap();
        guest.connection.set_config(32, &[0]).unwrap();
        let (channel, theirs) = BackendChannel::new().unwrap();
        guest.connection.set_backend_channel(theirs.as_fd()).unwrap();
        drop(theirs);
        guest.assert_works(0);
        log.clear();
        rig.disk.take_did();
        let heir = heir(&rig, 4);
        assert_eq!(move_all(&rig.server, &heir), 1);
        // The log, the write cache, the acknowledgements, the channel, the error event.
        guest.assert_works(0);
        until("pages are logged", || !log.dirty_pages().is_empty());
        assert!(rig.disk.take_did().contains(&crate::common::disk::Did::Write { at: 3584, len: 512, fua: true }));
        assert_refused("a size", guest.connection.set_vring_size(0, 3));
        heir.disk_has_changed();
        assert_eq!(channel.next(PATIENCE).unwrap(), Some(BackendRequest::ConfigChange));
        rings(&guest.rings[1].call);
        guest.rings[1].parts.set_used_event(guest.rings[1].next_used);
        guest.ask(1, FLUSH, 0, &[]);
        assert!(crate::common::guest::is_readable(&guest.rings[1].call, PATIENCE));
        guest.rings[0].offer(99);
        guest.rings[0].publish_and_kick();
        guest.rings[0].assert_broken();
        end(&heir);
    }

    fn a_message_on_its_way_is_read_by_the_heir(kind) {
        // When the hand-over is late, the old server may be the one that answers: with four, and once.
        let by_heir = (0..20).any(|_| answer_at_handover(kind) == 3);
        assert!(by_heir, "a message was never left to the heir");
    }

    fn who_is_stuck_within_a_message_is_left_behind(kind) {
        let rig = rig(kind);
        let (mut guest, stuck) = (rig.guest(), rig.guest());
        stuck.connection.socket().send_bytes(&[1, 0, 0, 0, 1], &[]).unwrap();
        let idle = rig.guest();
        std::thread::sleep(Duration::from_millis(20));
        let heir = heir(&rig, 4);
        assert_eq!(move_all(&rig.server, &heir), 2);
        assert_hung_up("half a message", &stuck.connection);
        guest.assert_works(0);
        idle.connection.set_owner().unwrap();
        end(&heir);
    }

    fn who_has_gone_is_not_handed_over(kind) {
        let rig = rig(kind);
        let mut gone = rig.guest();
        rig.disk.hold();
        gone.ask(0, FLUSH, 0, &[]);
        until("it is in flight", || rig.disk.held() == 1);
        drop(gone);
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| rig.server.hand_over());
            std::thread::sleep(Duration::from_millis(20));
            rig.disk.release();
            assert!(moving.join().unwrap().is_empty());
        });
    }

    fn a_heir_with_fewer_queues_or_features_declines(kind) {
        let rig = rig(kind);
        let guest = rig.guest();
        let handover = taken(&rig);
        let error = heir(&rig, 1).adopt(sent(handover)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert_hung_up("nobody took it", &guest.connection);
    }

    fn a_read_only_heir_declines_a_guest_that_may_write(kind) {
        let rig = rig(kind);
        let _guest = rig.guest();
        let handover = taken(&rig);
        let read_only = Config { read_only: true, ..config(4) };
        let heir = Server::new(rig.engine.clone(), rig.disk.clone(), read_only).unwrap();
        assert_eq!(heir.adopt(sent(handover)).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    fn a_handover_with_missing_or_wrong_descriptors_is_declined(kind) {
        for number in 0..8 {
            let rig = rig(kind);
            let mut guest = rig.guest();
            guest.assert_works(0);
            let handover = taken(&rig);
            assert_eq!(handover.fds.len(), 2 + 2 * 3, "two regions; kick, call and err of two queues");
            let error = heir(&rig, 4).adopt(without_one(handover, number)).unwrap_err();
            assert!(!error.to_string().is_empty());
        }
        let rig = rig(kind);
        let guest = rig.guest();
        let mut handover = taken(&rig);
        // A region's file that is something else.
        handover.fds[0] = OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
        assert!(heir(&rig, 4).adopt(handover).is_err());
        drop(guest);
    }

    fn a_broken_ring_is_broken_at_the_heir_too(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.rings[0].offer(99);
        guest.rings[0].publish_and_kick();
        guest.rings[0].assert_broken();
        let heir = heir(&rig, 4);
        assert_eq!(move_all(&rig.server, &heir), 1);
        guest.rings[0].kick();
        guest.assert_works(1);
        assert_eq!(rings(&guest.rings[0].err), 0, "it was looked at again");
        guest.reset_ring(0);
        guest.assert_works(0);
        end(&heir);
    }

    fn writes_after_a_handover_go_to_the_disk_once(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let area = guest.take(512);
        area.bytes.fill(9);
        // Made available, without a kick, right before the servers change.
        let asked: Vec<_> = (0..5).map(|sector| guest.offer(0, WRITE, sector, &[(area.address, 512, R)])).collect();
        guest.rings[0].publish();
        let heir = heir(&rig, 4);
        assert_eq!(move_all(&rig.server, &heir), 1);
        guest.rings[0].take_ids(5);
        assert!(asked.iter().all(|asked| asked.status() == OK));
        assert_eq!(rig.disk.take_did().len(), 5);
        end(&heir);
    }
}

/// Asks for the number of queues while the server, which has four, hands over to one that has three.
fn answer_at_handover(kind: EngineKind) -> u64 {
    let rig = rig(kind);
    let mut guest = rig.guest();
    rig.disk.hold();
    guest.ask(0, FLUSH, 0, &[]);
    until("it is in flight", || rig.disk.held() == 1);
    // The server waits for the flush before it answers the first of these, and hands over before it reads the second.
    let message = |request, payload: &[u8]| {
        let header = Header { request, flags: VERSION, len_bytes: payload.len() as u32 };
        guest.connection.socket().send_raw(header, payload, &[]).unwrap();
    };
    message(11, &vring_state(0, 0));
    std::thread::sleep(Duration::from_millis(20));
    let heir = heir(&rig, 3);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| move_all(&rig.server, &heir));
        std::thread::sleep(Duration::from_millis(60));
        message(17, &[]);
        rig.disk.release();
        assert_eq!(moving.join().unwrap(), 1);
    });
    assert_eq!(guest.connection.socket().receive().unwrap().payload, vring_state(0, 1));
    let answer = guest.connection.socket().receive().unwrap().u64().unwrap();
    end(&heir);
    answer
}

/// Between two engines, as between two processes that were started with different options.
#[test]
fn a_guest_goes_from_one_engine_to_the_other() {
    let (from, to) = (rig(EngineKind::Auto), rig(EngineKind::Threads));
    let heir = Server::new(to.engine.clone(), from.disk.clone(), config(4)).unwrap();
    let mut guest = from.guest();
    guest.assert_works(0);
    assert_eq!(move_all(&from.server, &heir), 1);
    guest.assert_works(0);
    let back = Server::new(from.engine.clone(), Arc::clone(&from.disk), config(4)).unwrap();
    assert_eq!(move_all(&heir, &back), 1);
    guest.assert_works(1);
    end(&back);
}
