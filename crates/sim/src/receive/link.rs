//! The link between both hosts. [`LinkFiles`] are the files of the host that a disk leaves: paths are its own, and what is at an `nbd:` locator is an export of
//! the other host.
//!
//! Each request is sent, done there, and answered; a link may be cut before or after each of these. What was sent by then is lost, or comes late, when
//! another link may be in use long since. A request whose answer is lost has failed for whoever waits.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use spile_core::{
    Disk, DiskInfo, Error, ErrorKind, Extent, ExtentKind, Files, Locator, OpenMode, PathCell, Result, Segments, Store,
    StoreExtent, StoreInfo, StoreOffset, Via, WriteZeroes,
};

use spile_image::layer::Identity;
use spile_life::motion::{ANSWER, ANSWER_BYTES};

use super::house::{House, Lease, THERE, There, lock};
use crate::exec::spawn_in;
use crate::store::{SimFiles, SimStore};
use crate::turns::turns;
use crate::world::World;

/// Where the other host is.
const HOST: &str = "nbd://there/";

/// The export `name` of the other host.
pub(super) fn export(name: &str) -> Locator {
    Locator::Nbd(format!("{HOST}{name}"))
}

/// What was asked for, once it was answered.
#[derive(Default)]
struct Reply {
    answer: Mutex<Option<Result<Answer>>>,
    waker: Mutex<Option<Waker>>,
}

enum Answer {
    /// A disk, or that an order was obeyed.
    Found(Option<Arc<Lease>>),
    Bytes(Segments),
    Runs(Vec<StoreExtent>),
    Done,
}

/// What a client asks for.
enum Ask {
    Find(String, Identity),
    Read(Extent),
    Write(Extent, Segments),
    Zero(Extent, WriteZeroes),
    Map(Extent),
    Flush,
}

impl Reply {
    fn put(&self, answer: Result<Answer>) {
        *lock(&self.answer) = Some(answer);
        if let Some(waker) = lock(&self.waker).take() {
            waker.wake();
        }
    }
}

impl Future for &Reply {
    type Output = Result<Answer>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Answer>> {
        if let Some(answer) = lock(&self.answer).take() {
            return Poll::Ready(answer);
        }
        *lock(&self.waker) = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// One connection to the other host.
pub(super) struct Connection {
    there: Arc<There>,
    house: Arc<House>,
    is_cut: AtomicBool,
    /// It has the answer to an order, and no disk.
    is_answer: AtomicBool,
    lease: Mutex<Option<Arc<Lease>>>,
    replies: Mutex<Vec<Weak<Reply>>>,
}

fn was_cut() -> Error {
    Error::new(ErrorKind::Io, "the connection has ended")
}

impl Connection {
    async fn open(there: &Arc<There>, export: &str, link: Identity) -> Result<Arc<Self>> {
        turns(there.draw(|rng| rng.skewed(20))).await;
        let house = there.house().ok_or_else(|| Error::new(ErrorKind::Io, "nobody listens there"))?;
        let (is_cut, is_answer, lease, replies) = Default::default();
        let connection = Arc::new(Self { there: there.clone(), house, is_cut, is_answer, lease, replies });
        there.add(&connection);
        match connection.ask(Ask::Find(export.to_owned(), link)).await? {
            Answer::Found(lease) => {
                match &lease {
                    Some(lease) => lease.of.add(&connection),
                    None => connection.is_answer.store(true, SeqCst),
                }
                *lock(&connection.lease) = lease;
                Ok(connection)
            }
            _ => Err(was_cut()),
        }
    }

    pub fn is_cut(&self) -> bool {
        self.is_cut.load(SeqCst)
    }

    /// Nothing comes back any more.
    pub fn cut(&self) {
        self.is_cut.store(true, SeqCst);
        for reply in std::mem::take(&mut *lock(&self.replies)).iter().filter_map(Weak::upgrade) {
            // Also when it was on its way.
            reply.put(Err(was_cut()));
        }
        self.leave();
    }

    fn leave(&self) {
        let lease = lock(&self.lease).take();
        drop(lease);
    }

    async fn ask(self: &Arc<Self>, ask: Ask) -> Result<Answer> {
        if self.is_cut() {
            return Err(was_cut());
        }
        let reply = Arc::new(Reply::default());
        {
            let mut replies = lock(&self.replies);
            replies.retain(|known| known.strong_count() > 0);
            replies.push(Arc::downgrade(&reply));
        }
        let (own, lease, to) = (self.clone(), lock(&self.lease).clone(), Arc::downgrade(&reply));
        spawn_in(
            THERE,
            Box::pin(async move {
                let answer = own.arrive(ask, lease).await;
                if let Some(reply) = to.upgrade().filter(|_| !own.is_cut()) {
                    reply.put(answer);
                }
            }),
        );
        (&*reply).await
    }

    /// What the other host does with a request.
    async fn arrive(&self, ask: Ask, lease: Option<Arc<Lease>>) -> Result<Answer> {
        // A slow link has much on its way when it is cut.
        let is_slow = self.there.is_slow.load(SeqCst);
        let way = self.there.draw(|rng| if is_slow && rng.chance(1, 4) { rng.below(600) } else { rng.skewed(30) });
        let (late, is_lost) = self.there.draw(|rng| (rng.below(3000), rng.chance(1, 4)));
        turns(way).await;
        if self.is_cut() {
            if is_lost {
                return Err(was_cut());
            }
            turns(late).await;
        }
        let lease = match (ask, lease) {
            (Ask::Find(export, link), _) => return self.house.find(&export, link).await.map(Answer::Found),
            (ask, Some(lease)) => (ask, lease),
            _ => return Err(was_cut()),
        };
        let (ask, lease) = lease;
        if lease.of.is_stopped() {
            return Err(was_cut());
        }
        let node = &lease.of.node;
        match ask {
            Ask::Find(..) => Err(was_cut()),
            Ask::Read(extent) => {
                let into = Segments::zeroed(extent.len_bytes as usize);
                node.read(extent, &into).await.map(|()| Answer::Bytes(into))
            }
            Ask::Write(extent, from) => node.write(extent, &from, false).await.map(|()| Answer::Done),
            Ask::Zero(extent, how) => node.write_zeroes(extent, how).await.map(|()| Answer::Done),
            Ask::Flush => node.flush().await.map(|()| Answer::Done),
            Ask::Map(extent) => {
                let runs = node.extents(extent, 1000).await?;
                let run = |run: &spile_core::ExtentStatus| StoreExtent {
                    len_bytes: run.extent.len_bytes,
                    is_hole: run.kind != ExtentKind::Data,
                };
                Ok(Answer::Runs(runs.iter().map(run).collect()))
            }
        }
    }
}

/// An export of the other host.
pub(super) struct LinkStore {
    connection: Arc<Connection>,
    info: DiskInfo,
    path: PathCell,
    /// The host that it is opened on.
    here: World,
    is_copy: AtomicBool,
    export: String,
    link: Identity,
}

impl Drop for LinkStore {
    fn drop(&mut self) {
        self.connection.leave();
    }
}

impl LinkStore {
    async fn ask(&self, ask: Ask) -> Result<Answer> {
        let again = match &ask {
            Ask::Write(extent, from) if self.connection.there.broken == super::Broken::SentAgain => {
                Some(Ask::Write(*extent, from.clone()))
            }
            _ => None,
        };
        let mut answer = self.connection.ask(ask).await;
        if let (Err(_), Some(again), true) = (&answer, again, self.connection.is_cut()) {
            answer = match Connection::open(&self.connection.there, &self.export, self.link).await {
                Ok(other) => other.ask(again).await,
                Err(error) => Err(error),
            };
        }
        if self.connection.is_cut() && !self.is_copy.load(SeqCst) {
            // Guests may see that.
            self.here.count_fault();
        }
        answer
    }
}

impl Store for LinkStore {
    fn info(&self) -> StoreInfo {
        StoreInfo {
            offset_align_bytes: self.info.request_align_bytes,
            memory_align_bytes: 1,
            grows_zeroed: false,
            punches: true,
            read_only: false,
            is_local: false,
        }
    }

    fn len_bytes(&self) -> u64 {
        self.info.size_bytes
    }

    fn path(&self) -> &Path {
        self.path.get()
    }

    fn set_path(&self, path: &Path) {
        self.path.set(path);
    }

    fn set_copy(&self, is_copy: bool) {
        self.is_copy.store(is_copy, SeqCst);
    }

    async fn read_at(&self, at: StoreOffset, into: &Segments, _: Via) -> Result<()> {
        let extent = Extent::from_range(at.0..at.0 + into.len() as u64);
        if self.connection.is_answer.load(SeqCst) {
            // It came with the connection.
            let mut answer = ANSWER.as_bytes().to_vec();
            answer.resize(into.len(), 0);
            into.copy_from(&Segments::copied(&answer));
            return Ok(());
        }
        if let Answer::Bytes(bytes) = self.ask(Ask::Read(extent)).await? {
            into.copy_from(&bytes);
        }
        Ok(())
    }

    async fn write_at(&self, at: StoreOffset, from: &Segments, _: Via) -> Result<()> {
        let extent = Extent::from_range(at.0..at.0 + from.len() as u64);
        // What is sent does not change any more.
        let sent = Segments::zeroed(from.len());
        sent.copy_from(from);
        self.ask(Ask::Write(extent, sent)).await.map(drop)
    }

    async fn sync(&self) -> Result<()> {
        self.ask(Ask::Flush).await.map(drop)
    }

    async fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        let how = WriteZeroes { may_unmap: false, only_if_fast: false };
        self.ask(Ask::Zero(Extent::from_range(at.0..at.0 + len_bytes), how)).await.map(drop)
    }

    async fn punch_hole(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        let how = WriteZeroes { may_unmap: true, only_if_fast: false };
        self.ask(Ask::Zero(Extent::from_range(at.0..at.0 + len_bytes), how)).await.map(drop)
    }

    async fn set_len(&self, _: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "an export has its own length"))
    }

    async fn extent_at(&self, at: StoreOffset) -> Result<StoreExtent> {
        let align = u64::from(self.info.request_align_bytes).max(512);
        let from = at.0 / align * align;
        let answer = self.ask(Ask::Map(Extent::from_range(from..self.len_bytes()))).await?;
        let Answer::Runs(runs) = answer else { return Err(was_cut()) };
        let mut first = *runs.first().ok_or_else(was_cut)?;
        first.len_bytes -= at.0 - from;
        Ok(first)
    }
}

/// A store of this host, or an export of the other one.
pub(super) enum EndStore {
    Here(SimStore),
    There(LinkStore),
}

spile_core::store_of_stores!(EndStore: Here, There);

/// The files of the host that the disk leaves, and the exports of the other one.
#[derive(Clone)]
pub(super) struct LinkFiles {
    pub files: SimFiles,
    pub here: World,
    pub there: Arc<There>,
}

impl LinkFiles {
    async fn connect(&self, uri: &str) -> Result<LinkStore> {
        let export = uri.strip_prefix(HOST).ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no host {uri}")))?;
        let link =
            Identity(self.there.draw(|rng| (u128::from(rng.word()) << 64 | u128::from(rng.word())).to_be_bytes()));
        // Whoever has had no answer says it again.
        if self.there.draw(|rng| rng.chance(1, 4)) {
            let _ = Connection::open(&self.there, export, link).await.map(|twice| twice.leave());
        }
        let connection = Connection::open(&self.there, export, link).await?;
        // What was cut meanwhile shows at the next request.
        let lease = lock(&connection.lease).clone();
        let info = lease.map_or(DiskInfo::unaligned(ANSWER_BYTES), |lease| lease.of.node.info());
        let (path, is_copy) = (PathCell::new(PathBuf::from(uri)), AtomicBool::new(false));
        Ok(LinkStore { connection, info, path, here: self.here.clone(), is_copy, export: export.to_owned(), link })
    }
}

impl Files for LinkFiles {
    type Store = EndStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<EndStore> {
        match at {
            Locator::Nbd(uri) => self.connect(uri).await.map(EndStore::There),
            at => self.files.open(at, mode).await.map(EndStore::Here),
        }
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<EndStore> {
        Files::create(&self.files, path, len_bytes).await.map(EndStore::Here)
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.rename(from, to).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.link(from, to).await
    }

    async fn is_at(&self, store: &EndStore, path: &Path) -> Result<bool> {
        match store {
            EndStore::Here(store) => self.files.is_at(store, path).await,
            EndStore::There(_) => Ok(false),
        }
    }

    async fn reopen(&self, store: &EndStore, mode: OpenMode) -> Result<EndStore> {
        match store {
            EndStore::Here(store) => self.files.reopen(store, mode).await.map(EndStore::Here),
            EndStore::There(_) => Err(Error::new(ErrorKind::Unsupported, "an export is open in one mode")),
        }
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
