//! `spile receive`: takes in disks that other hosts move here, by NBD. What is done with files is in [`spile_life::motion::Receiver`]; here are the
//! links ([`door`]) and the open images ([`house`]).
//!
//! An image is open for as long as somebody is connected to it. So a server of this host can open a disk as soon as the other host has let go of it.
//!
//! # Who writes
//!
//! One link at a time writes to a disk, as a file that a server has is locked against another one. The connections of one store of a Spile client name
//! their link; a client that does not is a link of one connection. While another link is there, such a client gets the disk for reading only, and one that names
//! its link waits for a moment and is refused then. Whoever says that it only reads keeps nobody out.
//!
//! # What hangs
//!
//! Each disk has a lock of its own, for which nobody waits for long. A call that hangs for one disk keeps no other one waiting, nor the end of the process.

mod door;
mod house;
mod known;
mod marks;
mod quota;

use std::fmt::Display;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use spile_core::{Env, Error, ErrorKind, Result, Store as _};
use spile_engine::{Config, Engine, OsEnv};
use spile_front_nbd::{Server as NbdServer, ServerConfig};
use spile_life::motion::Receiver;
use spile_store::{CacheMode, FileId, HostFiles, HostStore, OsFiles};

use crate::jobs::Access;
use crate::listen::SocketAccess;
use crate::serving::failed_syncs;
use crate::serving::fronts::{Listening, Role};
use crate::serving::sockets::Endpoint;
use crate::signals::ServerSignals;
use crate::uri::Address;
use door::Door;
use house::House;
pub use known::{Known, list, remove_half};

/// How long clients may take to accept their last replies.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How long what hangs may take to its end after that, and the closing of disks.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

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
/// When the folder cannot be found, or another process takes disks in for it; an address cannot be listened on; a disk cannot be closed, or not in time.
pub fn receive(settings: &Settings, signals: ServerSignals, say: impl Fn(&dyn Display)) -> Result<()> {
    let folder = find_folder(&settings.folder)?;
    failed_syncs::remember();
    let _alone = be_alone(&folder)?;
    let engine = Engine::start(settings.engine.clone())?;
    let ends = mpsc::channel();
    signals.hear(
        || {},
        move |_| {
            let _ = ends.0.send(());
        },
    );
    let access = Access { cache: settings.cache, no_lock: false };
    let nbd = ServerConfig { tls: None, ..settings.nbd.clone() };
    let house = Arc::new(House::new(folder.clone(), access, engine.clone(), nbd)?);
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
    let is_drained = gate.wait_drained_within(DRAIN_PATIENCE, LAST_PATIENCE);
    house.remove_unused(LAST_PATIENCE);
    let closed = house.close_all(LAST_PATIENCE);
    if !is_drained || closed.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut) {
        // Whoever waits for storage that hangs is not waited for: the process ends.
        std::mem::forget((gate, engine, house));
        let what = "the storage of a disk hangs, which was not closed in order";
        return closed.and(Err(Error::new(ErrorKind::TimedOut, what)));
    }
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

/// While the result is there, no other process takes disks in for `folder`.
///
/// # Errors
/// `Busy` when one does.
fn be_alone(folder: &Path) -> Result<File> {
    let opened = File::open(folder).map_err(|e| Error::io("cannot be opened", e).at_path(folder))?;
    match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(opened),
        Err(_) => {
            let what = "another process takes disks in for this folder";
            Err(Error::new(ErrorKind::Busy, what).at_path(folder).hint("end it first, or take another folder"))
        }
    }
}

/// What a [`Receiver`] works with.
struct Tools {
    files: HostFiles,
    asking: HostFiles,
    env: Arc<dyn Env>,
}

impl Tools {
    fn new(cache: CacheMode) -> Self {
        Self { files: host_files(cache, false), asking: host_files(cache, true), env: Arc::new(OsEnv) }
    }

    fn receiver<'a>(&'a self, folder: &'a Path) -> Receiver<'a, HostFiles> {
        Receiver { files: &self.files, asking: &self.asking, env: &self.env, folder, which: &which }
    }
}

fn host_files(cache: CacheMode, no_lock: bool) -> HostFiles {
    HostFiles::new(OsFiles::new(cache).without_locks(no_lock))
}

/// The number of a file in its file system, and when it was made, where that is known: another file may have the number when this one is gone. Unlike
/// [`Store::file_identity`](spile_core::Store::file_identity) it is there also where that is not known.
fn which(store: &HostStore) -> String {
    let Some(FileId::File { inode, .. }) = store.file_id() else { return "-".to_owned() };
    let made = std::fs::metadata(store.path()).and_then(|stat| stat.created()).ok();
    let made_ns = made.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_nanos());
    format!("{inode} {}", made_ns.unwrap_or_default())
}
