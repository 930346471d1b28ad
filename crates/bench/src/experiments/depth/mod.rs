//! `depth`: how many requests wait at each layer, against how many the guest keeps in flight?
//!
//! After the article on average queue sizes (2014): a client reads a disk from start to end, with 1 to 64 requests of 4 KiB in
//! flight. Each layer integrates its queue over time, and each layer's figure is set beside what an averaging tool makes of it:
//! the time that ended requests took, divided by the interval. Of the host's device the kernel counts nothing but that.
//!
//! There are two disks: a raw file on the host's device, past the page cache, and an NBD export whose requests take a stated time
//! longer, so that the picture is clear on any machine. A second part has long requests and short intervals: there the
//! averaging tool shows nothing in one interval and too much in the next.

mod served;
mod show;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::world::Folder;
use super::{HostFacts, Outcome};
use crate::load;
use served::{Sample, Served};
pub use show::{figures, found, text};

/// The size of the requests, as in the article.
const REQUEST_BYTES: u32 = 4096;
/// How long each request of the second part takes.
const LONG: Duration = Duration::from_millis(250);
/// The intervals of the second part, of which a request lasts two and a half.
const INTERVAL: Duration = Duration::from_millis(100);
/// Requests in flight in the second part.
const LONG_DEPTH: u32 = 8;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Requests in flight, one row of the tables for each.
    pub depths: Vec<u32>,
    /// Rounds, of one run for each way and depth.
    pub rounds: u32,
    /// How long a run takes.
    pub runtime: Duration,
    /// How much longer each request to the slow export takes.
    pub delay: Duration,
    /// The folder of the file on the host's device.
    pub folder: PathBuf,
    /// The length of that file in bytes.
    pub file_bytes: u64,
    /// Intervals of the second part.
    pub intervals: u32,
    /// Requests go to random places, instead of from start to end.
    pub is_random: bool,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// As in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let common = Self {
            depths: (0..=6).map(|power| 1 << power).collect(),
            rounds: 3,
            runtime: Duration::from_secs(2),
            delay: Duration::from_micros(100),
            folder: std::env::temp_dir(),
            file_bytes: 1 << 30,
            intervals: 50,
            is_random: false,
            is_quick,
        };
        match is_quick {
            false => common,
            true => Self {
                depths: vec![1, 8, 64],
                rounds: 1,
                runtime: Duration::from_millis(300),
                file_bytes: 64 << 20,
                intervals: 10,
                ..common
            },
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        match () {
            _ if self.depths.is_empty() || self.rounds == 0 || self.runtime.is_zero() => {
                invalid("there is nothing to measure")
            }
            _ if self.depths.iter().any(|depth| !(1..=128).contains(depth)) => {
                invalid("from 1 to 128 requests can be in flight")
            }
            _ if self.file_bytes < 1 << 20 => invalid("the file must have 1 MiB at least"),
            _ => Ok(()),
        }
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Requests in flight.
    pub queue_depths: Vec<u32>,
    /// Rounds.
    pub rounds: u32,
    /// How long a run took, in seconds.
    pub runtime_s: f64,
    /// How much longer each request to the slow export took, in microseconds.
    pub delay_us: f64,
    /// Bytes of a request.
    pub request_bytes: u32,
    /// True when requests went to random places, false when from start to end.
    pub random: bool,
    /// The host's device below the file; none when the kernel does not name one.
    pub host_device: Option<String>,
    /// How long a request of the second part took, in milliseconds.
    pub long_request_ms: f64,
    /// The intervals of the second part, in milliseconds.
    pub interval_ms: f64,
    /// True for a short run, whose figures show that it works.
    pub quick: bool,
}

/// What the rows belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Growing depth: a row for a whole run.
    Growing,
    /// Long requests: a row for each short interval.
    Intervals,
}

/// What is behind the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// An export whose requests take a stated time longer.
    Delay,
    /// A file on the host's device.
    Device,
}

/// How the client reaches the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// An NBD client.
    Nbd,
    /// A guest's queue.
    VhostUser,
}

/// Where requests are counted, the client's side first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// The client or guest.
    Client,
    /// The server's front.
    Front,
    /// The disk.
    Disk,
    /// The image.
    Image,
    /// The store below the image.
    Store,
    /// The host's device, or the slow export, which stands for one.
    HostDevice,
}

impl Store {
    const ALL: [Self; 2] = [Self::Delay, Self::Device];

    fn name(self) -> &'static str {
        match self {
            Self::Delay => "delay",
            Self::Device => "device",
        }
    }
}

impl Way {
    const ALL: [Self; 2] = [Self::Nbd, Self::VhostUser];

    fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
        }
    }
}

impl Layer {
    const ALL: [Self; 6] = [Self::Client, Self::Front, Self::Disk, Self::Image, Self::Store, Self::HostDevice];

    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Front => "front",
            Self::Disk => "disk",
            Self::Image => "image",
            Self::Store => "store",
            Self::HostDevice => "host device",
        }
    }
}

/// One layer in one run or interval.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// What the row belongs to.
    pub part: Part,
    /// What is behind the disk.
    pub store: Store,
    /// How the client reaches it.
    pub way: Way,
    /// Requests that the client keeps in flight.
    pub queue_depth: u32,
    /// The round, or the interval of the second part, from 0.
    pub round: u32,
    /// Where it is counted.
    pub layer: Layer,
    /// Requests that have ended there, each second.
    pub requests_per_s: f64,
    /// Requests in flight there, integrated over time. None for a device of the host, whose kernel does not integrate.
    pub queue_size_avg: Option<f64>,
    /// The time that ended requests took, divided by the interval: what an averaging tool shows.
    pub queue_size_iostat: f64,
    /// The mean time of a request there, in microseconds; 0 when none has ended.
    pub latency_mean_us: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a process does not start or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at(&parameters.folder);
    let folder = Folder::new()?;
    progress("make the disks", 0.0);
    let delay = Served::on_export(folder.path(), "delay", parameters.delay)?;
    let device = Served::on_file(folder.path(), "device", &parameters.folder, parameters.file_bytes)?;
    let points = points(parameters);
    let mut rows = Vec::new();
    for (number, point) in points.iter().enumerate() {
        let what = format!("{}, {}, depth {}", point.store.name(), point.way.name(), point.depth);
        progress(&what, 0.95 * number as f64 / points.len() as f64);
        let served = if point.store == Store::Delay { &delay } else { &device };
        rows.extend(point.measure(served, parameters)?);
    }
    progress("long requests, short intervals", 0.95);
    rows.extend(long_requests(&Served::on_export(folder.path(), "long", LONG)?, parameters)?);
    let asked = asked(parameters, device.device_name());
    Ok(Outcome { experiment: "depth".to_owned(), host, parameters: asked, rows })
}

fn asked(parameters: &Parameters, host_device: Option<String>) -> Asked {
    Asked {
        queue_depths: parameters.depths.clone(),
        rounds: parameters.rounds,
        runtime_s: parameters.runtime.as_secs_f64(),
        delay_us: parameters.delay.as_secs_f64() * 1e6,
        request_bytes: REQUEST_BYTES,
        random: parameters.is_random,
        host_device,
        long_request_ms: LONG.as_secs_f64() * 1e3,
        interval_ms: INTERVAL.as_secs_f64() * 1e3,
        quick: parameters.is_quick,
    }
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    store: Store,
    way: Way,
    depth: u32,
    round: u32,
}

/// All runs. The ways take turns, and another one begins in each round.
fn points(parameters: &Parameters) -> Vec<Point> {
    let mut points = Vec::new();
    for round in 0..parameters.rounds {
        for store in Store::ALL {
            for &depth in &parameters.depths {
                let mut ways = Way::ALL;
                ways.rotate_left(round as usize % Way::ALL.len());
                points.extend(ways.map(|way| Point { store, way, depth, round }));
            }
        }
    }
    points
}

impl Point {
    /// The rows of this run. Nothing is in flight before and after it, so that the whole of it counts at every layer.
    fn measure(self, served: &Served, parameters: &Parameters) -> Result<Vec<Row>> {
        let before = served.sample()?;
        let report = load::measure(&served.load(self.way, self.depth, parameters.runtime, parameters.is_random))?;
        let since = served.sample()?.since(&before, report.runtime_s);
        let client = Row {
            requests_per_s: report.iops,
            queue_size_avg: Some(report.queue_depth_avg),
            queue_size_iostat: report.queue_depth_little,
            latency_mean_us: report.read.latency_mean_us,
            ..self.row(Part::Growing, Layer::Client)
        };
        Ok(std::iter::once(client).chain(self.rows(Part::Growing, &since)).collect())
    }

    fn row(self, part: Part, layer: Layer) -> Row {
        Row {
            part,
            store: self.store,
            way: self.way,
            queue_depth: self.depth,
            round: self.round,
            layer,
            requests_per_s: 0.0,
            queue_size_avg: None,
            queue_size_iostat: 0.0,
            latency_mean_us: 0.0,
        }
    }

    fn rows(self, part: Part, since: &[served::Since]) -> impl Iterator<Item = Row> {
        since.iter().map(move |since| Row {
            requests_per_s: since.requests_per_s,
            queue_size_avg: since.queue_size_avg,
            queue_size_iostat: since.queue_size_iostat,
            latency_mean_us: since.latency_mean_us,
            ..self.row(part, since.layer)
        })
    }
}

/// The second part: a client with long requests in flight, looked at in short intervals while it runs.
fn long_requests(served: &Served, parameters: &Parameters) -> Result<Vec<Row>> {
    let runtime = INTERVAL * (parameters.intervals + 1) + LONG;
    let options = served.load(Way::Nbd, LONG_DEPTH, runtime, true);
    std::thread::scope(|scope| {
        let load = scope.spawn(move || load::measure(&options));
        // The first requests are under way.
        std::thread::sleep(INTERVAL / 2);
        let samples: Result<Vec<Sample>> = (0..=parameters.intervals)
            .map(|interval| {
                if interval > 0 {
                    std::thread::sleep(INTERVAL);
                }
                served.sample()
            })
            .collect();
        load.join().expect("a load does not panic")?;
        let samples = samples?;
        let pairs = samples.windows(2).zip(0..);
        let rows = pairs.flat_map(|(pair, round)| {
            let point = Point { store: Store::Delay, way: Way::Nbd, depth: LONG_DEPTH, round };
            let since = pair[1].since(&pair[0], pair[1].seconds_since(&pair[0]));
            point.rows(Part::Intervals, &since).collect::<Vec<_>>()
        });
        Ok(rows.collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_take_turns() {
        let parameters = Parameters { depths: vec![1], rounds: 2, ..Parameters::new(true) };
        let ways: Vec<Way> = points(&parameters).iter().map(|point| point.way).collect();
        use Way::{Nbd, VhostUser};
        assert_eq!(ways, [Nbd, VhostUser, Nbd, VhostUser, VhostUser, Nbd, VhostUser, Nbd]);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            Parameters { depths: vec![], ..Parameters::new(true) },
            Parameters { depths: vec![0], ..Parameters::new(true) },
            Parameters { rounds: 0, ..Parameters::new(true) },
            Parameters { file_bytes: 4096, ..Parameters::new(true) },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
