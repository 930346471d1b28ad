//! [`House`]: a room for each disk that somebody asks for, with its image while that is open.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use spile_core::{Disk as _, Error, ErrorKind, Extent, Files as _, Locator, Result, Segments};
use spile_engine::{Engine, sleep};
use spile_front::Peer;
use spile_front_nbd::{Export, Found, Server as NbdServer, ServerConfig};
use spile_image::layer::{Identity, Layer as _};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::motion::{ANSWER, ANSWER_BYTES, ReceivedPlace, Receiver};
use spile_life::names;
use spile_node::{Node, Policy};
use spile_store::{Folder, HostFiles, HostStore};

use crate::checkpoints::Checkpoints;
use crate::disks;
use crate::jobs::Access;
use crate::serving::disks::ServedDisk;
use crate::serving::failed_syncs;
use crate::serving::trouble;

use super::Tools;
use super::quota::{ABANDONED, ABANDONED_WHEN_FULL, Quota};

/// How long a disk that is busy is waited for.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// The time between two looks at a busy disk.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// So many links that have ended are remembered.
const MOST_ENDED_LINKS: usize = 1024;

/// All that is received.
pub(super) struct House {
    folder: PathBuf,
    tools: Tools,
    access: Access,
    engine: Engine,
    /// How the servers of one disk are made: their clients have come through the gate.
    nbd: ServerConfig,
    /// An export that says who has answered, and nothing else.
    answer: Arc<NbdServer<ServedDisk>>,
    rooms: Mutex<HashMap<String, Arc<Room>>>,
    links: Mutex<Links>,
    pub quota: Quota,
}

/// The links by which halves came, so that none comes again in whose place another one has come.
#[derive(Default)]
struct Links {
    /// The last one of each half, by its disk's name. It may be cut, and come again.
    last: HashMap<String, Identity>,
    /// Those before. The latest last.
    ended: VecDeque<Identity>,
}

/// One disk of the folder: what is done with it, and its image while that is open.
pub(super) struct Room {
    pub name: String,
    /// One order at a time. The image is opened and closed under it, too.
    busy: async_lock::Mutex<()>,
    open: Mutex<Option<Arc<OpenDisk>>>,
}

/// A disk that somebody is connected to.
pub(super) struct OpenDisk {
    pub disk: Arc<ServedDisk>,
    pub checkpoints: Checkpoints,
    /// How many connections there are.
    users: AtomicUsize,
    readers: Arc<NbdServer<ServedDisk>>,
    /// The link that writes, while it has a connection.
    writer: Mutex<Option<Arc<Writer>>>,
}

/// One link: all connections of one client.
struct Writer {
    who: Who,
    peer: Peer,
    connections: AtomicUsize,
    server: Arc<NbdServer<ServedDisk>>,
}

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// All connections with this name.
    Named(Identity),
    /// One connection that does not say who it is.
    Nameless,
}

/// What somebody wants of a disk.
#[derive(Clone, Copy)]
pub(super) enum Use {
    Reads,
    Writes {
        who: Who,
        peer: Peer,
        /// It is being moved here: a new link of its old host takes the place of the one before.
        is_half: bool,
    },
}

/// What comes of a try to use a disk.
pub(super) enum Tried {
    In(Lease),
    /// Not now: it may go a little later.
    Busy(Error),
}

/// What a connection has of a disk.
pub(super) struct Lease {
    house: Arc<House>,
    room: Arc<Room>,
    of: Arc<OpenDisk>,
    writer: Option<Arc<Writer>>,
}

fn relock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// The disk `name` is written to by `link` from now on.
    fn come(&mut self, name: &str, link: Identity, is_half: bool) {
        if !is_half {
            self.last.remove(name);
        } else if let Some(before) = self.last.insert(name.to_owned(), link).filter(|before| *before != link) {
            self.end(before);
        }
    }

    /// Nothing comes by `link` any more.
    fn end(&mut self, link: Identity) {
        if !self.ended.contains(&link) {
            self.ended.push_back(link);
        }
        if self.ended.len() > MOST_ENDED_LINKS {
            self.ended.pop_front();
        }
    }
}

impl Lease {
    /// The disk.
    pub fn open(&self) -> &OpenDisk {
        &self.of
    }

    pub fn server(&self) -> Arc<NbdServer<ServedDisk>> {
        self.writer.as_ref().map_or(&self.of.readers, |writer| &writer.server).clone()
    }

    /// True when a link writes to the disk: nothing comes by it from now on but what was begun.
    pub fn stop_writer(&self) -> bool {
        let writer = relock(&self.of.writer);
        writer.iter().for_each(|writer| writer.server.stop());
        writer.is_some()
    }

    /// Another connection of the same client would be another link.
    pub fn is_alone(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.who == Who::Nameless)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            let mut current = relock(&self.of.writer);
            if writer.connections.fetch_sub(1, Ordering::SeqCst) == 1 {
                current.take_if(|current| Arc::ptr_eq(current, &writer));
            }
        }
        if self.of.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Who closes it waits for its turn, and must not keep the file open, and so locked, for that long.
            let (house, room, of) = (self.house.clone(), self.room.clone(), Arc::downgrade(&self.of));
            self.house.engine.spawn_on(0, move || async move {
                house.close_unused(&room, &of).await;
                house.leave(room);
            });
        }
    }
}

impl Room {
    /// The image, if it is open.
    pub fn open(&self) -> Option<Arc<OpenDisk>> {
        relock(&self.open).clone()
    }

    /// Waits until nobody has the image open any more. Its writer sends no more requests.
    ///
    /// # Errors
    /// `Busy` when those that are under way do not end.
    pub async fn be_closed(&self) -> Result<()> {
        let end = Instant::now() + BUSY_PATIENCE;
        while let Some(open) = self.open() {
            if Instant::now() > end {
                let what = "what came by a link before is still being written";
                return Err(Error::new(ErrorKind::Busy, what).hint("try again: it ends with the storage's answer"));
            }
            if let Some(writer) = &*relock(&open.writer) {
                writer.server.stop();
            }
            drop(open);
            sleep(BUSY_PAUSE).await;
        }
        // Whoever closes it has the room for itself until that is done.
        self.alone().await.map(drop)
    }

    /// The image is no disk of this name any more.
    pub fn forget(&self) {
        relock(&self.open).take();
    }

    /// Waits for its turn, but not for a call that hangs.
    ///
    /// # Errors
    /// `Busy`.
    pub async fn alone(&self) -> Result<async_lock::MutexGuard<'_, ()>> {
        match select(pin!(self.busy.lock()), pin!(sleep(BUSY_PATIENCE))).await {
            Either::Left((alone, _)) => Ok(alone),
            Either::Right(_) => {
                let what = "something else is done with this disk, and does not come to its end: its storage may hang";
                Err(Error::new(ErrorKind::Busy, what))
            }
        }
    }

    /// Tries to use the disk until that is possible. Others come to their turn between two tries.
    ///
    /// # Errors
    /// What `once` says; `Busy` when the time is over.
    pub async fn wait(&self, once: impl AsyncFn() -> Result<Tried>) -> Result<Lease> {
        let end = Instant::now() + BUSY_PATIENCE;
        loop {
            let alone = self.alone().await?;
            let tried = Box::pin(once()).await?;
            drop(alone);
            match tried {
                Tried::In(lease) => return Ok(lease),
                Tried::Busy(error) if Instant::now() > end => return Err(error),
                Tried::Busy(_) => sleep(BUSY_PAUSE).await,
            }
        }
    }
}

impl House {
    pub fn new(folder: PathBuf, access: Access, engine: Engine, nbd: ServerConfig) -> Result<Self> {
        let cache = access.cache;
        let said = engine.run_on(0, move || async move {
            let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
            let graph = disks::open_keeping(cache, &Locator::Mem(ANSWER_BYTES), &options).await?;
            graph.begin();
            let disk = node(graph);
            let mut words = ANSWER.as_bytes().to_vec();
            words.resize(ANSWER_BYTES as usize, 0);
            disk.write(Extent::from_range(0..ANSWER_BYTES), &Segments::copied(&words), false).await?;
            Ok::<_, Error>(Arc::new(disk))
        })?;
        let answer = Arc::new(server(&engine, &nbd, "answer", &said, true)?);
        let (rooms, links, quota) = Default::default();
        let tools = Tools::new(cache);
        Ok(Self { folder, tools, access, engine, nbd, answer, rooms, links, quota })
    }

    /// Does what orders ask for with the files of the folder.
    pub fn receiver(&self) -> Receiver<'_, HostFiles> {
        self.tools.receiver(&self.folder)
    }

    /// The answer to an order that was obeyed.
    pub fn answer(&self) -> Found<ServedDisk> {
        Found { server: self.answer.clone(), lease: Box::new(()), is_alone: true }
    }

    /// The room of the disk `name`. [`House::leave`] says when the caller needs it no more.
    pub fn room(&self, name: &str) -> Arc<Room> {
        let new = || {
            let (name, busy, open) = (name.to_owned(), async_lock::Mutex::new(()), Mutex::default());
            Arc::new(Room { name, busy, open })
        };
        relock(&self.rooms).entry(name.to_owned()).or_insert_with(new).clone()
    }

    /// The caller does not need the room any more, which goes when nobody does.
    pub fn leave(&self, room: Arc<Room>) {
        let mut rooms = relock(&self.rooms);
        let name = room.name.clone();
        drop(room);
        if rooms.get(&name).is_some_and(|room| Arc::strong_count(room) == 1 && room.open().is_none()) {
            rooms.remove(&name);
        }
    }

    /// Gives `peer` a place for the half-made image of the disk `name`, unless there is one already. True when it gets a new one. When all are taken, those
    /// that nobody uses go earlier.
    ///
    /// # Errors
    /// `Exhausted`; those of looking at the folder.
    pub async fn reserve(&self, name: &str, id: Identity, peer: Peer) -> Result<bool> {
        match self.reserve_now(name, id, peer) {
            Err(error) if error.kind() == ErrorKind::Exhausted => {
                self.drop_abandoned(ABANDONED_WHEN_FULL, || {}).await;
                self.reserve_now(name, id, peer)
            }
            reserved => reserved,
        }
    }

    fn reserve_now(&self, name: &str, id: Identity, peer: Peer) -> Result<bool> {
        let half = names::receiving(&self.receiver().disk(name)?);
        let folder = Folder::open(&self.folder)?;
        let names = folder.list().map_err(|e| Error::io("cannot be read", e).at_path(&self.folder))?;
        let halves = || names.iter().filter(|name| names::is_receiving(name));
        if halves().any(|name| Some(name.as_os_str()) == half.file_name()) {
            return Ok(false);
        }
        self.quota.reserve(name, id, peer, halves().count()).map(|()| true)
    }

    /// Removes the halves that were begun and to which no link has come for long, unless a disk is just coming: its parents may be compared before it begins.
    pub async fn sweep(&self) {
        let is_in_use = relock(&self.rooms).values().any(|room| room.open().is_some());
        if !is_in_use {
            self.drop_abandoned(ABANDONED, || {}).await;
        }
    }

    /// Calls `done` after each.
    async fn drop_abandoned(&self, age: Duration, done: impl Fn()) {
        for name in self.quota.abandoned(age) {
            let room = self.room(&name);
            if let Err(error) = self.drop_one(&room, age).await {
                tracing::warn!("{name:?}: what was begun and not gone on with stays: {error}");
            }
            self.leave(room);
            done();
        }
    }

    async fn drop_one(&self, room: &Room, age: Duration) -> Result<()> {
        let _alone = room.alone().await?;
        // A link may have come meanwhile.
        let Some(id) = self.quota.take_abandoned(&room.name, age) else { return Ok(()) };
        match self.receiver().drop_half(&room.name, id).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            dropped => dropped,
        }
    }

    /// Removes the halves that were begun and never used. Waits for `bound` at most for each.
    pub fn remove_unused(self: &Arc<Self>, bound: Duration) {
        let ((sender, removed), house) = (mpsc::channel(), self.clone());
        self.engine.spawn_on(0, move || async move {
            let done = || {
                let _ = sender.send(());
            };
            house.drop_abandoned(Duration::ZERO, done).await;
        });
        // Until the sender is gone, or nothing comes.
        while removed.recv_timeout(bound).is_ok() {}
    }

    /// The last link of the half `name` does not come again.
    pub fn end_link(&self, name: &str) {
        let mut links = relock(&self.links);
        if let Some(last) = links.last.remove(name) {
            links.end(last);
        }
    }

    /// One more connection to the disk at `place`, which is opened if it is not open. The caller has the room for itself.
    ///
    /// # Errors
    /// `Denied` for a link in whose place another one has come; those of opening the disk.
    pub async fn enter(self: &Arc<Self>, room: &Arc<Room>, place: &ReceivedPlace, how: Use) -> Result<Tried> {
        // Also when the disk is whole by now: what this one still sends is older than that.
        if let Use::Writes { who: Who::Named(link), .. } = how
            && relock(&self.links).ended.contains(&link)
        {
            return Err(Error::new(ErrorKind::Denied, "another link has come in the place of this one"));
        }
        let of = match self.open_at(room, place).await? {
            Some(open) => open,
            None => match Box::pin(self.open_disk(&room.name, place)).await {
                // The last connection to it may have ended just now.
                Err(error) if error.kind() == ErrorKind::Busy => return Ok(Tried::Busy(error)),
                opened => {
                    let open = Arc::new(opened?);
                    *relock(&room.open) = Some(open.clone());
                    open
                }
            },
        };
        let lease = |writer| {
            of.users.fetch_add(1, Ordering::SeqCst);
            Ok(Tried::In(Lease { house: self.clone(), room: room.clone(), of: of.clone(), writer }))
        };
        let Use::Writes { who, peer, is_half } = how else { return lease(None) };
        let mut current = relock(&of.writer);
        let writer = match current.as_ref() {
            Some(writer) if writer.who == who && who != Who::Nameless => writer.clone(),
            Some(_) if who == Who::Nameless => return lease(None),
            Some(other) if is_half => {
                // The process that wrote by it may have been killed, or it was cut, and what it had sent may still be on its way to the image: late, it would
                // undo newer writes.
                if let Who::Named(link) = other.who {
                    relock(&self.links).end(link);
                }
                other.server.stop();
                let what = "what came by another link before is still being written";
                return Ok(Tried::Busy(Error::new(ErrorKind::Busy, what)));
            }
            Some(other) => return Ok(Tried::Busy(is_used(other.peer))),
            None => {
                let server = Arc::new(server(&self.engine, &self.nbd, &room.name, &of.disk, false)?);
                let writer = Arc::new(Writer { who, peer, connections: AtomicUsize::new(0), server });
                *current = Some(writer.clone());
                if let Who::Named(link) = who {
                    relock(&self.links).come(&room.name, link, is_half);
                }
                writer
            }
        };
        writer.connections.fetch_add(1, Ordering::SeqCst);
        drop(current);
        lease(Some(writer))
    }

    /// The image at `place`, if it is open. Another file that had this name before, and is open still, is none of it: nobody is let in to that any more.
    async fn open_at(&self, room: &Room, place: &ReceivedPlace) -> Result<Option<Arc<OpenDisk>>> {
        let Some(open) = room.open() else { return Ok(None) };
        let graph = open.disk.graph().await;
        if self.tools.files.is_at(graph.handles()[0].image().store(), &place.path).await? {
            return Ok(Some(open));
        }
        room.forget();
        Ok(None)
    }

    async fn open_disk(&self, name: &str, place: &ReceivedPlace) -> Result<OpenDisk> {
        let read_only = place.is_sealed;
        let options = OpenOptions { format: Some(place.format), read_only, ..OpenOptions::default() };
        let graph = Box::pin(disks::open_keeping(self.access.cache, &Locator::from(&place.path), &options)).await?;
        let checkpoints = Checkpoints::none(self.access);
        if !read_only {
            // Whoever copies to a half sends again what a failed sync may have lost.
            if names::disk_of_half(&place.path).is_none() {
                failed_syncs::recall(&graph);
            }
            let is_own = match names::disk_of_half(&place.path) {
                // Another disk that has got this name meanwhile has checkpoints of its own there.
                Some(disk) => self.receiver().has_name(&disk).await?,
                None => true,
            };
            if is_own {
                checkpoints.open_own(&graph).await?;
            }
        }
        graph.begin();
        let disk = Arc::new(node(graph).with_troubles(trouble::of_disk(name.to_owned(), Policy::default())));
        if !read_only {
            checkpoints.attach(&disk).await?;
        }
        let readers = Arc::new(server(&self.engine, &self.nbd, name, &disk, true)?);
        Ok(OpenDisk { disk, checkpoints, users: AtomicUsize::new(0), readers, writer: Mutex::default() })
    }

    /// Closes a disk that nobody is connected to any more.
    async fn close_unused(&self, room: &Room, of: &Weak<OpenDisk>) {
        let _alone = room.busy.lock().await;
        let Some(of) = of.upgrade() else { return };
        if of.users.load(Ordering::SeqCst) > 0 {
            return;
        }
        relock(&room.open).take_if(|known| Arc::ptr_eq(known, &of));
        if let Err(error) = of.close(&room.name).await {
            tracing::error!("{:?} could not be closed: {error}", room.name);
        }
    }

    /// Closes all disks: no connection is left, but for those that hang.
    ///
    /// # Errors
    /// The first failure to close one; `TimedOut` when some were not closed within `bound`.
    pub fn close_all(self: &Arc<Self>, bound: Duration) -> Result<()> {
        let end = Instant::now() + bound;
        let rooms: Vec<Arc<Room>> = relock(&self.rooms).drain().map(|(_, room)| room).collect();
        let close = |room: Arc<Room>| {
            let (sender, closed) = mpsc::channel();
            let name = room.name.clone();
            self.engine.spawn_on(0, move || async move {
                let _alone = room.busy.lock().await;
                let open = relock(&room.open).take();
                let closed = match open {
                    Some(open) => open.close(&room.name).await,
                    None => Ok(()),
                };
                let _ = sender.send(closed);
            });
            (name, closed)
        };
        let closing: Vec<_> = rooms.into_iter().map(close).collect();
        let mut result = Ok(());
        for (name, closed) in closing {
            let late = || Err(Error::new(ErrorKind::TimedOut, format!("{name:?} could not be closed in time")));
            let closed = closed.recv_timeout(end.saturating_duration_since(Instant::now()));
            result = result.and(closed.unwrap_or_else(|_| late()));
        }
        result
    }
}

/// What a client is told while another link writes to the disk. Only the message goes to the other host.
fn is_used(peer: Peer) -> Error {
    let who = match peer {
        Peer::Process(pid) => format!("process {pid} of the host where the disk is"),
        Peer::Host(address) => format!("a process of the host {address}"),
        Peer::Unknown => "another process".to_owned(),
    };
    let what = format!("{who} has this disk: one server at a time; if it is dead, that is noticed within 2 minutes");
    Error::new(ErrorKind::Busy, what)
}

fn node(graph: Graph<HostStore>) -> ServedDisk {
    Node::with_buffers(graph, |len| spile_engine::pool().try_alloc(len).map(Into::into))
}

fn server(
    engine: &Engine,
    nbd: &ServerConfig,
    name: &str,
    disk: &Arc<ServedDisk>,
    read_only: bool,
) -> Result<NbdServer<ServedDisk>> {
    let (description, name, disk) = (String::new(), name.to_owned(), disk.clone());
    let (checkpoints, withdrawn) = (None, Arc::default());
    let kept = failed_syncs::kept;
    let export = Export { name, description, disk, read_only, checkpoints, kept, withdrawn };
    NbdServer::new(engine.clone(), nbd.clone(), vec![export])
}

impl OpenDisk {
    /// Makes all that a half holds durable, before it becomes whole. Syncs of it that have failed under an earlier process do not count any more.
    ///
    /// # Errors
    /// The storage's.
    pub async fn flush_half(&self) -> Result<()> {
        self.disk.flush_once().await?;
        self.disk.look(async |graph| failed_syncs::forget(graph)).await
    }

    /// Ends the use of the image; again, it does nothing.
    ///
    /// # Errors
    /// The storage's.
    pub async fn close(&self, name: &str) -> Result<()> {
        self.readers.withdraw(name);
        let Some(graph) = self.disk.graph_now() else { return Ok(()) };
        self.disk.close().await?;
        self.checkpoints.close(&graph).await;
        Ok(())
    }
}
