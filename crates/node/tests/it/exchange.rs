//! An exchange of graphs: who meets which graph, who waits for whom, and what it excludes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::Poll;

use crate::common::{SIZE, TestGraph, at, now, one_of_each, poll, write};
use spile_core::metrics::Op;
use spile_core::{Disk, ErrorKind, Io, Result, Segments};
use spile_node::{Node, Pending, Place, Stage, close_gates, exchange, hold_gates};

fn pair() -> (Node<TestGraph>, Arc<TestGraph>, Arc<TestGraph>) {
    let node = Node::new(TestGraph::new());
    let old = now(node.graph());
    (node, old, Arc::new(TestGraph::new()))
}

#[test]
fn a_request_of_the_old_epoch_may_stay_for_ever_and_holds_up_nobody() {
    let (node, old, new) = pair();
    old.hold(true);
    let mut stuck = write(&node, 0, 512, 1);
    assert!(poll(&mut stuck).is_pending());
    let epoch = now(node.exchange(new.clone())).unwrap();
    for round in 0..100 {
        now(write(&node, 512 * round, 512, 2)).unwrap();
        now(one_of_each(&node)).unwrap();
    }
    assert_eq!((old.begun.load(SeqCst), new.ended.load(SeqCst)), (1, 600));
    assert!(!epoch.has_ended());
    let mut ended = Box::pin(epoch.ended());
    assert!(poll(&mut ended).is_pending());
    old.hold(false);
    assert!(matches!(poll(&mut stuck), Poll::Ready(Ok(()))));
    assert!(poll(&mut ended).is_ready());
    assert_eq!((old.byte(0), new.byte(0)), (1, 0), "it ended under another graph than it began with");
}

#[test]
fn an_epoch_without_requests_ends_with_the_exchange() {
    let (node, old, new) = pair();
    now(one_of_each(&node)).unwrap();
    let epoch = now(node.exchange(new.clone())).unwrap();
    assert!(epoch.has_ended() && Arc::ptr_eq(epoch.graph(), &old));
    assert!(Arc::ptr_eq(&now(node.graph()), &new));
    drop(epoch);
    assert_eq!(Arc::strong_count(&old), 1, "somebody keeps the old graph");
}

#[test]
fn the_end_of_an_epoch_comes_after_those_before_it() {
    let (node, old, new) = pair();
    old.hold(true);
    let mut stuck = write(&node, 0, 512, 1);
    assert!(poll(&mut stuck).is_pending());
    let last = Arc::new(TestGraph::new());
    let first = now(node.exchange(new.clone())).unwrap();
    let second = now(node.exchange(last.clone())).unwrap();
    assert!(!first.has_ended() && !second.has_ended());
    // A graph that copies from its parents knows what may still change them.
    let rests = |graph: &TestGraph| graph.older.lock().unwrap().iter().all(|epoch| epoch.has_ended());
    assert!(!rests(&new) && !rests(&last));
    old.hold(false);
    assert!(poll(&mut stuck).is_ready());
    assert!(first.has_ended() && second.has_ended());
    assert!(rests(&new) && rests(&last));
}

#[test]
fn while_gates_are_closed_requests_wait_and_then_meet_the_new_graph() {
    let (node, old, new) = pair();
    let gates = now(close_gates(vec![(&node, new.clone())])).unwrap();
    let mut waiting = write(&node, 0, 512, 1);
    assert!(poll(&mut waiting).is_pending());
    assert_eq!((old.begun.load(SeqCst), new.begun.load(SeqCst)), (0, 0));
    let epochs = gates.open();
    assert!(epochs[0].has_ended(), "a request that waits at the gate belongs to no epoch");
    assert!(poll(&mut waiting).is_ready());
    assert_eq!((old.begun.load(SeqCst), new.begun.load(SeqCst)), (0, 1));
}

#[test]
fn gates_that_are_dropped_open_to_the_graphs_of_before() {
    let (node, old, new) = pair();
    drop(now(close_gates(vec![(&node, new.clone())])).unwrap());
    now(write(&node, 0, 512, 1)).unwrap();
    assert_eq!((old.ended.load(SeqCst), new.begun.load(SeqCst)), (1, 0));
}

#[test]
fn several_disks_have_no_moment_between() {
    let ((a, _, new_a), (b, old_b, new_b)) = (pair(), pair());
    for swapped in [false, true] {
        let both = match swapped {
            false => vec![(&a, new_a.clone()), (&b, new_b.clone())],
            true => vec![(&b, old_b.clone()), (&a, Arc::new(TestGraph::new()))],
        };
        let wanted: Vec<_> = both.iter().map(|(_, graph)| graph.clone()).collect();
        let gates = now(close_gates(both)).unwrap();
        let mut waiting = [write(&a, 0, 512, 1), write(&b, 0, 512, 1)];
        assert!(waiting.iter_mut().all(|request| poll(request).is_pending()));
        gates.open();
        assert!(waiting.iter_mut().all(|request| poll(request).is_ready()));
        assert!(wanted.iter().all(|graph| graph.byte(0) == 1));
    }
}

/// Notes that it was met.
#[derive(Default)]
struct Met(AtomicU64);

impl Stage for Met {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        self.0.fetch_add(1, SeqCst);
        None
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn disks_get_their_stages_while_all_gates_are_closed_or_none_gets_one() {
    let ((a, old_a, _), (b, _, _)) = (pair(), pair());
    old_a.hold(true);
    let mut stuck = write(&a, 0, 512, 1);
    assert!(poll(&mut stuck).is_pending());
    let stages = [Arc::new(Met::default()), Arc::new(Met::default())];
    let shares = || stages.iter().map(|stage| stage.clone() as Arc<dyn Stage>).collect::<Vec<_>>();
    let mut gates = now(hold_gates(&[&b, &a])).unwrap();
    let mut waiting = [write(&a, 512, 512, 2), write(&b, 0, 512, 2)];
    assert!(waiting.iter_mut().all(|request| poll(request).is_pending()));
    gates.attach(Place::Backup, shares()).unwrap();
    let before = gates.open();
    old_a.hold(false);
    assert!(waiting.iter_mut().all(|request| poll(request).is_ready()));
    // The one that began before met no stage, and the epoch of before lasts as long as it.
    assert_eq!(stages.each_ref().map(|stage| stage.0.load(SeqCst)), [1, 1]);
    assert!(!before[1].has_ended() && before[0].has_ended() && Arc::ptr_eq(before[1].graph(), &old_a));
    assert!(poll(&mut stuck).is_ready() && before[1].has_ended());
    // One of them has a stage there: the other one gets none.
    now(a.detach(Place::Backup)).unwrap();
    let mut gates = now(hold_gates(&[&a, &b])).unwrap();
    assert_eq!(gates.attach(Place::Backup, shares()).unwrap_err().kind(), ErrorKind::Busy);
    drop(gates);
    assert_eq!(now(a.detach(Place::Backup)).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(now(hold_gates(&[&a, &a])).err().unwrap().kind(), ErrorKind::InvalidInput);
}

#[test]
fn old_epochs_come_in_the_order_of_the_changes() {
    let ((a, old_a, new_a), (b, old_b, new_b)) = (pair(), pair());
    let epochs = now(exchange(vec![(&b, new_b), (&a, new_a)])).unwrap();
    assert!(Arc::ptr_eq(epochs[0].graph(), &old_b) && Arc::ptr_eq(epochs[1].graph(), &old_a));
}

#[test]
fn two_exchanges_of_the_same_disks_wait_for_each_other() {
    let ((a, _, new_a), (b, _, new_b)) = (pair(), pair());
    let gates = now(close_gates(vec![(&a, new_a.clone()), (&b, new_b.clone())])).unwrap();
    let mut second = Box::pin(exchange(vec![(&b, new_b), (&a, new_a)]));
    assert!(poll(&mut second).is_pending());
    gates.open();
    assert!(matches!(poll(&mut second), Poll::Ready(Ok(_))));
}

#[test]
fn a_graph_that_does_not_fit_changes_nothing() {
    let (node, old, new) = pair();
    let refused = |graph: TestGraph| now(node.exchange(Arc::new(graph))).err().expect("it fits").kind();
    assert_eq!(refused(TestGraph::with_alignment(512)), ErrorKind::InvalidInput);
    let mut read_only = TestGraph::new();
    read_only.info.read_only = true;
    assert_eq!(refused(read_only), ErrorKind::InvalidInput);
    let larger = TestGraph::new();
    now(larger.resize(2 * SIZE)).unwrap();
    assert_eq!(refused(larger), ErrorKind::InvalidInput);
    let twice = now(exchange(vec![(&node, new.clone()), (&node, new)]));
    assert_eq!(twice.err().unwrap().kind(), ErrorKind::InvalidInput);
    now(write(&node, 0, 512, 1)).unwrap();
    assert_eq!(old.byte(0), 1);
}

#[test]
fn an_exchange_waits_for_a_change_of_size_and_then_refuses_the_old_size() {
    let (node, old, new) = pair();
    old.hold(true);
    let mut growing = Box::pin(node.resize(2 * SIZE));
    assert!(poll(&mut growing).is_pending());
    let mut exchanging = Box::pin(node.exchange(new.clone()));
    assert!(poll(&mut exchanging).is_pending());
    old.hold(false);
    // Requests were never held up by it.
    now(write(&node, 0, 512, 1)).unwrap();
    assert!(matches!(poll(&mut growing), Poll::Ready(Ok(()))));
    assert_eq!(node.info().size_bytes, 2 * SIZE);
    let Poll::Ready(Err(error)) = poll(&mut exchanging) else { panic!("a graph of the old size was taken") };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    now(new.resize(2 * SIZE)).unwrap();
    now(node.exchange(new.clone())).unwrap();
    now(write(&node, SIZE, 512, 7)).unwrap();
    assert_eq!(new.byte(SIZE), 7);
    // The next size is the new graph's.
    now(node.resize(3 * SIZE)).unwrap();
    assert_eq!((new.info().size_bytes, old.info().size_bytes), (3 * SIZE, 2 * SIZE));
}

#[test]
fn a_close_waits_for_every_epoch_and_refuses_what_comes_later() {
    let (node, old, new) = pair();
    old.hold(true);
    let mut stuck = write(&node, 0, 512, 1);
    assert!(poll(&mut stuck).is_pending());
    now(node.exchange(new.clone())).unwrap();
    let mut closing = Box::pin(node.close());
    assert!(poll(&mut closing).is_pending());
    assert!(!new.is_closed.load(SeqCst), "it was closed while a request ran");
    assert_eq!(now(node.flush()).unwrap_err().kind(), ErrorKind::Shutdown);
    assert_eq!(now(node.extents(at(0, 512), 1)).unwrap_err().kind(), ErrorKind::Shutdown);
    let mut exchanging = Box::pin(node.exchange(Arc::new(TestGraph::new())));
    assert!(poll(&mut exchanging).is_pending());
    old.hold(false);
    assert!(poll(&mut stuck).is_ready());
    assert!(matches!(poll(&mut closing), Poll::Ready(Ok(()))));
    assert!(new.is_closed.load(SeqCst) && !old.is_closed.load(SeqCst));
    let Poll::Ready(Err(error)) = poll(&mut exchanging) else { panic!("a closed disk was exchanged") };
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    assert_eq!(now(node.resize(2 * SIZE)).unwrap_err().kind(), ErrorKind::Shutdown);
}

/// Two writes to the halves of one sector, one begun before the exchange and one after: each must keep the other's half.
#[test]
fn parts_of_a_sector_survive_an_exchange_between_their_writes() {
    let node = Node::new(TestGraph::with_alignment(512));
    let graph = now(node.graph());
    graph.hold(true);
    let mut first = write(&node, 0, 100, 1);
    let mut second = write(&node, 100, 100, 2);
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    // The same bytes under another epoch: what matters is that the second waits above the epochs.
    let gates = now(close_gates(vec![(&node, graph.clone())])).unwrap();
    let epoch = gates.open();
    assert!(!epoch[0].has_ended());
    graph.hold(false);
    assert!(poll(&mut first).is_ready());
    assert!(epoch[0].has_ended(), "the second write was counted before it had its range");
    assert!(poll(&mut second).is_ready());
    assert_eq!((graph.byte(0), graph.byte(99), graph.byte(100), graph.byte(199)), (1, 1, 2, 2));
}

/// What it has read from the old graph must not end up in the new one, which may hold other data there.
#[test]
fn a_write_of_a_part_of_a_sector_stays_in_its_epoch() {
    let node = Node::new(TestGraph::with_alignment(512));
    let (old, new) = (now(node.graph()), Arc::new(TestGraph::with_alignment(512)));
    old.hold(true);
    let mut part = write(&node, 3, 7, 1);
    assert!(poll(&mut part).is_pending());
    let mut sector = write(&node, 0, 512, 2);
    let epoch = now(node.exchange(new.clone())).unwrap();
    assert!(poll(&mut sector).is_pending(), "it would be undone");
    old.hold(false);
    assert!(poll(&mut part).is_ready() && epoch.has_ended());
    assert_eq!((old.byte(3), new.begun.load(SeqCst)), (1, 0));
    now(sector).unwrap();
    assert_eq!((old.byte(3), new.byte(3)), (1, 2));
}

#[test]
fn the_meter_counts_every_request_once() {
    let node = Node::new(TestGraph::with_alignment(512));
    now(one_of_each(&node)).unwrap();
    now(node.read(at(1, 3), &Segments::zeroed(3))).unwrap();
    assert!(now(node.read(at(SIZE, 1), &Segments::zeroed(1))).is_err());
    let reading = node.meter().read();
    let ended = |op| reading.op(op).ended;
    assert_eq!([Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes].map(ended), [3, 1, 1, 1, 1]);
    assert_eq!((reading.in_flight(), reading.op(Op::Read).errors, reading.op(Op::Read).bytes), (0, 1, 4100));
}
