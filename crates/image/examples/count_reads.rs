//! `count_reads FORMAT READS`: reads 4 KiB at that many places of a disk of this format, and checks nothing but that each
//! read succeeds. `cargo xtask count` runs it under callgrind to count the instructions of the image code.
//!
//! The whole disk is written, its maps are in memory, and once the counted reads begin, its store answers at once without
//! touching a byte. So nothing is counted but the way of a read through the graph and the format.

#[path = "../tests/qcow2_image/mod.rs"]
mod qcow2_image;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use qcow2_image::Image;
use spile_core::{
    Disk, Error, ErrorKind, Extent, Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo,
    StoreOffset, Via,
};
use spile_engine::OsEnv;
use spile_image::create::NewImage;
use spile_image::{Format, Graph, OpenOptions};
use spile_store::MemStore;

const DISK_BYTES: u64 = 16 << 20;
const READ_BYTES: u64 = 4096;
const CLUSTER_BITS: u32 = 16;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [format, reads] = &words[..] else { panic!("usage: count_reads FORMAT READS") };
    let (format, reads) = (format.parse().unwrap(), reads.parse().unwrap());
    let store = SilentStore::default();
    let disk = match format {
        Format::Qcow2 => written_qcow2(&store),
        format => written(&store, format),
    };
    read_at_random(&disk, DISK_BYTES / READ_BYTES);
    store.is_silent.store(true, Ordering::Relaxed);
    read_at_random(&disk, reads);
}

fn read_at_random(disk: &impl Disk, reads: u64) {
    let into = Segments::zeroed(READ_BYTES as usize);
    for number in 0..reads {
        // An odd factor: every place is read before one is read again.
        let place = number * 2_654_435_761 % (DISK_BYTES / READ_BYTES);
        let extent = Extent::new(place * READ_BYTES, READ_BYTES).unwrap();
        now(disk.read(extent, &into)).unwrap();
    }
}

/// A disk of a format that can be written, full of data.
fn written(store: &SilentStore, format: Format) -> Graph<SilentStore> {
    let new = NewImage { size_bytes: DISK_BYTES, subformat: None, parent: None };
    now(format.create(store, &OsEnv, &new)).unwrap();
    let disk = open(store, format, false);
    let ones = Segments::zeroed(1 << 20);
    ones.fill(1);
    for offset in (0..DISK_BYTES).step_by(1 << 20) {
        now(disk.write(Extent::new(offset, 1 << 20).unwrap(), &ones, false)).unwrap();
    }
    disk
}

/// The qcow2 image of a disk full of data.
fn written_qcow2(store: &SilentStore) -> Graph<SilentStore> {
    let mut image = Image::new(CLUSTER_BITS, DISK_BYTES);
    for cluster in 0..DISK_BYTES >> CLUSTER_BITS {
        image.data(cluster, 1);
    }
    let bytes = image.finish();
    let from = Segments::zeroed(bytes.len());
    from.copy_from_slice(0, &bytes);
    now(store.write_at(StoreOffset(0), &from, Via::Cached)).unwrap();
    open(store, Format::Qcow2, true)
}

fn open(store: &SilentStore, format: Format, read_only: bool) -> Graph<SilentStore> {
    let options = OpenOptions { format: Some(format), read_only, ..OpenOptions::default() };
    now(Graph::open(&OneFile(store.clone()), Arc::new(OsEnv), Path::new("/disk"), &options)).unwrap()
}

/// The result of a future that never has to wait.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("a store in memory never waits"),
    }
}

/// A store in memory. When it is silent, reads succeed and bring nothing.
#[derive(Clone)]
struct SilentStore {
    inner: MemStore,
    is_silent: Arc<AtomicBool>,
}

impl Default for SilentStore {
    fn default() -> Self {
        Self { inner: MemStore::new(0), is_silent: Arc::default() }
    }
}

impl Store for SilentStore {
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
        match self.is_silent.load(Ordering::Relaxed) {
            true => Ok(()),
            false => self.inner.read_at(offset, into, via).await,
        }
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        self.inner.write_at(offset, from, via).await
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

/// A file system with one file.
struct OneFile(SilentStore);

fn only_one() -> Error {
    Error::new(ErrorKind::Unsupported, "there is one file, and it stays")
}

impl Files for OneFile {
    type Store = SilentStore;

    async fn open(&self, _: &Locator, _: OpenMode) -> Result<SilentStore> {
        Ok(self.0.clone())
    }

    async fn create(&self, _: &Path, _: u64) -> Result<SilentStore> {
        Err(only_one())
    }

    async fn rename(&self, _: &Path, _: &Path) -> Result<()> {
        Err(only_one())
    }

    async fn remove(&self, _: &Path) -> Result<()> {
        Err(only_one())
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}
