//! Changes to what a running server serves: disks and sockets come and go.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use spile_core::{Error, ErrorKind, Result};
use spile_life::jobs::State;

use super::api::Order;
use super::api::types::{Attach, NewExport};
use super::disks::{self, Open};
use super::fronts::{Listening, Role};
use super::server::Server;
use super::sockets::{Endpoint, absolute};
use crate::disks::DiskSpec;
use crate::uri::Address;

impl Server {
    /// Does what the control API was asked for.
    ///
    /// # Errors
    /// `Unsupported` in the process of a Xen guest's disk; else the failure, and then nothing has changed.
    pub(super) fn change(&mut self, order: &Order) -> Result<()> {
        if self.fronts.serves_xen() {
            let what = "the process of a Xen guest's disk serves that disk only";
            return Err(Error::new(ErrorKind::Unsupported, what).hint("the toolstack attaches and detaches it"));
        }
        match order {
            Order::Attach(attach) => self.attach(attach),
            Order::Detach { name, force } => self.detach(name, *force),
            Order::AddExport(export) => self.add_export(export),
            Order::RemoveExport { address } => self.remove_export(address),
            // The main loop does these itself.
            Order::Resize { .. } | Order::Shutdown => Ok(()),
        }
    }

    /// Serves one more disk. When that fails, nothing has changed.
    fn attach(&mut self, attach: &Attach) -> Result<()> {
        let bad = |why| Error::new(ErrorKind::InvalidInput, why);
        let spec: DiskSpec = attach.disk.parse().map_err(bad)?;
        let name = spec.own_name();
        self.refuse_known(&spec, &name)?;
        let mut addresses = Vec::new();
        for path in &attach.vhost_user {
            addresses.push((Role::Vhost(name.clone()), unix(path.into())?));
        }
        for address in &attach.nbd {
            addresses.push((Role::Nbd, absolute(&address.parse().map_err(bad)?)?));
        }
        self.opening.add(spec);
        let added = self.opening.open_last(&self.engine, &self.disks).and_then(|open| {
            self.disks.push(open);
            self.listen_on(addresses)
        });
        if let (Ok(()), Some(open)) = (&added, self.disks.last()) {
            disks::begin(&self.engine, std::slice::from_ref(open), &self.sender);
        }
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
        disks::refuse_twice(&self.disks, &self.opening.identity_of(spec))
    }

    /// Listens on these sockets as well, and has all NBD sockets find the disks that there are now.
    fn listen_on(&mut self, addresses: Vec<(Role, Address)>) -> Result<()> {
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
        let _claim = self.claims.take(&[name.to_owned()], "a detach")?;
        if !force {
            self.named(name)?.jobs.refuse_detach(name)?;
        }
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
        self.fronts.end(&names);
        self.listening.retain(|socket| !matches!(&socket.role, Role::Vhost(export) if names.contains(export)));
        self.opening.remove(name);
        self.disks.insert(at, open);
        self.forget(at, Ok(()))
    }

    /// Closes the disk of this number, of which no front has a share any more.
    fn forget(&mut self, at: usize, result: Result<()>) -> Result<()> {
        let open = self.disks.remove(at);
        let path = open.layers.first().map_or_else(|| open.label.clone(), |leaf| leaf.path.clone());
        let (name, jobs) = (open.name.clone(), open.jobs.list());
        let running: Vec<_> = jobs.iter().filter(|job| !job.job().state().is_over()).cloned().collect();
        self.view.keep_jobs(&name, &path, &jobs);
        // Those who look have shares of the disk.
        self.show();
        let closed = disks::close(&self.engine, vec![open], result);
        for job in running.iter().filter(|job| job.job().state() != State::Done) {
            tracing::warn!("the job {}, a {}, was ended: its disk {name:?} was detached", job.id(), job.kind());
        }
        self.view.keep_jobs(&name, &path, &jobs);
        closed
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
        let Listening { role, .. } = self.listening.remove(at);
        match role {
            Role::Nbd => self.exchange_nbd(),
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

fn unix(path: PathBuf) -> Result<Address> {
    absolute(&Address::Unix(path))
}
