//! Figures: of a point, of a line (medians, ratios), and whether they reach an aim.

use super::kinds::{Aim, Role};
use super::lines::{Line, Side};
use crate::Result;
use serde_json::Value;

/// The figures of one point.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub iops: f64,
    pub bytes_per_s: f64,
    pub server_cpu_us: f64,
    /// The median latency.
    pub p50_us: f64,
    /// All that the client printed.
    pub all: Value,
}

impl Point {
    /// Reads the JSON of `spile load`.
    pub fn read(text: &str) -> Result<Point> {
        let all: Value = serde_json::from_str(text).map_err(|error| format!("load: {error}"))?;
        let number = |name: &str| all[name].as_f64().ok_or_else(|| format!("spile load printed no {name}: {text}"));
        let lane = if all["write"]["requests"].as_u64() > Some(0) { "write" } else { "read" };
        Ok(Point {
            iops: number("iops")?,
            bytes_per_s: number("bytes_per_s")?,
            server_cpu_us: number("server_cpu_us_per_request")?,
            p50_us: all[lane]["latency_p50_us"].as_f64().unwrap_or(f64::NAN),
            all,
        })
    }
}

/// The figure in the middle.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The kinds of figures that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measure {
    /// Requests or bytes a second: more is better.
    Rate,
    /// The server's CPU time for a request: less is better.
    Cpu,
    /// The median of the latencies: less is better.
    P50,
}

/// The medians of one side.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    role: Role,
    /// Requests a second, or bytes where they say more.
    pub rate: f64,
    pub cpu_us: f64,
    pub p50_us: f64,
}

impl Summary {
    /// The medians of all rounds.
    pub fn new(line: &Line, side: &Side, points: &[Point]) -> Summary {
        let rate = |point: &Point| if line.is_bandwidth() { point.bytes_per_s } else { point.iops };
        let middle = |figure: &dyn Fn(&Point) -> f64| median(points.iter().map(figure).collect());
        Summary {
            role: side.role,
            rate: middle(&rate),
            cpu_us: middle(&|point| point.server_cpu_us),
            p50_us: middle(&|point| point.p50_us),
        }
    }

    fn get(&self, measure: Measure) -> f64 {
        match measure {
            Measure::Rate => self.rate,
            Measure::Cpu => self.cpu_us,
            Measure::P50 => self.p50_us,
        }
    }
}

/// The first against the best of the others in that role; NaN when there is none.
pub fn ratio(sides: &[Summary], role: Role, measure: Measure) -> f64 {
    let Some((ours, others)) = sides.split_first() else { return f64::NAN };
    let better = if measure == Measure::Rate { f64::max } else { f64::min };
    let others = others.iter().filter(|side| side.role == role).map(|side| side.get(measure));
    ours.get(measure) / others.fold(f64::NAN, better)
}

/// The result of an aim.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The aim, the figure, and whether it was reached.
    pub text: String,
    /// `None` when it could not be judged.
    pub is_hit: Option<bool>,
}

impl Aim {
    /// Compares the aim with the measured figures.
    pub fn judge(self, sides: &[Summary]) -> Verdict {
        let ours = |measure| sides.first().map_or(f64::NAN, |side| side.get(measure));
        let of = |role: Role| format!(" of {}", role.name());
        let (what, sign, bound, unit, figure) = match self {
            Aim::RateOf(role, bound) => ("rate", '≥', bound, of(role), ratio(sides, role, Measure::Rate)),
            Aim::CpuOf(role, bound) => ("CPU", '≤', bound, of(role), ratio(sides, role, Measure::Cpu)),
            Aim::P50Of(role, bound) => ("p50", '≤', bound, of(role), ratio(sides, role, Measure::P50)),
            Aim::CpuAtMost(bound) => ("CPU", '≤', bound, " µs".to_string(), ours(Measure::Cpu)),
            Aim::P50AtMost(bound) => ("p50", '≤', bound, " µs".to_string(), ours(Measure::P50)),
        };
        // As printed: a figure that rounds to the aim has reached it.
        let rounded = (figure * 100.0).round() / 100.0;
        let is_hit = (!figure.is_nan()).then_some(if sign == '≥' { rounded >= bound } else { rounded <= bound });
        let word = match is_hit {
            Some(true) => format!("{figure:.2}, hit"),
            Some(false) => format!("{figure:.2}, missed by {:.0} %", (figure / bound - 1.0).abs() * 100.0),
            None => "not judged: there is nothing to compare with".to_string(),
        };
        Verdict { text: format!("{what} {sign} {bound:.2}{unit}: {word}"), is_hit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sides(figures: &[(Role, f64)]) -> Vec<Summary> {
        let side = |&(role, figure)| Summary { role, rate: figure, cpu_us: figure, p50_us: f64::NAN };
        figures.iter().map(side).collect()
    }

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn ratios_are_to_the_best_other_in_the_role() {
        let sides = sides(&[(Role::Peer, 30.0), (Role::Peer, 10.0), (Role::Peer, 20.0), (Role::Bare, 60.0)]);
        assert_eq!(ratio(&sides, Role::Peer, Measure::Rate), 1.5);
        assert_eq!(ratio(&sides, Role::Peer, Measure::Cpu), 3.0);
        assert_eq!(ratio(&sides, Role::Bare, Measure::Rate), 0.5);
        assert!(ratio(&sides, Role::Raw, Measure::Rate).is_nan());
    }

    #[test]
    fn aims_are_hit_missed_or_not_judged() {
        let sides = sides(&[(Role::Peer, 0.9), (Role::Bare, 1.0)]);
        let judge = |aim: Aim| aim.judge(&sides);
        assert_eq!(judge(Aim::RateOf(Role::Bare, 0.9)).is_hit, Some(true));
        assert_eq!(judge(Aim::RateOf(Role::Bare, 0.97)).is_hit, Some(false));
        assert_eq!(judge(Aim::CpuOf(Role::Bare, 0.45)).text, "CPU ≤ 0.45 of bare: 0.90, missed by 100 %");
        assert_eq!(judge(Aim::CpuAtMost(1.0)).text, "CPU ≤ 1.00 µs: 0.90, hit");
        assert_eq!(judge(Aim::P50AtMost(1.0)).is_hit, None);
        assert_eq!(judge(Aim::RateOf(Role::Raw, 0.9)).is_hit, None);
    }

    #[test]
    fn a_report_without_the_servers_cpu_is_refused() {
        let good =
            r#"{"iops":1,"bytes_per_s":2,"server_cpu_us_per_request":3,"read":{"requests":1,"latency_p50_us":4}}"#;
        assert_eq!(Point::read(good).map(|point| (point.iops, point.p50_us)), Ok((1.0, 4.0)));
        assert!(Point::read(r#"{"iops":1,"bytes_per_s":2,"server_cpu_us_per_request":null}"#).is_err());
    }
}
