//! `paths`: what does a request cost, from one guest to one disk, one request at a time?
//!
//! After Project Karcygwins (2013): a row of requests of each size each way; the fastest and the slowest fifth are dropped.
//! The ways take turns, and each size has several rounds of turns, so that what else the host does falls on all alike.

mod show;
mod ways;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};

use super::rings::{BASE, RINGS};
use super::sample::{Spread, mean, median, trimmed};
use super::trace::Phases;
use super::world::{Disks, Folder, Storage};
use super::{Direction, HostFacts, Outcome, all_sizes};
pub use show::{figures, found, text};
use utoipa::ToSchema;
pub use ways::Kind;
use ways::{Batch, Sample, Ways};

/// Requests of a row, but for small ones, which may be more.
pub const REQUESTS: u32 = 100;
/// A row of small requests has as many as make this many bytes, if that is more.
const ROW_BYTES: u64 = 16 << 20;
const MAX_REQUESTS: u32 = 1000;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// The ways.
    pub kinds: Vec<Kind>,
    /// Sizes of requests in bytes.
    pub sizes: Vec<u64>,
    /// Which way the bytes go.
    pub directions: Vec<Direction>,
    /// Turns of all ways for each size.
    pub rounds: u32,
    /// Requests of a row at least.
    pub requests: u32,
    /// What is behind the disks.
    pub storage: Storage,
    /// The part of each disk that is used, in bytes.
    pub span_bytes: u64,
    /// One short run.
    pub is_quick: bool,
}

impl Parameters {
    /// All of it, or little.
    pub fn new(is_quick: bool) -> Self {
        let sizes = if is_quick { vec![4 << 10, 64 << 10, 1 << 20] } else { all_sizes() };
        Self {
            kinds: all_kinds().into_iter().filter(|kind| kind.is_usual()).collect(),
            sizes,
            directions: vec![Direction::Read],
            rounds: if is_quick { 2 } else { 5 },
            requests: REQUESTS,
            storage: Storage::Memory,
            span_bytes: if is_quick { 16 << 20 } else { 64 << 20 },
            is_quick,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        let most = self.sizes.iter().max().copied().unwrap_or(0);
        match () {
            _ if self.sizes.is_empty() || self.kinds.is_empty() || self.directions.is_empty() => {
                invalid("there is nothing to measure")
            }
            _ if self.sizes.iter().any(|size| *size == 0 || !size.is_multiple_of(512)) => {
                invalid("sizes of requests are multiples of 512")
            }
            _ if most > self.span_bytes || most > 32 << 20 => {
                invalid("a request may be no longer than the part of the disk that is used, and than 32 MiB")
            }
            _ => Ok(()),
        }
    }
}

/// Every way, in the order in which figures have them.
pub fn all_kinds() -> Vec<Kind> {
    let rings = RINGS.iter().map(|ring| Kind::Ring(*ring));
    [Kind::HostDirect].into_iter().chain(rings).chain([Kind::VhostUser, Kind::Nbd]).collect()
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// What is behind the disks.
    pub storage: String,
    /// The part of each disk that is used.
    pub span_bytes: u64,
    /// Turns of all ways for each size.
    pub rounds: u32,
    /// Requests in flight.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// One short run.
    #[serde(rename = "quick", default)]
    pub is_quick: bool,
}

/// One way, one size.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// The way.
    #[serde(rename = "way")]
    pub path: String,
    /// Read or write.
    #[serde(rename = "operation")]
    pub op: Direction,
    /// Bytes of a request.
    pub request_bytes: u64,
    /// Requests that were made.
    pub requests: usize,
    /// Those that count: without the fastest and the slowest fifth of each row.
    pub requests_kept: usize,
    /// Half of those that count took less.
    pub latency_p50_us: f64,
    /// A tenth of all requests that were made, none dropped, took less.
    #[serde(default)]
    pub latency_p10_us: f64,
    /// Nine tenths of all requests that were made, none dropped, took less.
    #[serde(default)]
    pub latency_p90_us: f64,
    /// Their mean.
    pub latency_mean_us: f64,
    /// One request after the other: bytes of a request by the mean latency.
    #[serde(rename = "bytes_per_s")]
    pub bytes_per_second: f64,
    /// The median latency by that of `grant-copy` in the same round, where that was measured: the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy: Option<f64>,
    /// A tenth of these ratios is below this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy_p10: Option<f64>,
    /// Nine tenths of these ratios are below this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy_p90: Option<f64>,
    /// Where the time went, where it is known.
    pub phases: Option<Phases>,
}

impl Row {
    /// The ratio to `grant-copy` and its spread.
    fn ratio(&self) -> Option<Spread> {
        Spread::of_columns(self.ratio_to_grant_copy_p10, self.ratio_to_grant_copy, self.ratio_to_grant_copy_p90)
    }

    /// The latency and its spread.
    fn latency_us(&self) -> Spread {
        Spread { p10: self.latency_p10_us, p50: self.latency_p50_us, p90: self.latency_p90_us }
    }
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// When something does not start, or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at_some(parameters.storage.folder());
    let most = parameters.sizes.iter().max().copied().unwrap_or(0);
    let folder = Folder::new()?;
    let disks = Disks::new(parameters.storage.clone(), parameters.span_bytes);
    progress("starting", 0.0);
    let mut ways = Ways::open(folder.path(), &parameters.kinds, disks, most)?;
    ways.fill(parameters.span_bytes, most.min(1 << 20))?;
    let mut rows = Vec::new();
    let (all, mut done) = (parameters.directions.len() * parameters.sizes.len(), 0);
    for direction in &parameters.directions {
        for request_bytes in &parameters.sizes {
            let what = format!("{} of {}", direction.name(), spile_server::units::format_size(*request_bytes));
            progress(&what, f64::from(done) / all as f64);
            rows.extend(one_size(&mut ways, parameters, *direction, *request_bytes)?);
            done += 1;
        }
    }
    let asked = Asked {
        storage: parameters.storage.to_string(),
        span_bytes: parameters.span_bytes,
        rounds: parameters.rounds,
        depth: 1,
        is_quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "paths".to_owned(), host, parameters: asked, rows })
}

/// What was kept of one way's rows.
#[derive(Default)]
struct Kept {
    /// The latency of every request, in µs.
    made_us: Vec<f64>,
    /// The median of each round, in µs.
    rounds_us: Vec<f64>,
    samples: Vec<Sample>,
    phases: Vec<Phases>,
}

fn one_size(ways: &mut Ways, parameters: &Parameters, direction: Direction, request_bytes: u64) -> Result<Vec<Row>> {
    let row_requests = ((ROW_BYTES / request_bytes) as u32).clamp(REQUESTS, MAX_REQUESTS);
    // One who asks for fewer than is the custom means it.
    let requests =
        if parameters.requests < REQUESTS { parameters.requests } else { row_requests.max(parameters.requests) };
    let batch = Batch { direction, request_bytes, requests, span_bytes: parameters.span_bytes };
    let mut kept: Vec<Kept> = (0..ways.count()).map(|_| Kept::default()).collect();
    for round in 0..parameters.rounds.max(1) as usize {
        for turn in 0..ways.count() {
            // Another one begins each time.
            let number = (round + turn) % ways.count();
            let samples = ways.measure(number, batch)?;
            let of_way = &mut kept[number];
            of_way.made_us.extend(in_us(&samples));
            let samples = trimmed(samples, |sample| sample.latency_ns);
            of_way.rounds_us.push(median(in_us(&samples)));
            of_way.phases.extend(ways.phases(number, &samples)?);
            of_way.samples.extend(samples);
        }
    }
    let base = (0..ways.count()).find(|number| ways.kind(*number).name() == BASE);
    let base = base.map(|number| kept[number].rounds_us.clone());
    let rows = kept.into_iter().enumerate();
    Ok(rows.map(|(number, kept)| row(ways.kind(number), direction, request_bytes, kept, base.as_deref())).collect())
}

fn in_us(samples: &[Sample]) -> Vec<f64> {
    samples.iter().map(|sample| sample.latency_ns as f64 / 1e3).collect()
}

fn row(kind: Kind, op: Direction, request_bytes: u64, kept: Kept, base: Option<&[f64]>) -> Row {
    let us = in_us(&kept.samples);
    let made = Spread::of(&kept.made_us);
    let ratio = base.and_then(|base| Spread::of_ratios(&kept.rounds_us, base));
    let latency_mean_us = mean(us.iter().copied());
    Row {
        path: kind.name().to_owned(),
        op,
        request_bytes,
        requests: kept.made_us.len(),
        requests_kept: us.len(),
        latency_p50_us: median(us),
        latency_p10_us: made.p10,
        latency_p90_us: made.p90,
        latency_mean_us,
        bytes_per_second: request_bytes as f64 * 1e6 / latency_mean_us.max(1e-3),
        ratio_to_grant_copy: ratio.map(|ratio| ratio.p50),
        ratio_to_grant_copy_p10: ratio.map(|ratio| ratio.p10),
        ratio_to_grant_copy_p90: ratio.map(|ratio| ratio.p90),
        phases: Phases::mean(&kept.phases),
    }
}
