//! `crowd`: what do many idle disks cost a busy one?
//!
//! Two servers run, each on two workers: one has a single disk, the other one has many, and a guest on each, whose queues have all
//! had a request and are idle now. In each round the one disk and one of the many are read for some time, in an order that
//! changes from round to round. If the work of a worker depended on all queues that it has, the disk in the crowd would be
//! slower.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comfy_table::Cell;
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use spile_lab::GuestQueue;
use spile_lab::vhost::{Device, DeviceOptions, Queue, QueueOptions};
use spile_server::process::raise_file_limit;
use spile_server::uri::Target;
use utoipa::ToSchema;

use super::process::Tied;
use super::ratios::{self, Pair};
use super::sample::median;
use super::usage::runs;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};
use crate::load;

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// Disks of the crowd, the busy one included.
    pub disks: u32,
    /// Queues of each disk.
    pub queues: u16,
    /// Requests of 4 KiB in flight on each queue of the busy disk.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// Rounds of two runs each.
    pub rounds: u32,
    /// Seconds of a run.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// 500 disks of 4 queues, or a few.
    pub fn new(is_quick: bool) -> Self {
        match is_quick {
            true => Self { disks: 20, queues: 4, depth: 8, rounds: 3, seconds: 0.2, quick: true },
            false => Self { disks: 500, queues: 4, depth: 8, rounds: 20, seconds: 1.0, quick: false },
        }
    }
}

/// One round: requests a second, and the server's processor time for each.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Of the disk that is alone.
    pub alone_iops: f64,
    /// Of the disk in the crowd.
    pub crowd_iops: f64,
    /// Of the disk that is alone.
    pub alone_cpu_us: f64,
    /// Of the disk in the crowd.
    pub crowd_cpu_us: f64,
    /// Threads of the server of the crowd that ran in this round, but for the one of the busy guest's connection: the two
    /// workers, when no idle disk has woken anything.
    pub crowd_threads: usize,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when a server does not start or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    if parameters.disks < 2 || parameters.queues == 0 || parameters.depth == 0 || parameters.rounds == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
    }
    let host = HostFacts::now();
    raise_file_limit();
    let folder = Folder::new()?;
    progress("start the servers", 0.0);
    let mut alone = Served::start(folder.path(), "alone", 1)?;
    let mut crowd = Served::start(folder.path(), "crowd", parameters.disks)?;
    let guests = (1..parameters.disks).map(|disk| idle_guest(&crowd.socket(disk), parameters.queues));
    let guests: Vec<_> = guests.collect::<Result<_>>()?;
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        progress(&format!("round {}", round + 1), f64::from(round) / f64::from(parameters.rounds));
        rows.push(one_round(&mut alone, &mut crowd, parameters, round)?);
    }
    drop(guests);
    Ok(Outcome { experiment: "crowd".to_owned(), host, parameters: parameters.clone(), rows })
}

/// A server of disks without a medium.
struct Served {
    process: Tied,
    folder: PathBuf,
    name: &'static str,
}

impl Served {
    fn start(folder: &Path, name: &'static str, disks: u32) -> Result<Self> {
        let mut args: Vec<OsString> = ["serve", "--workers", "2", "--control", "none"].map(OsString::from).into();
        let mut sockets: Vec<OsString> = Vec::new();
        for disk in 0..disks {
            args.push(format!("null:1G,name=d{disk}").into());
            let socket = socket_in(folder, name, disk);
            sockets.extend(["--vhost-user".into(), format!("{},export=d{disk}", socket.display()).into()]);
        }
        args.append(&mut sockets);
        let process = Tied::start(format!("the server `{name}`"), args)?;
        let mut served = Self { process, folder: folder.to_owned(), name };
        let sockets: Vec<PathBuf> = (0..disks).map(|disk| served.socket(disk)).collect();
        served.process.wait_for(&sockets)?;
        Ok(served)
    }

    fn socket(&self, disk: u32) -> PathBuf {
        socket_in(&self.folder, self.name, disk)
    }

    /// Reads the first disk for some time; requests a second, and microseconds of the server's processor for each.
    fn read(&self, parameters: &Parameters) -> Result<(f64, f64)> {
        let options = load::Options {
            depth: parameters.depth,
            connections: u32::from(parameters.queues),
            runtime: Some(Duration::from_secs_f64(parameters.seconds)),
            server_pid: Some(self.process.id()),
            ..load::Options::new(Target::Vhost(self.socket(0)))
        };
        let report = load::measure(&options)?;
        Ok((report.iops, report.server_cpu_us_per_request.unwrap_or(0.0)))
    }
}

fn socket_in(folder: &Path, name: &str, disk: u32) -> PathBuf {
    folder.join(format!("{name}-{disk}"))
}

/// A guest each of whose queues has had one request, and has none now.
fn idle_guest(socket: &Path, queues: u16) -> Result<(Device, Vec<Queue>)> {
    let mut device = Device::connect(socket, DeviceOptions::default())?;
    let options = QueueOptions { queues, depth: 2, data_bytes: 4096, ..QueueOptions::default() };
    let mut queues = device.start(&options)?;
    for queue in &mut queues {
        queue.run_well(Queue::READ, 0, 512)?;
    }
    Ok((device, queues))
}

fn one_round(alone: &mut Served, crowd: &mut Served, parameters: &Parameters, round: u32) -> Result<Row> {
    let crowd_first = !round.is_multiple_of(2);
    let before = runs_when_still(crowd.process.id());
    let (first, second) = if crowd_first { (&crowd, &alone) } else { (&alone, &crowd) };
    let results = [first.read(parameters)?, second.read(parameters)?];
    let after = runs(crowd.process.id());
    let [in_alone, in_crowd] = if crowd_first { [results[1], results[0]] } else { results };
    Ok(Row {
        alone_iops: in_alone.0,
        crowd_iops: in_crowd.0,
        alone_cpu_us: in_alone.1,
        crowd_cpu_us: in_crowd.1,
        crowd_threads: ran(&before, &after),
    })
}

/// Each thread of the process and its runs, once none has run for 20 ms; or after a second at the latest. Threads of
/// connections that have begun or ended just now still run for a moment.
fn runs_when_still(pid: u32) -> Vec<(String, String)> {
    let mut last = runs(pid);
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        let now = runs(pid);
        if now == last {
            break;
        }
        last = now;
    }
    last
}

/// How many threads ran between the two moments. A thread that was not there before is the one of the busy guest's
/// connection, which may still be about to end: no idle disk has woken it.
fn ran(before: &[(String, String)], after: &[(String, String)]) -> usize {
    let has_run =
        |(thread, runs): &&(String, String)| before.iter().any(|(other, then)| other == thread && then != runs);
    after.iter().filter(has_run).count()
}

/// The busy disk in the crowd, by the one that is alone: requests a second, and processor time.
fn pairs(outcome: &Outcome<Parameters, Row>) -> [Pair; 2] {
    let rows = || outcome.rows.iter();
    [
        Pair::new("requests per second", rows(), |row: &Row| (row.crowd_iops, row.alone_iops)),
        Pair::new("processor time of a request", rows(), |row: &Row| (row.crowd_cpu_us, row.alone_cpu_us)),
    ]
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let title = "crowd: a disk among many idle ones, by one alone";
    ratios::figures("crowd", title, &outcome.host, outcome.parameters.quick, &pairs(outcome))
}

/// What was found, in sentences.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let idle = outcome.parameters.disks.saturating_sub(1);
    let names = ["requests a second", "processor time of a request"];
    let pairs = pairs(outcome);
    let times =
        names.iter().zip(&pairs).filter_map(|(name, pair)| Some(format!("{:.3} times the {name}", pair.ratio()?.p50)));
    let times: Vec<String> = times.collect();
    let Some(threads) = outcome.rows.iter().map(|row| row.crowd_threads).max() else { return Vec::new() };
    vec![
        format!(
            "A disk beside {idle} idle ones has {} that it has alone (medians of the rounds).",
            times.join(" and ")
        ),
        format!("Of the crowd's server at most {threads} threads ran in a round; its workers are two."),
    ]
}

/// The figures as a table, and what the crowd has cost.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let Parameters { disks, queues, depth, rounds, .. } = &outcome.parameters;
    let middle = |of: fn(&Row) -> f64| median(outcome.rows.iter().map(of).collect());
    let mut table = table(["", "alone", "in the crowd", "ratio"].map(str::to_owned));
    let mut add = |name: &str, alone: f64, crowd: f64, unit: f64| {
        let cells = [alone / unit, crowd / unit, crowd / alone].map(|value| right(format!("{value:.2}")));
        table.add_row([Cell::new(name)].into_iter().chain(cells));
    };
    add("thousand requests a second", middle(|row| row.alone_iops), middle(|row| row.crowd_iops), 1000.0);
    add("server's CPU µs a request", middle(|row| row.alone_cpu_us), middle(|row| row.crowd_cpu_us), 1.0);
    format!(
        "{rounds} rounds; reads of 4 KiB from one disk of {queues} queues, {depth} in flight on each; alone, and beside {} \
         idle disks\n{table}\n{}",
        disks.saturating_sub(1),
        found(outcome).join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ran_is_counted_when_it_was_there_before() {
        let threads = |of: &[(&str, &str)]| {
            of.iter().map(|(id, runs)| ((*id).to_owned(), (*runs).to_owned())).collect::<Vec<_>>()
        };
        let before = threads(&[("1", "5"), ("2", "7"), ("3", "9")]);
        assert_eq!(ran(&before, &before), 0);
        // The first one ran, the second one has ended, and a connection's thread has come.
        assert_eq!(ran(&before, &threads(&[("1", "6"), ("3", "9"), ("4", "2")])), 1);
        let me = std::process::id();
        assert!(!runs_when_still(me).is_empty());
    }
}
