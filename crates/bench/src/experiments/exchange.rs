//! `exchange`: what does a guest feel when the graph of its disk is exchanged?
//!
//! Clients keep writes in flight on a raw disk on a device that is slow on purpose ([`crate::slow`]). In one of the two runs of each
//! round nothing else happens; in the other one a snapshot is taken as a server would take it: a VHD is made, opened
//! and put on top of the raw image, the graphs are exchanged, and when the old epoch has ended the raw image is sealed. Which
//! run comes first changes from round to round. Each run has images of its own, so all runs begin alike.
//!
//! What counts is the longest request of a run: an exchange that waited for requests in flight would make others wait for as
//! long as these take.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comfy_table::Cell;
use serde::{Deserialize, Serialize};
use spile_core::{Disk, Error, ErrorKind, Extent, Files, Result, Segments};
use spile_engine::{Config, Engine, OsEnv};
use spile_image::create::{NewImage, NewParent};
use spile_image::{Format, Graph, OpenOptions, open_layer};
use spile_node::Node;
use spile_store::{CacheMode, OsFiles};
use utoipa::ToSchema;

use super::ratios::{self, Pair};
use super::sample::median;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};
use crate::slow::{SlowFiles, SlowStore};

/// The size of the disk in bytes. Writes are spread over all of it.
const DISK_BYTES: u64 = 64 << 20;
/// Bytes of a write.
const WRITE_BYTES: u64 = 4096;
/// The workers of the clients. The exchange has one more.
const CLIENT_WORKERS: usize = 2;
/// A run is measured for so many times the delay: the exchange, the end of the old epoch, and some time after it.
const MEASURED_DELAYS: u32 = 3;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Rounds of two runs each.
    pub rounds: u32,
    /// Writes in flight.
    pub depth: u32,
    /// How much longer a write takes on the slow device.
    pub delay: Duration,
    /// Where the images lie; `None`: in memory.
    pub folder: Option<PathBuf>,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// 100 exchanges with writes of 100 ms, or a few short ones.
    pub fn new(is_quick: bool) -> Self {
        let (rounds, delay_ms) = if is_quick { (3, 20) } else { (100, 100) };
        Self { rounds, depth: 32, delay: Duration::from_millis(delay_ms), folder: None, is_quick }
    }
}

/// [`Parameters`] as the figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Rounds of two runs each.
    pub rounds: u32,
    /// Writes in flight.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// How much longer a write took on the slow device.
    pub delay_ms: f64,
    /// Bytes of a write.
    pub write_bytes: u64,
    /// The size of the disk.
    #[serde(rename = "virtual_size_bytes")]
    pub disk_bytes: u64,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// The longest request of the run without an exchange.
    pub longest_without_us: f64,
    /// The longest request of the run with an exchange.
    pub longest_with_us: f64,
    /// How long the exchange itself took.
    pub exchange_us: f64,
    /// How long the requests of the old epoch went on after it.
    pub old_epoch_us: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when an image cannot be made or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    if parameters.rounds == 0 || parameters.depth == 0 || parameters.delay.is_zero() {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
    }
    let host = HostFacts::at_some(parameters.folder.as_deref());
    let in_memory = Folder::new()?;
    let own = parameters.folder.as_deref().map(|parent| Folder::inside(parent, "exchange")).transpose()?;
    let folder = own.as_ref().unwrap_or(&in_memory).path().join("images");
    let engine = Engine::start(Config { workers: CLIENT_WORKERS + 1, ..Config::default() })?;
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        progress(&format!("round {}", round + 1), f64::from(round) / f64::from(parameters.rounds));
        rows.push(one_round(&engine, parameters, &folder, round)?);
    }
    engine.shutdown();
    let Parameters { rounds, depth, delay, is_quick: quick, .. } = *parameters;
    let delay_ms = delay.as_secs_f64() * 1000.0;
    let asked = Asked { rounds, depth, delay_ms, write_bytes: WRITE_BYTES, disk_bytes: DISK_BYTES, quick };
    Ok(Outcome { experiment: "exchange".to_owned(), host, parameters: asked, rows })
}

fn one_round(engine: &Engine, parameters: &Parameters, folder: &Path, round: u32) -> Result<Row> {
    let exchanges_first = !round.is_multiple_of(2);
    let first = one_run(engine, parameters, folder, exchanges_first)?;
    let second = one_run(engine, parameters, folder, !exchanges_first)?;
    let (with, without) = if exchanges_first { (first, second) } else { (second, first) };
    Ok(Row {
        longest_without_us: us(without.longest),
        longest_with_us: us(with.longest),
        exchange_us: us(with.exchange),
        old_epoch_us: us(with.old_epoch),
    })
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

type SlowDisk = Node<Graph<SlowStore>>;

/// What is measured in one run.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    longest: Duration,
    exchange: Duration,
    old_epoch: Duration,
}

/// One run: the disk, its clients, and what is measured of them.
struct Run {
    disk: SlowDisk,
    files: SlowFiles,
    folder: PathBuf,
    start: Instant,
    delay: Duration,
    depth: u32,
    is_over: AtomicBool,
    clients: AtomicU32,
    longest: Mutex<Result<Duration>>,
}

fn one_run(engine: &Engine, parameters: &Parameters, folder: &Path, exchanges: bool) -> Result<Measured> {
    std::fs::create_dir(folder).map_err(|e| Error::io("make the folder", e).at_path(folder))?;
    let (parameters, images) = (parameters.clone(), folder.to_owned());
    let run = engine.run_on(0, move || async move { Run::new(&parameters, images).await.map(Arc::new) })?;
    for client in 0..run.depth {
        let run = run.clone();
        engine.spawn_on(1 + client as usize % CLIENT_WORKERS, move || async move { run.client(client).await });
    }
    let main = run.clone();
    let measured = engine.run_on(0, move || async move { main.measure(exchanges).await });
    drop(run);
    std::fs::remove_dir_all(folder).map_err(|e| Error::io("remove the folder", e).at_path(folder))?;
    measured
}

impl Run {
    async fn new(parameters: &Parameters, folder: PathBuf) -> Result<Self> {
        let Parameters { depth, delay, .. } = *parameters;
        let files = SlowFiles::new(OsFiles::new(CacheMode::Direct), delay);
        let base = folder.join("base.raw");
        drop(files.create(&base, DISK_BYTES).await?);
        let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        let graph = Graph::open(&files, Arc::new(OsEnv), base, &options).await?;
        let disk = Node::with_buffers(graph, |len| spile_engine::pool().try_alloc(len).map(Into::into));
        let (is_over, clients, longest) =
            (AtomicBool::new(false), AtomicU32::new(depth), Mutex::new(Ok(Duration::ZERO)));
        Ok(Self { disk, files, folder, start: Instant::now(), delay, depth, is_over, clients, longest })
    }

    /// Writes pages here and there until the run is over. Each client has pages of its own, so that no request waits for another
    /// one to the same page.
    async fn client(&self, number: u32) {
        // Clients begin spread over the delay, so that their requests do not all end at one time.
        spile_engine::sleep(self.delay * number / self.depth).await;
        let from = Segments::zeroed(WRITE_BYTES as usize);
        let (number, clients) = (u64::from(number), u64::from(self.depth));
        let mut random = number;
        while !self.is_over.load(Ordering::Relaxed) {
            random = scatter(random);
            let begun = self.start.elapsed();
            let at = (random % (DISK_BYTES / WRITE_BYTES / clients) * clients + number) * WRITE_BYTES;
            let written = self.disk.write(Extent::from_range(at..at + WRITE_BYTES), &from, false).await;
            self.note(begun, written);
        }
        self.clients.fetch_sub(1, Ordering::Relaxed);
    }

    /// Notes a request that has ended. Requests that began before all clients had begun do not count.
    fn note(&self, begun: Duration, written: Result<()>) {
        let took = self.start.elapsed() - begun;
        let mut longest = self.longest.lock().unwrap_or_else(PoisonError::into_inner);
        match (written, &mut *longest) {
            (Err(error), Ok(_)) => *longest = Err(error),
            (Ok(()), Ok(longest)) if begun >= self.delay => *longest = took.max(*longest),
            _ => {}
        }
    }

    /// Waits until all clients work, exchanges the graphs or does not, and waits for the clients' end.
    async fn measure(&self, exchanges: bool) -> Result<Measured> {
        spile_engine::sleep(self.delay).await;
        let mut measured = Measured::default();
        let snapshot = if exchanges { self.take_snapshot(&mut measured).await } else { Ok(()) };
        let end = self.delay * (1 + MEASURED_DELAYS);
        spile_engine::sleep(end.saturating_sub(self.start.elapsed())).await;
        self.is_over.store(true, Ordering::Relaxed);
        while self.clients.load(Ordering::Relaxed) > 0 {
            spile_engine::sleep(self.delay / 4).await;
        }
        self.disk.close().await?;
        snapshot?;
        let mut longest = self.longest.lock().unwrap_or_else(PoisonError::into_inner);
        measured.longest = std::mem::replace(&mut *longest, Ok(Duration::ZERO))?;
        Ok(measured)
    }

    /// Puts a new VHD on top of the disk's graph, and seals the image below once nobody writes to it any more.
    async fn take_snapshot(&self, measured: &mut Measured) -> Result<()> {
        let path = self.folder.join("leaf.vhd");
        let parent = NewParent {
            relative_path: "base.raw".to_owned(),
            name: "base.raw".to_owned(),
            format: Format::Raw,
            identity: None,
            changed_unix_s: None,
        };
        let new = NewImage { parent: Some(parent), ..NewImage::new(DISK_BYTES) };
        let store = OsFiles::new(CacheMode::Page).create(&path, 0)?;
        Format::Vhd.create(&store, &OsEnv, &new).await?;
        drop(store);
        let leaf = open_layer(&self.files, Arc::new(OsEnv), path, &OpenOptions::default()).await?;
        let graph = Arc::new(self.disk.graph().await.with_leaf(leaf).await?);
        let begun = Instant::now();
        let old = self.disk.exchange(graph.clone()).await?;
        measured.exchange = begun.elapsed();
        old.ended().await;
        measured.old_epoch = begun.elapsed() - measured.exchange;
        graph.seal_parents().await
    }
}

/// Spreads numbers over all of 64 bits (the finisher of splitmix64).
fn scatter(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The longest request with an exchange, by the longest one without.
fn pair(outcome: &Outcome<Asked, Row>) -> Pair {
    Pair::new("longest request", outcome.rows.iter(), |row: &Row| (row.longest_with_us, row.longest_without_us))
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Asked, Row>) -> Figures {
    let title = "exchange: a run with an exchange, by one without";
    ratios::figures("exchange", title, &outcome.host, outcome.parameters.quick, &[pair(outcome)])
}

/// What was found, in a sentence.
pub fn found(outcome: &Outcome<Asked, Row>) -> Vec<String> {
    let Some(ratio) = pair(outcome).ratio() else { return Vec::new() };
    let longer_us = median(outcome.rows.iter().map(|row| row.longest_with_us - row.longest_without_us).collect());
    vec![format!(
        "An exchange makes the longest request {:+.2} ms longer, {:.2} times as long (medians over {} rounds).",
        longer_us / 1000.0,
        ratio.p50,
        outcome.rows.len()
    )]
}

/// The figures as a table, and what the exchange has cost.
pub fn text(outcome: &Outcome<Asked, Row>) -> String {
    let Asked { rounds, depth, delay_ms, .. } = &outcome.parameters;
    let rows = &outcome.rows;
    let mut table = table(["", "median", "longest"].map(str::to_owned));
    let mut add = |name: &str, of: fn(&Row) -> f64, unit_us: f64| {
        let values: Vec<f64> = rows.iter().map(|row| of(row) / unit_us).collect();
        let most = values.iter().copied().fold(0.0, f64::max);
        let cells = [median(values), most].map(|value| right(format!("{value:.2}")));
        table.add_row([Cell::new(name)].into_iter().chain(cells));
    };
    add("longest request without an exchange, ms", |row| row.longest_without_us, 1000.0);
    add("longest request with an exchange, ms", |row| row.longest_with_us, 1000.0);
    add("the exchange itself, µs", |row| row.exchange_us, 1.0);
    add("requests of the old epoch go on for, ms", |row| row.old_epoch_us, 1000.0);
    format!(
        "{rounds} rounds, {depth} writes in flight, each {delay_ms} ms slower\n{table}\n{}",
        found(outcome).join("\n")
    )
}
