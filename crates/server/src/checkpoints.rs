//! The checkpoints of a disk that is open: a server's, and that of a command where no server has the disk.
//!
//! The file of changed blocks lies beside the disk and is open and locked as long as the disk is open for writing. Whoever opens a disk for
//! writing either opens that file, too ([`Checkpoints::open`]), or has it say that everything has changed ([`forget`]).

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_lock::Mutex as TurnLock;
use spile_core::{Disk as _, Error, ErrorKind, Extent, Files as _, OpenMode, Result, Store as _};
use spile_engine::{FileKey, OsEnv};
use spile_image::Graph;
use spile_image::layer::Layer as _;
use spile_life::changes::header::Grain;
use spile_life::changes::{Broken, Changed, Changes, Checkpoint, Loss, Packed, Surroundings, is_hidden};
use spile_life::names;
use spile_life::revert::Noting;
use spile_node::{Node, Place};
use spile_store::{AnyStore, CacheMode, HostStore, OsFiles};

use crate::inner_bitmaps::{self, Seen};
use crate::jobs::Access;
use crate::look;

/// The disk as requests see it.
type Disk = Node<Graph<HostStore>>;

/// The checkpoints of one open disk.
pub struct Checkpoints {
    files: OsFiles,
    /// `None` while the disk has no file of changed blocks.
    changes: TurnLock<Option<Arc<Changes<OsFiles>>>>,
    shown: Mutex<Shown>,
}

/// What is told without a wait.
#[derive(Clone, Default)]
struct Shown {
    names: Vec<String>,
    changes: Option<Arc<Changes<OsFiles>>>,
    /// Why nobody knows which checkpoints there were.
    damage: Option<&'static str>,
    /// The bitmaps of the image of a disk that is open for reading.
    seen: Option<Seen>,
}

/// The checkpoints of a disk that is about to be elsewhere.
pub struct Carrying<'c> {
    /// Nobody else changes the checkpoints.
    slot: MutexGuardOfTurns<'c>,
    /// `None` when there is nothing to take along.
    new: Option<Changes<OsFiles>>,
    since: Option<String>,
}

/// Held by whoever changes the checkpoints.
pub type MutexGuardOfTurns<'c> = async_lock::MutexGuard<'c, Option<Arc<Changes<OsFiles>>>>;

impl<'c> Noting<HostStore> for &'c Checkpoints {
    type Turn = MutexGuardOfTurns<'c>;

    async fn note_difference(&self, from: &Graph<HostStore>, to: &Graph<HostStore>) -> Result<Self::Turn> {
        Checkpoints::note_difference(self, from, to).await
    }
}

impl Carrying<'_> {
    /// True when there is something beside the image that the disk is to be.
    pub fn has_some(&self) -> bool {
        self.new.is_some()
    }
}

impl Checkpoints {
    /// None yet, for a disk whose files are opened by `access`.
    pub fn none(access: Access) -> Self {
        let files = OsFiles::new(CacheMode::Page).without_locks(access.no_lock);
        Self { files, changes: TurnLock::new(None), shown: Mutex::default() }
    }

    /// Opens the checkpoints of the disk `graph`, if it has some. No request may change the disk before [`Checkpoints::attach`]. Those of a disk that
    /// is open for reading only can be read; where they cannot, it has none. Bitmaps inside the image are checkpoints, too.
    ///
    /// # Errors
    /// `Busy` while another process has them open; `Unsupported` when a newer program has written their file; the system's, where the file
    /// can neither be read nor removed.
    pub async fn open(&self, graph: &Graph<HostStore>) -> Result<()> {
        self.open_own(graph).await?;
        match graph.info().read_only {
            true => self.see_bitmaps(graph).await,
            false => Box::pin(self.follow_bitmaps(graph)).await,
        }
        Ok(())
    }

    /// Has the bitmaps of the image that is open for reading be told.
    async fn see_bitmaps(&self, graph: &Graph<HostStore>) {
        let changes = self.now();
        let (mut own, mut is_unknown) = (Vec::new(), false);
        if let Some(changes) = &changes {
            let there = graph.handles()[0].image().bitmaps().await.unwrap_or_default();
            is_unknown = changes.doubt_bitmaps(there.as_deref()).await;
        }
        for name in self.names() {
            if let Some(changes) = &changes
                && !changes.is_told_by_image(&name).await
            {
                own.push(name);
            }
        }
        self.shown().seen = Seen::of(graph, &own, is_unknown).await;
    }

    /// Has the bitmaps of the image be checkpoints, for which it gets a file of changed blocks if it has none. Where that fails, they are not kept up.
    async fn follow_bitmaps(&self, graph: &Graph<HostStore>) {
        let mut slot = self.changes.lock().await;
        let (mut changes, is_new) = (slot.clone(), slot.is_none());
        let followed = async {
            let (path, recording) = (place(graph), inner_bitmaps::recording(graph.handles()[0].image()).await?);
            if changes.is_none() && !recording.is_empty() {
                let grain = inner_bitmaps::grain(&recording, graph.size_bytes());
                changes = Some(Arc::new(self.create_at(graph, &path?, grain).await?));
            }
            match &changes {
                Some(changes) => inner_bitmaps::follow(changes, graph).await,
                None => Ok(()),
            }
        };
        if let Err(error) = followed.await {
            inner_bitmaps::tell_unread(graph, &error);
        }
        if let Some(new) = changes.as_ref().filter(|_| is_new)
            && new.names().await.0.is_empty()
        {
            let _ = new.leave().await;
            return;
        }
        *slot = changes;
        self.show(slot.as_ref()).await;
    }

    /// As [`Checkpoints::open`], but for bitmaps inside the image: nobody keeps those up. So it is for a half, whose checkpoints another host sends while
    /// the disk's bytes come ([`Checkpoints::adopt`]).
    ///
    /// # Errors
    /// As there.
    pub async fn open_own(&self, graph: &Graph<HostStore>) -> Result<()> {
        let Ok(disk) = place(graph) else { return Ok(()) };
        let side = names::changes(&disk);
        let (size, found) = (graph.size_bytes(), look::found(graph, &side).await);
        if graph.info().read_only {
            let opened = Changes::open_to_read(self.around(), &disk, size, found).await;
            self.take(opened.unwrap_or_else(|error| {
                tracing::warn!("{}: the disk is open without its checkpoints: {error}", side.display());
                None
            }))
            .await;
            return Ok(());
        }
        let mut opened = Changes::open(self.around(), &disk, size, found).await;
        if opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Io) {
            // It may pass, and what cannot be read is lost.
            opened = Changes::open(self.around(), &disk, size, found).await;
        }
        let opened = match opened {
            Err(error) if error.kind() == ErrorKind::Io => {
                // What cannot be read tells nothing; the disk matters more.
                tracing::error!("the disk's checkpoints are lost, as their file cannot be read: {error}");
                let removed = self.files.remove(&side).await;
                removed.map_err(|error| error.hint("this file cannot be read: move it away"))?;
                None
            }
            opened => opened.map_err(|error| error.at_path(&side))?,
        };
        self.take(opened).await;
        Ok(())
    }

    async fn take(&self, opened: Option<Changes<OsFiles>>) {
        let mut changes = self.changes.lock().await;
        *changes = opened.map(Arc::new);
        self.show(changes.as_ref()).await;
    }

    /// Has requests to the disk be noted from now on. It is to be called before the first request.
    ///
    /// # Errors
    /// `Shutdown` when the disk is closed.
    pub async fn attach(&self, disk: &Disk) -> Result<()> {
        match &*self.changes.lock().await {
            Some(changes) => changes.attach(disk).await,
            None => Ok(()),
        }
    }

    /// Makes a checkpoint. `block_bytes` is how finely changes are kept from the first one on; 64 KiB where it is not said.
    ///
    /// # Errors
    /// As [`Checkpoints::make_with`].
    pub async fn make(&self, disk: &Disk, name: &str, block_bytes: Option<u32>) -> Result<()> {
        self.make_with(disk, name, block_bytes, async || Ok(())).await
    }

    /// Makes a checkpoint that no user sees ([`is_hidden`]).
    ///
    /// # Errors
    /// As [`Checkpoints::make_with`].
    pub async fn make_hidden(&self, disk: &Disk, name: &str) -> Result<()> {
        self.make_any(disk, name, None, async || Ok(())).await
    }

    /// As [`Checkpoints::make`]; `meanwhile` runs in the moment of the checkpoint: what is written from its begin on counts as changed since.
    ///
    /// # Errors
    /// `Exists` when there is one of this name; `InvalidInput` for a name or a size of blocks that cannot be, or when there are too many;
    /// `Unsupported` for a disk that is no file; `ReadOnly`; `meanwhile`'s; the system's. There is no new checkpoint then, but after an error of
    /// writing its file there may be one when the disk is opened next.
    pub async fn make_with(
        &self,
        disk: &Disk,
        name: &str,
        block_bytes: Option<u32>,
        meanwhile: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        if is_hidden(name) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{name:?} cannot be the name of a checkpoint")));
        }
        let has_it = {
            let graph = disk.graph().await;
            inner_bitmaps::has(&graph, name).await?
        };
        if has_it {
            let what = format!("the disk's image has a bitmap {name:?} already");
            return Err(Error::new(ErrorKind::Exists, what).hint("choose another name"));
        }
        self.make_any(disk, name, block_bytes, meanwhile).await
    }

    async fn make_any(
        &self,
        disk: &Disk,
        name: &str,
        block_bytes: Option<u32>,
        meanwhile: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut slot = self.changes.lock().await;
        // After a loss that is told to everybody, a new file begins anew.
        let is_usable = |changes: &&Arc<_>| !Changes::loss(changes).is_some_and(|loss: &Loss| loss.is_removed);
        let (changes, is_new) = match slot.as_ref().filter(is_usable) {
            Some(changes) => {
                refuse_elsewhere(changes, disk).await?;
                check_grain(changes.names().await.1, block_bytes)?;
                (changes.clone(), false)
            }
            None => (Arc::new(self.create(disk, block_bytes).await?), true),
        };
        let made = changes.checkpoint_with(disk, name, meanwhile).await;
        // A file without a checkpoint is of no use. While it is there, its bits are set.
        let is_left = is_new && made.is_err() && changes.names().await.0.is_empty() && changes.leave().await.is_ok();
        match is_left {
            true => disk.replace(Place::ChangeTracking, None).await?,
            false => *slot = Some(changes),
        }
        self.show(slot.as_ref()).await;
        made
    }

    async fn create(&self, disk: &Disk, block_bytes: Option<u32>) -> Result<Changes<OsFiles>> {
        let graph = disk.graph().await;
        let path = place(&graph)?;
        if graph.info().read_only {
            let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only").at_path(&path);
            return Err(error.hint("what cannot change needs no checkpoint"));
        }
        self.create_at(&graph, &path, grain(block_bytes)?).await
    }

    /// Makes the file of changed blocks of the disk at `path`.
    async fn create_at(&self, graph: &Graph<HostStore>, path: &Path, grain: Grain) -> Result<Changes<OsFiles>> {
        let (around, side) = (self.around(), names::changes(path));
        let found = look::now(graph, &side).await;
        let changes = Changes::create(around, path, graph.size_bytes(), grain, found);
        let changes = changes.await.map_err(|error| error.at_path(&side))?;
        if let Err(error) = self.files.copy_access(leaf_store(graph), changes.store()).await {
            let _ = changes.leave().await;
            return Err(error);
        }
        Ok(changes)
    }

    /// Removes a checkpoint, and the bitmap of the image that it is. What has changed since earlier ones stays known. With the last one, the file goes.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the image keeps the bitmap while it is in use; the system's.
    pub async fn remove(&self, disk: &Disk, name: &str) -> Result<()> {
        let mut slot = self.changes.lock().await;
        let Some(changes) = slot.as_ref() else { return Err(no_checkpoint(name)) };
        if changes.is_bitmap(name).await {
            // When this process ends behind that, the next one finds no bitmap, and removes the checkpoint.
            disk.graph().await.handles()[0].image().remove_bitmap(name).await?;
        }
        let mut removed = changes.remove(disk, name).await;
        if removed.is_ok() && changes.names().await.0.is_empty() {
            removed = changes.leave().await;
            *slot = None;
        }
        self.show(slot.as_ref()).await;
        removed
    }

    /// The checkpoints that no user sees.
    pub async fn hidden(&self) -> Vec<String> {
        match self.now() {
            Some(changes) => changes.names().await.0.into_iter().filter(|name| is_hidden(name)).collect(),
            None => Vec::new(),
        }
    }

    /// Gives a checkpoint another name, in the place of one that has that.
    ///
    /// # Errors
    /// `NotFound`; the system's.
    pub async fn rename(&self, disk: &Disk, name: &str, to: &str) -> Result<()> {
        let slot = self.changes.lock().await;
        let Some(changes) = slot.as_ref() else { return Err(no_checkpoint(name)) };
        let renamed = match changes.names().await.0.iter().any(|known| known == to) {
            true => changes.replace(disk, to, name).await,
            false => changes.rename(name, to).await,
        };
        self.show(slot.as_ref()).await;
        renamed
    }

    /// The disk is to be the image at `half` soon, under the name `to`: from now on its checkpoints are beside that, too, and one more, `since`, unless
    /// there is none to take along ([`Carrying::has_some`]). What is returned is to be given to [`Checkpoints::carried`]; until then nobody makes or removes checkpoints.
    ///
    /// With an error, there is none to take along: they stay behind when the disk goes.
    ///
    /// # Errors
    /// As [`Changes::carry`].
    pub async fn carry<'c>(
        &'c self,
        disk: &Disk,
        half: &Path,
        to: &Path,
        since: Option<&str>,
    ) -> (Carrying<'c>, Result<()>) {
        let slot = self.changes.lock().await;
        let known = slot.as_ref().filter(|changes| changes.loss().is_none()).cloned();
        let nothing = Carrying { slot, new: None, since: None };
        let Some(changes) = known else { return (nothing, Ok(())) };
        if since.is_none() && changes.names().await.0.iter().all(|name| is_hidden(name)) {
            return (nothing, Ok(()));
        }
        match self.carry_to(&changes, disk, (half, to), since).await {
            Ok(new) => (Carrying { new: Some(new), since: since.map(str::to_owned), ..nothing }, Ok(())),
            Err(error) => (nothing, Err(error)),
        }
    }

    async fn carry_to(
        &self,
        changes: &Changes<OsFiles>,
        disk: &Disk,
        (half, to): (&Path, &Path),
        since: Option<&str>,
    ) -> Result<Changes<OsFiles>> {
        let side = names::changes(to);
        let found = look::at(half, &side).await;
        let new = changes.carry(self.around(), disk, (to, found), since).await?;
        match self.files.copy_access(changes.store(), new.store()).await {
            Ok(()) => Ok(new),
            Err(error) => changes.left_behind(disk, new).await.and(Err(error)),
        }
    }

    /// The disk is where [`Checkpoints::carry`] has taken its checkpoints, or stays where it is.
    ///
    /// # Errors
    /// The system's.
    pub async fn carried(&self, disk: &Disk, carrying: Carrying<'_>, is_there: bool) -> Result<()> {
        let Carrying { mut slot, new, since } = carrying;
        let Some(old) = slot.clone() else { return Ok(()) };
        let Some(new) = new else {
            // Nobody needs what is left. A checkpoint that is made from now on gets a file beside the new image.
            if is_there && old.loss().is_none() {
                disk.replace(Place::ChangeTracking, None).await?;
                *slot = None;
                self.show(None).await;
                old.leave().await?;
            }
            return Ok(());
        };
        if !is_there {
            return old.left_behind(disk, new).await;
        }
        let carried = new.carried(disk, since.as_deref()).await;
        *slot = Some(Arc::new(new));
        self.show(slot.as_ref()).await;
        carried.and(old.leave().await)
    }

    /// What another host is to have of them, and of one more, `since`. Until the guard is dropped nobody makes or removes checkpoints.
    ///
    /// # Errors
    /// As [`Changes::pack`].
    pub(crate) async fn pack<'c>(
        &'c self,
        disk: &Disk,
        since: Option<&str>,
        goes: bool,
    ) -> Result<(MutexGuardOfTurns<'c>, Option<Packed<AnyStore>>)> {
        let slot = self.changes.lock().await;
        let packed = match slot.as_ref().filter(|changes| changes.loss().is_none()).cloned() {
            Some(changes) => changes.pack(disk.size_bytes(), since, goes).await?,
            None => None,
        };
        Ok((slot, packed))
    }

    /// The file at `packed`, which another host has sent, is that of the disk from now on: all that is written to it later has its bits there.
    ///
    /// # Errors
    /// As [`Changes::adopt`]. The disk has no checkpoints then, or those of before.
    pub async fn adopt(&self, disk: &Disk, packed: &Path) -> Result<()> {
        let graph = disk.graph().await;
        let path = place(&graph)?;
        let side = names::changes(&path);
        let mut slot = self.changes.lock().await;
        // What is noted from now on is not what the bitmaps of the image need.
        inner_bitmaps::keep_none(&graph).await?;
        // It was adopted before, and the answer was not heard.
        if slot.is_some() && !packed.exists() {
            return Ok(());
        }
        if let Some(before) = slot.as_ref() {
            before.be_replaced().await;
        }
        let found = look::now(&graph, &side).await;
        let adopted = Changes::adopt(self.around(), packed, &path, disk.size_bytes(), found).await;
        let adopted = match adopted {
            Err(error) if packed.exists() => return Err(error),
            Err(error) => {
                // Nothing tells what has changed, so nothing may say so.
                disk.replace(Place::ChangeTracking, None).await?;
                *slot = None;
                let _ = self.files.remove(&side).await;
                self.show(None).await;
                return Err(error);
            }
            Ok(adopted) => Arc::new(adopted),
        };
        *slot = Some(adopted.clone());
        self.show(slot.as_ref()).await;
        adopted.attach(disk).await?;
        self.files.copy_access(leaf_store(&graph), adopted.store()).await
    }

    /// Which disk these are of, wherever that goes, if they say it.
    pub async fn disk_id(&self) -> Option<[u8; 16]> {
        match self.now() {
            Some(changes) => changes.disk_id().await,
            None => None,
        }
    }

    /// When the checkpoint `name` was made, in seconds since 1970 UTC.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn made_at(&self, name: &str) -> Result<u64> {
        if self.seen_with(name).is_some() {
            return Ok(0);
        }
        match self.now() {
            Some(changes) => changes.made_at(name).await,
            None => Err(no_checkpoint(name)),
        }
    }

    /// The checkpoints, oldest first, and the size of a block in bytes, if there is a file of changed blocks.
    pub async fn list(&self, disk: &Disk) -> (Vec<Checkpoint>, Option<u32>) {
        let seen = self.shown().seen.clone();
        let mut all = match self.now() {
            Some(changes) => changes.checkpoints(disk.size_bytes()).await,
            None => Vec::new(),
        };
        let is_seen = |name: &str| seen.as_ref().is_some_and(|seen| seen.has(name));
        all.retain(|one| !is_hidden(&one.name) && !is_seen(&one.name));
        if let Some(seen) = &seen {
            match seen.checkpoints().await {
                Ok(more) => all.extend(more),
                Err(error) => tracing::warn!("the bitmaps inside the image cannot be read: {error}"),
            }
        }
        (all, self.block_bytes().await)
    }

    /// The bitmaps of an image that is open for reading, if `name` is one.
    fn seen_with(&self, name: &str) -> Option<Seen> {
        self.shown().seen.clone().filter(|seen| seen.has(name))
    }

    /// The size of a block in bytes, if there is a file of changed blocks.
    pub async fn block_bytes(&self) -> Option<u32> {
        match self.now() {
            Some(changes) => Some(changes.names().await.1),
            None => self.shown().seen.as_ref().map(Seen::block_bytes),
        }
    }

    /// What may have changed from the checkpoint `since` to the later one `until`, or to now, in the part `within` of the disk.
    ///
    /// # Errors
    /// `NotFound` when there is no such checkpoint; `InvalidInput` when `until` is not later.
    pub async fn changed(&self, disk: &Disk, since: &str, until: Option<&str>, within: Range<u64>) -> Result<Changed> {
        if let Some(seen) = self.seen_with(since).filter(|_| until.is_none()) {
            return seen.changed(since, within).await;
        }
        match self.now() {
            Some(changes) => changes.between(since, until, within, disk.size_bytes()).await,
            None => Err(no_checkpoint(since)),
        }
    }

    /// The names of the checkpoints now, oldest first.
    pub fn names(&self) -> Vec<String> {
        let shown = self.shown();
        let mut names = shown.names.clone();
        let seen = shown.seen.iter().flat_map(Seen::names);
        names.extend(seen.filter(|name| !shown.names.contains(name)));
        names
    }

    /// Why changes are not noted any more, or are not known, if that is so.
    pub fn loss(&self) -> Option<String> {
        let Shown { changes, damage, .. } = self.shown().clone();
        let loss = changes.and_then(|changes| changes.loss().map(|loss| loss.why.clone()));
        loss.or(damage.map(str::to_owned))
    }

    /// The key with which somebody can wait until the file is unlocked, once it is closed.
    pub fn key(&self) -> Option<FileKey> {
        self.now().and_then(|changes| changes.store().key())
    }

    /// The disk has another leaf now, as after a snapshot.
    pub async fn note_images(&self, graph: &Graph<HostStore>) {
        let Some(changes) = self.now() else { return };
        let stamp = if is_beside(&changes, graph) { look::stamp(graph).await } else { look::unlike_any() };
        if let Err(error) = changes.note_image(stamp).await {
            tracing::warn!(
                "the disk's checkpoints: everything will count as changed if this process is killed: {error}"
            );
        }
    }

    /// The disk is on another host now: whoever opens an image of this one next knows nothing of its changes, also when this process is killed.
    ///
    /// # Errors
    /// The system's.
    pub async fn note_elsewhere(&self) -> Result<()> {
        match self.now() {
            Some(changes) => changes.note_image(look::unlike_any()).await,
            None => Ok(()),
        }
    }

    /// Everything counts as changed from now on, durably: the disk gets another content by other ways than requests.
    ///
    /// # Errors
    /// The system's.
    pub async fn forget(&self) -> Result<()> {
        match self.now() {
            Some(changes) => changes.forget_all().await,
            None => Ok(()),
        }
    }

    /// The disk `from` is about to be what `to` is: what differs counts as changed from now on, durably. Until the guard is dropped nobody makes or removes
    /// checkpoints: one that is made now would not have it marked.
    ///
    /// # Errors
    /// As [`Changes::note_difference`].
    pub async fn note_difference(
        &self,
        from: &Graph<HostStore>,
        to: &Graph<HostStore>,
    ) -> Result<MutexGuardOfTurns<'_>> {
        let slot = self.hold().await;
        if let Some(changes) = &*slot {
            changes.note_difference(from, to).await?;
        }
        Ok(slot)
    }

    /// Until the guard is dropped nobody makes or removes checkpoints: while the disk's images get other names, its first checkpoint would get a file beside the
    /// wrong one.
    pub async fn hold(&self) -> MutexGuardOfTurns<'_> {
        self.changes.lock().await
    }

    /// The bytes of `extent` are about to change by other ways than requests: they count as changed from now on, durably. Where that cannot be noted,
    /// everything does.
    ///
    /// # Errors
    /// The system's.
    pub async fn note_extent(&self, extent: Extent) -> Result<()> {
        match self.now() {
            Some(changes) => changes.note_surely(&[extent]).await,
            None => Ok(()),
        }
    }

    /// Closes the checkpoints of a disk that is closed and still locked: `graph` is what it was. What fails has everything count as
    /// changed, and is told in the log.
    pub async fn close(&self, graph: &Graph<HostStore>) {
        let Some(changes) = self.changes.lock().await.take() else { return };
        *self.shown() = Shown::default();
        let closed = match is_beside(&changes, graph) {
            true => changes.close(look::last_stamp(graph).await).await,
            false => changes.leave().await,
        };
        if let Err(error) = closed {
            tracing::error!("the disk's checkpoints could not be closed: {error}");
        }
    }

    fn now(&self) -> Option<Arc<Changes<OsFiles>>> {
        self.shown().changes.clone()
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn show(&self, changes: Option<&Arc<Changes<OsFiles>>>) {
        let (names, damage) = match changes {
            Some(changes) => (changes.names().await.0, changes.damage().await),
            None => (Vec::new(), None),
        };
        let names = names.into_iter().filter(|name| !is_hidden(name)).collect();
        let mut shown = self.shown();
        let seen = shown.seen.take();
        *shown = Shown { names, changes: changes.cloned(), damage, seen };
    }

    fn around(&self) -> Surroundings<OsFiles> {
        Surroundings {
            files: self.files,
            env: Arc::new(OsEnv),
            timer: Arc::new(OsEnv),
            alarm: |path, error| {
                let path = path.display();
                tracing::error!(
                    "{path}: the disk's changes are not noted any more, and its checkpoints are lost: {error}"
                );
            },
            broken: Broken::Nothing,
        }
    }
}

/// Has everything count as changed of the disk `graph`, durably, because it is written by a command that notes no changes.
///
/// # Errors
/// As [`Checkpoints::open`]; the system's.
pub async fn forget(graph: &Graph<HostStore>, no_lock: bool) -> Result<()> {
    let checkpoints = Checkpoints::none(Access { no_lock, ..Access::default() });
    // Bitmaps inside the image are in use from the first change on, and nobody keeps them up.
    checkpoints.open_own(graph).await?;
    checkpoints.forget().await
}

/// True when the file of changed blocks lies beside the disk's image: a disk that was moved has left it behind.
fn is_beside(changes: &Changes<OsFiles>, graph: &Graph<HostStore>) -> bool {
    changes.store().path() == names::changes(&path_to_be(graph.handles()[0].path()))
}

/// Refuses to make a checkpoint of a disk that has been handed over to another place, beside which nobody would find it.
async fn refuse_elsewhere(changes: &Changes<OsFiles>, disk: &Disk) -> Result<()> {
    let graph = disk.graph().await;
    if is_beside(changes, &graph) {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Unsupported, "the disk is on another host now, and its checkpoints are there");
    Err(error.at_path(&path_of(&graph)).hint("end this server, and make the checkpoint on that host"))
}

/// The path of the disk that the image at `path` is, or is to be: the file of changed blocks of a half lies beside the name that it gets.
fn path_to_be(path: &Path) -> PathBuf {
    names::disk_of_half(path).unwrap_or_else(|| path.to_owned())
}

/// The file of the disk's own image.
fn leaf_store(graph: &Graph<HostStore>) -> &AnyStore {
    graph.handles()[0].image().store()
}

fn path_of(graph: &Graph<HostStore>) -> PathBuf {
    graph.handles()[0].path().to_owned()
}

/// Removes the checkpoints of what lies at `path`, before it gets another content. Nobody may have it open.
///
/// # Errors
/// `Busy`; the system's.
pub async fn lose(path: &Path, no_lock: bool) -> Result<()> {
    let files = OsFiles::new(CacheMode::Page).without_locks(no_lock);
    let Some(side) = file_of(&files.canonical(path).await?) else { return Ok(()) };
    let locked = files.open(&path.into(), OpenMode::ReadWrite).await?;
    let removed = files.remove(&side).await;
    drop(locked);
    removed
}

/// The path of a disk that can have checkpoints.
fn place(graph: &Graph<HostStore>) -> Result<PathBuf> {
    let leaf = &graph.handles()[0];
    let path = leaf.path();
    // Of a write to a device by another program nothing can be seen, also where that holds the image's data alone.
    let are_files = [leaf.image().store(), leaf.image().data_store()].iter().all(|store| store.info().grows_zeroed);
    if path.is_absolute() && are_files {
        return Ok(path_to_be(path));
    }
    let error =
        Error::new(ErrorKind::Unsupported, "there is no folder beside it in which changed blocks could be kept");
    Err(error.at_path(path).hint("only disks in files have checkpoints"))
}

fn grain(block_bytes: Option<u32>) -> Result<Grain> {
    let usual = Grain::default();
    let block_bytes = block_bytes.unwrap_or(usual.block_bytes);
    let grain = Grain { block_bytes, area_bytes: usual.area_bytes.max(block_bytes) };
    if block_bytes >= 4096 && grain.is_sound() {
        return Ok(grain);
    }
    let what = format!("blocks cannot have {block_bytes} bytes");
    Err(Error::new(ErrorKind::InvalidInput, what).hint("use a power of two from 4K to 1G"))
}

fn check_grain(have: u32, wanted: Option<u32>) -> Result<()> {
    match wanted.filter(|wanted| *wanted != have) {
        Some(wanted) => {
            let what = format!("the disk's blocks have {have} bytes already, not {wanted}");
            Err(Error::new(ErrorKind::InvalidInput, what).hint("the first checkpoint says it for all"))
        }
        None => Ok(()),
    }
}

fn no_checkpoint(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("the disk has no checkpoint {name:?}; there is none"))
        .hint("spile checkpoint makes one")
}

/// The file of changed blocks of the disk at `disk`, if it is there.
pub fn file_of(disk: &Path) -> Option<PathBuf> {
    Some(names::changes(disk)).filter(|side| side.exists())
}
