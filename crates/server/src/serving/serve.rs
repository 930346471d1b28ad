//! `spile serve` from its start to its end: a [`Server`] with sockets for NBD clients and virtual machines.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::Config;

use super::disks::Opening;
use super::failed_syncs;
use super::fronts::{Options, Role, Socket, VhostSpec};
use super::metrics::Detail;
use super::server::{Beginning, Server};
use super::sockets::{self, Endpoint};
use super::successor::Changes;
use super::takeover::{self, Inheritance};
use crate::signals::ServerSignals;
use crate::uri::Address;

/// Where the control socket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlPlace {
    /// There is none.
    None,
    /// In the folder of control sockets, named after the first disk. When it cannot be made, there is none.
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
    /// Where Prometheus finds metrics, beside the control socket.
    pub metrics: Vec<Address>,
    /// How many series a disk has.
    pub metrics_detail: Detail,
    /// The first disk's name, for the name of the control socket.
    pub name: String,
    /// Take over from the server at the control socket.
    pub takes_over: bool,
    /// Of the running server, nothing is taken over but what is said here.
    pub is_exact: bool,
    /// Go on answering at the running server's addresses for metrics, where none is given here.
    pub keeps_metrics: bool,
    /// What has become of the command lines of the servers before.
    pub changes: Changes,
}

/// Serves until a signal, an order or a successor ends it. `say` is told each way to a disk once it is there.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn serve(mut settings: Settings, signals: ServerSignals, say: impl Fn(&dyn Display)) -> Result<()> {
    failed_syncs::remember();
    let mut server = Server::new(settings.opening.clone(), settings.options.clone(), settings.engine.clone())?;
    server.set_metrics_detail(settings.metrics_detail);
    server.hear(signals);
    if settings.takes_over {
        settings.find_running();
    }
    let passed = sockets::passed()?;
    // Whatever can be found out is found out before the running server is asked to stop.
    let (endpoints, mut inheritance) = inherit(&mut settings, &passed)?;
    (server.opening, server.changes) = (settings.opening.clone(), settings.changes.clone());
    let mut sockets = sockets::all(endpoints, passed, inheritance.as_mut(), settings.options.access)?;
    if settings.control == ControlPlace::ByName {
        sockets.extend(sockets::control_by_name(&settings.name));
        server.set_control_name(settings.name);
    }
    let roles: Vec<Role> = sockets.iter().map(|socket| socket.role.clone()).collect();
    let were_served = inheritance.as_ref().map(Inheritance::exports).unwrap_or_default();
    let served = server.open(&roles, &were_served).and_then(|()| {
        let beginning = Beginning { sockets, inheritance, xen: None };
        server.run(beginning, say)
    });
    server.close(served.map(drop))
}

/// Where to listen.
fn endpoints(settings: &Settings) -> Result<Vec<Endpoint>> {
    let mut endpoints = Vec::new();
    let mut add = |role, disk: Option<&str>, address: &Address| -> Result<()> {
        let endpoint = Endpoint::new(role, disk, address)?;
        let is_same = |other: &Endpoint| other.address == endpoint.address;
        if matches!(endpoint.address, Address::Unix(_)) && endpoints.iter().any(is_same) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{} is given twice", endpoint.address)));
        }
        endpoints.push(endpoint);
        Ok(())
    };
    for address in &settings.nbd {
        add(Role::Nbd, None, address)?;
    }
    for spec in &settings.vhost_user {
        let disk = settings.opening.identity(&spec.export)?;
        add(Role::Vhost(spec.export.clone()), Some(&disk), &Address::Unix(spec.path.clone()))?;
    }
    for address in &settings.metrics {
        add(Role::Metrics, None, address)?;
    }
    if let ControlPlace::At(path) = &settings.control {
        add(Role::Control, None, &Address::Unix(path.clone()))?;
    }
    Ok(endpoints)
}

/// Where to listen, and everything that the running server gives, if this one is to take over and there is one.
fn inherit(settings: &mut Settings, passed: &[Socket]) -> Result<(Vec<Endpoint>, Option<Inheritance>)> {
    let mut endpoints = endpoints(settings)?;
    if passed.is_empty() && endpoints.iter().all(|endpoint| matches!(endpoint.role, Role::Control | Role::Metrics)) {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nowhere to listen")
            .hint("say --vhost-user PATH, --nbd unix:PATH or --nbd tcp:HOST:PORT"));
    }
    let control = match &settings.control {
        ControlPlace::At(path) if settings.takes_over => path.clone(),
        ControlPlace::At(_) | ControlPlace::ByName | ControlPlace::None => return Ok((endpoints, None)),
    };
    let mut inheritance = match ask(&control, settings, &endpoints, passed) {
        Err(refused) if refused.kind() == ErrorKind::Busy && !settings.is_exact => {
            endpoints = follow(&control, settings)?.ok_or(refused)?;
            ask(&control, settings, &endpoints, passed)?
        }
        asked => asked?,
    };
    if let Some(inheritance) = inheritance.as_mut().filter(|_| !settings.is_exact) {
        settings.leave_out(inheritance, &mut endpoints)?;
    }
    Ok((endpoints, inheritance))
}

/// A successor that was refused serves what the running server has, too. Where it listens then; `None` when that is nothing more.
fn follow(control: &Path, settings: &mut Settings) -> Result<Option<Vec<Endpoint>>> {
    let Some(told) = takeover::learn(control)? else { return Ok(None) };
    match settings.follow(&told)? {
        true => endpoints(settings).map(Some),
        false => Ok(None),
    }
}

fn ask(control: &Path, settings: &Settings, endpoints: &[Endpoint], passed: &[Socket]) -> Result<Option<Inheritance>> {
    let keys = endpoints.iter().map(|endpoint| &endpoint.key).chain(passed.iter().map(|socket| &socket.key));
    takeover::ask(control, keys.cloned().collect(), settings.options.queues, settings.opening.exported())
}
