//! A load generator for servers of disks: pipelined, over several connections, with verification.
//!
//! The pump drives a connection; how a request goes to a server and back is a `Transport`: NBD's, a queue of a
//! vhost-user-blk device, or one of a Xen guest.
//!
//! [`run`] connects, runs and merges; [`verify`] reads back what a model says was written, for instance after
//! the server was killed. `spile load`, `spile demo` and the tests use the same functions.

mod blkif;
mod guest;
mod model;
mod nbd;
mod plan;
mod pump;
mod report;
mod stamp;
mod stats;
mod transport;
mod vhost;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use spile_core::{Error, ErrorKind, OpenMode, Result};

pub use blkif::GuestOptions;
pub use model::Model;
pub use plan::{Direction, Rng};
pub use report::{LaneReport, Report};
pub use stamp::{Expected, Found, Mismatch};
pub use stats::{Lane, Stats};
pub use vhost::VhostOptions;

use blkif::BlkifEndpoint;
use nbd::NbdEndpoint;
use plan::{Plan, split};
use pump::{Outcome, Pump, Source, Task};
use spile_server::units::format_size;
use spile_server::uri::Target;
use stats::Counters;
use transport::{Endpoint, Info, Ready, Shape};
use vhost::VhostEndpoint;

/// The pattern of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// At random, or from the start of each connection's region to its end and round again.
    pub random: bool,
    /// How many of a hundred requests are reads.
    pub read_percent: u8,
}

/// What to do. Connections share the disk in equal regions, one each. Of a vhost-user device, its queues are the
/// connections.
#[derive(Clone, Debug)]
pub struct Options {
    /// The disk.
    pub uri: Target,
    /// Which requests.
    pub pattern: Pattern,
    /// Bytes in a request.
    pub block_bytes: u32,
    /// Requests in flight on each connection.
    pub depth: u32,
    /// Connections, each with a thread.
    pub connections: u32,
    /// Stop after this long.
    pub runtime: Option<Duration>,
    /// Stop after this many requests in all.
    pub ios: Option<u64>,
    /// The first byte that is used, a multiple of `block_bytes`.
    pub start_bytes: u64,
    /// Use only this many bytes from there.
    pub span_bytes: Option<u64>,
    /// Stamp what is written, check what is read, and read everything back at the end.
    pub verify: bool,
    /// The seed of offsets and directions.
    pub seed: u64,
    /// Requests a second in all.
    pub rate: Option<f64>,
    /// Writes ask to be durable.
    pub fua: bool,
    /// A flush after this many writes of a connection; 0 = none.
    pub flush_every: u64,
    /// The server's process, whose CPU time is to be measured.
    pub server_pid: Option<u32>,
    /// For vhost-user: how our guest behaves.
    pub vhost: VhostOptions,
    /// For a Xen guest: its disk, and how it behaves.
    pub guest: GuestOptions,
    /// How often `progress` is called.
    pub report_every: Duration,
    /// Set from elsewhere to end the run early; what was written is then not read back.
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// Random 4 KiB reads of `uri` at depth 32 over one connection, without an end.
    pub fn new(uri: impl Into<Target>) -> Self {
        Self {
            uri: uri.into(),
            pattern: Pattern { random: true, read_percent: 100 },
            block_bytes: 4096,
            depth: 32,
            connections: 1,
            runtime: None,
            ios: None,
            start_bytes: 0,
            span_bytes: None,
            verify: false,
            seed: 1,
            rate: None,
            fua: false,
            flush_every: 0,
            server_pid: None,
            vhost: VhostOptions::default(),
            guest: GuestOptions::default(),
            report_every: Duration::from_secs(1),
            stop: Arc::default(),
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Since the start.
    pub elapsed: Duration,
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Bytes of both.
    pub bytes: u64,
}

/// What came of a run. When a connection was lost or a request refused, `error` says so and the rest still holds.
#[derive(Debug)]
pub struct LoadOutcome {
    /// All connections' figures together.
    pub stats: Stats,
    /// One for each connection, when verified.
    pub models: Vec<Model>,
    /// The first wrong sectors.
    pub mismatches: Vec<Mismatch>,
    /// Blocks read back and found right after the run, when verified.
    pub read_back_blocks: u64,
    /// Why it stopped early.
    pub error: Option<Error>,
    /// It was told to end early.
    pub interrupted: bool,
    /// How often a connection was taken up again after the server's end.
    pub reconnects: u32,
    /// CPU time of this process over the run.
    pub client_cpu: Duration,
    /// CPU time of the server over the run, if its process was given.
    pub server_cpu: Option<Duration>,
}

/// Runs a load, and reads back what it wrote if it is verified. `progress` is called every [`Options::report_every`], about.
///
/// # Errors
/// When it could not start. What happens after that is in the outcome.
pub fn run(options: &Options, progress: impl FnMut(Progress)) -> Result<LoadOutcome> {
    let mut outcome = run_only(options, progress)?;
    read_back(options, &mut outcome);
    Ok(outcome)
}

/// [`run`] without the reading back.
///
/// # Errors
/// As [`run`].
pub fn run_only(options: &Options, mut progress: impl FnMut(Progress)) -> Result<LoadOutcome> {
    match &options.uri {
        Target::Nbd(uri) => {
            let mode = if options.pattern.read_percent == 100 { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
            load(options, NbdEndpoint::connect(uri, options.connections, mode)?, &mut progress)
        }
        Target::Vhost(path) => {
            let endpoint = VhostEndpoint::connect(path, options.connections, options.vhost)?;
            load(options, endpoint, &mut progress)
        }
        Target::Lab(dir) => {
            let endpoint = BlkifEndpoint::connect(dir, options.connections, options.guest.clone())?;
            load(options, endpoint, &mut progress)
        }
    }
}

fn load<E: Endpoint>(options: &Options, endpoint: E, progress: &mut dyn FnMut(Progress)) -> Result<LoadOutcome> {
    let blocks = usable_blocks(options, endpoint.info())?;
    let first = options.start_bytes / u64::from(options.block_bytes);
    let run = run_stamp(options.seed);
    let Pattern { random, read_percent } = options.pattern;
    let work = split(blocks, u64::from(options.connections)).into_iter().enumerate().map(|(number, region)| {
        let region = region.start + first..region.end + first;
        let rng = Rng::new(options.seed, number as u64);
        let model = options.verify.then(|| Model::new(run, options.block_bytes, region.clone()));
        (task(options, number as u64), Source::Plan(Plan::new(rng, region, random, read_percent)), model)
    });
    let work: Vec<Work> = work.collect();
    let shape = Shape {
        depth: options.depth,
        block_bytes: options.block_bytes,
        writes: read_percent < 100,
        keep_data: options.verify,
    };
    let ((outcomes, cpu), reconnects) = endpoint.run(shape, |connections| {
        let cpu = CpuMeter::start(options.server_pid)?;
        let outcomes = drive(work, connections, options.report_every, progress);
        Ok((outcomes, cpu.stop()))
    })?;
    Ok(LoadOutcome { interrupted: options.is_stopped(), reconnects, ..merge(outcomes, cpu) })
}

/// Reads back every block that `models` say was written, each model over a connection of its own; returns how
/// many blocks were right, and the first wrong sectors.
///
/// # Errors
/// When the server cannot be reached or refuses a read.
pub fn verify(uri: &(impl Clone + Into<Target>), models: &[Model]) -> Result<(u64, Vec<Mismatch>)> {
    verify_as(&Options::new(uri.clone()), models)
}

/// How many requests of a read-back are in flight.
const READBACK_DEPTH: u32 = 16;

/// As [`verify`], by a client or a guest as `options` describe it.
///
/// # Errors
/// As [`verify`].
pub fn verify_as(options: &Options, models: &[Model]) -> Result<(u64, Vec<Mismatch>)> {
    let connections = models.len() as u32;
    match &options.uri {
        Target::Nbd(uri) => look(options, NbdEndpoint::connect(uri, connections, OpenMode::ReadOnly)?, models),
        Target::Vhost(path) => look(options, VhostEndpoint::connect(path, connections, options.vhost)?, models),
        Target::Lab(dir) => look(options, BlkifEndpoint::connect(dir, connections, options.guest.clone())?, models),
    }
}

fn look<E: Endpoint>(options: &Options, endpoint: E, models: &[Model]) -> Result<(u64, Vec<Mismatch>)> {
    let Some(first) = models.first() else { return Ok((0, Vec::new())) };
    let work = models.iter().map(|model| {
        let task = Task {
            depth: READBACK_DEPTH,
            block_bytes: model.block_bytes(),
            fua: false,
            flush_every: 0,
            rate: None,
            ios: None,
            runtime: None,
            stop: options.stop.clone(),
        };
        (task, Source::Readback { next: model.blocks().start }, Some(model.clone()))
    });
    let shape = Shape { depth: READBACK_DEPTH, block_bytes: first.block_bytes(), writes: false, keep_data: true };
    let run = |connections| Ok(drive(work.collect(), connections, options.report_every, &mut |_| {}));
    let (outcomes, _) = endpoint.run(shape, run)?;
    let outcome = merge(outcomes, (Duration::ZERO, None));
    match outcome.error {
        Some(error) => Err(error),
        None => Ok((outcome.stats.read.ios, outcome.mismatches)),
    }
}

/// Runs a load for its figures alone.
///
/// # Errors
/// As [`run`], and the load's own.
pub fn measure(options: &Options) -> Result<Report> {
    let outcome = run(options, |_| {})?;
    let report = Report::new(options, &outcome);
    match outcome.error {
        Some(error) => Err(error),
        None => Ok(report),
    }
}

/// Reads back what the run wrote, unless it was not verified or has failed already. What is found goes into the
/// outcome.
pub fn read_back(options: &Options, outcome: &mut LoadOutcome) {
    let failed = outcome.error.is_some() || !outcome.mismatches.is_empty();
    if outcome.models.is_empty() || failed || options.is_stopped() {
        return;
    }
    // Over other connections than those that wrote: what one sees, all must see.
    match verify_as(options, &outcome.models) {
        Ok((blocks, mismatches)) => {
            outcome.read_back_blocks = blocks;
            outcome.mismatches = mismatches;
        }
        Err(error) => outcome.error = Some(error),
    }
    outcome.interrupted = options.is_stopped();
}

fn task(options: &Options, number: u64) -> Task {
    let parts = u64::from(options.connections);
    Task {
        depth: options.depth,
        block_bytes: options.block_bytes,
        fua: options.fua,
        flush_every: options.flush_every,
        rate: options.rate.map(|rate| rate / parts as f64),
        ios: options.ios.map(|ios| ios / parts + u64::from(number < ios % parts)),
        runtime: options.runtime,
        stop: options.stop.clone(),
    }
}

/// The most memory for requests in flight, in bytes.
const MAX_BUFFER_BYTES: u64 = 4 << 30;
/// The most blocks of a verified load: 8 bytes of memory each.
const MAX_VERIFIED_BLOCKS: u64 = 1 << 29;

fn usable_blocks(options: &Options, disk: Info) -> Result<u64> {
    let refuse = |message: String| Err(Error::new(ErrorKind::InvalidInput, message));
    let block = u64::from(options.block_bytes);
    if block == 0 || options.block_bytes > disk.max_block_bytes {
        let most = format_size(u64::from(disk.max_block_bytes));
        return refuse(format!("--bs must be from 1 to {most}, the server's largest request"));
    }
    if options.verify && block % stamp::SECTOR as u64 != 0 {
        return refuse("--verify needs a --bs that is a multiple of 512".to_owned());
    }
    if !options.start_bytes.is_multiple_of(block) {
        return refuse("the first byte that is used must be at a multiple of --bs".to_owned());
    }
    if block % u64::from(disk.min_block_bytes) != 0 {
        return refuse(format!("--bs must be a multiple of {} here", disk.min_block_bytes));
    }
    if options.pattern.read_percent < 100 && disk.read_only {
        return Err(Error::new(ErrorKind::ReadOnly, "the disk is read-only; use --rw randread"));
    }
    if options.fua && !disk.fua {
        return Err(Error::new(ErrorKind::Unsupported, "the server does not offer FUA"));
    }
    if options.flush_every > 0 && !disk.flush {
        return Err(Error::new(ErrorKind::Unsupported, "the server does not offer FLUSH"));
    }
    let buffers = u64::from(options.connections) * (u64::from(options.depth) + 2) * block;
    if buffers > MAX_BUFFER_BYTES {
        let most = format_size(MAX_BUFFER_BYTES);
        return refuse(format!("--connections × --depth × --bs is more than {most} of memory"));
    }
    let size_bytes = disk.size_bytes.saturating_sub(options.start_bytes);
    let blocks = size_bytes.min(options.span_bytes.unwrap_or(u64::MAX)) / block;
    if blocks < u64::from(options.connections) {
        let size = format_size(disk.size_bytes);
        return refuse(format!("the disk ({size}) is too small for that --bs and --connections"));
    }
    if options.verify && blocks > MAX_VERIFIED_BLOCKS {
        let message = format!("--verify can keep {MAX_VERIFIED_BLOCKS} blocks in mind, and here are {blocks}");
        return Err(Error::new(ErrorKind::InvalidInput, message).hint("say a smaller --span or a larger --bs"));
    }
    Ok(blocks)
}

/// The stamp of this run: another one each time, so that what an earlier run left on the disk is not taken for ours.
fn run_stamp(seed: u64) -> u64 {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_ns = since_1970.map_or(0, |time| time.as_nanos() as u64);
    Rng::new(seed ^ now_ns, u64::from(std::process::id())).next_u64() | 1
}

type Work = (Task, Source, Option<Model>);

fn drive<L: Ready>(
    work: Vec<Work>,
    connections: Vec<L>,
    report_every: Duration,
    progress: &mut dyn FnMut(Progress),
) -> Vec<Outcome> {
    let counters: Vec<Arc<Counters>> = work.iter().map(|_| Arc::default()).collect();
    let epoch = Instant::now();
    let (done, all_done) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let start = |(((task, source, model), connection), counters): ((Work, L), &Arc<Counters>)| {
            let (done, counters) = (done.clone(), counters.clone());
            scope.spawn(move || {
                let _done = done;
                connection.block_on(move |transport| Pump::new(task, source, model, transport, counters, epoch).run())
            })
        };
        let threads: Vec<_> = work.into_iter().zip(connections).zip(&counters).map(start).collect();
        drop(done);
        // Nothing is ever sent: the wait ends when the last thread drops its sender.
        while let Err(mpsc::RecvTimeoutError::Timeout) = all_done.recv_timeout(report_every) {
            progress(sum(&counters, epoch.elapsed()));
        }
        threads.into_iter().map(|t| t.join().expect("a load thread panicked")).collect()
    })
}

fn sum(counters: &[Arc<Counters>], elapsed: Duration) -> Progress {
    Progress {
        elapsed,
        reads: counters.iter().map(|c| c.reads.load(Ordering::Relaxed)).sum(),
        writes: counters.iter().map(|c| c.writes.load(Ordering::Relaxed)).sum(),
        bytes: counters.iter().map(|c| c.bytes.load(Ordering::Relaxed)).sum(),
    }
}

/// The CPU times of a run: this process's, and the server's.
type CpuTimes = (Duration, Option<Duration>);

fn merge(outcomes: Vec<Outcome>, (client_cpu, server_cpu): CpuTimes) -> LoadOutcome {
    let mut merged = LoadOutcome {
        stats: Stats::new(),
        models: Vec::new(),
        mismatches: Vec::new(),
        read_back_blocks: 0,
        error: None,
        interrupted: false,
        reconnects: 0,
        client_cpu,
        server_cpu,
    };
    for outcome in outcomes {
        merged.stats.merge(&outcome.stats);
        merged.models.extend(outcome.model);
        merged.mismatches.extend(outcome.mismatches);
        merged.error = merged.error.or(outcome.error);
    }
    merged
}

/// CPU clocks of this process and of the server's.
struct CpuMeter {
    clocks: (ClockId, Option<ClockId>),
    start: CpuTimes,
}

impl CpuMeter {
    fn start(server_pid: Option<u32>) -> Result<Self> {
        let server = server_pid.map(|pid| clock_getcpuclockid(Pid::from_raw(pid as i32)));
        let server = server.transpose().map_err(|e| Error::io("--server-pid", e.into()))?;
        let clocks = (ClockId::CLOCK_PROCESS_CPUTIME_ID, server);
        Ok(Self { clocks, start: read_clocks(clocks) })
    }

    fn stop(self) -> CpuTimes {
        let (own, server) = read_clocks(self.clocks);
        let server = server.zip(self.start.1).map(|(end, start)| end.saturating_sub(start));
        (own.saturating_sub(self.start.0), server)
    }
}

fn read_clocks((own, server): (ClockId, Option<ClockId>)) -> CpuTimes {
    let read = |clock| clock_gettime(clock).ok().map(Duration::from);
    (read(own).unwrap_or_default(), server.and_then(read))
}
