//! A disk that moves between hosts: its guests wait while it is not here.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spile_core::ErrorKind;
use spile_engine::EngineKind;
use spile_front_vhost::{Config, Pass, Passage, Server};

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
    passage: Passage,
    pass: Pass,
) -> (Server<crate::common::disk::TestDisk>, Arc<AtomicBool>) {
    rig.server.stop();
    rig.server.wait_drained();
    let belongs_to_guest = Arc::<AtomicBool>::default();
    let config = Config { passage, pass, queues: 4, belongs_to_guest: belongs_to_guest.clone(), ..Config::default() };
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

const SECRET: [u64; 2] = [7, 9];

/// A server of a disk that is to come. Its guests get the secret when they are let in.
fn coming(kind: EngineKind) -> Rig {
    rig_with(kind, |setup| {
        setup.config.passage = Passage::Coming;
        setup.config.pass = pass(SECRET);
    })
}

fn pass(secret: [u64; 2]) -> Pass {
    let pass = Pass::default();
    pass.set(Some(secret));
    pass
}

/// The trailer of the region of a guest, where all is what the guest writes.
fn trailer(guest: &Guest) -> (File, u64) {
    let (info, fd) = guest.inflight.as_ref().unwrap();
    (File::from(fd.as_fd().try_clone_to_owned().unwrap()), info.len_bytes - 64)
}

on_each_engine! {
    fn a_guest_waits_for_a_disk_that_is_to_come(kind) {
        let rig = coming(kind);
        let mut guest = Guest::with(&rig.path(), options());
        assert_eq!(rig.server.passage(), Passage::Coming);
        assert_eq!(rig.server.shut().unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(rig.server.passage(), Passage::Coming);
        waits_until(&mut guest, || rig.server.let_in());
        // The same words, for the server after one that was killed: the guest has used the disk here.
        let base = stop(&guest);
        let (server, belongs_to_guest) = next_server(&rig, &mut guest, Passage::Coming, pass(SECRET));
        start(&guest, base);
        guest.assert_works(0);
        assert_eq!(server.passage(), Passage::Open);
        assert!(belongs_to_guest.load(SeqCst), "others may still write to its disk");
    }

    fn a_region_that_lies_lets_nobody_in_to_a_disk_that_is_to_come(kind) {
        let rig = coming(kind);
        let mut guest = Guest::with(&rig.path(), options());
        let base = stop(&guest);
        let (region, at) = trailer(&guest);
        // It was used, as far as it says, and its secret is that of another time.
        region.write_all_at(&1u16.to_ne_bytes(), 8).unwrap();
        region.write_all_at(&[3; 16], at + 16).unwrap();
        let (server, belongs_to_guest) = next_server(&rig, &mut guest, Passage::Coming, pass(SECRET));
        start(&guest, base);
        assert!(!belongs_to_guest.load(SeqCst));
        assert_eq!(server.passage(), Passage::Coming);
        waits_until(&mut guest, || server.let_in());
        let mut secret = [0; 16];
        region.read_exact_at(&mut secret, at + 16).unwrap();
        assert_eq!(secret[..8], SECRET[0].to_ne_bytes(), "the next server would not know the guest");
    }

    fn a_region_that_lies_closes_the_disk_to_nobody_else(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), options());
        guest.assert_works(0);
        let base = stop(&guest);
        let (region, at) = trailer(&guest);
        region.write_all_at(&[1], at + 1).unwrap();
        let (server, belongs_to_guest) = next_server(&rig, &mut guest, Passage::Open, Pass::default());
        start(&guest, base);
        assert_eq!(server.passage(), Passage::Open);
        assert!(!belongs_to_guest.load(SeqCst), "clients would be cut off");
        Guest::with(&rig.path(), options()).assert_works(0);
        // It has closed the disk to itself, as a build before this one would have.
        waits_until(&mut guest, || server.let_in());
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
        // Its owner has noted it, whatever the guest keeps.
        let (server, _) = next_server(&rig, &mut guest, Passage::Gone, Pass::default());
        start(&guest, base);
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
