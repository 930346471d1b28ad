//! `geometry`: does the speed of a device or file depend on the address?
//!
//! After Giacobbi and Vardanega (CLOSER 2011), who read 1 GiB every 5 GiB of a disk, directly and in large blocks: a spinning disk may be
//! faster at its outer tracks, and a device in a cloud may give a burst of speed first. Nothing is written to a target that is named.

mod show;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::units::format_size;
use utoipa::ToSchema;

use super::filled::{FilledFile, no_device, room_bytes};
use super::transfer::{Job, Operation, Side, Sides, Way};
use super::world::Folder;
use super::{HostFacts, Outcome};
pub use show::{figures, found, text};

/// The size of the blocks in bytes.
const BLOCK_BYTES: u64 = 1 << 20;
/// Positions at most, unless their distance is given.
const POSITIONS: u64 = 20;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// What is read; a file that is made, if none is named.
    pub target: Option<PathBuf>,
    /// The length of the file that is made, in bytes; it is less where space is short.
    pub file_bytes: u64,
    /// The folder of that file.
    pub folder: PathBuf,
    /// Bytes that are read at each position.
    pub length_bytes: u64,
    /// The distance of the positions in bytes; none: such that there are 20 at most.
    pub every_bytes: Option<u64>,
    /// A reading ends after this time.
    pub limit: Duration,
    /// The time after which no reading begins; none: all are made.
    pub within: Option<Duration>,
    /// Readings of each position and way.
    pub rounds: u32,
    /// The ways.
    pub ways: Vec<Way>,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// As in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let (file_bytes, length_bytes, limit, rounds) = match is_quick {
            false => (8 << 30, 1 << 30, Duration::from_secs(2), 2),
            true => (128 << 20, 16 << 20, Duration::from_millis(200), 1),
        };
        Self {
            target: None,
            file_bytes,
            folder: std::env::temp_dir(),
            length_bytes,
            every_bytes: None,
            limit,
            within: None,
            rounds,
            ways: vec![Way::Bare, Way::VhostUser],
            is_quick,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        match () {
            _ if self.rounds == 0 || self.limit.is_zero() || self.ways.is_empty() => {
                invalid("there is nothing to measure")
            }
            _ if self.length_bytes < BLOCK_BYTES => invalid("at each position 1 MiB is read at least"),
            _ if self.every_bytes.is_some_and(|every| every < BLOCK_BYTES) => {
                invalid("positions are 1 MiB apart at least")
            }
            _ if self.ways.contains(&Way::Xen) => invalid("there is no Xen guest that begins in the middle of a disk"),
            _ => Ok(()),
        }
    }

    /// The positions on a target of so many bytes, and their distance.
    fn positions(&self, size_bytes: u64) -> (Vec<u64>, u64) {
        let usual = self.length_bytes.max(size_bytes / POSITIONS).next_multiple_of(BLOCK_BYTES);
        let every = self.every_bytes.unwrap_or(usual) / BLOCK_BYTES * BLOCK_BYTES;
        let starts = std::iter::successors(Some(0u64), |start| start.checked_add(every));
        (starts.take_while(|start| start + self.length_bytes <= size_bytes).collect(), every)
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// What was read.
    pub target: String,
    /// Its length.
    pub target_bytes: u64,
    /// Bytes that were read at each position.
    pub length_bytes: u64,
    /// The distance of the positions.
    pub every_bytes: u64,
    /// Bytes of a block.
    pub request_bytes: u64,
    /// The time at which a reading ended, in seconds.
    pub limit_s: f64,
    /// Rounds.
    pub rounds: u32,
    /// Why readings are missing, if they are.
    #[serde(default)]
    pub ended_early: Option<String>,
    /// Why these are not the figures of a disk: what the target lay on; none when it was a block device.
    #[serde(default)]
    pub no_device: Option<String>,
    /// True for a short run, whose figures show that it works.
    pub quick: bool,
}

/// One reading.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// How the bytes were reached.
    pub way: Way,
    /// Where it began.
    pub offset_bytes: u64,
    /// The round, from 0.
    pub round: u32,
    /// Bytes that were read; fewer than asked for when the time was over.
    pub bytes: u64,
    /// The time that it took, in seconds.
    pub seconds: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// True when time ended the reading before all was read.
    #[serde(default)]
    pub cut: bool,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure, or the target is too short; else when it cannot be opened, a server does not start,
/// or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at(parameters.target.as_ref().unwrap_or(&parameters.folder));
    let begun = Instant::now();
    let folder = Folder::new()?;
    progress("find the target", 0.0);
    let made = match parameters.target {
        Some(_) => None,
        None => Some(own_file(parameters)?),
    };
    let target = made.as_ref().map(FilledFile::path).or(parameters.target.as_deref()).expect("one of both is there");
    let target_bytes = length(target)?;
    let (positions, every_bytes) = parameters.positions(target_bytes);
    if positions.is_empty() {
        let what = format!("it is shorter than the {} that are read", format_size(parameters.length_bytes));
        return Err(Error::new(ErrorKind::InvalidInput, what)).at_path(target);
    }
    let mut sides = Sides::only_read(folder.path(), &[target.to_owned()])?;
    let readings = readings(parameters, &positions);
    let (mut rows, mut ended_early) = (Vec::new(), None);
    for (number, reading) in readings.iter().enumerate() {
        if let Some(within) = parameters.within.filter(|within| begun.elapsed() >= *within) {
            let (after, all) = (within.as_secs(), readings.len());
            ended_early = Some(format!("the time of {after} s was over after {number} of {all} readings"));
            break;
        }
        progress(&format!("at {}", format_size(reading.offset_bytes)), number as f64 / readings.len() as f64);
        rows.push(reading.make(&mut sides, parameters)?);
    }
    drop(sides);
    let asked = Asked {
        target: parameters.target.as_ref().map_or_else(|| "a file".to_owned(), |path| path.display().to_string()),
        target_bytes,
        length_bytes: parameters.length_bytes,
        every_bytes,
        request_bytes: BLOCK_BYTES,
        limit_s: parameters.limit.as_secs_f64(),
        rounds: parameters.rounds,
        ended_early,
        no_device: no_device(parameters.target.as_deref().unwrap_or(&parameters.folder)),
        quick: parameters.is_quick,
    };
    Ok(Outcome { experiment: "geometry".to_owned(), host, parameters: asked, rows })
}

/// The length of a file or block device in bytes.
fn length(path: &Path) -> Result<u64> {
    use std::io::{Seek, SeekFrom};
    let length = std::fs::File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0)));
    length.map_err(|e| Error::io("find its length", e)).at_path(path)
}

/// A file in the folder, of a quarter of the free space at most.
fn own_file(parameters: &Parameters) -> Result<FilledFile> {
    let room_bytes = room_bytes(&parameters.folder)?.max(parameters.length_bytes);
    let len_bytes = parameters.file_bytes.min(room_bytes) / BLOCK_BYTES * BLOCK_BYTES;
    FilledFile::new(&parameters.folder, "geometry.raw", len_bytes)
}

/// One reading that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    way: Way,
    offset_bytes: u64,
    round: u32,
}

/// All readings. The ways of a position follow each other, and another one begins each time.
fn readings(parameters: &Parameters, positions: &[u64]) -> Vec<Reading> {
    let ways = &parameters.ways;
    let mut readings = Vec::new();
    for round in 0..parameters.rounds {
        for (number, &offset_bytes) in positions.iter().enumerate() {
            let in_turn = (0..ways.len()).map(|turn| ways[(turn + number + round as usize) % ways.len()]);
            readings.extend(in_turn.map(|way| Reading { way, offset_bytes, round }));
        }
    }
    readings
}

impl Reading {
    fn make(self, sides: &mut Sides, parameters: &Parameters) -> Result<Row> {
        let Self { way, offset_bytes, round } = self;
        let total_bytes = parameters.length_bytes / BLOCK_BYTES * BLOCK_BYTES;
        let job = Job {
            operation: Operation::ReadDirect,
            block_bytes: BLOCK_BYTES,
            start_bytes: offset_bytes,
            total_bytes,
            limit: parameters.limit,
        };
        let moved = sides.run(Side { place: 0, way }, &job)?;
        let (bytes, seconds, bytes_per_s) = (moved.bytes, moved.seconds, moved.bytes_per_s());
        Ok(Row { way, offset_bytes, round, bytes, seconds, bytes_per_s, cut: bytes < total_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_lie_all_over_the_target() {
        let parameters = Parameters { length_bytes: 1 << 30, ..Parameters::new(false) };
        let (positions, every) = parameters.positions(8 << 30);
        assert_eq!((positions.len(), every), (8, 1 << 30));
        let (positions, every) = parameters.positions(100 << 30);
        assert_eq!((positions.len(), every), (20, 5 << 30));
        let parameters = Parameters { every_bytes: Some(3 << 30), ..parameters };
        assert_eq!(parameters.positions(8 << 30).0, [0, 3 << 30, 6 << 30]);
        assert!(parameters.positions(1000).0.is_empty());
    }

    #[test]
    fn another_way_begins_at_each_position() {
        let parameters = Parameters { rounds: 2, ..Parameters::new(true) };
        let ways: Vec<Way> = readings(&parameters, &[0, 5]).iter().map(|reading| reading.way).collect();
        use Way::{Bare, VhostUser};
        assert_eq!(ways, [Bare, VhostUser, VhostUser, Bare, VhostUser, Bare, Bare, VhostUser]);
    }
}
