//! Changed blocks in a file of this host: shared memory, deaths without a word, damage, and what a request costs.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use allocation_counter::measure;
use spile_core::{Disk, DiskInfo, Epoch, ErrorKind, Extent, ExtentStatus, Io, Result, Segments};
use spile_engine::{Config, Engine, OsEnv};
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_life::names;
use spile_node::Node;
use spile_store::{CacheMode, OsFiles};

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
