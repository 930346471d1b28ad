//! `limit`: do limits hold what they promise?
//!
//! One server with two workers has four disks without a medium, each reached over vhost-user and over NBD. A round has five parts, each on the
//! same server:
//!
//! - a limit on requests, and one on bytes, each under a load of small, middle and large requests by both fronts at once;
//! - a group's limit, with two guests that take what they can get: one by many small requests, the other one by a few large ones;
//! - changes of a limit under load: the time from the call until the load has stopped, and until it goes on;
//! - a disk without limits, read alone and while requests of two other disks wait for their limits, in an order that changes from round to
//!   round.
//!
//! What has passed is counted by the clients.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comfy_table::Cell;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{CHANGE_PATIENCE, call, escape};
use spile_server::uri::{Address, NbdUri, Target};
use utoipa::ToSchema;

use super::process::Tied;
use super::ratios::{self, Pair};
use super::sample::median;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};
use crate::load::{self, Options, Pattern};

/// The limited disk, the two of the group, and the one without limits.
const DISKS: [&str; 4] = ["one", "small", "large", "free"];
/// The group of the two.
const GROUP: &str = "group";
/// A rate may differ from its limit by this share, and a guest's bytes from the half.
const PROMISED_SHARE: f64 = 0.05;
/// A change of a limit takes effect within this time, in milliseconds.
const PROMISED_MS: f64 = 100.0;
/// How long a load runs before it counts: more than the time for which unused allowance adds up.
const SETTLE: Duration = Duration::from_millis(300);
/// How long the effect of a change is waited for.
const CHANGE: Duration = Duration::from_millis(250);
/// How often clients are looked at: a time of a change is right to this.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// The limit on requests in a second.
    pub limit_iops: u64,
    /// The limit on bytes in a second, of a disk and of the group.
    pub limit_bytes_per_s: u64,
    /// Changes in each direction in a round.
    pub changes: u32,
    /// Rounds.
    pub rounds: u32,
    /// Seconds for which each rate is counted.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Five rounds, or one short one.
    pub fn new(is_quick: bool) -> Self {
        let (changes, rounds, seconds) = if is_quick { (2, 1, 0.5) } else { (5, 5, 1.0) };
        Self { limit_iops: 2000, limit_bytes_per_s: 64 << 20, changes, rounds, seconds, quick: is_quick }
    }
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Requests a second that the limit on requests let pass.
    pub iops: f64,
    /// Bytes a second that the limit on bytes let pass.
    pub bytes_per_s: f64,
    /// Bytes a second of the group's guest with many small requests.
    pub small_bytes_per_s: f64,
    /// Bytes a second of the group's guest with a few large ones.
    pub large_bytes_per_s: f64,
    /// The longest time from the call that sets a limit of one request a second to the last answer before the load stands still.
    pub tightened_ms: f64,
    /// The longest time from the call that takes this limit away to the first answer.
    pub loosened_ms: f64,
    /// Requests a second of the disk without limits while no request waits.
    pub alone_iops: f64,
    /// The same while other disks' requests wait for their limits.
    pub beside_iops: f64,
    /// 99 of 100 of its requests took no longer while none waited.
    pub alone_p99_us: f64,
    /// The same while others waited.
    pub beside_p99_us: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when the server does not start or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    if parameters.rounds == 0 || parameters.changes == 0 || parameters.seconds <= 0.0 {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
    }
    let host = HostFacts::now();
    let folder = Folder::new()?;
    progress("start the server", 0.0);
    let mut world = World::start(folder.path(), parameters)?;
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        progress(&format!("round {}", round + 1), f64::from(round) / f64::from(parameters.rounds));
        rows.push(world.one_round(round)?);
    }
    Ok(Outcome { experiment: "limit".to_owned(), host, parameters: parameters.clone(), rows })
}

/// The longest time until a lower limit holds, and until a limit that is gone holds nobody, of so many changes each, in milliseconds. The
/// server's sockets are in `folder`.
///
/// # Errors
/// When the server does not start or a request fails.
pub(super) fn changes_ms(folder: &Path, changes: u32) -> Result<(f64, f64)> {
    World::start(folder, &Parameters { changes, ..Parameters::new(true) })?.changes()
}

/// The server.
struct World<'a> {
    process: Tied,
    folder: PathBuf,
    parameters: &'a Parameters,
}

impl<'a> World<'a> {
    fn start(folder: &Path, parameters: &'a Parameters) -> Result<Self> {
        let mut args: Vec<OsString> = ["serve", "--workers", "2"].map(OsString::from).into();
        for disk in DISKS {
            args.push(format!("null:1G,name={disk}").into());
            args.extend(["--vhost-user".into(), format!("{},export={disk}", folder.join(disk).display()).into()]);
        }
        let (nbd, control) = (folder.join("nbd"), folder.join("control"));
        args.extend(["--nbd".into(), format!("unix:{}", nbd.display()).into()]);
        args.extend(["--control".into(), control.clone().into_os_string()]);
        let mut process = Tied::start("the server", args)?;
        process.wait_for(DISKS.map(|disk| folder.join(disk)).into_iter().chain([nbd, control]))?;
        Ok(Self { process, folder: folder.to_owned(), parameters })
    }

    fn one_round(&mut self, round: u32) -> Result<Row> {
        let Parameters { limit_iops, limit_bytes_per_s, .. } = *self.parameters;
        let iops = self.rate(&json!({ "iops": limit_iops }), |counted| counted.requests)?;
        let bytes_per_s = self.rate(&json!({ "bps": limit_bytes_per_s }), |counted| counted.bytes)?;
        let [small_bytes_per_s, large_bytes_per_s] = self.shares()?;
        let (tightened_ms, loosened_ms) = self.changes()?;
        let beside_first = !round.is_multiple_of(2);
        let first = self.neighbour(beside_first)?;
        let second = self.neighbour(!beside_first)?;
        let (beside, alone) = if beside_first { (first, second) } else { (second, first) };
        self.process.check()?;
        Ok(Row {
            iops,
            bytes_per_s,
            small_bytes_per_s,
            large_bytes_per_s,
            tightened_ms,
            loosened_ms,
            alone_iops: alone.iops,
            beside_iops: beside.iops,
            alone_p99_us: alone.read.latency_p99_us,
            beside_p99_us: beside.read.latency_p99_us,
        })
    }

    /// What a limit of the first disk lets pass in a second.
    fn rate(&self, limits: &Value, of: fn(&Counted) -> u64) -> Result<f64> {
        self.limit("one", limits)?;
        let loads = vec![self.vhost("one", 4 << 10, 16), self.nbd("one", 64 << 10, 4), self.nbd("one", 512 << 10, 2)];
        self.watch(loads, |watch| {
            let (from, until) = self.window();
            (0..3).map(|load| watch.rate(load, from, until, of)).sum()
        })
    }

    /// What each guest of the group gets, in bytes a second.
    fn shares(&self) -> Result<[f64; 2]> {
        ["small", "large"].into_iter().try_for_each(|disk| self.limit(disk, &json!({ "group": GROUP })))?;
        let limits = json!({ "bps": self.parameters.limit_bytes_per_s });
        self.change(&format!("/v1/groups/{GROUP}"), &limits)?;
        let loads = vec![self.vhost("small", 4 << 10, 32), self.nbd("large", 256 << 10, 4)];
        self.watch(loads, |watch| {
            let (from, until) = self.window();
            let bytes = |load| watch.rate(load, from, until, |counted| counted.bytes);
            Ok([bytes(0)?, bytes(1)?])
        })
    }

    /// The longest time until a lower limit holds, and until a limit that is gone holds nobody, in milliseconds.
    fn changes(&self) -> Result<(f64, f64)> {
        self.watch(vec![self.vhost("one", 4 << 10, 8)], |watch| {
            let (mut tightened_ms, mut loosened_ms) = (0.0_f64, 0.0_f64);
            std::thread::sleep(SETTLE);
            for _ in 0..self.parameters.changes {
                let begun = Instant::now();
                self.limit("one", &json!({ "iops": 1 }))?;
                std::thread::sleep(CHANGE);
                tightened_ms = tightened_ms.max(watch.last_answer_ms(0, begun)?);
                let begun = Instant::now();
                self.limit("one", &json!({ "off": true }))?;
                std::thread::sleep(CHANGE);
                loosened_ms = loosened_ms.max(watch.first_answer_ms(0, begun)?);
            }
            Ok((tightened_ms, loosened_ms))
        })
    }

    /// Reads the disk without limits for some time, alone or while two other disks' requests wait.
    fn neighbour(&self, is_beside: bool) -> Result<load::Report> {
        let runtime = Some(Duration::from_secs_f64(self.parameters.seconds));
        let free = Options { runtime, ..self.vhost("free", 4 << 10, 8) };
        if !is_beside {
            return load::measure(&free);
        }
        ["one", "small"].into_iter().try_for_each(|disk| self.limit(disk, &json!({ "bps": 1 })))?;
        let waiting = ["one", "small"].into_iter();
        let waiting = waiting.flat_map(|disk| [self.vhost(disk, 4 << 10, 64), self.nbd(disk, 512 << 10, 16)]);
        // These are not looked at: looking costs the processor something.
        let waiting = waiting.map(|load| Options { report_every: SETTLE, ..load }).collect();
        self.watch(waiting, |_| {
            std::thread::sleep(SETTLE);
            load::measure(&free)
        })
    }

    /// A guest on vhost-user with two queues; 70 of its requests in a hundred are reads.
    fn vhost(&self, disk: &str, block_bytes: u32, depth: u32) -> Options {
        let uri = Target::Vhost(self.folder.join(disk));
        Options { block_bytes, depth, connections: 2, ..mixed(uri) }
    }

    fn nbd(&self, disk: &str, block_bytes: u32, depth: u32) -> Options {
        let uri = NbdUri::new(Address::Unix(self.folder.join("nbd")), disk.to_owned());
        Options { block_bytes, depth, ..mixed(Target::Nbd(uri)) }
    }

    fn limit(&self, disk: &str, limits: &Value) -> Result<()> {
        self.change(&format!("/v1/disks/{}", escape(disk)), &json!({ "limits": limits }))
    }

    fn change(&self, path: &str, body: &Value) -> Result<()> {
        call(&self.folder.join("control"), "PATCH", path, Some(body), CHANGE_PATIENCE).map(|_: Value| ())
    }

    /// The time that counts: it begins when the loads have settled.
    fn window(&self) -> (Instant, Instant) {
        let from = Instant::now() + SETTLE;
        let until = from + Duration::from_secs_f64(self.parameters.seconds);
        std::thread::sleep(until.saturating_duration_since(Instant::now()) + 5 * LOOK_EVERY);
        (from, until)
    }

    /// Runs `loads` while `work` runs. Afterwards no disk has a limit, so every request ends.
    fn watch<T>(&self, loads: Vec<Options>, work: impl FnOnce(&Watch) -> Result<T>) -> Result<T> {
        let stop = Arc::new(AtomicBool::new(false));
        let watch = Watch { loads: loads.iter().map(|_| Mutex::default()).collect() };
        std::thread::scope(|scope| {
            let running = loads.into_iter().zip(&watch.loads).map(|(load, seen)| {
                let load = Options { stop: stop.clone(), ..load };
                scope.spawn(move || load::run_only(&load, |progress| note(seen, &progress)))
            });
            let running: Vec<_> = running.collect();
            let done = work(&watch);
            let free = json!({ "off": true, "group": "" });
            let freed = DISKS.into_iter().try_for_each(|disk| self.limit(disk, &free));
            stop.store(true, Ordering::Relaxed);
            for load in running {
                load.join().expect("a load does not panic")?.error.map_or(Ok(()), Err)?;
            }
            freed.and(done)
        })
    }
}

fn mixed(uri: Target) -> Options {
    let pattern = Pattern { random: true, read_percent: 70 };
    Options { pattern, report_every: LOOK_EVERY, ..Options::new(uri) }
}

fn note(seen: &Mutex<Vec<Counted>>, progress: &load::Progress) {
    let counted = Counted { at: Instant::now(), requests: progress.reads + progress.writes, bytes: progress.bytes };
    seen.lock().unwrap_or_else(PoisonError::into_inner).push(counted);
}

/// What a load's client had got by then.
#[derive(Clone, Copy, Debug)]
struct Counted {
    at: Instant,
    requests: u64,
    bytes: u64,
}

/// What is known of each load while it runs.
struct Watch {
    loads: Vec<Mutex<Vec<Counted>>>,
}

impl Watch {
    /// What was counted of a load since then.
    fn since(&self, load: usize, from: Instant) -> Vec<Counted> {
        let seen = self.loads[load].lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|counted| counted.at >= from).copied().collect()
    }

    fn rate(&self, load: usize, from: Instant, until: Instant, of: fn(&Counted) -> u64) -> Result<f64> {
        let seen = self.since(load, from);
        let rate = rate_of(seen.iter().filter(|counted| counted.at <= until), of);
        rate.ok_or_else(|| Error::new(ErrorKind::TimedOut, "a load did not begin in time"))
    }

    fn last_answer_ms(&self, load: usize, from: Instant) -> Result<f64> {
        let seen = self.since(load, from);
        Ok(answers(&seen).last().map_or(0.0, |at| ms(at, from)))
    }

    fn first_answer_ms(&self, load: usize, from: Instant) -> Result<f64> {
        let first = answers(&self.since(load, from)).next().map(|at| ms(at, from));
        first.ok_or_else(|| Error::new(ErrorKind::TimedOut, "a load does not go on when its limit is gone"))
    }
}

/// What came in a second between the first and the last of them; none when there are no two.
fn rate_of<'s>(mut seen: impl Iterator<Item = &'s Counted>, of: fn(&Counted) -> u64) -> Option<f64> {
    let first = seen.next()?;
    let last = seen.last()?;
    let seconds = (last.at - first.at).as_secs_f64();
    Some((of(last) - of(first)) as f64 / seconds)
}

/// The moments at which more requests had ended than a moment before.
fn answers(seen: &[Counted]) -> impl Iterator<Item = Instant> + '_ {
    let pairs = seen.windows(2).filter(|pair| pair[1].requests > pair[0].requests);
    pairs.map(|pair| pair[1].at)
}

fn ms(at: Instant, from: Instant) -> f64 {
    (at - from).as_secs_f64() * 1e3
}

/// What a line of the table is about.
struct Line {
    what: &'static str,
    promise: String,
    /// The figure, and that of the worst round.
    figure: f64,
    worst: f64,
    digits: usize,
    is_kept: bool,
}

impl Line {
    /// A ratio that is promised to be 1, nearly.
    fn ratio(what: &'static str, rounds: Vec<f64>) -> Self {
        let off = |ratio: &f64| (ratio - 1.0).abs();
        let worst = rounds.iter().copied().max_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(1.0);
        let figure = median(rounds);
        let (least, most) = (1.0 - PROMISED_SHARE, 1.0 + PROMISED_SHARE);
        let promise = format!("{least:.2} to {most:.2}");
        Self { what, promise, figure, worst, digits: 3, is_kept: off(&figure) <= PROMISED_SHARE }
    }

    /// A time that is promised for every change.
    fn time(what: &'static str, rounds: Vec<f64>) -> Self {
        let worst = rounds.iter().copied().fold(0.0, f64::max);
        let promise = format!("≤ {PROMISED_MS:.0} ms");
        Self { what, promise, figure: median(rounds), worst, digits: 1, is_kept: worst <= PROMISED_MS }
    }
}

fn lines(outcome: &Outcome<Parameters, Row>) -> Vec<Line> {
    let Parameters { limit_iops, limit_bytes_per_s, .. } = outcome.parameters;
    let all = |of: &dyn Fn(&Row) -> f64| outcome.rows.iter().map(of).collect::<Vec<f64>>();
    let group_bytes = |row: &Row| row.small_bytes_per_s + row.large_bytes_per_s;
    let mut beside = Line::ratio("IOPS of a free disk beside those who wait, by alone", {
        all(&|row| row.beside_iops / row.alone_iops)
    });
    beside.promise = format!("≥ {:.2}", 1.0 - PROMISED_SHARE);
    beside.is_kept = beside.figure >= 1.0 - PROMISED_SHARE;
    vec![
        Line::ratio("requests/s on mixed sizes, by the limit", all(&|row| row.iops / limit_iops as f64)),
        Line::ratio("bytes/s on mixed sizes, by the limit", all(&|row| row.bytes_per_s / limit_bytes_per_s as f64)),
        Line::ratio("bytes/s of a group, by its limit", all(&|row| group_bytes(row) / limit_bytes_per_s as f64)),
        Line::ratio("a greedy guest's bytes, by half the group's", {
            all(&|row| 2.0 * row.small_bytes_per_s / group_bytes(row))
        }),
        Line::time("ms until a new limit holds", all(&|row| row.tightened_ms)),
        Line::time("ms until a limit is gone", all(&|row| row.loosened_ms)),
        beside,
    ]
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let Parameters { limit_iops, limit_bytes_per_s, .. } = outcome.parameters;
    let (iops, bytes) = (limit_iops as f64, limit_bytes_per_s as f64);
    let half = |row: &Row| (row.small_bytes_per_s + row.large_bytes_per_s) / 2.0;
    let rows = || outcome.rows.iter();
    let pairs = [
        Pair::new("requests/s by the limit", rows(), |row: &Row| (row.iops, iops)),
        Pair::new("bytes/s by the limit", rows(), |row: &Row| (row.bytes_per_s, bytes)),
        Pair::new("a guest's bytes by half the group's", rows(), |row: &Row| (row.small_bytes_per_s, half(row))),
        Pair::new("a new limit holds, by 100 ms", rows(), |row: &Row| (row.tightened_ms, PROMISED_MS)),
        Pair::new("a limit is gone, by 100 ms", rows(), |row: &Row| (row.loosened_ms, PROMISED_MS)),
        Pair::new("a free disk's IOPS beside, by alone", rows(), |row: &Row| (row.beside_iops, row.alone_iops)),
    ];
    let title = "limit: what passes, by what is promised";
    ratios::figures("limit", title, &outcome.host, outcome.parameters.quick, &pairs)
}

/// What was found, in sentences.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    if outcome.rows.is_empty() {
        return Vec::new();
    }
    let lines = lines(outcome);
    let [iops, bytes, group, half, tightened, loosened, beside] = &lines[..] else { return Vec::new() };
    vec![
        format!(
            "On mixed sizes by two fronts {:.3} of the limit's requests and {:.3} of the limit's bytes pass; of a group's bytes {:.3} pass, \
             and a greedy guest gets {:.3} of its half (medians; promised: within {PROMISED_SHARE}).",
            iops.figure, bytes.figure, group.figure, half.figure
        ),
        format!(
            "A new limit holds after {:.1} ms at most, and one that is taken away lets requests pass after {:.1} ms at most (promised: \
             {PROMISED_MS:.0} ms).",
            tightened.worst, loosened.worst
        ),
        format!("A disk without limits has {:.3} of its IOPS while requests of others wait.", beside.figure),
    ]
}

/// The promises as a table, with what was measured.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let mut table = table(["", "promised", "here", "worst round", ""].map(str::to_owned));
    for line in lines(outcome) {
        let figure = |value: f64| right(format!("{value:.*}", line.digits));
        let verdict = if line.is_kept { "kept" } else { "missed" };
        let cells = [right(line.promise.clone()), figure(line.figure), figure(line.worst), Cell::new(verdict)];
        table.add_row([Cell::new(line.what)].into_iter().chain(cells));
    }
    let Parameters { limit_iops, limit_bytes_per_s, changes, rounds, seconds, .. } = &outcome.parameters;
    let rate = limit_bytes_per_s >> 20;
    format!(
        "{rounds} round(s); limits of {limit_iops} requests/s and {rate} MiB/s, {seconds} s each; {changes} changes each way in a round. Medians \
         of the rounds, and the worst one.\n{table}\n{}",
        found(outcome).join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(begun: Instant, points: &[(u64, u64)]) -> Vec<Counted> {
        let point = |(after_ms, requests): &(u64, u64)| Counted {
            at: begun + Duration::from_millis(*after_ms),
            requests: *requests,
            bytes: requests * 4096,
        };
        points.iter().map(point).collect()
    }

    #[test]
    fn rates_and_answers_come_from_what_clients_counted() {
        let begun = Instant::now();
        let seen = counted(begun, &[(0, 100), (10, 120), (20, 120), (500, 300)]);
        assert_eq!(rate_of(seen.iter(), |counted| counted.requests), Some(400.0));
        assert_eq!(rate_of(seen.iter(), |counted| counted.bytes), Some(400.0 * 4096.0));
        assert_eq!(rate_of(seen[..1].iter(), |counted| counted.requests), None);
        let after: Vec<f64> = answers(&seen).map(|at| ms(at, begun)).collect();
        assert_eq!(after, [10.0, 500.0]);
    }

    #[test]
    fn one_change_that_takes_too_long_breaks_the_promise() {
        assert!(Line::time("", vec![5.0, 99.0, 7.0]).is_kept);
        assert!(!Line::time("", vec![5.0, 101.0, 7.0]).is_kept);
        let ratio = Line::ratio("", vec![1.01, 0.9, 1.0]);
        assert!(ratio.is_kept && ratio.worst == 0.9, "the median counts, and the worst is shown");
        assert!(!Line::ratio("", vec![1.06]).is_kept);
    }
}
