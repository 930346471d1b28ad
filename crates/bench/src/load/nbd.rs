//! NBD under load: the client of the NBD store, pipelined on one socket for each connection.
//!
//! A connection is a store of its own that never connects again, on a worker of an engine that lives as long as the load. The
//! pump runs on that worker, and so does one long-lived task for each slot, which carries one request after the other. So a
//! round of requests becomes one send, and one receive brings as many answers as there are.
//!
//! Structured replies are not asked for: a server may look for holes at each read then, and that is not what is measured.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::{Either, select};
use spile_core::{Error, ErrorKind, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine};
use spile_server::uri::NbdUri;
use spile_store::{NbdFacts, NbdOptions, NbdStore};

use super::pump::STUCK_AFTER;
use super::transport::{Endpoint, Info, Kind, Ready, Shape, Transport};

/// Workers at most; more connections share them.
const MAX_WORKERS: u32 = 64;
/// The arena of each worker's pool, in bytes. The load has memory of its own.
const POOL_BYTES: usize = 1 << 20;

/// Connections after their handshake.
pub struct NbdEndpoint {
    engine: Engine,
    stores: Vec<NbdStore>,
}

impl NbdEndpoint {
    /// Connects so often to one export.
    ///
    /// # Errors
    /// As [`NbdStore::open`].
    pub fn connect(uri: &NbdUri, connections: u32, mode: OpenMode) -> Result<Self> {
        let workers = connections.clamp(1, MAX_WORKERS) as usize;
        let engine = Engine::start(Config { workers, pool_bytes: POOL_BYTES, ..Config::default() })?;
        let stores = (0..connections as usize).map(|number| open(&engine, number, uri, mode));
        let stores = stores.collect::<Result<_>>()?;
        Ok(Self { engine, stores })
    }
}

fn open(engine: &Engine, number: usize, uri: &NbdUri, mode: OpenMode) -> Result<NbdStore> {
    let options =
        NbdOptions { connections: 1, answer_limit: STUCK_AFTER, reconnect_limit: Duration::ZERO, structured: false };
    let uri = uri.clone();
    let opened = engine.run_on(number, move || NbdStore::open_with(uri, mode, options));
    opened.map_err(|error| match error.kind() {
        ErrorKind::ReadOnly => Error::new(error.kind(), "the disk is read-only").hint("use --rw randread"),
        _ => error,
    })
}

impl Endpoint for NbdEndpoint {
    type Ready = NbdConnection;

    fn info(&self) -> Info {
        let facts: NbdFacts = self.stores[0].facts();
        Info {
            size_bytes: facts.size_bytes,
            read_only: facts.is_read_only(),
            flush: facts.can_flush(),
            fua: facts.can_fua(),
            min_block_bytes: facts.min_block_bytes,
            max_block_bytes: facts.max_payload_bytes,
        }
    }

    fn run<R>(self, shape: Shape, run: impl FnOnce(Vec<NbdConnection>) -> Result<R>) -> Result<(R, u32)> {
        let Self { engine, stores } = self;
        let stores = stores.into_iter().enumerate();
        let connections = stores.map(|(worker, store)| NbdConnection { engine: engine.clone(), worker, shape, store });
        let done = run(connections.collect());
        // The stores are gone with their connections; the workers end when these have said good-bye.
        engine.shutdown();
        Ok((done?, 0))
    }
}

/// One connection, before its load.
pub struct NbdConnection {
    engine: Engine,
    worker: usize,
    shape: Shape,
    store: NbdStore,
}

impl Ready for NbdConnection {
    type Transport = NbdTransport;

    fn block_on<T, Fut>(self, work: impl FnOnce(NbdTransport) -> Fut + Send + 'static) -> T
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let Self { engine, worker, shape, store } = self;
        engine.run_on(worker, move || work(NbdTransport::new(shape, &store)))
    }
}

/// A request for a slot's task.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    offset_bytes: u64,
    fua: bool,
}

/// One slot: its memory, and what its task is to do.
struct Slot {
    block: Segments,
    job: Cell<Option<Job>>,
    waker: RefCell<Waker>,
}

/// What the pump and the slots' tasks of one connection have in common.
struct Board {
    slots: Vec<Slot>,
    done: RefCell<VecDeque<(usize, Result<()>)>>,
    pump: RefCell<Waker>,
    ended: Cell<bool>,
}

impl Board {
    fn poll_job(&self, slot: usize, context: &Context<'_>) -> Poll<Option<Job>> {
        let Slot { job, waker, .. } = &self.slots[slot];
        match job.take() {
            Some(job) => Poll::Ready(Some(job)),
            None if self.ended.get() => Poll::Ready(None),
            None => {
                waker.borrow_mut().clone_from(context.waker());
                Poll::Pending
            }
        }
    }

    fn poll_done(&self, context: &Context<'_>) -> Poll<()> {
        if !self.done.borrow().is_empty() {
            return Poll::Ready(());
        }
        self.pump.borrow_mut().clone_from(context.waker());
        Poll::Pending
    }

    fn finish(&self, slot: usize, outcome: Result<()>) {
        self.done.borrow_mut().push_back((slot, outcome));
        self.pump.borrow().wake_by_ref();
    }
}

/// The task of one slot: one request after the other, until the load ends.
async fn serve(board: Rc<Board>, store: NbdStore, slot: usize) {
    while let Some(job) = poll_fn(|context| board.poll_job(slot, context)).await {
        let outcome = perform(&store, job, &board.slots[slot].block).await;
        board.finish(slot, outcome);
    }
}

async fn perform(store: &NbdStore, job: Job, block: &Segments) -> Result<()> {
    let at = StoreOffset(job.offset_bytes);
    match job.kind {
        Kind::Read => store.read_at(at, block, Via::Direct).await,
        Kind::Write if job.fua => Box::pin(store.write_durable(at, block)).await,
        Kind::Write => store.write_at(at, block, Via::Direct).await,
        Kind::Flush => store.sync().await,
    }
}

/// One connection under load, on its worker.
pub struct NbdTransport {
    board: Rc<Board>,
    /// One block, for data that are made or looked at.
    block: Vec<u8>,
}

impl NbdTransport {
    fn new(shape: Shape, store: &NbdStore) -> Self {
        let len = shape.block_bytes as usize;
        let slot = |_| Slot { block: Segments::zeroed(len), job: Cell::new(None), waker: Waker::noop().clone().into() };
        let board = Rc::new(Board {
            slots: (0..shape.depth).map(slot).collect(),
            done: RefCell::default(),
            pump: Waker::noop().clone().into(),
            ended: Cell::new(false),
        });
        for slot in 0..shape.depth as usize {
            spile_engine::spawn(serve(board.clone(), store.clone(), slot));
        }
        Self { board, block: vec![0; len] }
    }
}

impl Drop for NbdTransport {
    fn drop(&mut self) {
        self.board.ended.set(true);
        self.board.slots.iter().for_each(|slot| slot.waker.borrow().wake_by_ref());
    }
}

impl Transport for NbdTransport {
    fn fill(&mut self, slot: usize, fill: impl FnOnce(&mut [u8])) {
        fill(&mut self.block);
        self.board.slots[slot].block.copy_from_slice(0, &self.block);
    }

    fn issue(&mut self, slot: usize, kind: Kind, offset_bytes: u64, fua: bool) {
        let slot = &self.board.slots[slot];
        slot.job.set(Some(Job { kind, offset_bytes, fua }));
        slot.waker.borrow().wake_by_ref();
    }

    /// The tasks send what they were given as soon as the pump waits.
    fn submit(&mut self) {}

    /// A server that must be taken for stuck is the store's to find.
    async fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let done = poll_fn(|context| self.board.poll_done(context));
        let Some(timeout) = timeout else {
            done.await;
            return Ok(true);
        };
        Ok(matches!(select(done, pin!(spile_engine::sleep(timeout))).await, Either::Left(_)))
    }

    async fn pause(&mut self, duration: Duration) {
        spile_engine::sleep(duration).await;
    }

    fn take(&mut self) -> Result<Option<usize>> {
        let Some((slot, outcome)) = self.board.done.borrow_mut().pop_front() else { return Ok(None) };
        outcome?;
        Ok(Some(slot))
    }

    fn data(&mut self, slot: usize) -> &[u8] {
        self.board.slots[slot].block.copy_to_slice(0, &mut self.block);
        &self.block
    }
}
