//! Changes to what a running server serves: sockets come and go, and disks go. `attaching.rs` has those that come.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_life::jobs::State;

use super::api::types::NewExport;
use super::api::{Call, Order};
use super::claims::Claim;
use super::control::Event;
use super::disks::{self, Open};
use super::fronts::{Leaving, Listening, Role};
use super::identity::Identity;
use super::jobs::{DiskJob, Held};
use super::server::{Closer, Server};
use super::sockets::{Endpoint, absolute};
use crate::uri::Address;

/// A disk that is being detached.
pub(super) struct Gone {
    pub name: String,
    pub names: Vec<String>,
    pub identity: Identity,
}

/// The refusal of a disk that is being detached.
pub(super) fn is_being_detached(name: &str) -> Error {
    let error = Error::new(ErrorKind::Busy, format!("the disk {name:?} is being detached"));
    error.hint("try again when it is closed: its storage may not answer")
}

/// What keeps others from changing a disk while it is detached.
type Holds = (Claim, Option<Held>);

/// The jobs of a disk that goes.
struct KeptJobs {
    name: String,
    path: String,
    jobs: Vec<Arc<DiskJob>>,
    /// Those that were not over when it was to go.
    running: Vec<Arc<DiskJob>>,
}

/// A disk that is served no more, and is to be closed.
struct Detaching {
    engine: Engine,
    open: Open,
    servers: Leaving,
    kept: KeptJobs,
    held: Holds,
    /// Who is answered when it is closed, and what, unless that fails.
    call: Call,
    answer: Result<()>,
}

/// A disk that was detached.
pub struct Detached {
    servers: Leaving,
    kept: KeptJobs,
    held: Holds,
    call: Call,
    answer: Result<()>,
}

impl Detaching {
    /// Waits for the requests in flight, closes the disk and tells the main loop. May wait for ever for the disk's storage.
    fn finish(self, events: &mpsc::Sender<Event>) -> Result<()> {
        let Self { engine, open, mut servers, kept, held, call, answer } = self;
        servers.wait();
        let closed = disks::close(&engine, vec![open], Ok(()));
        if let Err(error) = &closed {
            // The caller may have gone.
            tracing::error!("the disk {:?}, which is served no more, could not be closed: {error}", kept.name);
        }
        let answer = answer.and(closed.as_ref().map(drop).map_err(Error::duplicate));
        // When the server ends, the failure is its own.
        match events.send(Event::Detached(Box::new(Detached { servers, kept, held, call, answer }))) {
            Ok(()) => Ok(()),
            Err(_) => closed,
        }
    }
}

impl Server {
    /// Does what the control API was asked for.
    ///
    /// # Errors
    /// `Unsupported` in the process of a Xen guest's disk; else the failure, and then nothing has changed.
    pub(super) fn change(&mut self, order: &Order) -> Result<()> {
        self.refuse_for_xen()?;
        match order {
            Order::AddExport(export) => self.add_export(export),
            Order::RemoveExport { address } => self.remove_export(address),
            // The main loop does these itself.
            Order::Attach(_) | Order::Detach { .. } | Order::Resize { .. } | Order::Shutdown => Ok(()),
        }
    }

    pub(super) fn refuse_for_xen(&self) -> Result<()> {
        if self.fronts.serves_xen() {
            let what = "the process of a Xen guest's disk serves that disk only";
            return Err(Error::new(ErrorKind::Unsupported, what).hint("the toolstack attaches and detaches it"));
        }
        Ok(())
    }

    /// Listens on these sockets as well, and has all NBD sockets find the disks that there are now.
    pub(super) fn listen_on(&mut self, addresses: Vec<(Role, Address)>) -> Result<()> {
        let before = self.listening.len();
        let listen = |server: &mut Self| {
            for (role, address) in addresses {
                let disk = match &role {
                    Role::Vhost(export) => Some(server.opening.identity(export)?),
                    Role::Nbd | Role::Control | Role::Metrics => None,
                };
                server.fronts.add(&server.engine, &server.disks, &server.options, &role)?;
                let socket = Endpoint::new(role, disk.as_deref(), &address)?.bind(server.options.access)?;
                server.listening.push(Listening::publish(socket)?);
            }
            server.exchange_nbd()?;
            let mut added = server.listening[before..].iter().filter(|socket| socket.role != Role::Nbd);
            added.try_for_each(|socket| server.fronts.listen(&socket.role, socket.share()?))
        };
        let listens: Result<()> = listen(self);
        if listens.is_err() {
            self.listening.truncate(before);
        }
        let open: Vec<_> =
            self.listening.iter().filter_map(|socket| socket.address.as_ref()).map(Address::to_string).collect();
        self.changes.closed.retain(|closed| !open.contains(closed));
        listens
    }

    /// Has a new NBD server with the disks that there are now listen on all NBD sockets.
    pub(super) fn exchange_nbd(&mut self) -> Result<()> {
        let nbd = self.listening.iter().filter(|socket| socket.role == Role::Nbd);
        let shares: Vec<OwnedFd> = nbd.map(Listening::share).collect::<Result<_>>()?;
        self.fronts.exchange_nbd(&self.engine, &self.disks, &self.options)?;
        shares.into_iter().try_for_each(|fd| self.fronts.listen(&Role::Nbd, fd))
    }

    /// Begins to serve a disk no more. The caller is answered when it is closed: a thread waits for that, so a disk whose storage hangs holds up none of the
    /// others.
    pub(super) fn begin_detach(&mut self, name: &str, force: bool, call: Call) {
        // Before anything is taken away, because there may be no thread.
        match self.closer().and_then(|closer| Ok((closer, self.detach(name, force)?))) {
            Ok((closer, (open, servers, held))) => {
                let detaching = self.detaching(open, servers, held, call, Ok(()));
                self.closings.push(closer.give(detaching));
            }
            Err(error) => {
                self.show();
                call.answer(Err(error));
            }
        }
    }

    /// A thread that closes a disk which is served no more.
    fn closer(&mut self) -> Result<Closer<Detaching>> {
        self.closings.retain(|thread| !thread.is_finished());
        let events = self.sender.clone();
        Closer::start("spile-detach", move |detaching: Detaching| detaching.finish(&events))
    }

    /// Notes that this disk is being closed: nobody else gets it before it is.
    fn detaching(&mut self, open: Open, servers: Leaving, held: Holds, call: Call, answer: Result<()>) -> Detaching {
        let kept = self.keep_jobs(&open);
        // To close the disk ends them, too, but only after its last request, which may hang.
        open.jobs.stop();
        let (name, names, identity) = (open.name.clone(), open.names.clone(), open.identity.clone());
        self.detaching.push(Gone { name, names, identity });
        self.show();
        Detaching { engine: self.engine.clone(), open, servers, kept, held, call, answer }
    }

    /// Closes a disk that was opened to be served, and is not for this reason, which the caller is told when it is closed.
    pub(super) fn close_unused(&mut self, open: Open, servers: Leaving, claim: Claim, call: Call, why: Error) {
        let closer = self.closer();
        let detaching = self.detaching(open, servers, (claim, None), call, Err(why));
        match closer {
            Ok(closer) => self.closings.push(closer.give(detaching)),
            // There is no thread, so this one waits.
            Err(_) => drop(detaching.finish(&self.sender)),
        }
    }

    /// Takes note of the end of a detach, and answers the caller.
    pub(super) fn end_detach(&mut self, detached: Detached) {
        let Detached { servers, kept, held, call, answer } = detached;
        self.fronts.let_go(&servers);
        self.detaching.retain(|gone| gone.name != kept.name);
        self.arrivals.leave(&kept.name);
        self.tell_ended(&kept);
        drop(held);
        self.show();
        call.answer(answer);
    }

    /// Serves a disk no more. It is to be closed when its servers have come to their end.
    fn detach(&mut self, name: &str, force: bool) -> Result<(Open, Leaving, Holds)> {
        self.refuse_for_xen()?;
        let names = self.named(name)?.names.clone();
        let claim = self.claims.take(&[name.to_owned()], "a detach")?;
        let jobs = &self.named(name)?.jobs;
        let held = if force { None } else { Some(jobs.hold_for_detach(name)?) };
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
        disks::leave_waiting([&open]);
        let servers = self.fronts.take_out(&names);
        self.listening.retain(|socket| !matches!(&socket.role, Role::Vhost(export) if names.contains(export)));
        self.opening.remove(name);
        self.changes.detach(name);
        Ok((open, servers, (claim, held)))
    }

    /// Keeps the jobs of a disk that goes, for those who ask for them.
    fn keep_jobs(&self, open: &Open) -> KeptJobs {
        let path = open.layers.first().map_or_else(|| open.label.clone(), |leaf| leaf.path.clone());
        let (name, jobs) = (open.name.clone(), open.jobs.list());
        let running = jobs.iter().filter(|job| !job.job().state().is_over()).cloned().collect();
        self.view.keep_jobs(&name, &path, &jobs);
        KeptJobs { name, path, jobs, running }
    }

    /// Says which jobs the end of their disk has ended.
    fn tell_ended(&self, kept: &KeptJobs) {
        let KeptJobs { name, path, jobs, running } = kept;
        for job in running.iter().filter(|job| job.job().state() != State::Done) {
            tracing::warn!("the job {}, a {}, was ended: its disk {name:?} was detached", job.id(), job.kind());
        }
        self.view.keep_jobs(name, path, jobs);
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
            !matches!(socket.role, Role::Control | Role::Metrics)
                && socket.address.as_ref().is_some_and(|other| other.to_string() == address)
        };
        let Some(at) = self.listening.iter().position(is_meant) else {
            return Err(Error::new(ErrorKind::NotFound, format!("this server does not listen on {address}")));
        };
        let socket = self.listening.remove(at);
        self.changes.closed.push(address.to_owned());
        match socket.role.clone() {
            Role::Nbd => {
                let exchanged = self.exchange_nbd();
                if exchanged.is_err() {
                    // The server of before still hears it.
                    self.listening.insert(at, socket);
                    self.changes.closed.retain(|other| other != address);
                }
                exchanged
            }
            Role::Vhost(export) => {
                self.fronts.stop_listening(&export);
                let others = self.listening.iter().filter(|socket| socket.role == Role::Vhost(export.clone()));
                let shares: Vec<OwnedFd> = others.map(Listening::share).collect::<Result<_>>()?;
                shares.into_iter().try_for_each(|fd| self.fronts.listen(&Role::Vhost(export.clone()), fd))
            }
            Role::Control | Role::Metrics => Ok(()),
        }
    }
}
