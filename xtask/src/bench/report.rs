//! Figures of a run: medians and ratios as tables, everything as JSON.

use super::Plan;
use super::lines::{Group, Line, Side};
use crate::{Result, shell};
use serde_json::{Value, json};
use std::process::Command;

/// The figures of one point, from `spile load --json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    iops: f64,
    bytes_per_s: f64,
    server_cpu_us: f64,
    all: Value,
}

impl Point {
    /// Reads the JSON of `spile load`.
    pub fn read(text: &str) -> Result<Point> {
        let all: Value = serde_json::from_str(text).map_err(|error| format!("load: {error}"))?;
        let number = |name: &str| all[name].as_f64().ok_or_else(|| format!("spile load printed no {name}: {text}"));
        Ok(Point {
            iops: number("iops")?,
            bytes_per_s: number("bytes_per_s")?,
            server_cpu_us: number("server_cpu_us_per_io")?,
            all,
        })
    }
}

/// Collects lines; prints each as it comes.
pub struct Report {
    results: Vec<Value>,
    skips: Vec<String>,
    slower: Vec<String>,
}

/// The figure in the middle.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Report {
    /// Nothing measured.
    pub fn new(plan: &Plan) -> Report {
        if plan.quick {
            println!("A quick run: it shows that every line works; its figures mean nothing.");
        }
        Report { results: Vec::new(), skips: Vec::new(), slower: Vec::new() }
    }

    /// Something could not be measured here.
    pub fn skip(&mut self, reason: &str) {
        println!("SKIP {reason}");
        self.skips.push(reason.to_string());
    }

    /// The head of a table.
    pub fn begin_group(&self, group: &Group, sides: &[Side]) {
        println!("\n{}: {}", group.name, group.about);
        print!("{:<28}", "rate, server's CPU µs per I/O");
        for side in sides {
            print!("{:>22}", side.name);
        }
        println!("{:>9}{:>7}", "ratio", "CPU");
    }

    /// One line of it: `points[side][round]`.
    pub fn add_line(&mut self, group: &Group, line: &Line, sides: &[Side], points: &[Vec<Point>]) {
        let rate = |point: &Point| if line.is_bandwidth() { point.bytes_per_s } else { point.iops };
        let rates: Vec<f64> = points.iter().map(|p| median(p.iter().map(rate).collect())).collect();
        let cpus: Vec<f64> = points.iter().map(|p| median(p.iter().map(|p| p.server_cpu_us).collect())).collect();
        let (rate_ratio, cpu_ratio) = (against_most(&rates), against_least(&cpus));
        print!("{:<28}", line.name);
        for (rate, cpu) in rates.iter().zip(&cpus) {
            print!("{:>22}", format!("{} {cpu:.2}", shown_rate(*rate, line.is_bandwidth())));
        }
        println!("{rate_ratio:>8.2}×{cpu_ratio:>6.2}×");
        let name = format!("{}/{}", group.name, line.name);
        if rate_ratio < 1.0 {
            self.slower.push(format!("{name}: {rate_ratio:.2}×"));
        }
        for ((side, points), (rate, cpu)) in sides.iter().zip(points).zip(rates.iter().zip(&cpus)) {
            let rounds: Vec<&Value> = points.iter().map(|point| &point.all).collect();
            self.results.push(json!({
                "line": name, "side": side.name, "median_rate": rate,
                "unit": if line.is_bandwidth() { "bytes_per_s" } else { "iops" },
                "median_server_cpu_us_per_io": cpu, "rounds": rounds,
            }));
        }
    }

    /// The opening of a long chain.
    pub fn add_opening(&mut self, size: &str, depth: usize, what: &str, times_ms: &mut [f64], memory_kib: &mut [f64]) {
        let (time_ms, peak_kib) = (median(times_ms.to_vec()), median(memory_kib.to_vec()));
        let peak_mib = peak_kib / 1024.0;
        println!("\nopen: a VHD of {size} with a chain of {depth} ({what}), from exec to the first connection");
        println!("{time_ms:.1} ms, {peak_mib:.1} MiB peak memory");
        self.results.push(json!({
            "line": format!("open/{size} chain {depth}, {what}"), "side": "spile",
            "median_ms": time_ms, "median_peak_kib": peak_kib, "rounds_ms": times_ms,
        }));
    }

    /// Writes the JSON and says where it is.
    pub fn finish(&self, plan: &Plan) -> Result<()> {
        if self.results.is_empty() {
            return Err(format!("no line holds '{}'", plan.only));
        }
        let path = plan.folder.join(if plan.quick { "quick.json" } else { "results.json" });
        let whole = json!({
            "host": host(), "rounds": plan.rounds, "seconds": plan.point_s,
            "results": self.results, "skipped": self.skips,
        });
        std::fs::write(&path, format!("{whole:#}\n")).map_err(|error| format!("{}: {error}", path.display()))?;
        if !plan.quick && !self.slower.is_empty() {
            println!("\nBelow the best of the others (under 15 % is no difference):");
            self.slower.iter().for_each(|line| println!("  {line}"));
        }
        println!("\nAll figures: {}", path.display());
        Ok(())
    }
}

/// The first against the largest of the others.
fn against_most(rates: &[f64]) -> f64 {
    rates[0] / rates[1..].iter().copied().fold(f64::NAN, f64::max)
}

/// The first against the smallest of the others.
fn against_least(costs: &[f64]) -> f64 {
    costs[0] / costs[1..].iter().copied().fold(f64::NAN, f64::min)
}

fn shown_rate(rate: f64, bandwidth: bool) -> String {
    match rate {
        rate if bandwidth => format!("{:.0} MB/s", rate / 1e6),
        rate if rate >= 10_000.0 => format!("{:.1} k", rate / 1e3),
        rate => format!("{rate:.0}"),
    }
}

/// What the figures were measured on.
fn host() -> Value {
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn ratios_are_to_the_best_other() {
        assert_eq!(against_most(&[30.0, 10.0, 20.0]), 1.5);
        assert_eq!(against_least(&[30.0, 10.0, 20.0]), 3.0);
        assert!(against_most(&[30.0]).is_nan());
    }

    #[test]
    fn a_report_without_the_servers_cpu_is_refused() {
        let good = r#"{"iops":1,"bytes_per_s":2,"server_cpu_us_per_io":3}"#;
        assert_eq!(Point::read(good).map(|point| point.iops), Ok(1.0));
        assert!(Point::read(r#"{"iops":1,"bytes_per_s":2,"server_cpu_us_per_io":null}"#).is_err());
    }
}
