//! `spile xen-backend` and `spile xen-disk`: disks for Xen guests.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rustix::event::{EventfdFlags, eventfd};
use spile_core::{Error, Result};
use spile_engine::{Config, EngineKind};
use spile_front_blkif::pages::Access;
use spile_store::CacheMode;

use super::xen_place::XenPlace;
use super::{Exit, GrowArgs, ParentArgs, PolicyArgs, parse_cache, parse_engine, parse_shape, try_say};
use crate::grow::GrowOptions;
use crate::listen::Bound;
use crate::log::{self, complain};
use crate::notify::notify;
use crate::panics::abort_on_panic;
use crate::process::raise_file_limit;
use crate::serving::disks::Opening;
use crate::serving::fronts::Role;
use crate::serving::metrics::listen::{listen, parse_address};
use crate::serving::metrics::{Detail, Exporter, Source};
use crate::signals::ServerSignals;
use crate::tuned::ShapeChoice;
use crate::uri::Address;
use crate::xen::Place;
use crate::xen::backend::Backend;
use crate::xen::disk::{Options, access_name, parse_access, serve};

/// Serve disks to Xen guests
///
/// Watches the back end's folder in xenstore and starts a process for each disk that a toolstack makes there. A process that
/// dies is started again, and its guest goes on without an error. The key `params` says which disk it is:
/// [vhd:|qcow2:|raw:]PATH, where without a prefix the extension tells the format.
///
/// The disks' processes go on when this process ends, also when a signal ends it. The next one finds them by their pid files,
/// RUN-DIR/DOMAIN-DEVICE.pid. A disk grows by `spile resize RUN-DIR/DOMAIN-DEVICE.control SIZE`; `spile ls` lists the disks
/// of /run/spile. The run folder also has what the next process needs when a disk's process is killed, so it must be in
/// memory (tmpfs).
#[derive(Debug, Args)]
pub struct XenBackendArgs {
    /// The type of disks: the folder /local/domain/N/backend/TYPE in xenstore. `vbd` is also what the kernel's own back end
    /// takes: xen-blkback must not be loaded then
    #[arg(long = "type", value_name = "TYPE", default_value = "vbd")]
    kind: String,
    /// Answer Prometheus at this TCP address, for all servers with control sockets in the run folder: http://HOST:PORT/metrics. A port
    /// alone is of this host (127.0.0.1)
    #[arg(long, value_name = "[HOST:]PORT", value_parser = parse_address)]
    metrics: Option<Address>,
    /// How many series a disk has in /metrics: `disk` for at most 150, `layer` for each front, image and store, `queue` for each
    /// queue as well
    #[arg(long, value_name = "disk|layer|queue", default_value_t)]
    metrics_detail: Detail,
    #[command(flatten)]
    disk: DiskArgs,
}

/// Serve one disk to a Xen guest; `spile xen-backend` starts this
///
/// SIGTERM ends it in order: requests that were taken are answered, and guest and xenstore are left as they are, for the next
/// process.
#[derive(Debug, Args)]
pub struct XenDiskArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// The back end's path in xenstore, such as /local/domain/0/backend/vbd/3/51712
    #[arg(value_name = "BACKEND-PATH")]
    path: String,
}

/// How disks are served.
#[derive(Debug, Args)]
struct DiskArgs {
    #[command(flatten)]
    place: XenPlace,
    /// The folder for pid files, control sockets and journals; it must be in memory
    #[arg(long, value_name = "DIR", default_value = "/run/spile")]
    run_dir: PathBuf,
    /// How guests' memory is reached: by grant copy, by grant map, by grant map and a copy, or by persistent grants. A back
    /// end's key `spile-access` says it for one disk
    #[arg(long, value_name = "copy|map|map-copy|persistent", value_parser = parse_access, default_value = "copy")]
    access: Access,
    /// The most rings that a guest may use for a disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64), default_value = "4")]
    queues: u16,
    /// The most segments (each at most a page) of one indirect request; 0 for no such requests, as tapdisk3
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=256), default_value = "256")]
    max_indirect: u16,
    /// Offer guests rings of their own for responses, an extension of Spile's: more requests are in flight on one page
    #[arg(long)]
    split_rings: bool,
    /// Note when the last N requests passed which place, in RUN-DIR/DOMAIN-DEVICE.trace; 0 for none
    #[arg(long, value_name = "N", default_value = "0")]
    trace: u32,
    /// The most microseconds that a worker looks for requests before it sleeps; 0 switches it off
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(0..=10_000), default_value_t = Config::POLL.as_micros() as u32)]
    poll: u32,
    /// The way to the disks' bytes: past the page cache (O_DIRECT) or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "direct")]
    cache: CacheMode,
    /// How I/O is done: auto takes io_uring where the kernel has and allows it, else Linux AIO, else helper threads
    #[arg(long, value_name = "auto|uring|aio|threads", value_parser = parse_engine, default_value = "auto")]
    engine: EngineKind,
    /// Worker threads of a disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), default_value = "1")]
    workers: u16,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    grow: GrowArgs,
    /// What to do with the sizes of requests on the way to the disks, as for `spile serve` (off, unless given). `spile shape` changes it for a
    /// disk that is served
    #[arg(long, value_name = "off|split=SIZE|merge=SIZE|auto|tuned", value_parser = parse_shape)]
    shape: Option<ShapeChoice>,
    #[command(flatten)]
    parents: ParentArgs,
    /// Write to a disk although another image in its folder names it as its parent. That image is of no use then
    #[arg(long)]
    write_parent: bool,
    /// Write to the old image of a disk that was moved away, such as `disk.moved.vhd`. It lacks what was written since
    #[arg(long)]
    write_moved: bool,
}

impl DiskArgs {
    /// The arguments of a disk's process with these settings.
    fn arguments(&self) -> Vec<OsString> {
        let cache = if self.cache == CacheMode::Page { "page" } else { "direct" };
        let mut words: Vec<OsString> = vec!["xen-disk".into()];
        let mut pair = |option: &str, value: OsString| words.extend([option.into(), value]);
        pair("--run-dir", self.run_dir.clone().into());
        pair("--access", access_name(self.access).into());
        pair("--queues", self.queues.to_string().into());
        pair("--max-indirect", self.max_indirect.to_string().into());
        pair("--trace", self.trace.to_string().into());
        pair("--poll", self.poll.to_string().into());
        pair("--cache", cache.into());
        pair("--engine", self.engine.to_string().into());
        pair("--workers", self.workers.to_string().into());
        self.shape.iter().for_each(|shape| pair("--shape", shape.to_string().into()));
        words.extend(self.split_rings.then(|| "--split-rings".into()));
        words.extend(self.policy.arguments());
        words.extend(self.grow.arguments());
        words.extend(self.parents.arguments());
        words.extend(self.write_parent.then(|| "--write-parent".into()));
        words.extend(self.write_moved.then(|| "--write-moved".into()));
        words.extend(self.place.arguments());
        words
    }
}

/// Answers scrapes for all servers of the run folder.
fn answer_scrapes(address: &Address, args: &XenBackendArgs) -> Result<()> {
    let (fd, _) = Bound::after_asking(address, Role::Metrics.question())?.publish()?;
    let source = Source::Folder(args.disk.run_dir.as_path().into());
    listen(fd, Exporter::new(source, args.metrics_detail))
}

/// Runs `spile xen-backend`.
///
/// # Errors
/// When xenstore cannot be reached, or is gone.
pub fn run(args: &XenBackendArgs) -> Result<Exit> {
    log::to_stderr();
    abort_on_panic();
    // Each disk's process takes one here.
    raise_file_limit();
    // Here somebody reads the error; the disks' processes have no terminal.
    args.disk.grow.options().check()?;
    let signals = ServerSignals::block()?;
    let store = args.disk.place.open()?;
    let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| Error::io("make an eventfd", errno.into()))?;
    let bell = stop.try_clone().map_err(|source| Error::io("duplicate an eventfd", source))?;
    let mut backend = Backend::new(store, &args.kind, &args.disk.run_dir, args.disk.arguments())?;
    let tell = || {
        complain("no guest's I/O passes through this process: send SIGUSR1 to a disk's process, or use `spile show`")
    };
    signals.hear(tell, move |_| {
        notify("STOPPING=1");
        let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
    });
    if let Some(address) = &args.metrics {
        answer_scrapes(address, args)?;
    }
    let _ = try_say(format_args!("serving the disks of type {} to Xen guests", args.kind));
    notify("READY=1");
    backend.run(&stop).map(|()| Exit::Ok)
}

/// Runs `spile xen-disk`.
///
/// # Errors
/// As [`serve`].
pub fn run_disk(args: &XenDiskArgs) -> Result<Exit> {
    log::to_stderr();
    abort_on_panic();
    let signals = ServerSignals::block()?;
    let disk = &args.disk;
    let config = Config {
        kind: disk.engine,
        workers: disk.workers.into(),
        poll: Duration::from_micros(disk.poll.into()),
        ..Config::default()
    };
    let mut opening = Opening::new(None, disk.cache, disk.parents.allow_parents.clone());
    opening.parent_format = disk.parents.backing_format;
    opening.allow_data_file = disk.parents.allow_data_file;
    opening.no_lock = disk.parents.no_lock;
    opening.policy = disk.policy.policy();
    opening.grow = GrowOptions { leaves_others: true, ..disk.grow.options() };
    opening.shape = disk.shape;
    opening.write_parent = disk.write_parent;
    opening.write_moved = disk.write_moved;
    let options = Options {
        place: disk.place.clone(),
        run_dir: disk.run_dir.clone(),
        access: disk.access,
        queues: disk.queues,
        max_indirect: disk.max_indirect,
        splits_rings: disk.split_rings,
        trace_records: disk.trace,
    };
    serve(&args.path, &options, config, opening, signals)
        .map(|_| Exit::Ok)
        .map_err(|error| of_device(&args.path, &error))
}

/// The error with the domain and the device that it is about: the last two parts of the back end's path.
fn of_device(backend_path: &str, error: &Error) -> Error {
    let mut parts = backend_path.rsplit('/');
    let (device, domain) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    Error::new(error.kind(), format!("domain {domain}, device {device}: {error}"))
}
