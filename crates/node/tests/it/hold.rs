//! Requests that are held back: what waits, what goes on, and what ends it.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Poll;

use crate::common::{Request, TestGraph, at, now, one_of_each, poll, write};
use futures_util::future::{pending, ready};
use spile_core::{Disk, ErrorKind, Io, Op, Result, Segments, WriteZeroes};
use spile_node::{Node, Pending, Place, Shape, Stage};

#[test]
fn nothing_goes_on_until_requests_are_let_go() {
    let node = Node::new(TestGraph::with_alignment(512));
    let graph = now(node.graph());
    graph.hold(true);
    let mut in_flight = write(&node, 0, 512, 1);
    assert!(poll(&mut in_flight).is_pending());
    let before = now(node.hold()).unwrap();
    let mut ended = Box::pin(before.ended());
    assert!(poll(&mut ended).is_pending(), "a request is in flight");
    // Aligned and not, with data and without.
    let mut held = [write(&node, 512, 512, 2), write(&node, 1100, 7, 3), Box::pin(node.flush())];
    let mut look = Box::pin(node.extents(at(0, 4096), 1));
    graph.hold(false);
    assert!(poll(&mut in_flight).is_ready() && poll(&mut ended).is_ready());
    assert!(held.iter_mut().all(|request| poll(request).is_pending()) && poll(&mut look).is_pending());
    assert_eq!((graph.begun.load(SeqCst), graph.byte(0), graph.byte(512)), (1, 1, 0));
    now(node.let_go());
    held.iter_mut().for_each(|request| now(request).unwrap());
    now(look).unwrap();
    assert_eq!((graph.byte(512), graph.byte(1100), graph.byte(1107)), (2, 3, 0));
    now(one_of_each(&node)).unwrap();
}

/// It is in flight from its first step to its last, and all its steps meet the graph of the first.
#[test]
fn a_request_of_several_steps_ends_before_others_are_held_back() {
    type Begin = fn(&Node<TestGraph>) -> Request<'_>;
    let requests: [(&str, u64, Begin); 3] = [
        ("a part of a sector is read and written", 2, |node| write(node, 100, 7, 1)),
        ("parts of two are", 3, |node| write(node, 1000, 100, 1)),
        ("zeroes, and the sectors at both ends", 5, |node| {
            Box::pin(node.write_zeroes(at(2000, 2000), WriteZeroes::default()))
        }),
    ];
    for (what, steps, begin) in requests {
        for stage in [None, Some(Arc::new(Passive))] {
            let node = Node::new(TestGraph::with_alignment(512));
            if let Some(stage) = stage {
                now(node.attach(Place::Fault, stage)).unwrap();
            }
            let (graph, new) = (now(node.graph()), Arc::new(TestGraph::with_alignment(512)));
            graph.hold(true);
            let mut request = begin(&node);
            assert!(poll(&mut request).is_pending() && graph.begun.load(SeqCst) == 1, "{what}");
            let in_flight = now(node.hold()).unwrap();
            let mut ended = Box::pin(in_flight.ended());
            graph.hold(false);
            assert!(poll(&mut ended).is_pending(), "{what}: it is in flight");
            assert!(poll(&mut request).is_ready(), "{what}: it waits for what waits for it");
            assert!(poll(&mut ended).is_ready() && graph.ended.load(SeqCst) == steps, "{what}");
            now(node.exchange(new.clone())).unwrap();
            now(node.let_go());
            assert_eq!(new.begun.load(SeqCst), 0, "{what}");
        }
    }
}

#[test]
fn changes_of_the_disk_go_on_and_let_nothing_through() {
    let node = Node::new(TestGraph::new());
    let new = Arc::new(TestGraph::new());
    now(now(node.hold()).unwrap().ended());
    assert_eq!(now(node.hold()).err().unwrap().kind(), ErrorKind::Busy);
    let mut held = write(&node, 0, 512, 1);
    assert!(poll(&mut held).is_pending());
    assert!(node.graph_now().is_some(), "who looks need not wait");
    let old = now(node.exchange(new.clone())).unwrap();
    assert!(old.has_ended());
    now(node.set_shape(Shape::Split(4096))).unwrap();
    now(node.resize(crate::common::SIZE * 2)).unwrap();
    assert!(poll(&mut held).is_pending() && old.graph().begun.load(SeqCst) + new.begun.load(SeqCst) == 0);
    now(node.let_go());
    now(held).unwrap();
    assert_eq!(new.byte(0), 1, "it goes on with the new graph");
    now(node.let_go());
    now(one_of_each(&node)).unwrap();
}

#[test]
fn a_close_ends_it() {
    let node = Node::new(TestGraph::new());
    now(now(node.hold()).unwrap().ended());
    let mut held = write(&node, 0, 512, 1);
    assert!(poll(&mut held).is_pending());
    now(node.close()).unwrap();
    assert_eq!(now(held).unwrap_err().kind(), ErrorKind::Shutdown);
    assert_eq!(now(node.hold()).err().unwrap().kind(), ErrorKind::Shutdown);
}

#[test]
fn a_request_whose_client_goes_away_ends() {
    let node = Node::new(TestGraph::new());
    now(now(node.hold()).unwrap().ended());
    let bytes = Segments::zeroed(512);
    let io = Io { op: Op::Write { fua: false }, extent: at(0, 512), segments: &bytes };
    assert!(poll(&mut Box::pin(node.execute_for(io, pending()))).is_pending());
    assert!(now(node.execute_for(io, ready(()))).is_err());
    now(node.let_go());
    assert_eq!(now(node.graph()).begun.load(SeqCst), 0);
}

/// A limit that lets nobody pass until it is told to.
#[derive(Default)]
struct Barrier {
    is_open: AtomicBool,
}

impl Stage for Barrier {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        Some(Box::pin(poll_fn(|_| if self.is_open.load(SeqCst) { Poll::Ready(Ok(())) } else { Poll::Pending })))
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn a_request_that_has_waited_for_a_limit_ends_with_its_client_too() {
    let (node, limit) = (Node::new(TestGraph::with_alignment(512)), Arc::new(Barrier::default()));
    now(node.attach(Place::Limit, limit.clone())).unwrap();
    let (is_gone, bytes) = (AtomicBool::new(false), Segments::zeroed(7));
    let gone = poll_fn(|_| if is_gone.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending });
    let io = Io { op: Op::Write { fua: false }, extent: at(3, 7), segments: &bytes };
    let mut forsaken: Request<'_> = Box::pin(node.execute_for(io, gone));
    let mut stays = write(&node, 3, 7, 5);
    assert!(poll(&mut forsaken).is_pending() && poll(&mut stays).is_pending());
    now(now(node.hold()).unwrap().ended());
    limit.is_open.store(true, SeqCst);
    // From the limit to the gate, where both wait.
    assert!(poll(&mut forsaken).is_pending() && poll(&mut stays).is_pending());
    is_gone.store(true, SeqCst);
    assert!(poll(&mut forsaken).is_ready(), "it waits for nobody");
    now(node.let_go());
    now(stays).unwrap();
    assert_eq!(now(node.graph()).byte(3), 5);
}

/// A stage that has nothing to do, and that sees all requests.
struct Passive;

impl Stage for Passive {
    fn before<'a>(&'a self, _: Io<'a>) -> Option<Pending<'a>> {
        None
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

#[test]
fn who_hurries_is_heard_of() {
    let node = Node::new(TestGraph::new());
    let mut hurried = Box::pin(node.hurried());
    assert!(poll(&mut hurried).is_pending());
    node.hurry(true);
    assert!(poll(&mut hurried).is_ready());
    now(node.hurried());
    node.hurry(false);
    assert!(poll(&mut Box::pin(node.hurried())).is_pending());
}
