//! `layers`: what does a file cost beside a partition and a logical volume, bare and through each front?
//!
//! After Giacobbi and Vardanega (CLOSER 2011): 1 GiB is written through the page cache, written directly and read directly, in blocks
//! of 512 bytes to 1 MiB, one request at a time. They had a machine for each kind of place; here the places lie beside each other on
//! one device, and all sides of a point take turns. Small blocks would take minutes for 1 GiB: a transfer ends when its time is over, and
//! its figure says so. A buffered write has no more bytes than the device took in that time when the files were filled, because nothing can
//! end its sync.

mod places;
mod show;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use spile_server::units::format_size;
use utoipa::ToSchema;

use super::filled::{check_room, no_device};
use super::transfer::{Job, Moved, Operation, Side, Sides, Way, most_buffered_bytes};
use super::world::Folder;
use super::{HostFacts, Outcome};
pub use places::Kind;
use places::Place;
pub use show::{figures, found, text};

/// Through Spile, a file may be so much slower than a partition: the aim.
pub const AIM_RATIO: f64 = 0.95;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Bytes of each transfer.
    pub total_bytes: u64,
    /// Sizes of blocks in bytes.
    pub sizes: Vec<u64>,
    /// The time at which a transfer ends.
    pub limit: Duration,
    /// The time after which no transfer begins; none: all are made.
    pub within: Option<Duration>,
    /// Transfers of each side, block size and operation.
    pub rounds: u32,
    /// The places.
    pub places: Vec<Kind>,
    /// The ways.
    pub ways: Vec<Way>,
    /// The folder of the files.
    pub folder: PathBuf,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// As in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let (total_bytes, sizes, limit, rounds) = match is_quick {
            false => (1 << 30, (9..=20).map(|power| 1 << power).collect(), Duration::from_secs(1), 2),
            true => (32 << 20, vec![4 << 10, 64 << 10, 1 << 20], Duration::from_millis(100), 1),
        };
        let (places, ways) = (Kind::ALL.to_vec(), Way::ALL.to_vec());
        Self { total_bytes, sizes, limit, within: None, rounds, places, ways, folder: std::env::temp_dir(), is_quick }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        let largest = self.sizes.iter().max().copied().unwrap_or(0);
        match () {
            _ if largest == 0 || self.rounds == 0 || self.limit.is_zero() || self.places.is_empty() => {
                invalid("there is nothing to measure")
            }
            _ if self.sizes.iter().any(|size| !size.is_multiple_of(512)) => {
                invalid("blocks are multiples of 512 bytes")
            }
            _ if largest > self.total_bytes || largest > 32 << 20 => {
                invalid("a block may be no longer than all that is moved, and than 32 MiB")
            }
            _ => Ok(()),
        }
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Bytes of each transfer.
    pub total_bytes: u64,
    /// Sizes of blocks.
    pub request_bytes: Vec<u64>,
    /// The time at which a transfer ended, in seconds.
    pub limit_s: f64,
    /// Rounds.
    pub rounds: u32,
    /// Where the files lay.
    pub folder: String,
    /// Why these are not the figures of a disk: what the files lay on; none when it was a block device.
    #[serde(default)]
    pub no_device: Option<String>,
    /// True for a short run, whose figures show that it works.
    pub quick: bool,
    /// Places and points that were left out, each with the reason.
    pub left_out: Vec<String>,
}

/// One transfer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Where the bytes were.
    pub place: Kind,
    /// How they were reached.
    pub way: Way,
    /// What was done.
    pub operation: Operation,
    /// Bytes of a block.
    pub request_bytes: u64,
    /// The round, from 0.
    pub round: u32,
    /// Bytes that were moved.
    pub bytes: u64,
    /// The time that it took, in seconds.
    pub seconds: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// True when time ended the transfer: what the whole would take is extrapolated.
    pub cut: bool,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when the file cannot be made, a server does not start, or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    check_room(&parameters.folder, parameters.total_bytes * parameters.places.len() as u64)?;
    let (host, begun) = (HostFacts::at(&parameters.folder), Instant::now());
    let folder = Folder::new()?;
    progress("make the places", 0.0);
    let mut left_out = Vec::new();
    let places = places(parameters, &mut left_out)?;
    let paths: Vec<PathBuf> = places.iter().map(|place| place.path.clone()).collect();
    let largest = parameters.sizes.iter().max().copied().unwrap_or(0);
    let mut sides = Sides::new(folder.path(), &paths, &parameters.ways, largest)?;
    let points = points(parameters, places.len());
    let filled_bytes_per_s = places.iter().map(|place| place.filled_bytes_per_s).fold(f64::MAX, f64::min);
    let mut rows = Vec::new();
    for (number, point) in points.iter().enumerate() {
        if let Some(within) = parameters.within.filter(|within| begun.elapsed() >= *within) {
            let (after, all) = (within.as_secs(), points.len());
            left_out.push(format!("{} of {all} transfers: the time of {after} s was over", all - number));
            break;
        }
        let what = format!("{}, blocks of {}", point.operation.name(), format_size(point.block_bytes));
        progress(&what, number as f64 / points.len() as f64);
        match sides.run(point.side, &point.job(parameters, filled_bytes_per_s)) {
            Ok(moved) => rows.push(point.row(places[point.side.place].kind, parameters, moved)),
            // A device with sectors of 4 KiB takes no smaller blocks.
            Err(error) if point.side.way == Way::Bare && point.block_bytes < 4096 => {
                let what = format!("blocks of {}, bare, {}: {error}", point.block_bytes, point.operation.name());
                if !left_out.contains(&what) {
                    left_out.push(what);
                }
            }
            Err(error) => return Err(error),
        }
    }
    drop(sides);
    let asked = Asked {
        total_bytes: parameters.total_bytes,
        request_bytes: parameters.sizes.clone(),
        limit_s: parameters.limit.as_secs_f64(),
        rounds: parameters.rounds,
        folder: parameters.folder.display().to_string(),
        no_device: no_device(&parameters.folder),
        quick: parameters.is_quick,
        left_out,
    };
    Ok(Outcome { experiment: "layers".to_owned(), host, parameters: asked, rows })
}

/// The places that this host can have. The file is needed, the others are left out with their reasons.
fn places(parameters: &Parameters, left_out: &mut Vec<String>) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for kind in &parameters.places {
        match Place::new(*kind, &parameters.folder, parameters.total_bytes) {
            Ok(place) => places.push(place),
            Err(error) if *kind == Kind::File => return Err(error),
            Err(error) => left_out.push(format!("{}: {error}", kind.name())),
        }
    }
    Ok(places)
}

/// One transfer that is to be made.
#[derive(Clone, Copy, Debug)]
struct Point {
    side: Side,
    operation: Operation,
    block_bytes: u64,
    round: u32,
}

/// All transfers. All sides of a point follow each other, and another one begins each time.
fn points(parameters: &Parameters, places: usize) -> Vec<Point> {
    let sides = (0..places).flat_map(|place| parameters.ways.iter().map(move |way| Side { place, way: *way }));
    let sides: Vec<Side> = sides.collect();
    let mut points = Vec::new();
    let mut turn = 0;
    for round in 0..parameters.rounds {
        for operation in Operation::ALL {
            for &block_bytes in &parameters.sizes {
                let in_turn = (0..sides.len()).map(|side| sides[(side + turn) % sides.len()]);
                points.extend(in_turn.map(|side| Point { side, operation, block_bytes, round }));
                turn += 1;
            }
        }
    }
    points
}

impl Point {
    fn job(self, parameters: &Parameters, filled_bytes_per_s: f64) -> Job {
        let Parameters { total_bytes, limit, .. } = *parameters;
        let total_bytes = match self.operation {
            Operation::WriteBuffered => most_buffered_bytes(total_bytes, self.block_bytes, filled_bytes_per_s, limit),
            Operation::WriteDirect | Operation::ReadDirect => total_bytes,
        };
        Job { operation: self.operation, block_bytes: self.block_bytes, start_bytes: 0, total_bytes, limit }
    }

    fn row(self, place: Kind, parameters: &Parameters, moved: Moved) -> Row {
        Row {
            place,
            way: self.side.way,
            operation: self.operation,
            request_bytes: self.block_bytes,
            round: self.round,
            bytes: moved.bytes,
            seconds: moved.seconds,
            bytes_per_s: moved.bytes_per_s(),
            cut: moved.bytes + self.block_bytes <= parameters.total_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_begins_in_its_turn() {
        let parameters = Parameters { ways: vec![Way::Bare, Way::Nbd], ..Parameters::new(true) };
        let points = points(&parameters, 2);
        assert_eq!(points.len(), 3 * 3 * 4);
        let first: Vec<Side> = points.chunks(4).take(5).map(|point| point[0].side).collect();
        let side = |place, way| Side { place, way };
        use Way::{Bare, Nbd};
        assert_eq!(first, [side(0, Bare), side(0, Nbd), side(1, Bare), side(1, Nbd), side(0, Bare)]);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            Parameters { sizes: vec![], ..Parameters::new(true) },
            Parameters { sizes: vec![100], ..Parameters::new(true) },
            Parameters { total_bytes: 4096, ..Parameters::new(true) },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
