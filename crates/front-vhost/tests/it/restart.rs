//! Queues that stop and start again: under load, and in the middle of what a driver does.

use std::os::fd::AsFd;

use spile_lab::vhost::proto::{InflightPayload, Request};
use spile_lab::vhost::{Device, DeviceOptions, QueueOptions, RingParts};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, OK, Options, R, READ, Ring, W, WRITE, rings};
use crate::common::load::{under_load, wait_for_more};
use crate::common::messages::file;
use crate::common::{rig, until};

on_each_engine! {
    fn queues_stop_and_start_under_load(kind) {
        let rig = rig(kind);
        // With the region of requests in flight, and without.
        for without in [0, spile_lab::vhost::proto::protocol_feature::INFLIGHT_SHMFD] {
            let mut options = DeviceOptions::default();
            options.protocol_features &= !without;
            let mut device = Device::connect(&rig.path(), options).unwrap();
            let queues = QueueOptions { queues: 2, depth: 16, data_bytes: 4096, ..QueueOptions::default() };
            let queues = device.start(&queues).unwrap();
            under_load(queues, |answered| {
                for _ in 0..40 {
                    wait_for_more(answered);
                    let bases = device.stop().unwrap();
                    device.resume(&bases).unwrap();
                }
                wait_for_more(answered);
            });
        }
        rig.assert_quiet();
    }

    fn a_log_comes_and_goes_under_load(kind) {
        let rig = rig(kind);
        let mut device = Device::connect(&rig.path(), DeviceOptions::default()).unwrap();
        let queues = device.start(&QueueOptions { depth: 16, data_bytes: 4096, ..QueueOptions::default() }).unwrap();
        under_load(queues, |answered| {
            for _ in 0..20 {
                let log = device.start_log().unwrap();
                wait_for_more(answered);
                assert!(!log.dirty_pages().is_empty());
                device.stop_log().unwrap();
                wait_for_more(answered);
            }
        });
        drop(device);
        rig.assert_quiet();
    }

    fn a_stopped_ring_answers_what_it_had_taken_and_says_where_it_ended(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { base: 65_533, ..Options::default() });
        rig.disk.hold();
        let first: Vec<_> = (0..3).map(|_| guest.offer(0, FLUSH, 0, &[])).collect();
        guest.rings[0].publish_and_kick();
        until("they are in flight", || rig.disk.held() == 3);
        let later = std::thread::scope(|scope| {
            let stopped = scope.spawn(|| guest.connection.stop_vring(0).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!stopped.is_finished() && guest.rings[0].used() == 0);
            rig.disk.release();
            assert_eq!(stopped.join().unwrap(), 0, "65533 and three");
            guest.rings[0].used()
        });
        assert_eq!(later, 3, "all are answered before the ring has stopped");
        assert!(first.iter().all(|asked| asked.status() == OK));
        guest.rings[0].take_ids(3);
        // What is made available meanwhile is served from there on.
        let asked = guest.ask(0, FLUSH, 0, &[]);
        guest.set_up_ring(0, 0).unwrap();
        guest.rings[0].take();
        assert_eq!(asked.status(), OK);
    }

    fn a_driver_that_starts_anew_finds_its_rings_as_new(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { inflight: true, ..Options::default() });
        for _ in 0..20 {
            guest.assert_works(0);
            guest.assert_works(1);
            guest.reset_ring(0);
        }
        // Another size, at another place.
        guest.connection.stop_vring(0).unwrap();
        let areas = RingParts::lengths(8).map(|len| guest.memory.take(len, 4096).unwrap());
        guest.rings[0] = Ring::new(areas, 8, 0);
        guest.set_up_ring(0, 0).unwrap();
        guest.assert_works(0);
    }

    fn a_ring_can_be_stopped_twice_and_started_twice(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        assert_eq!(guest.connection.stop_vring(0).unwrap(), 2);
        assert_eq!(guest.connection.stop_vring(0).unwrap(), 2);
        assert_eq!(guest.connection.stop_vring(3).unwrap(), 0, "one that never was");
        guest.connection.enable_vring(0, true).unwrap();
        guest.set_up_ring(0, 2).unwrap();
        guest.set_up_ring(0, 2).unwrap();
        guest.assert_works(0);
    }

    fn a_broken_ring_rests_until_it_is_described_anew(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        guest.rings[0].offer(99);
        guest.rings[0].publish_and_kick();
        guest.rings[0].assert_broken();
        for _ in 0..3 {
            guest.share_memory().unwrap();
            guest.connection.set_features(guest.features).unwrap();
            guest.connection.enable_vring(1, true).unwrap();
            guest.rings[0].kick();
            guest.assert_works(1);
        }
        assert_eq!((rings(&guest.rings[0].err), guest.rings[0].used()), (0, 0), "it was looked at again");
        guest.reset_ring(0);
        guest.assert_works(0);
    }

    fn a_chain_that_broke_its_ring_is_not_in_flight(kind) {
        let rig = rig(kind);
        let mut guest = Guest::with(&rig.path(), Options { inflight: true, ..Options::default() });
        for round in 0..3 {
            guest.assert_works(0);
            rig.disk.hold();
            let asked = guest.ask(0, FLUSH, 0, &[]);
            until("one is in flight", || rig.disk.held() == 1);
            let header = guest.header(FLUSH, 0);
            let head = guest.rings[0].chain(&[header, (header.0, 0, R)]);
            guest.rings[0].offer(head);
            guest.rings[0].publish_and_kick();
            rig.disk.release();
            guest.rings[0].assert_broken();
            assert_eq!((asked.status(), guest.rings[0].used()), (OK, 1), "round {round}");
            // With the same region: what it says is in flight would be done again, over and over.
            guest.reset_ring(0);
        }
        guest.assert_works(0);
    }

    fn one_ring_that_cannot_start_is_no_reason_for_others_to_rest(kind) {
        let rig = rig(kind);
        let mut guest = Guest::negotiated(&rig.path(), Options::default());
        guest.share_memory().unwrap();
        // Room for two queues, but for none of the size of the first.
        let payload = InflightPayload { len_bytes: 4096, file_offset: 0, queues: 2, queue_size: 8 };
        guest.connection.set_inflight(payload, file(4096).as_fd()).unwrap();
        assert!(guest.set_up_ring(0, 0).is_err());
        let areas = RingParts::lengths(8).map(|len| guest.memory.take(len, 4096).unwrap());
        guest.rings[1] = Ring::new(areas, 8, 0);
        // Each message tells of the other's trouble, and is obeyed.
        let (connection, ring) = (&guest.connection, &guest.rings[1]);
        assert!(connection.set_vring_size(1, 8).is_err());
        assert!(connection.set_vring_addresses(guest.addresses(1)).is_err());
        assert!(connection.set_vring_fd(Request::SetVringKick, 1, ring.kick.as_fd()).is_err());
        assert!(connection.enable_vring(1, true).is_err());
        guest.assert_works(1);
    }

    fn queues_beyond_those_in_use_may_be_enabled_without_a_ring(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        (0..4).for_each(|index| guest.connection.enable_vring(index, true).unwrap());
        guest.assert_works(1);
        let area = guest.take(512);
        assert_eq!(guest.run(0, WRITE, 0, &[(area.address, 512, R)]).0, OK);
        assert_eq!(guest.run(0, READ, 0, &[(area.address, 512, W)]).0, OK);
    }
}
