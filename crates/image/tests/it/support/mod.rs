//! Files in memory, a block_on, and helpers that make images and damage them.
//!
//! [`MemFiles`] keeps files as sparse 4 KiB pages, so that a file of petabytes costs what was written to it. It
//! notes every path that was opened and every byte that was read, so that a test can say what an image made the
//! program do. Stores refuse what the trait forbids: misaligned direct I/O, reads past the end, and direct and
//! cached writes to one page.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Component, Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use spile_core::{
    Disk, Env, Error, ErrorKind, Extent, Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo,
    StoreOffset, Via, Work,
};
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::header::Header;
use spile_image::formats::vhd::{CreateParams, VhdParent, create};
use spile_image::{Graph, OpenOptions};

const PAGE: u64 = 4096;

/// Runs a future on this thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A fixed clock, a counter for randomness, and a boot that a test may change.
pub struct TestEnv {
    random: AtomicU64,
    boot: AtomicU64,
    /// Work is kept to be run by [`run_beside`]; else nothing runs beside requests.
    pub runs_beside: AtomicBool,
}

thread_local! {
    static BESIDE: RefCell<Vec<Work>> = const { RefCell::new(Vec::new()) };
}

/// Polls all that was begun beside requests on this thread. Returns how much of it has not ended.
pub fn run_beside() -> usize {
    let mut work = BESIDE.take();
    work.retain_mut(|work| poll_once(work.as_mut()).is_pending());
    BESIDE.with_borrow_mut(|beside| {
        beside.append(&mut work);
        beside.len()
    })
}

impl TestEnv {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { random: AtomicU64::new(1), boot: AtomicU64::new(1), runs_beside: AtomicBool::new(false) })
    }

    pub fn reboot(&self) {
        self.boot.fetch_add(1, Ordering::Relaxed);
    }
}

impl Env for TestEnv {
    fn now_unix_s(&self) -> u64 {
        1_700_000_000
    }

    fn random_16(&self) -> [u8; 16] {
        let n = self.random.fetch_add(1, Ordering::Relaxed);
        let mixed = u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        mixed.to_be_bytes()
    }

    fn spawn(&self, work: Work) -> bool {
        let runs = self.runs_beside.load(Ordering::Relaxed);
        if runs {
            BESIDE.with_borrow_mut(|beside| beside.push(work));
        }
        runs
    }

    fn boot_id(&self) -> [u8; 16] {
        u128::from(self.boot.load(Ordering::Relaxed)).to_be_bytes()
    }
}

/// How a store behaves.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub offset_align_bytes: u32,
    pub is_device: bool,
    /// Operations are pending once before they are done.
    pub slow: bool,
}

pub const FILE: Kind = Kind { offset_align_bytes: 512, is_device: false, slow: false };
pub const FILE_4K: Kind = Kind { offset_align_bytes: 4096, is_device: false, slow: false };
pub const SLOW_FILE: Kind = Kind { offset_align_bytes: 512, is_device: false, slow: true };
pub const DEVICE: Kind = Kind { offset_align_bytes: 512, is_device: true, slow: false };

#[derive(Default)]
struct Content {
    len: u64,
    pages: BTreeMap<u64, Box<[u8]>>,
    /// The way each page was last written.
    ways: BTreeMap<u64, Via>,
}

/// One file.
pub struct MemFile {
    path: PathBuf,
    kind: Kind,
    content: Mutex<Content>,
    pub read_bytes: AtomicU64,
    pub largest_read_bytes: AtomicU64,
    pub syncs: AtomicU64,
    pub writes: AtomicU64,
    /// How often somebody has looked whether the file is longer.
    pub looks: AtomicU64,
    /// Every such look fails while this is set.
    pub fails_looks: AtomicBool,
    /// Every operation that changes the file fails while this is set.
    pub fails: AtomicBool,
    /// Every write at offset 0 fails while this is set.
    pub fails_at_start: AtomicBool,
    /// The number of changes and syncs until one fails for want of space, once; 0: none fails.
    pub fails_in: AtomicU64,
    /// Every operation that makes the file longer fails while this is set.
    pub is_full: AtomicBool,
    /// The next read at this offset gets its bytes, but does not end before `lets_read_go`; for tests that poll by
    /// hand.
    pub held_read: AtomicU64,
    pub lets_read_go: AtomicBool,
    /// False: the file is on another host. To be set before the file is opened.
    pub is_local: AtomicBool,
    /// While this is set, syncs do not end; for tests that poll by hand.
    pub holds_syncs: AtomicBool,
}

/// No read is held.
pub const NO_READ: u64 = u64::MAX;

/// Polls a future once by hand.
pub fn poll_once<T>(future: std::pin::Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

impl MemFile {
    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap()
    }

    pub fn len(&self) -> u64 {
        self.lock().len
    }

    /// Bytes of pages that hold something.
    pub fn allocated_bytes(&self) -> u64 {
        self.lock().pages.len() as u64 * PAGE
    }

    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let content = self.lock();
        let mut out = vec![0; len];
        content.read(offset, &mut out);
        out
    }

    pub fn patch(&self, offset: u64, bytes: &[u8]) {
        self.lock().write(offset, bytes);
    }

    pub fn set_len(&self, len: u64) {
        self.lock().set_len(len);
    }

    /// Makes a device `by` bytes longer. What it gains holds anything.
    pub fn lengthen(&self, by: u64) {
        let end = self.len();
        self.patch(end, &pattern(end, by as usize));
    }

    /// The file was closed: its pages are clean, and each may be written either way from now on.
    pub fn forget_ways(&self) {
        self.lock().ways.clear();
    }
}

impl Content {
    fn read(&self, offset: u64, out: &mut [u8]) {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let within = (at % PAGE) as usize;
            let len = (PAGE as usize - within).min(out.len() - done);
            match self.pages.get(&(at / PAGE)) {
                Some(page) => out[done..done + len].copy_from_slice(&page[within..within + len]),
                None => out[done..done + len].fill(0),
            }
            done += len;
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % PAGE) as usize;
            let len = (PAGE as usize - within).min(bytes.len() - done);
            let page = self.pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize].into());
            page[within..within + len].copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    /// Zeroes a range; whole pages become holes.
    fn punch(&mut self, offset: u64, len: u64) {
        let end = offset + len;
        let pages: Vec<u64> = self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(&page, _)| page).collect();
        for page in pages {
            let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
            if to - from == PAGE {
                self.pages.remove(&page);
                self.ways.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                bytes[(from % PAGE) as usize..][..(to - from) as usize].fill(0);
            }
        }
    }

    fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.punch(len, self.len.next_multiple_of(PAGE) - len);
        }
        self.len = len;
    }

    fn note_way(&mut self, offset: u64, len: u64, via: Via) {
        for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
            let before = self.ways.insert(page, via);
            assert!(before.is_none_or(|before| before == via), "page {page:#x} is written directly and cached");
        }
    }
}

/// Pending while the condition is false. Wakes nobody: only for futures that are polled by hand.
async fn until(condition: impl Fn() -> bool) {
    std::future::poll_fn(|_| if condition() { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// A file, opened.
pub struct MemStore {
    file: Arc<MemFile>,
    read_only: bool,
    /// Where a device ended when that was last looked at.
    device_end: AtomicU64,
}

impl MemStore {
    fn new(file: Arc<MemFile>, read_only: bool) -> Self {
        let device_end = AtomicU64::new(file.len());
        Self { file, read_only, device_end }
    }

    fn fail(&self, kind: ErrorKind, what: &str, offset: u64) -> Error {
        Error::new(kind, what).at_path(&self.file.path).at_offset(offset)
    }

    async fn begin_change(&self, offset: u64) -> Result<()> {
        self.pause().await;
        if self.read_only {
            return Err(self.fail(ErrorKind::ReadOnly, "write to a read-only store", offset));
        }
        if offset == 0 && self.file.fails_at_start.load(Ordering::Relaxed) {
            return Err(self.fail(ErrorKind::Io, "injected", offset));
        }
        self.injected(offset)
    }

    fn injected(&self, offset: u64) -> Result<()> {
        if self.file.fails.load(Ordering::Relaxed) {
            return Err(self.fail(ErrorKind::Io, "injected", offset));
        }
        let count = |left: u64| left.checked_sub(1);
        match self.file.fails_in.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) {
            Ok(1) => Err(self.fail(ErrorKind::NoSpace, "injected", offset)),
            _ => Ok(()),
        }
    }

    fn check_room(&self, end: u64) -> Result<()> {
        match self.file.is_full.load(Ordering::Relaxed) && end > self.file.len() {
            true => Err(self.fail(ErrorKind::NoSpace, "injected", end)),
            false => Ok(()),
        }
    }

    async fn pause(&self) {
        if self.file.kind.slow {
            let mut pending = true;
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                std::thread::yield_now();
                if std::mem::take(&mut pending) { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        }
    }

    fn check_aligned(&self, offset: u64, buffer: &Segments, via: Via) {
        let align = u64::from(self.file.kind.offset_align_bytes);
        let aligned = offset.is_multiple_of(align) && (buffer.len() as u64).is_multiple_of(align);
        assert!(via == Via::Cached || aligned, "direct I/O of {} bytes at {offset:#x}", buffer.len());
        assert!(via == Via::Cached || buffer.is_aligned(512), "direct I/O on misaligned memory");
    }
}

impl Store for MemStore {
    fn info(&self) -> StoreInfo {
        StoreInfo {
            offset_align_bytes: self.file.kind.offset_align_bytes,
            memory_align_bytes: 512,
            grows_zeroed: !self.file.kind.is_device,
            punches: !self.file.kind.is_device,
            read_only: self.read_only,
            is_local: self.file.is_local.load(Ordering::Relaxed),
        }
    }

    fn len_bytes(&self) -> u64 {
        match self.file.kind.is_device {
            true => self.device_end.load(Ordering::Relaxed),
            false => self.file.len(),
        }
    }

    fn path(&self) -> &Path {
        &self.file.path
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        self.pause().await;
        self.check_aligned(offset.0, into, via);
        let len = into.len() as u64;
        self.file.read_bytes.fetch_add(len, Ordering::Relaxed);
        self.file.largest_read_bytes.fetch_max(len, Ordering::Relaxed);
        let mut bytes = vec![0; into.len()];
        {
            let content = self.file.lock();
            let end = if self.file.kind.is_device { self.device_end.load(Ordering::Relaxed) } else { content.len };
            if offset.0.checked_add(len).is_none_or(|to| to > end) {
                return Err(self.fail(ErrorKind::OutOfRange, "read past the end", offset.0));
            }
            content.read(offset.0, &mut bytes);
        }
        if self.file.held_read.compare_exchange(offset.0, NO_READ, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            until(|| self.file.lets_read_go.load(Ordering::Relaxed)).await;
        }
        into.copy_from_slice(0, &bytes);
        Ok(())
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        self.begin_change(offset.0).await?;
        self.check_aligned(offset.0, from, via);
        self.check_room(offset.0 + from.len() as u64)?;
        let mut content = self.file.lock();
        if self.file.kind.is_device && offset.0 + from.len() as u64 > self.device_end.load(Ordering::Relaxed) {
            return Err(self.fail(ErrorKind::OutOfRange, "write past the end of the device", offset.0));
        }
        if !self.file.kind.is_device {
            content.note_way(offset.0, from.len() as u64, via);
        }
        content.write(offset.0, &from.to_vec());
        self.file.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        self.pause().await;
        self.injected(0)?;
        until(|| !self.file.holds_syncs.load(Ordering::Relaxed)).await;
        self.file.syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.begin_change(offset.0).await?;
        self.file.lock().punch(offset.0, len_bytes);
        Ok(())
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.begin_change(offset.0).await?;
        assert!(!self.file.kind.is_device, "a device that does not punch was asked to");
        self.file.lock().punch(offset.0, len_bytes);
        Ok(())
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.begin_change(len_bytes).await?;
        self.check_room(len_bytes)?;
        assert!(!self.file.kind.is_device, "a device was asked to change its length");
        self.file.lock().set_len(len_bytes);
        Ok(())
    }

    async fn look_for_growth(&self) -> Result<u64> {
        self.pause().await;
        self.file.looks.fetch_add(1, Ordering::Relaxed);
        if self.file.fails_looks.load(Ordering::Relaxed) {
            return Err(self.fail(ErrorKind::Io, "the length cannot be read", 0));
        }
        self.device_end.fetch_max(self.file.len(), Ordering::Relaxed);
        Ok(self.len_bytes())
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.pause().await;
        let content = self.file.lock();
        if offset.0 >= content.len {
            return Err(self.fail(ErrorKind::OutOfRange, "extent past the end", offset.0));
        }
        let page = offset.0 / PAGE;
        let is_hole = !content.pages.contains_key(&page);
        let end = match is_hole {
            true => content.pages.range(page..).next().map_or(u64::MAX, |(&page, _)| page * PAGE),
            false => {
                let mut end = page;
                while content.pages.contains_key(&end) {
                    end += 1;
                }
                end * PAGE
            }
        };
        Ok(StoreExtent { len_bytes: end.min(content.len) - offset.0, is_hole })
    }
}

/// A file system in memory.
#[derive(Clone, Default)]
pub struct MemFiles {
    files: Arc<Mutex<BTreeMap<PathBuf, Arc<MemFile>>>>,
    opened: Arc<Mutex<Vec<PathBuf>>>,
}

impl MemFiles {
    /// An empty file.
    pub fn add(&self, path: impl AsRef<Path>, kind: Kind) -> Arc<MemFile> {
        let path = path.as_ref().to_owned();
        let file = Arc::new(MemFile {
            path: path.clone(),
            kind,
            content: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            largest_read_bytes: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            fails_looks: AtomicBool::new(false),
            fails: AtomicBool::new(false),
            fails_at_start: AtomicBool::new(false),
            fails_in: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            held_read: AtomicU64::new(NO_READ),
            lets_read_go: AtomicBool::new(false),
            is_local: AtomicBool::new(true),
            holds_syncs: AtomicBool::new(false),
        });
        self.files.lock().unwrap().insert(path, file.clone());
        file
    }

    pub fn file(&self, path: impl AsRef<Path>) -> Arc<MemFile> {
        self.files.lock().unwrap()[path.as_ref()].clone()
    }

    pub fn store(&self, path: impl AsRef<Path>) -> MemStore {
        MemStore::new(self.file(path), false)
    }

    /// The paths that were opened so far.
    pub fn opened(&self) -> Vec<PathBuf> {
        self.opened.lock().unwrap().clone()
    }

    /// Bytes read from all files, and the largest single read.
    pub fn reads(&self) -> (u64, u64) {
        let files = self.files.lock().unwrap();
        let total = files.values().map(|file| file.read_bytes.load(Ordering::Relaxed)).sum();
        let largest = files.values().map(|file| file.largest_read_bytes.load(Ordering::Relaxed)).max();
        (total, largest.unwrap_or(0))
    }

    pub fn reset_reads(&self) {
        for file in self.files.lock().unwrap().values() {
            file.read_bytes.store(0, Ordering::Relaxed);
            file.largest_read_bytes.store(0, Ordering::Relaxed);
        }
    }
}

impl Files for MemFiles {
    type Store = MemStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<MemStore> {
        let path = at.as_path().expect("only files are here");
        self.opened.lock().unwrap().push(path.to_owned());
        let file = self.files.lock().unwrap().get(path).cloned();
        let file = file.ok_or_else(|| Error::new(ErrorKind::NotFound, "open failed").at_path(path))?;
        Ok(MemStore::new(file, mode == OpenMode::ReadOnly))
    }

    async fn create(&self, path: &Path, _: u64) -> Result<MemStore> {
        unreachable!("no test creates {} so", path.display())
    }

    async fn rename(&self, from: &Path, _: &Path) -> Result<()> {
        unreachable!("no test renames {}", from.display())
    }

    async fn link(&self, from: &Path, _: &Path) -> Result<()> {
        unreachable!("no test gives {} a second name", from.display())
    }

    async fn is_at(&self, store: &MemStore, path: &Path) -> Result<bool> {
        Ok(self.files.lock().unwrap().get(path).is_some_and(|file| Arc::ptr_eq(file, &store.file)))
    }

    async fn reopen(&self, store: &MemStore, mode: OpenMode) -> Result<MemStore> {
        Ok(MemStore::new(store.file.clone(), mode == OpenMode::ReadOnly))
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        unreachable!("no test removes {}", path.display())
    }

    /// Resolves `.` and `..`. A folder exists when a file is in it.
    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        let mut out = PathBuf::from("/");
        for part in path.components() {
            match part {
                Component::Normal(name) => out.push(name),
                Component::ParentDir => drop(out.pop()),
                _ => {}
            }
        }
        let exists = self.files.lock().unwrap().keys().any(|file| file.starts_with(&out));
        exists.then_some(out).ok_or_else(|| Error::new(ErrorKind::NotFound, "no such file").at_path(path))
    }
}

/// Files, and the environment that a test gives to images.
pub struct World {
    pub files: MemFiles,
    pub env: Arc<TestEnv>,
}

impl World {
    pub fn new() -> Self {
        Self { files: MemFiles::default(), env: TestEnv::new() }
    }

    /// Creates a VHD of that type in blocks of `block_bytes`.
    pub fn vhd(&self, path: &str, disk_type: DiskType, size_bytes: u64, block_bytes: u32) -> Arc<MemFile> {
        self.vhd_on(path, FILE, disk_type, size_bytes, block_bytes)
    }

    pub fn vhd_on(
        &self,
        path: &str,
        kind: Kind,
        disk_type: DiskType,
        size_bytes: u64,
        block_bytes: u32,
    ) -> Arc<MemFile> {
        self.create(
            path,
            kind,
            CreateParams { block_size_bytes: block_bytes, ..CreateParams::new(disk_type, size_bytes) },
        )
    }

    fn create(&self, path: &str, kind: Kind, params: CreateParams) -> Arc<MemFile> {
        let file = self.files.add(path, kind);
        if kind.is_device {
            file.set_len(params.size_bytes * 2 + (8 << 20));
        }
        block_on(create(&self.files.store(path), &*self.env, &params)).unwrap();
        file.lock().ways.clear();
        file
    }

    /// A raw file with that content.
    pub fn raw(&self, path: &str, bytes: &[u8]) -> Arc<MemFile> {
        let file = self.files.add(path, FILE);
        file.patch(0, bytes);
        file
    }

    /// Creates a child of a parent in the same folder.
    pub fn child(&self, path: &str, parent: &str, size_bytes: u64, block_bytes: u32) -> Arc<MemFile> {
        self.child_on(path, FILE, parent, size_bytes, block_bytes)
    }

    pub fn child_on(&self, path: &str, kind: Kind, parent: &str, size_bytes: u64, block_bytes: u32) -> Arc<MemFile> {
        let name = Path::new(parent).file_name().unwrap().to_str().unwrap();
        self.child_of(path, kind, self.parent_ref(parent, name), size_bytes, block_bytes)
    }

    pub fn child_of(
        &self,
        path: &str,
        kind: Kind,
        parent: VhdParent,
        size_bytes: u64,
        block_bytes: u32,
    ) -> Arc<MemFile> {
        let params = CreateParams { block_size_bytes: block_bytes, ..CreateParams::child(size_bytes, parent) };
        self.create(path, kind, params)
    }

    /// How a child names `parent`, with that relative path to it.
    pub fn parent_ref(&self, parent: &str, relative: &str) -> VhdParent {
        let uuid = match parent.ends_with(".vhd") {
            true => footer_of(&self.files.file(parent)).uuid,
            false => [0; 16],
        };
        VhdParent {
            relative_path: relative.to_owned(),
            absolute_path: None,
            uuid,
            timestamp: 0,
            name: Path::new(parent).file_name().unwrap().to_str().unwrap().to_owned(),
        }
    }

    pub fn try_open(&self, path: &str, options: &OpenOptions) -> Result<Graph<MemStore>> {
        block_on(Graph::open(&self.files, self.env.clone(), Path::new(path), options))
    }

    pub fn open(&self, path: &str) -> Graph<MemStore> {
        self.try_open(path, &OpenOptions { allow_data_file: true, ..OpenOptions::default() }).unwrap()
    }

    /// Opens what must be refused; the error must be of that kind and its text must have `names` in it.
    #[track_caller]
    pub fn refused(&self, path: &str, kind: ErrorKind, names: &str) -> Error {
        self.refused_with(path, &OpenOptions::default(), kind, names)
    }

    #[track_caller]
    pub fn refused_with(&self, path: &str, options: &OpenOptions, kind: ErrorKind, names: &str) -> Error {
        self.files.reset_reads();
        let error = self.try_open(path, options).err().expect("the image was opened");
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        assert!(text.contains(names), "the error does not name \"{names}\": {text}");
        assert!(error.path().is_some(), "the error names no file: {text}");
        let (total, largest) = self.files.reads();
        assert!(total < 80 << 20 && largest <= 8 << 20, "{total} bytes read, {largest} at once");
        error
    }
}

pub fn footer_of(file: &MemFile) -> Footer {
    Footer::parse(&file.bytes(file.len() - 512, 512)).unwrap()
}

pub fn header_of(file: &MemFile) -> Header {
    Header::parse(&file.bytes(512, 1024)).unwrap()
}

/// Changes both footers.
pub fn edit_footer(file: &MemFile, change: impl Fn(&mut Footer)) {
    let mut footer = footer_of(file);
    let end = file.len() - 512;
    change(&mut footer);
    if footer.disk_type != DiskType::Fixed {
        file.patch(0, &footer.to_bytes());
    }
    file.patch(end, &footer.to_bytes());
}

pub fn edit_header(file: &MemFile, change: impl Fn(&mut Header)) {
    let mut header = header_of(file);
    change(&mut header);
    file.patch(512, &header.to_bytes());
}

/// Sets the checksum of `bytes` again, whose field is at `at`.
pub fn resum(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let sum = !bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)));
    bytes[at..at + 4].copy_from_slice(&sum.to_be_bytes());
}

/// Changes raw bytes of the header, with a good checksum.
pub fn patch_header(file: &MemFile, at: usize, value: &[u8]) {
    let mut bytes = file.bytes(512, 1024);
    bytes[at..at + value.len()].copy_from_slice(value);
    resum(&mut bytes, 36);
    file.patch(512, &bytes);
}

/// The BAT entry of a block.
pub fn entry(file: &MemFile, block: u64) -> u32 {
    let at = header_of(file).bat_offset_bytes + block * 4;
    u32::from_be_bytes(file.bytes(at, 4).try_into().unwrap())
}

pub fn set_entry(file: &MemFile, block: u64, sector: u32) {
    file.patch(header_of(file).bat_offset_bytes + block * 4, &sector.to_be_bytes());
}

/// Reads a range of a disk.
pub fn read(disk: &impl Disk, range: std::ops::Range<u64>) -> Vec<u8> {
    let into = Segments::zeroed((range.end - range.start) as usize);
    // So that bytes that nobody fills are seen.
    into.copy_from_slice(0, &vec![0xa5; into.len()]);
    block_on(disk.read(Extent::from_range(range), &into)).unwrap();
    into.to_vec()
}

/// Writes bytes to a disk.
pub fn write(disk: &impl Disk, at: u64, bytes: &[u8]) {
    let extent = Extent::from_range(at..at + bytes.len() as u64);
    block_on(disk.write(extent, &Segments::copied(bytes), false)).unwrap();
}

/// Bytes that say where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8 | 1
        })
        .collect()
}

/// A dynamic VHD of four blocks of 2 MiB at `path`, the first two written, closed.
pub fn dynamic_sample(path: &str) -> (World, Arc<MemFile>) {
    let world = World::new();
    let file = world.vhd(path, DiskType::Dynamic, 8 << 20, 2 << 20);
    let disk = world.open(path);
    write(&disk, 0, &pattern(1, 4096));
    write(&disk, 2 << 20, &pattern(2, 4096));
    block_on(disk.close()).unwrap();
    (world, file)
}
