//! [`Device`]: one disk for one guest, from the first key in xenstore to the last.
//!
//! A thread of the device's own, asleep but for xenstore's watches, goes through the states of xenbus; the rings are tasks
//! on the engine's workers. Watches come late, twice or for nothing, so each step looks at what is there now.
//!
//! A device that is *stopped* leaves everything as it is, for another process to go on: the guest waits meanwhile. One
//! that was killed left the same, and its journals beside; one that is *paused* leaves it until the toolstack says. One
//! whose guest or toolstack wants the end ends it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use spile_core::{Disk, Error, ErrorKind, Result, Segment};
use spile_engine::{Engine, Event};
use spile_xen::store::{Tx, XenStore};
use spile_xen::{Channel, DomId, EventChannels, Grants, Port};

use crate::execute::Target;
use crate::journal::Journal;
use crate::keeping::Keeping;
use crate::metrics::{Board, DiskCounters, RingMetrics};
use crate::pages::Access;
use crate::pause;
use crate::queue::{Link, Setup, run};
use crate::request::Limits;
use crate::ring::{Broken, Ring, shared_rsp_prod};
use crate::trace::Trace;
use crate::xenbus::{Offer, RingWish, State, Wish, disk_flag, features, guest_of, properties, read_wish};

/// How a disk is served to a guest.
#[derive(Clone, Debug)]
pub struct Config {
    /// For messages.
    pub name: String,
    /// The back end's path in xenstore.
    pub backend_path: String,
    /// How the guest's pages are reached.
    pub access: Access,
    /// Rings at most, 1 to 64.
    pub max_queues: u16,
    /// A ring has at most 2^`max_order` pages, 0 to 4.
    pub max_order: u32,
    /// Segments of an indirect request at most, 0 to 256.
    pub max_indirect: u16,
    /// Refuse writes even if disk and toolstack would allow them.
    pub read_only: bool,
    /// Offer rings of their own for responses ([`spile_xen::blkif::split`]).
    pub splits_rings: bool,
    /// Note the times of the last so many requests in a file in `run_dir`; 0 for none ([`crate::trace`]).
    pub trace_records: u32,
    /// Where what a successor needs is kept: a folder in memory, that the next boot finds empty.
    pub run_dir: PathBuf,
}

/// How a device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was stopped; the guest still has it, and waits.
    Stopped,
    /// Guest or toolstack have closed it for good.
    Closed,
    /// The toolstack wants the image ([`crate::pause`]); the guest still has the disk, and waits. Whoever has the image
    /// closes it and says so ([`crate::pause::tell`]).
    Paused,
}

/// Watches that are taken before commands and states are looked at.
const MAX_NEWS: usize = 1024;

enum Command {
    Resized,
    Stop,
}

/// One disk for one guest.
pub struct Device {
    commands: mpsc::Sender<Command>,
    doorbell: Arc<OwnedFd>,
    counters: Arc<DiskCounters>,
    thread: Option<JoinHandle<Result<End>>>,
}

impl Device {
    /// Serves `disk` to the guest of `config.backend_path`. Just before it ends, it calls `on_end`.
    ///
    /// # Errors
    /// When the path names no guest, or there is no thread or eventfd to be had. What fails later ends the device
    /// ([`Device::wait`]).
    pub fn start<D: Disk, G: Grants, E: EventChannels>(
        engine: Engine,
        disk: Arc<D>,
        store: XenStore,
        grants: Arc<G>,
        events: Arc<E>,
        config: Config,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let (domain, device) = guest_of(&config.backend_path)?;
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let doorbell = Arc::new(fd.map_err(|errno| Error::io("make an eventfd", errno.into()))?);
        let (commands, orders) = mpsc::channel();
        let counters = Arc::new(DiskCounters::default());
        let read_only = config.read_only || disk.info().read_only;
        let offer = Offer {
            max_order: config.max_order,
            max_queues: config.max_queues,
            max_indirect: config.max_indirect,
            access: config.access,
            read_only,
            splits_rings: config.splits_rings,
        };
        let keeping = Keeping::new(&config.run_dir, domain, device);
        let trace_path = config.run_dir.join(format!("{domain}-{device}.trace"));
        let trace = match config.trace_records {
            0 => None,
            records => Some(Arc::new(Trace::create(&trace_path, records)?)),
        };
        let target = Target {
            disk,
            name: config.name.clone(),
            failures: Arc::default(),
            has_failed_flush: AtomicBool::new(false),
        };
        let mut control = Control {
            engine,
            target: Arc::new(target),
            store,
            grants,
            events,
            offer,
            agreed_indirect: 0,
            agreed_persistent: false,
            config,
            domain,
            keeping,
            counters: counters.clone(),
            trace,
            frontend: String::new(),
            rings: Vec::new(),
            is_connected: false,
            orders,
            doorbell: doorbell.clone(),
            complaints: Arc::default(),
        };
        let thread = std::thread::Builder::new().name("spile-blkif".into()).spawn(move || {
            let result = control.run();
            on_end();
            result
        });
        let thread = thread.map_err(|source| Error::io("start a thread for a guest's disk", source))?;
        Ok(Self { commands, doorbell, counters, thread: Some(thread) })
    }

    fn command(&self, command: Command) {
        // One that has ended hears nothing, and need not.
        let _ = self.commands.send(command);
        let _ = rustix::io::write(&*self.doorbell, &1u64.to_ne_bytes());
    }

    /// Tells the guest that the disk has another size.
    pub fn resized(&self) {
        self.command(Command::Resized);
    }

    /// Answers what was taken, and ends; guest and xenstore are left as they are, for a successor. [`Device::wait`] tells
    /// when that is done.
    pub fn stop(&self) {
        self.command(Command::Stop);
    }

    /// True when it has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What ended it: xenstore is gone, or the guest can be served no more.
    pub fn wait(&mut self) -> Result<End> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(end)) => end,
            Some(Err(_)) => Err(Error::new(ErrorKind::Io, "the thread of a guest's disk broke")),
            None => Ok(End::Stopped),
        }
    }

    /// What its rings have counted, also those of earlier connections.
    pub fn metrics(&self) -> Vec<RingMetrics> {
        self.counters.metrics()
    }

    /// From now on shows the sums of what its rings count on `board`, at the ends of their turns. It can have one board.
    pub fn show_on(&self, board: Arc<dyn Board>) {
        self.counters.show_on(board);
    }
}

/// A ring at work.
struct Running {
    link: Arc<Link>,
    /// Says that the task has ended.
    ended: mpsc::Receiver<Option<Broken>>,
}

/// A ring's pages.
struct RingMemory {
    requests: Segment,
    responses: Option<Segment>,
}

impl RingMemory {
    fn rsp_prod(&self) -> u32 {
        shared_rsp_prod(self.responses.as_ref().unwrap_or(&self.requests))
    }

    fn ring(self, wish: &Wish, ring: &RingWish, req_cons: u32, rsp_prod: u32) -> Ring {
        let made = Ring::new(self.requests, wish.abi, ring.order, req_cons, rsp_prod);
        match self.responses {
            Some(memory) => made.with_responses(memory, ring.response_refs.len().ilog2()),
            None => made,
        }
    }
}

struct Control<D, G, E> {
    engine: Engine,
    target: Arc<Target<Arc<D>>>,
    store: XenStore,
    grants: Arc<G>,
    events: Arc<E>,
    offer: Offer,
    /// Segments of an indirect request of the guest's at most.
    agreed_indirect: u16,
    /// It was told that pages may stay mapped. One that was not takes each page back after its answer.
    agreed_persistent: bool,
    config: Config,
    domain: DomId,
    keeping: Keeping,
    counters: Arc<DiskCounters>,
    trace: Option<Arc<Trace>>,
    frontend: String,
    rings: Vec<Running>,
    is_connected: bool,
    orders: mpsc::Receiver<Command>,
    doorbell: Arc<OwnedFd>,
    /// Connections that were refused and rings that were broken: the guest decides how many.
    complaints: Arc<AtomicU64>,
}

impl<D: Disk, G: Grants, E: EventChannels> Control<D, G, E> {
    fn run(&mut self) -> Result<End> {
        let result = self.serve();
        self.stop_rings();
        result
    }

    fn serve(&mut self) -> Result<End> {
        self.begin()?;
        loop {
            if let Some(end) = self.step()? {
                return Ok(end);
            }
            self.wait_news()?;
            while let Ok(command) = self.orders.try_recv() {
                match command {
                    Command::Resized => self.publish_size()?,
                    Command::Stop => return Ok(End::Stopped),
                }
            }
        }
    }

    /// Watches what can change, and goes on where another process has ended.
    fn begin(&mut self) -> Result<()> {
        self.frontend = self.store.read_string(Tx::NONE, &self.key("frontend"))?;
        let domain_path = self.store.domain_path(self.domain)?;
        // Whoever may write our folder is trusted, but a slip there shall not have us read another guest's keys.
        if !self.frontend.starts_with(&format!("{domain_path}/")) || self.frontend.contains("..") {
            let what = format!("{} is not a path of domain {}", self.frontend, self.domain);
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let mode = self.store.read_optional(Tx::NONE, &self.key("mode"))?;
        self.offer.read_only |= !mode.is_some_and(|mode| mode.contains('w'));
        self.store.watch(&format!("{}/state", self.frontend), "front")?;
        self.store.watch(&self.config.backend_path.clone(), "back")?;
        match (self.own_state()?, self.front_state()?) {
            // A front end in state 3 has seen our 4, or is about to. One that is to close has requests to be answered first.
            (Some(State::Connected | State::Closing), Some(State::Connected | State::Initialised | State::Closing)) => {
                return self.resume();
            }
            (Some(State::Closing), _) => return Ok(()),
            _ => {}
        }
        self.keeping.forget();
        self.offer_features()
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.config.backend_path)
    }

    fn own_state(&mut self) -> Result<Option<State>> {
        let text = self.store.read_optional(Tx::NONE, &self.key("state"))?;
        Ok(text.and_then(|text| State::parse(&text)))
    }

    fn front_state(&mut self) -> Result<Option<State>> {
        let text = self.store.read_optional(Tx::NONE, &format!("{}/state", self.frontend));
        match text {
            // What is not text is no state.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(None),
            text => Ok(text?.and_then(|text| State::parse(&text))),
        }
    }

    fn set_state(&mut self, state: State) -> Result<()> {
        if self.own_state()? == Some(state) {
            return Ok(());
        }
        self.store.write(Tx::NONE, &self.key("state"), state.text())
    }

    /// Writes several keys at once, and the state last.
    fn write_all(&mut self, keys: &[(&'static str, String)], state: State) -> Result<()> {
        let path = self.config.backend_path.clone();
        self.store.transaction(|store, tx| {
            for (key, value) in keys {
                store.write(tx, &format!("{path}/{key}"), value)?;
            }
            store.write(tx, &format!("{path}/state"), state.text())
        })
    }

    /// The toolstack may have an image keep all of its space.
    fn may_discard(&mut self) -> Result<bool> {
        Ok(self.store.read_optional(Tx::NONE, &self.key("discard-enable"))?.is_none_or(|value| value != "0"))
    }

    fn offer_features(&mut self) -> Result<()> {
        let may_discard = self.may_discard()?;
        let mut keys = features(&self.offer, &self.target.disk.info(), may_discard);
        keys.push(("hotplug-status", "connected".into()));
        keys.push(("kthread-pid", std::process::id().to_string()));
        self.write_all(&keys, State::InitWait)
    }

    /// Does what the states ask for. `Some` when the device has ended.
    fn step(&mut self) -> Result<Option<End>> {
        let Some(online) = self.store.read_optional(Tx::NONE, &self.key("online"))? else {
            // The toolstack has removed the device.
            self.disconnect();
            return Ok(Some(End::Closed));
        };
        if pause::is_asked(&mut self.store, &self.config.backend_path)? {
            return Ok(Some(End::Paused));
        }
        let (own, front, is_wanted) = (self.own_state()?, self.front_state()?, online != "0");
        match front {
            // It goes on using the disk until it is closed: a guest that has it mounted may stay in this state for long.
            Some(State::Closing) => self.set_state(State::Closing)?,
            // It never began, and is not to.
            Some(State::Initialising | State::InitWait) if own == Some(State::Closing) && !is_wanted => {
                self.set_state(State::Closed)?;
                return Ok(Some(End::Closed));
            }
            // It has not begun yet.
            None | Some(State::Closed) if own == Some(State::InitWait) && is_wanted => {}
            None | Some(State::Closed) => {
                self.disconnect();
                self.set_state(State::Closed)?;
                return Ok((!is_wanted).then_some(End::Closed));
            }
            // It begins anew, perhaps without having closed: another kernel was started.
            Some(State::Initialising | State::InitWait) if own != Some(State::InitWait) && is_wanted => {
                self.disconnect();
                self.offer_features()?;
            }
            Some(State::Initialised | State::Connected) if own == Some(State::InitWait) => self.connect_or_close()?,
            _ => {}
        }
        Ok(None)
    }

    /// Waits for a watch or a command, and takes all watches.
    fn wait_news(&mut self) -> Result<()> {
        // One may have come along with an answer, and waits here and not in the socket.
        if self.store.next_event(Some(Duration::ZERO))?.is_none() {
            let mut fds = [
                PollFd::new(&*self.doorbell, PollFlags::IN),
                PollFd::from_borrowed_fd(self.store.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::errno("wait for xenstore", errno.raw_os_error())),
            }
            let _ = rustix::io::read(self.doorbell.as_fd(), &mut [0; 8]);
        }
        // Not without end, for a guest that writes all the time: those that are left wake us at once.
        for _ in 0..MAX_NEWS {
            if self.store.next_event(Some(Duration::ZERO))?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Serves what the front end has written; one that cannot be served is told by our state.
    fn connect_or_close(&mut self) -> Result<()> {
        let connected = read_wish(&mut self.store, &self.frontend, &self.offer).and_then(|wish| self.connect(&wish));
        if let Err(error) = connected {
            if let Some(count) = to_log(&self.complaints) {
                let (disk, domain) = (&self.config.name, self.domain);
                tracing::error!(%disk, %domain, count, %error, "blkif: the guest cannot be served");
            }
            self.disconnect();
            return self.set_state(State::Closing);
        }
        let mut flags = if self.offer.read_only { disk_flag::READONLY } else { 0 };
        for (key, wanted, flag) in
            [("device-type", "cdrom", disk_flag::CDROM), ("removable", "1", disk_flag::REMOVABLE)]
        {
            let value = self.store.read_optional(Tx::NONE, &self.key(key))?;
            flags |= if value.as_deref() == Some(wanted) { flag } else { 0 };
        }
        let keys = properties(&self.target.disk.info(), flags);
        self.write_all(&keys, State::Connected)
    }

    fn connect(&mut self, wish: &Wish) -> Result<()> {
        self.agreed_indirect = self.offer.max_indirect;
        self.agreed_persistent = self.offer.access == Access::Persistent;
        self.target.has_failed_flush.store(false, Ordering::Relaxed);
        let slots: Vec<_> = wish.rings.iter().map(RingWish::max_in_flight).collect();
        let journals = self.keeping.begin(&slots)?;
        for (ring_wish, journal) in wish.rings.iter().zip(journals) {
            let memory = self.map(ring_wish)?;
            let start = memory.rsp_prod();
            let journal = Journal::begin(journal, ring_wish.max_in_flight(), start);
            let ring = memory.ring(wish, ring_wish, start, start);
            self.start_ring(ring_wish, wish, ring, journal, Vec::new())?;
        }
        self.keeping.keep(wish)?;
        self.is_connected = true;
        Ok(())
    }

    /// Goes on where another process has ended.
    fn resume(&mut self) -> Result<()> {
        // What was agreed on before holds, whatever we would offer now.
        self.agreed_indirect = Offer::WIDEST.max_indirect;
        let offered = self.store.read_optional(Tx::NONE, &self.key("feature-persistent"))?;
        self.agreed_persistent = offered.as_deref() == Some("1");
        let wish = read_wish(&mut self.store, &self.frontend, &Offer::WIDEST);
        let resumed = wish.and_then(|wish| self.resume_rings(&wish));
        let Err(error) = resumed else {
            self.store.write(Tx::NONE, &self.key("kthread-pid"), &std::process::id().to_string())?;
            // It may have grown while nobody served it, or just before the process that served it was killed.
            return self.publish_size();
        };
        // `Denied`: the guest has revoked its ring, and will not grant it again to whoever comes next.
        use ErrorKind::{Corrupt, Denied, InvalidInput, NotFound};
        if !matches!(error.kind(), Corrupt | NotFound | InvalidInput | Denied) {
            // Perhaps it can be done later, by the next process.
            return Err(error);
        }
        tracing::error!(
            disk = %self.config.name, domain = %self.domain, %error,
            "blkif: the guest's requests of before cannot be taken up; its disk is closed"
        );
        self.disconnect();
        self.set_state(State::Closing)
    }

    fn resume_rings(&mut self, wish: &Wish) -> Result<()> {
        let slots: Vec<_> = wish.rings.iter().map(RingWish::max_in_flight).collect();
        let journals = self.keeping.resume(wish, &slots)?;
        for (ring_wish, journal) in wish.rings.iter().zip(journals) {
            let memory = self.map(ring_wish)?;
            let (journal, left) = Journal::resume(journal, ring_wish.max_in_flight(), memory.rsp_prod())
                .map_err(|Broken(why)| Error::new(ErrorKind::Corrupt, why))?;
            if left.has_failed_flush {
                self.target.has_failed_flush.store(true, Ordering::Relaxed);
            }
            let ring = memory.ring(wish, ring_wish, left.req_cons, left.rsp_prod);
            self.start_ring(ring_wish, wish, ring, journal, left.again)?;
        }
        self.is_connected = true;
        Ok(())
    }

    fn map(&self, ring: &RingWish) -> Result<RingMemory> {
        let requests = self.grants.map_ring(self.domain, &ring.refs)?;
        let responses = match ring.response_refs.as_slice() {
            [] => None,
            refs => Some(self.grants.map_ring(self.domain, refs)?),
        };
        Ok(RingMemory { requests, responses })
    }

    fn start_ring(
        &mut self,
        ring_wish: &RingWish,
        wish: &Wish,
        ring: Ring,
        journal: Journal,
        again: Vec<(u16, crate::ring::Slot)>,
    ) -> Result<()> {
        let (kick, call) = open_channel(self.events.bind(self.domain, ring_wish.port)?)?;
        let access = match self.config.access {
            Access::Persistent if !(wish.is_persistent && self.agreed_persistent) => Access::Map,
            access => access,
        };
        let (number, discards) = (self.rings.len(), self.may_discard()?);
        let link = Arc::new(Link::default());
        let setup = Setup {
            target: self.target.clone(),
            grants: self.grants.clone(),
            domain: self.domain,
            access,
            limits: Limits { max_indirect: self.agreed_indirect, read_only: self.offer.read_only, discards },
            ring,
            journal,
            again,
            kick,
            call,
            link: link.clone(),
            counters: self.counters.of_ring(number),
            disk_counters: self.counters.clone(),
            trace: self.trace.clone(),
        };
        let (name, (tell, ended)) = (self.config.name.clone(), mpsc::channel());
        let (domain, complaints) = (self.domain, self.complaints.clone());
        self.engine.spawn_on(number, move || async move {
            let broken = run(setup).await;
            if let Some((Broken(why), count)) = broken.and_then(|broken| Some((broken, to_log(&complaints)?))) {
                tracing::error!(disk = %name, %domain, ring = number, count, why, "blkif: a ring is broken and served no more");
            }
            let _ = tell.send(broken);
        });
        self.rings.push(Running { link, ended });
        Ok(())
    }

    /// Answers what was taken, and lets go of rings and channels.
    fn stop_rings(&mut self) {
        self.rings.iter().for_each(|running| running.link.stop());
        for running in self.rings.drain(..) {
            // An error means that the task was dropped with its worker.
            let _ = running.ended.recv();
        }
        self.is_connected = false;
    }

    /// The end of a connection.
    fn disconnect(&mut self) {
        self.stop_rings();
        self.keeping.forget();
    }

    /// The state that is written again makes the front end look.
    fn publish_size(&mut self) -> Result<()> {
        if self.own_state()? != Some(State::Connected) {
            return Ok(());
        }
        let sectors = properties(&self.target.disk.info(), 0).swap_remove(0);
        if self.store.read_optional(Tx::NONE, &self.key(sectors.0))?.as_ref() == Some(&sectors.1) {
            return Ok(());
        }
        self.write_all(&[sectors], State::Connected)
    }
}

/// Counts one more, and says which it is when that shall be logged: the first, and then each time their number has doubled.
fn to_log(count: &AtomicU64) -> Option<u64> {
    Some(count.fetch_add(1, Ordering::Relaxed) + 1).filter(|count| count.is_power_of_two())
}

/// Our end of a channel as the engine knows it: rung by the guest, rung by us.
fn open_channel(channel: Channel) -> Result<(Arc<Event>, Arc<Event>)> {
    match channel {
        Channel::Device(fd, Port(port)) => {
            let event = Arc::new(Event::from_channel(fd, port)?);
            Ok((event.clone(), event))
        }
        Channel::Eventfds(kick, call) => Ok((Arc::new(Event::from_fd(kick)?), Arc::new(Event::from_fd(call)?))),
    }
}
