//! `aggregate`: how much do many guests with many disks move together?
//!
//! After the article on tapdisk3 (2014): each guest has one program for each of its disks, which writes, and then reads, from
//! the start to the end, one request at a time, on all disks at once. What is drawn over the size of requests and the
//! number of guests is the throughput of the host. All disks of all paths are there all the time; the time of each point is
//! cut into pieces between which the paths take turns, so that what else the host does falls on all alike.

mod show;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::metrics::now_ns as now;
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::guest::{Answer, Order};
use super::rings::{BASE, RingPath, find};
use super::sample::Spread;
use super::world::{Disks, Folder, Storage, WantedDisk, World};
use super::{Direction, HostFacts, Outcome, all_sizes};
pub use show::{figures, found, text};

/// The paths that are compared unless others are named: tapdisk2's, tapdisk3's, and ours.
pub const PATHS: [&str; 3] = ["grant-map-memcpy", "grant-copy-44k", "grant-copy"];

/// A point is measured in so many pieces, between which the paths take turns; the median counts.
const PIECES: u32 = 5;

/// All guests hear an order before they are to begin.
const HEAD_START: Duration = Duration::from_millis(20);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// The ways.
    pub paths: Vec<RingPath>,
    /// Guests at most; fewer are measured too.
    pub guests: u16,
    /// Disks of each guest.
    pub disks: u16,
    /// Sizes of requests in bytes.
    pub sizes: Vec<u64>,
    /// How long each point takes.
    pub runtime: Duration,
    /// What is behind the disks.
    pub storage: Storage,
    /// The part of each disk that is used, in bytes.
    pub span_bytes: u64,
    /// One short run.
    pub is_quick: bool,
}

impl Parameters {
    /// All of it as in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let paths = PATHS.iter().filter_map(|name| find(name)).collect();
        let storage = Storage::Null;
        let span_bytes = 16 << 20;
        match is_quick {
            false => Self {
                paths,
                guests: 10,
                disks: 9,
                sizes: all_sizes(),
                runtime: Duration::from_secs(10),
                storage,
                span_bytes,
                is_quick,
            },
            true => Self {
                paths,
                guests: 2,
                disks: 2,
                sizes: vec![64 << 10, 1 << 20],
                runtime: Duration::from_millis(500),
                storage,
                span_bytes,
                is_quick,
            },
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        match () {
            _ if self.sizes.is_empty() || self.paths.is_empty() || self.guests == 0 || self.disks == 0 => {
                invalid("there is nothing to measure")
            }
            _ if self.sizes.iter().any(|size| *size == 0 || !size.is_multiple_of(512)) => {
                invalid("sizes of requests are multiples of 512")
            }
            _ if self.sizes.iter().any(|size| *size > self.span_bytes || *size > 32 << 20) => {
                invalid("a request may be no longer than the part of the disk that is used, and than 32 MiB")
            }
            _ => Ok(()),
        }
    }

    /// Numbers of guests: each twice the one before, and all of them.
    fn steps(&self) -> Vec<u16> {
        let doubling = std::iter::successors(Some(1u16), |guests| guests.checked_mul(2));
        doubling.take_while(|guests| *guests < self.guests).chain([self.guests]).collect()
    }

    /// How long all of it takes, but for starting.
    pub fn duration(&self) -> Duration {
        let points = self.steps().len() * self.sizes.len() * self.paths.len() * 2;
        self.runtime * points as u32
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// What is behind the disks.
    pub storage: String,
    /// The part of each disk that is used.
    pub span_bytes: u64,
    /// How long each point took.
    #[serde(rename = "runtime_s")]
    pub runtime_seconds: f64,
    /// Requests in flight on each disk.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// One short run.
    #[serde(rename = "quick", default)]
    pub is_quick: bool,
}

/// One point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// The way.
    #[serde(rename = "way")]
    pub path: String,
    /// Write or read.
    #[serde(rename = "operation")]
    pub op: Direction,
    /// Guests at work.
    pub guests: u16,
    /// Disks of each.
    pub disks: u16,
    /// Bytes of a request.
    pub request_bytes: u64,
    /// Of all disks of all guests together; the median of the pieces of time that were measured.
    #[serde(rename = "bytes_per_s")]
    pub bytes_per_second: f64,
    /// A tenth of these pieces moved less.
    #[serde(rename = "bytes_per_s_p10", default)]
    pub bytes_per_second_p10: f64,
    /// Nine tenths of these pieces moved less.
    #[serde(rename = "bytes_per_s_p90", default)]
    pub bytes_per_second_p90: f64,
    /// The throughput by that of `grant-copy` in the same piece of time, where that was measured: the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy: Option<f64>,
    /// A tenth of these ratios is below this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy_p10: Option<f64>,
    /// Nine tenths of these ratios are below this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_grant_copy_p90: Option<f64>,
}

impl Row {
    /// The ratio to `grant-copy` and its spread.
    fn ratio(&self) -> Option<Spread> {
        Spread::of_columns(self.ratio_to_grant_copy_p10, self.ratio_to_grant_copy, self.ratio_to_grant_copy_p90)
    }

    /// The throughput and its spread.
    fn bytes_per_s(&self) -> Spread {
        Spread { p10: self.bytes_per_second_p10, p50: self.bytes_per_second, p90: self.bytes_per_second_p90 }
    }
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// When something does not start, or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at_some(parameters.storage.folder());
    let folder = Folder::new()?;
    progress("starting", 0.0);
    let mut disks = Disks::new(parameters.storage.clone(), parameters.span_bytes);
    let mut world = start(parameters, &folder, &mut disks)?;
    let mut rows = Vec::new();
    let points = points(parameters);
    for (number, point) in points.iter().enumerate() {
        let Point { direction, guests, request_bytes } = *point;
        let size = spile_server::units::format_size(request_bytes);
        progress(&format!("{guests} guests {} {size}", direction.name()), number as f64 / points.len() as f64);
        let rates = measure_in_turns(&mut world, parameters, point)?;
        let base = parameters.paths.iter().position(|ring| ring.name == BASE).map(|at| rates[at].clone());
        let paths = parameters.paths.iter().zip(&rates);
        rows.extend(paths.map(|(ring, rates)| row(ring, *point, parameters.disks, rates, base.as_deref())));
    }
    let asked = Asked {
        storage: parameters.storage.to_string(),
        span_bytes: parameters.span_bytes,
        runtime_seconds: parameters.runtime.as_secs_f64(),
        depth: 1,
        is_quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "aggregate".to_owned(), host, parameters: asked, rows })
}

/// What one path moved in each piece of time, and what [`BASE`] moved in the same ones.
fn row(ring: &RingPath, point: Point, disks: u16, rates: &[f64], base: Option<&[f64]>) -> Row {
    let rate = Spread::of(rates);
    let ratio = base.and_then(|base| Spread::of_ratios(rates, base));
    Row {
        path: ring.name.to_owned(),
        op: point.direction,
        guests: point.guests,
        disks,
        request_bytes: point.request_bytes,
        bytes_per_second: rate.p50,
        bytes_per_second_p10: rate.p10,
        bytes_per_second_p90: rate.p90,
        ratio_to_grant_copy: ratio.map(|ratio| ratio.p50),
        ratio_to_grant_copy_p10: ratio.map(|ratio| ratio.p10),
        ratio_to_grant_copy_p90: ratio.map(|ratio| ratio.p90),
    }
}

/// Where something is measured.
#[derive(Clone, Copy, Debug)]
struct Point {
    direction: Direction,
    guests: u16,
    request_bytes: u64,
}

/// First all writes, then all reads, as in the article.
fn points(parameters: &Parameters) -> Vec<Point> {
    let mut points = Vec::new();
    for direction in [Direction::Write, Direction::Read] {
        for guests in parameters.steps() {
            points.extend(parameters.sizes.iter().map(|size| Point { direction, guests, request_bytes: *size }));
        }
    }
    points
}

/// Guests from 1 on; the disks of the first path come first in each.
fn start(parameters: &Parameters, folder: &Folder, disks: &mut Disks) -> Result<World> {
    let mut world = World::new(folder.path())?;
    let max_request_bytes = parameters.sizes.iter().max().copied().unwrap_or(0);
    for guest in 1..=parameters.guests {
        let mut wanted = Vec::new();
        for path in &parameters.paths {
            for number in 0..parameters.disks {
                let params = disks.add(&format!("{guest}-{}-{number}", path.name))?;
                wanted.push(WantedDisk { path: *path, params, max_request_bytes, traced: 0, arguments: &[] });
            }
        }
        world.add_guest(guest, &wanted)?;
        if disks.keep_data() {
            fill(&mut world, guest, wanted.len(), max_request_bytes.min(1 << 20), parameters.span_bytes)?;
        }
    }
    Ok(world)
}

fn fill(world: &mut World, guest: u16, disks: usize, request_bytes: u64, span_bytes: u64) -> Result<()> {
    let requests = span_bytes.div_ceil(request_bytes) as u32;
    let direction = Direction::Write;
    let mut order = (0..disks).map(|disk| Order::Each { disk, direction, request_bytes, requests, span_bytes });
    order.try_for_each(|order| world.ask(guest, &order).map(drop))
}

/// The rates of each path, one of each piece.
fn measure_in_turns(world: &mut World, parameters: &Parameters, point: &Point) -> Result<Vec<Vec<f64>>> {
    let count = parameters.paths.len();
    let mut rates = vec![Vec::new(); count];
    for piece in 0..PIECES as usize {
        for turn in 0..count {
            // Another one begins each time.
            let path = (piece + turn) % count;
            rates[path].push(measure(world, parameters, path, point)?);
        }
    }
    Ok(rates)
}

/// Bytes in a second of all guests together, over the disks of one path, for one piece of the time.
fn measure(world: &mut World, parameters: &Parameters, path: usize, point: &Point) -> Result<f64> {
    let each = usize::from(parameters.disks);
    let (runtime, from) = (parameters.runtime / PIECES, now() + HEAD_START.as_nanos() as u64);
    let order = Order::Stream {
        disks: (path * each..(path + 1) * each).collect(),
        direction: point.direction,
        request_bytes: point.request_bytes,
        span_bytes: parameters.span_bytes,
        from_until_ns: (from, from + runtime.as_nanos() as u64),
    };
    (1..=point.guests).try_for_each(|guest| world.tell(guest, &order))?;
    // Every answer is heard, also after one that is bad: the next order is to find the guests ready.
    let answers: Vec<Result<Answer>> = (1..=point.guests).map(|guest| world.hear(guest, runtime)).collect();
    answers.into_iter().try_fold(0.0, |sum, answer| match answer? {
        Answer::BytesPerSecond(rate) => Ok(sum + rate),
        _ => Err(Error::new(ErrorKind::Protocol, "a guest answers something else")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_double_up_to_all() {
        let steps = |guests| Parameters { guests, ..Parameters::new(false) }.steps();
        assert_eq!((steps(1), steps(2), steps(10)), (vec![1], vec![1, 2], vec![1, 2, 4, 8, 10]));
    }

    #[test]
    fn writes_come_before_reads() {
        let points = points(&Parameters::new(true));
        assert_eq!(points.len(), 8);
        assert!(points.is_sorted_by_key(|point| point.direction == Direction::Read));
    }

    #[test]
    fn the_quick_one_is_quick() {
        assert!(Parameters::new(true).duration() <= Duration::from_secs(15));
        assert_eq!(Parameters::new(false).duration(), Duration::from_secs(10 * 5 * 14 * 3 * 2));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            Parameters { guests: 0, ..Parameters::new(true) },
            Parameters { sizes: vec![100], ..Parameters::new(true) },
            Parameters { sizes: vec![32 << 20], ..Parameters::new(true) },
            Parameters { paths: vec![], ..Parameters::new(true) },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
