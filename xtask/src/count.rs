//! `cargo xtask count`: the instructions that one request costs, counted by callgrind.
//!
//! Times differ from machine to machine and from minute to minute; instructions hardly do. A program runs under valgrind
//! twice, once with few requests and once with many. The difference, divided by the number of requests between the two,
//! leaves out the costs of start and end. There are two sets of cases; `--only SET` counts one of them:
//!
//! - `null`: the release build serves an empty disk (`null:`) over vhost-user and to a guest of the imitated Xen.
//! - `image`: the example `count_reads` of the crate `image` reads 4 KiB at a time from a disk of each format. All maps are
//!   in memory, and the store answers at once, so the figures are of the image code alone.
//!
//! The client of a server is an ordinary `spile load` on the same core, with the lowest priority. So the server has always answered
//! everything and gone to sleep before it sees the next batch, and a batch costs the same each time. Figures repeat to
//! 0.2 %. Single requests are not counted: whether the server sleeps before the next one depends on the host's other work
//! (12 % between two runs).
//!
//! io_uring does not work under every valgrind, so the threads engine runs; on this path only its way to sleep differs.
//! Reads are of 512 bytes, because some machines count a long fill with zeroes as one instruction a byte.
//!
//! The figures are kept in `xtask/counts/SET.json`. Growth of more than 5 % is a failure. A figure that shrinks by more is
//! reported, so that somebody runs `cargo xtask count --update`. Another compiler makes other code: then growth is a skip.

use crate::bench::kinds::Front;
use crate::bench::server::{Server, pinned, server_cores};
use crate::{Result, bench, shell};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The advice for a change that is wanted.
const UPDATE: &str = "keep it by `cargo xtask count --update`";

/// The change of a figure that is not reported, in per cent.
const TOLERANCE: u64 = 5;

/// Cases whose figures are kept in one file.
struct Set {
    /// The file's name without the extension.
    name: &'static str,
    /// What the file says of its figures.
    about: &'static str,
    cases: &'static [Case],
}

/// What is counted. Its name is the key in the file.
struct Case {
    name: &'static str,
    way: Way,
}

/// The way of the counted requests.
enum Way {
    /// A load on the server over vhost-user.
    Vhost(&'static [&'static str]),
    /// A load on the server from a Xen guest, with this access to the guest's memory.
    Blkif(&'static str, &'static [&'static str]),
    /// Reads from an image of this format, without a server.
    Image(&'static str),
}

const READ: &[&str] = &["--rw", "randread", "--bs", "512", "--depth", "32"];
const WRITE: &[&str] = &["--rw", "randwrite", "--bs", "4k", "--depth", "32"];

const SETS: &[Set] = &[
    Set {
        name: "null",
        about: "Instructions of the server for one request without a medium. Written by `cargo xtask count --update`.",
        cases: &[
            Case { name: "vhost-user read 512 depth 32", way: Way::Vhost(READ) },
            Case { name: "vhost-user write 4k depth 32", way: Way::Vhost(WRITE) },
            Case { name: "blkif persistent read 512 depth 32", way: Way::Blkif("persistent", READ) },
            Case { name: "blkif persistent write 4k depth 32", way: Way::Blkif("persistent", WRITE) },
            Case { name: "blkif copy write 4k depth 32", way: Way::Blkif("copy", WRITE) },
        ],
    },
    Set {
        name: "image",
        about: "Instructions of the image code for one read of 4 KiB, its maps in memory. Written by `cargo xtask count --update`.",
        cases: &[
            Case { name: "raw read 4k", way: Way::Image("raw") },
            Case { name: "vhd read 4k", way: Way::Image("vhd") },
            Case { name: "qcow2 read 4k", way: Way::Image("qcow2") },
        ],
    },
];

/// The server's options. They leave out all that depends on time: polling, and a second worker.
const STEADY: &[&str] = &["--engine", "threads", "--poll", "0", "--workers", "1"];
/// The longest wait until a disk is served.
const LIMIT: Duration = Duration::from_secs(60);

/// Requests in the short and in the long run.
const FEW: u64 = 640;
const MANY: u64 = 6400;

/// The programs that are counted; each is built when the first case needs it.
struct Programs {
    spile: OnceCell<PathBuf>,
    count_reads: OnceCell<PathBuf>,
    folder: PathBuf,
}

/// Counts the cases and compares them with the kept figures; `--update` keeps the new ones.
pub fn run(arguments: &[String]) -> Result<()> {
    let only = shell::option(arguments, "--only", String::new())?;
    let sets: Vec<&Set> = SETS.iter().filter(|set| only.is_empty() || set.name == only).collect();
    if sets.is_empty() {
        return Err(format!("there is no set `{only}`; there are null and image"));
    }
    if let Some(program) = ["valgrind", "nice"].into_iter().find(|program| !shell::on_path(program)) {
        println!("SKIP count: no {program}");
        println!("0 passed, 0 failed, {} skipped", sets.iter().map(|set| set.cases.len()).sum::<usize>());
        return Ok(());
    }
    let programs = Programs::new()?;
    let mut whole = Outcome::default();
    for set in sets {
        let count = |case: &Case| Ok((case.name, programs.count(case)?));
        let counted: BTreeMap<&str, u64> = set.cases.iter().map(count).collect::<Result<_>>()?;
        match shell::flag(arguments, "--update") {
            true => keep(set, &counted)?,
            false => whole.add(compare(&counted, &Kept::read(set)?, &rustc()?)),
        }
    }
    if shell::flag(arguments, "--update") { Ok(()) } else { whole.tell() }
}

impl Programs {
    fn new() -> Result<Self> {
        let folder = shell::target_dir().join("count");
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self { spile: OnceCell::new(), count_reads: OnceCell::new(), folder })
    }

    /// Instructions for one request.
    fn count(&self, case: &Case) -> Result<u64> {
        let few = self.instructions(case, FEW)?;
        let many = self.instructions(case, MANY)?;
        Ok(many.saturating_sub(few) / (MANY - FEW))
    }

    /// Instructions of a whole run with a number of requests.
    fn instructions(&self, case: &Case, requests: u64) -> Result<u64> {
        let file = self.folder.join(format!("{}-{requests}.callgrind", case.name.replace([' ', ','], "-")));
        match case.way {
            Way::Vhost(load) => run_vhost(self.spile()?, &file, load, requests),
            Way::Blkif(access, load) => run_blkif(self.spile()?, &file, access, load, requests),
            Way::Image(format) => run_image(self.count_reads()?, &file, format, requests),
        }
    }

    fn spile(&self) -> Result<&Path> {
        built(&self.spile, bench::spile)
    }

    fn count_reads(&self) -> Result<&Path> {
        built(&self.count_reads, count_reads)
    }
}

fn built(cell: &OnceCell<PathBuf>, build: impl FnOnce() -> Result<PathBuf>) -> Result<&Path> {
    match cell.get() {
        Some(program) => Ok(program),
        None => {
            let program = build()?;
            Ok(cell.get_or_init(|| program))
        }
    }
}

/// The example of the crate `image`: `SPILE_COUNT_READS`, else a release build.
fn count_reads() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("SPILE_COUNT_READS") {
        return Ok(named.into());
    }
    shell::run(shell::cargo().args(["build", "--release", "--package", "spile-image", "--example", "count_reads"]))?;
    Ok(shell::target_dir().join("release/examples/count_reads"))
}

fn run_image(program: &Path, file: &Path, format: &str, reads: u64) -> Result<u64> {
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--tool=callgrind"]).arg(format!("--callgrind-out-file={}", file.display()));
    shell::run(command.arg(program).arg(format).arg(reads.to_string()))?;
    total_in(file)
}

/// The client. It gets the core only while the server sleeps.
fn load(core: &str, spile: &Path, uri: &str, what: &[&str], requests: u64) -> Command {
    let mut command = pinned(core, "nice");
    command.args(["-n", "19"]).arg(spile).arg("load").arg(uri).arg("--json");
    command.args(what).args(["--ios", &requests.to_string()]).stdout(Stdio::null());
    command
}

fn run_vhost(spile: &Path, file: &Path, what: &[&str], requests: u64) -> Result<u64> {
    let socket = std::env::temp_dir().join(format!("spile-count-{}.sock", std::process::id()));
    let core = server_cores(1);
    let mut command = pinned(&core, "valgrind");
    command.arg("--tool=callgrind").arg(format!("--callgrind-out-file={}", file.display()));
    command.arg(spile).args(["serve", "null:1G", "--vhost-user"]).arg(&socket).args(STEADY);
    let server = Server::spawn(&mut command, socket, Front::Vhost)?;
    shell::run(&mut load(&core, spile, &server.uri(), what, requests))?;
    // It writes the file when it ends.
    drop(server);
    total_in(file)
}

/// The disk's process ends, and writes the file, when the load takes its disk away.
fn run_blkif(spile: &Path, file: &Path, access: &str, what: &[&str], requests: u64) -> Result<u64> {
    let lab = std::env::temp_dir().join(format!("spile-count-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&lab);
    std::fs::create_dir_all(&lab).map_err(|error| format!("{}: {error}", lab.display()))?;
    let _ = std::fs::remove_file(file);
    let core = server_cores(1);
    let host = Server::spawn(Command::new(spile).arg("xen-lab").arg(&lab), lab.join("xenstored"), Front::Nbd)?;
    let uri = format!("xen-lab:{}", lab.display());
    let what = [what, &["--params", "null:1G", "--access", access, "--domain", "7"]].concat();
    let mut client = load(&core, spile, &uri, &what, requests);
    let mut client = client.spawn().map_err(|error| format!("cannot run {client:?}: {error}"))?;
    let end = Instant::now() + LIMIT;
    let counted = loop {
        // Until the client has made its disk, there is nothing to serve.
        let mut command = pinned(&core, "valgrind");
        command.args(["--quiet", "--tool=callgrind"]).arg(format!("--callgrind-out-file={}", file.display()));
        command.arg(spile).arg("xen-disk").arg("--lab").arg(&lab).arg("--run-dir").arg(&lab).args(STEADY);
        command.arg("/local/domain/0/backend/vbd/7/51712").stdin(Stdio::null()).stdout(Stdio::null());
        let served = command.stderr(Stdio::null()).status();
        let served = served.map_err(|error| format!("cannot run {command:?}: {error}"))?;
        if served.success() || Instant::now() > end {
            break total_in(file);
        }
    };
    let client = client.wait().map_err(|error| format!("the client: {error}"))?;
    drop(host);
    let _ = std::fs::remove_dir_all(&lab);
    if client.success() { counted } else { Err(format!("the client: {client}")) }
}

fn total_in(file: &Path) -> Result<u64> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    total(&text).ok_or_else(|| format!("{}: no totals", file.display()))
}

/// The sum in callgrind's file.
fn total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("summary:").or(line.strip_prefix("totals:")));
    line?.trim().parse().ok()
}

/// The figures in the repository, and the compiler that they belong to.
struct Kept {
    arch: String,
    rustc: String,
    instructions: BTreeMap<String, u64>,
}

impl Kept {
    fn path(set: &Set) -> PathBuf {
        shell::root().join(format!("xtask/counts/{}.json", set.name))
    }

    fn read(set: &Set) -> Result<Kept> {
        let path = Self::path(set);
        let problem = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|error| problem(&error))?;
        let value: Value = serde_json::from_str(&text).map_err(|error| problem(&error))?;
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_string();
        let figures = value["instructions_per_request"].as_object().into_iter().flatten();
        let instructions = figures.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect();
        Ok(Kept { arch: word("arch"), rustc: word("rustc"), instructions })
    }
}

fn keep(set: &Set, counted: &BTreeMap<&str, u64>) -> Result<()> {
    let path = Kept::path(set);
    let whole = json!({
        "about": set.about, "arch": std::env::consts::ARCH, "rustc": rustc()?, "instructions_per_request": counted,
    });
    for (name, count) in counted {
        println!("{name}: {count} instructions per request");
    }
    std::fs::write(&path, format!("{whole:#}\n")).map_err(|error| format!("{}: {error}", path.display()))
}

fn rustc() -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    // In the workspace's folder, whose toolchain may be another one than that of the folder this was called from.
    let text = shell::output(Command::new(program).arg("--version").current_dir(shell::root()))?;
    Ok(text.trim().to_string())
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

fn change(kept: Option<u64>, now: u64) -> Change {
    let Some(kept) = kept else { return Change::New };
    match now * 100 {
        scaled if scaled > kept * (100 + TOLERANCE) => Change::Grown,
        scaled if scaled < kept * (100 - TOLERANCE) => Change::Shrunk,
        _ => Change::Little,
    }
}

/// The result of a comparison, and its messages.
#[derive(Default)]
struct Outcome {
    lines: Vec<String>,
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Outcome {
    fn add(&mut self, other: Outcome) {
        self.lines.extend(other.lines);
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Prints everything.
    ///
    /// # Errors
    /// When a case failed.
    fn tell(&self) -> Result<()> {
        self.lines.iter().for_each(|line| println!("{line}"));
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if self.failed == 0 { Ok(()) } else { Err(format!("{} failed", self.failed)) }
    }
}

fn compare(counted: &BTreeMap<&str, u64>, kept: &Kept, rustc: &str) -> Outcome {
    let is_same_compiler = kept.rustc == rustc && kept.arch == std::env::consts::ARCH;
    let mut outcome = Outcome::default();
    for (name, &now) in counted {
        let before = kept.instructions.get(*name).copied();
        let percent = before.map_or(f64::NAN, |before| (now as f64 / before as f64 - 1.0) * 100.0);
        let figures = format!("{name}: {now} instructions per request, {percent:+.1} % against those kept");
        let (count, line) = match change(before, now) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_found_in_callgrinds_file() {
        assert_eq!(total("version: 1\nevents: Ir\nsummary: 123\n\nfn=(1) main\n1 2\n"), Some(123));
        assert_eq!(total("events: Ir\ntotals: 7\n"), Some(7));
        assert_eq!(total("events: Ir\n"), None);
    }

    #[test]
    fn five_percent_are_allowed() {
        assert_eq!(change(Some(1000), 1050), Change::Little);
        assert_eq!(change(Some(1000), 1051), Change::Grown);
        assert_eq!(change(Some(1000), 950), Change::Little);
        assert_eq!(change(Some(1000), 949), Change::Shrunk);
        assert_eq!(change(None, 1), Change::New);
    }

    #[test]
    fn growth_fails_and_is_a_skip_under_another_compiler() {
        let kept = |count| Kept {
            arch: std::env::consts::ARCH.to_string(),
            rustc: "1".to_string(),
            instructions: BTreeMap::from([("a".to_string(), count)]),
        };
        let sums = |name, kept, rustc| {
            let outcome = compare(&BTreeMap::from([(name, 1000)]), &kept, rustc);
            (outcome.passed, outcome.failed, outcome.skipped)
        };
        assert_eq!(sums("a", kept(1000), "1"), (1, 0, 0));
        assert_eq!(sums("a", kept(2000), "1"), (1, 0, 0));
        assert_eq!(sums("a", kept(900), "1"), (0, 1, 0));
        assert_eq!(sums("a", kept(900), "2"), (0, 0, 1));
        assert_eq!(sums("b", kept(900), "2"), (0, 1, 0));
    }

    #[test]
    fn every_case_is_kept() {
        for set in SETS {
            let kept = Kept::read(set).expect("the file is in the repository").instructions;
            let names: Vec<&str> = kept.keys().map(String::as_str).collect();
            let mut cases: Vec<&str> = set.cases.iter().map(|case| case.name).collect();
            cases.sort_unstable();
            assert_eq!(names, cases);
        }
    }
}
