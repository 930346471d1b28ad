//! `cargo xtask bench` and `cargo xtask bench-vhost`: Spile beside its peers, line by line.
//!
//! Same file, same host, same client (`spile load`), over a Unix socket; the server on one core and
//! the client on another. The sides of a line take turns, and each round begins with another one (A B C B C A …): a slow minute of
//! the host falls on all of them, and none is always the one after. What is printed is the median, the ratios and, where a line has
//! aims, whether they were hit. Below 15 % nothing is a difference.
//!
//! `--quick` runs a tiny slice of each group to show that it works; its figures mean nothing.
//! `--before PROGRAM` sets an earlier build of Spile beside each line, as `before`.
//! `--only WORD` takes the lines whose group or name holds the word, `--rounds N` sets the rounds,
//! `--seconds S` the length of a point.

mod figures;
mod fio;
mod idle;
mod images;
pub mod kinds;
mod life;
mod lines;
mod nbd;
mod open;
mod peers;
mod picture;
mod report;
pub mod server;
mod vhost;

pub use peers::run as run_peers;

use crate::{Result, shell};
use figures::Point;
use images::Images;
use kinds::{Kind, Role};
use lines::{Cache, Group, Line, Side, State};
use report::Report;
use server::Server;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The options of a run.
pub struct Plan {
    /// How often each side of a line is measured.
    pub rounds: usize,
    /// True for a smoke test: little data, little time, few lines.
    pub quick: bool,
    /// Only lines whose `group/name` contains this are measured.
    pub only: String,
    /// Seconds of load for each point.
    pub point_s: f64,
    /// The folder of images and results.
    pub folder: PathBuf,
    /// The start of the names of result files.
    prefix: &'static str,
    /// The program under test.
    pub spile: PathBuf,
    /// An earlier build of it, to be set beside it.
    pub before: Option<PathBuf>,
}

impl Plan {
    /// The file for the figures.
    pub fn results(&self) -> PathBuf {
        let name = if self.quick { "quick" } else { "results" };
        self.folder.join(format!("{}{name}.json", self.prefix))
    }

    /// One more thing to measure, beside the groups of lines.
    fn asks_for(&self, name: &str) -> bool {
        name.contains(self.only.as_str())
    }
}

/// Measures over NBD: runs all lines that were asked for and prints the tables.
pub fn run(arguments: &[String]) -> Result<()> {
    let plan = plan(arguments, "")?;
    let mut report = Report::new(&plan);
    run_groups(&plan, nbd::groups(&plan), &mut report)?;
    if plan.asks_for("open") {
        open::run(&plan, &mut report)?;
    }
    report.finish(&plan)
}

/// Measures over vhost-user-blk, in the same way.
pub fn run_vhost(arguments: &[String]) -> Result<()> {
    let plan = plan(arguments, "vhost-")?;
    let mut report = Report::new(&plan);
    run_groups(&plan, vhost::groups(&plan), &mut report)?;
    if plan.asks_for("idle") {
        idle::run(&plan, &mut report)?;
    }
    report.finish(&plan)
}

/// Measures what is done to whole disks.
pub fn run_life(arguments: &[String]) -> Result<()> {
    life::run(&plan(arguments, "life-")?)
}

/// The program under test: a release build, made now unless `SPILE_BIN` names another.
pub fn spile() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("SPILE_BIN") {
        return Ok(named.into());
    }
    shell::run(shell::cargo().args(["build", "--release", "--package", "spile"]))?;
    Ok(shell::target_dir().join("release/spile"))
}

fn plan(arguments: &[String], prefix: &'static str) -> Result<Plan> {
    let quick = shell::flag(arguments, "--quick");
    let (rounds, point_s) = if quick { (1, 0.1) } else { (3, 2.0) };
    let plan = Plan {
        rounds: shell::option(arguments, "--rounds", rounds)?.max(1),
        quick,
        only: shell::option(arguments, "--only", String::new())?,
        point_s: shell::option(arguments, "--seconds", point_s)?,
        folder: shell::target_dir().join("bench"),
        prefix,
        spile: spile()?,
        before: Some(shell::option(arguments, "--before", PathBuf::new())?).filter(|path| path.as_os_str() != ""),
    };
    let work = plan.folder.join("work");
    std::fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
    Ok(plan)
}

/// A quick plan takes the first two lines of each group.
fn run_groups(plan: &Plan, groups: Vec<Group>, report: &mut Report) -> Result<()> {
    let mut images = Images::new(plan);
    for mut group in groups {
        if plan.quick {
            group.lines.truncate(2);
        }
        run_group(plan, &group, &mut images, report)?;
    }
    images.remove();
    Ok(())
}

fn run_group(plan: &Plan, group: &Group, images: &mut Images, report: &mut Report) -> Result<()> {
    let asked: Vec<&Line> = group.lines.iter().filter(|line| line.is_asked_for(plan, group)).collect();
    let lines = usable_lines(group, asked, report);
    if lines.is_empty() {
        return Ok(());
    }
    let sides = usable_sides(plan, group, report);
    images.warm(&sides)?;
    report.begin_group(group, &sides);
    for line in lines {
        let points = run_line(plan, line, &sides, images)?;
        report.add_line(group, line, &sides, &points);
    }
    Ok(())
}

/// The lines for which there is enough memory. The others are reported as skipped.
fn usable_lines<'a>(group: &Group, lines: Vec<&'a Line>, report: &mut Report) -> Vec<&'a Line> {
    let free = free_huge_pages();
    let (usable, short): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.huge_pages() <= free);
    if let Some(most) = short.iter().map(|line| line.huge_pages()).max() {
        let which = format!("bench {}: {} lines with huge pages", group.name, short.len());
        report.skip(&format!("{which}: {free} pages are free (sysctl vm.nr_hugepages={most})"));
    }
    usable
}

fn free_huge_pages() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// The sides whose programs are installed. The others are reported as skipped.
fn usable_sides(plan: &Plan, group: &Group, report: &mut Report) -> Vec<Side> {
    let mut usable = Vec::new();
    let before = plan.before.as_ref().map(|_| Side { name: "before", role: Role::Before, ..group.sides[0].clone() });
    for side in group.sides.iter().chain(&before) {
        match side.server.program().filter(|program| !shell::on_path(program)) {
            Some(program) => {
                report.skip(&format!("bench {}/{}: no {program}", group.name, side.name));
            }
            None => usable.push(side.clone()),
        }
    }
    usable
}

/// Measures one line: `points[side][round]`.
fn run_line(plan: &Plan, line: &Line, sides: &[Side], images: &mut Images) -> Result<Vec<Vec<Point>>> {
    let mut points = vec![Vec::new(); sides.len()];
    for round in 0..plan.rounds {
        let mut kept: Option<Server> = None;
        for number in order(sides, round) {
            let (side, points) = (&sides[number], &mut points[number]);
            // A rewrite goes to the server that has just had the first writes.
            let again = kept.take().filter(|_| side.state == State::Again);
            let image = if again.is_some() { PathBuf::new() } else { images.get(side)? };
            kept = match again {
                None if side.server != Kind::Fio => Some(Server::start(plan, side, &image)?),
                again => again,
            };
            if is_cached_first_write(line, side) {
                images.warm_page_cache(line.total_bytes())?;
            }
            // What the point before left in the page cache must not be written back during this one.
            shell::run(Command::new("sync").arg("--file-system").arg(&plan.folder))?;
            points.push(run_point(plan, line, side, round, &image, kept.as_ref())?);
        }
    }
    Ok(points)
}

/// The sides in the order of a round. Each round begins with another one; a side that goes on with the server of the side before
/// stays behind it.
fn order(sides: &[Side], round: usize) -> Vec<usize> {
    let first: Vec<usize> = (0..sides.len()).filter(|&number| sides[number].state != State::Again).collect();
    let from = first[round % first.len()];
    (from..sides.len()).chain(0..from).collect()
}

/// True for writes into a new image through the page cache: how fast they are depends on whether the host has to find fresh memory.
fn is_cached_first_write(line: &Line, side: &Side) -> bool {
    line.writes() && side.state == State::Fresh && side.cache == Cache::Page
}

/// Measures one point on a server, or on the image itself where there is no server.
fn run_point(
    plan: &Plan,
    line: &Line,
    side: &Side,
    round: usize,
    image: &Path,
    server: Option<&Server>,
) -> Result<Point> {
    let Some(server) = server else { return fio::run(plan, line, side, round, image) };
    let mut load = server::pinned(&server::client_cores(side.cores), &plan.spile);
    load.arg("load").arg(server.uri()).arg("--json");
    load.args(["--server-pid", &server.pid().to_string(), "--seed", &(round + 1).to_string()]);
    load.args(line.load_arguments(plan));
    let text = shell::output(&mut load).map_err(|problem| format!("{} on {}: {problem}", line.name, side.name))?;
    Point::read(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kinds::Front;
    use lines::{Cache, Format};

    #[test]
    fn each_round_begins_with_another_side() {
        let side = |state| Side::new("", Kind::Spile(Front::Nbd), Format::Raw, Cache::Page).state(state);
        let sides = [side(State::Fresh), side(State::Again), side(State::Full)];
        assert_eq!(order(&sides, 0), [0, 1, 2]);
        assert_eq!(order(&sides, 1), [2, 0, 1]);
        assert_eq!(order(&sides, 2), [0, 1, 2]);
    }
}
