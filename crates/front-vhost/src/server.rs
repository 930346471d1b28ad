//! [`Server`]: one disk for the front ends that connect to its sockets.
//!
//! Each connection has a thread, which sleeps until one of the rare messages comes; its queues are tasks on the
//! engine's workers. Several connections may serve the same disk: a guest that moves to another host is connected twice
//! for a moment.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::net::{Shutdown, shutdown};
use spile_core::metrics::span::SpanLog;
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::{
    Breakdown, Connections, Door, FrontCounters, FrontReading, Listeners, LogLimit, Passage, Peer, Place, has_hung_up,
    is_ready, not_open,
};

use crate::channel::{Channel, Notices, Received, Wait};
use crate::execute::{FRONT, ID_BYTES, Target};
use crate::gate::{Gate, Pass};
use crate::handover::Handover;
use crate::session::{Reply, Session};
use crate::shared::{Sharing, Tell};
use crate::wire::{Invalid, Message, config_changed};

/// How a disk is served.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk's name in messages.
    pub name: String,
    /// What the guest reads as its disk's serial number: at most 20 bytes count.
    pub serial: String,
    /// The most queues that a guest may use, 1 to 256.
    pub queues: u16,
    /// Refuse writes even if the disk would take them.
    pub read_only: bool,
    /// Register the guest's memory with the workers' rings ([`spile_engine::pin_memory`]).
    pub pins_memory: bool,
    /// The most connections at a time. When all places are taken, a further front end gets the place of one that has shared no memory,
    /// or is hung up on.
    pub max_connections: usize,
    /// Whether guests may use the disk at first, as its owner knows. Those that may not wait for [`Server::let_in`].
    pub passage: Passage,
    /// The secret by which a guest shows that it was let in to a disk that is [`Passage::Coming`].
    pub pass: Pass,
    /// Set when a guest has shown that the disk has come and is its own: nothing else may write to it here from then on.
    pub belongs_to_guest: Arc<AtomicBool>,
    /// Hears that the memory of a guest is not shared.
    pub tell_not_shared: Tell,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: String::new(),
            serial: String::new(),
            queues: 16,
            read_only: false,
            pins_memory: false,
            max_connections: 4,
            passage: Passage::Open,
            pass: Pass::default(),
            belongs_to_guest: Arc::default(),
            tell_not_shared: Tell::default(),
        }
    }
}

/// The server as all its connections and queues see it.
pub(crate) struct ServerState<D> {
    pub(crate) engine: Engine,
    pub(crate) disk: Arc<D>,
    pub(crate) config: Config,
    pub(crate) gate: Gate,
    sharing: Sharing,
    counters: Vec<Arc<FrontCounters>>,
    /// The worker of queue 0. It differs from server to server, so that not all disks begin on the same worker.
    first_worker: usize,
    /// An eventfd that is readable once the connections are to end.
    stop: OwnedFd,
    is_stopping: AtomicBool,
    /// True when connections end to go on in another process.
    is_handing_over: AtomicBool,
    connections: Mutex<OpenConnections<D>>,
    one_is_over: Condvar,
    /// Limits the number of connections.
    places: Arc<Connections>,
    /// Limits messages about mistakes of front ends.
    complaints: LogLimit,
    /// Limits messages about failed requests, of all connections.
    failures: Arc<LogLimit>,
}

struct OpenConnections<D> {
    next: u64,
    open: HashMap<u64, Open<D>>,
    threads: Vec<JoinHandle<()>>,
    /// Connections that have ended here and go on in another process.
    kept: Vec<Handover>,
}

/// A connection among those that are open.
struct Open<D> {
    connection: Arc<Connection<D>>,
    place: Place,
}

impl<D> OpenConnections<D> {
    fn all(&self) -> impl Iterator<Item = &Arc<Connection<D>>> {
        self.open.values().map(|open| &open.connection)
    }
}

/// The connection of one front end.
struct Connection<D> {
    channel: Channel,
    session: Mutex<Session<D>>,
    notices: Arc<Notices>,
    /// While a message is received (`IN`) or sent (`OUT`): since when, and which of both. The session is not locked
    /// then.
    talking_since: Mutex<Option<(Instant, PollFlags)>>,
}

impl<D> Connection<D> {
    fn talk<T>(&self, way: PollFlags, what: impl FnOnce(&Channel) -> Result<T>) -> Result<T> {
        *lock(&self.talking_since) = Some((Instant::now(), way));
        let result = what(&self.channel);
        *lock(&self.talking_since) = None;
        result
    }

    /// True when the connection waits for the front end, and not only for a processor.
    fn is_stuck(&self) -> bool {
        let talking = *lock(&self.talking_since);
        let late = talking.filter(|(since, _)| since.elapsed() > HANDOVER_PATIENCE);
        late.is_some_and(|(_, way)| !is_ready(self.channel.as_fd(), way))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl<D: Disk> ServerState<D> {
    pub(crate) fn worker(&self, queue: usize) -> usize {
        (self.first_worker + queue) % self.engine.workers()
    }

    pub(crate) fn counters(&self, queue: u16) -> Arc<FrontCounters> {
        self.counters[usize::from(queue)].clone()
    }

    pub(crate) fn target(&self) -> Target<Arc<D>> {
        let mut id = [0; ID_BYTES];
        let serial = self.config.serial.as_bytes();
        let len = serial.len().min(ID_BYTES);
        id[..len].copy_from_slice(&serial[..len]);
        Target {
            disk: self.disk.clone(),
            name: self.config.name.clone(),
            id,
            read_only: self.config.read_only || self.disk.info().read_only,
            // That ends when the driver says that it can flush.
            is_write_through: AtomicBool::new(true),
            failures: self.failures.clone(),
        }
    }
}

impl<D> ServerState<D> {
    /// Counts one more mistake of a front end; true when it is to be logged.
    pub(crate) fn may_complain(&self) -> bool {
        self.complaints.count().is_some()
    }

    /// A guest is about to use the disk, and its memory is not shared.
    pub(crate) fn miss_memory(&self) {
        self.sharing.miss(&self.config.name, &self.config.tell_not_shared);
    }

    /// A guest uses the disk by memory that is shared.
    pub(crate) fn find_memory(&self) {
        self.sharing.found();
    }
}

/// How often a connection that waits for the end of another looks whether its own front end is gone.
const ENDING_LOOK: Duration = Duration::from_millis(10);

impl<D> ServerState<D> {
    /// Waits until every other connection whose front end is gone has answered its requests, because they may be older
    /// writes of the same guest. `own` is the socket of the connection that waits.
    ///
    /// # Errors
    /// `Shutdown` when the front end of `own` is gone as well.
    pub(crate) fn wait_for_ending(&self, own: &OwnedFd) -> Result<()> {
        let mut connections = lock(&self.connections);
        loop {
            if has_hung_up(own) {
                return Err(Error::new(ErrorKind::Shutdown, "the front end is gone"));
            }
            if !connections.all().any(|other| has_hung_up(other.channel.as_fd())) {
                return Ok(());
            }
            let waited = self.one_is_over.wait_timeout(connections, ENDING_LOOK);
            connections = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

/// Serves one disk. Dropping a server stops it, but does not wait for the end.
pub struct Server<D: Disk> {
    shared: Arc<ServerState<D>>,
    listeners: Listeners,
}

impl<D: Disk> Server<D> {
    /// A server of `disk` on `engine`'s workers. It serves nobody before [`Server::listen`].
    ///
    /// # Errors
    /// `InvalidInput` when the count of queues is out of range or the disk's size is no whole number of sectors;
    /// `Exhausted` when descriptors are short.
    pub fn new(engine: Engine, disk: Arc<D>, config: Config) -> Result<Self> {
        static NEXT_WORKER: AtomicUsize = AtomicUsize::new(0);
        if !(1..=256).contains(&config.queues) {
            let what = format!("{} queues: a disk has 1 to 256", config.queues);
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| Error::io("make an eventfd", errno.into()))?;
        let shared = ServerState {
            counters: (0..config.queues).map(|_| Arc::default()).collect(),
            first_worker: NEXT_WORKER.fetch_add(1, Ordering::Relaxed),
            stop,
            is_stopping: AtomicBool::new(false),
            is_handing_over: AtomicBool::new(false),
            connections: Mutex::new(OpenConnections {
                next: 0,
                open: HashMap::new(),
                threads: Vec::new(),
                kept: Vec::new(),
            }),
            one_is_over: Condvar::new(),
            places: Connections::new(FRONT, config.max_connections, 1),
            complaints: LogLimit::default(),
            failures: Arc::default(),
            sharing: Sharing::default(),
            gate: Gate::new(config.passage, config.pass.clone(), config.belongs_to_guest.clone()),
            engine,
            disk,
            config,
        };
        Ok(Self { shared: Arc::new(shared), listeners: Listeners::new(FRONT) })
    }

    /// Accepts front ends from `fd`, a bound and listening Unix socket. May be called several times.
    ///
    /// # Errors
    /// As [`Listeners::listen`].
    pub fn listen(&self, fd: OwnedFd) -> Result<()> {
        let shared = self.shared.clone();
        self.listeners.listen(&self.shared.engine, self.shared.first_worker, fd, move |fd| admit(&shared, fd))
    }

    /// Takes no new front end; those that are connected go on. Waits until no listener accepts any more; not to be called on a
    /// worker. The server may listen again.
    pub fn stop_listening(&self) {
        self.listeners.pause();
        self.listeners.wait_closed();
    }

    /// Stops the server: it takes no new front end and no new request, and answers what is in flight. Does not wait.
    pub fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        self.listeners.close();
    }

    /// Waits, after [`Server::stop`], until everything is answered and the connections are closed.
    pub fn wait_drained(&self) {
        self.listeners.wait_closed();
        let threads = std::mem::take(&mut lock(&self.shared.connections).threads);
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Ends as [`Server::stop`] and [`Server::wait_drained`] do, but keeps the connections for another process, which
    /// goes on with them by [`Server::adopt`]: the front ends notice nothing. A connection whose front end is stuck
    /// within a message is closed, because the others cannot wait for it.
    pub fn hand_over(&self) -> Vec<Handover> {
        self.shared.is_handing_over.store(true, Ordering::Release);
        self.stop();
        self.listeners.wait_closed();
        let threads = std::mem::take(&mut lock(&self.shared.connections).threads);
        while threads.iter().any(|thread| !thread.is_finished()) {
            let open: Vec<_> = lock(&self.shared.connections).all().cloned().collect();
            open.iter().filter(|connection| connection.is_stuck()).for_each(|connection| {
                let _ = shutdown(connection.channel.as_fd(), Shutdown::Both);
            });
            std::thread::sleep(Duration::from_millis(1));
        }
        threads.into_iter().for_each(|thread| drop(thread.join()));
        std::mem::take(&mut lock(&self.shared.connections).kept)
    }

    /// Goes on with a connection that another process has handed over.
    ///
    /// # Errors
    /// When the state does not fit its descriptors or this server (it has more queues, for example), or the guest's
    /// memory cannot be mapped.
    pub fn adopt(&self, handover: Handover) -> Result<()> {
        let peer = Peer::of(&handover.socket);
        let channel = Channel::new(handover.socket)?;
        let hang_up = hang_up_of(&channel)?;
        let session = Session::restore(self.shared.clone(), hang_up, handover.state, handover.fds)?;
        let place = self.shared.places.enter_anyway(peer);
        start(&self.shared, channel, session, place)
    }

    /// Tells all front ends that the disk's size has changed.
    pub fn disk_has_changed(&self) {
        let open: Vec<_> = lock(&self.shared.connections).all().cloned().collect();
        for connection in open {
            if let Err(error) = connection.notices.send(&config_changed())
                && self.shared.may_complain()
            {
                let disk = &self.shared.config.name;
                tracing::warn!(%disk, %error, "a guest could not be told of its disk's new size");
            }
        }
    }

    /// Whether guests may use the disk now.
    pub fn passage(&self) -> Passage {
        self.shared.gate.passage()
    }

    /// True when a guest wanted to use the disk whose memory is not shared, and none has used it since.
    pub fn lacks_memory(&self) -> bool {
        self.shared.sharing.is_missing()
    }

    /// From now on no guest uses the disk, because it is handed over to another host: requests wait in the guests' rings. Waits for
    /// connections that are just changing something; not to be called on a worker.
    ///
    /// # Errors
    /// `Busy` when a guest uses the disk, or it has not come to this host yet; then nothing has changed.
    pub fn shut(&self) -> Result<()> {
        // A queue that starts looks at this with its session locked. So whoever does not see it is at work when its session is locked here.
        match self.shared.gate.set(Passage::Gone) {
            Passage::Open => {}
            before => {
                self.shared.gate.set(before);
                return Err(not_open());
            }
        }
        let open: Vec<_> = lock(&self.shared.connections).all().cloned().collect();
        let is_in_use = |connection: &Arc<Connection<D>>| {
            let session = lock(&connection.session);
            session.is_at_work() || session.waits_for_memory()
        };
        if open.iter().any(is_in_use) {
            self.let_in();
            let hint = "have its monitor stop it first: a migration of QEMU does so with the capability pause-before-switchover";
            return Err(Error::new(ErrorKind::Busy, "a guest uses the disk").hint(hint));
        }
        Ok(())
    }

    /// Guests may use the disk from now on; those that wait go on. Not to be called on a worker.
    pub fn let_in(&self) {
        self.shared.gate.set(Passage::Open);
        let open: Vec<_> = lock(&self.shared.connections).all().cloned().collect();
        for connection in open {
            let mut session = lock(&connection.session);
            session.let_in();
            if let Err(error) = session.start_queues()
                && self.shared.may_complain()
            {
                let disk = &self.shared.config.name;
                tracing::warn!(%disk, %error, "vhost-user: a queue that waited cannot be started");
            }
        }
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.shared.places.count()
    }

    /// What is kept of the requests of each queue.
    pub fn spans(&self) -> Vec<Arc<SpanLog>> {
        self.shared.counters.iter().map(|counters| counters.spans.clone()).collect()
    }

    /// What all queues together have counted, over restarts of queues.
    pub fn metrics(&self) -> FrontReading {
        self.read(Breakdown::Sum)
    }

    /// What all queues together have counted, and each of them if `breakdown` says so.
    pub fn read(&self, breakdown: Breakdown) -> FrontReading {
        let reading = FrontCounters::read(self.shared.counters.iter().map(|counters| &**counters), breakdown);
        FrontReading { connections: self.connections() as u64, ..reading }
    }
}

impl<D: Disk> Door for Server<D> {
    fn passage(&self) -> Passage {
        self.passage()
    }

    fn lacks_memory(&self) -> bool {
        self.lacks_memory()
    }

    fn shut(&self) -> Result<()> {
        self.shut()
    }

    fn let_in(&self) -> Result<()> {
        self.let_in();
        Ok(())
    }
}

impl<D: Disk> Drop for Server<D> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How long a hand-over waits for a front end that is within a message.
const HANDOVER_PATIENCE: Duration = Duration::from_millis(20);

fn admit<D: Disk>(shared: &Arc<ServerState<D>>, fd: OwnedFd) -> Result<()> {
    if shared.is_stopping.load(Ordering::Acquire) {
        return Ok(());
    }
    let Some(place) = place_for(shared, &fd) else { return Ok(()) };
    let channel = Channel::new(fd)?;
    let session = Session::new(shared.clone(), hang_up_of(&channel)?);
    start(shared, channel, session, place)
}

/// Connections that have lost their places are here for a moment. So many of them, and as many as there are places, turn no newcomer
/// away.
const ENDING_AT_ONCE: usize = 16;

/// A place for a front end that connects. When all are taken, the connection that has gone least far gives up its own, if no guest
/// has shared memory by it: first those on which nothing was agreed, then the oldest. Such connections are a mistake, or hostile. Where there is
/// none, the reserve is for processes that hold few, and at last a process that holds more than half of all loses its newest one: no guest has
/// so many connections to one disk.
fn place_for<D: Disk>(shared: &Arc<ServerState<D>>, fd: &OwnedFd) -> Option<Place> {
    let peer = Peer::of(fd);
    if shared.places.count() < shared.config.max_connections {
        return Some(shared.places.enter_anyway(peer));
    }
    let connections = lock(&shared.connections);
    let room = connections.open.len() < 2 * shared.config.max_connections + ENDING_AT_ONCE;
    if let Some(id) = least_far(&connections).filter(|_| room) {
        give_up(shared, &connections, id, "a front end that has shared no memory");
        return Some(shared.places.enter_anyway(peer));
    }
    if let Some(place) = shared.places.enter_reserve(peer) {
        return Some(place);
    }
    let greedy = shared.places.greedy(peer).filter(|_| room);
    let Some(id) = greedy.and_then(|greedy| newest_of(&connections, greedy)) else {
        shared.places.turn_away(peer);
        return None;
    };
    give_up(shared, &connections, id, "a process that holds more than half of them");
    Some(shared.places.enter_anyway(peer))
}

/// The connection that has gone least far, and by which no guest has shared memory.
fn least_far<D: Disk>(connections: &OpenConnections<D>) -> Option<u64> {
    let progress = |(id, open): (&u64, &Open<D>)| {
        // One whose session is busy has something to do.
        let session = open.connection.session.try_lock().ok()?;
        let is_idle = !has_hung_up(open.connection.channel.as_fd()) && !session.has_memory();
        is_idle.then(|| (session.has_agreed(), *id))
    };
    connections.open.iter().filter_map(progress).min().map(|(_, id)| id)
}

fn newest_of<D>(connections: &OpenConnections<D>, peer: Peer) -> Option<u64> {
    let its = connections.open.iter().filter(|(_, open)| open.place.peer() == peer);
    its.filter(|(_, open)| !has_hung_up(open.connection.channel.as_fd())).map(|(id, _)| *id).max()
}

/// Has a connection give up its place.
fn give_up<D>(shared: &ServerState<D>, connections: &OpenConnections<D>, id: u64, whose: &str) {
    let disk = &shared.config.name;
    if shared.may_complain() {
        tracing::warn!(%disk, "vhost-user: all places are taken, and one is taken from {whose}");
    }
    let _ = shutdown(connections.open[&id].connection.channel.as_fd(), Shutdown::Both);
}

fn hang_up_of(channel: &Channel) -> Result<Arc<OwnedFd>> {
    let fd = channel.as_fd().try_clone_to_owned();
    fd.map(Arc::new).map_err(|source| Error::io("duplicate a vhost-user socket", source))
}

/// Starts the connection's thread.
fn start<D: Disk>(shared: &Arc<ServerState<D>>, channel: Channel, session: Session<D>, place: Place) -> Result<()> {
    let (notices, talking_since) = (session.notices.clone(), Mutex::default());
    let connection = Arc::new(Connection { channel, session: Mutex::new(session), notices, talking_since });
    let mut connections = lock(&shared.connections);
    connections.threads.retain(|thread| !thread.is_finished());
    let id = connections.next;
    connections.next += 1;
    connections.open.insert(id, Open { connection: connection.clone(), place });
    let shared_there = shared.clone();
    let thread = std::thread::Builder::new().name("spile-vhost".to_owned()).stack_size(STACK_BYTES).spawn(move || {
        let socket = connection.clone();
        let served = catch_unwind(AssertUnwindSafe(|| serve(&shared_there, id, connection)));
        if served.is_err() {
            // The panic hook has reported the panic. Other connections may wait for the end of this one.
            let _ = shutdown(socket.channel.as_fd(), Shutdown::Both);
            lock(&shared_there.connections).open.remove(&id);
            shared_there.one_is_over.notify_all();
        }
    });
    match thread {
        Ok(thread) => {
            connections.threads.push(thread);
            Ok(())
        }
        Err(source) => {
            connections.open.remove(&id);
            Err(Error::io("start a thread for a vhost-user connection", source))
        }
    }
}

/// How long the queues of a guest whose memory was removed wait for other memory in its place.
const MEMORY_PATIENCE: Duration = Duration::from_millis(50);

/// The stack of a connection's thread. Messages are short and need few nested calls.
const STACK_BYTES: usize = 256 << 10;

/// Serves a connection to its end.
fn serve<D: Disk>(shared: &ServerState<D>, id: u64, connection: Arc<Connection<D>>) {
    // Queues that were at work in another process go on. A new connection has none.
    let started = lock(&connection.session).start_queues();
    let talked = started.and_then(|()| talk(shared, &connection));
    if let Err(error) = &talked
        && shared.may_complain()
    {
        tracing::warn!(disk = %shared.config.name, %error, "vhost-user: a connection is closed because of an error");
    }
    // A connection on which a message has failed is not handed over: the next process would not know of that message.
    let is_whole = talked.is_ok() && !has_hung_up(connection.channel.as_fd());
    let mut session = lock(&connection.session);
    session.stop_queues();
    let handing_over = shared.is_handing_over.load(Ordering::Acquire) && is_whole;
    let kept = handing_over.then(|| session.save(connection.channel.as_fd())).transpose();
    if let Err(error) = &kept {
        tracing::warn!(%error, "vhost-user: a connection cannot be handed over");
    }
    let _ = shutdown_unless(kept.as_ref().is_ok_and(Option::is_some), &connection.channel);
    drop(session);
    let mut connections = lock(&shared.connections);
    connections.open.remove(&id);
    connections.kept.extend(kept.ok().flatten());
    shared.one_is_over.notify_all();
}

/// Shuts the socket down for all processes that have it, unless the connection goes on in another process.
fn shutdown_unless(is_kept: bool, channel: &Channel) -> rustix::io::Result<()> {
    if is_kept { Ok(()) } else { shutdown(channel.as_fd(), Shutdown::Both) }
}

/// Takes messages until the front end hangs up or the server stops.
fn talk<D: Disk>(shared: &ServerState<D>, connection: &Connection<D>) -> Result<()> {
    loop {
        let patience = lock(&connection.session).waits_for_memory().then_some(MEMORY_PATIENCE);
        match connection.channel.wait(shared.stop.as_fd(), patience)? {
            Wait::Message => {}
            Wait::Stop => return Ok(()),
            Wait::TimedOut => {
                lock(&connection.session).go_on_without()?;
                continue;
            }
        }
        let Some(received) = connection.talk(PollFlags::IN, Channel::recv)? else { return Ok(()) };
        // The session is unlocked before the answer is sent, because a front end may take long to receive it.
        let answer = handle(&mut lock(&connection.session), received)?;
        if let Some((message, fd)) = answer {
            connection.talk(PollFlags::OUT, |channel| channel.send(&message, fd.as_ref().map(|fd| fd.as_fd())))?;
        }
    }
}

/// A message to be sent, and the descriptor that goes with it.
type Outgoing = (Vec<u8>, Option<Arc<OwnedFd>>);

/// Applies a message. Returns what is to be sent in answer.
fn handle<D: Disk>(session: &mut Session<D>, received: Received) -> Result<Option<Outgoing>> {
    let Received { header, payload, fds } = received;
    let message = Message::parse(&header, &payload, fds.len()).map_err(|Invalid(what)| {
        Error::new(ErrorKind::Protocol, format!("request {} of {} bytes: {what}", header.request, header.size))
    })?;
    // A message that is a question has its own answer, in which there is no place for a refusal.
    let wants_ack = header.needs_reply() && session.acknowledges() && !message.is_question();
    let (payload, fd) = match session.apply(message, fds) {
        Ok(Reply::Payload(payload)) => (payload, None),
        Ok(Reply::WithFd(payload, fd)) => (payload, Some(fd)),
        Ok(Reply::Done) if wants_ack => (0u64.to_ne_bytes().to_vec(), None),
        Ok(Reply::Done) => return Ok(None),
        Err(error) if wants_ack => {
            if session.shared.may_complain() {
                tracing::warn!(request = header.request, %error, "vhost-user: a message was refused");
            }
            (1u64.to_ne_bytes().to_vec(), None)
        }
        Err(error) => return Err(error),
    };
    Ok(Some((header.reply(&payload), fd)))
}
