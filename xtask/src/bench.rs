//! `cargo xtask bench`: Spile beside its peers, line by line.
//!
//! Same file, same host, same client (`spile load`), over a Unix socket; the server on one core and
//! the client on another. The sides of a line take turns (A B C A B C …), so that a slow minute of
//! the host falls on all of them; what is printed is the median and the ratio to the best peer.
//! Below 15 % nothing is a difference.
//!
//! `--quick` runs a tiny slice of each group to show that it works; its figures mean nothing.
//! `--only WORD` takes the lines whose group or name holds the word, `--rounds N` sets the rounds.

mod images;
mod lines;
mod open;
mod report;
mod server;

use crate::{Result, shell};
use images::Images;
use lines::{Group, Line, Side, State};
use report::{Point, Report};
use server::Server;
use std::path::PathBuf;
use std::process::Command;

/// How a run is made.
pub struct Plan {
    /// Turns each side gets on a line.
    pub rounds: usize,
    /// A smoke test: little data, little time, few lines.
    pub quick: bool,
    /// Takes lines whose `group/name` holds this.
    pub only: String,
    /// Seconds of load for each point.
    pub point_s: f64,
    /// Where images and results are.
    pub folder: PathBuf,
    /// The program under test.
    pub spile: PathBuf,
}

/// Runs all lines that are asked for and prints the tables.
pub fn run(arguments: &[String]) -> Result<()> {
    let plan = plan(arguments)?;
    std::fs::create_dir_all(plan.folder.join("work")).map_err(|error| format!("{}: {error}", plan.folder.display()))?;
    let mut report = Report::new(&plan);
    let mut images = Images::new(&plan);
    for group in lines::groups(&plan) {
        run_group(&plan, &group, &mut images, &mut report)?;
    }
    if "open".contains(plan.only.as_str()) {
        open::run(&plan, &mut report)?;
    }
    images.remove();
    report.finish(&plan)
}

fn plan(arguments: &[String]) -> Result<Plan> {
    let quick = shell::flag(arguments, "--quick");
    let (rounds, point_s) = if quick { (1, 0.1) } else { (3, 2.0) };
    let built = shell::target_dir().join("release/spile");
    let spile = std::env::var_os("SPILE_BIN").map_or(built.clone(), PathBuf::from);
    if spile == built {
        shell::run(shell::cargo().args(["build", "--release", "--package", "spile"]))?;
    }
    Ok(Plan {
        rounds: shell::option(arguments, "--rounds", rounds)?.max(1),
        quick,
        only: shell::option(arguments, "--only", String::new())?,
        point_s: shell::option(arguments, "--seconds", point_s)?,
        folder: shell::target_dir().join("bench"),
        spile,
    })
}

fn run_group(plan: &Plan, group: &Group, images: &mut Images, report: &mut Report) -> Result<()> {
    let lines: Vec<&Line> = group.lines.iter().filter(|line| line.is_asked_for(plan, group)).collect();
    if lines.is_empty() {
        return Ok(());
    }
    let sides = usable_sides(group, report);
    report.begin_group(group, &sides);
    for line in lines {
        let points = run_line(plan, line, &sides, images)?;
        report.add_line(group, line, &sides, &points);
    }
    Ok(())
}

/// The sides whose programs are here; the others are told as skipped.
fn usable_sides(group: &Group, report: &mut Report) -> Vec<Side> {
    let mut usable = Vec::new();
    for side in &group.sides {
        match side.server.program().filter(|program| !shell::on_path(program)) {
            Some(program) => {
                report.skip(&format!("bench {}/{}: no {program}", group.name, side.name));
            }
            None => usable.push(side.clone()),
        }
    }
    usable
}

/// One line: `points[side][round]`.
fn run_line(plan: &Plan, line: &Line, sides: &[Side], images: &mut Images) -> Result<Vec<Vec<Point>>> {
    let mut points = vec![Vec::new(); sides.len()];
    for round in 0..plan.rounds {
        let mut kept: Option<Server> = None;
        for (side, points) in sides.iter().zip(&mut points) {
            // A rewrite goes to the server that has just had the first writes.
            let server = match kept.take().filter(|_| side.state == State::Again) {
                Some(server) => server,
                None => Server::start(plan, side, &images.get(side)?)?,
            };
            points.push(run_point(plan, line, side, round, &server)?);
            kept = Some(server);
        }
    }
    Ok(points)
}

fn run_point(plan: &Plan, line: &Line, side: &Side, round: usize, server: &Server) -> Result<Point> {
    // What the point before left in the page cache must not be written back during this one.
    shell::run(Command::new("sync").arg("--file-system").arg(&plan.folder))?;
    let mut load = server::pinned(0, &plan.spile);
    load.arg("load").arg(server.uri()).arg("--json");
    load.args(["--server-pid", &server.pid().to_string(), "--seed", &(round + 1).to_string()]);
    load.args(line.load_arguments(plan));
    let text = shell::output(&mut load).map_err(|problem| format!("{} on {}: {problem}", line.name, side.name))?;
    Point::read(&text)
}
