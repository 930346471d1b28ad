//! `warmup`: how much has to be moved until a figure of throughput can be trusted?
//!
//! After Giacobbi and Vardanega (CLOSER 2011): 1 MiB, 2 MiB and so on up to 16 GiB are written through the page cache, written directly and
//! read directly, in blocks of 1 MiB, one request at a time. A figure is stable from the size on from which all further ones lie close to
//! their median. The file is filled before, so that no size pays for its space.

mod show;

use std::path::PathBuf;
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
/// The shortest time that a transfer is given.
const LEAST_LIMIT: Duration = Duration::from_millis(100);
/// Figures are stable when they lie within this share of their median.
pub const STABLE_SHARE: f64 = 0.05;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// The most that is moved at a time, in bytes.
    pub most_bytes: u64,
    /// No size is begun that would take longer than what is left of this time, and no block after it.
    pub limit: Duration,
    /// Transfers of each size, way and operation.
    pub rounds: u32,
    /// The ways.
    pub ways: Vec<Way>,
    /// The folder of the file.
    pub folder: PathBuf,
    /// A short run.
    pub is_quick: bool,
}

impl Parameters {
    /// As in the article, or little.
    pub fn new(is_quick: bool) -> Self {
        let (most_bytes, limit, rounds) = match is_quick {
            false => (16 << 30, Duration::from_secs(300), 2),
            true => (64 << 20, Duration::from_secs(8), 1),
        };
        let ways = vec![Way::Bare, Way::VhostUser];
        Self { most_bytes, limit, rounds, ways, folder: std::env::temp_dir(), is_quick }
    }

    /// The sizes, each twice the one before.
    fn sizes(&self) -> Vec<u64> {
        let doubling = std::iter::successors(Some(BLOCK_BYTES), |size| size.checked_mul(2));
        doubling.take_while(|size| *size <= self.most_bytes).collect()
    }

    fn check(&self) -> Result<()> {
        if self.sizes().is_empty() || self.rounds == 0 || self.ways.is_empty() || self.limit.is_zero() {
            return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
        }
        Ok(())
    }
}

/// [`Parameters`] as figures have them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Asked {
    /// Bytes of a block.
    pub request_bytes: u64,
    /// The most that was to be moved at a time, in bytes.
    pub most_bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// Where the file lay.
    pub folder: String,
    /// Why these are not the figures of a disk: what the file lay on; none when it was a block device.
    #[serde(default)]
    pub no_device: Option<String>,
    /// True for a short run, whose figures show that it works.
    pub quick: bool,
    /// Why the largest sizes are missing, if they are.
    pub ended_early: Option<String>,
}

/// One transfer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// How the bytes were reached.
    pub way: Way,
    /// What was done.
    pub operation: Operation,
    /// Bytes that were to be moved.
    pub size_bytes: u64,
    /// Bytes that were moved: fewer when the time was over.
    pub bytes: u64,
    /// The round, from 0.
    pub round: u32,
    /// The time that it took, in seconds; that of a buffered write with its sync.
    pub seconds: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when the file cannot be made, a server does not start, or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Asked, Row>> {
    parameters.check()?;
    let host = HostFacts::at(&parameters.folder);
    let begun = Instant::now();
    let folder = Folder::new()?;
    let (sizes, mut ended_early) = sizes_that_fit(parameters)?;
    let largest = sizes.last().copied().unwrap_or(BLOCK_BYTES);
    let file = FilledFile::sparse(&parameters.folder, "warmup.raw", largest)?;
    let mut sides = Sides::new(folder.path(), &[file.path().to_owned()], &parameters.ways, BLOCK_BYTES)?;
    let mut rows = Vec::new();
    let mut last = Duration::ZERO;
    for &bytes in &sizes {
        // A size takes twice as long as the one before.
        if begun.elapsed() + 2 * last >= parameters.limit {
            let (after, size) = (parameters.limit.as_secs_f64(), format_size(bytes));
            ended_early = Some(format!("the time of {after} s does not suffice for {size}"));
            break;
        }
        let of_size = Instant::now();
        // The time grows with the sizes: half of it goes into the last one.
        progress(&format_size(bytes), bytes as f64 / (2 * largest) as f64);
        file.fill_to(bytes)?;
        for round in 0..parameters.rounds {
            rows.extend(one_round(&mut sides, parameters, bytes, round, begun)?);
        }
        last = of_size.elapsed();
    }
    drop(sides);
    let asked = Asked {
        request_bytes: BLOCK_BYTES,
        most_bytes: parameters.most_bytes,
        rounds: parameters.rounds,
        folder: parameters.folder.display().to_string(),
        no_device: no_device(&parameters.folder),
        quick: parameters.is_quick,
        ended_early,
    };
    Ok(Outcome { experiment: "warmup".to_owned(), host, parameters: asked, rows })
}

/// The sizes for which there is space, and why it is not all of them.
fn sizes_that_fit(parameters: &Parameters) -> Result<(Vec<u64>, Option<String>)> {
    let room_bytes = room_bytes(&parameters.folder)?;
    let mut sizes = parameters.sizes();
    let wanted = sizes.len();
    sizes.retain(|size| *size <= room_bytes);
    match sizes.len() {
        0 => Err(Error::new(ErrorKind::NoSpace, "there is no space for the file")).at_path(&parameters.folder),
        some if some < wanted => {
            Ok((sizes, Some(format!("a quarter of the free space is {}", format_size(room_bytes)))))
        }
        _ => Ok((sizes, None)),
    }
}

/// The three operations of one size on all ways, which take turns.
fn one_round(
    sides: &mut Sides,
    parameters: &Parameters,
    size_bytes: u64,
    round: u32,
    begun: Instant,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (turn, operation) in Operation::ALL.into_iter().enumerate() {
        let count = parameters.ways.len();
        for number in 0..count {
            let way = parameters.ways[(number + turn + round as usize) % count];
            let job = Job {
                operation,
                block_bytes: BLOCK_BYTES,
                start_bytes: 0,
                total_bytes: size_bytes,
                limit: parameters.limit.saturating_sub(begun.elapsed()).max(LEAST_LIMIT),
            };
            let moved = sides.run(Side { place: 0, way }, &job)?;
            let (bytes, seconds, bytes_per_s) = (moved.bytes, moved.seconds, moved.bytes_per_s());
            rows.push(Row { way, operation, size_bytes, bytes, round, seconds, bytes_per_s });
        }
    }
    Ok(rows)
}

/// The least of the sizes from which on all speeds lie within [`STABLE_SHARE`] of their median; `None` when only the last does.
pub fn stable_from(speeds: &[(u64, f64)]) -> Option<u64> {
    let is_stable = |speeds: &[(u64, f64)]| {
        let middle = super::sample::median(speeds.iter().map(|(_, speed)| *speed).collect());
        speeds.iter().all(|(_, speed)| (speed - middle).abs() <= STABLE_SHARE * middle)
    };
    let first = (0..speeds.len().saturating_sub(1)).find(|first| is_stable(&speeds[*first..]))?;
    Some(speeds[first].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reads_of_the_article_are_stable_from_8_mib_on() {
        let speeds =
            [26.8, 83.5, 109.6, 106.0, 102.6, 106.4, 105.5, 101.4, 101.9, 102.2, 102.3, 102.2, 102.3, 102.2, 101.5];
        let sizes = (0..).map(|power| BLOCK_BYTES << power);
        let speeds: Vec<(u64, f64)> = sizes.zip(speeds).collect();
        // Within 5 %: from 8 MiB on.
        assert_eq!(stable_from(&speeds), Some(8 << 20));
        assert_eq!(stable_from(&speeds[..2]), None);
        assert_eq!(stable_from(&[]), None);
    }

    #[test]
    fn sizes_double_up_to_the_most() {
        let sizes = |most_bytes| Parameters { most_bytes, ..Parameters::new(true) }.sizes();
        assert_eq!(sizes(5 << 20), [1 << 20, 2 << 20, 4 << 20]);
        assert!(Parameters { most_bytes: 1000, ..Parameters::new(true) }.check().is_err());
    }
}
