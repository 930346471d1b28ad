//! A disk that moves between hosts: its guests wait while it is not here.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spile_core::ErrorKind;
use spile_front_vhost::{Config, Passage, Server};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, OK, Options};
use crate::common::{Rig, listen_again, rig, rig_with, until};

fn options() -> Options {
    Options { inflight: true, ..Options::default() }
}

/// A request that is made now is not answered, until `then` has been done.
fn waits_until(guest: &mut Guest, then: impl FnOnce()) {
    let before = guest.rings[0].used();
    let asked = guest.ask(0, FLUSH, 0, &[]);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(guest.rings[0].used(), before, "it did not wait");
    then();
    guest.rings[0].take();
    assert_eq!(asked.status(), OK);
    guest.assert_works(0);
}

/// The guest's monitor stops the rings; where the first one goes on.
fn stop(guest: &Guest) -> u16 {
    (0..guest.rings.len()).for_each(|index| _ = guest.connection.stop_vring(index as u32).unwrap());
    guest.rings[0].parts.used_index()
}

/// A server as after the end of the one before, and the guest's connection to it.
fn next_server(
    rig: &Rig,
    guest: &mut Guest,
    is_coming: bool,
) -> (Server<crate::common::disk::TestDisk>, Arc<AtomicBool>) {
    rig.server.stop();
    rig.server.wait_drained();
    let belongs_to_guest = Arc::<AtomicBool>::default();
    let config = Config { is_coming, queues: 4, belongs_to_guest: belongs_to_guest.clone(), ..Config::default() };
    let server = Server::new(rig.engine.clone(), rig.disk.clone(), config).unwrap();
    listen_again(&server, &rig.path());
    let options = guest.options;
    (guest.connection, _) = crate::common::guest::negotiate(&rig.path(), &options);
    let (payload, fd) = guest.inflight.as_ref().unwrap();
    guest.connection.set_inflight(*payload, fd.as_fd()).unwrap();
    guest.share_memory().unwrap();
    (server, belongs_to_guest)
}

fn start(guest: &Guest, base: u16) {
    guest.set_up_ring(0, base).unwrap();
    guest.rings[0].kick();
}

on_each_engine! {
    fn a_guest_waits_for_a_disk_that_is_to_come(kind) {
        let rig = rig_with(kind, |setup| setup.config.is_coming = true);
        let mut guest = Guest::with(&rig.path(), options());
        assert_eq!(rig.server.passage(), Passage::Coming);
        assert_eq!(rig.server.shut().unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(rig.server.passage(), Passage::Coming);
        waits_until(&mut guest, || rig.server.let_in());
        // The same words, for the server after one that was killed: the guest has used the disk here.
        let base = stop(&guest);
        let (server, belongs_to_guest) = next_server(&rig, &mut guest, true);
        start(&guest, base);
        guest.assert_works(0);
        assert_eq!(server.passage(), Passage::Open);
        assert!(belongs_to_guest.load(SeqCst), "others may still write to its disk");
    }

    fn a_disk_goes_only_without_its_guest_who_waits_then(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), options());
        guest.assert_works(0);
        assert_eq!(rig.server.shut().unwrap_err().kind(), ErrorKind::Busy);
        guest.assert_works(0);
        let base = stop(&guest);
        rig.server.shut().unwrap();
        start(&guest, base);
        waits_until(&mut guest, || rig.server.let_in());
        // It may go again.
        stop(&guest);
        rig.server.shut().unwrap();
        assert_eq!(rig.server.passage(), Passage::Gone);
    }

    fn the_next_server_knows_that_the_disk_is_gone(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), options());
        guest.assert_works(0);
        let base = stop(&guest);
        rig.server.shut().unwrap();
        let (server, belongs_to_guest) = next_server(&rig, &mut guest, false);
        start(&guest, base);
        assert!(belongs_to_guest.load(SeqCst), "others may write to a disk that is gone");
        waits_until(&mut guest, || server.let_in());
    }

    fn a_guest_of_another_connection_waits_as_well(kind) {
        let rig = rig(kind);
        let first = Guest::with(&rig.path(), options());
        stop(&first);
        rig.server.shut().unwrap();
        let mut second = Guest::with(&rig.path(), options());
        waits_until(&mut second, || rig.server.let_in());
        drop(first);
        until("it is gone", || rig.server.connections() == 1);
    }
}
