//! Requests in flight when their server dies: the next one does them again, in their order, once.
//!
//! A server that stands still ([`Rig::freeze`]) is to the front end as one that was killed.

use std::os::fd::AsFd;

use rustix::fs::ftruncate;
use spile_engine::EngineKind;
use spile_lab::GuestQueue;
use spile_lab::vhost::Device;
use spile_lab::vhost::proto::InflightPayload;
use spile_mem::Segment;

use crate::common::disk::Did;
use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, NONE, OK, Options, R, WRITE, assert_hung_up, assert_refused, negotiate};
use crate::common::messages::file;
use crate::common::{Rig, rig, until};

/// Bytes of a queue's part before its table, and of an entry of that.
const HEAD: usize = 16;
const ENTRY: usize = 16;

fn options() -> Options {
    Options { inflight: true, ..Options::default() }
}

/// The parts of a region, open to be written.
fn region_of(guest: &Guest) -> Segment {
    let (payload, fd) = guest.inflight.as_ref().unwrap();
    Segment::map_shared(fd, payload.file_offset, payload.len_bytes as usize).unwrap()
}

/// Puts the guest's rings to another server, as a front end does whose server has died.
fn reconnect(guest: &mut Guest, rig: &Rig) {
    connect(guest, rig);
    bring_back(guest);
}

fn connect(guest: &mut Guest, rig: &Rig) {
    let options = guest.options;
    (guest.connection, _) = negotiate(&rig.path(), &options);
}

fn bring_back(guest: &mut Guest) {
    let (payload, fd) = guest.inflight.as_ref().unwrap();
    guest.connection.set_inflight(*payload, fd.as_fd()).unwrap();
    guest.share_memory().unwrap();
    for index in 0..guest.rings.len() {
        let used = guest.rings[index].parts.used_index();
        guest.set_up_ring(index, used).unwrap();
        guest.rings[index].kick();
    }
}

/// Writes of sectors with their numbers, in flight at a disk that does not answer.
fn writes_in_flight(rig: &Rig, guest: &mut Guest, sectors: &[u64]) -> Vec<crate::common::guest::Asked> {
    rig.disk.hold();
    let asked = sectors.iter().map(|sector| {
        let area = guest.take(512);
        area.bytes.fill(*sector as u8);
        guest.offer(0, WRITE, *sector, &[(area.address, 512, R)])
    });
    let asked = asked.collect();
    guest.rings[0].publish_and_kick();
    until("they are in flight", || rig.disk.held() == sectors.len());
    asked
}

fn written(rig: &Rig) -> Vec<u64> {
    let did = rig.disk.take_did().into_iter();
    did.map(|did| if let Did::Write { at, .. } = did { at / 512 } else { panic!("{did:?}") }).collect()
}

on_each_engine! {
    fn what_was_in_flight_is_done_again_in_order_and_once(kind) {
        let (dead, heir) = (rig(kind), rig(kind));
        let mut guest = Guest::with(&dead.path(), options());
        // Out of order in the descriptor table too.
        guest.rings[0].next_desc = 13;
        let asked = writes_in_flight(&dead, &mut guest, &[9, 3, 7, 1]);
        // One in the middle was answered before the end.
        dead.disk.release_at(3 * 512);
        until("one is answered", || guest.rings[0].used() == 1);
        assert_eq!(guest.rings[0].take().id, u32::from(asked[1].head));
        dead.freeze();
        reconnect(&mut guest, &heir);
        let mut heads = guest.rings[0].take_ids(3);
        assert_eq!(written(&heir), [9, 7, 1], "in the order in which they were popped");
        heads.sort_unstable();
        let mut expected: Vec<u32> = [0, 2, 3].map(|at: usize| asked[at].head.into()).into();
        expected.sort_unstable();
        assert_eq!(heads, expected);
        assert!([0, 2, 3].iter().all(|at| asked[*at].status() == OK));
        (0..4).for_each(|_| guest.assert_works(0));
        guest.assert_works(1);
        assert_eq!(heir.server.metrics().answered(), 3 + 10);
    }

    fn what_was_made_available_meanwhile_comes_after_it(kind) {
        let (dead, heir) = (rig(kind), rig(kind));
        let mut guest = Guest::with(&dead.path(), options());
        writes_in_flight(&dead, &mut guest, &[5, 4]);
        dead.freeze();
        // Another comes when nobody looks any more.
        let area = guest.take(512);
        let offered = guest.ask(0, WRITE, 6, &[(area.address, 512, R)]);
        reconnect(&mut guest, &heir);
        guest.rings[0].take_ids(3);
        assert_eq!((written(&heir), offered.status()), (vec![5, 4, 6], OK));
    }

    fn a_queue_that_is_stopped_at_once_does_first_what_was_left(kind) {
        let (dead, heir) = (rig(kind), rig(kind));
        let mut guest = Guest::with(&dead.path(), options());
        writes_in_flight(&dead, &mut guest, &[4, 2, 6]);
        dead.freeze();
        connect(&mut guest, &heir);
        // The queue is told to start and to stop before its worker comes to it.
        heir.freeze();
        bring_back(&mut guest);
        guest.offer(0, FLUSH, 0, &[]);
        guest.rings[0].publish();
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| guest.connection.stop_vring(0).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(20));
            heir.thaw();
            assert_eq!(stopped.join().unwrap(), 3, "whoever goes on from there knows nothing of the three");
        });
        assert_eq!((guest.rings[0].used(), written(&heir)), (3, vec![4, 2, 6]));
    }

    fn a_server_may_die_again_while_it_recovers(kind) {
        let rigs = [(); 4].map(|()| rig(kind));
        let mut guest = Guest::with(&rigs[0].path(), options());
        writes_in_flight(&rigs[0], &mut guest, &[8, 2, 5, 3]);
        for (at, rig) in rigs.iter().enumerate().skip(1) {
            rigs[at - 1].freeze();
            rig.disk.hold();
            reconnect(&mut guest, rig);
            until("they are in flight again", || rig.disk.held() == 5 - at);
            let order: &[u64] = &[8, 2, 5, 3][at - 1..];
            assert_eq!(written(rig), order);
            // The oldest is answered by each.
            rig.disk.release_at(order[0] * 512);
            until("one is answered", || guest.rings[0].used() == 1);
            guest.rings[0].take();
        }
        rigs[3].disk.release();
        guest.rings[0].take();
        guest.assert_works(0);
    }

    fn a_switched_write_cache_outlives_its_server(kind) {
        for (switch, is_through) in [(0, true), (1, false)] {
            let (dead, heir) = (rig(kind), rig(kind));
            let mut guest = Guest::with(&dead.path(), options());
            // The guest's driver does not switch it again: it knows of no other server.
            guest.connection.set_config(32, &[1 - switch]).unwrap();
            guest.connection.set_config(32, &[switch]).unwrap();
            guest.assert_works(0);
            dead.freeze();
            reconnect(&mut guest, &heir);
            assert_eq!(guest.connection.config().unwrap().writeback, switch);
            assert_eq!(guest.write(0, 0, &[7; 512]), OK);
            assert_eq!(heir.disk.take_did(), [Did::Write { at: 0, len: 512, fua: is_through }]);
        }
    }

    fn what_was_published_but_not_unnoted_is_not_answered_twice(kind) {
        let (dead, heir) = (rig(kind), rig(kind));
        let mut guest = Guest::with(&dead.path(), options());
        let asked = writes_in_flight(&dead, &mut guest, &[1, 2, 3]);
        dead.freeze();
        let region = region_of(&guest);
        let entry = |head: u16| HEAD + ENTRY * usize::from(head);
        // As if it had died after it published the second and before it wrote that down: the list of the last batch, the
        // used ring, and the old used index.
        let head = asked[1].head;
        region.copy_from_slice(entry(head) + 6, &region.read_array::<2>(12));
        region.copy_from_slice(12, &head.to_le_bytes());
        guest.rings[0].parts.used.copy_from_slice(4, &u64::from(head).to_le_bytes());
        guest.rings[0].set_used_index(1);
        assert_eq!(region.read_array::<1>(entry(head)), [1], "still noted");
        reconnect(&mut guest, &heir);
        let heads = guest.rings[0].take_ids(3);
        assert_eq!((written(&heir), heads[0]), (vec![1, 3], head.into()));
        assert_eq!(asked[1].status(), NONE, "the dead server has written that, or will never");
        guest.assert_works(0);
    }

    fn a_front_end_of_our_own_finds_its_way_back(kind) {
        let rigs = [rig(kind), rig(kind)];
        let mut device = Device::connect(&rigs[0].path(), Default::default()).unwrap();
        let mut queues = device.start(&Default::default()).unwrap();
        queues[0].write(4096, &[5; 4096]).unwrap();
        rigs[0].server.stop();
        rigs[0].server.wait_drained();
        // The new server listens where the old one did.
        std::fs::remove_file(rigs[0].path()).unwrap();
        std::os::unix::fs::symlink(rigs[1].path(), rigs[0].path()).unwrap();
        device.reconnect(crate::common::PATIENCE).unwrap();
        queues[0].write(4096, &[6; 4096]).unwrap();
        assert_eq!((rigs[0].disk.bytes(4096, 1), rigs[1].disk.bytes(4096, 1)), (vec![5], vec![6]));
    }

    fn regions_that_cannot_be_are_refused(kind) {
        let rig = rig(kind);
        let guest = Guest::negotiated(&rig.path(), Options::default());
        let part = (HEAD + ENTRY * 16usize).next_multiple_of(64) as u64;
        let good = InflightPayload { len_bytes: 2 * part, file_offset: 0, queues: 2, queue_size: 16 };
        let set = |payload| guest.connection.set_inflight(payload, file(4096).as_fd());
        for spoilt in [
            InflightPayload { queues: 0, ..good },
            InflightPayload { queues: 5, len_bytes: 4096, ..good },
            InflightPayload { queues: u16::MAX, len_bytes: u64::MAX, ..good },
            InflightPayload { queue_size: 0, ..good },
            InflightPayload { queue_size: 17, len_bytes: 4096, ..good },
            InflightPayload { queue_size: u16::MAX, len_bytes: u64::MAX, ..good },
            InflightPayload { queue_size: 32768, queues: 4, len_bytes: 4 << 20, ..good },
            InflightPayload { len_bytes: 2 * part - 1, ..good },
            InflightPayload { len_bytes: 0, ..good },
            InflightPayload { file_offset: 1, ..good },
            InflightPayload { file_offset: 4096, ..good },
            InflightPayload { file_offset: 4096 - 64, ..good },
            InflightPayload { file_offset: u64::MAX - 63, ..good },
            InflightPayload { file_offset: 1 << 63, ..good },
        ] {
            assert_refused(&format!("{spoilt:?}"), set(spoilt));
        }
        set(good).unwrap();
        // Padded and longer is as good, and at any line of the file.
        set(InflightPayload { len_bytes: 4096 - 64, file_offset: 64, ..good }).unwrap();
    }

    fn regions_are_asked_for_within_bounds(kind) {
        let rig = rig(kind);
        for (queues, size) in [(0, 16), (5, 16), (u16::MAX, 16), (1, 0), (1, 3), (1, 32769), (u16::MAX, u16::MAX)] {
            let (connection, _) = negotiate(&rig.path(), &Options::default());
            assert!(connection.inflight(queues, size).is_err(), "{queues} queues of {size}");
            assert_hung_up("nothing to answer", &connection);
        }
        let (connection, _) = negotiate(&rig.path(), &Options::default());
        for (queues, size) in [(1, 1), (4, 128), (4, 32768)] {
            let (payload, fd) = connection.inflight(queues, size).unwrap();
            assert!(payload.len_bytes >= u64::from(queues) * (HEAD as u64 + ENTRY as u64 * u64::from(size)));
            assert!(ftruncate(&fd, 0).is_err(), "whoever holds it cannot take it away under the server");
            connection.set_inflight(payload, fd.as_fd()).unwrap();
        }
        rig.assert_serves();
    }

    fn a_region_for_other_queues_starts_none(kind) {
        let rig = rig(kind);
        let mut guest = Guest::negotiated(&rig.path(), Options::default());
        guest.share_memory().unwrap();
        for (queues, queue_size) in [(1, 16), (2, 8)] {
            let payload = InflightPayload { len_bytes: 4096, file_offset: 0, queues, queue_size };
            guest.connection.set_inflight(payload, file(4096).as_fd()).unwrap();
            assert_refused("a queue without room", guest.set_up_ring(1, 0));
            guest.connection.stop_vring(1).unwrap();
        }
        let payload = InflightPayload { len_bytes: 4096, file_offset: 0, queues: 2, queue_size: 32 };
        guest.connection.set_inflight(payload, file(4096).as_fd()).unwrap();
        guest.set_up_ring(1, 0).unwrap();
        guest.assert_works(1);
    }
}

/// Writes `lie` into ring 0's part of a used region, and has a new server read it; that one, the guest, and the dead.
fn believes(kind: EngineKind, lie: impl FnOnce(&Segment)) -> (Rig, Guest, Rig) {
    let (dead, heir) = (rig(kind), rig(kind));
    let mut guest = Guest::with(&dead.path(), options());
    guest.assert_works(0);
    dead.freeze();
    lie(&region_of(&guest));
    reconnect(&mut guest, &heir);
    guest.assert_works(1);
    heir.assert_serves();
    (heir, guest, dead)
}

on_each_engine! {
    fn a_list_in_a_circle_ends(kind) {
        let (_rig, mut guest, _dead) = believes(kind, |region| {
            // The last batch begins at 3, whose next is 3; and the used index is far away.
            region.copy_from_slice(12, &3u16.to_le_bytes());
            region.copy_from_slice(HEAD + 3 * ENTRY + 6, &3u16.to_le_bytes());
            region.copy_from_slice(14, &40_000u16.to_le_bytes());
        });
        guest.assert_works(0);
    }

    fn a_list_that_leads_out_of_the_region_ends(kind) {
        for next in [16, 17, u16::MAX] {
            let (_rig, mut guest, _dead) = believes(kind, |region| {
                region.copy_from_slice(12, &2u16.to_le_bytes());
                region.copy_from_slice(HEAD + 2 * ENTRY + 6, &next.to_le_bytes());
                region.copy_from_slice(14, &0u16.to_le_bytes());
            });
            guest.assert_works(0);
        }
    }

    fn requests_that_never_were_break_their_ring_at_most(kind) {
        // All sixteen are said to be in flight, with counters that overflow: none of their chains is more than old memory.
        let (rig, mut guest, _dead) = believes(kind, |region| {
            for head in 0..16 {
                region.copy_from_slice(HEAD + head * ENTRY, &[1]);
                region.copy_from_slice(HEAD + head * ENTRY + 8, &u64::MAX.to_le_bytes());
            }
        });
        guest.reset_ring(1);
        guest.assert_works(1);
        rig.assert_serves();
    }

    fn a_region_full_of_noise_hurts_its_guest_only(kind) {
        for byte in [0x01, 0x7f, 0x80, 0xff] {
            let (rig, guest, _dead) = believes_noise(kind, byte);
            rig.assert_serves();
            drop(guest);
            until("its connection ends", || rig.server.connections() == 0);
        }
    }

    fn a_region_that_changes_while_it_is_used_hurts_its_guest_only(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), options());
        let region = region_of(&guest);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = &stop;
            scope.spawn(move || {
                let mut byte = 0u8;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    byte = byte.wrapping_mul(31).wrapping_add(7);
                    region.fill(byte);
                }
            });
            for _ in 0..200 {
                let asked = guest.ask(0, FLUSH, 0, &[]);
                guest.rings[0].take();
                assert_eq!(asked.status(), OK);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        rig.assert_serves();
    }
}

/// The whole region of a guest is one byte, when its next server looks at it.
fn believes_noise(kind: EngineKind, byte: u8) -> (Rig, Guest, Rig) {
    let (dead, heir) = (rig(kind), rig(kind));
    let mut guest = Guest::with(&dead.path(), options());
    guest.assert_works(0);
    dead.freeze();
    region_of(&guest).fill(byte);
    reconnect(&mut guest, &heir);
    (heir, guest, dead)
}
