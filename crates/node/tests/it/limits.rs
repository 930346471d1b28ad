//! Limits: rates, bursts, debts, changes, groups and their fairness, by a clock that the test moves on.

mod world;

use std::future::{pending, ready};
use std::sync::Arc;
use std::time::Duration;

use crate::common::now;
use spile_core::{Disk, ErrorKind, Extent, Io, Segments};
use spile_node::{Delays, DiskLimits, Effect, Fault, Faults, Group, Limits, Node, Place};
use world::{Nothing, SECOND, TestNode, What, World};

const MS: u64 = SECOND / 1000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A guest's requests, by their number.
type Requests = fn(u64) -> What;

fn iops(iops: u64) -> Limits {
    Limits { iops: Some(iops), ..Limits::default() }
}

fn bps(bps: u64) -> Limits {
    Limits { bps: Some(bps), ..Limits::default() }
}

/// Reads and writes of very different sizes, in no order that a rate could follow.
fn mixed(number: u64) -> What {
    let len = [4 * KIB, 64 * KIB, 512, MIB, 16 * KIB, 4 * KIB, 128 * KIB, 8 * KIB]
        [(number.wrapping_mul(0x9e37_79b9) >> 13) as usize % 8];
    if number.is_multiple_of(3) { What::Write(len) } else { What::Read(len) }
}

fn assert_near(found: u64, wanted: u64) {
    assert!(found.abs_diff(wanted) * 20 <= wanted, "{found} is not within 5 % of {wanted}");
}

#[test]
fn rates_are_held_on_mixed_sizes() {
    for depth in [1, 3, 32] {
        for (limits, requests, bytes) in [
            (iops(1000), Some(4000), None),
            (iops(30_000), Some(120_000), None),
            (bps(10 * MIB), None, Some(40 * MIB)),
            (bps(500 * MIB), None, Some(2000 * MIB)),
            (Limits { iops: Some(10_000), bps: Some(20 * MIB), ..Limits::default() }, None, Some(80 * MIB)),
        ] {
            let mut world = World::default();
            let disk = world.disk(limits);
            let done = world.guest(&disk, depth, mixed);
            world.run(4 * SECOND);
            let (did, moved) = done.get();
            requests.iter().for_each(|wanted| assert_near(did, *wanted));
            bytes.iter().for_each(|wanted| assert_near(moved, *wanted));
        }
    }
}

#[test]
fn reads_and_writes_have_limits_of_their_own_and_do_not_wait_for_each_other() {
    let mut world = World::default();
    let disk = world.disk(Limits { write_iops: Some(10), read_bps: Some(10 * MIB), ..Limits::default() });
    let writes = world.guest(&disk, 4, |_| What::Write(MIB));
    let reads = world.guest(&disk, 4, |_| What::Read(64 * KIB));
    world.run(10 * SECOND);
    assert_near(writes.get().0, 100);
    assert_near(reads.get().1, 100 * MIB);
}

#[test]
fn what_a_request_counts_as() {
    let limits = Limits { write_bps: Some(MIB), write_iops: Some(100), ..Limits::default() };
    for (what, in_a_second) in [
        (What::Write(32 * KIB), 32),
        (What::Zeroes(32 * KIB), 32),
        // A discard moves no bytes, but is a request.
        (What::Discard(32 * KIB), 100),
    ] {
        let mut world = World::default();
        let disk = world.disk(limits);
        let done = world.guest(&disk, 2, move |_| what);
        world.run(10 * SECOND);
        assert_near(done.get().0, in_a_second * 10);
        // A flush waits for nothing.
        let flushed = world.request(&disk, What::Flush);
        world.settle();
        assert!(flushed.get().is_some());
    }
}

#[test]
fn allowance_adds_up_for_the_time_of_a_burst_and_no_longer() {
    let mut world = World::default();
    let disk = world.disk(Limits { burst: Some(Duration::from_millis(500)), ..iops(1000) });
    world.run(10 * SECOND);
    let done = world.guest(&disk, 8, mixed);
    world.settle();
    let at_once = done.get().0;
    assert!((500..=501).contains(&at_once), "{at_once}");
    world.run(SECOND);
    assert_near(done.get().0 - at_once, 1000);
}

#[test]
fn a_request_larger_than_the_bucket_pays_in_parts_and_keeps_its_place() {
    let mut world = World::default();
    let disk = world.disk(Limits { iops: Some(2), ..bps(MIB) });
    let [large, next] = [8 * MIB, 512].map(|len| world.request(&disk, What::Write(len)));
    world.run(7 * SECOND);
    assert_eq!((large.get(), next.get()), (None, None));
    world.run(2 * SECOND);
    // The last part passes when the one before is paid for. All parts together count as one request.
    assert_near(large.get().unwrap(), 8 * SECOND);
    assert_near(next.get().unwrap(), 8 * SECOND);
    assert!(large.get() < next.get(), "a smaller request has overtaken it");
    let delays = disk.limits().unwrap().delays();
    assert_eq!((delays.requests, delays.waiting), (2, 0));
}

/// What one request asks for is no debt that others have to wait for: neither the group's other disks, nor the disk's own reads.
#[test]
fn one_huge_request_stops_neither_its_group_nor_the_reads_of_its_disk() {
    let huge = |_| What::Zeroes(2 << 30);
    for (group_limits, own) in [(bps(50 * MIB), Limits::default()), (Limits::default(), bps(50 * MIB))] {
        let mut world = World::default();
        let group = Group::new("g", world.timer());
        group.set_limits(group_limits).unwrap();
        let disks = [0; 2].map(|_| world.disk(own));
        disks.iter().for_each(|disk| now(disk.join_group(Some(group.clone()))).unwrap());
        let _zeroes = world.guest(&disks[0], 4, huge);
        world.settle();
        for disk in &disks {
            for _ in 0..20 {
                let since_ns = world.clock.now_ns();
                let read = world.request(disk, What::Read(4 * KIB));
                world.run(SECOND / 4);
                let waited_ns = read.get().map(|ended_ns| ended_ns - since_ns);
                assert!(waited_ns.is_some_and(|waited_ns| waited_ns < SECOND / 4), "{waited_ns:?}");
            }
        }
        // One read after the other gets as much as all the zeroes do.
        let reads = world.guest(&disks[1], 1, |_| What::Read(4 * KIB));
        world.run(10 * SECOND);
        if !group_limits.is_none() {
            assert_near(reads.get().1, 250 * MIB);
        }
    }
}

#[test]
fn a_change_has_its_effect_at_once() {
    let mut world = World::default();
    let disk = world.disk(iops(1));
    let waiting: Vec<_> = (0..11).map(|_| world.request(&disk, What::Read(512))).collect();
    world.run(10 * MS);
    assert_eq!(waiting.iter().filter(|ended| ended.get().is_some()).count(), 1);
    now(disk.set_limits(iops(1000))).unwrap();
    world.run(20 * MS);
    assert!(waiting.iter().all(|ended| ended.get().is_some()), "the debt of the limit before holds them back");
    // Taken away: all go on in this moment, and the disk has no stage any more.
    now(disk.set_limits(bps(1))).unwrap();
    let waiting: Vec<_> = (0..11).map(|_| world.request(&disk, What::Write(512))).collect();
    world.run(10 * MS);
    now(disk.set_limits(Limits::default())).unwrap();
    world.settle();
    assert!(waiting.iter().all(|ended| ended.get().is_some()));
    assert_eq!(now(disk.detach(Place::Limit)).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(world.clock.sleepers(), 0);
}

#[test]
fn greedy_disks_of_a_group_get_the_same() {
    let [small, large]: [Requests; 2] = [|_| What::Read(4 * KIB), |_| What::Write(256 * KIB)];
    let cases: [(Limits, usize, Requests, Requests); 4] = [
        (iops(2000), 2, small, small),
        (bps(100 * MIB), 2, small, large),
        (Limits { iops: Some(5000), ..bps(50 * MIB) }, 16, mixed, mixed),
        (bps(50 * MIB), 16, small, large),
    ];
    for (limits, disks, even, odd) in cases {
        let mut world = World::default();
        let group = Group::new("g", world.timer());
        group.set_limits(limits).unwrap();
        let done: Vec<_> = (0..disks)
            .map(|number| {
                let disk = world.disk(Limits::default());
                now(disk.join_group(Some(group.clone()))).unwrap();
                // Some ask for much more at once than others.
                let what = if number % 2 == 0 { even } else { odd };
                world.guest(&disk, 16 << (number % 4), what)
            })
            .collect();
        world.run(8 * SECOND);
        // One kind of allowance is what all of them want more of.
        let by_bytes = limits.bps.is_some() && limits.iops.is_none();
        let total: u64 = done.iter().map(|done| if by_bytes { done.get().1 } else { done.get().0 }).sum();
        for done in &done {
            let (requests, bytes) = done.get();
            assert_near(if by_bytes { bytes } else { requests }, total / disks as u64);
        }
        if by_bytes {
            assert_near(total, limits.bps.unwrap() * 8);
        }
    }
}

/// A guest that has few requests in flight, and needs time between an answer and the next request, gets its half as well, also where timers
/// are late and many requests pass together.
#[test]
fn a_greedy_disk_with_few_requests_in_flight_gets_its_half() {
    for limits in [iops(4000), iops(40_000), bps(100 * MIB)] {
        for late_ns in [0, 3 * MS] {
            let mut world = World::default();
            let group = Group::new("g", world.timer());
            group.set_limits(limits).unwrap();
            let disks = [0; 2].map(|_| world.disk(Limits::default()));
            disks.iter().for_each(|disk| now(disk.join_group(Some(group.clone()))).unwrap());
            // The answers of the first one take a while. Its clock is not that of the limits.
            let delay = Fault {
                ops: Vec::new(),
                extent: None,
                per_million: 1_000_000,
                effect: Effect::Delay(Duration::from_micros(200)),
            };
            let faults = Faults::new(vec![delay], 1, Arc::new(world::Punctual(world.timer())));
            now(disks[0].attach(Place::Fault, Arc::new(faults))).unwrap();
            world.clock.late_ns.store(late_ns, std::sync::atomic::Ordering::SeqCst);
            let done = [(&disks[0], 8), (&disks[1], 64)]
                .map(|(disk, depth)| world.guest(disk, depth, |_| What::Read(16 * KIB)));
            world.run(2 * SECOND);
            let [few, many] = done.each_ref().map(|done| done.get().0);
            assert_near(few, (few + many) / 2);
            assert_near(few + many, 2 * limits.iops.unwrap_or(100 * 64));
        }
    }
}

#[test]
fn what_a_disk_does_not_want_the_others_get_and_nothing_is_saved_up() {
    let mut world = World::default();
    let group = Group::new("g", world.timer());
    group.set_limits(iops(1000)).unwrap();
    let [modest, greedy] = [iops(100), Limits::default()].map(|limits| world.disk(limits));
    [&modest, &greedy].into_iter().for_each(|disk| now(disk.join_group(Some(group.clone()))).unwrap());
    let [little, rest] = [&modest, &greedy].map(|disk| world.guest(disk, 32, mixed));
    world.run(10 * SECOND);
    assert_near(little.get().0, 1000);
    assert_near(rest.get().0, 9000);
    // From now on both want all they can get: they get halves, whatever they have had before.
    now(modest.set_limits(Limits::default())).unwrap();
    let before = [&little, &rest].map(|done| done.get().0);
    world.run(2 * SECOND);
    [little, rest].iter().zip(before).for_each(|(done, before)| assert_near(done.get().0 - before, 1000));
}

#[test]
fn of_several_limits_the_one_that_waits_longest_decides() {
    let mut world = World::default();
    let group = Group::new("g", world.timer());
    let disk = world.disk(iops(400));
    now(disk.join_group(Some(group.clone()))).unwrap();
    let done = world.guest(&disk, 8, |_| What::Read(4 * KIB));
    let rate = |world: &mut World| {
        let before = done.get().0;
        world.run(10 * SECOND);
        (done.get().0 - before) / 10
    };
    assert_near(rate(&mut world), 400);
    group.set_limits(iops(300)).unwrap();
    assert_near(rate(&mut world), 300);
    now(disk.set_job_limits(bps(200 * 4 * KIB))).unwrap();
    assert_near(rate(&mut world), 200);
    now(disk.set_limits(iops(100))).unwrap();
    assert_near(rate(&mut world), 100);
    // Each is taken away by itself.
    now(disk.set_limits(Limits::default())).unwrap();
    assert_near(rate(&mut world), 200);
    now(disk.set_job_limits(Limits::default())).unwrap();
    assert_near(rate(&mut world), 300);
    now(disk.set_limits(iops(350))).unwrap();
    now(disk.join_group(None)).unwrap();
    assert_near(rate(&mut world), 350);
    assert_eq!((group.disks(), disk.limits().unwrap().group().is_none()), (0, true));
}

#[test]
fn requests_that_wait_go_to_another_group_with_their_disk() {
    let mut world = World::default();
    let groups = [1, 1000].map(|rate| {
        let group = Group::new(rate.to_string(), world.timer());
        group.set_limits(iops(rate)).unwrap();
        group
    });
    let disks = [0; 2].map(|_| world.disk(Limits::default()));
    disks.iter().for_each(|disk| now(disk.join_group(Some(groups[0].clone()))).unwrap());
    let [moved, stays] =
        disks.each_ref().map(|disk| (0..3).map(|_| world.request(disk, What::Read(512))).collect::<Vec<_>>());
    world.run(10 * MS);
    now(disks[0].join_group(Some(groups[1].clone()))).unwrap();
    world.run(20 * MS);
    assert!(moved.iter().all(|ended| ended.get().is_some()));
    // One of all was the keeper. Those that stay have one, whoever that was.
    world.run(4 * SECOND);
    assert!(stays.iter().all(|ended| ended.get().is_some()));
}

#[test]
fn a_disk_that_is_idle_wakes_nobody_and_one_that_waits_has_one_timer() {
    let mut world = World::default();
    let disk = world.disk(iops(100));
    let polls = world.polls;
    world.run(1000 * SECOND);
    assert_eq!((world.polls, world.clock.sleepers()), (polls, 0));
    let waiting: Vec<_> = (0..200).map(|_| world.request(&disk, What::Read(512))).collect();
    world.settle();
    assert_eq!(world.clock.sleepers(), 1);
    let before = world.polls;
    world.run(3 * SECOND);
    assert!(waiting.iter().all(|ended| ended.get().is_some()));
    // Each is woken when it passes. The keeper is woken by its timer for each of them, and a few times for being the next keeper.
    let polls = world.polls - before;
    assert!(polls <= 2 * 200 + 10, "{polls} polls for 200 requests");
    assert_eq!(world.clock.sleepers(), 0);
}

#[test]
fn what_was_delayed_is_counted() {
    let mut world = World::default();
    let disk = world.disk(iops(10));
    let delays = |disk: &TestNode| disk.limits().unwrap().delays();
    let _ended: Vec<_> = (0..4).map(|_| world.request(&disk, What::Read(512))).collect();
    world.run(150 * MS);
    assert_eq!(delays(&disk), Delays { requests: 3, time_ns: 100 * MS, waiting: 2 });
    world.run(SECOND);
    assert_eq!(delays(&disk), Delays { requests: 3, time_ns: 600 * MS, waiting: 0 });
}

#[test]
fn a_request_may_be_given_up_whoever_it_is() {
    let mut world = World::default();
    let disk = world.disk(iops(10));
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let disk = disk.clone();
            world.spawn(async move { What::Read(512).execute(&disk).await.unwrap() })
        })
        .collect();
    let last = world.request(&disk, What::Read(512));
    world.run(10 * MS);
    // The keeper is among them, and the first of the line.
    tasks[1..].iter().for_each(|task| world.drop_task(*task));
    world.run(100 * MS);
    assert!(last.get().is_some(), "those given up still cost something, or nobody has a timer");
    assert_eq!(disk.limits().unwrap().delays().waiting, 0);
}

#[test]
fn a_request_whose_client_is_gone_does_not_reach_the_graph() {
    let world = World::default();
    let disk = world.disk(iops(1));
    let (extent, memory) = (Extent::from_range(0..512), Segments::new());
    now(disk.execute_for(Io::write(extent, &memory, false), ready(()))).unwrap();
    let error = now(disk.execute_for(Io::write(extent, &memory, false), ready(()))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    let mut waits = Box::pin(disk.execute_for(Io::write(extent, &memory, false), pending()));
    assert!(crate::common::poll(&mut waits).is_pending());
}

#[test]
fn who_hurries_waits_for_nobody_and_pays_later() {
    let mut world = World::default();
    let disk = world.disk(iops(10));
    let waiting: Vec<_> = (0..5).map(|_| world.request(&disk, What::Read(512))).collect();
    world.settle();
    disk.hurry(true);
    let came_later = world.request(&disk, What::Write(512));
    world.settle();
    assert!(waiting.iter().chain([&came_later]).all(|ended| ended.get() == Some(0)));
    disk.hurry(false);
    let next = world.request(&disk, What::Read(512));
    world.run(SECOND);
    // Of what passed in haste one request is paid later.
    assert_near(next.get().unwrap(), 100 * MS);
}

/// A device that is reset with much in flight: neither its own next requests, nor its neighbours, pay for all of that.
#[test]
fn who_hurries_costs_its_group_a_moment_only() {
    for (group_limits, own) in [(bps(50 * MIB), Limits::default()), (Limits::default(), bps(50 * MIB))] {
        let mut world = World::default();
        let group = Group::new("g", world.timer());
        group.set_limits(group_limits).unwrap();
        let [web, db] = [0; 2].map(|_| world.disk(own));
        [&web, &db].into_iter().for_each(|disk| now(disk.join_group(Some(group.clone()))).unwrap());
        // A neighbour that wants all it can get.
        let neighbour = world.guest(&db, 8, |_| What::Read(64 * KIB));
        world.run(SECOND);
        for _ in 0..3 {
            let zeroes: Vec<_> = (0..16).map(|_| world.request(&web, What::Zeroes(world::SIZE))).collect();
            web.hurry(true);
            world.settle();
            assert!(zeroes.iter().all(|ended| ended.get().is_some()));
            web.hurry(false);
        }
        let before = neighbour.get().1;
        let since_ns = world.clock.now_ns();
        let boot = world.request(&web, What::Read(64 * KIB));
        world.run(SECOND);
        let waited_ns = boot.get().map(|ended_ns| ended_ns - since_ns);
        assert!(waited_ns.is_some_and(|waited_ns| waited_ns < 300 * MS), "{waited_ns:?}");
        let moved = neighbour.get().1 - before;
        assert!(moved > 40 * MIB, "the neighbour got {moved} bytes in a second");
        // From then on both have their shares.
        let reads = world.guest(&web, 8, |_| What::Read(64 * KIB));
        let before = neighbour.get().1;
        world.run(10 * SECOND);
        let shares = [reads.get().1, neighbour.get().1 - before];
        assert_near(shares[0], shares[1]);
    }
}

#[test]
fn a_request_that_waits_holds_up_no_exchange_and_no_close() {
    let mut world = World::default();
    let disk = world.disk(iops(1));
    let waits = [0; 2].map(|_| world.request(&disk, What::Read(512)))[1].clone();
    world.settle();
    let old = now(disk.exchange(Arc::new(Nothing))).unwrap();
    now(old.ended());
    assert!(waits.get().is_none());
    disk.hurry(true);
    world.settle();
    now(disk.close()).unwrap();
    assert!(waits.get().is_some());
}

#[test]
fn limits_that_nobody_can_keep_are_refused() {
    let world = World::default();
    let disk = world.disk(iops(5));
    for limits in [iops(0), bps(0), Limits { burst: Some(Duration::from_secs(4000)), ..iops(1) }] {
        assert_eq!(now(disk.set_limits(limits)).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(disk.limits().unwrap().own(), iops(5), "a refused change has changed something");
    let without_clock = Node::new(Nothing);
    assert_eq!(now(without_clock.set_limits(iops(5))).unwrap_err().kind(), ErrorKind::Unsupported);
}

/// Several workers share one line: each request passes once, none is forgotten, and the rate is not exceeded.
#[test]
fn workers_share_a_limit() {
    const WORKERS: usize = 3;
    const EACH: u64 = 400;
    const RATE: u64 = 5000;
    let engine = spile_engine::Engine::start(spile_engine::Config { workers: WORKERS, ..Default::default() }).unwrap();
    let limits = || DiskLimits::new(Arc::new(spile_engine::OsEnv));
    let node = Arc::new(Node::new(Nothing).with_limits(limits()));
    now(node.set_limits(Limits { burst: Some(Limits::LEAST_BURST), ..iops(RATE) })).unwrap();
    let (began, (done, all_done)) = (std::time::Instant::now(), std::sync::mpsc::channel::<()>());
    for worker in 0..WORKERS {
        for _ in 0..8 {
            let (node, done) = (node.clone(), done.clone());
            engine.spawn_on(worker, move || async move {
                for number in 0..EACH / 8 {
                    mixed(number).execute(&node).await.unwrap();
                }
                drop(done);
            });
        }
    }
    drop(done);
    assert!(all_done.recv().is_err(), "nobody sends");
    let least = (WORKERS as u64 * EACH) * SECOND / RATE - Limits::LEAST_BURST.as_nanos() as u64;
    assert!(began.elapsed().as_nanos() as u64 >= least, "more than the rate has passed");
    assert_eq!(node.limits().unwrap().delays().waiting, 0);
    engine.shutdown();
}
