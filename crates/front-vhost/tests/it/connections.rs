//! Front ends that come and go, too many, too fast, or at the wrong moment.

use std::os::unix::net::UnixStream;
use std::sync::Barrier;

use spile_lab::vhost::Connection;
use spile_lab::vhost::proto::{Header, VERSION};

use crate::common::disk::Did;
use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, OK, Options, R, WRITE, assert_hung_up, negotiate};
use crate::common::{Rig, rig, rig_with, until};

fn write_held(rig: &Rig, guest: &mut Guest, sectors: std::ops::Range<u64>) {
    rig.disk.hold();
    let count = rig.disk.held() + sectors.clone().count();
    for sector in sectors {
        let area = guest.take(512);
        area.bytes.fill(0xaa);
        guest.offer(0, WRITE, sector, &[(area.address, 512, R)]);
    }
    guest.rings[0].publish_and_kick();
    until("the writes are in flight", || rig.disk.held() == count);
}

on_each_engine! {
    fn a_storm_of_connections_is_survived(kind) {
        let rig = rig_with(kind, |setup| setup.config.max_connections = 2000);
        let mut guest = rig.guest();
        for round in 0..1000 {
            let stream = UnixStream::connect(rig.path()).unwrap();
            match round % 4 {
                0 => {}
                1 => Connection::new(spile_lab::vhost::Socket::new(stream).unwrap()).set_owner().unwrap(),
                2 => stream.shutdown(std::net::Shutdown::Both).unwrap(),
                _ => {
                    let header = Header { request: 1, flags: VERSION, len_bytes: 0 }.to_bytes();
                    rustix::io::write(&stream, &header[..round % 12]).unwrap();
                }
            }
        }
        guest.assert_works(0);
        drop(guest);
        rig.assert_quiet();
        rig.assert_serves();
    }

    fn connections_at_once_are_counted_and_the_next_is_turned_away(kind) {
        let rig = rig_with(kind, |setup| setup.config.max_connections = 3);
        let mut guests = [rig.guest(), rig.guest(), rig.guest()];
        for _ in 0..5 {
            assert_hung_up("one too many", &Connection::connect(&rig.path()).unwrap());
        }
        guests.iter_mut().for_each(|guest| guest.assert_works(0));
        drop(guests);
        rig.assert_quiet();
        rig.assert_serves();
    }

    fn connections_without_a_guest_give_up_their_places(kind) {
        let rig = rig_with(kind, |setup| setup.config.max_connections = 3);
        let mut guest = rig.guest();
        let idle: Vec<_> = (0..8).map(|_| UnixStream::connect(rig.path()).unwrap()).collect();
        let mut others = [rig.guest(), rig.guest()];
        guest.assert_works(0);
        others.iter_mut().for_each(|other| other.assert_works(0));
        assert_hung_up("now there are three guests", &Connection::connect(&rig.path()).unwrap());
        drop((idle, others));
        guest.assert_works(0);
        drop(guest);
        rig.assert_quiet();
    }

    fn many_guests_come_and_go_at_once(kind) {
        let rig = rig_with(kind, |setup| setup.config.max_connections = 64);
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for number in 0..4u8 {
                let (rig, start) = (&rig, &start);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..25 {
                        let mut guest = rig.guest();
                        let sector = 100 + u64::from(number);
                        assert_eq!(guest.write(0, sector, &[number ^ round; 512]), OK);
                        assert_eq!(guest.read(1, sector, 512), [number ^ round; 512]);
                        if round % 3 == 0 {
                            guest.ask(0, FLUSH, 0, &[]);
                        }
                    }
                });
            }
        });
        rig.assert_quiet();
        assert!(rig.server.metrics().answered() >= 200);
    }

    fn a_guest_that_goes_with_requests_in_flight_has_them_ended(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        write_held(&rig, &mut guest, 0..5);
        drop(guest);
        until("its end is seen", || rig.server.connections() == 1);
        rig.disk.release();
        rig.assert_quiet();
        assert_eq!((rig.server.metrics().answered(), rig.disk.bytes(0, 5 * 512)), (5, vec![0xaa; 5 * 512]));
    }

    fn a_new_connection_waits_for_what_an_ended_one_has_in_flight(kind) {
        let rig = rig(kind);
        let mut gone = rig.guest();
        write_held(&rig, &mut gone, 0..3);
        until("both of its queues are at work", || rig.server.metrics().ring_starts == 2);
        // Its front end dies. The guest's memory lives on, and so do its writes, which are older than all that follow.
        drop(gone);
        std::thread::scope(|scope| {
            let new = scope.spawn(|| {
                let mut guest = rig.guest();
                assert_eq!(guest.write(0, 0, &[0xbb; 512]), OK);
            });
            until("the new one is there", || rig.server.connections() == 2);
            std::thread::sleep(std::time::Duration::from_millis(60));
            assert_eq!((rig.disk.held(), rig.server.metrics().ring_starts), (3, 2), "it did not wait");
            rig.disk.release();
            new.join().unwrap();
        });
        let writes = rig.disk.take_did();
        assert_eq!(writes.last(), Some(&Did::Write { at: 0, len: 512, fua: false }));
        assert_eq!((writes.len(), rig.disk.bytes(0, 512)), (4, vec![0xbb; 512]));
    }

    fn who_goes_while_it_waits_for_another_is_let_go(kind) {
        let rig = rig(kind);
        let mut gone = rig.guest();
        write_held(&rig, &mut gone, 0..1);
        drop(gone);
        for _ in 0..3 {
            let guest = Guest::negotiated(&rig.path(), Options { protocol: crate::common::guest::WITHOUT_ACK, ..Options::default() });
            guest.share_memory().unwrap();
            guest.set_up_ring(0, 0).unwrap();
        }
        until("those that wait have gone", || rig.server.connections() == 1);
        rig.disk.release();
        rig.assert_quiet();
        rig.assert_serves();
    }

    fn two_guests_share_a_disk_while_one_moves(kind) {
        let rig = rig(kind);
        let mut source = rig.guest();
        assert_eq!(source.write(0, 1, &[1; 512]), OK);
        // The destination is connected, and even set up, while the source still works.
        let mut destination = rig.guest();
        write_held(&rig, &mut source, 2..3);
        rig.disk.release();
        source.rings[0].take();
        let base = source.connection.stop_vring(0).unwrap();
        assert_eq!(base, source.rings[0].next_avail);
        assert_eq!(destination.read(0, 1, 512), [1; 512]);
        assert_eq!(destination.write(0, 1, &[2; 512]), OK);
        drop(source);
        destination.assert_works(1);
        assert_eq!(destination.read(1, 1, 512), [2; 512]);
    }

    fn a_stop_answers_what_is_in_flight_and_takes_nothing_new(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        write_held(&rig, &mut guest, 0..4);
        rig.server.stop();
        // What comes after the stop is not looked at.
        until("no new request is taken", || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            rig.server.connections() == 1
        });
        guest.ask(0, FLUSH, 0, &[]);
        std::thread::sleep(std::time::Duration::from_millis(20));
        rig.disk.release();
        rig.server.wait_drained();
        assert_eq!(guest.rings[0].used(), 4);
        assert_hung_up("the server has stopped", &guest.connection);
        assert!(!rig.disk.take_did().contains(&Did::Flush));
        assert!(UnixStream::connect(rig.path()).is_err() || negotiate_fails(&rig));
    }
}

/// The socket may still be there, but nobody answers.
fn negotiate_fails(rig: &Rig) -> bool {
    let connection = Connection::connect(&rig.path());
    connection.is_ok_and(|connection| {
        connection.socket().set_patience(std::time::Duration::from_millis(50)).unwrap();
        connection.features().is_err()
    })
}

/// A front end whose messages come while its guest works, as QEMU's do when interrupts are rerouted.
#[test]
fn calls_are_exchanged_under_load() {
    let rig = rig(Default::default());
    let mut guest = rig.guest();
    for round in 0..200 {
        let call = crate::common::guest::event();
        let request = spile_lab::vhost::proto::Request::SetVringCall;
        let asked = guest.offer(0, FLUSH, 0, &[]);
        guest.rings[0].parts.set_used_event(guest.rings[0].next_used);
        guest.rings[0].publish_and_kick();
        guest.connection.set_vring_fd(request, 0, std::os::fd::AsFd::as_fd(&call)).unwrap();
        guest.rings[0].take();
        assert_eq!(asked.status(), OK, "round {round}");
        assert!(crate::common::guest::is_readable(&call, crate::common::PATIENCE));
    }
    let _ = negotiate(&rig.path(), &Options::default());
}
