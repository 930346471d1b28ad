//! `snapshot`: what does a guest feel when snapshots of its disk are taken?
//!
//! Guests keep mixed requests of 4 KiB in flight on the disks of a server. In one of the two runs of each round nothing else happens;
//! in the other one a snapshot of all disks at one point in time is taken again and again, by the server's control socket. Which run
//! comes first changes from round to round. Each run has new disks, so all runs begin alike. There are cases with one disk and with several,
//! with short chains and with long ones, and with a request that takes long and is always in flight: a snapshot that waited for it would
//! make the guest wait, too.
//!
//! What counts is the longest request of a run.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use utoipa::ToSchema;

use super::filled::check_room;
use super::live::{Felt, Live, beside, create, create_child};
use super::ratios::{self, Pair};
use super::sample::median;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};

/// The sizes of all disks of a run together, in bytes.
const DISKS_BYTES: u64 = 256 << 20;
/// Random writes of 4 KiB into each layer of a long chain, for all disks of a run together.
const LAYER_WRITES: u64 = 2048;
/// The longest request with a snapshot of one disk may be so much longer, in microseconds, and that of several disks.
const PROMISES_US: [f64; 2] = [1000.0, 3000.0];

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// Disks that get a snapshot at one point in time; a case for each number.
    #[serde(rename = "disk_counts")]
    pub disks: Vec<u32>,
    /// Images of a disk's chain when a run begins; a case for each number.
    pub chains: Vec<u32>,
    /// How long the request takes that is always in flight in some of the cases, in milliseconds.
    pub slow_ms: u64,
    /// Requests in flight, on all disks together.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// Rounds of two runs each, for each case.
    pub rounds: u32,
    /// Seconds of a run.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// Seconds between the begins of two snapshots, at least.
    pub interval_s: f64,
    /// Where the disks lie; in memory unless given.
    #[schema(value_type = Option<String>)]
    pub folder: Option<PathBuf>,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Ten rounds, or one short one.
    pub fn new(is_quick: bool) -> Self {
        let (rounds, seconds, interval_s) = if is_quick { (1, 0.3, 0.1) } else { (10, 2.0, 0.4) };
        let chains = if is_quick { vec![1, 5] } else { vec![1, 30] };
        let disks = if is_quick { vec![1, 4] } else { vec![1, 16] };
        let (depth, slow_ms) = (32, 100);
        Self { disks, chains, slow_ms, depth, rounds, seconds, interval_s, folder: None, quick: is_quick }
    }

    fn check(&self) -> Result<()> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::InvalidInput, what));
        match () {
            _ if self.disks.is_empty() || self.chains.is_empty() || self.rounds == 0 || self.depth == 0 => {
                invalid("there is nothing to measure")
            }
            _ if self.disks.iter().any(|disks| !(1..=32).contains(disks)) => invalid("there can be from 1 to 32 disks"),
            _ if self.chains.iter().any(|chain| !(1..=60).contains(chain)) => {
                invalid("a chain can have from 1 to 60 images: a run adds some, and a disk has 255 at most")
            }
            _ if self.seconds <= 0.0 || self.interval_s <= 0.0 || self.seconds / self.interval_s > 100.0 => {
                invalid("a run can have up to 100 snapshots")
            }
            _ => Ok(()),
        }
    }

    /// The cases, in their order. A request that takes long is in flight only over the shortest chains.
    fn cases(&self) -> Vec<Case> {
        let case = |disks, chain, slow_ms| Case { disks, chain, slow_ms };
        let chains = self.chains.iter().map(|chain| (*chain, 0));
        let kinds: Vec<_> = chains.chain(self.chains.iter().min().map(|chain| (*chain, self.slow_ms))).collect();
        let of = |disks: &u32| kinds.iter().map(|(chain, slow_ms)| case(*disks, *chain, *slow_ms)).collect::<Vec<_>>();
        self.disks.iter().flat_map(of).collect()
    }
}

/// What the rounds of a row have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    disks: u32,
    chain: u32,
    slow_ms: u64,
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Disks of which a snapshot was taken at one point in time.
    pub disks: u32,
    /// Images of each disk's chain when the runs began.
    pub chain: u32,
    /// How long the request took that was always in flight, in milliseconds; 0: there was none.
    pub slow_ms: u64,
    /// The longest request of the run without snapshots.
    pub longest_without_us: f64,
    /// The longest request of the run with snapshots.
    pub longest_with_us: f64,
    /// 99 of 100 requests took no longer without snapshots.
    pub p99_without_us: f64,
    /// 99 of 100 requests took no longer with snapshots.
    pub p99_with_us: f64,
    /// Snapshots that were taken.
    pub snapshots: u32,
    /// The longest time for which a snapshot kept requests waiting, as the command says it.
    pub longest_stall_us: f64,
    /// The median time from the order of a snapshot to its answer: then it is durable.
    pub snapshot_us: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a server does not start, a request fails or a snapshot is refused.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    parameters.check()?;
    let host = HostFacts::at_some(parameters.folder.as_deref());
    let sockets = Folder::new()?;
    let own = parameters.folder.as_deref().map(|parent| Folder::inside(parent, "snapshot")).transpose()?;
    let folder = own.as_ref().unwrap_or(&sockets).path();
    check_room(folder, 2 * DISKS_BYTES)?;
    let cases = parameters.cases();
    let mut rows = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let world = World::new(sockets.path(), folder, *case, parameters)?;
        for round in 0..parameters.rounds {
            let done = number as f64 + f64::from(round) / f64::from(parameters.rounds);
            progress(&format!("{}, round {}", case.name(), round + 1), done / cases.len() as f64);
            rows.push(world.one_round(round)?);
        }
    }
    Ok(Outcome { experiment: "snapshot".to_owned(), host, parameters: parameters.clone(), rows })
}

/// The images that the disks of a case have in common, and where a run's own ones lie.
struct World<'a> {
    sockets: &'a Path,
    images: PathBuf,
    case: Case,
    parameters: &'a Parameters,
    /// The image of which each disk is a child; none when the disks have no parents.
    parent: Option<PathBuf>,
    /// The files that stay when a run has ended.
    kept: BTreeSet<OsString>,
}

/// What was measured of the snapshots of a run.
#[derive(Default)]
struct Taken {
    snapshots: u32,
    longest_stall_us: f64,
    times_us: Vec<f64>,
}

impl<'a> World<'a> {
    fn new(sockets: &'a Path, folder: &Path, case: Case, parameters: &'a Parameters) -> Result<Self> {
        let images = folder.join(format!("{}-{}-{}", case.disks, case.chain, case.slow_ms));
        std::fs::create_dir(&images).map_err(|e| Error::io("make the folder", e)).at_path(&images)?;
        let mut world = Self { sockets, images, case, parameters, parent: None, kept: BTreeSet::new() };
        if case.chain > 1 {
            world.parent = Some(world.make_parents()?);
        }
        world.kept = world.files()?;
        Ok(world)
    }

    fn files(&self) -> Result<BTreeSet<OsString>> {
        let entries =
            std::fs::read_dir(&self.images).map_err(|e| Error::io("read the folder", e)).at_path(&self.images)?;
        Ok(entries.flatten().map(|entry| entry.file_name()).collect())
    }

    fn disk_bytes(&self) -> u64 {
        DISKS_BYTES / u64::from(self.case.disks)
    }

    fn layer_writes(&self) -> u64 {
        LAYER_WRITES / u64::from(self.case.disks)
    }

    /// Makes the chain of which all disks are children: a full image, and others, each of them written here and there.
    fn make_parents(&self) -> Result<PathBuf> {
        let path = self.images.join("parent.vhd");
        create(&path, self.disk_bytes())?;
        let live = Live::start(self.sockets, std::slice::from_ref(&path), None)?;
        live.fill(0, self.disk_bytes())?;
        for layer in 2..self.case.chain {
            live.snapshot(&format!("layer{layer}"))?;
            live.scatter(0, 4096, self.layer_writes(), layer.into())?;
        }
        live.end()?;
        Ok(path)
    }

    fn one_round(&self, round: u32) -> Result<Row> {
        let snapshots_first = !round.is_multiple_of(2);
        let first = self.one_run(snapshots_first)?;
        let second = self.one_run(!snapshots_first)?;
        let ((taken, with), (_, without)) = if snapshots_first { (first, second) } else { (second, first) };
        let Case { disks, chain, slow_ms } = self.case;
        Ok(Row {
            disks,
            chain,
            slow_ms,
            longest_without_us: without.longest_us,
            longest_with_us: with.longest_us,
            p99_without_us: without.p99_us,
            p99_with_us: with.p99_us,
            snapshots: taken.snapshots,
            longest_stall_us: taken.longest_stall_us,
            snapshot_us: median(taken.times_us),
        })
    }

    /// A run on new disks, which go when it has ended.
    fn one_run(&self, has_snapshots: bool) -> Result<(Taken, Felt)> {
        let images: Vec<PathBuf> =
            (0..self.case.disks).map(|disk| self.images.join(format!("disk{disk}.vhd"))).collect();
        for image in &images {
            match &self.parent {
                Some(parent) => create_child(image, parent)?,
                None => create(image, self.disk_bytes())?,
            }
        }
        let slow = (self.case.slow_ms > 0).then(|| Duration::from_millis(self.case.slow_ms));
        let live = Live::start(self.sockets, &images, slow)?;
        for disk in 0..images.len() {
            match &self.parent {
                Some(_) => live.scatter(disk, 4096, self.layer_writes(), 1)?,
                None => live.fill(disk, self.disk_bytes())?,
            }
        }
        let felt = self.guests(&live, slow.is_some(), has_snapshots)?;
        drop(live);
        for file in self.files()?.difference(&self.kept) {
            let path = self.images.join(file);
            std::fs::remove_file(&path).map_err(|e| Error::io("remove a disk", e)).at_path(&path)?;
        }
        Ok(felt)
    }

    /// The guests of a run. One that always has a slow request in flight does not count.
    fn guests(&self, live: &Live, has_slow: bool, has_snapshots: bool) -> Result<(Taken, Felt)> {
        let measured = || beside(live.guests(self.parameters.depth), || self.take(live, has_snapshots));
        match has_slow {
            true => beside(vec![live.slow_client(0)], measured).map(|(measured, _)| measured),
            false => measured(),
        }
    }

    /// Takes snapshots until the time of the run is over, or waits for that.
    fn take(&self, live: &Live, has_snapshots: bool) -> Result<Taken> {
        let begun = Instant::now();
        let mut taken = Taken::default();
        let interval = Duration::from_secs_f64(self.parameters.interval_s);
        let end = Duration::from_secs_f64(self.parameters.seconds);
        // The last one has as much time before the end as the others.
        while has_snapshots && interval * (taken.snapshots + 1) <= end {
            std::thread::sleep((interval * taken.snapshots).saturating_sub(begun.elapsed()));
            let ordered = Instant::now();
            let made = live.snapshot(&format!("snapshot{}", taken.snapshots))?;
            taken.times_us.push(ordered.elapsed().as_secs_f64() * 1e6);
            taken.longest_stall_us = taken.longest_stall_us.max(made.longest_stall_us);
            taken.snapshots += 1;
        }
        std::thread::sleep(end.saturating_sub(begun.elapsed()));
        Ok(taken)
    }
}

impl Case {
    fn of(row: &Row) -> Self {
        Self { disks: row.disks, chain: row.chain, slow_ms: row.slow_ms }
    }

    fn name(&self) -> String {
        let disks = if self.disks == 1 { "1 disk".to_owned() } else { format!("{} disks", self.disks) };
        let slow = if self.slow_ms > 0 { format!(", a request of {} ms", self.slow_ms) } else { String::new() };
        format!("{disks}, chain of {}{slow}", self.chain)
    }

    /// How much longer the longest request may be.
    fn promise_us(&self) -> f64 {
        PROMISES_US[usize::from(self.disks > 1)]
    }
}

/// The cases that were measured, each with its rounds.
fn cases(outcome: &Outcome<Parameters, Row>) -> Vec<(Case, Vec<Row>)> {
    let mut cases: Vec<(Case, Vec<Row>)> = Vec::new();
    for row in &outcome.rows {
        match cases.iter_mut().find(|(case, _)| *case == Case::of(row)) {
            Some((_, rows)) => rows.push(*row),
            None => cases.push((Case::of(row), vec![*row])),
        }
    }
    cases
}

/// How much longer the longest request is with snapshots, in microseconds: the median of the rounds.
fn longer_us(rows: &[Row]) -> f64 {
    median(rows.iter().map(|row| row.longest_with_us - row.longest_without_us).collect())
}

fn most(rows: &[Row], of: fn(&Row) -> f64) -> f64 {
    rows.iter().map(of).fold(0.0, f64::max)
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let cases = cases(outcome);
    let pair = |(case, rows): &(Case, Vec<Row>)| {
        Pair::new(&case.name(), rows.iter(), |row: &Row| (row.longest_with_us, row.longest_without_us))
    };
    let pairs: Vec<Pair> = cases.iter().map(pair).collect();
    let title = "snapshot: the longest request of a run with snapshots ÷ one without";
    ratios::figures("snapshot", title, &outcome.host, outcome.parameters.quick, &pairs)
}

/// What was found, in a sentence for each case.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let sentence = |(case, rows): &(Case, Vec<Row>)| {
        format!(
            "{}: snapshots make the longest request {:+.2} ms longer (promised: +{:.0} ms at most), and keep requests waiting for {:.2} ms \
             at most.",
            case.name(),
            longer_us(rows) / 1e3,
            case.promise_us() / 1e3,
            most(rows, |row| row.longest_stall_us) / 1e3
        )
    };
    cases(outcome).iter().map(sentence).collect()
}

/// The figures as a table, one line for each case.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let heads = [
        "case",
        "longest without",
        "with",
        "longer by",
        "promised",
        "",
        "most without",
        "with",
        "stall",
        "snapshot takes",
    ];
    let mut table = table(heads.map(str::to_owned));
    for (case, rows) in cases(outcome) {
        let middle = |of: fn(&Row) -> f64| median(rows.iter().map(of).collect());
        let ms = |us: f64| right(format!("{:.2}", us / 1e3));
        let longer_us = longer_us(&rows);
        let verdict = if longer_us <= case.promise_us() { "kept" } else { "missed" };
        table.add_row([
            comfy_table::Cell::new(case.name()),
            ms(middle(|row| row.longest_without_us)),
            ms(middle(|row| row.longest_with_us)),
            ms(longer_us),
            ms(case.promise_us()),
            comfy_table::Cell::new(verdict),
            ms(most(&rows, |row| row.longest_without_us)),
            ms(most(&rows, |row| row.longest_with_us)),
            ms(most(&rows, |row| row.longest_stall_us)),
            ms(middle(|row| row.snapshot_us)),
        ]);
    }
    let Parameters { rounds, depth, seconds, .. } = &outcome.parameters;
    format!(
        "{rounds} rounds of two runs of {seconds} s; requests of 4 KiB, 70 reads and 30 writes of a hundred, {depth} in flight; all times in \
         ms: medians of the rounds, the most of all rounds, and the longest time for which a snapshot kept requests waiting\n{table}\n{}",
        found(outcome).join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_request_is_in_flight_over_the_shortest_chain() {
        let names: Vec<String> = Parameters::new(false).cases().iter().map(Case::name).collect();
        let wanted = [
            "1 disk, chain of 1",
            "1 disk, chain of 30",
            "1 disk, chain of 1, a request of 100 ms",
            "16 disks, chain of 1",
            "16 disks, chain of 30",
            "16 disks, chain of 1, a request of 100 ms",
        ];
        assert_eq!(names, wanted);
    }

    #[test]
    fn nonsense_is_refused() {
        let usual = || Parameters::new(true);
        for bad in [
            Parameters { disks: vec![0], ..usual() },
            Parameters { chains: vec![], ..usual() },
            Parameters { chains: vec![200], ..usual() },
            Parameters { interval_s: 0.0001, ..usual() },
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
