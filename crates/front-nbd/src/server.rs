//! [`Server`]: exports, listeners, the spreading of connections over workers, and the orderly end.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use spile_core::metrics::span::SpanLog;
use spile_core::{Disk, Error, ErrorKind, MAX_REQUEST_BYTES, Result};
use spile_engine::Engine;
use spile_front::{Breakdown, Connections, FailedRequest, FrontReading, Listeners, LogLimit, Peer, log_failure};
use spile_nbd_tls::{ServerConfig as TlsConfig, ServerFiles};

use crate::connection::{self, tls_mode};
use crate::contexts::Checkpoints;
use crate::finder::Find;
use crate::metrics::ExportMetrics;
use crate::negotiate::{Offer, TlsMode};
use crate::signal::{Level, Stop};
use crate::wire::handshake::string;
use crate::wire::request::Request;

/// One disk under one name.
pub struct Export<D> {
    /// The name clients ask for: at most 4096 bytes, without NUL, unique on its server.
    pub name: String,
    /// A description for people; may be empty.
    pub description: String,
    /// The disk's name in the log, where the export may have none.
    pub disk_name: String,
    /// The disk. Its flush covers all connections.
    pub disk: Arc<D>,
    /// Refuse writes even if the disk would take them.
    pub read_only: bool,
    /// What has changed of the disk since its checkpoints, if it can have some.
    pub checkpoints: Option<Arc<dyn Checkpoints>>,
    /// By what its bytes are kept, where that outlives this process, which [`KEPT_CONTEXT`](crate::wire::handshake::KEPT_CONTEXT) tells a client.
    pub kept: fn(&D) -> Option<String>,
    /// Set once no client may choose it any more. Exports of one disk may share it, also those of several servers.
    pub withdrawn: Arc<AtomicBool>,
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// A client that has not chosen its export after this time is disconnected.
    pub handshake_timeout: Duration,
    /// The most requests in flight on one connection, at least 1; further ones wait in the socket.
    pub max_in_flight: usize,
    /// The most connections at a time. When all places are taken, [`Connections`] says who gets one.
    pub max_connections: usize,
    /// TLS, or `None` for a server without it.
    pub tls: Option<ServerFiles>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { handshake_timeout: Duration::from_secs(10), max_in_flight: 128, max_connections: 1024, tls: None }
    }
}

/// An export as the server keeps it.
pub(crate) struct LiveExport<D> {
    pub(crate) name: String,
    disk_name: String,
    pub(crate) read_only: bool,
    /// `None` once it is withdrawn.
    disk: Mutex<Option<Arc<D>>>,
    kept: fn(&D) -> Option<String>,
    checkpoints: Mutex<Option<Arc<dyn Checkpoints>>>,
    withdrawn: Arc<AtomicBool>,
    /// The last client of Spile's that could write has gone with a good-bye.
    is_left_whole: AtomicBool,
}

impl<D> LiveExport<D> {
    /// Before its connection is counted, or is no more.
    pub(crate) fn set_left_whole(&self, is_left_whole: bool) {
        self.is_left_whole.store(is_left_whole, Ordering::SeqCst);
    }

    /// Its disk, if it is still there.
    pub(crate) fn disk(&self) -> Option<Arc<D>> {
        if self.withdrawn.load(Ordering::SeqCst) {
            return None;
        }
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What has changed of its disk, if that is known and the disk is still there.
    pub(crate) fn checkpoints(&self) -> Option<Arc<dyn Checkpoints>> {
        self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn withdraw(&self) {
        *self.disk.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The server as all its connections see it.
pub(crate) struct ServerState<D> {
    pub(crate) config: ServerConfig,
    pub(crate) exports: Vec<LiveExport<D>>,
    /// What the handshake tells of each export, with the sizes that the disks had at the start.
    offers: Vec<Offer>,
    pub(crate) tls: Option<Arc<TlsConfig>>,
    pub(crate) stop: Stop,
    pub(crate) metrics: Vec<ExportMetrics>,
    /// Limits messages about failed requests.
    failures: LogLimit,
    /// And about exports that are refused.
    pub(crate) refusals: LogLimit,
    /// The open connections, those in the handshake included.
    connections: Arc<Connections>,
    /// Finds exports that are not among these.
    pub(crate) finder: Option<Arc<dyn Find<D>>>,
}

/// The server's name in the log.
const FRONT: &str = "NBD";

impl<D: Disk> ServerState<D> {
    pub(crate) fn tls_mode(&self) -> TlsMode {
        tls_mode(self.config.tls.as_ref().map(|tls| tls.required))
    }

    /// What a client that connects now is told of the exports. Disks may have grown since the start.
    pub(crate) fn offers_now(&self) -> Arc<[Offer]> {
        self.each_offer().collect()
    }

    /// What a client is told of the only export.
    pub(crate) fn only_offer(&self) -> Option<Offer> {
        self.each_offer().next()
    }

    fn each_offer(&self) -> impl Iterator<Item = Offer> {
        let offers = self.offers.iter().zip(&self.exports);
        let now = |(offer, export): (&Offer, &LiveExport<D>)| {
            let disk = export.disk();
            Offer {
                size_bytes: disk.as_ref().map_or(offer.size_bytes, |disk| disk.info().size_bytes),
                checkpoints: export.checkpoints().map_or_else(Vec::new, |checkpoints| checkpoints.names()),
                kept: disk.and_then(|disk| (export.kept)(&disk)),
                ..offer.clone()
            }
        };
        offers.map(now)
    }

    pub(crate) fn log_failure(&self, export: usize, request: &Request, error: &Error) {
        let failed = FailedRequest {
            front: FRONT,
            disk: &self.exports[export].disk_name,
            command: &request.command,
            offset_bytes: Some(request.offset_bytes),
            len_bytes: request.len_bytes.into(),
            outcome: "failed",
            reason: error,
        };
        log_failure(&self.failures, &failed);
    }
}

/// An NBD server. Dropping a server stops it, but does not wait for the end.
pub struct Server<D: Disk> {
    engine: Engine,
    pub(crate) shared: Arc<ServerState<D>>,
    listeners: Listeners,
    next_listener: AtomicUsize,
}

impl<D: Disk> Server<D> {
    /// A server of `exports` on `engine`'s workers. It serves nobody before [`Server::listen`].
    ///
    /// # Errors
    /// `InvalidInput` when an export's name is not allowed or not unique, a disk's sizes do not fit the
    /// protocol, or TLS cannot be set up (with the path of the file).
    pub fn new(engine: Engine, config: ServerConfig, exports: Vec<Export<D>>) -> Result<Self> {
        Self::with(engine, config, exports, None)
    }

    /// A server that has no export before a client asks for it.
    ///
    /// # Errors
    /// As [`Server::new`].
    pub fn of_found(engine: Engine, config: ServerConfig, finder: Arc<dyn Find<D>>) -> Result<Self> {
        Self::with(engine, config, Vec::new(), Some(finder))
    }

    fn with(
        engine: Engine,
        config: ServerConfig,
        exports: Vec<Export<D>>,
        finder: Option<Arc<dyn Find<D>>>,
    ) -> Result<Self> {
        let offers: Vec<Offer> = exports.iter().map(offer).collect::<Result<_>>()?;
        for (at, offer) in offers.iter().enumerate() {
            if offers[..at].iter().any(|other| other.name == offer.name) {
                let what = format!("two exports are named '{}'", offer.name);
                return Err(Error::new(ErrorKind::InvalidInput, what).hint("give each its name"));
            }
        }
        let config = ServerConfig { max_in_flight: config.max_in_flight.max(1), ..config };
        let tls = config.tls.as_ref().map(ServerFiles::load).transpose()?;
        let workers = engine.workers();
        let shared = Arc::new(ServerState {
            metrics: exports.iter().map(|_| ExportMetrics::new(workers)).collect(),
            stop: Stop::default(),
            failures: LogLimit::default(),
            refusals: LogLimit::default(),
            connections: Connections::new(FRONT, config.max_connections, workers),
            config,
            exports: exports.into_iter().map(live).collect(),
            offers,
            tls,
            finder,
        });
        Ok(Self { engine, shared, listeners: Listeners::new(FRONT), next_listener: AtomicUsize::new(0) })
    }

    /// Accepts connections from `fd`, a bound and listening Unix or TCP socket. May be called several times.
    ///
    /// # Errors
    /// As [`Listeners::listen`].
    pub fn listen(&self, fd: OwnedFd) -> Result<()> {
        let worker = self.next_listener.fetch_add(1, Ordering::Relaxed) % self.engine.workers();
        let (engine, shared) = (self.engine.clone(), self.shared.clone());
        self.listeners.listen(&self.engine, worker, fd, move |fd| {
            admit(&engine, &shared, fd);
            Ok(())
        })
    }

    /// Lets go of the disk of this export. Clients that have it keep it; one that chooses it from now on is hung up on.
    pub fn withdraw(&self, export: &str) {
        let its_exports = self.shared.exports.iter().filter(|other| other.name == export);
        its_exports.for_each(LiveExport::withdraw);
    }

    /// True when the last connection to this export that has named its link has ended with a good-bye, which a copier says only of a copy that is whole.
    pub fn is_left_whole(&self, export: &str) -> bool {
        self.shared.exports.iter().any(|other| other.name == export && other.is_left_whole.load(Ordering::SeqCst))
    }

    /// Takes no new connection. Those that are open go on. Waits until no listener accepts any more; not to be called on a worker.
    pub fn stop_listening(&self) {
        self.listeners.pause();
        self.listeners.wait_closed();
    }

    /// Takes no new connection and no new request. What is in flight is finished and answered, then the
    /// connections are closed. Does not wait.
    pub fn stop(&self) {
        self.listeners.close();
        self.shared.stop.raise(Level::Drain);
    }

    /// As [`Server::wait_drained`], for a server whose connections may wait for storage that hangs: it gives up when some have not ended so long
    /// after they were hung up on. False then.
    pub fn wait_drained_within(&self, patience: Duration, after_that: Duration) -> bool {
        self.listeners.wait_closed();
        if self.shared.connections.wait_for_none(patience) {
            return true;
        }
        self.shared.stop.raise(Level::HangUp);
        self.shared.connections.wait_for_none(after_that)
    }

    /// Waits, after [`Server::stop`], until every listener and connection is over. Clients that have not taken their
    /// replies within `patience` are hung up on. True when that was not needed. Not to be called on a worker.
    pub fn wait_drained(&self, patience: Duration) -> bool {
        self.listeners.wait_closed();
        let is_drained = self.shared.connections.wait_for_none(patience);
        if !is_drained {
            self.shared.stop.raise(Level::HangUp);
            while !self.shared.connections.wait_for_none(Duration::from_secs(60)) {}
        }
        is_drained
    }

    /// What was counted of the export of this name; all zero if there is none.
    pub fn metrics(&self, export: &str) -> FrontReading {
        self.read(export, Breakdown::Sum)
    }

    /// What was counted of the export of this name, and on each worker if `breakdown` says so; all zero if there is none.
    pub fn read(&self, export: &str, breakdown: Breakdown) -> FrontReading {
        let index = self.shared.exports.iter().position(|other| other.name == export);
        index.map_or_else(FrontReading::default, |index| self.shared.metrics[index].read(breakdown))
    }

    /// What is kept of the requests to the export of this name, by worker; nothing if there is none.
    pub fn spans(&self, export: &str) -> Vec<Arc<SpanLog>> {
        let index = self.shared.exports.iter().position(|other| other.name == export);
        index.map_or_else(Vec::new, |index| self.shared.metrics[index].spans())
    }

    /// The number of open connections, those in the handshake included.
    pub fn connections(&self) -> usize {
        self.shared.connections.count()
    }
}

impl<D: Disk> Drop for Server<D> {
    fn drop(&mut self) {
        self.stop();
    }
}

fn live<D>(export: Export<D>) -> LiveExport<D> {
    let Export { name, disk_name, disk, read_only, checkpoints, kept, withdrawn, .. } = export;
    let (disk, checkpoints, is_left_whole) = (Mutex::new(Some(disk)), Mutex::new(checkpoints), AtomicBool::default());
    LiveExport { name, disk_name, read_only, disk, kept, checkpoints, withdrawn, is_left_whole }
}

fn offer<D: Disk>(export: &Export<D>) -> Result<Offer> {
    let bad = |what: &str| Err(Error::new(ErrorKind::InvalidInput, format!("export '{}': {what}", export.name)));
    for text in [&export.name, &export.description] {
        if let Err(invalid) = string(text.as_bytes()) {
            return bad(invalid.0);
        }
    }
    let info = export.disk.info();
    let minimum_bytes = info.request_align_bytes.max(1);
    if !minimum_bytes.is_power_of_two() || minimum_bytes > 1 << 16 {
        return bad("its requests need an alignment that NBD does not know");
    }
    let maximum_bytes = MAX_REQUEST_BYTES as u32;
    let preferred = info.preferred_bytes.max(4096).max(minimum_bytes).min(maximum_bytes);
    Ok(Offer {
        name: export.name.clone(),
        description: export.description.clone(),
        size_bytes: info.size_bytes,
        read_only: export.read_only || info.read_only,
        minimum_bytes,
        preferred_bytes: preferred.checked_next_power_of_two().unwrap_or(maximum_bytes),
        maximum_bytes,
        checkpoints: Vec::new(),
        kept: None,
        is_alone: false,
    })
}

fn admit<D: Disk>(engine: &Engine, shared: &Arc<ServerState<D>>, fd: OwnedFd) {
    let Some(place) = shared.connections.enter(Peer::of(&fd)) else { return };
    let (shared, presence) = (shared.clone(), place.presence());
    engine.spawn_on(place.worker(), move || async move {
        connection::serve(shared, fd, presence).await;
        drop(place);
    });
}
