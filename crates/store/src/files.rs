//! [`OsFiles`]: opens stores by their locators, and makes files on this host. [`AnyStore`]: any of the stores of this crate.

use std::io;
use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store};
use spile_engine::{FileKey, run_blocking};

use crate::file::{FileId, FileStore};
use crate::folder::Folder;
use crate::memory::{MemStore, NullStore};
use crate::nbd::NbdStore;
use crate::openers::once_free;
use crate::times::FileTimes;

/// What [`Via::Direct`] means for a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheMode {
    /// O_DIRECT where the file can, else the page cache.
    #[default]
    Direct,
    /// The page cache.
    Page,
    /// The page cache, which gives up soon what was written: for a file that is written once, from end to end.
    Once,
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

    /// What the file looked like when it was opened ([`FileStore::found`]); `None` when the store is no file of this host.
    pub fn found(&self) -> Option<FileTimes> {
        match self {
            Self::File(file) => Some(file.found()),
            Self::Mem(_) | Self::Null(_) | Self::Nbd(_) => None,
        }
    }

    /// The key with which somebody can wait until the store is unlocked, once it is closed; `None` when it is no file.
    pub fn key(&self) -> Option<FileKey> {
        match self {
            Self::File(file) => file.key(),
            Self::Mem(_) | Self::Null(_) | Self::Nbd(_) => None,
        }
    }
}

impl AnyStore {
    /// How many syncs were made for all calls of [`Store::sync`] together; `None` when each call is one.
    pub fn syncs(&self) -> Option<u64> {
        match self {
            Self::File(file) => Some(file.syncs()),
            Self::Mem(_) | Self::Null(_) | Self::Nbd(_) => None,
        }
    }

    /// The errno of a sync of this store that has failed, if one has: every sync fails then.
    pub fn failed_sync(&self) -> Option<i32> {
        match self {
            Self::File(file) => file.failed_sync(),
            Self::Nbd(export) => export.has_lost().then_some(EIO),
            Self::Mem(_) | Self::Null(_) => None,
        }
    }

    /// Has every sync of this store fail from now on, as after one that failed with `errno`.
    pub fn recall_failed_sync(&self, errno: i32) {
        match self {
            Self::File(file) => file.set_failed_sync(Some(errno)),
            Self::Nbd(export) => export.set_lost(true),
            Self::Mem(_) | Self::Null(_) => {}
        }
    }

    /// Has syncs succeed again although one has failed, because somebody accepts what was lost.
    pub fn forget_failed_sync(&self) {
        match self {
            Self::File(file) => file.set_failed_sync(None),
            Self::Nbd(export) => export.set_lost(false),
            Self::Mem(_) | Self::Null(_) => {}
        }
    }
}

/// What a server's failure counts as: it tells no errno of ours.
const EIO: i32 = libc::EIO;

spile_core::store_of_stores!(AnyStore: File, Mem, Null, Nbd);

/// All stores that this host can reach, and its files.
#[derive(Clone, Copy, Debug)]
pub struct OsFiles {
    cache: CacheMode,
    locks: bool,
    /// Makes what was done to the names in a folder durable. Tests let it fail.
    sync_folder: fn(&Folder) -> io::Result<()>,
}

impl Default for OsFiles {
    fn default() -> Self {
        Self::new(CacheMode::default())
    }
}

impl OsFiles {
    /// Opens stores with this cache mode.
    pub fn new(cache: CacheMode) -> Self {
        Self { cache, locks: true, sync_folder: Folder::sync }
    }

    /// The same, but files are opened without locks where `no_lock` is true: nothing keeps other writers out.
    pub fn without_locks(self, no_lock: bool) -> Self {
        Self { locks: !no_lock, ..self }
    }

    fn open_file(&self, path: &Path, mode: OpenMode) -> Result<AnyStore> {
        let open = if self.locks { FileStore::open } else { FileStore::open_unlocked };
        open(path, mode, self.cache).map(AnyStore::File)
    }

    /// [`Files::create`], at once. Blocks for as long as the file system takes.
    ///
    /// # Errors
    /// As [`Files::create`].
    pub fn create(&self, path: &Path, len_bytes: u64) -> Result<AnyStore> {
        let (folder, name) = Folder::of(path)?;
        let file = folder.create(&name).map_err(|error| match error.kind() {
            ErrorKind::Exists => error.hint("remove it or choose another name"),
            _ => error,
        })?;
        let failed = |what: &'static str| move |source| Error::io(what, source).at_path(path);
        let id = FileId::of(&file.metadata().map_err(failed("stat"))?);
        // By the descriptor that has made it: its name may lead elsewhere by now.
        let store = file
            .set_len(len_bytes)
            .map_err(failed("set the length"))
            .and_then(|()| FileStore::made(file, (&folder, &name), path, self.cache, self.locks));
        let store = store.and_then(|store| self.sync_in(&folder).map(|()| store));
        if store.is_err() {
            let _ = folder.remove(&name, id);
        }
        store.map(AnyStore::File)
    }

    /// Makes durable what was done to the name `path`: that it is there, or that it is gone. Blocks for as long as the
    /// file system takes. Where a folder cannot be synced, by its file system or for lack of the right to read it, nothing
    /// more can be done, and that is no error.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn sync_name(&self, path: &Path) -> Result<()> {
        self.sync_in(&Folder::of(path)?.0)
    }

    /// Makes the names in `folder` durable.
    fn sync_in(&self, folder: &Folder) -> Result<()> {
        match (self.sync_folder)(folder) {
            Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
                let error = Error::io("a change of names in the folder cannot be made durable", error);
                Err(error.at_path(folder.path()).hint("check the storage below"))
            }
            _ => Ok(()),
        }
    }

    /// Makes both names of a rename durable. The new name first: between the two, the file has both names and not none.
    fn sync_both(&self, from: &Folder, to: &Folder) -> Result<()> {
        self.sync_in(to)?;
        if from.path() == to.path() { Ok(()) } else { self.sync_in(from) }
    }
}

impl Files for OsFiles {
    type Store = AnyStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<AnyStore> {
        match at {
            Locator::Path(path) => {
                let files = *self;
                once_free(path, async || blocking(path, move |path| files.open_file(path, mode)).await).await
            }
            Locator::Null(len_bytes) => Ok(AnyStore::Null(NullStore::new(*len_bytes))),
            Locator::Mem(len_bytes) => Ok(AnyStore::Mem(MemStore::new(*len_bytes))),
            Locator::Nbd(uri) => NbdStore::open(uri, mode).await.map(AnyStore::Nbd),
        }
    }

    async fn open_own(&self, path: &Path, mode: OpenMode, beside: Option<&Path>) -> Result<Option<AnyStore>> {
        let (files, beside) = (*self, beside.map(Path::to_owned));
        let open = move |path: &Path| {
            files.open_own_at_once(path, mode, beside.as_deref(), |path, mode| files.open_file(path, mode))
        };
        once_free(path, async || blocking(path, open.clone()).await).await
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<AnyStore> {
        let files = *self;
        blocking(path, move |path| OsFiles::create(&files, path, len_bytes)).await
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let (files, to) = (*self, to.to_owned());
        let rename = move |from: &Path| {
            let ((here, name), (there, new)) = (Folder::of(from)?, Folder::of(&to)?);
            here.rename_over(&name, &there, &new)?;
            files.sync_both(&here, &there)
        };
        blocking(from, rename).await
    }

    async fn rename_file(
        &self,
        (store, from): (&AnyStore, &Path),
        (to, over): (&Path, Option<&AnyStore>),
    ) -> Result<()> {
        let (files, to, id) = (*self, to.to_owned(), id_of(store)?);
        let over = over.map(id_of).transpose()?;
        let rename = move |from: &Path| {
            let ((here, name), (there, new)) = (Folder::of(from)?, Folder::of(&to)?);
            here.rename((&name, id), &there, (&new, over)).map_err(|error| refused(error, from, &to))?;
            files.sync_both(&here, &there)
        };
        blocking(from, rename).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        let (files, to) = (*self, to.to_owned());
        let link = move |from: &Path| {
            let ((here, name), (there, new)) = (Folder::of(from)?, Folder::of(&to)?);
            there.link_name((&here, &name), &new)?;
            files.sync_in(&there)
        };
        blocking(from, link).await
    }

    async fn link_file(&self, (store, from): (&AnyStore, &Path), to: &Path) -> Result<()> {
        let AnyStore::File(store) = store.clone() else { return Err(no_file(store)) };
        let (files, to) = (*self, to.to_owned());
        let link = move |from: &Path| {
            let ((here, name), (there, new)) = (Folder::of(from)?, Folder::of(&to)?);
            store.link((&here, &name), (&there, &new)).map_err(|error| refused(error, from, &to))?;
            files.sync_in(&there)
        };
        blocking(from, link).await
    }

    async fn is_at(&self, store: &AnyStore, path: &Path) -> Result<bool> {
        let Some(id) = store.file_id() else { return Ok(false) };
        let look = move |path: &Path| match Folder::of(path) {
            Ok((folder, name)) => match folder.id(&name) {
                Ok(found) => Ok(found == Some(id)),
                Err(source) => Err(Error::io("cannot be found", source)).at_path(path),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        };
        blocking(path, look).await
    }

    async fn copy_access(&self, from: &AnyStore, to: &AnyStore) -> Result<()> {
        match (from.clone(), to.clone()) {
            (AnyStore::File(from), AnyStore::File(to)) => {
                let path = to.path().to_owned();
                blocking(&path, move |_| to.copy_access_of(&from)).await
            }
            _ => Err(no_file(to)),
        }
    }

    async fn reopen(&self, store: &AnyStore, mode: OpenMode) -> Result<AnyStore> {
        match store {
            AnyStore::File(file) => {
                let (file, cache) = (file.clone(), self.cache);
                let path = file.path().to_owned();
                blocking(&path, move |_| file.reopen(mode, cache)).await.map(AnyStore::File)
            }
            AnyStore::Mem(_) | AnyStore::Null(_) | AnyStore::Nbd(_) => {
                Err(Error::new(ErrorKind::Unsupported, "only a file can be reopened").at_path(store.path()))
            }
        }
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        let files = *self;
        let remove = move |path: &Path| {
            let (folder, name) = Folder::of(path)?;
            folder.unlink(&name)?;
            files.sync_in(&folder)
        };
        blocking(path, remove).await
    }

    async fn remove_file(&self, store: &AnyStore, path: &Path) -> Result<()> {
        let (files, id) = (*self, id_of(store)?);
        let remove = move |path: &Path| {
            let (folder, name) = Folder::of(path)?;
            folder.remove(&name, id)?;
            files.sync_in(&folder)
        };
        blocking(path, remove).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        let files = *self;
        blocking(path, move |path| files.sync_name(path)).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        let find = |path: &Path| match path.file_name() {
            Some(_) => match Folder::find(path) {
                // A link leads to a folder and up again.
                Err(error) if error.os_errno() == Some(libc::EISDIR) => Ok(Folder::open(path)?.path().to_owned()),
                found => found?.existing_path(),
            },
            None => Ok(Folder::open(path)?.path().to_owned()),
        };
        blocking(path, find).await
    }
}

/// The identity of the file of `store`.
fn id_of(store: &AnyStore) -> Result<FileId> {
    store.file_id().ok_or_else(|| no_file(store))
}

fn no_file(store: &AnyStore) -> Error {
    Error::new(ErrorKind::Unsupported, "this is no file of this host").at_path(store.path())
}

/// The error of a file at `from` that was to get the name `to`: one of the two names is not what was expected.
fn refused(error: Error, from: &Path, to: &Path) -> Error {
    if error.os_errno().is_some() || !matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) {
        return error;
    }
    let at = error.path().unwrap_or(from);
    let what = match at == to {
        true => format!("{} cannot get this name: {}", from.display(), error.message()),
        false => format!("cannot get the name {}: {}", to.display(), error.message()),
    };
    let named = Error::new(error.kind(), what).at_path(at);
    error.hint_text().map_or_else(|| named.duplicate(), |hint| named.duplicate().hint(hint))
}

/// Calls `call` with the path, on a helper thread: a worker must not wait for a file system.
async fn blocking<T: Send + 'static>(path: &Path, call: impl FnOnce(&Path) -> T + Send + 'static) -> T {
    let ours = path.to_owned();
    run_blocking(path, move || call(&ours)).await
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::os::unix::fs::PermissionsExt;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread::Thread;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// Waits on this thread, which is no worker, for what helper threads do.
    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    const WITHOUT_DISK: fn(&Folder) -> io::Result<()> = |_| Err(io::Error::from_raw_os_error(libc::EIO));
    const WITHOUT_SYNC: fn(&Folder) -> io::Result<()> = |_| Err(io::Error::from_raw_os_error(libc::EINVAL));

    #[test]
    fn a_name_that_cannot_be_made_durable_is_an_error() {
        let files = OsFiles { sync_folder: WITHOUT_DISK, ..OsFiles::default() };
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
        let failed = |result: Result<()>| {
            let error = result.unwrap_err();
            assert_eq!((error.os_errno(), error.path()), (Some(libc::EIO), Some(dir.path())));
        };
        failed(files.create(&a, 512).map(drop));
        assert!(!a.exists(), "a file that could not be finished is removed");
        std::fs::write(&a, "a").unwrap();
        failed(block_on(files.rename(&a, &b)));
        failed(block_on(files.remove(&b)));
        assert!(!b.exists());
    }

    #[test]
    fn a_file_system_that_cannot_sync_folders_is_no_error() {
        let files = OsFiles { sync_folder: WITHOUT_SYNC, ..OsFiles::default() };
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
        drop(files.create(&a, 512).unwrap());
        block_on(files.rename(&a, &b)).unwrap();
        block_on(files.remove(&b)).unwrap();
    }

    #[test]
    fn a_folder_that_may_be_written_and_not_read_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let allow = |mode| std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        allow(0o333);
        let work = || {
            // Root may read any folder. This thread gives that up.
            let mut rights = capabilities(None).unwrap();
            rights.effective.remove(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH);
            set_capabilities(None, rights).unwrap();
            let refused = std::fs::File::open(dir.path()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "the test shows nothing");
            let files = OsFiles::default();
            let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
            drop(files.create(&a, 512).unwrap());
            block_on(files.rename(&a, &b)).unwrap();
            block_on(files.remove(&b)).unwrap();
        };
        let done = std::thread::scope(|scope| scope.spawn(work).join());
        allow(0o700);
        done.unwrap();
    }

    #[test]
    fn both_folders_of_a_rename_are_made_durable() {
        static SYNCED: std::sync::Mutex<Vec<PathBuf>> = std::sync::Mutex::new(Vec::new());
        let files = OsFiles {
            sync_folder: |folder| {
                SYNCED.lock().unwrap().push(folder.path().to_owned());
                Ok(())
            },
            ..OsFiles::default()
        };
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [a, b] = [&from, &to].map(|dir| dir.path().join("disk"));
        std::fs::write(&a, "a").unwrap();
        block_on(files.rename(&a, &b)).unwrap();
        assert_eq!(*SYNCED.lock().unwrap(), [to.path(), from.path()]);
    }
}
