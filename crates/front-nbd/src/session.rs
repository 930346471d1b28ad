//! [`Session`]: one connection in the transmission phase, shared by its tasks on one worker.
//!
//! The tasks: the *intake* receives requests and admits them; *slots* execute them, one for each request in flight, and
//! requests may end in any order; the *outflow* sends replies. A request is in flight from its admission until its
//! reply has been sent or the connection is broken. So a client that does not read its replies is soon not read from
//! either, and holds no more than [`ServerConfig::max_in_flight`] requests and [`MAX_HELD_BYTES`] of memory; what all
//! connections of a worker hold together is bounded by [`crate::budget`]. A slot is
//! a task that is made when it is first needed and lives as long as the connection, so that later requests allocate
//! nothing here.
//!
//! [`ServerConfig::max_in_flight`]: crate::ServerConfig::max_in_flight

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use spile_core::metrics::span::{self, Moment, Span, Spans, What, stamp};
use spile_core::metrics::{Ended, now_ns, runs};
use spile_core::{Disk, Io, Result, Segments};
use spile_front::{FrontCounters, Presence, has_hung_up};
use spile_nbd_tls::Transport;

use crate::budget::Holder;
use crate::contexts::Checkpoints;
use crate::errors::EIO;
use crate::execute::HoleProbe;
use crate::metrics::{ExportMetrics, op_of};
use crate::negotiate;
use crate::server::{LiveExport, ServerState};
use crate::signal::{Level, Signal};
use crate::wire::request::Request;

/// The payloads and read buffers of one connection's requests in flight never exceed this, in bytes: two
/// requests of the greatest length.
pub(crate) const MAX_HELD_BYTES: u64 = 64 << 20;

/// A request that a slot is to execute.
pub(crate) struct Job {
    pub(crate) request: Request,
    /// A write's data.
    pub(crate) payload: Segments,
    /// The memory for which the request was admitted, in bytes.
    pub(crate) held_bytes: u64,
    pub(crate) started_ns: u64,
    pub(crate) span: Option<&'static Span>,
}

/// How a request ended.
pub(crate) enum Answer {
    /// Success without data.
    Done,
    /// An error: its number on the wire, a text, and whether it happened at the start of the request's range.
    Failed { errno: u32, message: String, at_start: bool },
    /// The data of a read, without its holes.
    Data(Segments, Runs),
    /// Block status: for each context its number, the encoded descriptors and how many they are.
    Status(Vec<(u32, Segments, u32)>),
}

/// How a read's data is cut into chunks.
pub(crate) enum Runs {
    /// One chunk of data.
    Whole,
    /// Data and holes in turn: (length in bytes, is a hole). The lengths add up to the request's.
    Mixed(Vec<(u64, bool)>),
}

/// An answer on its way out.
pub(crate) struct Reply {
    pub(crate) request: Request,
    pub(crate) answer: Answer,
    pub(crate) held_bytes: u64,
    pub(crate) started_ns: u64,
    /// None when the request was refused before the disk saw it.
    pub(crate) span: Option<&'static Span>,
}

/// One connection in the transmission phase. The module's head describes its tasks.
pub(crate) struct Session<D: Disk> {
    pub(crate) server: Arc<ServerState<D>>,
    pub(crate) agreed: negotiate::Session,
    pub(crate) disk: Arc<D>,
    pub(crate) checkpoints: Option<Arc<dyn Checkpoints>>,
    pub(crate) limits: Limits,
    pub(crate) transport: Rc<Transport>,
    pub(crate) presence: Arc<Presence>,
    pub(crate) holes: HoleProbe,
    worker: usize,
    spans: RefCell<Spans>,
    slots: Slots,
    replies: RefCell<VecDeque<Reply>>,
    /// Tells the outflow that there is a reply, or that the session ends.
    pub(crate) outgoing: Signal,
    in_flight: Cell<usize>,
    pub(crate) holder: Rc<Holder>,
    /// Tells the intake that a request is not in flight any more.
    room: Signal,
    /// True when the client cannot be reached any more: replies are dropped.
    pub(crate) broken: Cell<bool>,
    pub(crate) ended: Cell<bool>,
    pub(crate) said_good_bye: Cell<bool>,
    client: Client,
}

/// Whether the client is gone, and the requests that want to know.
#[derive(Default)]
struct Client {
    is_gone: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

/// The limits against which requests are checked. They stay the same as long as the connection lives.
pub(crate) struct Limits {
    pub(crate) size_bytes: u64,
    pub(crate) align_bytes: u64,
    pub(crate) read_only: bool,
}

/// The slots, and the requests that wait for one.
#[derive(Default)]
struct Slots {
    jobs: RefCell<VecDeque<Job>>,
    /// The wakers of all slots by number, and the numbers of the slots that have no request. The slot that became free
    /// last is used first, because its memory is still in the processor's cache.
    wakers: RefCell<Vec<Waker>>,
    resting: RefCell<Vec<usize>>,
    /// True when a slot was woken or made and has not yet looked for a request.
    roused: Cell<bool>,
}

impl<D: Disk> Session<D> {
    pub(crate) fn export(&self) -> &LiveExport<D> {
        &self.server.exports[self.agreed.export]
    }

    /// `None` when the export was withdrawn in the meantime.
    pub(crate) fn new(
        server: Arc<ServerState<D>>,
        agreed: negotiate::Session,
        transport: Rc<Transport>,
        presence: Arc<Presence>,
    ) -> Option<Rc<Self>> {
        let export = &server.exports[agreed.export];
        let disk = export.disk()?;
        let info = disk.info();
        let limits = Limits {
            size_bytes: agreed.size_bytes,
            align_bytes: u64::from(info.request_align_bytes.max(1)),
            read_only: export.read_only || info.read_only,
        };
        let worker = spile_engine::current_worker();
        let spans = server.metrics[agreed.export].of_worker(worker).spans.clone();
        Some(Rc::new(Self {
            holder: Holder::new(presence.clone(), &disk),
            disk,
            checkpoints: export.checkpoints(),
            agreed,
            limits,
            transport,
            presence,
            holes: HoleProbe::default(),
            worker,
            spans: RefCell::new(Spans::new(spans)),
            slots: Slots::default(),
            replies: RefCell::default(),
            outgoing: Signal::default(),
            in_flight: Cell::new(0),
            room: Signal::default(),
            broken: Cell::new(false),
            ended: Cell::new(false),
            said_good_bye: Cell::new(false),
            client: Client::default(),
            server,
        }))
    }

    pub(crate) fn metrics(&self) -> &ExportMetrics {
        &self.server.metrics[self.agreed.export]
    }

    fn counters(&self) -> &FrontCounters {
        self.metrics().of_worker(self.worker)
    }

    /// The span of a request that has arrived whole.
    pub(crate) fn begin_span(&self, request: &Request, started_ns: u64) -> Option<&'static Span> {
        let (op, offset_bytes) = (op_of(request.command), request.offset_bytes);
        let mut spans = self.spans.borrow_mut();
        let taken = spans.taken(started_ns);
        let span = spans.begin(taken, What { op, offset_bytes, len_bytes: request.len_bytes.into() })?;
        span.reach(Moment::Loaded);
        Some(span)
    }

    /// A reply is put together with others for the socket.
    pub(crate) fn gathered(&self, reply: &Reply) {
        if let Some(span) = reply.span {
            span.reach(Moment::DiskEnded);
            self.spans.borrow_mut().answered(span, matches!(reply.answer, Answer::Failed { .. }));
        }
    }

    /// True when nobody will receive an answer, so that long work may be given up.
    pub(crate) fn is_forsaken(&self) -> bool {
        self.broken.get() || self.server.stop.level() == Level::HangUp
    }

    /// True when no more requests are to be taken.
    pub(crate) fn stopping(&self) -> bool {
        self.broken.get() || self.server.stop.level() > Level::Run
    }

    /// Waits until one more request that needs `bytes` of memory may be in flight, and counts it as that. True
    /// when it had to wait.
    pub(crate) async fn admit(&self, bytes: u64) -> bool {
        let mut waited = false;
        while !self.has_room(bytes) {
            self.room.wait().await;
            waited = true;
        }
        self.in_flight.set(self.in_flight.get() + 1);
        if !self.holder.try_take(bytes) {
            self.holder.take(bytes).await;
            waited = true;
        }
        waited
    }

    fn has_room(&self, bytes: u64) -> bool {
        let held = self.holder.held_bytes();
        self.in_flight.get() < self.server.config.max_in_flight && (held == 0 || held + bytes <= MAX_HELD_BYTES)
    }

    /// Takes back the admission of a request that did not arrive whole.
    pub(crate) fn withdraw(&self, bytes: u64) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.holder.give_back(bytes);
    }

    /// Ends the connection without any more replies.
    pub(crate) fn cut_off(&self) {
        self.broken.set(true);
        self.forsake();
        // The intake may be waiting for requests: this wakes it.
        self.transport.socket().shutdown(Shutdown::Both);
    }

    /// The client is gone, or asks for nothing more: requests that wait for trouble below the disk to pass are given up.
    fn forsake(&self) {
        self.client.is_gone.set(true);
        self.client.waiting.take().iter().for_each(Waker::wake_by_ref);
    }

    /// Executes a request on the disk, which may have it wait as long as the client is there.
    pub(crate) fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>> {
        self.disk.execute_for(io, poll_fn(|cx| self.poll_gone(cx)))
    }

    /// Ready when the client is gone. The system is asked as well: the intake learns of the end only when it receives, which
    /// it does not while it waits for room.
    fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.client.is_gone.get() && has_hung_up(self.transport.socket().as_fd()) {
            self.forsake();
        }
        if self.client.is_gone.get() {
            return Poll::Ready(());
        }
        let mut waiting = self.client.waiting.borrow_mut();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Waits until nothing is in flight. No request comes any more, and none waits for trouble below the disk to pass.
    pub(crate) async fn drained(&self) {
        self.forsake();
        while self.in_flight.get() > 0 {
            self.room.wait().await;
        }
    }

    /// Ends all tasks of the session. Nothing may be in flight, and nothing may come any more.
    pub(crate) fn end(&self) {
        self.ended.set(true);
        self.outgoing.notify();
        self.slots.wakers.borrow().iter().for_each(Waker::wake_by_ref);
    }

    /// Hands an admitted request to a slot.
    pub(crate) fn submit(self: &Rc<Self>, job: Job) {
        let Request { command, len_bytes, .. } = job.request;
        self.counters().requests.begin(op_of(command), len_bytes.into(), job.started_ns);
        self.presence.begins();
        self.slots.jobs.borrow_mut().push_back(job);
        self.rouse();
    }

    /// Answers an admitted request without performing it.
    pub(crate) fn refuse(&self, reply: Reply) {
        // A refused request moves no bytes, whatever length it claims.
        self.counters().requests.begin(op_of(reply.request.command), 0, reply.started_ns);
        self.reply(reply);
    }

    fn reply(&self, reply: Reply) {
        self.replies.borrow_mut().push_back(reply);
        self.outgoing.notify();
    }

    pub(crate) fn next_reply(&self) -> Option<Reply> {
        self.replies.borrow_mut().pop_front()
    }

    /// Counts requests as no longer in flight: their replies were sent, or the client is gone.
    pub(crate) fn depart(&self, finished: &[Ended], held_bytes: u64) {
        let now_ns = now_ns();
        self.presence.heard(now_ns);
        self.counters().requests.end_all(runs(finished.iter().copied()), now_ns);
        let mut spans = self.spans.borrow_mut();
        spans.shown(now_ns);
        spans.end();
        self.in_flight.set(self.in_flight.get() - finished.len());
        self.holder.give_back(held_bytes);
        self.room.notify();
    }

    /// Wakes a slot, or makes one, if a request waits. Only one slot is woken at a time, and wakes the next one when
    /// its own request has to wait: a disk that answers at once is served by one slot alone.
    fn rouse(self: &Rc<Self>) {
        let slots = &self.slots;
        if slots.roused.get() || slots.jobs.borrow().is_empty() {
            return;
        }
        let resting = slots.resting.borrow_mut().pop();
        if let Some(number) = resting {
            slots.roused.set(true);
            slots.wakers.borrow()[number].wake_by_ref();
            return;
        }
        let number = slots.wakers.borrow().len();
        if number < self.server.config.max_in_flight {
            slots.roused.set(true);
            slots.wakers.borrow_mut().push(Waker::noop().clone());
            spile_engine::spawn(perform_jobs(self.clone(), number));
        }
    }

    fn poll_job(&self, number: usize, cx: &mut Context<'_>) -> Poll<Option<Job>> {
        let slots = &self.slots;
        slots.roused.set(false);
        let job = slots.jobs.borrow_mut().pop_front();
        let mut resting = slots.resting.borrow_mut();
        let place = resting.iter().rposition(|&other| other == number);
        if job.is_some() || self.ended.get() {
            place.map(|place| resting.remove(place));
            return Poll::Ready(job);
        }
        if place.is_none() {
            resting.push(number);
        }
        slots.wakers.borrow_mut()[number].clone_from(cx.waker());
        Poll::Pending
    }
}

/// The task of one slot: executes one request after the other. A panic of the disk ends the task. Then another task
/// takes its number, because the requests that wait may have no other slot.
async fn perform_jobs<D: Disk>(session: Rc<Session<D>>, number: usize) {
    while let Some(job) = poll_fn(|cx| session.poll_job(number, cx)).await {
        let mut owed = Owed { session: &session, number, job: &job, answer: None };
        let answer = {
            let mut work = pin!(async {
                stamp(Moment::DiskBegan);
                let answer = session.perform(&job).await;
                stamp(Moment::DiskEnded);
                answer
            });
            poll_fn(|cx| {
                let answer = span::with(job.span, || work.as_mut().poll(cx));
                if answer.is_pending() {
                    session.rouse();
                }
                answer
            })
            .await
        };
        owed.answer = Some(answer);
    }
}

/// The reply that a request has to get. Dropping this sends it, so that the client gets an error when the disk panics,
/// and does not wait for ever.
struct Owed<'a, D: Disk> {
    session: &'a Rc<Session<D>>,
    number: usize,
    job: &'a Job,
    answer: Option<Answer>,
}

impl<D: Disk> Drop for Owed<'_, D> {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or_else(|| {
            if std::thread::panicking() {
                spile_engine::spawn(perform_jobs(self.session.clone(), self.number));
            }
            Answer::Failed { errno: EIO, message: "internal error".to_owned(), at_start: false }
        });
        let &Job { request, held_bytes, started_ns, span, .. } = self.job;
        self.session.presence.ends();
        self.session.reply(Reply { request, answer, held_bytes, started_ns, span });
    }
}

impl Reply {
    pub(crate) fn finished(&self) -> Ended {
        let failed = matches!(self.answer, Answer::Failed { .. });
        Ended { op: op_of(self.request.command), failed, begun_ns: self.started_ns }
    }
}
