//! `promises`: is kept what Spile promises of the life of a disk?
//!
//! Each line is one promise, and is measured by itself: a clone, a delete, four merges at a time, a merge that is killed, a mirror, a hand-over, a link
//! that is cut, a way back, a backup whose target hangs, changes of limits and jobs, a cold snapshot, and copies that stay sparse. The server,
//! the other host (`spile receive`) and the commands are processes of their own, as in production; guests are on vhost-user. Where a guest
//! with the work is set beside one without, both have a run in each round, and which comes first changes from round to round.
//!
//! Other promises have experiments of their own: `snapshot`, `merge`, `limit`, `checkpoint`.

mod figure;
mod images;
mod jobs;
mod link;
mod motion;
mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use utoipa::ToSchema;

pub use figure::{Figure, Line};
pub use show::{figures, found, text};

use super::filled::check_room;
use super::live::{Felt, beside};
use super::sample::median;
use super::world::Folder;
use super::{HostFacts, Outcome};
use crate::load;

/// How long a job may take that must end.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// The lines that are measured.
    pub lines: Vec<Line>,
    /// The size of most disks, in bytes.
    #[serde(rename = "virtual_size_bytes")]
    pub disk_bytes: u64,
    /// The size of the disk of which clones are made, in bytes; it is a sparse qcow2.
    pub cloned_bytes: u64,
    /// Images of the chain of a disk that gets a cold snapshot.
    pub chain: u32,
    /// Requests in flight.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// Rounds.
    pub rounds: u32,
    /// Seconds of a run of a guest.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// Seconds for which the link is cut.
    pub cut_s: f64,
    /// Where the images lie.
    #[schema(value_type = String)]
    pub folder: PathBuf,
    /// Where those of the other host lie, if not beside the others.
    #[schema(value_type = Option<String>)]
    #[serde(default)]
    pub there: Option<PathBuf>,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Three rounds of all lines, or a short one.
    pub fn new(is_quick: bool) -> Self {
        let (disk_bytes, chain, rounds, seconds, cut_s) =
            if is_quick { (32 << 20, 4, 1, 0.2, 0.5) } else { (128 << 20, 30, 3, 1.0, 3.0) };
        Self {
            lines: Line::ALL.to_vec(),
            disk_bytes,
            cloned_bytes: 16 << 40,
            chain,
            depth: 32,
            rounds,
            seconds,
            cut_s,
            folder: std::env::temp_dir(),
            there: None,
            quick: is_quick,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::InvalidInput, what));
        match () {
            _ if self.lines.is_empty() || self.rounds == 0 || self.depth == 0 => invalid("there is nothing to measure"),
            _ if self.seconds <= 0.0 || self.cut_s <= 0.0 => invalid("a run must take some time"),
            _ if self.disk_bytes < 32 << 20 || !self.disk_bytes.is_multiple_of(16 << 20) => {
                invalid("the disk must have 32 MiB at least, in multiples of 16 MiB")
            }
            _ if !(2..=60).contains(&self.chain) => invalid("the chain must have from 2 to 60 images"),
            _ => Ok(()),
        }
    }
}

/// One figure of a line, and what was promised of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// The line.
    pub line: Line,
    /// What was measured.
    pub figure: Figure,
    /// The unit of all values of this row: `ms`, `s`, `MiB`, `MiB/s`, or `times` for counts and ratios.
    pub unit: String,
    /// The most, or for `merges-at-once` the least, that is promised; `null` where nothing is.
    pub promised: Option<f64>,
    /// Of each round.
    pub rounds: Vec<f64>,
    /// The median of the rounds.
    pub median: f64,
    /// The worst round.
    pub worst: f64,
    /// True when the promise was kept: by the median where a guest's runs are compared, else by every round. `null` where nothing is promised.
    pub kept: Option<bool>,
}

impl Row {
    fn new(figure: Figure, rounds: Vec<f64>) -> Self {
        let (about, median) = (figure.about(), median(rounds.clone()));
        let worst = rounds.iter().copied().reduce(|a, b| if about.is_worse(a, b) { a } else { b }).unwrap_or_default();
        let judged = if about.by_median { median } else { worst };
        Self {
            line: about.line,
            figure,
            unit: about.unit.to_owned(),
            promised: about.promised,
            rounds,
            median,
            worst,
            kept: about.promised.map(|promised| !about.is_worse(judged, promised)),
        }
    }
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a process does not start, a request fails, or an operation is refused.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    parameters.check()?;
    let host = HostFacts::at(&parameters.folder);
    let sockets = Folder::new()?;
    let own = Folder::inside(&parameters.folder, "promises")?;
    // The most that a line has at a time: a disk with its chain, and copies of it on both hosts; and the disk of `hung`.
    check_room(own.path(), (4 * parameters.disk_bytes).max(512 << 20))?;
    let elsewhere = parameters.there.as_ref().map(|folder| Folder::inside(folder, "promises")).transpose()?;
    if let Some(elsewhere) = &elsewhere {
        check_room(elsewhere.path(), 2 * parameters.disk_bytes)?;
    }
    let images = own.path().join("images");
    let there = elsewhere.as_ref().map_or(&*images, Folder::path).join("there");
    let world = World { sockets: sockets.path(), images, there, parameters };
    let mut rows = Vec::new();
    for (number, line) in parameters.lines.iter().enumerate() {
        let mut seen: Vec<(Figure, Vec<f64>)> = Vec::new();
        for round in 0..parameters.rounds {
            let done = number as f64 + f64::from(round) / f64::from(parameters.rounds);
            progress(&format!("{}, round {}", line.name(), round + 1), done / parameters.lines.len() as f64);
            let failed = |error: Error| Error::new(error.kind(), line.name()).caused_by(error);
            for (figure, value) in world.one_round(*line, round).map_err(failed)? {
                match seen.iter_mut().find(|(other, _)| *other == figure) {
                    Some((_, values)) => values.push(value),
                    None => seen.push((figure, vec![value])),
                }
            }
        }
        rows.extend(seen.into_iter().map(|(figure, values)| Row::new(figure, values)));
    }
    Ok(Outcome { experiment: "promises".to_owned(), host, parameters: parameters.clone(), rows })
}

/// Makes the folder at `path`.
fn make(path: &Path) -> Result<()> {
    std::fs::create_dir(path).map_err(|e| Error::io("make the folder", e)).at_path(path)
}

/// What a round of a line has shown.
type Seen = Vec<(Figure, f64)>;

/// Where the processes meet, and where the images of a round lie.
struct World<'a> {
    sockets: &'a Path,
    images: PathBuf,
    /// The folder of the other host.
    there: PathBuf,
    parameters: &'a Parameters,
}

impl World<'_> {
    /// A round of a line, in a folder of its own, which goes with all that is in it.
    fn one_round(&self, line: Line, round: u32) -> Result<Seen> {
        self.make_folder()?;
        let seen = match line {
            Line::Clone => images::clone(self, round),
            Line::Delete => images::delete(self, round),
            Line::ColdSnapshot => images::cold_snapshot(self, round),
            Line::Sparse => images::sparse(self),
            Line::FourMerges => jobs::four_merges(self, round),
            Line::KilledMerge => jobs::killed_merge(self),
            Line::HungBackup => jobs::hung_backup(self, round),
            Line::Changes => jobs::changes(self),
            Line::Mirror => motion::mirror(self, round),
            Line::HandOver => motion::hand_over(self, round),
            Line::LinkCut => motion::link_cut(self, round),
            Line::ReturnTrip => motion::return_trip(self),
        };
        self.remove_folder()?;
        seen
    }

    fn make_folder(&self) -> Result<()> {
        make(&self.images)
    }

    fn remove_folder(&self) -> Result<()> {
        let remove =
            |path: &Path| std::fs::remove_dir_all(path).map_err(|e| Error::io("remove the folder", e)).at_path(path);
        if self.there.exists() {
            remove(&self.there)?;
        }
        remove(&self.images)
    }

    /// Makes the folder anew, without what was in it.
    fn clear(&self) -> Result<()> {
        self.remove_folder()?;
        self.make_folder()
    }

    /// The folders of this host and of the other one.
    fn hosts(&self) -> Result<(PathBuf, PathBuf)> {
        let (here, there) = (self.images.join("here"), self.there.clone());
        make(&here)?;
        make(&there)?;
        Ok((here, there))
    }

    /// What guests feel when nothing else happens.
    fn quiet(&self, guests: Vec<load::Options>) -> Result<Felt> {
        let ((), felt) = beside(guests, || self.rest())?;
        Ok(felt)
    }

    /// Waits for as long as a run of a guest takes.
    fn rest(&self) -> Result<()> {
        std::thread::sleep(Duration::from_secs_f64(self.parameters.seconds));
        Ok(())
    }
}

/// Does both, in an order that changes from round to round.
fn in_turns<A, B>(round: u32, one: impl FnOnce() -> Result<A>, other: impl FnOnce() -> Result<B>) -> Result<(A, B)> {
    if round.is_multiple_of(2) {
        let one = one()?;
        Ok((one, other()?))
    } else {
        let other = other()?;
        Ok((one()?, other))
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused() {
        let usual = || Parameters::new(true);
        for bad in [
            Parameters { lines: vec![], ..usual() },
            Parameters { rounds: 0, ..usual() },
            Parameters { disk_bytes: 33 << 20, ..usual() },
            Parameters { chain: 1, ..usual() },
            Parameters { cut_s: 0.0, ..usual() },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        Parameters::new(false).check().unwrap();
    }

    #[test]
    fn a_time_is_kept_in_every_round_and_a_ratio_by_the_median() {
        let kept = |figure, rounds: &[f64]| Row::new(figure, rounds.to_vec()).kept;
        assert_eq!(kept(Figure::DeleteMs, &[5.0, 99.0]), Some(true));
        assert_eq!(kept(Figure::DeleteMs, &[5.0, 5.0, 101.0]), Some(false));
        assert_eq!(kept(Figure::DeleteP99Ratio, &[0.9, 1.9, 9.0]), Some(true));
        assert_eq!(kept(Figure::DeleteP99Ratio, &[0.9, 2.1, 9.0]), Some(false));
        assert_eq!(kept(Figure::MergesAtOnce, &[4.0, 3.0]), Some(false));
        assert_eq!(kept(Figure::MergesAtOnce, &[4.0, 5.0]), Some(true));
        assert_eq!(kept(Figure::DeleteSpaceS, &[1e9]), None);
        assert_eq!(Row::new(Figure::MergesAtOnce, vec![4.0, 3.0]).worst, 3.0);
    }

    #[test]
    fn the_order_changes_from_round_to_round() {
        let said = std::cell::RefCell::new(Vec::new());
        let say = |word| {
            said.borrow_mut().push(word);
            Ok(())
        };
        for round in 0..2 {
            in_turns(round, || say("one"), || say("other")).unwrap();
        }
        assert_eq!(*said.borrow(), ["one", "other", "other", "one"]);
    }
}
