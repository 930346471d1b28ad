//! [`MeteredStore`]: a store whose operations are counted, those on data and those on metadata.
//!
//! An operation is in flight from the turn of the worker in which it first has to wait to the turn in which it has ended. One that
//! never has to wait takes no time.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use spile_core::metrics::{Meter, Op};
use spile_core::{
    Files, Locator, OpenMode, Result, Segment, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via,
};

use crate::files::{AnyStore, OsFiles};

/// A store of this host as servers and commands use it: counted.
pub type HostStore = MeteredStore<AnyStore>;
/// Where those are found.
pub type HostFiles = MeteredFiles<OsFiles>;

/// A store that is counted. Its type is static: a store that is not wrapped pays nothing.
pub struct MeteredStore<S> {
    inner: S,
    meter: Arc<Meter>,
}

impl<S: Store> MeteredStore<S> {
    /// Counts the operations of `inner` from now on.
    pub fn new(inner: S) -> Self {
        Self { inner, meter: Arc::default() }
    }

    /// What was counted. A sync is a flush; a hole that was punched is a discard; a question about an extent is one of extents; a new
    /// length, and a look at a device's, is another operation.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }
}

/// What only this kind of store can do is not counted.
impl<S> Deref for MeteredStore<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.inner
    }
}

impl<S: Store> Store for MeteredStore<S> {
    fn info(&self) -> StoreInfo {
        self.inner.info()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn set_path(&self, path: &Path) {
        self.inner.set_path(path);
    }

    fn has_failed_sync(&self) -> bool {
        self.inner.has_failed_sync()
    }

    fn set_copy(&self, is_copy: bool) {
        self.inner.set_copy(is_copy);
    }

    #[inline]
    fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> impl Future<Output = Result<()>> {
        self.meter.measure_by_turns(Op::Read, into.len() as u64, self.inner.read_at(offset, into, via))
    }

    #[inline]
    fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> impl Future<Output = Result<()>> {
        self.meter.measure_by_turns(Op::Write, from.len() as u64, self.inner.write_at(offset, from, via))
    }

    async fn sync(&self) -> Result<()> {
        self.meter.measure_by_turns(Op::Flush, 0, pin!(self.inner.sync())).await
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let zeroed = pin!(self.inner.zero_range(offset, len_bytes));
        self.meter.measure_by_turns(Op::WriteZeroes, len_bytes, zeroed).await
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let punched = pin!(self.inner.punch_hole(offset, len_bytes));
        self.meter.measure_by_turns(Op::Discard, len_bytes, punched).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.meter.measure_by_turns(Op::Other, 0, pin!(self.inner.set_len(len_bytes))).await
    }

    async fn look_for_growth(&self) -> Result<u64> {
        self.meter.measure_by_turns(Op::Other, 0, pin!(self.inner.look_for_growth())).await
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.meter.measure_by_turns(Op::Extents, 0, pin!(self.inner.extent_at(offset))).await
    }

    fn taken_bytes(&self) -> impl Future<Output = Option<u64>> {
        self.inner.taken_bytes()
    }

    fn file_identity(&self) -> Option<[u8; 16]> {
        self.inner.file_identity()
    }

    async fn extents_at(&self, offset: StoreOffset, len_bytes: u64, max_runs: usize) -> Result<Vec<StoreExtent>> {
        let found = pin!(self.inner.extents_at(offset, len_bytes, max_runs));
        self.meter.measure_by_turns(Op::Extents, 0, found).await
    }

    fn map(&self, offset: StoreOffset, len_bytes: usize) -> Result<Segment> {
        self.inner.map(offset, len_bytes)
    }
}

/// Files whose stores are counted, each by itself.
#[derive(Clone, Copy, Debug)]
pub struct MeteredFiles<F>(F);

impl<F: Files> MeteredFiles<F> {
    /// The files that `inner` finds.
    pub fn new(inner: F) -> Self {
        Self(inner)
    }
}

impl<F: Files> Files for MeteredFiles<F> {
    type Store = MeteredStore<F::Store>;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<Self::Store> {
        self.0.open(at, mode).await.map(MeteredStore::new)
    }

    async fn open_own(&self, path: &Path, mode: OpenMode, beside: Option<&Path>) -> Result<Option<Self::Store>> {
        Ok(self.0.open_own(path, mode, beside).await?.map(MeteredStore::new))
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<Self::Store> {
        self.0.create(path, len_bytes).await.map(MeteredStore::new)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.0.rename(from, to).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.0.link(from, to).await
    }

    async fn is_at(&self, store: &Self::Store, path: &Path) -> Result<bool> {
        self.0.is_at(&store.inner, path).await
    }

    async fn rename_file(
        &self,
        (store, from): (&Self::Store, &Path),
        (to, over): (&Path, Option<&Self::Store>),
    ) -> Result<()> {
        self.0.rename_file((&store.inner, from), (to, over.map(|over| &over.inner))).await
    }

    async fn link_file(&self, (store, from): (&Self::Store, &Path), to: &Path) -> Result<()> {
        self.0.link_file((&store.inner, from), to).await
    }

    async fn remove_file(&self, store: &Self::Store, path: &Path) -> Result<()> {
        self.0.remove_file(&store.inner, path).await
    }

    async fn copy_access(&self, from: &Self::Store, to: &Self::Store) -> Result<()> {
        self.0.copy_access(&from.inner, &to.inner).await
    }

    async fn reopen(&self, store: &Self::Store, mode: OpenMode) -> Result<Self::Store> {
        self.0.reopen(&store.inner, mode).await.map(MeteredStore::new)
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.0.remove(path).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        self.0.sync_names(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.0.canonical(path).await
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::memory::MemStore;

    fn now<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("memory answers at once"),
        }
    }

    #[test]
    fn each_operation_is_counted_under_its_kind() {
        let store = MeteredStore::new(MemStore::new(1 << 20));
        now(async {
            let bytes = Segments::zeroed(4096);
            store.write_at(StoreOffset(0), &bytes, Via::Direct).await.unwrap();
            store.read_at(StoreOffset(0), &bytes, Via::Cached).await.unwrap();
            store.read_at(StoreOffset(1 << 20), &bytes, Via::Cached).await.unwrap_err();
            store.sync().await.unwrap();
            store.punch_hole(StoreOffset(0), 512).await.unwrap();
            store.zero_range(StoreOffset(0), 1024).await.unwrap();
            store.extent_at(StoreOffset(0)).await.unwrap();
            drop(store.set_len(1 << 20).await);
        });
        let reading = store.meter().read();
        let counted = Op::ALL.map(|op| (reading.op(op).ended, reading.op(op).bytes));
        assert_eq!(counted, [(2, 8192), (1, 4096), (1, 0), (1, 512), (1, 1024), (1, 0), (1, 0)]);
        assert_eq!((reading.op(Op::Read).errors, reading.in_flight()), (1, 0));
    }
}
