//! Descriptors and memory that front ends send: whatever becomes of their messages, nothing is kept that is not needed.
//!
//! A program of its own: the count is that of the whole process.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use common::engines::{on_each_engine, run_on_aio};
use common::guest::{Guest, Options, event, negotiate};
use common::messages::{Good, all, answer, file, region};
use common::{Rig, SIZE, rig, rig_with, until};
use spile_engine::EngineKind;
use spile_lab::vhost::proto::{InflightPayload, Request};

/// The tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Memory of this process that the kernel may not move or take, in KiB.
fn pinned_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Runs `each` often; the process has no more files open afterwards than after the first few times.
fn stays_flat(kind: EngineKind, rounds: usize, each: impl Fn(&Rig, usize)) {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    // Those that have gone are counted until they are noticed; none of ours is to be turned away for them.
    let rig = rig_with(kind, |setup| setup.config.max_connections = 2000);
    let run = |range: std::ops::Range<usize>| range.for_each(|round| each(&rig, round));
    run(0..8);
    until("all connections end", || rig.server.connections() == 0);
    // What the engine lets go of, it may let go of a moment later.
    let settled = |limit: usize| until("files are closed", || open_files() <= limit);
    settled(usize::MAX);
    let before = open_files();
    run(8..rounds);
    until("all connections end", || rig.server.connections() == 0);
    settled(before + 2);
    rig.assert_serves();
}

on_each_engine! {
    fn messages_with_one_too_many(kind) {
        stays_flat(kind, 40, |rig, _| {
            for Good { request, payload, mut fds } in all() {
                fds.push(event());
                fds.push(file(SIZE));
                let (connection, _) = negotiate(&rig.path(), &Options::default());
                assert!(answer(&connection, request, &payload, &fds).is_none());
            }
        });
    }

    fn messages_with_far_too_many(kind) {
        stays_flat(kind, 500, |rig, round| {
            let fds: Vec<OwnedFd> = (0..9 + round % 200).map(|_| event()).collect();
            let (connection, _) = negotiate(&rig.path(), &Options::default());
            assert!(answer(&connection, 1, &[], &fds).is_none());
        });
    }

    fn the_second_half_of_a_message_with_more(kind) {
        stays_flat(kind, 300, |rig, _| {
            let (connection, _) = negotiate(&rig.path(), &Options::default());
            let events = [event(), event(), event()];
            let fds = events.each_ref().map(|event| event.as_fd());
            let bytes = [&[12, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &[0; 8]].concat();
            connection.socket().send_bytes(&bytes[..12], &fds[..1]).unwrap();
            connection.socket().send_bytes(&bytes[12..], &fds[1..]).unwrap();
            common::guest::assert_hung_up("three descriptors", &connection);
        });
    }

    fn messages_that_are_refused_over_and_over(kind) {
        stays_flat(kind, 20, |rig, _| {
            let (connection, _) = negotiate(&rig.path(), &Options::default());
            for _ in 0..100 {
                let bad = InflightPayload { len_bytes: 1, file_offset: 0, queues: 1, queue_size: 16 };
                assert!(connection.set_inflight(bad, file(4096).as_fd()).is_err());
                let beyond = spile_lab::vhost::proto::RegionPayload { len_bytes: 8192, ..region(0) };
                assert!(connection.add_memory_region(beyond, file(4096).as_fd()).is_err());
                assert!(connection.set_memory_table(&[region(1), beyond], &[file(4096).as_fd(), file(4096).as_fd()]).is_err());
                assert!(connection.set_vring_fd(Request::SetVringKick, 0, file(1).as_fd()).is_err());
                assert!(connection.set_vring_fd(Request::SetVringCall, 9, event().as_fd()).is_err());
                assert!(connection.tell(Request::SetLogBase, &[255; 16], &[file(1).as_fd()]).is_err());
            }
        });
    }

    fn messages_that_take_the_place_of_the_last(kind) {
        stays_flat(kind, 12, |rig, _| {
            let (connection, _) = negotiate(&rig.path(), &Options::default());
            for round in 0..100 {
                for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
                    connection.set_vring_fd(request, 0, event().as_fd()).unwrap();
                }
                let (inflight, fd) = connection.inflight(2, 128).unwrap();
                connection.set_inflight(inflight, fd.as_fd()).unwrap();
                connection.set_log(4096, 0, file(4096).as_fd()).unwrap();
                connection.tell(Request::SetLogFd, &[], &[event().as_fd()]).unwrap();
                connection.set_backend_channel(event().as_fd()).unwrap();
                connection.set_memory_table(&[region(0)], &[file(4096).as_fd()]).unwrap();
                connection.add_memory_region(region(1), file(4096).as_fd()).unwrap();
                let fd = (round % 2 == 0).then(event);
                let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
                connection.tell(Request::RemMemReg, &region(1).single(), &fds).unwrap();
            }
        });
    }

    fn guests_that_come_work_and_go(kind) {
        stays_flat(kind, 300, |rig, round| {
            let mut guest = Guest::with(&rig.path(), Options { inflight: round % 2 == 0, ..Options::default() });
            guest.assert_works(round % 2);
            if round % 3 == 0 {
                guest.reset_ring(0);
            }
            if round % 5 == 0 {
                guest.rings[0].offer(99);
                guest.rings[0].publish_and_kick();
                guest.rings[0].assert_broken();
            }
        });
    }

    fn connections_that_say_nothing(kind) {
        stays_flat(kind, 1500, |rig, round| {
            let stream = std::os::unix::net::UnixStream::connect(rig.path()).unwrap();
            if round % 2 == 0 {
                rustix::io::write(&stream, &[1, 0, 0][..round % 4]).unwrap();
            }
        });
    }

    fn memory_that_was_pinned(kind) {
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let rig = rig_with(kind, |setup| setup.config.pins_memory = true);
        let before = pinned_kib();
        for _ in 0..20 {
            let mut guest = rig.guest();
            guest.assert_works(0);
            guest.assert_works(1);
            if rig.engine.kind() == EngineKind::Uring && pinned_kib() < before + 2048 {
                println!("SKIP memory_that_was_pinned: this host does not let us pin memory");
                return;
            }
            drop(guest);
            until("the connection ends", || rig.server.connections() == 0);
            until("its memory is let go", || pinned_kib() <= before);
        }
    }

    fn handovers_that_nobody_adopts(kind) {
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let rig = rig(kind);
        let mut before = 0;
        for round in 0..60 {
            let server = spile_front_vhost::Server::new(rig.engine.clone(), rig.disk.clone(), Default::default()).unwrap();
            common::listen_again(&server, &rig.path());
            let mut guest = rig.guest();
            guest.assert_works(0);
            let handovers = server.hand_over();
            assert_eq!(handovers.len(), 1);
            drop((handovers, guest, server));
            if round == 5 {
                before = open_files();
            }
        }
        until("files are closed", || open_files() <= before + 2);
    }
}
