//! `spile tune`: which sizes of requests suit a device or file, and the shape that follows from it.
//!
//! It is the sweep of the article "When virtualised storage is faster than bare metal" (2015): for each number of bytes in flight
//! from 512 B to 4 MiB, these bytes are one request, two, four and so on, down to requests of 512 B. Where several smaller requests are faster
//! than one large one, splitting pays.
//!
//! The time is bounded: each pair of sizes gets its share. What is in flight when a share is over has to be waited for, and
//! a device may be slow. So a pair is left out when its requests in flight would take longer than its share: then all of it takes at most
//! about twice the time that it should. Pairs are left out, too, when the engine has fewer requests in flight than they ask for.

mod holes;
mod recommend;
mod show;

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store};
use spile_engine::{Config, Engine};
use spile_server::host_device::claim;
use spile_server::tuned::{Tuned, device_of};
use spile_server::units::format_size;
use spile_store::{AnyStore, CacheMode, OsFiles};
use utoipa::ToSchema;

use crate::experiments::engine_transfer::{Transfers, transfer};
use crate::experiments::filled::{FilledFile, room_bytes};
use crate::experiments::{Direction, HostFacts, Outcome};
pub use show::{figures, found, text};

/// The most bytes in flight.
const MOST_BYTES: u64 = 4 << 20;
/// The least size of a request in bytes.
const LEAST_BLOCK_BYTES: u64 = 512;
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
    /// A short run.
    pub is_quick: bool,
}

/// [`Parameters`] as figures have them, and what follows from the figures.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// What was measured.
    pub target: String,
    /// The identity of its device, if that tells one.
    pub device: Option<String>,
    /// `read` or `write`.
    pub operation: Direction,
    /// How often each pair of sizes was measured.
    pub rounds: u32,
    /// How long one measurement took, in seconds.
    pub runtime_s: f64,
    /// So many pairs of sizes were left out, because their requests in flight would have taken longer than that.
    pub pairs_too_slow: u32,
    /// The recommended shape: `off` or `split=SIZE`.
    pub shape: String,
    /// How many times as fast large requests are with parts of the best size as whole; 0 when too little was measured to know.
    pub gain: f64,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
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
    /// Requests that have ended.
    pub requests: u64,
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
/// `InvalidInput` when the target is too short, has holes, or would be destroyed and nobody has allowed that; those of the target.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    let host = HostFacts::at(&parameters.target);
    let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
    progress("open", 0.0);
    let target = Target::open(&engine, parameters)?;
    let least = LEAST_BLOCK_BYTES.max(target.store.info().offset_align_bytes.into());
    let pairs = pairs(least, engine.most_transfers_of_a_store() as u64);
    let runtime = parameters.time / (pairs.len() as u32 * parameters.rounds).max(1);
    let (rows, pairs_too_slow) = measure(&engine, &target, parameters, (pairs, runtime), &mut progress)?;
    engine.shutdown();
    let (shape, gain) = recommend::shape(&rows);
    let asked = Asked {
        target: parameters.target.display().to_string(),
        device: device_of(&parameters.target).ok(),
        operation: parameters.direction(),
        rounds: parameters.rounds,
        runtime_s: runtime.as_secs_f64(),
        pairs_too_slow,
        shape: shape.to_string(),
        gain,
        quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "tune".into(), host, parameters: asked, rows })
}

/// Measures each of `pairs` for `runtime` in each round. Returns the number of pairs that were left out as well.
fn measure(
    engine: &Engine,
    target: &Target,
    parameters: &Parameters,
    (mut pairs, runtime): (Vec<Pair>, Duration),
    progress: &mut dyn FnMut(&str, f64),
) -> Result<(Vec<Row>, u32)> {
    let mut rows: Vec<Row> = Vec::new();
    let (mut too_slow, mut done) = (0, 0);
    let runs = pairs.len() as u32 * parameters.rounds;
    for round in 0..parameters.rounds {
        for &pair in &pairs {
            progress(
                &format!("{} × {}", pair.depth(), format_size(pair.block_bytes)),
                f64::from(done) / f64::from(runs),
            );
            done += 1;
            if round == 0 && pair.takes_longer_than(runtime, &rows) {
                too_slow += 1;
                continue;
            }
            rows.push(run_one(engine, target, parameters, pair, runtime, (round, done))?);
        }
        pairs.retain(|pair| rows.iter().any(|row| row.pair() == *pair));
        // There and back: what drifts falls on all alike.
        pairs.reverse();
    }
    Ok((rows, too_slow))
}

fn run_one(
    engine: &Engine,
    target: &Target,
    parameters: &Parameters,
    pair: Pair,
    runtime: Duration,
    (round, number): (u32, u32),
) -> Result<Row> {
    let Pair { outstanding_bytes, block_bytes } = pair;
    let transfers = Transfers {
        direction: parameters.direction(),
        block_bytes,
        depth: pair.depth(),
        runtime,
        span_bytes: target.store.len_bytes(),
        seed: number.into(),
    };
    let moved = transfer(engine, &target.store, transfers)?;
    Ok(Row {
        outstanding_bytes,
        block_bytes,
        queue_depth: pair.depth(),
        round,
        requests: moved.bytes / block_bytes,
        bytes_per_s: moved.bytes_per_s(),
    })
}

/// What servers are to know of it.
///
/// # Errors
/// `NotFound` when the device tells no identity; the reason is in there.
pub fn tuned(outcome: &Outcome<Asked, Row>) -> Result<Tuned> {
    let Asked { target, device, shape, gain, operation, rounds, .. } = outcome.parameters.clone();
    let device = device.map_or_else(|| device_of(Path::new(&target)), Ok)?;
    let date_utc = outcome.host.date_utc.clone();
    Ok(Tuned { shape, gain, target, device, operation: operation.name().to_owned(), rounds, date_utc })
}

impl Parameters {
    fn direction(&self) -> Direction {
        if self.writes { Direction::Write } else { Direction::Read }
    }
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
        if own.is_none() && stat.is_file() {
            holes::refuse(given)?;
        }
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

/// Bytes in flight, as so many requests as it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    outstanding_bytes: u64,
    block_bytes: u64,
}

impl Pair {
    /// Requests in flight.
    fn depth(self) -> u32 {
        (self.outstanding_bytes / self.block_bytes) as u32
    }

    /// True when the requests in flight would take longer than `time`, as far as `rows` tell: those of requests of the same size, half as many in
    /// flight.
    fn takes_longer_than(self, time: Duration, rows: &[Row]) -> bool {
        let half = Self { outstanding_bytes: self.outstanding_bytes / 2, ..self };
        let rate = rows.iter().rev().find(|row| row.pair() == half).map(|row| row.bytes_per_s);
        // Where half as many were too slow already, there is no such row.
        self.depth() > 1 && rate.is_none_or(|rate| self.outstanding_bytes as f64 / rate > time.as_secs_f64())
    }
}

impl Row {
    fn pair(&self) -> Pair {
        Pair { outstanding_bytes: self.outstanding_bytes, block_bytes: self.block_bytes }
    }
}

/// All pairs with requests of at least `least_block_bytes`, of which at most `most_depth` are in flight; those with fewer in flight first.
fn pairs(least_block_bytes: u64, most_depth: u64) -> Vec<Pair> {
    let doubled =
        |from: u64| std::iter::successors(Some(from), |size| Some(size * 2)).take_while(|size| *size <= MOST_BYTES);
    let all = doubled(least_block_bytes).flat_map(|outstanding_bytes| {
        doubled(least_block_bytes).map(move |block_bytes| Pair { outstanding_bytes, block_bytes })
    });
    all.filter(|pair| (1..=most_depth).contains(&u64::from(pair.depth()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of a device whose throughput depends on the size of a request and on how many are in flight.
    pub(super) fn row(pair: Pair, rate: impl Fn(u64, u64) -> f64) -> Row {
        let Pair { outstanding_bytes, block_bytes } = pair;
        let queue_depth = pair.depth();
        let bytes_per_s = rate(block_bytes, queue_depth.into());
        Row { outstanding_bytes, block_bytes, queue_depth, round: 0, requests: 1, bytes_per_s }
    }

    pub(super) fn rows(rate: impl Fn(u64, u64) -> f64) -> Vec<Row> {
        pairs(512, 1024).into_iter().map(|pair| row(pair, &rate)).collect()
    }

    /// A disk of 120 requests a second, which likes several in flight a little better.
    pub(super) fn spinning(block: u64, depth: u64) -> f64 {
        let seek_s = 0.008 / (1.0 + (depth as f64).log2() / 10.0);
        block as f64 / (seek_s + block as f64 / 1.5e8)
    }

    #[test]
    fn each_number_of_bytes_in_flight_is_divided_down_to_512() {
        let has =
            |pairs: &[Pair], outstanding_bytes, block_bytes| pairs.contains(&Pair { outstanding_bytes, block_bytes });
        let all = pairs(512, u64::MAX);
        assert_eq!(all.len(), (1..=14).sum::<usize>());
        assert!(has(&all, 4 << 20, 512) && has(&all, 512, 512));
        assert!(pairs(4096, 1024).iter().all(|pair| pair.block_bytes >= 4096));
    }

    #[test]
    fn no_more_is_asked_for_than_the_engine_has_in_flight() {
        let pairs = pairs(512, 1024);
        assert_eq!(pairs.iter().map(|pair| pair.depth()).max(), Some(1024));
        assert!(pairs.iter().all(|pair| u64::from(pair.depth()) * pair.block_bytes == pair.outstanding_bytes));
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        assert!((64..=1024).contains(&engine.most_transfers_of_a_store()), "{}", engine.about());
        engine.shutdown();
    }

    #[test]
    fn a_slow_device_takes_at_most_twice_the_time() {
        let all = pairs(512, 1024);
        for (time_s, least_rows) in [(60.0, 50), (6.0, 20)] {
            let runtime = Duration::from_secs_f64(time_s / all.len() as f64);
            let (mut rows, mut took_s) = (Vec::new(), 0.0);
            for pair in &all {
                if !pair.takes_longer_than(runtime, &rows) {
                    let row = row(*pair, spinning);
                    // What is in flight at the end of the share takes as long as it takes.
                    took_s += runtime.as_secs_f64() + pair.outstanding_bytes as f64 / row.bytes_per_s;
                    rows.push(row);
                }
            }
            assert!(took_s < 2.0 * time_s && rows.len() > least_rows, "{took_s} s for {} pairs", rows.len());
        }
        // A fast one is measured with all.
        let fast = rows(|block, depth| (block * depth) as f64 * 1e4);
        assert!(all.iter().all(|pair| !pair.takes_longer_than(Duration::from_millis(50), &fast)));
    }
}
