//! A backup beside requests, on a host: who waits for whom, what is kept, and that only the backup fails.
#![forbid(unsafe_code)]

use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use futures_util::future::{Either, select};
use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Io, Op, OpenMode, Result, Segments,
    Store, StoreExtent, StoreInfo, StoreOffset, Timer, Via, WriteZeroes, yield_now,
};
use spile_engine::{Config, Engine, OsEnv, spawn};
use spile_life::backup::{
    Around, Beneath, Broken, Copy, Digests, KEPT_BYTES, PointInTime, Room, Subject, any_room, begin, fleece,
};
use spile_life::jobs::{Job, Wishes};
use spile_node::Node;
use spile_store::{AnyStore, CacheMode, OsFiles};

const SIZE: u64 = 4 << 20;
const UNIT_BYTES: u64 = 64 << 10;

/// A disk in memory of which all is data, and whose requests can be held up.
#[derive(Default)]
struct Memory {
    bytes: std::sync::Mutex<Vec<u8>>,
    holds_writes: AtomicBool,
    /// Changes from this offset on fail, when it is not 0.
    fails_from: AtomicU64,
    reads: AtomicU64,
}

impl Memory {
    fn filled(byte: u8) -> Self {
        Self { bytes: std::sync::Mutex::new(vec![byte; SIZE as usize]), ..Self::default() }
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }
}

impl Disk for Memory {
    fn info(&self) -> DiskInfo {
        DiskInfo::unaligned(SIZE)
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        self.reads.fetch_add(u64::from(io.op == Op::Read), SeqCst);
        while io.op != Op::Read && self.holds_writes.load(SeqCst) {
            yield_now().await;
        }
        let fails_from = self.fails_from.load(SeqCst);
        if io.op.changes_data() && fails_from > 0 && io.extent.end() > fails_from {
            return Err(Error::new(ErrorKind::NoSpace, "the target is full"));
        }
        let mut bytes = self.bytes.lock().unwrap();
        let range = io.extent.start() as usize..io.extent.end() as usize;
        match io.op {
            Op::Read => io.segments.copy_from_slice(0, &bytes[range]),
            Op::Write { .. } => io.segments.copy_to_slice(0, &mut bytes[range]),
            Op::Discard | Op::WriteZeroes(_) => bytes[range].fill(0),
            Op::Flush => {}
        }
        Ok(())
    }

    async fn extents(&self, extent: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(vec![ExtentStatus { extent, kind: ExtentKind::Data, depth: 0 }])
    }

    async fn resize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// A disk that is all data, in memory of zeroes, and notes how many changes of it are under way whenever one begins.
#[derive(Default)]
struct Gauge {
    now: AtomicU64,
    begun: std::sync::Mutex<Vec<u64>>,
    /// Has a request as a guest beside the first change.
    guest: std::sync::Mutex<Option<Arc<Node<Gauge>>>>,
}

impl Disk for Gauge {
    fn info(&self) -> DiskInfo {
        DiskInfo::unaligned(32 << 20)
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        if io.op.changes_data() {
            let now = self.now.fetch_add(1, SeqCst) + 1;
            self.begun.lock().unwrap().push(now);
            let guest = self.guest.lock().unwrap().take();
            if let Some(node) = guest {
                Box::pin(node.read(Extent::from_range(0..512), &Segments::zeroed(512))).await?;
            }
            for _ in 0..100 {
                yield_now().await;
            }
            self.now.fetch_sub(1, SeqCst);
        }
        Ok(())
    }

    async fn extents(&self, extent: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(vec![ExtentStatus { extent, kind: ExtentKind::Data, depth: 0 }])
    }

    async fn resize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// A fleece whose reads wait, or its writes.
struct Held {
    inner: AnyStore,
    holds: Arc<Holds>,
}

#[derive(Default)]
struct Holds {
    reads: AtomicBool,
    writes: AtomicBool,
    /// Reads that began.
    begun: AtomicU64,
    written_bytes: AtomicU64,
}

impl Store for Held {
    fn info(&self) -> StoreInfo {
        self.inner.info()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        self.holds.begun.fetch_add(1, SeqCst);
        while self.holds.reads.load(SeqCst) {
            yield_now().await;
        }
        self.inner.read_at(offset, into, via).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        while self.holds.writes.load(SeqCst) {
            yield_now().await;
        }
        self.inner.write_at(offset, from, via).await?;
        self.holds.written_bytes.fetch_add(from.len() as u64, SeqCst);
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        self.inner.sync().await
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.inner.zero_range(offset, len_bytes).await
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.inner.punch_hole(offset, len_bytes).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.inner.set_len(len_bytes).await
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.inner.extent_at(offset).await
    }
}

type Point<S = AnyStore> = PointInTime<S, Memory>;

/// Runs `test` on a worker, in a folder of its own.
fn on_host<F: Future<Output = ()> + 'static>(test: impl FnOnce(std::path::PathBuf) -> F + Send + 'static) {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.raw");
    let engine = Engine::start(Config { workers: 1, pool_bytes: 2 << 20, ..Config::default() }).unwrap();
    engine.run_on(0, move || test(disk));
    engine.shutdown();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something is left beside the disk");
}

fn around(timer: impl Timer) -> Around {
    Around {
        env: Arc::new(OsEnv),
        timer: Arc::new(timer),
        unit_bytes: Some(UNIT_BYTES),
        most_kept_bytes: KEPT_BYTES,
        broken: Broken::Nothing,
    }
}

async fn fleece_of(disk: &Path) -> AnyStore {
    fleece(&OsFiles::new(CacheMode::Page), disk, None, SIZE).await.unwrap()
}

/// A backup that begins at once, of a disk that has no requests under way.
async fn begin_in<S: Store>(node: &Arc<Node<Memory>>, fleece: S, around: &Around) -> Point<S> {
    let subject = Subject { node, fleece, limit_bytes: u64::MAX, room: any_room() };
    begin(vec![subject], around).await.unwrap().pop().unwrap().0
}

async fn begin_one<S: Store>(node: &Arc<Node<Memory>>, fleece: S, limit_bytes: u64) -> Point<S> {
    let subject = Subject { node, fleece, limit_bytes, room: any_room() };
    let (point, before) = begin(vec![subject], &around(OsEnv)).await.unwrap().pop().unwrap();
    before.ended().await;
    point
}

async fn write(node: &Node<Memory>, offset: u64, len: u64, byte: u8) {
    let bytes = Segments::zeroed(len as usize);
    bytes.fill(byte);
    node.write(Extent::new(offset, len).unwrap(), &bytes, false).await.unwrap();
}

async fn copy<S: Store>(point: &Point<S>, to: &Memory) -> Result<Digests> {
    let (job, mut digests) = (Job::new(Wishes::default()), Digests::default());
    let copy = Copy { from: point, to, beneath: Beneath::Anything, changed: None, job: &job, timer: &OsEnv };
    copy.run(&mut digests).await.map(|_| digests)
}

#[test]
fn what_guests_change_is_saved_once_and_freed_when_it_was_copied() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        let reads = || async { node.graph().await.reads.load(SeqCst) };
        for turn in 0..5 {
            write(&node, 3 * UNIT_BYTES + 512 * turn, 512, 2).await;
        }
        assert_eq!((reads().await, point.held_bytes()), (1, UNIT_BYTES));
        // A request over several units, one of them saved, reads the rest at once; reads and flushes need nothing.
        write(&node, 2 * UNIT_BYTES + 5, 3 * UNIT_BYTES, 3).await;
        node.flush().await.unwrap();
        assert_eq!((reads().await, point.held_bytes()), (3, 4 * UNIT_BYTES));
        node.write_zeroes(Extent::new(0, 512).unwrap(), WriteZeroes::default()).await.unwrap();
        let to = Memory::filled(9);
        let digests = copy(&point, &to).await.unwrap();
        assert!(to.bytes().iter().all(|byte| *byte == 1), "the backup is not of its moment");
        assert_eq!((point.held_bytes(), digests.0.len()), (0, 4));
        // What was copied is not saved any more.
        let before = reads().await;
        write(&node, 0, SIZE, 4).await;
        assert_eq!((reads().await, point.held_bytes()), (before, 0));
        point.end().await;
        assert!(node.graph().await.bytes().iter().all(|byte| *byte == 4));
    });
}

#[test]
fn a_backup_has_more_under_way_while_guests_are_quiet_and_there_is_no_rate() {
    on_host(|disk| async move {
        for (has_guest, limit_bytes_per_s, first, last) in
            [(false, None, 8, 8), (true, None, 8, 4), (false, Some(1 << 50), 4, 4)]
        {
            let (node, to) = (Arc::new(Node::new(Gauge::default())), Gauge::default());
            *to.guest.lock().unwrap() = has_guest.then(|| node.clone());
            let fleece = fleece_of(&disk).await;
            let subject = Subject { node: &node, fleece, limit_bytes: u64::MAX, room: any_room() };
            let (point, _) = begin(vec![subject], &around(OsEnv)).await.unwrap().pop().unwrap();
            let job = Job::new(Wishes { limit_bytes_per_s, ..Wishes::default() });
            let copy =
                Copy { from: &point, to: &to, beneath: Beneath::Anything, changed: None, job: &job, timer: &OsEnv };
            copy.run(&mut Digests::default()).await.unwrap();
            let begun = to.begun.lock().unwrap().clone();
            let most = |some: &[u64]| some.iter().max().copied();
            assert_eq!(
                (begun.len(), most(&begun[..8]), most(&begun[20..])),
                (32, Some(first), Some(last)),
                "{begun:?}"
            );
            assert_eq!(job.report().done_bytes, 32 << 20);
            point.end().await;
        }
    });
}

#[test]
fn a_backup_that_is_ended_while_it_reads_the_fleece_was_told_to_end() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let holds = Arc::new(Holds { reads: AtomicBool::new(true), ..Holds::default() });
        let fleece = Held { inner: fleece_of(&disk).await, holds: holds.clone() };
        let point = begin_one(&node, fleece, u64::MAX).await;
        write(&node, 0, SIZE, 2).await;
        while holds.written_bytes.load(SeqCst) < SIZE {
            yield_now().await;
        }
        let to = Memory::filled(9);
        let mut copied = pin!(copy(&point, &to));
        while holds.begun.load(SeqCst) == 0 {
            let is_over = matches!(select(copied.as_mut(), pin!(yield_now())).await, Either::Left(_));
            assert!(!is_over, "the copy does not wait for the fleece");
        }
        point.end().await;
        // Whatever frees the fleece has its turns before the copy.
        for _ in 0..1000 {
            yield_now().await;
        }
        holds.reads.store(false, SeqCst);
        assert_eq!(copied.await.unwrap_err().kind(), ErrorKind::Shutdown);
    });
}

/// Requests and the backup go on while the fleece writes nothing, as long as what was saved finds room in memory.
#[test]
fn what_was_saved_waits_in_memory_for_the_fleece() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let holds = Arc::new(Holds { writes: AtomicBool::new(true), ..Holds::default() });
        let fleece = Held { inner: fleece_of(&disk).await, holds: holds.clone() };
        let around = Around { most_kept_bytes: 8 * UNIT_BYTES, ..around(OsEnv) };
        let point = begin_in(&node, fleece, &around).await;
        for unit in [3, 40, 5, 6, 7, 20, 21] {
            write(&node, unit * UNIT_BYTES + 512, 512, 2).await;
        }
        write(&node, 0, 512, 2).await;
        assert_eq!((point.held_bytes(), holds.written_bytes.load(SeqCst)), (8 * UNIT_BYTES, 0));
        // There is no more room: this one waits, until the fleece writes.
        let mut waits = pin!(write(&node, 50 * UNIT_BYTES, 512, 2));
        for _ in 0..1000 {
            assert!(matches!(select(waits.as_mut(), pin!(yield_now())).await, Either::Right(_)), "it does not wait");
        }
        let to = Memory::filled(9);
        // The backup finds in memory what it needs of the fleece.
        assert_eq!(copy(&point, &to).await.unwrap().0.len(), 4);
        assert!(to.bytes().iter().all(|byte| *byte == 1), "the backup is not of its moment");
        waits.await;
        holds.writes.store(false, SeqCst);
        while point.held_bytes() > 0 {
            yield_now().await;
        }
        point.end().await;
    });
}

/// Writes one after the other have few saves, and one here or there has no more saved than it changes.
#[test]
fn writes_that_follow_each_other_have_more_saved_at_once() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let around = Around { unit_bytes: None, ..around(OsEnv) };
        let point = begin_in(&node, fleece_of(&disk).await, &around).await;
        let reads = || async { node.graph().await.reads.load(SeqCst) };
        for place in [5, 100, 300] {
            write(&node, place << 12, 4096, 2).await;
        }
        assert_eq!((reads().await, point.held_bytes()), (3, 3 << 12));
        for place in 512..768 {
            write(&node, place << 12, 4096, 2).await;
        }
        // The first block of 64 KiB has two saves, one before anybody knows what comes; the others have one each.
        assert_eq!((reads().await, point.held_bytes()), (3 + 17, (3 + 256) << 12));
        let to = Memory::filled(9);
        copy(&point, &to).await.unwrap();
        assert!(to.bytes().iter().all(|byte| *byte == 1), "the backup is not of its moment");
        assert_eq!(point.held_bytes(), 0);
        point.end().await;
    });
}

#[test]
fn two_writers_of_one_unit_share_one_save() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        let done = Arc::new(AtomicU64::new(0));
        for number in 0..8 {
            let (node, done) = (node.clone(), done.clone());
            spawn(async move {
                write(&node, number * 512, 512, 7).await;
                done.fetch_add(1, SeqCst);
            });
        }
        while done.load(SeqCst) < 8 {
            yield_now().await;
        }
        assert_eq!((node.graph().await.reads.load(SeqCst), point.held_bytes()), (1, UNIT_BYTES));
        point.end().await;
    });
}

#[test]
fn a_fleece_that_is_full_fails_the_backup_and_no_request() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, 2 * UNIT_BYTES).await;
        write(&node, 0, 2 * UNIT_BYTES, 2).await;
        point.check().unwrap();
        write(&node, 2 * UNIT_BYTES, 512, 2).await;
        point.failed().await;
        let error = point.check().unwrap_err();
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("128 KiB"), "{error}");
        assert!(error.hint_text().unwrap().contains("--fleece-limit"));
        write(&node, 0, SIZE, 3).await;
        assert_eq!(copy(&point, &Memory::filled(0)).await.unwrap_err().kind(), ErrorKind::NoSpace);
        point.end().await;
        // The next one begins anew.
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        let to = Memory::filled(0);
        copy(&point, &to).await.unwrap();
        assert_eq!(to.bytes(), node.graph().await.bytes());
        point.end().await;
    });
}

/// The room of a file system that has only so much left.
fn room(left: Arc<AtomicU64>) -> Room {
    Box::new(move || Box::pin(std::future::ready(Some(left.load(SeqCst)))))
}

#[test]
fn a_fleece_takes_no_space_that_guests_may_need() {
    on_host(|disk| async move {
        let (node, left) = (Arc::new(Node::new(Memory::filled(1))), Arc::new(AtomicU64::new(3 * UNIT_BYTES)));
        let fleece = fleece_of(&disk).await;
        let subject = Subject { node: &node, fleece, limit_bytes: u64::MAX, room: room(left.clone()) };
        let (point, _) = begin(vec![subject], &around(OsEnv)).await.unwrap().pop().unwrap();
        // It looks again when it has used up what there was.
        write(&node, 0, 3 * UNIT_BYTES, 2).await;
        left.store(UNIT_BYTES, SeqCst);
        write(&node, 3 * UNIT_BYTES, 512, 2).await;
        point.check().unwrap();
        left.store(UNIT_BYTES - 1, SeqCst);
        write(&node, 8 * UNIT_BYTES, 512, 2).await;
        let error = point.check().unwrap_err();
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("left to guests"), "{error}");
        write(&node, 0, SIZE, 3).await;
        point.end().await;
    });
}

#[test]
fn the_space_of_a_fleece_is_free_once_the_backup_has_ended() {
    on_host(|disk| async move {
        // Files of this process that have no name in the folder.
        let nameless = || {
            let links =
                std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fd.unwrap().path().read_link().ok());
            links.filter(|link| link.starts_with(disk.parent().unwrap())).count()
        };
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        write(&node, 0, SIZE, 2).await;
        assert!(nameless() > 0);
        // A copy whose target hangs has the point in time for as long as it likes.
        point.end().await;
        while nameless() > 0 {
            yield_now().await;
        }
    });
}

#[test]
fn a_fleece_that_cannot_be_written_fails_the_backup_and_no_request() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        std::fs::write(&disk, [0; 4096]).unwrap();
        let (files, at) = (OsFiles::new(CacheMode::Page), disk.as_path().into());
        let read_only = spile_core::Files::open(&files, &at, OpenMode::ReadOnly).await.unwrap();
        let point = begin_one(&node, read_only, u64::MAX).await;
        write(&node, 0, 512, 2).await;
        assert!(point.check().unwrap_err().hint_text().unwrap().contains("--fleece"));
        point.end().await;
        std::fs::remove_file(&disk).unwrap();
    });
}

/// A clock whose sleeps have no length.
struct Impatient;

impl Timer for Impatient {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }
}

/// A clock with which a copy may wait a hundred times.
struct Bounded(AtomicU64);

impl Timer for Bounded {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        assert!(self.0.fetch_add(1, SeqCst) < 100, "the copy waits for its rate, and for nothing else");
        Box::pin(yield_now())
    }
}

#[test]
fn a_copy_that_has_failed_waits_for_no_rate() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        let to = Memory::filled(0);
        to.fails_from.store(SIZE - 1, SeqCst);
        // The last of four pieces fails. The lanes of the others would wait for weeks.
        let job = Job::new(Wishes { limit_bytes_per_s: Some(1), ..Wishes::default() });
        let (timer, changed) = (Bounded(AtomicU64::new(0)), None);
        let copy = Copy { from: &point, to: &to, beneath: Beneath::Anything, changed, job: &job, timer: &timer };
        assert_eq!(copy.run(&mut Digests::default()).await.unwrap_err().kind(), ErrorKind::NoSpace);
        point.end().await;
    });
}

#[test]
fn a_save_that_takes_too_long_fails_the_backup_and_no_request() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_in(&node, fleece_of(&disk).await, &around(Impatient)).await;
        write(&node, 0, 512, 2).await;
        assert_eq!(point.check().unwrap_err().kind(), ErrorKind::TimedOut);
        point.end().await;
    });
}

/// A clock that counts its sleeps, which never end.
#[derive(Clone, Default)]
struct Counted(Arc<AtomicU64>);

impl Timer for Counted {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        self.0.fetch_add(1, SeqCst);
        Box::pin(std::future::pending())
    }
}

#[test]
fn a_large_request_has_new_time_whenever_some_of_it_is_saved() {
    on_host(|disk| async move {
        let (node, timer) = (Arc::new(Node::new(Memory::filled(1))), Counted::default());
        let point = begin_in(&node, fleece_of(&disk).await, &around(timer.clone())).await;
        write(&node, 0, SIZE, 2).await;
        let saves = node.graph().await.reads.load(SeqCst);
        assert!(saves >= 4 && timer.0.load(SeqCst) > 1, "{saves} saves");
        point.end().await;
    });
}

#[test]
fn there_is_one_backup_of_a_disk_at_a_time_and_a_closed_disk_has_none() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let point = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        let second = Subject { node: &node, fleece: fleece_of(&disk).await, limit_bytes: u64::MAX, room: any_room() };
        assert_eq!(begin(vec![second], &around(OsEnv)).await.err().unwrap().kind(), ErrorKind::Busy);
        write(&node, 0, 512, 2).await;
        node.close().await.unwrap();
        assert_eq!(copy(&point, &Memory::filled(0)).await.unwrap_err().kind(), ErrorKind::Shutdown);
        let third = Subject { node: &node, fleece: fleece_of(&disk).await, limit_bytes: u64::MAX, room: any_room() };
        assert_eq!(begin(vec![third], &around(OsEnv)).await.err().unwrap().kind(), ErrorKind::Shutdown);
        point.end().await;
    });
}

#[test]
fn a_backup_that_is_ended_again_leaves_the_next_one_alone() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let first = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        first.end().await;
        let second = begin_one(&node, fleece_of(&disk).await, u64::MAX).await;
        first.end().await;
        write(&node, 0, SIZE, 2).await;
        let to = Memory::filled(0);
        copy(&second, &to).await.unwrap();
        assert!(to.bytes().iter().all(|byte| *byte == 1), "the backup is not of its moment");
        second.end().await;
    });
}

#[test]
fn a_write_of_before_is_waited_for_by_the_backup_alone() {
    on_host(|disk| async move {
        let node = Arc::new(Node::new(Memory::filled(1)));
        let graph = node.graph().await;
        graph.holds_writes.store(true, SeqCst);
        let (own, done) = (node.clone(), Arc::new(AtomicBool::new(false)));
        let ended = done.clone();
        spawn(async move {
            write(&own, 0, 512, 2).await;
            ended.store(true, SeqCst);
        });
        while graph.holds_writes.load(SeqCst) && node.meter().read().in_flight() == 0 {
            yield_now().await;
        }
        let subject = Subject { node: &node, fleece: fleece_of(&disk).await, limit_bytes: u64::MAX, room: any_room() };
        let (point, before) = begin(vec![subject], &around(OsEnv)).await.unwrap().pop().unwrap();
        assert!(!before.has_ended() && !done.load(SeqCst));
        graph.holds_writes.store(false, SeqCst);
        before.ended().await;
        let to = Memory::filled(0);
        copy(&point, &to).await.unwrap();
        assert_eq!(to.bytes(), graph.bytes());
        point.end().await;
    });
}
