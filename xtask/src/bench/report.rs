//! The output of a run: medians, ratios and aims as tables, and all figures as JSON.

use super::Plan;
use super::figures::{Measure, Point, Summary, Verdict, median, ratio};
use super::kinds::Role;
use super::lines::{Group, Line, Side};
use crate::{Result, shell};
use serde_json::{Value, json};
use std::process::Command;

/// A chain of thirty is to be open within this time, and to take no more memory.
const OPENING_MS: f64 = 50.0;
const OPENING_MIB: f64 = 32.0;
use std::time::Duration;

/// Collects lines; prints each as it comes.
pub struct Report {
    results: Vec<Value>,
    skips: Vec<String>,
    slower: Vec<String>,
    /// Aims that were hit, and texts of those that were not.
    hit: usize,
    missed: Vec<String>,
    /// Promises that do not depend on speed and were not kept.
    broken: Vec<String>,
}

impl Report {
    /// A report without figures.
    pub fn new(plan: &Plan) -> Report {
        if plan.quick {
            println!("A quick run: it shows that every line works; its figures mean nothing.");
        }
        let (results, skips, slower) = (Vec::new(), Vec::new(), Vec::new());
        Report { results, skips, slower, hit: 0, missed: Vec::new(), broken: Vec::new() }
    }

    /// The figures of all lines so far, a side each.
    pub fn results(&self) -> &[Value] {
        &self.results
    }

    /// Notes something that could not be measured here.
    pub fn skip(&mut self, reason: &str) {
        println!("SKIP {reason}");
        self.skips.push(reason.to_string());
    }

    /// Prints the head of a table.
    pub fn begin_group(&self, group: &Group, sides: &[Side]) {
        println!("\n{}: {}", group.name, group.about);
        print!("{:<width$}", "rate, [p50,] server's CPU µs", width = name_width(group));
        for side in sides {
            print!("{:>width$}", side.name, width = column_width(group));
        }
        for (_, heading) in compared(sides) {
            print!("{heading:>8}");
        }
        println!("{:>8}", "CPU");
    }

    /// Prints a line of a table: `points[side][round]`.
    pub fn add_line(&mut self, group: &Group, line: &Line, sides: &[Side], points: &[Vec<Point>]) {
        let summaries: Vec<Summary> =
            sides.iter().zip(points).map(|(side, points)| Summary::new(line, side, points)).collect();
        print!("{:<width$}", line.name, width = name_width(group));
        for summary in &summaries {
            print!("{:>width$}", cell(line, summary), width = column_width(group));
        }
        for (role, _) in compared(sides) {
            print!("{:>7.2}×", ratio(&summaries, role, Measure::Rate));
        }
        println!("{:>7.2}×", ratio(&summaries, first_compared(sides), Measure::Cpu));
        let name = format!("{}/{}", group.name, line.name);
        let beside_peers = ratio(&summaries, Role::Peer, Measure::Rate);
        if beside_peers < 1.0 {
            self.slower.push(format!("{name}: {beside_peers:.2}×"));
        }
        let verdicts = line.aims.iter().map(|aim| aim.judge(&summaries)).collect::<Vec<_>>();
        verdicts.iter().for_each(|verdict| self.add_verdict(&name, verdict));
        let texts: Vec<&str> = verdicts.iter().map(|verdict| verdict.text.as_str()).collect();
        self.keep_line(&name, line, sides, points, &summaries, &texts);
    }

    fn add_verdict(&mut self, name: &str, verdict: &Verdict) {
        println!("    aim: {}", verdict.text);
        match verdict.is_hit {
            Some(true) => self.hit += 1,
            _ => self.missed.push(format!("{name}: {}", verdict.text)),
        }
    }

    fn keep_line(
        &mut self,
        name: &str,
        line: &Line,
        sides: &[Side],
        points: &[Vec<Point>],
        summaries: &[Summary],
        aims: &[&str],
    ) {
        for (at, ((side, points), summary)) in sides.iter().zip(points).zip(summaries).enumerate() {
            let rounds: Vec<&Value> = points.iter().map(|point| &point.all).collect();
            self.results.push(json!({
                "line": name, "side": side.name, "median_rate": summary.rate,
                "unit": if line.is_bandwidth() { "bytes_per_s" } else { "iops" },
                "median_server_cpu_us_per_io": summary.cpu_us, "median_p50_us": summary.p50_us,
                "aims": if at == 0 { aims } else { &[] }, "rounds": rounds,
            }));
        }
    }

    /// Prints how long it takes to open a long chain.
    pub fn add_opening(
        &mut self,
        format: &str,
        size: &str,
        depth: usize,
        what: &str,
        times_ms: &mut [f64],
        memory_kib: &mut [f64],
    ) {
        let (time_ms, peak_kib) = (median(times_ms.to_vec()), median(memory_kib.to_vec()));
        let peak_mib = peak_kib / 1024.0;
        println!(
            "\nopen: a {format} disk of {size} with a chain of {depth} ({what}), from exec to the first connection"
        );
        println!("{time_ms:.1} ms, {peak_mib:.1} MiB peak memory");
        for (what, figure, most) in [("ms", time_ms, OPENING_MS), ("MiB", peak_mib, OPENING_MIB)] {
            let (is_hit, word) = if figure <= most { (true, "hit") } else { (false, "missed") };
            let text = format!("{what} ≤ {most:.0}: {figure:.1}, {word}");
            self.add_verdict(&format!("open/{format} {size} chain {depth}"), &Verdict { text, is_hit: Some(is_hit) });
        }
        self.results.push(json!({
            "line": format!("open/{format} {size} chain {depth}, {what}"), "side": "spile",
            "median_ms": time_ms, "median_peak_kib": peak_kib, "rounds_ms": times_ms,
        }));
    }

    /// Prints the wake-ups of an idle server. Those of Spile must be zero; those of a peer are only shown.
    pub fn add_idle(&mut self, side: &Side, wakeups: u64, watched: Duration) {
        let seconds = watched.as_secs();
        println!("{}: {wakeups} wake-ups in {seconds} s", side.name);
        self.results.push(json!({ "line": "idle", "side": side.name, "wakeups": wakeups, "seconds": seconds }));
        if side.role != Role::Shown {
            let word = if wakeups == 0 { "hit" } else { "missed" };
            let text = format!("no wake-ups: {wakeups}, {word}");
            self.add_verdict("idle", &Verdict { text: text.clone(), is_hit: Some(wakeups == 0) });
            self.broken.extend((wakeups > 0).then(|| format!("idle: {text}")));
        }
    }

    /// Writes the JSON file, and prints its path and the aims that were missed.
    ///
    /// # Errors
    /// When nothing was measured, or a promise was not kept that does not depend on speed.
    pub fn finish(&self, plan: &Plan) -> Result<()> {
        if self.results.is_empty() {
            return Err(format!("no line holds '{}'", plan.only));
        }
        if !plan.quick {
            self.print_shortfalls();
        }
        write(
            plan,
            json!({
                "seconds": plan.point_s, "results": self.results, "skipped": self.skips, "missed": self.missed,
            }),
        )?;
        if self.broken.is_empty() { Ok(()) } else { Err(self.broken.join("; ")) }
    }

    fn print_shortfalls(&self) {
        if !self.slower.is_empty() {
            println!("\nBelow the best of the others (under 15 % is no difference):");
            self.slower.iter().for_each(|line| println!("  {line}"));
        }
        if self.hit + self.missed.len() > 0 {
            println!("\nAims: {} hit, {} not", self.hit, self.missed.len());
            self.missed.iter().for_each(|line| println!("  {line}"));
        }
    }
}

/// Writes all figures of a run to its JSON file, beside what the host is, and prints the file's path.
pub fn write(plan: &Plan, mut figures: Value) -> Result<()> {
    let path = plan.results();
    figures["host"] = host();
    figures["rounds"] = plan.rounds.into();
    std::fs::write(&path, format!("{figures:#}\n")).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("\nAll figures: {}", path.display());
    Ok(())
}

/// Room for the longest name, and for the heading above.
fn name_width(group: &Group) -> usize {
    let names = group.lines.iter().map(|line| line.name.chars().count());
    names.max().unwrap_or(0).max(28) + 1
}

/// Room for a side's figures.
fn column_width(group: &Group) -> usize {
    if group.lines.iter().any(|line| line.shows_p50) { 26 } else { 22 }
}

/// The roles that these sides have, so far as ratios are to them.
fn compared(sides: &[Side]) -> impl Iterator<Item = (Role, &'static str)> {
    let roles: Vec<Role> = sides.iter().skip(1).map(|side| side.role).collect();
    Role::COMPARED.into_iter().filter(move |(role, _)| roles.contains(role))
}

/// Peers, unless there are none here.
fn first_compared(sides: &[Side]) -> Role {
    compared(sides).next().map_or(Role::Peer, |(role, _)| role)
}

fn cell(line: &Line, summary: &Summary) -> String {
    let rate = shown_rate(summary.rate, line.is_bandwidth());
    let p50 = if line.shows_p50 { format!(" p50 {:.1}", summary.p50_us) } else { String::new() };
    format!("{rate}{p50} {:.2}", summary.cpu_us)
}

/// A rate for people: requests a second, or MB/s.
pub fn shown_rate(rate: f64, bandwidth: bool) -> String {
    match rate {
        rate if bandwidth => format!("{:.0} MB/s", rate / 1e6),
        rate if rate >= 10_000.0 => format!("{:.1} k", rate / 1e3),
        rate => format!("{rate:.0}"),
    }
}

/// A description of the machine.
pub fn host() -> Value {
    let first_line = |program: &str, argument: &str| {
        let done = shell::on_path(program).then(|| Command::new(program).arg(argument).output().ok()).flatten();
        let text = done.map(|done| String::from_utf8_lossy(&done.stdout).into_owned());
        text.and_then(|text| text.lines().next().map(str::to_string))
    };
    json!({
        "kernel": first_line("uname", "-rm"),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "qemu-nbd": first_line("qemu-nbd", "--version"),
        "nbdkit": first_line("nbdkit", "--version"),
        "qemu-storage-daemon": first_line("qemu-storage-daemon", "--version"),
        "fio": first_line("fio", "--version"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::kinds::Kind;
    use super::super::lines::{Cache, Format};
    use super::*;

    #[test]
    fn a_ratio_has_a_column_where_a_side_has_its_role() {
        let side = |role| Side::new("x", Kind::Fio, Format::Raw, Cache::Page).role(role);
        let headings = |roles: &[Role]| {
            let sides: Vec<Side> = roles.iter().map(|role| side(*role)).collect();
            compared(&sides).map(|(_, heading)| heading).collect::<Vec<_>>()
        };
        assert_eq!(headings(&[Role::Peer, Role::Bare, Role::Peer, Role::Shown]), ["÷peer", "÷bare"]);
        assert_eq!(headings(&[Role::Peer, Role::Raw]), ["÷raw"]);
        assert!(headings(&[Role::Peer]).is_empty());
    }

    #[test]
    fn an_idle_server_that_wakes_up_is_a_failure() {
        let side = Side::new("spile", Kind::Fio, Format::Null, Cache::Page);
        let mut report = Report {
            results: Vec::new(),
            skips: Vec::new(),
            slower: Vec::new(),
            hit: 0,
            missed: Vec::new(),
            broken: Vec::new(),
        };
        report.add_idle(&side, 0, Duration::from_secs(1));
        assert!(report.broken.is_empty() && report.hit == 1);
        report.add_idle(&side, 3, Duration::from_secs(1));
        assert_eq!((report.broken.len(), report.missed.len()), (1, 1));
    }
}
