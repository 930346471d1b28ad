//! [`NbdStore`]: an export of an NBD server as a store.
//!
//! Requests of all workers are pipelined over one connection, or over one connection for each worker where the server says
//! that several see the same bytes and that a flush on one covers all (`CAN_MULTI_CONN`).
//!
//! # A lost connection
//!
//! It is made again, with pauses that grow, for 30 seconds ([`NbdOptions::reconnect_limit`]). Requests that were not answered
//! are sent again; when the time is over they fail, and the next request tries anew. The time goes on
//! when a connection is made and lost before the request that waits for longest is answered. Reads, writes and zeroes may be repeated
//! without harm. What needs care are writes that *were* answered and not flushed: if the server's process or host died, they are
//! gone, and no client can tell that from a broken cable. They are not kept here to be sent again: a guest that flushes rarely
//! would have them grow without bound. So a connection that is lost while such writes of its own exist makes the next flush
//! fail, and every later one: **a flush that has failed stays failed**. A flush that was on its way when nothing else was
//! unflushed is sent again. A server of Spile's says by what it keeps the export: when the next one says the same, nothing is gone, and the flush goes
//! to that ([`on_doubtful_export`]). A server without `FLUSH` answers a write when it is durable, and nothing is lost with it.
//!
//! Each connection counts its own writes, and a sync sends a `FLUSH` on every connection with answered writes that are not
//! flushed. One `FLUSH` on any connection covers them all, but only while the server is the same: a new connection may reach a
//! server that has come back without them, before the old connection is known to be lost.
//!
//! # A server that stalls
//!
//! A server that owes an answer and says nothing for a minute ([`NbdOptions::answer_limit`]) is hung up on. It may live, and
//! execute what it has got at any later time: also after a newer write to the same place. So of the requests that it owes, only
//! reads are sent again. Writes, zeroes and flushes fail, and every later flush fails.
//!
//! What a client cannot rule out: a server that lives on after its connection broke may still execute an old write late, after
//! the same write sent again and a newer one to the same place.
//!
//! # What is not used
//!
//! `TRIM` promises nothing of what is read afterwards. A hole is punched by `WRITE_ZEROES`, which may free the space. The
//! writes of an image have no `FUA`; its sync is a `FLUSH`. The protocol has no locks: whoever exports a disk to two writers
//! destroys it.
//!
//! # A hostile server
//!
//! Every length is checked against what was asked, and the handshake ends after 10 seconds. A hostile server can fail requests
//! and return any bytes, and nothing else.

mod call;
mod dial;
mod in_flight;
mod link;
mod options;
mod receive;
mod same;

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use spile_core::{
    Env as _, Error, ErrorKind, OpenMode, Result, ResultExt, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via,
};
use spile_engine::{OsEnv, current_worker, spawn};
use spile_nbd_wire::handshake::transmission;
pub use spile_nbd_wire::handshake::{LINK_CONTEXT, READER_CONTEXT};
use spile_nbd_wire::reply::STATE_ZERO;
use spile_nbd_wire::uri::NbdUri;

use self::call::{Ask, Call, Runs, relock};
use self::link::{Export, Link};
pub use self::link::{on_doubtful_export, on_lost_export};
pub use self::options::{NbdFacts, NbdOptions};
pub use self::same::{canonical_address, may_be_same_export};

/// The largest minimum of a server's blocks that this client serves, in bytes: with a larger one, writes of data and of
/// metadata could share a block.
const MAX_MIN_BLOCK_BYTES: u32 = 4096;
/// Zeroes and block status go in pieces of this many bytes at most.
const PIECE_BYTES: u64 = 1 << 30;
/// Zeroes written as data, at a time.
const ZERO_BYTES: u64 = 1 << 20;

/// What a store says of itself to a server that knows it: `spile receive`, which lets one link write to a disk.
fn who(mode: OpenMode) -> String {
    if mode == OpenMode::ReadOnly {
        return READER_CONTEXT.to_owned();
    }
    let link = OsEnv.random_16().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("{LINK_CONTEXT}{link}")
}

fn write(from: Segments) -> Ask {
    Ask::Write { from, durable: false }
}

/// An export of an NBD server. Clones are the same store.
#[derive(Clone)]
pub struct NbdStore {
    inner: Arc<Inner>,
}

struct Inner {
    export: Arc<Export>,
    read_only: bool,
    has_map: bool,
    /// By worker; one only without `CAN_MULTI_CONN`.
    links: Mutex<Vec<Option<Arc<Link>>>>,
    /// Held by writes that read the rest of a block first, and by all that might share a block with one.
    partial: async_lock::Mutex<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        relock(&self.links).iter().flatten().for_each(|link| link.close());
    }
}

impl NbdStore {
    /// Connects to the export of this URI.
    ///
    /// # Errors
    /// `InvalidInput` for a URI that is none; `ReadOnly` when the export is and `mode` is not; `TimedOut`, `NotFound`, `Protocol`; the
    /// system's.
    pub async fn open(uri: &str, mode: OpenMode) -> Result<NbdStore> {
        let parsed: NbdUri = uri.parse().map_err(|message: String| Error::new(ErrorKind::InvalidInput, message))?;
        Self::open_with(parsed, mode, NbdOptions::default()).await
    }

    /// As [`NbdStore::open`], with these options.
    ///
    /// # Errors
    /// As [`NbdStore::open`].
    pub async fn open_with(uri: NbdUri, mode: OpenMode, options: NbdOptions) -> Result<NbdStore> {
        let path = uri.to_string();
        Self::connect(uri, mode, options).await.at_path(Path::new(&path))
    }

    async fn connect(uri: NbdUri, mode: OpenMode, options: NbdOptions) -> Result<NbdStore> {
        let who = who(mode);
        let connection = dial::dial(&uri, &options, &who).await?;
        let facts = connection.facts;
        let read_only = mode == OpenMode::ReadOnly;
        if !read_only && facts.has(transmission::READ_ONLY) {
            return Err(Error::new(ErrorKind::ReadOnly, "the server exports it for reading only"));
        }
        if facts.min_block_bytes > MAX_MIN_BLOCK_BYTES {
            let what = format!("the server takes only multiples of {} bytes", facts.min_block_bytes);
            return Err(Error::new(ErrorKind::Unsupported, what).hint("at most 4096 can be served"));
        }
        let export = Arc::new(Export::new(uri, &connection, options, who));
        let link = Arc::new(Link::new(export.clone()));
        let mut links =
            vec![None; if facts.has(transmission::CAN_MULTI_CONN) { options.connections.max(1) } else { 1 }];
        let number = current_worker() % links.len();
        links[number] = Some(link.clone());
        let has_map = connection.allocation.is_some();
        spawn(link.serve(Some(connection)));
        let (links, partial) = (Mutex::new(links), async_lock::Mutex::new(()));
        Ok(NbdStore { inner: Arc::new(Inner { export, read_only, has_map, links, partial }) })
    }

    /// What the server says of the export.
    pub fn facts(&self) -> NbdFacts {
        self.inner.export.facts
    }

    /// As [`Store::write_at`] with [`Via::Direct`], and the bytes are durable at its end.
    ///
    /// # Errors
    /// As those of a write and a sync.
    pub async fn write_durable(&self, at: StoreOffset, from: &Segments) -> Result<()> {
        let is_whole = (at.0 | from.len() as u64).is_multiple_of(self.unit());
        if !is_whole || !self.facts().can_fua() {
            Box::pin(self.write_at(at, from, Via::Direct)).await?;
            return self.sync().await;
        }
        self.check_write(at.0, from.len() as u64)?;
        self.transfer(at.0, from, |from| Ask::Write { from, durable: true }).await
    }

    /// The link that this worker uses; made if it has none.
    fn link(&self) -> Arc<Link> {
        let mut links = relock(&self.inner.links);
        let number = current_worker() % links.len();
        let link = links[number].get_or_insert_with(|| {
            let link = Arc::new(Link::new(self.inner.export.clone()));
            spawn(link.clone().serve(None));
            link
        });
        link.clone()
    }

    /// Takes on writes that a process before this one may have left without a flush, when the server keeps the export by `kept`
    /// ([`KEPT_CONTEXT`](spile_nbd_wire::handshake::KEPT_CONTEXT)). False when it keeps it by something else: they may be lost.
    pub fn take_on(&self, kept: &str) -> bool {
        // Any link will do, and the first was made with the store.
        relock(&self.inner.links).iter().flatten().next().is_some_and(|link| link.take_on(kept))
    }

    /// True when something that was answered may be gone: no sync succeeds then.
    pub fn has_lost(&self) -> bool {
        self.inner.export.has_lost()
    }

    /// Says that something is gone, as an earlier process has seen, or that somebody accepts that.
    pub fn set_lost(&self, has_lost: bool) {
        if !has_lost {
            relock(&self.inner.links).iter().flatten().for_each(|link| link.forget_doubt());
            self.inner.export.forget_doubts();
        }
        self.inner.export.set_lost(has_lost);
    }

    async fn ask(&self, ask: Ask, offset: u64, len: u64) -> Result<Runs> {
        let call = Arc::new(Call::new(ask, offset, len as u32));
        self.link().push(call.clone());
        call.wait().await.at_offset(offset)
    }

    /// Flushes on every link with writes that were answered and not flushed; on this worker's link when there is none.
    async fn flush(&self) -> Result<()> {
        let begin = |link: &Arc<Link>| {
            let call = Arc::new(Call::new(Ask::Flush, 0, 0));
            link.push(call.clone());
            call
        };
        let mut calls: Vec<Arc<Call>> =
            relock(&self.inner.links).iter().flatten().filter(|link| link.has_unflushed()).map(begin).collect();
        if calls.is_empty() {
            calls.push(begin(&self.link()));
        }
        for call in calls {
            call.wait().await?;
        }
        Ok(())
    }

    fn has(&self, flag: u16) -> bool {
        self.inner.export.facts.has(flag)
    }

    fn unit(&self) -> u64 {
        u64::from(self.inner.export.facts.min_block_bytes)
    }

    fn refuse(&self, kind: ErrorKind, what: &str, offset: u64) -> Error {
        Error::new(kind, what).at_path(&self.inner.export.path).at_offset(offset)
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        match offset.checked_add(len).filter(|end| *end <= self.len_bytes()) {
            Some(_) => Ok(()),
            None => Err(self.refuse(ErrorKind::OutOfRange, "past the end of the export", offset)),
        }
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<()> {
        if self.inner.read_only {
            return Err(self.refuse(ErrorKind::ReadOnly, "the store is open read-only", offset));
        }
        self.check(offset, len)
    }

    /// The blocks that cover a range.
    fn blocks(&self, offset: u64, len: u64) -> (u64, u64) {
        let start = offset / self.unit() * self.unit();
        (start, (offset + len).next_multiple_of(self.unit()) - start)
    }

    /// Reads or writes whole blocks, in as many requests as the server wants.
    async fn transfer(&self, offset: u64, bytes: &Segments, ask: fn(Segments) -> Ask) -> Result<()> {
        let most = self.inner.export.facts.max_payload_bytes as usize;
        if bytes.len() <= most {
            return self.ask(ask(bytes.clone()), offset, bytes.len() as u64).await.map(drop);
        }
        for start in (0..bytes.len()).step_by(most) {
            let piece = bytes.slice(start..bytes.len().min(start + most));
            let len = piece.len() as u64;
            self.ask(ask(piece), offset + start as u64, len).await?;
        }
        Ok(())
    }

    async fn read_part(&self, offset: u64, into: &Segments) -> Result<()> {
        let (start, len) = self.blocks(offset, into.len() as u64);
        let whole = Segments::zeroed(len as usize);
        self.transfer(start, &whole, Ask::Read).await?;
        let skip = (offset - start) as usize;
        into.copy_from(&whole.slice(skip..skip + into.len()));
        Ok(())
    }

    /// Writes part of a block: the rest is read first.
    async fn write_part(&self, offset: u64, from: &Segments) -> Result<()> {
        let (start, len) = self.blocks(offset, from.len() as u64);
        let whole = Segments::zeroed(len as usize);
        self.transfer(start, &whole, Ask::Read).await?;
        let skip = (offset - start) as usize;
        whole.slice(skip..skip + from.len()).copy_from(from);
        self.transfer(start, &whole, write).await
    }

    /// Writes what may share a block with another write.
    async fn write_alone(&self, offset: u64, from: &Segments, is_whole: bool) -> Result<()> {
        let _alone = self.inner.partial.lock().await;
        if is_whole { self.transfer(offset, from, write).await } else { self.write_part(offset, from).await }
    }

    /// Zeroes whole blocks by the server's command, if it has one, and writes the ends of the range.
    async fn zero(&self, range: Range<u64>, keep_space: bool) -> Result<()> {
        let (start, end) = (range.start.next_multiple_of(self.unit()), range.end / self.unit() * self.unit());
        if start >= end || !self.has(transmission::SEND_WRITE_ZEROES) {
            return self.write_zeroes(range).await;
        }
        self.write_zeroes(range.start..start).await?;
        for at in (start..end).step_by(PIECE_BYTES as usize) {
            self.ask(Ask::Zero { keep_space }, at, PIECE_BYTES.min(end - at)).await?;
        }
        self.write_zeroes(end..range.end).await
    }

    /// Writes zeroes as data.
    async fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        for at in range.clone().step_by(ZERO_BYTES as usize) {
            let piece = ZERO_BYTES.min(range.end - at);
            self.write_at(StoreOffset(at), &Segments::zeroed(piece as usize), Via::Cached).await?;
        }
        Ok(())
    }
}

impl Store for NbdStore {
    fn info(&self) -> StoreInfo {
        StoreInfo {
            offset_align_bytes: self.inner.export.facts.min_block_bytes,
            memory_align_bytes: 1,
            grows_zeroed: false,
            punches: !self.inner.read_only && self.has(transmission::SEND_WRITE_ZEROES),
            read_only: self.inner.read_only,
            is_local: false,
        }
    }

    fn set_copy(&self, is_copy: bool) {
        self.inner.export.set_copy(is_copy);
    }

    fn len_bytes(&self) -> u64 {
        self.inner.export.facts.size_bytes
    }

    fn path(&self) -> &Path {
        &self.inner.export.path
    }

    async fn read_at(&self, at: StoreOffset, into: &Segments, _: Via) -> Result<()> {
        self.check(at.0, into.len() as u64)?;
        match (at.0 | into.len() as u64) % self.unit() {
            0 => self.transfer(at.0, into, Ask::Read).await,
            _ => Box::pin(self.read_part(at.0, into)).await,
        }
    }

    async fn write_at(&self, at: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        self.check_write(at.0, from.len() as u64)?;
        let is_whole = (at.0 | from.len() as u64).is_multiple_of(self.unit());
        if self.unit() == 1 || (is_whole && via == Via::Direct) {
            return self.transfer(at.0, from, write).await;
        }
        Box::pin(self.write_alone(at.0, from, is_whole)).await
    }

    async fn sync(&self) -> Result<()> {
        let export = &self.inner.export;
        export.check_kept()?;
        if self.inner.read_only || !self.has(transmission::SEND_FLUSH) {
            return Ok(());
        }
        match self.flush().await {
            // What failed to be flushed is not tried again.
            Err(error) if export.has_lost() => Err(error.permanent()),
            Err(error) => Err(error),
            Ok(()) => export.check_kept().inspect(|()| export.has_flushed()),
        }
    }

    async fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        self.check_write(at.0, len_bytes)?;
        self.zero(at.0..at.0 + len_bytes, true).await
    }

    async fn punch_hole(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        self.check_write(at.0, len_bytes)?;
        if !self.has(transmission::SEND_WRITE_ZEROES) {
            return Err(self.refuse(ErrorKind::Unsupported, "the server cannot punch holes", at.0));
        }
        self.zero(at.0..at.0 + len_bytes, false).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        if len_bytes == self.len_bytes() {
            return Ok(());
        }
        Err(self.refuse(ErrorKind::Unsupported, "the length of an NBD export cannot be set", len_bytes))
    }

    /// What the server calls zero counts as a hole: it need not be read.
    async fn extent_at(&self, at: StoreOffset) -> Result<StoreExtent> {
        let runs = self.extents_at(at, PIECE_BYTES, 1).await?;
        Ok(runs[0])
    }

    async fn extents_at(&self, at: StoreOffset, len_bytes: u64, max_runs: usize) -> Result<Vec<StoreExtent>> {
        self.check(at.0, 1)?;
        if !self.inner.has_map {
            return Ok(vec![StoreExtent { len_bytes: self.len_bytes() - at.0, is_hole: false }]);
        }
        let asked = len_bytes.clamp(1, (self.len_bytes() - at.0).min(PIECE_BYTES - self.unit()));
        let (start, asked) = self.blocks(at.0, asked);
        let mut left = self.len_bytes() - start;
        let answer = self.ask(Ask::Status, start, asked.min(left)).await?;
        let mut runs: Vec<StoreExtent> = Vec::new();
        // The server may tell of bytes past the ones that were asked for, and the first run begins at a whole block.
        let mut before = at.0 - start;
        for (len, flags) in answer {
            let (len, is_hole) = (u64::from(len).min(left), flags & STATE_ZERO != 0);
            left -= len;
            let skipped = before.min(len);
            before -= skipped;
            let (len_bytes, is_last) = (len - skipped, runs.len() == max_runs);
            match runs.last_mut() {
                _ if len_bytes == 0 => {}
                Some(last) if last.is_hole == is_hole => last.len_bytes += len_bytes,
                Some(_) if is_last => break,
                _ => runs.push(StoreExtent { len_bytes, is_hole }),
            }
        }
        match runs.is_empty() {
            false => Ok(runs),
            true => Err(self.refuse(ErrorKind::Protocol, "the server's map has a run of no bytes", at.0)),
        }
    }
}
