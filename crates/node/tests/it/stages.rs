//! Stages: their order, attaching and detaching while requests run, and the stage that fails and delays.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::common::{Request, TestGraph, at, now, one_of_each, poll, write};
use spile_core::metrics::Op;
use spile_core::{Disk, Error, ErrorKind, Io, Result, Segments, Timer};
use spile_node::{Effect, Fault, Faults, Node, Pending, Place, Stage};

/// Counts, notes in a list when it is passed, and can hold or refuse requests.
struct Counting {
    place: Place,
    notes: Arc<Mutex<Vec<(Place, &'static str)>>>,
    before: AtomicU64,
    after: AtomicU64,
    holds: AtomicBool,
    refuses: AtomicBool,
}

impl Counting {
    fn new(place: Place, notes: &Arc<Mutex<Vec<(Place, &'static str)>>>) -> Arc<Self> {
        Arc::new(Self {
            place,
            notes: notes.clone(),
            before: AtomicU64::new(0),
            after: AtomicU64::new(0),
            holds: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
        })
    }

    fn counts(&self) -> (u64, u64) {
        (self.before.load(SeqCst), self.after.load(SeqCst))
    }
}

impl Stage for Counting {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        self.before.fetch_add(1, SeqCst);
        self.notes.lock().unwrap().push((self.place, "before"));
        if self.refuses.load(SeqCst) {
            return Some(Box::pin(async { Err(Error::new(ErrorKind::Denied, "refused")) }));
        }
        self.holds.load(SeqCst).then(|| {
            Box::pin(poll_fn(|_| if self.holds.load(SeqCst) { Poll::Pending } else { Poll::Ready(Ok(())) })) as _
        })
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        self.after.fetch_add(1, SeqCst);
        self.notes.lock().unwrap().push((self.place, "after"));
        None
    }
}

#[test]
fn each_place_sees_every_request_and_its_result() {
    for place in Place::ALL {
        let (node, notes) = (Node::new(TestGraph::new()), Arc::default());
        let stage = Counting::new(place, &notes);
        now(one_of_each(&node)).unwrap();
        now(node.attach(place, stage.clone())).unwrap();
        assert_eq!(now(node.attach(place, stage.clone())).unwrap_err().kind(), ErrorKind::Busy);
        now(one_of_each(&node)).unwrap();
        assert_eq!(stage.counts(), (5, 5));
        now(node.detach(place)).unwrap();
        assert_eq!(now(node.detach(place)).unwrap_err().kind(), ErrorKind::NotFound);
        now(one_of_each(&node)).unwrap();
        assert_eq!(stage.counts(), (5, 5));
        assert_eq!(Arc::strong_count(&stage), 1, "the disk keeps a stage that is detached");
    }
}

#[test]
fn requests_pass_the_places_in_order_and_back() {
    let (node, notes) = (Node::new(TestGraph::new()), Arc::default());
    for place in Place::ALL.into_iter().rev() {
        now(node.attach(place, Counting::new(place, &notes))).unwrap();
    }
    now(node.flush()).unwrap();
    let there = Place::ALL.map(|place| (place, "before")).into_iter();
    let back = Place::ALL.map(|place| (place, "after")).into_iter().rev();
    assert_eq!(*notes.lock().unwrap(), there.chain(back).collect::<Vec<_>>());
}

#[test]
fn a_request_that_a_stage_refuses_goes_no_further() {
    let (node, notes) = (Node::new(TestGraph::new()), Arc::default());
    let stages: Vec<_> = Place::ALL.into_iter().map(|place| Counting::new(place, &notes)).collect();
    for stage in &stages {
        now(node.attach(stage.place, stage.clone())).unwrap();
    }
    stages[2].refuses.store(true, SeqCst);
    assert_eq!(now(node.flush()).unwrap_err().kind(), ErrorKind::Denied);
    let counts: Vec<_> = stages.iter().map(|stage| stage.counts()).collect();
    assert_eq!(counts, [(1, 1), (1, 1), (1, 0), (0, 0), (0, 0)]);
    assert_eq!(now(node.graph()).begun.load(SeqCst), 0);
}

#[test]
fn a_detached_stage_is_waited_for_by_those_inside_it_only() {
    let (node, notes) = (Node::new(TestGraph::new()), Arc::default());
    let graph = now(node.graph());
    // One request that began before the stage came is held for ever.
    graph.hold(true);
    let mut older = write(&node, 0, 512, 1);
    assert!(poll(&mut older).is_pending());
    graph.hold(false);
    let stage = Counting::new(Place::Limit, &notes);
    now(node.attach(Place::Limit, stage.clone())).unwrap();
    stage.holds.store(true, SeqCst);
    let mut inside: Vec<Request<'_>> = vec![write(&node, 512, 512, 2), Box::pin(node.flush())];
    assert!(inside.iter_mut().all(|request| poll(request).is_pending()));
    let mut detaching = Box::pin(node.detach(Place::Limit));
    assert!(poll(&mut detaching).is_pending());
    // What begins now does not meet the stage.
    now(one_of_each(&node)).unwrap();
    assert_eq!(stage.counts(), (2, 0));
    stage.holds.store(false, SeqCst);
    assert!(poll(&mut inside[0]).is_ready() && poll(&mut detaching).is_pending());
    assert!(poll(&mut inside[1]).is_ready());
    assert!(matches!(poll(&mut detaching), Poll::Ready(Ok(()))), "it waits for a request that never met the stage");
    assert_eq!(stage.counts(), (2, 2));
    assert!(poll(&mut older).is_ready());
}

#[test]
fn stages_stay_over_an_exchange() {
    let (node, notes) = (Node::new(TestGraph::new()), Arc::default());
    let stage = Counting::new(Place::Mirror, &notes);
    now(node.attach(Place::Mirror, stage.clone())).unwrap();
    let new = Arc::new(TestGraph::new());
    now(node.exchange(new.clone())).unwrap();
    now(one_of_each(&node)).unwrap();
    assert_eq!((stage.counts(), new.ended.load(SeqCst)), ((5, 5), 5));
}

/// Time passes when the test says so.
#[derive(Default)]
struct Clock(Arc<AtomicU64>);

impl Timer for Clock {
    fn sleep(&self, time: Duration) -> std::pin::Pin<Box<dyn Future<Output = ()>>> {
        let clock = self.0.clone();
        let end = clock.load(SeqCst) + time.as_millis() as u64;
        Box::pin(poll_fn(move |_| if clock.load(SeqCst) >= end { Poll::Ready(()) } else { Poll::Pending }))
    }
}

fn faults(rules: Vec<Fault>, seed: u64) -> (Node<TestGraph>, Arc<AtomicU64>) {
    let (node, clock) = (Node::new(TestGraph::new()), Clock::default());
    let time = clock.0.clone();
    now(node.attach(Place::Fault, Arc::new(Faults::new(rules, seed, Arc::new(clock))))).unwrap();
    (node, time)
}

#[test]
fn faults_strike_their_operations_and_places() {
    let fails = Effect::Fail(ErrorKind::NoSpace);
    let rule = Fault { ops: vec![Op::Write], extent: Some(at(4096, 4096)), per_million: 1_000_000, effect: fails };
    let (node, _) = faults(vec![rule], 1);
    now(one_of_each(&node)).unwrap();
    assert_eq!(now(write(&node, 8191, 1, 1)).unwrap_err().kind(), ErrorKind::NoSpace);
    now(write(&node, 8192, 1, 1)).unwrap();
    now(node.read(at(4096, 1), &Segments::zeroed(1))).unwrap();
}

#[test]
fn the_seed_decides_which_requests_are_struck() {
    let strikes = |seed| -> Vec<bool> {
        let rule = Fault { ops: Vec::new(), extent: None, per_million: 250_000, effect: Effect::Fail(ErrorKind::Io) };
        let (node, _) = faults(vec![rule], seed);
        (0..400).map(|_| now(node.flush()).is_err()).collect()
    };
    let struck = strikes(7).iter().filter(|struck| **struck).count();
    assert!((60..140).contains(&struck), "{struck} of 400");
    assert_eq!(strikes(7), strikes(7));
    assert_ne!(strikes(7), strikes(8));
}

#[test]
fn a_delayed_request_goes_on_when_its_time_has_come() {
    let rule = |op, ms| Fault {
        ops: vec![op],
        extent: None,
        per_million: 1_000_000,
        effect: Effect::Delay(Duration::from_millis(ms)),
    };
    let (node, time) = faults(vec![rule(Op::Write, 60), rule(Op::Write, 40), rule(Op::Read, 1)], 1);
    let graph = now(node.graph());
    let mut delayed = write(&node, 0, 512, 1);
    for ms in [0, 99] {
        time.store(ms, SeqCst);
        assert!(poll(&mut delayed).is_pending());
        assert_eq!(graph.begun.load(SeqCst), 0);
    }
    now(node.flush()).unwrap();
    time.store(100, SeqCst);
    assert!(matches!(poll(&mut delayed), Poll::Ready(Ok(()))));
}

#[test]
fn a_panic_comes_before_the_graph_has_the_request_or_when_it_has_done_it() {
    for (effect, reached) in [(Effect::Panic, 0), (Effect::PanicAfter, 1)] {
        let rule = Fault { ops: vec![Op::Write], extent: None, per_million: 1_000_000, effect };
        let (node, _) = faults(vec![rule], 1);
        let graph = now(node.graph());
        now(node.flush()).unwrap();
        let before = graph.begun.load(SeqCst);
        let struck = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| now(write(&node, 0, 512, 1))));
        assert!(struck.is_err(), "{effect:?}");
        assert_eq!(graph.begun.load(SeqCst) - before, reached, "{effect:?}");
    }
}
