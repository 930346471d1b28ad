//! Sums of a stage, read from what it printed.

/// How many checks passed, failed and were skipped, and why those were.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Checks that held.
    pub passed: u64,
    /// Checks that did not, and stages that broke.
    pub failed: u64,
    /// Checks that could not be made here.
    pub skipped: u64,
    /// One `name: reason` for each skip.
    pub reasons: Vec<String>,
    /// One line for each failed check that the runner names.
    pub failures: Vec<String>,
}

/// How a stage tells its sums.
#[derive(Clone, Copy)]
pub enum Reader {
    /// The stage is one check: its exit code.
    Whole,
    /// The same, and a compiler that warns has failed.
    Silent,
    /// Our own runners: a last line `N passed, N failed, N skipped`, and `SKIP name: reason` lines.
    Tally,
    /// `cargo nextest run`.
    Nextest,
    /// `cargo test`.
    CargoTest,
}

impl Reader {
    /// Sums in `log`; `ended_well` is whether the program's exit code was 0.
    pub fn read(self, log: &str, ended_well: bool) -> Counts {
        let mut counts = match self {
            Reader::Silent if warns(log) => Counts::default(),
            Reader::Whole | Reader::Silent => Counts { passed: u64::from(ended_well), ..Counts::default() },
            Reader::Tally => tally(log),
            Reader::Nextest => nextest(log),
            Reader::CargoTest => cargo_test(log),
        };
        counts.reasons = log.lines().filter_map(skip_reason).collect();
        counts.failures = failures(log);
        if matches!(self, Reader::Nextest | Reader::CargoTest) {
            counts.move_self_skips();
        }
        let is_empty = ended_well && counts.passed + counts.skipped == 0 && self.must_count();
        // A stage that broke before it counted, or ran nothing at all, must not look well.
        if counts.failed == 0 && (!ended_well || is_empty) {
            counts.failed = 1;
        }
        counts
    }

    /// A workspace may have no doc tests; the other stages always have something to say.
    fn must_count(self) -> bool {
        !matches!(self, Reader::CargoTest)
    }
}

impl Counts {
    /// `N passed, N failed, N skipped`.
    pub fn line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }

    /// Adds the sums of `other`.
    pub fn add(&mut self, other: &Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reasons.extend(other.reasons.iter().cloned());
        self.failures.extend(other.failures.iter().cloned());
    }

    /// Rust's runners count a test that printed `SKIP` and returned as passed.
    fn move_self_skips(&mut self) {
        let moved = (self.reasons.len() as u64).min(self.passed);
        self.passed -= moved;
        self.skipped += moved;
    }
}

/// Has the compiler anything to say?
fn warns(log: &str) -> bool {
    log.lines().any(|line| line.starts_with("warning"))
}

/// The longest tests in a log, slowest first: (seconds, name). Both our runners' `passed  NAME (1.0 s)` and nextest's
/// `PASS [   1.0s] NAME` tell them.
pub fn slowest(log: &str, most: usize) -> Vec<(f64, String)> {
    let mut found: Vec<(f64, String)> = log.lines().filter_map(|line| timed(line.trim())).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    found.dedup_by(|a, b| a.1 == b.1);
    found.truncate(most);
    found
}

fn timed(line: &str) -> Option<(f64, String)> {
    if let Some(rest) = line.strip_prefix("passed ") {
        let (name, seconds) = rest.strip_suffix(" s)")?.rsplit_once(" (")?;
        return Some((seconds.parse().ok()?, name.trim().to_owned()));
    }
    let (seconds, name) = line.strip_prefix("PASS [")?.split_once("s]")?;
    Some((seconds.trim().parse().ok()?, name.trim().to_owned()))
}

/// The reason in a line `SKIP name: reason`, indented or not.
fn skip_reason(line: &str) -> Option<String> {
    line.trim().strip_prefix("SKIP ").map(str::to_string)
}

/// Names of failed checks: our runners' `failed NAME (1.0 s)` with the last line of what they say of
/// it, and nextest's `FAIL [ 1.0s] NAME`, which stands twice in a log.
fn failures(log: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("failed ") {
            let mut last = "";
            while let Some(detail) = lines.next_if(|line| line.starts_with("    ")) {
                last = detail.trim();
            }
            found.push(format!("{}: {last}", name.trim()));
        } else if let Some(name) = nextest_failure(line) {
            found.push(name.to_string());
        }
    }
    found.sort();
    found.dedup();
    found
}

fn nextest_failure(line: &str) -> Option<&str> {
    let (word, rest) = line.trim().split_once(" [")?;
    matches!(word, "FAIL" | "TIMEOUT" | "SIGNAL" | "SIGABRT" | "SIGSEGV" | "SIGBUS").then_some(())?;
    Some(rest.split_once(']')?.1.trim())
}

/// Our runners' last line.
fn tally(log: &str) -> Counts {
    let found = log.lines().rev().find_map(|line| {
        let (passed, rest) = line.trim().split_once(" passed, ")?;
        let (failed, rest) = rest.split_once(" failed, ")?;
        let skipped = rest.strip_suffix(" skipped")?;
        let number = |text: &str| text.parse::<u64>().ok();
        Some((number(passed)?, number(failed)?, number(skipped)?))
    });
    let (passed, failed, skipped) = found.unwrap_or_default();
    Counts { passed, failed, skipped, ..Counts::default() }
}

/// `Summary [ 1.2s] 9 tests run: 7 passed (1 slow), 2 failed, 3 skipped`.
fn nextest(log: &str) -> Counts {
    let summary = log.lines().rev().find(|line| line.trim_start().starts_with("Summary ["));
    let tail = summary.and_then(|line| line.split_once("run:")).map_or("", |(_, tail)| tail);
    Counts {
        passed: number_before(tail, "passed"),
        failed: number_before(tail, "failed") + number_before(tail, "timed out") + number_before(tail, "exec failed"),
        skipped: number_before(tail, "skipped"),
        ..Counts::default()
    }
}

/// `test result: ok. 9 passed; 0 failed; 1 ignored; …`, one line for each target.
fn cargo_test(log: &str) -> Counts {
    let mut counts = Counts::default();
    for line in log.lines().filter(|line| line.starts_with("test result:")) {
        counts.passed += number_before(line, "passed");
        counts.failed += number_before(line, "failed");
        counts.skipped += number_before(line, "ignored");
    }
    counts
}

/// The number that stands before `word` in `text`; 0 when it is not there.
fn number_before(text: &str, word: &str) -> u64 {
    let parts = text.split([',', ';', '.', '(']).map(str::trim);
    let mut numbers = parts.filter_map(|part| part.strip_suffix(word)?.trim().parse().ok());
    numbers.next().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(counts: &Counts) -> (u64, u64, u64) {
        (counts.passed, counts.failed, counts.skipped)
    }

    #[test]
    fn nextest_is_read() {
        let log = "  Summary [  12.5s] 12 tests run: 9 passed (1 slow), 3 failed, 2 skipped\n";
        assert_eq!(sums(&Reader::Nextest.read(log, false)), (9, 3, 2));
    }

    #[test]
    fn cargo_test_is_read_and_summed() {
        let line = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out;\n";
        assert_eq!(sums(&Reader::CargoTest.read(&line.repeat(2), true)), (6, 0, 2));
    }

    #[test]
    fn a_test_that_skips_itself_is_no_pass() {
        let log = "    SKIP uring: forbidden here\nSummary [ 1s] 2 tests run: 2 passed, 0 skipped\n";
        let counts = Reader::Nextest.read(log, true);
        assert_eq!(sums(&counts), (1, 0, 1));
        assert_eq!(counts.reasons, ["uring: forbidden here"]);
    }

    #[test]
    fn our_own_line_is_read() {
        let log = "SKIP fio: not installed\n4 passed, 0 failed, 1 skipped\n";
        let counts = Reader::Tally.read(log, true);
        assert_eq!(sums(&counts), (4, 0, 1));
        assert_eq!(counts.reasons.len(), 1);
    }

    #[test]
    fn failures_are_named() {
        let ours = "failed  a.b (3.3 s)\n    Traceback\n    No such file\npassed  c (1.0 s)\n";
        assert_eq!(Reader::Tally.read(ours, false).failures, ["a.b (3.3 s): No such file"]);
        let nextest = "  FAIL [   0.1s] (3/9) mem it::x\nSummary [ 1s] 9 tests run\n  FAIL [   0.1s] (3/9) mem it::x\n";
        assert_eq!(Reader::Nextest.read(nextest, false).failures, ["(3/9) mem it::x"]);
    }

    #[test]
    fn the_slowest_tests_are_told() {
        let log =
            "passed  a.b (3.3 s)\n        PASS [   4.125s] (1/9) mem it::x\npassed  c (0.5 s)\nfailed  d (9.0 s)\n";
        let expected = [(4.125, "(1/9) mem it::x".to_owned()), (3.3, "a.b".to_owned())];
        assert_eq!(slowest(log, 2), expected);
        assert_eq!(slowest("12 passed, 0 failed, 0 skipped\n", 2), []);
    }

    #[test]
    fn a_stage_that_broke_or_ran_nothing_is_a_failure() {
        assert_eq!(sums(&Reader::Tally.read("boom", false)), (0, 1, 0));
        assert_eq!(sums(&Reader::Tally.read("", true)), (0, 1, 0));
        assert_eq!(sums(&Reader::Nextest.read("", true)), (0, 1, 0));
        assert_eq!(sums(&Reader::Whole.read("", false)), (0, 1, 0));
        assert_eq!(sums(&Reader::Silent.read("   Compiling a\nwarning: unused\n", true)), (0, 1, 0));
        assert_eq!(sums(&Reader::Silent.read("   Compiling a\n", true)), (1, 0, 0));
        assert_eq!(sums(&Reader::Tally.read("4 passed, 0 failed, 0 skipped", false)), (4, 1, 0));
    }
}
