//! [`Link`]: one connection to a server, made again when it is lost, and the requests on it.
//!
//! A link's tasks live on the worker that made it; requests come from any. Requests that were sent and not answered when a
//! connection ends are sent again on the next one, in their order; after a time-out only those that change nothing.

use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use futures_util::future::{join3, select};
use spile_core::{Error, ErrorKind, LogLimit, Result, ResultExt, Segment};
use spile_engine::sleep;
use spile_nbd_tls::Transport;
use spile_nbd_wire::request::{Command, REQUEST_BYTES, Request};
use spile_nbd_wire::uri::NbdUri;

use super::call::{Ask, Call, Notify, Runs, relock};
use super::dial::{Connection, dial};
use super::in_flight::{InFlight, Sent};
use super::options::{NbdFacts, NbdOptions};
use super::receive::Receiver;

/// Hears of an export that may have lost something, by its URI.
type Hear = Box<dyn Fn(&str) + Send + Sync>;

static LOST_EXPORT: OnceLock<Hear> = OnceLock::new();

/// Has `hear` called when an export may first have lost something that was answered, before anybody else learns of it. No sync of it
/// succeeds from then on; `hear` can note it for the processes that come after this one. Only the first call of this function counts,
/// for the life of the process.
pub fn on_lost_export(hear: impl Fn(&str) + Send + Sync + 'static) {
    let _ = LOST_EXPORT.set(Box::new(hear));
}

/// Remembers by what an export was kept that may have lost something, or (`None`) that nothing is lost. False when it could not.
type Remember = Box<dyn Fn(&str, Option<&str>) -> bool + Send + Sync>;

static DOUBTFUL_EXPORT: OnceLock<Remember> = OnceLock::new();

/// Has `remember` called when a connection is lost with writes that were not flushed, and the server has said by what it keeps them
/// ([`KEPT_CONTEXT`](spile_nbd_wire::handshake::KEPT_CONTEXT)): with that, and with `None` once a flush has covered them, after the next server has said the same. When it says
/// something else, the export has lost them ([`on_lost_export`]). In a process that does not call this function, or where `remember` returns false, they count as
/// lost at once. A process that comes after this one has to compare, too. Only the first call of this function counts.
pub fn on_doubtful_export(remember: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static) {
    let _ = DOUBTFUL_EXPORT.set(Box::new(remember));
}

/// The first pause between two tries; each is twice the one before, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// Requests that leave with one send.
const SEND_CALLS: usize = 64;

/// What is not known of writes that were answered.
#[derive(Default)]
struct Doubts {
    /// How many links do not know what has become of theirs.
    links: usize,
    /// It is noted for the process that comes after this one. The note stays until all is flushed.
    is_noted: bool,
}

/// What all links to an export share.
pub(super) struct Export {
    pub(super) uri: NbdUri,
    pub(super) path: std::path::PathBuf,
    pub(super) facts: NbdFacts,
    pub(super) options: NbdOptions,
    /// What all connections of this store say of themselves ([`super::who`]).
    pub(super) who: String,
    /// Some of what was answered may be gone, a flush has failed, or a write got no answer in time: no flush may succeed any
    /// more.
    lost: AtomicBool,
    /// Whoever writes to it keeps account of what may be lost ([`Store::set_copy`](spile_core::Store::set_copy)).
    is_copy: AtomicBool,
    doubts: Mutex<Doubts>,
    /// By what the export was kept when it was opened.
    kept: Option<String>,
    /// Connections that were lost, and requests that failed after that: how many go to the log.
    losses: LogLimit,
    failures: LogLimit,
}

impl Export {
    pub(super) fn new(uri: NbdUri, connection: &Connection, options: NbdOptions, who: String) -> Self {
        let path = uri.to_string().into();
        let (facts, kept) = (connection.facts, connection.kept.clone());
        let (lost, is_copy, doubts, losses, failures) = Default::default();
        Self { uri, path, facts, options, who, lost, is_copy, doubts, kept, losses, failures }
    }

    pub(super) fn kept(&self) -> Option<&str> {
        self.kept.as_deref()
    }

    /// Fails when something that was answered may be gone.
    pub(super) fn check_kept(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let what = "a flush has failed, a write got no answer, or a connection was lost while writes were not flushed: \
                    some may be gone";
        let hint = "check the server; `spile accept-loss` has flushes of a served disk succeed again";
        Err(Error::new(ErrorKind::Io, what).at_path(&self.path).hint(hint).permanent())
    }

    pub(super) fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(super) fn set_lost(&self, has_lost: bool) {
        self.lost.store(has_lost, Ordering::Release);
    }

    pub(super) fn set_copy(&self, is_copy: bool) {
        self.is_copy.store(is_copy, Ordering::Release);
    }

    /// No flush succeeds from now on.
    fn lose(&self) {
        let was_told = self.lost.swap(true, Ordering::AcqRel) || self.is_copy.load(Ordering::Acquire);
        if let (false, Some(hear)) = (was_told, LOST_EXPORT.get()) {
            hear(&self.path.display().to_string());
        }
    }

    /// A link does not know what has become of writes that `kept` has kept. False when they count as lost.
    fn doubt(&self, kept: Option<&str>) -> bool {
        let Some(kept) = kept else { return false };
        let mut doubts = relock(&self.doubts);
        // Who writes a copy writes again what was not flushed: it wants to hear of a loss at once.
        if self.has_lost() || self.is_copy.load(Ordering::Acquire) || !self.note(Some(kept)) {
            return false;
        }
        doubts.links += 1;
        doubts.is_noted = true;
        true
    }

    fn note(&self, kept: Option<&str>) -> bool {
        DOUBTFUL_EXPORT.get().is_some_and(|remember| remember(&self.path.display().to_string(), kept))
    }

    /// A link knows again.
    fn end_doubt(&self, is_kept: bool) {
        {
            let mut doubts = relock(&self.doubts);
            doubts.links = doubts.links.saturating_sub(1);
        }
        if !is_kept {
            self.lose();
        }
    }

    /// All that was answered before a flush is flushed: nothing has to be noted of it.
    pub(super) fn has_flushed(&self) {
        self.end_note(&mut relock(&self.doubts));
    }

    /// What was in doubt does not matter any more: its loss is accepted.
    pub(super) fn forget_doubts(&self) {
        let mut doubts = relock(&self.doubts);
        doubts.links = 0;
        self.end_note(&mut doubts);
    }

    fn end_note(&self, doubts: &mut Doubts) {
        if doubts.is_noted && doubts.links == 0 && self.note(None) {
            doubts.is_noted = false;
        }
    }
}

/// The tries to reach a server since it has last answered the request that waited for longest.
#[derive(Default)]
struct Tries {
    /// When the first was made, and the pause before the next.
    begun: Option<(Instant, Duration)>,
}

impl Tries {
    /// Waits until it is time for the next try: the first is made at once. False when the time for all of them, `limit`, is over.
    async fn next(&mut self, limit: Duration) -> bool {
        let (since, pause) = match self.begun {
            None => {
                self.begun = Some((Instant::now(), FIRST_PAUSE));
                return true;
            }
            Some(begun) => begun,
        };
        if since.elapsed() + pause > limit {
            return false;
        }
        sleep(pause).await;
        self.begun = Some((since, (pause * 2).min(LONGEST_PAUSE)));
        true
    }
}

/// One connection, and the requests on it.
pub(super) struct Link {
    export: Arc<Export>,
    state: Mutex<State>,
    /// There is something to send, or the link ends.
    work: Notify,
    /// Something was sent, or the connection ends.
    watch: Notify,
}

struct State {
    queue: VecDeque<Arc<Call>>,
    /// What was sent and not answered.
    sent: InFlight,
    closing: bool,
    /// How many writes of this link were answered.
    answered: u64,
    /// Of these, how many a completed flush of this link has covered.
    flushed: u64,
    /// By what the server of the last connection keeps the export.
    kept: Option<String>,
    /// The next server has to say the same, or what was not flushed is lost.
    in_doubt: bool,
    /// When the server last said something, or began to owe an answer.
    heard: Instant,
}

impl State {
    fn new(kept: Option<&str>) -> Self {
        let (queue, sent) = Default::default();
        let kept = kept.map(str::to_owned);
        Self { queue, sent, closing: false, answered: 0, flushed: 0, kept, in_doubt: false, heard: Instant::now() }
    }

    fn has_unflushed(&self) -> bool {
        self.answered > self.flushed
    }

    /// Notes what a good answer says of the safety of bytes.
    fn note(&mut self, sent: &Sent) {
        match sent.call.ask {
            Ask::Write { durable: false, .. } | Ask::Zero { .. } => self.answered += 1,
            Ask::Flush => self.flushed = self.flushed.max(sent.covers),
            _ => {}
        }
    }
}

impl Link {
    pub(super) fn new(export: Arc<Export>) -> Self {
        let state = Mutex::new(State::new(export.kept()));
        Self { export, state, work: Notify::default(), watch: Notify::default() }
    }

    /// Queues a request.
    pub(super) fn push(&self, call: Arc<Call>) {
        relock(&self.state).queue.push_back(call);
        self.work.notify();
    }

    /// Takes on writes of a process before this one that were answered and not flushed, if the server keeps them by `kept`.
    pub(super) fn take_on(&self, kept: &str) -> bool {
        let mut state = relock(&self.state);
        if state.in_doubt || state.kept.as_deref() != Some(kept) {
            return false;
        }
        state.answered += 1;
        drop(state);
        relock(&self.export.doubts).is_noted = true;
        true
    }

    /// What is in doubt is taken for lost, and that is accepted.
    pub(super) fn forget_doubt(&self) {
        relock(&self.state).in_doubt = false;
    }

    /// True when writes of this link were answered and no completed flush of this link has covered them.
    pub(super) fn has_unflushed(&self) -> bool {
        relock(&self.state).has_unflushed()
    }

    /// Ends the link when all is answered.
    pub(super) fn close(&self) {
        relock(&self.state).closing = true;
        self.work.notify();
    }

    fn is_closing(&self) -> bool {
        relock(&self.state).closing
    }

    /// Serves requests until the link is closed, at first on `connection` if there is one.
    pub(super) async fn serve(self: Arc<Self>, mut connection: Option<Connection>) {
        let mut ended = None;
        let mut tries = Tries::default();
        loop {
            if let Some(connection) = connection.take() {
                let first = self.first();
                ended = Some(self.run(connection).await);
                if !self.is_first(&first) {
                    tries = Tries::default();
                }
            }
            while relock(&self.state).queue.is_empty() {
                if self.is_closing() {
                    return;
                }
                self.work.wait().await;
            }
            connection = self.reconnect(ended.as_ref(), &mut tries).await;
        }
    }

    /// The request that waits for longest.
    fn first(&self) -> Weak<Call> {
        relock(&self.state).queue.front().map(Arc::downgrade).unwrap_or_default()
    }

    /// True when this request is the one that waits for longest.
    fn is_first(&self, call: &Weak<Call>) -> bool {
        relock(&self.state).queue.front().is_some_and(|first| call.ptr_eq(&Arc::downgrade(first)))
    }

    /// Uses a connection until it ends, and returns why it did.
    async fn run(&self, connection: Connection) -> Error {
        self.settle(connection.kept);
        let transport = &connection.transport;
        let session = Session::new(self, transport);
        relock(&self.state).heard = Instant::now();
        let mut receiver = Receiver::new(self, transport, connection.structured, connection.allocation);
        let receive = async {
            let Err(error) = receiver.run().await;
            session.end();
            error
        };
        // None of them is dropped before its end: the kernel may still fill a request's memory.
        let (error, (), ()) = join3(receive, session.send_all(), session.watch_over()).await;
        let timed_out = session.why.take();
        let stalled = self.take_back(timed_out.is_some());
        let error = timed_out.unwrap_or(error);
        if let (false, Some(count)) = (self.is_closing(), self.export.losses.count()) {
            tracing::warn!(count, "{}: the connection has ended: {error}", self.export.path.display());
        }
        // Tried again, such a write could be undone by the server when it does the first one late.
        self.fail(stalled, &error.duplicate().hint("the server may still do it later: check the server").permanent());
        error
    }

    /// Puts what was not answered back in front of the queue, but for what must not be sent again: that is returned. The server
    /// that comes next may not have the writes that this one kept in memory. After a time-out (`timed_out`) the server lives, and
    /// may still execute a write after a newer one.
    fn take_back(&self, timed_out: bool) -> VecDeque<Arc<Call>> {
        let mut state = relock(&self.state);
        let sent = state.sent.take_all().into_iter().map(|sent| sent.call);
        let (again, stalled): (VecDeque<_>, VecDeque<_>) =
            sent.partition(|call| !timed_out || call.ask.may_come_late());
        if !stalled.is_empty() {
            self.export.lose();
        } else if state.has_unflushed() && self.export.facts.can_flush() {
            self.doubt(&mut state);
        }
        let later = std::mem::replace(&mut state.queue, again);
        state.queue.extend(later);
        stalled
    }

    /// The next server may not have what was answered and not flushed.
    fn doubt(&self, state: &mut State) {
        if !state.in_doubt {
            state.in_doubt = self.export.doubt(state.kept.as_deref());
            if !state.in_doubt {
                self.export.lose();
            }
        }
    }

    /// The server of a new connection says by what it keeps the export.
    fn settle(&self, kept: Option<String>) {
        let mut state = relock(&self.state);
        let is_kept = state.kept == kept;
        state.kept = kept;
        if std::mem::take(&mut state.in_doubt) {
            self.export.end_doubt(is_kept);
        }
    }

    /// Connects, or connects again after a connection has ended (`ended`). When that cannot be done in time, or was not wanted,
    /// all that waits fails.
    async fn reconnect(&self, ended: Option<&Error>, tries: &mut Tries) -> Option<Connection> {
        let limit = self.export.options.reconnect_limit;
        let mut error = ended.map_or_else(|| Error::new(ErrorKind::Io, "not connected"), Error::duplicate);
        let is_wanted = ended.is_none() || !limit.is_zero();
        while is_wanted && tries.next(limit).await {
            error = match dial(&self.export.uri, &self.export.options, &self.export.who).await {
                Ok(connection) if connection.facts == self.export.facts => return Some(connection),
                Ok(_) => {
                    let what = "the server's export has another size or other abilities than before";
                    error = Error::new(ErrorKind::InvalidInput, what);
                    break;
                }
                // Also when certificates cannot be used: somebody may just be exchanging them.
                Err(error) => error,
            };
        }
        *tries = Tries::default();
        self.fail_all(&error);
        None
    }

    /// Fails all that waits.
    fn fail_all(&self, error: &Error) {
        let waiting = std::mem::take(&mut relock(&self.state).queue);
        self.fail(waiting, error);
    }

    fn fail(&self, calls: VecDeque<Arc<Call>>, error: &Error) {
        if calls.is_empty() {
            return;
        }
        if let Some(count) = self.export.failures.count() {
            tracing::error!(count, "{}: {} requests fail: {error}", self.export.path.display(), calls.len());
        }
        for call in calls {
            if matches!(call.ask, Ask::Flush) {
                self.export.lose();
            }
            call.end(Err(error.duplicate()).at_path(&self.export.path));
        }
    }

    /// The server has said something.
    pub(super) fn heard(&self) {
        relock(&self.state).heard = Instant::now();
    }

    /// The request of this cookie, if it was sent and not answered.
    pub(super) fn sent(&self, cookie: u64) -> Option<Arc<Call>> {
        relock(&self.state).sent.get(cookie).cloned()
    }

    /// Ends a request.
    pub(super) fn answer(&self, cookie: u64, outcome: Result<Runs>) {
        let (removed, is_over) = {
            let mut state = relock(&self.state);
            let removed = state.sent.remove(cookie);
            if let (Some(sent), Ok(_)) = (&removed, &outcome) {
                state.note(sent);
            }
            (removed, state.closing && state.sent.is_empty())
        };
        if let Some(sent) = removed {
            if matches!((&sent.call.ask, &outcome), (Ask::Flush, Err(_))) {
                self.export.lose();
            }
            sent.call.end(outcome.at_path(&self.export.path));
        }
        if is_over {
            self.work.notify();
        }
    }

    /// Takes what is queued, as far as one send goes, and notes it as sent. The parts of the message go to `parts`; the heads
    /// of the requests are written to `heads`.
    fn take_batch(&self, heads: &Segment, parts: &mut Vec<Segment>) {
        let mut state = relock(&self.state);
        for number in 0..SEND_CALLS {
            let Some(call) = state.queue.pop_front() else { break };
            if state.sent.is_empty() {
                state.heard = Instant::now();
            }
            let covers = state.answered;
            let cookie = state.sent.insert(call.clone(), covers);
            let at = number * REQUEST_BYTES;
            put_request(heads.slice(at..at + REQUEST_BYTES), parts, &call, cookie);
        }
    }

    /// Since when the server owes an answer and says nothing; `None` when it owes none.
    fn silent_since(&self) -> Option<Instant> {
        let state = relock(&self.state);
        (!state.sent.is_empty()).then_some(state.heard)
    }

    fn is_over(&self) -> bool {
        let state = relock(&self.state);
        state.closing && state.queue.is_empty() && state.sent.is_empty()
    }
}

fn put_request(head: Segment, parts: &mut Vec<Segment>, call: &Call, cookie: u64) {
    let (command, flags) = call.ask.command();
    let request = Request { flags, command, cookie, offset_bytes: call.offset, len_bytes: call.len };
    head.copy_from_slice(0, &request.encode());
    parts.push(head);
    if let Ask::Write { from, .. } = &call.ask {
        parts.extend(from.iter().cloned());
    }
}

/// One connection while it lasts.
struct Session<'a> {
    link: &'a Link,
    transport: &'a Transport,
    ended: Cell<bool>,
    /// Why we ended it, if we did.
    why: Cell<Option<Error>>,
    /// Room for the heads of the requests of one send.
    heads: Segment,
}

impl<'a> Session<'a> {
    fn new(link: &'a Link, transport: &'a Transport) -> Self {
        let heads = Segment::zeroed(SEND_CALLS * REQUEST_BYTES);
        Self { link, transport, ended: Cell::new(false), why: Cell::new(None), heads }
    }

    /// Ends the connection: what waits for the socket returns.
    fn end(&self) {
        self.ended.set(true);
        self.transport.socket().shutdown(std::net::Shutdown::Both);
        self.link.work.notify();
        self.link.watch.notify();
    }

    async fn send_all(&self) {
        let mut parts = Vec::new();
        while !self.ended.get() {
            parts.clear();
            self.link.take_batch(&self.heads, &mut parts);
            if !parts.is_empty() {
                self.link.watch.notify();
                if self.transport.send(&parts).await.is_err() {
                    return self.end();
                }
            } else if self.link.is_over() {
                return self.part().await;
            } else {
                self.link.work.wait().await;
            }
        }
    }

    /// Says good-bye; errors do not matter any more. A copy that is not whole is left without a word: that is how a server can tell.
    async fn part(&self) {
        if self.link.export.is_copy.load(Ordering::Acquire) {
            self.transport.close().await;
            return self.end();
        }
        let request = Request { flags: 0, command: Command::Disconnect, cookie: 0, offset_bytes: 0, len_bytes: 0 };
        let head = self.heads.slice(0..REQUEST_BYTES);
        head.copy_from_slice(0, &request.encode());
        let _ = self.transport.send(&[head]).await;
        self.transport.close().await;
        self.end();
    }

    /// Ends the connection when the server owes an answer for too long. There is no timer while it owes none.
    async fn watch_over(&self) {
        while !self.ended.get() {
            let Some(since) = self.link.silent_since() else {
                self.link.watch.wait().await;
                continue;
            };
            let limit = self.link.export.options.answer_limit;
            match limit.checked_sub(since.elapsed()) {
                Some(left) => {
                    select(pin!(sleep(left)), pin!(self.link.watch.wait())).await;
                }
                None => {
                    let what = format!("the server did not answer for {} s", limit.as_secs_f32());
                    self.why.set(Some(Error::new(ErrorKind::TimedOut, what)));
                    self.end();
                }
            }
        }
    }
}
