//! `spile tune`: which sizes of requests suit a device or file, and the shape that follows from it.
//!
//! It is the sweep of the article "When virtualised storage is faster than bare metal" (2015): for each number of bytes in flight
//! from 512 B to 4 MiB, these bytes are one request, two, four and so on, down to requests of 512 B. Where several smaller requests are faster
//! than one large one, splitting pays. The time is bounded: each pair of sizes gets its share.

mod show;

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store};
use spile_engine::{Config, Engine};
use spile_node::Shape;
use spile_server::host_device::claim;
use spile_server::tuned::{Tuned, device_of};
use spile_server::units::format_size;
use spile_store::{AnyStore, CacheMode, OsFiles};
use utoipa::ToSchema;

use crate::experiments::bare::{Transfers, transfer};
use crate::experiments::filled::{FilledFile, room_bytes};
use crate::experiments::sample::median;
use crate::experiments::{Direction, HostFacts, Outcome};
pub use show::{figures, found, text};

/// The most bytes in flight.
const MOST_BYTES: u64 = 4 << 20;
/// The least size of a request in bytes.
const LEAST_BLOCK_BYTES: u64 = 512;
/// Numbers of bytes in flight that a recommendation looks at: these are large requests.
const LARGE_BYTES: [u64; 4] = [512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// Sizes of parts that may be recommended, in bytes.
const PARTS_BYTES: std::ops::RangeInclusive<u64> = 4 << 10..=256 << 10;
/// A request is split into so many parts at most.
const MOST_PARTS: u64 = 64;
/// Splitting is recommended when large requests become so many times as fast.
const PAYS: f64 = 1.15;
/// Of sizes that are almost as good as the best one, the largest is recommended: fewer parts cost less work.
const ALMOST: f64 = 0.97;
/// The least length of what is measured, in bytes.
const LEAST_TARGET_BYTES: u64 = 8 << 20;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// A device, a file, or a folder, in which a file is made and removed again.
    pub target: PathBuf,
    /// Write instead of reading.
    pub writes: bool,
    /// What is written to may be destroyed. Needed for writes, unless the target is a folder.
    pub may_destroy: bool,
    /// How long all of it takes.
    pub time: Duration,
    /// How often each pair of sizes is measured.
    pub rounds: u32,
    /// The length of a file that is made, in bytes. It is less where space is short.
    pub file_bytes: u64,
}

/// [`Parameters`] as figures have them, and what follows from the figures.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// What was measured.
    pub target: String,
    /// The identity of its device.
    pub device: String,
    /// `read` or `write`.
    pub operation: Direction,
    /// How often each pair of sizes was measured.
    pub rounds: u32,
    /// How long one measurement took, in seconds.
    pub runtime_s: f64,
    /// The recommended shape: `off` or `split=SIZE`.
    pub shape: String,
    /// How many times as fast large requests are with parts of the best size as whole.
    pub gain: f64,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Bytes in flight: `block_bytes` times `queue_depth`.
    pub outstanding_bytes: u64,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests in flight.
    pub queue_depth: u32,
    /// The round, from 0.
    pub round: u32,
    /// Bytes each second.
    pub bytes_per_s: f64,
}

/// What is measured, open.
struct Target {
    store: Arc<AnyStore>,
    /// Removed in the end.
    _own: Option<FilledFile>,
    /// A device that is written over belongs to this process alone.
    _alone: Option<File>,
}

/// Measures; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when the target is too short, or would be destroyed and nobody has allowed that; those of the target.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    let host = HostFacts::now();
    let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
    progress("open", 0.0);
    let target = Target::open(&engine, parameters)?;
    let device = device_of(&parameters.target)?;
    let operation = if parameters.writes { Direction::Write } else { Direction::Read };
    let least = LEAST_BLOCK_BYTES.max(target.store.info().offset_align_bytes.into());
    let pairs = pairs(least);
    let runs = pairs.len() as u32 * parameters.rounds;
    let runtime = parameters.time / runs.max(1);
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        for number in 0..pairs.len() {
            // There and back: what drifts falls on all alike.
            let number = if round % 2 == 0 { number } else { pairs.len() - 1 - number };
            let (outstanding_bytes, block_bytes) = pairs[number];
            let queue_depth = (outstanding_bytes / block_bytes) as u32;
            let what = format!("{queue_depth} × {}", format_size(block_bytes));
            progress(&what, rows.len() as f64 / f64::from(runs));
            let span_bytes = target.store.len_bytes();
            let seed = rows.len() as u64;
            let transfers =
                Transfers { direction: operation, block_bytes, depth: queue_depth, runtime, span_bytes, seed };
            let bytes_per_s = transfer(&engine, &target.store, transfers)?.bytes_per_s(block_bytes);
            rows.push(Row { outstanding_bytes, block_bytes, queue_depth, round, bytes_per_s });
        }
    }
    engine.shutdown();
    let (shape, gain) = recommend(&rows);
    let asked = Asked {
        target: parameters.target.display().to_string(),
        device,
        operation,
        rounds: parameters.rounds,
        runtime_s: runtime.as_secs_f64(),
        shape: shape.to_string(),
        gain,
    };
    Ok(Outcome { experiment: "tune".into(), host, parameters: asked, rows })
}

/// What servers are to know of it.
pub fn tuned(outcome: &Outcome<Asked, Row>) -> Tuned {
    let Asked { target, device, shape, gain, .. } = outcome.parameters.clone();
    Tuned { shape, gain, target, device, date_utc: outcome.host.date_utc.clone() }
}

impl Target {
    fn open(engine: &Engine, parameters: &Parameters) -> Result<Self> {
        let given = &parameters.target;
        let stat = given.metadata().map_err(|e| Error::io("cannot be found", e)).at_path(given)?;
        let own = if stat.is_dir() { Some(own_file(given, parameters.file_bytes)?) } else { None };
        if parameters.writes && own.is_none() && !parameters.may_destroy {
            let error = Error::new(ErrorKind::InvalidInput, "what is on it would be destroyed").at_path(given);
            return Err(error.hint("name a folder, in which a file is made; or say --may-destroy"));
        }
        let is_device = stat.file_type().is_block_device();
        let _alone = (is_device && parameters.writes).then(|| claim(given)).transpose()?;
        let path = own.as_ref().map_or(given.as_path(), FilledFile::path);
        let mode = if parameters.writes { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
        let at = Locator::from(path);
        let files = OsFiles::new(CacheMode::Direct);
        let store = engine.run_on(0, move || async move { files.open(&at, mode).await })?;
        if store.len_bytes() < LEAST_TARGET_BYTES {
            let what = format!("it has less than {}", format_size(LEAST_TARGET_BYTES));
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(path));
        }
        Ok(Self { store: Arc::new(store), _own: own, _alone })
    }
}

/// A file in `folder`, of at most a quarter of the free space.
fn own_file(folder: &Path, file_bytes: u64) -> Result<FilledFile> {
    let len_bytes = file_bytes.min(room_bytes(folder)?.max(LEAST_TARGET_BYTES)) / MOST_BYTES * MOST_BYTES;
    FilledFile::new(folder, "tune", len_bytes)
}

/// All pairs of bytes in flight and bytes of a request.
fn pairs(least_block_bytes: u64) -> Vec<(u64, u64)> {
    let doubled = |from: u64, to: u64| {
        std::iter::successors(Some(from), |size| Some(size * 2)).take_while(move |size| *size <= to)
    };
    let blocks = |outstanding| doubled(least_block_bytes, outstanding).map(move |block| (outstanding, block));
    doubled(least_block_bytes, MOST_BYTES).flat_map(blocks).collect()
}

/// The median throughput of one pair of sizes.
fn rate(rows: &[Row], outstanding_bytes: u64, block_bytes: u64) -> Option<f64> {
    let rows = rows.iter().filter(|row| (row.outstanding_bytes, row.block_bytes) == (outstanding_bytes, block_bytes));
    let rates: Vec<f64> = rows.map(|row| row.bytes_per_s).collect();
    (!rates.is_empty()).then(|| median(rates))
}

/// How many times as fast large requests are in parts of this size as whole, in the geometric mean.
fn gain(rows: &[Row], part_bytes: u64) -> Option<f64> {
    let large = LARGE_BYTES.into_iter().filter(|size| size / part_bytes <= MOST_PARTS);
    let gains: Option<Vec<f64>> =
        large.map(|size| Some((rate(rows, size, part_bytes)? / rate(rows, size, size)?).max(1e-6).ln())).collect();
    let gains = gains.filter(|gains| !gains.is_empty())?;
    Some((gains.iter().sum::<f64>() / gains.len() as f64).exp())
}

/// The shape that suits the device, and how many times as fast parts of the best size are.
fn recommend(rows: &[Row]) -> (Shape, f64) {
    let sizes = std::iter::successors(Some(*PARTS_BYTES.start()), |size| Some(size * 2));
    let gains: Vec<(u64, f64)> = sizes
        .take_while(|size| PARTS_BYTES.contains(size))
        .filter_map(|size| Some((size, gain(rows, size)?)))
        .collect();
    let best = gains.iter().map(|(_, gain)| *gain).fold(0.0, f64::max);
    let good = gains.iter().rev().find(|(_, gain)| *gain >= ALMOST * best);
    match good {
        Some((size, _)) if best >= PAYS => (Shape::Split(*size as u32), best),
        _ => (Shape::Off, best),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a device whose throughput depends on the size of a request and on how many are in flight.
    pub(super) fn rows(rate: impl Fn(u64, u64) -> f64) -> Vec<Row> {
        let row = |(outstanding_bytes, block_bytes): (u64, u64)| Row {
            outstanding_bytes,
            block_bytes,
            queue_depth: (outstanding_bytes / block_bytes) as u32,
            round: 0,
            bytes_per_s: rate(block_bytes, outstanding_bytes / block_bytes),
        };
        pairs(512).into_iter().map(row).collect()
    }

    #[test]
    fn each_number_of_bytes_in_flight_is_divided_down_to_512() {
        let pairs = pairs(512);
        assert_eq!(pairs.len(), (1..=14).sum::<usize>());
        assert!(pairs.contains(&(4 << 20, 512)) && pairs.contains(&(512, 512)));
        assert!(super::pairs(4096).iter().all(|(_, block)| *block >= 4096));
    }

    #[test]
    fn a_device_with_channels_gets_parts() {
        // A request keeps one channel busy, whatever its size; there are eight.
        let ssd = rows(|block, depth| 1e8 * depth.min(8) as f64 * (block as f64 / (block as f64 + 4096.0)));
        let (shape, gain) = recommend(&ssd);
        assert!(matches!(shape, Shape::Split(bytes) if (32 << 10..=64 << 10).contains(&bytes)), "{shape}");
        assert!(gain > 3.0, "{gain}");
    }

    #[test]
    fn a_spinning_disk_keeps_whole_requests() {
        // Each request costs a seek.
        let disk = rows(|block, _| block as f64 / (0.008 + block as f64 / 1.5e8));
        assert_eq!(recommend(&disk).0, Shape::Off);
    }

    #[test]
    fn a_little_more_is_not_worth_it() {
        assert_eq!(recommend(&rows(|_, depth| if depth > 1 { 1.1e9 } else { 1e9 })).0, Shape::Off);
        assert_eq!(recommend(&[]).0, Shape::Off);
    }
}
