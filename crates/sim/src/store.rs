//! The seams of `spile-core` over a [`World`]: [`SimFiles`], [`SimStore`], [`SimEnv`].
//!
//! A handle belongs to the life of the process in which it was made: after a crash it answers only `Shutdown`.

use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use spile_core::{
    Env, Error, ErrorKind, Files, Locator, OpenMode, PathCell, Result, Segment, Segments, Store, StoreExtent,
    StoreInfo, StoreOffset, Via, Work,
};

use crate::exec::spawn_beside;
use crate::faults::Sabotage;
use crate::file::SimFile;
use crate::names::Change;
use crate::op::Kind;
use crate::rng::{Rng, mix};
use crate::turns::turns;
use crate::workload::UNREAD;
use crate::world::World;

/// A read that is slow on purpose comes after so many turns at most.
const MOST_DELAY: u64 = 4000;

/// The simulated file system, as one life of the process sees it.
#[derive(Clone)]
pub struct SimFiles {
    world: World,
    life: u64,
    /// The process that opens files; 0 for one that takes no notice of the locks of readers.
    owner: u64,
}

/// One open simulated file.
pub struct SimStore {
    world: World,
    life: u64,
    file: usize,
    path: PathCell,
    mode: OpenMode,
    owner: u64,
    /// This store has the file's lock, and may write.
    has_lock: AtomicBool,
    /// It counts among the file's readers.
    is_reader: AtomicBool,
}

/// The simulated clock, randomness and boot.
pub struct SimEnv {
    world: World,
}

/// Waits for the answer to one operation; dropping it leaves the operation in flight.
struct Answer {
    world: World,
    id: u64,
}

impl Future for Answer {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = self.world.lock();
        if let Some(result) = state.results.remove(&self.id) {
            return Poll::Ready(result);
        }
        state.wait(self.id, cx.waker());
        Poll::Pending
    }
}

impl SimFiles {
    pub(crate) fn new(world: World) -> Self {
        let life = world.lock().life;
        Self { world, life, owner: 0 }
    }

    /// The same files, as the process of this number sees them: it has locks of its own, for reading as for writing.
    pub(crate) fn of_process(self, owner: u64) -> Self {
        Self { owner, ..self }
    }

    /// [`Files::create`], at once.
    pub fn create(&self, path: &Path, len_bytes: u64) -> Result<SimStore> {
        let path = self.canonical_name(path);
        if self.world.lock().names.get(&path).is_some() {
            return Err(Error::new(ErrorKind::Exists, "cannot create").at_path(&path));
        }
        self.world.install_empty(path.clone(), len_bytes);
        self.take(path, OpenMode::ReadWrite)
    }

    fn take(&self, path: PathBuf, mode: OpenMode) -> Result<SimStore> {
        let mut state = self.world.lock();
        let Some(file) = state.names.get(&path) else {
            return Err(Error::new(ErrorKind::NotFound, "cannot open").at_path(&path));
        };
        state.lock_file(file, mode, self.owner).map_err(|error| error.at_path(&path))?;
        drop(state);
        Ok(self.store(file, PathCell::new(path), mode))
    }

    fn store(&self, file: usize, path: PathCell, mode: OpenMode) -> SimStore {
        let (world, life, owner) = (self.world.clone(), self.life, self.owner);
        let has_lock = AtomicBool::new(mode == OpenMode::ReadWrite);
        let is_reader = AtomicBool::new(mode == OpenMode::ReadOnly && owner != 0);
        SimStore { world, life, file, path, mode, owner, has_lock, is_reader }
    }

    /// The number of the file at `path`.
    fn number_of(&self, path: &Path) -> Result<usize> {
        let found = self.world.lock().names.get(path);
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "no such file").at_path(path))
    }

    /// Lets the time pass that an operation on the names of `file` takes.
    async fn take_time(&self, file: usize) -> Result<()> {
        let id = {
            let mut state = self.world.lock();
            if state.life != self.life {
                return Err(Error::new(ErrorKind::Shutdown, "this process died"));
            }
            state.submit(file, Kind::Ask)
        };
        Answer { world: self.world.clone(), id }.await
    }

    /// Sabotage: as [`Files::rename`], but not durable when it returns.
    pub(crate) async fn rename_unsynced(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (self.canonical_name(from), self.canonical_name(to));
        self.take_time(self.number_of(&from)?).await?;
        let _ = self.world.lock().names.change(Change::Rename(from, to));
        Ok(())
    }

    /// Gives the file of `store` one more name, whatever names it has.
    pub(crate) async fn link_store(&self, store: &SimStore, to: &Path) -> Result<()> {
        self.change(store.file, Change::Add(self.canonical_name(to), store.file)).await
    }

    /// Changes names: seen at once, and durable when it returns. An injected fault comes before or after the change is seen.
    async fn change(&self, file: usize, change: Change) -> Result<()> {
        self.take_time(file).await?;
        let number = {
            let mut state = self.world.lock();
            let chance = state.faults.write_eio;
            state.fault(chance, 5)?;
            state.note("names", [file as u64, 0, 0]);
            state.note_change(&change);
            state.names.change(change)
        };
        self.take_time(file).await?;
        let mut state = self.world.lock();
        let chance = state.faults.sync_eio + state.faults.names_eio;
        state.fault(chance, 5)?;
        state.names.sync(number);
        Ok(())
    }

    fn canonical_name(&self, path: &Path) -> PathBuf {
        let mut out = PathBuf::from("/");
        for part in path.components() {
            match part {
                Component::Normal(name) => out.push(name),
                Component::ParentDir => {
                    out.pop();
                }
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
        out
    }
}

impl Files for SimFiles {
    type Store = SimStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<SimStore> {
        let path =
            at.as_path().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no simulated store at {at}")))?;
        let store = self.take(self.canonical_name(path), mode)?;
        store.run(Kind::Ask).await?;
        Ok(store)
    }

    /// The empty file is durable at once.
    async fn create(&self, path: &Path, len_bytes: u64) -> Result<SimStore> {
        SimFiles::create(self, path, len_bytes)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (self.canonical_name(from), self.canonical_name(to));
        self.change(self.number_of(&from)?, Change::Rename(from, to)).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (self.canonical_name(from), self.canonical_name(to));
        if self.number_of(&to).is_ok() {
            return Err(Error::new(ErrorKind::Exists, "the name is taken").at_path(&to));
        }
        let file = self.number_of(&from)?;
        self.change(file, Change::Add(to, file)).await
    }

    async fn is_at(&self, store: &SimStore, path: &Path) -> Result<bool> {
        self.take_time(store.file).await?;
        Ok(self.world.lock().names.get(&self.canonical_name(path)) == Some(store.file))
    }

    async fn reopen(&self, store: &SimStore, mode: OpenMode) -> Result<SimStore> {
        self.take_time(store.file).await?;
        let mut state = self.world.lock();
        // A store that writes gives up its lock, and what it could still write. It reads on.
        if mode == OpenMode::ReadOnly && store.has_lock.swap(false, Ordering::Relaxed) {
            state.files[store.file].locked = false;
            if store.owner != 0 {
                store.is_reader.store(true, Ordering::Relaxed);
                state.files[store.file].readers.push(store.owner);
            }
        }
        state.lock_file(store.file, mode, self.owner).map_err(|error| error.at_path(store.path()))?;
        drop(state);
        Ok(self.store(store.file, PathCell::new(store.path().to_owned()), mode))
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        let path = self.canonical_name(path);
        self.change(self.number_of(&path)?, Change::Remove(path)).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        self.take_time(self.number_of(&self.canonical_name(path))?).await?;
        self.world.lock().names.sync(usize::MAX);
        Ok(())
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        let path = self.canonical_name(path);
        self.number_of(&path).map(|_| path)
    }
}

impl SimStore {
    async fn run(&self, kind: Kind) -> Result<()> {
        let id = self.submit(kind)?;
        Answer { world: self.world.clone(), id }.await
    }

    fn submit(&self, kind: Kind) -> Result<u64> {
        let mut state = self.world.lock();
        if state.life != self.life {
            return Err(Error::new(ErrorKind::Shutdown, "this process died").at_path(self.path.get()));
        }
        if kind.is_change() && !self.has_lock.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::ReadOnly, "opened read-only").at_path(self.path.get()));
        }
        Ok(state.submit(self.file, kind))
    }

    /// Sabotage: true when a client's read was answered, and what it reads comes later.
    fn is_read_slowly(&self, offset: u64, into: &Segments) -> bool {
        let mut state = self.world.lock();
        if !matches!(state.sabotage, Sabotage::SlowReaders) || into.to_vec().iter().any(|byte| *byte != UNREAD) {
            return false;
        }
        let number = state.slow_begun;
        let draw = mix(offset ^ number << 32);
        state.slow_begun += 1;
        // Most readers are as fast as others.
        if !draw.is_multiple_of(3) {
            return false;
        }
        state.slow_reads.insert(number);
        let (delay, file, life) = (draw % MOST_DELAY, self.file, self.life);
        let (world, into) = (self.world.clone(), into.clone());
        let late = async move {
            turns(delay).await;
            let mut state = world.lock();
            if state.life == life {
                let mut bytes = vec![0; into.len()];
                state.files[file].view.read(offset, &mut bytes);
                into.copy_from_slice(0, &bytes);
                state.slow_reads.remove(&number);
            }
        };
        drop(state);
        spawn_beside(Box::pin(late));
        true
    }

    /// Direct operations that are not aligned are bugs of the image, not errors to be handled.
    fn check_alignment(&self, offset: u64, memory: &Segments, via: Via) {
        let align = u64::from(self.info().offset_align_bytes);
        let len = memory.len() as u64;
        let fits = (offset | len) & (align - 1) == 0 && memory.is_aligned(align as usize);
        assert!(
            via == Via::Cached || fits,
            "{}: a direct operation at {offset:#x}+{len:#x} is not aligned to {align} bytes (or its memory is not)",
            self.path.get().display()
        );
    }

    /// Sabotage: syncs of the file do nothing from here on, or do again what they should.
    pub(crate) fn void_syncs(&self, void: bool) {
        self.world.lock().files[self.file].syncs_nothing = void;
    }

    /// What the file holds, for code that only looks. This is no operation of the host.
    pub fn view(&self) -> crate::pages::Pages {
        self.world.lock().files[self.file].view.clone()
    }
}

impl Drop for SimStore {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        if state.life != self.life {
            return;
        }
        let file = &mut state.files[self.file];
        if self.has_lock.load(Ordering::Relaxed) {
            file.locked = false;
        }
        if self.is_reader.load(Ordering::Relaxed)
            && let Some(at) = file.readers.iter().position(|reader| *reader == self.owner)
        {
            file.readers.swap_remove(at);
        }
    }
}

impl Store for SimStore {
    fn info(&self) -> StoreInfo {
        let hardware = self.world.hardware();
        StoreInfo {
            offset_align_bytes: hardware.align_bytes,
            memory_align_bytes: hardware.align_bytes,
            grows_zeroed: !hardware.devices,
            punches: hardware.punches,
            read_only: self.mode == OpenMode::ReadOnly,
            is_local: true,
        }
    }

    fn len_bytes(&self) -> u64 {
        self.world.lock().files[self.file].view.len()
    }

    fn path(&self) -> &Path {
        self.path.get()
    }

    fn set_path(&self, path: &Path) {
        self.path.set(path);
    }

    fn file_identity(&self) -> Option<[u8; 16]> {
        Some((self.file as u128).to_le_bytes())
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        self.check_alignment(offset.0, into, via);
        if self.is_read_slowly(offset.0, into) {
            return Ok(());
        }
        let kind = Kind::Read { offset: offset.0, into: into.clone() };
        self.run(kind).await.map_err(|e| e.at_path(self.path.get()).at_offset(offset.0))
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        self.check_alignment(offset.0, from, via);
        let kind = Kind::Write { offset: offset.0, from: from.clone(), via };
        self.run(kind).await.map_err(|e| e.at_path(self.path.get()).at_offset(offset.0))
    }

    async fn sync(&self) -> Result<()> {
        if self.mode == OpenMode::ReadOnly && self.world.lock().sabotage.voids_readers_sync() {
            return Ok(());
        }
        let kind = Kind::Sync { in_flight: Vec::new(), number: 0 };
        self.run(kind).await.map_err(|e| e.at_path(self.path.get()))
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let kind = Kind::Zero { range: offset.0..offset.0 + len_bytes };
        self.run(kind).await.map_err(|e| e.at_path(self.path.get()).at_offset(offset.0))
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        if !self.info().punches {
            return Err(Error::new(ErrorKind::Unsupported, "cannot punch").at_path(self.path.get()));
        }
        self.zero_range(offset, len_bytes).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.run(Kind::SetLen(len_bytes)).await.map_err(|e| e.at_path(self.path.get()))
    }

    async fn look_for_growth(&self) -> Result<u64> {
        self.run(Kind::Ask).await.map_err(|e| e.at_path(self.path.get()))?;
        if self.world.hardware().devices {
            self.world.lock().files[self.file].lengthen();
        }
        Ok(self.len_bytes())
    }

    fn map(&self, offset: StoreOffset, len_bytes: usize) -> Result<Segment> {
        let mut state = self.world.lock();
        if state.life != self.life {
            return Err(Error::new(ErrorKind::Shutdown, "this process died").at_path(self.path.get()));
        }
        let file = &mut state.files[self.file];
        if offset.0 + len_bytes as u64 > file.view.len() {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end of the file").at_path(self.path.get()));
        }
        Ok(file.map(offset.0, len_bytes))
    }

    async fn taken_bytes(&self) -> Option<u64> {
        Some(self.view().allocated_bytes())
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.run(Kind::Ask).await?;
        let view = self.view();
        if offset.0 >= view.len() {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end").at_path(self.path.get()));
        }
        let (len_bytes, is_hole) = view.run_at(offset.0);
        Ok(StoreExtent { len_bytes, is_hole })
    }
}

impl SimEnv {
    pub(crate) fn new(world: World) -> Self {
        Self { world }
    }
}

impl Env for SimEnv {
    fn now_unix_s(&self) -> u64 {
        self.world.lock().clock_ms / 1000
    }

    fn random_16(&self) -> [u8; 16] {
        let mut state = self.world.lock();
        let (low, high) = (state.env_rng.word(), state.env_rng.word());
        (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
    }

    fn spawn(&self, work: Work) -> bool {
        crate::exec::spawn_beside(work);
        true
    }

    fn boot_id(&self) -> [u8; 16] {
        let mut rng = Rng::new(self.world.lock().boot);
        (u128::from(rng.word()) << 64 | u128::from(rng.word())).to_le_bytes()
    }
}

impl std::fmt::Debug for SimStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimStore({})", self.path.get().display())
    }
}

/// A file whose content is durable from the start.
impl From<&[u8]> for SimFile {
    fn from(content: &[u8]) -> Self {
        let mut pages = crate::pages::Pages::default();
        pages.write(0, content);
        SimFile::durable(pages)
    }
}
