//! [`Store`]: bytes under an image. [`Files`]: where stores are found and made. [`Env`]: clock, randomness, boot.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use crate::{Error, ErrorKind, Locator, Result, Segment, Segments, StoreOffset};

/// Which way an operation takes to the bytes.
///
/// The two ways may not be mixed within one 4 KiB page of a store: a cached write of part of a page writes the
/// rest of it back as it was read, and would undo a direct write to that rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Via {
    /// The way the store was opened for data: O_DIRECT where it can, with the alignment of [`StoreInfo`].
    Direct,
    /// Through the page cache: any alignment. The bytes have left the process when the operation returns.
    Cached,
}

/// What an image must know of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreInfo {
    /// `Via::Direct` offsets and lengths must be multiples of this many bytes (a power of two; 1 = any).
    pub offset_align_bytes: u32,
    /// `Via::Direct` memory addresses must be multiples of this many bytes (a power of two; 1 = any).
    pub memory_align_bytes: u32,
    /// True when the store can grow and bytes it gains read as zeroes (a file); false for a device.
    pub grows_zeroed: bool,
    /// True when [`Store::punch_hole`] frees space.
    pub punches: bool,
    /// True when writes are refused.
    pub read_only: bool,
    /// True when what had returned is there until this host ends: the page cache of this host holds it, or memory does.
    /// False when another host may lose it alone, as behind a network protocol.
    pub is_local: bool,
}

/// One run of a store's own map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreExtent {
    /// Length in bytes from the offset that was asked for.
    pub len_bytes: u64,
    /// True when no space is behind it and it reads as zeroes.
    pub is_hole: bool,
}

/// Random-access bytes: a file, a device, memory, or a simulation. Whole length or an error; operations that
/// overlap in time may take effect in any order. Nothing is durable before [`Store::sync`] returns, but
/// everything that returned survives the death of the process.
pub trait Store: Send + Sync + 'static {
    /// Alignment and abilities. Cheap, constant.
    fn info(&self) -> StoreInfo;

    /// The length in bytes now.
    fn len_bytes(&self) -> u64;

    /// Where the store is, for messages and for what is found by names beside it.
    fn path(&self) -> &Path;

    /// Says that the store's file is known by another path from now on: it was renamed, or its old name names another file.
    fn set_path(&self, path: &Path) {
        let _ = path;
    }

    /// True when a sync has failed: nobody knows what was lost. Cheap.
    fn has_failed_sync(&self) -> bool {
        false
    }

    /// Says whether it holds a copy whose maker keeps account of what is not flushed, and copies that again when it may be lost: then nobody else is told of
    /// such a loss. Each byte of a copy is written about once, and read by nobody: it need not stay in the page cache.
    fn set_copy(&self, is_copy: bool) {
        let _ = is_copy;
    }

    /// Fills `into` from `offset`. Bytes past the end are an error (`OutOfRange`).
    fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> impl Future<Output = Result<()>>;

    /// Writes `from` at `offset`; past the end it makes the store longer where it grows, else fails (`OutOfRange`).
    fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> impl Future<Output = Result<()>>;

    /// Makes all that returned before the call durable: data, length, holes. A failure is for ever: every later call fails.
    fn sync(&self) -> impl Future<Output = Result<()>>;

    /// Makes the range read as zeroes, and where that can be done takes or keeps its space, so that a later write
    /// there finds it.
    fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>>;

    /// Makes the range read as zeroes and frees its space where that can be done (`Unsupported` where zeroes would
    /// have to be written).
    fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>>;

    /// Sets the length; new bytes read as zeroes. A device's length is its own: one that has become longer since it was
    /// opened can be taken up, wholly or in part; anything else is `Unsupported` there.
    fn set_len(&self, len_bytes: u64) -> impl Future<Output = Result<()>>;

    /// Looks whether a device has become longer since its length was last looked at, and takes that up: somebody may have enlarged the
    /// volume. What it has gained holds anything. Returns the length now; that of all other stores is known.
    fn look_for_growth(&self) -> impl Future<Output = Result<u64>> {
        async { Ok(self.len_bytes()) }
    }

    /// The run of data or hole that starts at `offset`, which lies before the end.
    fn extent_at(&self, offset: StoreOffset) -> impl Future<Output = Result<StoreExtent>>;

    /// How many bytes of its host's space the store takes now; `None` where nobody can tell, and on a device, whose space is its own.
    fn taken_bytes(&self) -> impl Future<Output = Option<u64>> {
        async { None }
    }

    /// Which file of its file system it is, whatever its name is: no other one there is given the same. `None` where nobody can tell.
    fn file_identity(&self) -> Option<[u8; 16]> {
        None
    }

    /// The runs of data and holes from `offset` on, one after the other: at least one, at most `max_runs` (at least 1). The last may end
    /// before or after the `len_bytes` that were asked for. A store that can tell many runs by one question does so.
    fn extents_at(
        &self,
        offset: StoreOffset,
        len_bytes: u64,
        max_runs: usize,
    ) -> impl Future<Output = Result<Vec<StoreExtent>>> {
        let _ = (len_bytes, max_runs);
        async move { Ok(vec![self.extent_at(offset).await?]) }
    }

    /// Memory that is the range of the store: what is stored there survives the death of the process, and is durable
    /// after a [`Store::sync`] that begins later. The range begins at a multiple of 4096 bytes and has its space already. Only cached reads
    /// show it, and while the memory is in use nobody writes to the range in another way. [`Segment::is_lost`] says that the
    /// file has been cut short, and that the memory is no part of it any more. Of a store that is open for reading only, it is a copy: what is
    /// stored in it is seen by nobody else.
    ///
    /// # Errors
    /// `Unsupported` where the store is no file of this host; the system's.
    fn map(&self, offset: StoreOffset, len_bytes: usize) -> Result<Segment> {
        let _ = (offset, len_bytes);
        Err(Error::new(ErrorKind::Unsupported, "no memory can be shared with this store").at_path(self.path()))
    }
}

/// Implements [`Store`] for an enum whose every variant has one store: each call goes to the store that is inside.
///
/// ```ignore
/// enum Either { One(OneStore), Other(OtherStore) }
/// spile_core::store_of_stores!(Either: One, Other);
/// ```
#[macro_export]
macro_rules! store_of_stores {
    ($any:ident: $($variant:ident),+) => {
        impl $crate::Store for $any {
            fn info(&self) -> $crate::StoreInfo {
                match self { $(Self::$variant(store) => store.info(),)+ }
            }

            fn len_bytes(&self) -> u64 {
                match self { $(Self::$variant(store) => store.len_bytes(),)+ }
            }

            fn path(&self) -> &::std::path::Path {
                match self { $(Self::$variant(store) => store.path(),)+ }
            }

            fn set_path(&self, path: &::std::path::Path) {
                match self { $(Self::$variant(store) => store.set_path(path),)+ }
            }

            fn has_failed_sync(&self) -> bool {
                match self { $(Self::$variant(store) => store.has_failed_sync(),)+ }
            }

            fn set_copy(&self, is_copy: bool) {
                match self { $(Self::$variant(store) => store.set_copy(is_copy),)+ }
            }

            async fn read_at(&self, offset: $crate::StoreOffset, into: &$crate::Segments, via: $crate::Via) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.read_at(offset, into, via).await,)+ }
            }

            async fn write_at(&self, offset: $crate::StoreOffset, from: &$crate::Segments, via: $crate::Via) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.write_at(offset, from, via).await,)+ }
            }

            async fn sync(&self) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.sync().await,)+ }
            }

            async fn zero_range(&self, offset: $crate::StoreOffset, len_bytes: u64) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.zero_range(offset, len_bytes).await,)+ }
            }

            async fn punch_hole(&self, offset: $crate::StoreOffset, len_bytes: u64) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.punch_hole(offset, len_bytes).await,)+ }
            }

            async fn set_len(&self, len_bytes: u64) -> $crate::Result<()> {
                match self { $(Self::$variant(store) => store.set_len(len_bytes).await,)+ }
            }

            async fn look_for_growth(&self) -> $crate::Result<u64> {
                match self { $(Self::$variant(store) => store.look_for_growth().await,)+ }
            }

            async fn extent_at(&self, offset: $crate::StoreOffset) -> $crate::Result<$crate::StoreExtent> {
                match self { $(Self::$variant(store) => store.extent_at(offset).await,)+ }
            }

            async fn extents_at(
                &self,
                offset: $crate::StoreOffset,
                len_bytes: u64,
                max_runs: usize,
            ) -> $crate::Result<Vec<$crate::StoreExtent>> {
                match self { $(Self::$variant(store) => store.extents_at(offset, len_bytes, max_runs).await,)+ }
            }

            async fn taken_bytes(&self) -> Option<u64> {
                match self { $(Self::$variant(store) => store.taken_bytes().await,)+ }
            }

            fn file_identity(&self) -> Option<[u8; 16]> {
                match self { $(Self::$variant(store) => store.file_identity(),)+ }
            }

            fn map(&self, offset: $crate::StoreOffset, len_bytes: usize) -> $crate::Result<$crate::Segment> {
                match self { $(Self::$variant(store) => store.map(offset, len_bytes),)+ }
            }
        }
    };
}

/// How a store is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpenMode {
    /// Reads only.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// Where an image finds the stores of its chain.
pub trait Files: Send + Sync + 'static {
    /// The kind of store found here.
    type Store: Store;

    /// Opens the store at `at`. An open for writing locks a file against other writers (`Busy`).
    fn open(&self, at: &Locator, mode: OpenMode) -> impl Future<Output = Result<Self::Store>>;

    /// Opens a small file of Spile's own at `path`, such as a note beside a disk; `None` when there is none. A link is not followed. What somebody
    /// else has put there is passed over, with a line in the log: only root and this user make such files, and so may the owner of the
    /// file `beside`.
    ///
    /// # Errors
    /// As [`Files::open`].
    fn open_own(
        &self,
        path: &Path,
        mode: OpenMode,
        beside: Option<&Path>,
    ) -> impl Future<Output = Result<Option<Self::Store>>> {
        let _ = beside;
        async move {
            match self.open(&path.into(), mode).await {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                opened => opened.map(Some),
            }
        }
    }

    /// Creates a file of `len_bytes` that reads as zeroes, and opens it for writing. Its name is durable then.
    ///
    /// # Errors
    /// `Exists` when there is something at `path`; else the system's. A file that could not be finished is removed.
    fn create(&self, path: &Path, len_bytes: u64) -> impl Future<Output = Result<Self::Store>>;

    /// Gives a file another name, in the place of what has that name. Once it returns, the change is durable; after a
    /// crash the file has one of the two names.
    ///
    /// # Errors
    /// The system's.
    fn rename(&self, from: &Path, to: &Path) -> impl Future<Output = Result<()>>;

    /// Gives the file at `from` a second name. Once it returns, that name is durable.
    ///
    /// # Errors
    /// `Exists` when there is something at `to`; `Unsupported` where the file system has no second names; else the system's.
    fn link(&self, from: &Path, to: &Path) -> impl Future<Output = Result<()>>;

    /// True when `path` names the file of `store`; false when it names another file, or none.
    ///
    /// # Errors
    /// The system's.
    fn is_at(&self, store: &Self::Store, path: &Path) -> impl Future<Output = Result<bool>>;

    /// Gives the file of `store`, which is at `from`, the name `to`, durably, in the place of the file of `over`, which has that name; `None`: nothing has
    /// it. No other file loses a name: when one of the two names is not that of its file, before or at the moment of the change, nothing is changed.
    ///
    /// # Errors
    /// `NotFound` or `Busy` when a name is not that of its file; `Exists` when nothing should have the name `to`; the system's.
    fn rename_file(
        &self,
        (store, from): (&Self::Store, &Path),
        (to, over): (&Path, Option<&Self::Store>),
    ) -> impl Future<Output = Result<()>> {
        async move {
            expect(self, store, from).await?;
            match over {
                Some(over) => expect(self, over, to).await?,
                None if self.canonical(to).await.is_ok() => return Err(taken(to)),
                None => {}
            }
            self.rename(from, to).await
        }
    }

    /// Gives the file of `store`, which is at `from`, the second name `to`, durably.
    ///
    /// # Errors
    /// `NotFound` or `Busy` when it is not at `from`; else those of [`Files::link`].
    fn link_file(&self, (store, from): (&Self::Store, &Path), to: &Path) -> impl Future<Output = Result<()>> {
        async move {
            expect(self, store, from).await?;
            self.link(from, to).await
        }
    }

    /// Removes the name `path` of the file of `store`, durably.
    ///
    /// # Errors
    /// `NotFound` or `Busy` when it is not that file's name; the system's.
    fn remove_file(&self, store: &Self::Store, path: &Path) -> impl Future<Output = Result<()>> {
        async move {
            expect(self, store, path).await?;
            self.remove(path).await
        }
    }

    /// Gives the file of `to` the owner, group and mode of the file of `from`, as far as this user may. It is for a file that is to take
    /// the other one's place. Both are open: their names may lead elsewhere.
    ///
    /// # Errors
    /// The system's, but for the right to change an owner.
    fn copy_access(&self, from: &Self::Store, to: &Self::Store) -> impl Future<Output = Result<()>> {
        let _ = (from, to);
        async { Ok(()) }
    }

    /// Opens the file of `store` in another mode, whatever its path names by now. The lock on it is converted, and at no moment
    /// could another process take it. A store that was opened without a lock gets none.
    ///
    /// Afterwards `store` can be read as before. It takes no writes any more; and while it is open for writing here, it
    /// cannot be reopened again. When the store that writes is dropped first, `store` has a reader's lock again.
    ///
    /// # Errors
    /// `Busy` when others have the file open and the new mode leaves no room for them, and for a store that was
    /// reopened for writing before; what is known of a lost lock or a file that was cut short; else the system's. Then `store` can be read and
    /// reopened as before, but a store that was to be reopened for reading may take no writes any more.
    fn reopen(&self, store: &Self::Store, mode: OpenMode) -> impl Future<Output = Result<Self::Store>>;

    /// Removes a file's name, durably.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, path: &Path) -> impl Future<Output = Result<()>>;

    /// Makes the names durable that the folder of `path` has now: a process that was killed may have changed one, and not come so far.
    ///
    /// # Errors
    /// The system's.
    fn sync_names(&self, path: &Path) -> impl Future<Output = Result<()>> {
        let _ = path;
        async { Ok(()) }
    }

    /// The path with every link and `..` resolved, so that policy can be checked on it.
    fn canonical(&self, path: &Path) -> impl Future<Output = Result<PathBuf>>;
}

/// Refuses a name that is not that of the file of `store`.
async fn expect<F: Files + ?Sized>(files: &F, store: &F::Store, path: &Path) -> Result<()> {
    if files.is_at(store, path).await? {
        return Ok(());
    }
    Err(match files.canonical(path).await {
        Ok(_) => exchanged(path),
        Err(_) => lost(path),
    })
}

/// The error of a path where another file lies than the one that is open.
pub fn exchanged(path: &Path) -> Error {
    Error::new(ErrorKind::Busy, "another file was put in the place of the one that is open")
        .at_path(path)
        .hint("nothing was changed: put the right file there again")
}

/// The error of a file that is open, and not at its path.
pub fn lost(path: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "the file is not at its path any more").at_path(path).hint("give it its name back")
}

/// The error of a name that something has, and nothing should have.
pub fn taken(path: &Path) -> Error {
    Error::new(ErrorKind::Exists, "there is a file of this name already")
        .at_path(path)
        .hint("remove it or choose another name")
}

/// What the world around gives: injected, so that a simulation can be repeated.
pub trait Env: Send + Sync + 'static {
    /// Seconds since 1970-01-01 UTC.
    fn now_unix_s(&self) -> u64;

    /// Sixteen random bytes.
    fn random_16(&self) -> [u8; 16];

    /// The identity of this boot of the host: it changes exactly when the page cache was lost
    /// (`/proc/sys/kernel/random/boot_id`).
    fn boot_id(&self) -> [u8; 16];

    /// Runs `work` beside the requests, on the worker of the caller. Returns false where nothing runs it: then it is dropped,
    /// and whoever needs what it would have done must do that itself.
    fn spawn(&self, work: Work) -> bool {
        drop(work);
        false
    }
}

/// Work that no request waits for ([`Env::spawn`]).
pub type Work = Pin<Box<dyn Future<Output = ()>>>;

/// Lets time pass for code that knows neither an engine nor a simulator.
pub trait Timer: Send + Sync + 'static {
    /// Ends after `time`, at the earliest. It is to be polled on a worker's thread.
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>>;

    /// The time since some moment in the past, in nanoseconds. It never goes back, and [`Timer::sleep`] goes by it.
    fn now_ns(&self) -> u64 {
        crate::metrics::now_ns()
    }
}
