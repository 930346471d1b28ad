//! The figures in the repository, and what new ones are compared with.

use super::{Set, Unit};
use crate::{Result, shell};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// The advice for a change that is wanted.
const UPDATE: &str = "keep it by `cargo xtask count --update`";

/// The figures of a set in the repository, and the compiler that they belong to.
pub struct Kept {
    arch: String,
    rustc: String,
    /// By the names of the cases.
    pub figures: BTreeMap<String, u64>,
}

impl Kept {
    fn path(set: &Set) -> PathBuf {
        shell::root().join(format!("xtask/counts/{}.json", set.name))
    }

    /// Reads them.
    pub fn read(set: &Set) -> Result<Kept> {
        let path = Self::path(set);
        let problem = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|error| problem(&error))?;
        let value: Value = serde_json::from_str(&text).map_err(|error| problem(&error))?;
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_string();
        let figures = value[set.unit.name()].as_object().into_iter().flatten();
        let figures = figures.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect();
        Ok(Kept { arch: word("arch"), rustc: word("rustc"), figures })
    }
}

/// Keeps new figures.
pub fn keep(set: &Set, counted: &BTreeMap<&str, u64>) -> Result<()> {
    let path = Kept::path(set);
    let whole = json!({
        "about": set.about, "arch": std::env::consts::ARCH, "rustc": rustc()?, set.unit.name(): counted,
    });
    for (name, count) in counted {
        println!("{name}: {count} {}", words(set.unit));
    }
    std::fs::write(&path, format!("{whole:#}\n")).map_err(|error| format!("{}: {error}", path.display()))
}

/// The compiler's name and version.
pub fn rustc() -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    // In the workspace's folder, whose toolchain may be another one than that of the folder this was called from.
    let text = shell::output(Command::new(program).arg("--version").current_dir(shell::root()))?;
    Ok(text.trim().to_string())
}

fn words(unit: Unit) -> String {
    unit.name().replace('_', " ")
}

/// How a figure has changed.
#[derive(Debug, PartialEq)]
enum Change {
    Little,
    Grown,
    Shrunk,
    /// There is no kept figure.
    New,
}

fn change(unit: Unit, kept: Option<u64>, now: u64) -> Change {
    let Some(kept) = kept else { return Change::New };
    let (percent, least) = unit.tolerance();
    let most = (kept * percent / 100).max(least);
    match now {
        now if now > kept + most => Change::Grown,
        now if now + most < kept => Change::Shrunk,
        _ => Change::Little,
    }
}

/// The result of a comparison, and its messages.
#[derive(Default)]
pub struct Outcome {
    lines: Vec<String>,
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Outcome {
    /// Adds the results of one more comparison.
    pub fn add(&mut self, other: Outcome) {
        self.lines.extend(other.lines);
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Notes that a set cannot be counted here.
    pub fn skip(&mut self, set: &Set, why: &str) {
        self.lines.push(format!("SKIP count {}: {why}", set.name));
        self.skipped += set.cases.len() as u64;
    }

    /// Prints everything.
    ///
    /// # Errors
    /// When a case failed.
    pub fn tell(&self) -> Result<()> {
        self.lines.iter().for_each(|line| println!("{line}"));
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if self.failed == 0 { Ok(()) } else { Err(format!("{} failed", self.failed)) }
    }
}

/// Compares new figures with the kept ones.
pub fn compare(set: &Set, counted: &BTreeMap<&str, u64>, kept: &Kept, rustc: &str) -> Outcome {
    let is_same_compiler = kept.rustc == rustc && kept.arch == std::env::consts::ARCH;
    let mut outcome = Outcome::default();
    for (name, &now) in counted {
        let before = kept.figures.get(*name).copied();
        let were = before.map_or("none".to_string(), |before| before.to_string());
        let figures = format!("{name}: {now} {}, kept are {were}", words(set.unit));
        let (count, line) = match change(set.unit, before, now) {
            Change::Little => (&mut outcome.passed, figures),
            Change::Shrunk => (&mut outcome.passed, format!("NOTE count {figures}: {UPDATE}")),
            Change::Grown if is_same_compiler => {
                (&mut outcome.failed, format!("FAIL {figures}: find the cause, or {UPDATE}"))
            }
            Change::Grown => {
                let compilers = format!("those are by {}, this is by {rustc}", kept.rustc);
                (&mut outcome.skipped, format!("SKIP count {figures}; {compilers}"))
            }
            Change::New => (&mut outcome.failed, format!("FAIL {name}: not kept yet: {UPDATE}")),
        };
        *count += 1;
        outcome.lines.push(line);
    }
    outcome
}

/// Checks the bounds of a set.
pub fn check_bounds(set: &Set, counted: &BTreeMap<&str, u64>) -> Outcome {
    let mut outcome = Outcome::default();
    for bound in set.bounds {
        let (now, of) = (counted[bound.case], counted[bound.of]);
        let is_kept = now * 100 <= of * bound.percent;
        let line = format!("{}: {now} {}, {of} for {}", bound.case, words(set.unit), bound.of);
        let (count, line) = match is_kept {
            true => (&mut outcome.passed, format!("{line}: at most {} %", bound.percent)),
            false => (&mut outcome.failed, format!("FAIL {line}: more than {} %", bound.percent)),
        };
        *count += 1;
        outcome.lines.push(line);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::super::{Bound, SETS};
    use super::*;

    #[test]
    fn a_change_within_the_tolerance_is_little() {
        let change = |kept, now| change(Unit::Instructions, kept, now);
        assert_eq!(change(Some(1000), 1050), Change::Little);
        assert_eq!(change(Some(1000), 1051), Change::Grown);
        assert_eq!(change(Some(1000), 950), Change::Little);
        assert_eq!(change(Some(1000), 949), Change::Shrunk);
        assert_eq!(change(None, 1), Change::New);
    }

    #[test]
    fn a_figure_of_nothing_may_grow_by_little() {
        let (_, least) = Unit::Syncs.tolerance();
        assert_eq!(change(Unit::Syncs, Some(0), least), Change::Little);
        assert_eq!(change(Unit::Syncs, Some(0), least + 1), Change::Grown);
    }

    #[test]
    fn growth_fails_and_is_a_skip_under_another_compiler() {
        let kept = |count| Kept {
            arch: std::env::consts::ARCH.to_string(),
            rustc: "1".to_string(),
            figures: BTreeMap::from([("a".to_string(), count)]),
        };
        let sums = |name, kept, rustc| {
            let outcome = compare(&SETS[0], &BTreeMap::from([(name, 1000)]), &kept, rustc);
            (outcome.passed, outcome.failed, outcome.skipped)
        };
        assert_eq!(sums("a", kept(1000), "1"), (1, 0, 0));
        assert_eq!(sums("a", kept(2000), "1"), (1, 0, 0));
        assert_eq!(sums("a", kept(900), "1"), (0, 1, 0));
        assert_eq!(sums("a", kept(900), "2"), (0, 0, 1));
        assert_eq!(sums("b", kept(900), "2"), (0, 1, 0));
    }

    #[test]
    fn a_bound_that_is_passed_fails() {
        const BOUNDS: &[Bound] = &[Bound { case: "a", of: "b", percent: 130 }];
        let set = Set { name: "x", about: "", unit: Unit::Calls, cases: &[], bounds: BOUNDS };
        let sums = |now| {
            let outcome = check_bounds(&set, &BTreeMap::from([("a", now), ("b", 100)]));
            (outcome.passed, outcome.failed)
        };
        assert_eq!(sums(130), (1, 0));
        assert_eq!(sums(131), (0, 1));
    }
}
