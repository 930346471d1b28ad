//! [`Engine`]: starts the workers, runs tasks on them, and ends them.

use std::future::Future;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use spile_core::{Error, Result};

use crate::config::{Config, EngineKind};
use crate::file_pool::FilePool;
use crate::shared::{Message, WorkerLink, WorkerStats, relock};
use crate::worker::{self, Worker};

/// A handle to running workers. Clones are handles to the same workers. When the last handle is dropped without
/// [`Engine::shutdown`], the workers finish their tasks and end by themselves.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    kind: EngineKind,
    /// Why the engines before this one were not taken.
    refused: Vec<Error>,
    workers: Vec<Arc<WorkerLink>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.workers.iter().for_each(|shared| shared.stop());
    }
}

impl Engine {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// `Unsupported` or `Denied` when the engine that was asked for cannot be had; `Exhausted` or `Io` when threads,
    /// descriptors or memory are short.
    pub fn start(config: Config) -> Result<Engine> {
        if config.kind != EngineKind::Auto {
            return Self::start_as(config.kind, &config).map(Self::new).map_err(or_auto);
        }
        let mut refused = Vec::new();
        for kind in EngineKind::ALL {
            match Self::start_as(kind, &config) {
                Ok(mut inner) => {
                    inner.refused = refused;
                    return Ok(Self::new(inner));
                }
                Err(error) => refused.push(error),
            }
        }
        Err(refused.pop().expect("there are engines"))
    }

    fn new(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }

    fn start_as(kind: EngineKind, config: &Config) -> Result<Inner> {
        let files = FilePool::shared();
        files.ensure_thread()?;
        let mut inner = Inner { kind, refused: Vec::new(), workers: Vec::new(), threads: Mutex::default() };
        for index in 0..config.workers.max(1) {
            // When a worker cannot be started, dropping `inner` ends those before it.
            let (shared, thread) = start_worker(index, kind, files.clone(), config)?;
            inner.workers.push(shared);
            relock(&inner.threads).push(thread);
        }
        Ok(inner)
    }

    /// The most direct transfers to one store that a worker has in flight at a time, as long as no other store has any. More wait.
    pub fn most_transfers_of_a_store(&self) -> usize {
        let shared = match self.kind() {
            EngineKind::Uring | EngineKind::Auto => crate::uring::MAX_TRANSFERS,
            EngineKind::Aio => crate::aio::SHARED_TRANSFERS,
            EngineKind::Threads => crate::file_pool::SHARED_THREADS,
        };
        // A store has half of what the others leave (module `shares`).
        shared / 2
    }

    /// The engine in use, one of [`EngineKind::ALL`].
    pub fn kind(&self) -> EngineKind {
        self.inner.kind
    }

    /// One line for people: the engine in use, why no better one, and what would have to be set for that.
    pub fn about(&self) -> String {
        let name = match self.kind() {
            EngineKind::Auto | EngineKind::Uring => "uring (io_uring)",
            EngineKind::Aio => "aio (Linux AIO)",
            EngineKind::Threads => "threads (helper threads)",
        };
        let reasons: Vec<String> = self.inner.refused.iter().map(Error::to_string).collect();
        let reasons = reasons.join("; ");
        let colon = if reasons.is_empty() { "" } else { ": " };
        format!("engine {name}, {} worker(s){colon}{reasons}", self.workers())
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.inner.workers.len()
    }

    /// What each worker has done so far.
    pub fn stats(&self) -> Vec<WorkerStats> {
        self.inner.workers.iter().map(|shared| shared.stats()).collect()
    }

    /// The processor time that the thread of each worker has used, in nanoseconds; `None` for one that has ended.
    pub fn cpu_ns(&self) -> Vec<Option<u64>> {
        self.inner.workers.iter().map(|shared| shared.cpu_ns()).collect()
    }

    /// Makes a future on worker number `worker` (modulo their count) and runs it there. After
    /// [`Engine::shutdown`] nothing happens: `make` is dropped.
    pub fn spawn_on<F, Fut>(&self, worker: usize, make: F)
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let shared = &self.inner.workers[worker % self.workers()];
        shared.push(Message::Call(Box::new(move || worker::spawn(make()))));
    }

    /// As [`Engine::spawn_on`], and blocks the calling thread until the future's result is there.
    ///
    /// # Panics
    /// When called on a worker thread, after shutdown, or when the future panics.
    pub fn run_on<F, Fut, T>(&self, worker: usize, make: F) -> T
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        assert!(worker::try_with(|_| ()).is_none(), "run_on blocks: await instead on a worker");
        let (sender, receiver) = mpsc::sync_channel(1);
        self.spawn_on(worker, move || {
            let future = make();
            async move {
                let _ = sender.send(future.await);
            }
        });
        receiver.recv().expect("the task panicked, or the engine is shut down")
    }

    /// Waits until all tasks have ended and joins the threads. A second call returns at once. Called on a worker
    /// it only asks for the end: a task cannot wait for itself.
    pub fn shutdown(&self) {
        self.inner.workers.iter().for_each(|shared| shared.stop());
        if worker::try_with(|_| ()).is_none() {
            let threads = std::mem::take(&mut *relock(&self.inner.threads));
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

/// Adds to the hint of an engine that cannot be had that another one may be.
fn or_auto(error: Error) -> Error {
    match error.hint_text().map(|hint| format!("{hint}, or use --engine auto")) {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

type Started = (Arc<WorkerLink>, JoinHandle<()>);

/// Starts the thread of one worker. The thread makes its own reactor, because a ring belongs to one thread.
fn start_worker(index: usize, kind: EngineKind, files: Arc<FilePool>, config: &Config) -> Result<Started> {
    let (pool_bytes, poll) = (config.pool_bytes, config.poll);
    let (sender, receiver) = mpsc::sync_channel(1);
    let body = move || match Worker::new(index, kind, files, pool_bytes, poll) {
        Ok(worker) => {
            let _ = sender.send(Ok(worker.shared.clone()));
            drop(sender);
            worker.run();
        }
        Err(error) => drop(sender.send(Err(error))),
    };
    let name = format!("spile-worker-{index}");
    let thread = std::thread::Builder::new().name(name).spawn(body);
    let thread = thread.map_err(|source| Error::io("start a worker thread", source))?;
    let shared = receiver.recv().expect("a worker reports before it runs")?;
    Ok((shared, thread))
}
