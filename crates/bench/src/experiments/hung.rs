//! `hung`: what does a store that hangs cost a disk on the same worker?
//!
//! One server with one worker has two disks: a healthy one, and one whose store stops answering. In each round the healthy disk
//! is read twice, in an order that changes from round to round: once while nobody uses the other disk, and once while the
//! other disk's requests are all in flight and none ends. The stores are an NBD export, which the worker speaks with itself,
//! and a file of a FUSE file system (`nbdfuse`, where that is installed and may be mounted), through the page cache and
//! around it: there calls of the system do not return.
//!
//! In a last case nothing of the healthy disk's own hangs: it is backed up to an NBD export that stops answering, and it is written, as a backup
//! costs a read nothing.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comfy_table::Cell;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::json;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, escape, typed};
use spile_server::serving::api::types::{Job, JobList};
use spile_server::uri::Target;
use utoipa::ToSchema;

use super::folder::{Folder, unmount};
use super::process::{Tied, disk_argument};
use super::ratios::{self, Pair};
use super::sample::median;
use super::{Figures, HostFacts, Outcome, right, table};
use crate::load;

/// Writes in flight on the disk that hangs.
const HUNG_DEPTH: u32 = 64;
/// How long the load on that disk runs before its store stops.
const BEFORE: Duration = Duration::from_millis(300);
/// The size of the healthy disk in bytes.
const HEALTHY_BYTES: u64 = 256 << 20;

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// Requests of 4 KiB in flight on the healthy disk, one line of the table for each.
    #[serde(rename = "queue_depths")]
    pub depths: Vec<u32>,
    /// Rounds of two runs each, for each store and depth.
    pub rounds: u32,
    /// Seconds of a run.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// The engine of the server, as `spile serve --engine` takes it.
    pub engine: String,
    /// Where the healthy disk lies; in memory unless given.
    #[schema(value_type = Option<String>)]
    pub folder: Option<PathBuf>,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Ten rounds of a second, or a few short ones.
    pub fn new(is_quick: bool) -> Self {
        let (depths, rounds, seconds) = if is_quick { (vec![4], 2, 0.2) } else { (vec![1, 32], 10, 1.0) };
        Self { depths, rounds, seconds, engine: "auto".into(), folder: None, quick: is_quick }
    }
}

/// What stops answering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Store {
    /// An NBD export.
    Nbd,
    /// A file on FUSE, through the page cache.
    FuseCached,
    /// A file on FUSE, with O_DIRECT.
    FuseDirect,
    /// An NBD export that a backup of the healthy disk is written to.
    BackupTarget,
}

impl Store {
    const ALL: [Self; 4] = [Self::Nbd, Self::FuseCached, Self::FuseDirect, Self::BackupTarget];

    /// Its name in tables and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd => "NBD export",
            Self::FuseCached => "FUSE file, page cache",
            Self::FuseDirect => "FUSE file, O_DIRECT",
            Self::BackupTarget => "target of its backup",
        }
    }
}

/// One round: the healthy disk's requests.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// What hung.
    pub store: Store,
    /// Requests in flight on the healthy disk.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// 99 of 100 took no longer while the other disk was idle.
    pub alone_p99_us: f64,
    /// 99 of 100 took no longer while the other disk's store hung.
    pub beside_p99_us: f64,
    /// Requests a second while the other disk was idle.
    pub alone_iops: f64,
    /// Requests a second while the other disk's store hung.
    pub beside_iops: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1. Returns the stores that were left
/// out as well, each with the reason.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a process does not start or a request of the healthy disk fails.
pub fn run(
    parameters: &Parameters,
    mut progress: impl FnMut(&str, f64),
) -> Result<(Outcome<Parameters, Row>, Vec<String>)> {
    if parameters.depths.is_empty() || parameters.rounds == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
    }
    let host = HostFacts::at_some(parameters.folder.as_deref());
    let folder = Folder::new()?;
    let own = parameters.folder.as_deref().map(|parent| Folder::inside(parent, "hung")).transpose()?;
    let healthy = Healthy::new(own.as_ref().unwrap_or(&folder).path())?;
    let (mut rows, mut left_out) = (Vec::new(), Vec::new());
    for (number, store) in Store::ALL.into_iter().enumerate() {
        progress(store.name(), number as f64 / Store::ALL.len() as f64);
        match World::new(folder.path(), store, &healthy, parameters) {
            Ok(mut world) => rows.extend(world.rounds(parameters)?),
            Err(error) if matches!(store, Store::FuseCached | Store::FuseDirect) => {
                left_out.push(format!("{}: {error}", store.name()))
            }
            Err(error) => return Err(error),
        }
    }
    Ok((Outcome { experiment: "hung".to_owned(), host, parameters: parameters.clone(), rows }, left_out))
}

/// The rounds of a disk in `images` whose backup's target stops answering, and nothing else; processes meet in `sockets`.
///
/// # Errors
/// As [`run`].
pub(super) fn beside_a_backup(sockets: &Path, images: &Path, parameters: &Parameters) -> Result<Vec<Row>> {
    World::new(sockets, Store::BackupTarget, &Healthy::new(images)?, parameters)?.rounds(parameters)
}

/// The image of the healthy disk.
struct Healthy(PathBuf);

impl Healthy {
    /// Makes it, with every block written: a hole would cost less to read.
    fn new(folder: &Path) -> Result<Self> {
        let made = Self(folder.join("healthy.raw"));
        std::fs::write(&made.0, vec![0x5a; HEALTHY_BYTES as usize])
            .map_err(|e| Error::io("write the healthy disk", e))
            .at_path(&made.0)?;
        Ok(made)
    }
}

/// A store, and the server of both disks.
struct World {
    store: Store,
    // In the order of their ends: a server whose disk is taken away keeps a mark of the failed flush.
    server: Tied,
    _mount: Option<Mount>,
    export: Tied,
    healthy: PathBuf,
    hung: PathBuf,
    control: PathBuf,
    store_socket: PathBuf,
}

impl World {
    fn new(folder: &Path, store: Store, healthy: &Healthy, parameters: &Parameters) -> Result<Self> {
        let named = |what: &str| folder.join(format!("{what}-{store:?}"));
        let socket = named("store");
        let words = ["serve", "mem:256M", "--control", "none", "--nbd"].map(OsString::from);
        let mut export = Tied::start("the export", words.into_iter().chain([unix(&socket)]))?;
        export.wait_for([&socket])?;
        let mount = match store {
            Store::Nbd | Store::BackupTarget => None,
            Store::FuseCached | Store::FuseDirect => Some(Mount::new(named("file"), &socket)?),
        };
        let disk = match &mount {
            None => OsString::from(format!("nbd+unix:///?socket={},name=hung", socket.display())),
            Some(mount) => OsString::from(format!("{},name=hung,format=raw", mount.file.display())),
        };
        let cache = if store == Store::FuseCached { "page" } else { "direct" };
        let (of_healthy, of_hung, control) = (named("healthy"), named("hung"), named("control"));
        let mut args: Vec<OsString> = vec!["serve".into(), disk_argument(&healthy.0, ",name=healthy,format=raw")];
        let mut sockets = vec![(&of_healthy, "healthy")];
        if store != Store::BackupTarget {
            args.insert(1, disk);
            sockets.push((&of_hung, "hung"));
        }
        for (socket, name) in &sockets {
            args.extend(["--vhost-user".into(), OsString::from(format!("{},export={name}", socket.display()))]);
        }
        let engine = parameters.engine.as_str();
        args.extend(["--control".into(), control.clone().into_os_string()]);
        let rest = ["--workers", "1", "--no-lock", "--cache", cache, "--engine", engine];
        args.extend(rest.map(OsString::from));
        let mut server = Tied::start("the server", args)?;
        server.wait_for(sockets.iter().map(|(socket, _)| socket).chain([&&control]))?;
        let (healthy, hung) = (of_healthy, of_hung);
        Ok(Self { store, _mount: mount, server, export, healthy, hung, control, store_socket: socket })
    }

    fn rounds(&mut self, parameters: &Parameters) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for &depth in &parameters.depths {
            for round in 0..parameters.rounds {
                let beside_first = !round.is_multiple_of(2);
                let first = self.read(depth, parameters.seconds, beside_first)?;
                let second = self.read(depth, parameters.seconds, !beside_first)?;
                let (beside, alone) = if beside_first { (first, second) } else { (second, first) };
                rows.push(Row {
                    store: self.store,
                    depth,
                    alone_p99_us: self.p99_us(&alone),
                    beside_p99_us: self.p99_us(&beside),
                    alone_iops: alone.iops,
                    beside_iops: beside.iops,
                });
            }
        }
        Ok(rows)
    }
}

impl World {
    fn p99_us(&self, report: &load::Report) -> f64 {
        let of = if self.store == Store::BackupTarget { &report.write } else { &report.read };
        of.latency_p99_us
    }

    /// Uses the healthy disk for some time, alone or beside what hangs.
    fn read(&mut self, depth: u32, seconds: f64, is_beside: bool) -> Result<load::Report> {
        let (mut writes, mut backup) = (None, None);
        let mut read_percent = 100;
        match self.store {
            Store::BackupTarget => {
                read_percent = 0;
                if is_beside {
                    backup = Some(HangingBackup::new(&self.control, &self.store_socket, &self.export)?);
                }
            }
            _ if is_beside => writes = Some(Hanging::new(&self.hung, &mut self.export)?),
            _ => {}
        }
        let options = load::Options {
            depth,
            pattern: load::Pattern { random: true, read_percent },
            runtime: Some(Duration::from_secs_f64(seconds)),
            ..load::Options::new(Target::Vhost(self.healthy.clone()))
        };
        let report = load::measure(&options)?;
        drop(writes);
        backup.map_or(Ok(()), HangingBackup::end)?;
        self.server.check()?;
        Ok(report)
    }
}

/// A load of writes on a disk whose store is stopped. When this is dropped, the store goes on.
struct Hanging<'a> {
    export: &'a Tied,
    _load: Tied,
}

impl<'a> Hanging<'a> {
    fn new(disk: &Path, export: &'a mut Tied) -> Result<Self> {
        let depth = HUNG_DEPTH.to_string();
        let words =
            ["load", &format!("vhost-user:{}", disk.display()), "--rw", "randwrite", "--bs", "16k", "--depth", &depth];
        let mut load = Tied::start("the load on the disk that hangs", words.map(OsString::from))?;
        std::thread::sleep(BEFORE);
        load.check()?;
        export.check()?;
        signal(export, Signal::STOP)?;
        let hanging = Self { export, _load: load };
        // What was on its way arrives, and hangs, too.
        std::thread::sleep(BEFORE);
        Ok(hanging)
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        let _ = signal(self.export, Signal::CONT);
    }
}

/// A backup of the healthy disk whose target is stopped. When this is dropped, the target goes on.
struct HangingBackup<'a> {
    export: &'a Tied,
    control: &'a Path,
    job: String,
}

impl<'a> HangingBackup<'a> {
    fn new(control: &'a Path, target: &Path, export: &'a Tied) -> Result<Self> {
        let order = json!({
            "disks": [{ "disk": "healthy", "target": format!("nbd+unix:///?socket={}", target.display()) }],
            "fleece_limit_bytes": 2 * HEALTHY_BYTES,
            // It is still at its begin when the target stops.
            "limit_bytes_per_s": 1 << 20,
        });
        let begun: JobList = typed(call(control, "POST", "/v1/backups", Some(&order), CHANGE_PATIENCE)?)?;
        let job = begun.jobs.into_iter().next().map(|job| format!("/v1/jobs/{}", escape(&job.id)));
        let job = job.ok_or_else(|| Error::new(ErrorKind::Protocol, "the server names no job"))?;
        signal(export, Signal::STOP)?;
        let hanging = Self { export, control, job };
        std::thread::sleep(BEFORE);
        Ok(hanging)
    }

    /// Ends the backup, and makes sure that it was at work until now.
    fn end(self) -> Result<()> {
        let look = || ask::<Job>(self.control, "GET", &self.job, LOOK_PATIENCE);
        let job = look()?;
        if job.state != "running" {
            let why = job.error.map(|error| error.message).unwrap_or_default();
            return Err(Error::new(ErrorKind::Io, format!("the backup was {} before its end: {why}", job.state)));
        }
        call(self.control, "PATCH", &self.job, Some(&json!({ "state": "cancelled" })), CHANGE_PATIENCE)?;
        let end = Instant::now() + CHANGE_PATIENCE;
        while look()?.state == "running" {
            if Instant::now() > end {
                return Err(Error::new(ErrorKind::TimedOut, "the backup does not end"));
            }
            std::thread::sleep(BEFORE / 30);
        }
        Ok(())
    }
}

impl Drop for HangingBackup<'_> {
    fn drop(&mut self) {
        let _ = signal(self.export, Signal::CONT);
    }
}

fn signal(process: &Tied, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(process.id().cast_signed()).expect("a child has a number");
    kill_process(pid, signal).map_err(|e| Error::io("signal the export", e.into()))
}

/// A FUSE file system with one file, the NBD export's bytes.
struct Mount {
    nbdfuse: Tied,
    dir: PathBuf,
    file: PathBuf,
}

impl Mount {
    fn new(dir: PathBuf, socket: &Path) -> Result<Self> {
        std::fs::create_dir(&dir).map_err(|e| Error::io("make the folder", e)).at_path(&dir)?;
        let file = dir.join("disk");
        let uri = OsString::from(format!("nbd+unix:///?socket={}", socket.display()));
        let nbdfuse = Tied::start_program("nbdfuse", "nbdfuse", [file.clone().into(), uri])?;
        let mut mount = Self { nbdfuse, dir, file };
        mount.nbdfuse.wait_for([&mount.file])?;
        Ok(mount)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Whoever still waits for it gets an error.
        self.nbdfuse.end();
        unmount(&self.dir);
    }
}

/// `unix:PATH`, as `--nbd` takes it.
fn unix(socket: &Path) -> OsString {
    OsString::from(format!("unix:{}", socket.display()))
}

/// The stores and depths that were measured, each with its rounds.
fn cases(outcome: &Outcome<Parameters, Row>) -> Vec<(Store, u32, Vec<&Row>)> {
    let mut cases: Vec<(Store, u32, Vec<&Row>)> = Vec::new();
    for row in &outcome.rows {
        match cases.iter_mut().find(|(store, depth, _)| (*store, *depth) == (row.store, row.depth)) {
            Some((_, _, rows)) => rows.push(row),
            None => cases.push((row.store, row.depth, vec![row])),
        }
    }
    cases
}

/// The healthy disk beside the one that hangs, by itself alone: the 99th percentile, and requests a second.
fn pairs(store: Store, depth: u32, rows: &[&Row]) -> [Pair; 2] {
    let name = |what: &str| format!("{what}, depth {depth}, {}", store.name());
    let rows = || rows.iter().copied();
    [
        Pair::new(&name("p99"), rows(), |row: &Row| (row.beside_p99_us, row.alone_p99_us)),
        Pair::new(&name("IOPS"), rows(), |row: &Row| (row.beside_iops, row.alone_iops)),
    ]
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let cases = cases(outcome);
    let pairs: Vec<Pair> = cases.iter().flat_map(|(store, depth, rows)| pairs(*store, *depth, rows)).collect();
    let title = "hung: a disk beside one whose store hangs, by itself alone";
    ratios::figures("hung", title, &outcome.host, outcome.parameters.quick, &pairs)
}

/// What was found, in a sentence for each store and depth.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let sentence = |(store, depth, rows): &(Store, u32, Vec<&Row>)| {
        let [p99, iops] = pairs(*store, *depth, rows).map(|pair| pair.ratio());
        let (p99, iops) = (p99?.p50, iops?.p50);
        let name = store.name();
        Some(format!(
            "Beside a hung {name}, depth {depth}: {p99:.2} times the p99 and {iops:.2} times the IOPS of alone."
        ))
    };
    cases(outcome).iter().filter_map(sentence).collect()
}

/// The figures as a table, one line for each store and depth: medians of the rounds.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let heads = ["what hangs", "depth", "p99 alone µs", "p99 beside µs", "ratio", "IOPS ratio"];
    let mut table = table(heads.map(str::to_owned));
    for (store, depth, rows) in cases(outcome) {
        let middle = |of: fn(&Row) -> f64| median(rows.iter().map(|row| of(row)).collect());
        let figures = [
            format!("{:.0}", middle(|row| row.alone_p99_us)),
            format!("{:.0}", middle(|row| row.beside_p99_us)),
            format!("{:.2}", middle(|row| row.beside_p99_us / row.alone_p99_us)),
            format!("{:.2}", middle(|row| row.beside_iops / row.alone_iops)),
        ];
        let cells = [Cell::new(store.name()), right(depth.to_string())];
        table.add_row(cells.into_iter().chain(figures.map(right)));
    }
    let Parameters { rounds, engine, .. } = &outcome.parameters;
    format!(
        "{rounds} rounds, engine {engine}; reads of 4 KiB, and writes beside a backup\n{table}\n{}",
        found(outcome).join("\n")
    )
}
