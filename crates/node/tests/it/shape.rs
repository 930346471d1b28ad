//! Shapes: what a front gets is the same with each of them, and only the graph sees other requests.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use crate::common::{Request, SIZE, TestGraph, at, now, poll, write};
use proptest::prelude::*;
use spile_core::metrics::span::{Moment, SpanLog, Spans, What as Asked, stamp, with};
use spile_core::metrics::{Op as Kind, now_ns};
use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Io, Op, Result, Segment, Segments, WriteZeroes,
};
use spile_node::{Node, Shape};

/// A graph in memory that notes its requests, takes some polls for each, and may fail where it is told to.
struct Recording {
    inner: TestGraph,
    log: Mutex<Vec<(Op, Range<u64>)>>,
    /// What decides how many polls a request takes.
    random: AtomicU64,
    /// Requests that touch one of these bytes fail.
    broken: Mutex<Vec<u64>>,
}

impl Recording {
    fn new(align_bytes: u32) -> Self {
        let (inner, random) = (TestGraph::with_alignment(align_bytes), AtomicU64::new(1));
        Self { inner, random, log: Mutex::default(), broken: Mutex::default() }
    }

    fn node(shape: Shape) -> Node<Self> {
        let node = Node::new(Self::new(512));
        now(node.set_shape(shape)).unwrap();
        node
    }

    fn take_log(&self) -> Vec<(Op, Range<u64>)> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    async fn some_polls(&self) {
        let random = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, SeqCst);
        let mut left = random >> 61;
        poll_fn(|_| {
            left = left.saturating_sub(1);
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Disk for Recording {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        let has_memory = matches!(io.op, Op::Read | Op::Write { .. });
        let len_bytes = if has_memory { io.extent.len_bytes } else { 0 };
        assert!(io.segments.len() as u64 == len_bytes && io.segments.is_aligned(512), "{io:?}");
        stamp(Moment::Submitted);
        self.log.lock().unwrap().push((io.op, io.extent.range()));
        self.some_polls().await;
        let broken = self.broken.lock().unwrap().iter().copied().find(|byte| io.extent.range().contains(byte));
        match broken {
            Some(byte) => Err(Error::new(ErrorKind::Io, "broken").at_offset(byte)),
            None => self.inner.execute(io).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.inner.extents(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.inner.resize(size_bytes).await
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.inner.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// Polls all requests by turns until all have ended; their results.
fn run(mut requests: Vec<Request<'_>>) -> Vec<Result<()>> {
    let mut results: Vec<Option<Result<()>>> = requests.iter().map(|_| None).collect();
    for _ in 0..1000 {
        for (request, result) in requests.iter_mut().zip(&mut results) {
            if result.is_none()
                && let Poll::Ready(ended) = poll(request)
            {
                *result = Some(ended);
            }
        }
        if results.iter().all(Option::is_some) {
            return results.into_iter().flatten().collect();
        }
    }
    panic!("a request never ends");
}

const K: u64 = 1 << 10;
const WRITE: Op = Op::Write { fua: false };

#[test]
fn a_large_request_goes_to_the_graph_in_parts_at_multiples_of_their_size() {
    let node = Recording::node(Shape::Split(8 << 10));
    let graph = now(node.graph());
    assert!(run(vec![write(&node, 6 * K, 20 * K, 7)])[0].is_ok());
    let parts: Vec<_> =
        [6 * K..8 * K, 8 * K..16 * K, 16 * K..24 * K, 24 * K..26 * K].into_iter().map(|part| (WRITE, part)).collect();
    assert_eq!(graph.take_log(), parts);
    assert_eq!((node.shaping().splits(), node.shaping().merges()), (1, 0));
    assert_eq!([6 * K - 1, 6 * K, 26 * K - 1, 26 * K].map(|byte| graph.inner.byte(byte)), [0, 7, 7, 0]);
    // One that is no longer than a part stays whole.
    assert!(run(vec![write(&node, 6 * K, 8 * K, 7)])[0].is_ok());
    assert_eq!(graph.take_log(), [(WRITE, 6 * K..14 * K)]);
}

#[test]
fn one_flush_makes_all_parts_of_a_durable_write_durable() {
    let node = Recording::node(Shape::Split(8 << 10));
    let from = Segments::zeroed(16 << 10);
    assert!(run(vec![Box::pin(async { node.write(at(0, 16 * K), &from, true).await })])[0].is_ok());
    assert_eq!(now(node.graph()).take_log(), [(WRITE, 0..8 * K), (WRITE, 8 * K..16 * K), (Op::Flush, 0..0)]);
}

#[test]
fn the_first_part_that_fails_is_the_requests_error_and_all_parts_end_before_it() {
    for seed in 0..50 {
        let node = Recording::node(Shape::Split(4 << 10));
        let graph = now(node.graph());
        graph.random.store(seed << 32 ^ seed, SeqCst);
        *graph.broken.lock().unwrap() = vec![41 * K, 21 * K, 61 * K];
        let error = run(vec![write(&node, 0, 64 * K, 7)]).remove(0).unwrap_err();
        assert_eq!(error.offset_bytes(), Some(21 * K), "seed {seed}: {error}");
        // Three of sixteen have failed before they came to the memory.
        assert_eq!(graph.inner.ended.load(SeqCst), 13, "seed {seed}");
        // A durable write that has failed asks for no flush.
        let from = Segments::zeroed(64 << 10);
        graph.take_log();
        assert!(run(vec![Box::pin(async { node.write(at(0, 64 * K), &from, true).await })])[0].is_err());
        assert!(graph.take_log().iter().all(|(op, _)| *op == WRITE));
    }
}

#[test]
fn neighbours_of_one_turn_go_to_the_graph_as_one_request() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let graph = now(node.graph());
    let order = [3, 1, 0, 2, 6];
    let results = run(order.iter().map(|page| write(&node, page * 4 * K, 4 * K, *page as u8 + 1)).collect());
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(graph.take_log(), [(WRITE, 0..16 * K), (WRITE, 24 * K..28 * K)]);
    assert_eq!((node.shaping().splits(), node.shaping().merges()), (0, 3));
    for page in 0..7 {
        let byte = if order.contains(&page) { page as u8 + 1 } else { 0 };
        assert_eq!(graph.inner.byte(page * 4 * K + 5), byte, "page {page}");
    }
}

#[test]
fn a_merged_request_is_no_longer_than_asked_for() {
    let node = Recording::node(Shape::Merge(16 << 10));
    run((0..6).map(|page| write(&node, page * 4 * K, 4 * K, 1)).collect());
    assert_eq!(now(node.graph()).take_log(), [(WRITE, 0..16 * K), (WRITE, 16 * K..24 * K)]);
}

#[test]
fn requests_are_not_merged_across_a_flush() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let flush: Request<'_> = Box::pin(node.flush());
    run(vec![write(&node, 0, 4 * K, 1), flush, write(&node, 4 * K, 4 * K, 2), write(&node, 8 * K, 4 * K, 3)]);
    let log = now(node.graph()).take_log();
    assert_eq!(log, [(Op::Flush, 0..0), (WRITE, 0..4 * K), (WRITE, 4 * K..12 * K)]);
}

#[test]
fn writes_that_overlap_keep_their_order() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let graph = now(node.graph());
    run(vec![write(&node, 0, 8 * K, 1), write(&node, 4 * K, 8 * K, 2), write(&node, 8 * K, 4 * K, 3)]);
    assert_eq!(graph.take_log(), [(WRITE, 0..8 * K), (WRITE, 4 * K..12 * K), (WRITE, 8 * K..12 * K)]);
}

/// A request that is never merged, and changes what is on the disk.
type Whole = for<'a> fn(&'a Node<Recording>, Extent) -> Request<'a>;

/// A durable write of the byte 9.
fn durable(node: &Node<Recording>, extent: Extent) -> Request<'_> {
    Box::pin(async move {
        let from = Segments::zeroed(extent.len_bytes as usize);
        from.fill(9);
        node.write(extent, &from, true).await
    })
}

const WHOLE: [Whole; 4] = [
    durable,
    |node, extent| write(node, extent.start(), extent.len_bytes, 9),
    |node, extent| Box::pin(node.discard(extent)),
    |node, extent| Box::pin(node.write_zeroes(extent, WriteZeroes::default())),
];

#[test]
fn what_is_never_merged_overtakes_no_overlapping_write() {
    for (kind, whole) in WHOLE.into_iter().enumerate() {
        for seed in 0..20 {
            let node = Recording::node(Shape::Merge(16 << 10));
            let graph = now(node.graph());
            graph.random.store(seed << 32 ^ seed, SeqCst);
            // The last one goes on where the first one ends, and overlaps the second one.
            let requests = vec![write(&node, 0, 4 * K, 1), whole(&node, at(0, 32 * K)), write(&node, 4 * K, 4 * K, 2)];
            assert!(run(requests).iter().all(Result::is_ok));
            let ranges: Vec<_> = graph.take_log().into_iter().map(|(_, range)| range).collect();
            assert_eq!(ranges, [0..4 * K, 0..32 * K, 4 * K..8 * K], "kind {kind}, seed {seed}");
            let byte = if kind < 2 { 9 } else { 0 };
            assert_eq!([0, 4, 8, 31].map(|page| graph.inner.byte(page * K)), [byte, 2, byte, byte]);
        }
    }
}

#[test]
fn what_is_never_merged_divides_neighbours() {
    for whole in WHOLE {
        let node = Recording::node(Shape::Merge(16 << 10));
        run(vec![write(&node, 0, 4 * K, 1), whole(&node, at(32 * K, 16 * K)), write(&node, 4 * K, 4 * K, 2)]);
        assert_eq!((now(node.graph()).take_log().len(), node.shaping().merges()), (3, 0));
    }
}

#[test]
fn what_does_not_overlap_waits_for_nothing() {
    let node = Recording::node(Shape::Merge(16 << 10));
    let graph = now(node.graph());
    graph.inner.hold(true);
    let mut requests = vec![write(&node, 0, 4 * K, 1), durable(&node, at(0, 4 * K)), durable(&node, at(4 * K, 4 * K))];
    requests.push(write(&node, 32 * K, 4 * K, 2));
    for _ in 0..100 {
        assert!(requests.iter_mut().all(|request| poll(request).is_pending()));
    }
    let ranges: Vec<_> = graph.take_log().into_iter().map(|(_, range)| range).collect();
    assert_eq!(ranges, [4 * K..8 * K, 0..4 * K, 32 * K..36 * K]);
    graph.inner.hold(false);
    assert!(run(requests).iter().all(Result::is_ok));
    assert_eq!(graph.inner.byte(0), 9);
}

/// A request may be given up at any time, as a panic does it: no other one waits for ever.
#[test]
fn a_request_that_is_gone_holds_nobody_up() {
    for gone in 0..4 {
        for polls in 0..5 {
            let node = Recording::node(Shape::Merge(64 << 10));
            let graph = now(node.graph());
            graph.inner.hold(true);
            let mut requests: Vec<_> = (0..4).map(|page| write(&node, page * 4 * K, 4 * K, 1)).collect();
            requests.push(durable(&node, at(0, 16 * K)));
            (0..polls).for_each(|_| requests.iter_mut().for_each(|request| assert!(poll(request).is_pending())));
            drop(requests.remove(gone));
            graph.inner.hold(false);
            assert!(run(requests).iter().all(Result::is_ok), "{gone} after {polls} polls");
            assert_eq!(graph.inner.byte(0), 9);
        }
    }
}

#[test]
fn all_requests_of_a_run_spend_their_time_in_the_store() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let graph = now(node.graph());
    graph.inner.hold(true);
    let log = Arc::<SpanLog>::default();
    let mut spans = Spans::new(log.clone());
    let mut requests: Vec<_> = (0..4)
        .map(|page| {
            let what = Asked { op: Kind::Write, offset_bytes: page * 4 * K, len_bytes: 4 * K };
            (spans.begin(spans.taken(now_ns()), what).unwrap(), write(&node, page * 4 * K, 4 * K, 1))
        })
        .collect();
    for _ in 0..20 {
        for (span, request) in &mut requests {
            assert!(with(Some(*span), || poll(request)).is_pending());
        }
    }
    let store = Moment::Submitted as usize;
    let found: Vec<_> = log.in_flight().iter().map(|record| (record.phase, record.store_operations)).collect();
    assert_eq!(found, [(store, 1); 4]);
    graph.inner.hold(false);
    assert!(run(requests.into_iter().map(|(_, request)| request).collect()).iter().all(Result::is_ok));
    assert_eq!(graph.take_log().len(), 1);
}

#[test]
fn each_merged_request_has_its_own_result() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let graph = now(node.graph());
    *graph.broken.lock().unwrap() = vec![9 * K];
    let results = run((0..4).map(|page| write(&node, page * 4 * K, 4 * K, 9)).collect());
    assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, false, true]);
    assert_eq!(results[2].as_ref().unwrap_err().offset_bytes(), Some(9 * K));
    assert_eq!([0, 4, 8, 12].map(|page| graph.inner.byte(page * K)), [9, 9, 0, 9]);
}

#[test]
fn the_shape_changes_while_requests_are_in_flight() {
    let node = Recording::node(Shape::Merge(64 << 10));
    let mut older = [write(&node, 0, 32 * K, 1), write(&node, 32 * K, 4 * K, 2)];
    assert!(older.iter_mut().all(|request| poll(request).is_pending()));
    now(node.set_shape(Shape::Split(16 << 10))).unwrap();
    let younger = write(&node, 0, 32 * K, 3);
    let results = run(older.into_iter().chain([younger]).collect());
    assert!(results.iter().all(Result::is_ok));
    assert_eq!((node.shaping().splits(), node.shaping().merges()), (1, 1));
    now(node.set_shape(Shape::Off)).unwrap();
    now(node.graph()).take_log();
    run(vec![write(&node, 0, 64 * K, 3)]);
    assert_eq!((now(node.graph()).take_log(), node.shaping().shape()), (vec![(WRITE, 0..64 * K)], Shape::Off));
}

/// Memory of `len` bytes in pieces, whose sectors and order `cuts` decides.
fn scattered(len: usize, cuts: &[usize]) -> Segments {
    let mut segments = Segments::new();
    let mut cuts = cuts.iter().cycle();
    let mut left = len;
    while left > 0 {
        let piece = (512 * cuts.next().unwrap()).min(left);
        let room = Segment::zeroed(piece + 512);
        segments.push(room.slice(512..512 + piece));
        left -= piece;
    }
    segments
}

/// Requests that are in flight together, none of which overlap.
#[derive(Clone, Debug)]
struct Batch {
    /// Lengths in sectors, one after the other, with what is done there.
    parts: Vec<(u64, What)>,
    /// By which order they begin.
    seed: u64,
    cuts: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Read,
    Write(u8),
    Durable(u8),
    Leave,
}

fn batch() -> impl Strategy<Value = Batch> {
    let what = prop_oneof![
        3 => Just(What::Read),
        4 => (1..=255_u8).prop_map(What::Write),
        1 => (1..=255_u8).prop_map(What::Durable),
        2 => Just(What::Leave),
    ];
    let parts = prop::collection::vec((1..48_u64, what), 1..12);
    let cuts = prop::collection::vec(1..9_usize, 1..6);
    (parts, any::<u64>(), cuts).prop_map(|(parts, seed, cuts)| Batch { parts, seed, cuts })
}

/// Runs the batch on `node` and on `model`, and looks at what was read.
fn check(node: &Node<Recording>, model: &mut [u8], batch: &Batch) {
    let mut start = 0;
    let mut todo = Vec::new();
    for (sectors, what) in &batch.parts {
        let end = (start + sectors * 512).min(SIZE);
        if start < end && *what != What::Leave {
            todo.push((start..end, *what, scattered((end - start) as usize, &batch.cuts)));
        }
        start = end;
    }
    todo.sort_by_key(|(range, ..)| range.start.wrapping_mul(batch.seed | 1) >> 7);
    let requests = todo.iter().map(|(range, what, memory)| -> Request<'_> {
        let extent = Extent::from_range(range.clone());
        Box::pin(async move {
            match what {
                What::Read => node.read(extent, memory).await,
                What::Write(byte) | What::Durable(byte) => {
                    memory.copy_from_slice(0, &pattern(*byte, memory.len()));
                    node.write(extent, memory, matches!(what, What::Durable(_))).await
                }
                What::Leave => unreachable!("it is left out"),
            }
        })
    });
    assert!(run(requests.collect()).iter().all(Result::is_ok));
    for (range, what, memory) in &todo {
        let place = &mut model[range.start as usize..range.end as usize];
        match what {
            What::Write(byte) | What::Durable(byte) => place.copy_from_slice(&pattern(*byte, memory.len())),
            _ => assert!(memory.to_vec() == place, "{range:?} was read wrong"),
        }
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed ^ (at / 512) as u8 ^ (at % 251) as u8).collect()
}

/// Requests that change data, which begin in this order and may overlap: where they begin and how long they are in sectors, and of which
/// kind they are. Kind 4 is a write that may be merged.
fn changes() -> impl Strategy<Value = Vec<(u64, u64, usize)>> {
    prop::collection::vec((0..40_u64, 1..32_u64, 0..5_usize), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever time each request takes.
    #[test]
    fn with_merge_what_overlaps_happens_in_the_order_in_which_it_came(changes in changes(), seed in any::<u64>()) {
        let node = Recording::node(Shape::Merge(8 << 10));
        let graph = now(node.graph());
        graph.random.store(seed, SeqCst);
        let mut model = vec![0; SIZE as usize];
        let mut requests = Vec::new();
        for (number, (start, sectors, kind)) in changes.into_iter().enumerate() {
            let extent = at(start * 512, sectors * 512);
            let (request, byte) = match WHOLE.get(kind) {
                Some(whole) => (whole(&node, extent), if kind < 2 { 9 } else { 0 }),
                None => (write(&node, extent.start(), extent.len_bytes, 10 + number as u8), 10 + number as u8),
            };
            requests.push(request);
            model[extent.start() as usize..extent.end() as usize].fill(byte);
        }
        prop_assert!(run(requests).iter().all(Result::is_ok));
        prop_assert!((0..SIZE).all(|byte| graph.inner.byte(byte) == model[byte as usize]));
    }

    #[test]
    fn every_shape_reads_and_writes_the_same_bytes(batches in prop::collection::vec(batch(), 1..10)) {
        for shape in [Shape::Off, Shape::Split(4 << 10), Shape::Split(16 << 10), Shape::Merge(8 << 10), Shape::Merge(1 << 20)] {
            let node = Recording::node(shape);
            let mut model = vec![0; SIZE as usize];
            batches.iter().for_each(|batch| check(&node, &mut model, batch));
            let graph = now(node.graph());
            prop_assert!((0..SIZE).all(|byte| graph.inner.byte(byte) == model[byte as usize]), "{shape}");
        }
    }
}
