//! `spile load`: the load generator's command line.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::{Args, ValueEnum};
use nix::sys::signal::Signal;
use serde::Serialize;
use spile_core::{Error, ErrorKind, Locator, Result, ResultExt};
use spile_store::own::read_named;
use utoipa::ToSchema;

use super::output::write_report;
use super::{Exit, complain, print_json, say, say_lines};
use crate::disks;
use crate::load::GuestOptions;
use crate::load::{self, LoadOutcome, Model, Options, Pattern, Progress, Report, VhostOptions};
use crate::signals::EndSignals;
use crate::units::{format_count, format_rate, parse_duration, parse_size};
use crate::uri::Target;
use crate::xen::params;

/// The patterns, named as in fio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rw {
    Read,
    Write,
    #[value(name = "randread")]
    RandomRead,
    #[value(name = "randwrite")]
    RandomWrite,
    #[value(name = "rw")]
    Mixed,
    #[value(name = "randrw")]
    RandomMixed,
}

/// Put a load on a server of disks and report throughput, latency and queue depth
///
/// The load is a client of any NBD server, a guest of any vhost-user-blk server, or a Xen guest on the Xen of `spile xen-lab`,
/// where it makes a disk and removes it in the end. Each connection (of a guest, each queue) has its own equal part of the
/// disk. With --verify every 512-byte sector that is written carries its offset, a version and a checksum. Reads are
/// checked, and at the end everything that was written is read back over other connections. Ctrl-C ends the load early
/// and shows its figures. WRITES DESTROY what is on the disk.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// The disk: nbd+unix:///NAME?socket=PATH, nbd://HOST:PORT/NAME (nbds for TLS), vhost-user:PATH or xen-lab:DIR
    uri: Target,
    /// The pattern of requests
    #[arg(long, value_enum, default_value = "randread")]
    rw: Rw,
    /// Bytes in a request
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = parse_size)]
    bs: u64,
    /// Requests in flight on each connection
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65536))]
    depth: u32,
    /// Connections, or queues of a guest
    #[arg(long, visible_alias = "queues", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
    /// Stop after this long (10s when no other end is given)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    runtime: Option<Duration>,
    /// Stop after this many bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "ios")]
    size: Option<u64>,
    /// Stop after this many requests
    #[arg(long, value_name = "N")]
    ios: Option<u64>,
    /// Use only this many bytes from the start of the disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    span: Option<u64>,
    /// How many of a hundred requests are reads, for rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 70,
          value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmix: u8,
    /// Stamp what is written and check what is read
    #[arg(long)]
    verify: bool,
    /// Keep in FILE which versions were written and acknowledged, also when the connection is lost
    #[arg(long, value_name = "FILE", requires = "verify")]
    save_model: Option<PathBuf>,
    /// Write nothing: read back what FILE, made by --save-model, says was acknowledged
    #[arg(long, value_name = "FILE", conflicts_with_all = ["verify", "size", "ios", "runtime"])]
    verify_model: Option<PathBuf>,
    /// The seed of offsets and directions
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Make this many requests a second in all, instead of as many as the server can answer
    #[arg(long, value_name = "IOPS")]
    rate: Option<f64>,
    /// Make every write durable before it is answered
    #[arg(long)]
    fua: bool,
    /// A flush after every N writes of a connection
    #[arg(long, value_name = "N", default_value_t = 0)]
    flush_every: u64,
    /// Measure the CPU time of this process too
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    #[command(flatten)]
    vhost: VhostArgs,
    #[command(flatten)]
    guest: GuestArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Options for a vhost-user target only.
#[derive(Debug, Args)]
#[command(next_help_heading = "With vhost-user (--poll with xen-lab too)")]
struct VhostArgs {
    /// Look for answers all the time instead of sleeping until called
    #[arg(long)]
    poll: bool,
    /// Have the guest's memory in pages of 2 MiB
    #[arg(long)]
    huge_pages: bool,
    /// Scatter each request's data over segments of this size, as a guest with 4 KiB pages does [default: one piece]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    segment: Option<u64>,
    /// Go on over a restart of the server, and wait this long for it
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    reconnect: Option<Duration>,
}

impl VhostArgs {
    fn options(&self, target: &Target) -> Result<VhostOptions> {
        let invalid = |message: &str| Error::new(ErrorKind::InvalidInput, message);
        let segment = self.segment.map(|bytes| u32::try_from(bytes).ok().filter(|bytes| *bytes > 0));
        let segment_bytes = match segment {
            Some(None) => return Err(invalid("--segment must be above 0 and below 4 GiB")),
            segment => segment.flatten(),
        };
        let Self { poll, huge_pages, reconnect, .. } = *self;
        let options = VhostOptions { poll, huge_pages, segment_bytes, reconnect };
        match target {
            Target::Nbd(_) if options != VhostOptions::default() => {
                Err(invalid("--poll, --huge-pages, --segment and --reconnect are for guests only"))
            }
            Target::Lab(_) if options != (VhostOptions { poll, ..VhostOptions::default() }) => {
                Err(invalid("--huge-pages, --segment and --reconnect are for vhost-user:PATH only"))
            }
            _ => Ok(options),
        }
    }
}

/// Options for a Xen guest only.
#[derive(Debug, Args)]
#[command(next_help_heading = "With xen-lab")]
struct GuestArgs {
    /// The guest's number [default: any that is free]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=32751))]
    domain: Option<u16>,
    /// What the back end is to serve: the key `params` of the disk
    #[arg(long, value_name = "[vhd:|qcow2:|raw:]PATH")]
    params: Option<String>,
    /// How the back end is to reach the guest's memory, instead of the way that it was started with
    #[arg(long, value_name = "copy|map|map-copy|persistent")]
    access: Option<String>,
    /// The ring has 2 to this many pages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4))]
    ring_order: Option<u32>,
    /// Have responses in a ring of their own, of 2 to this many pages [default: 0], so that 128 requests can be in flight
    /// with one page of each; for a back end that was started with --split-rings
    #[arg(long, value_name = "ORDER", num_args = 0..=1, default_missing_value = "0",
          value_parser = clap::value_parser!(u32).range(0..=4))]
    split_responses: Option<u32>,
    /// Segments of an indirect request at most; none unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=256))]
    indirect: Option<u32>,
    /// Be a guest of 32 bits
    #[arg(long)]
    x86_32: bool,
}

impl GuestArgs {
    fn options(&self, target: &Target, poll: bool) -> Result<GuestOptions> {
        let options = GuestOptions {
            domain: self.domain,
            params: self.params.as_deref().map(checked_params).transpose()?,
            access: self.access.clone(),
            poll,
            ring_order: self.ring_order.unwrap_or(0),
            split_responses: self.split_responses,
            indirect_segments: self.indirect.unwrap_or(0),
            is_32_bit: self.x86_32,
        };
        match target {
            Target::Lab(_) => Ok(options),
            _ if options == (GuestOptions { poll, ..GuestOptions::default() }) => Ok(options),
            _ => {
                let what = "--domain, --params, --access, --ring-order, --split-responses, --indirect and --x86-32 are \
                            for xen-lab:DIR only";
                Err(Error::new(ErrorKind::InvalidInput, what))
            }
        }
    }
}

/// What `--verify-model` found.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadBack {
    /// Blocks that were read back.
    read_back_blocks: u64,
    /// Those of them whose writes were acknowledged.
    acknowledged_blocks: u64,
    /// The first wrong sectors, as text.
    mismatches: Vec<String>,
}

/// Runs `spile load`.
///
/// # Errors
/// When the load could not start or was cut short.
pub fn run(args: &LoadArgs) -> Result<Exit> {
    if let Some(path) = &args.verify_model {
        return verify_model(args, path);
    }
    let options = options(args)?;
    let ended = end_on_signal(options.stop.clone())?;
    let mut line = ProgressLine::new();
    let mut waiting = Waiting::begin(options.guest.params.as_deref());
    let outcome = load::run(&options, |now| {
        waiting = None;
        line.show(now);
    })?;
    line.clear();
    if let Some(path) = &args.save_model {
        save_model(path, &outcome.models)?;
    }
    let report = Report::new(&options, &outcome);
    if args.json {
        print_json(&report)?;
    } else {
        say_lines(report.to_text().trim_end());
    }
    verdict(outcome, ended.get().copied())
}

/// A thread that says what a guest waits for, unless this is dropped within a second.
struct Waiting {
    _until_dropped: Sender<()>,
}

impl Waiting {
    fn begin(params: Option<&str>) -> Option<Self> {
        let line = format!("waiting for a back end to serve {}", params?);
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            if receiver.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                complain(line);
            }
        });
        Some(Self { _until_dropped: sender })
    }
}

/// `params` with an absolute path, because the back end works in another folder; a file that is not there is an error, for the
/// back end would only try it again and again.
fn checked_params(params: &str) -> Result<String> {
    let spec = params::parse(params, false)?;
    let Locator::Path(path) = &spec.source else { return Ok(params.to_owned()) };
    disks::find(&spec.source)?;
    let whole = std::path::absolute(path).map_err(|e| Error::io("cannot find this folder's path", e))?;
    let path = path.to_string_lossy();
    let prefix = params.strip_suffix(path.as_ref()).unwrap_or_default();
    Ok(format!("{prefix}{}", whole.display()))
}

/// A signal ends the run in order, and the result says which signal it was. A second signal ends the process.
fn end_on_signal(stop: Arc<AtomicBool>) -> Result<Arc<OnceLock<Signal>>> {
    let ended = Arc::new(OnceLock::new());
    let note = ended.clone();
    EndSignals::block()?.on_first(move |signal| {
        let _ = note.set(signal);
        stop.store(true, Ordering::Relaxed);
    });
    Ok(ended)
}

fn options(args: &LoadArgs) -> Result<Options> {
    let (random, read_percent) = match args.rw {
        Rw::Read => (false, 100),
        Rw::Write => (false, 0),
        Rw::Mixed => (false, args.rwmix),
        Rw::RandomRead => (true, 100),
        Rw::RandomWrite => (true, 0),
        Rw::RandomMixed => (true, args.rwmix),
    };
    let invalid = |message: &str| Error::new(ErrorKind::InvalidInput, message);
    let block_bytes = u32::try_from(args.bs).map_err(|_| invalid("--bs must be below 4 GiB"))?;
    if args.rate.is_some_and(|rate| rate.is_nan() || rate <= 0.0) {
        return Err(invalid("--rate must be above 0"));
    }
    let ios = args.ios.or(args.size.map(|size| size.div_ceil(args.bs.max(1))));
    let runtime = args.runtime.or(ios.is_none().then_some(Duration::from_secs(10)));
    Ok(Options {
        pattern: Pattern { random, read_percent },
        block_bytes,
        depth: args.depth,
        connections: args.connections,
        runtime,
        ios,
        span_bytes: args.span,
        verify: args.verify,
        seed: args.seed,
        rate: args.rate,
        fua: args.fua,
        flush_every: args.flush_every,
        server_pid: args.server_pid,
        vhost: args.vhost.options(&args.uri)?,
        guest: args.guest.options(&args.uri, args.vhost.poll)?,
        ..Options::new(args.uri.clone())
    })
}

fn verdict(outcome: LoadOutcome, ended: Option<Signal>) -> Result<Exit> {
    outcome.mismatches.iter().for_each(|mismatch| complain(format_args!("mismatch: {mismatch}")));
    match (outcome.error, ended) {
        _ if !outcome.mismatches.is_empty() => Ok(Exit::Corrupt),
        (Some(error), _) => Err(error),
        (None, Some(signal)) => Ok(Exit::Ended(signal)),
        (None, None) => Ok(Exit::Ok),
    }
}

fn save_model(path: &std::path::Path, models: &[Model]) -> Result<()> {
    let bytes = serde_json::to_vec(models).map_err(|e| Error::new(ErrorKind::InvalidInput, "model").caused_by(e))?;
    write_report(path, "[{", &bytes)
}

/// No model is longer.
const MOST_MODEL_BYTES: u64 = 256 << 20;

fn verify_model(args: &LoadArgs, path: &std::path::Path) -> Result<Exit> {
    let bytes = read_named(path, MOST_MODEL_BYTES)?;
    let models: Vec<Model> = serde_json::from_slice(&bytes)
        .map_err(|e| Error::new(ErrorKind::InvalidInput, "not a model of --save-model").caused_by(e).at_path(path))?;
    models.iter().try_for_each(Model::validate).at_path(path)?;
    let acknowledged: u64 = models.iter().map(Model::acknowledged_blocks).sum();
    let (blocks, mismatches) = load::verify_as(&options(args)?, &models)?;
    if args.json {
        let mismatches = mismatches.iter().map(ToString::to_string).collect();
        print_json(&ReadBack { read_back_blocks: blocks, acknowledged_blocks: acknowledged, mismatches })?;
    } else if mismatches.is_empty() {
        say(format_args!("verified: {blocks} blocks read back, {acknowledged} of them acknowledged, all right"));
    }
    mismatches.iter().for_each(|mismatch| complain(format_args!("mismatch: {mismatch}")));
    Ok(if mismatches.is_empty() { Exit::Ok } else { Exit::Corrupt })
}

/// One line on stderr, rewritten each second, when that is a terminal.
pub struct ProgressLine {
    terminal: bool,
    last: Option<Progress>,
}

impl ProgressLine {
    /// Shows nothing before the first call of `show`.
    pub fn new() -> Self {
        Self { terminal: std::io::IsTerminal::is_terminal(&std::io::stderr()), last: None }
    }

    /// Shows the rates since the last call.
    pub fn show(&mut self, now: Progress) {
        let zero = Progress { elapsed: Duration::ZERO, reads: 0, writes: 0, bytes: 0 };
        let last = self.last.replace(now).unwrap_or(zero);
        let seconds = (now.elapsed - last.elapsed).as_secs_f64().max(1e-9);
        let per_s = |now: u64, last: u64| (now - last) as f64 / seconds;
        if self.terminal {
            eprint!(
                "\r{:4.0} s   {:>8} reads/s   {:>8} writes/s   {:>10}   ",
                now.elapsed.as_secs_f64(),
                format_count(per_s(now.reads, last.reads)),
                format_count(per_s(now.writes, last.writes)),
                format_rate(per_s(now.bytes, last.bytes)),
            );
        }
    }

    /// Wipes the line.
    pub fn clear(&self) {
        if self.terminal && self.last.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}
