//! [`serve`]: a server of disks from its start to its end: it opens the disks, listens, does what it is told, hands over or ends.
//!
//! One thread, the main one, changes what is served, one [`Event`] after the other. Who only looks asks the [`View`], and never waits
//! for that thread.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, pidfd_send_signal, setrlimit};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{Config, Engine};
use spile_front_vhost::Handover;

use super::api::discovery;
use super::api::http;
use super::api::types::{Attach, NewExport};
use super::api::view::{DiskView, View, no_disk};
use super::api::{Call, Command, Context};
use super::control::{Answer, Event, LineRequest, Link, Request};
use super::disks::{self, Open, Opening, find};
use super::fronts::{self, Fronts, Listening, Options, Role, Socket, VhostSpec};
use super::identity::{self, Exported};
use super::takeover::{self, Inheritance};
use crate::disks::DiskSpec;
use crate::listen::{self, Bound, Published};
use crate::notify::notify;
use crate::signals::EndSignals;
use crate::uri::Address;

/// How often the disks are opened again after a failed takeover, each time with the patience that a busy disk is given.
const REOPEN_ATTEMPTS: u32 = 60;
/// How often a successor that has the disks open and says nothing is waited for, each time as long as for any message. Then it is
/// ended: nobody else could serve the disks.
const HANGING_ROUNDS: u32 = 3;
/// The most control sockets of servers whose first disks have the same name.
const MAX_SAME_NAMES: u32 = 100;

/// Where the control socket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlPlace {
    /// There is none.
    None,
    /// In the folder of control sockets, named after the first disk. Where that cannot be, there is none.
    ByName,
    /// At this path.
    At(PathBuf),
}

/// What a server is started with.
pub struct Settings {
    /// The disks.
    pub opening: Opening,
    /// How the fronts are to behave.
    pub options: Options,
    /// The workers.
    pub engine: Config,
    /// Where NBD clients are served.
    pub nbd: Vec<Address>,
    /// Where virtual machines are served.
    pub vhost_user: Vec<VhostSpec>,
    /// The control socket.
    pub control: ControlPlace,
    /// The first disk's name, for the control socket's.
    pub name: String,
    /// Take over from the server at the control socket.
    pub takes_over: bool,
}

/// Serves until a signal, an order or a successor ends it. `say` is told each way to a disk once it is there.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn serve(settings: Settings, signals: EndSignals, say: impl Fn(&dyn Display)) -> Result<()> {
    raise_file_limit();
    let engine = Engine::start(settings.engine.clone())?;
    let places = places(&settings)?;
    let passed = passed()?;
    let fronts = Fronts::of_nothing(&engine, &settings.options)?;
    // Whatever can be found out is found out before the running server is asked to stop.
    let mut inheritance = inherit(&settings, &places, &passed)?;
    let mut sockets = sockets(places, passed, inheritance.as_mut())?;
    if settings.control == ControlPlace::ByName {
        sockets.extend(control_by_name(&settings.name));
    }
    let control_name = (settings.control == ControlPlace::ByName).then_some(settings.name);
    let Settings { opening, options, .. } = settings;
    let (sender, events) = mpsc::channel();
    let view = Arc::default();
    let (disks, listening) = (Vec::new(), Vec::new());
    let mut serving = Serving { opening, options, engine, fronts, disks, listening, view, sender, control_name };
    let served = serving.run(sockets, inheritance, signals, &events, say);
    serving.view.show(None);
    let Serving { engine, disks, fronts, .. } = serving;
    // Also after a failure: what is open is to be left as other programs expect it.
    let closed = disks::close(&engine, disks, served);
    // The fronts share the disks, and a disk's connection to a server ends with its last share.
    drop(fronts);
    engine.shutdown();
    closed
}

/// Takes all the descriptors that the process is allowed: a guest of many queues needs a hundred, and twice that while it is handed
/// over. Where that cannot be, fewer guests are served.
fn raise_file_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// A server at work.
struct Serving {
    opening: Opening,
    options: Options,
    engine: Engine,
    fronts: Fronts,
    disks: Vec<Open>,
    listening: Vec<Listening>,
    view: Arc<View>,
    sender: mpsc::Sender<Event>,
    /// The name of the control socket, where the command line names none.
    control_name: Option<String>,
}

/// How the server ends.
enum End {
    /// It stops serving.
    Stops,
    /// Another goes on with all it had, and will have told so when it hangs up here.
    Succeeded(LineRequest),
}

impl Serving {
    /// Serves until a signal or a successor comes, and then until what is in flight is answered.
    fn run(
        &mut self,
        sockets: Vec<Socket>,
        mut inheritance: Option<Inheritance>,
        signals: EndSignals,
        events: &mpsc::Receiver<Event>,
        say: impl Fn(&dyn Display),
    ) -> Result<()> {
        let roles: Vec<Role> = sockets.iter().map(|socket| socket.role.clone()).collect();
        self.open(&roles)?;
        let lines = fronts::describe(&self.disks, &sockets, self.options.is_tls_required());
        let served = self.start(sockets, inheritance.as_mut()).and_then(|()| {
            lines.iter().for_each(|line| say(line));
            until_ready(inheritance.is_some(), signals, self.sender.clone());
            // The server before us ends now.
            drop(inheritance);
            self.work(events)
        });
        match served {
            Ok(End::Succeeded(mut request)) => {
                self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::leave);
                takeover::wait_until_it_serves(&mut request.link);
                return Ok(());
            }
            Ok(End::Stops) | Err(_) => self.fronts.stop(),
        }
        // Nobody answers there any more, and a second signal shall leave no name behind.
        self.listening.clear();
        self.fronts.wait_drained();
        served.map(|_| ())
    }

    /// Opens the disks and makes their servers, for sockets of these roles. They serve nobody yet.
    fn open(&mut self, roles: &[Role]) -> Result<()> {
        self.opening.open(&self.engine, &mut self.disks)?;
        self.fronts = Fronts::new(&self.engine, &self.disks, &self.options, roles)?;
        Ok(())
    }

    /// Goes on with what a server before us had, and listens.
    fn start(&mut self, sockets: Vec<Socket>, inheritance: Option<&mut Inheritance>) -> Result<()> {
        for socket in sockets {
            self.listening.extend(self.publish(socket)?);
        }
        let shares = self.share_sockets()?;
        if let Some(inheritance) = inheritance {
            inheritance.compare_sizes(&self.disks)?;
            // The last thing that may fail: from its answer on, the other server does not go on.
            inheritance.confirm()?;
            self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::take);
            self.adopt(std::mem::take(&mut inheritance.connections));
        }
        self.listen(shares)?;
        self.show();
        let Some(control) = self.listening.iter().find(|socket| socket.role == Role::Control) else { return Ok(()) };
        let server = match &control.address {
            Some(Address::Unix(path)) => path.display().to_string(),
            _ => String::new(),
        };
        let context = Context { view: self.view.clone(), events: self.sender.clone(), server: server.into() };
        http::listen(control.share()?, context)
    }

    /// Makes a socket appear under its name. A control socket that nobody asked for may lose its name to a server that starts
    /// at the same moment, and then gets the next one; whatever else fails about it is only logged.
    fn publish(&self, socket: Socket) -> Result<Option<Listening>> {
        let Some(name) = self.control_name.as_ref().filter(|_| socket.role == Role::Control) else {
            return Listening::publish(socket).map(Some);
        };
        let mut next = Some(socket);
        while let Some(socket) = next {
            match Listening::publish(socket) {
                Ok(listening) => return Ok(Some(listening)),
                Err(error) if error.kind() == ErrorKind::Busy => next = control_by_name(name),
                Err(error) => {
                    tracing::warn!("there is no control socket: {error}");
                    break;
                }
            }
        }
        Ok(None)
    }

    fn share_sockets(&self) -> Result<Vec<OwnedFd>> {
        self.listening.iter().map(Listening::share).collect()
    }

    /// Has the servers listen on shares of their sockets.
    fn listen(&self, shares: Vec<OwnedFd>) -> Result<()> {
        let mut sockets = self.listening.iter().zip(shares);
        sockets.try_for_each(|(socket, fd)| self.fronts.listen(&socket.role, fd))
    }

    /// Goes on with guests' connections. A guest that cannot be served is hung up on, and may connect again.
    fn adopt(&self, connections: Vec<(String, Handover)>) {
        for (export, connection) in connections {
            if let Err(error) = self.fronts.adopt(&export, connection) {
                tracing::error!("a guest of export {export:?} is lost: {error}");
            }
        }
    }

    /// From now on callers that look see what is served now.
    fn show(&self) {
        let view = |open: &Open| {
            let meters = self.fronts.meters(&open.names);
            DiskView::new(open, fronts::ways_to(open, &self.listening), meters)
        };
        self.view.show(Some(self.disks.iter().map(view).collect()));
    }

    /// Does what is asked until the end.
    fn work(&mut self, events: &mpsc::Receiver<Event>) -> Result<End> {
        loop {
            // The threads that send end with the process only.
            match events.recv() {
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
                Ok(Event::Signal | Event::Ended) | Err(_) => return Ok(End::Stops),
            }
        }
    }

    fn answer_line(&mut self, mut line: LineRequest) -> Result<Option<End>> {
        let done = match line.request.clone() {
            Request::Resize { export, size_bytes } => self.resize(&export, size_bytes),
            Request::TakeOver { sockets, queues, disks, layout } => {
                match self.prepare(&sockets, queues, disks.as_deref()) {
                    Ok(nothing) => {
                        self.view.show(None);
                        match self.hand_over(nothing, layout, &mut line.link)? {
                            None => return Ok(Some(End::Succeeded(line))),
                            Some(failure) => {
                                self.show();
                                Err(failure)
                            }
                        }
                    }
                    Err(refusal) => Err(refusal),
                }
            }
        };
        line.answer(&done);
        Ok(None)
    }

    /// Does what the control API was asked for. True when the server is to end.
    fn answer_call(&mut self, call: Call) -> bool {
        let done = match call.command.clone() {
            Command::Shutdown => {
                call.answer(Ok(()));
                notify("STOPPING=1");
                return true;
            }
            Command::Resize { name, size_bytes } => self.resize_named(&name, size_bytes),
            Command::Attach(attach) => self.attach(&attach),
            Command::Detach { name, force } => self.detach(&name, force),
            Command::AddExport(export) => self.add_export(&export),
            Command::RemoveExport { address } => self.remove_export(&address),
        };
        self.show();
        call.answer(done);
        false
    }

    fn named(&self, name: &str) -> Result<&Open> {
        let found = self.disks.iter().find(|open| open.name == name);
        found.ok_or_else(|| no_disk(self.disks.iter().map(|open| &open.name), name))
    }

    fn resize_named(&self, name: &str, size_bytes: u64) -> Result<()> {
        self.resize_open(self.named(name)?, size_bytes)
    }

    fn resize(&self, export: &str, size_bytes: u64) -> Result<()> {
        self.resize_open(find(&self.disks, export)?, size_bytes)
    }

    fn resize_open(&self, open: &Open, size_bytes: u64) -> Result<()> {
        let disk = open.disk.clone();
        self.engine.run_on(0, move || async move { disk.resize(size_bytes).await })?;
        self.fronts.tell_resized(open);
        Ok(())
    }

    /// Serves one more disk. When that fails, nothing has changed.
    fn attach(&mut self, attach: &Attach) -> Result<()> {
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let spec: DiskSpec = attach.disk.parse().map_err(bad)?;
        let name = spec.own_name();
        self.refuse_known(&spec, &name)?;
        let mut places = Vec::new();
        for path in &attach.vhost_user {
            places.push((Role::Vhost(name.clone()), unix(path.into())?));
        }
        for address in &attach.nbd {
            places.push((Role::Nbd, absolute(&address.parse().map_err(bad)?)?));
        }
        self.opening.add(spec);
        let added = self.opening.open_last(&self.engine).and_then(|open| {
            self.disks.push(open);
            self.listen_on(places)
        });
        if added.is_err() {
            self.opening.remove(&name);
            self.fronts.end(std::slice::from_ref(&name));
            if let Some(at) = self.disks.iter().position(|open| open.name == name) {
                return self.forget(at, added);
            }
        }
        added
    }

    fn refuse_known(&self, spec: &DiskSpec, name: &str) -> Result<()> {
        let is_known = |open: &Open| open.name == name || open.names.iter().any(|other| other == name);
        if self.disks.iter().any(is_known) {
            let what = format!("a disk named {name:?} is served already");
            return Err(Error::new(ErrorKind::Exists, what).hint("give the new one another name: name=N"));
        }
        let identity = self.opening.identity_of(spec);
        match self.disks.iter().find(|open| open.identity.place == identity.place && !identity.is_shareable()) {
            Some(open) => {
                let what = format!("this disk is served already, as {:?}", open.name);
                Err(Error::new(ErrorKind::Exists, what))
            }
            None => Ok(()),
        }
    }

    /// Listens on these sockets as well, and has all NBD sockets find the disks that there are now.
    fn listen_on(&mut self, places: Vec<(Role, Address)>) -> Result<()> {
        let before = self.listening.len();
        let listen = |serving: &mut Self| {
            for (role, address) in places {
                let disk = match &role {
                    Role::Vhost(export) => Some(serving.opening.identity(export)?),
                    Role::Nbd | Role::Control => None,
                };
                let key = fronts::key(&role, disk.as_deref(), Some(&address));
                serving.fronts.add(&serving.engine, &serving.disks, &serving.options, &role)?;
                let bound = Bound::after_asking(&address, role.question())?;
                serving.listening.push(Listening::publish(Socket { role, key, bound })?);
            }
            serving.exchange_nbd()?;
            let mut added = serving.listening[before..].iter().filter(|socket| socket.role != Role::Nbd);
            added.try_for_each(|socket| serving.fronts.listen(&socket.role, socket.share()?))
        };
        let listens: Result<()> = listen(self);
        if listens.is_err() {
            self.listening.truncate(before);
        }
        listens
    }

    /// Has a new NBD server with the disks that there are now listen on all NBD sockets.
    fn exchange_nbd(&mut self) -> Result<()> {
        let nbd = self.listening.iter().filter(|socket| socket.role == Role::Nbd);
        let shares: Vec<OwnedFd> = nbd.map(Listening::share).collect::<Result<_>>()?;
        self.fronts.exchange_nbd(&self.engine, &self.disks, &self.options)?;
        shares.into_iter().try_for_each(|fd| self.fronts.listen(&Role::Nbd, fd))
    }

    /// Serves a disk no more, and closes it.
    fn detach(&mut self, name: &str, force: bool) -> Result<()> {
        let names = self.named(name)?.names.clone();
        let at = self.disks.iter().position(|open| open.name == name).unwrap_or_default();
        // New NBD clients must not find it before those that are there are counted.
        let open = self.disks.remove(at);
        let exchanged = self.exchange_nbd();
        let connections = self.fronts.connections(&names);
        if exchanged.is_err() || connections > 0 && !force {
            self.disks.insert(at, open);
            self.exchange_nbd()?;
            exchanged?;
            let what = format!("the disk {name:?} is in use by {connections} connection(s)");
            return Err(Error::new(ErrorKind::Busy, what).hint("disconnect them, or use --force to cut them off"));
        }
        self.fronts.end(&names);
        self.listening.retain(|socket| !matches!(&socket.role, Role::Vhost(export) if names.contains(export)));
        self.opening.remove(name);
        self.disks.insert(at, open);
        self.forget(at, Ok(()))
    }

    /// Closes the disk of this number, of which no front has a share any more.
    fn forget(&mut self, at: usize, result: Result<()>) -> Result<()> {
        let open = self.disks.remove(at);
        // Those who look have shares of the disk.
        self.show();
        disks::close(&self.engine, vec![open], result)
    }

    fn add_export(&mut self, export: &NewExport) -> Result<()> {
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let address: Address = export.address.parse().map_err(bad)?;
        let role = match (export.protocol.as_str(), &address) {
            ("nbd", _) => Role::Nbd,
            ("vhost-user", Address::Unix(_)) => {
                let names = &self.named(&export.disk)?.names;
                Role::Vhost(names.first().cloned().unwrap_or_default())
            }
            ("vhost-user", _) => return Err(bad("vhost-user needs a Unix socket".to_owned())),
            (other, _) => return Err(bad(format!("there is no protocol {other:?}: use nbd or vhost-user"))),
        };
        let address = absolute(&address)?;
        if self.listening.iter().any(|socket| socket.address.as_ref() == Some(&address)) {
            return Err(Error::new(ErrorKind::Exists, format!("this server listens on {address} already")));
        }
        self.listen_on(vec![(role, address)])
    }

    fn remove_export(&mut self, address: &str) -> Result<()> {
        let is_meant = |socket: &Listening| {
            socket.role != Role::Control && socket.address.as_ref().is_some_and(|other| other.to_string() == address)
        };
        let Some(at) = self.listening.iter().position(is_meant) else {
            return Err(Error::new(ErrorKind::NotFound, format!("this server does not listen on {address}")));
        };
        let Listening { role, .. } = self.listening.remove(at);
        match role {
            Role::Nbd => self.exchange_nbd(),
            Role::Vhost(export) => {
                self.fronts.stop_listening(&export);
                let others = self.listening.iter().filter(|socket| socket.role == Role::Vhost(export.clone()));
                let shares: Vec<OwnedFd> = others.map(Listening::share).collect::<Result<_>>()?;
                shares.into_iter().try_for_each(|fd| self.fronts.listen(&Role::Vhost(export.clone()), fd))
            }
            Role::Control => Ok(()),
        }
    }

    /// Finds out whether a successor with these sockets, queues and disks can go on with what we have, and whether we can
    /// when it fails. Returns what is in our servers' place while they are handed over.
    fn prepare(&self, its_sockets: &[String], its_queues: u16, its_disks: Option<&[Exported]>) -> Result<Fronts> {
        takeover::compare_disks(&disks::exported(&self.disks), &self.listening, its_disks)?;
        takeover::compare(&self.listening, self.options.queues, its_sockets, its_queues)?;
        if !self.opening.is_lasting() {
            return Err(Error::new(ErrorKind::Unsupported, "a disk in memory (mem:) would be empty"));
        }
        let nothing = Fronts::of_nothing(&self.engine, &self.options)?;
        // A guest whose disk cannot be flushed has to be told so when it flushes. A disk that was opened anew could not.
        disks::flush(&self.engine, &self.disks)?;
        Ok(nothing)
    }

    /// Gives everything to the process at the other end. When that fails, goes on as before and returns why.
    fn hand_over(&mut self, nothing: Fronts, layout: u32, link: &mut Link) -> Result<Option<Error>> {
        let successor = link.peer()?;
        let roles: Vec<Role> = self.listening.iter().map(|socket| socket.role.clone()).collect();
        let fronts = std::mem::replace(&mut self.fronts, nothing);
        let clients = fronts.nbd_connections();
        if clients > 0 {
            tracing::warn!(
                "a takeover cuts off {clients} NBD client(s): they have to connect again (guests on vhost-user go on)"
            );
        }
        let connections = fronts.hand_over();
        let (sizes, served) = (self.sizes(), disks::exported(&self.disks));
        if let Err(error) = self.close() {
            // What a guest believes to be durable may not be. It must not go on as if nothing had been.
            let _ = link.send(&Answer::Error(format!("a disk could not be closed: {error}")), &[]);
            return Err(error);
        }
        let mut given = takeover::give(link, layout, sizes, &self.listening, &connections);
        let (mut attempts, mut silences) = (0, 0);
        let failure = loop {
            let Err(failure) = given.and_then(|()| takeover::make_it_the_server(link)) else { return Ok(None) };
            tracing::warn!("nothing is handed over: {failure}");
            match self.open_again(&roles, &served) {
                Ok(()) => break failure,
                // A silent successor that has the disks may yet speak. Nobody else could serve them.
                Err(error) if error.kind() == ErrorKind::Busy && failure.kind() == ErrorKind::TimedOut => {
                    silences += 1;
                    self.close()?;
                    given = if silences < HANGING_ROUNDS { Ok(()) } else { Err(end_hanging(&successor)) };
                }
                // One that is gone had begun with them, and the kernel keeps their locks until its last request has ended.
                Err(error) if error.kind() == ErrorKind::Busy && attempts < REOPEN_ATTEMPTS => {
                    attempts += 1;
                    self.close()?;
                    given = Err(failure);
                }
                Err(error) => return Err(error),
            }
        };
        self.listen(self.share_sockets()?)?;
        self.adopt(connections);
        tracing::warn!("this server goes on");
        Ok(Some(failure))
    }

    /// Opens the disks as before. What lies at their paths may be another disk by now, which guests must not get for theirs.
    fn open_again(&mut self, roles: &[Role], served: &[Exported]) -> Result<()> {
        self.open(roles)?;
        identity::compare(served, &disks::exported(&self.disks)).map_err(|error| {
            let what = "after a takeover that failed, another disk lies in the place of one that was served";
            Error::new(ErrorKind::NotFound, what)
                .caused_by(error)
                .hint("start the server anew with the disk that is meant")
        })
    }

    /// The size of each export.
    fn sizes(&self) -> Vec<(String, u64)> {
        let of = |open: &Open| {
            let size_bytes = open.disk.info().size_bytes;
            open.names.clone().into_iter().map(move |name| (name, size_bytes))
        };
        self.disks.iter().flat_map(of).collect()
    }

    fn close(&mut self) -> Result<()> {
        disks::close(&self.engine, std::mem::take(&mut self.disks), Ok(()))
    }
}

/// Ends a successor that hangs with the disks open, so that they can be served again.
fn end_hanging(successor: &OwnedFd) -> Error {
    let ended = pidfd_send_signal(successor, Signal::KILL);
    let how = if ended.is_ok() { "was ended" } else { "cannot be ended" };
    Error::new(ErrorKind::Shutdown, format!("the successor hangs with the disks open, and {how}"))
}

/// Tells the service manager that the disks are served, and from then on passes on the signal that ends that.
fn until_ready(is_successor: bool, signals: EndSignals, events: mpsc::Sender<Event>) {
    match is_successor {
        // To the service manager another process is the main one.
        true => notify(&format!("READY=1\nMAINPID={}", std::process::id())),
        false => notify("READY=1"),
    }
    signals.on_first(move |_| {
        notify("STOPPING=1");
        let _ = events.send(Event::Signal);
    });
}

/// A place to listen, and its [`fronts::key`].
struct Place {
    role: Role,
    address: Address,
    key: String,
}

fn unix(path: PathBuf) -> Result<Address> {
    absolute(&Address::Unix(path))
}

/// The same address, whatever the folder is from which it is looked at.
fn absolute(address: &Address) -> Result<Address> {
    let absolute = |path| std::path::absolute(path).map_err(|e| Error::io("find this folder's path", e));
    Ok(if let Address::Unix(path) = address { Address::Unix(absolute(path)?) } else { address.clone() })
}

/// Where to listen.
fn places(settings: &Settings) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    let mut add = |role, disk: Option<&str>, address: &Address| -> Result<()> {
        let address = absolute(address)?;
        if matches!(address, Address::Unix(_)) && places.iter().any(|place: &Place| place.address == address) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{address} is given twice")));
        }
        places.push(Place { key: fronts::key(&role, disk, Some(&address)), role, address });
        Ok(())
    };
    for address in &settings.nbd {
        add(Role::Nbd, None, address)?;
    }
    for spec in &settings.vhost_user {
        let disk = settings.opening.identity(&spec.export)?;
        add(Role::Vhost(spec.export.clone()), Some(&disk), &Address::Unix(spec.path.clone()))?;
    }
    if let ControlPlace::At(path) = &settings.control {
        add(Role::Control, None, &Address::Unix(path.clone()))?;
    }
    Ok(places)
}

/// A control socket in the folder of control sockets. A server that nobody can ask still serves, so what fails is only logged.
fn control_by_name(name: &str) -> Option<Socket> {
    let found = discovery::folder().and_then(|folder| {
        std::fs::create_dir_all(&folder).map_err(|e| Error::io("make the folder", e).at_path(&folder))?;
        free_name(&folder, name)
    });
    let failed = |error: &Error| tracing::warn!("there is no control socket: {error}");
    found.inspect_err(failed).ok()
}

/// The first free name: servers of disks of the same name get numbers.
fn free_name(folder: &std::path::Path, name: &str) -> Result<Socket> {
    let mut number = 1;
    loop {
        let file = if number == 1 { name.to_owned() } else { format!("{name}-{number}") };
        let address = Address::Unix(folder.join(format!("{file}.{}", discovery::EXTENSION)));
        match Bound::after_asking(&address, Role::Control.question()) {
            Ok(bound) => {
                return Ok(Socket {
                    key: fronts::key(&Role::Control, None, Some(&address)),
                    role: Role::Control,
                    bound,
                });
            }
            Err(error) if error.kind() == ErrorKind::Busy && number < MAX_SAME_NAMES => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// The sockets that systemd passed.
fn passed() -> Result<Vec<Socket>> {
    let bound = listen::from_systemd()?.into_iter();
    let socket =
        |bound: Bound| Socket { role: Role::Nbd, key: fronts::key(&Role::Nbd, None, bound.address.as_ref()), bound };
    Ok(bound.map(socket).collect())
}

/// All that a running server gives, if we are to ask one.
fn inherit(settings: &Settings, places: &[Place], passed: &[Socket]) -> Result<Option<Inheritance>> {
    if passed.is_empty() && places.iter().all(|place| place.role == Role::Control) {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nowhere to listen")
            .hint("say --vhost-user PATH, --nbd unix:PATH or --nbd tcp:HOST:PORT"));
    }
    let ControlPlace::At(control) = &settings.control else { return Ok(None) };
    if !settings.takes_over {
        return Ok(None);
    }
    let keys = places.iter().map(|place| &place.key).chain(passed.iter().map(|socket| &socket.key));
    takeover::ask(control, keys.cloned().collect(), settings.options.queues, settings.opening.exported())
}

/// The sockets to listen on: those passed by systemd, those taken over, and new ones for the rest.
fn sockets(places: Vec<Place>, passed: Vec<Socket>, mut inheritance: Option<&mut Inheritance>) -> Result<Vec<Socket>> {
    let mut sockets = passed;
    for Place { role, address, key } in places {
        let taken = inheritance.as_mut().and_then(|inheritance| inheritance.take_socket(&key));
        let bound = match taken {
            Some(fd) => Bound::taken_over(fd, address),
            None => Bound::after_asking(&address, role.question())?,
        };
        sockets.push(Socket { role, key, bound });
    }
    Ok(sockets)
}
