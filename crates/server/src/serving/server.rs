//! [`Server`]: disks with fronts over them, from the moment they are opened until they are closed. `spile serve` and
//! `spile xen-disk` run this same server with other fronts.
//!
//! One thread, the main one, changes what is served. It handles one [`Event`] after the other: signals, lines on the
//! control socket, calls of the control API, the end of a front. A caller that only looks asks the [`View`] and never
//! waits for that thread.
//!
//! `attaching.rs` and `changes.rs` add and remove disks and sockets; `handover.rs` gives everything to a successor.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::{Config, Engine};
use spile_front::Connections;
use spile_front_blkif::device::End as XenEnd;
use spile_front_vhost::Handover;

use super::api::http::{self, Answering};
use super::api::text;
use super::api::view::{DiskView, View, no_disk};
use super::api::{Call, Context, Order, router};
use super::attaching::{Arrivals, Coming, opened};
use super::changes::Gone;
use super::claims::Claims;
use super::control::{Answer, Event, LineRequest, Request};
use super::disks::{self, Open, Opening, find};
use super::events;
use super::failed_syncs::FailedSync;
use super::fronts::{self, DRAIN_PATIENCE, Fronts, Listening, Options, Role, Socket, XenFront};
use super::jobs::stop_within;
use super::metrics::{self, Detail, Exporter, Source};
use super::resizing::Caller;
use super::sockets;
use super::successor::Changes;
use super::takeover::{self, Inheritance};
use super::trouble::KeptPolicy;
use crate::disks::DiskSpec;
use crate::listen::Published;
use crate::log::complain;
use crate::notify::notify;
use crate::process::{need_proc, raise_file_limit};
use crate::signals::ServerSignals;
use crate::uri::Address;

/// A server at work.
pub struct Server {
    pub(super) opening: Opening,
    pub(super) options: Options,
    pub(super) engine: Engine,
    pub(super) fronts: Fronts,
    pub(super) disks: Vec<Open>,
    pub(super) listening: Vec<Listening>,
    pub(super) view: Arc<View>,
    /// Calls of the control API that are being answered.
    calls: Arc<Connections>,
    /// The name of the control socket, where the command line names none.
    control_name: Option<String>,
    metrics_detail: Detail,
    /// What has become of the command line since.
    pub(super) changes: Changes,
    /// Who changes which disk's images.
    pub(super) claims: Claims,
    /// Threads that close disks which are served no more.
    pub(super) closings: Vec<JoinHandle<Result<()>>>,
    /// Disks that are being attached.
    pub(super) coming: Vec<(Coming, Call)>,
    /// Which disks those are.
    pub(super) arrivals: Arrivals,
    /// Disks that are being detached: nobody serves them again before they are closed.
    pub(super) detaching: Vec<Gone>,
    pub(super) sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
}

/// Starts the back end of a Xen guest over the open disk. The back end sends [`Event::Ended`] when it ends by itself.
pub type StartXen<'a> = Box<dyn FnOnce(&Engine, &Open, mpsc::Sender<Event>) -> Result<XenFront> + 'a>;

/// What a server begins with, once its disks are open.
#[derive(Default)]
pub struct Beginning<'a> {
    /// The sockets to listen on.
    pub sockets: Vec<Socket>,
    /// What the server before this one gives.
    pub inheritance: Option<Inheritance>,
    /// The back end of a Xen guest.
    pub xen: Option<StartXen<'a>>,
}

/// After this time an end no longer waits for all guests before it closes the first disks.
const DRAINED_SOON: Duration = Duration::from_secs(1);

/// How long an end waits for the last answers on the control socket.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// How long a job may take to the end of its piece when a successor comes.
const JOBS_BOUND: Duration = Duration::from_secs(20);

/// Why the main loop has ended.
enum End {
    /// The server stops serving.
    Stops,
    /// Another process goes on with everything. It hangs up this line once it has told the service manager so.
    Succeeded(LineRequest),
}

impl Server {
    /// Starts the workers. No disk is open yet, and nobody is served.
    ///
    /// # Errors
    /// When the workers cannot be started, or the options are not allowed.
    pub fn new(opening: Opening, options: Options, engine: Config) -> Result<Self> {
        need_proc()?;
        raise_file_limit();
        events::begin();
        let engine = Engine::start(engine)?;
        let fronts = Fronts::of_nothing(&engine, &options)?;
        let (sender, events) = mpsc::channel();
        let (disks, listening, view) =
            (Vec::new(), Vec::new(), Arc::new(View::new(engine.clone(), opening.groups.clone())));
        let calls = Connections::new("the control socket", usize::MAX, 1);
        let (control_name, metrics_detail) = (None, Detail::default());
        Ok(Self {
            opening,
            options,
            engine,
            fronts,
            disks,
            listening,
            view,
            calls,
            control_name,
            metrics_detail,
            changes: Changes::default(),
            claims: Claims::default(),
            closings: Vec::new(),
            coming: Vec::new(),
            arrivals: Arrivals::default(),
            detaching: Vec::new(),
            sender,
            events,
        })
    }

    /// From now on signals are heard: the first one that ends a server ends this one as soon as its disks are served, a second one ends
    /// the process at once, and SIGUSR1 writes what was counted to the log.
    pub fn hear(&self, signals: ServerSignals) {
        let (view, events) = (self.view.clone(), self.sender.clone());
        let end = move |_| {
            notify("STOPPING=1");
            let _ = events.send(Event::Signal);
        };
        signals.hear(move || text::statistics(&view).iter().for_each(complain), end);
    }

    /// How many series the metrics of a disk have.
    pub fn set_metrics_detail(&mut self, detail: Detail) {
        self.metrics_detail = detail;
    }

    /// The control socket is in the folder of control sockets, under the first name like `name` that is free.
    pub fn set_control_name(&mut self, name: String) {
        self.control_name = Some(name);
    }

    /// Serves these disks instead of those that it was made with. None is open yet.
    pub fn set_disks(&mut self, specs: Vec<DiskSpec>) {
        self.opening = self.opening.clone().with_disks(specs);
    }

    /// Opens the disks. Exports named in `were_served` go on from a server before.
    ///
    /// # Errors
    /// As [`Opening::open`]. [`Server::close`] closes the disks that were opened before one failed.
    pub fn open_disks(&mut self, were_served: &[String]) -> Result<()> {
        self.opening.open(&self.engine, &mut self.disks, were_served)
    }

    /// Syncs of layers of the open disks that have failed in earlier processes.
    pub fn failed_syncs(&self) -> impl Iterator<Item = &FailedSync> {
        self.disks.iter().flat_map(|open| &open.failed_syncs)
    }

    /// Opens the disks, as [`Server::open_disks`] does, and makes their servers, for sockets of these roles. The servers serve nobody yet.
    ///
    /// # Errors
    /// As [`Server::open_disks`] and [`Fronts::new`].
    pub fn open(&mut self, roles: &[Role], were_served: &[String]) -> Result<()> {
        self.open_disks(were_served)?;
        self.fronts = Fronts::new(&self.engine, &self.disks, &self.options, roles)?;
        Ok(())
    }

    /// Serves the open disks until a signal, an order, a successor or the end of the Xen back end, and then until all
    /// requests in flight are answered. `say` is told each way to a disk once it is there. Returns how the Xen back
    /// end has ended, if there was one.
    ///
    /// # Errors
    /// When the server cannot listen, or a front has failed.
    pub fn run(&mut self, mut beginning: Beginning<'_>, say: impl Fn(&dyn Display)) -> Result<Option<XenEnd>> {
        let lines = fronts::describe(&self.disks, &beginning.sockets, self.options.is_tls_required());
        let served = self.begin(&mut beginning).and_then(|()| {
            lines.iter().for_each(|line| say(line));
            say(&self.engine.about());
            tell_ready(beginning.inheritance.is_some());
            // The server before us ends now.
            drop(beginning.inheritance);
            self.work()
        });
        self.hear_no_more();
        match served {
            Ok(End::Succeeded(mut request)) => {
                self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::leave);
                takeover::wait_until_it_serves(&mut request.link);
                return Ok(None);
            }
            Ok(End::Stops) | Err(_) => {
                // They come to the end of their pieces while the fronts do, and the next server knows what was wanted of them.
                self.disks.iter().for_each(|open| drop(open.jobs.stop()));
                // Fronts wait for what is in flight.
                disks::hurry(&self.disks);
                self.fronts.stop();
            }
        }
        disks::leave_waiting(&self.disks);
        // Nobody answers there any more, and a second signal shall leave no name behind.
        self.listening.clear();
        self.close_drained();
        let xen = self.fronts.wait_drained();
        served.map(drop).and(xen)
    }

    /// Whoever sends an event from now on learns that the server ends. One that waited may hold the graph of a disk, whose files, and whose
    /// connection to an NBD server, could not be closed while it does.
    fn hear_no_more(&mut self) {
        self.events = mpsc::channel().1;
    }

    /// Waits until all guests and clients have their answers. When some have not after a moment, each of the other disks is closed as soon as it is
    /// drained: requests that hang in the storage of one disk keep no other disk from being closed.
    fn close_drained(&mut self) {
        let begun = Instant::now();
        let mut are_hung_up = false;
        loop {
            let is_drained = |open: &Open| self.fronts.connections(&open.names) == 0;
            if self.disks.iter().all(is_drained) {
                return;
            }
            if begun.elapsed() < DRAINED_SOON {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if begun.elapsed() > DRAIN_PATIENCE && !are_hung_up {
                are_hung_up = true;
                self.fronts.hang_up();
                continue;
            }
            let drained: Vec<Open> = self.disks.extract_if(.., |open| is_drained(open)).collect();
            if drained.is_empty() {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            let names: Vec<String> = drained.iter().flat_map(|open| open.names.clone()).collect();
            // What shows or serves a disk keeps its files open.
            self.view.show(None);
            self.fronts.leave(&names);
            self.close_beside(drained);
        }
    }

    /// Closes these disks on a thread, which [`Server::close`] waits for: their storage may not answer.
    fn close_beside(&mut self, drained: Vec<Open>) {
        let engine = self.engine.clone();
        match Closer::start("spile-close", move |disks| disks::close(&engine, disks, Ok(()))) {
            Ok(closer) => self.closings.push(closer.give(drained)),
            // They are closed after all others.
            Err(_) => self.disks.extend(drained),
        }
    }

    /// Closes the disks, whatever has become of the server: other programs expect to find them closed. Returns `served`,
    /// or the first failure to close a disk.
    ///
    /// # Errors
    /// `served`'s, or the first failure to close a disk.
    pub fn close(self, served: Result<()>) -> Result<()> {
        let Self { engine, disks, fronts, view, calls, mut closings, coming, .. } = self;
        view.show(None);
        events::end();
        // The fronts share the disks, and a disk's files and its connection to an NBD server end with its last share.
        drop(fronts);
        let mut late = Vec::new();
        for (coming, call) in coming {
            drop(call);
            // Nobody has used it.
            let of_it = engine.clone();
            let close = move |thread| opened(thread).map_or(Ok(()), |open| disks::close(&of_it, vec![open], Ok(())));
            match Closer::start("spile-close", close) {
                Ok(closer) => closings.push(closer.give(coming.thread)),
                Err(_) => late.extend(opened(coming.thread)),
            }
        }
        let closed = disks::close(&engine, disks.into_iter().chain(late).collect(), served);
        let closed = closings.into_iter().map(joined).fold(closed, Result::and);
        engine.shutdown();
        // Who has asked for the end gets an answer before it comes.
        calls.wait_for_none(LAST_ANSWERS);
        closed
    }

    /// Goes on with what a server before us had, and listens.
    fn begin(&mut self, beginning: &mut Beginning<'_>) -> Result<()> {
        for socket in std::mem::take(&mut beginning.sockets) {
            self.listening.extend(self.publish(socket)?);
        }
        let shares = self.share_sockets()?;
        let is_successor = beginning.inheritance.is_some();
        if let Some(inheritance) = &mut beginning.inheritance {
            inheritance.compare_disks(&self.disks)?;
            // The last thing that may fail: from its answer on, the other server does not go on.
            let orders = &inheritance.orders;
            disks::keep_shapes(&self.engine, &self.disks, &orders.shapes)?;
            let keeps = |open: &Open| !open.has_own_limits;
            orders.limits.restore(&self.engine, &self.disks, &self.opening.groups, keeps)?;
            KeptPolicy::restore(&orders.policies, &self.disks);
            inheritance.confirm()?;
            self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::take);
            self.adopt(std::mem::take(&mut inheritance.connections));
        }
        disks::begin(&self.engine, &self.disks, &self.sender);
        if let (Some(start), [open]) = (beginning.xen.take(), &self.disks[..]) {
            self.fronts.set_xen(start(&self.engine, open, self.sender.clone())?);
        }
        let listens = self.listen(shares);
        self.show();
        match listens.and(self.listen_to_callers()) {
            // Nobody else has the guests any more.
            Err(error) if is_successor => {
                tracing::error!("this server goes on for guests, but not all can reach it: {error}");
                Ok(())
            }
            done => done,
        }
    }

    /// Starts the control API on the control socket, if there is one, and answers scrapes at the addresses for them.
    fn listen_to_callers(&self) -> Result<()> {
        let exporter = Exporter::new(Source::Server(self.view.clone()), self.metrics_detail);
        for socket in self.listening.iter().filter(|socket| socket.role == Role::Metrics) {
            metrics::listen::listen(socket.share()?, exporter.clone())?;
        }
        let Some(control) = self.listening.iter().find(|socket| socket.role == Role::Control) else { return Ok(()) };
        let server = match &control.address {
            Some(Address::Unix(path)) => path.display().to_string(),
            _ => String::new(),
        };
        let context = Context { view: self.view.clone(), exporter, events: self.sender.clone(), server: server.into() };
        let (calls, events) = (self.calls.clone(), Some(self.sender.clone()));
        http::listen(control.share()?, Answering { router: router(context), calls, events })
    }

    /// Makes a socket appear under its name. A control socket that nobody asked for may lose its name to a server that
    /// starts at the same moment. It then gets the next name; any other failure of it is only logged.
    fn publish(&self, socket: Socket) -> Result<Option<Listening>> {
        let Some(name) = self.control_name.as_ref().filter(|_| socket.role == Role::Control) else {
            return Listening::publish(socket).map(Some);
        };
        let mut next = Some(socket);
        while let Some(socket) = next {
            match Listening::publish(socket) {
                Ok(listening) => return Ok(Some(listening)),
                Err(error) if error.kind() == ErrorKind::Busy => next = sockets::control_by_name(name),
                Err(error) => {
                    tracing::warn!("there is no control socket: {error}");
                    break;
                }
            }
        }
        Ok(None)
    }

    pub(super) fn share_sockets(&self) -> Result<Vec<OwnedFd>> {
        self.listening.iter().map(Listening::share).collect()
    }

    /// Has the servers listen on shares of their sockets.
    pub(super) fn listen(&self, shares: Vec<OwnedFd>) -> Result<()> {
        // When one fails, the others are heard all the same.
        let sockets = self.listening.iter().zip(shares);
        sockets.map(|(socket, fd)| self.fronts.listen(&socket.role, fd)).fold(Ok(()), Result::and)
    }

    /// Goes on with guests' connections. A guest that cannot be served is hung up on, and may connect again.
    pub(super) fn adopt(&self, connections: Vec<(String, Handover)>) {
        for (export, connection) in connections {
            if let Err(error) = self.fronts.adopt(&export, connection) {
                tracing::error!("a guest of export {export:?} is lost: {error}");
            }
        }
    }

    /// From now on callers that look see what is served now.
    pub(super) fn show(&self) {
        let view = |open: &Open| {
            DiskView::new(
                open,
                self.fronts.ways_to(open, &self.listening, &self.options),
                self.fronts.meters(&open.names),
                self.fronts.spans(&open.names),
                self.fronts.doors(open),
            )
        };
        self.view.show(Some(self.disks.iter().map(view).collect()));
    }

    /// Does what is asked until the end.
    fn work(&mut self) -> Result<End> {
        loop {
            // The threads that send end with the process only.
            match self.events.recv() {
                Ok(Event::Line(request)) => {
                    if let Some(end) = self.answer_line(request)? {
                        return Ok(end);
                    }
                }
                Ok(Event::Called(call)) => {
                    if self.answer_call(call) {
                        return Ok(End::Stops);
                    }
                }
                Ok(Event::Snapshot(call)) => self.begin_snapshot(call),
                Ok(Event::Pause(call)) => self.begin_pause(call),
                Ok(Event::Revert(call)) => self.begin_revert(call),
                Ok(Event::InUse(name, ask)) => self.tell_user(&name, ask),
                Ok(Event::Resized(resized)) => self.end_resize(resized),
                Ok(Event::Attached(name)) => self.end_attach(&name),
                Ok(Event::Detached(detached)) => self.end_detach(*detached),
                Ok(Event::WantsRoom(growth)) => self.begin_growth(growth),
                Ok(Event::RoomMade(growth, outcome)) => self.end_growth(growth, outcome),
                Ok(Event::Exchanged(name, graph)) => self.note_exchange(&name, &graph),
                Ok(Event::Signal | Event::Ended) | Err(_) => return Ok(End::Stops),
            }
        }
    }

    fn answer_line(&mut self, mut line: LineRequest) -> Result<Option<End>> {
        let done = match line.request.clone() {
            Request::Resize { export, size_bytes } => {
                let name = find(&self.disks, &export).map(|open| open.name.clone());
                self.begin_resize(name, size_bytes, Caller::Line(line));
                return Ok(None);
            }
            Request::Tell => {
                line.answer_with(&Answer::Told(self.told()));
                return Ok(None);
            }
            Request::TakeOver { sockets, queues, disks, layout } => {
                // All that can be known before anything is stopped.
                let refused = self.claims.refuse_any().and_then(|()| {
                    self.look_at_disks();
                    self.compare(&line.link, &sockets, queues, disks.as_deref())
                });
                if let Err(refusal) = refused {
                    line.answer(&Err(refusal));
                    return Ok(None);
                }
                let prepared =
                    self.stop_jobs().and_then(|()| self.prepare(&line.link, &sockets, queues, disks.as_deref()));
                match prepared {
                    Ok(prepared) => {
                        self.view.show(None);
                        match self.hand_over(prepared, layout, &mut line.link)? {
                            None => return Ok(Some(End::Succeeded(line))),
                            Some(failure) => {
                                self.show();
                                Err(failure)
                            }
                        }
                    }
                    Err(refusal) => {
                        self.go_on_with_jobs();
                        Err(refusal)
                    }
                }
            }
        };
        line.answer(&done);
        Ok(None)
    }

    /// Ends all jobs at their next pieces, for a successor, which goes on with them. A merge may have ended just now, so what the disks
    /// are made of is looked at anew.
    fn stop_jobs(&mut self) -> Result<()> {
        let stopped = stop_within(&self.engine, self.disks.iter().map(|open| &open.jobs), JOBS_BOUND);
        self.look_at_disks();
        stopped
    }

    /// Takes note of what the disks are made of now, and of where they are.
    fn look_at_disks(&mut self) {
        for open in &mut self.disks {
            if let Some(graph) = open.disk.graph_now() {
                open.look_at(&graph);
            }
        }
        self.follow_moves();
    }

    /// Goes on with the jobs that were stopped for a successor that did not come.
    fn go_on_with_jobs(&self) {
        for open in &self.disks {
            match open.read_only {
                // Nothing was left of one, but it may have backups again.
                true => drop(open.jobs.reopen()),
                false => drop(open.jobs.go_on(&self.engine, &open.disk)),
            }
        }
    }

    /// Does what the control API was asked for. True when the server is to end.
    fn answer_call(&mut self, call: Call) -> bool {
        let done = match call.order.clone() {
            Order::Shutdown => {
                call.answer(Ok(()));
                notify("STOPPING=1");
                return true;
            }
            Order::Resize { name, size_bytes } => {
                self.begin_resize(Ok(name), size_bytes, Caller::Call(call));
                return false;
            }
            Order::Detach { name, force } => {
                self.begin_detach(&name, force, call);
                return false;
            }
            Order::Attach(attach) => {
                self.begin_attach(&attach, call);
                return false;
            }
            change => self.change(&change),
        };
        self.show();
        call.answer(done);
        false
    }

    /// The disk of this name.
    pub(super) fn named(&self, name: &str) -> Result<&Open> {
        let found = self.disks.iter().find(|open| open.name == name);
        found.ok_or_else(|| no_disk(self.disks.iter().map(|open| &open.name), name))
    }
}

/// Tells the service manager that the disks are served.
fn tell_ready(is_successor: bool) {
    match is_successor {
        // To the service manager another process is the main one.
        true => notify(&format!("READY=1\nMAINPID={}", std::process::id())),
        false => notify("READY=1"),
    }
}

/// A thread that closes disks, and waits for them. What it is given is not lost when there is no thread.
pub(super) struct Closer<T> {
    to_close: mpsc::Sender<T>,
    thread: JoinHandle<Result<()>>,
}

impl<T: Send + 'static> Closer<T> {
    /// Starts it. It ends when it is dropped without having been given anything.
    ///
    /// # Errors
    /// When the system has no thread.
    pub(super) fn start(name: &str, close: impl FnOnce(T) -> Result<()> + Send + 'static) -> Result<Self> {
        let (to_close, given) = mpsc::channel();
        let body = move || given.recv().map_or(Ok(()), close);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        let thread = thread.map_err(|source| Error::io("start a thread to close a disk", source))?;
        Ok(Self { to_close, thread })
    }

    /// Has it close this.
    pub(super) fn give(self, what: T) -> JoinHandle<Result<()>> {
        // It waits for this, and for nothing else.
        let _ = self.to_close.send(what);
        self.thread
    }
}

/// What a thread that closes a disk has come to.
fn joined(closing: JoinHandle<Result<()>>) -> Result<()> {
    closing.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the thread that closes a disk has panicked")))
}
