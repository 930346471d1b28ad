//! `spile serve`: disks for guests and NBD clients, until a signal, an order or a successor.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::{Error, ErrorKind, Result};
use spile_engine::{Config, EngineKind};
use spile_front_nbd::{ServerConfig, TlsFiles};
use spile_image::Format;
use spile_store::CacheMode;

use super::{Exit, GrowArgs, ParentArgs, PolicyArgs, parse_cache, parse_engine, parse_format, parse_shape, try_say};
use crate::disks::DiskSpec;
use crate::limits::GroupSpec;
use crate::listen::{SocketAccess, parse_group, parse_mode};
use crate::log;
use crate::panics::abort_on_panic;
use crate::serving::disks::Opening;
use crate::serving::fronts::{Options, VhostSpec};
use crate::serving::metrics::Detail;
use crate::serving::metrics::listen::parse_address;
use crate::serving::serve::{self, ControlPlace, Settings};
use crate::serving::successor::Changes;
use crate::signals::ServerSignals;
use crate::tuned::ShapeChoice;
use crate::units::parse_duration;
use crate::uri::Address;

/// Serve disks to virtual machines and NBD clients
///
/// Each DISK is an image file, a block device, an NBD export (nbd://HOST:PORT/NAME, nbd+unix:///NAME?socket=PATH, or nbds for
/// TLS), null:SIZE (reads zeroes, drops writes) or mem:SIZE (memory). A comma in it is doubled.
///
/// The first DISK is the default export (the empty name). Each DISK is also exported under its name=N; where that is
/// not given and there are several, under its file's name without the extension. serial=S is what a guest reads as its
/// disk's serial number (at most 20 bytes; the name, unless given).
///
/// Limits of a DISK (`spile limit`) are its options iops=N, read-iops=N, write-iops=N, bps=SIZE, read-bps=SIZE, write-bps=SIZE and
/// burst=TIME; group=NAME has it share those of a group.
///
/// A socket appears only when it already answers. Who may connect to a Unix socket is what the umask
/// says, or --socket-mode and --socket-group. SIGTERM or
/// SIGINT ends the server in order: no new requests, those in flight are answered, the disks are flushed and closed. A
/// second signal ends it at once. SIGUSR1 writes what was counted to stderr (as `spile show`); SIGHUP and SIGUSR2 change
/// nothing. Started by systemd's socket activation, it serves NBD on the sockets passed, and --nbd
/// may be left out. It tells systemd READY=1 and STOPPING=1. Requests that fail are reported on stderr: the first one,
/// and then each time their number has doubled. A line at the start names the engine that does the I/O; where it is not
/// io_uring, it says why, and what would have to be set for that.
///
/// A guest whose server is killed waits, and goes on with the next server on the same socket as if nothing had been
/// (QEMU: reconnect-ms). With --takeover the next server takes all from a running one, and guests are not even
/// disconnected. NBD clients are: a takeover cuts them off when their requests are answered, and they have to connect
/// again to the same socket.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// What to serve. Options of a disk: name=N, serial=S, format=F, read-only, on-error=P, pause-at-most=T, grow=COMMAND,
    /// grow-ahead=SIZE, grow-timeout=T, shape=S, and limits as `spile limit` has them, such as iops=N
    #[arg(required = true, value_name = "DISK[,OPTION]...")]
    disks: Vec<DiskSpec>,
    /// Serve virtual machines by vhost-user-blk on this Unix socket: the first DISK, or the one exported as NAME (may be
    /// given several times). With `incoming` the disk is still on its way from another host, by NBD: guests may connect, and
    /// wait until `spile resume`
    #[arg(long, value_name = "PATH[,export=NAME][,incoming]")]
    vhost_user: Vec<VhostSpec>,
    /// The most queues that a virtual machine may use for a disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), default_value = "16")]
    queues: u16,
    /// Register the memory of virtual machines with io_uring: direct I/O then costs a little less. It pins that memory: not
    /// for guests with a balloon, free page reporting or virtio-mem, whose data would go to pages that they have given up.
    /// What exceeds the limit on locked memory is served unregistered
    #[arg(long)]
    pin_memory: bool,
    /// The most microseconds that a worker looks for requests of its guests before it sleeps. It does so only while that
    /// pays, and never for an idle disk; 0 switches it off
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(0..=10_000), default_value_t = Config::POLL.as_micros() as u32)]
    poll: u32,
    /// Serve NBD clients here (may be given several times)
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    nbd: Vec<Address>,
    /// The permissions of the Unix sockets for NBD clients and virtual machines, in octal; who may connect needs to write.
    /// Without this the umask decides. Sockets that are taken over stay as they are, and the control socket is for the
    /// server's own user and root alone
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    socket_mode: Option<u32>,
    /// The group of these sockets, by name or number: `--socket-mode 0660 --socket-group kvm` lets a QEMU in that group
    /// connect
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    socket_group: Option<u32>,
    /// The control socket: `spile ls`, `show`, `attach`, `detach`, `resize`, the HTTP API, and a successor with --takeover.
    /// `none` for no such socket [default: named after the first disk, in /run/spile, or in $XDG_RUNTIME_DIR/spile without
    /// root]
    #[arg(long, value_name = "PATH|none")]
    control: Option<PathBuf>,
    /// Take disks, sockets and guests over from the server that listens on the --control socket, which may be given by the server's name, or
    /// else from the one of this host that has the first DISK; start afresh if there is none. It must be given the same disks (the same files and
    /// formats, whatever their paths are), and at least the sockets and queues that that server was started with. What was attached to it, or
    /// detached from it, since is taken over or left out. NBD clients are cut off and have to connect again
    #[arg(long)]
    takeover: bool,
    /// With --takeover: serve these disks on these sockets, and nothing else that the running server has. It refuses that where a disk or a
    /// socket would be lost
    #[arg(long, requires = "takeover")]
    exactly: bool,
    /// Answer Prometheus at this TCP address, too: http://HOST:PORT/metrics. A port alone is of this host (127.0.0.1). Everybody who
    /// reaches the address may read there, and nothing else can be asked. The control socket always answers /metrics. `none`: nowhere [default:
    /// nowhere; with --takeover, where the running server does]
    #[arg(long, value_name = "[HOST:]PORT|none", value_parser = parse_metrics)]
    metrics: Vec<MetricsPlace>,
    /// How many series a disk has in /metrics: `disk` for at most 126 and one for each of its limits (5 more for a thin image on a device), `layer` for each front, image and store, `queue` for each
    /// queue as well
    #[arg(long, value_name = "disk|layer|queue", default_value_t)]
    metrics_detail: Detail,
    /// The way to the disks' bytes: past the page cache (O_DIRECT) or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "direct")]
    cache: CacheMode,
    /// How I/O is done: auto takes io_uring where the kernel has and allows it, else Linux AIO, else helper threads
    #[arg(long, value_name = "auto|uring|aio|threads", value_parser = parse_engine, default_value = "auto")]
    engine: EngineKind,
    /// Worker threads (as many as processors, at most 4, unless given)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,
    /// The format of every DISK that has no format=F, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    grow: GrowArgs,
    /// What to do with the sizes of requests on the way to the disks: `split=SIZE` makes parts of SIZE of larger reads and writes, which are
    /// in flight together (SSDs); `merge=SIZE` makes one request of up to SIZE of neighbours that come together (spinning disks);
    /// `auto` learns whether and how to split; `tuned` does what `spile tune` has recommended for the disk's device.
    /// `spile shape` changes it for a disk that is served [default: off; with --takeover, as the running server has it]
    #[arg(long, value_name = "off|split=SIZE|merge=SIZE|auto|tuned", value_parser = parse_shape)]
    shape: Option<ShapeChoice>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Limits that all disks with group=NAME share, with the options of a DISK's own limits (may be given several times). `spile limit`
    /// changes them for disks that are served [default: none; with --takeover, as the running server has them]
    #[arg(long, value_name = "NAME[,iops=N]...")]
    group: Vec<GroupSpec>,
    /// Write to a disk although another image in its folder names it as its parent. That image is of no use then
    #[arg(long)]
    write_parent: bool,
    /// Write to the old image of a disk that was moved away, such as `disk.moved.vhd`. It lacks what was written since
    #[arg(long)]
    write_moved: bool,
    /// The server's certificate chain (PEM): clients may use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients must show a certificate signed by one of these authorities (PEM): nobody is served without TLS then
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Serve nobody without TLS
    #[arg(long, requires = "tls_cert")]
    tls_required: bool,
    /// The most NBD clients at a time. When all places are taken, the process or host that holds most of them gives one up to a
    /// newcomer: its connection that has been silent for the longest time, 10 seconds at least. Where there is none such, the
    /// newcomer gets a place of a reserve (an eighth of N besides), and when that is taken one of a process or host that holds more than its
    /// share; else it is turned away, and stderr says so. Nobody is cut off for being idle while there are places
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value = "1024")]
    max_connections: u32,
    /// Hang up on clients that have not chosen an export after this long
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    handshake_timeout: Duration,
}

/// Where metrics are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MetricsPlace {
    Nowhere,
    At(Address),
}

fn parse_metrics(text: &str) -> Result<MetricsPlace, String> {
    match text {
        "none" => Ok(MetricsPlace::Nowhere),
        address => parse_address(address).map(MetricsPlace::At),
    }
}

/// Runs `spile serve`.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn run(args: &ServeArgs) -> Result<Exit> {
    log::to_stderr();
    abort_on_panic();
    let signals = ServerSignals::block()?;
    // Guests need their disks also when nobody reads this.
    serve::serve(settings(args)?, signals, |line| drop(try_say(line))).map(|()| Exit::Ok)
}

fn settings(args: &ServeArgs) -> Result<Settings> {
    let control = control(args);
    if args.takeover && control == ControlPlace::None {
        return Err(Error::new(ErrorKind::InvalidInput, "a takeover needs the running server's control socket")
            .hint("say --control PATH"));
    }
    let mut engine = Config { kind: args.engine, poll: Duration::from_micros(args.poll.into()), ..Config::default() };
    engine.workers = args.workers.map_or(engine.workers, usize::from);
    let mut opening = Opening::new(args.format, args.cache, args.parents.allow_parents.clone());
    opening.parent_format = args.parents.backing_format;
    opening.allow_data_file = args.parents.allow_data_file;
    opening.no_lock = args.parents.no_lock;
    opening.policy = args.policy.policy();
    opening.grow = args.grow.options();
    opening.write_parent = args.write_parent;
    opening.write_moved = args.write_moved;
    opening.shape = args.shape;
    args.group.iter().try_for_each(|group| opening.groups.declare(group))?;
    let incoming = args.vhost_user.iter().filter(|spec| spec.is_incoming);
    Ok(Settings {
        opening: opening.with_disks(args.disks.clone()),
        options: Options {
            nbd: nbd_config(args),
            queues: args.queues,
            pins_memory: args.pin_memory,
            incoming: incoming.map(|spec| spec.export.clone()).collect(),
            access: SocketAccess { mode: args.socket_mode, group: args.socket_group },
        },
        engine,
        nbd: args.nbd.clone(),
        vhost_user: args.vhost_user.clone(),
        control,
        metrics: metrics(args),
        keeps_metrics: args.metrics.is_empty(),
        metrics_detail: args.metrics_detail,
        name: args.disks.first().map(DiskSpec::own_name).unwrap_or_default(),
        takes_over: args.takeover,
        is_exact: args.exactly,
        changes: Changes::default(),
    })
}

fn metrics(args: &ServeArgs) -> Vec<Address> {
    let at = |place: &MetricsPlace| match place {
        MetricsPlace::Nowhere => None,
        MetricsPlace::At(address) => Some(address.clone()),
    };
    args.metrics.iter().filter_map(at).collect()
}

fn control(args: &ServeArgs) -> ControlPlace {
    match &args.control {
        None => ControlPlace::ByName,
        Some(path) if path.as_os_str() == "none" => ControlPlace::None,
        Some(path) => ControlPlace::At(path.clone()),
    }
}

fn nbd_config(args: &ServeArgs) -> ServerConfig {
    let files = args.tls_cert.clone().zip(args.tls_key.clone());
    let tls = files.map(|(cert_chain_pem, key_pem)| TlsFiles {
        cert_chain_pem,
        key_pem,
        client_ca_pem: args.tls_ca.clone(),
        // Who shows no certificate must not get in by asking for no TLS.
        required: args.tls_required || args.tls_ca.is_some(),
    });
    let (handshake_timeout, max_connections) = (args.handshake_timeout, args.max_connections as usize);
    ServerConfig { handshake_timeout, max_connections, tls, ..ServerConfig::default() }
}
