//! `cargo xtask bench-life`: what is done to whole disks, by Spile and by other programs, each as one command.
//!
//! A task is done by each side in turn, and each round begins with another side. What is measured is the time from the start of
//! the command to its end. All sides have made their result durable by then: each gets the option for that, if it has one.

mod copies;
mod live;
mod merges;

use super::figures::median;
use super::kinds::Front;
use super::server::Server;
use super::{Plan, report, shell};
use crate::Result;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Something to be done, and who does it. The first side is Spile.
pub struct Task {
    pub name: String,
    pub sides: Vec<Side>,
    /// Spile's rate is to be at least so many times that of the best other side.
    pub aim: f64,
}

/// One way to do a task.
pub struct Side {
    pub name: &'static str,
    /// Puts the files there that the command needs, and removes what it will make.
    prepare: Make<Result<()>>,
    /// The command, of which the time is taken.
    command: Make<Command>,
    /// The side is only shown: it does less than the task.
    is_bound: bool,
}

type Make<T> = Box<dyn Fn(&World) -> T>;

impl Side {
    pub fn new(
        name: &'static str,
        prepare: impl Fn(&World) -> Result<()> + 'static,
        command: impl Fn(&World) -> Command + 'static,
    ) -> Side {
        Side { name, prepare: Box::new(prepare), command: Box::new(command), is_bound: false }
    }

    /// The same side, which is only shown.
    pub fn bound(self) -> Side {
        Side { is_bound: true, ..self }
    }
}

/// The files of a run.
pub struct World {
    folder: PathBuf,
    spile: PathBuf,
    size_bytes: u64,
    /// An NBD server, while a task needs one.
    server: Option<Server>,
}

impl World {
    /// A file of the run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A command of the program under test.
    pub fn spile(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.spile);
        command.args(words);
        command
    }

    /// The address of the NBD server's export.
    pub fn uri(&self) -> String {
        self.server.as_ref().map_or(String::new(), Server::uri)
    }

    /// Has Spile serve `path` over NBD until the next call.
    fn serve(&mut self, path: &Path) -> Result<()> {
        let mut command = self.spile(&["serve"]);
        command.arg(path).arg("--nbd").arg(format!("unix:{}", self.socket().display()));
        self.serve_by(command)
    }

    /// Where a server is to listen.
    fn socket(&self) -> PathBuf {
        std::env::temp_dir().join(format!("spile-life-{}.sock", std::process::id()))
    }

    /// Starts a server that listens there. The one before ends first.
    fn serve_by(&mut self, mut command: Command) -> Result<()> {
        self.server = None;
        self.server = Some(Server::spawn(&mut command, self.socket(), Front::Nbd)?);
        Ok(())
    }

    /// Runs a command that prepares something.
    pub fn run(&self, mut command: Command) -> Result<()> {
        shell::run(command.stdin(Stdio::null()).stdout(Stdio::null()))
    }

    /// Seconds that `command` takes. What was written before must not be written back meanwhile.
    fn time(&self, mut command: Command) -> Result<f64> {
        shell::run(Command::new("sync").arg("--file-system").arg(&self.folder))?;
        let begun = Instant::now();
        shell::run(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// Measures all tasks that were asked for and prints a line for each.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = plan.folder.join("life");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let size_bytes = if plan.quick { 64 << 20 } else { 1 << 30 };
    let mut world = World { folder, spile: plan.spile.clone(), size_bytes, server: None };
    let done = copies::run(plan, &mut world)
        .and_then(|copies| Ok([copies, merges::run(plan, &mut world)?, live::run(plan, &mut world)?].concat()));
    world.server = None;
    let results = done?;
    if results.is_empty() {
        return Err(format!("no task holds '{}'", plan.only));
    }
    report::write(plan, json!({ "results": results }))?;
    std::fs::remove_dir_all(&world.folder).map_err(|error| format!("{}: {error}", world.folder.display()))
}

/// Measures `task`: prints its line, and returns its figures. `None` when it was not asked for, or no other program can do it here.
fn measure(plan: &Plan, world: &World, task: &Task) -> Result<Option<Value>> {
    if !plan.asks_for(&task.name) {
        return Ok(None);
    }
    let mut sides = Vec::new();
    for side in &task.sides {
        let command = (side.command)(world);
        let program = command.get_program();
        match program == world.spile || shell::on_path(&program.to_string_lossy()) {
            true => sides.push(side),
            false => println!("SKIP bench-life {}: no {}", task.name, side.name),
        }
    }
    if sides.iter().skip(1).all(|side| side.is_bound) {
        return Ok(None);
    }
    let mut times_s = vec![Vec::new(); sides.len()];
    for round in 0..plan.rounds {
        for turn in 0..sides.len() {
            let number = (round + turn) % sides.len();
            (sides[number].prepare)(world)?;
            let time_s = world.time((sides[number].command)(world));
            times_s[number]
                .push(time_s.map_err(|problem| format!("{} by {}: {problem}", task.name, sides[number].name))?);
        }
    }
    let names: Vec<_> = sides.iter().map(|side| (side.name, side.is_bound)).collect();
    Ok(Some(show(&task.name, task.aim, &names, &times_s)))
}

/// Prints the line of a task and returns its figures. Each side has its name, and true when it is only shown.
fn show(task: &str, aim: f64, sides: &[(&str, bool)], times_s: &[Vec<f64>]) -> Value {
    let medians: Vec<f64> = times_s.iter().map(|times| median(times.clone())).collect();
    let others = sides.iter().zip(&medians).skip(1).filter(|((_, is_bound), _)| !is_bound);
    let best_other = others.map(|(_, median_s)| *median_s).fold(f64::NAN, f64::min);
    let ratio = best_other / medians[0];
    print!("{task:<28}");
    for ((name, _), median_s) in sides.iter().zip(&medians) {
        print!("{:>24}", format!("{name} {median_s:.3} s"));
    }
    let word = if ratio >= aim { "hit" } else { "missed" };
    println!("{ratio:>7.2}×  aim {aim}: {word}");
    let sides: Vec<Value> = sides
        .iter()
        .zip(times_s)
        .zip(&medians)
        .map(|(((name, _), times), median_s)| json!({ "side": name, "median_s": median_s, "rounds_s": times }))
        .collect();
    json!({ "task": task, "ratio": ratio, "aim": aim, "sides": sides })
}
