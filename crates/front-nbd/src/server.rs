//! [`Server`]: exports, listeners, the spreading of connections over workers, and the orderly end.

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use spile_core::{Disk, Error, ErrorKind, MAX_REQUEST_BYTES, Result};
use spile_engine::{Engine, Listener, sleep, spawn};

use crate::connection::{self, tls_mode};
use crate::metrics::{Clock, ExportMetrics, FrontMetrics};
use crate::negotiate::{Offer, TlsMode};
use crate::signal::{Level, Stop};
use crate::tls::TlsConfig;
use crate::wire::handshake::string;
use crate::wire::request::Request;

/// One disk under one name.
pub struct Export<D> {
    /// The name clients ask for: at most 4096 bytes, without NUL, unique on its server.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// The disk. Its flush covers all connections.
    pub disk: Arc<D>,
    /// Refuse writes even if the disk would take them.
    pub read_only: bool,
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// A client that has not chosen its export after this time is hung up on.
    pub handshake_timeout: Duration,
    /// Requests in flight on one connection; further ones wait in the socket. At least 1.
    pub max_in_flight: usize,
    /// Connections at a time; further ones are closed at once.
    pub max_connections: usize,
    /// TLS, or `None` for a server without it.
    pub tls: Option<TlsConfig>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { handshake_timeout: Duration::from_secs(10), max_in_flight: 128, max_connections: 1024, tls: None }
    }
}

/// What all connections of a server share.
pub(crate) struct Shared<D> {
    pub(crate) config: ServerConfig,
    pub(crate) exports: Vec<Export<D>>,
    /// As the exports were at the start.
    offers: Vec<Offer>,
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
    pub(crate) stop: Stop,
    pub(crate) metrics: Vec<ExportMetrics>,
    pub(crate) clock: Clock,
    failures: AtomicU64,
    /// Connections on each worker.
    load: Vec<AtomicUsize>,
    /// Listeners and connections that are not over.
    alive: Mutex<usize>,
    all_over: Condvar,
}

impl<D: Disk> Shared<D> {
    pub(crate) fn tls_mode(&self) -> TlsMode {
        tls_mode(self.config.tls.as_ref().map(|tls| tls.required))
    }

    /// What a client that connects now is told: disks grow.
    pub(crate) fn offers_now(&self) -> Arc<[Offer]> {
        let offers = self.offers.iter().zip(&self.exports);
        let now = |(offer, export): (&Offer, &Export<D>)| Offer {
            size_bytes: export.disk.info().size_bytes,
            ..offer.clone()
        };
        offers.map(now).collect()
    }

    /// Logs a failure of the disk: the first, then each time their number has doubled.
    pub(crate) fn log_failure(&self, export: usize, request: &Request, error: &Error) {
        let count = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            let (name, command) = (&self.exports[export].name, request.command);
            let (offset, len) = (request.offset_bytes, request.len_bytes);
            tracing::warn!(export = %name, ?command, offset, len, count, %error, "NBD request failed");
        }
    }

    fn connections(&self) -> usize {
        self.load.iter().map(|load| load.load(Ordering::Relaxed)).sum()
    }

    fn least_loaded(&self) -> usize {
        let loads = self.load.iter().enumerate();
        loads.min_by_key(|(_, load)| load.load(Ordering::Relaxed)).map_or(0, |(worker, _)| worker)
    }
}

/// Counts a listener or a connection as alive for as long as it lives.
struct Alive<D> {
    shared: Arc<Shared<D>>,
    worker: Option<usize>,
}

impl<D> Alive<D> {
    fn new(shared: Arc<Shared<D>>, worker: Option<usize>) -> Self {
        *shared.alive.lock().unwrap_or_else(|e| e.into_inner()) += 1;
        if let Some(worker) = worker {
            shared.load[worker].fetch_add(1, Ordering::Relaxed);
        }
        Self { shared, worker }
    }
}

impl<D> Drop for Alive<D> {
    fn drop(&mut self) {
        if let Some(worker) = self.worker {
            self.shared.load[worker].fetch_sub(1, Ordering::Relaxed);
        }
        *self.shared.alive.lock().unwrap_or_else(|e| e.into_inner()) -= 1;
        self.shared.all_over.notify_all();
    }
}

/// An NBD server. Dropping it stops it, but does not wait.
pub struct Server<D: Disk> {
    engine: Engine,
    shared: Arc<Shared<D>>,
    next_listener: AtomicUsize,
}

impl<D: Disk> Server<D> {
    /// A server of `exports` on `engine`'s workers. It serves nobody before [`Server::listen`].
    ///
    /// # Errors
    /// `InvalidInput` when an export's name is not allowed or not unique, a disk's sizes do not fit the
    /// protocol, or TLS cannot be set up (with the path of the file).
    pub fn new(engine: Engine, config: ServerConfig, exports: Vec<Export<D>>) -> Result<Self> {
        let offers: Vec<Offer> = exports.iter().map(offer).collect::<Result<_>>()?;
        for (at, offer) in offers.iter().enumerate() {
            if offers[..at].iter().any(|other| other.name == offer.name) {
                let what = format!("two exports are named '{}'", offer.name);
                return Err(Error::new(ErrorKind::InvalidInput, what).hint("give each its name"));
            }
        }
        let config = ServerConfig { max_in_flight: config.max_in_flight.max(1), ..config };
        let tls = config.tls.as_ref().map(TlsConfig::load).transpose()?;
        let workers = engine.workers();
        let shared = Arc::new(Shared {
            metrics: exports.iter().map(|_| ExportMetrics::new(workers)).collect(),
            load: (0..workers).map(|_| AtomicUsize::new(0)).collect(),
            stop: Stop::default(),
            clock: Clock::start(),
            failures: AtomicU64::new(0),
            alive: Mutex::new(0),
            all_over: Condvar::new(),
            config,
            exports,
            offers,
            tls,
        });
        Ok(Self { engine, shared, next_listener: AtomicUsize::new(0) })
    }

    /// Accepts connections from `fd`, a bound and listening Unix or TCP socket. May be called several times.
    ///
    /// # Errors
    /// `Shutdown` after [`Server::stop`]; `InvalidInput` when it is no stream socket or does not listen.
    pub fn listen(&self, fd: OwnedFd) -> Result<()> {
        if self.shared.stop.level() > Level::Run {
            return Err(Error::new(ErrorKind::Shutdown, "the server is stopping"));
        }
        if !rustix::net::sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(Error::new(ErrorKind::InvalidInput, "the descriptor is not a listening socket"));
        }
        let listener = Listener::from_fd(fd)?;
        let worker = self.next_listener.fetch_add(1, Ordering::Relaxed) % self.engine.workers();
        let alive = Alive::new(self.shared.clone(), None);
        let engine = self.engine.clone();
        self.engine.spawn_on(worker, move || accept_all(engine, alive, listener));
        Ok(())
    }

    /// Takes no new connection and no new request. What is in flight is finished and answered, then the
    /// connections are closed. Does not wait.
    pub fn stop(&self) {
        self.shared.stop.raise(Level::Drain);
    }

    /// Waits until every listener and connection is over, after [`Server::stop`]. Who has not taken its replies
    /// when `patience` is over is hung up on. True when that was not needed. Not to be called from a worker.
    pub fn wait_drained(&self, patience: Duration) -> bool {
        let alive = self.shared.alive.lock().unwrap_or_else(|e| e.into_inner());
        let busy = |alive: &mut usize| *alive > 0;
        let (alive, timed_out) =
            self.shared.all_over.wait_timeout_while(alive, patience, busy).unwrap_or_else(|e| e.into_inner());
        if !timed_out.timed_out() {
            return true;
        }
        drop(alive);
        self.shared.stop.raise(Level::HangUp);
        let alive = self.shared.alive.lock().unwrap_or_else(|e| e.into_inner());
        drop(self.shared.all_over.wait_while(alive, busy).unwrap_or_else(|e| e.into_inner()));
        false
    }

    /// The figures of the export of this name; all zero if there is none.
    pub fn metrics(&self, export: &str) -> FrontMetrics {
        let index = self.shared.exports.iter().position(|other| other.name == export);
        index.map_or_else(FrontMetrics::new, |index| self.shared.metrics[index].read(&self.shared.clock))
    }

    /// Connections now, those in the handshake included.
    pub fn connections(&self) -> usize {
        self.shared.connections()
    }
}

impl<D: Disk> Drop for Server<D> {
    fn drop(&mut self) {
        self.stop();
    }
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
    })
}

/// After an accept that failed for want of descriptors or memory, this long a rest.
const ACCEPT_REST: Duration = Duration::from_millis(100);

async fn accept_all<D: Disk>(engine: Engine, alive: Alive<D>, listener: Listener) {
    let shared = &alive.shared;
    let listener = Rc::new(listener);
    let mut failures = 0u64;
    spawn(close_on_stop(shared.clone(), listener.clone()));
    while shared.stop.level() == Level::Run {
        match listener.accept().await {
            Ok(fd) => admit(&engine, shared, fd),
            Err(error) if error.kind() == ErrorKind::Shutdown => return,
            Err(error) => {
                failures += 1;
                if failures.is_power_of_two() {
                    tracing::warn!(count = failures, %error, "NBD: a connection could not be accepted");
                }
                sleep(ACCEPT_REST).await;
            }
        }
    }
}

async fn close_on_stop<D: Disk>(shared: Arc<Shared<D>>, listener: Rc<Listener>) {
    let mut stop = shared.stop.watch();
    poll_fn(|cx| stop.poll_above(Level::Run, cx)).await;
    listener.close();
}

fn admit<D: Disk>(engine: &Engine, shared: &Arc<Shared<D>>, fd: OwnedFd) {
    if shared.connections() >= shared.config.max_connections {
        return tracing::debug!("NBD: too many connections, one was turned away");
    }
    let worker = shared.least_loaded();
    let alive = Alive::new(shared.clone(), Some(worker));
    engine.spawn_on(worker, move || async move {
        let shared = alive.shared.clone();
        connection::serve(shared, fd).await;
        drop(alive);
    });
}
