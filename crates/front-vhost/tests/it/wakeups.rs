//! Kicks and calls: none too few, which would hang a guest, and not many too many, which would cost the host.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use spile_engine::EngineKind;
use spile_lab::GuestQueue;
use spile_lab::vhost::proto::{Request, feature};
use spile_lab::vhost::{Device, DeviceOptions, Op, Queue, QueueOptions};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, OK, Options, event, is_readable, rings};
use crate::common::{PATIENCE, Rig, rig, rig_with, until};

/// A front end that keeps to every rule: it kicks only when it is asked to, and sleeps until it is called.
fn device(rig: &Rig, without: u64, options: &QueueOptions) -> (Device, Vec<Queue>) {
    let mut device = Device::connect(&rig.path(), DeviceOptions::without(without)).unwrap();
    let queues = device.start(options).unwrap();
    (device, queues)
}

fn spin(count: u32) {
    (0..count).for_each(|_| std::hint::spin_loop());
}

/// One request after the other, after pauses of all lengths, so that some meet the server at the moment it goes to sleep.
fn one_by_one(kind: EngineKind, poll: Duration) {
    let rig = rig_with(kind, |setup| (setup.poll, setup.workers) = (poll, 1));
    for without in [0, feature::EVENT_IDX] {
        let options = QueueOptions { depth: 2, data_bytes: 512, ..QueueOptions::default() };
        let (_device, mut queues) = device(&rig, without, &options);
        for round in 0..1500 {
            queues[0].run_well(Op::Flush, 0, 0).unwrap();
            spin((round * 37) % 3000);
        }
    }
    assert_eq!(rig.server.metrics().answered(), 3000);
}

/// What the workers have done: tasks polled and sleeps.
fn work(rig: &Rig) -> (u64, u64) {
    let stats = rig.engine.stats();
    (stats.iter().map(|s| s.polls).sum(), stats.iter().map(|s| s.sleeps).sum())
}

/// Waits until the workers do nothing any more.
fn wait_for_rest(rig: &Rig) -> (u64, u64) {
    let mut last = work(rig);
    until("the workers rest", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = work(rig);
        std::mem::replace(&mut last, now) == now
    });
    last
}

on_each_engine! {
    fn no_wake_up_is_lost_without_polling(kind) {
        one_by_one(kind, Duration::ZERO);
    }

    fn no_wake_up_is_lost_with_polling(kind) {
        one_by_one(kind, spile_engine::Config::POLL);
    }

    fn no_wake_up_is_lost_between_two_queues_of_one_worker(kind) {
        let rig = rig_with(kind, |setup| setup.workers = 1);
        let options = QueueOptions { queues: 2, depth: 4, data_bytes: 512, ..QueueOptions::default() };
        let (_device, queues) = device(&rig, 0, &options);
        std::thread::scope(|scope| {
            for (seed, mut queue) in queues.into_iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..1000 {
                        let op = if round % 2 == 0 { Op::Read } else { Op::Write };
                        queue.run_well(op, 512, 512).unwrap();
                        spin((round * (31 + 6 * seed as u32)) % 2000);
                    }
                });
            }
        });
    }

    fn a_storm_of_kicks_on_an_empty_ring_costs_no_more_than_its_kicks(kind) {
        let rig = rig_with(kind, |setup| setup.workers = 1);
        let (guest, mut other) = (rig.guest(), rig.guest());
        other.assert_works(0);
        let (before, calls) = (wait_for_rest(&rig), rig.server.metrics().notifications);
        const KICKS: u64 = 20_000;
        (0..KICKS).for_each(|_| guest.rings[0].kick());
        other.assert_works(0);
        let after = wait_for_rest(&rig);
        assert!(after.0 - before.0 <= 2 * KICKS + 100, "{KICKS} kicks led to {} polls", after.0 - before.0);
        assert!(after.1 - before.1 <= 2 * KICKS + 100, "{KICKS} kicks led to {} sleeps", after.1 - before.1);
        let metrics = rig.server.metrics();
        assert!(metrics.answered() == 4 && metrics.notifications - calls <= 2, "{metrics:?}");
    }

    fn a_kick_that_never_ends_holds_up_nobody(kind) {
        let rig = rig_with(kind, |setup| setup.workers = 1);
        let (guest, mut other) = (rig.guest(), rig.guest());
        // A semaphore is rung as often as its count says, each time it is looked at.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let endless = eventfd(0, flags).unwrap();
        rustix::io::write(&endless, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        guest.connection.set_vring_fd(Request::SetVringKick, 0, endless.as_fd()).unwrap();
        (0..50).for_each(|_| other.assert_works(1));
        drop(guest);
        until("its connection ends", || rig.server.connections() == 1);
        wait_for_rest(&rig);
    }

    fn a_kick_that_never_ends_keeps_no_worker_busy(kind) {
        let rig = rig_with(kind, |setup| setup.workers = 1);
        let mut guest = rig.guest();
        guest.assert_works(0);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let endless = eventfd(0, flags).unwrap();
        rustix::io::write(&endless, &(1u64 << 63).to_ne_bytes()).unwrap();
        guest.connection.set_vring_fd(Request::SetVringKick, 0, endless.as_fd()).unwrap();
        // The first kicks are heard at once. Then each look is followed by a pause.
        let mut before = work(&rig).0;
        until("the worker looks less often", || {
            std::thread::sleep(Duration::from_millis(200));
            let now = work(&rig).0;
            now - std::mem::replace(&mut before, now) < 100
        });
        assert_eq!(rig.server.connections(), 1);
    }

    fn an_idle_guest_costs_nothing(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        guest.assert_works(1);
        let before = wait_for_rest(&rig);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(work(&rig), before, "an idle disk causes no wake-up at all");
    }

    fn answers_of_one_turn_are_one_call(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        let calls = calls_at_rest(&rig, &guest);
        let asked: Vec<_> = (0..8).map(|_| guest.offer(0, FLUSH, 0, &[])).collect();
        guest.rings[0].publish_and_kick();
        until("all are answered", || guest.rings[0].used() == 8);
        assert!(is_readable(&guest.rings[0].call, PATIENCE));
        assert_eq!((rings(&guest.rings[0].call), rig.server.metrics().notifications), (1, calls + 1));
        assert!(asked.iter().all(|asked| asked.status() == OK));
    }

    fn a_driver_that_wants_no_calls_gets_none(kind) {
        let rig = rig(kind);
        for features in [!feature::LOG_ALL, !(feature::LOG_ALL | feature::EVENT_IDX)] {
            let mut guest = Guest::with(&rig.path(), Options { features, ..Options::default() });
            let calls = calls_at_rest(&rig, &guest);
            guest.rings[0].parts.set_available_flags(1);
            guest.rings[0].parts.set_used_event(u16::MAX);
            (0..20).for_each(|_| guest.assert_works(0));
            guest.connection.stop_vring(0).unwrap();
            assert_eq!(rig.server.metrics().notifications, calls);
        }
    }

    fn a_new_call_is_rung_for_what_the_old_one_may_have_missed(kind) {
        let rig = rig(kind);
        let mut guest = rig.guest();
        guest.assert_works(0);
        let call = event();
        guest.connection.set_vring_fd(Request::SetVringCall, 0, call.as_fd()).unwrap();
        assert!(is_readable(&call, PATIENCE));
        rings(&call);
        guest.rings[0].parts.set_used_event(guest.rings[0].next_used);
        guest.ask(0, FLUSH, 0, &[]);
        assert!(is_readable(&call, PATIENCE));
    }
}

/// How often the server has called so far, once it has made those calls that go with a start.
fn calls_at_rest(rig: &Rig, guest: &Guest) -> u64 {
    wait_for_rest(rig);
    for ring in &guest.rings {
        rings(&ring.call);
    }
    rig.server.metrics().notifications
}
