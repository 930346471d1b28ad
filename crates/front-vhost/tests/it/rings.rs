//! Rings that the driver scribbles on, overfills or changes under the server's hands.

use std::sync::atomic::{AtomicBool, Ordering};

use spile_engine::EngineKind;
use spile_lab::vhost::proto::feature;
use spile_lab::vhost::{Descriptor, MemoryOptions};

use crate::common::disk::Did;
use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{Asked, FLUSH, Guest, INDIRECT, NEXT, OK, Options, R, READ, W, WRITE, is_readable, rings};
use crate::common::{PATIENCE, Rig, rig, rig_with, until};

/// Ring 0 with every one of its requests in flight: reads, one for each sector from 0 on.
fn fill(rig: &Rig, guest: &mut Guest) -> Vec<Asked> {
    rig.disk.hold();
    let read = |sector| {
        let area = guest.take(512);
        guest.offer(0, READ, sector, &[(area.address, 512, W)])
    };
    let asked = (0..5).map(read).collect();
    guest.rings[0].publish_and_kick();
    until("all are in flight", || rig.disk.held() == 5);
    asked
}

on_each_engine! {
    fn indices_go_round_at_65536_also_while_the_ring_is_full(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { base: 65_530, ..Options::default() });
        for round in 0..4u64 {
            let asked: Vec<_> = (0..8).map(|_| guest.offer(0, FLUSH, 0, &[])).collect();
            guest.rings[0].publish_and_kick();
            let mut heads = guest.rings[0].take_ids(8);
            heads.sort_unstable();
            let mut expected: Vec<u32> = asked.iter().map(|asked| asked.head.into()).collect();
            expected.sort_unstable();
            assert_eq!(heads, expected, "round {round}");
        }
        assert_eq!(guest.rings[0].parts.used_index(), 65_530u16.wrapping_add(32));
        assert_eq!(guest.connection.stop_vring(0).unwrap(), 65_530u16.wrapping_add(32));
    }

    fn a_ring_of_the_largest_size_works(kind) {
        let rig = rig(kind);
        let memory = MemoryOptions::new(4 << 20);
        let mut guest = Guest::with(&rig.path(), Options { ring_size: 32768, queues: 1, memory, ..Options::default() });
        guest.rings[0].next_desc = 32766;
        guest.assert_works(0);
    }

    fn a_ring_of_one_works(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { ring_size: 1, queues: 1, ..Options::default() });
        let (header, status) = (guest.header(FLUSH, 0), guest.status());
        let table = guest.take(32);
        let describe = |index, address, len_bytes, flags| {
            let descriptor = Descriptor { address, len_bytes, flags, next: 1 };
            spile_lab::vhost::DescriptorTable(table.bytes.clone()).set(index, descriptor);
        };
        describe(0, header.0, 16, NEXT);
        describe(1, status.address, 1, W);
        for _ in 0..3 {
            let head = guest.rings[0].chain(&[(table.address, 32, INDIRECT)]);
            guest.rings[0].offer(head);
            guest.rings[0].publish_and_kick();
            guest.rings[0].take();
            assert_eq!(status.bytes.to_vec(), [OK]);
        }
    }

    fn a_used_ring_that_is_scribbled_on_is_written_from_our_own_index(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        let ring = &mut guest.rings[0];
        ring.parts.used.fill(0xa5);
        assert_ne!(ring.parts.used_index(), ring.next_used);
        let asked = guest.ask(0, FLUSH, 0, &[]);
        let expected = guest.rings[0].next_used.wrapping_add(1);
        until("the true index", || guest.rings[0].parts.used_index() == expected);
        assert_eq!((guest.rings[0].take().id, asked.status()), (asked.head.into(), OK));
        guest.assert_works(0);
    }

    fn event_indices_that_are_scribbled_on_lose_no_request(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        for value in [0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff].into_iter().cycle().take(60) {
            let ring = &guest.rings[0];
            ring.parts.set_used_event(value);
            ring.parts.used.store_u16(4 + 8 * 16, value, Ordering::Relaxed);
            let asked = guest.ask(0, FLUSH, 0, &[]);
            guest.rings[0].take();
            assert_eq!(asked.status(), OK);
        }
    }

    fn the_same_chain_twice_in_flight_is_answered_twice(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { inflight: true, ..Options::default() });
        rig.disk.hold();
        let asked = guest.offer(0, FLUSH, 0, &[]);
        (0..15).for_each(|_| guest.rings[0].offer(asked.head));
        guest.rings[0].publish_and_kick();
        until("all are in flight", || rig.disk.held() == 16);
        rig.disk.release();
        for _ in 0..16 {
            assert_eq!(guest.rings[0].take().id, u32::from(asked.head));
        }
        guest.assert_works(0);
        assert_eq!(rig.server.metrics().answered(), 18);
    }

    fn what_a_driver_makes_available_beyond_the_ring_waits_for_room(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        rig.disk.hold();
        let asked = guest.offer(0, FLUSH, 0, &[]);
        (0..15).for_each(|_| guest.rings[0].offer(asked.head));
        guest.rings[0].publish_and_kick();
        until("all are in flight", || rig.disk.held() == 16);
        // It takes no answer, and offers a ring more.
        (0..16).for_each(|_| guest.rings[0].offer(asked.head));
        guest.rings[0].publish_and_kick();
        guest.assert_works_beside();
        assert_eq!(rig.disk.held(), 16, "never more than the ring is long");
        // A place that is free is taken, and no more.
        rig.disk.release_at(u64::MAX);
        until("the next one is taken", || rig.disk.held() == 16 && rig.server.metrics().answered() == 2);
        guest.assert_works_beside();
        assert_eq!(rig.disk.held(), 16);
        rig.disk.release();
        // And two of the other ring.
        until("all are answered", || rig.server.metrics().answered() == 32 + 2);
        assert_eq!(guest.rings[0].parts.used_index(), 32);
        // And a ring more than that is too much.
        let ring = &guest.rings[0];
        ring.parts.set_available_index(ring.next_avail.wrapping_add(17));
        ring.kick();
        ring.assert_broken();
    }

    fn an_index_that_never_stops_does_not_keep_its_worker(kind) {
        let rig = rig_with(kind, |setup| setup.workers = 1);
        let (mut endless, mut other) = (rig.guest(), rig.guest());
        let asked = endless.offer(0, FLUSH, 0, &[]);
        (0..15).for_each(|at| endless.rings[0].parts.set_available(at, asked.head));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ring = &endless.rings[0];
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ring.parts.set_available_index(ring.parts.used_index().wrapping_add(16));
                    ring.kick();
                }
            });
            until("it is at work", || rig.server.metrics().answered() > 1000);
            (0..20).for_each(|_| other.assert_works(1));
            stop.store(true, Ordering::Relaxed);
        });
        drop(endless);
        until("it ends", || rig.server.connections() == 1);
    }

    fn what_is_in_flight_is_not_read_again(kind) {
        let rig = rig(kind);
        rig.disk.set_bytes(0, &[3; 5 * 512]);
        let mut guest = rig.guest();
        let asked = fill(&rig, &mut guest);
        // The driver rewrites everything that it had described.
        for index in 0..16 {
            let lie = Descriptor { address: u64::MAX - 5, len_bytes: u32::MAX, flags: 0xffff, next: 0xffff };
            guest.rings[0].parts.descriptors.set(index, lie);
        }
        (0..16).for_each(|at| guest.rings[0].parts.set_available(at, 0xffff));
        rig.disk.release();
        for _ in 0..5 {
            assert_eq!(guest.rings[0].take().len_bytes, 513);
        }
        assert!(asked.iter().all(|asked| asked.status() == OK));
        assert_eq!(rig.disk.take_did(), (0..5).map(|at| Did::Read(at * 512, 512)).collect::<Vec<_>>());
        guest.rings[0].next_desc = 0;
        guest.assert_works(0);
    }

    fn status_and_data_that_change_in_flight_hurt_only_their_guest(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let (area, stop) = (guest.take(4096), AtomicBool::new(false));
        area.bytes.fill(0x11);
        std::thread::scope(|scope| {
            let flipped = area.bytes.clone();
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    flipped.fill(0x22);
                    flipped.fill(0x11);
                }
            });
            for round in 0..100 {
                assert_eq!(guest.run(0, WRITE, 0, &[(area.address, 4096, R)]).0, OK, "round {round}");
                let written = rig.disk.bytes(0, 4096);
                assert!(written.iter().all(|byte| [0x11, 0x22].contains(byte)));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    fn descriptors_and_headers_that_change_while_they_are_read(kind) {
        // A read-only disk: whatever the guest wins by the race, it must not be a write.
        let rig = rig_with(kind, |setup| setup.config.read_only = true);
        let mut guest = rig.guest();
        let (area, stop) = (guest.take(512), AtomicBool::new(false));
        let (header, status) = (guest.header(READ, 0), guest.status());
        let chain = [header, (area.address, 512, W), (status.address, 1, W)];
        for _ in 0..20 {
            guest.rings[0].next_desc = 0;
            stop.store(false, Ordering::Relaxed);
            let head = guest.rings[0].chain(&chain);
            let (table, header) = (guest.rings[0].parts.descriptors.clone(), guest.memory.at(header.0, 16).unwrap());
            std::thread::scope(|scope| {
                let stop = &stop;
                scope.spawn(move || {
                    let good = table.get(1);
                    while !stop.load(Ordering::Relaxed) {
                        for bad in [
                            Descriptor { len_bytes: u32::MAX, ..good },
                            Descriptor { flags: NEXT, ..good },
                            Descriptor { address: u64::MAX - 100, ..good },
                        ] {
                            table.set(1, bad);
                            header.bytes.copy_from_slice(0, &WRITE.to_le_bytes());
                            table.set(1, good);
                            header.bytes.copy_from_slice(0, &READ.to_le_bytes());
                        }
                    }
                });
                for _ in 0..50 {
                    guest.rings[0].offer(head);
                    guest.rings[0].publish_and_kick();
                    let ring = &mut guest.rings[0];
                    until("an answer or the end", || ring.used() > 0 || is_readable(&ring.err, Default::default()));
                    if ring.used() == 0 {
                        break;
                    }
                    ring.take();
                }
                stop.store(true, Ordering::Relaxed);
            });
            if rings(&guest.rings[0].err) > 0 {
                guest.reset_ring(0);
            }
        }
        assert!(!rig.disk.take_did().iter().any(|did| matches!(did, Did::Write { .. })));
        guest.rings[1].next_desc = 0;
        assert_eq!(guest.read(1, 0, 512), [0; 512]);
    }

    fn answers_that_nobody_takes_are_no_burden(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let asked = guest.offer(0, FLUSH, 0, &[]);
        guest.rings[0].publish_and_kick();
        for round in 1..200u16 {
            until("it is answered", || guest.rings[0].parts.used_index() == round);
            guest.rings[0].offer(asked.head);
            guest.rings[0].publish_and_kick();
        }
        // The call is an eventfd: it is rung and not read, which blocks nobody.
        assert!(is_readable(&guest.rings[0].call, PATIENCE));
        guest.assert_works_beside();
    }

    fn without_indirect_and_event_index_a_ring_works_as_well(kind) {
        let rig = rig(kind);
        for without in [feature::EVENT_IDX, feature::INDIRECT_DESC, feature::EVENT_IDX | feature::INDIRECT_DESC] {
            let features = !(without | feature::LOG_ALL);
            let mut guest = Guest::with(&rig.path(), Options { features, ..Options::default() });
            (0..40).for_each(|_| guest.assert_works(1));
        }
    }
}

impl Guest {
    /// The other ring works, whatever the disk holds back: an unknown request needs no disk.
    fn assert_works_beside(&mut self) {
        assert_eq!(self.run(1, 77, 0, &[]), (crate::common::guest::UNSUPP, 1));
    }
}

/// All queues on one worker: a broken ring's neighbours do not notice.
#[test]
fn rings_that_break_again_and_again_hurt_no_other() {
    let rig = rig_with(EngineKind::Auto, |setup| setup.workers = 1);
    let (mut guest, mut other) = (rig.guest(), rig.guest());
    for round in 0..200 {
        guest.rings[0].offer(16 + round);
        guest.rings[0].publish_and_kick();
        guest.rings[0].assert_broken();
        other.rings[1].next_desc = 0;
        if round % 20 == 0 {
            guest.assert_works(1);
            other.assert_works(0);
        }
        guest.reset_ring(0);
    }
    assert_eq!(rig.server.metrics().errors(), 0);
}
