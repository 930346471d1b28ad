//! Changed blocks in a file of this host: shared memory, deaths without a word, damage, and what a request costs.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Waker};

use allocation_counter::measure;
use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Files, Io, Locator, OpenMode, Result, Segment,
    Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via, yield_now,
};
use spile_engine::{Config, Engine, OsEnv};
use spile_life::changes::header::{COPY_BYTES, Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_life::names;
use spile_node::Node;
use spile_store::{AnyStore, CacheMode, OsFiles};

const BLOCK: u64 = 64 << 10;
const SIZE: u64 = 1 << 30;

/// A disk that keeps nothing.
struct Nothing;

impl Disk for Nothing {
    fn info(&self) -> DiskInfo {
        DiskInfo::unaligned(SIZE)
    }

    async fn execute(&self, _: Io<'_>) -> Result<()> {
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

fn around() -> Surroundings<OsFiles> {
    Surroundings {
        files: OsFiles::new(CacheMode::Page),
        env: Arc::new(OsEnv),
        timer: Arc::new(OsEnv),
        alarm: |_, _| {},
        broken: Broken::Nothing,
    }
}

/// Runs `test` on a worker, with the path of a disk in a folder of its own.
fn on_host<F: Future<Output = ()> + 'static>(test: impl FnOnce(PathBuf) -> F + Send + 'static) {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.raw");
    let engine = Engine::start(Config { workers: 1, pool_bytes: 2 << 20, ..Config::default() }).unwrap();
    engine.run_on(0, move || test(disk));
}

fn found() -> Found {
    Found { mount_id: 1, ..Found::default() }
}

async fn open(disk: &Path, stamp: u8) -> Result<Option<Changes<OsFiles>>> {
    let found = Found { stamp: Stamp([stamp; 32]), ..found() };
    Changes::open(around(), disk, SIZE, found).await
}

/// A disk with the checkpoint `monday`.
async fn with_checkpoint(disk: &Path) -> (Node<Nothing>, Changes<OsFiles>) {
    let (node, changes) =
        (Node::new(Nothing), Changes::create(around(), disk, SIZE, Grain::default(), found()).await.unwrap());
    changes.checkpoint(&node, "monday").await.unwrap();
    (node, changes)
}

async fn write(node: &Node<Nothing>, offset: u64, len: usize) {
    node.write(Extent::new(offset, len as u64).unwrap(), &Segments::zeroed(len), false).await.unwrap();
}

async fn since(changes: &Changes<OsFiles>, name: &str) -> (Vec<(u64, u64)>, bool) {
    let changed = changes.since(name, SIZE).await.unwrap();
    let ranges = changed.ranges.iter().map(|range| (range.offset.0, range.len_bytes)).collect();
    (ranges, changed.warning.is_some())
}

fn everything() -> (Vec<(u64, u64)>, bool) {
    (vec![(0, SIZE)], true)
}

#[test]
fn bits_outlive_a_process_that_ends_without_a_word() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        write(&node, 5 * BLOCK - 1, 2).await;
        changes.checkpoint(&node, "tuesday").await.unwrap();
        write(&node, 100 * BLOCK, 4096).await;
        drop((node, changes));
        let (changes, node) = (open(&disk, 0).await.unwrap().unwrap(), Node::new(Nothing));
        assert_eq!(since(&changes, "monday").await, (vec![(4 * BLOCK, 2 * BLOCK), (100 * BLOCK, BLOCK)], false));
        assert_eq!(since(&changes, "tuesday").await, (vec![(100 * BLOCK, BLOCK)], false));
        changes.attach(&node).await.unwrap();
        write(&node, SIZE - 512, 512).await;
        changes.remove(&node, "tuesday").await.unwrap();
        let all = vec![(4 * BLOCK, 2 * BLOCK), (100 * BLOCK, BLOCK), (SIZE - BLOCK, BLOCK)];
        assert_eq!(since(&changes, "monday").await, (all, false));
        assert_eq!(changes.since("tuesday", SIZE).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn another_program_that_wrote_to_the_disk_has_changed_everything() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        write(&node, 0, 512).await;
        changes.close(Stamp([7; 32])).await.unwrap();
        drop((node, changes));
        let changes = open(&disk, 7).await.unwrap().unwrap();
        assert_eq!(since(&changes, "monday").await, (vec![(0, BLOCK)], false));
        changes.close(Stamp([8; 32])).await.unwrap();
        drop(changes);
        assert_eq!(since(&open(&disk, 9).await.unwrap().unwrap(), "monday").await, everything());
    });
}

#[test]
fn a_file_without_a_checkpoint_is_gone_once_it_is_closed() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        changes.remove(&node, "monday").await.unwrap();
        changes.close(Stamp::default()).await.unwrap();
        drop((node, changes));
        assert!(open(&disk, 0).await.unwrap().is_none());
        std::fs::write(names::changes(&disk), b"Spile").unwrap();
        assert!(open(&disk, 0).await.unwrap().is_none(), "the making of a file was cut off");
    });
}

#[test]
fn a_file_that_is_cut_short_while_it_is_used_costs_what_it_knew_and_nothing_else() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        write(&node, 0, 512).await;
        OpenOptions::new().write(true).open(names::changes(&disk)).unwrap().set_len(32 << 10).unwrap();
        write(&node, 300 * BLOCK, 512).await;
        assert_eq!(since(&changes, "monday").await, everything());
        assert!(changes.loss().unwrap().why.contains("cut short"));
        drop((node, changes));
        assert!(open(&disk, 0).await.unwrap().is_none(), "a file that knows too little is believed");
    });
}

#[test]
fn damage_never_means_that_nothing_has_changed() {
    on_host(async |disk| {
        let (_, changes) = with_checkpoint(&disk).await;
        changes.close(Stamp::default()).await.unwrap();
        drop(changes);
        let file = OpenOptions::new().write(true).open(names::changes(&disk)).unwrap();
        // One bit of the interval: its checksum tells.
        file.write_all_at(&[1], (32 << 10) + 4096).unwrap();
        let changes = open(&disk, 0).await.unwrap().unwrap();
        assert_eq!(since(&changes, "monday").await, everything());
        drop(changes);
        file.write_all_at(&[0xff; 32 << 10], 0).unwrap();
        let changes = open(&disk, 0).await.unwrap().unwrap();
        assert_eq!(since(&changes, "any").await, everything());
        // A new checkpoint begins anew.
        changes.checkpoint(&Node::new(Nothing), "wednesday").await.unwrap();
        assert_eq!(since(&changes, "wednesday").await, (Vec::new(), false));
    });
}

#[test]
fn a_file_system_that_was_mounted_anew_may_have_lost_what_was_not_durable() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        let area = Grain::default().area_bytes.into();
        write(&node, area + 512, 512).await;
        drop((node, changes));
        // The process was killed: its bits count in the same mount only. Nothing is written by whoever only reads.
        let opened = |mount_id, reads| {
            let (disk, found) = (disk.clone(), Found { mount_id, ..found() });
            async move {
                match reads {
                    true => Changes::open_to_read(around(), &disk, SIZE, found).await.unwrap().unwrap(),
                    false => Changes::open(around(), &disk, SIZE, found).await.unwrap().unwrap(),
                }
            }
        };
        let exactly = (vec![(area, BLOCK)], false);
        let areas = (vec![(area, area)], false);
        for (mount_id, reads, expected) in
            [(1, true, &exactly), (2, true, &areas), (0, true, &areas), (1, false, &exactly), (1, true, &exactly)]
        {
            assert_eq!(since(&opened(mount_id, reads).await, "monday").await, *expected, "{mount_id} {reads}");
        }
        let (changes, node) = (opened(1, false).await, Node::new(Nothing));
        changes.attach(&node).await.unwrap();
        write(&node, area + 512, 512).await;
        write(&node, 2 * area, 512).await;
        drop((node, changes));
        let changes = opened(2, false).await;
        assert_eq!(since(&changes, "monday").await, (vec![(area, BLOCK), (2 * area, area)], false));
    });
}

#[test]
fn a_name_that_is_too_long_for_a_file_beside_it_has_no_checkpoints() {
    on_host(async |disk| {
        let disk = disk.with_file_name("x".repeat(241));
        assert!(open(&disk, 0).await.unwrap().is_none());
        let made = Changes::create(around(), &disk, SIZE, Grain::default(), found()).await;
        assert_eq!(made.err().unwrap().kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn a_write_whose_bits_are_set_allocates_nothing() {
    on_host(async |disk| {
        let (node, _changes) = with_checkpoint(&disk).await;
        let (extent, from) = (Extent::new(0, 4096).unwrap(), Segments::zeroed(4096));
        node.write(extent, &from, false).await.unwrap();
        let counted = measure(|| (0..300).for_each(|_| now(node.write(extent, &from, false))));
        assert_eq!(counted.count_total, 0, "allocations in 300 writes");
    });
}

fn now(future: impl Future<Output = Result<()>>) {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result.unwrap(),
        Poll::Pending => panic!("it waits"),
    }
}

/// So many blocks have their bits in one word.
const PER_WORD: u64 = 64;
const WORDS: u64 = SIZE / BLOCK / PER_WORD;

#[test]
fn what_is_noted_beside_requests_of_another_worker_takes_none_of_their_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let engine = Engine::start(Config { workers: 2, pool_bytes: 2 << 20, ..Config::default() }).unwrap();
    let disk = Arc::new(engine.run_on(0, move || async move { with_checkpoint(&path).await }));
    // A bit is lost by chance only.
    for name in ["tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"] {
        // Both workers are at the same word of bits at the same time: the one at its even bits, the other at its odd ones.
        let meeting = Arc::new(Barrier::new(2));
        let (guest, at) = (disk.clone(), meeting.clone());
        engine.spawn_on(1, move || async move {
            for word in 0..WORDS {
                // From here on the area's mark is durable, and no request waits.
                write(&guest.0, word * PER_WORD * BLOCK, 512).await;
                at.wait();
                for block in (1..PER_WORD).step_by(2) {
                    write(&guest.0, (word * PER_WORD + block) * BLOCK, 512).await;
                }
            }
            at.wait();
        });
        let (noting, at) = (disk.clone(), meeting);
        engine.run_on(0, move || async move {
            for word in 0..WORDS {
                let runs = (2..PER_WORD).step_by(2).map(|block| (word * PER_WORD + block) * BLOCK);
                let runs: Vec<_> = runs.map(|at| Extent::new(at, 512).unwrap()).collect();
                at.wait();
                noting.1.note(&runs).await.unwrap();
            }
            at.wait();
        });
        let looking = disk.clone();
        let all = engine.run_on(0, move || async move {
            let (node, changes) = &*looking;
            let (names, _) = changes.names().await;
            let all = since(changes, names.last().unwrap()).await;
            changes.checkpoint(node, name).await.unwrap();
            all
        });
        assert_eq!(all, (vec![(0, SIZE)], false), "before {name}");
    }
}

#[test]
fn no_request_waits_for_the_place_where_the_disk_will_be() {
    on_host(async |disk| {
        let (node, changes) = with_checkpoint(&disk).await;
        let (there, area) = (disk.with_file_name("there.raw"), u64::from(Grain::default().area_bytes));
        write(&node, 0, 512).await;
        let new = changes.carry(around(), &node, (&there, found()), None).await.unwrap();
        // The mark beside the old image is durable. That beside the new one was so before there were requests.
        let (extent, from) = (Extent::new(BLOCK, 512).unwrap(), Segments::zeroed(512));
        now(node.write(extent, &from, false));
        assert_eq!(since(&new, "monday").await, (vec![(0, 2 * BLOCK)], false));
        new.carried(&node, None).await.unwrap();
        drop((node, changes, new));
        // As after a power cut: no other area counts as changed.
        let anew = Found { mount_id: 2, ..found() };
        let opened = Changes::open_to_read(around(), &there, SIZE, anew).await.unwrap().unwrap();
        assert_eq!(since(&opened, "monday").await, (vec![(0, area)], false));
    });
}

/// Files of this host that fail when they are told to.
#[derive(Clone)]
struct Troubled {
    files: OsFiles,
    troubles: Arc<Troubles>,
}

#[derive(Default)]
struct Troubles {
    /// Second copies of headers that were written.
    copies: AtomicU64,
    /// The one of this number fails.
    failing_copy: AtomicU64,
    /// All syncs fail that come after the one behind such a copy.
    fails_syncs: AtomicBool,
    /// Syncs since the last copy.
    syncs: AtomicU64,
    /// No name can be removed.
    keeps_names: AtomicBool,
    /// Syncs wait.
    holds_syncs: AtomicBool,
}

struct TroubledStore {
    inner: AnyStore,
    troubles: Arc<Troubles>,
}

fn trouble<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Io, "as it was told to"))
}

impl Troubled {
    fn store(&self, inner: AnyStore) -> TroubledStore {
        TroubledStore { inner, troubles: self.troubles.clone() }
    }
}

impl Files for Troubled {
    type Store = TroubledStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<TroubledStore> {
        Ok(self.store(self.files.open(at, mode).await?))
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<TroubledStore> {
        Ok(self.store(Files::create(&self.files, path, len_bytes).await?))
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.rename(from, to).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.link(from, to).await
    }

    async fn is_at(&self, store: &TroubledStore, path: &Path) -> Result<bool> {
        self.files.is_at(&store.inner, path).await
    }

    async fn reopen(&self, store: &TroubledStore, mode: OpenMode) -> Result<TroubledStore> {
        Ok(self.store(self.files.reopen(&store.inner, mode).await?))
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        if self.troubles.keeps_names.load(SeqCst) {
            return trouble();
        }
        self.files.remove(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.files.canonical(path).await
    }
}

impl Store for TroubledStore {
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
        self.inner.read_at(offset, into, via).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        let Troubles { copies, failing_copy, syncs, .. } = &*self.troubles;
        if offset.0 == COPY_BYTES as u64 {
            syncs.store(0, SeqCst);
            if copies.fetch_add(1, SeqCst) + 1 == failing_copy.load(SeqCst) {
                return trouble();
            }
        }
        self.inner.write_at(offset, from, via).await
    }

    async fn sync(&self) -> Result<()> {
        let Troubles { copies, fails_syncs, syncs, holds_syncs, .. } = &*self.troubles;
        while holds_syncs.load(SeqCst) {
            yield_now().await;
        }
        let is_behind = syncs.fetch_add(1, SeqCst) > 0 && copies.load(SeqCst) > 0;
        if is_behind && fails_syncs.load(SeqCst) {
            return trouble();
        }
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

    fn map(&self, offset: StoreOffset, len_bytes: usize) -> Result<Segment> {
        self.inner.map(offset, len_bytes)
    }
}

/// A disk with the checkpoint `monday`, and what makes its files fail from now on.
async fn in_trouble(disk: &Path) -> (Node<Nothing>, Changes<Troubled>, Surroundings<Troubled>) {
    let files = Troubled { files: OsFiles::new(CacheMode::Page), troubles: Arc::default() };
    let (env, timer) = (Arc::new(OsEnv), Arc::new(OsEnv));
    let around = Surroundings { files, env, timer, alarm: |_, _| {}, broken: Broken::Nothing };
    let node = Node::new(Nothing);
    let changes = Changes::create(around.clone(), disk, SIZE, Grain::default(), found()).await.unwrap();
    changes.checkpoint(&node, "monday").await.unwrap();
    around.files.troubles.copies.store(0, SeqCst);
    (node, changes, around)
}

#[test]
fn a_request_for_what_is_just_noted_waits_until_a_power_cut_cannot_undo_that() {
    on_host(async |disk| {
        let (node, changes, around) = in_trouble(&disk).await;
        let (extent, from) = (Extent::new(0, 512).unwrap(), Segments::zeroed(512));
        let runs = [extent];
        let (mut noted, mut written) = (pin!(changes.note(&runs)), pin!(node.write(extent, &from, false)));
        let mut context = Context::from_waker(Waker::noop());
        around.files.troubles.holds_syncs.store(true, SeqCst);
        assert!(noted.as_mut().poll(&mut context).is_pending());
        assert!(
            written.as_mut().poll(&mut context).is_pending(),
            "it relies on a bit that is not durable, nor is a mark"
        );
        around.files.troubles.holds_syncs.store(false, SeqCst);
        noted.await.unwrap();
        written.await.unwrap();
        assert_eq!(changes.since("monday", SIZE).await.unwrap().bytes(), BLOCK);
    });
}

#[test]
fn nobody_believes_what_a_hand_over_leaves_beside_the_new_image() {
    on_host(async |disk| {
        let (node, changes, around) = in_trouble(&disk).await;
        let (there, Troubles { failing_copy, keeps_names, .. }) =
            (disk.with_file_name("there.raw"), &*around.files.troubles);
        keeps_names.store(true, SeqCst);
        // The header that has the checkpoint is written after that of a file without any.
        failing_copy.store(2, SeqCst);
        changes.carry(around.clone(), &node, (&there, found()), None).await.err().unwrap();
        // The disk gets there all the same, and nobody sets bits there.
        assert_eq!(left_at(&there).await, everything());
        keeps_names.store(false, SeqCst);
        std::fs::remove_file(names::changes(&there)).unwrap();
        let new = changes.carry(around.clone(), &node, (&there, found()), None).await.unwrap();
        keeps_names.store(true, SeqCst);
        changes.left_behind(&node, new).await.unwrap_err();
        assert_eq!(left_at(&there).await, everything());
        assert!(changes.loss().is_none());
    });
}

/// What the next process finds to have changed since monday.
async fn left_at(disk: &Path) -> (Vec<(u64, u64)>, bool) {
    since(&open(disk, 0).await.unwrap().unwrap(), "monday").await
}

#[test]
fn an_interval_that_may_lack_bits_is_not_kept_behind_a_new_checkpoint() {
    on_host(async |disk| {
        let (node, changes, around) = in_trouble(&disk).await;
        // The new header is written. The next sync is that of the old interval's bits.
        around.files.troubles.fails_syncs.store(true, SeqCst);
        changes.checkpoint(&node, "tuesday").await.unwrap();
        assert!(changes.loss().unwrap().is_removed);
        assert!(!names::changes(&disk).exists());
    });
}
