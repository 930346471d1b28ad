//! Trouble below a disk: which requests wait, when they are tried again, and how their wait ends.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::common::{Request, TestGraph, at, now, poll, write};
use spile_core::metrics::Op;
use spile_core::{Disk, Error, ErrorKind, Io, Result, Segments, Timer, WriteZeroes};
use spile_node::{Effect, Fault, Faults, News, Node, OnError, Pending, Place, Policy, Stage, Troubles};

const FOR_EVER: Policy = Policy { on_error: OnError::Pause, pause_at_most: None };

/// Time passes when the test says so.
#[derive(Default)]
struct Clock {
    now_ms: AtomicU64,
    /// Sleeps that somebody waits for.
    timers: Arc<AtomicU64>,
}

struct Running(Arc<AtomicU64>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[derive(Clone, Default)]
struct TestTimer(Arc<Clock>);

impl Timer for TestTimer {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let clock = self.0.clone();
        let end_ns = self.now_ns() + time.as_nanos() as u64;
        clock.timers.fetch_add(1, SeqCst);
        let running = Running(clock.timers.clone());
        Box::pin(poll_fn(move |_| {
            let _ = &running;
            if clock.now_ms.load(SeqCst) * 1_000_000 >= end_ns { Poll::Ready(()) } else { Poll::Pending }
        }))
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ms.load(SeqCst) * 1_000_000
    }
}

/// A disk with a fault that strikes everything while it is broken.
struct World {
    node: Node<TestGraph>,
    clock: Arc<Clock>,
    news: Arc<Mutex<Vec<String>>>,
}

impl World {
    fn new(policy: Policy) -> Self {
        let (timer, news) = (TestTimer::default(), Arc::<Mutex<Vec<String>>>::default());
        let (clock, heard) = (timer.0.clone(), news.clone());
        let tell = Box::new(move |news: &News| {
            heard.lock().unwrap().push(match news {
                News::Begins(waiting) => format!("begins: {:?} {:?}", waiting.op, waiting.error.kind()),
                News::Ends { requests, reported, left, .. } => {
                    format!("ends: {requests}, {reported} reported, {left} left")
                }
            });
        });
        let node = Node::new(TestGraph::new()).with_troubles(Troubles::new(policy, Arc::new(timer), tell));
        Self { node, clock, news }
    }

    fn troubles(&self) -> &Troubles {
        self.node.troubles().unwrap()
    }

    fn fail_where(&self, kind: ErrorKind, start: u64, len: u64) {
        let extent = (len > 0).then(|| at(start, len));
        let fault = Fault { ops: Vec::new(), extent, per_million: 1_000_000, effect: Effect::Fail(kind) };
        let stage = Faults::new(vec![fault], 1, Arc::new(TestTimer::default()));
        now(self.node.attach(Place::Fault, Arc::new(stage))).unwrap();
    }

    fn fail(&self, kind: ErrorKind) {
        self.fail_where(kind, 0, 0);
    }

    fn mend(&self) {
        now(self.node.detach(Place::Fault)).unwrap();
    }

    fn pass_ms(&self, ms: u64) {
        self.clock.now_ms.fetch_add(ms, SeqCst);
    }

    /// Nothing waits, and nothing will wake up.
    fn assert_quiet(&self) {
        assert!(self.troubles().waiting().is_none());
        assert_eq!(self.clock.timers.load(SeqCst), 0, "a timer runs although nothing waits");
    }

    fn news(&self) -> Vec<String> {
        self.news.lock().unwrap().clone()
    }
}

fn is_pending(request: &mut Request<'_>) -> bool {
    poll(request).is_pending()
}

fn kind_of(result: Poll<Result<()>>) -> ErrorKind {
    match result {
        Poll::Ready(Err(error)) => error.kind(),
        other => panic!("{other:?} is no error"),
    }
}

/// One request of each kind, as futures.
fn each_kind<'a>(node: &'a Node<TestGraph>, memory: &'a Segments) -> Vec<Request<'a>> {
    vec![
        Box::pin(node.read(at(0, 4096), memory)),
        Box::pin(node.write(at(0, 4096), memory, true)),
        Box::pin(node.flush()),
        Box::pin(node.discard(at(0, 4096))),
        Box::pin(node.write_zeroes(at(0, 4096), WriteZeroes::default())),
    ]
}

#[test]
fn every_kind_of_request_waits_and_goes_on() {
    let memory = Segments::zeroed(4096);
    for kind in [ErrorKind::NoSpace, ErrorKind::Io, ErrorKind::TimedOut, ErrorKind::Exhausted] {
        let world = World::new(FOR_EVER);
        world.fail(kind);
        for mut request in each_kind(&world.node, &memory) {
            assert!(is_pending(&mut request), "{kind:?} is reported");
            world.mend();
            world.pass_ms(250);
            assert!(matches!(poll(&mut request), Poll::Ready(Ok(()))));
            drop(request);
            world.assert_quiet();
            world.fail(kind);
        }
    }
}

#[test]
fn what_cannot_pass_is_reported_at_once() {
    let memory = Segments::zeroed(4096);
    for kind in [ErrorKind::InvalidInput, ErrorKind::ReadOnly, ErrorKind::Corrupt, ErrorKind::Shutdown] {
        let world = World::new(FOR_EVER);
        world.fail(kind);
        for mut request in each_kind(&world.node, &memory) {
            assert_eq!(kind_of(poll(&mut request)), kind);
        }
        assert_eq!(world.news(), Vec::<String>::new());
    }
}

/// Fails every flush as a store does whose sync has failed.
struct LosesData;

impl Stage for LosesData {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        let is_flush = io.op == spile_core::Op::Flush;
        is_flush.then(|| Box::pin(async { Err(Error::errno("sync", 28).permanent()) }) as _)
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn a_failed_sync_is_reported_and_never_tried_again() {
    let world = World::new(FOR_EVER);
    now(world.node.attach(Place::Fault, Arc::new(LosesData))).unwrap();
    assert_eq!(now(world.node.flush()).unwrap_err().kind(), ErrorKind::NoSpace);
    world.assert_quiet();
}

#[test]
fn without_the_policy_errors_are_reported() {
    let world = World::new(Policy::default());
    world.fail(ErrorKind::NoSpace);
    assert_eq!(now(write(&world.node, 0, 512, 1)).unwrap_err().kind(), ErrorKind::NoSpace);
    let bare = Node::new(TestGraph::new());
    let rule =
        Fault { ops: vec![Op::Write], extent: None, per_million: 1_000_000, effect: Effect::Fail(ErrorKind::Io) };
    now(bare.attach(Place::Fault, Arc::new(Faults::new(vec![rule], 1, Arc::new(TestTimer::default()))))).unwrap();
    assert_eq!(now(write(&bare, 0, 512, 1)).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn only_what_fails_waits_and_the_data_arrive() {
    let world = World::new(FOR_EVER);
    world.fail_where(ErrorKind::NoSpace, 4096, 4096);
    let mut request = write(&world.node, 4096, 512, 7);
    assert!(is_pending(&mut request));
    now(write(&world.node, 0, 512, 5)).unwrap();
    now(world.node.flush()).unwrap();
    let waiting = world.troubles().waiting().unwrap();
    assert_eq!((waiting.requests, waiting.op, waiting.error.offset_bytes()), (1, Op::Write, Some(4096)));
    world.mend();
    world.pass_ms(250);
    assert!(matches!(poll(&mut request), Poll::Ready(Ok(()))));
    let graph = now(world.node.graph());
    assert_eq!((graph.byte(0), graph.byte(4096)), (5, 7));
}

#[test]
fn one_request_probes_and_the_others_follow() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let mut requests: Vec<_> = (0..20).map(|n| write(&world.node, n * 512, 512, 1)).collect();
    assert!(requests.iter_mut().all(is_pending));
    assert_eq!(world.clock.timers.load(SeqCst), 1, "more than one request has a timer");
    world.mend();
    world.pass_ms(249);
    assert!(requests.iter_mut().all(is_pending), "a request was tried too early");
    world.pass_ms(1);
    let done = |request: &mut Request<'_>| matches!(poll(request), Poll::Ready(Ok(())));
    assert!(requests.iter_mut().all(done));
    drop(requests);
    world.assert_quiet();
    assert_eq!(world.news(), ["begins: Write NoSpace", "ends: 20, 0 reported, 0 left"]);
}

/// Counts the tries, and fails those before an offset.
#[derive(Default)]
struct Broken {
    tries: AtomicU64,
    before: AtomicU64,
}

impl Stage for Broken {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        self.tries.fetch_add(1, SeqCst);
        let is_broken = io.extent.start() < self.before.load(SeqCst);
        is_broken.then(|| Box::pin(async { Err(Error::errno("write", 5)) }) as _)
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn pauses_grow_to_a_bound_and_probes_take_turns() {
    let world = World::new(FOR_EVER);
    let broken = Arc::new(Broken::default());
    broken.before.store(8192, SeqCst);
    now(world.node.attach(Place::Fault, broken.clone())).unwrap();
    let mut requests = vec![write(&world.node, 0, 512, 1), write(&world.node, 4096, 512, 2)];
    assert!(requests.iter_mut().all(is_pending));
    for (probes, pause_ms) in [250, 500, 1000, 2000, 4000, 5000, 5000].into_iter().enumerate() {
        for ms in [pause_ms - 1, 1] {
            assert_eq!(broken.tries.load(SeqCst), 2 + probes as u64, "before {pause_ms} ms");
            world.pass_ms(ms);
            // Twice, because a request that was polled before may be the next probe.
            assert!(requests.iter_mut().all(is_pending) && requests.iter_mut().all(is_pending));
        }
    }
    // From now on the second request can succeed, and the first one never. Two probes are enough to find out.
    broken.before.store(4096, SeqCst);
    for _ in 0..2 {
        world.pass_ms(5000);
        assert!(is_pending(&mut requests[0]));
        if poll(&mut requests[1]).is_ready() {
            requests.truncate(1);
            assert_eq!(world.troubles().waiting().unwrap().requests, 1);
            return;
        }
        assert!(is_pending(&mut requests[0]));
    }
    panic!("the request that can succeed is held up by the one that cannot");
}

#[test]
fn all_are_tried_when_told() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::Io);
    let mut requests: Vec<_> = (0..3).map(|n| write(&world.node, n * 512, 512, 1)).collect();
    assert!(requests.iter_mut().all(is_pending));
    assert_eq!(world.troubles().try_again(), 3);
    assert!(requests.iter_mut().all(is_pending));
    world.mend();
    assert_eq!(world.troubles().try_again(), 3);
    assert!(requests.iter_mut().all(|request| poll(request).is_ready()));
    assert_eq!(world.troubles().try_again(), 0);
}

#[test]
fn after_the_bound_the_error_is_reported() {
    let world = World::new(Policy { pause_at_most: Some(Duration::from_secs(1)), ..FOR_EVER });
    world.fail(ErrorKind::NoSpace);
    let mut first = write(&world.node, 0, 512, 1);
    assert!(is_pending(&mut first));
    world.pass_ms(500);
    let mut second = write(&world.node, 512, 512, 1);
    assert!(is_pending(&mut first) && is_pending(&mut second));
    world.pass_ms(500);
    assert_eq!(kind_of(poll(&mut first)), ErrorKind::NoSpace);
    drop(first);
    assert!(is_pending(&mut second), "each request waits for as long as the policy says");
    world.pass_ms(500);
    assert_eq!(kind_of(poll(&mut second)), ErrorKind::NoSpace);
    drop(second);
    world.assert_quiet();
    assert_eq!(world.news(), ["begins: Write NoSpace", "ends: 2, 2 reported, 0 left"]);
}

#[test]
fn a_change_of_the_policy_concerns_those_that_wait() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let mut request = write(&world.node, 0, 512, 1);
    assert!(is_pending(&mut request));
    world.pass_ms(100);
    world.troubles().set_policy(Policy { pause_at_most: Some(Duration::from_secs(9)), ..FOR_EVER });
    assert!(is_pending(&mut request));
    world.troubles().set_policy(Policy::default());
    assert_eq!(kind_of(poll(&mut request)), ErrorKind::NoSpace);
}

#[test]
fn at_the_end_of_the_server_requests_are_left_undone() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let mut request = write(&world.node, 0, 512, 1);
    assert!(is_pending(&mut request));
    world.troubles().leave();
    assert_eq!(kind_of(poll(&mut request)), ErrorKind::Shutdown);
    drop(request);
    assert_eq!(now(write(&world.node, 0, 512, 1)).unwrap_err().kind(), ErrorKind::Shutdown);
    world.assert_quiet();
    assert_eq!(world.news()[..2], ["begins: Write NoSpace", "ends: 1, 0 reported, 1 left"]);
}

#[test]
fn a_request_whose_client_is_gone_is_not_tried_again() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let (is_gone, memory) = (AtomicBool::new(false), Segments::zeroed(512));
    memory.copy_from_slice(0, &[9; 512]);
    let gone = || poll_fn(|_| if is_gone.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending });
    let io = Io::write(at(0, 512), &memory, false);
    let mut requests: Vec<Request<'_>> =
        vec![Box::pin(world.node.execute_for(io, gone())), Box::pin(world.node.execute_for(io, gone()))];
    assert!(requests.iter_mut().all(is_pending));
    world.mend();
    is_gone.store(true, SeqCst);
    world.pass_ms(250);
    world.troubles().try_again();
    for mut request in requests {
        assert_eq!(kind_of(poll(&mut request)), ErrorKind::Shutdown);
    }
    assert_eq!(now(world.node.graph()).byte(0), 0, "a request of a client that is gone was tried again");
    world.assert_quiet();
    assert_eq!(world.news(), ["begins: Write NoSpace", "ends: 2, 0 reported, 0 left"]);
}

#[test]
fn a_request_that_is_tried_again_on_a_paused_disk_ends_with_its_client() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let (is_gone, memory) = (AtomicBool::new(false), Segments::zeroed(512));
    memory.copy_from_slice(0, &[9; 512]);
    let gone = poll_fn(|_| if is_gone.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending });
    let mut request: Request<'_> = Box::pin(world.node.execute_for(Io::write(at(0, 512), &memory, false), gone));
    assert!(is_pending(&mut request));
    now(now(world.node.hold()).unwrap().ended());
    world.mend();
    world.troubles().try_again();
    assert!(is_pending(&mut request), "the disk is paused");
    is_gone.store(true, SeqCst);
    assert_eq!(kind_of(poll(&mut request)), ErrorKind::Shutdown);
    drop(request);
    now(world.node.let_go());
    assert_eq!(now(world.node.graph()).byte(0), 0, "a request of a client that is gone was done");
    world.assert_quiet();
}

/// Finds no room for a request, once. What is told happens meanwhile.
struct NoRoomAnd {
    tries: AtomicU64,
    happens: Box<dyn Fn() + Send + Sync>,
}

impl Stage for NoRoomAnd {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        (self.happens)();
        let is_first = self.tries.fetch_add(1, SeqCst) == 0;
        is_first.then(|| Box::pin(async { Err(Error::new(ErrorKind::NoSpace, "no room")) }) as _)
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn where_room_is_made_a_request_whose_client_is_gone_is_not_tried_again_either() {
    let (world, _) = with_room_maker(Policy::default());
    let (is_gone, memory) = (Arc::new(AtomicBool::new(false)), Segments::zeroed(512));
    memory.copy_from_slice(0, &[9; 512]);
    let goes = is_gone.clone();
    let stage = Arc::new(NoRoomAnd { tries: AtomicU64::new(0), happens: Box::new(move || goes.store(true, SeqCst)) });
    now(world.node.attach(Place::Fault, stage.clone())).unwrap();
    let gone = poll_fn(|_| if is_gone.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending });
    let written = now(world.node.execute_for(Io::write(at(0, 512), &memory, false), gone));
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Shutdown);
    assert_eq!((stage.tries.load(SeqCst), now(world.node.graph()).byte(0)), (1, 0));
    world.assert_quiet();
}

#[test]
fn where_room_is_made_a_server_that_ends_tries_nothing_again() {
    let (world, _) = with_room_maker(Policy::default());
    let stage = Arc::new(NoRoomAnd { tries: AtomicU64::new(0), happens: Box::new(|| ()) });
    now(world.node.attach(Place::Fault, stage.clone())).unwrap();
    world.troubles().leave();
    assert_eq!(now(write(&world.node, 0, 512, 1)).unwrap_err().kind(), ErrorKind::Shutdown);
    assert_eq!(stage.tries.load(SeqCst), 1);
}

#[test]
fn a_flush_of_the_server_itself_does_not_wait() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    assert_eq!(now(world.node.flush_once()).unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn the_disk_can_be_exchanged_while_requests_wait() {
    let world = World::new(FOR_EVER);
    world.fail(ErrorKind::NoSpace);
    let mut request = write(&world.node, 0, 512, 9);
    assert!(is_pending(&mut request));
    let new = Arc::new(TestGraph::new());
    let old = now(world.node.exchange(new.clone())).unwrap();
    assert!(old.has_ended(), "a request that waits keeps the old epoch");
    world.mend();
    world.troubles().try_again();
    assert!(poll(&mut request).is_ready());
    assert_eq!(new.byte(0), 9);
}

/// A disk for which somebody makes room while the flag is set.
fn with_room_maker(policy: Policy) -> (World, Arc<AtomicBool>) {
    let mut world = World::new(policy);
    let (timer, heard) = (TestTimer(world.clock.clone()), world.news.clone());
    let makes_room = Arc::new(AtomicBool::new(false));
    let makes = makes_room.clone();
    let tell = Box::new(move |_: &News| heard.lock().unwrap().push("news".to_owned()));
    let troubles = Troubles::new(policy, Arc::new(timer), tell).with_room_maker(Box::new(move || makes.load(SeqCst)));
    world.node = Node::new(TestGraph::new()).with_troubles(troubles);
    (world, makes_room)
}

#[test]
fn a_request_without_room_waits_while_room_is_made_whatever_the_policy_says() {
    for policy in [Policy::default(), FOR_EVER] {
        let (world, makes_room) = with_room_maker(policy);
        makes_room.store(true, SeqCst);
        world.fail(ErrorKind::NoSpace);
        let mut requests: Vec<_> = (0..3).map(|n| write(&world.node, n * 512, 512, 1)).collect();
        assert!(requests.iter_mut().all(is_pending));
        assert_eq!(world.troubles().waiting().unwrap().requests, 3);
        world.mend();
        world.troubles().try_again();
        makes_room.store(false, SeqCst);
        world.troubles().look_again();
        assert!(requests.iter_mut().all(|request| matches!(poll(request), Poll::Ready(Ok(())))));
        drop(requests);
        world.assert_quiet();
    }
}

#[test]
fn when_no_room_was_made_the_policy_decides() {
    for (policy, is_reported) in [(Policy::default(), true), (FOR_EVER, false)] {
        let (world, makes_room) = with_room_maker(policy);
        makes_room.store(true, SeqCst);
        world.fail(ErrorKind::NoSpace);
        let mut request = write(&world.node, 0, 512, 1);
        assert!(is_pending(&mut request));
        makes_room.store(false, SeqCst);
        world.troubles().look_again();
        match is_reported {
            true => assert_eq!(kind_of(poll(&mut request)), ErrorKind::NoSpace),
            false => assert!(is_pending(&mut request)),
        }
    }
}

/// Fails a request as if there were no room, and has made some when the next one comes.
struct JustTooLate {
    tries: AtomicU64,
    fails: u64,
    /// As a sync that has failed.
    for_ever: bool,
}

impl Stage for JustTooLate {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        let is_early = self.tries.fetch_add(1, SeqCst) < self.fails;
        let error = Error::new(ErrorKind::NoSpace, "no room");
        let error = if self.for_ever { error.permanent() } else { error };
        is_early.then(|| Box::pin(async { Err(error) }) as _)
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn room_that_came_before_a_request_could_wait_is_seen() {
    let (world, _) = with_room_maker(Policy::default());
    let late = Arc::new(JustTooLate { tries: AtomicU64::new(0), fails: 1, for_ever: false });
    now(world.node.attach(Place::Fault, late.clone())).unwrap();
    now(write(&world.node, 0, 512, 1)).unwrap();
    // What fails once more has nothing to wait for, and is not tried for ever. Nobody hears of it.
    let never = Arc::new(JustTooLate { tries: AtomicU64::new(0), fails: u64::MAX, for_ever: false });
    now(world.node.replace(Place::Fault, Some(never.clone()))).unwrap();
    assert_eq!(now(write(&world.node, 0, 512, 1)).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(never.tries.load(SeqCst), 2);
    assert_eq!(world.news(), Vec::<String>::new());
}

#[test]
fn what_is_no_want_of_room_does_not_wait_for_room() {
    let (world, makes_room) = with_room_maker(Policy::default());
    makes_room.store(true, SeqCst);
    world.fail(ErrorKind::Io);
    assert_eq!(now(write(&world.node, 0, 512, 1)).unwrap_err().kind(), ErrorKind::Io);
    world.mend();
    let lost = Arc::new(JustTooLate { tries: AtomicU64::new(0), fails: u64::MAX, for_ever: true });
    now(world.node.attach(Place::Fault, lost.clone())).unwrap();
    assert_eq!(now(world.node.flush()).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(lost.tries.load(SeqCst), 1, "a failed sync is never tried again");
    world.assert_quiet();
}
