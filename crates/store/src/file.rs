//! [`FileStore`]: a file or block device, directly and through the page cache.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::OFlags;
use spile_core::{
    Error, ErrorKind, OpenMode, PathCell, Result, ResultExt, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via,
};
use spile_engine::{DirectAlign, FileKey, RawFile, run_blocking, spawn};
use spile_mem::Segment;

use crate::behind::{Behind, Step};
use crate::cut::{Cut, cut_short};
use crate::device::{device_len, device_punches};
use crate::files::CacheMode;
use crate::folder::{Folder, open_kernels};
use crate::held::HeldLock;
use crate::opening::{check_name, file_punches, open_direct};
use crate::sync_gate::{SyncGate, Turn};
use crate::times::FileTimes;

/// Zeroes written at a time where the file system cannot zero a range itself.
const ZERO_CHUNK_BYTES: usize = 1 << 20;

/// A file or block device. Clones are the same store. It is locked against other writers while it is open, in
/// QEMU's scheme ([`RawFile::lock`]), unless it was opened without. When the lock is lost, nothing more is written.
#[derive(Clone)]
pub struct FileStore {
    inner: Arc<Inner>,
}

/// What tells a file or block device from every other on this host, whatever its path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileId {
    /// A file.
    File {
        /// The device number of its file system.
        device: u64,
        /// Its number in the file system.
        inode: u64,
    },
    /// A block device, by its own device number.
    BlockDevice(u64),
}

impl FileId {
    /// The identity of the file that `stat` describes.
    pub fn of(stat: &std::fs::Metadata) -> Self {
        match stat.file_type().is_block_device() {
            true => Self::BlockDevice(stat.rdev()),
            false => Self::File { device: stat.dev(), inode: stat.ino() },
        }
    }
}

struct Inner {
    path: Arc<PathCell>,
    id: FileId,
    found: FileTimes,
    info: StoreInfo,
    is_device: bool,
    direct: RawFile,
    cached: RawFile,
    len: AtomicU64,
    gate: SyncGate,
    lock: HeldLock,
    cut: Cut,
    /// For what is written once: all of [`CacheMode::Once`], and a copy ([`Store::set_copy`]) where it goes through the page cache.
    behind: Behind,
    is_once: bool,
    is_copy: AtomicBool,
    /// The store that gave its lock up for this one, which writes. It gets a reader's lock again when this store ends first.
    older: Weak<Inner>,
}

impl Inner {
    /// The descriptors that are locked when the store is.
    fn locked_files(&self) -> Vec<&RawFile> {
        let beside = self.direct.is_direct().then_some(&self.direct);
        std::iter::once(&self.cached).chain(beside).collect()
    }

    /// Takes the lock for reading from the descriptors `writer` of the same file, which have it for writing.
    fn lock_for_reading(&self, writer: &[&RawFile]) -> Result<()> {
        let files = self.locked_files();
        files[0].take_lock_over(OpenMode::ReadOnly, writer, OpenMode::ReadWrite)?;
        files[1..].iter().try_for_each(|file| file.lock_beside(OpenMode::ReadOnly))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(older) = self.older.upgrade().filter(|_| !self.lock.is_away()) else { return };
        older.lock.take_back(|| older.lock_for_reading(&self.locked_files()));
    }
}

impl FileStore {
    /// Opens what is at `path`. Blocks for as long as the file system takes, so a worker calls [`OsFiles`](crate::OsFiles) instead.
    ///
    /// # Errors
    /// `Busy` when another process has it open and one of the two writes; `Unsupported` or `Denied` when it cannot be
    /// locked; `InvalidInput` when it is neither a file nor a block device; else errors of the system.
    pub fn open(path: &Path, mode: OpenMode, cache: CacheMode) -> Result<FileStore> {
        Self::open_inner(path, mode, cache, true).at_path(path)
    }

    /// As [`FileStore::open`], but takes no locks: nothing keeps other writers out.
    ///
    /// # Errors
    /// As [`FileStore::open`], but for those of locks.
    pub fn open_unlocked(path: &Path, mode: OpenMode, cache: CacheMode) -> Result<FileStore> {
        Self::open_inner(path, mode, cache, false).at_path(path)
    }

    fn open_inner(path: &Path, mode: OpenMode, cache: CacheMode, locks: bool) -> Result<FileStore> {
        let place = Folder::find(path)?;
        let file = place.open_flags(mode, OFlags::empty())?;
        let stat = file.metadata().map_err(|source| Error::io("stat", source))?;
        let file = RawFile::new(file.into());
        let locked = locks.then_some(mode);
        locked.map_or(Ok(()), |mode| file.lock(mode))?;
        if locked == Some(OpenMode::ReadWrite) {
            check_name(&place, FileId::of(&stat))?;
        }
        // What was opened has this path, and a link that led to it may lead elsewhere by now.
        let path = if place.is_elsewhere() { place.path() } else { path.to_owned() };
        let again = |flags| place.open_flags(mode, flags);
        Self::finish(PathCell::new(path), again, mode, cache, file, &stat, locked)
    }

    /// The store of `file`, which was just made under `name` in `folder`: its path is `path`.
    pub(crate) fn made(
        file: File,
        (folder, name): (&Folder, &OsStr),
        path: &Path,
        cache: CacheMode,
        locks: bool,
    ) -> Result<FileStore> {
        let mode = OpenMode::ReadWrite;
        let stat = file.metadata().map_err(|source| Error::io("stat", source))?;
        let file = RawFile::new(file.into());
        let locked = locks.then_some(mode);
        locked.map_or(Ok(()), |mode| file.lock(mode)).at_path(path)?;
        let again = |flags| folder.open_flags(name, mode, flags);
        Self::finish(PathCell::new(path.to_owned()), again, mode, cache, file, &stat, locked).at_path(path)
    }

    /// Gives this file the owner, group and mode of `from`, both by their descriptors.
    pub(crate) fn copy_access_of(&self, from: &FileStore) -> Result<()> {
        let done = crate::folder::copy_access(from.inner.cached.as_fd(), self.inner.cached.as_fd());
        done.map_err(|source| Error::io("copy owner and mode", source)).at_path(self.inner.path.get())
    }

    /// Gives the file, which is at `from`, a second name.
    pub(crate) fn link(&self, from: (&Folder, &OsStr), to: (&Folder, &OsStr)) -> Result<()> {
        to.0.link_from(self.inner.cached.as_fd(), from, to.1)
    }

    /// Opens the same file in another mode, as [`Files::reopen`](spile_core::Files::reopen) says. Blocks for as long as the file system takes.
    ///
    /// # Errors
    /// As there.
    pub fn reopen(&self, mode: OpenMode, cache: CacheMode) -> Result<FileStore> {
        let inner = &self.inner;
        inner.cut.check().at_path(inner.path.get())?;
        let reopened = self.reopen_inner(mode, cache).at_path(inner.path.get())?;
        reopened.set_failed_sync(self.failed_sync());
        Ok(reopened)
    }

    fn reopen_inner(&self, mode: OpenMode, cache: CacheMode) -> Result<FileStore> {
        let inner = &self.inner;
        // By its descriptor, for its path may name another file by now.
        let name = format!("/proc/self/fd/{}", inner.cached.as_fd().as_raw_fd());
        let again = |flags| open_kernels(Path::new(&name), mode, flags);
        let file = again(OFlags::empty())?;
        let stat = file.metadata().map_err(|source| Error::io("stat", source))?;
        let file = RawFile::new(file.into());
        let path = PathCell::new(inner.path.get().to_owned());
        inner.lock.pass_on(mode, |was| {
            let Some(was) = was else {
                return Self::finish(path, again, mode, cache, file, &stat, None);
            };
            file.take_lock_over(mode, &inner.locked_files(), was)?;
            let finished = Self::finish(path, again, mode, cache, file.clone(), &stat, Some(mode));
            match (finished, mode) {
                (Ok(mut store), OpenMode::ReadWrite) => {
                    if let Some(new) = Arc::get_mut(&mut store.inner) {
                        new.older = Arc::downgrade(inner);
                    }
                    Ok(store)
                }
                (Err(error), OpenMode::ReadWrite) => {
                    inner.lock_for_reading(&[&file])?;
                    Err(error)
                }
                (finished, OpenMode::ReadOnly) => finished,
            }
        })
    }

    /// Makes a store of an open file. `again` opens the file once more, with more flags; `locked` is the mode in which it is locked.
    fn finish(
        path: PathCell,
        again: impl Fn(OFlags) -> Result<File>,
        mode: OpenMode,
        cache: CacheMode,
        file: RawFile,
        stat: &std::fs::Metadata,
        locked: Option<OpenMode>,
    ) -> Result<FileStore> {
        let (id, path) = (FileId::of(stat), Arc::new(path));
        // Under the lock, and before anything below writes to the file.
        let found = FileTimes::of(stat).now(&file);
        let is_device = matches!(id, FileId::BlockDevice(_));
        let len = if is_device { device_len(&file)? } else { stat.len() };
        let direct = match cache {
            CacheMode::Direct => open_direct(again, stat),
            CacheMode::Page | CacheMode::Once => None,
        };
        let lock = HeldLock::new(locked.map(|mode| (file.clone(), mode)), path.clone());
        let direct = direct
            .map(|(opened, align)| Ok::<_, Error>((RawFile::direct(opened.into(), &file, locked)?, align)))
            .transpose()?;
        Ok(Self::assemble(path, mode, (id, found), len, file, direct, (lock, cache == CacheMode::Once)))
    }

    fn assemble(
        path: Arc<PathCell>,
        mode: OpenMode,
        (id, found): (FileId, FileTimes),
        len: u64,
        cached: RawFile,
        direct: Option<(RawFile, DirectAlign)>,
        (lock, is_once): (HeldLock, bool),
    ) -> FileStore {
        let align = direct.as_ref().map(|(_, align)| *align);
        let is_device = matches!(id, FileId::BlockDevice(_));
        let read_only = mode == OpenMode::ReadOnly;
        let punches = !read_only && if is_device { device_punches(&cached) } else { file_punches(&cached, len) };
        let direct = direct.map_or_else(|| cached.clone(), |(file, _)| file);
        let info = StoreInfo {
            offset_align_bytes: align.map_or(1, |a| a.offset),
            memory_align_bytes: align.map_or(1, |a| a.memory),
            grows_zeroed: !is_device,
            punches,
            read_only,
            is_local: true,
        };
        let len = AtomicU64::new(len);
        let gate = SyncGate::default();
        let cut = Cut::default();
        FileStore {
            inner: Arc::new(Inner {
                path,
                id,
                found,
                info,
                is_device,
                direct,
                cached,
                len,
                gate,
                lock,
                cut,
                behind: Behind::default(),
                is_once,
                is_copy: AtomicBool::new(false),
                older: Weak::new(),
            }),
        }
    }

    /// Which file this is, as found when it was opened. Its path may name another file by now.
    pub fn id(&self) -> FileId {
        self.inner.id
    }

    /// What the system tells of the file that is open.
    pub(crate) fn stat(&self) -> std::io::Result<rustix::fs::Stat> {
        Ok(rustix::fs::fstat(self.inner.cached.as_fd())?)
    }

    /// What the file looked like from outside when it was opened and locked, before this process has written to it.
    pub fn found(&self) -> FileTimes {
        self.inner.found
    }

    /// The key with which somebody can wait until the file is unlocked, once it is closed.
    pub fn key(&self) -> Option<FileKey> {
        self.inner.cached.key()
    }

    /// How many syncs of the file have begun. Each covers all calls of [`Store::sync`] that came before it.
    pub fn syncs(&self) -> u64 {
        self.inner.gate.started()
    }

    /// The errno of the first sync that failed, if one has.
    pub fn failed_sync(&self) -> Option<i32> {
        self.inner.cached.failed_sync()
    }

    /// Says that a sync has failed in an earlier process, or that somebody accepts what was lost.
    pub fn set_failed_sync(&self, errno: Option<i32>) {
        self.inner.cached.set_failed_sync(errno);
    }

    fn fd(&self, via: Via) -> &RawFile {
        match via {
            Via::Direct => &self.inner.direct,
            Via::Cached => &self.inner.cached,
        }
    }

    /// An error of this store. It may be the first sign that the file's lock is lost.
    fn fail(&self, what: &str, errno: i32) -> Error {
        self.inner.lock.doubt(errno);
        Error::errno(what, errno).at_path(self.inner.path.get())
    }

    fn refuse(&self, kind: ErrorKind, what: &str, offset: u64) -> Error {
        Error::new(kind, what).at_path(self.inner.path.get()).at_offset(offset)
    }

    /// Refuses direct I/O that is not aligned, and says why. The kernel would refuse it without a reason.
    fn check_align(&self, offset: u64, segments: &Segments, fd: &RawFile) -> Result<()> {
        let info = &self.inner.info;
        let (unit, memory) = (info.offset_align_bytes as usize - 1, info.memory_align_bytes as usize - 1);
        // The length of each part is checked, too: most kernels cut the transfer where a part ends.
        let fits = |s: &Segment| s.as_ptr() as usize & memory == 0 && s.len() & unit == 0;
        if !fd.is_direct() || (offset & unit as u64 == 0 && segments.iter().all(fits)) {
            return Ok(());
        }
        Err(self.refuse(ErrorKind::InvalidInput, "unaligned direct transfer", offset))
    }

    fn check_writable(&self, offset: u64) -> Result<()> {
        if self.inner.info.read_only {
            return Err(self.refuse(ErrorKind::ReadOnly, "the store is open read-only", offset));
        }
        self.inner.lock.check().map_err(|error| error.at_path(self.inner.path.get()).at_offset(offset))
    }

    /// The end of a range, which must be in the store unless the store grows.
    fn check_end(&self, offset: u64, len: u64, may_grow: bool) -> Result<u64> {
        let inner = &self.inner;
        let limit = if may_grow && inner.info.grows_zeroed { i64::MAX as u64 } else { self.len_bytes() };
        let end = offset.checked_add(len).filter(|end| *end <= limit.min(inner.cut.end()));
        end.ok_or_else(|| match offset.saturating_add(len) > inner.cut.end() {
            true => cut_short(inner.cut.end()).at_path(inner.path.get()).at_offset(offset),
            false => self.refuse(ErrorKind::OutOfRange, "past the end of the store", offset),
        })
    }

    async fn fallocate(&self, flags: i32, offset: u64, len: u64) -> Result<usize, i32> {
        self.inner.cached.fallocate(flags, offset, len).await
    }

    /// Writes zeroes as data: directly where that can be, for the range may share a page with data written directly.
    async fn write_zeroes(&self, offset: u64, len: u64) -> Result<()> {
        let unit = u64::from(self.inner.info.offset_align_bytes);
        let via = if (offset | len) & (unit - 1) == 0 { Via::Direct } else { Via::Cached };
        let chunk = Segment::zeroed((len as usize).min(ZERO_CHUNK_BYTES));
        let mut at = 0;
        while at < len {
            let part = (len - at).min(chunk.len() as u64);
            let zeroes = Segments::from(chunk.slice(0..part as usize));
            self.write_at(StoreOffset(offset + at), &zeroes, via).await?;
            at += part;
        }
        Ok(())
    }

    /// Fails when a sync of this file has ever failed, as the kernel reports a failed sync only once, or when a part of what was
    /// written is gone.
    fn check_synced(&self) -> Result<()> {
        self.inner.cut.check().map_err(|error| error.at_path(self.inner.path.get()))?;
        match self.inner.cached.failed_sync() {
            Some(errno) => Err(Error::errno("sync failed, now or earlier: what was written may be lost", errno)
                .at_path(self.inner.path.get())
                .hint("check the storage below; `spile accept-loss` has flushes of a served disk succeed again")
                .permanent()),
            None => Ok(()),
        }
    }
}

impl Store for FileStore {
    fn info(&self) -> StoreInfo {
        self.inner.info.clone()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len.load(Ordering::Acquire)
    }

    fn path(&self) -> &Path {
        self.inner.path.get()
    }

    fn set_path(&self, path: &Path) {
        self.inner.path.set(path);
    }

    fn has_failed_sync(&self) -> bool {
        self.failed_sync().is_some()
    }

    fn set_copy(&self, is_copy: bool) {
        self.inner.is_copy.store(is_copy, Ordering::Relaxed);
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        let (offset, fd) = (offset.0, self.fd(via));
        self.check_end(offset, into.len() as u64, false)?;
        self.check_align(offset, into, fd)?;
        if into.is_empty() {
            return Ok(());
        }
        // 8.1 instead of 9.0 microseconds of processor for a request of 4 KiB at depth 1.
        if !fd.is_direct() && fd.read_at_once(offset, into) == Ok(into.len()) {
            return Ok(());
        }
        match fd.read(offset, into).await {
            Ok(done) if done == into.len() => Ok(()),
            Ok(done) => {
                let at = offset + done as u64;
                self.inner.cut.note(at, self.inner.path.get());
                Err(cut_short(at).at_path(self.inner.path.get()).at_offset(at))
            }
            Err(errno) => Err(self.fail("read failed", errno).at_offset(offset)),
        }
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        let (offset, fd) = (offset.0, self.fd(via));
        self.check_writable(offset)?;
        let end = self.check_end(offset, from.len() as u64, true)?;
        self.check_align(offset, from, fd)?;
        if from.is_empty() {
            return Ok(());
        }
        let outcome = fd.write(offset, from).await;
        outcome.map_err(|errno| self.fail("write failed", errno).at_offset(offset))?;
        self.inner.len.fetch_max(end, Ordering::AcqRel);
        if !self.is_written_once() || fd.is_direct() {
            return Ok(());
        }
        match self.inner.behind.note(offset..end) {
            Some(step) => self.write_back(step).await,
            None => Ok(()),
        }
    }

    async fn sync(&self) -> Result<()> {
        let inner = &self.inner;
        let ticket = inner.gate.ticket();
        loop {
            self.check_synced()?;
            match std::future::poll_fn(|context| inner.gate.poll(ticket, context)).await {
                Turn::Over => return self.check_synced(),
                Turn::Run => {
                    // The sync runs in a task of its own, so that it ends even if this future is dropped.
                    let inner = self.inner.clone();
                    spawn(async move {
                        if let Err(errno) = inner.look_for_cut(inner.cached.sync()).await {
                            inner.lock.doubt(errno);
                        }
                        inner.gate.end();
                    });
                }
            }
        }
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let offset = offset.0;
        self.check_writable(offset)?;
        self.check_end(offset, len_bytes, false)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let failed = |errno| Err(self.fail("zero a range", errno).at_offset(offset));
        match self.fallocate(libc::FALLOC_FL_ZERO_RANGE | keep, offset, len_bytes).await {
            Ok(_) => return Ok(()),
            Err(errno) if is_unsupported(errno) => (),
            Err(errno) => return failed(errno),
        }
        match self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | keep, offset, len_bytes).await {
            Ok(_) => (),
            Err(errno) if is_unsupported(errno) => return self.write_zeroes(offset, len_bytes).await,
            Err(errno) => return failed(errno),
        }
        // NFS and tmpfs cannot zero, but punch and allocate.
        match self.fallocate(keep, offset, len_bytes).await {
            Err(errno) if !is_unsupported(errno) => failed(errno),
            _ => Ok(()),
        }
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let offset = offset.0;
        self.check_writable(offset)?;
        self.check_end(offset, len_bytes, false)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match self.fallocate(mode, offset, len_bytes).await {
            Ok(_) => Ok(()),
            Err(errno) if is_unsupported(errno) => {
                let what = "holes cannot be punched here";
                Err(self.refuse(ErrorKind::Unsupported, what, offset))
            }
            Err(errno) => Err(self.fail("punch a hole", errno).at_offset(offset)),
        }
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.check_writable(len_bytes)?;
        if self.inner.is_device {
            return self.take_up_len(len_bytes).await;
        }
        self.inner.cut.check().map_err(|error| error.at_path(self.inner.path.get()))?;
        let _changing = self.inner.cut.changing();
        let outcome = self.inner.cached.truncate(len_bytes).await;
        outcome.map_err(|errno| self.fail("set the length", errno).at_offset(len_bytes))?;
        self.inner.len.store(len_bytes, Ordering::Release);
        Ok(())
    }

    async fn look_for_growth(&self) -> Result<u64> {
        if self.inner.is_device {
            let device_bytes = self.device_bytes().await?;
            self.inner.len.fetch_max(device_bytes, Ordering::AcqRel);
        }
        Ok(self.len_bytes())
    }

    /// Its number, and when it was made: numbers are given again.
    fn file_identity(&self) -> Option<[u8; 16]> {
        let FileTimes { inode, born_ns, .. } = self.inner.found;
        let mut identity = [0; 16];
        identity[..8].copy_from_slice(&inode.to_le_bytes());
        identity[8..].copy_from_slice(&born_ns.to_le_bytes());
        (born_ns != 0 && !self.inner.is_device).then_some(identity)
    }

    fn map(&self, offset: StoreOffset, len_bytes: usize) -> Result<Segment> {
        self.check_end(offset.0, len_bytes as u64, false)?;
        let file = self.inner.cached.as_fd();
        let mapped = match self.check_writable(offset.0) {
            Ok(()) => Segment::map_shared(file, offset.0, len_bytes),
            Err(error) if error.kind() == ErrorKind::ReadOnly => Segment::map_private(file, offset.0, len_bytes),
            Err(error) => return Err(error),
        };
        mapped.map_err(|source| Error::io("map", source).at_path(self.inner.path.get()).at_offset(offset.0))
    }

    async fn taken_bytes(&self) -> Option<u64> {
        if self.inner.is_device {
            return None;
        }
        let file = self.inner.cached.clone();
        let look = move || file.as_fd().try_clone_to_owned().and_then(|fd| std::fs::File::from(fd).metadata());
        // A unit of 512 bytes, on any file system.
        run_blocking(self.inner.path.get(), look).await.ok().map(|stat| stat.blocks() * 512)
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        let (offset, inner) = (offset.0, &self.inner);
        let left = self.check_end(offset, 1, false).map(|_| self.len_bytes() - offset)?;
        if inner.is_device {
            return Ok(StoreExtent { len_bytes: left, is_hole: false });
        }
        let found = inner.cached.extent(offset).await;
        let found = found.map_err(|errno| self.fail("seek", errno).at_offset(offset))?;
        if found.is_hole && found.end_bytes - offset >= left {
            // Behind the end of a file, all is a hole to the file system.
            let _ = inner.look_for_cut(inner.cached.len_bytes()).await;
            let left = self.check_end(offset, 1, false).map(|_| left.min(inner.cut.end() - offset))?;
            return Ok(StoreExtent { len_bytes: left, is_hole: true });
        }
        Ok(StoreExtent { len_bytes: left.min(found.end_bytes - offset), is_hole: found.is_hole })
    }
}

impl FileStore {
    /// True when what is written is not to stay in the page cache.
    fn is_written_once(&self) -> bool {
        self.inner.is_once || self.inner.is_copy.load(Ordering::Relaxed)
    }

    /// Has the kernel write back what was written, and forget what was written before that.
    async fn write_back(&self, Step { begin, leave }: Step) -> Result<()> {
        let file = self.inner.cached.clone();
        let done = move || {
            file.begin_write_back(begin);
            leave.map_or(Ok(()), |range| file.leave_page_cache(range))
        };
        run_blocking(self.inner.path.get(), done).await.map_err(|errno| self.fail("write back failed", errno))
    }

    /// The length that the system tells of a device now.
    async fn device_bytes(&self) -> Result<u64> {
        let (path, device) = (self.inner.path.get(), self.inner.cached.clone());
        run_blocking(path, move || device_len(&device)).await.at_path(path)
    }

    /// Takes up what a device has gained since it was opened. The length of a device cannot be set otherwise.
    async fn take_up_len(&self, len_bytes: u64) -> Result<()> {
        let device_bytes = self.device_bytes().await?;
        if (self.len_bytes()..=device_bytes).contains(&len_bytes) {
            self.inner.len.fetch_max(len_bytes, Ordering::AcqRel);
            return Ok(());
        }
        let what = "the length of a block device cannot be set";
        let hint = format!("it has {device_bytes} bytes; where that is too few, make the device longer first");
        Err(self.refuse(ErrorKind::Unsupported, what, len_bytes).hint(hint))
    }
}

impl Inner {
    /// Compares the length of the file that an operation returns with what it should be.
    async fn look_for_cut(&self, operation: impl Future<Output = Result<usize, i32>>) -> Result<(), i32> {
        let look = self.cut.look(&self.len);
        let found_bytes = operation.await?;
        if !self.is_device {
            look.found(found_bytes as u64, self.path.get());
        }
        Ok(())
    }
}

fn is_unsupported(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::ENOTTY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spile_engine::{Config, Engine, EngineKind};

    #[test]
    fn a_failed_sync_is_never_forgotten() {
        for kind in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
            let file = tempfile::NamedTempFile::new().unwrap();
            let store = FileStore::open(file.path(), OpenMode::ReadWrite, CacheMode::Page).unwrap();
            let engine = Engine::start(Config { kind, workers: 1, pool_bytes: 1 << 21, ..Config::default() }).unwrap();
            engine.run_on(0, move || async move {
                store.sync().await.unwrap();
                store.inner.cached.note_failed_sync(libc::EIO);
                store.inner.cached.note_failed_sync(libc::ENOSPC);
                for _ in 0..2 {
                    let error = store.clone().sync().await.unwrap_err();
                    assert_eq!((error.os_errno(), error.may_pass()), (Some(libc::EIO), false), "{error}");
                }
            });
            engine.shutdown();
        }
    }

    #[test]
    fn a_sync_that_fails_unseen_is_noted() {
        // A pipe cannot be synced: the same path as a failing disk, and its future is dropped.
        for kind in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
            let (_reader, writer) = std::io::pipe().unwrap();
            let fd = RawFile::new(writer.into());
            let engine = Engine::start(Config { kind, workers: 1, pool_bytes: 1 << 21, ..Config::default() }).unwrap();
            let shared = fd.clone();
            engine.run_on(0, move || async move {
                let mut dropped = std::pin::pin!(shared.sync());
                let poll = |context: &mut std::task::Context<'_>| {
                    std::task::Poll::Ready(dropped.as_mut().poll(context).is_pending())
                };
                assert!(std::future::poll_fn(poll).await);
            });
            engine.shutdown();
            assert_eq!(fd.failed_sync(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn a_direct_transfer_in_flight_keeps_the_lock() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, [0; 4096]).unwrap();
        let open = || FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct);
        let store = open().unwrap();
        if !store.inner.direct.is_direct() {
            return println!("SKIP direct I/O: not on this file system");
        }
        let zeroes = Segments::zeroed(4096);
        let op = store.inner.direct.write(0, &zeroes);
        drop(store);
        assert_eq!(open().err().map(|error| error.kind()), Some(ErrorKind::Busy));
        drop(op);
        open().unwrap();
    }

    #[test]
    fn a_copy_through_the_page_cache_leaves_it_again() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "").unwrap();
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        // For a disk whose size fits no alignment all is written so, and for any on a file system without direct I/O.
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap();
        engine.run_on(0, move || async move {
            let mebibyte = Segments::zeroed(1 << 20);
            for (is_copy, windows) in [(false, 0), (true, 2), (false, 2)] {
                store.set_copy(is_copy);
                for at in 0..16 {
                    store.write_at(StoreOffset(at << 20), &mebibyte, Via::Cached).await.unwrap();
                }
                assert_eq!(store.inner.behind.begun(), windows);
            }
        });
        engine.shutdown();
    }

    #[test]
    fn zeroes_are_written_where_the_file_system_cannot() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap();
        engine.run_on(0, move || async move {
            store.write_zeroes(4096, (2 << 20) + 8192).await.unwrap();
            store.write_zeroes((3 << 20) - 5, 3).await.unwrap();
            store.write_zeroes(0, 0).await.unwrap();
        });
        engine.shutdown();
        let mut expected = vec![7; 3 << 20];
        expected[4096..(2 << 20) + 12288].fill(0);
        expected[(3 << 20) - 5..(3 << 20) - 2].fill(0);
        assert!(std::fs::read(&path).unwrap() == expected);
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let status = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(status.success());
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(FileStore::open(&path, OpenMode::ReadOnly, CacheMode::Page)));
        let answer = receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("the open waits for a writer");
        assert_eq!(answer.err().map(|error| error.kind()), Some(ErrorKind::InvalidInput));
    }

    #[test]
    fn only_files_and_devices_are_stores() {
        for path in ["/dev/null", "/proc/self", "/dev/full"] {
            let error = FileStore::open(path.as_ref(), OpenMode::ReadOnly, CacheMode::Direct);
            let error = error.err().expect("no store");
            assert_eq!((error.kind(), error.path()), (ErrorKind::InvalidInput, Some(path.as_ref())));
        }
        let missing = FileStore::open("/no/such".as_ref(), OpenMode::ReadOnly, CacheMode::Page);
        assert_eq!(missing.err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    }
}
