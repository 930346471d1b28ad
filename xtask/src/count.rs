//! `cargo xtask count`: the instructions that the server spends on one request, counted by callgrind.
//!
//! Times differ from machine to machine and from minute to minute; instructions hardly do. The release build serves an empty
//! disk (`null:`) under valgrind, over vhost-user and to a guest of the imitated Xen: once with few requests and once with
//! many. The difference, divided by the number of requests between the two, leaves out the costs of start and end.
//!
//! The client is an ordinary `spile load` on the same core, with the lowest priority. So the server has always answered
//! everything and gone to sleep before it sees the next batch, and a batch costs the same each time. Figures repeat to
//! 0.2 %. Single requests are not counted: whether the server sleeps before the next one depends on the host's other work
//! (12 % between two runs).
//!
//! io_uring does not work under every valgrind, so the threads engine runs; on this path only its way to sleep differs.
//! Reads are of 512 bytes, because some machines count a long fill with zeroes as one instruction a byte.
//!
//! The figures are kept in `xtask/counts/null.json`. Growth of more than 5 % is a failure. A figure that shrinks by more is
//! reported, so that somebody runs `cargo xtask count --update`. Another compiler makes other code: then growth is a skip.

use crate::bench::kinds::Front;
use crate::bench::server::{Server, pinned, server_cores};
use crate::{Result, bench, shell};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The advice for a change that is wanted.
const UPDATE: &str = "keep it by `cargo xtask count --update`";

/// The change of a figure that is not reported, in per cent.
const TOLERANCE: u64 = 5;

/// A load that is counted. Its name is the key in the file.
struct Case {
    name: &'static str,
    /// How the back end reaches a Xen guest's memory; none for vhost-user.
    access: Option<&'static str>,
    load: &'static [&'static str],
}

const READ: &[&str] = &["--rw", "randread", "--bs", "512", "--depth", "32"];
const WRITE: &[&str] = &["--rw", "randwrite", "--bs", "4k", "--depth", "32"];

const CASES: &[Case] = &[
    Case { name: "vhost-user read 512 depth 32", access: None, load: READ },
    Case { name: "vhost-user write 4k depth 32", access: None, load: WRITE },
    Case { name: "blkif persistent read 512 depth 32", access: Some("persistent"), load: READ },
    Case { name: "blkif persistent write 4k depth 32", access: Some("persistent"), load: WRITE },
    Case { name: "blkif copy write 4k depth 32", access: Some("copy"), load: WRITE },
];

/// The server's options. They leave out all that depends on time: polling, and a second worker.
const STEADY: &[&str] = &["--engine", "threads", "--poll", "0", "--workers", "1"];
/// The longest wait until a disk is served.
const LIMIT: Duration = Duration::from_secs(60);

/// Requests in the short and in the long run.
const FEW: u64 = 640;
const MANY: u64 = 6400;

/// Counts all cases and compares them with the kept figures; `--update` keeps the new ones.
pub fn run(arguments: &[String]) -> Result<()> {
    if let Some(program) = ["valgrind", "nice"].into_iter().find(|program| !shell::on_path(program)) {
        println!("SKIP count: no {program}");
        println!("0 passed, 0 failed, {} skipped", CASES.len());
        return Ok(());
    }
    let spile = bench::spile()?;
    let folder = shell::target_dir().join("count");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let counted: BTreeMap<&str, u64> =
        CASES.iter().map(|case| Ok((case.name, count(&spile, &folder, case)?))).collect::<Result<_>>()?;
    if shell::flag(arguments, "--update") {
        return keep(&counted);
    }
    let outcome = compare(&counted, &Kept::read()?, &rustc()?);
    outcome.lines.iter().for_each(|line| println!("{line}"));
    let Outcome { passed, failed, skipped, .. } = outcome;
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed")) }
}

/// Instructions for one request.
fn count(spile: &Path, folder: &Path, case: &Case) -> Result<u64> {
    let few = instructions(spile, folder, case, FEW)?;
    let many = instructions(spile, folder, case, MANY)?;
    Ok(many.saturating_sub(few) / (MANY - FEW))
}

/// Instructions of a whole run of the server with a number of requests.
fn instructions(spile: &Path, folder: &Path, case: &Case, requests: u64) -> Result<u64> {
    let name = format!("{}-{requests}.callgrind", case.name.replace([' ', ','], "-"));
    match case.access {
        Some(access) => run_blkif(spile, &folder.join(name), access, case.load, requests),
        None => run_vhost(spile, &folder.join(name), case.load, requests),
    }
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
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    total(&text).ok_or_else(|| format!("{}: no totals", file.display()))
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
            let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            break total(&text).ok_or_else(|| format!("{}: no totals", file.display()));
        }
    };
    let client = client.wait().map_err(|error| format!("the client: {error}"))?;
    drop(host);
    let _ = std::fs::remove_dir_all(&lab);
    if client.success() { counted } else { Err(format!("the client: {client}")) }
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
    fn path() -> PathBuf {
        shell::root().join("xtask/counts/null.json")
    }

    fn read() -> Result<Kept> {
        let path = Self::path();
        let problem = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|error| problem(&error))?;
        let value: Value = serde_json::from_str(&text).map_err(|error| problem(&error))?;
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_string();
        let figures = value["instructions_per_request"].as_object().into_iter().flatten();
        let instructions = figures.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect();
        Ok(Kept { arch: word("arch"), rustc: word("rustc"), instructions })
    }
}

fn keep(counted: &BTreeMap<&str, u64>) -> Result<()> {
    let path = Kept::path();
    let about = "Instructions of the server for one request without a medium. \
                 Written by `cargo xtask count --update`.";
    let whole = json!({
        "about": about, "arch": std::env::consts::ARCH, "rustc": rustc()?, "instructions_per_request": counted,
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
        let kept = Kept::read().expect("the file is in the repository").instructions;
        let names: Vec<&str> = kept.keys().map(String::as_str).collect();
        let mut cases: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        cases.sort_unstable();
        assert_eq!(names, cases);
    }
}
