//! `spile serve`: disks for guests and NBD clients, until a signal or a successor.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{CacheMode, Config, Engine, EngineKind};
use spile_front_nbd::{ServerConfig, TlsConfig};
use spile_image::Format;

use super::{Exit, ParentArgs, complain, parse_cache, parse_format, try_say};
use crate::disks::DiskSpec;
use crate::listen::{self, Bound, Published};
use crate::log;
use crate::notify::notify;
use crate::serving::control::{self, Answer, Event, Link, Request};
use crate::serving::disks::{self, Open, Opening, find};
use crate::serving::fronts::{self, Fronts, Listening, Options, Role, Socket, VhostSpec};
use crate::serving::takeover::{self, Estate};
use crate::signals::EndSignals;
use crate::units::parse_duration;
use crate::uri::Address;

/// Serve disks to virtual machines and NBD clients
///
/// Each DISK is an image file, a block device, null:SIZE (reads zeroes, drops writes) or mem:SIZE (memory). A comma in
/// a path is doubled.
///
/// The first DISK is the default export (the empty name). Each DISK is also exported under its name=N; where that is
/// not given and there are several, under its file's name without the extension. serial=S is what a guest reads as its
/// disk's serial number (at most 20 bytes; the name, unless given).
///
/// A socket appears only when it already answers. Who may connect to a Unix socket is what the umask says. SIGTERM or
/// SIGINT ends the server in order: no new requests, those in flight are answered, the disks are flushed and closed. A
/// second signal ends it at once. Started by systemd's socket activation, it serves NBD on the sockets passed, and --nbd
/// may be left out. It tells systemd READY=1 and STOPPING=1. Requests that failed are told on stderr: the first, and
/// then each time their number has doubled.
///
/// A guest whose server is killed waits, and goes on with the next server on the same socket as if nothing had been
/// (QEMU: reconnect-ms). With --takeover the next server takes all from a running one, and guests are not even
/// disconnected.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// What to serve
    #[arg(required = true, value_name = "DISK[,name=N][,serial=S][,format=F][,read-only]")]
    disks: Vec<DiskSpec>,
    /// Serve virtual machines by vhost-user-blk on this Unix socket: the first DISK, or the one exported as NAME (may be
    /// given several times)
    #[arg(long, value_name = "PATH[,export=NAME]")]
    vhost_user: Vec<VhostSpec>,
    /// Queues that a virtual machine may use for a disk at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), default_value = "16")]
    queues: u16,
    /// Microseconds that a worker looks for requests of its guests at most before it sleeps. It does so only while that pays
    /// and never for an idle disk; 0 switches it off
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(0..=10_000), default_value_t = Config::POLL.as_micros() as u32)]
    poll: u32,
    /// Serve NBD clients here (may be given several times)
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    nbd: Vec<Address>,
    /// Hear orders on this Unix socket: `spile resize`, and a successor with --takeover
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Take disks, sockets and guests over from the server that listens on the --control socket; start afresh if there is
    /// none. It must be given at least the sockets that that server has
    #[arg(long, requires = "control")]
    takeover: bool,
    /// The way to the disks' bytes: past the page cache (O_DIRECT) or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "direct")]
    cache: CacheMode,
    /// How I/O is done: auto takes io_uring where the kernel has and allows it
    #[arg(long, value_name = "auto|uring|threads", value_parser = parse_engine, default_value = "auto")]
    engine: EngineKind,
    /// Worker threads (as many as processors, at most 4, unless given)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,
    /// The format of every DISK that has no format=F, instead of what its extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// The server's certificate chain (PEM): clients may use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients must show a certificate signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Serve nobody without TLS
    #[arg(long, requires = "tls_cert")]
    tls_required: bool,
    /// Hang up on clients that have not chosen an export after this long
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    handshake_timeout: Duration,
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

/// Runs `spile serve`.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn run(args: &ServeArgs) -> Result<Exit> {
    log::to_stderr();
    let signals = EndSignals::block()?;
    let mut config = Config { kind: args.engine, poll: Duration::from_micros(args.poll.into()), ..Config::default() };
    config.workers = args.workers.map_or(config.workers, usize::from);
    let engine = Engine::start(config)?;
    let passed = listen::from_systemd()?;
    // Everything that can be made ready is, before the running server is asked to stop.
    let mut estate = estate(args, &passed)?;
    let sockets = sockets(args, passed, estate.as_mut())?;
    let mut serving = Serving { args, opening: opening(args), engine, disks: Vec::new(), listening: Vec::new() };
    let served = serving.run(sockets, estate, signals);
    let Serving { engine, disks, .. } = serving;
    // Also after a failure: what is open is to be left as other programs expect it.
    let closed = disks::close(&engine, disks, served);
    engine.shutdown();
    closed.map(|()| Exit::Ok)
}

/// A server at work.
struct Serving<'a> {
    args: &'a ServeArgs,
    opening: Opening,
    engine: Engine,
    disks: Vec<Open>,
    listening: Vec<Listening>,
}

/// What becomes of the server.
enum Fate {
    /// It ends.
    Ends,
    /// Another goes on with all it had.
    Succeeded,
}

impl Serving<'_> {
    /// Serves until a signal or a successor comes, and then until what is in flight is answered.
    fn run(&mut self, sockets: Vec<Socket>, estate: Option<Estate>, signals: EndSignals) -> Result<()> {
        self.opening.open(&self.engine, &mut self.disks)?;
        let roles: Vec<Role> = sockets.iter().map(|socket| socket.role.clone()).collect();
        let mut fronts = Fronts::new(&self.engine, &self.disks, &self.options(), roles.iter())?;
        let lines = fronts::describe(&self.disks, &sockets, self.args.tls_required);
        let (sender, events) = mpsc::channel();
        let served = self.start(&fronts, sockets, estate, &sender).and_then(|()| {
            until_ready(&lines, signals, sender);
            self.hear(&mut fronts, &roles, &events)
        });
        match served {
            Ok(Fate::Succeeded) => {
                self.listening.drain(..).for_each(|socket| socket.published.into_iter().for_each(Published::leave));
                return Ok(());
            }
            Ok(Fate::Ends) | Err(_) => fronts.stop(),
        }
        // Nobody answers there any more, and a second signal shall leave no name behind.
        self.listening.clear();
        fronts.wait_drained();
        served.map(|_| ())
    }

    fn options(&self) -> Options {
        Options { nbd: nbd_config(self.args), queues: self.args.queues }
    }

    /// Listens, and goes on with what a server before us had.
    fn start(
        &mut self,
        fronts: &Fronts,
        sockets: Vec<Socket>,
        estate: Option<Estate>,
        events: &mpsc::Sender<Event>,
    ) -> Result<()> {
        for socket in sockets {
            let is_control = socket.role == Role::Control;
            let listening = fronts.listen(socket)?;
            if is_control {
                control::listen(duplicate(&listening.fd)?, control::to(events.clone()))?;
            }
            self.listening.push(listening);
        }
        let Some(mut estate) = estate else { return Ok(()) };
        for (export, connection) in std::mem::take(&mut estate.connections) {
            fronts.adopt(&export, connection)?;
        }
        estate.confirm()
    }

    /// Does what is asked until the end.
    fn hear(&mut self, fronts: &mut Fronts, roles: &[Role], events: &mpsc::Receiver<Event>) -> Result<Fate> {
        // The threads that send end with the process only.
        while let Ok(event) = events.recv() {
            match event {
                Event::Signal => break,
                Event::Asked(link, Request::Resize { export, size_bytes }) => {
                    let answer = match self.resize(fronts, &export, size_bytes) {
                        Ok(()) => Answer::Done,
                        Err(error) => Answer::Error(error.to_string()),
                    };
                    let _ = link.send(&answer, &[]);
                }
                Event::Asked(link, Request::TakeOver { sockets }) => {
                    if self.hand_over(fronts, roles, link, &sockets)? {
                        return Ok(Fate::Succeeded);
                    }
                }
            }
        }
        Ok(Fate::Ends)
    }

    fn resize(&self, fronts: &Fronts, export: &str, size_bytes: u64) -> Result<()> {
        let open = find(&self.disks, export)
            .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no disk is exported as {export:?}")))?;
        let disk = open.disk.clone();
        self.engine.run_on(0, move || async move { disk.resize(size_bytes).await })?;
        fronts.tell_resized(open);
        Ok(())
    }

    /// Gives everything to the process at the other end. When that fails, goes on as before and returns false.
    fn hand_over(&mut self, fronts: &mut Fronts, roles: &[Role], mut link: Link, its: &[String]) -> Result<bool> {
        let unknown = takeover::unknown(&self.listening, its);
        if !unknown.is_empty() {
            let what = format!("the successor does not listen on {}", unknown.join(", "));
            let _ = link.send(&Answer::Error(what), &[]);
            return Ok(false);
        }
        disks::flush(&self.engine, &self.disks);
        let nothing = Fronts::new(&self.engine, &[], &self.options(), [].iter())?;
        let connections = std::mem::replace(fronts, nothing).hand_over();
        let closed = disks::close(&self.engine, std::mem::take(&mut self.disks), Ok(()));
        if closed.is_ok() && takeover::give(&mut link, &self.listening, &connections) {
            return Ok(true);
        }
        complain("the successor does not serve; going on");
        closed?;
        drop(link);
        self.opening.open(&self.engine, &mut self.disks)?;
        *fronts = Fronts::new(&self.engine, &self.disks, &self.options(), roles.iter())?;
        for (socket, role) in self.listening.iter().zip(roles) {
            fronts.listen_on(role, duplicate(&socket.fd)?)?;
        }
        for (export, connection) in connections {
            fronts.adopt(&export, connection)?;
        }
        Ok(false)
    }
}

fn duplicate(fd: &OwnedFd) -> Result<OwnedFd> {
    fd.try_clone().map_err(|source| Error::io("duplicate a socket", source))
}

/// Says that the disks are served, and from then on passes on the signal that ends that.
fn until_ready(lines: &[String], signals: EndSignals, events: mpsc::Sender<Event>) {
    // Guests need their disks also when nobody reads this.
    lines.iter().for_each(|line| drop(try_say(line)));
    notify(&format!("READY=1\nMAINPID={}", std::process::id()));
    signals.on_first(move |_| {
        notify("STOPPING=1");
        let _ = events.send(Event::Signal);
    });
}

fn opening(args: &ServeArgs) -> Opening {
    Opening {
        specs: args.disks.clone(),
        format: args.format,
        cache: args.cache,
        allow_parents: args.parents.allow_parents.clone(),
    }
}

fn nbd_config(args: &ServeArgs) -> ServerConfig {
    let files = args.tls_cert.clone().zip(args.tls_key.clone());
    let tls = files.map(|(cert_chain_pem, key_pem)| TlsConfig {
        cert_chain_pem,
        key_pem,
        client_ca_pem: args.tls_ca.clone(),
        required: args.tls_required,
    });
    ServerConfig { handshake_timeout: args.handshake_timeout, tls, ..ServerConfig::default() }
}

/// Where to listen: role and address.
fn places(args: &ServeArgs) -> Result<Vec<(Role, Address)>> {
    let unix = |path: &PathBuf| {
        std::path::absolute(path).map(Address::Unix).map_err(|e| Error::io("find this folder's path", e))
    };
    let mut places = Vec::new();
    for address in &args.nbd {
        let address = if let Address::Unix(path) = address { unix(path)? } else { address.clone() };
        places.push((Role::Nbd, address));
    }
    for spec in &args.vhost_user {
        places.push((Role::Vhost(spec.export.clone()), unix(&spec.path)?));
    }
    if let Some(path) = &args.control {
        places.push((Role::Control, unix(path)?));
    }
    Ok(places)
}

/// All that a running server gives, if we are to ask one.
fn estate(args: &ServeArgs, passed: &[Bound]) -> Result<Option<Estate>> {
    let Some(control) = args.control.as_ref().filter(|_| args.takeover) else { return Ok(None) };
    let mut keys: Vec<_> = places(args)?.iter().map(|(role, address)| fronts::key(role, Some(address))).collect();
    keys.extend(passed.iter().map(|bound| fronts::key(&Role::Nbd, bound.address.as_ref())));
    takeover::ask(control, keys)
}

/// The sockets to listen on: those passed by systemd, those taken over, and new ones for the rest.
fn sockets(args: &ServeArgs, passed: Vec<Bound>, mut estate: Option<&mut Estate>) -> Result<Vec<Socket>> {
    let mut sockets: Vec<Socket> = passed.into_iter().map(|bound| Socket { role: Role::Nbd, bound }).collect();
    for (role, address) in places(args)? {
        let key = fronts::key(&role, Some(&address));
        let taken = estate.as_mut().and_then(|estate| estate.take_socket(&key));
        let bound = match taken {
            Some(fd) => Bound::taken_over(fd, address),
            None => Bound::new(&address)?,
        };
        sockets.push(Socket { role, bound });
    }
    if sockets.iter().all(|socket| socket.role == Role::Control) {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nowhere to listen")
            .hint("say --vhost-user PATH, --nbd unix:PATH or --nbd tcp:HOST:PORT"));
    }
    Ok(sockets)
}
