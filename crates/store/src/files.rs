//! [`OsFiles`]: stores found by path on this host. [`AnyStore`]: any of the stores of this crate.

use std::fs::File;
use std::path::{Path, PathBuf};

use spile_core::{
    Error, ErrorKind, Files, OpenMode, Result, ResultExt, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via,
};

use crate::file::FileStore;
use crate::memory::{MemStore, NullStore};

/// What [`Via::Direct`] means for a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheMode {
    /// O_DIRECT where the file can, else the page cache.
    #[default]
    Direct,
    /// The page cache.
    Page,
}

/// Any of this crate's stores.
#[derive(Clone)]
pub enum AnyStore {
    /// A file or block device.
    File(FileStore),
    /// Memory.
    Mem(MemStore),
    /// Nothing.
    Null(NullStore),
}

/// Does `$call` with whichever store it is.
macro_rules! each {
    ($any:expr, $store:ident => $call:expr) => {
        match $any {
            AnyStore::File($store) => $call,
            AnyStore::Mem($store) => $call,
            AnyStore::Null($store) => $call,
        }
    };
}

impl Store for AnyStore {
    fn info(&self) -> StoreInfo {
        each!(self, store => store.info())
    }

    fn len_bytes(&self) -> u64 {
        each!(self, store => store.len_bytes())
    }

    fn path(&self) -> &Path {
        each!(self, store => store.path())
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        each!(self, store => store.read_at(offset, into, via).await)
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        each!(self, store => store.write_at(offset, from, via).await)
    }

    async fn sync(&self) -> Result<()> {
        each!(self, store => store.sync().await)
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        each!(self, store => store.zero_range(offset, len_bytes).await)
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        each!(self, store => store.punch_hole(offset, len_bytes).await)
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        each!(self, store => store.set_len(len_bytes).await)
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        each!(self, store => store.extent_at(offset).await)
    }
}

/// The files and block devices of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsFiles {
    cache: CacheMode,
}

impl OsFiles {
    /// Stores will be opened with this cache mode.
    pub fn new(cache: CacheMode) -> Self {
        Self { cache }
    }

    /// Creates a file of `len_bytes` that reads as zeroes and takes no space, and opens it for writing.
    ///
    /// # Errors
    /// `Exists` when there is something at `path`; else the system's. A file that could not be finished is removed.
    pub fn create(&self, path: &Path, len_bytes: u64) -> Result<AnyStore> {
        let failed = |what: &'static str| move |source| Error::io(what, source).at_path(path);
        let file = File::options().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(failed("create")).map_err(|error| match error.kind() {
            ErrorKind::Exists => error.hint("remove it or choose another name"),
            _ => error,
        })?;
        let store = file
            .set_len(len_bytes)
            .map_err(failed("set the length"))
            .and_then(|()| FileStore::open(path, OpenMode::ReadWrite, self.cache).map(AnyStore::File));
        match store {
            Ok(_) => sync_folder_of(path),
            Err(_) => drop(std::fs::remove_file(path)),
        }
        store
    }
}

/// Makes a new name durable, as far as that can be asked for: with the file systems in common use the file's first sync
/// does it, POSIX promises nothing.
fn sync_folder_of(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let _ = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
}

impl Files for OsFiles {
    type Store = AnyStore;

    async fn open(&self, path: &Path, mode: OpenMode) -> Result<AnyStore> {
        FileStore::open(path, mode, self.cache).map(AnyStore::File)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        path.canonicalize().map_err(|source| Error::io("find", source)).at_path(path)
    }
}
