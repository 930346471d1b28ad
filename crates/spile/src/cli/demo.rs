//! `spile demo`: creates a disk, serves it, puts a load on it and checks it, in a few seconds.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use comfy_table::{Table, presets};
use serde::Serialize;
use spile_core::metrics::{Meter, Reading};
use spile_core::{Error, Locator, Result, ResultExt};
use spile_engine::{Config, Engine, OsEnv};
use spile_front_nbd::{Export, Server, ServerConfig};
use spile_image::check::Severity;
use spile_image::create::NewImage;
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions};
use spile_node::Aligned;
use spile_server::serving::api::rates::LayerRates;
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};
use utoipa::ToSchema;

use super::create;
use super::load::ProgressLine;
use super::{Exit, complain, on_engine, print_json, say, say_lines, text_of};
use crate::disks;
use crate::listen::{Bound, Published};
use crate::load::{self, LaneReport, Options, Pattern, Report};
use crate::signals::EndSignals;
use crate::stats::Measured;
use crate::units::{format_count, format_rate, format_size, format_us, parse_size};
use crate::uri::{Address, NbdUri};

/// Create a thin disk, serve it, put a verified load on it, check it, and say how to use it
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Where to put the disk (a temporary folder unless given)
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the disk (as --dir does)
    #[arg(long)]
    keep: bool,
    /// How long the load runs
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// The size of the disk
    #[arg(long, default_value = "20G", value_parser = parse_size)]
    size: u64,
    /// How much of the disk is written to
    #[arg(long, default_value = "1G", value_parser = parse_size)]
    span: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

type DemoDisk = Measured<Aligned<Graph<HostStore>>>;

/// What runs while the load runs.
struct Running {
    engine: Engine,
    server: Server<DemoDisk>,
    disk: Arc<DemoDisk>,
    meters: [Arc<Meter>; 2],
    uri: NbdUri,
    _socket: Option<Published>,
}

/// What was counted at one place on the way of a request.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct Seen {
    /// `front`, `disk` or `store`.
    layer: &'static str,
    /// Average queue depth.
    queue_depth_avg: f64,
    /// Reads that ended a second, with success or not.
    read_iops: f64,
    /// Writes that ended a second, with success or not.
    write_iops: f64,
    /// Bytes a second, both directions.
    bytes_per_s: f64,
    /// Half of the requests of all kinds are at or below.
    latency_p50_us: f64,
    /// 99 of 100 are at or below.
    latency_p99_us: f64,
    /// 999 of 1000 are at or below.
    latency_p999_us: f64,
}

/// What the demonstration showed.
#[derive(Debug, Serialize, ToSchema)]
pub struct Shown {
    /// The disk.
    #[serde(serialize_with = "text_of")]
    #[schema(value_type = String)]
    path: PathBuf,
    /// The size that the load saw, in bytes.
    virtual_size_bytes: u64,
    /// The space that the file takes on its file system, in bytes.
    used_bytes: Option<u64>,
    /// What a check says after the load: `sound`, `leaks` or `corrupt`.
    result: &'static str,
    /// The load's figures.
    load: Report,
    /// What was counted meanwhile, the guest's side first.
    meters: Vec<Seen>,
}

/// Runs `spile demo`.
///
/// # Errors
/// When any step fails.
pub fn run(args: &DemoArgs) -> Result<Exit> {
    let signals = EndSignals::block()?;
    let (dir, keep) = folder(args)?;
    let left = dir.clone();
    signals.exit_after(move || {
        let _ = match keep {
            true => std::fs::remove_file(left.join(SOCKET)),
            false => std::fs::remove_dir_all(&left),
        };
    });
    let result = demo(args, &dir, keep);
    if !keep {
        let _ = std::fs::remove_dir_all(&dir);
    }
    result
}

const SOCKET: &str = "demo.sock";

/// The folder, and whether it stays.
fn folder(args: &DemoArgs) -> Result<(PathBuf, bool)> {
    let (dir, keep, made) = match &args.dir {
        Some(dir) => (dir.clone(), true, std::fs::create_dir_all(dir)),
        None => {
            let dir = std::env::temp_dir().join(format!("spile-demo-{}", std::process::id()));
            // Ours alone, and new: it will be removed with all that is in it.
            let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
            (dir, args.keep, made)
        }
    };
    made.map_err(|e| Error::io("create the folder", e)).at_path(&dir)?;
    Ok((dir, keep))
}

fn demo(args: &DemoArgs, dir: &Path, keep: bool) -> Result<Exit> {
    let note = |text: String| {
        if !args.json {
            say(text);
        }
    };
    let path = dir.join("demo.vhd");
    let format = Format::of(&path, None)?;
    let (made, new) = (path.clone(), NewImage::new(args.size));
    on_engine(move || async move { create::publish(create::make(&made, format, &new, false).await?, &made) })?;
    let used = format_size(disks::used_bytes(&path).unwrap_or(0));
    note(format!("created {}: {} thin VHD, {used} used", path.display(), format_size(args.size)));

    let running = start(&path, dir)?;
    let (kind, workers) = (running.engine.kind(), running.engine.workers());
    note(format!("serving it as {} (engine {kind}, {workers} workers)", running.uri));
    note(format!(
        "load: {} s of random 4 KiB reads and writes (70:30) on {}, every sector verified",
        args.seconds,
        format_size(args.span)
    ));
    let (report, layers, right) = measure(args, &running)?;
    stop(running)?;

    let check = check(path.clone(), format)?;
    let used_bytes = disks::used_bytes(&path);
    if args.json {
        let (load, meters, virtual_size_bytes) = (report, layers, args.size);
        print_json(&Shown { path, virtual_size_bytes, used_bytes, result: check, load, meters })?;
    } else {
        say_lines(table(&report, &layers));
        say_lines(report.summary().trim_end());
        say(format_args!(
            "space used: {} of {}; check: {check}",
            format_size(used_bytes.unwrap_or(0)),
            format_size(args.size)
        ));
        say_lines(how_to_attach(&path, keep));
    }
    Ok(if right && check == "sound" { Exit::Ok } else { Exit::Corrupt })
}

fn start(path: &Path, dir: &Path) -> Result<Running> {
    let engine = Engine::start(Config::default())?;
    let source = Locator::Path(path.to_owned());
    let chain = engine.run_on(0, move || async move {
        let files = HostFiles::new(OsFiles::new(CacheMode::Direct));
        disks::open_with(&files, &source, &OpenOptions::default()).await
    })?;
    let meters = [Arc::new(Meter::new()), chain.handles()[0].image().store().meter().clone()];
    let disk = Arc::new(Measured::new(Aligned::new(chain), meters[0].clone()));
    let export = Export {
        name: String::new(),
        description: "demo".to_owned(),
        disk_name: "demo".to_owned(),
        disk: disk.clone(),
        read_only: false,
        checkpoints: None,
        kept: |_| None,
        withdrawn: Arc::default(),
    };
    let server = Server::new(engine.clone(), ServerConfig::default(), vec![export])?;
    let address = Address::Unix(dir.join(SOCKET));
    let (fd, socket) = Bound::new(&address)?.publish()?;
    server.listen(fd)?;
    let uri = NbdUri::new(address, "");
    Ok(Running { engine, server, disk, meters, uri, _socket: socket })
}

fn stop(running: Running) -> Result<()> {
    running.server.stop();
    running.server.wait_drained(Duration::from_secs(10));
    drop(running.server);
    let disk = running.disk;
    let closed = running.engine.run_on(0, move || {
        use spile_core::Disk;
        async move { disk.close().await }
    });
    running.engine.shutdown();
    closed
}

/// Runs the load; returns its report, the queues below, and whether all was right.
fn measure(args: &DemoArgs, running: &Running) -> Result<(Report, Vec<Seen>, bool)> {
    let options = Options {
        pattern: Pattern { random: true, read_percent: 70 },
        depth: 16,
        connections: 2,
        runtime: Some(Duration::from_secs(u64::from(args.seconds))),
        span_bytes: Some(args.span.min(args.size)),
        verify: true,
        flush_every: 1000,
        ..Options::new(running.uri.clone())
    };
    let mut line = ProgressLine::new();
    let before_front = running.server.metrics("").requests;
    let before = [running.meters[0].read(), running.meters[1].read()];
    let mut outcome = load::run_only(&options, |now| line.show(now))?;
    let after = [running.meters[0].read(), running.meters[1].read()];
    let front = Seen::new("front", &running.server.metrics("").requests, &before_front);
    load::read_back(&options, &mut outcome);
    line.clear();
    let right = outcome.error.is_none() && outcome.mismatches.is_empty();
    outcome.mismatches.iter().for_each(|mismatch| complain(format_args!("mismatch: {mismatch}")));
    let report = Report::new(&options, &outcome);
    if let Some(error) = outcome.error {
        return Err(error);
    }
    let layers = vec![front, Seen::new("disk", &after[0], &before[0]), Seen::new("store", &after[1], &before[1])];
    Ok((report, layers, right))
}

impl Seen {
    fn new(name: &'static str, after: &Reading, before: &Reading) -> Self {
        let rates = LayerRates::new(name, "", &after.since(before), after.at_ns.saturating_sub(before.at_ns));
        Self {
            layer: name,
            queue_depth_avg: rates.queue_size(),
            read_iops: rates.reads_per_s,
            write_iops: rates.writes_per_s,
            bytes_per_s: rates.read_bytes_per_s + rates.write_bytes_per_s,
            latency_p50_us: rates.latency_p50_us.unwrap_or(0.0),
            latency_p99_us: rates.latency_p99_us.unwrap_or(0.0),
            latency_p999_us: rates.latency_p999_us.unwrap_or(0.0),
        }
    }

    fn row(&self) -> [String; 8] {
        [
            self.layer.to_owned(),
            format_count(self.read_iops),
            format_count(self.write_iops),
            format_rate(self.bytes_per_s),
            format_us(self.latency_p50_us),
            format_us(self.latency_p99_us),
            format_us(self.latency_p999_us),
            format!("{:.2}", self.queue_depth_avg),
        ]
    }
}

fn table(report: &Report, layers: &[Seen]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    let header = ["seen at", "reads/s", "writes/s", "rate", "p50", "p99", "p99.9", "avg queue"];
    table.set_header(header);
    for (name, lane) in [("client, reads", &report.read), ("client, writes", &report.write)] {
        table.add_row(client_row(name, lane));
    }
    table.add_rows(layers.iter().map(Seen::row));
    table
}

fn client_row(name: &str, lane: &LaneReport) -> [String; 8] {
    let rate = if name.ends_with("reads") {
        [format_count(lane.iops), "".into()]
    } else {
        ["".into(), format_count(lane.iops)]
    };
    let [reads, writes] = rate;
    [
        name.to_owned(),
        reads,
        writes,
        format_rate(lane.bytes_per_s),
        format_us(lane.latency_p50_us),
        format_us(lane.latency_p99_us),
        format_us(lane.latency_p999_us),
        // λ·W of one direction: the queue of both is in the lines below.
        format!("{:.2}", lane.iops * lane.latency_mean_us / 1e6),
    ]
}

fn check(path: PathBuf, format: Format) -> Result<&'static str> {
    let report = on_engine(move || async move {
        use spile_core::{Files, OpenMode};
        let store = OsFiles::new(CacheMode::Page).open(&path.into(), OpenMode::ReadOnly).await?;
        format.check(&store, &OsEnv).await
    })?;
    Ok(match report.worst() {
        Some(Severity::Corruption) => "corrupt",
        Some(Severity::Leak) => "leaks",
        Some(Severity::Note) | None => "sound",
    })
}

fn how_to_attach(path: &Path, keep: bool) -> String {
    let path = if keep { path.display().to_string() } else { "DISK.vhd".to_owned() };
    format!(
        "\nTo give such a disk to a QEMU guest:\n  \
         spile serve {path} --nbd unix:/tmp/spile.sock\n  \
         qemu-system-x86_64 -m 1G -drive driver=raw,if=virtio,file.driver=nbd,file.server.type=unix,\
         file.server.path=/tmp/spile.sock"
    )
}
