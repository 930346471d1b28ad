//! The other host: what `spile receive` does around the real [`Receiver`]. The house of `spile-server`, with its engine and its sockets, is mirrored here in
//! few lines: one order at a time, one link that writes, a flush before a copy is whole, images that are open for as long as somebody is connected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use spile_core::{Disk, Env, Error, ErrorKind, Files, Locator, OpenMode, Result, Store};
use spile_image::Broken as BrokenMove;
use spile_image::layer::{Identity, Layer};
use spile_image::{Graph, OpenOptions};
use spile_life::changes::{self, Changes};
use spile_life::motion::{Order, Received, ReceivedPlace, ReceivedState, Receiver, is_free_here};
use spile_life::names;
use spile_node::{Node, Place};

use super::link::Connection;
use super::{Broken, is_parent_name};
use crate::exec::{Executor, Process, block_on, spawn_in};
use crate::motion::marks;
use crate::oracle::Crash;
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};
use crate::turns::turns;
use crate::world::World;

/// The process of the receiver.
pub(super) const THERE: Process = 1;

/// Where disks come to first.
pub(super) const FOLDER: &str = "/coming";

/// The file for the changed blocks of a disk on its way is served under a name that begins so.
const MARKS: &str = "marks/";

/// So often it is looked whether somebody has let go of a file.
const MOST_LOOKS: usize = 400;

/// The file of somebody who wants to have a name.
const STRANGE: &[u8; 14] = b"no disk of us.";

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other host over all lives of its process.
pub(super) struct There {
    pub world: World,
    /// Where disks come to.
    pub folder: &'static str,
    /// What has changed of disks comes along, and disks come back.
    pub tracks: bool,
    pub rng: Mutex<Rng>,
    pub broken: Broken,
    house: Mutex<Option<Arc<House>>>,
    connections: Mutex<Vec<Weak<Connection>>>,
    /// How often links were cut, and how often the process has ended.
    pub troubles: AtomicUsize,
    /// What is sent takes long now and then.
    pub is_slow: AtomicBool,
}

/// One life of its process.
pub(super) struct House {
    world: World,
    folder: &'static str,
    tracks: bool,
    files: HouseFiles,
    env: Arc<dyn Env>,
    broken: Broken,
    busy: async_lock::Mutex<()>,
    open: Mutex<BTreeMap<String, Arc<OpenDisk>>>,
    /// The last link of each half, and all those in whose place others have come.
    last: Mutex<BTreeMap<String, Identity>>,
    ended: Mutex<Vec<Identity>>,
    is_dead: AtomicBool,
}

/// A disk that somebody is connected to.
pub(super) struct OpenDisk {
    pub node: Node<Graph<SimStore>>,
    /// What changes of it is noted here.
    changes: Mutex<Option<Arc<Changes<SimFiles>>>>,
    /// The link that writes.
    writer: Mutex<Option<Identity>>,
    users: AtomicUsize,
    /// Nothing that was not begun is done any more.
    is_stopped: AtomicBool,
    connections: Mutex<Vec<Weak<Connection>>>,
}

/// What a connection, and each of its requests, has of a disk.
pub(super) struct Lease {
    house: Arc<House>,
    name: String,
    pub of: Arc<OpenDisk>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.of.users.fetch_sub(1, SeqCst) == 1 && !self.house.is_dead.load(SeqCst) {
            let (house, name, of) = (self.house.clone(), self.name.clone(), Arc::downgrade(&self.of));
            spawn_in(THERE, Box::pin(async move { house.close_unused(&name, &of).await }));
        }
    }
}

impl OpenDisk {
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(SeqCst)
    }

    pub fn add(&self, connection: &Arc<Connection>) {
        lock(&self.connections).push(Arc::downgrade(connection));
    }

    /// No request comes to it any more by the connections that there are.
    fn stop(&self) {
        self.is_stopped.store(true, SeqCst);
        let connected = std::mem::take(&mut *lock(&self.connections));
        connected.iter().filter_map(Weak::upgrade).for_each(|connection| connection.cut());
    }

    pub fn changes(&self) -> Option<Arc<Changes<SimFiles>>> {
        lock(&self.changes).clone()
    }

    async fn close(&self, world: &World) {
        let graph = self.node.graph_now();
        // Whoever has written knows what was flushed; what fails here is seen by the next one who opens it.
        let _ = self.node.close().await;
        let changes = lock(&self.changes).take();
        if let (Some(graph), Some(changes)) = (graph, changes) {
            let _ = changes.close(marks::found_at(world, graph.handles()[0].path()).stamp).await;
        }
    }
}

impl There {
    pub fn new(world: World, (folder, tracks): (&'static str, bool), rng: Rng, broken: Broken) -> Self {
        let (house, connections, troubles, is_slow) = Default::default();
        let rng = Mutex::new(rng);
        let there = Self { world, folder, tracks, rng, broken, house, connections, troubles, is_slow };
        there.start();
        there
    }

    /// The path of the disk `name`.
    pub fn at(&self, name: &str) -> PathBuf {
        Path::new(self.folder).join(name)
    }

    /// The process begins, if there is none.
    pub fn start(&self) {
        lock(&self.house).get_or_insert_with(|| self.new_house(self.broken));
    }

    fn new_house(&self, broken: Broken) -> Arc<House> {
        Arc::new(House::new(&self.world, (self.folder, self.tracks), broken))
    }

    /// The disk `name` is open.
    pub fn has_open(&self, name: &str) -> bool {
        self.house().is_some_and(|house| house.find_open(name).is_some())
    }

    /// What is noted of the changes of the disk `name`, while that is open.
    pub fn changes_of(&self, name: &str) -> Option<Arc<Changes<SimFiles>>> {
        self.house()?.find_open(name)?.changes()
    }

    /// The process ends in order, and no link is there any more.
    pub fn end(&self) {
        if let Some(house) = lock(&self.house).take() {
            house.is_dead.store(true, SeqCst);
        }
        self.world.end(None);
    }

    pub fn house(&self) -> Option<Arc<House>> {
        lock(&self.house).clone()
    }

    pub fn draw<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut lock(&self.rng))
    }

    pub fn add(&self, connection: &Arc<Connection>) {
        let mut all = lock(&self.connections);
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(connection));
    }

    /// All links are cut. What was sent is lost, or comes late.
    pub fn cut_links(&self) {
        self.troubles.fetch_add(1, SeqCst);
        let all = std::mem::take(&mut *lock(&self.connections));
        all.iter().filter_map(Weak::upgrade).for_each(|connection| connection.cut());
    }

    /// The process ends, or its host does.
    pub fn crash(&self, executor: &mut Executor, crash: Crash) {
        if let Some(house) = lock(&self.house).take() {
            house.is_dead.store(true, SeqCst);
        }
        self.world.end(Some(crash));
        self.cut_links();
        executor.end_process(THERE);
    }

    pub fn has(&self, path: &Path) -> bool {
        self.world.file_number(path).is_some()
    }

    /// There is a disk at `path`: no empty file that keeps its name, and none of somebody else.
    pub fn has_disk(&self, path: &Path) -> bool {
        let Some(view) = self.world.view(path) else { return false };
        let mut first = [0; STRANGE.len()];
        view.read(0, &mut first);
        !view.is_empty() && first != *STRANGE
    }

    /// Somebody here, where no process takes disks in, does what is allowed while a disk comes to `name`: what is known as a half goes, or a file gets that name.
    pub fn meddle(&self, name: &str, takes_name: bool) {
        let disk = self.at(name);
        if takes_name {
            if !self.has(&disk) {
                self.world.install(&disk, STRANGE);
            }
            return;
        }
        let house = self.new_house(Broken::Nothing);
        block_on(&self.world, async move {
            let note = Received::read(&house.files, &disk).await.ok().flatten();
            if let Some(note) = note.filter(|note| note.state != ReceivedState::HandingOver) {
                let name = disk.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                // One that is whole is refused.
                let _ = house.with_receiver(async |receiver| receiver.drop_half(name, note.id).await).await;
            }
        });
    }
}

impl House {
    fn new(world: &World, (folder, tracks): (&'static str, bool), broken: Broken) -> Self {
        let (busy, open, last, ended, is_dead) = Default::default();
        let (files, env) = (HouseFiles { files: world.files(), broken }, world.env());
        Self { world: world.clone(), folder, tracks, files, env, broken, busy, open, last, ended, is_dead }
    }

    /// What a connection of `link` finds that asks for `export`: a disk, or the answer to an order.
    pub async fn find(self: &Arc<Self>, export: &str, link: Identity) -> Result<Option<Arc<Lease>>> {
        match Order::of_export(export) {
            None => self.whole(export, link).await.map(Some),
            Some((Order::GoOn { id, link }, name)) => self.go_on(name, id, link).await.map(Some),
            Some((Order::Finish { id }, name)) => self.finish(name, id).await.map(|()| None),
            Some((Order::Marks { id, len_bytes }, name)) => self.take_marks(name, id, len_bytes, link).await.map(Some),
            Some((Order::Marked { id }, name)) => self.adopt_marks(name, id).await.map(|()| None),
            Some((order, name)) => {
                let _alone = self.busy.lock().await;
                self.with_receiver(async |receiver| self.obey(receiver, order, name).await).await.map(|()| None)
            }
        }
    }

    pub async fn with_receiver<T>(&self, work: impl AsyncFnOnce(&Receiver<'_, HouseFiles>) -> T) -> T {
        let which = |store: &SimStore| format!("{:?}", store.file_identity());
        let (files, folder) = (&self.files, Path::new(self.folder));
        work(&Receiver { files, asking: files, env: &self.env, folder, which: &which }).await
    }

    /// Does what an order asks for that needs no image.
    async fn obey(&self, receiver: &Receiver<'_, HouseFiles>, order: Order, name: &str) -> Result<()> {
        match order {
            Order::Begin { id, size_bytes } => receiver.begin(name, id, size_bytes).await.map_err(refused).map(drop),
            Order::BeginInChain { id, size_bytes, image } => {
                let (_, is_new) = receiver.begin_in_chain(name, id, size_bytes, &image).await.map_err(refused)?;
                if is_new {
                    lock(&self.open).remove(name);
                }
                Ok(())
            }
            Order::TakeOver { id, of } => receiver.take_over(name, id, of).await.map(drop),
            Order::Find { id, size_bytes, like } => {
                match receiver.find_parent(name, id, size_bytes, &like).await.map_err(refused)? {
                    true => Ok(()),
                    false => Err(is_free_here()),
                }
            }
            Order::Ask { id } if self.broken == Broken::WholeIsHalf => receiver.go_on(name, id).await.map(drop),
            Order::Ask { id } => receiver.check_half(name, id).await.map(drop),
            Order::HandOver { id } => {
                receiver.hand_over(name, id).await.map_err(refused)?;
                match self.broken {
                    Broken::NameNotKept => self.files.remove(&receiver.disk(name)?).await,
                    _ => Ok(()),
                }
            }
            Order::Drop { id } => {
                receiver.drop_half(name, id).await.map_err(refused)?;
                lock(&self.open).remove(name);
                Err(Error::new(ErrorKind::Denied, "the half-made image is removed"))
            }
            Order::Back { id, of, size_bytes } => {
                let look = async |paths: &[PathBuf]| self.look(&receiver.disk(name).ok()?, paths);
                receiver.take_back(name, (id, of), size_bytes, look).await.map_err(refused).map(drop)
            }
            // Each has a method of its own.
            Order::Marks { .. } | Order::Marked { .. } | Order::GoOn { .. } | Order::Finish { .. } => {
                Err(Error::new(ErrorKind::Denied, "this is not done here"))
            }
        }
    }

    /// What the images of the disk at `disk`, which has left, look like now.
    fn look(&self, disk: &Path, paths: &[PathBuf]) -> Option<String> {
        if self.broken != Broken::OldImageAsIs {
            return marks::look_of(&self.world, paths);
        }
        let note = self.world.view(&names::left(disk))?;
        let mut text = vec![0; note.len() as usize];
        note.read(0, &mut text);
        let text = String::from_utf8(text).ok()?;
        text.lines().find_map(|line| line.strip_prefix("look ")).map(str::to_owned)
    }

    /// The file for what has changed of the disk `name`, new and empty, by a link that writes to it.
    async fn take_marks(
        self: &Arc<Self>,
        name: &str,
        id: Identity,
        len_bytes: u64,
        link: Identity,
    ) -> Result<Arc<Lease>> {
        let alone = self.busy.lock().await;
        let file = format!("{MARKS}{name}");
        // What a link that was cut still writes goes to a file without a name.
        lock(&self.open).remove(&file);
        let begun = self.with_receiver(async |receiver| receiver.begin_marks(name, id, len_bytes).await).await;
        drop(alone);
        let place = begun.map_err(refused)?;
        self.wait(async |_| self.enter(&file, &place, Some(link), false).await).await
    }

    /// That file is whole, and the disk's from now on.
    async fn adopt_marks(self: &Arc<Self>, name: &str, id: Identity) -> Result<()> {
        if self.broken == Broken::MarksLate {
            let (own, name) = (self.clone(), name.to_owned());
            let late = async move {
                turns(300).await;
                let _ = own.adopt(&name, id).await;
            };
            spawn_in(THERE, Box::pin(late));
            return Ok(());
        }
        self.adopt(name, id).await
    }

    async fn adopt(self: &Arc<Self>, name: &str, id: Identity) -> Result<()> {
        let file = format!("{MARKS}{name}");
        let mut looks = 0;
        while let Some(open) = self.find_open(&file) {
            open.stop();
            drop(open);
            looks += 1;
            if looks > MOST_LOOKS {
                return Err(Error::new(ErrorKind::Busy, "what came by a link before is still being written"));
            }
            turns(10).await;
        }
        // Whoever closes it is alone until that is done.
        drop(self.busy.lock().await);
        let lease = self.wait(async |receiver| {
            let place = receiver.half(name, id).await.map_err(refused)?;
            self.enter(name, &place, None, false).await
        });
        let lease = lease.await?;
        let _alone = self.busy.lock().await;
        self.with_receiver(async |receiver| receiver.check_name(name).await).await.map_err(refused)?;
        let (disk, of) = (Path::new(self.folder).join(name), &lease.of);
        let (packed, side) = (names::new_changes(&disk), names::changes(&disk));
        // It was adopted before, and the answer was not heard.
        if of.changes().is_some() && self.world.file_number(&packed).is_none() {
            return Ok(());
        }
        let graph = of.node.graph_now().ok_or_else(|| Error::new(ErrorKind::Shutdown, "the disk is closed"))?;
        let found = marks::found_at(&self.world, graph.handles()[0].path());
        let around = marks::around(&self.world, changes::Broken::Nothing);
        let adopted = Changes::adopt(around, &packed, &disk, of.node.size_bytes(), found).await;
        match adopted {
            Err(error) if self.world.file_number(&packed).is_some() => Err(refused(error)),
            Err(error) => {
                of.node.replace(Place::ChangeTracking, None).await?;
                lock(&of.changes).take();
                let _ = self.files.remove(&side).await;
                Err(refused(error))
            }
            Ok(adopted) => {
                let adopted = Arc::new(adopted);
                *lock(&of.changes) = Some(adopted.clone());
                match self.broken {
                    Broken::MarksNotMet => Ok(()),
                    _ => adopted.attach(&of.node).await,
                }
            }
        }
    }

    /// The disk that was handed over. One link at a time has it.
    async fn whole(self: &Arc<Self>, name: &str, link: Identity) -> Result<Arc<Lease>> {
        self.wait(async |receiver| {
            let place = receiver.whole(name).await?;
            self.enter(name, &place, Some(link).filter(|_| !place.is_sealed), false).await
        })
        .await
    }

    /// The image of a move. While it is half, a new link takes the place of the one before.
    async fn go_on(self: &Arc<Self>, name: &str, id: Identity, link: Identity) -> Result<Arc<Lease>> {
        self.wait(async |receiver| {
            let (place, state) = receiver.write_on(name, id).await?;
            self.enter(name, &place, Some(link), state != ReceivedState::Whole).await
        })
        .await
    }

    /// The image gets its name.
    async fn finish(self: &Arc<Self>, name: &str, id: Identity) -> Result<()> {
        if self.broken == Broken::FinishedLate {
            let (own, name) = (self.clone(), name.to_owned());
            let late = async move {
                turns(300).await;
                let _alone = own.busy.lock().await;
                let _ = own.with_receiver(async |receiver| receiver.finish(&name, id, None).await).await;
            };
            spawn_in(THERE, Box::pin(late));
            return Ok(());
        }
        let (place, state) =
            self.with_receiver(async |receiver| receiver.go_on(name, id).await).await.map_err(refused)?;
        if place.is_parent {
            return self.finish_parent(name, id).await;
        }
        let lease = match state {
            ReceivedState::Whole => None,
            _ => {
                let open = self.wait(async |receiver| {
                    let (place, _) = receiver.go_on(name, id).await.map_err(refused)?;
                    self.enter(name, &place, None, true).await
                });
                Some(open.await?)
            }
        };
        let _alone = self.busy.lock().await;
        let node = lease.as_ref().map(|lease| &lease.of.node);
        if let Some(node) = node {
            node.flush_once().await?;
        }
        let graph = node.and_then(|node| node.graph_now());
        let store = graph.as_ref().map(|graph| graph.handles()[0].image().store());
        self.with_receiver(async |receiver| receiver.finish(name, id, store).await).await.map_err(refused).map(drop)
    }

    /// As [`House::finish`], of a parent: no link that writes is there when it gets its name.
    async fn finish_parent(self: &Arc<Self>, name: &str, id: Identity) -> Result<()> {
        let finished = self.wait(async |receiver| {
            let (place, state) = receiver.go_on(name, id).await.map_err(refused)?;
            let Some(lease) = self.enter(name, &place, None, false).await? else { return Ok(None) };
            if state != ReceivedState::Whole && lock(&lease.of.writer).is_some() {
                lease.of.stop();
                return Ok(None);
            }
            if state != ReceivedState::Whole && self.broken != Broken::Move(BrokenMove::ParentUnflushed) {
                lease.of.node.flush_once().await?;
            }
            let graph = lease.of.node.graph_now();
            let store = graph.as_ref().map(|graph| graph.handles()[0].image().store());
            receiver.finish(name, id, store).await.map_err(refused)?;
            lock(&self.open).remove(name);
            lease.of.close(&self.world).await;
            if let Some(last) = lock(&self.last).remove(name) {
                lock(&self.ended).push(last);
            }
            Ok(Some(lease))
        });
        finished.await.map(drop)
    }

    /// Tries to use a disk until that is possible. Others come to their turn between two tries.
    async fn wait(
        &self,
        once: impl AsyncFn(&Receiver<'_, HouseFiles>) -> Result<Option<Arc<Lease>>>,
    ) -> Result<Arc<Lease>> {
        for _ in 0..MOST_LOOKS {
            let alone = self.busy.lock().await;
            let tried = self.with_receiver(&once).await?;
            drop(alone);
            match tried {
                Some(lease) => return Ok(lease),
                None => turns(10).await,
            }
        }
        Err(Error::new(ErrorKind::Busy, "somebody else has this disk"))
    }

    fn find_open(&self, name: &str) -> Option<Arc<OpenDisk>> {
        lock(&self.open).get(name).cloned()
    }

    /// One more user of the disk at `place`, which writes by `link`, if it writes. `None` when that is not possible yet.
    async fn enter(
        self: &Arc<Self>,
        name: &str,
        place: &ReceivedPlace,
        link: Option<Identity>,
        is_half: bool,
    ) -> Result<Option<Arc<Lease>>> {
        if link.is_some_and(|link| lock(&self.ended).contains(&link)) {
            return Err(Error::new(ErrorKind::Denied, "another link has come in the place of this one"));
        }
        let of = match self.find_open(name) {
            Some(open) => open,
            None => match self.open_disk(name, place).await {
                Err(error) if error.kind() == ErrorKind::Busy => return Ok(None),
                opened => {
                    let open = Arc::new(opened?);
                    lock(&self.open).insert(name.to_owned(), open.clone());
                    open
                }
            },
        };
        if let Some(link) = link {
            let mut writer = lock(&of.writer);
            match *writer {
                None => {
                    *writer = Some(link);
                    let before = match is_half {
                        true => lock(&self.last).insert(name.to_owned(), link),
                        false => lock(&self.last).remove(name).and(None),
                    };
                    lock(&self.ended)
                        .extend(before.filter(|before| *before != link && self.broken != Broken::LinksNotFenced));
                }
                Some(other) if other == link => {}
                Some(_) if is_half && self.broken == Broken::LinksNotFenced => {}
                Some(other) => {
                    if is_half {
                        lock(&self.ended).push(other);
                        of.stop();
                    }
                    return Ok(None);
                }
            }
        }
        of.users.fetch_add(1, SeqCst);
        Ok(Some(Arc::new(Lease { house: self.clone(), name: name.to_owned(), of })))
    }

    async fn open_disk(&self, name: &str, place: &ReceivedPlace) -> Result<OpenDisk> {
        let options = OpenOptions { format: Some(place.format), read_only: place.is_sealed, ..OpenOptions::default() };
        let graph = Graph::open(&self.files, self.env.clone(), Locator::from(&place.path), &options).await?;
        let (size_bytes, path) = (graph.size_bytes(), &place.path);
        graph.begin();
        let (writer, users, is_stopped, connections) = Default::default();
        let open =
            OpenDisk { node: Node::new(graph), changes: Mutex::default(), writer, users, is_stopped, connections };
        let is_own = match names::disk_of_half(path) {
            Some(disk) => self.with_receiver(async |receiver| receiver.has_name(&disk).await).await?,
            None => true,
        };
        if self.tracks && is_own && !place.is_sealed && !name.starts_with(MARKS) {
            let disk = names::disk_of_half(path).unwrap_or_else(|| path.clone());
            let around = marks::around(&self.world, changes::Broken::Nothing);
            let found = marks::found_at(&self.world, path);
            let changes = Changes::open(around, &disk, size_bytes, found).await?.map(Arc::new);
            if let Some(changes) = changes.as_ref().filter(|_| self.broken != Broken::MarksNotMet) {
                changes.attach(&open.node).await?;
            }
            *lock(&open.changes) = changes;
        }
        Ok(open)
    }

    async fn close_unused(&self, name: &str, of: &Weak<OpenDisk>) {
        let _alone = self.busy.lock().await;
        let Some(of) = of.upgrade().filter(|of| of.users.load(SeqCst) == 0) else { return };
        let is_known = self.find_open(name).is_some_and(|known| Arc::ptr_eq(&known, &of));
        if is_known {
            lock(&self.open).remove(name);
        }
        of.close(&self.world).await;
    }
}

/// What a client is told of an order that is refused: that there is no such thing says only a host without a receiver.
fn refused(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::Denied, error.message().to_owned()).caused_by(error),
        _ => error,
    }
}

/// The files of the other host, which can break a rule of the receiver's order on purpose.
#[derive(Clone)]
pub(super) struct HouseFiles {
    files: SimFiles,
    broken: Broken,
}

impl HouseFiles {
    fn is_half(path: &Path) -> bool {
        names::disk_of_half(path).is_some()
    }

    fn is_half_of_parent(path: &Path) -> bool {
        names::disk_of_half(path).is_some_and(|disk| is_parent_name(&disk))
    }
}

impl Files for HouseFiles {
    type Store = SimStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<SimStore> {
        self.files.open(at, mode).await
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<SimStore> {
        let store = Files::create(&self.files, path, len_bytes).await?;
        let is_void = match self.broken {
            Broken::HalfNotDurable => Self::is_half(path),
            Broken::Move(BrokenMove::ParentUnflushed) => Self::is_half_of_parent(path),
            _ => false,
        };
        store.void_syncs(is_void);
        Ok(store)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.rename(from, to).await?;
        if self.broken == Broken::HalfNotDurable
            && let Some(disk) = names::disk_of(to)
            && let Ok(half) = self.files.open(&names::receiving(&disk).into(), OpenMode::ReadOnly).await
        {
            half.void_syncs(false);
        }
        Ok(())
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.link(from, to).await
    }

    async fn is_at(&self, store: &SimStore, path: &Path) -> Result<bool> {
        self.files.is_at(store, path).await
    }

    async fn reopen(&self, store: &SimStore, mode: OpenMode) -> Result<SimStore> {
        self.files.reopen(store, mode).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.files.remove(path).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        self.files.sync_names(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.files.canonical(path).await
    }
}
