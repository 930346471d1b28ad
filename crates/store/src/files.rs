//! [`OsFiles`]: opens stores by their locators, and makes files on this host. [`AnyStore`]: any of the stores of this crate.

use std::fs::File;
use std::path::{Path, PathBuf};

use spile_core::{
    Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Segments, Store, StoreExtent, StoreInfo,
    StoreOffset, Via,
};

use crate::file::{FileId, FileStore};
use crate::memory::{MemStore, NullStore};
use crate::nbd::NbdStore;

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
    /// An export of an NBD server.
    Nbd(NbdStore),
}

impl AnyStore {
    /// Which file the store is ([`FileStore::id`]); `None` when it is no file of this host.
    pub fn file_id(&self) -> Option<FileId> {
        match self {
            Self::File(file) => Some(file.id()),
            Self::Mem(_) | Self::Null(_) | Self::Nbd(_) => None,
        }
    }
}

/// Does `$call` with whichever store it is.
macro_rules! each {
    ($any:expr, $store:ident => $call:expr) => {
        match $any {
            AnyStore::File($store) => $call,
            AnyStore::Mem($store) => $call,
            AnyStore::Null($store) => $call,
            AnyStore::Nbd($store) => $call,
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

/// All stores that this host can reach, and its files.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsFiles {
    cache: CacheMode,
}

impl OsFiles {
    /// Stores will be opened with this cache mode.
    pub fn new(cache: CacheMode) -> Self {
        Self { cache }
    }

    /// [`Files::create`], at once. Blocks for as long as the file system takes.
    ///
    /// # Errors
    /// As [`Files::create`].
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

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<AnyStore> {
        match at {
            Locator::Path(path) => FileStore::open(path, mode, self.cache).map(AnyStore::File),
            Locator::Null(len_bytes) => Ok(AnyStore::Null(NullStore::new(*len_bytes))),
            Locator::Mem(len_bytes) => Ok(AnyStore::Mem(MemStore::new(*len_bytes))),
            Locator::Nbd(uri) => NbdStore::open(uri, mode).await.map(AnyStore::Nbd),
        }
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<AnyStore> {
        OsFiles::create(self, path, len_bytes)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(|source| Error::io("rename", source)).at_path(from)?;
        sync_folder_of(from);
        sync_folder_of(to);
        Ok(())
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        std::fs::remove_file(path).map_err(|source| Error::io("remove", source)).at_path(path)?;
        sync_folder_of(path);
        Ok(())
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        path.canonicalize().map_err(|source| Error::io("find", source)).at_path(path)
    }
}
