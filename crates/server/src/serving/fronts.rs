//! The servers over the open disks, and the sockets that they listen on.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::Engine;
use spile_front::{Breakdown, Door, FrontReading, Passage};
use spile_front_blkif::device::{Device, End as XenEnd};
use spile_front_nbd::{Export, Server as NbdServer, ServerConfig as NbdConfig};
use spile_front_vhost::{Config as VhostConfig, Handover, Server as VhostServer, Tell};

use super::api::types::Export as ExportView;
use super::api::view::{FrontName, ReadMeter, ReadSpans};
use super::bitmaps;
use super::disks::{Open, ServedDisk, find};
use super::doors::Doors;
use super::events::{self, Said, What};
use super::failed_syncs;
use crate::disks::split_commas;
use crate::listen::{Bound, Published, SocketAccess};
use crate::units::format_size;
use crate::uri::Address;

/// How long NBD clients may take to accept their last replies.
pub(super) const DRAIN_PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether the clients of one disk have gone from a server that has others, too.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long NBD clients may take for that in a takeover, while guests wait.
const HANDOVER_PATIENCE: Duration = Duration::from_millis(20);

/// `PATH[,export=NAME][,incoming]`: where one disk is served to virtual machines. A comma in the path is doubled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSpec {
    /// The socket.
    pub path: PathBuf,
    /// The disk's name; the first disk if not given.
    pub export: String,
    /// The disk is still on its way from another host: guests wait.
    pub is_incoming: bool,
}

impl FromStr for VhostSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = split_commas(text).into_iter();
        let path = parts.next().filter(|path| !path.is_empty()).ok_or("the PATH of the socket is empty")?;
        let mut spec = Self { path: path.into(), export: String::new(), is_incoming: false };
        for part in parts {
            match part.split_once('=') {
                Some(("export", name)) => spec.export = name.to_owned(),
                None if part == "incoming" => spec.is_incoming = true,
                _ => {
                    let known = "export=NAME or incoming (a comma in the path is doubled)";
                    return Err(format!("`{part}` is not an option; use {known}"));
                }
            }
        }
        Ok(spec)
    }
}

/// What a socket is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// All exports, by NBD.
    Nbd,
    /// The disk of this export, by vhost-user-blk.
    Vhost(String),
    /// The control socket.
    Control,
    /// Metrics, for Prometheus.
    Metrics,
}

impl Role {
    /// The bytes that make a live server in this role say something. Empty where the server speaks first.
    pub fn question(&self) -> Vec<u8> {
        match self {
            Self::Nbd => Vec::new(),
            // vhost-user's GET_FEATURES: request 1, version 1, no payload.
            Self::Vhost(_) => [1u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect(),
            // No request, so it is refused.
            Self::Control => b"\n".to_vec(),
            Self::Metrics => b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd => f.write_str("nbd"),
            Self::Vhost(export) => write!(f, "vhost-user {export:?}"),
            Self::Control => f.write_str("control"),
            Self::Metrics => f.write_str("metrics"),
        }
    }
}

/// The key by which a server and its successor mean the same socket: its role, the identity of its disk if it has one, and its
/// address.
pub fn key(role: &Role, disk: Option<&str>, address: Option<&Address>) -> String {
    let disk = disk.map_or(String::new(), |disk| format!(" ({disk})"));
    match address {
        Some(address) => format!("{role}{disk} {address}"),
        None => format!("{role}{disk} (passed)"),
    }
}

/// A socket on its way to its server.
pub struct Socket {
    /// What it is for.
    pub role: Role,
    /// Its [`key`].
    pub key: String,
    /// The socket.
    pub bound: Bound,
}

/// A socket that its server listens on.
pub struct Listening {
    /// What it is for.
    pub role: Role,
    /// Its [`key`].
    pub key: String,
    /// Where it is, as far as this is known.
    pub address: Option<Address>,
    /// The socket, for its server and to hand it over.
    pub fd: OwnedFd,
    /// Its name in the file system.
    pub published: Option<Published>,
}

impl Listening {
    /// Makes a socket appear under its name.
    ///
    /// # Errors
    /// `Busy` when another server came first; the system's.
    pub fn publish(Socket { role, key, bound }: Socket) -> Result<Self> {
        let address = bound.address.clone();
        let (fd, published) = bound.publish()?;
        Ok(Self { role, key, address, fd, published })
    }

    /// Another share of the socket.
    ///
    /// # Errors
    /// `Exhausted` when descriptors are short.
    pub fn share(&self) -> Result<OwnedFd> {
        self.fd.try_clone().map_err(|source| Error::io("duplicate a socket", source))
    }
}

/// How the fronts are to behave.
#[derive(Clone)]
pub struct Options {
    /// How NBD is served.
    pub nbd: NbdConfig,
    /// The most queues that a guest may use for a disk.
    pub queues: u16,
    /// Guests' memory is registered with the workers' rings.
    pub pins_memory: bool,
    /// Exports of disks that are still on their way from another host: their guests wait.
    pub incoming: Vec<String>,
    /// Who may connect to the sockets of clients and guests. The control socket hears nobody but its own user and root.
    pub access: SocketAccess,
}

impl Options {
    /// True when NBD clients have to use TLS.
    pub fn is_tls_required(&self) -> bool {
        self.nbd.tls.as_ref().is_some_and(|tls| tls.required)
    }

    /// Whether NBD clients use TLS, as the control API says it.
    fn tls_of_nbd(&self) -> &'static str {
        match &self.nbd.tls {
            None => "none",
            Some(tls) if tls.required => "required",
            Some(_) => "offered",
        }
    }
}

struct Vhost {
    export: String,
    server: Arc<VhostServer<ServedDisk>>,
}

impl Vhost {
    fn new(engine: &Engine, open: &Open, export: &str, options: &Options) -> Result<Self> {
        let passage = match options.incoming.iter().any(|incoming| incoming == export) {
            true => Passage::Coming,
            false if open.passages.is_gone() => Passage::Gone,
            false => Passage::Open,
        };
        if passage == Passage::Coming && open.withdrawn_to_go.swap(false, Ordering::SeqCst) {
            // It has gone from here before, and comes back: the other host writes to it.
            open.withdrawn.store(false, Ordering::SeqCst);
        }
        let config = VhostConfig {
            passage,
            pass: open.passages.pass(),
            tell_not_shared: not_shared(&open.name),
            name: open.label.clone(),
            serial: open.serial.clone(),
            queues: options.queues,
            pins_memory: options.pins_memory,
            read_only: open.read_only,
            belongs_to_guest: open.withdrawn.clone(),
            ..VhostConfig::default()
        };
        let server = VhostServer::new(engine.clone(), open.disk.clone(), config)?;
        Ok(Self { export: export.to_owned(), server: Arc::new(server) })
    }
}

/// Tells whoever waits for events of the disk of this name that the memory of its guest is not shared.
fn not_shared(disk: &str) -> Tell {
    let disk = disk.to_owned();
    Tell::new(move |message| {
        events::tell(Some(&disk), What::MemoryNotShared(Said { message: message.to_owned() }));
    })
}

/// An NBD server and the exports that it has.
#[derive(Clone)]
struct Nbd {
    server: Arc<NbdServer<ServedDisk>>,
    names: Vec<String>,
}

impl Nbd {
    fn new(engine: &Engine, disks: &[Open], options: &Options) -> Result<Self> {
        let server = NbdServer::new(engine.clone(), options.nbd.clone(), exports(disks))?;
        Ok(Self { server: Arc::new(server), names: disks.iter().flat_map(|open| open.names.clone()).collect() })
    }

    /// Clients that have chosen one of these exports.
    fn clients_with<'a>(&self, names: impl IntoIterator<Item = &'a String>) -> u64 {
        names.into_iter().map(|name| self.server.metrics(name).connections).sum()
    }

    /// Clients that have one of these exports, or may still choose it.
    fn clients_of(&self, names: &[String]) -> u64 {
        let others = self.names.iter().filter(|name| !names.contains(name));
        (self.server.connections() as u64).saturating_sub(self.clients_with(others))
    }

    /// Lets go of the disk of these exports.
    fn withdraw(&self, names: &[String]) {
        names.iter().for_each(|name| self.server.withdraw(name));
    }

    /// Counts for these exports no more: they are another one's affair.
    fn forget(&mut self, names: &[String]) {
        self.names.retain(|name| !names.contains(name));
    }
}

/// The servers of a disk that is served no more.
#[derive(Default)]
pub struct Leaving {
    names: Vec<String>,
    vhost: Vec<Vhost>,
    /// NBD servers that end.
    nbd: Vec<Nbd>,
    /// NBD servers that end because of other disks, whose storage may hang.
    shared: Vec<Nbd>,
}

impl Leaving {
    /// Waits until everything is answered. No server keeps the disk open any more then.
    pub fn wait(&mut self) {
        self.vhost.drain(..).for_each(|vhost| vhost.server.wait_drained());
        for nbd in &self.nbd {
            nbd.server.wait_drained(DRAIN_PATIENCE);
            nbd.withdraw(&self.names);
        }
        for nbd in self.shared.drain(..) {
            while nbd.clients_with(&self.names) > 0 {
                std::thread::sleep(LOOK_EVERY);
            }
            nbd.withdraw(&self.names);
        }
    }
}

/// The back end of a Xen guest's disk, which has no socket: the guest finds it in xenstore.
pub struct XenFront {
    /// Its path in xenstore.
    pub backend_path: String,
    /// The back end at work.
    pub device: Device,
}

/// All servers of a process.
///
/// An NBD server's exports do not change. When a disk comes or goes, a new one takes over the sockets, and the former ones keep
/// their connections until these end.
pub struct Fronts {
    nbd: Nbd,
    former: Vec<Nbd>,
    /// Those that end because a disk is detached, with the names of their other disks.
    leaving: Vec<Nbd>,
    /// What NBD servers have counted of each export that are gone: counts never fall while a disk is served.
    counted: BTreeMap<String, FrontReading>,
    vhost: Vec<Vhost>,
    xen: Option<XenFront>,
}

impl Fronts {
    /// Servers of `disks`, for sockets of these roles. They serve nobody yet.
    ///
    /// # Errors
    /// `NotFound` when a role names no export; `InvalidInput` when names or counts are not allowed.
    pub fn new(engine: &Engine, disks: &[Open], options: &Options, roles: &[Role]) -> Result<Self> {
        let nbd = Nbd::new(engine, disks, options)?;
        let mut fronts = Self {
            nbd,
            former: Vec::new(),
            leaving: Vec::new(),
            counted: BTreeMap::new(),
            vhost: Vec::new(),
            xen: None,
        };
        roles.iter().try_for_each(|role| fronts.add(engine, disks, options, role))?;
        Ok(fronts)
    }

    /// Servers of no disk. When they can be made, the options are allowed.
    ///
    /// # Errors
    /// As [`Fronts::new`].
    pub fn of_nothing(engine: &Engine, options: &Options) -> Result<Self> {
        Self::new(engine, &[], options, &[])
    }

    /// A server for sockets of this role, if there is none yet.
    ///
    /// # Errors
    /// As [`Fronts::new`].
    pub fn add(&mut self, engine: &Engine, disks: &[Open], options: &Options, role: &Role) -> Result<()> {
        match role {
            Role::Vhost(export) if self.vhost(export).is_none() => {
                self.vhost.push(Vhost::new(engine, find(disks, export)?, export, options)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Has a Xen guest's back end among the fronts. It serves the server's only disk.
    pub fn set_xen(&mut self, xen: XenFront) {
        self.xen = Some(xen);
    }

    /// True in the process of a Xen guest's disk.
    pub fn serves_xen(&self) -> bool {
        self.xen.is_some()
    }

    /// From now on NBD clients that connect find `disks`. Those that are connected keep what they have. The caller has the new server
    /// listen on the NBD sockets.
    ///
    /// # Errors
    /// As [`Fronts::new`]; then nothing has changed.
    pub fn exchange_nbd(&mut self, engine: &Engine, disks: &[Open], options: &Options) -> Result<()> {
        let former = std::mem::replace(&mut self.nbd, Nbd::new(engine, disks, options)?);
        former.server.stop_listening();
        let ended: Vec<Nbd> = self.former.extract_if(.., |nbd| nbd.server.connections() == 0).collect();
        ended.iter().for_each(|nbd| self.keep_counts(nbd));
        self.former.push(former);
        Ok(())
    }

    /// Keeps what an NBD server has counted that is about to go.
    fn keep_counts(&mut self, nbd: &Nbd) {
        for name in &nbd.names {
            let counted = FrontReading { connections: 0, ..nbd.server.read(name, Breakdown::Queues) };
            *self.counted.entry(name.clone()).or_default() += &counted;
        }
    }

    /// Guests and NBD clients that are connected to a disk with these exports.
    pub fn connections(&self, names: &[String]) -> u64 {
        let leaving = self.leaving.iter().map(|nbd| nbd.clients_with(names));
        let nbd = self.former.iter().chain([&self.nbd]).map(|nbd| nbd.clients_of(names));
        let nbd: u64 = nbd.chain(leaving).sum();
        let vhost = self.vhost.iter().filter(|vhost| names.contains(&vhost.export));
        nbd + vhost.map(|vhost| vhost.server.connections() as u64).sum::<u64>()
    }

    /// Keeps the disks of these exports open no more, which have no guest and no client any more. Nobody listens by now.
    pub fn leave(&mut self, names: &[String]) {
        self.end(names);
        self.nbd.withdraw(names);
    }

    /// Serves a disk with these exports no more, whoever is connected to it: what is in flight is answered, then its guests are
    /// hung up on, and so are the clients of each NBD server that has clients of it. New NBD clients must not find it any more
    /// ([`Fronts::exchange_nbd`]).
    pub fn end(&mut self, names: &[String]) {
        let mut leaving = self.take_out(names);
        leaving.wait();
        self.let_go(&leaving);
    }

    /// As [`Fronts::end`], and does not wait for what is in flight: [`Leaving::wait`] does, and then [`Fronts::let_go`] takes note of its end.
    pub fn take_out(&mut self, names: &[String]) -> Leaving {
        let vhost: Vec<Vhost> = self.vhost.extract_if(.., |vhost| names.contains(&vhost.export)).collect();
        vhost.iter().for_each(|vhost| vhost.server.stop());
        let nbd: Vec<Nbd> = self.former.extract_if(.., |nbd| nbd.clients_of(names) > 0).collect();
        nbd.iter().for_each(|nbd| nbd.server.stop());
        // Those that are left have no client of it, and must not keep it open. Its counts end with it: another disk may get its name.
        for nbd in &mut self.former {
            nbd.withdraw(names);
            nbd.forget(names);
        }
        self.counted.retain(|name, _| !names.contains(name));
        let has_it = |nbd: &&mut Nbd| nbd.names.iter().any(|name| names.contains(name));
        let shared = self.leaving.iter_mut().filter(has_it).map(|nbd| nbd.clone()).collect();
        self.leaving.extend(nbd.iter().cloned());
        self.leaving.iter_mut().for_each(|nbd| nbd.forget(names));
        Leaving { names: names.to_vec(), vhost, nbd, shared }
    }

    /// Keeps what servers have counted, of disks that are still served, that have come to their end.
    pub fn let_go(&mut self, leaving: &Leaving) {
        for ended in &leaving.nbd {
            let is_it = |nbd: &mut Nbd| Arc::ptr_eq(&nbd.server, &ended.server);
            let kept: Vec<Nbd> = self.leaving.extract_if(.., is_it).collect();
            kept.iter().for_each(|nbd| self.keep_counts(nbd));
        }
    }

    /// Hangs up on all NBD clients. Requests in flight come to their end.
    pub fn hang_up(&self) {
        let is_slow = |server: &&NbdServer<ServedDisk>| !server.wait_drained_within(Duration::ZERO, Duration::ZERO);
        if self.nbd_servers().filter(is_slow).count() > 0 {
            tracing::warn!("hung up on clients that did not take their replies");
        }
    }

    /// All NBD servers that may have clients.
    fn all_nbd(&self) -> impl Iterator<Item = &Nbd> {
        [&self.nbd].into_iter().chain(&self.former).chain(&self.leaving)
    }

    fn vhost(&self, export: &str) -> Option<&Arc<VhostServer<ServedDisk>>> {
        self.vhost.iter().find(|vhost| vhost.export == export).map(|vhost| &vhost.server)
    }

    /// What is counted of a disk with these exports: by front and export.
    pub fn meters(&self, names: &[String]) -> Vec<(FrontName, ReadMeter)> {
        let mut meters: Vec<(FrontName, ReadMeter)> = Vec::new();
        for name in self.nbd.names.iter().filter(|name| names.contains(name)) {
            let nbd = self.all_nbd().filter(|nbd| nbd.names.contains(name));
            let servers: Vec<_> = nbd.map(|nbd| nbd.server.clone()).collect();
            let (own, before) = (name.clone(), self.counted.get(name).cloned().unwrap_or_default());
            let read = move |breakdown| {
                let mut before = before.clone();
                before.queues.retain(|_| breakdown == Breakdown::Queues);
                sum(before, servers.iter().map(|server| server.read(&own, breakdown)))
            };
            meters.push((front("nbd", Some(name)), Arc::new(read)));
        }
        for vhost in self.vhost.iter().filter(|vhost| names.contains(&vhost.export)) {
            let server = vhost.server.clone();
            meters.push((front("vhost-user", Some(&vhost.export)), Arc::new(move |breakdown| server.read(breakdown))));
        }
        meters.extend(self.xen.as_ref().map(|xen| (front("xen", None), Arc::new(xen.device.reader()) as ReadMeter)));
        meters
    }

    /// The ways to a disk.
    pub fn doors(&self, open: &Open) -> Doors {
        let names = &open.names;
        let machines = self.vhost.iter().filter(|vhost| names.contains(&vhost.export));
        let mut guests: Vec<Arc<dyn Door>> = machines.map(|vhost| vhost.server.clone() as Arc<dyn Door>).collect();
        guests.extend(self.xen.iter().map(|xen| Arc::new(xen.device.gate()) as Arc<dyn Door>));
        let clients = self.all_nbd().flat_map(|nbd| {
            let its_names = nbd.names.iter().filter(|name| names.contains(name));
            its_names.map(|name| (nbd.server.clone(), name.clone()))
        });
        let (withdrawn, withdrawn_to_go) = (open.withdrawn.clone(), open.withdrawn_to_go.clone());
        // A Xen guest's back end has that in xenstore, where no guest writes.
        let passages = if self.xen.is_some() { Arc::default() } else { open.passages.clone() };
        Doors { guests, clients: clients.collect(), withdrawn, withdrawn_to_go, passages }
    }

    /// What is kept of the requests to a disk with these exports: by front and export.
    pub fn spans(&self, names: &[String]) -> Vec<(FrontName, ReadSpans)> {
        let mut all: Vec<(FrontName, ReadSpans)> = Vec::new();
        for nbd in self.all_nbd() {
            for name in nbd.names.iter().filter(|name| names.contains(name)) {
                let (front, server, name) = (front("nbd", Some(name)), nbd.server.clone(), name.to_owned());
                all.push((front, Arc::new(move || server.spans(&name))));
            }
        }
        for vhost in self.vhost.iter().filter(|vhost| names.contains(&vhost.export)) {
            let server = vhost.server.clone();
            all.push((front("vhost-user", Some(&vhost.export)), Arc::new(move || server.spans())));
        }
        let xen = self.xen.iter().map(|xen| (front("xen", None), Arc::new(xen.device.spans()) as ReadSpans));
        all.extend(xen);
        all
    }

    /// Has the server of `role` listen on a descriptor. No front listens on the control socket and for metrics.
    ///
    /// # Errors
    /// When it is no listening socket.
    pub fn listen(&self, role: &Role, fd: OwnedFd) -> Result<()> {
        match role {
            Role::Nbd => self.nbd.server.listen(fd),
            Role::Vhost(export) => self.vhost(export).map_or(Ok(()), |server| server.listen(fd)),
            Role::Control | Role::Metrics => Ok(()),
        }
    }

    /// Takes no new guest of an export.
    pub fn stop_listening(&self, export: &str) {
        if let Some(server) = self.vhost(export) {
            server.stop_listening();
        }
    }

    fn nbd_servers(&self) -> impl Iterator<Item = &NbdServer<ServedDisk>> {
        [&self.nbd].into_iter().chain(&self.former).map(|nbd| &*nbd.server)
    }

    /// Guests' connections: which export, and the connection. The servers end, beside each other.
    pub fn hand_over(self) -> Vec<(String, Handover)> {
        self.nbd_servers().for_each(NbdServer::stop);
        let all = std::thread::scope(|scope| {
            let end = |vhost: &'_ Vhost| (vhost.export.clone(), vhost.server.hand_over());
            let threads: Vec<_> = self.vhost.iter().map(|vhost| scope.spawn(move || end(vhost))).collect();
            let ended = threads.into_iter().map(|thread| thread.join().expect("handing over does not panic"));
            ended.flat_map(|(export, connections)| connections.into_iter().map(move |c| (export.clone(), c))).collect()
        });
        for server in self.nbd_servers() {
            // NBD clients that have not taken their replies are cut off in any case.
            let _ = server.wait_drained(HANDOVER_PATIENCE);
        }
        all
    }

    /// How many NBD clients are connected.
    pub fn nbd_connections(&self) -> usize {
        self.nbd_servers().map(NbdServer::connections).sum()
    }

    /// Goes on with a guest's connection.
    ///
    /// # Errors
    /// `NotFound` when nothing is served to guests under this name; else as the server's.
    pub fn adopt(&self, export: &str, handover: Handover) -> Result<()> {
        let server = self.vhost(export).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("export {export:?} is not served by vhost-user here"))
        })?;
        server.adopt(handover)
    }

    /// Tells the guests of an export that its size has changed.
    pub fn tell_resized(&self, disk: &Open) {
        let its_servers = self.vhost.iter().filter(|vhost| disk.names.contains(&vhost.export));
        its_servers.for_each(|vhost| vhost.server.disk_has_changed());
        self.xen.iter().for_each(|xen| xen.device.resized());
    }

    /// Takes no new clients and requests.
    pub fn stop(&self) {
        self.nbd_servers().for_each(NbdServer::stop);
        self.vhost.iter().for_each(|vhost| vhost.server.stop());
        self.xen.iter().for_each(|xen| xen.device.stop());
    }

    /// Waits, after [`Fronts::stop`], until everything is answered. Returns how the Xen back end has ended, if there is one.
    ///
    /// # Errors
    /// The failure that ended the Xen back end.
    pub fn wait_drained(&mut self) -> Result<Option<XenEnd>> {
        self.vhost.iter().for_each(|vhost| vhost.server.wait_drained());
        let hung_up = self.nbd_servers().filter(|server| !server.wait_drained(DRAIN_PATIENCE)).count();
        if hung_up > 0 {
            tracing::warn!("hung up on clients that did not take their replies");
        }
        self.xen.take().map(|mut xen| xen.device.wait()).transpose()
    }

    /// The ways to a disk over these sockets and, for a Xen guest, over xenstore.
    pub fn ways_to(&self, open: &Open, listening: &[Listening], options: &Options) -> Vec<ExportView> {
        let mut ways = ways_by_socket(open, listening, options.tls_of_nbd());
        ways.extend(self.xen.iter().map(|xen| ExportView {
            protocol: "xen".to_owned(),
            address: xen.backend_path.clone(),
            name: String::new(),
            tls: "none".to_owned(),
        }));
        ways
    }
}

fn front(protocol: &'static str, export: Option<&String>) -> FrontName {
    FrontName { protocol, export: export.cloned() }
}

fn sum(first: FrontReading, others: impl Iterator<Item = FrontReading>) -> FrontReading {
    others.fold(first, |mut sum, other| {
        sum += &other;
        sum
    })
}

fn exports(disks: &[Open]) -> Vec<Export<ServedDisk>> {
    let each = |open: &Open| {
        let (disk, read_only) = (open.disk.clone(), open.read_only);
        let (description, disk_name) = (open.label.clone(), open.name.clone());
        let (checkpoints, withdrawn) = (bitmaps::of(open), open.withdrawn.clone());
        open.names.clone().into_iter().map(move |name| Export {
            name,
            description: description.clone(),
            disk_name: disk_name.clone(),
            disk: disk.clone(),
            read_only,
            checkpoints: Some(checkpoints.clone()),
            kept: failed_syncs::kept,
            withdrawn: withdrawn.clone(),
        })
    };
    disks.iter().flat_map(each).collect()
}

fn ways_by_socket(open: &Open, listening: &[Listening], tls_of_nbd: &str) -> Vec<ExportView> {
    let mut ways = Vec::new();
    for name in &open.names {
        let reaches = |socket: &&Listening| match &socket.role {
            Role::Nbd => true,
            Role::Vhost(export) => export == name,
            Role::Control | Role::Metrics => false,
        };
        ways.extend(listening.iter().filter(reaches).map(|socket| ExportView {
            protocol: if socket.role == Role::Nbd { "nbd" } else { "vhost-user" }.to_owned(),
            address: socket.address.as_ref().map_or_else(|| "passed".to_owned(), ToString::to_string),
            name: name.clone(),
            tls: if socket.role == Role::Nbd { tls_of_nbd } else { "none" }.to_owned(),
        }));
    }
    ways
}

/// One line for each disk and way to it, and for each address of the metrics.
pub fn describe(disks: &[Open], sockets: &[Socket], tls_required: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for open in disks {
        let size = format_size(open.disk.info().size_bytes);
        let read_only = if open.read_only { ", read-only" } else { "" };
        let what = format!("serving {} ({size} {}{read_only})", open.label, open.kind);
        for name in &open.names {
            let ways = sockets.iter().filter_map(|socket| way(socket, name, tls_required));
            lines.extend(ways.map(|way| format!("{what} {way}")));
        }
    }
    let metrics = sockets.iter().filter(|socket| socket.role == Role::Metrics);
    let addresses = metrics.filter_map(|socket| socket.bound.address.as_ref()).map(ToString::to_string);
    lines.extend(addresses.map(|address| format!("metrics at http://{}/metrics", address.trim_start_matches("tcp:"))));
    lines
}

/// How the export `name` is reached by a socket.
fn way(socket: &Socket, name: &str, tls_required: bool) -> Option<String> {
    let address = socket.bound.address.as_ref();
    match &socket.role {
        Role::Nbd => Some(match socket.bound.uri(name, tls_required) {
            Some(uri) => format!("as {uri}"),
            None => format!("as export `{name}` on a socket passed to us"),
        }),
        Role::Vhost(export) if export == name => address.map(|address| format!("to guests by vhost-user on {address}")),
        Role::Vhost(_) | Role::Control | Role::Metrics => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vhost_sockets_name_their_disk() {
        let spec = |path: &str, export: &str| {
            Ok(VhostSpec { path: path.into(), export: export.to_owned(), is_incoming: false })
        };
        assert_eq!("/run/a.sock".parse(), spec("/run/a.sock", ""));
        assert_eq!("/run/a,,b,export=x".parse(), spec("/run/a,b", "x"));
        assert!("/run/a.sock,incoming".parse().is_ok_and(|spec: VhostSpec| spec.is_incoming));
        for bad in ["", ",export=x", "/a,disk=x", "/a,x"] {
            assert!(bad.parse::<VhostSpec>().is_err(), "{bad}");
        }
    }
}
