use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use super::*;
use proptest::prelude::*;

const ALIGN: u64 = 512;
const CHUNK: usize = 4 * ALIGN as usize;
/// What a buffer counts as, in bytes.
const PAGE: u64 = 4096;

/// Refuses what is not aligned, takes a few polls for each request, and counts the memory that requests have with it.
struct Slow {
    /// What a reader sees, and what is left after a power cut.
    bytes: Mutex<(Vec<u8>, Vec<u8>)>,
    /// Nothing ends while this is set.
    holds: AtomicBool,
    random: AtomicU64,
    requests: AtomicUsize,
    memory_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

impl Slow {
    fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: Mutex::new((bytes.clone(), bytes)),
            holds: AtomicBool::new(false),
            random: AtomicU64::new(1),
            requests: AtomicUsize::new(0),
            memory_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().0.clone()
    }

    fn durable(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().1.clone()
    }

    fn range(&self, extent: Extent, memory: &Segments) -> Range<usize> {
        let size = self.info().size_bytes;
        let is_aligned = |at: u64| at.is_multiple_of(ALIGN) || at == size;
        assert!(is_aligned(extent.start()) && is_aligned(extent.end()) && extent.end() <= size, "{extent}");
        assert!(memory.iter().all(|segment| (segment.as_ptr() as usize).is_multiple_of(4)), "{memory:?}");
        assert_eq!(memory.len() as u64, extent.len_bytes);
        extent.start() as usize..extent.end() as usize
    }

    async fn take_time(&self, memory: &Segments) {
        self.requests.fetch_add(1, Relaxed);
        let memory_bytes = self.memory_bytes.fetch_add(memory.len(), Relaxed) + memory.len();
        self.peak_bytes.fetch_max(memory_bytes, Relaxed);
        let mut polls = self.random.fetch_add(0x9e37_79b9, Relaxed) % 5;
        poll_fn(|_| match polls {
            _ if self.holds.load(Relaxed) => Poll::Pending,
            0 => Poll::Ready(()),
            _ => {
                polls -= 1;
                Poll::Pending
            }
        })
        .await;
        self.memory_bytes.fetch_sub(memory.len(), Relaxed);
        self.requests.fetch_sub(1, Relaxed);
    }

    /// Takes the bytes at the beginning and hands them out at the end.
    async fn read_late(&self, extent: Extent, into: &Segments) {
        let bytes = self.bytes()[self.range(extent, into)].to_vec();
        self.take_time(into).await;
        into.copy_from_slice(0, &bytes);
    }

    /// Takes the bytes at the end. With `fua` these bytes become durable, and no others.
    async fn write_late(&self, extent: Extent, from: &Segments, fua: bool) {
        self.take_time(from).await;
        let range = self.range(extent, from);
        let mut bytes = self.bytes.lock().unwrap();
        bytes.0[range.clone()].copy_from_slice(&from.to_vec());
        if fua {
            bytes.1[range].copy_from_slice(&from.to_vec());
        }
    }

    fn make_durable(&self) {
        let mut bytes = self.bytes.lock().unwrap();
        bytes.1 = bytes.0.clone();
    }
}

impl Disk for Slow {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.bytes.lock().unwrap().0.len() as u64,
            request_align_bytes: ALIGN as u32,
            memory_align_bytes: 4,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: false,
        }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_late(io.extent, io.segments).await,
            Op::Write { fua } => self.write_late(io.extent, io.segments, fua).await,
            Op::Flush => self.make_durable(),
            Op::Discard => {}
            Op::WriteZeroes(_) => {
                let zeroes = Segments::zeroed(io.extent.len_bytes as usize);
                self.write_late(io.extent, &zeroes, false).await;
            }
        }
        Ok(())
    }

    async fn extents(&self, _: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(Vec::new())
    }

    async fn resize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

type Request<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Polls each once, from place `first` on, and drops those that have ended.
fn poll_all(requests: &mut Vec<Request<'_>>, first: usize) {
    let mut context = Context::from_waker(Waker::noop());
    let middle = first % requests.len().max(1);
    requests.rotate_left(middle);
    requests.retain_mut(|request| request.as_mut().poll(&mut context).is_pending());
}

fn run(mut requests: Vec<Request<'_>>) {
    for round in 0..100_000 {
        if requests.is_empty() {
            return;
        }
        poll_all(&mut requests, round * 7);
    }
    panic!("{} requests never end", requests.len());
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at ^ seed << 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn at(start: usize, len: usize) -> Extent {
    Extent::from_range(start as u64..(start + len) as u64)
}

/// `len` bytes of memory that begin `skip` bytes after an aligned address, cut into pieces of the lengths in `cuts`.
fn scattered(len: usize, skip: usize, cuts: &[usize]) -> Segments {
    let whole = Segment::zeroed(skip + len);
    let mut list = Segments::new();
    let mut start = skip;
    for cut in cuts {
        let end = (start + cut).min(skip + len);
        list.push(whole.slice(start..end));
        start = end;
    }
    list.push(whole.slice(start..skip + len));
    list
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write,
    WriteFua,
    Zero,
}

#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    start: usize,
    len: usize,
    skip: usize,
    cuts: Vec<usize>,
}

impl Case {
    fn memory(&self) -> Segments {
        scattered(self.len, self.skip, &self.cuts)
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    fn extent(&self) -> Extent {
        at(self.start, self.len)
    }
}

/// Its last sector is a part of one.
const SIZE: usize = 24 * ALIGN as usize + 100;

fn op() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(Kind::WriteFua), Just(Kind::Zero)];
    let place = (0..=SIZE, 0..=SIZE, prop_oneof![Just(1), Just(4), Just(ALIGN as usize)]);
    let place = place.prop_map(|(a, b, unit)| {
        let (start, end) = (a.min(b) / unit * unit, a.max(b) / unit * unit);
        (start, end - start)
    });
    let cuts = prop::collection::vec(0..2 * CHUNK, 0..6);
    (kind, place, 0..6_usize, cuts).prop_map(|(kind, (start, len), skip, cuts)| Case { kind, start, len, skip, cuts })
}

fn check_alone(disk: &Aligned<Slow>, model: &mut [u8], seed: u64, op: &Case) {
    let memory = op.memory();
    match op.kind {
        Kind::Read => {
            run(vec![Box::pin(async { disk.read(op.extent(), &memory).await.unwrap() })]);
            assert!(memory.to_vec() == model[op.range()], "{op:?}");
        }
        Kind::Write | Kind::WriteFua => {
            let fua = matches!(op.kind, Kind::WriteFua);
            memory.copy_from_slice(0, &pattern(seed, op.len));
            run(vec![Box::pin(async { disk.write(op.extent(), &memory, fua).await.unwrap() })]);
            model[op.range()].copy_from_slice(&pattern(seed, op.len));
            assert!(!fua || disk.inner.durable()[op.range()] == model[op.range()], "not durable: {op:?}");
        }
        Kind::Zero => {
            let how = WriteZeroes::default();
            run(vec![Box::pin(async { disk.write_zeroes(op.extent(), how).await.unwrap() })]);
            model[op.range()].fill(0);
        }
    }
    assert!(disk.inner.bytes() == model, "{op:?}");
}

/// One of many at once: does as `op` says, with `byte` as the data.
async fn one_of_many(disk: &Aligned<Slow>, op: &Case, byte: u8) {
    let memory = op.memory();
    match op.kind {
        Kind::Read => disk.read(op.extent(), &memory).await.unwrap(),
        Kind::Zero => disk.write_zeroes(op.extent(), WriteZeroes::default()).await.unwrap(),
        Kind::Write | Kind::WriteFua => {
            memory.fill(byte);
            disk.write(op.extent(), &memory, matches!(op.kind, Kind::WriteFua)).await.unwrap();
        }
    }
}

/// What may be at byte `at` after all of `ops` ran at once: what one of them wrote there, or else what was there.
fn allowed(ops: &[Case], at: usize, before: u8) -> Vec<u8> {
    let writes = ops.iter().enumerate().filter(|(_, op)| op.range().contains(&at));
    let bytes: Vec<u8> = writes
        .filter_map(|(number, op)| match op.kind {
            Kind::Read => None,
            Kind::Zero => Some(0),
            Kind::Write | Kind::WriteFua => Some(number as u8 + 1),
        })
        .collect();
    if bytes.is_empty() { vec![before] } else { bytes }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_from_any_memory(ops in prop::collection::vec(op(), 1..12), chunk in 1..6_usize) {
        let mut model = pattern(99, SIZE);
        let disk = Aligned::with_chunks(Slow::new(model.clone()), chunk * ALIGN as usize, ALIGN as usize, from_heap);
        for (seed, op) in ops.iter().enumerate() {
            check_alone(&disk, &mut model, seed as u64, op);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// With more requests than buffers, on sectors that they share.
    #[test]
    fn requests_at_once_undo_nothing(ops in prop::collection::vec(op(), 2..80), chunk in 1..6_usize) {
        let before = pattern(99, SIZE);
        let disk = Aligned::with_chunks(Slow::new(before.clone()), chunk * ALIGN as usize, ALIGN as usize, from_heap);
        run(ops.iter().enumerate().map(|(n, op)| Box::pin(one_of_many(&disk, op, n as u8 + 1)) as _).collect());
        for (at, byte) in disk.inner.bytes().into_iter().enumerate() {
            prop_assert!(allowed(&ops, at, before[at]).contains(&byte), "{byte} at {at}");
        }
    }
}

/// Many large requests from odd addresses: reads, aligned writes, and writes that share their edges' sectors.
fn flood(disk: &Aligned<Slow>) -> Vec<Request<'_>> {
    let len = 8 * CHUNK;
    let request = |number: usize| async move {
        let memory = scattered(len, 1, &[]);
        let start = number / 4 * (len + 1);
        match number % 4 {
            0 | 1 => disk.read(at(start, len), &memory).await.unwrap(),
            2 => disk.write(at(start, len), &memory, number % 8 == 2).await.unwrap(),
            _ => disk.write(at(number / 4 * len, len), &memory, false).await.unwrap(),
        }
    };
    (0..200).map(|number| Box::pin(request(number)) as _).collect()
}

/// A disk of `len` zeroes with small buffers.
fn small(len: usize) -> Aligned<Slow> {
    Aligned::with_chunks(Slow::new(vec![0; len]), CHUNK, ALIGN as usize, from_heap)
}

/// A flood takes half of the memory at most, and each buffer counts as a page.
#[test]
fn a_flood_of_unaligned_requests_takes_a_bounded_amount_of_memory() {
    const BUFFERS: usize = 32;
    let _others = Bounce::leave_only(2 * BUFFERS as u64 * PAGE);
    let disk = small(51 * (8 * CHUNK + 1));
    let mut requests = flood(&disk);
    disk.inner.holds.store(true, Relaxed);
    for round in 0..4 {
        poll_all(&mut requests, round);
    }
    assert_eq!((disk.inner.requests.load(Relaxed), Bounce::free_bytes()), (BUFFERS, BUFFERS as i64 * PAGE as i64));
    disk.inner.holds.store(false, Relaxed);
    run(requests);
    assert_eq!(Bounce::free_bytes(), 2 * BUFFERS as i64 * PAGE as i64);
    let peak_bytes = disk.inner.peak_bytes.load(Relaxed);
    assert!((16 * CHUNK..=BUFFERS * CHUNK).contains(&peak_bytes), "{peak_bytes} bytes");
}

/// Requests that a disk which hangs never answers leave memory for the disks beside it, however many such disks there are.
#[test]
fn disks_that_hang_leave_buffers_for_a_healthy_one() {
    let _others = Bounce::leave_only(64 * PAGE);
    let dead: Vec<_> = (0..20).map(|_| small(51 * (8 * CHUNK + 1))).collect();
    let mut hanging: Vec<_> = dead.iter().map(flood).collect();
    dead.iter().for_each(|disk| disk.inner.holds.store(true, Relaxed));
    for _ in 0..2 {
        hanging.iter_mut().for_each(|requests| poll_all(requests, 0));
    }
    assert!(Bounce::free_bytes() <= 0, "{} bytes are left: the test is too weak", Bounce::free_bytes());
    assert!(dead.iter().all(|disk| disk.inner.requests.load(Relaxed) > 0));
    let healthy = small(51 * (8 * CHUNK + 1));
    run(flood(&healthy));
    dead.iter().for_each(|disk| disk.inner.holds.store(false, Relaxed));
    hanging.into_iter().for_each(run);
    assert_eq!(Bounce::free_bytes(), 64 * PAGE as i64);
}

/// No memory is an error of the request, and the disk goes on.
#[test]
fn a_request_fails_when_there_is_no_memory_for_its_buffer() {
    static HAS_MEMORY: AtomicBool = AtomicBool::new(false);
    let allocate: Allocate = |len| HAS_MEMORY.load(Relaxed).then(|| Segments::zeroed(len));
    let before = Bounce::free_bytes();
    let disk: Aligned<Slow> = Aligned::with_buffers(Slow::new(vec![0; CHUNK]), allocate);
    let memory = Segments::zeroed(1000);
    for fails in [true, false] {
        HAS_MEMORY.store(!fails, Relaxed);
        let check = |done: Result<()>| match done {
            Ok(()) => assert!(!fails),
            Err(error) => assert!(fails && error.kind() == ErrorKind::Exhausted, "{error}"),
        };
        run(vec![Box::pin(async { check(disk.read(at(1, 1000), &memory).await) })]);
        run(vec![Box::pin(async { check(disk.write(at(1, 1000), &memory, true).await) })]);
        run(vec![Box::pin(async { check(disk.write_zeroes(at(1, 1000), WriteZeroes::default()).await) })]);
    }
    assert_eq!(Bounce::free_bytes(), before);
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// Buffers that are given back at the same moment are all taken again, by requests that are polled only when woken.
#[test]
fn no_buffer_stays_idle_while_requests_wait() {
    const BUFFERS: usize = 32;
    let _others = Bounce::leave_only(2 * BUFFERS as u64 * PAGE);
    let disk = small(CHUNK);
    let read = async || disk.read(at(1, 1000), &Segments::zeroed(1000)).await.unwrap();
    let requests = |count| -> Vec<Request<'_>> { (0..count).map(|_| Box::pin(read()) as _).collect() };
    let (mut first, mut waiting) = (requests(BUFFERS), requests(2 * BUFFERS));
    let woken: Vec<_> = waiting.iter().map(|_| Arc::new(Woken(AtomicBool::new(true)))).collect();
    let mut poll_woken = || {
        for (request, woken) in waiting.iter_mut().zip(&woken) {
            if woken.0.swap(false, Relaxed) {
                let waker = Waker::from(woken.clone());
                assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            }
        }
    };
    disk.inner.holds.store(true, Relaxed);
    poll_all(&mut first, 0);
    poll_woken();
    disk.inner.holds.store(false, Relaxed);
    run(first);
    disk.inner.holds.store(true, Relaxed);
    (0..=BUFFERS).for_each(|_| poll_woken());
    assert_eq!(disk.inner.requests.load(Relaxed), BUFFERS);
    disk.inner.holds.store(false, Relaxed);
    run(waiting);
}

#[test]
fn aligned_requests_need_no_buffer() {
    let disk: Aligned<Slow> = Aligned::with_chunks(Slow::new(vec![7; 2 * CHUNK]), CHUNK, CHUNK, |_| panic!("a buffer"));
    let memory = Segments::zeroed(2 * CHUNK);
    run(vec![Box::pin(async { disk.read(at(0, 2 * CHUNK), &memory).await.unwrap() })]);
    assert!(memory.to_vec() == vec![7; 2 * CHUNK]);
    memory.fill(8);
    run(vec![Box::pin(async { disk.write(at(0, 2 * CHUNK), &memory, false).await.unwrap() })]);
    assert!(disk.inner.bytes() == vec![8; 2 * CHUNK]);
    assert_eq!(disk.inner.peak_bytes.load(Relaxed), 2 * CHUNK);
}
