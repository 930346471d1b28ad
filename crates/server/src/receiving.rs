//! `spile receive`: takes in disks that other hosts move here, by NBD. What is done with files is in [`spile_life::motion::Receiver`]; here are the
//! links and the open images.
//!
//! An image is open for as long as somebody is connected to it. So a server of this host can open a disk as soon as the other host has let go of it.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant, UNIX_EPOCH};

use spile_core::{Disk as _, Env, Error, ErrorKind, Files as _, Locator, OpenMode, Result, Store as _};
use spile_engine::{Config, Engine, OsEnv, sleep};
use spile_front_nbd::{Export, Find, Found, Server as NbdServer, ServerConfig};
use spile_image::OpenOptions;
use spile_image::layer::{Identity, Layer as _};
use spile_life::motion::{Order, Received, ReceivedPlace, ReceivedState, Receiver};
use spile_life::names;
use spile_node::{Node, Policy};
use spile_store::{CacheMode, FileId, HostFiles, HostStore, OsFiles};

use crate::checkpoints::Checkpoints;
use crate::disks;
use crate::jobs::Access;
use crate::listen::SocketAccess;
use crate::serving::disks::ServedDisk;
use crate::serving::fronts::{Listening, Role};
use crate::serving::sockets::Endpoint;
use crate::serving::trouble;
use crate::signals::ServerSignals;
use crate::uri::Address;

mod marks;

/// How long clients may take to accept their last replies.
const DRAIN_PATIENCE: Duration = Duration::from_secs(30);

/// How long a disk that is busy is waited for.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// The time between two tries to open a busy disk.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// So many links that have ended are remembered.
const MOST_ENDED_LINKS: usize = 1024;

/// What `spile receive` is started with.
pub struct Settings {
    /// The folder for disks that come.
    pub folder: PathBuf,
    /// Where to listen.
    pub addresses: Vec<Address>,
    /// How clients are served.
    pub nbd: ServerConfig,
    /// Who may connect to Unix sockets.
    pub access: SocketAccess,
    /// The workers.
    pub engine: Config,
    /// How images are reached.
    pub cache: CacheMode,
}

/// Takes in disks until a signal ends that. `say` is told each address once somebody answers there.
///
/// # Errors
/// When the folder cannot be found, an address cannot be listened on, or a disk cannot be closed.
pub fn receive(settings: &Settings, signals: ServerSignals, say: impl Fn(&dyn Display)) -> Result<()> {
    let folder = find_folder(&settings.folder)?;
    let engine = Engine::start(settings.engine.clone())?;
    let ends = mpsc::channel();
    signals.hear(
        || {},
        move |_| {
            let _ = ends.0.send(());
        },
    );
    let house = Arc::new(House {
        folder: folder.clone(),
        access: Access { cache: settings.cache, no_lock: false },
        engine: engine.clone(),
        nbd: ServerConfig { tls: None, ..settings.nbd.clone() },
        busy: async_lock::Mutex::new(()),
        open: Mutex::default(),
        ended: Mutex::default(),
    });
    let gate = NbdServer::of_found(engine.clone(), settings.nbd.clone(), Arc::new(Door(house.clone())))?;
    let mut listening = Vec::new();
    for address in &settings.addresses {
        let socket = Listening::publish(Endpoint::new(Role::Nbd, None, address)?.bind(settings.access)?)?;
        gate.listen(socket.share()?)?;
        let at = socket.address.as_ref().unwrap_or(address);
        say(&format_args!("takes in disks for {} at {at}", folder.display()));
        listening.push(socket);
    }
    crate::notify::notify("READY=1");
    // The thread that sends ends with the process only.
    let _ = ends.1.recv();
    crate::notify::notify("STOPPING=1");
    gate.stop();
    drop(listening);
    gate.wait_drained(DRAIN_PATIENCE);
    let closed = house.close_all();
    drop(gate);
    engine.shutdown();
    closed
}

/// The folder for disks that come, without links in its path.
fn find_folder(folder: &Path) -> Result<PathBuf> {
    let found = folder.canonicalize().map_err(|e| Error::io("the folder cannot be found", e).at_path(folder))?;
    match found.is_dir() {
        true => Ok(found),
        false => Err(Error::new(ErrorKind::InvalidInput, "is no folder").at_path(&found)),
    }
}

/// One disk of the folder.
pub struct Known {
    /// The disk's name.
    pub name: String,
    /// What its note says.
    pub note: Received,
    /// The file that the note is about is there.
    pub is_there: bool,
}

/// The disks that have come to `folder`, or are on their way, by name.
///
/// # Errors
/// When the folder cannot be read.
pub async fn list(folder: &Path) -> Result<Vec<Known>> {
    let folder = find_folder(folder)?;
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
    let entries = std::fs::read_dir(&folder).map_err(|e| Error::io("cannot be read", e).at_path(&folder))?;
    let mut known = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("cannot be read", e).at_path(&folder))?.path();
        let Some(disk) = names::disk_of(&path).filter(|disk| names::received(disk) == path) else { continue };
        let (Some(note), Some(name)) =
            (Received::read(&files, &disk).await?, disk.file_name().and_then(|name| name.to_str()))
        else {
            continue;
        };
        let file = if note.state == ReceivedState::Whole { disk.clone() } else { names::receiving(&disk) };
        known.push(Known { name: name.to_owned(), note, is_there: file.exists() });
    }
    known.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(known)
}

/// Removes the half of the disk `name` that a move which is given up has left in `folder`.
///
/// # Errors
/// `NotFound` when there is none; `Busy` while it is being written; `Denied` when the disk is whole; the system's.
pub async fn remove_half(folder: &Path, name: &str) -> Result<()> {
    let folder = find_folder(folder)?;
    let (files, asking) = (host_files(CacheMode::Page, false), host_files(CacheMode::Page, true));
    let env: Arc<dyn Env> = Arc::new(OsEnv);
    let receiver = Receiver { files: &files, asking: &asking, env: &env, folder: &folder, which: &which };
    let disk = receiver.disk(name)?;
    let Some(note) = Received::read(&files, &disk).await? else {
        return Err(Error::new(ErrorKind::NotFound, "no move has left anything of this disk here").at_path(&disk));
    };
    let half = names::receiving(&disk);
    // Whoever is at work on it has it locked.
    let locked = match files.open(&Locator::from(&half), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if error.kind() == ErrorKind::Busy => {
            return Err(error.hint("the move goes on: cancel it on the other host"));
        }
        opened => Some(opened?),
    };
    let removed = receiver.drop_half(name, note.id).await;
    drop(locked);
    removed
}

fn host_files(cache: CacheMode, no_lock: bool) -> HostFiles {
    HostFiles::new(OsFiles::new(cache).without_locks(no_lock))
}

/// The number of a file in its file system, and when it was made, where that is known: another file may have the number when this one is gone.
fn which(store: &HostStore) -> String {
    let Some(FileId::File { inode, .. }) = store.file_id() else { return "-".to_owned() };
    let made = std::fs::metadata(store.path()).and_then(|stat| stat.created()).ok();
    let made_ns = made.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_nanos());
    format!("{inode} {}", made_ns.unwrap_or_default())
}

/// Refuses a name that is a link, also one that leads nowhere: nobody would be told of that before the end of the move.
fn refuse_link(disk: &Path) -> Result<()> {
    match disk.symlink_metadata() {
        Ok(stat) if stat.is_symlink() => {
            Err(Error::new(ErrorKind::Exists, "there is a link of this name").at_path(disk).hint("remove it"))
        }
        _ => Ok(()),
    }
}

/// All that is received.
struct House {
    folder: PathBuf,
    access: Access,
    engine: Engine,
    /// How the server of one disk is made: its clients have come through the gate.
    nbd: ServerConfig,
    /// One order at a time. A disk is opened and closed under it, too.
    busy: async_lock::Mutex<()>,
    open: Mutex<HashMap<String, Arc<OpenDisk>>>,
    /// Links by which no half is written to any more: others have come in their place. The latest last.
    ended: Mutex<VecDeque<Identity>>,
}

/// A disk that somebody is connected to.
struct OpenDisk {
    disk: Arc<ServedDisk>,
    checkpoints: Checkpoints,
    server: Arc<NbdServer<ServedDisk>>,
    /// How many connections there are.
    users: AtomicUsize,
    /// The link that the old place writes by, until the disk is whole.
    link: Option<Identity>,
}

/// What a connection has of a disk.
struct Lease {
    house: Arc<House>,
    name: String,
    of: Arc<OpenDisk>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.of.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Who closes it waits for its turn, and must not keep the file open, and so locked, for that long.
            let (house, name, of) = (self.house.clone(), self.name.clone(), Arc::downgrade(&self.of));
            self.house.engine.spawn_on(0, move || async move { house.close_unused(&name, &of).await });
        }
    }
}

/// Where clients ask for disks.
struct Door(Arc<House>);

impl Find<ServedDisk> for Door {
    fn find<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = Result<Found<ServedDisk>>> + 'a>> {
        Box::pin(async move {
            let of_disk = match Order::of_export(name) {
                Some((order, disk)) => Box::pin(self.0.obey(order, disk)).await,
                None => self.0.whole(name).await,
            };
            let (name, of) = of_disk?;
            let lease: Box<dyn Any + Send + Sync> = Box::new(Lease { house: self.0.clone(), name, of: of.clone() });
            Ok(Found { server: of.server.clone(), lease })
        })
    }
}

/// What the other host is told of an order that is refused. To be told that there is no such thing, it would take this for a host without a
/// receiver.
fn refused(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::Denied, error.message().to_owned()).caused_by(error),
        _ => error,
    }
}

/// The image of the move `id`, which is open as `disk`, gets its name.
async fn finish(receiver: &Receiver<'_, HostFiles>, name: &str, id: Identity, disk: &ServedDisk) -> Result<()> {
    disk.flush_once().await?;
    let graph = disk.graph_now();
    let store = graph.as_ref().map(|graph| graph.handles()[0].image().store());
    let place = receiver.finish(name, id, store).await.map_err(refused)?;
    tracing::info!("{}: is whole, and was handed over", place.path.display());
    Ok(())
}

/// A disk that a connection begins to use: [`OpenDisk::users`] counts it.
type Used = (String, Arc<OpenDisk>);

impl House {
    fn open(&self) -> MutexGuard<'_, HashMap<String, Arc<OpenDisk>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_open(&self, name: &str) -> Option<Arc<OpenDisk>> {
        self.open().get(name).cloned()
    }

    async fn obey(&self, order: Order, name: &str) -> Result<Used> {
        let _alone = self.busy.lock().await;
        let (files, asking) = (host_files(self.access.cache, false), host_files(self.access.cache, true));
        let env: Arc<dyn Env> = Arc::new(OsEnv);
        let receiver = Receiver { files: &files, asking: &asking, env: &env, folder: &self.folder, which: &which };
        match order {
            Order::Begin { id, size_bytes } => {
                refuse_link(&receiver.disk(name)?)?;
                let place = receiver.begin(name, id, size_bytes).await.map_err(refused)?;
                self.use_disk(name, &place, None).await
            }
            Order::Ask { id } => {
                let place = receiver.check_half(name, id).await?;
                self.use_disk(name, &place, None).await
            }
            Order::GoOn { id, link } => {
                let (place, state) = receiver.go_on(name, id).await?;
                // Of a disk that is whole, only its guest's host knows the links.
                if state != ReceivedState::Whole {
                    self.end_other_links(name, link).await?;
                }
                self.use_disk(name, &place, Some(link)).await
            }
            Order::Marks { id, len_bytes } => self.take_marks(&receiver, name, id, len_bytes).await,
            Order::Marked { id } => self.adopt_marks(&receiver, name, id).await,
            Order::Finish { id } => {
                // What is noted of its changes is known for certain while it is open.
                let (place, _) = receiver.go_on(name, id).await.map_err(refused)?;
                let used = self.use_disk(name, &place, None).await?;
                let finished = finish(&receiver, name, id, &used.1.disk).await;
                self.unless_failed(used, finished).await
            }
            Order::Drop { id } => {
                receiver.drop_half(name, id).await.map_err(refused)?;
                // Whoever is connected still writes to a file without a name.
                self.open().remove(name);
                Err(Error::new(ErrorKind::Denied, "the half-made image is removed"))
            }
        }
    }

    /// The disk of this name that was handed over.
    async fn whole(&self, name: &str) -> Result<Used> {
        let _alone = self.busy.lock().await;
        let (files, asking) = (host_files(self.access.cache, false), host_files(self.access.cache, true));
        let env: Arc<dyn Env> = Arc::new(OsEnv);
        let receiver = Receiver { files: &files, asking: &asking, env: &env, folder: &self.folder, which: &which };
        let place = receiver.whole(name).await?;
        self.use_disk(name, &place, None).await
    }

    /// One more connection to the disk of `place`, which is opened if it is not open. The caller holds `busy`.
    async fn use_disk(&self, name: &str, place: &ReceivedPlace, link: Option<Identity>) -> Result<Used> {
        let of = match self.find_open(name) {
            Some(open) => open,
            None => {
                let open = Arc::new(Box::pin(self.open_disk(name, place, link)).await?);
                self.open().insert(name.to_owned(), open.clone());
                open
            }
        };
        of.users.fetch_add(1, Ordering::SeqCst);
        Ok((name.to_owned(), of))
    }

    /// No request comes to the half of `name` any more but by `link`. The process that wrote to it before may have been killed, or its link cut, and what it had
    /// sent may still be on its way to the image: late, it would undo newer writes.
    ///
    /// # Errors
    /// `Denied` for a link in whose place another one has come; `Busy` while requests of another link do not end.
    async fn end_other_links(&self, name: &str, link: Identity) -> Result<()> {
        let ended = || self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended().contains(&link) {
            return Err(Error::new(ErrorKind::Denied, "another link has come in the place of this one"));
        }
        let Some(open) = self.find_open(name).filter(|open| open.link != Some(link)) else { return Ok(()) };
        if let Some(other) = open.link {
            let mut ended = ended();
            ended.push_back(other);
            if ended.len() > MOST_ENDED_LINKS {
                ended.pop_front();
            }
        }
        self.shut(name, &open).await
    }

    /// Ends the use of a disk, once the requests that are under way have ended.
    ///
    /// # Errors
    /// `Busy` while they do not end.
    async fn shut(&self, name: &str, open: &Arc<OpenDisk>) -> Result<()> {
        open.server.stop();
        let end = Instant::now() + BUSY_PATIENCE;
        while open.users.load(Ordering::SeqCst) > 0 {
            if Instant::now() > end {
                let what = "what came by another link before is still being written";
                return Err(Error::new(ErrorKind::Busy, what).hint("try again: it ends with the storage's answer"));
            }
            sleep(BUSY_PAUSE).await;
        }
        self.open().retain(|_, known| !Arc::ptr_eq(known, open));
        open.server.withdraw(name);
        open.close().await
    }

    async fn open_disk(&self, name: &str, place: &ReceivedPlace, link: Option<Identity>) -> Result<OpenDisk> {
        let options = OpenOptions { format: Some(place.format), ..OpenOptions::default() };
        let (source, end) = (Locator::from(&place.path), Instant::now() + BUSY_PATIENCE);
        let graph = loop {
            match Box::pin(disks::open_keeping(self.access.cache, &source, &options)).await {
                // The last connection to it may have ended just now.
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => sleep(BUSY_PAUSE).await,
                opened => break opened?,
            }
        };
        let checkpoints = Checkpoints::none(self.access);
        checkpoints.open(&graph).await?;
        graph.begin();
        let troubles = trouble::of_disk(name.to_owned(), Policy::default());
        let disk = Node::with_buffers(graph, |len| spile_engine::pool().try_alloc(len).map(Into::into));
        let disk = Arc::new(disk.with_troubles(troubles));
        checkpoints.attach(&disk).await?;
        let (description, read_only, name) = (String::new(), false, name.to_owned());
        let export =
            Export { name, description, disk: disk.clone(), read_only, checkpoints: None, withdrawn: Arc::default() };
        let server = Arc::new(NbdServer::new(self.engine.clone(), self.nbd.clone(), vec![export])?);
        Ok(OpenDisk { disk, checkpoints, server, users: AtomicUsize::new(0), link })
    }

    /// What was done with a disk that is used for that.
    async fn unless_failed(&self, (name, of): Used, done: Result<()>) -> Result<Used> {
        let Err(error) = done else { return Ok((name, of)) };
        of.users.fetch_sub(1, Ordering::SeqCst);
        self.close_if_unused(&name, &of).await;
        Err(error)
    }

    /// Closes a disk that nobody is connected to any more.
    async fn close_unused(&self, name: &str, of: &Weak<OpenDisk>) {
        let _alone = self.busy.lock().await;
        if let Some(of) = of.upgrade() {
            self.close_if_unused(name, &of).await;
        }
    }

    /// The caller holds `busy`.
    async fn close_if_unused(&self, name: &str, of: &Arc<OpenDisk>) {
        if of.users.load(Ordering::SeqCst) > 0 {
            return;
        }
        self.open().retain(|_, known| !Arc::ptr_eq(known, of));
        of.server.withdraw(name);
        if let Err(error) = of.close().await {
            tracing::error!("{name:?} could not be closed: {error}");
        }
    }

    /// Closes all disks: no connection is left.
    fn close_all(self: &Arc<Self>) -> Result<()> {
        let house = self.clone();
        self.engine.run_on(0, move || async move {
            let _alone = house.busy.lock().await;
            let open: Vec<_> = house.open().drain().map(|(_, open)| open).collect();
            let mut closed = Ok(());
            for open in open {
                closed = closed.and(open.close().await);
            }
            closed
        })
    }
}

impl OpenDisk {
    /// Ends the use of the image; again, it does nothing.
    async fn close(&self) -> Result<()> {
        let Some(graph) = self.disk.graph_now() else { return Ok(()) };
        self.disk.close().await?;
        self.checkpoints.close(&graph).await;
        Ok(())
    }
}
