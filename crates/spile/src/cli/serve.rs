//! `spile serve`: disks for guests and NBD clients, until a signal or a successor.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{Config, Engine, EngineKind};
use spile_front_nbd::{ServerConfig, TlsConfig};
use spile_front_vhost::Handover;
use spile_image::Format;
use spile_store::CacheMode;

use super::{Exit, ParentArgs, complain, parse_cache, parse_engine, parse_format, try_say};
use crate::disks::DiskSpec;
use crate::listen::{self, Bound, Published};
use crate::log;
use crate::notify::notify;
use crate::serving::control::{self, Answer, Asked, Event, Link, Request};
use crate::serving::disks::{self, Open, Opening, find};
use crate::serving::fronts::{self, Fronts, Listening, Options, Role, Socket, VhostSpec};
use crate::serving::identity::Exported;
use crate::serving::takeover::{self, Estate};
use crate::signals::EndSignals;
use crate::units::parse_duration;
use crate::uri::Address;

/// How often the disks are opened again after a failed takeover, each time with the patience that a busy disk is given.
const REOPEN_ATTEMPTS: u32 = 60;

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
/// disconnected. NBD clients are: a takeover cuts them off when their requests are answered, and they have to connect
/// again to the same socket.
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
    /// Register the memory of virtual machines with io_uring: direct I/O then costs a little less. It pins that memory: not
    /// for guests with a balloon, free page reporting or virtio-mem, whose data would go to pages that they have given up.
    /// What exceeds the limit on locked memory is served unregistered
    #[arg(long)]
    pin_memory: bool,
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
    /// none. It must be given the same disks (the same files and formats, whatever their paths are), and at least the
    /// sockets and queues that that server has. NBD clients are cut off and have to connect again
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
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
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

/// Runs `spile serve`.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn run(args: &ServeArgs) -> Result<Exit> {
    log::to_stderr();
    raise_file_limit();
    let signals = EndSignals::block()?;
    let mut config = Config { kind: args.engine, poll: Duration::from_micros(args.poll.into()), ..Config::default() };
    config.workers = args.workers.map_or(config.workers, usize::from);
    let engine = Engine::start(config)?;
    let opening = opening(args);
    let places = places(args, &opening)?;
    let passed = passed()?;
    let options = Options { nbd: nbd_config(args), queues: args.queues, pins_memory: args.pin_memory };
    let fronts = Fronts::of_nothing(&engine, &options)?;
    // What can be found out is, before the running server is asked to stop.
    let mut estate = estate(args, &opening, &places, &passed)?;
    let sockets = sockets(places, passed, estate.as_mut())?;
    let mut serving = Serving { opening, options, engine, fronts, disks: Vec::new(), listening: Vec::new() };
    let served = serving.run(sockets, estate, signals);
    let Serving { engine, disks, fronts, .. } = serving;
    // Also after a failure: what is open is to be left as other programs expect it.
    let closed = disks::close(&engine, disks, served);
    // They share the disks, and a disk's connection to a server ends with its last share.
    drop(fronts);
    engine.shutdown();
    closed.map(|()| Exit::Ok)
}

/// Takes all the descriptors that we are allowed: a guest of many queues needs a hundred, and twice that while it is handed
/// over. Where it cannot be, fewer are served.
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
}

/// What becomes of the server.
enum Fate {
    /// It ends.
    Ends,
    /// Another goes on with all it had, and will have told so when it hangs up here.
    Succeeded(Asked),
}

impl Serving {
    /// Serves until a signal or a successor comes, and then until what is in flight is answered.
    fn run(&mut self, sockets: Vec<Socket>, mut estate: Option<Estate>, signals: EndSignals) -> Result<()> {
        let roles: Vec<Role> = sockets.iter().map(|socket| socket.role.clone()).collect();
        self.open(&roles)?;
        let lines = fronts::describe(&self.disks, &sockets, self.options.is_tls_required());
        let (sender, events) = mpsc::channel();
        let served = self.start(sockets, estate.as_mut(), &sender).and_then(|()| {
            until_ready(&lines, estate.is_some(), signals, sender);
            // Who served before us ends now.
            drop(estate);
            self.hear(&roles, &events)
        });
        match served {
            Ok(Fate::Succeeded(mut asked)) => {
                self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::leave);
                takeover::wait_for_news(&mut asked.link);
                return Ok(());
            }
            Ok(Fate::Ends) | Err(_) => self.fronts.stop(),
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
    fn start(&mut self, sockets: Vec<Socket>, estate: Option<&mut Estate>, events: &mpsc::Sender<Event>) -> Result<()> {
        for socket in sockets {
            self.listening.push(Listening::publish(socket)?);
        }
        let shares = self.share_sockets()?;
        if let Some(estate) = estate {
            // The last thing that may fail: from its word on, the other server does not go on.
            estate.confirm()?;
            self.listening.iter_mut().filter_map(|socket| socket.published.as_mut()).for_each(Published::take);
            self.adopt(std::mem::take(&mut estate.connections));
        }
        let control = self.listening.iter().position(|socket| socket.role == Role::Control);
        self.listen(shares)?;
        control.map_or(Ok(()), |at| control::listen(self.listening[at].share()?, events.clone()))
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
                complain(format_args!("a guest of export {export:?} is lost: {error}"));
            }
        }
    }

    /// Does what is asked until the end.
    fn hear(&mut self, roles: &[Role], events: &mpsc::Receiver<Event>) -> Result<Fate> {
        // The threads that send end with the process only.
        while let Ok(Event::Asked(mut asked)) = events.recv() {
            let done = match &asked.request {
                Request::Resize { export, size_bytes } => self.resize(export, *size_bytes),
                Request::TakeOver { sockets, queues, disks } => {
                    match self.prepare(sockets, *queues, disks.as_deref()) {
                        Ok(nothing) => match self.hand_over(nothing, roles, &mut asked.link)? {
                            None => return Ok(Fate::Succeeded(asked)),
                            Some(failure) => Err(failure),
                        },
                        Err(refusal) => Err(refusal),
                    }
                }
            };
            asked.answer(&done);
        }
        Ok(Fate::Ends)
    }

    fn resize(&self, export: &str, size_bytes: u64) -> Result<()> {
        let open = find(&self.disks, export)?;
        let disk = open.disk.clone();
        self.engine.run_on(0, move || async move { disk.resize(size_bytes).await })?;
        self.fronts.tell_resized(open);
        Ok(())
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
        // Guests whose disk cannot be flushed have to be told so, when they flush. That a disk opened anew could not.
        disks::flush(&self.engine, &self.disks)?;
        Ok(nothing)
    }

    /// Gives everything to the process at the other end. When that fails, goes on as before and returns why.
    fn hand_over(&mut self, nothing: Fronts, roles: &[Role], link: &mut Link) -> Result<Option<Error>> {
        let fronts = std::mem::replace(&mut self.fronts, nothing);
        let clients = fronts.nbd_connections();
        if clients > 0 {
            complain(format_args!(
                "a takeover cuts off {clients} NBD client(s): they have to connect again (guests on vhost-user go on)"
            ));
        }
        let connections = fronts.hand_over();
        if let Err(error) = self.close() {
            // What a guest believes to be durable may not be. It must not go on as if nothing had been.
            let _ = link.send(&Answer::Error(format!("a disk could not be closed: {error}")), &[]);
            return Err(error);
        }
        let mut given = takeover::give(link, &self.listening, &connections);
        let mut attempts = 0;
        let failure = loop {
            let Err(failure) = given.and_then(|()| takeover::give_the_word(link)) else { return Ok(None) };
            complain(format_args!("nothing is handed over: {failure}"));
            match self.open(roles) {
                Ok(()) => break failure,
                // Who is silent and has the disks may yet speak. Nobody else could serve them.
                Err(error) if error.kind() == ErrorKind::Busy && failure.kind() == ErrorKind::TimedOut => {
                    self.close()?;
                    given = Ok(());
                }
                // Who is gone had begun with them, and the kernel keeps their locks until its last request has ended.
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
        Ok(Some(failure))
    }

    fn close(&mut self) -> Result<()> {
        disks::close(&self.engine, std::mem::take(&mut self.disks), Ok(()))
    }
}

/// Says that the disks are served, and from then on passes on the signal that ends that.
fn until_ready(lines: &[String], is_successor: bool, signals: EndSignals, events: mpsc::Sender<Event>) {
    // Guests need their disks also when nobody reads this.
    lines.iter().for_each(|line| drop(try_say(line)));
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

fn opening(args: &ServeArgs) -> Opening {
    Opening {
        specs: args.disks.clone(),
        format: args.format,
        cache: args.cache,
        allow_parents: args.parents.allow_parents.clone(),
        parent_format: args.parents.backing_format,
        allow_data_file: args.parents.allow_data_file,
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

/// A place to listen, and its [`fronts::key`].
struct Place {
    role: Role,
    address: Address,
    key: String,
}

/// Where to listen.
fn places(args: &ServeArgs, opening: &Opening) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    let mut add = |role, disk: Option<&str>, address: &Address| -> Result<()> {
        let absolute = |path| std::path::absolute(path).map_err(|e| Error::io("find this folder's path", e));
        let address = if let Address::Unix(path) = address { Address::Unix(absolute(path)?) } else { address.clone() };
        if matches!(address, Address::Unix(_)) && places.iter().any(|place: &Place| place.address == address) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{address} is given twice")));
        }
        places.push(Place { key: fronts::key(&role, disk, Some(&address)), role, address });
        Ok(())
    };
    for address in &args.nbd {
        add(Role::Nbd, None, address)?;
    }
    for spec in &args.vhost_user {
        let disk = opening.identity(&spec.export)?;
        add(Role::Vhost(spec.export.clone()), Some(&disk), &Address::Unix(spec.path.clone()))?;
    }
    if let Some(path) = &args.control {
        add(Role::Control, None, &Address::Unix(path.clone()))?;
    }
    Ok(places)
}

/// The sockets that systemd passed.
fn passed() -> Result<Vec<Socket>> {
    let bound = listen::from_systemd()?.into_iter();
    let socket =
        |bound: Bound| Socket { role: Role::Nbd, key: fronts::key(&Role::Nbd, None, bound.address.as_ref()), bound };
    Ok(bound.map(socket).collect())
}

/// All that a running server gives, if we are to ask one.
fn estate(args: &ServeArgs, opening: &Opening, places: &[Place], passed: &[Socket]) -> Result<Option<Estate>> {
    if passed.is_empty() && places.iter().all(|place| place.role == Role::Control) {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nowhere to listen")
            .hint("say --vhost-user PATH, --nbd unix:PATH or --nbd tcp:HOST:PORT"));
    }
    let Some(control) = args.control.as_ref().filter(|_| args.takeover) else { return Ok(None) };
    let keys = places.iter().map(|place| &place.key).chain(passed.iter().map(|socket| &socket.key));
    takeover::ask(control, keys.cloned().collect(), args.queues, opening.exported())
}

/// The sockets to listen on: those passed by systemd, those taken over, and new ones for the rest.
fn sockets(places: Vec<Place>, passed: Vec<Socket>, mut estate: Option<&mut Estate>) -> Result<Vec<Socket>> {
    let mut sockets = passed;
    for Place { role, address, key } in places {
        let taken = estate.as_mut().and_then(|estate| estate.take_socket(&key));
        let bound = match taken {
            Some(fd) => Bound::taken_over(fd, address),
            None => Bound::after_asking(&address, role.question())?,
        };
        sockets.push(Socket { role, key, bound });
    }
    Ok(sockets)
}
