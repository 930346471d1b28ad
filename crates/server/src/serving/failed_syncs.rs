//! Failed syncs, remembered for the servers that come after this one.
//!
//! When a sync fails, data that a guest believes to be durable, or will after its flush, may be lost. The kernel says so once:
//! a server that opens the file anew would flush with success, and the guest would never learn of it. So a server that sees a
//! failed sync writes a *mark* before anybody gets an answer. A server that opens a store with a mark has every flush of
//! that disk fail, as the server before it did.
//!
//! A mark is a small file in the folder `failed-syncs` beside the control sockets, named after the store's identity: for a file the
//! file system and the number of the file in it. It is void after a reboot of the host, when the file was made anew, and when an
//! operator accepts the loss ([`accept`]): of what was named, and of nothing else. A parent's mark stays when a child's is
//! accepted, because other children need it.
//!
//! A Xen disk's process remembers its own failed syncs in its guest's journal, because a guest that connects anew begins anew. It
//! writes no marks, and serves no disk that has one.

use std::fmt;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Statx, StatxFlags, makedev, statx};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spile_core::{Env, Error, ErrorKind, Locator, Result, Store};
use spile_engine::OsEnv;
use spile_image::layer::Layer as _;
use spile_image::{Graph, GraphLayer};
use spile_life::motion::Order;
use spile_nbd_wire::uri::NbdUri;
use spile_store::own::read_note;
use spile_store::{AnyStore, FileId, HostStore, canonical_address, own_folder};

use super::api::discovery;
use super::disks::ServedDisk;
use super::events::{self, Said, What};

/// A sync that has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedSync {
    /// The store that was to be made durable: a path or a URI.
    pub path: String,
    /// Why the sync failed.
    pub errno: i32,
    /// When, in seconds since 1970-01-01 UTC.
    pub at_unix_s: u64,
}

impl FailedSync {
    fn now(path: String, errno: i32) -> Self {
        Self { path, errno, at_unix_s: OsEnv.now_unix_s() }
    }
}

impl fmt::Display for FailedSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "{}: a sync has failed: {why}; what was written before it may be lost", self.path)
    }
}

/// A failed sync as a file.
#[derive(Debug, Serialize, Deserialize)]
struct Mark {
    /// The boot of the host: another boot has lost the page cache, and what the guest believes with it.
    boot: String,
    /// When the file was made, in seconds and nanoseconds: a number in a file system is given again. `None` for a device: its node
    /// in `/dev` is made again while the device stays the same.
    born: Option<(i64, u32)>,
    sync: FailedSync,
}

/// The server of an NBD export was gone, with writes of this host that were not flushed, and what has become of them is not known. Kept beside the marks, in a
/// folder of its own.
#[derive(Debug, Serialize, Deserialize)]
struct Doubt {
    boot: String,
    /// Nothing is lost when the export is still kept by this ([`kept`]).
    kept: String,
    /// What is lost else.
    sync: FailedSync,
}

/// The folder of marks.
pub(super) struct Marks(PathBuf);

/// No mark is longer.
const MOST_MARK_BYTES: u64 = 64 << 10;

impl Marks {
    fn of_host() -> Result<Self> {
        Ok(Self(discovery::folder()?.join("failed-syncs")))
    }

    /// The folder of [`Doubt`]s.
    fn of_doubts() -> Result<Self> {
        Ok(Self(discovery::folder()?.join("unflushed")))
    }

    /// The folder of what is known of disks that move between hosts ([`super::passages`]).
    pub(super) fn of_passages() -> Result<Self> {
        Ok(Self(discovery::folder()?.join("passages")))
    }

    /// Which folder this is, and when something was last noted in it or removed: an answer before and after means that no sync has failed in between, and that no
    /// loss was accepted. It is made where there is none.
    fn state(&self) -> Option<String> {
        own_folder::make(&self.0).ok()?;
        let stat = fs::metadata(&self.0).ok()?;
        Some(format!("{:x}-{}-{}.{:09}", stat.dev(), stat.ino(), stat.mtime(), stat.mtime_nsec()))
    }

    fn place(&self, key: &str) -> PathBuf {
        self.0.join(format!("{key}.json"))
    }

    /// Writes a mark, unless there is one that counts: the first failure is the one to know.
    fn write(&self, key: &str, born: Option<(i64, u32)>, sync: FailedSync) -> Result<()> {
        match self.find(key, born) {
            Some(_) => Ok(()),
            None => self.put(key, &Mark { boot: boot(), born, sync }),
        }
    }

    pub(super) fn put(&self, key: &str, what: &impl Serialize) -> Result<()> {
        let (place, new) = (self.place(key), self.place(&format!("{key}.{}", std::process::id())));
        let text = serde_json::to_vec(what).map_err(|e| Error::io("write", e.into()))?;
        own_folder::make(&self.0)?;
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &place))
            .map_err(|source| Error::io("write", source).at_path(&place))
    }

    /// The failed sync of the store of this key, if its mark counts.
    fn find(&self, key: &str, born: Option<(i64, u32)>) -> Option<FailedSync> {
        let mark: Mark = self.read(key)?;
        (mark.boot == boot() && mark.born == born).then_some(mark.sync)
    }

    /// The doubt of the export of this key, if it counts.
    fn doubt(&self, key: &str) -> Option<Doubt> {
        self.read(key).filter(|doubt: &Doubt| doubt.boot == boot())
    }

    pub(super) fn read<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let text = read_note(&self.place(key), MOST_MARK_BYTES).ok()??;
        serde_json::from_slice(&text).ok()
    }

    /// The failed sync of a store, if it has a mark that counts.
    fn of_store(&self, store: &AnyStore) -> Option<FailedSync> {
        let (key, born) = known(store)?;
        self.find(&key, born).map(|failed| FailedSync { path: place(store), ..failed })
    }

    pub(super) fn remove(&self, key: &str) -> Result<()> {
        match fs::remove_file(self.place(key)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", error).at_path(&self.place(key)))
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn boot() -> String {
    OsEnv.boot_id().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A store's key, and when it was made.
pub(super) type Known = (String, Option<(i64, u32)>);

fn key_of_file(id: FileId) -> String {
    match id {
        FileId::File { device, inode } => format!("file-{device:x}-{inode}"),
        FileId::BlockDevice(number) => format!("device-{number:x}"),
    }
}

/// The key of an NBD export: a URI may be too long for a name, so it is a checksum (FNV-1a) of its address and export. An export that is an order
/// about a disk is that disk: it is opened by its name the next time.
fn key_of_export(uri: &str) -> String {
    let place = |NbdUri { address, export, .. }| {
        let disk = Order::of_export(&export).map_or(&export[..], |(_, disk)| disk);
        format!("{} {disk}", canonical_address(&address))
    };
    let parsed = uri.parse().map(place);
    let text = parsed.unwrap_or_else(|_| uri.to_owned());
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("nbd-{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// The key of a store; `None` when it is in memory, and gone with its process.
fn key_of(store: &AnyStore) -> Option<String> {
    match store {
        AnyStore::Nbd(nbd) => Some(key_of_export(&nbd.path().display().to_string())),
        _ => store.file_id().map(key_of_file),
    }
}

/// The key of a store, and when it was made.
pub(super) fn known(store: &AnyStore) -> Option<Known> {
    let key = key_of(store)?;
    let born = match store {
        AnyStore::Nbd(_) => None,
        _ => look(rustix::fs::CWD, store.path()).as_ref().and_then(born),
    };
    Some((key, born))
}

/// What is known of a file without waiting for a file server.
fn look(folder: BorrowedFd<'_>, path: &Path) -> Option<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(folder, path, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME).ok()
}

fn is_device(stat: &Statx) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.stx_mode.into()) == rustix::fs::FileType::BlockDevice
}

/// When a file was made, as far as its file system tells; never for a device.
fn born(stat: &Statx) -> Option<(i64, u32)> {
    let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0 && !is_device(stat);
    has_birth.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}

/// The file at `path` in `folder`, or `folder` itself when the path is empty.
fn known_at(folder: BorrowedFd<'_>, path: &Path) -> Option<Known> {
    let stat = look(folder, path)?;
    let id = match is_device(&stat) {
        true => FileId::BlockDevice(makedev(stat.stx_rdev_major, stat.stx_rdev_minor)),
        false => {
            let device = makedev(stat.stx_dev_major, stat.stx_dev_minor);
            FileId::File { device, inode: stat.stx_ino }
        }
    };
    Some((key_of_file(id), born(&stat)))
}

/// By what a disk's bytes are kept, whatever becomes of its server: this boot of the host, the files of its leaf, and that no sync was seen to fail
/// since. What was answered is in these files, or in the kernel's cache of them. `None` when they are no files whose identity is certain, such as devices, memory and what lies
/// on another host.
pub fn kept(disk: &ServedDisk) -> Option<String> {
    let graph = disk.graph_now()?;
    let mut text = format!("{} {}", boot(), Marks::of_host().ok()?.state()?);
    for store in stores_of(&graph.handles()[0]) {
        let Some(FileId::File { device, .. }) = store.file_id() else { return None };
        let identity = u128::from_be_bytes(store.file_identity()?);
        text += &format!(" {device:x}-{identity:032x}");
    }
    Some(text)
}

/// From now on this process writes a mark for each sync that fails. Only the first call counts.
pub fn remember() {
    spile_engine::on_failed_sync(|fd, errno| {
        let name = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let path = name.map_or_else(|_| "a file".to_owned(), |name| name.display().to_string());
        note(known_at(fd, Path::new("")), path, errno);
    });
    spile_store::on_lost_export(|uri| {
        note(Some((key_of_export(uri), None)), uri.to_owned(), rustix::io::Errno::IO.raw_os_error())
    });
    spile_store::on_doubtful_export(|uri, kept| {
        let key = key_of_export(uri);
        let noted = Marks::of_doubts().and_then(|doubts| match kept {
            Some(kept) => {
                let sync = FailedSync::now(uri.to_owned(), rustix::io::Errno::IO.raw_os_error());
                doubts.put(&key, &Doubt { boot: boot(), kept: kept.to_owned(), sync })
            }
            None => doubts.remove(&key),
        });
        if let Err(error) = &noted {
            tracing::error!("{uri}: what becomes of writes that are not flushed cannot be noted: {error}");
        }
        noted.is_ok()
    });
}

fn note(known: Option<Known>, path: String, errno: i32) {
    let sync = FailedSync::now(path, errno);
    tracing::error!("{sync}. Every flush of its disk fails from now on, until `spile accept-loss`");
    events::tell(None, What::SyncFailed(Said { message: sync.to_string() }));
    let unknown = || Error::new(ErrorKind::Io, "the file cannot be identified");
    let written = known.ok_or_else(unknown).and_then(|(key, born)| Marks::of_host()?.write(&key, born, sync));
    if let Err(error) = written {
        tracing::error!("a server that is started after this one will not know of it: {error}");
    }
}

/// True when `fd` is a file of the disk, or of one that cannot be told. A process syncs other files as well: copies and backups of the disk.
pub fn is_file_of(graph: &Graph<HostStore>, fd: BorrowedFd<'_>) -> bool {
    known_at(fd, Path::new("")).is_none_or(|(key, _)| stores(graph).any(|store| key_of(store).as_ref() == Some(&key)))
}

/// True when the export at `uri` is one of the disk's, and not that of a copy or a backup.
pub fn is_export_of(graph: &Graph<HostStore>, uri: &str) -> bool {
    let key = key_of_export(uri);
    stores(graph).any(|store| key_of(store).as_ref() == Some(&key))
}

/// Where a store is now.
fn place(store: &AnyStore) -> String {
    store.path().display().to_string()
}

/// The stores of all layers, the leaf's first.
pub(super) fn stores(graph: &Graph<HostStore>) -> impl Iterator<Item = &AnyStore> {
    graph.handles().iter().flat_map(|layer| stores_of(layer))
}

/// The store of an image, and that of its data where they lie in another file.
pub(super) fn stores_of(layer: &GraphLayer<HostStore>) -> impl Iterator<Item = &AnyStore> {
    let (image, data) = (layer.image().store(), layer.image().data_store());
    let data = (!std::ptr::eq(image, data)).then_some(&**data);
    std::iter::once(&**image).chain(data)
}

/// Finds the marks of all layers of a disk, the leaf first. Each failed sync has the place where its layer is now.
pub fn marked(graph: &Graph<HostStore>) -> Vec<FailedSync> {
    match Marks::of_host() {
        Ok(marks) => stores(graph).filter_map(|store| marks.of_store(store)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Finds the marks of a disk that was just opened for writing. When there is one, every flush of the disk fails from now on.
pub fn recall(graph: &Graph<HostStore>) -> Vec<FailedSync> {
    if let Err(error) = judge_doubts(graph) {
        tracing::error!(
            "whether a server before this one has left writes to the export that are not flushed cannot be looked up or noted: {error}"
        );
    }
    let found = marked(graph);
    // A flush goes to the leaf. What a parent has lost concerns it as well.
    if let (Some(failed), Some(leaf)) = (found.first(), stores(graph).next()) {
        leaf.recall_failed_sync(failed.errno);
    }
    found
}

/// A server before this one did not know what had become of writes that were not flushed. Either they are safe, and it is this server that keeps account of them from now on,
/// or they are lost.
fn judge_doubts(graph: &Graph<HostStore>) -> Result<()> {
    for store in stores(graph) {
        let (AnyStore::Nbd(nbd), Some((key, born))) = (store, known(store)) else { continue };
        // Only servers of exports leave such notes: a disk of files needs no folder for them.
        let (marks, doubts) = (Marks::of_host()?, Marks::of_doubts()?);
        let Some(doubt) = doubts.doubt(&key) else { continue };
        // The note stays until all is flushed.
        if !nbd.take_on(&doubt.kept) {
            marks.write(&key, born, doubt.sync)?;
            doubts.remove(&key)?;
        }
    }
    Ok(())
}

/// All that the leaf holds was written anew and flushed since: a sync of it that failed before does not count any more.
///
/// # Errors
/// The system's, when a mark cannot be removed.
pub fn forget(graph: &Graph<HostStore>) -> Result<()> {
    let marks = Marks::of_host()?;
    stores_of(&graph.handles()[0]).filter_map(known).try_for_each(|(key, _)| marks.remove(&key))
}

/// The failed sync for which flushes of the disk fail now, if there is one.
pub fn find(graph: &Graph<HostStore>) -> Option<FailedSync> {
    let errno = stores(graph).find_map(AnyStore::failed_sync)?;
    let path = || stores(graph).next().map_or_else(String::new, place);
    Some(marked(graph).into_iter().next().unwrap_or_else(|| FailedSync { path: path(), errno, at_unix_s: 0 }))
}

/// What came of accepting a loss.
#[derive(Debug)]
pub struct Accepted {
    /// The failed sync, if there was one.
    pub failed_sync: Option<FailedSync>,
    /// Those of parents, for which flushes of the disk still fail. Other children depend on these marks as well, so each
    /// is accepted by its own name.
    pub remaining: Vec<FailedSync>,
}

/// An operator accepts that data of a disk may be lost: the leaf has no mark any more. Flushes of the disk succeed again, unless a
/// parent has a mark.
///
/// # Errors
/// The system's, when the mark cannot be removed.
pub fn accept(graph: &Graph<HostStore>) -> Result<Accepted> {
    let failed_sync = find(graph);
    let own = stores_of(&graph.handles()[0]).count();
    let stores: Vec<_> = stores(graph).collect();
    let remaining = match (Marks::of_host(), &stores[..]) {
        (Ok(marks), [leaf, ..]) => {
            for data in &stores[1..own] {
                if let Some((key, _)) = known(data) {
                    marks.remove(&key)?;
                }
                data.forget_failed_sync();
            }
            accept_leaf(&marks, leaf, &stores[own..])?
        }
        _ => {
            stores.into_iter().for_each(AnyStore::forget_failed_sync);
            Vec::new()
        }
    };
    Ok(Accepted { failed_sync: failed_sync.filter(|failed| !remaining.contains(failed)), remaining })
}

/// Accepts the loss of a leaf. Returns the failed syncs of its parents.
fn accept_leaf(marks: &Marks, leaf: &AnyStore, parents: &[&AnyStore]) -> Result<Vec<FailedSync>> {
    if let Some((key, _)) = known(leaf) {
        marks.remove(&key)?;
    }
    let mut remaining = Vec::new();
    for parent in parents {
        match marks.of_store(parent) {
            Some(failed) => remaining.push(failed),
            None => parent.forget_failed_sync(),
        }
    }
    // In one step: guests go on flushing meanwhile, and no flush may succeed while a parent has a mark.
    match remaining.first() {
        Some(failed) => leaf.recall_failed_sync(failed.errno),
        None => leaf.forget_failed_sync(),
    }
    Ok(remaining)
}

/// As [`accept`], for a file, a device or an NBD export that no server has as a disk. Its parents are not looked at.
///
/// # Errors
/// The system's, when there is no such file or its mark cannot be removed.
pub fn accept_at(at: &Locator) -> Result<Option<FailedSync>> {
    let known = match at {
        Locator::Nbd(uri) => Some((key_of_export(uri), None)),
        Locator::Path(path) => {
            fs::metadata(path).map_err(|source| Error::io("find", source).at_path(path))?;
            known_at(rustix::fs::CWD, path)
        }
        Locator::Null(_) | Locator::Mem(_) => None,
    };
    let Some((key, born)) = known else { return Ok(None) };
    let marks = Marks::of_host()?;
    let doubts = Marks::of_doubts()?;
    let found = marks.find(&key, born).or_else(|| doubts.doubt(&key).map(|doubt| doubt.sync));
    marks.remove(&key)?;
    doubts.remove(&key)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::thread;

    use spile_core::OpenMode;
    use spile_image::layer::Identity;
    use spile_store::{CacheMode, FileStore};

    use super::*;

    fn sync(errno: i32) -> FailedSync {
        FailedSync { path: "/d/a.raw".to_owned(), errno, at_unix_s: 7 }
    }

    #[test]
    fn a_mark_counts_in_its_boot_and_for_its_file_and_the_first_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Marks(dir.path().join("failed-syncs"));
        let born = Some((5, 6));
        assert_eq!(marks.find("k", born), None);
        marks.write("k", born, sync(5)).unwrap();
        marks.write("k", born, sync(28)).unwrap();
        assert_eq!(marks.find("k", born), Some(sync(5)));
        assert_eq!((marks.find("k", None), marks.find("other", born)), (None, None));
        marks.write("k", Some((9, 9)), sync(28)).unwrap();
        assert_eq!(marks.find("k", Some((9, 9))), Some(sync(28)), "the mark of a file that is gone stays");
        let text = fs::read_to_string(marks.place("k")).unwrap();
        fs::write(marks.place("k"), text.replace(&boot(), "another boot")).unwrap();
        assert_eq!(marks.find("k", Some((9, 9))), None);
        marks.remove("k").unwrap();
        marks.remove("k").unwrap();
    }

    /// Whoever has heard the one and then the other knows that a sync has failed in between.
    #[test]
    fn a_mark_and_its_end_change_what_is_said_of_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Marks(dir.path().join("failed-syncs"));
        let before = marks.state().unwrap();
        assert_eq!(marks.state().as_ref(), Some(&before));
        let changed = |change: &dyn Fn()| {
            // Times of files go on in steps of some milliseconds.
            thread::sleep(std::time::Duration::from_millis(30));
            let before = marks.state();
            change();
            assert_ne!(marks.state(), before);
        };
        changed(&|| marks.write("k", None, sync(5)).unwrap());
        changed(&|| marks.remove("k").unwrap());
        assert!(marks.doubt("k").is_none());
    }

    #[test]
    fn a_descriptor_and_a_path_give_the_same_key() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let id = FileId::of(&file.as_file().metadata().unwrap());
        let known = known_at(file.as_file().as_fd(), Path::new(""));
        assert_eq!(known, known_at(rustix::fs::CWD, file.path()));
        assert_eq!(known.map(|(key, _)| key), Some(key_of_file(id)));
    }

    /// Guests flush while an operator accepts the loss of a leaf.
    #[test]
    fn no_flush_succeeds_while_a_parent_has_a_failed_sync() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Marks(dir.path().join("failed-syncs"));
        let [leaf, parent] = ["leaf", "parent"].map(|name| {
            let path = dir.path().join(name);
            fs::write(&path, [0; 512]).unwrap();
            AnyStore::File(FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Page).unwrap())
        });
        let (key, born) = known(&parent).unwrap();
        marks.write(&key, born, sync(28)).unwrap();
        leaf.recall_failed_sync(5);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let flush = || (!is_over.load(Relaxed)).then(|| leaf.failed_sync());
            let flushes = scope.spawn(move || std::iter::from_fn(flush).all(|failed| failed.is_some()));
            let remaining: Vec<_> = (0..1000).map(|_| accept_leaf(&marks, &leaf, &[&parent]).unwrap()).collect();
            is_over.store(true, Relaxed);
            assert!(flushes.join().unwrap(), "a flush succeeds though its data may be lost");
            assert!(remaining.iter().all(|remaining| remaining.len() == 1 && remaining[0].errno == 28));
        });
        assert_eq!(leaf.failed_sync(), Some(28));
        marks.remove(&key).unwrap();
        assert!(accept_leaf(&marks, &leaf, &[&parent]).unwrap().is_empty());
        assert_eq!(leaf.failed_sync(), None);
    }

    #[test]
    fn the_age_of_a_devices_node_does_not_matter() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut stat = look(rustix::fs::CWD, file.path()).unwrap();
        stat.stx_mode = rustix::fs::FileType::BlockDevice.as_raw_mode() as u16;
        assert_eq!(born(&stat), None);
    }

    #[test]
    fn an_export_has_one_key_whatever_its_uri() {
        assert_eq!(key_of_export("nbd://h/x"), key_of_export("nbd://h:10809/x"));
        assert_ne!(key_of_export("nbd://h/x"), key_of_export("nbd://h/y"));
        assert_eq!(key_of_export("nbd://HOST/x"), key_of_export("nbds://host/x"));
        let order = Order::GoOn { id: Identity([1; 16]), link: Identity([2; 16]) }.export("x");
        assert_eq!(key_of_export(&format!("nbd://h/{order}")), key_of_export("nbd://h/x"));
        let here = std::env::current_dir().unwrap();
        let whole = format!("nbd+unix:///x?socket={}/s", here.display());
        assert_eq!(key_of_export("nbd+unix:///x?socket=s"), key_of_export(&whole));
    }
}
