//! `merge`: what does a guest feel while images of its disk's chain are merged, and what does the merge itself need?
//!
//! A disk has a chain of three images: a full one, one with a fourth of the disk, and the leaf with an eighth, written here and there. A
//! server works on it at the default rate: it merges the image in the middle, it merges the leaf, or it flattens the leaf. In
//! each round there are three runs for each kind of work, each on a new chain, in an order that changes from round to round: a guest
//! without the work, the work beside a guest, and the work without a guest. Only the last one tells how much space the work takes for itself,
//! because a guest that writes takes space, too.
//!
//! One kind of work is the hard one: the leaf is merged while the guest does nothing but write, at a rate just below what the disk can
//! take. A merge that runs after such a guest never ends; one that converges does.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comfy_table::Cell;
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::units::format_size;
use utoipa::ToSchema;

use super::filled::check_room;
use super::live::{Felt, Live, MIXED, WRITES, allocated_bytes, beside, chains};
use super::ratios::{self, Pair};
use super::sample::median;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};
use crate::load;

/// Beside the work, 99 of 100 requests may take so many times as long.
const PROMISED_P99: f64 = 2.0;
/// The work may take so much more space while it runs, in bytes.
const PROMISED_EXTRA_BYTES: u64 = 64 << 20;

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// The size of the disk.
    #[serde(rename = "virtual_size_bytes")]
    pub disk_bytes: u64,
    /// Requests in flight.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// Rounds of three runs for each kind of work.
    pub rounds: u32,
    /// Seconds of a run without work.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// The rate of the guest that only writes, as a share of the writes that the disk can take.
    pub write_share: f64,
    /// Seconds after which a merge counts as one that does not converge.
    pub patience_s: f64,
    /// Where the images lie.
    #[schema(value_type = String)]
    pub folder: PathBuf,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Five rounds on a disk of 512 MiB, or one on a small one.
    pub fn new(is_quick: bool) -> Self {
        let (disk_bytes, rounds, seconds, patience_s) =
            if is_quick { (32 << 20, 1, 0.2, 20.0) } else { (512 << 20, 5, 2.0, 120.0) };
        Self {
            disk_bytes,
            depth: 32,
            rounds,
            seconds,
            write_share: 0.9,
            patience_s,
            folder: std::env::temp_dir(),
            quick: is_quick,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::InvalidInput, what));
        match () {
            _ if self.rounds == 0 || self.depth == 0 || self.seconds <= 0.0 => invalid("there is nothing to measure"),
            _ if self.disk_bytes < 16 << 20 || !self.disk_bytes.is_multiple_of(1 << 20) => {
                invalid("the disk must have 16 MiB at least, in whole MiB")
            }
            _ => Ok(()),
        }
    }
}

/// What is done to the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// The image in the middle is merged into the one below.
    Middle,
    /// The leaf is merged into the one below.
    Leaf,
    /// The leaf gets all that it lacks.
    Flatten,
    /// The leaf is merged while the guest only writes.
    LeafUnderWrites,
}

impl Work {
    const ALL: [Self; 4] = [Self::Middle, Self::Leaf, Self::Flatten, Self::LeafUnderWrites];

    fn name(self) -> &'static str {
        match self {
            Self::Middle => "merge of the middle",
            Self::Leaf => "merge of the leaf",
            Self::Flatten => "flatten",
            Self::LeafUnderWrites => "merge of the leaf, writes only",
        }
    }

    /// The kind of the job, and the layer.
    fn job(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Middle => ("coalesce", Some("middle")),
            Self::Leaf | Self::LeafUnderWrites => ("coalesce", None),
            Self::Flatten => ("flatten", None),
        }
    }
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// What was done.
    pub work: Work,
    /// Half of the guest's requests took no longer without the work.
    pub quiet_p50_us: f64,
    /// 99 of 100 took no longer without it.
    pub quiet_p99_us: f64,
    /// The guest's requests a second without it.
    pub quiet_iops: f64,
    /// Half of the guest's requests took no longer beside the work.
    pub beside_p50_us: f64,
    /// 99 of 100 took no longer beside it.
    pub beside_p99_us: f64,
    /// The longest one beside it.
    pub beside_longest_us: f64,
    /// The guest's requests a second beside it.
    pub beside_iops: f64,
    /// False when the work beside the guest had not ended in time.
    pub converged: bool,
    /// How long the work took beside the guest, in seconds.
    pub beside_s: f64,
    /// How long it took without a guest, in seconds.
    pub alone_s: f64,
    /// Bytes that it moved without a guest.
    pub moved_bytes: u64,
    /// The space that the chain's files took at most while it ran without a guest, beyond what they take before or after, in bytes.
    pub extra_bytes: u64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a server does not start, a request fails or the work is refused.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    parameters.check()?;
    let host = HostFacts::at(&parameters.folder);
    let sockets = Folder::new()?;
    let own = Folder::inside(&parameters.folder, "merge")?;
    let folder = own.path();
    // The full image, the others, and what a flatten adds.
    check_room(folder, parameters.disk_bytes * 5 / 2)?;
    let world = World { sockets: sockets.path(), images: folder.join("images"), parameters };
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        for (number, work) in Work::ALL.into_iter().enumerate() {
            let done = f64::from(round) + number as f64 / Work::ALL.len() as f64;
            progress(&format!("round {}, {}", round + 1, work.name()), done / f64::from(parameters.rounds));
            rows.push(world.one_round(work, round)?);
        }
    }
    Ok(Outcome { experiment: "merge".to_owned(), host, parameters: parameters.clone(), rows })
}

/// Where a run's images lie.
struct World<'a> {
    sockets: &'a Path,
    images: PathBuf,
    parameters: &'a Parameters,
}

/// The runs of a round.
#[derive(Clone, Copy)]
enum Run {
    Quiet,
    Beside,
    Alone,
}

/// What was measured of the work of a run.
#[derive(Clone, Copy, Default)]
struct Worked {
    converged: bool,
    seconds: f64,
    moved_bytes: u64,
    extra_bytes: u64,
}

impl World<'_> {
    fn one_round(&self, work: Work, round: u32) -> Result<Row> {
        let rate = if work == Work::LeafUnderWrites { Some(self.write_rate()?) } else { None };
        let mut runs = [Run::Quiet, Run::Beside, Run::Alone];
        runs.rotate_left(round as usize % 3);
        let (mut quiet, mut loaded, mut alone) = (None, None, None);
        for run in runs {
            let mut live = self.chain()?;
            match run {
                Run::Quiet => quiet = Some(self.quiet(&live, rate)?),
                Run::Beside => {
                    let guest = vec![self.guest(&live, rate)];
                    loaded = Some(beside(guest, || self.work(&mut live, work))?);
                }
                Run::Alone => alone = Some(self.work(&mut live, work)?),
            }
            drop(live);
            self.remove()?;
        }
        let (quiet, (worked, felt), alone) =
            (quiet.expect("it has run"), loaded.expect("it has run"), alone.expect("it has run"));
        Ok(Row {
            work,
            quiet_p50_us: quiet.p50_us,
            quiet_p99_us: quiet.p99_us,
            quiet_iops: quiet.iops,
            beside_p50_us: felt.p50_us,
            beside_p99_us: felt.p99_us,
            beside_longest_us: felt.longest_us,
            beside_iops: felt.iops,
            converged: worked.converged,
            beside_s: worked.seconds,
            alone_s: alone.seconds,
            moved_bytes: alone.moved_bytes,
            extra_bytes: alone.extra_bytes,
        })
    }

    /// A server of a disk with a new chain of three.
    fn chain(&self) -> Result<Live> {
        std::fs::create_dir(&self.images).map_err(|e| Error::io("make the folder", e)).at_path(&self.images)?;
        chains(self.sockets, &self.images, 1, self.parameters.disk_bytes)
    }

    fn remove(&self) -> Result<()> {
        std::fs::remove_dir_all(&self.images).map_err(|e| Error::io("remove the folder", e)).at_path(&self.images)
    }

    /// A guest that only writes keeps `rate`.
    fn guest(&self, live: &Live, rate: Option<f64>) -> load::Options {
        let pattern = if rate.is_some() { WRITES } else { MIXED };
        load::Options { rate, ..live.guest(0, pattern, self.parameters.depth) }
    }

    fn quiet(&self, live: &Live, rate: Option<f64>) -> Result<Felt> {
        self.measure(vec![self.guest(live, rate)])
    }

    fn measure(&self, guests: Vec<load::Options>) -> Result<Felt> {
        let ((), felt) = beside(guests, || {
            std::thread::sleep(Duration::from_secs_f64(self.parameters.seconds));
            Ok(())
        })?;
        Ok(felt)
    }

    /// The rate of the guest that only writes.
    fn write_rate(&self) -> Result<f64> {
        let live = self.chain()?;
        let most = self.measure(vec![live.guest(0, WRITES, self.parameters.depth)])?;
        drop(live);
        self.remove()?;
        Ok(most.iops * self.parameters.write_share)
    }

    fn work(&self, live: &mut Live, work: Work) -> Result<Worked> {
        let (kind, layer) = work.job();
        let begun = Instant::now();
        let before_bytes = allocated_bytes(&self.images)?;
        let mut most_bytes = before_bytes;
        let patience = Duration::from_secs_f64(self.parameters.patience_s);
        let done = live.work(kind, layer, patience, || {
            most_bytes = most_bytes.max(allocated_bytes(&self.images).unwrap_or(0));
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        let ends_bytes = before_bytes.max(allocated_bytes(&self.images)?);
        Ok(Worked {
            converged: done.is_some(),
            seconds,
            moved_bytes: done.map_or(0, |job| job.done_bytes),
            extra_bytes: most_bytes.saturating_sub(ends_bytes),
        })
    }
}

fn rows_of(outcome: &Outcome<Parameters, Row>, work: Work) -> Vec<&Row> {
    outcome.rows.iter().filter(|row| row.work == work).collect()
}

/// The guest beside the work, by itself without it: the 99th percentile.
fn pair(work: Work, rows: &[&Row]) -> Pair {
    let name = format!("p99, {}", work.name());
    Pair::new(&name, rows.iter().copied(), |row: &Row| (row.beside_p99_us, row.quiet_p99_us))
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let pairs: Vec<Pair> = Work::ALL.into_iter().map(|work| pair(work, &rows_of(outcome, work))).collect();
    let title = "merge: a guest's requests beside the work, by those without it";
    ratios::figures("merge", title, &outcome.host, outcome.parameters.quick, &pairs)
}

/// What was found, in a sentence for each kind of work.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let sentence = |work: Work| {
        let rows = rows_of(outcome, work);
        let ratio = pair(work, &rows).ratio()?.p50;
        let extra_bytes = rows.iter().map(|row| row.extra_bytes).max()?;
        let ended = rows.iter().filter(|row| row.converged).count();
        Some(format!(
            "{}: {ratio:.2} times the p99 of before (promised: {PROMISED_P99:.0} at most), at most {} of additional space (promised: {}), \
             and {ended} of {} have ended in time.",
            capital(work.name()),
            format_size(extra_bytes),
            format_size(PROMISED_EXTRA_BYTES),
            rows.len()
        ))
    };
    Work::ALL.into_iter().filter_map(sentence).collect()
}

fn capital(text: &str) -> String {
    let (first, rest) = text.split_at(1);
    first.to_uppercase() + rest
}

/// The figures as a table, one line for each kind of work: medians of the rounds, and the most space of all.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let heads = [
        "work",
        "p50 µs",
        "beside",
        "p99 µs",
        "beside",
        "ratio",
        "longest ms",
        "IOPS ratio",
        "MiB/s",
        "alone",
        "extra MiB",
        "ended",
    ];
    let mut table = table(heads.map(str::to_owned));
    for work in Work::ALL {
        let rows = rows_of(outcome, work);
        let middle = |of: fn(&Row) -> f64| median(rows.iter().map(|row| of(row)).collect());
        let extra_bytes = rows.iter().map(|row| row.extra_bytes).max().unwrap_or(0);
        let ended = rows.iter().filter(|row| row.converged).count();
        let figures = [
            format!("{:.0}", middle(|row| row.quiet_p50_us)),
            format!("{:.0}", middle(|row| row.beside_p50_us)),
            format!("{:.0}", middle(|row| row.quiet_p99_us)),
            format!("{:.0}", middle(|row| row.beside_p99_us)),
            format!("{:.2}", middle(|row| row.beside_p99_us / row.quiet_p99_us.max(1.0))),
            format!("{:.1}", middle(|row| row.beside_longest_us) / 1e3),
            format!("{:.2}", middle(|row| row.beside_iops / row.quiet_iops.max(1.0))),
            format!("{:.0}", middle(|row| mib(row.moved_bytes) / row.beside_s)),
            format!("{:.0}", middle(|row| mib(row.moved_bytes) / row.alone_s)),
            format!("{:.1}", mib(extra_bytes)),
            format!("{ended} of {}", rows.len()),
        ];
        table.add_row([Cell::new(work.name())].into_iter().chain(figures.map(right)));
    }
    let Parameters { rounds, depth, disk_bytes, write_share, .. } = &outcome.parameters;
    format!(
        "{rounds} rounds; a disk of {} with a chain of three; requests of 4 KiB, 70 reads and 30 writes of a hundred, {depth} in flight; the \
         guest that only writes keeps {write_share} of the writes that the disk can take\n{table}\n{}",
        format_size(*disk_bytes),
        found(outcome).join("\n")
    )
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            Parameters { rounds: 0, ..Parameters::new(true) },
            Parameters { disk_bytes: 4096, ..Parameters::new(true) },
            Parameters { disk_bytes: (16 << 20) + 1, ..Parameters::new(true) },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn sentences_begin_with_a_capital() {
        assert_eq!(capital("flatten"), "Flatten");
    }
}
